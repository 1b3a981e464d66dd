"""Executor side: one producer per Python worker, and the task that feeds it.

    Arrow batches of a Spark partition
        -> Task.send()      produce_arrow, back-pressured by buffer.memory, never waiting for acknowledgements
        -> Task.finish()    waits for all of them once, at the end; any failure fails the task
        -> TaskReport       one small row for the driver

Spark ends its Python workers without running exit hooks, so a task leaves nothing behind: it has every outcome
before it returns, or its producer is purged and thrown away.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError

from fastprod.producer import Producer
from fastprod.spark._once import Once
from fastprod.spark.report import PartitionReport, TaskReport, Topics, merge_topics

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ExportError", "Sink", "Task", "in_task", "report_batches", "write_batches"]

SHOWN = 5  # errors in a message


class ExportError(RuntimeError):
    """Records of a task were not acknowledged; the text says how many and why."""


@dataclass(frozen=True)
class Sink:
    """Where a job writes to and how: made on the driver, pickled to the executors."""

    config: Mapping[str, Any] = field(repr=False)  # may hold passwords
    topic: str | None
    job: str | None = None
    """Set for exactly once: the name that a resubmitted job keeps."""


_producers: dict[tuple[int, str], Producer] = {}  # by process and configuration; a fork starts with none of its own


def _identity(config: Mapping[str, Any]) -> tuple[int, str]:
    return os.getpid(), repr(sorted((name, str(value)) for name, value in config.items()))


def borrow(config: Mapping[str, Any]) -> Producer:
    """This worker's producer for a configuration, new or from an earlier task."""
    key = _identity(config)
    producer = _producers.get(key)
    if producer is None:
        producer = _producers[key] = Producer(dict(config))
    return producer


def discard(config: Mapping[str, Any]) -> None:
    """Gives up what the producer still holds, so that nothing of a failed task is sent later, and ends it."""
    producer = _producers.pop(_identity(config), None)
    if producer is not None:
        producer.purge()
        producer.close()


class Task:
    """One attempt to write one Spark partition."""

    def __init__(self, producer: Producer, topic: str | None, number: int = 0, attempt: int = 0) -> None:
        self.producer = producer
        self.topic = topic
        self.report = TaskReport(number, attempt)
        self._open: deque[Any] = deque()  # receipts without all outcomes, oldest first
        self._start = time.monotonic()

    def send(self, batch: pa.RecordBatch) -> None:
        """Hands over a batch. Raises ExportError if a record of an earlier one has failed meanwhile."""
        check_topics(batch, self.topic)
        self.took(self.producer.produce_arrow(batch, self.topic), payload_bytes(batch))

    def took(self, receipt: Any, size: int) -> None:
        """Counts what was handed over."""
        self.report.bytes += size
        self._open.append(receipt)
        while self._open and (self._open[0].done or self._open[0].failed):
            self._close(self._open.popleft())

    def finish(self) -> TaskReport:
        """Waits for every outcome."""
        while self._open:
            receipt = self._open.popleft()
            receipt.wait()
            self._close(receipt)
        self.report.seconds = time.monotonic() - self._start
        return self.report

    def _close(self, receipt: Any) -> None:
        if receipt.failed:
            raise self._failure([receipt, *self._open])
        self.report.records += receipt.acknowledged
        topics: Topics = {}
        for (topic, partition), extent in receipt.extents.items():
            topics.setdefault(topic, {})[partition] = PartitionReport(extent.records, extent.first, extent.last)
        merge_topics(self.report.topics, topics)

    def _failure(self, receipts: Iterable[Any]) -> ExportError:
        found = [failure for receipt in receipts if receipt.failed for failure in receipt.errors]
        shown = "; ".join(
            failure.error.str() if isinstance(failure.error, KafkaError) else str(failure.error)
            for failure in found[:SHOWN]
        )
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        return ExportError(
            f"{len(found)} of the records of Spark partition {self.report.task} (attempt {self.report.attempt}) were "
            f"not acknowledged, {self.report.records} were before the first of them; errors: {shown}{more}"
        )


def in_task(sink: Sink, send: Callable[[Task], None]) -> TaskReport:
    """Lets `send` write a Spark partition, inside its task, and waits for the outcome."""
    from pyspark import TaskContext

    context = TaskContext.get()
    number, attempt = (context.partitionId(), context.attemptNumber()) if context is not None else (0, 0)
    if sink.job is not None:
        return _once(sink, sink.job, send, number, attempt)
    task = Task(borrow(sink.config), sink.topic, number, attempt)
    try:
        send(task)
        return task.finish()
    except BaseException:
        discard(sink.config)
        raise


def _once(sink: Sink, job: str, send: Callable[[Task], None], number: int, attempt: int) -> TaskReport:
    """The same in a transaction, unless an earlier attempt has committed it."""
    output = Once(job, number)
    producer = output.producer(sink.config)
    try:
        report = output.committed(sink.config)
        if report is not None:
            return report
        producer.begin_transaction()
        task = Task(producer, sink.topic, number, attempt)
        send(task)
        report = task.finish()
        output.commit(producer, report, sink.config)
        return report
    finally:
        producer.purge()  # what a failed attempt has not sent yet; its transaction ends with the next attempt
        producer.close()


def write_batches(sink: Sink, batches: Iterable[pa.RecordBatch]) -> TaskReport:
    """Writes a Spark partition that comes as Arrow batches."""

    def send(task: Task) -> None:
        for batch in batches:
            if batch.num_rows:
                task.send(batch)

    return in_task(sink, send)


def report_batches(sink: Sink, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """`write_batches` as mapInArrow wants it: one row with the report."""
    import pyarrow as pa

    yield pa.record_batch({"report": pa.array([write_batches(sink, batches).to_json()])})


def check_topics(batch: pa.RecordBatch, topic: str | None) -> None:
    """Refuses a batch before any of it is sent if a row does not say where to go."""
    if topic is None:
        missing = batch.column("topic").null_count
        if missing:
            raise ExportError(
                f"column 'topic' is null in {missing} of {batch.num_rows} rows; "
                "fill it, or give topic=..., which beats it"
            )


def payload_bytes(batch: pa.RecordBatch) -> int:
    import pyarrow.compute as pc

    count: Any = pc  # whose type hints know no column of a type yet unknown
    columns = [batch.column(name) for name in ("key", "value") if name in batch.schema.names]
    return sum(int(count.sum(count.binary_length(column)).as_py() or 0) for column in columns)
