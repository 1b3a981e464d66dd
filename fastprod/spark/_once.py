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
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from fastprod import _config
from fastprod.producer import Producer
from fastprod.spark.report import TaskReport

__all__ = ["Once"]

TRANSACTION_TIMEOUT_MS = 900_000  # the most that brokers allow unless configured otherwise
ANSWER_S = 60.0


@dataclass(frozen=True)
class Once:
    """The identity of one Spark partition's output."""

    job: str
    number: int

    @property
    def name(self) -> str:
        """Of the transaction, and of the consumer group that holds the marker."""
        return f"fastprod.{self.job}.{self.number}"

    def producer(self, config: Mapping[str, Any]) -> Producer:
        """A producer of this partition alone; older ones are fenced when this returns."""
        defaults = {"transaction.timeout.ms": TRANSACTION_TIMEOUT_MS}
        producer = Producer({**defaults, **config, "transactional.id": self.name})
        try:
            _patiently(producer.init_transactions)
        except BaseException:
            producer.close()
            raise
        return producer

    def committed(self, config: Mapping[str, Any]) -> TaskReport | None:
        """What an earlier attempt has committed, if one has."""
        _, native = _config.split(dict(config), plugin="")
        del native["plugin.library.paths"]
        admin = AdminClient(native)
        wanted = [ConsumerGroupTopicPartitions(self.name)]
        answer = admin.list_consumer_group_offsets(wanted, require_stable=True, request_timeout=ANSWER_S)
        for found in answer[self.name].result(ANSWER_S).topic_partitions:
            if found.offset >= 0:
                known = json.loads(found.metadata)
                return TaskReport(self.number, records=known["records"], bytes=known["bytes"], skipped=True)
        return None

    def commit(self, producer: Producer, report: TaskReport, config: Mapping[str, Any]) -> None:
        """Ends the transaction with the marker in it."""
        topic = min(report.topics, default=None)
        if topic is None:
            return  # nothing was written: nothing can be doubled
        what = json.dumps({"records": report.records, "bytes": report.bytes})
        marker = TopicPartition(topic, min(report.topics[topic]), report.records, metadata=what)
        group = Consumer({"bootstrap.servers": config["bootstrap.servers"], "group.id": self.name, "log_level": 0})
        try:
            _patiently(lambda: producer.send_offsets_to_transaction([marker], group.consumer_group_metadata()))
        finally:
            group.close()
        _patiently(producer.commit_transaction)


def _patiently(step: Callable[[], object]) -> None:
    """Repeats a step of a transaction for as long as Kafka says that it may be repeated."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            step()
            return
        except KafkaException as problem:
            if not problem.args[0].retriable() or time.monotonic() > deadline:
                raise
            time.sleep(0.2)
