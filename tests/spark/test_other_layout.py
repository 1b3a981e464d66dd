"""Exactly once when a second run divides its rows in another way: right with buckets, refused without, never wrong."""

import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import programs
import pytest
from conftest import settled

from fastprod import Producer, _positions
from fastprod._core._fingerprint import Fingerprint
from fastprod.spark import ExportReport, TaskReport, _once, bucketed, partition_writer, register, write
from fastprod.spark._once import Once, claim
from fastprod.spark._sink import Sink

ROWS = 8_000


def settings(cluster) -> dict:
    """Spark kills workers of a failed job within 2 s; what one leaves open is then ended by the brokers."""
    return {"bootstrap.servers": cluster.bootstrap_servers, "transaction.timeout.ms": 60_000}


def text_files(folder: Path, files: int = 8, rows: int = ROWS) -> str:
    """Numbered lines; how Spark divides them depends on the number of cores."""
    folder.mkdir()
    each = rows // files
    for number in range(files):
        lines = "".join(f"{line}\n" for line in range(number * each, number * each + each))
        (folder / f"{number}.txt").write_text(lines)
    return str(folder)


@contextmanager
def configured(spark, **conf: object):
    names = {name.replace("_", "."): str(value) for name, value in conf.items()}
    for name, value in names.items():
        spark.conf.set(name, value)
    try:
        yield
    finally:
        for name in names:
            spark.conf.unset(name)


def some_written(cluster, topic, frame, **once) -> int:
    """A first run that fails after some of its partitions were committed; returns the rows that readers see."""
    nap = "replace(java_method('java.lang.Thread', 'sleep', 1500L), 'null', '')"  # for other partitions to be written
    bad = frame.selectExpr(f"if(value = '7999', concat({nap}, cast(raise_error('boom') AS string)), value) AS value")
    with pytest.raises(Exception, match="boom"):
        write(bad, topic, settings(cluster), **once)
    found = settled(cluster, topic, ROWS)
    assert found.doubled == 0
    assert 0 < found.records < ROWS
    return found.records


# Adaptive execution makes one partition of so few rows unless told otherwise.
SMALL = {"spark_sql_adaptive_coalescePartitions_minPartitionSize": 1, "spark_sql_shuffle_partitions": 16}
CHANGES = {
    "files": ({"spark_sql_leafNodeDefaultParallelism": 8}, {"spark_sql_leafNodeDefaultParallelism": 3}),
    "shuffle": (
        {"spark_sql_shuffle_partitions": 4, "spark_sql_adaptive_enabled": "false"},
        {"spark_sql_shuffle_partitions": 8, "spark_sql_adaptive_enabled": "false"},
    ),
    "aqe": (
        {"spark_sql_adaptive_coalescePartitions_minPartitionNum": 4, **SMALL},
        {"spark_sql_adaptive_coalescePartitions_minPartitionNum": 8, **SMALL},
    ),
}


def rows_of(spark, kind: str, path: str):
    frame = spark.read.text(path)
    return frame if kind == "files" else frame.repartition("value")


@pytest.mark.parametrize("kind", ["files", "aqe", pytest.param("shuffle", marks=pytest.mark.long)])
def test_write_refuses_another_number_of_partitions_before_it_sends(
    spark, kafka_cluster, topic, tmp_path, kind
) -> None:
    kafka_cluster.create_topic(topic, 3)
    path = text_files(tmp_path / "rows")
    first, second = CHANGES[kind]
    once = {"exactly_once": "task", "job_id": topic}
    with configured(spark, **first):
        seen = some_written(kafka_cluster, topic, rows_of(spark, kind, path), **once)
    with (
        configured(spark, **second),
        pytest.raises(ValueError, match=r"had \d+ partitions in an earlier run and has \d+ now"),
    ):
        write(rows_of(spark, kind, path), topic, settings(kafka_cluster), **once)
    assert settled(kafka_cluster, topic, ROWS).records == seen
    with configured(spark, **first):  # and the first way is still right
        assert write(rows_of(spark, kind, path), topic, settings(kafka_cluster), **once).skipped > 0
    found = settled(kafka_cluster, topic, ROWS)
    assert found.clean, str(found)


@pytest.mark.parametrize("kind", ["files", pytest.param("shuffle", marks=pytest.mark.long), "aqe"])
def test_buckets_are_right_however_spark_divides_its_input(spark, kafka_cluster, topic, tmp_path, kind) -> None:
    kafka_cluster.create_topic(topic, 3)
    path = text_files(tmp_path / "rows")
    first, second = CHANGES[kind]
    once = {"exactly_once": "bucket", "job_id": topic, "buckets": 6, "bucket_by": ["value"]}
    with configured(spark, **first):
        bad = rows_of(spark, kind, path).repartitionByRange(3, "value")
        write(bad.where("value % 6 < 3"), f"{topic}", settings(kafka_cluster), **{**once, "job_id": f"{topic}-warm"})
    with configured(spark, **second):
        report = write(rows_of(spark, kind, path).where("value % 6 >= 3"), topic, settings(kafka_cluster), **once)
        assert len(report.tasks) == 6
    with configured(spark, **first):
        again = write(rows_of(spark, kind, path).where("value % 6 >= 3"), topic, settings(kafka_cluster), **once)
        assert (again.skipped, again.records) == (6, report.records)
    found = settled(kafka_cluster, topic, ROWS)
    assert found.clean, str(found)


def test_other_buckets_under_the_same_name_are_refused(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    rows = spark.range(1000).selectExpr("cast(id AS string) AS value", "id")
    config = settings(kafka_cluster)
    write(rows, topic, config, exactly_once="bucket", job_id=topic, buckets=3, bucket_by=["id"])
    with pytest.raises(ValueError, match=r"had 3 partitions .* has 4 now.*buckets=3"):
        write(rows, topic, config, exactly_once="bucket", job_id=topic, buckets=4, bucket_by=["id"])
    with pytest.raises(ValueError, match=r"divided its rows by bucket\(id bigint\) .* bucket\(value string\)"):
        write(rows, topic, config, exactly_once="bucket", job_id=topic, buckets=3, bucket_by=["value"])
    with pytest.raises(ValueError, match=r"divided its rows by bucket\(id bigint\) .* task"):
        write(rows, topic, config, exactly_once="task", job_id=topic)
    with pytest.raises(ValueError, match=r"went to topic .* would go to topic 'other'"):
        write(
            rows,
            "other",
            config,
            exactly_once="bucket",
            job_id=topic,
            buckets=3,
            bucket_by=["id"],
            marker_topic=topic,
            check=False,
        )
    found = settled(kafka_cluster, topic, 1000)
    assert found.clean, str(found)


def test_other_rows_in_a_partition_are_named(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    once = {"exactly_once": "task", "job_id": topic}
    rows = spark.range(0, 1000, 1, 4).selectExpr("cast(id AS string) AS value")
    write(rows, topic, settings(kafka_cluster), **once)
    changed = spark.range(0, 1000, 1, 4).selectExpr("cast(if(id = 600, 5000, id) AS string) AS value")
    with pytest.raises(Exception, match="partition 2 holds other rows than those committed under this name"):
        write(changed, topic, settings(kafka_cluster), **once)
    emptied = rows.where("cast(value AS int) < 750")  # the last partition has no rows any more
    with pytest.raises(Exception, match="partition 3 holds other rows than those committed"):
        write(emptied, topic, settings(kafka_cluster), **once)
    found = settled(kafka_cluster, topic, 1000)
    assert found.clean, str(found)


def test_rows_in_another_order_are_the_same(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    rows = spark.range(0, 1000, 1, 4).selectExpr("cast(id AS string) AS key", "cast(id AS string) AS value")
    once = {"exactly_once": "task", "job_id": topic}
    write(rows, topic, settings(kafka_cluster), **once)
    backwards = rows.sortWithinPartitions("key", ascending=False)
    assert write(backwards, topic, settings(kafka_cluster), **once).skipped == 4


def test_an_rdd_with_other_partitions_is_refused(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    values = [b"%d" % number for number in range(1000)]

    def run(slices: int, **more) -> ExportReport:
        writer = partition_writer(settings(kafka_cluster), topic, exactly_once="task", job_id=topic, **more)
        return ExportReport.of(spark.sparkContext.parallelize(values, slices).mapPartitions(writer).collect())

    assert run(4).skipped == 0
    assert run(4).skipped == 4
    assert run(4, partitions=4).skipped == 4
    with pytest.raises(Exception, match="had 4 partitions in an earlier run and has 2 now"):
        run(2)
    with pytest.raises(ValueError, match="had 4 partitions in an earlier run and has 2 now"):
        run(2, partitions=2)
    found = settled(kafka_cluster, topic, 1000)
    assert found.clean, str(found)


# ---- the data source and streams


def save(frame, cluster, topic, **more) -> None:
    options = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": topic, "job.id": topic}
    named = {name.replace("_", "."): value for name, value in more.items()}
    frame.write.format("fastprod").mode("append").options(**{**options, **named}).save()


def test_the_data_source_with_buckets(spark, kafka_cluster, topic, tmp_path) -> None:
    kafka_cluster.create_topic(topic, 3)
    register(spark)
    path = text_files(tmp_path / "rows")
    for cores in (8, 3):
        with configured(spark, spark_sql_leafNodeDefaultParallelism=cores):
            save(bucketed(spark.read.text(path), 5, ["value"]), kafka_cluster, topic, exactly_once="bucket")
    found = settled(kafka_cluster, topic, ROWS)
    assert found.clean, str(found)
    with pytest.raises(Exception, match="had 5 partitions in an earlier run and has 6 now"):
        save(bucketed(spark.read.text(path), 6, ["value"]), kafka_cluster, topic, exactly_once="bucket")
    with pytest.raises(Exception, match=r"needs a DataFrame whose rows know their buckets.*bucketed"):
        save(spark.read.text(path), kafka_cluster, topic, exactly_once="bucket")
    moved = bucketed(spark.read.text(path), 5, ["value"]).coalesce(2)
    with pytest.raises(Exception, match="every bucket must be the partition of"):
        save(moved, kafka_cluster, topic, exactly_once="bucket", job_id=f"{topic}-moved")
    assert settled(kafka_cluster, topic, ROWS).clean


@pytest.mark.parametrize(("first", "second"), [(8, 3), pytest.param(3, 8, marks=pytest.mark.long)])
def test_the_data_source_without_buckets_fails_loudly(spark, kafka_cluster, topic, tmp_path, first, second) -> None:
    kafka_cluster.create_topic(topic, 3)
    register(spark)
    path = text_files(tmp_path / "rows")
    with configured(spark, spark_sql_leafNodeDefaultParallelism=first):
        save(spark.read.text(path), kafka_cluster, topic, exactly_once="task")
    with (
        configured(spark, spark_sql_leafNodeDefaultParallelism=second),
        pytest.raises(Exception, match="holds other rows"),
    ):
        save(spark.read.text(path), kafka_cluster, topic, exactly_once="task")


def test_the_data_source_finds_partitions_of_an_earlier_run_that_are_none(spark, kafka_cluster, topic) -> None:
    """Of four partitions an earlier run had committed the last; with two, no task meets its marker."""
    kafka_cluster.create_topic(topic, 3)
    register(spark)
    last = Once(Sink(settings(kafka_cluster), topic, topic), 3)
    producer = last.producer()
    with last.group() as group:
        producer.begin_transaction()
        producer.produce(topic, b"399")
        last.commit(producer, group, Fingerprint(), TaskReport(3, records=1))
    producer.close()
    rows = spark.range(0, 400, 1, 2).selectExpr("cast(id AS string) AS value")
    with pytest.raises(Exception, match="has 2 partitions, but an earlier run has committed partition 3"):
        save(rows, kafka_cluster, topic, exactly_once="task")


STREAMS = {
    "files": CHANGES["files"],
    "shuffle": CHANGES["shuffle"],
    "aqe": (
        SMALL,
        {"spark_sql_adaptive_coalescePartitions_minPartitionNum": 8, **SMALL},
    ),
}


@pytest.mark.parametrize(
    ("kind", "once"),
    [
        ("files", "task"),
        ("aqe", "bucket"),
        *(
            pytest.param(kind, once, marks=pytest.mark.long)
            for kind, once in (("files", "bucket"), ("aqe", "task"), ("shuffle", "task"), ("shuffle", "bucket"))
        ),
    ],
)
def test_a_stream_that_is_restarted_with_other_settings(spark, kafka_cluster, topic, tmp_path, kind, once) -> None:
    kafka_cluster.create_topic(topic, 3)
    register(spark)
    path = text_files(tmp_path / "rows")
    checkpoint = tmp_path / "checkpoint"

    def run() -> None:
        rows = spark.readStream.text(path)
        rows = rows if kind == "files" else rows.repartition("value")
        rows = bucketed(rows, 5, ["value"]) if once == "bucket" else rows
        writer = rows.writeStream.format("fastprod").option("kafka.bootstrap.servers", kafka_cluster.bootstrap_servers)
        writer = writer.option("topic", topic).option("exactly.once", once)
        query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()

    first, second = STREAMS[kind]
    with configured(spark, **first):
        run()
    # The driver died between writing the batch and noting it: the restarted query repeats it.
    for name in ("0", ".0.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    with configured(spark, **second):
        if once == "bucket":
            run()
        else:
            with pytest.raises(Exception, match=r"holds other rows|has committed partition"):
                run()
    if once == "bucket":
        found = settled(kafka_cluster, topic, ROWS)
        assert found.clean, str(found)


def test_foreach_batch_with_write(spark, kafka_cluster, topic, tmp_path) -> None:
    kafka_cluster.create_topic(topic, 3)
    path = text_files(tmp_path / "rows")
    checkpoint = tmp_path / "checkpoint"
    reports = []

    def run() -> None:
        def put(rows, batch: int) -> None:
            reports.append(write(rows, topic, settings(kafka_cluster), exactly_once="task", job_id=topic, batch=batch))

        writer = spark.readStream.option("maxFilesPerTrigger", 4).text(path).writeStream.foreachBatch(put)
        query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        query.awaitTermination()

    run()
    for name in ("1", ".1.crc"):
        (checkpoint / "commits" / name).unlink(missing_ok=True)
    run()
    assert [report.records for report in reports] == [ROWS // 2] * 3
    assert reports[2].skipped == sum(task.records > 0 for task in reports[2].tasks)
    for name in ("0", ".0.crc", "1", ".1.crc"):  # somebody restores an old checkpoint
        (checkpoint / "commits" / name).unlink(missing_ok=True)
        (checkpoint / "offsets" / name.replace("0", "1")).unlink(missing_ok=True)
    with pytest.raises(Exception, match=r"batch 1 of job .* has been written before"):
        run()
    found = settled(kafka_cluster, topic, ROWS)
    assert found.clean, str(found)


# ---- other cores, in drivers of their own


DRIVER = """
import sys
from pyspark.sql import SparkSession
from fastprod.spark import write

cores, path, servers, topic, once = sys.argv[1:]
spark = (
    SparkSession.builder.master(f"local[{cores}]")
    .config("spark.ui.enabled", "false").config("spark.driver.memory", "512m").getOrCreate()
)
spark.sparkContext.setLogLevel("OFF")
nap = "replace(java_method('java.lang.Thread', 'sleep', 5L), 'null', '')"
rows = spark.read.text(path)
if cores == "8":
    rows = rows.selectExpr(f"if(value % 7 = 0 AND value >= 4000, concat(value, {nap}), value) AS value")
more = {"buckets": 6, "bucket_by": ["value"]} if once == "bucket" else {}
config = {"bootstrap.servers": servers, "transaction.timeout.ms": 10_000}  # for what a killed driver leaves open
report = write(rows, topic, config, exactly_once=once, job_id=topic, **more)
print("written", report.records)
"""


@pytest.mark.parametrize("once", ["task", pytest.param("bucket", marks=pytest.mark.long)])
@pytest.mark.usefixtures("spark_available")
def test_a_driver_is_killed_and_its_successor_has_other_cores(kafka_cluster, topic, tmp_path, once) -> None:
    kafka_cluster.create_topic(topic, 3)
    path = text_files(tmp_path / "rows")
    (tmp_path / "driver.py").write_text(DRIVER)

    def driver(cores: int):
        arguments = [str(cores), path, kafka_cluster.bootstrap_servers, topic, once]
        return programs.started(tmp_path / "driver.py", *arguments, stderr=subprocess.STDOUT)

    with driver(8):
        # Some of the partitions are written, and others under way, when it is killed with all that it has started.
        assert programs.wait_until(lambda: sum(high for _, high in kafka_cluster.watermarks(topic).values()) > 500)
    with driver(3) as second:
        said = second.finish()[0]
    if once == "task":
        assert "had 8 partitions in an earlier run and has 3 now" in said
        assert settled(kafka_cluster, topic, ROWS).doubled == 0
    else:
        assert f"written {ROWS}" in said, said
        found = settled(kafka_cluster, topic, ROWS)
        assert found.clean, str(found)


# ---- names that are used in another way than before


def test_a_job_keeps_its_place_for_markers(spark, kafka_cluster, topic) -> None:
    """Nobody would find them elsewhere, and everything would be written again."""
    for name in (topic, f"{topic}-other"):
        kafka_cluster.create_topic(name, 3)
    rows = spark.range(0, 100, 1, 2).selectExpr("cast(id AS string) AS value")
    config, once = settings(kafka_cluster), {"exactly_once": "task", "job_id": topic}
    with pytest.raises(ValueError, match="there is no topic 'nowhere', which marker_topic names"):
        write(rows, topic, config, **once, marker_topic="nowhere")
    write(rows, topic, config, **once)
    for other in (
        lambda: write(rows, topic, config, **once, marker_topic=f"{topic}-other"),
        lambda: write(rows, f"{topic}-other", config, **once),
        lambda: write(rows.selectExpr("value", f"'{topic}' AS topic"), None, config, **once),
    ):
        with pytest.raises(ValueError, match="was run before with its markers at topic"):
            other()
    assert write(rows, topic, config, **once).skipped == 2
    found = settled(kafka_cluster, topic, 100)
    assert found.clean, str(found)


def test_the_data_source_and_write_do_not_share_a_name(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    register(spark)
    rows = spark.range(0, 100, 1, 2).selectExpr("cast(id AS string) AS value")
    save(rows, kafka_cluster, topic, exactly_once="task")
    with pytest.raises(ValueError, match="was written by the data source in one run"):
        write(rows, topic, settings(kafka_cluster), exactly_once="task", job_id=topic)
    save(rows, kafka_cluster, topic, exactly_once="task")
    found = settled(kafka_cluster, topic, 100)
    assert found.clean, str(found)


def test_another_type_of_a_bucket_column_is_another_division(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    rows = spark.range(0, 100, 1, 2).selectExpr("cast(id AS string) AS value", "cast(id AS int) AS k")
    once = {"exactly_once": "bucket", "job_id": topic, "buckets": 3}
    write(rows, topic, settings(kafka_cluster), **once, bucket_by=["k"])
    assert write(rows, topic, settings(kafka_cluster), **once, bucket_by=["K"]).skipped == 3
    with pytest.raises(ValueError, match=r"divided its rows by bucket\(k int\) .* by bucket\(k bigint\)"):
        write(rows.selectExpr("value", "cast(k AS long) AS k"), topic, settings(kafka_cluster), **once, bucket_by=["k"])
    names = [f"a_rather_long_name_of_a_column_{number}" for number in range(200)]
    many = rows.selectExpr("value", *(f"k AS {name}" for name in names))
    once["job_id"] = f"{topic}-many"
    assert write(many, topic, settings(kafka_cluster), **once, bucket_by=names).records == 100


def test_no_rows_at_all(spark, kafka_cluster, topic) -> None:
    """Spark sees that there are none, and leaves the shuffle and its tasks out."""
    kafka_cluster.create_topic(topic, 3)
    rows = spark.range(0, 100, 1, 2).selectExpr("cast(id AS string) AS value")
    for once in ("bucket", "task"):
        options = {"exactly_once": once, "job_id": f"{topic}-{once}", **({"buckets": 3} if once == "bucket" else {})}
        for _ in range(2):
            report = write(rows.where("false"), topic, settings(kafka_cluster), **options)
            assert (report.records, report.skipped) == (0, 0)
        with pytest.raises(Exception, match=r"holds other rows|had 0 partitions"):
            write(rows, topic, settings(kafka_cluster), **options)
    assert settled(kafka_cluster, topic, 100).records == 0


def test_settings_of_the_session_reach_the_tasks_before_a_shuffle(spark, kafka_cluster, topic, tmp_path) -> None:
    """The number of partitions is asked for outside of what Spark takes for a query."""
    kafka_cluster.create_topic(topic, 1)
    (tmp_path / "dates.csv").write_text("2020-1-5\n2020-1-6\n")
    with configured(spark, spark_sql_legacy_timeParserPolicy="LEGACY"):
        rows = spark.read.schema("day date").option("dateFormat", "yyyy-MM-dd").csv(str(tmp_path))
        rows = rows.selectExpr("cast(day AS string) AS value").repartition(3, "value")
        write(rows, topic, settings(kafka_cluster), exactly_once="task", job_id=topic)
    assert sorted(record.value() for record in kafka_cluster.records(topic)) == [b"2020-01-05", b"2020-01-06"]


def test_rdds_that_are_coalesced_or_joined_after_the_writer(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 1)
    for number in range(2):
        writer = partition_writer(settings(kafka_cluster), topic, exactly_once="task", job_id=topic)
        same = spark.sparkContext.parallelize([b"same"] * 10, 2)
        reports = same.mapPartitions(writer).coalesce(1).collect()
        assert [(report.task, report.records, report.skipped) for report in reports] == [
            (0, 5, bool(number)),
            (1, 5, bool(number)),
        ]
    assert len(kafka_cluster.records(topic)) == 10
    pair = [partition_writer(settings(kafka_cluster), topic, exactly_once="task", job_id=f"{topic}-{n}") for n in "ab"]
    both = same.mapPartitions(pair[0]).union(same.mapPartitions(pair[1]))
    assert ExportReport.of(both.collect()).records == 20

    def by_halves(rows):
        for _ in range(2):
            yield from writer([b"half"])

    writer = partition_writer(settings(kafka_cluster), topic, exactly_once="task", job_id=f"{topic}-halves")
    with pytest.raises(Exception, match="is written twice in one task"):
        same.mapPartitions(by_halves).collect()


def test_a_driver_that_died_while_it_claimed_holds_nobody_up(kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 1)
    sink = Sink(settings(kafka_cluster), topic, topic, partitions=3)
    name = f"fastprod.{topic}.job"
    dead = Producer({**settings(kafka_cluster), "transactional.id": name})
    dead.init_transactions()
    dead.begin_transaction()
    with _positions.reader(sink.config, name) as group:
        _positions.write_marker(dead, group, topic, {"claim": "never committed"})
    assert claim(sink).claim == claim(sink).claim != "never committed"
    with pytest.raises(ValueError, match="had 3 partitions in an earlier run and has 4 now"):
        claim(replace(sink, partitions=4))
    _positions.end(dead)


def test_markers_that_are_about_to_be_forgotten_are_not_relied_on(kafka_cluster, topic, monkeypatch) -> None:
    kafka_cluster.create_topic(topic, 1)
    sink = Sink(settings(kafka_cluster), topic, topic, partitions=3)
    claim(sink)
    kept = _positions.retention_s(sink.config)
    assert kept is not None
    later = time.time() + kept - 60
    monkeypatch.setattr(_once.time, "time", lambda: later)
    with pytest.raises(ValueError, match="the brokers are about to forget its markers"):
        claim(sink)
