"""What it costs to decide where a key-less record goes, by the number of partitions.

Both are gates: a decision falls at every switch of partition (or every record, with partial round robin), a rebuild of
the load table every few milliseconds while records come in, most of all while brokers are stuck. They run the
accumulator's own functions.
"""

from fastprod._core._shim import Accumulator
from fastprod.cli._scale import rebuild_ms

PARTITIONS = (10, 100, 1000, 10_000)
DECISIONS = 10_000
REBUILDS = 100
BROKERS = 12
RECORD = 100  # bytes: every record is a switch


def loaded(partitions, policy, **more):
    """An accumulator whose lanes are all open; the first broker's hold 20 records, so that the load table decides."""
    leaders = [partition % BROKERS for partition in range(partitions)]
    accumulator = Accumulator(
        partitions, policy=policy, leaders=leaders, sticky_bytes=100, buffer_memory=1 << 30, **more
    )

    def send(lanes, records):
        for partition in lanes:
            for _ in range(records):
                accumulator.append(b"x" * 100, partition=partition)
        accumulator.take()

    send(range(partitions), 1)
    for partition in range(partitions):
        accumulator.acknowledge(partition)
    accumulator.rebuild_many(1)
    send(range(0, partitions, BROKERS), 20)
    accumulator.rebuild_many(50)
    return accumulator


class Decide:
    params = (PARTITIONS, ("uniform", "uniform, adaptive", "partial round robin"))
    param_names = ("partitions", "policy")

    def setup(self, partitions, policy):
        adaptive = policy == "uniform, adaptive"
        if policy == "partial round robin":
            self.accumulator = loaded(partitions, "partial", limit=max(1, partitions // 3))
        else:
            self.accumulator = loaded(partitions, "uniform", adaptive=adaptive)

    def time_decide_10000(self, partitions, policy):
        self.accumulator.choose_many(DECISIONS, RECORD)


class Rebuild:
    params = PARTITIONS
    param_names = ("partitions",)

    def setup(self, partitions):
        self.accumulator = loaded(partitions, "uniform")

    def time_rebuild_100(self, partitions):
        self.accumulator.rebuild_many(REBUILDS)


class RebuildStuck:
    """The same while partitioner.availability.timeout.ms is over for every partition."""

    params = (1000, 8000)
    param_names = ("partitions",)

    def track_rebuild_ms(self, partitions):
        return rebuild_ms(partitions)

    track_rebuild_ms.unit = "ms"


class Memory:
    """What a topic takes whose partitions are known but not used, and what a used partition adds."""

    params = PARTITIONS
    param_names = ("partitions",)

    def peakmem_known(self, partitions):
        return Accumulator(partitions)

    def peakmem_used(self, partitions):
        return loaded(partitions, "round_robin")
