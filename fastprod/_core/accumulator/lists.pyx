# Which lanes linger, which are ready, and what the sender takes next.

cdef void _unlist(accumulator_t* acc, lane_t* lane) noexcept nogil:
    cdef lane_t** head = &acc.linger_head if lane.where == LIST_LINGER else &acc.ready_head
    cdef lane_t** tail = &acc.linger_tail if lane.where == LIST_LINGER else &acc.ready_tail
    if lane.where == LIST_NONE:
        return
    if lane.list_prev != NULL:
        lane.list_prev.list_next = lane.list_next
    else:
        head[0] = lane.list_next
    if lane.list_next != NULL:
        lane.list_next.list_prev = lane.list_prev
    else:
        tail[0] = lane.list_prev
    lane.list_prev = lane.list_next = NULL
    lane.where = LIST_NONE


cdef void _enlist(accumulator_t* acc, lane_t* lane, int where) noexcept nogil:
    cdef lane_t** head = &acc.linger_head if where == LIST_LINGER else &acc.ready_head
    cdef lane_t** tail = &acc.linger_tail if where == LIST_LINGER else &acc.ready_tail
    if lane.where == where:
        return
    _unlist(acc, lane)
    lane.list_prev = tail[0]
    if tail[0] != NULL:
        tail[0].list_next = lane
    else:
        head[0] = lane
    tail[0] = lane
    lane.where = where
    # The sender sleeps until the first linger deadline it knows of: tell it of an earlier one.
    if acc.sender_waiting and (where == LIST_READY or head[0] == lane):
        pthread_cond_signal(&acc.work)


cdef chunk_t* detach(accumulator_t* acc, lane_t* lane) noexcept nogil:
    """Takes all waiting chunks of a lane for hand-over; the lane then has no batch."""
    cdef chunk_t* chunks = lane.head
    cdef chunk_t* chunk = chunks
    cdef chunk_t* last = lane.tail
    _unlist(acc, lane)
    lane.head = lane.tail = NULL
    lane.batch_open = False
    while chunk != NULL:
        chunk.handed = 1
        acc.flying += chunk.charge
        chunk = chunk.next
    if last != NULL:
        acc.flying -= last.reserved
        _seal(acc, last)
        # Lanes that end their linger with little in the chunk go on with smaller ones.
        if chunks == last and lane.size_class > 0 and last.used + last.count * last.stride < last.capacity >> 2:
            lane.size_class -= 1
    return chunks


cdef void reattach(accumulator_t* acc, lane_t* lane, chunk_t* chunks) noexcept nogil:
    """Puts chunks that librdkafka had no room for back in front."""
    cdef chunk_t* last = chunks
    while True:
        last.handed = 0
        acc.flying -= last.charge
        if last.next == NULL:
            break
        last = last.next
    last.next = lane.head
    lane.head = chunks
    if lane.tail == NULL:
        lane.tail = last
    lane.first_us = chunks.created_us
    _enlist(acc, lane, LIST_READY)


cdef lane_t* next_ready(accumulator_t* acc, int64_t now) noexcept nogil:
    """A lane whose records may go to librdkafka now, or NULL."""
    cdef lane_t* lane
    while acc.linger_head != NULL and acc.linger_head.first_us + acc.linger_us <= now:
        _enlist(acc, acc.linger_head, LIST_READY)
    # Memory is short: what librdkafka has comes back by itself, but not what lingers.
    if acc.linger_head != NULL and acc.ready_head == NULL and acc.waiters != NULL and acc.flying < acc.limit // 2:
        _enlist(acc, acc.linger_head, LIST_READY)
    lane = acc.ready_head
    while lane != NULL and lane.retry_us > now:
        lane = lane.list_next
    return lane


cdef int64_t next_deadline(accumulator_t* acc, int64_t now) noexcept nogil:
    """When something is due that no signal announces: linger, or a retry."""
    cdef int64_t due = now + 1000000
    cdef lane_t* lane = acc.ready_head
    if acc.linger_head != NULL:
        due = min(due, acc.linger_head.first_us + acc.linger_us)
    while lane != NULL:
        due = min(due, lane.retry_us)
        lane = lane.list_next
    return due


cdef void seal_all(accumulator_t* acc) noexcept nogil:
    """Flush: everything that waits is due now, and later records start new chunks."""
    cdef lane_t* lane
    cdef topic_t* topic = acc.topics
    while acc.linger_head != NULL:
        _enlist(acc, acc.linger_head, LIST_READY)
    lane = acc.ready_head
    while lane != NULL:
        lane.batch_open = False
        _seal(acc, lane.tail)
        lane = lane.list_next
    while topic != NULL:
        if topic.undecided.tail != NULL:
            _seal(acc, topic.undecided.tail)
        topic = topic.next
