from typing import Any

from fastprod._core._columns import Column
from fastprod.encoding._avro_schema import Step

class Plan:
    """How rows of one Arrow schema become Avro: a `Step` and all below it, in C. Threads may share it."""

    def __init__(self, step: Step, prefix: bytes, truncate: bool) -> None:
        """`prefix` begins every record; with `truncate` times are rounded down to Avro's unit."""

    def array(self, batch: Any, base: int = 0) -> Any:
        """A pyarrow.LargeBinaryArray; raises what is wrong with the first bad row, which has its number from `base`."""

    def column(self, batch: Any, name: str, base: int) -> Column:
        """A Column, in which bad rows fail alone; `base` is the number of row 0 in the call."""
