"""Which columns count: case does not, as ever in Spark, unless it is told otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

__all__ = ["COLUMNS", "arrow_schema", "fields", "lowered", "matches", "named", "schema_of"]

COLUMNS = ("key", "value", "topic", "partition", "headers", "timestamp")
SENSITIVE = "spark.sql.caseSensitive"


def matches(names: Iterable[Any], what: str = "columns", priority: str | None = None) -> dict[str, str]:
    """Those of COLUMNS that are there, each with the name it has there. Two that differ only by case are refused.

    `priority`, in lower case, is one more.
    """
    found: dict[str, str] = {}
    for name in names:
        known = name.lower() if isinstance(name, str) else ""
        if known in found:
            raise ValueError(
                f"{what} {found[known]!r} and {name!r} both stand for {known!r}, since case does not count; "
                "rename or drop one"
            )
        if known in COLUMNS or known == priority:
            found[known] = name
    return found


def _counted(schema: StructType, topic: str | None, priority: str | None) -> list[str]:
    """Names that could count; a topic that is given beats the column."""
    return [name for name in schema.names if topic is None or name.lower() != "topic" or priority == "topic"]


def named(df: DataFrame, topic: str | None, priority: str | None = None) -> tuple[DataFrame, str | None]:
    """The same rows under the names that count, and the name of the column of priorities among them.

    With spark.sql.caseSensitive only exact names do.
    """
    if str(df.sparkSession.conf.get(SENSITIVE, "false")).lower() == "true":
        return df, priority
    priority = priority and priority.lower()
    for known, name in matches(_counted(df.schema, topic, priority), priority=priority).items():
        if name != known:
            df = df.withColumnRenamed(name, known)
    return df, priority


def arrow_schema(schema: StructType) -> pa.Schema:
    """The columns as Spark hands them to Python. Raises TypeError for one of a type that it cannot."""
    import pyarrow as pa

    doubled = {name for name in schema.names if schema.names.count(name) > 1}
    if doubled:
        raise ValueError(f"there is more than one column {min(doubled)!r}; rename or drop one")
    return pa.schema([pa.field(part.name, _arrow_type(part.dataType, part.name)) for part in schema])


def _arrow_type(kind: DataType, name: str) -> pa.DataType:
    """pyspark has such a function, but another one in every version."""
    import pyarrow as pa
    from pyspark.sql import types as t

    plain = {
        t.BooleanType: pa.bool_(),
        t.ByteType: pa.int8(),
        t.ShortType: pa.int16(),
        t.IntegerType: pa.int32(),
        t.LongType: pa.int64(),
        t.FloatType: pa.float32(),
        t.DoubleType: pa.float64(),
        t.BinaryType: pa.binary(),
        t.DateType: pa.date32(),
        t.TimestampType: pa.timestamp("us", "UTC"),
        t.TimestampNTZType: pa.timestamp("us"),
        t.DayTimeIntervalType: pa.duration("us"),
        t.NullType: pa.null(),
    }
    if isinstance(kind, t.StringType):  # or one with a length
        return pa.string()
    if isinstance(kind, t.DecimalType):
        return pa.decimal128(kind.precision, kind.scale)
    if isinstance(kind, t.ArrayType):
        return pa.list_(_arrow_type(kind.elementType, name))
    if isinstance(kind, t.MapType):
        return pa.map_(_arrow_type(kind.keyType, name), _arrow_type(kind.valueType, name))
    if isinstance(kind, t.StructType):
        return pa.struct([pa.field(part.name, _arrow_type(part.dataType, name)) for part in kind])
    if type(kind) not in plain:
        raise TypeError(f"column {name!r} is {kind.simpleString()}, which has no encoding; cast it or leave it out")
    return plain[type(kind)]


def schema_of(schema: StructType, topic: str | None, priority: str | None = None) -> tuple[StructType, dict[str, str]]:
    """The same for a schema alone, and what `matches` says. The session, which knows about case, is out of reach."""
    from pyspark.sql.types import StructField, StructType

    found = matches(_counted(schema, topic, priority), priority=priority)
    ours = {name: known for known, name in found.items()}
    parts = [
        StructField(ours.get(part.name, part.name), part.dataType, part.nullable, part.metadata) for part in schema
    ]
    return StructType(parts), found


def lowered(batch: pa.RecordBatch, columns: list[str]) -> pa.RecordBatch:
    """Some columns of a batch, under the names that count."""
    chosen = batch.select(columns)
    names = [name.lower() for name in columns]
    return chosen if names == columns else type(chosen).from_arrays(chosen.columns, names=names)


@lru_cache(64)
def fields(names: tuple[Any, ...], priority: str | None = None) -> dict[str, str]:
    """`matches` for the fields of rows, of which many have the same."""
    return matches(names, "fields", priority)
