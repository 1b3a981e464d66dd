"""Load generators: the same records through any client, timed until the broker has taken all of them.

    Load        which records, at which rate; prepared before a clock starts
    Runner      a client and the ways its users send: one object per client, by name in RUNNERS
    Target      the topic: reachable? how many records has it got?
    measure()   one run of one way, checked against the topic's own count

A runner makes a fresh producer per run, opens its connections with a few records, starts the clock, hands in
all records and flushes. Another client, also one outside of Python, joins by subclassing `Runner` and
registering; nothing else needs to know it.
"""

from __future__ import annotations

import random
import resource
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined]

from fastprod import _config

MODES = ("bulk", "single", "callback")
BLOCK = 100_000  # records in one bulk call, and as many references as are kept ready
SAMPLE = 1000  # one record in so many tells its latency where asking each would disturb
POLL_EVERY = 1000  # records between two poll(0) where no callback waits
BATCH = 10_000  # dicts in one call of confluent's produce_batch
SLICE_S = 0.001  # a paced run hands in what is due at least once in so many seconds
CONNECT_S = 8.0  # a broker that has not answered by then is not there
ANSWER_S = 60.0  # the same for one that is there but may be busy, not least with what we send
PERCENTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99, "p999": 0.999}
MOVING = (
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.FENCED_LEADER_EPOCH,
)

Advance = Callable[[int], None]
_LETTERS = bytes(65 + byte % 26 for byte in range(256))


class Unreachable(Exception):
    """The cluster or the topic cannot be used; the text says why."""


class DeliveryError(Exception):
    """Records were not acknowledged; the text says how many and why."""


class Unfit(Exception):
    """A client cannot take part in a comparison; the text says why."""


# ---- what to send


class Block(NamedTuple):
    """Records that are handed in together."""

    values: list[bytes]
    keys: list[bytes] | None


@dataclass(frozen=True, slots=True)
class Load:
    """What one run sends."""

    topic: str
    records: int
    block: Block
    """Sent again and again, until there are `records`."""
    rate: float | None = None
    """Records a second, None = as fast as the client takes them."""
    warmup: int = 0
    latency: bool = False
    """Whether latencies are wanted."""
    threads: int = 1
    """That send the blocks in turn, at full speed and without latencies if there are several."""
    topics: tuple[str, ...] = ()
    """Where the records of a block go in turn, by a column of names or call by call; empty = all to `topic`."""

    def blocks(self) -> list[Block]:
        """All records, in blocks that share their contents."""
        size = len(self.block.values)
        full, rest = divmod(self.records, size)
        return [self.block] * full + ([self._first(rest)] if rest else [])

    def warmup_blocks(self) -> list[Block]:
        return replace(self, records=self.warmup).blocks()

    def _first(self, count: int) -> Block:
        keys = self.block.keys
        return Block(self.block.values[:count], None if keys is None else keys[:count])


def make_block(records: int, record_size: int, keys: int = 0) -> Block:
    """Values of capital letters, the same on every run, with 0 or `keys` distinct keys in turn."""
    size = min(records, BLOCK)
    if keys:
        # Whole turns through the keys, so that a block sent again goes on where it ended.
        size = min(records, max(keys, BLOCK // keys * keys))
    source = random.Random(record_size)
    distinct = max(1, min(size, 1000, (8 << 20) // max(1, record_size)))
    pool = [source.randbytes(record_size).translate(_LETTERS) for _ in range(distinct)]
    values = (pool * (size // distinct + 1))[:size]
    if not keys:
        return Block(values, None)
    names = [b"key-%d" % number for number in range(min(keys, size))]
    return Block(values, (names * (size // len(names) + 1))[:size])


# ---- what came of it


@dataclass(slots=True)
class Round:
    """One timed run of one client."""

    client: str
    mode: str
    call: str
    records: int
    seconds: float
    cpu_seconds: float
    """Of the client's process, user and system."""
    latencies_ms: list[float] = field(default_factory=list)
    """Sorted; empty when not asked for."""
    warmup: int = 0
    """Records written in addition, before the clock started."""
    failed: int = 0
    reason: str = ""
    interrupted: bool = False
    told: dict[str, float] | None = None
    """What latency() says, from a client that tells no more than that."""

    @property
    def rate(self) -> float:
        return self.records / self.seconds if self.seconds > 0 else 0.0

    @property
    def cpu_us(self) -> float:
        return self.cpu_seconds * 1e6 / self.records if self.records else 0.0

    def latency(self) -> dict[str, float] | None:
        """Average, maximum and percentiles in ms, picked as kafka-producer-perf-test picks them."""
        found = self.latencies_ms
        if not found:
            return self.told
        last = len(found) - 1
        return {
            "samples": len(found),
            "avg": sum(found) / len(found),
            "max": found[-1],
            **{name: found[min(last, int(part * len(found)))] for name, part in PERCENTILES.items()},
        }


class Outcomes:
    """Delivery callbacks that count, and keep latencies in ms."""

    __slots__ = ("acknowledged", "failed", "latencies", "reason")

    def __init__(self) -> None:
        self.acknowledged = 0
        self.failed = 0
        self.reason = ""
        self.latencies: list[float] = []

    def count(self, error: KafkaError | None, message: Any) -> None:
        if error is None:
            self.acknowledged += 1
        else:
            self._fail(error)

    def measure(self, error: KafkaError | None, message: Any) -> None:
        """Takes the client's word for the latency."""
        if error is None:
            self.acknowledged += 1
            self.latencies.append(message.latency() * 1e3)
        else:
            self._fail(error)

    def clock(self, since: float, error: KafkaError | None, message: Any) -> None:
        """Takes the time until this call: the same clock for every client.

        confluent-kafka's own figure also ends here, fastprod's ends with the acknowledgement.
        """
        if error is None:
            self.acknowledged += 1
            self.latencies.append((time.perf_counter() - since) * 1e3)
        else:
            self._fail(error)

    def _fail(self, error: KafkaError) -> None:
        self.failed += 1
        self.reason = self.reason or error.str()


# ---- clients


class Runner(ABC):
    """A client under test."""

    name: str
    calls: ClassVar[Mapping[str, tuple[str, ...]]]
    """Per mode the calls its users make; the first is the usual one."""
    needs_real_broker: ClassVar[bool] = False

    def ways(self, mode: str, rate: float | None) -> tuple[str, ...]:
        """The calls to compare in a mode, at a rate or at full speed."""
        return self.calls[mode]

    def check(self, load: Load, conf: Mapping[str, Any]) -> None:  # noqa: B027  (few have objections)
        """Raises Unfit if the load cannot be sent, or not in a way that may be compared."""

    @abstractmethod
    def run(
        self, mode: str, call: str, load: Load, conf: Mapping[str, Any], partitions: int, advance: Advance
    ) -> Round:
        """Sends the load with a fresh producer. On Ctrl-C returns what was done, marked as interrupted."""


class _PythonRunner(Runner):
    """A client with confluent_kafka.Producer's interface, in this process."""

    @abstractmethod
    def connect(self, conf: dict[str, Any]) -> Any: ...

    @abstractmethod
    def bulk(self, call: str, producer: Any, load: Load) -> Bulk: ...

    def run(
        self, mode: str, call: str, load: Load, conf: Mapping[str, Any], partitions: int, advance: Advance
    ) -> Round:
        troubles: list[KafkaError] = []
        producer = self.connect({**conf, "error_cb": troubles.append})
        try:
            sender = _Sender(producer, load.topic, self.bulk(call, producer, load) if mode == "bulk" else None)
            warmup = sender.open_connections(load, partitions, mode)
            blocks = sender.prepare(load.blocks())
            sender.outcomes = outcomes = Outcomes()
            interrupted = False
            cpu, start = _cpu_seconds(), time.perf_counter()
            try:
                sender.send(mode, load, blocks, advance)
                sender.flush()
            except KeyboardInterrupt:
                interrupted = True
                sender.flush(5.0)
            seconds, cpu = time.perf_counter() - start, _cpu_seconds() - cpu
            failed, reason = sender.failures()
            if not failed and mode == "callback" and not interrupted:
                failed = load.records - outcomes.acknowledged  # callbacks that never came
            return Round(
                self.name,
                mode,
                call,
                load.records,
                seconds,
                cpu,
                sorted(outcomes.latencies),
                warmup,
                failed,
                reason or (troubles[-1].str() if troubles else ""),
                interrupted,
            )
        finally:
            producer.purge()
            with suppress(KafkaException):
                producer.flush(1.0)
            producer.close()


class Bulk(ABC):
    """The bulk call of a client."""

    def __init__(self, producer: Any, load: Load) -> None:
        self.producer = producer
        self.topic = load.topic
        self.topics = load.topics

    def prepare(self, block: Block) -> Any:
        """What the call wants, made before the clock starts."""
        return block

    @abstractmethod
    def send(self, ready: Any) -> None: ...

    def failures(self) -> tuple[int, str]:
        """How many were refused or lost, and why the first was; after flush()."""
        return 0, ""


class _ProduceMany(Bulk):
    def __init__(self, producer: Any, load: Load) -> None:
        super().__init__(producer, load)
        self.receipts: list[Any] = []

    def send(self, ready: Block) -> None:
        self.receipts.append(self.producer.produce_many(self.topic, ready.values, ready.keys))

    def failures(self) -> tuple[int, str]:
        failed = [receipt for receipt in self.receipts if receipt.failed]
        return sum(receipt.failed for receipt in failed), str(failed[0].errors[0].error) if failed else ""


class _ProduceArrow(_ProduceMany):
    """With a column of topics."""

    def prepare(self, block: Block) -> Any:
        import pyarrow as pa

        columns = {"topic": pa.array(_in_turn(self.topics, block)), "value": pa.array(block.values, pa.binary())}
        if block.keys is not None:
            columns["key"] = pa.array(block.keys, pa.binary())
        return pa.record_batch(columns)

    def send(self, ready: Any) -> None:
        self.receipts.append(self.producer.produce_arrow(ready))


class _ProduceLoop(Bulk):
    """produce() in a loop that serves deliveries when the queue is full."""

    def send(self, ready: Block) -> None:
        _produce_each(self.producer, self.topic, ready, None, None)


class _PollingLoop(Bulk):
    """The same with poll(0) now and then, so that the queue is seldom full: the best that a loop can do."""

    def send(self, ready: Block) -> None:
        _produce_each(self.producer, self.topic, ready, POLL_EVERY, None)


class _TopicLoop(Bulk):
    """The polling loop, in which every record names its topic."""

    def prepare(self, block: Block) -> list[list[tuple[str, bytes, bytes | None]]]:
        keys: Sequence[bytes | None] = block.keys or [None] * len(block.values)
        records = list(zip(_in_turn(self.topics, block), block.values, keys, strict=True))
        return [records[at : at + POLL_EVERY] for at in range(0, len(records), POLL_EVERY)]

    def send(self, ready: list[list[tuple[str, bytes, bytes | None]]]) -> None:
        produce, poll = self.producer.produce, self.producer.poll
        for part in ready:
            for topic, value, key in part:
                try:
                    produce(topic, value, key)
                except BufferError:
                    _insist(self.producer, topic, value, key)
            poll(0)


def _in_turn(topics: Sequence[str], block: Block) -> list[str]:
    """A topic for each record of a block."""
    size = len(block.values)
    return (list(topics) * (size // len(topics) + 1))[:size]


class _ProduceBatch(Bulk):
    """confluent-kafka's own batch call. The dicts are made before the clock starts, in its favour."""

    def prepare(self, block: Block) -> list[list[dict[str, bytes]]]:
        keys: Sequence[bytes | None] = block.keys or [None] * len(block.values)
        dicts = [
            {"value": value} if key is None else {"value": value, "key": key}
            for value, key in zip(block.values, keys, strict=True)
        ]
        return [dicts[at : at + BATCH] for at in range(0, len(dicts), BATCH)]

    def send(self, ready: list[list[dict[str, bytes]]]) -> None:
        producer = self.producer
        for batch in ready:
            left = batch
            while producer.produce_batch(self.topic, left) < len(left):
                left = [message for message in left if message.pop("_error", None) is not None]
                producer.poll(0.1)
            producer.poll(0)


def _produce_each(
    producer: Any, topic: str, block: Block, poll_every: int | None, on_delivery: Callable[..., None] | None
) -> None:
    """The loop that users of confluent-kafka write; one code for both clients, as their interface is one."""
    produce, poll = producer.produce, producer.poll
    values, keys = block
    if poll_every is None:
        every: Sequence[bytes | None] = keys or [None] * len(values)
        for value, key in zip(values, every, strict=True):
            try:
                produce(topic, value, key)
            except BufferError:
                _insist(producer, topic, value, key)
        return
    for start in range(0, len(values), poll_every):
        part = values[start : start + poll_every]
        names: Sequence[bytes | None] = [None] * len(part) if keys is None else keys[start : start + poll_every]
        if on_delivery is None:
            for value, key in zip(part, names, strict=True):
                try:
                    produce(topic, value, key)
                except BufferError:
                    _insist(producer, topic, value, key)
            poll(0)
        else:
            for value, key in zip(part, names, strict=True):
                try:
                    produce(topic, value, key, on_delivery=on_delivery)
                except BufferError:
                    _insist(producer, topic, value, key, on_delivery)
                poll(0)


def _insist(
    producer: Any, topic: str, value: bytes, key: bytes | None, on_delivery: Callable[..., None] | None = None
) -> None:
    """The queue is full: serve deliveries until there is room."""
    while True:
        producer.poll(0.1)
        try:
            if on_delivery is None:
                producer.produce(topic, value, key)
            else:
                producer.produce(topic, value, key, on_delivery=on_delivery)
            return
        except BufferError:
            pass


class _Sender:
    """One producer at work on one load."""

    def __init__(self, producer: Any, topic: str, bulk: Bulk | None) -> None:
        self.producer = producer
        self.topic = topic
        self.bulk = bulk
        self.outcomes = Outcomes()

    def open_connections(self, load: Load, partitions: int, mode: str) -> int:
        """Connects to every leader and sends the warm-up; returns how many records that took."""
        topics = load.topics or (load.topic,)
        for topic in topics:
            for partition in range(partitions):
                self.producer.produce(topic, load.block.values[0], partition=partition)
        self.flush()
        self._unpaced(mode, self.prepare(load.warmup_blocks()), False, lambda done: None)
        self.flush()
        return len(topics) * partitions + load.warmup

    def prepare(self, blocks: Sequence[Block]) -> list[tuple[Block, Any]]:
        """Blocks, and beside each what the bulk call wants; the same for the same block."""
        if self.bulk is None:
            return [(block, None) for block in blocks]
        ready = {id(block): self.bulk.prepare(block) for block in blocks}
        return [(block, ready[id(block)]) for block in blocks]

    def send(self, mode: str, load: Load, blocks: Sequence[tuple[Block, Any]], advance: Advance) -> None:
        if load.rate is not None:
            self._paced(mode == "callback", load.rate, [block for block, _ in blocks], advance)
        elif load.threads > 1:
            self._by_threads(mode, load.threads, blocks, advance)
        else:
            self._unpaced(mode, blocks, load.latency, advance)

    def _unpaced(self, mode: str, blocks: Sequence[tuple[Block, Any]], latency: bool, advance: Advance) -> None:
        for block, ready in blocks:
            if mode == "callback":
                outcome = self.outcomes.measure if latency else self.outcomes.count
                _produce_each(self.producer, self.topic, block, POLL_EVERY, outcome)
            elif not latency:
                if self.bulk is not None:
                    self.bulk.send(ready)
                else:
                    _produce_each(self.producer, self.topic, block, None, None)
            else:
                with nullcontext() if self.bulk is None else _served(self.producer):
                    self._sampled(block)
            advance(len(block.values))

    def _by_threads(self, mode: str, threads: int, blocks: Sequence[tuple[Block, Any]], advance: Advance) -> None:
        over = threading.Event()  # nobody begins another block

        def send(first: int) -> None:
            for one in blocks[first::threads]:
                if over.is_set():
                    return
                self._unpaced(mode, [one], False, lambda done: None)

        with ThreadPoolExecutor(threads) as pool:
            try:
                for sent in [pool.submit(send, first) for first in range(threads)]:
                    sent.result()
            finally:
                over.set()
        advance(sum(len(block.values) for block, _ in blocks))

    def _sampled(self, block: Block) -> None:
        """The first of every SAMPLE records tells its latency."""
        for first, others in _split(block):
            try:
                self.producer.produce(self.topic, *first, on_delivery=self.outcomes.measure)
            except BufferError:
                _insist(self.producer, self.topic, *first, self.outcomes.measure)
            if self.bulk is not None:
                self.bulk.send(self.bulk.prepare(others))
            else:
                _produce_each(self.producer, self.topic, others, POLL_EVERY, None)

    def _paced(self, every: bool, rate: float, blocks: Sequence[Block], advance: Advance) -> None:
        """Hands in what is due, then spends a slice in poll(), or less when something is delivered.

        A whole millisecond, since confluent-kafka cuts off fractions and would spin.
        """
        producer, clock = self.producer, time.perf_counter
        records = _each(blocks)
        total = sum(len(block.values) for block in blocks)
        sent = told = 0
        start = clock()
        while sent < total:
            due = min(total, int((clock() - start) * rate) + 1)
            for number in range(sent, due):
                value, key = next(records)
                if every or number % SAMPLE == 0:
                    outcome = partial(self.outcomes.clock, clock())
                    try:
                        producer.produce(self.topic, value, key, on_delivery=outcome)
                    except BufferError:
                        _insist(producer, self.topic, value, key, outcome)
                else:
                    try:
                        producer.produce(self.topic, value, key)
                    except BufferError:
                        _insist(producer, self.topic, value, key)
            sent = due
            producer.poll(SLICE_S)
            if sent - told >= rate / 4 or sent == total:
                advance(sent - told)
                told = sent

    def flush(self, timeout: float | None = None) -> None:
        """Waits in slices, so that Ctrl-C is heard."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.producer.flush(0.25) and (until is None or time.monotonic() < until):
            pass

    def failures(self) -> tuple[int, str]:
        failed, reason = self.bulk.failures() if self.bulk is not None else (0, "")
        return failed + self.outcomes.failed, reason or self.outcomes.reason


@contextmanager
def _served(producer: Any) -> Iterator[None]:
    """Callbacks run on a thread meanwhile: a bulk call that waits for room cannot run them itself."""
    begun, over = threading.Event(), threading.Event()

    def serve() -> None:
        try:
            while not over.is_set():
                producer.poll(0)
                begun.set()
                over.wait(0.01)
        except RuntimeError:
            if not over.is_set():  # else closed, because Ctrl-C came while this was waited for
                raise
        finally:
            begun.set()

    thread = threading.Thread(target=serve, daemon=True)
    try:  # Ctrl-C may come at any moment
        thread.start()
        begun.wait()
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


def _split(block: Block) -> Iterator[tuple[tuple[bytes, bytes | None], Block]]:
    """Slices of SAMPLE records as (first record, the others)."""
    values, keys = block
    for start in range(0, len(values), SAMPLE):
        stop = start + SAMPLE
        yield (
            (values[start], None if keys is None else keys[start]),
            Block(values[start + 1 : stop], None if keys is None else keys[start + 1 : stop]),
        )


def _each(blocks: Sequence[Block]) -> Iterator[tuple[bytes, bytes | None]]:
    for values, keys in blocks:
        names: Sequence[bytes | None] = keys or [None] * len(values)
        yield from zip(values, names, strict=True)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class FastprodRunner(_PythonRunner):
    name = "fastprod"
    calls: ClassVar = {"bulk": ("produce_many",), "single": ("produce",), "callback": ("produce",)}

    def connect(self, conf: dict[str, Any]) -> Any:
        from fastprod.producer import Producer

        return Producer(conf)

    def bulk(self, call: str, producer: Any, load: Load) -> Bulk:
        kinds: dict[str, type[Bulk]] = {"produce_many": _ProduceMany, "produce_arrow": _ProduceArrow}
        return kinds[call](producer, load)


class ConfluentRunner(_PythonRunner):
    name = "confluent"
    calls: ClassVar = {
        "bulk": ("produce", "produce+poll", "produce_batch"),
        "single": ("produce",),
        "callback": ("produce",),
    }

    def connect(self, conf: dict[str, Any]) -> Any:
        return confluent_kafka.Producer(for_librdkafka(conf))

    def bulk(self, call: str, producer: Any, load: Load) -> Bulk:
        kinds: dict[str, type[Bulk]] = {
            "produce": _ProduceLoop,
            "produce+poll": _PollingLoop,
            "produce_batch": _ProduceBatch,
            "produce to topics": _TopicLoop,
        }
        return kinds[call](producer, load)


OURS = FastprodRunner()
RUNNERS: dict[str, Runner] = {runner.name: runner for runner in (ConfluentRunner(),)}


# ---- configuration


def full_configuration(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of every client: what the user gave, by its usual name, and what makes them comparable."""
    conf = {_config.ALIASES.get(name, name): value for name, value in given.items()}
    conf.setdefault("bootstrap.servers", conf.pop("metadata.broker.list", ""))
    conf.setdefault("acks", "all")
    conf.setdefault("linger.ms", 5)
    conf.setdefault("log_level", 0)
    theirs = _config.split(conf, "")[1]
    if "enable.idempotence" in theirs:  # fastprod's default, as far as the other options allow it
        conf.setdefault("enable.idempotence", theirs["enable.idempotence"])
    return conf


def for_librdkafka(conf: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without the options that only fastprod knows."""
    theirs = _config.split(conf, "")[1]
    return {name: value for name, value in conf.items() if name in theirs or name == "delivery.report.only.error"}


# ---- the topic


class Target:
    """The topic that the records go to, seen from outside of the clients under test."""

    def __init__(self, conf: Mapping[str, Any], topic: str, others: Sequence[str] = ()) -> None:
        self.topic = topic
        self.others = others  # with as many partitions, written to as well
        self.address = str(conf["bootstrap.servers"])
        self._troubles: list[KafkaError] = []
        settings: dict[str, Any] = {**for_librdkafka(conf), "error_cb": self._troubles.append}
        self._admin = AdminClient(settings)
        self.partitions = 0
        self.leaders: dict[int, int] = {}

    def open(self, partitions: int) -> None:
        """Finds the topics, or creates them with so many partitions."""
        missing = self._look()
        if missing:
            self._create(missing, partitions)
            deadline = time.monotonic() + ANSWER_S
            while missing:
                if time.monotonic() > deadline:
                    raise Unreachable(f"topic {missing[0]!r} was created at {self.address} but has no leaders")
                time.sleep(0.05)
                missing = self._look()

    def _look(self) -> list[str]:
        """Takes the partitions and leaders of the topic; returns the topics that have none yet."""
        try:
            topics = self._admin.list_topics(timeout=CONNECT_S).topics
        except KafkaException as error:
            self._admin.poll(0)
            reason = self._troubles[0].str() if self._troubles else error.args[0].str()
            raise Unreachable(f"no broker answers at {self.address} within {CONNECT_S:g} s ({reason})") from None

        def leaders(topic: str) -> dict[int, int]:
            found = topics.get(topic)
            return {} if found is None else {number: part.leader for number, part in found.partitions.items()}

        self.leaders = leaders(self.topic)
        self.partitions = len(self.leaders) if min(self.leaders.values(), default=-1) >= 0 else 0
        return [topic for topic in (self.topic, *self.others) if min(leaders(topic).values(), default=-1) < 0]

    def _create(self, topics: Sequence[str], partitions: int) -> None:
        # The broker's own replication factor.
        order = self._admin.create_topics(
            [NewTopic(topic, partitions, -1) for topic in topics], request_timeout=ANSWER_S, operation_timeout=ANSWER_S
        )
        for topic, answer in order.items():
            try:
                answer.result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                    raise Unreachable(
                        f"there is no topic {topic!r} at {self.address}, and creating it failed ({error.args[0].str()})"
                    ) from None

    def delete(self) -> None:
        """Removes the topic; whether that worked, nobody waits to see."""
        self._admin.delete_topics([self.topic], request_timeout=ANSWER_S)[self.topic].exception(ANSWER_S)

    def written(self) -> int:
        """Records ever written to the topic, and to the others."""
        return sum(self._ends([self.topic, *self.others]).values())

    def ends(self) -> dict[int, int]:
        """Per partition the offset that comes next: what was ever written."""
        return {partition: offset for (_, partition), offset in self._ends([self.topic]).items()}

    def ends_of_all(self) -> dict[tuple[str, int], int]:
        """The same for all topics."""
        return self._ends([self.topic, *self.others])

    def forget(self) -> None:
        """Has the brokers drop all records that they have now, so that their memory does not fill."""
        places = [TopicPartition(topic, partition, end) for (topic, partition), end in self.ends_of_all().items()]
        for answer in self._admin.delete_records(places, request_timeout=ANSWER_S).values():
            answer.exception(ANSWER_S)

    def _ends(self, topics: Sequence[str]) -> dict[tuple[str, int], int]:
        end = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        wanted = {TopicPartition(topic, partition): end for topic in topics for partition in range(self.partitions)}
        deadline = time.monotonic() + ANSWER_S
        while True:
            try:
                found = self._admin.list_offsets(wanted, request_timeout=ANSWER_S)
                return {(place.topic, place.partition): answer.result().offset for place, answer in found.items()}
            except KafkaException as error:
                # A broker may lead a new partition by the metadata before it knows of it.
                if error.args[0].code() not in MOVING or time.monotonic() > deadline:
                    reason = error.args[0].str()
                    raise Unreachable(f"{self.address} does not tell its offsets ({reason})") from None
            time.sleep(0.05)


def measure(
    runner: Runner,
    mode: str,
    call: str,
    load: Load,
    conf: Mapping[str, Any],
    target: Target,
    advance: Advance = lambda done: None,
) -> Round:
    """One run, of which the topic has every record; DeliveryError if not."""
    before = target.written()
    try:
        done = runner.run(mode, call, load, conf, target.partitions, advance)
    except (KafkaException, BufferError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
        raise DeliveryError(f"{runner.name} {call} failed: {reason}") from error
    grown = target.written() - before - done.warmup
    if done.interrupted:
        done.records = max(0, grown)
        return done
    # Without acknowledgements the last records may still be on their way.
    deadline = time.monotonic() + (5.0 if str(conf.get("acks")) == "0" else 0.0)
    while grown < done.records and time.monotonic() < deadline:
        time.sleep(0.05)
        grown = target.written() - before - done.warmup
    missing = max(done.failed, done.records - grown)
    if missing > 0:
        raise DeliveryError(
            f"{missing} of {done.records} records sent by {runner.name} {call} were not acknowledged"
            + (f" ({done.reason})" if done.reason else "")
        )
    return done
