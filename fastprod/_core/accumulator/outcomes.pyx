# How records end, and who is told.

cdef int32_t _first_error(chunk_t* chunk) noexcept nogil:
    cdef uint32_t i
    for i in range(chunk.count):
        if slot_at(chunk, i).state != 0 and slot_at(chunk, i).state != MOVED:
            return error_of(slot_at(chunk, i))
    return 0


cdef void publish(accumulator_t* acc, chunk_t* chunk) noexcept nogil:
    """Makes the outcomes of a chunk known: to its receipt, to flush, and to the callbacks' queue."""
    cdef flusher_t* flusher = acc.flushers
    cdef receipt_t* receipt = NULL if chunk.block == NULL else chunk.block.receipt
    cdef slot_t* slot
    cdef uint32_t i
    cdef int64_t records = chunk.count - chunk.moved
    fp_assert(chunk.resolved == chunk.count and not chunk.published)
    chunk.published = 1
    acc.live_chunks -= 1
    acc.records -= records
    acc.news += 1
    if records > chunk.failed and chunk.lane != chunk.lane.topic.unassigned:
        count_latency(chunk.lane, fp_now_us() - chunk.created_us, records - chunk.failed)
    if chunk.failed:
        if acc.failed == 0:
            acc.first_error = _first_error(chunk)
        acc.failed += chunk.failed
    while flusher != NULL:
        if chunk.epoch <= flusher.epoch:
            flusher.remaining -= 1
        flusher = flusher.next
    if receipt != NULL:
        receipt.acknowledged += records - chunk.failed
        receipt.failed += chunk.failed
        if chunk.failed or (chunk.rich and chunk.lane == chunk.lane.topic.unassigned):
            for i in range(chunk.count):
                slot = slot_at(chunk, i)
                if slot.state == MOVED:
                    continue
                if slot.state != 0:
                    _block_add_failure(
                        chunk.block,
                        slot.index,
                        error_of(slot),
                        rich_at(chunk, i).partition if chunk.rich else chunk.lane.partition,
                    )
                elif chunk.lane == chunk.lane.topic.unassigned:
                    _receipt_add_extent(
                        receipt, chunk.lane.topic, rich_at(chunk, i).partition, 1,
                        rich_at(chunk, i).offset, rich_at(chunk, i).offset, NULL,
                    )
        if chunk.lane != chunk.lane.topic.unassigned and records > chunk.failed:
            _receipt_add_extent(
                receipt, chunk.lane.topic, chunk.lane.partition, records - chunk.failed,
                chunk.first_offset, chunk.last_offset, &chunk.lane.extent_at,
            )
    if chunk.callbacks:
        chunk.refs += 1
        chunk.next = NULL
        if acc.last_delivery != NULL:
            acc.last_delivery.next = chunk
        else:
            acc.deliveries = chunk
        acc.last_delivery = chunk
        fp_add64(&acc.callbacks_due, chunk.callbacks)
        if acc.waiters != NULL:  # it may be in vain to wait now: see Runtime.append_slowly
            pthread_cond_signal(&acc.waiters.wake)
    if acc.done_waiting:
        pthread_cond_broadcast(&acc.done)


cdef void fail_unsent(accumulator_t* acc, chunk_t* chunk, int32_t error) noexcept nogil:
    """Ends the records of a chunk that librdkafka does not have. The chunk must be out of the lane's list."""
    cdef lane_t* lane = chunk.lane
    cdef slot_t* slot
    cdef uint32_t i
    cdef int64_t records = 0
    cdef bint over
    fp_spin_lock(&lane.spin)
    for i in range(chunk.sent, chunk.count):
        slot = slot_at(chunk, i)
        if slot.state == MOVED:
            continue
        slot.state = error
        count_settled(lane, slot, True)
        records += 1
        if chunk.rich and rich_at(chunk, i).callback != NULL:
            rich_at(chunk, i).clock_us = fp_now_us() - rich_at(chunk, i).clock_us
    chunk.failed += <uint32_t>records
    chunk.resolved += chunk.count - chunk.sent
    chunk.returned += chunk.count - chunk.sent
    chunk.sent = chunk.count
    over = chunk.returned == chunk.count
    if over and chunk.flying:
        unlink_flying(lane, chunk)
    fp_spin_unlock(&lane.spin)
    if over:
        if not chunk.published:
            publish(acc, chunk)
        chunk_release(acc, chunk)


cdef void enter_flight(lane_t* lane, chunk_t* chunk) noexcept nogil:
    """librdkafka is about to get the chunk: acknowledgements may come from now on."""
    fp_spin_lock(&lane.spin)
    if not chunk.flying:
        chunk.flying = 1
        chunk.fly_next = NULL
        if lane.fly_tail == NULL:
            lane.fly_head = chunk
        else:
            lane.fly_tail.fly_next = chunk
        lane.fly_tail = chunk
    fp_spin_unlock(&lane.spin)


cdef void unlink_flying(lane_t* lane, chunk_t* chunk) noexcept nogil:
    """Takes a chunk out of the in-flight list; the lane's leaf lock is held."""
    cdef chunk_t** link = &lane.fly_head
    cdef chunk_t* before = NULL
    while link[0] != chunk:
        before = link[0]
        link = &before.fly_next
    link[0] = chunk.fly_next
    if lane.fly_tail == chunk:
        lane.fly_tail = before
    chunk.flying = 0


cdef int64_t fail_lane(accumulator_t* acc, lane_t* lane, int32_t error, int64_t before_us) noexcept nogil:
    cdef chunk_t* chunk
    cdef int64_t n = 0
    while lane.head != NULL and lane.head.created_us < before_us:
        chunk = lane.head
        lane.head = chunk.next
        if lane.head == NULL:
            lane.tail = NULL
            lane.batch_open = False
            _unlist(acc, lane)
        chunk.next = NULL
        chunk.sealed = 1
        n += chunk.count - chunk.sent
        fail_unsent(acc, chunk, error)
    return n


cdef int64_t fail_waiting(accumulator_t* acc, int32_t error, int64_t before_us) noexcept nogil:
    """Ends waiting records older than `before_us` (INT64_MAX: all of them); returns how many."""
    cdef int64_t n = 0
    cdef topic_t* topic = acc.topics
    cdef lane_t* lane = acc.linger_head
    cdef lane_t* following
    while lane != NULL:
        following = lane.list_next
        n += fail_lane(acc, lane, error, before_us)
        lane = following
    lane = acc.ready_head
    while lane != NULL:
        following = lane.list_next
        n += fail_lane(acc, lane, error, before_us)
        lane = following
    while topic != NULL:
        if not topic.routing:
            n += fail_lane(acc, topic.undecided, error, before_us)
        topic = topic.next
    return n
