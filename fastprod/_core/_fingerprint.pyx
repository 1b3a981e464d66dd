"""A fingerprint of many records that does not depend on their order.

Each record is hashed to 64 bits: topic, key, value, headers, partition and timestamp as they were given, nulls told from
empty values. The fingerprint is the number of records and two sums over them, of the hashes and of their scrambled
squares: whoever loses, doubles or changes a record changes the sums, but for one chance in 2^64; whoever shuffles the
records does not.

It tells accidents, not attacks: somebody who wants two sets of records with the same fingerprint can make them.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint64_t

from fastprod._core._columns cimport CELL_NULL, CELL_VALUE, Column, column_get
from fastprod._core._headers cimport HeaderColumn, pack_headers

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    /* Multiplying to 128 bits and folding the halves spreads every bit of both factors over the result. */
    static inline uint64_t fingerprint_fold(uint64_t a, uint64_t b)
    {
        __uint128_t product = (__uint128_t) a * b;
        return (uint64_t) product ^ (uint64_t) (product >> 64);
    }

    /* Goes on from `h` with the length of `data` and its bytes, 16 at a time. size < 0 stands for a null. */
    static uint64_t fingerprint_bytes(uint64_t h, const char *data, int64_t size)
    {
        uint64_t pair[2];
        h = fingerprint_fold(h ^ 0x8bb84b93962eacc9ULL, (uint64_t) size ^ 0x9e3779b97f4a7c15ULL);
        for (; size >= 16; data += 16, size -= 16) {
            memcpy(pair, data, 16);
            h = fingerprint_fold(pair[0] ^ 0xa0761d6478bd642fULL, pair[1] ^ h ^ 0xe7037ed1a0b428dbULL);
        }
        if (size > 0) {
            pair[0] = pair[1] = 0;
            memcpy(pair, data, (size_t) size);
            h = fingerprint_fold(pair[0] ^ 0xa0761d6478bd642fULL, pair[1] ^ h ^ 0xe7037ed1a0b428dbULL);
        }
        return h;
    }
    """
    uint64_t fingerprint_fold(uint64_t a, uint64_t b) noexcept nogil
    uint64_t fingerprint_bytes(uint64_t h, const char* data, int64_t size) noexcept nogil


cdef uint64_t cell(uint64_t h, Column column, int64_t index) noexcept nogil:
    cdef const char* data
    cdef int64_t size
    cdef int kind = column_get(&column.c, index, &data, &size)
    return fingerprint_bytes(h, data, size if kind == CELL_VALUE else -1 if kind == CELL_NULL else -2)


cdef inline uint64_t with_number(uint64_t h, int64_t number) noexcept nogil:
    """A factor of 0 would wipe out `h`, so numbers do not come as they are."""
    return fingerprint_fold(h, <uint64_t> number ^ 0x9e3779b97f4a7c15ULL)


cdef class Fingerprint:
    """Of the records given to `add`, in whatever order and however divided into calls."""

    cdef readonly int64_t rows
    cdef uint64_t plain      # sum of the hashes
    cdef uint64_t scrambled  # sum of their folded squares

    def add(
        self, Column values not None, Column keys not None, Column topics, partitions, timestamps, headers
    ):
        """Adds a block of records, in the form that `fastprod._bulk` makes of bulk calls' arguments."""
        cdef:
            int64_t index, size, count = len(values)
            uint64_t h
            const int32_t[::1] partition
            const int64_t[::1] timestamp
            bint has_partition = partitions is not None, has_timestamp = timestamps is not None
            HeaderColumn header = headers if isinstance(headers, HeaderColumn) else None
            Column packed = None
        for name, column in (
            ("keys", keys), ("topics", topics), ("partitions", partitions), ("timestamps", timestamps), ("headers", headers)
        ):
            if column is not None and len(column) != count:
                raise ValueError(f"{len(column)} {name} for {count} values")
        if has_partition:
            partition = partitions
        if has_timestamp:
            timestamp = timestamps
        if headers is not None and header is None:
            packed = Column([_packed(one) for one in headers], "headers")
        with nogil:
            for index in range(count):
                h = cell(0, values, index)
                h = cell(h, keys, index)
                if topics is not None:
                    h = cell(h, topics, index)
                if has_partition and partition[index] != -1:
                    h = with_number(h ^ 0x589965cc75374cc3ULL, partition[index])
                if has_timestamp and timestamp[index]:
                    h = with_number(h ^ 0x1d8e4e27c47d124fULL, timestamp[index])
                if header is not None:
                    size = header.pack(index, INT32_MAX)
                    if size:
                        h = fingerprint_bytes(h, header.packed, size)
                elif packed is not None:
                    h = headers_cell(h, packed, index)
                h = fingerprint_fold(h ^ 0xeb44accab455d165ULL, 0x2d358dccaa6c78a5ULL)
                self.plain += h
                self.scrambled += fingerprint_fold(h ^ 0xa0761d6478bd642fULL, h ^ 0xe7037ed1a0b428dbULL)
        self.rows += count

    def __str__(self):
        return f"{self.plain:016x}{self.scrambled:016x}"

    def __repr__(self):
        return f"<Fingerprint {self} of {self.rows} records>"


cdef uint64_t headers_cell(uint64_t h, Column packed, int64_t index) noexcept nogil:
    """As for packed Arrow headers: no headers leave no trace."""
    cdef const char* data
    cdef int64_t size
    if column_get(&packed.c, index, &data, &size) == CELL_VALUE:
        return fingerprint_bytes(h, data, size)
    return h


cdef object _packed(headers):
    """None for no headers. Those of a wrong type fail their record, which is not this module's affair."""
    if not headers:
        return None
    try:
        return pack_headers(headers)
    except TypeError:
        return repr(headers)
