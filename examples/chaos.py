"""Producers of every kind at once, brokers that die, freeze and move, and an account of every single record.

    python examples/chaos.py                         # five minutes; --minutes 60 --seed 7 for an hour of another story

Starts a real Apache Kafka of three brokers on this machine (Java 17 needed, see the README): three copies of
everything, two of them needed for an acknowledgement, for some kinds all. Brokers are killed and restarted, frozen,
stopped in good order, and leaders are moved, at random but always from the printed seed. Never is more than one broker
away, and never the next one before all copies are in sync: whatever is acknowledged has to survive.

    faults (main thread)  ->  brokers  <-  a Line per kind of producer, each a thread with topics of its own
                                               |  what each record was told, in arrays (20 bytes a record)
    verdict  <-  Findings  <-  examine(): every topic read back and compared with what was told

The verdict is a table with a row for each kind of producer; KINDS says what each is promised. The exit status is 1 if
a promise was broken, and then the record, what it was told, the log around it, the faults of that time and librdkafka's
own words are printed. Ctrl-C ends the run early, with the verdict so far; a second one ends it at once.

Two ways in which librdkafka breaks what it promises are known, and the rows of confluent-kafka show them as well:
- doubled: a request that is refused (its leader has moved) while the next one is in flight makes the client
  start a new epoch, for all partitions. What some other partition has sent without an answer is then sent again under
  that epoch, where the broker cannot know it (librdkafka #4953).
- lost: the first request of a new producer to a partition is refused and the second, already in flight, is taken: a
  broker takes any sequence number from a producer that it does not know (KAFKA-15591). librdkafka concludes that the
  first must have been written and acknowledges it, without an offset.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import zlib
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import confluent_kafka
import pyarrow as pa
from confluent_kafka import Consumer, ElectionType, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from fastprod import Producer
from fastprod.partitioning import murmur2
from fastprod.testing import KafkaCluster, KafkaUnavailable

PARTITIONS = 6  # of each topic
KEYS = 53
POOL = random.Random(7).randbytes(200_000)  # what values are cut from
ANSWER_S = 5.0  # librdkafka waits so long for a broker's answer; some freezes are longer
FLUSH_S = 120.0
SYNC_S = 180.0
FETCH = 5000  # records taken from a consumer at once
EXAMPLES = 3  # of each trouble that are shown in full
AROUND = 3  # offsets shown on either side
WORDS = 4000  # of librdkafka's log lines that are kept for each kind

# What a record was told. Anything above is an index into Line.errors.
NOTHING, ACKNOWLEDGED, ABORTED, UNCERTAIN, FAILED = range(5)

# ---- what is promised

ALWAYS = frozenset({"misplaced", "altered", "alien", "unanswered", "answered twice", "thread died"})
PROMISES: dict[str, frozenset[str]] = {  # what must not happen; everything is counted
    "once, in order": ALWAYS | {"lost", "doubled", "reordered", "wrong offset"},
    # Idempotence ends at a delivery timeout, in every partition: what has not been acknowledged by then is sent again
    # as if it were new. Without idempotence a lost answer doubles records, and one request in flight does not keep the
    # order: librdkafka has the next one ready by then and sends it before it repeats the one that failed.
    "kept": ALWAYS | {"lost", "wrong offset"},
    # A leader alone may acknowledge, and lose what it alone had.
    "nothing": ALWAYS,
    # All of a committed transaction and nothing of an aborted one.
    "all or none": ALWAYS | {"lost", "doubled", "reordered", "aborted but seen", "torn"},
    # Not ours: to compare with.
    "(reference)": frozenset({"thread died"}),
}

IDEMPOTENT = {"debug": "eos"}  # librdkafka then tells of sequence numbers, which is rare and worth knowing
YOUNG = {**IDEMPOTENT, "batch.num.messages": 5}  # several requests from the first moment
HASTY = {**YOUNG, "linger.ms": 0}


@dataclass(frozen=True)
class Kind:
    """A way to produce, and what it is promised."""

    name: str
    promise: str
    send: Callable[[Line, Any, range], None]
    config: dict[str, Any]
    rate: int = 150  # records per second
    filler: tuple[int, int] = (10, 90)  # bytes
    keys: str = "none"  # none, some or all
    placing: str = "java"  # where a key belongs: java, crc32, or number for every record
    topics: int = 1
    life_s: tuple[float, float] | None = None  # after which the producer is closed and another one made
    make: Callable[..., Any] = Producer
    transactional: bool = False
    copies_needed: int = 2  # for an acknowledgement; with 3, brokers refuse records whenever one of them is away


class Line:
    """One kind of producer at work, in a thread of its own, and what each of its records was told."""

    def __init__(self, kind: Kind, servers: str, seed: int, clock: Clock) -> None:
        self.kind = kind
        self.clock = clock
        self.random = random.Random(f"{seed} {kind.name}")
        self.label = kind.name.replace(" ", "-").encode()
        name = f"chaos.{self.label.decode()}"
        self.topics = [name] if kind.topics == 1 else [f"{name}.{number}" for number in range(kind.topics)]
        self.words: deque[tuple[int, str]] = deque(maxlen=WORDS)
        self.config = {
            "bootstrap.servers": servers,
            "request.timeout.ms": int(ANSWER_S * 1000) - 1000,
            "socket.timeout.ms": int(ANSWER_S * 1000),
            **kind.config,
        }
        if kind.placing == "number":
            self.config["partitioner"] = ByNumber()
        # Per record, by its number.
        self.given_at = array("I")  # ms
        self.told_at = array("I")
        self.told = array("H")
        self.partition = array("h")  # as told, or -1
        self.offset = array("q")
        self.errors: list[str] = []
        # Per transaction: its first record, the next one's first, and how it ended.
        self.transactions: list[tuple[int, int, int]] = []
        # Per partition of a bulk call: first record, number of records, topic, partition, acknowledged, first and last
        # offset; -1 where that is unknown.
        self.extents = array("q")
        self.receipts: deque[tuple[range, Any]] = deque()
        self.troubles: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.longest_ms = 0  # that giving a few records has taken
        self.fatal = ""
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, name=kind.name)

    # records

    def key(self, number: int) -> bytes | None:
        if self.kind.keys == "none" or (self.kind.keys == "some" and number % 3 == 0):
            return None
        return b"key-%d" % (number % KEYS)

    def value(self, number: int) -> bytes:
        low, high = self.kind.filler
        start = number * 131 % 100_000
        filler = POOL[start : start + low + number * 7919 % (high - low + 1)]
        return b"%b %d %d %b" % (self.label, number, self.given_at[number], filler)

    def headers(self, number: int) -> list[tuple[str, bytes]]:
        return [("number", b"%d" % number), ("empty", b"")]

    def timestamp(self, number: int) -> int:
        return self.clock.wall_ms + self.given_at[number]

    def topic(self, number: int) -> str:
        return self.topics[number % len(self.topics)]

    def place(self, number: int) -> int | None:
        """The partition that a record belongs to, if its kind says that."""
        if self.kind.placing == "number":
            return number % PARTITIONS
        key = self.key(number)
        if key is None:
            return None
        return (zlib.crc32(key) if self.kind.placing == "crc32" else murmur2(key) & 0x7FFFFFFF) % PARTITIONS

    def give(self, count: int) -> range:
        """The numbers of the next records."""
        first, now = len(self.told), self.clock.ms()
        self.given_at.extend([now] * count)
        self.told_at.extend([0] * count)
        self.told.extend([NOTHING] * count)
        self.partition.extend([-1] * count)
        self.offset.extend([-1] * count)
        return range(first, first + count)

    # what they are told

    def tell(self, number: int, what: int, partition: int | None = None, offset: int | None = None) -> None:
        if self.told[number] != NOTHING:
            self.troubles["answered twice"] += 1
            return
        self.told[number] = what
        self.told_at[number] = self.clock.ms()
        self.partition[number] = -1 if partition is None else partition
        self.offset[number] = -1 if offset is None else offset

    def code(self, error: Any) -> int:
        """The number that stands for an error."""
        name = error.name() if isinstance(error, KafkaError) else type(error).__name__
        if isinstance(error, KafkaError) and error.fatal():
            self.fatal = self.fatal or str(error)
        if name not in self.errors:
            self.errors.append(name)
        return FAILED + self.errors.index(name)

    def delivered(self, number: int, error: KafkaError | None, message: Message) -> None:
        what = ACKNOWLEDGED if error is None else self.code(error)
        self.tell(number, what, message.partition(), message.offset())

    def collect(self) -> None:
        """Read the receipts that are complete."""
        for _ in range(len(self.receipts)):
            numbers, receipt = self.receipts.popleft()
            if not receipt.done:
                self.receipts.append((numbers, receipt))
                continue
            failed = {one.index: one.error for one in receipt.errors}
            for index, number in enumerate(numbers):
                self.tell(number, self.code(failed[index]) if index in failed else ACKNOWLEDGED)
            for (topic, partition), (records, first, last) in receipt.extents.items():
                unknown = first is None or last is None
                self.extents.extend((numbers.start, len(numbers), self.topics.index(topic), partition, records))
                self.extents.extend((-1, -1) if unknown else (first, last))

    def describe(self, number: int) -> str:
        code = self.told[number]
        what = {
            NOTHING: "told nothing",
            ACKNOWLEDGED: "acknowledged",
            ABORTED: "aborted",
            UNCERTAIN: "outcome unknown",
        }.get(code) or f"failed with {self.errors[code - FAILED]}"
        where = f", partition {self.partition[number]}" if self.partition[number] >= 0 else ""
        where += f", offset {self.offset[number]}" if self.offset[number] >= 0 else ", no offset"
        return f"given at {self.given_at[number] / 1000:.3f} s, {what} at {self.told_at[number] / 1000:.3f} s{where}"

    # work

    def _run(self) -> None:
        try:
            while not self.over.is_set():
                self._live()
        except BaseException:
            self.troubles["thread died"] += 1
            print(f"*** {self.kind.name} died:\n{traceback.format_exc()}", flush=True)

    def _live(self) -> None:
        """One producer, from its beginning to its end."""
        end = self.clock.ms() + 1000 * self.random.uniform(*self.kind.life_s) if self.kind.life_s else float("inf")
        producer = self.kind.make({**self.config, "logger": self._logger(), "error_cb": self._note_error})
        self.notes["producers"] += 1
        self.fatal = ""
        try:
            if self.kind.transactional:
                self._transact(producer)
            else:
                due = time.monotonic()
                while not self.over.is_set() and not self.fatal and self.clock.ms() < end:
                    count = self.random.randint(1, self.kind.rate // 4)
                    start = self.clock.ms()
                    self.kind.send(self, producer, self.give(count))
                    self.longest_ms = max(self.longest_ms, self.clock.ms() - start)
                    due = max(due, time.monotonic() - 1) + count / self.kind.rate
                    while (left := due - time.monotonic()) > 0 and not self.over.is_set():
                        producer.poll(min(left, 0.05))
                        self.collect()
                producer.flush(FLUSH_S)
                self.collect()
            if self.fatal:
                self.notes[f"fatal: {self.fatal}"] += 1
        finally:
            producer.close()
            self.collect()
            self.receipts.clear()

    def _note_error(self, error: KafkaError) -> None:
        if error.fatal():
            self.fatal = self.fatal or str(error)

    def _logger(self) -> logging.Logger:
        logger = logging.Logger(self.kind.name)
        logger.addHandler(Words(self))
        return logger

    def _transact(self, producer: Producer) -> None:
        """One transaction after the other until the producer has to be replaced."""
        if not self._until_done(producer.init_transactions, "init"):
            return
        while not self.over.is_set() and not self.fatal:
            try:
                producer.begin_transaction()
            except KafkaException as error:  # the last one's end got lost: only another producer can go on
                self.fatal = str(error.args[0])
                self.notes[f"begin: {error.args[0].name()}"] += 1
                return
            first = len(self.told)
            abort = self.random.random() < 0.25
            outcome = ABORTED  # by the brokers at the latest, if nobody commits it
            try:
                for _ in range(self.random.randint(1, 4)):
                    self.kind.send(self, producer, self.give(self.random.randint(1, self.kind.rate // 3)))
                    self.over.wait(0.1)
            except KafkaException as error:
                self.notes[f"produce: {error.args[0].name()}"] += 1
                abort = True
            if not abort:
                done = self._until_done(producer.commit_transaction, "commit")
                outcome = ACKNOWLEDGED if done else UNCERTAIN
                abort = not done and not self.fatal
            elif self.random.random() < 0.5:
                producer.flush(FLUSH_S)
            if abort and self._until_done(producer.abort_transaction, "abort"):
                outcome = ABORTED
            end = len(self.told)
            for number in range(first, end):
                self.tell(number, outcome)
            self.transactions.append((first, end, outcome))

    def _until_done(self, call: Callable[[float], None], name: str) -> bool:
        """Repeat a step of a transaction for as long as that may help; whether it succeeded."""
        until = time.monotonic() + FLUSH_S
        while time.monotonic() < until:
            try:
                call(10.0)
                return True
            except KafkaException as problem:
                error = problem.args[0]
                self.notes[f"{name}: {error.name()}"] += 1
                if error.fatal():
                    self.fatal = str(error)
                if not error.retriable():
                    return False
        self.fatal = self.fatal or f"{name} does not end"
        return False


class Words(logging.Handler):
    """Keeps what librdkafka says about a line's producers, with the time."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self.line = line

    def emit(self, record: logging.LogRecord) -> None:
        self.line.words.append((self.line.clock.ms(), record.getMessage()))


# ---- ways to produce


class ByNumber:
    """A partitioner in Python that goes by the number of a record."""

    def partition(self, topic: str, key: bytes | None, value: bytes | None, partitions: int, available: object) -> int:
        return int((value or b"").split(b" ", 2)[1]) % partitions

    def __repr__(self) -> str:
        return "ByNumber()"


def single(line: Line, producer: Any, numbers: range) -> None:
    for number in numbers:
        while True:
            try:
                producer.produce(
                    line.topic(number),
                    line.value(number),
                    line.key(number),
                    on_delivery=partial(line.delivered, number),
                )
                break
            except BufferError:  # only confluent-kafka's queue: ours waits
                producer.poll(0.05)
            except KafkaException as error:
                line.tell(number, line.code(error.args[0]))
                break


def rich(line: Line, producer: Any, numbers: range) -> None:
    """With headers and timestamps, single and in bulk."""
    if len(numbers) % 2:
        receipt = producer.produce_many(
            line.topics[0],
            [line.value(number) for number in numbers],
            headers=[line.headers(number) for number in numbers],
            timestamps=[line.timestamp(number) for number in numbers],
        )
        line.receipts.append((numbers, receipt))
        return
    for number in numbers:
        producer.produce(
            line.topics[0],
            line.value(number),
            on_delivery=partial(line.delivered, number),
            headers=line.headers(number),
            timestamp=line.timestamp(number),
        )


def bulk(line: Line, producer: Any, numbers: range) -> None:
    keys = [line.key(number) for number in numbers] if line.kind.keys != "none" else None
    receipt = producer.produce_many(line.topics[0], [line.value(number) for number in numbers], keys)
    line.receipts.append((numbers, receipt))


def by_reference(line: Line, producer: Any, numbers: range) -> None:
    """Values large enough to stay where they are: bytes objects and Arrow buffers in turns."""
    values: Any = [line.value(number) for number in numbers]
    if len(numbers) % 2:
        values = pa.array(values, pa.large_binary())
    line.receipts.append((numbers, producer.produce_many(line.topics[0], values)))


def arrow(line: Line, producer: Any, numbers: range) -> None:
    columns = {
        "value": pa.array([line.value(number) for number in numbers], pa.binary()),
        "key": pa.array([line.key(number) for number in numbers], pa.binary()),
        "topic": pa.array([line.topic(number) for number in numbers], pa.string()),
    }
    line.receipts.append((numbers, producer.produce_arrow(pa.table(columns))))


def in_transaction(line: Line, producer: Any, numbers: range) -> None:
    values = [line.value(number) for number in numbers]
    keys = [line.key(number) for number in numbers]
    if len(numbers) % 2:
        producer.produce_many(line.topics[0], values, keys)
        return
    for value, key in zip(values, keys, strict=True):
        producer.produce(line.topics[0], value, key)


KINDS = (
    Kind("single", "once, in order", single, IDEMPOTENT, rate=200),
    Kind("keyed", "once, in order", single, IDEMPOTENT, rate=200, keys="all"),
    Kind("bulk", "once, in order", bulk, IDEMPOTENT, rate=250, keys="some"),
    Kind("arrow", "once, in order", arrow, IDEMPOTENT, rate=200, keys="some", topics=2),
    Kind("by reference", "once, in order", by_reference, IDEMPOTENT, rate=50, filler=(600, 5000)),
    Kind("python partitioner", "once, in order", single, IDEMPOTENT, placing="number"),
    Kind(
        "librdkafka partitioner",
        "once, in order",
        single,
        {**IDEMPOTENT, "partitioner": "consistent_random"},
        keys="some",
        placing="crc32",
    ),
    Kind("rich", "once, in order", rich, IDEMPOTENT),
    Kind("compressed", "once, in order", bulk, {**IDEMPOTENT, "compression.type": "lz4"}),
    Kind("all copies", "once, in order", single, IDEMPOTENT, copies_needed=3),
    Kind("young", "once, in order", single, YOUNG, life_s=(1, 4), copies_needed=3),
    Kind("hasty", "once, in order", single, HASTY, life_s=(1, 4), copies_needed=3),
    Kind(
        "strict",
        "once, in order",
        single,
        {**IDEMPOTENT, "strict.order": True, "message.timeout.ms": 6000},
        life_s=(20, 60),
    ),
    Kind("short timeout", "kept", single, {**IDEMPOTENT, "message.timeout.ms": 6000}),
    Kind(
        "one in flight",
        "kept",
        single,
        {"enable.idempotence": False, "acks": "all", "max.in.flight.requests.per.connection": 1},
    ),
    Kind("leader only", "nothing", single, {"acks": "1"}),
    Kind(
        "transactional",
        "all or none",
        in_transaction,
        {**IDEMPOTENT, "transactional.id": "chaos", "transaction.timeout.ms": 30_000},
        keys="some",
        transactional=True,
    ),
    Kind(
        "confluent",
        "(reference)",
        single,
        {**IDEMPOTENT, "enable.idempotence": True, "linger.ms": 5, "partitioner": "murmur2_random"},
        rate=200,
        keys="some",
        make=confluent_kafka.Producer,
    ),
    Kind(
        "confluent all copies",
        "(reference)",
        single,
        {**IDEMPOTENT, "enable.idempotence": True, "linger.ms": 5},
        copies_needed=3,
        make=confluent_kafka.Producer,
    ),
    Kind(
        "confluent young",
        "(reference)",
        single,
        {**HASTY, "enable.idempotence": True},
        life_s=(1, 4),
        copies_needed=3,
        make=confluent_kafka.Producer,
    ),
)


# ---- faults


class Clock:
    """Milliseconds since the beginning."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.wall_ms = int(time.time() * 1000)

    def ms(self) -> int:
        return int((time.monotonic() - self.start) * 1000)


class Faults:
    """What happens to the brokers, one thing at a time."""

    def __init__(self, cluster: KafkaCluster, lines: list[Line], seed: int, clock: Clock) -> None:
        self.cluster = cluster
        self.lines = lines
        self.random = random.Random(seed)
        self.clock = clock
        self.enough = threading.Event()  # set by Ctrl-C
        self.log: list[tuple[int, int, str]] = []  # first and last millisecond, and what happened between them
        self.counts: Counter[str] = Counter()

    def run(self, until_ms: float, keep_going: bool) -> None:
        actions = {self.kill: 3, self.freeze: 2, self.freeze_long: 3, self.stop: 2, self.elect: 2, self.move: 1}
        self.enough.wait(self.random.uniform(1, 3))
        while not self.enough.is_set() and self.clock.ms() < until_ms:
            action = self.random.choices(list(actions), list(actions.values()))[0]
            broker = self.random.choice(self.cluster.brokers)
            start = self.clock.ms()
            what = action(broker)
            self.wait_in_sync()
            self.log.append((start, self.clock.ms(), what))
            self.counts[action.__name__.replace("_", " ")] += 1
            given = sum(len(line.told) for line in self.lines)
            waiting = sum(line.told[-5000:].count(NOTHING) for line in self.lines)
            print(
                f"{start / 1000:8.1f} s  {what:62} in sync after {(self.clock.ms() - start) / 1000:4.1f} s, "
                f"{given:>10,} given, {waiting:>6,} wait",
                flush=True,
            )
            broken = [line.kind.name for line in self.lines if set(line.troubles) & PROMISES[line.kind.promise]]
            if broken and not keep_going:
                print(f"*** ends early, because of {', '.join(broken)}; --keep-going goes on", flush=True)
                break
            self.enough.wait(self.random.uniform(0, 3))

    def kill(self, broker: int) -> str:
        self.cluster.kill(broker)
        seconds = self.random.uniform(0, 6)
        self.enough.wait(seconds)
        self.cluster.restart(broker)
        return f"broker {broker} killed (SIGKILL), started again after {seconds:.1f} s"

    def freeze(self, broker: int) -> str:
        return self._freeze(broker, self.random.uniform(0.3, 2.5))

    def freeze_long(self, broker: int) -> str:
        return self._freeze(broker, self.random.uniform(ANSWER_S + 1, ANSWER_S + 7))

    def _freeze(self, broker: int, seconds: float) -> str:
        self.cluster.pause(broker)
        self.enough.wait(seconds)
        self.cluster.resume(broker)
        return f"broker {broker} frozen (SIGSTOP) for {seconds:.1f} s"

    def stop(self, broker: int) -> str:
        self.cluster.stop(broker)
        seconds = self.random.uniform(0, 3)
        self.enough.wait(seconds)
        self.cluster.restart(broker)
        return f"broker {broker} stopped in good order, started again after {seconds:.1f} s"

    def elect(self, broker: int) -> str:
        admin = AdminClient(quiet(self.cluster))
        with suppress(KafkaException):  # a partition that cannot change its leader now keeps it
            admin.elect_leaders(ElectionType.PREFERRED, None).result(SYNC_S)
        return "all partitions back to their preferred leaders"

    def move(self, broker: int) -> str:
        topic = self.random.choice([topic for line in self.lines for topic in line.topics])
        partition = self.random.randrange(PARTITIONS)
        self.cluster.set_leader(topic, partition, broker)
        return f"{topic} [{partition}] moved to broker {broker}"

    def wait_in_sync(self) -> None:
        """Wait until every copy of every partition is in sync."""
        admin = AdminClient(quiet(self.cluster))
        until = time.monotonic() + SYNC_S
        while True:
            with suppress(KafkaException):
                topics = admin.list_topics(timeout=5).topics.values()
                behind = [
                    f"{topic.topic} [{one.id}] {one.isrs} of {one.replicas}"
                    for topic in topics
                    for one in topic.partitions.values()
                    if one.leader not in one.isrs or set(one.isrs) != set(one.replicas)
                ]
                if topics and not behind:
                    return
                if time.monotonic() > until:
                    raise TimeoutError(f"not in sync after {SYNC_S:g} s: {', '.join(behind[:10])}")
            time.sleep(0.2)

    def during(self, first_ms: int, last_ms: int) -> list[str]:
        return [
            f"{start / 1000:.1f} to {end / 1000:.1f} s: {what}"
            for start, end, what in self.log
            if start <= last_ms and end >= first_ms
        ]


# ---- the account


class Findings:
    """What became of the records of one line: what the log holds against what the line was told."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.counts = Counter(line.troubles)
        self.examples: dict[str, list[int]] = {}  # the first records of each trouble
        self.said: dict[int, str] = {}  # by receipts, where the log has something else
        given = len(line.told)
        # Where the first copy of a record is, or -1; and the others.
        self.partition = array("h", [-1]) * given
        self.offset = array("q", [-1]) * given
        self.more: dict[int, list[tuple[int, int]]] = {}
        self.newest: dict[tuple[str, int], int] = {}  # acknowledged record, by topic and partition

    def add(self, trouble: str, number: int = -1) -> None:
        self.counts[trouble] += 1
        known = self.examples.setdefault(trouble, [])
        if number >= 0 and len(known) < EXAMPLES:
            known.append(number)

    @property
    def broken(self) -> list[str]:
        return sorted(name for name in PROMISES[self.line.kind.promise] if self.counts[name])

    def copies(self, number: int) -> list[tuple[int, int]]:
        """Partition and offset of each copy in the log."""
        if self.offset[number] < 0:
            return []
        return [(self.partition[number], self.offset[number]), *self.more.get(number, [])]

    def see(self, message: Message) -> None:
        """Take note of a record in the log."""
        line, value = self.line, message.value() or b""
        topic, partition, offset = str(message.topic()), message.partition() or 0, message.offset() or 0
        label, _, rest = value.partition(b" ")
        number = int(rest.split(b" ", 1)[0]) if label == line.label else -1
        if not 0 <= number < len(line.told):
            self.add("alien")
            return
        acknowledged = line.told[number] == ACKNOWLEDGED
        if self.offset[number] >= 0:
            self.more.setdefault(number, []).append((partition, offset))
            self.add("doubled" if acknowledged else "doubled, not acknowledged", number)
        else:
            self.partition[number], self.offset[number] = partition, offset
            newest = self.newest.get((topic, partition), -1)
            if acknowledged and number < newest:
                self.add("reordered", number)
            elif acknowledged:
                self.newest[topic, partition] = number
        wanted, told = line.place(number), line.partition[number]
        if topic != line.topic(number) or wanted not in (None, partition) or told not in (-1, partition):
            self.add("misplaced", number)
        same = value == line.value(number) and message.key() == line.key(number)
        if line.kind.send is rich:
            same = same and message.headers() == line.headers(number)
            same = same and message.timestamp()[1] == line.timestamp(number)
        if not same:
            self.add("altered", number)

    def compare(self, number: int) -> None:
        """What a record was told with where it is."""
        line, copies = self.line, self.copies(number)
        told, place = line.told[number], (line.partition[number], line.offset[number])
        if told == NOTHING:
            self.add("unanswered", number)
        elif told == ACKNOWLEDGED:
            self.counts["acknowledged"] += 1
            if not copies:
                self.add("lost", number)
            elif place[1] >= 0 and place not in copies:
                self.add("wrong offset", number)
            elif place[0] >= 0 > place[1]:
                self.add("no offset", number)
        elif told == ABORTED:
            self.counts["aborted"] += 1
            if copies:
                self.add("aborted but seen", number)
        elif told >= FAILED:
            self.counts["failed"] += 1
            self.counts[f"failed with {line.errors[told - FAILED]}"] += 1
            if copies:
                self.add("failed but written", number)

    def compare_transaction(self, first: int, end: int, outcome: int) -> None:
        if outcome != UNCERTAIN:
            self.counts["committed" if outcome == ACKNOWLEDGED else "aborted transactions"] += 1
            return
        self.counts["transactions of unknown outcome"] += 1
        if sum(self.offset[number] >= 0 for number in range(first, end)) not in (0, end - first):
            self.add("torn", first)

    def compare_extent(
        self, first: int, count: int, topic: int, partition: int, records: int, low: int, high: int
    ) -> None:
        """What a receipt says of a partition with the records of that call which are there."""
        line, numbers = self.line, range(first, first + count)
        if low < 0:
            self.add("no offset", first)
        if low < 0 or any(number in self.more for number in numbers):
            return  # which of the copies was told nobody can say
        mine = [
            self.offset[number]
            for number in numbers
            if line.told[number] == ACKNOWLEDGED
            and self.partition[number] == partition
            and line.topic(number) == line.topics[topic]
        ]
        if mine and (records, low, high) != (len(mine), min(mine), max(mine)):
            self.add("wrong offset", first)
            if first in self.examples["wrong offset"]:
                self.said[first] = (
                    f"its receipt says {records} records in partition {partition} from {low} to {high}, "
                    f"the log has {len(mine)} from {min(mine)} to {max(mine)}"
                )


def examine(line: Line, servers: str) -> Findings:
    """Read everything back that a line has written, and compare it with what the line was told."""
    found = Findings(line)
    for message in records(servers, line.topics):
        found.see(message)
    for number in range(len(line.told)):
        found.compare(number)
    for transaction in line.transactions:
        found.compare_transaction(*transaction)
    for at in range(0, len(line.extents), 7):
        found.compare_extent(*line.extents[at : at + 7])
    return found


@contextmanager
def reader(servers: str, isolation: str = "read_committed") -> Iterator[Consumer]:
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "chaos",
            "isolation.level": isolation,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "log_level": 0,
        }
    )
    try:
        yield consumer
    finally:
        consumer.close()


def records(servers: str, topics: list[str], *, silence_s: float = 60.0) -> Iterator[Message]:
    """All that readers of committed data see, in order within each partition."""
    with reader(servers) as consumer:
        left = {(topic, partition) for topic in topics for partition in range(PARTITIONS)}
        for topic in topics:
            wait_for_transactions(servers, consumer, topic)
        consumer.assign([TopicPartition(topic, partition, 0) for topic, partition in left])
        deadline = time.monotonic() + silence_s
        while left:
            messages = consumer.consume(FETCH, 0.1)
            if messages:
                deadline = time.monotonic() + silence_s
            elif time.monotonic() > deadline:
                raise TimeoutError(f"no end of {sorted(left)} after {silence_s:g} s of silence")
            for message in messages:
                error = message.error()
                if error is None:
                    yield message
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard((str(message.topic()), message.partition() or 0))
                else:
                    raise KafkaException(error)


def wait_for_transactions(servers: str, committed: Consumer, topic: str) -> None:
    """Wait until no transaction is open: until then readers of committed data do not get to the end."""
    until = time.monotonic() + SYNC_S
    with reader(servers, "read_uncommitted") as everything:
        for partition in range(PARTITIONS):
            place = TopicPartition(topic, partition)
            while True:
                with suppress(KafkaException):
                    end = everything.get_watermark_offsets(place, timeout=10)[1]
                    if committed.get_watermark_offsets(place, timeout=10)[1] == end:
                        break
                if time.monotonic() > until:
                    raise TimeoutError(f"a transaction is still open in {topic} [{partition}]")
                time.sleep(0.1)


def around(servers: str, topic: str, partition: int, offset: int) -> list[str]:
    """What lies about an offset."""
    found = []
    with reader(servers, "read_uncommitted") as consumer:
        consumer.assign([TopicPartition(topic, partition, max(0, offset - AROUND))])
        while (message := consumer.poll(10)) is not None and message.error() is None:  # the end is an error too
            if (message.offset() or 0) > offset + AROUND:
                break
            label, number, *_ = ((message.value() or b"").decode(errors="replace") + "  ").split(" ", 2)
            found.append(f"{message.offset()}: {label} {number}")
    return found


def explain(found: Findings, faults: Faults, servers: str) -> None:
    """What may help to find out why records were lost, doubled or reordered; all of it where that breaks a promise."""
    line = found.line
    for trouble in dict.fromkeys([*found.broken, "lost", "doubled", "reordered"]):
        numbers = found.examples.get(trouble, [])[: EXAMPLES if trouble in found.broken else 1]
        for number in numbers:
            broken = "BROKEN: " if trouble in found.broken else ""
            print(f"\n{broken}{line.kind.name}: {trouble} is record {number} ({found.counts[trouble]:,} such)")
            print(f"    {line.describe(number)}")
            if trouble == "wrong offset" and number in found.said:
                print(f"    {found.said[number]}")
            topic, places = line.topic(number), found.copies(number)
            for partition, offset in places:
                print(f"    lies in {topic} [{partition}] at {offset}")
            start, end = line.given_at[number] - 1000, (line.told_at[number] or faults.clock.ms()) + 1000
            for fault in faults.during(start, end):
                print(f"    fault {fault}")
            if not broken:
                continue
            for near in range(max(0, number - AROUND), min(len(line.told), number + AROUND + 1)):
                print(f"      record {near}: {line.describe(near)}")
            if line.offset[number] >= 0:
                places.append((line.partition[number], line.offset[number]))
            for partition, offset in dict.fromkeys(places):
                for entry in around(servers, topic, partition, offset):
                    print(f"      {topic} [{partition}] {entry}")
            for at, text in [words for words in line.words if start <= words[0] <= end][:60]:
                print(f"      {at / 1000:.3f} s librdkafka: {text}")


COLUMNS = (
    *("acknowledged", "failed", "aborted", "lost", "doubled", "reordered", "misplaced", "altered", "wrong offset"),
    *("no offset", "unanswered", "failed but written"),
)


def verdict(results: list[Findings]) -> int:
    """Print the table; returns the number of kinds that were not given what they are promised."""
    width = max(len(found.line.kind.name) for found in results)
    print(f"\n{'kind':{width}} {'given':>10} {' '.join(f'{name:>12.12}' for name in COLUMNS)}  promise")
    for found in results:
        kind = found.line.kind
        cells = []
        for name in COLUMNS:
            mark = "!" if name in found.broken else ""
            cells.append(f"{f'{mark}{found.counts[name]:,}':>12}")
        print(f"{kind.name:{width}} {len(found.line.told):>10,} {' '.join(cells)}  {kind.promise}")
    for found in results:
        shown = (*COLUMNS, *found.line.notes)
        rest = {name: count for name, count in sorted(found.counts.items()) if count and name not in shown}
        rest |= {name: count for name, count in found.line.notes.items() if name != "producers" or count > 1}
        if found.line.longest_ms > 1000:
            rest["ms in the longest call"] = found.line.longest_ms
        if rest:
            print(f"{found.line.kind.name}: " + ", ".join(f"{count:,} {name}" for name, count in rest.items()))
    broken = [found for found in results if found.broken]
    for found in broken:
        print(f"BROKEN: {found.line.kind.name} is promised «{found.line.kind.promise}»: {', '.join(found.broken)}")
    return len(broken)


def quiet(cluster: KafkaCluster) -> dict[str, Any]:
    return {"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, "reconnect.backoff.max.ms": 100}


def run(minutes: float, seed: int, brokers: int, keep_going: bool) -> int:
    """One run; returns how many kinds of producer were not given what they are promised."""
    # On a disk: an hour's data would take too much memory, and a broker that is killed keeps what the kernel has.
    with KafkaCluster(brokers, folder=tempfile.gettempdir()) as cluster:
        clock = Clock()
        lines = [Line(kind, cluster.bootstrap_servers, seed, clock) for kind in KINDS]
        faults = Faults(cluster, lines, seed, clock)
        for line in lines:
            safe = {
                "min.insync.replicas": line.kind.copies_needed,
                "unclean.leader.election.enable": False,
                "retention.ms": -1,
            }
            for topic in line.topics:
                cluster.create_topic(topic, PARTITIONS, 3, config=safe)
            settings = {name: value for name, value in line.config.items() if name != "bootstrap.servers"}
            maker = line.kind.make.__module__.partition(".")[0].replace("cimpl", "confluent_kafka")
            print(f"{line.kind.name}: {maker}.Producer {settings} «{line.kind.promise}»", flush=True)

        def end_early(number: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the next one ends at once
            faults.enough.set()

        pa.array([b""])  # brings pandas with it, which takes long once sixteen threads want Python's lock
        clock.start = time.monotonic()
        before = signal.signal(signal.SIGINT, end_early)
        try:
            for line in lines:
                line.thread.start()
            stuck = 0
            try:
                faults.run(minutes * 60_000, keep_going)
            except Exception:  # a broker did not come back: what is known by then is worth reading
                stuck = 1
                traceback.print_exc()
            for line in lines:
                line.over.set()
            for line in lines:
                line.thread.join(2 * FLUSH_S)
            given = sum(len(line.told) for line in lines)
            print(f"{clock.ms() / 1000:8.1f} s  all told; {given:,} records to be read back", flush=True)
            results = []
            for line in lines:
                if line.thread.is_alive():
                    line.troubles["thread died"] += 1
                    print(f"*** {line.kind.name} has not ended {2 * FLUSH_S:g} s after the last fault", flush=True)
                results.append(examine(line, cluster.bootstrap_servers))
            for found in results:
                explain(found, faults, cluster.bootstrap_servers)
            happened = ", ".join(f"{count} {name}" for name, count in sorted(faults.counts.items()))
            print(f"\nseed {seed}, {clock.ms() / 60_000:.1f} minutes, {len(faults.log)} faults: {happened}")
            broken = verdict(results)
            if broken:
                print("\nall faults:")
                for fault in faults.during(0, clock.ms()):
                    print(f"  {fault}")
            return broken + stuck
        finally:
            signal.signal(signal.SIGINT, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=None, help="of the faults and of what is sent; printed")
    parser.add_argument("--brokers", type=int, default=3, choices=(3, 4))
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first trouble seen on the way")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"seed {seed}, {options.minutes:g} minutes, {options.brokers} brokers", flush=True)
    try:
        broken = run(options.minutes, seed, options.brokers, options.keep_going)
    except KafkaUnavailable as missing:
        print(missing, file=sys.stderr)
        return 2
    print("a promise was broken" if broken else "every promise was kept")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
