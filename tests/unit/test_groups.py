"""Producer groups without a broker: arguments, the form of positions, and what a group's metadata says."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from fastprod import RebalanceError, _positions
from fastprod.groups import ProducerGroup, assignment, membership
from fastprod.groups.membership import Change

CONFIG = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0}


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "options", "said"),
    [
        ((), {}, "group_id is missing: give it as an argument, or as group.id"),
        (("g",), {}, "source_partition_count is missing: give it as an argument"),
        (("a b", 3), {}, "group_id='a b' must be a name of 1 to 200 of the characters"),
        (("", 3), {}, "group_id='' must be a name"),
        ((7, 3), {}, "group_id=7 must be a name"),
        (("x" * 201, 3), {}, "must be a name of 1 to 200"),
        (("g", 0), {}, "source_partition_count=0 must be a whole number from 1"),
        (("g", True), {}, "source_partition_count=True must be a whole number"),
        (("g", "three"), {}, "source_partition_count='three' must be a whole number"),
        (("g", 3.0), {}, "source_partition_count=3.0 must be a whole number"),
        (("g", 3), {"session_timeout_ms": 10}, "session_timeout_ms=10 must be a whole number from 2000"),
        (("g", 3), {"session_timeout_ms": "soon"}, "session_timeout_ms='soon' must be a whole number"),
        (("g", 3), {"instance_id": "a/b"}, "instance_id='a/b' must be a name .* because transactions are named after"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(arguments: Any, options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        ProducerGroup(CONFIG, *arguments, **options)


@pytest.mark.parametrize("config", [None, "localhost:9092", 7])
def test_a_configuration_is_a_dict(config: Any) -> None:
    with pytest.raises(TypeError, match=r'config must be a dict like \{"bootstrap.servers": "host:9092"\}, not'):
        ProducerGroup(config, "g", 3)


def test_brokers_must_be_named() -> None:
    with pytest.raises(ValueError, match=r'the config has no "bootstrap.servers"'):
        ProducerGroup({}, "g", 3)


def test_a_transaction_must_end_before_the_session() -> None:
    with pytest.raises(ValueError, match=r"transaction.timeout.ms=6000 must be below session_timeout_ms=6000"):
        ProducerGroup({**CONFIG, "transaction.timeout.ms": 6000}, "g", 3, session_timeout_ms=6000)


def test_the_kips_names_work_in_the_configuration() -> None:
    config = {**CONFIG, "group.id": "ProducerForDB1", "source.partition.count": "3", "session.timeout.ms": 20_000}
    with ProducerGroup(config) as group:
        assert (group.group_id, group.source_partition_count, group.session_timeout_ms) == ("ProducerForDB1", 3, 20_000)
    with pytest.raises(ValueError, match=r"source_partition_count=4, but source.partition.count=3 in the config"):
        ProducerGroup(config, source_partition_count=4)


def test_an_option_that_librdkafka_refuses_leaves_nothing_behind() -> None:
    with pytest.raises(KafkaException, match="compression"):
        ProducerGroup({**CONFIG, "compression.type": "wishful"}, "g", 3)


def test_calls_out_of_turn_are_told_what_comes_first() -> None:
    group = ProducerGroup(CONFIG, "g", 3)
    for call in (group.alive, group.abort, lambda: group.commit_transaction("1")):
        with pytest.raises(RuntimeError, match=r"call subscribe\(\) first"):
            call()
    with pytest.raises(RuntimeError, match=r"call subscribe\(\) first"):
        group.produce("t", b"", source_partition=0)
    assert group.assignment == {}
    group.close()
    group.close()
    for call in (group.alive, group.subscribe, lambda: group.commit_transaction("1")):
        with pytest.raises(RuntimeError, match="ProducerGroup has been closed"):
            call()
    assert "closed" in repr(group)


def test_a_listener_without_its_methods_is_refused() -> None:
    class Deaf:
        def on_assigned(self, assignment: dict[int, str | None]) -> None: ...

    with ProducerGroup(CONFIG, "g", 3) as group, pytest.raises(TypeError, match="has no on_revoked"):
        group.subscribe(Deaf())  # type: ignore[arg-type]


def test_a_timeout_is_a_number_of_seconds() -> None:
    with ProducerGroup(CONFIG, "g", 3) as group, pytest.raises(ValueError, match="timeout=-1 must be a number"):
        group.subscribe(timeout=-1)


def test_rebalance_error_is_a_kafka_exception() -> None:
    assert issubclass(RebalanceError, KafkaException)


# ---- positions


@pytest.mark.parametrize("position", ["", "17", "12:34:00", "a\0b", "é☃😀", '{"x": 1}', "\ud800", "]}\n" * 3])
def test_a_position_comes_back_as_it_was_whatever_follows_it(position: str) -> None:
    kept = assignment.written(position, 5)
    assert kept.metadata.isascii()
    assert "\0" not in kept.metadata
    for garbage in ("", "\0", "}{", " garbage", kept.metadata):
        document = _positions.decoded(kept.metadata + garbage)
        assert document == {"position": position, "at": 5}
    assert _positions.decoded(kept.record.decode()) == {"position": position, "at": 5}


@pytest.mark.parametrize("text", [None, "", "17", "[1]", '{"position": "1', "nonsense"])
def test_what_is_no_document_is_none(text: str | None) -> None:
    assert _positions.decoded(text) is None


@pytest.mark.parametrize("length", [10, 4040, 4060, 4095, 4096, 100_000])
def test_metadata_never_grows_beyond_what_brokers_take(length: int) -> None:
    position = "x" * length
    kept = assignment.written(position, 1_700_000_000_000)
    assert len(kept.metadata) <= 4095
    record = _positions.decoded(kept.record.decode())
    assert record is not None
    assert record["position"] == position
    assert assignment.agree(_positions.decoded(kept.metadata), record)
    other = {**record, "position": "y" * length}
    assert not assignment.agree(_positions.decoded(kept.metadata), other)


def test_both_places_must_say_the_same() -> None:
    one, other = {"position": "1", "at": 1}, {"position": "1", "at": 2}
    assert assignment.agree(None, None)
    assert assignment.agree(one, dict(one))
    assert not assignment.agree(one, other)
    assert not assignment.agree(one, None)
    assert not assignment.agree(None, one)


def test_a_position_that_fits_into_no_record_is_refused() -> None:
    assignment.check_long(0, "x" * 900_000, {})
    with pytest.raises(ValueError, match=r"the position of source partition 2 takes 1,000,0\d\d bytes, and 998,976"):
        assignment.check_long(2, "x" * 1_000_000, {})


# ---- the group's metadata


def test_a_consumer_that_never_joined_is_no_member() -> None:
    one = membership.Membership(CONFIG, "some-group", "t", 6000, "me")
    try:
        found = _positions.member_of(one.consumer.consumer_group_metadata())
        assert found == (-1, "")
        with pytest.raises(membership.NotAMember, match="lost its place"):
            one.proof()
    finally:
        one.close()


def test_generation_and_member_are_read_from_librdkafkas_bytes() -> None:
    text = b"CGMDv2:" + (17).to_bytes(4, "little") + b"group\0member-1\0\0me\0"
    assert _positions.member_of(text) == (17, "member-1")
    for strange in (b"", b"CGMDv3:" + text[7:], text[:16]):
        with pytest.raises(RuntimeError, match="in a form that fastprod does not know"):
            _positions.member_of(strange)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ((-1, "m"), "lost its place"),
        ((3, ""), "lost its place"),
        ((4, "m"), "rebalanced"),
        ((3, "n"), "rebalanced"),
    ],
)
def test_only_the_member_that_was_assigned_may_commit(now: tuple[int, str], said: str) -> None:
    one = membership.Membership(CONFIG, "g", "t", 6000, None)
    try:
        one.member = _positions.Member(3, "m")
        one.check(_positions.Member(3, "m"))
        with pytest.raises(membership.NotAMember, match=said):
            one.check(_positions.Member(*now))
    finally:
        one.close()


def test_brokers_that_cannot_be_reached_are_named_when_the_time_is_over() -> None:
    with ProducerGroup(CONFIG, "g", 3) as group, pytest.raises(KafkaException, match=r"127\.0\.0\.1:1") as caught:
        group.subscribe(timeout=0.5)
    assert caught.value.args[0].retriable()


# ---- what the caller was told, with a group that does what is hard to bring about


class Brokers:
    """Membership, positions and producer of a group in one; everything succeeds at once, unless told."""

    topic = "fastprod-group-g"
    trouble = None

    def __init__(self) -> None:
        self.changes: deque[Change] = deque()
        self.positions: dict[int, str] | None = {}  # None: they cannot be read yet
        self.sent: list[dict[int, str]] = []

    def poll(self, timeout: float) -> None:
        if timeout:
            time.sleep(0.001)

    def read(self, partitions: tuple[int, ...], patience: float) -> dict[int, Any] | None:
        if self.positions is None:
            return None
        return {one: {"position": self.positions[one]} if one in self.positions else None for one in partitions}

    def confirmed(self, timeout: float) -> bool:
        return True

    def proof(self) -> bytes:
        return b""

    def flush(self, timeout: float) -> int:
        return 0

    def send_offsets_to_transaction(self, offsets: list[TopicPartition], group: bytes, timeout: float) -> None:
        self.sent.append({one.partition: json.loads(one.metadata)["position"] for one in offsets})

    def nothing(self, *arguments: Any, **options: Any) -> None:
        pass

    begin_transaction = commit_transaction = abort_transaction = produce = init_transactions = close = nothing


@pytest.fixture
def member() -> Iterator[tuple[ProducerGroup, Brokers]]:
    group = ProducerGroup({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, "g", 3, session_timeout_ms=2000)
    own = group._producer, group._membership, group._positions
    brokers = Brokers()
    group._producer = group._membership = group._positions = brokers  # type: ignore[assignment]
    group._subscribed = group._initialised = True
    yield group, brokers
    group._producer, group._membership, group._positions = own
    group._in_transaction = False
    group.close()


def test_one_position_for_all_never_covers_what_was_read_after_the_caller_looked(member: Any) -> None:
    group, brokers = member
    brokers.changes.append(Change("assigned", (0, 1, 2)))
    brokers.positions = None
    with pytest.raises(RebalanceError):  # positions take longer than it waits
        group.produce("t", b"v", source_partition=0)
    assert group.assignment == {}
    brokers.positions = {0: "5"}
    with pytest.raises(RebalanceError, match=r"now owns \[0, 1, 2\]"):
        group.commit_transaction("99")  # of work that the caller has not done
    assert brokers.sent == []
    assert group.assignment == {0: "5", 1: None, 2: None}
    group.produce("t", b"v", source_partition=1)
    group.commit_transaction("99")
    assert brokers.sent == [{0: "99", 1: "99", 2: "99"}]


class Silent:
    """A listener."""

    def on_assigned(self, assignment: dict[int, str | None]) -> None:
        pass

    on_revoked = on_lost = on_assigned


@pytest.mark.parametrize("listener", [None, Silent()])
def test_a_listener_does_not_stand_for_a_look_at_the_assignment(member: Any, listener: Any) -> None:
    group, brokers = member
    group._listener = listener
    brokers.changes.append(Change("assigned", (0,)))
    group.alive()
    assert group.assignment == {0: None}
    brokers.changes += [Change("revoked", (0,)), Change("assigned", (0, 1, 2))]
    group.alive()
    with pytest.raises(RebalanceError):
        group.commit_transaction("99")
    assert brokers.sent == []


def test_ctrl_c_in_begin_transaction_is_healed_by_an_abort(member: Any) -> None:
    group, brokers = member
    brokers.changes.append(Change("assigned", (0,)))
    group.alive()
    assert group.assignment == {0: None}

    def interrupted() -> None:
        raise KeyboardInterrupt

    brokers.begin_transaction = interrupted
    with pytest.raises(KeyboardInterrupt):
        group.produce("t", b"v", source_partition=0)
    del brokers.begin_transaction
    ended: list[float] = []
    brokers.abort_transaction = ended.append
    assert group.abort() == {0: None}
    assert ended
    group.produce("t", b"v", source_partition=0)
    group.commit_transaction({0: "1"})
    assert brokers.sent == [{0: "1"}]


def test_names_of_digits_and_transactional_ids_of_members() -> None:
    options = {"bootstrap.servers": "127.0.0.1:1", "log_level": 0, "transactional.id": "mine"}
    with ProducerGroup({**options, "group.id": "17", "group.instance.id": "0"}, source_partition_count=1) as group:
        assert (group.group_id, group.instance_id) == ("17", "0")
        assert group._options["transactional.id"] == "mine/17/0"


def test_timeouts_and_partitions_of_other_types(member: Any) -> None:
    group, brokers = member
    brokers.changes.append(Change("assigned", (0, 1)))
    group.subscribe()
    for call in (lambda: group.commit_transaction("1", timeout="x"), lambda: group.abort(timeout="x")):
        with pytest.raises(ValueError, match="timeout='x' must be a number of seconds"):
            call()
    for wrong in ("0", 1.0, True, None):
        with pytest.raises(TypeError, match="source_partition must be a whole number"):
            group.produce("t", b"", source_partition=wrong)
    group.produce("t", b"", source_partition=np.int64(1))


def test_a_listener_must_not_call_the_group(member: Any) -> None:
    group, brokers = member
    refused = []

    class Meddling:
        def on_assigned(self, assignment: dict[int, str | None]) -> None:
            assert group.assignment == assignment
            for call in (group.alive, group.close, group.abort, lambda: group.commit_transaction("1")):
                with pytest.raises(RuntimeError, match="a listener must not call the group") as told:
                    call()
                refused.append(told)

        def on_revoked(self, partitions: list[int]) -> None: ...

        def on_lost(self, partitions: list[int]) -> None: ...

    brokers.changes.append(Change("assigned", (0, 1)))
    assert group.subscribe(Meddling()) == {0: None, 1: None}
    assert len(refused) == 4
    group.alive()


def test_after_a_failed_commit_only_an_abort_is_left(member: Any) -> None:
    group, brokers = member
    brokers.changes.append(Change("assigned", (0, 1)))
    group.subscribe()
    group.produce("t", b"", source_partition=0)

    def refuse(timeout: float) -> None:
        text = "1 records of the transaction failed, the first with «reason»; call abort_transaction()"
        raise KafkaException(KafkaError(KafkaError._INCONSISTENT, text, False, False, True))

    brokers.commit_transaction = refuse
    for call in (
        lambda: group.commit_transaction({0: "1"}),
        lambda: group.produce("t", b"", source_partition=0),
        lambda: group.commit_transaction({0: "1"}),
    ):
        with pytest.raises(KafkaException, match=r"«reason»; call abort\(\)") as told:
            call()
        assert told.value.args[0].txn_requires_abort()
    del brokers.commit_transaction
    assert group.abort() == {0: None, 1: None}
    group.produce("t", b"", source_partition=0)
    group.commit_transaction({0: "1"})


def test_a_character_in_two_halves_would_not_come_back(member: Any) -> None:
    group, _ = member
    with pytest.raises(ValueError, match="source partition 0 has a character in two halves"):
        group.commit_transaction({0: "\ud83d\ude00"})
