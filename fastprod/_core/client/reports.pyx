# From delivery reports to outcomes: which record is meant, what became of it; what is for the user's callbacks.

cdef inline bint _settle(
    lane_t* lane, chunk_t* chunk, uint32_t i, int32_t error, int64_t offset, int64_t now, bint strict
) noexcept nogil:
    """librdkafka is done with a record. The leaf lock is held; true when it was the chunk's last."""
    cdef slot_t* slot = slot_at(chunk, i)
    chunk.returned += 1
    if error == ERR__UNKNOWN_TOPIC or error == ERR__UNKNOWN_PARTITION or error == ERR_UNKNOWN_TOPIC_OR_PART:
        fp_store64(&lane.topic.doubtful, 1)
    if slot.state == PENDING:
        resolve(lane, chunk, i, error, offset, now)
    elif slot.state == EXPIRED:  # has had its outcome
        slot.state = ERR__MSG_TIMED_OUT
    if error:
        break_off(lane, strict)
    if chunk.returned == chunk.count:
        unlink_flying(lane, chunk)
        return True
    return False


cdef void _push_completed(client_t* client, chunk_t* chunk) noexcept nogil:
    cdef void* head = fp_load_ptr(&client.completed)
    chunk.fly_next = <chunk_t*>head  # `next` may be in use: a chunk that timed out waits in the delivery list
    while not fp_cas_ptr(&client.completed, &head, chunk):
        chunk.fly_next = <chunk_t*>head


cdef inline void _acknowledge(
    client_t* client, chunk_t* chunk, const rd_kafka_message_t* message, bint told, bint doubted, int64_t now
) noexcept nogil:
    """Notes a record's outcome; the leaf lock is held. `told`: the offset is the broker's.

    `doubted`: librdkafka may believe that the record was written only because one after it was. That is true, unless
    it was the first of its partition and was refused, and the broker has taken the one after it all the same.
    """
    cdef lane_t* lane = chunk.lane
    cdef uint32_t i = index_of(message._private)
    cdef int32_t error = message.err
    if error == ERR__DESTROY and not client.stop:
        error = ERR__UNKNOWN_PARTITION  # it was deleted while librdkafka put the record into its queue
    if error == 0 and doubted and fp_load64(&lane.torn):
        error = ERR__INCONSISTENT
    if chunk.rich and error == 0:
        rich_at(chunk, i).timestamp = rdkafka.message_timestamp(message, <int*>&rich_at(chunk, i).timestamp_type)
    if error == 0:
        fp_store64(&lane.heard_us, now)
    elif error > 0:  # librdkafka's own are negative
        fp_grow64(&lane.refused_records, 1)
    if _settle(lane, chunk, i, error, message.offset if told else -1, now, client.acc.strict):
        if not error:
            fp_store64(&lane.progress_us, now)
            fp_store64(&client.progress_us, now)
        _push_completed(client, chunk)
    elif chunk.returned == chunk.sent:  # the rest of it waits for that
        fp_add64(&client.parts_back, 1)


cdef inline void _tell_parts(client_t* client, int64_t before) noexcept nogil:
    """Tells the sender, if a part of a chunk has come back since."""
    if fp_load64(&client.parts_back) != before:
        pthread_mutex_lock(&client.acc.lock)
        if client.acc.sender_waiting:
            pthread_cond_signal(&client.acc.work)
        pthread_mutex_unlock(&client.acc.lock)


cdef rd_kafka_resp_err_t _on_acknowledged(rd_kafka_t* rk, rd_kafka_message_t* message, void* opaque) noexcept nogil:
    """Transactional producers only. Runs on librdkafka's threads, some with its locks held.

    Messages of an answer come one after the other, the first right after _on_response_received.
    """
    cdef client_t* client = <client_t*>opaque
    cdef int64_t parts = fp_load64(&client.parts_back)
    cdef chunk_t* chunk
    cdef lane_t* lane
    if fp_get_answering() != NULL:
        _count_settled_request(client, (<broker_t*>fp_get_answering()).id)
        fp_set_answering(NULL)
        fp_set_told(message.offset >= 0)
    if not fp_is_handing_over() and message._private != NULL:
        chunk = chunk_of(message._private)
        lane = chunk.lane  # stays, though the chunk may go with its last record
        fp_spin_lock(&lane.spin)
        _acknowledge(client, chunk, message, fp_is_told(), False, fp_now_us())
        fp_spin_unlock(&lane.spin)
        _tell_parts(client, parts)
    # The same message may reach confluent-kafka's callback next, which would take the token for a pointer of its own.
    message._private = NULL
    return 0


cdef void _take_report(client_t* client, rd_kafka_event_t* event) noexcept nogil:
    """Notes the outcomes in a delivery report. Its messages are usually all of one lane: lock that once for many.

    They were answered together: where the broker told no offset, as for a batch that it had already, librdkafka counts
    on from -1, so the first message tells for all.
    """
    cdef bint few = rdkafka.event_message_count(event) < HOLDING  # counts what is left: before the first is taken
    cdef const rd_kafka_message_t* message = rdkafka.event_message_next(event)
    cdef bint told
    cdef chunk_t* chunk
    cdef lane_t* lane = NULL
    cdef uint32_t n = 0
    cdef int64_t now = fp_now_us(), parts = fp_load64(&client.parts_back)
    if message == NULL:
        return
    told = message.offset >= 0 and not client.no_offsets
    _count_settled_request(client, rdkafka.message_broker_id(message))
    while message != NULL:
        chunk = chunk_of(message._private)
        if chunk.lane != lane or n & 0xff == 0:
            if lane != NULL:
                fp_spin_unlock(&lane.spin)
            lane = chunk.lane
            fp_spin_lock(&lane.spin)
        _acknowledge(client, chunk, message, told, few and not told, now)
        n += 1
        message = rdkafka.event_message_next(event)
    fp_spin_unlock(&lane.spin)
    _tell_parts(client, parts)


cdef void _keep_event(client_t* client, event_t* event) noexcept nogil:
    """Keeps an event until poll(); the oldest goes when nobody polls."""
    cdef event_t* oldest = NULL
    pthread_mutex_lock(&client.acc.lock)
    if client.last_event != NULL:
        client.last_event.next = event
    else:
        fp_store_ptr(<void**>&client.events, event)
    client.last_event = event
    client.event_count += 1
    tell_news(&client.acc)
    if client.event_count > EVENTS_KEPT:
        oldest = client.events
        fp_store_ptr(<void**>&client.events, oldest.next)
        client.event_count -= 1
    pthread_mutex_unlock(&client.acc.lock)
    drop_event(oldest)


cdef void drop_event(event_t* event) noexcept nogil:
    if event != NULL:
        if event.event != NULL:
            rdkafka.event_destroy(event.event)
        free(event.broker)
        free(event)


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
        chunk_done(&client.acc, ordered)
        ordered = following
    pthread_mutex_unlock(&client.acc.lock)


cdef void _note_trouble(client_t* client, int32_t error, const char* text) noexcept nogil:
    """Remembers why brokers cannot be reached, for errors that would otherwise only speak of a timeout."""
    # That all are down is no reason, but better than none.
    if error in (ERR__AUTHENTICATION, ERR__SSL, ERR__TRANSPORT, ERR__RESOLVE) or (
        error == ERR__ALL_BROKERS_DOWN and fp_load64(&client.trouble_us) <= fp_load64(&client.progress_us)
    ):
        pthread_mutex_lock(&client.acc.lock)
        strncpy(client.trouble, text, sizeof(client.trouble) - 1)
        fp_store64(&client.trouble_code, error)
        fp_store64(&client.trouble_us, fp_now_us())
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
    fp_store64(&client.news, 0)  # first: what comes from here on sets it again
    event = rdkafka.queue_poll(client.queue, 0)
    while event != NULL:
        kind = rdkafka.event_type(event)
        kept = NULL
        if kind == EVENT_DR and not client.transactional:
            _take_report(client, event)
        if kind == EVENT_ERROR:
            _note_trouble(client, rdkafka.event_error(event), rdkafka.event_error_string(event))
            if rdkafka.event_error(event) == ERR__FATAL:
                fp_store64(&client.fatal, 1)
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


cdef bint enter_as_guest(client_t* client) noexcept nogil:
    """A thread other than ours is about to call librdkafka; false when that is not allowed any more."""
    cdef bint allowed
    pthread_mutex_lock(&client.acc.lock)
    allowed = not client.stop
    if allowed:
        client.guests += 1
    pthread_mutex_unlock(&client.acc.lock)
    return allowed


cdef void leave_as_guest(client_t* client) noexcept nogil:
    pthread_mutex_lock(&client.acc.lock)
    client.guests -= 1
    pthread_mutex_unlock(&client.acc.lock)


cdef void drain_as_guest(client_t* client, int purge_flags) noexcept nogil:
    """drain() on a thread other than the sender, after a purge if flags are given. stop() waits for guests."""
    if enter_as_guest(client):
        if purge_flags:
            rdkafka.purge(client.rk, purge_flags)
        drain(client)
        leave_as_guest(client)
