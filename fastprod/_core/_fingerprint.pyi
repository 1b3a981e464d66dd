from collections.abc import Sequence
from typing import Any

from fastprod._core._columns import Column
from fastprod._core._headers import HeaderColumn

class Fingerprint:
    """Of the records given to `add`, in whatever order and however divided into calls."""

    @property
    def rows(self) -> int: ...
    def add(
        self,
        values: Column,
        keys: Column,
        topics: Column | None,
        partitions: Any,
        timestamps: Any,
        headers: Sequence[Any] | HeaderColumn | None,
    ) -> None:
        """Adds a block of records, in the form that `fastprod._bulk` makes of bulk calls' arguments."""
