"""What mock clusters and real ones have in common: above all, looking into them through an ordinary consumer."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

__all__ = ["Cluster"]

TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
UNKNOWN = (KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART)
PAUSE_S = 0.1
NO_LEADER = -1
FETCH = 10_000  # records taken from the consumer at once


class Cluster(ABC):
    """Some brokers that end with the with block."""

    bootstrap_servers: str
    """What clients connect to: host:port,host:port on the loopback, open to every process of this machine."""
    brokers: tuple[int, ...]
    """The ids of the brokers, from 1."""

    @abstractmethod
    def close(self) -> None:
        """End the brokers and every connection to them; a second call does nothing."""

    @abstractmethod
    def _require(self, topic: str, partition: int = 0) -> None:
        """Raise ValueError if there is no such topic or partition."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def leader_of(self, topic: str, partition: int, *, timeout: float = 60.0) -> int | None:
        """The broker that leads a partition, as the metadata tells clients, or None if there is none."""
        self._require(topic, partition)
        with self._reader(timeout) as consumer:
            leader: int = consumer.list_topics(timeout=timeout).topics[topic].partitions[partition].leader
        return None if leader == NO_LEADER else leader

    def watermarks(self, topic: str, *, timeout: float = 60.0) -> dict[int, tuple[int, int]]:
        """Per partition the first offset kept and the next one to be written.

        A mock partition keeps about its last 5 MB, so the first offset rises under load; the second counts
        what was ever written.
        """
        self._require(topic)
        with self._reader(timeout) as consumer:
            return _watermarks(consumer, topic, timeout)

    def records(self, topic: str, *, committed: bool = True, timeout: float = 60.0) -> list[Message]:
        """All records that a topic holds at the moment of the call, by partition and offset.

        Those of aborted or open transactions are left out, unless `committed` is false; mock brokers show them
        always. A mock partition holds about its last 5 MB, see `watermarks`, and does not keep batches of
        more than half of that reliably.
        """
        self._require(topic)
        deadline = time.monotonic() + timeout
        found: list[Message] = []
        with self._reader(timeout, "read_committed" if committed else "read_uncommitted") as consumer:
            ends = {
                partition: high
                for partition, (low, high) in _watermarks(consumer, topic, timeout).items()
                if low < high
            }
            consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in ends])
            while ends:
                messages = consumer.consume(FETCH, max(0.0, min(0.05, deadline - time.monotonic())))
                for message in messages:
                    partition = message.partition()
                    if partition not in ends:
                        continue
                    error, offset = message.error(), message.offset()
                    if error is None and offset is not None:
                        if offset < ends[partition]:
                            found.append(message)
                        finished = offset >= ends[partition] - 1
                    else:
                        # The end may hold no record to see, such as a transaction's marker.
                        finished = error is not None and error.code() == KafkaError._PARTITION_EOF
                    if finished:
                        del ends[partition]
                if not messages and time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"read {len(found)} records of topic {topic!r} in {timeout:g} s but not the end of "
                        f"partitions {sorted(ends)}; is a broker down or slow?"
                    )
        return sorted(found, key=lambda message: (message.partition(), message.offset()))

    def _copies(self, name: str, partitions: int, replication_factor: int | None) -> int:
        """The replication factor of a new topic: 3 unless given, or less in a smaller cluster."""
        count = len(self.brokers)
        copies = min(3, count) if replication_factor is None else replication_factor
        if not TOPIC_NAME.fullmatch(name):
            raise ValueError(f"topic name {name!r} is not 1 to 249 of the characters a-z, A-Z, 0-9, '.', '_' and '-'")
        if partitions < 1:
            raise ValueError(f"topic {name!r} needs at least 1 partition, not {partitions}")
        if not 1 <= copies <= count:
            raise ValueError(f"replication_factor={copies} does not fit a cluster of {count}; give 1 to {count}")
        return copies

    def _known(self, broker: int) -> int:
        if broker not in self.brokers:
            raise ValueError(f"there is no broker {broker!r}; the cluster has 1 to {len(self.brokers)}")
        return broker

    @contextmanager
    def _reader(self, timeout: float, isolation: str = "read_committed") -> Iterator[Consumer]:
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": "fastprod.testing",
                "isolation.level": isolation,
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "enable.metrics.push": False,
                "fetch.wait.max.ms": 10,
                "log_level": 0,
            }
        )
        try:
            yield consumer
        except KafkaException as error:
            raise TimeoutError(
                f"{self!r} gave no answer within {timeout:g} s ({error.args[0].str()}); "
                "is a broker down, a partition without a leader or an error still pushed?"
            ) from error
        finally:
            consumer.close()


def _watermarks(consumer: Consumer, topic: str, timeout: float) -> dict[int, tuple[int, int]]:
    deadline = time.monotonic() + timeout
    partitions = consumer.list_topics(timeout=timeout).topics[topic].partitions
    found: dict[int, tuple[int, int]] = {}
    for partition in sorted(partitions):
        while partition not in found:
            left = max(0.0, deadline - time.monotonic())
            try:
                found[partition] = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=left)
            except KafkaException as error:
                # Says librdkafka of a partition without a leader too, and asks for no other: a broker that
                # comes back leads only some time after it answers.
                if error.args[0].code() not in UNKNOWN or time.monotonic() + PAUSE_S > deadline:
                    raise
                time.sleep(PAUSE_S)
                with suppress(KafkaException):
                    consumer.list_topics(topic, timeout=max(PAUSE_S, deadline - time.monotonic()))
    return found
