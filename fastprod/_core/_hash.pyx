"""Kafka's key hash, over single keys and whole columns.

MurmurHash2 by Austin Appleby, 32 bits, in the variant of Kafka's Java client: seed 0x9747b28c, four bytes a
round read as little endian, the result taken as a signed int. A key's partition is that hash without its
sign bit, modulo the number of partitions. Every Java producer places keys in this way, so one bit of
difference here would part a key's records from those already in the topic.
"""

from cpython.buffer cimport (
    PyBUF_CONTIG_RO, PyBUF_FORMAT, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
)
from libc.stdint cimport INT32_MAX, uint32_t, uint8_t
from libc.string cimport strchr

from ._columns cimport CELL_VALUE, Column, column_get, column_t, columns_of, is_numpy

import operator


cdef enum:
    RELEASE_FROM = 16384  # bytes: some microseconds of hashing, beside which giving up the GIL is nothing


cdef int32_t murmur2_bytes(const unsigned char* data, int64_t size) noexcept nogil:
    cdef uint32_t m = 0x5bd1e995U, h = 0x9747b28cU ^ <uint32_t> size, k
    cdef int64_t left = size
    while left >= 4:
        # Compilers make one unaligned load of this, or a load and a swap on big-endian machines
        k = data[0] | <uint32_t> data[1] << 8 | <uint32_t> data[2] << 16 | <uint32_t> data[3] << 24
        k *= m
        k ^= k >> 24
        k *= m
        h *= m
        h ^= k
        data += 4
        left -= 4
    if left:
        if left == 3:
            h ^= <uint32_t> data[2] << 16
        if left >= 2:
            h ^= <uint32_t> data[1] << 8
        h ^= data[0]
        h *= m
    h ^= h >> 13
    h *= m
    h ^= h >> 15
    return <int32_t> h


cdef int64_t hash_column(const column_t* keys, int32_t* hashes) noexcept nogil:
    """Hash every key, 0 for a null; returns the number of nulls."""
    cdef:
        const char* data
        int64_t index, size, nulls = 0
    for index in range(keys.length):
        if column_get(keys, index, &data, &size) == CELL_VALUE:
            hashes[index] = murmur2_bytes(<const unsigned char*> data, size)
        else:
            hashes[index] = 0
            nulls += 1
    return nulls


cdef void partition_column(const column_t* keys, int32_t partitions, int32_t* chosen) noexcept nogil:
    """The partition of every key, -1 for a null."""
    cdef:
        const char* data
        int64_t index, size
    for index in range(keys.length):
        chosen[index] = -1
        if column_get(keys, index, &data, &size) == CELL_VALUE:
            chosen[index] = partition_of_hash(murmur2_bytes(<const unsigned char*> data, size), partitions)


cdef void null_column(const column_t* keys, uint8_t* nulls) noexcept nogil:
    cdef:
        const char* data
        int64_t index, size
    for index in range(keys.length):
        nulls[index] = column_get(keys, index, &data, &size) != CELL_VALUE


cdef int64_t total_length(list columns) except -1:
    cdef Column column
    cdef int64_t total = 0
    for column in columns:
        total += column.c.length
    return total


def murmur2(key):
    """Kafka's murmur2 of one key (bytes, str as UTF-8, or any contiguous buffer), signed as in Java."""
    cdef:
        Py_buffer view
        int32_t hashed
    if isinstance(key, str):
        key = key.encode()
    elif not PyObject_CheckBuffer(key) or (
        is_numpy(key, "generic") and not isinstance(key, bytes) and not is_numpy(key, "void")  # as in Column
    ):
        raise TypeError(f"key must be bytes, str or a buffer, not {type(key).__name__}")
    PyObject_GetBuffer(key, &view, PyBUF_CONTIG_RO | PyBUF_FORMAT)
    try:
        if view.format != NULL and strchr(view.format, b"O") != NULL:
            raise TypeError("key must hold bytes, not Python objects")
        if view.len > INT32_MAX:
            raise ValueError(f"key is {view.len} bytes long, over the limit of {INT32_MAX} bytes")
        if view.len < RELEASE_FROM:
            hashed = murmur2_bytes(<const unsigned char*> view.buf, view.len)
        else:
            with nogil:
                hashed = murmur2_bytes(<const unsigned char*> view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return hashed


def murmur2_many(keys, mask=None):
    """Kafka's murmur2 of every key of a column, as int32.

    No number can stand for a null, since every int32 is some key's hash: with nulls among the keys the
    result is a `numpy.ma.MaskedArray` that masks them (0 beneath, fill value 0), without any a plain array.
    """
    cdef:
        list columns = columns_of(keys, "key", True, mask)
        int64_t total = total_length(columns), start = 0, nulls = 0
        int32_t[::1] hashes
        uint8_t[::1] is_null
        Column column
    import numpy

    result = numpy.empty(total, dtype=numpy.int32)
    hashes = result
    for column in columns:
        if column.c.length:
            with nogil:
                nulls += hash_column(&column.c, &hashes[start])
            start += column.c.length
    if not nulls:
        return result
    masked = numpy.empty(total, dtype=numpy.uint8)
    is_null = masked
    start = 0
    for column in columns:
        if column.c.length:
            with nogil:
                null_column(&column.c, &is_null[start])
            start += column.c.length
    return numpy.ma.MaskedArray(result, mask=masked.view(bool), fill_value=0)


def partition_for_keys(keys, partitions, mask=None):
    """The partition of every key of a column, as int32, where Java's producer would put it.

    A null key gives -1: the key-less partitioner decides. An empty key is a key.
    """
    cdef:
        list columns
        int64_t start = 0
        int32_t count
        int32_t[::1] chosen
        Column column
    partitions = operator.index(partitions)
    if not 1 <= partitions <= INT32_MAX:
        raise ValueError(f"partitions must be between 1 and {INT32_MAX}, not {partitions}")
    count = partitions
    columns = columns_of(keys, "key", True, mask)
    import numpy

    result = numpy.empty(total_length(columns), dtype=numpy.int32)
    chosen = result
    for column in columns:
        if column.c.length:
            with nogil:
                partition_column(&column.c, count, &chosen[start])
            start += column.c.length
    return result
