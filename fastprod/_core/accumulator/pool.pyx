# The pool: what a record takes of buffer.memory, chunks from it, and who waits for room.

cdef int64_t footprint(accumulator_t* acc, record_t* record) noexcept nogil:
    """Pool bytes that must be free for this record to be placed for certain."""
    cdef int64_t size = sizeof(chunk_t) + sizeof(slot_t) + sizeof(rich_t) + BACKREF_BYTES + 16 + record.headers_size
    cdef int64_t payload = max(record.size, 0) + max(record.key_size, 0)
    if record.by_reference:
        return max(size, CLASS_BYTES[0]) + payload + acc.record_overhead
    return max(size + payload, CLASS_BYTES[0]) + acc.record_overhead


cdef bint pool_has_room(accumulator_t* acc, int64_t need) noexcept nogil:
    return acc.used + need <= acc.limit or acc.overdraft


cdef void wake_waiters(accumulator_t* acc) noexcept nogil:
    """Lets the thread that has waited longest try again, if there is room for it."""
    if acc.waiters != NULL and pool_has_room(acc, acc.waiters.need):
        pthread_cond_signal(&acc.waiters.wake)


cdef void leave_queue(accumulator_t* acc, waiter_t* waiter) noexcept nogil:
    cdef waiter_t** link = &acc.waiters
    cdef waiter_t* before = NULL
    while link[0] != waiter:
        before = link[0]
        link = &before.next
    link[0] = waiter.next
    if acc.last_waiter == waiter:
        acc.last_waiter = before
    wake_waiters(acc)


cdef void _trim_cache(accumulator_t* acc, int64_t need) noexcept nogil:
    """Gives cached chunks back to malloc until `need` more bytes fit the limit."""
    cdef int c
    cdef chunk_t* chunk
    for c in range(SIZE_CLASSES):
        while acc.free_lists[c] != NULL and acc.used + acc.cached + need > acc.limit:
            chunk = acc.free_lists[c]
            acc.free_lists[c] = chunk.next
            acc.cached -= CLASS_BYTES[c]
            free(chunk)


cdef int _chunk_new(
    accumulator_t* acc, lane_t* lane, int64_t data, uint32_t stride, int64_t extra, chunk_t** out
) noexcept nogil:
    """A chunk with room for `data` bytes and one slot; `extra` is what the record costs beyond the chunk."""
    cdef int64_t least = sizeof(chunk_t) + data + stride
    cdef int64_t bytes
    cdef int c = lane.size_class
    cdef chunk_t* chunk = NULL
    while c < SIZE_CLASSES and CLASS_BYTES[c] < least:
        c += 1
    if c == SIZE_CLASSES:
        c = -1
        bytes = (least + 15) & ~15
    else:
        bytes = CLASS_BYTES[c]
        while c > 0 and CLASS_BYTES[c - 1] >= least and not pool_has_room(acc, bytes + extra):
            c -= 1
            bytes = CLASS_BYTES[c]
        if not pool_has_room(acc, bytes + extra) and ((least + 15) & ~15) < bytes:
            c = -1
            bytes = (least + 15) & ~15
    if not pool_has_room(acc, bytes + extra):
        return APPEND_TOO_LARGE if bytes + extra > acc.limit else APPEND_NO_ROOM
    if bytes > 0x7fffffff:
        return APPEND_TOO_LARGE
    if c >= 0 and acc.free_lists[c] != NULL:
        chunk = acc.free_lists[c]
        acc.free_lists[c] = chunk.next
        acc.cached -= bytes
    else:
        if acc.used + acc.cached + bytes > acc.limit:
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
    chunk.first_offset = chunk.last_offset = -1
    chunk.created_us = acc.place_us if acc.place_us else fp_now_us()
    chunk.created_ms = acc.place_ms if acc.place_us else fp_wall_ms()
    acc.used += bytes
    acc.live_chunks += 1
    out[0] = chunk
    return APPEND_OK


cdef void chunk_release(accumulator_t* acc, chunk_t* chunk) noexcept nogil:
    """Drops one reference; the last one returns the memory to the pool."""
    chunk.refs -= 1
    if chunk.refs:
        return
    acc.used -= chunk.charge
    if acc.short:
        acc.short = False
        acc.room_us = fp_now_us()
    block_release(chunk.block)
    if chunk.size_class >= 0:
        chunk.next = acc.free_lists[chunk.size_class]
        acc.free_lists[chunk.size_class] = chunk
        acc.cached += CLASS_BYTES[chunk.size_class]
    else:
        free(chunk)
    wake_waiters(acc)
