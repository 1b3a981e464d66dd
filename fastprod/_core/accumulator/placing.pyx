# Putting a record into its lane: the chunk, and the batch that Java would be filling.

cdef int _place(accumulator_t* acc, lane_t* lane, record_t* record) noexcept nogil:
    """Copies (or points to) the record in the lane's last chunk. Changes nothing when it fails."""
    cdef topic_t* topic = lane.topic
    cdef bint unassigned = lane == topic.unassigned
    cdef bint undecided = lane == topic.undecided
    cdef bint single = record.headers != NULL or record.timestamp != 0 or (unassigned and record.partition >= 0)
    cdef bint rich = single or record.callback != NULL or (unassigned and record.block != NULL)
    cdef uint32_t stride = sizeof(slot_t) + (sizeof(rich_t) if rich else 0)
    cdef int64_t size = record.size if record.size > 0 else 0
    cdef int64_t key_size = record.key_size if record.key_size > 0 else 0
    cdef int64_t data = record.headers_size
    cdef int64_t extra = acc.record_overhead
    cdef chunk_t* chunk = lane.tail
    cdef slot_t* slot
    cdef rich_t* more = NULL
    cdef char* to
    cdef int status
    if record.by_reference:
        extra += size + key_size
    else:
        data += size + key_size
        if unassigned:
            data += BACKREF_BYTES
    if (
        chunk == NULL
        or chunk.sealed
        or chunk.epoch != acc.place_epoch
        or chunk.block != record.block
        or chunk.by_reference != record.by_reference
        or (rich and not chunk.rich)
        # Age and timestamp are the chunk's: where records may wait long, a chunk spans little time.
        or (
            (undecided or acc.place_us or acc.linger_us > SPAN_US)
            and (acc.place_us if acc.place_us else fp_now_us()) - chunk.created_us > SPAN_US
        )
        or chunk.used + data + (chunk.count + 1) * chunk.stride > chunk.capacity
    ):
        if chunk != NULL and lane.size_class < SIZE_CLASSES - 1 and not chunk.sealed and (
            chunk.used + data + (chunk.count + 1) * chunk.stride > chunk.capacity
        ):
            lane.size_class += 1
        status = _chunk_new(acc, lane, data, stride, extra, &chunk)
        if status != APPEND_OK:
            return status
        chunk.rich = rich
        chunk.by_reference = record.by_reference
        chunk.block = record.block
        if record.block != NULL:
            record.block.refs += 1
        if lane.tail == NULL:
            lane.head = chunk
        else:
            lane.tail.sealed = 1
            lane.tail.next = chunk
        lane.tail = chunk
    elif not pool_has_room(acc, extra):
        return APPEND_NO_ROOM

    to = data_of(chunk) + chunk.used
    chunk.used += <uint32_t>data
    slot = slot_at(chunk, chunk.count)
    slot.size = <uint32_t>size
    slot.key_size = <uint32_t>key_size
    slot.index = record.index
    slot.state = record.partition if undecided else PENDING
    if chunk.rich:
        more = rich_at(chunk, chunk.count)
        more.callback = record.callback
        more.headers = NULL
        more.timestamp = record.timestamp
        more.offset = -1
        more.clock_us = 0
        more.partition = record.partition if unassigned else lane.partition
        more.timestamp_type = 0
        if record.callback != NULL:
            chunk.callbacks += 1
            more.clock_us = record.clock_us if record.clock_us else fp_now_us()
        if record.headers != NULL:
            more.headers = to
            memcpy(to, record.headers, record.headers_size)
            to += record.headers_size
        if single:
            chunk.single = 1
    if record.by_reference:
        slot.payload = record.value
        slot.key = record.key
    else:
        if unassigned:  # acknowledgements of this lane come in no order: say where the record is
            memcpy(to, &chunk, sizeof(chunk_t*))
            memcpy(to + sizeof(chunk_t*), &chunk.count, sizeof(uint32_t))
            to += BACKREF_BYTES
        slot.payload = NULL
        if record.size >= 0:
            slot.payload = to
            memcpy(to, record.value, size)
        slot.key = NULL
        if record.key_size >= 0:
            slot.key = to + size
            memcpy(to + size, record.key, key_size)
    chunk.count += 1
    chunk.charge += extra
    acc.used += extra
    acc.records += 1
    if queued_records(lane) == 0:
        fp_store64(&lane.progress_us, chunk.created_us)
    lane.in_records += 1
    lane.in_bytes += size + key_size
    if acc.place_us and not undecided:  # has waited for metadata, perhaps flushed meanwhile: no linger on top
        _enlist(acc, lane, LIST_READY)
    elif lane.where == LIST_NONE and not undecided:
        lane.first_us = fp_now_us()
        lane.retry_us = 0
        _enlist(acc, lane, LIST_LINGER if acc.linger_us else LIST_READY)
    return APPEND_OK


cdef inline bint _has_room(lane_t* lane, int64_t size) noexcept nogil:
    return lane.batch_records == 0 or lane.batch_bytes + size <= lane.batch_limit


cdef inline int64_t _wire_size(lane_t* lane, record_t* record) noexcept nogil:
    """Bytes of the record as the next one of the lane's batch."""
    return record_wire_size(
        lane.batch_records if lane.batch_open else 0, record.key_size, record.size, headers_wire(record)
    )


cdef inline int64_t _make_room(accumulator_t* acc, lane_t* lane, record_t* record) noexcept nogil:
    """Closes the lane's batch if the record does not fit; returns the record's size in the batch it will go to."""
    cdef int64_t size = _wire_size(lane, record)
    if lane.batch_open and not _has_room(lane, size):
        lane.batch_open = False
        if lane.where == LIST_LINGER:
            _enlist(acc, lane, LIST_READY)
        size = _wire_size(lane, record)
    return size


cdef inline int64_t _count_in_batch(
    accumulator_t* acc, lane_t* lane, record_t* record, int64_t size, bint* full
) noexcept nogil:
    """Adds the record to the batch that Java would be filling; returns the bytes this appended."""
    cdef int64_t appended = size
    if not lane.batch_open:
        lane.batch_open = True
        lane.batch_records = 0
        lane.batch_bytes = BATCH_HEADER_BYTES
        lane.batch_limit = max(
            acc.sticky_bytes, record_upper_bound(record.key_size, record.size, headers_wire(record))
        )
        appended += BATCH_HEADER_BYTES
    lane.batch_bytes += size
    lane.batch_records += 1
    full[0] = lane.batch_bytes >= lane.batch_limit
    if full[0]:
        _enlist(acc, lane, LIST_READY)
    return appended
