"""fastprod.spark.write and partition_writer on mock brokers: columns, errors, reports."""

import json
import os
import pickle
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlparse
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.sql import Row

import fastprod.spark
from fastprod.spark import ExportReport, TaskReport, _worker, partition_writer, write
from fastprod.spark.report import PartitionReport
from fastprod.stats import Latency, PartitionStats, TopicStats
from fastprod.testing import audit


def config(cluster) -> dict:
    return {"bootstrap.servers": cluster.bootstrap_servers}


def test_every_column_arrives(spark, mock, topic) -> None:
    mock.create_topic(topic, 4)
    df = spark.sql(
        """
        SELECT cast(id AS string) AS key, cast(concat('v', id) AS binary) AS value, cast(id % 4 AS int) AS partition,
               array(named_struct('key', 'h', 'value', cast(cast(id AS string) AS binary))) AS headers,
               timestamp_millis(1600000000000 + id) AS timestamp, 'ignored' AS other
        FROM range(1000)
        """
    )
    report = write(df, topic, config(mock))
    assert (report.records, report.failed, len(report.tasks)) == (1000, 0, df.rdd.getNumPartitions())
    assert report.bytes == sum(len(str(n)) + len(f"v{n}") for n in range(1000))
    assert {number: part.records for number, part in report.topics[topic].items()} == dict.fromkeys(range(4), 250)
    found = mock.records(topic)
    assert sorted(int(record.key()) for record in found) == list(range(1000))
    for record in found:
        number = int(record.key())
        assert record.value() == b"v%d" % number
        assert record.partition() == number % 4
        assert record.headers() == [("h", b"%d" % number)]
        assert record.timestamp()[1] == 1_600_000_000_000 + number


def test_the_topic_column_and_the_argument_that_beats_it(spark, mock, topic) -> None:
    for suffix in ("a", "b", "c"):
        mock.create_topic(f"{topic}-{suffix}", 2)
    df = spark.range(300).selectExpr(
        "cast(id AS string) AS value", f"concat('{topic}-', if(id % 3 = 0, 'a', 'b')) AS topic"
    )
    report = write(df, config=config(mock))
    counts = {name: sum(part.records for part in parts.values()) for name, parts in report.topics.items()}
    assert counts == {f"{topic}-a": 100, f"{topic}-b": 200}
    assert list(write(df, f"{topic}-c", config(mock)).topics) == [f"{topic}-c"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["cast(id AS string) AS key"], "no column 'value'"),
        (["id AS value"], "column 'value' must be string or binary, not bigint"),
        (["'v' AS value", "id AS key"], "column 'key' must be string or binary, not bigint"),
        (["'v' AS value", "'0' AS partition"], "column 'partition' must be int, not string"),
        (["'v' AS value", "'x' AS headers"], "column 'headers' must be array<struct"),
        (["'v' AS value", "'x' AS timestamp"], "column 'timestamp' must be timestamp"),
    ],
)
def test_a_wrong_column_is_named_before_anything_is_sent(spark, mock, topic, columns, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        write(spark.range(10).selectExpr(*columns), topic, config(mock))


def test_a_topic_is_needed(spark, mock) -> None:
    df = spark.range(1).selectExpr("'v' AS value")
    with pytest.raises(ValueError, match=r"no topic: give topic=\.\.\., or have a column 'topic'"):
        write(df, config=config(mock))
    with pytest.raises(TypeError, match="column 'topic' must be string, not bigint"):
        write(spark.range(1).selectExpr("'v' AS value", "id AS topic"), config=config(mock))


def test_a_null_topic_is_named_before_anything_is_sent(spark, mock, topic) -> None:
    mock.create_topic(topic)
    df = spark.range(50_000).selectExpr("'v' AS value", f"if(id = 49999, null, '{topic}') AS topic").coalesce(1)
    with pytest.raises(ValueError, match="column 'topic' is null in 1 rows"):
        write(df, config=config(mock))
    assert mock.records(topic) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [({}, "bootstrap.servers"), ({"bootstrap.servers": "x:1", "no.such.option": "1"}, "no.such.option")],
)
def test_a_wrong_config_is_named_on_the_driver(spark, topic, settings, message) -> None:
    with pytest.raises(Exception, match=message):
        write(spark.range(1).selectExpr("'v' AS value"), topic, settings)


def test_a_failed_record_fails_the_job_with_its_reason(spark, mock, topic) -> None:
    mock.create_topic(topic, 2)
    df = spark.range(100).selectExpr("'v' AS value", "cast(if(id = 50, 77, 0) AS int) AS partition").coalesce(1)
    with pytest.raises(
        Exception, match=r"1 of the records of Spark partition 0 \(attempt \d\).*has partitions 0 to 1, not 77"
    ):
        write(df, topic, config(mock))
    # The worker's producer was thrown away with what it held; the next job gets a new one and works.
    assert write(spark.range(100).selectExpr("'v' AS value").coalesce(1), topic, config(mock)).records == 100


def test_an_empty_frame_and_empty_partitions(spark, mock, topic) -> None:
    mock.create_topic(topic, 2)
    df = spark.range(100).selectExpr("cast(id AS string) AS value").repartition(8)
    assert write(df.where("false"), topic, config(mock)).records == 0
    report = write(df.where("value = '7'"), topic, config(mock))
    assert (report.records, len(report.tasks)) == (1, 8)


def test_a_worker_keeps_its_producer_between_tasks(spark, mock, topic) -> None:
    mock.create_topic(topic, 2)
    df = spark.range(1000).selectExpr("cast(id AS string) AS value").repartition(20)
    with mock.track_requests() as requests:
        write(df, topic, {**config(mock), "client.id": topic})  # a configuration that no earlier test has left behind
    # Each new producer asks for an id of its own; 20 tasks run on 2 workers, seldom on one more.
    assert 1 <= sum(request.api == "InitProducerId" for request in requests) <= 4


class ByLength:
    """A partitioner of the user's: an object, of which each task gets a copy."""

    def partition(self, topic, key, value, partitions, available) -> int:
        return len(value) % partitions


def test_a_worker_keeps_its_producer_though_the_config_has_objects(spark, mock, topic) -> None:
    mock.create_topic(topic, 2)
    df = spark.range(1000).selectExpr("cast(id AS string) AS value").repartition(20)
    with mock.track_requests() as requests:
        assert write(df, topic, {**config(mock), "partitioner": ByLength()}).records == 1000
    assert 1 <= sum(request.api == "InitProducerId" for request in requests) <= 4


def test_a_worker_keeps_a_few_producers_only(mock, topic) -> None:
    mock.create_topic(topic)
    batch = pa.record_batch({"value": [b"v"]})
    sinks = [_worker.Sink({**config(mock), "client.id": f"{topic}-{n}"}, topic) for n in range(_worker.KEPT + 3)]
    for sink in sinks:
        assert _worker.write_batches(sink, [batch]).records == 1
    kept = [producer for (pid, _), producer in _worker._producers.items() if pid == os.getpid()]
    assert len(kept) == _worker.KEPT
    assert _worker.borrow(sinks[-1]) is kept[-1]
    for sink in sinks:
        _worker.discard(sink)
    assert os.getpid() not in {pid for pid, _ in _worker._producers}


def warm_sink(mock, topic) -> _worker.Sink:
    """Of a worker whose producer knows that the topic has one partition."""
    mock.create_topic(topic, 1)
    sink = _worker.Sink({**config(mock), "client.id": topic}, topic)
    assert _worker.write_batches(sink, [pa.record_batch({"value": [b"v"]})]).records == 1
    return sink


def test_a_failure_ends_the_task_before_its_rows_do(mock, topic) -> None:
    sink = warm_sink(mock, topic)
    taken = 0

    def batches():
        nonlocal taken
        for _ in range(1000):
            taken += 1
            yield pa.record_batch(
                {"value": [b"v", b"v"], "partition": pa.array([0, 5 if taken == 3 else 0], pa.int32())}
            )

    with pytest.raises(fastprod.spark.ExportError, match=r"1 of the records .* of 6 handed over"):
        _worker.write_batches(sink, batches())
    assert taken == 3


def test_errors_are_counted(mock, topic) -> None:
    sink = warm_sink(mock, topic)
    batch = pa.record_batch({"value": [b"v"] * 100, "partition": pa.array([3] * 60 + [4] * 40, pa.int32())})
    with pytest.raises(
        fastprod.spark.ExportError,
        match=r"100 of the records .*: topic '.*not 3 \(60 times\); topic '.*not 4 \(40 times\)",
    ):
        _worker.write_batches(sink, [batch])


@pytest.mark.parametrize("by", ["argument", "column"])
def test_errors_name_topic_and_number(kafka_cluster, topic, by) -> None:
    """Of a producer that knows nothing of the topic yet, as in the first task of a worker."""
    kafka_cluster.create_topic(topic, 2)

    def said(numbers, name=topic, **settings) -> str:
        rows = {"value": [b"v"] * len(numbers), "topic": [name] * len(numbers), "partition": numbers}
        settings = {**config(kafka_cluster), "client.id": f"{topic}-{uuid4()}", **settings}
        with pytest.raises(fastprod.spark.ExportError) as failure:
            _worker.write_batches(_worker.Sink(settings, name if by == "argument" else None), [pa.record_batch(rows)])
        return str(failure.value).partition("Errors: ")[2]

    known = f"topic {topic!r} has partitions 0 to 1, not "
    assert said([0, 7, 9, 9]) == f"{known}9 (2 times); {known}7"
    assert said([0, -7]).endswith(f"not -7: topic {topic!r}, which has partitions 0 to 1")
    missing = said([None, 3], f"{topic}-missing", **{"topic.metadata.propagation.max.ms": 500})
    assert missing == f"Local: Unknown topic: topic '{topic}-missing' (2 times)"


@pytest.mark.long
def test_a_thousand_partitions(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 4)
    df = spark.range(0, 20_000, 1, 1000).selectExpr("cast(id AS string) AS value")
    report = write(df, topic, config(kafka_cluster))
    assert (report.records, len(report.tasks), {task.records for task in report.tasks}) == (20_000, 1000, {20})
    found = audit(kafka_cluster.bootstrap_servers, topic, 20_000, order="none")
    assert found.clean, str(found)


def test_the_report_in_all_its_forms(spark, mock, topic, tmp_path) -> None:
    mock.create_topic(topic, 3)
    report = write(spark.range(900).selectExpr("'v' AS value", "cast(id % 3 AS int) AS partition"), topic, config(mock))
    assert json.loads(json.dumps(report.to_dict()))["records"] == 900
    assert [len(line.split("#")) - 1 for line in str(report).splitlines()[1:]] == [40, 40, 40]
    assert "offsets 0..299" in str(report)
    assert topic in report._repr_html_()
    report.save(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text())["topics"][topic]["1"]["last_offset"] == 299
    report.save(tmp_path / "report.html")
    assert "<table>" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("shape", ["bytes", "str", "pair", "dict", "row"])
def test_partition_writer_takes_rows_of_every_shape(spark, mock, topic, shape) -> None:
    mock.create_topic(topic, 3)
    numbers = spark.sparkContext.parallelize(range(5000), 4)
    rdd = {
        "bytes": lambda: numbers.map(lambda n: b"%d" % n),
        "str": lambda: numbers.map(str),
        "pair": lambda: numbers.map(lambda n: (b"k%d" % n, b"%d" % n)),
        "dict": lambda: numbers.map(lambda n: {"value": b"%d" % n, "headers": {"h": b"1"}, "partition": n % 3}),
        "row": lambda: spark.range(5000).selectExpr("cast(id AS string) AS value", f"'{topic}' AS topic").rdd,
    }[shape]()
    target = None if shape == "row" else topic
    reports = rdd.mapPartitions(partition_writer(config(mock), target, chunk=700)).collect()
    total = ExportReport.of(reports, 1.0)
    assert total.records == 5000
    assert [task.task for task in total.tasks] == list(range(rdd.getNumPartitions()))
    assert sorted(int(record.value()) for record in mock.records(topic)) == list(range(5000))


class Order(NamedTuple):
    """Its fields count by name, not by place."""

    value: str
    key: str


def test_partition_writer_takes_a_mixture_of_rows(spark, mock, topic) -> None:
    mock.create_topic(topic, 1)
    rows = [
        b"bytes",
        "täxt",
        bytearray(b"array"),
        (None, b"pair"),
        ["k", "list"],
        Order("named", "k"),
        Row(value="row", key=None, timestamp=datetime(2020, 1, 1, tzinfo=UTC), headers=[Row(key="h", value=b"1")]),
        {"value": None, "key": b"tombstone", "headers": (("h", b"2"),), "timestamp": 1_600_000_000_000},
    ]
    (report,) = spark.sparkContext.parallelize(rows, 1).mapPartitions(partition_writer(config(mock), topic)).collect()
    found = [(record.key(), record.value(), record.headers()) for record in mock.records(topic)]
    assert found == [
        (None, b"bytes", None),
        (None, "täxt".encode(), None),
        (None, b"array", None),
        (None, b"pair", None),
        (b"k", b"list", None),
        (b"k", b"named", None),
        (None, b"row", [("h", b"1")]),
        (b"tombstone", None, [("h", b"2")]),
    ]
    assert [record.timestamp()[1] for record in mock.records(topic)][-2:] == [1_577_836_800_000, 1_600_000_000_000]
    assert report.bytes == sum(len(part) for key, value, _ in found for part in (key, value) if part is not None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (17, "cannot write 17"),
        ((1, 2, 3), "cannot write"),
        ({"key": b"k"}, "no field 'value'"),
        (Row(key=b"k", val=b"v"), "no field 'value'"),
        ({"value": 17}, "field 'value' must be bytes or str, not int, in row {'value': 17}"),
        ((17, b"v"), "field 'key' must be bytes or str, not int"),
    ],
)
def test_partition_writer_names_a_wrong_row(spark, mock, topic, row, message) -> None:
    mock.create_topic(topic)
    rdd = spark.sparkContext.parallelize([b"fine", row], 1)
    with pytest.raises(Exception, match=message):
        rdd.mapPartitions(partition_writer(config(mock), topic)).collect()
    assert mock.records(topic) == []


@pytest.mark.parametrize("name", [None, 17])
def test_partition_writer_needs_a_topic(spark, mock, name) -> None:
    rdd = spark.sparkContext.parallelize([{"value": b"v", "topic": name}], 1)
    with pytest.raises(Exception, match="no topic for row"):
        rdd.mapPartitions(partition_writer(config(mock))).collect()


def test_partition_writer_names_a_wrong_config_on_the_driver() -> None:
    with pytest.raises(ValueError, match=r"bootstrap\.servers"):
        partition_writer({}, "t")
    with pytest.raises(Exception, match=r"no\.such\.option"):
        partition_writer({"bootstrap.servers": "x:1", "no.such.option": "1"}, "t")


def test_files_that_only_executors_have_are_not_looked_for_on_the_driver(spark, topic) -> None:
    df = spark.range(1).selectExpr("'v' AS value")
    settings = {"bootstrap.servers": "x:1", "security.protocol": "ssl", "ssl.ca.location": "only-there.pem"}
    assert fastprod.spark._plan.plan(df.schema, topic, settings).config == {"linger.ms": 50, **settings}


def test_rows_linger_for_as_long_as_the_user_says(spark, topic) -> None:
    df = spark.range(1).selectExpr("'v' AS value")
    for name in ("linger.ms", "queue.buffering.max.ms"):
        settings = {"bootstrap.servers": "x:1", name: 7}
        assert fastprod.spark._plan.plan(df.schema, topic, settings, check=False).config == settings


def test_secrets_stay_out_of_plans_logs_errors_and_reports(spark, mock, topic) -> None:
    mock.create_topic(topic)
    names = ("sasl.password", "ssl.key.password", "sasl.oauthbearer.client.secret", "sasl.oauthbearer.config")
    settings = {**config(mock), **{name: f"hunter2-{name}" for name in names}}
    df = spark.range(10).selectExpr("'v' AS value")
    spark.sparkContext.setJobDescription(f"secrets of {topic}")
    said = [repr(fastprod.spark._plan.plan(df.schema, topic, settings))]
    report = write(df, topic, settings)
    said += [str(report), repr(report), report._repr_html_(), json.dumps(report.to_dict())]
    said += map(repr, df.rdd.map(lambda row: row.value).mapPartitions(partition_writer(settings, topic)).collect())
    fastprod.spark.register(spark)
    options = {f"kafka.{name}": value for name, value in settings.items()}
    df.write.format("fastprod").mode("append").options(topic=topic, **options).save()
    with pytest.raises(Exception, match="not 77") as failure:
        write(df.selectExpr("value", "77 AS partition"), topic, settings)
    said.append(str(failure.value))
    spark.sparkContext.setJobDescription(f"end of {topic}")
    spark.range(1).collect()
    deadline = time.monotonic() + 30
    while f"end of {topic}" not in (log := event_log(spark)):  # which is written by a thread of its own
        assert time.monotonic() < deadline
        time.sleep(0.1)
    spark.sparkContext.setJobDescription(None)
    assert f"secrets of {topic}" in log
    assert "hunter2" not in log
    assert "hunter2" not in "".join(said)


def event_log(spark) -> str:
    """What Spark would show in its UI afterwards."""
    folder = Path(urlparse(spark.conf.get("spark.eventLog.dir")).path)
    return "".join(path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file())


def test_nothing_is_imported_for_those_who_do_not_use_spark() -> None:
    code = "import sys, fastprod; sys.exit('pyspark' in sys.modules)"
    assert os.spawnvp(os.P_WAIT, os.sys.executable, [os.sys.executable, "-c", code]) == 0


def test_the_report_merges_what_the_workers_producers_tell(spark, mock, topic) -> None:
    mock.create_topic(topic, 4)
    rows = spark.range(0, 20_000, 1, 5).selectExpr("cast(id AS string) AS value")
    report = write(rows, topic, {"bootstrap.servers": mock.bootstrap_servers})
    stats = report.stats[topic]
    assert {number: part.records for number, part in stats.partitions.items()} == {
        number: part.records for number, part in report.topics[topic].items()
    }
    assert (stats.records, stats.bytes, stats.errors) == (20_000, report.bytes, 0)
    assert 1 <= len(stats.publishers) <= len(report.tasks)
    assert report.latency.count == 20_000
    assert 0 < report.latency.percentile(50) <= report.latency.percentile(99)
    assert stats.records_per_s == pytest.approx(20_000 / report.seconds)
    assert TopicStats.from_dict(json.loads(json.dumps(report.to_dict()))["stats"][topic]) == stats


def test_repeated_requests_are_in_the_report(spark, mock, topic) -> None:
    mock.create_topic(topic, 1)
    rows = spark.range(0, 100, 1, 1).selectExpr("cast(id AS string) AS value")
    assert write(rows, topic, {"bootstrap.servers": mock.bootstrap_servers}).retries == 0
    mock.push_errors("Produce", "NOT_LEADER_FOR_PARTITION", "NOT_LEADER_FOR_PARTITION")
    report = write(rows, topic, {"bootstrap.servers": mock.bootstrap_servers})
    mock.clear_errors("Produce")
    assert report.retries >= 2
    assert report.records == 100


def test_batches_can_end_by_rows_alone(spark, mock, topic, monkeypatch) -> None:
    mock.create_topic(topic, 1)
    monkeypatch.setattr(
        fastprod.spark,
        "report_batches",
        lambda sink, batches, shape: _worker.report_batches(sink, at_most_2000(batches), shape),
    )

    def at_most_2000(batches):
        for batch in batches:
            if batch.num_rows > 2000:
                raise ValueError(f"a batch of {batch.num_rows} rows")
            yield batch

    df = spark.range(0, 9000, 1, 1).selectExpr("cast(id AS string) AS value")
    rows, size = fastprod.spark.ROWS, fastprod.spark.BYTES
    assert write(df, topic, config(mock), batch_rows=2000).records == 9000
    assert not {rows, size} & spark.conf.getAll.keys()
    spark.conf.set(size, "1000000")
    try:
        with fastprod.spark.batches_of(5, spark), fastprod.spark.batches_of(7, spark):
            assert spark.conf.get(rows) == "7"
        with pytest.raises(Exception, match="a batch of 9000 rows"):  # Spark's own 10,000 hold again
            write(df, topic, config(mock))
        assert spark.conf.getAll[size] == "1000000"
        assert rows not in spark.conf.getAll
    finally:
        spark.conf.unset(size)
    with pytest.raises(ValueError, match=r"batch_rows is a number of rows from 1 .* not 0"):
        write(df, topic, config(mock), batch_rows=0)


def test_adding_reports_up_leaves_them_as_they_are() -> None:
    cell = PartitionStats(100, 1000, weight=0.5, records_per_s=10.0)
    tasks = [TaskReport(number, records=100, stats={"t": TopicStats("t", {("w", 0): cell})}) for number in range(10)]
    report = ExportReport.of(tasks, 100.0)
    part = report.stats["t"].partitions[0]
    assert (part.records, part.weight, part.records_per_s) == (1000, 0.5, 10.0)
    assert cell.records_per_s == 10.0
    assert ExportReport.of(tasks[:1], 1000.0).stats["t"].records_per_s == 0.1
    assert cell.records_per_s == 10.0


def test_reports_are_the_same_behind_a_wire_and_a_pickle() -> None:
    told = TopicStats("t", {("w", 3): PartitionStats(100, 1000, latency=Latency({0.002: 5, 0.1: 1}, 0.11))})
    task = TaskReport(7, records=100, topics={"t": {3: PartitionReport(100, 0, 99)}}, stats={"t": told})
    arrived = TaskReport.from_json(task.to_json())
    assert arrived == task
    report = ExportReport.of([arrived], 2.0)
    again = pickle.loads(pickle.dumps(report))
    assert again == report
    assert again.stats["t"].latency == told.latency
    assert again.latency.count == 6
    assert repr(again.stats) == repr(dict(report.stats))
