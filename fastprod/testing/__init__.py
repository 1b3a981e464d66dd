"""Kafka for tests and benchmarks: librdkafka's mock brokers, in this process or in one of their own.

Nothing is imported before it is asked for, because pytest loads the plugin of this package in every run.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastprod.testing.mock import MockCluster, MockClusterProcess, Request

__all__ = ["MockCluster", "MockClusterProcess", "Request"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from fastprod.testing import mock

    return getattr(mock, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
