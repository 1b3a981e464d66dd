from typing import Any

from fastprod._core._columns import Column

class HeaderColumn:
    """Headers of many records, as Arrow keeps them: packed one by one, without a Python object for each."""

    def __init__(self, offsets: Any, names: Column, values: Column) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> list[tuple[str | None, bytes | None]] | None: ...
