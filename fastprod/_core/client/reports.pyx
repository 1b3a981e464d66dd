# From delivery reports to outcomes: which record is meant, what became of it; what is for the user's callbacks.

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
