"""How key-less records spread over partitions and how much memory they take, on a mock cluster of its own process."""

from pathlib import Path

import pytest

from fastprod import Producer
from fastprod.testing import MockClusterProcess

RECORDS = 1_000_000
VALUE = b"x" * 100


def produce(producer: Producer, bulk: bool) -> None:
    if bulk:
        values = [VALUE] * 50_000
        for _ in range(RECORDS // len(values)):
            producer.produce_many("t", values)
    else:
        for _ in range(RECORDS):
            producer.produce("t", VALUE)
    assert producer.flush(120) == 0


def bytes_written(cluster: MockClusterProcess) -> dict[int, int]:
    """By the brokers' own count: all records have one size."""
    return {partition: high * len(VALUE) for partition, (_, high) in cluster.watermarks("t").items()}


@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "single"])
def test_equal_brokers_get_equal_bytes(bulk: bool) -> None:
    with MockClusterProcess(brokers=4, topics={"t": 10}) as cluster:
        with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
            produce(producer, bulk)
        written = bytes_written(cluster)
    assert len(written) == 10
    assert sum(written.values()) == RECORDS * len(VALUE)
    assert max(written.values()) - min(written.values()) < 0.01 * RECORDS * len(VALUE) / 10


@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "single"])
def test_slow_brokers_get_clearly_less(bulk: bool) -> None:
    with MockClusterProcess(brokers=4, topics={"t": 8}) as cluster:
        for broker in (1, 3):
            cluster.set_rtt(100, broker)
        with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
            produce(producer, bulk)
        cluster.set_rtt(0)
        written = bytes_written(cluster)
        slow = [p for p in written if cluster.leader_of("t", p) in (1, 3)]
    fast = [p for p in written if p not in slow]
    assert slow
    assert fast
    assert max(written[p] for p in slow) < 0.7 * min(written[p] for p in fast)


def test_without_adaptation_slow_brokers_get_their_share() -> None:
    with MockClusterProcess(brokers=4, topics={"t": 8}) as cluster:
        for broker in (1, 3):
            cluster.set_rtt(100, broker)
        conf = {"bootstrap.servers": cluster.bootstrap_servers, "partitioner.adaptive.partitioning.enable": False}
        with Producer(conf) as producer:
            produce(producer, True)
        cluster.set_rtt(0)
        written = bytes_written(cluster)
    assert max(written.values()) - min(written.values()) < 0.01 * RECORDS * len(VALUE) / 8


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to read the resident memory")
@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "single"])
def test_memory_stays_within_the_buffer(bulk: bool) -> None:
    """A broker that answers after 200 ms, and ten times more data than fits."""
    limit = 32 << 20
    with MockClusterProcess(brokers=1, topics={"t": 10}) as cluster:
        cluster.set_rtt(200)
        with Producer({"bootstrap.servers": cluster.bootstrap_servers, "buffer.memory": limit}) as producer:
            values = [VALUE] * 20_000
            before, most = resident(), 0
            for _ in range(40):
                if bulk:
                    producer.produce_many("t", values)
                else:
                    for value in values:
                        producer.produce("t", value)
                most = max(most, resident())
            assert most - before < limit + (64 << 20)
            cluster.set_rtt(0)
            assert producer.flush(120) == 0
            assert producer._runtime is not None
            assert producer._runtime.memory == 0
