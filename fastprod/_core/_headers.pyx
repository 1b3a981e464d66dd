"""Headers as one block of bytes: packed from what callers give, unpacked for callbacks, told to librdkafka."""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport INT32_MAX
from libc.stdlib cimport free, realloc

from fastprod._core._balance cimport field_size, varint_size
from fastprod._core._columns cimport CELL_BAD, CELL_NULL, CELL_VALUE, column_get
from fastprod._core._rdkafka cimport api as rdkafka


cdef bytes pack_headers(headers):
    """Headers as one block: a headers_t, then per header two lengths, name and value."""
    cdef headers_t head
    cdef header_t entry
    cdef int64_t wire = 0
    cdef uint32_t count = 0
    if type(headers) is dict:
        items = headers.items()
    elif isinstance(headers, list):
        items = headers
    elif isinstance(headers, dict):
        items = headers.items()
    else:
        raise TypeError(
            f"headers must be a dict or a list of (name, value) tuples, not {type(headers).__name__}"
        )
    parts = []
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2:
            raise TypeError(f"a header must be a (name, value) tuple, not {item!r}")
        name, value = item
        if not isinstance(name, str):
            raise TypeError(f"a header's name must be str, not {type(name).__name__}")
        if isinstance(value, str):
            value = str.encode(value)  # str's own, and bytes' own: what is packed is as long as it says
        elif value is not None and type(value) is not bytes:
            try:
                value = bytes(memoryview(value))
            except TypeError:
                raise TypeError(
                    f"header {name!r} must be bytes, str, None or a buffer, not {type(value).__name__}"
                ) from None
        name = str.encode(name)
        entry.name_size = len(name)
        entry.value_size = NO_VALUE if value is None else len(value)
        wire += field_size(len(name)) + field_size(-1 if value is None else len(value))
        count += 1
        parts.append((<const char*>&entry)[:sizeof(header_t)])
        parts.append(name)
        if value is not None:
            parts.append(value)
    head.count = count
    head.wire = <uint32_t>(wire + varint_size(head.count))
    head.unused = 0
    packed = b"".join(parts)
    head.size = <uint32_t>(sizeof(headers_t) + len(packed))
    return (<const char*>&head)[:sizeof(headers_t)] + packed


cdef list unpack_headers(bytes packed):
    cdef const char* at = PyBytes_AS_STRING(packed)
    cdef uint32_t count = headers_head(at).count
    cdef header_t entry
    at += sizeof(headers_t)
    headers = []
    for _ in range(count):
        memcpy(&entry, at, sizeof(header_t))
        at += sizeof(header_t)
        name = at[:entry.name_size].decode()
        at += entry.name_size
        if entry.value_size == NO_VALUE:
            headers.append((name, None))
        else:
            headers.append((name, at[:entry.value_size]))
            at += entry.value_size
    return headers


cdef class HeaderColumn:
    """Headers of many records, as Arrow keeps them: packed one by one, without a Python object for each.

    For one thread at a time.
    """

    def __init__(self, offsets, Column names, Column values):
        cdef int64_t i
        self.names = names
        self.values = values
        self.offsets = offsets
        for i in range(len(offsets) - 1):
            if self.offsets[i] > self.offsets[i + 1]:
                raise ValueError(f"offsets of headers must not fall, as from {offsets[i]} to {offsets[i + 1]}")
        if len(offsets) < 1 or self.offsets[0] < 0 or self.offsets[len(offsets) - 1] > min(len(names), len(values)):
            raise ValueError(f"offsets of headers must be from 0 to {min(len(names), len(values))}")

    def __dealloc__(self):
        free(self.packed)

    def __len__(self):
        return len(self.offsets) - 1

    def __getitem__(self, int64_t index):
        """List of (name, value); None for no headers."""
        cdef int64_t at, size
        cdef const char* data
        if not 0 <= index < len(self):
            raise IndexError(f"there are headers of {len(self)} records")
        found = []
        for at in range(self.offsets[index], self.offsets[index + 1]):
            kind = column_get(&self.names.c, at, &data, &size)
            name = data[:size].decode(errors="replace") if kind == CELL_VALUE else None
            kind = column_get(&self.values.c, at, &data, &size)
            found.append((name, data[:size] if kind == CELL_VALUE else None))
        return found or None

    cdef int64_t pack(self, int64_t index, int64_t most) noexcept nogil:
        """Puts the headers of a record into `packed`, as a headers_t. Returns its bytes, 0 = none, or HEADERS_*.

        If they take more than `most` on the wire, nobody will look at what follows the headers_t, and it is not made.
        """
        cdef int64_t first = self.offsets[index], end = self.offsets[index + 1], at, capacity
        cdef int64_t size = sizeof(headers_t), wire = varint_size(end - first), name_size, value_size
        cdef const char* name
        cdef const char* value
        cdef header_t entry
        cdef headers_t head
        cdef char* to
        cdef int kind
        if first == end:
            return 0
        for at in range(first, end):
            kind = column_get(&self.names.c, at, &name, &name_size)
            if kind == CELL_NULL:
                return HEADERS_NO_NAME
            if kind == CELL_BAD:
                return HEADERS_TOO_LARGE
            kind = column_get(&self.values.c, at, &value, &value_size)
            if kind == CELL_NULL:
                value_size = -1
            elif kind == CELL_BAD:
                return HEADERS_TOO_LARGE
            size += <int64_t>sizeof(header_t) + name_size + max(value_size, 0)
            wire += field_size(name_size) + field_size(value_size)
        if wire > INT32_MAX or size > INT32_MAX:
            return HEADERS_TOO_LARGE
        capacity = <int64_t>sizeof(headers_t) if wire > most else size
        if capacity > self.capacity:
            capacity += min(capacity, 1 << 16)
            to = <char*>realloc(self.packed, capacity)
            if to == NULL:
                return HEADERS_NO_MEMORY
            self.packed = to
            self.capacity = capacity
        head.size = <uint32_t>size
        head.count = <uint32_t>(end - first)
        head.wire = <uint32_t>wire
        head.unused = 0
        to = self.packed
        memcpy(to, &head, sizeof(headers_t))
        if wire > most:
            return size
        to += sizeof(headers_t)
        for at in range(first, end):
            column_get(&self.names.c, at, &name, &name_size)
            entry.name_size = <uint32_t>name_size
            entry.value_size = NO_VALUE
            value_size = 0
            if column_get(&self.values.c, at, &value, &value_size) == CELL_VALUE:
                entry.value_size = <uint32_t>value_size
            memcpy(to, &entry, sizeof(header_t))
            to += sizeof(header_t)
            memcpy(to, name, name_size)
            to += name_size
            if value_size:
                memcpy(to, value, value_size)
                to += value_size
        return size


cdef rd_kafka_headers_t* librdkafka_headers(const char* packed) noexcept nogil:
    """A copy of them as librdkafka keeps headers; whoever gets it owns it."""
    cdef uint32_t count = headers_head(packed).count
    cdef rd_kafka_headers_t* made = rdkafka.headers_new(count)
    cdef const char* at = packed + sizeof(headers_t)
    cdef header_t entry
    cdef uint32_t i
    for i in range(count):
        memcpy(&entry, at, sizeof(header_t))
        at += sizeof(header_t)
        if entry.value_size == NO_VALUE:
            rdkafka.header_add(made, at, entry.name_size, NULL, -1)
            at += entry.name_size
        else:
            rdkafka.header_add(made, at, entry.name_size, at + entry.name_size, entry.value_size)
            at += entry.name_size + entry.value_size
    return made
