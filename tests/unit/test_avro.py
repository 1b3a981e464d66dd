"""Avro against fastavro and confluent-kafka's AvroDeserializer, which are what consumers use."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import json
import math
import pickle
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from arrow_frames import PLAIN, batches
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from programs import LONG

from fastprod import Producer
from fastprod.encoding import Avro, Encoder
from fastprod.encoding._avro_schema import Mismatch, derive
from fastprod.testing import MockCluster

UTC = dt.UTC
SECRET = "hunter2-very-secret"


def record(*fields: Any, **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": name, "type": kind} for name, kind in fields], **more}


def one(kind: Any, array: Any, **options: Any) -> Any:
    """Read back by fastavro: values of a column that is written as an Avro type."""
    schema = record(("v", kind))
    made = Avro(schema, wire="bare", **options).encode(pa.record_batch({"v": array}))
    return [read(schema, data)["v"] for data in made.to_pylist()]


def read(schema: Any, data: bytes) -> Any:
    stream = io.BytesIO(data)
    value = fastavro.schemaless_reader(stream, fastavro.parse_schema(schema), None)
    assert stream.read() == b"", "bytes are left over"
    return value


def written(schema: Any, value: Any) -> bytes:
    stream = io.BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
    return stream.getvalue()


def failure(kind: Any, array: Any, **options: Any) -> str:
    with pytest.raises(ValueError, match="row") as caught:
        one(kind, array, **options)
    return str(caught.value)


def test_it_is_an_encoder() -> None:
    assert isinstance(Avro(wire="bare"), Encoder)


# ---- random rows


def plain_value(value: Any, kind: Any) -> Any:
    """What fastavro gives for a value that pyarrow gives."""
    known = pa.types
    if value is None:
        return None
    if known.is_map(kind):
        return {key: plain_value(item, kind.item_type) for key, item in value}
    if known.is_struct(kind):
        return {field.name: plain_value(value[field.name], field.type) for field in kind}
    if isinstance(value, list):
        return [plain_value(item, kind.value_type) for item in value]
    if known.is_timestamp(kind):
        return value.to_pydatetime() if hasattr(value, "to_pydatetime") else value
    return value


def same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, dict) and isinstance(right, dict):
        return list(left) == list(right) and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def has(kind: Any, check: Any) -> bool:
    inner = [kind.field(at).type for at in range(kind.num_fields)] if pa.types.is_nested(kind) else []
    return bool(check(kind)) or any(has(each, check) for each in inner)


def foreign(kind: Any) -> bool:
    """Types that are not derived: refused, and tested on their own."""
    return has(
        kind, lambda each: pa.types.is_duration(each) or (pa.types.is_map(each) and each.key_type != pa.string())
    )


def null_last(schema: Any) -> Any:
    """The same schema with the branches of its unions turned round, which forbids their defaults."""
    if isinstance(schema, list):
        return [null_last(branch) for branch in reversed(schema)]
    if isinstance(schema, dict):
        made = {name: null_last(part) for name, part in schema.items() if name != "default"}
        return made | {"fields": made["fields"][::-1]} if "fields" in made else made  # these keep their order
    return schema


RANDOM = [kind for kind in PLAIN if kind != pa.uint64() and not pa.types.is_duration(kind)]


@settings(
    max_examples=150 if LONG else 60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(batch=batches(RANDOM), at=st.integers(0, 4))
def test_random_nested_rows_are_read_back_equal_by_fastavro(batch: Any, at: int) -> None:
    assume(not any(foreign(field.type) for field in batch.schema))
    for part in (batch, batch.slice(at)):
        avro = Avro(wire="bare").resolve(part.schema)
        assert avro.schema is not None
        schema = json.loads(avro.schema)
        made = avro.encode(part).to_pylist()
        rows = [plain_value(row, pa.struct(list(part.schema))) for row in part.to_pylist()]
        assert len(made) == len(rows)
        for data, row in zip(made, rows, strict=True):
            assert same(read(schema, data), row)
        turned = null_last(schema)
        for data, row in zip(Avro(turned, wire="bare").encode(part).to_pylist(), rows, strict=True):
            assert same(read(turned, data), row)
        if not any(has(field.type, pa.types.is_decimal) for field in part.schema):  # fastavro's are not the shortest
            assert made == [written(schema, row) for row in rows]


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(batch=batches(RANDOM, rows=12), size=st.integers(1, 5))
def test_chunks_of_a_table_make_the_bytes_of_the_whole(batch: Any, size: int) -> None:
    assume(not any(foreign(field.type) for field in batch.schema))
    avro = Avro(wire="bare").resolve(batch.schema)
    table = pa.Table.from_batches(pa.Table.from_batches([batch]).to_batches(max_chunksize=size), batch.schema)
    assert avro.encode(table).to_pylist() == avro.encode(batch).to_pylist()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_longs_have_the_bytes_of_fastavro(numbers: list[int]) -> None:
    made = Avro('"long"', wire="bare").encode(pa.record_batch({"v": pa.array(numbers, pa.int64())}))
    assert made.to_pylist() == [written("long", number) for number in numbers]


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(1, 76), st.integers(0, 76))
def test_decimals_are_the_shortest_twos_complement(data: Any, precision: int, raised: int) -> None:
    most = 10**precision - 1
    number = data.draw(st.integers(-most, most) | st.integers(-(2**16), 2**16).filter(lambda n: abs(n) <= most))
    raised = min(raised, 76 - precision)
    with decimal.localcontext(prec=100):
        array = pa.array([decimal.Decimal(number)], pa.decimal256(precision, 0))
    kind = {"type": "bytes", "logicalType": "decimal", "precision": precision + raised, "scale": raised}
    (made,) = Avro(record(("v", kind)), wire="bare").encode(pa.record_batch({"v": array})).to_pylist()
    want = number * 10**raised
    size = next(size for size in range(1, 34) if -(1 << (8 * size - 1)) <= want < 1 << (8 * size - 1))
    assert made == written("bytes", want.to_bytes(size, "big", signed=True))


# ---- each type


def test_integers_of_all_widths_become_int_and_long() -> None:
    for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()):
        assert one("int", pa.array([0, 1, 127], kind)) == [0, 1, 127]
        assert one("long", pa.array([0, 1, 127], kind)) == [0, 1, 127]
        assert one("double", pa.array([0, 1, 127], kind)) == [0.0, 1.0, 127.0]
    edges = [-(2**31), 2**31 - 1]
    assert one("int", pa.array(edges, pa.int64())) == edges


@pytest.mark.parametrize(
    ("kind", "array", "shown"),
    [
        ("int", pa.array([1, 2**31]), "row 1 has v = 2147483648, which is no Avro int: out of range"),
        ("int", pa.array([-(2**31) - 1]), "v = -2147483649"),
        ("int", pa.array([2**32 - 1], pa.uint32()), "v = 4294967295"),
        ("int", pa.array([2**64 - 1], pa.uint64()), "v = 18446744073709551615"),
        ("long", pa.array([2**63], pa.uint64()), "v = 9223372036854775808"),
        ("double", pa.array([2**53 + 1]), "v = 9007199254740993, which is no Avro double"),
        ("double", pa.array([2**63 - 1]), "exactly"),
        ("double", pa.array([2**64 - 1], pa.uint64()), "exactly"),
        ("float", pa.array([2**24 + 1]), "v = 16777217, which is no Avro float"),
        ("long", pa.array([1, None]), "row 1 has v = None, which is no Avro long: its Avro type has no null"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, pa.array(["A", "C"]), "row 1 has v = 'C'"),
        ({"type": "fixed", "name": "F", "size": 2}, pa.array([b"ab", b"abc"]), "row 1 has v = b'abc'"),
        ({"type": "string", "logicalType": "uuid"}, pa.array(["no"]), "8-4-4-4-12"),
    ],
)
def test_a_row_that_does_not_fit_is_named(kind: Any, array: Any, shown: str) -> None:
    assert shown in failure(kind, array)


def test_text_that_is_no_utf8_is_a_bad_row() -> None:
    for wrong in (
        b"\xff",
        b"a\xc3",
        b"\xc0\x80",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xe0\x80\x80",
        b"abcdefgh\x80",
    ):
        array = pa.array([b"fine", wrong], pa.binary()).view(pa.string())
        assert "row 1" in failure("string", array)
        assert "UTF-8" in failure("string", array)


@given(st.binary(max_size=12))
def test_utf8_is_what_python_takes_for_it(data: bytes) -> None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = None
    array = pa.array([data], pa.binary()).view(pa.string())
    if text is None:
        assert "UTF-8" in failure("string", array)
    else:
        assert one("string", array) == [text]


def test_the_path_of_a_bad_value_goes_through_lists_maps_and_records() -> None:
    item = record(("price", "int"), name="Item")
    kind = {"type": "array", "items": {"type": "map", "values": item}}
    arrow = pa.list_(pa.map_(pa.string(), pa.struct([("price", pa.int64())])))
    rows = [[[("a", {"price": 1})]], [[], [], [("x", {"price": 1}), ("big", {"price": 2**40})]]]
    assert "row 1 has v[2]['big'].price = 1099511627776" in failure(kind, pa.array(rows, arrow))


def test_only_bad_rows_fail_and_the_others_are_whole() -> None:
    batch = pa.record_batch({"v": pa.array(["A", "?", "B", "?"]), "n": pa.array([1, 2, 3, 4])})
    schema = record(("n", "long"), ("v", {"type": "enum", "name": "E", "symbols": ["A", "B"]}))
    column = Avro(schema, wire="bare").encode_column(batch, base=10)
    assert [column[0], column[2]] == [b"\x02\x00", b"\x06\x02"]
    assert sorted(column.bad) == [1, 3]
    with pytest.raises(ValueError, match=r"v = '\?'"):
        column[3]


def test_enums_are_read_from_strings_and_dictionaries() -> None:
    symbols = [f"S{number}" for number in range(100)]
    kind = {"type": "enum", "name": "E", "symbols": symbols}
    array = pa.array([symbols[at * 7 % 100] for at in range(300)])
    for each in (array, array.dictionary_encode(), array.cast(pa.large_string()), array.cast(pa.string_view())):
        assert one(kind, each) == array.to_pylist()
    assert one(["null", kind], pa.array([None, "S5"]).dictionary_encode()) == [None, "S5"]


def test_runs_are_read_as_their_values() -> None:
    array = pa.RunEndEncodedArray.from_arrays(pa.array([2, 5], pa.int32()), pa.array(["a", None]))
    assert one(["null", "string"], array[1:4]) == ["a", None, None]


def test_unions_take_null_in_either_place_and_the_branch_that_the_type_selects() -> None:
    array = pa.array([1, None])
    for kind in (["null", "long"], ["long", "null"], ["string", "null", "int", "long", "double"]):
        assert one(kind, array) == [1, None]
    batch = pa.record_batch({"v": array})
    assert Avro(record(("v", ["int", "long", "null"])), wire="bare").encode(batch).to_pylist() == [b"\2\2", b"\4"]
    batch = pa.record_batch({"v": pa.array([1], pa.uint32())})
    assert Avro(record(("v", ["int", "long"])), wire="bare").encode(batch).to_pylist() == [b"\2\2"]
    raw, text = {"type": "fixed", "name": "F", "size": 16}, {"type": "string", "logicalType": "uuid"}
    for kind, branch in ((pa.binary(16), b"\2"), (pa.uuid(), b"\0")):
        batch = pa.record_batch({"v": pa.array([bytes(16)], kind)})
        union = [text, {**raw, "logicalType": "other"}] if branch == b"\2" else [text, "bytes"]
        assert Avro(record(("v", union)), wire="bare").encode(batch).to_pylist()[0][:1] == branch
    symbols = {"type": "enum", "name": "E", "symbols": ["a"]}
    assert one(["null", symbols, "string"], pa.array(["x"])) == ["x"]
    with pytest.raises(Mismatch, match="equally well"):
        one(
            [record(("a", "int"), name="A"), record(("a", "int"), name="B")],
            pa.array([{"a": 1}], pa.struct([("a", pa.int32())])),
        )
    with pytest.raises(Mismatch, match=r"v is \[null, string, int\] in Avro, but double in Arrow"):
        one(["null", "string", "int"], pa.array([1.5]))


def test_times_are_converted_exactly_or_refused() -> None:
    tick = 1_700_000_000_123_456_000
    array = pa.array([tick, -tick], pa.int64()).view(pa.timestamp("ns", "UTC"))
    micros = {"type": "long", "logicalType": "timestamp-micros"}
    millis = {"type": "long", "logicalType": "timestamp-millis"}
    moment = dt.datetime(2023, 11, 14, 22, 13, 20, 123456, tzinfo=UTC)
    assert one(micros, array)[0] == moment
    assert "row 0 has v = 1700000000123456000 (timestamp[ns, tz=UTC]), which is no Avro long" in failure(millis, array)
    assert "between two ticks" in failure(millis, array)
    cut = Avro(record(("v", millis)), wire="bare", times="truncate").encode(pa.record_batch({"v": array})).to_pylist()
    assert cut == [written("long", 1_700_000_000_123), written("long", -1_700_000_000_124)]
    far = pa.array([2**62], pa.int64()).view(pa.timestamp("s", "UTC"))
    assert "out of range" in failure(millis, far)
    seconds = pa.array([3600], pa.int32()).view(pa.time32("s"))
    assert one({"type": "int", "logicalType": "time-millis"}, seconds) == [dt.time(1)]
    assert one({"type": "long", "logicalType": "time-micros"}, seconds) == [dt.time(1)]
    days = pa.array([dt.date(1969, 12, 31)], pa.date64())
    assert one({"type": "int", "logicalType": "date"}, days) == [dt.date(1969, 12, 31)]


def test_instants_and_local_times_are_not_mixed_up() -> None:
    naive = pa.array([dt.datetime(2020, 1, 1)], pa.timestamp("us"))
    zoned = pa.array([dt.datetime(2020, 1, 1, tzinfo=UTC)], pa.timestamp("us", "Europe/Berlin"))
    instant = {"type": "long", "logicalType": "timestamp-micros"}
    local = {"type": "long", "logicalType": "local-timestamp-micros"}
    assert one(local, naive) == [dt.datetime(2020, 1, 1)]
    assert one(instant, zoned) == [dt.datetime(2020, 1, 1, tzinfo=UTC)]
    with pytest.raises(Mismatch, match="no time zone"):
        one(instant, naive)
    assert one(instant, naive, naive="utc") == [dt.datetime(2020, 1, 1, tzinfo=UTC)]
    with pytest.raises(Mismatch, match="has a time zone"):
        one(local, zoned)


def test_uuids_are_written_as_text_or_16_bytes() -> None:
    values = [uuid.UUID(int=5), uuid.UUID("12345678-1234-5678-1234-567812345678")]
    text = {"type": "string", "logicalType": "uuid"}
    for array in (pa.array([value.bytes for value in values], pa.uuid()), pa.array([str(value) for value in values])):
        assert one(text, array) == values
    fixed = {"type": "fixed", "name": "U", "size": 16, "logicalType": "uuid"}
    batch = pa.record_batch({"v": pa.array([value.bytes for value in values], pa.uuid())})
    assert Avro(record(("v", fixed)), wire="bare").encode(batch).to_pylist() == [value.bytes for value in values]


def test_durations_are_months_days_and_milliseconds() -> None:
    kind = {"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}
    spans = pa.array([dt.timedelta(seconds=2)], pa.duration("us"))
    made = Avro(record(("v", kind)), wire="bare").encode(pa.record_batch({"v": spans})).to_pylist()
    assert made == [bytes(8) + (2000).to_bytes(4, "little")]
    assert "three numbers" in failure(kind, pa.array([dt.timedelta(seconds=-2)], pa.duration("us")))
    assert "three numbers" in failure(kind, pa.array([dt.timedelta(days=50)], pa.duration("us")))
    interval = pa.array([pa.MonthDayNano([1, 2, 3_000_000])])
    made = Avro(record(("v", kind)), wire="bare").encode(pa.record_batch({"v": interval})).to_pylist()
    assert made == [b"".join(number.to_bytes(4, "little") for number in (1, 2, 3))]


@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_decimals_of_all_widths_fit_bytes_and_fixed(width: int) -> None:
    kind = getattr(pa, f"decimal{width}")(7, 2)
    values = [
        decimal.Decimal(text) for text in ("0.00", "-0.01", "1.27", "1.28", "-1.28", "-1.29", "99999.99", "-99999.99")
    ]
    array = pa.array(values, kind)
    meant = {"logicalType": "decimal", "precision": 9, "scale": 3}
    assert one({"type": "bytes", **meant}, array) == values
    assert one({"type": "fixed", "name": "D", "size": 6, **meant}, array) == values
    with pytest.raises(Mismatch, match="1 digits behind the point would be lost"):
        one({"type": "bytes", **meant, "scale": 1}, array)
    assert "too many digits" in failure({"type": "bytes", **meant, "precision": 4, "scale": 2}, array)
    assert "too many digits" in failure({"type": "fixed", "name": "D", "size": 2, **meant}, array)
    assert "too many digits" in failure({"type": "bytes", **meant, "precision": 7}, array)  # fits, until it is raised
    assert one({"type": "bytes", **meant}, pa.array([5, -7])) == [decimal.Decimal(5), decimal.Decimal(-7)]


def unscaled(kind: Any, *numbers: int) -> Any:
    """An array of decimals, whatever its type promises: Arrow does not look at their digits."""
    size = kind.bit_width // 8
    data = b"".join(number.to_bytes(size, "little", signed=True) for number in numbers)
    return pa.Array.from_buffers(kind, len(numbers), [None, pa.py_buffer(data)])


@pytest.mark.parametrize("width", [32, 64, 128, 256])
@pytest.mark.parametrize("shape", ["bytes", "fixed f(40)"])
def test_a_decimal_with_more_digits_than_its_type_is_a_bad_row_as_in_fastavro(width: int, shape: str) -> None:
    column = getattr(pa, f"decimal{width}")(3, 1)
    sized = {"type": "fixed", "name": "f", "size": 40} if shape != "bytes" else {"type": "bytes"}
    kind = {**sized, "logicalType": "decimal", "precision": 3, "scale": 1}
    with decimal.localcontext(prec=3):
        assert one(kind, unscaled(column, 999, -999)) == [decimal.Decimal("99.9"), decimal.Decimal("-99.9")]
    for number in (1000, -1000, 2**31 - 1, -(2**31), 2 ** (width - 1) - 1, -(2 ** (width - 1))):
        with decimal.localcontext(prec=100):
            value = decimal.Decimal(number).scaleb(-1)
        with pytest.raises(ValueError, match="precision"):
            written(record(("v", kind)), {"v": value})
        shown = repr(value) if len(repr(value)) <= 80 else repr(value)[:77] + "..."
        wanted = f"row 1 has v = {shown}, which is no Avro {shape} decimal(3, 1): too many digits"
        assert failure(kind, unscaled(column, 1, number)) == wanted
    with pytest.raises(ValueError, match=r"row 0 has v = Decimal\('100.0'\)"):
        Avro(wire="bare").encode(pa.record_batch({"v": unscaled(column, 1000)}))


@pytest.mark.parametrize("precision", [76, 77, 100, 2**31])
def test_decimals_of_more_digits_than_arrow_has_are_written(precision: int) -> None:
    kind = {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": 0}
    batch = pa.record_batch({"v": unscaled(pa.decimal256(76, 0), -(10**75))})
    data = Avro(record(("v", kind)), wire="bare").encode(batch)
    assert read(record(("v", "bytes")), data[0].as_py())["v"] == (-(10**75)).to_bytes(32, "big", signed=True)


@pytest.mark.parametrize("scale", [-(2**31), -(2**31) + 1, -77])
@pytest.mark.parametrize("kind", [pa.decimal32, pa.decimal256])
def test_a_decimal_whose_scale_asks_for_a_huge_number_is_refused_by_name(kind: Any, scale: int) -> None:
    with pytest.raises(Mismatch, match=r"v.* its scale is more than 76 digits larger"):
        Avro(wire="bare").check(pa.schema([("v", kind(1, scale))]))


def test_a_decimal_of_tiny_numbers_is_written() -> None:
    column = unscaled(pa.decimal128(2, 2**31 - 1), -42)
    assert Avro(wire="bare").encode(pa.record_batch({"v": column})).to_pylist() == [b"\x02\x02\xd6"]


# ---- the schema and the columns


def test_fields_without_a_column_are_written_as_their_default() -> None:
    inner = record(("a", "int"), name="Inner")
    defaults: list[tuple[Any, Any, Any]] = [
        ("null", None, None),
        (["null", "string"], None, None),
        (["string", "null"], "x", "x"),
        ("boolean", True, True),
        ("int", -5, -5),
        ("double", 1.5, 1.5),
        ("bytes", "\u00ff", b"\xff"),
        ({"type": "fixed", "name": "F", "size": 2}, "ab", b"ab"),
        ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "B"),
        ({"type": "array", "items": "int"}, [1, 2], [1, 2]),
        ({"type": "map", "values": "int"}, {"a": 1}, {"a": 1}),
        ({"type": "array", "items": "int"}, [], []),
        (inner, {"a": 3}, {"a": 3}),
    ]
    for kind, default, value in defaults:
        schema = record(("id", "long"))
        schema["fields"].append({"name": "d", "type": kind, "default": default})
        (made,) = Avro(schema, wire="bare").encode(pa.record_batch({"id": [7]})).to_pylist()
        assert read(schema, made) == {"id": 7, "d": value}
        assert made == written(schema, {"id": 7, "d": value})
    schema["fields"][1] |= {"type": "int", "default": "x"}
    with pytest.raises(ValueError, match=r"the default of d is \"x\", which is no int"):
        Avro(schema, wire="bare").encode(pa.record_batch({"id": [7]}))


def test_a_default_that_never_ends_is_refused() -> None:
    schema = record(("id", "long"), name="Loop")
    schema["fields"].append({"name": "again", "type": "Loop", "default": {"id": 1}})
    with pytest.raises(ValueError, match="the default of again is"):
        Avro(schema, wire="bare").encode(pa.record_batch({"id": [7]}))


def test_an_alias_names_the_column_too() -> None:
    schema = record()
    schema["fields"] = [{"name": "customer", "type": "long", "aliases": ["client", "buyer"]}]
    (made,) = Avro(schema, wire="bare").encode(pa.record_batch({"buyer": [7]})).to_pylist()
    assert read(schema, made) == {"customer": 7}
    schema["fields"] = [
        {"name": "old", "type": "long", "aliases": ["id"], "default": 5},
        {"name": "id", "type": "long"},
    ]
    (made,) = Avro(schema, wire="bare").encode(pa.record_batch({"id": [7]})).to_pylist()
    assert read(schema, made) == {"old": 5, "id": 7}


def test_a_named_type_is_used_again_and_may_hold_itself() -> None:
    node = record(("value", "int"), name="Node", namespace="x")
    node["fields"].append({"name": "next", "type": ["null", "Node"], "default": None})
    kind = pa.struct([("value", pa.int32()), ("next", pa.struct([("value", pa.int32())]))])
    batch = pa.RecordBatch.from_struct_array(pa.array([{"value": 1, "next": {"value": 2}}, {"value": 3}], kind))
    made = Avro(node, wire="bare").encode(batch).to_pylist()
    assert [read(node, data) for data in made] == [
        {"value": 1, "next": {"value": 2, "next": None}},
        {"value": 3, "next": None},
    ]


@pytest.mark.parametrize(
    ("schema", "shown"),
    [
        (record(("a", "string")), "a is string in Avro, but int64 in Arrow"),
        (record(("a", "long"), ("b", "long")), "there is no column b for the Avro field of type long"),
        (record(("a", {"type": "array", "items": "long"})), "a is array<long> in Avro, but int64 in Arrow"),
        (record(), "no field for a: choose with columns"),
        (record(("a", "Unknown")), "refers to 'Unknown'"),
        ("{", "not JSON"),
        ({"type": "record", "name": "1"}, "is called '1'"),
        (["int", "int"], "int twice"),
    ],
)
def test_a_schema_that_does_not_fit_is_refused_before_anything_is_encoded(schema: Any, shown: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        Avro(schema, wire="bare").check(pa.schema([("a", pa.int64())]))
    assert shown in str(caught.value)


def test_a_mismatch_deep_inside_is_named_by_its_path() -> None:
    kind = pa.list_(pa.struct([("price", pa.float64())]))
    schema = record(("items", {"type": "array", "items": record(("price", "float"), name="Item")}))
    with pytest.raises(Mismatch, match=r"items\[\]\.price is float in Avro, but double in Arrow: digits would be lost"):
        Avro(schema, wire="bare").check(pa.schema([("items", kind)]))


def test_columns_are_chosen_left_out_or_ignored() -> None:
    batch = pa.record_batch({"a": [1], "b": ["x"], "c": [2.5]})
    for options in ({"columns": ["b", "a"]}, {"exclude": ["c"]}, {"extra": "ignore"}):
        assert Avro(record(("a", "long"), ("b", "string")), wire="bare", **options).encode(batch).to_pylist() == [
            b"\2\2x"
        ]
    with pytest.raises(ValueError, match="no column 'z'"):
        Avro(wire="bare", columns=["z"]).encode(batch)
    derived = Avro(wire="bare", columns=["b", "a"]).resolve(batch.schema)
    assert [field["name"] for field in json.loads(str(derived.schema))["fields"]] == ["b", "a"]


def test_a_schema_that_is_no_record_takes_one_column_and_its_nulls_are_null_records() -> None:
    batch = pa.record_batch({"id": [1, 2], "key": ["a", None]})
    for schema in ("string", '"string"', ["null", "string"]):
        avro = Avro(schema, wire="bare", columns=["key"])
        assert avro.encode(batch).to_pylist()[1] is None
        column = avro.encode_column(batch, "key")
        assert column[1] is None
        assert column[0] is not None
        assert column[0].endswith(b"a")
    with pytest.raises(Mismatch, match="takes one column, but there are 2"):
        Avro('"string"', wire="bare").encode(batch)


def test_names_that_avro_forbids_are_refused_or_replaced() -> None:
    batch = pa.record_batch({"unit price": [1], "2nd": [2]})
    with pytest.raises(ValueError, match="'unit price' cannot be called so in Avro"):
        Avro(wire="bare").check(batch.schema)
    avro = pickle.loads(pickle.dumps(Avro(wire="bare", names="sanitise").resolve(batch.schema)))
    assert read(json.loads(avro.schema), avro.encode(batch).to_pylist()[0]) == {"unit_price": 1, "_2nd": 2}
    with pytest.raises(ValueError, match="both 'a_b' in Avro"):
        Avro(wire="bare", names="sanitise").check(pa.schema([("a b", pa.int8()), ("a-b", pa.int8())]))


def test_derived_schemas_are_stable_and_name_every_record_once() -> None:
    item = pa.struct([("x", pa.int8()), ("f", pa.binary(2))])
    schema = pa.schema([("a", pa.list_(item)), ("a_item", item), ("b", pa.map_(pa.string(), item))])
    made = derive(schema, "Order", "shop.v1")
    assert made == derive(schema, "Order", "shop.v1")
    fastavro.parse_schema(made)  # refuses a name that is there twice
    for kind in (pa.duration("us"), pa.map_(pa.int32(), pa.int32()), pa.month_day_nano_interval()):
        with pytest.raises(TypeError, match="cast"):
            derive(pa.schema([("a", kind)]))


# ---- registry


@pytest.fixture
def registry() -> Any:
    return SchemaRegistryClient.new_client({"url": "mock://avro"})


ORDERS = pa.record_batch(
    {
        "id": pa.array([1, 2], pa.int64()),
        "price": pa.array([decimal.Decimal("9.99"), None], pa.decimal128(10, 2)),
        "at": pa.array([dt.datetime(2024, 5, 1, 12, tzinfo=UTC)] * 2, pa.timestamp("us", "UTC")),
        "tags": pa.array([["a", "b"], None], pa.list_(pa.string())),
    }
)


def test_confluents_deserializer_reads_what_is_registered(registry: Any) -> None:
    avro = Avro("derive", "orders-value", registry, name="Order").resolve(ORDERS.schema)
    made = avro.encode(ORDERS).to_pylist()
    assert avro.schema_id is not None
    assert all(data[:5] == b"\0" + avro.schema_id.to_bytes(4, "big") for data in made)
    reader = AvroDeserializer(registry)
    context = SerializationContext("orders", MessageField.VALUE)
    assert [reader(data, context) for data in made] == ORDERS.to_pylist()


@pytest.mark.parametrize(
    ("schema", "values"), [('"string"', ["a", "ü"]), ('"bytes"', [b"raw", b"x"]), ('"long"', [1, -1])]
)
def test_confluents_deserializer_reads_schemas_that_are_no_record(
    registry: Any, schema: str, values: list[Any]
) -> None:
    made = Avro(schema, "s-key", registry).encode(pa.record_batch({"k": values})).to_pylist()
    assert [AvroDeserializer(registry)(data, SerializationContext("s", MessageField.KEY)) for data in made] == values


def test_a_decimal_alone_is_refused_because_clients_disagree(registry: Any) -> None:
    kind = {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 0}
    with pytest.raises(ValueError, match="two ways"):
        Avro(kind, "d-value", registry).check(pa.schema([("v", pa.decimal128(4, 0))]))


class Counting:
    """A registry that counts how often it is asked."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self.client, name)


def test_the_latest_version_is_fetched_once_and_defaults_fill_new_fields(registry: Any) -> None:
    first = record(("id", "long"))
    registry.register_schema("s-value", Schema(json.dumps(first), "AVRO"))
    second = record(("id", "long"))
    second["fields"].append({"name": "more", "type": "int", "default": 5})
    number = registry.register_schema("s-value", Schema(json.dumps(second), "AVRO"))
    counting = Counting(registry)
    avro = Avro(subject="s-value", registry=counting)
    batch = pa.record_batch({"id": [1, 2]})
    for _ in range(3):
        made = avro.encode(batch).to_pylist()
    assert counting.asked == ["get_latest_version"]
    assert avro.resolve(batch.schema).schema_id == number
    assert AvroDeserializer(registry)(made[1], SerializationContext("s", MessageField.VALUE)) == {"id": 2, "more": 5}


def test_without_register_the_schema_must_be_there(registry: Any) -> None:
    batch = pa.record_batch({"id": [1]})
    schema = json.dumps(record(("id", "long")))
    with pytest.raises(ValueError, match="cannot look up the schema of subject 's-value'"):
        Avro(schema, "s-value", registry, register=False).encode(batch)
    assert registry.get_subjects() == []
    number = registry.register_schema("s-value", Schema(schema, "AVRO"))
    assert Avro(schema, "s-value", registry, register=False).resolve(batch.schema).schema_id == number
    with pytest.raises(ValueError, match="cannot fetch the schema of subject 'none'"):
        Avro(subject="none", registry=registry).encode(batch)


def test_a_schema_that_does_not_fit_is_not_registered(registry: Any) -> None:
    with pytest.raises(Mismatch):
        Avro(record(("id", "string")), "s-value", registry).check(pa.schema([("id", pa.int64())]))
    assert registry.get_subjects() == []


def test_schemas_that_refer_to_others_are_fetched_with_them(registry: Any) -> None:
    item = record(("price", "int"), name="Item", namespace="shop")
    registry.register_schema("item", Schema(json.dumps(item), "AVRO"))
    order = json.dumps(record(("item", "shop.Item")))
    registry.register_schema("s-value", Schema(order, "AVRO", [SchemaReference("shop.Item", "item", 1)]))
    batch = pa.record_batch({"item": pa.array([{"price": 3}], pa.struct([("price", pa.int32())]))})
    avro = pickle.loads(pickle.dumps(Avro(subject="s-value", registry=registry).resolve(batch.schema)))
    assert avro.encode(batch).to_pylist()[0][5:] == b"\x06"


def test_secrets_stay_out_of_texts_and_pickles() -> None:
    options = {"url": f"mock://{SECRET}@host", "basic.auth.user.info": f"user:{SECRET}"}
    avro = Avro("derive", "s-value", options)
    assert SECRET not in repr(avro)
    with pytest.raises(pickle.PicklingError, match="resolve"):
        pickle.dumps(avro)
    made = avro.resolve(ORDERS.schema)
    assert SECRET.encode() not in pickle.dumps(made)
    assert SECRET not in repr(made)
    assert pickle.loads(pickle.dumps(made)).encode(ORDERS).equals(avro.encode(ORDERS))


def test_without_the_extra_only_the_registry_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka.schema_registry", None)
    assert len(Avro(wire="bare").encode(ORDERS)) == 2
    with pytest.raises(ImportError, match=r"fastprod\[avro\]"):
        Avro(subject="s", registry={"url": "mock://x"}).encode(ORDERS)


class Refusing:
    def get_latest_version(self, subject: str) -> Any:
        raise RuntimeError(f"GET https://user:{SECRET}@host/subjects/{subject} failed")


def test_an_error_of_the_registry_is_told_without_secrets() -> None:
    with pytest.raises(ValueError, match="cannot fetch") as caught:
        Avro(subject="s", registry=Refusing()).encode(ORDERS)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_threads_share_an_encoder_and_the_registry_is_asked_once(registry: Any) -> None:
    registry.register_schema("orders-value", Schema(json.dumps(derive(ORDERS.schema)), "AVRO"))
    counting = Counting(registry)
    avro = Avro(subject="orders-value", registry=counting)
    table = pa.Table.from_batches([ORDERS] * 500).combine_chunks()
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: avro.encode(table).to_pylist(), range(16)))
    assert counting.asked == ["get_latest_version"]
    assert all(one == made[0] for one in made)
    assert made[0] == avro.encode(ORDERS).to_pylist() * 500


# ---- into a topic


def consumed(cluster: MockCluster, count: int) -> list[Any]:
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": "g",
            "auto.offset.reset": "earliest",
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition("orders", 0, 0)])
    found: list[Any] = []
    while len(found) < count:  # the suite's guard against hangs ends it
        found += consumer.consume(count - len(found), 1)
    assert consumer.poll(0.2) is None
    consumer.close()
    return found


def test_keys_and_values_are_consumed_as_confluents_deserializer_reads_them(registry: Any) -> None:
    value = Avro("derive", "orders-value", registry, name="Order")
    key = Avro('"long"', "orders-key", registry, columns=["id"])
    with MockCluster(1, topics={"orders": 1}) as cluster:
        with Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0}) as producer:
            receipt = producer.produce_arrow(pa.Table.from_batches([ORDERS] * 3), "orders", value=value, key=key)
            assert receipt.wait(120)
            assert (receipt.acknowledged, receipt.failed) == (6, 0)
        messages = consumed(cluster, 6)
    reader = AvroDeserializer(registry)
    values = [reader(one.value(), SerializationContext("orders", MessageField.VALUE)) for one in messages]
    keys = [reader(one.key(), SerializationContext("orders", MessageField.KEY)) for one in messages]
    assert values == ORDERS.to_pylist() * 3
    assert keys == [1, 2] * 3


def test_bad_rows_fail_alone_and_null_values_are_tombstones() -> None:
    table = pa.table({"id": [1, 2**40, 3, None], "ok": [1, 2, 3, 4]})
    with MockCluster(1, topics={"orders": 1}) as cluster:
        with Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0}) as producer:
            receipt = producer.produce_arrow(table, "orders", value=Avro("int", wire="bare", columns=["id"]))
            assert receipt.wait(120)
            assert (receipt.acknowledged, receipt.failed) == (3, 1)
            ((index, error, _),) = receipt.errors
            assert index == 1
            assert "id = 1099511627776" in str(error)
            with pytest.raises(Mismatch, match="id is string in Avro, but int64 in Arrow"):
                producer.produce_arrow(table, "orders", value=Avro("string", wire="bare", columns=["id"]))
        assert [one.value() for one in consumed(cluster, 3)] == [b"\2", b"\6", None]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "needs a schema id"),
        ({"subject": "s"}, "needs a registry"),
        ({"registry": {"url": "mock://x"}}, "needs a subject"),
        ({"wire": "other"}, "wire is 'other'"),
        ({"schema_id": -1}, "schema_id is -1"),
        ({"wire": "bare", "times": "round"}, "times is 'round'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=r"is|need|give") as caught:
        Avro(**options)
    assert shown in str(caught.value)
