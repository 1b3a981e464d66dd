"""Rows to tasks by bundle, so that each topic has one writer, and batches are large.

    position of a row    CRC-32 of its topic, which Spark's crc32 agrees on; in a topic that is spread, one of several
                         neighbouring positions, by the hash of the key, or of the value where there is no key
    bundle               the range that has the position: a tree of comparisons that Spark compiles
    task                 the bundle's writer; the bundle itself where the caller has given a map

All of it depends on the rows alone: a job that runs again has the same rows in the same tasks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fastprod.bundles import BundleLoad, BundleMap, hash_position, plan
from fastprod.bundles.map import LAST
from fastprod.bundles.plan import TOLERANCE
from fastprod.spark._sink import BUCKET

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["Routes", "check", "in_large_batches", "measured", "of_map", "routed"]

AUTO = "auto"
FIRST_BUNDLES = 4  # for each task: little needs to be split then, and few bundles keep the comparisons short
SIZES = {"batch.size", "sticky.batch.size", "sticky.partitioning.bytes"}
LARGE_BATCH = 131072  # bytes after which key-less rows go on to the next partition, and the batch is sent
RECORD = 21  # bytes that a record has beside key and value, at most


@dataclass(frozen=True)
class Routes:
    """Which task writes what."""

    map: BundleMap
    writers: tuple[int, ...]
    """The task of each bundle."""
    tasks: int
    spread: Mapping[str, int]
    """Topics that are too big for one task, and over how many positions their keys go."""

    def spread_tasks(self) -> dict[str, int]:
        """Such topics, and over how many tasks they go."""
        found = {}
        for topic, parts in self.spread.items():
            first = first_position(topic, parts)
            found[topic] = len({self.writers[self.map.index_at(first + part)] for part in range(parts)})
        return found

    def layout(self) -> str:
        """The same for the same routes, in a few characters: markers have little room."""
        told = repr((self.map.boundaries, self.writers, self.tasks, sorted(self.spread.items())))
        return f"bundles {hashlib.sha256(told.encode()).hexdigest()[:16]}"


def check(bundles: object, topic: str | None, columns: Sequence[str], buckets: int | None, bucket_by: object) -> None:
    """Refuses what cannot be routed, before anything is read."""
    if not isinstance(bundles, BundleMap) and bundles != AUTO:
        raise TypeError(f'bundles is a fastprod.bundles.BundleMap or "auto", not {bundles!r}')
    if topic is not None or "topic" not in columns:
        raise ValueError(
            "bundles are for rows that name their topics: have a column 'topic', and do not give topic=..."
        )
    if bucket_by is not None:
        raise ValueError("bucket_by has no effect with bundles: the topic decides, and the key where a topic is spread")
    if buckets is not None and isinstance(bundles, BundleMap):
        raise ValueError(f"buckets has no effect with a BundleMap: each of its {len(bundles)} bundles is a task")
    if buckets is not None and (isinstance(buckets, bool) or not isinstance(buckets, int) or buckets < 1):
        raise ValueError(f"buckets is the number of tasks, from 1 up, not {buckets!r}")


def of_map(bundles: BundleMap) -> Routes:
    """A task for each bundle."""
    return Routes(bundles, tuple(range(len(bundles))), len(bundles), {})


def measured(df: DataFrame, tasks: int | None) -> Routes:
    """Routes by what each topic has, which one pass over the rows tells."""
    from pyspark.sql import functions as f

    sizes = [f.coalesce(f.octet_length(name), f.lit(0)) for name in ("key", "value") if name in df.columns]
    size = f.sum(sum(sizes, f.lit(RECORD))).alias("bytes")
    found = df.groupBy("topic").agg(f.count("*").alias("records"), size).where("topic IS NOT NULL").collect()
    return planned({row.topic: (row.records, row.bytes) for row in found}, tasks or _cores(df))


def planned(topics: Mapping[str, tuple[int, int]], tasks: int) -> Routes:
    """The routes for topics with so many records and bytes each."""
    share = sum(size for _, size in topics.values()) / tasks
    spread: dict[str, int] = {}
    load: dict[str | int, tuple[float, float]] = {}
    for topic, (records, size) in sorted(topics.items()):
        parts = math.ceil(size / share) if size > share * (1 + TOLERANCE) else 1
        if parts == 1:
            load[topic] = (records, size)
            continue
        # Twice as many positions as tasks: keys are not all alike, and smaller parts even out.
        spread[topic] = parts = min(2 * parts, 4 * tasks)
        for number in range(parts):
            before = load.get(first_position(topic, parts) + number, (0, 0))
            load[first_position(topic, parts) + number] = (before[0] + records / parts, before[1] + size / parts)
    made = plan(BundleMap.equal(FIRST_BUNDLES * tasks), BundleLoad(load), writers=tasks)
    return Routes(made.map, tuple(made.assignment[bundle] for bundle in made.map.bundles), tasks, spread)


def in_large_batches(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The configuration for tasks that have a topic's rows to themselves: batches grow beyond Java's usual 16 KB."""
    given = dict(config or {})
    return given if SIZES & given.keys() else {**given, "sticky.batch.size": LARGE_BATCH}


def first_position(topic: str, parts: int) -> int:
    """Of the neighbouring positions that a topic is spread over."""
    return min(hash_position(topic), LAST - parts + 1)


def routed(df: DataFrame, routes: Routes) -> DataFrame:
    """The rows, each in the partition of its task, whose number is added as a column."""
    from pyspark.sql import functions as f

    if not hasattr(df, "repartitionById"):
        raise RuntimeError("bundles need pyspark 4.1 or newer, which can place rows by a number")
    topic = f.col("topic")
    position = f.crc32(topic.cast("binary"))
    for name, parts in routes.spread.items():
        value = f.col("value").cast("binary")
        decides = f.coalesce(f.col("key").cast("binary"), value) if "key" in df.columns else value
        part = f.pmod(f.xxhash64(decides), f.lit(parts)) + f.lit(first_position(name, parts))
        position = f.when(topic == f.lit(name), part).otherwise(position)
    # Neighbours with one writer are one range.
    lowers = [
        (next(group)[1], writer)
        for writer, group in groupby(zip(routes.writers, routes.map.boundaries, strict=False), key=lambda each: each[0])
    ]
    at = "fastprod_position"
    about = {"buckets": routes.tasks, "by": [routes.layout()]}
    task = _tree(lowers, f.col(at)).cast("int").alias(BUCKET, metadata=about)
    kept = [f.col(f"`{name.replace('`', '``')}`") for name in df.columns]
    placed = df.select("*", position.alias(at)).select(*kept, task)
    return placed.repartitionById(routes.tasks, BUCKET)


def _tree(lowers: Sequence[tuple[int, int]], position: Column) -> Any:
    """The writer of a position, by as few comparisons as will do."""
    from pyspark.sql import functions as f

    if len(lowers) == 1:
        return f.lit(lowers[0][1])
    middle = len(lowers) // 2
    right = _tree(lowers[middle:], position)
    return f.when(position < f.lit(lowers[middle][0]), _tree(lowers[:middle], position)).otherwise(right)


def _cores(df: DataFrame) -> int:
    try:
        return int(df.sparkSession.sparkContext.defaultParallelism)
    except Exception:  # Spark Connect does not tell, by an error of its own in each version
        raise ValueError('bundles="auto" needs buckets=..., the number of tasks, with Spark Connect') from None
