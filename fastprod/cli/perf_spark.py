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
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import confluent_kafka
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
from fastprod.cli._java_load import WIRE_BATCH, java_settings
from fastprod.cli._load import DeliveryError, Target, Unfit, Unreachable, for_librdkafka
from fastprod.cli._options import Failure
from fastprod.cli._spark import interruptibly, session
from fastprod.cli.export import _reason

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Config = Mapping[str, Any]

HASH = 64  # letters of a SHA-256, of which values are made
SLOW_SHARE = 5  # the slow loop gets one row in so many: rates are compared, and it would take minutes
HEAP_MB = 1024  # for Spark itself
HEAP_SHARE = 0.4  # of the heap that cached rows may fill; Spark gives them up to 0.6, the rest is for their overhead
SETTLE_S = 30.0  # for a transaction's records to be seen
TICKS = os.sysconf("SC_CLK_TCK")


# ---- who takes part


BATCH_ROWS = 10_000  # for write() and the hand-over alone; as many as Spark has, but without adding up their bytes


def _write(df: DataFrame, topic: str, conf: Config) -> None:
    from fastprod.spark import write

    write(df, topic, conf)


def _write_by_rows(df: DataFrame, topic: str, conf: Config) -> None:
    from fastprod.spark import write

    write(df, topic, conf, batch_rows=BATCH_ROWS)


def _write_once(form: str) -> Callable[[DataFrame, str, Config], None]:
    def send(df: DataFrame, topic: str, conf: Config) -> None:
        from fastprod.spark import write

        buckets = df.rdd.getNumPartitions() if form == "bucket" else None  # as many tasks as the others have
        job = f"perf-{uuid.uuid4().hex}"
        write(df, topic, conf, batch_rows=BATCH_ROWS, exactly_once=form, job_id=job, buckets=buckets)

    return send


def _write_again(df: DataFrame, topic: str, conf: Config) -> None:
    """A job that was written before, the first time in the warm-up: its rows are read, compared and not sent."""
    from fastprod.spark import write

    write(df, topic, conf, batch_rows=BATCH_ROWS, exactly_once="task", job_id=f"perf-again-{os.getpid()}")


def _sink(df: DataFrame, topic: str, options: Mapping[str, str]) -> None:
    writer = df.write.format("kafka").option("topic", topic)
    for name, value in options.items():
        writer = writer.option(f"kafka.{name}", value)
    writer.save()


def _sink_as_it_comes(df: DataFrame, topic: str, conf: Config) -> None:
    own = ("linger.ms", "batch.size")
    _sink(df, topic, {name: value for name, value in _for_sink(conf).items() if name not in own})


def _sink_tuned(df: DataFrame, topic: str, conf: Config) -> None:
    _sink(df, topic, {**_for_sink(conf), "batch.size": str(conf.get("batch.size", WIRE_BATCH))})


def _for_sink(conf: Config) -> dict[str, str]:
    try:
        return java_settings(conf)
    except Unfit as problem:
        raise Unfit(f"spark-sink{str(problem).removeprefix('java')}") from None


def _foreach(df: DataFrame, topic: str, conf: Config) -> None:
    """The loop that people write, without a delivery callback: in its favour."""
    settings = for_librdkafka(conf)

    def send(rows: Iterator[Any]) -> None:
        producer = confluent_kafka.Producer(settings)
        for row in rows:
            while True:
                try:
                    producer.produce(topic, bytes(row.value))
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
        producer.flush()

    df.foreachPartition(send)


def _hand_over(df: DataFrame, topic: str, conf: Config) -> None:
    from fastprod.spark import batches_of

    def drop(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if not batch.num_rows:
                yield batch  # never: what is sent back has no rows

    with batches_of(BATCH_ROWS, df.sparkSession):  # as fast as it goes
        df.mapInArrow(drop, df.schema).collect()


class Way(NamedTuple):
    """One way to get rows out of Spark."""

    client: str
    call: str
    send: Callable[[DataFrame, str, Config], None]
    share: int = 1
    """It gets one row in so many."""
    arrives: bool = True
    """Whether the rows end up in the topic."""


OURS = Way("fastprod", f"spark.write, {BATCH_ROWS:,}-row batches", _write_by_rows)
RIVALS = {
    "write": (Way("write", "spark.write, Spark's batches", _write),),
    "spark-sink": (
        Way("spark-sink", 'format("kafka"), defaults', _sink_as_it_comes),
        Way("spark-sink", 'format("kafka"), tuned', _sink_tuned),
    ),
    "foreach": (Way("foreach", "foreachPartition, confluent", _foreach, share=SLOW_SHARE),),
    "hand-over": (Way("hand-over", "mapInArrow, rows dropped", _hand_over, arrives=False),),
    "once": (
        Way("once", 'exactly_once="task"', _write_once("task")),
        Way("once", 'exactly_once="bucket"', _write_once("bucket")),
        Way("once", '"task", written before', _write_again, arrives=False),
    ),
}


def _rivals(ctx: click.Context, param: click.Parameter, text: str | None) -> list[Way]:
    names = [] if text is None else list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in RIVALS:
            raise click.BadParameter(f"unknown contender {name!r}; known: {', '.join(RIVALS)}")
    return [way for name in names for way in RIVALS[name]]


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
    done: list[Round] = field(default_factory=list)

    def records_of(self, way: Way) -> int:
        return max(1, self.records // way.share)


@click.command()
@click.option("-b", "--bootstrap", metavar="HOST:PORT,...", help="Brokers. Without: an Apache Kafka on this machine.")
@click.option("--real", is_flag=True, help="An Apache Kafka of one broker on this machine, as without -b.")
@click.option("--num-records", type=click.IntRange(1), default=3_000_000, show_default=True, help="Rows per run.")
@click.option("--record-size", type=click.IntRange(0), default=100, show_default=True, help="Bytes of a row's value.")
@click.option("--cores", type=click.IntRange(1), default=2, show_default=True, help="That Spark may use.")
@click.option("--tasks", type=click.IntRange(1), help="Spark partitions that hold the rows. Default: one per core.")
@click.option(
    "--conf",
    "settings",
    metavar="KEY=VALUE",
    multiple=True,
    callback=_options.pairs,
    help="A setting of Spark, repeatable.",
)
@click.option("--rounds", type=click.IntRange(1), help="Runs of each. Default: 5 with --compare, else 1.")
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
    callback=_rivals,
    help=f"Run these too, in turns with fastprod; a comma list. Known: {', '.join(RIVALS)}.",
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
    cores: int,
    tasks: int | None,
    options: dict[str, str],
    file: dict[str, str],
    settings: dict[str, str],
    rounds: int | None,
    warmup: int,
    rivals: list[Way],
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
    linger.ms=5, acks=all and idempotence unless -X says otherwise; foreach, which is about ten times slower, gets one
    row in five. After the warm-up come --rounds in turns, each checked by the topic's end offsets. The table shows
    medians and, in brackets, the extremes; ratios are taken round by round.

    Needs Java 17 and pyspark; spark-sink needs Maven, which fetches it once.

    Exit code: 0; 1 when rows were not delivered; 2 for wrong usage or no broker; 130 after Ctrl-C.
    """
    given: dict[str, Any] = {**file, **options}
    given_brokers = brokers(given, bootstrap, real)
    tasks = tasks or cores
    rounds = rounds or (5 if rivals else 1)
    job = Job(topic, configuration(given), num_records, record_size, cores, tasks, warmup, rounds, [OURS, *rivals])
    report: dict[str, Any] = {}
    interrupted = False
    try:
        jars = _jars(job)
        with ExitStack() as stack:
            if not given_brokers:
                cluster = stack.enter_context(real_broker(topic, partitions))
                job.conf["bootstrap.servers"] = cluster.bootstrap_servers
            target = Target(job.conf, topic)
            target.open(partitions)
            engine = stack.enter_context(_engine(job, jars, settings))
            report = _head(job, target, not given_brokers, engine.version)
            interruptibly(engine, lambda stop: _run(job, engine, target, not given_brokers, stop))
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


# ---- running


def _jars(job: Job) -> list[Path]:
    """What Spark needs besides itself; complains early about options that its sink does not have."""
    from fastprod.testing._java import KafkaUnavailable, spark_sink_jars

    if not any(way.client == "spark-sink" for way in job.ways):
        return []
    _for_sink(job.conf)
    try:
        return sorted(spark_sink_jars().glob("*.jar"))
    except KafkaUnavailable as missing:
        raise Unfit(f"spark-sink cannot be compared: {missing}") from None


def _engine(job: Job, jars: Sequence[Path], settings: Mapping[str, str]) -> Any:
    cached = sum(job.records // share for share in {way.share for way in job.ways}) * (job.size + 8)
    heap = HEAP_MB + int(cached / HEAP_SHARE / MEGABYTE)
    config = {"spark.driver.memory": f"{heap}m", "spark.jars": ",".join(map(str, jars)), **settings}
    return session(f"local[{job.cores}]", "fastprod perf", {name: value for name, value in config.items() if value})


def _cached(engine: SparkSession, job: Job, records: int) -> DataFrame:
    """Rows with values that differ, in memory as Spark itself would keep them."""
    from pyspark import StorageLevel

    hashes = -(-job.size // HASH)
    value = f"cast(substring(repeat(sha2(cast(id AS string), 256), {hashes}), 1, {job.size}) AS binary) AS value"
    memory = StorageLevel(useDisk=False, useMemory=True, useOffHeap=False, deserialized=True)
    df = engine.range(0, records, 1, job.tasks).selectExpr(value).persist(memory)
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


def _run(job: Job, engine: SparkSession, target: Target, broker_is_ours: bool, stop: Event) -> None:
    """Fills job.done."""
    jvm = int(engine._jvm.java.lang.ProcessHandle.current().pid())  # type: ignore[union-attr]
    rows = {share: _cached(engine, job, max(1, job.records // share)) for share in {way.share for way in job.ways}}
    _check_cached(engine, job, len(rows))
    turn = sum(map(job.records_of, job.ways))
    with progress(turn * (job.warmup + job.rounds), "rows") as advance:
        for number in range(1 - job.warmup, job.rounds + 1):  # up to 0 to warm up
            for place in range(len(job.ways)):
                if stop.is_set():
                    return
                way = job.ways[(number + place) % len(job.ways)]
                engine._jvm.java.lang.System.gc()  # type: ignore[union-attr]  # nobody clears up after another
                done = _measure(way, number, rows[way.share], job, target, _Clock(jvm, broker_is_ours))
                if number > 0:
                    job.done.append(done)
                advance(done.records)


def _measure(way: Way, number: int, df: DataFrame, job: Job, target: Target, clock: _Clock) -> Round:
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


class _Clock:
    """Time, and the CPU time of Spark's processes and of a broker that is ours."""

    def __init__(self, jvm: int, broker_is_ours: bool) -> None:
        self.jvm = jvm
        self.broker_is_ours = broker_is_ours

    def start(self) -> None:
        self.cpu = self._cpu()
        self.time = time.perf_counter()

    def stop(self) -> tuple[float, float | None, float | None]:
        seconds = time.perf_counter() - self.time
        spent = [
            None if now is None or then is None else now - then for now, then in zip(self._cpu(), self.cpu, strict=True)
        ]
        return seconds, spent[0], spent[1]

    def _cpu(self) -> tuple[float | None, float | None]:
        processes = _processes()
        if self.jvm not in processes:
            return None, None
        spark = _cpu_below(self.jvm, processes)
        if not self.broker_is_ours:
            return spark, None
        # What else we have started is the broker and its keeper.
        mine = [pid for pid, (parent, _) in processes.items() if parent == os.getpid()]
        return spark, sum(_cpu_below(pid, processes) for pid in mine) - spark


def _processes() -> dict[int, tuple[int, float]]:
    """Parent and CPU seconds of every process, also of its children that have ended; empty where there is no /proc."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            facts = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        found[int(path.parent.name)] = (int(facts[1]), sum(map(int, facts[11:15])) / TICKS)
    return found


def _cpu_below(pid: int, processes: Mapping[int, tuple[int, float]]) -> float:
    """Of a process and all that it has started."""
    children = [child for child, (parent, _) in processes.items() if parent == pid]
    return processes[pid][1] + sum(_cpu_below(child, processes) for child in children)


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
            "cores": job.cores,
            "tasks": job.tasks,
            "warmup": job.warmup,
            "rounds": job.rounds,
        },
        "config": shown(job.conf),
    }


def _show(report: dict[str, Any], job: Job, form: str, interrupted: bool) -> None:
    rows = _summarise(job.done)
    if form == "json":
        report["rounds"] = [_as_json(one, job.size) for one in job.done]
        report["summary"] = rows
        report["interrupted"] = interrupted
        click.echo(json.dumps(report, indent=2))
    elif rows:
        console().print(_table(rows, job))


def _as_json(one: Round, size: int) -> dict[str, Any]:
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
    }


def _per_record(seconds: float | None, one: Round) -> float | None:
    return None if seconds is None else seconds * 1e6 / one.records


def _summarise(done: Sequence[Round]) -> list[dict[str, Any]]:
    """A row per way; ratios are fastprod's against that row, round by round."""
    groups: dict[Way, dict[int, Round]] = {}
    for one in done:
        groups.setdefault(one.way, {})[one.number] = one
    order = [way for way in (OURS, *(way for ways in RIVALS.values() for way in ways)) if way in groups]
    ours = groups.get(OURS, {})
    rows = []
    for way in order:
        members = groups[way]
        told = [_as_json(one, 0) for one in members.values()]
        row: dict[str, Any] = {
            "client": way.client,
            "call": way.call,
            "records": next(iter(members.values())).records,
            "rounds": len(members),
            "records_per_s": spread([one.rate for one in members.values()]),
        }
        for name in ("cpu_us_per_record", "broker_cpu_us_per_record"):
            figures = [figure for one in told if (figure := one[name]) is not None]
            row[name] = spread(figures) if figures else None
        # An interrupted run may lack some of a round.
        turns = [(ours[number], members[number]) for number in members if number in ours and way is not OURS]
        row["throughput_ratio"] = spread([mine.rate / theirs.rate for mine, theirs in turns]) if turns else None
        rows.append(row)
    return rows


def _table(rows: Sequence[Mapping[str, Any]], job: Job) -> Table:
    counts = sorted({row["records"] for row in rows}, reverse=True)
    fewer = f" ({counts[1]:,} for foreach)" if len(counts) > 1 else ""
    cores = f"{job.cores} core{'s' if job.cores > 1 else ''} for Spark"
    table = Table(
        caption=f"{counts[0]:,} rows of {job.size} B{fewer}, {cores}; median (min..max) of the rounds; CPU: Spark with "
        "its Python workers; fastprod's throughput above 1x is in its favour"
    )
    for title in ("client", "call"):
        table.add_column(title, no_wrap=True)
    for title in ("M rows/s", "CPU us/row", "broker's", "fastprod's throughput"):
        table.add_column(title, justify="right", overflow="fold")
    for row in rows:
        table.add_row(
            row["client"],
            row["call"],
            cell(row["records_per_s"], ".2f", 1e6),
            cell(row["cpu_us_per_record"], ".2f"),
            cell(row["broker_cpu_us_per_record"], ".2f"),
            cell(row["throughput_ratio"], ".2f", unit="x"),
        )
    return table
