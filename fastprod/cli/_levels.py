"""The experiments of `fastprod priority`: how fast records of each level are processed, over time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, Message

from fastprod import Producer
from fastprod.priority import CapacityBurstConsumer, PriorityProducer

LEVELS = 3
POLL = 50  # records in a poll, processed at the same time
PARTITIONS = 5  # of each level; three times as many where all share a topic
PATIENCE_S = 60.0  # without any record


@dataclass(slots=True)
class Experiment:
    """One run: when how many records of each level were processed."""

    name: str
    records: list[int]
    rows: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)  # seconds, and sums by level so far
    waves: list[float] = field(default_factory=list)  # when more records of the highest level came

    def reached(self, level: int, share: float) -> float:
        """When so much of a level was processed."""
        wanted = self.records[level] * share
        return next(at for at, sums in self.rows if sums[level] >= wanted)


class Stuck(Exception):
    """No record came for too long."""


def run(name: str, config: dict[str, Any], amount: int, pause_s: float, advance: Callable[[int], None]) -> Experiment:
    """One of EXPERIMENTS on topics of its own; `amount` records of each level, `pause_s` for a poll's records."""
    return EXPERIMENTS[name](name, config, f"fastprod-priority-{uuid.uuid4().hex[:8]}", amount, pause_s, advance)


def _without(
    name: str, config: dict[str, Any], topic: str, amount: int, pause_s: float, advance: Callable[[int], None]
) -> Experiment:
    """All levels in one topic, as usual."""
    partitions = PARTITIONS * LEVELS
    with PriorityProducer(config, 1) as maker:
        maker.create_topics(topic, partitions)
    own = f"{topic}-0"
    with Producer(config) as producer:
        values = [b"%d" % (number % LEVELS) for number in range(amount * LEVELS)]
        producer.produce_many(own, values, partitions=[number // LEVELS % partitions for number in range(len(values))])
    consumer = Consumer(_reading(config, topic))
    consumer.subscribe([own])
    found = Experiment(name, [amount] * LEVELS)
    try:
        _process(
            found,
            lambda: consumer.consume(POLL, 1.0),
            lambda message: int(message.value() or b""),
            pause_s,
            advance,
            lambda sums: None,
        )
    finally:
        consumer.close()
    return found


def _with(
    name: str, config: dict[str, Any], topic: str, amount: int, pause_s: float, advance: Callable[[int], None]
) -> Experiment:
    """A topic per level; in the wave, half of the highest level comes later."""
    late = amount // 2 if name == "wave" else 0
    found = Experiment(name, [amount] * LEVELS)
    with PriorityProducer(config, LEVELS) as producer:
        producer.create_topics(topic, PARTITIONS)

        def send(level: int, count: int) -> None:
            producer.produce_many(
                topic, [b"v"] * count, partitions=[n % PARTITIONS for n in range(count)], priority=level
            )
            producer.flush()

        def look(sums: list[int]) -> None:
            # When the level below has borrowed for a while.
            if late and not found.waves and sums[-1] >= amount - late and sums[-2] >= 0.6 * amount:
                send(LEVELS - 1, late)
                found.waves.append(0.0)

        with CapacityBurstConsumer(_reading(config, topic), LEVELS, POLL) as consumer:
            consumer.subscribe([topic])
            # All levels start at the same time: each joins a group of its own, and looks up where its partitions begin,
            # in which any of them may be half a second late. A record of each partition shows that it is done.
            for level in range(LEVELS):
                send(level, PARTITIONS)
            come = 0
            deadline = time.monotonic() + PATIENCE_S
            while come < PARTITIONS * LEVELS:
                come += sum(message.error() is None for message in consumer.poll(0.1))
                if time.monotonic() > deadline:
                    raise Stuck(f"{come} of {PARTITIONS * LEVELS} first records came within {PATIENCE_S:g} s")
            for level in range(LEVELS):
                send(level, amount - late if level == LEVELS - 1 else amount)
            _process(found, lambda: consumer.poll(1.0), consumer.priority_of, pause_s, advance, look)
    return found


EXPERIMENTS = {"no-priority": _without, "priority": _with, "wave": _with}


def _reading(config: dict[str, Any], topic: str) -> dict[str, Any]:
    return {**config, "group.id": topic, "auto.offset.reset": "earliest"}


def _process(
    found: Experiment,
    poll: Callable[[], list[Message]],
    level_of: Callable[[Message], int],
    pause_s: float,
    advance: Callable[[int], None],
    look: Callable[[list[int]], None],
) -> None:
    """Polls until everything is processed; the records of a poll take `pause_s`, all at the same time."""
    sums = [0] * LEVELS
    start = 0.0
    heard = time.monotonic()
    while sums != found.records:
        messages = [message for message in poll() if message.error() is None]
        now = time.monotonic()
        if not messages:
            if now > heard + PATIENCE_S:
                raise Stuck(f"no record came for {PATIENCE_S:g} s; {sums} of {found.records} by level did")
            continue
        heard = now
        start = start or now
        time.sleep(pause_s)
        for message in messages:
            sums[level_of(message)] += 1
        found.rows.append((time.monotonic() - start, tuple(sums)))
        advance(len(messages))
        waves = len(found.waves)
        look(sums)
        if len(found.waves) > waves:
            found.waves[-1] = time.monotonic() - start
