# Where key-less records go: wire sizes, the load table and the byte-bound sticky state.

from libc.stdint cimport int32_t, int64_t, uint64_t

from fastprod._core._platform cimport fp_scale

cdef enum:
    BATCH_HEADER_BYTES = 61     # a record batch before its first record
    RECORD_OVERHEAD_BYTES = 21  # most that length, attributes and deltas of one record can take


cdef inline int varint_size(int64_t value) noexcept nogil:
    """Bytes of a zig-zag variable-length integer."""
    cdef uint64_t rest = (<uint64_t>value << 1) ^ <uint64_t>(value >> 63)
    cdef int size = 1
    while rest > 0x7f:
        rest >>= 7
        size += 1
    return size


cdef inline int64_t field_size(int64_t size) noexcept nogil:
    """Wire bytes of a key or value of `size` bytes; -1 stands for null."""
    return 1 if size < 0 else varint_size(size) + size


cdef inline int64_t record_upper_bound(int64_t key, int64_t value, int64_t headers) noexcept nogil:
    """Most a batch with just this record can take; `headers` are wire bytes with their count."""
    return BATCH_HEADER_BYTES + RECORD_OVERHEAD_BYTES + field_size(key) + field_size(value) + headers


cdef inline int64_t record_wire_size(int32_t delta, int64_t key, int64_t value, int64_t headers) noexcept nogil:
    """Exact wire bytes of the record at position `delta` of its batch, at the batch's own timestamp."""
    cdef int64_t body = 2 + varint_size(delta) + field_size(key) + field_size(value) + headers
    return body + varint_size(body)


ctypedef struct random_t:
    uint64_t state  # a 64-bit fraction that steps by the golden ratio, or a plain counter
    bint counting   # replay mode: 0, 1, 2, ... taken modulo, as the reference vectors were made


cdef inline int64_t pick_below(random_t* source, int64_t bound) noexcept nogil:
    """The next choice out of 0..bound-1.

    Independent random numbers drift apart like a random walk. Steps of the golden ratio visit every share of the
    range evenly after a few draws, and start at a random place.
    """
    cdef uint64_t value = source.state
    if source.counting:
        source.state += 1
        return <int64_t>(value % <uint64_t>bound)
    source.state += 0x9E3779B97F4A7C15ULL
    return <int64_t>fp_scale(value, <uint64_t>bound)


ctypedef struct load_table_t:
    int64_t* cumulative  # owned, `capacity` entries, of which `count` are in use
    int32_t* partitions  # owned: the partition behind each entry
    int32_t count        # 0 = no table: all queues are equal, choose evenly
    int32_t capacity

cdef int load_table_reserve(load_table_t*, int32_t capacity) noexcept nogil
cdef void load_table_free(load_table_t*) noexcept nogil
cdef bint load_table_build(load_table_t*, const int64_t* queues, int32_t used, bint everyone) noexcept nogil
cdef int32_t load_table_find(const load_table_t*, int64_t value) noexcept nogil


ctypedef struct sticky_t:
    int32_t partition  # -1 = none chosen yet
    int64_t produced   # bytes appended since the last switch
    int64_t bound      # bytes after which to switch: S in the rule below


cdef inline bint sticky_append(sticky_t* sticky, int64_t appended, bint batch_done) noexcept nogil:
    """Counts bytes; true when the partition has had its share and another must be chosen.

    Waiting for the batch to be done (full, or taken away) avoids leaving a fraction of a batch behind at every
    switch; twice the bound ends that wait.
    """
    sticky.produced += appended
    if (sticky.produced >= sticky.bound and batch_done) or sticky.produced >= 2 * sticky.bound:
        sticky.produced = 0
        return True
    return False


ctypedef struct partial_t:  # round robin over some of a topic's partitions (PIP-79)
    int32_t* order    # owned: the partitions in use, in the order of their turns
    int32_t count     # how many
    int32_t known     # partitions of the topic when it was last looked at
    int32_t position  # whose turn is next
    uint64_t random   # state of the shuffle

cdef int partial_grow(partial_t*, int32_t limit, int32_t partitions) noexcept nogil
cdef void partial_free(partial_t*) noexcept nogil
cdef uint64_t partial_seed(uint64_t seed, const char* topic, int64_t size) noexcept nogil


cdef inline int32_t partial_next(partial_t* state, const int32_t* leaders) noexcept nogil:
    """Whose turn it is, passing over partitions without a leader unless none has one; -1 before partial_grow."""
    cdef int32_t tries, at = state.position
    for tries in range(state.count):
        if leaders == NULL or leaders[state.order[at]] >= 0:
            break
        at = at + 1 if at + 1 < state.count else 0
    state.position = at
    return state.order[at] if state.count else -1


cdef inline void partial_advance(partial_t* state) noexcept nogil:
    """The partition has had its record."""
    state.position = state.position + 1 if state.position + 1 < state.count else 0
