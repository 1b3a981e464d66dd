# Which lanes linger, which are ready, and what the sender takes next.
#
# librdkafka sends one partition per request and looks at every partition of a broker whenever it wakes. Giving it more
# lanes than it has requests to send only makes batches small: so each broker has some credit, and lanes beyond it stay
# here and grow.
#
# Lanes of higher levels go first. So that none waits for ever, every FLOOR-th hand-over is that of the lane that has
# waited longest.
#
# Of a partition, an idempotent producer has one request on its way at a time. When a broker refuses one and takes the
# next, librdkafka numbers all partitions anew and repeats what is unanswered (twice in the log), or takes the second
# answer for the first as well (lost). A lane that is out is held until librdkafka has given everything back.

cdef inline link_t* _link(lane_t* lane, bint out) noexcept nogil:
    return &lane.out_link if out else &lane.link


cdef void _push(list_t* list, lane_t* lane, bint out) noexcept nogil:
    cdef link_t* link = _link(lane, out)
    link.previous = list.tail
    link.next = NULL
    if list.tail != NULL:
        _link(list.tail, out).next = lane
    else:
        list.head = lane
    list.tail = lane


cdef void _remove(list_t* list, lane_t* lane, bint out) noexcept nogil:
    cdef link_t* link = _link(lane, out)
    if link.previous != NULL:
        _link(link.previous, out).next = link.next
    else:
        list.head = link.next
    if link.next != NULL:
        _link(link.next, out).previous = link.previous
    else:
        list.tail = link.previous
    link.previous = link.next = NULL


cdef void _to_front(list_t* list, lane_t* lane) noexcept nogil:
    if list.head != lane:
        _remove(list, lane, False)
        lane.link.next = list.head
        list.head.link.previous = lane
        list.head = lane


cdef inline list_t* _list(lane_t* lane, int where) noexcept nogil:
    if where == LIST_LINGER:
        return &lane.outlet.lingering
    return &lane.outlet.ready[lane.topic.level] if where == LIST_READY else &lane.outlet.held


cdef inline bint _waits(accumulator_t* acc, outlet_t* outlet) noexcept nogil:
    """Whether anything would go to the broker if it had credit."""
    cdef int32_t level
    for level in range(acc.levels):
        if outlet.ready[level].head != NULL:
            return True
    return outlet.lingering.head != NULL


cdef void _unlist(accumulator_t* acc, lane_t* lane) noexcept nogil:
    if lane.where != LIST_NONE:
        acc.lanes_waiting -= 1
        _remove(_list(lane, lane.where), lane, False)
        lane.where = LIST_NONE
        lane.due = False


cdef void _enlist(accumulator_t* acc, lane_t* lane, int where) noexcept nogil:
    cdef list_t* list
    cdef bint due = where == LIST_READY or lane.due
    if acc.request_bytes and lane.chunks_out and not is_broken(lane):
        where = LIST_HELD
    if lane.where == where:  # as for every record beyond a full batch: nobody needs to be told
        lane.due = due
        return
    list = _list(lane, where)
    _unlist(acc, lane)
    _push(list, lane, False)
    acc.lanes_waiting += 1
    lane.where = where
    lane.due = due
    if where == LIST_HELD:
        return
    # The sender sleeps until the first linger deadline it knows of: tell it of an earlier one.
    if acc.sender_waiting and (where == LIST_READY or list.head == lane):
        pthread_cond_signal(&acc.work)


cdef void _release(accumulator_t* acc, lane_t* lane) noexcept nogil:
    """What librdkafka had of a lane is back: the next of it lingers on, or is due."""
    cdef lane_t* youngest = lane.outlet.lingering.tail
    if lane.due or lane.first_us + acc.linger_us <= fp_now_us():
        _enlist(acc, lane, LIST_READY)
        return
    if youngest != NULL and youngest.first_us > lane.first_us:
        lane.first_us = youngest.first_us  # the list stays in order; longer by no more than the lane was held
    _enlist(acc, lane, LIST_LINGER)


cdef outlet_t* _outlet_of(accumulator_t* acc, int32_t broker) noexcept nogil:
    """Made on first use; NULL when memory is short."""
    cdef outlet_t* outlet = acc.outlets
    while outlet != NULL and outlet.broker != broker:
        outlet = outlet.next
    if outlet == NULL:
        outlet = <outlet_t*>calloc(1, sizeof(outlet_t))
        if outlet != NULL:
            outlet.ready = <list_t*>calloc(acc.levels, sizeof(list_t))
            if outlet.ready == NULL:
                free(outlet)
                return NULL
            outlet.broker = broker
            outlet.next = acc.outlets
            acc.outlets = outlet
            acc.outlet_count += 1
    return outlet


cdef void _count_out(accumulator_t* acc, lane_t* lane, bint out) noexcept nogil:
    """Takes a lane into what counts against its broker's credit, or out of it.

    Credit comes back by halves: each hand-over makes librdkafka look at all partitions, unless it is at it anyway.
    """
    cdef outlet_t* outlet = lane.outlet
    if lane.counted != out:
        lane.counted = out
        if out:
            _push(&outlet.out, lane, True)
            outlet.out_count += 1
            outlet.records_out += lane.records_out
            if outlet.out_count >= acc.credit:
                outlet.spent = True
        else:
            _remove(&outlet.out, lane, True)
            outlet.out_count -= 1
            outlet.records_out -= lane.records_out
            if outlet.out_count <= acc.credit // 2:
                outlet.spent = False


cdef inline void _charge(accumulator_t* acc, chunk_t* chunk, int64_t records) noexcept nogil:
    """librdkafka has so many records of a chunk more, or less."""
    cdef lane_t* lane = chunk.lane
    chunk.charged += <uint32_t>records
    acc.bookkeeping += records * acc.record_overhead
    lane.records_out += records
    if lane.counted:
        lane.outlet.records_out += records


cdef inline void _invite(accumulator_t* acc, outlet_t* outlet) noexcept nogil:
    """Fewer lanes count against a broker: tells the sender, if it may get another now."""
    if acc.sender_waiting and not outlet.spent and _waits(acc, outlet):
        pthread_cond_signal(&acc.work)


cdef int _lead(accumulator_t* acc, lane_t* lane, int32_t broker) noexcept nogil:
    """The lane is led by another broker from now on; -1 when memory is short."""
    cdef outlet_t* outlet = _outlet_of(acc, broker)
    cdef outlet_t* former = lane.outlet
    cdef int where = lane.where
    if outlet == NULL:
        return -1
    if lane.outlet != outlet:
        if former != NULL:
            _unlist(acc, lane)
            _count_out(acc, lane, False)  # what the old leader has does not burden the new one
            _invite(acc, former)
        lane.outlet = outlet
        if where != LIST_NONE:
            _enlist(acc, lane, LIST_READY)  # lists of lingering lanes are in order of age
    return 0


cdef chunk_t* detach(accumulator_t* acc, lane_t* lane) noexcept nogil:
    """Takes the waiting chunks of a lane for hand-over: all, or what makes one request."""
    cdef chunk_t* chunks = lane.head
    cdef chunk_t* chunk = chunks
    cdef chunk_t* last = NULL
    cdef int64_t bytes = 0, records = 0
    _unlist(acc, lane)
    while chunk != NULL:
        bytes += bytes_on_wire(chunk)
        records += chunk.count
        if last != NULL and acc.request_bytes and (bytes > acc.request_bytes or records > acc.request_records):
            break
        last = chunk
        _seal(acc, chunk)
        chunk.handed = 1
        acc.flying += chunk.charge
        _charge(acc, chunk, chunk.count - chunk.sent)
        lane.chunks_out += 1
        chunk = chunk.next
    lane.head = chunk
    last.next = NULL
    if chunk == NULL:
        lane.tail = NULL
        lane.batch_open = False
        # Lanes that end their linger with little in the chunk go on with smaller ones.
        if chunks == last and lane.size_class > 0 and last.used + last.count * last.stride < last.capacity >> 2:
            lane.size_class -= 1
    else:
        lane.first_us = chunk.created_us
        _enlist(acc, lane, LIST_READY)
    lane.outlet.turns += 1
    if not lane.counted:
        lane.out_us = fp_now_us()
        _count_out(acc, lane, True)
    return chunks


cdef void chunk_returned(accumulator_t* acc, chunk_t* chunk) noexcept nogil:
    """librdkafka has nothing of the chunk any more."""
    cdef lane_t* lane = chunk.lane
    if not chunk.handed:
        return
    chunk.handed = 0
    if chunk.split:
        chunk.split = 0
        acc.split -= 1
    acc.flying -= chunk.charge
    _charge(acc, chunk, -<int64_t>chunk.charged)
    _feed(acc)
    lane.chunks_out -= 1
    if lane.chunks_out == 0 and lane.where == LIST_HELD:
        _release(acc, lane)
    if lane.chunks_out == 0 and lane.counted:
        _count_out(acc, lane, False)
        _invite(acc, lane.outlet)


cdef void reattach(accumulator_t* acc, lane_t* lane, chunk_t* chunks) noexcept nogil:
    """Puts chunks that librdkafka did not get back in front.

    It may have some records of the first: the lane is held until these are back, as by any request on its way.
    """
    cdef chunk_t* last = chunks
    if acc.request_bytes and _is_partly_out(lane, chunks):
        chunks.split = 1
        acc.split += 1
        _charge(acc, chunks, <int64_t>chunks.sent - chunks.count)
    else:
        chunk_returned(acc, chunks)
    while last.next != NULL:
        last = last.next
        chunk_returned(acc, last)
    last.next = lane.head
    lane.head = chunks
    if lane.tail == NULL:
        lane.tail = last
    lane.first_us = chunks.created_us
    _enlist(acc, lane, LIST_READY)


cdef bint _is_partly_out(lane_t* lane, chunk_t* chunk) noexcept nogil:
    cdef bint out
    fp_spin_lock(&lane.spin)
    out = chunk.returned < chunk.sent
    fp_spin_unlock(&lane.spin)
    return out


cdef void release_split(accumulator_t* acc) noexcept nogil:
    """Lets lanes go on whose first chunk librdkafka had a part of, when that is back.

    Those whose first record has gone alone go first: their chunks give memory back, others that have had no record out
    yet would only begin to wait. One that has found librdkafka's queue full would only fill it again.
    """
    cdef outlet_t* outlet = acc.outlets
    cdef lane_t* lane
    cdef lane_t* following
    while outlet != NULL and acc.split:
        lane = outlet.held.head
        while lane != NULL:
            following = lane.link.next
            if lane.head.split and not _is_partly_out(lane, lane.head):
                chunk_returned(acc, lane.head)
                if lane.where == LIST_READY and lane.head.sent == 1:
                    _to_front(_list(lane, LIST_READY), lane)
            lane = following
        outlet = outlet.next


cdef inline bint _has_credit(accumulator_t* acc, outlet_t* outlet, int64_t now) noexcept nogil:
    """Whether librdkafka may get another lane of the broker. Those out for long count no more: they may be stuck.

    But not while memory is short: it could get everything then, and need more for that than there is.
    """
    while outlet.spent and not acc.starved and outlet.out.head.out_us + CREDIT_US <= now:
        _count_out(acc, outlet.out.head, False)
    return not outlet.spent


cdef inline lane_t* _able(lane_t* lane, int64_t now) noexcept nogil:
    """The first from here on that need not pause."""
    while lane != NULL and lane.retry_us > now:
        lane = lane.link.next
    return lane


cdef lane_t* _next_of(accumulator_t* acc, outlet_t* outlet, int64_t now) noexcept nogil:
    cdef lane_t* lane = NULL
    cdef lane_t* other
    cdef int32_t level = acc.levels
    while outlet.lingering.head != NULL and outlet.lingering.head.first_us + acc.linger_us <= now:
        _enlist(acc, outlet.lingering.head, LIST_READY)
    while level > 0:
        level -= 1
        other = _able(outlet.ready[level].head, now)
        if lane == NULL:
            lane = other
            if lane != NULL and outlet.turns % FLOOR:
                break
        elif other != NULL and other.first_us < lane.first_us:
            lane = other
    # Memory is short: what librdkafka has comes back by itself, but not what lingers.
    if lane == NULL and acc.waiters != NULL and acc.flying < acc.limit // 2:
        lane = _able(outlet.lingering.head, now)
    return lane


cdef inline bint _is_starved(accumulator_t* acc, outlet_t* outlet) noexcept nogil:
    """Whether the broker must wait for memory. One that has little need not: others may keep theirs for long."""
    return acc.starved and outlet.records_out * acc.record_overhead > acc.limit // LITTLE


cdef lane_t* next_ready(accumulator_t* acc, int64_t now) noexcept nogil:
    """A lane whose records may go to librdkafka now, or NULL. Brokers take turns."""
    cdef outlet_t* first = acc.turn if acc.turn != NULL else acc.outlets
    cdef outlet_t* outlet = first
    cdef lane_t* lane
    acc.starved = not _may_hand_over(acc)
    while outlet != NULL:
        acc.turn = outlet.next
        if not _is_starved(acc, outlet) and _has_credit(acc, outlet, now):
            lane = _next_of(acc, outlet, now)
            if lane != NULL:
                return lane
        outlet = outlet.next if outlet.next != NULL else acc.outlets
        if outlet == first:
            break
    return NULL


cdef int64_t next_deadline(accumulator_t* acc, int64_t now) noexcept nogil:
    """When something is due that no signal announces: linger, a retry, or the end of waiting for a broker."""
    cdef int64_t due = now + 1000000
    cdef outlet_t* outlet = acc.outlets
    cdef lane_t* lane
    cdef int32_t level
    while outlet != NULL:
        if _is_starved(acc, outlet):
            pass  # _feed announces memory
        elif outlet.spent:
            if not acc.starved and _waits(acc, outlet):  # else _feed announces memory
                due = min(due, outlet.out.head.out_us + CREDIT_US)
        else:
            if outlet.lingering.head != NULL:
                due = min(due, outlet.lingering.head.first_us + acc.linger_us)
            for level in range(acc.levels):
                lane = outlet.ready[level].head
                while lane != NULL:
                    due = min(due, lane.retry_us)
                    lane = lane.link.next
        outlet = outlet.next
    return due


cdef void _seal_list(accumulator_t* acc, list_t* list) noexcept nogil:
    cdef lane_t* lane = list.head
    while lane != NULL:
        lane.batch_open = False
        lane.due = True
        _seal(acc, lane.tail)
        lane = lane.link.next


cdef void seal_all(accumulator_t* acc) noexcept nogil:
    """Flush: everything that waits is due now, and later records start new chunks."""
    cdef topic_t* topic = acc.topics
    cdef outlet_t* outlet = acc.outlets
    cdef int32_t level
    while outlet != NULL:
        while outlet.lingering.head != NULL:
            _enlist(acc, outlet.lingering.head, LIST_READY)
        for level in range(acc.levels):
            _seal_list(acc, &outlet.ready[level])
        _seal_list(acc, &outlet.held)
        outlet = outlet.next
    while topic != NULL:
        if topic.undecided.tail != NULL:
            _seal(acc, topic.undecided.tail)
        topic = topic.next
