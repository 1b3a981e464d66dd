"""How many bytes should stay with a partition? Bulk throughput by sticky.batch.size.

Informs: the default in fastprod/_config.py was chosen from these figures.
"""

from fastprod.cli import _load

from .common import TOPIC, WithBroker


class StickyBatchSize(WithBroker):
    params = ((4096, 16_384, 65_536, 262_144, 1_000_000), (10, 100))
    param_names = ("sticky_bytes", "partitions")

    def setup(self, sticky_bytes, partitions):
        self.partitions = partitions
        self.start(**{"sticky.batch.size": sticky_bytes})
        self.connect()
        self.values = _load.make_block(100_000, 100).values * 3

    def time_300000_records(self, sticky_bytes, partitions):
        self.settle(self.producer.produce_many(TOPIC, self.values))
