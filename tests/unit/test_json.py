"""Rows as JSON: what a reader gets of every Arrow type, which rows fail, and what is refused.

Byte for byte it is compared with Spark in tests/spark/test_json_as_spark.py; here with what Python says of the cells.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
import pickle
import random
import zoneinfo
from decimal import Decimal
from typing import Any

import arrow_frames
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fastprod.encoding import Encoder, Json
from fastprod.encoding._zones import zone_of

PATIENT = settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
EPOCH = dt.date(1970, 1, 1)


def one(array: Any, **options: Any) -> list[str]:
    """What is written for the cells of an array."""
    texts = Json(**{"nulls": True, **options}).encode(pa.record_batch([array], ["c"])).to_pylist()
    assert all(text.startswith(b'{"c":') and text.endswith(b"}") for text in texts)
    return [text[5:-1].decode() for text in texts]


def expected(scalar: Any, leave_out: bool) -> Any:
    """What json.loads() should make of a cell: numbers as text, structs and maps as lists of pairs."""
    kind, known = scalar.type, pa.types
    if known.is_dictionary(kind):
        scalar, kind = scalar.value, kind.value_type
    if not scalar.is_valid:
        return None
    value = None if known.is_duration(kind) or known.is_timestamp(kind) or known.is_time(kind) else scalar.as_py()
    if known.is_map(kind):
        return [(key_text(entry["key"]), expected(entry["value"], leave_out)) for entry in scalar.values]
    if known.is_struct(kind):
        pairs = [(name, expected(scalar[name], leave_out)) for name in scalar]
        return [pair for pair in pairs if not leave_out or pair[1] is not None]
    if hasattr(scalar, "values"):
        return [expected(item, leave_out) for item in scalar.values]
    if known.is_floating(kind):
        special = {math.inf: "Infinity", -math.inf: "-Infinity"}
        return value if math.isfinite(value) else special.get(value, "NaN")
    if known.is_integer(kind) or known.is_decimal(kind):
        return Number(str(value))
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if known.is_date(kind):
        return value.isoformat()
    if known.is_timestamp(kind):
        return timestamp(scalar.value, kind)
    if known.is_time(kind):
        return time_of_day(scalar.value, kind.unit)
    return interval(scalar.value, kind.unit) if known.is_duration(kind) else value


class Number(str):
    """The text of a number, which is no string."""


PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}


def timestamp(count: int, kind: Any) -> str:
    seconds, part = divmod(count, PER_SECOND[kind.unit])
    text = (dt.datetime(1970, 1, 1) + dt.timedelta(seconds=seconds)).isoformat()
    return f"{text}.{part * 1000 // PER_SECOND[kind.unit]:03}" + ("Z" if kind.tz else "")


def fraction(part: int, unit: str) -> str:
    return f".{part:0{len(str(PER_SECOND[unit])) - 1}}".rstrip("0") if part else ""


def time_of_day(count: int, unit: str) -> str:
    seconds, part = divmod(count, PER_SECOND[unit])
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{fraction(part, unit)}"


def interval(count: int, unit: str) -> str:
    days, rest = divmod(abs(count), 86_400 * PER_SECOND[unit])
    return f"INTERVAL '{'-' if count < 0 else ''}{days} {time_of_day(rest, unit)}' DAY TO SECOND"


def key_text(scalar: Any) -> str:
    return str(scalar.as_py())


def loaded(text: bytes) -> Any:
    return json.loads(text, parse_int=Number, parse_float=Number, object_pairs_hook=lambda pairs: pairs)


def match(found: Any, wanted: Any) -> bool:
    if isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(match, found, wanted))
    if isinstance(wanted, float):
        return isinstance(found, Number) and (
            float(found) == wanted or pa.scalar(float(found), pa.float32()).as_py() == wanted
        )
    return type(found) is type(wanted) and found == wanted


@PATIENT
@given(arrow_frames.batches(), st.booleans())
def test_every_cell_is_what_a_reader_finds(batch, nulls):
    texts = Json(nulls=nulls).encode(batch).to_pylist()
    assert len(texts) == batch.num_rows
    for row, text in enumerate(texts):
        cells = [(name, expected(batch[name][row], not nulls)) for name in batch.schema.names]
        wanted = [cell for cell in cells if nulls or cell[1] is not None]
        assert match(loaded(text), wanted), (text, wanted)


@PATIENT
@given(arrow_frames.batches(rows=12))
def test_a_row_is_the_same_wherever_it_is_cut(batch):
    whole = Json().encode(batch).to_pylist()
    assert [Json().encode(batch.slice(row, 1))[0].as_py() for row in range(batch.num_rows)] == whole
    table = pa.Table.from_batches([batch.slice(0, 5), batch.slice(5)])
    assert Json().encode(table).to_pylist() == whole


# ---- numbers


def test_integers_of_every_length():
    edges = {0, 2**63 - 1, -(2**63)} | {sign * (10**n + d) for n in range(19) for d in (-1, 0, 1) for sign in (1, -1)}
    edges |= {random.Random(seed).getrandbits(63) >> seed % 60 for seed in range(2000)} | set(range(-1100, 1100))
    numbers = sorted(n for n in edges if -(2**63) <= n < 2**63)
    assert one(pa.array(numbers, pa.int64())) == [str(n) for n in numbers]
    wide = [2**64 - 1, 10**19, 10**19 - 1, 0]
    assert one(pa.array(wide, pa.uint64())) == [str(n) for n in wide]
    for kind in arrow_frames.INTEGERS[:3] + arrow_frames.UNSIGNED[:3]:
        low, high = (
            (0, 2**kind.bit_width - 1)
            if kind in arrow_frames.UNSIGNED
            else (
                -(2 ** (kind.bit_width - 1)),
                2 ** (kind.bit_width - 1) - 1,
            )
        )
        assert one(pa.array([low, high], kind)) == [str(low), str(high)]


@PATIENT
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
@example([0.0, -0.0, 5e-324, 1e-323, 1e-3, 9.999e-4, 1e7, 9_999_999.0, 9_999_999.999999, 1.7976931348623157e308])
@example([2e23, 1e23, 0.1 + 0.2, 123456.789, 1e22, 2.0**63, 4.35, 0.001001, 100.0, -12.5])
def test_doubles_are_the_shortest_text_in_javas_layout(numbers):
    for number, text in zip(numbers, one(pa.array(numbers, pa.float64())), strict=True):
        assert float(text) == number
        assert math.copysign(1, float(text)) == math.copysign(1, number)
        digits, _, exponent = text.lstrip("-").partition("E")
        before, after = digits.split(".")
        assert before
        assert after
        if exponent:
            assert len(before) == 1
            assert before != "0"
            assert not -3 <= int(exponent) < 7
        else:
            assert number == 0 or 1e-3 <= abs(number) < 1e7
        shortest = repr(number).lstrip("-").partition("e")[0].replace(".", "").strip("0") or "0"
        found = digits.replace(".", "").strip("0") or "0"
        assert len(found) <= max(len(shortest), 2)  # 4.9E-324: Java wants two digits, and then the nearest


@PATIENT
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_floats_read_back_as_the_same_float(numbers):
    for number, text in zip(numbers, one(pa.array(numbers, pa.float32())), strict=True):
        assert pa.scalar(float(text), pa.float32()).as_py() == number
        assert len(text.partition("E")[0].replace(".", "").lstrip("-0")) <= 9


def test_every_half_is_written_as_its_float():
    import numpy as np

    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)]
    assert one(pa.array(halves)) == one(pa.array(halves.astype(np.float32)))
    assert one(pa.array(np.array([np.nan, np.inf, -np.inf], np.float16))) == ['"NaN"', '"Infinity"', '"-Infinity"']


@PATIENT
@given(st.data())
def test_decimals_are_written_as_javas_bigdecimal(data):
    """Python's Decimal follows the same rules, from the same specification."""
    kind = data.draw(st.sampled_from([pa.decimal32, pa.decimal64, pa.decimal128, pa.decimal256]))
    most = {pa.decimal32: 9, pa.decimal64: 18, pa.decimal128: 38, pa.decimal256: 76}[kind]
    precision = data.draw(st.integers(1, most))
    scale = data.draw(st.integers(-5, precision))
    units = data.draw(st.lists(st.integers(-(10**precision) + 1, 10**precision - 1), min_size=1))
    units += [0, 1, -(10**precision) + 1]
    width = kind(precision, scale).byte_width
    raw = pa.py_buffer(b"".join(unit.to_bytes(width, "little", signed=True) for unit in units))
    cells = [Decimal((n < 0, tuple(map(int, str(abs(n)))), -scale)) for n in units]
    found = one(pa.Array.from_buffers(kind(precision, scale), len(units), [None, raw]))
    assert found == [str(cell) for cell in cells]


@pytest.mark.parametrize("scale", [-(2**31), -(2**31) + 1, 2**31 - 1])
@pytest.mark.parametrize("kind", [pa.decimal32, pa.decimal128, pa.decimal256])
def test_the_exponent_of_a_decimal_does_not_overflow(kind, scale):
    width = kind(2, scale).byte_width
    raw = pa.py_buffer(b"".join(unit.to_bytes(width, "little", signed=True) for unit in (1, -42, 0)))
    cells = [Decimal((0, (1,), -scale)), Decimal((1, (4, 2), -scale)), Decimal((0, (0,), -scale))]
    assert one(pa.Array.from_buffers(kind(2, scale), 3, [None, raw])) == [str(cell) for cell in cells]


# ---- text


def test_text_is_escaped_wherever_the_character_is():
    cells = ["x" * size for size in range(40)]
    for special in ('"', "\\", "\n", "\x00", "\x1f", "\x7f", "é", "漢", "😀", " ", "\u2028"):
        for size in range(1, 27):
            cells += ["x" * at + special + "y" * (size - at - 1) for at in range(size)]
            cells.append(special * size)
    jackson = {char: f"\\u{ord(char):04X}" for char in map(chr, range(0x20))}
    jackson |= {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f", '"': '\\"', "\\": "\\\\"}
    wanted = ['"' + "".join(jackson.get(char, char) for char in cell) + '"' for cell in cells]
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        assert one(pa.array(cells, kind)) == wanted
    assert [json.loads(text) for text in wanted] == cells


INVALID = [b"\x80", b"a\xff", b"\xc3", b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xe0\x9f\xbf", b"\xed\xa0\x80"]
INVALID += [
    b"\xe2\x82",
    b"\xf0\x8f\xbf\xbf",
    b"\xf4\x90\x80\x80",
    b"\xf5\x80\x80\x80",
    b"\xf0\x9f\x98",
    b"12345678\xfe",
]
INVALID += [b'"\x80', b"\xc3\xa9\xe9abcdefgh", b"\xf8\x88\x80\x80\x80"]


@pytest.mark.parametrize("wrong", INVALID)
def test_text_that_is_no_utf8_fails_its_row_only(wrong):
    with pytest.raises(UnicodeDecodeError):
        wrong.decode()
    cells = pa.array([b"good", wrong, "ä".encode()]).view(pa.string())
    batch = pa.record_batch([pa.array([1, 2, 3]), cells], ["n", "text"])
    with pytest.raises(ValueError, match="row 1 has text that is no UTF-8 in column 'text': b'"):
        Json().encode(batch)
    column = Json().encode_column(batch, "value", 70)
    assert [column[0], column[2]] == [b'{"n":1,"text":"good"}', '{"n":3,"text":"ä"}'.encode()]
    assert list(column.bad) == [1]
    with pytest.raises(ValueError, match="value at index 71 has text that is no UTF-8 in column 'text'"):
        column[1]


@PATIENT
@given(st.binary(max_size=24))
def test_text_is_accepted_if_python_reads_it(content):
    column = Json().encode_column(pa.record_batch([pa.array([content]).view(pa.string())], ["c"]))
    try:
        content.decode()
    except UnicodeDecodeError:
        assert list(column.bad) == [0]
    else:
        assert json.loads(column[0])["c"] == content.decode()


def test_a_long_text_makes_the_output_grow():
    long = '"' * 300_000
    assert one(pa.array([long, "x" * 1_000_000])) == [json.dumps(long), json.dumps("x" * 1_000_000)]


# ---- times


def test_days_from_the_first_to_the_last_that_python_knows():
    days = [*range(-719_162, 2_932_897, 97), -719_162, 2_932_896, *range(-1000, 1000)]
    wanted = [f'"{EPOCH + dt.timedelta(days=day)}"' for day in days]
    assert one(pa.array(days, pa.int32()).view(pa.date32())) == wanted
    milliseconds = [day * 86_400_000 + 86_399_999 for day in days]
    assert one(pa.array(milliseconds, pa.int64()).view(pa.date64())) == wanted


@pytest.mark.parametrize("digits", range(10))
def test_a_timestamp_has_as_many_digits_as_asked_for(digits):
    nanoseconds = pa.array([1_700_000_000_123_456_789, -1], pa.int64()).view(pa.timestamp("ns", "UTC"))
    point = "." if digits else ""
    assert one(nanoseconds, fraction=digits) == [
        f'"2023-11-14T22:13:20{point}{"123456789"[:digits]}Z"',
        f'"1969-12-31T23:59:59{point}{"999999999"[:digits]}Z"',
    ]
    seconds = pa.array([5], pa.int64()).view(pa.timestamp("s"))
    assert one(seconds, fraction=digits) == [f'"1970-01-01T00:00:05{point}{"0" * digits}"']


@pytest.mark.parametrize("name", ["Europe/Berlin", "America/New_York", "Africa/Casablanca", "Pacific/Apia", "+05:30"])
def test_a_zone_has_the_offsets_that_zoneinfo_has(name):
    source = random.Random(3)
    seconds = [source.randrange(-5_000_000_000, 12_000_000_000) for _ in range(3000)]
    table = zone_of(name)
    if table[1] is not None:  # around every change that it has
        seconds += [int(start) + d for start in table[1] for d in (-1, 0, 1)]
    texts = one(pa.array(seconds, pa.int64()).view(pa.timestamp("s", "UTC")), timezone=name, fraction=0)
    zone = dt.timezone(dt.timedelta(hours=5, minutes=30)) if name[0] == "+" else zoneinfo.ZoneInfo(name)
    wanted = [dt.datetime.fromtimestamp(second, zone).isoformat().replace("+00:00", "Z") for second in seconds]
    assert [text.strip('"') for text in texts] == wanted


def test_rules_of_a_zone_go_on_after_400_years():
    summer = [dt.datetime(year, 7, 1, tzinfo=dt.UTC) for year in (2450, 2999, 9000)]
    texts = one(pa.array(summer, pa.timestamp("s", "UTC")), timezone="Europe/Berlin")
    assert [text[-7:-1] for text in texts] == ["+02:00"] * 3


def test_a_time_that_no_calendar_has_fails_its_row_only():
    times = pa.array([0, 2**62, -(2**62)], pa.int64())
    batch = pa.record_batch([times.view(pa.timestamp("s"))], ["when"])
    column = Json().encode_column(batch)
    assert column[0] == b'{"when":"1970-01-01T00:00:00.000"}'
    assert {row: str(error) for row, error in column.bad.items()} == {
        1: f"value at index 1 has a time that cannot be written in column 'when': {2**62}",
        2: f"value at index 2 has a time that cannot be written in column 'when': {-(2**62)}",
    }
    late = pa.record_batch([pa.array([86_400], pa.int32()).view(pa.time32("s"))], ["at"])
    with pytest.raises(ValueError, match="row 0 has a time that cannot be written in column 'at': 86400"):
        Json().encode(late)


def test_intervals_are_written_as_spark_writes_calendar_intervals():
    parts = [(14, 25, 18_367_800_000_000), (0, 0, 0), (-1, -2, -1_500_000_000), (0, 0, 1), (12, 0, 0)]
    assert one(pa.array([pa.MonthDayNano(part) for part in parts])) == [
        '"1 years 2 months 25 days 5 hours 6 minutes 7.8 seconds"',
        '"0 seconds"',
        '"-1 months -2 days -1.5 seconds"',
        '"0.000000001 seconds"',
        '"1 years"',
    ]


# ---- maps, dictionaries, runs, extensions


def test_keys_of_maps_are_the_text_of_what_spark_has_in_memory():
    day = dt.datetime(2020, 1, 1)
    keys = {
        pa.date32(): (dt.date(2020, 1, 1), "18262"),
        pa.date64(): (dt.date(2020, 1, 1), "18262"),
        pa.timestamp("s"): (day, "1577836800000000"),
        pa.timestamp("ms"): (day, "1577836800000000"),
        pa.timestamp("ns", "UTC"): (day, "1577836800000000"),
        pa.duration("s"): (dt.timedelta(0), "0"),
        pa.duration("ms"): (dt.timedelta(seconds=-2), "-2000000"),
        pa.binary(): (b"abc", "YWJj"),
        pa.float64(): (1e10, "1.0E10"),
        pa.float32(): (float("nan"), "NaN"),
        pa.bool_(): (True, "true"),
        pa.uint64(): (2**64 - 1, str(2**64 - 1)),
        pa.time64("us"): (dt.time(1, 2, 3, 500_000), "01:02:03.5"),
        pa.string(): ('a"', 'a\\"'),
    }
    for kind, (key, text) in keys.items():
        assert one(pa.array([[(key, None)]], pa.map_(kind, pa.int64()))) == [f'{{"{text}":null}}']


def test_a_null_key_fails_its_row_only():
    keys = pa.DictionaryArray.from_arrays(pa.array([0, 1], pa.int8()), pa.array(["a", None]))
    maps = pa.MapArray.from_arrays(pa.array([0, 1, 2], pa.int32()), keys, pa.array([1, 2]))
    column = Json().encode_column(pa.record_batch([maps], ["m"]))
    assert column[0] == b'{"m":{"a":1}}'
    assert str(column.bad[1]) == "value at index 1 has a null for a key in the map 'm'"


def test_dictionaries_and_runs_are_written_as_their_values():
    values = pa.array(["a", None, 'b"'])
    indices = pa.array([2, 0, None, 1, 2], pa.uint8())
    assert one(pa.DictionaryArray.from_arrays(indices, values)) == ['"b\\""', '"a"', "null", "null", '"b\\""']
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 5], pa.int16()), pa.array([1.5, None, 2.5]))
    assert one(runs[1:]) == ["1.5", "null", "2.5", "2.5"]
    uuid = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)], pa.binary(16)))
    assert one(uuid) == ['"AAAAAAAAAAAAAAAAAAAAAA=="']


# ---- the encoder itself

ROWS = pa.record_batch({"a": [1, None], "b": ["x", "y"], "c": [True, False]})


def test_columns_are_chosen_and_left_out():
    assert Json(["c", "a"]).encode(ROWS).to_pylist() == [b'{"c":true,"a":1}', b'{"c":false}']
    assert Json(exclude=["b"]).encode(ROWS).to_pylist() == [b'{"a":1,"c":true}', b'{"c":false}']
    assert Json(["a", "b"], ["b"], nulls=True).encode(ROWS).to_pylist() == [b'{"a":1}', b'{"a":null}']


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"columns": ["z"]}, r"there is no column 'z'; the columns are \['a', 'b', 'c'\]"),
        ({"exclude": ["z"]}, "there is no column 'z'"),
        ({"columns": ["a", "a"]}, "column 'a' is asked for twice"),
        ({"exclude": ["a", "b", "c"]}, "no column is left"),
    ],
)
def test_names_that_do_not_fit_are_refused(options, what):
    for call in (Json(**options).encode, lambda batch: Json(**options).check(batch.schema)):
        with pytest.raises(ValueError, match=what):
            call(ROWS)


def test_options_that_make_no_sense_are_refused():
    with pytest.raises(TypeError, match=r"columns must be a list of names, not a str: write columns=\['a'\]"):
        Json("a")
    with pytest.raises(ValueError, match="fraction must be a number of digits from 0 to 9, not 10"):
        Json(fraction=10)
    for zone in ("Mars/Olympus", "", "+19:00", "../etc/passwd"):
        with pytest.raises(ValueError, match="timezone"):
            Json(timezone=zone)
    with pytest.raises(TypeError, match="expected an Arrow RecordBatch or Table, not list"):
        Json().encode([{"a": 1}])


def test_types_without_text_are_refused_by_name():
    union = pa.schema([pa.field("u", pa.dense_union([pa.field("x", pa.int64())]))])
    with pytest.raises(TypeError, match="column 'u' is a union"):
        Json().check(union)
    keyed = pa.schema([pa.field("m", pa.map_(pa.struct([("x", pa.int64())]), pa.int64()))])
    with pytest.raises(TypeError, match="column 'm' is a map whose keys are lists, maps or structs"):
        Json().check(keyed)
    Json(exclude=["u"]).check(union.append(pa.field("v", pa.int64())))


def test_an_encoder_is_a_value():
    encoder = Json(["a"], nulls=True, timezone="Europe/Berlin")
    assert pickle.loads(pickle.dumps(encoder)) == encoder
    assert {encoder: 1}[Json(("a",), nulls=True, timezone="Europe/Berlin")] == 1
    assert encoder != Json(["a"])
    assert isinstance(encoder, Encoder)
    assert repr(encoder) == "Json(columns=('a',), exclude=None, nulls=True, timezone='Europe/Berlin', fraction=3)"


def test_names_are_escaped_and_may_be_long_or_doubled():
    names = ['we"ird\n', "x" * 31, "é" * 40, "same", "same"]
    batch = pa.RecordBatch.from_arrays([pa.array([n]) for n in range(5)], names=names)
    text = Json().encode(batch)[0].as_py()
    assert json.loads(text, object_pairs_hook=list) == list(zip(names, range(5), strict=True))


def test_a_batch_without_rows_or_columns():
    assert Json().encode(ROWS.slice(0, 0)).to_pylist() == []
    assert Json().encode(pa.table({"a": pa.array([], pa.int64())})).to_pylist() == []
    nothing = pa.array([{}, {}], pa.struct([]))
    assert Json().encode(pa.record_batch([nothing], ["s"])).to_pylist() == [b'{"s":{}}'] * 2


def test_what_other_libraries_have_is_encoded_too():
    polars = pytest.importorskip("polars")
    frame = polars.DataFrame(
        {"a": [1, None], "s": ["x", "é"], "k": polars.Series(["u", "v"], dtype=polars.Categorical)}
    )
    assert Json().encode(frame).to_pylist() == [b'{"a":1,"s":"x","k":"u"}', '{"s":"é","k":"v"}'.encode()]


def test_the_encoded_array_keeps_its_memory():
    parts = [Json().encode(ROWS) for _ in range(50)]
    array = parts[0].slice(1)
    del parts
    assert array.to_pylist() == [b'{"b":"y","c":false}']
    array.validate(full=True)
