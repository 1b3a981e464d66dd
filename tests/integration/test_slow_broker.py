"""Slow brokers get less from the load table, and everything arrives; on a real Kafka of four brokers."""

import json
import re
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from confluent_kafka.admin import AdminClient
from programs import run, wait_until

from fastprod.cli import main
from fastprod.cli._routing import CONTENDERS
from fastprod.testing import KafkaCluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "slow_broker.py"


@pytest.mark.long
@pytest.mark.usefixtures("kafka_available")
def test_the_example_sends_slow_brokers_less_and_loses_nothing() -> None:
    done = run(EXAMPLE, "--seconds", "6")
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    assert re.search(r"^[\d,]+ records acknowledged, 0 of them missing$", done.stdout, re.MULTILINE)
    shares = [float(found) for found in re.findall(r"([\d.]+)% went to the slow brokers", done.stdout)]
    _, evenly, by_queue = shares
    assert evenly == pytest.approx(50, abs=5)
    assert by_queue < evenly - 2  # with the CPU to themselves it is below 20


def is_stopped(cluster: KafkaCluster, broker: int) -> bool:
    """What the kernel says about a broker's process."""
    return Path(f"/proc/{cluster._nodes[broker].pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see whether a process is stopped")
def test_slowed_brokers_stop_and_go_and_are_free_in_the_end(kafka_cluster: KafkaCluster) -> None:
    with kafka_cluster.slowed(1, share=0.5, period=0.2):
        for _ in range(3):
            assert wait_until(lambda: is_stopped(kafka_cluster, 1))
            assert wait_until(lambda: not is_stopped(kafka_cluster, 1))
    assert wait_until(lambda: not is_stopped(kafka_cluster, 1))  # a signal takes its time
    time.sleep(0.5)  # more than two periods
    assert not is_stopped(kafka_cluster, 1)
    kafka_cluster.create_topic("after-slowness")  # it answers


@pytest.mark.parametrize(("share", "period"), [(0.0, 1.0), (1.0, 1.0), (0.9, 5.0)])
def test_slowness_has_bounds(kafka_cluster: KafkaCluster, share: float, period: float) -> None:
    with (
        pytest.raises(ValueError, match=f"share={share} of period={period} s"),
        kafka_cluster.slowed(1, share=share, period=period),
    ):
        pass


def test_only_brokers_that_exist_can_be_slowed(kafka_cluster: KafkaCluster) -> None:
    with pytest.raises(ValueError, match="there is no broker 7"), kafka_cluster.slowed(7):
        pass


def test_the_command_leaves_no_topic_behind_on_brokers_of_others(kafka_cluster: KafkaCluster) -> None:
    result = CliRunner().invoke(
        main,
        ["partitioners", "-b", kafka_cluster.bootstrap_servers, "--num-records", "5000", "--slow", "1",
         "--partitions", "3", "--format", "json"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [one["partitioner"] for one in report["rounds"]] == list(CONTENDERS)
    for one in report["rounds"]:
        assert sum(place["records"] for place in one["partitions"].values()) == 5000
        assert one["slow_share"] == 1  # there is only broker 1
    deadline = time.monotonic() + 120
    while left := [name for name in topics(kafka_cluster) if name.startswith("fastprod-partitioners")]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def topics(cluster: KafkaCluster) -> list[str]:
    return list(AdminClient({"bootstrap.servers": cluster.bootstrap_servers}).list_topics(timeout=120).topics)
