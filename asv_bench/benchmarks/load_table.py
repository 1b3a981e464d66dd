"""The load table of the uniform partitioner: building it from queue sizes, and drawing partitions from it.

Both are gates: the table is rebuilt while records wait, a draw happens at every switch of partition.
"""

import random

from fastprod._core._balance import LoadTable

PARTITIONS = (10, 100, 1000, 10_000)
DRAWS = 1000


class Table:
    params = PARTITIONS
    param_names = ("partitions",)

    def setup(self, partitions):
        source = random.Random(partitions)
        self.queues = [source.randrange(1_000_000) for _ in range(partitions)]
        self.table = LoadTable(self.queues)
        self.draws = [source.getrandbits(31) for _ in range(DRAWS)]

    def time_build(self, partitions):
        LoadTable(self.queues)

    def time_lookup_1000(self, partitions):
        lookup = self.table.lookup
        for draw in self.draws:
            lookup(draw)
