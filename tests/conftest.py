"""Shared by all tests."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # An installed fastprod has told pytest about its plugin; a source tree has not.
    if not config.pluginmanager.has_plugin("fastprod"):
        config.pluginmanager.import_plugin("fastprod.testing.pytest_plugin")
