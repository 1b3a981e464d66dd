"""Producer groups on a real broker: the KIP's cases, members that die, freeze, hang and move, and what is refused.

The program of members and the checker are those of examples/group_faults.py.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from programs import GUARD_S, Program, run, started

from fastprod import Producer, _positions
from fastprod.cli import main
from fastprod.groups import ProducerGroup, RebalanceError, admin
from fastprod.groups.assignment import PositionsDiffer, coordination_topic, positions_topic
from fastprod.groups.membership import Membership
from fastprod.testing import KafkaCluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "group_faults.py"
SESSION_MS = 3000  # the shortest in which a busy machine can be expected to send heartbeats
PATIENT_MS = 30_000  # where nobody is to lose its place, however busy the machine is
INTERNAL = ("__consumer_offsets", "__transaction_state")
LAST = 500  # numbers that members have to produce in each source partition


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    spec = importlib.util.spec_from_file_location("group_faults", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["group_faults"] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def brokers(kafka_available: None, faults: ModuleType) -> Iterator[KafkaCluster]:
    """One that allows short sessions, and looks often for transactions that have timed out."""
    with KafkaCluster(config=faults.BROKERS) as cluster:
        yield cluster


class Notes:
    """A listener that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def on_assigned(self, assignment: dict[int, str | None]) -> None:
        self.heard.append(("assigned", assignment))

    def on_revoked(self, partitions: list[int]) -> None:
        self.heard.append(("revoked", partitions))

    def on_lost(self, partitions: list[int]) -> None:
        self.heard.append(("lost", partitions))


@pytest.fixture
def make(brokers: KafkaCluster, topic: str) -> Iterator[Callable[..., ProducerGroup]]:
    """Members of a group of this test, with an output topic; all are closed at the end."""
    with ExitStack() as stack:

        def one(count: int = 3, **options: Any) -> ProducerGroup:
            options = {"session_timeout_ms": PATIENT_MS, **options}
            config = {"bootstrap.servers": brokers.bootstrap_servers, "log_level": 0, "linger.ms": 0}
            return stack.enter_context(ProducerGroup(config, topic, count, **options))

        brokers.create_topic(topic, 3)
        yield one


def until(condition: Callable[[], object], *alive: ProducerGroup) -> None:
    """Members show that they live, until a condition holds."""
    deadline = time.monotonic() + GUARD_S
    while not condition():
        assert time.monotonic() < deadline
        for one in alive:
            one.alive(0.02)
        if not alive:
            time.sleep(0.02)


def join(one: ProducerGroup, *alive: ProducerGroup, listener: Any = None) -> dict[int, str | None]:
    """subscribe() of a member, while others live."""
    found: list[Any] = []

    def subscribe() -> None:
        try:
            found.append(one.subscribe(listener, timeout=GUARD_S))
        except BaseException as problem:
            found.append(problem)

    thread = threading.Thread(target=subscribe)
    thread.start()
    until(lambda: found, *alive)
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def repeated(call: Callable[[], object]) -> KafkaException:
    """What a call ends with, sooner or later."""
    deadline = time.monotonic() + GUARD_S
    while time.monotonic() < deadline:
        try:
            call()
        except KafkaException as problem:
            return problem
    raise AssertionError("it never failed")


def values(brokers: KafkaCluster, topic: str) -> list[bytes | None]:
    """What readers see once all transactions are over: a commit is answered a moment before its marks are written."""
    until(lambda: not open_transactions(brokers, topic))
    return [record.value() for record in brokers.records(topic)]


# ---- KIP-509's cases


def test_case_1_the_first_member_gets_all_partitions_without_positions(make: Any, brokers: Any, topic: str) -> None:
    first = make()
    assert first.subscribe() == {0: None, 1: None, 2: None}
    for partition in range(3):
        first.produce(topic, b"row", source_partition=partition)
    first.commit_transaction("12:34:00")
    assert first.assignment == {0: "12:34:00", 1: "12:34:00", 2: "12:34:00"}
    assert values(brokers, topic) == [b"row"] * 3


def test_case_2_a_restarted_member_gets_what_was_committed_last(make: Any) -> None:
    first = make()
    first.subscribe()
    first.commit_transaction("12:33:00")
    first.commit_transaction("12:34:00")
    first.close()
    again = make()
    assert again.subscribe() == {0: "12:34:00", 1: "12:34:00", 2: "12:34:00"}


def test_cases_3_and_4_members_share_a_standby_waits_and_the_silent_one_is_replaced(make: Any) -> None:
    notes = Notes()
    one = make(session_timeout_ms=SESSION_MS)
    one.subscribe(notes)
    one.commit_transaction("12:34:00")
    two = make()
    assert join(two, one) == {2: "12:34:00"}
    until(lambda: len(one.assignment) == 2, one, two)
    assert one.assignment == {0: "12:34:00", 1: "12:34:00"}
    assert notes.heard == [
        ("assigned", {0: None, 1: None, 2: None}),
        ("revoked", [0, 1, 2]),
        ("assigned", {0: "12:34:00", 1: "12:34:00"}),
    ]
    three, four = make(), make()
    join(three, one, two)
    join(four, one, two, three)
    until(lambda: all(len(each.assignment) == 1 for each in (one, two, three)), one, two, three, four)
    assert four.assignment == {}  # standby
    four.commit_transaction("12:35:00")  # nothing to commit

    # Case 4: number one sends no alive-packet in time.
    owned = sorted(one.assignment)
    until(lambda: sum(len(each.assignment) for each in (two, three, four)) == 3, two, three, four)
    assert len(four.assignment) == 1  # promoted
    assert owned == [0]
    assert {*two.assignment, *three.assignment, *four.assignment} == {0, 1, 2}
    assert set((two.assignment | three.assignment | four.assignment).values()) == {"12:34:00"}
    with pytest.raises(RebalanceError):
        one.produce("anything", b"", source_partition=0)
    assert notes.heard[-2][0] == "lost" or notes.heard[-1][0] == "lost"


# ---- brokers that die


@pytest.mark.long
def test_brokers_die_in_the_middle_of_transactions_and_every_number_comes_once(
    three_brokers: KafkaCluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each in turn is killed while a transaction is open: one of them coordinates the group, one transactions."""
    monkeypatch.setattr("fastprod.producer.STUCK_S", 5.0)  # librdkafka hangs in it, more often than not
    three_brokers.create_topic(topic, 3)
    config = {"bootstrap.servers": three_brokers.bootstrap_servers, "log_level": 0, "linger.ms": 0}
    with ProducerGroup(config, topic, 3, session_timeout_ms=PATIENT_MS) as member:
        member.subscribe(timeout=GUARD_S)
        kills = iter(three_brokers.brokers)
        broker = None
        deadline = time.monotonic() + GUARD_S
        while not all(at == "9" for at in member.assignment.values()) or len(member.assignment) < 3:
            assert time.monotonic() < deadline
            try:
                at = {partition: int(position or 0) for partition, position in member.assignment.items()}
                for partition, number in at.items():
                    if number < 9:
                        member.produce(topic, b"%d" % number, source_partition=partition, partition=partition)
                if any(number in (2, 4, 6) for number in at.values()) and broker is None:
                    broker = next(kills, None)
                    if broker is not None:
                        three_brokers.kill(broker)
                member.commit_transaction({p: str(min(9, number + 1)) for p, number in at.items()}, timeout=GUARD_S)
            except RebalanceError:
                member.alive(0.1)
            if broker is not None and all(int(position or 0) % 2 for position in member.assignment.values()):
                three_brokers.restart(broker)
                for name in (topic, coordination_topic(topic), positions_topic(topic), *INTERNAL):
                    three_brokers.wait_in_sync(name)  # two of three copies must be left after the next
                broker = None
    if broker is not None:
        three_brokers.restart(broker)
    until(lambda: not open_transactions(three_brokers, topic))
    found: dict[int, list[bytes]] = {}
    for record in three_brokers.records(topic):
        found.setdefault(record.partition(), []).append(record.value())
    assert found == {partition: [b"%d" % number for number in range(9)] for partition in range(3)}


# ---- a loop that catches RebalanceError


def test_a_rebalance_inside_a_transaction_aborts_it_and_tells_where_to_go_on(
    make: Any, brokers: KafkaCluster, topic: str
) -> None:
    one, two = make(), make()
    one.subscribe()
    one.produce(topic, b"0", source_partition=0)
    one.commit_transaction({0: "1"})
    one.produce(topic, b"1 of an aborted transaction", source_partition=0)
    one.produce(topic, b"0 of an aborted transaction", source_partition=2)
    assert sorted(join(two, one)) == [2]
    with pytest.raises(RebalanceError, match="being rebalanced"):
        one.commit_transaction({0: "2", 2: "1"})
    until(lambda: one.assignment, one, two)
    assert one.assignment == {0: "1", 1: None}
    with pytest.raises(RebalanceError, match="source partition 2 is not owned by this member"):
        one.produce(topic, b"0", source_partition=2)
    one.produce(topic, b"1", source_partition=0)
    one.commit_transaction({0: "2"})
    two.produce(topic, b"0", source_partition=2)
    two.commit_transaction("1")
    assert sorted(filter(None, values(brokers, topic))) == [b"0", b"0", b"1"]


def test_a_partition_that_came_unseen_is_not_covered_by_one_string(make: Any) -> None:
    one, two = make(), make()
    one.subscribe()
    join(two, one)
    until(lambda: len(one.assignment) == 2, one, two)
    two.close()
    # The caller has not heard of partition 2, so it cannot have read it.
    assert isinstance(repeated(lambda: one.commit_transaction("7")), RebalanceError)
    assert one.assignment == {0: "7", 1: "7", 2: None} or one.assignment == {0: None, 1: None, 2: None}


def test_one_to_four_to_one_members_produce_every_number_once(
    brokers: KafkaCluster, topic: str, faults: ModuleType
) -> None:
    brokers.create_topic(topic, 4)
    config = (brokers.bootstrap_servers, topic, topic, 4, SESSION_MS)
    with ExitStack() as stack:
        programs = []
        for _ in range(4):
            command = ("--member", config[0], "--group", topic, "--topic", topic, "--partitions", "4")
            programs.append(stack.enter_context(started(EXAMPLE, *command, "--session", str(SESSION_MS))))
        for program in programs:
            assert program.stdout is not None
            assert program.stdout.readline() == "subscribed\n"
        for program in programs[:3]:
            program.terminate()
            assert program.wait(GUARD_S) == 0
        programs[3].terminate()
        assert programs[3].wait(GUARD_S) == 0
    faults.member(*config, count=LAST)
    account = faults.check(brokers.bootstrap_servers, topic, topic, 4)
    assert account.clean, account
    assert all(position >= LAST for position in account.positions.values())


def test_a_rolling_restart_under_the_same_names_moves_nothing(make: Any, brokers: KafkaCluster, topic: str) -> None:
    notes = Notes()
    stays, goes = make(instance_id="a"), make(instance_id="b")
    stays.subscribe(notes)
    join(goes, stays)
    until(lambda: len(stays.assignment) == 2, stays, goes)
    goes.produce(topic, b"of nobody", source_partition=2)
    before = list(notes.heard)
    goes.close()
    back = make(instance_id="b")
    assert join(back, stays) == {2: None}
    back.produce(topic, b"0", source_partition=2)
    back.commit_transaction("1")
    stays.alive()
    assert notes.heard == before
    assert values(brokers, topic) == [b"0"]


def test_two_members_of_one_name_do_not_work_side_by_side(make: Any, brokers: KafkaCluster, topic: str) -> None:
    older = make(instance_id="a", session_timeout_ms=SESSION_MS)
    newer = make(instance_id="a", session_timeout_ms=SESSION_MS)
    older.subscribe()
    older.produce(topic, b"of the older", source_partition=0)
    assert newer.subscribe(timeout=GUARD_S) == {0: None, 1: None, 2: None}
    problem = repeated(lambda: older.commit_transaction({0: "older"}))
    while isinstance(problem, RebalanceError):
        problem = repeated(lambda: older.alive(0.1))
    assert "another member has come with the same instance_id" in problem.args[0].str()
    for _ in range(100):
        try:
            newer.produce(topic, b"of the newer", source_partition=0)
            newer.commit_transaction({0: "newer"})
            break
        except RebalanceError:  # the older one may have fenced its producer before it learned that it is out
            continue
    assert newer.assignment[0] == "newer"
    assert values(brokers, topic) == [b"of the newer"]


# ---- faults


def test_a_member_killed_at_any_point_of_a_transaction_leaves_nothing_lost_or_doubled(
    brokers: KafkaCluster, topic: str, faults: ModuleType
) -> None:
    with ExitStack() as stack:
        victims: list[Program] = []
        for point in faults.POINTS:
            brokers.create_topic(f"{topic}-{point}", 2)
            own = ("--group", f"{topic}-{point}", "--topic", f"{topic}-{point}", "--partitions", "2")
            dies = ("--session", str(SESSION_MS), "--die-at", point, "--after", "3")
            victims.append(stack.enter_context(started(EXAMPLE, "--member", brokers.bootstrap_servers, *own, *dies)))
        for victim in victims:
            assert victim.wait(GUARD_S) == -signal.SIGKILL, victim.communicate()
    for point in faults.POINTS:
        name = f"{topic}-{point}"
        faults.member(brokers.bootstrap_servers, name, name, 2, SESSION_MS, count=LAST)
        account = faults.check(brokers.bootstrap_servers, name, name, 2)
        assert account.clean, f"{point}: {account}"
        assert account.records == 2 * LAST


FROZEN = """
import sys
from fastprod.groups import ProducerGroup, RebalanceError

servers, topic, session = sys.argv[1:]
with ProducerGroup({"bootstrap.servers": servers, "log_level": 0}, topic, 3, session_timeout_ms=int(session)) as group:
    group.subscribe()
    group.produce(topic, b"of the frozen one", source_partition=0)
    print("produced", flush=True)
    sys.stdin.readline()
    try:
        group.commit_transaction("1")
    except RebalanceError:
        print("refused", sorted(group.assignment), flush=True)
"""


def test_a_member_frozen_past_its_session_is_refused_when_it_goes_on(
    make: Any, brokers: KafkaCluster, topic: str
) -> None:
    successor = make()
    program = ("-c", FROZEN, brokers.bootstrap_servers, topic, str(SESSION_MS))
    with started(*program, stdin=-1) as frozen:
        assert frozen.stdout is not None
        assert frozen.stdin is not None
        assert frozen.stdout.readline() == "produced\n"
        frozen.send_signal(signal.SIGSTOP)
        assert successor.subscribe(timeout=GUARD_S) in ({}, {0: None, 1: None, 2: None}, {2: None})
        until(lambda: len(successor.assignment) == 3, successor)
        successor.produce(topic, b"0", source_partition=0)
        successor.commit_transaction("1")
        frozen.send_signal(signal.SIGCONT)
        frozen.stdin.write("\n")
        frozen.stdin.flush()
        told: list[str] = []
        reader = threading.Thread(target=lambda: told.append(frozen.stdout.readline()))  # type: ignore[union-attr]
        reader.start()
        until(lambda: told, successor)
        reader.join()
        assert told[0].startswith("refused")
        assert frozen.wait(GUARD_S) == 0
    assert values(brokers, topic) == [b"0"]


def test_an_application_that_hangs_is_replaced_and_its_commit_refused(
    make: Any, brokers: KafkaCluster, topic: str
) -> None:
    notes = Notes()
    hung, other = make(session_timeout_ms=SESSION_MS), make()
    hung.subscribe(notes)
    hung.produce(topic, b"of the hung one", source_partition=1)
    assert other.subscribe(timeout=GUARD_S) == {0: None, 1: None, 2: None}  # while the other one calls nothing
    other.produce(topic, b"0", source_partition=1)
    other.commit_transaction({1: "1"})
    with pytest.raises(RebalanceError):
        hung.commit_transaction({1: "1"})
    assert ("lost", [0, 1, 2]) in notes.heard
    other.close()
    until(lambda: len(hung.assignment) == 3, hung)
    assert hung.assignment == {0: None, 1: "1", 2: None}
    assert values(brokers, topic) == [b"0"]


def test_a_commit_that_timed_out_goes_on_when_it_is_called_again(make: Any, brokers: KafkaCluster, topic: str) -> None:
    group = make(session_timeout_ms=60_000)
    group.subscribe()
    group.produce(topic, b"0", source_partition=0)
    group._producer.flush()
    end = Producer.commit_transaction

    def frozen_first(self: Producer, timeout: float = -1) -> None:
        brokers.pause(1)
        end(self, timeout)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Producer, "commit_transaction", frozen_first)
        try:
            with pytest.raises(KafkaException) as caught:
                group.commit_transaction({0: "1"}, timeout=1)
            assert caught.value.args[0].retriable()
            for call in (group.abort, lambda: group.produce(topic, b"", source_partition=0)):
                with pytest.raises(KafkaException, match=r"may have succeeded|being committed"):
                    call()
            with pytest.raises(KafkaException, match="call it again with the same positions"):
                group.commit_transaction({0: "2"})
        finally:
            brokers.resume(1)
    group.commit_transaction({0: "1"})
    assert group.assignment[0] == "1"
    group.produce(topic, b"1", source_partition=0)
    group.commit_transaction({0: "2"})
    assert sorted(filter(None, values(brokers, topic))) == [b"0", b"1"]


def open_transactions(brokers: KafkaCluster, topic: str) -> bool:
    """Whether there are records that readers of committed ones do not see yet."""
    config = {"bootstrap.servers": brokers.bootstrap_servers, "group.id": "look", "log_level": 0}
    consumer = Consumer(config | {"isolation.level": "read_uncommitted"})
    try:
        return any(
            consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=GUARD_S)[1] != end
            for partition, (_, end) in brokers.watermarks(topic).items()
        )
    finally:
        consumer.close()


def test_a_transaction_that_took_too_long_is_dropped_and_the_member_goes_on(
    make: Any, brokers: KafkaCluster, topic: str
) -> None:
    group = make(session_timeout_ms=6000)
    group._options["transaction.timeout.ms"] = 1000
    group._retire()  # the next producer has the shorter time
    group.subscribe()
    group.produce(topic, b"too late", source_partition=0)
    group._producer.flush()
    until(lambda: open_transactions(brokers, topic), group)
    until(lambda: not open_transactions(brokers, topic), group)
    with pytest.raises(RebalanceError, match=r"fenced|dropped"):
        group.commit_transaction("1")
    assert group.assignment == {0: None, 1: None, 2: None}
    group.produce(topic, b"0", source_partition=0)
    group.commit_transaction({0: "1"})
    assert values(brokers, topic) == [b"0"]


def test_abort_returns_the_positions_to_rewind_to(make: Any, brokers: KafkaCluster, topic: str) -> None:
    group = make()
    group.subscribe()
    group.produce(topic, b"0", source_partition=1)
    group.commit_transaction({1: "1"})
    group.produce(topic, b"never seen", source_partition=1)
    assert group.abort() == {0: None, 1: "1", 2: None}
    assert group.abort() == {0: None, 1: "1", 2: None}  # nothing to abort
    group.produce(topic, b"1", source_partition=1)
    group.commit_transaction({1: "2"})
    assert sorted(filter(None, values(brokers, topic))) == [b"0", b"1"]


def test_records_that_failed_leave_the_transaction_to_be_aborted(make: Any, brokers: KafkaCluster, topic: str) -> None:
    brokers.create_topic(f"{topic}-small", 1, config={"max.message.bytes": 1000})
    group = make()
    group.subscribe()
    group.produce(f"{topic}-small", b"x" * 5000, source_partition=0)
    with pytest.raises(KafkaException) as caught:
        group.commit_transaction("1")
    assert caught.value.args[0].txn_requires_abort()
    assert not isinstance(caught.value, RebalanceError)
    assert group.abort() == {0: None, 1: None, 2: None}
    group.produce(topic, b"0", source_partition=0)
    group.commit_transaction("1")
    assert values(brokers, topic) == [b"0"]


INTERRUPTED = """
import sys
from fastprod.groups import ProducerGroup

servers, topic, session = sys.argv[1:]
try:
    with ProducerGroup({"bootstrap.servers": servers, "log_level": 0}, topic, 3, session_timeout_ms=60000) as group:
        group.subscribe()
        group.produce(topic, b"of the interrupted one", source_partition=0)
        print("produced", flush=True)
        while True:
            group.alive(1.0)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_ctrl_c_aborts_and_hands_over_at_once(make: Any, brokers: KafkaCluster, topic: str) -> None:
    successor = make(session_timeout_ms=60_000)
    with started("-c", INTERRUPTED, brokers.bootstrap_servers, topic, "60000") as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "produced\n"
        program.send_signal(signal.SIGINT)
        assert program.stdout.readline() == "interrupted\n"
        assert program.wait(GUARD_S) == 0
    # With a session of a minute, less is only possible if the member has left. This is what subscribe() waits.
    assert successor.subscribe(timeout=50) == {0: None, 1: None, 2: None}
    assert values(brokers, topic) == []


def test_what_a_listener_raises_comes_out_and_the_group_is_in_order(make: Any, brokers: Any, topic: str) -> None:
    class Touchy(Notes):
        def on_assigned(self, assignment: dict[int, str | None]) -> None:
            super().on_assigned(assignment)
            raise LookupError("who am I")

    notes = Touchy()
    group = make()
    with pytest.raises(LookupError, match="who am I"):
        group.subscribe(notes)
    assert notes.heard == [("assigned", {0: None, 1: None, 2: None})]
    assert group.subscribe(notes) == {0: None, 1: None, 2: None}
    group.produce(topic, b"0", source_partition=0)
    group.commit_transaction("1")
    assert values(brokers, topic) == [b"0"]


# ---- positions


def test_positions_of_every_shape_and_length(make: Any) -> None:
    shapes = {0: "a\0b é☃😀 \ud800", 1: "", 2: "x" * 4096}
    group = make()
    group.subscribe()
    group.commit_transaction(shapes)
    assert group.assignment == shapes
    group.close()
    again = make()
    assert again.subscribe() == shapes
    again.commit_transaction({2: "é" * 100_000})
    with pytest.raises(ValueError, match="the most that fits into a record"):
        again.commit_transaction({0: "1", 1: "x" * 2_000_000})
    again.close()
    assert make().subscribe() == {**shapes, 2: "é" * 100_000}


BAD_POSITIONS = (
    (None, TypeError, "positions must be a string, or a dict of source partitions and strings, not None"),
    (17, TypeError, "positions must be a string"),
    ({0: 17}, TypeError, "the position of source partition 0 must be a string, not 17"),
    ({"0": "1"}, TypeError, "source_partition must be a whole number, not '0'"),
    ({3: "1"}, ValueError, "source_partition=3 must be from 0 to 2"),
    ({1: "1"}, ValueError, r"has none for source partition 0, of which the transaction has\s+records"),
)


def test_bad_positions_and_partitions_are_named_and_cost_nothing(make: Any, brokers: Any, topic: str) -> None:
    group = make()
    group.subscribe()
    group.produce(topic, b"0", source_partition=0)
    for positions, kind, said in BAD_POSITIONS:
        with pytest.raises(kind, match=said):
            group.commit_transaction(positions)
    for wrong in (-1, 3):
        with pytest.raises(ValueError, match="must be from 0 to 2"):
            group.produce(topic, b"", source_partition=wrong)
    for strange in ("0", None, True, 0.0):
        with pytest.raises(TypeError, match="source_partition must be a whole number"):
            group.produce_many(topic, [b""], source_partition=strange)
    group.commit_transaction("1")
    assert values(brokers, topic) == [b"0"]


def test_columns_and_arrow_tables(make: Any, brokers: KafkaCluster, topic: str) -> None:
    group = make()
    group.subscribe()
    receipt = group.produce_many(topic, [b"0", b"1"], keys=[b"k", b"k"], source_partition=0)
    more = group.produce_arrow(pa.table({"value": [b"2", b"3"]}), topic, source_partition=1)
    group.commit_transaction("2")
    assert (receipt.acknowledged, more.acknowledged) == (2, 2)
    assert sorted(filter(None, values(brokers, topic))) == [b"0", b"1", b"2", b"3"]


def test_another_number_of_partitions_is_refused_by_both_numbers(make: Any) -> None:
    make(3).subscribe()
    with pytest.raises(ValueError, match=r"source_partition_count=4, but group '.*' was made for 3"):
        make(4).subscribe()


def test_a_session_that_brokers_do_not_allow_is_refused(make: Any) -> None:
    group = make(session_timeout_ms=3_600_000)
    with pytest.raises(
        KafkaException, match=r"session_timeout_ms=3600000 is not allowed by .*group.max.session.timeout"
    ):
        group.subscribe()


def forget(brokers: KafkaCluster, group_id: str) -> None:
    """As brokers do 7 days after the last member has gone."""
    client = AdminClient({"bootstrap.servers": brokers.bootstrap_servers})
    for answer in client.delete_consumer_groups([group_id]).values():
        answer.result()


def test_forgotten_offsets_are_not_taken_for_a_beginning_and_a_reset_mends_them(
    make: Any, brokers: KafkaCluster, topic: str
) -> None:
    group = make(1)
    group.subscribe()
    group.commit_transaction("17")
    group.close()
    forget(brokers, topic)
    blind = make(1)
    with pytest.raises(PositionsDiffer, match=r"is not there in the group's offsets, and '17' in topic"):
        blind.subscribe()
    with pytest.raises(RuntimeError):
        blind.alive()  # nor by any other way
    assert blind.assignment == {}
    blind.close()
    told = run(
        "-m", "fastprod", "group", "reset", topic, "-b", brokers.bootstrap_servers, *["--partition", "0", "--to", "17"]
    )
    assert told.returncode == 0, told.stderr
    assert make(1).subscribe() == {0: "17"}


def test_a_position_that_somebody_else_has_written_is_not_believed(
    make: Any, brokers: KafkaCluster, topic: str
) -> None:
    group = make(1)
    group.subscribe()
    group.commit_transaction("17")
    group.close()
    consumer = Consumer({"bootstrap.servers": brokers.bootstrap_servers, "group.id": topic})
    place = TopicPartition(coordination_topic(topic), 0, 0, metadata='{"position":"3","at":1}')
    consumer.commit(offsets=[place], asynchronous=False)
    doubting = make(1)
    with pytest.raises(PositionsDiffer, match="its position is '3' in the group's offsets, and '17' in topic"):
        doubting.subscribe()
    doubting.close()
    place = TopicPartition(coordination_topic(topic), 0, 5, metadata="seventeen")
    consumer.commit(offsets=[place], asynchronous=False)
    with pytest.raises(RuntimeError, match="was not written by fastprod: 5, 'seventeen'"):
        make(1).subscribe()
    consumer.close()


def test_what_a_foreign_client_leaves_behind_a_position_is_dropped(
    make: Any, brokers: KafkaCluster, topic: str
) -> None:
    group = make(1)
    group.subscribe()
    group.commit_transaction("17")
    group.close()
    consumer = Consumer({"bootstrap.servers": brokers.bootstrap_servers, "group.id": topic})
    (place,) = consumer.committed([TopicPartition(coordination_topic(topic), 0)], timeout=GUARD_S)
    spoiled = TopicPartition(place.topic, 0, 0, metadata=f"{place.metadata}\x7f garbage")
    consumer.commit(offsets=[spoiled], asynchronous=False)
    consumer.close()
    assert make(1).subscribe() == {0: "17"}


# ---- tests of the tests: what must not be, the checker sees

OUTSIDE = """
import sys
sys.path.insert(0, {folder!r})
import group_faults
from fastprod import Producer
from fastprod.groups import membership

members = []
join = membership.Membership.join

def joined(self):
    members.append(self)
    join(self)

def outside(producer, offsets, group, timeout):
    members[-1].consumer.commit(offsets=offsets, asynchronous=False)

membership.Membership.join = joined
Producer.send_offsets_to_transaction = outside
group_faults.die_at("offsets", 3)
sys.exit(group_faults.main())
"""


def test_the_checker_sees_positions_that_are_committed_outside_of_the_transaction(
    brokers: KafkaCluster, topic: str, faults: ModuleType
) -> None:
    brokers.create_topic(topic, 1)
    own = ("--member", brokers.bootstrap_servers, "--group", topic, "--topic", topic, "--partitions", "1")
    done = run("-c", OUTSIDE.format(folder=str(EXAMPLE.parent)), *own)
    assert done.returncode == -signal.SIGKILL, done.stderr
    consumer = Consumer({"bootstrap.servers": brokers.bootstrap_servers, "group.id": topic})
    (place,) = consumer.committed([TopicPartition(coordination_topic(topic), 0)], timeout=GUARD_S)
    consumer.close()
    position = int(json.loads(place.metadata or "")["position"])
    account = faults.check(brokers.bootstrap_servers, topic, topic, 1, positions={0: position})
    assert account.lost > 0
    with pytest.raises(PositionsDiffer):  # and whoever takes over sees it too
        faults.member(brokers.bootstrap_servers, topic, topic, 1, SESSION_MS, count=LAST)


@pytest.mark.parametrize("guarded", [True, False], ids=["with the guard", "without"])
def test_only_the_guard_on_the_groups_metadata_stops_who_is_no_member(
    make: Any, brokers: KafkaCluster, topic: str, faults: ModuleType, monkeypatch: Any, guarded: bool
) -> None:
    """Membership is lost, and then a new transaction begun and committed, by one who does not look.

    Its consumer was made anew and has not joined yet. Brokers take its metadata for that of a client without a group.
    """
    lost, other = make(1, session_timeout_ms=SESSION_MS), make(1)
    lost.subscribe()
    assert other.subscribe(timeout=GUARD_S) == {0: None}  # as the first one calls nothing
    for number in range(3):
        other.produce(topic, b"%d" % number, partition=0, source_partition=0)
    other.commit_transaction("3")

    lost._membership._leave()  # its consumer's close() alone may never return, with the news that it was lost unheard
    config = {"bootstrap.servers": brokers.bootstrap_servers, "group.id": topic, "log_level": 0}
    monkeypatch.setattr(lost._membership, "consumer", Consumer(config))
    assert _positions.member_of(lost._membership.consumer.consumer_group_metadata()) == (-1, "")
    monkeypatch.setattr(lost._membership, "poll", lambda timeout: None)
    lost._membership.changes.clear()
    monkeypatch.setattr(lost, "_doubt", lambda reason: None)
    if not guarded:
        monkeypatch.setattr(Membership, "check", lambda self, member: None)
    lost.produce(topic, b"0", partition=0, source_partition=0)
    if guarded:
        monkeypatch.setattr("fastprod.groups.group.SETTLE_S", 0.1)
        with pytest.raises(RebalanceError, match="lost its place in the group"):
            lost.commit_transaction("1")
    else:
        lost.commit_transaction("1")  # brokers take it
    account = faults.check(brokers.bootstrap_servers, topic, topic, 1)
    assert account.clean == guarded, account
    assert (account.doubled > 0) != guarded


# ---- the command


def command(brokers: KafkaCluster, *arguments: str) -> Any:
    done = CliRunner().invoke(main, ["group", *arguments, "-b", brokers.bootstrap_servers, "--format", "json"])
    return json.loads(done.stdout) if done.exit_code == 0 else (done.exit_code, done.stderr)


def test_the_command_tells_members_owners_positions_and_ages(make: Any, brokers: KafkaCluster, topic: str) -> None:
    group = make(instance_id="worker-1")
    group.subscribe()
    group.commit_transaction({1: "[bold]17"})
    listed = {one["group"]: one for one in command(brokers, "list")}
    assert listed[topic] == {"group": topic, "state": "STABLE", "members": 1, "partitions": 3}
    told = command(brokers, "describe", topic)
    (member,) = told["members"]
    assert (member["instance"], member["partitions"]) == ("worker-1", [0, 1, 2])
    assert [one["position"] for one in told["partitions"]] == [None, "[bold]17", None]
    assert {one["owner"] for one in told["partitions"]} == {member["id"]}
    assert told["partitions"][1]["age_s"] >= 0
    text = CliRunner().invoke(main, ["group", "describe", "--group", topic, "-b", brokers.bootstrap_servers]).stdout
    assert "[bold]17" in text
    assert "worker-1" in text
    assert topic in CliRunner().invoke(main, ["group", "list", "-b", brokers.bootstrap_servers]).stdout

    code, said = command(brokers, "reset", topic, "--partition", "1", "--to", "3")
    assert code == 1
    assert "has 1 members, who would go on from where they are" in said


def test_a_reset_is_what_the_next_member_goes_on_from(make: Any, brokers: KafkaCluster, topic: str) -> None:
    group = make()
    group.subscribe()
    group.commit_transaction("17")
    group.close()
    assert command(brokers, "reset", topic, "--partition", "1", "--to", "3")["position"] == "3"
    assert make().subscribe() == {0: "17", 1: "3", 2: "17"}


def test_the_command_refuses_what_it_cannot_do(make: Any, brokers: KafkaCluster, topic: str) -> None:
    make().subscribe()
    for arguments, code, said in (
        (("describe", "no-such-group"), 2, "there is no producer group 'no-such-group'"),
        (("describe",), 2, "give one group"),
        (("reset", topic, "--partition", "9", "--to", "x"), 2, "partition 9 must be from 0 to 2"),
        (("reset", topic, "--to", "x"), 2, "partition"),
    ):
        assert command(brokers, *arguments)[0] == code
        assert said in command(brokers, *arguments)[1]


def test_a_reset_does_not_win_against_a_member_that_joins_meanwhile(
    make: Any, brokers: KafkaCluster, topic: str, monkeypatch: Any
) -> None:
    group = make()
    group.subscribe()
    group.commit_transaction("17")
    group.close()
    newcomer = make()
    thread = threading.Thread(target=lambda: newcomer.subscribe(timeout=GUARD_S))
    commit = ProducerGroup.commit_transaction

    def joined_first(self: ProducerGroup, positions: Any, timeout: float = -1) -> None:
        thread.start()
        until(lambda: 0 < len(self._map) < 3, self)
        commit(self, positions, timeout)

    config = {"bootstrap.servers": brokers.bootstrap_servers, "log_level": 0}
    with monkeypatch.context() as patch:
        patch.setattr(ProducerGroup, "commit_transaction", joined_first)
        with pytest.raises(RuntimeError, match="a member has joined group"):
            admin.reset_position(config, topic, 2, "3")
    thread.join()
    until(lambda: len(newcomer.assignment) == 3, newcomer)
    assert newcomer.assignment == {0: "17", 1: "17", 2: "17"}


def test_the_topics_of_a_group(make: Any, brokers: KafkaCluster, topic: str) -> None:
    make().subscribe()
    assert brokers.records(coordination_topic(topic)) == []
    client = AdminClient({"bootstrap.servers": brokers.bootstrap_servers})
    topics = client.list_topics(timeout=GUARD_S).topics
    assert len(topics[coordination_topic(topic)].partitions) == len(topics[positions_topic(topic)].partitions) == 3


def test_a_coordination_topic_that_is_deleted_meanwhile_ends_the_work(
    make: Any, brokers: KafkaCluster, topic: str
) -> None:
    group = make(1)
    group.subscribe()
    group.commit_transaction("17")
    client = AdminClient({"bootstrap.servers": brokers.bootstrap_servers})
    for answer in client.delete_topics([coordination_topic(topic)]).values():
        answer.result()
    problem = repeated(lambda: group.commit_transaction("18", timeout=2))
    while isinstance(problem, RebalanceError) or problem.args[0].retriable():
        problem = repeated(lambda: group.alive(0.1))
    assert problem.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert coordination_topic(topic) in problem.args[0].str()
    group.close()
    with pytest.raises(PositionsDiffer):
        make(1).subscribe()


# ---- the whole story


@pytest.mark.long
def test_two_hundred_faults_over_a_hundred_thousand_records() -> None:
    done = run(EXAMPLE, "--faults", "200", "--records", "100000", "--no-figures")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " 0 doubled, 0 lost, 0 out of order" in done.stdout


@pytest.mark.long
def test_three_tables_into_three_topics() -> None:
    done = run(EXAMPLE.with_name("db_to_kafka.py"), "--rows", "3000", "--kills", "3")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for table in ("table_a", "table_b", "table_c"):
        assert f"{table}: 3,000 rows, 3,000 records, 0 doubled, 0 missing" in done.stdout


def test_a_missing_topic_is_named_and_no_reason_to_try_for_ever(brokers: KafkaCluster, topic: str) -> None:
    config = {"bootstrap.servers": brokers.bootstrap_servers, "log_level": 0, "topic.metadata.propagation.max.ms": 2000}
    with ProducerGroup(config, topic, 1, session_timeout_ms=PATIENT_MS) as group:
        group.subscribe()
        for _ in range(2):
            group.produce(f"{topic}-none", b"x", source_partition=0)
            with pytest.raises(KafkaException, match=rf"topic '{topic}-none'.*Unknown topic.*call abort\(\)") as told:
                group.commit_transaction({0: "1"})
            assert not isinstance(told.value, RebalanceError)
            assert group.abort() == {0: None}


def test_what_a_group_waits_for_a_topic_is_less_than_a_transaction_may_take() -> None:
    with ProducerGroup({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, "g", 1) as group:
        assert group._options["topic.metadata.propagation.max.ms"] * 2 == group._options["transaction.timeout.ms"]


def test_transactions_that_take_too_long_are_told_so_and_end_in_an_error(brokers: KafkaCluster, topic: str) -> None:
    brokers.create_topic(topic, 1)
    config = {"bootstrap.servers": brokers.bootstrap_servers, "log_level": 0, "transaction.timeout.ms": 1000}
    said: list[KafkaException] = []
    deadline = time.monotonic() + GUARD_S
    with ProducerGroup(config, topic, 1, session_timeout_ms=PATIENT_MS) as group:
        group.subscribe()
        while not said or isinstance(said[-1], RebalanceError):
            assert time.monotonic() < deadline
            try:
                group.produce(topic, b"x", source_partition=0)
                time.sleep(3.0)  # in which brokers have ended it, or the next is as good
                group.commit_transaction({0: "1"})
                said.clear()
            except KafkaException as problem:
                said.append(problem)
        assert "3 transactions in a row were dropped, and none was committed" in str(said[-1])
        assert sum("transaction.timeout.ms=1000. Commit more often" in str(one) for one in said) == 3


def test_a_child_process_leaves_its_parents_group_alone(brokers: KafkaCluster, topic: str) -> None:
    brokers.create_topic(topic, 1)
    program = f"""
import os
from fastprod.errors import ForkError
from fastprod.groups import ProducerGroup

config = {{"bootstrap.servers": {brokers.bootstrap_servers!r}, "log_level": 0}}
with ProducerGroup(config, {topic!r}, 2) as group:
    group.subscribe()
    group.produce({topic!r}, b"before", source_partition=0)
    child = os.fork()
    if not child:
        for call in (group.alive, group.abort, group.subscribe, lambda: group.commit_transaction("1")):
            try:
                call()
            except ForkError as problem:
                print("refused", flush=True)
        group.close()
        raise SystemExit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    group.commit_transaction({{0: "1"}})
    print(group.assignment)
"""
    done = run("-c", program)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "refused\n" * 4 + "{0: '1', 1: None}\n"
    assert values(brokers, topic) == [b"before"]
