"""Exactly once per Spark partition: a transaction that carries a marker beside the records.

A task writes its partition in one transaction, whose id is made of the job's and the partition's. In the same
transaction it commits an offset for a consumer group that nobody else uses: the marker. Both become visible together
or not at all.
Before it writes, a task asks for the marker; if it is there, an earlier attempt or an earlier run of the job has
committed this partition, and the task is done.

    init_transactions()   fences an older attempt; its transaction is now committed or aborted, no longer open
    marker?               yes: report what it says, write nothing
    begin, records, marker, commit

Kafka's own store of offsets serves as the store of markers, so there is no topic to create and none to clean up.
Markers live as long as offsets of idle groups: `offsets.retention.minutes` of the brokers, 7 days unless changed.

In a stream each batch is such a job. The transaction's id stays the same from batch to batch, so that brokers have no
more of them to keep than there are partitions; the marker names the batch.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from fastprod import _config
from fastprod.producer import Producer
from fastprod.spark.report import TaskReport

__all__ = ["Once", "end", "is_fenced", "with_transactions"]

TRANSACTION_TIMEOUT_MS = 900_000  # the most that brokers allow unless configured otherwise
INTERNAL = {"__consumer_offsets", "__transaction_state", "__share_group_state"}  # Kafka's own: nobody writes there
ANSWER_S = 60.0
CLOSE_S = 5.0  # for a producer to end; brokers that do not answer must not keep a failed task
PASSING = (  # while coordinators are made, move or settle a transaction; librdkafka does not call these retriable
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
)
FENCED = (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)


def with_transactions(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A configuration for transactions of that name."""
    return {"transaction.timeout.ms": TRANSACTION_TIMEOUT_MS, **config, "transactional.id": name}


@dataclass(frozen=True)
class Once:
    """The identity of one Spark partition's output."""

    job: str
    number: int
    batch: int | None = None
    """Of a stream."""

    @property
    def name(self) -> str:
        """Of the transaction, and of the consumer group that holds the marker."""
        return f"fastprod.{self.job}.{self.number}"

    def producer(self, config: Mapping[str, Any]) -> Producer:
        """A producer of this partition alone; older ones are fenced when this returns."""
        producer = Producer(with_transactions(config, self.name))
        try:
            _patiently(lambda: producer.init_transactions(ANSWER_S))
        except BaseException:
            end(producer)
            raise
        return producer

    @contextmanager
    def group(self, config: Mapping[str, Any]) -> Iterator[Consumer]:
        """A consumer of the group that holds the marker; it never joins it.

        Not the admin client: that of librdkafka 2.16 crashes when a coordinator moves while it lists a group's offsets.
        """
        _, native = _config.split(dict(config), plugin="")
        del native["plugin.library.paths"]
        own = {"group.id": self.name, "isolation.level": "read_committed", "enable.auto.commit": False, "log_level": 0}
        consumer = Consumer({**native, **own})
        try:
            yield consumer
        finally:
            consumer.close()

    def committed(self, group: Consumer, topic: str | None, report: TaskReport) -> bool:
        """Whether an earlier attempt has committed this output; if so, completes the report with what it wrote.

        The marker lies at partition 0 of the first topic by name; rows that name their topics may come in any order.
        """
        topics = [topic] if topic is not None else set(group.list_topics(timeout=ANSWER_S).topics) - INTERNAL
        places = [TopicPartition(name, 0) for name in topics]
        found: list[TopicPartition] = []

        def ask() -> None:
            found[:] = group.committed(places, timeout=ANSWER_S)
            for place in found:
                if place.error is not None:  # "not known" is not the same as "no marker"
                    raise KafkaException(place.error)

        _patiently(ask)
        for place in found:
            known = json.loads(place.metadata or "{}") if place.offset >= 0 else {}
            if known and known.get("batch") == self.batch:
                report.records, report.bytes, report.skipped = known["records"], known["bytes"], True
                return True
        return False

    def commit(self, producer: Producer, group: Consumer, report: TaskReport) -> None:
        """Ends the transaction with the marker in it."""
        what = json.dumps({"records": report.records, "bytes": report.bytes, "batch": self.batch})
        marker = TopicPartition(min(report.topics), 0, report.records, metadata=what)
        name = group.consumer_group_metadata()
        _patiently(lambda: producer.send_offsets_to_transaction([marker], name, ANSWER_S))
        _patiently(producer.commit_transaction)


def end(producer: Producer) -> None:
    """Ends a producer with what it still holds, aborting its transaction. Never raises, and does not wait for long."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # confluent-kafka's, about transactions that cannot be aborted
        with suppress(Exception):  # what the task itself has to say counts more
            producer.purge()
        with suppress(Exception):
            producer.close(CLOSE_S)


def is_fenced(producer: Producer) -> bool:
    """Whether a newer producer has taken over the transactional.id."""
    try:
        producer.begin_transaction()  # never begins one in a transaction that has failed: it tells the state
    except KafkaException as problem:
        return problem.args[0].code() in FENCED
    return False


def _patiently(step: Callable[[], object]) -> None:
    """Repeats a step of a transaction for as long as Kafka says that it may be repeated."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            step()
            return
        except KafkaException as problem:
            error = problem.args[0]
            if not (error.retriable() or error.code() in PASSING) or time.monotonic() > deadline:
                raise
            time.sleep(0.2)
