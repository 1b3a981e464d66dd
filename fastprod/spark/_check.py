"""Driver side: asks the brokers before the job starts what each task would else find out alone, and late.

    configuration   a producer is made of it: unknown options, wrong values
    brokers         one of them answers within REACH_S
    topic           is there, or comes to be within CREATE_S: where brokers create topics, being asked is what starts it
    rights          the brokers say that this client may write there

Only a clear "no" stops a job. Whatever brokers do not say, or say in a way that is not known here, passes: the tasks
will see. Files that are only on the executors pass too, and with them everything that has to do with brokers.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import time
from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation, AdminClient  # type: ignore[attr-defined]

from fastprod._positions import client_options
from fastprod.errors import ConfigError
from fastprod.priority.levels import level_topics
from fastprod.producer import Producer
from fastprod.spark._sink import ExportError

__all__ = ["CheckError", "check"]

REACH_S = 10.0
CREATE_S = 5.0
RIGHTS_S = 5.0
SLICES_S = (1.0, 2.0, 3.0, 4.0)  # of REACH_S; after each we look whether brokers have refused us for good
AGAIN_S = 0.1  # between two questions for a topic that is not there yet
UNREACHED = (
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._AUTHENTICATION,
    KafkaError._SSL,
)
NOT_YET = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)
SKIP = "check=False"
UNHEARD = logging.Logger("fastprod.spark.check", logging.CRITICAL + 1)  # some complaints are above every log_level


class CheckError(ExportError):
    """Brokers would not take the records of a job; it was not started and nothing was sent."""


def check(config: Mapping[str, Any], topic: str | None, levels: int | None = None, *, brokers: bool = True) -> None:
    """Refuses what the executors or the brokers would refuse; with `brokers=False`, the executors only.

    With `levels` the topic is a logical one, and the topics of all of them are looked for.

    Raises ConfigError for an option, CheckError for the rest.
    """
    absent = {name for name, value in config.items() if name.endswith(".location") and not os.path.exists(str(value))}
    heard: list[KafkaError] = []
    settings = {name: value for name, value in config.items() if name not in absent}
    if callable(settings.get("error_cb", heard.append)):
        settings["error_cb"] = heard.append
    try:
        producer = Producer({**settings, "log_level": 0, "logger": UNHEARD})
    except KafkaException as problem:
        raise ConfigError(problem.args[0]) from None
    try:
        if brokers and not absent:
            _ask(producer, settings, _topics(topic, levels), heard)
    finally:
        producer.close(0)


def _topics(topic: str | None, levels: int | None) -> list[str]:
    if topic is None:
        return []  # rows name theirs
    return [topic] if levels is None else level_topics(topic, levels)


def _ask(producer: Producer, config: Mapping[str, Any], topics: list[str], heard: list[KafkaError]) -> None:
    try:
        found = _first_answer(producer, config, topics[0] if topics else None, heard)
        answering = []
        for topic in topics:
            if topic != topics[0]:
                found = _metadata(producer, topic, CREATE_S)
            found = _existing(producer, topic, found, topics)
            # Without a controller nobody answers this: mock brokers name one that is none of them.
            if not found.topics[topic].error and found.controller_id in found.brokers:
                answering.append(topic)
        if answering:
            _check_rights(config, answering)
    except KafkaException:
        pass  # an answer that is not known here


def _first_answer(producer: Producer, config: Mapping[str, Any], topic: str | None, heard: list[KafkaError]) -> Any:
    for patience in SLICES_S:
        try:
            return _metadata(producer, topic, patience)
        except KafkaException as problem:
            if problem.args[0].code() not in UNREACHED:
                raise
        producer.poll(0)  # fills `heard`
        if any(error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL) for error in heard):
            break
    raise CheckError(_unreached(config, heard))


def _metadata(producer: Producer, topic: str | None, patience: float) -> Any:
    """As a producer asks: for one topic, which brokers may then create."""
    return producer.list_topics(timeout=patience) if topic is None else producer.list_topics(topic, timeout=patience)


def _unreached(config: Mapping[str, Any], heard: list[KafkaError]) -> str:
    where = str(config.get("bootstrap.servers") or config.get("metadata.broker.list"))
    protocol = str(config.get("security.protocol", "plaintext")).upper()
    told = {error.code(): _words(error) for error in heard if error.code() != KafkaError._ALL_BROKERS_DOWN}
    if KafkaError._AUTHENTICATION in told:
        names = "sasl.mechanism, sasl.username and sasl.password" if "SASL" in protocol else "the credentials"
        return (
            f"the brokers at {where} refuse this client: {told[KafkaError._AUTHENTICATION]}. Check {names}. "
            "Nothing was sent"
        )
    if KafkaError._SSL in told:
        return (
            f"no TLS with the brokers at {where}: {told[KafkaError._SSL]}. Check security.protocol ({protocol} now), "
            "ssl.ca.location and the ports. Nothing was sent"
        )
    reason = next(reversed(told.values()), "they do not answer, or close the connection at once")
    return (
        f"no broker at {where} answered the driver within {REACH_S:g} s: {reason}. Check bootstrap.servers, "
        f"security.protocol ({protocol} now) and the way from the driver to the brokers; if only executors can reach "
        f"them, use {SKIP}. Nothing was sent"
    )


def _words(error: KafkaError) -> str:
    return re.sub(r" \(after \d+ms in state \w+.*\)$", "", error.str())


def _existing(producer: Producer, topic: str, found: Any, topics: list[str]) -> Any:
    """Metadata in which the topic is."""
    deadline = time.monotonic() + CREATE_S
    while (error := found.topics[topic].error if topic in found.topics else None) is not None:
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            raise CheckError(_forbidden(topic, error.str()))
        if error.code() == KafkaError.TOPIC_EXCEPTION:
            raise CheckError(
                f"{topic!r} is no name for a topic ({error.str()}): 1 to 249 letters, digits, '.', '_' or '-'. "
                "Nothing was sent"
            )
        if error.code() not in NOT_YET:
            break
        if time.monotonic() > deadline:
            raise CheckError(_missing(producer, topic, topics))
        time.sleep(AGAIN_S)
        found = _metadata(producer, topic, CREATE_S)
    return found


def _missing(producer: Producer, topic: str, topics: list[str]) -> str:
    known = producer.list_topics(timeout=CREATE_S).topics
    names = {name.casefold(): name for name in known if name not in topics}  # other levels are no other spelling
    near = [names[name] for name in difflib.get_close_matches(topic.casefold(), names, n=3, cutoff=0.75)]
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    them = it = "it"
    if len(topics) > 1:
        them, it = f"the topics of all {len(topics)} levels, as PriorityProducer.create_topics does", "they"
    return (
        f"there is no topic {topic!r}, and the brokers did not create it within {CREATE_S:g} s of being asked.{hint} "
        f"Create {them}, or use {SKIP} if {it} will be there when the tasks run. Nothing was sent"
    )


def _forbidden(topic: str, told: str) -> str:
    return (
        f"this client may not write to topic {topic!r} ({told}): it needs the right to Write, and to Create if the "
        "topic is not there yet. Nothing was sent"
    )


def _check_rights(config: Mapping[str, Any], topics: list[str]) -> None:
    """Asks what this client may do with the topics; brokers from 2.3 on say it."""
    own = {"enable.idempotence": False, "statistics.interval.ms": 0}
    native = {**client_options(config), **own}
    for name in ("transactional.id", "stats_cb"):
        native.pop(name, None)
    admin = AdminClient(native)  # must outlive the question
    asked = admin.describe_topics(TopicCollection(topics), include_authorized_operations=True, request_timeout=RIGHTS_S)
    for topic, answer in asked.items():
        try:
            allowed = answer.result(RIGHTS_S + 1).authorized_operations
        except TimeoutError:
            return
        if allowed and AclOperation.WRITE not in allowed:
            raise CheckError(_forbidden(topic, f"the brokers allow {', '.join(one.name.title() for one in allowed)}"))
