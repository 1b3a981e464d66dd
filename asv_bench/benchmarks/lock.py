"""How long a bulk call keeps the accumulator's lock, for which every other thread waits. A gate; on Linux."""

from fastprod.cli._scale import LARGE, longest_hold_ms

from .common import TOPIC, WithStage


class BulkCall(WithStage):
    """Values of 1 MB, copied."""

    params = (50, 200)
    param_names = ("values",)

    def setup(self, values):
        self.open(1, {TOPIC: 4}, **LARGE)

    def track_longest_hold_ms(self, values):
        return longest_hold_ms(self.stage, values)

    track_longest_hold_ms.unit = "ms"
