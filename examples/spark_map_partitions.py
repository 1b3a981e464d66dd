"""Log lines through Python code into two topics: rdd.mapPartitions with fastprod at its end.

    python examples/spark_map_partitions.py                     # on embedded brokers, nothing to set up but Java
    python examples/spark_map_partitions.py -b kafka:9092

For jobs that live on RDDs: lines of a web server's log are parsed by a Python function, rows name their topic, and
each partition of the RDD yields one small report instead of its data. Errors of the server go to the topic "alerts",
everything else to "visits". Ends with status 1 if a line is not accounted for.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

from pyspark.sql import SparkSession

from fastprod.spark import ExportReport, partition_writer
from fastprod.testing import MockClusterProcess, spark_environment


def make_lines(count: int) -> list[str]:
    """A log: address, time, path, status."""
    chance = random.Random(7)
    return [
        f"10.0.{chance.randrange(8)}.{chance.randrange(256)} {1_700_000_000 + number} "
        f"/shop/{chance.randrange(50)} {chance.choices((200, 404, 500), (95, 4, 1))[0]}"
        for number in range(count)
    ]


def parse(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """What your own code does: here a row per line, keyed by the visitor's address."""
    for line in lines:
        address, seconds, path, status = line.split()
        yield {
            "topic": "alerts" if status.startswith("5") else "visits",
            "key": address,
            "value": json.dumps({"path": path, "status": int(status)}),
            "timestamp": int(seconds) * 1000,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-b", "--bootstrap", help="brokers that have the topics 'visits' and 'alerts'")
    parser.add_argument("--lines", type=int, default=100_000)
    options = parser.parse_args()
    spark_environment()
    with ExitStack() as stack:
        brokers = options.bootstrap
        if brokers is None:
            mock = stack.enter_context(MockClusterProcess(3, topics={"visits": 6, "alerts": 1}))
            brokers = mock.bootstrap_servers
        spark = SparkSession.builder.master("local[2]").appName("web server log").getOrCreate()
        stack.callback(spark.stop)
        spark.sparkContext.setLogLevel("ERROR")

        lines = spark.sparkContext.parallelize(make_lines(options.lines), 8)
        reports = lines.mapPartitions(parse).mapPartitions(partition_writer({"bootstrap.servers": brokers})).collect()

        report = ExportReport.of(reports)
        print(report)
        for task in report.tasks:
            print(f"partition {task.task} of the RDD: {task.records:,} records in {task.seconds:.2f} s")
        return 0 if report.records == options.lines else 1


if __name__ == "__main__":
    sys.exit(main())
