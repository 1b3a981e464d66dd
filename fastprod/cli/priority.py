"""`fastprod priority`: three experiments with priority levels, as tables and pictures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from rich.table import Table

from fastprod import _positions
from fastprod.cli import _levels, _options, _pictures
from fastprod.cli._figures import console, progress, shown, versions
from fastprod.cli._levels import EXPERIMENTS, LEVELS, POLL, Experiment, Stuck
from fastprod.cli._options import Failure

RECORDS = 20_000
PAUSE_MS = 20.0
CONNECT_S = 10.0
POINTS = 400  # of a line in JSON


@click.command()
@click.option("-b", "--bootstrap", metavar="HOST:PORT,...", help="Brokers. Without: an Apache Kafka on this machine.")
@click.option(
    "--experiment",
    "names",
    type=click.Choice(tuple(EXPERIMENTS)),
    multiple=True,
    help="Repeatable. Default: all three.",
)
@click.option("--records", type=click.IntRange(100), default=RECORDS, show_default=True, help="Of each level.")
@click.option(
    "--pause",
    type=click.FloatRange(0),
    default=PAUSE_MS,
    show_default=True,
    help="What processing a poll takes, in ms.",
)
@_options.client_options("An option of all clients, repeatable.")
@click.option("--plot", metavar="FILE", callback=_pictures.picture, help="Draw a picture to this .png or .svg file.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.pass_context
def priority(
    ctx: click.Context,
    bootstrap: str | None,
    names: tuple[str, ...],
    records: int,
    pause: float,
    options: dict[str, str],
    file: dict[str, str],
    plot: Path | None,
    form: str,
) -> None:
    """Show what priority levels do: three levels with equally many records, and one slow consumer.

    \b
    no-priority   all in one topic of 15 partitions, read by a confluent_kafka.Consumer
    priority      a topic of 5 partitions for each level, read by a CapacityBurstConsumer
    wave          the same, but half of the highest level comes when the level below has borrowed its capacity

    Polls bring up to 50 records, which are processed at the same time. Topics on brokers given with -b are named
    fastprod-priority-... and stay.

    Exit code: 0; 1 when records did not arrive; 2 for wrong usage or no broker; 130 after Ctrl-C.
    """
    given: dict[str, Any] = {**file, **options}
    if bootstrap is not None:
        given["bootstrap.servers"] = bootstrap
    done: list[Experiment] = []
    with _brokers(given) as config:
        for name in dict.fromkeys(names or tuple(EXPERIMENTS)):
            with progress(records * LEVELS, f"{name}, records") as advance:
                try:
                    done.append(_levels.run(name, config, records, pause / 1e3, advance))
                except Stuck as problem:
                    raise Failure(f"{name}: {problem}", 1) from None
                except (KafkaException, ExceptionGroup) as problem:
                    first = problem.exceptions[0] if isinstance(problem, ExceptionGroup) else problem
                    raise Failure(f"{name}: {first.args[0].str() if first.args else first}", 2) from None
    if form == "json":
        click.echo(json.dumps(_report(done, config, records, pause), indent=2))
    else:
        _show(done)
    if plot is not None:
        _pictures.draw_levels(plot, f"{LEVELS} levels, {records:,} records each", done)
        click.echo(f"picture: {plot}", err=True)


@contextmanager
def _brokers(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if given.get("bootstrap.servers"):
        config = {"log_level": 0, **given}
        try:
            AdminClient(_positions.client_options(config)).list_topics(timeout=CONNECT_S)
        except KafkaException as problem:
            reason = problem.args[0].str()
            raise Failure(
                f"no broker answers at {given['bootstrap.servers']} within {CONNECT_S:g} s ({reason})", 2
            ) from None
        yield config
    else:
        from fastprod.testing import KafkaCluster
        from fastprod.testing.kafka import KafkaUnavailable

        try:
            cluster = KafkaCluster()
        except KafkaUnavailable as missing:
            raise Failure(f"{missing}; -b uses brokers of yours", 2) from None
        with cluster:
            yield {"log_level": 0, **given, "bootstrap.servers": cluster.bootstrap_servers}


def _show(done: list[Experiment]) -> None:
    table = Table()
    for heading in ("experiment", "level", "records", "half after s", "all after s"):
        table.add_column(heading, justify="left" if heading == "experiment" else "right")
    for run in done:
        for level in reversed(range(LEVELS)):
            table.add_row(
                run.name if level == LEVELS - 1 else "",
                str(level),
                f"{run.records[level]:,}",
                f"{run.reached(level, 0.5):.1f}",
                f"{run.reached(level, 1):.1f}",
                end_section=level == 0,
            )
    console().print(table)
    for run in done:
        for at in run.waves:
            console().print(f"{run.name}: the second half of level {LEVELS - 1} came after {at:.1f} s")


def _report(done: list[Experiment], config: dict[str, Any], records: int, pause: float) -> dict[str, Any]:
    return {
        **versions(),
        "load": {"records": records, "levels": LEVELS, "max_poll_records": POLL, "pause_ms": pause},
        "config": shown(config),
        "experiments": {
            run.name: {
                "half_s": [round(run.reached(level, 0.5), 3) for level in range(LEVELS)],
                "all_s": [round(run.reached(level, 1), 3) for level in range(LEVELS)],
                "waves_s": [round(at, 3) for at in run.waves],
                "rows": [[round(at, 3), *sums] for at, sums in run.rows[:: max(1, len(run.rows) // POINTS)]],
            }
            for run in done
        },
    }
