"""Topics that come late, grow, vanish or set limits: what becomes of the records, on a real broker."""

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Message
from confluent_kafka.admin import AdminClient, NewPartitions
from programs import wait_until
from reference import java_partition

from fastprod import Producer
from fastprod.receipt import FailedRecord
from fastprod.testing import KafkaCluster, audit
from fastprod.testing._audit import leading_number

DEADLINE_S = 120  # for what takes a second or two on a quiet machine
GONE = {KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART}


def numbered(first: int, count: int, size: int = 0) -> list[bytes]:
    return [b"%d " % number + b"x" * size for number in range(first, first + count)]


def some_keys(first: int, count: int) -> list[bytes]:
    return [b"key-%d" % (number % 997) for number in range(first, first + count)]


def settings(cluster: KafkaCluster, **more: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": cluster.bootstrap_servers,
        "log_level": 0,
        **{name.replace("_", "."): value for name, value in more.items()},
    }


def codes(failed: list[FailedRecord]) -> Counter[int]:
    """How often each error code is among the failures of a receipt."""
    return Counter(
        one.error.args[0].code() if isinstance(one.error, KafkaException) else one.error.code() for one in failed
    )


class Outcomes:
    """An on_delivery callback that keeps what it is told."""

    def __init__(self) -> None:
        self.delivered: list[tuple[int, bytes]] = []  # partition, value
        self.failed: list[tuple[KafkaError, str, bytes]] = []  # error, topic, value
        self.failed_partitions: list[int | None] = []

    def __call__(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self.delivered.append((message.partition(), message.value()))
        else:
            self.failed.append((error, message.topic(), message.value()))
            self.failed_partitions.append(message.partition())

    def __len__(self) -> int:
        return len(self.delivered) + len(self.failed)


def eventually(attempt: Callable[[], object], what: str, timeout: float = DEADLINE_S) -> None:
    """Try until it comes true."""
    deadline = time.monotonic() + timeout
    while not attempt():
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain for {what}"
        time.sleep(0.05)


@pytest.fixture
def admin(kafka_cluster: KafkaCluster) -> AdminClient:
    return AdminClient({"bootstrap.servers": kafka_cluster.bootstrap_servers, "log_level": 0})


# ---- created late


@pytest.mark.parametrize("partitioner", ["uniform", "murmur2_random"])
def test_records_for_a_topic_that_comes_later_wait_for_it(
    kafka_cluster: KafkaCluster, topic: str, partitioner: str
) -> None:
    count = 5000
    outcomes = Outcomes()
    names = {kind: f"{topic}-{kind}" for kind in ("single-keyed", "single-keyless", "bulk-keyed", "bulk-keyless")}
    values, keys = numbered(0, count), some_keys(0, count)
    patience = {"partitioner": partitioner, "topic_metadata_propagation_max_ms": 600_000}
    with Producer(settings(kafka_cluster, **patience)) as producer:
        for value, key in zip(values, keys, strict=True):
            producer.produce(names["single-keyed"], value, key, on_delivery=outcomes)
            producer.produce(names["single-keyless"], value, on_delivery=outcomes)
        receipts = [
            producer.produce_many(names["bulk-keyed"], values, keys),
            producer.produce_many(names["bulk-keyless"], values),
        ]
        # Long enough for several answers that there is no such topic.
        assert producer.flush(2) == 4 * count
        assert len(outcomes) == 0
        for name in names.values():
            kafka_cluster.create_topic(name, 5)
        assert producer.flush(DEADLINE_S) == 0
        assert [receipt.failed for receipt in receipts] == [0, 0]
        assert (len(outcomes.delivered), len(outcomes.failed)) == (2 * count, 0)
    for kind, name in names.items():
        placed = java_partition(5) if kind.endswith("-keyed") else None
        found = audit(kafka_cluster.bootstrap_servers, name, count, partition_of=placed)
        assert found.clean, f"{kind}: {found}"


def test_a_topic_that_comes_too_late_fails_what_waited_but_takes_what_follows(
    kafka_cluster: KafkaCluster, topic: str
) -> None:
    outcomes = Outcomes()
    with Producer(settings(kafka_cluster, topic_metadata_propagation_max_ms=500)) as producer:
        producer.produce(topic, b"early", on_delivery=outcomes)
        receipt = producer.produce_many(topic, [b"early"] * 100)
        assert producer.flush(DEADLINE_S) == 0
        assert codes(receipt.errors) == {KafkaError._UNKNOWN_TOPIC: 100}
        assert [(error.code(), name) for error, name, _ in outcomes.failed] == [(KafkaError._UNKNOWN_TOPIC, topic)]
        kafka_cluster.create_topic(topic, 3)

        def accepted() -> bool:
            probe = producer.produce_many(topic, [b"probe"])
            probe.wait(DEADLINE_S)
            return probe.acknowledged == 1

        eventually(accepted, "the topic to be usable")
        receipt = producer.produce_many(topic, numbered(0, 1000))
        assert producer.flush(DEADLINE_S) == 0
        assert receipt.failed == 0, receipt.errors[:3]
    stored = Counter(record.value() for record in kafka_cluster.records(topic))
    assert stored == Counter([b"probe", *numbered(0, 1000)])


# ---- partitions added


def test_added_partitions_are_used_and_keys_move_to_javas_new_place_at_one_moment(
    kafka_cluster: KafkaCluster, topic: str, admin: AdminClient
) -> None:
    old, new = 3, 8
    keyed, keyless = f"{topic}-keyed", f"{topic}-keyless"
    for name in (keyed, keyless):
        kafka_cluster.create_topic(name, old)
    outcomes = {keyed: Outcomes(), keyless: Outcomes()}
    sent = 0
    with Producer(settings(kafka_cluster, topic_metadata_refresh_interval_ms=200)) as producer:

        def send(count: int) -> None:
            nonlocal sent
            for value, key in zip(numbered(sent, count, 100), some_keys(sent, count), strict=True):
                producer.produce(keyed, value, key, on_delivery=outcomes[keyed])
                producer.produce(keyless, value, on_delivery=outcomes[keyless])
            sent += count
            producer.poll(0)

        send(5000)
        assert producer.flush(DEADLINE_S) == 0  # by now the producer knows the old count
        for change in admin.create_partitions([NewPartitions(keyed, new), NewPartitions(keyless, new)]).values():
            change.result(DEADLINE_S)

        def learned() -> bool:
            send(100)
            return all(any(partition >= old for partition, _ in one.delivered) for one in outcomes.values())

        eventually(learned, "the producer to use the new partitions")
        last_phase = sent
        send(20_000)
        assert producer.flush(DEADLINE_S) == 0
    for name in (keyed, keyless):
        assert (len(outcomes[name].delivered), len(outcomes[name].failed)) == (sent, 0)
        found = audit(kafka_cluster.bootstrap_servers, name, sent)
        # With other partitions, a key's older records are elsewhere; within one partition order holds.
        assert found.clean, f"{name}: {found}"

    before, after = java_partition(old), java_partition(new)
    by_old, by_new = [], []
    for record in kafka_cluster.records(keyed):
        number = leading_number(record)
        places = before(record.key()), after(record.key())
        assert record.partition() in places
        if places[0] != places[1]:
            (by_old if record.partition() == places[0] else by_new).append(number)
    assert min(by_old) < 5000  # else nothing was produced before the change
    assert max(by_old) < min(by_new) <= last_phase

    late = Counter(
        record.partition() for record in kafka_cluster.records(keyless) if leading_number(record) >= last_phase
    )
    assert set(late) == set(range(new))
    assert max(late.values()) < 2 * min(late.values()), late


def test_an_explicit_partition_is_found_soon_after_it_was_added(
    kafka_cluster: KafkaCluster, topic: str, admin: AdminClient
) -> None:
    """Asking for it makes the producer look, as in Java; the next periodic look may be five minutes away."""
    kafka_cluster.create_topic(topic, 1)
    with Producer(settings(kafka_cluster)) as producer:
        assert producer.produce_many(topic, [b"old"], partitions=0).wait(DEADLINE_S)
        admin.create_partitions([NewPartitions(topic, 2)])[topic].result(DEADLINE_S)

        def accepted() -> bool:
            receipt = producer.produce_many(topic, [b"new"], partitions=1)
            receipt.wait(DEADLINE_S)
            return receipt.failed == 0

        eventually(accepted, "partition 1 to be known", 30)
    assert [(record.partition(), record.value()) for record in kafka_cluster.records(topic)] == [
        (0, b"old"),
        (1, b"new"),
    ]


# ---- deleted


def test_a_deleted_topic_fails_its_records_by_name_and_nothing_else(
    kafka_cluster: KafkaCluster, topic: str, admin: AdminClient
) -> None:
    other = f"{topic}-other"
    kafka_cluster.create_topic(topic, 3)
    kafka_cluster.create_topic(other, 3)
    outcomes, receipts, produced = Outcomes(), [], 0
    with Producer(settings(kafka_cluster, topic_metadata_propagation_max_ms=1000)) as producer:

        def send() -> None:
            nonlocal produced
            for value, key in zip(numbered(produced, 100), some_keys(produced, 100), strict=True):
                producer.produce(topic, value, key, on_delivery=outcomes)
            receipts.append(producer.produce_many(topic, numbered(produced, 100)))
            receipts.append(producer.produce_many(other, numbered(produced, 100)))
            produced += 100
            producer.poll(0.01)

        while not outcomes.delivered:
            send()
        admin.delete_topics([topic])[topic].result(DEADLINE_S)

        def noticed() -> bool:
            send()
            return bool(outcomes.failed)

        eventually(noticed, "records of the deleted topic to fail")
        send()
        assert producer.flush(DEADLINE_S) == 0
        assert len(outcomes) == produced
        assert {error.code() for error, _, _ in outcomes.failed} <= GONE
        assert {name for _, name, _ in outcomes.failed} == {topic}
        assert all(receipt.done for receipt in receipts)
        failed = [one for receipt in receipts for one in receipt.errors]
        assert set(codes(failed)) <= GONE
        assert {one.record.topic for one in failed} == {topic}

        # A new topic of that name is as good as any, for records produced once it is there.
        kafka_cluster.create_topic(topic, 3)

        def accepted() -> bool:
            probe = producer.produce_many(topic, [b"probe"])
            probe.wait(DEADLINE_S)
            return probe.acknowledged == 1

        eventually(accepted, "the new topic to be usable")
        receipt = producer.produce_many(topic, numbered(0, 3000), some_keys(0, 3000))
        assert producer.flush(DEADLINE_S) == 0
        assert receipt.failed == 0, receipt.errors[:3]
    found = audit(kafka_cluster.bootstrap_servers, other, produced)
    assert found.clean, str(found)
    stored = [record for record in kafka_cluster.records(topic) if record.value() != b"probe"]
    assert sorted(record.value() for record in stored) == sorted(numbered(0, 3000))
    assert all(record.partition() == java_partition(3)(record.key()) for record in stored)


@pytest.mark.parametrize(("before", "after"), [(5, 2), (2, 5)])
def test_a_topic_made_anew_with_another_partition_count_is_noticed(
    kafka_cluster: KafkaCluster, topic: str, admin: AdminClient, before: int, after: int
) -> None:
    """Within seconds: the next periodic look at the metadata may be five minutes away."""
    kafka_cluster.create_topic(topic, before)
    keys = some_keys(0, 500)
    with Producer(settings(kafka_cluster, topic_metadata_propagation_max_ms=1000)) as producer:
        receipt = producer.produce_many(topic, keys, keys)
        assert producer.flush(DEADLINE_S) == 0
        assert receipt.failed == 0
        admin.delete_topics([topic])[topic].result(DEADLINE_S)

        def refused() -> bool:
            receipt = producer.produce_many(topic, [b"into the void"])
            receipt.wait(DEADLINE_S)
            return receipt.failed == 1

        eventually(refused, "the producer to notice that the topic is gone")
        kafka_cluster.create_topic(topic, after)

        def settled() -> bool:
            receipt = producer.produce_many(topic, keys, keys)
            receipt.wait(DEADLINE_S)
            return receipt.failed == 0 and set(receipt.offsets) == set(range(after))

        eventually(settled, f"records to go to {after} partitions instead of {before}", 30)
        receipt = producer.produce_many(topic, numbered(0, 2000), some_keys(0, 2000))
        assert producer.flush(DEADLINE_S) == 0
        assert receipt.failed == 0, receipt.errors[:3]
    place = java_partition(after)
    stored = [record for record in kafka_cluster.records(topic) if b" " in record.value()]
    stored = [record for record in stored if record.value() != b"into the void"]
    assert len(stored) == 2000
    assert all(record.partition() == place(record.key()) for record in stored)


# ---- limits of the topic


@pytest.mark.parametrize("idempotent", [True, False])
def test_small_records_are_delivered_to_a_topic_of_small_batches_if_batch_size_fits(
    kafka_cluster: KafkaCluster, topic: str, idempotent: bool
) -> None:
    """The topic's max.message.bytes holds for a whole batch, and librdkafka's batches are 1 MB unless told otherwise.

    It fails a refused batch with all its records, where Java splits it; docs/producing.md says what to set.
    """
    count = 20_000
    single, bulk = f"{topic}-single", f"{topic}-bulk"
    for name in (single, bulk):
        kafka_cluster.create_topic(name, 2, config={"max.message.bytes": 100_000})
    outcomes = Outcomes()
    with Producer(settings(kafka_cluster, enable_idempotence=idempotent, batch_size=90_000)) as producer:
        receipt = producer.produce_many(bulk, numbered(0, count, 100), some_keys(0, count))
        for value, key in zip(numbered(0, count, 100), some_keys(0, count), strict=True):
            producer.produce(single, value, key, on_delivery=outcomes)
        assert producer.flush(DEADLINE_S) == 0
        assert receipt.failed == 0, codes(receipt.errors)
        assert not outcomes.failed, outcomes.failed[0]
    for name in (single, bulk):
        found = audit(kafka_cluster.bootstrap_servers, name, count, partition_of=java_partition(2))
        assert found.clean, f"{name}: {found}"


def test_a_record_too_large_for_the_topic_fails_alone(kafka_cluster: KafkaCluster, topic: str) -> None:
    single, bulk = f"{topic}-single", f"{topic}-bulk"
    for name in (single, bulk):
        kafka_cluster.create_topic(name, 2, config={"max.message.bytes": 20_000})
    large = {50, 51, 730, 999}
    values = [b"%d " % number + b"x" * (30_000 if number in large else 50) for number in range(1000)]
    outcomes = Outcomes()
    with Producer(settings(kafka_cluster, batch_size=19_000)) as producer:
        receipt = producer.produce_many(bulk, values)
        for value in values:
            producer.produce(single, value, on_delivery=outcomes)
        assert producer.flush(DEADLINE_S) == 0
        assert codes(receipt.errors) == {KafkaError.MSG_SIZE_TOO_LARGE: len(large)}
        assert {one.index for one in receipt.errors} == large
        assert {error.code() for error, _, _ in outcomes.failed} == {KafkaError.MSG_SIZE_TOO_LARGE}
        assert {int(value.split()[0]) for _, _, value in outcomes.failed} == large
    for name in (single, bulk):
        assert sorted(map(leading_number, kafka_cluster.records(name))) == sorted(set(range(1000)) - large)


def test_a_record_too_large_for_the_topic_is_named_when_it_goes_alone(kafka_cluster: KafkaCluster, topic: str) -> None:
    kafka_cluster.create_topic(topic, 1, config={"max.message.bytes": 20_000})
    with Producer(settings(kafka_cluster)) as producer:
        for value, wanted in ((b"before", 0), (b"x" * 30_000, 1), (b"after", 0)):
            receipt = producer.produce_many(topic, [value])
            assert receipt.wait(DEADLINE_S)
            assert codes(receipt.errors) == ({KafkaError.MSG_SIZE_TOO_LARGE: 1} if wanted else {})
    assert [record.value() for record in kafka_cluster.records(topic)] == [b"before", b"after"]


def test_timestamps_that_the_topic_refuses_are_named(kafka_cluster: KafkaCluster, topic: str) -> None:
    limits = {"message.timestamp.after.max.ms": 3_600_000, "message.timestamp.before.max.ms": 3_600_000}
    kafka_cluster.create_topic(topic, 1, config=limits)
    now, day = int(time.time() * 1000), 86_400_000
    stamps = [now, now + day, now, now - day, now]
    outcomes = Outcomes()
    with Producer(settings(kafka_cluster)) as producer:
        # One by one: a broker refuses a batch as a whole, so neighbours of a bad record fail with it (in Java, too).
        for number, stamp in enumerate(stamps):
            producer.produce(topic, b"%d" % number, timestamp=stamp, on_delivery=outcomes)
            assert producer.flush(DEADLINE_S) == 0
        assert [(error.code(), value) for error, _, value in outcomes.failed] == [
            (KafkaError.INVALID_TIMESTAMP, b"1"),
            (KafkaError.INVALID_TIMESTAMP, b"3"),
        ]
        receipt = producer.produce_many(topic, [b"good", b"bad", b"good"], timestamps=[now, now + day, now])
        assert receipt.wait(DEADLINE_S)
        failed = {one.index: one.error.code() for one in receipt.errors}
        assert failed[1] in (KafkaError.INVALID_TIMESTAMP, KafkaError.INVALID_RECORD)
        assert set(failed.values()) - {failed[1]} <= {KafkaError._INVALID_DIFFERENT_RECORD}
        assert producer.produce_many(topic, [b"good"], timestamps=now).wait(DEADLINE_S)
    stored = [record.value() for record in kafka_cluster.records(topic)]
    assert stored[:3] == [b"0", b"2", b"4"]
    assert b"bad" not in stored
    assert stored[-1] == b"good"


# ---- wrong addresses


@pytest.mark.parametrize("name", ["no spaces please", "x" * 250, "naïve", ".."])
def test_a_name_that_no_topic_can_have_fails_at_once(kafka_cluster: KafkaCluster, topic: str, name: str) -> None:
    kafka_cluster.create_topic(topic, 1)
    outcomes = Outcomes()
    # Not only when topic.metadata.propagation.max.ms is over.
    with Producer(settings(kafka_cluster, topic_metadata_propagation_max_ms=900_000)) as producer:
        producer.produce(name, b"v", on_delivery=outcomes)
        receipt = producer.produce_many(name, [b"v"] * 3)
        neighbour = producer.produce_many(topic, [b"v"])
        assert producer.flush(DEADLINE_S) == 0
        assert [(error.code(), name) for error, name, _ in outcomes.failed] == [(KafkaError.TOPIC_EXCEPTION, name)]
        assert codes(receipt.errors) == {KafkaError.TOPIC_EXCEPTION: 3}
        assert neighbour.acknowledged == 1


@pytest.mark.parametrize("metadata", ["unknown", "known"])
def test_a_partition_that_does_not_exist_fails_only_its_records(
    kafka_cluster: KafkaCluster, topic: str, metadata: str
) -> None:
    kafka_cluster.create_topic(topic, 3)
    outcomes = Outcomes()
    refused = []
    with Producer(settings(kafka_cluster)) as producer:
        if metadata == "known":
            producer.produce_many(topic, [b"first"]).wait(DEADLINE_S)
        try:
            producer.produce(topic, b"single", partition=99, on_delivery=outcomes)
        except KafkaException as error:  # the earliest moment to tell
            refused.append(error.args[0])
        receipt = producer.produce_many(topic, [b"a", b"b", b"c"], partitions=[0, 99, 2])
        assert producer.flush(DEADLINE_S) == 0
        refused += [error for error, _, _ in outcomes.failed]
        assert [error.code() for error in refused] == [KafkaError._UNKNOWN_PARTITION]
        assert outcomes.failed_partitions in ([], [99])  # whoever is called back is told which one
        assert codes(receipt.errors) == {KafkaError._UNKNOWN_PARTITION: 1}
        assert receipt.errors[0].index == 1
        assert receipt.errors[0].record.partition == 99
    stored = {(record.partition(), record.value()) for record in kafka_cluster.records(topic)}
    assert {(0, b"a"), (2, b"c")} <= stored
    assert {value for _, value in stored} <= {b"a", b"c", b"first"}


# ---- acknowledgements and back-pressure


@pytest.mark.parametrize("acks", ["0", "1"])
def test_fewer_acknowledgements_lose_nothing_on_a_healthy_broker(
    kafka_cluster: KafkaCluster, topic: str, acks: str
) -> None:
    count = 20_000
    kafka_cluster.create_topic(topic, 3)
    with Producer(settings(kafka_cluster, acks=acks)) as producer:
        receipt = producer.produce_many(topic, numbered(0, count), some_keys(0, count))
        assert producer.flush(DEADLINE_S) == 0
        assert (receipt.acknowledged, receipt.failed) == (count, 0)
        extents = {partition: tuple(extent) for (_, partition), extent in receipt.extents.items()}
    if acks == "0":  # the last requests may still be on their way

        def arrived() -> bool:
            return sum(high for _, high in kafka_cluster.watermarks(topic).values()) == count

        eventually(arrived, "the broker to have taken everything")
    found = audit(kafka_cluster.bootstrap_servers, topic, count, partition_of=java_partition(3))
    assert found.clean, str(found)
    for partition, stored in found.partitions.items():
        ends = (None, None) if acks == "0" else (0, stored - 1)  # who asks for no answer is told no offsets
        assert extents[partition] == (stored, *ends)


def test_a_throttled_client_delivers_everything_and_is_told(kafka_cluster: KafkaCluster, topic: str) -> None:
    # Kafka looks at the mean of the last 10 s: 2.5 MB pass freely, the rest makes the broker hold back its answers.
    rate, size, count = 250_000, 100, 24_000
    kafka_cluster.create_topic(topic, 3)
    kafka_cluster.run_tool(
        "kafka.admin.ConfigCommand",
        *("--bootstrap-server", kafka_cluster.bootstrap_servers, "--alter"),
        *("--add-config", f"producer_byte_rate={rate}", "--entity-type", "clients", "--entity-name", topic),
    )
    events: list[Any] = []
    config = settings(kafka_cluster, client_id=topic, batch_size=50_000) | {"throttle_cb": events.append}
    with Producer(config) as producer:
        receipt = producer.produce_many(topic, numbered(0, count, size), some_keys(0, count))
        assert producer.flush(DEADLINE_S) == 0
        assert receipt.failed == 0

        def told() -> bool:
            producer.poll(0.05)
            return any(event.throttle_time > 0 for event in events)

        eventually(told, "throttle_cb")
    assert {event.broker_id for event in events} <= {1}
    # Seconds, as in confluent-kafka: brokers tell milliseconds, which are hardly ever whole seconds.
    assert any(event.throttle_time % 1 for event in events), [event.throttle_time for event in events]
    found = audit(kafka_cluster.bootstrap_servers, topic, count, partition_of=java_partition(3))
    assert found.clean, str(found)


def replicas_in_sync(cluster: KafkaCluster, topic: str) -> set[int]:
    found = AdminClient({"bootstrap.servers": cluster.bootstrap_servers}).list_topics(topic, timeout=DEADLINE_S)
    return {len(place.isrs) for place in found.topics[topic].partitions.values()}


def test_too_few_replicas_make_records_wait_or_time_out(three_brokers: KafkaCluster, topic: str) -> None:
    count = 5000
    three_brokers.create_topic(topic, 3, config={"min.insync.replicas": 3})
    with (
        Producer(settings(three_brokers)) as patient,
        Producer(settings(three_brokers, message_timeout_ms=10_000)) as hasty,
    ):
        for producer in (patient, hasty):
            assert producer.produce_many(topic, [b"warm-up"] * 30, partitions=[0, 1, 2] * 10).wait(DEADLINE_S)
        three_brokers.stop(3)
        try:
            # Until the leaders know it, they store records and say afterwards that these are on too few replicas.
            assert wait_until(lambda: replicas_in_sync(three_brokers, topic) == {2})
            outcomes = Outcomes()
            for value, key in zip(numbered(0, 100), some_keys(0, 100), strict=True):
                hasty.produce(topic, b"hasty " + value, key, on_delivery=outcomes)
            failing = hasty.produce_many(topic, [b"hasty"] * 100)
            waiting = patient.produce_many(topic, numbered(0, count), some_keys(0, count))
            assert hasty.flush(DEADLINE_S) == 0
            useful = {KafkaError._MSG_TIMED_OUT, KafkaError.NOT_ENOUGH_REPLICAS}
            assert (len(outcomes.failed), failing.failed) == (100, 100)
            assert {error.code() for error, _, _ in outcomes.failed} | set(codes(failing.errors)) <= useful
            assert waiting.acknowledged == 0
            assert waiting.failed == 0
        finally:
            three_brokers.restart(3)
        assert patient.flush(DEADLINE_S) == 0
        assert (waiting.acknowledged, waiting.failed) == (count, 0)

    def number(record: Message) -> int:
        return -1 if record.value() in (b"warm-up", b"hasty") else leading_number(record)

    found = audit(three_brokers.bootstrap_servers, topic, count, number_of=number, partition_of=java_partition(3))
    assert (found.lost, found.doubled, found.reordered, found.misplaced) == (0, 0, 0, 0), str(found)
    # What the hasty one was told had failed is not there either: the brokers refused it before storing it.
    assert found.alien == 60, str(found)
