"""Partial round robin on a topic that grows: librdkafka's mock cannot add partitions, a real Kafka can."""

import time

from confluent_kafka.admin import AdminClient, NewPartitions

from fastprod import Producer
from fastprod.partitioning import PartialRoundRobin


def test_a_limit_of_three_with_two_then_three_then_four_partitions(kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 2)
    admin = AdminClient({"bootstrap.servers": kafka_cluster.bootstrap_servers})
    config = {"bootstrap.servers": kafka_cluster.bootstrap_servers, "topic.metadata.refresh.interval.ms": 200}
    with Producer({**config, "partitioner": PartialRoundRobin(3)}) as producer:

        def opened_after(records: int) -> set[int]:
            for _ in range(records):
                producer.produce(topic, b"v")
            assert producer.flush(120) == 0
            return set(producer.stats().topics[topic].partitions)

        assert opened_after(6) == {0, 1}
        admin.create_partitions([NewPartitions(topic, 3)])[topic].result(30)
        deadline = time.monotonic() + 120
        while opened_after(3) != {0, 1, 2} and time.monotonic() < deadline:
            time.sleep(0.1)
        assert opened_after(3) == {0, 1, 2}
        admin.create_partitions([NewPartitions(topic, 4)])[topic].result(30)
        deadline = time.monotonic() + 2  # ten refreshes
        while time.monotonic() < deadline:
            assert opened_after(4) == {0, 1, 2}
            time.sleep(0.05)
