"""The pages' snippets that start a Kafka of their own."""

from pathlib import Path

import pytest
import snippets


@pytest.mark.usefixtures("kafka_available")
@pytest.mark.parametrize("page", snippets.of_kind("python kafka"), ids=lambda page: page.name)
def test_snippets_run(page: Path) -> None:
    snippets.run(page, "python kafka", "localhost:9092")
