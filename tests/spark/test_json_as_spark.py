"""`Json` writes what Spark's own `to_json(struct(*))` writes for the same rows, byte for byte.

Spark is slow to ask and hypothesis asks often, so frames are made first and Spark is asked for many of them at once:
every frame is a column of structs in one wide table. A Python worker hands the rows to Spark's JVM, as Arrow.

One difference is allowed, and only where it shows: before JDK 19, Java writes some floating-point numbers with a digit
too many (JDK-4511638), such as 2.0E23 as 1.9999999999999998E23.
"""

from __future__ import annotations

import datetime as dt
import decimal
import json
import re
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import arrow_frames
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from programs import LONG

from fastprod.encoding import Json

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Types that Spark takes from Arrow as they are; not float16, unsigned integers, views and the like
PLAIN = [
    pa.null(),
    pa.bool_(),
    *arrow_frames.INTEGERS,
    pa.float32(),
    pa.float64(),
    *arrow_frames.TEXTS,
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", "UTC"),
    pa.duration("us"),
    pa.decimal128(38, 10),
    pa.decimal128(38, 38),
    pa.decimal128(9, 2),
    pa.decimal128(18, 0),
]
SETTINGS = {"spark.sql.session.timeZone": "UTC", "spark.sql.timestampType": "TIMESTAMP_NTZ"}
NUMBER = re.compile(r'(?<=[\[:,{"])-?\d+\.\d+(?:E-?\d+)?(?=[\],}"])')


@pytest.fixture(autouse=True)
def session(spark: SparkSession) -> Iterator[None]:
    """Arrow's timestamps without zone are Spark's without zone, and the zone of the session is known."""
    before = {name: spark.conf.get(name) for name in SETTINGS}
    for name, value in SETTINGS.items():
        spark.conf.set(name, value)
    yield
    for name, old in before.items():
        spark.conf.set(name, old)


def asked(spark: SparkSession, columns: dict[str, Any], **options: str) -> dict[str, list[str]]:
    """What Spark writes for each of some arrays of structs of one length."""
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema

    names = list(columns)
    # to_json of a null struct is null, so that an array may be shorter than the table
    most = max(len(array) for array in columns.values())
    padded = [pa.concat_arrays([array, pa.nulls(most - len(array), array.type)]) for array in columns.values()]
    batch = compact(pa.RecordBatch.from_arrays(padded, names=names))
    if any(pa.types.is_dictionary(array.type.field(0).type) for array in columns.values()):
        frame = spark.createDataFrame(pa.Table.from_batches([batch]))
    else:
        schema = from_arrow_schema(batch.schema, prefer_timestamp_ntz=True)
        frame = spark.range(1, numPartitions=1).mapInArrow(lambda _: [batch], schema)
    rows = frame.select(*(F.to_json(F.col(f"`{name}`"), dict(options)).alias(name) for name in names)).collect()
    return {name: [row[name] for row in rows][: len(columns[name])] for name in names}


def compact(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Without slices, so that Spark gets only what it should see."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return pa.ipc.open_stream(sink.getvalue()).read_next_batch()


def same(ours: str, theirs: str) -> bool:
    """Equal but for floating-point numbers that Java writes with more digits than are needed."""
    if ours == theirs:
        return True
    if NUMBER.sub("#", ours) != NUMBER.sub("#", theirs):
        return False
    numbers = zip(NUMBER.findall(ours), NUMBER.findall(theirs), strict=True)
    return all(mine == its or equal(mine, its) for mine, its in numbers)


def equal(mine: str, its: str) -> bool:
    """Whether both are the same number, as a double or a float, and its digits are really other ones."""
    if len(mine) > len(its) or mine.rstrip("0.") == its.rstrip("0."):
        return False
    narrow = [struct.pack("f", float(text)) for text in (mine, its) if abs(float(text)) < 3.5e38]
    return float(mine) == float(its) or (len(narrow) == 2 and narrow[0] == narrow[1])


def encoded(array: Any, **options: Any) -> list[str]:
    batch = pa.RecordBatch.from_struct_array(array)
    return [row.decode() for row in Json(**options).encode(batch).to_pylist()]


def compare(spark: SparkSession, columns: dict[str, Any], **options: Any) -> int:
    """Asserts equality; returns how many rows differ in digits of floating-point numbers only."""
    asking = {"ignoreNullFields": "false"} if options.get("nulls") else {}
    found, digits = asked(spark, columns, **asking), 0
    for name, array in columns.items():
        for row, (ours, theirs) in enumerate(zip(encoded(array, **options), found[name], strict=True)):
            fits = same(ours, theirs) if re.search("float|double", str(array.type)) else ours == theirs
            assert fits, (ours, theirs, name, row, array.type)
            digits += ours != theirs
    return digits


def single(kind: Any, cells: list[Any]) -> Any:
    """Structs with one field, which has these cells."""
    column = arrow_frames.array_of(cells, kind)
    return pa.StructArray.from_arrays([column], ["c"])


def raw(kind: Any, numbers: list[int]) -> Any:
    bits = pa.int32() if kind == pa.date32() else pa.int64()
    return pa.StructArray.from_arrays([pa.array(numbers, bits).view(kind)], ["c"])


EDGES = [0, 1, -1, 999, 1000, -1000, 123_456, 1_500_000, 86_400_000_000, -86_400_000_001, 2**63 - 1, -(2**63)]
YEARS = [-62_135_596_800_000_000, 253_402_300_799_999_999, 253_402_300_800_000_000, -62_167_219_200_000_001]
DAYS = [0, -1, 59, 789, -719_528, -719_529, -719_928, 2_932_896, 2_932_897, -1_000_000, 2**31 - 1, -(2**31)]
DOUBLES = [0.0, -0.0, 1.0, 100.0, 9_999_999.0, 1e7, 12_345_678.9, 1e-3, 9.99e-4, 0.1 + 0.2, 5e-324, 1e-323, 2**63.0]
DOUBLES += [2.2250738585072014e-308, 1.7976931348623157e308, float("nan"), float("inf"), -float("inf"), 1e21, 123456.5]
UNITS = [0, 1, -1, 10, -10, 123, 99_999, 10**9 - 1, -(10**9 - 1)]


def decimals(precision: int, scale: int) -> Any:
    cells = [decimal.Decimal((n < 0, tuple(map(int, str(abs(n)))), -scale)) for n in [*UNITS, 10**precision - 1]]
    kind = pa.decimal128(precision, scale)
    return single(kind, [cell for cell in cells if len(cell.as_tuple().digits) <= precision])


CASES: dict[str, Any] = {
    "integers": single(pa.int64(), [0, 1, -1, 9, 10, 99, 100, 12_345, 2**63 - 1, -(2**63), None]),
    "bytes": single(pa.int8(), [-128, 127, 0, None]),
    "doubles": single(pa.float64(), DOUBLES),
    "floats": single(pa.float32(), [0.0, 1.0, 1e7, 0.1, 3.4028235e38, 1.4e-45, 16_777_216.0, 1e10, float("nan")]),
    "booleans": single(pa.bool_(), [True, False, None]),
    "controls": single(pa.string(), ["".join(map(chr, range(0x30))), *map(chr, range(0x80))]),
    "text": single(pa.string(), ['"\\/</script>\x7f\x80\u2028\u2029\ufffd\ufeff', "é漢😀", "", "x" * 100 + '"', None]),
    "binary": single(pa.binary(), [bytes(range(n)) for n in range(10)] + [bytes(range(256)), None]),
    **{f"decimal {p} {s}": decimals(p, s) for p, s in ((38, 10), (10, 0), (20, 18), (38, 38), (9, 2), (9, 7), (7, 7))},
    "dates": raw(pa.date32(), DAYS),
    "timestamps": raw(pa.timestamp("us", "UTC"), EDGES + YEARS),
    "timestamps without zone": raw(pa.timestamp("us"), EDGES + YEARS),
    "durations": raw(pa.duration("us"), EDGES),
    "time of day": single(pa.time64("us"), [dt.time(), dt.time(1, 2, 3), dt.time(12, 34, 56, 789_000), dt.time.max]),
    "lists": single(pa.list_(pa.int64()), [[1, None, 2], [], None, [None]]),
    "lists of lists": single(pa.list_(pa.list_(pa.string())), [[["a"], None, []], [], None]),
    "maps": single(pa.map_(pa.string(), pa.int64()), [[("a", 1), ("b\n", None)], [], None]),
    "maps by integer": single(pa.map_(pa.int32(), pa.string()), [[(1, "x"), (-5, None)]]),
    "maps by double": single(pa.map_(pa.float64(), pa.string()), [[(1.5, "x"), (1e10, "y"), (float("nan"), "z")]]),
    "maps by boolean": single(pa.map_(pa.bool_(), pa.string()), [[(True, "x"), (False, None)]]),
    "maps by date": single(pa.map_(pa.date32(), pa.string()), [[(dt.date(2020, 1, 1), "x")]]),
    "maps by timestamp": single(pa.map_(pa.timestamp("us", "UTC"), pa.string()), [[(dt.datetime(2020, 1, 1), "x")]]),
    "maps by decimal": single(pa.map_(pa.decimal128(38, 10), pa.string()), [[(decimal.Decimal("1E-10"), "x")]]),
    "maps by duration": single(pa.map_(pa.duration("us"), pa.string()), [[(1_500_000, "x"), (-1, None)]]),
    "structs": single(
        pa.struct([("a", pa.int64()), ("b", pa.string())]), [{"a": 1, "b": None}, {"a": None, "b": None}, None]
    ),
    "lists of structs": single(pa.list_(pa.struct([("a", pa.int64())])), [[{"a": 1}, {"a": None}, None]]),
    "empty structs": single(pa.struct([]), [{}, None]),
    "nulls only": single(pa.null(), [None, None]),
    "dictionaries": pa.StructArray.from_arrays([pa.array(["a", None, "b", "a"]).dictionary_encode()], ["c"]),
    "names": pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ['we"ird\né', "x" * 100]),
}


@pytest.mark.parametrize("nulls", [False, True])
def test_every_type_is_written_as_spark_writes_it(spark, nulls):
    differ = compare(spark, CASES, nulls=nulls)
    assert differ <= 2  # a subnormal number, before JDK 19


ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kolkata", "+05:30", "-08:00:30", "GMT+2"]
ZONES += ["America/St_Johns", "Australia/Lord_Howe", "Pacific/Apia", "Europe/London"]


def test_timestamps_are_written_in_the_sessions_zone(spark):
    times = [0, 1_600_000_000_123_456, 1_700_000_000_000_000, -5 * 10**15, -(2**62), 4 * 10**15, 3 * 10**16, 2**61]
    hour = 3600 * 10**6
    times += [n * 91 * 24 * hour + 7 * hour // 3 for n in range(-700, 300)]  # about a quarter of a year each
    times += [1_711_846_800_000_000 + n * hour // 2 for n in range(-3, 4)]  # around a change in Berlin
    times += [1_325_203_200_000_000 + n * hour for n in range(-30, 30)]  # Apia left out a day
    array = raw(pa.timestamp("us", "UTC"), times)
    for zone in ZONES if LONG else ZONES[:: len(ZONES) // 4]:
        spark.conf.set("spark.sql.session.timeZone", zone)
        theirs = asked(spark, {"times": array})["times"]
        ours = encoded(array, timezone=zone)
        assert [(zone, a, b) for a, b in zip(ours, theirs, strict=True) if a != b] == []


def frames(count: int) -> list[Any]:
    """Arrays of structs of random types, three deep, whose columns are slices of longer ones."""
    made: list[Any] = []

    @settings(
        database=None,
        deadline=None,
        max_examples=count,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def make(data: st.DataObject) -> None:
        rows, before = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 9))
        columns = []
        for kind in data.draw(st.lists(arrow_frames.types(PLAIN, 3, spark=True), min_size=1, max_size=4)):
            cells = data.draw(st.lists(arrow_frames.values(kind), min_size=rows, max_size=rows))
            columns.append(arrow_frames.array_of([None] * before + cells, kind)[before:])
        made.append(pa.StructArray.from_arrays(columns, [f"c{i}" for i in range(len(columns))]))

    make()
    return made


def test_random_nested_frames_are_written_as_spark_writes_them(spark):
    made = frames(300 if LONG else 120)
    rows = sum(map(len, made))
    differ = 0
    for start in range(0, len(made), 60):
        columns = {f"frame{i}": array for i, array in enumerate(made[start : start + 60], start)}
        differ += compare(spark, columns, nulls=bool(start % 120))
    assert differ < rows / 10  # before JDK 19 some numbers have a digit more


def test_random_doubles_read_back_as_the_same_number(spark):
    """Bit patterns at random: whatever JDK Spark has, it reads our text as its own number."""
    import numpy as np

    numbers = np.random.default_rng(7).integers(0, 2**64, 20_000, dtype=np.uint64).view(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    ours = encoded(single(pa.float64(), numbers.tolist()))
    assert [json.loads(text)["c"] for text in ours] == numbers.tolist()
    from pyspark.sql import functions as F

    frame = spark.createDataFrame(pa.table({"text": [text[5:-1] for text in ours], "number": numbers}))
    assert frame.where(F.col("text").cast("double") != F.col("number")).count() == 0
    theirs = [row[0] for row in frame.select(F.col("number").cast("string")).collect()]
    assert all(len(mine) <= len(its) for mine, its in zip([text[5:-1] for text in ours], theirs, strict=True))
