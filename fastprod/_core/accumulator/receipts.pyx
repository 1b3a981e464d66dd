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


cdef int _receipt_add_extent(
    receipt_t* receipt, topic_t* topic, int32_t partition, int64_t records, int64_t first, int64_t last, int32_t* hint
) noexcept nogil:
    """`hint` remembers the place for the next time, which saves the search in topics of many partitions."""
    cdef extent_t* extent = NULL
    cdef int32_t i, capacity
    cdef void* grown
    if hint != NULL and hint[0] < receipt.extent_count:
        extent = &receipt.extents[hint[0]]
        if extent.partition != partition or extent.topic != topic:
            extent = NULL
    if extent == NULL:
        for i in range(receipt.extent_count - 1, -1, -1):
            if receipt.extents[i].partition == partition and receipt.extents[i].topic == topic:
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
        extent.topic = topic
        extent.partition = partition
        extent.records = 0
        extent.first = extent.last = -1
    if hint != NULL:
        hint[0] = <int32_t>(extent - receipt.extents)
    extent.records += records
    if first >= 0 and (extent.first < 0 or first < extent.first):
        extent.first = first
    if last > extent.last:
        extent.last = last
    return 0
