"""The record accumulator: where records wait, how much memory they take, and which lane they go to.

Records are copied once, into chunks of one lane each; librdkafka is later given pointers into the chunk, so the
payload pointer that comes back with an acknowledgement identifies the record. A lane is ready for hand-over when
the batch that Java would have built is full, when `linger.ms` is over, on flush, or when memory is short.
"""

from libc.stdint cimport INT64_MAX
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset, strdup, strlen

from fastprod._core._balance cimport (
    BATCH_HEADER_BYTES,
    load_table_build,
    load_table_find,
    load_table_free,
    load_table_reserve,
    partial_advance,
    partial_free,
    partial_grow,
    partial_next,
    partial_seed,
    pick_below,
    record_upper_bound,
    record_wire_size,
    sticky_append,
)
from fastprod._core._columns cimport CELL_VALUE, Column, column_get, column_t
from fastprod._core._hash cimport murmur2_bytes
from fastprod._core._histogram cimport histogram_add, histogram_t
from fastprod._core._platform cimport (
    fp_add64,
    fp_assert,
    fp_cond_init,
    fp_load64,
    fp_now_us,
    fp_spin_lock,
    fp_spin_unlock,
    fp_store64,
    fp_store_ptr,
    fp_wall_ms,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_mutex_destroy,
    pthread_mutex_init,
)

cdef enum:
    TABLE_US = 5000                       # the load table is rebuilt at most this often
    AVERAGE_US = 100000                   # over which queues are averaged
    FADE_US = 2000000                     # the same for what would make uneven queues look even again
    STALL_US = 20000                      # a full pool is worth a note from here on
    SPAN_US = 50000                       # between the first and last record of a chunk that may wait long
    STRIKES = 10                          # rebuilds in a row that must find queues uneven
    CATCH_UP = 64                         # sticky bounds that a partition may be behind when they are even again
    START_US = 2000000                    # after which a lane's queue counts in any case

cdef uint32_t* CLASS_BYTES = [2048, 8192, 32768, 65536]  # whole allocations, header included


# ---------------------------------------------------------------------------------------------------- life cycle

cdef int accumulator_init(accumulator_t* acc) noexcept nogil:
    """Expects zeroed memory with the settings filled in."""
    pthread_mutex_init(&acc.lock, NULL)
    fp_cond_init(&acc.work)
    fp_cond_init(&acc.done)
    return 0


cdef void accumulator_free(accumulator_t* acc) noexcept nogil:
    """Frees everything. No thread may use it any more, and callbacks must have been released."""
    cdef topic_t* topic
    cdef lanes_t* lanes
    cdef lanes_t* older
    cdef chunk_t* chunk
    cdef int32_t i
    cdef int c
    while acc.topics != NULL:
        topic = acc.topics
        acc.topics = topic.next
        lanes = topic.lanes
        if lanes != NULL:
            for i in range(lanes.size):
                _lane_free(lanes.lanes[i])
        while lanes != NULL:
            older = lanes.previous
            free(lanes.lanes)
            free(lanes)
            lanes = older
        _lane_free(topic.undecided)
        _lane_free(topic.unassigned)
        load_table_free(&topic.table)
        partial_free(&topic.partial)
        free(topic.queues)
        free(topic.smooth)
        free(topic.held)
        free(topic.broker)
        free(topic.broker_queue)
        free(topic.broker_lanes)
        free(topic.heap)
        free(topic.share)
        free(topic.available)
        free(topic.leaders)
        free(topic.name)
        free(topic)
    while acc.deliveries != NULL:
        chunk = acc.deliveries
        acc.deliveries = chunk.next
        _chunk_free(chunk)
    for c in range(SIZE_CLASSES):
        while acc.free_lists[c] != NULL:
            chunk = acc.free_lists[c]
            acc.free_lists[c] = chunk.next
            free(chunk)
    pthread_cond_destroy(&acc.work)
    pthread_cond_destroy(&acc.done)
    pthread_mutex_destroy(&acc.lock)


cdef void _chunk_free(chunk_t* chunk) noexcept nogil:
    block_release(chunk.block)
    free(chunk)


cdef void _lane_free(lane_t* lane) noexcept nogil:
    cdef chunk_t* chunk
    if lane == NULL:
        return
    while lane.head != NULL:
        chunk = lane.head
        lane.head = chunk.next
        if not chunk.flying:
            _chunk_free(chunk)
    while lane.fly_head != NULL:
        chunk = lane.fly_head
        lane.fly_head = chunk.fly_next
        if chunk.refs < 2:  # otherwise the delivery list frees it
            _chunk_free(chunk)
    free(lane.latency)
    free(lane)


cdef lane_t* _lane_new(topic_t* topic, int32_t partition) noexcept nogil:
    cdef lane_t* lane = <lane_t*>calloc(1, sizeof(lane_t))
    if lane != NULL:
        lane.topic = topic
        lane.partition = partition
        lane.opened_us = fp_now_us()
    return lane


cdef topic_t* topic_new(accumulator_t* acc, const char* name) noexcept nogil:
    """A topic whose partitions are not known yet; NULL when memory is short."""
    cdef topic_t* topic = <topic_t*>calloc(1, sizeof(topic_t))
    if topic == NULL:
        return NULL
    topic.name = strdup(name)
    topic.undecided = _lane_new(topic, -1)
    topic.unassigned = _lane_new(topic, -1)
    topic.lanes = <lanes_t*>calloc(1, sizeof(lanes_t))
    if topic.name == NULL or topic.undecided == NULL or topic.unassigned == NULL or topic.lanes == NULL:
        free(topic.name)
        free(topic.undecided)
        free(topic.unassigned)
        free(topic.lanes)
        free(topic)
        return NULL
    topic.sticky.partition = -1
    topic.sticky.bound = acc.sticky_bytes
    topic.partial.random = partial_seed(acc.partial_seed, name, strlen(name))
    topic.next = acc.topics
    acc.topics = topic
    return topic


cdef int widen(topic_t* topic, int32_t partitions) noexcept nogil:
    """Room for so many lanes and what is kept per partition; -1 when memory is short."""
    cdef lanes_t* wider
    cdef lanes_t* lanes = topic.lanes
    cdef int32_t i
    if partitions <= lanes.size:
        return 0
    wider = <lanes_t*>calloc(1, sizeof(lanes_t))
    if wider == NULL:
        return -1
    wider.lanes = <lane_t**>calloc(partitions, sizeof(lane_t*))
    if (
        wider.lanes == NULL
        or _grow(<void**>&topic.available, partitions, sizeof(int32_t)) < 0
        or _grow(<void**>&topic.leaders, partitions, sizeof(int32_t)) < 0
        or _grow(<void**>&topic.heap, partitions, sizeof(int32_t)) < 0
        or _grow(<void**>&topic.broker, partitions, sizeof(int32_t)) < 0
        or _grow(<void**>&topic.broker_queue, partitions, sizeof(int64_t)) < 0
        or _grow(<void**>&topic.broker_lanes, partitions, sizeof(int32_t)) < 0
        or _grow(<void**>&topic.queues, partitions, sizeof(int64_t)) < 0
        or _grow(<void**>&topic.smooth, partitions, sizeof(int64_t)) < 0
        or _grow(<void**>&topic.held, partitions, sizeof(int64_t)) < 0
        or _grow(<void**>&topic.share, partitions, sizeof(int64_t)) < 0
        or load_table_reserve(&topic.table, partitions) < 0
    ):
        free(wider.lanes)
        free(wider)
        return -1
    wider.size = partitions
    wider.previous = lanes
    for i in range(lanes.size):
        wider.lanes[i] = lanes.lanes[i]
    for i in range(lanes.size, partitions):
        topic.smooth[i] = -1
    fp_store_ptr(<void**>&topic.lanes, wider)
    return 0


cdef int topic_update(accumulator_t* acc, topic_t* topic, int32_t partitions, const int32_t* leaders) noexcept nogil:
    """Takes over a metadata answer; -1 when memory is short (nothing has changed then).

    Partitions that are new become electable, those without a leader stop being chosen for key-less records.
    """
    cdef int32_t i, j, n = 0
    if widen(topic, partitions) < 0:
        return -1
    if acc.policy == POLICY_PARTIAL:
        if partitions < topic.partial.known:  # deleted and made anew: the draw is, too
            partial_free(&topic.partial)
        if partial_grow(&topic.partial, acc.partial_limit, partitions) < 0:
            topic.partitions = 0  # records wait until an answer finds memory
            return -1
    topic.brokers = 0
    for i in range(partitions):
        if i < topic.partitions and 0 <= topic.leaders[i] != leaders[i]:
            acc.leaders_moved = True
        topic.leaders[i] = leaders[i]
        if leaders[i] >= 0:
            topic.available[n] = i
            n += 1
            for j in range(i):  # usually found among the first few
                if leaders[j] == leaders[i]:
                    topic.broker[i] = topic.broker[j]
                    break
            else:
                topic.broker[i] = topic.brokers
                topic.brokers += 1
    topic.available_count = n
    topic.partitions = partitions
    topic.table_us = 0
    topic.table.count = 0
    topic.uneven = topic.recurring = False
    topic.strikes = 0
    _restart_shares(acc, topic)
    i = topic.sticky.partition
    if i >= 0 and n and (i >= partitions or leaders[i] < 0):
        topic.sticky.partition = -1  # the next key-less record goes elsewhere
        topic.sticky.produced = 0
    return 0


cdef int _grow(void** array, int32_t count, size_t each) noexcept nogil:
    cdef void* grown = realloc(array[0], count * each)
    if grown == NULL:
        return -1
    array[0] = grown
    return 0


cdef lane_t* lane_of(accumulator_t* acc, topic_t* topic, int32_t partition) noexcept nogil:
    """The lane of a partition that metadata knows, opened on first use; NULL when memory is short."""
    cdef lane_t* lane = topic.lanes.lanes[partition]
    if lane == NULL:
        if acc.failing_opens:
            acc.failing_opens -= 1
            return NULL
        lane = _lane_new(topic, partition)
        if lane != NULL:
            acc.lanes_opened += 1
            fp_store_ptr(<void**>&topic.lanes.lanes[partition], lane)
    return lane


cdef void count_latency(lane_t* lane, int64_t us, int64_t records) noexcept nogil:
    """For statistics; without memory for the histogram they are not counted."""
    if lane.latency == NULL:
        lane.latency = <histogram_t*>calloc(1, sizeof(histogram_t))
    if lane.latency != NULL:
        histogram_add(lane.latency, us, records)


# ---------------------------------------------------------------------------------------------------------- pool

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


# --------------------------------------------------------------------------------------------------------- lists

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
    cdef chunk_t* last = lane.tail
    _unlist(acc, lane)
    lane.head = lane.tail = NULL
    lane.batch_open = False
    if last != NULL:
        last.sealed = 1
        # Lanes that end their linger with little in the chunk go on with smaller ones.
        if chunks == last and lane.size_class > 0 and last.used + last.count * last.stride < last.capacity >> 2:
            lane.size_class -= 1
    return chunks


cdef void reattach(accumulator_t* acc, lane_t* lane, chunk_t* chunks) noexcept nogil:
    """Puts chunks that librdkafka had no room for back in front."""
    cdef chunk_t* last = chunks
    while last.next != NULL:
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
    while acc.linger_head != NULL and (
        acc.waiters != NULL or acc.linger_head.first_us + acc.linger_us <= now
    ):
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
        lane.tail.sealed = 1
        lane = lane.list_next
    while topic != NULL:
        if topic.undecided.tail != NULL:
            topic.undecided.tail.sealed = 1
        topic = topic.next


# ------------------------------------------------------------------------------------------------------- placing

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


# ------------------------------------------------------------------------------------------------------- routing

cdef void _restart_shares(accumulator_t* acc, topic_t* topic) noexcept nogil:
    """Everybody starts even, in an order that differs from producer to producer."""
    cdef int32_t i, n = topic.available_count, at = 0 if n == 0 else <int32_t>(acc.random.state % <uint64_t>n)
    for i in range(n):
        topic.heap[i] = topic.available[(at + i) % n]
        topic.share[topic.heap[i]] = 0


cdef void _sink(topic_t* topic, int32_t i) noexcept nogil:
    """Moves entry `i` of the heap down to its place."""
    cdef int32_t child, partition = topic.heap[i], n = topic.available_count
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and topic.share[topic.heap[child + 1]] < topic.share[topic.heap[child]]:
            child += 1
        if topic.share[topic.heap[child]] >= topic.share[partition]:
            break
        topic.heap[i] = topic.heap[child]
        i = child
    topic.heap[i] = partition


cdef void _resume_shares(accumulator_t* acc, topic_t* topic) noexcept nogil:
    """Queues are even again. Who had less catches up a little, so that a false alarm leaves no trace."""
    cdef int32_t i
    cdef int64_t most = 0
    for i in range(topic.available_count):
        most = max(most, topic.share[topic.available[i]])
    for i in range(topic.available_count):
        topic.share[topic.available[i]] = max(topic.share[topic.available[i]], most - CATCH_UP * acc.sticky_bytes)
    for i in range(topic.available_count // 2 - 1, -1, -1):
        _sink(topic, i)


cdef bint _is_stuck(accumulator_t* acc, topic_t* topic, lane_t* lane, int64_t now) noexcept nogil:
    """Whether records are queued and no partition of the same broker moves: partitioner.availability.timeout.ms."""
    cdef int32_t i
    cdef lane_t* other
    if queued_records(lane) == 0 or fp_load64(&lane.progress_us) + acc.availability_us >= now:
        return False
    for i in range(topic.available_count):
        other = topic.lanes.lanes[topic.available[i]]
        if (
            other != NULL
            and topic.leaders[topic.available[i]] == topic.leaders[lane.partition]
            and fp_load64(&other.progress_us) + acc.availability_us >= now
        ):
            return False
    return True


cdef bint _has_settled_in(lane_t* lane, int64_t now) noexcept nogil:
    """Whether the lane's queue tells how fast its broker is.

    While brokers are being connected, records pile up, and whoever is connected last looks slow until that first
    pile is gone.
    """
    if not lane.settled_in:
        if lane.first_pile == 0 and fp_load64(&lane.settled_records):
            lane.first_pile = lane.in_records
        lane.settled_in = (
            lane.first_pile and fp_load64(&lane.settled_records) >= lane.first_pile
        ) or now - lane.opened_us > START_US
    return lane.settled_in


cdef inline void _average(topic_t* topic, int32_t partition, int64_t queue, int64_t elapsed) noexcept nogil:
    """A partition's queue has been `queue` for some time.

    Where queues are uneven again and again, what sets them apart counts at once and what evens them later.
    """
    cdef int64_t change = queue - topic.smooth[partition]
    cdef int64_t span = AVERAGE_US
    cdef int64_t step
    if topic.recurring and (change < 0) == (topic.smooth[partition] > topic.mean_queue):
        span = FADE_US
    step = change * min(elapsed, span) // span
    if step == 0 and change:  # or rounding would stop it half-way
        step = 1 if change > 0 else -1
    topic.smooth[partition] += step


cdef void _rebuild_table(accumulator_t* acc, topic_t* topic, int64_t now) noexcept nogil:
    """Weights from queue sizes, when the queues tell something.

    A snapshot of one queue is mostly noise: it shrinks by a whole wire batch at a time. So queues are averaged, over
    time and over the lanes of a broker, and the table decides only while one broker's are several times another's.
    Equal brokers then share evenly to the byte, and a slow one is noticed within a tenth of a second. A
    second time it is forgotten more slowly: a broker that stops and goes (long collections, a CPU quota) empties its
    queue between two stalls, while those of the others fill, and would be given its full share just before the next.
    And while the pool is full nobody looks; by the time there is room again a stalled broker may have answered
    everything, so the queues count as they were when it ran full.
    """
    cdef int32_t i, broker, partition, used = 0
    cdef int64_t queue, mean = 0, least = INT64_MAX, most = 0
    cdef int64_t elapsed = now - topic.table_us
    cdef int64_t blocked = 0
    cdef bint everyone = topic.available_count == topic.partitions
    cdef bint barred = False
    cdef lane_t* lane
    if topic.full_us:
        blocked = (acc.room_us if acc.room_us > topic.full_us else now) - topic.full_us
        topic.full_us = 0
        if blocked > STALL_US:
            elapsed = min(elapsed, max(TABLE_US, now - acc.room_us))
        else:
            blocked = 0
    topic.table_us = now
    topic.table.count = 0
    for broker in range(topic.brokers):
        topic.broker_queue[broker] = 0
        topic.broker_lanes[broker] = 0
    for i in range(topic.available_count):
        partition = topic.available[i]
        broker = topic.broker[partition]
        lane = topic.lanes.lanes[partition]
        if lane != NULL and acc.availability_us and _is_stuck(acc, topic, lane, now):
            barred = True
            continue
        topic.table.partitions[used] = partition
        topic.queues[used] = -1
        if lane != NULL and _has_settled_in(lane, now):
            queue = queued_bytes(lane) * 256 // acc.sticky_bytes
            if topic.smooth[partition] < 0:  # starts neutral
                topic.smooth[partition] = topic.mean_queue
            elif blocked:
                _average(topic, partition, topic.held[partition], blocked)
            _average(topic, partition, queue, elapsed)
            topic.held[partition] = queue
            topic.queues[used] = topic.smooth[partition]
            topic.broker_queue[broker] += topic.smooth[partition]
            topic.broker_lanes[broker] += 1
        used += 1
    broker = 0
    for i in range(topic.brokers):
        if topic.broker_lanes[i]:
            topic.broker_queue[i] //= topic.broker_lanes[i]
            least = min(least, topic.broker_queue[i])
            most = max(most, topic.broker_queue[i])
            mean += topic.broker_queue[i]
            broker += 1
    topic.mean_queue = mean // max(broker, 1)
    for i in range(used):
        # A lane counts as its broker does, unless it alone is far behind (a hot key fills it).
        broker = topic.broker[topic.table.partitions[i]]
        queue = topic.queues[i]
        if queue < 0:
            queue = topic.mean_queue
        elif queue > 4 * topic.broker_queue[broker] + 4 * 256:
            most = max(most, queue)
        else:
            queue = topic.broker_queue[broker]
        topic.queues[i] = queue // 256
    if least < INT64_MAX and most > (least * 2 + 256 if topic.uneven else least * 4 + 512):
        topic.strikes = min(STRIKES, topic.strikes + 1 + <int32_t>min(blocked // TABLE_US, STRIKES))
    else:
        topic.strikes = 0
    if barred and used or topic.strikes >= STRIKES:
        if not topic.uneven:
            topic.recurring = topic.even_us and now - topic.even_us < FADE_US
        topic.uneven = load_table_build(&topic.table, topic.queues, used, everyone and not barred)
    elif topic.uneven:
        topic.uneven = topic.recurring = False
        topic.even_us = now
        _resume_shares(acc, topic)


cdef int32_t _choose(accumulator_t* acc, topic_t* topic, int64_t produced) noexcept nogil:
    """The next partition for key-less records, after the current one has had `produced` bytes.

    By weight while queues are uneven, else whoever has had least. Java draws at random in both cases, which leaves
    partitions several per cent apart; replay mode does as Java does.
    """
    cdef int64_t now
    if topic.available_count == 0:
        return <int32_t>pick_below(&acc.random, topic.partitions)
    if produced:
        topic.share[topic.sticky.partition] += produced
        if topic.heap[0] == topic.sticky.partition:
            _sink(topic, 0)
    if acc.adaptive:
        now = fp_now_us()
        if now - topic.table_us >= TABLE_US:
            _rebuild_table(acc, topic, now)
        if topic.table.count:
            return topic.table.partitions[
                load_table_find(
                    &topic.table, pick_below(&acc.random, topic.table.cumulative[topic.table.count - 1])
                )
            ]
    if acc.random.counting:
        return topic.available[pick_below(&acc.random, topic.available_count)]
    return topic.heap[0]


cdef int32_t _choose_other(accumulator_t* acc, topic_t* topic, int32_t old) noexcept nogil:
    """KIP-480: any available partition but the old one."""
    cdef int32_t i, n = topic.available_count
    if n == 0:
        return <int32_t>pick_below(&acc.random, topic.partitions)
    i = <int32_t>pick_below(&acc.random, n)
    if topic.available[i] == old and n > 1:
        i = (i + 1 + <int32_t>pick_below(&acc.random, n - 1)) % n
    return topic.available[i]


cdef double weight_of(topic_t* topic, int32_t partition) noexcept nogil:
    """The share of key-less records that the load table gives a partition at this moment."""
    cdef int32_t i
    if not 0 <= partition < topic.partitions or topic.leaders[partition] < 0:
        return 0
    if topic.table.count == 0:
        return 1.0 / topic.available_count
    for i in range(topic.table.count):
        if topic.table.partitions[i] == partition:
            return (
                topic.table.cumulative[i] - (topic.table.cumulative[i - 1] if i else 0)
            ) / <double>topic.table.cumulative[topic.table.count - 1]
    return 0


cdef int _append_uniform(accumulator_t* acc, topic_t* topic, record_t* record, int32_t* partition) noexcept nogil:
    cdef sticky_t* sticky = &topic.sticky
    cdef int64_t size, appended, produced
    cdef lane_t* lane
    cdef bint full
    cdef int status
    if sticky.partition < 0:
        sticky.partition = _choose(acc, topic, 0)
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
        sticky.partition = _choose(acc, topic, produced)
    status = _place(acc, lane, record)
    if status != APPEND_OK:
        if status == APPEND_NO_ROOM and acc.adaptive and topic.available_count:
            acc.short = True
            if topic.full_us == 0:
                _rebuild_table(acc, topic, fp_now_us())
                topic.full_us = topic.table_us
        return status
    partition[0] = lane.partition
    appended = _count_in_batch(acc, lane, record, size, &full)
    produced = sticky.produced + appended
    if sticky_append(sticky, appended, full):
        sticky.partition = _choose(acc, topic, produced)
    return APPEND_OK


cdef int append(accumulator_t* acc, topic_t* topic, record_t* record, int32_t* partition) noexcept nogil:
    """Routes and places one record. On APPEND_OK its callback reference is the accumulator's."""
    cdef int32_t wanted = record.partition
    cdef lane_t* lane
    cdef int64_t size
    cdef int status
    cdef bint full, in_turn = False, in_part = False
    partition[0] = -1
    if acc.policy == POLICY_LIBRDKAFKA:
        if topic.partitions and wanted >= topic.partitions:
            topic.doubtful = True
            return APPEND_UNKNOWN_PARTITION
        lane = topic.unassigned
    elif topic.partitions == 0 or (not acc.overdraft and (topic.undecided.head != NULL or topic.routing)):
        return _place(acc, topic.undecided, record)
    else:
        if wanted < 0:
            if acc.policy == POLICY_PYTHON:
                return APPEND_NO_CHOICE
            if record.key_size >= 0 and not acc.ignore_keys:
                wanted = (
                    murmur2_bytes(<const unsigned char*>record.key, record.key_size) & 0x7fffffff
                ) % topic.partitions
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
            topic.doubtful = True  # it may be new
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
    cdef int64_t size, wire, total = 0, i = start, room, left = topic.sticky.bound * 2 - topic.sticky.produced
    if topic.sticky.partition < 0 or acc.linger_us > SPAN_US or acc.place_us or acc.overdraft:
        return 0
    lane = topic.lanes.lanes[topic.sticky.partition]
    if lane == NULL or not lane.batch_open or lane.tail == NULL:
        return 0
    chunk = lane.tail
    if chunk.sealed or chunk.rich or chunk.by_reference or chunk.block != block or chunk.epoch != acc.place_epoch:
        return 0
    room = (acc.limit - acc.used) // max(acc.record_overhead, 1)
    if room < stop - start:
        stop = start + max(room, 0)
    while i < stop and column_get(values, i, &value, &size) == CELL_VALUE and size < below:
        wire = record_wire_size(lane.batch_records, -1, size, 1)
        if (
            lane.batch_bytes + wire >= lane.batch_limit
            or wire >= left
            or chunk.used + size + (chunk.count + 1) * chunk.stride > chunk.capacity
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
    chunk.charge += i * acc.record_overhead
    acc.used += i * acc.record_overhead
    acc.records += i
    lane.in_records += i
    lane.in_bytes += total
    if block != NULL:
        block.taken += i
        block.receipt.accepted += i
        block.receipt.bytes += total
    return i


cdef int route_undecided(accumulator_t* acc, topic_t* topic, int32_t* wanted) noexcept nogil:
    """Moves the records that waited for metadata to their lanes, in order.

    `wanted` holds the choices of a Python partitioner for the first chunk, and only that is moved. Records already
    admitted may exceed the pool by one chunk while they move. Returns -1 when memory is short.
    """
    cdef lane_t* lane = topic.undecided
    cdef chunk_t* chunk
    cdef slot_t* slot
    cdef rich_t* more = NULL
    cdef record_t record
    cdef uint32_t i
    cdef int32_t partition
    cdef int status
    cdef int64_t before
    cdef bint moved = False
    while lane.head != NULL and not (wanted != NULL and moved):
        chunk = lane.head
        moved = True
        # Records keep their place in flush and their age, so that the delivery timeout counts from produce.
        acc.overdraft = True
        acc.place_epoch = chunk.epoch
        acc.place_us = chunk.created_us
        acc.place_ms = chunk.created_ms
        before = acc.live_chunks
        for i in range(chunk.count):
            slot = slot_at(chunk, i)
            if slot.state == MOVED:
                continue
            memset(&record, 0, sizeof(record_t))
            record.value = slot.payload
            record.size = slot.size if slot.payload != NULL else -1
            record.key = slot.key
            record.key_size = slot.key_size if slot.key != NULL else -1
            record.partition = slot.state
            record.index = slot.index
            record.block = chunk.block
            record.by_reference = chunk.by_reference
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
            status = append(acc, topic, &record, &partition)
            if status == APPEND_NO_MEMORY:
                _count_new_chunks(acc, chunk.epoch, acc.live_chunks - before)
                _end_move(acc, topic)
                return -1
            lane.in_records -= 1
            lane.in_bytes -= <int64_t>slot.size + slot.key_size
            if status == APPEND_OK:
                slot.state = MOVED
                chunk.moved += 1
                acc.records -= 1
                if chunk.rich and more.callback != NULL:
                    more.callback = NULL
                    chunk.callbacks -= 1
            else:
                if chunk.rich:
                    more.partition = record.partition  # for the callback
                slot.state = ERR_UNKNOWN_PARTITION
                chunk.failed += 1
                lane.failed_records += 1  # no record of this lane is in flight: nobody else counts
                if chunk.rich and more.clock_us:
                    more.clock_us = fp_now_us() - more.clock_us
        _count_new_chunks(acc, chunk.epoch, acc.live_chunks - before)
        _end_move(acc, topic)
        lane.head = chunk.next
        if lane.head == NULL:
            lane.tail = NULL
        chunk.next = NULL
        chunk.resolved = chunk.returned = chunk.sent = chunk.count
        publish(acc, chunk)
        chunk_release(acc, chunk)
    return 0


cdef void _end_move(accumulator_t* acc, topic_t* topic) noexcept nogil:
    cdef int32_t i
    cdef lane_t* lane
    for i in range(topic.lanes.size):  # later records must not inherit the age of those moved
        lane = topic.lanes.lanes[i]
        if lane != NULL and lane.tail != NULL:
            lane.tail.sealed = 1
    acc.overdraft = False
    acc.place_epoch = acc.epoch
    acc.place_us = acc.place_ms = 0


cdef void _count_new_chunks(accumulator_t* acc, uint32_t epoch, int64_t chunks) noexcept nogil:
    """Chunks made of records that a running flush already waits for."""
    cdef flusher_t* flusher = acc.flushers
    while flusher != NULL:
        if epoch <= flusher.epoch:
            flusher.remaining += chunks
        flusher = flusher.next


# ------------------------------------------------------------------------------------------------------ outcomes

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


# ------------------------------------------------------------------------------------------------------ receipts

cdef void block_release(block_t* block) noexcept nogil:
    if block != NULL:
        block.refs -= 1
        if block.refs == 0:
            if block.receipt != NULL:
                receipt_release(block.receipt)
            free(block.failures)
            free(block)


cdef void receipt_release(receipt_t* receipt) noexcept nogil:
    receipt.refs -= 1
    if receipt.refs == 0:
        free(receipt.extents)
        free(receipt)


cdef int _block_add_failure(block_t* block, int64_t index, int32_t error, int32_t partition) noexcept nogil:
    """Notes a failed record; when even that finds no memory the receipt's count still tells (-1)."""
    cdef int64_t capacity
    cdef void* grown
    if block.failure_count == block.failure_capacity:
        capacity = max(16, block.failure_capacity * 2)
        grown = realloc(block.failures, capacity * sizeof(failure_t))
        if grown == NULL:
            return -1
        block.failures = <failure_t*>grown
        block.failure_capacity = capacity
    block.failures[block.failure_count].index = index
    block.failures[block.failure_count].error = error
    block.failures[block.failure_count].partition = partition
    block.failure_count += 1
    return 0


cdef int _receipt_add_extent(
    receipt_t* receipt, topic_t* topic, int32_t partition, int64_t records, int64_t first, int64_t last, int32_t* hint
) noexcept nogil:
    """`hint` remembers the place for the next time, which saves the search in topics of many partitions."""
    cdef extent_t* extent = NULL
    cdef int32_t i, capacity
    cdef void* grown
    if hint != NULL and hint[0] < receipt.extent_count:
        extent = &receipt.extents[hint[0]]
        if extent.partition != partition or extent.topic != topic:
            extent = NULL
    if extent == NULL:
        for i in range(receipt.extent_count - 1, -1, -1):
            if receipt.extents[i].partition == partition and receipt.extents[i].topic == topic:
                extent = &receipt.extents[i]
                break
    if extent == NULL:
        if receipt.extent_count == receipt.extent_capacity:
            capacity = max(8, receipt.extent_capacity * 2)
            grown = realloc(receipt.extents, capacity * sizeof(extent_t))
            if grown == NULL:
                return -1
            receipt.extents = <extent_t*>grown
            receipt.extent_capacity = capacity
        extent = &receipt.extents[receipt.extent_count]
        receipt.extent_count += 1
        extent.topic = topic
        extent.partition = partition
        extent.records = 0
        extent.first = extent.last = -1
    if hint != NULL:
        hint[0] = <int32_t>(extent - receipt.extents)
    extent.records += records
    if first >= 0 and (extent.first < 0 or first < extent.first):
        extent.first = first
    if last > extent.last:
        extent.last = last
    return 0


# -------------------------------------------------------------------------------------------------- for the tests

POLICIES = {
    "uniform": POLICY_UNIFORM,
    "sticky": POLICY_STICKY,
    "round_robin": POLICY_ROUND_ROBIN,
    "partial": POLICY_PARTIAL,
}


cdef class Accumulator:
    """The accumulator without librdkafka: append, take what is ready, acknowledge. One topic.

    Production code runs the same functions; this shim only lets tests drive them. `replay` makes the random
    choices 0, 1, 2, ... modulo, as Kafka's reference vectors were made.
    """

    cdef accumulator_t acc
    cdef topic_t* topic

    def __cinit__(
        self, int32_t partitions, *, policy="uniform", int64_t sticky_bytes=16384, int64_t buffer_memory=32 << 20,
        double linger_ms=0, bint adaptive=True, bint replay=False, int64_t seed=0,
        double availability_timeout_ms=0, bint ignore_keys=False, leaders=None, int32_t limit=1, int64_t failing_opens=0,
    ):
        memset(&self.acc, 0, sizeof(accumulator_t))
        self.acc.policy = POLICIES[policy]
        self.acc.adaptive = adaptive
        self.acc.ignore_keys = ignore_keys
        self.acc.sticky_bytes = sticky_bytes
        self.acc.limit = buffer_memory
        self.acc.linger_us = <int64_t>(linger_ms * 1000)
        self.acc.availability_us = <int64_t>(availability_timeout_ms * 1000)
        self.acc.partial_limit = limit
        self.acc.partial_seed = <uint64_t>seed
        self.acc.failing_opens = failing_opens
        self.acc.random.counting = replay
        self.acc.random.state = <uint64_t>seed
        accumulator_init(&self.acc)
        self.topic = topic_new(&self.acc, b"test")
        if self.topic == NULL:
            raise MemoryError()
        if partitions:
            self.set_partitions(partitions, leaders)

    def __dealloc__(self):
        accumulator_free(&self.acc)

    def set_partitions(self, int32_t partitions, leaders=None):
        """A metadata answer: partition count and leader per partition (default: broker p, -1 for none)."""
        cdef int32_t* brokers = <int32_t*>malloc(partitions * sizeof(int32_t))
        cdef int32_t i
        if brokers == NULL:
            raise MemoryError()
        for i in range(partitions):
            brokers[i] = i if leaders is None else leaders[i]
        try:
            if topic_update(&self.acc, self.topic, partitions, brokers) < 0:
                raise MemoryError()
            if route_undecided(&self.acc, self.topic, NULL) < 0:
                raise MemoryError()
        finally:
            free(brokers)

    def append(self, bytes value, bytes key=None, int32_t partition=-1):
        """The partition the record went to; -1 while partitions are unknown. BufferError when there is no room."""
        cdef record_t record
        cdef int32_t chosen
        cdef int status
        memset(&record, 0, sizeof(record_t))
        record.size = -1 if value is None else len(value)
        record.key_size = -1 if key is None else len(key)
        if value is not None:
            record.value = value
        if key is not None:
            record.key = key
        record.partition = partition
        status = append(&self.acc, self.topic, &record, &chosen)
        if status == APPEND_NO_ROOM:
            raise BufferError("the pool is full")
        if status == APPEND_TOO_LARGE:
            raise ValueError("larger than the pool")
        if status == APPEND_UNKNOWN_PARTITION:
            raise LookupError(f"partition {partition} does not exist")
        if status != APPEND_OK:
            raise MemoryError()
        return chosen

    def append_many(self, Column values):
        """Appends values as a bulk call does, without keys; the partitions they went to, and how many of them in a run."""
        cdef record_t record
        cdef int32_t chosen
        cdef int64_t i = 0, run, runs = 0
        memset(&record, 0, sizeof(record_t))
        record.key_size = -1
        record.partition = -1
        partitions = []
        while i < values.c.length:
            if column_get(&values.c, i, &record.value, &record.size) != CELL_VALUE:
                record.size = -1
            if append(&self.acc, self.topic, &record, &chosen) != APPEND_OK:
                raise BufferError("the pool is full")
            partitions.append(chosen)
            i += 1
            chosen = self.topic.sticky.partition
            run = append_run(&self.acc, self.topic, NULL, &values.c, i, values.c.length, 0, 1 << 20)
            partitions += [chosen] * run
            i += run
            runs += run
        return partitions, runs

    def take(self, bint everything=True):
        """Detaches ready lanes as the sender does: [(partition, [(key, value), ...]), ...]; not yet acknowledged."""
        cdef lane_t* lane
        cdef chunk_t* chunk
        cdef chunk_t* following
        taken = []
        if everything:
            seal_all(&self.acc)
        while True:
            lane = next_ready(&self.acc, fp_now_us())
            if lane == NULL:
                return taken
            chunk = detach(&self.acc, lane)
            records = []
            while chunk != NULL:
                following = chunk.next
                for i in range(chunk.count):
                    records.append((_bytes(slot_at(chunk, i).key, slot_at(chunk, i).key_size),
                                    _bytes(slot_at(chunk, i).payload, slot_at(chunk, i).size)))
                chunk.next = NULL
                chunk.sent = chunk.count
                enter_flight(lane, chunk)
                chunk = following
            taken.append((lane.partition, records))

    def acknowledge(self, int32_t partition):
        """The broker has taken everything in flight on a partition."""
        cdef lane_t* lane = self.topic.lanes.lanes[partition]
        cdef chunk_t* chunk
        while lane != NULL and lane.fly_head != NULL:
            chunk = lane.fly_head
            for i in range(chunk.count):
                slot_at(chunk, i).state = 0
                count_settled(lane, slot_at(chunk, i), False)
            unlink_flying(lane, chunk)
            chunk.resolved = chunk.returned = chunk.count
            publish(&self.acc, chunk)
            chunk_release(&self.acc, chunk)

    def purge(self):
        """Drops what waits; returns how many records."""
        return fail_waiting(&self.acc, ERR_PURGED, INT64_MAX)

    def rebuild(self):
        """Forces the next choice to read the queues again."""
        self.topic.table_us = 0

    def rebuild_many(self, int64_t times):
        """Builds the load table so many times, 10 ms apart by its clock: for benchmarks."""
        cdef int64_t i, now = fp_now_us()
        for i in range(times):
            _rebuild_table(&self.acc, self.topic, now + i * 2 * TABLE_US)

    def choose_many(self, int64_t times, int64_t size):
        """Decides so many times where a record of `size` bytes goes that fills a batch, placing none: for benchmarks.

        Returns the sum of the partitions, so that no compiler leaves it out.
        """
        cdef int64_t i, total = 0
        for i in range(times):
            if self.acc.policy == POLICY_PARTIAL:
                total += partial_next(&self.topic.partial, self.topic.leaders)
                partial_advance(&self.topic.partial)
            else:
                self.topic.sticky.partition = _choose(&self.acc, self.topic, size if i else 0)
                total += self.topic.sticky.partition
        return total

    def weight(self, int32_t partition):
        """The share that the load table gives a partition."""
        return weight_of(self.topic, partition)

    @property
    def used(self):
        return self.acc.used

    @property
    def records(self):
        return self.acc.records

    @property
    def lanes_opened(self):
        return self.acc.lanes_opened

    @property
    def randoms_used(self):
        return self.acc.random.state

    @property
    def sticky(self):
        """(partition, bytes since the switch) of the sticky state."""
        return self.topic.sticky.partition, self.topic.sticky.produced

    def queued_bytes(self, int32_t partition):
        cdef lane_t* lane = self.topic.lanes.lanes[partition]
        return 0 if lane == NULL else queued_bytes(lane)


cdef _bytes(const char* data, uint32_t size):
    return None if data == NULL else data[:size]
