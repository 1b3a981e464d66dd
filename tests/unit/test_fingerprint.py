"""The fingerprint of many records: the same in any order and division, another for any other records."""

import random

import pyarrow as pa
import pytest

from fastprod import _bulk
from fastprod._core._fingerprint import Fingerprint


def of(values, keys=None, partitions=None, headers=None, timestamps=None) -> str:
    found = Fingerprint()
    for block in _bulk.blocks_of_columns(values, keys, partitions, headers, timestamps):
        found.add(*block[:6])
    return f"{found.rows} {found}"


def of_batches(*batches: pa.RecordBatch, topics: bool = False) -> str:
    found = Fingerprint()
    for block in _bulk.blocks_of_batches(batches, topics):
        found.add(*block[:6])
    return f"{found.rows} {found}"


def rows(count: int = 1000, seed: int = 1) -> list[tuple]:
    chance = random.Random(seed)
    return [
        (
            b"%d" % number + chance.randbytes(chance.randrange(200)),
            chance.choice([None, chance.randbytes(chance.randrange(20))]),
            chance.choice([None, chance.randrange(8)]),
            chance.choice([None, {f"h{chance.randrange(3)}": chance.randbytes(chance.randrange(20))}]),
            chance.choice([None, chance.randrange(1, 2**40)]),
        )
        for number in range(count)
    ]


def columns(given: list[tuple]) -> list[list]:
    return [list(column) for column in zip(*given, strict=True)]


def test_order_and_division_do_not_count() -> None:
    given = rows()
    expected = of(*columns(given))
    random.Random(2).shuffle(given)
    assert of(*columns(given)) == expected
    found = Fingerprint()
    for start in range(0, 1000, 7):
        for block in _bulk.blocks_of_columns(*columns(given[start : start + 7])):
            found.add(*block[:6])
    assert f"{found.rows} {found}" == expected


def test_any_other_record_counts() -> None:
    given = rows(200)
    seen = {of(*columns(given))}
    for index in range(len(given)):
        for change in range(5):
            other = list(given)
            row = list(given[index])
            row[change] = {0: b"x", 1: b"y", 2: 77, 3: {"x": b""}, 4: 5}[change]
            other[index] = tuple(row)
            seen.add(of(*columns(other)))
        seen.add(of(*columns(given[:index] + given[index + 1 :])))
        seen.add(of(*columns([*given, given[index]])))
    assert len(seen) == 1 + 200 * 7


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (([None],), ([b""],)),
        (([b"a", b"b"],), ([b"ab", b""],)),
        (([b"a"], [b"b"]), ([b"b"], [b"a"])),
        (([b"a"], [b""]), ([b"a"], None)),
        (([b"a"], None, [0]), ([b"a"],)),
        (([b"a"], None, [0]), ([b"b"], None, [0])),
        (([b"a"], None, [3]), ([b"a"], None, None, None, [3])),
        (([b"a"], None, None, [{"h": b""}]), ([b"a"], None, None, [{"h": None}])),
        (([b"a"], None, None, [[("h", b"1"), ("g", b"2")]]), ([b"a"], None, None, [[("g", b"2"), ("h", b"1")]])),
        (([b"\0" * 15],), ([b"\0" * 16],)),
        (([b"x" * 16 + b"y" * 16],), ([b"y" * 16 + b"x" * 16],)),
    ],
)
def test_what_looks_alike_is_told_apart(one, other) -> None:
    assert of(*one) != of(*other)


def test_what_is_the_same_record_has_the_same_fingerprint() -> None:
    """However it came: lists, Arrow of whatever type, text or bytes; nulls in a column or no column."""
    values, keys = ["ä", "b", None], ["k", None, ""]
    headers = [{"h": b"1"}, None, {}]
    expected = of(values, keys, [2, None, None], headers, [None, 7, None])
    assert of([b"\xc3\xa4", b"b", None], [b"k", None, b""], [2, -1, -1], headers, [0, 7, 0]) == expected
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        batch = pa.record_batch(
            {
                "value": pa.array(values, kind),
                "key": pa.array(keys, kind),
                "partition": pa.array([2, None, None], pa.int32()),
                "headers": pa.array([[("h", b"1")], None, []], pa.map_(pa.string(), pa.binary())),
                "timestamp": pa.array([None, 7, None], pa.int64()),
            }
        )
        assert of_batches(batch) == expected
        assert of_batches(batch.slice(2), batch.slice(0, 2)) == expected
    assert of([b"a"], [None], [None], [None], [None]) == of([b"a"])


def test_topics_that_rows_name_count() -> None:
    def batch(topic: str) -> pa.RecordBatch:
        return pa.record_batch({"value": [b"v"], "topic": [topic]})

    assert of_batches(batch("a"), topics=True) != of_batches(batch("b"), topics=True)
    assert of_batches(batch("a"), topics=False) == of_batches(batch("b"), topics=False)


def test_columns_of_unequal_length_are_refused() -> None:
    (block,) = _bulk.blocks_of_columns([b"a", b"b"], None, None, None, None)
    (short,) = _bulk.blocks_of_columns([b"a"], [b"k"], None, None, None)
    with pytest.raises(ValueError, match="1 keys for 2 values"):
        Fingerprint().add(block[0], short[1], None, None, None, None)
