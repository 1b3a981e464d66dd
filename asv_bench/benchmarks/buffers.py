"""What a record of 100 B costs in a bulk call, by buffer.memory. A gate: a buffer that is full may not cost more."""

from fastprod.cli._load import Load, make_block
from fastprod.cli._scale import BUFFERS

from .common import TOPIC, WithStage

RECORDS = 500_000


class Buffer(WithStage):
    params = BUFFERS
    param_names = ("buffer_mb",)

    def setup(self, buffer_mb):
        self.open(1, {TOPIC: 10}, **{"buffer.memory": buffer_mb << 20})

    def track_cpu_us_per_record(self, buffer_mb):
        return self.cpu_us(Load(TOPIC, RECORDS, make_block(RECORDS, 100)))

    track_cpu_us_per_record.unit = "us"
