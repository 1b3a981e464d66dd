"""Where Java and the jars of Kafka and of Spark's sink are: on the machine already, or brought by Maven once.

Jars that Maven resolves land in a folder of the user's cache, named after the pom's artifact and version. The
folder appears whole or not at all, so that processes may resolve at the same time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

__all__ = ["KafkaUnavailable", "java_program", "kafka_jars", "spark_sink_jars"]

log = logging.getLogger("fastprod.testing")


class Artifacts(NamedTuple):
    """How messages call what is missing."""

    name: str
    megabytes: int
    instead: str = ""
    """What a user may do who has no Maven, if there is anything."""


KAFKA = Artifacts("Apache Kafka", 55, "set KAFKA_HOME to the folder of an unpacked Apache Kafka 4")
SPARK_SINK = Artifacts("Kafka sink for Spark", 10)


class KafkaUnavailable(RuntimeError):
    """This machine has no Java, no Kafka or no way to get it; the text says what to install."""


def java_program(name: str = "java") -> str:
    """The path of a program of the JDK: from JAVA_HOME, else from PATH."""
    home = os.environ.get("JAVA_HOME")
    if home:
        path = Path(home, "bin", name).absolute()  # programs run in other folders than ours
        if path.is_file():
            return str(path)
        raise KafkaUnavailable(f"JAVA_HOME is {home!r}, but there is no {path}; correct or unset it")
    found = shutil.which(name)
    if found is None:
        raise KafkaUnavailable(
            f"Apache Kafka needs Java, and there is no {name!r} on the PATH; install a JDK of version 17 or newer "
            "(Debian: openjdk-17-jdk-headless), or set JAVA_HOME"
        )
    return found


def kafka_jars() -> Path:
    """The folder with the jars of Apache Kafka: of KAFKA_HOME, else from the cache, else through Maven."""
    home = os.environ.get("KAFKA_HOME")
    if not home:
        return maven_jars("kafka-pom.xml", KAFKA)
    for folder in (Path(home, "libs").absolute(), Path(home).absolute()):
        if any(folder.glob("kafka-clients-*.jar")):
            return folder
    raise KafkaUnavailable(
        f"KAFKA_HOME is {home!r}, but there is no libs/kafka-clients-*.jar below it; "
        "let it name an unpacked Apache Kafka of version 4, or unset it"
    )


def spark_sink_jars() -> Path:
    """The folder with the jars of Spark's own Kafka sink: from the cache, else through Maven."""
    return maven_jars("spark-sink-pom.xml", SPARK_SINK)


def maven_jars(pom: str, what: Artifacts) -> Path:
    """The folder with everything that a pom of this package depends on."""
    with as_file(files(__package__) / pom) as path:
        name, version = _identity(path)
        folder = _cache_folder() / f"{name}-{version}"
        if not folder.is_dir():
            _resolve(path, folder, what)
    return folder


def _identity(pom: Path) -> tuple[str, str]:
    root = ElementTree.parse(pom).getroot()
    found = [root.findtext(f"{{*}}{tag}") for tag in ("artifactId", "version")]
    assert all(found), f"{pom} lacks artifactId or version"
    return str(found[0]), str(found[1])


def _cache_folder() -> Path:
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute()
    return base / "fastprod"


def _resolve(pom: Path, folder: Path, what: Artifacts) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        either = f"either {what.instead}, or " if what.instead else ""
        raise KafkaUnavailable(
            f"there is no {what.name} here yet: {either}install Maven (Debian: maven), with which fastprod fetches it "
            f"once, {what.megabytes} MB"
        )
    java_program()  # Maven would say less clearly that it is missing
    log.warning("resolving %s through Maven into %s, once", folder.name, folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KafkaUnavailable(
            f"{what.name} cannot be kept in {folder.parent} ({error.strerror}); set XDG_CACHE_HOME to a folder that "
            "can be written" + (f", or {what.instead}" if what.instead else "")
        ) from error
    with _alone_in(folder.parent):
        if not folder.is_dir():  # else another process has done it meanwhile
            _fetch(maven, pom, folder, what)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Keeps other processes out: two Mavens at once can spoil the repository that they share."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _fetch(maven: str, pom: Path, folder: Path, what: Artifacts) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as work:
        jars = Path(work, "jars")
        command = [maven, "-B", "-q", "-f", str(pom), "dependency:copy-dependencies", f"-DoutputDirectory={jars}"]
        # Somewhere else than in the current folder, whose .mvn would have a say.
        done = subprocess.run(command, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode or not any(jars.glob("*.jar")):
            said = (done.stdout + done.stderr).strip()[-2000:]
            otherwise = f", or {what.instead}" if what.instead else ""
            raise KafkaUnavailable(f"Maven could not fetch {folder.name}; try again{otherwise}. It said:\n{said}")
        jars.rename(folder)
