"""What Python calls: one Runtime per producer, Receipts of bulk calls, the methods of fastprod.Producer.

    produce()          copies the record into its lane (_accumulator)
    poll(), flush()    run callbacks; while they wait they also take delivery reports (_client)

Lock order: the GIL, then `accumulator_t.lock`, then a lane's leaf lock. No Python object is made under
`accumulator_t.lock`: that can run a garbage collection, hence other code.
"""

import operator
import sys
from contextlib import suppress

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from fastprod.errors import AuthenticationError, BufferFullError, ForkError, RecordError
from fastprod.receipt import Extent, FailedRecord, Record

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetObject, PyErr_WriteUnraisable
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy, memset, strdup

from fastprod._core._accumulator cimport (
    APPEND_CLOSED,
    APPEND_NO_CHOICE,
    APPEND_NO_ROOM,
    APPEND_NO_TRANSACTION,
    APPEND_OK,
    APPEND_TOO_LARGE,
    APPEND_UNKNOWN_PARTITION,
    CHOICE_FAILED,
    GATE_CLOSED,
    GATE_NO_TRANSACTION,
    GATE_OPEN,
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
    break_off,
    chunk_release,
    chunk_t,
    enter_queue,
    drop_cache,
    error_of,
    expire_flying,
    extent_t,
    fail_flying,
    fail_head,
    fail_waiting,
    failure_t,
    flusher_t,
    footprint,
    is_flying,
    lane_t,
    lanes_t,
    leave_queue,
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
    topic_find,
    topic_new,
    topic_t,
    use_grant,
    waiter_t,
    wake_waiters,
    weights_of,
)
from fastprod._core._balance cimport (
    record_upper_bound,
)
from fastprod._core._client cimport (
    SCRATCH_MESSAGES,
    broker_t,
    client_t,
    count_repeated,
    drain,
    drain_as_guest,
    drop_event,
    enter_as_guest,
    event_t,
    forget_client,
    forks,
    free_brokers,
    leave_as_guest,
    on_queue,
    publish_completed,
    register_client,
    set_newborn,
    start_threads,
)
from fastprod._core._columns cimport (
    CELL_BAD,
    CELL_NULL,
    CELL_VALUE,
    COLUMN_EMPTY,
    Column,
    column_get,
)
from fastprod._core._histogram cimport BUCKETS, bucket_middle_us, histogram_t
from fastprod._core._headers cimport (
    HEADERS_NO_MEMORY,
    HEADERS_NO_NAME,
    HeaderColumn,
    headers_head,
    pack_headers,
)
from fastprod._core._message cimport Message
from fastprod._core._platform cimport (
    fp_add64,
    fp_cond_init,
    fp_cond_wait_until,
    fp_grow64,
    fp_load64,
    fp_load_ptr,
    fp_now_us,
    fp_spin_lock,
    fp_spin_unlock,
    fp_store64,
    fp_store_ptr,
    pthread_cond_broadcast,
    pthread_cond_destroy,
    pthread_cond_signal,
    pthread_join,
    pthread_mutex_lock,
    pthread_mutex_unlock,
)
from fastprod._core._rdkafka cimport *
from fastprod._core._rdkafka cimport api as rdkafka

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object, Py_ssize_t*) except NULL
    unsigned long PyThread_get_thread_ident() nogil
    int PyList_SetSlice(object, Py_ssize_t, Py_ssize_t, PyObject*) except -1

cdef enum:
    FORMER_US = 5000000         # so long after a thread has polled it may be about to poll again
    SLICE_US = 100000           # how long a call may block before it looks for Ctrl-C
    ZERO_COPY_BYTES = 512       # smaller values are as cheap to copy as to pin; at 400 bytes pinning gains 10 to 20 %
    MAX_PARTITIONS = 0x7fff0000 # larger numbers mean other things in slot_t.state
    BULK_STEP = 1024            # records appended under one hold of the lock
    BULK_STEP_BYTES = 262144    # or bytes copied
    APPEND_LOOK = 100           # a record that submit_fast leaves to submit_one
    PURGE_US = 10000000         # librdkafka drops what it is told to drop at once, unless its threads are stuck
    SWEEP_US = 100000           # how long buffers may be kept that are done with, though older ones are not
    CREDIT = 128                # lanes of a broker that librdkafka may have at a time
    CREDIT_OF_LEVELS = 8        # the same where those of a higher level shall not queue up behind others
    # What librdkafka allocates per message, besides the key: rd_kafka_msg_t and malloc's share.
    MESSAGE_OVERHEAD = 272
    REQUEST_OVERHEAD = 512      # around the records of a request: the topic's name, numbers; those of client and transaction apart


TORN = (
    "may be lost: librdkafka has lost track of what brokers took of the partition; look whether the record is there, or "
    "produce it again if twice is better than never"
)


cdef int64_t _until(double timeout) noexcept:
    """The monotonic time `timeout` seconds from now; negative and absurd ones mean for ever."""
    return fp_now_us() + <int64_t>(timeout * 1e6) if 0 <= timeout < 1e9 else INT64_MAX


cdef class Runtime:
    """One producer: accumulator, threads and callbacks around one confluent_kafka.Producer.

    Owns the client_t. `attach` ties it to the librdkafka client that confluent-kafka makes, `stop` unties it.
    """

    cdef client_t* client
    cdef dict topics            # name -> address of its topic_t; keeps the names alive
    cdef object last_name       # the topic of the last call, to save the look-up
    cdef topic_t* last_topic
    cdef list blocks            # of bulk calls, oldest first: those librdkafka may still read
    cdef int64_t swept_us       # when all of them were looked at
    cdef readonly object partitioner  # a Python partitioner, or None
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
    cdef object no_transaction  # why records are refused while the gate is shut
    cdef dict partitions        # topic -> (version, what a Python partitioner is told)
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
            "python": POLICY_PYTHON,
            "partial": POLICY_PARTIAL,
        }[settings.policy]
        acc.hash_null = settings.hash_null
        acc.spread_empty = settings.spread_empty
        if settings.hash is not None:
            acc.hash = <hash_f><size_t>{
                "consistent": <size_t>rdkafka.msg_partitioner_consistent,
                "murmur2": <size_t>rdkafka.msg_partitioner_murmur2,
                "fnv1a": <size_t>rdkafka.msg_partitioner_fnv1a,
            }[settings.hash]
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
        acc.levels = settings.levels
        acc.credit = CREDIT if settings.levels == 1 else CREDIT_OF_LEVELS
        acc.strict = settings.strict
        if settings.idempotent:
            acc.request_bytes = max(1, settings.request_bytes * 9 // 10 - REQUEST_OVERHEAD - settings.names_bytes)
            acc.request_records = settings.request_records
            acc.known_us = <int64_t>(settings.known_ms * 1000)
        acc.random.state = settings.seed
        accumulator_init(acc)
        fp_cond_init(&self.client.scout_wake)
        self.client.refresh_us = <int64_t>(settings.metadata_refresh_ms * 1000)
        self.client.propagation_us = <int64_t>(settings.metadata_propagation_ms * 1000)
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
        self.client.pipelined = settings.pipelined
        self.client.patience_us = <int64_t>(settings.patience_ms * 1000)
        if settings.transactional:
            acc.gate = GATE_NO_TRANSACTION
        self.no_transaction = "a transactional producer needs begin_transaction() before it produces"
        self.partitions = {}
        self.client.no_offsets = settings.no_offsets
        self.client.statistics_wanted = settings.statistics_wanted
        self.topics = {}
        self.last_name = object()  # no topic yet
        self.blocks = []
        self.generation = forks()
        self.pid = settings.pid
        self.gone = True

    def __dealloc__(self):
        if self.client == NULL or not self.gone:
            return  # librdkafka may still call us (a forked child, an interpreter going down): let it be
        drop_callbacks(self)
        while self.client.events != NULL:
            event = self.client.events
            self.client.events = event.next
            free(event.broker)  # its rd_kafka_event_t went with the client
            free(event)
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
        finally:
            set_newborn(NULL)
            self.gone = self.closed = self.client.rk == NULL
            if not self.gone:  # also when a signal handler has raised meanwhile: stop() can end it then
                self.listen()
        if self.gone:
            raise RuntimeError(
                "librdkafka did not load fastprod's hook; does this confluent-kafka support plugin.library.paths?"
            )
        self.client.scratch = <rd_kafka_message_t*>calloc(SCRATCH_MESSAGES, sizeof(rd_kafka_message_t))
        if self.client.scratch == NULL:
            raise MemoryError()
        if start_threads(self.client) < 0:
            raise RuntimeError("cannot start the producer's threads: the system's limit is reached")

    cdef void listen(self) noexcept:
        """Takes over librdkafka's main queue."""
        self.client.queue = rdkafka.queue_get_main(self.client.rk)
        rdkafka.queue_cb_event_enable(self.client.queue, on_queue, self.client)
        fp_store64(&self.client.news, 1)  # what came before we listened
        register_client(self.client)

    def stop(self):
        """Ends our threads and gives librdkafka's objects back; the client may then be destroyed.

        Returns how many records had no outcome yet; they end as purged.
        """
        cdef client_t* client = self.client
        cdef topic_t* topic
        cdef waiter_t* waiter
        cdef int64_t left, until
        self.closed = True
        if client.queue == NULL:  # a signal handler has raised before there was anything
            return 0
        with nogil:
            pthread_mutex_lock(&client.acc.lock)
            client.stop = True
            client.acc.gate = GATE_CLOSED
            waiter = client.acc.waiters
            while waiter != NULL:  # each leaves by itself
                pthread_cond_signal(&waiter.wake)
                waiter = waiter.next
            pthread_cond_broadcast(&client.acc.work)
            pthread_cond_broadcast(&client.acc.done)
            pthread_cond_broadcast(&client.scout_wake)
            while client.guests:
                fp_cond_wait_until(&client.acc.done, &client.acc.lock, fp_now_us() + 500)
            pthread_mutex_unlock(&client.acc.lock)
            if client.threads > 0:
                pthread_join(client.sender, NULL)
            if client.threads > 1:
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
            until = fp_now_us() + PURGE_US
            while is_flying(&client.acc) and fp_now_us() < until:
                drain(client)
                if is_flying(&client.acc):
                    pthread_mutex_lock(&client.acc.lock)
                    fp_cond_wait_until(&client.acc.done, &client.acc.lock, fp_now_us() + 2000)
                    pthread_mutex_unlock(&client.acc.lock)
            publish_completed(client)  # in transactions librdkafka's threads may have settled the last
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
        dispatch(self)

    @property
    def flying(self):
        """Whether librdkafka still has records of ours: confluent-kafka must not read their reports."""
        return bool(is_flying(&self.client.acc))

    def give_up(self):
        """What librdkafka keeps though it was told to drop it counts as timed out; its memory stays."""
        with nogil:
            pthread_mutex_lock(&self.client.acc.lock)
            expire_flying(&self.client.acc, INT64_MAX)
            pthread_mutex_unlock(&self.client.acc.lock)

    def finish(self):
        """librdkafka's client has been destroyed."""
        forget_client(self.client)
        with nogil:
            publish_completed(self.client)
            pthread_mutex_lock(&self.client.acc.lock)
            fail_flying(&self.client.acc, ERR__PURGE_INFLIGHT)
            drop_cache(&self.client.acc)  # a Receipt may keep us for long
            pthread_mutex_unlock(&self.client.acc.lock)
        self.gone = True
        sweep(self, True)
        self.blocks = []

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
        name = sys.intern(name if type(name) is str else str.__str__(name))
        known = self.topics.get(name)
        if known is not None:
            topic = <topic_t*><size_t>known
        else:
            encoded = name.encode()
            if not encoded or b"\0" in encoded:
                raise RecordError(KafkaError(ERR__INVALID_ARG, f"not a topic name: {name!r}"))
            if not enter_as_guest(self.client):
                raise RuntimeError("Producer has been closed")
            handle = rdkafka.topic_new(self.client.rk, encoded, NULL)
            code = 0 if handle != NULL else rdkafka.last_error()
            topic = NULL
            if handle != NULL:
                pthread_mutex_lock(&self.client.acc.lock)
                topic = topic_new(&self.client.acc, encoded)
                if topic != NULL:
                    topic.handle = handle
                    topic.label = <void*>name
                    pthread_cond_signal(&self.client.scout_wake)
                pthread_mutex_unlock(&self.client.acc.lock)
                if topic == NULL:
                    rdkafka.topic_destroy(<rd_kafka_topic_t*>handle)
            leave_as_guest(self.client)
            if code:
                raise RecordError(KafkaError(code, f"cannot use topic {name!r}: {rdkafka.err2str(code).decode()}"))
            if topic == NULL:
                raise MemoryError()
            self.topics[name] = <size_t>topic  # interned: the name lives as long
        self.last_name = name
        self.last_topic = topic
        return topic

    # ---- producing

    # ---- bulk

    def receipt(self, topic, Receipt earlier=None):
        """The Receipt for a bulk call to `topic`, or None for a topic per record: a new one, or that of an earlier."""
        cdef Receipt receipt
        self.check()
        if self.client.acc.gate == GATE_NO_TRANSACTION:
            raise RecordError(KafkaError(ERR__STATE, self.no_transaction))
        if earlier is not None:
            if earlier.runtime is not self:
                raise ValueError("the receipt is another producer's")
            if earlier.topic != topic:
                raise ValueError(f"the receipt is for topic {earlier.topic!r}, not {topic!r}")
            earlier.full = False
            return earlier
        if topic is not None:
            self.topic_of(topic)
        receipt = Receipt.__new__(Receipt, self)
        receipt.topic = topic
        return receipt

    def submit(self, Receipt receipt, Column values, Column keys, Column topics, partitions, timestamps, headers,
               bint zero_copy):
        """Appends one block of records, in order; see fastprod.Producer.produce_many.

        Columns are of one length; `partitions` (int32) and `timestamps` (int64) are numpy arrays or None, `headers`
        a list or None. A record that cannot be taken is noted in the receipt, the others go on.
        """
        submit(self, receipt, values, keys, topics, partitions, timestamps, headers, zero_copy)

    # ---- callbacks and waiting

    def flush(self, double timeout=-1):
        """Waits for the outcome of all records accepted so far, running callbacks; returns len() afterwards."""
        return flush(self, timeout)

    cpdef str trouble(self):
        """Why brokers cannot be reached, or None; also None once something was acknowledged after it."""
        cdef char text[512]
        with nogil:
            pthread_mutex_lock(&self.client.acc.lock)
            memcpy(text, self.client.trouble, sizeof(text))
            pthread_mutex_unlock(&self.client.acc.lock)
        if fp_load64(&self.client.trouble_us) <= fp_load64(&self.client.progress_us):
            return None
        return text.decode(errors="replace")

    cdef object outcome_error(self, int32_t code):
        """The error of a record without acknowledgement; a timeout says what it was waiting for."""
        if code == ERR__MSG_TIMED_OUT or code == ERR__TIMED_OUT:
            trouble = self.trouble()
            if trouble:
                return KafkaError(code, f"{rdkafka.err2str(code).decode()}: {trouble}")
        if code == ERR__GAPLESS_GUARANTEE and self.client.acc.strict:
            return KafkaError(
                code,
                "an earlier record of the partition failed, and strict.order lets none overtake it: make a new producer "
                "and go on from the first record that failed",
            )
        if code == ERR__INCONSISTENT:
            return KafkaError(code, TORN)
        return KafkaError(code)

    cpdef int check_access(self) except -1:
        """Raises when brokers refuse us from the start, once for every time they do."""
        cdef client_t* client = self.client
        if (
            fp_load64(&client.trouble_us) > self.told_us
            and fp_load64(&client.trouble_us) > fp_load64(&client.reached_us)
            and fp_load64(&client.progress_us) == 0
            and fp_load64(&client.connected) == 0
            and fp_load64(&client.trouble_code) in (ERR__AUTHENTICATION, ERR__SSL)
            and self.error_cb is None
        ):
            self.told_us = fp_load64(&client.trouble_us)
            raise AuthenticationError(KafkaError(fp_load64(&client.trouble_code), self.trouble()))
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
            while client.sending and not client.stop:  # some chunks are in no list at this moment
                client.acc.done_waiting += 1
                fp_cond_wait_until(&client.acc.done, &client.acc.lock, fp_now_us() + 500)
                client.acc.done_waiting -= 1
            fail_waiting(&client.acc, ERR__PURGE_QUEUE, INT64_MAX)
            pthread_mutex_unlock(&client.acc.lock)

    def open_transaction(self):
        """Records may be produced from now on."""
        pthread_mutex_lock(&self.client.acc.lock)
        self.client.acc.failed = 0
        if self.client.acc.gate != GATE_CLOSED:
            self.client.acc.gate = GATE_OPEN
        pthread_mutex_unlock(&self.client.acc.lock)

    def shut_transaction(self, why):
        """No record is taken from now on, in any thread, and `why` is what produce() says."""
        self.no_transaction = why
        pthread_mutex_lock(&self.client.acc.lock)
        if self.client.acc.gate != GATE_CLOSED:
            self.client.acc.gate = GATE_NO_TRANSACTION
        pthread_mutex_unlock(&self.client.acc.lock)

    @property
    def ends_lost(self):
        """Requests to end a transaction that got no answer: brokers may still act on them."""
        return self.client.ends_lost

    def failures(self):
        """(how many records failed since the transaction began, the first one's error code)"""
        return self.client.acc.failed, self.client.acc.first_error

    cdef void count_failures(self, int32_t error, int64_t records) noexcept:
        """Records of the transaction failed before they were accepted."""
        pthread_mutex_lock(&self.client.acc.lock)
        if self.client.acc.failed == 0:
            self.client.acc.first_error = error
        self.client.acc.failed += records
        pthread_mutex_unlock(&self.client.acc.lock)

    def settle_outcomes(self):
        """Publishes acknowledgements that arrived inside confluent-kafka's own calls."""
        with nogil:
            publish_completed(self.client)
            # The sender may be publishing some at this moment, which must not count for the next transaction.
            pthread_mutex_lock(&self.client.acc.lock)
            pthread_mutex_unlock(&self.client.acc.lock)

    def note_rejected(self, topic, int32_t code):
        """A record was not taken and nothing is raised: a strict producer ends its topic, a transaction is not committed."""
        if self.client.acc.strict:
            with suppress(ValueError, KafkaException):  # no name of a topic: nothing can be written to it
                end_topic(self, self.topic_of(topic))
        if self.transactional:
            self.count_failures(code, 1)

    def await_flight(self, double timeout):
        """Waits until librdkafka has no record any more, at most so many seconds. Runs no callbacks."""
        cdef int64_t until = _until(timeout)
        cdef int64_t seen = fp_load64(&self.client.acc.news)
        while is_flying(&self.client.acc) and fp_now_us() < until and not self.closed:
            wait_for_news(self, until, seen)
            seen = fp_load64(&self.client.acc.news)

    def outstanding(self):
        """Records without outcome, plus callbacks and events that wait for poll()."""
        cdef int64_t n
        pthread_mutex_lock(&self.client.acc.lock)
        n = self.client.acc.records + fp_load64(&self.client.acc.callbacks_due)
        pthread_mutex_unlock(&self.client.acc.lock)
        return n

    @property
    def records(self):
        """Records accepted whose outcome is open."""
        return fp_load64(&self.client.acc.records)

    @property
    def memory(self):
        """Bytes of buffer.memory in use."""
        pthread_mutex_lock(&self.client.acc.lock)
        used = self.client.acc.used + self.client.acc.bookkeeping
        pthread_mutex_unlock(&self.client.acc.lock)
        return used

    @property
    def cached(self):
        """Bytes that are kept for later chunks, beyond those in use."""
        return self.client.acc.cached

    @property
    def lanes_opened(self):
        """Partitions that have been used so far."""
        return self.client.acc.lanes_opened

    def snapshot(self):
        """What fastprod.stats needs, as plain values: (topics, brokers, librdkafka's own, whether leaders moved)."""
        return snapshot(self)

    def note_retries(self, name, int32_t partition, int64_t records):
        """Remembers how many records of a partition were seen to be sent again."""
        cdef topic_t* topic = <topic_t*><size_t>self.topics[name]
        topic.lanes.lanes[partition].retries = max(topic.lanes.lanes[partition].retries, records)


include "runtime/receipt.pyx"
include "runtime/admission.pyx"
include "runtime/bulk.pyx"
include "runtime/callbacks.pyx"
include "runtime/snapshot.pyx"



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
    accept(<Runtime?>runtime, topic, value, key, partition, callback, on_delivery, timestamp, headers)


def poll(self, timeout=-1):
    """Runs callbacks that are due, waiting up to `timeout` seconds (-1: for ever) for the first; how many ran."""
    runtime = self._runtime
    if runtime is None:
        raise RuntimeError("Producer has been closed")
    return wait_and_dispatch(<Runtime?>runtime, -1 if timeout is None else timeout)


def check_headers(headers):
    """Raises what produce() would raise for such headers."""
    pack_headers(headers)


def tell(error):
    """Tells of an exception that no caller can be given, through sys.unraisablehook."""
    write_unraisable(error, None)
