"""A producer group whose members are killed, frozen, hung and replaced, on brokers that die: nothing lost or doubled.

    python examples/group_faults.py                              # about a minute
    python examples/group_faults.py --faults 200 --records 100000     # the long one

Starts a real Apache Kafka of three brokers on this machine (Java 17 needed, see the README), and a group of up to four
members, each a process. The source is made of numbers: source partition p is 0, 1, 2, ..., and its position the number
to go on with. Members write each source partition to the output partition of the same number, as fast as they can.

    kill       SIGKILL at any time
    point      SIGKILL at a chosen step of a transaction: after produce, after flush, after the offsets were sent,
               before, during or after the commit
    freeze     SIGSTOP for longer than the session, then SIGCONT: its next commit must be refused
    hang       the application's thread does nothing for longer than the session
    restart    an end in good order, and a new member
    crowd      from one member to four, and back to one
    broker     SIGKILL of a broker, which is started again

At the end a consumer that sees committed records only reads the output: each partition must hold 0 to position - 1, in
order, once each. The exit status is 1 if one does not. Before that, takeover times are measured and printed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition

from fastprod import Producer
from fastprod.groups import ProducerGroup, RebalanceError
from fastprod.groups.admin import describe_group
from fastprod.testing import KafkaCluster, KafkaUnavailable

GROUP = "numbers"
TOPIC = "output"
PARTITIONS = 6
SESSION_MS = 3000
POINTS = ("produce", "flush", "offsets", "before", "during", "committed")
BROKERS = {  # sessions as short as ours, and a look for transactions that have timed out more often than every 10 s
    "group.min.session.timeout.ms": 1000,
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 500,
}


# ---- a member


def member(
    servers: str,
    group_id: str,
    topic: str,
    partitions: int,
    session_ms: int = SESSION_MS,
    batch: int = 50,
    pause_s: float = 0.02,
    instance_id: str | None = None,
    count: int | None = None,
) -> None:
    """Produces numbers until SIGTERM, its parent's end, or until `count` are in all partitions that it owns."""
    config = {"bootstrap.servers": servers, "log_level": 0, "linger.ms": 0}
    ended = threading.Event()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: ended.set())
        signal.signal(signal.SIGUSR1, lambda *_: time.sleep(1.5 * session_ms / 1e3))  # hangs the thread that works
    parent = os.getppid()
    with ProducerGroup(config, group_id, partitions, session_timeout_ms=session_ms, instance_id=instance_id) as group:
        _patiently(lambda: group.subscribe(timeout=60))
        print("subscribed", flush=True)
        while not ended.is_set() and os.getppid() == parent:
            try:
                if not _one_transaction(group, topic, batch, count):
                    group.alive(0.1)
                    if count is not None and group.assignment:
                        return
                ended.wait(pause_s)
            except RebalanceError:
                continue  # go on from group.assignment
            except KafkaException as problem:
                if not problem.args[0].txn_requires_abort():
                    raise
                group.abort()


def _one_transaction(group: ProducerGroup, topic: str, batch: int, count: int | None) -> bool:
    """Whether there was anything to do."""
    positions = {}
    for partition, position in group.assignment.items():
        first = int(position or 0)
        last = first + batch if count is None else min(count, first + batch)
        for number in range(first, last):
            group.produce(topic, b"%d" % number, partition=partition, source_partition=partition)
        if last > first:
            positions[partition] = str(last)
    if positions:
        group.commit_transaction(positions)
    return bool(positions)


def _patiently(step: Callable[[], object]) -> None:
    while True:
        try:
            step()
            return
        except KafkaException as problem:
            if not problem.args[0].retriable():
                raise


def die_at(point: str, after: int) -> None:
    """From now on, this process ends itself at a point of the transaction of that number."""
    turns = itertools.count(1)

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(name: str, before: Callable[[], None] | None, behind: Callable[[], None] | None) -> None:
        original = getattr(Producer, name)

        def call(self: Producer, *arguments: Any) -> Any:
            due = next(turns) >= after
            if due and before is not None:
                before()
            found = original(self, *arguments)
            if due and behind is not None:
                behind()
            return found

        setattr(Producer, name, call)

    if point == "produce":
        wrapped("begin_transaction", None, lambda: threading.Timer(0.002, end).start())
    elif point == "flush":
        wrapped("flush", None, end)
    elif point == "offsets":
        wrapped("send_offsets_to_transaction", None, end)
    elif point == "before":
        wrapped("commit_transaction", end, None)
    elif point == "during":
        wrapped("commit_transaction", lambda: threading.Timer(random.uniform(0, 0.01), end).start(), None)
    elif point == "committed":
        wrapped("commit_transaction", None, end)
    else:
        raise ValueError(f"point={point!r} must be one of {', '.join(POINTS)}")


# ---- the checker


@dataclass
class Account:
    """What the output holds, against the positions of the group."""

    records: int = 0
    doubled: int = 0
    lost: int = 0
    reordered: int = 0
    ahead: int = 0
    """Records at or beyond the position: whoever goes on from there produces them again."""
    positions: dict[int, int] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not (self.doubled or self.lost or self.reordered or self.ahead)

    def __str__(self) -> str:
        return (
            f"{self.records:,} records in {len(self.positions)} source partitions: {self.doubled:,} doubled, "
            f"{self.lost:,} lost, {self.reordered:,} out of order, {self.ahead:,} beyond the position"
        )


def check(
    servers: str,
    group_id: str,
    topic: str,
    partitions: int,
    timeout: float = 120.0,
    positions: dict[int, int] | None = None,
) -> Account:
    """Reads each source partition's output, committed records only: exactly 0 to position - 1, in order.

    Positions are those of the group, unless given.
    """
    _await_ends(servers, topic, partitions, timeout)
    account = Account(positions=_positions(servers, group_id) if positions is None else positions)
    for partition, numbers in _numbers(servers, topic, partitions, timeout).items():
        counts = Counter(numbers)
        position = account.positions[partition]
        account.records += len(numbers)
        account.doubled += len(numbers) - len(counts)
        account.lost += sum(number not in counts for number in range(position))
        account.ahead += sum(number >= position for number in counts)
        account.reordered += sum(later < earlier for earlier, later in itertools.pairwise(numbers))
    return account


def _positions(servers: str, group_id: str) -> dict[int, int]:
    described = describe_group({"bootstrap.servers": servers, "log_level": 0}, group_id)
    for one in described.partitions:
        if one.problem is not None:
            raise RuntimeError(one.problem)
    return {one.partition: int(one.position or 0) for one in described.partitions}


def _client(servers: str, isolation: str = "read_committed") -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "checker",
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )


def _await_ends(servers: str, topic: str, partitions: int, timeout: float) -> None:
    """Until no transaction is open: what killed members have left, brokers end when its time is over."""
    visible, stored = _client(servers), _client(servers, "read_uncommitted")
    deadline = time.monotonic() + timeout
    try:
        for partition in range(partitions):
            place = TopicPartition(topic, partition)
            while visible.get_watermark_offsets(place, timeout=timeout) != stored.get_watermark_offsets(
                place, timeout=timeout
            ):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"a transaction in {topic} [{partition}] has no end")
                time.sleep(0.1)
    finally:
        visible.close()
        stored.close()


def _numbers(servers: str, topic: str, partitions: int, timeout: float) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {partition: [] for partition in range(partitions)}
    consumer = _client(servers)
    left = set(found)
    deadline = time.monotonic() + timeout
    try:
        consumer.assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in left])
        while left:
            for message in consumer.consume(10_000, 0.1):
                partition: Any = message.partition()
                error = message.error()
                if error is None:
                    found[partition].append(int(message.value() or b""))
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard(partition)
                else:
                    raise KafkaException(error)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no end of partitions {sorted(left)} of {topic!r}")
    finally:
        consumer.close()
    return found


# ---- faults


class Story:
    """Members, brokers, and what happens to them."""

    def __init__(self, cluster: KafkaCluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random.Random(seed)
        self.start = time.monotonic()
        self.members: list[subprocess.Popen[bytes]] = []
        self.faults: Counter[str] = Counter()
        self.broker_back: threading.Thread | None = None

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.start:7.1f} s  {sum(self.faults.values()):4}  {what}", flush=True)

    def begin(self, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, __file__, "--member", self.cluster.bootstrap_servers, *more]
        one = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.members.append(one)
        return one

    def end_all(self, number: int = signal.SIGKILL) -> None:
        for one in self.members:
            with suppress(ProcessLookupError):
                one.send_signal(number)
                one.send_signal(signal.SIGCONT)
        for one in self.members:
            try:
                one.wait(60)
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
            assert one.stdout is not None
            one.stdout.close()
        self.members.clear()

    def reap(self) -> None:
        """Forgets members that have ended, and complains about those that failed by themselves."""
        for one in [one for one in self.members if one.poll() is not None]:
            assert one.stdout is not None
            one.stdout.close()
            self.members.remove(one)
            if one.returncode not in (0, -signal.SIGKILL):
                raise RuntimeError(f"a member ended with status {one.returncode}")

    def fault(self) -> None:
        kinds = ["kill"] * 4 + ["point"] * 6 + ["freeze"] * 2 + ["hang"] * 2 + ["restart"] * 3 + ["crowd", "broker"]
        kind = self.random.choice(kinds)
        self.reap()
        while len(self.members) < 2:
            self.begin()
        victim = self.random.choice(self.members)
        getattr(self, kind)(victim)
        self.faults[kind] += 1

    def kill(self, victim: subprocess.Popen[bytes]) -> None:
        victim.kill()
        victim.wait()
        self.begin()
        self.say("a member killed")
        time.sleep(self.random.uniform(0.0, 3.0))

    def point(self, victim: subprocess.Popen[bytes]) -> None:
        point = self.random.choice(POINTS)
        one = self.begin("--die-at", point, "--after", str(self.random.randint(1, 4)))
        if len(self.members) > 3:
            victim.kill()
        with suppress(subprocess.TimeoutExpired):
            one.wait(4 * SESSION_MS / 1e3)
        ended = one.poll() is not None
        if not ended:  # it got no partitions
            one.kill()
        self.say(f"a member killed {'at ' + point if ended else 'in standby'}")

    def freeze(self, victim: subprocess.Popen[bytes]) -> None:
        victim.send_signal(signal.SIGSTOP)
        time.sleep(SESSION_MS / 1e3 * self.random.uniform(1.1, 1.5))
        victim.send_signal(signal.SIGCONT)
        self.say("a member frozen past its session, and continued")
        time.sleep(self.random.uniform(0.0, 1.0))

    def hang(self, victim: subprocess.Popen[bytes]) -> None:
        _read_line(victim)  # its handler is there
        victim.send_signal(signal.SIGUSR1)
        self.say("a member's thread hangs past its session")
        time.sleep(SESSION_MS / 1e3)

    def restart(self, victim: subprocess.Popen[bytes]) -> None:
        _read_line(victim)
        victim.terminate()
        with suppress(subprocess.TimeoutExpired):
            victim.wait(30)
        self.begin()
        self.say("a member ended in good order, and another began")
        time.sleep(self.random.uniform(0.0, 2.0))

    def crowd(self, victim: subprocess.Popen[bytes]) -> None:
        while len(self.members) < 4:
            self.begin()
        time.sleep(3)
        for one in self.members[:3]:
            _read_line(one)
            one.terminate()
        for one in self.members[:3]:
            with suppress(subprocess.TimeoutExpired):
                one.wait(30)
        self.say("four members, and one again")

    def broker(self, victim: subprocess.Popen[bytes]) -> None:
        if self.broker_back is not None:
            self.broker_back.join()  # never two at a time
        number = self.random.choice(self.cluster.brokers)
        self.cluster.kill(number)

        def bring_back() -> None:
            time.sleep(2)
            self.cluster.restart(number)
            self.cluster.wait_in_sync(TOPIC)

        self.broker_back = threading.Thread(target=bring_back, name="broker")
        self.broker_back.start()
        self.say(f"broker {number} killed")


_told: set[int] = set()


def _read_line(one: subprocess.Popen[bytes]) -> None:
    """Waits until a member has subscribed, or ended."""
    if one.pid not in _told:
        assert one.stdout is not None
        one.stdout.readline()
        _told.add(one.pid)


# ---- figures


def takeover(servers: str, group_id: str, session_ms: int, how: str) -> float:
    """Seconds from the end of the only working member until its standby knows where to go on."""
    own = ["--group", group_id, "--topic", "takeover", "--partitions", "1", "--session", str(session_ms)]
    one = subprocess.Popen([sys.executable, __file__, "--member", servers, *own], stdout=subprocess.PIPE)
    config = {"bootstrap.servers": servers, "log_level": 0}
    try:
        _read_line(one)
        with ProducerGroup(config, group_id, 1, session_timeout_ms=session_ms) as standby:
            standby.subscribe()
            while standby.assignment:  # the older member has the partition
                standby.alive(0.1)
            time.sleep(1)
            start = time.monotonic()
            one.send_signal(signal.SIGKILL if how == "kill" else signal.SIGTERM)
            while not standby.assignment:
                standby.alive(0.05)
            return time.monotonic() - start
    finally:
        one.kill()
        one.wait()
        assert one.stdout is not None
        one.stdout.close()


def rates(servers: str, topic: str, records: int = 100_000, each: int = 1000) -> tuple[float, float]:
    """Records per second in transactions of `each`: of a member of a group, and of the same producer without one."""
    values = [b"x" * 100] * each
    config = {"bootstrap.servers": servers, "log_level": 0}
    with ProducerGroup(config, f"rate-{topic}", 1) as group:
        group.subscribe()
        group.produce_many(topic, values, source_partition=0)
        group.commit_transaction("0")
        start = time.monotonic()
        for number in range(records // each):
            group.produce_many(topic, values, source_partition=0)
            group.commit_transaction(str(number))
        grouped = records / (time.monotonic() - start)
    with Producer({**config, "transactional.id": f"rate-{topic}"}) as producer:
        producer.init_transactions()
        start = time.monotonic()
        for _ in range(records // each):
            producer.begin_transaction()
            producer.produce_many(topic, values)
            producer.commit_transaction()
        return grouped, records / (time.monotonic() - start)


# ---- the story


def tell(faults: int, records: int, seed: int, figures: bool) -> int:
    with KafkaCluster(3, config=BROKERS) as cluster:
        cluster.create_topic(TOPIC, PARTITIONS)
        servers = cluster.bootstrap_servers
        if figures:
            cluster.create_topic("takeover", 1)
            for session_ms in (SESSION_MS, 30_000):
                for how in ("close", "kill"):
                    took = takeover(servers, f"takeover-{how}-{session_ms}", session_ms, how)
                    print(f"takeover after {how}, session_timeout_ms={session_ms}: {took:.2f} s", flush=True)
            cluster.create_topic("rate", 1)
            grouped, alone = rates(servers, "rate")
            print(f"transactions of 1,000 records: {grouped:,.0f} records/s in a group, {alone:,.0f} without one")
        print(f"seed {seed}", flush=True)
        story = Story(cluster, seed)
        try:
            while sum(story.faults.values()) < faults:
                story.fault()
            if story.broker_back is not None:
                story.broker_back.join()
            while sum(_positions(servers, GROUP).values()) < records:
                story.reap()
                while len(story.members) < 2:
                    story.begin()
                time.sleep(1)
            story.end_all(signal.SIGTERM)
        finally:
            if story.broker_back is not None:
                story.broker_back.join()
            story.end_all()
        account = check(servers, GROUP, TOPIC, PARTITIONS)
        told = ", ".join(f"{count} {kind}" for kind, count in sorted(story.faults.items()))
        print(f"{sum(story.faults.values())} faults ({told})")
        print(account)
        return 0 if account.clean and account.records >= records else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--records", type=int, default=10_000, help="at least so many")
    parser.add_argument("--seed", type=int, default=random.randrange(10_000))
    parser.add_argument("--no-figures", action="store_true", help="neither takeover times nor rates")
    own = parser.add_argument_group("of a member, which the story starts")
    own.add_argument("--member", metavar="SERVERS", help="be one")
    own.add_argument("--group", default=GROUP)
    own.add_argument("--topic", default=TOPIC)
    own.add_argument("--partitions", type=int, default=PARTITIONS)
    own.add_argument("--session", type=int, default=SESSION_MS)
    own.add_argument("--instance")
    own.add_argument("--count", type=int)
    own.add_argument("--die-at", choices=POINTS)
    own.add_argument("--after", type=int, default=1)
    given = parser.parse_args()
    if given.member is None:
        try:
            return tell(given.faults, given.records, given.seed, not given.no_figures)
        except KafkaUnavailable as missing:
            sys.exit(str(missing))
    if given.die_at is not None:
        die_at(given.die_at, given.after)
    member(
        given.member,
        given.group,
        given.topic,
        given.partitions,
        given.session,
        instance_id=given.instance,
        count=given.count,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
