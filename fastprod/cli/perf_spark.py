"""`fastprod perf spark`: the same rows from Spark into Kafka, by fastprod and by what people use instead.

    rows cached in Spark's memory, the same for everybody
        -> rounds that do not count: compiled code, connections, Python workers
        -> rounds in turn: every way once, then all again, each starting one place later
    clock: around the call on the driver, which returns when every row is acknowledged
    check: the topic's end offsets have grown by the rows of the round

Everything runs on one machine, and brokers of ours on the same cores: the CPU that each part takes is shown because it
tells more about a real cluster than the throughput does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.table import Table

from fastprod.cli import _options
from fastprod.cli._figures import (
    MEGABYTE,
    brokers,
    cell,
    configuration,
    console,
    progress,
    real_broker,
    shared,
    shown,
    spread,
    versions,
)
from fastprod.cli._load import DeliveryError, Target, Unfit, Unreachable
from fastprod.cli._options import Failure
from fastprod.cli._spark import interruptibly, session
from fastprod.cli._spark_figures import Clock, most_connections, task_seconds
from fastprod.cli._spark_loads import (
    ORDER_BYTES,
    ORDERS,
    RIVALS,
    TOPICS,
    VALUES,
    Load,
    Way,
    for_sink,
    topic_names,
    write_orders,
)
from fastprod.cli.export import _reason
from fastprod.spark._plan import LINGER_MS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from fastprod.testing import KafkaCluster

HEAP_MB = 1024  # for Spark itself
HEAP_SHARE = 0.4  # of the heap that cached rows may fill; Spark gives them up to 0.6, the rest is for their overhead
SETTLE_S = 30.0  # for a transaction's records to be seen
MANY_TASKS = 8  # for topics of very different sizes
FEW_PARTITIONS = 3  # of each of many topics
ONLY_FOR_TOPICS = {
    "task_ratio": "slowest/median task",
    "records_per_batch": "records/batch",
    "connections": "connections",
}


# ---- the command


@dataclass
class Round:
    """One timed run of one way."""

    way: Way
    number: int
    records: int
    seconds: float
    cpu_seconds: float | None
    """Of Spark and its Python workers; None where the machine does not tell."""
    broker_cpu_seconds: float | None
    """Of the broker, if it is ours."""
    task_ratio: float | None = None
    """How much longer the slowest task took than the median one."""
    records_per_batch: float | None = None
    """As a broker of ours has stored them."""
    connections: int | None = None
    """Of all producers to the brokers, the most at a time."""

    @property
    def rate(self) -> float:
        return self.records / self.seconds


@dataclass
class Job:
    """What is measured."""

    topic: str
    conf: dict[str, Any]
    records: int
    size: int
    cores: int
    tasks: int
    warmup: int
    rounds: int
    ways: list[Way]
    load: Load = VALUES
    topics: int = 1
    done: list[Round] = field(default_factory=list)

    def records_of(self, way: Way) -> int:
        return max(1, self.records // way.share)


@click.command()
@click.option("-b", "--bootstrap", metavar="HOST:PORT,...", help="Brokers. Without: an Apache Kafka on this machine.")
@click.option("--real", is_flag=True, help="An Apache Kafka of one broker on this machine, as without -b.")
@click.option("--num-records", type=click.IntRange(1), default=3_000_000, show_default=True, help="Rows per run.")
@click.option("--record-size", type=click.IntRange(0), default=100, show_default=True, help="Bytes of a row's value.")
@click.option(
    "--rows",
    "kind",
    type=click.Choice(["values", "orders"]),
    default="values",
    show_default=True,
    help="Ready values, or orders of 12 columns in Parquet files that become JSON or Avro on the way.",
)
@click.option(
    "--topics",
    type=click.IntRange(2, 9999),
    help="Rows name so many topics, whose sizes follow Zipf's law, instead of going to one.",
)
@click.option("--cores", type=click.IntRange(1), default=2, show_default=True, help="That Spark may use.")
@click.option(
    "--tasks",
    type=click.IntRange(1),
    help="Spark partitions that hold the rows. Default: one per core; 8 with --topics.",
)
@click.option(
    "--conf",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_options.pairs,
    help="A setting of Spark, repeatable.",
)
@click.option("--rounds", type=click.IntRange(1), help="Runs of each. Default: 5 where several take part, else 1.")
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="Rounds before those that count, in which Java compiles what it then runs.",
)
@click.option(
    "--compare",
    "rivals",
    metavar="CONTENDERS",
    help=f"Run these too, in turns with fastprod; a comma list. Known: {', '.join(RIVALS)}; with --topics "
    f"{', '.join(TOPICS.rivals)}, with --rows orders {', '.join(ORDERS.rivals)}; those take part unless named.",
)
@shared
@click.pass_context
def spark(
    ctx: click.Context,
    bootstrap: str | None,
    real: bool,
    topic: str,
    num_records: int,
    record_size: int,
    partitions: int,
    kind: str,
    topics: int | None,
    cores: int,
    tasks: int | None,
    options: dict[str, str],
    file: dict[str, str],
    settings: dict[str, str],
    rounds: int | None,
    warmup: int,
    rivals: str | None,
    form: str,
) -> None:
    """Measure how fast rows get from Spark into Kafka.

    \b
    fastprod     fastprod.spark.write with batch_rows=10000, for rows as small as these
    write        the same without batch_rows: Spark adds up the bytes of a batch at every row
    once         fastprod with exactly_once: a transaction for each task, for each bucket after a shuffle into as many
                 buckets as tasks, and a job that was written before, whose rows are only compared
    spark-sink   Spark's own Kafka sink: with its defaults, and with fastprod's linger.ms and batch.size
    foreach      foreachPartition and a loop of confluent_kafka.Producer.produce()
    hand-over    Spark's part alone: rows come to Python as Arrow batches and are dropped

    The rows are cached in Spark's memory. Each way writes all of them to the same topic with the same options,
    linger.ms=50, acks=all and idempotence unless -X says otherwise; foreach, which is about ten times slower, gets one
    row in five. After the warm-up come --rounds in turns, each checked by the topic's end offsets. The table shows
    medians and, in brackets, the extremes; ratios are taken round by round.

    With --topics, rows name their topics, and fastprod is write(bundles="auto"), which reads the rows once more to plan
    and shuffles them; beside it write() without bundles (plain) and Spark's sink. Three partitions per topic unless
    --partitions says otherwise. The table then also has how much longer the slowest task took than the median one, the
    records in a batch as a broker of ours has stored it, and the producers' connections.

    With --rows orders, the rows are in Parquet files, which everybody reads anew: fastprod is export() with JSON;
    beside it write(value=Json()) of a DataFrame (write), Spark's to_json before write() (to-json) and before Spark's
    sink (spark-sink), and the same with Avro (avro), which Spark's to_avro writes.

    Needs Java 17 and pyspark; spark-sink needs Maven, which fetches it once.

    Exit code: 0; 1 when rows were not delivered; 2 for wrong usage or no broker; 130 after Ctrl-C.
    """
    given: dict[str, Any] = {**file, **options}
    given_brokers = brokers(given, bootstrap, real)
    if topics is not None and kind == "orders":
        raise click.UsageError("orders go to one topic: leave --topics out, or --rows")
    load = ORDERS if kind == "orders" else VALUES if topics is None else TOPICS
    if load is ORDERS:
        record_size = ORDER_BYTES
    ways = _ways(load, rivals)
    tasks = tasks or (cores if topics is None else MANY_TASKS)
    if topics is not None and ctx.get_parameter_source("partitions") is ParameterSource.DEFAULT:
        partitions = FEW_PARTITIONS
    rounds = rounds or (5 if len(ways) > 1 else 1)
    conf = configuration({"linger.ms": LINGER_MS, **given} if "queue.buffering.max.ms" not in given else given)
    job = Job(topic, conf, num_records, record_size, cores, tasks, warmup, rounds, ways, load, topics or 1)
    names = [topic] if topics is None else topic_names(topic, topics)
    report: dict[str, Any] = {}
    interrupted = False
    try:
        jars = _jars(job)
        with ExitStack() as stack:
            cluster = None
            if not given_brokers:
                cluster = stack.enter_context(real_broker(topic if topics is None else None, partitions * len(names)))
                job.conf["bootstrap.servers"] = cluster.bootstrap_servers
            target = Target(job.conf, names[0], names[1:])
            target.open(partitions)
            engine = stack.enter_context(_engine(job, jars, settings))
            report = _head(job, target, not given_brokers, engine.version)
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="fastprod-perf-")))
            interruptibly(engine, lambda stop: _run(job, engine, target, cluster, folder, stop))
    except KeyboardInterrupt:
        interrupted = True
    except (Unfit, Unreachable) as problem:
        raise Failure(str(problem), 2) from None
    except DeliveryError as problem:
        _show(report, job, form, False)
        raise Failure(str(problem), 1) from None
    _show(report, job, form, interrupted)
    if interrupted:
        ctx.exit(130)


def _ways(load: Load, text: str | None) -> list[Way]:
    """Who takes part: fastprod, and those that are named."""
    if text is None:
        names = list(load.rivals) if load.always else []
    else:
        names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in load.rivals:
            raise click.BadParameter(
                f"unknown contender {name!r}; known: {', '.join(load.rivals)}", param_hint="'--compare'"
            )
    return [load.ours, *(way for name in names for way in load.rivals[name])]


# ---- running


def _jars(job: Job) -> list[Path]:
    """What Spark needs besides itself; complains early about options that its sink does not have."""
    from fastprod.testing._java import KafkaUnavailable, spark_sink_jars

    if not any("format(" in way.call for way in job.ways):
        return []
    for_sink(job.conf)
    try:
        return sorted(spark_sink_jars().glob("*.jar"))
    except KafkaUnavailable as missing:
        raise Unfit(f"spark-sink cannot be compared: {missing}") from None


def _engine(job: Job, jars: Sequence[Path], settings: Mapping[str, str]) -> Any:
    cached = (
        0
        if job.load is ORDERS
        else sum(job.records // share for share in {way.share for way in job.ways}) * (job.size + job.load.row_overhead)
    )
    heap = HEAP_MB + int(cached / HEAP_SHARE / MEGABYTE)
    config = {"spark.driver.memory": f"{heap}m", "spark.jars": ",".join(map(str, jars)), **settings}
    return session(f"local[{job.cores}]", "fastprod perf", {name: value for name, value in config.items() if value})


def _cached(engine: SparkSession, job: Job, records: int, folder: Path) -> DataFrame:
    """Rows with values that differ, in memory as Spark itself would keep them; or in files."""
    from pyspark import StorageLevel

    if job.load.select is None:
        write_orders(folder, records)
        return engine.read.parquet(str(folder))
    columns = job.load.select(job.size, job.topic, job.topics)
    memory = StorageLevel(useDisk=False, useMemory=True, useOffHeap=False, deserialized=True)
    df = engine.range(0, records, 1, job.tasks).selectExpr(*columns).persist(memory)
    df.count()
    return df


def _check_cached(engine: SparkSession, job: Job, expected: int) -> None:
    """Rows that do not fit would be made anew in every round."""
    held = engine.sparkContext._jsc.sc().getRDDStorageInfo()  # knows those of which something is in memory
    if len(held) < expected or any(one.numCachedPartitions() < one.numPartitions() for one in held):
        heap = engine.sparkContext.getConf().get("spark.driver.memory")
        raise Unfit(
            f"{job.records:,} rows of {job.size} bytes do not fit into Spark's memory of {heap}: give fewer "
            "--num-records, or more with --conf spark.driver.memory=..."
        )


def _run(
    job: Job, engine: SparkSession, target: Target, cluster: KafkaCluster | None, folder: Path, stop: Event
) -> None:
    """Fills job.done."""
    jvm = int(engine._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]
    rows = {
        share: _cached(engine, job, max(1, job.records // share), folder) for share in {way.share for way in job.ways}
    }
    if job.load.select is not None:
        _check_cached(engine, job, len(rows))
    turn = sum(map(job.records_of, job.ways))
    with progress(turn * (job.warmup + job.rounds), "rows") as advance:
        for number in range(1 - job.warmup, job.rounds + 1):  # up to 0 to warm up
            for place in range(len(job.ways)):
                if stop.is_set():
                    return
                way = job.ways[(number + place) % len(job.ways)]
                engine._jvm.java.lang.System.gc()  # type: ignore[union-attr]  # nobody clears up after another
                clock = Clock(jvm, cluster is not None)
                if job.load is TOPICS:
                    done = _measure_topics(way, number, rows[way.share], job, target, clock, cluster)
                else:
                    done = _measure(way, number, rows[way.share], job, target, clock)
                if number > 0:
                    job.done.append(done)
                advance(done.records)


def _measure(way: Way, number: int, df: DataFrame, job: Job, target: Target, clock: Clock) -> Round:
    """One run, of which the topic has every row; DeliveryError if not."""
    records = job.records_of(way)
    before = target.written()
    clock.start()
    try:
        way.send(df, job.topic, job.conf)
    except Exception as problem:
        raise DeliveryError(f"{way.client} {way.call} failed: {_reason(problem)}") from None
    seconds, cpu, broker_cpu = clock.stop()
    missing = records - (target.written() - before) if way.arrives else 0
    settled = time.monotonic() + SETTLE_S
    while missing > 0 and time.monotonic() < settled:  # a commit is answered before everybody can see it
        time.sleep(0.1)
        missing = records - (target.written() - before)
    if missing > 0:
        raise DeliveryError(f"{missing} of {records} rows written by {way.client} {way.call} did not arrive")
    return Round(way, number, records, seconds, cpu, broker_cpu)


def _measure_topics(
    way: Way, number: int, df: DataFrame, job: Job, target: Target, clock: Clock, cluster: KafkaCluster | None
) -> Round:
    """The same, with what is told of many topics."""
    before = target.ends_of_all() if cluster is not None else {}
    with most_connections(str(job.conf["bootstrap.servers"])) as connections:
        done = _measure(way, number, df, job, target, clock)
    done.connections = connections[0] if connections else None
    seconds = task_seconds(df.sparkSession)
    done.task_ratio = max(seconds) / median(seconds) if seconds and median(seconds) else None
    if cluster is not None:
        since: dict[str, dict[int, int]] = {}
        for (topic, partition), end in before.items():
            since.setdefault(topic, {})[partition] = end
        batches = [size for topic, ends in since.items() for size in cluster.batches(topic, ends)]
        done.records_per_batch = sum(batches) / len(batches) if batches else None
        target.forget()
    return done


# ---- showing


def _head(job: Job, target: Target, embedded: bool, spark_version: str) -> dict[str, Any]:
    return {
        **versions(),
        "spark": spark_version,
        "cluster": {
            "bootstrap": target.address,
            "embedded": embedded,
            "topic": target.topic,
            "partitions": target.partitions,
        },
        "load": {
            "num_records": job.records,
            "record_size": job.size,
            **({"topics": job.topics} if job.load is TOPICS else {}),
            **({"rows": "orders"} if job.load is ORDERS else {}),
            "cores": job.cores,
            "tasks": job.tasks,
            "warmup": job.warmup,
            "rounds": job.rounds,
        },
        "config": shown(job.conf),
    }


def _show(report: dict[str, Any], job: Job, form: str, interrupted: bool) -> None:
    rows = _summarise(job.done, job.load)
    if form == "json":
        report["rounds"] = [_as_json(one, job.size, job.load) for one in job.done]
        report["summary"] = rows
        report["interrupted"] = interrupted
        click.echo(json.dumps(report, indent=2))
    elif rows:
        console().print(_table(rows, job))


def _as_json(one: Round, size: int, load: Load) -> dict[str, Any]:
    more = {name: getattr(one, name) for name in ONLY_FOR_TOPICS} if load is TOPICS else {}
    return {
        "round": one.number,
        "client": one.way.client,
        "call": one.way.call,
        "records": one.records,
        "seconds": one.seconds,
        "records_per_s": one.rate,
        "mb_per_s": one.rate * size / MEGABYTE,
        "cpu_us_per_record": _per_record(one.cpu_seconds, one),
        "broker_cpu_us_per_record": _per_record(one.broker_cpu_seconds, one),
        **more,
    }


def _per_record(seconds: float | None, one: Round) -> float | None:
    return None if seconds is None else seconds * 1e6 / one.records


def _summarise(done: Sequence[Round], load: Load = VALUES) -> list[dict[str, Any]]:
    """A row per way; ratios are fastprod's against that row, round by round."""
    groups: dict[Way, dict[int, Round]] = {}
    for one in done:
        groups.setdefault(one.way, {})[one.number] = one
    order = [way for way in (load.ours, *(way for ways in load.rivals.values() for way in ways)) if way in groups]
    ours = groups.get(load.ours, {})
    rows = []
    for way in order:
        members = groups[way]
        told = [_as_json(one, 0, load) for one in members.values()]
        row: dict[str, Any] = {
            "client": way.client,
            "call": way.call,
            "records": next(iter(members.values())).records,
            "rounds": len(members),
            "records_per_s": spread([one.rate for one in members.values()]),
        }
        extra = ONLY_FOR_TOPICS if load is TOPICS else ()
        for name in ("cpu_us_per_record", "broker_cpu_us_per_record", *extra):
            figures = [figure for one in told if (figure := one[name]) is not None]
            row[name] = spread(figures) if figures else None
        # An interrupted run may lack some of a round.
        turns = [(ours[number], members[number]) for number in members if number in ours and way is not load.ours]
        row["throughput_ratio"] = spread([mine.rate / theirs.rate for mine, theirs in turns]) if turns else None
        rows.append(row)
    return rows


def _table(rows: Sequence[Mapping[str, Any]], job: Job) -> Table:
    counts = sorted({row["records"] for row in rows}, reverse=True)
    fewer = f" ({counts[1]:,} for foreach)" if len(counts) > 1 else ""
    cores = f"{job.cores} core{'s' if job.cores > 1 else ''} for Spark"
    where = f" to {job.topics} topics" if job.load is TOPICS else ""
    rows_of = "orders of about" if job.load is ORDERS else "rows of"
    table = Table(
        caption=f"{counts[0]:,} {rows_of} {job.size} B{fewer}{where}, {cores}; median (min..max) of the rounds; CPU: "
        "Spark with its Python workers; fastprod's throughput above 1x is in its favour"
    )
    for title in ("client", "call"):
        table.add_column(title, no_wrap=True)
    extra = ONLY_FOR_TOPICS if job.load is TOPICS else {}
    for title in ("M rows/s", "CPU us/row", "broker's", *extra.values(), "fastprod's throughput"):
        table.add_column(title, justify="right", overflow="fold")
    for row in rows:
        table.add_row(
            row["client"],
            row["call"],
            cell(row["records_per_s"], ".2f", 1e6),
            cell(row["cpu_us_per_record"], ".2f"),
            cell(row["broker_cpu_us_per_record"], ".2f"),
            *(cell(row[name], ".1f") for name in extra),
            cell(row["throughput_ratio"], ".2f", unit="x"),
        )
    return table
