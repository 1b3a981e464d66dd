"""Rows of an RDD as columns: what `partition_writer` needs to hand over many records at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from fastprod.spark._plan import COLUMNS
from fastprod.spark._worker import ExportError, Sink, Task, in_task

__all__ = ["write_rows"]

Fields = tuple[Any, ...]  # in the order of COLUMNS


def write_rows(sink: Sink, rows: Iterable[Any], chunk: int) -> Iterator[Any]:
    """Writes one partition of an RDD and yields its TaskReport."""

    def send(task: Task) -> None:
        source = iter(rows)
        while part := list(islice(source, chunk)):
            for topic, columns in _by_topic(part, sink.topic).items():
                key, value, _, partition, headers, timestamp = columns
                size = sum(len(cell) for column in (key, value) for cell in column if cell is not None)
                receipt = task.producer.produce_many(
                    topic,
                    value,
                    _none_if_empty(key),
                    _none_if_empty(partition),
                    _none_if_empty(headers),
                    _none_if_empty(timestamp),
                )
                task.took(receipt, size)

    yield in_task(sink, send)


def _none_if_empty(column: list[Any]) -> list[Any] | None:
    """A column that no row fills need not be looked at."""
    return column if any(cell is not None for cell in column) else None


def _by_topic(rows: Iterable[Any], topic: str | None) -> dict[str, list[list[Any]]]:
    found: dict[str, list[list[Any]]] = {}
    for row in rows:
        fields = _fields(row)
        target = topic if topic is not None else fields[2]
        if target is None:
            raise ExportError(
                f"no topic for row {_shown(row)}; fill its field 'topic', or give topic=..., which beats it"
            )
        columns = found.get(target)
        if columns is None:
            columns = found[target] = [[] for _ in COLUMNS]
        for column, cell in zip(columns, fields, strict=True):
            column.append(cell)
    return found


def _fields(row: Any) -> Fields:
    if isinstance(row, (bytes, str, bytearray, memoryview)):
        return (None, row, None, None, None, None)
    get: Callable[[str], Any] | None = None
    if isinstance(row, Mapping):
        get = row.get
    elif hasattr(row, "__fields__"):  # pyspark.sql.Row
        get = row.asDict().get
    if get is not None:
        fields = tuple(get(name) for name in COLUMNS)
        if fields[1] is None and "value" not in (row if isinstance(row, Mapping) else row.__fields__):
            raise ExportError(f"row {_shown(row)} has no field 'value'; the fields that count are {', '.join(COLUMNS)}")
        return fields
    if isinstance(row, (tuple, list)) and len(row) == 2:
        return (row[0], row[1], None, None, None, None)
    raise ExportError(
        f"cannot write {_shown(row)}: a row is bytes or str (the value), a (key, value) tuple, or a dict or Row with "
        f"the fields {', '.join(COLUMNS)}"
    )


def _shown(row: Any) -> str:
    text = repr(row)
    return text if len(text) < 80 else f"{text[:80]}..."
