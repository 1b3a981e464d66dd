"""`fastprod partitioners`: where records without a key go, and what that does when some brokers are slow."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
from confluent_kafka import KafkaException
from rich.console import Console
from rich.table import Table

from fastprod.cli import _options, _pictures, _routing
from fastprod.cli._figures import cell, configuration, console, shown, spread, versions
from fastprod.cli._load import DeliveryError, Unreachable
from fastprod.cli._options import Failure
from fastprod.cli._routing import BROKERS, CONTENDERS, RIVAL, SLOW, VALUE, Flood, Stage, Trickle

SECONDS = 5.0
RTT_MS = 200
SHARE = 0.8

# The article's few records: 113 of them fill a batch, and ten partitions get a tenth of one each. In Java that takes
# 5,000 bytes, some of them for timestamps that are further apart than ours.
FEW_RECORDS = 113
FEW_BATCH = 4969
FEW_LINGER_MS = 1500  # 15 s in the article
FEW_INTERVAL_S = 0.005
FEW_CONTENDERS = ("round_robin", "sticky", "adaptive")


@click.command()
@click.option("-b", "--bootstrap", metavar="HOST:PORT,...", help="Brokers, taken as they are. Without: mock brokers.")
@click.option("--real", is_flag=True, help="Without brokers: an Apache Kafka of 4 brokers on this machine; needs Java.")
@click.option(
    "--partitioner",
    "names",
    type=click.Choice(tuple(CONTENDERS)),
    multiple=True,
    help=f"Which to run, repeatable. Default: all, in this order; with --low-throughput {', '.join(FEW_CONTENDERS)}.",
)
@click.option("--seconds", type=click.FloatRange(0.1), help=f"How long each one is fed.  [default: {SECONDS:g}]")
@click.option("--num-records", type=click.IntRange(1), help="Records for each one, instead of --seconds.")
@click.option("--partitions", type=click.IntRange(1), default=10, show_default=True, help="Of each topic.")
@click.option(
    "--slow",
    type=click.IntRange(1),
    multiple=True,
    help=f"A slow broker's id, repeatable. Default: {' and '.join(map(str, SLOW))}; with -b none, and an id only says "
    "which broker is known to be slow.",
)
@click.option(
    "--rtt", type=click.IntRange(0), default=RTT_MS, show_default=True, help="Round trip of slow mock brokers, in ms."
)
@click.option(
    "--pause",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=SHARE,
    show_default=True,
    help="Part of each second for which slow brokers of --real are frozen.",
)
@click.option("--rounds", type=click.IntRange(1), default=1, show_default=True, help="Runs of each, in turns.")
@click.option(
    "--low-throughput",
    is_flag=True,
    help=f"The other case: {FEW_RECORDS} records, one every {FEW_INTERVAL_S * 1e3:g} ms, with a linger of "
    f"{FEW_LINGER_MS / 1e3:g} s and no slow broker: who sends before the linger is over?",
)
@_options.client_options("A producer's option, repeatable.")
@click.option("--plot", metavar="FILE", callback=_pictures.picture, help="Draw a picture to this .png or .svg file.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def partitioners(
    ctx: click.Context,
    bootstrap: str | None,
    real: bool,
    names: tuple[str, ...],
    seconds: float | None,
    num_records: int | None,
    partitions: int,
    slow: tuple[int, ...],
    rtt: int,
    pause: float,
    rounds: int,
    low_throughput: bool,
    options: dict[str, str],
    file: dict[str, str],
    plot: Path | None,
    form: str,
) -> None:
    """Compare what partitioners do with records that have no key.

    Four brokers, two of them slow, ten partitions, values of 36 bytes: each partitioner in turn is fed as fast as its
    producer takes records, with a fresh producer and a fresh topic. Only the partitioner differs. What makes the
    difference is buffer.memory: records that wait for slow brokers take the room of all others.

    Slow mock brokers answer late; those of --real are frozen for a part of each second. Queue time is the time from
    handing a record in to its acknowledgement. The clock runs until everything is acknowledged.

    Topics on brokers given with -b are named fastprod-partitioners-..., and removed after use.

    Exit code: 0; 1 when records were not delivered; 2 for wrong usage or no broker; 130 after Ctrl-C.
    """
    given: dict[str, Any] = {**file, **options}
    if bootstrap is not None:
        given["bootstrap.servers"] = bootstrap
    brokers = given.get("bootstrap.servers") or given.get("metadata.broker.list")
    _check_usage(given, bool(brokers), real, seconds, num_records, low_throughput)
    if low_throughput:
        given = {"linger.ms": FEW_LINGER_MS, "sticky.batch.size": FEW_BATCH, **given}
    conf = configuration(given)
    chosen = tuple(dict.fromkeys(names)) or (FEW_CONTENDERS if low_throughput else tuple(CONTENDERS))
    if low_throughput:
        slow_brokers: tuple[int, ...] = ()
    else:
        slow_brokers = slow or (() if brokers else SLOW)
    if not brokers and max(slow_brokers, default=0) > BROKERS:
        raise click.UsageError(f"--slow {max(slow_brokers)}: our brokers are 1 to {BROKERS}")
    load = {"seconds": None if num_records else seconds or SECONDS, "records": num_records}

    try:
        with _routing.opened(_stage(conf, bool(brokers), real, partitions, slow_brokers, rtt, pause)) as stage:
            report = _head(stage, conf, rounds)
            if low_throughput:
                _few(report, stage, conf, chosen, plot, form)
            else:
                _many(report, stage, conf, chosen, rounds, load, plot, form)
    except KeyboardInterrupt:
        ctx.exit(130)
    except Unreachable as problem:
        raise Failure(str(problem), 2) from None
    except DeliveryError as problem:
        raise Failure(str(problem), 1) from None
    except (KafkaException, BufferError) as problem:
        raise Failure(_routing.reason(problem), 1) from None


@contextmanager
def _drawing(plot: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise Failure(f"cannot draw to {plot}: {problem.strerror or problem}", 2) from None


def _check_usage(
    given: Mapping[str, Any],
    brokers: bool,
    real: bool,
    seconds: float | None,
    num_records: int | None,
    low_throughput: bool,
) -> None:
    if brokers and real:
        raise click.UsageError("--real starts brokers of its own: leave it out, or the brokers")
    if seconds is not None and num_records is not None:
        raise click.UsageError("--seconds or --num-records, not both")
    if low_throughput and (seconds is not None or num_records is not None):
        raise click.UsageError(f"--low-throughput sends {FEW_RECORDS} records: leave --seconds and --num-records out")
    for name in ("partitioner", _routing.ADAPTIVE):
        if name in given:
            raise click.UsageError(f"{name} is what differs here: choose with --partitioner")
    if given.get("transactional.id"):
        raise click.UsageError("partitioners runs no transactions: leave transactional.id out")


def _stage(
    conf: Mapping[str, Any], brokers: bool, real: bool, partitions: int, slow: Sequence[int], rtt: int, pause: float
) -> Stage:
    if brokers:
        return _routing.GivenStage(str(conf["bootstrap.servers"]), partitions, slow)
    try:
        return _routing.RealStage(partitions, slow, pause) if real else _routing.MockStage(partitions, slow, rtt)
    except (KafkaException, RuntimeError, ValueError) as problem:  # no Java or Kafka among them
        raise Failure(str(problem), 2) from None


def _head(stage: Stage, conf: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    cluster: dict[str, Any] = {
        "bootstrap": stage.bootstrap,
        "kind": stage.kind,
        "partitions": stage.partitions,
        "slow_brokers": sorted(stage.slow),
    }
    if isinstance(stage, _routing.MockStage):
        cluster["slow_rtt_ms"] = stage.rtt_ms
    if isinstance(stage, _routing.RealStage):
        cluster["slow_pause"] = stage.share
    return {
        **versions(),
        "cluster": cluster,
        "load": {"record_size": len(VALUE), "rounds": rounds},
        "config": shown({**conf, "bootstrap.servers": stage.bootstrap}),
    }


def _say(what: str) -> None:
    """Progress, on stderr and on a terminal only."""
    screen = Console(stderr=True)
    if screen.is_terminal:
        screen.print(what, style="dim")


# ---- as much as goes


def _many(
    report: dict[str, Any],
    stage: Stage,
    conf: Mapping[str, Any],
    names: Sequence[str],
    rounds: int,
    load: Mapping[str, Any],
    plot: Path | None,
    form: str,
) -> None:
    done: dict[str, list[Flood]] = {name: [] for name in names}
    stage.warm_up(conf)
    for turn in range(rounds):
        for name in names:
            _say(f"round {turn + 1} of {rounds}: {name}")
            done[name].append(
                _routing.flood(CONTENDERS[name], conf, stage, seconds=load["seconds"], records=load["records"])
            )
    rows = _summarise(done)
    if form == "json":
        report["load"] |= load
        report["rounds"] = [_flood_as_json(turn, one) for runs in done.values() for turn, one in enumerate(runs, 1)]
        report["summary"] = rows
        click.echo(json.dumps(report, indent=2))
    else:
        console().print(_table(rows, stage, rounds))
    if plot is not None:
        with _drawing(plot):
            _pictures.draw_floods(plot, _flood_title(stage), done)


def _flood_title(stage: Stage) -> str:
    slow = f", {' and '.join(map(str, sorted(stage.slow)))} slow" if stage.slow else ""
    brokers = {"mock": f"{BROKERS} mock brokers", "real": f"{BROKERS} Kafka brokers", "given": stage.bootstrap}
    return f"Records without a key: {brokers[stage.kind]}{slow}"


def _flood_as_json(turn: int, one: Flood) -> dict[str, Any]:
    return {
        "round": turn,
        "partitioner": one.contender,
        "records": one.records,
        "seconds": one.seconds,
        "records_per_s": one.rate,
        "slow_share": one.slow_share,
        "records_per_request": one.per_request,
        "partitions": {
            number: {
                "records": records,
                "slow": number in one.slow,
                "queue_ms": {
                    "samples": len(times := sorted(one.queue_ms.get(number, ()))),
                    "p50": _routing.percentile(times, 0.5),
                    "p99": _routing.percentile(times, 0.99),
                },
            }
            for number, records in sorted(one.written.items())
        },
    }


def _some(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return spread(known) if known else None


def _summarise(done: Mapping[str, Sequence[Flood]]) -> list[dict[str, Any]]:
    """A row per partitioner; ratios are taken round by round, against librdkafka's default."""
    rivals = done.get(RIVAL, ())
    return [
        {
            "partitioner": name,
            "rounds": len(runs),
            "records_per_s": spread([one.rate for one in runs]),
            "ratio": _some([one.rate / rival.rate for one, rival in zip(runs, rivals, strict=False)]),
            "slow_share": _some([one.slow_share for one in runs]),
            "queue_ms": {
                speed: {
                    label: _some([one.queue(part, speed == "slow") for one in runs])
                    for label, part in (("p50", 0.5), ("p99", 0.99))
                }
                for speed in ("fast", "slow")
            },
            "records_per_request": _some([one.per_request for one in runs]),
        }
        for name, runs in done.items()
    ]


def _table(rows: Sequence[Mapping[str, Any]], stage: Stage, rounds: int) -> Table:
    caption = "queue time from handing in to acknowledgement, medians of the rounds"
    if rounds > 1:
        caption += "; elsewhere median (min..max)"
    table = Table(title=_flood_title(stage), caption=caption)
    table.add_column("partitioner", no_wrap=True)
    titles = ["M records/s", f"against {RIVAL}"]
    titles += ["to slow brokers", "fast: p50, p99 ms", "slow: p50, p99 ms"] if stage.slow else ["p50, p99 ms"]
    for title in (*titles, "records/request"):
        table.add_column(title, justify="right")
    for row in rows:
        queues = [_pair(row["queue_ms"][speed]) for speed in (("fast", "slow") if stage.slow else ("fast",))]
        shares = [cell(row["slow_share"], ".1f", 0.01, " %")] if stage.slow else []
        table.add_row(
            row["partitioner"],
            cell(row["records_per_s"], ".2f", 1e6),
            cell(row["ratio"], ".2f", unit="x"),
            *shares,
            *queues,
            "" if row["records_per_request"] is None else f"{row['records_per_request']['median']:,.0f}",
        )
    return table


def _pair(queue: Mapping[str, Mapping[str, float] | None]) -> str:
    return ", ".join("-" if one is None else f"{one['median']:.0f}" for one in (queue["p50"], queue["p99"]))


# ---- a few records


def _few(
    report: dict[str, Any],
    stage: Stage,
    conf: Mapping[str, Any],
    names: Sequence[str],
    plot: Path | None,
    form: str,
) -> None:
    done: dict[str, Trickle] = {}
    for name in names:
        _say(name)
        done[name] = _routing.trickle(CONTENDERS[name], conf, stage, records=FEW_RECORDS, interval_s=FEW_INTERVAL_S)
    if form == "json":
        report["load"] |= {"records": FEW_RECORDS, "interval_s": FEW_INTERVAL_S}
        report["runs"] = [
            {
                "partitioner": name,
                "records": [
                    {"handed_in_s": given, "acknowledged_s": arrived, "partition": partition}
                    for given, arrived, partition in run.rows
                ],
            }
            for name, run in done.items()
        ]
        click.echo(json.dumps(report, indent=2))
    else:
        console().print(_few_table(done, conf))
    if plot is not None:
        linger = float(conf["linger.ms"]) / 1e3
        title = f"{FEW_RECORDS} records without a key, {stage.partitions} partitions, linger {linger:g} s"
        with _drawing(plot):
            _pictures.draw_trickles(plot, title, done)


def _few_table(done: Mapping[str, Trickle], conf: Mapping[str, Any]) -> Table:
    table = Table(
        title=f"{FEW_RECORDS} records, one every {FEW_INTERVAL_S * 1e3:g} ms, "
        f"linger.ms={conf['linger.ms']}, sticky.batch.size={conf['sticky.batch.size']}",
        caption="seconds from the first record; waits from handing in to acknowledgement",
    )
    table.add_column("partitioner", no_wrap=True)
    for title in ("partitions", "last handed in", "acknowledged", "wait: median ms", "longest ms"):
        table.add_column(title, justify="right")
    for name, run in done.items():
        waits = run.waits_ms()
        arrived = [row[1] for row in run.rows]
        table.add_row(
            name,
            str(len({row[2] for row in run.rows})),
            f"{max(row[0] for row in run.rows):.2f}",
            f"{min(arrived):.2f} .. {max(arrived):.2f}",
            f"{median(waits):.0f}",
            f"{waits[-1]:.0f}",
        )
    return table
