"""`fastprod perf` on a real broker, beside Java's own producer. No figure is judged."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from programs import Program, started, wait_until

import fastprod
from fastprod.cli import _load, main
from fastprod.cli._java_load import DEFAULTS, STARTED, TUNED, JavaRunner
from fastprod.testing import KafkaCluster

ROOT = Path(fastprod.__file__).parent.parent
BULK = [
    ("fastprod", "produce_many"),
    ("confluent", "produce"),
    ("confluent", "produce+poll"),
    ("confluent", "produce_batch"),
    ("java", TUNED),
    ("java", DEFAULTS),
    ("java", STARTED),
]


def perf_json(*arguments: str) -> dict:
    result = CliRunner().invoke(main, ["perf", "--warmup", "0", "--rounds", "1", "--format", "json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@contextmanager
def start(program: str, *arguments: str) -> Iterator[Program]:
    with started("-c", program, *arguments, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        yield process


def machines(topic: str) -> list[int]:
    """The processes that send to a topic by ProducerPerformance: Java and its keeper."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"--topic={topic}\0" in (folder / "cmdline").read_text():
                found.append(int(folder.name))
        except OSError:
            pass  # gone meanwhile
    return found


@pytest.mark.usefixtures("kafka_available")
def test_side_by_side_on_a_broker_of_its_own(topic):
    report = perf_json("--real", "--compare", "confluent,java", "--num-records", "20000", "-t", topic)
    assert report["cluster"]["mock"] is False
    assert report["cluster"]["partitions"] == 10
    bulk = [row for row in report["summary"] if row["mode"] == "bulk"]
    assert [(row["client"], row["call"]) for row in bulk] == BULK
    assert {row["client"] for row in report["summary"] if row["mode"] != "bulk"} == {"fastprod", "confluent"}
    for one in report["rounds"]:
        assert one["records"] == 20_000
        assert one["seconds"] > 0
        assert one["cpu_us_per_record"] > 0
    for row in bulk[1:]:
        assert row["throughput_ratio"]["median"] > 0
        assert row["cpu_ratio"]["median"] > 0


def test_latencies_at_a_rate(kafka_cluster, topic):
    report = perf_json(
        "-b", kafka_cluster.bootstrap_servers, "-t", topic, "--compare", "java", "--num-records", "500",
        "--throughput", "1000", "-X", "compression.type=lz4", "--warmup", "100",
    )  # fmt: skip
    ours, java = report["rounds"]
    assert (ours["client"], java["client"], java["mode"]) == ("fastprod", "java", "callback")
    assert java["seconds"] > 0  # after a stall it catches up, in less than half a second
    assert java["latency_ms"]["samples"] == 500
    assert java["latency_ms"].keys() == ours["latency_ms"].keys()
    written = sum(high for _, high in kafka_cluster.watermarks(topic).values())
    assert written == 2 * 500 + 10 + 100 + 20 * (100 + 2) + 2  # warm-ups: once for us, 20 times for Java


@pytest.mark.usefixtures("kafka_available")
def test_login_and_encryption(topic, tmp_path):
    word = 'a "strong" pass\\word, é'
    with KafkaCluster(tls=True, users={"ann": word}) as cluster:
        options = cluster.client_config("ann", tls=True)
        file = tmp_path / "client.properties"
        file.write_text("".join(f"{name}={value}\n" for name, value in options.items()))
        report = perf_json(
            "-F", str(file), "-t", topic, "--compare", "java", "--num-records", "100", "--throughput", "1000"
        )  # fmt: skip
    assert [one["client"] for one in report["rounds"]] == ["fastprod", "java"]
    assert word not in json.dumps(report, ensure_ascii=False)


@pytest.mark.parametrize("call", [TUNED, STARTED])
def test_a_record_that_the_broker_refuses(kafka_cluster, topic, call):
    kafka_cluster.create_topic(topic, config={"max.message.bytes": 200})
    conf = _load.full_configuration({"bootstrap.servers": kafka_cluster.bootstrap_servers})
    target = _load.Target(conf, topic)
    target.open(1)
    load = _load.Load(topic, 5, _load.make_block(5, 1000))
    with pytest.raises(_load.DeliveryError, match=f"^java {call} failed: .*RecordTooLargeException"):
        _load.measure(JavaRunner(), "bulk", call, load, conf, target)


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ctrl_c_ends_java(kafka_cluster, topic):
    program = "import sys; sys.argv[0] = 'fastprod'; from fastprod.cli import main; main()"
    with start(
        program, "perf", "-b", kafka_cluster.bootstrap_servers, "-t", topic, "--compare", "java", "--mode", "bulk",
        "--num-records", "2000000", "--format", "json",
    ) as process:  # fmt: skip
        assert wait_until(lambda: process.poll() is not None or machines(topic))
        process.send_signal(signal.SIGINT)
        output, errors = process.finish()
    assert (process.returncode, errors) == (130, "")
    assert machines(topic) == []
    report = json.loads(output)
    assert report["interrupted"] is True
    assert [one["client"] for one in report["rounds"]] == ["fastprod"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_java_does_not_outlive_us(kafka_cluster, topic, tmp_path):
    kafka_cluster.create_topic(topic)
    program = f"""if True:
        import sys, tempfile
        from fastprod.cli import _load
        from fastprod.cli._java_load import TUNED, JavaRunner

        tempfile.tempdir = sys.argv[1]
        conf = _load.full_configuration({{"bootstrap.servers": {kafka_cluster.bootstrap_servers!r}}})
        load = _load.Load({topic!r}, 1_000_000, _load.make_block(10, 10), rate=10.0)
        JavaRunner().run("callback", TUNED, load, conf, 1, print)
    """
    with start(program, str(tmp_path)) as process:
        assert wait_until(lambda: sum(high for _, high in kafka_cluster.watermarks(topic).values()) > 5)
        assert len(machines(topic)) == 2
        assert list(tmp_path.iterdir())
        process.kill()
        process.communicate()
        assert wait_until(lambda: not machines(topic) and not list(tmp_path.iterdir()))
