"""What a record costs that a consumer of priority levels polls, beside confluent_kafka.Consumer.consume."""

import time

from confluent_kafka import Consumer

from fastprod.priority import CapacityBurstConsumer, PriorityProducer
from fastprod.testing import MockClusterProcess

RECORDS = 200_000  # more than that mock brokers do not keep
POLL = 500


class Poll:
    """Three levels that all have records, and the same topics read by one consumer."""

    params = ("CapacityBurstConsumer", "Consumer.consume")
    param_names = ("client",)
    timeout = 300

    def setup(self, client):
        self.cluster = MockClusterProcess(1, topics={f"t-{level}": 4 for level in range(3)})
        with PriorityProducer({"bootstrap.servers": self.cluster.bootstrap_servers}, 3) as producer:
            # A whole poll at a time is borrowed if one level has all the records.
            for level, share in enumerate((1, 2, 4)):
                count = RECORDS * share // 7
                partitions = [number % 4 for number in range(count)]
                producer.produce_many("t", [b"x" * 100] * count, partitions=partitions, priority=level)
            self.records = sum(RECORDS * share // 7 for share in (1, 2, 4))

    def teardown(self, client):
        self.cluster.close()

    def track_cpu_us_per_record(self, client):
        return cost(self.cluster.bootstrap_servers, client, self.records)

    track_cpu_us_per_record.unit = "us"


class Idle:
    """Five levels that nobody writes to."""

    timeout = 120

    def setup(self):
        self.cluster = MockClusterProcess(1, topics={f"t-{level}": 4 for level in range(5)})

    def teardown(self):
        self.cluster.close()

    def track_percent_of_a_core(self):
        with CapacityBurstConsumer(config(self.cluster.bootstrap_servers), 5, POLL) as consumer:
            consumer.subscribe(["t"])
            while len(consumer.assignment()) < 20:
                consumer.poll(0.1)
            start = time.process_time()
            consumer.poll(10)
            return 100 * (time.process_time() - start) / 10

    track_percent_of_a_core.unit = "%"


def config(servers):
    return {
        "bootstrap.servers": servers,
        "group.id": "bench",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
    }


def cost(servers, client, records):
    """CPU time per record of the whole process, that is with librdkafka's threads."""
    if client == "Consumer.consume":
        consumer = Consumer(config(servers))
        consumer.subscribe([f"t-{level}" for level in range(3)])
        poll = lambda: consumer.consume(POLL, 1)  # noqa: E731
    else:
        consumer = CapacityBurstConsumer(config(servers), 3, POLL)
        consumer.subscribe(["t"])
        poll = lambda: consumer.poll(1)  # noqa: E731
    seen = 0
    topics = set()
    while len(topics) < 3:  # every group has been joined by then, which is not what a record costs
        found = poll()
        seen += len(found)
        topics.update(message.topic() for message in found)
    first = seen
    start = time.process_time()
    while seen < records:
        seen += len(poll())
    spent = time.process_time() - start
    consumer.close()
    return 1e6 * spent / (records - first)
