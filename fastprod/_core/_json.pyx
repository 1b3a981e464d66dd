# distutils: language = c++
"""Rows of a record batch as JSON objects, byte for byte as Spark's `to_json(struct(*))` writes them.

    Tree --prepare()--> names, escaped once per field --write_rows(), no GIL--> Encoded

A row is written straight into the output: a struct writes `,"name":value` for every field that is not null and then
turns the first comma into a brace, and lists do the same with a bracket, so that no branch asks for the first element.
Numbers are laid out as Java does it: `1.0`, `1.0E7`, `1E-10`. For floating point C++17's to_chars finds the shortest
digits that read back as the same number (as JDK 19 and later do; JDK 17 sometimes writes one digit more).

    Arrow                          JSON                                       map key
    bool, integers                 true, 12                                   "true", "12"
    float, double                  1.5, 1.0E10, "NaN", "-Infinity"            "1.5", "NaN"
    decimal                        12.30, 1E-10 (java.math.BigDecimal)        "12.30"
    string                         "escaped", other than ASCII as it is       "escaped"
    binary                         "base64"                                   "base64"
    date                           "2024-02-29", "+10000-01-01"               days since 1970
    time of day                    "12:34:56.789"                             "12:34:56.789"
    timestamp                      "2024-02-29T12:00:00.000Z", or no Z        microseconds since 1970
    duration                       "INTERVAL '1 02:03:04.5' DAY TO SECOND"    microseconds
    month/day/nano                 "1 years 2 months 25 days 7.8 seconds"     the same
    list, struct, map              [1,null], {"a":1}, {"k":null}              refused

A row fails, and only that row, for text that is no UTF-8, a time beyond the year 999,999,999, or a null key of a map.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree
from libc.math cimport fabs, isfinite, isnan
from libc.stdint cimport INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memmove, memset, strlen

from fastprod._core._arrow_tree cimport *
from fastprod._core._encoded cimport Encoded, encoded_of, finish_row, out_put, out_reserve, out_t

cdef extern from *:
    """
    #include <charconv>
    #include <stdlib.h>

    /* The fewest digits that read back as the same number, as d.ddde+xx. */
    static inline char* fp_shortest64(char* to, double number) {
        return std::to_chars(to, to + 32, number, std::chars_format::scientific).ptr;
    }
    static inline char* fp_shortest32(char* to, float number) {
        return std::to_chars(to, to + 32, number, std::chars_format::scientific).ptr;
    }
    /* The nearest number of two digits, as d.de+xx. */
    static inline char* fp_two_digits(char* to, double number) {
        return std::to_chars(to, to + 32, number, std::chars_format::scientific, 1).ptr;
    }

    /* How many bits are 0 below the lowest that is 1, of which there must be one. */
    static inline int fp_ctz(uint64_t bits) { return __builtin_ctzll(bits); }
    /* Which bit is the highest that is 1, of which there must be one. */
    static inline int fp_highest(uint64_t bits) { return 63 - __builtin_clzll(bits); }

    typedef unsigned __int128 fp_uint128;
    #define FP_TEN_19 10000000000000000000ULL

    /* From 16 - n on: n times all bits, then none. */
    static const unsigned char fp_masks[33] =
        "\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff"
        "\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0\\0";

    static const char fp_pairs[201] =
        "00010203040506070809101112131415161718192021222324252627282930313233343536373839"
        "40414243444546474849505152535455565758596061626364656667686970717273747576777879"
        "8081828384858687888990919293949596979899";
    """
    void* aligned_alloc(size_t alignment, size_t size) noexcept nogil
    char* fp_shortest64(char* to, double number) noexcept nogil
    char* fp_shortest32(char* to, float number) noexcept nogil
    char* fp_two_digits(char* to, double number) noexcept nogil
    int fp_ctz(uint64_t bits) noexcept nogil
    int fp_highest(uint64_t bits) noexcept nogil
    ctypedef uint64_t fp_uint128  # wider than it seems
    const unsigned char* fp_masks
    const char* fp_pairs          # the numbers from 00 to 99
    const uint64_t FP_TEN_19      # the largest power of ten in 64 bits


cdef enum:
    PREFIX_BYTES = 32      # a prefix of up to so many bytes is copied without asking for its size
    NUMBER_BYTES = 192     # no number or time takes more
    VALUE_BYTES = 12       # of a usual value
    DATES = 64             # a power of two

cdef enum:
    OK = 0
    NO_MEMORY = -1
    BAD_UTF8 = -2
    BAD_TIME = -3
    BAD_KEY = -4

cdef int64_t MOST_SECONDS = 31556889864403199      # to the end of the year 999,999,999, the last of Java's
cdef int64_t CYCLE_SECONDS = 146097 * 86400        # in which the Gregorian calendar repeats itself, weekdays included
cdef const char* HEX = "0123456789ABCDEF"          # upper case, as Jackson has it
cdef const char* BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


ctypedef struct prefix_t:     # as large as a cache line, and aligned to one
    char short[PREFIX_BYTES]  # ,"name": of a field, if it is short
    const char* text          # the same, whatever its size; owned by Plan.texts
    int64_t size
    int64_t room              # that this field and those behind it take at most, but for long values
    int64_t unused


ctypedef struct settings_t:
    bint nulls                # write fields that are null, instead of leaving them out
    int fraction              # digits behind a timestamp's second: 0 to 9
    int64_t offset            # of the zone, in seconds, or that before the first change
    int64_t changes           # entries of the two tables
    const int64_t* starts     # when the zone's offset changes, in seconds since 1970, ascending
    const int64_t* offsets    # to what
    int64_t cycle_from        # from then on everything repeats after CYCLE_SECONDS


ctypedef struct date_t:
    int64_t day               # since 1970
    int64_t size              # of the text; 0 in an entry that is not used yet
    char text[24]


ctypedef struct work_t:
    const node_t* node        # whose value cannot be written
    int64_t row               # in that node
    date_t dates[DATES]       # written lately, by day modulo DATES: rows often have the same few days


cdef class Plan:
    """The prefixes of a tree's fields. Owns their table; `node_t.plan` points into it."""
    cdef prefix_t* prefixes
    cdef int64_t used       # entries of the table
    cdef int64_t row_bytes  # of a usual row, so that the output seldom has to grow
    cdef list texts
    cdef Tree tree

    def __cinit__(self):
        self.prefixes = NULL
        self.used = 0
        self.row_bytes = 2
        self.texts = []

    def __dealloc__(self):
        free(self.prefixes)

    cdef int prepare(self, Tree tree) except -1:
        self.tree = tree
        self.prefixes = <prefix_t*> aligned_alloc(sizeof(prefix_t), count_nodes(&tree.root) * sizeof(prefix_t))
        if self.prefixes == NULL:
            raise MemoryError
        return self.visit(&tree.root)

    cdef int visit(self, node_t* node) except -1:
        cdef int64_t i, room = 0
        cdef prefix_t* prefix
        cdef out_t out
        cdef bytes text
        for i in range(node.child_count):
            if node.kind == KIND_STRUCT:
                prefix = &self.prefixes[self.used]
                self.used += 1
                memset(&out, 0, sizeof(out_t))
                try:
                    self.status(put_string(&out, node.children[i].name, strlen(node.children[i].name)), node, i)
                    text = b"," + out.data[:out.size] + b":"
                finally:
                    PyMem_RawFree(out.data)
                self.texts.append(text)
                prefix.text = PyBytes_AS_STRING(text)
                prefix.size = PyBytes_GET_SIZE(text)
                memcpy(prefix.short, prefix.text, min(prefix.size, PREFIX_BYTES))
                self.row_bytes += prefix.size + VALUE_BYTES
                node.children[i].plan = prefix
            self.visit(&node.children[i])
        if node.kind == KIND_STRUCT:
            for i in range(node.child_count - 1, -1, -1):
                prefix = <prefix_t*> node.children[i].plan
                room += prefix.size + PREFIX_BYTES + NUMBER_BYTES
                prefix.room = room
        if node.kind == KIND_MAP:
            self.check_key(node, &node.children[0].children[0])
        return 0

    cdef int status(self, int code, const node_t* node, int64_t child) except -1:
        if code == NO_MEMORY:
            raise MemoryError
        if code != OK:
            raise ValueError(f"the name of field {child} of {self.tree.path(node) or 'the batch'!r} is no valid UTF-8")
        return 0

    cdef int check_key(self, const node_t* node, const node_t* key) except -1:
        while key.kind == KIND_DICTIONARY or key.kind == KIND_RUNS:
            key = &key.children[key.child_count - 1]
        if key.kind in (KIND_LIST, KIND_MAP, KIND_STRUCT):
            raise TypeError(
                f"column {self.tree.path(node)!r} is a map whose keys are lists, maps or structs: JSON has no text for "
                "them; leave the column out, or make it a list of structs"
            )
        return 0


cdef int64_t count_nodes(const node_t* node) noexcept nogil:
    cdef int64_t i, count = 1
    for i in range(node.child_count):
        count += count_nodes(&node.children[i])
    return count


def encode(batch, bint nulls=False, int fraction=3, zone=(0, None, None, 0)):
    """`Encoded` of a record batch; `zone` is (first offset, starts, offsets, cycle_from) as `settings_t` has them.

    The tables of the zone are contiguous numpy arrays of int64.
    """
    cdef Tree tree = tree_of(batch)
    cdef Plan plan = Plan.__new__(Plan)
    cdef Encoded encoded
    cdef settings_t settings
    cdef work_t work
    cdef const int64_t[::1] starts
    cdef const int64_t[::1] offsets
    cdef int status = OK
    if not 0 <= fraction <= 9:
        raise ValueError(f"fraction must be from 0 to 9 digits, not {fraction}")
    memset(&settings, 0, sizeof(settings_t))
    memset(&work, 0, sizeof(work_t))
    settings.nulls = nulls
    settings.fraction = fraction
    settings.offset = zone[0]
    if zone[1] is not None:
        starts, offsets = zone[1], zone[2]
        settings.changes = len(starts)
        settings.starts = &starts[0]
        settings.offsets = &offsets[0]
        settings.cycle_from = zone[3]
    plan.prepare(tree)
    encoded = encoded_of(tree.root.length, plan.row_bytes)
    while encoded.done < encoded.rows:
        with nogil:
            status = write_rows(encoded, &tree.root, &settings, &work)
        if status == NO_MEMORY:
            raise MemoryError
        if status != OK:
            encoded.reject(reason(tree, status, &work))
    return encoded


cdef object reason(Tree tree, int status, const work_t* work):
    cdef const char* data
    cdef int64_t size
    path = tree.path(work.node)
    if status == BAD_UTF8:
        get_bytes(work.node, work.row, &data, &size)
        more = "..." if size > 40 else ""
        return ValueError(f"has text that is no UTF-8 in column {path!r}: {data[:min(size, 40)]!r}{more}")
    if status == BAD_KEY:
        return ValueError(f"has a null for a key in the map {path!r}")
    number = tree.cell(work.node, work.row)
    return ValueError(f"has a time that cannot be written in column {path!r}: {number}")


cdef int write_rows(
    Encoded encoded, const node_t* root, const settings_t* settings, work_t* work
) noexcept nogil:
    """Rows from `done` on, until one cannot be written."""
    cdef int status
    while encoded.done < encoded.rows:
        status = put_struct(&encoded.out, root, encoded.done, settings, work)
        if status != OK:
            return status
        finish_row(encoded)
    return OK


cdef int put_struct(
    out_t* out, const node_t* node, int64_t row, const settings_t* settings, work_t* work
) noexcept nogil:
    cdef int64_t i, size, at = row, start = out.size
    cdef int status, truth
    cdef const node_t* child
    cdef const prefix_t* prefix
    cdef const char* data
    cdef char* to  # where out.size is behind, to spare writing and reading it for every field
    cdef char* short
    if node.child_count and out_reserve(out, (<const prefix_t*> node.children[0].plan).room):
        return NO_MEMORY
    to = out.data + start
    for i in range(node.child_count):
        prefix = <const prefix_t*> node.children[i].plan
        at = row
        child = resolve(&node.children[i], &at)
        if child == NULL and not settings.nulls:
            continue
        if prefix.size <= PREFIX_BYTES:
            memcpy(to, prefix.short, PREFIX_BYTES)
        else:
            memcpy(to, prefix.text, prefix.size)
        to += prefix.size
        if child == NULL:
            memcpy(to, b"null", 4)
            to += 4
            continue
        if child.kind == KIND_STRING:  # what most fields are is written here; put_value can do all of it
            get_bytes(child, at, &data, &size)
            if size <= 16 and child.layout <= LAYOUT_OFFSETS64 and data + 16 <= child.data + child.limit:
                short = put_short(to, data, size)
                if short != NULL:
                    to = short
                    continue
        elif child.kind == KIND_INT64:
            to = put_signed(to, load64(child.data, at))
            continue
        elif child.kind == KIND_INT32:
            to = put_signed(to, load32(child.data, at))
            continue
        elif child.kind == KIND_DOUBLE:
            to = put_double(to, load_double(child.data, at))
            continue
        elif child.kind == KIND_BOOL:
            truth = get_bool(child, at)
            memcpy(to, b"true    " if truth else b"false   ", 8)
            to += 5 - truth
            continue
        elif child.kind == KIND_DECIMAL:
            to = put_decimal(to, child, at)
            continue
        elif child.kind == KIND_TIMESTAMP and child.unit == UNIT_MICRO:  # which is never out of range
            to = put_timestamp(to, child, load64(child.data, at), settings, work)
            continue
        elif child.kind == KIND_DATE32:
            to[0] = b'"'
            to = put_date(to + 1, load32(child.data, at), work)
            to[0] = b'"'
            to += 1
            continue
        out.size = to - out.data
        if child.kind == KIND_STRING:
            status = put_string(out, data, size)
            if status == BAD_UTF8:
                work.node = child
                work.row = at
        else:
            status = put_value(out, child, at, settings, work)
        if status != OK:
            return status
        if out_reserve(out, prefix.room):  # for those behind it
            return NO_MEMORY
        to = out.data + out.size
    out.size = to - out.data
    return close(out, start, b"{", b"}")


cdef inline int close(out_t* out, int64_t start, char opening, char closing) noexcept nogil:
    """Turns what is written since `start`, `,a,b,c` or nothing, into `{a,b,c}` or `{}`."""
    if out_reserve(out, 2):
        return NO_MEMORY
    if out.size == start:
        out.size += 1
    out.data[start] = opening
    out.data[out.size] = closing
    out.size += 1
    return OK


cdef int put_list(
    out_t* out, const node_t* node, int64_t row, const settings_t* settings, work_t* work
) noexcept nogil:
    cdef int64_t i, at, first, count, start = out.size
    cdef int status
    cdef const node_t* item
    get_list(node, row, &first, &count)
    for i in range(first, first + count):
        at = i
        item = resolve(&node.children[0], &at)
        if item == NULL:
            status = out_put(out, b",null", 5)
        else:
            if out_reserve(out, 1):
                return NO_MEMORY
            out.data[out.size] = b","
            out.size += 1
            status = put_value(out, item, at, settings, work)
        if status != OK:
            return status
    return close(out, start, b"[", b"]")


cdef int put_map(
    out_t* out, const node_t* node, int64_t row, const settings_t* settings, work_t* work
) noexcept nogil:
    cdef int64_t i, at, first, count, start = out.size
    cdef int status
    cdef const node_t* key
    cdef const node_t* item
    get_list(node, row, &first, &count)
    for i in range(first, first + count):
        at = i
        key = resolve(&node.children[0].children[0], &at)
        if key == NULL:
            work.node = node
            work.row = row
            return BAD_KEY
        if out_put(out, b",", 1):
            return NO_MEMORY
        status = put_key(out, key, at, settings, work)
        if status != OK:
            return status
        at = i
        item = resolve(&node.children[0].children[1], &at)
        if item == NULL:
            status = out_put(out, b":null", 5)
        else:
            if out_put(out, b":", 1):
                return NO_MEMORY
            status = put_value(out, item, at, settings, work)
        if status != OK:
            return status
    return close(out, start, b"{", b"}")


cdef int put_key(
    out_t* out, const node_t* node, int64_t row, const settings_t* settings, work_t* work
) noexcept nogil:
    """The key of a map: what Java's toString() makes of the value that Spark has in memory."""
    cdef int64_t start, number
    cdef int status, kind = node.kind
    cdef char* to
    if kind == KIND_DATE32 or kind == KIND_DATE64 or kind == KIND_TIMESTAMP or kind == KIND_DURATION:
        if out_reserve(out, NUMBER_BYTES):
            return NO_MEMORY
        number = get_integer(node, row)
        if kind == KIND_DATE64:
            number = floor_div(number, 86400000)
        to = out.data + out.size
        to[0] = b'"'
        if kind == KIND_DATE32 or kind == KIND_DATE64 or node.unit == UNIT_MICRO:
            to = put_signed(to + 1, number)
        elif node.unit == UNIT_NANO:
            to = put_signed(to + 1, floor_div(number, 1000))
        else:  # seconds and milliseconds get zeros behind them, which cannot overflow
            to = put_signed(to + 1, number)
            if number:
                memcpy(to, b"000000", 6)
                to += 6 if node.unit == UNIT_SECOND else 3
        to[0] = b'"'
        out.size = to + 1 - out.data
        return OK
    if out_reserve(out, 2):
        return NO_MEMORY
    start = out.size
    out.data[start] = b'"'
    out.size += 1
    status = put_value(out, node, row, settings, work)
    if status != OK:
        return status
    if out.data[start + 1] == b'"':  # text brings its own quotes: the first is one too many
        memmove(out.data + start, out.data + start + 1, out.size - start - 1)
        out.size -= 1
        return OK
    return out_put(out, b'"', 1)


cdef int put_value(
    out_t* out, const node_t* node, int64_t row, const settings_t* settings, work_t* work
) noexcept nogil:
    """A value that is not null, of a node that `resolve` gave."""
    cdef const char* data
    cdef int64_t size
    cdef char* to
    cdef int status = OK
    cdef int kind = node.kind
    if kind == KIND_STRING:
        get_bytes(node, row, &data, &size)
        status = put_string(out, data, size)
    elif kind == KIND_STRUCT:
        return put_struct(out, node, row, settings, work)
    elif kind == KIND_LIST:
        return put_list(out, node, row, settings, work)
    elif kind == KIND_MAP:
        return put_map(out, node, row, settings, work)
    elif kind == KIND_BINARY:
        get_bytes(node, row, &data, &size)
        return put_base64(out, data, size)
    else:
        if out_reserve(out, NUMBER_BYTES):
            return NO_MEMORY
        to = put_plain(out.data + out.size, node, row, settings, work)
        if to == NULL:
            status = BAD_TIME
        else:
            out.size = to - out.data
    if status != OK:
        work.node = node
        work.row = row
    return status


cdef inline char* put_plain(
    char* to, const node_t* node, int64_t row, const settings_t* settings, work_t* work
) noexcept nogil:
    """A number or time, at most NUMBER_BYTES long; returns its end, or NULL for a time out of range."""
    cdef int kind = node.kind
    cdef uint16_t half
    if kind == KIND_INT64:
        return put_signed(to, load64(node.data, row))
    elif kind == KIND_INT32:
        return put_signed(to, load32(node.data, row))
    elif kind == KIND_DOUBLE:
        return put_double(to, load_double(node.data, row))
    elif kind == KIND_BOOL:
        if get_bool(node, row):
            memcpy(to, b"true", 4)
            return to + 4
        memcpy(to, b"false", 5)
        return to + 5
    elif kind == KIND_TIMESTAMP:
        return put_timestamp(to, node, load64(node.data, row), settings, work)
    elif kind == KIND_DATE32:
        to[0] = b'"'
        to = put_date(to + 1, load32(node.data, row), work)
        to[0] = b'"'
        return to + 1
    elif kind == KIND_DECIMAL:
        return put_decimal(to, node, row)
    elif kind == KIND_UINT64:
        return put_unsigned(to, <uint64_t> load64(node.data, row))
    elif kind == KIND_FLOAT:
        return put_float(to, load_float(node.data, row))
    elif kind == KIND_HALF:
        memcpy(&half, node.data + 2 * row, 2)
        return put_float(to, float_of_half(half))
    elif kind == KIND_DATE64:
        return put_date64(to, load64(node.data, row), work)
    elif kind == KIND_TIME:
        return put_time(to, node, get_integer(node, row))
    elif kind == KIND_DURATION:
        return put_duration(to, get_integer(node, row), per_second(node.unit))
    elif kind == KIND_DAY_TIME:
        return put_duration(to, load32(node.data, 2 * row) * <int64_t> 86400000 + load32(node.data, 2 * row + 1), 1000)
    elif kind == KIND_MONTHS:
        return put_months(to, load32(node.data, row))
    elif kind == KIND_MONTH_DAY_NANO:
        return put_interval(
            to, load32(node.data, 4 * row), load32(node.data, 4 * row + 1), load64(node.data, 2 * row + 1)
        )
    return put_signed(to, get_integer(node, row))


# ---- integers

cdef inline char* put_two(char* to, int64_t number) noexcept nogil:
    memcpy(to, fp_pairs + 2 * number, 2)
    return to + 2


cdef inline uint64_t eight_digits(uint64_t number) noexcept nogil:
    """The digits of a number below 10^8, one per byte, the first in the lowest.

    Each step splits all parts at once: into 2 of 4 digits, 4 of 2, 8 of 1. The factors are reciprocals of 100 and 10
    that are exact for what a part can be.
    """
    cdef uint64_t parts, quotients
    parts = number // 10000
    parts |= (number - 10000 * parts) << 32
    quotients = ((parts * 10486) >> 20) & 0x0000007f0000007fULL
    parts = quotients | (parts - 100 * quotients) << 16
    quotients = ((parts * 103) >> 10) & 0x000f000f000f000fULL
    return quotients | (parts - 10 * quotients) << 8


cdef inline char* put_small(char* to, uint64_t number) noexcept nogil:
    """A number below 10^8; writes 8 bytes, of which only those before the end that it returns count."""
    cdef uint64_t digits = eight_digits(number)
    cdef int zeros = fp_ctz(digits | 1ULL << 56) & ~7  # bits of the zeros in front, but for the last digit
    digits = (digits + 0x3030303030303030ULL) >> zeros
    memcpy(to, &digits, 8)
    return to + 8 - (zeros >> 3)


cdef inline char* put_eight(char* to, uint64_t number) noexcept nogil:
    """A number below 10^8 with zeros in front."""
    cdef uint64_t digits = eight_digits(number) + 0x3030303030303030ULL
    memcpy(to, &digits, 8)
    return to + 8


cdef char* put_large(char* to, uint64_t number) noexcept nogil:
    cdef uint64_t upper = number // 100000000ULL, top = upper // 100000000ULL
    if top:
        to = put_eight(put_small(to, top), upper - top * 100000000ULL)
    else:
        to = put_small(to, upper)
    return put_eight(to, number - upper * 100000000ULL)


cdef inline char* put_unsigned(char* to, uint64_t number) noexcept nogil:
    """Writes up to 24 bytes, of which only those before the end that it returns count."""
    if number < 100000000ULL:
        return put_small(to, number)
    return put_large(to, number)


cdef inline void put_digits(char* to, uint64_t number, int count) noexcept nogil:
    """The last `count` digits of a number, with zeros in front."""
    while count >= 2:
        count -= 2
        memcpy(to + count, fp_pairs + 2 * (number % 100), 2)
        number //= 100
    if count:
        to[0] = <char> (c'0' + number % 10)


cdef inline char* put_signed(char* to, int64_t number) noexcept nogil:
    if number < 0:
        to[0] = b"-"
        return put_unsigned(to + 1, 0 - <uint64_t> number)
    return put_unsigned(to, <uint64_t> number)


cdef inline int64_t floor_div(int64_t number, int64_t by) noexcept nogil:
    """Rounded down; C rounds towards zero."""
    cdef int64_t whole = number // by
    return whole - (number - whole * by < 0)


# ---- floating point

cdef char* put_double(char* to, double number) noexcept nogil:
    """With up to six digits behind the point, as most numbers that people make have, it needs no search.

    If the quotient of n and 10^6 is the number, then n has its digits: of numbers with 15 digits or fewer no two are the
    same double.
    """
    cdef char text[40]
    cdef int64_t millionths
    cdef uint64_t digits, after
    cdef double size = fabs(number)
    if 1e-3 <= size < 1e7:
        millionths = <int64_t> (size * 1e6 + 0.5)
        if <double> millionths / 1e6 == size:
            to[0] = b"-"
            to += number < 0
            to = put_small(to, <uint64_t> millionths // 1000000)
            to[0] = b"."
            digits = eight_digits(<uint64_t> millionths % 1000000 * 100)
            after = digits + 0x3030303030303030ULL
            memcpy(to + 1, &after, 8)
            return to + 2 + (fp_highest(digits | 1) >> 3)  # without the zeros at the end, but for one behind the point
    elif not isfinite(number):
        return put_special(to, number)
    return put_java(to, text, fp_shortest64(text, number), number)


cdef char* put_float(char* to, float number) noexcept nogil:
    cdef char text[40]
    if not isfinite(number):
        return put_special(to, number)
    return put_java(to, text, fp_shortest32(text, number), number)


cdef char* put_special(char* to, double number) noexcept nogil:
    cdef const char* text = b'"NaN"' if isnan(number) else (b'"Infinity"' if number > 0 else b'"-Infinity"')
    cdef size_t size = strlen(text)
    memcpy(to, text, size)
    return to + size


cdef char* put_java(char* to, char* text, const char* end, double number) noexcept nogil:
    """`text`, as -d.ddde-xx, in the layout of Java's Double.toString: a point with a digit on each side, and an exponent
    for what is below 10^-3 or from 10^7 on.

    Java wants two digits at least, and those that are nearest: so 4.9E-324 where one digit would do.
    """
    cdef const char* at = text
    cdef char digits[20]
    cdef int count = 0, exponent = 0, i
    cdef bint negative
    if at[0] == b"-":
        to[0] = b"-"
        to += 1
        at += 1
    if at[1] != b"." and number != 0:
        end = fp_two_digits(text, number)
        at = text + (1 if text[0] == b"-" else 0)
    digits[0] = at[0]
    count = 1
    at += 1
    if at[0] == b".":
        at += 1
        while at[0] != b"e":
            digits[count] = at[0]
            count += 1
            at += 1
    negative = at[1] == b"-"
    at += 2
    while at < end:
        exponent = 10 * exponent + (at[0] - c'0')
        at += 1
    while count > 1 and digits[count - 1] == b"0":
        count -= 1
    if negative:
        exponent = -exponent
    if -3 <= exponent < 7:
        if exponent < 0:
            memcpy(to, b"0.00", 4)
            to += 1 - exponent
            memcpy(to, digits, 20)
            return to + count
        for i in range(exponent + 1):
            to[i] = digits[i] if i < count else c"0"
        to += exponent + 1
        to[0] = b"."
        to += 1
        if count <= exponent + 1:
            to[0] = b"0"
            return to + 1
        memcpy(to, digits + exponent + 1, count - exponent - 1)
        return to + count - exponent - 1
    to[0] = digits[0]
    to[1] = b"."
    to += 2
    if count == 1:
        to[0] = b"0"
        to += 1
    else:
        memcpy(to, digits + 1, count - 1)
        to += count - 1
    to[0] = b"E"
    return put_signed(to + 1, exponent)


cdef float float_of_half(uint16_t half) noexcept nogil:
    """The same number in 32 bits."""
    cdef uint32_t sign = (<uint32_t> half & 0x8000) << 16, exponent = (half >> 10) & 31, fraction = half & 0x3ff, bits
    cdef float number
    if exponent == 0:
        number = fraction * <float> 5.9604644775390625e-08  # 2 ** -24
        return -number if sign else number
    bits = sign | (0x7f800000 if exponent == 31 else (exponent + 112) << 23) | fraction << 13
    memcpy(&number, &bits, 4)
    return number


# ---- decimals

cdef char* put_decimal(char* to, const node_t* node, int64_t row) noexcept nogil:
    """As java.math.BigDecimal.toString(): plain, but with an exponent for what is below 10^-6, or has no digit behind
    the point and zeros in front of it (a negative scale)."""
    cdef uint64_t limbs[4]
    cdef uint64_t chunk, rest
    cdef fp_uint128 part
    cdef char digits[112]  # 78 of the largest number, from behind; then room for copies of a fixed size
    cdef int64_t small = 0
    cdef int i, used = 1, at = 80, count
    cdef int64_t point  # a scale has 32 bits
    cdef bint negative
    if node.width <= 8:
        small = load32(node.data, row) if node.width == 4 else load64(node.data, row)
        negative = small < 0
        limbs[0] = 0 - <uint64_t> small if negative else <uint64_t> small
    else:
        limbs[0] = <uint64_t> load64(node.data, 2 * row)
        limbs[1] = <uint64_t> load64(node.data, 2 * row + 1)
        used = 2
        if node.width == 32:
            memcpy(limbs, node.data + 32 * row, 32)
            used = 4
        negative = <int64_t> limbs[used - 1] < 0
        if negative:
            chunk = 1  # the carry of -x = ~x + 1
            for i in range(used):
                limbs[i] = ~limbs[i] + chunk
                chunk = chunk and limbs[i] == 0
        while used > 1 and limbs[used - 1] == 0:
            used -= 1
    to[0] = b"-"
    to += negative
    if used == 1 and node.scale == 2:  # money
        to = put_unsigned(to, limbs[0] // 100)
        to[0] = b"."
        return put_two(to + 1, <int64_t> (limbs[0] % 100))
    while used > 1:  # 19 digits at a time, from behind
        rest = 0
        for i in range(used - 1, -1, -1):
            part = (<fp_uint128> rest << 64) | limbs[i]
            limbs[i] = <uint64_t> (part // FP_TEN_19)
            rest = <uint64_t> (part % FP_TEN_19)
        at -= 19
        put_digits(digits + at, rest, 19)
        while used > 1 and limbs[used - 1] == 0:
            used -= 1
    if at == 80:
        at = 0
        count = <int> (put_unsigned(digits, limbs[0]) - digits)
    else:  # up to 20 digits more, before those that are there; the first is no zero
        while limbs[0]:
            at -= 1
            digits[at] = <char> (c'0' + limbs[0] % 10)
            limbs[0] //= 10
        while digits[at] == b"0":
            at += 1
        count = 80 - at
    point = <int64_t> count - node.scale  # digits in front of the point
    if node.scale > 0 and count <= 20 and point > 0:  # what most are
        memcpy(to, digits + at, 24)
        to[point] = b"."
        memcpy(to + point + 1, digits + at + point, 24)
        return to + count + 1
    if node.scale == 0:
        memcpy(to, digits + at, count)
        return to + count
    if node.scale > 0 and point > -6:
        if point > 0:
            memcpy(to, digits + at, point)
            to[point] = b"."
            memcpy(to + point + 1, digits + at + point, node.scale)
            return to + count + 1
        memcpy(to, b"0.00000", 7)
        to += 2 - point
        memcpy(to, digits + at, count)
        return to + count
    to[0] = digits[at]
    to += 1
    if count > 1:
        to[0] = b"."
        memcpy(to + 1, digits + at + 1, count - 1)
        to += count
    if point == 1:
        return to
    to[0] = b"E"
    if point > 1:
        to[1] = b"+"
        to += 1
    return put_signed(to + 1, point - 1)


# ---- dates and times

cdef inline char* put_date(char* to, int64_t days, work_t* work) noexcept nogil:
    """2024-02-29; writes up to 24 bytes."""
    cdef date_t* date = &work.dates[days & (DATES - 1)]
    if date.day != days or date.size == 0:
        date.day = days
        date.size = put_civil(date.text, days) - date.text
    memcpy(to, date.text, 24)
    return to + date.size


cdef char* put_civil(char* to, int64_t days) noexcept nogil:
    """Days since 1970 as year, month and day of the Gregorian calendar, which is taken to have been there for ever.

    A year is counted from March, so that the day that leap years have more is its last; 400 years have 146097 days.
    """
    cdef int64_t shifted = days + 719468  # since the first of March of the year 0
    cdef int64_t era = floor_div(shifted, 146097)
    cdef uint32_t day = <uint32_t> (shifted - era * 146097)
    cdef uint32_t passed = (day - day // 1460 + day // 36524 - day // 146096) // 365
    cdef uint32_t month
    cdef int64_t year
    day -= 365 * passed + passed // 4 - passed // 100
    month = (5 * day + 2) // 153
    day -= (153 * month + 2) // 5
    day += 1
    month = month + 3 if month < 10 else month - 9
    year = 400 * era + passed + (month <= 2)
    if 0 <= year <= 9999:
        put_two(to, year // 100)
        put_two(to + 2, year % 100)
        to += 4
    else:
        to[0] = b"+" if year > 0 else b"-"
        year = year if year > 0 else -year
        if year < 1000:
            put_digits(to + 1, <uint64_t> year, 4)
            to += 5
        else:
            to = put_unsigned(to + 1, <uint64_t> year)
    to[0] = b"-"
    to = put_two(to + 1, month)
    to[0] = b"-"
    return put_two(to + 1, day)


cdef char* put_date64(char* to, int64_t milliseconds, work_t* work) noexcept nogil:
    if milliseconds // 1000 > MOST_SECONDS or milliseconds // 1000 < -MOST_SECONDS:
        return NULL
    to[0] = b'"'
    to = put_date(to + 1, floor_div(milliseconds, 86400000), work)
    to[0] = b'"'
    return to + 1


cdef inline char* put_clock(char* to, uint32_t seconds) noexcept nogil:
    """Seconds of a day as 12:34:56."""
    to = put_two(to, seconds // 3600)
    to[0] = b":"
    to = put_two(to + 1, seconds // 60 % 60)
    to[0] = b":"
    return put_two(to + 1, seconds % 60)


cdef inline char* put_fraction(char* to, int64_t part, int64_t whole) noexcept nogil:
    """`part` of `whole`, a power of ten, as .5: nothing if it is 0, and no zeros at the end."""
    if part == 0:
        return to
    to[0] = b"."
    while part:
        to += 1
        whole //= 10
        to[0] = <char> (c'0' + part // whole)
        part %= whole
    return to + 1


cdef int64_t offset_at(const settings_t* settings, int64_t seconds) noexcept nogil:
    """The offset of the zone at a time, in seconds."""
    cdef int64_t low = 0, high = settings.changes, middle
    if high and seconds >= settings.cycle_from + CYCLE_SECONDS:
        seconds = settings.cycle_from + (seconds - settings.cycle_from) % CYCLE_SECONDS
    while low < high:
        middle = (low + high) >> 1
        if settings.starts[middle] <= seconds:
            low = middle + 1
        else:
            high = middle
    return settings.offsets[low - 1] if low else settings.offset


cdef inline char* put_timestamp(
    char* to, const node_t* node, int64_t number, const settings_t* settings, work_t* work
) noexcept nogil:
    cdef int64_t seconds, part, days, offset = 0  # part: nanoseconds
    cdef bint zoned = node.zone[0] != 0
    cdef uint64_t digits
    if node.unit == UNIT_MICRO:  # a constant divisor: much faster than one that is not known before
        seconds = floor_div(number, 1000000)
        part = (number - seconds * 1000000) * 1000
    else:
        seconds = floor_div(number, per_second(node.unit))
        if not -MOST_SECONDS <= seconds <= MOST_SECONDS:
            return NULL
        part = (number - seconds * per_second(node.unit)) * (1000000000 // per_second(node.unit))
    if zoned:
        offset = offset_at(settings, seconds)
        seconds += offset
    days = floor_div(seconds, 86400)
    to[0] = b'"'
    to = put_date(to + 1, days, work)
    to[0] = b"T"
    to = put_clock(to + 1, <uint32_t> (seconds - days * 86400))
    if settings.fraction:
        to[0] = b"."
        digits = eight_digits(<uint64_t> part // 10) + 0x3030303030303030ULL
        memcpy(to + 1, &digits, 8)
        to[9] = <char> (c'0' + part % 10)
        to += 1 + settings.fraction
    if zoned:
        to = put_offset(to, offset)
    to[0] = b'"'
    return to + 1


cdef char* put_offset(char* to, int64_t offset) noexcept nogil:
    """Z, +01:00 or +00:53:28"""
    if offset == 0:
        to[0] = b"Z"
        return to + 1
    to[0] = b"+" if offset > 0 else b"-"
    offset = offset if offset > 0 else -offset
    to = put_two(to + 1, offset // 3600)
    to[0] = b":"
    to = put_two(to + 1, offset // 60 % 60)
    if offset % 60:
        to[0] = b":"
        to = put_two(to + 1, offset % 60)
    return to


cdef char* put_time(char* to, const node_t* node, int64_t number) noexcept nogil:
    cdef int64_t unit = per_second(node.unit)
    if not 0 <= number < 86400 * unit:
        return NULL
    to[0] = b'"'
    to = put_clock(to + 1, <uint32_t> (number // unit))
    to = put_fraction(to, number % unit, unit)
    to[0] = b'"'
    return to + 1


cdef char* put_duration(char* to, int64_t number, int64_t unit) noexcept nogil:
    """As Spark's day-time intervals: "INTERVAL '-1 02:03:04.5' DAY TO SECOND"."""
    cdef uint64_t size = 0 - <uint64_t> number if number < 0 else <uint64_t> number
    cdef uint64_t seconds = size // <uint64_t> unit
    memcpy(to, b"\"INTERVAL '", 11)
    to += 11
    if number < 0:
        to[0] = b"-"
        to += 1
    to = put_unsigned(to, seconds // 86400)
    to[0] = b" "
    to = put_clock(to + 1, <uint32_t> (seconds % 86400))
    to = put_fraction(to, <int64_t> (size % <uint64_t> unit), unit)
    memcpy(to, b"' DAY TO SECOND\"", 16)
    return to + 16


cdef char* put_months(char* to, int64_t months) noexcept nogil:
    """As Spark's year-month intervals: "INTERVAL '-1-2' YEAR TO MONTH"."""
    cdef int64_t size = -months if months < 0 else months
    memcpy(to, b"\"INTERVAL '", 11)
    to += 11
    if months < 0:
        to[0] = b"-"
        to += 1
    to = put_signed(to, size // 12)
    to[0] = b"-"
    to = put_signed(to + 1, size % 12)
    memcpy(to, b"' YEAR TO MONTH\"", 16)
    return to + 16


cdef inline char* put_part(char* to, int64_t number, const char* name) noexcept nogil:
    cdef size_t size = strlen(name)
    if number == 0:
        return to
    to = put_signed(to, number)
    memcpy(to, name, size)
    return to + size


cdef char* put_interval(char* to, int64_t months, int64_t days, int64_t nanoseconds) noexcept nogil:
    """As Spark's calendar intervals: "1 years 2 months 25 days 5 hours 6 minutes 7.8 seconds", or "0 seconds"."""
    cdef int64_t rest = nanoseconds % 60000000000LL, minutes = nanoseconds // 60000000000LL
    cdef char* start = to
    to[0] = b'"'
    to = put_part(to + 1, months // 12, b" years ")
    to = put_part(to, months % 12, b" months ")
    to = put_part(to, days, b" days ")
    to = put_part(to, minutes // 60, b" hours ")
    to = put_part(to, minutes % 60, b" minutes ")
    if rest or to == start + 1:
        if rest < 0:
            to[0] = b"-"
            to += 1
            rest = -rest
        to = put_signed(to, rest // 1000000000)
        to = put_fraction(to, rest % 1000000000, 1000000000)
        memcpy(to, b" seconds ", 9)
        to += 9
    (to - 1)[0] = b'"'  # in place of the last space
    return to


# ---- text

cdef inline uint64_t specials(uint64_t word) noexcept nogil:
    """Not 0 if one of eight bytes is a control, a quote or a backslash.

    x - n has the highest bit of a byte set if the byte was below n, as long as no byte before it was; and so the first is
    always found.
    """
    cdef uint64_t ones = 0x0101010101010101ULL, quote = word ^ (ones * 0x22), slash = word ^ (ones * 0x5c)
    return (
        ((word - ones * 0x20) & ~word) | ((quote - ones) & ~quote) | ((slash - ones) & ~slash)
    ) & 0x8080808080808080ULL


cdef inline char* put_short(char* to, const char* data, int64_t size) noexcept nogil:
    """put_string for up to 16 bytes where 16 can be read, and there is room for them: without a loop or a branch that
    depends on the size. What is behind the text counts as spaces. NULL if it is not as simple as that."""
    cdef uint64_t first, second, mask, spaces = 0x2020202020202020ULL
    memcpy(&first, data, 8)
    memcpy(&second, data + 8, 8)
    memcpy(&mask, fp_masks + 16 - size, 8)
    first = (first & mask) | (spaces & ~mask)
    memcpy(&mask, fp_masks + 24 - size, 8)
    second = (second & mask) | (spaces & ~mask)
    if specials(first) | specials(second):
        return NULL
    if (first | second) & 0x8080808080808080ULL and not is_utf8(data, size):
        return NULL
    to[0] = b'"'
    memcpy(to + 1, &first, 8)
    memcpy(to + 9, &second, 8)
    to[size + 1] = b'"'
    return to + size + 2


cdef int put_string(out_t* out, const char* data, int64_t size) noexcept nogil:
    """Quoted, escaped as Jackson does it; OK, NO_MEMORY or BAD_UTF8.

    Eight bytes at a time are looked at and copied; the last eight may overlap those before.
    """
    cdef uint64_t word, seen = 0
    cdef uint32_t half
    cdef int64_t i = 0
    cdef char* to
    if size > INT64_MAX // 8 or out_reserve(out, size + 16):
        return NO_MEMORY
    to = out.data + out.size
    to[0] = b'"'
    to += 1
    if size >= 8:
        while i + 8 <= size:
            memcpy(&word, data + i, 8)
            if specials(word):
                return put_escaped(out, data, size)
            memcpy(to + i, &word, 8)
            seen |= word
            i += 8
        memcpy(&word, data + size - 8, 8)
        if specials(word):
            return put_escaped(out, data, size)
        memcpy(to + size - 8, &word, 8)
        seen |= word
    else:
        word = 0x2020202020202020ULL
        if size >= 4:
            memcpy(&word, data, 4)
            memcpy(&half, data + size - 4, 4)
            word = (word & 0xffffffffULL) | <uint64_t> half << 32
            if specials(word):
                return put_escaped(out, data, size)
            memcpy(to, &word, 4)
            memcpy(to + size - 4, &half, 4)
        elif size:
            memcpy(&word, data, 1)
            memcpy(<char*> &word + 1, data + (size >> 1), 1)
            memcpy(<char*> &word + 2, data + size - 1, 1)
            if specials(word):
                return put_escaped(out, data, size)
            to[0] = data[0]
            to[size >> 1] = data[size >> 1]
            to[size - 1] = data[size - 1]
        seen = word
    if seen & 0x8080808080808080ULL and not is_utf8(data, size):
        return BAD_UTF8
    to[size] = b'"'
    out.size += size + 2
    return OK


cdef int put_escaped(out_t* out, const char* data, int64_t size) noexcept nogil:
    """put_string for a text that has something to escape."""
    cdef int64_t i = 0, stop, room = 6 * size
    cdef uint64_t word, seen = 0
    cdef uint8_t byte
    cdef char* to
    if size > 4096:  # an escape has six bytes at most, but of a long text they should be counted
        room = size
        for i in range(size):
            byte = <uint8_t> data[i]
            room += 5 * (byte < 0x20 or byte == c'"' or byte == c"\\")
        i = 0
    if out_reserve(out, room + 16):
        return NO_MEMORY
    to = out.data + out.size
    to[0] = b'"'
    to += 1
    while i < size:
        if i + 8 <= size:
            memcpy(&word, data + i, 8)
            seen |= word
            if not specials(word):
                memcpy(to, &word, 8)
                to += 8
                i += 8
                continue
        stop = min(i + 8, size)
        while i < stop:
            byte = <uint8_t> data[i]
            i += 1
            to[0] = <char> byte
            to += 1
            if byte < 0x20 or byte == c'"' or byte == c"\\":
                to = put_escape(to - 1, byte)
            seen |= byte
    if seen & 0x8080808080808080ULL and not is_utf8(data, size):
        return BAD_UTF8
    to[0] = b'"'
    out.size = to + 1 - out.data
    return OK


cdef char* put_escape(char* to, uint8_t byte) noexcept nogil:
    to[0] = b"\\"
    if byte == c'"' or byte == c"\\":
        to[1] = <char> byte
    elif byte == c"\n":
        to[1] = b"n"
    elif byte == c"\t":
        to[1] = b"t"
    elif byte == c"\r":
        to[1] = b"r"
    elif byte == c"\b":
        to[1] = b"b"
    elif byte == c"\f":
        to[1] = b"f"
    else:
        memcpy(to + 1, b"u00", 3)
        to[4] = HEX[byte >> 4]
        to[5] = HEX[byte & 15]
        return to + 6
    return to + 2


cdef bint is_utf8(const char* text, int64_t size) noexcept nogil:
    cdef int64_t run, i = 0
    cdef uint64_t word
    while i < size:
        if i + 8 <= size:
            memcpy(&word, text + i, 8)
            word &= 0x8080808080808080ULL
            if word == 0:
                i += 8
                continue
            i += fp_ctz(word) >> 3  # the first byte that is not ASCII
        elif <uint8_t> text[i] < 0x80:
            i += 1
            continue
        run = utf8_run(text + i, size - i)
        if run == 0:
            return False
        i += run
    return True


cdef inline int64_t utf8_run(const char* text, int64_t size) noexcept nogil:
    """How many bytes from the begin on are characters of several bytes, in valid UTF-8; 0 if the first is not."""
    cdef const uint8_t* data = <const uint8_t*> text
    cdef int64_t i = 0
    cdef uint8_t first, second
    while i < size and data[i] >= 0x80:
        first = data[i]
        if i + 2 > size or data[i + 1] & 0xc0 != 0x80:
            return i
        if 0xc2 <= first <= 0xdf:
            i += 2
            continue
        second = data[i + 1]
        if i + 3 > size or data[i + 2] & 0xc0 != 0x80:
            return i
        if 0xe0 <= first <= 0xef:
            # Neither what two bytes could say, nor a surrogate
            if (first == 0xe0 and second < 0xa0) or (first == 0xed and second >= 0xa0):
                return i
            i += 3
            continue
        if i + 4 > size or data[i + 3] & 0xc0 != 0x80 or not 0xf0 <= first <= 0xf4:
            return i
        if (first == 0xf0 and second < 0x90) or (first == 0xf4 and second >= 0x90):
            return i
        i += 4
    return i


cdef int put_base64(out_t* out, const char* text, int64_t size) noexcept nogil:
    cdef const uint8_t* data = <const uint8_t*> text
    cdef uint32_t three
    cdef char* to
    if size > INT64_MAX // 8 or out_reserve(out, size // 3 * 4 + 8):
        return NO_MEMORY
    to = out.data + out.size
    to[0] = b'"'
    to += 1
    while size >= 3:
        three = <uint32_t> data[0] << 16 | <uint32_t> data[1] << 8 | data[2]
        to[0] = BASE64[three >> 18]
        to[1] = BASE64[three >> 12 & 63]
        to[2] = BASE64[three >> 6 & 63]
        to[3] = BASE64[three & 63]
        to += 4
        data += 3
        size -= 3
    if size:
        three = <uint32_t> data[0] << 16 | (<uint32_t> data[1] << 8 if size == 2 else 0)
        to[0] = BASE64[three >> 18]
        to[1] = BASE64[three >> 12 & 63]
        to[2] = BASE64[three >> 6 & 63] if size == 2 else c"="
        to[3] = b"="
        to += 4
    to[0] = b'"'
    out.size = to + 1 - out.data
    return OK
