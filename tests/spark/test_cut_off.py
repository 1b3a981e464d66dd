"""Exactly once when rows stop coming: what failed or was cancelled leaves nothing, and the next run makes it good.

Spark closes a task's input when something above it fails, and its readers take that for the end of the rows. Each test
makes that happen in another way on a real Kafka.
"""

import os
from pathlib import Path

import pytest
from confluent_kafka import IsolationLevel
from conftest import ends, settled
from programs import wait_until

from fastprod.spark import ExportReport, partition_writer, register, write
from fastprod.testing import Audit

ROWS = 40_000
PARTITIONS = 4
BATCH = "spark.sql.execution.arrow.maxRecordsPerBatch"


@pytest.fixture
def many_batches(spark):
    """So many that some of a task's rows are on their way when it fails."""
    spark.conf.set(BATCH, "2500")
    yield
    spark.conf.unset(BATCH)


def failing(spark, *, always: bool, rows: int = ROWS):
    """Numbered rows, of which one in the second partition fails in the JVM; unless `always`, in the first attempt."""
    system = spark._jvm.java.lang.System
    system.setProperty("fastprod.boom", "true")
    asked = "getProperty" if always else "clearProperty"  # which returns what was there
    boom = f"java_method('java.lang.System', '{asked}', 'fastprod.boom') = 'true'"
    return spark.range(0, rows, 1, PARTITIONS).selectExpr(
        f"if(id = {rows * 45 // 100} AND {boom}, cast(raise_error('boom') AS string), cast(id AS string)) AS value"
    )


def mended(spark) -> None:
    spark._jvm.java.lang.System.clearProperty("fastprod.boom")


def settings(cluster) -> dict:
    """Spark kills workers of a failed job within 2 s; what one leaves open is then ended by the brokers."""
    return {"bootstrap.servers": cluster.bootstrap_servers, "transaction.timeout.ms": 60_000}


def all_there(cluster, topic, rows=ROWS) -> None:
    found = settled(cluster, topic, rows)
    assert found.clean, str(found)


def whole_partitions(cluster, topic, rows=ROWS) -> None:
    """What a failed job leaves: some Spark partitions as a whole, nothing twice.

    For two seconds after the failure, tasks that had all of their rows may still commit, and a reader does not see that
    in all partitions of the topic at once.
    """
    found: list[Audit] = []

    def whole() -> bool:
        found[:] = [settled(cluster, topic, rows)]
        return found[0].lost % (rows // PARTITIONS) == 0

    assert wait_until(whole), str(found)
    assert found[0].doubled == 0
    assert found[0].lost > 0


@pytest.mark.parametrize("once", ["task", "bucket"])
def test_write_when_the_jvm_fails_upstream(spark, kafka_cluster, topic, many_batches, once) -> None:
    kafka_cluster.create_topic(topic, 3)
    options = {"exactly_once": once, "job_id": topic, **({"buckets": 4} if once == "bucket" else {})}
    with pytest.raises(Exception, match="boom"):
        write(failing(spark, always=True), topic, settings(kafka_cluster), **options)
    if once == "task":
        whole_partitions(kafka_cluster, topic)
    mended(spark)
    report = write(failing(spark, always=False), topic, settings(kafka_cluster), **options)
    assert report.records == ROWS
    all_there(kafka_cluster, topic)


def test_write_with_sparks_own_retry(spark, kafka_cluster, topic, many_batches) -> None:
    kafka_cluster.create_topic(topic, 3)
    report = write(failing(spark, always=False), topic, settings(kafka_cluster), exactly_once="task", job_id=topic)
    assert (report.records, report.skipped) == (ROWS, 0)
    assert report.tasks[1].attempt >= 1  # a busy machine may need more than one
    all_there(kafka_cluster, topic)


def test_python_above_the_writer(spark, kafka_cluster, topic, many_batches) -> None:
    """Two Python workers in one task: the upper one sees its input cut off, ends in good order, and is not believed."""

    def same(frames):
        yield from frames

    kafka_cluster.create_topic(topic, 3)
    for always in (True, False):
        frame = failing(spark, always=always).mapInPandas(same, "value string")
        if always:
            with pytest.raises(Exception, match="boom"):
                write(frame, topic, settings(kafka_cluster), exactly_once="task", job_id=topic)
            mended(spark)
        else:
            assert write(frame, topic, settings(kafka_cluster), exactly_once="task", job_id=topic).records == ROWS
    all_there(kafka_cluster, topic)


def test_the_data_source_when_the_jvm_fails_upstream(spark, kafka_cluster, topic, many_batches) -> None:
    kafka_cluster.create_topic(topic, 3)
    register(spark)

    def save(always: bool) -> None:
        options = {**{f"kafka.{name}": value for name, value in settings(kafka_cluster).items()}, "topic": topic}
        failing(spark, always=always).write.format("fastprod").mode("append").options(
            **options, **{"exactly.once": "task", "job.id": topic}
        ).save()

    with pytest.raises(Exception, match="boom"):
        save(True)
    whole_partitions(kafka_cluster, topic)
    mended(spark)
    save(False)
    all_there(kafka_cluster, topic)


@pytest.mark.parametrize("action", ["fail", "stop"])
def test_a_stream_whose_batch_fails_or_is_stopped(spark, kafka_cluster, topic, many_batches, tmp_path, action) -> None:
    kafka_cluster.create_topic(topic, 3)
    register(spark)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(PARTITIONS):
        lines = "".join(f"{line}\n" for line in range(number * 10_000, number * 10_000 + 10_000))
        (source / f"{number}.txt").write_text(lines)
    system = spark._jvm.java.lang.System
    boom = "java_method('java.lang.System', 'getProperty', 'fastprod.boom')"
    hold = "replace(java_method('java.lang.Thread', 'sleep', 200L), 'null', '')"
    value = {
        "fail": f"if(value = '18000' AND {boom} = 'true', cast(raise_error('boom') AS string), value)",
        "stop": f"if(value % 500 = 0 AND {boom} = 'true', concat(value, {hold}), value)",
    }[action]

    def start():
        rows = spark.readStream.text(str(source)).selectExpr(f"{value} AS value")
        options = {f"kafka.{name}": value for name, value in settings(kafka_cluster).items()}
        options |= {"topic": topic, "exactly.once": "task"}
        writer = rows.writeStream.format("fastprod").options(**options)
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint")).trigger(availableNow=True).start()

    system.setProperty("fastprod.boom", "true")
    query = start()
    if action == "fail":
        with pytest.raises(Exception, match="boom"):
            query.awaitTermination()
    else:
        assert wait_until(lambda: list((tmp_path / "checkpoint" / "offsets").glob("0")))
        assert wait_until(lambda: sum(ends(kafka_cluster, topic, IsolationLevel.READ_UNCOMMITTED)) > 1000)
        query.stop()
    assert not list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))
    assert settled(kafka_cluster, topic, ROWS).doubled == 0
    mended(spark)
    start().awaitTermination()
    all_there(kafka_cluster, topic)


def test_an_rdd_whose_input_fails_with_sparks_own_retry(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    rdd = failing(spark, always=False).rdd.map(lambda row: row.value)
    writer = partition_writer(settings(kafka_cluster), topic, chunk=500, exactly_once="task", job_id=topic)
    report = ExportReport.of(rdd.mapPartitions(writer).collect())
    assert (report.records, report.skipped) == (ROWS, 0)
    assert report.tasks[1].attempt >= 1  # one that opens its transaction late fences the next: a third is due
    all_there(kafka_cluster, topic)


def test_an_rdd_that_takes_less_than_all_of_its_input(spark, kafka_cluster, topic) -> None:
    """Not cut off, but enough: more rows follow."""
    from itertools import islice

    kafka_cluster.create_topic(topic, 3)
    rdd = spark.sparkContext.parallelize([b"%d" % number for number in range(400_000)], 1)
    rdd = rdd.mapPartitions(lambda rows: islice(rows, 1000))
    for skipped in (0, 1):
        writer = partition_writer(settings(kafka_cluster), topic, exactly_once="task", job_id=topic)
        assert ExportReport.of(rdd.mapPartitions(writer).collect()).skipped == skipped
    all_there(kafka_cluster, topic, 1000)


def test_a_cancelled_job_leaves_nothing_and_is_written_by_the_next(spark, kafka_cluster, topic, many_batches) -> None:
    kafka_cluster.create_topic(topic, 3)
    system = spark._jvm.java.lang.System
    system.setProperty("fastprod.boom", "true")
    asked = "java_method('java.lang.System', 'getProperty', 'fastprod.boom') = 'true'"
    nap = f"if(id % 500 = 0 AND {asked}, replace(java_method('java.lang.Thread', 'sleep', 500L), 'null', ''), '')"
    rows = spark.range(0, ROWS, 1, 2).selectExpr(f"concat(cast(id AS string), {nap}) AS value")
    failed = []
    config = settings(kafka_cluster) | {"transaction.timeout.ms": 25_000}  # which is waited for

    def run() -> None:
        spark.sparkContext.setJobGroup(topic, "to be cancelled")
        try:
            write(rows, topic, config, exactly_once="task", job_id=topic)
        except Exception as problem:
            failed.append(problem)

    from pyspark import InheritableThread

    thread = InheritableThread(target=run)
    thread.start()
    assert wait_until(lambda: sum(ends(kafka_cluster, topic, IsolationLevel.READ_UNCOMMITTED)) > 1000)
    spark.sparkContext.cancelJobGroup(topic)
    thread.join()
    assert "cancelled" in str(failed[0])
    found = settled(kafka_cluster, topic, ROWS)
    assert (found.records, found.lost) == (0, ROWS), str(found)
    mended(spark)
    write(rows, topic, config, exactly_once="task", job_id=topic)
    all_there(kafka_cluster, topic)


def test_an_unreadable_file_in_the_middle(spark, kafka_cluster, topic, many_batches, tmp_path) -> None:
    import gzip

    kafka_cluster.create_topic(topic, 3)
    for number in range(PARTITIONS):
        lines = "".join(f"{line}\n" for line in range(number * 10_000, number * 10_000 + 10_000))
        (tmp_path / f"{number}.txt.gz").write_bytes(gzip.compress(lines.encode()))
    whole = (tmp_path / "2.txt.gz").read_bytes()
    (tmp_path / "2.txt.gz").write_bytes(whole[: len(whole) // 2])
    spark.conf.set("spark.sql.files.openCostInBytes", str(1 << 30))  # a file is a partition
    try:
        with pytest.raises(Exception, match=r"EOFException|Unexpected end"):
            write(spark.read.text(str(tmp_path)), topic, settings(kafka_cluster), exactly_once="task", job_id=topic)
        whole_partitions(kafka_cluster, topic)
        (tmp_path / "2.txt.gz").write_bytes(whole)
        report = write(
            spark.read.text(str(tmp_path)), topic, settings(kafka_cluster), exactly_once="task", job_id=topic
        )
        assert report.records == ROWS
    finally:
        spark.conf.unset("spark.sql.files.openCostInBytes")
    all_there(kafka_cluster, topic)


class LoseShuffleFiles:
    """A partitioner that deletes Spark's shuffle files when the second task has begun to write."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def partition(self, topic, key, value, partitions, available) -> int:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context is not None and context.partitionId() == 1 and os.path.exists(self.folder):
            done = Path(self.folder, "lost")
            if not done.exists():
                done.touch()
                for found in Path(self.folder).glob("blockmgr-*/*/shuffle_*"):
                    found.unlink(missing_ok=True)
        return len(value) % partitions


def test_shuffle_files_that_are_lost(kafka_cluster, topic, own_spark, tmp_path) -> None:
    """FetchFailed: Spark runs the stage before again, and then the tasks that could not read."""
    kafka_cluster.create_topic(topic, 3)
    found = own_spark(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_cut_off import LoseShuffleFiles
        rows = spark.range(0, {ROWS}, 1, 4).selectExpr("cast(id AS string) AS value").repartition(8, "value")
        config = {{**{settings(kafka_cluster)!r}, "partitioner": LoseShuffleFiles({str(tmp_path)!r})}}
        for attempt in range(2):
            report = write(rows, {topic!r}, config, exactly_once="task", job_id={topic!r})
            print("written", report.records, report.skipped)
        """,
        master="local[1,4]",
        conf={"spark.local.dir": str(tmp_path), "spark.stage.maxConsecutiveAttempts": "4"},
    )
    assert (tmp_path / "lost").exists()
    assert "written 40000 0" in found
    assert "written 40000 8" in found
    all_there(kafka_cluster, topic)


def test_speculation_is_refused_before_anything_is_sent(kafka_cluster, topic, own_spark) -> None:
    kafka_cluster.create_topic(topic, 3)
    said = own_spark(
        f"""
        topic, config = {topic!r}, {settings(kafka_cluster)!r}
        rows = spark.range(0, 1000, 1, 4).selectExpr("cast(id AS string) AS value")
        source = rows.write.format("fastprod").mode("append").option("topic", topic).option("job.id", topic)
        source = source.option("exactly.once", "task").option("kafka.bootstrap.servers", config["bootstrap.servers"])
        forms = dict(write=lambda: write(rows, topic, config, exactly_once="task", job_id=topic), source=source.save)
        for form, call in forms.items():
            try:
                call()
            except Exception as problem:
                print(form, "refused:", "does not go with spark.speculation" in str(problem))
        """,
        conf={"spark.speculation": "true", "spark.task.maxFailures": "1"},
    )
    assert "write refused: True" in said
    assert "source refused: True" in said
    assert settled(kafka_cluster, topic, 1000).records == 0
