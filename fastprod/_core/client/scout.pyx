# The scout: asks for metadata, which blocks.

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
