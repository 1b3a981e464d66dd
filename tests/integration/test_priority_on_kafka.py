"""Priority levels on a real broker: topics that are made, consumers that come, go and are killed."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from confluent_kafka import TopicPartition
from programs import run, started, wait_until

from fastprod.cli import main
from fastprod.priority import CapacityBurstConsumer, PriorityProducer
from fastprod.testing import KafkaCluster

LEVELS = 3
RECORDS = 4000  # of each level

WORKER = """
import json, os, sys
from fastprod.priority import CapacityBurstConsumer

servers, topic, levels, path = sys.argv[1:]
config = {
    "bootstrap.servers": servers, "group.id": "workers-" + topic, "auto.offset.reset": "earliest", "log_level": 0,
    "auto.commit.interval.ms": 20, "session.timeout.ms": 6000,
}
done = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
with CapacityBurstConsumer(config, int(levels), 50) as consumer:
    consumer.subscribe([topic])
    while True:
        for message in consumer.poll(1.0):
            line = json.dumps([message.topic(), message.partition(), message.offset(), message.value().decode()])
            os.write(done, (line + "\\n").encode())
"""


def settings(cluster: KafkaCluster, **options: Any) -> dict[str, Any]:
    return {"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, **options}


def done(folder: Path) -> list[list[Any]]:
    """What the workers have processed; a line may be half written when one is killed."""
    found = []
    for path in folder.glob("*.done"):
        for line in path.read_text().split("\n")[:-1]:
            found.append(json.loads(line))
    return found


def test_topics_are_made_once(kafka_cluster: KafkaCluster, topic: str) -> None:
    with PriorityProducer(settings(kafka_cluster), LEVELS) as producer:
        assert producer.create_topics(topic, 2, config={"retention.ms": "3600000"}) == [
            f"{topic}-{level}" for level in range(LEVELS)
        ]
        assert producer.create_topics(topic, 5) == []
        assert len(producer.list_topics(f"{topic}-1", timeout=60).topics[f"{topic}-1"].partitions) == 2
        producer.produce(topic, b"v", priority=2)


def test_one_of_two_consumers_is_killed(kafka_cluster: KafkaCluster, topic: str, tmp_path: Path) -> None:
    names = [f"{topic}-{level}" for level in range(LEVELS)]
    with PriorityProducer(settings(kafka_cluster), LEVELS) as producer:
        producer.create_topics(topic, 4)
        for level in range(LEVELS):
            values = [b"%d" % number for number in range(RECORDS)]
            producer.produce_many(topic, values, partitions=[n % 4 for n in range(RECORDS)], priority=level)
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    arguments = (worker, kafka_cluster.bootstrap_servers, topic, str(LEVELS))
    with (
        started(*arguments, tmp_path / "one.done") as one,
        started(*arguments, tmp_path / "two.done"),
        CapacityBurstConsumer(settings(kafka_cluster, **{"group.id": f"workers-{topic}"}), LEVELS, 50) as looker,
    ):
        assert wait_until(lambda: len(done(tmp_path)) > RECORDS / 2)
        one.kill()
        places = [TopicPartition(name, number) for name in names for number in range(4)]
        committed = [(place.topic, place.partition, place.offset) for place in looker.committed(places, 60)]
        processed = {tuple(line[:3]) for line in done(tmp_path)}
        assert any(offset > 0 for _, _, offset in committed)
        for name, number, offset in committed:
            missing = [at for at in range(max(0, offset)) if (name, number, at) not in processed]
            assert not missing, f"{name} [{number}]: {offset} is committed, but these were not processed: {missing}"
        wanted = {(name, str(number)) for name in names for number in range(RECORDS)}
        assert wait_until(lambda: {(line[0], line[3]) for line in done(tmp_path)} >= wanted)
        ends = {
            place: looker.get_watermark_offsets(TopicPartition(*place), 60)
            for place in itertools.product(names, range(4))
        }
        assert wait_until(
            lambda: all(
                ends[(place.topic, place.partition)] == (0, place.offset) for place in looker.committed(places, 60)
            )
        ), "all that was processed is committed in the end"


def test_a_second_consumer_joins_and_leaves_and_nothing_is_lost(kafka_cluster: KafkaCluster, topic: str) -> None:
    with PriorityProducer(settings(kafka_cluster), LEVELS) as producer:
        producer.create_topics(topic, 4)
        options = settings(kafka_cluster, **{"group.id": f"g-{topic}", "auto.offset.reset": "earliest"})
        seen: set[tuple[str, bytes]] = set()
        moves: list[str] = []

        def read(*consumers: CapacityBurstConsumer) -> None:
            for consumer in consumers:
                seen.update((one.topic() or "", one.value() or b"") for one in consumer.poll(0.1))

        with CapacityBurstConsumer(options, LEVELS, 50) as first:
            first.subscribe(
                [topic],
                on_assign=lambda consumer, partitions: moves.append(f"+{len(partitions)}"),
                on_revoke=lambda consumer, partitions: moves.append(f"-{len(partitions)}"),
            )
            wanted = set()
            with CapacityBurstConsumer(options, LEVELS, 50) as second:
                for part in range(30):
                    if part == 10:
                        second.subscribe([topic])
                    for level in range(LEVELS):
                        values = [b"%d" % number for number in range(part * 100, part * 100 + 100)]
                        producer.produce_many(topic, values, priority=level)
                        wanted |= {(f"{topic}-{level}", value) for value in values}
                    producer.flush()
                    read(first, second) if part >= 10 else read(first)

                def shared() -> bool:
                    read(first, second)
                    return len(first.assignment()) == len(second.assignment()) == 2 * LEVELS

                assert wait_until(shared)
            deadline = time.monotonic() + 120
            while (seen < wanted or len(first.assignment()) < 4 * LEVELS) and time.monotonic() < deadline:
                read(first)
            assert seen == wanted
            assert len(first.assignment()) == 4 * LEVELS
    assert moves.count("+4") >= LEVELS
    assert moves.count("-4") >= LEVELS


def test_the_experiments(kafka_cluster: KafkaCluster, tmp_path: Path) -> None:
    picture = tmp_path / "levels.svg"
    brokers = ["-b", kafka_cluster.bootstrap_servers, "--records", "3000", "--pause", "10"]
    done = CliRunner().invoke(main, ["priority", *brokers, "--format", "json", "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["experiments"]
    assert list(found) == ["no-priority", "priority", "wave"]
    none, levels, wave = found.values()
    assert max(none["all_s"]) < 1.2 * min(none["all_s"]) + 0.5, "all at the same rate"
    # How much sooner depends on how fast brokers answer each level's fetches: test_priority_levels.py has the rule.
    assert levels["all_s"][2] < levels["all_s"][0], "the highest drains first"
    assert len(wave["waves_s"]) == 1
    assert wave["all_s"][2] > wave["waves_s"][0]
    drawn = picture.read_text()
    assert all(text in drawn for text in ("no-priority", "wave", "level 2", "thousand records processed"))


def test_the_experiments_as_a_table(kafka_cluster: KafkaCluster) -> None:
    arguments = ["-b", kafka_cluster.bootstrap_servers, "--records", "200", "--pause", "0", "--experiment", "priority"]
    done = CliRunner().invoke(main, ["priority", *arguments])
    assert done.exit_code == 0, done.output
    assert "half after s" in done.stdout
    assert done.stdout.count("200") == LEVELS


def test_experiments_without_a_broker(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["priority", "-b", "localhost:1", "--records", "200"])
    assert done.exit_code == 2
    assert "no broker answers at localhost:1 within 10 s" in done.output
    done = CliRunner().invoke(main, ["priority", "--plot", str(tmp_path / "x.gif")])
    assert done.exit_code == 2
    assert ".png or .svg" in done.output


def test_the_example(tmp_path: Path) -> None:
    done = run(Path(__file__).parents[2] / "examples" / "priority_experiments.py", "--records", "400", "--work-ms", "1")
    assert "more records of level 2 come" in done.stdout
    assert "all 1,400 records were processed" in done.stdout
