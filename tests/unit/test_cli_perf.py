"""`fastprod perf`: what it prints, what it passes on and how it ends. No figure is judged."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from programs import Program, run, started, wait_until

import fastprod
from fastprod.cli import MISSING, _java_load, _load, main
from fastprod.cli._figures import SECRET
from fastprod.cli._java_load import DEFAULTS, STARTED, TUNED, JavaRunner, java_settings, properties
from fastprod.cli.perf import summary_line
from fastprod.testing import MockCluster, MockClusterProcess

LINE = re.compile(
    r"(\d+) records sent, \d+\.\d records/sec \(\d+\.\d\d MB/sec\), \d+\.\d\d ms avg latency, "
    r"\d+\.\d\d ms max latency, \d+ ms 50th, \d+ ms 95th, \d+ ms 99th, \d+ ms 99\.9th\.\n"
)
ROUND = {
    "round", "mode", "client", "call", "records", "seconds", "records_per_s", "mb_per_s", "cpu_us_per_record",
    "latency_ms", "interrupted",
}  # fmt: skip
LATENCY = {"avg", "max", "p50", "p95", "p99", "p999"}
ROOT = Path(fastprod.__file__).parent.parent
PROGRAM = "import sys; sys.argv[0] = 'fastprod'; from fastprod.cli import main; main()"


@pytest.fixture(scope="module")
def cluster():
    with MockClusterProcess(1, topics={"fastprod-perf": 3, "other": 1}) as mock:
        yield mock


def perf(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["perf", "--warmup", "10", *arguments])


def perf_json(*arguments: str) -> dict:
    result = perf(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@contextmanager
def start(*arguments: str) -> Iterator[Program]:
    with started("-c", PROGRAM, *arguments, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        yield process


# ---- plain runs


@pytest.mark.parametrize("mode", _load.MODES)
def test_the_summary_line_is_that_of_kafka_producer_perf_test(cluster, mode):
    before = _written(cluster)
    result = perf("-b", cluster.bootstrap_servers, "--mode", mode, "--num-records", "2500")
    assert result.exit_code == 0, result.output
    assert LINE.fullmatch(result.stdout).group(1) == "2500"
    assert result.stderr == ""
    assert _written(cluster) - before == 2500 + 10 + 3  # the warm-up, and one per partition


def test_the_line_word_for_word():
    latencies = sorted([10.0] * 94 + [20.0] * 4 + [30.0, 40.0])
    done = _load.Round("fastprod", "bulk", "produce_many", 1_000_000, 4.0, 1.0, latencies)
    assert summary_line(done, 100) == (
        "1000000 records sent, 250000.0 records/sec (23.84 MB/sec), 10.90 ms avg latency, "
        "40.00 ms max latency, 10 ms 50th, 20 ms 95th, 40 ms 99th, 40 ms 99.9th."
    )


def test_a_run_without_broker_starts_one_of_its_own():
    with start("perf", "--num-records", "3000", "-t", "mine", "--partitions", "2") as process:
        output, errors = process.finish()
    assert (process.returncode, errors) == (0, "")
    assert LINE.fullmatch(output).group(1) == "3000"


def test_a_line_per_mode_and_round(cluster):
    result = perf(
        "-b", cluster.bootstrap_servers, "--num-records", "100", "--mode", "bulk", "--mode", "single",
        "--rounds", "2",
    )  # fmt: skip
    assert [line.split(": ")[0] for line in result.stdout.splitlines()] == ["bulk", "single"] * 2


def test_json(cluster):
    report = perf_json("-b", cluster.bootstrap_servers, "--num-records", "1500", "--record-size", "7")
    assert report["fastprod"] == fastprod.__version__
    assert report["cluster"] == {
        "bootstrap": cluster.bootstrap_servers,
        "mock": False,
        "topic": "fastprod-perf",
        "partitions": 3,
    }
    assert report["load"] == {
        "num_records": 1500,
        "record_size": 7,
        "keys": 0,
        "throughput": None,
        "warmup": 10,
        "rounds": 1,
    }
    assert report["config"]["acks"] == "all"
    assert report["config"]["linger.ms"] == 5
    assert report["config"]["enable.idempotence"] is True
    (one,) = report["rounds"]
    assert set(one) == ROUND
    assert one["latency_ms"].keys() == LATENCY | {"samples"}
    assert one["latency_ms"]["samples"] == 2  # one in 1,000
    (row,) = report["summary"]
    assert (row["client"], row["mode"], row["throughput_ratio"]) == ("fastprod", "bulk", None)
    assert report["interrupted"] is False


def test_every_latency_is_measured_in_callback_mode(cluster):
    report = perf_json("-b", cluster.bootstrap_servers, "--num-records", "1500", "--mode", "callback")
    assert report["rounds"][0]["latency_ms"]["samples"] == 1500


def test_bulk_samples_survive_a_full_buffer(cluster):
    # Delivery callbacks that wait for poll() must not make the bulk call refuse records.
    report = perf_json("-b", cluster.bootstrap_servers, "--num-records", "60000", "-X", "buffer.memory=70000")
    assert report["rounds"][0]["latency_ms"]["samples"] == 60


def test_paced(cluster):
    report = perf_json("-b", cluster.bootstrap_servers, "--num-records", "300", "--throughput", "1000")
    (one,) = report["rounds"]
    assert one["mode"] == "callback"
    assert one["latency_ms"]["samples"] == 300
    assert one["seconds"] > 0.29  # the last record is due then: not a matter of speed


def test_keys_decide_the_partition():
    with MockClusterProcess(1, topics={"keyed": 4}) as mock:
        result = perf(
            "-b",
            mock.bootstrap_servers,
            "-t",
            "keyed",
            "--keys",
            "3",
            "--num-records",
            "500",
            "--warmup",
            "0",
        )
        assert result.exit_code == 0, result.output
        counts: dict[bytes | None, int] = {}
        homes: dict[bytes | None, set[int]] = {}
        for message in mock.records("keyed"):
            counts[message.key()] = counts.get(message.key(), 0) + 1
            homes.setdefault(message.key(), set()).add(message.partition())
    assert counts == {None: 4, b"key-0": 167, b"key-1": 167, b"key-2": 166}  # None: one per partition
    assert all(len(places) == 1 for key, places in homes.items() if key is not None)


@pytest.mark.parametrize(("records", "keys"), [(10, 3), (250_000, 7), (250_000, 150_000), (5, 9)])
def test_keys_take_turns_across_blocks(records, keys):
    load = _load.Load("t", records, _load.make_block(records, 4, keys))
    sent = [key for block in load.blocks() for key in block.keys]
    assert sent == [b"key-%d" % (number % keys) for number in range(records)]


# ---- comparisons


def test_compare_shows_every_client_and_call(cluster):
    result = perf("-b", cluster.bootstrap_servers, "--compare", "confluent", "--num-records", "300", "--rounds", "2")
    assert result.exit_code == 0, result.output
    for word in ("bulk", "single", "callback", "fastprod", "confluent", "produce_many", "produce_batch"):
        assert word in result.stdout
    assert re.search(r"\d+\.\d\dx", result.stdout)


def test_compare_json_has_every_round(cluster):
    before = _written(cluster)
    report = perf_json(
        "-b", cluster.bootstrap_servers, "--compare", "confluent", "--num-records", "200", "--rounds", "2",
        "--keys", "5",
    )  # fmt: skip
    ways = [
        ("bulk", "fastprod", "produce_many"),
        ("bulk", "confluent", "produce"),
        ("bulk", "confluent", "produce+poll"),
        ("bulk", "confluent", "produce_batch"),
        ("single", "fastprod", "produce"),
        ("single", "confluent", "produce"),
        ("callback", "fastprod", "produce"),
        ("callback", "confluent", "produce"),
    ]
    rounds = report["rounds"]
    assert [(one["mode"], one["client"], one["call"]) for one in rounds] == ways * 2
    assert [one["round"] for one in rounds] == [1] * 8 + [2] * 8
    assert all(set(one) == ROUND and one["records"] == 200 for one in rounds)
    assert [(row["mode"], row["client"], row["call"]) for row in report["summary"]] == ways
    for row in report["summary"]:
        assert (row["throughput_ratio"] is None) == (row["client"] == "fastprod")
        assert (row["cpu_ratio"] is None) == (row["client"] == "fastprod")
        assert row["records_per_s"].keys() == {"median", "min", "max"}
    assert _written(cluster) - before == 16 * (200 + 10 + 3)


def test_compare_the_modes_asked_for(cluster):
    report = perf_json(
        "-b", cluster.bootstrap_servers, "--compare", "confluent", "--num-records", "50", "--rounds", "1",
        "--mode", "single",
    )  # fmt: skip
    assert [one["mode"] for one in report["rounds"]] == ["single", "single"]


def test_compare_latencies_at_a_rate(cluster):
    arguments = ("-b", cluster.bootstrap_servers, "--compare", "confluent", "--num-records", "100")
    arguments += ("--rounds", "1", "--throughput", "2000")
    report = perf_json(*arguments)
    assert [one["client"] for one in report["rounds"]] == ["fastprod", "confluent"]
    assert all(one["latency_ms"]["samples"] == 100 for one in report["rounds"])
    assert all(row["latency_ms"].keys() == LATENCY for row in report["summary"])
    result = perf(*arguments)
    assert "99.9th" in result.stdout


def test_confluent_keeps_going_when_its_queue_is_full(cluster):
    report = perf_json(
        "-b", cluster.bootstrap_servers, "--compare", "confluent", "--num-records", "3000", "--rounds", "1",
        "-X", "queue.buffering.max.messages=50", "--warmup", "0",
    )  # fmt: skip
    assert all(one["records"] == 3000 for one in report["rounds"])


# ---- options of the clients


def test_options_of_librdkafka_go_to_all_and_ours_to_fastprod(cluster, monkeypatch, tmp_path):
    seen = {}
    for runner in (_load.OURS, _load.RUNNERS["confluent"]):
        plain = runner.connect

        def connect(conf, plain=plain, name=runner.name):
            seen[name] = {key: value for key, value in conf.items() if key != "error_cb"}
            return plain(conf)

        monkeypatch.setattr(runner, "connect", connect)
    theirs = []
    monkeypatch.setattr(
        _load.confluent_kafka,
        "Producer",
        lambda conf, plain=_load.confluent_kafka.Producer: theirs.append(conf) or plain(conf),
    )
    file = tmp_path / "client.properties"
    file.write_text("# comment\n\nlinger.ms = 9\nclient.id=from-file\n")
    report = perf_json(
        "-F", str(file), "-X", "linger.ms=7", "-X", "sticky.batch.size=4096", "-X", "partitioner=round_robin",
        "-X", "max.request.size=2000000", "-b", cluster.bootstrap_servers, "--compare", "confluent",
        "--mode", "single", "--num-records", "50", "--rounds", "1",
    )  # fmt: skip
    assert report["config"]["linger.ms"] == "7"  # -X beats -F
    assert seen["fastprod"] == seen["confluent"]
    assert seen["fastprod"]["sticky.batch.size"] == "4096"
    last = theirs[-1]
    assert (last["linger.ms"], last["client.id"], last["message.max.bytes"]) == ("7", "from-file", "2000000")
    assert last["enable.idempotence"] is True
    assert not {"sticky.batch.size", "partitioner", "max.request.size"} & set(last)


def test_idempotence_follows_the_other_options():
    assert "enable.idempotence" not in _load.full_configuration({"acks": "1"})
    assert _load.full_configuration({"enable.idempotence": "false"})["enable.idempotence"] == "false"


def test_brokers_may_come_as_an_option(cluster):
    report = perf_json("-X", f"bootstrap.servers={cluster.bootstrap_servers}", "--num-records", "10")
    assert report["cluster"]["mock"] is False


def test_secrets_are_not_shown(cluster):
    report = perf_json("-b", cluster.bootstrap_servers, "--num-records", "10", "-X", "sasl.password=hunter2")
    assert report["config"]["sasl.password"] == "***"
    for name in ("ssl.key.pem", "ssl.keystore.password", "sasl.oauthbearer.client.secret", "sasl.username"):
        assert SECRET.search(name)


# ---- Java, without starting it


def test_java_gets_what_the_others_get():
    conf = _load.full_configuration(
        {
            "bootstrap.servers": "a:1,b:2",
            "linger.ms": "7",
            "compression.type": "zstd",
            "buffer.memory": "70000",
            "max.request.size": "2000000",
            "delivery.timeout.ms": "9000",
            "batch.size": "5000",  # of one of its two calls
            "sticky.batch.size": "4096",  # fastprod's alone
        }
    )
    assert java_settings(conf) == {
        "acks": "all",
        "bootstrap.servers": "a:1,b:2",
        "buffer.memory": "70000",
        "compression.type": "zstd",
        "delivery.timeout.ms": "9000",
        "enable.idempotence": "true",
        "linger.ms": "7",
        "max.request.size": "2000000",
    }


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"acks": "1"}, "enable.idempotence", "false"),  # Java's default is true
        ({"enable.idempotence": "false"}, "enable.idempotence", "false"),
        ({"queue.buffering.max.ms": "3.0"}, "linger.ms", "3"),
        ({"compression.codec": "lz4"}, "compression.type", "lz4"),
        ({"security.protocol": "sasl_ssl"}, "security.protocol", "SASL_SSL"),
        ({"ssl.endpoint.identification.algorithm": "none"}, "ssl.endpoint.identification.algorithm", ""),
        (
            {"partitioner": "round_robin"},
            "partitioner.class",
            "org.apache.kafka.clients.producer.RoundRobinPartitioner",
        ),
        ({"ssl.ca.location": __file__}, "ssl.truststore.location", __file__),
        ({"ssl.ca.location": __file__}, "ssl.truststore.type", "PEM"),
    ],
)
def test_an_option_for_java(given, name, value):
    assert java_settings(_load.full_configuration(given))[name] == value


def test_a_login_for_java():
    given = {"sasl.mechanisms": "PLAIN", "sasl.username": "ann", "sasl.password": 'a"b\\c'}
    assert java_settings(given)["sasl.jaas.config"] == (
        'org.apache.kafka.common.security.plain.PlainLoginModule required username="ann" password="a\\"b\\\\c";'
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"linger.ms": "0.5"}, "linger.ms=0.5"),
        ({"queue.buffering.max.messages": "9"}, "queue.buffering.max.messages"),
        ({"partitioner": "murmur2_random"}, "partitioner=murmur2_random"),
        ({"sasl.mechanism": "GSSAPI"}, "sasl.mechanism=GSSAPI"),
        ({"ssl.ca.location": "/no/such"}, "ssl.ca.location=/no/such"),
        ({"ssl.key.password": "hunter2"}, "ssl.key.password"),
    ],
)
def test_an_option_that_java_lacks_is_named(given, named):
    with pytest.raises(_load.Unfit, match=f"^java cannot be compared with {re.escape(named)}[:,]") as raised:
        java_settings(given)
    assert "hunter2" not in str(raised.value)


def test_properties_as_java_reads_them():
    assert properties({"b": "x,1/y-z.9", "a": ' "\\é😀'}) == (
        "a=\\u0020\\u0022\\u005c\\u00e9\\ud83d\\ude00\nb=x,1/y-z.9\n"
    )


@pytest.fixture
def imaginary_java(monkeypatch):
    monkeypatch.setattr("fastprod.testing.kafka.find_kafka", lambda: ("java", "jars/*"))
    monkeypatch.setattr("fastprod.testing._java.java_program", lambda name="java": name)
    monkeypatch.setattr(_java_load, "_run_briefly", lambda command, folder: None)


@pytest.mark.usefixtures("imaginary_java")
def test_secrets_are_in_a_private_file_only(tmp_path):
    conf = {"sasl.mechanism": "PLAIN", "sasl.username": "ann", "sasl.password": "hunter2"}
    load = _load.Load("t", 5, _load.make_block(5, 10))
    tuned, defaults = (JavaRunner()._prepare(tmp_path, call, load, conf) for call in (TUNED, DEFAULTS))
    assert tuned == defaults
    assert "hunter2" not in " ".join(tuned)
    file = tmp_path / "client.properties"
    assert "hunter2" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("imaginary_java")
@pytest.mark.parametrize(("call", "batch"), [(TUNED, "1000000"), (DEFAULTS, None), (STARTED, "1000000")])
def test_java_sends_with_our_batches_and_with_its_own(tmp_path, call, batch):
    JavaRunner()._prepare(tmp_path, call, _load.Load("t", 5, _load.make_block(5, 10)), {})
    lines = dict(line.split("=") for line in (tmp_path / "client.properties").read_text().splitlines())
    assert lines.get("batch.size") == batch


@pytest.mark.parametrize(
    ("size", "conf", "ours"),
    [(100, {}, False), (2000, {}, True), (100, {"compression.type": "lz4"}, True)],
)
def test_values_for_java(tmp_path, size, conf, ours):
    load = _load.Load("t", 5000, _load.make_block(5000, size))
    option = JavaRunner()._values(tmp_path, load, conf)
    if ours:
        assert option == f"--payload-file={tmp_path / 'values.txt'}"
        assert set((tmp_path / "values.txt").read_bytes().splitlines()) == set(load.block.values)
    else:
        assert option == f"--record-size={size}"


@pytest.mark.usefixtures("imaginary_java")
def test_java_as_started_is_the_plain_program(tmp_path):
    load = _load.Load("t", 5, _load.make_block(5, 10), warmup=7)
    command = JavaRunner()._prepare(tmp_path, STARTED, load, {})
    at = command.index("-cp")
    assert command[at + 1 : at + 5] == [
        "jars/*", "org.apache.kafka.tools.ProducerPerformance", "--num-records=5", "--throughput=-1",
    ]  # fmt: skip
    assert "interceptor" not in (tmp_path / "client.properties").read_text()


def test_java_has_bulk_calls_or_a_rate():
    java = JavaRunner()
    assert [java.ways(mode, None) for mode in _load.MODES] == [(TUNED, DEFAULTS, STARTED), (), ()]
    assert [java.ways(mode, 9.0) for mode in ("single", "callback")] == [(), (TUNED,)]


def test_what_java_prints():
    said = (
        "1002 records sent, 9.0 records/sec (0.00 MB/sec), ...\nclock 1002 5000000 7000000\n"
        "clock 502 2000000000 1500000000\n"
        "502 records sent, 1.0 records/sec (0.00 MB/sec), 9.00 ms avg latency, 9.00 ms max latency, "
        "9 ms 50th, 9 ms 95th, 9 ms 99th, 9 ms 99.9th.\n"
        "500 steady state records sent, 250.125063 records/sec (0.02 MB/sec), 1.25 ms avg latency, "
        "8.00 ms max latency, 1 ms 50th, 2 ms 95th, 3 ms 99th, 7 ms 99.9th.\n"
    )
    block = _load.make_block(500, 10)
    done = _load.Round("java", "callback", TUNED, 500, 0.0, 0.0)
    _java_load._read(said, done, _load.Load("t", 500, block, rate=250.0))
    assert (done.seconds, done.cpu_seconds, done.warmup) == (2.0, 1.5, 1004)
    assert done.latency() == {"samples": 500, "avg": 1.25, "max": 8.0, "p50": 1, "p95": 2, "p99": 3, "p999": 7}
    with pytest.raises(_load.DeliveryError, match="told no figures: hello"):
        _java_load._read("hello\n", done, _load.Load("t", 500, block))


def test_what_java_prints_as_started():
    said = (
        "300 records sent, 60.0 records/sec (0.00 MB/sec), 9.00 ms avg latency, 9.00 ms max latency.\n"
        "500 records sent, 250.000000 records/sec (0.02 MB/sec), 1.25 ms avg latency, 8.00 ms max latency, "
        "1 ms 50th, 2 ms 95th, 3 ms 99th, 7 ms 99.9th.\n"
    )
    load = _load.Load("t", 500, _load.make_block(500, 10))
    done = _load.Round("java", "bulk", STARTED, 500, 0.0, 1.0)
    _java_load._read_summary(said, done, load)
    assert (done.rate, done.cpu_us, done.warmup) == (250.0, 2000.0, 0)
    with pytest.raises(_load.DeliveryError, match="told no figures: 300 records sent"):
        _java_load._read_summary(said.splitlines()[0], done, load)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "print('a.b.TimeoutException: too late', flush=True); time.sleep(60)",
            "failed: a.b.TimeoutException: too late",
        ),
        ("print('Caused by: x\\n\\tat y(z)'); sys.exit(3)", "ended with status 3: Caused by: x"),
        ("os.kill(os.getpid(), 9)", "ended with status 9: "),
    ],
)
def test_java_in_trouble(tmp_path, program, message):
    log = tmp_path / "log.txt"
    command = [sys.executable, "-c", "import os, sys, time; " + program]
    with (
        pytest.raises(_load.DeliveryError, match=f"^java {TUNED} {re.escape(message)}$"),
        _java_load._kept(command, tmp_path, log) as machine,
    ):
        _java_load._watch(machine, log, TUNED)
    assert machine.returncode is not None


# ---- wrong usage


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compare", "rust"], "unknown client 'rust'; known: confluent, java"),
        (["--compare", "confluent,"], "known: confluent"),
        (["--compare", "java"], "java does not work with mock brokers: add -b, or --real"),
        (["--compare", "java", "--real", "--keys", "3"], "java cannot be compared with --keys"),
        (["--compare", "java", "--real", "--record-size", "0"], "java cannot be compared with --record-size 0"),
        (["--compare", "java", "--real", "-X", "batch.num.messages=9"], "compared with batch.num.messages: its"),
        (["--real", "-b", "127.0.0.1:1"], "--real starts a broker of its own"),
        (["--real", "-X", "bootstrap.servers=127.0.0.1:1"], "--real starts a broker of its own"),
        (["--mode", "fast"], "'fast' is not one of"),
        (["--format", "xml"], "'xml' is not one of"),
        (["--num-records", "0"], "not in the range"),
        (["--throughput", "0"], "above 0"),
        (["--throughput", "10", "--mode", "bulk"], "use --mode callback or single"),
        (["-X", "novalue"], "write it as key=value"),
        (["-X", "no.such.option=1"], 'No such configuration property: "no.such.option"'),
        (["-X", "buffer.memory=lots"], "buffer.memory"),
        (["-X", "linger.ms=soon"], "linger.ms"),
        (["-X", "transactional.id=me"], "runs no transactions"),
        (["-F", "/no/such/file"], "cannot read /no/such/file"),
        (["-t", "a b"], "topic name 'a b'"),
    ],
)
def test_usage_errors(arguments, message):
    result = perf("--num-records", "10", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("arguments", [["--real"], ["--compare", "java", "-b", "127.0.0.1:1"]])
def test_without_java(monkeypatch, arguments):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    result = perf(*arguments)
    assert result.exit_code == 2
    assert re.fullmatch(r"Error: [^\n]*there is no 'java' on the PATH; install a JDK[^\n]*\n", result.stderr)


def test_a_wrong_line_of_the_file_is_named_but_not_shown(tmp_path):
    file = tmp_path / "f"
    file.write_text("acks=all\nsasl.password hunter2\n")
    result = perf("-F", str(file))
    assert result.exit_code == 2
    assert "line 2" in result.stderr
    assert "hunter2" not in result.output


def test_a_value_without_name_is_not_shown():
    result = perf("-X", "sasl.password:hunter2")
    assert result.exit_code == 2
    assert "hunter2" not in result.output


# ---- trouble


def test_no_broker(monkeypatch):
    monkeypatch.setattr(_load, "CONNECT_S", 5.0)  # in which the reason must be known
    result = perf("-b", "127.0.0.1:1", "-X", "sasl.password=hunter2")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: no broker answers at 127.0.0.1:1 within 5 s (")
    assert "refused" in result.stderr
    assert result.stderr.count("\n") == 1
    assert "hunter2" not in result.output


def test_no_broker_from_a_shell():
    with start("perf", "-b", "127.0.0.1:1") as process:
        output, errors = process.finish()
    assert (process.returncode, output) == (2, "")
    assert re.fullmatch(r"Error: no broker answers at 127\.0\.0\.1:1 [^\n]*\n", errors)


def test_a_topic_that_cannot_be_created(monkeypatch):
    monkeypatch.setattr(_load, "ANSWER_S", 1.0)
    with MockCluster(1) as mock:  # mock brokers do not answer the admin API
        result = perf("-b", mock.bootstrap_servers, "-t", "missing")
    assert result.exit_code == 2
    assert "there is no topic 'missing'" in result.stderr


def test_a_missing_topic_is_created(monkeypatch):
    with MockClusterProcess(1) as mock:

        class Admin(_load.AdminClient):
            def create_topics(self, new_topics, **arguments):
                (topic,) = new_topics
                assert topic.replication_factor == -1  # as the broker has it
                mock.create_topic(topic.topic, topic.num_partitions)
                answer = Future()
                answer.set_result(None)
                return {topic.topic: answer}

        monkeypatch.setattr(_load, "AdminClient", Admin)
        report = perf_json("-b", mock.bootstrap_servers, "-t", "new", "--partitions", "6", "--num-records", "10")
        assert report["cluster"]["partitions"] == 6
        assert len(mock.watermarks("new")) == 6


@pytest.mark.parametrize("mode", _load.MODES)
def test_records_that_cannot_be_delivered(cluster, mode):
    result = perf("-b", cluster.bootstrap_servers, "--mode", mode, "--num-records", "5", "--record-size", "2000000")
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: fastprod produce")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("client", ["fastprod", "confluent"])
@pytest.mark.parametrize("mode", _load.MODES)
def test_records_that_the_broker_refuses(client, mode):
    runner = _load.OURS if client == "fastprod" else _load.RUNNERS[client]
    with MockClusterProcess(1, topics={"t": 1}) as mock:
        conf = _load.full_configuration({"bootstrap.servers": mock.bootstrap_servers})
        target = _load.Target(conf, "t")
        target.open(1)
        load = _load.Load("t", 20, _load.make_block(20, 10))
        plain = _load._Sender.send

        def send(self, *arguments):
            mock.push_errors("Produce", "TOPIC_AUTHORIZATION_FAILED")
            plain(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_load._Sender, "send", send)
            with pytest.raises(_load.DeliveryError, match=rf"\d+ of 20 records sent by {client} produce"):
                _load.measure(runner, mode, runner.calls[mode][0], load, conf, target)


def test_a_failure_keeps_the_rounds_before_it(cluster, monkeypatch):
    plain = _load.OURS.run
    calls = []

    def run(*arguments):
        calls.append(1)
        done = plain(*arguments)
        done.failed = len(calls) - 1
        return done

    monkeypatch.setattr(_load.OURS, "run", run)
    result = perf("-b", cluster.bootstrap_servers, "--num-records", "100", "--rounds", "3")
    assert result.exit_code == 1
    assert LINE.fullmatch(result.stdout)
    assert "1 of 100 records" in result.stderr


# ---- Ctrl-C


def _interrupted(records: int, *arguments: str) -> tuple[Program, str, str]:
    """The command with Ctrl-C once brokers have so many records, warm-up included, and what it has said."""
    with MockClusterProcess(1, topics={"fastprod-perf": 3}) as mock:
        with start("perf", "-b", mock.bootstrap_servers, "--warmup", "10", *arguments) as process:
            assert wait_until(lambda: process.poll() is not None or _written(mock) >= records)
            process.send_signal(signal.SIGINT)
            output, errors = process.finish()
        return process, output, errors


@pytest.mark.parametrize("mode", _load.MODES)
def test_ctrl_c_tells_what_was_done(mode):
    process, output, errors = _interrupted(1000, "--num-records", "1000000000", "--mode", mode)
    assert (process.returncode, errors) == (130, "")
    assert int(LINE.fullmatch(output).group(1)) > 0


def test_ctrl_c_while_paced():
    process, output, errors = _interrupted(100, "--throughput", "500", "--format", "json")
    assert (process.returncode, errors) == (130, "")
    report = json.loads(output)
    assert report["interrupted"] is True
    assert report["rounds"][0]["interrupted"] is True
    assert 0 < report["rounds"][0]["records"] < 1_000_000


def test_ctrl_c_in_a_comparison_leaves_whole_rounds():
    # The third client is at it, so the first two are done.
    process, output, errors = _interrupted(
        2 * (1000 + 10 + 3) + 500, "--compare", "confluent", "--rounds", "1000", "--num-records", "1000",
        "--format", "json",
    )  # fmt: skip
    assert (process.returncode, errors) == (130, "")
    report = json.loads(output)
    assert report["interrupted"] is True
    assert len(report["rounds"]) >= 2
    assert all(one["records"] == 1000 and not one["interrupted"] for one in report["rounds"])


# ---- the command itself


def test_version():
    result = CliRunner().invoke(main, ["--version"])
    assert result.output == f"fastprod, version {fastprod.__version__}\n"


def test_help_names_what_is_sampled():
    assert "perf" in CliRunner().invoke(main, ["--help"]).output
    text = " ".join(CliRunner().invoke(main, ["perf", "--help"]).output.split())
    assert "one in 1,000" in text
    assert "kafka-producer-perf-test" in text


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_extra(missing):
    program = f"import sys; sys.modules[{missing!r}] = None; from fastprod.cli import _load, main; main()"
    done = run("-c", program, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout, done.stderr) == (2, "", MISSING + "\n")


def _written(cluster: MockClusterProcess) -> int:
    return sum(high for _, high in cluster.watermarks("fastprod-perf").values())
