"""How much each topic gets, from whoever knows it: producers' statistics, or an aggregate of a frame."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Self, TypeAlias

from fastprod.bundles.map import BundleMap, _checked, hash_positions
from fastprod.stats import ProducerStats


class TopicLoad(NamedTuple):
    """What a topic gets in a second, or in all: only how topics compare counts for a plan."""

    records_per_s: float
    bytes_per_s: float

    def __add__(self, other: TopicLoad) -> TopicLoad:  # type: ignore[override]  # adds up, does not append
        return TopicLoad(self[0] + other[0], self[1] + other[1])


class BundleLoad:
    """Records and bytes per topic. Cannot be changed; `+` adds that of other writers.

    `BundleLoad({"orders": (100, 20_000)})`: 100 records and 20,000 bytes a second. A topic may also be given as its
    position, for whoever has no names.
    """

    __slots__ = ("topics",)

    topics: Mapping[str | int, TopicLoad]

    def __init__(self, topics: Mapping[Any, tuple[float, float]]) -> None:
        if not isinstance(topics, Mapping):
            raise TypeError(f"load must be (records/s, bytes/s) by topic, not {type(topics).__name__}")
        self.topics = MappingProxyType({_topic(topic): _load(topic, told) for topic, told in topics.items()})

    @classmethod
    def of(cls, load: Load) -> BundleLoad:
        return load if isinstance(load, BundleLoad) else cls(load)

    @classmethod
    def from_stats(cls, *stats: ProducerStats) -> Self:
        """What producers tell by `stats()`, each of its own; those of one topic add up."""
        found: dict[str, TopicLoad] = {}
        for one in stats:
            if not isinstance(one, ProducerStats):
                raise TypeError(f"from_stats() wants what producer.stats() gives, not {type(one).__name__}")
            for name, topic in one.topics.items():
                told = topic.total
                found[name] = found.get(name, TopicLoad(0, 0)) + TopicLoad(told.records_per_s, told.bytes_per_s)
        return cls(found)

    @classmethod
    def from_frame(cls, frame: Any) -> Self:
        """Of an aggregate with the columns `topic` and `records`, `bytes` or both; rows of one topic add up.

        A Spark, pandas or polars DataFrame, an Arrow table, or rows as a list of dicts.
        """
        found: dict[str, TopicLoad] = {}
        for row in _rows(frame):
            topic = row["topic"]
            if not isinstance(topic, str):
                raise ValueError(f"a topic must be a text, not {topic!r}")
            told = (row.get("records", 0) or 0, row.get("bytes", 0) or 0)
            found[topic] = found.get(topic, TopicLoad(0, 0)) + _load(topic, told)
        return cls(found)

    def total(self) -> TopicLoad:
        """Of all topics."""
        return _sum(self.topics.values())

    def positions(self) -> list[tuple[str | int, int]]:
        """Each topic and its position."""
        names = [topic for topic in self.topics if isinstance(topic, str)]
        hashed = dict(zip(names, hash_positions(names).tolist(), strict=True)) if names else {}
        return [(topic, hashed[topic] if isinstance(topic, str) else topic) for topic in self.topics]

    def by_bundle(self, map: BundleMap) -> dict[str, TopicLoad]:
        """Of each bundle of a map."""
        found: list[list[TopicLoad]] = [[] for _ in map.bundles]
        for topic, position in self.positions():
            found[map.index_at(position)].append(self.topics[topic])
        return {bundle: _sum(loads) for bundle, loads in zip(map.bundles, found, strict=True)}

    def __add__(self, other: BundleLoad) -> BundleLoad:
        if not isinstance(other, BundleLoad):
            return NotImplemented
        found = dict(self.topics)
        for topic, one in other.topics.items():
            found[topic] = found.get(topic, TopicLoad(0, 0)) + one
        return BundleLoad(found)

    def __len__(self) -> int:
        return len(self.topics)

    def __eq__(self, other: object) -> bool:
        return dict(self.topics) == dict(other.topics) if isinstance(other, BundleLoad) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        total = self.total()
        return f"<BundleLoad of {len(self)} topics: {total.records_per_s:g} records/s, {total.bytes_per_s:g} bytes/s>"


Load: TypeAlias = BundleLoad | Mapping[Any, tuple[float, float]]


def _topic(topic: object) -> str | int:
    return topic if isinstance(topic, str) else _checked(topic)


def _load(topic: object, told: Any) -> TopicLoad:
    try:
        records, size = told
    except (TypeError, ValueError):
        raise ValueError(f"the load of {topic!r} must be (records/s, bytes/s), not {told!r}") from None
    for each in (records, size):
        if isinstance(each, bool) or not hasattr(each, "__float__") or not 0 <= each < math.inf:
            raise ValueError(f"the load of {topic!r} must be two numbers from 0 up, not {told!r}")
    return TopicLoad(float(records), float(size))


def _sum(loads: Iterable[TopicLoad]) -> TopicLoad:
    listed = list(loads)
    return TopicLoad(math.fsum(one[0] for one in listed), math.fsum(one[1] for one in listed))


def _rows(frame: Any) -> list[dict[str, Any]]:
    import pyarrow

    if hasattr(frame, "toArrow"):  # Spark's
        frame = frame.toArrow()
    if isinstance(frame, list | tuple):
        # Rows of Spark's collect() can be asked for a dict, too
        rows = [row.asDict() if hasattr(row, "asDict") else row for row in frame]
        if not all(isinstance(row, dict) for row in rows):
            raise TypeError("rows must be dicts with topic, records and bytes")
        for row in rows:
            _check_columns(row)
        return rows
    try:
        table = pyarrow.table(frame)
    except (TypeError, ValueError):
        raise TypeError(f"from_frame() wants a DataFrame, an Arrow table or rows, not {type(frame).__name__}") from None
    _check_columns(table.column_names)
    table = table.select([name for name in ("topic", "records", "bytes") if name in table.column_names])
    return list(table.to_pylist())


def _check_columns(names: Iterable[str]) -> None:
    found = list(names)
    if "topic" not in found or not {"records", "bytes"} & set(found):
        raise ValueError(f"the frame needs the columns topic and records, bytes or both; it has {', '.join(found)}")
