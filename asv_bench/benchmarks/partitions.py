"""What a record of 100 B costs by the number of partitions, on three brokers.

`Keyed` is a gate: librdkafka sends one partition a request, so records must gather before they are handed over.
`PythonPartitioner` informs.
"""

from fastprod.cli._load import Load, make_block
from fastprod.cli._scale import AlwaysFirst

from .common import TOPIC, WithStage

RECORDS = 50_000


class Keyed(WithStage):
    params = (1, 10, 100, 1000, 10_000)
    param_names = ("partitions",)

    def setup(self, partitions):
        self.open(3, {TOPIC: partitions})

    def track_cpu_us_per_record(self, partitions):
        return self.cpu_us(Load(TOPIC, RECORDS, make_block(RECORDS, 100, RECORDS)))

    track_cpu_us_per_record.unit = "us"


class PythonPartitioner(WithStage):
    """Which is told the partitions that have a leader, at every record."""

    params = (10, 1000)
    param_names = ("partitions",)

    def setup(self, partitions):
        self.open(3, {TOPIC: partitions})

    def track_cpu_us_per_record(self, partitions):
        load = Load(TOPIC, RECORDS // 10, make_block(RECORDS // 10, 100))
        return self.cpu_us(load, "produce", partitioner=AlwaysFirst())

    track_cpu_us_per_record.unit = "us"
