"""A Kafka cluster for tests: real sockets, real protocol, no JVM, up in a millisecond, faults on request.

                     _Cluster            what a user calls; checks arguments, words errors
                    /        \\
         MockCluster          MockClusterProcess       where the brokers run
              |                     |  JSON lines over stdin and stdout
              |                   _serve()             in the other process
               \\                  /
            fastprod._core._mock.Cluster               librdkafka's mock brokers

Both kinds of cluster answer the same methods, because only the way to the primitives of `_mock.Cluster`
differs. Reading back (`leader_of`, `watermarks`, `records`) goes through an ordinary consumer.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError

from fastprod._core import _mock
from fastprod._core._rdkafka import error_text
from fastprod.testing._cluster import Cluster

__all__ = ["MockCluster", "MockClusterProcess", "Request"]

MAX_BROKERS = 1000  # beyond, librdkafka runs out of sockets, and it aborts the process rather than say so
# Brokers keep up to 5 MB of each partition. In pages of 4 KB the kernel's work for that was a tenth of two cores where
# thousands of partitions fill up, which would be billed to whoever is measured. Of no meaning but to glibc.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
ALL = -1  # librdkafka's word for every broker, and for no leader

API_KEYS = {  # the requests that mock brokers answer
    "Produce": 0,
    "Fetch": 1,
    "ListOffsets": 2,
    "Metadata": 3,
    "OffsetCommit": 8,
    "OffsetFetch": 9,
    "FindCoordinator": 10,
    "JoinGroup": 11,
    "Heartbeat": 12,
    "LeaveGroup": 13,
    "SyncGroup": 14,
    "ApiVersions": 18,
    "InitProducerId": 22,
    "OffsetForLeaderEpoch": 23,
    "AddPartitionsToTxn": 24,
    "AddOffsetsToTxn": 25,
    "EndTxn": 26,
    "TxnOffsetCommit": 28,
    "ConsumerGroupHeartbeat": 68,
    "GetTelemetrySubscriptions": 71,
    "PushTelemetry": 72,
    "ShareGroupHeartbeat": 76,
    "ShareFetch": 78,
    "ShareAcknowledge": 79,
}
API_NAMES = {key: name for name, key in API_KEYS.items()}
ERROR_CODES: dict[str, int] = {
    name: code for name, code in vars(KafkaError).items() if isinstance(code, int) and name.lstrip("_").isupper()
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request that a broker received."""

    broker: int
    api: str
    """The request's name, such as "Produce"."""
    timestamp: float
    """Seconds on librdkafka's clock: time.monotonic()'s on Linux, time.time()'s on macOS."""


class _Cluster(Cluster):
    """Everything a mock cluster can do, wherever its brokers run."""

    @abstractmethod
    def _call(self, operation: str, *arguments: Any) -> Any:
        """Run a method of `_mock.Cluster` where the brokers are."""

    def _prepare(self, brokers: int, topics: Mapping[str, int] | None, rtt_ms: int | None) -> None:
        self.brokers = tuple(range(1, brokers + 1))
        self._own_errors: set[tuple[int, int]] = set()  # (broker, API key) that ever got errors of its own
        try:
            for name, partitions in (topics or {}).items():
                self.create_topic(name, partitions)
            if rtt_ms is not None:
                self.set_rtt(rtt_ms)
        except BaseException:
            self.close()
            raise

    # topics and leaders

    def create_topic(self, name: str, partitions: int = 1, replication_factor: int | None = None) -> None:
        """Create a topic whose leaders are spread evenly and in the same way every time.

        The replication factor is 3, or the number of brokers if there are fewer, unless given. A topic that a
        client brings about by asking for it has 4 partitions and random leaders instead.
        """
        count = len(self.brokers)
        copies = self._copies(name, partitions, replication_factor)
        code = self._call("create_topic", name, partitions, copies)
        if code == KafkaError.TOPIC_ALREADY_EXISTS:
            raise ValueError(f"topic {name!r} exists already; choose another name")
        self._done(code, f"create topic {name!r}")
        for partition in range(partitions):
            # librdkafka puts replicas on consecutive brokers from partition * factor on; rotate through them
            leader = (partition * copies + partition % copies) % count + 1
            self._done(self._call("set_leader", name, partition, leader), f"place topic {name!r}")

    def set_leader(self, topic: str, partition: int, broker: int | None) -> None:
        """Move a partition to another leader, or leave it without one (broker None or -1)."""
        self._require(topic, partition)
        target = ALL if broker == ALL else self._broker(broker)
        self._done(self._call("set_leader", topic, partition, target), f"move {topic} [{partition}] to {broker}")

    def topic_error(self, topic: str, error: int | str | KafkaError | None) -> None:
        """Answer every metadata request for a topic with an error, until called with None."""
        self._require(topic)
        self._done(self._call("topic_error", topic, _error_code(error)), f"set the error of topic {topic!r}")

    # brokers

    def set_rtt(self, ms: int, broker: int | None = None) -> None:
        """Let a broker, or all of them, answer every request ms milliseconds late; 0 ends it."""
        if ms < 0:
            raise ValueError(f"a round trip takes 0 ms or longer, not {ms}")
        self._done(self._call("set_rtt", self._broker(broker), ms), f"set the round trip of broker {broker}")

    def down(self, broker: int | None = None) -> None:
        """Disconnect the clients of a broker, or of all, and refuse new ones. Leaders stay where they are."""
        self._done(self._call("set_up", self._broker(broker), False), f"stop broker {broker}")

    def up(self, broker: int | None = None) -> None:
        """Accept connections again, at the same address."""
        self._done(self._call("set_up", self._broker(broker), True), f"start broker {broker}")

    # errors

    def push_errors(
        self, api: str | int, *errors: int | str | KafkaError, broker: int | None = None, rtt_ms: int = 0
    ) -> None:
        """Answer the next requests of a kind with these errors, one each; then answer normally again.

        Errors are codes, KafkaError objects or names such as "NOT_LEADER_FOR_PARTITION"; "_TRANSPORT" drops
        the connection instead of answering, 0 answers normally. Without `broker`, whichever broker gets the
        next request takes the next error. With it, only that broker's requests count, and each of those
        answers can also be `rtt_ms` late.
        """
        key = _api_key(api)
        codes = [_error_code(error) for error in errors]
        if broker is not None:
            target = self._broker(broker)
            self._own_errors.add((target, key))
            code = self._call("push_broker_errors", target, key, codes, rtt_ms)
            self._done(code, f"push errors to broker {broker}")
            return
        if rtt_ms:
            raise ValueError(f"rtt_ms={rtt_ms} needs broker=...; only a single broker's answers can be delayed here")
        deaf = sorted(number for number, known in self._own_errors if known == key)
        if deaf:
            # Its own list, even once empty, hides the cluster's from a broker.
            raise ValueError(
                f"broker {deaf[0]} has had {_api_name(key)} errors of its own and no longer looks at the "
                "cluster's; give broker=... for each broker, or use a fresh cluster"
            )
        self._call("push_errors", key, codes)

    def clear_errors(self, api: str | int) -> None:
        """Forget what push_errors() left without broker=...; a single broker's cannot be cleared."""
        key = _api_key(api)
        self._call("clear_errors", key)
        for broker in sorted(number for number, known in self._own_errors if known == key):
            left = self._call("pending_broker_errors", broker, key)
            if left:
                raise RuntimeError(
                    f"broker {broker} has {left} {_api_name(key)} error(s) left, which librdkafka "
                    "cannot clear; let requests use them up, or use a fresh cluster"
                )

    # requests

    def start_tracking(self) -> None:
        """Begin a new list of the requests that brokers receive."""
        self._call("track_requests", True)

    def stop_tracking(self) -> list[Request]:
        """End the list and return it."""
        seen = self.requests()
        self._call("track_requests", False)
        return seen

    @contextmanager
    def track_requests(self) -> Iterator[list[Request]]:
        """Collect the requests of a with block; the list is filled when the block ends."""
        seen: list[Request] = []
        self.start_tracking()
        try:
            yield seen
        finally:
            seen += self.stop_tracking()

    def requests(self, api: str | int | None = None) -> list[Request]:
        """The requests since tracking began, all of them or one kind, in the order of arrival."""
        wanted = None if api is None else _api_key(api)
        return [
            Request(broker, _api_name(key), microseconds / 1e6)
            for broker, key, microseconds in self._call("requests")
            if wanted is None or key == wanted
        ]

    def clear_requests(self) -> None:
        """Empty the list and go on tracking."""
        self._call("clear_requests")

    # checks

    def _broker(self, broker: int | None) -> int:
        if broker is None:
            return ALL
        return self._known(broker)

    def _require(self, topic: str, partition: int = 0) -> None:
        # Every other question about an unknown topic would create it.
        if not self._call("has_partition", topic, 0):
            raise ValueError(f"there is no topic {topic!r}; create_topic({topic!r}) makes it")
        if partition < 0 or not self._call("has_partition", topic, partition):
            raise ValueError(f"topic {topic!r} has no partition {partition}")

    def _done(self, code: int, action: str) -> None:
        if code:
            raise RuntimeError(f"librdkafka could not {action}: {error_text(code)} (error {code})")


class MockCluster(_Cluster):
    """A Kafka cluster of mock brokers on a thread of this process.

    Clients of this or any other process on the machine connect to `bootstrap_servers`. Close the cluster, or
    use it in a with block, and close the clients before it: they would go on trying to reconnect.

    What real brokers do and these do not: recognise a retried batch of an idempotent producer (only of a
    transactional one), hide aborted transactions from consumers, keep more than about 5 MB of a partition,
    move leaders when a broker goes down, authenticate, or answer the admin API.

    Args:
        brokers: how many; their ids are 1 to brokers.
        topics: topics to create, each with its number of partitions.
        rtt_ms: how late every answer is, see `set_rtt`.
    """

    def __init__(self, brokers: int = 3, *, topics: Mapping[str, int] | None = None, rtt_ms: int | None = None) -> None:
        self._native = _mock.Cluster(_broker_count(brokers))
        self._closed = False
        self.bootstrap_servers = self._native.bootstrap_servers
        self._prepare(brokers, topics, rtt_ms)

    def _call(self, operation: str, *arguments: Any) -> Any:
        return getattr(self._native, operation)(*arguments)

    def close(self) -> None:
        self._closed = True
        self._native.close()

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<MockCluster of {len(self.brokers)} at {self.bootstrap_servers}{state}>"


class MockClusterProcess(_Cluster):
    """The same cluster in a process of its own, so that its work is not billed to this one.

    That process ends with this one, however this one ends, and Ctrl-C does not reach it. Arguments and
    methods are those of `MockCluster`.
    """

    def __init__(self, brokers: int = 3, *, topics: Mapping[str, int] | None = None, rtt_ms: int | None = None) -> None:
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._sent = 0
        self._closed = False
        count = _broker_count(brokers)
        program = "from fastprod.testing.mock import _serve; _serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program, str(count), str(self._owner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**LARGE_PAGES, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            self.bootstrap_servers = self._answer(0)
        except BaseException:
            self.close()
            raise
        self._prepare(brokers, topics, rtt_ms)

    @property
    def pid(self) -> int:
        """The id of the cluster's process."""
        return self._process.pid

    def _call(self, operation: str, *arguments: Any) -> Any:
        if self._owner != os.getpid():
            raise RuntimeError(
                f"this mock cluster belongs to process {self._owner}, not to its fork {os.getpid()}; "
                "pass bootstrap_servers to the child and control the cluster from the parent"
            )
        with self._lock:
            if self._closed:
                raise RuntimeError("this mock cluster is closed; use it inside its with block, or before close()")
            return self._ask(operation, arguments)

    def _ask(self, operation: str, arguments: Iterable[Any]) -> Any:
        assert self._process.stdin is not None
        self._sent += 1
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps([self._sent, operation, list(arguments)]) + "\n")
            self._process.stdin.flush()
        return self._answer(self._sent)

    def _answer(self, number: int) -> Any:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            answered, value, problem = json.loads(line)
            if answered != number:
                continue  # to a question whose asker was interrupted
            if problem is not None:
                raise RuntimeError(f"the mock cluster's process {self.pid} failed: {problem}")
            return value
        status = self._process.wait()
        raise RuntimeError(f"the mock cluster's process {self.pid} has ended with status {status}")

    def close(self) -> None:
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            # Said aloud, since a forked child may hold a copy of the pipe and keep it from ending.
            with suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps([0, "close", []]) + "\n")
                self._process.stdin.flush()
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<MockClusterProcess {self.pid} of {len(self.brokers)} at {self.bootstrap_servers}{state}>"


def _serve() -> None:
    """The other end of `MockClusterProcess`: a cluster that obeys stdin, ends with it or the parent."""
    brokers, parent = map(int, sys.argv[1:])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may speak in the channel of replies

    def watch() -> None:
        # A fork of the parent can keep stdin open beyond the parent's death. The kernel's parent-death signal
        # would not do: it comes when the thread ends that started us.
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    cluster = _mock.Cluster(brokers)

    def reply(number: int, value: object, problem: str | None = None) -> None:
        replies.write(json.dumps([number, value, problem]) + "\n")
        replies.flush()

    with suppress(BrokenPipeError):
        reply(0, cluster.bootstrap_servers)
        for line in sys.stdin:
            number, operation, arguments = json.loads(line)
            if operation == "close":
                break
            try:
                method: Callable[..., object] = getattr(cluster, operation)
                reply(number, method(*arguments))
            except Exception as error:
                reply(number, None, f"{type(error).__name__}: {error}")
    cluster.close()
    os._exit(0)  # without a complaint about a reply that nobody reads any more


def _broker_count(brokers: int) -> int:
    if not 1 <= brokers <= MAX_BROKERS:
        raise ValueError(f"a mock cluster has 1 to {MAX_BROKERS} brokers, not {brokers!r}")
    return brokers


def _api_key(api: str | int) -> int:
    if isinstance(api, int):
        if not 0 <= api < 1 << 15:
            raise ValueError(f"{api} is no API key; those are numbers such as 0 for Produce, or names")
        return api
    key = API_KEYS.get(api)
    if key is None:
        raise ValueError(f"no mock broker answers {api!r} requests; {_suggest(api, API_KEYS)}")
    return key


def _api_name(key: int) -> str:
    return API_NAMES.get(key, f"ApiKey{key}")


def _error_code(error: int | str | KafkaError | None) -> int:
    if error is None:
        return 0
    if isinstance(error, KafkaError):
        return int(error.code())
    if isinstance(error, str):
        code = ERROR_CODES.get(error)
        if code is None:
            raise ValueError(f"there is no Kafka error {error!r}; {_suggest(error, ERROR_CODES)}")
        return code
    if not -(1 << 15) <= error < 1 << 15:
        raise ValueError(f"{error} is no Kafka error code: those have 16 bits")
    return error


def _suggest(name: str, known: Iterable[str]) -> str:
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = [candidate for candidate in by_lower if candidate.startswith(name.lower())]
    close = (close or difflib.get_close_matches(name.lower(), by_lower, cutoff=0.5))[:3]
    if not close:
        return f"names look like {', '.join(list(by_lower.values())[:3])}"
    return f"did you mean {' or '.join(by_lower[match] for match in close)}?"
