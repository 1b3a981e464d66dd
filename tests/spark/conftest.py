"""Shared by the tests on Spark: one session in local mode, and mock brokers in a process of their own."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import secrets
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import java_classes
import programs
import pytest
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from fastprod.testing import Audit, KafkaCluster, MockClusterProcess, audit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_numbers = itertools.count()


# Something of all that tests use, and then an end in good order, at which the JVM writes its archive.
FIRST_SPARK = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
rows = spark.range(1000).selectExpr("cast(id AS string) AS value").repartition(4, "value")
rows.mapInArrow(lambda batches: batches, "value string").count()
rows.rdd.map(lambda row: row.value).count()
spark.stop()
"""


def first_spark(options: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "first_spark.py")
        script.write_text(FIRST_SPARK)
        programs.run(script, env={**os.environ, "SPARK_SUBMIT_OPTS": options})


@pytest.fixture(scope="session")
def spark_available(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips where there is no Java; sets what every Spark of these tests needs, also in programs that they start."""
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        if os.environ.get("FASTPROD_REQUIRE_KAFKA", "0") not in ("", "0"):
            pytest.fail("FASTPROD_REQUIRE_KAFKA is set, but there is no java on the PATH", pytrace=False)
        pytest.skip("Spark needs Java 17 or newer, and there is no java on the PATH")
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", java_classes.QUICK_JVM)
    if "SPARK_SUBMIT_OPTS" not in os.environ:
        os.environ["SPARK_SUBMIT_OPTS"] = java_classes.options("spark", first_spark)
    # Executors import fastprod from where the tests do; and find the data source as in an installed wheel.
    modules = tmp_path_factory.mktemp("modules")
    import fastprod.spark

    (modules / "pyspark_fastprod").symlink_to(Path(fastprod.spark.__file__).with_name("_discovery"))
    here = Path(__file__).parent  # classes of tests that travel to executors
    paths = [
        str(modules),
        str(here),
        str(here.parent),
        str(Path(fastprod.__file__).parents[1]),
        os.environ.get("PYTHONPATH", ""),
    ]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


class Engine:
    """One Spark for all tests of a process, and a fresh one after a test that has broken it.

    A test whose time is over is interrupted wherever it is. In the middle of a call to Spark's JVM that leaves an
    answer behind in the thread's connection, and every call after it would read the answer to the one before.
    """

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self.folders = folders
        self.session: SparkSession | None = None
        self.suspect = False  # a test was interrupted, perhaps in a call

    def sound(self) -> SparkSession:
        if self.session is not None and (self.suspect or not self._answers()):
            self.end()
        if self.session is None:
            self.session = self._start()
        return self.session

    def _answers(self) -> bool:
        """Whether Spark answers what it is asked, and not an earlier question."""
        assert self.session is not None
        number = secrets.randbits(62)
        try:
            echo = self.session._jvm.java.lang.Long.valueOf(number)  # type: ignore[union-attr]
            return echo == number and not self.session.sparkContext._jsc.sc().isStopped()
        except Exception:
            return False

    def _start(self) -> SparkSession:
        from pyspark.sql import SparkSession

        session = (
            SparkSession.builder.master("local[2,3]")
            .appName("fastprod tests")
            .config("spark.ui.enabled", "false")
            .config("spark.sql.shuffle.partitions", "4")
            .config("spark.driver.memory", "1g")
            # Heartbeats and workers may be late on a busy machine: nobody is dead for that.
            .config("spark.network.timeout", "900s")
            .config("spark.executor.heartbeatInterval", "60s")
            .config("spark.python.authenticate.socketTimeout", "300s")
            .config("spark.eventLog.enabled", "true")
            .config("spark.eventLog.compress", "false")
            .config("spark.eventLog.dir", self.folders.mktemp("events").as_uri())
            .config("spark.sql.warehouse.dir", str(self.folders.mktemp("warehouse")))
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
        return session

    def end(self) -> None:
        """Ends Spark and its JVM without asking it anything, and lets pyspark forget both."""
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        gateway, context = SparkContext._gateway, SparkContext._active_spark_context
        self.session, self.suspect = None, False
        if gateway is not None:
            gateway.proc.kill()  # type: ignore[attr-defined]
            gateway.proc.wait()  # type: ignore[attr-defined]
            gateway.proc.stdin.close()  # type: ignore[attr-defined]
            with contextlib.suppress(Exception):
                gateway.close()
        if context is not None and getattr(context, "_accumulatorServer", None):
            context._accumulatorServer.shutdown()
        SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
        SparkSession._instantiatedSession = SparkSession._activeSession = None


_engine = pytest.StashKey[Engine]()


@pytest.fixture(scope="session")
def spark_engine(
    spark_available: None, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Engine]:
    engine = pytestconfig.stash[_engine] = Engine(tmp_path_factory)
    yield engine
    engine.end()


@pytest.fixture
def spark(spark_engine: Engine) -> SparkSession:
    return spark_engine.sound()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    engine = item.config.stash.get(_engine, None)
    if engine is not None and call.excinfo is not None and interrupts(call.excinfo.value):
        engine.suspect = True
    return report


def interrupts(problem: BaseException) -> bool:
    """Whether it may end a test anywhere, as pytest-timeout and Ctrl-C do: with what is no Exception; nor is a skip."""
    return not isinstance(problem, (Exception, pytest.skip.Exception))


@pytest.fixture(scope="session")
def mock() -> Iterator[MockClusterProcess]:
    with MockClusterProcess(3) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kafka_available(kafka_available: None) -> None:
    java_classes.quick_brokers()


@pytest.fixture(scope="session")
def guarded(kafka_available: None) -> Iterator[KafkaCluster]:
    """Brokers with TLS, a user and rights, which create topics when asked for them."""
    config = {
        "auto.create.topics.enable": True,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:root",
    }
    with KafkaCluster(config=config, users={"ann": "hunter2-secret", "root": 'hunter2-"\\;'}, tls=True) as cluster:
        yield cluster


def ends(cluster: KafkaCluster, topic: str, level: IsolationLevel) -> list[int]:
    """Of the topic's partitions: what readers can see, or with READ_UNCOMMITTED what brokers have."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    places = {TopicPartition(topic, number): OffsetSpec.latest() for number in cluster.watermarks(topic)}
    return [end.result(programs.GUARD_S).offset for end in admin.list_offsets(places, isolation_level=level).values()]


def running_tasks() -> int:
    """Of this process's Spark, if it has one."""
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None or context._jsc is None:
        return 0
    return sum(executor.numRunningTasks() for executor in context._jsc.sc().statusTracker().getExecutorInfos())


def settled(cluster: KafkaCluster, topic: str, rows: int) -> Audit:
    """What readers of committed data find once no transaction is open: Kafka answers a commit a moment before that.

    A task of a job that has failed may still be at work, and commit what it has.
    """
    assert programs.wait_until(lambda: not running_tasks()), "a task is still running"
    visible = partial(ends, cluster, topic, IsolationLevel.READ_COMMITTED)
    written = partial(ends, cluster, topic, IsolationLevel.READ_UNCOMMITTED)
    assert programs.wait_until(lambda: visible() == written()), "a transaction is still open"
    return audit(cluster.bootstrap_servers, topic, rows, order="none")


@pytest.fixture
def own_spark(spark_available: None, tmp_path: Path) -> Callable[..., str]:
    """Runs a script with a Spark of its own, for settings that a session keeps for life; returns what it prints."""

    def run(script: str, *, master: str = "local[2]", conf: dict[str, str] | None = None, code: int = 0) -> str:
        settings = {"spark.ui.enabled": "false", "spark.driver.memory": "512m", **(conf or {})}
        head = f"""
            import os, sys
            from pyspark.sql import SparkSession
            from fastprod.spark import bucketed, partition_writer, register, write
            builder = SparkSession.builder.master({master!r})
            for name, value in {settings!r}.items():
                builder = builder.config(name, value)
            spark = builder.getOrCreate()
            spark.sparkContext.setLogLevel("OFF")
        """
        path = tmp_path / f"script-{next(_numbers)}.py"
        path.write_text(textwrap.dedent(head) + textwrap.dedent(script))
        done = programs.run(path)
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test uses."""
    return f"{re.sub('[^A-Za-z0-9]+', '-', request.node.name)[:200]}-{next(_numbers)}"
