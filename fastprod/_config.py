"""Splits a producer's configuration into what fastprod serves itself and what librdkafka gets.

Whatever is not named here passes through untouched, so every option of librdkafka works the day it appears.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError

from fastprod._core._balance import PartialRoundRobin
from fastprod.errors import ConfigError

OWN_POLICIES = ("uniform", "sticky", "round_robin")

# librdkafka's partitioners: (which hash of the key, whether records without a key are hashed too, whether an empty key
# is none). Other records go where `uniform` puts them. "random" looks at no key at all.
LIBRDKAFKA_HASHES = {
    "consistent": ("consistent", True, False),
    "consistent_random": ("consistent", False, True),
    "murmur2": ("murmur2", True, False),
    "murmur2_random": ("murmur2", False, False),
    "fnv1a": ("fnv1a", True, False),
    "fnv1a_random": ("fnv1a", False, False),
}

# Bytes after which key-less records go to another partition: as Java. There the same setting bounds the wire batch;
# here that is librdkafka's batch.size (1 MB). From 16 KB up the bound makes no difference to throughput (medians of 6
# interleaved rounds, 100 B records: 4 KB 4.1, 16 KB 4.5, 64 KB 4.4, 256 KB 4.6, 1 MB 4.4 M records/s), and a smaller
# one spreads short bursts more evenly. asv_bench/benchmarks/sticky.py repeats the measurement.
DEFAULT_STICKY_BYTES = 16384
DEFAULT_BUFFER_MEMORY = 32 << 20  # as Java; larger buffers fall out of the CPU caches and cost throughput
DEFAULT_LINGER_MS = 5.0
HAND_OVER_MS = 0.5  # how long librdkafka waits for the rest of a hand-over
DEFAULT_MAX_RECORD_BYTES = 1_000_000
# How often librdkafka tells how many records of which partition it has sent again: nothing else does. Its report takes
# about a kilobyte per partition of the topic.
DEFAULT_STATISTICS_MS = 5000

# librdkafka's second name for an option that we serve or look at.
ALIASES = {
    "queue.buffering.max.ms": "linger.ms",
    "delivery.timeout.ms": "message.timeout.ms",
    "sticky.partitioning.bytes": "sticky.batch.size",
    "max.request.size": "message.max.bytes",
    "request.required.acks": "acks",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "message.send.max.retries": "retries",
}


@dataclass(slots=True)
class Settings:
    """What the runtime needs to know, in its units."""

    policy: str = "uniform"
    partitioner: Any = None
    partial_limit: int = 1  # partitions that partial round robin uses
    partial_seed: int = 0
    adaptive: bool = True
    ignore_keys: bool = False
    hash: str | None = None  # of keys; None is Java's
    hash_null: bool = False  # also of records without a key
    spread_empty: bool = False  # an empty key is no key
    availability_timeout_ms: float = 0
    sticky_bytes: int = DEFAULT_STICKY_BYTES
    linger_ms: float = DEFAULT_LINGER_MS
    delivery_timeout_ms: float = 300_000
    buffer_memory: int = DEFAULT_BUFFER_MEMORY
    max_block_ms: float = 60_000
    max_record_bytes: int = DEFAULT_MAX_RECORD_BYTES
    metadata_refresh_ms: float = 300_000
    metadata_propagation_ms: float = 30_000
    transactional: bool = False
    no_offsets: bool = False  # brokers do not answer: acks=0
    idempotent: bool = True
    strict: bool = False  # a record that fails ends its partition
    levels: int = 1  # of priority
    pipelined: bool = False  # librdkafka may have many requests on their way to a broker, each of another partition
    hasty: bool = False  # librdkafka sends the first record of a hand-over before it has the others
    patience_ms: float = 0  # of librdkafka with the first hand-over of a partition; 0: one record of it goes alone
    request_bytes: int = 1_000_000  # what librdkafka puts into a request at most
    names_bytes: int = 0  # in each request: client.id, transactional.id
    request_records: int = 10_000
    known_ms: float = 600_000  # so long after a record brokers surely remember the producer: their default is a day
    on_delivery: Callable[..., Any] | None = None
    error_cb: Callable[..., Any] | None = None
    stats_cb: Callable[..., Any] | None = None
    statistics_wanted: bool = False  # by stats_cb
    throttle_cb: Callable[..., Any] | None = None
    logger: Any = None
    only_errors: bool = False
    seed: int = 0
    pid: int = 0


def _fail(key: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(
        KafkaError(KafkaError._INVALID_ARG, f'Invalid value for configuration property "{key}": {value!r} ({wanted})')
    )


def _number(conf: dict[str, Any], key: str, default: float, low: float, high: float, whole: bool = True) -> Any:
    value = conf.get(key, default)
    try:
        number = float(value)
        if isinstance(value, bool) or not low <= number <= high or (whole and number != int(number)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        kind = "a whole number" if whole else "a number"
        raise _fail(key, value, f"must be {kind} from {low:g} to {high:g}") from None
    return int(number) if whole else number


def _flag(conf: dict[str, Any], key: str, default: bool) -> bool:
    value = conf.get(key, default)
    text = str(value).lower()
    if text in ("true", "1", "t"):
        return True
    if text in ("false", "0", "f"):
        return False
    raise _fail(key, value, "must be true or false")


def _callback(conf: dict[str, Any], key: str) -> Callable[..., Any] | None:
    value = conf.get(key)
    if value is not None and not callable(value):
        raise _fail(key, value, "must be callable")
    return value


def _idempotence_fits(conf: Mapping[str, Any]) -> bool:
    """Whether nothing the user chose forbids the idempotent producer; Java decides the same way."""
    try:
        few_in_flight = int(conf.get("max.in.flight.requests.per.connection", 5)) <= 5
    except (TypeError, ValueError):
        return False  # librdkafka will refuse the value and name it
    return (
        str(conf.get("acks", "all")).lower() in ("all", "-1")
        and str(conf.get("retries", 1)) != "0"
        and few_in_flight
        and conf.get("queuing.strategy", "fifo") == "fifo"
        and str(conf.get("enable.gapless.guarantee", False)).lower() != "true"
    )


def _lingers(settings: Settings) -> tuple[float, float]:
    """How long the accumulator waits, and librdkafka, in ms.

    librdkafka begins to send with the first record that it gets. A little patience lets it see all of what we hand
    over: then that is one request. It sleeps in whole milliseconds, so that takes one.
    """
    if not settings.idempotent or (settings.linger_ms == 0 and not settings.strict):
        return settings.linger_ms, 0
    return max(0, settings.linger_ms - 1), HAND_OVER_MS


def agreed(argument: str, given: Any, name: str, options: dict[str, Any], number: bool = True) -> Any:
    """What may come by an argument or by the configuration, from which it is taken; None if by neither."""
    if name not in options:
        return given
    configured = options.pop(name)
    if number and isinstance(configured, str) and configured.strip().isdecimal():
        configured = int(configured)
    if given is not None and given != configured:
        raise ValueError(f"{argument}={given!r}, but {name}={configured!r} in the configuration: give one of them")
    return configured


def _no_error_cb(error: KafkaError) -> None:
    """Stands in where the user has none."""


def _no_stats_cb(statistics: str) -> None:
    """Stands in where the user has none."""


def split(config: Mapping[str, Any], plugin: str) -> tuple[Settings, dict[str, Any]]:
    """(our settings, the configuration for confluent_kafka.Producer)."""
    given: dict[str, Any] = dict(config)
    given.update(given.pop("default.topic.config", None) or {})
    conf: dict[str, Any] = {}
    for key, value in given.items():
        known = ALIASES.get(key, key)
        if known in conf and known != key:
            continue  # the first name wins, as when librdkafka reads them
        conf[known] = value

    settings = Settings(pid=os.getpid(), seed=secrets.randbits(64))
    settings.linger_ms = _number(conf, "linger.ms", DEFAULT_LINGER_MS, 0, 900_000, whole=False)
    settings.sticky_bytes = _number(conf, "sticky.batch.size", DEFAULT_STICKY_BYTES, 1, 2**31 - 1)
    settings.buffer_memory = _number(conf, "buffer.memory", DEFAULT_BUFFER_MEMORY, 65_536, 2**50)
    settings.max_block_ms = _number(conf, "max.block.ms", 60_000, 0, 2**50, whole=False)
    settings.max_record_bytes = _number(conf, "message.max.bytes", DEFAULT_MAX_RECORD_BYTES, 1000, 1_000_000_000)
    settings.delivery_timeout_ms = _number(conf, "message.timeout.ms", 300_000, 0, 2**31 - 1)
    settings.availability_timeout_ms = _number(conf, "partitioner.availability.timeout.ms", 0, 0, 2**31 - 1)
    settings.adaptive = _flag(conf, "partitioner.adaptive.partitioning.enable", True)
    settings.ignore_keys = _flag(conf, "partitioner.ignore.keys", False)
    settings.only_errors = _flag(conf, "delivery.report.only.error", False)
    settings.strict = _flag(conf, "strict.order", False)
    refresh = _number(conf, "topic.metadata.refresh.interval.ms", 300_000, -1, 3_600_000)
    settings.metadata_refresh_ms = refresh if refresh > 0 else 3_600_000
    settings.metadata_propagation_ms = _number(conf, "topic.metadata.propagation.max.ms", 30_000, 0, 3_600_000)
    settings.transactional = bool(conf.get("transactional.id"))
    settings.no_offsets = str(conf.get("acks", "all")) == "0"
    settings.on_delivery = _callback(conf, "on_delivery")
    settings.throttle_cb = _callback(conf, "throttle_cb")
    # These also go to confluent-kafka: it tells librdkafka to emit the events, and runs them in transactions.
    settings.error_cb = conf.get("error_cb")
    conf["error_cb"] = settings.error_cb or _no_error_cb  # without one, librdkafka keeps errors from us too
    settings.stats_cb = _callback(conf, "stats_cb")
    interval = _number(conf, "statistics.interval.ms", 0, 0, 86_400_000)
    settings.statistics_wanted = settings.stats_cb is not None and interval > 0
    if interval or "statistics.interval.ms" not in conf:
        conf["stats_cb"] = settings.stats_cb if settings.statistics_wanted else _no_stats_cb
    conf.setdefault("statistics.interval.ms", DEFAULT_STATISTICS_MS)
    settings.logger = conf.get("logger")

    partitioner = conf.pop("partitioner", None)
    if partitioner is None or partitioner in OWN_POLICIES:
        settings.policy = partitioner or "uniform"
    elif isinstance(partitioner, str):
        conf["partitioner"] = partitioner  # a name of librdkafka's, or one that it will refuse by name
        if partitioner == "random":
            settings.ignore_keys = True
        elif partitioner in LIBRDKAFKA_HASHES:
            settings.hash, settings.hash_null, settings.spread_empty = LIBRDKAFKA_HASHES[partitioner]
    elif isinstance(partitioner, type) and issubclass(partitioner, PartialRoundRobin):
        raise _fail("partitioner", partitioner, f"is a class: give an object, {partitioner.__name__}(...)")
    # A class of the user's with a choice of its own is asked; only ours runs in C.
    elif isinstance(partitioner, PartialRoundRobin) and type(partitioner).partition is PartialRoundRobin.partition:
        settings.policy = "partial"
        settings.partial_limit = partitioner.limit
        settings.partial_seed = secrets.randbits(64) if partitioner.seed is None else partitioner.seed
    elif callable(getattr(partitioner, "partition", None)):
        settings.policy = "python"
        settings.partitioner = partitioner
    else:
        raise _fail(
            "partitioner",
            partitioner,
            f"must be one of {', '.join(OWN_POLICIES)}, a name of librdkafka's, or have a method "
            "partition(topic, key, value, partitions, available)",
        )

    for key in (
        "buffer.memory",
        "max.block.ms",
        "sticky.batch.size",
        "strict.order",
        "partitioner.adaptive.partitioning.enable",
        "partitioner.availability.timeout.ms",
        "partitioner.ignore.keys",
        "delivery.report.only.error",
        "on_delivery",
        "throttle_cb",
    ):
        conf.pop(key, None)
    if _idempotence_fits(conf):
        conf.setdefault("enable.idempotence", True)
    settings.idempotent = settings.transactional or _flag(conf, "enable.idempotence", False)
    settings.request_bytes = min(settings.max_record_bytes, _number(conf, "batch.size", 1_000_000, 1, 2**31 - 1))
    settings.request_records = _number(conf, "batch.num.messages", 10_000, 1, 1_000_000)
    settings.linger_ms, conf["linger.ms"] = _lingers(settings)
    settings.hasty = conf["linger.ms"] == 0
    settings.names_bytes = sum(len(str(conf.get(name, "")).encode()) for name in ("client.id", "transactional.id"))
    # On macOS librdkafka's clock may be set: then it says nothing about patience.
    if settings.idempotent and not settings.transactional and not settings.strict and sys.platform != "darwin":
        settings.patience_ms = conf["linger.ms"]
    chosen = {"max.in.flight.requests.per.connection", "queue.buffering.backpressure.threshold"} & conf.keys()
    settings.pipelined = settings.idempotent and not settings.hasty and not chosen
    if not settings.idempotent and not settings.hasty and not chosen:
        # By default librdkafka makes one request and then looks at all partitions anew: with 10,000 that takes longest.
        conf.setdefault("queue.buffering.backpressure.threshold", 32)
    if settings.strict:
        if settings.transactional or not settings.idempotent:
            why = "transactions are all or nothing already" if settings.transactional else "needs enable.idempotence"
            raise _fail("strict.order", True, why)
        conf["message.timeout.ms"] = 0  # ours counts: librdkafka's would number all partitions anew
        conf["enable.gapless.guarantee"] = True  # and so would what brokers refuse
    # buffer.memory is the bound; librdkafka's own limits would only refuse what we have already admitted.
    conf.setdefault("queue.buffering.max.messages", 10_000_000)
    conf.setdefault("queue.buffering.max.kbytes", 2_147_483_647)
    others = conf.get("plugin.library.paths")
    conf["plugin.library.paths"] = f"{others};{plugin}" if others else plugin
    return settings, conf
