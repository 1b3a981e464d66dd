"""A whole Arrow record batch as a tree of C nodes, for code that walks rows of any nesting without the GIL.

    pyarrow.RecordBatch --validate()--> __arrow_c_array__() --build()--> node_t, node_t, ... --check()--> Tree

The batch comes through Arrow's C data interface, a public ABI of two structs, so that a wheel built once works with
every pyarrow. The structs stay in the capsules that pyarrow made; a Tree holds these, and when it goes they call Arrow's
release functions, once. The table of nodes is the Tree's own.

An Arrow array is not trusted. The C data interface does not tell how large a buffer is, so pyarrow's `validate()` is
asked first: it compares the sizes of all buffers with the lengths of the arrays, and looks at the first and the last
offset of each. Everything in between is checked here, for the rows that can be reached only: offsets, views, indices of
dictionaries, ends of runs. From then on no function of the .pxd compares anything. That holds as long as nobody writes
into the buffers: a Tree lives for one call, and memory that somebody changes meanwhile is as unsafe here as in pyarrow.

Extension types count as their storage. Unions are refused, and so is what is nested deeper than MAX_DEPTH. A Tree of a
schema has all its nodes and no rows: that is how a type is checked before there is an array of it.
"""

from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport INT64_MAX
from libc.string cimport memset

import decimal
import struct

cdef int MAX_DEPTH = 64       # of lists, structs and the like in each other
cdef char no_bytes = 0        # what an empty buffer without an address points at
cdef ArrowArray no_array      # stands for every array below a schema, by its address
memset(&no_array, 0, sizeof(ArrowArray))

# Formats of the C data interface that are one word: kind, bytes per element
cdef dict PLAIN = {
    b"n": (KIND_NULL, 0),
    b"b": (KIND_BOOL, 0),
    b"c": (KIND_INT8, 1),
    b"s": (KIND_INT16, 2),
    b"i": (KIND_INT32, 4),
    b"l": (KIND_INT64, 8),
    b"C": (KIND_UINT8, 1),
    b"S": (KIND_UINT16, 2),
    b"I": (KIND_UINT32, 4),
    b"L": (KIND_UINT64, 8),
    b"e": (KIND_HALF, 2),
    b"f": (KIND_FLOAT, 4),
    b"g": (KIND_DOUBLE, 8),
    b"tdD": (KIND_DATE32, 4),
    b"tdm": (KIND_DATE64, 8),
    b"tts": (KIND_TIME, 4),
    b"ttm": (KIND_TIME, 4),
    b"ttu": (KIND_TIME, 8),
    b"ttn": (KIND_TIME, 8),
    b"tDs": (KIND_DURATION, 8),
    b"tDm": (KIND_DURATION, 8),
    b"tDu": (KIND_DURATION, 8),
    b"tDn": (KIND_DURATION, 8),
    b"tiM": (KIND_MONTHS, 4),
    b"tiD": (KIND_DAY_TIME, 8),
    b"tin": (KIND_MONTH_DAY_NANO, 16),
}
# Formats of variable size: kind, layout
cdef dict VARIABLE = {
    b"u": (KIND_STRING, LAYOUT_OFFSETS32),
    b"U": (KIND_STRING, LAYOUT_OFFSETS64),
    b"vu": (KIND_STRING, LAYOUT_VIEWS),
    b"z": (KIND_BINARY, LAYOUT_OFFSETS32),
    b"Z": (KIND_BINARY, LAYOUT_OFFSETS64),
    b"vz": (KIND_BINARY, LAYOUT_VIEWS),
    b"+l": (KIND_LIST, LAYOUT_OFFSETS32),
    b"+L": (KIND_LIST, LAYOUT_OFFSETS64),
    b"+vl": (KIND_LIST, LAYOUT_SPANS32),
    b"+vL": (KIND_LIST, LAYOUT_SPANS64),
    b"+m": (KIND_MAP, LAYOUT_OFFSETS32),
}
cdef dict UNITS = {b"s": UNIT_SECOND, b"m": UNIT_MILLI, b"u": UNIT_MICRO, b"n": UNIT_NANO}


cdef class Tree:
    """A record batch whose rows C code can read; made by `tree_of`, or `Tree(batch)` in Python. Or a schema."""

    def __cinit__(self, batch):
        memset(&self.root, 0, sizeof(node_t))

    def __init__(self, batch):
        cdef int64_t i, row = 0
        cdef const node_t* wrong = NULL
        cdef const ArrowArray* array = &no_array
        if self.batch is not None:
            raise RuntimeError("a Tree is filled only once")
        self.batch = batch
        if hasattr(batch, "__arrow_c_array__"):
            try:
                batch.validate()
            except ValueError as error:
                raise ValueError(f"this is an invalid Arrow array: {error}") from None
            self.schema_capsule, self.array_capsule = batch.__arrow_c_array__()
            array = <ArrowArray*> PyCapsule_GetPointer(self.array_capsule, "arrow_array")
        else:
            self.schema_capsule = batch.__arrow_c_schema__()
        self.build(
            &self.root, <ArrowSchema*> PyCapsule_GetPointer(self.schema_capsule, "arrow_schema"), array, 0, -1, ()
        )
        if self.root.kind != KIND_STRUCT:
            raise TypeError(f"expected a record batch or an array of structs, not Arrow {batch.type}")
        with nogil:
            for i in range(self.root.child_count):  # of all rows: nobody asks whether a row is null as a whole
                wrong = first_invalid(&self.root.children[i], 0, self.root.length, &row, NULL)
                if wrong != NULL:
                    break
        if wrong != NULL:
            raise ValueError(
                f"column {self.path(wrong)!r} is an invalid Arrow array: "
                f"its element {row} is not within the bounds of what it refers to"
            )

    def __dealloc__(self):
        free_children(&self.root)

    def __len__(self):
        return self.root.length

    def rows(self):
        """All rows as Python objects: structs as lists of (name, value), times as numbers."""
        return [self.cell(&self.root, row) for row in range(self.root.length)]

    cdef int build(
        self, node_t* node, const ArrowSchema* schema, const ArrowArray* array, int64_t shift, int64_t length, tuple path
    ) except -1:
        """Fills a node. Its row 0 is `shift` elements behind that of the array, it has `length` rows, or with -1 all."""
        cdef int64_t first
        cdef bytes format = schema.format
        if len(path) > MAX_DEPTH:
            raise TypeError(f"column {path[0]!r} is nested more than {MAX_DEPTH} deep")
        if length < 0:
            length = array.length - shift
        if shift < 0 or length < 0 or array.offset < 0 or shift > array.length - length:
            raise invalid(path, f"it has {array.length} elements, not {shift + length}")
        first = array.offset + shift
        node.name = schema.name if schema.name != NULL else &no_bytes
        node.format = schema.format
        node.length = length
        node.bit = first
        if schema.dictionary != NULL:
            return self.build_dictionary(node, schema, array, first, path)
        if format in PLAIN:
            node.kind, node.width = PLAIN[format]
            if format[:1] == b"t" and node.kind in (KIND_TIME, KIND_DURATION):
                node.unit = UNITS[format[2:3]]
        elif format in VARIABLE:
            node.kind, node.layout = VARIABLE[format]
        elif format[:2] == b"ts":
            node.kind = KIND_TIMESTAMP
            node.width = 8
            node.unit = UNITS[format[2:3]]
            node.zone = schema.format + 4
        elif format[:2] == b"d:":
            numbers = [int(number) for number in format[2:].split(b",")]
            node.kind = KIND_DECIMAL
            node.precision, node.scale = numbers[:2]
            node.width = (numbers[2] if len(numbers) > 2 else 128) // 8
        elif format[:2] == b"w:":
            node.kind = KIND_BINARY
            node.layout = LAYOUT_FIXED
            node.width = int(format[2:])
        elif format[:3] == b"+w:":
            node.kind = KIND_LIST
            node.layout = LAYOUT_FIXED
            node.width = int(format[3:])
        elif format == b"+s":
            node.kind = KIND_STRUCT
        elif format == b"+r":
            node.kind = KIND_RUNS
        else:
            kinds = "a union" if format[:2] == b"+u" else f"of a type (format {format.decode()!r})"
            raise TypeError(
                f"column {'.'.join(path)!r} is {kinds}, which cannot be encoded: leave it out or cast it to another type"
            )
        if node.kind != KIND_NULL and node.kind != KIND_RUNS and array.null_count != 0 and length:
            node.validity = <const uint8_t*> array.buffers[0]
        if node.kind in (KIND_STRING, KIND_BINARY):
            return self.build_bytes(node, array, first, path)
        if node.kind in (KIND_LIST, KIND_MAP, KIND_STRUCT, KIND_RUNS):
            return self.build_nested(node, schema, array, first, path)
        if node.kind == KIND_BOOL:
            node.data = self.buffer(node, array, 1, 0, path)
        elif node.kind != KIND_NULL:
            node.data = self.buffer(node, array, 1, first * node.width, path)
        return 0

    cdef const char* buffer(
        self, const node_t* node, const ArrowArray* array, int number, int64_t start, tuple path
    ) except NULL:
        """`start` bytes behind the begin of a buffer, whose size `validate()` has compared with the array's length."""
        if number < array.n_buffers and array.buffers[number] != NULL:
            return <const char*> array.buffers[number] + start
        if node.length and node.width != 0:
            raise invalid(path, "a buffer is missing")
        return &no_bytes

    cdef int build_bytes(self, node_t* node, const ArrowArray* array, int64_t first, tuple path) except -1:
        cdef int64_t last = array.offset + array.length
        if node.layout == LAYOUT_FIXED:
            node.data = self.buffer(node, array, 1, first * node.width, path)
            return 0
        if node.layout == LAYOUT_VIEWS:
            node.width = 16
            node.data = self.buffer(node, array, 1, first * 16, path)
            if array == &no_array:
                return 0
            # Behind the views are the data buffers, and then a buffer with their sizes
            node.buffer_count = max(array.n_buffers - 3, 0)
            node.buffers = <const char**> &array.buffers[2]
            node.buffer_sizes = <const char*> array.buffers[array.n_buffers - 1]
            if node.buffer_count and node.buffer_sizes == NULL:
                raise invalid(path, "a buffer is missing")
            return 0
        node.width = 4 if node.layout == LAYOUT_OFFSETS32 else 8
        node.data = &no_bytes
        if node.length:
            node.offsets = self.buffer(node, array, 1, 0, path)
            node.limit = load32(node.offsets, last) if node.width == 4 else load64(node.offsets, last)
            node.offsets += first * node.width
            if array.n_buffers > 2 and array.buffers[2] != NULL:
                node.data = <const char*> array.buffers[2]
            elif node.limit != 0:
                raise invalid(path, "a buffer is missing")
        return 0

    cdef int build_nested(
        self, node_t* node, const ArrowSchema* schema, const ArrowArray* array, int64_t first, tuple path
    ) except -1:
        cdef int64_t i, shift = 0, length = -1, expected = 1
        cdef const ArrowArray* below
        if node.kind == KIND_STRUCT:
            expected, shift, length = schema.n_children, first, node.length
        elif node.kind == KIND_RUNS:
            expected = 2
        elif node.layout == LAYOUT_FIXED:
            if node.width < 0 or (node.width and first + node.length > INT64_MAX // node.width):
                raise invalid(path, f"its lists have {node.width} items")
            shift, length = first * node.width, node.length * node.width
        elif node.length:
            i = 4 if node.layout == LAYOUT_OFFSETS32 or node.layout == LAYOUT_SPANS32 else 8
            node.width = i
            node.offsets = self.buffer(node, array, 1, first * i, path)
            if node.layout == LAYOUT_SPANS32 or node.layout == LAYOUT_SPANS64:
                node.sizes = self.buffer(node, array, 2, first * i, path)
        if schema.n_children != expected or (array != &no_array and array.n_children != expected):
            raise invalid(path, f"it has {array.n_children} children, not {expected}")
        self.allocate_children(node, expected)
        for i in range(expected):
            name = (schema.children[i].name or b"").decode("utf-8", "replace")
            below = &no_array if array == &no_array else array.children[i]
            self.build(&node.children[i], schema.children[i], below, shift, length, (*path, name))
        if node.kind == KIND_MAP and (node.children[0].kind != KIND_STRUCT or node.children[0].child_count != 2):
            raise invalid(path, "the entries of a map must have a key and a value")
        if node.kind == KIND_RUNS and not KIND_INT16 <= node.children[0].kind <= KIND_INT64:
            raise invalid(path, "the ends of runs must be integers")
        return 0

    cdef int build_dictionary(
        self, node_t* node, const ArrowSchema* schema, const ArrowArray* array, int64_t first, tuple path
    ) except -1:
        cdef const ArrowArray* values = &no_array if array == &no_array else array.dictionary
        node.kind = KIND_DICTIONARY
        node.index_kind, node.width = PLAIN.get(<bytes> schema.format, (KIND_NULL, 0))
        if not KIND_INT8 <= node.index_kind <= KIND_UINT64 or values == NULL:
            raise invalid(path, "the indices of a dictionary must be integers")
        if array.null_count != 0 and node.length:
            node.validity = <const uint8_t*> array.buffers[0]
        node.data = self.buffer(node, array, 1, first * node.width, path)
        self.allocate_children(node, 1)
        return self.build(&node.children[0], schema.dictionary, values, 0, -1, path)

    cdef int allocate_children(self, node_t* node, int64_t count) except -1:
        node.children = <node_t*> PyMem_RawCalloc(max(count, 1), sizeof(node_t))
        if node.children == NULL:
            raise MemoryError
        node.child_count = count
        return 0

    cdef str path(self, const node_t* node):
        return ".".join(path_to(&self.root, node) or [])

    cdef object cell(self, const node_t* node, int64_t row):
        cdef const char* data
        cdef int64_t start, size
        cdef uint64_t number
        node = resolve(node, &row)
        if node == NULL:
            return None
        if node.kind == KIND_BOOL:
            return bool(get_bool(node, row))
        if node.kind == KIND_UINT64:
            number = <uint64_t> get_integer(node, row)
            return number
        if node.kind <= KIND_UINT64 or KIND_DATE32 <= node.kind <= KIND_MONTHS:
            return get_integer(node, row)
        if node.kind == KIND_HALF:
            return struct.unpack("<e", node.data[2 * row:2 * row + 2])[0]
        if node.kind == KIND_FLOAT:
            return load_float(node.data, row)
        if node.kind == KIND_DOUBLE:
            return load_double(node.data, row)
        if node.kind == KIND_DECIMAL:
            unscaled = int.from_bytes(node.data[node.width * row:node.width * (row + 1)], "little", signed=True)
            digits = tuple(map(int, str(abs(unscaled))))
            return decimal.Decimal((unscaled < 0, digits, -node.scale))
        if node.kind == KIND_DAY_TIME:
            return load32(node.data, 2 * row), load32(node.data, 2 * row + 1)
        if node.kind == KIND_MONTH_DAY_NANO:
            return load32(node.data, 4 * row), load32(node.data, 4 * row + 1), load64(node.data, 2 * row + 1)
        if node.kind == KIND_STRING or node.kind == KIND_BINARY:
            get_bytes(node, row, &data, &size)
            return data[:size].decode("utf-8", "replace") if node.kind == KIND_STRING else data[:size]
        if node.kind == KIND_STRUCT:
            return [
                ((<bytes> node.children[i].name).decode("utf-8", "replace"), self.cell(&node.children[i], row))
                for i in range(node.child_count)
            ]
        get_list(node, row, &start, &size)
        items = [self.cell(&node.children[0], start + i) for i in range(size)]
        if node.kind == KIND_MAP:
            return [None if item is None else (item[0][1], item[1][1]) for item in items]
        return items


cdef Tree tree_of(object batch):
    return Tree(batch)


cdef object invalid(tuple path, str what):
    return ValueError(f"column {'.'.join(path)!r} is an invalid Arrow array: {what}")


cdef void free_children(node_t* node) noexcept nogil:
    cdef int64_t i
    if node.children != NULL:
        for i in range(node.child_count):
            free_children(&node.children[i])
        PyMem_RawFree(node.children)
        node.children = NULL


cdef list path_to(const node_t* node, const node_t* wanted):
    """Names from below `node` down to `wanted`, or None."""
    cdef int64_t i
    if node == wanted:
        return []
    for i in range(node.child_count):
        found = path_to(&node.children[i], wanted)
        if found is not None:
            name = (<bytes> node.children[i].name).decode("utf-8", "replace")
            return found if node.kind == KIND_DICTIONARY else [name, *found]
    return None


ctypedef struct above_t:
    const node_t* node    # a struct, whose rows are those of its fields
    const above_t* above  # the struct that it is a field of, or NULL


cdef bint is_hidden(const above_t* above, int64_t row) noexcept nogil:
    """Whether a field's row is never read, since a struct above it is null. pyarrow leaves anything there."""
    while above != NULL:
        if is_null(above.node, row):
            return True
        above = above.above
    return False


cdef const node_t* first_invalid(
    const node_t* node, int64_t start, int64_t stop, int64_t* where, const above_t* above
) noexcept nogil:
    """The first node with an element among the rows from `start` to `stop` that leads out of bounds, or NULL."""
    cdef int64_t i, low, high
    cdef above_t own
    cdef const node_t* found = NULL
    cdef const node_t* child = node.children
    if start >= stop:
        return NULL
    if start < 0 or stop > node.length:
        where[0] = start
        return node
    if node.kind == KIND_STRUCT:
        own.node = node
        own.above = above
        for i in range(node.child_count):
            found = first_invalid(&node.children[i], start, stop, where, &own)
            if found != NULL:
                return found
    elif node.kind == KIND_STRING or node.kind == KIND_BINARY:
        if node.layout == LAYOUT_VIEWS:
            return node if views_wrong(node, start, stop, where) else NULL
        if node.layout != LAYOUT_FIXED and offsets_wrong(node, start, stop, node.limit, where, &low, &high):
            return node
    elif node.kind == KIND_LIST or node.kind == KIND_MAP:
        if node.layout == LAYOUT_FIXED:
            low = start * node.width
            high = stop * node.width
        elif node.layout == LAYOUT_SPANS32 or node.layout == LAYOUT_SPANS64:
            if spans_wrong(node, start, stop, where, &low, &high):
                return node
        elif offsets_wrong(node, start, stop, child.length, where, &low, &high):
            return node
        return first_invalid(child, low, high, where, NULL)
    elif node.kind == KIND_DICTIONARY:
        for i in range(start, stop):
            if not is_null(node, i) and not 0 <= dictionary_row(node, i) < child.length and not is_hidden(above, i):
                where[0] = i
                return node
        return first_invalid(child, 0, child.length, where, NULL)
    elif node.kind == KIND_RUNS:
        high = 0
        for i in range(child.length):
            low = high
            high = get_integer(child, i)
            if high <= low:
                break
        if child.length == 0 or high <= low or high < node.bit + stop or node.children[1].length < child.length:
            where[0] = 0
            return node
        return first_invalid(&node.children[1], 0, child.length, where, NULL)
    return NULL


cdef bint offsets_wrong(
    const node_t* node, int64_t start, int64_t stop, int64_t limit, int64_t* where, int64_t* low, int64_t* high
) noexcept nogil:
    """Whether offsets are not in order from 0 to `limit`; `low` and `high` are the first and the last.

    If none decreases, all lie between these two: one comparison each, without a branch.
    """
    cdef int64_t i
    cdef bint narrow = node.layout == LAYOUT_OFFSETS32, wrong = False
    if narrow:
        low[0] = load32(node.offsets, start)
        high[0] = load32(node.offsets, stop)
        for i in range(start, stop):
            wrong |= load32(node.offsets, i + 1) < load32(node.offsets, i)
    else:
        low[0] = load64(node.offsets, start)
        high[0] = load64(node.offsets, stop)
        for i in range(start, stop):
            wrong |= load64(node.offsets, i + 1) < load64(node.offsets, i)
    if not wrong and low[0] >= 0 and high[0] <= limit:
        return False
    for i in range(start, stop):
        where[0] = i
        low[0] = load32(node.offsets, i) if narrow else load64(node.offsets, i)
        high[0] = load32(node.offsets, i + 1) if narrow else load64(node.offsets, i + 1)
        if low[0] < 0 or high[0] < low[0] or high[0] > limit:
            break
    return True


cdef bint spans_wrong(
    const node_t* node, int64_t start, int64_t stop, int64_t* where, int64_t* low, int64_t* high
) noexcept nogil:
    """Whether the lists of a list view are not within the items; `low` to `high` are items that are used."""
    cdef int64_t i, at, size, length = node.children[0].length
    low[0] = length
    high[0] = 0
    for i in range(start, stop):
        if is_null(node, i):
            continue
        get_list(node, i, &at, &size)
        if at < 0 or size < 0 or at > length - size:
            where[0] = i
            return True
        low[0] = min(low[0], at)
        high[0] = max(high[0], at + size)
    return False


cdef bint views_wrong(const node_t* node, int64_t start, int64_t stop, int64_t* where) noexcept nogil:
    cdef int64_t i, size, number
    cdef const char* view
    for i in range(start, stop):
        if is_null(node, i):
            continue
        view = node.data + 16 * i
        size = load32(view, 0)
        if 0 <= size <= 12:
            continue
        number = load32(view, 2)
        where[0] = i
        if size < 0 or not 0 <= number < node.buffer_count:
            return True
        if not 0 <= load32(view, 3) <= load64(node.buffer_sizes, number) - size:
            return True
    return False
