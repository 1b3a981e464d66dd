"""Rows of an RDD as columns: what `partition_writer` needs to hand over many records at once."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from operator import itemgetter
from typing import Any

from fastprod import _bulk
from fastprod._core._columns import Column
from fastprod.priority.levels import is_whole, level_topics
from fastprod.spark._columns import COLUMNS, fields
from fastprod.spark._once import claim
from fastprod.spark._priority import so_far, wanted
from fastprod.spark._sink import ExportError, Sink
from fastprod.spark._worker import Task, in_task

__all__ = ["PartitionWriter", "write_rows"]

Columns = dict[str, Sequence[Any]]  # those of COLUMNS that the rows have

FIELDS = frozenset(COLUMNS)
TEXT = (bytes, str, bytearray, memoryview)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MS = timedelta(milliseconds=1)


class PartitionWriter:
    """What `partition_writer` returns: writes the rows of a partition.

    For exactly once the job must be claimed, with its number of partitions, before the first task runs. Nobody tells
    this function its RDD; but Spark pickles it, on the driver, in a method of that RDD.
    """

    def __init__(self, sink: Sink, chunk: int) -> None:
        self.sink = sink
        self.chunk = chunk

    def __call__(self, rows: Iterable[Any]) -> Iterator[Any]:
        return write_rows(self.sink, rows, self.chunk)

    def __reduce__(self) -> tuple[Any, ...]:
        sink = self.sink
        if sink.job is not None and sink.claim is None:
            sink = claim(replace(sink, partitions=_partitions_of_the_rdd()))
        return PartitionWriter, (sink, self.chunk)


def _partitions_of_the_rdd() -> int:
    """Of the RDD in one of whose methods this is called."""
    from pyspark import RDD

    frame = sys._getframe()
    while frame is not None:
        rdd = frame.f_locals.get("self")
        if isinstance(rdd, RDD):
            return int(rdd.getNumPartitions())
        frame = frame.f_back  # type: ignore[assignment]
    raise ValueError(
        "partition_writer cannot see how many partitions the RDD has, which exactly_once must know before the job "
        "starts; give partitions=rdd.getNumPartitions()"
    )


def write_rows(sink: Sink, rows: Iterable[Any], chunk: int) -> Iterator[Any]:
    """Writes one partition of an RDD and yields its TaskReport."""
    source = iter(rows)
    # What made the rows may have read less than all of its input, as take() does.
    parts = iter(lambda: list(islice(source, chunk)), [])
    yield in_task(sink, parts, lambda task, part: _hand_over(task, part, sink), may_stop=True)


def _hand_over(task: Task, rows: list[Any], sink: Sink) -> None:
    columns = _columns(rows, sink.priority)
    if sink.priority is not None:
        _name_topics(rows, columns, sink)
    for name in ("value", "key"):
        _check_text(rows, columns, name)
    for name in ("partition", "headers", "timestamp"):
        if all(cell is None for cell in columns.get(name, ())):
            columns.pop(name, None)  # a column that no row fills need not be looked at
    _check_timestamps(columns)
    if "headers" in columns:
        # A tuple as the first element would pass for headers that are the same for all records.
        columns["headers"] = [list(cell) if isinstance(cell, tuple) else cell for cell in columns["headers"]]
    for topic, part in _by_topic(rows, columns, task.topic):
        get = part.get
        if not task.look(_blocks(part, None if task.topic is not None else topic)):
            continue
        receipt = task.producer.produce_many(
            topic,
            get("value"),
            get("key"),
            get("partition"),
            get("headers"),
            get("timestamp"),
            receipt=task.receipt(topic),
        )
        task.produced(topic, receipt)


def _blocks(columns: Columns, topic: str | None) -> Iterator[_bulk.Block]:
    """The same rows for the fingerprint; a topic that rows have named is part of them."""
    get = columns.get
    values = columns["value"]
    for block in _bulk.blocks_of_columns(values, get("key"), get("partition"), get("headers"), get("timestamp")):
        yield (*block[:2], None if topic is None else Column([topic] * len(values), "topic"), *block[3:])


def _columns(rows: list[Any], priority: str | None = None) -> Columns:
    """Rows of one shape are turned around as a whole, a mixture one by one."""
    kinds = set(map(type, rows))
    if all(issubclass(kind, TEXT) for kind in kinds):
        return {"value": rows}
    if all(issubclass(kind, (tuple, list)) for kind in kinds):
        shapes = {(_names(row), len(row)) for row in rows}
        if len(shapes) == 1:
            names = _names(rows[0]) or (("key", "value") if len(rows[0]) == 2 else ())
            known = _known(names, rows[0], priority)
            if "value" in known:
                return {name: list(map(itemgetter(names.index(theirs)), rows)) for name, theirs in known.items()}
    found = [_fields(row, priority) for row in rows]
    filled = dict.fromkeys(name for one in found for name in one)
    return {name: [one.get(name) for one in found] for name in filled}


def _names(row: Any) -> tuple[str, ...]:
    """The fields of a pyspark.sql.Row or a named tuple."""
    return tuple(getattr(row, "__fields__", None) or getattr(row, "_fields", None) or ())


def _known(names: tuple[Any, ...], row: Any, priority: str | None) -> dict[str, str]:
    """The fields that count, each with the name that it has in the row."""
    try:
        return fields(names, priority)
    except ValueError as problem:
        raise ExportError(f"{problem}: row {_shown(row)}") from None


def _fields(row: Any, priority: str | None) -> Mapping[str, Any]:
    """A row as a dict."""
    if isinstance(row, TEXT):
        return {"value": row}
    found: Mapping[str, Any] | None = None
    if isinstance(row, Mapping):
        found = row
    elif names := _names(row):
        found = dict(zip(names, row, strict=False))
    elif isinstance(row, (tuple, list)) and len(row) == 2:
        found = {"key": row[0], "value": row[1]}
    if found is None:
        raise ExportError(
            f"cannot write {_shown(row)}: a row is bytes or str (the value), a (key, value) tuple, or a dict, Row or "
            f"named tuple with the fields {', '.join(COLUMNS)}"
        )
    if not FIELDS.issuperset(found):
        found = {name: found[theirs] for name, theirs in _known(tuple(found), row, priority).items()}
    if "value" not in found:
        raise ExportError(f"row {_shown(row)} has no field 'value'; the fields that count are {', '.join(COLUMNS)}")
    return found


def _check_text(rows: list[Any], columns: Columns, name: str) -> None:
    if all(issubclass(kind, (*TEXT, type(None))) for kind in set(map(type, columns.get(name, ())))):
        return
    for row, cell in zip(rows, columns[name], strict=True):
        if cell is not None and not isinstance(cell, TEXT):
            raise ExportError(f"field {name!r} must be bytes or str, not {type(cell).__name__}, in row {_shown(row)}")


def _check_timestamps(columns: Columns) -> None:
    """Rows of a DataFrame have datetimes, in local time unless they say otherwise."""
    if any(isinstance(cell, datetime) for cell in columns.get("timestamp", ())):
        columns["timestamp"] = [
            (cell.astimezone(UTC) - EPOCH) // MS if isinstance(cell, datetime) else cell
            for cell in columns["timestamp"]
        ]


def _topics(rows: list[Any], columns: Columns) -> Sequence[str]:
    """The topics that rows name, taken out of the columns."""
    named = columns.pop("topic", None) or [None] * len(rows)
    for row, name in zip(rows, named, strict=True):
        if not isinstance(name, str):
            raise ExportError(
                f"no topic for row {_shown(row)}; fill its field 'topic' with a name, or give topic=..., which beats it"
            )
    return named


def _name_topics(rows: list[Any], columns: Columns, sink: Sink) -> None:
    """Puts Kafka's topics into the column, in place of logical ones, once all priorities are found right."""
    assert sink.priority is not None
    priorities = columns.get(sink.priority) or [None] * len(rows)
    for row, priority in zip(rows, priorities, strict=True):
        if not is_whole(priority) or not 0 <= priority < sink.levels:
            raise ExportError(
                f"field {sink.priority!r} is {priority!r} in row {_shown(row)}: {wanted(sink.levels)}. {so_far(sink)}"
            )
    topics = [sink.topic] * len(rows) if sink.topic is not None else _topics(rows, columns)
    names = {topic: level_topics(topic, sink.levels) for topic in dict.fromkeys(topics)}
    columns["topic"] = [names[topic][priority] for topic, priority in zip(topics, priorities, strict=True)]


def _by_topic(rows: list[Any], columns: Columns, topic: str | None) -> Iterator[tuple[str, Columns]]:
    """Topics, and what goes there."""
    if topic is not None:
        columns.pop("topic", None)
        yield topic, columns
        return
    named = _topics(rows, columns)
    for name in dict.fromkeys(named):
        mine = [index for index, other in enumerate(named) if other == name]
        if len(mine) == len(rows):
            yield name, columns
        else:
            yield name, {field: [column[index] for index in mine] for field, column in columns.items()}


def _shown(row: Any) -> str:
    text = repr(row)
    return text if len(text) < 80 else f"{text[:80]}..."
