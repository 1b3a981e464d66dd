"""`fastprod bundles`: what it tells, draws and refuses."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fastprod import Producer
from fastprod.bundles import BundleMap, hash_position
from fastprod.cli import main
from fastprod.testing import MockCluster

WHOLE = "0x00000000_0xffffffff"


def bundles(*arguments: str, **more: Any) -> Result:
    return CliRunner().invoke(main, ["bundles", *arguments], **more)


def told(*arguments: str, **more: Any) -> Any:
    result = bundles(*arguments, "--format", "json", **more)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refusal(*arguments: str, **more: Any) -> str:
    result = bundles(*arguments, **more)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return " ".join(result.stderr.replace("│", " ").split())


@pytest.fixture
def topics(tmp_path: Path) -> str:
    """Of Zipf sizes."""
    path = tmp_path / "topics.csv"
    path.write_text("# a comment\n\n" + "".join(f"topic-{i},{100 - i},{1_000_000 // (i + 1)}\n" for i in range(50)))
    return str(path)


# ---- positions


def test_positions_of_a_file() -> None:
    found = told("positions", "--topics-file", "-", "--bundles", "4", input="a\nb\nc\n")
    assert found["topics"] == [
        {"topic": "c", "position": 112844655, "bundle": "0x00000000_0x40000000"},
        {"topic": "b", "position": 1908338681, "bundle": "0x40000000_0x80000000"},
        {"topic": "a", "position": 3904355907, "bundle": "0xc0000000_0xffffffff"},
    ]
    assert BundleMap.from_json(json.dumps(found["map"])) == BundleMap.equal(4)
    table = bundles("positions", "--topics-file", "-", input="a\nb\nc\n").stdout
    assert "0x06b9df6f" in table
    assert table.index("│ c") < table.index("│ b") < table.index("│ a")


def test_positions_and_loads_of_the_topics_of_brokers() -> None:
    with MockCluster(1, topics={"orders": 3, "clicks": 1}) as cluster:
        with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
            producer.produce_many("orders", [b"x"] * 60)
            producer.produce_many("clicks", [b"x"] * 40)
        found = told("positions", "-b", cluster.bootstrap_servers)
        assert {row["topic"]: row["position"] for row in found["topics"]} == {
            name: hash_position(name) for name in ("orders", "clicks")
        }
        made = told("plan", "-b", cluster.bootstrap_servers, "--writers", "2")
    assert (made["unit"], sorted(made["loads"])) == ("records", [40, 60])


# ---- split


def test_a_split_is_told_and_can_be_used_again(tmp_path: Path, topics: str) -> None:
    found = told("split", "--topics-file", topics, "--algorithm", "topic_count_equally_divide", "--parts", "5")
    assert len(found["boundaries"]) == 4
    assert found["reason"] is None
    assert [row["topics"] for row in found["bundles"]] == [10] * 5
    again = tmp_path / "map.json"
    again.write_text(json.dumps(found))
    second = told("split", found["bundles"][2]["bundle"], "--bundles", str(again))
    assert set(found["map"]["boundaries"]) < set(second["map"]["boundaries"])


def test_a_split_at_positions(topics: str) -> None:
    found = told("split", "--algorithm", "specified_positions_divide", "--position", "50", "--position", "-1")
    assert found["boundaries"] == [50]
    text = bundles("split", "--algorithm", "specified_positions_divide", "--position", "50", "--topics-file", topics)
    assert "0x00000000_0xffffffff split at 0x00000032 (50)" in text.stdout
    assert "0x00000032_0xffffffff" in text.stdout


def test_a_split_by_load(topics: str) -> None:
    found = told(
        "split", "--topics-file", topics, "--algorithm", "flow_or_qps_equally_divide", "--max-bytes", "1500000"
    )
    assert all(row["bytes"] <= 1_500_000 for row in found["bundles"])


def test_a_reason_is_an_answer(topics: str) -> None:
    arguments = ("split", "--topics-file", topics, "--algorithm", "flow_or_qps_equally_divide", "--max-bytes", "1e9")
    assert told(*arguments)["boundaries"] == []
    assert "within the limits" in told(*arguments)["reason"]
    assert bundles(*arguments).stdout.startswith("not split: ")
    alone = ("split", "--topics-file", "-", "--algorithm", "specified_positions_divide", "--position", "50")
    assert "unless forced" in told(*alone, input="a\n")["reason"]
    assert told(*alone, "--force", input="a\n")["boundaries"] == [50]


# ---- plan


def test_a_plan_of_a_file(topics: str) -> None:
    made = told("plan", "--topics-file", topics, "--bundles", "8", "--writers", "4")
    assert made["heaviest"] <= made["before"]
    assert made["heaviest"] <= 1.1 * made["mean"]
    assert {row["bundle"]: row["writer"] for row in made["bundles"]} == made["assignment"]
    assert sum(row["topics"] for row in made["bundles"]) == 50
    text = bundles("plan", "--topics-file", topics, "--bundles", "8", "--writers", "4").stdout
    assert "writer" in text
    assert "bundles for 4 writers: the heaviest gets" in text
    by_records = told("plan", "--topics-file", topics, "--writers", "4", "--by", "records")
    assert sum(by_records["loads"]) == sum(100 - number for number in range(50))


def test_topics_without_figures_count_alike() -> None:
    made = told("plan", "--topics-file", "-", "--writers", "2", input="".join(f"t{i}\n" for i in range(10)))
    assert made["loads"] == [5, 5]


@pytest.mark.parametrize("command", [("plan", "--writers", "3"), ("split",)])
def test_pictures(tmp_path: Path, topics: str, command: tuple[str, ...]) -> None:
    for ending in ("svg", "png"):
        path = tmp_path / f"ring.{ending}"
        result = bundles(*command, "--topics-file", topics, "--plot", str(path))
        assert result.exit_code == 0, result.output
        assert f"picture: {path}" in result.stderr
        assert path.stat().st_size > 5000
    text = "".join(ET.parse(tmp_path / "ring.svg").getroot().itertext())
    assert "before" in text
    assert "after" in text


# ---- refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("positions",), "-b HOST:PORT or --topics-file FILE"),
        (("positions", "--topics-file", "-", "-b", "localhost:1"), "one of them"),
        (("positions", "--topics-file", "nowhere.csv"), "cannot read nowhere.csv"),
        (("positions", "--topics-file", "-", "--bundles", "0"), "number of bundles"),
        (("positions", "--topics-file", "-", "--bundles", "nowhere.json"), "cannot read nowhere.json"),
        (("split", "--bundles", "2"), "which of the 2 bundles?"),
        (("split", "0x0_0x1"), "there is no bundle '0x0_0x1'"),
        (("split", "--algorithm", "halve"), "'halve'"),
        (("split", "--parts", "2"), "no option 'parts'"),
        (("split", "--algorithm", "topic_count_equally_divide"), "say where the topics are"),
        (("plan", "--topics-file", "-"), "--writers"),
        (("plan", "--topics-file", "-", "--writers", "0"), "0"),
        (("plan", "--topics-file", "-", "--writers", "2", "--plot", "ring.gif"), "ring.gif"),
    ],
)
def test_usage(arguments: tuple[str, ...], words: str) -> None:
    assert words in refusal(*arguments, input="a\n")


@pytest.mark.parametrize("line", ["a,b", "a,1,2,3", ",1", "a,-1", "a,nan", "a,1,inf"])
def test_lines_that_tell_no_topic(line: str) -> None:
    assert "line 2 of - is not" in refusal("positions", "--topics-file", "-", input=f"good,1,2\n{line}\n")


def test_a_topic_twice() -> None:
    assert "line 2 of - has the topic 'a' again" in refusal("positions", "--topics-file", "-", input="a\na\n")
