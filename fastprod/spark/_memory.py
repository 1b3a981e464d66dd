"""Holds a task back while Arrow batches that are not acknowledged take up its memory.

Values of 512 bytes and more are sent from the batch's own memory, and one record on its way keeps the whole batch.
`buffer.memory` counts the record, not the batch: where a single partition is slow, a few records of each of many
batches would fill the worker before they fill the buffer. So batches with such values are counted here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastprod._config import DEFAULT_BUFFER_MEMORY

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import pyarrow as pa

    from fastprod._core._runtime import Receipt

__all__ = ["Held"]

BY_REFERENCE = 512  # bytes from which on values are not copied
AHEAD = 16 << 20  # bytes beyond buffer.memory, so that a batch of which only the end is on its way holds nobody up
LOOK_S = 0.5  # how often a task that waits looks for failures


class Held:
    """The batches of a task whose memory is still needed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._memory = int(float(config.get("buffer.memory", DEFAULT_BUFFER_MEMORY)))
        self._batches: list[tuple[Receipt, int]] = []  # oldest first, with their bytes

    @staticmethod
    def counts(batch: pa.RecordBatch) -> bool:
        """Whether records may be sent from the batch's own memory; then it needs a receipt of its own."""
        return bool(batch.nbytes >= BY_REFERENCE * batch.num_rows)

    def add(self, receipt: Receipt, batch: pa.RecordBatch, check: Callable[[], None]) -> None:
        """Counts a batch that was handed over, and waits until there is room for the next.

        The batch itself is not waited for: of one that is larger than all the room, the end may be on its way.
        """
        size = batch.nbytes
        room = max(size, self._memory + min(size, AHEAD))
        self._batches.append((receipt, size))
        while len(self._batches) > 1 and sum(held for _, held in self._batches) > room:
            self._batches = [(one, held) for one, held in self._batches[:-1] if not one.wait(0)] + self._batches[-1:]
            if len(self._batches) > 1 and sum(held for _, held in self._batches) > room:
                self._batches[0][0].wait(LOOK_S)
                check()
