"""A source with N partitions, read by a Spark job whose tasks restart from the committed positions.

    python examples/group_from_spark.py                     # Spark and a Kafka on this machine, only Java is needed
    python examples/group_from_spark.py -b kafka:9092 --lines 20000

The source is a folder with a file for each partition. Spark has no say in who reads which: each task is a member of a
producer group, gets its share of the files, and goes on from the line after the last one that was committed. The
first attempts of some tasks kill their Python worker in the middle of a transaction; Spark starts them again. Then the
whole job runs once more, as after a failure, and finds nothing to do.

A task ends when its files are at their end. Should another one die later, its next attempt finds what is left. Ends
with status 1 if a line is missing in the topic, or there twice.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from confluent_kafka import KafkaException
from pyspark import TaskContext
from pyspark.sql import SparkSession

from fastprod.groups import ProducerGroup, RebalanceError
from fastprod.testing import KafkaCluster, audit, spark_environment

FILES = 6
TASKS = 3
BATCH = 500
SESSION_MS = 6000


def copier(servers: str, topic: str, folder: str, killed: int) -> Callable[[Iterable[int]], Iterator[int]]:
    """A function for mapPartitions, which yields how many lines its task has copied."""

    def copy(numbers: Iterable[int]) -> Iterator[int]:
        context = TaskContext.get()
        assert context is not None
        doomed = context.attemptNumber() == 0 and context.partitionId() < killed
        config = {"bootstrap.servers": servers, "log_level": 0}
        count = 0
        with ProducerGroup(config, f"files-{topic}", FILES, session_timeout_ms=SESSION_MS) as group:
            group.subscribe()
            while True:
                try:
                    batch, positions = 0, {}
                    for partition, position in group.assignment.items():
                        first = int(position or 0)
                        lines = Path(folder, f"{partition}.txt").read_bytes().splitlines()[first : first + BATCH]
                        if lines:
                            group.produce_many(topic, lines, source_partition=partition)
                            positions[partition] = str(first + len(lines))
                            batch += len(lines)
                    if not positions:
                        break
                    if doomed and count:
                        os.kill(os.getpid(), signal.SIGKILL)
                    group.commit_transaction(positions)
                    count += batch
                except RebalanceError:
                    group.subscribe()  # {} would be taken for the end below, so the group must have decided
                except KafkaException as problem:
                    if not problem.args[0].txn_requires_abort():
                        raise
                    group.abort()
        yield count

    return copy


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-b", "--bootstrap", help="brokers that have the topic, empty")
    parser.add_argument("-t", "--topic", default="lines")
    parser.add_argument("--lines", type=int, default=5000, help="of each file")
    parser.add_argument("--kill", type=int, default=2, help=f"how many of the {TASKS} tasks die once")
    given = parser.parse_args()
    spark_environment()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="group-from-spark-"))
        for number in range(FILES):
            first = number * given.lines
            Path(folder, f"{number}.txt").write_text("".join(f"{first + line} line\n" for line in range(given.lines)))
        servers = given.bootstrap
        if servers is None:
            cluster = stack.enter_context(KafkaCluster(topics={given.topic: 4}))
            servers = cluster.bootstrap_servers
        # The second number is how often a task may fail.
        spark = SparkSession.builder.master(f"local[{TASKS},4]").appName("files into a topic").getOrCreate()
        stack.callback(spark.stop)
        spark.sparkContext.setLogLevel("OFF")
        for attempt in ("first", "second"):
            tasks = spark.sparkContext.parallelize(range(TASKS), TASKS)
            killed = given.kill if attempt == "first" else 0
            counts = tasks.mapPartitions(copier(servers, given.topic, folder, killed)).collect()
            print(f"{attempt} run: its last attempts copied {counts} lines", flush=True)
        found = audit(servers, given.topic, FILES * given.lines, order="none")
        print(found)
        return 0 if found.clean and not sum(counts) else 1


if __name__ == "__main__":
    sys.exit(main())
