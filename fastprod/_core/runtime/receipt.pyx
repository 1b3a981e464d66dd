# Receipts of bulk calls, and the blocks that keep their buffers alive.

cdef class Block:
    """Records of a bulk call that share source buffers; keeps those alive while librdkafka may read them."""

    cdef block_t* c
    cdef Receipt receipt
    cdef bint busy              # its records are being handed in
    cdef int64_t first          # index of its first record in the receipt
    cdef int64_t count
    cdef dict rejected          # index -> (exception, Record unless it can be made later): never accepted
    cdef int64_t full_from      # nor was any from here on, for want of room; -1 = none
    cdef object full_error
    cdef Column values
    cdef Column keys
    cdef Column topics
    cdef object partitions
    cdef object timestamps
    cdef object headers

    def __cinit__(self):
        self.c = <block_t*>calloc(1, sizeof(block_t))
        if self.c == NULL:
            raise MemoryError()
        self.c.refs = 1
        self.rejected = {}
        self.full_from = -1

    def __dealloc__(self):
        # The Runtime keeps a Block until no chunk refers to it, so this is the last reference.
        block_release(self.c)

    cdef bint idle(self) noexcept:
        """Whether librdkafka holds nothing of it any more; the lock is held."""
        return self.c.refs == 1 and not self.busy

    cdef int64_t rejections(self):
        """How many were never accepted."""
        return len(self.rejected) + (self.count - self.full_from if self.full_from >= 0 else 0)

    cdef record(self, topic, int64_t index):
        """A record that was never accepted, by its position in the receipt, as its columns show it now."""
        at = index - self.first
        return Record(
            topic if self.topics is None else _cell(self.topics, at, True),
            _cell(self.keys, at, False),
            _cell(self.values, at, False),
            self.partition(at, -1),
            None if self.headers is None else self.headers[at],
            None if self.timestamps is None else int(self.timestamps[at]),
        )

    cdef now(self, topic, int64_t index):
        """The same, if the columns may show something else later; else None."""
        if self.c.fleeting or not (self.topics is None or self.topics.immutable):
            return self.record(topic, index)
        return None

    cdef failed(self, const failure_t* failure):
        """A record that was accepted."""
        at = failure.index - self.first
        return Record(
            <object>failure.topic.label,
            _cell(self.keys, at, False) if failure.copy == NULL
            else _bytes(failure.copy + max(failure.size, 0), failure.key_size),
            _cell(self.values, at, False) if failure.copy == NULL else _bytes(failure.copy, failure.size),
            self.partition(at, failure.partition),
            None if self.headers is None else self.headers[at],
            None if self.timestamps is None else int(self.timestamps[at]),
        )

    cdef partition(self, int64_t at, int32_t final):
        """Where a record went to, or should have gone to."""
        if final >= 0:
            return final
        return None if self.partitions is None or self.partitions[at] < 0 else int(self.partitions[at])


cdef class Receipt:
    """What became of the records of one bulk call, or of several that were given the same receipt.

    `wait()` blocks until every record has its outcome; until then the counts grow. Records that failed are in
    `errors`, with their position in the call; where calls share a receipt, it goes on from one to the next.
    """

    cdef receipt_t* c
    cdef Runtime runtime        # keeps the lock alive
    cdef dict blocks            # first index -> Block: those librdkafka may still read
    cdef dict kept              # index -> (error or its code, Record) of failed records whose block is gone
    cdef object topic           # the call's topic, None = a topic per record
    cdef bint full              # the buffer was full for max.block.ms: the rest of the call does not wait again
    cdef int64_t next_index
    cdef int64_t rejected       # records that were never accepted
    cdef readonly object total  # records given

    def __cinit__(self, Runtime runtime=None):
        if runtime is None:
            raise TypeError("receipts are made by produce_many() and produce_arrow()")
        self.runtime = runtime
        self.c = <receipt_t*>calloc(1, sizeof(receipt_t))
        if self.c == NULL:
            raise MemoryError()
        self.c.refs = 1
        self.blocks = {}
        self.kept = {}
        self.total = 0

    def __dealloc__(self):
        if self.c != NULL:
            receipt_release(self.c)

    @property
    def accepted(self):
        """Records that went into the accumulator."""
        return self.c.accepted

    @property
    def bytes(self):
        """Bytes of the keys and values of the accepted records."""
        return self.c.bytes

    @property
    def acknowledged(self):
        """Records the broker has confirmed."""
        self.lock()
        n = self.c.acknowledged
        self.unlock()
        return n

    @property
    def failed(self):
        """Records that were refused or could not be delivered."""
        self.lock()
        n = self.c.failed
        self.unlock()
        return n + self.rejected

    @property
    def done(self):
        """Whether every record has its outcome."""
        return self.acknowledged + self.failed == self.total

    cdef int lock(self) except -1:
        # Between lock and unlock no Python object may be made: that could run other Python code, which could need
        # the lock.
        self.runtime.check_fork()
        pthread_mutex_lock(&self.runtime.client.acc.lock)
        return 0

    cdef void unlock(self) noexcept:
        pthread_mutex_unlock(&self.runtime.client.acc.lock)

    def wait(self, timeout=None):
        """Waits for the outcome of every record; False when `timeout` seconds were not enough.

        Sends what still lingers, and runs no callbacks.
        """
        cdef int64_t until = _until(-1 if timeout is None else timeout)
        cdef int64_t seen
        self.runtime.check_fork()
        hurry(self.runtime)
        while True:
            seen = fp_load64(&self.runtime.client.acc.news)
            place_undecided(self.runtime)
            if self.done:
                break
            self.runtime.check_access()
            if fp_now_us() >= until or self.runtime.closed:
                return self.done
            wait_for_news(self.runtime, until, seen)
        sweep(self.runtime, True)
        return True

    @property
    def errors(self):
        """List of FailedRecord(index, error, record), by index.

        Records are as they were given, whatever has become of the memory they came from. Two things are not copied, and
        looked up where the caller has them: what found no room in the buffer (that may be millions), and headers.
        """
        found = {}
        for block in list(self.blocks.values()):
            self.add_failed(block, found)
        found.update(self.kept)
        return [
            FailedRecord(index, self.runtime.outcome_error(error) if isinstance(error, int) else error, record)
            for index, (error, record) in sorted(found.items(), key=operator.itemgetter(0))
        ]

    cdef add_failed(self, Block block, dict found):
        """Adds the records of a block that have failed so far: index -> (error or its code, Record)."""
        cdef failure_t* copy = NULL
        cdef int64_t n, i
        self.lock()
        n = block.c.failure_count
        if n:
            copy = <failure_t*>malloc(n * sizeof(failure_t))
            if copy != NULL:
                memcpy(copy, block.c.failures, n * sizeof(failure_t))
        self.unlock()
        if n and copy == NULL:
            raise MemoryError()
        try:
            for i in range(n):
                found[copy[i].index] = (copy[i].error, block.failed(&copy[i]))  # what it owns stays with the block
        finally:
            free(copy)
        for index, (error, record) in list(block.rejected.items()):
            found[index] = (error, block.record(self.topic, index) if record is None else record)
        if block.full_from >= 0:
            for i in range(block.first + block.full_from, block.first + block.count):
                found[i] = (block.full_error, block.record(self.topic, i))

    @property
    def offsets(self):
        """{partition: (first, last)} of the acknowledged records; {(topic, partition): ...} for a topic column."""
        return {
            (key[1] if self.topic is not None else key): (extent.first, extent.last)
            for key, extent in self.extents.items()
        }

    @property
    def extents(self):
        """{(topic, partition): Extent(records, first, last)}; offsets are None where the broker told none."""
        cdef extent_t* copy
        cdef int32_t n
        self.lock()
        n = self.c.extent_capacity
        copy = <extent_t*>malloc(max(n, 1) * sizeof(extent_t))
        if copy != NULL and n:
            memcpy(copy, self.c.extents, n * sizeof(extent_t))
        self.unlock()
        if copy == NULL:
            raise MemoryError()
        try:
            found = {
                (<object>copy[i].topic.label, copy[i].partition): Extent(
                    copy[i].records,
                    None if copy[i].first < 0 else copy[i].first,
                    None if copy[i].last < 0 else copy[i].last,
                    copy[i].unknown,
                )
                for i in range(n)
                if copy[i].topic != NULL
            }
        finally:
            free(copy)
        return dict(sorted(found.items()))

    cdef let_go(self, Block block):
        """Forgets a block that librdkafka has done with; only records that failed are copied out of it.

        Not where the buffer was full: that may be millions, and the block has them.
        """
        if block.full_from >= 0:
            return
        try:
            self.add_failed(block, self.kept)
        finally:
            self.blocks.pop(block.first, None)

    def __repr__(self):
        return (
            f"<Receipt {self.total} records: {self.accepted} accepted, {self.acknowledged} acknowledged, "
            f"{self.failed} failed>"
        )


cdef _bytes(const char* data, int32_t size):
    return None if size < 0 else data[:size]


cdef _cell(Column column, index, bint text):
    cdef const char* data
    cdef int64_t size
    if column is None:
        return None
    kind = column_get(&column.c, index, &data, &size)
    if kind == CELL_BAD:
        return None
    if kind == CELL_NULL:
        return None
    return data[:size].decode(errors="replace") if text else data[:size]
