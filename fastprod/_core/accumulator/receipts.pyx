# What bulk calls are told: counts, failures, offsets.

cdef void block_release(block_t* block) noexcept nogil:
    cdef int64_t i
    if block != NULL:
        block.refs -= 1
        if block.refs == 0:
            if block.receipt != NULL:
                receipt_release(block.receipt)
            for i in range(block.failure_count):
                free(block.failures[i].copy)
            free(block.failures)
            free(block)


cdef void receipt_release(receipt_t* receipt) noexcept nogil:
    receipt.refs -= 1
    if receipt.refs == 0:
        free(receipt.extents)
        free(receipt)


cdef int _block_add_failure(block_t* block, topic_t* topic, const slot_t* slot, int32_t partition) noexcept nogil:
    """Notes a failed record; when even that finds no memory the receipt's count still tells (-1)."""
    cdef int64_t capacity
    cdef void* grown
    cdef failure_t* failure
    if block.failure_count == block.failure_capacity:
        capacity = max(16, block.failure_capacity * 2)
        grown = realloc(block.failures, capacity * sizeof(failure_t))
        if grown == NULL:
            return -1
        block.failures = <failure_t*>grown
        block.failure_capacity = capacity
    failure = &block.failures[block.failure_count]
    failure.index = slot.index
    failure.topic = topic
    failure.error = error_of(slot)
    failure.partition = partition
    failure.copy = NULL
    if block.fleeting:
        _copy_failed(failure, slot)
    block.failure_count += 1
    return 0


cdef void _copy_failed(failure_t* failure, const slot_t* slot) noexcept nogil:
    """Takes a record out of its chunk, the only place that still has it for sure; nothing when memory is short."""
    failure.copy = <char*>malloc(<size_t>slot.size + slot.key_size + 1)  # at least one: NULL is no copy
    if failure.copy == NULL:
        return
    failure.size = failure.key_size = -1
    if slot.payload != NULL:
        failure.size = <int32_t>slot.size
        memcpy(failure.copy, slot.payload, slot.size)
    if slot.key != NULL:
        failure.key_size = <int32_t>slot.key_size
        memcpy(failure.copy + slot.size, slot.key, slot.key_size)


cdef extent_t* _extent_place(extent_t* extents, int32_t capacity, topic_t* topic, int32_t partition) noexcept nogil:
    """Where a partition is kept in a table of a power of two places, or the free one where it would be."""
    cdef uint32_t place = (topic.hash ^ <uint32_t>partition * 2654435761U) & <uint32_t>(capacity - 1)
    while extents[place].topic != NULL and (extents[place].partition != partition or extents[place].topic != topic):
        place = (place + 1) & <uint32_t>(capacity - 1)
    return &extents[place]


cdef int _grow_extents(receipt_t* receipt) noexcept nogil:
    cdef int32_t i, capacity = max(8, receipt.extent_capacity * 2)
    cdef extent_t* grown = <extent_t*>calloc(capacity, sizeof(extent_t))
    cdef extent_t* extent
    if grown == NULL:
        return -1
    for i in range(receipt.extent_capacity):
        extent = &receipt.extents[i]
        if extent.topic != NULL:
            _extent_place(grown, capacity, extent.topic, extent.partition)[0] = extent[0]
    free(receipt.extents)
    receipt.extents = grown
    receipt.extent_capacity = capacity
    return 0


cdef int _receipt_add_extent(receipt_t* receipt, lane_t* lane, int64_t acknowledged, const run_t* run) noexcept nogil:
    """Adds what a run wrote; without memory for it, -1."""
    cdef extent_t* extent
    if receipt.extent_count * 2 >= receipt.extent_capacity and _grow_extents(receipt) < 0:
        return -1
    extent = _extent_place(receipt.extents, receipt.extent_capacity, lane.topic, lane.partition)
    if extent.topic == NULL:
        receipt.extent_count += 1
        extent.topic = lane.topic
        extent.partition = lane.partition
        extent.first = extent.last = -1
    extent.records += acknowledged
    extent.unknown += run.unknown
    if run.first_offset >= 0 and (extent.first < 0 or run.first_offset < extent.first):
        extent.first = run.first_offset
    if run.last_offset > extent.last:
        extent.last = run.last_offset
    return 0
