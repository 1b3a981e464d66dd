"""`fastprod perf`: kafka-producer-perf-test's question, put to fastprod and, side by side, to others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from typing import Any

import click
from click.core import ParameterSource
from rich.table import Table

from fastprod.cli import _java_load, _load  # noqa: F401  (_java_load adds itself to the clients)
from fastprod.cli._figures import (
    MEGABYTE,
    brokers,
    cell,
    configuration,
    console,
    nothing,
    progress,
    real_broker,
    shared,
    shown,
    spread,
    versions,
)
from fastprod.cli._load import DeliveryError, Load, Round, Target, Unfit, Unreachable, measure
from fastprod.cli._options import Failure

# ---- options


def _clients(ctx: click.Context, param: click.Parameter, text: str | None) -> list[_load.Runner]:
    if text is None:
        return []
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in _load.RUNNERS:
            raise click.BadParameter(f"unknown client {name!r}; known: {', '.join(sorted(_load.RUNNERS))}")
    return [_load.RUNNERS[name] for name in names]


def _rate(ctx: click.Context, param: click.Parameter, value: float) -> float | None:
    if value == -1:
        return None
    if not 0 < value < float("inf"):
        raise click.BadParameter("records per second above 0, or -1 for no limit")
    return value


class _Perf(click.Group):
    """A command by itself, and with subcommands that are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return ["scale", "spark"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = getattr(import_module(f"fastprod.cli.perf_{cmd_name}"), cmd_name)
        return command


@click.group(cls=_Perf, invoke_without_command=True, subcommand_metavar="[scale ... | spark ...]")
@click.option(
    "-b",
    "--bootstrap",
    metavar="HOST:PORT,...",
    help="Brokers. Without: a mock broker, in a process of its own.",
)
@click.option(
    "--real", is_flag=True, help="Without brokers: an Apache Kafka of one broker on this machine; needs Java."
)
@click.option("--num-records", type=click.IntRange(1), default=1_000_000, show_default=True, help="Per run.")
@click.option(
    "--record-size", type=click.IntRange(0), default=100, show_default=True, help="Bytes of a record's value."
)
@click.option(
    "--throughput",
    type=float,
    default=-1,
    show_default=True,
    callback=_rate,
    help="Records per second, handed in evenly, a millisecond's worth at a time; -1 = as fast as possible.",
)
@click.option("--keys", type=click.IntRange(0), default=0, show_default=True, help="Distinct keys; 0 = none.")
@click.option(
    "--mode",
    "modes",
    type=click.Choice(_load.MODES),
    multiple=True,
    help="bulk: whole columns of records a call; single: a call per record; callback: a call per record with "
    "on_delivery. Repeatable. Default: bulk; all with --compare; callback with --throughput.",
)
@click.option("--rounds", type=click.IntRange(1), help="Runs per client and mode. Default: 5 with --compare, else 1.")
@click.option(
    "--compare",
    "rivals",
    metavar="CLIENTS",
    callback=_clients,
    help=f"Run these clients too, in turns with fastprod; a comma list. Known: {', '.join(_load.RUNNERS)}.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0),
    default=100_000,
    show_default=True,
    help="Records that each producer sends before the clock starts, besides one per partition.",
)
@shared
@click.pass_context
def perf(
    ctx: click.Context,
    bootstrap: str | None,
    real: bool,
    topic: str,
    num_records: int,
    record_size: int,
    throughput: float | None,
    partitions: int,
    keys: int,
    options: dict[str, str],
    file: dict[str, str],
    modes: tuple[str, ...],
    rounds: int | None,
    rivals: list[_load.Runner],
    form: str,
    warmup: int,
) -> None:
    """Measure how fast records get into Kafka.

    Prints the line that kafka-producer-perf-test ends with. The clock runs from the first record handed in
    until all are acknowledged. Latency is the time from handing a record in to its acknowledgement: of every
    record in callback mode, of one in 1,000 in the others, where asking each would disturb the measurement.

    With --compare, each client sends the same records to the same topic with the same options, linger.ms=5,
    acks=all and idempotence unless -X says otherwise, in alternating rounds with a fresh producer each; the
    table shows medians and, in brackets, the extremes. Together with --throughput, latencies are compared:
    from handing in to the delivery callback.

    java is Kafka's own ProducerPerformance, warmed up, with librdkafka's batch size of 1 MB and with Java's defaults.
    It has one way of sending, shown beside our bulk calls, or beside those with a callback if there is a --throughput.
    "As started" is the same with 1 MB in a process without a warm-up: the throughput that it prints, and the CPU of
    the whole process.

    Exit code: 0; 1 when records were not delivered; 2 for wrong usage or no broker; 130 after Ctrl-C.
    """
    if ctx.invoked_subcommand is not None:
        if any(ctx.get_parameter_source(name) is not ParameterSource.DEFAULT for name in ctx.params):
            raise click.UsageError(f"options of perf {ctx.invoked_subcommand} go behind that word")
        return
    modes = _modes(modes, throughput, bool(rivals))
    rounds = rounds or (5 if rivals else 1)
    given: dict[str, Any] = {**file, **options}
    given_brokers = brokers(given, bootstrap, real)
    for runner in rivals:
        if runner.needs_real_broker and not (given_brokers or real):
            raise click.UsageError(f"{runner.name} does not work with mock brokers: add -b, or --real")

    done: list[Round] = []
    report: dict[str, Any] = {}
    interrupted = False
    try:
        with ExitStack() as stack:
            conf = configuration(given)
            load = Load(
                topic,
                num_records,
                _load.make_block(num_records, record_size, keys),
                throughput,
                warmup,
                latency=not rivals or throughput is not None,
            )
            for runner in rivals:
                runner.check(load, conf)
            if not given_brokers:
                cluster = stack.enter_context((real_broker if real else _mock)(topic, partitions))
                conf["bootstrap.servers"] = cluster.bootstrap_servers
            target = Target(conf, topic)
            target.open(partitions)
            report = _head(load, conf, target, record_size, keys, rounds, mock=not (given_brokers or real))
            for finished in _run(load, conf, target, modes, rounds, rivals):
                done.append(finished)
                if finished.interrupted:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        interrupted = True
    except (Unfit, Unreachable) as problem:
        raise Failure(str(problem), 2) from None
    except DeliveryError as problem:
        _show(report, done, rivals, form, False, record_size, throughput)
        raise Failure(str(problem), 1) from None
    _show(report, done, rivals, form, interrupted, record_size, throughput)
    if interrupted:
        ctx.exit(130)


def _modes(given: tuple[str, ...], rate: float | None, compare: bool) -> tuple[str, ...]:
    if rate is not None:
        if "bulk" in given:
            raise click.UsageError("--throughput hands records in one by one: use --mode callback or single")
        return tuple(dict.fromkeys(given)) or ("callback",)
    return tuple(dict.fromkeys(given)) or (_load.MODES if compare else ("bulk",))


def _mock(topic: str, partitions: int) -> Any:
    from fastprod.testing import MockClusterProcess

    try:
        return MockClusterProcess(1, topics={topic: partitions})
    except ValueError as problem:
        raise Failure(str(problem), 2) from None


# ---- running


def _run(
    load: Load,
    conf: Mapping[str, Any],
    target: Target,
    modes: Sequence[str],
    rounds: int,
    rivals: Sequence[_load.Runner],
) -> Iterator[Round]:
    """Rounds in turns: every mode and client once, then all again."""
    runs = [
        (mode, runner, call)
        for mode in modes
        for runner in (_load.OURS, *rivals)
        for call in runner.ways(mode, load.rate)
    ]
    with progress(load.records * len(runs) * rounds) as advance:
        for _ in range(rounds):
            for mode, runner, call in runs:
                # Drawing would be billed to the client: between runs when comparing.
                while_running = advance if not rivals or load.rate is not None else nothing
                finished = measure(runner, mode, call, load, conf, target, while_running)
                if while_running is nothing:
                    advance(load.records)
                if finished.interrupted and rivals:
                    raise KeyboardInterrupt
                yield finished


# ---- showing


def summary_line(done: Round, record_size: int) -> str:
    """As kafka-producer-perf-test words it."""
    latency = done.latency() or dict.fromkeys(("avg", "max", *_load.PERCENTILES), 0.0)
    return (
        f"{done.records} records sent, {done.rate:.1f} records/sec "
        f"({done.rate * record_size / MEGABYTE:.2f} MB/sec), "
        f"{latency['avg']:.2f} ms avg latency, {latency['max']:.2f} ms max latency, "
        f"{latency['p50']:.0f} ms 50th, {latency['p95']:.0f} ms 95th, {latency['p99']:.0f} ms 99th, "
        f"{latency['p999']:.0f} ms 99.9th."
    )


def _head(
    load: Load, conf: Mapping[str, Any], target: Target, record_size: int, keys: int, rounds: int, mock: bool
) -> dict[str, Any]:
    return {
        **versions(),
        "cluster": {
            "bootstrap": target.address,
            "mock": mock,
            "topic": target.topic,
            "partitions": target.partitions,
        },
        "load": {
            "num_records": load.records,
            "record_size": record_size,
            "keys": keys,
            "throughput": load.rate,
            "warmup": load.warmup,
            "rounds": rounds,
        },
        "config": shown(conf),
    }


def _show(
    report: dict[str, Any],
    done: Sequence[Round],
    rivals: Sequence[_load.Runner],
    form: str,
    interrupted: bool,
    record_size: int,
    rate: float | None,
) -> None:
    rows = _summarise(done)
    if form == "json":
        report["rounds"] = _as_json(done, record_size)
        report["summary"] = rows
        report["interrupted"] = interrupted
        click.echo(json.dumps(report, indent=2))
    elif not rivals:
        several = len({one.mode for one in done}) > 1
        for one in done:
            click.echo((f"{one.mode}: " if several else "") + summary_line(one, record_size))
    elif rows:
        console().print(_throughput_table(rows) if rate is None else _latency_table(rows))


def _as_json(done: Sequence[Round], record_size: int) -> list[dict[str, Any]]:
    seen: dict[tuple[str, str, str], int] = {}
    found = []
    for one in done:
        who = (one.mode, one.client, one.call)
        seen[who] = seen.get(who, 0) + 1
        found.append(
            {
                "round": seen[who],
                "mode": one.mode,
                "client": one.client,
                "call": one.call,
                "records": one.records,
                "seconds": one.seconds,
                "records_per_s": one.rate,
                "mb_per_s": one.rate * record_size / MEGABYTE,
                "cpu_us_per_record": one.cpu_us,
                "latency_ms": one.latency(),
                "interrupted": one.interrupted,
            }
        )
    return found


def _summarise(done: Sequence[Round]) -> list[dict[str, Any]]:
    """A row per mode, client and call; ratios are fastprod's against that row, round by round."""
    groups: dict[tuple[str, str, str], list[Round]] = {}
    for one in done:
        groups.setdefault((one.mode, one.client, one.call), []).append(one)
    rows = []
    for (mode, client, call), members in groups.items():
        row: dict[str, Any] = {
            "mode": mode,
            "client": client,
            "call": call,
            "rounds": len(members),
            "records_per_s": spread([one.rate for one in members]),
            "cpu_us_per_record": spread([one.cpu_us for one in members]),
            "latency_ms": None,
            "throughput_ratio": None,
            "cpu_ratio": None,
        }
        latencies = [found for one in members if (found := one.latency()) is not None]
        if latencies:
            row["latency_ms"] = {
                name: spread([found[name] for found in latencies]) for name in ("avg", "max", *_load.PERCENTILES)
            }
        if client != _load.OURS.name:
            ours = groups[mode, _load.OURS.name, _load.OURS.calls[mode][0]]
            turns = list(zip(ours, members, strict=False))  # an interrupted run may lack the last
            row["throughput_ratio"] = spread([mine.rate / theirs.rate for mine, theirs in turns if theirs.rate])
            row["cpu_ratio"] = spread([theirs.cpu_us / max(mine.cpu_us, 1e-9) for mine, theirs in turns])
        rows.append(row)
    return rows


def _throughput_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(caption="median (min..max) of the rounds; ratios above 1 are in fastprod's favour")
    for title in ("mode", "client", "call"):
        table.add_column(title, no_wrap=True)
    for title in ("M records/s", "CPU us/record", "fastprod's throughput", "CPU it saves"):
        table.add_column(title, justify="right")
    mode = ""
    for row in rows:
        if row["mode"] != mode and mode:
            table.add_section()
        table.add_row(
            "" if row["mode"] == mode else row["mode"],
            row["client"],
            row["call"],
            cell(row["records_per_s"], ".2f", 1e6),
            cell(row["cpu_us_per_record"], ".2f"),
            cell(row["throughput_ratio"], ".2f", unit="x"),
            cell(row["cpu_ratio"], ".2f", unit="x"),
        )
        mode = row["mode"]
    return table


def _latency_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(caption="latency in ms from handing in to the delivery callback; median (min..max) of the rounds")
    for title in ("mode", "client"):
        table.add_column(title, no_wrap=True)
    for title in ("records/s", "50th", "95th", "99th", "99.9th", "CPU us/record"):
        table.add_column(title, justify="right")
    for row in rows:
        latency = row["latency_ms"] or {}
        table.add_row(
            row["mode"],
            row["client"],
            cell(row["records_per_s"], ".0f"),
            *(cell(latency.get(name), ".2f") for name in _load.PERCENTILES),
            cell(row["cpu_us_per_record"], ".2f"),
        )
    return table
