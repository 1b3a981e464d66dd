"""Small facts that Kafka keeps for us: markers in the committed offsets of consumer groups that nobody joins.

A marker is a short JSON document in the metadata of one offset: partition 0 of a topic, in a group of its own. It is
written inside a transaction, so it becomes visible together with the transaction's records or not at all. Brokers
forget it `offsets.retention.minutes` after it was written (7 days unless changed), and when the topic is deleted.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic  # type: ignore[attr-defined]

from fastprod import _config
from fastprod.producer import Producer

__all__ = [
    "client_options",
    "has_place",
    "make_place",
    "other_places",
    "patiently",
    "read_marker",
    "reader",
    "retention_s",
    "write_marker",
]

ANSWER_S = 60.0
PASSING = (  # while coordinators are made, move or settle a transaction; librdkafka does not call these retriable
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
)


def other_places(config: Mapping[str, Any], group: str, topic: str) -> list[str]:
    """Topics other than this one that hold a marker of the group."""
    admin = AdminClient(client_options(config))
    listed = admin.list_consumer_groups(request_timeout=ANSWER_S).result()
    # Listing a group's offsets crashes librdkafka 2.16 when a coordinator moves meanwhile, so only where there are any.
    if all(one.group_id != group for one in listed.valid):
        return []
    asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)], request_timeout=ANSWER_S)
    found = asked[group].result().topic_partitions
    return sorted({place.topic for place in found if place.offset >= 0 and place.topic != topic})


def retention_s(config: Mapping[str, Any]) -> float | None:
    """For how long brokers keep a marker, if they tell this client."""
    admin = AdminClient(client_options(config))
    try:
        broker = ConfigResource(ConfigResource.Type.BROKER, str(min(admin.list_topics(timeout=ANSWER_S).brokers)))
        told = admin.describe_configs([broker], request_timeout=ANSWER_S)[broker].result()
        return 60.0 * float(told["offsets.retention.minutes"].value)
    except (KafkaException, KeyError, ValueError):
        return None


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


def make_place(config: Mapping[str, Any], consumer: Consumer, topic: str) -> None:
    """Creates a topic for markers if there is none; it stays empty, only its offsets count."""
    deadline = time.monotonic() + ANSWER_S
    while not has_place(consumer, topic):
        admin = AdminClient(client_options(config))  # must outlive its answer
        try:
            admin.create_topics([NewTopic(topic, 1, -1)], request_timeout=ANSWER_S)[topic].result()
        except KafkaException as problem:
            if problem.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise RuntimeError(
                    f"topic {topic!r}, whose offsets are to hold markers, does not exist and cannot be created: "
                    f"{problem.args[0].str()}. Create it with one partition, or name another topic"
                ) from problem
        if time.monotonic() > deadline:
            raise RuntimeError(f"topic {topic!r} was created, but brokers do not know it yet")
        time.sleep(0.1)


def read_marker(consumer: Consumer, topic: str, patience: float | None = None) -> dict[str, Any] | None:
    """The marker of the consumer's group, None if there is none. Waits for transactions that are about to write it."""
    found: list[TopicPartition] = []

    def ask() -> None:
        found[:] = consumer.committed([TopicPartition(topic, 0)], timeout=patience or ANSWER_S)
        for place in found:
            if place.error is not None:  # "not known" is not the same as "no marker"
                raise KafkaException(place.error)

    patiently(ask, patience)
    (place,) = found
    if place.offset < 0:
        return None
    try:
        marker = json.loads(place.metadata or "")
    except ValueError:
        marker = None
    if not isinstance(marker, dict):
        raise RuntimeError(
            f"the committed offset of topic {topic!r} in this group was not written by fastprod: "
            f"{place.offset}, {place.metadata!r}. Use another name"
        )
    return marker


def write_marker(
    producer: Producer, consumer: Consumer, topic: str, marker: Mapping[str, Any], offset: int = 0
) -> None:
    """Puts a marker for the consumer's group into the producer's transaction."""
    place = TopicPartition(topic, 0, offset, metadata=json.dumps(marker, separators=(",", ":")))
    group = consumer.consumer_group_metadata()
    patiently(lambda: producer.send_offsets_to_transaction([place], group, ANSWER_S))


def patiently(step: Callable[[], object], patience: float | None = None) -> None:
    """Repeats a step of a transaction for as long as Kafka says that it may be repeated."""
    deadline = time.monotonic() + (patience or ANSWER_S)
    while True:
        try:
            step()
            return
        except KafkaException as problem:
            error = problem.args[0]
            if not (error.retriable() or error.code() in PASSING) or time.monotonic() > deadline:
                raise
            time.sleep(0.2)
