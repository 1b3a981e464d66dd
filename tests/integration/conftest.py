"""Shared by the tests that need a real Kafka: topics of their own, and clusters other than the usual one."""

import itertools
import re
from collections.abc import Iterator

import java_classes
import pytest

from fastprod.testing import KafkaCluster

_numbers = itertools.count()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test uses."""
    return f"{re.sub('[^A-Za-z0-9]+', '-', request.node.name)[:200]}-{next(_numbers)}"


@pytest.fixture(scope="session")
def kafka_available(kafka_available: None) -> None:
    java_classes.quick_brokers()


@pytest.fixture(scope="module")
def three_brokers(kafka_available: None) -> Iterator[KafkaCluster]:
    with KafkaCluster(3) as cluster:
        yield cluster
