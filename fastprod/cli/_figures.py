"""What the measuring commands share: a broker to measure on, progress, and figures with their spread."""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import click
import confluent_kafka
from confluent_kafka import KafkaException
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fastprod import __version__
from fastprod._java_options import translate
from fastprod.cli import _load, _options
from fastprod.cli._options import Failure

SECRET = re.compile(r"^(sasl|ssl)\.|password|passphrase|secret|token|credential|\.pem$", re.IGNORECASE)
MEGABYTE = 1024 * 1024
ROOM = 1024 * MEGABYTE  # bytes that a broker of ours keeps of all that was sent


# ---- before


# The options that say where records go, and how.
shared = _options.together(
    click.option("-t", "--topic", default="fastprod-perf", show_default=True, help="Where the records go."),
    click.option(
        "--partitions",
        type=click.IntRange(1),
        default=10,
        show_default=True,
        help="Of the topic, where it has to be created.",
    ),
    _options.client_options(
        "A client's option, repeatable. Goes to every client; fastprod's own options to fastprod alone."
    ),
    click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True),
)


def brokers(given: dict[str, Any], bootstrap: str | None, real: bool) -> str | None:
    """The brokers that the user named, also put into the options; complains about options that perf cannot serve."""
    if bootstrap is not None:
        given["bootstrap.servers"] = bootstrap
    named: str | None = given.get("bootstrap.servers") or given.get("metadata.broker.list")
    if named and real:
        raise click.UsageError("--real starts a broker of its own: leave it out, or the brokers")
    if given.get("transactional.id"):
        raise click.UsageError("perf runs no transactions: leave transactional.id out")
    return named


def configuration(given: Mapping[str, Any]) -> dict[str, Any]:
    """Checked by making a client, which connects to nobody before it is asked to."""
    try:
        conf = _load.full_configuration(translate(given))
        confluent_kafka.Producer({**_load.for_librdkafka(conf), "bootstrap.servers": ""}).close()
    except KafkaException as problem:
        raise Failure(problem.args[0].str(), 2) from None
    except (TypeError, ValueError) as problem:
        raise Failure(f"unusable option: {problem}", 2) from None
    return conf


def shown(conf: Mapping[str, Any]) -> dict[str, Any]:
    """The options without their secrets."""
    return {name: "***" if SECRET.search(name) else value for name, value in sorted(conf.items())}


def real_broker(topic: str | None, partitions: int) -> Any:
    """An Apache Kafka of one broker that forgets old records before it fills the machine's memory.

    Without a topic it keeps what it has until it is told to forget it.
    """
    from fastprod.testing import KafkaCluster

    kept = ROOM // partitions
    config = {
        "log.retention.bytes": -1 if topic is None else kept,
        "log.segment.bytes": max(kept // 4, MEGABYTE),
        "log.retention.check.interval.ms": 1000,
        "log.segment.delete.delay.ms": 1000,
    }
    try:
        return KafkaCluster(topics={} if topic is None else {topic: partitions}, config=config)
    except (KafkaException, RuntimeError, ValueError) as problem:  # no Java or Kafka among them
        raise Failure(str(problem), 2) from None


# ---- meanwhile


def nothing(done: int) -> None:
    """Progress that nobody sees."""


@contextmanager
def progress(total: int, what: str = "records") -> Iterator[Callable[[int], None]]:
    """A line on stderr, on a terminal only, drawn by whoever advances it."""
    terminal = Console(stderr=True)
    if not terminal.is_terminal:
        yield nothing
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=terminal, auto_refresh=False, transient=True, redirect_stdout=False) as bar:
        task = bar.add_task("", total=total)
        drawn = 0.0

        def advance(done: int) -> None:
            nonlocal drawn
            bar.advance(task, done)
            if time.monotonic() - drawn > 0.25:
                bar.refresh()
                drawn = time.monotonic()

        bar.refresh()
        yield advance


# ---- afterwards


def versions() -> dict[str, Any]:
    """What was measured, for the head of a report."""
    return {
        "fastprod": __version__,
        "confluent_kafka": confluent_kafka.__version__,
        "librdkafka": confluent_kafka.libversion()[0],
        "python": platform.python_version(),
    }


def console() -> Console:
    """Where tables go. Off a terminal there is no width to keep to."""
    return Console() if sys.stdout.isatty() else Console(width=140)


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": median(values), "min": min(values), "max": max(values)}


def cell(found: Mapping[str, float] | None, form: str, scale: float = 1.0, unit: str = "") -> str:
    """A spread in a table."""
    if found is None:
        return ""
    middle, low, high = (format(found[name] / scale, form) for name in ("median", "min", "max"))
    return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low}..{high})"
