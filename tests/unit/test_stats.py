"""Statistics of producers, and how they add up. What brokers count is the judge of what a producer tells."""

import itertools
import json
import random
import time

import pytest

from fastprod import ForkError, Producer
from fastprod.partitioning import PartialRoundRobin
from fastprod.stats import Latency, PartitionStats, TopicStats
from fastprod.testing import MockCluster, MockClusterProcess

TOPIC = "topic"


def producer(cluster: MockCluster, **more) -> Producer:
    return Producer({"bootstrap.servers": cluster.bootstrap_servers, "linger.ms": 1, **more})


def cell(records: int, seconds: float = 1.0, latencies: list[float] | None = None) -> PartitionStats:
    buckets = dict.fromkeys(latencies or [], 1)
    return PartitionStats(
        records,
        10 * records,
        1,
        2,
        3,
        4,
        0.5,
        records / seconds,
        10 * records / seconds,
        Latency(buckets, sum(buckets)),
    )


# ---- adding up


def test_merging_joins_by_producer_and_partition_not_by_position() -> None:
    one = TopicStats("t", {("a", 7): cell(10), ("a", 2): cell(20)})
    another = TopicStats("t", {("b", 2): cell(5), ("b", 9): cell(6)})
    merged = TopicStats.merge(one, another)
    assert {number: part.records for number, part in merged.partitions.items()} == {2: 25, 7: 10, 9: 6}
    assert {name: part.records for name, part in merged.publishers.items()} == {"a": 30, "b": 11}
    assert (merged.records, merged.bytes, merged.errors, merged.retries) == (41, 410, 4, 8)
    assert (merged.queue_records, merged.queue_bytes) == (12, 16)


def test_merging_takes_a_list_as_well() -> None:
    parts = [TopicStats("t", {(name, 0): cell(1)}) for name in "abc"]
    assert TopicStats.merge(parts) == TopicStats.merge(*parts)
    assert list(TopicStats.merge(iter(parts)).publishers) == ["a", "b", "c"]


def test_the_same_name_is_the_same_publisher() -> None:
    merged = TopicStats.merge(TopicStats("t", {("a", 1): cell(1)}), TopicStats("t", {("a", 1): cell(2)}))
    assert list(merged.publishers) == ["a"]
    assert merged.partitions[1].records == 3


def test_rates_add_whatever_their_seconds() -> None:
    merged = TopicStats.merge(TopicStats("t", {("a", 0): cell(100, 10)}), TopicStats("t", {("b", 0): cell(100, 1)}))
    assert merged.records_per_s == pytest.approx(110)
    assert merged.partitions[0].records_per_s == pytest.approx(110)
    assert merged.bytes_per_s == pytest.approx(1100)


def test_nothing_gives_zeros() -> None:
    for empty in (TopicStats.merge(), TopicStats.merge([]), TopicStats("t"), TopicStats.merge(TopicStats("t"))):
        assert (empty.partitions, empty.publishers) == ({}, {})
        total = empty.total
        assert total == PartitionStats()
        assert (total.records_per_s, total.latency.mean, total.latency.max, total.latency.percentile(99)) == (
            0,
            0,
            0,
            0,
        )


def test_weights_are_averaged_over_producers() -> None:
    merged = TopicStats.merge(TopicStats("t", {("a", 0): cell(1)}), TopicStats("t", {("b", 0): cell(1)}))
    assert merged.partitions[0].weight == 0.5


def test_topics_are_not_mixed_up() -> None:
    with pytest.raises(ValueError, match="several topics: t, u"):
        TopicStats.merge(TopicStats("t"), TopicStats("u"))


def test_percentiles_come_from_all_values_not_from_percentiles() -> None:
    chance = random.Random(1)
    fast = [chance.lognormvariate(-6, 0.5) for _ in range(9000)]
    slow = [chance.lognormvariate(-2, 0.3) for _ in range(1000)]
    parts = [Latency(dict.fromkeys(values, 1), sum(values)) for values in (fast, slow)]
    both = parts[0] + parts[1]
    exact = sorted(fast + slow)
    for percent in (1, 25, 50, 89, 91, 99, 99.9):
        assert both.percentile(percent) == pytest.approx(exact[int(percent / 100 * (len(exact) - 1))], rel=0.05)
    assert both.mean == pytest.approx(sum(exact) / len(exact))
    assert both.count == 10_000


@pytest.mark.parametrize("percent", [-1, 101])
def test_impossible_percentiles_are_named(percent: float) -> None:
    with pytest.raises(ValueError, match=str(percent)):
        Latency().percentile(percent)


def test_stats_survive_json() -> None:
    topic = TopicStats("t", {("a", 3): cell(5, 2, [0.001, 0.25]), ("b", 1): cell(1)}, waiting=4)
    again = TopicStats.from_dict(json.loads(json.dumps(topic.to_dict())))
    assert again == topic
    assert again.latency.percentile(100) == topic.latency.percentile(100)


def test_the_time_between_two_looks() -> None:
    earlier = TopicStats("t", {("a", 0): cell(10, 1, [0.001]), ("a", 1): cell(10)})
    later = TopicStats("t", {("a", 0): cell(30, 1, [0.001, 0.5]), ("a", 1): cell(10), ("a", 2): cell(7)})
    for part in later.cells.values():
        part.queue_records = part.errors = 0
    for part in earlier.cells.values():
        part.errors = 0
    between = later.since(earlier, 4.0)
    assert {number: part.records for number, part in between.partitions.items()} == {0: 20, 2: 7}
    assert between.partitions[0].records_per_s == 5
    assert between.partitions[0].latency.count == 1


# ---- of a producer


@pytest.mark.mock_cluster(brokers=2, topics={TOPIC: 6, "other": 1})
def test_counts_are_the_brokers(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster, partitioner=PartialRoundRobin(4, seed=1)) as one:
        for number in range(1000):
            one.produce(TOPIC, b"v" * 10, key=None if number % 2 else b"k")
        one.produce("other", None, b"tombstone")
        one.flush()
        stats = one.stats()
    written = {number: end for number, (_, end) in mock_cluster.watermarks(TOPIC).items() if end}
    assert {number: part.records for number, part in stats.topics[TOPIC].partitions.items()} == written
    assert stats.topics[TOPIC].bytes == 10_500
    assert stats.topics["other"].partitions[0].bytes == 9
    assert (stats.records, stats.bytes, stats.errors, stats.retries) == (1001, 10_509, 0, 0)
    assert (stats.queue_records, stats.queue_bytes) == (0, 0)
    assert stats.topics[TOPIC].latency.count == 1000
    assert sum(broker.requests for broker in stats.brokers.values()) >= len(written)
    assert all(broker.round_trip.count == broker.requests for broker in stats.brokers.values())
    json.dumps(stats.to_dict())
    assert str(stats).startswith(one.name)


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 8})
@pytest.mark.parametrize("transactional", [False, True])
def test_where_librdkafka_chooses_partitions_are_counted_by_its_reports(
    mock_cluster: MockCluster, transactional: bool
) -> None:
    more = {"transactional.id": "t"} if transactional else {}
    with producer(mock_cluster, partitioner="murmur2_random", **more) as one:
        if transactional:
            one.init_transactions()
            one.begin_transaction()
        for number in range(500):
            one.produce(TOPIC, b"v", str(number).encode())
        one.produce_many(TOPIC, [b"w"] * 500)
        assert one.flush(120) == 0
        if transactional:
            one.commit_transaction()
        partitions = one.stats().topics[TOPIC].partitions
        assert sum(part.latency.count for part in partitions.values()) == 1000
        assert one.stats().topics[TOPIC].waiting == 0
    written = {}
    for record in mock_cluster.records(TOPIC):
        written[record.partition()] = written.get(record.partition(), 0) + 1
    assert {number: part.records for number, part in partitions.items()} == written


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 2})
def test_what_waits_is_told(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster, **{"linger.ms": 1000}) as one:
        one.produce(TOPIC, b"first", partition=0)
        one.flush()
        mock_cluster.down()
        for _ in range(10):
            one.produce(TOPIC, b"12345", partition=1)
        stats = one.stats()
        assert stats.topics[TOPIC].partitions[1].queue_records == stats.queue_records == 10
        assert stats.topics[TOPIC].partitions[1].queue_bytes == 50
        assert stats.brokers[1].queue_records == 10
        assert stats.memory > 0
        mock_cluster.up()
        one.flush()
        assert one.stats().queue_records == 0


def test_records_without_metadata_wait_apart() -> None:
    one = Producer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
    one.produce(TOPIC, b"v")
    stats = one.stats()
    assert stats.topics[TOPIC].waiting == stats.queue_records == 1
    assert stats.topics[TOPIC].partitions == {}
    assert stats.brokers == {}
    one.purge()
    one.close()


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 1})
def test_repeated_requests_are_counted_at_once(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster) as one:
        one.produce(TOPIC, b"v")
        one.flush()
        mock_cluster.push_errors("Produce", "NOT_LEADER_FOR_PARTITION", "REQUEST_TIMED_OUT")
        one.produce(TOPIC, b"v")
        one.flush()
        stats = one.stats()
        assert (stats.brokers[1].requests, stats.brokers[1].repeated) == (4, 2)
        assert stats.retries == stats.topics[TOPIC].partitions[0].retries == 2


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 1})
def test_repeated_requests_of_a_transaction(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster, **{"transactional.id": "t"}) as one:
        one.init_transactions()
        one.begin_transaction()
        mock_cluster.push_errors("Produce", "NOT_LEADER_FOR_PARTITION")
        for _ in range(3):
            one.produce(TOPIC, b"v")
            one.flush()
        one.commit_transaction()
        assert (one.stats().brokers[1].requests, one.stats().brokers[1].repeated) == (4, 1)


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 4})
def test_records_sent_again_are_known_by_partition_with_librdkafkas_next_statistics(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster, **{"statistics.interval.ms": 50}) as one:
        for number in range(4):
            one.produce(TOPIC, b"v", partition=number)
        one.flush()
        mock_cluster.push_errors("Produce", "NOT_LEADER_FOR_PARTITION")
        one.produce_many(TOPIC, [b"v"] * 25, partitions=[2] * 25)  # a single call: one request
        one.flush()
        deadline = time.monotonic() + 120
        while one.stats().topics[TOPIC].partitions[2].retries < 25 and time.monotonic() < deadline:
            time.sleep(0.02)
        retries = {number: part.retries for number, part in one.stats().topics[TOPIC].partitions.items()}
    assert retries == {0: 0, 1: 0, 2: 25, 3: 0}


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 1})
def test_statistics_reach_a_callback_only_if_it_asked_for_them(mock_cluster: MockCluster) -> None:
    told = []
    with producer(mock_cluster, stats_cb=told.append, **{"statistics.interval.ms": 20}) as one:
        deadline = time.monotonic() + 120
        while not told and time.monotonic() < deadline:
            one.poll(0.05)
    assert json.loads(told[0])["type"] == "producer"
    from fastprod import _config

    settings, conf = _config.split({"stats_cb": told.append}, "")
    assert not settings.statistics_wanted
    assert conf["stats_cb"] is not told.append
    settings, conf = _config.split({"statistics.interval.ms": 0}, "")
    assert (settings.statistics_wanted, conf["statistics.interval.ms"]) == (False, 0)


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 1})
def test_failed_records_are_errors(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster) as one:
        one.produce(TOPIC, b"v")
        one.flush()
        mock_cluster.push_errors("Produce", "TOPIC_AUTHORIZATION_FAILED")
        one.produce(TOPIC, b"123")
        one.flush()
        part = one.stats().topics[TOPIC].partitions[0]
        assert (part.records, part.bytes, part.errors, part.queue_records) == (1, 1, 1, 0)
        assert part.latency.count == 1


@pytest.mark.mock_cluster(brokers=2, topics={TOPIC: 4})
def test_weights_are_shares(mock_cluster: MockCluster) -> None:
    # Adaptive ones would differ if this machine gave one of the brokers less to do with; see test_accumulator.
    with producer(mock_cluster, **{"partitioner.adaptive.partitioning.enable": False}) as one:
        one.produce_many(TOPIC, [b"v" * 100] * 20_000).wait()
        weights = [part.weight for part in one.stats().topics[TOPIC].partitions.values()]
    assert weights == [0.25] * 4


def test_the_load_tables_weights_are_told() -> None:
    from fastprod._core._shim import Accumulator

    accumulator = Accumulator(3, leaders=[1, 1, -1])
    assert [accumulator.weight(number) for number in range(4)] == [0.5, 0.5, 0, 0]


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 1})
def test_stats_after_close_and_names(mock_cluster: MockCluster) -> None:
    one, another = producer(mock_cluster), producer(mock_cluster, **{"client.id": "billing"})
    one.produce(TOPIC, b"v")
    one.close()
    assert one.stats().records == 1
    assert not any(broker.connected for broker in one.stats().brokers.values())
    assert one.name != another.name
    assert another.name.startswith("billing-")
    another.close()


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 1})
def test_stats_are_refused_after_fork(mock_cluster: MockCluster) -> None:
    import os

    one = producer(mock_cluster)
    child = os.fork()
    if child == 0:
        try:
            one.stats()
        except ForkError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    one.close()


def test_looks_while_it_works_never_tell_of_retries_that_were_not() -> None:
    with MockClusterProcess(3, topics={TOPIC: 12}) as cluster, producer(cluster) as one:
        last = -1
        receipts = []
        for _ in range(30):
            receipts.append(one.produce_many(TOPIC, [b"v" * 100] * 10_000))
            stats = one.stats()
            assert stats.retries == 0
            assert stats.records >= last
            last = stats.records
        assert all(receipt.wait(120) for receipt in receipts)
        assert one.stats().records == 300_000
        assert len(list(itertools.chain(one.stats().topics[TOPIC].partitions))) == 12


@pytest.mark.parametrize("partitioner", ["uniform", "consistent_random"])
def test_records_that_never_found_a_partition_are_errors(partitioner: str) -> None:
    one = Producer(
        {
            "bootstrap.servers": "127.0.0.1:1",
            "log_level": 0,
            "partitioner": partitioner,
            "message.timeout.ms": 200,
        }
    )
    for _ in range(7):
        one.produce(TOPIC, b"v")
    assert one.flush(120) == 0
    stats = one.stats()
    one.close()
    assert (stats.errors, stats.records, stats.queue_records, stats.topics[TOPIC].waiting) == (7, 0, 0, 0)
    assert TopicStats.merge(stats.topics[TOPIC], TopicStats(TOPIC, lost=2)).errors == 9
    assert TopicStats.from_dict(json.loads(json.dumps(stats.topics[TOPIC].to_dict()))).errors == 7
    assert stats.topics[TOPIC].since(stats.topics[TOPIC], 1.0).errors == 0


def test_records_for_a_partition_that_metadata_does_not_know_are_errors() -> None:
    with MockClusterProcess(1, topics={TOPIC: 2}) as cluster, producer(cluster) as one:
        cluster.down()
        for number in (0, 5, 1, 6):  # before metadata: all are accepted
            one.produce(TOPIC, b"v", partition=number)
        cluster.up()
        one.flush()
        stats = one.stats()
        assert (stats.records, stats.errors, stats.queue_records) == (2, 2, 0)
        assert stats.topics[TOPIC].lost == 2


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 4})
def test_where_librdkafka_chooses_a_failed_record_is_one_error(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster, partitioner="consistent_random") as one:
        one.produce(TOPIC, b"v", key=b"k")
        one.flush()
        mock_cluster.push_errors("Produce", "TOPIC_AUTHORIZATION_FAILED")
        one.produce(TOPIC, b"v", key=b"k")
        one.flush()
        stats = one.stats()
        assert (stats.records, stats.errors, stats.topics[TOPIC].lost) == (1, 1, 0)


@pytest.mark.mock_cluster(brokers=1, topics={TOPIC: 1})
def test_a_client_id_that_spoils_librdkafkas_statistics_spoils_no_others(mock_cluster: MockCluster) -> None:
    told = []
    with producer(
        mock_cluster, stats_cb=told.append, **{"client.id": 'the "big" one', "statistics.interval.ms": 20}
    ) as one:
        one.produce(TOPIC, b"v")
        one.flush()
        deadline = time.monotonic() + 120
        while not told and time.monotonic() < deadline:
            one.poll(0.05)
        with pytest.raises(json.JSONDecodeError):
            json.loads(told[0])
        assert one.stats().records == 1


@pytest.mark.mock_cluster(brokers=2, topics={TOPIC: 2})
def test_a_request_repeated_for_a_partition_that_left_is_not_blamed_on_the_one_that_stayed(
    mock_cluster: MockCluster,
) -> None:
    for number in range(2):
        mock_cluster.set_leader(TOPIC, number, 1)
    with producer(mock_cluster, **{"topic.metadata.refresh.interval.ms": 50}) as one:
        for number in range(2):
            one.produce(TOPIC, b"v", partition=number)
        one.flush()
        mock_cluster.push_errors("Produce", "NOT_LEADER_FOR_PARTITION")
        one.produce(TOPIC, b"v", partition=1)
        one.flush()
        mock_cluster.set_leader(TOPIC, 1, 2)
        deadline = time.monotonic() + 120
        while 2 not in one.stats().brokers or not one.stats().brokers[2].requests:
            assert time.monotonic() < deadline
            one.produce(TOPIC, b"v", partition=1)
            one.flush()
        stats = one.stats()
        assert stats.brokers[1].repeated >= 1
        assert stats.topics[TOPIC].partitions[0].retries == 0
