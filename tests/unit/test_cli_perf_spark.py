"""`fastprod perf spark` before Spark starts and after it has ended. No figure is judged."""

import os
import re
import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner, Result

from fastprod.cli import _load, _spark_figures, _spark_loads, main, perf_spark
from fastprod.cli._spark_loads import OURS, RIVALS, TOPICS
from fastprod.cli.perf_spark import Job, Round
from fastprod.testing import MockCluster

DEFAULTS, TUNED = RIVALS["spark-sink"]
(FOREACH,) = RIVALS["foreach"]


def perf_spark_command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["perf", "spark", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "flink"], "unknown contender 'flink'; known: write, spark-sink, foreach, hand-over, once"),
        (["--compare", "foreach,"], "unknown contender ''"),
        (["--topics", "20", "--compare", "foreach"], "unknown contender 'foreach'; known: plain, spark-sink"),
        (["--topics", "1"], "not in the range"),
        (["--topics", "5", "--rows", "orders"], "orders go to one topic: leave --topics out, or --rows"),
        (["--rows", "orders", "--compare", "foreach"], "known: write, to-json, spark-sink, avro"),
        (["--num-records", "many"], "'many' is not a valid integer"),
        (["--num-records", "0"], "not in the range"),
        (["--cores", "0"], "not in the range"),
        (["--tasks", "0"], "not in the range"),
        (["--rounds", "0"], "not in the range"),
        (["--warmup", "-1"], "not in the range"),
        (["--record-size", "-1"], "not in the range"),
        (["--format", "xml"], "'xml' is not one of"),
        (["--real", "-b", "127.0.0.1:1"], "--real starts a broker of its own"),
        (["-X", "novalue"], "write it as key=value"),
        (["-X", "no.such.option=1"], 'No such configuration property: "no.such.option"'),
        (["-X", "transactional.id=me"], "runs no transactions"),
        (["--conf", "spark.driver.memory"], "write it as key=value"),
        (
            ["--compare", "spark-sink", "-X", "batch.num.messages=9"],
            "spark-sink cannot be compared with batch.num.messages: its producer has no option that says the same",
        ),
        (["something"], "unexpected extra argument"),
    ],
)
def test_usage_errors(arguments, message):
    result = perf_spark_command(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)


def test_options_in_the_wrong_place():
    result = CliRunner().invoke(main, ["perf", "--num-records", "5", "spark"])
    assert result.exit_code == 2
    assert "options of perf spark go behind that word" in result.stderr


def test_perf_knows_no_other_word():
    result = CliRunner().invoke(main, ["perf", "flink"])
    assert result.exit_code == 2
    assert "No such command 'flink'" in result.stderr


def test_help():
    assert "spark" in CliRunner().invoke(main, ["perf", "--help"]).output
    text = " ".join(perf_spark_command("--help").output.split())
    assert "one row in five" in text
    assert "write,spark-sink,foreach,hand-over" in text.replace(" ", "")  # lines may end at a hyphen


def test_no_broker(monkeypatch):
    monkeypatch.setattr(_load, "CONNECT_S", 1.0)
    result = perf_spark_command("-b", "127.0.0.1:1", "-X", "sasl.password=hunter2")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: no broker answers at 127.0.0.1:1 within 1 s (")
    assert result.stderr.count("\n") == 1
    assert "hunter2" not in result.output


@pytest.fixture
def bare_machine(monkeypatch, tmp_path):
    """Nothing but Python: no Java, no Maven, nothing fetched earlier."""
    for name in ("JAVA_HOME", "KAFKA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("bare_machine")
def test_without_maven():
    result = perf_spark_command("--compare", "spark-sink", "-b", "127.0.0.1:1")
    assert result.exit_code == 2
    assert re.fullmatch(
        r"Error: spark-sink cannot be compared: there is no Kafka sink for Spark here yet: install Maven [^\n]*\n",
        result.stderr,
    )


@pytest.mark.usefixtures("bare_machine")
def test_without_java_for_a_broker():
    result = perf_spark_command("--compare", "foreach")
    assert result.exit_code == 2
    assert re.fullmatch(r"Error: [^\n]*there is no 'java' on the PATH; install a JDK[^\n]*\n", result.stderr)


@pytest.mark.usefixtures("bare_machine")
def test_without_java_for_spark():
    with MockCluster(1, topics={"fastprod-perf": 1}) as cluster:
        result = perf_spark_command("-b", cluster.bootstrap_servers)
    assert result.exit_code == 2
    assert re.fullmatch(r"Error: Spark needs Java 17 or newer, and there is none: [^\n]*\n", result.stderr)


def test_what_the_sink_is_given(monkeypatch):
    given = []
    monkeypatch.setattr(_spark_loads, "_sink", lambda df, topic, options: given.append(options))
    conf = _load.full_configuration({"bootstrap.servers": "b:1", "linger.ms": 7, "sticky.batch.size": 5000})
    DEFAULTS.send(None, "t", conf)
    TUNED.send(None, "t", conf)
    same = {"bootstrap.servers": "b:1", "acks": "all", "enable.idempotence": "true"}
    assert given == [same, {**same, "linger.ms": "7", "batch.size": "1000000"}]


# ---- figures


def job(*done: Round) -> Job:
    ways = [OURS, *{one.way: 0 for one in done if one.way is not OURS}]
    return Job("t", {}, 1000, 10, 2, 2, 1, 2, ways, done=list(done))


def test_ratios_are_taken_round_by_round():
    rounds = job(
        Round(OURS, 1, 1000, 1.0, 0.002, 0.001),
        Round(DEFAULTS, 1, 1000, 2.0, 0.004, None),
        Round(FOREACH, 1, 200, 4.0, None, None),
        Round(FOREACH, 2, 200, 2.0, None, None),
        Round(DEFAULTS, 2, 1000, 1.0, 0.008, None),
        Round(OURS, 2, 1000, 0.25, 0.002, 0.003),
    ).done
    ours, sink, loop = perf_spark._summarise(rounds)
    assert [row["call"] for row in (ours, sink, loop)] == [OURS.call, DEFAULTS.call, FOREACH.call]
    assert ours["records_per_s"] == {"median": 2500, "min": 1000, "max": 4000}
    assert ours["cpu_us_per_record"] == {"median": 2, "min": 2, "max": 2}
    assert ours["broker_cpu_us_per_record"] == {"median": 2, "min": 1, "max": 3}
    assert ours["throughput_ratio"] is None
    assert sink["throughput_ratio"] == {"median": 3, "min": 2, "max": 4}
    assert sink["broker_cpu_us_per_record"] is None
    assert loop["throughput_ratio"] == {"median": 30, "min": 20, "max": 40}
    assert loop["cpu_us_per_record"] is None
    assert (ours["records"], loop["records"]) == (1000, 200)


def test_an_interrupted_round_is_not_compared():
    rounds = job(Round(DEFAULTS, 2, 1000, 2.0, None, None), Round(OURS, 1, 1000, 1.0, None, None)).done
    ours, sink = perf_spark._summarise(rounds)
    assert (ours["rounds"], sink["rounds"], sink["throughput_ratio"]) == (1, 1, None)


def test_the_slow_loop_gets_fewer_rows_and_at_least_one():
    few = Job("t", {}, 3, 10, 2, 2, 1, 1, [OURS, FOREACH])
    assert [few.records_of(way) for way in few.ways] == [3, 1]
    many = Job("t", {}, 1000, 10, 2, 2, 1, 1, [OURS, FOREACH])
    assert [many.records_of(way) for way in many.ways] == [1000, 200]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_cpu_of_a_process_and_all_that_it_started():
    program = """if True:
        import subprocess, sys, time
        work = "import time\\nwhile time.process_time() < 0.3: pass\\n"
        subprocess.run([sys.executable, "-c", work])
        running = subprocess.Popen([sys.executable, "-c", work + "print(flush=True); time.sleep(3600)"])
        time.sleep(3600)
    """
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    try:
        child.stdout.readline()  # its child works no more, and another has ended
        processes = _spark_figures.running_processes()
        assert processes[child.pid][0] == os.getpid()
        assert _spark_figures.cpu_below(child.pid, processes) >= 0.5
        clock = _spark_figures.Clock(child.pid, broker_is_ours=False)
        clock.start()
        seconds, cpu, broker = clock.stop()
        assert seconds > 0
        assert 0 <= cpu < 0.3
        assert broker is None
    finally:
        os.killpg(child.pid, 9)
        child.communicate()


# ---- many topics


def test_figures_of_many_topics_are_shown_only_for_them():
    (plain,) = TOPICS.rivals["plain"]
    done = [
        Round(TOPICS.ours, 1, 1000, 1.0, None, None, 1.1, 300.0, 2),
        Round(plain, 1, 1000, 2.0, None, None, 1.9, 20.0, None),
    ]
    ours, other = perf_spark._summarise(done, TOPICS)
    assert ours["task_ratio"] == {"median": 1.1, "min": 1.1, "max": 1.1}
    assert (ours["records_per_batch"]["median"], ours["connections"]["median"]) == (300, 2)
    assert other["connections"] is None
    assert other["throughput_ratio"]["median"] == 2
    (values,) = perf_spark._summarise([Round(OURS, 1, 1000, 1.0, None, None)])
    assert "task_ratio" not in values


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_connections_of_other_processes_are_counted():
    program = """if True:
        import socket, sys
        kept = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(3)]
        print(flush=True)
        sys.stdin.read()
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        own = socket.create_connection(("127.0.0.1", port))
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        with _spark_figures.most_connections(f"127.0.0.1:{port},localhost:1") as found:
            child.stdout.readline()
            assert found == []
        child.communicate()
        own.close()
    assert found == [3]
