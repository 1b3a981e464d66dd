"""Rows with a level: a column of priorities says where each row goes, `orders-2` for 2 where the topic is `orders`.

driver   one look through the column before the job starts: nothing is sent if a row is wrong
task     each Arrow batch, or chunk of an RDD's rows, before anything of it is sent: rows may be others by then
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fastprod.priority.levels import agreed_levels, level_topics
from fastprod.producer import Producer
from fastprod.spark._sink import ExportError, Sink

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LevelProducer", "check_name", "levels_of", "placed", "refusal", "so_far", "wanted"]


class LevelProducer(Producer):
    """A producer to topics that are named after their levels already; of what waits the highest goes first."""

    def __init__(self, config: Mapping[str, Any], levels: int) -> None:
        self._level_count = levels
        super().__init__(dict(config))


def check_name(priority: object) -> None:
    if priority is not None and (not isinstance(priority, str) or not priority):
        raise TypeError(
            f"priority is the name of a column, not {priority!r}; to write all rows to one level, give its topic, as "
            "'orders-2', and no priority"
        )


def levels_of(priority: str | None, max_priority: Any, config: dict[str, Any]) -> int:
    """How many there are, 1 without priorities; `max.priority` is taken out of the configuration."""
    check_name(priority)
    if priority is not None:
        return agreed_levels(max_priority, config)
    if max_priority is not None or "max.priority" in config:
        raise ValueError("max_priority has no effect without priority, the name of the column that has the levels")
    return 1


def wanted(levels: int) -> str:
    """What a priority is, and what to do with one that is not."""
    return (
        f"a priority is a whole number from 0, the lowest, to {levels - 1}, since max_priority={levels}. Leave such "
        "rows out, correct them with coalesce, greatest or least, or give a higher max_priority"
    )


def refusal(column: str, levels: int, lowest: int | None, highest: int | None, nulls: int) -> str | None:
    """What is wrong with a column of priorities; None if nothing is."""
    ends = dict.fromkeys(end for end in (lowest, highest) if end is not None)
    found = [str(end) for end in ends if not 0 <= end < levels]
    if nulls:
        found.append(f"null in {nulls:,} rows")
    return f"column {column!r} is {' and '.join(found)}: {wanted(levels)}" if found else None


def so_far(sink: Sink) -> str:
    """What a task that finds a wrong priority has sent."""
    if sink.job is not None:
        return "Its transaction is aborted, readers of committed data see nothing of it"
    return "Nothing of the rows that were handed over together with it was sent; earlier rows may have been"


def placed(batch: pa.RecordBatch, sink: Sink) -> pa.RecordBatch:
    """The batch with names of Kafka's topics in its column `topic`, once all of its priorities are found right."""
    import pyarrow as pa
    import pyarrow.compute as pc

    call: Any = pc  # whose type hints do not know all of it
    assert sink.priority is not None
    priorities = batch.column(sink.priority)
    ends = call.min_max(priorities)
    problem = refusal(sink.priority, sink.levels, ends["min"].as_py(), ends["max"].as_py(), int(priorities.null_count))
    if problem is not None:
        raise ExportError(f"{problem}. {so_far(sink)}")
    if sink.topic is not None:
        names = pa.DictionaryArray.from_arrays(priorities.cast(pa.int32()), level_topics(sink.topic, sink.levels))
    else:
        topics = batch.column("topic")
        names = call.binary_join_element_wise(topics, priorities.cast(topics.type), pa.scalar("-", topics.type))
    if "topic" in batch.schema.names:
        batch = batch.drop_columns(["topic"])
    return batch.append_column("topic", names)
