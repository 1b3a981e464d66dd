# The scout: asks for metadata, which blocks.

cdef bint _is_due(client_t* client, topic_t* topic, int64_t now, int64_t* due) noexcept nogil:
    """Whether a topic's metadata should be asked for; else `due` is brought forward to when it should."""
    cdef int64_t at
    if topic.metadata_us <= 0:      # never asked, or asked for by the sender
        return True
    if topic.partitions == 0:       # asked, no answer yet: try again, soon if records wait
        at = topic.metadata_us + (100000 if topic.undecided.head != NULL else 1000000)
    elif topic.metadata_error == ERR_UNKNOWN_TOPIC_OR_PART:  # deleted: it may come back, with other partitions
        at = topic.metadata_us + 1000000
    else:
        at = topic.metadata_us + client.refresh_us
    due[0] = min(due[0], at)
    return at <= now


cdef int _find_due(client_t* client, int64_t now, topic_t** first, int64_t* due) noexcept nogil:
    """Marks the topics whose metadata is due and counts them; without any, `due` is when one will be. The lock is held."""
    cdef topic_t* topic = client.acc.topics
    cdef int n = 0
    due[0] = now + 1000000
    while topic != NULL:
        topic.asked = _is_due(client, topic, now, due)
        if topic.asked:
            n += 1
            first[0] = topic
        topic = topic.next
    return n


cdef bint _is_final(int32_t error) noexcept nogil:
    return error == ERR_TOPIC_AUTHORIZATION_FAILED or error == ERR_TOPIC_EXCEPTION


cdef void _take_metadata(client_t* client, topic_t* topic, const rd_kafka_metadata_topic_t* found) noexcept nogil:
    """Takes over what was told of a topic, NULL = nothing. The lock is held."""
    cdef int32_t* leaders
    cdef int32_t i, error = ERR__TIMED_OUT if found == NULL else found.err
    cdef int64_t now = fp_now_us()
    topic.asked = False
    topic.metadata_us = now
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
    if not topic.routing:
        fail_lane(&client.acc, topic.undecided, error, INT64_MAX)


cdef void _route(client_t* client, topic_t* topic) noexcept nogil:
    """What waited for metadata can go to its lanes. The lock is held, and let go in between."""
    if client.acc.policy == POLICY_PYTHON:  # only the callers' threads may ask a Python partitioner
        if topic.partitions and topic.undecided.head != NULL:
            fp_store64(&client.acc.placeable, 1)
        tell_news(&client.acc)
        return
    while topic.partitions and not client.stop and route_undecided(&client.acc, topic, NULL) > 0:
        pthread_mutex_unlock(&client.acc.lock)
        pthread_mutex_lock(&client.acc.lock)


cdef void _take_answer(client_t* client, const rd_kafka_metadata_t* answer) noexcept nogil:
    """Takes over an answer about the topics that were asked for, and maybe others. The lock is held."""
    cdef topic_t* topic
    cdef int i
    if answer != NULL:
        for i in range(answer.topic_cnt):
            topic = topic_find(&client.acc, answer.topics[i].topic, strlen(answer.topics[i].topic))
            if topic != NULL:
                _take_metadata(client, topic, &answer.topics[i])
    topic = client.acc.topics
    while topic != NULL:
        if topic.asked:
            _take_metadata(client, topic, NULL)
        if topic.partitions and topic.undecided.head != NULL:
            _route(client, topic)
        topic = topic.next


cdef void* scout_main(void* argument) noexcept nogil:
    cdef client_t* client = <client_t*>argument
    cdef accumulator_t* acc = &client.acc
    cdef topic_t* topic = NULL
    cdef const rd_kafka_metadata_t* answer
    cdef int64_t due = 0
    cdef int64_t until
    cdef int count
    cdef int patience = 100  # ms; short at first, so that closing a producer without broker is quick
    cdef rd_kafka_resp_err_t error
    pthread_mutex_lock(&acc.lock)
    while not client.stop:
        count = _find_due(client, fp_now_us(), &topic, &due)
        if count == 0:
            fp_cond_wait_until(&client.scout_wake, &acc.lock, due)
            continue
        pthread_mutex_unlock(&acc.lock)
        answer = NULL
        # Without a topic librdkafka asks for all that have a handle: one question, however many are new.
        error = rdkafka.metadata(
            client.rk, 0, <rd_kafka_topic_t*>topic.handle if count == 1 else NULL, &answer, patience
        )
        patience = 100 if error == 0 else min(patience * 2, 2000)
        pthread_mutex_lock(&acc.lock)
        _take_answer(client, answer)
        if answer != NULL:
            rdkafka.metadata_destroy(answer)
        if error and not client.stop:
            if fp_load64(&client.connected) == 0:
                # Each question makes librdkafka try all brokers every 50 ms; by itself it tries once a second.
                patience = 100
                until = fp_now_us() + 1000000
                while fp_load64(&client.connected) == 0 and not client.stop and fp_now_us() < until:
                    fp_cond_wait_until(&client.scout_wake, &acc.lock, until)
            else:
                fp_cond_wait_until(&client.scout_wake, &acc.lock, fp_now_us() + 20000)
    pthread_mutex_unlock(&acc.lock)
    return NULL
