"""Random Arrow record batches for property tests: nested types, nulls everywhere, slices, dictionaries."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

UNITS = ("s", "ms", "us", "ns")

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64()]
UNSIGNED = [pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()]
PLAIN: list[Any] = [
    pa.null(),
    pa.bool_(),
    *INTEGERS,
    *UNSIGNED,
    pa.float16(),
    pa.float32(),
    pa.float64(),
    *TEXTS,
    pa.string_view(),
    pa.binary_view(),
    pa.binary(3),
    pa.date32(),
    pa.date64(),
    pa.time32("s"),
    pa.time32("ms"),
    pa.time64("us"),
    pa.time64("ns"),
    *(pa.timestamp(unit) for unit in UNITS),
    *(pa.timestamp(unit, "UTC") for unit in UNITS),
    *(pa.duration(unit) for unit in UNITS),
    pa.decimal128(38, 10),
    pa.decimal128(9, -2),
    pa.decimal256(50, 20),
]


def types(plain: list[Any], depth: int = 3, *, spark: bool = False) -> st.SearchStrategy[Any]:
    """Types of these plain ones, nested up to `depth` deep; with `spark` only such that Spark has."""
    leaf = st.sampled_from(plain)
    if depth == 0:
        return leaf
    inner = types(plain, depth - 1, spark=spark)
    fields = st.lists(inner, min_size=0 if not spark else 1, max_size=3).map(
        lambda kinds: pa.struct([pa.field(f"f{i}", kind) for i, kind in enumerate(kinds)])
    )
    keys = st.sampled_from([pa.string(), pa.int64(), pa.int32()])
    options = [leaf, leaf, leaf, inner.map(pa.list_), fields, st.tuples(keys, inner).map(lambda kv: pa.map_(*kv))]
    if not spark:
        options += [
            inner.map(pa.large_list),
            inner.map(pa.list_view),
            inner.map(pa.large_list_view),
            inner.map(lambda kind: pa.list_(kind, 2)),
            st.sampled_from([*INTEGERS, *UNSIGNED]).map(lambda kind: pa.dictionary(kind, pa.string())),
        ]
    return st.one_of(options)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, None among them."""
    return st.one_of(st.none(), solid(kind), solid(kind))


def solid(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, but for None on the outside."""
    known = pa.types
    if known.is_null(kind):
        return st.none()
    if known.is_boolean(kind):
        return st.booleans()
    if known.is_integer(kind):
        bits = kind.bit_width
        low, high = (0, 2**bits - 1) if kind in UNSIGNED else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return st.integers(low, high)
    if known.is_floating(kind):
        return st.floats(width=kind.bit_width)
    if known.is_decimal(kind):
        most = 10**kind.precision - 1
        return st.integers(-most, most).map(lambda n: _decimal(n, kind.scale))
    if known.is_string(kind) or known.is_large_string(kind) or known.is_string_view(kind):
        return st.text(max_size=20)
    if known.is_fixed_size_binary(kind):
        return st.binary(min_size=kind.byte_width, max_size=kind.byte_width)
    if known.is_binary(kind) or known.is_large_binary(kind) or known.is_binary_view(kind):
        return st.binary(max_size=20)
    if known.is_date(kind):
        return st.dates()
    if known.is_time(kind):
        return st.times().map(lambda time: _rounded(time, kind.unit))
    if known.is_timestamp(kind):
        # Nanoseconds in 64 bits reach from 1677 to 2262
        low, high = dt.datetime(1700, 1, 1), dt.datetime(2250, 1, 1)
        if kind.unit != "ns":
            low, high = dt.datetime(1, 1, 2), dt.datetime(9999, 12, 30)
        zone = dt.UTC if kind.tz else None
        return st.datetimes(low, high).map(lambda time: _rounded(time, kind.unit).replace(tzinfo=zone))
    if known.is_duration(kind):
        most = {"s": 10**11, "ms": 10**14, "us": 10**17, "ns": 9 * 10**18}[kind.unit]
        return st.integers(-most, most)
    if known.is_dictionary(kind):
        return solid(kind.value_type)
    if known.is_map(kind):
        return st.dictionaries(solid(kind.key_type), values(kind.item_type), max_size=3).map(lambda d: list(d.items()))
    if known.is_struct(kind):
        return st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    size = (
        {"min_size": kind.list_size, "max_size": kind.list_size} if known.is_fixed_size_list(kind) else {"max_size": 3}
    )
    return st.lists(values(kind.value_type), **size)


def _decimal(number: int, scale: int) -> Any:
    import decimal

    return decimal.Decimal((number < 0, tuple(map(int, str(abs(number)))), -scale))


def _rounded(time: Any, unit: str) -> Any:
    digits = {"s": 1_000_000, "ms": 1000}.get(unit, 1)
    return time.replace(microsecond=time.microsecond // digits * digits)


@st.composite
def batches(draw: Any, plain: list[Any] = PLAIN, depth: int = 3, columns: int = 4, rows: int = 8) -> Any:
    """A record batch of random types, whose columns are slices of longer arrays."""
    arrays = []
    count = draw(st.integers(0, rows))
    for kind in draw(st.lists(types(plain, depth), min_size=1, max_size=columns)):
        before, after = draw(st.integers(0, 9)), draw(st.integers(0, 2))
        cells = draw(st.lists(values(kind), min_size=count, max_size=count))
        filler = draw(values(kind))
        arrays.append(array_of([filler] * before + cells + [filler] * after, kind)[before : before + count])
    return pa.RecordBatch.from_arrays(arrays, names=[f"c{i}" for i in range(len(arrays))])


def array_of(cells: list[Any], kind: Any) -> Any:
    """pa.array, also for types that it cannot make itself."""
    known = pa.types
    if known.is_fixed_size_list(kind):
        flat = [item for cell in cells for item in (cell if cell is not None else [None] * kind.list_size)]
        mask = pa.array([cell is None for cell in cells], pa.bool_())
        return pa.FixedSizeListArray.from_arrays(array_of(flat, kind.value_type), type=kind, mask=mask)
    if known.is_list_view(kind) or known.is_large_list_view(kind):
        plain = (pa.list_ if known.is_list_view(kind) else pa.large_list)(kind.value_type)
        listed = array_of(cells, plain)
        cls = pa.ListViewArray if known.is_list_view(kind) else pa.LargeListViewArray
        sizes = [len(cell or ()) for cell in cells]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        width = pa.int32() if known.is_list_view(kind) else pa.int64()
        made = cls.from_arrays(pa.array(starts, width), pa.array(sizes, width), listed.flatten())
        bits = pa.array([cell is not None for cell in cells], pa.bool_()).buffers()[1]
        return cls.from_buffers(kind, len(cells), [bits, *made.buffers()[1:3]], children=[made.values])
    if known.is_list(kind) or known.is_large_list(kind) or known.is_map(kind):
        offsets, flat = [0], []
        for cell in cells:
            flat += cell or ()
            offsets.append(len(flat))
        width = pa.int64() if known.is_large_list(kind) else pa.int32()
        starts = pa.array(offsets, width).buffers()[1]
        bits = pa.array([cell is not None for cell in cells], pa.bool_()).buffers()[1]
        if known.is_map(kind):
            keys = array_of([key for key, _ in flat], kind.key_type)
            items = array_of([item for _, item in flat], kind.item_type)
            entry = pa.struct([kind.key_field, kind.item_field])
            entries = pa.StructArray.from_arrays([keys, items], fields=list(entry))
            return pa.Array.from_buffers(kind, len(cells), [bits, starts], children=[entries])
        return pa.Array.from_buffers(kind, len(cells), [bits, starts], children=[array_of(flat, kind.value_type)])
    if known.is_struct(kind):
        bits = pa.array([cell is not None for cell in cells], pa.bool_()).buffers()[1]
        children = [array_of([(cell or {}).get(field.name) for cell in cells], field.type) for field in kind]
        return pa.Array.from_buffers(kind, len(cells), [bits], children=children)
    if known.is_dictionary(kind):
        found = list(dict.fromkeys(cell for cell in cells if cell is not None))
        indices = [None if cell is None else found.index(cell) for cell in cells]
        return pa.DictionaryArray.from_arrays(pa.array(indices, kind.index_type), pa.array(found, kind.value_type))
    if known.is_duration(kind):
        return pa.array(cells, pa.int64()).view(kind)
    return pa.array(cells, kind)
