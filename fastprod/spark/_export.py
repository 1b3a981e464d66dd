"""`fastprod.spark.export`: files into Kafka. Spark plans, distributes, retries and reports; no row passes the JVM.

    driver   listed() -> types of JSON lines, learnt by tasks -> surveyed() -> Shape.resolved() -> prepared()
    task     number of its split -> Reader.read() -> Shape.sender() -> acknowledgements, commit -> TaskReport

With Spark Connect the client need not be near files or brokers: `_there` runs those steps in a task, and refusals come
back as what they are.

Exactly once: a split is named by its files with their sizes and times, and by its parts of them. The job's marker has
all files, the bytes per split and what becomes of a row; so every run of the job makes the same splits, whatever the
cores, and one whose files or arguments are others is refused, naming them. A task that finds the marker of its split
reads nothing.
"""

from __future__ import annotations

import base64
import json
import pickle
import re
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from fastprod import _positions
from fastprod.spark import _files, _once
from fastprod.spark._files import Contents, Listing, SourceError, Split, TextOptions
from fastprod.spark._reading import Reader, Rows, learnt_json, mask_of, uses_only
from fastprod.spark._shape import Shape, digest, steady
from fastprod.spark._sink import FILES, ExportError, Sink
from fastprod.spark._where import parsed
from fastprod.spark._worker import Task, in_task, sender
from fastprod.spark.report import ExportReport, TaskReport

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

__all__ = ["ExportPlan", "Order", "chosen", "run"]

SMALLEST, LARGEST = 4 << 20, 128 << 20  # bytes of a split, unless told
PER_CORE = 4  # splits, where files are large enough: tasks end at about the same time
CORES = 8  # where nobody tells
MOST_SPLITS = 100_000
NOTE = 3900  # characters of a note about files; the claim's id stands beside it
MOST_NOTES = 1000
SHOWN = 5  # files in a message
LABEL = 200  # characters of what a task says about its files

Made = TypeVar("Made")


@dataclass(frozen=True)
class ExportPlan:
    """What an export is about to write."""

    files: int
    bytes: int
    """Of the files, as they are stored."""
    rows: int | None
    """Before `where`; None where the formats do not tell."""
    splits: int
    """Tasks, with about equally many bytes each."""


@dataclass(frozen=True)
class Order:
    """What the caller of `export` wants."""

    source: Any
    shape: Shape
    form: str | None = None
    system: Any = field(default=None, repr=False)
    text: TextOptions = field(default_factory=TextOptions)
    where: Any = None
    splits: int | None = None
    split_bytes: int | None = None


@dataclass(frozen=True)
class Survey:
    """What is in the files that count."""

    listing: Listing
    contents: Mapping[str, Contents]
    schema: pa.Schema
    folders: pa.Schema
    where: Any

    @property
    def size(self) -> int:
        return sum(file.size for file in self.listing.files)

    def plan(self, splits: int) -> ExportPlan:
        rows = [known.rows for known in self.contents.values()]
        counted = None if any(one is None for one in rows) else sum(sum(one or ()) for one in rows)
        return ExportPlan(len(self.listing.files), self.size, counted, splits)


# ---- driver


def run(
    spark: SparkSession,
    order: Order,
    sink: Sink,
    *,
    remote: bool,
    cores: int | None,
    watch: Callable[[ExportPlan], None] | None = None,
) -> ExportReport:
    """Writes all files, and returns when every record is acknowledged."""
    start = time.monotonic()
    source, form, system, text, where = order.source, order.form, order.system, order.text, order.where
    listing = _there(spark, remote, lambda: _files.listed(source, form, system))
    learnt = _learnt(spark, listing, text)
    survey = _there(spark, remote, lambda: surveyed(listing, text, where, learnt))
    shape = order.shape.resolved(chosen(survey.schema, order.shape.needed(survey.schema)))
    reader = _reader(survey, shape, order.text)
    size = _split_bytes(order, survey.size, cores)
    how = {} if sink.job is None else described(order, survey, shape, reader)
    bare = replace(survey, where=None)
    sink, splits = _there(spark, remote, lambda: prepared(sink, bare, size, how))
    # Each split is packed alone: a task need not unpack those of others.
    packed = [zlib.compress(pickle.dumps(split)) for split in splits]
    work = _Work(sink, reader, shape, packed)
    if watch is not None:
        watch(survey.plan(len(splits)))
    reports = _tasks(spark, len(packed), work, "report string") if packed else []
    told = [TaskReport.from_json(row.report) for row in reports]
    if sorted(task.task for task in told) != list(range(len(packed))):
        raise ExportError(
            f"{len(packed)} splits were to be written, but {len(told)} tasks have reported. Please report this"
        )
    return ExportReport.of(told, time.monotonic() - start, files=len(survey.listing.files))


def described(order: Order, survey: Survey, shape: Shape, reader: Reader) -> dict[str, str]:
    """A short name for each thing that records depend on besides the files; for exactly once."""
    types = [(one.name, str(one.type)) for one in reader.schema]  # folders that `where` leaves out have a say in these
    return {
        **shape.identity(),
        "where": digest(_complete(order.where)),
        "schema": digest(str(replace(order.text, csv=steady("csv", order.text.csv)))),
        "format": digest(repr(sorted({file.form for file in survey.listing.files}))),  # by name, or one for all
        "types": digest(repr(types)),
    }


def _complete(where: Any) -> str:
    """A condition as text that says all. Arrow's leaves out the middle of many values; then its bytes say it."""
    if isinstance(where, str):
        return where.strip()
    text = str(where)
    return text + bytes(where.__reduce__()[1][0]).hex() if "..." in text else text


def _split_bytes(order: Order, total: int, cores: int | None) -> float:
    if order.splits is not None:
        return max(1.0, total / order.splits)
    return float(order.split_bytes or min(LARGEST, max(SMALLEST, total / (PER_CORE * (cores or CORES)))))


def _tasks(spark: SparkSession, count: int, work: Callable[[Iterable[Any]], Iterator[Any]], schema: str) -> list[Any]:
    """A task for each number from 0 on."""
    return spark.range(0, count, 1, count).mapInArrow(work, schema).collect()


def _there(spark: SparkSession, remote: bool, step: Callable[[], Made]) -> Made:
    """A step of the driver's, in a task where the driver is far from files and brokers."""
    if not remote:
        return step()

    def work(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for _ in batches:
            try:
                outcome: Any = (step(), None)
            except (ValueError, TypeError, ExportError) as problem:
                outcome = (None, type(problem)(*problem.args))
            yield pa.record_batch({"outcome": pa.array([pickle.dumps(outcome)], pa.binary())})

    (row,) = _tasks(spark, 1, work, "outcome binary")
    made, problem = pickle.loads(bytes(row.outcome))
    if problem is not None:
        raise problem
    return made  # type: ignore[no-any-return]


def _learnt(spark: SparkSession, listing: Listing, text: TextOptions) -> dict[str, pa.Schema]:
    """The columns of files of JSON lines, which only those who read all of them know: a task for each file."""
    files = [] if text.schema is not None else [file for file in listing.files if file.form == "json"]
    if not files:
        return {}

    def work(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        for batch in batches:
            for number in batch.column(0).to_pylist():
                file = files[number]
                try:
                    with listing.systems[file.system].open_input_stream(file.path) as opened:
                        outcome: Any = (file.name, learnt_json(opened), None)
                except (pa.ArrowException, OSError, ValueError) as problem:
                    why = (
                        f"{file.name} cannot be read as JSON lines: {' '.join(str(problem).split())}. Nothing was sent"
                    )
                    outcome = (file.name, None, why)
                yield pa.record_batch({"outcome": pa.array([pickle.dumps(outcome)], pa.binary())})

    found = {}
    for row in _tasks(spark, len(files), work, "outcome binary"):
        name, schema, why = pickle.loads(bytes(row.outcome))
        if why is not None:
            raise SourceError(why)
        found[name] = schema
    return found


def surveyed(listing: Listing, text: TextOptions, where: Any, learnt: Mapping[str, pa.Schema]) -> Survey:
    """Looks into all files that may hold rows of `where`, by the columns that their folders give."""
    folders = _files.folder_columns(listing.files, text.schema)
    first = replace(listing, files=listing.files[:1])
    if where is not None and len(folders):
        one = _files.looked(first, text, learnt)
        known = _files.agreed(first.files, one, folders)
        listing = _pruned(listing, folders, known, _condition(where, known))
    contents = _files.looked(listing, text, learnt)
    schema = _files.agreed(listing.files, contents, folders)
    if set(schema.names) <= set(folders.names):
        raise SourceError(f"{listing.files[0].name} has no columns of its own, so no rows. Nothing was sent")
    return Survey(listing, contents, schema, folders, None if where is None else _condition(where, schema))


def _condition(where: Any, schema: pa.Schema) -> Any:
    """`where` as an expression that fits the columns."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(where, str):
        where = parsed(where, schema)
    if not isinstance(where, pc.Expression):
        raise TypeError(f"where is a condition as text, or a pyarrow expression, not {where!r}")
    if "FieldPath(" in re.sub(r'"(\\.|[^"\\])*"', "", str(where)):
        raise ValueError(
            "where names a column by number, but only some of the columns are read: name it, as in "
            "pc.field('amount') > 10. Nothing was sent"
        )
    try:
        mask_of(pa.RecordBatch.from_arrays([pa.nulls(0, one.type) for one in schema], schema=schema), where)
    except (pa.ArrowException, TypeError) as problem:
        raise ValueError(f"where does not fit the columns: {problem}. Nothing was sent") from None
    return where


def _pruned(listing: Listing, folders: pa.Schema, schema: pa.Schema, where: Any) -> Listing:
    """Without files whose folders say that no row of theirs is wanted; one is kept, for its columns."""
    from pyarrow import dataset

    form = dataset.ParquetFileFormat()  # only its name is needed: no file is opened
    fragments = []
    for number, file in enumerate(listing.files):
        known: Any = dataset.scalar(True)
        for name, value in _files.folder_values(file, folders).items():
            known = known & (dataset.field(name) == value if value.is_valid else dataset.field(name).is_null())
        fragments.append(form.make_fragment(str(number), listing.systems[file.system], partition_expression=known))
    whole = dataset.FileSystemDataset(fragments, schema, form, listing.systems[0])
    kept = sorted({int(one.path) for one in whole.get_fragments(filter=where)} | {0})
    return replace(listing, files=tuple(listing.files[number] for number in kept))


def chosen(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    import pyarrow as pa

    return pa.schema([schema.field(name) for name in names])


def _reader(survey: Survey, shape: Shape, text: TextOptions) -> Reader:
    """Reads the columns that are wanted, and those that `where` looks at."""
    names = shape.needed(survey.schema)
    wanted = set(names)
    if survey.where is not None:
        others = {name: [one for one in survey.schema if one.name != name] for name in survey.schema.names}
        wanted |= {name for name, rest in others.items() if name not in wanted and not uses_only(survey.where, rest)}
    own = [name for name in survey.schema.names if name not in survey.folders.names]
    if not wanted & set(own):
        wanted |= set(own[:1])  # else nobody could count the rows
    read = chosen(survey.schema, [name for name in survey.schema.names if name in wanted])
    return Reader(survey.listing.systems, read, survey.folders, tuple(names), survey.where, text)


def prepared(sink: Sink, survey: Survey, size: float, how: Mapping[str, str]) -> tuple[Sink, list[Split]]:
    """The splits; for exactly once those of an earlier run, after its files are found to be the same."""
    files = survey.listing.files
    if sink.job is None:
        return sink, _divided(survey, size)
    for file in files:
        if not file.stamp:
            raise SourceError(
                f"{file.name} has neither a time of modification nor an etag, so exactly_once could not tell whether "
                "it has changed. Nothing was sent"
            )
    size = max(1, int(size))
    found = _once.earlier(sink)
    if found is not None and "notes" in found:
        for name, is_now in how.items():
            if found["how"].get(name) != is_now:
                raise ValueError(
                    f"job {sink.job!r} was run before with another {name}: its records would be others than those that "
                    "are committed. Nothing was sent. Run it as before; another job_id writes all again"
                )
        notes = _once.noted(sink, found, found["notes"])
        _check_files(sink, survey.listing, [one for note in notes for one in _unpacked(note)])
        size = found["split_bytes"]
    splits = _divided(survey, size)
    notes = _packed([(file.name, file.size, file.stamp) for file in files])
    if len(notes) > MOST_NOTES:
        raise SourceError(f"{len(files):,} files are too many for one job of exactly_once: export folders one by one")
    about = {"split_bytes": size, "how": dict(how), "notes": len(notes)}
    # What is compressed may look otherwise on another machine, and a time be more exact.
    sizes = [[file.name, file.size] for file in files]
    name = digest(json.dumps([sizes, size, dict(how), [[piece.label for piece in split] for split in splits]]))
    return _once.claim(replace(sink, layout=FILES + name, partitions=len(splits)), about, notes), splits


def _divided(survey: Survey, size: float) -> list[Split]:
    splits = _files.divided(survey.listing.files, survey.contents, size)
    if len(splits) > MOST_SPLITS:
        raise ValueError(f"{len(splits):,} splits are more than {MOST_SPLITS:,}: give a larger split_bytes")
    return splits


def _packed(files: Sequence[tuple[str, int, str]]) -> list[str]:
    """Notes about files, each short enough for a marker."""
    note = base64.b85encode(zlib.compress(json.dumps(files).encode(), 9)).decode()
    if len(_positions.encoded({"files": note})) <= NOTE:
        return [note]
    if len(files) == 1:
        raise SourceError(f"the name {files[0][0][:100]}... is too long for exactly_once. Nothing was sent")
    half = len(files) // 2
    return _packed(files[:half]) + _packed(files[half:])


def _unpacked(note: str) -> list[tuple[str, int, str]]:
    return [(name, size, stamp) for name, size, stamp in json.loads(zlib.decompress(base64.b85decode(note)))]


def _check_files(sink: Sink, listing: Listing, before: Sequence[tuple[str, int, str]]) -> None:
    """Refuses files that are not those of the run before."""
    old = {name: (size, stamp) for name, size, stamp in before}
    new = {file.name: (file.size, file.stamp) for file in listing.files}
    exact = {file.name: listing.systems[file.system].type_name == "local" for file in listing.files}
    changed = [
        f"{name} has changed (it was {old[name][0]:,} bytes, {_files.when(old[name][1])}, and is {size:,}, "
        f"{_files.when(stamp)})"
        for name, (size, stamp) in new.items()
        if name in old and not (old[name][0] == size and _files.same_stamp(old[name][1], stamp, exact[name]))
    ]
    problems = changed + [f"{name} is new" for name in new if name not in old]
    problems += [f"{name} is gone" for name in old if name not in new]
    if problems:
        more = f", and {len(problems) - SHOWN:,} more" if len(problems) > SHOWN else ""
        raise SourceError(
            f"the files are not those that job {sink.job!r} has begun with: {'; '.join(problems[:SHOWN])}{more}. "
            "Nothing was sent. Restore them to go on; export new files under a job_id of their own; another job_id "
            "for all writes all again"
        )


# ---- tasks


@dataclass(frozen=True)
class _Work:
    """What a task does: a function for mapInArrow, pickled to the executors."""

    sink: Sink
    reader: Reader
    shape: Shape
    packed: list[bytes] = field(repr=False)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        # All of the input is read first: what follows it tells whether Spark still wants the task.
        numbers = [number for batch in batches for number in batch.column(0).to_pylist()]
        if len(numbers) != 1:
            raise ExportError(f"a task was given {len(numbers)} splits instead of one. Please report this")
        yield pa.record_batch({"report": pa.array([self._written(numbers[0]).to_json()])})

    def _written(self, number: int) -> TaskReport:
        split: Split = pickle.loads(zlib.decompress(self.packed[number]))
        hand = self.shape.sender(sender(self.sink))

        def hand_over(task: Task, rows: Rows) -> None:
            hand(task, rows.batch, rows.place)

        report = in_task(self.sink, self.reader.read(split), hand_over)
        if report.task != number:
            raise ExportError(f"split {number} was written as Spark partition {report.task}. Please report this")
        report.source = _label(split)
        return report


def _label(split: Split) -> str:
    text = split[0].label
    text = text if len(text) <= LABEL else f"...{text[-LABEL:]}"
    return text if len(split) == 1 else f"{text} and {len(split) - 1} more"
