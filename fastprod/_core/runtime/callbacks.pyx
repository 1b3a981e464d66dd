# Waiting for outcomes, and running callbacks.

cdef int wait_for_news(Runtime self, int64_t until_us, int64_t seen) except -1:
    """Sleeps until something has happened since `seen`, at most a slice; looks for Ctrl-C."""
    cdef accumulator_t* acc = &self.client.acc
    cdef bint more
    with nogil:
        pthread_mutex_lock(&acc.lock)
        acc.done_waiting += 1
        if not self.client.stop and not fp_load64(&self.client.news) and acc.news == seen:
            fp_cond_wait_until(&acc.done, &acc.lock, min(until_us, fp_now_us() + SLICE_US))
        acc.done_waiting -= 1
        more = fp_load64(&self.client.news) != 0
        pthread_mutex_unlock(&acc.lock)
        if more:
            drain_as_guest(self.client, 0)  # sooner than through the sender
    PyErr_CheckSignals()
    return 0


cdef int listen_for_news(Runtime self, int64_t until_us, int64_t seen) except -1:
    """The same for a thread that will run the callbacks: others need not give up waiting for their memory."""
    fp_add64(&self.client.listeners, 1)
    try:
        return wait_for_news(self, until_us, seen)
    finally:
        note_poller(self.client)  # before it counts no more
        fp_add64(&self.client.listeners, -1)


cdef hurry(Runtime self):
    """Ends the linger of everything that waits."""
    with nogil:
        pthread_mutex_lock(&self.client.acc.lock)
        seal_all(&self.client.acc)
        self.client.acc.epoch += 1
        self.client.acc.place_epoch = self.client.acc.epoch
        pthread_cond_signal(&self.client.acc.work)
        pthread_mutex_unlock(&self.client.acc.lock)


cdef int64_t wait_and_dispatch(Runtime self, double timeout) except -1:
    """poll()"""
    cdef int64_t until
    cdef int64_t served
    cdef int64_t seen
    if self.closed:
        raise RuntimeError("Producer has been closed")
    self.check_fork()
    place_undecided(self)
    served = dispatch(self)
    self.check_access()
    if served or timeout == 0:
        return served
    until = _until(timeout)
    while served == 0 and fp_now_us() < until and not self.closed:
        seen = fp_load64(&self.client.acc.news)
        if fp_load_ptr(<void**>&self.client.acc.deliveries) == NULL and not has_events(self.client):
            listen_for_news(self, until, seen)
        place_undecided(self)
        served = dispatch(self)
        self.check_access()
    return served


cdef int64_t flush(Runtime self, double timeout) except -1:
    """Runtime.flush"""
    cdef accumulator_t* acc = &self.client.acc
    cdef flusher_t flusher
    cdef flusher_t** link
    cdef int64_t seen
    cdef int64_t until = _until(timeout)
    cdef bint idle
    self.check_fork()  # another thread may close it at any time: it ends then
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
            place_undecided(self)
            with nogil:
                pthread_mutex_lock(&acc.lock)
                idle = flusher.remaining <= 0
                seen = fp_load64(&acc.news)
                pthread_mutex_unlock(&acc.lock)
            dispatch(self)  # when all is done, this runs the last callbacks of what was flushed
            if not idle:
                self.check_access()
            if idle or fp_now_us() >= until or self.closed:
                break
            listen_for_news(self, until, seen)
    finally:
        with nogil:
            pthread_mutex_lock(&acc.lock)
            link = &acc.flushers
            while link[0] != &flusher:
                link = &link[0].next
            link[0] = flusher.next
            pthread_mutex_unlock(&acc.lock)
    sweep(self, True)
    return 0 if idle else self.outstanding()


cdef inline bint has_events(client_t* client) noexcept nogil:
    return fp_load_ptr(<void**>&client.events) != NULL


cdef int64_t dispatch(Runtime self) except -1:
    """Runs what is due. Every callback runs, though one raises; the first exception is raised at the end."""
    cdef client_t* client = self.client
    cdef chunk_t* chunk
    cdef chunk_t* last
    cdef event_t* event
    cdef int64_t served = 0
    note_poller(client)
    if not has_events(client) and fp_load_ptr(<void**>&client.acc.deliveries) == NULL:
        return 0
    errors = []
    while has_events(client):
        pthread_mutex_lock(&client.acc.lock)
        event = client.events
        if event != NULL:
            fp_store_ptr(<void**>&client.events, event.next)
            client.event_count -= 1
            if client.events == NULL:
                client.last_event = NULL
        pthread_mutex_unlock(&client.acc.lock)
        if event == NULL:
            break
        try:
            serve(self, event)
        except Exception as error:
            errors.append(error)
        finally:
            drop_event(event)
        served += 1
    pthread_mutex_lock(&client.acc.lock)
    last = client.acc.last_delivery  # what comes while callbacks run is for the next call
    pthread_mutex_unlock(&client.acc.lock)
    chunk = NULL
    while last != NULL and chunk != last and fp_load_ptr(<void**>&client.acc.deliveries) != NULL:
        pthread_mutex_lock(&client.acc.lock)
        chunk = client.acc.deliveries
        if chunk != NULL:
            fp_store_ptr(<void**>&client.acc.deliveries, chunk.next)
            if chunk.next == NULL:
                client.acc.last_delivery = NULL
        pthread_mutex_unlock(&client.acc.lock)
        if chunk == NULL:
            break
        client.delivering = True
        try:
            served += deliver(self, chunk, errors)
        finally:
            client.delivering = False
    if errors:
        for error in errors[1:]:
            write_unraisable(error, None)
        raise errors[0]
    return served


cdef int64_t deliver(Runtime self, chunk_t* chunk, list errors) except -1:
    """Runs the callbacks of one chunk and lets go of it.

    That happens before the last one runs, which may want the memory: it may produce the next record. After Ctrl-C in a
    callback the others wait for the next call.
    """
    cdef accumulator_t* acc = &self.client.acc
    cdef bint last = False
    cdef topic_t* topic = chunk.lane.topic
    cdef slot_t* slot
    cdef rich_t* more
    cdef Message message
    cdef int64_t served = 0
    cdef int32_t error_code
    cdef uint32_t i
    label = <object>topic.label
    while not last and chunk.delivered < chunk.count:
        i = chunk.delivered
        chunk.delivered += 1
        slot = slot_at(chunk, i)
        more = rich_at(chunk, i)
        if more.callback == NULL:
            continue
        callback = <object>more.callback
        more.callback = NULL
        Py_DECREF(callback)
        chunk.callbacks -= 1
        last = chunk.callbacks == 0
        error_code = error_of(slot)
        message = Message.__new__(Message)
        message._topic = label
        message._key = None if slot.key == NULL else slot.key[:slot.key_size]
        message._value = None if slot.payload == NULL else slot.payload[:slot.size]
        message._partition = more.partition
        message._offset = more.offset
        message._latency_us = more.clock_us
        message._headers = None if more.headers == NULL else more.headers[:headers_head(more.headers).size]
        if error_code == 0:
            message._error = None
            message._timestamp = more.timestamp
            message._timestamp_type = more.timestamp_type
        else:
            message._error = self.outcome_error(error_code)
            message._timestamp = -1
            message._timestamp_type = 0
        fp_add64(&acc.callbacks_due, -1)
        if last:
            pthread_mutex_lock(&acc.lock)
            fp_grow64(&acc.deliveries_open, -1)
            chunk_release(acc, chunk)
            pthread_mutex_unlock(&acc.lock)
        if self.only_errors and error_code == 0:
            continue
        served += 1
        try:
            callback(message._error, message)
        except Exception as error:
            errors.append(error)
        except BaseException:
            if not last:
                pthread_mutex_lock(&acc.lock)
                chunk.next = acc.deliveries
                fp_store_ptr(<void**>&acc.deliveries, chunk)
                if acc.last_delivery == NULL:
                    acc.last_delivery = chunk
                pthread_mutex_unlock(&acc.lock)
            raise
    return served


cdef serve(Runtime self, event_t* event):
    """Hands one event to the user's callback for it."""
    cdef const char* facility = NULL
    cdef const char* text = NULL
    cdef int level = 0
    if event.event == NULL:
        if self.throttle_cb is not None:
            self.throttle_cb(
                confluent_kafka.ThrottleEvent(event.broker.decode(), event.broker_id, event.throttle_ms / 1000.0)
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


cdef drop_callbacks(Runtime self):
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
        topic = topic.next


# syslog's levels as Python's
_LOG_LEVELS = (50, 50, 50, 40, 30, 20, 20, 10)


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
