"""The accumulator on its own, against simple models."""

import contextlib
import random
import time
from collections import Counter, defaultdict

import pytest

from fastprod._core._columns import columns
from fastprod._core._shim import Accumulator
from fastprod.partitioning import partition_for_keys


def delivered(taken: list) -> dict[int, list]:
    lanes = defaultdict(list)
    for partition, records in taken:
        lanes[partition] += records
    return lanes


@pytest.mark.parametrize("seed", range(20))
def test_every_record_comes_out_once_and_in_order(seed: int) -> None:
    """Random appends, takes and acknowledgements; the model is a list per partition."""
    source = random.Random(seed)
    policy = source.choice(["uniform", "sticky", "round_robin"])
    accumulator = Accumulator(7, policy=policy, sticky_bytes=source.choice([100, 5000, 70000]), seed=seed)
    model: dict[int, list] = defaultdict(list)
    out: dict[int, list] = defaultdict(list)
    for i in range(3000):
        value = None if source.random() < 0.1 else b"%d:" % i + b"x" * source.choice([0, 1, 50, 300, 20000])
        key = None if source.random() < 0.5 else b"k%d" % source.randrange(20)
        partition = source.randrange(7) if source.random() < 0.1 else -1
        chosen = accumulator.append(value, key, partition)
        if partition >= 0:
            assert chosen == partition
        elif key is not None:
            assert chosen == partition_for_keys([key], 7)[0]
        model[chosen].append((key, value))
        if source.random() < 0.02:
            for lane, records in accumulator.take(everything=source.random() < 0.5):
                out[lane] += records
            for lane in range(7):
                if source.random() < 0.7:
                    accumulator.acknowledge(lane)
    for lane, records in accumulator.take():
        out[lane] += records
    assert out == {lane: records for lane, records in model.items() if records}
    for lane in range(7):
        accumulator.acknowledge(lane)
        assert accumulator.queued_bytes(lane) == 0
    assert accumulator.records == 0
    assert accumulator.used == 0


def test_queue_is_what_was_appended_and_not_acknowledged() -> None:
    accumulator = Accumulator(2)
    accumulator.append(b"x" * 10, b"kk", 0)
    accumulator.append(b"x" * 5, None, 1)
    assert (accumulator.queued_bytes(0), accumulator.queued_bytes(1)) == (12, 5)
    accumulator.take()
    assert accumulator.queued_bytes(0) == 12
    accumulator.acknowledge(0)
    assert (accumulator.queued_bytes(0), accumulator.queued_bytes(1)) == (0, 5)


def test_memory_is_bounded_and_comes_back() -> None:
    accumulator = Accumulator(4, buffer_memory=200_000)
    for _ in range(250):
        accumulator.append(b"x" * 500)
        assert accumulator.used <= 200_000
    with pytest.raises(BufferError):
        [accumulator.append(b"x" * 500) for _ in range(250)]
    assert accumulator.used <= 200_000
    accumulator.take()
    with pytest.raises(BufferError):
        accumulator.append(b"x" * 60_000)
    for partition in range(4):
        accumulator.acknowledge(partition)
    assert accumulator.used == 0
    accumulator.append(b"x" * 60_000)


def test_a_record_larger_than_the_pool_is_refused() -> None:
    accumulator = Accumulator(1, buffer_memory=100_000)
    with pytest.raises(ValueError, match="larger"):
        accumulator.append(b"x" * 100_000)
    assert accumulator.used == 0


def test_round_robin_skips_nobody() -> None:
    """Java's round robin skips a partition whenever a record opens a batch."""
    accumulator = Accumulator(5, policy="round_robin", sticky_bytes=200)
    assert [accumulator.append(b"x" * 90) for _ in range(20)] == [0, 1, 2, 3, 4] * 4


def test_sticky_takes_another_partition_for_every_batch() -> None:
    accumulator = Accumulator(5, policy="sticky", sticky_bytes=1000)
    chosen = [accumulator.append(b"x" * 90) for _ in range(90)]
    runs = [chosen[0]]
    for partition in chosen:
        if partition != runs[-1]:
            runs.append(partition)
    assert len(runs) >= 9
    assert set(runs) == {0, 1, 2, 3, 4}


def test_uniform_is_even_in_bytes() -> None:
    accumulator = Accumulator(10, sticky_bytes=16384, buffer_memory=1 << 30, seed=1234567)
    source = random.Random(1)
    sizes: Counter[int] = Counter()
    for i in range(200_000):
        value = b"x" * source.randrange(200)
        sizes[accumulator.append(value)] += len(value)
        if i % 1000 == 0:
            accumulator.take()
            for partition in range(10):
                accumulator.acknowledge(partition)
    assert max(sizes.values()) / min(sizes.values()) < 1.05


@pytest.mark.parametrize("seed", range(10))
def test_brokers_whose_queues_are_about_even_get_equal_bytes(seed: int) -> None:
    """The load table looks all the time, and queues go up and down by a wire batch: nobody gets less for that."""
    source = random.Random(seed)
    bound = 1000
    accumulator = Accumulator(8, sticky_bytes=bound, buffer_memory=1 << 30, seed=seed, leaders=[1, 2, 3, 4] * 2)
    for partition in range(8):
        accumulator.append(b"first", None, partition)
    accumulator.take()
    for partition in range(8):
        accumulator.acknowledge(partition)  # so that the queues count from now on
    sizes: Counter[int] = Counter()
    for _ in range(400):
        for _ in range(100):
            sizes[accumulator.append(b"x" * 90)] += 1
            accumulator.rebuild()
            assert [accumulator.weight(partition) for partition in range(8)] == [1 / 8] * 8
        accumulator.take()
        for partition in source.sample(range(8), 8):  # all answer, in any order
            accumulator.acknowledge(partition)
    assert sum(sizes.values()) == 40_000
    assert (max(sizes.values()) - min(sizes.values())) * 90 <= 2 * bound  # as with no table at all


def settle_in(accumulator: Accumulator, partitions: int) -> None:
    """Every lane has had something acknowledged, so that its queue counts."""
    for partition in range(partitions):
        accumulator.append(b"first", None, partition)
    accumulator.take()
    for _ in range(3):
        accumulator.rebuild()
        accumulator.append(b"x" * 20_000)
        accumulator.take()
        for partition in range(partitions):
            accumulator.acknowledge(partition)


def counts_of(accumulator: Accumulator, records: int) -> Counter[int]:
    counts: Counter[int] = Counter()
    for _ in range(records):
        accumulator.rebuild()
        counts[accumulator.append(b"x" * 100)] += 1
    return counts


def test_a_long_queue_gets_less() -> None:
    accumulator = Accumulator(4, sticky_bytes=1000, buffer_memory=1 << 30, seed=99)
    settle_in(accumulator, 4)
    for _ in range(50_000):
        accumulator.append(b"x" * 100, None, 2)  # fills up and is never acknowledged
    counts_of(accumulator, 200)
    counts = counts_of(accumulator, 2000)
    assert counts[2] < min(counts[p] for p in (0, 1, 3)) / 5


def test_when_the_queue_is_gone_it_gets_its_share_again() -> None:
    accumulator = Accumulator(4, sticky_bytes=1000, buffer_memory=1 << 30, seed=99)
    settle_in(accumulator, 4)
    for _ in range(50_000):
        accumulator.append(b"x" * 100, None, 2)
    counts_of(accumulator, 1000)
    accumulator.take()
    for partition in range(4):
        accumulator.acknowledge(partition)
    counts: Counter[int] = Counter()
    for _ in range(5000):
        accumulator.rebuild()
        counts[accumulator.append(b"x" * 100)] += 1
        accumulator.take()
        for partition in range(4):
            accumulator.acknowledge(partition)
    assert counts[2] > 1000


def test_without_adaptation_a_long_queue_gets_its_share() -> None:
    accumulator = Accumulator(4, sticky_bytes=1000, buffer_memory=1 << 30, adaptive=False)
    for _ in range(5000):
        accumulator.append(b"x" * 100, None, 2)
    counts = Counter(accumulator.append(b"x" * 100) for _ in range(8000))
    assert counts[2] == pytest.approx(2000, rel=0.1)


@pytest.mark.parametrize("policy", ["uniform", "sticky", "round_robin"])
def test_a_partition_without_leader_gets_no_keyless_records(policy: str) -> None:
    accumulator = Accumulator(4, policy=policy, sticky_bytes=200, leaders=[1, -1, 2, 3])
    assert {accumulator.append(b"x" * 90) for _ in range(200)} == {0, 2, 3}
    accumulator.set_partitions(4, [1, 2, -1, 3])
    assert {accumulator.append(b"x" * 90) for _ in range(200)} == {0, 1, 3}
    assert accumulator.append(b"", b"some key") == partition_for_keys([b"some key"], 4)[0]


def test_without_any_leader_records_still_go_somewhere() -> None:
    accumulator = Accumulator(3, sticky_bytes=200, leaders=[-1, -1, -1])
    assert {accumulator.append(b"x" * 90) for _ in range(100)} == {0, 1, 2}


def test_a_topic_that_grows_is_used_in_full() -> None:
    accumulator = Accumulator(2, sticky_bytes=200)
    assert {accumulator.append(b"x" * 90) for _ in range(50)} == {0, 1}
    accumulator.set_partitions(5)
    assert {accumulator.append(b"x" * 90) for _ in range(200)} == {0, 1, 2, 3, 4}
    assert accumulator.append(b"", b"k9") == partition_for_keys([b"k9"], 5)[0]


def test_records_wait_for_metadata_in_order() -> None:
    accumulator = Accumulator(0)
    records = [(b"k%d" % (i % 7), b"%d" % i) for i in range(1000)]
    for key, value in records:
        assert accumulator.append(value, key) == -1
    assert accumulator.take() == []
    assert accumulator.lanes_opened == 0
    accumulator.set_partitions(3)
    assert accumulator.records == 1000
    taken = delivered(accumulator.take())
    partitions = partition_for_keys([key for key, _ in records], 3)
    for lane in range(3):
        assert taken[lane] == [record for record, p in zip(records, partitions, strict=True) if p == lane]


def test_an_unknown_partition_is_refused_or_ends_when_known() -> None:
    accumulator = Accumulator(0)
    accumulator.append(b"lost", None, 9)
    accumulator.append(b"kept", None, 1)
    accumulator.set_partitions(3)
    assert accumulator.records == 1
    assert delivered(accumulator.take()) == {1: [(None, b"kept")]}
    with pytest.raises(LookupError, match="9"):
        accumulator.append(b"lost", None, 9)


def test_lanes_open_on_first_use_only() -> None:
    accumulator = Accumulator(10_000, adaptive=False)
    accumulator.append(b"x", None, 17)
    accumulator.append(b"x", None, 17)
    accumulator.append(b"x", None, 9_999)
    assert accumulator.lanes_opened == 2


def test_linger_holds_records_back_until_a_batch_is_full() -> None:
    accumulator = Accumulator(1, linger_ms=60_000, sticky_bytes=1000)
    accumulator.append(b"x" * 100)
    assert accumulator.take(everything=False) == []
    for _ in range(20):
        accumulator.append(b"x" * 100)
    assert len(delivered(accumulator.take(everything=False))[0]) == 21


def test_purge_drops_what_waits_and_nothing_else() -> None:
    accumulator = Accumulator(1)
    accumulator.append(b"sent")
    accumulator.take()
    accumulator.append(b"waiting")
    assert accumulator.purge() == 1
    assert accumulator.records == 1
    accumulator.acknowledge(0)
    assert (accumulator.records, accumulator.used) == (0, 0)


# ---- one request of a partition at a time


def test_a_lane_that_is_out_is_held_until_all_of_it_is_back() -> None:
    accumulator = Accumulator(2, request_bytes=900_000)
    accumulator.append(b"a", None, 0)
    assert accumulator.take() == [(0, [(None, b"a")])]
    accumulator.append(b"b", None, 0)
    accumulator.append(b"c", None, 1)
    assert accumulator.take() == [(1, [(None, b"c")])]
    accumulator.append(b"d", None, 0)
    accumulator.acknowledge(1)
    assert accumulator.take() == []
    accumulator.acknowledge(0)
    assert accumulator.take() == [(0, [(None, b"b"), (None, b"d")])]
    accumulator.acknowledge(0)
    assert (accumulator.records, accumulator.used) == (0, 0)


@pytest.mark.parametrize("value", [b"x" * 10, b"x" * 1000, b"x" * 300_000])
@pytest.mark.parametrize("limit", [{"request_bytes": 200_000}, {"request_bytes": 900_000, "request_records": 7}])
def test_a_hand_over_is_one_request(value: bytes, limit: dict[str, int]) -> None:
    accumulator = Accumulator(1, **limit)
    total = 60 if len(value) > 1000 else 3000
    for number in range(total):
        accumulator.append(b"%d" % number + value, None, 0)
    seen: list[bytes | None] = []
    while batch := accumulator.take():
        assert len(batch) == 1
        records = [value for _, value in batch[0][1]]
        seen += records
        bytes_ = sum(len(record or b"") for record in records)
        assert len(records) == 1 or bytes_ <= limit["request_bytes"]
        assert len(records) <= limit.get("request_records", 10_000)
        accumulator.acknowledge(0)
    assert seen == [b"%d" % number + value for number in range(total)]
    assert (accumulator.records, accumulator.used) == (0, 0)


def test_what_is_held_goes_on_lingering() -> None:
    accumulator = Accumulator(3, linger_ms=300, sticky_bytes=1000, request_bytes=900_000, leaders=[1, 1, 1])
    accumulator.append(b"first", None, 0)
    assert [partition for partition, _ in accumulator.take()] == [0]
    for partition in range(3):
        accumulator.append(b"young", None, partition)
    accumulator.acknowledge(0)
    assert accumulator.take(everything=False) == []
    time.sleep(0.35)
    assert sorted(partition for partition, _ in accumulator.take(everything=False)) == [0, 1, 2]


def test_what_is_held_is_ready_when_its_batch_is_full() -> None:
    accumulator = Accumulator(1, linger_ms=60_000, sticky_bytes=1000, request_bytes=900_000)
    accumulator.append(b"first", None, 0)
    accumulator.take()
    for _ in range(20):
        accumulator.append(b"x" * 100, None, 0)
    assert accumulator.take(everything=False) == []
    accumulator.acknowledge(0)
    assert len(delivered(accumulator.take(everything=False))[0]) == 20


def test_what_is_held_can_be_purged_and_changes_brokers() -> None:
    accumulator = Accumulator(1, request_bytes=900_000)
    accumulator.append(b"sent", None, 0)
    accumulator.take()
    accumulator.append(b"held", None, 0)
    accumulator.set_partitions(1, [5])
    assert accumulator.take() == []
    assert accumulator.purge() == 1
    accumulator.append(b"later", None, 0)
    assert accumulator.take() == []
    accumulator.acknowledge(0)
    assert accumulator.take() == [(0, [(None, b"later")])]
    accumulator.acknowledge(0)
    assert (accumulator.records, accumulator.used) == (0, 0)


def test_a_broker_that_keeps_its_records_leaves_others_their_turn() -> None:
    """Half of the partitions are on a silent broker, and librdkafka's share of what that has fills the pool."""
    count = 600
    accumulator = Accumulator(
        count, leaders=[p % 2 for p in range(count)], buffer_memory=4 << 20, record_overhead=272, request_bytes=1 << 20
    )
    for partition in range(count):
        accumulator.append(b"v", partition=partition)
    with contextlib.suppress(BufferError):
        while True:
            accumulator.append(b"v", partition=0)
    left = set(range(1, count, 2))
    while left:
        answered = [p for p, _ in accumulator.take() if p % 2]
        assert answered, f"{len(left)} partitions of the broker that answers wait"
        for partition in answered:
            accumulator.acknowledge(partition)
        left.difference_update(answered)


def test_memory_is_kept_for_lanes_that_librdkafka_can_have_and_not_for_the_others() -> None:
    """What it allocates for a record is more than the record: kept for all that wait, it would make batches small."""
    count, memory = 2000, 8 << 20

    def held(credit: int) -> tuple[Accumulator, int]:
        accumulator = Accumulator(
            count, leaders=[0] * count, buffer_memory=memory, record_overhead=272, request_bytes=1 << 20, credit=credit
        )
        with contextlib.suppress(BufferError):
            for number in range(count * 100):
                accumulator.append(b"v" * 100, partition=number % count)
        return accumulator, accumulator.records

    accumulator, records = held(credit=20)
    everything = held(credit=count)[1]
    assert records > 1.3 * everything
    # Those that go at a time fit into what was kept, so nobody waits for memory that only they would give back.
    while accumulator.records:
        taken = accumulator.take()
        assert len(taken) == min(20, accumulator.records), "fewer than it may have"
        assert accumulator.used + 272 * sum(len(rows) for _, rows in taken) <= memory
        for partition, _ in taken:
            accumulator.acknowledge(partition)
    assert accumulator.used == 0


def test_few_lanes_of_many_may_go_with_all_that_they_have() -> None:
    """Thousands of partitions have been used some time; memory is kept as if there were only those in use now."""
    count, memory = 2000, 8 << 20
    few, many = (
        Accumulator(
            size, leaders=[0] * size, buffer_memory=memory, record_overhead=272, request_bytes=1 << 20, credit=20
        )
        for size in (200, count)
    )
    for partition in range(count):
        many.append(b"v", partition=partition)
        for sent, _ in many.take():
            many.acknowledge(sent)
    for accumulator in (few, many):
        with contextlib.suppress(BufferError):
            while True:
                accumulator.append(b"v" * 100, partition=accumulator.records % 10)
    assert many.records <= 2 * few.records  # a third is kept, not all


def test_a_broker_that_takes_nothing_is_left_out() -> None:
    """partitioner.availability.timeout.ms: partitions 0 and 1 are on broker 7, which acknowledges nothing."""
    accumulator = Accumulator(
        4, sticky_bytes=200, leaders=[7, 7, 8, 9], availability_timeout_ms=20, buffer_memory=1 << 30
    )
    for partition in range(4):
        accumulator.append(b"x" * 90, None, partition)
    accumulator.take()
    accumulator.acknowledge(2)
    accumulator.acknowledge(3)
    time.sleep(0.05)
    accumulator.rebuild()
    chosen = set()
    for _ in range(100):
        chosen.add(accumulator.append(b"x" * 90))
        accumulator.take()
        accumulator.acknowledge(2)  # else a machine that stalls here would make these look stuck as well
        accumulator.acknowledge(3)
    assert chosen == {2, 3}


@pytest.mark.parametrize("seed", range(30))
def test_runs_of_bulk_calls_go_where_single_records_go(seed: int) -> None:
    """append_run() against append(), record by record: same places, same sticky state, same queues, same memory."""
    chance = random.Random(seed)
    bound = chance.choice([200, 1000, 16384])
    biggest = chance.choice([30, 300, 3000])
    sizes = [chance.randrange(biggest) for _ in range(3000)]
    values = [None if chance.random() < 0.01 else bytes([i & 255]) * size for i, size in enumerate(sizes)]
    bulk, single = (Accumulator(4, sticky_bytes=bound, seed=seed, adaptive=False) for _ in range(2))
    at, ran = 0, 0
    while at < len(values):
        part = values[at : at + chance.randint(1, 500)]
        at += len(part)
        partitions, runs = bulk.append_many(columns(part)[0])
        ran += runs
        assert partitions == [single.append(value) for value in part]
        assert bulk.sticky == single.sticky
        assert (bulk.records, bulk.used) == (single.records, single.used)
        if chance.random() < 0.5:
            everything = chance.random() < 0.5
            assert bulk.take(everything) == single.take(everything)
    assert [bulk.queued_bytes(p) for p in range(4)] == [single.queued_bytes(p) for p in range(4)]
    assert bulk.take() == single.take()
    if bound == 16384 and biggest < 3000:
        assert ran > 2000


def test_a_run_ends_where_the_memory_does() -> None:
    accumulator = Accumulator(1, buffer_memory=65536)
    values = [b"x" * 100] * 2000
    with pytest.raises(BufferError):
        accumulator.append_many(columns(values)[0])
    assert accumulator.used <= 65536


def test_a_pool_that_was_full_before_a_pause_says_nothing_about_afterwards() -> None:
    accumulator = Accumulator(2, sticky_bytes=1000, buffer_memory=200_000)
    for partition in (0, 1):
        accumulator.append(b"x", partition=partition)
    accumulator.take()
    for partition in (0, 1):
        accumulator.acknowledge(partition)
    accumulator.rebuild_many(1)  # both have settled in

    def fill(**where: int) -> None:
        while True:
            accumulator.append(b"x" * 1000, **where)

    with pytest.raises(BufferError):
        fill(partition=0)
    with pytest.raises(BufferError):
        fill()
    accumulator.take()
    for partition in (0, 1):
        accumulator.acknowledge(partition)
    time.sleep(0.3)  # nobody asks; the broker has long caught up
    counts = Counter()
    for _ in range(60):
        counts[accumulator.append(b"x" * 1000)] += 1
        accumulator.take()
        for partition in (0, 1):
            accumulator.acknowledge(partition)
    assert min(counts[0], counts[1]) > 20, counts
