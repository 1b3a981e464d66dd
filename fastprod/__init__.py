"""fastprod: data from Python and Spark into Kafka at the speed of C.

`Producer` is a drop-in for `confluent_kafka.Producer` that places records as the Java producer does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastprod.errors import (
        AuthenticationError,
        BufferFullError,
        ConfigError,
        ForkError,
        RebalanceError,
        RecordError,
    )
    from fastprod.producer import Producer
    from fastprod.receipt import Receipt
    from fastprod.serializing import SerializingProducer
    from fastprod.stats import ProducerStats, TopicStats

__version__ = "0.1.0"
__all__ = [
    "AuthenticationError",
    "BufferFullError",
    "ConfigError",
    "ForkError",
    "Producer",
    "ProducerStats",
    "RebalanceError",
    "Receipt",
    "RecordError",
    "SerializingProducer",
    "TopicStats",
    "__version__",
]

_HOMES = {
    "Producer": "fastprod.producer",
    "SerializingProducer": "fastprod.serializing",
    "ProducerStats": "fastprod.stats",
    "TopicStats": "fastprod.stats",
    "Receipt": "fastprod.receipt",
    "BufferFullError": "fastprod.errors",
    "ConfigError": "fastprod.errors",
    "AuthenticationError": "fastprod.errors",
    "ForkError": "fastprod.errors",
    "RebalanceError": "fastprod.errors",
    "RecordError": "fastprod.errors",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: pytest loads this package in every run, for the fixtures in fastprod.testing.
    if name in _HOMES:
        from importlib import import_module

        try:
            value = getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as missing:
            if not (missing.name or "").startswith("fastprod._core."):
                raise
            raise ImportError(
                "fastprod's compiled modules are not built in its source folder, from which Python imports it here: "
                "start Python in another folder, or build them with pip install -e ."
            ) from None
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
