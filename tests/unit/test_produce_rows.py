"""produce_arrow(value=..., key=...): rows are encoded on the way, and read back from mock brokers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from fastprod import Producer, Receipt
from fastprod._core._columns import Column
from fastprod.cli._orders import orders
from fastprod.encoding import Avro, Json, _roles
from fastprod.priority import PriorityProducer
from fastprod.testing import MockCluster

MOMENT = 1_700_000_000_000
LEVELS = 2


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    with MockCluster(1, topics={"t": 3, "u": 1, "p-0": 1, "p-1": 1}) as running:
        yield running


@pytest.fixture
def make(cluster: MockCluster) -> Iterator[Callable[..., Any]]:
    made: list[Producer] = []

    def build(cls: type[Producer] = Producer, **options: Any) -> Any:
        made.append(cls({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0}, **options))
        return made[-1]

    yield build
    for one in made:
        one.close(10)


@pytest.fixture
def producer(make: Callable[..., Any]) -> Any:
    return make()


def done(receipt: Receipt, count: int) -> Receipt:
    assert receipt.wait(120)
    assert (receipt.total, receipt.acknowledged, receipt.failed) == (count, count, 0)
    return receipt


def values(cluster: MockCluster, topic: str = "t") -> list[Any]:
    return sorted(json.loads(record.value())["n"] for record in cluster.records(topic))


def test_values_and_keys_arrive_as_the_encoder_writes_them(cluster, producer):
    batch = orders(3000)
    done(producer.produce_arrow(batch, "t", value=Json(), key=Json(columns=["customer_id"])), 3000)
    wanted = Json().encode(batch).to_pylist()
    keys = Json(columns=["customer_id"]).encode(batch).to_pylist()
    found = [(record.key(), record.value()) for record in cluster.records("t")]
    assert sorted(found) == sorted(zip(keys, wanted, strict=True))


@pytest.mark.parametrize("size", [100, 600, 5000])
def test_values_of_any_size_arrive_whole(cluster, producer, size):
    """From 512 bytes on they are sent from the encoder's own memory."""
    table = pa.table({"n": range(600), "text": [chr(97 + n % 26) * size for n in range(600)]})
    done(producer.produce_arrow(table, "t", value=Json()), 600)
    found = sorted(json.loads(record.value())["n"] for record in cluster.records("t"))
    assert found == list(range(600))
    assert all(
        set(json.loads(r.value())["text"]) == {chr(97 + json.loads(r.value())["n"] % 26)} for r in cluster.records("t")
    )


@pytest.mark.parametrize("rows", [1, 7, 16_384])
def test_every_row_is_sent_once_whatever_the_slices(cluster, producer, monkeypatch, rows):
    monkeypatch.setattr(_roles, "SLICE_ROWS", rows)
    table = pa.concat_tables([pa.table({"n": range(start, start + 40)}) for start in range(0, 200, 40)])
    done(producer.produce_arrow(table.slice(3, 150), "t", value=Json(), key="n"), 150)
    assert values(cluster) == list(range(3, 153))
    assert {(int(r.key()), json.loads(r.value())["n"]) for r in cluster.records("t")} == {(n, n) for n in range(3, 153)}


def test_readers_and_other_sources_are_taken(cluster, producer):
    table = pa.table({"n": range(30)})
    reader = pa.RecordBatchReader.from_batches(table.schema, iter(table.to_batches(max_chunksize=7)))
    receipt = producer.produce_arrow(reader, "t", value=Json())

    class Stream:
        def __arrow_c_stream__(self, requested_schema: object = None) -> object:
            return pa.table({"n": range(30, 40)}).__arrow_c_stream__(requested_schema)

    assert producer.produce_arrow(Stream(), "t", value=Json(), receipt=receipt) is receipt
    done(receipt, 40)
    assert values(cluster) == list(range(40))


KEYS = {
    "text": (pa.array(["a", None, ""]), [b"a", None, b""]),
    "bytes": (pa.array([b"a", None, b"\xff"]), [b"a", None, b"\xff"]),
    "integers": (pa.array([1, None, -7]), [b"1", None, b"-7"]),
    "unsigned integers": (pa.array([2**64 - 1, None, 0], pa.uint64()), [b"18446744073709551615", None, b"0"]),
    "booleans": (pa.array([True, None, False]), [b"true", None, b"false"]),
    "a dictionary of text": (pa.array(["a", None, "b"]).dictionary_encode(), [b"a", None, b"b"]),
    "a dictionary of integers": (pa.array([5, None, 6]).dictionary_encode(), [b"5", None, b"6"]),
    "nulls only": (pa.nulls(3), [None] * 3),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_column_of_keys(cluster, producer, kind):
    column, keys = KEYS[kind]
    done(producer.produce_arrow(pa.table({"n": range(3), "k": column}), "t", value=Json(["n"]), key="k"), 3)
    found = {json.loads(record.value())["n"]: record.key() for record in cluster.records("t")}
    assert [found[n] for n in range(3)] == keys


def test_a_key_without_text_is_refused_with_what_to_do(cluster, producer):
    table = pa.table({"n": [1], "k": [1.5]})
    with pytest.raises(TypeError, match=r"column 'k' for key is double: give key=Json\(columns=\['k'\]\), or cast"):
        producer.produce_arrow(table, "t", value=Json(), key="k")
    done(producer.produce_arrow(table, "t", value=Json(), key=Json(["k"])), 1)
    assert cluster.records("t")[0].key() == b'{"k":1.5}'


def test_headers_timestamps_and_partitions_come_from_named_columns(cluster, producer):
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    table = pa.table(
        {
            "n": [0, 1],
            "about": pa.array([[{"key": "h", "value": b"x"}], None], kind),
            "at": pa.array([MOMENT, MOMENT + 1], pa.timestamp("ms")),
            "place": [2, 1],
            "value": ["not", "this"],
            "partition": [0, 0],
        }
    )
    receipt = producer.produce_arrow(table, "t", value=Json(["n"]), headers="about", timestamp="at", partition="place")
    done(receipt, 2)
    found = {json.loads(r.value())["n"]: (r.headers(), r.timestamp()[1], r.partition()) for r in cluster.records("t")}
    assert found == {0: ([("h", b"x")], MOMENT, 2), 1: (None, MOMENT + 1, 1)}


def test_without_an_encoder_named_columns_stand_for_those_of_the_sink(cluster, producer):
    table = pa.table({"value": ["v"], "key": ["k"], "other": ["o"], "topic": ["u"]})
    done(producer.produce_arrow(table, "t", key="other"), 1)
    done(producer.produce_arrow(table, "t", value="other"), 1)
    assert sorted((r.key() or b"", r.value()) for r in cluster.records("t")) == [(b"", b"o"), (b"o", b"v")]


def test_topics_come_from_the_column_if_no_argument_says_so(cluster, producer):
    table = pa.table({"n": [0, 1, 2], "topic": ["t", "u", "t"]})
    done(producer.produce_arrow(table, value=Json(exclude=["topic"])), 3)
    assert (values(cluster, "t"), values(cluster, "u")) == ([0, 2], [1])
    with pytest.raises(ValueError, match="give a topic, or have a column 'topic'"):
        producer.produce_arrow(table.select(["n"]), value=Json())


@pytest.mark.parametrize("rows", [2, 16_384])
def test_a_row_that_cannot_be_encoded_fails_alone_with_its_index(cluster, producer, monkeypatch, rows):
    monkeypatch.setattr(_roles, "SLICE_ROWS", rows)
    text = pa.array([b"a", b"b", b"\xff", b"d", b"e", b"\xfe"]).view(pa.string())
    table = pa.table({"n": range(6), "text": text})
    receipt = producer.produce_arrow(table, "t", value=Json())
    assert receipt.wait(120)
    assert (receipt.total, receipt.acknowledged, receipt.failed) == (6, 4, 2)
    assert [failure.index for failure in receipt.errors] == [2, 5]
    assert str(receipt.errors[1].error) == "value at index 5 has text that is no UTF-8 in column 'text': b'\\xfe'"
    assert values(cluster) == [0, 1, 3, 4]


def test_what_is_wrong_with_a_table_is_said_before_anything_is_sent(cluster, producer):
    good = pa.table({"n": range(100), "text": ["x"] * 100})
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.array([0, 9, 1], pa.int32()).buffers()[1], pa.py_buffer(b"x")]
    )
    bad = pa.Table.from_batches([*good.to_batches(), pa.record_batch([pa.array([1, 2]), broken], ["n", "text"])])
    with pytest.raises(ValueError, match="column 'text' is an invalid Arrow array"):
        producer.produce_arrow(bad, "t", value=Json())
    with pytest.raises(ValueError, match="there is no column 'z'"):
        producer.produce_arrow(good, "t", value=Json(["z"]))
    with pytest.raises(ValueError, match="there is no column 'z' for key"):
        producer.produce_arrow(good, "t", value=Json(), key="z")
    with pytest.raises(ValueError, match="there are 2 column 'n' for key"):
        producer.produce_arrow(good.append_column("n", good["n"]), "t", value=Json(), key="n")
    with pytest.raises(TypeError, match="column 'timestamp' must be integer or timestamp, not string"):
        producer.produce_arrow(good, "t", value=Json(), timestamp="text")
    with pytest.raises(ValueError, match="partitions at index 1 is 4294967296"):
        producer.produce_arrow(pa.table({"n": [0, 2**32]}), "t", value=Json(), partition="n")
    with pytest.raises(TypeError, match=r"value must be the name of a column or an encoder, such as Json\(\)"):
        producer.produce_arrow(good, "t", value=Json)
    with pytest.raises(TypeError, match="headers must be the name of a column, not"):
        producer.produce_arrow(good, "t", value=Json(), headers=[("a", b"b")])
    producer.flush()
    assert cluster.records("t") == []


def test_levels_of_priority_go_with_encoders(cluster, make):
    producer = make(PriorityProducer, max_priority=LEVELS)
    table = pa.table({"n": range(4), "priority": [0, 1, None, 1]})
    done(producer.produce_arrow(table, "p", value=Json(["n"]), key="n"), 4)
    assert (values(cluster, "p-0"), values(cluster, "p-1")) == ([0, 2], [1, 3])
    done(producer.produce_arrow(table.append_column("topic", pa.array(["p"] * 4)), value=Json(["n"])), 4)
    assert (values(cluster, "p-0"), values(cluster, "p-1")) == ([0, 0, 2, 2], [1, 1, 3, 3])
    with pytest.raises(ValueError, match="priority at index 0 is 5"):
        producer.produce_arrow(pa.table({"n": [1], "priority": [5]}), "p", value=Json())


def test_a_table_without_rows_is_nothing(producer):
    done(producer.produce_arrow(pa.table({"n": pa.array([], pa.int64())}), "t", value=Json(), key="n"), 0)


# ---- what reviewers found


class Short:
    """An encoder that does not do what it should."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def check(self, schema: Any) -> None:
        pass

    def encode_column(self, batch: Any, name: str = "value", base: int = 0) -> Column:
        return Column([b"x"] * self.rows, name, strict=False, base=base)


@pytest.mark.parametrize("rows", [0, 1, 15])
@pytest.mark.parametrize("role", ["value", "key"])
def test_an_encoder_that_makes_too_few_or_too_many_rows_is_refused(producer: Any, role: str, rows: int) -> None:
    batch = pa.record_batch({"a": list(range(10))})
    with pytest.raises(ValueError, match=f"the encoder of {role}s has made {rows} of 10 rows"):
        producer.produce_arrow(batch, "t", **{"value": Json(), role: Short(rows)})
    assert len(producer) == 0


def test_one_huge_row_does_not_make_the_next_batch_ask_for_as_much_for_each() -> None:
    schema = '{"type": "record", "name": "r", "fields": [{"name": "s", "type": "string"}]}'
    encoder = Avro(schema, wire="bare")
    encoder.encode(pa.record_batch({"s": ["x" * (64 << 20)]}))
    small = encoder.encode(pa.record_batch({"s": ["y"] * 16_384}))  # for which a terabyte was set aside
    assert small.to_pylist() == [b"\x02y"] * 16_384


@pytest.mark.parametrize("encoder", [Json(), Avro(wire="bare")], ids=["json", "avro"])
def test_more_rows_than_memory_could_hold_are_a_memory_error(encoder: Any) -> None:
    many = pa.RunEndEncodedArray.from_arrays(pa.array([2**61]), pa.array([1]))
    with pytest.raises(MemoryError):
        encoder.encode(pa.record_batch({"ab": many}))


@pytest.mark.parametrize("encoder", [Json(), Avro(wire="bare")], ids=["json", "avro"])
def test_a_bad_row_of_a_table_has_its_number_in_the_table(encoder: Any) -> None:
    good, bad = pa.array([b"a", b"b"]), pa.array([b"a", b"\xff"])
    text = [part.view(pa.string()) for part in (good, bad)]
    with pytest.raises(ValueError, match="row 3 "):
        encoder.encode(pa.table({"a": pa.chunked_array(text)}))


def test_a_time_of_day_that_there_is_not_is_a_bad_row_in_avro(producer: Any, cluster: MockCluster) -> None:
    times = pa.array([90_000, -1, 86_399], pa.int32()).view(pa.time32("s"))
    receipt = producer.produce_arrow(pa.record_batch({"at": times}), "u", value=Avro(wire="bare"))
    receipt.wait()
    assert [index for index, _, _ in receipt.errors] == [0, 1]
    assert len(cluster.records("u")) == 1


def test_a_name_with_a_nul_is_refused() -> None:
    with pytest.raises(ValueError, match="NUL in its name"):
        Json().check(pa.schema([("a\0x", pa.int64())]))


def test_a_reader_whose_batches_differ_or_are_wrong_is_refused_batch_by_batch(
    producer: Any, cluster: MockCluster
) -> None:
    first, other = pa.record_batch({"a": [1, 2], "c": [3, 4]}), pa.record_batch({"b": ["x"]})
    reader = pa.RecordBatchReader.from_batches(first.schema, iter([first, other]))
    with pytest.raises(ValueError, match="row 2 begins a batch with the columns"):
        producer.produce_arrow(reader, "u", value=Json())
    producer.flush()
    assert len(cluster.records("u")) == 2
    rows = _roles.SLICE_ROWS + 10
    wrong = pa.table({"a": list(range(rows)), "p": [0] * (rows - 1) + [2**40]})
    with pytest.raises(ValueError, match=f"partitions at index {rows - 1}"):
        producer.produce_arrow(wrong.to_reader(), "u", value=Json(), partition="p")
    producer.flush()
    assert len(cluster.records("u")) == 2, "nothing of that batch"


UNION = pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [pa.array([1, 2]), pa.array(["a", "b"])])


@pytest.mark.parametrize(
    "encoder",
    [Json(exclude=["either"]), Json(["n"]), Avro(wire="bare", exclude=["either"]), Avro(wire="bare", columns=["n"])],
    ids=["json exclude", "json columns", "avro exclude", "avro columns"],
)
@pytest.mark.parametrize("reader", [False, True], ids=["table", "reader"])
def test_a_column_that_no_role_needs_may_be_of_any_type(
    producer: Any, cluster: MockCluster, encoder: Any, reader: bool
) -> None:
    table = pa.table({"n": [1, 2], "either": UNION})
    done(producer.produce_arrow(table.to_reader() if reader else table, "u", value=encoder, key="n"), 2)
    wanted = encoder.encode(table.select(["n"]) if encoder == Json(["n"]) else table).to_pylist()
    assert [(record.key(), record.value()) for record in cluster.records("u")] == [
        (b"1", wanted[0]),
        (b"2", wanted[1]),
    ]
    with pytest.raises(TypeError, match="column 'either' is a union"):
        producer.produce_arrow(table, "u", value=encoder, key=Json())


def test_a_name_with_a_nul_does_not_matter_where_the_column_is_left_out() -> None:
    Json(exclude=["a\0x"]).check(pa.schema([("a\0x", pa.int64()), ("b", pa.int64())]))


RUNS = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["a", None]))
ROWS_OF_ARROW = {
    "runs": RUNS,
    "runs in structs": pa.StructArray.from_arrays([RUNS], ["r"]),
    "runs in structs that are null": pa.StructArray.from_arrays([RUNS], ["r"], mask=pa.array([True, False, False])),
    "runs in lists": pa.ListArray.from_arrays([0, 0, 1, 3], RUNS),
    "runs in maps": pa.MapArray.from_arrays([0, 0, 1, 3], pa.array(["k", "l", "m"]), RUNS),
    "no structs over an empty dictionary": pa.array([None] * 3, pa.struct([("d", pa.dictionary(pa.int8(), "string"))])),
    "no structs in structs over an empty dictionary": pa.array(
        [{"s": None}, None, {}], pa.struct([("s", pa.struct([("d", pa.dictionary(pa.int8(), "string"))]))])
    ),
    "no lists over an empty dictionary": pa.array([None] * 3, pa.list_(pa.dictionary(pa.int8(), "string"), 2)),
}


@pytest.mark.parametrize("encoder", [Json(), Avro(wire="bare")], ids=["json", "avro"])
@pytest.mark.parametrize("what", ROWS_OF_ARROW)
def test_rows_that_an_encoder_can_encode_can_be_produced(
    producer: Any, cluster: MockCluster, encoder: Any, what: str
) -> None:
    column = ROWS_OF_ARROW[what]
    batch = pa.record_batch({"n": range(3), "x": column})
    plain = pa.record_batch({"n": range(3), "x": pa.array(column.to_pylist(), plain_type(column.type))})
    done(producer.produce_arrow(batch, "u", value=encoder), 3)
    assert [record.value() for record in cluster.records("u")] == encoder.encode(plain).to_pylist()


def plain_type(kind: Any) -> Any:
    """Without runs and dictionaries."""
    if pa.types.is_run_end_encoded(kind) or pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_struct(kind):
        return pa.struct([(one.name, plain_type(one.type)) for one in kind])
    if pa.types.is_map(kind):
        return pa.map_(kind.key_type, plain_type(kind.item_type))
    return pa.list_(plain_type(kind.value_type)) if pa.types.is_nested(kind) else kind


def test_columns_that_are_left_out_do_not_make_slices_smaller() -> None:
    """Nor is their memory looked at, which nobody has checked."""
    table = pa.table({"n": range(1000), "large": ["x" * 5000] * 1000})
    assert table.nbytes > 4 * _roles.SLICE_BYTES
    assert len(list(_roles.blocks(table, "t", _roles.Roles.of(Json(["n"]), "n", None, None, None)))) == 1
    assert len(list(_roles.blocks(table, "t", _roles.Roles.of(Json(), "n", None, None, None)))) > 1
