"""The accumulator without librdkafka, for tests and benchmarks: append, take what is ready, acknowledge.

Production code runs the same functions; nothing of this is imported by it.
"""

from libc.stdint cimport INT64_MAX, int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset

from fastprod._core._accumulator cimport (
    APPEND_NO_ROOM,
    APPEND_OK,
    APPEND_TOO_LARGE,
    APPEND_UNKNOWN_PARTITION,
    ERR_PURGED,
    POLICY_PARTIAL,
    POLICY_ROUND_ROBIN,
    POLICY_STICKY,
    POLICY_UNIFORM,
    TABLE_US,
    accumulator_free,
    accumulator_init,
    accumulator_t,
    append,
    append_run,
    choose,
    chunk_done,
    chunk_t,
    detach,
    enter_flight,
    fail_waiting,
    lane_t,
    next_ready,
    queued_bytes,
    rebuild_table,
    record_t,
    resolve,
    route_undecided,
    seal_all,
    slot_at,
    topic_new,
    topic_t,
    topic_update,
    unlink_flying,
    weights_of,
)
from fastprod._core._balance cimport partial_advance, partial_next
from fastprod._core._columns cimport CELL_VALUE, Column, column_get
from fastprod._core._platform cimport fp_now_us

POLICIES = {
    "uniform": POLICY_UNIFORM,
    "sticky": POLICY_STICKY,
    "round_robin": POLICY_ROUND_ROBIN,
    "partial": POLICY_PARTIAL,
}


cdef class Accumulator:
    """The accumulator without librdkafka: append, take what is ready, acknowledge. One topic.

    Production code runs the same functions; this shim only lets tests drive them. `replay` makes the random
    choices 0, 1, 2, ... modulo, as Kafka's reference vectors were made.
    """

    cdef accumulator_t acc
    cdef topic_t* topic

    def __cinit__(
        self, int32_t partitions, *, policy="uniform", int64_t sticky_bytes=16384, int64_t buffer_memory=32 << 20,
        double linger_ms=0, bint adaptive=True, bint replay=False, int64_t seed=0,
        double availability_timeout_ms=0, bint ignore_keys=False, leaders=None, int32_t limit=1, int64_t failing_opens=0,
        int64_t request_bytes=0, int64_t request_records=10000, int64_t record_overhead=0, int32_t credit=0,
    ):
        memset(&self.acc, 0, sizeof(accumulator_t))
        self.acc.policy = POLICIES[policy]
        self.acc.adaptive = adaptive
        self.acc.ignore_keys = ignore_keys
        self.acc.sticky_bytes = sticky_bytes
        self.acc.limit = buffer_memory
        self.acc.linger_us = <int64_t>(linger_ms * 1000)
        self.acc.availability_us = <int64_t>(availability_timeout_ms * 1000)
        self.acc.partial_limit = limit
        self.acc.partial_seed = <uint64_t>seed
        self.acc.failing_opens = failing_opens
        self.acc.credit = credit if credit else partitions + 1
        self.acc.request_bytes = request_bytes
        self.acc.request_records = request_records
        self.acc.record_overhead = record_overhead
        self.acc.random.counting = replay
        self.acc.random.state = <uint64_t>seed
        accumulator_init(&self.acc)
        self.topic = topic_new(&self.acc, b"test")
        if self.topic == NULL:
            raise MemoryError()
        if partitions:
            self.set_partitions(partitions, leaders)

    def __dealloc__(self):
        accumulator_free(&self.acc)

    def set_partitions(self, int32_t partitions, leaders=None):
        """A metadata answer: partition count and leader per partition (default: broker p, -1 for none)."""
        cdef int32_t* brokers = <int32_t*>malloc(partitions * sizeof(int32_t))
        cdef int32_t i
        if brokers == NULL:
            raise MemoryError()
        for i in range(partitions):
            brokers[i] = i if leaders is None else leaders[i]
        try:
            if topic_update(&self.acc, self.topic, partitions, brokers) < 0:
                raise MemoryError()
            while self.topic.undecided.head != NULL:
                if route_undecided(&self.acc, self.topic, NULL) < 0:
                    raise MemoryError()
        finally:
            free(brokers)

    def append(self, bytes value, bytes key=None, int32_t partition=-1):
        """The partition the record went to; -1 while partitions are unknown. BufferError when there is no room."""
        cdef record_t record
        cdef int32_t chosen
        cdef int status
        memset(&record, 0, sizeof(record_t))
        record.size = -1 if value is None else len(value)
        record.key_size = -1 if key is None else len(key)
        if value is not None:
            record.value = value
        if key is not None:
            record.key = key
        record.partition = partition
        status = append(&self.acc, self.topic, &record, &chosen)
        if status == APPEND_NO_ROOM:
            raise BufferError("the pool is full")
        if status == APPEND_TOO_LARGE:
            raise ValueError("larger than the pool")
        if status == APPEND_UNKNOWN_PARTITION:
            raise LookupError(f"partition {partition} does not exist")
        if status != APPEND_OK:
            raise MemoryError()
        return chosen

    def append_many(self, Column values):
        """Appends values as a bulk call does, without keys; the partitions they went to, and how many of them in a run."""
        cdef record_t record
        cdef int32_t chosen
        cdef int64_t i = 0, run, runs = 0
        memset(&record, 0, sizeof(record_t))
        record.key_size = -1
        record.partition = -1
        partitions = []
        while i < values.c.length:
            if column_get(&values.c, i, &record.value, &record.size) != CELL_VALUE:
                record.size = -1
            if append(&self.acc, self.topic, &record, &chosen) != APPEND_OK:
                raise BufferError("the pool is full")
            partitions.append(chosen)
            i += 1
            chosen = self.topic.sticky.partition
            run = append_run(&self.acc, self.topic, NULL, &values.c, i, values.c.length, 0, 1 << 20)
            partitions += [chosen] * run
            i += run
            runs += run
        return partitions, runs

    def take(self, bint everything=True):
        """Detaches ready lanes as the sender does: [(partition, [(key, value), ...]), ...]; not yet acknowledged."""
        cdef lane_t* lane
        cdef chunk_t* chunk
        cdef chunk_t* following
        taken = []
        if everything:
            seal_all(&self.acc)
        while True:
            lane = next_ready(&self.acc, fp_now_us())
            if lane == NULL:
                return taken
            chunk = detach(&self.acc, lane)
            records = []
            while chunk != NULL:
                following = chunk.next
                for i in range(chunk.count):
                    records.append((_bytes(slot_at(chunk, i).key, slot_at(chunk, i).key_size),
                                    _bytes(slot_at(chunk, i).payload, slot_at(chunk, i).size)))
                chunk.next = NULL
                enter_flight(lane, chunk, chunk.count)
                chunk = following
            taken.append((lane.partition, records))

    def acknowledge(self, int32_t partition):
        """The broker has taken everything in flight on a partition."""
        cdef lane_t* lane = self.topic.lanes.lanes[partition]
        cdef chunk_t* chunk
        while lane != NULL and lane.fly_head != NULL:
            chunk = lane.fly_head
            for i in range(chunk.count):
                resolve(lane, chunk, i, 0, -1, fp_now_us())
            unlink_flying(lane, chunk)
            chunk.returned = chunk.count
            chunk_done(&self.acc, chunk)

    def purge(self):
        """Drops what waits; returns how many records."""
        return fail_waiting(&self.acc, ERR_PURGED, INT64_MAX)

    def rebuild(self):
        """Forces the next choice to read the queues again."""
        self.topic.table_us = 0

    def rebuild_many(self, int64_t times):
        """Builds the load table so many times, 10 ms apart by its clock: for benchmarks."""
        cdef int64_t i, now = fp_now_us()
        for i in range(times):
            rebuild_table(&self.acc, self.topic, now + i * 2 * TABLE_US)

    def choose_many(self, int64_t times, int64_t size):
        """Decides so many times where a record of `size` bytes goes that fills a batch, placing none: for benchmarks.

        Returns the sum of the partitions, so that no compiler leaves it out.
        """
        cdef int64_t i, total = 0
        for i in range(times):
            if self.acc.policy == POLICY_PARTIAL:
                total += partial_next(&self.topic.partial, self.topic.leaders)
                partial_advance(&self.topic.partial)
            else:
                self.topic.sticky.partition = choose(&self.acc, self.topic, size if i else 0)
                total += self.topic.sticky.partition
        return total

    def weight(self, int32_t partition):
        """The share that the load table gives a partition."""
        cdef double* weights
        if not 0 <= partition < self.topic.partitions:
            return 0.0
        weights = <double*>malloc(self.topic.partitions * sizeof(double))
        if weights == NULL:
            raise MemoryError()
        weights_of(self.topic, weights, self.topic.partitions)
        weight = weights[partition]
        free(weights)
        return weight

    @property
    def used(self):
        return self.acc.used

    @property
    def records(self):
        return self.acc.records

    @property
    def lanes_opened(self):
        return self.acc.lanes_opened

    @property
    def randoms_used(self):
        return self.acc.random.state

    @property
    def sticky(self):
        """(partition, bytes since the switch) of the sticky state."""
        return self.topic.sticky.partition, self.topic.sticky.produced

    def queued_bytes(self, int32_t partition):
        cdef lane_t* lane = self.topic.lanes.lanes[partition]
        return 0 if lane == NULL else queued_bytes(lane)


cdef _bytes(const char* data, uint32_t size):
    return None if data == NULL else data[:size]
