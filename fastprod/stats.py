"""What producers have done and what they hold, partition by partition; and how the figures of many add up.

    stats = producer.stats()
    stats.topics["orders"].partitions[3].latency.percentile(99)    # seconds
    TopicStats.merge(one.topics["orders"], another.topics["orders"]).publishers

Only partitions that a producer has used are there: one that uses three of a hundred reports three. So figures of
several producers are joined by the producer's name and the partition's number, never by position (Pulsar's PIP-79
tells how statistics went wrong that way). Counts and rates add up; percentiles are read from merged sketches, since
those of the parts cannot be averaged.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from ddsketch import DDSketch

if TYPE_CHECKING:
    from fastprod._core._runtime import Runtime

__all__ = ["BrokerStats", "Latency", "PartitionStats", "ProducerStats", "TopicStats"]

ACCURACY = 0.02  # of the sketch; the buckets it is filled from add 3 per cent
PERCENTILES = (50, 95, 99, 99.9)


class Latency:
    """Durations in seconds, as a sketch that can be merged: percentiles are true to about 5 per cent."""

    __slots__ = ("_buckets", "sum")

    def __init__(self, buckets: dict[float, int] | None = None, sum: float = 0.0) -> None:
        self._buckets = {} if buckets is None else buckets  # middle in seconds -> how often; nobody changes it
        self.sum = sum

    @property
    def count(self) -> int:
        """How many were measured."""
        return sum(self._buckets.values())

    @property
    def mean(self) -> float:
        """0 when none was measured."""
        return self.sum / self.count if self._buckets else 0.0

    @property
    def max(self) -> float:
        """The longest, as exact as a percentile; 0 when none was measured."""
        return max(self._buckets, default=0.0)

    def percentile(self, percent: float) -> float:
        """The duration that so many per cent stay within; 0 when none was measured."""
        if not 0 <= percent <= 100:
            raise ValueError(f"percent must be from 0 to 100, not {percent}")
        return float(self.sketch().get_quantile_value(percent / 100) or 0.0)

    def sketch(self) -> DDSketch:
        """As a DDSketch of its own, to merge with others outside of fastprod."""
        made = DDSketch(ACCURACY)
        for middle, times in self._buckets.items():
            made.add(middle, times)
        return made

    def __add__(self, other: Latency) -> Latency:
        if not self._buckets:
            return other
        found = dict(self._buckets)
        for middle, times in other._buckets.items():
            found[middle] = found.get(middle, 0) + times
        return Latency(found, self.sum + other.sum)

    def __sub__(self, earlier: Latency) -> Latency:
        left = {middle: times - earlier._buckets.get(middle, 0) for middle, times in self._buckets.items()}
        return Latency({middle: times for middle, times in left.items() if times > 0}, max(0.0, self.sum - earlier.sum))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Latency) and self._buckets == other._buckets

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self, brief: bool = False) -> dict[str, Any]:
        """The usual figures in milliseconds, unless `brief`, and the buckets to make it again."""
        exact = {"sum": self.sum, "buckets": sorted(self._buckets.items())}
        if brief:
            return exact
        return {
            "count": self.count,
            "mean_ms": 1e3 * self.mean,
            "max_ms": 1e3 * self.max,
            **{f"p{percent:g}_ms": 1e3 * self.percentile(percent) for percent in PERCENTILES},
            **exact,
        }

    @classmethod
    def from_dict(cls, known: Mapping[str, Any]) -> Self:
        return cls({float(middle): int(times) for middle, times in known["buckets"]}, known["sum"])

    def __repr__(self) -> str:
        return f"<Latency of {self.count}: mean {1e3 * self.mean:.1f} ms, p99 {1e3 * self.percentile(99):.1f} ms>"


@dataclass(slots=True)
class PartitionStats:
    """One partition as one producer sees it; or the sum over producers or partitions."""

    records: int = 0
    """Acknowledged."""
    bytes: int = 0
    """Of their keys and values."""
    errors: int = 0
    """Records that failed."""
    retries: int = 0
    """Records that librdkafka has sent again; known with its next statistics, every `statistics.interval.ms`."""
    queue_records: int = 0
    """Accumulated or on their way, not yet acknowledged."""
    queue_bytes: int = 0
    weight: float = 0.0
    """The share of key-less records that the load table gives it now. Over several producers: the mean."""
    records_per_s: float = 0.0
    """Since the partition was first used, or over the time that `since` looks at."""
    bytes_per_s: float = 0.0
    latency: Latency = field(default_factory=Latency)
    """From handing a record in to its acknowledgement, as for the oldest and the last of those sent together."""

    def __add__(self, other: PartitionStats) -> PartitionStats:
        return PartitionStats(*(getattr(self, name) + getattr(other, name) for name in _FIGURES))

    def since(self, earlier: PartitionStats, seconds: float) -> PartitionStats:
        """What has happened between two looks at the same partition."""
        records, size = self.records - earlier.records, self.bytes - earlier.bytes
        return PartitionStats(
            records,
            size,
            self.errors - earlier.errors,
            self.retries - earlier.retries,
            self.queue_records,
            self.queue_bytes,
            self.weight,
            records / seconds if seconds > 0 else 0.0,
            size / seconds if seconds > 0 else 0.0,
            self.latency - earlier.latency,
        )

    def to_dict(self, brief: bool = False) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _FIGURES[:-1]} | {"latency": self.latency.to_dict(brief)}

    @classmethod
    def from_dict(cls, known: Mapping[str, Any]) -> Self:
        return cls(**{**known, "latency": Latency.from_dict(known["latency"])})


_FIGURES = tuple(PartitionStats.__dataclass_fields__)


def _sum(parts: Iterable[PartitionStats]) -> PartitionStats:
    total = PartitionStats()
    for part in parts:
        total += part
    return total


class _Totals:
    """The sums over partitions as attributes, for everything that has a `total`."""

    __slots__ = ()
    total: PartitionStats

    @property
    def records(self) -> int:
        """Acknowledged."""
        return self.total.records

    @property
    def bytes(self) -> int:
        """Of acknowledged keys and values."""
        return self.total.bytes

    @property
    def errors(self) -> int:
        """Records that failed."""
        return self.total.errors

    @property
    def retries(self) -> int:
        """Records that were sent again."""
        return self.total.retries

    @property
    def queue_records(self) -> int:
        """Records not yet acknowledged."""
        return self.total.queue_records

    @property
    def queue_bytes(self) -> int:
        """Their bytes."""
        return self.total.queue_bytes

    @property
    def records_per_s(self) -> float:
        """The sum of the partitions' rates."""
        return self.total.records_per_s

    @property
    def bytes_per_s(self) -> float:
        """The sum of the partitions' rates."""
        return self.total.bytes_per_s

    @property
    def latency(self) -> Latency:
        """Of all partitions together."""
        return self.total.latency


@dataclass(frozen=True)
class TopicStats(_Totals):
    """A topic as one producer sees it, or several: `merge` makes the latter of the former."""

    name: str
    cells: Mapping[tuple[str, int], PartitionStats] = field(default_factory=dict)
    """By the producer's name and the partition's number; only what was used."""
    waiting: int = 0
    """Records whose partition is not decided: metadata is missing, or librdkafka's partitioner has them."""
    lost: int = 0
    """Records that failed before their partition was decided: errors of the topic, of no partition."""

    @property
    def partitions(self) -> dict[int, PartitionStats]:
        """By number, over all producers: only partitions that were used."""
        found = {number: _sum(parts) for number, parts in self._by(lambda cell: cell[1]).items()}
        users = {number: len(parts) for number, parts in self._by(lambda cell: cell[1]).items()}
        for number, part in found.items():
            part.weight /= users[number]
        return dict(sorted(found.items()))

    @property
    def publishers(self) -> dict[str, PartitionStats]:
        """By producer, over all partitions that it has used."""
        return {name: _sum(parts) for name, parts in sorted(self._by(lambda cell: cell[0]).items())}

    @property
    def total(self) -> PartitionStats:  # type: ignore[override]
        """Over everything; zeros where nothing was used."""
        total = _sum(self.cells.values())
        total.errors += self.lost
        return total

    def _by(self, key: Callable[[tuple[str, int]], Any]) -> dict[Any, list[PartitionStats]]:
        groups: dict[Any, list[PartitionStats]] = {}
        for cell, part in self.cells.items():
            groups.setdefault(key(cell), []).append(part)
        return groups

    @classmethod
    def merge(cls, *stats: TopicStats | Iterable[TopicStats]) -> Self:
        """One topic as several producers see it, in whatever processes they are. One look per producer, not two."""
        found = [one for some in stats for one in ([some] if isinstance(some, TopicStats) else some)]
        names = sorted({one.name for one in found})
        if len(names) > 1:
            raise ValueError(f"these are the figures of several topics: {', '.join(names)}; merge them one by one")
        cells: dict[tuple[str, int], PartitionStats] = {}
        for one in found:
            for cell, part in one.cells.items():
                cells[cell] = cells[cell] + part if cell in cells else part
        waiting, lost = sum(one.waiting for one in found), sum(one.lost for one in found)
        return cls(names[0] if names else "", cells, waiting, lost)

    def since(self, earlier: TopicStats | None, seconds: float) -> TopicStats:
        """What has happened between two looks, `seconds` apart, with the partitions that were used in between."""
        before = {} if earlier is None else earlier.cells
        nothing = PartitionStats()
        used = {}
        for cell, part in self.cells.items():
            then = before.get(cell, nothing)
            if part.records != then.records or part.errors != then.errors or part.queue_records:
                used[cell] = part.since(then, seconds)
        return TopicStats(self.name, used, self.waiting, self.lost - (0 if earlier is None else earlier.lost))

    def to_dict(self, brief: bool = False) -> dict[str, Any]:
        """As plain dicts, lists and numbers, ready for JSON; `from_dict` makes it again, also if it is `brief`."""
        return {
            "name": self.name,
            "waiting": self.waiting,
            "lost": self.lost,
            "cells": [
                {"producer": producer, "partition": partition, **part.to_dict(brief)}
                for (producer, partition), part in sorted(self.cells.items())
            ],
        }

    @classmethod
    def from_dict(cls, known: Mapping[str, Any]) -> Self:
        """What `to_dict` has made, for figures that come from another process."""
        cells = {}
        for cell in known["cells"]:
            figures = dict(cell)
            place = (figures.pop("producer"), figures.pop("partition"))
            cells[place] = PartitionStats.from_dict(figures)
        return cls(known["name"], cells, known["waiting"], known["lost"])


@dataclass(frozen=True, slots=True)
class BrokerStats:
    """One broker as one producer sees it."""

    id: int
    connected: bool
    requests: int
    """Produce requests sent to it, repeated ones included."""
    in_flight: int
    """Of these, not answered yet."""
    errors: int
    """Of these, answered by a lost connection or a timeout."""
    repeated: int
    """Of these, answered without an outcome for their records, which were sent again."""
    queue_records: int
    """Not yet acknowledged, in the partitions it leads."""
    queue_bytes: int
    round_trip: Latency
    """From sending a Produce request to its answer."""

    def to_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__}
        return found | {"round_trip": self.round_trip.to_dict()}


@dataclass(frozen=True)
class ProducerStats(_Totals):
    """Everything a producer tells of itself at one moment."""

    name: str
    """`client.id` and a number, host and process: unique, so that merged figures know whose they are."""
    topics: Mapping[str, TopicStats]
    brokers: Mapping[int, BrokerStats]
    """Those it has been connected to, by id."""
    memory: int
    """Bytes of `buffer.memory` in use."""
    outstanding: int
    """Records not yet acknowledged, also those whose partition is not decided."""

    @cached_property
    def total(self) -> PartitionStats:  # type: ignore[override]
        """Over everything; added up when it is first asked for."""
        total = _sum(topic.total for topic in self.topics.values())
        total.retries = self.retries
        total.queue_records = self.outstanding
        total.weight = 0.0
        return total

    @property
    def retries(self) -> int:
        """Records that were sent again, at least: a request that was repeated counts as one."""
        parts = sum(part.retries for topic in self.topics.values() for part in topic.cells.values())
        return max(parts, sum(broker.repeated for broker in self.brokers.values()))

    def to_dict(self) -> dict[str, Any]:
        """As plain dicts, lists and numbers, ready for JSON."""
        return {
            "name": self.name,
            "memory": self.memory,
            "total": self.total.to_dict(),
            "topics": {name: topic.to_dict() for name, topic in self.topics.items()},
            "brokers": {number: broker.to_dict() for number, broker in self.brokers.items()},
        }

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {self.records:,} records, {self.bytes:,} bytes, {self.errors:,} errors, "
            f"{self.retries:,} retries, {self.queue_records:,} queued, p99 {1e3 * self.latency.percentile(99):.1f} ms"
        ]
        for name, topic in self.topics.items():
            for number, part in topic.partitions.items():
                lines.append(
                    f"  {name} [{number}] {part.records:,} records, {part.retries:,} retries, "
                    f"{part.queue_records:,} queued, weight {part.weight:.3f}, "
                    f"p99 {1e3 * part.latency.percentile(99):.1f} ms"
                )
        for number, broker in self.brokers.items():
            lines.append(
                f"  broker {number}: {broker.requests:,} requests, {broker.repeated:,} repeated, round trip p99 "
                f"{1e3 * broker.round_trip.percentile(99):.2f} ms"
            )
        return "\n".join(lines)


def _sent_again(statistics: str | None) -> Iterator[tuple[str, int, int]]:
    """(topic, partition, records transmitted and no longer on their way), by librdkafka's statistics."""
    if statistics is None:
        return
    try:
        told = json.loads(statistics)
    except ValueError:  # librdkafka does not escape a client.id with quotes in it
        return
    for topic, known in told.get("topics", {}).items():
        for number, part in known.get("partitions", {}).items():
            if part.get("txmsgs"):
                yield topic, int(number), part["txmsgs"] - part.get("msgs_inflight", 0)


def read(runtime: Runtime, name: str) -> ProducerStats:
    """The figures of a producer at this moment."""
    found, brokers, statistics, moved = runtime.snapshot()
    repeated = {number: figures[4] for number, figures in brokers.items() if figures[4]}
    # Without repeated requests, what librdkafka has sent more than once is a report that is on its way.
    sent = {(topic, number): records for topic, number, records in _sent_again(statistics)} if repeated else {}
    led = Counter(figures[7] for _, _, lanes in found.values() for figures in lanes.values())
    queued: dict[int, list[int]] = {}
    topics: dict[str, TopicStats] = {}
    for topic, (waiting, lost, lanes) in found.items():
        cells = {}
        for number, figures in lanes.items():
            records, size, failed, queue, queue_bytes, weight, age, leader, settled, retries, buckets, sum_us = figures
            if repeated:
                known = retries
                retries = max(retries, sent.get((topic, number), 0) - settled)
                # Then every repeated request was this partition's, with a record at least.
                if led[leader] == 1 and not moved:
                    retries = max(retries, repeated.get(leader, 0))
                if retries > known:
                    runtime.note_retries(topic, number, retries)
            age = max(age, 1e-3)
            cells[(name, number)] = PartitionStats(
                records,
                size,
                failed,
                retries,
                queue,
                queue_bytes,
                weight,
                records / age,
                size / age,
                Latency(buckets, sum_us / 1e6),
            )
            held = queued.setdefault(leader, [0, 0])
            held[0] += queue
            held[1] += queue_bytes
        topics[topic] = TopicStats(topic, cells, waiting, lost)
    return ProducerStats(
        name,
        topics,
        {
            number: BrokerStats(
                number,
                up,
                requests,
                open_requests,
                errors,
                again,
                queued.get(number, [0, 0])[0],
                queued.get(number, [0, 0])[1],
                Latency(buckets, sum_us / 1e6),
            )
            for number, (up, requests, open_requests, errors, again, buckets, sum_us) in sorted(brokers.items())
        },
        runtime.memory,
        runtime.records,
    )
