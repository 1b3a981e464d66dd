"""Shared by all tests; a copy of it also serves small suites that tests write, so it imports none of its neighbours."""

import contextlib
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

RUN = "FASTPROD_TEST_RUN"  # its value names the run; every process that a test starts inherits it
LONG = "FASTPROD_LONG_TESTS"
# Keepers of brokers look for their parent twice a second, and a busy machine is slow.
LEAVE_S = float(os.environ.get("FASTPROD_TEST_LEAVE_S", 30))

run_mark = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    # An installed fastprod has told pytest about its plugin; a source tree has not.
    if not config.pluginmanager.has_plugin("fastprod"):
        config.pluginmanager.import_plugin("fastprod.testing.pytest_plugin")
    # A shell starts background jobs with Ctrl-C ignored, and the programs that tests interrupt would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", f"long: takes minutes; skipped unless {LONG}=1 is set")
    if not hasattr(config, "workerinput"):  # xdist's workers inherit the mark, and so does a run inside of a test
        config.stash[run_mark] = uuid.uuid4().hex
        os.environ[RUN] = f"{os.environ.get(RUN, '')} {config.stash[run_mark]}".strip()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(LONG, "0") in ("", "0"):
        for item in items:
            if "long" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f"takes minutes; {LONG}=1 runs it"))


def survivors(mark: str) -> dict[int, str]:
    """Processes of this run besides ourselves, each with its command and the test that started it."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            environment = (folder / "environ").read_bytes()  # empty for a zombie
            if mark.encode() in environment and int(folder.name) != os.getpid():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                names = [entry for entry in environment.split(b"\0") if entry.startswith(b"PYTEST_CURRENT_TEST=")]
                test = names[0].partition(b"=")[2].decode(errors="replace") if names else "outside of a test"
                found[int(folder.name)] = f"{command[:200]}  ({test})"
    return found


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Fails a run that leaves processes behind, and ends them."""
    yield  # fixtures and workers have ended
    mark = session.config.stash.get(run_mark, None)
    if mark is None:
        return
    deadline = time.monotonic() + LEAVE_S
    while (left := survivors(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if not left:
        return
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    terminal.section("processes that outlived the tests", red=True)
    for pid, what in left.items():
        terminal.line(f"{pid}: {what}")
    if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def unraisable(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """What sys.unraisablehook was told during the test."""
    told: list[BaseException] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda problem: told.append(problem.exc_value))
    return told
