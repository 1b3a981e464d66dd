"""A uniform C view over a column of byte strings.

Keys and values reach us as lists, numpy arrays and Arrow arrays. Each is described once by a `column_t`, a
few borrowed pointers, so that the loops that hash, size and send records run without the GIL and without
knowing where a record came from. Bytes of elements are not copied, unless an array is not contiguous. What leads
to them (offsets, views, bits of nulls) is, if somebody else could change it: it is checked once, and C code
follows it until the last record has its outcome.

    source                                        kind        per element
    None, Arrow null                              EMPTY       -
    Arrow binary, string                          OFFSETS32   int32 start, next start
    Arrow large_binary, large_string              OFFSETS64   int64 start, next start
    (offsets, data)                               OFFSETS64   the same, offsets copied
    numpy S<n>, V<n>, Arrow fixed_size_binary     FIXED       n bytes
    Arrow binary_view, string_view                VIEWS       size, then 12 bytes or prefix, buffer, position
    list, tuple, numpy object, U<n>, StringDType  POINTERS    pointer, size
    Arrow dictionary                              POINTERS    pointer into the dictionary's own values

Arrow data is read through pyarrow's Python API alone (`buffers()` and addresses), so that a wheel built once
works with every pyarrow. An Arrow array is not trusted: every element must lie within the array's buffers, or
the array is refused as a whole. That takes a pass over 4 or 8 bytes of offsets per element, with one comparison
each, or over 16 bytes of a view; the elements themselves are not looked at, and `column_get` need not compare
anything. (`pyarrow.Array.validate()` looks at the first and the last offset only.)
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.buffer cimport (
    PyBUF_CONTIG_RO, PyBUF_FORMAT, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
)
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport uintptr_t
from libc.string cimport memset, strchr

import sys

cdef extern from "Python.h":
    # On plain pointers, so that Cython counts no references that the snapshot holds already
    ctypedef struct PyObject
    PyObject* Py_None
    Py_ssize_t PyList_GET_SIZE(object items)
    PyObject* PyList_GET_ITEM(object items, Py_ssize_t index)
    Py_ssize_t PyTuple_GET_SIZE(object items)
    PyObject* PyTuple_GET_ITEM(object items, Py_ssize_t index)
    tuple PyTuple_New(Py_ssize_t count)
    void PyTuple_SET_ITEM(object items, Py_ssize_t index, PyObject* item)
    void Py_INCREF(PyObject* item)
    bint PyBytes_CheckExact(PyObject* item)
    char* PyBytes_AS_STRING(PyObject* item)
    Py_ssize_t PyBytes_GET_SIZE(PyObject* item)
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL


cdef struct held_buffer_t:
    Py_buffer view        # stays at one address until released, as the buffer protocol asks
    held_buffer_t* next

cdef char no_bytes = 0      # what an empty value without an address points at
cdef dict arrow_kinds = {}  # Arrow type id -> COLUMN_*, filled when pyarrow is first needed


cdef class Column:
    """One contiguous column; `columns()` also takes chunked ones.

    Owns its table of cells or buffer pointers and the `Py_buffer`s it holds; all else is kept alive by
    `owners`. Does not change once filled, so any number of threads may read it.
    """

    def __cinit__(self, *args, **kwargs):
        memset(&self.c, 0, sizeof(column_t))
        self.held = NULL
        self.bad = {}

    def __init__(self, source, str name="value", bint strict=True, mask=None, int64_t base=0):
        if self.owners is not None:
            raise RuntimeError("a Column is filled only once")
        parts = parts_of(source, name, mask)
        if len(parts) != 1:
            raise ValueError(f"{name} has {len(parts)} chunks; use columns()")
        self.name = name
        self.strict = strict
        self.base = base
        part, _, part_mask = parts[0]
        self.fill(part, part_mask)

    def __dealloc__(self):
        cdef held_buffer_t* held
        while self.held != NULL:
            held = self.held
            self.held = held.next
            PyBuffer_Release(&held.view)
            PyMem_RawFree(held)
        PyMem_RawFree(self.c.cells)
        PyMem_RawFree(<void*> self.c.buffers)

    @staticmethod
    def empty(int64_t length):
        """A column of `length` nulls, for an argument that was not given."""
        return empty_column(length)

    def __len__(self):
        return self.c.length

    def __getitem__(self, int64_t index):
        cdef const char* data
        cdef int64_t size
        cdef int cell
        if index < 0:
            index += self.c.length
        if not 0 <= index < self.c.length:
            raise IndexError(f"{self.name} has {self.c.length} elements")
        cell = column_get(&self.c, index, &data, &size)
        if cell == CELL_BAD:
            raise self.bad[index]
        return PyBytes_FromStringAndSize(data, size) if cell == CELL_VALUE else None

    cdef int fill(self, object part, object mask) except -1:
        """Describe one part of `parts_of`, which has already settled its type and mask."""
        self.owners = [part, mask]
        self.immutable = True
        if part is None:
            return 0
        if mask is not None:
            self.c.mask = <const uint8_t*> address_of(mask)
        if is_offsets(part):
            return self.fill_offsets(part[0], part[1])
        if isinstance(part, (list, tuple)):
            return self.fill_items(part, mask)
        if not is_numpy(part, "ndarray"):
            return self.fill_arrow(part, mask)
        if part.dtype.kind in "SV" and not part.dtype.hasobject:
            return self.fill_numpy(part)
        if part.dtype.kind in "OUT":
            return self.fill_items(part.tolist(), mask)
        raise TypeError(f"{self.name} must hold bytes or str, not numpy {part.dtype}")

    cdef int fill_items(self, object source, object mask) except -1:
        """Cells for a list or tuple, of which a snapshot keeps each element alive whatever the caller does.

        Snapshot and cells are made in one pass, for each element's header is a cache miss. No Python code
        runs in that pass, so the list cannot change under it; what is not plain bytes waits for a second.
        """
        cdef:
            Py_ssize_t index, count
            const uint8_t* masked = self.c.mask
            bint is_list = isinstance(source, list), others = False
            tuple items
            PyObject* item
            cell_t* cell
        with cython.critical_section(source):
            count = PyList_GET_SIZE(source) if is_list else PyTuple_GET_SIZE(source)
            if masked != NULL and count != len(mask):
                raise ValueError(f"{self.name} changed its size meanwhile")
            self.allocate_cells(count)
            items = PyTuple_New(count) if is_list else source
            for index in range(count):
                if is_list:
                    item = PyList_GET_ITEM(source, index)
                    Py_INCREF(item)
                    PyTuple_SET_ITEM(items, index, item)
                else:
                    item = PyTuple_GET_ITEM(items, index)
                cell = &self.c.cells[index]
                if PyBytes_CheckExact(item) and PyBytes_GET_SIZE(item) <= INT32_MAX:
                    cell.data = PyBytes_AS_STRING(item)
                    cell.size = PyBytes_GET_SIZE(item)
                elif item == Py_None:
                    cell.size = SIZE_NULL
                else:
                    cell.size = SIZE_BAD
                    others = True
        self.owners = [items]
        self.c.mask = NULL  # is in the cells from here on
        if masked != NULL:
            for index in range(count):
                if masked[index]:
                    self.c.cells[index].size = SIZE_NULL
        if others:
            for index in range(count):
                cell = &self.c.cells[index]
                if cell.size == SIZE_BAD:
                    error = self.read_item(<object> PyTuple_GET_ITEM(items, index), cell)
                    if error is not None:
                        cell.size = SIZE_BAD
                        self.reject(index, error)
        return 0

    cdef object read_item(self, object item, cell_t* cell):
        """Point `cell` at anything that is not plain bytes; returns what is wrong with it, or None."""
        cdef Py_ssize_t size
        try:
            if isinstance(item, bytes):
                cell.data = PyBytes_AS_STRING(<PyObject*> item)
                cell.size = PyBytes_GET_SIZE(<PyObject*> item)  # len() is what a subclass says
            elif isinstance(item, str):
                cell.data = PyUnicode_AsUTF8AndSize(item, &size)  # cached in the str, lives as long
                cell.size = size
            # numpy's numbers are buffers too, but their memory is hardly what a caller means by 5
            elif PyObject_CheckBuffer(item) and (
                not is_numpy(item, "generic") or is_numpy(item, "void")
            ):
                self.hold(item, &cell.data, &cell.size)
            else:
                return TypeError(f"must be bytes, str, None or a buffer, not {type(item).__name__}")
        except UnicodeEncodeError as error:
            return ValueError(f"is no valid UTF-8: {error.reason}")
        except (BufferError, ValueError) as error:  # not contiguous; a memoryview already released
            return ValueError(f"is no readable buffer: {error}")
        return oversized(cell.size) if cell.size > INT32_MAX else None

    cdef int fill_numpy(self, object array) except -1:
        import numpy

        self.immutable = False
        array = numpy.ascontiguousarray(array)
        self.owners.append(array)
        self.c.width = array.dtype.itemsize
        self.c.strip = array.dtype.kind == "S"
        self.c.data = not_null(address_of(array))
        self.c.length = len(array)
        self.c.kind = COLUMN_FIXED
        return 0

    cdef int fill_offsets(self, object offsets, object data) except -1:
        """Offsets are copied: checked once, they must stay as they were while C code follows them."""
        cdef:
            const char* start
            int64_t size
        if offsets.ndim != 1 or not len(offsets):
            raise ValueError(f"{self.name} offsets must be one-dimensional with at least one entry")
        import numpy

        offsets = numpy.array(offsets, dtype=numpy.int64, order="C")
        self.owners.append(offsets)
        try:
            self.hold(data, &start, &size)
        except (BufferError, TypeError) as error:
            kind = type(data).__name__
            raise TypeError(f"{self.name} data must be a contiguous buffer, not {kind}") from error
        self.immutable = isinstance(data, bytes)
        self.c.offsets64 = <const int64_t*> address_of(offsets)
        self.c.data = start
        self.c.length = len(offsets) - 1
        self.c.kind = COLUMN_OFFSETS64
        self.check_offsets(size)
        return self.find_oversized()

    cdef int fill_arrow(self, object array, object mask) except -1:
        cdef:
            int64_t offset, count = len(array), width
            int kind
            list buffers
        import pyarrow

        while isinstance(array, pyarrow.ExtensionArray):
            array = array.storage
        if isinstance(array, pyarrow.DictionaryArray):
            return self.fill_dictionary(array, mask)
        if not arrow_kinds:
            arrow_kinds.update({
                pyarrow.lib.Type_NA: COLUMN_EMPTY,
                pyarrow.lib.Type_BINARY: COLUMN_OFFSETS32,
                pyarrow.lib.Type_STRING: COLUMN_OFFSETS32,
                pyarrow.lib.Type_LARGE_BINARY: COLUMN_OFFSETS64,
                pyarrow.lib.Type_LARGE_STRING: COLUMN_OFFSETS64,
                pyarrow.lib.Type_FIXED_SIZE_BINARY: COLUMN_FIXED,
                pyarrow.lib.Type_BINARY_VIEW: COLUMN_VIEWS,
                pyarrow.lib.Type_STRING_VIEW: COLUMN_VIEWS,
            })
        if array.type.id not in arrow_kinds:
            raise TypeError(f"{self.name} must hold bytes or str, not Arrow {array.type}")
        self.owners.append(array)
        kind = arrow_kinds[array.type.id]
        self.c.length = count
        if not count or kind == COLUMN_EMPTY:  # an array without elements may have no buffers at all
            return 0
        offset = array.offset
        buffers = array.buffers()
        self.owners.append(buffers)
        if buffers[0] is not None:
            bits = self.place(buffers[0], offset >> 3, ((offset & 7) + count + 7) >> 3, "bits of nulls", 1)
            if array.null_count:
                self.c.validity = <const uint8_t*> <uintptr_t> bits
                self.c.validity_offset = offset & 7
        if kind == COLUMN_FIXED:
            width = self.c.width = array.type.byte_width
            self.immutable = frozen(buffers[1])
            self.c.data = not_null(self.place(buffers[1], offset * width, count * width, "values", 0))
        elif kind == COLUMN_VIEWS:
            self.c.views = <const char*> self.place(buffers[1], 16 * offset, 16 * count, "views", 1)
            self.fill_views(buffers[2:])
        else:
            self.immutable = frozen(buffers[2])
            self.c.data = not_null(buffer_address(buffers[2]))
            if kind == COLUMN_OFFSETS32:
                self.c.offsets32 = <const int32_t*> self.place(buffers[1], 4 * offset, 4 * count + 4, "offsets", 4)
            else:
                self.c.offsets64 = <const int64_t*> self.place(buffers[1], 8 * offset, 8 * count + 8, "offsets", 8)
        self.c.kind = kind
        if kind == COLUMN_OFFSETS32 or kind == COLUMN_OFFSETS64:
            self.check_offsets(buffer_size(buffers[2]))
        return self.find_oversized() if kind == COLUMN_OFFSETS64 else 0

    cdef uintptr_t place(self, object buffer, int64_t start, int64_t size, str what, int aligned) except? 0:
        """The address of a part of an Arrow buffer, which must have it.

        With `aligned` (to so many bytes) it leads C code to the elements, and must stay as it is: if it might
        change, or begins at an odd address, the address is that of a copy.
        """
        if start < 0 or start + size > buffer_size(buffer):
            raise ValueError(
                f"{self.name} is an invalid Arrow array: its {what} take {start + size} bytes, "
                f"but the buffer has {buffer_size(buffer)}"
            )
        if not aligned or (frozen(buffer) and (buffer_address(buffer) + start) % aligned == 0):
            return buffer_address(buffer) + start
        copy = buffer.slice(start, size).to_pybytes()
        self.owners.append(copy)
        return <uintptr_t> <const char*> copy

    cdef int check_offsets(self, int64_t size) except -1:
        """Refuse offsets that do not stay in order within `size` bytes of data."""
        cdef int64_t index, start, end
        if self.c.kind == COLUMN_OFFSETS32:
            index = first_outside(self.c.offsets32, self.c.length, size, &start, &end)
        else:
            index = first_outside(self.c.offsets64, self.c.length, size, &start, &end)
        if index >= 0:
            raise ValueError(
                f"{self.name} at index {self.base + index} has offsets from {start} to {end}, "
                f"which is no part of the {size} bytes of data"
            )
        return 0

    cdef int fill_views(self, list buffers) except -1:
        """The table of data buffers, and a look at every view that is no null."""
        cdef:
            int64_t index, bit, count = len(buffers)
            int64_t* sizes
            int32_t number[4]  # as in column_get
        self.c.buffers = <const char**> PyMem_RawMalloc(max(count, 1) * sizeof(char*))
        sizes = <int64_t*> PyMem_RawMalloc(max(count, 1) * sizeof(int64_t))
        try:
            if self.c.buffers == NULL or sizes == NULL:
                raise MemoryError
            for index in range(count):
                self.c.buffers[index] = not_null(buffer_address(buffers[index]))
                sizes[index] = buffer_size(buffers[index])
                self.immutable = self.immutable and frozen(buffers[index])
            for index in range(self.c.length):
                bit = self.c.validity_offset + index
                if self.c.validity != NULL and not (self.c.validity[bit >> 3] >> (bit & 7)) & 1:
                    continue
                memcpy(number, self.c.views + 16 * index, 16)
                if 0 <= number[0] <= 12 or (
                    number[0] > 12 and 0 <= number[2] < count and 0 <= number[3] <= sizes[number[2]] - number[0]
                ):
                    continue
                raise ValueError(
                    f"{self.name} at index {self.base + index} is a view of {number[0]} bytes at {number[3]} of "
                    f"buffer {number[2]}, which is not there"
                )
        finally:
            PyMem_RawFree(sizes)
        return 0

    cdef int fill_dictionary(self, object array, object mask) except -1:
        """Cells that point at the dictionary's values: no value is copied, however often it occurs."""
        cdef:
            Column indices, values = Column.__new__(Column)
            const char* data
            int64_t index, size, number, count = len(array)
            cell_t* cell
            int found
        values.name = f"{self.name} dictionary"
        values.fill(array.dictionary, None)
        self.immutable = values.immutable
        try:
            array.indices.validate()
        except ValueError as error:
            raise ValueError(f"{self.name} is an invalid Arrow array: {error}") from None
        # Read as 8-byte elements, the indices bring their own nulls and slice with them
        import pyarrow

        indices = Column(array.indices.cast(pyarrow.int64()).view(pyarrow.binary(8)), mask=mask)
        self.owners.append(values)
        self.allocate_cells(count)
        self.c.mask = NULL  # is in the cells from here on
        for index in range(count):
            cell = &self.c.cells[index]
            cell.size = SIZE_NULL
            if column_get(&indices.c, index, &data, &size) != CELL_VALUE:
                continue
            memcpy(&number, data, sizeof(number))
            if not 0 <= number < values.c.length:
                raise ValueError(f"{self.name} at index {self.base + index} is not in its dictionary")
            found = column_get(&values.c, number, &cell.data, &size)
            if found == CELL_VALUE:
                cell.size = size
            elif found == CELL_BAD:
                cell.size = SIZE_BAD
                self.reject(index, oversized())
        return 0

    cdef int find_oversized(self) except -1:
        """Reject elements longer than a Kafka record can say. Looks at each only if one could be."""
        cdef const int64_t* offset = self.c.offsets64
        cdef int64_t index, size
        cdef const char* data
        if offset[self.c.length] - offset[0] > INT32_MAX:
            for index in range(self.c.length):
                if column_get(&self.c, index, &data, &size) == CELL_BAD:
                    self.reject(index, oversized(offset[index + 1] - offset[index]))
        return 0

    cdef int allocate_cells(self, int64_t count) except -1:
        self.c.cells = <cell_t*> PyMem_RawMalloc(count * sizeof(cell_t))
        if self.c.cells == NULL:
            raise MemoryError
        self.c.length = count
        self.c.kind = COLUMN_POINTERS
        return 0

    cdef int hold(self, object exporter, const char** data, int64_t* size) except -1:
        """Lock `exporter`'s memory until this column goes; a bytearray cannot be resized meanwhile."""
        cdef held_buffer_t* held = <held_buffer_t*> PyMem_RawMalloc(sizeof(held_buffer_t))
        if held == NULL:
            raise MemoryError
        try:
            PyObject_GetBuffer(exporter, &held.view, PyBUF_CONTIG_RO | PyBUF_FORMAT)
        except BaseException:
            PyMem_RawFree(held)
            raise
        held.next = self.held
        self.held = held
        self.immutable = False
        if held.view.format != NULL and strchr(held.view.format, b"O") != NULL:
            raise BufferError("it holds Python objects, not bytes")
        data[0] = not_null(<uintptr_t> held.view.buf)
        size[0] = held.view.len
        return 0

    cdef int reject(self, int64_t index, object error) except -1:
        """Raise or record `error`, which knows what is wrong but not where."""
        error = type(error)(f"{self.name} at index {self.base + index} {error}")
        if self.strict:
            raise error
        self.bad[index] = error
        return 0


cdef list columns_of(object source, str name, bint strict, object mask):
    cdef list columns = []
    cdef Column column
    cdef int64_t base = 0
    for part, _, part_mask in parts_of(source, name, mask):
        column = Column.__new__(Column)
        column.name = name
        column.strict = strict
        column.base = base
        column.fill(part, part_mask)
        columns.append(column)
        base += column.c.length
    return columns


cdef Column empty_column(int64_t length):
    cdef Column column = Column(None)
    column.c.length = length
    return column


def columns(source, str name="value", bint strict=True, mask=None):
    """`columns_of` for Python: the Columns of `source`, one per chunk."""
    return columns_of(source, name, strict, mask)


def pieces(source, str name="value"):
    """`parts_of` for Python."""
    return parts_of(source, name, None)


def cut(tuple piece, Py_ssize_t start, Py_ssize_t stop):
    """Some elements of one of `pieces`, as another."""
    part, length, mask = piece
    if start == 0 and stop == length:
        return piece
    if is_offsets(part):
        part = part[0][start:stop + 1], part[1]
    elif part is not None:
        part = part[start:stop]
    return part, stop - start, None if mask is None else mask[start:stop]


cdef list parts_of(object source, str name, object mask):
    """`source` as [(None, list, tuple, ndarray or pyarrow.Array; length; mask or None)], one entry per chunk.

    pandas is never imported: whoever has a Series has it already, and its methods tell it apart.
    """
    cdef Py_ssize_t start = 0
    own = None  # nulls the source knows of, besides those of `mask`
    if hasattr(source, "isna") and hasattr(source, "to_numpy"):
        inner = getattr(source, "array", source)
        if hasattr(inner, "__arrow_array__"):
            import pyarrow

            source = pyarrow.array(inner)
        else:
            import numpy

            own = numpy.asarray(source.isna())
            source = source.to_numpy(dtype=object)
    elif is_numpy(source, "ndarray") and hasattr(source, "mask"):
        import numpy

        own = numpy.ma.getmaskarray(source)
        source = source.data

    if source is None:
        chunks = [None]
    elif isinstance(source, (list, tuple)):
        chunks = [source]
    elif is_numpy(source, "ndarray"):
        if source.ndim != 1:
            raise ValueError(f"{name} must be one-dimensional, not {source.ndim}-dimensional")
        chunks = [source]
    elif hasattr(source, "__arrow_c_array__") or hasattr(source, "__arrow_c_stream__"):
        import pyarrow

        if not isinstance(source, (pyarrow.Array, pyarrow.ChunkedArray)):  # polars and others
            is_array = hasattr(source, "__arrow_c_array__")
            source = pyarrow.array(source) if is_array else pyarrow.chunked_array(source)
        chunks = [source]
        if isinstance(source, pyarrow.ChunkedArray):
            chunks = source.chunks or [pyarrow.nulls(0, source.type)]
    else:
        raise TypeError(
            f"{name} must be a list, a tuple, a numpy or Arrow array, a Series or (offsets, data), "
            f"not {type(source).__name__}"
        )

    if source is None:
        lengths = [0]
    elif is_offsets(source):
        lengths = [max(source[0].size - 1, 0)]
    else:
        lengths = [len(chunk) for chunk in chunks]
    mask = mask_of(mask, name, sum(lengths))
    if own is not None:
        mask = mask_of(own if mask is None else own | mask, name, sum(lengths))
    parts = []
    for chunk, length in zip(chunks, lengths):
        parts.append((chunk, length, None if mask is None else mask[start:start + length]))
        start += length
    return parts


cdef object mask_of(object mask, str name, Py_ssize_t length):
    """A private copy of `mask` as a contiguous array of bool, or None when it masks nothing."""
    if mask is None:
        return None
    import numpy

    if mask is numpy.ma.nomask:
        return None
    mask = numpy.array(mask, order="C")
    if mask.ndim != 1 or len(mask) != length:
        shape = f"{len(mask)} entries" if mask.ndim == 1 else f"{mask.ndim} dimensions"
        raise ValueError(f"mask of {name} has {shape}, but {name} has {length} elements")
    if length and mask.dtype != bool:
        raise TypeError(f"mask of {name} must be boolean without nulls, not {mask.dtype}")
    return mask if mask.any() else None


cdef bint is_offsets(object source):
    """Whether a tuple means (offsets, data): narrower integers are more likely the bytes of a value."""
    if type(source) is not tuple or len(source) != 2 or not is_numpy(source[0], "ndarray"):
        return False
    return source[0].dtype.kind in "iu" and source[0].dtype.itemsize >= 4


cdef bint is_numpy(object item, str kind):
    """Whether `item` is of a class of numpy's. Importing numpy takes 20 MB, which lists do not need.

    While another thread is at it, the module is there but its classes may not be, nor can anything be of one.
    """
    return isinstance(item, getattr(sys.modules.get("numpy"), kind, ()))


cdef uintptr_t address_of(object array) except? 0:
    return array.__array_interface__["data"][0]


cdef uintptr_t buffer_address(object buffer) except? 0:
    return 0 if buffer is None else buffer.address


cdef int64_t buffer_size(object buffer) except -1:
    return 0 if buffer is None else buffer.size


cdef bint frozen(object buffer) except -1:
    """Whether nobody can change an Arrow buffer, or there is none."""
    if buffer is None:
        return True
    from fastprod._core._arrow_memory import is_frozen

    return is_frozen(buffer)


ctypedef fused offset_t:
    int32_t
    int64_t


cdef int64_t first_outside(
    const offset_t* offsets, int64_t count, int64_t size, int64_t* start, int64_t* end
) noexcept nogil:
    """The first of `count` elements whose offsets are not in order within `size` bytes, with them, or -1.

    If none decreases, all lie between the first and the last: so the pass that is always made compares once per
    element, without a branch, and gcc vectorises it for 32 bits.
    """
    cdef int64_t index
    cdef bint wrong = offsets[0] < 0 or offsets[count] > size
    for index in range(count):
        wrong |= offsets[index + 1] < offsets[index]
    if not wrong:
        return -1
    for index in range(max(count, 1)):
        start[0] = offsets[index]
        end[0] = offsets[min(index + 1, count)]
        if start[0] < 0 or end[0] < start[0] or end[0] > size:
            return index
    return -1


cdef const char* not_null(uintptr_t address) noexcept:
    """An empty buffer may have no address, yet an empty value must not look like a null."""
    return <const char*> address if address else &no_bytes


cdef object oversized(size=None):
    held = "" if size is None else f"{size} bytes long, "
    return ValueError(f"is {held}over the limit of {INT32_MAX} bytes")
