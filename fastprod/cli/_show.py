"""Figures of several rounds, as cells of a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from statistics import median

from rich.console import Console


def console() -> Console:
    """Where tables go. Off a terminal there is no width to keep to."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def cell(figures: Mapping[str, float] | None, form: str, scale: float = 1.0, unit: str = "") -> str:
    if figures is None:
        return ""
    middle, low, high = (format(figures[name] / scale, form) for name in ("median", "min", "max"))
    return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low}..{high})"
