"""The bytes that an encoder has made of the rows of a batch, on their way into a bulk call or an Arrow array.

    out.data     {"a":1}{"a":2}{"a":3}        grows by doubling, overflow checked
    offsets      0      7      14     21      an int64 per row and one more
    bad          {}                           row -> Exception; such a row has no bytes

An encoder fills `out` in a loop without the GIL and ends each row with `finish_row`. At a row that cannot be encoded the
loop stops, `reject` takes back what is written of it and notes why, and the loop goes on behind it: so nothing half
encoded is ever seen. The finished object becomes a `Column`, whose bad rows fail alone with their index, or an Arrow
array, for which one bad row is an error. Its memory is nobody's to change, so large values are sent without a copy; it
lives until the last of them has its outcome.
"""

from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport uintptr_t
from libc.string cimport memset

from fastprod._core._columns cimport COLUMN_OFFSETS64, INT32_MAX, SIZE_BAD


cdef enum:
    GUESS_BYTES = 4194304  # more than this is not set aside before it is written


cdef class Encoded:
    """Owns `out.data` and `offsets`. Made by encoders only."""

    def __cinit__(self):
        memset(&self.out, 0, sizeof(out_t))
        self.offsets = NULL
        self.rows = 0
        self.done = 0
        self.bad = {}

    def __dealloc__(self):
        PyMem_RawFree(self.out.data)
        PyMem_RawFree(self.offsets)

    def __len__(self):
        return self.rows

    def to_arrow(self, int64_t base=0):
        """A pyarrow.LargeBinaryArray over this memory; raises what is wrong with the first bad row.

        `base` is the number of row 0, for that error.
        """
        import pyarrow

        for row, error in self.bad.items():
            raise type(error)(f"row {base + row} {error}")
        offsets = pyarrow.foreign_buffer(<uintptr_t> self.offsets, (self.rows + 1) * sizeof(int64_t), self)
        data = pyarrow.foreign_buffer(<uintptr_t> self.out.data, self.out.size, self)
        return pyarrow.LargeBinaryArray.from_buffers(pyarrow.large_binary(), self.rows, [None, offsets, data])

    cdef int reject(self, object error) except -1:
        self.bad[self.done] = error
        self.out.size = self.offsets[self.done]
        finish_row(self)
        return 0

    cpdef Column column(self, str name, int64_t base):
        cdef Column column = Column.__new__(Column)
        cdef int64_t row
        if self.done != self.rows:
            raise RuntimeError(f"only {self.done} of {self.rows} rows are encoded")
        column.name = name
        column.strict = False
        column.base = base
        column.owners = [self]
        column.immutable = True
        if self.bad:
            column.allocate_cells(self.rows)
            for row in range(self.rows):
                column.c.cells[row].data = self.out.data + self.offsets[row]
                column.c.cells[row].size = self.offsets[row + 1] - self.offsets[row]
                if row in self.bad or column.c.cells[row].size > INT32_MAX:
                    column.c.cells[row].size = SIZE_BAD
                    column.reject(row, self.bad.get(row) or ValueError(f"is over the limit of {INT32_MAX} bytes"))
        else:
            column.c.data = self.out.data
            column.c.offsets64 = self.offsets
            column.c.length = self.rows
            column.c.kind = COLUMN_OFFSETS64
            column.find_oversized()
        return column


cdef Encoded encoded_of(int64_t rows, int64_t row_bytes):
    cdef Encoded encoded = Encoded.__new__(Encoded)
    if rows > INT64_MAX // 16:  # of nulls, which take no memory in Arrow
        raise MemoryError
    encoded.offsets = <int64_t*> PyMem_RawMalloc((rows + 1) * sizeof(int64_t))
    # A guess from rows that may have been much larger is not worth more than this: what is written makes room anyway.
    # At least a byte: an empty value must have an address, or it would look like a null
    cdef int64_t guess = GUESS_BYTES if row_bytes > GUESS_BYTES // max(rows, 1) else max(rows * row_bytes, 64)
    if encoded.offsets == NULL or out_reserve(&encoded.out, guess):
        raise MemoryError
    encoded.offsets[0] = 0
    encoded.rows = rows
    return encoded
