"""A Spark cluster whose workers are killed during an export: nothing lost, and nothing doubled if you ask for it.

    python examples/spark_kill_workers.py                              # 400,000 rows, a minute or two
    python examples/spark_kill_workers.py --rows 5000000 --runs 3

Starts a real Apache Kafka and a Spark cluster of two executors in processes of their own on this machine (Java 17
needed, see the README). Exports numbered rows three ways: undisturbed; while a Python worker and then a whole executor
are killed with SIGKILL in the middle of their tasks; and the same with exactly_once="task". After each, an ordinary
consumer of committed data reads the topic back and every row is counted.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pyspark
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from pyspark.sql import DataFrame, SparkSession

from fastprod.spark import ExportReport, write
from fastprod.testing import Audit, KafkaCluster, KafkaUnavailable, audit

PARTITIONS = 6
ROWS_A_TASK = 125_000  # at most
NAPS = 4  # of 50 ms in each task, so that even a short one can be met in the middle
NOTICE_S = 20.0  # for Spark to see that a task has failed


def cluster_session(work: str) -> SparkSession:
    """A Spark cluster on this machine: two executors, each a JVM with Python workers of its own."""
    home = Path(work, "spark")  # executors leave their logs there, and a package is no place for them
    home.mkdir()
    for part in Path(pyspark.__file__).parent.iterdir():
        home.joinpath(part.name).symlink_to(part)
    os.environ |= {"SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    spark = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .appName("fastprod: workers are killed")
        .config("spark.driver.memory", "1g")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.warehouse.dir", str(Path(work, "warehouse")))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


def numbered(spark: SparkSession, rows: int) -> DataFrame:
    """Rows that begin with their number, 100 bytes each."""
    tasks = max(8, -(-rows // ROWS_A_TASK))
    # Many batches in each task, so that some of its rows are on their way when it dies.
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", str(max(1, min(10_000, rows // tasks // 8))))
    nap = f"if(id % {max(1, rows // tasks // NAPS)} = 0, java_method('java.lang.Thread', 'sleep', 50L), '')"
    return spark.range(0, rows, 1, tasks).selectExpr(
        f"left(concat(rpad(concat(id, ' '), 100, 'x'), {nap}), 100) AS value"
    )


def processes() -> dict[int, tuple[int, str]]:
    """Of this machine: parent and command by id."""
    listed = subprocess.run(["ps", "-axww", "-o", "pid=,ppid=,command="], capture_output=True, text=True, check=True)
    found = (line.split(None, 2) for line in listed.stdout.splitlines())
    return {int(pid): (int(parent), "".join(command)) for pid, parent, *command in found}


class Killer(threading.Thread):
    """Kills a Python worker when a quarter of the tasks is done, and an executor when half of them are."""

    def __init__(self, spark: SparkSession, group: str) -> None:
        super().__init__(name="killer", daemon=True)
        self.app = spark.sparkContext.applicationId
        self.tracker = spark.sparkContext.statusTracker()
        self.group = group
        self.over = threading.Event()
        self.killed: list[str] = []

    def run(self) -> None:
        for share, what, victims in ((0.25, "Python worker", self.workers), (0.5, "executor", self.executors)):
            while self.progress()[0] < share:
                if self.over.wait(0.02):
                    return
            self.kill(what, victims)

    def kill(self, what: str, victims: object) -> None:
        """Until it hits: a victim may just have been between two tasks."""
        failed = self.progress()[1]
        while not self.over.is_set():
            victim = next(iter(victims()), None)  # type: ignore[operator]
            if victim is None:
                continue
            os.kill(victim, signal.SIGKILL)
            deadline = time.monotonic() + NOTICE_S
            while time.monotonic() < deadline and not self.over.wait(0.05):
                if self.progress()[1] > failed:
                    self.killed.append(what)
                    print(f"    {what} {victim} killed at {self.progress()[0]:.0%} of the tasks", flush=True)
                    return

    def progress(self) -> tuple[float, int]:
        """The share of the tasks that are done, and how many have failed."""
        for job in self.tracker.getJobIdsForGroup(self.group):
            for stage in getattr(self.tracker.getJobInfo(job), "stageIds", ()):
                info = self.tracker.getStageInfo(stage)
                if info is not None:
                    return info.numCompletedTasks / info.numTasks, info.numFailedTasks
        return 0.0, 0

    def executors(self) -> list[int]:
        return [
            pid
            for pid, (_, command) in processes().items()
            if "CoarseGrainedExecutorBackend" in command and self.app in command
        ]

    def workers(self) -> list[int]:
        """Python workers are forks of a daemon that the executor has started."""
        table = processes()
        mine = set(self.executors())
        daemons = {pid for pid, (parent, command) in table.items() if parent in mine and "pyspark.daemon" in command}
        return [pid for pid, (parent, _) in table.items() if parent in daemons]


def settle(servers: str, topic: str) -> None:
    """Waits until no transaction is open: Kafka answers a commit a moment before readers can see it."""
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    places = {TopicPartition(topic, number): OffsetSpec.latest() for number in range(PARTITIONS)}

    def ends(level: IsolationLevel) -> list[int]:
        return [end.result().offset for end in admin.list_offsets(places, isolation_level=level).values()]

    while ends(IsolationLevel.READ_COMMITTED) != ends(IsolationLevel.READ_UNCOMMITTED):
        time.sleep(0.05)


def export(spark: SparkSession, rows: int, *, kills: bool, once: bool) -> tuple[ExportReport, Audit, list[str]]:
    """One export to a fresh Kafka, and what a reader finds there."""
    with KafkaCluster(topics={"rows": PARTITIONS}) as kafka:
        group = f"export-{time.monotonic_ns()}"
        spark.sparkContext.setJobGroup(group, "export")
        killer = Killer(spark, group)
        if kills:
            killer.start()
        options = {"exactly_once": "task", "job_id": group} if once else {}
        try:
            report = write(numbered(spark, rows), "rows", {"bootstrap.servers": kafka.bootstrap_servers}, **options)
        finally:
            killer.over.set()
        if kills:
            killer.join()
        settle(kafka.bootstrap_servers, "rows")
        return report, audit(kafka.bootstrap_servers, "rows", rows, order="none"), killer.killed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--runs", type=int, default=1, help="of the export with kills and exactly_once")
    options = parser.parse_args()
    plan = [("undisturbed", False, False), ("workers killed", True, False)]
    plan += [(f"workers killed, exactly once, run {number + 1}", True, True) for number in range(options.runs)]
    bad = 0
    with ExitStack() as stack:
        spark = cluster_session(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastprod-example-")))
        stack.callback(spark.stop)
        for name, kills, once in plan:
            print(f"{name}: {options.rows:,} rows", flush=True)
            try:
                report, found, killed = export(spark, options.rows, kills=kills, once=once)
            except KafkaUnavailable as missing:
                print(missing, file=sys.stderr)
                return 2
            retried = sum(task.attempt > 0 for task in report.tasks)
            print(f"    {report.summary()}, {retried} of the tasks at a later attempt")
            print(f"    read back: {found.records:,} rows, {found.lost:,} lost, {found.doubled:,} doubled", flush=True)
            fine = not found.lost and not found.alien and report.records == options.rows
            fine = fine and (not found.doubled or (kills and not once))
            bad += not fine or (kills and killed != ["Python worker", "executor"])
    print("as promised" if not bad else f"{bad} of {len(plan)} exports were not as promised")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
