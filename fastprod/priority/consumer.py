"""`CapacityBurstConsumer`: one consumer per level, and a policy that says how much each may bring."""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Self, TypeVar

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, TopicPartition

from fastprod._core import _arrivals
from fastprod.priority import levels
from fastprod.priority.policies import CapacityBurst, Distributor, Policy, exponential

R = TypeVar("R")
RebalanceCallback = Callable[["CapacityBurstConsumer", list[TopicPartition]], None]

ASK_S = 5.0  # for brokers to tell what was committed
SERVE_S = 1.0  # each level is looked after so often, whatever it may bring: it stays in its group
RATE_S = 10.0  # rates are taken over so long
QUEUED_RECORDS = 100_000  # librdkafka's defaults for what a consumer fetches ahead
QUEUED_KBYTES = 65_536
CALLBACKS = {"error_cb", "stats_cb", "throttle_cb", "on_commit"}


@dataclass(frozen=True, slots=True)
class LevelStats:
    """One level of a consumer."""

    level: int
    received: int
    """Records that polls returned."""
    capacity: int
    """How many the next poll may bring."""
    burst: int
    """How many of these are borrowed from other levels."""
    lag: int | None
    """Records in the assigned partitions that polls have not returned; None before brokers have told."""
    rate: float
    """Records per second, of the last ten seconds."""


class CapacityBurstConsumer:
    """Consumes several priority levels, each within its capacity; one that is busy borrows what others leave unused.

    Level i of the topic `orders` is the Kafka topic `orders-i`, read in the group `<group.id>-i` by a
    confluent_kafka.Consumer of its own, with the rest of `config` as it is. A poll returns at most `max_poll_records`
    records, those of the highest level first.

    Offsets of what a poll returned are stored when the next one begins, or by `commit()` and `close()`: what is
    committed has been processed. Set `enable.auto.offset.store` to False to call `store_offsets()` yourself.

    One thread polls. Rebalance callbacks run in `poll()`, and get this consumer.

    >>> with CapacityBurstConsumer(config, max_priority=3, max_poll_records=50) as consumer:
    ...     consumer.subscribe(["orders"])
    ...     while True:
    ...         for message in consumer.poll(1.0):
    ...             print(consumer.priority_of(message), message.value())
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        max_priority: int | None = None,
        max_poll_records: int | None = None,
        *,
        history: int | None = None,
        maxout_threshold: int | None = None,
        distributor: Distributor = exponential,
        policy: Policy | None = None,
    ) -> None:
        self._levels: list[_Level] = []
        self._closed = False
        options = dict(config)
        self.max_priority = levels.agreed_levels(max_priority, options)
        self.max_poll_records: int = levels.agreed("max_poll_records", max_poll_records, "max.poll.records", options)
        if self.max_poll_records is None:
            raise ValueError(
                "max_poll_records is missing: give it as an argument or as max.poll.records in the configuration"
            )
        given = {
            "history": levels.agreed("history", history, "max.poll.history.window.size", options),
            "maxout_threshold": levels.agreed(
                "maxout_threshold", maxout_threshold, "min.poll.window.maxout.threshold", options
            ),
        }
        self.policy = self._policy(policy, given, distributor)
        self._manual = str(options.get("enable.auto.offset.store", True)).lower() == "false"
        self._automatic = str(options.get("enable.auto.commit", True)).lower() != "false"
        self._bell = _Bell()
        try:
            for level, own in enumerate(self._configurations(options)):
                raised: list[BaseException] = []
                for name in CALLBACKS & own.keys():
                    if callable(own[name]):
                        own[name] = _kept(own[name], raised)
                consumer = _arrivals.announce(partial(Consumer, own), self._bell.descriptor)
                self._levels.append(_Level(level, consumer, self.max_poll_records, raised))
        except BaseException:
            self._closed = True
            for made in self._levels:
                made.consumer.close()
            raise

    def _policy(self, policy: Policy | None, given: dict[str, Any], distributor: Distributor) -> Policy:
        if policy is None:
            more = {name: given[name] for name in ("history", "maxout_threshold") if given[name] is not None}
            return CapacityBurst(self.max_priority, self.max_poll_records, distributor=distributor, **more)
        for name in ("history", "maxout_threshold"):
            if given[name] is not None:
                raise ValueError(
                    f"{name}={given[name]!r} belongs to CapacityBurst: leave it out where there is a policy"
                )
        if not isinstance(policy, Policy):
            raise TypeError(f"policy must have the methods capacities() and observe(counts), unlike {policy!r}")
        if hasattr(policy, "sized"):
            policy.sized(self.max_priority, self.max_poll_records)
        return policy

    def _configurations(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        """One per level. Together they fetch ahead as much as one consumer would, in proportion to their capacities."""
        group = options.get("group.id")
        if not isinstance(group, str) or not group:
            raise ValueError(
                f"group.id={group!r} must be a name: level i of a topic is read in the group '<group.id>-i'"
            )
        capacities = self._capacities()
        records = _whole(options, "queued.min.messages", QUEUED_RECORDS)
        kbytes = _whole(options, "queued.max.messages.kbytes", QUEUED_KBYTES)
        plugins = [options["plugin.library.paths"]] if options.get("plugin.library.paths") else []
        return [
            {
                **options,
                "group.id": f"{group}-{level}",
                "enable.auto.offset.store": False,
                "queued.min.messages": max(2 * self.max_poll_records, records * own // max(1, sum(capacities))),
                "queued.max.messages.kbytes": max(1024, kbytes * own // max(1, sum(capacities))),
                "plugin.library.paths": ";".join([*plugins, _arrivals.plugin_path()]),
            }
            for level, own in enumerate(capacities)
        ]

    # ---- records

    def poll(self, timeout: float | None = -1) -> list[Message]:
        """Up to `max_poll_records` records, the highest level first; waits up to `timeout` seconds for the first.

        Without a timeout, or with a negative one, it waits for ever; Ctrl-C ends that. When librdkafka reports an error
        or a rebalance callback raises, that is raised, and records that had come already are returned by the next poll.
        """
        self._check_open()
        until = None if timeout is None or timeout < 0 else time.monotonic() + timeout
        if self._automatic and not self._manual:
            self._store_given()
        else:
            for level in self._levels:
                level.note_given()
        while True:
            counts = self._fill()
            if any(counts):
                break
            left = SERVE_S if until is None else min(SERVE_S, until - time.monotonic())
            if left <= 0:
                break
            self._bell.wait(left)
            self.policy.observe(counts)  # what nobody used may be another's
        self.policy.observe(counts)
        found: list[Message] = []
        for level, count in zip(reversed(self._levels), reversed(counts), strict=True):
            level.give(count, found)
        return found

    def _fill(self) -> list[int]:
        """Fetches what each level may have now; how many of each the poll is going to return.

        At most `max_poll_records` in all. Levels get what is theirs before one gets more than that.
        """
        granted = self._capacities()
        reserved = self._reserved(granted)
        bursting = [level for level, own in enumerate(granted) if own > reserved[level]][::-1]
        counts = [0] * len(granted)
        errors: list[Exception] = []
        left = self.max_poll_records
        for level in reversed(range(len(granted))):
            if bursting[:1] != [level]:  # the highest one gets all in one go, below
                counts[level] = self._levels[level].fill(min(granted[level], reserved[level], left), errors)
                left -= counts[level]
        for level in bursting:
            left += counts[level]
            counts[level] = self._levels[level].fill(min(granted[level], left), errors)
            left -= counts[level]
        _raise_together("poll", errors)
        return counts

    def _capacities(self) -> list[int]:
        found = self.policy.capacities()
        if len(found) != self.max_priority or any(not isinstance(one, int) or one < 0 for one in found):
            raise ValueError(
                f"the policy's capacities() must be {self.max_priority} whole numbers from 0 up, not {found!r}"
            )
        return found

    def _reserved(self, granted: list[int]) -> list[int]:
        found = getattr(self.policy, "reserved", None)
        return granted if found is None else list(found)

    def _store_given(self) -> None:
        """What the last poll returned counts as processed."""
        self._each("store_offsets", [(level, level.store_given) for level in self._living() if level.given])

    def priority_of(self, message: Message) -> int:
        """The level of a record."""
        return levels.level_of(message.topic() or "", self.max_priority)

    def logical_topic(self, message: Message) -> str:
        """The topic of a record without its level."""
        return levels.logical_topic(message.topic() or "")

    # ---- subscriptions

    def subscribe(
        self,
        topics: Sequence[str],
        on_assign: RebalanceCallback | None = None,
        on_revoke: RebalanceCallback | None = None,
        on_lost: RebalanceCallback | None = None,
    ) -> None:
        """Subscribes to all levels of logical topics; names that begin with `^` are regular expressions.

        Callbacks get this consumer and the partitions, of one level at a time. `on_lost` is called instead of
        `on_revoke` where others may have the partitions already; without it, `on_revoke` is.
        """
        self._check_open()
        if isinstance(topics, str) or not all(isinstance(topic, str) and topic for topic in topics):
            raise TypeError(f"topics must be a list of names, not {topics!r}")
        for name, callback in (("on_assign", on_assign), ("on_revoke", on_revoke), ("on_lost", on_lost)):
            if callback is not None and not callable(callback):
                raise TypeError(f"{name} must be callable, not {callback!r}")

        def subscribe(level: _Level) -> Callable[[], None]:
            names = [
                f"^({topic[1:].removesuffix('$')})-{level.number}$"
                if topic.startswith("^")
                else levels.level_topic(topic, level.number)
                for topic in topics
            ]
            callbacks = {
                "on_assign": level.reaction(self, on_assign, gone=False),
                "on_revoke": level.reaction(self, on_revoke, gone=True),
                "on_lost": level.reaction(self, on_lost if on_lost is not None else on_revoke, gone=True),
            }
            return lambda: level.consumer.subscribe(names, **callbacks)

        self._each("subscribe", [(level, subscribe(level)) for level in self._levels])

    def unsubscribe(self) -> None:
        """Leaves all groups. What was fetched and not returned is dropped."""
        self._check_open()
        if self._automatic and not self._manual:
            self._store_given()

        def leave(level: _Level) -> None:
            level.consumer.unsubscribe()
            level.forget()

        self._each("unsubscribe", [(level, partial(leave, level)) for level in self._levels])

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Reads these partitions and no others; in `on_assign`, of the level that is asked about."""
        self._by_level("assign", partitions, all_levels=True)

    def unassign(self) -> None:
        """Reads nothing any more; in `on_revoke`, of the level that is asked about."""
        self._check_open()
        if self._automatic and not self._manual:
            self._store_given()
        self._each("unassign", [(level, level.unassign) for level in self._reacting()])

    def incremental_assign(self, partitions: Sequence[TopicPartition]) -> None:
        self._by_level("incremental_assign", partitions)

    def incremental_unassign(self, partitions: Sequence[TopicPartition]) -> None:
        self._by_level("incremental_unassign", partitions)

    def _reacting(self) -> list[_Level]:
        """The level whose rebalance callback is running, else all."""
        return [level for level in self._levels if level.reacting] or self._levels

    # ---- offsets

    def commit(
        self,
        message: Message | None = None,
        offsets: Sequence[TopicPartition] | None = None,
        messages: Iterable[Message] | None = None,
        asynchronous: bool = True,
    ) -> list[TopicPartition] | None:
        """Commits what polls have returned, or the offsets after `message` or `messages`, or `offsets`.

        With `asynchronous=False` it waits and returns the committed offsets of all levels.
        """
        self._check_open()
        places = _places(message, messages, offsets)
        if places is not None:
            return self._by_level("commit", places, asynchronous=asynchronous, as_offsets=True)
        if not self._manual:
            self._store_given()
        nothing: list[KafkaException] = []

        def commit(level: _Level) -> list[TopicPartition]:
            try:
                return level.consumer.commit(asynchronous=asynchronous) or []
            except KafkaException as error:
                if error.args[0].code() != KafkaError._NO_OFFSET:
                    raise
                nothing.append(error)
                return []

        living = self._living()
        found = self._each("commit", [(level, partial(commit, level)) for level in living])
        if len(nothing) == len(living):
            raise nothing[0]
        return None if asynchronous else list(chain.from_iterable(found))

    def store_offsets(
        self,
        message: Message | None = None,
        offsets: Sequence[TopicPartition] | None = None,
        messages: Iterable[Message] | None = None,
    ) -> None:
        """Stores the offsets after `message` or `messages`, or `offsets`, for the next commit.

        Only with `enable.auto.offset.store` set to False: else the next poll would store its own.
        """
        self._check_open()
        if not self._manual:
            raise ValueError(
                "store_offsets() needs enable.auto.offset.store=False: else polls store offsets themselves"
            )
        places = _places(message, messages, offsets)
        if places is None:
            raise TypeError("store_offsets() needs message, messages or offsets")
        self._by_level("store_offsets", places, as_offsets=True)

    def seek(self, partition: TopicPartition) -> None:
        """Goes on at `partition.offset`."""
        self._check_open()
        level = self._levels[levels.level_of(partition.topic, self.max_priority)]
        level.consumer.seek(partition)
        level.forget([partition])
        level.start_at([partition])

    def pause(self, partitions: Sequence[TopicPartition]) -> None:
        """Brings no records of these partitions until `resume()`."""
        for level, own in self._split(partitions):
            level.give_back(own)
        self._by_level("pause", partitions)

    def resume(self, partitions: Sequence[TopicPartition]) -> None:
        self._by_level("resume", partitions)

    def position(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        """For each partition the offset after the last record that a poll returned."""
        self._check_open()
        found = self._each(
            "position",
            [(level, partial(level.position, own)) for level, own in self._split(partitions)],
        )
        return _in_order(partitions, chain.from_iterable(found))

    def committed(self, partitions: Sequence[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """The committed offset of each partition."""
        return _in_order(partitions, self._by_level("committed", partitions, timeout=timeout))

    def offsets_for_times(self, partitions: Sequence[TopicPartition], timeout: float = -1) -> list[TopicPartition]:
        """The first offset at or after each partition's `offset`, taken as a time in ms."""
        return _in_order(partitions, self._by_level("offsets_for_times", partitions, timeout=timeout))

    def assignment(self) -> list[TopicPartition]:
        """The partitions of all levels that are assigned to this consumer."""
        self._check_open()
        return list(chain.from_iterable(level.consumer.assignment() for level in self._living()))

    def get_watermark_offsets(
        self, partition: TopicPartition, timeout: float = -1, cached: bool = False
    ) -> tuple[int, int] | None:
        """(lowest, highest) offset of a partition."""
        self._check_open()
        level = self._levels[levels.level_of(partition.topic, self.max_priority)]
        found: tuple[int, int] | None = level.consumer.get_watermark_offsets(partition, timeout=timeout, cached=cached)
        return found

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """What brokers know about Kafka topics, by their own names."""
        self._check_open()
        return self._levels[0].consumer.list_topics(*([] if topic is None else [topic]), timeout=timeout)

    # ---- figures

    def stats(self) -> list[LevelStats]:
        """What each level has brought and may bring; index = level."""
        self._check_open()
        granted = self._capacities()
        reserved = self._reserved(granted)
        return [
            LevelStats(
                level.number, level.received, granted[i], max(0, granted[i] - reserved[i]), level.lag(), level.rate()
            )
            for i, level in enumerate(self._levels)
        ]

    # ---- the end

    def close(self) -> None:
        """Stores what the last poll returned, commits where that is automatic, and leaves all groups."""
        self._close(processed=True)

    def _close(self, processed: bool) -> None:
        if self._closed:
            return
        try:
            if processed and self._automatic and not self._manual:
                self._store_given()
        finally:
            try:
                self._each("close", [(level, level.close) for level in self._levels])
            finally:
                self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Whoever left by an exception has not processed what the last poll returned.
        self._close(processed=error is None)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"levels={self.max_priority}"
        return f"<CapacityBurstConsumer {state} max_poll_records={self.max_poll_records} policy={self.policy!r}>"

    # ---- all levels

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("Consumer closed")

    def _living(self) -> list[_Level]:
        """All, but for those that are closed already when a callback runs while the others are being closed."""
        return [level for level in self._levels if not level.closed]

    def _split(self, partitions: Sequence[TopicPartition]) -> list[tuple[_Level, list[TopicPartition]]]:
        """Partitions by level; topics without one, or beyond the highest, are refused."""
        found: dict[int, list[TopicPartition]] = {}
        for place in partitions:
            found.setdefault(levels.level_of(place.topic, self.max_priority), []).append(place)
        return [(self._levels[level], found[level]) for level in sorted(found, reverse=True)]

    def _by_level(
        self,
        name: str,
        partitions: Sequence[TopicPartition],
        *,
        all_levels: bool = False,
        as_offsets: bool = False,
        **options: Any,
    ) -> list[TopicPartition]:
        """Calls a method of each level's consumer with its partitions; the joined answers."""
        self._check_open()
        parts = {level.number: (level, own) for level, own in self._split(partitions)}
        if all_levels:
            asked = self._reacting()
            foreign = [own[0].topic for level, own in parts.values() if level not in asked]
            if foreign:
                raise ValueError(f"{name}() is about level {asked[0].number} here, and {foreign[0]!r} is of another")
            parts = {level.number: (level, parts.get(level.number, (level, []))[1]) for level in asked}

        def call(level: _Level, own: list[TopicPartition]) -> list[TopicPartition]:
            method = getattr(level.consumer, name)
            level.assigned = None
            answer = (method(offsets=own, **options) if as_offsets else method(own, **options)) or []
            if name == "assign":
                level.forget()
            elif name == "incremental_unassign":
                level.forget(own)
            if name in ("assign", "incremental_assign"):
                level.start_at(own)
            return answer

        calls = [(level, partial(call, level, own)) for level, own in parts.values()]
        return list(chain.from_iterable(self._each(name, calls)))

    @staticmethod
    def _each(name: str, calls: Iterable[tuple[_Level, Callable[[], R]]]) -> list[R]:
        """All of them, though one fails; the errors are raised together."""
        found: list[R] = []
        errors: list[Exception] = []
        for level, call in calls:
            try:
                found.append(call())
            except Exception as error:
                error.add_note(f"level {level.number}")
                errors.append(error)
        if errors:
            raise ExceptionGroup(f"{name}() failed in {len(errors)} of {len(found) + len(errors)} levels", errors)
        return found


class _Level:
    """One level: its consumer, and what that has brought before it may be returned."""

    def __init__(self, number: int, consumer: Consumer, max_poll_records: int, raised: list[BaseException]) -> None:
        self.number = number
        self.consumer: Any = consumer  # whose type hints know messages without a topic
        self.given = False  # the last poll returned something of it
        self.received = 0
        self.reacting = False  # a rebalance callback is running
        self.closed = False
        self.assigned: list[TopicPartition] | None = None  # a copy of the assignment
        self._most = max_poll_records
        self._held: list[Any] = []
        self._fetched: list[Any] = []  # by a call that is not over
        self._back: dict[tuple[str, int], int] = {}  # where partitions were given back that have brought nothing since
        self._gone: set[tuple[str, int]] = set()  # partitions that were revoked in it
        self._returned: dict[tuple[str, int], int] = {}  # offsets after what polls returned before this one
        self._noted = True  # the last poll's are among them
        self._starts: dict[tuple[str, int], int] = {}  # where the user sent partitions that have brought nothing since
        self._astray = False  # librdkafka goes on behind records that nobody has seen
        self._served = 0.0
        self._raised = raised  # by callbacks, while confluent-kafka would drop records for it
        self._history: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def fill(self, wanted: int, errors: list[Exception]) -> int:
        """Fetches without waiting until so many are held; how many of those there are."""
        missing = wanted - len(self._held)
        if missing <= 0 and time.monotonic() >= self._served + SERVE_S:
            # To be looked after, or it would have to leave its group. What that brings stays held.
            if len(self._held) >= self._most:
                self.give_back()
            missing = max(1, wanted - len(self._held))
        if missing > 0:
            try:
                self._fetch(missing)
            except Exception as error:
                error.add_note(f"level {self.number}")
                errors.append(error)
            if self._held and _arrivals.any_error(self._held):
                self._sort_out(errors)
        while self._raised:
            raised = self._raised.pop(0)
            if not isinstance(raised, Exception):
                raise raised  # as Ctrl-C
            errors.append(raised)
        return min(wanted, len(self._held))

    def _fetch(self, count: int) -> None:
        """Adds up to so many to those held."""
        if self._astray:
            self._go_back()
        self._served = time.monotonic()
        self._gone.clear()
        try:
            # In one go for the interpreter: a signal that is noticed after the call finds the records in the list.
            self._fetched.extend(chain.from_iterable(map(self.consumer.consume, (count,), (0,))))
        except BaseException as error:
            # confluent-kafka drops what a call has fetched when a signal's handler raises in it.
            self._astray = True
            self._held, self._fetched = [], []
            try:
                self._go_back()
            except KafkaException as problem:
                error.add_note(
                    f"level {self.number} will go back to what nobody has seen with the next poll: {problem}"
                )
            raise
        if self._gone:  # revoked in this very call
            self._fetched = [one for one in self._fetched if (one.topic(), one.partition()) not in self._gone]
        self._held += self._fetched
        self._fetched = []

    def _go_back(self) -> None:
        """To behind what polls have returned, or where the user or the last commit began: none is left out."""
        for place in self.consumer.assignment():
            key = (place.topic, place.partition)
            offset = self._returned.get(key, self._starts.get(key, -1))
            if offset < 0:
                if self.consumer.position([place])[0].offset < 0:
                    continue  # it has brought nothing
                offset = self.consumer.committed([place], timeout=ASK_S)[0].offset
            try:
                self.consumer.seek(TopicPartition(*key, offset if offset >= 0 else OFFSET_BEGINNING))
            except KafkaException as error:
                if error.args[0].code() != KafkaError._STATE:  # which is: not fetched from
                    raise
        self._astray = False

    def _sort_out(self, errors: list[Exception]) -> None:
        """Errors are no records, except for the end of a partition, of which somebody wants to know."""
        kept: list[Message] = []
        for message in self._held:
            error = message.error()
            if error is None or error.code() == KafkaError._PARTITION_EOF:
                kept.append(message)
            else:
                errors.append(KafkaException(self._explained(error)))
        self._held = kept

    def _explained(self, error: KafkaError) -> KafkaError:
        text = f"level {self.number}: {error.str()}"
        if error.code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
            text += " (PriorityProducer.create_topics() makes the topics of all levels)"
        return KafkaError(error.code(), text, error.fatal(), error.retriable(), error.txn_requires_abort())

    def give(self, count: int, to: list[Message]) -> None:
        """Takes so many of those held."""
        if not count:
            return
        if count == len(self._held):
            to.extend(self._held)
            self._held = []
        else:
            to.extend(self._held[:count])
            del self._held[:count]
        self.given = True
        self._noted = False
        self.received += count
        now = time.monotonic()
        if now - self._history[-1][0] >= RATE_S / 10:
            self._history.append((now, self.received))
            while now - self._history[0][0] > RATE_S:
                self._history.popleft()

    def note_given(self) -> None:
        """Notes where what was returned ends, before anything else is fetched."""
        if self._noted:
            return
        if self.assigned is None:
            self.assigned = self.consumer.assignment()
        for place in self.position(self.assigned):
            if place.offset >= 0:
                self._returned[(place.topic, place.partition)] = place.offset
        self._noted = True

    def store_given(self) -> None:
        self.note_given()
        self.given = False
        if self._returned:
            with suppress(_NotAssigned):
                _stored(self.consumer, [TopicPartition(*key, offset) for key, offset in self._returned.items()])

    def position(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """After what was returned: what is held counts as not read."""
        places: list[TopicPartition] = self.consumer.position(partitions)
        first = self._first_held()
        for place in places:
            key = (place.topic, place.partition)
            place.offset = first.get(key, place.offset if place.offset >= 0 else self._back.get(key, place.offset))
        return places

    def _first_held(self) -> dict[tuple[str, int], int]:
        first: dict[tuple[str, int], int] = {}
        for message in self._held:
            first.setdefault((message.topic(), message.partition()), message.offset())
        return first

    def forget(self, partitions: list[TopicPartition] | None = None) -> None:
        """Drops what is held, of all partitions or these."""
        self.assigned = None
        if partitions is None:
            self._held = []
            for known in (self._back, self._returned, self._starts):
                known.clear()
            return
        gone = {(place.topic, place.partition) for place in partitions}
        for key in gone:
            for known in (self._back, self._returned, self._starts):
                known.pop(key, None)
        if self._held:
            self._held = [one for one in self._held if (one.topic(), one.partition()) not in gone]

    def start_at(self, partitions: list[TopicPartition]) -> None:
        """The user has chosen offsets."""
        self._starts.update({(place.topic, place.partition): place.offset for place in partitions if place.offset >= 0})

    def give_back(self, partitions: list[TopicPartition] | None = None) -> None:
        """Lets librdkafka fetch again what is held, of all partitions or these."""
        first = self._first_held()
        wanted = None if partitions is None else {(place.topic, place.partition) for place in partitions}
        for (topic, partition), offset in first.items():
            if wanted is None or (topic, partition) in wanted:
                self.consumer.seek(TopicPartition(topic, partition, offset))
                self._held = [one for one in self._held if (one.topic(), one.partition()) != (topic, partition)]
                self._back[(topic, partition)] = offset

    def reaction(
        self, whole: CapacityBurstConsumer, callback: RebalanceCallback | None, gone: bool
    ) -> Callable[[Consumer, list[TopicPartition]], None]:
        """A callback for librdkafka. What the user's raises is kept: confluent-kafka would drop the poll's records."""

        def react(_: Consumer, partitions: list[TopicPartition]) -> None:
            self.assigned = None
            self.reacting = True
            try:
                if callback is not None:
                    callback(whole, partitions)
            except BaseException as error:
                error.add_note(f"in a rebalance callback of level {self.number}")
                self._raised.append(error)
            finally:
                self.reacting = False
                if gone:
                    self.forget(partitions)
                    for place in partitions:
                        self._gone.add((place.topic, place.partition))

        return react

    def unassign(self) -> None:
        self.forget()
        self.consumer.unassign()

    def lag(self) -> int | None:
        if self.assigned is None:
            self.assigned = self.consumer.assignment()
        total: int | None = None
        for place in self.position(self.assigned):
            ends = self.consumer.get_watermark_offsets(place, cached=True)
            if ends is not None and ends[1] >= 0:
                at = place.offset if place.offset >= 0 else ends[0]
                total = (total or 0) + max(0, ends[1] - max(at, ends[0]))
        return total

    def rate(self) -> float:
        since, then = self._history[0]
        return (self.received - then) / max(1e-9, time.monotonic() - since)

    def close(self) -> None:
        try:
            self.consumer.close()
        finally:
            self.closed = True
            self._held = []
        if self._raised:
            raise self._raised[0]


class _Bell:
    """Rung by librdkafka when any of the consumers has something."""

    def __init__(self) -> None:
        self._read, self.descriptor = os.pipe()
        for end in (self._read, self.descriptor):
            os.set_blocking(end, False)
        self._poll = select.poll()
        self._poll.register(self._read, select.POLLIN)

    def wait(self, seconds: float) -> None:
        if self._poll.poll(max(0.0, seconds) * 1000):
            with suppress(BlockingIOError):
                os.read(self._read, 65_536)

    def __del__(self) -> None:
        for end in (self._read, self.descriptor):
            os.close(end)


class _NotAssigned(Exception):
    """The partitions have gone to another consumer."""


def _whole(options: Mapping[str, Any], name: str, default: int) -> int:
    try:
        return int(options.get(name, default))
    except (TypeError, ValueError):
        raise ValueError(f"{name}={options[name]!r} must be a whole number") from None


def _kept(callback: Callable[..., Any], raised: list[BaseException]) -> Callable[..., Any]:
    """A callback whose exceptions are raised by the poll: confluent-kafka would drop the poll's records for them."""

    def call(*arguments: Any) -> Any:
        try:
            return callback(*arguments)
        except BaseException as error:
            raised.append(error)

    return call


def _stored(consumer: Consumer, places: list[TopicPartition]) -> None:
    try:
        consumer.store_offsets(offsets=places)
    except KafkaException as error:
        if error.args[0].code() == KafkaError._STATE:
            raise _NotAssigned() from error
        raise


def _places(
    message: Message | None, messages: Iterable[Message] | None, offsets: Sequence[TopicPartition] | None
) -> list[TopicPartition] | None:
    """The offsets after the last record of each partition, or those given; None if nothing was."""
    if sum(given is not None for given in (message, messages, offsets)) > 1:
        raise ValueError("give one of message, messages and offsets")
    if offsets is not None:
        return list(offsets)
    if message is not None:
        messages = [message]
    if messages is None:
        return None
    found: dict[tuple[str, int], int] = {}
    one: Any
    for one in messages:
        if one.error() is None:
            key = (one.topic(), one.partition())
            found[key] = max(found.get(key, 0), one.offset() + 1)
    return [TopicPartition(topic, partition, offset) for (topic, partition), offset in found.items()]


def _in_order(wanted: Sequence[TopicPartition], found: Iterable[TopicPartition]) -> list[TopicPartition]:
    known = {(place.topic, place.partition): place for place in found}
    return [known[(place.topic, place.partition)] for place in wanted]


def _raise_together(name: str, errors: list[Exception]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup(f"{name}() found {len(errors)} errors", errors)
