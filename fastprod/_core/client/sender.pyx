# The sender: gives ready chunks to librdkafka, watches linger and timeouts, takes delivery reports.

cdef void _refused(client_t* client, lane_t* lane, chunk_t* chunk, uint32_t i, int32_t error) noexcept nogil:
    """librdkafka would not take the record: that is its outcome."""
    cdef bint last = False
    fp_spin_lock(&lane.spin)
    if slot_at(chunk, i).state == PENDING:
        last = _settle(lane, chunk, i, error, -1, fp_now_us(), client.acc.strict)
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
    cdef uint32_t i, taken, n = end - start
    cdef int32_t partition = lane.partition
    for i in range(n):
        slot = slot_at(chunk, start + i)
        message = &messages[i]
        message.payload = <void*>slot.payload
        message.len = slot.size
        message.key = <void*>slot.key
        message.key_len = slot.key_size
        message._private = token_of(chunk, start + i)
    fp_hand_over(1)
    taken = <uint32_t>rdkafka.produce_batch(<rd_kafka_topic_t*>lane.topic.handle, partition, 0, messages, n)
    fp_hand_over(0)
    if taken == n:
        return 0
    for i in range(n):
        if messages[i].err == ERR__QUEUE_FULL:
            return n - i  # a clean suffix
        if messages[i].err:
            _refused(client, lane, chunk, start + i, messages[i].err)
    return 0


cdef int _send_one(client_t* client, lane_t* lane, chunk_t* chunk, uint32_t i, int64_t timestamp) noexcept nogil:
    """A record with headers or timestamp; 1 when librdkafka's queue is full."""
    cdef rd_kafka_vu_t arguments[8]
    cdef slot_t* slot = slot_at(chunk, i)
    cdef rich_t* more = rich_at(chunk, i) if chunk.rich else NULL
    cdef rd_kafka_headers_t* headers = NULL
    cdef rd_kafka_error_t* failure
    cdef rd_kafka_resp_err_t error
    cdef size_t n = 6
    arguments[0].vtype = VTYPE_RKT
    arguments[0].u.rkt = <rd_kafka_topic_t*>lane.topic.handle
    arguments[1].vtype = VTYPE_PARTITION
    arguments[1].u.i32 = lane.partition
    arguments[2].vtype = VTYPE_MSGFLAGS
    arguments[2].u.i = 0
    arguments[3].vtype = VTYPE_VALUE
    (<rd_kafka_vu_mem*>&arguments[3].u).ptr = <void*>slot.payload
    (<rd_kafka_vu_mem*>&arguments[3].u).size = slot.size
    arguments[4].vtype = VTYPE_KEY
    (<rd_kafka_vu_mem*>&arguments[4].u).ptr = <void*>slot.key
    (<rd_kafka_vu_mem*>&arguments[4].u).size = slot.key_size
    arguments[5].vtype = VTYPE_OPAQUE
    arguments[5].u.ptr = token_of(chunk, i)
    if more != NULL and more.timestamp:
        timestamp = more.timestamp
    if timestamp:
        arguments[n].vtype = VTYPE_TIMESTAMP
        arguments[n].u.i64 = timestamp
        n += 1
    if more != NULL and more.headers != NULL:
        headers = librdkafka_headers(more.headers)
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


cdef inline void _take_back(lane_t* lane, chunk_t* chunk, uint32_t sent) noexcept nogil:
    """librdkafka had no room from there on."""
    fp_spin_lock(&lane.spin)
    chunk.sent = sent
    fp_spin_unlock(&lane.spin)


cdef uint32_t _send_chunk(client_t* client, lane_t* lane, chunk_t* chunk, uint32_t most) noexcept nogil:
    """Gives a chunk, or `most` records of it, to librdkafka; returns how many its queue had no room for.

    Once it has all of a chunk, that may be gone.
    """
    cdef uint32_t i = chunk.sent, start, left
    cdef uint32_t count = i + min(chunk.count - i, most)
    cdef int64_t timestamp = 0
    cdef rich_t* more
    cdef bint single
    cdef bint mixed = chunk.single
    # The rest of the chunk may be late by the time it goes: its first record must not be younger then.
    if fp_now_us() - chunk.created_us > LATE_US or count < chunk.count:
        timestamp = chunk.created_ms
    enter_flight(lane, chunk, count)
    if not mixed and timestamp == 0:
        left = _send_batch(client, lane, chunk, i, count)
        if left:
            _take_back(lane, chunk, count - left)
        return left
    while i < count:
        start = i
        single = timestamp != 0
        while i < count and not single:
            more = rich_at(chunk, i)
            single = more.headers != NULL or more.timestamp != 0
            if not single:
                i += 1
        if i > start:
            left = _send_batch(client, lane, chunk, start, i)
            if left:
                _take_back(lane, chunk, i - left)
                return count - i + left
        if i < count:
            # A record not handed over yet keeps the chunk alive, so reading it here is safe.
            if _send_one(client, lane, chunk, i, timestamp):
                _take_back(lane, chunk, i)
                return count - i
            i += 1
    return 0


cdef void _expire(client_t* client, int64_t now) noexcept nogil:
    """Ends records whose delivery timeout, counted from produce, is over. The lock is held."""
    if client.acc.timeout_us:
        fail_waiting(&client.acc, ERR__MSG_TIMED_OUT, now - client.acc.timeout_us)
        expire_flying(&client.acc, now - client.acc.timeout_us - (0 if client.acc.strict else GRACE_US))


cdef bint _look_for_stuck(client_t* client, int64_t now) noexcept nogil:
    """Whether some lane has records out and hears nothing, or that it is not there: its leader may have moved."""
    cdef topic_t* topic = client.acc.topics
    cdef lane_t* lane
    cdef int32_t i
    cdef bint stuck = False
    while topic != NULL:
        if fp_load64(&topic.doubtful):
            fp_store64(&topic.doubtful, 0)  # first: one refused from here on sets it again
            topic.metadata_us = 0
            stuck = True
            for i in range(topic.lanes.size):  # should it be made anew, its brokers do not know the producer
                lane = topic.lanes.lanes[i]
                if lane != NULL:
                    fp_spin_lock(&lane.spin)
                    fp_store64(&lane.heard_us, 0)
                    fp_store64(&lane.refused_records, 0)
                    fp_spin_unlock(&lane.spin)
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
    cdef int64_t now, checked = 0, parts = 0
    cdef uint32_t count, most, left, given
    cdef bint torn
    pthread_mutex_lock(&acc.lock)
    while not client.stop:
        now = fp_now_us()
        if now - checked >= 1000000 or (acc.timeout_us and now - checked >= acc.timeout_us >> 2):
            checked = now
            _expire(client, now)
            if _look_for_stuck(client, now):
                pthread_cond_signal(&client.scout_wake)
            if fp_load64(&client.fatal) and not client.transactional:
                # What librdkafka got while it gave everything up would otherwise lie there until it times out.
                pthread_mutex_unlock(&acc.lock)
                rdkafka.purge(client.rk, PURGE_F_QUEUE | PURGE_F_NON_BLOCKING)
                pthread_mutex_lock(&acc.lock)
        if fp_load64(&client.news) or fp_load_ptr(&client.completed) != NULL:
            pthread_mutex_unlock(&acc.lock)
            drain(client)
            pthread_mutex_lock(&acc.lock)
        if acc.split and fp_load64(&client.parts_back) != parts:
            parts = fp_load64(&client.parts_back)
            release_split(acc)
        lane = next_ready(acc, now)
        if lane == NULL and (fp_load64(&client.news) or client.stop):
            continue
        if lane == NULL:
            now = next_deadline(acc, now)
            if acc.timeout_us:
                now = min(now, checked + max(acc.timeout_us >> 2, 1000))
            acc.sender_waiting = True
            fp_cond_wait_until(&acc.work, &acc.lock, now)
            acc.sender_waiting = False
            continue
        if is_broken(lane):
            fail_lane(acc, lane, ERR__GAPLESS_GUARANTEE, INT64_MAX)
            continue
        chunk = detach(acc, lane)
        client.sending = True
        pthread_mutex_unlock(&acc.lock)
        # A broker takes any sequence number from a producer that it does not know, or no longer. Were a hand-over torn in
        # two, and the first request refused, it would take the second, and librdkafka would believe both. What is handed
        # over within librdkafka's patience is one request; when it took longer, `reports.pyx` does not believe everything.
        # Where that will not do, one record goes alone.
        most = UINT32_MAX
        torn = acc.request_bytes and not is_known(acc, lane, now)
        if torn and not client.patience_us:
            torn = False
            if fp_load64(&lane.refused_records) < REFUSED:
                most = 1
        fp_store64(&lane.torn, torn)
        now = fp_now_us()
        left = given = 0
        while chunk != NULL:
            following = chunk.next
            count = chunk.count - chunk.sent
            left = _send_chunk(client, lane, chunk, most)
            given += count - left
            if left or count > most:
                break
            chunk = following
            if most == 1:
                break
        if torn and (given < 2 or fp_now_us() - now < client.patience_us):
            fp_store64(&lane.torn, 0)
        pthread_mutex_lock(&acc.lock)
        client.sending = False
        if left:
            lane.retry_us = fp_now_us() + RETRY_US
        if chunk != NULL:
            reattach(acc, lane, chunk)
    pthread_mutex_unlock(&acc.lock)
    return NULL
