"""A million records while brokers die: nothing lost, nothing doubled, order kept.

    python examples/kill_a_broker.py                 # once; --runs 3 for three times in a row

Starts a real Apache Kafka of three brokers on this machine (Java 17 needed, see the README) and produces numbered
records with acks=all, single and in bulk, with keys and without. Meanwhile one broker is killed with SIGKILL
and restarted, another frozen for longer than the request timeout, and leaders are moved. Then an ordinary consumer
reads the topic back and every record is counted.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable

from fastprod import Producer
from fastprod.testing import Audit, KafkaCluster, KafkaUnavailable, audit

TOPIC = "orders"
PARTITIONS = 12
BLOCK = 2000  # records handed in at once
SHARE_S = 20.0  # while faults go on, the rate is what is left by so many seconds: each of them meets traffic
REQUEST_TIMEOUT_S = 5.0
PAUSE_S = 8.0


class Story:
    """What happens to the brokers, told with the time and what the producer has achieved by then."""

    def __init__(self, cluster: KafkaCluster, progress: Callable[[], str]) -> None:
        self.cluster = cluster
        self.progress = progress
        self.start = time.monotonic()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="faults")

    def say(self, what: str) -> None:
        print(f"{time.monotonic() - self.start:6.1f} s  {what:58} {self.progress()}", flush=True)

    def _run(self) -> None:
        try:
            self.faults()
        except BaseException as failure:
            self.failure = failure

    def faults(self) -> None:
        cluster = self.cluster
        time.sleep(1)
        cluster.kill(1)
        self.say("broker 1 killed (SIGKILL)")
        time.sleep(2)
        cluster.restart(1)
        self.say("broker 1 started again")
        cluster.wait_in_sync(TOPIC)
        self.say("broker 1 in sync")

        cluster.pause(2)
        self.say(f"broker 2 frozen (SIGSTOP), request timeout {REQUEST_TIMEOUT_S:g} s")
        time.sleep(PAUSE_S)
        cluster.resume(2)
        self.say(f"broker 2 goes on after {PAUSE_S:g} s")
        cluster.wait_in_sync(TOPIC)
        self.say("broker 2 in sync")

        for partition in (0, 1):
            old = cluster.leader_of(TOPIC, partition)
            new = next(broker for broker in cluster.brokers if broker != old)
            cluster.set_leader(TOPIC, partition, new)
            self.say(f"partition {partition} moved from broker {old} to {new}")
        cluster.stop(3)
        self.say("broker 3 stopped in good order, its partitions moved")
        cluster.restart(3)
        cluster.wait_in_sync(TOPIC)
        self.say("broker 3 back and in sync")


def run(records: int) -> tuple[Audit, int]:
    """One run; returns what the topic holds and how many records the producer reported as failed."""
    with KafkaCluster(3) as cluster:
        cluster.create_topic(TOPIC, PARTITIONS)
        config = {
            "bootstrap.servers": cluster.bootstrap_servers,
            "acks": "all",  # with fastprod's default, idempotence
            "request.timeout.ms": int(REQUEST_TIMEOUT_S * 1000),
            "log_level": 2,  # librdkafka's own words about brokers that go away
        }
        with Producer(config) as producer:
            sent = failed = 0

            def count(error: object, message: object) -> None:
                nonlocal failed
                failed += error is not None

            receipts = []
            story = Story(cluster, lambda: f"{sent:>9,} handed in, {len(producer):>7,} not yet acknowledged")
            story.thread.start()
            while sent < records:
                block = range(sent, min(sent + BLOCK, records))
                due = time.monotonic() + BLOCK / (records - sent) * SHARE_S
                last = block.stop == records  # waits for the last fault, however long a busy machine takes for all
                while story.thread.is_alive() and (last or time.monotonic() < due):
                    producer.poll(0.01)
                values = [b"%d is the number of this order" % number for number in block]
                keys = [b"customer-%d" % (number * 7919 % 5003) for number in block]
                match block.start // BLOCK % 3:
                    case 0:
                        receipts.append(producer.produce_many(TOPIC, values, keys))
                    case 1:
                        receipts.append(producer.produce_many(TOPIC, values))
                    case 2:
                        for value, key in zip(values, keys, strict=True):
                            producer.produce(TOPIC, value, key, on_delivery=count)
                sent = block.stop
                producer.poll(0)
            left = producer.flush(120)
            story.thread.join()
            if story.failure is not None:
                raise story.failure
            story.say(f"all handed in and flushed, {left} left")
            failed += sum(receipt.failed for receipt in receipts) + left
        found = audit(cluster.bootstrap_servers, TOPIC, records)
        print(f"read back: {found}", flush=True)
        return found, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--runs", type=int, default=1)
    options = parser.parse_args()
    good = 0
    for number in range(options.runs):
        print(f"run {number + 1} of {options.runs}: {options.records:,} records to 3 brokers, acks=all", flush=True)
        try:
            found, failed = run(options.records)
        except KafkaUnavailable as missing:
            print(missing, file=sys.stderr)
            return 2
        good += found.clean and not failed
        print(f"reported as failed: {failed}", flush=True)
    print(f"{good} of {options.runs} runs: nothing lost, nothing doubled, order kept")
    return 0 if good == options.runs else 1


if __name__ == "__main__":
    sys.exit(main())
