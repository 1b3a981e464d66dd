"""Shared by the tests on Spark: one session in local mode, and mock brokers in a process of their own."""

import itertools
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from fastprod.testing import Audit, KafkaCluster, MockClusterProcess, audit

_numbers = itertools.count()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SparkSession"]:  # noqa: F821
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        if os.environ.get("FASTPROD_REQUIRE_KAFKA", "0") not in ("", "0"):
            pytest.fail("FASTPROD_REQUIRE_KAFKA is set, but there is no java on the PATH", pytrace=False)
        pytest.skip("Spark needs Java 17 or newer, and there is no java on the PATH")
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    # Executors import fastprod from where the tests do; and find the data source as in an installed wheel.
    modules = tmp_path_factory.mktemp("modules")
    import fastprod.spark

    (modules / "pyspark_fastprod").symlink_to(Path(fastprod.spark.__file__).with_name("_discovery"))
    here = str(Path(__file__).parent)  # classes of tests that travel to executors
    paths = [str(modules), here, str(Path(fastprod.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    session = (
        SparkSession.builder.master("local[2,3]")
        .appName("fastprod tests")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.driver.memory", "1g")
        .config("spark.eventLog.enabled", "true")
        .config("spark.eventLog.compress", "false")
        .config("spark.eventLog.dir", tmp_path_factory.mktemp("events").as_uri())
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def mock() -> Iterator[MockClusterProcess]:
    with MockClusterProcess(3) as cluster:
        yield cluster


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


def settled(cluster: KafkaCluster, topic: str, rows: int) -> Audit:
    """What readers of committed data find once no transaction is open: Kafka answers a commit a moment before that."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
    places = {TopicPartition(topic, number): OffsetSpec.latest() for number in cluster.watermarks(topic)}

    def ends(level: IsolationLevel) -> list[int]:
        return [end.result(30).offset for end in admin.list_offsets(places, isolation_level=level).values()]

    deadline = time.monotonic() + 60
    while ends(IsolationLevel.READ_COMMITTED) != ends(IsolationLevel.READ_UNCOMMITTED):
        assert time.monotonic() < deadline, "a transaction is still open"
        time.sleep(0.02)
    return audit(cluster.bootstrap_servers, topic, rows, order="none")


def wait_until(happened: Callable[[], object], seconds: float = 120.0) -> None:
    """A guard against waiting for ever, not an assertion on time."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.02)


@pytest.fixture
def own_spark(spark, tmp_path) -> Callable[..., str]:
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
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=280)
        assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test uses."""
    return f"{re.sub('[^A-Za-z0-9]+', '-', request.node.name)[:200]}-{next(_numbers)}"
