"""strict.order on a real Kafka: each partition ends up with a beginning of what was produced to it, in order, once."""

import time
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from confluent_kafka import KafkaError
from programs import wait_until

from fastprod import Producer
from fastprod.testing import KafkaCluster

PARTITIONS = 3


def test_brokers_frozen_for_longer_than_the_delivery_timeout(kafka_cluster: KafkaCluster, topic: str) -> None:
    """Half of the time the answer to what was written gets lost with the timeout: the hardest case for idempotence."""
    kafka_cluster.create_topic(topic, PARTITIONS)
    told: dict[int, dict[int, int | None]] = defaultdict(dict)
    config = {
        "bootstrap.servers": kafka_cluster.bootstrap_servers,
        "strict.order": True,
        "message.timeout.ms": 3000,
        "request.timeout.ms": 1000,
        "socket.timeout.ms": 2000,
        "error_cb": lambda error: None,
        "log_level": 0,
    }

    def tell(error: KafkaError | None, message) -> None:
        number = int(message.value())
        assert number not in told[message.partition()], "told twice"
        told[message.partition()][number] = None if error is None else error.code()

    with Producer(config) as producer:

        def send(first: int, count: int) -> None:
            for number in range(first, first + count):
                for partition in range(PARTITIONS):
                    producer.produce(topic, b"%d" % number, partition=partition, on_delivery=tell)
                producer.poll(0)
                if number % 10 == 0:
                    time.sleep(0.002)

        send(0, 1000)
        assert producer.flush(120) == 0
        send(1000, 1000)
        kafka_cluster.pause(1)
        try:
            send(2000, 1000)
            assert producer.flush(120) == 0
        finally:
            kafka_cluster.resume(1)
        assert wait_until(lambda: producer.list_topics(topic, timeout=5))
        send(3000, 1000)
        assert producer.flush(120) == 0
        time.sleep(2)  # librdkafka still tries to send what has timed out: let it
    found: dict[int, list[int]] = defaultdict(list)
    for record in kafka_cluster.records(topic):
        found[record.partition()].append(int(record.value()))
    for partition in range(PARTITIONS):
        outcomes = told[partition]
        assert sorted(outcomes) == list(range(4000))
        acknowledged = [number for number, code in sorted(outcomes.items()) if code is None]
        assert acknowledged == list(range(len(acknowledged))), "the first failure is the last word"
        assert 1000 <= len(acknowledged) < 4000
        assert set(outcomes.values()) <= {None, KafkaError._MSG_TIMED_OUT, KafkaError._GAPLESS_GUARANTEE}
        assert found[partition] == list(range(len(found[partition])))
        assert len(found[partition]) >= len(acknowledged)


@pytest.mark.parametrize(
    "more",
    [{}, {"linger.ms": 0}, {"queue.buffering.max.messages": 300}, {"headers": True}],
    ids=["plain", "no linger", "small queue", "one by one"],
)
def test_a_refused_batch_ends_the_producer(kafka_cluster: KafkaCluster, topic: str, more: dict[str, Any]) -> None:
    """A compacted topic refuses records without a key.

    librdkafka may begin to send a hand-over before it has all of it: what it still has must not follow.
    """
    kafka_cluster.create_topic(topic, 2, config={"cleanup.policy": "compact"})
    count, bad = 30_000, 12_345
    headers = [("h", b"v")] if more.get("headers") else None
    config = {"bootstrap.servers": kafka_cluster.bootstrap_servers, "strict.order": True, "log_level": 0}
    config |= {"error_cb": lambda error: None}
    config |= {name: value for name, value in more.items() if name != "headers"}
    with Producer(config) as producer:
        values = [b"%06d" % number for number in range(count)]
        keys = [None if number == bad else b"k" for number in range(count)]
        receipt = producer.produce_many(
            topic, values, keys, partitions=np.zeros(count, np.int32), headers=headers and [headers] * count
        )
        assert receipt.wait(120)
        failed = [one.index for one in receipt.errors]
        assert failed == list(range(failed[0], count)), "the first failure is the last word"
        assert failed[0] <= bad
        codes: list[int] = []
        for partition in (0, 1):
            producer.produce(
                topic, b"later", b"k", partition=partition, on_delivery=lambda error, _: codes.append(error.code())
            )
        assert producer.flush(120) == 0
        assert codes == [KafkaError._GAPLESS_GUARANTEE, KafkaError._FATAL]
    found = [record.value() for record in kafka_cluster.records(topic)]
    assert found == values[: failed[0]]
