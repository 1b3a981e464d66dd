"""DataFrames and RDDs into Kafka, from the executors, every record accounted for.

    report = fastprod.spark.write(df, "orders", {"bootstrap.servers": "kafka:9092"})

Each task hands its rows to a fastprod producer of its Python worker and waits for all acknowledgements before it
ends. pyspark is needed: `pip install 'fastprod[spark]'`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastprod.spark import _columns, _plan
from fastprod.spark._check import CheckError
from fastprod.spark._rows import write_rows
from fastprod.spark._worker import ExportError, report_batches
from fastprod.spark.report import ExportReport, PartitionReport, TaskReport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "CheckError",
    "ExportError",
    "ExportReport",
    "PartitionReport",
    "TaskReport",
    "partition_writer",
    "register",
    "write",
]

ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
UNCOUNTED = "2147483647"  # this value of BYTES, and no other, makes Spark 4 stop adding up a batch's bytes at every row
CHUNK = 10_000  # rows of an RDD handed over at once

_lock = threading.Lock()
_sessions: dict[
    int, tuple[int, dict[str, str | None]]
] = {}  # write() calls at work, and what the session had set before


def write(
    df: DataFrame,
    topic: str | None = None,
    config: Mapping[str, Any] | None = None,
    *,
    exactly_once: str | None = None,
    job_id: str | None = None,
    batch_rows: int | None = None,
    check: bool = True,
) -> ExportReport:
    """Writes a DataFrame to Kafka and waits until every record is acknowledged.

    Columns are those of Spark's own Kafka sink: `value` (string or binary, required), `key`, `topic`, `partition`,
    `headers`, and in addition `timestamp`. Others are ignored. `KEY` is `key`, as ever in Spark, unless
    spark.sql.caseSensitive says otherwise. `topic` beats the column of that name. A column `topic`
    that may hold nulls is looked through before anything is sent, which reads it twice; `coalesce(topic, '...')`
    cannot be null and saves that.

    A task fails when a record of it fails, and Spark then retries it as usual: records of the failed attempt that Kafka
    has taken stay there, so a job with retried tasks delivers at least once.

    With exactly_once="task" each Spark partition is one Kafka transaction with a marker in it, named by `job_id`
    and the partition's number. However often a task, or the whole job with the same `job_id`, runs again, readers
    with isolation.level=read_committed see the partition's records once. The guarantee is per partition, not for the
    job as a whole: readers may see some partitions before others. It holds if

    - the DataFrame has the same partitions with the same rows each time,
    - a task takes less than transaction.timeout.ms (15 minutes unless set),
    - the job runs again within the brokers' offsets.retention.minutes (7 days unless set): markers are then forgotten.

    Args:
        df: the rows to write.
        topic: where to, unless the column `topic` says so.
        config: of the producer, as for fastprod.Producer. Passwords in it stay out of Spark's logs and of the report.
        exactly_once: "task" for a transaction per Spark partition; None for at least once.
        job_id: the name of this export for exactly_once; a job that is submitted again keeps it.
        batch_rows: rows per Arrow batch, whatever their bytes; None leaves that to Spark's settings, which end a batch
            at 10,000 rows or 64 MB. 10,000 is about a quarter faster where rows are small, because Spark then does not
            add up their bytes, and 2,000 nearly as fast; but 10,000 rows of 100 kB make a batch of 1 GB, and Spark
            fails where its memory does not hold that. Jobs that other threads start in the same session meanwhile
            get such batches too.
        check: whether the driver first asks the brokers if they answer, have the topic and let this client write to it,
            rather than each task when it starts. It is left out where only executors have a file that the config
            names, and for Spark Connect, whose client need not be near the brokers.

    Raises:
        ValueError, TypeError: a column is missing, of the wrong type or a topic null, or an option is wrong; nothing
            was sent.
        CheckError: brokers do not answer, the topic is missing or this client may not write to it; nothing was sent.
    """
    if batch_rows is not None and not 1 <= batch_rows <= 10_000_000:
        raise ValueError(f"batch_rows is a number of rows from 1 to 10,000,000, or None, not {batch_rows}")
    df = _columns.named(df, topic)
    here = not type(df).__module__.startswith("pyspark.sql.connect.")  # else the driver is elsewhere
    sink = _plan.plan(df.schema, topic, config, exactly_once, job_id, check=check and here)
    if sink.job is not None and str(df.sparkSession.conf.get("spark.speculation", "false")).lower() == "true":
        raise ValueError(
            "exactly_once does not go with spark.speculation: two attempts at a task would fence each other"
        )
    start = time.monotonic()
    if topic is None and df.schema["topic"].nullable:
        missing = df.where("topic IS NULL").count()
        if missing:
            raise ValueError(
                f"column 'topic' is null in {missing:,} rows; fill it, or give topic=..., which beats it. "
                "Nothing was sent"
            )

    def run(batches: Iterable[Any]) -> Iterator[Any]:
        return report_batches(sink, batches)

    with batches_of(batch_rows, df.sparkSession):
        rows = df.select(*_plan.used_columns(df.schema, topic)).mapInArrow(run, "report string").collect()
    return ExportReport.of((TaskReport.from_json(row.report) for row in rows), time.monotonic() - start)


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
    check: bool = True,
) -> Callable[[Iterable[Any]], Iterator[TaskReport]]:
    """A function for `rdd.mapPartitions` that writes the rows of a partition and yields one TaskReport.

        reports = rdd.mapPartitions(partition_writer({"bootstrap.servers": "kafka:9092"}, "orders")).collect()

    A row is bytes or str (the value), a (key, value) tuple, or a dict, Row or named tuple with the fields that `write`
    knows as columns, in any case. `ExportReport.of(reports)` adds the reports up.

    Args:
        config: of the producer, as for fastprod.Producer.
        topic: where to, unless the rows have a field `topic`.
        chunk: rows handed over at once.
        exactly_once, job_id: as for `write`. Leave spark.speculation off.
        check: as for `write`; brokers are asked in this call.
    """
    if chunk < 1:
        raise ValueError(f"chunk is a number of rows from 1 on, not {chunk}")
    sink = _plan.sink(topic, config, exactly_once, job_id, check=check)

    def writer(rows: Iterable[Any]) -> Iterator[TaskReport]:
        return write_rows(sink, rows, chunk)

    return writer


def register(spark: SparkSession) -> None:
    """Makes `df.write.format("fastprod")` and `writeStream` known to a session.

    Where fastprod is installed from a wheel, Spark finds it by itself.
    """
    from fastprod.spark.source import FastprodDataSource

    spark.dataSource.register(FastprodDataSource)
