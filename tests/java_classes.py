"""Archives of Java classes: JVMs that read theirs from one start in half the time, and tests start dozens of them.

An archive is made once per installation of Python, and is beside it, because it names the paths of Spark's jars. A JVM
that it does not fit does without.
"""

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path

from fastprod import Producer
from fastprod.testing import KafkaCluster

KAFKA = "KAFKA_JVM_PERFORMANCE_OPTS"
QUICK_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xshare:auto"  # no time to optimise what they run


def options(name: str, make: Callable[[str], None]) -> str:
    """Options for the JVMs of a kind.

    The first to ask has `make(options)` run one that ends in good order, and so writes the archive; others wait.
    """
    folder = Path(sys.prefix, "var", "fastprod-tests")
    archive, half = folder / f"{name}.jsa", folder / f"{name}.half.jsa"
    if " " in str(folder):  # which would be taken for the next option
        return QUICK_JVM
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not archive.exists():
                half.unlink(missing_ok=True)  # of a run that was killed
                make(f"{QUICK_JVM} -Xlog:disable -XX:ArchiveClassesAtExit={half}")
                half.rename(archive)
    except OSError:  # nothing may be written here, or this JVM makes no archives
        return QUICK_JVM
    return f"{QUICK_JVM} -Xlog:disable -XX:SharedArchiveFile={archive}"


def first_broker(options: str) -> None:
    os.environ[KAFKA] = options
    try:
        with KafkaCluster() as cluster:
            cluster.create_topic("t", 3)
            with Producer({"bootstrap.servers": cluster.bootstrap_servers}) as producer:
                producer.produce_many("t", [b"value"] * 1000)
            cluster.records("t")
            cluster.stop(1)
    finally:
        del os.environ[KAFKA]


def quick_brokers() -> None:
    """From here on a broker of the tests takes half the CPU."""
    if KAFKA not in os.environ:
        os.environ[KAFKA] = options("kafka", first_broker)
