"""Arguments of `produce_arrow(value=..., key=...)`: which column, or encoder of columns, is which part of a record.

    batch --slices of SLICE_ROWS--> value, key: encoder or column --> the block of a bulk call

Values are encoded a slice at a time, while those of the slices before are sent: the encoded bytes stay in the
processor's cache until they are copied, and a call takes no more memory for them than a few slices. What can be
checked without encoding, types, names and whether the elements of arrays lie within their buffers, is checked for the
whole call before any of it is accepted; with a reader, for each of its batches. Columns that no role needs are not
looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fastprod import _bulk
from fastprod._core._arrow_tree import Tree
from fastprod.encoding import Encoder

SLICE_ROWS = 16_384
SLICE_BYTES = 1 << 20  # of Arrow's memory; as JSON these are two or three times as many


class Roles(NamedTuple):
    """What makes which part of a record: the name of a column, an encoder, or None."""

    value: str | Encoder | None
    key: str | Encoder | None
    headers: str | None
    timestamp: str | None
    partition: str | None

    @classmethod
    def of(cls, value: Any, key: Any, headers: Any, timestamp: Any, partition: Any) -> Roles:
        """Those of a call."""
        given = (value, key, headers, timestamp, partition)
        for name, one in zip(cls._fields, given, strict=True):
            encodes = name in ("value", "key") and isinstance(one, Encoder) and not isinstance(one, type)
            if not (one is None or isinstance(one, str) or encodes):
                more = " or an encoder, such as Json()" if name in ("value", "key") else ""
                raise TypeError(f"{name} must be the name of a column{more}, not {one!r}")
        return cls(*given)

    def within(self, schema: Any) -> Roles:
        """With the columns that count by their name, as they do where `value` is not given."""
        if self.value is not None:
            return self
        return Roles(*(name if one is None and name in schema.names else one for name, one in self._asdict().items()))

    def needed(self, schema: Any, by_row: bool) -> list[int]:
        """Places of the columns that a part of a record, or with `by_row` its topic, is made of."""
        names = {"topic", "priority"} if by_row else set()
        for one in self:
            if isinstance(one, str):
                names.add(one)
            elif one is not None:
                names.update(one.taken(schema).names if hasattr(one, "taken") else schema.names)
        return [place for place, name in enumerate(schema.names) if name in names]


Topics = Callable[[Any], Any]  # a column of names for a batch


def check(roles: Roles, schema: Any, topic: str | None, by_row: bool) -> None:
    """Refuses a schema that these roles do not fit. `by_row`: the topics do not come from a column `topic`."""
    import pyarrow as pa

    fields = []
    for role, one in roles._asdict().items():
        if one is None:
            continue
        if not isinstance(one, str):
            try:
                one.check(schema)
            except (TypeError, ValueError) as error:
                error.add_note(f"{role}={one!r}")
                raise
            fields.append(pa.field(role, pa.binary()))
            continue
        if schema.names.count(one) != 1:
            count = schema.names.count(one) or "no"
            is_are = "is" if count == "no" else "are"
            raise ValueError(f"there {is_are} {count} column {one!r} for {role}; the columns are {schema.names}")
        kind = schema.field(one).type
        if role == "key":
            kind = pa.string() if _becomes_text(kind) else kind
            if not _bulk.is_text(kind):
                raise TypeError(
                    f"column {one!r} for key is {kind}: give key=Json(columns=[{one!r}]), "
                    "or cast it to string or binary"
                )
        fields.append(pa.field(role, kind))
    if topic is None and not by_row and "topic" in schema.names:
        fields.append(schema.field("topic"))
    _bulk.check_schema(pa.schema(fields), "" if by_row else topic)


def blocks(source: Any, topic: str | None, roles: Roles, topics: Topics | None = None) -> Iterator[_bulk.Block]:
    """Blocks of a call; all that can be is checked before the first is given out."""
    vouched = isinstance(source, _bulk.Vouched)
    batches = _bulk.batches_of(source.data if vouched else source)
    roles = roles.within(batches.schema)
    check(roles, batches.schema, topic, topics is not None)
    if topics is None and topic is None:
        topics = _topic_column
    made = _blocks(batches.batches, roles, topics, batches.schema)
    if not isinstance(batches.batches, list):
        return _vouched(made) if vouched else made
    needed = roles.needed(batches.schema, topics is not None)
    start = 0
    for batch in batches.batches:  # what is made here is thrown away: it was only to see whether it can be
        Tree(batch.select(needed))
        _block(batch, start, roles, topics, encoded=False)
        start += batch.num_rows
    return _vouched(made) if vouched else made


def _vouched(made: Iterator[_bulk.Block]) -> Iterator[_bulk.Block]:
    return ((*block[:-1], True) for block in made)


def _topic_column(batch: Any) -> Any:
    return batch.column("topic")


def _blocks(batches: Any, roles: Roles, topics: Topics | None, schema: Any) -> Iterator[_bulk.Block]:
    needed = roles.needed(schema, topics is not None)
    start = 0
    for batch in batches:
        read = not isinstance(batches, list)  # by a reader, which may bring anything
        if read and not batch.schema.equals(schema):
            raise ValueError(f"row {start} begins a batch with the columns {batch.schema}, which are not {schema}")
        own = batch.select(needed)
        if read:
            Tree(own)
            _block(batch, start, roles, topics, encoded=False)
        step = min(SLICE_ROWS, max(1, SLICE_BYTES * batch.num_rows // max(own.nbytes, 1)))
        for first in range(0, batch.num_rows, step):
            part = batch.slice(first, step)
            yield _block(part, start + first, roles, topics, encoded=True)
        start += batch.num_rows


def _block(batch: Any, start: int, roles: Roles, topics: Topics | None, encoded: bool) -> _bulk.Block:
    count = batch.num_rows

    def piece(role: str, one: str | Encoder | None) -> _bulk.Piece:
        if one is None:
            return None, count, None
        if isinstance(one, str):
            column = batch.column(one)
            return _text(column) if role == "key" and _becomes_text(column.type) else column, count, None
        return one.encode_column(batch, role, start) if encoded else None, count, None

    def numbers(name: str | None, role: str, dtype: str, absent: int) -> Any:
        return None if name is None else _bulk.integers(batch.column(name), role, count, dtype, absent, start)

    return _bulk.block(
        start,
        piece("value", roles.value),
        piece("key", roles.key),
        None if topics is None else (topics(batch), count, None),
        numbers(roles.partition, "partitions", "int32", -1),
        None if roles.headers is None else batch.column(roles.headers),
        numbers(roles.timestamp, "timestamps", "int64", 0),
    )


def _becomes_text(kind: Any) -> bool:
    """Whether a key of this type is written as Spark's cast to string does: integers and booleans."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _text(column: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(pa.string())
