"""Whatever can be produced arrives unchanged on a real broker, once, in order and where Java would put it."""

import random

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME
from reference import java_partition

from fastprod import Producer
from fastprod.testing import KafkaCluster, audit

PARTITIONS = 7
RECORDS = 20_000


def numbered(count: int) -> list[bytes]:
    return [b"%d some more bytes" % number for number in range(count)]


def some_keys(count: int) -> list[bytes]:
    return [b"key-%d" % (number % 997) for number in range(count)]


def send_single(producer: Producer, topic: str, values: list[bytes], keys: list[bytes]) -> None:
    for value, key in zip(values, keys, strict=True):
        producer.produce(topic, value, key)


def send_many(producer: Producer, topic: str, values: list[bytes], keys: list[bytes]) -> None:
    producer.produce_many(topic, values, keys)


def send_numpy(producer: Producer, topic: str, values: list[bytes], keys: list[bytes]) -> None:
    producer.produce_many(topic, np.array(values), np.array(keys))


def send_arrow(producer: Producer, topic: str, values: list[bytes], keys: list[bytes]) -> None:
    table = pa.table({"value": pa.array(values, pa.large_binary()), "key": pa.array(keys, pa.binary())})
    producer.produce_arrow(table, topic)


def send_batch(producer: Producer, topic: str, values: list[bytes], keys: list[bytes]) -> None:
    producer.produce_batch(topic, [{"value": v, "key": k} for v, k in zip(values, keys, strict=True)])


@pytest.mark.parametrize("send", [send_single, send_many, send_numpy, send_arrow, send_batch])
def test_keyed_records_arrive_once_in_order_in_javas_partition(kafka_cluster: KafkaCluster, topic: str, send) -> None:
    kafka_cluster.create_topic(topic, PARTITIONS)
    with Producer({"bootstrap.servers": kafka_cluster.bootstrap_servers}) as producer:
        send(producer, topic, numbered(RECORDS), some_keys(RECORDS))
        assert producer.flush(120) == 0
    found = audit(kafka_cluster.bootstrap_servers, topic, RECORDS, partition_of=java_partition(PARTITIONS))
    assert found.clean, str(found)


@pytest.mark.parametrize("partitioner", ["uniform", "sticky", "round_robin", "consistent_random"])
def test_keyless_records_arrive_once_in_order(kafka_cluster: KafkaCluster, topic: str, partitioner: str) -> None:
    kafka_cluster.create_topic(topic, PARTITIONS)
    config = {"bootstrap.servers": kafka_cluster.bootstrap_servers, "partitioner": partitioner}
    with Producer(config) as producer:
        producer.produce_many(topic, numbered(RECORDS))
    found = audit(kafka_cluster.bootstrap_servers, topic, RECORDS)
    assert found.clean, str(found)
    if partitioner == "round_robin":
        assert max(found.partitions.values()) - min(found.partitions.values()) <= 1


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_compression(kafka_cluster: KafkaCluster, topic: str, codec: str) -> None:
    kafka_cluster.create_topic(topic, 3)
    values = [b"%d " % number + b"compressible " * 20 for number in range(5000)]
    config = {"bootstrap.servers": kafka_cluster.bootstrap_servers, "compression.type": codec}
    with Producer(config) as producer:
        producer.produce_many(topic, values)
    assert sorted(record.value() for record in kafka_cluster.records(topic)) == sorted(values)


def test_sizes_from_a_byte_to_a_megabyte(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic, 3)
    source = random.Random(1)
    # 120 bytes of a megabyte go to the record's own fields, its key and the batch around it.
    sizes = [1, 2, 61, 511, 512, 513, 1023, 1024, 16384, 65536, 250_000, 999_000, (1 << 20) - 200]
    values = {b"%d" % size: source.randbytes(size) for size in sizes}
    config = {
        "bootstrap.servers": kafka_cluster.bootstrap_servers,
        "message.max.bytes": 1 << 20,
        "batch.size": 1 << 20,
    }
    with Producer(config) as producer:
        for key, value in values.items():
            producer.produce(topic, value, key)
        bulk = producer.produce_many(topic, list(values.values()), list(values))
        assert producer.flush(120) == 0
        assert bulk.failed == 0, bulk.errors
    found = [(record.key(), record.value()) for record in kafka_cluster.records(topic)]
    assert sorted(found) == sorted(2 * list(values.items()))


def test_headers_timestamps_nulls_and_unicode(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic)
    rows = [
        # key, value, headers, timestamp
        (b"k", b"v", [("h", b"1"), ("h", b"2"), ("empty", b""), ("none", None)], 1_600_000_000_000),
        (b"tombstone", None, [], 1_600_000_000_001),
        (None, b"no key", [], 1_600_000_000_002),
        (b"", b"empty key", [], 1_600_000_000_003),
        (None, None, [], 1_600_000_000_004),
        (b"", b"", [("ключ", "значение".encode())], 1_600_000_000_005),
        ("ключ ☃".encode(), "値 🎉".encode(), [], 1),
    ]
    keys, values, headers, timestamps = map(list, zip(*rows, strict=True))
    with Producer({"bootstrap.servers": kafka_cluster.bootstrap_servers}) as producer:
        for key, value, header, timestamp in rows:
            producer.produce(topic, value, key, partition=0, headers=header or None, timestamp=timestamp)
        producer.produce("" or topic, "値 🎉", "ключ ☃", partition=0, timestamp=2)  # str as confluent-kafka takes it
        producer.flush()
        receipt = producer.produce_many(topic, values, keys, [0] * len(rows), headers, timestamps)
        receipt.wait(120)
        table = pa.table(
            {
                "key": pa.array(keys, pa.binary()),
                "value": pa.array(values, pa.binary()),
                "partition": pa.array([0] * len(rows), pa.int32()),
                "headers": pa.array(
                    [[{"key": name, "value": value} for name, value in header] for header in headers],
                    pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
                ),
                "timestamp": pa.array(timestamps, pa.timestamp("ms")),
            }
        )
        producer.produce_arrow(table, topic).wait(120)
    found = [
        (record.key(), record.value(), record.headers() or [], record.timestamp())
        for record in kafka_cluster.records(topic)
    ]
    wanted = [(k, v, h, (TIMESTAMP_CREATE_TIME, t)) for k, v, h, t in rows]
    extra = (rows[-1][0], rows[-1][1], [], (TIMESTAMP_CREATE_TIME, 2))
    assert found == [*wanted, extra, *wanted, *wanted]


def test_receipts_tell_the_brokers_offsets(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic, 3)
    with Producer({"bootstrap.servers": kafka_cluster.bootstrap_servers}) as producer:
        first = producer.produce_many(topic, numbered(3000), partitions=[n % 3 for n in range(3000)])
        first.wait(120)
        second = producer.produce_many(topic, numbered(300), partitions=[n % 3 for n in range(300)])
        second.wait(120)
    assert {partition: tuple(ends)[:2] for partition, ends in first.offsets.items()} == dict.fromkeys(
        range(3), (0, 999)
    )
    assert {partition: tuple(ends)[:2] for partition, ends in second.offsets.items()} == dict.fromkeys(
        range(3), (1000, 1099)
    )
    assert kafka_cluster.watermarks(topic) == dict.fromkeys(range(3), (0, 1100))


def test_delivery_reports_tell_the_brokers_offsets(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic, 2)
    told: list[tuple[int, int, bytes]] = []
    with Producer({"bootstrap.servers": kafka_cluster.bootstrap_servers}) as producer:
        for number in range(2000):
            producer.produce(
                topic,
                b"%d" % number,
                on_delivery=lambda error, message: told.append(
                    (message.partition(), message.offset(), message.value())
                ),
            )
        producer.flush(120)
    stored = [(record.partition(), record.offset(), record.value()) for record in kafka_cluster.records(topic)]
    assert sorted(told) == stored
