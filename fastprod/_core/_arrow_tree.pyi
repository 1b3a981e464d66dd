from typing import Any

class Tree:
    """A record batch, array of structs, or schema, as C code sees it. An invalid array is a ValueError."""

    def __init__(self, batch: Any) -> None: ...
    def __len__(self) -> int: ...
    @property
    def batch(self) -> Any: ...
    def rows(self) -> list[Any]:
        """All rows as Python objects: structs as lists of (name, value), times as numbers."""
