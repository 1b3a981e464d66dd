"""What Python calls: one Runtime per producer, Receipts of bulk calls, the methods of fastprod.Producer.

    produce()          copies the record into its lane (_accumulator)
    poll(), flush()    run callbacks; while they wait they also take delivery reports (_client)

Lock order: the GIL, then `accumulator_t.lock`, then a lane's leaf lock. No Python object is made under
`accumulator_t.lock`: that can run a garbage collection, hence other code.
"""

import operator
import sys

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from fastprod.errors import AuthenticationError, BufferFullError, ForkError, RecordError
from fastprod.receipt import Extent, FailedRecord, Record

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strdup

from fastprod._core._accumulator cimport (
    APPEND_NO_CHOICE,
    APPEND_NO_ROOM,
    APPEND_OK,
    APPEND_TOO_LARGE,
    APPEND_UNKNOWN_PARTITION,
    POLICY_LIBRDKAFKA,
    POLICY_PARTIAL,
    POLICY_PYTHON,
    POLICY_ROUND_ROBIN,
    POLICY_STICKY,
    POLICY_UNIFORM,
    accumulator_free,
    accumulator_init,
    accumulator_t,
    append,
    append_run,
    block_release,
    block_t,
    chunk_release,
    chunk_t,
    error_of,
    extent_t,
    fail_waiting,
    failure_t,
    flusher_t,
    footprint,
    headers_head,
    lane_t,
    lanes_t,
    leave_queue,
    pool_has_room,
    queued_bytes,
    queued_records,
    receipt_release,
    receipt_t,
    record_t,
    rich_at,
    rich_t,
    route_undecided,
    seal_all,
    slot_at,
    slot_t,
    topic_new,
    topic_t,
    waiter_t,
    weight_of,
)
from fastprod._core._balance cimport (
    record_upper_bound,
)
from fastprod._core._client cimport (
    SCRATCH_MESSAGES,
    add_handle,
    broker_t,
    client_t,
    count_repeated,
    drain,
    drain_as_guest,
    drop_event,
    event_t,
    forks,
    free_brokers,
    handles_t,
    is_routing,
    on_queue,
    publish_completed,
    register_client,
    set_newborn,
    start_threads,
)
from fastprod._core._columns cimport (
    CELL_BAD,
    CELL_NULL,
    COLUMN_EMPTY,
    Column,
    column_get,
)
from fastprod._core._histogram cimport BUCKETS, bucket_middle_us, histogram_t
from fastprod._core._message cimport (
    HEADERS_NO_MEMORY,
    HEADERS_NO_NAME,
    HeaderColumn,
    Message,
    pack_headers,
)
from fastprod._core._platform cimport (
    fp_add64,
    fp_cond_init,
    fp_cond_wait_until,
    fp_load64,
    fp_load_ptr,
    fp_now_us,
    fp_spin_lock,
    fp_spin_unlock,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_equal,
    pthread_join,
    pthread_mutex_lock,
    pthread_mutex_unlock,
    pthread_self,
)
from fastprod._core._rdkafka cimport *
from fastprod._core._rdkafka cimport api as rdkafka

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object, Py_ssize_t*) except NULL
    unsigned long PyThread_get_thread_ident() nogil
    int PyList_SetSlice(object, Py_ssize_t, Py_ssize_t, PyObject*) except -1

cdef enum:
    SLICE_US = 100000           # how long a call may block before it looks for Ctrl-C
    ZERO_COPY_BYTES = 512       # smaller values are as cheap to copy as to pin; at 400 bytes pinning gains 10 to 20 %
    MAX_PARTITIONS = 0x7fff0000 # larger numbers mean other things in slot_t.state
    BULK_STEP = 1024            # records appended under one hold of the lock
    SWEEP_US = 100000           # how long buffers may be kept that are done with, though older ones are not
    # What librdkafka allocates per message, besides the key: rd_kafka_msg_t and malloc's share.
    MESSAGE_OVERHEAD = 272


cdef class Block:
    """Records of a bulk call that share source buffers; keeps those alive while librdkafka may read them."""

    cdef block_t* c
    cdef Receipt receipt
    cdef bint busy              # its records are being handed in
    cdef int64_t first          # index of its first record in the receipt
    cdef int64_t count
    cdef dict rejected          # index -> exception: never accepted
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

    def __dealloc__(self):
        # The Runtime keeps a Block until no chunk refers to it, so this is the last reference.
        block_release(self.c)

    cdef bint idle(self) noexcept:
        """Whether librdkafka holds nothing of it any more; the lock is held."""
        return self.c.refs == 1 and not self.busy

    cdef record(self, topic, int64_t index, partition):
        """The record at a position of the receipt."""
        at = index - self.first
        if partition is None or partition < 0:
            partition = None if self.partitions is None or self.partitions[at] < 0 else int(self.partitions[at])
        return Record(
            topic if self.topics is None else _cell(self.topics, at, True),
            _cell(self.keys, at, False),
            _cell(self.values, at, False),
            partition,
            None if self.headers is None else self.headers[at],
            None if self.timestamps is None else int(self.timestamps[at]),
        )


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

    def __cinit__(self):
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

    cdef inline void took(self, const record_t* record) noexcept nogil:
        """One record more; the lock is held."""
        record.block.taken += 1
        self.c.accepted += 1
        self.c.bytes += max(record.size, 0) + max(record.key_size, 0)

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
        cdef uint64_t seen
        self.runtime.check_fork()
        self.runtime.hurry()
        while True:
            seen = self.runtime.client.acc.news
            if self.done:
                break
            self.runtime.check_access()
            if fp_now_us() >= until or self.runtime.closed:
                return self.done
            self.runtime.wait_for_news(until, seen)
        self.runtime.sweep(True)
        return True

    @property
    def errors(self):
        """List of FailedRecord(index, error, record), by index."""
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
                found[copy[i].index] = (copy[i].error, block.record(self.topic, copy[i].index, copy[i].partition))
        finally:
            free(copy)
        for index, error in list(block.rejected.items()):
            found[index] = (error, block.record(self.topic, index, None))

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
        n = self.c.extent_count
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
                )
                for i in range(n)
            }
        finally:
            free(copy)
        return dict(sorted(found.items()))

    cdef let_go(self, Block block):
        """Forgets a block that librdkafka has done with; only records that failed are copied out of it."""
        try:
            self.add_failed(block, self.kept)
        finally:
            self.blocks.pop(block.first, None)

    def __repr__(self):
        return (
            f"<Receipt {self.total} records: {self.accepted} accepted, {self.acknowledged} acknowledged, "
            f"{self.failed} failed>"
        )


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


cdef int64_t _pack(HeaderColumn headers, int64_t index, int64_t most) except -1:
    cdef int64_t size = headers.pack(index, most)
    if size >= 0:
        return size
    if size == HEADERS_NO_MEMORY:
        raise MemoryError()
    if size == HEADERS_NO_NAME:
        raise TypeError("a header's name must be str, not NoneType")
    raise ValueError("the headers of a record must take less than 2 GiB")


cdef int64_t _until(double timeout) noexcept:
    """The monotonic time `timeout` seconds from now; negative and absurd ones mean for ever."""
    return fp_now_us() + <int64_t>(timeout * 1e6) if 0 <= timeout < 1e9 else INT64_MAX


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


cdef class Runtime:
    """One producer: accumulator, threads and callbacks around one confluent_kafka.Producer.

    Owns the client_t. `attach` ties it to the librdkafka client that confluent-kafka makes, `shutdown` unties it.
    """

    cdef client_t* client
    cdef dict topics            # name -> address of its topic_t; keeps the names alive
    cdef object last_name       # the topic of the last call, to save the look-up
    cdef topic_t* last_topic
    cdef list blocks            # of bulk calls, oldest first: those librdkafka may still read
    cdef int64_t swept_us       # when all of them were looked at
    cdef object partitioner     # a Python partitioner, or None
    cdef object on_delivery
    cdef object error_cb
    cdef object stats_cb
    cdef object throttle_cb
    cdef object logger
    cdef bint only_errors
    cdef bint counting          # a thread is inside count_repeated
    cdef int64_t told_us        # the trouble that was last raised, by its time
    cdef int64_t max_block_us
    cdef int64_t max_record_bytes
    cdef bint transactional
    cdef readonly bint in_transaction
    cdef int generation         # of forks; another number means we are in a child
    cdef object pid
    cdef readonly bint closed
    cdef bint gone              # librdkafka's client has been destroyed
    cdef object __weakref__

    def __cinit__(self, settings):
        cdef accumulator_t* acc
        self.client = <client_t*>calloc(1, sizeof(client_t))
        if self.client == NULL:
            raise MemoryError()
        acc = &self.client.acc
        acc.policy = {
            "uniform": POLICY_UNIFORM,
            "sticky": POLICY_STICKY,
            "round_robin": POLICY_ROUND_ROBIN,
            "librdkafka": POLICY_LIBRDKAFKA,
            "python": POLICY_PYTHON,
            "partial": POLICY_PARTIAL,
        }[settings.policy]
        acc.partial_limit = settings.partial_limit
        acc.partial_seed = settings.partial_seed
        acc.adaptive = settings.adaptive
        acc.ignore_keys = settings.ignore_keys
        acc.linger_us = <int64_t>(settings.linger_ms * 1000)
        acc.sticky_bytes = settings.sticky_bytes
        acc.availability_us = <int64_t>(settings.availability_timeout_ms * 1000)
        acc.timeout_us = <int64_t>(settings.delivery_timeout_ms * 1000)
        acc.limit = settings.buffer_memory
        acc.record_overhead = MESSAGE_OVERHEAD
        acc.random.state = settings.seed
        accumulator_init(acc)
        fp_cond_init(&self.client.scout_wake)
        self.client.refresh_us = <int64_t>(settings.metadata_refresh_ms * 1000)
        self.client.propagation_us = <int64_t>(settings.metadata_propagation_ms * 1000)
        if acc.policy == POLICY_PYTHON:
            self.client.route = _route_by_python
        self.client.runtime = <void*>self
        self.partitioner = settings.partitioner
        self.on_delivery = settings.on_delivery
        self.error_cb = settings.error_cb
        self.stats_cb = settings.stats_cb
        self.throttle_cb = settings.throttle_cb
        self.logger = settings.logger
        self.only_errors = settings.only_errors
        self.max_block_us = <int64_t>(settings.max_block_ms * 1000)
        self.max_record_bytes = settings.max_record_bytes
        self.transactional = settings.transactional
        self.client.transactional = settings.transactional
        self.client.no_offsets = settings.no_offsets
        self.client.statistics_wanted = settings.statistics_wanted
        self.topics = {}
        self.last_name = object()  # no topic yet
        self.blocks = []
        self.generation = forks()
        self.pid = settings.pid
        self.gone = True

    def __dealloc__(self):
        cdef handles_t* table
        cdef handles_t* older
        if self.client == NULL or not self.gone:
            return  # librdkafka may still call us (a forked child, an interpreter going down): let it be
        self.drop_callbacks()
        while self.client.events != NULL:
            event = self.client.events
            self.client.events = event.next
            free(event.broker)  # its rd_kafka_event_t went with the client
            free(event)
        table = self.client.handles
        while table != NULL:
            older = table.previous
            free(table.keys)
            free(table.topics)
            free(table)
            table = older
        accumulator_free(&self.client.acc)
        free_brokers(self.client)
        free(self.client.statistics)
        pthread_cond_destroy(&self.client.scout_wake)
        free(self.client.scratch)
        free(self.client)

    # ---- life cycle

    def attach(self, make):
        """Runs `make`, which creates the confluent-kafka client on this thread, and starts our threads."""
        set_newborn(self.client)
        try:
            make()
        except BaseException:
            self.client.rk = NULL
            raise
        finally:
            set_newborn(NULL)
        if self.client.rk == NULL:
            raise RuntimeError(
                "librdkafka did not load fastprod's hook; does this confluent-kafka support plugin.library.paths?"
            )
        self.gone = False
        self.client.scratch = <rd_kafka_message_t*>calloc(SCRATCH_MESSAGES, sizeof(rd_kafka_message_t))
        if self.client.scratch == NULL:
            raise MemoryError()
        self.client.queue = rdkafka.queue_get_main(self.client.rk)
        rdkafka.queue_cb_event_enable(self.client.queue, on_queue, self.client)
        self.client.news = True  # what came before we listened
        register_client(NULL, self.client)
        if start_threads(self.client) < 0:
            self.stop()
            raise RuntimeError("cannot start the producer's threads: the system's limit is reached")

    def stop(self):
        """Ends our threads and gives librdkafka's objects back; the client may then be destroyed.

        Returns how many records had no outcome yet; they end as purged.
        """
        cdef client_t* client = self.client
        cdef topic_t* topic
        cdef int64_t left, until
        self.closed = True
        with nogil:
            pthread_mutex_lock(&client.acc.lock)
            client.stop = True
            pthread_cond_broadcast(&client.acc.work)
            pthread_cond_broadcast(&client.acc.done)
            pthread_cond_broadcast(&client.scout_wake)
            while client.guests:
                fp_cond_wait_until(&client.acc.done, &client.acc.lock, fp_now_us() + 500)
            pthread_mutex_unlock(&client.acc.lock)
            if client.threads > 0:
                pthread_join(client.sender, NULL)
            if client.threads > 1 and not pthread_equal(client.scout, pthread_self()):
                pthread_join(client.scout, NULL)
            client.threads = 0
            rdkafka.queue_cb_event_enable(client.queue, NULL, NULL)
            drain(client)  # what was left to do when the sender stopped
            pthread_mutex_lock(&client.acc.lock)
            left = client.acc.records
            fail_waiting(&client.acc, ERR__PURGE_QUEUE, INT64_MAX)
            pthread_mutex_unlock(&client.acc.lock)
            # Also what the delivery timeout has ended here but librdkafka still has.
            rdkafka.purge(client.rk, PURGE_F_QUEUE | PURGE_F_INFLIGHT | PURGE_F_NON_BLOCKING)
            until = fp_now_us() + 2000000
            while client.acc.live_chunks and fp_now_us() < until:
                drain(client)
                pthread_mutex_lock(&client.acc.lock)
                if client.acc.live_chunks:
                    fp_cond_wait_until(&client.acc.done, &client.acc.lock, fp_now_us() + 2000)
                pthread_mutex_unlock(&client.acc.lock)
            topic = client.acc.topics
            while topic != NULL:
                rdkafka.topic_destroy(<rd_kafka_topic_t*>topic.handle)
                topic = topic.next
        while client.events != NULL:
            event = client.events
            client.events = event.next
            drop_event(event)
        client.last_event = NULL
        rdkafka.queue_destroy(client.queue)
        client.queue = NULL
        return left

    def run_callbacks(self):
        """Runs the callbacks that are left when the producer is closed."""
        self.dispatch()

    def finish(self):
        """librdkafka's client has been destroyed."""
        register_client(self.client, NULL)
        with nogil:
            publish_completed(self.client)
        self.gone = True
        self.sweep(True)
        self.blocks = []

    cdef drop_callbacks(self):
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
            _drop_lane_callbacks(topic.unassigned)
            topic = topic.next

    cdef int check_fork(self) except -1:
        if self.generation != forks():
            raise ForkError(
                f"this producer was made in process {self.pid} and cannot be used after fork(); "
                "make a new one in the child process"
            )
        return 0

    cdef int check(self) except -1:
        if self.closed:
            raise RuntimeError("Producer has been closed")
        return self.check_fork()

    def assert_usable(self):
        """Raises when the producer is closed or was made in another process."""
        self.check()

    @property
    def forked(self):
        """Whether this process is a child of the one that made the producer."""
        return self.generation != forks()

    # ---- topics

    cdef topic_t* topic_of(self, name) except NULL:
        cdef topic_t* topic
        cdef bytes encoded
        cdef void* handle
        if name is self.last_name:
            return self.last_topic
        if not isinstance(name, str):
            raise TypeError(f"topic must be str, not {type(name).__name__}")
        known = self.topics.get(name)
        if known is not None:
            topic = <topic_t*><size_t>known
        else:
            encoded = name.encode()
            if not encoded or b"\0" in encoded:
                raise RecordError(KafkaError(ERR__INVALID_ARG, f"not a topic name: {name!r}"))
            handle = rdkafka.topic_new(self.client.rk, encoded, NULL)
            if handle == NULL:
                code = rdkafka.last_error()
                raise RecordError(KafkaError(code, f"cannot use topic {name!r}: {rdkafka.err2str(code).decode()}"))
            self.topics[name] = None  # keeps the name alive; the GIL keeps others from making the topic, too
            pthread_mutex_lock(&self.client.acc.lock)
            topic = topic_new(&self.client.acc, encoded)
            if topic != NULL:
                topic.handle = handle
                topic.label = <void*>name
                if add_handle(self.client, handle, topic) < 0:
                    topic = NULL
                pthread_cond_signal(&self.client.scout_wake)
            pthread_mutex_unlock(&self.client.acc.lock)
            if topic == NULL:
                del self.topics[name]
                raise MemoryError()
            self.topics[name] = <size_t>topic
        self.last_name = name
        self.last_topic = topic
        return topic

    # ---- producing

    cdef int accept(self, topic, value, key, partition, callback, on_delivery, timestamp, headers) except -1:
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
        record.partition = partition
        if not -1 <= record.partition < MAX_PARTITIONS:
            raise RecordError(
                KafkaError(ERR__UNKNOWN_PARTITION, f"partition must be from -1 to {MAX_PARTITIONS - 1}, not {partition}")
            )
        record.timestamp = timestamp
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
            self.check_size(&record)
            if self.partitioner is not None and record.partition < 0:
                record.partition = self.ask_partitioner(target, &record)
            pthread_mutex_lock(&self.client.acc.lock)
            status = APPEND_NO_ROOM
            if self.client.acc.waiters == NULL:
                status = append(&self.client.acc, target, &record, &chosen)
                if status == APPEND_OK and record.callback != NULL:
                    Py_INCREF(callback)
            pthread_mutex_unlock(&self.client.acc.lock)
            if status != APPEND_OK:
                self.append_slowly(target, &record, status, self.max_block_us)
        finally:
            if value_held:
                PyBuffer_Release(&value_buffer)
            if key_held:
                PyBuffer_Release(&key_buffer)
        return 0

    cdef inline int check_size(self, record_t* record) except -1:
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

    cdef int append_slowly(self, topic_t* topic, record_t* record, int status, int64_t patience_us) except -1:
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
                        record.partition = self.ask_partitioner(topic, record)
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

    cdef int32_t ask_partitioner(self, topic_t* topic, record_t* record) except -2:
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
        return self.choose_by_python(
            <object>topic.label,
            None if record.key_size < 0 else record.key[:record.key_size],
            None if record.size < 0 else record.value[:record.size],
            count,
            available,
        )

    cdef int32_t choose_by_python(self, name, key, value, count, available) except -2:
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

    # ---- bulk

    def receipt(self, topic, Receipt earlier=None):
        """The Receipt for a bulk call to `topic`, or None for a topic per record: a new one, or that of an earlier."""
        cdef Receipt receipt
        self.check()
        if self.transactional and not self.in_transaction:
            raise RecordError(
                KafkaError(ERR__STATE, "a transactional producer needs begin_transaction() before producing")
            )
        if earlier is not None:
            if earlier.runtime is not self:
                raise ValueError("the receipt is another producer's")
            if earlier.topic != topic:
                raise ValueError(f"the receipt is for topic {earlier.topic!r}, not {topic!r}")
            earlier.full = False
            return earlier
        if topic is not None:
            self.topic_of(topic)
        receipt = Receipt.__new__(Receipt)
        receipt.runtime = self
        receipt.topic = topic
        return receipt

    def submit(self, Receipt receipt, Column values, Column keys, Column topics, partitions, timestamps, headers,
               bint zero_copy):
        """Appends one block of records, in order; see fastprod.Producer.produce_many.

        Columns are of one length; `partitions` (int32) and `timestamps` (int64) are numpy arrays or None, `headers`
        a list or None. A record that cannot be taken is noted in the receipt, the others go on.
        """
        cdef int64_t n = values.c.length, i = 0, taken
        cdef const int32_t[::1] chosen = partitions
        cdef const int64_t[::1] times = timestamps
        cdef const int32_t* wanted = NULL
        cdef const int64_t* stamps = NULL
        cdef topic_t* topic = NULL
        cdef Block block
        if n == 0:
            return
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
        if self.client.acc.policy == POLICY_LIBRDKAFKA:
            zero_copy = False  # acknowledgements come in no order, so the chunk must be found from the payload
        block = Block.__new__(Block)
        receipt.lock()
        receipt.c.refs += 1
        receipt.unlock()
        block.receipt = receipt
        block.c.receipt = receipt.c
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
            if topics is None and self.partitioner is None and (headers is None or isinstance(headers, HeaderColumn)):
                while i < n:
                    i = self.submit_fast(receipt, block, topic, wanted, stamps, zero_copy, i)
                    if i < n:
                        self.submit_one(receipt, block, topic, wanted, stamps, zero_copy, i)
                        i += 1
            else:
                for i in range(n):
                    self.submit_one(receipt, block, topic, wanted, stamps, zero_copy, i)
                    if i & 0x3fff == 0:
                        PyErr_CheckSignals()
        except BaseException:
            receipt.lock()
            taken = block.c.taken
            receipt.unlock()
            receipt.total -= n - taken - len(block.rejected)  # the rest was not given: it will have no outcome
            raise
        finally:
            block.busy = False
        self.sweep(False)

    cdef int64_t submit_fast(
        self, Receipt receipt, Block block, topic_t* topic, const int32_t* wanted, const int64_t* stamps, bint zero_copy,
        int64_t start,
    ) except -1:
        """Appends without the GIL until something needs a closer look; returns the index of that record."""
        cdef accumulator_t* acc = &self.client.acc
        cdef record_t record
        cdef Column values = block.values, keys = block.keys
        cdef int64_t i = start, stop, first = block.first, n = block.count
        cdef int64_t most = self.max_record_bytes
        cdef int64_t below = min(most - 128, ZERO_COPY_BYTES if zero_copy else most)
        cdef int32_t chosen
        cdef int kind
        cdef HeaderColumn headers = block.headers
        cdef bint runs = (
            acc.policy == POLICY_UNIFORM and wanted == NULL and stamps == NULL and keys.c.kind == COLUMN_EMPTY
            and headers is None
        )
        memset(&record, 0, sizeof(record_t))
        record.block = block.c
        with nogil:
            while i < n:
                stop = min(n, i + BULK_STEP)
                pthread_mutex_lock(&acc.lock)
                while i < stop and acc.waiters == NULL:
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
                    if append(acc, topic, &record, &chosen) != APPEND_OK:
                        break
                    receipt.took(&record)
                    i += 1
                    if runs:
                        i += append_run(acc, topic, block.c, &values.c, i, stop, first, below)
                pthread_mutex_unlock(&acc.lock)
                if i < stop:
                    break
        PyErr_CheckSignals()
        return i

    cdef int submit_one(
        self, Receipt receipt, Block block, topic_t* topic, const int32_t* wanted, const int64_t* stamps, bint zero_copy,
        int64_t i,
    ) except -1:
        """One record with everything checked and waited for. What is wrong with it goes into the receipt."""
        cdef record_t record
        cdef Column values = block.values, keys = block.keys, topics = block.topics
        cdef int64_t index = block.first + i
        cdef const char* name
        cdef int64_t name_size
        cdef int32_t chosen
        cdef int kind, status
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
            self.check_size(&record)
            if self.partitioner is not None and record.partition < 0:
                record.partition = self.ask_partitioner(topic, &record)
            pthread_mutex_lock(&self.client.acc.lock)
            status = APPEND_NO_ROOM
            if self.client.acc.waiters == NULL:
                status = append(&self.client.acc, topic, &record, &chosen)
            pthread_mutex_unlock(&self.client.acc.lock)
            if status != APPEND_OK:
                self.append_slowly(topic, &record, status, 0 if receipt.full else self.max_block_us)
            receipt.lock()
            receipt.took(&record)
            receipt.unlock()
        except (BufferFullError, TypeError, ValueError, KafkaException) as error:
            if isinstance(error, BufferFullError):
                receipt.full = True
            block.rejected[index] = error
            receipt.rejected += 1
            if self.transactional:  # nothing is raised: the commit must know
                self.count_failure(error.args[0].code() if isinstance(error, KafkaException) else (
                    ERR__QUEUE_FULL if isinstance(error, BufferFullError) else ERR__INVALID_ARG
                ))
        return 0

    cdef sweep(self, bint thoroughly):
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
            gone = self.sort_out()
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

    cdef list sort_out(self):
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

    # ---- callbacks and waiting

    cdef int wait_for_news(self, int64_t until_us, uint64_t seen) except -1:
        """Sleeps until something has happened since `seen`, at most a slice; looks for Ctrl-C."""
        cdef accumulator_t* acc = &self.client.acc
        with nogil:
            pthread_mutex_lock(&acc.lock)
            acc.done_waiting += 1
            if not self.client.stop and not self.client.news and acc.news == seen:
                fp_cond_wait_until(&acc.done, &acc.lock, min(until_us, fp_now_us() + SLICE_US))
            acc.done_waiting -= 1
            pthread_mutex_unlock(&acc.lock)
            if self.client.news:
                drain_as_guest(self.client, 0)  # sooner than through the sender
        PyErr_CheckSignals()
        return 0

    cdef hurry(self):
        """Ends the linger of everything that waits."""
        with nogil:
            pthread_mutex_lock(&self.client.acc.lock)
            seal_all(&self.client.acc)
            self.client.acc.epoch += 1
            self.client.acc.place_epoch = self.client.acc.epoch
            pthread_cond_signal(&self.client.acc.work)
            pthread_mutex_unlock(&self.client.acc.lock)

    cdef int64_t wait_and_dispatch(self, double timeout) except -1:
        """poll()"""
        cdef int64_t until
        cdef int64_t served
        cdef uint64_t seen
        if self.closed:
            raise RuntimeError("Producer has been closed")
        self.check_fork()
        served = self.dispatch()
        self.check_access()
        if served or timeout == 0:
            return served
        until = _until(timeout)
        while served == 0 and fp_now_us() < until and not self.closed:
            seen = self.client.acc.news
            if self.client.acc.deliveries == NULL and self.client.events == NULL:
                self.wait_for_news(until, seen)
            served = self.dispatch()
            self.check_access()
        return served

    def flush(self, double timeout=-1):
        """Waits for the outcome of all records accepted so far, running callbacks; returns len() afterwards."""
        cdef accumulator_t* acc = &self.client.acc
        cdef flusher_t flusher
        cdef flusher_t** link
        cdef uint64_t seen
        cdef int64_t until = _until(timeout)
        cdef bint idle
        self.check()
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
                with nogil:
                    pthread_mutex_lock(&acc.lock)
                    idle = flusher.remaining <= 0
                    seen = acc.news
                    pthread_mutex_unlock(&acc.lock)
                self.dispatch()  # when all is done, this runs the last callbacks of what was flushed
                if not idle:
                    self.check_access()
                if idle or fp_now_us() >= until or self.closed:
                    break
                self.wait_for_news(until, seen)
        finally:
            with nogil:
                pthread_mutex_lock(&acc.lock)
                link = &acc.flushers
                while link[0] != &flusher:
                    link = &link[0].next
                link[0] = flusher.next
                pthread_mutex_unlock(&acc.lock)
        self.sweep(True)
        return 0 if idle else self.outstanding()

    cpdef str trouble(self):
        """Why brokers cannot be reached, or None; also None once something was acknowledged after it."""
        cdef char text[512]
        with nogil:
            pthread_mutex_lock(&self.client.acc.lock)
            memcpy(text, self.client.trouble, sizeof(text))
            pthread_mutex_unlock(&self.client.acc.lock)
        if self.client.trouble_us <= fp_load64(&self.client.progress_us):
            return None
        return text.decode(errors="replace")

    cdef object outcome_error(self, int32_t code):
        """The error of a record without acknowledgement; a timeout says what it was waiting for."""
        if code == ERR__MSG_TIMED_OUT or code == ERR__TIMED_OUT:
            trouble = self.trouble()
            if trouble:
                return KafkaError(code, f"{rdkafka.err2str(code).decode()}: {trouble}")
        return KafkaError(code)

    cpdef int check_access(self) except -1:
        """Raises when brokers refuse us from the start, once for every time they do."""
        cdef client_t* client = self.client
        if (
            client.trouble_us > self.told_us
            and client.trouble_us > client.reached_us
            and client.progress_us == 0
            and client.connected == 0
            and client.trouble_code in (ERR__AUTHENTICATION, ERR__SSL)
            and self.error_cb is None
        ):
            self.told_us = client.trouble_us
            raise AuthenticationError(KafkaError(client.trouble_code, self.trouble()))
        return 0

    def purge(self, bint in_queue=True, bint in_flight=True, bint blocking=True):
        """Drops records: those waiting (`in_queue`) and those on their way (`in_flight`)."""
        cdef int flags = 0
        self.check()
        if in_queue:
            flags |= PURGE_F_QUEUE
            self.drop_waiting()
        if in_flight:
            flags |= PURGE_F_INFLIGHT
        if not blocking:
            flags |= PURGE_F_NON_BLOCKING
        if flags & (PURGE_F_QUEUE | PURGE_F_INFLIGHT):
            with nogil:
                drain_as_guest(self.client, flags)

    def drop_waiting(self):
        """Ends what has not been handed to librdkafka, with the error code for purged records."""
        cdef client_t* client = self.client
        with nogil:
            pthread_mutex_lock(&client.acc.lock)
            # Some chunks may be in no list at this moment, or wait for a Python partitioner's choice.
            while (client.sending or is_routing(client)) and not client.stop:
                client.acc.done_waiting += 1
                fp_cond_wait_until(&client.acc.done, &client.acc.lock, fp_now_us() + 500)
                client.acc.done_waiting -= 1
            fail_waiting(&client.acc, ERR__PURGE_QUEUE, INT64_MAX)
            pthread_mutex_unlock(&client.acc.lock)

    def set_transaction(self, bint running):
        """Whether records may be produced now, for a transactional producer."""
        self.in_transaction = running
        self.client.acc.failed = 0

    def failures(self):
        """(how many records failed since the transaction began, the first one's error code)"""
        return self.client.acc.failed, self.client.acc.first_error

    cdef void count_failure(self, int32_t error) noexcept:
        """A record of the transaction failed before it was accepted."""
        pthread_mutex_lock(&self.client.acc.lock)
        if self.client.acc.failed == 0:
            self.client.acc.first_error = error
        self.client.acc.failed += 1
        pthread_mutex_unlock(&self.client.acc.lock)

    def settle_outcomes(self):
        """Publishes acknowledgements that arrived inside confluent-kafka's own calls."""
        with nogil:
            publish_completed(self.client)
            # The sender may be publishing some at this moment, which must not count for the next transaction.
            pthread_mutex_lock(&self.client.acc.lock)
            pthread_mutex_unlock(&self.client.acc.lock)

    def outstanding(self):
        """Records without outcome, plus callbacks and events that wait for poll()."""
        cdef int64_t n
        pthread_mutex_lock(&self.client.acc.lock)
        n = self.client.acc.records + self.client.acc.callbacks_due
        pthread_mutex_unlock(&self.client.acc.lock)
        return n

    @property
    def records(self):
        """Records accepted whose outcome is open."""
        return fp_load64(&self.client.acc.records)

    @property
    def memory(self):
        """Bytes of buffer.memory in use."""
        return fp_load64(&self.client.acc.used)

    @property
    def lanes_opened(self):
        """Partitions that have been used so far."""
        return self.client.acc.lanes_opened

    def snapshot(self):
        """What fastprod.stats needs, as plain values: (topics, brokers, librdkafka's own, whether leaders moved)."""
        cdef client_t* client = self.client
        cdef broker_t* broker
        cdef broker_t copy
        cdef topic_t* topic
        cdef char* text = NULL
        self.check_fork()
        if not self.counting:  # by another thread
            self.counting = True
            try:
                with nogil:
                    count_repeated(client, not self.closed)
            finally:
                self.counting = False
        brokers = {}
        broker = <broker_t*>fp_load_ptr(<void**>&client.brokers)
        while broker != NULL:  # brokers are only ever added, in front
            fp_spin_lock(&client.brokers_lock)
            memcpy(&copy, broker, sizeof(broker_t))
            fp_spin_unlock(&client.brokers_lock)
            broker = broker.next
            if not copy.known:  # librdkafka has heard of it, no more
                continue
            brokers[copy.id] = (
                bool(copy.up) and not self.closed, copy.sent, copy.sent - copy.answered, copy.failed,
                copy.repeated, _durations(&copy.round_trip), copy.round_trip.sum_us,
            )
        topics = {}
        for name in list(self.topics):
            if self.topics[name] is not None:
                topic = <topic_t*><size_t>self.topics[name]
                # Read before the lanes: what librdkafka's partitioner has placed is counted there as well.
                lost = fp_load64(&topic.undecided.failed_records) + fp_load64(&topic.unassigned.failed_records)
                lanes = self.lanes_of(topic)
                if client.acc.policy == POLICY_LIBRDKAFKA:
                    lost = max(0, lost - sum([figures[2] for figures in lanes.values()]))
                topics[name] = (queued_records(topic.undecided) + queued_records(topic.unassigned), lost, lanes)
        pthread_mutex_lock(&client.acc.lock)
        if client.statistics != NULL:
            text = strdup(client.statistics)
        pthread_mutex_unlock(&client.acc.lock)
        try:
            told = None if text == NULL else text.decode(errors="replace")
        finally:
            free(text)
        return topics, brokers, told, bool(client.acc.leaders_moved)

    cdef dict lanes_of(self, topic_t* topic):
        """Figures of the opened lanes by partition."""
        cdef client_t* client = self.client
        cdef lane_t lane
        cdef lane_t* found
        cdef histogram_t latency
        cdef double weight = 0
        cdef int32_t i, leader = -1
        cdef lanes_t* lanes = <lanes_t*>fp_load_ptr(<void**>&topic.lanes)
        figures = {}
        for i in range(lanes.size):  # lanes are never freed while the producer lives
            found = <lane_t*>fp_load_ptr(<void**>&lanes.lanes[i])
            if found == NULL:
                continue
            pthread_mutex_lock(&client.acc.lock)
            weight = weight_of(topic, i)
            leader = topic.leaders[i] if i < topic.partitions else -1
            fp_spin_lock(&found.spin)
            memcpy(&lane, found, sizeof(lane_t))
            if found.latency != NULL:
                memcpy(&latency, found.latency, sizeof(histogram_t))
            else:
                memset(&latency, 0, sizeof(histogram_t))
            fp_spin_unlock(&found.spin)
            pthread_mutex_unlock(&client.acc.lock)
            figures[i] = (
                lane.settled_records - lane.failed_records, lane.settled_bytes - lane.failed_bytes, lane.failed_records,
                queued_records(&lane), queued_bytes(&lane), weight, (fp_now_us() - lane.opened_us) / 1e6, leader,
                lane.settled_then, lane.retries, _durations(&latency), latency.sum_us,
            )
        return figures

    def note_retries(self, name, int32_t partition, int64_t records):
        """Remembers how many records of a partition were seen to be sent again."""
        cdef topic_t* topic = <topic_t*><size_t>self.topics[name]
        topic.lanes.lanes[partition].retries = max(topic.lanes.lanes[partition].retries, records)

    cdef int64_t dispatch(self) except -1:
        """Runs what is due. Every callback runs, though one raises; the first exception is raised at the end."""
        cdef client_t* client = self.client
        cdef chunk_t* chunk
        cdef chunk_t* last
        cdef event_t* event
        cdef int64_t served = 0
        client.poller = PyThread_get_thread_ident()
        if client.events == NULL and client.acc.deliveries == NULL:
            return 0
        errors = []
        while client.events != NULL:
            pthread_mutex_lock(&client.acc.lock)
            event = client.events
            if event != NULL:
                client.events = event.next
                client.event_count -= 1
                if client.events == NULL:
                    client.last_event = NULL
            pthread_mutex_unlock(&client.acc.lock)
            if event == NULL:
                break
            try:
                self.serve(event)
            except Exception as error:
                errors.append(error)
            finally:
                drop_event(event)
            served += 1
        pthread_mutex_lock(&client.acc.lock)
        last = client.acc.last_delivery  # what comes while callbacks run is for the next call
        pthread_mutex_unlock(&client.acc.lock)
        chunk = NULL
        while last != NULL and chunk != last and client.acc.deliveries != NULL:
            pthread_mutex_lock(&client.acc.lock)
            chunk = client.acc.deliveries
            if chunk != NULL:
                client.acc.deliveries = chunk.next
                if chunk.next == NULL:
                    client.acc.last_delivery = NULL
            pthread_mutex_unlock(&client.acc.lock)
            if chunk == NULL:
                break
            try:
                served += self.deliver(chunk, errors)
            except BaseException:  # Ctrl-C in a callback: the rest waits for the next call
                pthread_mutex_lock(&client.acc.lock)
                chunk.next = client.acc.deliveries
                client.acc.deliveries = chunk
                if client.acc.last_delivery == NULL:
                    client.acc.last_delivery = chunk
                pthread_mutex_unlock(&client.acc.lock)
                raise
            pthread_mutex_lock(&client.acc.lock)
            chunk_release(&client.acc, chunk)
            pthread_mutex_unlock(&client.acc.lock)
        if errors:
            for error in errors[1:]:
                sys.unraisablehook(_Unraisable(error))
            raise errors[0]
        return served

    cdef int64_t deliver(self, chunk_t* chunk, list errors) except -1:
        """Runs the callbacks of one chunk."""
        cdef topic_t* topic = chunk.lane.topic
        cdef slot_t* slot
        cdef rich_t* more
        cdef Message message
        cdef int64_t served = 0
        cdef int32_t error_code
        cdef uint32_t i
        label = <object>topic.label
        while chunk.delivered < chunk.count:
            i = chunk.delivered
            chunk.delivered += 1
            slot = slot_at(chunk, i)
            more = rich_at(chunk, i)
            if more.callback == NULL:
                continue
            callback = <object>more.callback
            more.callback = NULL
            Py_DECREF(callback)
            fp_add64(&self.client.acc.callbacks_due, -1)
            error_code = error_of(slot)
            if self.only_errors and error_code == 0:
                continue
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
            served += 1
            try:
                callback(message._error, message)
            except Exception as error:
                errors.append(error)
        return served

    cdef serve(self, event_t* event):
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


# syslog's levels as Python's
_LOG_LEVELS = (50, 50, 50, 40, 30, 20, 20, 10)


class _Unraisable:
    """What sys.unraisablehook expects, for exceptions of callbacks after the first."""

    def __init__(self, error):
        self.exc_type = type(error)
        self.exc_value = error
        self.exc_traceback = error.__traceback__
        self.err_msg = "Exception ignored in a callback of fastprod.Producer"
        self.object = None


cdef list _durations(histogram_t* histogram):
    """[(microseconds, how often), ...]"""
    cdef int32_t i
    return [(bucket_middle_us(i), histogram.counts[i]) for i in range(BUCKETS) if histogram.counts[i]]


cdef object _bad_cell(Column column, int64_t i, str what):
    error = (column.bad or {}).get(i)
    return error if error is not None else ValueError(f"{what} is larger than 2 GiB")


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


cdef void _route_by_python(void* runtime, topic_t* topic) noexcept with gil:
    """Asks the user's partitioner about records that waited for metadata. `topic.routing` keeps them in place."""
    cdef Runtime self = <Runtime>runtime
    cdef accumulator_t* acc = &self.client.acc
    cdef chunk_t* chunk
    cdef slot_t* slot
    cdef int32_t* wanted
    cdef uint32_t i
    cdef int moved
    available = [topic.available[n] for n in range(topic.available_count)]  # only this thread changes it
    while not self.closed:
        pthread_mutex_lock(&acc.lock)
        chunk = topic.undecided.head
        if chunk != NULL:
            chunk.sealed = 1
        pthread_mutex_unlock(&acc.lock)
        if chunk == NULL:
            return
        wanted = <int32_t*>malloc(chunk.count * sizeof(int32_t))
        if wanted == NULL:
            return
        for i in range(chunk.count):
            slot = slot_at(chunk, i)
            wanted[i] = slot.state
            if slot.state < 0:
                try:
                    wanted[i] = self.choose_by_python(
                        <object>topic.label,
                        None if slot.key == NULL else slot.key[:slot.key_size],
                        None if slot.payload == NULL else slot.payload[:slot.size],
                        topic.partitions,
                        available,
                    )
                except BaseException as error:
                    sys.unraisablehook(_Unraisable(error))
                    wanted[i] = 0x7ffffffd  # no such partition: the record fails with that error
        pthread_mutex_lock(&acc.lock)
        moved = route_undecided(acc, topic, wanted)
        pthread_mutex_unlock(&acc.lock)
        free(wanted)
        if moved < 0:
            return  # out of memory: the next metadata answer tries again


# ---- methods of fastprod.Producer, compiled: a Python function in between would cost as much as the work

def produce(self, topic, value=None, key=None, partition=-1, callback=None, on_delivery=None, timestamp=0, headers=None):
    """Accepts a record and returns; it is sent in the background.

    `value` and `key` are str, bytes, None or any contiguous buffer. `callback` (or `on_delivery`) is called as
    `(error, message)` from `poll()` or `flush()`. Waits up to `max.block.ms` when `buffer.memory` is full, then
    raises BufferFullError (a BufferError).
    """
    runtime = self._runtime
    if runtime is None:
        raise RuntimeError("Producer has been closed")
    (<Runtime?>runtime).accept(topic, value, key, partition, callback, on_delivery, timestamp, headers)


def poll(self, timeout=-1):
    """Runs callbacks that are due, waiting up to `timeout` seconds (-1: for ever) for the first; how many ran."""
    runtime = self._runtime
    if runtime is None:
        raise RuntimeError("Producer has been closed")
    return (<Runtime?>runtime).wait_and_dispatch(-1 if timeout is None else timeout)


def check_headers(headers):
    """Raises what produce() would raise for such headers."""
    pack_headers(headers)


