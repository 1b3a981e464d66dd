# The pool: what a record takes of buffer.memory, chunks from it, and who waits for room.

cdef int64_t footprint(const record_t* record) noexcept nogil:
    """Pool bytes that must be free for this record to be placed for certain."""
    cdef int64_t size = sizeof(chunk_t) + sizeof(slot_t) + sizeof(rich_t) + 16 + record.headers_size
    cdef int64_t payload = max(record.size, 0) + max(record.key_size, 0)
    if record.by_reference:
        return max(size, CLASS_BYTES[0]) + payload
    return max(size + payload, CLASS_BYTES[0])


cdef inline int64_t _room(accumulator_t* acc) noexcept nogil:
    """What may be taken for records now: the rest is kept for what librdkafka allocates for those that it gets.

    Of many lanes it has few at a time, though those that have waited longest, with twice the records of the average;
    what need not be kept for the others makes batches larger. With few lanes it may have everything; to let more wait
    than can go would only wear out the processor's caches.
    """
    cdef int64_t out = <int64_t>acc.outlet_count * acc.credit  # lanes, at most
    cdef int64_t kept = acc.records * acc.record_overhead
    if acc.lanes_waiting > out:
        kept = kept // (acc.lanes_waiting + out) * 2 * out
    if acc.lanes_opened > MANY_LANES:
        kept = min(kept, acc.limit // 3)
    return acc.limit - acc.used - max(acc.bookkeeping, kept)


cdef inline bint _may_take(accumulator_t* acc, int64_t need) noexcept nogil:
    """Whether so much may be taken now. Those who wait come first, or someone in need of much would starve."""
    return acc.overdraft or (need <= _room(acc) and (acc.waiters == NULL or acc.favoured))


cdef inline bint _may_hand_over(accumulator_t* acc) noexcept nogil:
    """Whether there is memory for more records with librdkafka."""
    return acc.used + acc.bookkeeping <= acc.limit


cdef inline void _feed(accumulator_t* acc) noexcept nogil:
    """Tells the sender of memory that it waits for."""
    if acc.starved and _may_hand_over(acc):
        acc.starved = False
        if acc.sender_waiting:
            pthread_cond_signal(&acc.work)


cdef inline bint _draw(accumulator_t* acc, chunk_t* chunk, int64_t bytes) noexcept nogil:
    """Charges a chunk for another record, from what is reserved in it or else from the pool."""
    cdef int64_t more = bytes - chunk.reserved
    if more > 0:
        if not _may_take(acc, more):
            return False
        acc.used += more
        chunk.charge += more
    chunk.reserved = max(0, -more)
    return True


cdef inline int64_t _pinned_bytes(chunk_t* chunk) noexcept nogil:
    """Of keys and values in buffers of the caller."""
    return chunk.charge - chunk.reserved - <int64_t>(sizeof(chunk_t) + chunk.capacity)


cdef inline int64_t bytes_on_wire(chunk_t* chunk) noexcept nogil:
    """At most so much of a request."""
    return chunk.used + _pinned_bytes(chunk) + <int64_t>chunk.count * RECORD_BYTES


cdef void _set_aside(accumulator_t* acc, chunk_t* chunk, int64_t bytes) noexcept nogil:
    """Reserves what a waiter was granted beyond its own record: others that come to this chunk need not wait then."""
    if 0 < bytes <= _room(acc):
        acc.used += bytes
        chunk.charge += bytes
        chunk.reserved += bytes


cdef void _seal(accumulator_t* acc, chunk_t* chunk) noexcept nogil:
    """No record is added to the chunk any more."""
    chunk.sealed = 1
    if chunk.reserved:
        acc.used -= chunk.reserved
        chunk.charge -= chunk.reserved
        chunk.reserved = 0
        wake_waiters(acc)


# Threads wait for memory as Java's do: not for the room of a record but for that of a batch, which the thread then fills.
# Whoever returns memory sets it aside for the first in the queue, so nobody can take it before the waiter runs.

cdef void wake_waiters(accumulator_t* acc) noexcept nogil:
    """Memory came back: grants those who have waited longest what they need, if there is room for it."""
    cdef waiter_t* waiter = acc.waiters
    while waiter != NULL and waiter.need <= _room(acc):
        acc.used += waiter.need
        waiter.granted = waiter.need
        waiter.queued = False
        acc.waiters = waiter.next
        if acc.waiters == NULL:
            acc.last_waiter = NULL
        pthread_cond_signal(&waiter.wake)
        waiter = acc.waiters
    _feed(acc)


cdef void enter_queue(accumulator_t* acc, waiter_t* waiter, int64_t least) noexcept nogil:
    """Queues up for memory: a batch's worth, but at least so much. Before those of lower levels, a few times each."""
    cdef waiter_t* before = NULL
    cdef waiter_t* other = acc.waiters
    waiter.need = max(least, min(GRANT_BYTES, acc.limit // 8))
    waiter.queued = True
    waiter.overtaken = 0
    while other != NULL:
        if other.level >= waiter.level or other.overtaken >= FLOOR:
            before = other
        other = other.next
    if before == NULL:
        waiter.next = acc.waiters
        acc.waiters = waiter
    else:
        waiter.next = before.next
        before.next = waiter
    if waiter.next == NULL:
        acc.last_waiter = waiter
    other = waiter.next
    while other != NULL:
        other.overtaken += 1
        other = other.next
    wake_waiters(acc)
    pthread_cond_signal(&acc.work)  # memory is short: the sender may have to end some linger


cdef void leave_queue(accumulator_t* acc, waiter_t* waiter) noexcept nogil:
    """Leaves the queue, with the grant given back if there is one."""
    cdef waiter_t** link = &acc.waiters
    cdef waiter_t* before = NULL
    acc.used -= waiter.granted
    waiter.granted = 0
    if waiter.queued:
        while link[0] != waiter:
            before = link[0]
            link = &before.next
        link[0] = waiter.next
        if acc.last_waiter == waiter:
            acc.last_waiter = before
        waiter.queued = False
    wake_waiters(acc)


cdef void use_grant(accumulator_t* acc, waiter_t* waiter) noexcept nogil:
    """The waiter's turn, until it sets `favoured` back: it must then call wake_waiters, before it lets the lock go."""
    acc.used -= waiter.granted
    waiter.granted = 0
    acc.favoured = True


cdef void _trim_cache(accumulator_t* acc, int64_t need) noexcept nogil:
    """Gives cached chunks back to malloc until `need` more bytes fit the limit."""
    cdef int c
    cdef chunk_t* chunk
    for c in range(SIZE_CLASSES):
        while acc.free_lists[c] != NULL and acc.used + acc.bookkeeping + acc.cached + need > acc.limit:
            chunk = acc.free_lists[c]
            acc.free_lists[c] = chunk.next
            acc.cached -= CLASS_BYTES[c]
            free(chunk)


cdef void drop_cache(accumulator_t* acc) noexcept nogil:
    """Gives all cached chunks back to malloc."""
    cdef int c
    cdef chunk_t* chunk
    for c in range(SIZE_CLASSES):
        while acc.free_lists[c] != NULL:
            chunk = acc.free_lists[c]
            acc.free_lists[c] = chunk.next
            free(chunk)
    acc.cached = 0


cdef int _chunk_new(
    accumulator_t* acc, lane_t* lane, int64_t data, uint32_t stride, int64_t extra, chunk_t** out
) noexcept nogil:
    """A chunk with room for `data` bytes and one slot; `extra` is what the record costs beyond the chunk."""
    cdef int64_t least = sizeof(chunk_t) + data + stride
    cdef int64_t bytes
    # With many lanes a large chunk for one keeps small ones from others, whose batches then stay small.
    cdef int64_t share = acc.limit // (4 * max(acc.lanes_opened, 1))
    cdef int c = lane.size_class
    cdef chunk_t* chunk = NULL
    while c > 0 and CLASS_BYTES[c] > share:
        c -= 1
    while c < SIZE_CLASSES and CLASS_BYTES[c] < least:
        c += 1
    if c == SIZE_CLASSES:
        c = -1
        bytes = (least + 15) & ~15
    else:
        bytes = CLASS_BYTES[c]
        while c > 0 and CLASS_BYTES[c - 1] >= least and not _may_take(acc, bytes + extra):
            c -= 1
            bytes = CLASS_BYTES[c]
        if not _may_take(acc, bytes + extra) and ((least + 15) & ~15) < bytes:
            c = -1
            bytes = (least + 15) & ~15
    if not _may_take(acc, bytes + extra):
        return APPEND_TOO_LARGE if bytes + extra > acc.limit else APPEND_NO_ROOM
    if bytes > 0x7fffffff:
        return APPEND_TOO_LARGE
    if c >= 0 and acc.free_lists[c] != NULL:
        chunk = acc.free_lists[c]
        acc.free_lists[c] = chunk.next
        acc.cached -= bytes
    else:
        if acc.used + acc.bookkeeping + acc.cached + bytes > acc.limit:
            _trim_cache(acc, bytes)
        chunk = <chunk_t*>malloc(bytes)
        if chunk == NULL:
            return APPEND_NO_MEMORY
    memset(chunk, 0, sizeof(chunk_t))
    chunk.size_class = c
    chunk.capacity = <uint32_t>(bytes - sizeof(chunk_t))
    chunk.stride = stride
    chunk.charge = bytes
    chunk.lane = lane
    chunk.refs = 1
    chunk.epoch = acc.place_epoch
    chunk.created_us = acc.place_us if acc.place_us else fp_now_us()
    chunk.created_ms = acc.place_ms if acc.place_us else fp_wall_ms()
    acc.used += bytes
    fp_grow64(&acc.live_chunks, 1)
    out[0] = chunk
    return APPEND_OK


cdef void _release_blocks(chunk_t* chunk) noexcept nogil:
    cdef run_t* run = &chunk.runs
    while run != NULL:
        block_release(run.block)
        run = run.next


cdef void chunk_release(accumulator_t* acc, chunk_t* chunk) noexcept nogil:
    """Drops one reference; the last one returns the memory to the pool."""
    chunk.refs -= 1
    if chunk.refs:
        return
    acc.used -= chunk.charge
    if acc.short:
        acc.short = False
        acc.room_us = fp_now_us()
    _release_blocks(chunk)
    if chunk.size_class >= 0:
        chunk.next = acc.free_lists[chunk.size_class]
        acc.free_lists[chunk.size_class] = chunk
        acc.cached += CLASS_BYTES[chunk.size_class]
    else:
        free(chunk)
    wake_waiters(acc)
