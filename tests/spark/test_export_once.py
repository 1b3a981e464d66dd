"""Files to Kafka exactly once: runs again, killed workers, other cores, files that are others."""

import os
import subprocess
import textwrap
import time
from functools import partial
from itertools import count
from pathlib import Path

import programs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import IsolationLevel
from conftest import ends, settled
from faulty import KillOnce

from fastprod.encoding import Json
from fastprod.spark import ExportError, SourceError, export, write

ROWS = 40_000
FILES = 5


class Slow:
    """A partitioner that takes its time, so that a job can be killed in the middle."""

    def partition(self, topic, key, value, partitions, available) -> int:
        time.sleep(0.001)
        return len(value) % partitions


def settings(cluster, **more) -> dict:
    return {"bootstrap.servers": cluster.bootstrap_servers, **more}


@pytest.fixture
def folder(tmp_path) -> Path:
    """Numbers, as the audit of a topic wants them, in files of several row groups."""
    rows = ROWS // FILES
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(FILES):
        values = [b"%d" % value for value in range(number * rows, (number + 1) * rows)]
        data = pa.table({"value": values, "number": range(rows)})
        pq.write_table(data, folder / f"part-{number}.parquet", row_group_size=1000)
    return folder


def once(spark, folder, topic, config, **more):
    return export(spark, folder, topic, config, value="value", exactly_once=True, job_id=topic, **more)


def all_there(cluster, topic, rows=ROWS) -> None:
    found = settled(cluster, topic, rows)
    assert found.clean, str(found)


def test_a_job_submitted_again_writes_nothing_again(spark, kafka_cluster, topic, folder) -> None:
    kafka_cluster.create_topic(topic, 3)
    first = once(spark, folder, topic, settings(kafka_cluster), splits=4)
    assert (first.records, first.skipped, len(first.tasks)) == (ROWS, 0, 4)
    # Another size of splits changes nothing: the first run has decided.
    second = once(spark, folder, topic, settings(kafka_cluster), splits=9)
    assert (second.records, second.skipped, len(second.tasks), second.bytes) == (ROWS, 4, 4, first.bytes)
    all_there(kafka_cluster, topic)


def test_a_killed_worker_and_a_retried_task_leave_each_record_once(spark, kafka_cluster, topic, folder) -> None:
    kafka_cluster.create_topic(topic, 3)
    config = settings(kafka_cluster, partitioner=KillOnce(2, 5000))
    report = once(spark, folder, topic, config, splits=4)
    assert report.records == ROWS
    assert report.tasks[2].attempt > 0
    all_there(kafka_cluster, topic)


def test_a_job_that_failed_goes_on_with_other_cores(spark, kafka_cluster, topic, folder, own_spark) -> None:
    """The first run fails at one split; the next has another number of cores, and writes what is missing."""
    kafka_cluster.create_topic(topic, 3)
    said = own_spark(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from fastprod.spark import export
        from faulty import KillOnce
        config = {{**{settings(kafka_cluster)!r}, "partitioner": KillOnce(5, 1000)}}
        try:
            once = {{"exactly_once": True, "job_id": {topic!r}, "splits": 8}}
            export(spark, {str(folder)!r}, {topic!r}, config, value="value", **once)
        except Exception as problem:
            print("failed:", problem)
        """,
        master="local[1]",
    )
    assert "failed: " in said
    before = settled(kafka_cluster, topic, ROWS)
    assert before.doubled == 0
    assert 0 < before.lost < ROWS
    report = once(spark, folder, topic, settings(kafka_cluster))
    assert (report.records, len(report.tasks)) == (ROWS, 8)
    assert 0 < report.skipped < 8
    all_there(kafka_cluster, topic)


def test_a_driver_that_is_killed_in_the_middle(spark, kafka_cluster, topic, folder, tmp_path) -> None:
    kafka_cluster.create_topic(topic, 3)
    script = tmp_path / "driver.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from pyspark.sql import SparkSession
        from fastprod.spark import export
        from test_export_once import Slow
        spark = SparkSession.builder.master("local[3]").config("spark.ui.enabled", "false").getOrCreate()
        config = {{**{settings(kafka_cluster)!r}, "partitioner": Slow()}}
        once = {{"exactly_once": True, "job_id": {topic!r}, "splits": 10}}
        export(spark, {str(folder)!r}, {topic!r}, config, value="value", **once)
        """)
    )
    with programs.started(script, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        visible = partial(ends, kafka_cluster, topic, IsolationLevel.READ_COMMITTED)
        assert programs.wait_until(lambda: driver.poll() is not None or sum(visible()) > 0)
        assert driver.poll() is None
    report = once(spark, folder, topic, settings(kafka_cluster))
    assert (report.records, len(report.tasks)) == (ROWS, 10)
    assert 0 < report.skipped < 10
    all_there(kafka_cluster, topic)


def test_files_that_are_others_are_refused_by_name(spark, kafka_cluster, topic, folder) -> None:
    kafka_cluster.create_topic(topic, 3)
    once(spark, folder, topic, settings(kafka_cluster))
    victim = folder / "part-3.parquet"
    kept = victim.read_bytes(), victim.stat().st_mtime_ns

    def restored() -> None:
        victim.write_bytes(kept[0])
        os.utime(victim, ns=(kept[1], kept[1]))

    os.utime(victim, ns=(kept[1] + 1000, kept[1] + 1000))
    with pytest.raises(
        SourceError, match=r"part-3\.parquet has changed \(it was .* bytes, modified .* Nothing was sent"
    ):
        once(spark, folder, topic, settings(kafka_cluster))
    victim.unlink()
    with pytest.raises(SourceError, match=r"part-3\.parquet is gone"):
        once(spark, folder, topic, settings(kafka_cluster))
    restored()
    (folder / "part-9.parquet").write_bytes(kept[0])
    with pytest.raises(SourceError, match=r"part-9\.parquet is new.* under a job_id of their own"):
        once(spark, folder, topic, settings(kafka_cluster))
    (folder / "part-9.parquet").unlink()
    assert once(spark, folder, topic, settings(kafka_cluster)).skipped > 0
    all_there(kafka_cluster, topic)


def test_other_arguments_are_refused_by_name(spark, kafka_cluster, topic, folder) -> None:
    kafka_cluster.create_topic(topic, 3)
    config = settings(kafka_cluster)
    once(spark, folder, topic, config)
    given = {"value": "value", "exactly_once": True, "job_id": topic}
    for name, changed in (("where", "number < 3"), ("key", "number"), ("value", Json()), ("timestamp", "number")):
        with pytest.raises(ValueError, match=f"was run before with another {name}"):
            export(spark, folder, topic, config, **{**given, name: changed})
    with pytest.raises(ValueError, match="another export"):
        write(spark.read.parquet(str(folder)), topic, config, exactly_once="task", job_id=topic)
    all_there(kafka_cluster, topic)


def test_more_files_than_one_note_has_room_for(spark, kafka_cluster, topic, tmp_path) -> None:
    kafka_cluster.create_topic(topic, 3)
    numbers = count()
    for number in range(400):
        name = f"part-{number:05}-{os.urandom(16).hex()}.parquet"
        pq.write_table(pa.table({"value": [b"%d" % next(numbers)]}), tmp_path / name)
    first = once(spark, tmp_path, topic, settings(kafka_cluster), splits=3)
    assert (first.records, first.files) == (400, 400)
    assert once(spark, tmp_path, topic, settings(kafka_cluster)).skipped == len(first.tasks)
    (tmp_path / name).unlink()
    with pytest.raises(SourceError, match=f"{name} is gone"):
        once(spark, tmp_path, topic, settings(kafka_cluster))
    all_there(kafka_cluster, topic, 400)


def test_a_file_damaged_between_listing_and_reading_leaves_nothing_of_its_split(kafka_cluster, topic, folder) -> None:
    """Its size and time are as before, but a row group is not what its metadata says."""
    from dataclasses import replace

    from fastprod.spark import _export, _files, _plan
    from fastprod.spark._shape import Shape

    kafka_cluster.create_topic(topic, 3)
    sink = _plan.sink(topic, settings(kafka_cluster), exactly_once="task", job_id=topic)
    listing = _files.listed(folder)
    survey = _export.surveyed(listing, _files.TextOptions(), None, {})
    shape = Shape.of("value", None, None, None, None).resolved(survey.schema)
    reader = _export._reader(survey, shape, _files.TextOptions())
    sink, (split,) = _export.prepared(sink, survey, 1e9, shape.identity())
    last = split[-1]
    wrong = (*split[:-1], replace(last, rows=(*last.rows[:-1], last.rows[-1] + 1)))
    for damaged, wanted in ((wrong, 0), (split, ROWS)):
        import pickle
        import zlib

        work = _export._Work(sink, reader, shape, [zlib.compress(pickle.dumps(damaged))])
        task = [pa.record_batch({"id": [0]})]
        if wanted:
            list(work(task))
        else:
            with pytest.raises(ExportError, match=r"row group 7 has 1,001 rows, but 1,000 came"):
                list(work(task))
        assert settled(kafka_cluster, topic, ROWS).lost == ROWS - wanted
    all_there(kafka_cluster, topic)


def test_speculation_and_a_missing_name_are_refused(spark, kafka_cluster, topic, folder, own_spark) -> None:
    kafka_cluster.create_topic(topic, 3)
    with pytest.raises(ValueError, match="needs a job_id"):
        export(spark, folder, topic, settings(kafka_cluster), exactly_once=True)
    with pytest.raises(TypeError, match="True or False"):
        export(spark, folder, topic, settings(kafka_cluster), exactly_once="task", job_id="x")
    said = own_spark(
        f"""
        from fastprod.spark import export
        try:
            export(spark, {str(folder)!r}, {topic!r}, {settings(kafka_cluster)!r}, exactly_once=True, job_id="x")
        except ValueError as problem:
            print("refused:", "does not go with spark.speculation" in str(problem))
        """,
        conf={"spark.speculation": "true"},
    )
    assert "refused: True" in said
    assert settled(kafka_cluster, topic, ROWS).records == 0
