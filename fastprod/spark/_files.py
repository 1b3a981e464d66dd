"""Driver side of `export`: which files there are, what is in them, and how they are divided among tasks.

    source (path, folder, glob, list)
        listed()    -> File...        name, size, time of modification, format, columns from folders `day=2026-11-17`
        looked()    -> Contents       of each file: its schema, and the parts that can be read alone
        agreed()    -> schema         one for all files; a file that differs is named with the difference
        divided()   -> Split...       about equally many bytes each: neighbouring parts, in the order of the names

A part is a row group of Parquet, a stripe of ORC, a record batch of an Arrow file; text is read file by file. The
division depends on the files and the bytes per split alone, never on cores.

Everything here raises SourceError, with the name of the file, before anything is sent.
"""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow.fs import FileInfo, FileSelector, FileSystem

__all__ = [
    "Contents",
    "File",
    "Listing",
    "Piece",
    "SourceError",
    "Split",
    "TextOptions",
    "agreed",
    "divided",
    "folder_columns",
    "folder_values",
    "forget_listings",
    "given_schema",
    "listed",
    "looked",
    "same_kind",
    "same_stamp",
    "stamp_of",
    "when",
]

FORMATS = {
    ".parquet": "parquet",
    ".parq": "parquet",
    ".orc": "orc",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".ipc": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}
COMPRESSED = (".gz", ".bz2", ".zst", ".lz4")  # of text; other formats compress inside
TEXT = ("csv", "json")
TABLES = {  # whose folders hold files that are no longer, or not yet, part of the table
    "_delta_log": "a Delta table",
    ".hoodie": "a Hudi table",
    "_spark_metadata": "what a stream of Spark has written",
}
ICEBERG = re.compile(r"(^|/)metadata/[^/]*\.metadata\.json$")
STEPS_UP = 8  # where the log of a table is looked for
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
LOOKERS = 16  # most of their time is waiting
ARROW_MAGIC = b"ARROW1"
ARROW_END = struct.pack("<Ii", 0xFFFFFFFF, 0)  # behind the last message of a stream


class SourceError(ValueError):
    """Files that cannot be exported, or are others than in an earlier run; the text names them. Nothing was sent."""


# ---- files


@dataclass(frozen=True)
class File:
    """A file as it was found. Nobody may change it until the export is done."""

    system: int
    """Which of the listing's file systems has it."""
    path: str
    """There."""
    name: str
    """For people, and for the names of exactly once: the path or URI, without credentials."""
    size: int
    stamp: str
    """What changes when the content does: an etag, or the time of modification in nanoseconds."""
    form: str
    keys: tuple[tuple[str, str | None], ...] = ()
    """Columns that its folders give, as text."""


@dataclass(frozen=True)
class Listing:
    """All files of an export, by name."""

    systems: tuple[FileSystem, ...]
    files: tuple[File, ...]


def listed(source: Any, form: str | None = None, system: FileSystem | None = None) -> Listing:
    """The files that a source names."""
    sources = [source] if isinstance(source, (str, bytes)) or hasattr(source, "__fspath__") else list(source)
    if not sources:
        raise SourceError("the source names no files. Nothing was sent")
    if form is not None and form not in FORMATS.values():
        raise SourceError(f"format is one of {', '.join(dict.fromkeys(FORMATS.values()))}, not {form!r}")
    systems: list[FileSystem] = []
    found: dict[str, File] = {}
    known: dict[str, str] = {}
    for one in sources:
        where = _Place.of(one, system)
        systems.append(where.system)
        forget_listings(where.system)
        for info, keys in where.files():
            name = where.prefix + info.path
            local = where.system.type_name == "local"
            before = known.setdefault(
                os.path.realpath(info.path) if local else _one_name(where.prefix, info.path), name
            )
            if name in found or before != name:
                as_too = "" if before == name else f", as {before} too"
                raise SourceError(f"{name} is named twice{as_too}: its rows would be written twice. Nothing was sent")
            if info.size == 0:
                raise SourceError(
                    f"{name} is empty (0 bytes): was it being written? Remove it, or name the others. Nothing was sent"
                )
            kind = form or _format_of(name)
            found[name] = File(len(systems) - 1, info.path, name, info.size, stamp_of(where.system, info), kind, keys)
    files = tuple(found[name] for name in sorted(found))
    for file in files:
        if [key for key, _ in file.keys] != [key for key, _ in files[0].keys]:
            raise SourceError(
                f"the folders of {file.name} give the columns {_keys(file)}, those of {files[0].name} give "
                f"{_keys(files[0])}. Nothing was sent"
            )
    return Listing(tuple(systems), files)


def _one_name(prefix: str, path: str) -> str:
    """The same for all names of a file elsewhere."""
    return re.sub("^s3[an]:", "s3:", prefix) + posixpath.normpath(path)


def _keys(file: File) -> str:
    return ", ".join(key for key, _ in file.keys) or "none"


def _format_of(name: str) -> str:
    plain = name
    for ending in COMPRESSED:
        plain = plain.removesuffix(ending)
    form = FORMATS.get(posixpath.splitext(plain.lower())[1])
    if form is None or (plain != name and form not in TEXT):
        raise SourceError(
            f"cannot tell the format of {name} from its name: give format='parquet', or name only the files that are "
            "meant, as in 'folder/*.parquet'. Nothing was sent"
        )
    return form


def forget_listings(system: FileSystem) -> None:
    """File systems of fsspec live as long as their process, and remember what a folder held when they first looked."""
    system = getattr(system, "base_fs", system)  # of a part of another
    theirs: Any = getattr(getattr(system, "handler", None), "fs", None)
    if hasattr(theirs, "invalidate_cache"):
        theirs.invalidate_cache()
    if hasattr(theirs, "dircache"):
        theirs.dircache.clear()  # for that of HTTP the above does nothing


def stamp_of(system: FileSystem, info: FileInfo) -> str:
    """The etag where fsspec tells one, else the time of modification.

    From the listing that `info` is of, where there was one: thousands of files are not asked for one by one.
    """
    handler = getattr(system, "handler", None)
    if handler is not None and hasattr(handler, "fs"):
        told = handler.fs.info(info.path)
        tag = next((told[name] for name in ("ETag", "etag", "md5Hash", "generation") if told.get(name)), None)
        if tag is not None:
            return str(tag).strip('"')
    return "" if info.mtime_ns is None else str(info.mtime_ns)


def same_stamp(one: str, other: str, exact: bool = False) -> bool:
    """Whether two stamps are of the same content. Some stores tell milliseconds in listings, but seconds of a file."""
    if exact or one == other or not (one.isdecimal() and other.isdecimal()):
        return one == other
    (seconds, rest), (others, more) = divmod(int(one), 10**9), divmod(int(other), 10**9)
    return seconds == others and (not rest or not more)


@dataclass(frozen=True)
class _Place:
    """One entry of the source, in its file system."""

    system: FileSystem
    prefix: str  # of names
    base: str  # the part of the path without wildcards
    pattern: tuple[str, ...]  # what follows, folder by folder

    @classmethod
    def of(cls, source: Any, system: FileSystem | None) -> _Place:
        from pyarrow.fs import LocalFileSystem

        text = os.fsdecode(source).rstrip("/") or "/"
        scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):(?=/)", text)
        local = system is None and (scheme is None or scheme[1] == "file")
        if local:
            text = os.path.abspath(re.sub("^file:(//(localhost)?(?=/))?", "", text))
        fixed, pattern = _parted(text)
        if local:
            return cls(LocalFileSystem(), "", fixed, pattern)
        if system is not None:
            return cls(system, "" if system.type_name == "local" else f"{system.type_name}:", fixed, pattern)
        assert scheme is not None
        system, path = _reached(fixed, scheme[1])
        return cls(system, f"{scheme[1]}://", path.rstrip("/"), pattern)

    def files(self) -> Iterator[tuple[FileInfo, tuple[tuple[str, str | None], ...]]]:
        """What is there, and the columns that folders below `base` give."""
        from pyarrow.fs import FileType

        name = self.prefix + posixpath.join(self.base, *self.pattern)
        tops = self._matching(self.base, self.pattern) if self.pattern else [self.system.get_file_info(self.base)]
        if not tops or tops[0].type == FileType.NotFound:
            raise SourceError(f"{name} {'matches nothing' if self.pattern else 'does not exist'}. Nothing was sent")
        if self.pattern or tops[0].type != FileType.File:
            self._check_above([top.path for top in tops])
        some = False
        for top in tops:
            self._check(top)
            inside = [top] if top.type == FileType.File else self._below(top.path)
            for info in inside:
                some = True
                yield info, _keys_of(info.path[len(self.base) :])
        if not some:
            raise SourceError(f"{name} holds no files with data. Nothing was sent")

    def _below(self, folder: str) -> list[FileInfo]:
        from pyarrow.fs import FileSelector, FileType

        kept = []
        for info in self._entries(FileSelector(folder, recursive=True)):
            inner = info.path[len(folder) :].strip("/")
            kind = next((TABLES[part] for part in inner.split("/") if part in TABLES), None)
            kind = kind or ("an Iceberg table" if ICEBERG.search(inner) else None)
            if kind is not None:
                raise self._table(folder, kind)
            if not any(_hidden(part) for part in inner.split("/")):
                self._check(info)
                if info.type == FileType.File:
                    kept.append(info)
        return kept

    def _check_above(self, paths: Iterable[str]) -> None:
        """Refuses what lies in the folder of a table, some steps up."""
        from pyarrow.fs import FileSelector, FileType

        def kind_of(folder: str) -> str | None:
            try:
                names = [posixpath.join(folder, name) for name in (*TABLES, "metadata")]
                *logs, metadata = self.system.get_file_info(names)
                for log in logs:
                    if log.type != FileType.NotFound:
                        return TABLES[log.base_name]
                if metadata.type != FileType.Directory:
                    return None
                inside = self.system.get_file_info(FileSelector(metadata.path))
                return "an Iceberg table" if any(ICEBERG.search(info.path) for info in inside) else None
            except Exception:  # of any kind: who may read a folder need not be allowed to look at those above
                return None

        above: set[str] = set()
        for path in paths:
            for _ in range(STEPS_UP):
                path = posixpath.dirname(path)
                if not path or path in above:
                    break
                above.add(path)
        folders = sorted(above, reverse=True)
        with ThreadPoolExecutor(LOOKERS) as pool:
            for folder, kind in zip(folders, pool.map(kind_of, folders), strict=True):
                if kind is not None:
                    raise self._table(folder, kind)

    def _table(self, folder: str, kind: str) -> SourceError:
        return SourceError(
            f"{self.prefix}{folder} is {kind}: only its log says which of the files count. Read it with Spark "
            "and use fastprod.spark.write(), or name the files. Nothing was sent"
        )

    def _entries(self, selector: FileSelector) -> list[FileInfo]:
        """What is there, with links that lead nowhere, which Arrow leaves out."""
        from pyarrow.fs import FileType

        found: list[FileInfo] = self.system.get_file_info(selector)
        if self.system.type_name != "local":
            return found
        folders = [selector.base_dir]
        if selector.recursive:
            folders += [info.path for info in found if info.type == FileType.Directory]
        lost = []
        for folder in folders:
            if os.path.isdir(folder):
                with os.scandir(folder) as entries:
                    lost += [one.path for one in entries if one.is_symlink() and not os.path.exists(one.path)]
        return found + (self.system.get_file_info(lost) if lost else [])

    def _check(self, info: FileInfo) -> None:
        from pyarrow.fs import FileType

        if info.type not in (FileType.File, FileType.Directory):
            raise SourceError(
                f"{self.prefix}{info.path} is neither a file nor a folder, or a link that leads nowhere: its rows "
                "would be missing. Remove it, or name the others. Nothing was sent"
            )

    def _matching(self, folder: str, pattern: Sequence[str]) -> list[FileInfo]:
        """Files and folders that a pattern names, one step at a time. Hidden ones only where it says so itself."""
        from pyarrow.fs import FileSelector, FileType

        first, rest = pattern[0], pattern[1:]
        found = []
        for info in self._entries(FileSelector(folder, allow_not_found=True)):
            if fnmatch.fnmatchcase(info.base_name, first) and (not _hidden(info.base_name) or _hidden(first)):
                self._check(info)
                if not rest:
                    found.append(info)
                elif info.type == FileType.Directory:
                    found += self._matching(info.path, rest)
        return sorted(found, key=lambda info: str(info.path))


def _parted(text: str) -> tuple[str, tuple[str, ...]]:
    """A path up to its first wildcard, and the rest folder by folder."""
    parts = text.split("/")
    wild = next((number for number, part in enumerate(parts) if re.search(r"[*?[{]", part)), len(parts))
    if any("{" in part or part == "**" for part in parts[wild:]):
        raise SourceError(f"{text}: {{a,b}} and ** are not understood; give a list of paths. Nothing was sent")
    return "/".join(parts[:wild]) or "/", tuple(parts[wild:])


def _reached(uri: str, scheme: str) -> tuple[FileSystem, str]:
    """The file system of a URI: one of Arrow's, else one of fsspec's."""
    import pyarrow as pa
    from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

    shown = re.sub(r"//[^/@]*@", "//", uri)
    try:
        known: tuple[FileSystem, str] = FileSystem.from_uri(re.sub("^s3[an]:", "s3:", uri))
        return known
    except pa.ArrowInvalid as problem:
        if "Unrecognized filesystem type" not in str(problem):
            raise SourceError(f"{shown}: {str(problem).replace(uri, shown)}. Nothing was sent") from None
    except (OSError, pa.ArrowException) as problem:
        raise SourceError(f"{shown}: {str(problem).replace(uri, shown)}. Nothing was sent") from None
    try:
        import fsspec
    except ModuleNotFoundError:
        raise SourceError(
            f"{shown}: Arrow knows no file system {scheme!r}; fsspec may: pip install fsspec, and what it needs for "
            f"{scheme!r}, here and on the executors. Nothing was sent"
        ) from None
    try:
        system, path = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError, OSError) as problem:
        raise SourceError(f"{shown}: {str(problem).replace(uri, shown)}. Nothing was sent") from None
    return PyFileSystem(FSSpecHandler(system)), path


def _hidden(name: str) -> bool:
    """Spark's rule: _SUCCESS, .part-0.crc and the like, but not a folder `_day=1`."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name) or name.endswith("._COPYING_")


def _keys_of(path: str) -> tuple[tuple[str, str | None], ...]:
    found = []
    for folder in posixpath.dirname(path).split("/"):
        key, sign, value = folder.partition("=")
        if key and sign:
            found.append((unquote(key), None if value == NO_VALUE else unquote(value)))
    return tuple(found)


# ---- columns from folders


def folder_columns(files: Sequence[File], given: pa.Schema | None) -> pa.Schema:
    """Columns that the names of folders give, with the first of these types that all values have, as Spark finds them:
    int, bigint, double, date, string."""
    import pyarrow as pa

    fields = []
    for place, (key, _) in enumerate(files[0].keys):
        values = {file.keys[place][1] for file in files} - {None}
        kind = given.field(key).type if given is not None and key in given.names else _kind_of(values)
        fields.append(pa.field(key, kind))
    return pa.schema(fields)


def _kind_of(values: Iterable[str | None]) -> pa.DataType:
    import pyarrow as pa

    texts = [str(value) for value in values]

    def all_are(form: str, fits: Callable[[str], bool]) -> bool:
        return bool(texts) and all(re.fullmatch(form, text) and fits(text) for text in texts)

    whole, broken = r"[+-]?\d+", r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
    if all_are(whole, lambda text: -(2**31) <= int(text) < 2**31):
        return pa.int32()
    if all_are(whole, lambda text: -(2**63) <= int(text) < 2**63):
        return pa.int64()
    if all_are(broken, lambda text: True):
        return pa.float64()
    if all_are(r"\d{4}-\d{2}-\d{2}", _is_date):
        return pa.date32()
    return pa.string()


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def folder_values(file: File, columns: pa.Schema) -> dict[str, pa.Scalar]:
    import pyarrow as pa

    made = {}
    for key, text in file.keys:
        kind = columns.field(key).type
        try:
            made[key] = pa.scalar(None, kind) if text is None else pa.scalar(text).cast(kind)
        except pa.ArrowException as problem:
            raise SourceError(f"{file.name}: {key}={text} is no {kind}: {problem}. Nothing was sent") from None
    return made


# ---- contents


@dataclass(frozen=True)
class TextOptions:
    """How text is read: options of pyarrow's CSV reader by name, and the schema that was given."""

    csv: Mapping[str, Any] = field(default_factory=dict)
    schema: pa.Schema | None = None


@dataclass(frozen=True)
class Contents:
    """What is in a file, as it says itself."""

    schema: pa.Schema
    weights: tuple[int, ...] = ()
    """Bytes of each part; empty where the file is read as a whole."""
    rows: tuple[int, ...] | None = None
    """Of each part, where the format tells."""


def given_schema(schema: Any) -> pa.Schema | None:
    """`schema=` as Arrow's: a pyarrow.Schema, or a mapping from names to types or their names."""
    import pyarrow as pa

    if schema is None or isinstance(schema, pa.Schema):
        return schema
    try:
        named = {name: pa.type_for_alias(kind) if isinstance(kind, str) else kind for name, kind in schema.items()}
        return pa.schema(named)
    except (ValueError, TypeError, AttributeError) as problem:
        raise SourceError(
            f"schema is a pyarrow.Schema, or a mapping such as {{'amount': 'double'}}, not {schema!r}: {problem}"
        ) from None


def looked(listing: Listing, text: TextOptions, learnt: Mapping[str, pa.Schema] | None = None) -> dict[str, Contents]:
    """Looks into each file; `learnt` is what tasks have found out about files of JSON lines, by name."""

    def look(file: File) -> Contents:
        if learnt is not None and file.name in learnt:
            return Contents(learnt[file.name])
        try:
            found = _LOOKS[file.form](listing.systems[file.system], file, text)
        except Exception as problem:  # of file systems and formats there are many, and so are their errors
            raise SourceError(
                f"{file.name} cannot be read as {file.form}: {' '.join(str(problem).split())}. Nothing was sent"
            ) from problem
        doubled = {name for name in found.schema.names if found.schema.names.count(name) > 1}
        if doubled:
            raise SourceError(f"{file.name} has more than one column {min(doubled)!r}. Nothing was sent")
        return found

    with ThreadPoolExecutor(LOOKERS) as pool:
        return dict(zip((file.name for file in listing.files), pool.map(look, listing.files), strict=True))


def _look_parquet(system: FileSystem, file: File, text: TextOptions) -> Contents:
    from fastprod.spark._reading import open_parquet

    with system.open_input_file(file.path) as opened, open_parquet(opened) as found:
        known = found.metadata
        groups = [known.row_group(number) for number in range(known.num_row_groups)]
        sizes = [max(1, group.total_byte_size) for group in groups]
        share = file.size / sum(sizes) if sizes else 0.0  # on disk they are compressed
        return Contents(
            _instants(found),
            tuple(max(1, int(size * share)) for size in sizes),
            tuple(group.num_rows for group in groups),
        )


def _instants(found: Any) -> pa.Schema:
    """The columns of a Parquet file. INT96, which Spark writes, is an instant there, but has no zone for Arrow."""
    import pyarrow as pa

    known = found.metadata.schema
    leaves = (known.column(number).physical_type for number in range(len(known)))

    def told(kind: pa.DataType) -> pa.DataType:
        """The type with zones; takes its columns, which come in the same order, from `leaves`."""
        if pa.types.is_struct(kind):
            return pa.struct([pa.field(one.name, told(one.type)) for one in kind])
        if pa.types.is_map(kind):
            key = told(kind.key_type)
            return pa.map_(key, told(kind.item_type))
        if pa.types.is_list(kind):
            return pa.list_(told(kind.value_type))
        return pa.timestamp("us", "UTC") if next(leaves) == "INT96" else kind

    schema = found.schema_arrow.remove_metadata()
    if all(known.column(number).physical_type != "INT96" for number in range(len(known))):
        return schema
    return pa.schema([pa.field(one.name, told(one.type)) for one in schema])


def _look_orc(system: FileSystem, file: File, text: TextOptions) -> Contents:
    from pyarrow import orc

    with system.open_input_file(file.path) as opened:
        found = orc.ORCFile(opened)
        count = found.nstripes
        return Contents(
            found.schema.remove_metadata(),
            (max(1, file.size // max(1, count)),) * count,
            (found.nrows,) if count == 1 else None,
        )


def _look_arrow(system: FileSystem, file: File, text: TextOptions) -> Contents:
    from pyarrow import ipc

    with system.open_input_file(file.path) as opened:
        if opened.read(len(ARROW_MAGIC)) == ARROW_MAGIC:
            opened.seek(0)
            with ipc.open_file(opened) as found:
                count = found.num_record_batches
                return Contents(found.schema.remove_metadata(), (max(1, file.size // max(1, count)),) * count)
        opened.seek(max(0, file.size - len(ARROW_END)))
        if opened.read() != ARROW_END:
            raise ValueError("it is no Arrow file, nor a stream with its end")
        opened.seek(0)
        with ipc.open_stream(opened) as stream:
            return Contents(stream.schema.remove_metadata())


def _look_csv(system: FileSystem, file: File, text: TextOptions) -> Contents:
    """CSV has no types: columns are text, as in Spark, unless a schema says otherwise."""
    import pyarrow as pa

    from fastprod.spark._reading import open_csv

    with system.open_input_stream(file.path) as opened, open_csv(opened, text, None) as found:
        names = found.schema.names
    given = text.schema
    return Contents(
        pa.schema(
            [given.field(name) if given and name in given.names else pa.field(name, pa.string()) for name in names]
        )
    )


def _look_json(system: FileSystem, file: File, text: TextOptions) -> Contents:
    from fastprod.spark._reading import check_json, learnt_json

    with system.open_input_stream(file.path) as opened:
        if text.schema is not None:
            check_json(opened)
            return Contents(text.schema.remove_metadata())
        return Contents(learnt_json(opened))


_LOOKS = {
    "parquet": _look_parquet,
    "orc": _look_orc,
    "arrow": _look_arrow,
    "csv": _look_csv,
    "json": _look_json,
}


# ---- one schema


def agreed(files: Sequence[File], contents: Mapping[str, Contents], folders: pa.Schema) -> pa.Schema:
    """The columns of all files, and those that folders give. The order of columns may differ, their types may not.

    JSON lines leave out what they have not got, so for them it is the columns of any file.
    """
    import pyarrow as pa

    if all(file.form == "json" for file in files):
        return _with_folders(_agreed_json(files, contents), folders)
    first = contents[files[0].name].schema
    kinds = {one.name: one.type for one in first}
    for file in files[1:]:
        other = contents[file.name].schema
        if other.equals(first):
            continue
        against = f"{files[0].name}, with which all others are compared"
        missing = [name for name in kinds if name not in other.names]
        added = [name for name in other.names if name not in kinds]
        if missing or added:
            what = f"no column {missing[0]!r}, which" if missing else f"a column {added[0]!r}, which"
            has = "has" if missing else "has not"
            raise SourceError(f"{file.name} has {what} {against}, {has}. Nothing was sent")
        for name, kind in kinds.items():
            theirs = other.field(name).type
            if pa.types.is_null(kind):
                kinds[name] = theirs  # nothing but nulls fits everything
            elif not pa.types.is_null(theirs) and not same_kind(kind, theirs):
                raise SourceError(
                    f"{file.name}: column {name!r} is {theirs}, but {kind} in {against}. Nothing was sent"
                )
    return _with_folders(pa.schema([pa.field(name, kind) for name, kind in kinds.items()]), folders)


def _agreed_json(files: Sequence[File], contents: Mapping[str, Contents]) -> pa.Schema:
    import pyarrow as pa

    whole = contents[files[0].name].schema
    for file in files[1:]:
        try:
            whole = pa.unify_schemas([whole, contents[file.name].schema], promote_options="permissive")
        except pa.ArrowException as problem:
            raise SourceError(
                f"{file.name} differs from the files before it: {problem}. Give schema=... to say what is right. "
                "Nothing was sent"
            ) from None
    return whole


def _with_folders(schema: pa.Schema, folders: pa.Schema) -> pa.Schema:
    """Folders beat columns of the same name, as in Spark."""
    for one in folders:
        place = schema.get_field_index(one.name)
        schema = schema.append(one) if place < 0 else schema.set(place, one)
    return schema


def same_kind(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether values are the same, in whatever layout: string and large_string, plain and dictionary."""
    return bool(_plain_kind(one) == _plain_kind(other))


def _plain_kind(kind: pa.DataType) -> Any:
    import pyarrow as pa

    known = pa.types
    if known.is_dictionary(kind):
        return _plain_kind(kind.value_type)
    if known.is_large_string(kind) or known.is_string_view(kind):
        return pa.string()
    if known.is_large_binary(kind) or known.is_binary_view(kind):
        return pa.binary()
    if known.is_struct(kind):
        return ("struct", *((one.name, _plain_kind(one.type)) for one in kind))
    if known.is_map(kind):
        return ("map", _plain_kind(kind.key_type), _plain_kind(kind.item_type))
    if known.is_list(kind) or known.is_large_list(kind) or known.is_fixed_size_list(kind):
        return ("list", _plain_kind(kind.value_type))
    return kind


# ---- division


@dataclass(frozen=True)
class Piece:
    """Neighbouring parts of a file, or all of it."""

    file: File
    first: int = 0
    rows: tuple[int | None, ...] = (None,)
    """Of each part, None where the file does not tell."""
    whole: bool = True
    """Whether the file has no parts that could be read alone."""

    @property
    def label(self) -> str:
        if self.whole:
            return self.file.name
        last = self.first + len(self.rows) - 1
        return f"{self.file.name}[{self.first}{f'..{last}' if last > self.first else ''}]"


Split = tuple[Piece, ...]


def divided(files: Sequence[File], contents: Mapping[str, Contents], size: float) -> list[Split]:
    """Splits of about `size` bytes; as many as that gives, with about equally many bytes each."""
    parts: list[tuple[Piece, int]] = []
    for file in files:
        known = contents[file.name]
        if not known.weights and file.form in (*TEXT, "arrow"):
            parts.append((Piece(file), file.size))
        for number, weight in enumerate(known.weights):
            rows = known.rows[number] if known.rows is not None else None
            parts.append((Piece(file, number, (rows,), False), weight))
    total = sum(weight for _, weight in parts)
    count = max(1, round(total / size))
    splits: list[Split] = []
    current: list[Piece] = []
    done = 0
    for piece, weight in parts:
        # Cut where the middle of the next part lies beyond the end of the split.
        if current and (done + weight / 2) * count > total * (len(splits) + 1):
            splits.append(tuple(current))
            current = []
        done += weight
        last = current[-1] if current else None
        if last is not None and last.file == piece.file and not piece.whole:
            current[-1] = replace(last, rows=last.rows + piece.rows)
        else:
            current.append(piece)
    return [*splits, tuple(current)] if current else splits


def when(stamp: str) -> str:
    """A stamp in words."""
    if stamp.isdecimal() and len(stamp) >= 18:
        return f"modified {datetime.fromtimestamp(int(stamp) / 1e9, UTC):%Y-%m-%d %H:%M:%S.%f} UTC"
    return f"etag {stamp}" if stamp else "of unknown time"
