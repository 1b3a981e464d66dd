"""produce_many from lists, numpy and Arrow, until everything is acknowledged.

The 100 B cases are gates; those of 10 KB inform, as they measure the memory's bandwidth most of all.
"""

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
