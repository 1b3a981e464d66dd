"""`fastprod export`: files into a topic. `fastprod demo`: the same with data of its own.

    engine files   fastprod.spark.export: the Python workers read the files, no row passes the JVM
    engine spark   spark.read, columns made in the JVM, fastprod.spark.write

Unless told, it is the first; the second where a column becomes a key, value or header in a way that only Spark knows,
which the first refuses before anything is sent.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from confluent_kafka import KafkaException
from rich.console import Console
from rich.table import Table

from fastprod.cli import _options
from fastprod.cli._options import Failure
from fastprod.cli._spark import interruptibly, progress_of, session

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

    from fastprod.spark import ExportReport

FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".orc": "orc"}
FORMATS |= {".arrow": "arrow", ".arrows": "arrow", ".feather": "arrow"}
SPARKS = ("parquet", "csv", "json", "orc")  # of these, what Spark itself reads
UNREADABLE = re.compile(r"\[(FAILED_READ_FILE|MALFORMED_RECORD_IN_PARSING|CANNOT_READ_FILE)\b")
UNREAD = re.compile(r"ExportError: .* cannot be read: ")  # of a task that reads files itself
NAMING = re.compile(r"^(key|value|headers|timestamp|columns) names")
HEAD = 1 << 20  # bytes
BAR = 24  # characters of the longest bar
ORDERS = (  # the demo's columns
    "id AS order_id",
    "concat('customer-', cast(rand({seed}) * 5000 AS int)) AS customer",
    "element_at(array('book', 'lamp', 'chair', 'radio', 'clock'), cast(rand({seed} + 1) * 5 AS int) + 1) AS item",
    "cast(rand({seed} + 2) * 9 AS int) + 1 AS pieces",
    "round(rand({seed} + 3) * 200, 2) AS price",
    "timestamp_millis(1700000000000 + id * 250) AS ordered_at",
)


def _report(ctx: click.Context, param: click.Parameter, path: str | None) -> str | None:
    """--report FILE, refused before the export rather than after it."""
    if path is not None:
        target = Path(path)
        if target.suffix.lower() not in (".json", ".html", ".htm"):
            raise click.BadParameter(f"{path} must end in .json or .html")
        if target.is_dir() or not os.access(target if target.exists() else target.absolute().parent, os.W_OK):
            raise click.BadParameter(f"{path} cannot be written")
    return path


# The options that export and demo have in common.
_shared = _options.together(
    click.option(
        "-b", "--bootstrap", metavar="HOST:PORT,...", help="Brokers. Without: mock brokers, counted afterwards."
    ),
    click.option(
        "--partitions",
        type=click.IntRange(1, 10_000),
        default=6,
        show_default=True,
        help="Of the topic on mock brokers.",
    ),
    click.option("--master", default="local[*]", show_default=True, help="Spark's master."),
    _options.client_options("An option of the producer, repeatable."),
    click.option(
        "--check/--no-check",
        default=True,
        show_default=True,
        help="First ask the brokers whether the topic is there and may be written.",
    ),
    click.option("--report", metavar="FILE", callback=_report, help="Save the report as .json or .html."),
)


@click.command()
@click.argument("source", metavar="INPUT")
@click.option("-t", "--topic", required=True, help="Where the records go.")
@click.option("--key", metavar="COL", help="Column with the records' keys.")
@click.option("--value", metavar="COL", help="Column with the records' values.")
@click.option(
    "--value-format",
    type=click.Choice(["json", "avro"]),
    help="The value is the whole row as JSON, the default unless there is a column 'value', or as Avro.",
)
@click.option("--registry", metavar="URL", help="Schema registry for Avro; without it values are bare Avro.")
@click.option("--subject", help="Of the registry; TOPIC-value unless given.")
@click.option("--columns", metavar="COL,...", help="Columns that the value is made of; all unless given.")
@click.option("--where", metavar="CONDITION", help="Rows to take: \"amount > 10 AND country = 'DE'\".")
@click.option("--exactly-once", is_flag=True, help="A transaction for each split; needs --job-id.")
@click.option("--job-id", metavar="NAME", help="Names this export; one that is run again keeps it.")
@click.option(
    "--engine",
    type=click.Choice(["auto", "files", "spark"]),
    default="auto",
    show_default=True,
    help="Who reads INPUT: Python workers, the fast way, or Spark's JVM.",
)
@click.option("--headers", metavar="COL,...", help="Columns that become headers, each named after its column.")
@click.option("--timestamp", metavar="COL", help="Column with the records' timestamps.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["auto", *sorted(set(FORMATS.values()))]),
    default="auto",
    show_default=True,
    help="Of INPUT; auto goes by the file's name.",
)
@_shared
def export(
    source: str,
    topic: str,
    key: str | None,
    value: str | None,
    value_format: str | None,
    registry: str | None,
    subject: str | None,
    columns: str | None,
    where: str | None,
    exactly_once: bool,
    job_id: str | None,
    engine: str,
    headers: str | None,
    timestamp: str | None,
    form: str,
    bootstrap: str | None,
    partitions: int,
    master: str,
    options: dict[str, str],
    file: dict[str, str],
    check: bool,
    report: str | None,
) -> None:
    """Write INPUT, a file or folder of Parquet, ORC, Arrow, CSV or JSON lines, to a Kafka topic.

    \b
    fastprod export orders.parquet -t orders -b kafka:9092 --key customer
    """
    if value and value_format:
        raise click.UsageError("--value and --value-format exclude each other")
    known = _format(source, form)
    config = _config(bootstrap, file, options)
    if exactly_once and not job_id:
        raise click.UsageError("--exactly-once needs --job-id, a name that stays when the export is run again")
    only = [name for name, given in (("--value-format avro", value_format == "avro"), ("--columns", columns)) if given]
    only += [name for name, given in (("--exactly-once", exactly_once), ("--job-id", job_id)) if given]
    only += ["--format arrow"] if known not in SPARKS else []
    if engine == "spark" and only:
        raise click.UsageError(f"{only[0]} does not go with --engine spark")
    wanted = _Wanted(key, value, value_format, _names(headers), timestamp, _names(columns), where)
    with session(master, "fastprod export") as spark, _brokers(config, topic, partitions) as brokers:

        def by_files(on_plan: Any) -> ExportReport:
            from fastprod.spark import export as export_files

            avro = _avro(registry, subject or f"{topic}-value") if value_format == "avro" else None
            how = _arguments(spark, source, known, wanted, avro)
            how |= {"exactly_once": exactly_once, "job_id": job_id}
            return export_files(spark, source, topic, brokers.config, check=check, on_plan=on_plan, **how)

        def by_spark(on_plan: Any) -> ExportReport:
            from fastprod.spark import write

            data = _read(spark, source, known)
            data.df = data.df if where is None else data.df.where(where)
            records = _records(data, key, value, value_format, headers, timestamp)
            return write(records, topic, brokers.config, check=check)

        def work(stop: Event) -> None:
            ways = {"auto": [by_files] if only else [by_files, by_spark], "files": [by_files], "spark": [by_spark]}
            _run(spark, ways[engine], topic, brokers, report, f"{source} holds no rows")

        interruptibly(spark, work)


@click.command()
@click.option("-t", "--topic", default="orders", show_default=True, help="Where the records go.")
@click.option("--rows", type=click.IntRange(1), default=1_000_000, show_default=True, help="Orders to make.")
@click.option("--seed", type=int, default=7, show_default=True, help="The same seed makes the same orders.")
@_shared
def demo(
    topic: str,
    rows: int,
    seed: int,
    bootstrap: str | None,
    partitions: int,
    master: str,
    options: dict[str, str],
    file: dict[str, str],
    check: bool,
    report: str | None,
) -> None:
    """Make a data set of orders, as Parquet, and export it to a Kafka topic."""
    config = _config(bootstrap, file, options)
    with (
        tempfile.TemporaryDirectory(prefix="fastprod-demo-") as work,
        session(master, "fastprod demo") as spark,
        _brokers(config, topic, partitions) as brokers,
    ):
        path = str(Path(work, "orders.parquet"))

        def make_and_export(stop: Event) -> None:
            with progress_of(spark, f"making {rows:,} orders"):
                spark.range(rows).selectExpr(*(column.format(seed=seed) for column in ORDERS)).write.parquet(path)
            if not stop.is_set():
                from fastprod.spark import export as export_files

                def by_files(on_plan: Any) -> ExportReport:
                    how: dict[str, Any] = {
                        "key": "customer",
                        "timestamp": "ordered_at",
                        "check": check,
                        "on_plan": on_plan,
                    }
                    return export_files(spark, path, topic, brokers.config, **how)

                _run(spark, [by_files], topic, brokers, report, "there are no orders", expected=rows)

        interruptibly(spark, make_and_export)


# ---- input


def _format(source: str, form: str) -> str:
    """The format to read with; complains about a local path that is not there."""
    local = re.sub("^file:(//)?", "", source)
    path = Path(local)
    elsewhere = re.match(r"[a-z][a-z0-9+.-]*://", local) or any(sign in local for sign in "*?[{")  # Spark's to resolve
    if not elsewhere:
        if not path.exists():
            raise Failure(f"{source} does not exist", 2)
        if not os.access(path, os.R_OK):
            raise Failure(f"{source} cannot be read: permission denied", 2)
    if form == "auto":
        form = _format_of_name(path) if elsewhere else _format_of(path)
    if not form:
        raise Failure(
            f"cannot tell the format of {source} from its name; give --format parquet, orc, arrow, csv or json", 2
        )
    return form


def _format_of_name(path: Path) -> str:
    plain = path.with_suffix("") if path.suffix.lower() in (".gz", ".bz2", ".zst") else path
    return FORMATS.get(plain.suffix.lower(), "")


def _format_of(path: Path) -> str:
    if path.is_file() or _format_of_name(path):
        return _format_of_name(path)
    for found in sorted(path.rglob("*")):
        if found.is_file() and not found.name.startswith(("_", ".")):
            return _format_of(found)
    raise Failure(f"folder {path} holds no data", 2)


class _Wanted(NamedTuple):
    """What the options say about records."""

    key: str | None
    value: str | None
    value_format: str | None
    headers: list[str] | None
    timestamp: str | None
    columns: list[str] | None
    where: str | None


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _avro(registry: str | None, subject: str) -> Any:
    from fastprod.encoding import Avro

    if registry is None:
        return Avro(wire="bare")
    return Avro("derive", subject, {"url": registry})


def _arguments(spark: SparkSession, source: str, form: str, wanted: _Wanted, avro: Any) -> dict[str, Any]:
    """Those of fastprod.spark.export, but for where to."""
    given: dict[str, Any] = {"format": form, "key": wanted.key, "headers": wanted.headers, "columns": wanted.columns}
    given |= {"timestamp": wanted.timestamp, "where": wanted.where}
    value: Any = wanted.value
    if value is None and wanted.value_format is None and wanted.columns is None and _has_value(source, form):
        value = "value"
    if avro is not None:
        value = avro
    if value is not None:
        given["value"] = value
    if form == "csv":
        given["schema"] = _csv_types(spark, source, wanted, whole=not isinstance(value, str))
    return given


def _has_value(source: str, form: str) -> bool:
    """Whether the first file has a column 'value'; of JSON lines, in its first megabyte."""
    from fastprod.spark import _files
    from fastprod.spark._reading import learnt_json

    listing = _files.listed(source, form)
    first = _files.Listing(listing.systems, listing.files[:1])
    if form == "json":
        with suppress(OSError, ValueError), listing.systems[0].open_input_stream(listing.files[0].path) as opened:
            lines, _, rest = opened.read(HEAD).rpartition(b"\n")
            return "value" in learnt_json(io.BytesIO(lines or rest)).names
        return False  # whatever is wrong with it, export says it better
    (known,) = _files.looked(first, _files.TextOptions()).values()
    return "value" in known.schema.names


def _csv_types(spark: SparkSession, source: str, wanted: _Wanted, whole: bool) -> dict[str, Any]:
    """Types of CSV's columns: numbers, booleans and dates where Spark finds them in all rows and whole rows are
    encoded, times for timestamps; else text, as it is. So are keys and headers: "007" is not 7.
    """
    import pyarrow as pa
    from pyspark.sql import types as t

    kinds: dict[type, Any] = {t.IntegerType: pa.int64(), t.LongType: pa.int64(), t.DoubleType: pa.float64()}
    kinds |= {t.BooleanType: pa.bool_(), t.DateType: pa.date32()}
    as_text = {wanted.key, wanted.value, *(wanted.headers or ())}
    inferred = _read(spark, source, "csv").inferred
    assert inferred is not None
    found = {}
    for part in inferred:
        if part.name == wanted.timestamp:
            found[part.name] = (
                pa.int64() if isinstance(part.dataType, (t.LongType, t.IntegerType)) else pa.timestamp("us")
            )
        elif whole and part.name not in as_text and type(part.dataType) in kinds:
            found[part.name] = kinds[type(part.dataType)]
    return found


class _Data:
    """What was read, and of which types its columns are.

    CSV has no types, only text: it stays as it is where it becomes a key, a value or a header ("007" is not 7). In JSON
    and as timestamps, columns have the types that Spark infers from all their rows.
    """

    def __init__(self, df: DataFrame, inferred: StructType | None = None) -> None:
        self.df = df
        self.inferred = inferred

    def text(self, name: str, option: str) -> Column:
        """A column as the bytes of a key, value or header."""
        from pyspark.sql import functions as f
        from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType

        found, kind = self._column(name, option)
        if isinstance(kind, (ArrayType, MapType, StructType)):
            return f.to_json(found)
        return found if isinstance(kind, BinaryType) else found.cast("string")

    def typed(self, name: str, option: str) -> tuple[Column, DataType]:
        """A column and its type, the inferred one where there is one."""
        found, kind = self._column(name, option)
        if self.inferred is None or self.inferred[name].dataType == kind:
            return found, kind
        kind = self.inferred[name].dataType
        return found.cast(kind), kind

    def json(self) -> Column:
        """Whole rows."""
        from pyspark.sql import functions as f

        return f.to_json(f.struct(*(self.typed(name, "JSON")[0].alias(name) for name in self.df.columns)))

    def _column(self, name: str, option: str) -> tuple[Column, DataType]:
        from pyspark.sql import functions as f

        if name not in self.df.columns:
            raise Failure(f"{option} names {name!r}, but the columns are {', '.join(self.df.columns)}", 2)
        quoted = name.replace("`", "``")  # a dot in a name would be taken for a field of a struct
        return f.col(f"`{quoted}`"), self.df.schema[name].dataType


def _read(spark: SparkSession, source: str, form: str) -> _Data:
    reader = spark.read.format(form)
    if form in ("csv", "json"):
        reader = reader.option("mode", "FAILFAST")  # else Spark puts nulls where it cannot read
    if form == "csv":
        reader = reader.option("header", "true")
    try:
        df = reader.load(source)
        if not df.columns:
            raise Failure(f"{source} holds no rows", 2)
        return _Data(df, reader.option("inferSchema", "true").load(source).schema if form == "csv" else None)
    except Failure:
        raise
    except Exception as problem:
        raise Failure(f"cannot read {source} as {form}: {_first_line(problem)}", 2) from None


def _records(
    data: _Data,
    key: str | None,
    value: str | None,
    value_format: str | None,
    headers: str | None,
    timestamp: str | None,
) -> DataFrame:
    """The columns that fastprod.spark.write knows."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import LongType, TimestampNTZType, TimestampType

    if value is None and value_format is None and "value" in data.df.columns:
        value = "value"
    chosen = {"value": data.text(value, "--value") if value else data.json()}
    if key:
        chosen["key"] = data.text(key, "--key")
    if headers:
        listed = [name.strip() for name in headers.split(",") if name.strip()]
        chosen["headers"] = f.array(
            *(
                f.struct(f.lit(name).alias("key"), data.text(name, "--headers").cast("binary").alias("value"))
                for name in listed
            )
        )
    if timestamp:
        found, kind = data.typed(timestamp, "--timestamp")
        ready = isinstance(kind, (TimestampType, TimestampNTZType, LongType))
        chosen["timestamp"] = found if ready else found.cast("timestamp")
    return data.df.select(*(column.alias(name) for name, column in chosen.items()))


# ---- output


def _config(bootstrap: str | None, file: dict[str, str], options: dict[str, str]) -> dict[str, str]:
    config = {**file, **options}
    if bootstrap is not None:
        config["bootstrap.servers"] = bootstrap
    return config


class _Brokers:
    """Where the records go, and whether those brokers are ours to count."""

    def __init__(self, config: dict[str, str], mock: Any = None) -> None:
        self.config = config
        self.mock = mock

    @property
    def name(self) -> str:
        if self.mock is not None:
            return "mock brokers of its own, which counted the same"
        return self.config.get("bootstrap.servers") or self.config["metadata.broker.list"]

    def check(self, topic: str, done: ExportReport) -> None:
        """Counts, if the brokers are ours."""
        if self.mock is not None:
            counted = {number: end for number, (_, end) in self.mock.watermarks(topic).items() if end}
            told = {number: part.records for number, part in done.topics[topic].items()}
            if counted != told:
                raise Failure(f"the brokers hold {counted} records by partition, but the tasks reported {told}", 1)


@contextmanager
def _brokers(config: dict[str, str], topic: str, partitions: int) -> Iterator[_Brokers]:
    if config.get("bootstrap.servers") or config.get("metadata.broker.list"):
        yield _Brokers(config)
        return
    from fastprod.testing import MockClusterProcess

    with MockClusterProcess(3, topics={topic: partitions}) as cluster:
        yield _Brokers({**config, "bootstrap.servers": cluster.bootstrap_servers}, cluster)


def _run(
    spark: SparkSession,
    ways: Sequence[Callable[[Any], ExportReport]],
    topic: str,
    brokers: _Brokers,
    report: str | None,
    nothing: str,
    expected: int | None = None,
) -> None:
    """Writes in the first of these ways that knows how."""
    from fastprod.spark import CheckError

    try:
        with progress_of(spark, f"writing to {topic}") as on_plan:
            try:
                done = ways[0](on_plan)
            except TypeError:  # a type that has no bytes of its own: nothing was sent
                if len(ways) == 1:
                    raise
                done = ways[1](on_plan)
    except Failure:
        raise
    except CheckError as problem:
        raise Failure(str(problem).replace("check=False", "--no-check"), 1) from None
    except KafkaException as problem:  # said on this side: the options are wrong
        raise Failure(problem.args[0].str(), 2) from None
    except (ValueError, TypeError) as problem:
        raise Failure(NAMING.sub(r"--\1 names", str(problem)), 2) from None
    except Exception as problem:
        if UNREAD.search(str(problem)):
            raise Failure(f"the input cannot be read: {_reason(problem)}", 2) from None
        if UNREADABLE.search(str(problem)):
            raise Failure(f"the input cannot be read: {_unreadable(problem)}", 2) from None
        raise Failure(f"the export failed: {_reason(problem)}", 1) from None
    if done.records == 0:
        raise Failure(nothing, 2)
    if report is not None:
        done.save(report)
    brokers.check(topic, done)
    if expected is not None and done.records != expected:
        raise Failure(f"{done.records:,} records were acknowledged, not {expected:,}", 1)
    _show(done, topic, brokers.name)


def _show(done: ExportReport, topic: str, where: str) -> None:
    console = Console()
    console.print(
        f"{done.records:,} records, {done.bytes / 1e6:,.1f} MB to {topic} on {where}: {done.seconds:.1f} s, "
        f"{done.records / max(done.seconds, 1e-9):,.0f} records/s, {len(done.tasks)} tasks, {done.failed} failed, "
        f"{done.retries} retries" + (f", {done.skipped} tasks had been written before" if done.skipped else ""),
        highlight=False,
        soft_wrap=True,
    )
    table = Table()
    for title in ("partition", "records", "first offset", "last offset"):
        table.add_column(title, justify="right")
    table.add_column("")
    parts = done.topics.get(topic, {})  # none where all had been written before
    if not parts:
        return
    most = max(part.records for part in parts.values())
    for number, part in parts.items():
        bar = "█" * max(1, round(BAR * part.records / most))
        table.add_row(str(number), f"{part.records:,}", str(part.first_offset), str(part.last_offset), bar)
    console.print(table)


def _first_line(problem: BaseException) -> str:
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)


def _unreadable(problem: BaseException) -> str:
    """The lines in which Spark says which file it cannot read, and why."""
    lines = [line.strip() for line in str(problem).splitlines()]
    told = [line for line in lines if UNREADABLE.search(line)]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    return " ".join([_first_line(RuntimeError(told[0])), *causes[-1:]])


def _reason(problem: BaseException) -> str:
    """The last line that says something: of a worker's exception, its own words."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    told = [line for line in lines if "Error: " in line or "Exception: " in line]
    return (told or lines or [type(problem).__name__])[-1].removeprefix("fastprod.spark._sink.ExportError: ")
