"""Rows of a record batch in Avro's binary encoding, without the GIL.

`encoding/_avro_schema.plan` has decided what does not depend on a row, and `Plan` turns its steps into C:

    step_t (what to write)      node_t (where it is: _arrow_tree)      bytes
    record                      STRUCT                                 its fields, one after the other
      long                        INT64                                zigzag varint
      string, branch 1, null 0    STRING                               02, size, UTF-8   or   00
      array                       LIST                                 count, items, 00  or   00
        decimal                     DECIMAL                            size, two's complement, big endian, shortest
      constant                    -                                    the field's default, encoded once

A step finds its node by `column`, below whatever the parent's value turned out to be, so a plan is not bound to a
batch: any number of threads encode with one. A row that does not fit leaves no bytes: what it had written is taken
back, and what was wrong (step, reason, places in lists) becomes the text of the row's error.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport INT32_MAX, INT32_MIN, INT64_MAX, UINT32_MAX
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

from fastprod._core._arrow_tree cimport (
    KIND_DOUBLE, KIND_HALF, KIND_TIME, KIND_UINT64, Tree, get_bool, get_bytes, get_integer, get_list, load32, load64,
    load_double, load_float, node_t, per_second, resolve, tree_of,
)
from fastprod._core._columns cimport Column
from fastprod._core._encoded cimport Encoded, encoded_of, finish_row, out_put, out_reserve, out_t

cdef extern from *:
    """
    /* a * b + c + carry, which never exceeds 128 bits; the low half is returned, the high half is the new carry */
    static inline uint64_t fastprod_mul_add(uint64_t a, uint64_t b, uint64_t c, uint64_t* carry) {
        unsigned __int128 made = (unsigned __int128) a * b + c + *carry;
        *carry = (uint64_t) (made >> 64);
        return (uint64_t) made;
    }
    """
    uint64_t mul_add "fastprod_mul_add"(uint64_t a, uint64_t b, uint64_t c, uint64_t* carry) noexcept nogil


cdef enum:
    OP_NULL
    OP_BOOLEAN
    OP_INT
    OP_LONG
    OP_INT_SCALED
    OP_LONG_SCALED
    OP_FLOAT
    OP_DOUBLE
    OP_BYTES
    OP_STRING
    OP_FIXED
    OP_ENUM
    OP_ARRAY
    OP_MAP
    OP_RECORD
    OP_CONSTANT
    OP_DECIMAL
    OP_UUID        # text, which must be one
    OP_UUID_TEXT   # 16 bytes, written as text
    OP_DURATION    # of a time span: milliseconds only
    OP_INTERVAL    # of months, days and nanoseconds
    OP_RAW         # bytes without their size, as Confluent writes a schema that is just "bytes"

OPS = {
    "null": OP_NULL, "boolean": OP_BOOLEAN, "int": OP_INT, "long": OP_LONG, "int_scaled": OP_INT_SCALED,
    "long_scaled": OP_LONG_SCALED, "float": OP_FLOAT, "double": OP_DOUBLE, "bytes": OP_BYTES, "string": OP_STRING,
    "fixed": OP_FIXED, "enum": OP_ENUM, "array": OP_ARRAY, "map": OP_MAP, "record": OP_RECORD,
    "constant": OP_CONSTANT, "decimal": OP_DECIMAL, "uuid": OP_UUID, "uuid_text": OP_UUID_TEXT,
    "duration": OP_DURATION, "interval": OP_INTERVAL, "raw": OP_RAW,
}

cdef enum:
    WRONG_NULL = 1     # and there is no null in the Avro type
    WRONG_RANGE        # an integer, or a time in Avro's unit
    WRONG_UNIT         # a time between two ticks
    WRONG_DIGITS       # a decimal with too many
    WRONG_FLOAT        # an integer that no float is
    WRONG_SYMBOL
    WRONG_SIZE
    WRONG_UTF8
    WRONG_UUID
    WRONG_DURATION
    WRONG_MEMORY

REASONS = {
    WRONG_NULL: "its Avro type has no null",
    WRONG_RANGE: "out of range",
    WRONG_UNIT: "between two ticks of Avro's unit; say times='truncate' to round down",
    WRONG_DIGITS: "too many digits",
    WRONG_FLOAT: "an integer that this type cannot hold exactly",
    WRONG_SYMBOL: "no symbol of the enum",
    WRONG_SIZE: "another size",
    WRONG_UTF8: "no valid UTF-8",
    WRONG_UUID: "not of the form 8-4-4-4-12",
    WRONG_DURATION: "a duration is three numbers from 0 to 4294967295: months, days, milliseconds",
}

cdef enum:
    DEEPEST = 40  # lists in one another, more than plans have


ctypedef struct symbol_t:
    const char* data  # owned by Plan.owners
    int64_t size      # -1: no entry
    int32_t number

ctypedef struct step_t:
    int op                # OP_*
    int number            # in Plan.steps
    int column            # child of the parent's node
    int branch            # byte to write before a value, -1: no union
    int null              # byte to write for null, -1: null is not allowed
    bint truncate         # times are rounded down
    int64_t multiply      # *_SCALED
    int64_t divide
    int64_t size          # FIXED, DECIMAL: bytes, -1: as many as needed
    bint raised           # DECIMAL: times `power`
    bint limited          # DECIMAL: below `limit`
    uint64_t power[4]     # least significant limb first
    uint64_t limit[4]
    const char* data      # CONSTANT; owned by Plan.owners
    int64_t data_size
    symbol_t* symbols     # ENUM: hash table, owned by the step
    uint64_t mask         # its slots less one
    int64_t count
    step_t* steps         # children, owned by the step

ctypedef struct place_t:
    const node_t* key  # MAP: where its keys are; else NULL
    int64_t row        # MAP: of the key; else the number of the item in its list

ctypedef struct writer_t:
    out_t* out
    char* nulls            # a byte per row, set to 1 for a record without value, or NULL
    int wrong              # WRONG_*, 0 as long as all is well
    const step_t* step     # that failed
    const node_t* node     # where the value is, or NULL for a null
    int64_t row            # of that node
    int depth              # entries of `places`, innermost first
    place_t places[DEEPEST]


cdef inline int fail(writer_t* to, int wrong, const step_t* step, const node_t* node, int64_t row) noexcept nogil:
    to.wrong = wrong
    to.step = step
    to.node = node
    to.row = row
    to.depth = 0
    return -1


cdef inline int within(writer_t* to, const node_t* key, int64_t row) noexcept nogil:
    """On the way back from a failure: in which item of a list it was."""
    if to.depth < DEEPEST:
        to.places[to.depth].key = key
        to.places[to.depth].row = row
        to.depth += 1
    return -1


# ---- numbers. These write without asking: whoever calls has reserved the room.


cdef inline void put_byte(out_t* out, int byte) noexcept nogil:
    out.data[out.size] = <char> byte
    out.size += 1


cdef inline void put_long(out_t* out, int64_t value) noexcept nogil:
    """Zigzag varint, at most 10 bytes."""
    cdef uint64_t rest = (<uint64_t> value << 1) ^ <uint64_t> (value >> 63)
    cdef char* at = out.data + out.size
    while rest > 0x7F:
        at[0] = <char> (rest & 0x7F | 0x80)
        at += 1
        rest >>= 7
    at[0] = <char> rest
    out.size = at + 1 - out.data


cdef inline void put_little32(out_t* out, uint32_t value) noexcept nogil:
    cdef int at
    for at in range(4):
        out.data[out.size + at] = <char> (value >> (8 * at) & 0xFF)
    out.size += 4


cdef inline void put_little64(out_t* out, uint64_t value) noexcept nogil:
    put_little32(out, <uint32_t> (value & 0xFFFFFFFFU))
    put_little32(out, <uint32_t> (value >> 32))


cdef inline int put_sized(out_t* out, const char* data, int64_t size) noexcept nogil:
    """Bytes behind their number; -1 if there is no memory."""
    if out_reserve(out, size + 10):
        return -1
    put_long(out, size)
    memcpy(out.data + out.size, data, size)
    out.size += size
    return 0


cdef int scaled(const step_t* step, int64_t value, int64_t* made) noexcept nogil:
    """A time in Avro's unit; returns 0 or WRONG_*."""
    cdef int64_t rest
    if step.multiply != 1:
        if value > INT64_MAX // step.multiply or value < -(INT64_MAX // step.multiply):
            return WRONG_RANGE
        made[0] = value * step.multiply
        return 0
    made[0] = value // step.divide  # C's division: towards zero
    rest = value % step.divide
    if rest:
        if not step.truncate:
            return WRONG_UNIT
        if rest < 0:
            made[0] -= 1
    return 0


cdef float half_to_float(uint16_t half) noexcept nogil:
    cdef uint32_t sign = <uint32_t> (half & 0x8000) << 16
    cdef uint32_t exponent = half >> 10 & 0x1F
    cdef uint32_t fraction = half & 0x3FF
    cdef uint32_t bits
    cdef float made
    if exponent == 0x1F:
        bits = sign | 0x7F800000U | fraction << 13
    elif exponent:
        bits = sign | (exponent + 112) << 23 | fraction << 13
    elif not fraction:
        bits = sign
    else:  # below the smallest normal half, but not below that of a float
        exponent = 113
        while not fraction & 0x400:
            fraction <<= 1
            exponent -= 1
        bits = sign | exponent << 23 | (fraction & 0x3FF) << 13
    memcpy(&made, &bits, 4)
    return made


cdef inline float read_float(const node_t* node, int64_t row) noexcept nogil:
    cdef uint16_t half
    if node.kind == KIND_HALF:
        memcpy(&half, node.data + 2 * row, 2)
        return half_to_float(half)
    return load_float(node.data, row)


cdef bint is_exact(const node_t* node, int64_t value, bint single, double* made) noexcept nogil:
    """An integer as a double, or as one that is a float too; false if that would change it."""
    made[0] = <double> <uint64_t> value if node.kind == KIND_UINT64 else <double> value
    if single:
        made[0] = <float> made[0]
    if node.kind == KIND_UINT64:
        return made[0] < 18446744073709551616.0 and <uint64_t> made[0] == <uint64_t> value
    return made[0] < 9223372036854775808.0 and <int64_t> made[0] == value


# ---- text


cdef bint is_utf8(const char* text, int64_t size) noexcept nogil:
    cdef const uint8_t* at = <const uint8_t*> text
    cdef const uint8_t* end = at + size
    cdef uint64_t eight
    cdef uint8_t first, second
    cdef int more
    while at < end:
        if end - at >= 8:
            memcpy(&eight, at, 8)
            if not eight & <uint64_t> 0x8080808080808080U:
                at += 8
                continue
        first = at[0]
        at += 1
        if first < 0x80:
            continue
        if 0xC2 <= first <= 0xDF:
            more = 1
        elif 0xE0 <= first <= 0xEF:
            more = 2
        elif 0xF0 <= first <= 0xF4:
            more = 3
        else:
            return False
        if end - at < more:
            return False
        second = at[0]
        # No longer forms of shorter ones, no surrogates, nothing above U+10FFFF
        if (first == 0xE0 and second < 0xA0) or (first == 0xED and second > 0x9F):
            return False
        if (first == 0xF0 and second < 0x90) or (first == 0xF4 and second > 0x8F):
            return False
        while more:
            if at[0] & 0xC0 != 0x80:
                return False
            at += 1
            more -= 1
    return True


cdef inline bint is_dash(int at) noexcept nogil:
    return at == 8 or at == 13 or at == 18 or at == 23


cdef bint is_uuid(const char* text, int64_t size) noexcept nogil:
    cdef int at
    cdef char one
    if size != 36:
        return False
    for at in range(36):
        one = text[at]
        if is_dash(at):
            if one != c"-":
                return False
        elif not (c"0" <= one <= c"9" or c"a" <= one <= c"f" or c"A" <= one <= c"F"):
            return False
    return True


cdef void put_uuid(out_t* out, const char* data) noexcept nogil:
    """16 bytes as text, behind its size."""
    cdef const char* digits = b"0123456789abcdef"
    cdef int at, nibble = 0
    put_long(out, 36)
    for at in range(36):
        if is_dash(at):
            put_byte(out, c"-")
        else:
            put_byte(out, digits[(<uint8_t> data[nibble >> 1] >> (0 if nibble & 1 else 4)) & 15])
            nibble += 1


cdef inline uint64_t hash_of(const char* data, int64_t size) noexcept nogil:
    cdef uint64_t made = 1469598103934665603U
    cdef int64_t at
    for at in range(size):
        made = (made ^ <uint8_t> data[at]) * 1099511628211U
    return made ^ made >> 32


cdef inline int32_t symbol_of(const step_t* step, const char* data, int64_t size) noexcept nogil:
    """The number of a symbol, or -1. The table has a free slot, so this ends."""
    cdef uint64_t at = hash_of(data, size) & step.mask
    while step.symbols[at].size >= 0:
        if step.symbols[at].size == size and memcmp(step.symbols[at].data, data, size) == 0:
            return step.symbols[at].number
        at = (at + 1) & step.mask
    return -1


# ---- decimals: 256 bits as four limbs, the least significant first


cdef inline void negate(uint64_t* limbs) noexcept nogil:
    cdef int at
    cdef bint carry = True
    for at in range(4):
        limbs[at] = ~limbs[at] + carry
        carry = carry and limbs[at] == 0


cdef bint raise_by(uint64_t* limbs, const uint64_t* power) noexcept nogil:
    """Multiplies in place; false if the product needs more than 255 bits."""
    cdef uint64_t made[8]
    cdef uint64_t carry
    cdef int low, high
    memset(made, 0, sizeof(made))
    for low in range(4):
        carry = 0
        for high in range(4):
            made[low + high] = mul_add(limbs[low], power[high], made[low + high], &carry)
        made[low + 4] = carry
    memcpy(limbs, made, 32)
    return not (made[4] | made[5] | made[6] | made[7] | made[3] >> 63)


cdef inline bint is_below(const uint64_t* limbs, const uint64_t* limit) noexcept nogil:
    cdef int at
    for at in range(3, -1, -1):
        if limbs[at] != limit[at]:
            return limbs[at] < limit[at]
    return False


cdef int write_decimal(writer_t* to, const step_t* step, const node_t* node, int64_t row) noexcept nogil:
    cdef uint64_t limbs[4]
    cdef uint8_t big[32]
    cdef int64_t low, size
    cdef uint8_t fill
    cdef bint negative
    cdef int at
    if node.kind <= KIND_UINT64 or node.width <= 8:
        if node.kind <= KIND_UINT64:
            low = get_integer(node, row)
        else:
            low = load32(node.data, row) if node.width == 4 else load64(node.data, row)
        negative = low < 0 and node.kind != KIND_UINT64
        limbs[0] = <uint64_t> low
        limbs[1] = limbs[2] = limbs[3] = ~<uint64_t> 0 if negative else 0
    else:
        memcpy(limbs, node.data + node.width * row, node.width)
        if node.width == 16:
            limbs[2] = limbs[3] = ~<uint64_t> 0 if limbs[1] >> 63 else 0
        negative = limbs[3] >> 63
    if step.raised or step.limited:
        if negative:
            negate(limbs)
        if step.raised and not raise_by(limbs, step.power):
            return fail(to, WRONG_DIGITS, step, node, row)
        if step.limited and not is_below(limbs, step.limit):
            return fail(to, WRONG_DIGITS, step, node, row)
        if negative:
            negate(limbs)
            negative = limbs[3] >> 63  # of -0, which is 0
    for at in range(32):
        big[31 - at] = <uint8_t> (limbs[at >> 3] >> (8 * (at & 7)) & 0xFF)
    fill = 0xFF if negative else 0
    at = 0
    while at < 31 and big[at] == fill and (big[at + 1] >> 7) == negative:
        at += 1
    size = 32 - at
    if step.size < 0:
        put_long(to.out, size)
    elif size > step.size:
        return fail(to, WRONG_DIGITS, step, node, row)
    else:
        if out_reserve(to.out, step.size + 32):
            return fail(to, WRONG_MEMORY, step, node, row)
        memset(to.out.data + to.out.size, fill, step.size - size)
        to.out.size += step.size - size
    memcpy(to.out.data + to.out.size, &big[at], size)
    to.out.size += size
    return 0


# ---- values


cdef int write_list(writer_t* to, const step_t* step, const node_t* node, int64_t row) noexcept nogil:
    """One block of all items, as fastavro and Java write it, or none."""
    cdef const node_t* items = &node.children[0]
    cdef const node_t* key = NULL
    cdef const step_t* inner = &step.steps[0]
    cdef int64_t start, count, at
    get_list(node, row, &start, &count)
    if out_reserve(to.out, 11):
        return fail(to, WRONG_MEMORY, step, node, row)
    if count:
        put_long(to.out, count)
        if step.op == OP_MAP:
            key = &items.children[0]
            items = &items.children[1]
            inner = &step.steps[1]
        for at in range(count):
            if key != NULL and write_value(to, &step.steps[0], key, start + at):
                return within(to, NULL, at)
            if write_value(to, inner, items, start + at):
                return within(to, key, at if key == NULL else start + at)
    if out_reserve(to.out, 1):
        return fail(to, WRONG_MEMORY, step, node, row)
    put_byte(to.out, 0)
    return 0


cdef int write_interval(writer_t* to, const step_t* step, const node_t* node, int64_t row) noexcept nogil:
    """Avro's duration: months, days and milliseconds, unsigned and little endian."""
    cdef int32_t months = 0, days = 0
    cdef int64_t rest
    cdef int wrong
    if step.op == OP_INTERVAL:
        months = load32(node.data, 4 * row)
        days = load32(node.data, 4 * row + 1)
        wrong = scaled(step, load64(node.data, 2 * row + 1), &rest)
    else:
        wrong = scaled(step, get_integer(node, row), &rest)
    if wrong:
        return fail(to, wrong, step, node, row)
    if months < 0 or days < 0 or rest < 0 or rest > UINT32_MAX:
        return fail(to, WRONG_DURATION, step, node, row)
    put_little32(to.out, <uint32_t> months)
    put_little32(to.out, <uint32_t> days)
    put_little32(to.out, <uint32_t> rest)
    return 0


cdef inline bint is_beyond_a_day(const node_t* node, int64_t number) noexcept nogil:
    """Whether it is a time of day that there is not: no reader could make anything of it."""
    return node.kind == KIND_TIME and not 0 <= number < 86400 * per_second(node.unit)


cdef int write_value(writer_t* to, const step_t* step, const node_t* field, int64_t row) noexcept nogil:
    """One value; -1 with the reason in `to`, and then some of its bytes may be there."""
    cdef:
        out_t* out = to.out
        const node_t* node
        const node_t* below
        const step_t* inner
        const char* data
        int64_t size, number, at
        double real
        float single
        uint64_t bits
        uint32_t bits32
        int op = step.op, wrong
    if out_reserve(out, 64):  # enough for all that has no size of its own
        return fail(to, WRONG_MEMORY, step, NULL, row)
    node = resolve(field, &row)
    if node == NULL:
        if step.null >= 0:
            put_byte(out, step.null)
        elif op != OP_NULL:
            return fail(to, WRONG_NULL, step, NULL, row)
        return 0
    if step.branch >= 0:
        put_byte(out, step.branch)
    if op == OP_LONG or op == OP_INT:
        number = get_integer(node, row)
        if op == OP_INT:
            if number < INT32_MIN or number > INT32_MAX or (node.kind == KIND_UINT64 and number < 0):
                return fail(to, WRONG_RANGE, step, node, row)
        elif node.kind == KIND_UINT64 and number < 0:
            return fail(to, WRONG_RANGE, step, node, row)
        if is_beyond_a_day(node, number):
            return fail(to, WRONG_RANGE, step, node, row)
        put_long(out, number)
    elif op == OP_STRING or op == OP_BYTES or op == OP_UUID:
        get_bytes(node, row, &data, &size)
        if op == OP_STRING and not is_utf8(data, size):
            return fail(to, WRONG_UTF8, step, node, row)
        if op == OP_UUID and not is_uuid(data, size):
            return fail(to, WRONG_UUID, step, node, row)
        if put_sized(out, data, size):
            return fail(to, WRONG_MEMORY, step, node, row)
    elif op == OP_DOUBLE or op == OP_FLOAT:
        if node.kind <= KIND_UINT64:
            if not is_exact(node, get_integer(node, row), op == OP_FLOAT, &real):
                return fail(to, WRONG_FLOAT, step, node, row)
            single = <float> real
        elif node.kind == KIND_DOUBLE:
            real = load_double(node.data, row)
            single = 0
        else:
            single = read_float(node, row)
            real = single
        if op == OP_DOUBLE:
            memcpy(&bits, &real, 8)
            put_little64(out, bits)
        else:
            memcpy(&bits32, &single, 4)
            put_little32(out, bits32)
    elif op == OP_BOOLEAN:
        put_byte(out, get_bool(node, row))
    elif op == OP_RECORD:
        for at in range(step.count):
            inner = &step.steps[at]
            if inner.op == OP_CONSTANT:
                if out_put(out, inner.data, inner.data_size):
                    return fail(to, WRONG_MEMORY, inner, NULL, row)
            else:
                below = &node.children[inner.column]
                if write_value(to, inner, below, row):
                    return -1
    elif op == OP_LONG_SCALED or op == OP_INT_SCALED:
        wrong = scaled(step, get_integer(node, row), &number)
        if is_beyond_a_day(node, get_integer(node, row)):
            wrong = WRONG_RANGE
        if not wrong and op == OP_INT_SCALED and (number < INT32_MIN or number > INT32_MAX):
            wrong = WRONG_RANGE
        if wrong:
            return fail(to, wrong, step, node, row)
        put_long(out, number)
    elif op == OP_DECIMAL:
        return write_decimal(to, step, node, row)
    elif op == OP_ARRAY or op == OP_MAP:
        return write_list(to, step, node, row)
    elif op == OP_ENUM:
        get_bytes(node, row, &data, &size)
        number = symbol_of(step, data, size)
        if number < 0:
            return fail(to, WRONG_SYMBOL, step, node, row)
        put_long(out, number)
    elif op == OP_FIXED:
        get_bytes(node, row, &data, &size)
        if size != step.size:
            return fail(to, WRONG_SIZE, step, node, row)
        if out_put(out, data, size):
            return fail(to, WRONG_MEMORY, step, node, row)
    elif op == OP_RAW:
        get_bytes(node, row, &data, &size)
        if out_put(out, data, size):
            return fail(to, WRONG_MEMORY, step, node, row)
    elif op == OP_UUID_TEXT:
        get_bytes(node, row, &data, &size)
        put_uuid(out, data)
    elif op == OP_DURATION or op == OP_INTERVAL:
        return write_interval(to, step, node, row)
    return 0


# ---- plans


cdef void split_limbs(object number, uint64_t* limbs):
    cdef int at
    for at in range(4):
        limbs[at] = <uint64_t> (number >> (64 * at) & 0xFFFFFFFFFFFFFFFF)


cdef void free_steps(step_t* steps, int64_t count) noexcept:
    cdef int64_t at
    if steps != NULL:
        for at in range(count):
            free_steps(steps[at].steps, steps[at].count)
            free(steps[at].symbols)
        free(steps)


cdef class Plan:
    """The C form of a step and all below it. Owns its tables; does not change, so threads may share it."""

    cdef step_t* root          # one step
    cdef list steps            # by number, for error texts
    cdef list owners           # bytes that steps point into
    cdef bytes prefix          # begins every row
    cdef bint truncate         # times are rounded down
    cdef int64_t row_bytes     # a guess at the size of a row, from the last batch

    def __cinit__(self, step, bytes prefix, bint truncate):
        self.root = NULL
        self.steps = []
        self.owners = []
        self.prefix = prefix
        self.truncate = truncate
        self.row_bytes = 64
        self.root = self.make([step])

    def __dealloc__(self):
        free_steps(self.root, 1)

    cdef step_t* make(self, list sources) except NULL:
        cdef int64_t at
        cdef step_t* steps = <step_t*> calloc(len(sources), sizeof(step_t))
        if steps == NULL:
            raise MemoryError
        try:
            for at in range(len(sources)):
                self.fill(&steps[at], sources[at])
        except BaseException:
            free_steps(steps, len(sources))
            raise
        return steps

    cdef int fill(self, step_t* step, object source) except -1:
        step.op = OPS[source.op]
        step.number = len(self.steps)
        self.steps.append(source)
        step.column = source.column
        step.branch = 2 * source.branch if source.branch >= 0 else -1  # zigzag: 64 branches in a byte
        step.null = 2 * source.null if source.null >= 0 else -1
        step.truncate = self.truncate
        step.size = source.size
        if step.op == OP_DECIMAL:
            step.raised = source.multiply > 1
            step.limited = 0 < source.limit < 2**255
            split_limbs(source.multiply, step.power)
            split_limbs(source.limit, step.limit)
        else:
            step.multiply = source.multiply
            step.divide = source.divide
        if step.op == OP_CONSTANT:  # also one of no bytes has an address: memcpy wants that
            self.owners.append(source.data)
            step.data = PyBytes_AS_STRING(source.data)
            step.data_size = PyBytes_GET_SIZE(source.data)
        if step.op == OP_ENUM:
            self.fill_symbols(step, source.symbols)
        if source.steps:
            step.steps = self.make(source.steps)
            step.count = len(source.steps)
        return 0

    cdef int fill_symbols(self, step_t* step, list symbols) except -1:
        cdef uint64_t slots = 4, slot, at
        while slots < 2 * <uint64_t> len(symbols) + 1:
            slots *= 2
        step.symbols = <symbol_t*> calloc(slots, sizeof(symbol_t))
        if step.symbols == NULL:
            raise MemoryError
        step.mask = slots - 1
        for at in range(slots):
            step.symbols[at].size = -1
        for number, symbol in enumerate(symbols):
            self.owners.append(symbol)
            slot = hash_of(PyBytes_AS_STRING(symbol), PyBytes_GET_SIZE(symbol)) & step.mask
            while step.symbols[slot].size >= 0:
                slot = (slot + 1) & step.mask
            step.symbols[slot].data = PyBytes_AS_STRING(symbol)
            step.symbols[slot].size = PyBytes_GET_SIZE(symbol)
            step.symbols[slot].number = number
        return 0

    cdef tuple run(self, object batch):
        """All rows of a batch, whose schema must be the plan's; and a byte per row, 1 for a null record, or None."""
        cdef Tree tree = tree_of(batch)
        cdef Encoded encoded = encoded_of(tree.root.length, self.row_bytes)
        cdef writer_t to
        cdef const node_t* node = &tree.root
        cdef bytearray nulls = None
        cdef const char* prefix = PyBytes_AS_STRING(self.prefix)
        cdef int64_t prefix_size = PyBytes_GET_SIZE(self.prefix)
        to.out = &encoded.out
        to.nulls = NULL
        if self.root.column >= 0:  # a schema that is no record: a null is a record without value, as Confluent has it
            node = &tree.root.children[self.root.column]
            nulls = bytearray(tree.root.length)
            to.nulls = PyByteArray_AS_STRING(nulls)
        while encoded.done < encoded.rows:
            to.wrong = 0
            with nogil:
                write_rows(&to, self.root, node, encoded, prefix, prefix_size)
            if to.wrong == WRONG_MEMORY:
                raise MemoryError(f"no memory for row {encoded.done} of {encoded.rows}")
            if to.wrong:
                encoded.reject(self.explain(tree, &to))
        if encoded.rows:
            self.row_bytes = encoded.out.size // encoded.rows + 16
        return encoded, nulls if nulls is not None and 1 in nulls else None

    def array(self, batch, int64_t base=0):
        """A pyarrow.LargeBinaryArray; raises what is wrong with the first bad row, which has its number from `base`."""
        cdef Encoded encoded
        encoded, nulls = self.run(batch)
        made = encoded.to_arrow(base)
        if nulls is None:
            return made
        import numpy
        import pyarrow

        bits = numpy.packbits(numpy.frombuffer(nulls, "u1") == 0, bitorder="little")
        return pyarrow.LargeBinaryArray.from_buffers(
            made.type, len(made), [pyarrow.py_buffer(bits), *made.buffers()[1:]]
        )

    def column(self, batch, str name, int64_t base):
        """A Column, in which bad rows fail alone."""
        cdef Encoded encoded
        cdef Column made
        encoded, nulls = self.run(batch)
        made = encoded.column(name, base)
        if nulls is not None:
            made.owners.append(nulls)
            made.c.mask = <const uint8_t*> PyByteArray_AS_STRING(nulls)
        return made

    cdef object explain(self, Tree tree, const writer_t* to):
        """What is wrong with a row, said behind its number."""
        cdef int at
        step = self.steps[to.step.number]
        places = []
        for at in range(to.depth - 1, -1, -1):
            if to.places[at].key == NULL:
                places.append(to.places[at].row)
            else:
                places.append(tree.cell(to.places[at].key, to.places[at].row))
        value = repr(None if to.node == NULL else tree.cell(to.node, to.row))
        if len(value) > 80:
            value = value[:77] + "..."
        if step.unit:
            value += f" ({step.unit})"
        return ValueError(f"has {step.where(places)} = {value}, which is no Avro {step.type}: {REASONS[to.wrong]}")


cdef int write_rows(
    writer_t* to, const step_t* root, const node_t* node, Encoded encoded, const char* prefix, int64_t prefix_size
) noexcept nogil:
    """Rows up to the end, or to the first that fails: then `to.wrong` says why."""
    cdef int64_t row
    while encoded.done < encoded.rows:
        row = encoded.done
        if to.nulls != NULL and resolve(node, &row) == NULL:
            to.nulls[encoded.done] = 1
        elif out_put(to.out, prefix, prefix_size):
            return fail(to, WRONG_MEMORY, root, NULL, 0)
        elif write_value(to, root, node, encoded.done):
            return -1
        finish_row(encoded)
    return 0
