# Packed headers: a headers_t, then for each header a header_t, its name and its value.

from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy

from fastprod._core._columns cimport Column
from fastprod._core._rdkafka cimport rd_kafka_headers_t

cdef enum:
    HEADERS_NO_MEMORY = -1
    HEADERS_NO_NAME = -2        # a header without a name
    HEADERS_TOO_LARGE = -3      # more than 2 GiB

cdef enum:
    NO_VALUE = 0xffffffffU      # header_t.value_size of null

ctypedef struct headers_t:
    uint32_t size             # bytes of all of it
    uint32_t count
    uint32_t wire             # bytes in Kafka's record format, count included
    uint32_t unused

ctypedef struct header_t:
    uint32_t name_size
    uint32_t value_size       # NO_VALUE = null

cdef inline headers_t headers_head(const char* packed) noexcept nogil:
    """A copy: among other bytes of a chunk they may lie at any address."""
    cdef headers_t head
    memcpy(&head, packed, sizeof(headers_t))
    return head

cdef bytes pack_headers(object headers)
cdef list unpack_headers(bytes packed)
cdef rd_kafka_headers_t* librdkafka_headers(const char* packed) noexcept nogil

cdef class HeaderColumn:
    cdef Column names           # of all headers of all records, one after the other
    cdef Column values
    cdef const int64_t[::1] offsets  # record i has the headers from offsets[i] to offsets[i + 1]
    cdef char* packed           # owned: the headers_t made last
    cdef int64_t capacity

    cdef int64_t pack(self, int64_t index, int64_t most) noexcept nogil
