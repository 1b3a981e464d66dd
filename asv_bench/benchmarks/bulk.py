"""Bulk calls from lists, numpy and Arrow, until everything is acknowledged.

The 100 B cases are gates; those of 10 KB inform, as they measure the memory's bandwidth most of all.
"""

import pyarrow as pa

from fastprod.cli import _load

from .common import COLUMNS, TOPIC, WithBroker

BYTES = 20_000_000  # per call


class ProduceMany(WithBroker):
    params = (tuple(COLUMNS), (100, 10_000), (False, True))
    param_names = ("column", "value_bytes", "keyed")

    def setup(self, column, value_bytes, keyed):
        self.start()
        self.connect()
        count = BYTES // value_bytes
        block = _load.make_block(count, value_bytes, 1000 if keyed else 0)
        repeats = count // len(block.values)
        self.values = COLUMNS[column](block.values * repeats)
        self.keys = COLUMNS[column](block.keys * repeats) if keyed else None

    def time_produce_many(self, column, value_bytes, keyed):
        self.settle(self.producer.produce_many(TOPIC, self.values, self.keys))


class SmallCalls(WithBroker):
    """200,000 records of 100 B in many calls that share a receipt: what a call costs besides its records. A gate."""

    params = (10, 100, 1000, 10_000)
    param_names = ("records_per_call",)

    def setup(self, records_per_call):
        self.start()
        self.connect()
        self.values = _load.make_block(records_per_call, 100).values[:records_per_call]

    def time_200000_records(self, records_per_call):
        receipt = None
        for _ in range(200_000 // records_per_call):
            receipt = self.producer.produce_many(TOPIC, self.values, receipt=receipt)
        self.settle(receipt)


class ArrowColumns(WithBroker):
    """200,000 records of 100 B with one more column, as Spark hands them over. A gate."""

    params = ("none", "key", "timestamp", "topic", "headers")
    param_names = ("column",)

    def setup(self, column):
        self.start()
        self.connect()
        count = 200_000
        block = _load.make_block(count, 100, 1000)
        columns = {"value": pa.array((block.values * (count // len(block.values)))[:count], pa.binary())}
        if column == "key":
            columns["key"] = pa.array((block.keys * (count // len(block.keys)))[:count], pa.binary())
        elif column == "timestamp":
            columns["timestamp"] = pa.array([1_700_000_000_000] * count)
        elif column == "topic":
            columns["topic"] = pa.array([TOPIC] * count)
        elif column == "headers":
            header = [{"key": "source", "value": b"spark"}]
            kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
            columns["headers"] = pa.array([header] * count, kind)
        self.table = pa.table(columns)

    def time_produce_arrow(self, column):
        self.settle(self.producer.produce_arrow(self.table, None if column == "topic" else TOPIC))
