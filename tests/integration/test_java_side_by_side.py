"""The same keys through Kafka's own Java producer and through fastprod land in the same partitions."""

import random
import subprocess
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from fastprod import Producer
from fastprod.testing import KafkaCluster
from fastprod.testing.kafka import find_kafka

KEYS = 100_000
PARTITIONS = 17  # no power of two: every bit of the hash matters


def odd_keys() -> list[bytes]:
    """Keys of all lengths and contents that might go wrong: empty, with zeros, high bits, unicode, long, numbers."""
    source = random.Random(20_261_116)
    shapes = [
        lambda n: b"",
        lambda n: bytes([n % 256]),
        lambda n: b"\x00" * (n % 40),
        lambda n: b"\xff" * (n % 40),
        lambda n: source.randbytes(source.randrange(70)),
        lambda n: source.randbytes(3) + b"\x00" * (n % 5),  # zeros at the end, which fixed-width columns drop
        lambda n: b"customer-%d" % n,
        lambda n: f"ключ-☃-🎉-{n}".encode(),
        lambda n: n.to_bytes(4, "big"),
        lambda n: n.to_bytes(8, "little", signed=True),
        lambda n: source.randbytes(16),
        lambda n: source.randbytes(source.randrange(1000, 5000)) if n % 50 == 0 else source.randbytes(n % 9),
    ]
    return [shapes[number % len(shapes)](number) for number in range(KEYS)]


def placed(cluster: KafkaCluster, topic: str) -> list[int]:
    """Each key's partition, by its number."""
    places = [-1] * KEYS
    records = cluster.records(topic, timeout=300)
    assert len(records) == KEYS
    for record in records:
        places[int(record.value())] = record.partition()
    return places


@pytest.fixture(scope="module")
def keys() -> list[bytes]:
    return odd_keys()


@pytest.fixture(scope="module")
def java_places(kafka_cluster: KafkaCluster, keys: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    file = tmp_path_factory.mktemp("java") / "keys.txt"
    file.write_text("\n".join(key.hex() for key in keys) + "\n")
    kafka_cluster.create_topic("placed-by-java", PARTITIONS)
    java, classpath = find_kafka()
    source = Path(__file__).with_name("Place.java")
    command = [java, "-cp", classpath, str(source), kafka_cluster.bootstrap_servers, "placed-by-java", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return placed(kafka_cluster, "placed-by-java")


def single(producer: Producer, topic: str, values: list[bytes], keys: list[bytes]) -> None:
    for value, key in zip(values, keys, strict=True):
        producer.produce(topic, value, key)


def listed(producer: Producer, topic: str, values: list[bytes], keys: list[bytes]) -> None:
    producer.produce_many(topic, values, keys)


def arrow(producer: Producer, topic: str, values: list[bytes], keys: list[bytes]) -> None:
    columns = {"value": pa.array(values, pa.binary()), "key": pa.array(keys, pa.binary_view())}
    producer.produce_arrow(pa.table(columns), topic)


@pytest.mark.parametrize("send", [single, listed, arrow])
def test_keys_of_odd_shapes_land_where_java_puts_them(
    kafka_cluster: KafkaCluster, topic: str, keys: list[bytes], java_places: list[int], send
) -> None:
    kafka_cluster.create_topic(topic, PARTITIONS)
    with Producer({"bootstrap.servers": kafka_cluster.bootstrap_servers}) as producer:
        send(producer, topic, [b"%d" % number for number in range(KEYS)], keys)
        assert producer.flush(120) == 0
    ours = placed(kafka_cluster, topic)
    different = [
        (key, theirs, mine) for key, theirs, mine in zip(keys, java_places, ours, strict=True) if theirs != mine
    ]
    assert different == []


def test_javas_keys_are_of_every_kind(keys: list[bytes], java_places: list[int]) -> None:
    """So that the comparison above means something."""
    assert set(java_places) == set(range(PARTITIONS))
    assert {len(key) for key in keys} >= set(range(70))
    assert np.unique([len(key) % 4 for key in keys]).size == 4
