"""The nightly export: a table of orders on disk becomes a topic, and a report says where every record went.

    python examples/spark_bulk_export.py                        # on embedded brokers, nothing to set up but Java
    python examples/spark_bulk_export.py -b kafka:9092 --rows 5000000 --report orders.html

Orders are read from Parquet, keyed by customer, so that each customer's orders stay in one partition and in order, and
carry the time at which they were placed. Ends with status 1 if the report does not account for every row.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack

from pyspark.sql import SparkSession
from pyspark.sql import functions as f

from fastprod.spark import write
from fastprod.testing import MockClusterProcess, spark_environment

TOPIC = "orders"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-b", "--bootstrap", help="brokers that have a topic 'orders'; without, embedded ones")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--report", help="save the report as .json or .html")
    options = parser.parse_args()
    spark_environment()
    with ExitStack() as stack:
        brokers = options.bootstrap
        if brokers is None:
            brokers = stack.enter_context(MockClusterProcess(3, topics={TOPIC: 6})).bootstrap_servers
        spark = SparkSession.builder.master("local[2]").appName("nightly orders").getOrCreate()
        stack.callback(spark.stop)
        spark.sparkContext.setLogLevel("ERROR")
        folder = stack.enter_context(tempfile.TemporaryDirectory())

        # What the warehouse has left us.
        spark.range(options.rows).selectExpr(
            "id AS order_id",
            "concat('customer-', id * 7919 % 5003) AS customer",
            "round(id * 31 % 20000 / 100, 2) AS amount",
            "timestamp_millis(1700000000000 + id * 250) AS placed_at",
        ).write.parquet(f"{folder}/orders")

        # The export: name the columns as Spark's own Kafka sink does, and write.
        orders = spark.read.parquet(f"{folder}/orders")
        records = orders.select(
            f.col("customer").alias("key"),
            f.to_json(f.struct("order_id", "amount")).alias("value"),
            f.col("placed_at").alias("timestamp"),
        )
        report = write(records, TOPIC, {"bootstrap.servers": brokers, "compression.type": "lz4"})

        print(report)
        if options.report:
            report.save(options.report)
        stored = sum(part.records for part in report.topics[TOPIC].values())
        print(f"{orders.count():,} orders read, {report.records:,} acknowledged, {stored:,} by partition")
        return 0 if orders.count() == report.records == stored else 1


if __name__ == "__main__":
    sys.exit(main())
