# Records as callbacks see them. See _message.pyx.

from libc.stdint cimport int32_t, int64_t

from fastprod._core._columns cimport Column

cdef class Message:
    cdef object _topic
    cdef object _key
    cdef object _value
    cdef object _error
    cdef object _headers        # list, bytes of packed headers, or None
    cdef int64_t _offset
    cdef int64_t _timestamp
    cdef int64_t _latency_us
    cdef int32_t _partition
    cdef int32_t _timestamp_type

cdef bytes pack_headers(object headers)

cdef enum:
    HEADERS_NO_MEMORY = -1
    HEADERS_NO_NAME = -2        # a header without a name
    HEADERS_TOO_LARGE = -3      # more than 2 GiB

cdef class HeaderColumn:
    cdef Column names           # of all headers of all records, one after the other
    cdef Column values
    cdef const int64_t[::1] offsets  # record i has the headers from offsets[i] to offsets[i + 1]
    cdef char* packed           # owned: the headers_t made last
    cdef int64_t capacity

    cdef int64_t pack(self, int64_t index, int64_t most) noexcept nogil
