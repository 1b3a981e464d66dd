"""DataFrames and RDDs into Kafka, from the executors, every record accounted for.

    report = fastprod.spark.write(df, "orders", {"bootstrap.servers": "kafka:9092"})

Each task hands its rows to a fastprod producer of its Python worker and waits for all acknowledgements before it
ends. pyspark is needed: `pip install 'fastprod[spark]'`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastprod.bundles import BundleMap
from fastprod.encoding import Encoder, Json
from fastprod.spark import _bundles, _columns, _export, _plan
from fastprod.spark._check import CheckError
from fastprod.spark._export import ExportPlan
from fastprod.spark._files import SourceError, TextOptions, given_schema
from fastprod.spark._once import claim
from fastprod.spark._priority import check_name, refusal
from fastprod.spark._rows import PartitionWriter
from fastprod.spark._shape import Shape
from fastprod.spark._sink import BUCKET, ExportError, Sink
from fastprod.spark._worker import (
    CLAIM,
    NO_SPECULATION,
    PENDING,
    claim_batches,
    learnt,
    number_batches,
    report_batches,
    report_none,
)
from fastprod.spark.report import ExportReport, PartitionReport, TaskReport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "CheckError",
    "ExportError",
    "ExportPlan",
    "ExportReport",
    "PartitionReport",
    "SourceError",
    "TaskReport",
    "bucketed",
    "export",
    "partition_writer",
    "register",
    "write",
]

ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
UNCOUNTED = "2147483647"  # this value of BYTES, and no other, makes Spark 4 stop adding up a batch's bytes at every row
CHUNK = 10_000  # rows of an RDD handed over at once
JSON = Json()
BUCKETS = 64  # a task of some seconds each for millions of rows, and work for as many cores

_lock = threading.Lock()
_sessions: dict[
    int, tuple[int, dict[str, str | None]]
] = {}  # write() calls at work, and what the session had set before


def write(
    df: DataFrame,
    topic: str | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    value: Encoder | str | None = None,
    key: Encoder | str | None = None,
    headers: str | Sequence[str] | None = None,
    timestamp: str | None = None,
    priority: str | None = None,
    max_priority: int | None = None,
    exactly_once: str | None = None,
    job_id: str | None = None,
    buckets: int | None = None,
    bucket_by: Sequence[str] | None = None,
    bundles: BundleMap | str | None = None,
    batch: int | None = None,
    marker_topic: str | None = None,
    batch_rows: int | None = None,
    check: bool = True,
) -> ExportReport:
    """Writes a DataFrame to Kafka and waits until every record is acknowledged.

    Columns are those of Spark's own Kafka sink: `value` (string or binary, required), `key`, `topic`, `partition`,
    `headers`, and in addition `timestamp`. Others are ignored. `KEY` is `key`, as ever in Spark, unless
    spark.sql.caseSensitive says otherwise. `topic` beats the column of that name. A column `topic`
    that may hold nulls is looked through before anything is sent, which reads it twice; `coalesce(topic, '...')`
    cannot be null and saves that.

    With `value`, rows have whatever columns they have, and Python workers make records of them: an encoder of
    fastprod.encoding, as Json() or Avro(...), makes values of whole rows, in C. `key`, `headers` and `timestamp` then
    say what the rest is. What cannot be encoded by its type is refused before anything is sent; a row that cannot be,
    by its value, fails its task with the row in the error, and nothing of its Arrow batch is sent. A schema registry is
    asked once, here.

    With `priority`, the name of a column of integers, `topic` is a logical one, and a row of priority 2 goes to the
    Kafka topic `<topic>-2`, as with fastprod.priority.PriorityProducer. A priority that is null or not from 0 to
    max_priority - 1 is refused before anything is sent: the column is looked through first, which reads it twice.
    Tasks look again, for rows that are others by then, before anything of an Arrow batch is sent.

    A task fails when a record of it fails, and Spark then retries it as usual: records of the failed attempt that Kafka
    has taken stay there, so a job with retried tasks delivers at least once.

    With exactly_once each Spark partition is one Kafka transaction with a marker in it, named by `job_id` and the
    partition's number. However often a task, or the whole job with the same `job_id`, runs again, readers with
    isolation.level=read_committed see the partition's records once. The guarantee is per partition, not for the job as
    a whole: readers may see some partitions before others.

    - A task commits only when it has seen the mark that Spark's JVM sends behind the last row of its input. One whose
      input was cut off, because something failed upstream or the job was cancelled, aborts and fails.
    - The number of partitions is noted before the first task starts; a run with another number under the same `job_id`
      is refused before anything is sent.
    - A marker holds the number of rows and a fingerprint of them. A task that finds one reads its own rows, and reports
      "skipped" if they are the same; if not, the job fails and names the partition.

    "task" takes the partitions as they are: they must be the same each time, so cores, input splits and settings must
    stay. "bucket" shuffles the rows into a fixed number of `buckets` by a hash of the columns `bucket_by`, so
    that the same rows are in the same bucket on any cluster, whatever the cores, splits or settings.

    With `bundles`, rows that name their topics are first shuffled so that each topic has one task: its batches are
    larger, and a task has few topics. A `BundleMap` makes a task of each of its bundles. "auto" reads the rows once to
    add up the bytes of each topic, and plans for as many tasks as there are cores, or `buckets`; a topic that is too
    big for one task is spread over several by the hash of its keys, or of the values where there is no key, and the
    report's `spread` says so. With exactly_once, "task" or "bucket", such a task is one transaction, and the same rows
    are in the same task whatever the splits; where a run under the same `job_id` would divide them in another way, it
    is refused.

    A task must take less than transaction.timeout.ms (15 minutes unless set), and the job must run again within the
    brokers' offsets.retention.minutes (7 days unless set), for markers are then forgotten.

    Args:
        df: the rows to write.
        topic: where to, unless the column `topic` says so.
        config: of the producer, as for fastprod.Producer. Passwords in it stay out of Spark's logs and of the report.
        value: an encoder that makes values of rows, or the name of a column; None for a column `value`, as in Spark.
        key, headers, timestamp: with `value`, as for `export`.
        priority: the column that has the rows' levels, 0 the lowest.
        max_priority: how many levels there are; may also be `max.priority` in the config.
        exactly_once: "task" or "bucket" for a transaction per Spark partition or bucket; None for at least once.
        job_id: the name of this export for exactly_once; a job that is submitted again keeps it.
        buckets: for "bucket", how many; 64 unless given. A bucket is a task and a transaction. With bundles="auto", the
            number of tasks.
        bucket_by: for "bucket", the columns that decide; all that are written, but headers, unless given. Choose some
            that spread the rows well and do not change from run to run.
        bundles: who writes which topic, for rows that name their topics: a fastprod.bundles.BundleMap, or "auto".
        batch: in foreachBatch, the number of the batch; job_id then names the query.
        marker_topic: an existing topic whose offsets hold the markers; `topic` unless given, with priorities that of
            level 0, and where rows name their topics `fastprod-markers`, which is created if it is missing and stays
            empty.
        batch_rows: rows per Arrow batch, whatever their bytes; None leaves that to Spark's settings, which end a batch
            at 10,000 rows or 64 MB. 10,000 is about a quarter faster where rows are small, because Spark then does not
            add up their bytes, and 2,000 nearly as fast; but 10,000 rows of 100 kB make a batch of 1 GB, and Spark
            fails where its memory does not hold that. Jobs that other threads start in the same session meanwhile
            get such batches too.
        check: whether the driver first asks the brokers if they answer, have the topic and let this client write to it,
            rather than each task when it starts; and whether it first looks through the priorities. Brokers are not
            asked where only executors have a file that the config names, nor with Spark Connect, whose client need not
            be near them.

    Raises:
        ValueError, TypeError: a column is missing, of the wrong type, a topic null or a priority out of range, an
            option is wrong, or an earlier run under this job_id was divided in another way; nothing was sent.
        CheckError: brokers do not answer, the topic is missing or this client may not write to it; nothing was sent.
    """
    if batch_rows is not None and not 1 <= batch_rows <= 10_000_000:
        raise ValueError(f"batch_rows is a number of rows from 1 to 10,000,000, or None, not {batch_rows}")
    check_name(priority)
    shape: Shape | None = None
    needed: list[str] = []
    if value is not None:
        for name, given in (("priority", priority), ("bundles", bundles)):
            if given is not None:
                raise ValueError(f"{name} does not go with value: make the columns of Spark's sink for it")
        shape, needed = _shaped(df, topic, Shape.of(value, key, headers, timestamp, None))
    elif key is not None or headers is not None or timestamp is not None:
        raise ValueError("key, headers and timestamp have no effect without value; columns of these names have")
    else:
        df, priority = _columns.named(df, topic, priority)
    rows = df  # as they are, before buckets make a shuffle of them
    start = time.monotonic()
    spread: dict[str, int] = {}
    if bundles is not None:
        _bundles.check(bundles, topic, df.columns, buckets, bucket_by)
        _plan.check_columns(df.schema, topic, priority)
        routes = _bundles.of_map(bundles) if isinstance(bundles, BundleMap) else _bundles.measured(df, buckets)
        df, spread = _bundles.routed(df, routes), routes.spread_tasks()
        config = _bundles.in_large_batches(config)
        if exactly_once == "task":
            exactly_once = "bucket"  # a task is what the bundles make it, not what Spark's splits do
    elif exactly_once == "bucket":
        if buckets is not None or bucket_by is not None or BUCKET not in df.columns:
            if shape is not None and bucket_by is None:
                bucket_by = _plan.hashable(df.select(*map(_plan.quoted, needed)).schema)
            df = bucketed(df, BUCKETS if buckets is None else buckets, bucket_by)
    elif buckets is not None or bucket_by is not None:
        raise ValueError('buckets and bucket_by have no effect without exactly_once="bucket"')
    sink = _plan.plan(
        df.schema,
        topic,
        config,
        exactly_once=exactly_once,
        job_id=job_id,
        batch=batch,
        marker_topic=marker_topic,
        check=check and not _is_remote(df),
        priority=priority,
        max_priority=max_priority,
        shaped=shape is not None,
    )
    if sink.job is not None and str(df.sparkSession.conf.get("spark.speculation", "false")).lower() == "true":
        raise ValueError(NO_SPECULATION)
    if shape is None:
        _look_through(rows, sink, priorities=check)
        needed = _plan.used_columns(df.schema, topic, priority)
    # Only now: columns that decide about buckets need not be part of a record.
    df = df.select(*map(_plan.quoted, [*needed, BUCKET] if sink.bucketed else needed))
    with batches_of(batch_rows, df.sparkSession):
        reports = _run(df, sink, shape)
    told = (TaskReport.from_json(row.report) for row in reports)
    return ExportReport.of(told, time.monotonic() - start, spread)


def _shaped(df: DataFrame, topic: str | None, shape: Shape) -> tuple[Shape, list[str]]:
    """The shape, checked against the columns and with encoders resolved, and the columns that it needs."""
    if topic is None:
        raise ValueError("no topic: rows that are encoded need topic='...'")
    data = [name for name in df.columns if name != BUCKET]
    schema = _columns.arrow_schema(df.select(*map(_plan.quoted, data)).schema)
    needed = shape.needed(schema)
    return shape.resolved(_export.chosen(schema, needed)), needed


def export(
    spark: SparkSession,
    source: Any,
    topic: str,
    config: Mapping[str, Any],
    *,
    value: Encoder | str = JSON,
    key: Encoder | str | None = None,
    headers: str | Sequence[str] | None = None,
    timestamp: str | None = None,
    columns: Sequence[str] | None = None,
    where: Any = None,
    exactly_once: bool = False,
    job_id: str | None = None,
    format: str | None = None,
    schema: Any = None,
    csv: Mapping[str, Any] | None = None,
    filesystem: Any = None,
    splits: int | None = None,
    split_bytes: int | None = None,
    marker_topic: str | None = None,
    check: bool = True,
    on_plan: Callable[[ExportPlan], None] | None = None,
) -> ExportReport:
    """Writes files to Kafka, read by the Python workers, and waits until every record is acknowledged.

        report = export(spark, "s3://lake/orders", "orders", {"bootstrap.servers": "kafka:9092"}, key="customer")

    Spark plans, distributes and retries; no row passes the JVM. All files are listed, and looked into, before anything
    is sent: one that is missing, empty, damaged, or whose columns differ from the others' is named. Tasks then get
    splits of about equally many bytes. A split is read, filtered, encoded and sent some thousand rows at a time; a task
    fails when a row cannot be written or is not acknowledged, with the file, the part of it and the row in the error.
    Nobody may change the files meanwhile: that is found, and fails the task.

    With exactly_once each split is one Kafka transaction with a marker in it, named by `job_id` and the split's number.
    However often a task, or the job with the same `job_id`, runs again, on whatever cluster, readers with
    isolation.level=read_committed see its rows once. Files are noted with their sizes and times before the first task
    starts; a run that finds others under the same `job_id` is refused, and they are named. What is committed is not
    read again.

    Args:
        spark: a session, classic or of Spark Connect.
        source: a path, folder, glob or URI, or a list of these; folders are read with all below them, but for names
            that begin with "_" or ".". Folders `day=2026-11-17` below the source give a column `day`.
        topic: where to.
        config: of the producer, as for fastprod.Producer. Passwords in it stay out of Spark's logs and of the report.
        value: what becomes of a row: an encoder of fastprod.encoding, `Json()` unless given, or the name of a column
            whose bytes or text are the value.
        key: the same for keys; None for none.
        headers: columns that become headers, each named after its column; or the name of a column that has lists or
            maps of headers.
        timestamp: the column that has the records' timestamps.
        columns: of all columns those that the value is made of.
        where: rows to take: a condition such as "amount > 10 AND country = 'DE'", or a pyarrow expression. Row groups
            and folders that cannot hold such rows are not read.
        exactly_once: a transaction for each split, instead of at least once.
        job_id: the name of this export for exactly_once; a job that is submitted again keeps it.
        format: parquet, orc, arrow, csv or json, where the names of files do not tell.
        schema: of CSV, whose columns are text unless named here, and of JSON lines, which are else read twice to learn
            it; a pyarrow.Schema or a mapping from names to types. Also for columns that folders give.
        csv: options of pyarrow's CSV reader, such as {"delimiter": ";"}.
        filesystem: a pyarrow.fs.FileSystem for paths that are none of URIs and local ones.
        splits: about how many; else as many as make sense for the cores. Each is a task.
        split_bytes: instead, how large. With exactly_once the first run decides, and later ones keep to it.
        marker_topic, check: as for `write`.
        on_plan: called with an ExportPlan (files, bytes, rows, splits) when all is checked, before tasks start.

    Raises:
        SourceError, ValueError, TypeError: the files, or an argument; nothing was sent.
        CheckError: brokers do not answer, the topic is missing or this client may not write to it; nothing was sent.
    """
    if not isinstance(exactly_once, bool):
        raise TypeError(f"exactly_once is True or False for files, not {exactly_once!r}")
    if exactly_once and not job_id:
        raise ValueError("exactly_once needs a job_id: a name for this export that stays when it is submitted again")
    for name, number in (("splits", splits), ("split_bytes", split_bytes)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name} is a number from 1 on, not {number!r}")
    if splits is not None and split_bytes is not None:
        raise ValueError("give splits or split_bytes, not both")
    if not topic:
        raise ValueError("no topic: give topic='...'")
    shape = Shape.of(value, key, headers, timestamp, columns)
    order = _export.Order(
        source,
        shape,
        format,
        filesystem,
        TextOptions(dict(csv or {}), given_schema(schema)),
        where,
        splits,
        split_bytes,
    )
    remote = type(spark).__module__.startswith("pyspark.sql.connect.")
    sink = _plan.sink(
        topic,
        config,
        exactly_once="task" if exactly_once else None,
        job_id=job_id,
        marker_topic=marker_topic,
        check=check and not remote,
    )
    if sink.job is not None and str(spark.conf.get("spark.speculation", "false")).lower() == "true":
        raise ValueError(NO_SPECULATION)
    cores = None if remote else int(spark.sparkContext.defaultParallelism)
    return _export.run(spark, order, sink, remote=remote, cores=cores, watch=on_plan)


def _look_through(df: DataFrame, sink: Sink, *, priorities: bool) -> None:
    """Refuses rows that do not say where to go. Reads the columns that might not once; Parquet's statistics help."""
    wrong = ["topic IS NULL"] if sink.topic is None and df.schema["topic"].nullable else []
    counted = [f"count_if({wrong[0] if wrong else 'false'}) AS topics"]
    if priorities and sink.priority is not None:
        column = _plan.quoted(sink.priority)
        wrong += [f"{column} IS NULL", f"{column} < 0", f"{column} >= {sink.levels}"]
        counted += [f"count_if({column} IS NULL) AS nulls", f"min({column}) AS lowest", f"max({column}) AS highest"]
    if not wrong:
        return
    (found,) = df.where(" OR ".join(wrong)).selectExpr(*counted).collect()
    if found.topics:
        raise ValueError(
            f"column 'topic' is null in {found.topics:,} rows; fill it, or give topic=..., which beats it. "
            "Nothing was sent"
        )
    if priorities and sink.priority is not None:
        problem = refusal(sink.priority, sink.levels, found.lowest, found.highest, found.nulls)
        if problem is not None:
            raise ValueError(f"{problem}. Nothing was sent")


def bucketed(df: DataFrame, buckets: int = BUCKETS, bucket_by: Sequence[str] | None = None) -> DataFrame:
    """A DataFrame whose rows are in a fixed number of buckets, for exactly once with the data source and in streams.

        rows = bucketed(df, 64, ["id"])
        rows.write.format("fastprod").mode("append").option("exactly.once", "bucket").option("job.id", "orders-7")...

    A bucket is a Spark partition. A stable hash of the columns `bucket_by` decides, so the same rows are in the same
    bucket on any cluster, whatever its cores, splits or settings. The number is added as a column, which is not
    written; this must be the last step before writing. `write(..., exactly_once="bucket")` does it by itself.
    """
    return _plan.bucketed(df, buckets, bucket_by)


def _run(rows: DataFrame, sink: Sink, shape: Shape | None = None) -> list[Any]:
    """Runs the job, for exactly once after its name is claimed, and returns a report for each Spark partition."""
    remote = _is_remote(rows)
    if sink.job is not None and sink.partitions is None and remote:
        # Spark Connect has no other way to tell how many partitions there will be.
        sink = replace(sink, partitions=len(rows.mapInArrow(number_batches, "number int").collect()))
    if sink.partitions is not None:
        sink = _claim_there(rows.sparkSession, sink) if remote else claim(sink)

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        return report_batches(sink, batches, shape)

    if sink.job is not None and sink.partitions is None:
        return _run_claiming(rows, sink, shape)
    reports = rows.mapInArrow(run, "report string").collect()
    if sink.job is None:
        return reports
    if sink.bucketed and not reports:
        # Spark has seen by itself that there are no rows, and runs no task; buckets must say that they are empty.
        numbers = rows.sparkSession.range(0, sink.partitions, 1, sink.partitions)
        reports = numbers.mapInArrow(lambda batches: report_none(sink, batches), "report string").collect()
    return _checked(reports, sink)


def _checked(reports: list[Any], sink: Sink) -> list[Any]:
    if len(reports) != sink.partitions:
        raise ExportError(
            f"job {sink.job!r} was to have {sink.partitions} partitions, but {len(reports)} were written: rows may be "
            "missing or doubled. Please report this"
        )
    return reports


def _run_claiming(rows: DataFrame, sink: Sink, shape: Shape | None) -> list[Any]:
    """The same where only the query itself knows how many partitions it will have."""
    spark = rows.sparkSession
    pending = replace(sink, claim=PENDING)

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        return report_batches(pending, batches, shape)

    job = rows.mapInArrow(run, "report string")
    # Adaptive execution runs the shuffles for the answer, and collect() uses them again. Spark tells tasks the
    # session's settings only in what it takes for a query, so here we do.
    settings = {name: value for name, value in spark.conf.getAll.items() if name.startswith("spark")}
    with _local_properties(spark, settings):
        partitions = job._jdf.queryExecution().toRdd().getNumPartitions()
    sink = claim(replace(sink, partitions=partitions))
    told = {"job": sink.job, "batch": sink.batch, **learnt(sink)}
    with _local_properties(spark, {CLAIM: json.dumps(told)}):
        return _checked(job.collect(), sink)


def _is_remote(df: DataFrame) -> bool:
    """Whether this is Spark Connect, whose client need not be near the brokers."""
    return type(df).__module__.startswith("pyspark.sql.connect.")


def _claim_there(spark: SparkSession, sink: Sink) -> Sink:
    """`claim` in a task of its own."""

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        return claim_batches(sink, batches)

    (row,) = spark.range(0, 1, 1, 1).mapInArrow(run, "claim string").collect()
    return replace(sink, **json.loads(row.claim))


@contextmanager
def _local_properties(spark: SparkSession, told: Mapping[str, str]) -> Iterator[None]:
    """What this thread's jobs tell their tasks meanwhile."""
    context = spark.sparkContext
    before = {name: context.getLocalProperty(name) for name in told}
    try:
        for name, value in told.items():
            context.setLocalProperty(name, value)
        yield
    finally:
        for name, earlier in before.items():
            context.setLocalProperty(name, earlier)  # type: ignore[arg-type]


@contextmanager
def batches_of(rows: int | None, spark: SparkSession) -> Iterator[None]:
    """Arrow batches end by their rows alone, for as long as this lasts; several threads may do so at a time."""
    if rows is None:
        yield
        return
    key = id(spark)
    with _lock:
        users, before = _sessions.get(key, (0, {name: spark.conf.getAll.get(name) for name in (ROWS, BYTES)}))
        _sessions[key] = (users + 1, before)
        spark.conf.set(BYTES, UNCOUNTED)
        spark.conf.set(ROWS, str(rows))
    try:
        yield
    finally:
        with _lock:
            users = _sessions[key][0] - 1
            if users:
                _sessions[key] = (users, before)
            else:
                del _sessions[key]
                for name, value in before.items():
                    if value is None:
                        spark.conf.unset(name)
                    else:
                        spark.conf.set(name, value)


def partition_writer(
    config: Mapping[str, Any],
    topic: str | None = None,
    *,
    chunk: int = CHUNK,
    exactly_once: str | None = None,
    job_id: str | None = None,
    partitions: int | None = None,
    marker_topic: str | None = None,
    check: bool = True,
    priority: str | None = None,
    max_priority: int | None = None,
) -> Callable[[Iterable[Any]], Iterator[TaskReport]]:
    """A function for `rdd.mapPartitions` that writes the rows of a partition and yields one TaskReport.

        reports = rdd.mapPartitions(partition_writer({"bootstrap.servers": "kafka:9092"}, "orders")).collect()

    A row is bytes or str (the value), a (key, value) tuple, or a dict, Row or named tuple with the fields that `write`
    knows as columns, in any case. `ExportReport.of(reports)` adds the reports up.

    Exactly once is that of `write`, with the same proofs: a task has seen the mark behind the last row of its input, or
    that more rows follow where a function before this one stops early; the number of partitions is noted when Spark
    takes the function to the executors; markers hold the rows' fingerprint. Leave spark.speculation off. Behind a
    shuffle of keys that come out otherwise each time, a lost executor may double and lose rows, and nobody notices:
    Spark does so for DataFrames only. Take a checkpoint of such an RDD first.

    Args:
        config: of the producer, as for fastprod.Producer.
        topic: where to, unless the rows have a field `topic`.
        chunk: rows handed over at once.
        exactly_once, job_id, marker_topic: as for `write`; there are no buckets here.
        partitions: of the RDD, `rdd.getNumPartitions()`. Needed only where pyspark does not show it.
        check: as for `write`; brokers are asked in this call.
        priority, max_priority: as for `write`, with a field of the rows; only tasks look at it, before anything of a
            chunk is sent.
    """
    if chunk < 1:
        raise ValueError(f"chunk is a number of rows from 1 on, not {chunk}")
    if exactly_once == "bucket":
        raise ValueError('exactly_once="bucket" is for DataFrames; RDDs have "task"')
    check_name(priority)
    sink = _plan.sink(
        topic,
        config,
        exactly_once=exactly_once,
        job_id=job_id,
        marker_topic=marker_topic,
        check=check,
        priority=priority and priority.lower(),
        max_priority=max_priority,
    )
    if partitions is not None:
        if sink.job is None:
            raise ValueError(f"partitions={partitions!r} has no effect without exactly_once")
        sink = claim(replace(sink, partitions=partitions))
    return PartitionWriter(sink, chunk)


def register(spark: SparkSession) -> None:
    """Makes `df.write.format("fastprod")` and `writeStream` known to a session.

    Where fastprod is installed from a wheel, Spark finds it by itself.
    """
    from fastprod.spark.source import FastprodDataSource

    spark.dataSource.register(FastprodDataSource)
