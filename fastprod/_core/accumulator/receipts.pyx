# What bulk calls are told: counts, failures, offsets.

cdef void block_release(block_t* block) noexcept nogil:
    if block != NULL:
        block.refs -= 1
        if block.refs == 0:
            if block.receipt != NULL:
                receipt_release(block.receipt)
            free(block.failures)
            free(block)


cdef void receipt_release(receipt_t* receipt) noexcept nogil:
    receipt.refs -= 1
    if receipt.refs == 0:
        free(receipt.extents)
        free(receipt)


cdef int _block_add_failure(block_t* block, int64_t index, int32_t error, int32_t partition) noexcept nogil:
    """Notes a failed record; when even that finds no memory the receipt's count still tells (-1)."""
    cdef int64_t capacity
    cdef void* grown
    if block.failure_count == block.failure_capacity:
        capacity = max(16, block.failure_capacity * 2)
        grown = realloc(block.failures, capacity * sizeof(failure_t))
        if grown == NULL:
            return -1
        block.failures = <failure_t*>grown
        block.failure_capacity = capacity
    block.failures[block.failure_count].index = index
    block.failures[block.failure_count].error = error
    block.failures[block.failure_count].partition = partition
    block.failure_count += 1
    return 0


cdef int _receipt_add_extent(receipt_t* receipt, lane_t* lane, int64_t acknowledged, const run_t* run) noexcept nogil:
    """Adds what a run wrote. The lane remembers the place, which saves the search in topics of many partitions."""
    cdef extent_t* extent = NULL
    cdef int32_t i, capacity
    cdef void* grown
    if lane.extent_at < receipt.extent_count:
        extent = &receipt.extents[lane.extent_at]
        if extent.partition != lane.partition or extent.topic != lane.topic:
            extent = NULL
    if extent == NULL:
        for i in range(receipt.extent_count - 1, -1, -1):
            if receipt.extents[i].partition == lane.partition and receipt.extents[i].topic == lane.topic:
                extent = &receipt.extents[i]
                break
    if extent == NULL:
        if receipt.extent_count == receipt.extent_capacity:
            capacity = max(8, receipt.extent_capacity * 2)
            grown = realloc(receipt.extents, capacity * sizeof(extent_t))
            if grown == NULL:
                return -1
            receipt.extents = <extent_t*>grown
            receipt.extent_capacity = capacity
        extent = &receipt.extents[receipt.extent_count]
        receipt.extent_count += 1
        extent.topic = lane.topic
        extent.partition = lane.partition
        extent.records = extent.unknown = 0
        extent.first = extent.last = -1
    lane.extent_at = <int32_t>(extent - receipt.extents)
    extent.records += acknowledged
    extent.unknown += run.unknown
    if run.first_offset >= 0 and (extent.first < 0 or run.first_offset < extent.first):
        extent.first = run.first_offset
    if run.last_offset > extent.last:
        extent.last = run.last_offset
    return 0
