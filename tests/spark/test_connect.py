"""Through Spark Connect, whose client knows no RDDs and need not be near files, brokers or anything else.

One file for all: its server has one port.
"""

import textwrap

import programs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import settled
from test_export import rows_of

from fastprod.encoding import Json

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


# ---- files and frames of any columns

FILES = """
    import sys
    from pyspark.sql import SparkSession
    from fastprod.encoding import Json
    from fastprod.spark import export, write

    servers, topic, folder = sys.argv[1:]
    spark = SparkSession.builder.remote("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    assert "connect" in type(spark).__module__
    config = {"bootstrap.servers": servers}

    def attempt(name, source, **options):
        try:
            report = export(spark, source, topic, config, key="id", splits=3, **options)
            print(name, report.records, report.skipped, len(report.tasks), report.files)
        except Exception as problem:
            print(name, type(problem).__name__, " ".join(str(problem).split()))

    once = {"exactly_once": True, "job_id": topic}
    attempt("missing", folder + "/none", **once)
    attempt("first", folder + "/data", where="id < 900", **once)
    attempt("again", folder + "/data", where="id < 900", **once)
    attempt("other", folder + "/data", where="id < 901", **once)
    report = write(spark.range(1000, 1010), topic, config, value=Json())
    print("frame", report.records)
    attempt("lines", folder + "/lines.json")
    spark.stop()
"""


@pytest.mark.usefixtures("spark_available")
def test_files_and_frames(kafka_cluster, topic, tmp_path) -> None:
    pytest.importorskip("grpc", reason="Spark Connect needs pip install 'pyspark[connect]'")
    kafka_cluster.create_topic(topic, 3)
    (tmp_path / "data").mkdir()
    for number in range(2):
        data = pa.table({"id": range(number * 500, number * 500 + 500)})
        pq.write_table(data, tmp_path / "data" / f"{number}.parquet", row_group_size=100)
    (tmp_path / "lines.json").write_bytes(b"\n".join(Json().encode(pa.table({"id": range(1010, 1020)})).to_pylist()))
    (tmp_path / "client.py").write_text(textwrap.dedent(FILES))
    done = programs.run(tmp_path / "client.py", kafka_cluster.bootstrap_servers, topic, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    missing, first, again, other, frame, lines = done.stdout.splitlines()
    assert missing.startswith("missing SourceError ")
    assert "none does not exist" in missing
    assert (first, again) == ("first 900 0 3 2", "again 900 3 3 2")
    assert "was run before with another where" in other
    assert (frame, lines) == ("frame 10", "lines 10 0 1 1")
    assert [row["id"] for row in rows_of(kafka_cluster, topic)] == [*range(900), *range(1000, 1020)]
