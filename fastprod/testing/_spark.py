"""The environment for a Spark on this machine, which its JVM and Python workers inherit."""

from __future__ import annotations

import os
import sys

__all__ = ["spark_environment"]


def spark_environment(*, local: bool = True) -> None:
    """Lets the Python workers of a Spark that is started next be as this process: its interpreter, its packages.

    Without it, a script that runs in a source folder of fastprod has workers that import what lies there, built or not.
    What is set in the environment already stays. `local` also keeps Spark to the loopback.
    """
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Workers are started with -m, which lets modules of the current folder come before installed ones.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    if local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
