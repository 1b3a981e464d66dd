"""Runs one program and sees to it that it does not outlive the process that asked for it.

    python _keeper.py PARENT FOLDER PROGRAM ARGUMENT...

Says the program's process id on stdout and ends with the program. When the process PARENT is gone, however it
ended, the program is killed, also when it is stopped, and FOLDER removed. This file imports nothing but the
standard library, because one of it runs beside every broker.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> int:
    parent, folder, *command = sys.argv[1:]
    # What the program says goes where the keeper's own troubles go: into the log.
    program = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, preexec_fn=_die_with_keeper)
    print(program.pid, flush=True)
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return abs(program.wait(0.5))
        if os.getppid() != int(parent):
            program.kill()
            program.wait()
            shutil.rmtree(folder, ignore_errors=True)
            return 0


def _die_with_keeper() -> None:
    """Where the kernel can, even a killed keeper takes its program along."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
