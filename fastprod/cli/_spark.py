"""A quiet Spark for the command line: its chatter goes to a file, its progress to a bar."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fastprod.cli._options import Failure
from fastprod.testing._java import KafkaUnavailable, java_program
from fastprod.testing._spark import spark_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from fastprod.spark import ExportPlan

__all__ = ["interruptibly", "progress_of", "session", "so_far"]

POLL_S = 0.2
CANCEL_S = 0.5  # between two orders to Spark to give up
START_S = 120.0  # that an interrupted start may still take; a second Ctrl-C ends the waiting


@contextmanager
def session(master: str, name: str, config: Mapping[str, str] | None = None) -> Iterator[SparkSession]:
    """A Spark session whose log goes to a file for as long as it lives; if it does not start, its last line is told."""
    try:
        from pyspark.sql import SparkSession
    except ModuleNotFoundError:
        raise Failure("this command needs pyspark: pip install 'fastprod[spark]'", 2) from None
    try:
        java_program()
    except KafkaUnavailable:
        raise Failure(
            "Spark needs Java 17 or newer, and there is none: install it (Debian: openjdk-17-jre-headless) or set "
            "JAVA_HOME",
            2,
        ) from None
    spark_environment(local=master.startswith("local"))
    with tempfile.TemporaryDirectory(prefix="fastprod-spark-") as work:
        log = Path(work, "spark.log")
        builder = (
            SparkSession.builder.master(master)
            .appName(name)
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.warehouse.dir", str(Path(work, "warehouse")))
            .config(map=dict(config or {}))
        )
        with _stderr_to(log):  # the JVM inherits it, and so do its Python workers
            try:
                spark = _started(builder)
            except Exception as problem:
                words = log.read_text(errors="replace").strip().splitlines()
                raise Failure(
                    f"Spark does not start with --master {master}: {words[-1] if words else problem}", 2
                ) from None
        spark.sparkContext.setLogLevel("ERROR")
        try:
            yield spark
        finally:
            with suppress(Exception):
                spark.stop()


def _started(builder: SparkSession.Builder) -> SparkSession:
    """Lets a thread start Spark: if that is interrupted, a JVM is left behind that nobody ends."""
    starting: Future[SparkSession] = Future()

    def start() -> None:
        try:
            starting.set_result(builder.getOrCreate())
        except Exception as problem:
            starting.set_exception(problem)

    threading.Thread(target=start, daemon=True).start()
    try:
        return starting.result()
    except KeyboardInterrupt:
        wait([starting], START_S)  # unless Ctrl-C is pressed again
        if starting.done():
            with suppress(Exception):
                starting.result().stop()
        raise


def interruptibly(engine: SparkSession, work: Callable[[Event], None]) -> None:
    """Lets a thread do the work: an interruption in the middle of a call to Spark's JVM would leave its connection in
    disorder and tracebacks on the terminal."""
    stop = Event()
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, stop)
        try:
            working.result()
        except KeyboardInterrupt:
            stop.set()
            while not working.done():
                engine.sparkContext.cancelAllJobs()
                wait([working], CANCEL_S)
            raise


@contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    sys.stderr.flush()
    kept = os.dup(2)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(target)


@contextmanager
def progress_of(spark: SparkSession, what: str) -> Iterator[Callable[[ExportPlan], None]]:
    """A bar on the terminal that grows with the tasks of the jobs that run inside.

    Whoever knows more gives the plan to the function that this yields: the line then tells rows, bytes and files, as
    far as the tasks that have ended, which have about equally many bytes each, and the time left.
    """
    console = Console(stderr=True)
    plans: list[ExportPlan] = []
    if not console.is_terminal:
        yield plans.append
        return
    done = threading.Event()
    tracker = spark.sparkContext.statusTracker()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tasks{task.fields[more]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(what, total=None, more="")

        def watch() -> None:
            while not done.wait(POLL_S):
                stages = [tracker.getStageInfo(number) for number in tracker.getActiveStageIds()]
                known = [stage for stage in stages if stage is not None]
                if known:
                    total = sum(stage.numTasks for stage in known)
                    completed = sum(stage.numCompletedTasks for stage in known)
                    more = so_far(plans[-1], completed) if plans else ""
                    progress.update(bar, total=total, completed=completed, more=more)

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield plans.append
        finally:
            done.set()
            watcher.join()
        if plans:  # the last tasks have ended between two looks
            tasks = plans[-1].splits
            progress.update(bar, total=tasks, completed=tasks, more=so_far(plans[-1], tasks), refresh=True)


def so_far(plan: ExportPlan, completed: int) -> str:
    """What the tasks that have ended have written, about."""
    share = min(1.0, completed / plan.splits) if plan.splits else 1.0
    rows = "" if plan.rows is None else f", {share * plan.rows:,.0f} of {plan.rows:,} rows"
    files = f", {share * plan.files:,.0f} of {plan.files:,} files"
    return f"{rows}, {share * plan.bytes / 1e6:,.0f} of {plan.bytes / 1e6:,.0f} MB{files}"
