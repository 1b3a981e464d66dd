"""Bulk calls: every kind of column, receipts, zero copy, back-pressure; checked by reading the topic back."""

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from reference import murmur2

from fastprod import Producer, Receipt, RecordError
from fastprod.testing import MockCluster

PARTITIONS = 4


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    with MockCluster(2, topics={"t": PARTITIONS, "u": 1}) as running:
        yield running


@pytest.fixture
def make(cluster: MockCluster) -> Iterator[Callable[..., Producer]]:
    """Makes producers of the cluster and ends them before it."""
    made: list[Producer] = []

    def build(**options: Any) -> Producer:
        given = {name.replace("_", "."): value for name, value in options.items()}
        made.append(Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0} | given))
        return made[-1]

    yield build
    for one in made:
        one.close(10)


@pytest.fixture
def producer(make: Callable[..., Producer]) -> Producer:
    return make()


def java_partition(key: bytes, partitions: int = PARTITIONS) -> int:
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def done(receipt: Receipt, count: int) -> Receipt:
    """Waits for a receipt of which everything must have arrived."""
    assert receipt.wait(120)
    assert receipt.done
    assert (receipt.total, receipt.accepted, receipt.acknowledged, receipt.failed) == (count, count, count, 0)
    assert receipt.errors == []
    return receipt


def values(cluster: MockCluster, topic: str = "t") -> list[bytes | None]:
    """What a topic holds, in an order that does not depend on placement."""
    return sorted((record.value() for record in cluster.records(topic)), key=lambda v: (v is not None, v))


def pairs(cluster: MockCluster, topic: str = "t") -> set[tuple[bytes | None, bytes | None]]:
    return {(record.key(), record.value()) for record in cluster.records(topic)}


def wait_for(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


# ---- columns

TEXT = [b"", b"a", b"bb", b"c" * 100, b"d" * 3000]
LARGE = [b"%d" % n * 900 for n in range(5)]


def offsets_of(items: list[bytes]) -> np.ndarray[Any, Any]:
    return np.cumsum([0] + [len(item) for item in items])


@pytest.mark.parametrize("items", [TEXT, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda items: [item.decode() for item in items],
        lambda items: [bytearray(item) for item in items],
        lambda items: [memoryview(item) for item in items],
        lambda items: np.array(items, dtype=object),
        lambda items: np.array([item.decode() for item in items], dtype=object),
        lambda items: np.array(items, dtype="S"),
        lambda items: np.array([item.decode() for item in items]),
        lambda items: pa.array(items, pa.binary()),
        lambda items: pa.array([item.decode() for item in items], pa.string()),
        lambda items: pa.array(items, pa.large_binary()),
        lambda items: pa.array([item.decode() for item in items], pa.large_string()),
        lambda items: pa.array(items, pa.binary_view()),
        lambda items: pa.array([item.decode() for item in items], pa.string_view()),
        lambda items: pa.array([b"no", *items, b"no"], pa.binary())[1:-1],
        lambda items: pa.array([b"no", *items, b"no"], pa.binary_view())[1:-1],
        lambda items: pa.chunked_array([items[:2], items[2:2], items[2:]], pa.binary()),
        lambda items: pa.array(items, pa.binary()).dictionary_encode(),
        lambda items: (offsets_of(items), b"".join(items)),
        lambda items: (offsets_of(items).astype(np.int32), bytearray(b"".join(items))),
        lambda items: (offsets_of(items), np.frombuffer(b"".join(items), np.uint8)),
    ],
    ids=[
        "list",
        "tuple",
        "list-str",
        "list-bytearray",
        "list-memoryview",
        "numpy-object",
        "numpy-object-str",
        "numpy-S",
        "numpy-U",
        "binary",
        "string",
        "large-binary",
        "large-string",
        "binary-view",
        "string-view",
        "sliced",
        "sliced-view",
        "chunked",
        "dictionary",
        "offsets-bytes",
        "offsets-bytearray",
        "offsets-numpy",
    ],
)
def test_every_form_of_values_and_keys(
    cluster: MockCluster, producer: Producer, form: Callable[[list[bytes]], Any], items: list[bytes]
) -> None:
    done(producer.produce_many("t", form(items)), 5)
    assert values(cluster) == sorted(items)
    done(producer.produce_many("u", form(items), keys=form(items)), 5)
    assert pairs(cluster, "u") == {(item, item) for item in items}
    assert producer._runtime.memory == 0


def test_fixed_size_arrow_and_numpy_columns(cluster: MockCluster, producer: Producer) -> None:
    done(producer.produce_many("t", pa.array([b"abc", b"def"], pa.binary(3))), 2)
    done(producer.produce_many("t", np.array([b"ghi", b"jkl"], dtype="V3")), 2)
    assert values(cluster) == [b"abc", b"def", b"ghi", b"jkl"]


@pytest.mark.parametrize(
    "column",
    [
        [None, b"a", b"", None],
        np.array([None, b"a", b"", None], dtype=object),
        pa.array([None, b"a", b"", None]),
        pa.array([None, "a", "", None], pa.string_view()),
        pa.chunked_array([[None, b"a"], [b"", None]]),
    ],
    ids=["list", "numpy", "binary", "view", "chunked"],
)
def test_nulls_are_not_empty(cluster: MockCluster, producer: Producer, column: Any) -> None:
    done(producer.produce_many("t", column), 4)
    assert values(cluster) == [None, None, b"", b"a"]
    done(producer.produce_many("u", [b"0", b"1", b"2", b"3"], keys=column), 4)
    assert pairs(cluster, "u") == {(None, b"0"), (b"a", b"1"), (b"", b"2"), (None, b"3")}


def test_a_column_of_nulls_only(cluster: MockCluster, producer: Producer) -> None:
    done(producer.produce_many("t", pa.nulls(3), keys=[b"a", b"b", b"c"]), 3)
    assert pairs(cluster) == {(b"a", None), (b"b", None), (b"c", None)}


def test_equal_null_values_with_equal_keys(cluster: MockCluster, producer: Producer) -> None:
    done(producer.produce_many("t", [None] * 500, keys=[b"k"] * 500), 500)
    done(producer.produce_many("t", [None] * 500), 500)
    assert sum(high for _, high in cluster.watermarks("t").values()) == 1000
    assert producer._runtime.memory == 0


def test_the_same_object_many_times(cluster: MockCluster, producer: Producer) -> None:
    done(producer.produce_many("t", [b"x" * 2000] * 300, keys=[b"%d" % n for n in range(300)]), 300)
    assert {key for key, _ in pairs(cluster)} == {b"%d" % n for n in range(300)}
    assert producer._runtime.memory == 0


def test_chunks_of_keys_and_values_need_not_agree(cluster: MockCluster, producer: Producer) -> None:
    items = [b"v%d" % n for n in range(10)]
    keys = [b"k%d" % n for n in range(10)]
    done(
        producer.produce_many(
            "t",
            pa.chunked_array([items[:3], items[3:4], items[4:]]),
            keys=pa.chunked_array([keys[:5], keys[5:]]),
            timestamps=pa.chunked_array([list(range(1, 8)), [8, 9, 10]]),
        ),
        10,
    )
    assert pairs(cluster) == set(zip(keys, items, strict=True))
    assert {r.timestamp()[1]: r.value() for r in cluster.records("t")} == {n + 1: items[n] for n in range(10)}


def test_a_chunked_column_goes_with_any_other(cluster: MockCluster, producer: Producer) -> None:
    column = pa.chunked_array([[b"a", b"b"], [b"c"]])
    done(producer.produce_many("t", column, keys=[b"1", b"2", b"3"], partitions=2), 3)
    done(producer.produce_many("t", column, keys=np.array([b"1", b"2", b"3"]), headers={"h": b"x"}), 3)
    done(producer.produce_many("t", [b"a", b"b", b"c"], keys=column, timestamps=5), 3)
    done(producer.produce_many("t", column, keys=["1", b"2", None]), 3)
    done(producer.produce_many("t", column, headers=[{"h": "x"}, None, [("i", None)]]), 3)
    assert len(cluster.records("t")) == 15
    assert [r.headers() for r in cluster.records("t")].count([("h", b"x")]) == 4


def test_an_empty_call(producer: Producer) -> None:
    empties: list[Any] = [[], np.array([], dtype=object), np.array([], dtype="S3"), pa.array([], pa.binary())]
    empties += [pa.chunked_array([], pa.binary()), (np.array([0]), b"")]
    for empty in empties:
        receipt = producer.produce_many("t", empty)
        assert receipt.wait(120)
        assert receipt.done
        assert (receipt.total, receipt.offsets, receipt.extents, receipt.errors) == (0, {}, {}, [])
    assert producer.produce_arrow(pa.table({"value": pa.array([], pa.binary())}), "t").wait(120)
    assert producer.produce_many("t", [], keys=[], partitions=[], timestamps=[], headers=[]).wait(120)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "text",
        b"bytes",
        bytearray(b"x"),
        5,
        {"a": 1},
        {b"a"},
        (n for n in [b"a"]),
        iter([b"a"]),
        map(bytes, [b"a"]),
    ],
    ids=["none", "str", "bytes", "bytearray", "int", "dict", "set", "generator", "iterator", "map"],
)
def test_what_is_no_column_is_a_type_error(producer: Producer, wrong: Any) -> None:
    with pytest.raises(TypeError, match="value"):
        producer.produce_many("t", wrong)
    if wrong is not None:
        with pytest.raises(TypeError, match="key"):
            producer.produce_many("t", [b"v"], keys=wrong)
    assert len(producer) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"keys": [b"a"]},
        {"keys": [b"a"] * 3},
        {"partitions": [1]},
        {"timestamps": [1, 2, 3]},
        {"headers": [{}]},
        {"partitions": [[1, 2]]},
    ],
)
def test_columns_of_other_lengths_are_refused(producer: Producer, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))[:-1]):
        producer.produce_many("t", [b"a", b"b"], **arguments)
    assert len(producer) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"partitions": "1"},
        {"partitions": ["a", "b"]},
        {"partitions": 1.5},
        {"partitions": [0.5, 1.5]},
        {"timestamps": ["a", "b"]},
        {"timestamps": 1.5},
        {"headers": "text"},
        {"headers": 5},
    ],
)
def test_wrong_types_of_arguments_are_named(producer: Producer, arguments: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(arguments))):
        producer.produce_many("t", [b"a", b"b"], **arguments)
    assert len(producer) == 0


def test_integers_out_of_range_are_refused(producer: Producer) -> None:
    for partitions in ([0, 2**31], 2**40, np.array([0, 2**63], dtype=np.uint64)):
        with pytest.raises(ValueError, match="partitions"):
            producer.produce_many("t", [b"a", b"b"], partitions=partitions)
    with pytest.raises(ValueError, match="timestamps"):
        producer.produce_many("t", [b"a", b"b"], timestamps=2**63)
    assert len(producer) == 0


# ---- placement, headers, timestamps


def test_keys_go_where_java_puts_them(cluster: MockCluster, producer: Producer) -> None:
    keys = [b"", b"a", b"\xff\x00"] + [b"key-%d" % n for n in range(500)]
    done(producer.produce_many("t", [b"v"] * len(keys), keys=keys), len(keys))
    assert {r.key(): r.partition() for r in cluster.records("t")} == {key: java_partition(key) for key in keys}


@pytest.mark.parametrize(
    "form", [list, np.array, lambda p: np.array(p, dtype=np.int64), lambda p: pa.array(p, pa.int16())]
)
def test_partitions_per_record(cluster: MockCluster, producer: Producer, form: Callable[[Any], Any]) -> None:
    done(
        producer.produce_many("t", [b"0", b"1", b"2", b"3"], keys=[b"k"] * 4, partitions=form([3, 2, 1, -1])),
        4,
    )
    placed = {r.value(): r.partition() for r in cluster.records("t")}
    assert placed == {b"0": 3, b"1": 2, b"2": 1, b"3": java_partition(b"k")}


def test_null_partitions_are_to_be_chosen(cluster: MockCluster, producer: Producer) -> None:
    for column in ([None, 3], pa.array([None, 3], pa.int32())):
        done(producer.produce_many("t", [b"a", b"b"], keys=[b"k", b"k"], partitions=column), 2)
    assert [r.partition() for r in cluster.records("t") if r.value() == b"a"] == [java_partition(b"k")] * 2
    assert [r.partition() for r in cluster.records("t") if r.value() == b"b"] == [3] * 2


@pytest.mark.parametrize("partition", [2, np.int32(2), np.int64(2)])
def test_one_partition_for_all(cluster: MockCluster, producer: Producer, partition: Any) -> None:
    receipt = done(producer.produce_many("t", [b"a"] * 50, partitions=partition), 50)
    assert receipt.offsets == {2: (0, 49)}
    assert {r.partition() for r in cluster.records("t")} == {2}


@pytest.mark.parametrize(
    "headers",
    [
        [{"a": b"1"}, None, [("b", "x"), ("b", None)]],
        pa.array(
            [[{"key": "a", "value": b"1"}], None, [{"key": "b", "value": b"x"}, {"key": "b", "value": None}]],
            pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        ),
        pa.array([[("a", b"1")], None, [("b", b"x"), ("b", None)]], pa.map_(pa.string(), pa.binary())),
    ],
    ids=["list", "arrow-list", "arrow-map"],
)
def test_headers_per_record(cluster: MockCluster, producer: Producer, headers: Any) -> None:
    done(producer.produce_many("t", [b"0", b"1", b"2"], headers=headers), 3)
    assert {r.value(): r.headers() for r in cluster.records("t")} == {
        b"0": [("a", b"1")],
        b"1": None,
        b"2": [("b", b"x"), ("b", None)],
    }


HEADERS = pa.struct([("key", pa.string()), ("value", pa.binary())])


@pytest.mark.parametrize("metadata_known", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(HEADERS),
        pa.large_list(pa.struct([("value", pa.large_binary()), ("other", pa.int8()), ("key", pa.large_string())])),
        pa.list_(pa.struct([("key", pa.string_view()), ("value", pa.string())])),
        pa.list_view(HEADERS),
        pa.large_list_view(HEADERS),
        pa.map_(pa.string(), pa.binary_view()),
    ],
    ids=str,
)
def test_arrow_headers_are_those_that_python_sees(
    cluster: MockCluster, producer: Producer, kind: pa.DataType, metadata_known: bool
) -> None:
    rows: list[Any] = [
        None if n % 7 == 0 else [("name" * (k % 3) + "\u00e9", None if k % 5 == 4 else b"v" * k) for k in range(n % 11)]
        for n in range(300)
    ]
    if pa.types.is_map(kind):
        array = pa.array(rows, kind)
    else:
        array = pa.array(
            [None if row is None else [{"key": name, "value": value} for name, value in row] for row in rows], kind
        )
    if metadata_known:
        producer.produce_many("t", [b"warm"]).wait(120)
    values = [b"%d" % n for n in range(300)]
    done(producer.produce_many("t", values[20:250], headers=array[20:250], partitions=1), 230)
    chunked = pa.chunked_array([array[250:260], array[260:]])
    done(producer.produce_many("t", pa.array(values[250:]), headers=chunked, partitions=1), 50)
    found = {r.value(): r.headers() for r in cluster.records("t") if r.value() != b"warm"}
    assert found == {values[n]: rows[n] or None for n in range(20, 300)}


def test_a_null_list_has_no_headers_whatever_lies_below(cluster: MockCluster, producer: Producer) -> None:
    entries = pa.array([{"key": "a", "value": b"1"}, {"key": "b", "value": b"2"}], HEADERS)
    buffers = [pa.py_buffer(b"\x02"), pa.py_buffer(np.array([0, 1, 2], "i4"))]
    array = pa.Array.from_buffers(pa.list_(HEADERS), 2, buffers, children=[entries])
    done(producer.produce_many("t", [b"0", b"1"], headers=array), 2)
    assert {r.value(): r.headers() for r in cluster.records("t")} == {b"0": None, b"1": [("b", b"2")]}


def arrow_headers(rows: list[Any], value: pa.DataType | None = None, width: int = -1) -> Any:
    return pa.array(rows, pa.list_(pa.struct([("key", pa.string()), ("value", value or pa.binary())]), width))


ONE = [{"key": "a", "value": b"1"}]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (pa.nulls(2), None),
        (pa.array([[], None]), None),
        (pa.array([[], None], pa.large_list(pa.null())), None),
        (pa.array([[], None], pa.list_(pa.struct([("key", pa.null()), ("value", pa.null())]))), None),
        (arrow_headers([ONE] * 2, width=1), [("a", b"1")]),
        (arrow_headers([[{"key": "a", "value": None}]] * 4, pa.null(), 1)[2:], [("a", None)]),
        (pa.DictionaryArray.from_arrays(pa.array([0, 0]), arrow_headers([ONE])), [("a", b"1")]),
    ],
    ids=["null", "empty", "large-empty", "untyped", "fixed-size", "fixed-size-slice", "dictionary"],
)
def test_rarer_arrow_headers(cluster: MockCluster, producer: Producer, headers: Any, expected: Any) -> None:
    done(producer.produce_many("t", [b"0", b"1"], headers=headers), 2)
    assert [r.headers() for r in cluster.records("t")] == [expected] * 2


def test_lists_that_overlap_in_one_buffer(cluster: MockCluster, producer: Producer) -> None:
    entries = pa.array([{"key": "a", "value": b"1"}, {"key": "b", "value": b"2"}], HEADERS)
    views = pa.ListViewArray.from_arrays(pa.array([1, 0], pa.int32()), pa.array([1, 2], pa.int32()), entries)
    done(producer.produce_many("t", [b"0", b"1"], headers=views), 2)
    assert {r.value(): r.headers() for r in cluster.records("t")} == {
        b"0": [("b", b"2")],
        b"1": [("a", b"1"), ("b", b"2")],
    }


def test_headers_may_change_after_the_call(producer: Producer) -> None:
    headers: list[Any] = [{"a": b"1"}, {"b": b"2"}]
    receipt = producer.produce_many("t", [b"x", b"y" * 2_000_000], headers=headers)
    headers.clear()
    assert receipt.wait(120)
    assert [failed.record.headers for failed in receipt.errors if failed.record] == [{"b": b"2"}]


def test_many_small_headers_are_measured_as_they_are_sent(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    """Packed, an empty header takes more than on the wire."""
    producer = make(max_request_size=10_000)
    headers = pa.array([[{"key": "", "value": b""}] * 3000, [{"key": "", "value": b""}] * 6000], pa.list_(HEADERS))
    receipt = producer.produce_many("t", [b"0", b"1"], headers=headers)
    assert receipt.wait(120)
    assert [failed.index for failed in receipt.errors] == [1]
    assert [r.headers() for r in cluster.records("t")] == [[("", b"")] * 3000]


def test_arrow_headers_that_fail_are_told_by_index(cluster: MockCluster, producer: Producer) -> None:
    headers = pa.array(
        [
            [{"key": "a", "value": b"1"}],
            [{"key": None, "value": b"1"}],
            [{"key": "b", "value": b"x" * 2_000_000}],
            [None],
            [{"key": "c", "value": None}],
        ],
        pa.list_(HEADERS),
    )
    receipt = producer.produce_many("t", [b"0", b"1", b"2", b"3", b"4"], headers=headers)
    assert receipt.wait(120)
    assert [(failed.index, type(failed.error)) for failed in receipt.errors] == [
        (1, TypeError),
        (2, RecordError),
        (3, TypeError),
    ]
    assert [failed.record.headers for failed in receipt.errors if failed.record][::2] == [
        [(None, b"1")],
        [(None, None)],
    ]
    assert {r.value(): r.headers() for r in cluster.records("t")} == {b"0": [("a", b"1")], b"4": [("c", None)]}


@pytest.mark.parametrize(
    "headers",
    [
        pa.array([1]),
        pa.array([["a"]]),
        pa.array([[{"key": "a", "other": 1}]]),
        pa.array([[{"key": b"a", "value": b"1"}]]),
        pa.array([[{"key": "a", "value": 1}]]),
        pa.array([[(1, b"1")]], pa.map_(pa.int8(), pa.binary())),
    ],
    ids=lambda array: str(array.type),
)
def test_arrow_data_that_are_no_headers_are_refused(producer: Producer, headers: Any) -> None:
    with pytest.raises(TypeError, match="header"):
        producer.produce_many("t", [b"0"], headers=headers)


@pytest.mark.parametrize("headers", [{"a": b"1"}, [("a", b"1")]])
def test_one_set_of_headers_for_all(cluster: MockCluster, producer: Producer, headers: Any) -> None:
    done(producer.produce_many("t", [b"x" * 2000] * 20, headers=headers), 20)
    assert [r.headers() for r in cluster.records("t")] == [[("a", b"1")]] * 20


MOMENT = 1_700_000_000_123


@pytest.mark.parametrize(
    "timestamps",
    [
        MOMENT,
        [MOMENT, MOMENT],
        np.array([MOMENT, MOMENT]),
        np.array([MOMENT, MOMENT], dtype="datetime64[ms]"),
        np.array([MOMENT * 1000 + 7, MOMENT * 1000], dtype="datetime64[us]"),
        pa.array([MOMENT, MOMENT], pa.int64()),
        pa.array([MOMENT, MOMENT], pa.timestamp("ms")),
        pa.array([MOMENT * 1000 + 7, MOMENT * 1000], pa.timestamp("us", "UTC")),
        pa.array([MOMENT * 1000000 + 7, MOMENT * 1000000], pa.timestamp("ns", "Europe/Berlin")),
        pa.array([datetime.fromtimestamp(MOMENT / 1000, UTC)] * 2),
        pa.chunked_array([[MOMENT * 1000], [MOMENT * 1000]], pa.timestamp("us")),
    ],
    ids=[
        "one",
        "list",
        "numpy",
        "dt-ms",
        "dt-us",
        "int64",
        "ts-ms",
        "ts-us",
        "ts-ns",
        "datetimes",
        "chunked",
    ],
)
def test_timestamps(cluster: MockCluster, producer: Producer, timestamps: Any) -> None:
    done(producer.produce_many("t", [b"a", b"b" * 2000], timestamps=timestamps), 2)
    assert [r.timestamp() for r in cluster.records("t")] == [(1, MOMENT)] * 2


def test_missing_timestamps_mean_now(cluster: MockCluster, producer: Producer) -> None:
    before = time.time() * 1000
    done(producer.produce_many("u", [b"0", b"1"], timestamps=[MOMENT, None]), 2)
    done(producer.produce_many("u", [b"2", b"3"], timestamps=pa.array([MOMENT, None], pa.timestamp("ms"))), 2)
    done(producer.produce_many("u", [b"4", b"5"]), 2)
    stamps = [r.timestamp()[1] for r in cluster.records("u")]
    assert stamps[0] == stamps[2] == MOMENT
    assert all(before - 10 <= stamp <= time.time() * 1000 + 10 for stamp in [stamps[1], *stamps[3:]])


def test_a_missing_datetime64_means_now(cluster: MockCluster, producer: Producer) -> None:
    before = time.time() * 1000
    stamps = np.array([MOMENT, "NaT"], dtype="datetime64[ms]")
    done(producer.produce_many("u", [b"0", b"1"], timestamps=stamps), 2)
    assert cluster.records("u")[0].timestamp()[1] == MOMENT
    assert cluster.records("u")[1].timestamp()[1] >= before - 10


# ---- produce_arrow

FULL = pa.table(
    {
        "topic": ["t", "u", "t"],
        "key": pa.array([b"k0", None, b"k2"]),
        "value": pa.array(["v0", "v1", None]),
        "partition": pa.array([3, 0, None], pa.int32()),
        "timestamp": pa.array([MOMENT, MOMENT, MOMENT], pa.timestamp("ms")),
        "headers": pa.array(
            [[{"key": "h", "value": b"x"}], None, []],
            pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        ),
        "other": [1, 2, 3],
    }
)


def check_full(cluster: MockCluster, receipt: Receipt) -> None:
    done(receipt, 3)
    found = {
        (r.topic(), r.key(), r.value()): (r.partition(), r.timestamp()[1], r.headers())
        for topic in ("t", "u")
        for r in cluster.records(topic)
    }
    assert found == {
        ("t", b"k0", b"v0"): (3, MOMENT, [("h", b"x")]),
        ("u", None, b"v1"): (0, MOMENT, None),
        ("t", b"k2", None): (java_partition(b"k2"), MOMENT, None),
    }


def test_arrow_table_with_every_column(cluster: MockCluster, producer: Producer) -> None:
    check_full(cluster, producer.produce_arrow(FULL))


def test_arrow_record_batch(cluster: MockCluster, producer: Producer) -> None:
    check_full(cluster, producer.produce_arrow(FULL.to_batches()[0]))


def test_arrow_reader(cluster: MockCluster, producer: Producer) -> None:
    reader = pa.RecordBatchReader.from_batches(FULL.schema, iter(FULL.to_batches(max_chunksize=2)))
    check_full(cluster, producer.produce_arrow(reader))


def test_anything_with_arrows_c_interface(cluster: MockCluster, producer: Producer) -> None:
    class Stream:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return FULL.__arrow_c_stream__(requested_schema)

    check_full(cluster, producer.produce_arrow(Stream()))


def test_arrow_table_of_many_chunks(cluster: MockCluster, producer: Producer) -> None:
    table = pa.concat_tables([pa.table({"value": [b"%d" % n], "key": [b"k"]}) for n in range(100)])
    receipt = done(producer.produce_arrow(table, "t"), 100)
    partition = java_partition(b"k")
    assert receipt.offsets == {partition: (0, 99)}
    assert [r.value() for r in cluster.records("t")] == [b"%d" % n for n in range(100)]


def test_sliced_arrow_table(cluster: MockCluster, producer: Producer) -> None:
    table = pa.table({"value": [b"%d" % n * 600 for n in range(10)], "key": [b"%d" % n for n in range(10)]})
    done(producer.produce_arrow(table.slice(3, 4), "t"), 4)
    assert pairs(cluster) == {(b"%d" % n, b"%d" % n * 600) for n in range(3, 7)}


def test_the_topic_argument_beats_the_column(cluster: MockCluster, producer: Producer) -> None:
    receipt = done(producer.produce_arrow(FULL.select(["topic", "value"]), "u"), 3)
    assert receipt.offsets == {0: (0, 2)}
    assert len(cluster.records("u")) == 3
    assert cluster.records("t") == []


def test_offsets_of_a_topic_column_are_by_topic(producer: Producer) -> None:
    table = pa.table({"topic": ["t", "u", "t"], "value": ["a", "b", "c"], "partition": [1, 0, 1]})
    receipt = done(producer.produce_arrow(table), 3)
    assert receipt.offsets == {("t", 1): (0, 1), ("u", 0): (0, 0)}
    assert receipt.extents[("t", 1)].records == 2


def test_a_dictionary_encoded_topic_column(cluster: MockCluster, producer: Producer) -> None:
    table = pa.table({"topic": pa.array(["t", "u", "t"]).dictionary_encode(), "value": ["a", "b", "c"]})
    done(producer.produce_arrow(table), 3)
    assert (values(cluster, "t"), values(cluster, "u")) == ([b"a", b"c"], [b"b"])


def test_a_null_topic_fails_that_record_only(cluster: MockCluster, producer: Producer) -> None:
    receipt = producer.produce_arrow(pa.table({"topic": ["t", None, "t"], "value": ["a", "b", "c"]}))
    assert receipt.wait(120)
    assert [failure.index for failure in receipt.errors] == [1]
    assert "topic" in str(receipt.errors[0].error)
    assert (receipt.acknowledged, receipt.failed) == (2, 1)
    assert values(cluster) == [b"a", b"c"]


@pytest.mark.parametrize(
    ("columns", "topic", "named"),
    [
        ({"key": ["a"]}, "t", "value"),
        ({"value": ["a"]}, None, "topic"),
        ({"value": [1]}, "t", "value"),
        ({"value": ["a"], "key": [1.5]}, "t", "key"),
        ({"value": ["a"], "partition": ["0"]}, "t", "partition"),
        ({"value": ["a"], "timestamp": ["now"]}, "t", "timestamp"),
        ({"value": ["a"], "headers": ["x"]}, "t", "headers"),
        ({"value": ["a"], "headers": [[1]]}, "t", "headers"),
        ({"value": ["a"], "headers": [[{"name": "x"}]]}, "t", "headers"),
        ({"value": ["a"], "topic": [1]}, None, "topic"),
    ],
)
def test_missing_and_wrong_columns_are_named(
    producer: Producer, columns: dict[str, Any], topic: str | None, named: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        producer.produce_arrow(pa.table(columns), topic)
    assert len(producer) == 0


def test_what_is_no_arrow_data_is_a_type_error(producer: Producer) -> None:
    for wrong in ([b"a"], None, {"value": [b"a"]}, 5):
        with pytest.raises(TypeError, match="Arrow"):
            producer.produce_arrow(wrong, "t")


# ---- receipts


def test_receipt_grows_until_done(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make(linger_ms=60_000)
    producer.produce_many("t", [b"warm"]).wait(120)
    receipt = producer.produce_many("t", [b"a"] * 10)
    assert (receipt.total, receipt.accepted, receipt.acknowledged, receipt.failed) == (10, 10, 0, 0)
    assert not receipt.done
    assert "10" in repr(receipt)
    done(receipt, 10)
    assert sum(extent.records for extent in receipt.extents.values()) == 10


def test_offsets_and_extents_tell_the_truth(cluster: MockCluster, producer: Producer) -> None:
    producer.produce_many("t", [b"before"] * 7, partitions=1).wait(120)
    receipt = done(producer.produce_many("t", [b"x"] * 1000, keys=[b"%d" % (n % 40) for n in range(1000)]), 1000)
    found: dict[int, list[int]] = {}
    for record in cluster.records("t"):
        if record.value() == b"x":
            found.setdefault(record.partition() or 0, []).append(record.offset() or 0)
    assert receipt.offsets == {partition: (min(all_), max(all_)) for partition, all_ in found.items()}
    assert {key[1]: extent.records for key, extent in receipt.extents.items()} == {
        partition: len(all_) for partition, all_ in found.items()
    }
    assert all(key[0] == "t" for key in receipt.extents)


def test_a_receipt_counts_the_bytes_of_what_was_accepted(producer: Producer) -> None:
    for metadata_known in (False, True):
        rows = done(producer.produce_many("t", ["\u00e9", b"", None, b"abc"], keys=[b"k", None, b"", b"kk"]), 4)
        assert rows.bytes == 2 + 3 + 3, metadata_known
    assert done(producer.produce_many("t", [b"x" * 7] * 5000), 5000).bytes == 35_000
    assert done(producer.produce_many("t", [b"x" * 600] * 50), 50).bytes == 30_000
    assert done(producer.produce_many("t", [b"ab"] * 3, headers={"h": b"ignored"}), 3).bytes == 6
    refused = producer.produce_many("t", [b"x" * 2_000_000, b"abc"])
    assert refused.wait(120)
    assert (refused.accepted, refused.failed, refused.bytes) == (1, 1, 3)


def test_one_receipt_for_many_calls(cluster: MockCluster, producer: Producer) -> None:
    receipt = producer.produce_many("t", [b"0"] * 10, partitions=0)
    for n in range(1, 50):
        assert producer.produce_many("t", [b"%d" % n] * 10, partitions=n % PARTITIONS, receipt=receipt) is receipt
    table = pa.table({"value": [b"arrow"] * 10, "partition": [3] * 10})
    assert producer.produce_arrow(table, "t", receipt=receipt) is receipt
    done(receipt, 510)
    records = cluster.records("t")
    assert len(records) == 510
    assert {key[1]: extent.records for key, extent in receipt.extents.items()} == {0: 130, 1: 130, 2: 120, 3: 130}
    assert receipt.bytes == sum(len(record.value() or b"") for record in records)


def test_what_fails_in_a_later_call_has_its_place_in_the_receipt(cluster: MockCluster, producer: Producer) -> None:
    receipt = producer.produce_many("t", [b"a", "b", None], partitions=0)
    producer.produce_many("t", [b"c", b"d"], partitions=[0, 77], receipt=receipt)
    producer.flush(120)  # lets go of the blocks
    producer.produce_many("t", [b"e", b"f" * 2_000_000], receipt=receipt)
    assert receipt.wait(120)
    assert (receipt.total, receipt.acknowledged, receipt.failed) == (7, 5, 2)
    assert [(failed.index, (failed.record.value or b"")[:1]) for failed in receipt.errors if failed.record] == [
        (4, b"d"),
        (6, b"f"),
    ]


def test_a_receipt_of_another_topic_or_producer_is_refused(producer: Producer, make: Callable[..., Producer]) -> None:
    receipt = done(producer.produce_many("t", [b"a"]), 1)
    with pytest.raises(ValueError, match="the receipt is for topic 't', not 'u'"):
        producer.produce_many("u", [b"a"], receipt=receipt)
    with pytest.raises(ValueError, match="the receipt is for topic 't', not None"):
        producer.produce_arrow(pa.table({"value": [b"a"], "topic": ["t"]}), receipt=receipt)
    with pytest.raises(ValueError, match="the receipt is another producer's"):
        make().produce_many("t", [b"a"], receipt=receipt)
    with pytest.raises(TypeError, match="Receipt"):
        producer.produce_many("t", [b"a"], receipt="r")  # type: ignore[arg-type]
    done(receipt, 1)


def test_threads_that_share_a_receipt(cluster: MockCluster, producer: Producer) -> None:
    receipt = producer.produce_many("t", [b"first"])

    def work(number: int) -> None:
        for n in range(200):
            if n % 2:
                producer.produce_many("t", [b"x" * 20] * 30, receipt=receipt)
            else:
                producer.produce_many("t", [b"x" * 600] * 30, headers={"n": b"1"}, receipt=receipt)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done(receipt, 1 + 4 * 200 * 30)
    assert receipt.bytes == 5 + 4 * 100 * 30 * 620
    assert sum(extent.records for extent in receipt.extents.values()) == receipt.total


def test_threads_that_share_a_receipt_and_fail(producer: Producer) -> None:
    """What one thread reads changes under its eyes."""
    receipt = producer.produce_many("t", [b"first"])
    told: list[BaseException] = []
    stop = threading.Event()

    def work() -> None:
        try:
            for _ in range(150):
                producer.produce_many("t", [b"x", 1, b"y"] * 5, receipt=receipt)
        except BaseException as problem:
            told.append(problem)

    def read() -> None:
        try:
            while not stop.is_set():
                assert all(type(failed.error) is TypeError for failed in receipt.errors)
        except BaseException as problem:
            told.append(problem)

    threads = [threading.Thread(target=work) for _ in range(3)]
    reader = threading.Thread(target=read)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in (reader, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        stop.set()
        reader.join()
    finally:
        sys.setswitchinterval(before)
    assert not told
    assert receipt.wait(120)
    assert (receipt.total, receipt.acknowledged, receipt.failed) == (1 + 3 * 150 * 15, 1 + 3 * 150 * 10, 3 * 150 * 5)
    assert len(receipt.errors) == receipt.failed


def test_a_call_that_raises_leaves_a_shared_receipt_that_ends(make: Callable[..., Producer]) -> None:
    class Moody:
        def partition(self, topic: str, key: object, value: object, count: int, available: object) -> int:
            if value == b"bad":
                raise KeyboardInterrupt("no idea")
            return 0

    producer = make(partitioner=Moody())
    receipt = producer.produce_many("t", [b"a", b"b"])
    producer.flush(120)
    with pytest.raises(KeyboardInterrupt, match="no idea"):
        producer.produce_many("t", [b"c", b"x" * 2_000_000, b"bad", b"d"], receipt=receipt)
    producer.produce_many("t", [b"e", b"f" * 2_000_000], receipt=receipt)
    assert receipt.wait(120)
    assert (receipt.total, receipt.acknowledged, receipt.failed) == (6, 4, 2)
    assert [failed.index for failed in receipt.errors] == [3, 7]


def test_a_shared_receipt_waits_for_room_in_each_call(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make(buffer_memory=200_000, max_block_ms=5000, linger_ms=0)
    producer.produce_many("t", [b"warm"] * PARTITIONS, partitions=list(range(PARTITIONS))).wait(120)
    cluster.down()
    receipt = producer.produce_many("t", [b"x" * 100] * 4000)
    assert receipt.failed, "there was room for all"
    cluster.up()
    assert receipt.wait(120)
    failed = receipt.failed
    producer.produce_many("t", [b"x" * 100] * 4000, receipt=receipt)
    assert receipt.wait(120)
    assert receipt.failed == failed


def test_a_topic_that_is_no_text_is_told_and_hurts_nobody_else(producer: Producer) -> None:
    receipt = producer.produce_arrow(pa.table({"value": [b"a", b"b"], "topic": [b"t", b"\xff\xfe"]}))
    done(producer.produce_many("t", [b"c"] * 10), 10)
    assert receipt.wait(120)
    assert (receipt.acknowledged, receipt.failed) == (1, 1)
    assert [failed.record.topic for failed in receipt.errors if failed.record] == ["\ufffd\ufffd"]


def test_no_topic_is_a_type_error(producer: Producer) -> None:
    with pytest.raises(TypeError, match="topic must be a name, not None"):
        producer.produce_many(None, [b"x"])  # type: ignore[arg-type]


def test_buffers_behind_one_that_waits_are_released_too(cluster: MockCluster, producer: Producer) -> None:
    producer.produce_many("t", [b"warm"] * PARTITIONS, partitions=list(range(PARTITIONS))).wait(120)
    cluster.set_rtt(900_000, cluster.leader_of("t", 0))
    first = producer.produce_many("t", [b"held up" * 100], partitions=0)
    elsewhere = next(n for n in range(PARTITIONS) if cluster.leader_of("t", n) != cluster.leader_of("t", 0))
    alive: list[Any] = []
    for _ in range(500):
        column, watch = watched_arrow(1, 1000)
        producer.produce_many("t", column, partitions=elsewhere)
        alive.append(watch)
        del column

    def released() -> bool:
        producer.produce_many("t", [b"next"], partitions=elsewhere)  # lets go of what has been acknowledged
        return not any(ref() is not None for ref in alive)

    assert wait_for(released)
    assert not first.done
    producer.purge()
    assert first.wait(120)


def test_offsets_are_unknown_with_acks_0(make: Callable[..., Producer]) -> None:
    receipt = done(make(acks=0).produce_many("t", [b"x"] * 10, partitions=1), 10)
    assert receipt.offsets == {1: (None, None)}
    assert receipt.extents[("t", 1)].records == 10


def test_wait_gives_up_after_its_timeout(cluster: MockCluster, producer: Producer) -> None:
    producer.produce_many("t", [b"warm"]).wait(120)
    cluster.down()
    receipt = producer.produce_many("t", [b"a"] * 10)
    assert receipt.wait(0.1) is False
    assert receipt.wait(0) is False
    cluster.up()
    assert receipt.wait() is True
    assert receipt.wait(0) is True


def test_wait_needs_no_poll_and_runs_no_callbacks(producer: Producer) -> None:
    ran: list[int] = []
    producer.produce("t", b"single", on_delivery=lambda *_: ran.append(threading.get_ident()))
    done(producer.produce_many("t", [b"a"] * 10), 10)
    assert ran == []
    producer.flush(120)
    assert len(ran) == 1


def test_bad_elements_are_reported_by_index_and_the_others_delivered(
    cluster: MockCluster, make: Callable[..., Producer]
) -> None:
    producer = make(message_max_bytes=5000)
    done(producer.produce_many("u", [b"warm"]), 1)
    done(producer.produce_many("t", [b"warm"]), 1)
    items: list[Any] = [b"0", 17, b"2", b"x" * 6000, b"4", b"5", b"6", 1.5, b"8"]
    keys: list[Any] = [b"k", b"k", {}, b"k", b"k", b"k", b"k", b"k", None]
    partitions = [0, 0, 0, 0, 99, -7, 0, 0, 0]
    timestamps = [1, 1, 1, 1, 1, 1, -1, 1, 1]
    receipt = producer.produce_many("t", items, keys=keys, partitions=partitions, timestamps=timestamps)
    assert receipt.wait(120)
    failures = receipt.errors
    assert [failure.index for failure in failures] == [1, 2, 3, 4, 5, 6, 7]
    assert [type(failure.error) for failure in failures] == [
        TypeError,
        TypeError,
        RecordError,
        RecordError,
        RecordError,
        ValueError,
        TypeError,
    ]
    assert failures[2].error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert failures[3].error.args[0].code() == KafkaError._UNKNOWN_PARTITION
    assert failures[2].record.value == b"x" * 6000
    assert failures[3].record == ("t", b"k", b"4", 99, None, 1)
    assert (receipt.total, receipt.accepted, receipt.acknowledged, receipt.failed) == (9, 2, 2, 7)
    assert values(cluster) == [b"0", b"8", b"warm"]
    assert producer._runtime.memory == 0


def test_bad_headers_are_reported_by_index(cluster: MockCluster, producer: Producer) -> None:
    receipt = producer.produce_many("t", [b"0", b"1", b"2"], headers=[{"a": b"1"}, {"a": 5}, None])
    assert receipt.wait(120)
    assert [(failure.index, type(failure.error)) for failure in receipt.errors] == [(1, TypeError)]
    assert values(cluster) == [b"0", b"2"]


def test_an_unknown_partition_before_metadata_is_reported_by_index(producer: Producer) -> None:
    receipt = producer.produce_many("t", [b"0", b"1", b"2"], partitions=[0, 50, 1])
    assert receipt.wait(120)
    assert [failure.index for failure in receipt.errors] == [1]
    assert (receipt.acknowledged, receipt.failed) == (2, 1)


def test_a_brokers_refusal_is_reported_with_the_records(cluster: MockCluster, producer: Producer) -> None:
    done(producer.produce_many("t", [b"warm"], partitions=0), 1)
    cluster.push_errors("Produce", *["TOPIC_AUTHORIZATION_FAILED"] * 5)  # they may take several requests
    items = [b"%d" % n * 2000 for n in range(5)]
    receipt = producer.produce_many("t", items, keys=[b"k%d" % n for n in range(5)], partitions=0)
    assert receipt.wait(120)
    failures = receipt.errors
    assert (receipt.acknowledged, receipt.failed) == (0, 5)
    assert [failure.index for failure in failures] == list(range(5))
    assert {failure.error.code() for failure in failures} == {KafkaError.TOPIC_AUTHORIZATION_FAILED}
    assert [failure.record.value for failure in failures] == items
    assert [failure.record.key for failure in failures] == [b"k%d" % n for n in range(5)]
    assert [failure.record.partition for failure in failures] == [0] * 5
    assert producer._runtime.memory == 0


def test_a_failed_receipt_can_be_produced_again(cluster: MockCluster, producer: Producer) -> None:
    done(producer.produce_many("t", [b"warm"], partitions=0), 1)
    cluster.push_errors("Produce", "INVALID_RECORD", "INVALID_RECORD")
    receipt = producer.produce_many("t", [b"a", b"b"], partitions=0)
    assert receipt.wait(120)
    cluster.clear_errors("Produce")
    again = [failure.record.value for failure in receipt.errors]
    assert again == [b"a", b"b"]
    done(producer.produce_many("t", again), 2)
    assert values(cluster) == [b"a", b"b", b"warm"]


def test_a_receipt_may_be_dropped_at_once(cluster: MockCluster, producer: Producer) -> None:
    for n in range(50):
        producer.produce_many("t", [b"%d" % n * 700] * 20)
    gc.collect()
    assert producer.flush(120) == 0
    assert sum(high for _, high in cluster.watermarks("t").values()) == 1000
    assert producer._runtime.memory == 0


def test_a_receipt_outlives_its_producer(cluster: MockCluster) -> None:
    with Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0}) as producer:
        receipt = producer.produce_many("t", [b"a"] * 10)
    del producer
    gc.collect()
    assert receipt.wait(120)
    assert receipt.acknowledged == 10
    assert receipt.errors == []
    assert sum(extent.records for extent in receipt.extents.values()) == 10


def test_a_receipt_ends_when_its_producer_is_closed(cluster: MockCluster) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    cluster.down()
    receipt = producer.produce_many("t", [b"a"] * 10)
    assert producer.close(0.1) is False
    assert receipt.wait(120)
    assert (receipt.acknowledged, receipt.failed) == (0, 10)
    assert {failure.error.code() for failure in receipt.errors} <= {
        KafkaError._PURGE_QUEUE,
        KafkaError._PURGE_INFLIGHT,
        KafkaError._DESTROY,
    }


def test_many_threads_may_wait_for_one_receipt(cluster: MockCluster, producer: Producer) -> None:
    producer.produce_many("t", [b"warm"]).wait(120)
    cluster.set_rtt(300)
    receipt = producer.produce_many("t", [b"a"] * 100)
    results: list[bool] = []
    threads = [threading.Thread(target=lambda: results.append(receipt.wait(120))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert results == [True] * 5


# ---- memory


def test_large_bytes_are_pinned_until_acknowledged_then_released(cluster: MockCluster, producer: Producer) -> None:
    producer.produce_many("t", [b"warm"]).wait(120)
    item = bytes(bytearray(b"x" * 5000))
    idle = sys.getrefcount(item)
    cluster.down()
    receipt = producer.produce_many("t", [item])
    assert sys.getrefcount(item) > idle
    cluster.up()
    assert receipt.wait(120)
    assert sys.getrefcount(item) == idle


def watched_arrow(count: int, size: int) -> tuple[pa.Array, "weakref.ref[Any]"]:
    """Values that are sent by reference: Arrow has allocated their memory, and the array goes when it is free."""
    array = pa.array([b"z" * size] * count)
    return array, weakref.ref(array)


def test_arrow_buffers_live_until_acknowledged_and_no_longer(cluster: MockCluster, producer: Producer) -> None:
    producer.produce_many("t", [b"warm"]).wait(120)
    column, watch = watched_arrow(20, 4000)
    cluster.down()
    receipt = producer.produce_many("t", column)
    del column
    gc.collect()
    assert watch() is not None
    cluster.up()
    assert receipt.wait(120)
    gc.collect()
    assert watch() is None
    assert values(cluster)[1:] == [b"warm", *[b"z" * 4000] * 20][1:]


def test_arrow_buffers_of_a_dropped_receipt_live_until_acknowledged(cluster: MockCluster, producer: Producer) -> None:
    producer.produce_many("t", [b"warm"]).wait(120)
    column, watch = watched_arrow(20, 4000)
    cluster.down()
    producer.produce_many("t", column)
    del column
    gc.collect()
    assert watch() is not None
    cluster.up()
    assert producer.flush(120) == 0
    gc.collect()
    assert watch() is None
    assert sorted(values(cluster)) == sorted([b"warm", *[b"z" * 4000] * 20])  # type: ignore[type-var]


def test_buffers_that_failed_to_be_delivered_are_released_with_the_receipt(
    cluster: MockCluster, producer: Producer
) -> None:
    done(producer.produce_many("t", [b"warm"], partitions=0), 1)
    cluster.push_errors("Produce", *["TOPIC_AUTHORIZATION_FAILED"] * 5)
    column, watch = watched_arrow(5, 4000)
    receipt = producer.produce_many("t", column, partitions=0)
    del column
    assert receipt.wait(120)
    assert receipt.errors[4].record.value == b"z" * 4000
    producer.flush(120)
    del receipt
    gc.collect()
    assert watch() is None


def test_mutable_sources_may_change_right_after_the_call(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make(linger_ms=300)
    size = 3000
    array = np.full((4, size), ord("a"), dtype=np.uint8)
    sources: list[tuple[Any, Callable[[], object]]] = []
    bytearrays = [bytearray(b"a" * size)]
    sources.append((bytearrays, lambda: bytearrays[0].__setitem__(slice(None), b"X" * size)))
    strings = np.array([b"a" * size])
    sources.append((strings, lambda: strings.fill(b"X" * size)))
    views = [memoryview(array[0])]
    sources.append((views, lambda: array[0].fill(ord("X"))))
    flat = bytearray(b"a" * size)
    sources.append(((np.array([0, size]), flat), lambda: flat.__setitem__(slice(None), b"X" * size)))
    flat_numpy = np.full(size, ord("a"), dtype=np.uint8)
    sources.append(((np.array([0, size]), flat_numpy), lambda: flat_numpy.fill(ord("X"))))
    texts = np.array(["a" * size])
    sources.append((texts, lambda: texts.fill("X" * size)))
    objects = np.array([bytearray(b"a" * size), None], dtype=object)[:1]
    sources.append((objects, lambda: objects[0].__setitem__(slice(None), b"X" * size)))
    plain = [b"a" * size]
    sources.append((plain, lambda: plain.__setitem__(0, b"X" * size)))
    for source, change in sources:
        producer.produce_many("t", source)
        change()
    assert producer.flush(120) == 0
    assert values(cluster) == [b"a" * size] * len(sources)


def test_a_list_emptied_right_after_the_call(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make(linger_ms=200)
    items = [b"%d" % n * 1500 for n in range(20)]
    expected = sorted(items)
    receipt = producer.produce_many("t", items)
    items.clear()
    gc.collect()
    done(receipt, 20)
    assert values(cluster) == expected


def test_mutable_keys_with_immutable_values(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make(linger_ms=300)
    keys = [bytearray(b"key-%d" % n) for n in range(10)]
    producer.produce_many("t", [b"v" * 2000] * 10, keys=keys)
    for key in keys:
        key[:] = b"XXXXX"
    producer.flush(120)
    assert {key for key, _ in pairs(cluster)} == {b"key-%d" % n for n in range(10)}


def over(memory: bytearray, kind: pa.DataType, count: int) -> pa.Array:
    """Arrow data in memory that is not Arrow's own."""
    return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(memory)])


def forms_of_memory(size: int) -> list[tuple[Any, Callable[[], object]]]:
    """Columns of b"aa...", b"", None or two of these, and what overwrites them."""
    found: list[tuple[Any, Callable[[], object]]] = []
    fixed = np.ma.MaskedArray(np.array([b"a" * size, b"", b"z"]), mask=[False, False, True])
    found.append((fixed, lambda: fixed.data.fill(b"X" * size)))
    items = [bytearray(b"a" * size), b"", None]
    found.append((items, lambda: items[0].__setitem__(slice(None), b"X" * size)))  # type: ignore[union-attr]
    array = np.full(size, ord("a"), dtype=np.uint8)
    found.append(([memoryview(array), b"", None], lambda: array.fill(ord("X"))))
    flat = bytearray(b"a" * size)
    found.append(((np.array([0, size, size]), flat), lambda: flat.__setitem__(slice(None), b"X" * size)))
    data = bytearray(b"a" * size)
    offsets = pa.py_buffer(np.array([0, size, size], "int32"))
    arrow = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, pa.py_buffer(data)])
    found.append((arrow, lambda: data.__setitem__(slice(None), b"X" * size)))
    return found


@pytest.mark.parametrize("size", [20, 3000])
@pytest.mark.parametrize("how", ["refused", "lingering", "in flight", "no metadata"])
def test_what_failed_is_told_as_it_was_given_though_its_memory_has_changed(
    cluster: MockCluster, make: Callable[..., Producer], how: str, size: int
) -> None:
    producer = make(linger_ms=600_000 if how == "lingering" else 0, batch_size=500_000)
    if how == "no metadata":
        cluster.down()
    else:
        done(producer.produce_many("t", [b"warm"] * PARTITIONS, partitions=list(range(PARTITIONS))), PARTITIONS)
    if how == "refused":
        cluster.push_errors("Produce", *["TOPIC_AUTHORIZATION_FAILED"] * 100)
    elif how == "in flight":
        cluster.set_rtt(60_000)
    receipts = []
    given: list[Any] = [b"a" * size, b"", None]
    for place, (source, change) in enumerate(forms_of_memory(size)):
        count = len(source) if not isinstance(source, tuple) else len(source[0]) - 1
        keys = [bytearray(b"key-%d" % n) for n in range(count)]
        partitions = np.full(count, place % PARTITIONS, "int32")
        timestamps = np.arange(1000, 1000 + count)
        receipts.append(producer.produce_many("t", source, keys, partitions=partitions, timestamps=timestamps))
        receipts.append(producer.produce_many("t", [b"v"] * count, source, partitions=partitions))
        change()
        for key in keys:
            key[:] = b"XXXXX"
        partitions[:] = 3 - place % PARTITIONS
        timestamps[:] = 9
    if how != "refused":
        producer.purge()
    for place, (by_value, by_key) in enumerate(zip(receipts[::2], receipts[1::2], strict=True)):
        assert by_value.wait(120)
        assert by_key.wait(120)
        count = by_value.total
        assert (by_value.failed, by_key.failed) == (count, count)
        where = place % PARTITIONS
        assert [failed.record for failed in by_value.errors] == [
            ("t", b"key-%d" % n, given[n], where, None, 1000 + n) for n in range(count)
        ]
        assert [failed.record for failed in by_key.errors] == [
            ("t", given[n], b"v", where, None, None) for n in range(count)
        ]
    cluster.set_rtt(0)


def test_a_topic_column_is_told_as_it_was_given(make: Callable[..., Producer]) -> None:
    producer = make(linger_ms=600_000)
    topics = bytearray(b"tut")
    table = pa.table({"value": [b"0", b"1", b"2" * 2_000_000], "topic": over(topics, pa.binary(1), 3)})
    receipt = producer.produce_arrow(table)
    topics[:] = b"xxx"
    producer.purge()
    assert receipt.wait(120)
    assert [failed.record.topic for failed in receipt.errors if failed.record] == ["t", "u", "t"]


@pytest.mark.parametrize("form", ["numpy", "column of a table", "Arrow", "masked", "times"])
def test_partitions_and_timestamps_are_told_as_they_were_given(make: Callable[..., Producer], form: str) -> None:
    """Though the values need no copy."""
    producer = make(linger_ms=600_000)
    chosen, times = np.array([2, 1, 0], "int32"), np.array([1000, 2000, 3000])
    partitions: Any = chosen
    timestamps: Any = times
    if form == "column of a table":  # has strides
        partitions, timestamps = np.array([chosen, chosen]).T[:, 1], np.array([times, times]).T[:, 1]
        chosen, times = partitions, timestamps
    elif form == "Arrow":
        partitions = pa.Array.from_buffers(pa.int32(), 3, [None, pa.py_buffer(chosen)])
        timestamps = pa.Array.from_buffers(pa.timestamp("ms"), 3, [None, pa.py_buffer(times)])
    elif form == "masked":
        partitions, timestamps = np.ma.MaskedArray(chosen), np.ma.MaskedArray(times)
    elif form == "times":
        timestamps = times.view("datetime64[ms]")
    receipt = producer.produce_many("t", [b"v" * 1000] * 3, partitions=partitions, timestamps=timestamps)
    chosen[:] = 3
    times[:] = 9
    producer.purge()
    assert receipt.wait(120)
    told = [failed.record for failed in receipt.errors if failed.record]
    assert [record.partition for record in told] == [2, 1, 0]
    assert [record.timestamp for record in told] == [1000, 2000, 3000]


def test_what_was_rejected_is_told_as_it_was_given(producer: Producer) -> None:
    items = [bytearray(b"a" * 2_000_000), bytearray(b"b")]
    strings = np.array([b"c", b"d"])
    stamps = np.array([-5, 1000])
    large = producer.produce_many("t", items, strings)
    early = producer.produce_many("t", strings, timestamps=stamps)
    items[0][:] = b"X" * 2_000_000
    strings[:] = b"X"
    stamps[:] = 9
    assert large.wait(120)
    assert early.wait(120)
    assert [failed.record for failed in large.errors] == [("t", b"c", b"a" * 2_000_000, None, None, None)]
    assert [failed.record for failed in early.errors] == [("t", None, b"c", None, None, -5)]


def test_what_was_accepted_before_the_buffer_was_full_is_told_as_it_was_given(
    cluster: MockCluster, make: Callable[..., Producer]
) -> None:
    producer = make(buffer_memory=100_000, max_block_ms=0)
    cluster.down()
    strings = np.array([b"%03d" % n * 100 for n in range(900)])
    given = strings.tolist()
    receipt = producer.produce_many("t", strings)
    strings[:] = b"X"
    producer.purge()
    assert receipt.wait(120)
    assert 0 < receipt.accepted < 900
    told = [failed.record.value for failed in receipt.errors if failed.record]
    assert told[: receipt.accepted] == given[: receipt.accepted]
    assert told[receipt.accepted :] == [b"X"] * (900 - receipt.accepted)  # read from where it still is


@pytest.mark.parametrize("size", [100, 2000])
def test_a_call_larger_than_the_buffer_streams_through(
    cluster: MockCluster, make: Callable[..., Producer], size: int
) -> None:
    producer = make(buffer_memory=100_000)
    count = 3_000_000 // size
    receipt = producer.produce_many("t", [b"%d" % (n % 10) * size for n in range(count)])
    assert producer._runtime.memory <= 200_000
    done(receipt, count)
    assert sum(high for _, high in cluster.watermarks("t").values()) == count
    assert producer._runtime.memory == 0


def test_a_large_call_streams_through_though_a_callback_waits(
    cluster: MockCluster, make: Callable[..., Producer]
) -> None:
    producer = make(buffer_memory=100_000)
    ran: list[int] = []
    producer.produce("t", b"single", on_delivery=lambda *_: ran.append(1))
    assert wait_for(lambda: producer._runtime.records == 0)
    done(producer.produce_many("t", [b"x" * 100] * 20_000), 20_000)
    producer.flush(120)
    assert ran == [1]


def test_a_large_arrow_table_streams_through(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make(buffer_memory=200_000)
    table = pa.table({"value": [b"%07d" % n * 10 for n in range(20_000)], "key": [f"k{n % 9}" for n in range(20_000)]})
    done(producer.produce_arrow(table, "t"), 20_000)
    by_key: dict[bytes, list[bytes]] = {}
    for record in cluster.records("t"):
        by_key.setdefault(record.key() or b"", []).append(record.value() or b"")
    assert sum(map(len, by_key.values())) == 20_000
    assert all(items == sorted(items) for items in by_key.values())


def test_a_full_buffer_refuses_records_of_a_call_by_index(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make(buffer_memory=100_000, max_block_ms=0)
    cluster.down()
    receipt = producer.produce_many("t", [b"x" * 500] * 1000)
    assert receipt.total == 1000
    assert 0 < receipt.accepted < 1000
    assert len(receipt.errors) == 1000 - receipt.accepted
    assert isinstance(receipt.errors[0].error, BufferError)
    cluster.up()
    assert receipt.wait(120)
    assert receipt.acknowledged == receipt.accepted


def test_the_order_per_key_is_kept(cluster: MockCluster, producer: Producer) -> None:
    for start in range(0, 3000, 1000):
        producer.produce_many(
            "t",
            [b"%d" % n * (300 if n % 7 == 0 else 1) for n in range(start, start + 1000)],
            keys=[b"k%d" % (n % 11) for n in range(start, start + 1000)],
            headers=[{"n": b"%d" % n} if n % 5 == 0 else None for n in range(start, start + 1000)],
        )
    assert producer.flush(120) == 0
    by_key: dict[bytes, list[bytes]] = {}
    for record in cluster.records("t"):
        by_key.setdefault(record.key() or b"", []).append(record.value() or b"")
    expected: dict[bytes, list[bytes]] = {}
    for n in range(3000):
        expected.setdefault(b"k%d" % (n % 11), []).append(b"%d" % n * (300 if n % 7 == 0 else 1))
    assert by_key == expected


def test_single_and_bulk_calls_keep_one_order(cluster: MockCluster, producer: Producer) -> None:
    expected = []
    for n in range(60):
        size = 2000 if n % 3 else 5
        if n % 2:
            producer.produce("u", b"%03d" % n * size, b"k")
        else:
            producer.produce_many("u", [b"%03d" % n * size], keys=[b"k"])
        expected.append(b"%03d" % n * size)
    assert producer.flush(120) == 0
    assert [record.value() for record in cluster.records("u")] == expected


@pytest.mark.parametrize(("size", "count"), [(10_000, 200), (900_000, 4)])
@pytest.mark.parametrize("form", [list, lambda items: pa.array(items, pa.large_binary())], ids=["list", "arrow"])
def test_large_records(
    cluster: MockCluster, producer: Producer, size: int, count: int, form: Callable[[Any], Any]
) -> None:
    items = [bytes([65 + n % 26]) * (size + n) for n in range(count)]
    receipt = done(producer.produce_many("t", form(items), partitions=[n % PARTITIONS for n in range(count)]), count)
    assert {partition: last for partition, (_, last) in receipt.offsets.items()} == dict.fromkeys(
        range(PARTITIONS), count // PARTITIONS - 1
    )
    assert values(cluster) == sorted(items)
    assert producer._runtime.memory == 0


def test_a_record_larger_than_the_buffer_is_refused(make: Callable[..., Producer]) -> None:
    producer = make(buffer_memory=100_000)
    receipt = producer.produce_many("t", [b"a", b"x" * 200_000, b"b"])
    assert receipt.wait(120)
    assert [failure.index for failure in receipt.errors] == [1]
    assert isinstance(receipt.errors[0].error, KafkaException)
    assert receipt.acknowledged == 2


def test_a_million_records(cluster: MockCluster, producer: Producer) -> None:
    receipt = producer.produce_many("t", np.full(1_000_000, b"0123456789", dtype="S10"))
    assert receipt.wait(120)
    assert receipt.acknowledged == 1_000_000
    assert sum(high for _, high in cluster.watermarks("t").values()) == 1_000_000
    assert producer._runtime.memory == 0


@pytest.mark.parametrize("module", ["numpy", "pyarrow"])
def test_lists_do_not_wait_for_a_module_that_another_thread_is_importing(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, ModuleType(module))  # as it is while its first lines run
        receipt = producer.produce_many("t", [b"v"], [b"k"])
    receipt.wait(120)
    assert receipt.acknowledged == 1
    producer.close()
