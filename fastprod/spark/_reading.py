"""Executor side of `export`: a task's files as Arrow batches, with bounded memory, and proof that nothing is missing.

    Split -> Reader.read()   -> Rows     at most some MB: the batch after `where`, and where in its file it lies
               the file is the one that was listed (size, time of modification or etag), before and after
               row groups that cannot hold a row of `where`, by their statistics, are not read; these leave out NaN,
               so a condition on floating numbers reads all
               as many rows came as the file says; fewer are an error, and so the end of a transaction
               columns that folders give are added; types that differ only in layout are made the same

No row passes the JVM.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastprod.spark._files import (
    ARROW_MAGIC,
    File,
    Piece,
    Split,
    TextOptions,
    folder_values,
    forget_listings,
    same_kind,
    same_stamp,
    stamp_of,
    when,
)
from fastprod.spark._sink import ExportError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileSystem

__all__ = ["Reader", "Rows", "check_json", "learnt_json", "mask_of", "open_csv", "open_parquet", "slices", "uses_only"]

MOST_ROWS = 16_384  # of a batch
MOST_BYTES = 2 << 20  # of a batch, about: what is encoded of it should still be in the cache when it is copied
BLOCK = 4 << 20  # bytes of text at a time; a row must fit
LEARN = 16 << 20  # the same while types are learnt
BEGIN = 1 << 16  # bytes in which a file of JSON has its first object
MARK = b"\xef\xbb\xbf"  # that some put before UTF-8
NULL = re.compile(rb"\n[ \t\r]*null")


@dataclass(frozen=True)
class Rows:
    """A part of what a task writes."""

    batch: pa.RecordBatch
    file: str
    part: str
    first: int
    """Number of the first row within that part, before `where`."""
    mask: Any = None
    """Which rows of that stretch `where` has taken, None for all."""

    def place(self, row: int | None = None) -> str:
        """Where a row of the batch lies, or the whole batch."""
        where = self.file + self.part
        if row is None:
            stretch = self.batch.num_rows if self.mask is None else len(self.mask)
            return f"{where}, rows {self.first:,} to {self.first + stretch - 1:,}"
        if self.mask is not None:
            import numpy as np

            row = int(np.flatnonzero(self.mask.fill_null(False).to_numpy(zero_copy_only=False))[row])
        return f"{where}, row {self.first + row:,}"


@dataclass(frozen=True)
class Reader:
    """How the files of an export are read: made on the driver, pickled to the executors."""

    systems: tuple[FileSystem, ...]
    schema: pa.Schema
    """Columns to read, those of folders too; at least one is in the files."""
    folders: pa.Schema
    names: tuple[str, ...]
    """Columns that are left when `where` has seen the others."""
    where: Any = None
    text: TextOptions = field(default_factory=TextOptions)

    def read(self, split: Split) -> Iterator[Rows]:
        for piece in split:
            file = piece.file
            self._check(file)
            constants = folder_values(file, self.folders)
            for part, wanted, batches in self._parts(piece):
                seen = 0
                for batch in self._guarded(batches, file.name + part):
                    yield from self._rows(batch, constants, file.name, part, seen)
                    seen += batch.num_rows
                if wanted is not None and seen != wanted:
                    raise ExportError(f"{file.name}{part} has {wanted:,} rows, but {seen:,} came: is it damaged?")
            self._check(file)

    def _check(self, file: File) -> None:
        """Whether the file is still the one that was listed."""
        from pyarrow.fs import FileType

        system = self.systems[file.system]
        with _naming(file.name):
            forget_listings(system)
            info = system.get_file_info(file.path)
            stamp = "" if info.type == FileType.NotFound else stamp_of(system, info)
        if info.type == FileType.NotFound:
            raise ExportError(f"{file.name} was there when the export began, and is gone. Nobody may change its files")
        if info.size != file.size or not same_stamp(stamp, file.stamp, system.type_name == "local"):
            raise ExportError(
                f"{file.name} has changed since the export began: it was {file.size:,} bytes, {when(file.stamp)}, and "
                f"is {info.size:,}, {when(stamp)}. Nobody may change its files"
            )

    def _guarded(self, batches: Iterable[pa.RecordBatch], what: str) -> Iterator[pa.RecordBatch]:
        with _naming(what):
            yield from batches

    def _rows(
        self, batch: pa.RecordBatch, constants: dict[str, Any], file: str, part: str, first: int
    ) -> Iterator[Rows]:
        import pyarrow as pa

        for start, piece in slices(batch):
            columns = []
            with _naming(file + part):
                for one in self.schema:
                    if one.name in constants:
                        columns.append(pa.repeat(constants[one.name], piece.num_rows))
                    else:
                        columns.append(_fitted(piece.column(one.name), one.type))
                fields = [pa.field(one.name, made.type) for one, made in zip(self.schema, columns, strict=True)]
                whole = pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
                mask = None if self.where is None else mask_of(whole, self.where)
                if mask is not None:
                    taken = mask.true_count
                    if not taken:
                        continue
                    mask = None if taken == len(mask) else mask
                    whole = whole if mask is None else whole.filter(mask)
                chosen = whole.select(list(self.names))
            yield Rows(chosen, file, part, first + start, mask)

    # ---- formats: each part with its name, the number of its rows where it is known, and its batches

    def _parts(self, piece: Piece) -> Iterator[tuple[str, int | None, Iterable[pa.RecordBatch]]]:
        system = self.systems[piece.file.system]
        wanted = [one.name for one in self.schema if one.name not in self.folders.names]
        read = {
            "parquet": self._parquet,
            "orc": self._orc,
            "arrow": self._arrow_stream if piece.whole else self._arrow,
            "csv": self._csv,
            "json": self._json,
        }[piece.file.form]
        with _naming(piece.file.name):
            yield from read(system, piece, wanted)

    def _parquet(self, system: FileSystem, piece: Piece, wanted: list[str]) -> Iterator[Any]:
        path = piece.file.path
        # Far away a few large requests are better than many small ones; a row group at a time is in memory either way.
        far = system.type_name != "local"
        with system.open_input_file(path) as opened, open_parquet(opened, far) as found:
            numbers = range(piece.first, piece.first + len(piece.rows))
            useful = self._useful(found, system, piece, numbers)
            for number, rows in zip(numbers, piece.rows, strict=True):
                if number in useful:
                    known = found.metadata.row_group(number)
                    size = max(1, MOST_BYTES * known.num_rows // max(1, known.total_byte_size))
                    batches = found.iter_batches(
                        min(MOST_ROWS, size), row_groups=[number], columns=wanted, use_threads=False
                    )
                    yield f", row group {number}", rows, batches

    def _useful(self, found: Any, system: FileSystem, piece: Piece, numbers: range) -> Iterable[int]:
        """Row groups that may hold rows of `where`, by their statistics."""
        import pyarrow as pa
        from pyarrow import dataset

        if self.where is None or not uses_only(self.where, [one for one in self.schema if not _floats(one.type)]):
            return numbers  # of numbers that may be NaN: statistics leave it out
        given = folder_values(piece.file, self.folders)
        known: Any = dataset.scalar(True)
        for name, value in given.items():
            column = dataset.field(name)
            known = known & (column == value if value.is_valid else column.is_null())
        fragment = dataset.ParquetFileFormat().make_fragment(
            piece.file.path, system, partition_expression=known, row_groups=list(numbers)
        )
        try:
            return [one.id for one in fragment.subset(filter=self.where, schema=self._read_schema(found)).row_groups]
        except pa.ArrowException:  # a file whose column holds nothing but nulls has no type to compare
            return numbers

    def _read_schema(self, found: Any) -> pa.Schema:
        """What the file has of our columns, in its own types: statistics are in those."""
        import pyarrow as pa

        own = found.schema_arrow
        return pa.schema([one if one.name in self.folders.names else own.field(one.name) for one in self.schema])

    def _orc(self, system: FileSystem, piece: Piece, wanted: list[str]) -> Iterator[Any]:
        from pyarrow import orc

        with system.open_input_file(piece.file.path) as opened:
            found = orc.ORCFile(opened)
            for number, rows in enumerate(piece.rows, piece.first):
                yield f", stripe {number}", rows, (found.read_stripe(one, columns=wanted) for one in (number,))

    def _arrow(self, system: FileSystem, piece: Piece, wanted: list[str]) -> Iterator[Any]:
        from pyarrow import ipc

        with (
            system.open_input_file(piece.file.path) as opened,
            ipc.open_file(opened, options=_fields(opened, wanted)) as found,
        ):
            for number, rows in enumerate(piece.rows, piece.first):
                yield f", record batch {number}", rows, (found.get_batch(one) for one in (number,))

    def _arrow_stream(self, system: FileSystem, piece: Piece, wanted: list[str]) -> Iterator[Any]:
        from pyarrow import ipc

        with system.open_input_file(piece.file.path) as opened:
            if opened.read(len(ARROW_MAGIC)) == ARROW_MAGIC:  # of a file without batches
                return
            opened.seek(0)
            with ipc.open_stream(opened, options=_fields(opened, wanted)) as found:
                yield "", None, found
                if opened.tell() != piece.file.size:
                    raise ExportError(f"{piece.file.name} ends at byte {opened.tell():,} of {piece.file.size:,}")

    def _csv(self, system: FileSystem, piece: Piece, wanted: list[str]) -> Iterator[Any]:
        import pyarrow as pa

        schema = pa.schema([self.schema.field(name) for name in wanted])
        with system.open_input_stream(piece.file.path) as opened, open_csv(opened, self.text, schema) as found:
            yield "", None, found

    def _json(self, system: FileSystem, piece: Piece, wanted: list[str]) -> Iterator[Any]:
        import pyarrow as pa
        from pyarrow import json

        fields = [one for one in self.schema if one.name in wanted]
        with system.open_input_stream(piece.file.path) as opened:
            # Fields that are not in the schema are those that nobody wants: it was learnt from all rows, or given.
            reader = json.open_json(
                _Lines(opened),
                read_options=json.ReadOptions(use_threads=False, block_size=BLOCK),
                parse_options=json.ParseOptions(explicit_schema=pa.schema(fields), unexpected_field_behavior="ignore"),
            )
            with reader as found:
                yield "", None, found


def open_parquet(opened: Any, far: bool = False) -> Any:
    """A Parquet file. Times of INT96 beyond the year 2262 have no room in nanoseconds, Arrow's choice for them."""
    import pyarrow.parquet as pq

    return pq.ParquetFile(opened, pre_buffer=far, coerce_int96_timestamp_unit="us")


def _fields(opened: Any, wanted: list[str]) -> Any:
    """Options to read only some columns of Arrow's own format, which names them by number."""
    from pyarrow import ipc

    opened.seek(0)
    magic = opened.read(len(ARROW_MAGIC)) == ARROW_MAGIC
    opened.seek(0)
    schema = (ipc.open_file(opened) if magic else ipc.open_stream(opened)).schema
    opened.seek(0)
    numbers = [number for number, name in enumerate(schema.names) if name in wanted]
    return ipc.IpcReadOptions(included_fields=numbers, use_threads=False)


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Errors of Arrow and of file systems say what they were about."""
    import pyarrow as pa

    try:
        yield
    except ExportError:
        raise
    except (pa.ArrowException, OSError, EOFError, ValueError, KeyError) as problem:
        raise ExportError(f"{what} cannot be read: {' '.join(str(problem).split())}") from problem


def slices(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The batch in slices that are not too large, each with its first row."""
    rows = batch.num_rows
    step = max(1, min(MOST_ROWS, MOST_BYTES * rows // max(1, batch.nbytes)))
    for start in range(0, rows, step):
        yield start, batch if rows <= step else batch.slice(start, step)


def _fitted(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column in the type that all files have agreed on."""
    import pyarrow as pa

    if column.type == kind or (pa.types.is_dictionary(kind) and same_kind(column.type, kind)):
        return column
    return column.cast(kind)


def mask_of(batch: pa.RecordBatch, where: Any) -> pa.BooleanArray:
    """For which rows the condition is true, false or unknown (null)."""
    import pyarrow as pa
    from pyarrow import acero

    source = acero.Declaration("table_source", acero.TableSourceNodeOptions(pa.Table.from_batches([batch])))
    told = acero.Declaration("project", acero.ProjectNodeOptions([where], ["taken"]), [source])
    column = told.to_table(use_threads=False).column("taken").combine_chunks()
    if not pa.types.is_boolean(column.type):
        raise TypeError(f"where is {column.type}, not a condition")
    return column


def uses_only(where: Any, columns: Sequence[pa.Field]) -> bool:
    """Whether the condition looks at no other columns: Arrow does not tell, but cannot do without them."""
    import pyarrow as pa

    schema = pa.schema(columns)
    try:
        mask_of(pa.RecordBatch.from_arrays([pa.nulls(0, one.type) for one in schema], schema=schema), where)
    except pa.ArrowException:
        return False
    return True


def _floats(kind: pa.DataType) -> bool:
    """Whether there are floating numbers in a column, at any depth."""
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        return _floats(kind.value_type)
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return bool(pa.types.is_floating(kind)) or any(_floats(one) for one in inner)


# ---- text


def open_csv(stream: Any, text: TextOptions, schema: pa.Schema | None) -> Any:
    """A reader of batches; without a schema only its names count, types are then a guess from the first rows.

    As in Spark, a field without anything in it is null, and one with empty quotes an empty text. Quoted fields may
    hold line ends.
    """
    import pyarrow as pa
    from pyarrow import csv

    read: dict[str, Any] = {"use_threads": False, "block_size": BLOCK}
    parse: dict[str, Any] = {"newlines_in_values": True}
    convert: dict[str, Any] = {"null_values": [""], "strings_can_be_null": True, "quoted_strings_can_be_null": False}
    for name, value in text.csv.items():
        for target, known in ((read, csv.ReadOptions), (parse, csv.ParseOptions), (convert, csv.ConvertOptions)):
            if hasattr(known, name):
                target[name] = value
                break
        else:
            raise ValueError(f"pyarrow's CSV reader has no option {name!r}")
    if schema is not None:
        convert["column_types"] = schema
        convert["include_columns"] = schema.names
    if "encoding" in read:  # made UTF-8 here, so that what looks at the bytes knows what they mean
        stream = pa.transcoding_input_stream(stream, read.pop("encoding"), "utf-8")
    stream = _LineEnds(stream)
    quote = parse.get("quote_char", '"')
    # Quotes that are escaped, or in rows that are left out, cannot be counted.
    if quote and not {"escape_char", "skip_rows"} & text.csv.keys():
        stream = _Quotes(stream, quote.encode())
    return csv.open_csv(stream, csv.ReadOptions(**read), csv.ParseOptions(**parse), csv.ConvertOptions(**convert))


class _LineEnds:
    """A stream that never ends a block between a carriage return and its line feed.

    pyarrow's CSV reader takes a line feed there for the rest of a row's end, and drops it, also where it is a part of
    a quoted value (apache/arrow#51368).
    """

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._kept = b""  # a carriage return that the last block would have ended with

    def read(self, size: int) -> bytes:
        block = self._kept + bytes(self._stream.read(size - len(self._kept)))
        if block == b"\r":  # no more than that was there, or nothing is
            block += bytes(self._stream.read(size - 1))
        self._kept = b"\r" if len(block) > 1 and block.endswith(b"\r") else b""
        return block[:-1] if self._kept else block


class _Quotes:
    """A stream of CSV in which every quote is closed: behind one that is not, rows would become a part of its field."""

    closed = False

    def __init__(self, stream: Any, quote: bytes) -> None:
        self._stream = stream
        self._quote = quote
        self._count = 0

    def read(self, size: int) -> bytes:
        block = bytes(self._stream.read(size))
        self._count += block.count(self._quote)
        if not block and self._count % 2:
            raise ValueError(
                f"a quote in it is not closed: there are {self._count:,}. Give csv={{'escape_char': '\\\\'}} if quotes "
                "are escaped in that way, csv={'quote_char': False} if they mean nothing"
            )
        return block


class _Lines:
    """A stream of JSON lines without any that is null: Arrow dies of a block that begins with one."""

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._line = b""  # what the last line begins with, as far as it was read

    def read(self, size: int) -> bytes:
        block = bytes(self._stream.read(size))
        text = self._line + block if self._line else b"\n" + block.removeprefix(MARK)
        if NULL.search(text):
            raise ValueError("a line of it is null, not an object")
        self._line = b"\n" + text[text.rfind(b"\n") + 1 :].lstrip(b" \t\r")[: len(b"null")]
        return block


def check_json(stream: Any) -> None:
    """Raises ValueError unless the first line is an object."""
    begin = bytes(stream.read(BEGIN)).removeprefix(MARK).lstrip()
    if begin and not begin.startswith(b"{"):
        raise ValueError(f"its first line is {begin[:20].decode(errors='replace')!r}, not an object")


def learnt_json(stream: Any) -> pa.Schema:
    """The columns of JSON lines, from all of them. Texts stay texts, also those that look like times."""
    import pyarrow as pa

    stream = _Lines(stream)
    whole = pa.schema([])
    rest = b""
    while True:
        block = stream.read(LEARN)
        lines, end, rest = (rest + block).rpartition(b"\n") if block else (rest, b"", b"")
        if (lines + end).strip():
            whole = pa.unify_schemas([whole, _columns_of(lines + end)], promote_options="permissive")
        if not block:
            return whole


def _columns_of(lines: bytes) -> pa.Schema:
    import pyarrow as pa
    from pyarrow import json

    options = json.ReadOptions(use_threads=False, block_size=len(lines) + 1)
    found = json.read_json(pa.BufferReader(lines), options).schema
    return pa.schema([pa.field(one.name, _texts(one.type)) for one in found])


def _texts(kind: pa.DataType) -> pa.DataType:
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(one.name, _texts(one.type)) for one in kind])
    return pa.list_(_texts(kind.value_type)) if pa.types.is_list(kind) else kind
