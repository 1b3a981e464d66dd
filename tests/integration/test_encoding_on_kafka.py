"""Rows encoded on the way, on a real Kafka: every one arrives once, as JSON, where Java would place its key."""

import json

import pyarrow as pa
from reference import java_partition

from fastprod import Producer
from fastprod.cli._orders import orders
from fastprod.encoding import Json
from fastprod.testing import KafkaCluster

ROWS = 50_000
PARTITIONS = 3


def test_orders_arrive_as_json_once_each(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic, PARTITIONS)
    batch = orders(ROWS)
    table = pa.Table.from_batches([batch.slice(0, 20_001), batch.slice(20_001)])
    with Producer({"bootstrap.servers": kafka_cluster.bootstrap_servers, "log_level": 0}) as producer:
        receipt = producer.produce_arrow(table, topic, value=Json(), key="customer_id", timestamp="ordered_at")
        assert receipt.wait(300)
    assert (receipt.acknowledged, receipt.failed) == (ROWS, 0)
    found = kafka_cluster.records(topic)
    assert sorted(record.value() for record in found) == sorted(Json().encode(batch).to_pylist())
    for record in found[:: ROWS // 500]:
        row = json.loads(record.value())
        assert record.key() == str(row["customer_id"]).encode()
        assert record.partition() == java_partition(PARTITIONS)(record.key())
        assert record.timestamp()[1] == batch["ordered_at"][row["order_id"] - 10**12].value // 1000
