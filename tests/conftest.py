"""Shared by all tests."""

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # An installed fastprod has told pytest about its plugin; a source tree has not.
    if not config.pluginmanager.has_plugin("fastprod"):
        config.pluginmanager.import_plugin("fastprod.testing.pytest_plugin")
    # A shell starts background jobs with Ctrl-C ignored, and the programs that tests interrupt would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
