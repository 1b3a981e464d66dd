"""Files to Kafka without the JVM: formats, folders, conditions, keys, and what is refused before anything is sent."""

import datetime
import gzip
import json
import os
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Consumer, TopicPartition

from fastprod._core._columns import Column
from fastprod.spark import CheckError, SourceError, export

ROWS = 20_000


class Plain:
    """An encoder that a person can check: json.dumps of each row, as text."""

    def check(self, schema) -> None:
        pass

    def encode_column(self, batch, name="value", base=0):
        return Column(
            [json.dumps(row, default=str).encode() for row in batch.to_pylist()], name, strict=False, base=base
        )


def read_back(cluster, topic) -> list:
    """All records of committed transactions."""
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": f"{topic}-reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    try:
        partitions = consumer.list_topics(topic).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        found, ended = [], set()
        while len(ended) < len(partitions):
            message = consumer.poll(60)
            assert message is not None, "no answer"
            if message.error():
                ended.add(message.partition())
            else:
                found.append(message)
        return found
    finally:
        consumer.close()


def rows_of(cluster, topic) -> list[dict]:
    return sorted((json.loads(message.value()) for message in read_back(cluster, topic)), key=lambda row: row["id"])


def table(first: int = 0, rows: int = ROWS) -> pa.Table:
    ids = range(first, first + rows)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": [None if number % 7 == 0 else f"näme {number}" for number in ids],
            "amount": [number / 4 for number in ids],
        }
    )


def settings(cluster) -> dict:
    return {"bootstrap.servers": cluster.bootstrap_servers}


def write_arrow(data: pa.Table, path: Path, stream: bool = False) -> None:
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), data.schema) as writer:
        for batch in data.to_batches(max_chunksize=3000):
            writer.write_batch(batch)


def write_json(data: pa.Table, path: Path) -> None:
    lines = "".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in data.to_pylist())
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())


WRITERS = {
    "parquet": lambda data, path: pq.write_table(data, path, row_group_size=3000),
    "orc": lambda data, path: pa.orc.write_table(data, path, stripe_size=65536, batch_size=1000),
    "arrow": write_arrow,
    "arrows": lambda data, path: write_arrow(data, path, stream=True),
    "csv": lambda data, path: pa.csv.write_csv(data, path),
    "jsonl": write_json,
    "json.gz": write_json,
}


@pytest.mark.parametrize("ending", WRITERS)
def test_every_row_of_every_format_arrives_once(spark, kafka_cluster, topic, tmp_path, ending) -> None:
    kafka_cluster.create_topic(topic, 3)
    data = table()
    for number in range(2):
        WRITERS[ending](data.slice(number * ROWS // 2, ROWS // 2), tmp_path / f"part-{number}.{ending}")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".part-0.crc").write_bytes(b"no data")
    types = {"id": "int64", "amount": "double"} if ending == "csv" else None
    report = export(
        spark, str(tmp_path), topic, settings(kafka_cluster), value=Plain(), key="id", schema=types, splits=4
    )
    assert (report.records, report.failed, report.files) == (ROWS, 0, 2)
    assert len(report.tasks) == (4 if ending in ("parquet", "orc", "arrow") else 2)
    assert sum(part.records for part in report.topics[topic].values()) == ROWS
    assert all(str(tmp_path) in task.source for task in report.tasks)
    assert rows_of(kafka_cluster, topic) == data.to_pylist()
