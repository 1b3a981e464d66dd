from typing import Any

from fastprod._core._encoded import Encoded

def encode(
    batch: Any, nulls: bool = False, fraction: int = 3, zone: tuple[int, Any, Any, int] = (0, None, None, 0)
) -> Encoded:
    """The rows of a record batch as JSON objects; `zone` is (first offset, starts, offsets, cycle_from), in seconds.

    `starts` and `offsets` are contiguous arrays of int64, or None for a zone with one offset.
    """
