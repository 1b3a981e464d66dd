from typing import Any

from fastprod._core._columns import Column

class Encoded:
    """The bytes of all rows of a batch, made by an encoder."""

    @property
    def rows(self) -> int: ...
    @property
    def bad(self) -> dict[int, Exception]:
        """What is wrong, by row, with those that could not be encoded."""

    def __len__(self) -> int: ...
    def to_arrow(self, base: int = 0) -> Any:
        """A pyarrow.LargeBinaryArray over this memory; raises what is wrong with the first bad row."""
    def column(self, name: str, base: int) -> Column:
        """All rows as a column of a bulk call, in which bad ones fail alone; `base` is the number of row 0 in it."""
