"""What becomes of a row: which columns make its value, key, headers and timestamp.

    batch of any columns -> Shape.sender() -> values and keys encoded in C, or columns as they are -> the producer

An encoder (fastprod.encoding) makes bytes of whole rows; the name of a column takes its bytes, or its text, as they
are. A row that cannot be encoded fails the task before anything of its batch is sent.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fastprod import _bulk
from fastprod.spark._sink import ExportError

if TYPE_CHECKING:
    import pyarrow as pa

    from fastprod.spark._worker import Task

__all__ = ["Shape", "digest", "steady"]

ADDRESS = re.compile(r" at 0x[0-9A-Fa-f]+")  # in the repr of functions, and of objects that have none of their own

Place = Callable[[int | None], str]  # names a row of a batch, or all of it


@dataclass(frozen=True)
class Shape:
    """Made on the driver, pickled to the executors once `resolved`."""

    value: Any
    """An encoder, or the name of a column."""
    key: Any = None
    headers: str | tuple[str, ...] | None = None
    """Names of columns, each a header of that name; or the name of one that has lists or maps of headers."""
    timestamp: str | None = None
    columns: tuple[str, ...] | None = None
    """Columns that the encoder of values is given; None for all."""

    @classmethod
    def of(cls, value: Any, key: Any, headers: Any, timestamp: Any, columns: Any) -> Shape:
        """Checked as far as it can be without columns."""
        for name, given in (("value", value), ("key", key)):
            if (
                not isinstance(given, str)
                and not hasattr(given, "encode_column")
                and (name == "value" or given is not None)
            ):
                raise TypeError(f"{name} is an encoder such as Json(), or the name of a column, not {given!r}")
        if timestamp is not None and not isinstance(timestamp, str):
            raise TypeError(f"timestamp is the name of a column, not {timestamp!r}")
        if isinstance(columns, str):
            raise TypeError(f"columns is a list of names, [{columns!r}], not a string")
        if columns is not None and not columns:
            raise ValueError("columns names none; leave it out to take all")
        if columns is not None and isinstance(value, str) and [value] != list(columns):
            raise ValueError(f"columns has no effect with value={value!r}, which is one column")
        several = headers if headers is None or isinstance(headers, str) else tuple(headers)
        return cls(value, key, several or None, timestamp, None if columns is None else tuple(columns))

    @property
    def encodes(self) -> bool:
        return not isinstance(self.value, str) or not isinstance(self.key, (str, type(None)))

    def named(self) -> dict[str, str]:
        """The columns that are named, and by which argument."""
        headers = (self.headers,) if isinstance(self.headers, str) else self.headers or ()
        found = dict.fromkeys(self.columns or (), "columns") | dict.fromkeys(headers, "headers")
        for argument, name in (("timestamp", self.timestamp), ("key", self.key), ("value", self.value)):
            if isinstance(name, str):
                found[name] = argument
        return found

    def needed(self, schema: pa.Schema) -> list[str]:
        """Columns that must be read. Raises ValueError for one that is not there."""
        for name, argument in self.named().items():
            if name not in schema.names:
                raise ValueError(
                    f"{argument} names {name!r}, but the columns are {', '.join(schema.names)}. Nothing was sent"
                )
        wanted = set(self.named())
        for part, chosen in ((self.value, self.columns), (self.key, None)):
            if isinstance(part, (str, type(None))):
                continue
            own = chosen or getattr(part, "columns", None)
            if own is None:
                return list(schema.names)
            wanted |= {*own, *(getattr(part, "exclude", None) or ())}
        return [name for name in schema.names if name in wanted]

    def resolved(self, schema: pa.Schema) -> Shape:
        """With encoders that need nobody any more: a registry is asked here, once, on the driver.

        Raises TypeError or ValueError if rows of this schema cannot be written.
        """
        import pyarrow as pa

        def settle(part: Any, given: pa.Schema) -> Any:
            if isinstance(part, (str, type(None))):
                return part
            part = part.resolve(given) if hasattr(part, "resolve") else part
            part.check(given)
            return part

        own = schema if self.columns is None else pa.schema([schema.field(name) for name in self.columns])
        made = replace(self, value=settle(self.value, own), key=settle(self.key, schema))
        whole = {name for name, argument in self.named().items() if argument != "columns"}  # what needs no encoder
        none = pa.record_batch({name: pa.nulls(0, schema.field(name).type) for name in schema.names if name in whole})
        parts = {"value": pa.nulls(0), **made._parts(none)}
        _bulk.check_schema(pa.schema({name: part.type for name, part in parts.items()}), "")
        return made

    def identity(self) -> dict[str, str]:
        """A short name for each argument, the same for the same; for exactly once.

        Raises TypeError for an encoder with a state that no later run could recognise.
        """
        parts = {"value": self.value, "key": self.key, "headers": self.headers, "timestamp": self.timestamp}
        return {name: digest(_state(name, part)) for name, part in {**parts, "columns": self.columns}.items()}

    def sender(self, send: Callable[[Task, pa.RecordBatch], None]) -> Callable[[Task, pa.RecordBatch, Place], None]:
        """A function that hands rows over, and is told how to name them; `send` takes those that need no encoder."""
        import pyarrow as pa

        def plain(task: Task, batch: pa.RecordBatch, place: Place) -> None:
            with _naming(place):
                records = pa.RecordBatch.from_pydict(self._parts(batch))
            send(task, records)

        def encoded(task: Task, batch: pa.RecordBatch, place: Place) -> None:
            block = self.block(batch, place)
            if task.look([block]):
                task.submit(block)

        return encoded if self.encodes else plain

    def _parts(self, batch: pa.RecordBatch) -> dict[str, Any]:
        """What needs no encoder, by the names that producers know."""
        made = {}
        for name, given in (("value", self.value), ("key", self.key)):
            if isinstance(given, str):
                made[name] = text_of(batch.column(given), given, name)
        if isinstance(self.headers, str):
            made["headers"] = batch.column(self.headers)
        elif self.headers:
            made["headers"] = _headers(batch, self.headers)
        if self.timestamp is not None:
            made["timestamp"] = _times(batch.column(self.timestamp), self.timestamp)
        return made

    def block(self, batch: pa.RecordBatch, place: Place) -> _bulk.Block:
        """The records of a batch. Raises ExportError for the first row that cannot be one, and then nothing is sent."""
        count = batch.num_rows
        with _naming(place):
            made = self._parts(batch)
            for name, part in (("value", self.value), ("key", self.key)):
                if part is not None and name not in made:
                    own = batch if name == "key" or self.columns is None else batch.select(list(self.columns))
                    made[name] = part.encode_column(own, name)
            times = _bulk.integers(made.get("timestamp"), "timestamps", count, "int64", 0)
            value, key = ((made.get(name), count, None) for name in ("value", "key"))
            block = _bulk.block(0, value, key, None, None, made.get("headers"), times)
        for name, column in zip(("value", "key"), block, strict=False):
            for row, problem in column.bad.items():
                raise ExportError(f"{place(row)}: {name} {problem}. Nothing of these rows was sent")
        # Copied: what is encoded is then free again at once, and buffer.memory counts all there is.
        return (*block[:-1], False)


@contextmanager
def _naming(place: Place) -> Iterator[None]:
    """Errors about a batch say where it is from."""
    try:
        yield
    except (ValueError, TypeError) as problem:
        raise ExportError(f"{place(None)}: {problem}. Nothing of these rows was sent") from problem


def text_of(column: pa.Array, name: str, argument: str) -> pa.Array:
    """A column as bytes or text, as Spark would cast it where both agree."""
    import pyarrow as pa

    known = pa.types
    kind = column.type.value_type if known.is_dictionary(column.type) else column.type
    if known.is_integer(kind) or known.is_boolean(kind) or known.is_date(kind) or known.is_decimal(kind):
        column = column.dictionary_decode() if known.is_dictionary(column.type) else column
        return column.cast(pa.string())
    if not _bulk.is_text(kind):
        raise TypeError(
            f"{argument} names {name!r}, which is {kind}: only text, binary, whole numbers, decimals, dates and "
            f"booleans are bytes of a record by themselves; use an encoder, as in {argument}=Json(columns=[{name!r}])"
        )
    return column


def _times(column: pa.Array, name: str) -> pa.Array:
    import pyarrow as pa

    if pa.types.is_date(column.type):
        return column.cast(pa.timestamp("ms"))
    if not pa.types.is_timestamp(column.type) and not pa.types.is_integer(column.type):
        raise TypeError(f"timestamp names {name!r}, which is {column.type}, not a time or milliseconds since 1970")
    return column


def _headers(batch: pa.RecordBatch, names: Sequence[str]) -> pa.Array:
    """Lists of key and value, a header for each of the columns."""
    import numpy as np
    import pyarrow as pa

    rows, width = batch.num_rows, len(names)
    values = pa.concat_arrays([text_of(batch.column(name), name, "headers").cast(pa.binary()) for name in names])
    order = pa.array(np.arange(rows * width).reshape(width, rows).T.ravel())  # columns one by one become rows
    keys = pa.DictionaryArray.from_arrays(pa.array(np.tile(np.arange(width, dtype="int32"), rows)), list(names))
    pairs = pa.StructArray.from_arrays([keys, values.take(order)], names=["key", "value"])
    return pa.ListArray.from_arrays(pa.array(np.arange(0, rows * width + 1, width, dtype="int32")), pairs)


def _state(name: str, part: Any) -> str:
    """What an argument is, in a text that is the same for the same."""
    if isinstance(part, (str, tuple, type(None))):
        return repr(part)
    state = steady(name, part.__getstate__())
    return f"{type(part).__qualname__} {sorted(state.items()) if isinstance(state, dict) else state!r}"


def steady(argument: str, part: Any) -> Any:
    """Something whose repr is the same in every process. Raises TypeError for objects that do not say what they are."""
    from pyarrow import csv

    if isinstance(part, dict):
        return {name: steady(argument, value) for name, value in part.items()}
    if isinstance(part, (list, tuple)):
        made = [steady(argument, value) for value in part]
        return made if isinstance(part, list) else tuple(made)
    if isinstance(part, (set, frozenset)):
        return sorted(repr(steady(argument, value)) for value in part)
    if isinstance(part, type(csv.ISO8601)):
        return "ISO8601"
    if not isinstance(part, (str, bytes)) and ADDRESS.search(repr(part)):
        raise TypeError(
            f"{argument} has {part!r}, which is called otherwise in every run: exactly_once could not tell whether "
            "records are made as in the run before. Nothing was sent. Leave it out, or use an object of a class whose "
            "__repr__ says all that its records depend on"
        )
    return part


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
