"""Programs that tests start: whatever happens, neither they nor anything they have started outlives the test.

A program gets a session of its own and a mark in its environment, which all its descendants inherit. At the end its
group is killed, and then whoever bears the mark: brokers and virtual machines have groups of their own.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Guards against a hang and no measure of speed: a busy machine may need twenty times as long as an idle one.
GUARD_S = 600.0
KEEPERS_S = 10.0  # in which keepers notice that their parent is gone, and remove its data
MARK = "FASTPROD_TEST_PROGRAM"
LONG = os.environ.get("FASTPROD_LONG_TESTS", "0") not in ("", "0")  # more examples, too


def marked(mark: str) -> dict[int, str]:
    """The living processes that bear a mark, with their commands; none where there is no /proc."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile, or somebody else's
            if mark.encode() in (folder / "environ").read_bytes():  # empty for a zombie
                found[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    return found


def wait_until(condition: Callable[[], object], timeout: float = GUARD_S) -> bool:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return bool(condition())
        time.sleep(0.05)
    return True


class Program(subprocess.Popen[str]):
    """A process in a session of its own that `end()` ends with all its descendants."""

    def __init__(self, *command: str | os.PathLike[str], env: Mapping[str, str] | None = None, **options: Any) -> None:
        self.mark = uuid.uuid4().hex
        super().__init__(
            [sys.executable, *command],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options},
            env={**(os.environ if env is None else env), MARK: self.mark},
            start_new_session=True,
        )

    def descendants(self, *words: str) -> dict[int, str]:
        """Those that live, and whose command has all these words; the program is one of them."""
        return {pid: command for pid, command in marked(self.mark).items() if all(word in command for word in words)}

    def finish(self) -> tuple[str, str]:
        """Wait for the end; what it has said."""
        return self.communicate(timeout=GUARD_S)

    def _group(self) -> list[int]:
        """Descendants in the program's own group."""
        found = []
        for pid in self.descendants():
            with suppress(ProcessLookupError):
                if os.getpgid(pid) == self.pid:
                    found.append(pid)
        return found

    def end(self) -> None:
        if self.poll() is None or self._group():  # else the number may be somebody else's by now
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        wait_until(lambda: not self.descendants(), KEEPERS_S)
        for pid in self.descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not self.descendants(), KEEPERS_S)
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


@contextmanager
def started(*command: str | os.PathLike[str], **options: Any) -> Iterator[Program]:
    """Python with these arguments, until the with block ends."""
    program = Program(*command, **options)
    try:
        yield program
    finally:
        program.end()


def run(*command: str | os.PathLike[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, from beginning to end."""
    with started(*command, **options) as program:
        output, errors = program.finish()
    return subprocess.CompletedProcess(program.args, program.returncode, output, errors)
