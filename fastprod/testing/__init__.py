"""Kafka for tests and benchmarks: librdkafka's mock brokers, and real ones of Apache Kafka.

Nothing is imported before it is asked for, because pytest loads the plugin of this package in every run.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastprod.testing._audit import Audit, audit
    from fastprod.testing._spark import spark_environment
    from fastprod.testing.kafka import KafkaCluster, KafkaUnavailable
    from fastprod.testing.mock import MockCluster, MockClusterProcess, Request

_MODULES = {  # where each name lives
    "Audit": "_audit",
    "KafkaCluster": "kafka",
    "KafkaUnavailable": "kafka",
    "MockCluster": "mock",
    "MockClusterProcess": "mock",
    "Request": "mock",
    "audit": "_audit",
    "spark_environment": "_spark",
}
__all__ = [
    "Audit",
    "KafkaCluster",
    "KafkaUnavailable",
    "MockCluster",
    "MockClusterProcess",
    "Request",
    "audit",
    "spark_environment",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
