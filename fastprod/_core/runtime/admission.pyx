# How a record gets in: what is checked, who is asked for its partition, and the wait for room.

from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.number cimport PyNumber_Index
from libc.stdint cimport INT32_MAX

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
    cdef bint value_held = False, key_held = False
    cdef bytes packed
    cdef int32_t chosen
    cdef int status
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
    if self.transactional and not self.in_transaction:
        raise RecordError(
            KafkaError(ERR__STATE, "a transactional producer needs begin_transaction() before produce()")
        )
    try:
        value_held = _view(value, &record.value, &record.size, &value_buffer, "value")
        key_held = _view(key, &record.key, &record.key_size, &key_buffer, "key")
        check_size(self, &record)
        if self.partitioner is not None and record.partition < 0:
            record.partition = ask_partitioner(self, target, &record)
        pthread_mutex_lock(&self.client.acc.lock)
        status = APPEND_NO_ROOM
        if self.client.acc.waiters == NULL:
            status = append(&self.client.acc, target, &record, &chosen)
            if status == APPEND_OK and record.callback != NULL:
                Py_INCREF(callback)
        pthread_mutex_unlock(&self.client.acc.lock)
        if status != APPEND_OK:
            append_slowly(self, target, &record, status, self.max_block_us)
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


cdef int append_slowly(Runtime self, topic_t* topic, record_t* record, int status, int64_t patience_us) except -1:
    """Everything that keeps a record from being taken at once: waits for room, or raises."""
    cdef accumulator_t* acc = &self.client.acc
    cdef waiter_t waiter
    cdef int64_t until, now
    cdef int32_t chosen
    cdef bint alone
    if footprint(acc, record) > acc.limit:
        status = APPEND_TOO_LARGE
    if status == APPEND_NO_CHOICE:
        status = APPEND_NO_ROOM
    if status == APPEND_NO_ROOM:
        memset(&waiter, 0, sizeof(waiter_t))
        fp_cond_init(&waiter.wake)
        waiter.need = footprint(acc, record)
        until = fp_now_us() + patience_us
        with nogil:
            pthread_mutex_lock(&acc.lock)
            if acc.last_waiter != NULL:
                acc.last_waiter.next = &waiter
            else:
                acc.waiters = &waiter
            acc.last_waiter = &waiter
            pthread_cond_signal(&acc.work)  # memory is short: nothing lingers now
            pthread_mutex_unlock(&acc.lock)
        try:
            while True:
                if self.partitioner is not None and record.partition < 0:
                    record.partition = ask_partitioner(self, topic, record)
                status = APPEND_NO_ROOM
                with nogil:
                    pthread_mutex_lock(&acc.lock)
                    now = fp_now_us()
                    if acc.waiters == &waiter and pool_has_room(acc, waiter.need):
                        status = append(acc, topic, record, &chosen)
                    # Callbacks hold memory until they have run. If nobody else runs them, waiting is in vain.
                    alone = acc.callbacks_due > 0 and acc.live_chunks == 0 and (
                        self.client.poller == 0 or self.client.poller == PyThread_get_thread_ident()
                    )
                    if status == APPEND_NO_ROOM and now < until and not alone and not self.closed:
                        fp_cond_wait_until(&waiter.wake, &acc.lock, min(until, now + SLICE_US))
                    pthread_mutex_unlock(&acc.lock)
                if status == APPEND_OK and record.callback != NULL:
                    Py_INCREF(<object>record.callback)
                if status == APPEND_NO_CHOICE and not self.closed:
                    continue  # metadata came meanwhile: the partitioner can be asked now
                if status != APPEND_NO_ROOM or now >= until or alone or self.closed:
                    break
                PyErr_CheckSignals()
        finally:
            pthread_mutex_lock(&acc.lock)
            leave_queue(acc, &waiter)
            pthread_mutex_unlock(&acc.lock)
            pthread_cond_destroy(&waiter.wake)
    if status == APPEND_OK:
        return 0
    if self.closed:
        raise RuntimeError("Producer has been closed")
    if status == APPEND_NO_ROOM and alone:
        raise BufferFullError(
            f"Local: Queue full: buffer.memory = {acc.limit} bytes is used up and {acc.callbacks_due} delivery "
            "callbacks wait for poll(); call poll() and produce again"
        )
    if status == APPEND_NO_ROOM:
        raise BufferFullError(
            f"Local: Queue full: no room in buffer.memory = {acc.limit} bytes within "
            f"max.block.ms = {self.max_block_us // 1000}; "
            f"{self.trouble() or 'the brokers take records more slowly than they are produced'}"
        )
    if status == APPEND_TOO_LARGE:
        raise RecordError(
            KafkaError(
                ERR_MSG_SIZE_TOO_LARGE,
                f"the record needs {footprint(acc, record)} bytes of buffer.memory = {acc.limit}",
            )
        )
    if status == APPEND_UNKNOWN_PARTITION:
        raise RecordError(
            KafkaError(
                ERR__UNKNOWN_PARTITION,
                f"topic {<object>topic.label!r} has partitions 0 to {topic.partitions - 1}, "
                f"not {record.partition}",
            )
        )
    raise MemoryError()


cdef int32_t ask_partitioner(Runtime self, topic_t* topic, record_t* record) except -2:
    """The user's partitioner; -1 while the partitions are not known."""
    cdef int32_t count = 0, n = 0
    cdef int32_t* copy = NULL
    pthread_mutex_lock(&self.client.acc.lock)
    if topic.undecided.head == NULL and not topic.routing:
        count = topic.partitions
        n = topic.available_count
        copy = <int32_t*>malloc(max(n, 1) * sizeof(int32_t))
        if copy != NULL and n:
            memcpy(copy, topic.available, n * sizeof(int32_t))
    pthread_mutex_unlock(&self.client.acc.lock)
    if count == 0:
        free(copy)
        return -1
    if copy == NULL:
        raise MemoryError()
    available = [copy[i] for i in range(n)]
    free(copy)
    return choose_by_python(self, 
        <object>topic.label,
        None if record.key_size < 0 else record.key[:record.key_size],
        None if record.size < 0 else record.value[:record.size],
        count,
        available,
    )


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
