"""What benchmarks with a broker share: a mock cluster in a process of its own, and warm producers."""

from contextlib import ExitStack

import numpy as np
import pyarrow as pa

from fastprod import Producer, testing
from fastprod.cli import _load, _scale

TOPIC = "bench"
COLUMNS = {
    "list": list,
    "numpy": np.array,
    "arrow": lambda block: pa.array(block, pa.binary()),
}


class WithBroker:
    """Base of a benchmark: `self.cluster` and `self.conf`; asv calls setup and teardown around each case."""

    partitions = 10
    number = 1
    repeat = (3, 5, 10.0)  # asv makes a new broker for every sample
    rounds = 1

    def start(self, **options):
        self.cluster = testing.MockClusterProcess(1, topics={TOPIC: self.partitions})
        self.conf = _load.full_configuration({"bootstrap.servers": self.cluster.bootstrap_servers, **options})

    def teardown(self, *params):
        producer = getattr(self, "producer", None)
        if producer is not None:
            producer.close()
        self.cluster.close()

    def connect(self):
        """A producer that has its connections, its producer id and its memory."""
        self.producer = Producer(self.conf)
        for partition in range(self.partitions):
            self.producer.produce(TOPIC, b"warm", partition=partition)
        self.producer.flush()
        self.producer.produce_many(TOPIC, [b"x" * 100] * 50_000)
        self.producer.flush()

    def settle(self, receipt):
        """Waits for every acknowledgement; a run that lost some is not a measurement."""
        self.producer.flush()
        assert receipt.acknowledged == receipt.total, receipt.errors[:1]


class WithStage:
    """Base of a benchmark of what a record costs, by the code of `fastprod perf scale`: `self.stage`.

    CPU time is tracked, since it moves less than the clock with what else the machine does.
    """

    timeout = 300

    def open(self, brokers, topics, rtt_ms=None, **options):
        self.stack = ExitStack()
        self.stage = _scale.Stage(self.stack, brokers, topics, rtt_ms, **options)

    def teardown(self, *params):
        self.stack.close()

    def cpu_us(self, load, call="produce_many", **options):
        """Of a record, up to the last acknowledgement of all."""
        return self.stage.ours(load, call, options)()[_scale.CPU.name]
