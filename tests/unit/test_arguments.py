"""What may be given to produce(), produce_batch(), produce_many() and produce_arrow(), and what arrives of it.

The rule for all of them: what the call was given arrives, or the call is refused before anything is accepted.
"""

import io
import mmap
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from confluent_kafka import KafkaError, KafkaException
from reference import murmur2

from fastprod import Producer, _bulk
from fastprod._core._columns import Column, columns
from fastprod.testing import MockCluster


def told(part: object) -> str:
    """A case by its name, the same in every process: no addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(part))[:40]


PARTITIONS = 4
MOMENT = 1_700_000_000_123


@pytest.fixture(scope="module")
def cluster() -> Iterator[MockCluster]:
    with MockCluster(1, topics={"t": PARTITIONS}) as running:
        yield running


@pytest.fixture(scope="module")
def shared(cluster: MockCluster) -> Iterator[Producer]:
    with Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0}) as producer:
        producer.produce_many("t", [b"warm"] * PARTITIONS, partitions=list(range(PARTITIONS))).wait(120)
        yield producer


@pytest.fixture
def producer(shared: Producer) -> Iterator[Producer]:
    yield shared
    assert shared.flush(120) == 0
    assert shared._runtime.memory == 0


class Reader:
    """Tells what a topic has got since the last look."""

    def __init__(self, cluster: MockCluster) -> None:
        self.cluster = cluster
        self.seen = self.ends()

    def ends(self) -> dict[int, int]:
        return {partition: high for partition, (_, high) in self.cluster.watermarks("t").items()}

    def new(self) -> list[Any]:
        if self.ends() == self.seen:
            return []
        found = [r for r in self.cluster.records("t") if r.offset() >= self.seen[r.partition()]]
        self.seen = self.ends()
        return found

    def values(self) -> list[bytes | None]:
        return sorted((r.value() for r in self.new()), key=lambda value: (value is not None, value))


@pytest.fixture
def reader(cluster: MockCluster, producer: Producer) -> Reader:
    return Reader(cluster)


# ---- memory that somebody can change

SIZE = 600  # above the bytes from which on values are not copied


def offsets(count: int, size: int = SIZE, dtype: Any = np.int32) -> pa.Buffer:
    return pa.py_buffer(np.arange(0, (count + 1) * size, size, dtype=dtype).tobytes())


def views(count: int, size: int = SIZE) -> pa.Buffer:
    """Of elements one after the other in a single buffer, which all begin with AAAA."""
    return pa.py_buffer(b"".join(np.array([size, 0x41414141, 0, n * size], np.int32).tobytes() for n in range(count)))


FORMS: dict[str, Callable[[pa.Buffer, int], pa.Array]] = {
    "fixed": lambda data, n: pa.Array.from_buffers(pa.binary(SIZE), n, [None, data]),
    "binary": lambda data, n: pa.Array.from_buffers(pa.binary(), n, [None, offsets(n), data]),
    "large": lambda data, n: pa.Array.from_buffers(pa.large_string(), n, [None, offsets(n, dtype=np.int64), data]),
    "view": lambda data, n: pa.Array.from_buffers(pa.binary_view(), n, [None, views(n), data]),
    "slice": lambda data, n: pa.Array.from_buffers(pa.binary(SIZE), n, [None, data.slice(0)])[0:],
    "dictionary": lambda data, n: pa.DictionaryArray.from_arrays(
        pa.array(range(n)), pa.Array.from_buffers(pa.binary(SIZE), n, [None, data])
    ),
}


def numpy_memory(size: int, folder: Path) -> tuple[Any, pa.Buffer]:
    memory = np.full(size, 65, np.uint8)
    return memory, pa.py_buffer(memory)


def bytearray_memory(size: int, folder: Path) -> tuple[Any, pa.Buffer]:
    memory = bytearray(b"A" * size)
    return np.frombuffer(memory, np.uint8), pa.py_buffer(memory)


def read_only_view(size: int, folder: Path) -> tuple[Any, pa.Buffer]:
    memory = np.full(size, 65, np.uint8)
    view = memory[:]
    view.flags.writeable = False
    return memory, pa.py_buffer(view)


def foreign_memory(size: int, folder: Path) -> tuple[Any, pa.Buffer]:
    memory = np.full(size, 65, np.uint8)
    return memory, pa.foreign_buffer(memory.ctypes.data, size, memory)


def imported_memory(size: int, folder: Path) -> tuple[Any, pa.Buffer]:
    """Through Arrow's C data interface, as from DuckDB or polars."""
    memory = np.full(size, 65, np.uint8)
    schema, array = pa.Array.from_buffers(pa.uint8(), size, [None, pa.py_buffer(memory)]).__arrow_c_array__()
    return memory, pa.Array._import_from_c_capsule(schema, array).buffers()[1]


def mapped_file(size: int, folder: Path) -> tuple[Any, pa.Buffer]:
    path = folder / "mapped"
    path.write_bytes(b"A" * size)
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), size), np.uint8)
    return memory, pa.memory_map(str(path)).read_buffer()


def numpy_under_ipc(size: int, folder: Path) -> tuple[Any, pa.Buffer]:
    """A message read from memory is a slice of that memory."""
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"value": pa.array([b"A" * size])})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    memory = np.frombuffer(sink.getvalue(), np.uint8).copy()
    return memory, pa.ipc.open_stream(pa.py_buffer(memory)).read_next_batch().column(0).buffers()[2]


MEMORY = [
    numpy_memory,
    bytearray_memory,
    read_only_view,
    foreign_memory,
    imported_memory,
    mapped_file,
    numpy_under_ipc,
]


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("form", FORMS)
def test_what_the_call_was_given_arrives_whatever_becomes_of_its_memory(
    producer: Producer, reader: Reader, memory: Any, form: str, tmp_path: Path, cluster: MockCluster
) -> None:
    count = 5
    changing, buffer = memory(count * SIZE, tmp_path)
    values = FORMS[form](buffer, count)
    cluster.set_rtt(100)  # the first request is on its way, the others wait
    receipts = [producer.produce_many("t", values), producer.produce_many("t", [b"v" * SIZE] * count, keys=values)]
    receipts.append(producer.produce_arrow(pa.table({"value": values, "key": values}), "t"))
    changing[:] = 66
    cluster.set_rtt(0)
    for receipt in receipts:
        assert receipt.wait(120)
        assert (receipt.acknowledged, receipt.failed) == (count, 0)
    given = b"A" * SIZE
    assert Counter((r.key(), r.value()) for r in reader.new()) == {
        (None, given): count,
        (given, b"v" * SIZE): count,
        (given, given): count,
    }


@pytest.mark.parametrize("memory", MEMORY)
def test_memory_of_others_is_copied(memory: Any, tmp_path: Path) -> None:
    for make in FORMS.values():
        _, buffer = memory(3 * SIZE, tmp_path)
        column = Column(make(buffer, 3))
        assert not column.immutable
        assert list(column) == [b"A" * SIZE] * 3


def parquet(array: pa.Array, **options: Any) -> pa.Array:
    file = io.BytesIO()
    pa.parquet.write_table(pa.table({"value": array}), file)
    return pa.parquet.read_table(io.BytesIO(file.getvalue()), **options)["value"].chunk(0)


def stream(array: pa.Array, open_it: Callable[[bytes], Any], **options: Any) -> pa.Array:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"value": array})
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(open_it(sink.getvalue().to_pybytes())).read_next_batch().column(0)


ITEMS = [b"a" * SIZE, None, b"", b"short", b"b" * 2 * SIZE]

OWN: dict[str, Callable[[], Any]] = {
    "list": lambda: ITEMS,
    "list of str": lambda: ["a" * SIZE, None],
    "numpy objects": lambda: np.array(ITEMS, dtype=object),
    "numpy str": lambda: np.array(["a" * SIZE]),
    "offsets and bytes": lambda: (np.array([0, 1, 3]), b"abc"),
    "nothing": lambda: None,
    "binary": lambda: pa.array(ITEMS),
    "large_binary": lambda: pa.array(ITEMS, pa.large_binary()),
    "binary_view": lambda: pa.array(ITEMS, pa.binary_view()),
    "fixed": lambda: pa.array([b"abc", None], pa.binary(3)),
    "dictionary": lambda: pa.array(ITEMS).dictionary_encode(),
    "sliced": lambda: pa.array(ITEMS)[1:4],
    "empty": lambda: pa.array([], pa.binary()),
    "nulls": lambda: pa.nulls(3),
    "computed": lambda: pa.compute.binary_join_element_wise(pa.array(ITEMS), pa.array(ITEMS), b"-"),
    "taken": lambda: pa.array(ITEMS).take(pa.array([0, 4])),
    "concatenated": lambda: pa.concat_arrays([pa.array(ITEMS), pa.array(ITEMS)]),
    "from pandas": lambda: pa.array(np.array(ITEMS, dtype=object)),
    "parquet": lambda: parquet(pa.array(ITEMS)),
    "parquet dictionary": lambda: parquet(pa.array(ITEMS), read_dictionary=["value"]),
    "csv": lambda: pa.csv.read_csv(io.BytesIO(b"a\n" + b"x" * SIZE + b"\n"))["a"].chunk(0),
    "stream in bytes": lambda: stream(pa.array(ITEMS), lambda data: data),
    "stream from a file, as in Spark": lambda: stream(
        pa.array(ITEMS), lambda data: io.BufferedReader(io.BytesIO(data))
    ),
    "stream of views": lambda: stream(pa.array(ITEMS, pa.binary_view()), io.BytesIO),
    "compressed stream": lambda: stream(pa.array(ITEMS), io.BytesIO, compression="zstd"),
    "bytes": lambda: pa.Array.from_buffers(pa.binary(), 1, [None, offsets(1), pa.py_buffer(b"x" * SIZE)]),
}


@pytest.mark.parametrize("source", OWN)
def test_memory_that_is_nobodys_to_change_is_not_copied(source: str) -> None:
    assert all(column.immutable for column in columns(OWN[source]()))


def test_files_that_arrow_reads_itself_are_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "stream"
    batch = pa.record_batch({"value": pa.array(ITEMS)})
    with pa.ipc.new_stream(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    assert Column(pa.ipc.open_stream(pa.OSFile(str(path))).read_next_batch().column(0)).immutable
    assert not Column(pa.ipc.open_stream(pa.memory_map(str(path))).read_next_batch().column(0)).immutable


def test_only_a_column_whose_keys_and_values_stay_is_sent_by_reference() -> None:
    own, changing = pa.array([b"a" * SIZE]), [bytearray(b"a" * SIZE)]
    for values, keys, expected in ((own, own, True), (own, None, True), (own, changing, False), (changing, own, False)):
        assert [block[-1] for block in _bulk.blocks_of_columns(values, keys, None, None, None)] == [expected]


def test_whoever_made_a_batch_can_vouch_for_its_memory() -> None:
    memory = np.full(SIZE, 65, np.uint8)
    batch = pa.record_batch({"value": FORMS["fixed"](pa.py_buffer(memory), 1)})
    for given, expected in ((batch, False), (_bulk.Vouched(batch), True)):
        made = list(_bulk.blocks_of_batches(_bulk.checked_batches(given, "t"), False))
        assert [block[-1] for block in made] == [expected]
        assert list(made[0][0]) == [b"A" * SIZE]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
def test_offsets_and_nulls_are_those_of_the_call(kind: pa.DataType) -> None:
    """They are looked at again when a record has failed: changed ones would lead anywhere."""
    items = [b"a" * 20, None, b"c" * 30, b"", b"inline"]
    buffers = [buffer and np.frombuffer(buffer, np.uint8).copy() for buffer in pa.array(items, kind).buffers()]
    array = pa.Array.from_buffers(kind, 5, [memory if memory is None else pa.py_buffer(memory) for memory in buffers])
    whole, part = Column(array), Column(array[1:4])
    for memory in buffers[:2]:
        memory[:] = 0xEE
    assert list(whole) == items
    assert list(part) == items[1:4]


def test_offsets_at_an_odd_address() -> None:
    moved = pa.py_buffer(b"x" + np.array([0, 2, 3], np.int32).tobytes()).slice(1)
    assert list(Column(pa.Array.from_buffers(pa.binary(), 2, [None, moved, pa.py_buffer(b"abc")]))) == [b"ab", b"c"]


# ---- columns of every form beside one another


def rows(blocks: Any) -> list[tuple[Any, ...]]:
    """The records of blocks as (value, key, partition, headers, timestamp)."""
    found: list[tuple[Any, ...]] = []
    for values, keys, _topics, partitions, timestamps, headers, _by_reference in blocks:
        assert len(values) == len(keys)
        for n in range(len(values)):
            found.append(
                (
                    values[n],
                    keys[n],
                    None if partitions is None else int(partitions[n]),
                    None if headers is None else headers[n],
                    None if timestamps is None else int(timestamps[n]),
                )
            )
    return found


def chunked(items: Any, kind: Any, *cuts: int) -> pa.ChunkedArray:
    parts = [pa.array(items[a:b], kind) for a, b in zip((0, *cuts), (*cuts, len(items)), strict=True)]
    return pa.chunked_array(parts, kind)


def pair(items: list[bytes]) -> Any:
    return np.cumsum([0, *map(len, items)]), b"".join(items)


WORDS = [b"", b"a", b"bb", b"ccc", b"dddd", b"eeeee"]
COLUMNS: dict[str, Any] = {
    "list": WORDS,
    "tuple": tuple(WORDS),
    "pair": pair(WORDS),
    "pair32": (pair(WORDS)[0].astype(np.int32), bytearray(b"".join(WORDS))),
    "numpy S": np.array(WORDS),
    "masked": np.ma.masked_array(np.array(WORDS), [False] * 6),
    "objects": np.array(WORDS, dtype=object),
    "array": pa.array(WORDS),
    "view": pa.array(WORDS, pa.binary_view()),
    "dictionary": pa.array(WORDS).dictionary_encode(),
    "one chunk": chunked(WORDS, pa.binary()),
    "chunks": chunked(WORDS, pa.binary(), 1, 4),
    "other chunks": chunked(WORDS, pa.large_binary(), 0, 2, 4, 4, 5),
    "chunked dictionary": pa.chunked_array(
        [pa.array(WORDS[:3]).dictionary_encode(), pa.array(WORDS[3:]).dictionary_encode()]
    ),
}


@pytest.mark.parametrize("keys", COLUMNS)
@pytest.mark.parametrize("values", COLUMNS)
def test_columns_of_every_two_forms(values: str, keys: str) -> None:
    expected = [(word, word, n, {"n": b"%d" % n}, MOMENT + n) for n, word in enumerate(WORDS)]
    numbers, stamps = list(range(6)), [MOMENT + n for n in range(6)]
    given = [{"n": b"%d" % n} for n in range(6)]
    for partitions, timestamps in (
        (numbers, np.array(stamps)),
        (chunked(numbers, pa.int16(), 2, 3), pa.array(stamps)),
        (np.array(numbers, np.uint8), chunked(stamps, pa.timestamp("ms"), 5)),
    ):
        made = _bulk.blocks_of_columns(COLUMNS[values], COLUMNS[keys], partitions, given, timestamps)
        assert rows(made) == expected
    made = _bulk.blocks_of_columns(COLUMNS[values], COLUMNS[keys], 3, {"h": "x"}, MOMENT)
    assert rows(made) == [(word, word, 3, {"h": "x"}, MOMENT) for word in WORDS]


def test_offsets_are_never_sent_as_keys(producer: Producer, reader: Reader) -> None:
    values = pa.chunked_array([[b"v0"], [b"v1"]])
    keys = (np.array([0, 1, 2], np.int64), b"KL")
    assert producer.produce_many("t", values, keys).wait(120)
    assert {(r.key(), r.value()) for r in reader.new()} == {(b"K", b"v0"), (b"L", b"v1")}
    for one, other in ((values, pair([b"K"])), (pair([b"K"]), values), (values, pair([b"K"] * 3))):
        with pytest.raises(ValueError, match=r"keys for \d values"):
            producer.produce_many("t", one, other)
    assert reader.new() == []


def test_chunks_of_headers_need_not_agree() -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    given = [[{"key": f"k{n}", "value": b"%d" % n}] if n % 2 else None for n in range(6)]
    expected = [[(f"k{n}", b"%d" % n)] if n % 2 else None for n in range(6)]
    for values in COLUMNS.values():
        for headers in (chunked(given, kind, 1, 5), pa.array(given, kind)):
            assert [row[3] for row in rows(_bulk.blocks_of_columns(values, None, None, headers, None))] == expected


@pytest.mark.parametrize("values", COLUMNS)
@pytest.mark.parametrize(
    "others",
    [
        {"keys": [b"a"]},
        {"keys": pair(WORDS[1:])},
        {"keys": chunked(WORDS[1:], pa.binary(), 2)},
        {"partitions": [1]},
        {"partitions": chunked([1, 2], pa.int8(), 1)},
        {"timestamps": np.arange(7)},
        {"headers": [{}] * 7},
        {"headers": []},
    ],
    ids=lambda others: next(iter(others)),
)
def test_columns_of_other_lengths_are_refused(producer: Producer, reader: Reader, values: str, others: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(others))[:-1]):
        producer.produce_many("t", COLUMNS[values], **others)
    assert reader.new() == []


def test_series_of_pandas_and_polars_in_any_place() -> None:
    pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
    words, numbers = [b"a", None, b"c"], [1, None, 3]
    stamps = [MOMENT, None, MOMENT]
    expected = [
        (word, word, -1 if n is None else n, None, s or 0) for word, n, s in zip(words, numbers, stamps, strict=True)
    ]
    several = polars.concat([polars.Series(words[:1]), polars.Series(words[1:])], rechunk=False)
    backed = pandas.Series(pandas.arrays.ArrowExtensionArray(pa.chunked_array([words[:2], words[2:]])))
    for column in (pandas.Series(words), backed, polars.Series(words), several):
        for partitions, timestamps in (
            (pandas.Series(numbers, dtype="Int64"), pandas.Series(pandas.to_datetime(stamps, unit="ms", utc=True))),
            (pandas.Series(numbers, dtype=pandas.ArrowDtype(pa.int32())), pandas.to_datetime(stamps, unit="ms")),
            (polars.Series(numbers), polars.Series(stamps).cast(polars.Datetime("ms"))),
        ):
            assert rows(_bulk.blocks_of_columns(column, column, partitions, None, timestamps)) == expected


def test_a_wrong_chunk_is_refused_before_the_ones_before_it_are_accepted(producer: Producer, reader: Reader) -> None:
    wrong = pa.Array.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(np.array([0, 9, 1], np.int32)), pa.py_buffer(b"x")]
    )
    column = pa.chunked_array([pa.array([b"good"] * 3), wrong])
    with pytest.raises(ValueError, match="value at index 3 "):
        producer.produce_many("t", column)
    with pytest.raises(ValueError, match="value at index 3 "):
        producer.produce_arrow(pa.table({"value": column}), "t")
    with pytest.raises(ValueError, match="key at index 3 "):
        producer.produce_many("t", [b"v"] * 5, keys=column)
    assert producer.flush(120) == 0
    assert reader.new() == []


# ---- partitions and timestamps


@pytest.mark.parametrize("wrong", [1.9, 1.0, "1", None, np.float64(1), np.bool_(True), b"1", [1]], ids=repr)
@pytest.mark.parametrize("name", ["partition", "timestamp"])
def test_what_is_no_integer_is_a_type_error(producer: Producer, reader: Reader, name: str, wrong: Any) -> None:
    with pytest.raises(TypeError, match=f"{name}|integer"):
        producer.produce("t", b"v", **{name: wrong})
    assert producer.flush(120) == 0
    assert reader.new() == []


@pytest.mark.parametrize("number", [True, np.int64(1), np.uint8(1), 1], ids=repr)
def test_what_is_an_integer_for_python_is_one_here(producer: Producer, reader: Reader, number: Any) -> None:
    producer.produce("t", b"v", partition=number, timestamp=number)
    assert producer.flush(120) == 0
    assert [(r.partition(), r.timestamp()[1]) for r in reader.new()] == [(1, 1)]


@pytest.mark.parametrize(("name", "number"), [("partition", 2**31), ("partition", -(2**40)), ("timestamp", 2**63)])
def test_integers_that_are_too_large_are_an_overflow(
    producer: Producer, reader: Reader, name: str, number: int
) -> None:
    with pytest.raises(OverflowError, match=f"{name} .*{number}"):
        producer.produce("t", b"v", **{name: number})
    assert reader.new() == []


def integers(name: str, source: Any, count: int) -> list[int]:
    """What a bulk call makes of partitions or timestamps."""
    partitions, timestamps = (source, None) if name == "partitions" else (None, source)
    place = 2 if name == "partitions" else 4
    return [row[place] for row in rows(_bulk.blocks_of_columns([b"v"] * count, None, partitions, None, timestamps))]


@pytest.mark.parametrize(("name", "absent"), [("partitions", -1), ("timestamps", 0)])
def test_masked_and_null_integers_are_left_to_the_producer(name: str, absent: int) -> None:
    plain = np.array([7, 2**62, 9])
    for source in (
        np.ma.masked_array(plain, [False, True, False]),
        np.ma.masked_array(plain.astype(np.uint64), [False, True, False]),
        np.array([7, None, 9], dtype=object),
        np.ma.masked_array(np.array([7, "x", 9], dtype=object), [False, True, False]),
        [7, None, 9],
        (7, None, 9),
        pa.array([7, None, 9], pa.uint16()),
        pa.chunked_array([[7], [None, 9]]),
        pa.array([7, None, 9]).dictionary_encode(),
    ):
        assert integers(name, source, 3) == [7, absent, 9]
    assert integers(name, pa.nulls(3), 3) == [absent] * 3
    assert integers(name, np.ma.masked_all(2, int), 2) == [absent] * 2
    assert integers(name, np.ma.masked_array([7, 8]), 2) == [7, 8]


def test_masked_partitions_and_timestamps_arrive_so(producer: Producer, reader: Reader) -> None:
    key = b"some key"
    chosen = (murmur2(key) & 0x7FFFFFFF) % PARTITIONS
    other = (chosen + 1) % PARTITIONS
    receipt = producer.produce_many(
        "t",
        [b"a", b"b"],
        keys=[key, key],
        partitions=np.ma.masked_array([other, other], [True, False]),
        timestamps=np.ma.masked_array([5, 5], [False, True]),
    )
    assert receipt.wait(120)
    found = {r.value(): (r.partition(), r.timestamp()[1]) for r in reader.new()}
    assert found[b"a"] == (chosen, 5)
    assert found[b"b"][0] == other
    assert found[b"b"][1] > MOMENT


@pytest.mark.parametrize(
    "source",
    [
        pa.array([MOMENT // 1000, 2**61, 5], pa.timestamp("s")),
        pa.array([MOMENT // 1000, -(2**61), 5], pa.timestamp("s", "UTC")),
        chunked([MOMENT // 1000, 2**61], pa.timestamp("s"), 1),
        np.array([MOMENT // 1000, 2**61], "datetime64[s]"),
        np.array([5, 2**50], "datetime64[h]"),
        np.array([5, -(2**62)], "datetime64[Y]"),
        np.array([5, 2**62], "datetime64[M]"),
        np.array([5, 2**62], "datetime64[25s]"),
    ],
    ids=lambda source: str(source.type if isinstance(source, (pa.Array, pa.ChunkedArray)) else source.dtype),
)
def test_times_beyond_64_bits_of_milliseconds_are_refused(producer: Producer, reader: Reader, source: Any) -> None:
    with pytest.raises(ValueError, match="timestamps at index 1 "):
        producer.produce_many("t", [b"v"] * len(source), timestamps=source)
    if isinstance(source, pa.Array):
        table = pa.table({"value": [b"v"] * len(source), "timestamp": source})
        with pytest.raises(ValueError, match="timestamps at index 1 "):
            producer.produce_arrow(table, "t")
        masked = pa.compute.if_else(pa.array([True, False, True]), source, None)
        assert integers("timestamps", masked, 3)[1] == 0
    assert reader.new() == []


def test_times_are_rounded_down_to_milliseconds() -> None:
    for unit, factor in (("s", 1000), ("ms", 1), ("us", 1 / 1000), ("ns", 1 / 1000**2)):
        numbers = [0, 1, 999, 1000, 1_500_000, -1, -1000, -1001]
        expected = [int(n * factor // 1) for n in numbers]
        assert integers("timestamps", np.array(numbers, f"datetime64[{unit}]"), 8) == expected
        assert integers("timestamps", pa.array(numbers, pa.timestamp(unit)), 8) == expected
    assert integers("timestamps", np.array(["2024-02", "NaT"], "datetime64[M]"), 2) == [1_706_745_600_000, 0]
    assert integers("timestamps", np.datetime64("1970-01-02"), 2) == [86_400_000] * 2


@pytest.mark.parametrize(
    ("source", "error", "told"),
    [
        ([0, 2**31], ValueError, "partitions at index 1 is 2147483648"),
        ([0, 2**70], ValueError, "partitions at index 1 is 1180591620717411303424"),
        ([0, 2**63, -1], ValueError, "partitions at index 1 is 9223372036854775808"),
        (np.array([0, 1, -(2**31) - 1]), ValueError, "partitions at index 2 is -2147483649"),
        (pa.array([0, 2**40]), ValueError, "partitions at index 1 is 1099511627776"),
        (2**31, ValueError, "partitions at index 0 is 2147483648"),
        ([0, 1.5], TypeError, "partitions at index 1 must be an integer, not float"),
        ([0, "1"], TypeError, "partitions at index 1 must be an integer, not str"),
        ([True, False], TypeError, "partitions at index 0 must be an integer, not bool"),
        (True, TypeError, "partitions must be integers, not bool"),
        (1.0, TypeError, "partitions must be integers, not float"),
        ("12", TypeError, "partitions must be integers, not str"),
        (b"12", TypeError, "partitions must be integers, not bytes"),
        ({1: 2}, TypeError, "partitions must be integers, not dict"),
        (iter([1, 2]), TypeError, "partitions must be integers, not list_iterator"),
        (np.array([True, False]), TypeError, "partitions must be integers, not bool"),
        (np.array([0.0, 1.0]), TypeError, "partitions must be integers, not float64"),
        (pa.array([0.0, 1.0]), TypeError, "partitions must be integers, not double"),
        (pa.array([True, False]), TypeError, "partitions must be integers, not bool"),
        (pa.array([1, 2], pa.timestamp("ms")), TypeError, r"partitions must be integers, not timestamp\[ms\]"),
        (np.array([1, 2], "datetime64[ms]"), TypeError, r"partitions must be integers, not datetime64\[ms\]"),
        ([1, [2, 3]], TypeError, "partitions at index 1 must be an integer, not list"),
        ([[1], [2, 3]], TypeError, "partitions at index 0 must be an integer, not list"),
        (np.array(None), ValueError, r"partitions has shape \(\), but there are"),
        (np.array([[1], [2]]), ValueError, r"partitions has shape \(2, 1\), but there are 2 values"),
        (np.array(1), ValueError, r"partitions has shape \(\), but there are"),
    ],
    ids=told,
)
def test_wrong_integers_are_told_by_row(
    producer: Producer, reader: Reader, source: Any, error: type[Exception], told: str
) -> None:
    count = len(source) if isinstance(source, (list, np.ndarray, pa.Array)) and getattr(source, "ndim", 1) else 2
    with pytest.raises(error, match=f"^{told}"):
        producer.produce_many("t", [b"v"] * count, partitions=source)
    assert reader.new() == []


def test_an_integer_array_over_too_little_memory_is_refused() -> None:
    for kind in (pa.int32(), pa.timestamp("us")):
        short = unchecked(kind, 100, [None, pa.py_buffer(bytes(8))])
        for given in (short, pa.chunked_array([short]), pa.chunked_array([pa.array([1], kind), short])):
            with pytest.raises(ValueError, match="timestamps are an invalid Arrow array"):
                integers("timestamps", given, len(given))
    wild = pa.DictionaryArray.from_arrays(pa.array([0, 10**9]), pa.array([1]), safe=False)
    with pytest.raises(ValueError, match="timestamps are an invalid Arrow array"):
        integers("timestamps", wild, 2)


@pytest.mark.parametrize("name", ["value", "key", "topic", "partition", "timestamp", "headers"])
def test_a_column_that_is_there_twice_is_named(producer: Producer, reader: Reader, name: str) -> None:
    table = pa.table({"value": ["v"], "topic": ["t"]})
    column = table[name] if name in table.column_names else pa.nulls(1)
    again = table if name in table.column_names else table.append_column(name, column)
    again = again.append_column(name, column)
    for given in (again, again.to_batches()[0]):
        with pytest.raises(ValueError, match=f"2 columns {name!r}"):
            producer.produce_arrow(given)
    assert reader.new() == []


def test_other_columns_may_be_there_twice(producer: Producer, reader: Reader) -> None:
    table = pa.table([["v"], [1], [2]], ["value", "other", "other"])
    assert producer.produce_arrow(table, "t").wait(120)
    assert reader.values() == [b"v"]


# ---- Arrow arrays that are not what they seem

DATA = pa.py_buffer(b"aabbcc")


def unchecked(kind: Any, count: int, buffers: list[Any], start: int = 0, children: Any = (), of: Any = None) -> Any:
    """An array as it comes out of a pickle or a stream, where nobody looks at it: from_buffers() would."""
    nulls = 0 if buffers[0] is None else -1
    parts = [child.__reduce__()[1][0] for child in children]
    dictionary = None if of is None else of.__reduce__()[1][0]
    return pa.lib._restore_array((kind, count, nulls, start, buffers, parts, dictionary))


def binary(*numbers: int, count: int | None = None, start: int = 0, data: Any = DATA, validity: Any = None) -> pa.Array:
    memory = pa.py_buffer(np.array(numbers, np.int32))
    count = len(numbers) - 1 - start if count is None else count
    return unchecked(pa.binary(), count, [validity, memory, data], start)


def large(*numbers: int) -> pa.Array:
    memory = pa.py_buffer(np.array(numbers, np.int64))
    return unchecked(pa.large_string(), len(numbers) - 1, [None, memory, DATA])


def view(*numbers: int, count: int = 1, validity: Any = None, start: int = 0) -> pa.Array:
    memory = pa.py_buffer(np.array(numbers, np.int32))
    return unchecked(pa.binary_view(), count, [validity, memory, pa.py_buffer(b"x" * 40)], start)


INLINE = (3, 0x636261, 0, 0)  # b"abc"
INVALID: dict[
    str, tuple[Callable[[], Any], int | None]
] = {  # with the row that is wrong, None for the array as a whole
    "far beyond, in between": (lambda: binary(0, 10**8, 4, 6), 0),
    "decreasing": (lambda: binary(0, 4, 2, 6), 1),
    "beyond at the end": (lambda: binary(0, 2, 4, 7), 2),
    "negative at the start": (lambda: binary(-2, 2, 4, 6), 0),
    "negative in between": (lambda: binary(0, 2, -4, 6), 1),
    "wrapping around": (lambda: binary(0, 2**31 - 1, -(2**31), 6), 0),
    "wrong in a slice": (lambda: binary(0, 2, 1, 6)[1:], 0),
    "wrong at an offset": (lambda: binary(0, 2, 1, 6, start=1), 0),
    "wrong without data": (lambda: binary(0, 1, data=None), 0),
    "large beyond": (lambda: large(0, 2**40, 6), 0),
    "large decreasing": (lambda: large(0, 3, 2), 1),
    "large negative": (lambda: large(-(2**62), 2**62), 0),
    "pair beyond": (lambda: (np.array([0, 2, 9]), b"abc"), 1),
    "pair decreasing": (lambda: (np.array([0, 2, 1]), b"abc"), 1),
    "pair negative": (lambda: (np.array([-1, 2]), b"abc"), 0),
    "view beyond": (lambda: view(*INLINE, 20, 0, 0, 21, count=2), 1),
    "view before": (lambda: view(20, 0, 0, -1), 0),
    "view of no buffer": (lambda: view(20, 0, 1, 0), 0),
    "view of a buffer before": (lambda: view(20, 0, -1, 0), 0),
    "view of negative size": (lambda: view(-1, 0, 0, 0), 0),
    "view too long": (lambda: view(2**31 - 1, 0, 0, 2**31 - 1), 0),
    "sliced view": (lambda: view(*INLINE, 20, 0, 0, 30, count=2)[1:], 0),
    "in a dictionary": (lambda: pa.DictionaryArray.from_arrays(pa.array([0]), binary(0, 4, 2, 6)), 1),
    "not in the dictionary": (
        lambda: pa.DictionaryArray.from_arrays(pa.array([0, 5]), pa.array([b"a"]), safe=False),
        1,
    ),
    "before the dictionary": (
        lambda: pa.DictionaryArray.from_arrays(pa.array([0, -1]), pa.array([b"a"]), safe=False),
        1,
    ),
    "too few offsets": (lambda: binary(0, 2, 4, count=3), None),
    "too few offsets at an offset": (lambda: binary(0, 2, 4, count=2, start=1), None),
    "no offsets": (lambda: unchecked(pa.binary(), 3, [None, None, DATA]), None),
    "too few views": (lambda: view(*INLINE, count=2), None),
    "no views": (lambda: unchecked(pa.string_view(), 2, [None, None]), None),
    "short fixed": (lambda: unchecked(pa.binary(4), 3, [None, pa.py_buffer(bytes(11))]), None),
    "short fixed at an offset": (
        lambda: unchecked(pa.binary(4), 2, [None, pa.py_buffer(bytes(8))], 1),
        None,
    ),
    "no fixed": (lambda: unchecked(pa.binary(4), 3, [None, None]), None),
    "short validity": (lambda: binary(*[0] * 13, validity=pa.py_buffer(b"\x00")), None),
    "short validity of views": (lambda: view(*INLINE * 9, count=9, validity=pa.py_buffer(b"\x00")), None),
    "short indices": (
        lambda: unchecked(
            pa.dictionary(pa.int32(), pa.binary()), 100, [None, pa.py_buffer(bytes(4))], of=pa.array([b"a"])
        ),
        None,
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_array_is_refused_as_a_whole(producer: Producer, reader: Reader, case: str) -> None:
    make, row = INVALID[case]
    where = "" if row is None else f"at index {row} "
    count = len(make()[0]) - 1 if isinstance(make(), tuple) else len(make())
    with pytest.raises(ValueError, match=f"value .*{where}"):
        producer.produce_many("t", make())
    with pytest.raises(ValueError, match=f"key .*{where}"):
        producer.produce_many("t", [b"v"] * count, keys=make())
    assert producer.flush(120) == 0
    assert reader.new() == []


@pytest.mark.parametrize("name", ["value", "key", "topic"])
def test_an_invalid_column_of_a_table_is_refused_as_a_whole(producer: Producer, reader: Reader, name: str) -> None:
    for case in ("far beyond, in between", "decreasing", "wrong in a slice", "large beyond", "view beyond"):
        make, row = INVALID[case]
        column = make()
        table = pa.table({"value": [b"v"] * len(column), "topic": ["t"] * len(column), "key": [b"k"] * len(column)})
        table = table.set_column(table.column_names.index(name), name, column)
        for given in (table, table.to_batches()[0], pa.concat_tables([table.slice(0, 0), table])):
            with pytest.raises(ValueError, match=f"{name} at index {row} "):
                producer.produce_arrow(given)
    assert producer.flush(120) == 0
    assert reader.new() == []


def test_what_lies_outside_of_a_slice_does_not_matter() -> None:
    assert list(Column(binary(0, 10**8, 0, 2, 4, -5)[2:4])) == [b"aa", b"bb"]
    assert list(Column(view(*INLINE, 99, 0, 99, 99, count=2)[:1])) == [b"abc"]
    assert list(Column(unchecked(pa.binary(), 0, [None, None, None]))) == []


def test_what_lies_below_a_null_does_not_matter() -> None:
    assert list(Column(view(*INLINE, 99, 0, 99, 99, count=2, validity=pa.py_buffer(b"\x01")))) == [b"abc", None]


STRUCT = pa.struct([("key", pa.string()), ("value", pa.binary())])
ENTRIES = pa.array([{"key": "a", "value": b"1"}] * 3, STRUCT)


def lists(kind: Any, *buffers: Any, count: int = 2) -> Any:
    made = [None if numbers is None else pa.py_buffer(np.array(numbers)) for numbers in buffers]
    children = [pa.array([[("a", b"1")] * 3], kind).values if pa.types.is_map(kind) else ENTRIES]
    return unchecked(kind, count, [None, *made], children=tuple(children))


def i4(*numbers: int) -> Any:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize(
    ("headers", "row"),
    [
        (lists(pa.list_(STRUCT), i4(0, 10**6, 3)), 0),
        (lists(pa.list_(STRUCT), i4(0, 2, 1)), 1),
        (lists(pa.list_(STRUCT), i4(-1, 2, 3)), 0),
        (lists(pa.list_(STRUCT), i4(0, 3, 4)), 1),
        (lists(pa.list_(STRUCT), i4(0, 3)), None),
        (lists(pa.list_(STRUCT), None), None),
        (lists(pa.large_list(STRUCT), np.array([0, 2**40, 3])), 0),
        (lists(pa.list_view(STRUCT), i4(0, 2), i4(3, 2)), 1),
        (lists(pa.list_view(STRUCT), i4(0, -1), i4(3, 2)), 1),
        (lists(pa.list_view(STRUCT), i4(0, 1), i4(3, -1)), 1),
        (lists(pa.large_list_view(STRUCT), np.array([0, 2**62]), np.array([3, 2**62])), 1),
        (lists(pa.list_view(STRUCT), i4(0), i4(3)), None),
        (pa.DictionaryArray.from_arrays(pa.array([0, 10**9]), pa.array([[]], pa.list_(STRUCT)), safe=False), None),
        (lists(pa.map_(pa.string(), pa.binary()), i4(0, 10**6, 3)), 0),
    ],
    ids=lambda part: str(part.type) if isinstance(part, pa.Array) else str(part),
)
def test_invalid_lists_of_headers_are_refused(producer: Producer, reader: Reader, headers: Any, row: Any) -> None:
    where = "" if row is None else f"at index {row} "
    with pytest.raises(ValueError, match=f"headers .*{where}"):
        producer.produce_many("t", [b"v"] * 2, headers=headers)
    assert reader.new() == []


def test_a_null_list_of_headers_may_be_anywhere() -> None:
    made = [pa.py_buffer(b"\x01"), pa.py_buffer(i4(0, 99)), pa.py_buffer(i4(1, 99))]
    headers = unchecked(pa.list_view(STRUCT), 2, made, children=[ENTRIES])
    assert [row[3] for row in rows(_bulk.blocks_of_columns([b"v"] * 2, None, None, headers, None))] == [
        [("a", b"1")],
        None,
    ]


# ---- produce_batch

WRONG: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"partition": 2**40}, ValueError),
    ({"partition": -(2**31) - 1}, ValueError),
    ({"partition": 1.9}, TypeError),
    ({"partition": 0.0}, TypeError),
    ({"partition": ""}, TypeError),
    ({"timestamp": 2**70}, ValueError),
    ({"timestamp": -1}, ValueError),
    ({"timestamp": 1.5}, TypeError),
    ({"timestamp": 0.0}, TypeError),
    ({"timestamp": []}, TypeError),
    ({"value": memoryview(b"abcd")[::2]}, TypeError),
    ({"key": memoryview(b"abcd")[::2]}, TypeError),
    ({"value": "\ud800"}, ValueError),
    ({"key": "\ud800"}, ValueError),
    ({"value": 5}, TypeError),
    ({"key": 0}, TypeError),
    ({"value": False}, TypeError),
    ({"headers": {"\ud800": b"x"}}, ValueError),
    ({"headers": [("a", "\ud800")]}, ValueError),
    ({"headers": [("a", 1)]}, TypeError),
    ({"headers": 0}, TypeError),
    ({"headers": "text"}, TypeError),
    ({"headers": {5: b"x"}}, TypeError),
    ({"callback": 0}, TypeError),
    ({"callback": "text"}, TypeError),
]


@pytest.mark.parametrize(("wrong", "error"), WRONG, ids=told)
def test_a_wrong_message_stops_the_whole_batch(
    producer: Producer, reader: Reader, wrong: dict[str, Any], error: type[Exception]
) -> None:
    messages: list[dict[str, Any]] = [{"value": b"1"}, {"value": b"2", **wrong}, {"value": b"3"}]
    with pytest.raises(error, match=f"{next(iter(wrong))} at index 1"):
        producer.produce_batch("t", messages)
    assert producer.flush(120) == 0
    assert reader.new() == []
    assert not any("_error" in message for message in messages)


def test_a_released_memoryview_stops_the_whole_batch(producer: Producer, reader: Reader) -> None:
    gone = memoryview(b"abc")
    gone.release()
    with pytest.raises(TypeError, match="value at index 1"):
        producer.produce_batch("t", [{"value": b"1"}, {"value": gone}])
    assert reader.new() == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"partition": 2**40}, ValueError),
        ({"partition": 1.0}, TypeError),
        ({"partition": None}, TypeError),
        ({"on_delivery": 5}, TypeError),
        ({"topic": 5}, TypeError),
        ({"topic": "\ud800"}, ValueError),
    ],
    ids=repr,
)
def test_wrong_arguments_of_produce_batch_are_named(
    producer: Producer, reader: Reader, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        producer.produce_batch(**({"topic": "t", "messages": [{"value": b"1"}]} | arguments))
    assert producer.flush(120) == 0
    assert reader.new() == []


def test_what_only_acceptance_can_tell_is_noted_and_the_others_go(producer: Producer, reader: Reader) -> None:
    messages: list[dict[str, Any]] = [
        {"value": b"%d" % n, "partition": p} for n, p in enumerate([0, 99, -2, 2**31 - 1])
    ]
    messages += [{"value": b"x" * 2_000_000}, {"value": b"5", "_error": "of an earlier attempt"}]
    assert producer.produce_batch("t", messages) == 2
    assert producer.flush(120) == 0
    assert [message["_error"].code() if "_error" in message else None for message in messages] == [
        None,
        *[KafkaError._UNKNOWN_PARTITION] * 3,
        KafkaError.MSG_SIZE_TOO_LARGE,
        None,
    ]
    assert reader.values() == [b"0", b"5"]


def test_everything_that_produce_takes_goes_in_a_batch_too(producer: Producer, reader: Reader) -> None:
    messages: list[dict[str, Any]] = [
        {"value": bytearray(b"a"), "key": memoryview(b"k")},
        {"value": memoryview(b"xbx")[1:2], "partition": True, "timestamp": True},
        {"value": "\u00e9", "partition": None, "timestamp": None, "headers": None, "callback": None, "key": None},
        {"value": memoryview(np.array([1, 2], np.int16)), "headers": {}},
    ]
    assert producer.produce_batch("t", messages, partition=2) == 4
    assert producer.flush(120) == 0
    found = {r.value(): (r.key(), r.partition(), r.timestamp()[1]) for r in reader.new()}
    assert found[b"a"][:2] == (b"k", 2)
    assert found[b"b"] == (None, 1, 1)
    assert found["\u00e9".encode()][:2] == (None, 2)
    assert found[b"\1\0\2\0"][1] == 2


# ---- any arguments, against a plain model

Plain = list[Any]


class Calls:
    """Random arguments, each with the plain list that it stands for."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def texts(self, count: int, nulls: bool = True) -> Plain:
        pick = self.random
        sizes = [0, 1, 11, 12, 13, 40, 511, 512, 700]
        made = [bytes(pick.choices(range(33, 127), k=pick.choice(sizes))) for _ in range(count)]
        return [None if nulls and pick.random() < 0.2 else item for item in made]

    def cut(self, array: pa.Array) -> Any:
        """Chunks, some of them empty and none where the others have theirs."""
        cuts = sorted(self.random.randint(0, len(array)) for _ in range(self.random.randint(0, 4)))
        return pa.chunked_array([array[a:b] for a, b in zip([0, *cuts], [*cuts, len(array)], strict=True)], array.type)

    def arrow(self, plain: Plain, kind: Any) -> Any:
        pick = self.random
        before, after = pick.randint(0, 9), pick.randint(0, 3)
        other = [plain[0]] if plain else [None]
        array = pa.array(other * before + plain + other * after, kind)[before : before + len(plain)]
        if pick.random() < 0.3:
            array = self.elsewhere(array)
        if pick.random() < 0.2 and not pa.types.is_nested(array.type):
            array = array.dictionary_encode()
        return self.cut(array) if pick.random() < 0.5 else array

    def elsewhere(self, array: pa.Array) -> pa.Array:
        """The same array over memory of numpy's."""
        if pa.types.is_nested(array.type):
            return array
        buffers = [part and pa.py_buffer(np.frombuffer(part, np.uint8).copy()) for part in array.buffers()]
        return pa.Array.from_buffers(array.type, len(array), buffers, offset=array.offset)

    def column(self, count: int) -> tuple[Any, Plain]:
        pick = self.random
        form = pick.choice(["list", "tuple", "objects", "S", "masked", "pair", "fixed", "arrow", "arrow", "arrow"])
        if form in ("S", "masked"):
            plain = self.texts(count, nulls=False)
            array = np.array(plain, dtype="S") if plain else np.array([], "S1")
            if form == "S":
                return array, plain
            mask = [pick.random() < 0.3 for _ in plain]
            return np.ma.masked_array(array, mask), [None if m else p for m, p in zip(mask, plain, strict=True)]
        if form == "pair":
            plain = self.texts(count, nulls=False)
            before = b"#" * pick.randint(0, 5)
            numbers = len(before) + np.cumsum([0, *map(len, plain)])
            data = before + b"".join(plain) + b"###"
            return (numbers.astype(pick.choice(["i4", "i8", "u4"])), pick.choice([bytes, bytearray])(data)), plain
        if form == "fixed":
            plain = [None if pick.random() < 0.2 else pick.randbytes(7) for _ in range(count)]
            return self.arrow(plain, pa.binary(7)), plain
        plain = self.texts(count)
        if form == "arrow":
            kinds = ["binary", "string", "large_binary", "large_string", "binary_view", "string_view"]
            return self.arrow(plain, getattr(pa, pick.choice(kinds))()), plain
        wrap: list[Callable[[bytes], Any]] = [bytes, bytearray, memoryview, bytes.decode]
        items = [None if item is None else pick.choice(wrap)(item) for item in plain]
        if form == "objects":
            array = np.empty(count, dtype=object)
            array[:] = items
            return array, plain
        if form == "tuple" and count != 2:
            return tuple(items), plain
        return items, plain

    def integers(self, count: int, numbers: list[int]) -> tuple[Any, Plain]:
        pick = self.random
        form = pick.choice(["one", "list", "tuple", "numpy", "masked", "arrow", "none"])
        plain: Plain = [pick.choice(numbers) for _ in range(count)]
        if form == "none":
            return None, [None] * count
        if form == "one":
            return numbers[0], [numbers[0]] * count
        if form == "numpy":
            return np.repeat(np.array(plain, dtype=np.int64), 2)[::2], plain
        holes = [None if pick.random() < 0.3 else number for number in plain]
        if form == "masked":
            return np.ma.masked_array(np.array(plain, np.int64), [number is None for number in holes]), holes
        if form == "arrow":
            return self.arrow(holes, pa.int64()), holes
        return (tuple if form == "tuple" else list)(holes), holes

    def headers(self, count: int) -> tuple[Any, Plain]:
        pick = self.random
        form = pick.choice(["none", "one", "list", "arrow", "map"])
        if form == "none":
            return None, [None] * count
        if form == "one":
            one = pick.choice([{"a": b"1"}, [("a", b"1"), ("a", None)]])
            return one, [list(one.items()) if isinstance(one, dict) else one] * count
        plain: Plain = [
            pick.choice(
                [None, [("n", b"%d" % n)], [("x", None), ("y", b"")], [(f"h{k}", b"v") for k in range(n % 4)] or None]
            )
            for n in range(count)
        ]
        if form == "map":
            return self.arrow(plain, pa.map_(pa.string(), pa.binary())), plain
        if form == "arrow":
            rows = [None if row is None else [{"key": k, "value": v} for k, v in row] for row in plain]
            kind = pick.choice([pa.list_, pa.large_list, pa.list_view])(STRUCT)
            return self.arrow(rows, kind), plain
        return [
            dict(row) if row and pick.random() < 0.3 and len(dict(row)) == len(row) else row for row in plain
        ], plain

    def call(self) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
        """Arguments of produce_many, and (key, value, partition, headers, timestamp) of each record."""
        count = self.random.choice([0, 1, 2, 3, 8, 9, 30])
        values, plain_values = self.column(count)
        keys, plain_keys = self.column(count) if self.random.random() < 0.7 else (None, [None] * count)
        partitions, plain_partitions = self.integers(count, [3, 0, 1, 2])
        timestamps, plain_timestamps = self.integers(count, [MOMENT, 1, 2**40])
        headers, plain_headers = self.headers(count)
        given = {"values": values, "keys": keys, "partitions": partitions, "headers": headers, "timestamps": timestamps}
        columns = (plain_keys, plain_values, plain_partitions, plain_headers, plain_timestamps)
        return given, list(zip(*columns, strict=True))


@pytest.mark.parametrize("seed", range(50))
def test_any_arguments_make_the_records_of_a_plain_model(producer: Producer, reader: Reader, seed: int) -> None:
    for number in range(3):
        given, model = Calls(1000 * seed + number).call()
        receipt = producer.produce_many("t", **given)
        assert receipt.wait(120)
        assert (receipt.total, receipt.acknowledged, receipt.errors) == (len(model), len(model), [])
        expected: Counter[tuple[Any, ...]] = Counter()
        for key, value, partition, headers, timestamp in model:
            if partition is None and key is not None:
                partition = (murmur2(key) & 0x7FFFFFFF) % PARTITIONS
            expected[key, value, partition, tuple(headers or ()), timestamp] += 1
        for record in reader.new():
            moment = record.timestamp()[1]
            found = (record.key(), record.value(), record.partition(), tuple(record.headers() or ()), moment)
            # Where the model leaves something open, what has been chosen counts as that.
            choices = [(*found[:2], p, found[3], t) for p in (found[2], None) for t in (moment, None)]
            match = next((choice for choice in choices if expected[choice]), None)
            assert match is not None, found
            if match[4] is None:
                assert moment > MOMENT
            expected[match] -= 1
        assert not +expected


@pytest.mark.parametrize("seed", range(40))
def test_arguments_with_one_flaw_are_refused_as_a_whole(producer: Producer, reader: Reader, seed: int) -> None:
    calls = Calls(seed)
    pick = calls.random
    given, model = calls.call()
    while not model:
        given, model = calls.call()
    count = len(model)
    long = pa.array([b"x" * 20] * count)
    broken = np.frombuffer(long.buffers()[1], np.int32)[: count + 1].copy()
    broken[pick.randint(0, count)] += pick.choice([-(10**6), 10**6])
    flaws: list[tuple[str, Any]] = [
        ("keys", [b"k"] * (count + 1)),
        ("partitions", [0] * (count + 1)),
        ("partitions", [0] * (count - 1) + [0.5]),
        ("partitions", [0] * (count - 1) + [2**31]),
        ("timestamps", np.full(count, 2**61, "datetime64[s]")),
        ("timestamps", pa.array([2**61] * count, pa.timestamp("s"))),
        ("headers", [None] * (count + 1)),
        ("keys", unchecked(pa.binary(), count, [None, pa.py_buffer(broken), long.buffers()[2]])),
        (
            "values",
            calls.cut(unchecked(pa.binary(), count, [None, pa.py_buffer(broken), long.buffers()[2]])),
        ),
        ("keys", (broken.astype(np.int64), b"x" * 20 * count)),
    ]
    name, flaw = pick.choice(flaws)
    with pytest.raises((TypeError, ValueError), match=name.removesuffix("s")):
        producer.produce_many("t", **given | {name: flaw})
    assert producer.flush(120) == 0
    assert reader.new() == []


def test_a_closed_producer_takes_nothing(cluster: MockCluster) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    producer.close()
    with pytest.raises(RuntimeError):
        producer.produce_batch("t", [{"value": b"x"}])
    with pytest.raises((RuntimeError, KafkaException)):
        producer.produce_many("t", [b"x"])


class _Lying(bytes):
    def __len__(self) -> int:
        return 100


class _LyingText(str):
    __slots__ = ()

    def encode(self, *args: object) -> bytes:  # type: ignore[override]
        return _Lying(b"x")


def test_headers_are_as_long_as_they_are_not_as_they_say(mock_cluster: MockCluster) -> None:
    with Producer({"bootstrap.servers": mock_cluster.bootstrap_servers, "log_level": 0}) as producer:
        producer.produce("t", b"v", headers=[("a", _Lying(b"abc")), (_LyingText("name"), _LyingText("text"))])
        producer.produce_many("t", [b"v"], headers=[[("a", _Lying(b"abc")), (_LyingText("name"), _LyingText("text"))]])
    found = [record.headers() for record in mock_cluster.records("t")]
    assert found == [[("a", b"abc"), ("name", b"text")]] * 2
