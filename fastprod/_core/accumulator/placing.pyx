# Putting a record into its lane: the chunk, and the batch that Java would be filling.

cdef void _start_run(run_t* run, uint32_t start, block_t* block) noexcept nogil:
    run.next = NULL
    run.block = block
    run.first_offset = run.last_offset = -1
    run.start = start
    run.failed = run.moved = run.unknown = 0
    if block != NULL:
        block.refs += 1


cdef inline uint32_t _run_bytes(chunk_t* chunk) noexcept nogil:
    """What another run takes of the data, alignment included."""
    return ((chunk.used + 7) & ~7U) - chunk.used + sizeof(run_t)


cdef void _add_run(chunk_t* chunk, block_t* block) noexcept nogil:
    cdef run_t* run = <run_t*>(data_of(chunk) + ((chunk.used + 7) & ~7U))
    chunk.used += _run_bytes(chunk)
    _start_run(run, chunk.count, block)
    chunk.last_run.next = run
    chunk.last_run = run


cdef inline bint _is_full(chunk_t* chunk, int64_t data) noexcept nogil:
    return chunk.used + data + <int64_t>(chunk.count + 1) * chunk.stride > chunk.capacity


cdef inline bint _fills_request(accumulator_t* acc, chunk_t* chunk, int64_t bytes) noexcept nogil:
    """Whether the chunk would be more than one request with so many bytes more."""
    return acc.request_bytes and (
        chunk.count >= acc.request_records
        or bytes_on_wire(chunk) + bytes + RECORD_BYTES > acc.request_bytes
    )


cdef inline bint _is_too_old(accumulator_t* acc, lane_t* lane, chunk_t* chunk) noexcept nogil:
    """Whether a record of now would be wrong about its age and timestamp, which are the chunk's."""
    if acc.place_us:
        return acc.place_us - chunk.created_us > SPAN_US
    if lane == lane.topic.undecided or acc.linger_us > SPAN_US:
        return fp_about_now_us() - chunk.created_us > SPAN_US
    return fp_about_now_us() - chunk.created_us > acc.span_us


cdef int _place(accumulator_t* acc, lane_t* lane, record_t* record) noexcept nogil:
    """Copies (or points to) the record in the lane's last chunk. Changes nothing when it fails."""
    cdef bint undecided = lane == lane.topic.undecided
    cdef bint single = record.headers != NULL or record.timestamp != 0
    cdef bint rich = single or record.callback != NULL
    cdef uint32_t stride = sizeof(slot_t) + (sizeof(rich_t) if rich else 0)
    cdef int64_t size = record.size if record.size > 0 else 0
    cdef int64_t key_size = record.key_size if record.key_size > 0 else 0
    cdef int64_t data = record.headers_size
    cdef int64_t extra = 0  # what the record takes of the pool beyond the chunk
    cdef chunk_t* chunk = lane.tail
    cdef slot_t* slot
    cdef rich_t* more = NULL
    cdef char* to
    cdef int status
    if record.by_reference:
        extra = size + key_size
    else:
        data += size + key_size
    if (
        chunk == NULL
        or chunk.sealed
        or chunk.epoch != acc.place_epoch
        or (rich and not chunk.rich)
        or chunk.aged != (acc.place_us != 0)  # later records must not inherit the age of those that waited
        or _is_too_old(acc, lane, chunk)
        or _is_full(chunk, data + (_run_bytes(chunk) if chunk.last_run.block != record.block else 0))
        or _fills_request(acc, chunk, record.headers_size + size + key_size)
    ):
        if chunk != NULL and lane.size_class < SIZE_CLASSES - 1 and not chunk.sealed and _is_full(chunk, data):
            lane.size_class += 1
        if chunk != NULL:
            _seal(acc, chunk)
        status = _chunk_new(acc, lane, data, stride, extra, &chunk)
        if status != APPEND_OK:
            return status
        chunk.rich = rich
        chunk.aged = acc.place_us != 0
        _start_run(&chunk.runs, 0, record.block)
        chunk.last_run = chunk.ending = &chunk.runs
        if lane.tail == NULL:
            lane.head = chunk
        else:
            lane.tail.next = chunk
        lane.tail = chunk
        acc.used += extra
        chunk.charge += extra
    elif not _draw(acc, chunk, extra):
        return APPEND_NO_ROOM
    elif chunk.last_run.block != record.block:
        _add_run(chunk, record.block)

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
        more.partition = lane.partition
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
        slot.key = record.key if record.key_size >= 0 else NULL
    else:
        slot.payload = NULL
        if record.size >= 0:
            slot.payload = to
            memcpy(to, record.value, size)
        slot.key = NULL
        if record.key_size >= 0:
            slot.key = to + size
            memcpy(to + size, record.key, key_size)
    chunk.count += 1
    if acc.spare:
        _set_aside(acc, chunk, acc.spare - (chunk.charge if chunk.count == 1 else extra))
        acc.spare = 0
    fp_grow64(&acc.records, 1)
    if queued_records(lane) == 0:
        fp_store64(&lane.progress_us, chunk.created_us)
    fp_grow64(&lane.in_records, 1)
    fp_grow64(&lane.in_bytes, size + key_size)
    if undecided:
        return APPEND_OK
    if acc.place_epoch != acc.epoch:  # waited for metadata, and somebody has flushed meanwhile
        _enlist(acc, lane, LIST_READY)
    elif lane.where == LIST_NONE:
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
        if lane.where != LIST_NONE:
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
