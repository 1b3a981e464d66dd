"""What a record of 100 B costs when several threads share a producer, by the room that it has.

A gate: neither a full buffer nor more threads may make it dearer. With 4 MB the brokers are 20 ms away.
"""

from fastprod.cli._scale import shared_load

from .common import TOPIC, WithStage

RECORDS = 150_000  # more than the largest buffer here holds
CALL = 1000


class Threads(WithStage):
    params = (("produce", "produce_many"), (4, 8, 32), (1, 4, 16))
    param_names = ("call", "buffer_mb", "threads")

    def setup(self, call, buffer_mb, threads):
        self.open(1, {TOPIC: 10}, 20 if buffer_mb == 4 else None, **{"buffer.memory": buffer_mb << 20})
        size = CALL if call == "produce_many" else -(-RECORDS // threads)
        self.load = shared_load(threads, RECORDS, size, 0)

    def track_cpu_us_per_record(self, call, buffer_mb, threads):
        return self.cpu_us(self.load, call)

    track_cpu_us_per_record.unit = "us"
