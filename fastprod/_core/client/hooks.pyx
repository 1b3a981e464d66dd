# What librdkafka calls: when a client is made, connections come and go, brokers throttle, its queue has something.

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
    cdef client_t* client = <client_t*>opaque
    cdef rd_kafka_resp_err_t error
    client.rk = rk
    if client.pipelined:
        # librdkafka looks at all partitions of a broker before it makes a request. To idempotent producers it grants one
        # request per look and five on their way, for brokers remember the last five of a partition: with thousands of
        # partitions looking is all it does, and a distant broker is hardly used. Here a partition has one request at a
        # time, so there may be many of others; fewer where urgent ones would queue up behind them.
        rdkafka.conf_set(<rd_kafka_conf_t*>conf, b"queue.buffering.backpressure.threshold", UNSENT, errstr, errstr_size)
        rdkafka.conf_set(
            <rd_kafka_conf_t*>conf, b"max.in.flight.requests.per.connection",
            UNANSWERED if client.acc.levels == 1 else UNSENT, errstr, errstr_size,
        )
    error = rdkafka.interceptor_add_on_destroy(rk, b"fastprod", _on_destroy, opaque)
    if error == 0:
        error = rdkafka.interceptor_add_on_broker_state_change(rk, b"fastprod", _on_broker_state, opaque)
    if error == 0:
        error = rdkafka.interceptor_add_on_request_sent(rk, b"fastprod", _on_request_sent, opaque)
    if error == 0:
        error = rdkafka.interceptor_add_on_response_received(rk, b"fastprod", _on_response_received, opaque)
    if error == 0 and client.transactional:
        error = rdkafka.interceptor_add_on_acknowledgement(rk, b"fastprod", _on_acknowledged, opaque)
    return error


cdef rd_kafka_resp_err_t _on_destroy(rd_kafka_t* rk, void* opaque) noexcept nogil:
    """The client is going, or could not be made after all."""
    (<client_t*>opaque).rk = NULL
    return 0


cdef rd_kafka_resp_err_t _on_broker_state(
    rd_kafka_t* rk, int32_t broker, const char* protocol, const char* name, int port, const char* state, void* opaque
) noexcept nogil:
    """A connection was made or lost. Runs on librdkafka's threads, some with its locks held."""
    cdef client_t* client = <client_t*>opaque
    cdef bint up = strcmp(state, b"UP") == 0
    cdef broker_t* known
    if broker < 0:  # by its name instead
        broker = -1 - <int32_t>((murmur2_bytes(<const unsigned char*>name, strlen(name)) + port) & 0x3fffffff)
    fp_spin_lock(&client.brokers_lock)
    known = _broker(client, broker)
    if known != NULL and known.up != up:
        known.up = up
        known.known |= up
        fp_grow64(&client.connected, 1 if up else -1)
    fp_spin_unlock(&client.brokers_lock)
    if up:
        pthread_mutex_lock(&client.acc.lock)
        fp_store64(&client.reached_us, fp_now_us())
        pthread_cond_signal(&client.scout_wake)
        pthread_mutex_unlock(&client.acc.lock)
    return 0


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


cdef client_t* _client_of(rd_kafka_t* rk) noexcept nogil:
    cdef client_t* client
    fp_spin_lock(&_clients_lock)
    client = _clients
    while client != NULL and client.rk != rk:
        client = client.next_client
    fp_spin_unlock(&_clients_lock)
    return client


cdef void register_client(client_t* client) noexcept nogil:
    global _clients
    fp_spin_lock(&_clients_lock)
    client.next_client = _clients
    _clients = client
    fp_spin_unlock(&_clients_lock)


cdef void forget_client(client_t* client) noexcept nogil:
    cdef client_t** link = &_clients
    fp_spin_lock(&_clients_lock)
    while link[0] != NULL and link[0] != client:
        link = &link[0].next_client
    if link[0] != NULL:
        link[0] = client.next_client
    fp_spin_unlock(&_clients_lock)


cdef void on_queue(rd_kafka_t* rk, void* opaque) noexcept nogil:
    """librdkafka's queue is no longer empty; runs on its threads. Whoever waits first empties it."""
    cdef client_t* client = <client_t*>opaque
    pthread_mutex_lock(&client.acc.lock)
    fp_store64(&client.news, 1)
    if client.acc.done_waiting:
        pthread_cond_broadcast(&client.acc.done)
    if client.acc.sender_waiting:
        pthread_cond_signal(&client.acc.work)
    pthread_mutex_unlock(&client.acc.lock)


cdef void set_newborn(client_t* client) noexcept nogil:
    """The client that this thread is about to make through confluent-kafka, or NULL when that is over."""
    fp_set_newborn(client)
