# Bulk calls: columns appended without the GIL, and the buffers that are let go when librdkafka is done.

cdef int submit(
    Runtime self, Receipt receipt, Column values, Column keys, Column topics, partitions, timestamps, headers, bint zero_copy
) except -1:
    """Runtime.submit"""
    cdef int64_t n = values.c.length, i = 0, taken
    cdef const int32_t[::1] chosen = partitions
    cdef const int64_t[::1] times = timestamps
    cdef const int32_t* wanted = NULL
    cdef const int64_t* stamps = NULL
    cdef topic_t* topic = NULL
    cdef Block block
    if n == 0:
        return 0
    self.check()
    if receipt.topic is None and topics is None:
        raise TypeError("topic must be a name, not None")
    if receipt.next_index + n > 0xffffffff:
        raise ValueError("a receipt covers at most 2**32 records")
    if partitions is not None:
        wanted = &chosen[0]
    if timestamps is not None:
        stamps = &times[0]
    if receipt.topic is not None:
        topic = self.topic_of(receipt.topic)
    block = Block.__new__(Block)
    receipt.lock()
    receipt.c.refs += 1
    receipt.unlock()
    block.receipt = receipt
    block.c.receipt = receipt.c
    block.c.fleeting = not zero_copy
    block.first = receipt.next_index
    block.count = n
    block.values = values
    block.keys = keys
    block.topics = topics
    block.partitions = partitions
    block.timestamps = timestamps
    block.headers = headers
    block.busy = True
    receipt.next_index += n
    receipt.total += n
    receipt.blocks[block.first] = block
    self.blocks.append(block)
    try:
        if self.partitioner is None and (headers is None or isinstance(headers, HeaderColumn)):
            while i < n:
                i = submit_fast(self, receipt, block, topic, wanted, stamps, zero_copy, i)
                if i < n:
                    submit_one(self, receipt, block, topic, wanted, stamps, zero_copy, i)
                    i += 1
        else:
            while i < n and not receipt.full:
                submit_one(self, receipt, block, topic, wanted, stamps, zero_copy, i)
                i += 1
                if i & 0x3fff == 0:
                    PyErr_CheckSignals()
            if i < n:
                reject_rest(self, receipt, block, topic, i)
    except BaseException:
        receipt.lock()
        taken = block.c.taken
        receipt.unlock()
        receipt.total -= n - taken - block.rejections()  # the rest was not given: it will have no outcome
        raise
    finally:
        block.busy = False
    sweep(self, False)
    return 0


cdef int64_t submit_fast(
    Runtime self, Receipt receipt, Block block, topic_t* topic, const int32_t* wanted, const int64_t* stamps,
    bint zero_copy, int64_t start,
) except -1:
    """Appends without the GIL, waiting for room, until a record needs a closer look; returns its index.

    Where none comes within max.block.ms the rest of the call is rejected: it would only be more of the same.
    """
    cdef accumulator_t* acc = &self.client.acc
    cdef record_t record
    cdef waiter_t waiter
    cdef Column values = block.values, keys = block.keys, topics = block.topics
    cdef int64_t i = start, stop, first = block.first, n = block.count, bytes, until = 0
    cdef int64_t most = self.max_record_bytes
    cdef int64_t below = min(most - 128, ZERO_COPY_BYTES if zero_copy else most)
    cdef const char* name
    cdef int64_t name_size
    cdef int32_t chosen
    cdef int kind, status = APPEND_OK
    cdef HeaderColumn headers = block.headers
    cdef bint runs = (
        acc.policy == POLICY_UNIFORM and not acc.hash_null and wanted == NULL and stamps == NULL
        and keys.c.kind == COLUMN_EMPTY and headers is None and topics is None
    )
    if receipt.full:
        reject_rest(self, receipt, block, topic, start)
        return n
    memset(&record, 0, sizeof(record_t))
    record.block = block.c
    memset(&waiter, 0, sizeof(waiter_t))
    fp_cond_init(&waiter.wake)
    try:
        while i < n:
            with nogil:
                bytes = 0
                stop = min(n, i + BULK_STEP)
                pthread_mutex_lock(&acc.lock)
                if status == APPEND_NO_ROOM:
                    waiter.level = topic.level
                    if wait_for_room(self, &waiter, footprint(&record), until):
                        use_grant(acc, &waiter)
                        status = APPEND_OK
                while i < stop and status == APPEND_OK and bytes < BULK_STEP_BYTES:
                    status = APPEND_LOOK
                    kind = column_get(&values.c, i, &record.value, &record.size)
                    if kind == CELL_BAD:
                        break
                    if kind == CELL_NULL:
                        record.size = -1
                    kind = column_get(&keys.c, i, &record.key, &record.key_size)
                    if kind == CELL_BAD:
                        break
                    if kind == CELL_NULL:
                        record.key_size = -1
                    if topics is not None:
                        if column_get(&topics.c, i, &name, &name_size) != CELL_VALUE:
                            break
                        if topic == NULL or topic.name_size != <size_t>name_size or memcmp(topic.name, name, name_size):
                            topic = topic_find(acc, name, name_size)
                            if topic == NULL:
                                break
                    record.by_reference = zero_copy and record.size >= ZERO_COPY_BYTES
                    record.partition = -1 if wanted == NULL else wanted[i]
                    if stamps != NULL:
                        record.timestamp = stamps[i]
                    record.index = <uint32_t>(first + i)
                    if headers is not None:
                        record.headers_size = headers.pack(i, most)
                        if record.headers_size < 0:
                            break
                        record.headers = headers.packed if record.headers_size else NULL
                    if (
                        not -1 <= record.partition < MAX_PARTITIONS
                        or record.timestamp < 0
                        or record.size + record.key_size + record.headers_size + 128 > most
                    ):
                        break
                    status = append(acc, topic, &record, &chosen)
                    if status != APPEND_OK:
                        break
                    until = 0
                    i += 1
                    if not record.by_reference:
                        bytes += max(record.size, 0)
                    if runs:
                        i += append_run(acc, topic, block.c, &values.c, i, stop, first, below)
                if acc.favoured:
                    acc.favoured = False
                    wake_waiters(acc)
                pthread_mutex_unlock(&acc.lock)
            PyErr_CheckSignals()
            if status == APPEND_CLOSED or status == APPEND_NO_TRANSACTION:
                refuse(self, topic, &record, status)
            if status == APPEND_NO_ROOM and footprint(&record) <= acc.limit:
                if until == 0:
                    until = fp_now_us() + self.max_block_us
                if fp_now_us() < until and not is_alone(self):
                    continue
                reject_rest(self, receipt, block, topic, i)
                return n
            if status != APPEND_OK:
                break
    finally:
        pthread_mutex_lock(&acc.lock)
        leave_queue(acc, &waiter)
        pthread_mutex_unlock(&acc.lock)
        pthread_cond_destroy(&waiter.wake)
    return i


cdef int reject_rest(Runtime self, Receipt receipt, Block block, topic_t* topic, int64_t start) except -1:
    """There is no room for the records from `start` on. Noted as one: a buffer that is full may mean millions."""
    if block.full_from < 0:
        if block.topics is None:
            end_topic(self, topic)
        elif self.client.acc.strict:
            end_topics(self, block.topics, start)
        block.full_from = start
        block.full_error = full(self)
        receipt.full = True
        receipt.rejected += block.count - start
        if self.transactional:
            self.count_failures(ERR__QUEUE_FULL, block.count - start)
    return 0


cdef void end_topic(Runtime self, topic_t* topic) noexcept:
    """A strict producer has rejected a record and raised nothing: no later one may be written."""
    if self.client.acc.strict and topic != NULL:
        pthread_mutex_lock(&self.client.acc.lock)
        break_off(topic.undecided, True)
        pthread_mutex_unlock(&self.client.acc.lock)


cdef int end_topics(Runtime self, Column topics, int64_t start) except -1:
    """The same for all topics that a column names from `start` on."""
    cdef topic_t* topic = NULL
    cdef const char* name
    cdef int64_t name_size, i
    for i in range(start, topics.c.length):
        if column_get(&topics.c, i, &name, &name_size) != CELL_VALUE or (
            topic != NULL and topic.name_size == <size_t>name_size and memcmp(topic.name, name, name_size) == 0
        ):
            continue
        try:
            topic = self.topic_of(sys.intern(name[:name_size].decode()))
        except (ValueError, KafkaException):  # no name of a topic: nothing can be written to it
            continue
        end_topic(self, topic)
    return 0


cdef int submit_one(
    Runtime self, Receipt receipt, Block block, topic_t* topic, const int32_t* wanted, const int64_t* stamps, bint zero_copy,
    int64_t i,
) except -1:
    """One record with everything checked and waited for. What is wrong with it goes into the receipt."""
    cdef record_t record
    cdef Column values = block.values, keys = block.keys, topics = block.topics
    cdef int64_t index = block.first + i
    cdef const char* name
    cdef int64_t name_size
    cdef int kind
    cdef bint asking = False
    cdef bytes packed
    memset(&record, 0, sizeof(record_t))
    record.block = block.c
    record.index = <uint32_t>index
    try:
        kind = column_get(&values.c, i, &record.value, &record.size)
        if kind == CELL_BAD:
            raise _bad_cell(values, i, "value")
        if kind == CELL_NULL:
            record.size = -1
        kind = column_get(&keys.c, i, &record.key, &record.key_size)
        if kind == CELL_BAD:
            raise _bad_cell(keys, i, "key")
        if kind == CELL_NULL:
            record.key_size = -1
        if topics is not None:
            kind = column_get(&topics.c, i, &name, &name_size)
            if kind == CELL_BAD:
                raise _bad_cell(topics, i, "topic")
            if kind == CELL_NULL:
                raise ValueError("topic must not be null")
            topic = self.topic_of(sys.intern(name[:name_size].decode()))
        record.by_reference = zero_copy and record.size >= ZERO_COPY_BYTES
        record.partition = -1 if wanted == NULL else wanted[i]
        if not -1 <= record.partition < MAX_PARTITIONS:
            raise RecordError(
                KafkaError(
                    ERR__UNKNOWN_PARTITION,
                    f"partition must be from -1 to {MAX_PARTITIONS - 1}, not {record.partition}",
                )
            )
        if stamps != NULL:
            record.timestamp = stamps[i]
            if record.timestamp < 0:
                raise ValueError(f"timestamp must be milliseconds since 1970, not {record.timestamp}")
        if isinstance(block.headers, HeaderColumn):
            record.headers_size = _pack(block.headers, i, self.max_record_bytes)
            record.headers = (<HeaderColumn>block.headers).packed if record.headers_size else NULL
        elif block.headers is not None and block.headers[i] is not None:
            packed = pack_headers(block.headers[i])
            if headers_head(PyBytes_AS_STRING(packed)).count:
                record.headers = PyBytes_AS_STRING(packed)
                record.headers_size = PyBytes_GET_SIZE(packed)
        check_size(self, &record)
        admit(self, topic, &record, &asking)
    except Exception as error:
        if not asking:  # else the partitioner has raised, whatever that is: the record fails, and no other
            if isinstance(error, BufferFullError):
                reject_rest(self, receipt, block, topic, i)
                return 0
            if not isinstance(error, (TypeError, ValueError, KafkaException)) or _code_of(error) == ERR__STATE:
                raise
        block.rejected[index] = error.with_traceback(None), block.now(receipt.topic, index)
        receipt.rejected += 1
        end_topic(self, topic)
        if self.transactional:  # nothing is raised: the commit must know
            self.count_failures(_code_of(error), 1)
    return 0


cdef int32_t _code_of(error) except? 0:
    """librdkafka's code for what is wrong with a record."""
    if isinstance(error, KafkaException) and error.args and isinstance(error.args[0], KafkaError):
        return error.args[0].code()
    return ERR__INVALID_ARG


cdef sweep(Runtime self, bint thoroughly):
    """Lets go of buffers that librdkafka has done with.

    They are done with roughly in order, so most of the time a look at the oldest is enough; a look at all of them
    at every call would make many small calls slow. In between, no object is made that the garbage collector knows:
    that could let other threads come here.
    """
    cdef Block block
    cdef Py_ssize_t i, idle = 0
    cdef list gone = []
    if thoroughly or fp_now_us() - self.swept_us > SWEEP_US:
        self.swept_us = fp_now_us()
        gone = sort_out(self)
    elif self.blocks:
        pthread_mutex_lock(&self.client.acc.lock)
        while idle < len(self.blocks) and (<Block>self.blocks[idle]).idle():
            idle += 1
        pthread_mutex_unlock(&self.client.acc.lock)
        for i in range(idle):
            gone.append(self.blocks[i])
        PyList_SetSlice(self.blocks, 0, idle, NULL)
    try:
        while gone:
            block = gone.pop()
            block.receipt.let_go(block)
    finally:
        PyList_SetSlice(self.blocks, 0, 0, <PyObject*>gone)


cdef list sort_out(Runtime self):
    """Takes out all blocks that librdkafka has done with, wherever they are."""
    cdef Py_ssize_t i
    cdef list flags, gone, kept, fresh = []
    kept, self.blocks = self.blocks, fresh  # for as long as this takes
    try:
        flags = [False] * len(kept)
        pthread_mutex_lock(&self.client.acc.lock)
        for i in range(len(kept)):
            flags[i] = (<Block>kept[i]).idle()
        pthread_mutex_unlock(&self.client.acc.lock)
        gone = [block for block, done in zip(kept, flags) if done]
        kept = [block for block, done in zip(kept, flags) if not done]
    finally:
        PyList_SetSlice(self.blocks, 0, 0, <PyObject*>kept)
    return gone


cdef int64_t _pack(HeaderColumn headers, int64_t index, int64_t most) except -1:
    cdef int64_t size = headers.pack(index, most)
    if size >= 0:
        return size
    if size == HEADERS_NO_MEMORY:
        raise MemoryError()
    if size == HEADERS_NO_NAME:
        raise TypeError("a header's name must be str, not NoneType")
    raise ValueError("the headers of a record must take less than 2 GiB")


cdef object _bad_cell(Column column, int64_t i, str what):
    error = (column.bad or {}).get(i)
    return error if error is not None else ValueError(f"{what} is larger than 2 GiB")
