"""The interface of fastprod.Producer, checked against what plain consumers read back from a mock cluster."""

import functools
import gc
import logging
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.error import KeySerializationError, ValueSerializationError
from confluent_kafka.serialization import StringSerializer
from reference import murmur2

import fastprod
from fastprod import ConfigError, Producer, RecordError, SerializingProducer
from fastprod.testing import MockCluster

PARTITIONS = 5


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    with MockCluster(2, topics={"t": PARTITIONS}) as running:
        yield running


@pytest.fixture
def make(cluster: MockCluster) -> Iterator[Callable[..., Producer]]:
    """Makes producers of the cluster and ends them before it."""
    made: list[Producer] = []

    def build(options: dict[str, Any] | None = None, kind: type[Producer] = Producer) -> Producer:
        made.append(kind(conf(cluster, **(options or {}))))
        return made[-1]

    yield build
    for one in made:
        one.close(10)


def conf(cluster: MockCluster, **options: Any) -> dict[str, Any]:
    return {"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0} | options


def outcome(producer: confluent_kafka.Producer, *args: Any, **kwargs: Any) -> tuple[KafkaError | None, Any]:
    """Produces one record and returns what its callback got."""
    got: list[tuple[KafkaError | None, Any]] = []
    producer.produce(*args, on_delivery=lambda error, message: got.append((error, message)), **kwargs)
    assert producer.flush(120) == 0
    assert len(got) == 1
    return got[0]


def stored(cluster: MockCluster, topic: str = "t") -> list[tuple[bytes | None, bytes | None]]:
    return [(message.key(), message.value()) for message in cluster.records(topic)]


def java_partition(key: bytes, partitions: int = PARTITIONS) -> int:
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def wait_for(condition: Callable[[], bool], step: Callable[[], object] = lambda: time.sleep(0.01)) -> bool:
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        step()
    return condition()


# ---- making a producer


def test_configuration_by_dict_keywords_or_both(cluster: MockCluster) -> None:
    given = conf(cluster)
    for args, kwargs in [
        ((given,), {}),
        ((), given),
        (({"bootstrap.servers": cluster.bootstrap_servers},), {"log_level": 0}),
    ]:
        with Producer(*args, **kwargs) as producer:
            assert outcome(producer, "t", b"v")[0] is None
    assert given == conf(cluster), "the caller's dict was changed"


@pytest.mark.parametrize("args", [(), ("text",), ({}, {}), (None,), ([("a", 1)],)])
def test_other_constructor_arguments_are_type_errors(args: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        Producer(*args)


def test_second_init_is_refused(make: Callable[..., Producer]) -> None:
    producer = make()
    with pytest.raises(RuntimeError):
        producer.__init__({"bootstrap.servers": "x"})  # type: ignore[misc]
    assert outcome(producer, "t", b"v")[0] is None


def test_is_a_confluent_producer(make: Callable[..., Producer]) -> None:
    assert isinstance(make(), confluent_kafka.Producer)
    assert issubclass(SerializingProducer, Producer)


def test_subclass_may_override_produce_and_poll(cluster: MockCluster) -> None:
    calls: Counter[str] = Counter()

    class Mine(Producer):
        def produce(self, topic: str, value: Any = None, *args: Any, **kwargs: Any) -> None:
            calls["produce"] += 1
            super().produce(topic, b"<" + value + b">", *args, **kwargs)

        def poll(self, timeout: float = -1) -> int:
            calls["poll"] += 1
            return super().poll(timeout)

    with Mine(conf(cluster)) as producer:
        got: list[bytes] = []
        producer.produce("t", b"a", on_delivery=lambda _, message: got.append(message.value()))
        assert wait_for(lambda: bool(got), lambda: producer.poll(1))
    assert got == [b"<a>"]
    assert calls["produce"] == 1
    assert calls["poll"] >= 1
    assert stored(cluster) == [(None, b"<a>")]


def test_subclass_with_its_own_init(cluster: MockCluster) -> None:
    class Mine(Producer):
        def __init__(self, servers: str) -> None:
            super().__init__({"bootstrap.servers": servers, "log_level": 0})
            self.name = "mine"

    with Mine(cluster.bootstrap_servers) as producer:
        assert outcome(producer, "t", b"v")[0] is None
        assert producer.name == "mine"


def test_a_bound_method_keeps_the_producer_usable(cluster: MockCluster) -> None:
    send = Producer(conf(cluster)).produce
    gc.collect()
    send("t", b"v")
    assert wait_for(lambda: sum(high for _, high in cluster.watermarks("t").values()) == 1)


# ---- keys and values


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("grüße", "grüße".encode()),
        (b"bytes", b"bytes"),
        (bytearray(b"array"), b"array"),
        (memoryview(b"xviewx")[1:5], b"view"),
        (np.arange(3, dtype="<u2"), b"\x00\x00\x01\x00\x02\x00"),
        ("", b""),
        (b"", b""),
        (bytearray(), b""),
        (None, None),
    ],
    ids=[
        "str",
        "bytes",
        "bytearray",
        "memoryview",
        "numpy",
        "empty-str",
        "empty-bytes",
        "empty-buffer",
        "none",
    ],
)
def test_kinds_of_keys_and_values(
    cluster: MockCluster, make: Callable[..., Producer], given: Any, expected: bytes | None
) -> None:
    producer = make()
    for value, key in [(given, None), (b"v", given), (given, given)]:
        error, message = outcome(producer, "t", value, key, partition=0)
        assert error is None
        assert message.value() == (expected if value is given else value)
        assert message.key() == (expected if key is given else key)
    assert stored(cluster) == [(None, expected), (expected, b"v"), (expected, expected)]


@pytest.mark.parametrize("wrong", [1, 1.5, object(), ["a"], {"a": 1}, np.arange(8)[::2]])
def test_wrong_kinds_are_type_errors_and_leave_nothing(make: Callable[..., Producer], wrong: Any) -> None:
    producer = make()
    for arguments in [{"value": wrong}, {"value": b"v", "key": wrong}]:
        with pytest.raises(TypeError):
            producer.produce("t", **arguments)
    assert len(producer) == 0


def test_a_mutable_value_is_copied_at_the_call(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make({"linger.ms": 200})
    value = bytearray(b"x" * 5000)
    producer.produce("t", value)
    value[:] = b"y" * 5000
    producer.flush(120)
    assert stored(cluster) == [(None, b"x" * 5000)]


def test_bad_topics_are_refused(make: Callable[..., Producer]) -> None:
    producer = make()
    for wrong in (None, 1, b"t"):
        with pytest.raises(TypeError):
            producer.produce(wrong, b"v")
    for wrong in ("", "a\0b"):
        with pytest.raises(KafkaException):
            producer.produce(wrong, b"v")
    assert len(producer) == 0


def test_topic_names_beyond_ascii_do_not_crash(make: Callable[..., Producer]) -> None:
    producer = make({"message.timeout.ms": 300})
    error, message = outcome(producer, "tøpic", b"v")
    assert message.topic() == "tøpic"
    assert error is None or isinstance(error, KafkaError)


def test_too_large_a_record_is_refused_at_the_call(make: Callable[..., Producer]) -> None:
    producer = make({"message.max.bytes": 2000})
    with pytest.raises(KafkaException) as raised:
        producer.produce("t", b"x" * 2000)
    assert raised.value.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert isinstance(raised.value, RecordError)
    assert outcome(producer, "t", b"x" * 1800)[0] is None
    assert producer._runtime.memory == 0


@pytest.mark.parametrize("size", [0, 1, 100, 2000, 9000, 66_000, 999_000])
def test_records_of_every_size_arrive(cluster: MockCluster, make: Callable[..., Producer], size: int) -> None:
    value = bytes(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8))
    producer = make()
    for _ in range(3):
        producer.produce("t", value, key=b"k")
    assert producer.flush(120) == 0
    assert stored(cluster) == [(b"k", value)] * 3


# ---- headers, timestamps, partitions


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([("a", b"1"), ("b", b"2")], [("a", b"1"), ("b", b"2")]),
        ({"a": b"1", "b": b"2"}, [("a", b"1"), ("b", b"2")]),
        ([("a", None)], [("a", None)]),
        ({"a": "text ü"}, [("a", "text ü".encode())]),
        ([("a", b"1"), ("a", b"2"), ("a", b"1")], [("a", b"1"), ("a", b"2"), ("a", b"1")]),
        ([("a", b"")], [("a", b"")]),
        ([("", b"x")], [("", b"x")]),
        ([("ü", b"x")], [("ü", b"x")]),
        ([], None),
        ({}, None),
        (None, None),
    ],
    ids=[
        "list",
        "dict",
        "null",
        "str",
        "twice",
        "empty",
        "no-name",
        "unicode",
        "empty-list",
        "empty-dict",
        "none",
    ],
)
def test_headers_arrive_and_come_back(
    cluster: MockCluster, make: Callable[..., Producer], given: Any, expected: Any
) -> None:
    error, message = outcome(make(), "t", b"v", headers=given)
    assert error is None
    assert message.headers() == expected
    assert [record.headers() for record in cluster.records("t")] == [expected]


@pytest.mark.parametrize("wrong", ["text", 5, [("a",)], [("a", 1)], [(1, b"a")], ["a"], {"a": 1.5}, [("a", b"1", 2)]])
def test_wrong_headers_are_type_errors(make: Callable[..., Producer], wrong: Any) -> None:
    producer = make()
    with pytest.raises(TypeError):
        producer.produce("t", b"v", headers=wrong)
    assert len(producer) == 0


def test_records_with_and_without_headers_keep_their_order(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make()
    for n in range(200):
        producer.produce("t", b"%d" % n, partition=0, headers={"n": b"%d" % n} if n % 3 == 0 else None)
    producer.flush(120)
    records = cluster.records("t")
    assert [record.value() for record in records] == [b"%d" % n for n in range(200)]
    assert [record.headers() for record in records] == [[("n", b"%d" % n)] if n % 3 == 0 else None for n in range(200)]


def test_timestamps_are_stored(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make()
    before = int(time.time() * 1000)
    producer.produce("t", b"0", partition=0, timestamp=1_700_000_000_000)
    producer.produce("t", b"1", partition=0, timestamp=1)
    producer.produce("t", b"2", partition=0)
    producer.produce("t", b"3", partition=0, timestamp=0)
    producer.flush(120)
    after = int(time.time() * 1000)
    stamps = [record.timestamp() for record in cluster.records("t")]
    assert stamps[0] == (confluent_kafka.TIMESTAMP_CREATE_TIME, 1_700_000_000_000)
    assert stamps[1] == (confluent_kafka.TIMESTAMP_CREATE_TIME, 1)
    assert all(before - 5 <= stamp <= after + 5 for _, stamp in stamps[2:])


def test_a_record_that_waits_keeps_the_time_of_its_call(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make({"linger.ms": 1500})
    before = int(time.time() * 1000)
    producer.produce("t", b"v", partition=0)
    after = int(time.time() * 1000)
    while len(producer):  # flush() would end the wait
        producer.poll(1)
    assert before - 5 <= cluster.records("t")[0].timestamp()[1] <= after + 5


def test_negative_timestamp_is_refused(make: Callable[..., Producer]) -> None:
    with pytest.raises(ValueError, match="timestamp"):
        make().produce("t", b"v", timestamp=-5)


def test_explicit_partition_beats_the_key(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make()
    for partition in range(PARTITIONS):
        assert outcome(producer, "t", b"v", b"same key", partition)[1].partition() == partition
    assert {record.partition() for record in cluster.records("t")} == set(range(PARTITIONS))


def test_an_unknown_partition_is_told(make: Callable[..., Producer]) -> None:
    producer = make()
    assert outcome(producer, "t", b"v")[0] is None  # metadata is known now
    with pytest.raises(KafkaException) as raised:
        producer.produce("t", b"v", partition=PARTITIONS)
    assert raised.value.args[0].code() == KafkaError._UNKNOWN_PARTITION
    with pytest.raises(KafkaException):
        producer.produce("t", b"v", partition=-2)
    assert producer.flush(120) == 0
    assert producer._runtime.memory == 0


def test_an_unknown_partition_before_metadata_fails_that_record_only(make: Callable[..., Producer]) -> None:
    producer = make()
    got: list[tuple[bytes, int | None]] = []

    def note(error: KafkaError | None, message: Any) -> None:
        got.append((message.value(), error and error.code()))

    for n, partition in enumerate([0, 77, 0]):
        producer.produce("t", b"%d" % n, partition=partition, on_delivery=note)
    assert producer.flush(120) == 0
    assert sorted(got) == [(b"0", None), (b"1", KafkaError._UNKNOWN_PARTITION), (b"2", None)]


def test_keys_go_where_java_puts_them(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    keys = [b"", b"a", b"ab", b"abc", b"abcd", b"\xff" * 7] + [b"key-%d" % n for n in range(300)]
    producer = make()
    for key in keys:
        producer.produce("t", b"v", key)
    producer.flush(120)
    placed = {record.key(): record.partition() for record in cluster.records("t")}
    assert placed == {key: java_partition(key) for key in keys}


# ---- delivery reports


def test_delivery_report_contents(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make()
    outcome(producer, "t", b"first", partition=3)
    error, message = outcome(producer, "t", b"val", b"key", partition=3, headers={"h": b"x"}, timestamp=77)
    assert error is None
    assert isinstance(message, confluent_kafka.Message)
    assert message.error() is None
    assert (message.topic(), message.partition(), message.offset()) == ("t", 3, 1)
    assert (message.key(), message.value(), message.headers()) == (b"key", b"val", [("h", b"x")])
    assert len(message) == 3
    assert 0 <= message.latency() < 60
    kind, stamp = message.timestamp()
    assert (kind, stamp) == (confluent_kafka.TIMESTAMP_LOG_APPEND_TIME, 1234)  # the mock's


def test_a_message_has_every_method_of_confluents(make: Callable[..., Producer]) -> None:
    """Also the one that a new release adds."""
    message = outcome(make(), "t", b"val", b"key")[1]
    assert set(dir(confluent_kafka.Message)) - set(dir(type(message))) == set()


def test_what_nobody_deserialized_is_the_key_and_the_value(make: Callable[..., Producer]) -> None:
    message = outcome(make(), "t", b"val", b"key")[1]
    assert (message.deserialized_key(), message.deserialized_value()) == (b"key", b"val")
    message.set_key("key as text")
    message.set_value({"value": 1})
    assert (message.deserialized_key(), message.deserialized_value()) == ("key as text", {"value": 1})
    nothing = outcome(make(), "t", None)[1]
    assert (nothing.deserialized_key(), nothing.deserialized_value()) == (None, None)


def test_offsets_reported_are_those_of_the_log(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make()
    told = {}

    def note(error: KafkaError | None, message: Any) -> None:
        assert error is None
        told[message.partition(), message.offset()] = message.value()

    for n in range(2000):
        producer.produce("t", b"%d" % n, b"k%d" % (n % 50), on_delivery=note)
    producer.flush(120)
    assert told == {(r.partition(), r.offset()): r.value() for r in cluster.records("t")}


def test_callbacks_of_a_partition_come_in_order(make: Callable[..., Producer]) -> None:
    producer = make()
    got: list[int] = []
    for n in range(5000):
        producer.produce("t", b"v", partition=1, callback=lambda _error, _message, n=n: got.append(n))
    producer.flush(120)
    assert got == list(range(5000))


def test_callback_is_another_name_for_on_delivery(make: Callable[..., Producer]) -> None:
    producer = make()
    got: list[str] = []
    producer.produce("t", b"v", callback=lambda *_: got.append("callback"))
    producer.produce("t", b"v", None, -1, lambda *_: got.append("position"))
    producer.flush(120)
    assert sorted(got) == ["callback", "position"]
    with pytest.raises(TypeError):
        producer.produce("t", b"v", on_delivery="not callable")


def test_on_delivery_of_the_configuration_is_the_default(make: Callable[..., Producer]) -> None:
    got: list[str] = []
    producer = make({"on_delivery": lambda _error, message: got.append("default " + message.value().decode())})
    producer.produce("t", b"a")
    producer.produce("t", b"b", on_delivery=lambda _error, message: got.append("own " + message.value().decode()))
    producer.flush(120)
    assert sorted(got) == ["default a", "own b"]


def test_delivery_report_only_error(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    got: list[int] = []
    producer = make({"delivery.report.only.error": True, "on_delivery": lambda error, _: got.append(error.code())})
    producer.produce("t", b"good", partition=0)
    assert producer.flush(120) == 0
    assert got == []
    cluster.push_errors("Produce", "TOPIC_AUTHORIZATION_FAILED")
    producer.produce("t", b"bad", partition=0)
    assert producer.flush(120) == 0
    assert got == [KafkaError.TOPIC_AUTHORIZATION_FAILED]
    assert len(producer) == 0
    assert producer._runtime.memory == 0


def test_callbacks_run_in_poll_on_the_callers_thread(make: Callable[..., Producer]) -> None:
    producer = make()
    idents: list[int] = []
    producer.produce("t", b"v", on_delivery=lambda *_: idents.append(threading.get_ident()))
    assert wait_for(lambda: producer._runtime.records == 0)
    assert idents == []
    assert producer.poll(30) == 1
    assert idents == [threading.get_ident()]


def test_a_callback_may_produce_poll_and_flush(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make()
    got: list[bytes] = []

    def again(error: KafkaError | None, message: Any) -> None:
        got.append(message.value())
        if len(got) < 5:
            producer.produce("t", b"%d" % len(got), on_delivery=again)
            producer.poll(0)
            producer.flush(0.01)

    producer.produce("t", b"0", on_delivery=again)
    assert wait_for(lambda: len(got) == 5, lambda: producer.flush(1))
    assert sorted(got) == [b"%d" % n for n in range(5)]
    assert producer.flush(120) == 0
    assert len(producer) == 0


def test_callbacks_are_released_after_they_ran(make: Callable[..., Producer]) -> None:
    class Callback:
        def __call__(self, *_: object) -> None: ...

    producer = make()
    callbacks = [Callback() for _ in range(10)]
    watch = [weakref.ref(callback) for callback in callbacks]
    for callback in callbacks:
        producer.produce("t", b"v", on_delivery=callback)
    del callback
    callbacks.clear()
    producer.flush(120)
    gc.collect()
    assert [ref() for ref in watch] == [None] * 10


# ---- produce_batch


def test_produce_batch_honours_every_field(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make()
    got: list[str] = []
    messages = [
        {
            "value": "a",
            "partition": 1,
            "headers": {"h": b"x"},
            "timestamp": 1000,
            "callback": lambda *_: got.append("own"),
        },
        {"value": b"b", "key": "k"},
        {"value": None, "key": b"c", "partition": 0},
        {},
    ]
    accepted = producer.produce_batch("t", messages, partition=2, on_delivery=lambda *_: got.append("default"))
    assert accepted == 4
    assert producer.flush(120) == 0
    found = {(r.partition(), r.key(), r.value()): r for r in cluster.records("t")}
    assert set(found) == {(1, None, b"a"), (2, b"k", b"b"), (0, b"c", None), (2, None, None)}
    assert found[1, None, b"a"].headers() == [("h", b"x")]
    assert found[1, None, b"a"].timestamp()[1] == 1000
    assert sorted(got) == ["default"] * 3 + ["own"]
    assert not any("_error" in message for message in messages)


def test_produce_batch_notes_refused_messages(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make({"message.max.bytes": 2000})
    outcome(producer, "t", b"warm")
    messages: list[dict[str, Any]] = [
        {"value": b"0"},
        {"value": b"x" * 5000},
        {"value": b"2", "partition": 99},
        {"value": b"3"},
    ]
    assert producer.produce_batch("t", messages) == 2
    producer.flush(120)
    assert [message["_error"].code() if "_error" in message else None for message in messages] == [
        None,
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError._UNKNOWN_PARTITION,
        None,
    ]
    assert sorted(value for _, value in stored(cluster)) == [b"0", b"3", b"warm"]


@pytest.mark.parametrize(
    "messages",
    [
        "text",
        ({"value": b"x"},),
        [{"value": b"x"}, "text"],
        [{"value": b"x"}, {"value": 1}],
        [{"value": b"x"}, {"key": 1.5}],
        [{"value": b"x"}, {"partition": "1"}],
        [{"value": b"x"}, {"timestamp": "1"}],
        [{"value": b"x"}, {"headers": 5}],
        [{"value": b"x"}, {"headers": [("a", 1)]}],
        [{"value": b"x"}, {"callback": "text"}],
    ],
)
def test_produce_batch_checks_types_before_it_accepts(make: Callable[..., Producer], messages: Any) -> None:
    producer = make()
    with pytest.raises(TypeError):
        producer.produce_batch("t", messages)
    assert len(producer) == 0


def test_produce_batch_of_nothing(make: Callable[..., Producer]) -> None:
    assert make().produce_batch("t", []) == 0


# ---- poll, flush, purge, len


def test_poll_returns_how_many_callbacks_ran(make: Callable[..., Producer]) -> None:
    producer = make()
    assert producer.poll(0) == 0
    assert producer.poll(0.05) == 0
    for _ in range(7):
        producer.produce("t", b"v", partition=0, on_delivery=lambda *_: None)
    ran = 0

    def step() -> None:
        nonlocal ran
        ran += producer.poll(1)

    assert wait_for(lambda: ran >= 7, step)
    assert ran == 7
    assert producer.poll(0) == 0


def test_poll_waits_up_to_its_timeout(make: Callable[..., Producer]) -> None:
    producer = make()
    start = time.monotonic()
    assert producer.poll(0.2) == 0
    assert time.monotonic() - start >= 0.15


def test_len_counts_records_and_due_callbacks(make: Callable[..., Producer]) -> None:
    producer = make({"linger.ms": 60_000})
    assert len(producer) == 0
    assert producer, "a producer without records is still true"
    for _ in range(3):
        producer.produce("t", b"v", on_delivery=lambda *_: None)
    assert len(producer) == 3
    assert producer.flush(120) == 0
    assert len(producer) == 0


def test_len_still_counts_a_callback_that_waits(make: Callable[..., Producer]) -> None:
    producer = make()
    producer.produce("t", b"v", on_delivery=lambda *_: None)
    assert wait_for(lambda: producer._runtime.records == 0)
    assert len(producer) == 1
    producer.poll(0)
    assert len(producer) == 0


def test_flush_tells_how_many_are_left(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make()
    outcome(producer, "t", b"warm")
    cluster.down()
    for _ in range(4):
        producer.produce("t", b"v")
    assert producer.flush(0.05) == 4
    cluster.up()
    assert producer.flush(120) == 0
    assert producer.flush() == 0
    assert producer.flush(timeout=None) == 0


def test_purge_gives_up_waiting_records(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make({"linger.ms": 60_000})
    outcome(producer, "t", b"warm")
    codes: list[int] = []
    for _ in range(10):
        producer.produce("t", b"v", on_delivery=lambda error, _: codes.append(error.code()))
    producer.purge()
    assert producer.flush(120) == 0
    assert codes == [KafkaError._PURGE_QUEUE] * 10
    assert producer._runtime.memory == 0
    assert stored(cluster) == [(None, b"warm")]
    assert outcome(producer, "t", b"after")[0] is None


def test_purge_with_nothing_selected_changes_nothing(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make({"linger.ms": 500})
    producer.produce("t", b"v")
    producer.purge(in_queue=False, in_flight=False)
    producer.purge(in_queue=False, in_flight=True, blocking=False)
    assert producer.flush(120) == 0
    assert stored(cluster) == [(None, b"v")]


def test_list_topics(make: Callable[..., Producer]) -> None:
    producer = make()
    assert len(producer.list_topics("t", timeout=120).topics["t"].partitions) == PARTITIONS
    assert len(producer.list_topics(timeout=120).brokers) == 2


def test_cluster_id_is_that_of_the_metadata(make: Callable[..., Producer]) -> None:
    producer = make()
    assert producer.cluster_id(120) == producer.list_topics(timeout=120).cluster_id


def test_no_method_of_confluents_is_inherited_without_our_checks() -> None:
    """For a closed producer and a forked one; a new release's methods show up here."""
    theirs = {name for name in dir(confluent_kafka.Producer) if not name.startswith("_")}
    assert theirs - set(vars(Producer)) == set()


def test_close_flushes_and_is_final(cluster: MockCluster) -> None:
    producer = Producer(conf(cluster, **{"linger.ms": 60_000}))
    got: list[KafkaError | None] = []
    producer.produce("t", b"v", on_delivery=lambda error, _: got.append(error))
    assert producer.close() is True
    assert got == [None]
    assert producer.close() is True
    assert len(producer) == 0
    assert stored(cluster) == [(None, b"v")]
    assert "closed" in repr(producer)


def test_close_with_a_timeout_tells_that_records_were_lost(cluster: MockCluster) -> None:
    producer = Producer(conf(cluster))
    cluster.down()
    producer.produce("t", b"v")
    assert producer.close(0.1) is False


def test_context_manager_closes(cluster: MockCluster) -> None:
    with Producer(conf(cluster)) as producer:
        assert isinstance(producer, Producer)
        producer.produce("t", b"v")
    with pytest.raises(RuntimeError):
        producer.produce("t", b"w")
    assert stored(cluster) == [(None, b"v")]


def test_an_exception_in_a_with_block_is_not_swallowed(cluster: MockCluster) -> None:
    def fail() -> None:
        with Producer(conf(cluster)) as producer:
            producer.produce("t", b"v")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert stored(cluster) == [(None, b"v")]


# ---- callbacks of the configuration


def test_error_cb_runs_in_poll() -> None:
    seen: list[tuple[int, int]] = []
    producer = Producer(
        {
            "bootstrap.servers": "127.0.0.1:1",
            "log_level": 0,
            "error_cb": lambda error: seen.append((error.code(), threading.get_ident())),
        }
    )
    time.sleep(0.3)
    assert seen == []
    assert wait_for(lambda: bool(seen), lambda: producer.poll(1))
    producer.close(0)
    assert {ident for _, ident in seen} == {threading.get_ident()}
    assert {code for code, _ in seen} <= {KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_in_error_cb_reaches_the_poller() -> None:
    told: list[KafkaError] = []

    def fail(error: KafkaError) -> None:
        told.append(error)
        if len(told) == 1:  # another one may come while it is being closed
            raise LookupError(error.code())

    producer = Producer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0, "error_cb": fail})
    with pytest.raises(LookupError):
        wait_for(lambda: False, lambda: producer.poll(1))
    producer.close(0)


def test_stats_cb_runs_in_poll(make: Callable[..., Producer]) -> None:
    seen: list[tuple[str, int]] = []
    producer = make({"statistics.interval.ms": 50, "stats_cb": lambda text: seen.append((text, threading.get_ident()))})
    time.sleep(0.3)
    assert seen == []
    assert wait_for(lambda: bool(seen), lambda: producer.poll(1))
    assert seen[0][0].startswith("{")
    assert {ident for _, ident in seen} == {threading.get_ident()}


def test_logger_gets_librdkafkas_log_in_poll(cluster: MockCluster) -> None:
    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append((record.getMessage(), record.thread or 0))

    lines: list[tuple[str, int]] = []
    logger = logging.Logger("test", logging.DEBUG)
    logger.addHandler(Keep())
    with Producer({"bootstrap.servers": cluster.bootstrap_servers, "debug": "broker", "logger": logger}) as producer:
        producer.list_topics(timeout=120)
        time.sleep(0.1)
        assert wait_for(lambda: bool(lines), lambda: producer.poll(0.1))
    assert {ident for _, ident in lines} == {threading.get_ident()}
    assert any("rdkafka" in text for text, _ in lines)


def test_throttle_cb_is_taken_or_refused_by_name(make: Callable[..., Producer]) -> None:
    assert outcome(make({"throttle_cb": lambda event: None}), "t", b"v")[0] is None
    with pytest.raises(KafkaException, match="throttle_cb"):
        make({"throttle_cb": 5})


def test_oauth_cb_is_asked_for_a_token() -> None:
    asked: list[str] = []

    def token(config: str) -> tuple[str, float]:
        asked.append(config)
        return "token", time.time() + 3600

    producer = Producer(
        {
            "bootstrap.servers": "127.0.0.1:1",
            "log_level": 0,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanisms": "OAUTHBEARER",
            "sasl.oauthbearer.config": "for=test",
            "oauth_cb": token,
        }
    )
    try:
        assert wait_for(lambda: bool(asked), lambda: producer.poll(0.1))
    finally:
        producer.close(0)
    assert asked[0] == "for=test"


# ---- serializers


def test_serializing_producer(cluster: MockCluster) -> None:
    options = conf(
        cluster,
        **{"key.serializer": StringSerializer("utf_8"), "value.serializer": StringSerializer("utf_16_be")},
    )
    got: list[Any] = []
    with SerializingProducer(options) as producer:
        producer.produce("t", key="kü", value="v", on_delivery=lambda error, message: got.append((error, message)))
        producer.produce("t", "k2", "w", 1, None, 5, {"h": b"x"})
        producer.produce("t", key="gone", value=None)
    assert got[0][0] is None
    assert sorted(stored(cluster)) == sorted(
        [("kü".encode(), "v".encode("utf_16_be")), (b"k2", "w".encode("utf_16_be")), (b"gone", None)],
        key=lambda pair: pair[0],
    )
    assert "key.serializer" in options


def test_a_failing_serializer_is_named_and_nothing_is_produced(cluster: MockCluster) -> None:
    def fail(value: Any, context: Any) -> bytes:
        raise ArithmeticError(f"{context.topic} {context.field}")

    with SerializingProducer(conf(cluster, **{"key.serializer": fail})) as producer:
        with pytest.raises(KeySerializationError, match="t key"):
            producer.produce("t", key=1, value=b"v")
        assert len(producer) == 0
    with SerializingProducer(conf(cluster, **{"value.serializer": fail})) as producer:
        with pytest.raises(ValueSerializationError, match="t value"):
            producer.produce("t", key=b"k", value=1)
        assert len(producer) == 0


# ---- configuration


def test_an_unknown_option_is_named() -> None:
    with pytest.raises(KafkaException, match=r"no\.such\.option") as raised:
        Producer({"bootstrap.servers": "x", "no.such.option": 1})
    assert raised.value.args[0].code() == KafkaError._INVALID_ARG


def test_a_bad_value_of_librdkafkas_is_named() -> None:
    for option in ("compression.codec", "acks", "partitioner", "max.in.flight.requests.per.connection"):
        with pytest.raises(KafkaException, match=option.replace(".", r"\.")):
            Producer({"bootstrap.servers": "x", option: "nonsense"})


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("linger.ms", [-1, "soon", None, True, float("nan")]),
        ("sticky.batch.size", [0, 1.5, "x", -1]),
        ("buffer.memory", [0, 1000, "1 GB", 10**400]),
        ("max.block.ms", [-1, "x", None]),
        ("message.max.bytes", [1, "x"]),
        ("message.timeout.ms", [-1, "x"]),
        ("partitioner.availability.timeout.ms", [-1, "x"]),
        ("partitioner.adaptive.partitioning.enable", ["maybe", 2, None]),
        ("partitioner.ignore.keys", ["maybe", 2]),
        ("delivery.report.only.error", ["maybe"]),
        ("partitioner", [5, object(), []]),
        ("on_delivery", [5, "text"]),
        ("throttle_cb", [5]),
    ],
)
def test_bad_values_of_our_options_are_named(option: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(KafkaException, match=option.replace(".", r"\.")) as raised:
            Producer({"bootstrap.servers": "x", option: value})
        assert isinstance(raised.value, ConfigError)
        assert isinstance(raised.value, ValueError)


def test_our_options_may_be_given_as_text(cluster: MockCluster) -> None:
    options = {
        "linger.ms": "1.5",
        "buffer.memory": "1000000",
        "max.block.ms": "10",
        "sticky.batch.size": "100",
        "partitioner.adaptive.partitioning.enable": "False",
        "partitioner.ignore.keys": "true",
        "message.timeout.ms": "10000",
    }
    with Producer(conf(cluster, **options)) as producer:
        assert outcome(producer, "t", b"v")[0] is None


def test_names_of_java_and_librdkafka_both_work(cluster: MockCluster) -> None:
    with Producer(
        conf(cluster, **{"queue.buffering.max.ms": 1, "delivery.timeout.ms": 10_000, "max.request.size": 2000})
    ) as p:
        with pytest.raises(RecordError):
            p.produce("t", b"x" * 3000)
        assert outcome(p, "t", b"v")[0] is None


def test_default_topic_config_is_merged(cluster: MockCluster) -> None:
    with Producer(conf(cluster, **{"default.topic.config": {"acks": 1, "message.timeout.ms": 9000}})) as producer:
        assert outcome(producer, "t", b"v")[0] is None
    with pytest.raises(KafkaException, match=r"no\.such"):
        Producer(conf(cluster, **{"default.topic.config": {"no.such": 1}}))


def test_acks_0_delivers_without_offset(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    error, message = outcome(make({"acks": 0}), "t", b"v")
    assert error is None
    assert message.offset() is None
    assert wait_for(lambda: stored(cluster) == [(None, b"v")])


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_compression_passes_through(cluster: MockCluster, make: Callable[..., Producer], codec: str) -> None:
    producer = make({"compression.type": codec})
    for n in range(100):
        producer.produce("t", b"%d" % n * 50, partition=0)
    producer.flush(120)
    assert stored(cluster) == [(None, b"%d" % n * 50) for n in range(100)]


def test_repr_shows_no_secrets(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make({"sasl.password": "hunter2", "sasl.username": "alice"})
    assert "hunter2" not in repr(producer) + str(producer) + repr(vars(producer)) + repr(producer._runtime)
    assert "Producer" in repr(producer)
    with pytest.raises(KafkaException) as raised:
        Producer(conf(cluster, **{"sasl.password": "hunter2", "no.such.option": 1}))
    assert "hunter2" not in str(raised.value)


# ---- placement


@pytest.mark.parametrize("name", ["consistent_random", "consistent", "murmur2_random", "murmur2", "fnv1a_random"])
def test_librdkafkas_partitioners_keep_their_placement(cluster: MockCluster, name: str) -> None:
    keys = [b"key-%d" % n for n in range(200)]

    def place(kind: type[confluent_kafka.Producer]) -> dict[bytes, int]:
        placed: dict[bytes, int] = {}
        producer = kind(conf(cluster, partitioner=name))
        for key in keys:
            producer.produce("t", b"v", key, on_delivery=lambda _, m: placed.__setitem__(m.key(), m.partition()))
        assert producer.flush(120) == 0
        producer.close()
        return placed

    ours = place(Producer)
    assert ours == place(confluent_kafka.Producer)
    assert len(set(ours.values())) > 1
    if name.startswith("murmur2"):
        assert ours == {key: java_partition(key) for key in keys}


def test_librdkafkas_partitioner_with_every_kind_of_record(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make({"partitioner": "consistent_random"})
    got: list[tuple[Any, Any, Any, Any]] = []

    def note(error: KafkaError | None, m: Any) -> None:
        got.append((error, m.key(), m.value(), m.headers()))

    wanted = []
    for n in range(400):
        key = [None, b"", b"k%d" % n][n % 3]
        value = [None, b"", b"v%d" % n, b"x" * 5000][n % 4]
        partition = -1 if n % 5 else 2
        headers = {"n": b"%d" % n} if n % 7 == 0 else None
        producer.produce("t", value, key, partition, headers=headers, on_delivery=note)
        wanted.append((None, key, value, headers and [("n", b"%d" % n)]))
    assert producer.flush(120) == 0
    assert sorted(got, key=repr) == sorted(wanted, key=repr)
    read = [(None, r.key(), r.value(), r.headers()) for r in cluster.records("t")]
    assert sorted(read, key=repr) == sorted(wanted, key=repr)
    assert producer._runtime.memory == 0
    many = producer.produce_many("t", [b"y" * 2000] * 50 + [None, b""], keys=[b"k"] * 52)
    assert many.wait(120)
    assert many.acknowledged == 52


class ByLength:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def partition(self, topic: str, key: bytes | None, value: bytes | None, partitions: int, available: Any) -> int:
        self.calls.append((topic, key, value, partitions, list(available)))
        return len(value or b"") % partitions


def test_a_python_partitioner_decides(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    chooser = ByLength()
    producer = make({"partitioner": chooser})
    for n in range(20):
        producer.produce("t", b"x" * n, key=b"k")
    producer.produce("t", b"fixed", partition=4)
    producer.flush(120)
    for n in range(20):
        producer.produce("t", b"y" * n)
    producer.flush(120)
    assert all(
        record.partition() == (4 if record.value() == b"fixed" else len(record.value()) % PARTITIONS)
        for record in cluster.records("t")
    )
    assert len(chooser.calls) == 40
    assert ("t", b"k", b"xx", PARTITIONS, list(range(PARTITIONS))) in chooser.calls
    assert ("t", None, b"yy", PARTITIONS, list(range(PARTITIONS))) in chooser.calls


def test_a_python_partitioner_serves_bulk_calls(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make({"partitioner": ByLength()})
    receipt = producer.produce_many("t", [b"x" * n for n in range(30)])
    assert receipt.wait(120)
    assert {partition: extent.records for (_, partition), extent in receipt.extents.items()} == dict.fromkeys(
        range(5), 6
    )


def refusal(producer: Producer, kind: type[Exception]) -> Exception:
    """What produce() raises for a record that cannot be placed, once the topic's partitions are known."""
    outcome(producer, "t", b"warm", partition=0)
    for _ in range(20):
        try:
            producer.produce("t", b"v")
        except kind as problem:
            return problem
        producer.flush(120)  # accepted before they were known, it has failed meanwhile
    raise AssertionError("it was never refused")


@pytest.mark.parametrize("answer", [-1, PARTITIONS, 10**20, None, "1", 1.0])
def test_nonsense_from_a_python_partitioner_is_told(make: Callable[..., Producer], answer: Any) -> None:
    class Wrong:
        def partition(self, *_: Any) -> Any:
            return answer

    producer = make({"partitioner": Wrong()})
    assert refusal(producer, KafkaException).args[0].code() == KafkaError._UNKNOWN_PARTITION
    assert len(producer) == 0
    assert producer._runtime.memory == 0


def test_a_python_partitioner_may_return_a_numpy_integer(make: Callable[..., Producer]) -> None:
    class Numpy:
        def partition(self, topic: str, key: Any, value: Any, partitions: int, available: Any) -> Any:
            return np.asarray(available)[3]

    producer = make({"partitioner": Numpy()})
    outcome(producer, "t", b"warm", partition=0)
    assert outcome(producer, "t", b"v")[1].partition() == 3


def test_a_raising_python_partitioner_reaches_the_caller(make: Callable[..., Producer]) -> None:
    class Wrong:
        def partition(self, *_: Any) -> int:
            raise LookupError("no idea")

    producer = make({"partitioner": Wrong()})
    assert "no idea" in str(refusal(producer, LookupError))
    assert len(producer) == 0
    assert producer._runtime.memory == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_raising_python_partitioner_fails_records_that_waited_for_metadata(
    make: Callable[..., Producer],
) -> None:
    class Picky:
        def partition(self, topic: str, key: Any, value: Any, partitions: int, available: Any) -> int:
            if value == b"bad":
                raise LookupError
            return 1

    producer = make({"partitioner": Picky()})
    got: dict[bytes, int | None] = {}

    def note(error: KafkaError | None, message: Any) -> None:
        got[message.value()] = error and error.code()

    refused = 0
    for value in (b"a", b"bad", b"b"):
        try:
            producer.produce("t", value, on_delivery=note)
        except LookupError:  # metadata was quicker than we
            refused += 1
    assert producer.flush(120) == 0
    assert got[b"a"] is None
    assert got[b"b"] is None
    assert refused == 1 or got[b"bad"] is not None
    assert producer._runtime.memory == 0


def test_round_robin_takes_every_partition_in_turn(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make({"partitioner": "round_robin"})
    outcome(producer, "t", b"warm", partition=0)
    order: dict[int, int] = {}

    for n in range(50):
        producer.produce("t", b"v", on_delivery=lambda _, m, n=n: order.__setitem__(n, m.partition()))
    producer.flush(120)
    placed = [order[n] for n in range(50)]
    for start in range(50 - PARTITIONS):
        assert sorted(placed[start : start + PARTITIONS]) == list(range(PARTITIONS))


@pytest.mark.parametrize("policy", ["uniform", "sticky"])
def test_sticky_policies_stay_with_a_partition_for_a_while(
    cluster: MockCluster, make: Callable[..., Producer], policy: str
) -> None:
    producer = make({"partitioner": policy, "sticky.batch.size": 10_000, "linger.ms": 900_000})
    outcome(producer, "t", b"warm", partition=0)
    order: dict[int, int] = {}
    total = 5000
    for n in range(total):
        producer.produce("t", b"x" * 100, on_delivery=lambda _, m, n=n: order.__setitem__(n, m.partition()))
        if n % 500 == 499:
            producer.flush(120)
    producer.flush(120)
    placed = [order[n] for n in range(total)]
    switches = sum(a != b for a, b in pairwise(placed))
    assert 10 <= switches <= total // 20
    assert set(placed) == set(range(PARTITIONS))


def test_uniform_is_uniform_in_the_long_run(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make({"sticky.batch.size": 1000, "partitioner.adaptive.partitioning.enable": False})
    outcome(producer, "t", b"warm", partition=0)
    assert producer.produce_many("t", [b"x" * 50] * 100_000).wait(120)
    counts = [high for _, high in cluster.watermarks("t").values()]
    assert min(counts) > 0.8 * 20_000
    assert max(counts) < 1.2 * 20_000


def test_ignored_keys_do_not_place(cluster: MockCluster, make: Callable[..., Producer]) -> None:
    producer = make({"partitioner.ignore.keys": True, "partitioner": "round_robin"})
    outcome(producer, "t", b"warm", partition=0)
    for _ in range(PARTITIONS):
        producer.produce("t", b"v", b"same")
    producer.flush(120)
    assert Counter(r.partition() for r in cluster.records("t") if r.key()) == dict.fromkeys(range(PARTITIONS), 1)


def test_key_less_records_avoid_partitions_without_leader(make: Callable[..., Producer], cluster: MockCluster) -> None:
    cluster.set_leader("t", 0, None)
    cluster.set_leader("t", 1, None)
    producer = make({"sticky.batch.size": 100})
    partitions = Counter[int]()
    for _ in range(200):
        producer.produce("t", b"x" * 100, on_delivery=lambda _, m: partitions.update([m.partition()]))
    assert producer.flush(120) == 0
    assert set(partitions) == {2, 3, 4}


def test_consumer_group_metadata_style_objects_pass_through(make: Callable[..., Producer]) -> None:
    producer = make()
    with pytest.raises((KafkaException, TypeError)):
        producer.send_offsets_to_transaction([TopicPartition("t", 0, 1)], object())
    assert functools.partial(producer.poll, 0)() == 0


def test_public_names() -> None:
    for name in fastprod.__all__:
        assert getattr(fastprod, name) is not None


def test_the_source_folder_says_that_it_is_not_built(tmp_path: Path) -> None:
    package = Path(fastprod.__file__).parent
    shutil.copytree(package, tmp_path / "fastprod", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    run = [sys.executable, "-c", "from fastprod import Producer"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: fastprod's compiled modules are not built")
