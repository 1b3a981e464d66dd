"""What driver and executors share: where a job writes to, and how."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastprod.priority.levels import level_topic

__all__ = ["BUCKET", "FILES", "MARKERS", "ExportError", "Sink"]

BUCKET = "fastprod_bucket"  # the column that tells a row's bucket

FILES = "files "  # begins the layout of a job whose rows are named by the files that they are in

MARKERS = "fastprod-markers"  # the topic whose offsets hold the markers of jobs whose rows name their topics


class ExportError(RuntimeError):
    """Records of a task were not acknowledged, or exactly once could not be kept; the text says why."""


@dataclass(frozen=True)
class Sink:
    """Where a job writes to and how: made on the driver, pickled to the executors."""

    config: Mapping[str, Any] = field(repr=False)  # may hold passwords
    topic: str | None
    job: str | None = None
    """Set for exactly once: the name that a resubmitted job keeps."""
    batch: int | None = None
    """For exactly once in a stream: the number of the batch."""
    key: str = field(default="", repr=False)
    """The same for configurations whose producers may stand in for each other."""
    marker_topic: str | None = None
    """For exactly once: the topic whose offsets hold the job's markers, if it is not `topic`."""
    layout: str = "task"
    """For exactly once: what decides which rows are in which partition."""
    partitions: int | None = None
    """For exactly once: how many Spark partitions the job has, where that is known before it starts."""
    claim: str | None = None
    """For exactly once: the id in the job's own marker, once it is written."""
    began: int | None = None
    """When that was, in seconds since 1970."""
    until: float | None = None
    """Up to when the job's markers are relied on; None where brokers do not tell how long they keep them."""
    priority: str | None = None
    """The column that has the rows' levels; `topic`, given or in a column, is then a logical one."""
    levels: int = 1
    """How many of them there are."""

    def __post_init__(self) -> None:
        if not self.key:
            object.__setattr__(self, "key", _identity({**self.config, "max.priority": self.levels}))

    @property
    def single(self) -> str | None:
        """The Kafka topic of all records; None where each has its own."""
        return self.topic if self.priority is None else None

    @property
    def target(self) -> str | None:
        """Where the job writes to, as its markers have it: it must stay the same."""
        return self.topic if self.priority is None else f"{self.topic or '<topic>'}-<priority>"

    @property
    def place(self) -> str:
        """The topic whose offsets hold the job's markers; where there are levels, that of the lowest."""
        lowest = self.topic if self.topic is None or self.priority is None else level_topic(self.topic, 0)
        return self.marker_topic or lowest or MARKERS

    @property
    def bucketed(self) -> bool:
        """Whether rows carry the number of their Spark partition."""
        return self.layout.startswith("bucket")

    @property
    def named(self) -> bool:
        """Whether the layout names the rows of each partition: those that are committed need no second look."""
        return self.layout.startswith(FILES)


def _identity(config: Mapping[str, Any]) -> str:
    """Equal for equal settings. Objects among them are copied to each task, so only their origin can be compared."""
    if all(isinstance(value, (str, int, float, bool, type(None))) for value in config.values()):
        return hashlib.sha256(repr(sorted(config.items())).encode()).hexdigest()
    return uuid.uuid4().hex
