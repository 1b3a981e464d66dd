from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import Message

C = TypeVar("C")

def plugin_path() -> str: ...
def announce(make: Callable[[], C], descriptor: int) -> C: ...
def any_error(messages: list[Message]) -> bool: ...
