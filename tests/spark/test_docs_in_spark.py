"""The pages' snippets for Spark, as in a notebook: `spark` is there, and each page goes on where it was."""

from pathlib import Path

import pytest
import snippets


@pytest.mark.parametrize("page", snippets.of_kind("python spark"), ids=lambda page: page.name)
def test_snippets_run(page: Path, spark, mock) -> None:
    snippets.run(page, "python spark", mock.bootstrap_servers, spark=spark)
