"""Pictures of `fastprod partitioners`, `priority` and `bundles`, drawn without a screen. Needs the `plot` extra."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from fastprod.cli._options import Failure
from fastprod.cli._routing import Flood, Trickle, percentile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fastprod.cli._levels import Experiment

FORMATS = (".png", ".svg")
MISSING = "--plot needs matplotlib: pip install 'fastprod[plot]'"
FAST_COLOUR, SLOW_COLOUR, QUIET_COLOUR = "#3b75af", "#d1603d", "#8a8a8a"
NARROW = 0.02  # of a ring, in radians
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",  # text stays text: small files, sharp at any size
    "svg.hashsalt": "fastprod",
}


def check() -> None:
    """Raises ModuleNotFoundError where matplotlib is missing."""
    import matplotlib  # noqa: F401


def picture(ctx: click.Context, param: click.Parameter, text: str | None) -> Path | None:
    """A path that can be drawn to, known before the run has taken its time."""
    if text is None:
        return None
    path = Path(text)
    if path.suffix.lower() not in FORMATS:
        raise click.BadParameter(f"a file name that ends in .png or .svg, not {text!r}")
    if not path.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {str(path.parent)!r}")
    try:
        check()
    except ModuleNotFoundError:
        raise Failure(MISSING, 2) from None
    return path


def _save(figure: Figure, path: Path) -> None:
    # Without a date, the same figures make the same file.
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)


def draw_floods(path: Path, title: str, rounds: Mapping[str, Sequence[Flood]]) -> None:
    """Records and queue time per partition, a column per contender, and below each one's throughput."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(7.0, 2.2 * len(rounds) + 0.6), 7.4), layout="constrained")
        figure.suptitle(title, fontsize=11)
        grid = figure.add_gridspec(3, len(rounds), height_ratios=(3, 3, 0.5 + 0.42 * len(rounds)))
        records_axes: Axes | None = None
        queue_axes: Axes | None = None
        for column, (name, done) in enumerate(rounds.items()):
            last = done[-1]  # a picture of one run: sums over runs would hide what happened
            partitions = sorted(last.written)
            colours = [SLOW_COLOUR if one in last.slow else FAST_COLOUR for one in partitions]
            upper = figure.add_subplot(grid[0, column], sharey=records_axes)
            upper.bar(partitions, [last.written[one] / 1e3 for one in partitions], color=colours)
            upper.set_title(name)
            lower = figure.add_subplot(grid[1, column], sharey=queue_axes)
            for one, colour in zip(partitions, colours, strict=True):
                times = sorted(last.queue_ms.get(one, ()))
                middle, late = percentile(times, 0.5), percentile(times, 0.99)
                if middle is not None and late is not None:
                    lower.vlines(one, middle, late, color=colour, linewidth=1.2)
                    lower.plot(one, middle, "o", color=colour, markersize=5)
                    lower.plot(one, late, "_", color=colour, markersize=8)
            lower.set_xlabel("partition")
            lower.grid(axis="y", color="#e4e4e4")
            for axes in (upper, lower):
                axes.set_axisbelow(True)
                axes.set_xlim(-0.8, len(partitions) - 0.2)
                axes.set_xticks(partitions if len(partitions) <= 12 else partitions[:: len(partitions) // 6])
                axes.tick_params(axis="x", labelsize=8)
                if column:
                    axes.tick_params(axis="y", labelleft=False)
            if records_axes is None or queue_axes is None:
                upper.set_ylabel("thousand records")
                lower.set_ylabel("queue time in ms,\nmedian to 99th percentile")
                lower.set_yscale("log")
                lower.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
                records_axes, queue_axes = upper, lower
        _draw_rates(figure.add_subplot(grid[2, :]), rounds)
        if any(one.slow for done in rounds.values() for one in done):
            figure.legend(
                handles=[
                    Patch(color=FAST_COLOUR, label="on a fast broker"),
                    Patch(color=SLOW_COLOUR, label="on a slow broker"),
                ],
                loc="outside lower center",
                ncols=2,
                frameon=False,
            )
        _save(figure, path)


def _draw_rates(axes: Axes, rounds: Mapping[str, Sequence[Flood]]) -> None:
    names = list(rounds)
    rates = {name: sorted(one.rate / 1e6 for one in done) for name, done in rounds.items()}
    middles = [median(rates[name]) for name in names]
    bars = axes.barh(names, middles, color=QUIET_COLOUR, height=0.62)
    for name, middle in zip(names, middles, strict=True):
        if len(rates[name]) > 1:
            axes.hlines(name, rates[name][0], rates[name][-1], color="black", linewidth=1)
        axes.annotate(
            f"{middle:.2f}",
            (rates[name][-1], name),
            xytext=(5, 0),
            textcoords="offset points",
            verticalalignment="center",
        )
    best = max(range(len(names)), key=middles.__getitem__)
    bars[best].set_color("#4f9d69")
    axes.set_xlim(0, 1.08 * max(rates[name][-1] for name in names))
    axes.invert_yaxis()
    several = len(next(iter(rates.values()))) > 1
    axes.set_xlabel("million records/s" + (", median of the rounds and their range" if several else ""))


def draw_trickles(path: Path, title: str, runs: Mapping[str, Trickle]) -> None:
    """A line per record, from handing in to acknowledgement, a panel per contender."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(7.0, 2.7 * len(runs) + 0.6), 4.0), layout="constrained")
        figure.suptitle(title, fontsize=11)
        first: Axes | None = None
        for column, (name, run) in enumerate(runs.items()):
            axes = figure.add_subplot(1, len(runs), column + 1, sharex=first, sharey=first)
            numbers = range(1, len(run.rows) + 1)
            axes.hlines(
                numbers, [row[0] for row in run.rows], [row[1] for row in run.rows], color="#dfe7ef", linewidth=2
            )
            axes.plot([row[0] for row in run.rows], numbers, ".", color=FAST_COLOUR, markersize=3)
            axes.plot([row[1] for row in run.rows], numbers, ".", color=SLOW_COLOUR, markersize=3)
            used = len({row[2] for row in run.rows})
            axes.set_title(f"{name}: {used} partition{'s' if used != 1 else ''}")
            axes.set_xlabel("seconds")
            if first is None:
                axes.set_ylabel("record")
                first = axes
            else:
                axes.tick_params(axis="y", labelleft=False)
        if first is not None:
            first.set_xlim(left=0)
        figure.legend(
            handles=[
                Line2D([], [], marker="o", markersize=4, linestyle="", color=FAST_COLOUR, label="handed in"),
                Line2D([], [], marker="o", markersize=4, linestyle="", color=SLOW_COLOUR, label="acknowledged"),
            ],
            loc="outside lower center",
            ncols=2,
            frameon=False,
        )
        _save(figure, path)


def draw_levels(path: Path, title: str, runs: Sequence[Experiment]) -> None:
    """Records processed over time, a line per level, a panel per experiment."""
    import matplotlib
    from matplotlib.figure import Figure

    colours = (QUIET_COLOUR, FAST_COLOUR, SLOW_COLOUR)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(7.0, 3.6 * len(runs)), 3.6), layout="constrained")
        figure.suptitle(title, fontsize=11)
        first: Axes | None = None
        for column, run in enumerate(runs):
            axes = figure.add_subplot(1, len(runs), column + 1, sharex=first, sharey=first)
            times = [0.0, *(at for at, _ in run.rows)]
            for level in reversed(range(len(run.records))):
                sums = [0, *(row[level] for _, row in run.rows)]
                axes.plot(
                    times, [one / 1e3 for one in sums], color=colours[level % len(colours)], label=f"level {level}"
                )
            for at in run.waves:
                axes.axvline(at, color=SLOW_COLOUR, linewidth=0.8, linestyle=":")
                axes.annotate("more of level 2", (at, 0), xytext=(3, 3), textcoords="offset points", fontsize=8)
            axes.set_title(run.name)
            axes.set_xlabel("seconds")
            axes.grid(color="#e4e4e4")
            axes.set_axisbelow(True)
            if first is None:
                axes.set_ylabel("thousand records processed")
                axes.legend(frameon=False)
                first = axes
            else:
                axes.tick_params(axis="y", labelleft=False)
        if first is not None:
            first.set_xlim(left=0)
            first.set_ylim(bottom=0)
        _save(figure, path)


class Wedge(NamedTuple):
    """A bundle in a picture."""

    lower: int
    upper: int
    load: float
    writer: int | None


def draw_rings(path: Path, title: str, panels: Mapping[str, Sequence[Wedge]]) -> None:
    """All positions as a ring, a panel for each map of bundles: the further out, the more load; a colour per writer."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6 * len(panels), 5.2), layout="constrained")
        figure.suptitle(title, fontsize=10)
        colours = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
        heaviest = max((wedge.load for wedges in panels.values() for wedge in wedges), default=0.0) or 1.0
        for column, (name, wedges) in enumerate(panels.items()):
            axes: Any = figure.add_subplot(1, len(panels), column + 1, projection="polar")
            axes.set_theta_zero_location("N")
            axes.set_theta_direction(-1)
            for number, wedge in enumerate(wedges):
                start, stop = (2 * math.pi * bound / (1 << 32) for bound in (wedge.lower, wedge.upper))
                colour = colours[(number if wedge.writer is None else wedge.writer) % len(colours)]
                length = wedge.load / heaviest
                axes.bar(start, length, stop - start, 0.35, align="edge", color=colour, alpha=0.75, linewidth=0)
                # The hub shows every bundle, also those without load; a line those too narrow to be seen.
                axes.bar(start, 0.06, stop - start, 0.27, align="edge", color=colour, linewidth=0)
                if stop - start < NARROW:
                    axes.plot([(start + stop) / 2] * 2, [0.27, 0.35 + length], color=colour, linewidth=1.2)
                axes.plot([start, start], [0.27, 0.33], color="white", linewidth=0.6)
            shares: dict[int | None, float] = {}
            for wedge in wedges:
                shares[wedge.writer] = shares.get(wedge.writer, 0.0) + wedge.load
            said = f"{len(wedges)} bundle{'s' * (len(wedges) != 1)}"
            if None not in shares:
                said += f", heaviest writer {max(shares.values()):.4g}"
            axes.set_title(f"{name}\n{said}")
            axes.set_ylim(0, 1.35)
            axes.tick_params(axis="x", labelsize=8, pad=-2)
            axes.set_yticks([])
            axes.set_xticks([0, math.pi / 2, math.pi, 3 * math.pi / 2], ["0", "0x40000000", "0x80000000", "0xc0000000"])
            axes.spines["polar"].set_visible(False)
            axes.grid(False)
        _save(figure, path)
