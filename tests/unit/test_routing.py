"""Lazily opened partitions and partial round robin: Pulsar's own expectations (PIP-79), and a model in Python."""

import pickle
import random
import threading
from collections import Counter

import pytest
from reference import murmur2

from fastprod import ConfigError, Producer
from fastprod._core._shim import Accumulator
from fastprod.partitioning import PartialRoundRobin, Partitioner, SinglePartition
from fastprod.stats import TopicStats
from fastprod.testing import MockCluster

TOPIC = "topic"


def keyless(router: PartialRoundRobin, partitions: int, count: int, topic: str = TOPIC) -> list[int]:
    return [router.partition(topic, None, b"v", partitions, range(partitions)) for _ in range(count)]


def producer(cluster: MockCluster, partitioner: object, **more) -> Producer:
    return Producer(
        {"bootstrap.servers": cluster.bootstrap_servers, "partitioner": partitioner, "linger.ms": 1, **more}
    )


def send(target: Producer, count: int, topic: str = TOPIC) -> None:
    for _ in range(count):
        target.produce(topic, b"v")
    assert target.flush(120) == 0


def opened(target: Producer, topic: str = TOPIC) -> set[int]:
    return set(target.stats().topics[topic].partitions)


# ---- the router by itself


@pytest.mark.parametrize("limit", [0, -1, 2**31])
def test_an_impossible_limit_is_named(limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit must be from 1 to 2147483647, not {limit}"):
        PartialRoundRobin(limit)


@pytest.mark.parametrize("limit", [None, "3", 2.0, True])
def test_a_limit_is_a_whole_number(limit: object) -> None:
    with pytest.raises(TypeError, match="limit must be a whole number"):
        PartialRoundRobin(limit)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_an_impossible_seed_is_named(seed: int) -> None:
    with pytest.raises(ValueError, match=f"seed must be .*, not {seed}"):
        SinglePartition(seed)


def test_it_is_a_partitioner() -> None:
    assert isinstance(PartialRoundRobin(3), Partitioner)
    assert repr(PartialRoundRobin(3, seed=1)) == "PartialRoundRobin(limit=3, seed=1)"
    assert repr(SinglePartition()) == "SinglePartition(seed=None)"


@pytest.mark.parametrize("key", [None, b"k"])
@pytest.mark.parametrize("partitions", [0, -1])
def test_without_partitions_there_is_no_choice(key: bytes | None, partitions: int) -> None:
    with pytest.raises(ValueError, match=f"partitions must be at least 1, not {partitions}"):
        PartialRoundRobin(2).partition(TOPIC, key, None, partitions, [])


def test_the_router_never_names_a_partition_that_is_gone() -> None:
    router = PartialRoundRobin(3, seed=1)
    assert max(keyless(router, 100, 3)) >= 2
    assert sorted(keyless(router, 2, 2)) == [0, 1]


def test_a_class_is_not_a_partitioner() -> None:
    with pytest.raises(ConfigError, match=r"give an object, SinglePartition\(\.\.\.\)"):
        Producer({"bootstrap.servers": "127.0.0.1:1", "partitioner": SinglePartition})


class Last(PartialRoundRobin):
    """A choice of its own, so not the one that runs in C."""

    def partition(self, topic, key, value, partitions, available) -> int:
        return partitions - 1


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 10})
def test_a_subclass_with_a_choice_of_its_own_is_asked(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster, Last(3, seed=1)) as one:
        one.produce_many(TOPIC, [b"v"] * 20).wait()
        assert list(one.stats().topics[TOPIC].partitions) == [9]


@pytest.mark.parametrize("router", [PartialRoundRobin(3, seed=5), SinglePartition(seed=5)])
def test_it_travels_to_other_processes(router: PartialRoundRobin) -> None:
    copy = pickle.loads(pickle.dumps(router))
    assert type(copy) is type(router)
    assert keyless(copy, 10, 9) == keyless(router, 10, 9)


@pytest.mark.parametrize("partitions", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("limit", [1, 2, 3, 10, 5000])
def test_it_takes_turns_among_as_many_as_the_limit_allows(limit: int, partitions: int) -> None:
    used = min(limit, partitions)
    order = keyless(PartialRoundRobin(limit), partitions, 3 * used)
    assert len(set(order)) == used
    assert set(order) <= set(range(partitions))
    assert order == 3 * order[:used]


def test_order_and_position_stay_when_the_topic_grows() -> None:
    router = PartialRoundRobin(5, seed=3)
    before = keyless(router, 2, 3)  # a b a, so that b is next
    after = keyless(router, 6, 10)
    assert after[0] == before[1]
    assert set(after[1:4]).isdisjoint(before)
    assert after[4] == before[0]
    assert after[:5] == after[5:]
    assert keyless(router, 100, 5) == after[:5]  # the limit is reached


def test_topics_do_not_share_their_state() -> None:
    router = PartialRoundRobin(3, seed=1)
    mixed = [router.partition(topic, None, None, 9, range(9)) for _ in range(6) for topic in ("a", "b")]
    assert mixed[::2] == keyless(PartialRoundRobin(3, seed=1), 9, 6, "a")
    assert mixed[1::2] == keyless(PartialRoundRobin(3, seed=1), 9, 6, "b")


def test_a_seed_draws_the_same_again_and_chance_draws_all() -> None:
    assert keyless(PartialRoundRobin(3, seed=9), 50, 3) == keyless(PartialRoundRobin(3, seed=9), 50, 3)
    drawn = Counter(p for _ in range(400) for p in keyless(PartialRoundRobin(3), 10, 3))
    assert len(drawn) == 10
    assert min(drawn.values()) > 60  # 120 expected, 9 the standard deviation


def test_keys_go_where_they_always_go() -> None:
    router = PartialRoundRobin(1, seed=0)
    for key in (b"", b"a", b"customer-17", bytes(range(256))):
        assert router.partition(TOPIC, key, None, 10, range(10)) == (murmur2(key) & 0x7FFFFFFF) % 10


def test_partitions_without_leader_lose_their_turn() -> None:
    router = PartialRoundRobin(3, seed=2)
    first, second, third = keyless(router, 10, 3)
    without = [p for p in range(10) if p != second]
    assert [router.partition(TOPIC, None, None, 10, without) for _ in range(4)] == [first, third, first, third]
    none_of_them = [p for p in range(10) if p not in (first, second, third)]
    assert router.partition(TOPIC, None, None, 10, none_of_them) in (first, second, third)


# ---- in the accumulator


class Model:
    """Partial round robin, told simply; which partitions are drawn is taken from what it is compared with."""

    def __init__(self, limit: int) -> None:
        self.limit, self.order, self.next = limit, [], 0

    def check(self, chosen: int, partitions: int) -> None:
        if self.next == len(self.order):
            assert chosen not in self.order
            assert 0 <= chosen < partitions
            self.order.append(chosen)
        assert chosen == self.order[self.next]
        self.next = (self.next + 1) % min(self.limit, partitions)


@pytest.mark.parametrize("seed", range(20))
def test_the_accumulator_agrees_with_a_model_while_the_topic_grows(seed: int) -> None:
    chance = random.Random(seed)
    limit, partitions = chance.randint(1, 12), chance.randint(1, 4)
    accumulator = Accumulator(partitions, policy="partial", limit=limit, seed=seed)
    model = Model(limit)
    while partitions < 20:
        for _ in range(chance.randint(0, 30)):
            model.check(accumulator.append(b"v"), partitions)
        assert accumulator.lanes_opened == len(model.order) <= limit
        partitions += chance.randint(1, 4)
        accumulator.set_partitions(partitions)


def test_producer_and_router_draw_the_same() -> None:
    accumulator = Accumulator(10, policy="partial", limit=4, seed=11)  # its topic is called «test»
    assert [accumulator.append(b"v") for _ in range(9)] == keyless(PartialRoundRobin(4, seed=11), 10, 9, "test")


def test_a_topic_made_anew_with_fewer_partitions_is_drawn_anew() -> None:
    accumulator = Accumulator(50, policy="partial", limit=5, seed=1)
    for _ in range(5):
        accumulator.append(b"v")
    accumulator.set_partitions(3)
    assert {accumulator.append(b"v") for _ in range(6)} == {0, 1, 2}


def test_a_leaderless_partition_gets_none() -> None:
    accumulator = Accumulator(4, policy="partial", limit=4, seed=1, leaders=[1, -1, 1, 1])
    assert {accumulator.append(b"v") for _ in range(12)} == {0, 2, 3}
    accumulator.set_partitions(4)
    assert {accumulator.append(b"v") for _ in range(4)} == {0, 1, 2, 3}


@pytest.mark.parametrize("policy", ["uniform", "sticky", "round_robin", "partial"])
def test_a_lane_that_cannot_be_opened_fails_its_record_only(policy: str) -> None:
    accumulator = Accumulator(3, policy=policy, limit=3, failing_opens=2)
    for _ in range(2):
        with pytest.raises(MemoryError):
            accumulator.append(b"v")
    assert (accumulator.lanes_opened, accumulator.records) == (0, 0)
    assert accumulator.append(b"v") in (0, 1, 2)  # the next election tries again
    assert (accumulator.lanes_opened, accumulator.records) == (1, 1)


# ---- what Pulsar expects of its producers


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 10})
def test_ten_partitions_and_a_limit_of_three_open_three(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster, PartialRoundRobin(3)) as one:
        send(one, 20)
        assert len(opened(one)) == 3
        counts = {number: end for number, (_, end) in mock_cluster.watermarks(TOPIC).items() if end}
        assert sorted(counts.values()) == [6, 7, 7]
        assert set(counts) == opened(one)


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 10})
def test_a_single_partition_opens_one(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster, SinglePartition()) as one:
        send(one, 20)
        assert len(opened(one)) == 1


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 10})
def test_partitions_are_opened_as_they_are_used(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster, "round_robin") as one:
        assert one.stats().topics == {}
        send(one, 1)
        assert len(opened(one)) == 1
        send(one, 9)
        assert len(opened(one)) == 10


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 5})
def test_two_producers_are_two_publishers(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster, PartialRoundRobin(2, seed=1)) as one, producer(mock_cluster, "round_robin") as another:
        send(one, 10)
        send(another, 10)
        merged = TopicStats.merge(one.stats().topics[TOPIC], another.stats().topics[TOPIC])
    assert set(merged.publishers) == {one.name, another.name}
    assert {name: part.records for name, part in merged.publishers.items()} == {one.name: 10, another.name: 10}
    assert set(merged.partitions) == {0, 1, 2, 3, 4}
    assert merged.records == 20


# ---- nothing for partitions never elected


@pytest.mark.mock_cluster(brokers=6, topics={TOPIC: 12})
def test_partitions_of_one_broker_need_no_connection_to_the_others(mock_cluster: MockCluster) -> None:
    mine = [number for number in range(12) if mock_cluster.leader_of(TOPIC, number) == 2]
    with producer(mock_cluster, "round_robin") as one, producer(mock_cluster, "round_robin") as another:
        for number in mine * 50:
            one.produce(TOPIC, b"v", partition=number)
        one.flush()
        send(another, 120)
        assert opened(one) == set(mine)
        brokers = one.stats().brokers
        assert {number for number, broker in brokers.items() if broker.requests} == {2}
        # librdkafka asks brokers of its own choice for metadata and a producer id, and keeps those connections a while.
        assert sum(broker.connected for broker in brokers.values()) <= 3
        assert sum(broker.connected for broker in another.stats().brokers.values()) == 6


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 1000})
def test_eight_threads_elect_at_once_and_open_each_partition_once(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster, PartialRoundRobin(64, seed=4)) as one:
        start = threading.Barrier(8)

        def work() -> None:
            start.wait()
            for _ in range(1000):
                one.produce(TOPIC, b"v")

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one.flush(120) == 0
        partitions = one.stats().topics[TOPIC].partitions
        assert len(partitions) == 64
        assert {part.records for part in partitions.values()} == {125}


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 3})
def test_a_forbidden_topic_fails_its_records_and_is_asked_about_again(mock_cluster: MockCluster) -> None:
    mock_cluster.topic_error(TOPIC, "TOPIC_AUTHORIZATION_FAILED")
    errors = []
    with producer(mock_cluster, PartialRoundRobin(2)) as one:
        one.produce(TOPIC, b"v", on_delivery=lambda error, message: errors.append(error))
        one.flush(120)
        assert [error.name() for error in errors] == ["TOPIC_AUTHORIZATION_FAILED"]
        assert one.stats().topics[TOPIC].partitions == {}
        mock_cluster.topic_error(TOPIC, None)
        send(one, 4)
        assert len(opened(one)) == 2


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 10})
def test_bulk_calls_use_it_too(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster, PartialRoundRobin(3, seed=6)) as one:
        receipt = one.produce_many(TOPIC, [b"v"] * 3000)
        assert receipt.wait(120)
        assert sorted(extent.records for extent in receipt.extents.values()) == [1000, 1000, 1000]
