"""What an export did, task by task and partition by partition.

Tasks report to the driver as small JSON documents; `ExportReport` is their sum. Of the client's configuration only
`client.id` is in it, so it can be stored and shown.
"""

from __future__ import annotations

import base64
import html
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from fastprod.stats import Latency, TopicStats

__all__ = ["ExportReport", "PartitionReport", "TaskReport"]

BAR = 40  # characters of the longest bar


@dataclass(slots=True)
class PartitionReport:
    """What came to lie in one partition of a topic."""

    records: int = 0
    first_offset: int | None = None
    last_offset: int | None = None

    def add(self, records: int, first: int | None, last: int | None) -> None:
        self.records += records
        if first is not None:
            self.first_offset = first if self.first_offset is None else min(first, self.first_offset)
        if last is not None:
            self.last_offset = last if self.last_offset is None else max(last, self.last_offset)


Topics = dict[str, dict[int, PartitionReport]]


def merge_topics(into: Topics, other: Topics) -> None:
    for topic, partitions in other.items():
        mine = into.setdefault(topic, {})
        for number, part in partitions.items():
            mine.setdefault(number, PartitionReport()).add(part.records, part.first_offset, part.last_offset)


@dataclass(slots=True)
class TaskReport:
    """What the successful attempt of one task did."""

    task: int
    """The number of the Spark partition."""
    attempt: int = 0
    records: int = 0
    bytes: int = 0
    """Of keys and values."""
    failed: int = 0
    """Rows without acknowledgement. A task with any fails."""
    retries: int = 0
    """Records sent again, at least: a request that was repeated shortly before the end counts as one."""
    started: float = 0.0
    """Seconds since 1970, by the executor's clock."""
    seconds: float = 0.0
    skipped: bool = False
    """With exactly_once: an earlier attempt or job had committed this partition already."""
    source: str = ""
    """Of an export of files: what the task has read."""
    topics: Topics = field(default_factory=dict)
    """Empty for skipped tasks: the marker of the earlier attempt only tells records and bytes."""
    stats: Mapping[str, TopicStats] = field(default_factory=dict)
    """By topic, what the worker's producer has done for this task."""

    def end(self) -> None:
        """Takes the time."""
        self.seconds = max(0.0, time.time() - self.started)

    def to_dict(self) -> dict[str, Any]:
        """Without `stats`, whose sum is in the ExportReport."""
        return {name: value for name, value in asdict(replace(self, stats={})).items() if name != "stats"}

    def to_json(self) -> str:
        """On its way to the driver. Histograms of many partitions are long, and pack well."""
        stats = json.dumps([topic.to_dict(brief=True) for topic in self.stats.values()])
        return json.dumps({**self.to_dict(), "stats": base64.b64encode(zlib.compress(stats.encode(), 1)).decode()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        known = json.loads(text)
        packed = known.pop("stats")
        topics = {
            topic: {int(number): PartitionReport(**part) for number, part in partitions.items()}
            for topic, partitions in known.pop("topics").items()
        }
        return cls(**known, topics=topics, stats=_Later(lambda: _unpacked(packed)))


class _Later(Mapping[str, TopicStats]):
    """Figures that are worked out when somebody looks: a thousand tasks with a thousand partitions have many."""

    def __init__(self, work_out: Callable[[], dict[str, TopicStats]]) -> None:
        self._work_out = work_out

    @cached_property
    def _known(self) -> dict[str, TopicStats]:
        return self._work_out()

    def __getitem__(self, topic: str) -> TopicStats:
        return self._known[topic]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __repr__(self) -> str:
        return repr(self._known)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (self._known,)


def _unpacked(stats: str) -> dict[str, TopicStats]:
    known = json.loads(zlib.decompress(base64.b64decode(stats)))
    return {one["name"]: TopicStats.from_dict(one) for one in known}


def _by_topic(tasks: Iterable[TaskReport], seconds: float) -> dict[str, TopicStats]:
    parts: dict[str, list[TopicStats]] = {}
    for task in tasks:
        for topic, figures in task.stats.items():
            parts.setdefault(topic, []).append(figures)
    return {topic: _over(figures, seconds) for topic, figures in sorted(parts.items())}


def _over(tasks: list[TopicStats], seconds: float) -> TopicStats:
    """The sum over tasks. Those of one worker ran one after the other: their rates and weights do not add."""
    looks = Counter(cell for task in tasks for cell in task.cells)
    merged = TopicStats.merge(tasks)
    cells = {
        cell: replace(
            part,
            records_per_s=part.records / seconds if seconds else 0.0,
            bytes_per_s=part.bytes / seconds if seconds else 0.0,
            weight=part.weight / looks[cell],
        )
        for cell, part in merged.cells.items()
    }
    return replace(merged, cells=cells)


@dataclass(frozen=True, slots=True)
class ExportReport:
    """The result of an export: every record of it is acknowledged, or the job has failed."""

    records: int
    bytes: int
    """Of keys and values."""
    failed: int
    """Records without acknowledgement. A task with any fails, so a finished export has none."""
    retries: int
    """Records sent again, at least."""
    seconds: float
    """From the call of write() to its end, or from the start of the first task to the end of the last."""
    topics: Mapping[str, Mapping[int, PartitionReport]]
    """Records and offsets by topic and partition, without those of skipped tasks.

    Offsets span what was written, also by others in between.
    """
    tasks: tuple[TaskReport, ...]
    """By the number of the Spark partition."""
    stats: Mapping[str, TopicStats] = field(default_factory=dict)
    """By topic: latencies, rates and errors by partition, and who wrote (`publishers`: the workers' producers)."""
    spread: Mapping[str, int] = field(default_factory=dict)
    """With `bundles="auto"`: topics that were too big for one task, and over how many they went."""
    files: int = 0
    """Of an export of files: how many were read."""

    @classmethod
    def of(
        cls,
        tasks: Iterable[TaskReport],
        seconds: float | None = None,
        spread: Mapping[str, int] | None = None,
        files: int = 0,
    ) -> Self:
        """The sum of what tasks have reported; without `seconds` their own clocks tell the time."""
        ordered = tuple(sorted(tasks, key=lambda task: task.task))
        topics: Topics = {}
        for task in ordered:
            merge_topics(topics, task.topics)
        if seconds is None:
            end = max((task.started + task.seconds for task in ordered), default=0.0)
            seconds = end - min((task.started for task in ordered), default=0.0)
        names = ("records", "bytes", "failed", "retries")
        records, size, failed, retries = (sum(getattr(task, name) for task in ordered) for name in names)
        sorted_topics = {topic: dict(sorted(parts.items())) for topic, parts in sorted(topics.items())}
        over = seconds
        stats = _Later(lambda: _by_topic(ordered, over))
        return cls(records, size, failed, retries, seconds, sorted_topics, ordered, stats, dict(spread or {}), files)

    @property
    def skipped(self) -> int:
        """Tasks that had nothing to do, because exactly_once found their output committed."""
        return sum(task.skipped for task in self.tasks)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain dicts, lists and numbers, ready for JSON."""
        bare = replace(self, tasks=(), stats={})
        return asdict(bare) | {
            "tasks": [task.to_dict() for task in self.tasks],
            "stats": {name: topic.to_dict() for name, topic in self.stats.items()},
        }

    @property
    def latency(self) -> Latency:
        """From handing a record over to its acknowledgement, over all topics."""
        return sum((topic.latency for topic in self.stats.values()), Latency())

    def save(self, path: str | Path) -> None:
        """Writes JSON, or a page to look at if the name ends in .html."""
        target = Path(path)
        text = self._page() if target.suffix.lower() in (".html", ".htm") else json.dumps(self.to_dict(), indent=2)
        target.write_text(text + "\n", encoding="utf-8")

    def _facts(self) -> dict[str, str]:
        rate = self.records / self.seconds if self.seconds else 0.0
        facts = {
            "records": f"{self.records:,}",
            "bytes": f"{self.bytes:,}",
            "failed": f"{self.failed:,}",
            "retries": f"{self.retries:,}",
            "seconds": f"{self.seconds:.1f}",
            "records/s": f"{rate:,.0f}",
            "tasks": f"{len(self.tasks):,}",
            "ms median latency": f"{1e3 * self.latency.percentile(50):,.0f}",
            "ms 99th percentile": f"{1e3 * self.latency.percentile(99):,.0f}",
        }
        if self.files:
            facts["files"] = f"{self.files:,}"
        if self.skipped:
            facts["tasks skipped, committed earlier"] = f"{self.skipped:,}"
        if self.spread:
            facts["topics spread over several tasks"] = f"{len(self.spread):,}"
        return facts

    def _rows(self) -> list[tuple[str, int, PartitionReport, float]]:
        """Topic, partition, its figures, and its share of the largest."""
        most = max((part.records for parts in self.topics.values() for part in parts.values()), default=0)
        return [
            (topic, number, part, part.records / most if most else 0.0)
            for topic, parts in self.topics.items()
            for number, part in parts.items()
        ]

    def summary(self) -> str:
        """The totals in a line."""
        return ", ".join(f"{value} {name}" for name, value in self._facts().items())

    def __str__(self) -> str:
        lines = [self.summary()]
        for topic, number, part, share in self._rows():
            offsets = "" if part.first_offset is None else f"  offsets {part.first_offset}..{part.last_offset}"
            lines.append(f"{topic} [{number}] {part.records:>12,}  {'#' * round(BAR * share):{BAR}}{offsets}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        facts = "".join(
            f"<tr><th>{html.escape(name)}</th><td>{value}</td></tr>" for name, value in self._facts().items()
        )
        rows = "".join(
            f"<tr><td>{html.escape(topic)}</td><td>{number}</td><td>{part.records:,}</td>"
            f'<td><div style="background:#4c78a8;height:0.8em;width:{12 * share:.2f}em"></div></td>'
            f"<td>{'' if part.first_offset is None else part.first_offset}</td>"
            f"<td>{'' if part.last_offset is None else part.last_offset}</td></tr>"
            for topic, number, part, share in self._rows()
        )
        heads = "".join(
            f"<th>{name}</th>" for name in ("topic", "partition", "records", "", "first offset", "last offset")
        )
        return f"<table>{facts}</table><table><tr>{heads}</tr>{rows}</table>"

    def _page(self) -> str:
        return (
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>fastprod export</title>'
            "<style>body{font:15px sans-serif;margin:2em}table{border-collapse:collapse;margin-bottom:2em}"
            "td,th{padding:.2em .8em;text-align:right;border-bottom:1px solid #ddd}</style>"
            f"<h1>fastprod export</h1>{self._repr_html_()}"
        )
