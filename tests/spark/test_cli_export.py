"""`fastprod export` and `fastprod demo`, as a user calls them."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import pytest
from click.testing import CliRunner
from programs import run, started, wait_until

from fastprod.cli import main


def fastprod(*arguments: str, **options) -> subprocess.CompletedProcess:
    return run("-m", "fastprod", *arguments, **options)


@pytest.mark.usefixtures("spark_available")
def test_the_demo_counts_what_it_wrote(tmp_path) -> None:
    done = fastprod("demo", "--rows", "20000", "--report", str(tmp_path / "report.json"), "--master", "local[2]")
    assert done.returncode == 0, done.stderr
    assert "20,000 records" in done.stdout
    assert done.stderr == ""  # nothing of Spark's chatter
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["records"] == 20000
    assert sum(part["records"] for part in report["topics"]["orders"].values()) == 20000


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.usefixtures("spark_available")
@pytest.mark.parametrize("moment", ["starting", "working"])
def test_ctrl_c_ends_all_processes(tmp_path, moment) -> None:
    command = ["-m", "fastprod", "demo", "--rows", "500000000", "--master", "local[1]"]
    with started(*command, env=os.environ | {"TMPDIR": str(tmp_path)}) as process:

        def reached() -> bool:
            if moment == "starting":
                return bool(process.descendants("java", f"{tmp_path}/fastprod-spark-"))
            return any(tmp_path.glob("fastprod-demo-*/orders.parquet/*"))

        assert wait_until(lambda: process.poll() is not None or reached())
        process.send_signal(signal.SIGINT)
        assert process.finish() == ("", "interrupted\n")
        assert process.returncode == 130
        assert wait_until(lambda: not process.descendants()), process.descendants()
    assert list(tmp_path.glob("fastprod-*")) == []


@pytest.fixture
def export(spark, monkeypatch, tmp_path):
    """Runs the command in this process, with the session that runs already: starting one each time takes too long."""
    monkeypatch.setattr("fastprod.cli.export.session", lambda master, name: contextlib.nullcontext(spark))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, exit_code: int = 0):
        done = CliRunner().invoke(main, ["export", *arguments])
        assert done.exit_code == exit_code, done.output
        return done.output.replace(f"{tmp_path}/", "")

    return run


def test_columns_become_keys_values_headers_and_timestamps(export, mock, topic, tmp_path) -> None:
    mock.create_topic(topic, 2)
    (tmp_path / "in.csv").write_text("id,full.name,when\n007,a,2020-01-01 00:00:00\n1.50,b,2020-01-02 00:00:00\n")
    run = [str(tmp_path / "in.csv"), "-t", topic, "-b", mock.bootstrap_servers]
    export(*run, "--key", "id", "--value", "full.name", "--headers", "full.name,id", "--timestamp", "when")
    found = sorted((record.key(), record.value(), tuple(record.headers())) for record in mock.records(topic))
    assert found == [  # text as it is in the file, though "007" would make a number
        (b"007", b"a", (("full.name", b"a"), ("id", b"007"))),
        (b"1.50", b"b", (("full.name", b"b"), ("id", b"1.50"))),
    ]
    assert all(record.timestamp()[1] > 1_577_000_000_000 for record in mock.records(topic))
    export(*run, "--value-format", "json")
    rows = [json.loads(record.value()) for record in mock.records(topic) if record.value().startswith(b"{")]
    assert sorted((row["id"], row["full.name"]) for row in rows) == [(1.5, "b"), (7.0, "a")]


@pytest.mark.parametrize(
    ("form", "how"),
    [("parquet", "folder"), ("parquet", "pattern"), ("orc", "file"), ("json", "folder"), ("csv", "file")],
)
def test_every_format_and_kind_of_path(spark, export, topic, tmp_path, form, how) -> None:
    path = tmp_path / f"out.{form}"
    spark.range(0, 50, 1, 1).selectExpr("cast(id AS string) AS name", "id").write.format(form).save(
        str(path), **({"header": "true"} if form == "csv" else {})
    )
    if how == "file":
        (source,) = (str(found) for found in path.glob(f"part-*.{form}"))
    else:
        source = f"file://{path}" if how == "folder" else f"{path}/*.{form}"
    output = export(source, "-t", topic, "--key", "name", "--report", "report.html")  # to mock brokers, which count
    assert "50 records" in output
    assert topic in (tmp_path / "report.html").read_text()


def test_nested_columns_become_json(spark, export, mock, topic, tmp_path) -> None:
    mock.create_topic(topic, 1)
    spark.sql("SELECT struct(1 AS a, 'x' AS b) AS s").write.parquet(str(tmp_path / "in.parquet"))
    export(
        str(tmp_path / "in.parquet"), "-t", topic, "-X", f"bootstrap.servers={mock.bootstrap_servers}", "--value", "s"
    )
    assert [record.value() for record in mock.records(topic)] == [b'{"a":1,"b":"x"}']


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.parquet", "-t", "t"], "nowhere.parquet does not exist"),
        (["file:/nowhere.parquet", "-t", "t"], "file:/nowhere.parquet does not exist"),
        (["*.orc", "-t", "t"], "*.orc matches nothing"),
        (["data.bin", "-t", "t"], "give --format"),
        (["folder", "-t", "t"], "holds no data"),
        (["data.csv", "-t", "t", "--key", "nokey"], "--key names 'nokey', but the columns are id, name"),
        (["data.csv", "-t", "t", "-X", "nonsense=1"], "nonsense"),
        (["data.csv", "-t", "t", "-X", "linger.ms=soon"], 'property "linger.ms"'),
        (["data.csv", "-t", "t", "--value", "id", "--value-format", "json"], "exclude each other"),
        (["data.csv"], "--topic"),
        (["data.csv", "-t", "t", "--report", "report.txt"], "must end in .json or .html"),
        (["data.csv", "-t", "t", "--report", "nowhere/report.json"], "cannot be written"),
        (["empty.csv", "-t", "t"], "empty.csv is empty (0 bytes)"),
        (["header.csv", "-t", "t"], "holds no rows"),
        (["empty.json", "-t", "t"], "empty.json is empty (0 bytes)"),
        (["data.csv", "-t", "t", "--format", "parquet"], "data.csv cannot be read as parquet"),
        (["bad.json", "-t", "t"], "bad.json cannot be read as JSON lines"),
        (["ragged.csv", "-t", "t"], "ragged.csv"),
        (["ragged.csv", "-t", "t", "--engine", "spark"], "ragged.csv"),
        (["data.csv", "-t", "t", "--where", "nothing > 1"], "there is no column 'nothing'"),
        (["data.csv", "-t", "t", "--columns", "nothing"], "--columns names 'nothing'"),
        (["data.csv", "-t", "t", "--exactly-once"], "--exactly-once needs --job-id"),
        (["data.csv", "-t", "t", "--engine", "spark", "--columns", "id"], "does not go with --engine spark"),
    ],
)
def test_mistakes_are_told_in_a_line(export, tmp_path, arguments, message) -> None:
    (tmp_path / "data.csv").write_text("id,name\n1,a\n")
    (tmp_path / "data.bin").write_bytes(b"?")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "header.csv").write_text("id,name\n")
    (tmp_path / "bad.json").write_text('{"a": 1}\n{"a": \n')
    (tmp_path / "ragged.csv").write_text("id,name\n1,a\n2\n")
    (tmp_path / "folder").mkdir()
    path = arguments[0] if ":" in arguments[0] else str(tmp_path / arguments[0])
    output = export(path, *arguments[1:], exit_code=2)
    assert message in output
    assert len(output.strip().splitlines()) <= 4  # click's usage errors have a hint above
    assert "JVM stacktrace" not in output


def value_of(number: int) -> bytes:
    more = f',"n":{number}' if number % 2 == 0 else ""
    return f'{{"id":{number},"customer":"c{number % 5}"{more}}}'.encode()


@pytest.mark.parametrize("engine", ["files", "spark"])
def test_both_engines_write_the_same(spark, export, mock, topic, tmp_path, engine) -> None:
    mock.create_topic(topic, 1)
    path = tmp_path / "in.parquet"
    spark.range(0, 100, 1, 2).selectExpr(
        "id", "concat('c', id % 5) AS customer", "if(id % 2 = 0, id, null) AS n"
    ).write.parquet(str(path))
    options = ["--key", "customer", "--headers", "id", "--where", "id >= 10 AND customer <> 'c3'", "--engine", engine]
    export(str(path), "-t", topic, "-b", mock.bootstrap_servers, *options)
    found = {(record.key(), record.value(), tuple(record.headers())) for record in mock.records(topic)}
    assert found == {
        (
            f"c{number % 5}".encode(),
            value_of(number),
            (("id", str(number).encode()),),
        )
        for number in range(10, 100)
        if number % 5 != 3
    }


def test_avro_and_chosen_columns(export, mock, topic, tmp_path) -> None:
    import io

    import fastavro

    mock.create_topic(topic, 1)
    (tmp_path / "in.csv").write_text("id,name,more\n1,a,x\n2,b,y\n")
    export(
        str(tmp_path / "in.csv"),
        "-t",
        topic,
        "-b",
        mock.bootstrap_servers,
        "--value-format",
        "avro",
        "--columns",
        "id,name",
    )
    schema = {
        "type": "record",
        "name": "Row",
        "fields": [{"name": "id", "type": ["null", "long"]}, {"name": "name", "type": ["null", "string"]}],
    }
    rows = [fastavro.schemaless_reader(io.BytesIO(record.value()), schema) for record in mock.records(topic)]
    assert rows == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]


def test_an_export_that_is_run_again_writes_nothing_again(export, kafka_cluster, topic, tmp_path) -> None:
    from test_export import rows_of

    kafka_cluster.create_topic(topic, 2)
    (tmp_path / "in.json").write_text("".join(f'{{"id": {number}}}\n' for number in range(100)))
    for _ in range(2):
        run = [str(tmp_path / "in.json"), "-t", topic, "-b", kafka_cluster.bootstrap_servers]
        assert "100 records" in export(*run, "--exactly-once", "--job-id", topic)
    assert [row["id"] for row in rows_of(kafka_cluster, topic)] == list(range(100))


def test_the_progress_line_tells_rows_bytes_and_files() -> None:
    from fastprod.cli._spark import so_far
    from fastprod.spark import ExportPlan

    assert (
        so_far(ExportPlan(8, 400_000_000, 1_000_000, 4), 1)
        == ", 250,000 of 1,000,000 rows, 100 of 400 MB, 2 of 8 files"
    )
    assert so_far(ExportPlan(8, 400_000_000, None, 4), 4) == ", 400 of 400 MB, 8 of 8 files"


@pytest.mark.usefixtures("spark_available")
def test_without_java_a_line_says_what_to_install(tmp_path) -> None:
    (tmp_path / "data.csv").write_text("id\n1\n")
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    done = fastprod("export", "data.csv", "-t", "t", cwd=tmp_path, env={**environment, "PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "Spark needs Java 17" in done.stderr
