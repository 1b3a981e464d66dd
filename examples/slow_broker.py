"""Two of four brokers are slow: who notices, and what it is worth.

    python examples/slow_broker.py                   # about a minute; --seconds 10 for longer runs

Starts a real Apache Kafka of four brokers on this machine (Java 17 needed, see the README). Brokers 1 and 3 are frozen
for most of each second, as under a tight CPU quota. Three producers then send records without a key, one after the
other and each as fast as it can: one places them as librdkafka does by default, one spreads them evenly, one looks at
the queues (fastprod's default). All have the same 32 MB for records that wait.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

from fastprod import Producer
from fastprod.testing import KafkaCluster, KafkaUnavailable

PARTITIONS = 10
SLOW = (1, 3)
VALUES = [b"0b5a2f0e-7c1d-4e57-9a43-5d1c8f6e2b90"] * 1000
LINGER_MS = 5
WARM_UP_S = 4.0  # Java compiles what is used often, which takes a while

PRODUCERS: dict[str, dict[str, Any]] = {
    "librdkafka's default": {
        "partitioner": "consistent_random",
        # What librdkafka does when it lingers itself: keep to a partition for twice that time.
        "sticky.partitioning.linger.ms": 2 * LINGER_MS,
    },
    "evenly": {"partitioner": "uniform", "partitioner.adaptive.partitioning.enable": False},
    "by queue": {"partitioner": "uniform"},
}


@dataclass
class Result:
    sent: int
    seconds: float
    written: dict[int, int]  # records per partition
    slow: set[int]  # partitions on slow brokers

    @property
    def rate(self) -> float:
        return self.sent / self.seconds

    @property
    def slow_share(self) -> float:
        return sum(self.written[partition] for partition in self.slow) / sum(self.written.values())

    @property
    def missing(self) -> int:
        return self.sent - sum(self.written.values())


def send(cluster: KafkaCluster, topic: str, placement: dict[str, Any], seconds: float) -> tuple[int, float]:
    """As many records as go in so many seconds, and how long it took until all were acknowledged."""
    config = {"bootstrap.servers": cluster.bootstrap_servers, "acks": "all", "linger.ms": LINGER_MS, **placement}
    with Producer(config) as producer:
        sent, start = 0, time.monotonic()
        while time.monotonic() - start < seconds:
            producer.produce_many(topic, VALUES)  # waits while 32 MB are on their way
            sent += len(VALUES)
        left = producer.flush(60)
        return sent - left, time.monotonic() - start


def run(cluster: KafkaCluster, number: int, placement: dict[str, Any], seconds: float, pause: float) -> Result:
    topic = f"orders-{number}"
    # One copy: with more, a slow broker would also slow down the partitions that it only follows.
    cluster.create_topic(topic, PARTITIONS, 1, config={"retention.bytes": 64 << 20, "segment.bytes": 16 << 20})
    slow = {partition for partition in range(PARTITIONS) if cluster.leader_of(topic, partition) in SLOW}
    with cluster.slowed(*SLOW, share=pause):
        sent, took = send(cluster, topic, placement, seconds)
    written = {partition: end for partition, (_, end) in cluster.watermarks(topic).items()}
    return Result(sent, took, written, slow)


def show(name: str, result: Result) -> None:
    print(f"\n{name}: {result.sent:,} records in {result.seconds:.1f} s, {result.rate / 1e6:.2f} million/s", flush=True)
    most = max(result.written.values())
    for partition, records in result.written.items():
        mark = "slow" if partition in result.slow else ""
        print(f"  partition {partition} {mark:4} {records:>10,} {'#' * round(50 * records / most)}")
    print(f"  {result.slow_share:.1%} went to the slow brokers", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="for each producer")
    parser.add_argument("--pause", type=float, default=0.8, help="part of each second that slow brokers are frozen")
    options = parser.parse_args()
    if not 0 < options.pause < 1:
        parser.error(f"--pause {options.pause:g}: a part of each second, above 0 and below 1")
    results: dict[str, Result] = {}
    try:
        with KafkaCluster(4, topics={"warm-up": PARTITIONS}) as cluster:
            print(f"4 brokers, {PARTITIONS} partitions; brokers {SLOW[0]} and {SLOW[1]} stand still for "
                  f"{options.pause:.0%} of each second", flush=True)  # fmt: skip
            send(cluster, "warm-up", {}, min(WARM_UP_S, options.seconds))
            for number, (name, placement) in enumerate(PRODUCERS.items()):
                results[name] = run(cluster, number, placement, options.seconds, options.pause)
                show(name, results[name])
    except KafkaUnavailable as missing:
        print(missing, file=sys.stderr)
        return 2

    default, evenly, by_queue = results.values()
    print(f"\nBy queue, slow brokers got {by_queue.slow_share:.1%} instead of {evenly.slow_share:.1%}, and it all was "
          f"{by_queue.rate / default.rate:.1f} times as fast as with librdkafka's default.")  # fmt: skip
    missing_records = sum(result.missing for result in results.values())
    print(
        f"{sum(result.sent for result in results.values()):,} records acknowledged, {missing_records:,} of them missing"
    )
    return 1 if missing_records else 0


if __name__ == "__main__":
    sys.exit(main())
