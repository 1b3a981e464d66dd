from typing import Any

def is_frozen(buffer: Any) -> bool:
    """Whether nobody can change the memory of a pyarrow.Buffer but by breaking Arrow's own rules."""
