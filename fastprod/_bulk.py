"""Arguments of bulk calls: checks them and cuts them into blocks of aligned columns.

A call is checked before any of it is accepted: all blocks are made first, unless they come from a reader, which
may bring more than memory holds. numpy and pyarrow are imported only where an argument needs them: a service that
produces lists of bytes does not pay for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from fastprod._core._columns import Column, cut, pieces
from fastprod._core._headers import HeaderColumn

# values, keys, topics, partitions, timestamps, headers, may be sent without a copy
Block = tuple[Column, Column, Column | None, Any, Any, Sequence[Any] | HeaderColumn | None, bool]
Piece = tuple[Any, int, Any]  # a part of a column, its length, its mask or None

# At most so many milliseconds are in those of numpy's units of time that are longer.
MILLISECONDS = {"s": 1000, "m": 60_000, "h": 3_600_000, "D": 86_400_000}
MILLISECONDS |= {"W": 7 * 86_400_000, "M": 31 * 86_400_000, "Y": 366 * 86_400_000}


class Vouched(NamedTuple):
    """Arrow data whose memory nobody will change, as whoever made it knows: large values are sent without a copy."""

    data: Any


class _Cursor:
    """Hands out the elements of a column in order, never across the end of a chunk."""

    def __init__(self, column: list[Piece]) -> None:
        self.rest = [piece for piece in reversed(column) if piece[1]] or column[:1]
        self.at = 0

    def left(self) -> int:
        """Elements up to the end of the chunk."""
        return self.rest[-1][1] - self.at

    def take(self, count: int) -> Piece:
        start, self.at = self.at, self.at + count
        piece = cut(self.rest[-1], start, self.at)
        if not self.left():
            self.rest.pop()
            self.at = 0
        return piece


def blocks_of_columns(
    values: Any, keys: Any, partitions: Any, headers: Any, timestamps: Any, topics: Any = None
) -> Iterator[Block]:
    """Blocks of a call with separate columns. Where some are chunked, it is cut wherever one of them is."""
    column = _pieces(values, "value")
    count = sum(length for _, length, _ in column)
    cursors = [_Cursor(column)]
    cursors.append(_Cursor([(None, count, None)] if keys is None else _pieces(keys, "key", count)))
    cursors.append(_Cursor([(None, count, None)] if headers is None else _header_pieces(headers, count)))
    cursors.append(_Cursor([(None, count, None)] if topics is None else _pieces(topics, "topic", count)))
    chosen = integers(partitions, "partitions", count, "int32", -1)
    times = integers(timestamps, "timestamps", count, "int64", 0)
    made: list[Block] = []
    start = 0
    while start < count or not made:
        stop = start + min(cursor.left() for cursor in cursors)
        value, key, header, topic = (cursor.take(stop - start) for cursor in cursors)
        made.append(
            block(
                start,
                value,
                key,
                None if topics is None else topic,
                None if chosen is None else chosen[start:stop],
                header[0],
                None if times is None else times[start:stop],
            )
        )
        start = stop
    yield from made


def _pieces(source: Any, name: str, count: int | None = None) -> list[Piece]:
    """A column of byte strings; `count` is the length it must have."""
    if source is None or isinstance(source, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"{name}s must be a list, numpy array or Arrow array, not {type(source).__name__}")
    found = pieces(source, name)
    total = sum(length for _, length, _ in found)
    if count is not None and total != count:
        raise _uneven(name, total, count)
    return found


def _uneven(name: str, count: int, wanted: int) -> ValueError:
    return ValueError(f"{count} {name.removesuffix('s')}s for {wanted} values: the columns must have the same length")


def checked_batches(source: Any, topic: str | None) -> Any:
    """Arrow record batches with the right columns."""
    if isinstance(source, Vouched):
        return Vouched(checked_batches(source.data, topic))
    found = batches_of(source)
    check_schema(found.schema, topic)
    return found.batches


class Batches(NamedTuple):
    """Arrow record batches: a list, or a reader."""

    schema: Any
    batches: Any


def batches_of(source: Any) -> Batches:
    """Of a RecordBatch, a Table, a reader, or what another library can give as one."""
    import pyarrow as pa

    if not isinstance(source, (pa.RecordBatch, pa.Table, pa.RecordBatchReader)):
        if not (hasattr(source, "__arrow_c_stream__") or hasattr(source, "__arrow_c_array__")):
            raise TypeError(f"expected an Arrow RecordBatch or Table, not {type(source).__name__}")
        source = pa.table(source)
    if isinstance(source, pa.Table):
        return Batches(source.schema, source.to_batches())
    return Batches(source.schema, [source] if isinstance(source, pa.RecordBatch) else source)


def blocks_of_batches(batches: Any, topics: bool) -> Iterator[Block]:
    """A block for each of `checked_batches`; `topics` says that the topic column counts."""
    vouched = isinstance(batches, Vouched)
    source = batches.data if vouched else batches
    made = _blocks_of_batches(source, topics)
    if vouched:
        made = ((*block[:-1], True) for block in made)
    yield from list(made) if isinstance(source, list) else made


def _blocks_of_batches(batches: Iterable[Any], topics: bool) -> Iterator[Block]:
    start = 0
    for batch in batches:
        count = batch.num_rows
        column = dict(zip(batch.schema.names, batch.columns, strict=True)).get
        yield block(
            start,
            (column("value"), count, None),
            (column("key"), count, None),
            (column("topic"), count, None) if topics else None,
            integers(column("partition"), "partitions", count, "int32", -1, start),
            column("headers"),
            integers(column("timestamp"), "timestamps", count, "int64", 0, start),
        )
        start += count


def block(
    start: int, values: Piece, keys: Piece, topics: Piece | None, partitions: Any, headers: Any, timestamps: Any
) -> Block:
    """Of columns of one length; `start` is the number of the first record in the call, for error texts.

    The part of a piece may also be a Column, which an encoder made.
    """
    value_column = _column(values, "value", start)
    key_column = _column(keys, "key", start)
    return (
        value_column,
        key_column,
        None if topics is None else _column(topics, "topic", start),
        partitions,
        timestamps,
        _header_column(headers, start) if _is_arrow(headers, "Array") else headers,
        value_column.immutable and key_column.immutable,
    )


def _column(piece: Piece, name: str, start: int = 0) -> Column:
    part, length, mask = piece
    if part is None:
        return Column.empty(length)
    column = part if isinstance(part, Column) else Column(part, name, strict=False, mask=mask, base=start)
    if len(column) != length:  # an encoder of somebody else's: rows would be lost, or read where there are none
        raise ValueError(f"the encoder of {name}s has made {len(column)} of {length} rows")
    return column


def _is_arrow(source: Any, kind: str) -> bool:
    return isinstance(source, getattr(sys.modules.get("pyarrow"), kind, ()))  # () while another thread imports it


def _arrow(source: Any) -> Any:
    """An Array or ChunkedArray, if the source is one or gives one; else None."""
    if _is_arrow(source, "Array") or _is_arrow(source, "ChunkedArray"):
        return source
    inner = getattr(source, "array", None)  # of a pandas Series
    if hasattr(inner, "__arrow_array__") or hasattr(inner, "tz"):
        import pyarrow as pa

        return pa.array(inner)
    for method, convert in (("__arrow_c_array__", "array"), ("__arrow_c_stream__", "chunked_array")):
        if hasattr(source, method):
            import pyarrow as pa

            return getattr(pa, convert)(source)
    return None


def integers(source: Any, name: str, count: int, dtype: str, absent: int, start: int = 0) -> Any:
    """Partitions, timestamps or the like as an array of our own, or None; what is null or masked becomes `absent`.

    The caller's may change, and records that failed are told as they were given.
    `start` is the number of the first record in the call, for error texts.
    """
    if source is None:
        return None
    import numpy as np

    kind = type(source).__name__  # what error texts call it
    nulls: Any = None
    items: Any = None
    arrow = _arrow(source)
    if arrow is not None:
        array, nulls, kind = _numbers(arrow, name)
    elif isinstance(source, (int, np.integer, np.datetime64)) and not isinstance(source, bool):
        items = [source]
        array = np.full(count, source)
    elif isinstance(source, (list, tuple)) or (getattr(source, "dtype", "") == "O" and source.ndim == 1):
        items = source if isinstance(source, (list, tuple)) else source.tolist()
        try:
            array = np.asarray([absent if item is None else item for item in items])
        except ValueError:  # lists of different lengths
            array = np.empty(len(items), object)
    elif hasattr(source, "dtype"):
        nulls = np.ma.getmaskarray(source) if isinstance(source, np.ma.MaskedArray) else None
        array = np.asarray(source)
        kind = str(array.dtype)
    else:
        raise TypeError(f"{name} must be integers, not {kind}")
    if array.ndim != 1 or len(array) != count:
        raise ValueError(f"{name} has shape {array.shape}, but there are {count} values")
    if array.dtype.kind == "M" and name == "timestamps":
        nulls = np.isnat(array) if nulls is None else nulls | np.isnat(array)
        array = _milliseconds(array, nulls, start)
    limits = np.iinfo(dtype)
    if count and array.dtype.kind not in "iu":
        for row, item in enumerate(items or []):
            if isinstance(item, bool) or not isinstance(item, (int, np.integer, type(None))):
                raise TypeError(f"{name} at index {start + row} must be an integer, not {type(item).__name__}")
            if item is not None and not limits.min <= item <= limits.max:
                raise _beyond(name, start + row, item, limits)
        raise TypeError(f"{name} must be integers, not {kind}")
    wrong = (array > limits.max) | (array < limits.min) if array.dtype != dtype else None
    if wrong is not None and nulls is not None:
        wrong &= ~nulls
    if wrong is not None and wrong.any():
        row = int(wrong.argmax())
        raise _beyond(name, start + row, array[row], limits)
    if nulls is None or not nulls.any():
        return np.array(array, dtype=dtype, order="C") if items is None else np.ascontiguousarray(array, dtype=dtype)
    array = array.astype(dtype)
    array[nulls] = absent
    return array


def _beyond(name: str, row: int, item: Any, limits: Any) -> ValueError:
    return ValueError(f"{name} at index {row} is {item}, which is not from {limits.min} to {limits.max}")


def _numbers(source: Any, name: str) -> tuple[Any, Any, str]:
    """Numbers or times of an Arrow array, which of them are null, and its type."""
    import numpy as np
    import pyarrow as pa

    chunks = source.chunks if isinstance(source, pa.ChunkedArray) else [source]
    chunks = [_plain(chunk, name) for chunk in chunks or [pa.nulls(0, source.type)]]
    for chunk in chunks:
        _validate(chunk, name)
    source = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
    kind = source.type
    nulls = source.is_null().to_numpy(zero_copy_only=False) if source.null_count else None
    if pa.types.is_null(kind):
        return np.zeros(len(source), "int64"), nulls, str(kind)
    if pa.types.is_timestamp(kind):
        source = source.view(pa.int64())
    elif not pa.types.is_integer(kind):
        return np.zeros(len(source)), nulls, str(kind)  # no integers, whatever they are
    numbers = (source.fill_null(0) if source.null_count else source).to_numpy(zero_copy_only=False)
    return numbers.view(f"datetime64[{kind.unit}]") if pa.types.is_timestamp(kind) else numbers, nulls, str(kind)


def _plain(source: Any, name: str) -> Any:
    """An Arrow array that is neither an extension nor a dictionary."""
    import pyarrow as pa

    while isinstance(source, pa.ExtensionArray):
        source = source.storage
    if not pa.types.is_dictionary(source.type):
        return source
    _validate(source, name, full=True)  # Arrow would follow any index
    return source.dictionary_decode()


def _validate(source: Any, name: str, full: bool = False) -> None:
    """Refuses an array whose buffers are too small for it."""
    try:
        source.validate(full=full)
    except ValueError as error:
        raise ValueError(f"{name} are an invalid Arrow array: {error}") from None


def _milliseconds(array: Any, nulls: Any, start: int) -> Any:
    """Times as integers, rounded down."""
    import numpy as np

    unit, step = np.datetime_data(array.dtype)
    if unit in MILLISECONDS:
        most = (2**63 - 1) // (MILLISECONDS[unit] * step)
        numbers = array.view("int64")
        wrong = ((numbers > most) | (numbers < -most)) & ~nulls
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"timestamps at index {start + row} is {numbers[row]} in units of {array.dtype}: "
                "too large for milliseconds in 64 bits"
            )
    return array.astype("datetime64[ms]").astype("int64")


def _header_pieces(source: Any, count: int) -> list[Piece]:
    """Headers, one for all or for each record: Arrow arrays or tuples."""
    if isinstance(source, dict) or (isinstance(source, list) and source and isinstance(source[0], tuple)):
        return [((source,) * count, count, None)]
    whole = _arrow(source)
    if whole is None and isinstance(source, (list, tuple)):
        whole = tuple(source)  # a list of the caller's may change, and is looked at again when a record has failed
    if whole is None:
        raise TypeError(f"headers must be a list, a dict or an Arrow array, not {type(source).__name__}")
    if len(whole) != count:
        raise _uneven("headers", len(whole), count)
    return [(chunk, len(chunk), None) for chunk in getattr(whole, "chunks", [whole])] or [((), 0, None)]


def _header_column(source: Any, start: int) -> Sequence[Any] | HeaderColumn:
    """A list or map array, whose entries are structs of a name and a value."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    source = _plain(source, "headers")
    kind = source.type
    if pa.types.is_null(kind) or not len(source):
        return [None] * len(source)
    if not (pa.types.is_map(kind) or hasattr(kind, "value_type")):
        raise TypeError(f"headers must be lists of struct<key, value> or maps, not Arrow {kind}")
    _check_lists(source, start)
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
        _column((fields[name], len(entries), None), "header name"),
        _column((fields[value], len(entries), None), "header value"),
    )


def _check_lists(source: Any, start: int) -> None:
    """Refuses lists that are not within their entries: Arrow would follow them anywhere."""
    import numpy as np
    import pyarrow as pa

    kind = source.type
    if pa.types.is_fixed_size_list(kind):
        return _validate(source, "headers")
    views = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    width = 8 if pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind) else 4
    first, count = source.offset, len(source) + (not views)
    numbers = []
    for buffer in source.buffers()[1 : 3 if views else 2]:
        if buffer is None or buffer.size < width * (first + count):
            raise ValueError("headers are an invalid Arrow array: its lists have no offsets")
        numbers.append(np.frombuffer(buffer, f"i{width}", count, width * first).astype("int64"))
    starts, sizes = numbers if views else (numbers[0][:-1], np.diff(numbers[0]))
    size = len(source.values)
    wrong = (starts < 0) | (sizes < 0) | (starts > size) | (sizes > size - starts)
    if views and wrong.any():  # what is below a null list does not matter
        _validate(source, "headers")
        wrong &= source.is_valid().to_numpy(zero_copy_only=False)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(
            f"headers at index {start + row} are {sizes[row]} entries from {starts[row]} on, "
            f"which is no part of the {size} entries"
        )
    return _validate(source, "headers")


def _is_string(kind: Any) -> bool:
    """Of Arrow's types those of text, and that of nulls only."""
    import pyarrow as pa

    known = pa.types
    kind = kind.value_type if known.is_dictionary(kind) else kind
    return any(check(kind) for check in (known.is_string, known.is_large_string, known.is_string_view, known.is_null))


def is_text(kind: Any) -> bool:
    """Of Arrow's types those of bytes and text, dictionaries of them, and that of nulls only."""
    import pyarrow as pa

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


_right: tuple[Any, bool] | None = None  # the last schema that was, and whether a topic was given: many batches have one


def check_schema(schema: Any, topic: str | None) -> None:
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

    def headers(kind: Any) -> bool:
        if pa.types.is_map(kind):
            return _is_string(kind.key_type) and is_text(kind.item_type)
        listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if not listed or not pa.types.is_struct(kind.value_type):
            return False
        name, value = (kind.value_type.get_field_index(one) for one in ("key", "value"))
        return (
            min(name, value) >= 0
            and _is_string(kind.value_type.field(name).type)
            and is_text(kind.value_type.field(value).type)
        )

    wanted: dict[str, tuple[Callable[[Any], bool], str]] = {
        "value": (is_text, "binary or string"),
        "key": (is_text, "binary or string"),
        "topic": (is_text, "string"),
        "partition": (pa.types.is_integer, "integer"),
        "timestamp": (lambda kind: pa.types.is_integer(kind) or pa.types.is_timestamp(kind), "integer or timestamp"),
        "headers": (headers, "list of struct<key, value>"),
    }
    for name, (fits, description) in wanted.items():
        if schema.names.count(name) > 1:
            raise ValueError(f"there are {schema.names.count(name)} columns {name!r}")
        if name in schema.names and not fits(schema.field(name).type):
            raise TypeError(f"column {name!r} must be {description}, not {schema.field(name).type}")
    _right = (schema, topic is None)
