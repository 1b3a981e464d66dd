"""Exactly once through Spark Connect, whose client knows no RDDs and need not be near the brokers."""

import textwrap

import programs
import pytest
from conftest import settled

SCRIPT = """
    import sys
    from pyspark.sql import SparkSession
    from fastprod.spark import write

    servers, topic, other = sys.argv[1:]
    spark = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    assert "connect" in type(spark).__module__
    config = {"bootstrap.servers": servers}

    def rows(partitions, fails=False):
        boom = "if(id = 18000, cast(raise_error('boom') AS string), cast(id AS string))"
        value = boom if fails else "cast(id AS string)"
        return spark.range(0, 40_000, 1, partitions).selectExpr(f"{value} AS value")

    def attempt(name, *arguments, **options):
        try:
            report = write(*arguments, **options)
            print(name, report.records, report.skipped, len(report.tasks))
        except Exception as problem:
            print(name, " ".join(str(problem).split()))

    attempt("fails", rows(4, True), topic, config, exactly_once="task", job_id=topic)
    attempt("first", rows(4), topic, config, exactly_once="task", job_id=topic)
    attempt("again", rows(4), topic, config, exactly_once="task", job_id=topic)
    attempt("refused", rows(3), topic, config, exactly_once="task", job_id=topic)
    for partitions in (4, 7):
        attempt("bucket", rows(partitions), other, config, exactly_once="bucket", job_id=other, buckets=5)
    spark.stop()
"""


@pytest.mark.usefixtures("spark_available")
def test_everything_that_write_promises(kafka_cluster, topic, tmp_path) -> None:
    pytest.importorskip("grpc", reason="Spark Connect needs pip install 'pyspark[connect]'")
    other = f"{topic}-other"
    for name in (topic, other):
        kafka_cluster.create_topic(name, 3)
    (tmp_path / "client.py").write_text(textwrap.dedent(SCRIPT))
    done = programs.run(tmp_path / "client.py", kafka_cluster.bootstrap_servers, topic, other)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    said = done.stdout.splitlines()
    assert [line.partition(" ")[0] for line in said] == ["fails", "first", "again", "refused", "bucket", "bucket"]
    assert "boom" in said[0]
    assert said[1].startswith("first 40000 ")
    assert said[2] == "again 40000 4 4"
    assert "had 4 partitions in an earlier run and has 3 now" in said[3]
    assert said[4:] == ["bucket 40000 0 5", "bucket 40000 5 5"]
    for name in (topic, other):
        found = settled(kafka_cluster, name, 40_000)
        assert found.clean, str(found)
