"""The producer runtime: the link to a confluent-kafka client, its threads, and what Python calls.

    produce()          caller's thread      copies the record into its lane
    sender             C thread, no GIL     gives ready chunks to librdkafka, watches linger and timeouts; takes
                                            librdkafka's delivery reports, publishes outcomes, keeps events
    scout              C thread             asks for metadata; takes the GIL only for a Python partitioner
    poll(), flush()    caller's thread      run callbacks; while they wait they also take delivery reports

librdkafka's main queue is read as events, so confluent-kafka's own callbacks (which need its poll() on the stack)
never run, and nothing of this needs the GIL. Inside a transaction confluent-kafka reads that queue itself; there an
interceptor on librdkafka's threads tells us the outcomes instead. It is not used otherwise: the broker thread is
the first to be busy, and this work is better done elsewhere.

Lock order: the GIL, then `accumulator_t.lock`, then a lane's leaf lock. librdkafka is never called with one of
ours held, so its callbacks may take them. No Python object is made under `accumulator_t.lock`.
"""

import operator
import sys

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from fastprod.errors import BufferFullError, ForkError, RecordError
from fastprod.receipt import Extent, FailedRecord, Record

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset, strdup

from fastprod._core._accumulator cimport (
    APPEND_NO_CHOICE,
    APPEND_NO_MEMORY,
    APPEND_NO_ROOM,
    APPEND_OK,
    APPEND_TOO_LARGE,
    APPEND_UNKNOWN_PARTITION,
    BACKREF_BYTES,
    EXPIRED,
    PENDING,
    POLICY_LIBRDKAFKA,
    POLICY_PYTHON,
    POLICY_ROUND_ROBIN,
    POLICY_STICKY,
    POLICY_UNIFORM,
    accumulator_free,
    accumulator_init,
    accumulator_t,
    append,
    block_release,
    block_t,
    chunk_release,
    chunk_t,
    count_settled,
    data_of,
    detach,
    error_of,
    extent_t,
    fail_lane,
    fail_waiting,
    failure_t,
    flusher_t,
    footprint,
    header_t,
    headers_t,
    lane_t,
    lanes_t,
    leave_queue,
    next_deadline,
    next_ready,
    pool_has_room,
    publish,
    queued_bytes,
    queued_records,
    reattach,
    receipt_release,
    receipt_t,
    record_t,
    rich_at,
    rich_t,
    route_undecided,
    seal_all,
    slot_at,
    slot_t,
    topic_new,
    topic_t,
    topic_update,
    unlink_flying,
    waiter_t,
    wake_waiters,
)
from fastprod._core._balance cimport field_size, record_upper_bound, varint_size
from fastprod._core._columns cimport CELL_BAD, CELL_NULL, Column, column_get
from fastprod._core._platform cimport (
    fp_add64,
    fp_assert,
    fp_cas_ptr,
    fp_cond_init,
    fp_cond_wait_until,
    fp_load64,
    fp_load_ptr,
    fp_now_us,
    fp_spin_lock,
    fp_spin_unlock,
    fp_store64,
    fp_store_ptr,
    fp_swap_ptr,
    pthread_atfork,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_cond_t,
    pthread_equal,
    pthread_join,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    pthread_self,
    pthread_t,
)
from fastprod._core._rdkafka cimport *
from fastprod._core._rdkafka cimport api as rdkafka

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object, Py_ssize_t*) except NULL
    unsigned long PyThread_get_thread_ident() nogil

cdef extern from * nogil:
    """
    /* The client that confluent_kafka.Producer() is making on this thread, for the plugin hook below. */
    static __thread void *fp_newborn;
    /* Set while this thread gives librdkafka a single record: if it is refused, the call says so, and the
       acknowledgement that librdkafka makes of it first is not needed. */
    static __thread int fp_handing_over;
    static int fp_is_handing_over(void) { return fp_handing_over; }
    static void fp_hand_over(int now) { fp_handing_over = now; }
    static void *fp_get_newborn(void) { return fp_newborn; }
    static void fp_set_newborn(void *client) { fp_newborn = client; }

    /* A thread that leaves signals to Python's main thread. */
    #include <signal.h>
    static int fp_start_thread(pthread_t *thread, void *(*run)(void *), void *argument) {
        sigset_t all, old;
        int failed;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old);
        failed = pthread_create(thread, NULL, run, argument);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        return failed;
    }

    /* librdkafka finds this by name: our module is listed in plugin.library.paths. */
    static int fp_conf_init(void *conf);
    __attribute__((visibility("default")))
    int conf_init(void *conf, void **opaque, char *errstr, size_t errstr_size) {
        (void)opaque; (void)errstr; (void)errstr_size;
        return fp_conf_init(conf);
    }
    """
    void* fp_get_newborn()
    void fp_set_newborn(void*)
    int fp_is_handing_over()
    void fp_hand_over(int)
    int fp_start_thread(pthread_t*, void* (*)(void*) noexcept nogil, void*)

cdef enum:
    SCRATCH_MESSAGES = 4096     # most that go to librdkafka in one call; a chunk never holds more
    RETRY_US = 2000             # pause after librdkafka's queue was full
    LATE_US = 50000             # records that waited longer keep their own timestamp
    STUCK_US = 1000000          # no acknowledgement for so long: look for a new leader
    GRACE_US = 1500000          # librdkafka looks for timed-out messages once a second
    EVENTS_KEPT = 10000         # events that wait for poll()
    SLICE_US = 100000           # how long a call may block before it looks for Ctrl-C
    ZERO_COPY_BYTES = 1024      # smaller values are cheaper to copy than to pin
    MAX_PARTITIONS = 0x7fff0000 # larger numbers mean other things in slot_t.state
    BULK_STEP = 1024            # records appended under one hold of the lock
    # What librdkafka allocates per message, besides the key: rd_kafka_msg_t and malloc's share.
    MESSAGE_OVERHEAD = 272

ctypedef struct handles_t:      # topics by librdkafka's handle; replaced as a whole, read without a lock
    uint32_t mask
    uint32_t count
    handles_t* previous         # older tables live until the end
    void** keys                 # rd_kafka_topic_t*
    topic_t** topics

ctypedef struct event_t:        # something for a user's callback: an event of librdkafka's, or throttling
    event_t* next
    rd_kafka_event_t* event     # NULL = throttling
    char* broker
    int32_t broker_id
    int throttle_ms

ctypedef struct client_t:
    accumulator_t acc
    rd_kafka_t* rk              # owned by the confluent_kafka.Producer
    rd_kafka_queue_t* queue     # its main queue
    handles_t* handles
    void* completed             # stack of chunks that librdkafka has given back entirely, not yet published
    rd_kafka_message_t* scratch # the sender's
    pthread_t sender
    pthread_t scout
    int threads                 # how many of them run
    bint stop
    bint news                   # librdkafka's queue has something
    event_t* events
    event_t* last_event
    int64_t event_count
    unsigned long poller        # thread that last ran callbacks
    bint sending                # the sender has chunks that are in no list
    pthread_cond_t scout_wake   # a topic is new, or looks stuck
    int64_t refresh_us          # topic.metadata.refresh.interval.ms
    int64_t propagation_us      # how long a topic may stay unknown
    void* runtime               # the Runtime, for a Python partitioner
    bint python_partitioner
    bint transactional

cdef int fork_generation = 0

# All clients of the process, for the one hook that librdkafka calls without our pointer.
cdef client_t* _clients[1024]
cdef int _clients_lock = 0


cdef void _forked() noexcept nogil:
    global fork_generation, _clients_lock
    fork_generation += 1
    _clients_lock = 0  # whoever held it is not here
    memset(_clients, 0, sizeof(_clients))


pthread_atfork(NULL, NULL, _forked)


# ------------------------------------------------------------------------------------------- hooks in librdkafka

cdef int _conf_init "fp_conf_init"(void* conf) noexcept nogil:
    """Called while confluent_kafka.Producer() configures a client, on the thread that makes it."""
    cdef void* client = fp_get_newborn()
    if client == NULL:
        return 0  # somebody else's client listed our library
    rdkafka.conf_set_throttle_cb(<rd_kafka_conf_t*>conf, _on_throttle)
    return rdkafka.conf_interceptor_add_on_new(<rd_kafka_conf_t*>conf, b"fastprod", _on_new, client)


cdef rd_kafka_resp_err_t _on_new(
    rd_kafka_t* rk, const rd_kafka_conf_t* conf, void* opaque, char* errstr, size_t errstr_size
) noexcept nogil:
    (<client_t*>opaque).rk = rk
    if not (<client_t*>opaque).transactional:
        return 0
    return rdkafka.interceptor_add_on_acknowledgement(rk, b"fastprod", _on_acknowledged, opaque)


cdef inline topic_t* _topic_of(client_t* client, void* handle) noexcept nogil:
    cdef handles_t* table = <handles_t*>fp_load_ptr(<void**>&client.handles)
    cdef uint32_t i
    if table == NULL or handle == NULL:
        return NULL
    i = <uint32_t>(<uint64_t>handle >> 4) & table.mask
    while table.keys[i] != NULL:
        if table.keys[i] == handle:
            return table.topics[i]
        i = (i + 1) & table.mask
    return NULL


cdef inline bint _is_record(chunk_t* chunk, slot_t* slot, const rd_kafka_message_t* message) noexcept nogil:
    """Whether the message is this record: by payload pointer.

    Null values have none, and callers' buffers may hold the same value many times: there the key must be equal too.
    """
    if slot.payload != <const char*>message.payload or slot.size != message.len:
        return False
    if slot.payload != NULL and not chunk.by_reference and slot.size:
        return True
    return (
        (slot.key == NULL) == (message.key == NULL)
        and slot.key_size == message.key_len
        and memcmp(slot.key, message.key, slot.key_size if slot.key != NULL else 0) == 0
    )


cdef chunk_t* _find(lane_t* lane, const rd_kafka_message_t* message, uint32_t* index) noexcept nogil:
    """The in-flight record a message stands for; the leaf lock is held. Nearly always the first guess."""
    cdef chunk_t* chunk = lane.fly_head
    cdef const char* payload = <const char*>message.payload
    cdef uint32_t i
    if lane == lane.topic.unassigned and payload != NULL:
        memcpy(&chunk, payload - BACKREF_BYTES, sizeof(chunk_t*))
        memcpy(index, payload - BACKREF_BYTES + sizeof(chunk_t*), sizeof(uint32_t))
        return chunk
    while chunk != NULL:
        if chunk.by_reference or payload == NULL or (
            data_of(chunk) <= payload <= data_of(chunk) + chunk.used
        ):
            i = chunk.cursor
            if i < chunk.count and _is_record(chunk, slot_at(chunk, i), message) and slot_at(chunk, i).state == PENDING:
                index[0] = i
                return chunk
            for i in range(chunk.count):
                if slot_at(chunk, i).state == PENDING and _is_record(chunk, slot_at(chunk, i), message):
                    index[0] = i
                    return chunk
        chunk = chunk.fly_next
    chunk = lane.fly_head
    while chunk != NULL:  # not pending: the delivery timeout has already ended this record here
        for i in range(chunk.count):
            if slot_at(chunk, i).state == EXPIRED and _is_record(chunk, slot_at(chunk, i), message):
                index[0] = i
                return chunk
        chunk = chunk.fly_next
    return NULL


cdef bint _settle(
    lane_t* lane, chunk_t* chunk, uint32_t i, int32_t error, const rd_kafka_message_t* message
) noexcept nogil:
    """librdkafka is done with a record. The leaf lock is held; true when it was the chunk's last."""
    cdef slot_t* slot = slot_at(chunk, i)
    cdef rich_t* more
    cdef int64_t offset = -1 if message == NULL else message.offset
    chunk.returned += 1
    chunk.cursor = i + 1
    if slot.state == PENDING:
        slot.state = error
        chunk.resolved += 1
        count_settled(lane, slot, error != 0)
        if error:
            chunk.failed += 1
        elif offset >= 0:
            if chunk.first_offset < 0 or offset < chunk.first_offset:
                chunk.first_offset = offset
            if offset > chunk.last_offset:
                chunk.last_offset = offset
        if chunk.rich:
            more = rich_at(chunk, i)
            more.offset = offset
            if message != NULL:
                more.partition = message.partition
                if not error:
                    more.timestamp = rdkafka.message_timestamp(message, <int*>&more.timestamp_type)
            if more.clock_us:
                more.clock_us = fp_now_us() - more.clock_us
    elif slot.state == EXPIRED:
        slot.state = ERR__MSG_TIMED_OUT
    if chunk.returned == chunk.count:
        unlink_flying(lane, chunk)
        return True
    return False


cdef void _push_completed(client_t* client, chunk_t* chunk) noexcept nogil:
    cdef void* head = fp_load_ptr(&client.completed)
    chunk.fly_next = <chunk_t*>head  # `next` may be in use: a chunk that timed out waits in the delivery list
    while not fp_cas_ptr(&client.completed, &head, chunk):
        chunk.fly_next = <chunk_t*>head


cdef rd_kafka_resp_err_t _on_acknowledged(rd_kafka_t* rk, rd_kafka_message_t* message, void* opaque) noexcept nogil:
    """Transactional producers only. Runs on librdkafka's threads, some with its locks held."""
    if not fp_is_handing_over():
        _acknowledge(<client_t*>opaque, message)
    return 0


cdef void _acknowledge(client_t* client, const rd_kafka_message_t* message) noexcept nogil:
    """Notes a record's outcome. Takes the lane's leaf lock only."""
    cdef topic_t* topic = _topic_of(client, message.rkt)
    cdef lanes_t* lanes
    cdef lane_t* lane = NULL
    cdef chunk_t* chunk
    cdef uint32_t i = 0
    cdef bint last = False
    if topic == NULL:
        return
    lanes = <lanes_t*>fp_load_ptr(<void**>&topic.lanes)
    if client.acc.policy == POLICY_LIBRDKAFKA:
        lane = topic.unassigned
    elif 0 <= message.partition < lanes.size:
        lane = <lane_t*>fp_load_ptr(<void**>&lanes.lanes[message.partition])
    if lane == NULL:
        return
    fp_spin_lock(&lane.spin)
    chunk = _find(lane, message, &i)
    if chunk != NULL:
        last = _settle(lane, chunk, i, message.err, message)
    fp_spin_unlock(&lane.spin)
    if chunk != NULL and not message.err and (last or i & 63 == 0):
        fp_store64(&lane.progress_us, fp_now_us())
    if last:
        _push_completed(client, chunk)


cdef void _on_throttle(
    rd_kafka_t* rk, const char* broker, int32_t broker_id, int throttle_ms, void* opaque
) noexcept nogil:
    """Runs inside the reaper's queue_poll (or a transaction's wait); `opaque` is confluent's, so look `rk` up."""
    cdef client_t* client = _client_of(rk)
    cdef event_t* event
    if client == NULL:
        return
    event = <event_t*>calloc(1, sizeof(event_t))
    if event == NULL:
        return
    event.broker = strdup(broker)
    event.broker_id = broker_id
    event.throttle_ms = throttle_ms
    _keep_event(client, event)


cdef void _keep_event(client_t* client, event_t* event) noexcept nogil:
    """Keeps an event until poll(); the oldest goes when nobody polls."""
    cdef event_t* oldest = NULL
    pthread_mutex_lock(&client.acc.lock)
    if client.last_event != NULL:
        client.last_event.next = event
    else:
        client.events = event
    client.last_event = event
    client.event_count += 1
    client.acc.news += 1
    if client.event_count > EVENTS_KEPT:
        oldest = client.events
        client.events = oldest.next
        client.event_count -= 1
    if client.acc.done_waiting:
        pthread_cond_broadcast(&client.acc.done)
    pthread_mutex_unlock(&client.acc.lock)
    _drop_event(oldest)


cdef void _drop_event(event_t* event) noexcept nogil:
    if event != NULL:
        if event.event != NULL:
            rdkafka.event_destroy(event.event)
        free(event.broker)
        free(event)


cdef client_t* _client_of(rd_kafka_t* rk) noexcept nogil:
    cdef int i
    cdef client_t* found = NULL
    fp_spin_lock(&_clients_lock)
    for i in range(1024):
        if _clients[i] != NULL and _clients[i].rk == rk:
            found = _clients[i]
            break
    fp_spin_unlock(&_clients_lock)
    return found


cdef void _register(client_t* old, client_t* new) noexcept nogil:
    """Replaces one entry: (NULL, client) adds, (client, NULL) removes. Beyond 1024 clients throttling is silent."""
    cdef int i
    fp_spin_lock(&_clients_lock)
    for i in range(1024):
        if _clients[i] == old:
            _clients[i] = new
            break
    fp_spin_unlock(&_clients_lock)


# --------------------------------------------------------------------------------------------------------- outcomes

cdef void _publish_completed(client_t* client) noexcept nogil:
    cdef chunk_t* chunk = <chunk_t*>fp_swap_ptr(&client.completed, NULL)
    cdef chunk_t* ordered = NULL
    cdef chunk_t* following
    if chunk == NULL:
        return
    while chunk != NULL:  # a stack: turn it round, so that callbacks keep the order of acknowledgement
        following = chunk.fly_next
        chunk.fly_next = ordered
        ordered = chunk
        chunk = following
    pthread_mutex_lock(&client.acc.lock)
    while ordered != NULL:
        following = ordered.fly_next
        ordered.fly_next = NULL
        if not ordered.published:
            publish(&client.acc, ordered)
        chunk_release(&client.acc, ordered)
        ordered = following
    pthread_mutex_unlock(&client.acc.lock)


cdef void _on_queue(rd_kafka_t* rk, void* opaque) noexcept nogil:
    """librdkafka's queue is no longer empty; runs on its threads. Whoever waits first empties it."""
    cdef client_t* client = <client_t*>opaque
    pthread_mutex_lock(&client.acc.lock)
    client.news = True
    if client.acc.done_waiting:
        pthread_cond_broadcast(&client.acc.done)
    if client.acc.sender_waiting:
        pthread_cond_signal(&client.acc.work)
    pthread_mutex_unlock(&client.acc.lock)


cdef void _drain(client_t* client) noexcept nogil:
    """Empties librdkafka's queue: notes outcomes, frees messages, keeps what is for the user's callbacks."""
    cdef rd_kafka_event_t* event
    cdef const rd_kafka_message_t* message
    cdef event_t* kept
    cdef int kind
    client.news = False  # first: what comes from here on sets it again
    event = rdkafka.queue_poll(client.queue, 0)
    while event != NULL:
        kind = rdkafka.event_type(event)
        kept = NULL
        if kind == EVENT_DR and not client.transactional:
            message = rdkafka.event_message_next(event)
            while message != NULL:
                _acknowledge(client, message)
                message = rdkafka.event_message_next(event)
        if kind == EVENT_ERROR or kind == EVENT_STATS or kind == EVENT_LOG:
            kept = <event_t*>calloc(1, sizeof(event_t))
        if kept != NULL:
            kept.event = event
            _keep_event(client, kept)
        else:
            rdkafka.event_destroy(event)
        _publish_completed(client)
        event = rdkafka.queue_poll(client.queue, 0)
    _publish_completed(client)


# --------------------------------------------------------------------------------------------------------- sender

cdef void _enter_flight(lane_t* lane, chunk_t* chunk) noexcept nogil:
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


cdef void _refused(client_t* client, lane_t* lane, chunk_t* chunk, uint32_t i, int32_t error) noexcept nogil:
    """librdkafka would not take the record: that is its outcome."""
    cdef bint last = False
    fp_spin_lock(&lane.spin)
    if slot_at(chunk, i).state == PENDING:
        last = _settle(lane, chunk, i, error, NULL)
    fp_spin_unlock(&lane.spin)
    if last:
        _push_completed(client, chunk)


cdef int _send_batch(client_t* client, lane_t* lane, chunk_t* chunk, uint32_t start, uint32_t end) noexcept nogil:
    """One call for records start..end-1; returns how many of them librdkafka's queue had no room for.

    Once all are taken the chunk may be gone, so it is touched again only for those that were not.
    """
    cdef rd_kafka_message_t* messages = client.scratch
    cdef rd_kafka_message_t* message
    cdef slot_t* slot
    cdef uint32_t i, n = end - start
    cdef int32_t partition = lane.partition
    for i in range(n):
        slot = slot_at(chunk, start + i)
        message = &messages[i]
        message.payload = <void*>slot.payload
        message.len = slot.size
        message.key = <void*>slot.key
        message.key_len = slot.key_size
    if <uint32_t>rdkafka.produce_batch(<rd_kafka_topic_t*>lane.topic.handle, partition, 0, messages, n) == n:
        return 0
    for i in range(n):
        if messages[i].err == ERR__QUEUE_FULL:
            return n - i  # a clean suffix
        if messages[i].err:
            _refused(client, lane, chunk, start + i, messages[i].err)
    return 0


cdef rd_kafka_headers_t* _headers(const char* packed) noexcept nogil:
    cdef const headers_t* headers = <const headers_t*>packed
    cdef rd_kafka_headers_t* made = rdkafka.headers_new(headers.count)
    cdef const char* at = packed + sizeof(headers_t)
    cdef header_t header
    cdef uint32_t i
    for i in range(headers.count):
        memcpy(&header, at, sizeof(header_t))
        at += sizeof(header_t)
        if header.value_size == 0xffffffffU:
            rdkafka.header_add(made, at, header.name_size, NULL, -1)
            at += header.name_size
        else:
            rdkafka.header_add(made, at, header.name_size, at + header.name_size, header.value_size)
            at += header.name_size + header.value_size
    return made


cdef int _send_one(client_t* client, lane_t* lane, chunk_t* chunk, uint32_t i, int64_t timestamp) noexcept nogil:
    """A record with headers or timestamp; 1 when librdkafka's queue is full."""
    cdef rd_kafka_vu_t arguments[7]
    cdef slot_t* slot = slot_at(chunk, i)
    cdef rich_t* more = rich_at(chunk, i) if chunk.rich else NULL
    cdef rd_kafka_headers_t* headers = NULL
    cdef rd_kafka_error_t* failure
    cdef rd_kafka_resp_err_t error
    cdef size_t n = 5
    arguments[0].vtype = VTYPE_RKT
    arguments[0].u.rkt = <rd_kafka_topic_t*>lane.topic.handle
    arguments[1].vtype = VTYPE_PARTITION
    arguments[1].u.i32 = lane.partition if more == NULL else more.partition
    arguments[2].vtype = VTYPE_MSGFLAGS
    arguments[2].u.i = 0
    arguments[3].vtype = VTYPE_VALUE
    (<rd_kafka_vu_mem*>&arguments[3].u).ptr = <void*>slot.payload
    (<rd_kafka_vu_mem*>&arguments[3].u).size = slot.size
    arguments[4].vtype = VTYPE_KEY
    (<rd_kafka_vu_mem*>&arguments[4].u).ptr = <void*>slot.key
    (<rd_kafka_vu_mem*>&arguments[4].u).size = slot.key_size
    if more != NULL and more.timestamp:
        timestamp = more.timestamp
    if timestamp:
        arguments[n].vtype = VTYPE_TIMESTAMP
        arguments[n].u.i64 = timestamp
        n += 1
    if more != NULL and more.headers != NULL:
        headers = _headers(more.headers)
        arguments[n].vtype = VTYPE_HEADERS
        arguments[n].u.headers = headers
        n += 1
    fp_hand_over(1)
    failure = rdkafka.produceva(client.rk, arguments, n)
    fp_hand_over(0)
    if failure == NULL:
        return 0  # the headers are librdkafka's now
    error = rdkafka.error_code(failure)
    rdkafka.error_destroy(failure)
    if headers != NULL:
        rdkafka.headers_destroy(headers)
    if error == ERR__QUEUE_FULL:
        return 1
    _refused(client, lane, chunk, i, error)
    return 0


cdef bint _send_chunk(client_t* client, lane_t* lane, chunk_t* chunk) noexcept nogil:
    """Gives a chunk to librdkafka; false when its queue is full and some of it is left."""
    cdef uint32_t i = chunk.sent, start, count = chunk.count, left
    cdef int64_t timestamp = 0
    cdef rich_t* more
    cdef bint single
    cdef bint mixed = chunk.single
    if fp_now_us() - chunk.created_us > LATE_US:
        timestamp = chunk.created_ms
    _enter_flight(lane, chunk)
    # The chunk counts as sent before the calls: it may be acknowledged and gone by the time they return.
    chunk.sent = count
    if not mixed and timestamp == 0:
        left = _send_batch(client, lane, chunk, i, count)
        if left:
            chunk.sent = count - left
            return False
        return True
    while i < count:
        start = i
        single = timestamp != 0
        while i < count and not single:
            more = rich_at(chunk, i)
            single = more.headers != NULL or more.timestamp != 0 or more.partition != lane.partition
            if not single:
                i += 1
        if i > start:
            left = _send_batch(client, lane, chunk, start, i)
            if left:
                chunk.sent = i - left
                return False
        if i < count:
            # A record not handed over yet keeps the chunk alive, so reading it here is safe.
            if _send_one(client, lane, chunk, i, timestamp):
                chunk.sent = i
                return False
            i += 1
    return True


cdef void _expire(client_t* client, int64_t now) noexcept nogil:
    """Ends records whose delivery timeout, counted from produce, is over. The lock is held."""
    cdef accumulator_t* acc = &client.acc
    cdef topic_t* topic = acc.topics
    cdef lanes_t* lanes
    cdef lane_t* lane
    cdef int32_t i
    if acc.timeout_us == 0:
        return
    fail_waiting(acc, ERR__MSG_TIMED_OUT, now - acc.timeout_us)
    while topic != NULL:
        lanes = topic.lanes
        for i in range(lanes.size):
            lane = lanes.lanes[i]
            if lane != NULL:
                _expire_flying(acc, lane, now - acc.timeout_us - GRACE_US)
        _expire_flying(acc, topic.unassigned, now - acc.timeout_us - GRACE_US)
        topic = topic.next


cdef void _expire_flying(accumulator_t* acc, lane_t* lane, int64_t before_us) noexcept nogil:
    """Reports records as timed out that waited so long for metadata that librdkafka still tries to send them.

    librdkafka counts from the hand-over and cannot be told otherwise. Their memory stays until it gives them back.
    """
    cdef chunk_t* chunk
    cdef chunk_t* overdue = NULL
    cdef slot_t* slot
    cdef uint32_t i
    fp_spin_lock(&lane.spin)
    chunk = lane.fly_head
    while chunk != NULL and chunk.created_us < before_us:
        if not chunk.published and chunk.sent == chunk.count:
            for i in range(chunk.count):
                slot = slot_at(chunk, i)
                if slot.state == PENDING:
                    slot.state = EXPIRED
                    chunk.resolved += 1
                    chunk.failed += 1
                    count_settled(lane, slot, True)
                    if chunk.rich and rich_at(chunk, i).clock_us:
                        rich_at(chunk, i).clock_us = fp_now_us() - rich_at(chunk, i).clock_us
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


cdef bint _look_for_stuck(client_t* client, int64_t now) noexcept nogil:
    """Whether some lane has records out and hears nothing: its leader may have moved."""
    cdef topic_t* topic = client.acc.topics
    cdef lane_t* lane
    cdef int32_t i
    cdef bint stuck = False
    while topic != NULL:
        if now - topic.metadata_us > STUCK_US and topic.partitions:
            for i in range(topic.lanes.size):
                lane = topic.lanes.lanes[i]
                if lane != NULL and queued_records(lane) and (
                    now - fp_load64(&lane.progress_us) > STUCK_US + client.acc.linger_us
                ):
                    topic.metadata_us = 0  # due now
                    stuck = True
                    break
        topic = topic.next
    return stuck


cdef void* _sender(void* argument) noexcept nogil:
    cdef client_t* client = <client_t*>argument
    cdef accumulator_t* acc = &client.acc
    cdef lane_t* lane
    cdef chunk_t* chunk
    cdef chunk_t* following
    cdef int64_t now, checked = 0
    pthread_mutex_lock(&acc.lock)
    while not client.stop:
        now = fp_now_us()
        if now - checked >= 1000000 or (acc.timeout_us and now - checked >= acc.timeout_us >> 2):
            checked = now
            _expire(client, now)
            if _look_for_stuck(client, now):
                pthread_cond_signal(&client.scout_wake)
        if client.news or fp_load_ptr(&client.completed) != NULL:
            pthread_mutex_unlock(&acc.lock)
            _drain(client)
            pthread_mutex_lock(&acc.lock)
        lane = next_ready(acc, now)
        if lane == NULL and (client.news or client.stop):
            continue
        if lane == NULL:
            now = next_deadline(acc, now)
            if acc.timeout_us:
                now = min(now, checked + max(acc.timeout_us >> 2, 1000))
            acc.sender_waiting = True
            fp_cond_wait_until(&acc.work, &acc.lock, now)
            acc.sender_waiting = False
            continue
        chunk = detach(acc, lane)
        client.sending = True
        pthread_mutex_unlock(&acc.lock)
        while chunk != NULL:
            following = chunk.next
            if not _send_chunk(client, lane, chunk):
                break
            chunk = following
        pthread_mutex_lock(&acc.lock)
        client.sending = False
        if chunk != NULL:
            lane.retry_us = fp_now_us() + RETRY_US
            reattach(acc, lane, chunk)
    pthread_mutex_unlock(&acc.lock)
    return NULL


# ---------------------------------------------------------------------------------------------------------- scout

cdef topic_t* _next_lookup(client_t* client, int64_t now, int64_t* due) noexcept nogil:
    """The topic whose metadata is due, or NULL and when the next will be. The lock is held."""
    cdef topic_t* topic = client.acc.topics
    cdef int64_t at
    due[0] = now + 1000000
    while topic != NULL:
        if topic.metadata_us <= 0:      # never asked, or asked for by the sender
            return topic
        if topic.partitions == 0:       # asked, no answer yet: try again, soon if records wait
            at = topic.metadata_us + (100000 if topic.undecided.head != NULL else 1000000)
        else:
            at = topic.metadata_us + client.refresh_us
        if at <= now:
            return topic
        due[0] = min(due[0], at)
        topic = topic.next
    return NULL


cdef bint _is_final(int32_t error) noexcept nogil:
    return error == ERR_TOPIC_AUTHORIZATION_FAILED or error == ERR_TOPIC_EXCEPTION


cdef void _take_metadata(client_t* client, topic_t* topic, const rd_kafka_metadata_t* answer) noexcept nogil:
    """The lock is held."""
    cdef const rd_kafka_metadata_topic_t* found = NULL
    cdef int32_t* leaders
    cdef int32_t i, error = ERR__TIMED_OUT
    cdef int64_t now = fp_now_us()
    topic.metadata_us = now
    if answer != NULL and answer.topic_cnt == 1:
        found = &answer.topics[0]
        error = found.err
    topic.metadata_error = error
    if error == 0 and found.partition_cnt > 0:
        topic.unknown_since_us = 0
        leaders = <int32_t*>malloc(found.partition_cnt * sizeof(int32_t))
        if leaders == NULL:
            return
        for i in range(found.partition_cnt):
            leaders[i] = -1
        for i in range(found.partition_cnt):
            if 0 <= found.partitions[i].id < found.partition_cnt:
                leaders[found.partitions[i].id] = found.partitions[i].leader
        topic_update(&client.acc, topic, found.partition_cnt, leaders)
        free(leaders)
        if not client.python_partitioner:
            route_undecided(&client.acc, topic, NULL)
        return
    if topic.partitions:
        return  # keep what was known
    if error == ERR_UNKNOWN_TOPIC_OR_PART or error == 0:
        if topic.unknown_since_us == 0:
            topic.unknown_since_us = now
        if now - topic.unknown_since_us < client.propagation_us:
            return
        error = ERR__UNKNOWN_TOPIC
    elif not _is_final(error):
        return
    fail_lane(&client.acc, topic.undecided, error, INT64_MAX)


cdef void* _scout(void* argument) noexcept nogil:
    cdef client_t* client = <client_t*>argument
    cdef accumulator_t* acc = &client.acc
    cdef topic_t* topic
    cdef const rd_kafka_metadata_t* answer
    cdef int64_t due = 0
    cdef int patience = 100  # ms; short at first, so that closing a producer without broker is quick
    cdef rd_kafka_resp_err_t error
    pthread_mutex_lock(&acc.lock)
    while not client.stop:
        topic = _next_lookup(client, fp_now_us(), &due)
        if topic == NULL:
            fp_cond_wait_until(&client.scout_wake, &acc.lock, due)
            continue
        pthread_mutex_unlock(&acc.lock)
        answer = NULL
        error = rdkafka.metadata(client.rk, 0, <rd_kafka_topic_t*>topic.handle, &answer, patience)
        patience = 100 if error == 0 else min(patience * 2, 2000)
        pthread_mutex_lock(&acc.lock)
        _take_metadata(client, topic, answer)
        if client.python_partitioner and topic.partitions and topic.undecided.head != NULL:
            topic.routing = True
            pthread_mutex_unlock(&acc.lock)
            _route_by_python(client.runtime, topic)
            pthread_mutex_lock(&acc.lock)
            topic.routing = False
        if answer != NULL:
            rdkafka.metadata_destroy(answer)
        if error and not client.stop:  # nobody to ask: do not spin
            fp_cond_wait_until(&client.scout_wake, &acc.lock, fp_now_us() + 20000)
    pthread_mutex_unlock(&acc.lock)
    return NULL


# ------------------------------------------------------------------------------------------------ what Python sees

@cython.final
@cython.freelist(256)
cdef class Message:
    """A delivered or failed record, as confluent_kafka.Message presents it."""

    cdef object _topic
    cdef object _key
    cdef object _value
    cdef object _error
    cdef object _headers        # list, bytes of packed headers, or None
    cdef int64_t _offset
    cdef int64_t _timestamp
    cdef int64_t _latency_us
    cdef int32_t _partition
    cdef int32_t _timestamp_type

    @property
    def __class__(self):
        """Code that checks isinstance(msg, confluent_kafka.Message) keeps working."""
        return confluent_kafka.Message

    def error(self):
        """The KafkaError of a failed record, None for a delivered one."""
        return self._error

    def topic(self):
        return self._topic

    def partition(self):
        return None if self._partition < 0 else self._partition

    def offset(self):
        return None if self._offset < 0 else self._offset

    def key(self):
        return self._key

    def value(self):
        return self._value

    def timestamp(self):
        """(type, milliseconds), as in confluent_kafka: type 1 is create time, 2 log append time, 0 none."""
        return (self._timestamp_type, self._timestamp)

    def latency(self):
        """Seconds from produce() to the acknowledgement."""
        return None if self._latency_us < 0 else self._latency_us / 1e6

    def headers(self):
        """List of (name, value) or None."""
        if isinstance(self._headers, bytes):
            self._headers = _unpack_headers(self._headers)
        return self._headers

    def leader_epoch(self):
        return None

    def delivery_count(self):
        return None

    def set_headers(self, headers):
        self._headers = headers

    def set_key(self, key):
        self._key = key

    def set_value(self, value):
        self._value = value

    def set_topic(self, topic):
        self._topic = topic

    def set_error(self, error):
        self._error = error

    def __len__(self):
        return 0 if self._value is None else len(self._value)

    def __repr__(self):
        return f"<Message topic={self._topic!r} partition={self.partition()} offset={self.offset()} error={self._error}>"


cdef bytes _pack_headers(headers):
    """Headers as one block: a headers_t, then per header two lengths, name and value."""
    cdef headers_t head
    cdef header_t entry
    cdef int64_t wire = 0
    if type(headers) is dict:
        items = headers.items()
    elif isinstance(headers, list):
        items = headers
    elif isinstance(headers, dict):
        items = headers.items()
    else:
        raise TypeError(
            f"headers must be a dict or a list of (name, value) tuples, not {type(headers).__name__}"
        )
    parts = []
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2:
            raise TypeError(f"a header must be a (name, value) tuple, not {item!r}")
        name, value = item
        if not isinstance(name, str):
            raise TypeError(f"a header's name must be str, not {type(name).__name__}")
        if isinstance(value, str):
            value = value.encode()
        elif value is not None and not isinstance(value, bytes):
            try:
                value = bytes(memoryview(value))
            except TypeError:
                raise TypeError(
                    f"header {name!r} must be bytes, str, None or a buffer, not {type(value).__name__}"
                ) from None
        name = name.encode()
        entry.name_size = len(name)
        entry.value_size = 0xffffffffU if value is None else len(value)
        wire += field_size(len(name)) + field_size(-1 if value is None else len(value))
        parts.append((<const char*>&entry)[:sizeof(header_t)])
        parts.append(name)
        if value is not None:
            parts.append(value)
    head.count = len(items)
    head.wire = <uint32_t>(wire + varint_size(head.count))
    head.unused = 0
    packed = b"".join(parts)
    head.size = <uint32_t>(sizeof(headers_t) + len(packed))
    return (<const char*>&head)[:sizeof(headers_t)] + packed


cdef list _unpack_headers(bytes packed):
    cdef const char* at = PyBytes_AS_STRING(packed)
    cdef uint32_t count = (<const headers_t*>at).count
    cdef header_t entry
    at += sizeof(headers_t)
    headers = []
    for _ in range(count):
        memcpy(&entry, at, sizeof(header_t))
        at += sizeof(header_t)
        name = at[:entry.name_size].decode()
        at += entry.name_size
        if entry.value_size == 0xffffffffU:
            headers.append((name, None))
        else:
            headers.append((name, at[:entry.value_size]))
            at += entry.value_size
    return headers


cdef class Block:
    """Records of a bulk call that share source buffers; keeps those alive while librdkafka may read them."""

    cdef block_t* c
    cdef bint busy              # its records are being handed in
    cdef int64_t first          # index of its first record in the call
    cdef int64_t count
    cdef Column values
    cdef Column keys
    cdef Column topics
    cdef object partitions
    cdef object timestamps
    cdef object headers

    def __dealloc__(self):
        # The Runtime keeps a Block until no chunk refers to it, so this is the last reference.
        block_release(self.c)

    cdef bint idle(self) noexcept:
        """Whether librdkafka holds nothing of it any more; the lock is held."""
        return self.c.refs == 1 and not self.busy

    cdef record(self, topic, int64_t index, partition):
        """The record at a position of the call."""
        at = index - self.first
        if partition is None or partition < 0:
            partition = None if self.partitions is None or self.partitions[at] < 0 else int(self.partitions[at])
        return Record(
            topic if self.topics is None else _cell(self.topics, at, True),
            _cell(self.keys, at, False),
            _cell(self.values, at, False),
            partition,
            None if self.headers is None else self.headers[at],
            None if self.timestamps is None else int(self.timestamps[at]),
        )


cdef class Receipt:
    """What became of the records of one bulk call.

    `wait()` blocks until every record has its outcome; until then the counts grow. Records that failed are in
    `errors`, with their position in the call.
    """

    cdef receipt_t* c
    cdef Runtime runtime        # keeps the lock alive
    cdef list blocks            # those librdkafka may still read
    cdef dict rejected          # index -> exception: never accepted
    cdef dict kept              # index -> Record of failed records whose block is gone
    cdef object topic           # the call's topic, None = a topic per record
    cdef bint full              # the buffer was full for max.block.ms: the rest of the call does not wait again
    cdef readonly object total  # records in the call

    def __cinit__(self):
        self.c = <receipt_t*>calloc(1, sizeof(receipt_t))
        if self.c == NULL:
            raise MemoryError()
        self.c.refs = 1
        self.blocks = []
        self.rejected = {}
        self.kept = {}
        self.total = 0

    def __dealloc__(self):
        if self.c != NULL:
            receipt_release(self.c)

    @property
    def accepted(self):
        """Records that went into the accumulator."""
        return self.c.accepted

    @property
    def acknowledged(self):
        """Records the broker has confirmed."""
        self.lock()
        n = self.c.acknowledged
        self.unlock()
        return n

    @property
    def failed(self):
        """Records that were refused or could not be delivered."""
        self.lock()
        n = self.c.failed
        self.unlock()
        return n + len(self.rejected)

    @property
    def done(self):
        """Whether every record has its outcome."""
        return self.acknowledged + self.failed == self.total

    cdef int lock(self) except -1:
        # Between lock and unlock no Python object may be made: that could run other Python code, which could need
        # the lock.
        self.runtime.check_fork()
        pthread_mutex_lock(&self.runtime.client.acc.lock)
        return 0

    cdef void unlock(self) noexcept:
        pthread_mutex_unlock(&self.runtime.client.acc.lock)

    def wait(self, timeout=None):
        """Waits for the outcome of every record; False when `timeout` seconds were not enough.

        Sends what still lingers, and runs no callbacks.
        """
        cdef int64_t until = _until(-1 if timeout is None else timeout)
        cdef uint64_t seen
        self.runtime.check_fork()
        self.runtime.hurry()
        while True:
            seen = self.runtime.client.acc.news
            if self.done:
                break
            if fp_now_us() >= until or self.runtime.closed:
                return self.done
            self.runtime.wait_for_news(until, seen)
        self.runtime.sweep()
        return True

    cdef list failures(self):
        """[(index, error code, partition), ...]"""
        cdef failure_t* copy = NULL
        cdef int64_t n
        self.lock()
        n = self.c.failure_count
        if n:
            copy = <failure_t*>malloc(n * sizeof(failure_t))
            if copy != NULL:
                memcpy(copy, self.c.failures, n * sizeof(failure_t))
        self.unlock()
        if n == 0:
            return []
        if copy == NULL:
            raise MemoryError()
        try:
            return [(copy[i].index, copy[i].error, copy[i].partition) for i in range(n)]
        finally:
            free(copy)

    @property
    def errors(self):
        """List of FailedRecord(index, error, record), by index."""
        failed = [
            FailedRecord(index, KafkaError(code), self.record(index, partition))
            for index, code, partition in self.failures()
        ]
        failed += [FailedRecord(index, error, self.record(index, None)) for index, error in self.rejected.items()]
        failed.sort(key=operator.attrgetter("index"))
        return failed

    @property
    def offsets(self):
        """{partition: (first, last)} of the acknowledged records; {(topic, partition): ...} for a topic column."""
        return {
            (key[1] if self.topic is not None else key): (extent.first, extent.last)
            for key, extent in self.extents.items()
        }

    @property
    def extents(self):
        """{(topic, partition): Extent(records, first, last)}; offsets are None where the broker told none."""
        cdef extent_t* copy
        cdef int32_t n
        self.lock()
        n = self.c.extent_count
        copy = <extent_t*>malloc(max(n, 1) * sizeof(extent_t))
        if copy != NULL and n:
            memcpy(copy, self.c.extents, n * sizeof(extent_t))
        self.unlock()
        if copy == NULL:
            raise MemoryError()
        try:
            found = {
                (<object>copy[i].topic.label, copy[i].partition): Extent(
                    copy[i].records,
                    None if copy[i].first < 0 else copy[i].first,
                    None if copy[i].last < 0 else copy[i].last,
                )
                for i in range(n)
            }
        finally:
            free(copy)
        return dict(sorted(found.items()))

    cdef record(self, index, partition):
        """A record that failed."""
        cdef Block block
        if index in self.kept:
            return self.kept[index]
        for block in self.blocks:
            if block.first <= index < block.first + block.count:
                return block.record(self.topic, index, partition)
        return None

    cdef sweep(self):
        """Lets go of buffers that librdkafka has done with; only records that failed are copied out of them."""
        cdef Block block
        idle = []
        kept = []
        blocks = self.blocks
        flags = [False] * len(blocks)
        self.lock()
        for i in range(len(blocks)):
            flags[i] = (<Block>blocks[i]).idle()
        self.unlock()
        for block, free_now in zip(blocks, flags):
            (idle if free_now else kept).append(block)
        if not idle:
            return
        if self.c.failure_count or self.rejected:
            lost = self.failures() + [(index, 0, None) for index in self.rejected]
            for index, _, partition in lost:
                for block in idle:
                    if block.first <= index < block.first + block.count and index not in self.kept:
                        self.kept[index] = block.record(self.topic, index, partition)
        self.blocks = kept

    def __repr__(self):
        return (
            f"<Receipt {self.total} records: {self.accepted} accepted, {self.acknowledged} acknowledged, "
            f"{self.failed} failed>"
        )


cdef _cell(Column column, index, bint text):
    cdef const char* data
    cdef int64_t size
    if column is None:
        return None
    kind = column_get(&column.c, index, &data, &size)
    if kind == CELL_BAD:
        return None
    if kind == CELL_NULL:
        return None
    return data[:size].decode() if text else data[:size]


cdef int64_t _until(double timeout) noexcept:
    """The monotonic time `timeout` seconds from now; negative and absurd ones mean for ever."""
    return fp_now_us() + <int64_t>(timeout * 1e6) if 0 <= timeout < 1e9 else INT64_MAX


cdef const char* _NOTHING = ""  # an empty value is not a null one


cdef int _view(object data, const char** start, int64_t* size, Py_buffer* held, str what) except -1:
    """Points at the bytes of a key or value; 1 when `held` must be released."""
    cdef Py_ssize_t n
    if PyBytes_CheckExact(data):
        start[0] = PyBytes_AS_STRING(data)
        size[0] = PyBytes_GET_SIZE(data)
    elif data is None:
        start[0] = NULL
        size[0] = -1
    elif isinstance(data, str):
        start[0] = PyUnicode_AsUTF8AndSize(data, &n)
        size[0] = n
    else:
        try:
            PyObject_GetBuffer(data, held, PyBUF_SIMPLE)
        except (TypeError, BufferError, ValueError):  # numpy raises the last
            raise TypeError(
                f"{what} must be str, bytes, None or a contiguous buffer, not {type(data).__name__}"
            ) from None
        start[0] = <const char*>held.buf if held.len else _NOTHING
        size[0] = held.len
        return 1
    return 0


cdef class Runtime:
    """One producer: accumulator, threads and callbacks around one confluent_kafka.Producer.

    Owns the client_t. `attach` ties it to the librdkafka client that confluent-kafka makes, `shutdown` unties it.
    """

    cdef client_t* client
    cdef dict topics            # name -> address of its topic_t; keeps the names alive
    cdef object last_name       # the topic of the last call, to save the look-up
    cdef topic_t* last_topic
    cdef list receipts          # bulk calls whose buffers librdkafka may still read
    cdef object partitioner     # a Python partitioner, or None
    cdef object on_delivery
    cdef object error_cb
    cdef object stats_cb
    cdef object throttle_cb
    cdef object logger
    cdef bint only_errors
    cdef int64_t max_block_us
    cdef int64_t max_record_bytes
    cdef bint transactional
    cdef bint in_transaction
    cdef int generation         # of forks; another number means we are in a child
    cdef object pid
    cdef readonly bint closed
    cdef bint gone              # librdkafka's client has been destroyed
    cdef object __weakref__

    def __cinit__(self, settings):
        cdef accumulator_t* acc
        self.client = <client_t*>calloc(1, sizeof(client_t))
        if self.client == NULL:
            raise MemoryError()
        acc = &self.client.acc
        acc.policy = {
            "uniform": POLICY_UNIFORM,
            "sticky": POLICY_STICKY,
            "round_robin": POLICY_ROUND_ROBIN,
            "librdkafka": POLICY_LIBRDKAFKA,
            "python": POLICY_PYTHON,
        }[settings.policy]
        acc.adaptive = settings.adaptive
        acc.ignore_keys = settings.ignore_keys
        acc.linger_us = <int64_t>(settings.linger_ms * 1000)
        acc.sticky_bytes = settings.sticky_bytes
        acc.availability_us = <int64_t>(settings.availability_timeout_ms * 1000)
        acc.timeout_us = <int64_t>(settings.delivery_timeout_ms * 1000)
        acc.limit = settings.buffer_memory
        acc.record_overhead = MESSAGE_OVERHEAD
        acc.random.state = settings.seed
        accumulator_init(acc)
        fp_cond_init(&self.client.scout_wake)
        self.client.refresh_us = <int64_t>(settings.metadata_refresh_ms * 1000)
        self.client.propagation_us = <int64_t>(settings.metadata_propagation_ms * 1000)
        self.client.python_partitioner = acc.policy == POLICY_PYTHON
        self.client.runtime = <void*>self
        self.partitioner = settings.partitioner
        self.on_delivery = settings.on_delivery
        self.error_cb = settings.error_cb
        self.stats_cb = settings.stats_cb
        self.throttle_cb = settings.throttle_cb
        self.logger = settings.logger
        self.only_errors = settings.only_errors
        self.max_block_us = <int64_t>(settings.max_block_ms * 1000)
        self.max_record_bytes = settings.max_record_bytes
        self.transactional = settings.transactional
        self.client.transactional = settings.transactional
        self.topics = {}
        self.last_name = object()  # no topic yet
        self.receipts = []
        self.generation = fork_generation
        self.pid = settings.pid
        self.gone = True

    def __dealloc__(self):
        cdef handles_t* table
        cdef handles_t* older
        if self.client == NULL or not self.gone:
            return  # librdkafka may still call us (a forked child, an interpreter going down): let it be
        self.drop_callbacks()
        while self.client.events != NULL:
            event = self.client.events
            self.client.events = event.next
            free(event.broker)  # its rd_kafka_event_t went with the client
            free(event)
        table = self.client.handles
        while table != NULL:
            older = table.previous
            free(table.keys)
            free(table.topics)
            free(table)
            table = older
        accumulator_free(&self.client.acc)
        pthread_cond_destroy(&self.client.scout_wake)
        free(self.client.scratch)
        free(self.client)

    # ---- life cycle

    def attach(self, make):
        """Runs `make`, which creates the confluent-kafka client on this thread, and starts our threads."""
        fp_set_newborn(self.client)
        try:
            make()
        except BaseException:
            self.client.rk = NULL
            raise
        finally:
            fp_set_newborn(NULL)
        if self.client.rk == NULL:
            raise RuntimeError(
                "librdkafka did not load fastprod's hook; does this confluent-kafka support plugin.library.paths?"
            )
        self.gone = False
        self.client.scratch = <rd_kafka_message_t*>calloc(SCRATCH_MESSAGES, sizeof(rd_kafka_message_t))
        if self.client.scratch == NULL:
            raise MemoryError()
        self.client.queue = rdkafka.queue_get_main(self.client.rk)
        rdkafka.queue_cb_event_enable(self.client.queue, _on_queue, self.client)
        self.client.news = True  # what came before we listened
        _register(NULL, self.client)
        if fp_start_thread(&self.client.sender, _sender, self.client) == 0:
            self.client.threads = 1
            if fp_start_thread(&self.client.scout, _scout, self.client) == 0:
                self.client.threads = 2
        if self.client.threads < 2:
            self.stop()
            raise RuntimeError("cannot start the producer's threads: the system's limit is reached")

    def stop(self):
        """Ends our threads and gives librdkafka's objects back; the client may then be destroyed.

        Returns how many records had no outcome yet; they end as purged.
        """
        cdef client_t* client = self.client
        cdef topic_t* topic
        cdef int64_t left, until
        self.closed = True
        with nogil:
            pthread_mutex_lock(&client.acc.lock)
            client.stop = True
            pthread_cond_broadcast(&client.acc.work)
            pthread_cond_broadcast(&client.acc.done)
            pthread_cond_broadcast(&client.scout_wake)
            pthread_mutex_unlock(&client.acc.lock)
            if client.threads > 0:
                pthread_join(client.sender, NULL)
            if client.threads > 1 and not pthread_equal(client.scout, pthread_self()):
                pthread_join(client.scout, NULL)
            client.threads = 0
            rdkafka.queue_cb_event_enable(client.queue, NULL, NULL)
            _drain(client)  # what was left to do when the sender stopped
            pthread_mutex_lock(&client.acc.lock)
            left = client.acc.records
            fail_waiting(&client.acc, ERR__PURGE_QUEUE, INT64_MAX)
            pthread_mutex_unlock(&client.acc.lock)
            # Also what the delivery timeout has ended here but librdkafka still has.
            rdkafka.purge(client.rk, PURGE_F_QUEUE | PURGE_F_INFLIGHT | PURGE_F_NON_BLOCKING)
            until = fp_now_us() + 2000000
            while client.acc.live_chunks and fp_now_us() < until:
                _drain(client)
                pthread_mutex_lock(&client.acc.lock)
                if client.acc.live_chunks:
                    fp_cond_wait_until(&client.acc.done, &client.acc.lock, fp_now_us() + 2000)
                pthread_mutex_unlock(&client.acc.lock)
            topic = client.acc.topics
            while topic != NULL:
                rdkafka.topic_destroy(<rd_kafka_topic_t*>topic.handle)
                topic = topic.next
        while client.events != NULL:
            event = client.events
            client.events = event.next
            _drop_event(event)
        client.last_event = NULL
        rdkafka.queue_destroy(client.queue)
        client.queue = NULL
        return left

    def run_callbacks(self):
        """Runs the callbacks that are left when the producer is closed."""
        self.dispatch()

    def finish(self):
        """librdkafka's client has been destroyed."""
        _register(self.client, NULL)
        with nogil:
            _publish_completed(self.client)
        self.gone = True
        self.receipts = []

    cdef drop_callbacks(self):
        """Releases callables of records whose callbacks never ran."""
        cdef topic_t* topic = self.client.acc.topics
        cdef chunk_t* chunk = self.client.acc.deliveries
        cdef int32_t i
        while chunk != NULL:
            _drop_chunk_callbacks(chunk)
            chunk = chunk.next
        while topic != NULL:
            for i in range(topic.lanes.size):
                if topic.lanes.lanes[i] != NULL:
                    _drop_lane_callbacks(topic.lanes.lanes[i])
            _drop_lane_callbacks(topic.undecided)
            _drop_lane_callbacks(topic.unassigned)
            topic = topic.next

    cdef int check_fork(self) except -1:
        if self.generation != fork_generation:
            raise ForkError(
                f"this producer was made in process {self.pid} and cannot be used after fork(); "
                "make a new one in the child process"
            )
        return 0

    cdef int check(self) except -1:
        if self.closed:
            raise RuntimeError("Producer has been closed")
        return self.check_fork()

    def assert_usable(self):
        """Raises when the producer is closed or was made in another process."""
        self.check()

    @property
    def forked(self):
        """Whether this process is a child of the one that made the producer."""
        return self.generation != fork_generation

    # ---- topics

    cdef topic_t* topic_of(self, name) except NULL:
        cdef topic_t* topic
        cdef bytes encoded
        cdef void* handle
        if name is self.last_name:
            return self.last_topic
        if not isinstance(name, str):
            raise TypeError(f"topic must be str, not {type(name).__name__}")
        known = self.topics.get(name)
        if known is not None:
            topic = <topic_t*><size_t>known
        else:
            encoded = name.encode()
            if not encoded or b"\0" in encoded:
                raise RecordError(KafkaError(ERR__INVALID_ARG, f"not a topic name: {name!r}"))
            handle = rdkafka.topic_new(self.client.rk, encoded, NULL)
            if handle == NULL:
                code = rdkafka.last_error()
                raise RecordError(KafkaError(code, f"cannot use topic {name!r}: {rdkafka.err2str(code).decode()}"))
            self.topics[name] = None  # keeps the name alive; the GIL keeps others from making the topic, too
            pthread_mutex_lock(&self.client.acc.lock)
            topic = topic_new(&self.client.acc, encoded)
            if topic != NULL:
                topic.handle = handle
                topic.label = <void*>name
                if _add_handle(self.client, handle, topic) < 0:
                    topic = NULL
                pthread_cond_signal(&self.client.scout_wake)
            pthread_mutex_unlock(&self.client.acc.lock)
            if topic == NULL:
                del self.topics[name]
                raise MemoryError()
            self.topics[name] = <size_t>topic
        self.last_name = name
        self.last_topic = topic
        return topic

    # ---- producing

    cdef int accept(self, topic, value, key, partition, callback, on_delivery, timestamp, headers) except -1:
        """Accepts one record."""
        cdef record_t record
        cdef Py_buffer value_buffer
        cdef Py_buffer key_buffer
        cdef topic_t* target
        cdef bint value_held = False, key_held = False
        cdef bytes packed
        cdef int32_t chosen
        cdef int status
        if self.closed:
            raise RuntimeError("Producer has been closed")
        if self.generation != fork_generation:
            self.check_fork()
        target = self.topic_of(topic)
        memset(&record, 0, sizeof(record_t))
        if callback is None:
            callback = on_delivery if on_delivery is not None else self.on_delivery
        if callback is not None:
            if not callable(callback):
                raise TypeError(f"on_delivery must be callable, not {type(callback).__name__}")
            record.callback = <void*>callback
        record.partition = partition
        if not -1 <= record.partition < MAX_PARTITIONS:
            raise RecordError(
                KafkaError(ERR__UNKNOWN_PARTITION, f"partition must be from -1 to {MAX_PARTITIONS - 1}, not {partition}")
            )
        record.timestamp = timestamp
        if record.timestamp < 0:
            raise ValueError(f"timestamp must be milliseconds since 1970, or 0 for now, not {timestamp}")
        if headers is not None:
            packed = _pack_headers(headers)
            if (<const headers_t*>PyBytes_AS_STRING(packed)).count:
                record.headers = PyBytes_AS_STRING(packed)
                record.headers_size = PyBytes_GET_SIZE(packed)
        if self.transactional and not self.in_transaction:
            raise RecordError(
                KafkaError(ERR__STATE, "a transactional producer needs begin_transaction() before produce()")
            )
        try:
            value_held = _view(value, &record.value, &record.size, &value_buffer, "value")
            key_held = _view(key, &record.key, &record.key_size, &key_buffer, "key")
            self.check_size(&record)
            if self.partitioner is not None and record.partition < 0:
                record.partition = self.ask_partitioner(target, &record)
            pthread_mutex_lock(&self.client.acc.lock)
            status = APPEND_NO_ROOM
            if self.client.acc.waiters == NULL:
                status = append(&self.client.acc, target, &record, &chosen)
                if status == APPEND_OK and record.callback != NULL:
                    Py_INCREF(callback)
            pthread_mutex_unlock(&self.client.acc.lock)
            if status != APPEND_OK:
                self.append_slowly(target, &record, status, self.max_block_us)
        finally:
            if value_held:
                PyBuffer_Release(&value_buffer)
            if key_held:
                PyBuffer_Release(&key_buffer)
        return 0

    cdef inline int check_size(self, record_t* record) except -1:
        cdef int64_t size
        if record.size + record.key_size + record.headers_size + 128 <= self.max_record_bytes:
            return 0
        size = record_upper_bound(
            record.key_size, record.size, 1 if record.headers == NULL else (<const headers_t*>record.headers).wire
        )
        if size > self.max_record_bytes:
            raise RecordError(
                KafkaError(
                    ERR_MSG_SIZE_TOO_LARGE,
                    f"the record takes {size} bytes, more than max.request.size = {self.max_record_bytes}",
                )
            )
        return 0

    cdef int append_slowly(self, topic_t* topic, record_t* record, int status, int64_t patience_us) except -1:
        """Everything that keeps a record from being taken at once: waits for room, or raises."""
        cdef accumulator_t* acc = &self.client.acc
        cdef waiter_t waiter
        cdef int64_t until, now
        cdef int32_t chosen
        cdef bint alone
        if footprint(acc, record) > acc.limit:
            status = APPEND_TOO_LARGE
        if status == APPEND_NO_CHOICE:
            status = APPEND_NO_ROOM
        if status == APPEND_NO_ROOM:
            memset(&waiter, 0, sizeof(waiter_t))
            fp_cond_init(&waiter.wake)
            waiter.need = footprint(acc, record)
            until = fp_now_us() + patience_us
            with nogil:
                pthread_mutex_lock(&acc.lock)
                if acc.last_waiter != NULL:
                    acc.last_waiter.next = &waiter
                else:
                    acc.waiters = &waiter
                acc.last_waiter = &waiter
                pthread_cond_signal(&acc.work)  # memory is short: nothing lingers now
                pthread_mutex_unlock(&acc.lock)
            try:
                while True:
                    if self.partitioner is not None and record.partition < 0:
                        record.partition = self.ask_partitioner(topic, record)
                    status = APPEND_NO_ROOM
                    with nogil:
                        pthread_mutex_lock(&acc.lock)
                        now = fp_now_us()
                        if acc.waiters == &waiter and pool_has_room(acc, waiter.need):
                            status = append(acc, topic, record, &chosen)
                        # Callbacks hold memory until they have run. If nobody else runs them, waiting is in vain.
                        alone = acc.callbacks_due > 0 and acc.live_chunks == 0 and (
                            self.client.poller == 0 or self.client.poller == PyThread_get_thread_ident()
                        )
                        if status == APPEND_NO_ROOM and now < until and not alone and not self.closed:
                            fp_cond_wait_until(&waiter.wake, &acc.lock, min(until, now + SLICE_US))
                        pthread_mutex_unlock(&acc.lock)
                    if status == APPEND_OK and record.callback != NULL:
                        Py_INCREF(<object>record.callback)
                    if status == APPEND_NO_CHOICE and not self.closed:
                        continue  # metadata came meanwhile: the partitioner can be asked now
                    if status != APPEND_NO_ROOM or now >= until or alone or self.closed:
                        break
                    PyErr_CheckSignals()
            finally:
                pthread_mutex_lock(&acc.lock)
                leave_queue(acc, &waiter)
                pthread_mutex_unlock(&acc.lock)
                pthread_cond_destroy(&waiter.wake)
        if status == APPEND_OK:
            return 0
        if self.closed:
            raise RuntimeError("Producer has been closed")
        if status == APPEND_NO_ROOM and alone:
            raise BufferFullError(
                f"Local: Queue full: buffer.memory = {acc.limit} bytes is used up and {acc.callbacks_due} delivery "
                "callbacks wait for poll(); call poll() and produce again"
            )
        if status == APPEND_NO_ROOM:
            raise BufferFullError(
                f"Local: Queue full: no room in buffer.memory = {acc.limit} bytes within "
                f"max.block.ms = {self.max_block_us // 1000}; the brokers take records more slowly than they are "
                "produced"
            )
        if status == APPEND_TOO_LARGE:
            raise RecordError(
                KafkaError(
                    ERR_MSG_SIZE_TOO_LARGE,
                    f"the record needs {footprint(acc, record)} bytes of buffer.memory = {acc.limit}",
                )
            )
        if status == APPEND_UNKNOWN_PARTITION:
            raise RecordError(
                KafkaError(
                    ERR__UNKNOWN_PARTITION,
                    f"topic {<object>topic.label!r} has partitions 0 to {topic.partitions - 1}, "
                    f"not {record.partition}",
                )
            )
        raise MemoryError()

    cdef int32_t ask_partitioner(self, topic_t* topic, record_t* record) except -2:
        """The user's partitioner; -1 while the partitions are not known."""
        cdef int32_t count = 0, n = 0
        cdef int32_t* copy = NULL
        pthread_mutex_lock(&self.client.acc.lock)
        if topic.undecided.head == NULL and not topic.routing:
            count = topic.partitions
            n = topic.available_count
            copy = <int32_t*>malloc(max(n, 1) * sizeof(int32_t))
            if copy != NULL and n:
                memcpy(copy, topic.available, n * sizeof(int32_t))
        pthread_mutex_unlock(&self.client.acc.lock)
        if count == 0:
            free(copy)
            return -1
        if copy == NULL:
            raise MemoryError()
        available = [copy[i] for i in range(n)]
        free(copy)
        return self.choose_by_python(
            <object>topic.label,
            None if record.key_size < 0 else record.key[:record.key_size],
            None if record.size < 0 else record.value[:record.size],
            count,
            available,
        )

    cdef int32_t choose_by_python(self, name, key, value, count, available) except -2:
        chosen = self.partitioner.partition(name, key, value, count, available)
        try:
            number = operator.index(chosen)
        except TypeError:
            number = -1
        if not 0 <= number < count:
            raise RecordError(
                KafkaError(
                    ERR__UNKNOWN_PARTITION,
                    f"the partitioner {self.partitioner!r} chose {chosen!r} for topic {name!r}, "
                    f"which has partitions 0 to {count - 1}",
                )
            )
        return number

    # ---- bulk

    def receipt(self, topic):
        """A Receipt for a bulk call to `topic`, or None for a topic per record."""
        cdef Receipt receipt = Receipt.__new__(Receipt)
        self.check()
        if self.transactional and not self.in_transaction:
            raise RecordError(
                KafkaError(ERR__STATE, "a transactional producer needs begin_transaction() before producing")
            )
        if topic is not None:
            self.topic_of(topic)
        receipt.runtime = self
        receipt.topic = topic
        self.sweep()
        return receipt

    def submit(self, Receipt receipt, Column values, Column keys, Column topics, partitions, timestamps, headers,
               bint zero_copy):
        """Appends one block of records, in order; see fastprod.Producer.produce_many.

        Columns are of one length; `partitions` (int32) and `timestamps` (int64) are numpy arrays or None, `headers`
        a list or None. A record that cannot be taken is noted in the receipt, the others go on.
        """
        cdef int64_t n = values.c.length, i = 0
        cdef const int32_t[::1] chosen = partitions
        cdef const int64_t[::1] times = timestamps
        cdef const int32_t* wanted = NULL
        cdef const int64_t* stamps = NULL
        cdef topic_t* topic = NULL
        cdef Block block
        if n == 0:
            return
        self.check()
        if receipt.total + n > 0xffffffff:
            raise ValueError("one call takes at most 2**32 records")
        if partitions is not None:
            wanted = &chosen[0]
        if timestamps is not None:
            stamps = &times[0]
        if receipt.topic is not None:
            topic = self.topic_of(receipt.topic)
        if self.client.acc.policy == POLICY_LIBRDKAFKA:
            zero_copy = False  # acknowledgements come in no order, so the chunk must be found from the payload
        block = Block.__new__(Block)
        block.c = <block_t*>calloc(1, sizeof(block_t))
        if block.c == NULL:
            raise MemoryError()
        block.c.refs = 1
        block.c.receipt = receipt.c
        receipt.lock()
        receipt.c.refs += 1
        receipt.unlock()
        block.first = receipt.total
        block.count = n
        block.values = values
        block.keys = keys
        block.topics = topics
        block.partitions = partitions
        block.timestamps = timestamps
        block.headers = headers
        block.busy = True
        receipt.blocks.append(block)
        receipt.total += n
        if receipt not in self.receipts:
            self.receipts.append(receipt)
        try:
            if topics is None and headers is None and self.partitioner is None:
                while i < n:
                    i = self.submit_fast(receipt, block, topic, wanted, stamps, zero_copy, i)
                    if i < n:
                        self.submit_one(receipt, block, topic, wanted, stamps, zero_copy, i)
                        i += 1
            else:
                for i in range(n):
                    self.submit_one(receipt, block, topic, wanted, stamps, zero_copy, i)
                    if i & 0x3fff == 0:
                        PyErr_CheckSignals()
        finally:
            block.busy = False
        self.sweep()

    cdef int64_t submit_fast(
        self, Receipt receipt, Block block, topic_t* topic, const int32_t* wanted, const int64_t* stamps, bint zero_copy,
        int64_t start,
    ) except -1:
        """Appends without the GIL until something needs a closer look; returns the index of that record."""
        cdef accumulator_t* acc = &self.client.acc
        cdef record_t record
        cdef Column values = block.values, keys = block.keys
        cdef int64_t i = start, stop, first = block.first, n = block.count
        cdef int64_t most = self.max_record_bytes
        cdef int32_t chosen
        cdef int kind
        memset(&record, 0, sizeof(record_t))
        record.block = block.c
        with nogil:
            while i < n:
                stop = min(n, i + BULK_STEP)
                pthread_mutex_lock(&acc.lock)
                while i < stop and acc.waiters == NULL:
                    kind = column_get(&values.c, i, &record.value, &record.size)
                    if kind == CELL_BAD:
                        break
                    if kind == CELL_NULL:
                        record.size = -1
                    kind = column_get(&keys.c, i, &record.key, &record.key_size)
                    if kind == CELL_BAD:
                        break
                    if kind == CELL_NULL:
                        record.key_size = -1
                    record.by_reference = zero_copy and record.size >= ZERO_COPY_BYTES
                    record.partition = -1 if wanted == NULL else wanted[i]
                    if stamps != NULL:
                        record.timestamp = stamps[i]
                    record.index = <uint32_t>(first + i)
                    if not -1 <= record.partition < MAX_PARTITIONS or record.timestamp < 0 or record.size + record.key_size + 128 > most:
                        break
                    if append(acc, topic, &record, &chosen) != APPEND_OK:
                        break
                    receipt.c.accepted += 1
                    i += 1
                pthread_mutex_unlock(&acc.lock)
                if i < stop:
                    break
        PyErr_CheckSignals()
        return i

    cdef int submit_one(
        self, Receipt receipt, Block block, topic_t* topic, const int32_t* wanted, const int64_t* stamps, bint zero_copy,
        int64_t i,
    ) except -1:
        """One record with everything checked and waited for. What is wrong with it goes into the receipt."""
        cdef record_t record
        cdef Column values = block.values, keys = block.keys, topics = block.topics
        cdef int64_t index = block.first + i
        cdef const char* name
        cdef int64_t name_size
        cdef int32_t chosen
        cdef int kind, status
        cdef bytes packed
        memset(&record, 0, sizeof(record_t))
        record.block = block.c
        record.index = <uint32_t>index
        try:
            kind = column_get(&values.c, i, &record.value, &record.size)
            if kind == CELL_BAD:
                raise _bad_cell(values, i, "value")
            if kind == CELL_NULL:
                record.size = -1
            kind = column_get(&keys.c, i, &record.key, &record.key_size)
            if kind == CELL_BAD:
                raise _bad_cell(keys, i, "key")
            if kind == CELL_NULL:
                record.key_size = -1
            if topics is not None:
                kind = column_get(&topics.c, i, &name, &name_size)
                if kind == CELL_BAD:
                    raise _bad_cell(topics, i, "topic")
                if kind == CELL_NULL:
                    raise ValueError("topic must not be null")
                topic = self.topic_of(sys.intern(name[:name_size].decode()))
            record.by_reference = zero_copy and record.size >= ZERO_COPY_BYTES
            record.partition = -1 if wanted == NULL else wanted[i]
            if not -1 <= record.partition < MAX_PARTITIONS:
                raise RecordError(
                    KafkaError(
                        ERR__UNKNOWN_PARTITION,
                        f"partition must be from -1 to {MAX_PARTITIONS - 1}, not {record.partition}",
                    )
                )
            if stamps != NULL:
                record.timestamp = stamps[i]
                if record.timestamp < 0:
                    raise ValueError(f"timestamp must be milliseconds since 1970, not {record.timestamp}")
            if block.headers is not None and block.headers[i] is not None:
                packed = _pack_headers(block.headers[i])
                if (<const headers_t*>PyBytes_AS_STRING(packed)).count:
                    record.headers = PyBytes_AS_STRING(packed)
                    record.headers_size = PyBytes_GET_SIZE(packed)
            self.check_size(&record)
            if self.partitioner is not None and record.partition < 0:
                record.partition = self.ask_partitioner(topic, &record)
            pthread_mutex_lock(&self.client.acc.lock)
            status = APPEND_NO_ROOM
            if self.client.acc.waiters == NULL:
                status = append(&self.client.acc, topic, &record, &chosen)
            pthread_mutex_unlock(&self.client.acc.lock)
            if status != APPEND_OK:
                self.append_slowly(topic, &record, status, 0 if receipt.full else self.max_block_us)
            receipt.c.accepted += 1
        except (BufferFullError, TypeError, ValueError, KafkaException) as error:
            if isinstance(error, BufferFullError):
                receipt.full = True
            receipt.rejected[index] = error
        return 0

    cdef sweep(self):
        """Lets go of buffers that librdkafka has done with, and of bulk calls that have none left."""
        cdef Receipt receipt
        if not self.receipts:
            return
        for receipt in self.receipts:
            receipt.sweep()
        self.receipts = [receipt for receipt in self.receipts if receipt.blocks]

    # ---- callbacks and waiting

    cdef int wait_for_news(self, int64_t until_us, uint64_t seen) except -1:
        """Sleeps until something has happened since `seen`, at most a slice; looks for Ctrl-C."""
        cdef accumulator_t* acc = &self.client.acc
        with nogil:
            pthread_mutex_lock(&acc.lock)
            acc.done_waiting += 1
            if not self.client.stop and not self.client.news and acc.news == seen:
                fp_cond_wait_until(&acc.done, &acc.lock, min(until_us, fp_now_us() + SLICE_US))
            acc.done_waiting -= 1
            pthread_mutex_unlock(&acc.lock)
            if self.client.news and not self.client.stop:
                _drain(self.client)  # sooner than through the sender
        PyErr_CheckSignals()
        return 0

    cdef hurry(self):
        """Ends the linger of everything that waits."""
        with nogil:
            pthread_mutex_lock(&self.client.acc.lock)
            seal_all(&self.client.acc)
            self.client.acc.epoch += 1
            self.client.acc.place_epoch = self.client.acc.epoch
            pthread_cond_signal(&self.client.acc.work)
            pthread_mutex_unlock(&self.client.acc.lock)

    cdef int64_t wait_and_dispatch(self, double timeout) except -1:
        """poll()"""
        cdef int64_t until
        cdef int64_t served
        cdef uint64_t seen
        if self.closed:
            raise RuntimeError("Producer has been closed")
        self.check_fork()
        served = self.dispatch()
        if served or timeout == 0:
            return served
        until = _until(timeout)
        while served == 0 and fp_now_us() < until and not self.closed:
            seen = self.client.acc.news
            if self.client.acc.deliveries == NULL and self.client.events == NULL:
                self.wait_for_news(until, seen)
            served = self.dispatch()
        return served

    def flush(self, double timeout=-1):
        """Waits for the outcome of all records accepted so far, running callbacks; returns len() afterwards."""
        cdef accumulator_t* acc = &self.client.acc
        cdef flusher_t flusher
        cdef flusher_t** link
        cdef uint64_t seen
        cdef int64_t until = _until(timeout)
        cdef bint idle
        self.check()
        memset(&flusher, 0, sizeof(flusher_t))
        with nogil:
            pthread_mutex_lock(&acc.lock)
            seal_all(acc)
            flusher.epoch = acc.epoch
            flusher.remaining = acc.live_chunks
            flusher.next = acc.flushers
            acc.flushers = &flusher
            acc.epoch += 1
            acc.place_epoch = acc.epoch
            pthread_cond_signal(&acc.work)
            pthread_mutex_unlock(&acc.lock)
        try:
            while True:
                with nogil:
                    pthread_mutex_lock(&acc.lock)
                    idle = flusher.remaining <= 0
                    seen = acc.news
                    pthread_mutex_unlock(&acc.lock)
                self.dispatch()  # when all is done, this runs the last callbacks of what was flushed
                if idle or fp_now_us() >= until or self.closed:
                    break
                self.wait_for_news(until, seen)
        finally:
            with nogil:
                pthread_mutex_lock(&acc.lock)
                link = &acc.flushers
                while link[0] != &flusher:
                    link = &link[0].next
                link[0] = flusher.next
                pthread_mutex_unlock(&acc.lock)
        self.sweep()
        return 0 if idle else self.outstanding()

    def purge(self, bint in_queue=True, bint in_flight=True, bint blocking=True):
        """Drops records: those waiting (`in_queue`) and those on their way (`in_flight`)."""
        cdef int flags = 0
        self.check()
        if in_queue:
            flags |= PURGE_F_QUEUE
            self.drop_waiting()
        if in_flight:
            flags |= PURGE_F_INFLIGHT
        if not blocking:
            flags |= PURGE_F_NON_BLOCKING
        if flags & (PURGE_F_QUEUE | PURGE_F_INFLIGHT):
            with nogil:
                rdkafka.purge(self.client.rk, flags)
                _drain(self.client)

    def drop_waiting(self):
        """Ends what has not been handed to librdkafka, with the error code for purged records."""
        cdef client_t* client = self.client
        with nogil:
            pthread_mutex_lock(&client.acc.lock)
            # Some chunks may be in no list at this moment, or wait for a Python partitioner's choice.
            while (client.sending or _is_routing(client)) and not client.stop:
                client.acc.done_waiting += 1
                fp_cond_wait_until(&client.acc.done, &client.acc.lock, fp_now_us() + 500)
                client.acc.done_waiting -= 1
            fail_waiting(&client.acc, ERR__PURGE_QUEUE, INT64_MAX)
            pthread_mutex_unlock(&client.acc.lock)

    def set_transaction(self, bint running):
        """Whether records may be produced now, for a transactional producer."""
        self.in_transaction = running
        self.client.acc.failed = 0

    def failures(self):
        """(how many records failed since the transaction began, the first one's error code)"""
        return self.client.acc.failed, self.client.acc.first_error

    def settle_outcomes(self):
        """Publishes acknowledgements that arrived inside confluent-kafka's own calls."""
        with nogil:
            _publish_completed(self.client)

    def outstanding(self):
        """Records without outcome, plus callbacks and events that wait for poll()."""
        cdef int64_t n
        pthread_mutex_lock(&self.client.acc.lock)
        n = self.client.acc.records + self.client.acc.callbacks_due
        pthread_mutex_unlock(&self.client.acc.lock)
        return n

    @property
    def records(self):
        """Records accepted whose outcome is open."""
        return self.client.acc.records

    @property
    def memory(self):
        """Bytes of buffer.memory in use."""
        return self.client.acc.used

    @property
    def lanes_opened(self):
        """Partitions that have been used so far."""
        return self.client.acc.lanes_opened

    def partition_counts(self, topic):
        """{partition: (acknowledged records, acknowledged bytes, failed records, queued bytes)} of opened lanes."""
        cdef topic_t* found
        cdef lane_t* lane
        if topic not in self.topics:
            return {}
        found = <topic_t*><size_t>self.topics[topic]
        counts = {}
        for i in range(found.lanes.size):  # lanes are never freed while the producer lives
            lane = found.lanes.lanes[i]
            if lane != NULL:
                counts[i] = (
                    lane.settled_records - lane.failed_records, lane.settled_bytes - lane.failed_bytes,
                    lane.failed_records, queued_bytes(lane),
                )
        return counts

    cdef int64_t dispatch(self) except -1:
        """Runs what is due. Every callback runs, though one raises; the first exception is raised at the end."""
        cdef client_t* client = self.client
        cdef chunk_t* chunk
        cdef chunk_t* last
        cdef event_t* event
        cdef int64_t served = 0
        client.poller = PyThread_get_thread_ident()
        if client.events == NULL and client.acc.deliveries == NULL:
            return 0
        errors = []
        while client.events != NULL:
            pthread_mutex_lock(&client.acc.lock)
            event = client.events
            if event != NULL:
                client.events = event.next
                client.event_count -= 1
                if client.events == NULL:
                    client.last_event = NULL
            pthread_mutex_unlock(&client.acc.lock)
            if event == NULL:
                break
            try:
                self.serve(event)
            except Exception as error:
                errors.append(error)
            finally:
                _drop_event(event)
            served += 1
        pthread_mutex_lock(&client.acc.lock)
        last = client.acc.last_delivery  # what comes while callbacks run is for the next call
        pthread_mutex_unlock(&client.acc.lock)
        chunk = NULL
        while last != NULL and chunk != last and client.acc.deliveries != NULL:
            pthread_mutex_lock(&client.acc.lock)
            chunk = client.acc.deliveries
            if chunk != NULL:
                client.acc.deliveries = chunk.next
                if chunk.next == NULL:
                    client.acc.last_delivery = NULL
            pthread_mutex_unlock(&client.acc.lock)
            if chunk == NULL:
                break
            try:
                served += self.deliver(chunk, errors)
            except BaseException:  # Ctrl-C in a callback: the rest waits for the next call
                pthread_mutex_lock(&client.acc.lock)
                chunk.next = client.acc.deliveries
                client.acc.deliveries = chunk
                if client.acc.last_delivery == NULL:
                    client.acc.last_delivery = chunk
                pthread_mutex_unlock(&client.acc.lock)
                raise
            pthread_mutex_lock(&client.acc.lock)
            chunk_release(&client.acc, chunk)
            pthread_mutex_unlock(&client.acc.lock)
        if errors:
            for error in errors[1:]:
                sys.unraisablehook(_Unraisable(error))
            raise errors[0]
        return served

    cdef int64_t deliver(self, chunk_t* chunk, list errors) except -1:
        """Runs the callbacks of one chunk."""
        cdef topic_t* topic = chunk.lane.topic
        cdef slot_t* slot
        cdef rich_t* more
        cdef Message message
        cdef int64_t served = 0
        cdef int32_t error_code
        cdef uint32_t i
        label = <object>topic.label
        while chunk.delivered < chunk.count:
            i = chunk.delivered
            chunk.delivered += 1
            slot = slot_at(chunk, i)
            more = rich_at(chunk, i)
            if more.callback == NULL:
                continue
            callback = <object>more.callback
            more.callback = NULL
            Py_DECREF(callback)
            fp_add64(&self.client.acc.callbacks_due, -1)
            error_code = error_of(slot)
            if self.only_errors and error_code == 0:
                continue
            message = Message.__new__(Message)
            message._topic = label
            message._key = None if slot.key == NULL else slot.key[:slot.key_size]
            message._value = None if slot.payload == NULL else slot.payload[:slot.size]
            message._partition = more.partition
            message._offset = more.offset
            message._latency_us = more.clock_us
            message._headers = None if more.headers == NULL else more.headers[:(<const headers_t*>more.headers).size]
            if error_code == 0:
                message._error = None
                message._timestamp = more.timestamp
                message._timestamp_type = more.timestamp_type
            else:
                message._error = KafkaError(error_code)
                message._timestamp = -1
                message._timestamp_type = 0
            served += 1
            try:
                callback(message._error, message)
            except Exception as error:
                errors.append(error)
        return served

    cdef serve(self, event_t* event):
        """Hands one event to the user's callback for it."""
        cdef const char* facility = NULL
        cdef const char* text = NULL
        cdef int level = 0
        if event.event == NULL:
            if self.throttle_cb is not None:
                self.throttle_cb(
                    confluent_kafka.ThrottleEvent(event.broker.decode(), event.broker_id, event.throttle_ms / 1000)
                )
            return
        kind = rdkafka.event_type(event.event)
        if kind == EVENT_STATS:
            if self.stats_cb is not None:
                self.stats_cb(rdkafka.event_stats(event.event).decode())
        elif kind == EVENT_LOG:
            if self.logger is not None and rdkafka.event_log(event.event, &facility, &text, &level) == 0:
                self.logger.log(
                    _LOG_LEVELS[level] if 0 <= level < 8 else 10,
                    "%s [%s] %s",
                    facility.decode(errors="replace"),
                    rdkafka.name(self.client.rk).decode(errors="replace"),
                    text.decode(errors="replace"),
                )
        else:
            fatal = bool(rdkafka.event_error_is_fatal(event.event))
            error = KafkaError(
                rdkafka.event_error(event.event),
                rdkafka.event_error_string(event.event).decode(errors="replace"),
                fatal,
            )
            if self.error_cb is not None:
                self.error_cb(error)
            elif fatal:
                raise KafkaException(error)


# syslog's levels as Python's
_LOG_LEVELS = (50, 50, 50, 40, 30, 20, 20, 10)


class _Unraisable:
    """What sys.unraisablehook expects, for exceptions of callbacks after the first."""

    def __init__(self, error):
        self.exc_type = type(error)
        self.exc_value = error
        self.exc_traceback = error.__traceback__
        self.err_msg = "Exception ignored in a callback of fastprod.Producer"
        self.object = None


cdef object _bad_cell(Column column, int64_t i, str what):
    error = (column.bad or {}).get(i)
    return error if error is not None else ValueError(f"{what} is larger than 2 GiB")


cdef void _drop_chunk_callbacks(chunk_t* chunk) noexcept:
    cdef uint32_t i
    if chunk.rich:
        for i in range(chunk.count):
            if rich_at(chunk, i).callback != NULL:
                Py_DECREF(<object>rich_at(chunk, i).callback)
                rich_at(chunk, i).callback = NULL


cdef void _drop_lane_callbacks(lane_t* lane) noexcept:
    cdef chunk_t* chunk = lane.head
    while chunk != NULL:
        _drop_chunk_callbacks(chunk)
        chunk = chunk.next
    chunk = lane.fly_head
    while chunk != NULL:
        _drop_chunk_callbacks(chunk)
        chunk = chunk.fly_next


cdef bint _is_routing(client_t* client) noexcept nogil:
    cdef topic_t* topic = client.acc.topics
    while topic != NULL:
        if topic.routing:
            return True
        topic = topic.next
    return False


cdef int _add_handle(client_t* client, void* handle, topic_t* topic) noexcept nogil:
    """Publishes a wider or equal table with one more topic; -1 when memory is short. The lock is held."""
    cdef handles_t* old = client.handles
    cdef handles_t* table = old
    cdef uint32_t i, j, size
    if old == NULL or (old.count + 1) * 2 > old.mask + 1:
        size = 16 if old == NULL else (old.mask + 1) * 2
        table = <handles_t*>calloc(1, sizeof(handles_t))
        if table == NULL:
            return -1
        table.keys = <void**>calloc(size, sizeof(void*))
        table.topics = <topic_t**>calloc(size, sizeof(topic_t*))
        if table.keys == NULL or table.topics == NULL:
            free(table.keys)
            free(table.topics)
            free(table)
            return -1
        table.mask = size - 1
        table.previous = old
        if old != NULL:
            for i in range(old.mask + 1):
                if old.keys[i] != NULL:
                    j = <uint32_t>(<uint64_t>old.keys[i] >> 4) & table.mask
                    while table.keys[j] != NULL:
                        j = (j + 1) & table.mask
                    table.keys[j] = old.keys[i]
                    table.topics[j] = old.topics[i]
            table.count = old.count
    i = <uint32_t>(<uint64_t>handle >> 4) & table.mask
    while table.keys[i] != NULL:
        i = (i + 1) & table.mask
    table.topics[i] = topic
    fp_store_ptr(&table.keys[i], handle)  # the topic is in place before the key can be found
    table.count += 1
    fp_store_ptr(<void**>&client.handles, table)
    return 0


cdef void _route_by_python(void* runtime, topic_t* topic) noexcept with gil:
    """Asks the user's partitioner about records that waited for metadata. `topic.routing` keeps them in place."""
    cdef Runtime self = <Runtime>runtime
    cdef accumulator_t* acc = &self.client.acc
    cdef chunk_t* chunk
    cdef slot_t* slot
    cdef int32_t* wanted
    cdef uint32_t i
    cdef int moved
    available = [topic.available[n] for n in range(topic.available_count)]  # only this thread changes it
    while not self.closed:
        pthread_mutex_lock(&acc.lock)
        chunk = topic.undecided.head
        if chunk != NULL:
            chunk.sealed = 1
        pthread_mutex_unlock(&acc.lock)
        if chunk == NULL:
            return
        wanted = <int32_t*>malloc(chunk.count * sizeof(int32_t))
        if wanted == NULL:
            return
        for i in range(chunk.count):
            slot = slot_at(chunk, i)
            wanted[i] = slot.state
            if slot.state < 0:
                try:
                    wanted[i] = self.choose_by_python(
                        <object>topic.label,
                        None if slot.key == NULL else slot.key[:slot.key_size],
                        None if slot.payload == NULL else slot.payload[:slot.size],
                        topic.partitions,
                        available,
                    )
                except BaseException as error:
                    sys.unraisablehook(_Unraisable(error))
                    wanted[i] = 0x7ffffffd  # no such partition: the record fails with that error
        pthread_mutex_lock(&acc.lock)
        moved = route_undecided(acc, topic, wanted)
        pthread_mutex_unlock(&acc.lock)
        free(wanted)
        if moved < 0:
            return  # out of memory: the next metadata answer tries again


# ---- methods of fastprod.Producer, compiled: a Python function in between would cost as much as the work

def produce(self, topic, value=None, key=None, partition=-1, callback=None, on_delivery=None, timestamp=0, headers=None):
    """Accepts a record and returns; it is sent in the background.

    `value` and `key` are str, bytes, None or any contiguous buffer. `callback` (or `on_delivery`) is called as
    `(error, message)` from `poll()` or `flush()`. Waits up to `max.block.ms` when `buffer.memory` is full, then
    raises BufferFullError (a BufferError).
    """
    runtime = self._runtime
    if runtime is None:
        raise RuntimeError("Producer has been closed")
    (<Runtime?>runtime).accept(topic, value, key, partition, callback, on_delivery, timestamp, headers)


def poll(self, timeout=-1):
    """Runs callbacks that are due, waiting up to `timeout` seconds (-1: for ever) for the first; how many ran."""
    runtime = self._runtime
    if runtime is None:
        raise RuntimeError("Producer has been closed")
    return (<Runtime?>runtime).wait_and_dispatch(-1 if timeout is None else timeout)


def check_headers(headers):
    """Raises what produce() would raise for such headers."""
    _pack_headers(headers)


def plugin_path():
    """Path of this module, for librdkafka's plugin.library.paths."""
    return __file__
