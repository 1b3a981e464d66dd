"""How long the first records to topics take that a producer has not used before, with brokers that are 20 ms away.

A gate; by the clock, as it is all waiting. An idempotent producer needs a round trip for every five topics.
"""

from fastprod.cli import _load
from fastprod.cli._scale import SECONDS, first_records

from .common import WithStage


class FirstRecords(WithStage):
    params = ((10, 100), (True, False))
    param_names = ("topics", "idempotent")

    def setup(self, topics, idempotent):
        self.topics = [f"bench-{number}" for number in range(topics)]
        self.open(1, dict.fromkeys(self.topics, 1), 20, **{"enable.idempotence": idempotent})

    def track_seconds(self, topics, idempotent):
        return first_records(_load.OURS, self.stage.conf, self.topics)[SECONDS.name]

    track_seconds.unit = "s"
