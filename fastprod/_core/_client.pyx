"""The producer's side of librdkafka, in C terms: hooks, hand-over, delivery reports, metadata. Never takes the GIL.

    sender    gives ready chunks to librdkafka, watches linger and timeouts, takes delivery reports
    scout     asks for metadata, which blocks

librdkafka's main queue is read as events, so confluent-kafka's own callbacks (which need its poll() on the stack)
never run. Inside a transaction confluent-kafka reads that queue itself; there an interceptor on librdkafka's threads
tells us the outcomes instead. It is not used otherwise: the broker thread is the first to be busy.

librdkafka is never called with one of our locks held, so its callbacks may take them.
"""

from libc.stdint cimport INT64_MAX, int16_t, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset, strcmp, strdup, strncpy

from fastprod._core._accumulator cimport (
    BACKREF_BYTES,
    EXPIRED,
    PENDING,
    POLICY_LIBRDKAFKA,
    accumulator_t,
    chunk_release,
    chunk_t,
    count_latency,
    count_settled,
    data_of,
    detach,
    enter_flight,
    fail_lane,
    fail_waiting,
    header_t,
    headers_head,
    headers_t,
    lane_of,
    lane_t,
    lanes_t,
    next_deadline,
    next_ready,
    publish,
    queued_records,
    reattach,
    rich_at,
    rich_t,
    route_undecided,
    slot_at,
    slot_t,
    topic_t,
    topic_update,
    unlink_flying,
    widen,
)
from fastprod._core._histogram cimport histogram_add
from fastprod._core._platform cimport (
    fp_add64,
    fp_cas_ptr,
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
    pthread_cond_signal,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    pthread_t,
    sched_yield,
)
from fastprod._core._rdkafka cimport *
from fastprod._core._rdkafka cimport api as rdkafka

cdef extern from * nogil:
    """
    /* The client that confluent_kafka.Producer() is making on this thread, for the plugin hook below. */
    static __thread void *fp_newborn;
    /* Set while this thread gives librdkafka a single record: if it is refused, the call says so, and the
       acknowledgement that librdkafka makes of it first is not needed. */
    static __thread int fp_handing_over;
    static int fp_is_handing_over(void) { return fp_handing_over; }
    static void fp_hand_over(int now) { fp_handing_over = now; }
    /* The broker whose answer this thread is handling, until the first record has its outcome by it. */
    static __thread void *fp_answering;
    static void *fp_get_answering(void) { return fp_answering; }
    static void fp_set_answering(void *broker) { fp_answering = broker; }
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
    void* fp_get_answering()
    void fp_set_answering(void*)
    int fp_is_handing_over()
    void fp_hand_over(int)
    int fp_start_thread(pthread_t*, void* (*)(void*) noexcept nogil, void*)

cdef enum:
    RETRY_US = 2000             # pause after librdkafka's queue was full
    LATE_US = 50000             # records that waited longer keep their own timestamp
    STUCK_US = 1000000          # no acknowledgement for so long: look for a new leader
    GRACE_US = 1500000          # librdkafka looks for timed-out messages once a second
    EVENTS_KEPT = 10000         # events that wait for poll()

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
    cdef rd_kafka_resp_err_t error
    (<client_t*>opaque).rk = rk
    error = rdkafka.interceptor_add_on_broker_state_change(rk, b"fastprod", _on_broker_state, opaque)
    if error == 0:
        error = rdkafka.interceptor_add_on_request_sent(rk, b"fastprod", _on_request_sent, opaque)
    if error == 0:
        error = rdkafka.interceptor_add_on_response_received(rk, b"fastprod", _on_response_received, opaque)
    if error == 0 and (<client_t*>opaque).transactional:
        error = rdkafka.interceptor_add_on_acknowledgement(rk, b"fastprod", _on_acknowledged, opaque)
    return error


cdef rd_kafka_resp_err_t _on_broker_state(
    rd_kafka_t* rk, int32_t broker, const char* protocol, const char* name, int port, const char* state, void* opaque
) noexcept nogil:
    """A connection was made or lost. Runs on librdkafka's threads, some with its locks held."""
    cdef client_t* client = <client_t*>opaque
    cdef uint64_t bit = 1
    cdef bint up = strcmp(state, b"UP") == 0
    cdef broker_t* known
    if broker >= 0:
        fp_spin_lock(&client.brokers_lock)
        known = _broker(client, broker)
        if known != NULL:
            known.up = up
            known.known |= up
        fp_spin_unlock(&client.brokers_lock)
    bit <<= <uint32_t>(broker * 31 + port) & 63
    pthread_mutex_lock(&client.acc.lock)
    if up:
        client.connected |= bit
        client.reached_us = fp_now_us()
        pthread_cond_signal(&client.scout_wake)
    else:
        client.connected &= ~bit
    pthread_mutex_unlock(&client.acc.lock)
    return 0


cdef broker_t* _broker(client_t* client, int32_t number) noexcept nogil:
    """The figures of a broker, made on first use; NULL when memory is short. The brokers' lock is held."""
    cdef broker_t* broker = client.brokers
    while broker != NULL and broker.id != number:
        broker = broker.next
    if broker == NULL:
        broker = <broker_t*>calloc(1, sizeof(broker_t))
        if broker != NULL:
            broker.id = number
            broker.next = client.brokers
            fp_store_ptr(<void**>&client.brokers, broker)  # stats() walks the list without the lock
    return broker


cdef rd_kafka_resp_err_t _on_request_sent(
    rd_kafka_t* rk, int socket, const char* name, int32_t number, int16_t api, int16_t version, int32_t correlation,
    size_t size, void* opaque,
) noexcept nogil:
    """Runs on broker threads."""
    cdef client_t* client = <client_t*>opaque
    cdef broker_t* broker
    if api == PRODUCE_REQUEST and number >= 0:
        fp_spin_lock(&client.brokers_lock)
        broker = _broker(client, number)
        if broker != NULL:
            broker.handled = broker.answered  # by this very thread
            broker.sent += 1
        fp_spin_unlock(&client.brokers_lock)
    return 0


cdef rd_kafka_resp_err_t _on_response_received(
    rd_kafka_t* rk, int socket, const char* name, int32_t number, int16_t api, int16_t version, int32_t correlation,
    size_t size, int64_t round_trip_us, rd_kafka_resp_err_t error, void* opaque,
) noexcept nogil:
    """A Produce request is over, by an answer or without. Runs on broker threads, before the outcomes are known."""
    cdef client_t* client = <client_t*>opaque
    cdef broker_t* broker
    if api == PRODUCE_REQUEST and number >= 0:
        fp_spin_lock(&client.brokers_lock)
        broker = _broker(client, number)
        # A request that was still in the queue when its connection was lost is answered, but was never sent.
        if broker != NULL and broker.answered < broker.sent:
            broker.handled = broker.answered
            broker.answered += 1
            if error:
                broker.failed += 1
            elif round_trip_us >= 0:
                histogram_add(&broker.round_trip, round_trip_us, 1)
        fp_spin_unlock(&client.brokers_lock)
        fp_set_answering(broker)
    return 0


cdef void _count_settled_request(client_t* client, int32_t number) noexcept nogil:
    """A delivery report came by an answer of this broker."""
    cdef broker_t* broker
    if number >= 0:
        fp_spin_lock(&client.brokers_lock)
        broker = _broker(client, number)
        if broker != NULL:
            broker.settled += 1
        fp_spin_unlock(&client.brokers_lock)


cdef void count_repeated(client_t* client, bint open) noexcept nogil:
    """Brings `repeated` up to date; `open` while librdkafka's queue may be read.

    A request is repeated when it was answered and no delivery report came of it. Reports come a little later than
    answers and are counted by several threads, so only what is certain counts; without records on their way that is all.
    """
    cdef broker_t* broker
    cdef int64_t until = fp_now_us() + 5000
    fp_spin_lock(&client.brokers_lock)
    broker = client.brokers
    while broker != NULL:
        broker.due = broker.answered
        broker = broker.next
    fp_spin_unlock(&client.brokers_lock)
    if fp_load64(&client.acc.records):
        fp_spin_lock(&client.brokers_lock)
        broker = client.brokers
        while broker != NULL:
            broker.due = min(broker.due, broker.handled)
            broker = broker.next
        fp_spin_unlock(&client.brokers_lock)
    if open:
        drain_as_guest(client, 0)
    while fp_load64(&client.draining):
        if fp_now_us() > until:
            return
        sched_yield()  # to the thread that is waited for
    fp_spin_lock(&client.brokers_lock)
    broker = client.brokers
    while broker != NULL:
        broker.repeated = max(broker.repeated, broker.due - broker.settled)
        broker = broker.next
    fp_spin_unlock(&client.brokers_lock)


cdef void free_brokers(client_t* client) noexcept nogil:
    cdef broker_t* broker
    while client.brokers != NULL:
        broker = client.brokers
        client.brokers = broker.next
        free(broker)


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
        and (slot.key_size == 0 or memcmp(slot.key, message.key, slot.key_size) == 0)
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


cdef inline bint _settle(
    lane_t* lane, chunk_t* chunk, uint32_t i, int32_t error, const rd_kafka_message_t* message, int64_t offset
) noexcept nogil:
    """librdkafka is done with a record. The leaf lock is held; true when it was the chunk's last."""
    cdef slot_t* slot = slot_at(chunk, i)
    cdef rich_t* more
    chunk.returned += 1
    if error == ERR__UNKNOWN_TOPIC or error == ERR__UNKNOWN_PARTITION or error == ERR_UNKNOWN_TOPIC_OR_PART:
        lane.topic.doubtful = True
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
    cdef lane_t* lane
    if fp_get_answering() != NULL:  # the first record of an answer that the same thread handles
        _count_settled_request(<client_t*>opaque, (<broker_t*>fp_get_answering()).id)
        fp_set_answering(NULL)
    if not fp_is_handing_over():
        lane = _lane_of(<client_t*>opaque, message)
        if lane != NULL:
            fp_spin_lock(&lane.spin)
            _acknowledge(<client_t*>opaque, lane, message)
            fp_spin_unlock(&lane.spin)
    return 0


cdef lane_t* _lane_of(client_t* client, const rd_kafka_message_t* message) noexcept nogil:
    cdef topic_t* topic = _topic_of(client, message.rkt)
    cdef lanes_t* lanes
    if topic == NULL:
        return NULL
    if client.acc.policy == POLICY_LIBRDKAFKA:
        _open_apart(client, topic, message.partition)
        return topic.unassigned
    lanes = <lanes_t*>fp_load_ptr(<void**>&topic.lanes)
    if not 0 <= message.partition < lanes.size:
        return NULL
    return <lane_t*>fp_load_ptr(<void**>&lanes.lanes[message.partition])


cdef inline void _acknowledge(client_t* client, lane_t* lane, const rd_kafka_message_t* message) noexcept nogil:
    """Notes a record's outcome; the leaf lock is held."""
    cdef uint32_t i = 0
    cdef chunk_t* chunk = lane.fly_head
    cdef int32_t error = message.err
    if error == ERR__DESTROY and not client.stop:
        error = ERR__UNKNOWN_PARTITION  # it was deleted while librdkafka put the record into its queue
    # Nearly always the next record of the oldest chunk.
    if chunk != NULL:
        i = chunk.cursor
        if (
            i >= chunk.count
            or slot_at(chunk, i).state != PENDING
            or not _is_record(chunk, slot_at(chunk, i), message)
        ):
            chunk = _find(lane, message, &i)
    if chunk == NULL:
        return
    if lane == lane.topic.unassigned:
        _count_apart(lane.topic, message, slot_at(chunk, i), fp_now_us() - chunk.created_us)
    if _settle(lane, chunk, i, error, message, -1 if client.no_offsets else message.offset):
        if not error:
            fp_store64(&lane.progress_us, fp_now_us())
            fp_store64(&client.progress_us, lane.progress_us)
        _push_completed(client, chunk)


cdef void _count_apart(topic_t* topic, const rd_kafka_message_t* message, slot_t* slot, int64_t latency_us) noexcept nogil:
    """librdkafka has chosen the partition, so only its answer tells which one to count the record for."""
    cdef lanes_t* lanes = <lanes_t*>fp_load_ptr(<void**>&topic.lanes)
    cdef lane_t* counted
    cdef int64_t size = <int64_t>slot.size + slot.key_size
    if slot.state != PENDING or not 0 <= message.partition < lanes.size:
        return
    counted = <lane_t*>fp_load_ptr(<void**>&lanes.lanes[message.partition])
    if counted == NULL:
        return
    fp_spin_lock(&counted.spin)
    counted.in_records += 1
    counted.in_bytes += size
    count_settled(counted, slot, message.err != 0)
    if not message.err:
        count_latency(counted, latency_us, 1)
    fp_spin_unlock(&counted.spin)


cdef void _open_apart(client_t* client, topic_t* topic, int32_t partition) noexcept nogil:
    """A lane for _count_apart, where librdkafka chooses partitions."""
    cdef lanes_t* lanes = <lanes_t*>fp_load_ptr(<void**>&topic.lanes)
    cdef lane_t* lane
    if partition < 0 or (partition < lanes.size and fp_load_ptr(<void**>&lanes.lanes[partition]) != NULL):
        return
    pthread_mutex_lock(&client.acc.lock)
    if widen(topic, partition + 1) == 0:  # librdkafka may have heard of the topic before our scout has
        lane = lane_of(&client.acc, topic, partition)
        if lane != NULL:
            count_latency(lane, 0, 0)  # makes the histogram, which should not be done under the leaf lock
    pthread_mutex_unlock(&client.acc.lock)


cdef void _take_report(client_t* client, rd_kafka_event_t* event) noexcept nogil:
    """Notes the outcomes in a delivery report. Its messages are usually all of one lane: lock that once for many."""
    cdef const rd_kafka_message_t* message = rdkafka.event_message_next(event)
    cdef rd_kafka_topic_t* handle = NULL
    cdef int32_t partition = -1
    cdef lane_t* lane = NULL
    cdef uint32_t n = 0
    if message != NULL:
        _count_settled_request(client, rdkafka.message_broker_id(message))
    while message != NULL:
        if lane == NULL or message.rkt != handle or message.partition != partition or n & 0xff == 0:
            if lane != NULL:
                fp_spin_unlock(&lane.spin)
            handle = message.rkt
            partition = message.partition
            lane = _lane_of(client, message)
            if lane != NULL:
                fp_spin_lock(&lane.spin)
        if lane != NULL:
            _acknowledge(client, lane, message)
        n += 1
        message = rdkafka.event_message_next(event)
    if lane != NULL:
        fp_spin_unlock(&lane.spin)


cdef void _on_throttle(
    rd_kafka_t* rk, const char* broker, int32_t broker_id, int throttle_ms, void* opaque
) noexcept nogil:
    """Runs inside drain() (or a transaction's wait); `opaque` is confluent's, so look `rk` up."""
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
    drop_event(oldest)


cdef void drop_event(event_t* event) noexcept nogil:
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


cdef void register_client(client_t* old, client_t* new) noexcept nogil:
    """Replaces one entry: (NULL, client) adds, (client, NULL) removes. Beyond 1024 clients throttling is silent."""
    cdef int i
    fp_spin_lock(&_clients_lock)
    for i in range(1024):
        if _clients[i] == old:
            _clients[i] = new
            break
    fp_spin_unlock(&_clients_lock)


# --------------------------------------------------------------------------------------------------------- outcomes

cdef void publish_completed(client_t* client) noexcept nogil:
    cdef chunk_t* chunk
    cdef chunk_t* ordered = NULL
    cdef chunk_t* following
    if fp_load_ptr(&client.completed) == NULL:
        return
    pthread_mutex_lock(&client.acc.lock)  # first: whoever has the lock knows that all taken is published
    chunk = <chunk_t*>fp_swap_ptr(&client.completed, NULL)
    while chunk != NULL:  # a stack: turn it round, so that callbacks keep the order of acknowledgement
        following = chunk.fly_next
        chunk.fly_next = ordered
        ordered = chunk
        chunk = following
    while ordered != NULL:
        following = ordered.fly_next
        ordered.fly_next = NULL
        if not ordered.published:
            publish(&client.acc, ordered)
        chunk_release(&client.acc, ordered)
        ordered = following
    pthread_mutex_unlock(&client.acc.lock)


cdef void on_queue(rd_kafka_t* rk, void* opaque) noexcept nogil:
    """librdkafka's queue is no longer empty; runs on its threads. Whoever waits first empties it."""
    cdef client_t* client = <client_t*>opaque
    pthread_mutex_lock(&client.acc.lock)
    client.news = True
    if client.acc.done_waiting:
        pthread_cond_broadcast(&client.acc.done)
    if client.acc.sender_waiting:
        pthread_cond_signal(&client.acc.work)
    pthread_mutex_unlock(&client.acc.lock)


cdef void _note_trouble(client_t* client, int32_t error, const char* text) noexcept nogil:
    """Remembers why brokers cannot be reached, for errors that would otherwise only speak of a timeout."""
    # That all are down is no reason, but better than none.
    if error in (ERR__AUTHENTICATION, ERR__SSL, ERR__TRANSPORT, ERR__RESOLVE) or (
        error == ERR__ALL_BROKERS_DOWN and client.trouble_us <= fp_load64(&client.progress_us)
    ):
        pthread_mutex_lock(&client.acc.lock)
        strncpy(client.trouble, text, sizeof(client.trouble) - 1)
        client.trouble_code = error
        client.trouble_us = fp_now_us()
        pthread_mutex_unlock(&client.acc.lock)


cdef void _take_statistics(client_t* client, const char* text) noexcept nogil:
    """Keeps librdkafka's statistics for stats(), and what was settled when they came: reports before them are taken."""
    cdef char* copy = strdup(text)
    cdef topic_t* topic
    cdef lane_t* lane
    cdef int32_t i
    pthread_mutex_lock(&client.acc.lock)
    free(client.statistics)
    client.statistics = copy
    topic = client.acc.topics
    while topic != NULL:
        for i in range(topic.lanes.size):
            lane = topic.lanes.lanes[i]
            if lane != NULL:
                lane.settled_then = fp_load64(&lane.settled_records)
        topic = topic.next
    pthread_mutex_unlock(&client.acc.lock)


cdef void drain(client_t* client) noexcept nogil:
    """Empties librdkafka's queue: notes outcomes, frees messages, keeps what is for the user's callbacks."""
    cdef rd_kafka_event_t* event
    cdef event_t* kept
    cdef int kind
    fp_add64(&client.draining, 1)
    client.news = False  # first: what comes from here on sets it again
    event = rdkafka.queue_poll(client.queue, 0)
    while event != NULL:
        kind = rdkafka.event_type(event)
        kept = NULL
        if kind == EVENT_DR and not client.transactional:
            _take_report(client, event)
        if kind == EVENT_ERROR:
            _note_trouble(client, rdkafka.event_error(event), rdkafka.event_error_string(event))
        if kind == EVENT_STATS:
            _take_statistics(client, rdkafka.event_stats(event))
        if kind == EVENT_ERROR or kind == EVENT_LOG or (kind == EVENT_STATS and client.statistics_wanted):
            kept = <event_t*>calloc(1, sizeof(event_t))
        if kept != NULL:
            kept.event = event
            _keep_event(client, kept)
        else:
            rdkafka.event_destroy(event)
        publish_completed(client)
        event = rdkafka.queue_poll(client.queue, 0)
    publish_completed(client)
    fp_add64(&client.draining, -1)


# --------------------------------------------------------------------------------------------------------- sender

cdef void _refused(client_t* client, lane_t* lane, chunk_t* chunk, uint32_t i, int32_t error) noexcept nogil:
    """librdkafka would not take the record: that is its outcome."""
    cdef bint last = False
    fp_spin_lock(&lane.spin)
    if slot_at(chunk, i).state == PENDING:
        last = _settle(lane, chunk, i, error, NULL, -1)
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
    cdef uint32_t count = headers_head(packed).count
    cdef rd_kafka_headers_t* made = rdkafka.headers_new(count)
    cdef const char* at = packed + sizeof(headers_t)
    cdef header_t header
    cdef uint32_t i
    for i in range(count):
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
    enter_flight(lane, chunk)
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
    """Whether some lane has records out and hears nothing, or that it is not there: its leader may have moved."""
    cdef topic_t* topic = client.acc.topics
    cdef lane_t* lane
    cdef int32_t i
    cdef bint stuck = False
    while topic != NULL:
        if topic.doubtful:
            topic.doubtful = False
            topic.metadata_us = 0
            stuck = True
        elif now - topic.metadata_us > STUCK_US and topic.partitions:
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


cdef void* sender_main(void* argument) noexcept nogil:
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
            drain(client)
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
        elif topic.metadata_error == ERR_UNKNOWN_TOPIC_OR_PART:  # deleted: it may come back, with other partitions
            at = topic.metadata_us + 1000000
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
        if client.route == NULL:
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


cdef void* scout_main(void* argument) noexcept nogil:
    cdef client_t* client = <client_t*>argument
    cdef accumulator_t* acc = &client.acc
    cdef topic_t* topic
    cdef const rd_kafka_metadata_t* answer
    cdef int64_t due = 0
    cdef int64_t until
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
        if client.route != NULL and topic.partitions and topic.undecided.head != NULL:
            topic.routing = True
            pthread_mutex_unlock(&acc.lock)
            client.route(client.runtime, topic)
            pthread_mutex_lock(&acc.lock)
            topic.routing = False
        if answer != NULL:
            rdkafka.metadata_destroy(answer)
        if error and not client.stop:
            if client.connected == 0:
                # Each question makes librdkafka try all brokers every 50 ms; by itself it tries once a second.
                patience = 100
                until = fp_now_us() + 1000000
                while client.connected == 0 and not client.stop and fp_now_us() < until:
                    fp_cond_wait_until(&client.scout_wake, &acc.lock, until)
            else:
                fp_cond_wait_until(&client.scout_wake, &acc.lock, fp_now_us() + 20000)
    pthread_mutex_unlock(&acc.lock)
    return NULL


cdef bint is_routing(client_t* client) noexcept nogil:
    cdef topic_t* topic = client.acc.topics
    while topic != NULL:
        if topic.routing:
            return True
        topic = topic.next
    return False


cdef int add_handle(client_t* client, void* handle, topic_t* topic) noexcept nogil:
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


# --------------------------------------------------------------------------------------------------- for the runtime

cdef void drain_as_guest(client_t* client, int purge_flags) noexcept nogil:
    """drain() on a thread other than the sender, after a purge if flags are given. stop() waits for guests."""
    pthread_mutex_lock(&client.acc.lock)
    if client.stop:
        pthread_mutex_unlock(&client.acc.lock)
        return
    client.guests += 1
    pthread_mutex_unlock(&client.acc.lock)
    if purge_flags:
        rdkafka.purge(client.rk, purge_flags)
    drain(client)
    pthread_mutex_lock(&client.acc.lock)
    client.guests -= 1
    pthread_mutex_unlock(&client.acc.lock)


cdef void set_newborn(client_t* client) noexcept nogil:
    """The client that this thread is about to make through confluent-kafka, or NULL when that is over."""
    fp_set_newborn(client)


cdef int start_threads(client_t* client) noexcept nogil:
    """-1 when the system has no more threads; `client.threads` tells how many run."""
    if fp_start_thread(&client.sender, sender_main, client) == 0:
        client.threads = 1
        if fp_start_thread(&client.scout, scout_main, client) == 0:
            client.threads = 2
    return 0 if client.threads == 2 else -1


cdef int forks() noexcept nogil:
    """How often this process has been forked off since the module was loaded."""
    return fork_generation


def plugin_path():
    """Path of this module, for librdkafka's plugin.library.paths."""
    return __file__
