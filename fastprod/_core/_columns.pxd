from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uintptr_t
from libc.string cimport memcpy


cdef extern from "<assert.h>" nogil:
    void c_assert "assert"(bint condition)  # a real check only in a FASTPROD_DEBUG build


cdef enum:
    COLUMN_EMPTY = 0      # every element null (column not given, or Arrow's null type)
    COLUMN_OFFSETS32 = 1  # Arrow binary/string: int32 offsets + data
    COLUMN_OFFSETS64 = 2  # Arrow large_binary/large_string, or (offsets, data) given by the user
    COLUMN_FIXED = 3      # fixed width: numpy 'S<n>' and 'V<n>', Arrow fixed_size_binary
    COLUMN_VIEWS = 4      # Arrow binary_view/string_view
    COLUMN_POINTERS = 5   # one pointer and size per element (lists, object arrays, dictionaries)

cdef enum:
    CELL_VALUE = 0  # data is never NULL, even for an empty value: librdkafka reads NULL as "no value"
    CELL_NULL = 1   # data is NULL, size 0
    CELL_BAD = 2    # data is NULL, size 0; the reason is in Column.bad

cdef enum:
    SIZE_NULL = -1  # cell_t.size of a null
    SIZE_BAD = -2   # cell_t.size of an element that could not be read


ctypedef struct cell_t:
    const char* data  # owned by the element; any pointer when size < 0
    int64_t size      # bytes, SIZE_NULL or SIZE_BAD


ctypedef struct column_t:
    int kind                  # COLUMN_*: says which of the fields below are set
    bint strip                # FIXED: trailing NULs are padding (numpy 'S')
    int64_t length            # elements
    const uint8_t* validity   # Arrow bitmap, 1 = value, or NULL when nothing is null; owned by the array
    int64_t validity_offset   # bits before element 0
    const uint8_t* mask       # a byte per element, nonzero = null, or NULL; owned by Column.owners
    const int32_t* offsets32  # OFFSETS32: length + 1 entries, in bytes from data
    const int64_t* offsets64  # OFFSETS64: the same
    const char* data          # OFFSETS*, FIXED: bytes of the elements; never NULL
    int64_t width             # FIXED: bytes per element
    const char* views         # VIEWS: 16 bytes per element
    const char** buffers      # VIEWS: data buffers by number; the table is owned by the Column
    cell_t* cells             # POINTERS: an entry per element; owned by the Column


cdef struct held_buffer_t  # a Py_buffer to release, see the .pyx


cdef inline int column_get(
    const column_t* column, int64_t index, const char** data, int64_t* size
) noexcept nogil:
    """Point `data` at element `index`, copying nothing, and say whether it is a value (CELL_*)."""
    cdef:
        int64_t bit, count
        const char* start
        const cell_t* cell
        int32_t number[4]  # of a view: size, prefix, buffer number, position in that buffer
    data[0] = NULL
    size[0] = 0
    if column.kind == COLUMN_EMPTY:
        return CELL_NULL
    c_assert(0 <= index and index < column.length)
    if column.validity != NULL:
        bit = column.validity_offset + index
        if not (column.validity[bit >> 3] >> (bit & 7)) & 1:
            return CELL_NULL
    if column.mask != NULL and column.mask[index]:
        return CELL_NULL
    if column.kind == COLUMN_POINTERS:
        cell = &column.cells[index]
        if cell.size < 0:
            return CELL_NULL if cell.size == SIZE_NULL else CELL_BAD
        start = cell.data
        count = cell.size
    elif column.kind == COLUMN_OFFSETS32:
        start = column.data + column.offsets32[index]
        count = column.offsets32[index + 1] - column.offsets32[index]
    elif column.kind == COLUMN_OFFSETS64:
        start = column.data + column.offsets64[index]
        count = column.offsets64[index + 1] - column.offsets64[index]
        if count > INT32_MAX:
            return CELL_BAD
    elif column.kind == COLUMN_VIEWS:
        start = column.views + 16 * index
        memcpy(number, start, 16)
        count = number[0]
        start = start + 4 if count <= 12 else column.buffers[number[2]] + number[3]
    else:
        start = column.data + column.width * index
        count = column.width
        if column.strip:
            while count and start[count - 1] == 0:
                count -= 1
    data[0] = start
    size[0] = count
    return CELL_VALUE


cdef class Column:
    cdef column_t c                   # borrowed pointers, kept alive by `owners` and `held`
    cdef held_buffer_t* held          # buffers of elements such as bytearray, released in __dealloc__
    cdef readonly list owners         # objects that must outlive the pointers; None until filled
    cdef readonly dict bad            # index in this column -> Exception (only when strict=False)
    cdef readonly bint immutable      # nobody can change the bytes of the elements
    cdef str name                     # what error texts call the column
    cdef bint strict                  # raise for a bad element instead of recording it
    cdef int64_t base                 # elements before this column in the call, for error texts

    cdef int fill(self, object part, object mask) except -1
    cdef int fill_items(self, object source, object mask) except -1
    cdef object read_item(self, object item, cell_t* cell)
    cdef int fill_numpy(self, object array) except -1
    cdef int fill_offsets(self, object offsets, object data) except -1
    cdef int fill_arrow(self, object array, object mask) except -1
    cdef int fill_dictionary(self, object array, object mask) except -1
    cdef uintptr_t place(self, object buffer, int64_t start, int64_t size, str what, int aligned) except? 0
    cdef int check_offsets(self, int64_t size) except -1
    cdef int fill_views(self, list buffers) except -1
    cdef int find_oversized(self) except -1
    cdef int allocate_cells(self, int64_t count) except -1
    cdef int hold(self, object exporter, const char** data, int64_t* size) except -1
    cdef int reject(self, int64_t index, object error) except -1


# One Column per chunk of a ChunkedArray, else a single one; `name` is for error texts.
cdef list columns_of(object source, str name, bint strict, object mask)

# A column of `length` nulls, for an argument that was not given.
cdef Column empty_column(int64_t length)

# Whether `item` is an instance of numpy's class `kind`, without importing numpy.
cdef bint is_numpy(object item, str kind)
