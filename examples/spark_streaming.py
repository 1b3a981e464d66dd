"""A stream into Kafka that is stopped and started again: it goes on where it was, without a gap.

    python examples/spark_streaming.py                          # on embedded brokers, nothing to set up but Java
    python examples/spark_streaming.py -b kafka:9092 -t clicks --seconds 60

Spark's rate source plays the part of a website whose clicks are numbered. The query is stopped twice, as for a
deployment, and each time a new one takes up its checkpoint; the last one writes what is there and ends. Then the topic
is read back: every number must be there. A batch that was interrupted is written again, so some may be there twice,
unless --exactly-once (real brokers only).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import ExitStack

from confluent_kafka import Message
from pyspark.sql import SparkSession
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

import fastprod.spark
from fastprod.testing import MockClusterProcess, audit, spark_environment

RATE = 1000  # clicks a second


def clicks_to(spark: SparkSession, brokers: str, topic: str, checkpoint: str, exactly_once: bool) -> DataStreamWriter:
    clicks = spark.readStream.format("rate").option("rowsPerSecond", RATE).load()
    writer = (
        clicks.selectExpr(
            "concat('visitor-', value % 97) AS key", "concat(value, ' /shop/', value % 7) AS value", "timestamp"
        )
        .writeStream.format("fastprod")
        .option("kafka.bootstrap.servers", brokers)
        .option("topic", topic)
        .option("checkpointLocation", checkpoint)
    )
    if exactly_once:
        writer = writer.option("exactly.once", "task")
    return writer


def written(query: StreamingQuery) -> int:
    return sum(batch["numInputRows"] for batch in query.recentProgress)


def count(brokers: str, topic: str) -> tuple[int, int]:
    """Reads the topic back: how many clicks are missing below the highest, and how many are there twice."""
    numbers: list[int] = []

    def note(click: Message) -> int:
        numbers.append(int((click.value() or b"").split()[0]))
        return numbers[-1]

    audit(brokers, topic, 0, number_of=note, order="none")
    return max(numbers, default=0) + 1 - len(set(numbers)), len(numbers) - len(set(numbers))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-b", "--bootstrap", help="brokers that have the topic, empty; without, embedded ones")
    parser.add_argument("-t", "--topic", default="clicks")
    parser.add_argument("--seconds", type=float, default=6.0, help="of clicks, half of them before the first stop")
    parser.add_argument("--exactly-once", action="store_true")
    options = parser.parse_args()
    if options.exactly_once and not options.bootstrap:
        parser.error("--exactly-once needs real brokers: give -b")
    spark_environment()
    with ExitStack() as stack:
        brokers = options.bootstrap
        if brokers is None:
            brokers = stack.enter_context(MockClusterProcess(3, topics={options.topic: 6})).bootstrap_servers
        spark = SparkSession.builder.master("local[2]").appName("clicks").getOrCreate()
        stack.callback(spark.stop)
        spark.sparkContext.setLogLevel("OFF")  # Spark takes a query that is stopped for an error
        fastprod.spark.register(spark)  # not needed where fastprod was installed from a wheel
        checkpoint = stack.enter_context(tempfile.TemporaryDirectory())

        for turn, last in (("first", False), ("second", False), ("third", True)):
            writer = clicks_to(spark, brokers, options.topic, checkpoint, options.exactly_once)
            query = (writer.trigger(availableNow=True) if last else writer).start()
            while query.isActive and (last or written(query) < RATE * options.seconds / 2):
                time.sleep(0.1)
            query.stop()
            if (problem := query.exception()) is not None:
                print(f"the {turn} query failed: {problem}", file=sys.stderr)
                return 1
            how = "ended" if last else "was stopped"
            print(f"the {turn} query has written {written(query):,} clicks in batches it finished, and {how}")

        missing, twice = count(brokers, options.topic)
        deadline = time.monotonic() + 120  # Kafka answers a commit a moment before readers can see it
        while missing and time.monotonic() < deadline:
            missing, twice = count(brokers, options.topic)
        print(f"read back: {missing} clicks are missing, {twice} are there twice")
        return 1 if missing or (twice and options.exactly_once) else 0


if __name__ == "__main__":
    sys.exit(main())
