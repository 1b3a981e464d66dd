"""A Spark cluster whose workers are killed during an export: nothing lost, and nothing doubled if you ask for it.

    python examples/spark_kill_workers.py                              # 400,000 rows, a minute or two
    python examples/spark_kill_workers.py --rows 5000000 --runs 3
    python examples/spark_kill_workers.py --faults 100 --jobs 20       # half an hour or more
    python examples/spark_kill_workers.py --faults 10 --jobs 4 --files # files, exported as JSON, on 1 to 4 cores

Starts a real Apache Kafka and a Spark cluster of two executors in processes of their own on this machine (Java 17
needed, see the README). Exports numbered rows three ways: undisturbed; while a Python worker and then a whole executor
are killed with SIGKILL in the middle of their tasks; and the same with exactly_once="task". After each, an ordinary
consumer of committed data reads the topic back and every row is counted.

With --faults and --jobs: a standalone cluster of a master and two workers, and jobs that are submitted again and again
under their names, each time by a driver process of its own (spark_kill_workers_job.py), until they succeed. Meanwhile

    worker        a Python worker gets SIGKILL, and a task fails because of that
    executor      an executor gets SIGKILL, and a task is lost with it
    driver        Python and JVM of the driver get SIGKILL while tasks are writing
    jvm           a row fails above the writer, once in each executor or always
    cancel        the job is cancelled while tasks are writing
    parallelism   the next submission divides its input in another way, or has other cores: right with "bucket" and
                  with files, refused with "task"

Only what has hit is counted. After each submission all visible rows are read back (ten million and more only when the
job has succeeded, since that takes minutes); a submission that reports success while a row is missing or doubled, or
that reports another number of rows, is called silent; so is one that hangs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyspark
from confluent_kafka import IsolationLevel, Message, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from pyspark.sql import DataFrame, SparkSession

from fastprod.cli._orders import orders
from fastprod.spark import ExportReport, write
from fastprod.testing import Audit, KafkaCluster, KafkaUnavailable, _keeper, audit, spark_environment
from fastprod.testing._audit import leading_number
from fastprod.testing._java import java_program

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
        for share, what, victims in ((0.25, "Python worker", python_workers), (0.5, "executor", executors)):
            while self.progress()[0] < share:
                if self.over.wait(0.02):
                    return
            self.kill(what, victims)

    def kill(self, what: str, victims: Callable[[str], list[int]]) -> None:
        """Until it hits: a victim may just have been between two tasks."""
        failed = self.progress()[1]
        while not self.over.is_set():
            victim = next(iter(victims(self.app)), None)
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


def executors(app: str) -> list[int]:
    return [
        pid for pid, (_, command) in processes().items() if "CoarseGrainedExecutorBackend" in command and app in command
    ]


def python_workers(app: str) -> list[int]:
    """Python workers are forks of a daemon that the executor has started."""
    table = processes()
    mine = set(executors(app))
    daemons = {pid for pid, (parent, command) in table.items() if parent in mine and "pyspark.daemon" in command}
    return [pid for pid, (parent, _) in table.items() if parent in daemons]


def settle(servers: str, topic: str) -> None:
    """Waits until no transaction is open: Kafka answers a commit a moment before readers can see it."""
    while ends(servers, topic, IsolationLevel.READ_COMMITTED) != ends(servers, topic, IsolationLevel.READ_UNCOMMITTED):
        time.sleep(0.05)


def ends(servers: str, topic: str, level: IsolationLevel) -> list[int]:
    """Of the topic's partitions: what readers can see, or with READ_UNCOMMITTED what brokers have."""
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    places = {TopicPartition(topic, number): OffsetSpec.latest() for number in range(PARTITIONS)}
    return [end.result().offset for end in admin.list_offsets(places, isolation_level=level).values()]


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


def story(rows: int, runs: int) -> int:
    """Undisturbed, killed, exactly once."""
    plan = [("undisturbed", False, False), ("workers killed", True, False)]
    plan += [(f"workers killed, exactly once, run {number + 1}", True, True) for number in range(runs)]
    bad = 0
    with ExitStack() as stack:
        spark = cluster_session(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastprod-example-")))
        stack.callback(spark.stop)
        for name, kills, once in plan:
            print(f"{name}: {rows:,} rows", flush=True)
            report, found, killed = export(spark, rows, kills=kills, once=once)
            retried = sum(task.attempt > 0 for task in report.tasks)
            print(f"    {report.summary()}, {retried} of the tasks at a later attempt")
            print(f"    read back: {found.records:,} rows, {found.lost:,} lost, {found.doubled:,} doubled", flush=True)
            fine = not found.lost and not found.alien and report.records == rows
            fine = fine and (not found.doubled or (kills and not once))
            bad += not fine or (kills and killed != ["Python worker", "executor"])
    print("as promised" if not bad else f"{bad} of {len(plan)} exports were not as promised")
    return 1 if bad else 0


# ---- many faults, many submissions


JOB = Path(__file__).with_name("spark_kill_workers_job.py")
KINDS = ("worker", "executor", "driver", "jvm", "cancel", "parallelism")
FORMS = (  # how rows are written, and whether in buckets
    ("write", False),
    ("write", True),
    ("source", True),
    ("rdd", False),
    ("write", False),
    ("write", True),
    ("source", False),
    ("files", False),
)
SIGNS = {"worker": "Python worker exited unexpectedly", "executor": "ExecutorLostFailure", "jvm": "boom"}
SIGN_S = 6.0  # for Spark to notice; whoever was killed had no task if it does not
NAP_MS = 150
MANY = 10_000_000  # rows, from which on tasks take long enough without naps
MOST = 12  # submissions of a job
TIMEOUT_MS = 60_000  # after which Kafka aborts what nobody ends
HANG_S = 600.0


def scratch(folder: Path) -> dict[str, str]:
    """An environment in which what is killed leaves its files where they are removed."""
    return {**os.environ, "TMPDIR": str(folder), "SPARK_LOCAL_DIRS": str(folder / "local")}


FIRST_ORDER = 10**12
FILE_ROWS = 1_000_000  # at most
GROUPS = 8  # of rows, in each file


def order_files(folder: Path, rows: int) -> None:
    """Parquet of numbered orders, not compressed: about 88 bytes a row, five files and more."""
    folder.mkdir()
    share = min(FILE_ROWS, max(1, -(-rows // 5)))
    made = pa.Table.from_batches([orders(share)])
    for first in range(0, rows, share):
        numbers = pa.array(np.arange(FIRST_ORDER + first, FIRST_ORDER + min(first + share, rows)))
        part = made.slice(0, len(numbers)).set_column(0, "order_id", numbers)
        pq.write_table(
            part,
            folder / f"part-{first // share:04}.parquet",
            row_group_size=max(1, share // GROUPS),
            compression="none",
            use_dictionary=False,
        )


def order_number(message: Message) -> int:
    """Of a row of order_files, as JSON: it begins with the order's id."""
    found = re.match(rb'{"order_id":(\d+),', message.value() or b"")
    return int(found[1]) - FIRST_ORDER if found else -1


class Standalone:
    """A Spark cluster as one would install it: a master and two workers of two cores each. Ends with this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[tuple[subprocess.Popen[str], int]] = []
        try:
            log = self._start("master", "--port", "0", "-Dspark.master.rest.enabled=false")
            self.url = self._said(log, r"Starting Spark master at (spark://\S+)")
            for name in ("worker-1", "worker-2"):
                more = ("--cores", "2", "--memory", "1g", "--work-dir", str(folder / name), self.url)
                self._said(self._start(name, *more), "(Successfully registered with master)")
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, *arguments: str) -> Path:
        home = Path(pyspark.__file__).parent
        kind = name.partition("-")[0]
        options = [one for one in arguments if one.startswith("-D")]
        scala = next(home.glob("jars/spark-core_*.jar")).name.split("_")[1].split("-")[0]
        command = [java_program(), "-Xmx256m", *options, "-cp", str(home / "jars" / "*")]
        command += [f"org.apache.spark.deploy.{kind}.{kind.title()}", "--host", "127.0.0.1", "--webui-port", "0"]
        command += [one for one in arguments if not one.startswith("-D")]
        log = self._folder / f"{name}.log"
        with log.open("w") as errors:
            keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", _keeper.__file__, str(os.getpid()), str(self._folder), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**scratch(self._folder), "SPARK_HOME": str(home), "SPARK_SCALA_VERSION": scala},
                cwd=self._folder,
                start_new_session=True,  # a Ctrl-C is for us, not for Spark
            )
        assert keeper.stdout is not None
        with keeper.stdout as said:
            self._started.append((keeper, int(said.readline())))
        return log

    def _said(self, log: Path, pattern: str) -> str:
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline and all(keeper.poll() is None for keeper, _ in self._started):
            found = re.search(pattern, log.read_text())
            if found:
                return found[1]
            time.sleep(0.1)
        raise RuntimeError(f"Spark's {log.stem} did not start:\n{log.read_text()[-2000:]}")

    def close(self) -> None:
        for keeper, pid in reversed(self._started):  # workers end their executors when they are asked to end
            if keeper.poll() is None:
                os.kill(pid, signal.SIGTERM)
            try:
                keeper.wait(20)
            except subprocess.TimeoutExpired:
                os.kill(pid, signal.SIGKILL)
                keeper.wait()


class Submission:
    """One driver, and what it says about its tasks."""

    def __init__(self, job: dict[str, Any], log: Path) -> None:
        self.app = ""
        self.begun = 0  # tasks of any kind
        self.writing: set[int] = set()  # tasks at work that write
        self.written = 0  # tasks that have
        self.failures: list[str] = []  # of tasks
        self.done: dict[str, int] | None = None
        self.failed: str | None = None
        self.hung = False
        self._struck = False  # killed by us
        self._writers: set[int] = set()  # stages
        self._log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(JOB), json.dumps(job)],
                stdin=subprocess.PIPE,  # which it listens to: closed, it ends
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=scratch(Path(job["folder"])),
                cwd=job["folder"],
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                said = json.loads(line)
            except ValueError:  # a JVM's own words, or the last ones of a killed driver
                continue
            match said:
                case {"app": app}:
                    self.app = app
                case {"submitted": stage, "shuffles": shuffles}:
                    self._writers |= set() if shuffles else {stage}  # every export writes in its last stage
                case {"begun": task, "stage": stage}:
                    self.begun += 1
                    self.writing |= {task} if stage in self._writers else set()
                case {"ended": task, "why": why}:
                    self.written += task in self.writing and not why
                    self.writing.discard(task)
                    if why:
                        self.failures.append(why)
                case {"done": done}:
                    self.done = done
                case {"failed": failed}:
                    self.failed = failed

    @property
    def over(self) -> bool:
        return self.done is not None or self.failed is not None or self.process.poll() is not None

    def wait_until(self, condition: Callable[[], object], seconds: float = HANG_S) -> bool:
        """False if the job is over before, or time is."""
        deadline = time.monotonic() + seconds
        while not condition():
            if self.over or time.monotonic() > deadline:
                return bool(condition())
            time.sleep(0.01)
        return True

    def strike(self, kind: str, rng: random.Random) -> bool:
        """Does a fault, and says whether it has hit."""
        if kind == "driver":
            if not self.wait_until(lambda: self.writing):
                return False
            self._struck = True
            self.kill()
            return self.done is None and self.failed is None
        if kind == "cancel":
            if self.wait_until(lambda: self.writing):
                self._tell(rng.choice(("cancel", "cancel all")))
                self.finish()
            return "cancelled" in (self.failed or "")
        victims = {"worker": python_workers, "executor": executors}[kind]
        while self.wait_until(lambda: self.writing):
            seen = len(self.failures)
            found = victims(self.app)
            if found:
                with suppress(ProcessLookupError):
                    os.kill(rng.choice(found), signal.SIGKILL)
                if self.wait_until(lambda seen=seen: self.has_failed(kind, seen), SIGN_S):
                    return True
            if self.over:
                break
        return False

    def has_failed(self, kind: str, seen: int = 0) -> bool:
        return any(re.search(SIGNS[kind], why) for why in self.failures[seen:])

    def _tell(self, word: str) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()

    def finish(self) -> None:
        """Waits for the driver to end by itself."""
        try:
            self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self.failed = f"hangs for {HANG_S:g} s"
            self.hung = True
            self._dump()
            self.kill()
        self._reader.join(20)

    def _dump(self) -> None:
        """What the threads of a JVM that hangs are doing."""
        for pid, (parent, _) in processes().items():
            if parent == self.process.pid:
                with self._log.open("a") as log, suppress(KafkaUnavailable):
                    subprocess.run([java_program("jstack"), str(pid)], stdout=log, stderr=log)
        print(self._log.read_text(errors="replace"), file=sys.stderr)

    def kill(self) -> None:
        """Python and JVM at once, so that neither can clean up."""
        if self.process.poll() is None:  # else its number may be somebody else's; its JVM ends with its stdin
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(20)

    def close(self) -> None:
        self.kill()
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def outcome(self) -> str:
        if self.done is not None:
            skipped = (
                f", {self.done['skipped']} of {self.done['full']} partitions skipped" if self.done["skipped"] else ""
            )
            return f"written: {self.done['records']:,} rows{skipped}"
        if self.failed is None:
            return "killed" if self._struck else f"died with {self.process.returncode}: {self._last_words()}"
        known = re.search(
            r"boom|Python worker exited|[Jj]ob [^.\n]*cancelled|had \d+ partitions in an earlier run and has \d+ now",
            self.failed,
        )
        causes = re.findall(r"^(?:Caused by: )?[\w.]*(?:Error|Exception|Failure)\b.*", self.failed, re.MULTILINE)
        return f"failed: {known[0] if known else (causes or [self.failed])[-1][:160]}"

    def _last_words(self) -> str:
        return " | ".join(self._log.read_text(errors="replace").splitlines()[-3:])[-300:]


class Tally:
    """What has hit which jobs, and what was lost by it."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        self.submissions: Counter[str] = Counter()
        self.jobs: dict[str, set[str]] = {kind: set() for kind in KINDS}
        self.wrong: dict[str, Counter[str]] = {}  # by job: lost, doubled, silent

    def hit(self, job: str, kinds: list[str]) -> None:
        self.faults.update(kinds)
        self.submissions.update(set(kinds))
        for kind in kinds:
            self.jobs[kind].add(job)

    def table(self, submissions: int) -> str:
        heads = ("fault", "faults", "jobs", "submissions", "lost", "doubled", "silent")
        rows: list[tuple[object, ...]] = [heads]
        for kind in KINDS:
            wrong = sum((self.wrong[job] for job in self.jobs[kind]), Counter())
            sums = (wrong[what] for what in heads[4:])
            rows.append((kind, self.faults[kind], len(self.jobs[kind]), self.submissions[kind], *sums))
        wrong = sum(self.wrong.values(), Counter())
        rows.append(("all", self.faults.total(), len(self.wrong), submissions, *(wrong[what] for what in heads[4:])))
        return "\n".join(
            f"{row[0]:<12}" + "".join(f"{cell:>12,}" if isinstance(cell, int) else f"{cell:>12}" for cell in row[1:])
            for row in rows
        )


class Export:
    """One job, submitted until it succeeds."""

    def __init__(
        self,
        name: str,
        number: int,
        rows: int,
        seed: int,
        kafka: KafkaCluster,
        url: str,
        folder: Path,
        forms: tuple[tuple[str, bool], ...] = FORMS,
    ) -> None:
        self.rng = rng = random.Random(f"{seed} {number}")
        self.name = name
        self.form, self.bucket = forms[number % len(forms)]
        self.any_layout = self.bucket or self.form == "files"  # other tasks and cores make no difference
        self.rows = rng.randrange(rows // 2, rows * 3 // 2) if rows < MANY else rows
        self.many = self.rows >= MANY
        self.pieces = rng.randrange(6, 11) * (4 if self.many else 1)
        self.disturbed = rng.choice((1, 2, 2, 3))  # submissions; later ones are left in peace
        self.kafka = kafka
        self.folder = folder
        self.fixed = {
            "master": url,
            "servers": kafka.bootstrap_servers,
            "name": name,
            "topic": name,
            "form": self.form,
            "bucket": self.bucket,
            "rows": self.rows,
            "pieces": self.pieces,
            "folder": str(folder),
            "timeout_ms": TIMEOUT_MS * (5 if self.many else 1),
        }
        if self.form == "files":
            order_files(folder / name, self.rows)
        self.tasks = self.pieces  # of the last submission
        self.cores = 2
        self.found: Audit | None = None  # when it was last read back
        self.submissions = 0
        self.wrong: Counter[str] = Counter()
        kafka.create_topic(name, PARTITIONS)

    def run(self, tally: Tally) -> None:
        tally.wrong[self.name] = self.wrong
        claimed = refused = False
        while self.submissions < MOST:
            if claimed and not refused and not self.any_layout and self.form != "source" and self.rng.random() < 0.6:
                refused = True
                self.submit(tally, tasks=self.other_tasks(), refuse=True)
            plan, boom = self.faults() if self.submissions - refused < self.disturbed else ([], None)
            tasks = self.other_tasks() if self.any_layout and claimed else self.tasks
            submission = self.submit(tally, plan, boom, tasks)
            claimed = claimed or submission.begun > 0
            if submission.done is not None:
                break
        found = self.found if self.found and submission.done else self.read_back(settled=True)
        self.wrong["lost"] += found.lost  # of a job that never succeeded, too
        if not found.lost and (self.rng.random() < 0.4 or self.many):
            self.submit(tally, tasks=self.other_tasks() if self.any_layout else self.tasks, again=True)

    def faults(self) -> tuple[list[str], str | None]:
        """In their order, and whether a row is to fail."""
        rng = self.rng
        plan = rng.choices(("worker", "executor", "jvm"), (4, 3, 2), k=rng.choice((0, 1, 2, 3, 4)))
        last = rng.choice(("driver", "driver", "driver", "cancel", "cancel", "jvm", "none"))
        if self.form == "files":  # whose rows the JVM never sees
            plan = ["worker" if kind == "jvm" else kind for kind in plan]
            last = "driver" if last == "jvm" else last
        boom = "always" if last == "jvm" else "once" if "jvm" in plan else None
        plan = [kind for kind in plan if kind != "jvm"] + [last] * (last in ("driver", "cancel"))
        return (plan, boom) if plan or boom else (["driver"], None)

    def other_cores(self) -> int:
        self.cores = self.rng.choice([number for number in range(1, 5) if number != self.cores])
        return self.cores

    def other_tasks(self) -> int:
        return self.rng.choice([number for number in range(1, 17) if number != self.tasks])

    def submit(
        self,
        tally: Tally,
        plan: list[str] | None = None,
        boom: str | None = None,
        tasks: int = 0,
        *,
        refuse: bool = False,
        again: bool = False,
    ) -> Submission:
        """One submission with faults; `refuse`: it must be refused; `again`: the job is written already."""
        rng = self.rng
        plan = plan or []
        changed = tasks != self.tasks and not again
        before = self.written() if again else []
        job = self.fixed | {
            "tasks": tasks,
            "cores": self.other_cores() if self.form == "files" else rng.choice((1, 2, 2, 2)) if not plan else 2,
            "shuffle": rng.randrange(1, 20),
            "adaptive": rng.choice(("true", "false")),
            "nap_ms": NAP_MS if (plan or boom) and not self.many else 0,
            "boom": boom,
            "boom_at": rng.randrange(self.rows // 4, self.rows),
        }
        self.submissions += 1
        start = time.monotonic()
        submission = Submission(job, self.folder / f"{self.name}-{self.submissions}.log")
        hits: list[str] = []
        try:
            for kind, share in zip(plan, sorted(rng.uniform(0, 0.7) for _ in plan), strict=True):
                submission.wait_until(lambda share=share: submission.written >= share * self.pieces)
                submission.wait_until(lambda: False, rng.uniform(0, 0.8))
                if not submission.over and submission.strike(kind, rng):
                    hits.append(kind)
            submission.finish()
        finally:
            submission.close()
        if boom and submission.has_failed("jvm"):
            hits.append("jvm")
        trouble = ""
        if refuse:
            if "partitions in an earlier run" in (submission.failed or "") and not submission.begun:
                hits.append("parallelism")
            else:
                trouble = "NOT REFUSED"
        elif changed and submission.begun:
            hits.append("parallelism")
        if again:
            done = submission.done or {"skipped": 0, "full": 1}
            if done["skipped"] != done["full"] or self.written() != before:
                trouble = "NOT SKIPPED"
        if not refuse:
            self.tasks = tasks
        tally.hit(self.name, hits)
        seen = "not read back"
        if not self.many or (submission.done is not None and not again):  # many take minutes to read
            self.found = found = self.read_back(settled=submission.done is not None)
            trouble = trouble or self.trouble(submission, found)
            self.wrong["doubled"] = max(self.wrong["doubled"], found.doubled + found.alien)
            seen = f"{found.records:,} of {self.rows:,} visible, {found.doubled} doubled"
        self.wrong["silent"] += bool(trouble)
        wanted = (
            "refuse" if refuse else "again" if again else "+".join([*plan, *[f"jvm {boom}"] * bool(boom)]) or "peace"
        )
        print(
            f"{self.name} {self.form:<6} {'bucket' if self.bucket else 'task':<6} #{self.submissions:<2} "
            f"{tasks:>2} -> {self.pieces:>2} on {job['cores']} {wanted:<32} hit: {'+'.join(hits) or '-':<32} "
            f"{submission.outcome()}; {seen} ({time.monotonic() - start:.0f} s) {trouble}".rstrip(),
            flush=True,
        )
        return submission

    def written(self) -> list[int]:
        """Where the topic's partitions end, with what readers do not see."""
        return ends(self.kafka.bootstrap_servers, self.name, IsolationLevel.READ_UNCOMMITTED)

    def trouble(self, submission: Submission, found: Audit) -> str:
        if submission.done is None:
            return "HANGS" * submission.hung
        wrong = found.lost or found.doubled or found.alien or submission.done["records"] != self.rows
        return "SILENT" if wrong else ""

    def read_back(self, *, settled: bool) -> Audit:
        """What readers of committed data see."""
        if settled:
            settle(self.kafka.bootstrap_servers, self.name)
        number_of = order_number if self.form == "files" else leading_number
        return audit(self.kafka.bootstrap_servers, self.name, self.rows, number_of=number_of, order="none")


def chaos(faults: int, jobs: int, rows: int, seed: int, forms: tuple[tuple[str, bool], ...] = FORMS) -> int:
    """At least so many faults over at least so many jobs."""
    print(f"seed {seed}: at least {faults} faults over at least {jobs} jobs of about {rows:,} rows", flush=True)
    start = time.monotonic()
    spark_environment()
    tally = Tally()
    submissions = number = 0
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastprod-example-")))
        kafka = stack.enter_context(KafkaCluster())
        cluster = Standalone(folder)
        stack.callback(cluster.close)
        while number < jobs or (tally.faults.total() < faults and number < 3 * jobs):
            export = Export(f"job-{number + 1}", number, rows, seed, kafka, cluster.url, folder, forms)
            export.run(tally)
            submissions += export.submissions
            number += 1
    print(tally.table(submissions))
    wrong = sum(tally.wrong.values(), Counter())
    fine = not wrong.total() and tally.faults.total() >= faults
    print(f"seed {seed}, {time.monotonic() - start:,.0f} s: {'as promised' if fine else 'NOT as promised'}")
    return 0 if fine else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, help="400,000, and with --faults about 50,000 a job, unless given")
    parser.add_argument("--runs", type=int, default=1, help="of the export with kills and exactly_once")
    parser.add_argument("--faults", type=int, help="how many must have hit; a cluster of master and workers")
    parser.add_argument("--jobs", type=int, help="how many at least, each submitted until it succeeds")
    parser.add_argument("--files", action="store_true", help="every job exports files; with --faults or --jobs")
    parser.add_argument("--seed", type=int, help="of the faults; their moments differ all the same")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything ends that was started
    try:
        if options.faults is None and options.jobs is None:
            return story(options.rows or 400_000, options.runs)
        seed = random.randrange(1_000_000) if options.seed is None else options.seed
        jobs = options.jobs or max(1, (options.faults or 0) // 5)
        forms = (("files", False),) if options.files else FORMS
        return chaos(options.faults or 0, jobs, options.rows or 50_000, seed, forms)
    except KafkaUnavailable as missing:
        print(missing, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
