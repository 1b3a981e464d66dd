"""What a record costs as things grow: threads, partitions, topics, values, memory. No cliffs, or they are seen here.

    Case       one row: a run of fastprod's, often one of confluent-kafka's beside it, and the figures it is judged by
    Figure     what a run tells, and its unit
    Bar        what a figure must reach: alone, against confluent-kafka, or against another case
    CONCERNS   per concern the function that opens its brokers and makes its cases

Whatever sends records goes through `_load.measure`: a fresh producer, both clients with the same options, the clock
until the last acknowledgement, and the brokers' own count at the end. confluent-kafka runs the loop that does best,
with poll(0) now and then; its queue is bounded by bytes where our buffer is, and by nothing else.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import confluent_kafka

from fastprod.cli import _load
from fastprod.cli._load import Block, DeliveryError, Load, Outcomes, Target, Unfit

MEGABYTE = 1 << 20
THEIRS = _load.ConfluentRunner()
CONFLUENT = THEIRS.name
THREADS = (1, 2, 4, 8, 16)
PARTITIONS = (1, 10, 100, 1000, 10_000)
TOPICS = (1, 10, 100, 1000)
SIZES = (10, 100, 1000, 10_000, 100_000, 1_000_000)
BUFFERS = (4, 32, 256, 1024)  # MB
NEW_TOPICS = 400
STUCK = 8000  # partitions that no broker serves any more
KEYS = 50_000
CALL = 1000  # records in one call of many
FEW = 10  # and of few
RTT_MS = 20
SILENT_MS = 10_000  # round trips of brokers that are not to answer during a measurement
LARGE = {"message.max.bytes": 2_000_000}  # a value of 1 MB and what is around it
UNBOUND = 10_000_000  # messages: more than any run has
GROWN = 1 << 30  # bytes after which nobody needs to see more of a memory that grows
MIXED = (100, 1000)  # bytes: some of these values are copied, some are not
PLAIN = 500

Config = Mapping[str, Any]
NONE: Config = {}
Figures = Mapping[str, float]
Run = Callable[[], Figures]


# ---- what is shown


@dataclass(frozen=True, slots=True)
class Figure:
    """What a run tells under this name; a record's share unless it is a time in all."""

    name: str
    unit: str
    form: str
    scale: float = 1.0
    """How many of what the run tells make one unit."""


RATE = Figure("records_per_s", "M/s", ".3g", 1e6)
CPU = Figure("cpu_us_per_record", "us CPU", ".2f")
POOL = Figure("pool_bytes_per_record", "B of pool", ",.0f")
GROWTH = Figure("grown_bytes_per_record", "B grown", ",.1f")
SECONDS = Figure("seconds", "s", ".2f")
CPU_MS = Figure("cpu_ms", "ms CPU", ".3g")
FIGURES = {one.name: one for one in (RATE, CPU, POOL, GROWTH, SECONDS, CPU_MS)}


@dataclass(frozen=True, slots=True)
class Bar:
    """At least or at most so much: times another figure of the same round, or in the figure's unit."""

    sign: str
    limit: float
    of: str | None = None
    """CONFLUENT, another case of the concern, or None for the figure itself."""
    words: str = ""
    """What it is compared with, or what the figure itself means."""

    def holds(self, found: float) -> bool:
        return found >= self.limit if self.sign == ">=" else found <= self.limit

    def text(self, unit: str) -> str:
        if self.of is None:
            return self.words or f"{self.sign} {self.limit:g} {unit.split()[0]}"
        return f"{self.sign} {self.limit:g}x {self.words or self.of}"


@dataclass(frozen=True, slots=True)
class Case:
    concern: str
    name: str
    lines: Mapping[Figure, Bar | None]
    """The figures of a run that are shown, and what each must reach."""
    ours: Run
    theirs: Run | None = None

    def runs(self, round_number: int) -> list[tuple[str, Run]]:
        """Whose runs make up a round, in turns: who was first is second in the next."""
        found = [(_load.OURS.name, self.ours)]
        if self.theirs is not None:
            found.append((CONFLUENT, self.theirs))
        return found[:: -1 if round_number % 2 else 1]


@dataclass(frozen=True, slots=True)
class Amounts:
    """How much a run sends."""

    records: int = 400_000
    """Of 100 B: several times what the default buffer holds."""
    few: int = 200_000
    """Of 100 B, where the buffer is small or partitions are many."""
    many: int = 3_000_000
    """Of 100 B: more than the largest buffer holds."""
    size: int = 200_000_000
    """Bytes, where values differ in size; but not more than `records`."""
    held: int = 600
    """Values of 1 MB in the call whose hold of the lock is measured."""
    rows: int = 10_000_000
    """Against dead brokers."""
    warmup: int = 20_000


FULL = Amounts()
QUICK = Amounts(records=3000, few=3000, many=5000, size=3_000_000, held=40, rows=20_000, warmup=100)


# ---- where the records go


class Stage:
    """Mock brokers in a process of their own, and runs on them."""

    def __init__(
        self, stack: ExitStack, brokers: int, topics: Mapping[str, int], rtt_ms: int | None = None, **options: Any
    ) -> None:
        from fastprod.testing import MockClusterProcess

        self.cluster = stack.enter_context(MockClusterProcess(brokers, topics=topics, rtt_ms=rtt_ms))
        self.conf = configuration(self.cluster.bootstrap_servers, options)
        self._targets: dict[tuple[str, ...], Target] = {}

    def ours(self, load: Load, call: str = "produce_many", options: Config = NONE) -> Run:
        mode = "single" if call == "produce" else "bulk"
        return lambda: self._measure(_load.OURS, mode, call, load, options)

    def confluent(self, load: Load, call: str = "produce+poll", options: Config = NONE) -> Run:
        return lambda: self._measure(THEIRS, "bulk", call, load, for_confluent(options))

    def _measure(self, runner: _load.Runner, mode: str, call: str, load: Load, options: Config) -> Figures:
        done = _load.measure(runner, mode, call, load, {**self.conf, **options}, self._target(load))
        if done.interrupted:
            raise KeyboardInterrupt
        return {RATE.name: done.rate, CPU.name: done.cpu_us}

    def _target(self, load: Load) -> Target:
        topics = load.topics or (load.topic,)
        if topics not in self._targets:
            self._targets[topics] = Target(self.conf, topics[0], topics[1:])
            self._targets[topics].open(1)
        return self._targets[topics]


def configuration(bootstrap: str, options: Config) -> dict[str, Any]:
    """What both clients are given."""
    return _load.full_configuration({"bootstrap.servers": bootstrap, **options})


def for_confluent(options: Config) -> dict[str, Any]:
    """Options with which confluent-kafka does the same: bytes bound its queue, and keys go where ours go."""
    found = {"queue.buffering.max.messages": UNBOUND, "partitioner": "murmur2_random", **options}
    memory = found.pop("buffer.memory", None)
    if memory is not None:
        found["queue.buffering.max.kbytes"] = memory // 1024
    return found


# ---- concerns


def threads(stack: ExitStack, amounts: Amounts) -> list[Case]:
    stage = Stage(stack, 1, {"bench": 10})
    far = Stage(stack, 1, {"bench": 4}, RTT_MS)
    cases = []

    def single(count: int, records: int) -> Load:
        return shared_load(count, records, min(_load.BLOCK, -(-records // count)), amounts.warmup)

    def bulk(count: int, records: int) -> Load:
        return shared_load(count, records, CALL, amounts.warmup)

    small: Config = {"buffer.memory": 8 * MEGABYTE}
    for title, records, options in (("default buffer", amounts.records, NONE), ("8 MB", amounts.few, small)):
        for count in THREADS:
            load = single(count, records)
            bar = Bar(">=", 2, CONFLUENT) if count > 1 else None
            cases.append(
                Case(
                    "threads",
                    f"produce(), {title}, {_plural(count, 'thread')}",
                    {RATE: bar},
                    stage.ours(load, "produce", options),
                    stage.confluent(load, options=options),
                )
            )
    first = f"produce_many of {CALL:,}, 1 thread"
    for count in THREADS:
        bar = Bar(">=", 0.8, first, "of 1 thread") if count > 1 else None
        name = f"produce_many of {CALL:,}, {_plural(count, 'thread')}"
        cases.append(Case("threads", name, {RATE: bar}, stage.ours(bulk(count, amounts.records))))
    smaller: Config = {"buffer.memory": 4 * MEGABYTE}
    for call, load_of in (("produce", single), ("produce_many", bulk)):
        title = f"{call}()" if call == "produce" else call
        names = {count: f"{title}, 4 MB, {RTT_MS} ms away, {_plural(count, 'thread')}" for count in (1, 4)}
        for count, name in names.items():
            bar = Bar("<=", 2, names[1], "of 1 thread") if count > 1 else None
            run = far.ours(load_of(count, amounts.few), call, smaller)
            cases.append(Case("threads", name, {CPU: bar}, run))
    return cases


def shared_load(count: int, records: int, size: int, warmup: int) -> Load:
    """At least so many records of 100 B, in as many blocks of `size` for each thread."""
    turns = -(-records // (size * count))
    return Load("bench", turns * size * count, _load.make_block(size, 100), warmup=warmup, threads=count)


def partitions(stack: ExitStack, amounts: Amounts) -> list[Case]:
    stage = Stage(stack, 3, {f"bench-{count}": count for count in PARTITIONS})
    block = _load.make_block(max(amounts.few, KEYS), 100, KEYS)
    bars = {1000: Bar(">=", 4, CONFLUENT), 10_000: Bar(">=", 3, CONFLUENT)}
    cases = []
    for count in PARTITIONS:
        load = Load(f"bench-{count}", amounts.few, block, warmup=amounts.warmup)
        name = f"keyed, {_plural(count, 'partition')}, 3 brokers"
        cases.append(Case("partitions", name, {RATE: bars.get(count)}, stage.ours(load), stage.confluent(load)))
    for count in bars:  # the others are over in a tenth of a second, of which the beginning is a part
        load = Load(f"bench-{count}", 10 * amounts.few, block, warmup=amounts.warmup)
        name = f"keyed, {_plural(count, 'partition')}, 10x as long"
        cases.append(Case("partitions", name, {RATE: None}, stage.ours(load), stage.confluent(load)))
    for count in (PARTITIONS[1], PARTITIONS[-1]):
        load = Load(f"bench-{count}", amounts.few // 10, _load.make_block(amounts.few // 10, 100))
        run = stage.ours(load, "produce", {"partitioner": AlwaysFirst()})
        cases.append(Case("partitions", f"Python partitioner, {_plural(count, 'partition')}", {CPU: None}, run))
    return cases


class AlwaysFirst:
    """A partitioner that costs nothing itself."""

    def partition(self, topic: str, key: Any, value: Any, partitions: int, available: Any) -> int:
        return 0


def topics(stack: ExitStack, amounts: Amounts) -> list[Case]:
    names = tuple(f"bench-{number}" for number in range(max(TOPICS)))
    stage = Stage(stack, 3, dict.fromkeys(names, 4))
    block = _load.make_block(amounts.records, 100)
    first = "topic column, 1 topic"
    bars = {100: Bar(">=", 0.6, first, "of 1 topic"), 1000: Bar(">=", 0.4, first, "of 1 topic")}
    cases = []
    for count in TOPICS:
        load = Load(names[0], amounts.records, block, warmup=amounts.warmup, topics=names[:count])
        cases.append(
            Case(
                "topics",
                f"topic column, {_plural(count, 'topic')}",
                {RATE: bars.get(count)},
                stage.ours(load, "produce_arrow"),
                stage.confluent(load, "produce to topics"),
            )
        )
    return cases


def sizes(stack: ExitStack, amounts: Amounts) -> list[Case]:
    stage = Stage(stack, 1, {"bench": 10}, **LARGE)
    cases = []
    for size in SIZES:
        records = max(1, min(amounts.records, amounts.size // size))
        load = Load("bench", records, _load.make_block(records, size), warmup=min(amounts.warmup, records))
        cases.append(Case("sizes", f"values of {_bytes(size)}", {RATE: None}, stage.ours(load), stage.confluent(load)))
    stage = Stage(stack, 1, {"bench": 4})
    mixed, plain = mixed_block(amounts.size // 4), plain_block(amounts.size // 4)
    first = f"the same bytes at {PLAIN} B"
    for name, block, bar in (
        (first, plain, None),
        (f"{MIXED[0]} to {MIXED[1]:,} B at random", mixed, Bar("<=", 1.3, first, f"of all {PLAIN} B")),
    ):
        load = Load("bench", 2 * len(block.values), block, warmup=min(amounts.warmup, len(block.values)))
        cases.append(Case("sizes", name, {POOL: bar, CPU: bar}, _with_pool(stage, load)))
    small = _load.make_block(min(amounts.records, _load.BLOCK), 100).values
    for name, call in (("100 B, one call", len(small)), (f"100 B, calls of {FEW}", FEW)):
        cases.append(Case("sizes", name, {POOL: None}, partial(_pool_alone, stage, small, call)))
    return cases


def buffers(stack: ExitStack, amounts: Amounts) -> list[Case]:
    stage = Stage(stack, 1, {"bench": 10})
    load = Load("bench", amounts.many, _load.make_block(amounts.many, 100), warmup=amounts.warmup)
    cases = []
    for size in BUFFERS:
        options = {"buffer.memory": size * MEGABYTE}
        name = f"buffer of {size} MB" if size < 1024 else f"buffer of {size // 1024} GB"
        cases.append(
            Case(
                "buffers", name, {RATE: None}, stage.ours(load, options=options), stage.confluent(load, options=options)
            )
        )
    return cases


def new_topics(stack: ExitStack, amounts: Amounts) -> list[Case]:
    names = [f"bench-{number}" for number in range(NEW_TOPICS)]
    stage = Stage(stack, 1, dict.fromkeys(names, 1), RTT_MS)
    cases = []
    # An idempotent producer has 5 requests on the way, each for one partition: 80 round trips for any client.
    for title, options in (("", NONE), (", not idempotent", {"enable.idempotence": False})):
        conf = {**stage.conf, **options}
        cases.append(
            Case(
                "new-topics",
                f"first records to {NEW_TOPICS} topics, {RTT_MS} ms{title}",
                {SECONDS: Bar("<=", 2, CONFLUENT)},
                partial(first_records, _load.OURS, conf, names),
                partial(first_records, THEIRS, {**conf, **for_confluent(NONE)}, names),
            )
        )
    return cases


def rebuild(stack: ExitStack, amounts: Amounts) -> list[Case]:
    return [
        Case(
            "rebuild",
            f"load table, {STUCK:,} partitions, all stuck",
            {CPU_MS: Bar("<=", 1)},
            lambda: {CPU_MS.name: rebuild_ms(STUCK)},
        )
    ]


def lock(stack: ExitStack, amounts: Amounts) -> list[Case]:
    if sys.platform != "linux":
        return []
    stage = Stage(stack, 1, {"bench": 4}, **LARGE)
    return [
        Case(
            "lock",
            f"longest hold, {amounts.held} x 1 MB copied",
            {CPU_MS: Bar("<=", 2)},
            lambda: {CPU_MS.name: longest_hold_ms(stage, amounts.held)},
        )
    ]


def rejected(stack: ExitStack, amounts: Amounts) -> list[Case]:
    if sys.platform != "linux":
        return []
    # A byte per record is the noise of a process's size; what is kept of a record takes more.
    bar = Bar("<=", 1, None, "constant: <= 1 B")
    name = f"{amounts.rows:,} rows, dead brokers"
    return [Case("rejected", name, {GROWTH: bar, CPU: None}, lambda: rejected_rows(amounts.rows))]


CONCERNS: dict[str, Callable[[ExitStack, Amounts], list[Case]]] = {
    "threads": threads,
    "partitions": partitions,
    "topics": topics,
    "sizes": sizes,
    "buffers": buffers,
    "new-topics": new_topics,
    "rebuild": rebuild,
    "lock": lock,
    "rejected": rejected,
}


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' if count > 1 else ''}"


def _bytes(size: int) -> str:
    for unit, name in ((1_000_000, "MB"), (1000, "KB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


# ---- measurements of their own


def mixed_block(size: int) -> Block:
    """About so many bytes of values, of which some are short enough to be copied and some are not."""
    source = random.Random(1)
    pool = _load.make_block(50, MIXED[1]).values
    values: list[bytes] = []
    while size > 0:
        values.append(pool[len(values) % len(pool)][: source.randint(*MIXED)])
        size -= len(values[-1])
    return Block(values, None)


def plain_block(size: int) -> Block:
    pool = _load.make_block(50, PLAIN).values
    count = max(1, size // PLAIN)
    return Block((pool * (count // len(pool) + 1))[:count], None)


def _with_pool(stage: Stage, load: Load) -> Run:
    send = stage.ours(load)
    return lambda: {**send(), **_pool_alone(stage, load.block.values, len(load.block.values))}


def _pool_alone(stage: Stage, values: Sequence[bytes], call: int) -> dict[str, float]:
    return {POOL.name: pool_bytes(stage, values, call)}


def pool_bytes(stage: Stage, values: Sequence[bytes], call: int) -> float:
    """What a record takes of a buffer that is full, by calls of so many, after records like it have been sent."""
    producer = _producer(stage, {"max.block.ms": 1000})
    try:
        producer.produce_many("bench", values)
        producer.flush()
        stage.cluster.set_rtt(SILENT_MS)
        receipt = None
        for start in range(0, len(values), call):
            receipt = producer.produce_many("bench", values[start : start + call], receipt=receipt)
            if receipt.failed:
                break  # full
        return float(producer.stats().memory / len(producer))
    finally:
        _drop(stage, producer)


def first_records(runner: _load._PythonRunner, conf: Config, names: Sequence[str]) -> dict[str, float]:
    """Seconds until each of the topics, new to the producer, has acknowledged its first record."""
    outcomes = Outcomes()
    producer = runner.connect({**conf, "error_cb": lambda error: None})
    try:
        start = time.perf_counter()
        for name in names:
            producer.produce(name, b"first", on_delivery=outcomes.count)
        producer.flush(120)
        seconds = time.perf_counter() - start
    finally:
        producer.purge()
        producer.close()
    if outcomes.acknowledged < len(names):
        raise DeliveryError(
            f"{len(names) - outcomes.acknowledged} of {len(names)} first records sent by {runner.name} were not "
            f"acknowledged ({outcomes.reason})"
        )
    return {SECONDS.name: seconds}


def rebuild_ms(count: int) -> float:
    """CPU time to build the load table while no broker serves any of its partitions."""
    from fastprod._core._shim import Accumulator

    accumulator = Accumulator(
        count, availability_timeout_ms=1, leaders=[number % 3 for number in range(count)], buffer_memory=1 << 30
    )
    for number in range(count):
        accumulator.append(b"value", partition=number)
    accumulator.take()
    time.sleep(0.01)  # longer than they are given
    times = 3
    start = time.thread_time()
    accumulator.rebuild_many(times)
    return (time.thread_time() - start) * 1e3 / times


def longest_hold_ms(stage: Stage, count: int) -> float:
    """CPU time for which a bulk call of values of 1 MB, copied, keeps the accumulator's lock, seen from outside.

    Another thread calls produce() all the time. How long that has to wait is told in the caller's CPU time, which does
    not grow with what else runs on the machine. The lock is not fair: whoever waits is woken when it is let go and may
    find it taken again, so a wait is divided by how often the thread was put to sleep; in a call of equal values holds
    are equal too. Where the system allows it, that thread goes before all others; else it may be late, and the figure
    too high.
    """
    import numpy as np

    producer = _producer(stage, {"buffer.memory": (count + 200) * MEGABYTE})
    begin, over, leave = threading.Event(), threading.Event(), threading.Event()
    values = np.zeros(count, "V1000000")

    def call() -> None:
        begin.wait()
        try:
            receipts.append(producer.produce_many("bench", values))
        finally:
            over.set()
            leave.wait()  # its clock is read until then

    caller = threading.Thread(target=call)
    receipts: list[Any] = []
    waits = []
    try:
        stage.cluster.set_rtt(SILENT_MS)  # sending would take the processor from both
        caller.start()
        clock = time.pthread_getcpuclockid(caller.ident)  # type: ignore[arg-type]
        begin.set()
        with _urgent():
            while not over.is_set():
                slept, since = _sleeps(), time.clock_gettime(clock)
                producer.produce("bench", b"probe")
                waited, slept = time.clock_gettime(clock) - since, _sleeps() - slept
                if slept:
                    waits.append(waited / slept)
                time.sleep(0.0002)
    finally:
        begin.set()
        leave.set()
        if caller.ident is not None:
            caller.join()
        _drop(stage, producer)
    if not receipts or receipts[0].accepted < count:
        raise DeliveryError("the bulk call whose lock was looked at has not taken its records")
    if not waits:
        raise Unfit("produce() never waited for a bulk call: this does not show the accumulator's lock any more")
    return max(waits) * 1e3


@contextmanager
def _urgent() -> Iterator[None]:
    """This thread goes before all others, if that is permitted."""
    usual = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, *usual)


def _sleeps() -> int:
    """How often this thread had to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def rejected_rows(rows: int) -> dict[str, float]:
    """What a record costs that finds no room.

    In a process of its own, which has no memory from earlier that it could use again.
    """
    program = f"from fastprod.cli._scale import _reject; _reject({rows})"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    if done.returncode:
        raise Unfit(f"the process that hands in {rows:,} rows has ended with status {done.returncode}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


def _reject(rows: int) -> None:
    """Hands in many at a time, all for one receipt, of which the caller keeps hold."""
    import numpy as np

    from fastprod.producer import Producer

    options = {"buffer.memory": 65536, "max.block.ms": 0, "error_cb": lambda error: None}
    producer = Producer({**configuration("127.0.0.1:1", {}), **options})
    step = min(rows // 10, _load.BLOCK)
    values = np.full(step, b"v" * 20)
    first = producer.produce_many("bench", values)  # the buffer and all that is made once
    memory, cpu = _peak(), time.process_time()
    receipt = None
    while (receipt is None or receipt.total < rows) and _peak() - memory < GROWN:
        receipt = producer.produce_many("bench", values, receipt=receipt)
    cpu, memory = time.process_time() - cpu, _peak() - memory
    assert receipt is not None
    assert receipt.failed == receipt.total
    assert 0 < first.accepted < step
    print(json.dumps({GROWTH.name: memory / receipt.failed, CPU.name: cpu * 1e6 / receipt.failed}))
    producer.close(0)


def _peak() -> int:
    """The most bytes of memory that this process has had."""
    # getrusage() would tell that of the parent, if it had more when this process was made.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _producer(stage: Stage, options: Config) -> Any:
    """One of ours that is connected and knows the stage's topic."""
    producer = _load.OURS.connect({**stage.conf, **options})
    producer.produce("bench", b"warm")
    if producer.flush(_load.ANSWER_S):
        raise DeliveryError("the mock brokers do not answer")
    return producer


def _drop(stage: Stage, producer: Any) -> None:
    """Ends a producer whose records nobody waits for."""
    stage.cluster.set_rtt(0)
    producer.purge()
    with suppress(confluent_kafka.KafkaException):
        producer.close(1.0)
