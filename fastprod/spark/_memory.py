"""Holds a task back while Arrow batches that are not acknowledged take up its memory.

Values of 512 bytes and more are sent from the batch's own memory, and one record on its way keeps the whole batch.
`buffer.memory` counts the record, not the batch: where a single partition is slow, a few records of each of many
batches would fill the worker before they fill the buffer. So batches with such values are counted here.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
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
LATE_S = 1.0  # after which memory that nobody should need any more is no longer waited for


class _Life:
    """Lives as long as the memory of a batch's values is needed."""

    def __init__(self, buffers: object) -> None:
        self.buffers = buffers


@dataclass
class _Batch:
    receipt: Receipt
    size: int
    life: weakref.ref[_Life] | None  # None where that cannot be seen
    done: float = 0.0  # when all records had their outcome

    def gone(self) -> bool:
        if not self.receipt.wait(0):  # if there is nothing to wait for, this lets memory go
            return False
        self.done = self.done or time.monotonic()
        return self.life is None or self.life() is None or time.monotonic() > self.done + LATE_S


class Held:
    """The batches of a task whose memory is still needed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._memory = int(float(config.get("buffer.memory", DEFAULT_BUFFER_MEMORY)))
        self._earlier: list[_Batch] = []
        self._life: weakref.ref[_Life] | None = None

    @staticmethod
    def counts(batch: pa.RecordBatch) -> bool:
        """Whether records may be sent from the batch's own memory; then it needs a receipt of its own."""
        return bool(batch.nbytes >= BY_REFERENCE * batch.num_rows)

    def watched(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The same batch, whose values tell when nobody needs them any more."""
        import pyarrow as pa

        self._life = None
        place = batch.schema.get_field_index("value")
        kind = batch.schema.field(place).type
        if kind not in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary()):
            return batch
        values = batch.column(place)
        buffers = values.buffers()
        life = _Life(buffers)
        self._life = weakref.ref(life)
        twins = [part and pa.foreign_buffer(part.address, part.size, base=life) for part in buffers]
        twin = pa.Array.from_buffers(kind, len(values), twins, offset=values.offset)
        return batch.set_column(place, batch.schema.field(place), twin)

    def add(self, receipt: Receipt, size: int, check: Callable[[], None]) -> None:
        """Counts the batch that was watched last and handed over, and waits until there is room for the next.

        The batch itself is not waited for: of one that is larger than all the room, the end may be on its way.
        """
        room = max(0, self._memory + min(size, AHEAD) - size)
        while self._earlier and sum(batch.size for batch in self._earlier) > room:
            self._earlier = [batch for batch in self._earlier if not batch.gone()]
            if self._earlier and sum(batch.size for batch in self._earlier) > room:
                if self._earlier[0].done:
                    time.sleep(0.001)
                else:
                    self._earlier[0].receipt.wait(LOOK_S)
                check()
        self._earlier.append(_Batch(receipt, size, self._life))
