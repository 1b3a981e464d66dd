# What encoders write: the bytes of all rows of a batch, one after the other. See the .pyx.
from cpython.mem cimport PyMem_RawRealloc
from libc.stdint cimport INT64_MAX, int64_t
from libc.string cimport memcpy

from fastprod._core._columns cimport Column


ctypedef struct out_t:
    char* data         # owned by the Encoded
    int64_t size       # bytes written
    int64_t capacity   # bytes allocated


cdef class Encoded:
    cdef out_t out                 # where encoders write
    cdef int64_t* offsets          # rows + 1 entries: row i is from offsets[i] to offsets[i + 1]
    cdef readonly int64_t rows     # in the batch
    cdef int64_t done              # rows that are finished, good or bad; offsets[done] is set
    cdef readonly dict bad         # row -> what is wrong with it, such as ValueError("has no valid UTF-8 in column 'a'")

    # The row `done` is bad: drop what is written of it, note why, go on with the next
    cdef int reject(self, object error) except -1
    # All rows as a column of a bulk call, in which bad ones fail alone; `base` is the number of row 0 in that call
    cpdef Column column(self, str name, int64_t base)


# With room for `rows` rows of about `row_bytes`.
cdef Encoded encoded_of(int64_t rows, int64_t row_bytes)


cdef inline int out_reserve(out_t* out, int64_t more) noexcept nogil:
    """Room for `more` bytes behind out.size; -1 if there is no memory, and then nothing has changed."""
    cdef int64_t wanted
    cdef void* grown
    if more <= out.capacity - out.size:
        return 0
    if more > INT64_MAX // 4 - out.size:
        return -1
    wanted = max(2 * out.capacity, out.size + more)
    grown = PyMem_RawRealloc(out.data, wanted)
    if grown == NULL:
        return -1
    out.data = <char*> grown
    out.capacity = wanted
    return 0


cdef inline int out_put(out_t* out, const char* data, int64_t size) noexcept nogil:
    """Appends bytes; -1 if there is no memory."""
    if out_reserve(out, size):
        return -1
    memcpy(out.data + out.size, data, size)
    out.size += size
    return 0


cdef inline void finish_row(Encoded encoded) noexcept nogil:
    """The row `done` ends where out.size is."""
    encoded.done += 1
    encoded.offsets[encoded.done] = encoded.out.size
