# A record batch as a tree of C nodes: see the .pyx for how one is made and what is checked.
#
#     RecordBatch                 STRUCT, children in order
#       id: int64                   INT64      data -> row 0
#       name: string                STRING     offsets -> row 0, data
#       tags: list<string>          LIST       offsets -> row 0, children[0] the items
#       kind: dictionary<string>    DICTIONARY data -> index of row 0 (index_kind), children[0] the values
#
# Rows are counted from 0 in every node. The offsets of slices are applied when the tree is made, so that
#
#     a field of a struct        has the row of its struct
#     an item of a list          has a row from `list_start` and `list_size`
#     a dictionary's value       has the row `dictionary_row`
#     a run's value              has the row `run_row`
#
# and only bits (`validity`, values of BOOL) are still counted from `bit`. Numbers are loaded with memcpy, since Arrow
# allows any alignment. All pointers are borrowed from the batch, which `Tree` keeps alive.

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy


# Arrow's C data interface, a public ABI
cdef extern from *:
    """
    #ifndef ARROW_C_DATA_INTERFACE
    #define ARROW_C_DATA_INTERFACE
    #include <stdint.h>
    struct ArrowSchema {
        const char* format;
        const char* name;
        const char* metadata;
        int64_t flags;
        int64_t n_children;
        struct ArrowSchema** children;
        struct ArrowSchema* dictionary;
        void (*release)(struct ArrowSchema*);
        void* private_data;
    };
    struct ArrowArray {
        int64_t length;
        int64_t null_count;
        int64_t offset;
        int64_t n_buffers;
        int64_t n_children;
        const void** buffers;
        struct ArrowArray** children;
        struct ArrowArray* dictionary;
        void (*release)(struct ArrowArray*);
        void* private_data;
    };
    #endif
    """
    struct ArrowSchema:
        const char* format
        const char* name
        int64_t n_children
        ArrowSchema** children
        ArrowSchema* dictionary
        void (*release)(ArrowSchema*)

    struct ArrowArray:
        int64_t length
        int64_t null_count
        int64_t offset
        int64_t n_buffers
        int64_t n_children
        const void** buffers
        ArrowArray** children
        ArrowArray* dictionary
        void (*release)(ArrowArray*)


cdef enum:
    KIND_NULL = 0
    KIND_BOOL = 1
    KIND_INT8 = 2
    KIND_INT16 = 3
    KIND_INT32 = 4
    KIND_INT64 = 5
    KIND_UINT8 = 6
    KIND_UINT16 = 7
    KIND_UINT32 = 8
    KIND_UINT64 = 9
    KIND_HALF = 10
    KIND_FLOAT = 11
    KIND_DOUBLE = 12
    KIND_DECIMAL = 13         # width bytes (4, 8, 16 or 32), little endian, two's complement; precision, scale
    KIND_STRING = 14          # UTF-8, not checked; layout
    KIND_BINARY = 15          # layout
    KIND_DATE32 = 16          # days since 1970
    KIND_DATE64 = 17          # milliseconds since 1970
    KIND_TIME = 18            # width 4 or 8; unit, since midnight
    KIND_TIMESTAMP = 19       # unit, since 1970; zone
    KIND_DURATION = 20        # unit
    KIND_MONTHS = 21          # interval: int32 months
    KIND_DAY_TIME = 22        # interval: int32 days, int32 milliseconds
    KIND_MONTH_DAY_NANO = 23  # interval: int32 months, int32 days, int64 nanoseconds
    KIND_LIST = 24            # layout; children[0]: items
    KIND_MAP = 25             # as LIST; children[0]: STRUCT of key and value
    KIND_STRUCT = 26          # children: fields
    KIND_DICTIONARY = 27      # index_kind; children[0]: values
    KIND_RUNS = 28            # run-end encoded; children[0]: run ends, children[1]: values

cdef enum:
    LAYOUT_OFFSETS32 = 0  # STRING, BINARY, LIST, MAP: int32 start, next start
    LAYOUT_OFFSETS64 = 1  # the same of int64
    LAYOUT_FIXED = 2      # `width` bytes or items each
    LAYOUT_VIEWS = 3      # STRING, BINARY: 16 bytes each: size, then 12 bytes or prefix, buffer, position
    LAYOUT_SPANS32 = 4    # LIST (list view): int32 starts in `offsets`, int32 sizes in `sizes`
    LAYOUT_SPANS64 = 5    # the same of int64

cdef enum:
    UNIT_SECOND = 0
    UNIT_MILLI = 1
    UNIT_MICRO = 2
    UNIT_NANO = 3


ctypedef struct node_t:
    int kind                 # KIND_*
    int layout               # LAYOUT_*
    int unit                 # UNIT_*
    int index_kind           # DICTIONARY: KIND_INT8 to KIND_UINT64
    int32_t precision        # DECIMAL: digits
    int32_t scale            # DECIMAL: of them behind the point; may be negative
    int64_t width            # bytes per element of `data`; LAYOUT_FIXED of a LIST: items per row
    int64_t length           # rows
    int64_t limit            # STRING, BINARY with offsets: bytes of `data` that are there
    int64_t bit              # bits before row 0 in `validity`, and in `data` of a BOOL; RUNS: elements before row 0
    const uint8_t* validity  # 1 = value, or NULL when no row is null
    const char* data         # values; bytes of strings; views
    const char* offsets      # OFFSETS, SPANS: that of row 0
    const char* sizes        # SPANS: that of row 0
    const char** buffers     # VIEWS: data buffers by number; `buffer_count` of them
    const char* buffer_sizes # VIEWS: int64 each
    int64_t buffer_count
    const char* name         # of the field, UTF-8, ends in NUL
    const char* format       # of the type, as the C data interface has it
    const char* zone         # TIMESTAMP: "" when it has none
    int64_t child_count
    node_t* children         # owned by the tree
    void* plan               # for encoders: what they know of this node; the tree neither reads nor frees it


cdef class Tree:
    cdef node_t root             # STRUCT, its rows are those of the batch
    cdef readonly object batch   # keeps the memory alive, together with:
    cdef object schema_capsule   # these call Arrow's release functions when they go
    cdef object array_capsule

    # 'a.b.item': how error texts call a node of this tree
    cdef str path(self, const node_t* node)
    # The cell as a Python object, for error texts and tests
    cdef object cell(self, const node_t* node, int64_t row)

    cdef int build(
        self, node_t* node, const ArrowSchema* schema, const ArrowArray* array, int64_t shift, int64_t length, tuple path
    ) except -1
    cdef int build_bytes(self, node_t* node, const ArrowArray* array, int64_t first, tuple path) except -1
    cdef int build_nested(
        self, node_t* node, const ArrowSchema* schema, const ArrowArray* array, int64_t first, tuple path
    ) except -1
    cdef int build_dictionary(
        self, node_t* node, const ArrowSchema* schema, const ArrowArray* array, int64_t first, tuple path
    ) except -1
    cdef int allocate_children(self, node_t* node, int64_t count) except -1
    cdef const char* buffer(
        self, const node_t* node, const ArrowArray* array, int number, int64_t start, tuple path
    ) except NULL


# Of a whole record batch, checked, or raises TypeError (a type that no node has) or ValueError (invalid array).
cdef Tree tree_of(object batch)


cdef inline bint is_null(const node_t* node, int64_t row) noexcept nogil:
    """As the node's own bits say. A DICTIONARY or RUNS may also lead to a null value, and KIND_NULL is always null."""
    cdef int64_t bit
    if node.validity == NULL:
        return node.kind == KIND_NULL
    bit = node.bit + row
    return not (node.validity[bit >> 3] >> (bit & 7)) & 1


cdef inline int32_t load32(const char* data, int64_t index) noexcept nogil:
    cdef int32_t number
    memcpy(&number, data + 4 * index, 4)
    return number


cdef inline int64_t load64(const char* data, int64_t index) noexcept nogil:
    cdef int64_t number
    memcpy(&number, data + 8 * index, 8)
    return number


cdef inline float load_float(const char* data, int64_t index) noexcept nogil:
    cdef float number
    memcpy(&number, data + 4 * index, 4)
    return number


cdef inline double load_double(const char* data, int64_t index) noexcept nogil:
    cdef double number
    memcpy(&number, data + 8 * index, 8)
    return number


cdef inline bint get_bool(const node_t* node, int64_t row) noexcept nogil:
    cdef int64_t bit = node.bit + row
    return (<const uint8_t*> node.data)[bit >> 3] >> (bit & 7) & 1


cdef inline int64_t load_integer(int kind, const char* data, int64_t index) noexcept nogil:
    """An element of an array of integers. Of UINT64 the bits."""
    cdef int16_t number
    if kind == KIND_INT64 or kind == KIND_UINT64:
        return load64(data, index)
    if kind == KIND_INT32:
        return load32(data, index)
    if kind == KIND_UINT32:
        return <uint32_t> load32(data, index)
    if kind == KIND_INT8:
        return (<const int8_t*> data)[index]
    if kind == KIND_UINT8:
        return (<const uint8_t*> data)[index]
    memcpy(&number, data + 2 * index, 2)
    if kind == KIND_INT16:
        return number
    return <uint16_t> number


cdef inline int64_t get_integer(const node_t* node, int64_t row) noexcept nogil:
    """INT8 to UINT64 (of UINT64 the bits), and all kinds of times: DATE32, DATE64, TIME, TIMESTAMP, DURATION."""
    if node.kind <= KIND_UINT64:
        return load_integer(node.kind, node.data, row)
    return load32(node.data, row) if node.width == 4 else load64(node.data, row)


cdef inline void get_bytes(const node_t* node, int64_t row, const char** data, int64_t* size) noexcept nogil:
    """The bytes of a STRING or BINARY, which must not be null. Copies nothing."""
    cdef int64_t start
    cdef const char* view
    if node.layout == LAYOUT_OFFSETS32:
        start = load32(node.offsets, row)
        data[0] = node.data + start
        size[0] = load32(node.offsets, row + 1) - start
    elif node.layout == LAYOUT_OFFSETS64:
        start = load64(node.offsets, row)
        data[0] = node.data + start
        size[0] = load64(node.offsets, row + 1) - start
    elif node.layout == LAYOUT_FIXED:
        data[0] = node.data + node.width * row
        size[0] = node.width
    else:
        view = node.data + 16 * row
        size[0] = load32(view, 0)
        data[0] = view + 4 if size[0] <= 12 else node.buffers[load32(view, 2)] + load32(view, 3)


cdef inline void get_list(const node_t* node, int64_t row, int64_t* start, int64_t* size) noexcept nogil:
    """Which rows of children[0] are the items of a LIST or MAP that is not null."""
    if node.layout == LAYOUT_OFFSETS32:
        start[0] = load32(node.offsets, row)
        size[0] = load32(node.offsets, row + 1) - start[0]
    elif node.layout == LAYOUT_OFFSETS64:
        start[0] = load64(node.offsets, row)
        size[0] = load64(node.offsets, row + 1) - start[0]
    elif node.layout == LAYOUT_FIXED:
        start[0] = node.width * row
        size[0] = node.width
    elif node.layout == LAYOUT_SPANS32:
        start[0] = load32(node.offsets, row)
        size[0] = load32(node.sizes, row)
    else:
        start[0] = load64(node.offsets, row)
        size[0] = load64(node.sizes, row)


cdef inline int64_t dictionary_row(const node_t* node, int64_t row) noexcept nogil:
    """Which row of children[0] the value of a DICTIONARY has, that is not null."""
    return load_integer(node.index_kind, node.data, row)


cdef inline int64_t run_row(const node_t* node, int64_t row) noexcept nogil:
    """Which row of children[1] the value of a RUNS has: the first run that ends behind the row."""
    cdef const node_t* ends = &node.children[0]
    cdef int64_t low = 0, high = ends.length - 1, middle
    row += node.bit
    while low < high:
        middle = (low + high) >> 1
        if get_integer(ends, middle) > row:
            high = middle
        else:
            low = middle + 1
    return low


cdef inline const node_t* resolve(const node_t* node, int64_t* row) noexcept nogil:
    """The plain node and row behind dictionaries and runs, or NULL for a null, wherever on the way it is."""
    while not is_null(node, row[0]):
        if node.kind == KIND_DICTIONARY:
            row[0] = dictionary_row(node, row[0])
            node = &node.children[0]
        elif node.kind == KIND_RUNS:
            row[0] = run_row(node, row[0])
            node = &node.children[1]
        else:
            return node
    return NULL


cdef inline int64_t per_second(int unit) noexcept nogil:
    """Of a time, timestamp or duration."""
    return 1 if unit == UNIT_SECOND else 1000 if unit == UNIT_MILLI else 1000000 if unit == UNIT_MICRO else 1000000000
