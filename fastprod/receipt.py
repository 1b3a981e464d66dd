"""What a Receipt is made of."""

from typing import Any, NamedTuple

from confluent_kafka import KafkaError


class Record(NamedTuple):
    """A record as it was given to a bulk call."""

    topic: str | None
    key: bytes | None
    value: bytes | None
    partition: int | None
    headers: Any
    timestamp: int | None


class FailedRecord(NamedTuple):
    """A record without acknowledgement: its position in the call, the reason, and the record itself."""

    index: int  # type: ignore[assignment]
    error: KafkaError | Exception
    record: Record | None


class Extent(NamedTuple):
    """What a call wrote to one partition; offsets are None where the broker told none (acks=0)."""

    records: int
    first: int | None
    last: int | None
