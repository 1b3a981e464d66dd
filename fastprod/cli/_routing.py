"""What partitioners do when some brokers are slow: the same records through each, one after the other.

    Stage         where: mock brokers, an Apache Kafka of our own, somebody's cluster; and what makes brokers slow there
    Contender     a partitioner, as configuration
    flood()       as many records as the producer takes: Flood, with records and queue times per partition
    trickle()     few records and a long linger: Trickle, with the time at which each record was acknowledged

Nothing but the partitioner differs: all go through fastprod.Producer with the same options, each with a fresh producer
and a fresh topic. One record in SAMPLE asks for its delivery report, which tells partition and queue time; how many
records each partition got is the brokers' own count.
"""

from __future__ import annotations

import itertools
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from fastprod.cli._load import DeliveryError, Target
from fastprod.producer import Producer

BROKERS = 4
SLOW = (1, 3)
VALUE = b"0b5a2f0e-7c1d-4e57-9a43-5d1c8f6e2b90"  # 36 bytes, a UUID as text
# One record in so many tells its queue time. A prime: taken in turns, a multiple of the partitions would ask only one.
SAMPLE = 997
SETTLE_S = 60.0  # for what is still on its way when a run ends
KEPT = 64 << 20  # bytes of each partition that a broker of ours keeps
STATISTICS_MS = 500
WARM_UP_S = 5.0

_tags = itertools.count(1)


# ---- partitioners


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    title: str
    options: Mapping[str, Any]

    def configuration(self, conf: Mapping[str, Any]) -> dict[str, Any]:
        return {**conf, **self.options}


ADAPTIVE = "partitioner.adaptive.partitioning.enable"
RIVAL = "consistent_random"
CONTENDERS = {
    one.name: one
    for one in (
        Contender("round_robin", "each record to the next (Java to 2.3)", {"partitioner": "round_robin"}),
        Contender("sticky", "a batch each, at random (KIP-480)", {"partitioner": "sticky"}),
        Contender("uniform", "equal bytes (KIP-794, no load table)", {"partitioner": "uniform", ADAPTIVE: False}),
        Contender("adaptive", "by load table (KIP-794, our default)", {"partitioner": "uniform", ADAPTIVE: True}),
        Contender(RIVAL, "librdkafka's default", {"partitioner": RIVAL}),
    )
}


# ---- where


class Stage(ABC):
    """Brokers, some of them slow while a run goes on."""

    kind: str

    def __init__(self, bootstrap: str, partitions: int, slow: Collection[int]) -> None:
        self.bootstrap = bootstrap
        self.partitions = partitions
        self.slow = frozenset(slow)

    @abstractmethod
    def slowness(self) -> AbstractContextManager[None]:
        """Slow brokers are slow in this with block."""

    def warm_up(self, conf: Mapping[str, Any]) -> None:  # noqa: B027
        """Whatever the brokers need before they are measured."""

    def create(self, topic: str) -> None:  # noqa: B027  (else the topic is created as on any cluster)
        """Make the topic, unless Target should."""

    def drop(self, target: Target) -> None:  # noqa: B027
        """The topic has served."""

    def close(self) -> None:  # noqa: B027
        """End the brokers if they are ours."""


class MockStage(Stage):
    """librdkafka's mock brokers; slow ones answer late."""

    kind = "mock"

    def __init__(self, partitions: int, slow: Collection[int], rtt_ms: int) -> None:
        from fastprod.testing import MockClusterProcess

        self.cluster = MockClusterProcess(BROKERS)
        self.rtt_ms = rtt_ms
        super().__init__(self.cluster.bootstrap_servers, partitions, slow)

    @contextmanager
    def slowness(self) -> Iterator[None]:
        for broker in self.slow:
            self.cluster.set_rtt(self.rtt_ms, broker)
        try:
            yield
        finally:
            self.cluster.set_rtt(0)

    def create(self, topic: str) -> None:
        self.cluster.create_topic(topic, self.partitions, 1)

    def close(self) -> None:
        self.cluster.close()


class RealStage(Stage):
    """An Apache Kafka on this machine; slow brokers are frozen for most of each second.

    Topics have one copy, as in the article: a slow broker would else slow down every partition that it follows.
    """

    kind = "real"

    def __init__(self, partitions: int, slow: Collection[int], share: float) -> None:
        from fastprod.testing import KafkaCluster

        self.cluster = KafkaCluster(BROKERS, config={"log.retention.check.interval.ms": 1000})
        self.share = share
        self.warm = False
        super().__init__(self.cluster.bootstrap_servers, partitions, slow)

    def slowness(self) -> AbstractContextManager[None]:
        return self.cluster.slowed(*self.slow, share=self.share) if self.slow and self.warm else nullcontext()

    def warm_up(self, conf: Mapping[str, Any]) -> None:
        """Java compiles what is used often: the first to be measured would pay for all."""
        flood(CONTENDERS["uniform"], conf, self, seconds=WARM_UP_S, records=None)
        self.warm = True

    def create(self, topic: str) -> None:
        limits = {"retention.bytes": KEPT, "segment.bytes": KEPT // 4, "file.delete.delay.ms": 1000}
        self.cluster.create_topic(topic, self.partitions, 1, config=limits)

    def drop(self, target: Target) -> None:
        target.delete()

    def close(self) -> None:
        self.cluster.close()


class GivenStage(Stage):
    """Somebody's cluster, as it is; topics are made with its own replication factor and removed after use."""

    kind = "given"

    def slowness(self) -> AbstractContextManager[None]:
        return nullcontext()

    def drop(self, target: Target) -> None:
        target.delete()


# ---- what came of it


@dataclass(slots=True)
class Flood:
    """One contender under full load."""

    contender: str
    records: int
    seconds: float
    """From the first record to the last acknowledgement."""
    written: dict[int, int]
    """Records per partition."""
    slow: frozenset[int]
    """Partitions that slow brokers lead."""
    queue_ms: dict[int, list[float]] = field(default_factory=dict)
    """Per partition, of the records asked: from handing in to acknowledgement."""
    per_request: float | None = None
    """Records in a request to a broker."""

    @property
    def rate(self) -> float:
        return self.records / self.seconds

    @property
    def slow_share(self) -> float | None:
        total = sum(self.written.values())
        return sum(self.written[one] for one in self.slow) / total if self.slow and total else None

    def queue(self, part: float, slow: bool) -> float | None:
        """A percentile of the queue times on fast or slow brokers."""
        found = sorted(ms for one, times in self.queue_ms.items() if (one in self.slow) == slow for ms in times)
        return percentile(found, part)


@dataclass(slots=True)
class Trickle:
    """One contender with few records."""

    contender: str
    rows: list[tuple[float, float, int]]
    """Per record: handed in and acknowledged, in s from the start, and its partition."""

    def waits_ms(self) -> list[float]:
        return sorted((done - given) * 1e3 for given, done, _ in self.rows)


def percentile(ascending: Sequence[float], part: float) -> float | None:
    return ascending[min(len(ascending) - 1, int(part * len(ascending)))] if ascending else None


# ---- runs


class _Session:
    """A fresh producer on a fresh topic, connected to every broker; the topic goes with it."""

    def __init__(self, contender: Contender, conf: Mapping[str, Any], stage: Stage) -> None:
        self.stage = stage
        self.topic = f"fastprod-partitioners-{contender.name.replace('_', '-')}-{time.time_ns():x}-{next(_tags)}"
        self.failed = 0
        self.reason = ""
        self.statistics: dict[str, Any] = {}
        self.conf = {**contender.configuration(conf), "bootstrap.servers": stage.bootstrap}

    @contextmanager
    def open(self) -> Iterator[Producer]:
        self.stage.create(self.topic)
        self.target = Target(self.conf, self.topic)
        self.target.open(self.stage.partitions)
        try:
            with self.stage.slowness():
                producer = Producer(
                    {**self.conf, "statistics.interval.ms": STATISTICS_MS, "stats_cb": self._take_statistics}
                )
                try:
                    for partition in range(self.target.partitions):
                        producer.produce(self.topic, VALUE, partition=partition, on_delivery=self.check)
                    self._settle(producer)
                    yield producer
                    self._settle(producer)
                finally:
                    producer.purge()
                    producer.close()
            self.written = {partition: end - 1 for partition, end in self.target.ends().items()}
        finally:
            self.stage.drop(self.target)

    def _settle(self, producer: Producer) -> None:
        self.failed += producer.flush(SETTLE_S)
        if self.failed:
            why = self.reason or f"not within {SETTLE_S:g} s"
            raise DeliveryError(f"{self.failed} records were not acknowledged ({why})")

    def check(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self.failed += 1
            self.reason = self.reason or error.str()

    def _take_statistics(self, text: str) -> None:
        self.statistics = json.loads(text)

    def per_request(self) -> float | None:
        """Records in a request, as of librdkafka's last statistics."""
        brokers = self.statistics.get("brokers", {}).values()
        requests = sum(broker.get("req", {}).get("Produce", 0) for broker in brokers)
        return self.statistics["txmsgs"] / requests if requests else None


def flood(
    contender: Contender, conf: Mapping[str, Any], stage: Stage, *, seconds: float | None, records: int | None
) -> Flood:
    """Records for so many seconds, or so many records, as fast as the producer takes them."""
    session = _Session(contender, conf, stage)
    queue_ms: dict[int, list[float]] = {}

    def sample(error: KafkaError | None, message: Any) -> None:
        session.check(error, message)
        if error is None:
            queue_ms.setdefault(message.partition(), []).append(message.latency() * 1e3)

    with session.open() as producer:
        receipts = []
        sent = 0
        start = time.perf_counter()
        while (time.perf_counter() - start < seconds) if seconds is not None else sent < (records or 0):
            count = SAMPLE if records is None else min(SAMPLE, records - sent)
            receipts.append(producer.produce_many(session.topic, [VALUE] * (count - 1)))
            producer.produce(session.topic, VALUE, on_delivery=sample)
            producer.poll(0)
            sent += count
        producer.flush(SETTLE_S)
        took = time.perf_counter() - start
        for receipt in receipts:
            session.failed += receipt.failed
        per_request = session.per_request()
    slow = frozenset(one for one, leader in session.target.leaders.items() if leader in stage.slow)
    return Flood(contender.name, sent, took, session.written, slow, queue_ms, per_request)


def trickle(contender: Contender, conf: Mapping[str, Any], stage: Stage, *, records: int, interval_s: float) -> Trickle:
    """So many records, one every so often, and nobody calls flush()."""
    session = _Session(contender, conf, stage)
    given: list[float] = []
    rows: dict[int, tuple[float, float, int]] = {}

    with session.open() as producer:
        start = time.perf_counter()

        def arrived(number: int, error: KafkaError | None, message: Any) -> None:
            session.check(error, message)
            if error is None:
                rows[number] = (given[number], given[number] + message.latency(), message.partition())

        for number in range(records):
            due = start + number * interval_s
            while (left := due - time.perf_counter()) > 0:
                producer.poll(left)
            given.append(time.perf_counter() - start)
            producer.produce(session.topic, VALUE, on_delivery=lambda *said, number=number: arrived(number, *said))
        deadline = time.perf_counter() + SETTLE_S
        while len(producer) and time.perf_counter() < deadline:
            producer.poll(0.05)
    return Trickle(contender.name, [rows[number] for number in sorted(rows)])


@contextmanager
def opened(stage: Stage) -> Iterator[Stage]:
    with ExitStack() as stack:
        stack.callback(stage.close)
        yield stage


def reason(problem: KafkaException | BufferError) -> str:
    return problem.args[0].str() if isinstance(problem, KafkaException) else str(problem)
