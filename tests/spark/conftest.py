"""Shared by the tests on Spark: one session in local mode, and mock brokers in a process of their own."""

import itertools
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastprod.testing import MockClusterProcess

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


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test uses."""
    return f"{re.sub('[^A-Za-z0-9]+', '-', request.node.name)[:200]}-{next(_numbers)}"
