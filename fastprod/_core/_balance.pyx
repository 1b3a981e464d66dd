"""Record sizes and the load table of Kafka's strictly uniform sticky partitioner (KIP-794).

The table turns queue sizes into choice weights. A partition with queue q gets weight max+1-q, so the longest
queue still gets a little and the shortest gets most:

    queues      8   3  14   8   5        max + 1 = 15
    weights     7  12   1   7  10
    cumulative  7  19  20  27  37        a number in 0..36 picks the first entry greater than it

Partial round robin (Pulsar's PIP-79) uses only `limit` partitions, drawn by chance, so that many small producers
together use all of them and each holds little.
"""

import operator
import secrets

from libc.stdlib cimport free, malloc, realloc

from fastprod._core._hash cimport murmur2_bytes, partition_of_hash


cdef int load_table_reserve(load_table_t* table, int32_t capacity) noexcept nogil:
    """Room for `capacity` entries; -1 when memory is short (the table is then unchanged)."""
    cdef void* cumulative
    cdef void* partitions
    if capacity <= table.capacity:
        return 0
    cumulative = realloc(table.cumulative, <size_t>capacity * sizeof(int64_t))
    if cumulative == NULL:
        return -1
    table.cumulative = <int64_t*>cumulative
    partitions = realloc(table.partitions, <size_t>capacity * sizeof(int32_t))
    if partitions == NULL:
        return -1
    table.partitions = <int32_t*>partitions
    table.capacity = capacity
    return 0


cdef void load_table_free(load_table_t* table) noexcept nogil:
    free(table.cumulative)
    free(table.partitions)
    table.cumulative = NULL
    table.partitions = NULL
    table.count = table.capacity = 0


cdef bint load_table_build(load_table_t* table, const int64_t* queues, int32_t used, bint everyone) noexcept nogil:
    """Fills the first `used` entries; false (and no table) when the choice is even anyway.

    `everyone` says that no partition was left out: only then do equal queues mean that no table is needed.
    """
    cdef int64_t longest, total = 0
    cdef bint equal = True
    cdef int32_t i
    table.count = 0
    if used < 1:
        return False
    longest = queues[0]
    for i in range(1, used):
        if queues[i] != queues[0]:
            equal = False
        if queues[i] > longest:
            longest = queues[i]
    if equal and everyone:
        return False
    for i in range(used):
        total += longest + 1 - queues[i]
        table.cumulative[i] = total
    table.count = used
    return True


cdef int32_t load_table_find(const load_table_t* table, int64_t value) noexcept nogil:
    """Index of the first entry strictly greater than `value`."""
    cdef int32_t low = 0, high = table.count - 1, middle
    while low < high:
        middle = (low + high) >> 1
        if table.cumulative[middle] > value:
            high = middle
        else:
            low = middle + 1
    return low


def record_size_upper_bound(key, value, headers=()):
    """The most bytes that a batch with this one record takes on the wire.

    `key` and `value` are bytes-like, str, None, or their sizes as numbers (-1 stands for null); `headers` is a
    list of (name, value) or a dict.

    >>> record_size_upper_bound(None, b""), record_size_upper_bound(3, 5)
    (85, 93)
    """
    cdef int64_t size = 0
    items = list(headers.items()) if isinstance(headers, dict) else list(headers or ())
    for name, content in items:
        size += field_size(len(name.encode())) + field_size(_length(content))
    return record_upper_bound(_length(key), _length(value), varint_size(len(items)) + size)


cdef int64_t _length(content) except -2:
    if content is None:
        return -1
    if isinstance(content, int):
        if content < -1:
            raise ValueError(f"a size must be -1 (null) or more, not {content}")
        return content
    if isinstance(content, str):
        return len(content.encode())
    return memoryview(content).nbytes


cdef class LoadTable:
    """Weights for choosing a partition by queue size.

    `queues[p]` is the queue of partition `p`. Partitions in `exclude` (no leader, broker not available) get no
    slot. Without `exclude`, `length` takes only the first partitions of `queues`.

    >>> LoadTable([8, 3, 14, 8, 5]).cumulative
    [7, 19, 20, 27, 37]
    """

    cdef load_table_t table
    cdef readonly list partitions  # the partitions that may be chosen

    def __cinit__(self):
        self.table.cumulative = NULL
        self.table.partitions = NULL
        self.table.count = self.table.capacity = 0

    def __init__(self, queues, *, exclude=(), length=None):
        cdef int32_t i
        cdef int64_t* sizes
        queues = [int(q) for q in queues]
        if any(q < 0 or q > 1 << 40 for q in queues):
            raise ValueError(f"queue sizes must be between 0 and 2**40, not {queues}")
        if length is not None and not 0 <= length <= len(queues):
            raise ValueError(f"length must be between 0 and the number of queues ({len(queues)}), not {length}")
        barred = set(exclude)
        if not barred <= set(range(len(queues))):
            raise ValueError(f"cannot exclude {sorted(barred)}: the partitions are 0 to {len(queues) - 1}")
        self.partitions = [p for p in range(len(queues) if length is None else length) if p not in barred]
        cdef int32_t used = len(self.partitions)
        if load_table_reserve(&self.table, max(used, 1)) < 0:
            raise MemoryError()
        sizes = <int64_t*>realloc(NULL, max(used, 1) * sizeof(int64_t))
        if sizes == NULL:
            raise MemoryError()
        try:
            for i in range(used):
                sizes[i] = queues[self.partitions[i]]
                self.table.partitions[i] = self.partitions[i]
            load_table_build(&self.table, sizes, used, used == len(queues))
        finally:
            free(sizes)

    def __dealloc__(self):
        load_table_free(&self.table)

    @property
    def cumulative(self):
        """Cumulative weights, or None when every partition is as good as any other."""
        if self.table.count == 0:
            return None
        return [self.table.cumulative[i] for i in range(self.table.count)]

    def lookup(self, random):
        """The partition that the non-negative number `random` picks."""
        if random < 0:
            raise ValueError(f"random must not be negative, not {random}")
        if not self.partitions:
            raise LookupError("every partition is excluded")
        if self.table.count == 0:
            return self.partitions[random % len(self.partitions)]
        cdef int64_t total = self.table.cumulative[self.table.count - 1]
        return self.table.partitions[load_table_find(&self.table, random % total)]

    def __len__(self):
        return len(self.partitions)

    def __repr__(self):
        return f"LoadTable(partitions={self.partitions}, cumulative={self.cumulative})"


cdef class StickyState:
    """The byte-bound switch on its own: `append` counts bytes and says when to choose another partition."""

    cdef sticky_t state

    def __init__(self, int64_t bound):
        if bound < 1:
            raise ValueError(f"the sticky bound must be at least 1 byte, not {bound}")
        self.state.partition = -1
        self.state.produced = 0
        self.state.bound = bound

    @property
    def produced(self):
        """Bytes since the last switch."""
        return self.state.produced

    def append(self, int64_t size, bint batch_done):
        """True when the partition has had its share. `batch_done`: its batch is full, or there is none."""
        return sticky_append(&self.state, size, batch_done)


cdef uint64_t _step(uint64_t* state) noexcept nogil:
    """The next 64 random bits (splitmix64)."""
    cdef uint64_t z
    state[0] += 0x9E3779B97F4A7C15ULL
    z = state[0]
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL
    return z ^ (z >> 31)


cdef uint64_t partial_seed(uint64_t seed, const char* topic, int64_t size) noexcept nogil:
    """A topic's own sequence, so that topics do not all use the same partitions."""
    return seed ^ (<uint64_t><unsigned int>murmur2_bytes(<const unsigned char*>topic, size) << 20)


cdef int partial_grow(partial_t* state, int32_t limit, int32_t partitions) noexcept nogil:
    """Draws from the partitions not in use until `limit` are, or all. Order and position of the others stay.

    -1 when memory is short: nothing has changed then.
    """
    cdef int32_t i, j, left = 0, wanted = min(limit, partitions)
    cdef int32_t* order
    cdef int32_t* unused
    cdef char* taken
    if partitions <= state.known or wanted <= state.count:
        state.known = max(state.known, partitions)
        return 0
    order = <int32_t*>realloc(state.order, wanted * sizeof(int32_t))
    if order == NULL:
        return -1
    state.order = order
    unused = <int32_t*>malloc(partitions * (sizeof(int32_t) + 1))
    if unused == NULL:
        return -1
    taken = <char*>(unused + partitions)
    for i in range(partitions):
        taken[i] = 0
    for i in range(state.count):
        taken[order[i]] = 1
    for i in range(partitions):
        if not taken[i]:
            unused[left] = i
            left += 1
    for i in range(state.count, wanted):
        j = <int32_t>fp_scale(_step(&state.random), left)
        order[i] = unused[j]
        left -= 1
        unused[j] = unused[left]
    free(unused)
    state.count = wanted
    state.known = partitions
    return 0


cdef void partial_free(partial_t* state) noexcept nogil:
    free(state.order)
    state.order = NULL
    state.count = state.known = state.position = 0


cdef class PartialRoundRobin:
    """Round robin over at most `limit` partitions of each topic, drawn by chance (Pulsar's PIP-79).

    Give it as the config's `partitioner`: for producers of low rate, which then hold connections and batches for a
    few partitions instead of all. Records with a key go where the key says. The same `seed` draws the same
    partitions. When a topic grows, new partitions join until there are `limit`; order and position of the others
    stay.

    >>> order = PartialRoundRobin(2, seed=7)
    >>> len({order.partition("orders", None, None, 10, range(10)) for _ in range(100)})
    2
    """

    cdef readonly object limit  # partitions used per topic, at most
    cdef readonly object seed   # None = another draw every time
    cdef dict states            # topic -> _State, for use without a Producer

    def __init__(self, limit, seed=None):
        self.limit = _whole("limit", limit, 1, 0x7fffffff)
        self.seed = None if seed is None else _whole("seed", seed, 0, 0xffffffffffffffff)
        self.states = {}

    def partition(self, topic, key, value, partitions, available):
        """The next partition of `topic`; a Producer runs the same in C."""
        cdef _State state
        cdef int32_t chosen = -1, tries
        cdef bytes name
        if partitions < 1:
            raise ValueError(f"partitions must be at least 1, not {partitions}")
        if key is not None:
            name = key if isinstance(key, bytes) else bytes(key)
            return partition_of_hash(murmur2_bytes(name, len(name)), partitions)
        state = self.states.get(topic)
        if state is None:
            state = self.states[topic] = _State()
            name = topic.encode()
            state.c.random = partial_seed(secrets.randbits(64) if self.seed is None else self.seed, name, len(name))
        if partitions < state.c.known:  # deleted and made anew: the draw is, too
            partial_free(&state.c)
        if partial_grow(&state.c, self.limit, partitions) < 0:
            raise MemoryError()
        for tries in range(state.c.count):
            chosen = partial_next(&state.c, NULL)
            partial_advance(&state.c)
            if not available or chosen in available:
                break
        return chosen

    def __reduce__(self):
        return type(self), (self.limit, self.seed)

    def __repr__(self):
        return f"{type(self).__name__}(limit={self.limit}, seed={self.seed})"


cdef class _State:
    """Owns one topic's partial_t."""

    cdef partial_t c

    def __dealloc__(self):
        partial_free(&self.c)


cdef class SinglePartition(PartialRoundRobin):
    """Every key-less record of a topic goes to one partition, drawn by chance; see PartialRoundRobin."""

    def __init__(self, seed=None):
        super().__init__(1, seed)

    def __reduce__(self):
        return type(self), (self.seed,)

    def __repr__(self):
        return f"SinglePartition(seed={self.seed})"


cdef _whole(name, value, low, high):
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if not low <= number <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {value}")
    return number
