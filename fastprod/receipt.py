"""Receipt: the outcome of bulk calls; and what it is made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import KafkaError

if TYPE_CHECKING:
    from fastprod._core._runtime import Receipt

__all__ = ["Extent", "FailedRecord", "Receipt", "Record"]


def __getattr__(name: str) -> Any:
    if name == "Receipt":  # compiled together with the runtime, which needs what is below
        from fastprod._core._runtime import Receipt

        return Receipt
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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


class _Offsets(NamedTuple):
    records: int
    first: int | None
    last: int | None


class Extent(_Offsets):
    """What a call wrote to one partition: (records, first, last).

    `first` and `last` are the lowest and highest offset that brokers told, None where they told none (acks=0).
    `unknown` says how many of the records have offsets that were not told: a broker that had a batch already, because
    its first answer was lost, may only say so. Then `first` and `last` may not cover everything.
    """

    unknown: int = 0

    def __new__(cls, records: int, first: int | None, last: int | None, unknown: int = 0) -> Extent:
        made = super().__new__(cls, records, first, last)
        made.unknown = unknown
        return made

    def __repr__(self) -> str:
        return f"Extent(records={self.records}, first={self.first}, last={self.last}, unknown={self.unknown})"
