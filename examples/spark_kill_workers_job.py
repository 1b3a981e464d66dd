"""One submission of an export: the driver that spark_kill_workers.py starts, and kills, again and again.

    python examples/spark_kill_workers_job.py '{"master": "spark://...", ...}'

Says on stdout, a JSON document a line, which tasks begin and end and what has become of the job; takes "cancel" on
stdin. When stdin is closed it ends at once: whoever started it is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.java_gateway import ensure_callback_server_started
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import expr

from fastprod.encoding import Json
from fastprod.spark import ExportReport, bucketed, partition_writer, register, write
from fastprod.spark import export as export_files
from fastprod.testing import spark_environment

NAPS = 4  # in each task, so that it can be met in the middle
BATCHES = 8  # in each task, so that some of its rows are on their way when it dies
JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # for programs that live for seconds
BOOM = "-Dfastprod.boom=true"

_line = threading.Lock()


def say(**what: Any) -> None:
    with _line:
        print(json.dumps(what), flush=True)


class Listener:
    """Tells which tasks begin, and how they end, as Spark's scheduler sees it."""

    class Java:
        implements = ("org.apache.spark.scheduler.SparkListenerInterface",)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on"):
            raise AttributeError(name)
        return lambda event: None  # some twenty kinds of events that are nothing to us

    def onTaskStart(self, event: Any) -> None:
        say(begun=event.taskInfo().taskId(), stage=event.stageId())

    def onTaskEnd(self, event: Any) -> None:
        reason = event.reason()
        why = "" if event.taskInfo().successful() else reason.toErrorString()[:2000]
        if why:
            print("task failed:", why.splitlines()[0], file=sys.stderr, flush=True)
        say(ended=event.taskInfo().taskId(), stage=event.stageId(), why=why)

    def onStageSubmitted(self, event: Any) -> None:
        info = event.stageInfo()
        say(submitted=info.stageId(), shuffles=info.shuffleDepId().isDefined())


def session(job: dict[str, Any]) -> SparkSession:
    spark_environment()
    builder = SparkSession.builder.master(job["master"]).appName(job["name"])
    settings = {
        "spark.cores.max": job["cores"],
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": f"{JVM} -Djava.io.tmpdir={job['folder']}",  # a killed driver leaves files
        "spark.executor.memory": "768m",
        "spark.executor.extraJavaOptions": f"{JVM} {BOOM}" if job["boom"] else JVM,
        "spark.locality.wait": "0s",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": job["folder"],
        "spark.sql.execution.arrow.maxRecordsPerBatch": max(1, job["rows"] // job["pieces"] // BATCHES),
        "spark.sql.adaptive.enabled": job["adaptive"],
        "spark.sql.shuffle.partitions": job["shuffle"],
        "spark.sql.leafNodeDefaultParallelism": job["tasks"],
        # Late is not dead on a busy machine.
        "spark.network.timeout": "300s",
        "spark.executor.heartbeatInterval": "10s",
        "spark.python.authenticate.socketTimeout": "120s",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def numbered(spark: SparkSession, job: dict[str, Any]) -> DataFrame:
    """Rows that begin with their number, 100 bytes each; in buckets, if the job wants them.

    Naps and a failure, if there are to be any, are in the JVM above the writer, and leave the rows as they are.
    """
    rows = spark.range(0, job["rows"]) if job["bucket"] else spark.range(0, job["rows"], 1, job["tasks"])
    rows = rows.selectExpr("id", "rpad(concat(id, ' '), 100, 'x') AS value")
    disturbed = "value"
    if job["nap_ms"]:
        every = max(1, job["rows"] // job["pieces"] // NAPS)
        nap = f"if(id % {every} = 0, java_method('java.lang.Thread', 'sleep', {job['nap_ms']}L), '')"
        disturbed = f"left(concat(value, {nap}), 100)"
    if job["boom"]:
        # clearProperty tells what was there: fails once in each executor, so that Spark's next attempts get through.
        asked = {"once": "clearProperty", "always": "getProperty"}[job["boom"]]
        met = f"id = {job['boom_at']} AND java_method('java.lang.System', '{asked}', 'fastprod.boom') = 'true'"
        disturbed = f"if({met}, cast(raise_error('boom') AS string), {disturbed})"
    if not job["bucket"]:
        return rows.selectExpr(f"{disturbed} AS value")
    if disturbed == "value":
        return rows if job["form"] == "write" else bucketed(rows, job["pieces"], ["id"])
    # Behind the shuffle, so that the tasks that write are disturbed and not those before; rows stay in their buckets.
    return bucketed(rows, job["pieces"], ["id"]).withColumn("value", expr(disturbed))


class Napping:
    """A partitioner that takes its time: no row of a file passes the JVM, which could do that."""

    def __init__(self, every: int, seconds: float) -> None:
        self.every = every
        self.seconds = seconds
        self.met = 0

    def partition(self, topic: str, key: Any, value: Any, partitions: int, available: Any) -> int:
        self.met += 1
        if self.met % self.every == 0:
            time.sleep(self.seconds)
        return self.met % partitions


def export(spark: SparkSession, job: dict[str, Any]) -> dict[str, int]:
    """Writes the rows in the job's form, and returns the figures of the report."""
    config = {"bootstrap.servers": job["servers"], "transaction.timeout.ms": job["timeout_ms"]}
    if job["form"] == "files":
        if job["nap_ms"]:
            config["partitioner"] = Napping(max(1, job["rows"] // job["pieces"] // NAPS), job["nap_ms"] / 1000)
        folder = Path(job["folder"], job["name"])
        how = {"splits": job["tasks"], "exactly_once": True, "job_id": job["name"]}
        report = export_files(spark, folder, job["topic"], config | {"compression.type": "lz4"}, value=Json(), **how)
        return figures(report)
    once = "bucket" if job["bucket"] else "task"
    rows = numbered(spark, job)
    if job["form"] == "rdd":
        writer = partition_writer(config, job["topic"], chunk=500, exactly_once=once, job_id=job["name"])
        report = ExportReport.of(rows.rdd.map(lambda row: row.value).mapPartitions(writer).collect())
    elif job["form"] == "source":
        path = Path(job["folder"], "report.json")
        register(spark)
        options = {f"kafka.{name}": str(value) for name, value in config.items()}
        options |= {"topic": job["topic"], "exactly.once": once, "job.id": job["name"], "report": str(path)}
        rows.write.format("fastprod").mode("append").options(**options).save()
        found = json.loads(path.read_text())
        path.unlink()
        tasks = found["tasks"]
        return {
            "records": found["records"],
            "skipped": sum(task["skipped"] for task in tasks),
            "full": sum(task["records"] > 0 for task in tasks),
        }
    else:
        more = {"buckets": job["pieces"], "bucket_by": ["id"]} if job["bucket"] and not job["nap_ms"] else {}
        report = write(rows, job["topic"], config, exactly_once=once, job_id=job["name"], **more)
    return figures(report)


def figures(report: ExportReport) -> dict[str, int]:
    return {
        "records": report.records,
        "skipped": report.skipped,
        "full": sum(task.records > 0 for task in report.tasks),
    }


def obey(group: str) -> None:
    """Does what is said on stdin."""
    for line in sys.stdin:
        context = SparkContext._active_spark_context
        assert context is not None  # nobody says anything before there is a job
        if line.strip() == "cancel all":
            context.cancelAllJobs()
        else:
            context.cancelJobGroup(group)
    os._exit(1)


def main() -> int:
    job = json.loads(sys.argv[1])
    threading.Thread(target=obey, args=(job["name"],), daemon=True).start()
    spark = session(job)
    try:
        context = spark.sparkContext
        ensure_callback_server_started(context._gateway)
        context._jsc.sc().addSparkListener(Listener())
        context.setJobGroup(job["name"], "export")
        say(app=context.applicationId)
        try:
            done = export(spark, job)
        except Exception as problem:
            traceback.print_exc()
            say(failed=f"{type(problem).__name__}: {problem}"[:20_000])
            return 1
        say(done=done)
        return 0
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(main())
