"""The data source `fastprod`, batch and streaming."""

import json
import time
from dataclasses import replace

import pyarrow as pa
import pytest

import fastprod.spark
from fastprod.spark import source
from fastprod.spark._sink import BUCKET
from fastprod.spark._worker import Sink
from fastprod.spark.report import TaskReport
from fastprod.spark.source import BatchWriter, Message, StreamWriter


@pytest.fixture
def registered(spark):
    fastprod.spark.register(spark)
    return spark


def test_spark_finds_the_data_source_by_itself(spark, mock, topic) -> None:
    mock.create_topic(topic, 2)
    df = spark.newSession().range(100).selectExpr("cast(id AS string) AS value")
    df.write.format("fastprod").mode("append").option("kafka.bootstrap.servers", mock.bootstrap_servers).option(
        "topic", topic
    ).save()
    assert len(mock.records(topic)) == 100


def test_a_batch_with_a_report(registered, mock, topic, tmp_path) -> None:
    mock.create_topic(topic, 2)
    df = registered.range(1000).selectExpr("cast(id AS string) AS key", "cast(id AS string) AS value", "id AS other")
    (
        df.write.format("fastprod")
        .mode("append")
        .option("Kafka.Bootstrap.Servers", mock.bootstrap_servers)
        .option("kafka.Compression.Type", "lz4")
        .option("topic", topic)
        .option("report", str(tmp_path / "report.json"))
        .save()
    )
    assert sorted(int(record.value()) for record in mock.records(topic)) == list(range(1000))
    assert json.loads((tmp_path / "report.json").read_text())["records"] == 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topic": "t"}, "kafka.bootstrap.servers"),
        ({"kafka.bootstrap.servers": "x:1"}, "no topic"),
        ({"kafka.bootstrap.servers": "x:1", "topic": "t", "tpoic": "t"}, "unknown options 'tpoic'"),
        ({"kafka.bootstrap.servers": "x:1", "topic": "t", "kafka.nonsense": "1"}, "nonsense"),
        ({"kafka.bootstrap.servers": "x:1", "topic": "t", "exactly.once": "task"}, "job_id"),
        ({"kafka.bootstrap.servers": "x:1", "topic": "t", "report": "no/such/folder/r.json"}, "no such folder"),
    ],
)
def test_wrong_options_are_named(registered, options, message) -> None:
    with pytest.raises(Exception, match=message):
        registered.range(1).selectExpr("'v' AS value").write.format("fastprod").mode("append").options(**options).save()


def test_overwrite_is_refused(registered, mock, topic) -> None:
    writer = registered.range(1).selectExpr("'v' AS value").write.format("fastprod").mode("overwrite")
    with pytest.raises(
        Exception, match=r'ValueError: Kafka topics are only appended to: write \.mode\("append"\)\.save\(\)'
    ):
        writer.option("kafka.bootstrap.servers", mock.bootstrap_servers).option("topic", topic).save()


def test_append_is_needed(registered, mock, topic) -> None:
    """Spark says so itself, before it asks us."""
    writer = registered.range(1).selectExpr("'v' AS value").write.format("fastprod")
    with pytest.raises(Exception, match='use either the "Append"'):
        writer.option("kafka.bootstrap.servers", mock.bootstrap_servers).option("topic", topic).save()


def test_a_report_that_cannot_be_saved_does_not_fail_a_job_that_has_written(mock, topic, tmp_path, caplog) -> None:
    task = TaskReport(0, records=7, started=100.0, seconds=2.0)
    writer = BatchWriter(Sink({"bootstrap.servers": "x:1"}, topic), ["value"], str(tmp_path / "gone" / "report.json"))
    writer.commit([Message(task.to_json()), None])
    assert "7 records" in caplog.text
    assert "cannot save the report" in caplog.text


def test_the_report_of_a_streams_batch_tells_how_long_it_took(tmp_path) -> None:
    tasks = [TaskReport(0, records=1, started=100.0, seconds=2.0), TaskReport(1, records=1, started=101.0, seconds=3.0)]
    writer = StreamWriter(Sink({"bootstrap.servers": "x:1"}, "t"), ["value"], str(tmp_path / "report.json"))
    writer.commit([Message(task.to_json()) for task in tasks], 5)
    assert json.loads((tmp_path / "report.json").read_text())["seconds"] == 4.0


@pytest.mark.parametrize("layout", ["task", "bucket(value string)"])
def test_a_stream_with_markers_at_another_topic_does_not_repeat_its_batch(
    kafka_cluster, topic, monkeypatch, layout
) -> None:
    """Restarted with another marker.topic, it would find no marker of what it has written."""
    for name in (topic, f"{topic}-markers"):
        kafka_cluster.create_topic(name, 1)
    told = {"sql.streaming.queryId": "query", "streaming.sql.batchId": "7"}
    monkeypatch.setattr(source, "_local", told.__getitem__)
    batch = pa.record_batch({"value": [b"v"]})
    columns = ["value"]
    if layout != "task":
        batch, columns = batch.append_column(BUCKET, pa.array([0])), ["value", BUCKET]
    sink = Sink(
        {"bootstrap.servers": kafka_cluster.bootstrap_servers},
        topic,
        topic,
        layout=layout,
        partitions=None if layout == "task" else 1,
    )
    for skipped in (False, True):
        message = StreamWriter(sink, columns, None).write(iter([batch]))
        assert TaskReport.from_json(message.report).skipped == skipped
    moved = StreamWriter(replace(sink, marker_topic=f"{topic}-markers"), columns, None)
    with pytest.raises(ValueError, match=f"was run before with its markers at topic '{topic}'"):
        moved.write(iter([batch]))
    assert len(kafka_cluster.records(topic)) == 1


def test_a_stream_goes_on_from_its_checkpoint_without_a_gap(registered, kafka_cluster, topic, tmp_path) -> None:
    kafka_cluster.create_topic(topic, 3)

    def run(*, last: bool = False) -> set[int]:
        """Writes some batches and stops within one, or what is there and ends; the numbers in the topic."""
        writer = (
            registered.readStream.format("rate")
            .option("rowsPerSecond", 1000)
            .load()
            .selectExpr("cast(value AS string) AS value")
            .writeStream.format("fastprod")
            .option("kafka.bootstrap.servers", kafka_cluster.bootstrap_servers)
            .option("topic", topic)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
        )
        query = (writer.trigger(availableNow=True) if last else writer).start()
        deadline = time.monotonic() + 120
        # Two of them, because the first may be a repeated one.
        while query.isActive if last else sum(batch["numInputRows"] > 0 for batch in query.recentProgress) < 2:
            assert query.exception() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        query.stop()
        assert query.exception() is None
        return {int(record.value()) for record in kafka_cluster.records(topic)}

    first, second, all_of_them = run(), run(), run(last=True)
    assert len(first) < len(second) <= len(all_of_them)  # within the same second there is nothing new
    assert all_of_them == set(range(max(all_of_them) + 1))
