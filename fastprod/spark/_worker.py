"""Executor side: one producer per Python worker, and the task that feeds it.

    parts of a Spark partition: Arrow batches, or chunks of rows
        -> Task.produced()  keeps the receipt; buffer.memory holds rows back, nobody waits for acknowledgements
        -> Task.finish()    waits for all of them once, at the end; any failure fails the task
        -> TaskReport       one small row for the driver

Spark ends its Python workers without running exit hooks, so a task leaves nothing behind: it has every outcome
before it returns, or its producer is purged and thrown away.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import KafkaException

from fastprod.producer import Producer
from fastprod.spark._failures import counted
from fastprod.spark._memory import Held
from fastprod.spark._once import Once, end, is_fenced
from fastprod.spark.report import PartitionReport, TaskReport, Topics, merge_topics

if TYPE_CHECKING:
    import pyarrow as pa

    from fastprod._core._runtime import Receipt

__all__ = ["ExportError", "Sink", "Task", "in_task", "report_batches", "write_batches"]

LOOK_S = 0.5  # how often a task looks for failures while it waits for acknowledgements
RECEIPT_ROWS = 2**31  # after which the next receipt begins; it holds twice as many
KEPT = 4  # producers that a worker keeps for later tasks

Part = TypeVar("Part")


class ExportError(RuntimeError):
    """Records of a task were not acknowledged; the text says how many and why."""


@dataclass(frozen=True)
class Sink:
    """Where a job writes to and how: made on the driver, pickled to the executors."""

    config: Mapping[str, Any] = field(repr=False)  # may hold passwords
    topic: str | None
    job: str | None = None
    """Set for exactly once: the name that a resubmitted job keeps."""
    batch: int | None = None
    """For exactly once in a stream: the number of the batch."""
    key: str = field(default="", repr=False)
    """The same for configurations whose producers may stand in for each other."""

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", _identity(self.config))


def _identity(config: Mapping[str, Any]) -> str:
    """Equal for equal settings. Objects among them are copied to each task, so only their origin can be compared."""
    if all(isinstance(value, (str, int, float, bool, type(None))) for value in config.values()):
        return hashlib.sha256(repr(sorted(config.items())).encode()).hexdigest()
    return uuid.uuid4().hex


_producers: dict[tuple[int, str], Producer] = {}  # by process (a fork starts with none) and Sink.key, last used last


def borrow(sink: Sink) -> Producer:
    """This worker's producer for a configuration, new or from an earlier task."""
    pid = os.getpid()
    # A producer that waits for the next task need not complain when brokers close its connections.
    producer = _producers.pop((pid, sink.key), None) or Producer({"log.connection.close": False, **sink.config})
    _producers[pid, sink.key] = producer
    mine = [key for key in _producers if key[0] == pid]
    for key in mine[:-KEPT]:
        end(_producers.pop(key))
    return producer


def discard(sink: Sink) -> None:
    """Gives up what the producer still holds, so that nothing of a failed task is sent later, and ends it."""
    producer = _producers.pop((os.getpid(), sink.key), None)
    if producer is not None:
        end(producer)


class Task:
    """One attempt to write one Spark partition."""

    def __init__(self, producer: Producer, topic: str | None, report: TaskReport) -> None:
        self.producer = producer
        self.topic = topic
        self.report = report
        self._before = producer.stats()
        self._receipts: list[Receipt] = []
        self._current: dict[str | None, Receipt] = {}  # by topic, None = a topic per record

    def receipt(self, topic: str | None) -> Receipt | None:
        """That of earlier calls to a topic, for the next."""
        earlier = self._current.get(topic)
        return None if earlier is None or earlier.total >= RECEIPT_ROWS else earlier

    def produced(self, topic: str | None, receipt: Receipt) -> None:
        """Keeps the receipt of a call. Raises ExportError if one of its records has failed so far."""
        if self._current.get(topic) is not receipt:
            self._current[topic] = receipt
            self._receipts.append(receipt)
        if receipt.failed:
            raise self._failure()

    def check(self) -> None:
        """The same for the records of all calls."""
        if any(receipt.failed for receipt in self._receipts):
            raise self._failure()

    def finish(self) -> TaskReport:
        """Waits for every outcome, or the first failure."""
        for receipt in self._receipts:
            while not receipt.wait(LOOK_S):
                self.check()
            self.check()
            self.report.records += receipt.acknowledged
            self.report.bytes += receipt.bytes
            topics: Topics = {}
            for (topic, partition), extent in receipt.extents.items():
                topics.setdefault(topic, {})[partition] = PartitionReport(extent.records, extent.first, extent.last)
            merge_topics(self.report.topics, topics)
        self.report.end()
        after = self.producer.stats()
        self.report.retries = after.retries - self._before.retries
        for name, told in after.topics.items():
            used = told.since(self._before.topics.get(name), self.report.seconds)
            if used.cells:
                self.report.stats[name] = used
        return self.report

    def _failure(self) -> ExportError:
        failures = (failure for receipt in self._receipts if receipt.failed for failure in receipt.errors)
        count, reasons = counted(failures, self.producer)
        return ExportError(
            f"{count:,} of the records of Spark partition {self.report.task} (attempt {self.report.attempt}) "
            f"failed; of {sum(receipt.total for receipt in self._receipts):,} handed over so far, "
            f"{sum(receipt.acknowledged for receipt in self._receipts):,} are known to be acknowledged. "
            f"Errors: {reasons}"
        )


def in_task(sink: Sink, parts: Iterable[Part], hand_over: Callable[[Task, Part], None]) -> TaskReport:
    """Writes the parts of a Spark partition, inside its task, and waits for the outcome."""
    from pyspark import TaskContext

    context = TaskContext.get()
    number, attempt = (context.partitionId(), context.attemptNumber()) if context is not None else (0, 0)
    report = TaskReport(number, attempt, started=time.time())
    source = iter(parts)
    for first in source:  # an empty partition needs no producer
        parts = _again([first], source)
        del first
        if sink.job is not None:
            return _once(sink, sink.job, parts, hand_over, report)
        try:
            return _write(borrow(sink), sink, parts, hand_over, report)
        except BaseException:
            discard(sink)
            raise
    return report


def _again(taken: list[Part], others: Iterable[Part]) -> Iterator[Part]:
    """Parts of which some were taken; chain() would keep those until the end of the task, and a part may be large."""
    while taken:
        yield taken.pop()
    yield from others


def _write(
    producer: Producer,
    sink: Sink,
    parts: Iterable[Part],
    hand_over: Callable[[Task, Part], None],
    report: TaskReport,
) -> TaskReport:
    task = Task(producer, sink.topic, report)
    for part in parts:
        hand_over(task, part)
        task.check()
    return task.finish()


def _once(
    sink: Sink, job: str, parts: Iterable[Part], hand_over: Callable[[Task, Part], None], report: TaskReport
) -> TaskReport:
    """The same in a transaction, unless an earlier attempt has committed it."""
    output = Once(job, report.task, sink.batch)
    producer = output.producer(sink.config)
    try:
        with output.group(sink.config) as group:
            if not output.committed(group, sink.topic, report):
                producer.begin_transaction()
                _write(producer, sink, parts, hand_over, report)
                output.commit(producer, group, report)
        report.end()
        return report
    except (ExportError, KafkaException):
        if is_fenced(producer):
            raise ExportError(
                f"another attempt at Spark partition {report.task} of job {job!r} has taken over: either "
                "spark.speculation is on, which exactly_once does not go with, or the same job runs twice at the same "
                "time, or this one took longer than transaction.timeout.ms. Readers of committed data will see nothing "
                "of this attempt"
            ) from None
        raise
    finally:
        end(producer)  # which aborts the transaction of a failed attempt


def write_batches(sink: Sink, batches: Iterable[pa.RecordBatch]) -> TaskReport:
    """Writes a Spark partition that comes as Arrow batches."""

    held = Held(sink.config)

    def hand_over(task: Task, batch: pa.RecordBatch) -> None:
        check_topics(batch, sink.topic)
        if not held.counts(batch):
            receipt = task.producer.produce_arrow(batch, sink.topic, receipt=task.receipt(sink.topic))
            task.produced(sink.topic, receipt)
        else:
            receipt = task.producer.produce_arrow(held.watched(batch), sink.topic)
            task.produced(sink.topic, receipt)
            held.add(receipt, batch.nbytes, task.check)

    return in_task(sink, (batch for batch in batches if batch.num_rows), hand_over)


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
