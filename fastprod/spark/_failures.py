"""Why records of a task failed, in words: counted, with the topic and, where it matters, the partition's number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError, KafkaException

if TYPE_CHECKING:
    from fastprod.producer import Producer
    from fastprod.receipt import FailedRecord

__all__ = ["counted"]

SHOWN = 5  # errors in a message
ANSWER_S = 2.0  # for the number of a topic's partitions, which only makes the message better


def counted(failures: Iterable[FailedRecord], producer: Producer) -> tuple[int, str]:
    """How many failures there are, and the most frequent reasons."""

    @cache
    def extent(topic: str) -> str:
        try:
            numbers = producer.list_topics(topic, timeout=ANSWER_S).topics[topic].partitions
        except (KafkaException, KeyError, RuntimeError):
            return ""
        return f"partitions 0 to {max(numbers)}" if numbers else ""

    found: Counter[tuple[str, str | None, int | None]] = Counter()
    for failure in failures:
        error = failure.error.args[0] if isinstance(failure.error, KafkaException) else failure.error
        record = failure.record
        if not isinstance(error, KafkaError):
            found[str(error), None, None] += 1
        elif record is None or record.topic is None or f"topic {record.topic!r}" in error.str():
            found[error.str(), None, None] += 1
        else:
            lost = error.code() == KafkaError._UNKNOWN_PARTITION
            place = -1 if record.partition is None else record.partition
            found[error.str(), record.topic, place if lost else None] += 1
    shown = []
    for (words, topic, number), count in found.most_common(SHOWN):
        known = extent(topic) if topic is not None and number is not None else ""
        if known and number is not None and number >= 0:
            words = f"topic {topic!r} has {known}, not {number}"
        elif topic is not None:
            words += f": topic {topic!r}"
            words += f", which has {known}" if known else f", partition {number}" if number is not None else ""
        shown.append(f"{words} ({count:,} times)" if count > 1 else words)
    if len(found) > SHOWN:
        shown.append(f"{len(found) - SHOWN} other errors")
    return found.total(), "; ".join(shown) or "none told"
