"""Transactions on a real Kafka: readers see all of a committed one and nothing of any other, whatever happens."""

import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from programs import Program, started
from reference import java_partition

from fastprod import Producer
from fastprod.testing import Audit, KafkaCluster, audit

DEADLINE_S = 120  # for what takes a second or two on a quiet machine


def make(cluster: KafkaCluster, transactional_id: str, **more: Any) -> Producer:
    """A producer that may begin transactions; underscores in option names stand for dots."""
    config = {name.replace("_", "."): value for name, value in more.items()}
    producer = Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "transactional.id": transactional_id,
            "log_level": 0,
            **config,
        }
    )
    producer.init_transactions(DEADLINE_S)
    return producer


def numbered(first: int, count: int, size: int = 0) -> list[bytes]:
    return [b"%d " % number + b"x" * size for number in range(first, first + count)]


def some_keys(first: int, count: int) -> list[bytes]:
    return [b"key-%d" % (number % 97) for number in range(first, first + count)]


def contents(cluster: KafkaCluster, topic: str, *, committed: bool = True) -> Counter[bytes]:
    return Counter(record.value() for record in cluster.records(topic, committed=committed))


def settle(cluster: KafkaCluster, topic: str) -> None:
    """Wait until no transaction is open in a topic: a commit is answered a moment before its markers are written."""
    config = {"bootstrap.servers": cluster.bootstrap_servers, "group.id": "settle", "log_level": 0}
    consumer = Consumer(config | {"isolation.level": "read_uncommitted"})
    deadline = time.monotonic() + DEADLINE_S
    try:
        while True:
            visible = {partition: end for partition, (_, end) in cluster.watermarks(topic).items()}
            stored = {
                partition: consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=DEADLINE_S)[1]
                for partition in visible
            }
            if visible == stored:
                return
            assert time.monotonic() < deadline, f"readers see {visible} of {stored}"
            time.sleep(0.02)
    finally:
        consumer.close()


def committed(cluster: KafkaCluster, topic: str) -> Counter[bytes]:
    """What readers see once all transactions are over."""
    settle(cluster, topic)
    return contents(cluster, topic)


def checked(cluster: KafkaCluster, topic: str, count: int, **how: Any) -> Audit:
    settle(cluster, topic)
    return audit(cluster.bootstrap_servers, topic, count, **how)


def refusal(call: Callable[..., object], *arguments: object) -> KafkaError:
    """The error that a call ends with."""
    with pytest.raises(KafkaException) as caught:
        call(*arguments)
    return caught.value.args[0]


def commit_in_spite_of_everything(producer: Producer, send: Callable[[], object]) -> int:
    """The pattern of librdkafka's manual: commit again, or abort and send again, as the error says. How often sent."""
    deadline = time.monotonic() + 2 * DEADLINE_S
    for sent in range(1, 100):
        producer.begin_transaction()
        send()
        while True:
            assert time.monotonic() < deadline
            try:
                producer.commit_transaction(DEADLINE_S)
                return sent
            except KafkaException as error:
                if error.args[0].retriable():
                    continue
                if not error.args[0].txn_requires_abort():
                    raise
                producer.abort_transaction(DEADLINE_S)
                break
    raise AssertionError("not committed in 100 attempts")


# ---- commit and abort


def send_single(producer: Producer, topic: str, values: list[bytes], keys: list[bytes]) -> None:
    for value, key in zip(values, keys, strict=True):
        producer.produce(topic, value, key)


def send_many(producer: Producer, topic: str, values: list[bytes], keys: list[bytes]) -> None:
    producer.produce_many(topic, values, keys)


def send_arrow(producer: Producer, topic: str, values: list[bytes], keys: list[bytes]) -> None:
    producer.produce_arrow(pa.table({"value": pa.array(values), "key": pa.array(keys)}), topic)


@pytest.mark.parametrize("send", [send_single, send_many, send_arrow])
def test_a_commit_shows_everything_at_once_in_all_topics(kafka_cluster: KafkaCluster, topic: str, send) -> None:
    count = 10_000
    sizes = {f"{topic}-small": 50, f"{topic}-large": 600}  # values from 512 bytes are not copied in bulk calls
    with make(kafka_cluster, topic, buffer_memory=1 << 20) as producer:
        producer.begin_transaction()
        for name, size in sizes.items():
            kafka_cluster.create_topic(name, 5)
            send(producer, name, numbered(0, count, size), some_keys(0, count))
        assert producer.flush(DEADLINE_S) == 0
        for name in sizes:  # all is on the broker, and still nobody sees it
            assert contents(kafka_cluster, name) == Counter()
        producer.commit_transaction(DEADLINE_S)
        assert len(producer) == 0
    for name in sizes:
        found = checked(kafka_cluster, name, count, partition_of=java_partition(5))
        assert found.clean, f"{name}: {found}"


def test_a_commit_sends_what_still_lingers_and_tells_the_outcomes(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic, 3)
    told: list[tuple[int, int, bytes]] = []
    with make(kafka_cluster, topic, linger_ms=600_000) as producer:
        producer.begin_transaction()
        for value in numbered(0, 2000):
            producer.produce(
                topic,
                value,
                on_delivery=lambda error, message: told.append(
                    (message.partition(), message.offset(), message.value())
                ),
            )
        receipt = producer.produce_many(topic, numbered(2000, 2000))
        producer.commit_transaction(DEADLINE_S)
        assert (receipt.acknowledged, receipt.failed) == (2000, 0)
        assert producer.flush(DEADLINE_S) == 0
    stored = [(record.partition(), record.offset(), record.value()) for record in kafka_cluster.records(topic)]
    assert Counter(value for _, _, value in stored) == Counter(numbered(0, 4000))
    assert len(told) == 2000
    assert set(told) <= set(stored)


def test_an_abort_hides_what_was_sent_and_drops_what_was_not(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic, 3)
    outcomes: list[KafkaError | None] = []
    with make(kafka_cluster, topic, linger_ms=600_000) as producer:
        producer.begin_transaction()
        producer.produce_many(topic, [b"sent, aborted"] * 3000)
        assert producer.flush(DEADLINE_S) == 0
        # Too little to fill a batch, so it waits for the end of the linger.
        dropped = producer.produce_many(topic, [b"never sent"] * 200)
        for _ in range(100):
            producer.produce(topic, b"never sent", on_delivery=lambda error, message: outcomes.append(error))
        producer.abort_transaction(DEADLINE_S)
        assert producer.flush(DEADLINE_S) == 0
        assert dropped.failed == 200
        assert {one.error.code() for one in dropped.errors} == {KafkaError._PURGE_QUEUE}
        assert [error.code() for error in outcomes] == [KafkaError._PURGE_QUEUE] * 100
        assert contents(kafka_cluster, topic) == Counter()
        assert contents(kafka_cluster, topic, committed=False) == {b"sent, aborted": 3000}

        producer.begin_transaction()
        producer.produce_many(topic, [b"committed"] * 3000)
        producer.commit_transaction(DEADLINE_S)
    assert committed(kafka_cluster, topic) == {b"committed": 3000}


def test_of_many_transactions_in_a_row_exactly_the_committed_ones_are_seen(
    kafka_cluster: KafkaCluster, topic: str
) -> None:
    kafka_cluster.create_topic(topic, 3)
    kept = 0
    with make(kafka_cluster, topic) as producer:
        for turn in range(40):
            producer.begin_transaction()
            if turn % 4 == 3:
                producer.commit_transaction(DEADLINE_S)  # an empty one is fine, too
                continue
            keep = turn % 2 == 0
            number = kept if keep else 1_000_000
            receipt = producer.produce_many(topic, numbered(number, 200), some_keys(number, 200))
            for value, key in zip(numbered(number + 200, 50), some_keys(number + 200, 50), strict=True):
                producer.produce(topic, value, key)
            if turn % 3 == 0:
                assert producer.flush(DEADLINE_S) == 0
            if keep:
                producer.commit_transaction(DEADLINE_S)
                assert receipt.acknowledged == 200
                kept += 250
            else:
                producer.abort_transaction(DEADLINE_S)
                assert receipt.done
    assert kept == 20 * 250
    found = checked(kafka_cluster, topic, kept, partition_of=java_partition(3))
    assert found.clean, str(found)


@pytest.mark.parametrize("linger", [5, 0])
def test_an_abort_right_after_produce_is_never_fatal(kafka_cluster: KafkaCluster, topic: str, linger: int) -> None:
    """On Kafka 4 an abort that overtakes records on their way is (librdkafka #4849); it took 11 to 563 rounds."""
    kafka_cluster.create_topic(topic, 6)
    source = random.Random(linger)
    wanted: Counter[bytes] = Counter()
    with make(kafka_cluster, topic, linger_ms=linger) as producer:
        for turn in range(600):
            producer.begin_transaction()
            values = [b"%d-%d" % (turn, number) for number in range(source.randint(0, 8))]
            for value in values:
                producer.produce(topic, value)
            time.sleep(source.choice([0, 0, 0.001, 0.004, 0.006]))
            if source.random() < 0.1:
                producer.commit_transaction(DEADLINE_S)
                wanted.update(values)
            else:
                producer.abort_transaction(DEADLINE_S)
    assert committed(kafka_cluster, topic) == wanted


def test_calls_in_the_wrong_order_are_refused(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic)
    config = {"bootstrap.servers": kafka_cluster.bootstrap_servers, "transactional.id": topic}
    with Producer(config) as producer:
        for prepared in (False, True):
            if prepared:
                producer.init_transactions(DEADLINE_S)
            assert refusal(producer.produce, topic, b"v").code() == KafkaError._STATE
            assert refusal(producer.produce_many, topic, [b"v"]).code() == KafkaError._STATE
            assert refusal(producer.produce_arrow, pa.table({"value": [b"v"]}), topic).code() == KafkaError._STATE
            assert producer.produce_batch(topic, [message := {"value": b"v"}]) == 0
            assert message["_error"].code() == KafkaError._STATE
            assert refusal(producer.commit_transaction, 5).code() == KafkaError._STATE
            assert refusal(producer.abort_transaction, 5).code() == KafkaError._STATE
            if not prepared:
                assert refusal(producer.begin_transaction).code() == KafkaError._STATE
        producer.begin_transaction()
        assert refusal(producer.begin_transaction).code() == KafkaError._STATE
        producer.produce(topic, b"in order")
        producer.commit_transaction(DEADLINE_S)
        assert refusal(producer.produce, topic, b"v").code() == KafkaError._STATE
    assert committed(kafka_cluster, topic) == {b"in order": 1}


# ---- other instances


@pytest.mark.parametrize("notices", ["at commit", "while producing"])
def test_a_newer_instance_fences_the_older_one(kafka_cluster: KafkaCluster, topic: str, notices: str) -> None:
    kafka_cluster.create_topic(topic, 3)
    errors: list[KafkaError] = []
    config = {
        "bootstrap.servers": kafka_cluster.bootstrap_servers,
        "transactional.id": topic,
        "log_level": 0,
        "error_cb": errors.append,
    }
    older = Producer(config)
    try:
        older.init_transactions(DEADLINE_S)
        older.begin_transaction()
        older.produce_many(topic, [b"of the older"] * 1000)
        assert older.flush(DEADLINE_S) == 0
        with make(kafka_cluster, topic) as newer:
            failed: list[KafkaError] = []
            if notices == "while producing":
                late = older.produce_many(topic, [b"of the older"] * 1000)
                older.produce(topic, b"of the older", on_delivery=lambda error, message: failed.append(error))
                assert older.flush(DEADLINE_S) == 0
                assert late.failed == 1000
                assert len(failed) == 1
                assert any(error.code() == KafkaError._FENCED and error.fatal() for error in errors)
            error = refusal(older.commit_transaction, DEADLINE_S)
            assert (error.code(), error.fatal()) == (KafkaError._FENCED, True), error
            assert refusal(older.abort_transaction, DEADLINE_S).fatal()
            newer.begin_transaction()
            newer.produce_many(topic, [b"of the newer"] * 1000)
            newer.commit_transaction(DEADLINE_S)
    finally:
        older.close(DEADLINE_S)
    assert committed(kafka_cluster, topic) == {b"of the newer": 1000}
    assert contents(kafka_cluster, topic, committed=False)[b"of the older"] == 1000  # else nothing was there to hide


def test_a_fenced_producer_can_be_closed(kafka_cluster: KafkaCluster, topic: str) -> None:
    """Without an error_cb, whatever runs callbacks raises fatal errors: also close(), which closes all the same."""
    kafka_cluster.create_topic(topic)
    older = make(kafka_cluster, topic)
    older.begin_transaction()
    older.produce(topic, b"of the older")
    assert older.flush(DEADLINE_S) == 0
    with make(kafka_cluster, topic):
        assert refusal(older.commit_transaction, DEADLINE_S).code() == KafkaError._FENCED
        with suppress(KafkaException):
            older.close(DEADLINE_S)
        with pytest.raises(RuntimeError, match="closed"):
            older.produce(topic, b"v")


UNFINISHED = """
import sys, time
from fastprod import Producer

servers, topic, count = sys.argv[1:]
config = {"bootstrap.servers": servers, "transactional.id": topic, "transaction.timeout.ms": 900_000, "log_level": 0}
producer = Producer(config)
producer.init_transactions(120)
producer.begin_transaction()
producer.produce_many(topic, [b"of the dead"] * int(count))
assert producer.flush(120) == 0
print("flushed", flush=True)
sys.stdin.readline()
producer.close(2)
print("closed", flush=True)
"""


@contextmanager
def unfinished(cluster: KafkaCluster, topic: str, count: int) -> Iterator[Program]:
    """Another process in the middle of a transaction whose records are all on the broker."""
    command = ["-c", UNFINISHED, cluster.bootstrap_servers, topic, str(count)]
    with started(*command, stdin=subprocess.PIPE, stderr=None) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "flushed\n"
        yield process


def test_a_killed_process_leaves_nothing_and_its_successor_goes_on_at_once(
    kafka_cluster: KafkaCluster, topic: str
) -> None:
    kafka_cluster.create_topic(topic, 3)
    with unfinished(kafka_cluster, topic, 10_000) as process:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert contents(kafka_cluster, topic, committed=False) == {b"of the dead": 10_000}
    assert contents(kafka_cluster, topic) == Counter()
    # The broker would give the dead one's transaction up after a quarter of an hour; nobody has to wait for that.
    with make(kafka_cluster, topic) as producer:
        producer.begin_transaction()
        producer.produce_many(topic, numbered(0, 1000), some_keys(0, 1000))
        producer.commit_transaction(DEADLINE_S)
    found = checked(kafka_cluster, topic, 1000, partition_of=java_partition(3))
    assert found.clean, str(found)


def test_close_keeps_its_timeout_though_a_transaction_is_open_and_no_broker_answers(
    kafka_cluster: KafkaCluster, topic: str
) -> None:
    kafka_cluster.create_topic(topic, 3)
    with unfinished(kafka_cluster, topic, 1000) as process:
        kafka_cluster.pause(1)
        try:
            assert process.communicate("\n", timeout=DEADLINE_S)[0] == "closed\n"
        finally:
            kafka_cluster.resume(1)
    assert contents(kafka_cluster, topic) == Counter()


# ---- consume, transform, produce


def test_offsets_and_output_are_committed_together(kafka_cluster: KafkaCluster, topic: str) -> None:
    count, partitions = 3000, 2
    source, target = f"{topic}-source", f"{topic}-target"
    kafka_cluster.create_topic(source, partitions)
    kafka_cluster.create_topic(target, 3)
    with Producer({"bootstrap.servers": kafka_cluster.bootstrap_servers}) as producer:
        producer.produce_many(source, numbered(0, count), some_keys(0, count))

    def committed_offsets(consumer: Consumer) -> dict[int, int]:
        wanted = [TopicPartition(source, number) for number in range(partitions)]
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                return {one.partition: max(one.offset, 0) for one in consumer.committed(wanted, DEADLINE_S)}
            except KafkaException:  # the first group of a cluster has no coordinator for a while
                assert time.monotonic() < deadline
                time.sleep(0.1)

    aborted = 0
    for life in range(2):  # the second pair goes on where the first left off, having lost its memory
        consumer = Consumer(
            {
                "bootstrap.servers": kafka_cluster.bootstrap_servers,
                "group.id": topic,
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "log_level": 0,
            }
        )
        producer = make(kafka_cluster, topic)
        try:
            start = committed_offsets(consumer)
            consumer.assign([TopicPartition(source, number, offset) for number, offset in start.items()])
            deadline = time.monotonic() + DEADLINE_S
            turns = 0
            while sum(committed_offsets(consumer).values()) < (count if life else count // 2):
                assert time.monotonic() < deadline, committed_offsets(consumer)
                messages = consumer.consume(200, 0.3)
                if not messages:
                    continue
                before = committed_offsets(consumer)
                producer.begin_transaction()
                producer.produce_many(
                    target, [message.value() for message in messages], [message.key() for message in messages]
                )
                positions = consumer.position(consumer.assignment())
                producer.send_offsets_to_transaction(
                    [one for one in positions if one.offset >= 0], consumer.consumer_group_metadata(), DEADLINE_S
                )
                turns += 1
                if turns % 3 == 0:
                    if turns % 2:
                        assert producer.flush(DEADLINE_S) == 0  # the output is on the broker and has to be hidden
                    producer.abort_transaction(DEADLINE_S)
                    aborted += 1
                    assert committed_offsets(consumer) == before
                    for number, offset in before.items():
                        consumer.seek(TopicPartition(source, number, offset))
                else:
                    producer.commit_transaction(DEADLINE_S)
                    after = {one.partition: one.offset for one in positions if one.offset >= 0}
                    assert committed_offsets(consumer) == before | after
        finally:
            producer.close(DEADLINE_S)
            consumer.close()
    assert aborted > 2
    assert sum(contents(kafka_cluster, target, committed=False).values()) > count
    # Numbers rise per key only: the consumer takes turns between the source's partitions.
    found = checked(kafka_cluster, target, count, partition_of=java_partition(3), order="key")
    assert found.clean, str(found)


# ---- records that fail


def test_a_record_that_the_broker_refuses_fails_the_transaction(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic, 1, config={"max.message.bytes": 20_000})
    failed: list[tuple[KafkaError, bytes]] = []

    def note(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failed.append((error, message.value()))

    with make(kafka_cluster, topic) as producer:
        producer.begin_transaction()
        producer.produce_many(topic, [b"of the first"] * 100)
        assert producer.flush(DEADLINE_S) == 0
        producer.produce(topic, b"x" * 50_000, on_delivery=note)
        error = refusal(producer.commit_transaction, DEADLINE_S)
        assert error.txn_requires_abort()
        assert not error.fatal()
        assert "too large" in error.str()
        assert [(error.code(), value) for error, value in failed] == [(KafkaError.MSG_SIZE_TOO_LARGE, b"x" * 50_000)]
        # A second attempt must not commit what is left.
        assert refusal(producer.commit_transaction, DEADLINE_S).txn_requires_abort()
        producer.abort_transaction(DEADLINE_S)
        assert contents(kafka_cluster, topic) == Counter()
        assert contents(kafka_cluster, topic, committed=False) == {b"of the first": 100}
        # librdkafka 2.16 stumbles over the failed record's sequence number once more and wants another abort.
        attempts = commit_in_spite_of_everything(
            producer, lambda: producer.produce_many(topic, [b"of the second"] * 100)
        )
        assert attempts <= 2
    assert committed(kafka_cluster, topic) == {b"of the second": 100}


def test_a_record_that_a_bulk_call_refuses_fails_the_transaction(kafka_cluster: KafkaCluster, topic: str) -> None:
    """Nothing is raised for it, so a commit would be a transaction with a hole that nobody asked for."""
    kafka_cluster.create_topic(topic, 1)
    with make(kafka_cluster, topic) as producer:
        producer.begin_transaction()
        receipt = producer.produce_many(topic, [b"good", b"x" * 2_000_000, b"good"])
        assert receipt.failed == 1
        error = refusal(producer.commit_transaction, DEADLINE_S)
        assert error.txn_requires_abort()
        producer.abort_transaction(DEADLINE_S)
        producer.begin_transaction()
        producer.produce_many(topic, [b"good"] * 2)
        producer.commit_transaction(DEADLINE_S)
    assert committed(kafka_cluster, topic) == {b"good": 2}


def test_a_record_without_a_topic_fails_the_transaction(kafka_cluster: KafkaCluster, topic: str) -> None:
    """It fails before librdkafka has seen it."""
    kafka_cluster.create_topic(topic, 1)
    with make(kafka_cluster, topic, topic_metadata_propagation_max_ms=300) as producer:
        producer.begin_transaction()
        producer.produce_many(topic, [b"good"] * 10)
        producer.produce(f"{topic}-missing", b"v")
        error = refusal(producer.commit_transaction, DEADLINE_S)
        assert error.txn_requires_abort()
        assert "topic" in error.str().lower()
        producer.abort_transaction(DEADLINE_S)
        producer.begin_transaction()
        producer.produce_many(topic, [b"committed"] * 10)
        producer.commit_transaction(DEADLINE_S)
    assert committed(kafka_cluster, topic) == {b"committed": 10}


# ---- brokers


def test_a_transaction_that_takes_too_long_is_ended_by_the_broker(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic, 1)
    limits = {"transaction_timeout_ms": 1000, "message_timeout_ms": 1000}
    slow = make(kafka_cluster, topic, **limits)
    try:
        slow.begin_transaction()
        slow.produce_many(topic, [b"too slow"] * 100)
        assert slow.flush(DEADLINE_S) == 0
        deadline = time.monotonic() + DEADLINE_S
        # The broker looks every 10 s. Until then committed data ends where the open transaction begins.
        while kafka_cluster.watermarks(topic)[0][1] < 100:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        error = refusal(slow.commit_transaction, DEADLINE_S)
        assert error.fatal() or error.txn_requires_abort(), error
        assert error.code() in (KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.INVALID_TXN_STATE)
        with make(kafka_cluster, topic, **limits) as successor:
            successor.begin_transaction()
            successor.produce_many(topic, [b"in time"] * 100)
            successor.commit_transaction(DEADLINE_S)
    finally:
        with suppress(KafkaException):  # no error_cb: the fatal error is raised here as well
            slow.close(DEADLINE_S)
    assert committed(kafka_cluster, topic) == {b"in time": 100}
    assert contents(kafka_cluster, topic, committed=False) == {b"too slow": 100, b"in time": 100}


def coordinated_by(cluster: KafkaCluster, broker: int, name: str) -> str:
    """A transactional id whose coordinator is a certain broker."""
    state = "__transaction_state"
    with make(cluster, name):  # the topic exists from the first use on
        cluster.wait_in_sync(state)
    leaders = [cluster.leader_of(state, partition) for partition in range(len(cluster.watermarks(state)))]
    for number in range(1000):
        candidate = f"{name}-{number}"
        code = 0
        for letter in candidate:  # Java's String.hashCode
            code = (31 * code + ord(letter)) & 0xFFFFFFFF
        if leaders[(code & 0x7FFFFFFF) % len(leaders)] == broker:
            return candidate
    raise AssertionError(f"broker {broker} coordinates nobody: {leaders}")


def test_a_broker_that_dies_during_a_transaction_tears_nothing_apart(three_brokers: KafkaCluster, topic: str) -> None:
    """The broker leads a third of the partitions and is the transaction's coordinator as well."""
    victim, third = 1, 10_000
    three_brokers.create_topic(topic, 6)
    outage: list[str] = ["to come"]
    with make(three_brokers, coordinated_by(three_brokers, victim, topic)) as producer:

        def send() -> None:
            for part in range(3):
                producer.produce_many(topic, numbered(part * third, third, 100), some_keys(part * third, third))
                if part == 0 and outage == ["to come"]:
                    assert producer.flush(DEADLINE_S) == 0
                    three_brokers.kill(victim)
                    outage.append("now")
                if part == 1 and outage[-1] == "now":
                    three_brokers.restart(victim)
                    outage.append("over")

        commit_in_spite_of_everything(producer, send)
        producer.begin_transaction()
        producer.produce_many(topic, [b"aborted"] * 100)
        producer.abort_transaction(DEADLINE_S)
    assert outage == ["to come", "now", "over"]
    found = checked(three_brokers, topic, 3 * third, partition_of=java_partition(6))
    assert found.clean, str(found)
