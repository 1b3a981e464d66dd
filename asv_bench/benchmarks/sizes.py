"""What a record costs by the size of its value, and by how sizes and calls change from record to record.

All are gates but the largest values, which measure the memory's bandwidth most of all.
"""

from fastprod.cli._load import Load, make_block
from fastprod.cli._scale import LARGE, SIZES, mixed_block, plain_block, pool_bytes

from .common import TOPIC, WithStage

BYTES = 20_000_000
RECORDS = 100_000


class ValueSize(WithStage):
    params = SIZES
    param_names = ("value_bytes",)

    def setup(self, value_bytes):
        self.open(1, {TOPIC: 10}, **LARGE)

    def track_cpu_us_per_record(self, value_bytes):
        records = min(RECORDS, BYTES // value_bytes)
        return self.cpu_us(Load(TOPIC, records, make_block(records, value_bytes)))

    track_cpu_us_per_record.unit = "us"


class Mixed(WithStage):
    """Values of 100 to 1,000 B at random, of which some are copied and some are not, and the same bytes at 500 B."""

    params = ("mixed", "plain")
    param_names = ("values",)

    def setup(self, values):
        self.open(1, {TOPIC: 4})
        self.block = (mixed_block if values == "mixed" else plain_block)(BYTES)

    def track_cpu_us_per_record(self, values):
        return self.cpu_us(Load(TOPIC, 2 * len(self.block.values), self.block))

    def track_pool_bytes_per_record(self, values):
        return pool_bytes(self.stage, self.block.values, len(self.block.values))

    track_cpu_us_per_record.unit = "us"
    track_pool_bytes_per_record.unit = "bytes"


class SmallCalls(WithStage):
    """Pool bytes per record of 100 B, where a call has few of them."""

    params = (10, RECORDS)
    param_names = ("records_per_call",)

    def setup(self, records_per_call):
        self.open(1, {TOPIC: 4})
        self.values = make_block(RECORDS, 100).values

    def track_pool_bytes_per_record(self, records_per_call):
        return pool_bytes(self.stage, self.values, records_per_call)

    track_pool_bytes_per_record.unit = "bytes"
