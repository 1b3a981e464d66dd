"""Driver side: checks that a DataFrame can be written before a task starts, naming the column that is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fastprod._java_options import translate
from fastprod.spark._check import check as check_first
from fastprod.spark._columns import COLUMNS
from fastprod.spark._once import with_transactions
from fastprod.spark._worker import Sink

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

__all__ = ["plan", "sink", "used_columns"]

JOB_ID = re.compile(r"[A-Za-z0-9._-]{1,200}")


def used_columns(schema: StructType, topic: str | None) -> list[str]:
    """The columns that count, so that Spark need not encode the others."""
    return [name for name in COLUMNS if name in schema.names and (name != "topic" or topic is None)]


def plan(
    schema: StructType,
    topic: str | None,
    config: Mapping[str, Any] | None,
    exactly_once: str | None = None,
    job_id: str | None = None,
    *,
    stream: bool = False,
    check: bool = True,
) -> Sink:
    """What the executors need to know to write a DataFrame, checked."""
    _check_columns(schema, topic)
    return sink(topic, config, exactly_once, job_id, stream=stream, check=check)


def sink(
    topic: str | None,
    config: Mapping[str, Any] | None,
    exactly_once: str | None = None,
    job_id: str | None = None,
    *,
    stream: bool = False,
    check: bool = True,
) -> Sink:
    """The same without columns."""
    settings = translate(config or {})
    if not settings.get("bootstrap.servers") and not settings.get("metadata.broker.list"):
        raise ValueError('the config has no "bootstrap.servers"; give config={"bootstrap.servers": "host:9092", ...}')
    if topic is not None and (not isinstance(topic, str) or not topic):
        raise ValueError(f"topic is a name, not {topic!r}")
    job = _job(exactly_once, job_id, settings, stream)
    check_first(settings if job is None else with_transactions(settings, "fastprod.check"), topic, brokers=check)
    return Sink(settings, topic, job)


def _job(exactly_once: str | None, job_id: str | None, config: Mapping[str, Any], stream: bool) -> str | None:
    if exactly_once is None:
        if job_id is not None:
            raise ValueError(f'job_id={job_id!r} has no effect without exactly_once="task"')
        return None
    if exactly_once != "task":
        raise ValueError(f'exactly_once is "task" or None, not {exactly_once!r}')
    if stream and job_id is None:
        job_id = "stream"  # Spark tells a query from all others
    if not job_id or not JOB_ID.fullmatch(job_id):
        raise ValueError(
            f'exactly_once="task" needs job_id=..., not {job_id!r}: 1 to 200 letters, digits, ".", "_" or "-" that '
            "name this export and stay the same when it is submitted again"
        )
    if "transactional.id" in config:
        raise ValueError("exactly_once chooses the transactional.id of each task; take it out of the config")
    return job_id


def _check_columns(schema: StructType, topic: str | None) -> None:
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
    for name in used_columns(schema, topic):
        fits, description = wanted[name]
        kind = schema[name].dataType
        if not fits(kind):
            raise TypeError(f"column {name!r} must be {description}, not {kind.simpleString()}")
