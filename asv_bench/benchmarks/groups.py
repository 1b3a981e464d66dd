"""What a group costs: transactions of 1,000 records by a member, beside the same producer without a group.

On a real Apache Kafka, because mock brokers keep no offsets of transactions; skipped where there is none.
"""

import time

from fastprod import Producer
from fastprod.groups import ProducerGroup
from fastprod.testing import KafkaCluster, KafkaUnavailable

EACH = 1000
TRANSACTIONS = 50


class Transactions:
    params = ("group", "producer")
    param_names = ("client",)
    timeout = 300

    def setup(self, client):
        try:
            self.cluster = KafkaCluster(topics={"t": 1})
        except KafkaUnavailable as missing:
            raise NotImplementedError(str(missing)) from None
        self.values = [b"x" * 100] * EACH

    def teardown(self, client):
        self.cluster.close()

    def track_records_per_second(self, client):
        config = {"bootstrap.servers": self.cluster.bootstrap_servers, "log_level": 0}
        if client == "group":
            with ProducerGroup(config, "bench", 1) as group:
                group.subscribe()
                return self.rate(lambda number: self.by_group(group, number))
        with Producer({**config, "transactional.id": "bench"}) as producer:
            producer.init_transactions()
            return self.rate(lambda number: self.by_producer(producer))

    track_records_per_second.unit = "records/s"

    def rate(self, transaction):
        transaction(0)
        start = time.perf_counter()
        for number in range(TRANSACTIONS):
            transaction(number)
        return TRANSACTIONS * EACH / (time.perf_counter() - start)

    def by_group(self, group, number):
        group.produce_many("t", self.values, source_partition=0)
        group.commit_transaction(str(number))

    def by_producer(self, producer):
        producer.begin_transaction()
        producer.produce_many("t", self.values)
        producer.commit_transaction()
