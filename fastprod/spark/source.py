"""The data source `fastprod`: df.write.format("fastprod") and df.writeStream.format("fastprod").

    (df.write.format("fastprod").mode("append")
       .option("kafka.bootstrap.servers", "kafka:9092").option("topic", "orders").save())

`.mode("append")` is needed. Spark refuses its own default, "errorifexists", before it asks us, and recommends "append"
or "overwrite"; the latter is refused here.

Options are those of Spark's own Kafka sink: `kafka.*` go to the producer without the prefix, `topic` beats the column.
With `value.format` (json or avro) rows have whatever columns they have, and are encoded by the Python workers, as with
`fastprod.spark.write(..., value=...)`:

    value.format     json, or avro with value.subject, value.schema and registry.* (options of SchemaRegistryClient)
    value.columns    those to encode, with commas between them; all unless given
    key.columns      one: its bytes or text are the key; several, or with key.format, are encoded as values are
    headers.columns, timestamp.column

Ours are also `priority`, `max.priority`, `exactly.once`, `job.id`, `marker.topic` and `check` ("true" or "false") as in
`fastprod.spark.write`, and `report`, a file on the driver for the report as JSON or HTML; a stream writes it anew with
each batch. A stream is checked before its first batch, where its checkpoint is in a folder that the driver can look
into. Spark hands options over in lower case; every name here is lower case anyway.

Exactly once has the proofs that `write` has, but for one: writers are made in Python processes of the driver that are
not told how many partitions the job will have.

    exactly.once=bucket  rows of `fastprod.spark.bucketed()` know: another number of buckets under the same name, or a
                         row in the wrong partition, is refused before anything is sent
    exactly.once=task    is told after the last task. A run that is divided in another way than an earlier one fails,
                         at the first partition whose rows are others than those committed, or at the end; but other
                         partitions may have become visible by then

Nor do these processes know the rows: a priority that is out of range is found by the task that has it, before anything
of its Arrow batch is sent, and fails the job. What was sent before stays; with exactly.once that of other tasks.

Nor do they know the session: with spark.sql.caseSensitive a column `KEY` counts as `key` all the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, WriterCommitMessage
from pyspark.sql.types import StructType

from fastprod.encoding import Avro, Json
from fastprod.spark._briefly import briefly, is_first_batch
from fastprod.spark._columns import arrow_schema, lowered, schema_of
from fastprod.spark._export import chosen
from fastprod.spark._once import check_all, claim
from fastprod.spark._plan import plan, used_columns
from fastprod.spark._shape import Shape
from fastprod.spark._sink import BUCKET, Sink
from fastprod.spark._worker import write_batches
from fastprod.spark.report import ExportReport, TaskReport

try:
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter
except ImportError as missing:
    raise ImportError(
        "the data source needs pyspark 4.1 or newer, whose writers take Arrow batches; fastprod.spark.write() works "
        "with pyspark 4.0 too"
    ) from missing

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["FastprodDataSource"]

log = logging.getLogger("fastprod.spark")
PREFIX = "kafka."
REGISTRY = "registry."
OWN = ("topic", "priority", "max.priority", "exactly.once", "job.id", "marker.topic", "check", "report")
ENCODING = (
    *("value.format", "value.columns", "value.subject", "value.schema"),
    *("key.format", "key.columns", "key.subject", "key.schema"),
    *("headers.columns", "timestamp.column"),
)
SPARKS = ("checkpointlocation", "path", "queryname")  # that Spark passes on to every sink


class FastprodDataSource(DataSource):
    """Writes to Kafka through fastprod; does not read."""

    @classmethod
    def name(cls) -> str:
        return "fastprod"

    @briefly
    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        if overwrite:
            raise ValueError(
                'Kafka topics are only appended to: write .mode("append").save(), whatever Spark recommends; records '
                "that are in the topic go by its retention or by deleting it"
            )
        sink, columns, report, shape = _parse(self.options, schema)
        return BatchWriter(claim(sink) if sink.job is not None else sink, columns, report, shape)

    @briefly
    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        if overwrite:
            raise ValueError('Kafka topics are only appended to: use .outputMode("append"), not "complete"')
        return StreamWriter(*_parse(self.options, schema, stream=True))


@dataclass
class Message(WriterCommitMessage):
    """A task's report on its way to the driver."""

    report: str
    job: str | None = None
    """For exactly once: the name under which it was written, which in a stream only its tasks know."""


class _Writer:
    """What writing a batch and writing a stream have in common."""

    def __init__(self, sink: Sink, columns: list[str], report: str | None, shape: Shape | None = None) -> None:
        self.sink = sink
        self.shape = shape
        self.columns = columns
        self.report = report
        self.start = time.time()

    def _write(self, sink: Sink, batches: Iterable[pa.RecordBatch]) -> Message:
        pick = lowered if self.shape is None else _selected
        report = write_batches(sink, (pick(batch, self.columns) for batch in batches), self.shape)
        return Message(report.to_json(), sink.job)

    def _check(self, messages: Sequence[Any], batch: int | None) -> None:
        """For exactly once, when all tasks have ended."""
        for job in {message.job for message in messages if message is not None and message.job is not None}:
            check_all(replace(self.sink, job=job, batch=batch), len(messages))

    def _tell(self, messages: Sequence[Any], what: str, seconds: float | None) -> None:
        tasks = [TaskReport.from_json(message.report) for message in messages if message is not None]
        report = ExportReport.of(tasks, seconds)
        log.warning("%s: %s", what, report.summary())  # nobody sees less than a warning unless logging is set up
        if self.report is not None:
            try:
                report.save(self.report)
            except OSError as problem:  # the records are written: too late to fail
                log.error("fastprod: cannot save the report as %s: %s", self.report, problem.strerror or problem)


class BatchWriter(_Writer, DataSourceArrowWriter):
    """A writer for df.write."""

    def write(self, iterator: Iterator[Any]) -> Message:
        return self._write(self.sink, iterator)

    def commit(self, messages: Sequence[Any]) -> None:
        self._check(messages, None)
        self._tell(messages, "fastprod has written", time.time() - self.start)

    def abort(self, messages: Sequence[Any]) -> None:
        done = [TaskReport.from_json(message.report).records for message in messages if message is not None]
        log.error("fastprod: the job failed; tasks that succeeded before have written %d records", sum(done))


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """A writer for df.writeStream. A batch that Spark repeats after a restart is written again, unless exactly.once."""

    def write(self, iterator: Iterator[Any]) -> Message:
        sink = self.sink
        if sink.job is not None:
            # A query keeps its id, and the numbers of its batches, as long as it keeps its checkpoint.
            query, batch = _local("sql.streaming.queryId"), _local("streaming.sql.batchId")
            sink = replace(sink, job=f"{sink.job}.{query}", batch=int(batch))
            sink = claim(sink)
        return self._write(sink, iterator)

    def commit(self, messages: Sequence[Any], batchId: int) -> None:
        self._check(messages, batchId)
        self._tell(messages, f"fastprod has written batch {batchId}", None)

    def abort(self, messages: Sequence[Any], batchId: int) -> None:
        log.error("fastprod: batch %d failed and will be written again when the query is restarted", batchId)


def _selected(batch: pa.RecordBatch, columns: list[str]) -> pa.RecordBatch:
    return batch.select(columns)


def _local(name: str) -> str:
    """A property that Spark sets for the tasks of a query."""
    context = TaskContext.get()
    found = context.getLocalProperty(name) if context is not None else None
    if not found:
        raise RuntimeError(f"Spark does not tell {name}, without which exactly.once cannot work in a stream")
    return found


def _parse(
    options: MutableMapping[str, str], schema: StructType, *, stream: bool = False
) -> tuple[Sink, list[str], str | None, Shape | None]:
    given = {name.lower(): value for name, value in options.items()}
    config = {name.removeprefix(PREFIX): value for name, value in given.items() if name.startswith(PREFIX)}
    known = (*OWN, *ENCODING, *SPARKS)
    unknown = [name for name in given if not name.startswith((PREFIX, REGISTRY)) and name not in known]
    if unknown:
        raise ValueError(
            f"unknown options {', '.join(map(repr, unknown))}: there are {', '.join((*OWN, *ENCODING))}, kafka.* for "
            "the producer and registry.* for a schema registry"
        )
    if "bootstrap.servers" not in config and "metadata.broker.list" not in config:
        raise ValueError('option "kafka.bootstrap.servers" is missing: .option("kafka.bootstrap.servers", "host:9092")')
    topic = given.get("topic")
    report = given.get("report")
    if report is not None and not Path(report).absolute().parent.is_dir():
        raise ValueError(f'option "report" is {report!r}, but there is no such folder on the driver')
    check = given.get("check", "true").lower()
    if check not in ("true", "false"):
        raise ValueError(f'option "check" is "true" or "false", not {check!r}')
    priority, levels = given.get("priority"), given.get("max.priority")
    priority = priority and priority.lower()
    shape = _shape(given)
    columns: list[str] = []
    names: dict[str, str] = {}
    if shape is not None:
        if topic is None or priority is not None:
            raise ValueError('option "value.format" needs a "topic", and does not go with "priority"')
        arrow = arrow_schema(StructType([part for part in schema if part.name != BUCKET]))
        columns = shape.needed(arrow)
        shape = shape.resolved(chosen(arrow, columns))
    else:
        schema, names = schema_of(schema, topic, priority)
    sink = plan(
        schema,
        topic,
        config,
        exactly_once=given.get("exactly.once"),
        job_id=given.get("job.id"),
        marker_topic=given.get("marker.topic"),
        stream=stream,
        check=check == "true" and (not stream or is_first_batch(given.get("checkpointlocation"))),
        priority=priority,
        max_priority=int(levels) if levels is not None and levels.strip().isdecimal() else levels,
        shaped=shape is not None,
    )
    if shape is None:
        columns = [names[name] for name in used_columns(schema, topic, priority)]
    return sink, [*columns, BUCKET] if sink.bucketed else columns, report, shape


def _shape(given: Mapping[str, str]) -> Shape | None:
    """What the options say about encoding; None where they say nothing."""
    about = [name for name in given if name in ENCODING or name.startswith(REGISTRY)]
    if "value.format" not in given:
        if about:
            raise ValueError(f'option "{about[0]}" has no effect without "value.format", json or avro')
        return None
    registry = {name.removeprefix(REGISTRY): value for name, value in given.items() if name.startswith(REGISTRY)}

    def names(option: str) -> list[str] | None:
        return [name.strip() for name in given[option].split(",") if name.strip()] if option in given else None

    def encoder(part: str) -> Any:
        form = given.get(f"{part}.format", "json").lower()
        columns = names(f"{part}.columns")
        if form == "json":
            return Json(columns=columns)
        if form != "avro":
            raise ValueError(f'option "{part}.format" is "json" or "avro", not {form!r}')
        subject, schema = given.get(f"{part}.subject"), given.get(f"{part}.schema")
        if registry and subject is None:
            subject = f"{given.get('topic')}-{part}"
        wire = "confluent" if registry else "bare"
        return Avro(schema, subject, registry or None, wire=wire, columns=columns)

    keys = names("key.columns")
    one = keys[0] if keys else None
    key = encoder("key") if "key.format" in given or len(keys or ()) > 1 else one
    headers = names("headers.columns")
    return Shape.of(encoder("value"), key, headers, given.get("timestamp.column"), None)
