"""The pages' snippets that need a real Kafka, or start one of their own."""

from pathlib import Path

import pytest
import snippets

from fastprod.testing import KafkaCluster


@pytest.mark.parametrize("page", snippets.of_kind("python kafka"), ids=lambda page: page.name)
def test_snippets_run(page: Path, kafka_cluster: KafkaCluster) -> None:
    snippets.run(page, "python kafka", kafka_cluster.bootstrap_servers)
