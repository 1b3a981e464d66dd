"""pytest's door to the clusters: a fresh mock cluster per test, and one real Kafka broker per run.

The clusters' modules are imported by the first test that asks for one; a run that never does pays nothing,
and a broken installation fails those tests only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fastprod.testing.kafka import KafkaCluster
    from fastprod.testing.mock import MockCluster


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "mock_cluster(brokers=3, *, topics=None, rtt_ms=None): "
        "how the mock_cluster fixture builds its cluster; takes what fastprod.testing.MockCluster takes",
    )


@pytest.fixture
def mock_cluster(request: pytest.FixtureRequest) -> Iterator[MockCluster]:
    """A fresh fastprod.testing.MockCluster of 3 brokers; @pytest.mark.mock_cluster(brokers=1) changes it."""
    from fastprod.testing.mock import MockCluster

    marker = request.node.get_closest_marker("mock_cluster")
    with MockCluster(*marker.args, **marker.kwargs) if marker else MockCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kafka_available() -> None:
    """Skips the test where Java or Kafka is missing, or fails it if FASTPROD_REQUIRE_KAFKA is set.

    For fixtures that start a KafkaCluster of their own.
    """
    from fastprod.testing.kafka import KafkaUnavailable, find_kafka

    try:
        find_kafka()
    except KafkaUnavailable as missing:
        if os.environ.get("FASTPROD_REQUIRE_KAFKA", "0") not in ("", "0"):
            pytest.fail(f"FASTPROD_REQUIRE_KAFKA is set, but {missing}", pytrace=False)
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def kafka_cluster(kafka_available: None) -> Iterator[KafkaCluster]:
    """A fastprod.testing.KafkaCluster of 1 broker, the same for the whole run: tests use topics of their own."""
    from fastprod.testing.kafka import KafkaCluster

    with KafkaCluster() as cluster:
        yield cluster
