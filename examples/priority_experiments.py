"""Three levels of priority, one slow consumer: who is served when?

    python examples/priority_experiments.py [--records 5000]

Starts an Apache Kafka on this machine (Java 17 and Maven), writes the same number of records for three levels, and
reads them with a CapacityBurstConsumer that may have 50 records in a poll. Then more records of the highest level come
while the one below has borrowed its capacity. `fastprod priority --plot levels.png` measures and draws the same.
"""

from __future__ import annotations

import argparse
import time

from fastprod.priority import CapacityBurstConsumer, PriorityProducer
from fastprod.testing import KafkaCluster

LEVELS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=5000, help="of each level")
    parser.add_argument("--work-ms", type=float, default=10, help="what processing a poll takes")
    arguments = parser.parse_args()
    with KafkaCluster() as cluster:
        run({"bootstrap.servers": cluster.bootstrap_servers}, arguments.records, arguments.work_ms / 1e3)


def run(config: dict[str, str], records: int, work_s: float) -> None:
    reading = {**config, "group.id": "workers", "auto.offset.reset": "earliest"}
    with PriorityProducer(config, max_priority=LEVELS) as producer:
        producer.create_topics("orders", partitions=5)
        for level in range(LEVELS):
            producer.produce_many("orders", [b"early"] * records, priority=level)
        producer.flush()
        with CapacityBurstConsumer(reading, max_priority=LEVELS, max_poll_records=50) as consumer:
            consumer.subscribe(["orders"])
            counts, wanted = [0] * LEVELS, [records] * LEVELS
            polls = 0
            print("poll   level 2   level 1   level 0   may have next")
            while counts != wanted:
                messages = consumer.poll(1.0)
                if not messages:
                    continue
                time.sleep(work_s)
                for message in messages:
                    counts[consumer.priority_of(message)] += 1
                polls += 1
                if wanted[2] == records and counts[1] > records * 2 / 3:
                    print("more records of level 2 come")
                    producer.produce_many("orders", [b"late"] * (records // 2), priority=2)
                    producer.flush()
                    wanted[2] += records // 2
                if polls % 20 == 0 or counts == wanted:
                    capacities = [one.capacity for one in consumer.stats()]
                    print(f"{polls:4}   {counts[2]:7,}   {counts[1]:7,}   {counts[0]:7,}   {capacities[::-1]}")
    print(f"all {sum(counts):,} records were processed, in {polls} polls")


if __name__ == "__main__":
    main()
