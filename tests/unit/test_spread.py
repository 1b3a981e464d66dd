"""How key-less records spread over partitions and how much memory they take, on a mock cluster of its own process."""

from pathlib import Path
from statistics import mean

import pytest

from fastprod import Producer
from fastprod.testing import MockClusterProcess

RECORDS = 1_000_000
VALUE = b"x" * 100
STICKY = 16_384


def produce(producer: Producer, bulk: bool) -> None:
    if bulk:
        values = [VALUE] * 50_000
        for _ in range(RECORDS // len(values)):
            producer.produce_many("t", values)
    else:
        for _ in range(RECORDS):
            producer.produce("t", VALUE)
    assert producer.flush(300) == 0


def bytes_written(cluster: MockClusterProcess) -> dict[int, int]:
    """By the brokers' own count: all records have one size."""
    return {partition: high * len(VALUE) for partition, (_, high) in cluster.watermarks("t").items()}


# A partition is left when it has had its share, at the latest after two bounds; the next is the one that has had least.
# So no two are ever further apart than this, however slow or busy brokers and machine are.
FURTHEST = 2 * STICKY + 1000


def written_by(bulk: bool, brokers: int, partitions: int, slow: dict[int, int], **config: object) -> dict[int, int]:
    """Bytes by partition, with some brokers' answers late by so many ms; slow ones have negative numbers."""
    with MockClusterProcess(brokers, topics={"t": partitions}) as cluster:
        for broker, late in slow.items():
            cluster.set_rtt(late, broker)
        with Producer({"bootstrap.servers": cluster.bootstrap_servers, **config}) as producer:
            produce(producer, bulk)
        cluster.set_rtt(0)
        written = bytes_written(cluster)
        assert sum(written.values()) == RECORDS * len(VALUE)
        assert len(written) == partitions
        return {-1 - p if cluster.leader_of("t", p) in slow else p: size for p, size in written.items()}


@pytest.mark.parametrize("slow", [{}, {1: 100, 3: 100}], ids=["equal", "slow"])
@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "single"])
def test_without_adaptation_all_partitions_get_equal_bytes(bulk: bool, slow: dict[int, int]) -> None:
    config = {"partitioner.adaptive.partitioning.enable": False, "sticky.batch.size": STICKY}
    written = written_by(bulk, 4, 10, slow, **config)
    assert max(written.values()) - min(written.values()) <= FURTHEST


@pytest.mark.parametrize("bulk", [True, False], ids=["bulk", "single"])
def test_slow_brokers_get_clearly_less(bulk: bool) -> None:
    """How much less depends on the machine. Without the load table it would be less than FURTHEST."""
    written = written_by(bulk, 4, 8, {1: 500, 3: 500})
    slow = [size for partition, size in written.items() if partition < 0]
    fast = [size for partition, size in written.items() if partition >= 0]
    assert mean(slow) < 0.8 * mean(fast)


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
            assert producer.flush(300) == 0
            assert producer._runtime is not None
            assert producer._runtime.memory == 0
