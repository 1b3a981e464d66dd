"""Driver side: checks that a DataFrame can be written before a task starts, naming the column that is wrong."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastprod._java_options import translate
from fastprod.spark._check import check as check_first
from fastprod.spark._columns import COLUMNS
from fastprod.spark._once import with_transactions
from fastprod.spark._priority import levels_of
from fastprod.spark._sink import BUCKET, Sink

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

__all__ = ["bucketed", "check_columns", "hashable", "plan", "quoted", "sink", "used_columns"]

JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")
MOST_BUCKETS = 10_000
LONG_LAYOUT = 500  # characters
LINGER_MS = 50  # unless told: nobody waits for single rows of a job, whose end ends every linger


def used_columns(schema: StructType, topic: str | None, priority: str | None = None) -> list[str]:
    """The columns that count, so that Spark need not encode the others."""
    found = [name for name in COLUMNS if name in schema.names and (name != "topic" or topic is None)]
    return found if priority is None or priority in found else [*found, priority]


def plan(schema: StructType, topic: str | None, config: Mapping[str, Any] | None, **once: Any) -> Sink:
    """What the executors need to know to write a DataFrame, checked. `once` as for `sink`.

    `shaped`: records are made of whatever columns there are, which is checked elsewhere.
    """
    if not once.pop("shaped", False):
        check_columns(schema, topic, once.get("priority"))
    made = sink(topic, config, **once)
    if once.get("exactly_once") != "bucket":
        return made
    about = schema[BUCKET].metadata if BUCKET in schema.names else {}
    if not {"buckets", "by"} <= about.keys():
        raise ValueError(
            'exactly_once="bucket" needs a DataFrame whose rows know their buckets; make it with '
            'fastprod.spark.bucketed(df, buckets=64, bucket_by=["id"]), as the last step'
        )
    by = ", ".join(about["by"])
    if len(by) > LONG_LAYOUT:  # markers have room for some kilobytes
        by = f"{by[:LONG_LAYOUT]}..., {hashlib.sha256(by.encode()).hexdigest()[:16]}"
    return replace(made, partitions=about["buckets"], layout=f"bucket({by})")


def sink(
    topic: str | None,
    config: Mapping[str, Any] | None,
    *,
    exactly_once: str | None = None,
    job_id: str | None = None,
    batch: int | None = None,
    marker_topic: str | None = None,
    stream: bool = False,
    check: bool = True,
    priority: str | None = None,
    max_priority: int | None = None,
) -> Sink:
    """The same without columns."""
    options = dict(config or {})
    levels = levels_of(priority, max_priority, options)
    settings = translate(options)
    if not settings.get("bootstrap.servers") and not settings.get("metadata.broker.list"):
        raise ValueError('the config has no "bootstrap.servers"; give config={"bootstrap.servers": "host:9092", ...}')
    for name, value in (("topic", topic), ("marker_topic", marker_topic)):
        if value is not None and (not isinstance(value, str) or not value):
            raise ValueError(f"{name} is a name, not {value!r}")
    if not settings.keys() & {"linger.ms", "queue.buffering.max.ms"}:
        settings["linger.ms"] = LINGER_MS
    job = _job(exactly_once, job_id, settings, stream)
    for name, given in (("batch", batch), ("marker_topic", marker_topic)):
        if job is None and given is not None:
            raise ValueError(f"{name}={given!r} has no effect without exactly_once")
    if batch is not None and (not isinstance(batch, int) or batch < 0):
        raise ValueError(f"batch is the number that foreachBatch gives, not {batch!r}")
    check_first(
        settings if job is None else with_transactions(settings, "fastprod.check"),
        topic,
        None if priority is None else levels,
        brokers=check,
    )
    return Sink(settings, topic, job, batch, marker_topic=marker_topic, priority=priority, levels=levels)


def bucketed(df: DataFrame, buckets: int, bucket_by: Sequence[str] | None) -> DataFrame:
    """See fastprod.spark.bucketed."""
    from pyspark.sql import functions as f

    if isinstance(buckets, bool) or not isinstance(buckets, int) or not 1 <= buckets <= MOST_BUCKETS:
        raise ValueError(f"buckets is a number from 1 to {MOST_BUCKETS:,}, not {buckets!r}")
    if isinstance(bucket_by, str):
        raise TypeError(f"bucket_by is a list of columns, [{bucket_by!r}], not a string")
    if bucket_by is not None and not bucket_by:
        raise ValueError("bucket_by names no column; leave it out to take all that are written")
    if not hasattr(df, "repartitionById"):
        raise RuntimeError('exactly_once="bucket" needs pyspark 4.1 or newer, which can place rows by a number')
    written = [name for name in COLUMNS if name in df.columns] if "value" in df.columns else hashable(df.schema)
    by = list(bucket_by) if bucket_by is not None else written
    if bucket_by is None and "headers" in by:
        by.remove("headers")  # maps cannot be hashed
    known = {name.lower() for name in df.columns}
    missing = [name for name in by if name.lower() not in known]
    if missing:
        raise ValueError(f"bucket_by names {missing[0]!r}, but the columns are {df.columns}")
    if BUCKET in df.columns:
        raise ValueError(f"the DataFrame has a column {BUCKET!r} already; drop it first")
    # Spark's xxhash64 is the same in every version and on every cluster, but another one for another type.
    columns = [f.col(quoted(name)) for name in by]
    typed = [f"{part.name.lower()} {part.dataType.simpleString()}" for part in df.select(*columns).schema]
    number = f.pmod(f.xxhash64(*columns), f.lit(buckets)).cast("int")
    about = {"buckets": buckets, "by": typed}
    return df.select("*", number.alias(BUCKET, metadata=about)).repartitionById(buckets, BUCKET)


def hashable(schema: StructType) -> list[str]:
    """Columns that decide about buckets where nobody names any: all but those with maps, which cannot be hashed."""
    found = [part.name for part in schema if part.name != BUCKET and "map<" not in part.dataType.simpleString()]
    return found or schema.names  # whose refusal Spark words itself


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _job(exactly_once: str | None, job_id: str | None, config: Mapping[str, Any], stream: bool) -> str | None:
    if exactly_once is None:
        if job_id is not None:
            raise ValueError(f"job_id={job_id!r} has no effect without exactly_once")
        return None
    if exactly_once not in ("task", "bucket"):
        raise ValueError(f'exactly_once is "task", "bucket" or None, not {exactly_once!r}')
    if stream and job_id is None:
        job_id = "stream"  # Spark tells a query from all others
    if not job_id or not JOB_ID.fullmatch(job_id):
        raise ValueError(
            f'exactly_once="{exactly_once}" needs a job_id, not {job_id!r}: 1 to 200 letters, digits, ".", "_" or "-" '
            "that name this export and stay the same when it is submitted again"
        )
    if "transactional.id" in config:
        raise ValueError("exactly_once chooses the transactional.id of each task; take it out of the config")
    return job_id


def check_columns(schema: StructType, topic: str | None, priority: str | None) -> None:
    from pyspark.sql import types as t

    def text(kind: DataType) -> bool:
        return isinstance(kind, (t.StringType, t.BinaryType))

    def headers(kind: DataType) -> bool:
        if isinstance(kind, t.MapType):
            return isinstance(kind.keyType, t.StringType) and text(kind.valueType)
        return (
            isinstance(kind, t.ArrayType)
            and isinstance(kind.elementType, t.StructType)
            and {"key", "value"} <= set(kind.elementType.names)
            and isinstance(kind.elementType["key"].dataType, t.StringType)
            and text(kind.elementType["value"].dataType)
        )

    integer = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
    wanted: dict[str, tuple[Callable[[DataType], bool], str]] = {
        "value": (text, "string or binary"),
        "key": (text, "string or binary"),
        "topic": (lambda kind: isinstance(kind, t.StringType), "string"),
        "partition": (lambda kind: isinstance(kind, integer), "int"),
        "headers": (headers, "array<struct<key:string,value:binary>> or map<string,binary>"),
        "timestamp": (
            lambda kind: isinstance(kind, (t.TimestampType, t.TimestampNTZType, t.LongType)),
            "timestamp, or bigint of milliseconds since 1970",
        ),
    }
    if "value" not in schema.names:
        raise ValueError(
            f"the DataFrame has no column 'value'; it has {schema.names}. Make one, for example with "
            'df.selectExpr("to_json(struct(*)) AS value")'
        )
    if topic is None and "topic" not in schema.names:
        raise ValueError("no topic: give topic=..., or have a column 'topic'")
    if priority is not None and priority not in schema.names:
        raise ValueError(f"there is no column {priority!r}, which priority names; the columns are {schema.names}")
    for name in used_columns(schema, topic):
        fits, description = wanted[name]
        kind = schema[name].dataType
        if not fits(kind):
            raise TypeError(f"column {name!r} must be {description}, not {kind.simpleString()}")
    if priority is not None and not isinstance(schema[priority].dataType, integer):
        raise TypeError(
            f"column {priority!r} must be an integer type (tinyint, smallint, int, bigint) to have priorities, not "
            f"{schema[priority].dataType.simpleString()}"
        )
