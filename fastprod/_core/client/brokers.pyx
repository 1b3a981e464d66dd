# Figures of brokers: Produce requests sent, answered, repeated.

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
    elif api == END_TXN_REQUEST:
        fp_spin_lock(&client.brokers_lock)
        client.ends_sent += 1
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
    elif api == END_TXN_REQUEST:
        fp_spin_lock(&client.brokers_lock)
        if client.ends_sent:  # else it was still in the queue
            client.ends_sent -= 1
            client.ends_lost += error != 0
        fp_spin_unlock(&client.brokers_lock)
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
