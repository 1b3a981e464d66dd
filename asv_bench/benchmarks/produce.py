"""Single records: the accumulator alone, then whole calls up to the acknowledgement.

`Append` and `Single` are gates; `Ratio` informs, since the rival's figure moves with its releases.
"""

from fastprod._core._shim import Accumulator
from fastprod.cli import _load

from .common import TOPIC, WithBroker

RECORDS = 50_000


class Append:
    """Copying 10,000 records of 100 B into the lanes of an empty accumulator."""

    params = (("uniform", "sticky", "round_robin"), (10, 100, 1000))
    param_names = ("policy", "partitions")
    number = 1  # with a setup() before each

    def setup(self, policy, partitions):
        self.accumulator = Accumulator(partitions, policy=policy, sticky_bytes=65536, buffer_memory=256 << 20, seed=1)
        self.value = bytes(100)

    def time_append_10000(self, policy, partitions):
        append, value = self.accumulator.append, self.value
        for _ in range(10_000):
            append(value)


class Single(WithBroker):
    """produce() in a loop, flush at the end."""

    params = (100, 10_000)
    param_names = ("value_bytes",)

    def setup(self, value_bytes):
        self.start()
        self.connect()
        self.values = _load.make_block(RECORDS * 100 // value_bytes, value_bytes).values
        self.delivered = 0

    def time_produce(self, value_bytes):
        produce = self.producer.produce
        for value in self.values:
            produce(TOPIC, value)
        self.producer.flush()

    def time_produce_on_delivery(self, value_bytes):
        produce, poll, called = self.producer.produce, self.producer.poll, self._delivered
        self.delivered = 0
        for value in self.values:
            produce(TOPIC, value, on_delivery=called)
            poll(0)
        self.producer.flush()
        assert self.delivered == len(self.values)

    def _delivered(self, error, message):
        if error is None:
            self.delivered += 1


class Ratio(WithBroker):
    """fastprod's throughput in units of confluent-kafka's, measured in turns on the same cluster."""

    params = ("single", "bulk")
    param_names = ("mode",)
    timeout = 180

    def setup(self, mode):
        self.start()

    def track_throughput_vs_confluent(self, mode):
        return self._ratio(mode, lambda one: one.rate)

    def track_cpu_vs_confluent(self, mode):
        return self._ratio(mode, lambda one: 1 / one.cpu_us)

    track_throughput_vs_confluent.unit = track_cpu_vs_confluent.unit = "times"

    def _ratio(self, mode, figure):
        load = _load.Load(TOPIC, 200_000, _load.make_block(200_000, 100), warmup=50_000)
        target = _load.Target(self.conf, TOPIC)
        target.open(self.partitions)
        ratios = []
        for _ in range(3):
            ours, theirs = (
                figure(_load.measure(runner, mode, runner.calls[mode][0], load, self.conf, target))
                for runner in (_load.OURS, _load.RUNNERS["confluent"])
            )
            ratios.append(ours / theirs)
        return sorted(ratios)[1]
