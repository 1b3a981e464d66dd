"""Files to Kafka through Spark Connect, whose client need not be near files, brokers or anything else."""

import textwrap

import programs
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_export import rows_of

from fastprod.encoding import Json

SCRIPT = """
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
    (tmp_path / "client.py").write_text(textwrap.dedent(SCRIPT))
    done = programs.run(tmp_path / "client.py", kafka_cluster.bootstrap_servers, topic, tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    missing, first, again, other, frame, lines = done.stdout.splitlines()
    assert missing.startswith("missing SourceError ")
    assert "none does not exist" in missing
    assert (first, again) == ("first 900 0 3 2", "again 900 3 3 2")
    assert "was run before with another where" in other
    assert (frame, lines) == ("frame 10", "lines 10 0 1 1")
    assert [row["id"] for row in rows_of(kafka_cluster, topic)] == [*range(900), *range(1000, 1020)]
