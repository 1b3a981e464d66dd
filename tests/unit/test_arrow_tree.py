"""The tree of C nodes has the cells that pyarrow has, whatever the types, and refuses what leads out of bounds."""

from __future__ import annotations

import decimal
import gc
import math
from typing import Any

import arrow_frames
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from fastprod._core._arrow_tree import Tree

PATIENT = settings(deadline=None, max_examples=80, suppress_health_check=list(HealthCheck))


def cell(scalar: Any) -> Any:
    """What the tree should have for a scalar of pyarrow's: times as numbers, structs as lists of pairs."""
    kind = scalar.type
    known = pa.types
    if isinstance(scalar, pa.ExtensionScalar):
        scalar, kind = scalar.value, kind.storage_type
    if known.is_dictionary(kind) or known.is_run_end_encoded(kind):
        scalar = scalar.as_py() if known.is_run_end_encoded(kind) else scalar.value.as_py()
        return scalar
    if not scalar.is_valid:
        return None
    if known.is_date(kind) or known.is_time(kind) or known.is_timestamp(kind) or known.is_duration(kind):
        return scalar.value
    if known.is_map(kind):
        return [(cell(entry["key"]), cell(entry["value"])) for entry in scalar.values]
    if known.is_struct(kind):
        return [(name, cell(scalar[name])) for name in scalar]
    if hasattr(scalar, "values"):
        return [cell(item) for item in scalar.values]
    if known.is_interval(kind):
        return tuple(scalar.as_py())
    found = scalar.as_py()
    return "not a number" if isinstance(found, float) and math.isnan(found) else found


def rows(batch: pa.RecordBatch) -> list[Any]:
    return [
        [(name, cell(column[row])) for name, column in zip(batch.schema.names, batch.columns, strict=True)]
        for row in range(batch.num_rows)
    ]


def no_nan(item: Any) -> Any:
    if isinstance(item, (list, tuple)):
        return type(item)(map(no_nan, item))
    return "not a number" if isinstance(item, float) and math.isnan(item) else item


@PATIENT
@given(arrow_frames.batches())
def test_a_tree_has_the_cells_of_the_batch(batch):
    assert no_nan(Tree(batch).rows()) == rows(batch)


@PATIENT
@given(arrow_frames.batches(rows=20))
def test_a_slice_of_a_batch_has_the_cells_of_the_slice(batch):
    part = batch.slice(3, 7)
    assert no_nan(Tree(part).rows()) == rows(part)


def test_an_array_of_structs_that_is_a_slice_brings_its_fields_along():
    structs = pa.array([{"a": n, "b": [n] * (n % 3)} for n in range(20)])[5:12]
    assert Tree(structs).rows() == [[("a", n), ("b", [n] * (n % 3))] for n in range(5, 12)]


def test_run_ends_intervals_and_extension_types_are_read():
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 5, 9], pa.int32()), pa.array(["x", None, "y"]))[1:8]
    month = pa.array([pa.MonthDayNano([1, -2, 3]), None, *[pa.MonthDayNano([0, 0, n]) for n in range(5)]])
    uuids = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)] * 7, pa.binary(16)))
    small = pa.array([decimal.Decimal(n) for n in range(7)], pa.decimal32(9, 2))
    batch = pa.RecordBatch.from_arrays([runs, month, uuids, small], names=["r", "m", "u", "d"])
    found = [dict(row) for row in Tree(batch).rows()]
    assert [row["r"] for row in found] == ["x", None, None, None, "y", "y", "y"]
    assert [row["m"] for row in found] == [(1, -2, 3), None, *[(0, 0, n) for n in range(5)]]
    assert {row["u"] for row in found} == {bytes(16)}
    assert [row["d"] for row in found] == list(range(7))


def test_unaligned_buffers_are_read():
    raw = b"\0" + np.arange(10, dtype="i8").tobytes()
    numbers = pa.Array.from_buffers(pa.int64(), 10, [None, pa.py_buffer(raw).slice(1)])
    assert Tree(pa.record_batch([numbers], ["n"])).rows() == [[("n", n)] for n in range(10)]


def test_the_batch_lives_as_long_as_its_tree():
    released = []

    class Watched(bytes):
        def __del__(self) -> None:
            released.append(len(self))

    data = pa.Array.from_buffers(pa.int64(), 4, [None, pa.py_buffer(Watched(np.arange(4, dtype="i8").tobytes()))])
    tree = Tree(pa.record_batch([data], ["n"]))
    del data
    gc.collect()
    assert released == []
    assert tree.rows()[3] == [("n", 3)]
    del tree
    gc.collect()
    assert released == [32]


def offsets(*numbers: int, width: str = "i4") -> Any:
    return pa.py_buffer(np.array(numbers, width).tobytes())


def text(*numbers: int, data: bytes = b"abcdef") -> Any:
    return pa.Array.from_buffers(pa.string(), len(numbers) - 1, [None, offsets(*numbers), pa.py_buffer(data)])


def lists(kind: Any, buffers: list[Any], length: int, items: int = 4) -> Any:
    return pa.Array.from_buffers(kind, length, [None, *buffers], children=[pa.array(range(items), pa.int64())])


def view(size: int, buffer: int, position: int) -> Any:
    views = np.array([size, 0, buffer, position], "i4").tobytes()
    return pa.Array.from_buffers(pa.string_view(), 1, [None, pa.py_buffer(views), pa.py_buffer(b"x" * 40)])


INVALID = {
    "offsets of strings that go back": text(0, 5, 2, 6),
    "offsets of strings beyond the data": text(0, 100, 6),
    "negative offsets of strings": text(0, -5, 6),
    "lists that go back": lists(pa.list_(pa.int64()), [offsets(0, 4, 1, 4)], 3),
    "lists beyond their items": lists(pa.list_(pa.int64()), [offsets(0, 9, 4)], 2),
    "list views beyond their items": lists(pa.list_view(pa.int64()), [offsets(0, 3), offsets(4, 2)], 2),
    "list views of negative size": lists(pa.list_view(pa.int64()), [offsets(0, 3), offsets(4, -2)], 2),
    "list views of overflowing size": lists(
        pa.large_list_view(pa.int64()), [offsets(2**62, width="i8"), offsets(2**62, width="i8")], 1
    ),
    "indices beyond the dictionary": pa.DictionaryArray.from_arrays(
        pa.array([0, 7], pa.int8()), pa.array(["a"]), safe=False
    ),
    "negative indices": pa.DictionaryArray.from_arrays(pa.array([0, -1], pa.int8()), pa.array(["a"]), safe=False),
    "an invalid dictionary": pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), text(0, 5, 2, 6), safe=False),
    "views into a buffer that is not there": view(20, 3, 0),
    "views beyond their buffer": view(20, 0, 30),
    "views of negative size": view(-20, 0, 0),
    "run ends that go back": pa.Array.from_buffers(
        pa.run_end_encoded(pa.int32(), pa.int64()),
        9,
        [None],
        children=[pa.array([5, 2, 9], pa.int32()), pa.array([1, 2, 3])],
    ),
}


@pytest.mark.parametrize("nested", ["plain", "in a struct", "in a list"])
@pytest.mark.parametrize("what", INVALID)
def test_an_array_that_leads_out_of_bounds_is_refused(what, nested):
    wrong = INVALID[what]
    if nested == "in a struct":
        wrong = pa.Array.from_buffers(pa.struct([("f", wrong.type)]), len(wrong), [None], children=[wrong])
    elif nested == "in a list":
        wrong = pa.Array.from_buffers(pa.list_(wrong.type), 1, [None, offsets(0, len(wrong))], children=[wrong])
    batch = pa.RecordBatch.from_arrays([wrong], names=["column"])
    with pytest.raises(ValueError, match="invalid Arrow array"):
        Tree(batch)


def test_rows_that_cannot_be_reached_are_not_looked_at():
    batch = pa.RecordBatch.from_arrays([text(0, 1, 2, 5, 2, 6)], names=["column"]).slice(0, 2)
    assert Tree(batch).rows() == [[("column", "a")], [("column", "b")]]


def test_what_is_below_a_null_struct_cannot_be_reached_but_what_is_beside_it_can():
    """pyarrow itself puts index 0 of an empty dictionary below structs that are null."""
    indices = pa.array([0, 0, None], pa.int8())
    entries = pa.DictionaryArray.from_arrays(indices, pa.array([], pa.string()), safe=False)
    inner = pa.StructArray.from_arrays([entries], ["d"], mask=pa.array([False, True, False]))
    outer = pa.StructArray.from_arrays([inner], ["s"], mask=pa.array([True, False, False]))
    batch = pa.record_batch({"column": outer})
    expected = [[("column", None)], [("column", [("s", None)])], [("column", [("s", [("d", None)])])]]
    assert Tree(batch).rows() == expected
    assert Tree(batch.slice(1)).rows() == expected[1:]
    for wrong in (pa.record_batch({"column": inner}), batch.to_struct_array().field(0)):
        with pytest.raises(ValueError, match="its element 0 is not within the bounds"):
            Tree(wrong)


@pytest.mark.parametrize("kind", [pa.string_view(), pa.dictionary(pa.int8(), pa.string()), pa.map_("string", "int8")])
def test_a_schema_is_a_tree_without_rows(kind):
    runs = pa.run_end_encoded(pa.int32(), pa.struct([("x", kind), ("y", pa.list_(kind, 3))]))
    tree = Tree(pa.schema([("a", kind), ("b", pa.list_(runs)), ("c", pa.struct([("r", runs)]))]))
    assert (len(tree), tree.rows()) == (0, [])
    union = pa.dense_union([pa.field("u", kind)])
    with pytest.raises(TypeError, match=r"column 'a\.either' is a union"):
        Tree(pa.schema([("a", pa.struct([("either", union)]))]))


def test_a_union_is_refused_by_name():
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1]), pa.array(["a"])])
    structs = pa.StructArray.from_arrays([union], ["either"])
    with pytest.raises(TypeError, match=r"column 'outer\.either' is a union"):
        Tree(pa.RecordBatch.from_arrays([structs], names=["outer"]))


def test_what_is_nested_too_deep_is_refused():
    kind: Any = pa.int64()
    for _ in range(100):
        kind = pa.list_(kind)
    with pytest.raises(TypeError, match="nested more than 64 deep"):
        Tree(pa.RecordBatch.from_arrays([pa.array([None], kind)], names=["deep"]))


def test_a_record_batch_or_structs_are_wanted():
    with pytest.raises(TypeError, match="expected a record batch or an array of structs, not Arrow int64"):
        Tree(pa.array([1]))
