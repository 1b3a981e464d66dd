# Records as callbacks see them. See _message.pyx.

from libc.stdint cimport int32_t, int64_t

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
