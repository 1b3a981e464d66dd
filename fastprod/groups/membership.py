"""Who owns which source partition: one consumer per member, and the brokers' group protocol decides.

The coordination topic has a partition for each source partition. It stays empty. A member's consumer is assigned some
of its partitions, positioned at the beginning and paused: it never reads, it only owns.

    librdkafka's threads     heartbeats; join and sync when a rebalance begins
         |
    poll() of the caller     runs the callbacks below; they only note what happened, as a Change
         |
    ProducerGroup            drops its transaction, reads positions, tells the listener

The protocol is the eager one: with every rebalance a member first gives up all that it has, then gets its share. The
members' ids begin with the time at which they were made, so the oldest member has the lowest partitions.

What a member may commit is tied to the generation in which it got its partitions. `proof()` reads the group's metadata
when it is called, compares it with that of the assignment, and refuses it if this consumer is no member any more: a
broker takes a negative generation or an empty member id for a client without a group, and checks nothing then.
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from fastprod import _positions

__all__ = ["Change", "Membership", "NotAMember", "consumer_options", "heartbeat_ms"]

# Errors that polling again does not end. librdkafka would go on trying in silence.
REFUSALS = (
    KafkaError.INVALID_SESSION_TIMEOUT,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.INCONSISTENT_GROUP_PROTOCOL,
    KafkaError.INVALID_GROUP_ID,
    KafkaError.GROUP_MAX_SIZE_REACHED,
    KafkaError.FENCED_INSTANCE_ID,
)
UNREACHABLE = (KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE)
CLOSE_S = 5.0  # beside the session: after that others have the partitions anyway
MISSING_S = 5.0  # for brokers to tell each other of a new topic, before it counts as deleted
PRODUCERS_OWN = (  # that mean something else to a consumer, or nothing
    "transactional.id",
    "transaction.timeout.ms",
    "message.timeout.ms",
    "statistics.interval.ms",
    "stats_cb",
    "error_cb",
)


class NotAMember(Exception):
    """This consumer is not, or no more, what it was when it got its partitions."""


@dataclass(frozen=True, slots=True)
class Change:
    """What the group has decided about this member."""

    kind: Literal["assigned", "revoked", "lost"]
    partitions: tuple[int, ...]


def heartbeat_ms(session_timeout_ms: int) -> int:
    """How often a member shows that it lives, and learns that others have come or gone."""
    return max(100, min(1000, session_timeout_ms // 10))


def consumer_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a producer's configuration a consumer needs: how to reach the brokers."""
    options = _positions.client_options(config)
    return {name: value for name, value in options.items() if name not in PRODUCERS_OWN}


class Membership:
    """One member of a group. It is used by one thread."""

    def __init__(
        self, config: Mapping[str, Any], group_id: str, topic: str, session_timeout_ms: int, instance_id: str | None
    ) -> None:
        self.topic = topic
        self._config = config
        self._group_id = group_id
        self._session_timeout_ms = session_timeout_ms
        self.member: _positions.Member | None = None  # since the last assignment; None while there is none
        self.trouble: str | None = None  # the last thing that librdkafka complained about
        self.changes: deque[Change] = deque()
        """What the group has decided. Whoever has acted on one takes it out: an exception in between loses none."""
        self._fatal: KafkaError | None = None
        self._missing_since: float | None = None
        self._interrupted = False  # a poll was, and the group has to be joined anew
        self._closing = False
        self._static = instance_id is not None
        name = config.get("client.id", "fastprod")
        own = {
            "client.id": f"{time.time_ns():020d}-{name}",  # what a member's id begins with: see above
            "group.id": group_id,
            "session.timeout.ms": session_timeout_ms,
            # An application that hangs calls nothing: it loses its membership like one that is gone.
            "max.poll.interval.ms": session_timeout_ms,
            "heartbeat.interval.ms": heartbeat_ms(session_timeout_ms),
            "partition.assignment.strategy": "range",
            "isolation.level": "read_committed",  # positions of transactions that are not over are not told
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "allow.auto.create.topics": False,
            "error_cb": self._note,
        }
        if instance_id is not None:
            own["group.instance.id"] = instance_id
        self.consumer = Consumer({**consumer_options(config), **own})

    def reachable(self, timeout: float) -> bool:
        """Whether any broker answers."""
        try:
            self.consumer.list_topics(timeout=timeout)
        except KafkaException as problem:
            self.consumer.poll(0.0)  # runs error_cb, which knows more
            self.trouble = self.trouble or problem.args[0].str()
            if problem.args[0].code() not in UNREACHABLE:
                raise
            return False
        return True

    def join(self) -> None:
        self.consumer.subscribe([self.topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost)

    def poll(self, timeout: float) -> None:
        """Shows that the application lives; new `changes` come in here. Waits for one up to `timeout` seconds."""
        if self._interrupted:
            self._interrupted = False
            self.changes.append(Change("lost", ()))
            self.consumer.unsubscribe()
            self.join()
        while (message := self._polled(timeout)) is not None:
            error = message.error()
            if error is not None:
                self.trouble = error.str()
                if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    self._missing_since = self._missing_since or time.monotonic()
                if error.fatal() or error.code() == KafkaError._FATAL:
                    self._fatal = error  # of which librdkafka tells once
                if error.code() in REFUSALS:
                    raise KafkaException(self._explained(error))
            timeout = 0.0  # what the error is about may come right behind it
        if self._fatal is not None:
            raise KafkaException(self._explained(self._fatal))
        self._check_topic()

    def _polled(self, timeout: float) -> Any:
        """One poll. If Ctrl-C ends it, a callback may not have run, and nobody knows what the group decided."""
        try:
            return self.consumer.poll(timeout)
        except BaseException:
            self.member = None
            self._interrupted = True
            raise

    def _check_topic(self) -> None:
        """Raises if the coordination topic is gone. librdkafka tells once, also of a topic that is too new."""
        if self._missing_since is None or time.monotonic() < self._missing_since + MISSING_S:
            return
        self._missing_since = None
        if not _positions.has_place(self.consumer, self.topic):
            self._missing_since = time.monotonic()  # the next call raises too
            gone = f"the group's topic {self.topic!r} is gone, and with it the positions in the group's offsets"
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART, gone))

    def _explained(self, error: KafkaError) -> KafkaError:
        """The same error, with what to do about it where we know."""
        remedy = None
        if error.code() == KafkaError.INVALID_SESSION_TIMEOUT:
            remedy = (
                f"session_timeout_ms={self._session_timeout_ms} is not allowed by the brokers' "
                "group.min.session.timeout.ms and group.max.session.timeout.ms"
            )
        elif error.code() == KafkaError.FENCED_INSTANCE_ID or "group.instance.id" in error.str():
            remedy = "another member has come with the same instance_id: each needs its own"
        if remedy is None:
            return error
        return KafkaError(error.code(), f"{remedy} ({error.str()})", self._fatal is not None)

    def proof(self) -> bytes:
        """The group's metadata, which brokers compare with what they know; read now, and found to be good."""
        metadata: bytes = self.consumer.consumer_group_metadata()
        member = _positions.member_of(metadata)
        self.check(member)
        return metadata

    def check(self, member: _positions.Member) -> None:
        if member.generation < 0 or not member.id:
            raise NotAMember("this member has lost its place in the group")
        if member != self.member:
            raise NotAMember("the group has been rebalanced")

    def confirmed(self, timeout: float) -> bool:
        """Whether brokers know this member, in a group that has decided. What librdkafka knows of it may be old.

        A member stays known with another generation only if it has joined again, which would be among `changes`.
        """
        member = self.member
        if member is None or self.changes:
            return False
        # Not describe_consumer_groups: requests of the admin client were seen to crash librdkafka 2.16 (enq_once,
        # refcnt > 0) when brokers come and go meanwhile.
        client = AdminClient(_positions.client_options(self._config))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                (group,) = client.list_groups(self._group_id, timeout=timeout)
        except (KafkaException, ValueError):
            return False
        return group.state == "Stable" and any(one.id == member.id for one in group.members)

    def close(self) -> None:
        """Leaves the group at once; a member with an instance_id keeps its place until its session is over."""
        self.member = None
        self._closing = True
        leaving = threading.Thread(target=self._leave, name="fastprod group leaves", daemon=True)
        leaving.start()
        leaving.join(self._session_timeout_ms / 1e3 + CLOSE_S)
        if leaving.is_alive():
            warnings.warn("librdkafka did not leave the group in time: its session ends by itself", RuntimeWarning, 2)

    def _leave(self) -> None:
        """Closes the consumer when no rebalance is under way any more.

        librdkafka tells of a rebalance also when the group has been closed meanwhile, and then drops, without an
        answer, the assign() that has to follow: close() never returns. So the group is left first. A static member
        must not do that, or it would lose its place; it hears of what is under way, as far as it has come.
        """
        until = time.monotonic() + CLOSE_S
        try:
            if not self._static:
                self.consumer.unsubscribe()
            self.consumer.poll(0.0)
            while not self._static and self._is_member() and time.monotonic() < until:
                self.consumer.poll(0.01)
        except (KafkaException, RuntimeError):
            pass  # a fatal error: there is nothing to leave
        with contextlib.suppress(KafkaException, RuntimeError):
            self.consumer.close()

    def _is_member(self) -> bool:
        return bool(self.consumer.assignment() or _positions.member_of(self.consumer.consumer_group_metadata()).id)

    # ---- librdkafka's callbacks, on the thread that polls

    def _assigned(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        if self._closing:  # confluent-kafka assigns by itself what a callback does not
            return
        self.member = _positions.member_of(consumer.consumer_group_metadata())
        self._changed("assigned", places)
        wanted = [TopicPartition(place.topic, place.partition, 0) for place in places]
        consumer.assign(wanted)
        if wanted:
            consumer.pause(wanted)

    def _revoked(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        self.member = None
        self._changed("revoked", places)
        consumer.unassign()

    def _lost(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        self.member = None
        self._changed("lost", places)
        consumer.unassign()

    def _changed(self, kind: Literal["assigned", "revoked", "lost"], places: list[TopicPartition]) -> None:
        self.changes.append(Change(kind, tuple(sorted(place.partition for place in places))))

    def _note(self, error: KafkaError) -> None:
        self.trouble = error.str()
