"""Executor side: one producer per Python worker, and the task that feeds it.

    parts of a Spark partition: Arrow batches, or chunks of rows
        -> Task.look()      for exactly once: adds the rows to the partition's fingerprint
        -> Task.produced()  keeps the receipt; buffer.memory holds rows back, nobody waits for acknowledgements
        -> Task.finish()    waits for all of them once, at the end; any failure fails the task
        -> TaskReport       one small row for the driver

Spark ends its Python workers without running exit hooks, so a task leaves nothing behind: it has every outcome
before it returns, or its producer is purged and thrown away.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from confluent_kafka import KafkaException

from fastprod import _bulk
from fastprod._core._fingerprint import Fingerprint
from fastprod._positions import end
from fastprod.producer import Producer
from fastprod.spark._failures import counted
from fastprod.spark._input import TaskInput
from fastprod.spark._memory import Held
from fastprod.spark._once import Once, claim, is_fenced
from fastprod.spark._priority import LevelProducer, placed
from fastprod.spark._sink import BUCKET, ExportError, Sink
from fastprod.spark.report import PartitionReport, TaskReport, Topics, merge_topics

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import TaskContext

    from fastprod._core._runtime import Receipt
    from fastprod.spark._shape import Shape

__all__ = ["NO_SPECULATION", "ExportError", "Sink", "Task", "in_task", "learnt", "report_batches", "write_batches"]

LOOK_S = 0.5  # how often a task looks for failures while it waits for acknowledgements
RECEIPT_ROWS = 2**31  # after which the next receipt begins; it holds twice as many
MOST_OPEN = 64  # receipts that are looked at for failures, before those that have ended are left out
KEPT = 4  # producers that a worker keeps for later tasks
CLAIM = "fastprod.claim"  # local property of a job: what the driver learns only after the tasks' function is made
PENDING = ""  # claim of a sink whose tasks find it there

NO_SPECULATION = "exactly_once does not go with spark.speculation: two attempts at a task would fence each other"

Part = TypeVar("Part")


_producers: dict[tuple[int, str], Producer] = {}  # by process (a fork starts with none) and Sink.key, last used last


def borrow(sink: Sink) -> Producer:
    """This worker's producer for a configuration, new or from an earlier task."""
    pid = os.getpid()
    # A producer that waits for the next task need not complain when brokers close its connections.
    producer = _producers.pop((pid, sink.key), None) or LevelProducer(
        {"log.connection.close": False, **sink.config}, sink.levels
    )
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

    def __init__(
        self, producer: Producer, topic: str | None, report: TaskReport, rows: Fingerprint | None = None
    ) -> None:
        self.producer = producer
        self.topic = topic
        self.report = report
        self.rows = rows
        """For exactly once: the fingerprint of the rows so far."""
        self.writes = True
        """False while rows are only compared with those that are committed."""
        self._before = producer.stats()
        self._receipts: list[Receipt] = []
        self._open: list[Receipt] = []  # those of _receipts that may still fail
        self._current: dict[str | None, Receipt] = {}  # by topic, None = a topic per record

    def look(self, blocks: Iterable[_bulk.Block]) -> bool:
        """Adds rows to the fingerprint, if one is wanted, and says whether to write them."""
        if self.rows is not None:
            for block in blocks:
                self.rows.add(*block[:6])
        return self.writes

    def receipt(self, topic: str | None) -> Receipt | None:
        """That of earlier calls to a topic, for the next."""
        earlier = self._current.get(topic)
        return None if earlier is None or earlier.total >= RECEIPT_ROWS else earlier

    def produced(self, topic: str | None, receipt: Receipt) -> None:
        """Keeps the receipt of a call. Raises ExportError if one of its records has failed so far."""
        if self._current.get(topic) is not receipt:
            self._current[topic] = receipt
            self._receipts.append(receipt)
            self._open.append(receipt)
        if receipt.failed:
            raise self._failure()

    def submit(self, block: _bulk.Block) -> None:
        """Hands records over that are ready."""
        runtime = self.producer._open()
        receipt = runtime.receipt(self.topic, self.receipt(self.topic))
        runtime.submit(receipt, *block)
        self.produced(self.topic, receipt)

    def check(self) -> None:
        """The same for the records of all calls."""
        if any(receipt.failed for receipt in self._open):
            raise self._failure()
        if len(self._open) > MOST_OPEN:  # large rows have a receipt for each batch
            self._open = [receipt for receipt in self._open if not receipt.wait(0) or receipt.failed]

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
        looks = (told.since(self._before.topics.get(name), self.report.seconds) for name, told in after.topics.items())
        self.report.stats = {used.name: used for used in looks if used.cells}
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


def in_task(
    sink: Sink, parts: Iterable[Part], hand_over: Callable[[Task, Part], None], *, may_stop: bool = False
) -> TaskReport:
    """Writes the parts of a Spark partition, inside its task, and waits for the outcome.

    `may_stop`: whoever makes the parts need not have read all of the task's input.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    number, attempt = (context.partitionId(), context.attemptNumber()) if context is not None else (0, 0)
    report = TaskReport(number, attempt, started=time.time())
    if context is not None:
        _spare_collector()
    if sink.job is not None:
        if sink.claim == PENDING:
            sink = _claimed(sink, context)
        if context is not None and context.getLocalProperty("spark.speculation") == "true":
            raise ExportError(NO_SPECULATION)
        # Without a task, parts are what somebody has at hand, and end where they end.
        given = TaskInput.find() if context is not None else None
        if given is not None and context is not None:
            report.task = given.number
            _check_first(context.taskAttemptId(), sink, given.number)
        return _once(Once(sink, report.task), parts, hand_over, report, given, may_stop)
    task: Task | None = None  # an empty partition needs no producer
    try:
        for part in parts:
            task = task or Task(borrow(sink), sink.single, report)
            hand_over(task, part)
            task.check()
        return report if task is None else task.finish()
    except BaseException:
        discard(sink)
        raise


_spared = False


def _spare_collector() -> None:
    """Spark collects garbage after every task. With all that is imported that takes 20 to 40 ms, as long as sending
    100,000 rows: what is there before the worker's first task stays, and need not be looked through each time."""
    global _spared
    if not _spared:
        _spared = True
        gc.freeze()


# The attempt at a task that this worker is at, and what was written in it: job, batch and partition.
_written: tuple[int, set[tuple[str | None, int | None, int]]] = (-1, set())


def _check_first(attempt: int, sink: Sink, number: int) -> None:
    """A second call in the same task would find the marker of the first, and take other rows for a repetition."""
    global _written
    if _written[0] != attempt:
        _written = (attempt, set())
    output = (sink.job, sink.batch, number)
    if output in _written[1]:
        raise ExportError(
            f"partition {number} of job {sink.job!r} is written twice in one task: the function of partition_writer "
            "must be given all rows of a partition in one call. Nothing of the second call was sent"
        )
    _written[1].add(output)


def _claimed(sink: Sink, context: TaskContext | None) -> Sink:
    """The sink with what the driver has learnt after this function was made."""
    known = json.loads((context.getLocalProperty(CLAIM) if context is not None else None) or "{}")
    if (known.pop("job", None), known.pop("batch", None)) != (sink.job, sink.batch):
        raise ExportError(f"Spark did not tell this task the claim of job {sink.job!r}. Nothing of it was sent")
    return replace(sink, **known)


def _once(
    output: Once,
    parts: Iterable[Part],
    hand_over: Callable[[Task, Part], None],
    report: TaskReport,
    given: TaskInput | None,
    may_stop: bool,
) -> TaskReport:
    """The same in a transaction; or, if an earlier attempt has committed it, a comparison with what that wrote."""
    if output.sink.partitions is not None and output.number >= output.sink.partitions:
        raise ExportError(
            f"there is a Spark partition {output.number}, but job {output.sink.job!r} has {output.sink.partitions}: "
            "the number changed while it was being started. Nothing of this partition was sent"
        )
    producer = output.producer()
    try:
        with output.group() as group:
            marker = output.committed(group)
            named = output.sink.named
            task = Task(producer, output.sink.single, report, None if named else Fingerprint())
            task.writes = marker is None
            if marker is not None and named:
                output.skip(marker, report)
                report.end()
                return report
            if task.writes:
                producer.begin_transaction()
            for part in parts:
                hand_over(task, part)
                task.check()
            if given is not None:
                given.check_end(may_stop=may_stop)
            if marker is not None:
                assert task.rows is not None
                output.compare(marker, task.rows, report)
            else:
                task.finish()
                if given is not None:
                    given.check_wanted()
                output.commit(producer, group, task.rows, report)
        report.end()
        return report
    except (ExportError, KafkaException):
        if is_fenced(producer):
            raise ExportError(
                f"another attempt at Spark partition {report.task} of job {output.sink.job!r} has taken over: either "
                "spark.speculation is on, which exactly_once does not go with, or the same job runs twice at the same "
                "time, or this one took longer than transaction.timeout.ms. Readers of committed data will see nothing "
                "of this attempt"
            ) from None
        raise
    finally:
        end(producer)  # which aborts the transaction of a failed attempt


def write_batches(sink: Sink, batches: Iterable[pa.RecordBatch], shape: Shape | None = None) -> TaskReport:
    """Writes a Spark partition that comes as Arrow batches; with a shape, of whatever columns."""
    if shape is not None:
        return _write_shaped(sink, batches, shape)
    send = sender(sink)

    def hand_over(task: Task, batch: pa.RecordBatch) -> None:
        if sink.bucketed:
            batch = without_bucket(batch, task.report.task)
        check_topics(batch, sink.topic)
        if sink.priority is not None:
            batch = placed(batch, sink)
        send(task, batch)

    return in_task(sink, (batch for batch in batches if batch.num_rows), hand_over)


def _write_shaped(sink: Sink, batches: Iterable[pa.RecordBatch], shape: Shape) -> TaskReport:
    from fastprod.spark._reading import slices

    hand = shape.sender(sender(sink))
    before = 0

    def hand_over(task: Task, batch: pa.RecordBatch) -> None:
        nonlocal before
        if sink.bucketed:
            batch = without_bucket(batch, task.report.task)

        for _, part in slices(batch):

            def place(row: int | None, first: int = before, rows: int = part.num_rows) -> str:
                which = f"rows {first:,} to {first + rows - 1:,}" if row is None else f"row {first + row:,}"
                return f"Spark partition {task.report.task}, {which}"

            hand(task, part, place)
            before += part.num_rows

    return in_task(sink, (batch for batch in batches if batch.num_rows), hand_over)


def sender(sink: Sink) -> Callable[[Task, pa.RecordBatch], None]:
    """A function that hands a batch of records over, whose memory is nobody's but the task's to change."""
    held = Held(sink.config)
    topic = sink.single

    def send(task: Task, batch: pa.RecordBatch) -> None:
        blocks = _bulk.blocks_of_batches(_bulk.checked_batches(batch, topic), topic is None)
        if not task.look(blocks):
            return
        if not held.counts(batch):
            receipt = task.producer.produce_arrow(batch, topic, receipt=task.receipt(topic))
            task.produced(topic, receipt)
        else:
            # A reader has made the batch and nobody else has it, but what is watched is foreign memory for Arrow.
            receipt = task.producer.produce_arrow(_bulk.Vouched(held.watched(batch)), topic)
            task.produced(topic, receipt)
            held.add(receipt, batch.nbytes, task.check)

    return send


def report_batches(
    sink: Sink, batches: Iterable[pa.RecordBatch], shape: Shape | None = None
) -> Iterator[pa.RecordBatch]:
    """`write_batches` as mapInArrow wants it: one row with the report."""
    import pyarrow as pa

    yield pa.record_batch({"report": pa.array([write_batches(sink, batches, shape).to_json()])})


def report_none(sink: Sink, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same for a Spark partition whose rows only stand for a bucket without any."""
    for _ in batches:
        pass
    return report_batches(sink, ())


def number_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For mapInArrow: one row with the number of the Spark partition, whose rows it does not read."""
    import pyarrow as pa
    from pyspark import TaskContext

    context = TaskContext.get()
    yield pa.record_batch({"number": pa.array([context.partitionId() if context is not None else 0], pa.int32())})


def claim_batches(sink: Sink, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For mapInArrow: claims the job, and one row with what is then known."""
    import pyarrow as pa

    for _ in batches:
        yield pa.record_batch({"claim": pa.array([json.dumps(learnt(claim(sink)))])})


def learnt(sink: Sink) -> dict[str, Any]:
    """What a sink that is claimed knows more than before."""
    return {"partitions": sink.partitions, "claim": sink.claim, "began": sink.began, "until": sink.until}


def without_bucket(batch: pa.RecordBatch, number: int) -> pa.RecordBatch:
    """Takes the column of bucket numbers off, if all rows are in the right place."""
    import pyarrow.compute as pc

    found = pc.unique(batch.column(BUCKET)).to_pylist()
    if found != [number]:
        raise ExportError(
            f"Spark partition {number} holds rows of the buckets {found[:5]}: every bucket must be the partition "
            "of its number. Make the DataFrame with fastprod.spark.bucketed() and change nothing after it"
        )
    return batch.drop_columns([BUCKET])


def check_topics(batch: pa.RecordBatch, topic: str | None) -> None:
    """Refuses a batch before any of it is sent if a row does not say where to go."""
    if topic is None:
        missing = batch.column("topic").null_count
        if missing:
            raise ExportError(
                f"column 'topic' is null in {missing} of {batch.num_rows} rows; "
                "fill it, or give topic=..., which beats it"
            )
