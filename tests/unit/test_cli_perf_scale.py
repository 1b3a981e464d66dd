"""`fastprod perf scale`: which lines there are, how they are judged and shown, and that both sides do the same.

No figure is judged here.
"""

import json
import re
import threading
import time
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from fastprod import testing
from fastprod.cli import _load, _scale, main
from fastprod.cli._load import Block, DeliveryError, Load, Unfit
from fastprod.cli._scale import CONFLUENT, CPU, CPU_MS, GROWTH, POOL, QUICK, RATE, SECONDS, Bar, Case, Stage
from fastprod.cli.perf_scale import Round, _cells, _summarise


def scale(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["perf", "scale", *arguments])


def nothing() -> dict[str, float]:
    raise AssertionError("not to be run")


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "speed"], "unknown concern 'speed'; known: threads, partitions, topics, sizes, buffers"),
        (["--only", "threads,"], "unknown concern ''"),
        (["--rounds", "0"], "not in the range"),
        (["--rows", "10"], "not in the range"),
        (["--format", "xml"], "'xml' is not one of"),
        (["something"], "unexpected extra argument"),
    ],
)
def test_usage_errors(arguments, message):
    result = scale(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_options_in_the_wrong_place():
    result = CliRunner().invoke(main, ["perf", "--num-records", "5", "scale"])
    assert result.exit_code == 2
    assert "options of perf scale go behind that word" in result.stderr


def test_help_names_every_concern():
    assert "scale" in CliRunner().invoke(main, ["perf", "--help"]).output
    text = scale("--help").output
    for concern in _scale.CONCERNS:
        assert re.search(rf"^ *{concern}  ", text, re.MULTILINE), concern


# ---- which lines there are


@pytest.fixture
def imaginary_brokers(monkeypatch):
    """Cases can be made, and not run."""

    class Cluster:
        bootstrap_servers = "127.0.0.1:1"

        def __init__(self, brokers, *, topics, rtt_ms=None):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *exc_info):
            pass

    monkeypatch.setattr(testing, "MockClusterProcess", Cluster)


@pytest.mark.usefixtures("imaginary_brokers")
def test_the_bars_are_those_that_were_set():
    found = {}
    for make in _scale.CONCERNS.values():
        with ExitStack() as stack:
            for case in make(stack, _scale.FULL):
                for figure, bar in case.lines.items():
                    if bar is not None:
                        found[case.name, figure.unit] = bar.text(figure.unit)
    threads = (2, 4, 8, 16)
    assert found == {
        **{(f"produce(), default buffer, {count} threads", "M/s"): ">= 2x confluent" for count in threads},
        **{(f"produce(), 8 MB, {count} threads", "M/s"): ">= 2x confluent" for count in threads},
        **{(f"produce_many of 1,000, {count} threads", "M/s"): ">= 0.8x of 1 thread" for count in threads},
        ("produce(), 4 MB, 20 ms away, 4 threads", "us CPU"): "<= 2x of 1 thread",
        ("produce_many, 4 MB, 20 ms away, 4 threads", "us CPU"): "<= 2x of 1 thread",
        ("keyed, 1,000 partitions, 3 brokers", "M/s"): ">= 4x confluent",
        ("keyed, 10,000 partitions, 3 brokers", "M/s"): ">= 3x confluent",
        ("topic column, 100 topics", "M/s"): ">= 0.6x of 1 topic",
        ("topic column, 1,000 topics", "M/s"): ">= 0.4x of 1 topic",
        ("100 to 1,000 B at random", "B of pool"): "<= 1.3x of all 500 B",
        ("100 to 1,000 B at random", "us CPU"): "<= 1.3x of all 500 B",
        ("first records to 400 topics, 20 ms", "s"): "<= 2x confluent",
        ("first records to 400 topics, 20 ms, not idempotent", "s"): "<= 2x confluent",
        ("load table, 8,000 partitions, all stuck", "ms CPU"): "<= 1 ms",
        ("longest hold, 600 x 1 MB copied", "ms CPU"): "<= 2 ms",
        ("10,000,000 rows, dead brokers", "B grown"): "constant: <= 1 B",
    }


@pytest.mark.usefixtures("imaginary_brokers")
@pytest.mark.parametrize("concern", _scale.CONCERNS)
def test_a_bar_looks_at_something_that_is_measured(concern):
    with ExitStack() as stack:
        cases = {case.name: case for case in _scale.CONCERNS[concern](stack, QUICK)}
        assert len(cases) == len(_scale.CONCERNS[concern](stack, QUICK))
    for case in cases.values():
        assert case.concern == concern
        for figure, bar in case.lines.items():
            if bar is not None and bar.of == CONFLUENT:
                assert case.theirs is not None
            elif bar is not None and bar.of is not None:
                assert figure in cases[bar.of].lines


@pytest.mark.parametrize(
    ("bar", "found", "met"),
    [
        (Bar(">=", 2, CONFLUENT), 2.0, True),
        (Bar(">=", 2, CONFLUENT), 1.99, False),
        (Bar("<=", 1.3, "other"), 1.3, True),
        (Bar("<=", 1), 1.01, False),
    ],
)
def test_a_bar(bar, found, met):
    assert bar.holds(found) is met


def test_both_clients_get_the_same_and_confluent_a_queue_of_as_many_bytes():
    assert _scale.for_confluent({"buffer.memory": 8 << 20, "linger.ms": 9}) == {
        "linger.ms": 9,
        "partitioner": "murmur2_random",
        "queue.buffering.max.kbytes": 8192,
        "queue.buffering.max.messages": 10_000_000,
    }
    assert "queue.buffering.max.kbytes" not in _scale.for_confluent({})
    conf = _scale.configuration("b:1", {})
    assert (conf["linger.ms"], conf["acks"], conf["enable.idempotence"]) == (5, "all", True)
    # What confluent-kafka's producer is made of in the end.
    theirs = _load.for_librdkafka({**conf, **_scale.for_confluent({"buffer.memory": 8 << 20})})
    assert {**conf, **_scale.for_confluent({"buffer.memory": 8 << 20})} == theirs


def test_who_was_first_is_second_in_the_next_round():
    case = Case("c", "n", {}, nothing, nothing)
    assert [client for client, _ in case.runs(0)] == ["fastprod", "confluent"]
    assert [client for client, _ in case.runs(1)] == ["confluent", "fastprod"]
    assert [client for client, _ in Case("c", "n", {}, nothing).runs(1)] == ["fastprod"]


def test_mixed_values_are_short_and_long_and_as_many_bytes_as_the_others():
    mixed, plain = _scale.mixed_block(1_000_000), _scale.plain_block(1_000_000)
    sizes = [len(value) for value in mixed.values]
    assert 100 <= min(sizes) < 200
    assert 900 < max(sizes) <= 1000
    changes = sum((one < 512) != (other < 512) for one, other in pairwise(sizes))
    assert changes > len(sizes) / 3
    assert {len(value) for value in plain.values} == {500}
    assert abs(sum(sizes) - 500 * len(plain.values)) <= 1000


# ---- how they are judged


def rounds(case: Case, client: str, figure, *values: float) -> list[Round]:
    return [Round(number, case, client, {figure.name: value, CPU.name: 1.0}) for number, value in enumerate(values, 1)]


def test_ratios_are_taken_round_by_round():
    case = Case("c", "n", {RATE: Bar(">=", 2, CONFLUENT)}, nothing, nothing)
    done = rounds(case, "fastprod", RATE, 2e6, 9e6, 3e6) + rounds(case, CONFLUENT, RATE, 2e6, 3e6, 1e6)
    (row,) = _summarise(done)
    assert row["fastprod"] == {"median": 3.0, "min": 2.0, "max": 9.0}  # millions
    assert row["ratio"] == row["ratio_to_confluent"] == {"median": 3.0, "min": 1.0, "max": 3.0}
    assert row["met"] is True
    assert row["confluent_cpu_us"] == {"median": 1.0, "min": 1.0, "max": 1.0}


def test_a_bar_beside_another_case():
    first = Case("c", "first", {RATE: None}, nothing, nothing)
    other = Case("c", "other", {RATE: Bar(">=", 0.6, "first", "of 1 topic")}, nothing, nothing)
    done = rounds(first, "fastprod", RATE, 10.0, 20.0) + rounds(first, CONFLUENT, RATE, 1.0, 1.0)
    done += rounds(other, "fastprod", RATE, 5.0, 12.0) + rounds(other, CONFLUENT, RATE, 1.0, 4.0)
    _, row = _summarise(done)
    assert row["ratio"] == {"median": 0.55, "min": 0.5, "max": 0.6}
    assert row["ratio_to_confluent"] == {"median": 4.0, "min": 3.0, "max": 5.0}
    assert row["met"] is False


def test_a_bar_for_the_figure_itself():
    case = Case("c", "n", {GROWTH: Bar("<=", 1, None, "constant: <= 1 B"), CPU: None}, nothing)
    grown, cpu = _summarise(rounds(case, "fastprod", GROWTH, 0.0, 0.25, 1200.0))
    assert (grown["met"], grown["ratio"], cpu["met"]) == (True, None, None)
    assert grown["fastprod"]["median"] == 0.25


def test_an_interrupted_round_is_not_compared():
    case = Case("c", "n", {RATE: Bar(">=", 2, CONFLUENT)}, nothing, nothing)
    (row,) = _summarise(rounds(case, "fastprod", RATE, 6.0) + rounds(case, CONFLUENT, RATE, 2.0, 1.0))
    assert row["ratio"] == {"median": 3.0, "min": 3.0, "max": 3.0}
    (row,) = _summarise(rounds(case, "fastprod", RATE, 6.0))
    assert (row["ratio"], row["met"]) == (None, None)
    (row,) = _summarise(rounds(case, CONFLUENT, RATE, 6.0))
    assert (row["fastprod"], row["met"]) == (None, None)
    assert _cells(row)[2] == ""


def test_a_line_of_the_table():
    case = Case("c", "8 threads", {RATE: Bar(">=", 2, CONFLUENT)}, nothing, nothing)
    done = rounds(case, "fastprod", RATE, 83e3, 83e3) + rounds(case, CONFLUENT, RATE, 1e6, 1.1e6)
    (row,) = _summarise(done)
    assert _cells(row) == [
        "8 threads", "M/s", "0.083", "1.00", "1.05", "1.00", "0.08x", ">= 2x confluent", "no",
    ]  # fmt: skip
    alone = Case("c", "n", {POOL: None, SECONDS: None}, nothing)
    pool, _ = _summarise([Round(1, alone, "fastprod", {POOL.name: 25_000.4, SECONDS.name: 1.0})])
    assert _cells(pool) == ["n", "B of pool", "25,000", "", "", "", "", "", ""]
    bar = Case("c", "n", {CPU_MS: Bar("<=", 1)}, nothing)
    (row,) = _summarise(rounds(bar, "fastprod", CPU_MS, 150.0, 160.0))
    assert _cells(row) == ["n", "ms CPU", "155", "", "", "", "(150..160)", "<= 1 ms", "no"]


# ---- the command on runs that cost nothing


@pytest.fixture
def concerns(monkeypatch):
    """Two concerns of one case each; what their runs tell or raise, and in which order they came."""
    order, told = [], {}

    def case(concern, client):
        def run():
            order.append((concern, client))
            figures = told.get((concern, client), {RATE.name: 1e6, CPU.name: 0.5})
            if isinstance(figures, BaseException):
                raise figures
            return figures

        return run

    def make(concern):
        return lambda stack, amounts: [
            Case(concern, f"{concern} of {amounts.rows}", {RATE: Bar(">=", 2, CONFLUENT)}, case(concern, "fastprod"),
                 case(concern, CONFLUENT))
        ]  # fmt: skip

    monkeypatch.setattr(_scale, "CONCERNS", {name: make(name) for name in ("first", "second")})
    return order, told


def test_rounds_in_turns(concerns):
    order, _ = concerns
    assert scale("--rounds", "2", "--only", "second,first").exit_code == 0
    turns = ["fastprod", "confluent", "confluent", "fastprod"]
    assert order == [("second", client) for client in turns] + [("first", client) for client in turns]


def test_json(concerns):
    _, told = concerns
    told["first", "fastprod"] = {RATE.name: 3e6, CPU.name: 0.25}
    result = scale("--rounds", "1", "--only", "first", "--rows", "50000", "--format", "json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["load"] == {"rounds": 1, "quick": False, "only": ["first"], "rows": 50000}
    assert len(report["machine"]["load_average"]) == 2
    assert report["config"]["linger.ms"] == 5
    assert report["rounds"] == [
        {"round": 1, "concern": "first", "case": "first of 50000", "client": client, **figures}
        for client, figures in (
            ("fastprod", {"records_per_s": 3e6, "cpu_us_per_record": 0.25}),
            ("confluent", {"records_per_s": 1e6, "cpu_us_per_record": 0.5}),
        )
    ]
    (row,) = report["summary"]
    assert (row["case"], row["bar"], row["met"]) == ("first of 50000", ">= 2x confluent", True)
    assert row["ratio"]["median"] == 3.0
    assert report["interrupted"] is False


def test_markdown_for_the_documentation(concerns):
    lines = scale("--quick", "--format", "markdown").stdout.splitlines()
    assert lines[:3] == [
        "|  | unit | fastprod | CPU us | confluent | CPU us | ratio (min..max) | bar | met |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | --- |",
        "| first of 20000 | M/s | 1 | 0.50 | 1 | 0.50 | 1.00x | >= 2x confluent | no |",
    ]
    assert lines[3].startswith("| second of 20000 |")
    assert lines[4] == ""
    assert re.fullmatch(r"Median \(min\.\.max\) of 1 round\(s\); fastprod .* load average .*; --quick: .*\.", lines[5])


def test_text(concerns):
    result = scale("--rounds", "1")
    assert result.exit_code == 0
    assert result.stderr == ""
    for word in ("first of 10000000", "second of 10000000", ">= 2x confluent", "1.00x", "no", "load average"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("problem", "code", "message"),
    [
        (DeliveryError("3 of 9 were not acknowledged"), 1, "Error: 3 of 9 were not acknowledged\n"),
        (Unfit("cannot be seen"), 2, "Error: cannot be seen\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_was_done_is_shown_before_it_fails(concerns, problem, code, message):
    _, told = concerns
    told["second", CONFLUENT] = problem
    result = scale("--rounds", "1", "--format", "json")
    assert (result.exit_code, result.stderr) == (code, message)
    report = json.loads(result.stdout)
    assert [row["case"] for row in report["summary"]] == ["first of 10000000", "second of 10000000"]
    assert report["summary"][1]["confluent"] is None
    assert report["interrupted"] is (code == 130)


# ---- loads by several threads, and to several topics


@pytest.mark.parametrize("count", _scale.THREADS)
@pytest.mark.parametrize(("records", "size"), [(400_000, 100_000), (400_000, 1000), (3000, 188), (10, 1000)])
def test_every_thread_has_as_many_blocks(count, records, size):
    load = _scale.shared_load(count, records, size, 0)
    blocks = load.blocks()
    assert {len(block.values) for block in blocks} == {size}
    assert len(blocks) % count == 0
    assert records <= load.records < records + size * count


class Recorder:
    """A producer that keeps what it is given."""

    def __init__(self):
        self.calls = []

    def produce(self, topic, value, key=None):
        self.calls.append((threading.get_ident(), value))

    def poll(self, timeout):
        return 0


def test_threads_share_the_blocks():
    producer = Recorder()
    load = Load("t", 600, Block([b"%d" % number for number in range(100)], None), threads=3)
    sender = _load._Sender(producer, "t", None)
    gate = threading.Barrier(3, timeout=60)  # nobody begins before all are there
    plain = sender._unpaced

    def unpaced(*arguments):
        gate.wait()
        plain(*arguments)

    sender._unpaced = unpaced
    advanced = []
    sender.send("single", load, sender.prepare(load.blocks()), advanced.append)
    assert Counter(value for _, value in producer.calls) == {b"%d" % number: 6 for number in range(100)}
    assert sorted(Counter(thread for thread, _ in producer.calls).values()) == [200, 200, 200]
    assert advanced == [600]


def test_what_a_thread_raises_ends_the_run():
    class Broken(Recorder):
        def produce(self, topic, value, key=None):
            super().produce(topic, value)
            raise ValueError("broken")

    producer = Broken()
    load = Load("t", 600, Block([b"v"] * 100, None), threads=3)
    sender = _load._Sender(producer, "t", None)
    with pytest.raises(ValueError, match="broken"):
        sender.send("single", load, sender.prepare(load.blocks()), lambda done: None)
    assert len(producer.calls) <= 3


@pytest.fixture
def stack():
    with ExitStack() as opened:
        yield opened


def test_both_clients_put_keys_in_the_same_partitions(stack):
    stage = Stage(stack, 3, {"bench": 7})
    load = Load("bench", 500, _load.make_block(500, 10, 90))
    target = stage._target(load)
    placed = []
    for run in (stage.ours(load), stage.confluent(load)):
        before = target.ends()
        run()
        placed.append({number: end - before[number] for number, end in target.ends().items()})
    assert placed[0] == placed[1]
    assert sum(placed[0].values()) == 500 + 7  # one per partition before the clock starts


@pytest.mark.parametrize("client", ["fastprod", "confluent"])
def test_records_go_to_all_topics_in_turn(stack, client):
    names = tuple(f"topic-{number}" for number in range(5))
    stage = Stage(stack, 2, dict.fromkeys(names, 2))
    load = Load(names[0], 1003, _load.make_block(1003, 10), topics=names, warmup=10)
    run = stage.ours(load, "produce_arrow") if client == "fastprod" else stage.confluent(load, "produce to topics")
    assert run().keys() == {RATE.name, CPU.name}
    written = [sum(high for _, high in stage.cluster.watermarks(name).values()) for name in names]
    assert written == [2 + 2 + count for count in (201, 201, 201, 200, 200)]
    assert stage._target(load).written() == 1003 + 10 + 5 * 2


# ---- measurements of their own


def test_what_a_full_buffer_holds(stack):
    stage = Stage(stack, 1, {"bench": 2})
    assert _scale.pool_bytes(stage, [b"v" * 400] * 300, 7) > 400
    assert stage.ours(Load("bench", 10, _load.make_block(10, 10)))()  # brokers answer again


def test_first_records_to_topics(stack):
    stage = Stage(stack, 1, {"one": 1, "two": 1})
    for runner in (_load.OURS, _scale.THEIRS):
        assert _scale.first_records(runner, stage.conf, ["one", "two"]).keys() == {SECONDS.name}
    assert [high for name in ("one", "two") for _, high in stage.cluster.watermarks(name).values()] == [2, 2]


def test_a_first_record_that_is_lost_is_told(stack):
    stage = Stage(stack, 1, {"one": 1, "two": 1})
    stage.cluster.topic_error("two", "TOPIC_AUTHORIZATION_FAILED")
    with pytest.raises(DeliveryError, match="1 of 2 first records sent by fastprod were not acknowledged"):
        _scale.first_records(_load.OURS, stage.conf, ["one", "two"])


def test_the_lock_of_a_bulk_call_is_seen(stack):
    stage = Stage(stack, 1, {"bench": 2}, **_scale.LARGE)
    assert _scale.longest_hold_ms(stage, 30) > 0
    assert stage.ours(Load("bench", 10, _load.make_block(10, 10)))()  # brokers answer again


def test_a_lock_that_nobody_waits_for_is_no_figure(monkeypatch):
    class Free(Recorder):
        def produce_many(self, topic, values):
            time.sleep(0.05)
            return SimpleNamespace(accepted=len(values))

    class Cluster:
        def set_rtt(self, ms):
            pass

    class FreeStage:
        cluster = Cluster()

    monkeypatch.setattr(_scale, "_producer", lambda stage, options: Free())
    monkeypatch.setattr(_scale, "_drop", lambda stage, producer: None)
    monkeypatch.setattr(_scale, "_sleeps", lambda: 0)
    with pytest.raises(Unfit, match="never waited"):
        _scale.longest_hold_ms(FreeStage(), 1)


def test_rejected_rows():
    found = _scale.rejected_rows(20_000)
    assert found.keys() == {GROWTH.name, CPU.name}
    assert found[CPU.name] > 0


def test_rows_that_cannot_be_rejected_are_told(monkeypatch):
    monkeypatch.setattr(_scale.sys, "executable", "false")
    with pytest.raises(Unfit, match="has ended with status 1"):
        _scale.rejected_rows(20_000)


# ---- all of it, once


def test_threads_against_brokers():
    result = scale("--quick", "--only", "threads", "--format", "json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    seen = Counter((one["case"], one["client"]) for one in report["rounds"])
    assert set(seen.values()) == {1}
    for count in ("1 thread", "2 threads", "4 threads", "8 threads", "16 threads"):
        for buffer in ("default buffer", "8 MB"):
            assert (f"produce(), {buffer}, {count}", "fastprod") in seen
            assert (f"produce(), {buffer}, {count}", "confluent") in seen
        assert (f"produce_many of 1,000, {count}", "fastprod") in seen
    assert len(seen) == 5 * 5 + 4
    assert all(one["cpu_us_per_record"] > 0 for one in report["rounds"])
    assert all((row["met"] is None) == (row["bar"] is None) for row in report["summary"])
