"""strict.order: what a partition holds is a prefix of what was produced to it; after a failure nothing follows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, KafkaException
from programs import wait_until

from fastprod import BufferFullError, Producer
from fastprod.testing import MockCluster

PARTITIONS = 3


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    with MockCluster(2, topics={"t": PARTITIONS}) as running:
        yield running


def conf(cluster: MockCluster, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": cluster.bootstrap_servers,
        "log_level": 0,
        "strict.order": True,
        "message.timeout.ms": 1500,
        "reconnect.backoff.max.ms": 100,
        "retry.backoff.ms": 10,
        "error_cb": lambda error: None,
    } | {name.replace("_", "."): value for name, value in more.items()}


class Outcomes:
    def __init__(self) -> None:
        self.codes: dict[bytes, int | None] = {}
        self.texts: set[str] = set()

    def __call__(self, error: KafkaError | None, message: Any) -> None:
        assert message.value() not in self.codes, "told twice"
        self.codes[message.value()] = None if error is None else error.code()
        if error is not None:
            self.texts.add(error.str())


def stored(cluster: MockCluster, partition: int) -> list[bytes]:
    return [record.value() or b"" for record in cluster.records("t") if record.partition() == partition]


def test_after_a_timeout_nothing_follows_and_nothing_is_there_twice(cluster: MockCluster) -> None:
    outcomes = Outcomes()
    with Producer(conf(cluster)) as producer:
        for n in range(10):
            producer.produce("t", b"a%d" % n, partition=0, on_delivery=outcomes)
        producer.flush(120)
        cluster.down()
        for n in range(10, 20):
            producer.produce("t", b"a%d" % n, partition=0, on_delivery=outcomes)
        assert producer.flush(120) == 0
        assert {outcomes.codes[b"a%d" % n] for n in range(10, 20)} == {KafkaError._MSG_TIMED_OUT}
        cluster.up()
        for n in range(20, 30):
            producer.produce("t", b"a%d" % n, partition=0, on_delivery=outcomes)
            producer.produce("t", b"b%d" % n, partition=1, on_delivery=outcomes)
        assert producer.flush(120) == 0
        assert {outcomes.codes[b"a%d" % n] for n in range(20, 30)} == {KafkaError._GAPLESS_GUARANTEE}
        assert {outcomes.codes[b"b%d" % n] for n in range(20, 30)} == {None}
        assert any("make a new producer" in text for text in outcomes.texts)
    found = stored(cluster, 0)
    assert found == [b"a%d" % n for n in range(len(found))], "a prefix"
    assert 10 <= len(found) <= 20


def test_what_waits_behind_it_fails_with_it(cluster: MockCluster) -> None:
    """Young records need not wait for a timeout of their own."""
    outcomes = Outcomes()
    with Producer(conf(cluster, message_timeout_ms=3000, linger_ms=0)) as producer:
        producer.produce("t", b"warm", partition=0, on_delivery=outcomes)
        producer.flush(120)
        cluster.down()
        producer.produce("t", b"old", partition=0, on_delivery=outcomes)
        time.sleep(1.5)
        producer.produce("t", b"young", partition=0, on_delivery=outcomes)
        assert producer.flush(120) == 0
    assert outcomes.codes == {b"warm": None, b"old": KafkaError._MSG_TIMED_OUT, b"young": KafkaError._GAPLESS_GUARANTEE}


def test_what_a_bulk_call_rejects_ends_its_topic(cluster: MockCluster) -> None:
    with Producer(conf(cluster, message_timeout_ms=60_000)) as producer:
        receipt = producer.produce_many("t", [b"1", b"x" * 1_100_000, b"3"], partitions=np.zeros(3, np.int32))
        assert receipt.wait(120)
        assert {one.index: getattr(one.error, "code", lambda: 0)() for one in receipt.errors}.keys() >= {1, 2}
    assert stored(cluster, 0) in ([], [b"1"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_partitioner_that_raises_ends_its_topic(cluster: MockCluster) -> None:
    class Second:
        def partition(self, topic: str, key: object, value: bytes, *_: object) -> int:
            if value == b"2":
                raise LookupError("no place")
            return 0

    outcomes = Outcomes()
    cluster.set_rtt(500)  # metadata waits for us
    with Producer(conf(cluster, message_timeout_ms=60_000, partitioner=Second())) as producer:
        for value in (b"1", b"2", b"3"):
            producer.produce("t", value, on_delivery=outcomes)
        cluster.set_rtt(0)
        producer.flush(120)
    assert outcomes.codes[b"2"] == KafkaError._APPLICATION
    assert outcomes.codes[b"3"] == KafkaError._GAPLESS_GUARANTEE
    assert stored(cluster, 0) in ([], [b"1"])


def test_records_that_timed_out_without_a_partition_end_their_topic(cluster: MockCluster) -> None:
    outcomes = Outcomes()
    cluster.down()
    with Producer(conf(cluster)) as producer:
        producer.produce("t", b"old", on_delivery=outcomes)
        assert producer.flush(120) == 0
        cluster.up()
        assert wait_until(lambda: producer.list_topics("t", timeout=1))
        producer.produce("t", b"later", partition=1, on_delivery=outcomes)
        assert producer.flush(120) == 0
    assert outcomes.codes == {b"old": KafkaError._MSG_TIMED_OUT, b"later": KafkaError._GAPLESS_GUARANTEE}


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"transactional_id": "x", "message_timeout_ms": 1000}, "all or nothing"),
        ({"enable_idempotence": False}, "needs enable.idempotence"),
        ({"acks": 1}, "needs enable.idempotence"),
        ({"strict_order": "perhaps"}, "true or false"),
    ],
)
def test_where_it_does_not_fit_it_is_refused(cluster: MockCluster, more: dict[str, Any], why: str) -> None:
    with pytest.raises(KafkaException, match=why):
        Producer(conf(cluster, **more))


@pytest.mark.parametrize("headers", [None, [{"a": "b"}] * 3000], ids=["plain", "headers"])
@pytest.mark.parametrize("column", [False, True])
def test_a_bulk_call_that_finds_no_room_ends_its_topics(cluster: MockCluster, headers: Any, column: bool) -> None:
    """Nothing is raised, so later records must not close the gap."""
    cluster.create_topic("u", 1)
    values = [b"%04d" % n for n in range(3000)]
    topics = (["t"] * 10 + ["u"] * 10) * 150
    producer = Producer(conf(cluster, buffer_memory=100_000, max_block_ms=0, linger_ms=200, message_timeout_ms=60_000))
    if column:
        table = pa.table({"topic": topics, "value": values})
        if headers:
            names = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
            table = table.append_column("headers", pa.array([[{"key": "a", "value": b"b"}]] * 3000, names))
        rejected = producer.produce_arrow(table)
    else:
        rejected = producer.produce_many("t", values, headers=headers)
    assert isinstance(rejected.errors[0].error, BufferFullError)
    producer.flush(120)
    for topic in ("t", "u") if column else ("t",):
        later = producer.produce_many(topic, [b"later"] * 5)
        later.wait(120)
        assert (later.acknowledged, later.failed) == (0, 5)
        assert later.errors[0].error.code() == KafkaError._GAPLESS_GUARANTEE
    producer.close()
    for topic in ("t", "u"):
        assert b"later" not in [record.value() for record in cluster.records(topic)]


@pytest.mark.parametrize("problem", ["partitioner", "size", "room"])
def test_a_message_that_produce_batch_refuses_ends_the_topic(cluster: MockCluster, problem: str) -> None:
    class Picky:
        def partition(self, topic: str, key: Any, value: bytes, partitions: int, available: Any) -> int:
            if value == b"bad":
                raise LookupError("no idea")
            return 0

    bad = {"partitioner": b"bad", "size": b"x" * 2_000_000, "room": b"x" * 900_000}[problem]
    more = {"partitioner": Picky()} if problem == "partitioner" else {}
    with Producer(conf(cluster, message_timeout_ms=60_000, max_block_ms=0, buffer_memory=700_000, **more)) as producer:
        producer.produce("t", b"0", partition=0)
        assert producer.flush(120) == 0
        messages: list[dict[str, Any]] = [{"value": b"1"}, {"value": bad}, {"value": b"3"}]
        if problem != "partitioner":
            messages = [message | {"partition": 0} for message in messages]
        assert producer.produce_batch("t", messages) == 2
        assert "_error" in messages[1]
        producer.flush(120)
    assert stored(cluster, 0) in ([b"0"], [b"0", b"1"]), "a beginning"


def test_a_name_that_is_none_is_told_and_ends_nothing(cluster: MockCluster) -> None:
    messages: list[dict[str, Any]] = [{"value": b"v"}]
    with Producer(conf(cluster, message_timeout_ms=60_000)) as producer:
        assert producer.produce_batch("", messages) == 0
        assert messages[0]["_error"].code() == KafkaError._INVALID_ARG
        producer.produce("t", b"v", partition=0)
    assert stored(cluster, 0) == [b"v"]
