"""`fastprod perf spark` for real: Spark, its own sink and a broker, a few thousand rows. No figure is judged."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from hashlib import sha256

import pytest
from confluent_kafka import Consumer, TopicPartition
from programs import run, started, wait_until

from fastprod.cli._spark_loads import ORDERS, OURS, RIVALS, TOPICS
from fastprod.testing import KafkaCluster

DEFAULTS, TUNED = RIVALS["spark-sink"]
(FOREACH,) = RIVALS["foreach"]
(HAND_OVER,) = RIVALS["hand-over"]
COMMAND = ["-m", "fastprod", "perf", "spark"]


@pytest.fixture(scope="module")
def sink_available(kafka_available: None) -> None:
    """Skips the test where Maven cannot bring Spark's sink, or fails it if FASTPROD_REQUIRE_KAFKA is set."""
    from fastprod.testing._java import KafkaUnavailable, spark_sink_jars

    try:
        spark_sink_jars()
    except KafkaUnavailable as missing:
        if os.environ.get("FASTPROD_REQUIRE_KAFKA", "0") not in ("", "0"):
            pytest.fail(f"FASTPROD_REQUIRE_KAFKA is set, but {missing}", pytrace=False)
        pytest.skip(str(missing))


def perf_spark(*arguments: str) -> subprocess.CompletedProcess:
    return run(*COMMAND, *arguments)


def values(cluster: KafkaCluster, topic: str) -> Counter[bytes]:
    """How often each value lies in a topic, as a plain consumer reads it."""
    ends = {number: end for number, (_, end) in cluster.watermarks(topic).items()}
    consumer = Consumer(
        {"bootstrap.servers": cluster.bootstrap_servers, "group.id": "reader", "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(topic, number, 0) for number in ends])
    found: Counter[bytes] = Counter()
    deadline = time.monotonic() + 120
    while found.total() < sum(ends.values()):
        assert time.monotonic() < deadline
        for message in consumer.consume(10_000, timeout=1.0):
            assert message.error() is None
            found[message.value()] += 1
    consumer.close()
    return found


@pytest.mark.long
@pytest.mark.usefixtures("sink_available")
def test_side_by_side(kafka_cluster, topic):
    done = perf_spark(
        "-b", kafka_cluster.bootstrap_servers, "-t", topic, "--compare", "spark-sink,foreach,hand-over",
        "--num-records", "5000", "--rounds", "2", "--warmup", "1", "--partitions", "3", "--format", "json",
        "-X", "client.id=me", "--conf", "spark.sql.execution.arrow.maxRecordsPerBatch=700",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["cluster"] == {
        "bootstrap": kafka_cluster.bootstrap_servers,
        "embedded": False,
        "topic": topic,
        "partitions": 3,
    }
    assert report["load"] == {"num_records": 5000, "record_size": 100, "cores": 2, "tasks": 2, "warmup": 1, "rounds": 2}
    assert (report["config"]["acks"], report["config"]["linger.ms"]) == ("all", 5)
    assert report["interrupted"] is False
    ways = [OURS, DEFAULTS, TUNED, FOREACH, HAND_OVER]
    assert [(one["client"], one["call"]) for one in report["summary"]] == [(way.client, way.call) for way in ways]
    # In turn, each round begins with the next one.
    order = [way.call for way in ways]
    assert [one["call"] for one in report["rounds"]] == order[1:] + order[:1] + order[2:] + order[:2]
    for one in report["rounds"]:
        assert one["records"] == (1000 if one["client"] == "foreach" else 5000)
        assert one["records_per_s"] == pytest.approx(one["records"] / one["seconds"])
        assert one["broker_cpu_us_per_record"] is None  # not ours
        assert (one["cpu_us_per_record"] is not None) == (sys.platform == "linux")
    for row in report["summary"][1:]:
        assert row["throughput_ratio"]["median"] > 0
    # The rows of three writers in three rounds, the warm-up among them, and a fifth of them from the loop as well.
    expected = {
        (sha256(b"%d" % number).hexdigest() * 2)[:100].encode(): 9 + 3 * (number < 1000) for number in range(5000)
    }
    assert values(kafka_cluster, topic) == expected


@pytest.mark.long
@pytest.mark.usefixtures("sink_available")
def test_a_table_from_a_broker_of_its_own(topic):
    done = perf_spark(
        "--real", "-t", topic, "--num-records", "2000", "--rounds", "1", "--warmup", "0",
        "--compare", "spark-sink,foreach", "--record-size", "7", "--cores", "1", "--tasks", "3",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    rows = [re.split(r"\s*│\s*", line.strip("│\n ")) for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row[:2] for row in rows] == [[way.client, way.call] for way in (OURS, DEFAULTS, TUNED, FOREACH)]
    for row in rows[1:]:
        assert re.fullmatch(r"\d+\.\d\dx", row[-1])
    if sys.platform == "linux":
        assert all(re.fullmatch(r"\d+\.\d\d", row[4]) for row in rows)  # the broker's CPU
    caption = " ".join(done.stdout.split())
    assert "2,000 rows of 7 B (400 for foreach), 1 core for Spark" in caption


@pytest.mark.long
def test_rows_that_are_refused(kafka_cluster, topic):
    kafka_cluster.create_topic(topic, config={"max.message.bytes": 200})
    done = perf_spark(
        "-b", kafka_cluster.bootstrap_servers, "-t", topic, "--num-records", "50", "--record-size", "1000"
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(
        r"Error: fastprod spark\.write, 10,000-row batches failed: [^\n]*too large[^\n]*\n", done.stderr
    )


@pytest.mark.long
def test_rows_that_do_not_fit_into_memory(kafka_cluster, topic):
    done = perf_spark(
        "-b", kafka_cluster.bootstrap_servers, "-t", topic, "--num-records", "2000000",
        "--conf", "spark.driver.memory=500m",
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("Error: 2,000,000 rows of 100 bytes do not fit into Spark's memory of 500m: give")


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ctrl_c_leaves_whole_rounds_and_no_process(kafka_cluster, topic):
    kafka_cluster.create_topic(topic)
    with started(
        *COMMAND, "-b", kafka_cluster.bootstrap_servers, "-t", topic, "--compare", "foreach", "--format", "json",
        "--num-records", "1000", "--rounds", "100000", "--warmup", "0",
    ) as process:  # fmt: skip
        # Each of the two has had its turn by then, and been counted.
        assert wait_until(lambda: process.poll() is not None or kafka_cluster.watermarks(topic)[0][1] >= 2500)
        process.send_signal(signal.SIGINT)
        output, errors = process.finish()
        assert (process.returncode, errors) == (130, "")
        assert wait_until(lambda: not process.descendants()), process.descendants()
    report = json.loads(output)
    assert report["interrupted"] is True
    assert len(report["rounds"]) >= 2
    assert {(one["client"], one["records"]) for one in report["rounds"]} == {("fastprod", 1000), ("foreach", 200)}


@pytest.mark.long
@pytest.mark.usefixtures("sink_available")
def test_many_topics_of_very_different_sizes(topic):
    done = perf_spark(
        "--topics", "7", "-t", topic, "--num-records", "4000", "--rounds", "1", "--warmup", "0", "--tasks", "3",
        "--format", "json",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["load"]["topics"] == 7
    assert report["cluster"]["partitions"] == 3
    ways = [TOPICS.ours, *(way for rivals in TOPICS.rivals.values() for way in rivals)]
    assert [row["call"] for row in report["summary"]] == [way.call for way in ways]
    for one in report["rounds"]:
        assert one["records"] == 4000
        assert one["task_ratio"] >= 1
        assert 1 <= one["records_per_batch"] <= 4000
        assert (one["connections"] or 0) >= 1 or sys.platform != "linux"


@pytest.mark.long
@pytest.mark.usefixtures("sink_available")
def test_orders_in_files_by_every_way(kafka_cluster, topic):
    done = perf_spark(
        "--rows", "orders", "-b", kafka_cluster.bootstrap_servers, "-t", topic, "--num-records", "900",
        "--rounds", "1", "--warmup", "0", "--format", "json",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report["load"]["rows"] == "orders"
    ways = [ORDERS.ours, *(way for rivals in ORDERS.rivals.values() for way in rivals)]
    assert [row["call"] for row in report["summary"]] == [way.call for way in ways]
    found = values(kafka_cluster, topic)
    assert found.total() == 900 * len(ways)
    # JSON of four ways is the same to the letter. Spark derives another Avro schema than fastprod: null comes second.
    assert Counter(found.values()) == {4: 900, 2: 900, 1: 900}
