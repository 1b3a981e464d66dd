# Which lane a record goes to, at once or when metadata has come.

cdef int _append_uniform(accumulator_t* acc, topic_t* topic, record_t* record, int32_t* partition) noexcept nogil:
    cdef sticky_t* sticky = &topic.sticky
    cdef int64_t size, appended, produced
    cdef lane_t* lane
    cdef bint full
    cdef int status
    if sticky.partition < 0:
        sticky.partition = choose(acc, topic, 0)
    while True:
        lane = lane_of(acc, topic, sticky.partition)
        if lane == NULL:
            return APPEND_NO_MEMORY
        size = _make_room(acc, lane, record)
        if lane.batch_open and lane.batch_bytes < lane.batch_limit:
            break
        # Since the last record the batch has filled up or gone: the switch that it held back is due now.
        produced = sticky.produced
        if not sticky_append(sticky, 0, True):
            break
        sticky.partition = choose(acc, topic, produced)
    status = _place(acc, lane, record)
    if status != APPEND_OK:
        if status == APPEND_NO_ROOM and acc.adaptive and topic.available_count:
            acc.short = True
            if topic.full_us == 0:
                rebuild_table(acc, topic, fp_now_us())
                topic.full_us = topic.table_us
        return status
    partition[0] = lane.partition
    appended = _count_in_batch(acc, lane, record, size, &full)
    produced = sticky.produced + appended
    if sticky_append(sticky, appended, full):
        sticky.partition = choose(acc, topic, produced)
    return APPEND_OK


cdef inline bint _is_keyed(accumulator_t* acc, const record_t* record) noexcept nogil:
    """Whether the key decides on the partition."""
    if acc.ignore_keys:
        return False
    return record.key_size > 0 or (acc.hash_null if record.key_size < 0 else not acc.spread_empty)


cdef inline int32_t _partition_of_key(accumulator_t* acc, topic_t* topic, const record_t* record) noexcept nogil:
    if acc.hash != NULL:
        return acc.hash(NULL, record.key, max(record.key_size, 0), topic.partitions, NULL, NULL)
    return (murmur2_bytes(<const unsigned char*>record.key, record.key_size) & 0x7fffffff) % topic.partitions


cdef int append(accumulator_t* acc, topic_t* topic, record_t* record, int32_t* partition) noexcept nogil:
    """Takes a record in, if anything is taken now. On APPEND_OK the reference to its callback is the accumulator's."""
    cdef int status
    if acc.gate:
        return APPEND_CLOSED if acc.gate == GATE_CLOSED else APPEND_NO_TRANSACTION
    status = _route(acc, topic, record, partition)
    if status == APPEND_OK and record.block != NULL:
        record.block.taken += 1
        record.block.receipt.accepted += 1
        record.block.receipt.bytes += max(record.size, 0) + max(record.key_size, 0)
    return status


cdef int _route(accumulator_t* acc, topic_t* topic, record_t* record, int32_t* partition) noexcept nogil:
    """Decides where a record goes and places it there."""
    cdef int32_t wanted = record.partition
    cdef lane_t* lane
    cdef int64_t size
    cdef int status
    cdef bint full, in_turn = False, in_part = False
    partition[0] = -1
    if topic.partitions == 0 or (not acc.overdraft and (topic.undecided.head != NULL or topic.routing)):
        return _place(acc, topic.undecided, record)
    if wanted < 0:
        if acc.policy == POLICY_PYTHON:
            return APPEND_NO_CHOICE
        if _is_keyed(acc, record):
            wanted = _partition_of_key(acc, topic, record)
        elif acc.policy == POLICY_UNIFORM:
            return _append_uniform(acc, topic, record, partition)
        elif acc.policy == POLICY_STICKY:
            wanted = topic.sticky.partition
            if wanted < 0:
                wanted = _choose_other(acc, topic, -1)
            lane = topic.lanes.lanes[wanted]
            if lane == NULL or not lane.batch_open or not _has_room(lane, _wire_size(lane, record)):
                wanted = _choose_other(acc, topic, wanted)
            topic.sticky.partition = wanted
        elif acc.policy == POLICY_PARTIAL:
            in_part = True
            wanted = partial_next(&topic.partial, topic.leaders)
        else:
            in_turn = True
            if topic.available_count:
                wanted = topic.available[topic.turn % <uint64_t>topic.available_count]
            else:
                wanted = <int32_t>(topic.turn % <uint64_t>topic.partitions)
    elif wanted >= topic.partitions:
        fp_store64(&topic.doubtful, 1)  # it may be new
        return APPEND_UNKNOWN_PARTITION
    lane = lane_of(acc, topic, wanted)
    if lane == NULL:
        return APPEND_NO_MEMORY
    size = _make_room(acc, lane, record)
    status = _place(acc, lane, record)
    if status != APPEND_OK:
        return status
    if in_turn:
        topic.turn += 1
    elif in_part:
        partial_advance(&topic.partial)
    partition[0] = lane.partition
    _count_in_batch(acc, lane, record, size, &full)
    return APPEND_OK


cdef int64_t append_run(
    accumulator_t* acc, topic_t* topic, block_t* block, const column_t* values, int64_t start, int64_t stop, int64_t first,
    int64_t below,
) noexcept nogil:
    """Key-less values for the partition whose turn it is, up to the first that needs a decision; returns how many.

    What `append` does for each of them, less what cannot change in between: they share the lane, its last chunk and
    its batch, and that stays open. Half the cost of a small record in a bulk call.
    `first` is the call's index of element 0; values of `below` bytes and more are left to `append`.
    """
    cdef lane_t* lane
    cdef chunk_t* chunk
    cdef slot_t* slot
    cdef const char* value
    cdef char* to
    cdef int64_t size, wire, total = 0, i = start, capacity, left = topic.sticky.bound * 2 - topic.sticky.produced
    if topic.sticky.partition < 0 or acc.linger_us > SPAN_US or acc.place_us or acc.overdraft:
        return 0
    lane = topic.lanes.lanes[topic.sticky.partition]
    if lane == NULL or not lane.batch_open or lane.tail == NULL:
        return 0
    chunk = lane.tail
    if chunk.sealed or chunk.rich or chunk.aged or chunk.last_run.block != block or chunk.epoch != acc.place_epoch:
        return 0
    if _is_too_old(acc, lane, chunk):
        return 0
    capacity = chunk.capacity
    if acc.request_bytes:
        stop = min(stop, start + acc.request_records - chunk.count)
        capacity = min(capacity, acc.request_bytes - _pinned_bytes(chunk))
    while i < stop and column_get(values, i, &value, &size) == CELL_VALUE and size < below:
        wire = record_wire_size(lane.batch_records, -1, size, 1)
        if (
            lane.batch_bytes + wire >= lane.batch_limit
            or wire >= left
            or chunk.used + size + (chunk.count + 1) * chunk.stride > capacity
        ):
            break
        to = data_of(chunk) + chunk.used
        memcpy(to, value, size)
        slot = slot_at(chunk, chunk.count)
        slot.payload = to
        slot.key = NULL
        slot.size = <uint32_t>size
        slot.key_size = 0
        slot.index = <uint32_t>(first + i)
        slot.state = PENDING
        chunk.used += <uint32_t>size
        chunk.count += 1
        lane.batch_records += 1
        lane.batch_bytes += wire
        left -= wire
        total += size
        i += 1
    topic.sticky.produced = topic.sticky.bound * 2 - left
    i -= start
    fp_grow64(&acc.records, i)
    fp_grow64(&lane.in_records, i)
    fp_grow64(&lane.in_bytes, total)
    if block != NULL:
        block.taken += i
        block.receipt.accepted += i
        block.receipt.bytes += total
    return i


cdef inline bint _is_pinned(chunk_t* chunk, slot_t* slot) noexcept nogil:
    """Whether the value is in a buffer of the caller."""
    return slot.payload != NULL and not data_of(chunk) <= slot.payload <= data_of(chunk) + chunk.capacity


cdef int route_undecided(accumulator_t* acc, topic_t* topic, int32_t* wanted) noexcept nogil:
    """Moves the oldest chunk of records that waited for metadata to their lanes, in order.

    `wanted` holds the choices of a Python partitioner for it, or is NULL. Records already admitted may exceed the pool
    by one chunk while they move. Returns 1 when a chunk was moved, 0 when none waits, -1 when memory is short: what is
    left then follows by another call.
    """
    cdef lane_t* lane = topic.undecided
    cdef chunk_t* chunk = lane.head
    cdef slot_t* slot
    cdef rich_t* more = NULL
    cdef run_t* run
    cdef record_t record
    cdef uint32_t i
    cdef int32_t partition
    cdef int status = APPEND_OK
    cdef int32_t error
    cdef int64_t before = acc.live_chunks
    if chunk == NULL:
        return 0
    # Records keep their place in flush and their age, so that the delivery timeout counts from produce.
    acc.overdraft = True
    acc.place_epoch = chunk.epoch
    acc.place_us = chunk.created_us
    acc.place_ms = chunk.created_ms
    for i in range(chunk.resolved, chunk.count):
        slot = slot_at(chunk, i)
        run = _run_of(chunk, i)
        memset(&record, 0, sizeof(record_t))
        record.value = slot.payload
        record.size = slot.size if slot.payload != NULL else -1
        record.key = slot.key
        record.key_size = slot.key_size if slot.key != NULL else -1
        record.partition = slot.state
        record.index = slot.index
        record.block = run.block
        record.by_reference = _is_pinned(chunk, slot)
        if wanted != NULL and slot.state < 0:
            record.partition = wanted[i]
        if chunk.rich:
            more = rich_at(chunk, i)
            record.callback = more.callback
            record.timestamp = more.timestamp
            record.headers = more.headers
            record.clock_us = more.clock_us
            if more.headers != NULL:
                record.headers_size = headers_head(more.headers).size
        status = APPEND_NO_CHOICE
        if record.partition != CHOICE_FAILED:
            status = _route(acc, topic, &record, &partition)
        if status == APPEND_NO_MEMORY:
            break
        if status == APPEND_OK:
            fp_grow64(&lane.in_records, -1)
            lane.in_bytes -= <int64_t>slot.size + slot.key_size
            slot.state = MOVED
            chunk.moved += 1
            run.moved += 1
            chunk.resolved += 1
            fp_grow64(&acc.records, -1)
            if chunk.rich and more.callback != NULL:
                more.callback = NULL
                chunk.callbacks -= 1
        else:
            if chunk.rich:
                more.partition = record.partition  # for the callback
            break_off(lane, acc.strict)
            error = ERR_APPLICATION if status == APPEND_NO_CHOICE else ERR_UNKNOWN_PARTITION
            resolve(lane, chunk, i, error, -1, fp_now_us())
        chunk.sent = chunk.returned = chunk.resolved
    _count_new_chunks(acc, chunk.epoch, acc.live_chunks - before)
    acc.overdraft = False
    acc.place_epoch = acc.epoch
    acc.place_us = acc.place_ms = 0
    if status == APPEND_NO_MEMORY:
        return -1
    lane.head = chunk.next
    if lane.head == NULL:
        lane.tail = NULL
    chunk.next = NULL
    publish(acc, chunk)
    chunk_release(acc, chunk)
    return 1


cdef void _count_new_chunks(accumulator_t* acc, uint32_t epoch, int64_t chunks) noexcept nogil:
    """Chunks made of records that a running flush already waits for."""
    cdef flusher_t* flusher = acc.flushers
    while flusher != NULL:
        if epoch <= flusher.epoch:
            flusher.remaining += chunks
        flusher = flusher.next
