"""Small facts that Kafka keeps for us in the committed offsets of consumer groups.

    Spark, exactly once     a marker per job and per partition: partition 0 of a topic, in a group that nobody joins
    producer groups         the restart position of source partition p: partition p of the group's coordination topic

Each is a short JSON document in the metadata of an offset. It is written inside a transaction, so it becomes visible
together with the transaction's records or not at all. Brokers forget it `offsets.retention.minutes` after the group was
last alive (7 days unless changed), and when the topic is deleted.

A JSON document says itself where it ends. What follows is dropped: other clients were seen to leave garbage there.
"""

from __future__ import annotations

import json
import struct
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic  # type: ignore[attr-defined]

from fastprod import _config
from fastprod.producer import Producer

__all__ = [
    "LONGEST",
    "Member",
    "client_options",
    "committed",
    "decoded",
    "encoded",
    "end",
    "groups",
    "has_place",
    "is_passing",
    "make_place",
    "member_of",
    "other_places",
    "patiently",
    "read_marker",
    "reader",
    "retention_s",
    "write_marker",
]

ANSWER_S = 60.0
CLOSE_S = 5.0  # for a producer to end; brokers that do not answer must not keep whoever has failed
FLIGHT_S = 2.0  # for records on their way, before that
LONGEST = 4095  # characters of metadata that every broker takes, unless offset.metadata.max.bytes is set lower
PASSING = (  # while coordinators are made, move or settle a transaction; librdkafka does not call these retriable
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
)


def other_places(config: Mapping[str, Any], group: str, topic: str) -> list[str]:
    """Topics other than this one that hold a marker of the group."""
    # Listing a group's offsets crashes librdkafka 2.16 when a coordinator moves meanwhile, so only where there are any.
    if group not in (groups(config) or []):
        return []
    admin = AdminClient(client_options(config))
    asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)], request_timeout=ANSWER_S)
    found = asked[group].result().topic_partitions
    return sorted({place.topic for place in found if place.offset >= 0 and place.topic != topic})


def groups(config: Mapping[str, Any]) -> list[str] | None:
    """The names of all groups; None from librdkafka's mock brokers, which keep no markers either.

    Raises while a broker cannot tell its own: "not known" is not the same as "none".
    """
    admin = AdminClient(client_options(config))
    found: list[str] | None = None

    def ask() -> None:
        nonlocal found
        listed = admin.list_consumer_groups(request_timeout=ANSWER_S).result()
        for problem in listed.errors:
            if listed.valid or problem.code() != KafkaError._UNSUPPORTED_FEATURE:
                raise KafkaException(problem)
        found = None if listed.errors else [one.group_id for one in listed.valid]

    patiently(ask)
    return found


def retention_s(config: Mapping[str, Any]) -> float | None:
    """For how long brokers keep a marker, if they tell this client."""
    admin = AdminClient(client_options(config))
    try:
        broker = ConfigResource(ConfigResource.Type.BROKER, str(min(admin.list_topics(timeout=ANSWER_S).brokers)))
        told = admin.describe_configs([broker], request_timeout=ANSWER_S)[broker].result()
        minutes = float(told["offsets.retention.minutes"].value)
    except (KafkaException, KeyError, TypeError, ValueError):
        return None
    return 60.0 * minutes if minutes > 0 else None


def client_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a producer's configuration any other client of librdkafka understands."""
    _, native = _config.split(dict(config), plugin="")
    del native["plugin.library.paths"]
    return {**native, "log_level": 0}


@contextmanager
def reader(config: Mapping[str, Any], group: str) -> Iterator[Consumer]:
    """A consumer of the group that holds a marker; it never joins it.

    Not the admin client: that of librdkafka 2.16 crashes when a coordinator moves while it lists a group's offsets.
    """
    own = {"group.id": group, "isolation.level": "read_committed", "enable.auto.commit": False}
    consumer = Consumer({**client_options(config), **own})
    try:
        yield consumer
    finally:
        consumer.close()


def has_place(consumer: Consumer, topic: str) -> bool:
    """Whether there is a topic of that name."""
    return consumer.list_topics(topic, timeout=ANSWER_S).topics[topic].error is None


def make_place(
    config: Mapping[str, Any],
    consumer: Consumer,
    topic: str,
    partitions: int = 1,
    settings: Mapping[str, str] | None = None,
) -> None:
    """Creates a topic if there is none; that of markers stays empty, only its offsets count."""
    deadline = time.monotonic() + ANSWER_S
    while not has_place(consumer, topic):
        admin = AdminClient(client_options(config))  # must outlive its answer
        wanted = NewTopic(topic, partitions, -1, config=dict(settings or {}))
        try:
            admin.create_topics([wanted], request_timeout=ANSWER_S)[topic].result()
        except KafkaException as problem:
            if problem.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                count = "one partition" if partitions == 1 else f"{partitions} partitions"
                raise RuntimeError(
                    f"topic {topic!r}, which is to hold markers or positions, does not exist and cannot be created: "
                    f"{problem.args[0].str()}. Create it with {count}, or use another name"
                ) from problem
        if time.monotonic() > deadline:
            raise RuntimeError(f"topic {topic!r} was created, but brokers do not know it yet")
        time.sleep(0.1)


# ---- documents


def encoded(document: Mapping[str, Any]) -> str:
    """A document as metadata: only ASCII, so that characters are bytes, and none of them is NUL, which would end it."""
    return json.dumps(document, separators=(",", ":"))


def decoded(text: str | None) -> dict[str, Any] | None:
    """The document that a text begins with, whatever follows; None if it begins with none."""
    try:
        document, _ = json.JSONDecoder().raw_decode(text or "")
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def committed(
    consumer: Consumer, topic: str, partitions: Iterable[int], patience: float | None = None
) -> dict[int, dict[str, Any] | None]:
    """The documents of the consumer's group at these partitions, None where nothing was ever committed.

    Waits for transactions that are about to write them. Raises if that takes longer.
    """
    places: list[TopicPartition] = []
    wanted = [TopicPartition(topic, partition) for partition in partitions]
    if not wanted:
        return {}

    def ask() -> None:
        places[:] = consumer.committed(wanted, timeout=patience or ANSWER_S)
        for place in places:
            if place.error is not None:  # "not known" is not the same as "never committed"
                raise KafkaException(place.error)

    patiently(ask, patience)
    found: dict[int, dict[str, Any] | None] = {}
    for place in places:
        found[place.partition] = None if place.offset < 0 else decoded(place.metadata)
        if place.offset >= 0 and found[place.partition] is None:
            raise RuntimeError(
                f"the committed offset of topic {topic!r}, partition {place.partition}, in this group was not written "
                f"by fastprod: {place.offset}, {place.metadata!r}. Use another name"
            )
    return found


def read_marker(consumer: Consumer, topic: str, patience: float | None = None) -> dict[str, Any] | None:
    """The marker of the consumer's group, None if there is none. Waits for transactions that are about to write it."""
    return committed(consumer, topic, [0], patience)[0]


def write_marker(
    producer: Producer, consumer: Consumer, topic: str, marker: Mapping[str, Any], offset: int = 0
) -> None:
    """Puts a marker for the consumer's group into the producer's transaction."""
    place = TopicPartition(topic, 0, offset, metadata=encoded(marker))
    group = consumer.consumer_group_metadata()
    patiently(lambda: producer.send_offsets_to_transaction([place], group, ANSWER_S))


# ---- members


class Member(NamedTuple):
    """Who a consumer is in its group: brokers compare it with what they know when offsets are committed."""

    generation: int
    """Of the group: one more with every rebalance. Negative for a consumer that is no member."""
    id: str
    """Empty for a consumer that is no member."""


def member_of(metadata: bytes) -> Member:
    """What is in `consumer_group_metadata()`: librdkafka's b"CGMDv2:", generation, group NUL, member NUL, and more."""
    magic = b"CGMDv2:"
    if metadata[: len(magic)] != magic or metadata.count(b"\0", len(magic) + 4) < 2:
        raise RuntimeError(f"this librdkafka writes group metadata in a form that fastprod does not know: {metadata!r}")
    (generation,) = struct.unpack_from("=i", metadata, len(magic))
    _, member, _ = metadata[len(magic) + 4 :].split(b"\0", 2)
    return Member(generation, member.decode())


# ---- steps of transactions


def patiently(step: Callable[[], object], patience: float | None = None) -> None:
    """Repeats a step of a transaction for as long as Kafka says that it may be repeated."""
    deadline = time.monotonic() + (patience or ANSWER_S)
    while True:
        try:
            step()
            return
        except KafkaException as problem:
            if not is_passing(problem) or time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def is_passing(problem: KafkaException) -> bool:
    """Whether the same call may succeed later."""
    error = problem.args[0]
    return not error.fatal() and bool(error.retriable() or error.code() in PASSING)


def end(producer: Producer) -> None:
    """Ends a producer with what it still holds, aborting its transaction. Never raises, and does not wait for long."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # confluent-kafka's, about transactions that cannot be aborted
        with suppress(Exception):  # what the caller itself has to say counts more
            producer.purge(in_flight=False)
            # An abort that overtakes records on their way can be fatal on Kafka 4 (librdkafka #4849), and would leave
            # the transaction open until it times out.
            producer.flush(FLIGHT_S)
            producer.purge()
        with suppress(Exception):
            producer.close(CLOSE_S)
