"""Record sizes and the load table of Kafka's strictly uniform sticky partitioner (KIP-794).

The table turns queue sizes into choice weights. A partition with queue q gets weight max+1-q, so the longest
queue still gets a little and the shortest gets most:

    queues      8   3  14   8   5        max + 1 = 15
    weights     7  12   1   7  10
    cumulative  7  19  20  27  37        a number in 0..36 picks the first entry greater than it
"""

from libc.stdlib cimport free, realloc


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
