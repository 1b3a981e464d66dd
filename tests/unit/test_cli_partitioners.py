"""`fastprod partitioners`: what it measures, prints, draws and refuses. No figure is judged but where records went."""

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from click.testing import CliRunner, Result

import fastprod
from fastprod.cli import _load, _pictures, _routing, main
from fastprod.cli._routing import CONTENDERS, SAMPLE, Flood, Trickle
from fastprod.cli.partitioners import FEW_BATCH, FEW_CONTENDERS, FEW_RECORDS
from fastprod.testing import MockClusterProcess

RECORDS = 20_000
SLOW_PARTITIONS = {0, 2, 4, 6, 8}  # of 10, spread over 4 brokers


def partitioners(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["partitioners", *arguments])


def report_of(*arguments: str) -> dict:
    result = partitioners(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: str) -> str:
    result = partitioners(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.split())


# ---- as much as goes


def test_every_partitioner_gets_the_same_records_on_a_topic_of_its_own():
    report = report_of("--num-records", str(RECORDS), "--rtt", "20", "--rounds", "2")
    assert report["fastprod"] == fastprod.__version__
    assert report["cluster"]["kind"] == "mock"
    assert report["cluster"]["slow_brokers"] == [1, 3]
    assert report["cluster"]["slow_rtt_ms"] == 20
    assert report["load"] == {"record_size": 36, "rounds": 2, "seconds": None, "records": RECORDS}
    assert [(one["partitioner"], one["round"]) for one in report["rounds"]] == [
        (name, turn) for name in CONTENDERS for turn in (1, 2)
    ]
    for one in report["rounds"]:
        places = {int(number): place for number, place in one["partitions"].items()}
        assert {number for number, place in places.items() if place["slow"]} == SLOW_PARTITIONS
        assert one["records"] == sum(place["records"] for place in places.values()) == RECORDS
        slow = sum(places[number]["records"] for number in SLOW_PARTITIONS)
        assert one["slow_share"] == pytest.approx(slow / RECORDS)
        assert sum(place["queue_ms"]["samples"] for place in places.values()) == -(-RECORDS // SAMPLE)
    in_turns = report["rounds"][0]["partitions"].values()
    assert {place["records"] for place in in_turns} == {RECORDS // 10}
    assert all(place["queue_ms"]["samples"] for place in in_turns)
    assert [row["partitioner"] for row in report["summary"]] == list(CONTENDERS)
    assert report["summary"][-1]["ratio"] == {"median": 1.0, "min": 1.0, "max": 1.0}


def test_the_load_table_sends_slow_brokers_less():
    # How far apart depends on the machine, and on a busy one a round may show nothing; test_spread judges more records.
    for _ in range(5):
        report = report_of("--partitioner", "uniform", "--partitioner", "adaptive", "--seconds", "2")
        uniform, adaptive = report["rounds"]
        assert uniform["slow_share"] == pytest.approx(0.5, abs=0.05)
        if adaptive["slow_share"] < uniform["slow_share"]:
            break
    assert adaptive["slow_share"] < uniform["slow_share"]
    assert report["summary"][1]["ratio"] is None  # librdkafka's did not run
    assert adaptive["records_per_request"] > 1


def test_the_table_and_its_picture(tmp_path):
    drawn = tmp_path / "slow.svg"
    result = partitioners("--num-records", "3000", "--rtt", "5", "--rounds", "2", "--plot", str(drawn))
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert "4 mock brokers, 1 and 3 slow" in lines[0]
    for name in CONTENDERS:
        assert any(line.split()[1:2] == [name] for line in lines)
    text = "".join(ET.parse(drawn).getroot().itertext())
    for words in (*CONTENDERS, "on a slow broker", "on a fast broker", "thousand records", "million records/s"):
        assert words in text


def test_without_slow_brokers_there_is_nothing_to_tell_about_them():
    flood = Flood("uniform", 10, 2.0, {0: 4, 1: 6}, frozenset(), {0: [1.0], 1: [3.0, 2.0]})
    assert flood.slow_share is None
    assert flood.rate == 5
    assert (flood.queue(0.5, slow=False), flood.queue(0.5, slow=True)) == (2.0, None)


def test_other_brokers_can_be_the_slow_ones():
    report = report_of("--partitioner", "sticky", "--num-records", "2000", "--slow", "2", "--rtt", "5")
    assert report["cluster"]["slow_brokers"] == [2]
    places = report["rounds"][0]["partitions"]
    assert {number for number, place in places.items() if place["slow"]} == {"1", "5", "9"}


def test_options_reach_the_producer():
    report = report_of(
        "--partitioner", "uniform", "--num-records", "100", "--partitions", "3", "-X", "linger.ms=1",
        "-X", "buffer.memory=1000000",
    )  # fmt: skip
    assert report["config"]["linger.ms"] == "1"
    assert report["config"]["buffer.memory"] == "1000000"
    assert len(report["rounds"][0]["partitions"]) == 3


# ---- a few records


def test_few_records_in_turns_wait_for_the_linger():
    report = report_of("--low-throughput", "--partitioner", "round_robin", "-X", "linger.ms=300")
    (run,) = report["runs"]
    assert len(run["records"]) == FEW_RECORDS
    assert {record["partition"] for record in run["records"]} == set(range(10))
    first = run["records"][0]
    assert first["acknowledged_s"] - first["handed_in_s"] >= 0.3


@pytest.mark.parametrize("name", ["sticky", "uniform", "adaptive"])
def test_few_records_for_one_partition_fill_a_batch_and_go(name):
    report = report_of("--low-throughput", "--partitioner", name, "-X", "linger.ms=200000")
    assert report["config"]["sticky.batch.size"] == FEW_BATCH
    (run,) = report["runs"]
    assert len(run["records"]) == FEW_RECORDS
    assert len({record["partition"] for record in run["records"]}) == 1
    # Neither the linger was needed nor the flush that ends the run when nothing comes.
    assert max(record["acknowledged_s"] for record in run["records"]) < _routing.SETTLE_S


def test_few_records_as_table_and_picture(tmp_path):
    drawn = tmp_path / "few.PNG"
    result = partitioners("--low-throughput", "-X", "linger.ms=200", "--plot", str(drawn))
    assert result.exit_code == 0, result.output
    assert [line.split()[1] for line in result.stdout.splitlines() if line.startswith("│")] == list(FEW_CONTENDERS)
    assert drawn.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_same_figures_make_the_same_picture(tmp_path):
    runs = {"sticky": Trickle("sticky", [(0.0, 0.5, 3), (0.1, 0.5, 3)])}
    for name in ("one.svg", "two.svg"):
        _pictures.draw_trickles(tmp_path / name, "two records", runs)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "sticky: 1 partition" in (tmp_path / "one.svg").read_text()


# ---- what it refuses


def test_pictures_without_matplotlib(monkeypatch, tmp_path):
    def missing() -> None:
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")

    monkeypatch.setattr(_pictures, "check", missing)
    said = refusal("--plot", str(tmp_path / "a.png"))
    assert said == "Error: --plot needs matplotlib: pip install 'fastprod[plot]'"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--plot", "picture.pdf"], "ends in .png or .svg, not 'picture.pdf'"),
        (["--plot", "no/such/folder/picture.png"], "there is no folder 'no/such/folder'"),
        (["-b", "localhost:1", "--real"], "--real starts brokers of its own"),
        (["--seconds", "1", "--num-records", "5"], "--seconds or --num-records, not both"),
        (["--low-throughput", "--num-records", "5"], "--low-throughput sends 113 records"),
        (["-X", "partitioner=random"], "partitioner is what differs here"),
        (["-X", "partitioner.adaptive.partitioning.enable=false"], "choose with --partitioner"),
        (["-X", "transactional.id=a"], "leave transactional.id out"),
        (["-X", "no.such.option=1"], "no.such.option"),
        (["--slow", "5"], "--slow 5: our brokers are 1 to 4"),
        (["--partitioner", "murmur3"], "murmur3"),
    ],
)
def test_wrong_usage_is_told_before_anything_starts(monkeypatch, arguments, words):
    monkeypatch.setattr(_routing, "MockStage", None)
    assert words in refusal(*arguments)


def test_no_broker_at_the_address(monkeypatch):
    monkeypatch.setattr(_load, "CONNECT_S", 0.5)
    assert "no broker answers at 127.0.0.1:1" in refusal("-b", "127.0.0.1:1")


def test_records_that_are_refused_end_the_run(monkeypatch):
    @contextmanager
    def refusing(self: _routing.MockStage) -> Iterator[None]:
        cluster: MockClusterProcess = self.cluster
        cluster.push_errors("Produce", "TOPIC_AUTHORIZATION_FAILED")
        yield

    monkeypatch.setattr(_routing.MockStage, "slowness", refusing)
    result = partitioners("--num-records", "1000")
    assert result.exit_code == 1
    assert re.match(r"Error: \d+ records were not acknowledged \(Broker: Topic authorization failed", result.stderr)


def test_a_picture_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    result = partitioners("--partitioner", "sticky", "--num-records", "10", "--rtt", "0", "--plot", str(folder))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: cannot draw to {folder}: ")
    assert "sticky" in result.stdout  # the figures are not lost


def test_it_is_among_the_commands():
    assert "partitioners" in CliRunner().invoke(main, ["--help"]).output
