from collections.abc import Callable
from typing import TypeVar

C = TypeVar("C")

def plugin_path() -> str: ...
def announce(make: Callable[[], C], descriptor: int) -> C: ...
