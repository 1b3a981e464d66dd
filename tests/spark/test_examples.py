"""The examples, as a user runs them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import programs
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.usefixtures("spark_available")  # each example has a Spark of its own


def run(name: str, *arguments: str) -> str:
    done = programs.run(EXAMPLES / name, *arguments)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.long
def test_the_bulk_export(tmp_path) -> None:
    output = run("spark_bulk_export.py", "--rows", "20000", "--report", str(tmp_path / "report.html"))
    assert "20,000 orders read, 20,000 acknowledged, 20,000 by partition" in output
    assert "orders" in (tmp_path / "report.html").read_text()


@pytest.mark.long
def test_an_example_in_a_source_folder_that_is_not_built(tmp_path) -> None:
    """Workers start in the current folder; they must not import what lies there."""
    source = EXAMPLES.parent
    shutil.copytree(source / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("*.png"))
    shutil.copytree(source / "fastprod", tmp_path / "fastprod", ignore=shutil.ignore_patterns("*.so", "*.c"))
    done = subprocess.run(
        [sys.executable, "examples/spark_bulk_export.py", "--rows", "2000"],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
    )
    assert "2,000 orders read, 2,000 acknowledged" in done.stdout, done.stderr


@pytest.mark.long
def test_the_log_through_map_partitions() -> None:
    output = run("spark_map_partitions.py", "--lines", "20000")
    assert output.startswith("20,000 records")
    assert re.search(r"^alerts \[0\]", output, re.MULTILINE)


@pytest.mark.long
def test_the_stream_that_is_stopped_and_restarted(kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    output = run(
        "spark_streaming.py", "-b", kafka_cluster.bootstrap_servers, "-t", topic, "--seconds", "2", "--exactly-once"
    )
    assert "read back: 0 clicks are missing, 0 are there twice" in output


@pytest.mark.long
@pytest.mark.usefixtures("kafka_available")
def test_the_cluster_whose_workers_are_killed() -> None:
    """Executors in processes of their own; a Python worker and an executor get SIGKILL in the middle of a task."""
    output = run("spark_kill_workers.py", "--rows", "40000")
    assert len(re.findall("Python worker .* killed", output)) == len(re.findall("executor .* killed", output)) == 2
    assert output.count("read back: 40,000 rows, 0 lost, 0 doubled") >= 2
    assert output.endswith("as promised\n")


@pytest.mark.long
@pytest.mark.usefixtures("kafka_available")
def test_jobs_that_are_submitted_until_they_succeed() -> None:
    """A standalone cluster; the run that counts has a hundred faults and more."""
    output = run("spark_kill_workers.py", "--faults", "4", "--jobs", "2", "--rows", "20000", "--seed", "3")
    total = re.search(r"^all +(\d+) +(\d+) +(\d+) +0 +0 +0$", output, re.MULTILINE)
    assert total, output
    assert int(total[1]) >= 4
    assert int(total[3]) >= int(total[2]) >= 2
    assert output.endswith(": as promised\n")


@pytest.mark.long
def test_a_job_whose_tasks_are_members_of_a_producer_group() -> None:
    output = run("group_from_spark.py", "--lines", "2000")
    assert "second run: its last attempts copied [0, 0, 0] lines" in output
    assert "12,000 of 12,000 records read: 0 lost, 0 doubled" in output
