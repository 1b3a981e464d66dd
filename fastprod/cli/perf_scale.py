"""`fastprod perf scale`: what a record costs with more threads, partitions, topics, larger values and buffers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import click
from rich.table import Table

from fastprod.cli import _load, _scale
from fastprod.cli._figures import cell, console, progress, shown, spread, versions
from fastprod.cli._load import DeliveryError, Unfit, Unreachable
from fastprod.cli._options import Failure
from fastprod.cli._scale import CONFLUENT, CPU, RATE, Case, Figure

OURS = _load.OURS.name


@dataclass(frozen=True, slots=True)
class Round:
    """One run of one client."""

    number: int
    case: Case
    client: str
    figures: Mapping[str, float]


def _only(ctx: click.Context, param: click.Parameter, text: str | None) -> list[str]:
    if text is None:
        return list(_scale.CONCERNS)
    names = list(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in _scale.CONCERNS:
            raise click.BadParameter(f"unknown concern {name!r}; known: {', '.join(_scale.CONCERNS)}")
    return names


@click.command()
@click.option(
    "--only",
    metavar="CONCERNS",
    callback=_only,
    help=f"A comma list instead of everything. Known: {', '.join(_scale.CONCERNS)}.",
)
@click.option("--rounds", type=click.IntRange(1), help="Runs per client and line. Default: 5, with --quick 1.")
@click.option("--quick", is_flag=True, help="A few thousand records per run: shows that it works, measures nothing.")
@click.option(
    "--rows",
    type=click.IntRange(10_000),
    help=f"Handed in against dead brokers. Default: {_scale.FULL.rows:,}, with --quick {_scale.QUICK.rows:,}.",
)
@click.option("--format", "form", type=click.Choice(["text", "json", "markdown"]), default="text", show_default=True)
@click.pass_context
def scale(ctx: click.Context, only: list[str], rounds: int | None, quick: bool, rows: int | None, form: str) -> None:
    """Measure what a record costs as things grow, beside confluent-kafka.

    \b
    threads      produce() with the default buffer and with 8 MB, produce_many, and a small buffer far away
    partitions   keyed records to 1 up to 10,000 partitions
    topics       a column of topics, 1 up to 1,000 of them
    sizes        values of 10 B to 1 MB, and of sizes that change all the time
    buffers      buffer.memory of 4 MB to 1 GB
    new-topics   the first records to 400 topics
    rebuild      the load table while partitions are stuck
    lock         how long a bulk call keeps the lock for which others wait; on Linux
    rejected     rows that find no room: time and memory; on Linux

    Records of 100 B unless said otherwise, linger.ms=5, acks=all and idempotence, to mock brokers in a process of their
    own. The clock runs until all are acknowledged, and the brokers' count is compared. confluent-kafka sends the same
    records in a loop of produce() with poll(0) now and then, as the fastest of its ways, with
    queue.buffering.max.kbytes as large as our buffer.memory where that is given. Rounds run in turns: every line and
    client once, then all again; ratios are taken round by round.

    A bar says what was aimed at; it is met if the median of the rounds meets it. How fast everything is depends on what
    else the machine does, so the load average is shown; ratios depend on it less.

    Exit code: 0, whatever bars are met; 1 when records were not delivered; 2 for wrong usage; 130 after Ctrl-C.
    """
    amounts = _scale.QUICK if quick else _scale.FULL
    if rows is not None:
        amounts = replace(amounts, rows=rows)
    rounds = rounds or (1 if quick else 5)
    done: list[Round] = []
    busy = [os.getloadavg()[0]]
    report: dict[str, Any] = {
        **versions(),
        "machine": {"cores": os.cpu_count(), "load_average": busy},
        "load": {"rounds": rounds, "quick": quick, "only": only, "rows": amounts.rows},
        "config": shown(_scale.configuration("", {})),
    }
    interrupted = False
    problem: Exception | None = None
    try:
        for concern in only:
            _run(concern, amounts, rounds, done)
    except KeyboardInterrupt:
        interrupted = True
    except (DeliveryError, Unfit, Unreachable) as found:
        problem = found
    busy.append(os.getloadavg()[0])
    _show(report, done, form, interrupted)
    if problem is not None:
        raise Failure(str(problem), 1 if isinstance(problem, DeliveryError) else 2) from None
    if interrupted:
        ctx.exit(130)


def _run(concern: str, amounts: _scale.Amounts, rounds: int, done: list[Round]) -> None:
    """Rounds in turns: every case and client once, then all again."""
    with ExitStack() as stack:
        cases = _scale.CONCERNS[concern](stack, amounts)
        with progress(rounds * sum(len(case.runs(0)) for case in cases), f"{concern}, runs") as advance:
            for number in range(rounds):
                for case in cases:
                    for client, run in case.runs(number):
                        done.append(Round(number + 1, case, client, run()))
                        advance(1)  # drawing would be billed to the client: between runs


# ---- showing


def _summarise(done: Sequence[Round]) -> list[dict[str, Any]]:
    """A row per case and figure; a ratio is of two runs of the same round."""
    found: dict[tuple[str, str, str], dict[int, Mapping[str, float]]] = {}
    cases: dict[tuple[str, str], Case] = {}
    for one in done:
        cases[one.case.concern, one.case.name] = one.case
        found.setdefault((one.case.concern, one.case.name, one.client), {})[one.number] = one.figures
    rows = []
    for (concern, name), case in cases.items():
        ours, theirs = (found.get((concern, name, client), {}) for client in (OURS, CONFLUENT))
        for figure, bar in case.lines.items():
            beside = theirs if bar is None or bar.of in (None, CONFLUENT) else found.get((concern, bar.of, OURS), {})
            ratio = _ratio(figure, ours, beside)
            judged = _spread(figure, ours) if bar is not None and bar.of is None else ratio
            rows.append(
                {
                    "concern": concern,
                    "case": name,
                    "figure": figure.name,
                    "unit": figure.unit,
                    "fastprod": _spread(figure, ours),
                    "fastprod_cpu_us": _spread(CPU, ours) if figure is RATE else None,
                    "confluent": _spread(figure, theirs),
                    "confluent_cpu_us": _spread(CPU, theirs) if figure is RATE else None,
                    "ratio_to_confluent": _ratio(figure, ours, theirs),
                    "ratio": ratio,
                    "bar": None if bar is None else bar.text(figure.unit),
                    "met": None if bar is None or judged is None else bar.holds(judged["median"]),
                }
            )
    return rows


def _spread(figure: Figure, runs: Mapping[int, Mapping[str, float]]) -> dict[str, float] | None:
    """In the figure's unit."""
    return spread([one[figure.name] / figure.scale for one in runs.values()]) if runs else None


def _ratio(
    figure: Figure, ours: Mapping[int, Mapping[str, float]], others: Mapping[int, Mapping[str, float]]
) -> dict[str, float] | None:
    """Round by round; an interrupted run may lack one of the two."""
    both = [(ours[number][figure.name], others[number][figure.name]) for number in ours if number in others]
    return spread([mine / other for mine, other in both if other]) if any(other for _, other in both) else None


def _show(report: dict[str, Any], done: Sequence[Round], form: str, interrupted: bool) -> None:
    rows = _summarise(done)
    if form == "json":
        report["rounds"] = [
            {
                "round": one.number,
                "concern": one.case.concern,
                "case": one.case.name,
                "client": one.client,
                **one.figures,
            }
            for one in done
        ]
        report["summary"] = rows
        report["interrupted"] = interrupted
        click.echo(json.dumps(report, indent=2))
    elif rows and form == "markdown":
        click.echo(_markdown(rows, _caption(report)))
    elif rows:
        console().print(_table(rows, _caption(report)))


COLUMNS = ("", "unit", "fastprod", "CPU us", "confluent", "CPU us", "ratio (min..max)", "bar", "met")


def _cells(row: Mapping[str, Any]) -> list[str]:
    """Of one line. A figure without a ratio has its own spread there."""
    form = _scale.FIGURES[row["figure"]].form

    def middle(name: str, form: str = CPU.form) -> str:
        return "" if row[name] is None else format(row[name]["median"], form)

    return [
        row["case"],
        row["unit"],
        middle("fastprod", form),
        middle("fastprod_cpu_us"),
        middle("confluent", form),
        middle("confluent_cpu_us"),
        cell(row["ratio"], ".2f", unit="x") or cell(row["fastprod"], form).partition(" ")[2],
        row["bar"] or "",
        {True: "yes", False: "no", None: ""}[row["met"]],
    ]


def _caption(report: Mapping[str, Any]) -> str:
    before, after = report["machine"]["load_average"]
    return (
        f"median (min..max) of {report['load']['rounds']} round(s); fastprod {report['fastprod']}, confluent-kafka "
        f"{report['confluent_kafka']}, Python {report['python']}, {report['machine']['cores']} cores, load average "
        f"{before:.1f} before and {after:.1f} after" + ("; --quick: no measurement" if report["load"]["quick"] else "")
    )


def _table(rows: Sequence[Mapping[str, Any]], caption: str) -> Table:
    table = Table(caption=caption)
    for number, title in enumerate(COLUMNS):
        table.add_column(title, justify="right" if 2 <= number <= 6 else "left", no_wrap=number > 0)
    concern = rows[0]["concern"]
    for row in rows:
        if row["concern"] != concern:
            table.add_section()
        concern = row["concern"]
        table.add_row(*_cells(row))
    return table


def _markdown(rows: Sequence[Mapping[str, Any]], caption: str) -> str:
    lines = [COLUMNS, ["---:" if 2 <= number <= 6 else "---" for number in range(len(COLUMNS))], *map(_cells, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{caption[0].upper()}{caption[1:]}."
