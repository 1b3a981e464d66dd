"""What the driver asks the brokers before a job starts, and what it says when they say no."""

import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

import fastprod.spark
from fastprod.spark import CheckError, _briefly, _check, partition_writer, write

SECRET = "hunter2-secret"  # the password of the cluster `guarded`


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(_check, "SLICES_S", (0.2, 0.3))
    monkeypatch.setattr(_check, "CREATE_S", 0.5)


@pytest.fixture
def closed_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        yield f"127.0.0.1:{held.getsockname()[1]}"


def allow(cluster, topic, operation) -> None:
    pattern = ResourcePatternType.LITERAL
    rule = AclBinding(
        ResourceType.TOPIC, topic, pattern, "User:ann", "*", AclOperation[operation], AclPermissionType.ALLOW
    )
    admin = AdminClient(cluster.client_config())  # must outlive its answers
    for done in admin.create_acls([rule]).values():
        done.result(30)


def refusal(config, topic) -> str:
    with pytest.raises(CheckError) as refused:
        _check.check(config, topic)
    said = str(refused.value)
    assert SECRET not in said
    assert "\n" not in said
    assert said.endswith("Nothing was sent")
    return said


def test_nobody_listens(spark, closed_port, impatient) -> None:
    rows = spark.range(10).selectExpr("'v' AS value")
    with pytest.raises(CheckError, match=f"no broker at {closed_port} .*Connection refused.*check=False"):
        write(rows, "t", {"bootstrap.servers": closed_port})
    with pytest.raises(CheckError, match="Connection refused"):
        partition_writer({"bootstrap.servers": closed_port}, "t")


def test_nobody_answers(impatient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = refusal({"bootstrap.servers": f"127.0.0.1:{silent.getsockname()[1]}"}, "t")
    assert "they do not answer" in said


def test_a_name_that_is_no_host(impatient) -> None:
    assert "Failed to resolve" in refusal({"bootstrap.servers": "no-such-host.invalid:9092"}, None)


def test_without_the_check_only_the_options_are_looked_at(closed_port) -> None:
    partition_writer({"bootstrap.servers": closed_port}, "t", check=False)
    with pytest.raises(ValueError, match=r"no\.such\.option"):
        partition_writer({"bootstrap.servers": closed_port, "no.such.option": "1"}, "t", check=False)


def test_files_of_the_executors_leave_it_to_them(closed_port) -> None:
    partition_writer({"bootstrap.servers": closed_port, "ssl.ca.location": "only-there.pem"}, "t")


def test_the_data_source_says_it_in_its_first_line(spark, closed_port) -> None:
    fastprod.spark.register(spark)
    writer = spark.range(1).selectExpr("'v' AS value").write.format("fastprod").mode("append")
    with pytest.raises(Exception, match='option "check" is "true" or "false"'):
        writer.options(**{"kafka.bootstrap.servers": closed_port, "topic": "t", "check": "maybe"}).save()
    with pytest.raises(Exception, match="no broker at") as refused:
        writer.options(**{"kafka.bootstrap.servers": closed_port, "topic": "t", "check": "true"}).save()
    first, *others = str(refused.value).splitlines()
    assert f"no broker at {closed_port}" in first
    assert '.option("check", "false")' in first
    assert len(others) <= 1


@pytest.mark.usefixtures("spark")
def test_export_says_it_in_one_line(tmp_path, closed_port) -> None:
    (tmp_path / "rows.csv").write_text("value\n1\n")
    arguments = ["export", str(tmp_path / "rows.csv"), "-t", "t", "-b", closed_port, "--master", "local[1]"]
    done = subprocess.run(
        [sys.executable, "-m", "fastprod", *arguments], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: no broker at {closed_port}")
    assert "--no-check" in done.stderr
    assert done.stderr.count("\n") == 1


def test_mock_brokers_pass(mock, topic) -> None:
    mock.create_topic(topic)
    config = {"bootstrap.servers": mock.bootstrap_servers}
    for where in (topic, None):
        _check.check(config, where)
        _check.check({**config, "transactional.id": "t"}, where)


def test_nobody_waits_for_the_rights_that_mock_brokers_do_not_tell(mock, topic) -> None:
    mock.create_topic(topic)
    start = time.monotonic()
    _check.check({"bootstrap.servers": mock.bootstrap_servers}, topic)
    assert time.monotonic() - start < _check.RIGHTS_S / 2


@pytest.mark.parametrize("code", [KafkaError.LEADER_NOT_AVAILABLE, KafkaError.KAFKA_STORAGE_ERROR])
def test_an_answer_that_is_not_known_passes(mock, topic, monkeypatch, code) -> None:
    answer = SimpleNamespace(topics={topic: SimpleNamespace(error=KafkaError(code))}, controller_id=1)
    monkeypatch.setattr(_check, "_metadata", lambda *ignored: answer)
    _check.check({"bootstrap.servers": mock.bootstrap_servers}, topic)


def test_callbacks_of_the_user_are_not_called(closed_port, impatient) -> None:
    called: list[object] = []
    refusal({"bootstrap.servers": closed_port, "error_cb": called.append}, "t")
    assert called == []
    with pytest.raises((TypeError, ValueError), match="error_cb"):
        _check.check({"bootstrap.servers": closed_port, "error_cb": 17}, "t")


def test_a_missing_topic_and_one_whose_name_is_near(spark, kafka_cluster, topic, impatient) -> None:
    config = kafka_cluster.client_config()
    kafka_cluster.create_topic(topic)
    said = refusal(config, topic.upper())
    assert f"there is no topic {topic.upper()!r}" in said
    assert f"Did you mean {topic!r}" in said
    assert "check=False" in said
    assert "Did you mean" not in refusal(config, "q")
    assert "is no name for a topic" in refusal(config, "not a name")
    report = write(spark.range(10).selectExpr("'v' AS value"), topic, config)
    assert report.records == 10


def test_a_topic_that_brokers_create_when_asked(spark, guarded, topic) -> None:
    assert write(spark.range(10).selectExpr("'v' AS value"), topic, guarded.client_config()).records == 10


def test_the_right_to_write(spark, guarded, topic) -> None:
    guarded.create_topic(topic)
    config = guarded.client_config("ann", tls=True)
    assert f"may not write to topic {topic!r}" in refusal(config, topic)
    allow(guarded, topic, "DESCRIBE")
    until(lambda: "the brokers allow Describe)" in refusal(config, topic))
    allow(guarded, topic, "WRITE")
    until(lambda: passes(config, topic))
    assert write(spark.range(10).selectExpr("'v' AS value"), topic, config).records == 10


def test_the_right_to_write_to_every_level(guarded, topic) -> None:
    for level in range(2):
        guarded.create_topic(f"{topic}-{level}")
        allow(guarded, f"{topic}-{level}", "DESCRIBE")
    allow(guarded, f"{topic}-0", "WRITE")
    config = guarded.client_config("ann", tls=True)
    until(lambda: passes(config, f"{topic}-0"))
    with pytest.raises(CheckError, match=f"may not write to topic '{topic}-1'"):
        _check.check(config, topic, 2)
    allow(guarded, f"{topic}-1", "WRITE")
    until(lambda: passes(config, f"{topic}-1"))
    _check.check(config, topic, 2)


def passes(config, topic) -> bool:
    try:
        _check.check(config, topic)
    except CheckError:
        return False
    return True


def until(condition) -> None:
    """Brokers learn of a new right a moment later."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_wrong_credentials_and_tls_that_does_not_fit(guarded, topic) -> None:
    config = guarded.client_config("ann", tls=True)
    said = refusal({**config, "sasl.password": f"{SECRET}-no-more"}, topic)
    assert "refuse this client" in said
    assert "Check sasl.mechanism, sasl.username and sasl.password" in said
    said = refusal({name: value for name, value in config.items() if name != "ssl.ca.location"}, topic)
    assert "no TLS with the brokers" in said
    assert "certificate verify failed" in said


@pytest.mark.parametrize(
    ("planning", "files", "first"),
    [(True, [], True), (True, ["commits/0"], False), (True, ["offsets/0"], True), (False, [], False)],
)
def test_a_stream_is_checked_before_its_first_batch(tmp_path, monkeypatch, planning, files, first) -> None:
    if planning:
        monkeypatch.setitem(_briefly.sys.modules, _briefly.PLANNING, _briefly)
    for name in files:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert _briefly.is_first_batch(str(tmp_path)) is first
    assert _briefly.is_first_batch(f"file:{tmp_path}") is first
    assert not _briefly.is_first_batch("s3://bucket/checkpoint")
    assert not _briefly.is_first_batch(None)
