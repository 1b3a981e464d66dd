"""Memory: a bulk call must stream through buffer.memory, whatever its size.

Gates: the peak follows buffer.memory plus the caller's own column, not the number of records; and records that find no
room cost next to nothing.
"""

import pyarrow as pa

from fastprod.cli._scale import CPU, GROWTH, rejected_rows

from .common import TOPIC, WithBroker


class BulkBeyondTheBuffer(WithBroker):
    """60 MB of records of 100 B, the column as one Arrow buffer, through a small and the usual buffer."""

    params = (2 << 20, 32 << 20)
    param_names = ("buffer_memory",)

    def setup(self, buffer_memory):
        self.start(**{"buffer.memory": buffer_memory})
        self.connect()
        count = 600_000
        data = pa.py_buffer(bytes(count * 100))
        self.values = pa.Array.from_buffers(pa.binary(100), count, [None, data])

    def peakmem_produce_many(self, buffer_memory):
        self.settle(self.producer.produce_many(TOPIC, self.values))

    def peakmem_nothing(self, buffer_memory):
        """The same without the call, to subtract."""


class Rejected:
    """200,000 rows against dead brokers, in a process of its own; on Linux."""

    def track_bytes_per_record(self):
        return rejected_rows(200_000)[GROWTH.name]

    def track_cpu_us_per_record(self):
        return rejected_rows(200_000)[CPU.name]

    track_bytes_per_record.unit = "bytes"
    track_cpu_us_per_record.unit = "us"
