"""CRC-32 over whole columns of names: the positions that bundles are made of.

The CRC-32 of zlib, Ethernet and Java's `java.util.zip.CRC32` (polynomial 0xedb88320, bits reflected), which Pulsar
hashes topic names with. `tables[k][b]` is what byte b contributes when k more bytes follow it ("slicing", Kounavis and
Berry 2005): up to 16 bytes are looked up side by side, where one table would have each wait for the byte before it.
Names are short, so the last bytes are looked up side by side as well, however many there are.

On x86-64 with carry-less multiplication, columns of Arrow strings need no tables: 16 bytes are one polynomial, folded to
32 bits by multiplying with powers of x modulo the CRC's polynomial (Gopal and others, Intel 2009). Short names are put
behind zeros here, too, so that each takes the same few steps; twice as fast as tables at 13 bytes.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from ._columns cimport CELL_VALUE, COLUMN_OFFSETS32, Column, column_get, column_t, columns_of


cdef extern from * nogil:
    """
    #include <stdint.h>
    #include <string.h>

    #if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    #include <immintrin.h>

    typedef unsigned __int128 fp_block;

    static inline uint64_t fp_load(const unsigned char *at) { uint64_t word; memcpy(&word, at, 8); return word; }

    /* the powers of x, reflected as the CRC is: x^(128+32) and x^(128-32), x^64, the polynomial and its inverse */
    #define FP_X160 0x1751997d0LL
    #define FP_X96  0x0ccaa009eLL
    #define FP_X64  0x163cd6124LL
    #define FP_POLY 0x1db710641LL
    #define FP_INV  0x1f7011641LL

    /* the CRC-32 of a name of 4 bytes or more */
    __attribute__((target("pclmul,sse4.1")))
    static inline uint32_t fp_crc_name(const unsigned char *data, int64_t size) {
        const __m128i fold = _mm_set_epi64x(FP_X96, FP_X160), last = _mm_set_epi64x(0, FP_X64);
        const __m128i reduce = _mm_set_epi64x(FP_INV, FP_POLY), low = _mm_set_epi64x(0xffffffffLL, 0xffffffffLL);
        const uint64_t start = 0xffffffffU;
        __m128i sum, high;
        int head = 16; /* bytes of the first block, which is filled up with zeros in front */
        if (size < 8) {
            uint32_t front, back;
            memcpy(&front, data, 4);
            memcpy(&back, data + size - 4, 4);
            sum = _mm_set_epi64x((int64_t)((((front | (uint64_t)back << (8 * (size - 4))) ^ start) << (8 * (8 - size)))), 0);
            size = 0;
        } else if (size < 16) { /* shifted twice, since a shift by 64 bits would do nothing */
            sum = _mm_set_epi64x((int64_t)(fp_load(data + size - 8) ^ start >> (8 * (size - 8))),
                                 (int64_t)((fp_load(data) ^ start) << (8 * (15 - size)) << 8));
            size = 0;
        } else {
            fp_block first = (fp_load(data) | (fp_block)fp_load(data + 8) << 64) ^ start;
            head = size & 15 ? size & 15 : 16;
            first <<= 8 * (16 - head);
            sum = _mm_set_epi64x((int64_t)(first >> 64), (int64_t)first);
            data += head;
            size -= head;
        }
        if (size) { /* a head of less than 4 bytes leaves a part of the start to the next block */
            __m128i next = _mm_xor_si128(_mm_loadu_si128((const __m128i *)data),
                                         _mm_cvtsi64_si128((int64_t)(start >> (8 * (head < 4 ? head : 4)))));
            for (;;) {
                sum = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(sum, fold, 0x00),
                                                  _mm_clmulepi64_si128(sum, fold, 0x11)), next);
                data += 16;
                size -= 16;
                if (!size) break;
                next = _mm_loadu_si128((const __m128i *)data);
            }
        }
        /* 128 bits to 96, to 64, to 32 */
        sum = _mm_xor_si128(_mm_clmulepi64_si128(sum, fold, 0x10), _mm_srli_si128(sum, 8));
        sum = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(sum, low), last, 0x00), _mm_srli_si128(sum, 4));
        high = _mm_clmulepi64_si128(_mm_and_si128(sum, low), reduce, 0x10);
        high = _mm_clmulepi64_si128(_mm_and_si128(high, low), reduce, 0x00);
        return ~(uint32_t)_mm_extract_epi32(_mm_xor_si128(sum, high), 1);
    }

    static int fp_can_multiply(void) {
        return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
    }

    /* stops at a name of less than 4 bytes, and says how many are done */
    __attribute__((target("pclmul,sse4.1")))
    static int64_t fp_crc_names(const char *data, const int32_t *offsets, int64_t from, int64_t count, uint32_t *out) {
        for (; from < count && offsets[from + 1] - offsets[from] >= 4; from++)
            out[from] = fp_crc_name((const unsigned char *)data + offsets[from], offsets[from + 1] - offsets[from]);
        return from;
    }
    #else
    static int fp_can_multiply(void) { return 0; }
    static int64_t fp_crc_names(const char *data, const int32_t *offsets, int64_t from, int64_t count, uint32_t *out) {
        return from;
    }
    #endif
    """
    int fp_can_multiply()
    int64_t fp_crc_names(const char* data, const int32_t* offsets, int64_t start, int64_t count, uint32_t* out)


cdef enum:
    SLICES = 16  # 16 KB of tables: half of the smallest first-level cache in use

cdef uint32_t[SLICES][256] tables


cdef void fill_tables() noexcept nogil:
    cdef int byte, k
    cdef uint32_t value
    for byte in range(256):
        value = byte
        for k in range(8):
            value = (value >> 1) ^ (0xedb88320U if value & 1 else 0)
        tables[0][byte] = value
    for k in range(1, SLICES):
        for byte in range(256):
            value = tables[k - 1][byte]
            tables[k][byte] = (value >> 8) ^ tables[0][value & 0xff]


fill_tables()
cdef bint multiply = fp_can_multiply()  # whether this machine multiplies without carries


cdef inline uint64_t word_at(const uint8_t* data) noexcept nogil:
    """Eight bytes, the first one lowest."""
    # Compilers make one unaligned load of this, or a load and a swap on big-endian machines
    return (
        <uint64_t> data[0] | <uint64_t> data[1] << 8 | <uint64_t> data[2] << 16 | <uint64_t> data[3] << 24
        | <uint64_t> data[4] << 32 | <uint64_t> data[5] << 40 | <uint64_t> data[6] << 48 | <uint64_t> data[7] << 56
    )


cdef inline uint32_t eight(uint64_t word, int after) noexcept nogil:
    """What eight bytes contribute when `after` more follow them."""
    return (
        tables[after + 7][word & 0xff] ^ tables[after + 6][(word >> 8) & 0xff]
        ^ tables[after + 5][(word >> 16) & 0xff] ^ tables[after + 4][(word >> 24) & 0xff]
        ^ tables[after + 3][(word >> 32) & 0xff] ^ tables[after + 2][(word >> 40) & 0xff]
        ^ tables[after + 1][(word >> 48) & 0xff] ^ tables[after][word >> 56]
    )


cdef inline uint32_t half_at(const uint8_t* data) noexcept nogil:
    return data[0] | <uint32_t> data[1] << 8 | <uint32_t> data[2] << 16 | <uint32_t> data[3] << 24


cdef inline uint64_t short_word(const uint8_t* data, int64_t size) noexcept nogil:
    """One to seven bytes, the first one lowest. Loads overlap, so that no branch depends on the exact size."""
    if size >= 4:
        return half_at(data) | <uint64_t> half_at(data + size - 4) << (8 * (size - 4))
    return data[0] | <uint64_t> data[size >> 1] << (8 * (size >> 1)) | <uint64_t> data[size - 1] << (8 * (size - 1))


cdef inline uint32_t crc32_bytes(const uint8_t* data, int64_t size) noexcept nogil:
    cdef:
        uint32_t crc = 0xffffffffU
        int64_t left = size
        uint64_t word
    while left >= 16:
        crc = eight(crc ^ word_at(data), 8) ^ eight(word_at(data + 8), 0)
        data += 16
        left -= 16
    # What is left is put behind zeros, which contribute nothing
    if left > 8:
        word = (crc ^ word_at(data)) << (8 * (16 - left))
        crc = eight(word, 8) ^ eight(word_at(data + left - 8) ^ <uint64_t> crc >> (8 * (left - 8)), 0)
    elif left == 8:
        crc = eight(crc ^ word_at(data), 0)
    elif left:
        word = word_at(data + left - 8) >> (8 * (8 - left)) if size >= 8 else short_word(data, left)
        crc = eight((crc ^ word) << (8 * (8 - left)), 0) ^ <uint32_t> (<uint64_t> crc >> (8 * left))
    return ~crc


cdef int64_t hash_column(const column_t* names, uint32_t* positions) noexcept nogil:
    """The CRC-32 of every name; returns the index of the first that is null, -1 if none is."""
    cdef:
        const char* data
        int64_t index, size
    if names.kind == COLUMN_OFFSETS32 and names.validity == NULL and names.mask == NULL:
        # Most columns are such, and looking at each name's kind takes half as long as hashing it
        index = 0
        while index < names.length:
            if multiply:
                index = fp_crc_names(names.data, names.offsets32, index, names.length, positions)
                if index == names.length:
                    break
            size = names.offsets32[index + 1] - names.offsets32[index]
            positions[index] = crc32_bytes(<const uint8_t*> names.data + names.offsets32[index], size)
            index += 1
        return -1
    for index in range(names.length):
        if column_get(names, index, &data, &size) != CELL_VALUE:
            return index
        positions[index] = crc32_bytes(<const uint8_t*> data, size)
    return -1


def crc32_many(names, str what="name"):
    """The CRC-32 of every name of a column, as uint32; errors call the column `what`."""
    cdef:
        list columns = columns_of(names, what, True, None)
        int64_t total = 0, start = 0, null
        uint32_t[::1] positions
        Column column
    import numpy

    for column in columns:
        total += column.c.length
    result = numpy.empty(total, dtype=numpy.uint32)
    positions = result
    for column in columns:
        if column.c.length:
            with nogil:
                null = hash_column(&column.c, &positions[start])
            if null >= 0:
                raise ValueError(f"{what} at index {start + null} is null")
            start += column.c.length
    return result
