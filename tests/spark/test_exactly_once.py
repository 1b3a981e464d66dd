"""On a real Kafka: tasks that fail, workers that are killed, jobs that are submitted again."""

from types import SimpleNamespace

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from conftest import settled
from faulty import KillOnce

from fastprod import _positions
from fastprod.spark import ExportError, ExportReport, _once, partition_writer, register, write
from fastprod.spark._worker import Sink, write_batches
from fastprod.testing import audit

ROWS = 40_000
PARTITIONS = 5


def numbers(spark):
    return spark.range(0, ROWS, 1, PARTITIONS).selectExpr("cast(id AS string) AS value")


def settings(cluster, **more) -> dict:
    return {"bootstrap.servers": cluster.bootstrap_servers, **more}


def test_a_job_submitted_again_writes_nothing_again(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    first = write(numbers(spark), topic, settings(kafka_cluster), exactly_once="task", job_id=topic)
    assert (first.records, first.skipped) == (ROWS, 0)
    second = write(numbers(spark), topic, settings(kafka_cluster), exactly_once="task", job_id=topic)
    assert (second.records, second.skipped, second.bytes) == (ROWS, PARTITIONS, first.bytes)
    found = settled(kafka_cluster, topic, ROWS)
    assert found.clean, str(found)
    third = write(numbers(spark), topic, settings(kafka_cluster), exactly_once="task", job_id=f"{topic}-other")
    assert third.skipped == 0
    assert settled(kafka_cluster, topic, ROWS).doubled == ROWS


def test_a_killed_worker_and_a_retried_task_leave_each_record_once(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    config = settings(kafka_cluster, partitioner=KillOnce(2, ROWS // PARTITIONS // 2))
    report = write(numbers(spark), topic, config, exactly_once="task", job_id=topic)
    assert report.records == ROWS
    assert report.tasks[2].attempt > 0
    found = settled(kafka_cluster, topic, ROWS)
    assert found.clean, str(found)


def test_without_it_a_retried_task_loses_nothing(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    config = settings(kafka_cluster, partitioner=KillOnce(2, ROWS // PARTITIONS // 2), **{"linger.ms": 0})
    report = write(numbers(spark), topic, config)
    assert report.records == ROWS
    found = audit(kafka_cluster.bootstrap_servers, topic, ROWS, order="none")
    assert (found.lost, found.alien) == (0, 0)


def test_empty_partitions_and_the_other_name_of_bootstrap_servers(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    df = numbers(spark).where("cast(value AS int) < 10")  # all in the first of the partitions
    for skipped in (0, 1):
        report = write(
            df, topic, {"metadata.broker.list": kafka_cluster.bootstrap_servers}, exactly_once="task", job_id=topic
        )
        assert (report.records, len(report.tasks), report.skipped) == (10, PARTITIONS, skipped)
    found = settled(kafka_cluster, topic, 10)
    assert found.clean, str(found)


def test_rdds_too(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    rdd = spark.sparkContext.parallelize([b"%d" % number for number in range(1000)], 3)
    writer = partition_writer(settings(kafka_cluster), topic, exactly_once="task", job_id=topic)
    assert ExportReport.of(rdd.mapPartitions(writer).collect()).skipped == 0
    assert ExportReport.of(rdd.mapPartitions(writer).collect()).skipped == 3
    found = settled(kafka_cluster, topic, 1000)
    assert found.clean, str(found)


def test_an_attempt_that_is_overtaken_says_so_and_leaves_nothing(kafka_cluster, topic) -> None:
    """What speculation would do: the second attempt at a partition starts while the first one is at work."""
    kafka_cluster.create_topic(topic, 1)
    sink = Sink(settings(kafka_cluster), topic, topic)

    def rows(first: int):
        return pa.record_batch({"value": [b"%d" % number for number in range(first, first + 500)]})

    def overtaken():
        yield rows(0)
        assert write_batches(sink, [rows(0), rows(500)]).records == 1000
        yield rows(500)

    with pytest.raises(ExportError, match=r"another attempt at Spark partition 0 .* has taken over"):
        write_batches(sink, overtaken())
    found = settled(kafka_cluster, topic, 1000)
    assert found.clean, str(found)


def test_an_unknown_marker_is_not_taken_for_none() -> None:
    """Kafka may answer that it cannot tell yet: writing then could double the partition."""
    answers = [KafkaError(KafkaError.UNSTABLE_OFFSET_COMMIT), KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)]

    class Group:
        def committed(self, places, timeout):
            return [SimpleNamespace(error=answers.pop(0), offset=-1001, metadata=None)]

    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        _once.Once(Sink({}, "t", "job"), 0).committed(Group())
    assert answers == []


def test_markers_that_are_forgotten_while_a_job_runs_are_not_taken_for_none(kafka_cluster, topic) -> None:
    """An earlier run has committed partition 0. The next one claims the job, brokers forget, its task runs."""
    kafka_cluster.create_topic(topic, 1)
    sink = Sink(settings(kafka_cluster), topic, topic, partitions=1)
    rows = [pa.record_batch({"value": [b"%d" % number for number in range(100)]})]
    write_batches(_once.claim(sink), rows)
    second = _once.claim(sink)
    assert write_batches(second, rows).skipped
    admin = AdminClient(settings(kafka_cluster))
    groups = [f"fastprod.{topic}.0", f"fastprod.{topic}.job"]
    for answer in admin.delete_consumer_groups(groups).values():
        answer.result()
    with pytest.raises(ExportError, match=f"marker of job '{topic}' .* forgotten"):
        write_batches(second, rows)
    found = settled(kafka_cluster, topic, 100)
    assert found.clean, str(found)


def test_topics_in_a_column_may_come_in_any_order(kafka_cluster, topic) -> None:
    """A shuffle may bring the rows of a retried task in another order: the marker must be found all the same."""
    for suffix in "abc":
        kafka_cluster.create_topic(f"{topic}-{suffix}", 1)
    sink = Sink(settings(kafka_cluster), None, topic)
    rows = [pa.record_batch({"value": [b"0"], "topic": [f"{topic}-{suffix}"]}) for suffix in "bac"]
    assert not write_batches(sink, rows).skipped
    again = write_batches(sink, rows[::-1])
    assert (again.skipped, again.records) == (True, 3)
    for suffix in "abc":
        assert settled(kafka_cluster, f"{topic}-{suffix}", 1).clean


def test_brokers_that_do_not_answer_end_the_task(monkeypatch) -> None:
    monkeypatch.setattr(_positions, "ANSWER_S", 1.0)
    sink = Sink({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, "t", "job")
    with pytest.raises(KafkaException, match=r"127\.0\.0\.1:1"):
        write_batches(sink, [pa.record_batch({"value": [b"v"]})])


def test_a_stream_writes_a_repeated_batch_once(spark, kafka_cluster, topic, tmp_path) -> None:
    """The driver dies between writing a batch and noting it in the checkpoint: the restarted query repeats it."""
    kafka_cluster.create_topic(topic, 3)
    register(spark)
    source, checkpoint = tmp_path / "source", tmp_path / "checkpoint"
    source.mkdir()

    def add(number: int) -> None:
        lines = "".join(f"{line}\n" for line in range(number * 1000, number * 1000 + 1000))
        (source / f"{number}.txt").write_text(lines)

    def run() -> list[int]:
        """Writes what is there; the numbers of the batches."""
        query = (
            spark.readStream.option("maxFilesPerTrigger", 1)
            .text(str(source))
            .writeStream.format("fastprod")
            .option("kafka.bootstrap.servers", kafka_cluster.bootstrap_servers)
            .option("topic", topic)
            .option("exactly.once", "task")
            .option("checkpointLocation", str(checkpoint))
            .start()
        )
        query.processAllAvailable()
        query.stop()
        return [batch["batchId"] for batch in query.recentProgress if batch["numInputRows"]]

    add(0)
    add(1)
    assert run() == [0, 1]
    (checkpoint / "commits" / "1").unlink()
    (checkpoint / "commits" / ".1.crc").unlink(missing_ok=True)
    add(2)
    assert run() == [1, 2]
    found = settled(kafka_cluster, topic, 3000)
    assert found.clean, str(found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exactly_once": "task"}, "needs a job_id"),
        ({"exactly_once": "task", "job_id": "no spaces"}, "no spaces"),
        ({"exactly_once": "always", "job_id": "j"}, "exactly_once is"),
        ({"job_id": "j"}, "no effect without"),
        ({"exactly_once": "task", "job_id": "j", "config": {"transactional.id": "mine"}}, "take it out of the config"),
        ({"exactly_once": "task", "job_id": "j", "config": {"acks": "1"}}, "`acks` must be set to `all`"),
    ],
)
def test_wrong_arguments_are_named(spark, mock, topic, options, message) -> None:
    config = settings(mock, **options.get("config", {}))
    with pytest.raises((ValueError, KafkaException), match=message):
        write(numbers(spark), topic, config, **{name: value for name, value in options.items() if name != "config"})


def test_speculation_is_refused(spark, mock, topic, monkeypatch) -> None:
    # A session cannot be switched to it, so pretend that it was started that way.
    monkeypatch.setattr(
        type(spark.conf), "get", lambda self, key, default=None: "true" if "speculation" in key else default
    )
    with pytest.raises(ValueError, match=r"spark\.speculation"):
        write(numbers(spark), topic, settings(mock), exactly_once="task", job_id="j")


def test_a_topic_with_underscores_keeps_its_marker(spark, kafka_cluster, topic) -> None:
    name = f"__{topic}"
    kafka_cluster.create_topic(name, 2)
    for skipped in (0, PARTITIONS):
        report = write(numbers(spark), name, settings(kafka_cluster), exactly_once="task", job_id=topic)
        assert (report.records, report.skipped) == (ROWS, skipped)


def test_rows_that_name_their_topics_have_their_markers_in_one_place(spark, kafka_cluster, topic) -> None:
    for name in (f"__{topic}", topic):
        kafka_cluster.create_topic(name, 1)
    rows = numbers(spark).selectExpr("value", f"if(value % 2 = 0, '__{topic}', '{topic}') AS topic")
    rows = rows.selectExpr("value", "coalesce(topic, '') AS topic")
    for skipped in (0, PARTITIONS):
        report = write(rows, None, settings(kafka_cluster), exactly_once="task", job_id=topic)
        assert (report.records, report.skipped) == (ROWS, skipped)
