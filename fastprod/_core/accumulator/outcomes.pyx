# How records end, and who is told.

cdef inline run_t* _run_of(chunk_t* chunk, uint32_t i) noexcept nogil:
    cdef run_t* run = chunk.ending if i >= chunk.ending.start else &chunk.runs
    while run.next != NULL and run.next.start <= i:
        run = run.next
    chunk.ending = run
    return run


cdef void resolve(
    lane_t* lane, chunk_t* chunk, uint32_t i, int32_t state, int64_t offset, int64_t now
) noexcept nogil:
    """Notes the outcome of a record: 0 = acknowledged, at an offset unless that is negative. `lane.spin` is held."""
    cdef slot_t* slot = slot_at(chunk, i)
    cdef run_t* run = _run_of(chunk, i)
    slot.state = state
    chunk.resolved += 1
    count_settled(lane, slot, state != 0)
    if state:
        chunk.failed += 1
        run.failed += 1
    elif offset < 0:
        run.unknown += 1
    else:
        if run.first_offset < 0 or offset < run.first_offset:
            run.first_offset = offset
        if offset > run.last_offset:
            run.last_offset = offset
    if chunk.rich:
        rich_at(chunk, i).offset = offset
        if rich_at(chunk, i).clock_us:
            rich_at(chunk, i).clock_us = now - rich_at(chunk, i).clock_us


cdef int32_t _first_error(chunk_t* chunk) noexcept nogil:
    cdef uint32_t i
    for i in range(chunk.count):
        if slot_at(chunk, i).state != 0 and slot_at(chunk, i).state != MOVED:
            return error_of(slot_at(chunk, i))
    return 0


cdef void _tell_receipt(chunk_t* chunk, run_t* run) noexcept nogil:
    cdef receipt_t* receipt = run.block.receipt
    cdef uint32_t i, end = chunk.count if run.next == NULL else run.next.start
    cdef int64_t acknowledged = <int64_t>end - run.start - run.moved - run.failed
    cdef slot_t* slot
    receipt.acknowledged += acknowledged
    receipt.failed += run.failed
    if run.failed:
        for i in range(run.start, end):
            slot = slot_at(chunk, i)
            if slot.state != 0 and slot.state != MOVED:
                _block_add_failure(
                    run.block,
                    chunk.lane.topic,
                    slot,
                    rich_at(chunk, i).partition if chunk.rich else chunk.lane.partition,
                )
    if acknowledged:
        _receipt_add_extent(receipt, chunk.lane, acknowledged, run)


cdef void tell_news(accumulator_t* acc) noexcept nogil:
    """Something has happened that callers wait for."""
    fp_grow64(&acc.news, 1)
    if acc.done_waiting:
        pthread_cond_broadcast(&acc.done)


cdef void publish(accumulator_t* acc, chunk_t* chunk) noexcept nogil:
    """Makes the outcomes of a chunk known: to receipts, to flush, and to the callbacks' queue."""
    cdef flusher_t* flusher = acc.flushers
    cdef run_t* run = &chunk.runs
    cdef int64_t records = chunk.count - chunk.moved
    fp_assert(chunk.resolved == chunk.count and not chunk.published)
    chunk.published = 1
    fp_grow64(&acc.live_chunks, -1)
    fp_grow64(&acc.records, -records)
    if records > chunk.failed:
        count_latency(chunk.lane, fp_now_us() - chunk.created_us, records - chunk.failed)
    if chunk.failed:
        if acc.failed == 0:
            acc.first_error = _first_error(chunk)
        acc.failed += chunk.failed
    while flusher != NULL:
        if chunk.epoch <= flusher.epoch:
            flusher.remaining -= 1
        flusher = flusher.next
    while run != NULL:
        if run.block != NULL:
            _tell_receipt(chunk, run)
        run = run.next
    if chunk.callbacks:
        fp_grow64(&acc.deliveries_open, 1)
        chunk.refs += 1
        chunk.next = NULL
        if acc.last_delivery != NULL:
            acc.last_delivery.next = chunk
        else:
            fp_store_ptr(<void**>&acc.deliveries, chunk)
        acc.last_delivery = chunk
        fp_add64(&acc.callbacks_due, chunk.callbacks)
        if acc.waiters != NULL:  # it may be in vain to wait now: see append_slowly
            pthread_cond_signal(&acc.waiters.wake)
    tell_news(acc)


cdef void fail_unsent(accumulator_t* acc, chunk_t* chunk, int32_t error) noexcept nogil:
    """Ends the records of a chunk that librdkafka does not have. The chunk must be out of the lane's list."""
    cdef lane_t* lane = chunk.lane
    cdef uint32_t i
    cdef bint over
    fp_spin_lock(&lane.spin)
    for i in range(chunk.sent, chunk.count):
        resolve(lane, chunk, i, error, -1, fp_now_us())
    chunk.returned += chunk.count - chunk.sent
    chunk.sent = chunk.count
    over = chunk.returned == chunk.count
    if over and chunk.flying:
        unlink_flying(lane, chunk)
    fp_spin_unlock(&lane.spin)
    if over:
        chunk_done(acc, chunk)


cdef void chunk_done(accumulator_t* acc, chunk_t* chunk) noexcept nogil:
    """Neither we nor librdkafka will do anything more with its records."""
    chunk_returned(acc, chunk)
    if not chunk.published:
        publish(acc, chunk)
    chunk_release(acc, chunk)
    wake_waiters(acc)  # though callbacks may keep the chunk, less is kept back for librdkafka


cdef void _fail_flying(accumulator_t* acc, lane_t* lane, int32_t error) noexcept nogil:
    cdef chunk_t* chunk
    cdef uint32_t i
    while lane != NULL and lane.fly_head != NULL:
        chunk = lane.fly_head
        fp_spin_lock(&lane.spin)
        for i in range(chunk.count):
            if slot_at(chunk, i).state == PENDING:
                resolve(lane, chunk, i, error, -1, fp_now_us())
        chunk.sent = chunk.returned = chunk.count
        unlink_flying(lane, chunk)
        fp_spin_unlock(&lane.spin)
        chunk_done(acc, chunk)


cdef void fail_flying(accumulator_t* acc, int32_t error) noexcept nogil:
    """librdkafka is gone, and with it what it had not given back. Nothing may be waiting in lanes any more."""
    cdef topic_t* topic = acc.topics
    cdef int32_t i
    while topic != NULL:
        for i in range(topic.lanes.size):
            _fail_flying(acc, topic.lanes.lanes[i], error)
        topic = topic.next


cdef void expire_flying(accumulator_t* acc, int64_t before_us) noexcept nogil:
    """Reports records as timed out that waited so long for metadata that librdkafka still tries to send them.

    librdkafka counts from the hand-over and cannot be told otherwise. Their memory stays until it gives them back.
    """
    cdef topic_t* topic = acc.topics
    cdef int32_t i
    while topic != NULL:
        for i in range(topic.lanes.size):
            if topic.lanes.lanes[i] != NULL:
                _expire_flying(acc, topic.lanes.lanes[i], before_us)
        topic = topic.next


cdef void _expire_flying(accumulator_t* acc, lane_t* lane, int64_t before_us) noexcept nogil:
    cdef chunk_t* chunk
    cdef chunk_t* overdue = NULL
    cdef uint32_t i
    fp_spin_lock(&lane.spin)
    chunk = lane.fly_head
    # Strict: what was handed over together with a record that has timed out goes the same way.
    while chunk != NULL and (chunk.created_us < before_us or (acc.strict and overdue != NULL)):
        if not chunk.published and chunk.sent == chunk.count:
            for i in range(chunk.count):
                if slot_at(chunk, i).state == PENDING:
                    resolve(lane, chunk, i, EXPIRED, -1, fp_now_us())
            chunk.refs += 1  # ours, while it is published
            chunk.next = overdue
            overdue = chunk
        chunk = chunk.fly_next
    fp_spin_unlock(&lane.spin)
    while overdue != NULL:
        chunk = overdue
        overdue = chunk.next
        publish(acc, chunk)
        chunk_release(acc, chunk)
        break_off(lane, acc.strict)
    if fp_load64(&lane.broken) and lane.where == LIST_HELD:
        _enlist(acc, lane, LIST_READY)


cdef bint is_flying(accumulator_t* acc) noexcept nogil:
    """Whether librdkafka has any record. If not, all chunks that it gave back are in the completion stack."""
    cdef topic_t* topic
    cdef lane_t* lane
    cdef int32_t i
    cdef bint flying = False
    pthread_mutex_lock(&acc.lock)
    topic = acc.topics
    while topic != NULL and not flying:
        i = 0
        while i < topic.lanes.size and not flying:
            lane = topic.lanes.lanes[i]
            if lane != NULL:
                fp_spin_lock(&lane.spin)
                flying = lane.fly_head != NULL
                fp_spin_unlock(&lane.spin)
            i += 1
        topic = topic.next
    pthread_mutex_unlock(&acc.lock)
    return flying


cdef void enter_flight(lane_t* lane, chunk_t* chunk, uint32_t sent) noexcept nogil:
    """librdkafka is about to get the chunk up to there, so it counts as sent: it may be acknowledged and gone any time."""
    fp_spin_lock(&lane.spin)
    chunk.sent = sent
    if not chunk.flying:
        chunk.flying = 1
        chunk.fly_next = NULL
        chunk.fly_prev = lane.fly_tail
        if lane.fly_tail == NULL:
            lane.fly_head = chunk
        else:
            lane.fly_tail.fly_next = chunk
        lane.fly_tail = chunk
    fp_spin_unlock(&lane.spin)


cdef void unlink_flying(lane_t* lane, chunk_t* chunk) noexcept nogil:
    """Takes a chunk out of the in-flight list; the lane's leaf lock is held."""
    if chunk.fly_prev == NULL:
        lane.fly_head = chunk.fly_next
    else:
        chunk.fly_prev.fly_next = chunk.fly_next
    if chunk.fly_next == NULL:
        lane.fly_tail = chunk.fly_prev
    else:
        chunk.fly_next.fly_prev = chunk.fly_prev
    chunk.flying = 0


cdef int64_t fail_head(accumulator_t* acc, lane_t* lane, int32_t error) noexcept nogil:
    """Ends what waits in the lane's first chunk; returns how many."""
    cdef chunk_t* chunk = lane.head
    cdef int64_t n = chunk.count - chunk.sent
    lane.head = chunk.next
    if lane.head == NULL:
        lane.tail = NULL
        lane.batch_open = False
        _unlist(acc, lane)
    chunk.next = NULL
    _seal(acc, chunk)
    break_off(lane, acc.strict)
    fail_unsent(acc, chunk, error)
    return n


cdef int64_t fail_lane(accumulator_t* acc, lane_t* lane, int32_t error, int64_t before_us) noexcept nogil:
    cdef int64_t n = 0
    while lane.head != NULL and lane.head.created_us < before_us:
        n += fail_head(acc, lane, error)
    return n


cdef int64_t _fail_behind(accumulator_t* acc, lane_t* lane, int32_t error) noexcept nogil:
    """Ends what waits behind the first chunk, which somebody is looking at."""
    cdef chunk_t* first = lane.head
    cdef int64_t n
    lane.head = first.next
    n = fail_lane(acc, lane, error, INT64_MAX)
    first.next = NULL
    lane.head = lane.tail = first
    return n


cdef int64_t fail_waiting(accumulator_t* acc, int32_t error, int64_t before_us) noexcept nogil:
    """Ends waiting records older than `before_us` (INT64_MAX: all of them); returns how many.

    A thread may be asking a Python partitioner about a chunk: it gives that up itself when it sees that `drops` has grown.
    """
    cdef int64_t n = 0
    cdef topic_t* topic = acc.topics
    cdef outlet_t* outlet = acc.outlets
    cdef int32_t level
    if before_us == INT64_MAX:
        acc.drops += 1
    while outlet != NULL:
        n += _fail_list(acc, &outlet.lingering, error, before_us)
        for level in range(acc.levels):
            n += _fail_list(acc, &outlet.ready[level], error, before_us)
        n += _fail_list(acc, &outlet.held, error, before_us)
        outlet = outlet.next
    while topic != NULL:
        if not topic.routing:
            n += fail_lane(acc, topic.undecided, error, before_us)
        elif before_us == INT64_MAX:
            n += _fail_behind(acc, topic.undecided, error)
        topic = topic.next
    return n


cdef int64_t _fail_list(accumulator_t* acc, list_t* list, int32_t error, int64_t before_us) noexcept nogil:
    cdef lane_t* lane = list.head
    cdef lane_t* following
    cdef int64_t n = 0
    while lane != NULL:
        following = lane.link.next
        n += fail_lane(acc, lane, error, before_us)
        lane = following
    return n
