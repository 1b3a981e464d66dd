"""Looking at groups from outside, and setting a position by hand.

list_groups       groups are found by the names of their coordination topics
describe_group    members and what they own, as brokers tell; positions from the group's offsets and the compacted topic
reset_position    refused while the group has members. It joins the group itself, and commits as a member: if another
                  one joins meanwhile, brokers refuse the commit, so that nobody goes on from a position that is not
                  the one that was set
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from fastprod import _positions
from fastprod.errors import RebalanceError
from fastprod.groups import assignment as places
from fastprod.groups.group import ProducerGroup

__all__ = ["Described", "Member", "Partition", "describe_group", "list_groups", "reset_position"]


@dataclass(frozen=True, slots=True)
class Member:
    """One that brokers know of."""

    id: str
    instance_id: str | None
    client_id: str
    host: str
    partitions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Partition:
    """A source partition."""

    partition: int
    owner: str | None
    """The id of the member that has it."""
    position: str | None
    """Where it goes on; None if nothing was ever committed."""
    committed_at: float | None
    """Seconds since 1970."""
    problem: str | None = None
    """Why nobody can go on from here, if so."""

    @property
    def age_s(self) -> float | None:
        """Of the last commit, by the clock of this machine."""
        return None if self.committed_at is None else max(0.0, time.time() - self.committed_at)


@dataclass(frozen=True, slots=True)
class Described:
    """A group."""

    group_id: str
    state: str
    members: list[Member] = field(default_factory=list)
    partitions: list[Partition] = field(default_factory=list)


def list_groups(config: Mapping[str, Any]) -> list[Described]:
    """All groups, by name, without their positions."""
    admin = AdminClient(_positions.client_options(config))
    topics = admin.list_topics(timeout=_positions.ANSWER_S).topics
    names = sorted(name.removeprefix(places.COORDINATION) for name in topics if name.startswith(places.COORDINATION))
    found = []
    for name in names:
        state, members = _members(admin, name)
        count = len(topics[places.coordination_topic(name)].partitions)
        owners = _owners(members)
        parts = [Partition(number, owners.get(number), None, None) for number in range(count)]
        found.append(Described(name, state, members, parts))
    return found


def describe_group(config: Mapping[str, Any], group_id: str, timeout: float = 30.0) -> Described:
    """A group with its members and positions. ValueError if there is none of that name."""
    admin = AdminClient(_positions.client_options(config))
    count = _partition_count(admin, group_id)
    state, members = _members(admin, group_id)
    owners = _owners(members)
    parts = []
    with _positions.reader(config, group_id) as consumer:
        positions = places.Positions(config, group_id, consumer)
        try:
            for number in range(count):
                position, at, problem = _position(positions, number, timeout)
                parts.append(Partition(number, owners.get(number), position, at, problem))
        finally:
            positions.close()
    return Described(group_id, state, members, parts)


def reset_position(config: Mapping[str, Any], group_id: str, partition: int, position: str) -> None:
    """Lets a source partition go on from `position`. RuntimeError while the group has members."""
    admin = AdminClient(_positions.client_options(config))
    count = _partition_count(admin, group_id)
    if not 0 <= partition < count:
        raise ValueError(f"partition {partition} must be from 0 to {count - 1}: group {group_id!r} has {count}")
    _, members = _members(admin, group_id)
    if members:
        raise RuntimeError(
            f"group {group_id!r} has {len(members)} members, who would go on from where they are: end them first, or "
            f"wait for the sessions of those that died. They are {', '.join(one.id for one in members)}"
        )
    with _Setter(config, group_id, count) as setter:
        setter.subscribe()
        try:
            setter.set(partition, position)
        except RebalanceError as problem:
            raise RuntimeError(
                f"a member has joined group {group_id!r} meanwhile: the position was not set. End it first"
            ) from problem


class _Setter(ProducerGroup):
    """A member for a moment. It takes no positions over, so it does not mind if they differ."""

    _takes_positions = False

    def set(self, partition: int, position: str) -> None:
        if len(self.assignment) < self.source_partition_count:
            self._interrupt("another member has joined")
        self.commit_transaction({partition: position})


def _partition_count(admin: AdminClient, group_id: str) -> int:
    topic = places.coordination_topic(group_id)
    found = admin.list_topics(topic, timeout=_positions.ANSWER_S).topics.get(topic)
    if found is None or found.error is not None:
        raise ValueError(f"there is no producer group {group_id!r}: its topic {topic!r} does not exist")
    return len(found.partitions)


def _members(admin: AdminClient, group_id: str) -> tuple[str, list[Member]]:
    try:
        told = admin.describe_consumer_groups([group_id], request_timeout=_positions.ANSWER_S)[group_id].result()
    except KafkaException as problem:
        if problem.args[0].code() != KafkaError.GROUP_ID_NOT_FOUND:  # Kafka 4 says so of a group without offsets
            raise
        return "EMPTY", []
    members = [
        Member(
            one.member_id,
            one.group_instance_id,
            one.client_id,
            one.host,
            tuple(sorted(place.partition for place in (one.assignment.topic_partitions if one.assignment else ()))),
        )
        for one in told.members
    ]
    return told.state.name, sorted(members, key=lambda one: one.id)


def _owners(members: list[Member]) -> dict[int, str]:
    return {partition: one.id for one in members for partition in one.partitions}


def _position(positions: places.Positions, number: int, timeout: float) -> tuple[str | None, float | None, str | None]:
    try:
        found = positions.read([number], timeout)
    except places.PositionsDiffer as problem:
        return None, None, str(problem)
    if found is None:
        return None, None, f"not known within {timeout:g} s: a transaction is not over, or brokers do not answer"
    document = found[number]
    if document is None:
        return None, None, None
    return document["position"], document["at"] / 1e3, None
