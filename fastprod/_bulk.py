"""Arguments of bulk calls: checks them and cuts them into blocks of aligned columns.

numpy and pyarrow are imported only where an argument needs them: a service that produces lists of bytes does not
pay for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from fastprod._core._columns import Column, columns
from fastprod._core._message import HeaderColumn

# values, keys, topics, partitions, timestamps, headers, may be sent without a copy
Block = tuple[Column, Column, Column | None, Any, Any, Sequence[Any] | HeaderColumn | None, bool]


def blocks_of_columns(values: Any, keys: Any, partitions: Any, headers: Any, timestamps: Any) -> Iterator[Block]:
    """Blocks of a call with separate columns. Where some are chunked, a block is a chunk of the values."""
    others = {"key": keys, "partition": partitions, "headers": headers, "timestamp": timestamps}
    if not any(_is_arrow(column, "ChunkedArray") for column in (values, *others.values())):
        yield _block(values, keys, None, partitions, headers, timestamps)
        return
    for name, column in others.items():
        if hasattr(column, "__len__") and not _is_one_for_all(column) and len(column) != len(values):
            raise _uneven(name, len(column), len(values))
    start = 0
    for chunk in values.chunks if _is_arrow(values, "ChunkedArray") else [values]:
        key, partition, header, timestamp = (_part(column, start, len(chunk)) for column in others.values())
        yield _block(chunk, key, None, partition, header, timestamp)
        start += len(chunk)


def _is_one_for_all(column: Any) -> bool:
    """Whether headers are given once, as a dict or a list of (name, value), and not per record."""
    return isinstance(column, dict) or (isinstance(column, list) and bool(column) and isinstance(column[0], tuple))


def _part(column: Any, start: int, count: int) -> Any:
    """The elements that belong to a chunk of the values."""
    if _is_arrow(column, "ChunkedArray"):
        return column.slice(start, count).combine_chunks()
    if _is_arrow(column, "Array"):
        return column.slice(start, count)
    if not hasattr(column, "__len__") or _is_one_for_all(column):
        return column
    return column[start : start + count]


def _uneven(name: str, count: int, wanted: int) -> ValueError:
    return ValueError(f"{count} {name.removesuffix('s')}s for {wanted} values: the columns must have the same length")


def checked_batches(source: Any, topic: str | None) -> Any:
    """Arrow record batches with the right columns."""
    import pyarrow as pa

    if not isinstance(source, (pa.RecordBatch, pa.Table, pa.RecordBatchReader)):
        if not (hasattr(source, "__arrow_c_stream__") or hasattr(source, "__arrow_c_array__")):
            raise TypeError(f"expected an Arrow RecordBatch or Table, not {type(source).__name__}")
        source = pa.table(source)
    _check_schema(source.schema, topic)
    if isinstance(source, pa.Table):
        return source.to_batches()
    return [source] if isinstance(source, pa.RecordBatch) else source


def blocks_of_batches(batches: Iterable[Any], topics: bool) -> Iterator[Block]:
    """A block per record batch; `topics` says that the topic column counts."""
    for batch in batches:
        column = dict(zip(batch.schema.names, batch.columns, strict=True)).get
        yield _block(
            column("value"),
            column("key"),
            column("topic") if topics else None,
            column("partition"),
            column("headers"),
            column("timestamp"),
        )


def _block(values: Any, keys: Any, topics: Any, partitions: Any, headers: Any, timestamps: Any) -> Block:
    value_column = _column(values, "value")
    count = len(value_column)
    key_column = _column(keys, "key", count)
    return (
        value_column,
        key_column,
        None if topics is None else _column(topics, "topic", count),
        _integers(partitions, "partitions", count, "int32", -1),
        _integers(_milliseconds(timestamps), "timestamps", count, "int64", 0),
        _headers(headers, count),
        value_column.immutable and key_column.immutable,
    )


def _is_arrow(source: Any, kind: str) -> bool:
    pa = sys.modules.get("pyarrow")
    return pa is not None and isinstance(source, getattr(pa, kind))


def _column(source: Any, name: str, count: int | None = None) -> Column:
    """One column of byte strings; `count` is the length it must have."""
    if source is None and count is not None:
        return Column.empty(count)
    if isinstance(source, (str, bytes, bytearray, memoryview)) or source is None:
        raise TypeError(f"{name}s must be a list, numpy array or Arrow array, not {type(source).__name__}")
    parts = columns(source, name, strict=False)
    if len(parts) != 1:
        raise TypeError(f"{name}s are chunked: make them a pyarrow.ChunkedArray")
    if count is not None and len(parts[0]) != count:
        raise _uneven(name, len(parts[0]), count)
    return parts[0]


def _integers(source: Any, name: str, count: int, dtype: str, absent: int) -> Any:
    """A column of integers, one for all records, or None."""
    if source is None:
        return None
    import numpy as np

    if isinstance(source, (int, np.integer)) and not isinstance(source, bool):
        source = [source] * count
    elif _is_arrow(source, "Array"):
        source = (source.fill_null(absent) if source.null_count else source).to_numpy(zero_copy_only=False)
    elif isinstance(source, (list, tuple)):
        source = [absent if item is None else item for item in source]
    array = np.asarray(source)
    if array.ndim != 1 or len(array) != count:
        raise ValueError(f"{name} has shape {array.shape}, but there are {count} values")
    if count and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    limits = np.iinfo(dtype)
    if count and (int(array.max()) > limits.max or int(array.min()) < limits.min):
        raise ValueError(f"{name} must be from {limits.min} to {limits.max}, not {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, dtype=dtype)


def _milliseconds(source: Any) -> Any:
    """Timestamps as integers: datetime64 and Arrow timestamps become milliseconds."""
    if _is_arrow(source, "Array"):
        import pyarrow as pa

        if pa.types.is_timestamp(source.type):
            return source.cast(pa.timestamp("ms", source.type.tz), safe=False).cast(pa.int64())
    elif getattr(getattr(source, "dtype", None), "kind", "") == "M":
        milliseconds = source.astype("datetime64[ms]").astype("int64")
        milliseconds[milliseconds == -(2**63)] = 0  # NaT, like None, means now
        return milliseconds
    return source


def _header_column(source: Any) -> Sequence[Any] | HeaderColumn:
    """A list or map array, whose entries are structs of a name and a value."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    while isinstance(source, pa.ExtensionArray):
        source = source.storage
    if pa.types.is_dictionary(source.type):
        source = source.dictionary_decode()
    kind = source.type
    if pa.types.is_null(kind):
        return [None] * len(source)
    if not (pa.types.is_map(kind) or hasattr(kind, "value_type")):
        raise TypeError(f"headers must be lists of struct<key, value> or maps, not Arrow {kind}")
    if pa.types.is_map(kind):  # the same in memory, but without what lists can do
        parts = source.values
        source = pa.Array.from_buffers(
            pa.list_(parts.type), len(source), source.buffers()[:2], offset=source.offset, children=[parts]
        )
    entries = source.flatten()  # of the lists that are not null, one after the other
    if not len(entries):
        return [None] * len(source)
    if not pa.types.is_struct(entries.type):
        raise TypeError(f"headers must be lists of struct<key, value>, not Arrow {kind}")
    name, value = (0, 1) if pa.types.is_map(kind) else (entries.type.get_field_index(one) for one in ("key", "value"))
    if name < 0 or value < 0:
        raise TypeError(f"headers must be lists of struct<key, value>, not Arrow {kind}")
    if not _is_string(entries.type.field(name).type):
        raise TypeError(f"a header's name must be a string, not Arrow {entries.type.field(name).type}")
    fields = entries.flatten()  # an entry that is null has no name
    count: Any = pc  # whose type hints do not know it
    lengths = np.asarray(count.fill_null(count.list_value_length(source), 0))
    return HeaderColumn(
        np.concatenate([[0], np.cumsum(lengths, dtype="int64")]),
        _column(fields[name], "header name"),
        _column(fields[value], "header value"),
    )


def _is_string(kind: Any) -> bool:
    """Of Arrow's types those of text, and that of nulls only."""
    import pyarrow as pa

    known = pa.types
    kind = kind.value_type if known.is_dictionary(kind) else kind
    return any(check(kind) for check in (known.is_string, known.is_large_string, known.is_string_view, known.is_null))


def _headers(source: Any, count: int) -> Sequence[Any] | HeaderColumn | None:
    """Headers per record: a list, one dict for all, or an Arrow list of key/value structs."""
    if source is None:
        return None
    if _is_one_for_all(source):
        return [source] * count
    if _is_arrow(source, "Array"):
        source = _header_column(source)
    if not isinstance(source, (list, tuple, HeaderColumn)):
        raise TypeError(f"headers must be a list, a dict or an Arrow array, not {type(source).__name__}")
    if len(source) != count:
        raise _uneven("headers", len(source), count)
    # A list of the caller's may change, and is looked at again when a record has failed.
    return tuple(source) if isinstance(source, list) else source


_right: tuple[Any, bool] | None = None  # the last schema that was, and whether a topic was given: many batches have one


def _check_schema(schema: Any, topic: str | None) -> None:
    """Refuses a wrong table before anything is sent, naming the column."""
    global _right
    last = _right
    if last is not None and last[1] is (topic is None) and last[0].equals(schema):
        return
    if "value" not in schema.names:
        raise ValueError(f"there is no column 'value'; the columns are {schema.names}")
    import pyarrow as pa

    if topic is None and "topic" not in schema.names:
        raise ValueError("give a topic, or have a column 'topic'")

    def text(kind: Any) -> bool:
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        return any(
            check(kind)
            for check in (
                pa.types.is_binary,
                pa.types.is_string,
                pa.types.is_large_binary,
                pa.types.is_large_string,
                pa.types.is_binary_view,
                pa.types.is_string_view,
                pa.types.is_fixed_size_binary,
                pa.types.is_null,
            )
        )

    def headers(kind: Any) -> bool:
        if pa.types.is_map(kind):
            return _is_string(kind.key_type) and text(kind.item_type)
        listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if not listed or not pa.types.is_struct(kind.value_type):
            return False
        name, value = (kind.value_type.get_field_index(one) for one in ("key", "value"))
        return (
            min(name, value) >= 0
            and _is_string(kind.value_type.field(name).type)
            and text(kind.value_type.field(value).type)
        )

    wanted: dict[str, tuple[Callable[[Any], bool], str]] = {
        "value": (text, "binary or string"),
        "key": (text, "binary or string"),
        "topic": (text, "string"),
        "partition": (pa.types.is_integer, "integer"),
        "timestamp": (lambda kind: pa.types.is_integer(kind) or pa.types.is_timestamp(kind), "integer or timestamp"),
        "headers": (headers, "list of struct<key, value>"),
    }
    for name, (fits, description) in wanted.items():
        if name in schema.names and not fits(schema.field(name).type):
            raise TypeError(f"column {name!r} must be {description}, not {schema.field(name).type}")
    _right = (schema, topic is None)
