"""What a record of 100 B costs in a bulk call with a column of topics, by the number of topics. A gate."""

from fastprod.cli._load import Load, make_block

from .common import WithStage

RECORDS = 100_000


class TopicColumn(WithStage):
    params = (1, 10, 100, 1000)
    param_names = ("topics",)

    def setup(self, topics):
        self.topics = tuple(f"bench-{number}" for number in range(topics))
        self.open(3, dict.fromkeys(self.topics, 4))

    def track_cpu_us_per_record(self, topics):
        load = Load(self.topics[0], RECORDS, make_block(RECORDS, 100), topics=self.topics)
        return self.cpu_us(load, "produce_arrow")

    track_cpu_us_per_record.unit = "us"
