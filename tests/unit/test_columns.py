"""Every kind of column against the plain list of bytes or None that it stands for."""

import array
import gc
import mmap
import random
import re
import sys
import tracemalloc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastprod._core._columns import Column, columns

Plain = list[bytes | None]
LIMIT = 2**31 - 1


def plain(count: int = 200, *, text: bool = False, width: int | None = None, nulls: bool = True) -> Plain:
    """Random elements: empty, short enough for an inline view (12 bytes), longer, null."""
    source = random.Random(count)
    items: Plain = []
    for _ in range(count):
        size = source.choice([0, 1, 11, 12, 13, 40]) if width is None else width
        item = bytes(source.choices(range(33, 127), k=size)) if text else source.randbytes(size)
        items.append(None if nulls and source.random() < 0.3 else item)
    return items


def contents(source: Any, **options: Any) -> Plain:
    return [item for column in columns(source, **options) for item in column]


def strings(items: Plain) -> list[str | None]:
    return [None if item is None else item.decode() for item in items]


def masked(items: Plain, mask: list[bool]) -> Plain:
    return [None if null else item for item, null in zip(items, mask, strict=True)]


def encoded(items: Plain, index_type: Any, value_type: Any = None) -> pa.Array:
    """A dictionary array whose dictionary is out of order and has a null of its own."""
    values = [*sorted({item for item in items if item is not None}, reverse=True), None]
    numbers = [None if item is None else values.index(item) for item in items]
    return pa.DictionaryArray.from_arrays(pa.array(numbers, index_type), pa.array(values, value_type or pa.binary()))


ARROW: dict[str, tuple[Plain, Callable[[Plain], Any]]] = {
    "binary": (plain(), lambda items: pa.array(items, pa.binary())),
    "large_binary": (plain(), lambda items: pa.array(items, pa.large_binary())),
    "binary_view": (plain(), lambda items: pa.array(items, pa.binary_view())),
    "string": (plain(text=True), lambda items: pa.array(strings(items), pa.string())),
    "large_string": (plain(text=True), lambda items: pa.array(strings(items), pa.large_string())),
    "string_view": (plain(text=True), lambda items: pa.array(strings(items), pa.string_view())),
    "fixed_size_binary": (plain(width=5), lambda items: pa.array(items, pa.binary(5))),
    "uuid": (
        plain(width=16),
        lambda items: pa.ExtensionArray.from_storage(pa.uuid(), pa.array(items, pa.binary(16))),
    ),
    "dictionary int8": (plain(90), lambda items: encoded(items, pa.int8())),
    "dictionary uint32": (plain(), lambda items: encoded(items, pa.uint32(), pa.large_binary())),
    "dictionary int64": (plain(), lambda items: encoded(items, pa.int64(), pa.binary_view())),
    "dictionary fixed": (plain(width=5), lambda items: encoded(items, pa.int16(), pa.binary(5))),
    "null": ([None] * 50, lambda items: pa.nulls(len(items))),
}
OTHERS: dict[str, tuple[Plain, Callable[[Plain], Any]]] = {
    "list": (plain(), lambda items: items),
    "tuple": (plain(), tuple),
    "str": (plain(text=True), strings),
    "bytearray": (plain(), lambda items: [item if item is None else bytearray(item) for item in items]),
    "memoryview": (plain(), lambda items: [item if item is None else memoryview(item) for item in items]),
    "numpy items": (
        plain(),
        lambda items: [item if item is None else np.frombuffer(item, np.uint8) for item in items],
    ),
    "numpy object": (plain(), lambda items: np.array(items, dtype=object)),
    "numpy S": (plain(text=True, nulls=False), lambda items: np.array(items)),
    "numpy V": (plain(width=9, nulls=False), lambda items: np.array(items, dtype="V9")),
    "numpy U": (plain(text=True, nulls=False), lambda items: np.array(strings(items))),
    "offsets": (plain(nulls=False), lambda items: (np.cumsum([0, *map(len, items)]), b"".join(items))),
}
if hasattr(np.dtypes, "StringDType"):
    OTHERS["numpy T"] = (
        plain(text=True, nulls=False),
        lambda items: np.array(strings(items), np.dtypes.StringDType()),
    )
ALL = ARROW | OTHERS


@pytest.mark.parametrize("kind", ALL)
def test_round_trip(kind: str) -> None:
    items, make = ALL[kind]
    column = Column(make(items))
    assert len(column) == len(items)
    assert list(column) == items
    assert column[-1] == items[-1]
    assert column.bad == {}


@pytest.mark.parametrize("kind", ALL)
def test_masks(kind: str) -> None:
    items, make = ALL[kind]
    mask = [number % 3 == 1 for number in range(len(items))]
    expected = masked(items, mask)
    arrays = [np.array(mask), np.repeat(mask, 2)[::2], pa.array(mask), pa.chunked_array([mask[:9], mask[9:]])]
    for given in (mask, tuple(mask), *arrays):
        assert contents(make(items), mask=given) == expected
    assert contents(make(items), mask=np.zeros(len(items), bool)) == items
    assert contents(make(items), mask=np.ma.nomask) == items
    assert contents(make(items), mask=[True] * len(items)) == [None] * len(items)


@pytest.mark.parametrize("kind", ARROW)
@pytest.mark.parametrize(("start", "stop"), [(1, None), (3, 17), (8, 9), (13, -5), (7, 7), (0, 0)])
def test_slices(kind: str, start: int, stop: int | None) -> None:
    items, make = ARROW[kind]
    part = make(items)[start:stop]
    expected = items[start:stop]
    assert contents(part) == expected
    assert contents(part[1:]) == expected[1:], "a slice of a slice"
    mask = [number % 2 == 0 for number in range(len(expected))]
    assert contents(part, mask=mask) == masked(expected, mask)


@pytest.mark.parametrize("kind", [kind for kind in ARROW if "dictionary" not in kind])
def test_chunks(kind: str) -> None:
    items, make = ARROW[kind]
    whole = make(items)
    chunked = pa.chunked_array([whole[:5], whole[5:5], whole[5:18], whole[18:]])
    assert [len(column) for column in columns(chunked)] == [5, 0, 13, len(items) - 18]
    assert contents(chunked) == items
    mask = [number % 4 == 0 for number in range(len(items))]
    assert contents(chunked, mask=mask) == masked(items, mask)


def test_chunks_with_dictionaries_of_their_own() -> None:
    first, second = plain(31), plain(32)
    chunked = pa.chunked_array([encoded(first, pa.int32()), encoded(second, pa.int32())])
    assert contents(chunked) == first + second


@pytest.mark.parametrize("kind", ALL)
def test_empty(kind: str) -> None:
    items, make = ALL[kind]
    part = make(items)[:0] if kind != "offsets" else make([])
    assert contents(part) == []
    assert contents(part, mask=[]) == []


@pytest.mark.parametrize("kind", [kind for kind in ARROW if "dictionary" not in kind])
def test_arrays_made_empty_or_null(kind: str) -> None:
    arrow_type = ARROW[kind][1](ARROW[kind][0]).type
    assert contents(pa.nulls(0, arrow_type)) == []
    assert contents(pa.nulls(11, arrow_type)) == [None] * 11
    assert contents(pa.nulls(11, arrow_type)[3:]) == [None] * 8
    assert contents(pa.chunked_array([], arrow_type)) == []


@pytest.mark.parametrize("arrow_type", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(0)])
def test_empty_values_are_not_nulls(arrow_type: Any) -> None:
    assert contents(pa.array([b"", None, b""], arrow_type)) == [b"", None, b""]
    assert contents([b"", "", bytearray(), memoryview(b""), np.array([], np.uint8), None]) == [b""] * 5 + [None]
    assert contents((np.array([0, 0, 0]), b"")) == [b"", b""]


def test_no_column() -> None:
    assert len(Column(None)) == 0
    assert contents(None) == []


def test_a_view_array_with_several_buffers() -> None:
    parts = [pa.array([bytes([number]) * (20 + number), b"short"], pa.binary_view()) for number in range(5)]
    joined = pa.concat_arrays(parts)
    assert len(joined.buffers()) > 3
    assert contents(joined) == joined.to_pylist()
    assert contents(joined[3:8]) == joined[3:8].to_pylist()


def test_numpy_padding() -> None:
    padded = np.array([b"a\0b", b"ab\0", b"", b"\0\0\0", b"abc"], dtype="S3")
    assert contents(padded) == padded.tolist() == [b"a\0b", b"ab", b"", b"", b"abc"]
    assert contents(padded.view("V3")) == [b"a\0b", b"ab\0", b"\0\0\0", b"\0\0\0", b"abc"]


def test_numpy_strides() -> None:
    items = np.array([b"%04d" % number for number in range(20)])
    for part in (items[::3], items[::-1], items[5:15:2], items.view("V4")[::-2]):
        assert contents(part) == [bytes(item) for item in part]
    records = np.array([(1, b"one"), (2, b"two")], dtype=[("number", "i8"), ("key", "S5")])
    assert contents(records["key"]) == [b"one", b"two"]
    objects = np.array([b"a", None, "é", b"d"], dtype=object)
    assert contents(objects[::-1]) == [b"d", "é".encode(), None, b"a"]


def test_masked_arrays_bring_their_own_mask() -> None:
    items = np.ma.MaskedArray(np.array([b"a", b"b", b"c"]), mask=[False, True, False])
    assert contents(items) == [b"a", None, b"c"]
    assert contents(items, mask=[True, False, False]) == [None, None, b"c"]
    assert contents(np.ma.MaskedArray(np.array([b"a"]))) == [b"a"]


def test_mixed_items() -> None:
    items = [
        b"a",
        "é",
        None,
        bytearray(b"c"),
        memoryview(b"xdx")[1:2],
        np.bytes_(b"e"),
        np.str_("f"),
        np.void(b"g\0"),
        array.array("B", [104]),
        np.frombuffer(b"ij", np.uint8),
        np.array(b"kl"),
    ]
    assert contents(items) == [b"a", "é".encode(), None, b"c", b"d", b"e", b"f", b"g\0", b"h", b"ij", b"kl"]


def test_a_tuple_of_two_is_offsets_only_for_wide_integers() -> None:
    assert contents((b"ab", b"cd")) == [b"ab", b"cd"]
    assert contents((np.frombuffer(b"ab", np.uint8), b"cd")) == [b"ab", b"cd"]
    for dtype in (np.int32, np.int64, np.uint32, np.uint64, ">i4"):
        assert contents((np.array([1, 3, 3, 4], dtype=dtype), b"xabcx")) == [b"ab", b"", b"c"]


@pytest.mark.parametrize("data", [b"abc", bytearray(b"abc"), np.frombuffer(b"abc", np.uint8), pa.py_buffer(b"abc")])
def test_offsets_over_any_buffer(data: Any) -> None:
    assert contents((np.array([0, 1, 3]), data), mask=[False, True]) == [b"a", None]


def test_offsets_are_copied() -> None:
    offsets = np.array([0, 1, 2])
    column = Column((offsets, b"ab"))
    offsets[:] = 2**40
    assert list(column) == [b"a", b"b"]


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([0, 2, 1], "key at index 1 has offsets from 2 to 1, which is no part of the 3 bytes of data"),
        ([-1, 2], "key at index 0 has offsets from -1 to 2, which is no part of the 3 bytes of data"),
        ([0, 2, 9], "key at index 1 has offsets from 2 to 9, which is no part of the 3 bytes of data"),
        ([9], "key at index 0 has offsets from 9 to 9, which is no part of the 3 bytes of data"),
        (np.empty(0, int), "key offsets must be one-dimensional with at least one entry"),
        ([[0, 1]], "key offsets must be one-dimensional with at least one entry"),
        (
            np.array([0, 2**63], np.uint64),
            f"key at index 0 has offsets from 0 to {-(2**63)}, which is no part of the 3 bytes of data",
        ),
    ],
)
def test_wrong_offsets(offsets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Column((np.array(offsets), b"abc"), "key")


def test_offsets_need_a_buffer() -> None:
    for data in ("abc", 5, memoryview(b"abcdef")[::2]):
        kind = type(data).__name__
        with pytest.raises(TypeError, match=rf"^key data must be a contiguous buffer, not {kind}$"):
            Column((np.array([0, 1]), data), "key")


BAD: list[tuple[Any, type[Exception], str]] = [
    (5, TypeError, "must be bytes, str, None or a buffer, not int"),
    (1.5, TypeError, "must be bytes, str, None or a buffer, not float"),
    ([b"a"], TypeError, "must be bytes, str, None or a buffer, not list"),
    (np.int64(5), TypeError, "must be bytes, str, None or a buffer, not int64"),
    (np.datetime64("nat"), TypeError, "must be bytes, str, None or a buffer, not datetime64"),
    ("\ud800", ValueError, "is no valid UTF-8: surrogates not allowed"),
    (
        memoryview(b"abcd")[::2],
        ValueError,
        "is no readable buffer: memoryview: underlying buffer is not C-contiguous",
    ),
    (np.array([None]), ValueError, "is no readable buffer: it holds Python objects, not bytes"),
]


@pytest.mark.parametrize(("item", "error", "message"), BAD)
def test_bad_items(item: Any, error: type[Exception], message: str) -> None:
    items = [b"a", None, "b", item, b"c"]
    with pytest.raises(error) as caught:
        Column(items, "key")
    assert str(caught.value) == f"key at index 3 {message}"
    column = Column(items, "key", strict=False)
    assert [column[number] for number in (0, 1, 2, 4)] == [b"a", None, b"b", b"c"]
    assert list(column.bad) == [3]
    with pytest.raises(error) as caught:
        column[3]
    assert caught.value is column.bad[3]
    assert contents(items, mask=[False, False, False, True, False]) == [b"a", None, b"b", None, b"c"], "not read"


def test_a_released_memoryview() -> None:
    view = memoryview(b"abc")
    view.release()
    with pytest.raises(ValueError, match=r"^value at index 0 is no readable buffer: "):
        Column([view])


def test_bad_items_of_object_arrays() -> None:
    column = Column(np.array([b"a", 3, {}], dtype=object), strict=False)
    assert {index: type(error) for index, error in column.bad.items()} == {1: TypeError, 2: TypeError}


def huge_column() -> pa.Array:
    """Elements of 3, 2^31 and 2 bytes, a null of 2^31, one of 2^31 - 1 bytes, in memory never touched."""
    offsets = np.cumsum([0, 3, LIMIT + 1, 2, LIMIT + 1, LIMIT])
    data = mmap.mmap(-1, int(offsets[-1]))
    validity = pa.py_buffer(bytes([0b10111]))
    return pa.Array.from_buffers(pa.large_binary(), 5, [validity, pa.py_buffer(offsets), pa.py_buffer(data)])


@pytest.mark.skipif(sys.maxsize < 2**40, reason="needs a 64-bit address space")
def test_elements_over_the_limit() -> None:
    message = f"is {LIMIT + 1} bytes long, over the limit of {LIMIT} bytes"
    with pytest.raises(ValueError, match=f"^key at index 1 {message}$"):
        Column(huge_column(), "key")
    column = Column(huge_column(), "key", strict=False)
    assert [str(error) for error in column.bad.values()] == [f"key at index 1 {message}"]
    assert [column[0], column[2], column[3]] == [bytes(3), bytes(2), None]
    chunked = pa.chunked_array([pa.array([b"first"], pa.large_binary()), huge_column()])
    with pytest.raises(ValueError, match=f"^key at index 2 {message}$"):
        columns(chunked, "key")
    assert [list(part.bad) for part in columns(chunked, "key", strict=False)] == [[], [1]]
    with pytest.raises(ValueError, match=f"^key at index 0 {message}$"):
        Column([mmap.mmap(-1, LIMIT + 1)], "key")
    assert list(Column([mmap.mmap(-1, LIMIT + 1), b"a"], strict=False).bad) == [0]
    encoded = pa.DictionaryArray.from_arrays(pa.array([0, 1, 3, 1]), huge_column())
    with pytest.raises(ValueError, match=f"^key at index 1 is over the limit of {LIMIT} bytes$"):
        Column(encoded, "key")
    column = Column(encoded, strict=False)
    assert list(column.bad) == [1, 3]
    assert [column[0], column[2]] == [bytes(3), None]


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (b"abc", TypeError, "not bytes"),
        ("abc", TypeError, "not str"),
        ({b"a": 1}, TypeError, "not dict"),
        (iter([b"a"]), TypeError, "not list_iterator"),
        (5, TypeError, "not int"),
        (np.arange(3), TypeError, "key must hold bytes or str, not numpy int64"),
        (np.zeros(1, [("a", object)]), TypeError, "key must hold bytes or str, not numpy [('a', 'O')]"),
        (np.array([[b"a"]]), ValueError, "key must be one-dimensional, not 2-dimensional"),
        (np.array(b"a"), ValueError, "key must be one-dimensional, not 0-dimensional"),
        (pa.array([1]), TypeError, "key must hold bytes or str, not Arrow int64"),
        (pa.array([[b"a"]]), TypeError, "key must hold bytes or str, not Arrow list<item: binary>"),
        (
            pa.array([1]).dictionary_encode(),
            TypeError,
            "key dictionary must hold bytes or str, not Arrow int64",
        ),
        (pa.chunked_array([], pa.int8()), TypeError, "key must hold bytes or str, not Arrow int8"),
        (pa.table({"a": [b"a"]}), TypeError, "key must hold bytes or str, not Arrow struct<a: binary>"),
    ],
)
def test_what_is_no_column(source: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        columns(source, "key")
    assert str(caught.value).endswith(message)
    assert str(caught.value).startswith("key ")


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        ([True], ValueError, "mask of key has 1 entries, but key has 2 elements"),
        ([[True, True]], ValueError, "mask of key has 2 dimensions, but key has 2 elements"),
        (True, ValueError, "mask of key has 0 dimensions, but key has 2 elements"),
        ([0, 1], TypeError, "mask of key must be boolean without nulls, not int64"),
        ([True, None], TypeError, "mask of key must be boolean without nulls, not object"),
        (pa.array([True, None]), TypeError, "mask of key must be boolean without nulls, not object"),
    ],
)
def test_wrong_masks(mask: Any, error: type[Exception], message: str) -> None:
    for source in ([b"a", b"b"], pa.array([b"a", b"b"]), (np.array([0, 1, 2]), b"ab")):
        with pytest.raises(error) as caught:
            Column(source, "key", mask=mask)
        assert str(caught.value) == message


def test_one_column_is_one_chunk() -> None:
    assert list(Column(pa.chunked_array([[b"a"]]))) == [b"a"]
    with pytest.raises(ValueError, match=r"^value has 2 chunks; use columns\(\)$"):
        Column(pa.chunked_array([[b"a"], [b"b"]]))


def test_an_index_out_of_range() -> None:
    column = Column([b"a"])
    for index in (1, -2):
        with pytest.raises(IndexError, match=r"^value has 1 elements$"):
            column[index]
    with pytest.raises(RuntimeError, match=r"^a Column is filled only once$"):
        column.__init__([b"b"])


def test_bytes_that_lie_about_their_length() -> None:
    class Longer(bytes):
        def __len__(self) -> int:
            return 100

    class Negative(bytes):
        def __len__(self) -> int:
            return -1

    assert contents([Longer(b"abc"), Negative(b"abc"), Longer(b"")]) == [b"abc", b"abc", b""]


def test_the_list_may_change_afterwards() -> None:
    items = [b"key-%d" % number for number in range(1000)] + [None, "é" * 50, bytearray(b"x")]
    expected = [item.encode() if isinstance(item, str) else item and bytes(item) for item in items]
    column = Column(items)
    items[::2] = [None] * len(items[::2])
    items.clear()
    gc.collect()
    assert [bytes(500) for _ in range(1000)], "memory that would have been reused"
    assert list(column) == expected


def test_object_arrays_and_masks_may_change_afterwards() -> None:
    items, mask = np.array([b"a" * 50, b"b" * 50], dtype=object), np.array([False, True])
    column, with_mask = Column(items), Column(pa.array([b"a", b"b"]), mask=mask)
    items[:] = None
    mask[:] = ~mask
    assert list(column) == [b"a" * 50, b"b" * 50]
    assert list(with_mask) == [b"a", None]


@pytest.mark.parametrize("make", [list, tuple, lambda items: np.array(items, dtype=object)])
def test_references_are_given_back(make: Callable[[list[Any]], Any]) -> None:
    item, text, writable = b"some bytes" * 3, "some text é" * 3, bytearray(b"writable")
    before = [sys.getrefcount(thing) for thing in (item, text, writable)]
    for _ in range(5):
        column = Column(make([item, text, writable, None] * 3))
        with pytest.raises(BufferError):
            writable.append(1)
        assert column[2] == b"writable"
        del column
        with pytest.raises(TypeError):
            Column(make([item, text, writable, 5]))
    gc.collect()
    assert [sys.getrefcount(thing) for thing in (item, text, writable)] == before
    writable.append(1)


def test_arrow_arrays_live_as_long_as_their_column() -> None:
    array = pa.array([b"a" * 100, None, b"c" * 100])
    column, watch = Column(array), weakref.ref(array)
    del array
    gc.collect()
    assert list(column) == [b"a" * 100, None, b"c" * 100]
    del column
    gc.collect()
    assert watch() is None


def test_memory_comes_back() -> None:
    before = pa.total_allocated_bytes()
    for _ in range(20):
        for items, make in ARROW.values():
            assert contents(make(items)[1:]) == items[1:]
    gc.collect()
    assert pa.total_allocated_bytes() <= before


@pytest.mark.parametrize("kind", ["list", "bytearray", "binary_view", "dictionary int64", "offsets"])
def test_tables_are_freed(kind: str) -> None:
    items, make = ALL[kind]
    source = make(items)
    Column(source)
    tracemalloc.start()
    try:
        for _ in range(200):
            Column(source)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < 200 * 8, "less than a pointer per column"
    finally:
        tracemalloc.stop()


class FakeSeries:
    """What is used of a pandas Series, so that these paths are tested without pandas too."""

    def __init__(self, values: list[Any], array: Any = None) -> None:
        self.values = values
        self.array = array

    def isna(self) -> np.ndarray:
        return np.array([value is None or value != value for value in self.values])

    def to_numpy(self, dtype: Any = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype)


class FakeArrowBacked:
    def __arrow_array__(self, type: Any = None) -> pa.ChunkedArray:
        return pa.chunked_array([["a", None], ["b"]])


class FakeStream:
    def __init__(self, chunked: pa.ChunkedArray) -> None:
        self.chunked = chunked

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.chunked.__arrow_c_stream__(requested_schema)


def test_series() -> None:
    assert contents(FakeSeries([b"a", float("nan"), "c", None])) == [b"a", None, b"c", None]
    assert contents(FakeSeries([b"a", float("nan"), "c"]), mask=[True, False, False]) == [None, None, b"c"]
    assert contents(FakeSeries([], FakeArrowBacked())) == [b"a", None, b"b"]
    assert contents(FakeStream(pa.chunked_array([["a"], [None, "b"]]))) == [b"a", None, b"b"]


def test_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    for values in ([b"a", None, b"c"], ["a", None, "c"], ["a", float("nan"), "c"], ["a", pandas.NA, "c"]):
        assert contents(pandas.Series(values)) == [b"a", None, b"c"]
        assert contents(pandas.Series(values, dtype=object)) == [b"a", None, b"c"]
    for dtype in ("string", "category", pandas.ArrowDtype(pa.string())):
        series = pandas.Series(["a", None, "c", "d"], dtype=dtype)
        assert contents(series) == [b"a", None, b"c", b"d"]
        assert contents(series[::2], mask=pandas.Series([True, False])) == [None, b"c"]
    with pytest.raises(TypeError):
        columns(pandas.Series([1, 2]))


def test_polars() -> None:
    polars = pytest.importorskip("polars")
    assert contents(polars.Series(["a", None, "too long for inline"])[1:]) == [None, b"too long for inline"]
    assert contents(polars.Series([b"a", None])) == [b"a", None]
