"""What tests/conftest.py promises of a run: no process is left, long tests are asked for, and both are told."""

import os
import shutil
import sys
import textwrap
from pathlib import Path

import programs
import pytest

TREE = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TREE), *filter(None, sys.path)])}


def run(folder: Path, test: str, **environment: str) -> tuple[int, str]:
    shutil.copy(TREE / "tests" / "conftest.py", folder)
    (folder / "test_it.py").write_text(textwrap.dedent(test))
    command = ["-m", "pytest", "-q", "-ra", "--strict-markers", "-p", "no:cacheprovider", "--rootdir", folder, folder]
    done = programs.run(*command, cwd=folder, env={**ENVIRONMENT, **environment})
    return done.returncode, done.stdout


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("ends", [True, False])
def test_a_run_that_leaves_a_process_behind_fails_and_ends_it(tmp_path: Path, ends: bool) -> None:
    status, said = run(
        tmp_path,
        f"""
        import subprocess

        def test_it():
            child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
            open("pid", "w").write(str(child.pid))
            if {ends}:
                child.kill()
                child.wait()
        """,
        FASTPROD_TEST_LEAVE_S="0.5",
    )
    assert "1 passed" in said
    pid = (tmp_path / "pid").read_text()
    if ends:
        assert (status, "outlived" in said) == (pytest.ExitCode.OK, False), said
    else:
        assert status == pytest.ExitCode.TESTS_FAILED
        assert f"{pid}: sleep 3600   (test_it.py::test_it (call))" in said
    assert programs.wait_until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not _command(pid))


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()  # empty for a zombie
    except OSError:
        return ""


@pytest.mark.parametrize(("asked", "words"), [("", "1 skipped"), ("0", "1 skipped"), ("1", "1 passed")])
def test_long_tests_run_when_asked_for(tmp_path: Path, asked: str, words: str) -> None:
    status, said = run(tmp_path, "import pytest\n@pytest.mark.long\ndef test_it(): pass", FASTPROD_LONG_TESTS=asked)
    assert status == pytest.ExitCode.OK
    assert words in said
    assert ("FASTPROD_LONG_TESTS=1 runs it" in said) == (words == "1 skipped")
