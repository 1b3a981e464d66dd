# How a record gets in: what is checked, who is asked for its partition, and the wait for room.

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


cdef int64_t _integer(object number, str what, int64_t most) except? -1:
    """An argument that must be an integer, as confluent-kafka sees it: 1.9 is none."""
    cdef int overflow
    number = PyNumber_Index(number)
    cdef int64_t found = PyLong_AsLongLongAndOverflow(number, &overflow)
    if overflow or not -most - 1 <= found <= most:
        raise OverflowError(f"{what} must be from {-most - 1} to {most}, not {number}")
    return found


cdef int accept(Runtime self, topic, value, key, partition, callback, on_delivery, timestamp, headers) except -1:
    """Accepts one record."""
    cdef record_t record
    cdef Py_buffer value_buffer
    cdef Py_buffer key_buffer
    cdef topic_t* target
    cdef bint value_held = False, key_held = False, asking = False
    cdef bytes packed
    if self.closed:
        raise RuntimeError("Producer has been closed")
    if self.generation != forks():
        self.check_fork()
    target = self.topic_of(topic)
    memset(&record, 0, sizeof(record_t))
    if callback is None:
        callback = on_delivery if on_delivery is not None else self.on_delivery
    if callback is not None:
        if not callable(callback):
            raise TypeError(f"on_delivery must be callable, not {type(callback).__name__}")
        record.callback = <void*>callback
    record.partition = <int32_t>_integer(partition, "partition", INT32_MAX)
    if not -1 <= record.partition < MAX_PARTITIONS:
        raise RecordError(
            KafkaError(ERR__UNKNOWN_PARTITION, f"partition must be from -1 to {MAX_PARTITIONS - 1}, not {partition}")
        )
    record.timestamp = _integer(timestamp, "timestamp", INT64_MAX)
    if record.timestamp < 0:
        raise ValueError(f"timestamp must be milliseconds since 1970, or 0 for now, not {timestamp}")
    if headers is not None:
        packed = pack_headers(headers)
        if headers_head(PyBytes_AS_STRING(packed)).count:
            record.headers = PyBytes_AS_STRING(packed)
            record.headers_size = PyBytes_GET_SIZE(packed)
    try:
        value_held = _view(value, &record.value, &record.size, &value_buffer, "value")
        key_held = _view(key, &record.key, &record.key_size, &key_buffer, "key")
        check_size(self, &record)
        if record.callback != NULL:
            Py_INCREF(callback)  # first: another thread may run it before admit() returns
        try:
            admit(self, target, &record, &asking)
        except BaseException:
            if record.callback != NULL:
                Py_DECREF(callback)
            raise
    finally:
        if value_held:
            PyBuffer_Release(&value_buffer)
        if key_held:
            PyBuffer_Release(&key_buffer)
    return 0


cdef inline int check_size(Runtime self, record_t* record) except -1:
    cdef int64_t size
    if record.size + record.key_size + record.headers_size + 128 <= self.max_record_bytes:
        return 0
    size = record_upper_bound(
        record.key_size, record.size, 1 if record.headers == NULL else headers_head(record.headers).wire
    )
    if size > self.max_record_bytes:
        raise RecordError(
            KafkaError(
                ERR_MSG_SIZE_TOO_LARGE,
                f"the record takes {size} bytes, more than max.request.size = {self.max_record_bytes}",
            )
        )
    return 0


cdef int admit(Runtime self, topic_t* topic, record_t* record, bint* asking) except -1:
    """Takes a record in, waiting for room if need be, or raises why it cannot be. `asking`: a partitioner has raised."""
    cdef accumulator_t* acc = &self.client.acc
    cdef int32_t chosen
    cdef int status = APPEND_NO_CHOICE
    while status == APPEND_NO_CHOICE:  # the partitions have become known meanwhile
        if self.partitioner is not None:
            if fp_load64(&acc.placeable):
                place_undecided(self)  # of whatever topic: there may be no other call for it
            if record.partition < 0:
                asking[0] = True
                record.partition = ask_partitioner(self, topic, record)
                asking[0] = False
        pthread_mutex_lock(&acc.lock)
        status = append(acc, topic, record, &chosen)
        pthread_mutex_unlock(&acc.lock)
        if status == APPEND_NO_ROOM:
            status = admit_later(self, topic, record)
    if status != APPEND_OK:
        refuse(self, topic, record, status)
    return 0


cdef int admit_later(Runtime self, topic_t* topic, record_t* record) except -1:
    """Takes a record in when there is room in the pool; returns why not."""
    cdef accumulator_t* acc = &self.client.acc
    cdef waiter_t waiter
    cdef int64_t granted, until = fp_now_us() + self.max_block_us
    cdef int32_t chosen
    cdef int status = APPEND_NO_ROOM
    if footprint(record) > acc.limit:
        return APPEND_TOO_LARGE
    memset(&waiter, 0, sizeof(waiter_t))
    waiter.level = topic.level
    fp_cond_init(&waiter.wake)
    try:
        while True:
            with nogil:
                pthread_mutex_lock(&acc.lock)
                if wait_for_room(self, &waiter, footprint(record), until):
                    granted = waiter.granted
                    use_grant(acc, &waiter)
                    acc.spare = granted
                    status = append(acc, topic, record, &chosen)
                    acc.spare = 0
                    acc.favoured = False
                    wake_waiters(acc)
                pthread_mutex_unlock(&acc.lock)
            if status != APPEND_NO_ROOM or fp_now_us() >= until or is_alone(self):
                return status
            PyErr_CheckSignals()
            place_undecided(self)  # which may be what fills the pool
    finally:
        pthread_mutex_lock(&acc.lock)
        leave_queue(acc, &waiter)
        pthread_mutex_unlock(&acc.lock)
        pthread_cond_destroy(&waiter.wake)


cdef bint wait_for_room(Runtime self, waiter_t* waiter, int64_t least, int64_t until_us) noexcept nogil:
    """Waits for a grant, at most a slice; also true when the producer is closed. The lock is held.

    Who waits for long takes what there is: the rest may be held by something that does not move.
    """
    cdef accumulator_t* acc = &self.client.acc
    cdef int64_t now = fp_now_us(), slice = min(until_us, now + SLICE_US)
    if not waiter.queued and not waiter.granted:
        enter_queue(acc, waiter, least)
    elif waiter.queued:
        waiter.need = least
        wake_waiters(acc)
    while not waiter.granted and not acc.gate and now < slice and not is_alone(self):
        fp_cond_wait_until(&waiter.wake, &acc.lock, slice)
        now = fp_now_us()
    return waiter.granted or acc.gate


cdef bint is_alone(Runtime self) noexcept nogil:
    """Whether it is in vain to wait for room: callbacks hold memory until they have run, and only we would run them."""
    cdef client_t* client = self.client
    cdef int64_t poller, former
    if fp_load64(&client.acc.live_chunks) or fp_load64(&client.acc.deliveries_open) == 0 or fp_load64(&client.listeners):
        return False
    poller = fp_load64(&client.poller)
    former = fp_load64(&client.former_poller)
    if poller and poller != me():
        return False
    return former == 0 or former == me() or fp_now_us() - fp_load64(&client.former_us) > FORMER_US


cdef inline int64_t me() noexcept nogil:
    return <int64_t>PyThread_get_thread_ident()


cdef inline void note_poller(client_t* client) noexcept:
    """Callbacks run on this thread from now on, on that one until now."""
    cdef int64_t poller = fp_load64(&client.poller)
    if poller != me():
        fp_store64(&client.former_us, fp_load64(&client.poller_us))
        fp_store64(&client.former_poller, poller)
        fp_store64(&client.poller, me())
    fp_store64(&client.poller_us, fp_now_us())


cdef int refuse(Runtime self, topic_t* topic, record_t* record, int status) except -1:
    """Raises why a record was not taken."""
    cdef accumulator_t* acc = &self.client.acc
    if status == APPEND_CLOSED:
        raise RuntimeError("Producer has been closed")
    if status == APPEND_NO_TRANSACTION:
        raise RecordError(KafkaError(ERR__STATE, self.no_transaction))
    if status == APPEND_NO_ROOM:
        raise full(self)
    if status == APPEND_TOO_LARGE:
        raise RecordError(
            KafkaError(
                ERR_MSG_SIZE_TOO_LARGE,
                f"the record needs {footprint(record)} bytes of buffer.memory = {acc.limit}",
            )
        )
    if status == APPEND_UNKNOWN_PARTITION:
        raise RecordError(
            KafkaError(
                ERR__UNKNOWN_PARTITION,
                f"topic {<object>topic.label!r} has partitions 0 to {topic.partitions - 1}, not {record.partition}",
            )
        )
    raise MemoryError()


cdef object full(Runtime self):
    """The exception for a record that found no room."""
    cdef accumulator_t* acc = &self.client.acc
    if self.client.delivering and fp_load64(&self.client.poller) == me():
        return BufferFullError(
            f"Local: Queue full: buffer.memory = {acc.limit} bytes is used up, also by the record whose delivery callback "
            "is running: its memory comes back when the callback has returned; produce after that, or raise buffer.memory"
        )
    if is_alone(self):
        return BufferFullError(
            f"Local: Queue full: buffer.memory = {acc.limit} bytes is used up and {acc.callbacks_due} delivery "
            "callbacks wait for poll(); call poll() and produce again"
        )
    return BufferFullError(
        f"Local: Queue full: no room in buffer.memory = {acc.limit} bytes within "
        f"max.block.ms = {self.max_block_us // 1000}; "
        f"{self.trouble() or 'the brokers take records more slowly than they are produced'}"
    )


# ---- Python partitioners. They are only ever called on the callers' threads, with the GIL: what waited for metadata is
# placed by the next call into the producer.

cdef tuple partitions_of(Runtime self, topic_t* topic):
    """(number of partitions, those with a leader) as the partitioner is told; None while unknown."""
    cdef int64_t version
    cdef int32_t count, n, i
    cdef int32_t* copy
    known = self.partitions.get(<object>topic.label)
    pthread_mutex_lock(&self.client.acc.lock)
    version = topic.version
    count = topic.partitions
    n = topic.available_count
    copy = NULL
    if known is None or <int64_t>known[0] != version:
        copy = <int32_t*>malloc(max(n, 1) * sizeof(int32_t))
        if copy != NULL and n:
            memcpy(copy, topic.available, n * sizeof(int32_t))
    pthread_mutex_unlock(&self.client.acc.lock)
    if count == 0:
        free(copy)
        return None
    if known is None or <int64_t>known[0] != version:
        if copy == NULL:
            raise MemoryError()
        known = (version, (count, [copy[i] for i in range(n)]))
        free(copy)
        self.partitions[<object>topic.label] = known
    return known[1]


cdef bint _has_undecided(accumulator_t* acc, topic_t* topic) noexcept nogil:
    """Whether records wait to be placed, or are being placed."""
    cdef bint found
    pthread_mutex_lock(&acc.lock)
    found = topic.undecided.head != NULL or topic.routing
    pthread_mutex_unlock(&acc.lock)
    return found


cdef int32_t ask_partitioner(Runtime self, topic_t* topic, record_t* record) except -2:
    """The user's choice for a record; -1 while partitions are unknown, or records that came before wait for them."""
    if _has_undecided(&self.client.acc, topic):
        place_topic(self, topic)
    known = None if _has_undecided(&self.client.acc, topic) else partitions_of(self, topic)
    if known is None:
        return -1
    return choose_by_python(
        self,
        <object>topic.label,
        None if record.key_size < 0 else record.key[:record.key_size],
        None if record.size < 0 else record.value[:record.size],
        known[0],
        known[1],
    )


cdef int place_undecided(Runtime self) except -1:
    """Places what waited for metadata, where only a Python partitioner can tell where to."""
    cdef topic_t* topic
    if self.partitioner is None:
        return 0
    fp_store64(&self.client.acc.placeable, 0)
    pthread_mutex_lock(&self.client.acc.lock)
    topic = self.client.acc.topics  # the newest; none ever goes
    pthread_mutex_unlock(&self.client.acc.lock)
    while topic != NULL:
        if _has_undecided(&self.client.acc, topic):
            place_topic(self, topic)
        topic = topic.next
    return 0


cdef int place_topic(Runtime self, topic_t* topic) except -1:
    """Asks the partitioner about the records of a topic that waited for metadata, a chunk at a time.

    `topic.routing` keeps the chunk in place while it is asked, and later records behind it.
    """
    cdef accumulator_t* acc = &self.client.acc
    cdef chunk_t* chunk
    cdef int32_t* wanted
    cdef uint64_t drops
    cdef uint32_t i
    cdef int moved = 1
    while moved > 0:
        known = partitions_of(self, topic)
        pthread_mutex_lock(&acc.lock)
        chunk = NULL
        if known is not None and not topic.routing:  # else another thread does, or the partitioner has called us
            chunk = topic.undecided.head
        if chunk != NULL:
            topic.routing = True
            chunk.sealed = 1
        drops = acc.drops
        pthread_mutex_unlock(&acc.lock)
        if chunk == NULL:
            return 0
        wanted = <int32_t*>malloc(chunk.count * sizeof(int32_t))
        try:
            if wanted == NULL:
                raise MemoryError()
            for i in range(chunk.resolved, chunk.count):
                wanted[i] = choose_for_slot(self, topic, slot_at(chunk, i), known)
        except BaseException:  # Ctrl-C: another call asks again
            free(wanted)
            pthread_mutex_lock(&acc.lock)
            topic.routing = False
            if acc.drops != drops:
                fail_head(acc, topic.undecided, ERR__PURGE_QUEUE)
            fp_store64(&acc.placeable, 1)
            pthread_mutex_unlock(&acc.lock)
            raise
        pthread_mutex_lock(&acc.lock)
        topic.routing = False
        if acc.drops != drops:  # purged, aborted or closed meanwhile: the chunk, not what came after that
            fail_head(acc, topic.undecided, ERR__PURGE_QUEUE)
        else:
            moved = route_undecided(acc, topic, wanted)
            if moved < 0:
                fp_store64(&acc.placeable, 1)
        pthread_mutex_unlock(&acc.lock)
        free(wanted)
    return 0


cdef int32_t choose_for_slot(Runtime self, topic_t* topic, slot_t* slot, tuple known) except -3:
    """The partition for a record that waited; CHOICE_FAILED when the partitioner raises, which is told as unraisable."""
    if slot.state >= 0:
        return slot.state
    try:
        return choose_by_python(
            self,
            <object>topic.label,
            None if slot.key == NULL else slot.key[:slot.key_size],
            None if slot.payload == NULL else slot.payload[:slot.size],
            known[0],
            known[1],
        )
    except Exception as error:
        write_unraisable(error, self.partitioner)
        return CHOICE_FAILED


cdef write_unraisable(error, where):
    """Tells of an exception that no caller can be given, through sys.unraisablehook."""
    PyErr_SetObject(type(error), error)
    PyErr_WriteUnraisable(where)


cdef int32_t choose_by_python(Runtime self, name, key, value, count, available) except -2:
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
