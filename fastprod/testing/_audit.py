"""Reading a topic back to see what became of records that carry numbers: lost, doubled, out of order, misplaced.

A producer under test writes records numbered from 0 in the order of its calls. An ordinary consumer that sees only
committed data then reads the whole topic, so the verdict does not rest on anything that the producer believes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

__all__ = ["Audit", "audit"]

FETCH = 10_000  # records taken from the consumer at once
SHOWN = 10  # numbers given as examples


@dataclass(frozen=True, slots=True)
class Audit:
    """What a topic holds, against the records 0 to `expected` - 1 that it should hold once each."""

    expected: int
    records: int
    """All that were read."""
    lost: int
    doubled: int
    """Copies beyond the first."""
    reordered: int
    """Records that come after one with a higher number in the same partition, or with the same key."""
    misplaced: int
    """Records in another partition than `partition_of` gives."""
    alien: int
    """Records whose number was not expected."""
    partitions: dict[int, int] = field(default_factory=dict)
    """Records per partition."""
    lost_numbers: tuple[int, ...] = ()
    """The first few."""

    @property
    def clean(self) -> bool:
        """Whether every record is there once, in order and in its place."""
        return not (self.lost or self.doubled or self.reordered or self.misplaced or self.alien)

    def __str__(self) -> str:
        text = (
            f"{self.records:,} of {self.expected:,} records read: {self.lost:,} lost, {self.doubled:,} doubled, "
            f"{self.reordered:,} out of order, {self.misplaced:,} misplaced"
        )
        if self.alien:
            text += f", {self.alien:,} that nobody expected"
        if self.lost:
            text += f"; lost are {', '.join(map(str, self.lost_numbers))}{', ...' if self.lost > SHOWN else ''}"
        return text


def leading_number(message: Message) -> int:
    """The number that a value begins with, up to the first space: b"17 whatever" is record 17."""
    try:
        return int((message.value() or b"").split(b" ", 1)[0])
    except ValueError:
        return -1


def audit(
    cluster: str | Mapping[str, Any],
    topic: str,
    expected: int,
    *,
    number_of: Callable[[Message], int] = leading_number,
    partition_of: Callable[[bytes], int] | None = None,
    order: Literal["partition", "key", "none"] = "partition",
    timeout: float = 120.0,
) -> Audit:
    """Read a topic as a read_committed consumer and count what is wrong with it.

    Args:
        cluster: bootstrap servers, or the configuration of a client.
        topic: the topic to read, from its first offset to what it holds at the time of the call.
        expected: how many records there should be.
        number_of: tells a record's number, from 0 in the order of production.
        partition_of: tells where a key belongs; None checks no placement.
        order: where numbers must rise: in every partition, as one producing thread leaves them; only among records
            of the same key; or nowhere.
        timeout: seconds without any news after which reading is given up.
    """
    config = {"bootstrap.servers": cluster} if isinstance(cluster, str) else dict(cluster)
    consumer = Consumer(
        {
            "group.id": "fastprod.audit",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "enable.metrics.push": False,
            "log_level": 0,
            **config,
        }
    )
    try:
        return _audit(consumer, topic, expected, number_of, partition_of, order, timeout)
    finally:
        consumer.close()


def _audit(
    consumer: Consumer,
    topic: str,
    expected: int,
    number_of: Callable[[Message], int],
    partition_of: Callable[[bytes], int] | None,
    order: str,
    timeout: float,
) -> Audit:
    known = consumer.list_topics(topic, timeout=timeout).topics[topic]
    if known.error is not None:
        raise KafkaException(known.error)
    left = set(known.partitions)
    counts = dict.fromkeys(sorted(left), 0)
    seen = bytearray(expected)
    newest: dict[object, int] = {}  # the highest number so far, per partition or per partition and key
    places: dict[bytes, int] = {}
    records = doubled = reordered = misplaced = alien = 0
    consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in left])
    deadline = time.monotonic() + timeout
    while left:
        messages = consumer.consume(FETCH, 0.1)
        if messages:
            deadline = time.monotonic() + timeout
        elif time.monotonic() > deadline:
            raise TimeoutError(f"no end of partitions {sorted(left)} of topic {topic!r} after {timeout:g} s in silence")
        for message in messages:
            partition = message.partition() or 0  # never None in what a consumer returns
            error = message.error()
            if error is not None:
                if error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                left.discard(partition)
                continue
            records += 1
            counts[partition] += 1
            number, key = number_of(message), message.key()
            if not 0 <= number < expected:
                alien += 1
                continue
            if seen[number]:
                doubled += 1
            seen[number] = 1
            if order != "none":
                line = partition if order == "partition" else (partition, key)
                if number < newest.get(line, -1):
                    reordered += 1
                else:
                    newest[line] = number
            if partition_of is not None and key is not None:
                place = places.get(key)
                if place is None:
                    place = places[key] = partition_of(key)
                misplaced += place != partition
    lost = seen.count(0)
    examples: list[int] = []
    at = seen.find(0)
    while at >= 0 and len(examples) < SHOWN:
        examples.append(at)
        at = seen.find(0, at + 1)
    return Audit(expected, records, lost, doubled, reordered, misplaced, alien, counts, tuple(examples))
