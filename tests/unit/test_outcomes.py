"""Outcomes belong to their record, and offsets are the broker's or unknown."""

from typing import Any

import confluent_kafka
import pyarrow as pa
import pytest

from fastprod import Producer, Receipt
from fastprod.receipt import Extent
from fastprod.testing import MockCluster

pytestmark = pytest.mark.mock_cluster(brokers=1, topics={"t": 1})


def conf(cluster: MockCluster, **options: Any) -> dict[str, Any]:
    return {"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, "error_cb": lambda error: None, **options}


@pytest.mark.parametrize("size", [0, 100, 600])
def test_the_same_object_twice_with_other_headers(mock_cluster: MockCluster, size: int) -> None:
    """The first of two records that look alike is refused: it is the first that has failed."""
    value = b"x" * size
    options = {"enable.idempotence": False, "linger.ms": 0, "max.in.flight": 1, "retries": 0}
    with Producer(conf(mock_cluster, **options)) as producer:
        producer.produce("t", b"warm")
        assert producer.flush(120) == 0
        mock_cluster.push_errors("Produce", "INVALID_RECORD")
        first = producer.produce_many("t", [value], headers=[{"id": b"1"}])
        assert first.wait(120)
        second = producer.produce_many("t", [value], headers=[{"id": b"2"}])
        assert second.wait(120)
        assert (first.failed, first.acknowledged) == (1, 0)
        assert (second.failed, second.acknowledged) == (0, 1)
    assert [record.headers() for record in mock_cluster.records("t")][1:] == [[("id", b"2")]]


def test_null_values_without_keys_keep_their_callbacks_in_order(mock_cluster: MockCluster) -> None:
    got: list[tuple[int, int]] = []
    with Producer(conf(mock_cluster)) as producer:
        for n in range(5000):
            producer.produce("t", None, on_delivery=lambda error, message, n=n: got.append((n, message.offset())))
    assert got == [(n, n) for n in range(5000)]


def test_offsets_that_the_broker_did_not_tell_are_unknown(mock_cluster: MockCluster) -> None:
    """A broker that has a batch already, because its first answer was lost, may only say so.

    librdkafka may send the first of five records alone; the others then have real offsets, after the hundred.
    """
    with Producer(conf(mock_cluster, **{"linger.ms": 50})) as producer:
        for _ in range(100):
            producer.produce("t", b"earlier")
        assert producer.flush(120) == 0
        mock_cluster.push_errors("Produce", "DUPLICATE_SEQUENCE_NUMBER")
        got: list[tuple[object, int | None]] = []
        for _ in range(5):
            producer.produce("t", b"x", on_delivery=lambda error, message: got.append((error, message.offset())))
        assert producer.flush(120) == 0
        assert got[0] == (None, None)
        assert all(offset is None or offset >= 100 for _, offset in got)
        mock_cluster.push_errors("Produce", "DUPLICATE_SEQUENCE_NUMBER")
        receipt = producer.produce_many("t", [b"y"] * 5)
        assert receipt.wait(120)
        extent = receipt.extents[("t", 0)]
        assert extent.records == 5
        assert extent.unknown >= 1
        assert extent.first is None or extent.first >= 100


def test_pinned_and_copied_values_and_several_calls_share_chunks(mock_cluster: MockCluster) -> None:
    """Values on both sides of the zero-copy bound in turns, by calls of a few records and by single ones."""
    sizes = [10, 600, 511, 512, 5000, 0]
    wanted: list[tuple[bytes | None, bytes]] = []
    receipts: list[Receipt] = []
    got: list[int] = []
    with Producer(conf(mock_cluster)) as producer:
        for n in range(300):
            values = [b"%04d-%d-" % (n, i) + b"v" * size for i, size in enumerate(sizes)]
            keys = [None, b"k%d" % n, b"", b"a", None, b"b"]
            receipts.append(producer.produce_many("t", pa.array(values, pa.binary()), keys))
            producer.produce("t", b"%04d-single" % n, on_delivery=lambda error, message: got.append(message.offset()))
            wanted += [*zip(keys, values, strict=True), (None, b"%04d-single" % n)]
        assert producer.flush(120) == 0
        memory = producer._runtime.memory
    assert memory == 0
    assert [(record.key(), record.value()) for record in mock_cluster.records("t")] == wanted
    assert [receipt.extents for receipt in receipts] == [{("t", 0): Extent(6, 7 * n, 7 * n + 5)} for n in range(300)]
    assert got == [7 * n + 6 for n in range(300)]


def test_mixed_sizes_take_no_more_of_the_pool_than_even_ones(mock_cluster: MockCluster) -> None:
    def taken(sizes: list[int]) -> float:
        # Nothing is sent before it is looked at: neither is a batch full nor the linger over.
        options = {"linger.ms": 600_000, "sticky.batch.size": 1 << 30, "buffer.memory": 64 << 20}
        with Producer(conf(mock_cluster, **options)) as producer:
            producer.produce("t", b"warm")
            assert producer.flush(120) == 0
            producer.produce_many("t", pa.array([b"v" * size for size in sizes], pa.binary()))
            return producer._runtime.memory / len(sizes)

    assert taken([100, 900] * 1000) < 1.3 * taken([500] * 2000)


def test_receipts_cannot_be_made_by_hand() -> None:
    with pytest.raises(TypeError, match="produce_many"):
        Receipt()
    with pytest.raises(TypeError, match="produce_many"):
        Receipt.__new__(Receipt)


@pytest.mark.parametrize(
    "name", ["consistent", "consistent_random", "murmur2", "murmur2_random", "fnv1a", "fnv1a_random"]
)
@pytest.mark.mock_cluster(brokers=1, topics={"many": 13})
def test_librdkafkas_partitioners_place_odd_keys_as_librdkafka_does(mock_cluster: MockCluster, name: str) -> None:
    keys: list[bytes | None] = [b"\0", b"\xff" * 7, "ключ".encode(), b"k" * 1000, *(b"%d" % n for n in range(500))]
    if name != "consistent_random":
        keys.append(b"")  # there it is no key
    if not name.endswith("_random"):
        keys.append(None)

    def place(kind: type[confluent_kafka.Producer]) -> dict[bytes | None, int]:
        placed: dict[bytes | None, int] = {}
        producer = kind(conf(mock_cluster, partitioner=name))
        for key in keys:
            producer.produce("many", b"v", key, on_delivery=lambda _, m, k=key: placed.__setitem__(k, m.partition()))
        assert producer.flush(120) == 0
        producer.close()
        return placed

    assert place(Producer) == place(confluent_kafka.Producer)


@pytest.mark.mock_cluster(brokers=1, topics={"many": 13})
@pytest.mark.parametrize("name", ["consistent_random", "murmur2_random", "fnv1a_random", "random"])
def test_records_without_a_key_are_spread(mock_cluster: MockCluster, name: str) -> None:
    options = {"sticky.batch.size": 1, "partitioner.adaptive.partitioning.enable": False}
    with Producer(conf(mock_cluster, partitioner=name, **options)) as producer:
        producer.produce_many("many", [b"v"] * 1300, [b"same"] * 1300 if name == "random" else None)
    assert all(high > 10 for _, high in mock_cluster.watermarks("many").values())
