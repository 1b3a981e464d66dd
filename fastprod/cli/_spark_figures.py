"""What `fastprod perf spark` sees of a run from outside: CPU of processes, durations of tasks, connections."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TICKS = os.sysconf("SC_CLK_TCK")
ESTABLISHED = "01"  # in /proc/net/tcp
LOOK_S = 0.05
ANSWER_S = 10.0  # for Spark's own bookkeeping, which comes after a job has ended
MOST_TASKS = 100_000


class Clock:
    """Time, and the CPU time of Spark's processes and of a broker that is ours."""

    def __init__(self, jvm: int, broker_is_ours: bool) -> None:
        self.jvm = jvm
        self.broker_is_ours = broker_is_ours

    def start(self) -> None:
        self.cpu = self._cpu()
        self.time = time.perf_counter()

    def stop(self) -> tuple[float, float | None, float | None]:
        seconds = time.perf_counter() - self.time
        spent = [
            None if now is None or then is None else now - then for now, then in zip(self._cpu(), self.cpu, strict=True)
        ]
        return seconds, spent[0], spent[1]

    def _cpu(self) -> tuple[float | None, float | None]:
        processes = running_processes()
        if self.jvm not in processes:
            return None, None
        spark = cpu_below(self.jvm, processes)
        if not self.broker_is_ours:
            return spark, None
        # What else we have started is the broker and its keeper.
        mine = [pid for pid, (parent, _) in processes.items() if parent == os.getpid()]
        return spark, sum(cpu_below(pid, processes) for pid in mine) - spark


def running_processes() -> dict[int, tuple[int, float]]:
    """Parent and CPU seconds of every process, also of its children that have ended; empty where there is no /proc."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            facts = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # gone meanwhile
        found[int(path.parent.name)] = (int(facts[1]), sum(map(int, facts[11:15])) / TICKS)
    return found


def cpu_below(pid: int, processes: Mapping[int, tuple[int, float]]) -> float:
    """Of a process and all that it has started."""
    children = [child for child, (parent, _) in processes.items() if parent == pid]
    return processes[pid][1] + sum(cpu_below(child, processes) for child in children)


# ---- tasks


def task_seconds(engine: SparkSession) -> list[float]:
    """How long each task of the last job's last stage took, which is the one that writes. Empty if Spark forgot."""
    context = engine.sparkContext
    tracker = context.statusTracker()
    job = tracker.getJobInfo(max(tracker.getJobIdsForGroup(None), default=-1))
    if job is None:
        return []
    stage = max(job.stageIds)
    store = context._jsc.sc().statusStore()
    deadline = time.monotonic() + ANSWER_S
    while str(store.lastStageAttempt(stage).status()) == "ACTIVE" and time.monotonic() < deadline:
        time.sleep(0.05)
    tasks = store.taskList(stage, store.lastStageAttempt(stage).attemptId(), MOST_TASKS)
    durations = [tasks.apply(number).duration() for number in range(tasks.length())]
    return [one.get() / 1000 for one in durations if one.isDefined()]


# ---- connections


@contextmanager
def most_connections(bootstrap: str) -> Iterator[list[int]]:
    """Counts, until the end, the connections of other processes to brokers at these addresses; the most at a time.

    The list has one figure afterwards, or none where there is no /proc.
    """
    ports = {int(address.rpartition(":")[2]) for address in bootstrap.split(",")}
    found: list[int] = []
    done = threading.Event()

    def watch() -> None:
        most = -1
        last = False
        while not last:
            last = done.wait(LOOK_S)
            most = max(most, _connections(ports))
        if most >= 0:
            found.append(most)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        done.set()
        watcher.join()


def _connections(ports: set[int]) -> int:
    """Of other processes, to these ports; -1 where the machine does not tell."""
    try:
        own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    except OSError:
        own = set()
    count = -1
    for name in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", name).read_text().splitlines()[1:]
        except OSError:
            continue
        count = max(count, 0)
        for line in lines:
            (
                _,
                _,
                remote,
                state,
                *_,
            ) = line.split()[:5]
            inode = line.split()[9]
            if state == ESTABLISHED and int(remote.rpartition(":")[2], 16) in ports and f"socket:[{inode}]" not in own:
                count += 1
    return count
