"""pytest's door to the mock cluster: a fixture of a fresh cluster per test, and a marker to shape it.

The cluster's modules are imported by the first test that asks for one; a run that never does pays nothing,
and a broken installation fails those tests only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
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
