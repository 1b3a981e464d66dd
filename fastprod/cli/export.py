"""`fastprod export`: a data set that Spark can read, into a topic. `fastprod demo`: the same with data of its own."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from confluent_kafka import KafkaException
from rich.console import Console
from rich.table import Table

from fastprod.cli import _options
from fastprod.cli._options import Failure
from fastprod.cli._spark import progress_of, session

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from fastprod.spark import ExportReport

FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json", ".ndjson": "json", ".orc": "orc"}
BAR = 24  # characters of the longest bar
ORDERS = (  # the demo's columns
    "id AS order_id",
    "concat('customer-', cast(rand({seed}) * 5000 AS int)) AS customer",
    "element_at(array('book', 'lamp', 'chair', 'radio', 'clock'), cast(rand({seed} + 1) * 5 AS int) + 1) AS item",
    "cast(rand({seed} + 2) * 9 AS int) + 1 AS pieces",
    "round(rand({seed} + 3) * 200, 2) AS price",
    "timestamp_millis(1700000000000 + id * 250) AS ordered_at",
)

Command = TypeVar("Command", bound=Callable[..., Any])


def _shared(command: Command) -> Command:
    """The options that export and demo have in common."""
    for option in reversed(
        [
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
            click.option(
                "-X",
                "options",
                metavar="KEY=VALUE",
                multiple=True,
                callback=_options.pairs,
                help="An option of the producer, repeatable.",
            ),
            click.option(
                "-F",
                "file",
                metavar="FILE",
                callback=_options.file,
                help="Options as key=value lines; -X beats them.",
            ),
            click.option(
                "--report", type=click.Path(dir_okay=False), metavar="FILE", help="Save the report as .json or .html."
            ),
        ]
    ):
        command = option(command)
    return command


@click.command()
@click.argument("source", metavar="INPUT")
@click.option("-t", "--topic", required=True, help="Where the records go.")
@click.option("--key", metavar="COL", help="Column with the records' keys.")
@click.option("--value", metavar="COL", help="Column with the records' values.")
@click.option(
    "--value-format",
    type=click.Choice(["json"]),
    help="The value is the whole row as JSON. The default, unless there is a column 'value'.",
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
    headers: str | None,
    timestamp: str | None,
    form: str,
    bootstrap: str | None,
    partitions: int,
    master: str,
    options: dict[str, str],
    file: dict[str, str],
    report: str | None,
) -> None:
    """Write INPUT, a file or folder that Spark can read, to a Kafka topic.

    \b
    fastprod export orders.parquet -t orders -b kafka:9092 --key customer
    """
    if value and value_format:
        raise click.UsageError("--value and --value-format exclude each other")
    known = _format(source, form)
    with session(master, f"fastprod export {source}") as spark, _brokers(bootstrap, topic, partitions) as brokers:
        df = _read(spark, source, known)
        records = _records(df, key, value, value_format, headers, timestamp)
        _run(spark, records, topic, {**file, **options}, brokers, report, f"{source} holds no rows")


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
    report: str | None,
) -> None:
    """Make a data set of orders, as Parquet, and export it to a Kafka topic."""
    with (
        tempfile.TemporaryDirectory(prefix="fastprod-demo-") as work,
        session(master, "fastprod demo") as spark,
        _brokers(bootstrap, topic, partitions) as brokers,
    ):
        path = str(Path(work, "orders.parquet"))
        with progress_of(spark, f"making {rows:,} orders"):
            spark.range(rows).selectExpr(*(column.format(seed=seed) for column in ORDERS)).write.parquet(path)
        records = _records(spark.read.parquet(path), "customer", None, "json", None, "ordered_at")
        _run(spark, records, topic, {**file, **options}, brokers, report, "there are no orders", expected=rows)


# ---- input


def _format(source: str, form: str) -> str:
    """The format to read with; complains about a local path that is not there."""
    local = source.removeprefix("file://")
    path = Path(local)
    elsewhere = re.match(r"[a-z][a-z0-9+.-]*://", local) or any(sign in local for sign in "*?[{")  # Spark's to resolve
    if not elsewhere:
        if not path.exists():
            raise Failure(f"{source} does not exist", 2)
        if not os.access(path, os.R_OK):
            raise Failure(f"{source} cannot be read: permission denied", 2)
    if form == "auto":
        form = FORMATS.get(path.suffix.lower(), "") if elsewhere else _format_of(path)
    if not form:
        raise Failure(f"cannot tell the format of {source} from its name; give --format parquet, csv, json or orc", 2)
    return form


def _format_of(path: Path) -> str:
    if path.suffix.lower() in FORMATS or path.is_file():
        plain = path.with_suffix("") if path.suffix.lower() in (".gz", ".bz2", ".zst") else path
        return FORMATS.get(plain.suffix.lower(), "")
    for found in sorted(path.rglob("*")):
        if found.is_file() and not found.name.startswith(("_", ".")):
            return _format_of(found)
    raise Failure(f"folder {path} holds no data", 2)


def _read(spark: SparkSession, source: str, form: str) -> DataFrame:
    reader = spark.read.format(form)
    if form == "csv":
        reader = reader.option("header", "true").option("inferSchema", "true")
    try:
        df = reader.load(source)
        if not df.columns:
            raise Failure(f"{source} holds no rows", 2)
        return df
    except Failure:
        raise
    except Exception as problem:
        raise Failure(f"cannot read {source} as {form}: {_first_line(problem)}", 2) from None


def _records(
    df: DataFrame,
    key: str | None,
    value: str | None,
    value_format: str | None,
    headers: str | None,
    timestamp: str | None,
) -> DataFrame:
    """The columns that fastprod.spark.write knows."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import BinaryType, LongType, TimestampNTZType, TimestampType

    def column(name: str, option: str) -> Column:
        if name not in df.columns:
            raise Failure(f"{option} names {name!r}, but the columns are {', '.join(df.columns)}", 2)
        return df[name]

    def text(name: str, option: str) -> Column:
        found = column(name, option)
        return found if isinstance(df.schema[name].dataType, BinaryType) else found.cast("string")

    if value is None and value_format is None and "value" in df.columns:
        value = "value"
    chosen = [text(value, "--value") if value else f.to_json(f.struct(*(df[name] for name in df.columns)))]
    names = ["value"]
    if key:
        chosen.append(text(key, "--key"))
        names.append("key")
    if headers:
        listed = [name.strip() for name in headers.split(",") if name.strip()]
        cells = [
            f.struct(f.lit(name).alias("key"), text(name, "--headers").cast("binary").alias("value")) for name in listed
        ]
        chosen.append(f.array(*cells))
        names.append("headers")
    if timestamp:
        found = column(timestamp, "--timestamp")
        kind = df.schema[timestamp].dataType
        chosen.append(
            found if isinstance(kind, (TimestampType, TimestampNTZType, LongType)) else found.cast("timestamp")
        )
        names.append("timestamp")
    return df.select(*(one.alias(name) for one, name in zip(chosen, names, strict=True)))


# ---- output


class _Brokers:
    """Where the records go, and whether those brokers are ours to count."""

    def __init__(self, servers: str, mock: Any = None) -> None:
        self.servers = servers
        self.mock = mock


@contextmanager
def _brokers(servers: str | None, topic: str, partitions: int) -> Iterator[_Brokers]:
    if servers is not None:
        yield _Brokers(servers)
        return
    from fastprod.testing import MockClusterProcess

    with MockClusterProcess(3, topics={topic: partitions}) as cluster:
        yield _Brokers(cluster.bootstrap_servers, cluster)


def _run(
    spark: SparkSession,
    records: DataFrame,
    topic: str,
    options: dict[str, str],
    brokers: _Brokers,
    report: str | None,
    nothing: str,
    expected: int | None = None,
) -> None:
    from fastprod.spark import write

    try:
        with progress_of(spark, f"writing to {topic}"):
            done = write(records, topic, {"bootstrap.servers": brokers.servers, **options})
    except (ValueError, TypeError) as problem:
        raise Failure(str(problem), 2) from None
    except KafkaException as problem:  # said on this side: the options are wrong
        raise Failure(problem.args[0].str(), 2) from None
    except Exception as problem:
        raise Failure(f"the export failed: {_reason(problem)}", 1) from None
    if done.records == 0:
        raise Failure(nothing, 2)
    _show(done, topic, brokers)
    if report is not None:
        done.save(report)
    if brokers.mock is not None:
        counted = {number: end for number, (_, end) in brokers.mock.watermarks(topic).items() if end}
        told = {number: part.records for number, part in done.topics[topic].items()}
        if counted != told:
            raise Failure(f"the brokers hold {counted} records by partition, but the tasks reported {told}", 1)
    if expected is not None and done.records != expected:
        raise Failure(f"{done.records:,} records were acknowledged, not {expected:,}", 1)


def _show(done: ExportReport, topic: str, brokers: _Brokers) -> None:
    console = Console()
    where = "mock brokers of its own, which counted the same" if brokers.mock is not None else brokers.servers
    console.print(
        f"{done.records:,} records, {done.bytes / 1e6:,.1f} MB to {topic} on {where}: {done.seconds:.1f} s, "
        f"{done.records / max(done.seconds, 1e-9):,.0f} records/s, {len(done.tasks)} tasks, {done.failed} failed, "
        f"{done.retries} retries",
        highlight=False,
        soft_wrap=True,
    )
    table = Table()
    for title in ("partition", "records", "first offset", "last offset"):
        table.add_column(title, justify="right")
    table.add_column("")
    parts = done.topics[topic]
    most = max(part.records for part in parts.values())
    for number, part in parts.items():
        bar = "█" * max(1, round(BAR * part.records / most))
        table.add_row(str(number), f"{part.records:,}", str(part.first_offset), str(part.last_offset), bar)
    console.print(table)


def _first_line(problem: BaseException) -> str:
    return next((line.strip() for line in str(problem).splitlines() if line.strip()), type(problem).__name__)


def _reason(problem: BaseException) -> str:
    """The last line that says something: of a worker's exception, its own words."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    told = [line for line in lines if "Error: " in line or "Exception: " in line]
    return (told or lines or [type(problem).__name__])[-1].removeprefix("fastprod.spark._worker.ExportError: ")
