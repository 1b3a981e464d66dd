"""`fastprod export` and `fastprod demo`, as a user calls them."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from fastprod.cli import main


def fastprod(*arguments: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "fastprod", *arguments], capture_output=True, text=True, timeout=240, **options
    )


@pytest.mark.usefixtures("spark")  # for its check of Java, and its environment
def test_the_demo_counts_what_it_wrote(tmp_path) -> None:
    done = fastprod("demo", "--rows", "20000", "--report", str(tmp_path / "report.json"), "--master", "local[2]")
    assert done.returncode == 0, done.stderr
    assert "20,000 records" in done.stdout
    assert done.stderr == ""  # nothing of Spark's chatter
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["records"] == 20000
    assert sum(part["records"] for part in report["topics"]["orders"].values()) == 20000


def test_columns_become_keys_values_headers_and_timestamps(spark, mock, topic, tmp_path) -> None:
    mock.create_topic(topic, 2)
    path = tmp_path / "in.csv"
    path.write_text("id,name,when\n1,a,2020-01-01 00:00:00\n2,b,2020-01-02 00:00:00\n")
    run = ["export", str(path), "-t", topic, "-b", mock.bootstrap_servers, "--master", "local[1]"]
    done = fastprod(*run, "--key", "id", "--value", "name", "--headers", "name,id", "--timestamp", "when")
    assert done.returncode == 0, done.stderr
    found = sorted((record.key(), record.value(), tuple(record.headers())) for record in mock.records(topic))
    assert found == [
        (b"1", b"a", (("name", b"a"), ("id", b"1"))),
        (b"2", b"b", (("name", b"b"), ("id", b"2"))),
    ]
    assert all(record.timestamp()[1] > 1_577_000_000_000 for record in mock.records(topic))
    done = fastprod(*run, "--value-format", "json")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(record.value()) for record in mock.records(topic) if record.value().startswith(b"{")]
    assert sorted(row["name"] for row in rows) == ["a", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.parquet", "-t", "t"], "nowhere.parquet does not exist"),
        (["data.bin", "-t", "t"], "give --format"),
        (["folder", "-t", "t"], "holds no data"),
        (["data.csv", "-t", "t", "--key", "nokey"], "--key names 'nokey', but the columns are id, name"),
        (["data.csv", "-t", "t", "-X", "nonsense=1"], "nonsense"),
        (["data.csv", "-t", "t", "--value", "id", "--value-format", "json"], "exclude each other"),
        (["data.csv"], "--topic"),
        (["empty.csv", "-t", "t"], "holds no rows"),
        (["data.csv", "-t", "t", "--format", "parquet"], "cannot read data.csv as parquet"),
    ],
)
def test_mistakes_are_told_in_a_line(spark, monkeypatch, tmp_path, arguments, message) -> None:
    # With the session that runs already: starting one for each mistake would take minutes.
    monkeypatch.setattr("fastprod.cli.export.session", lambda master, name: contextlib.nullcontext(spark))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text("id,name\n1,a\n")
    (tmp_path / "data.bin").write_bytes(b"?")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "folder").mkdir()
    paths = [str(tmp_path / arguments[0]), *arguments[1:]]
    done = CliRunner().invoke(main, ["export", *paths])
    assert done.exit_code == 2, done.output
    assert message in done.output.replace(f"{tmp_path}/", "")
    assert len(done.output.strip().splitlines()) <= 4  # click's usage errors have a hint above


@pytest.mark.usefixtures("spark")
def test_without_java_a_line_says_what_to_install(tmp_path) -> None:
    (tmp_path / "data.csv").write_text("id\n1\n")
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    done = fastprod("export", "data.csv", "-t", "t", cwd=tmp_path, env={**environment, "PATH": str(tmp_path)})
    assert done.returncode == 2
    assert "Spark needs Java 17" in done.stderr
