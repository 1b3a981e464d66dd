"""Levels and their topics: level i of the logical topic `orders` is the Kafka topic `orders-i`."""

from __future__ import annotations

from numbers import Integral
from typing import Any

from fastprod._config import agreed
from fastprod.priority.policies import check_levels

__all__ = [
    "agreed",
    "agreed_levels",
    "check_levels",
    "is_whole",
    "level_of",
    "level_topic",
    "level_topics",
    "logical_topic",
]


def agreed_levels(max_priority: Any, options: dict[str, Any]) -> int:
    found = agreed("max_priority", max_priority, "max.priority", options)
    if found is None:
        raise ValueError(
            "max_priority is missing: give the number of levels, here or as max.priority in the configuration"
        )
    check_levels(found)
    return int(found)


def level_topic(topic: str, priority: int) -> str:
    return f"{topic}-{priority}"


def level_topics(topic: str, max_priority: int) -> list[str]:
    """The Kafka topics of a logical one, index = level."""
    return [level_topic(topic, level) for level in range(max_priority)]


def logical_topic(topic: str) -> str:
    return _parts(topic)[0]


def level_of(topic: str, max_priority: int) -> int:
    """The level in a topic's name; ValueError if it has none, or one beyond the highest."""
    level = _parts(topic)[1]
    if level >= max_priority:
        raise ValueError(f"topic {topic!r} is of level {level}, but levels go from 0 to {max_priority - 1}")
    return level


def _parts(topic: str) -> tuple[str, int]:
    name, dash, level = topic.rpartition("-")
    if not dash or not name or not level.isdecimal() or not level.isascii() or str(int(level)) != level:
        raise ValueError(f"topic {topic!r} does not end in a level, as 'orders-0' does")
    return name, int(level)


def is_whole(number: Any) -> bool:
    """Whether it is an integer of Python's or numpy's; True is none."""
    return isinstance(number, Integral) and not isinstance(number, bool)


def check_priority(priority: Any, max_priority: int) -> None:
    if not is_whole(priority) or not 0 <= priority < max_priority:
        raise ValueError(f"priority={priority!r} must be a whole number from 0, the lowest, to {max_priority - 1}")
