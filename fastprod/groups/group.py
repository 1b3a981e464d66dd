"""`ProducerGroup`: a member of a group of producers that share a source with N partitions.

    subscribe()            joins; the group decides (membership.py); positions are read (assignment.py)
    produce()              begins a transaction when none is open
    commit_transaction()   1. looks whether the group has decided anew
                           2. writes the positions as records into the compacted topic
                           3. waits until all records are acknowledged, as a member that lives
                           4. reads the group's metadata, and refuses it unless it proves the assignment
                           5. adds the positions to the transaction as the group's offsets: brokers refuse them if
                              they know of a newer generation
                           6. commits; on a timeout the same commit goes on

Who takes a partition over reads its position after the group has been rebalanced. From then on brokers refuse step 5 of
the former owner. If that was done before, the position counts as unstable until the transaction is over, and whoever
reads it waits. So the position that is read is the one after the last record that will ever be seen.

States between calls:

    _map              source partition -> position. Empty while the group decides or positions are being read
    _doubted          whether this member owns what it thinks: brokers are asked before anything else
    _to_read          partitions whose positions must be read before they are in _map; None if there are none
    _producer         None when brokers have ended its transactions: the next one gets the same transactional.id
    _touched          source partitions of which the open transaction has records
    _aborting         the transaction is to be aborted before anything else
    _committing       what commit_transaction() is at: it timed out, and only the same call may go on
    _unseen           why `assignment` has changed, as long as the caller may not know that it has
    _dropped          why the caller's transaction is gone, until it was told so with a RebalanceError
    _failed           why a commit was refused that only an abort can follow
    _overlong         transactions in a row that brokers have ended because they took too long
"""

from __future__ import annotations

import ctypes
import json
import operator
import os
import re
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from fastprod import _config, _positions
from fastprod.errors import ForkError, RebalanceError
from fastprod.groups import assignment as places
from fastprod.groups.membership import Change, Membership, NotAMember, heartbeat_ms
from fastprod.producer import Producer
from fastprod.receipt import Receipt

__all__ = ["ProducerGroup", "RebalanceListener"]

SESSION_TIMEOUT_MS = 30_000
LONGEST_MS = 900_000  # of a transaction, unless brokers are configured otherwise
LOOK_S = 0.1  # how often produce() looks whether the group has decided anew
SLICE_S = 1.0  # of a call that waits: Ctrl-C ends it in between
ABORT_S = 5.0  # for an abort, which lets records on their way arrive first
SEND_S = 10.0  # for brokers to take the offsets; a timeout costs the transaction
SETTLE_S = 10.0  # for the group to decide anew, before the caller is told that it lost its transaction
LONGEST_NAME = 200
MOST_OVERLONG = 3  # transactions in a row that take too long: whoever goes on and on would never get anywhere
PROPAGATION_MS = 30_000  # for a topic that is not there; less where transactions are shorter
REBALANCED = "the group has been rebalanced"
MOST_PARTITIONS = 100_000

NOT_A_MEMBER = (
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
)
REFUSED = (  # a new producer would be refused too
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    KafkaError._UNSUPPORTED_FEATURE,
)


_live: weakref.WeakSet[ProducerGroup] = weakref.WeakSet()


class RebalanceListener(Protocol):
    """Hears what the group decides, on the caller's thread, inside `subscribe`, `alive`, `produce` and so on.

    It must not call the group, but may look at `assignment`. What it raises comes out of the call that it runs in; the
    group is in order then.
    """

    def on_assigned(self, assignment: dict[int, str | None]) -> None:
        """All that this member owns now, with the positions to go on from; {} is standby."""

    def on_revoked(self, partitions: list[int]) -> None:
        """These are no longer this member's. What was not committed will not be seen."""

    def on_lost(self, partitions: list[int]) -> None:
        """The same, but others may have had them for some time: this member was silent for too long."""


class ProducerGroup:
    """Shares the source partitions 0 to `source_partition_count` - 1 with all other members of `group_id`.

    `config` is that of a `fastprod.Producer`. The KIP's names `group.id`, `source.partition.count` and
    `session.timeout.ms` may be in it instead of the arguments.

    A member that neither produces nor commits nor calls `alive()` for `session_timeout_ms` (30,000 unless given) is
    replaced. Transactions end before that: `transaction.timeout.ms` is two thirds of it unless given. With an
    `instance_id`, a member that comes back under the same name within that time gets the same partitions without a
    rebalance; otherwise `close()` hands them over at once. No two members may have the same one.

    One thread uses a group.

    >>> with ProducerGroup(config, "ProducerForDB1", 3) as group:
    ...     group.subscribe()
    ...     while True:
    ...         try:
    ...             positions = {}
    ...             for partition, position in group.assignment.items():
    ...                 for row in rows_after(partition, position, limit=10_000):
    ...                     group.produce("orders", row.value, source_partition=partition)
    ...                     positions[partition] = row.position
    ...             if positions:
    ...                 group.commit_transaction(positions)
    ...             else:
    ...                 group.alive(1.0)
    ...         except RebalanceError:
    ...             continue
    """

    _takes_positions = True  # whoever only sets one does not

    def __init__(
        self,
        config: Mapping[str, Any],
        group_id: str | None = None,
        source_partition_count: int | None = None,
        *,
        session_timeout_ms: int | None = None,
        instance_id: str | None = None,
    ) -> None:
        self._closed = True  # until it is open
        if not isinstance(config, Mapping):
            raise TypeError(f'config must be a dict like {{"bootstrap.servers": "host:9092"}}, not {config!r}')
        options = dict(config)
        if not options.get("bootstrap.servers") and not options.get("metadata.broker.list"):
            raise ValueError('the config has no "bootstrap.servers": give {"bootstrap.servers": "host:9092", ...}')
        self.group_id: str = _name(
            "group_id", _config.agreed("group_id", group_id, "group.id", options, number=False), "topics"
        )
        self.source_partition_count: int = _count(
            "source_partition_count",
            _config.agreed("source_partition_count", source_partition_count, "source.partition.count", options),
            1,
            MOST_PARTITIONS,
        )
        session = _config.agreed("session_timeout_ms", session_timeout_ms, "session.timeout.ms", options)
        self.session_timeout_ms: int = _count(
            "session_timeout_ms", SESSION_TIMEOUT_MS if session is None else session, 2000, 3_600_000
        )
        instance = _config.agreed("instance_id", instance_id, "group.instance.id", options, number=False)
        self.instance_id: str | None = None if instance is None else _name("instance_id", instance, "transactions")
        self._options = self._with_transactions(options)
        self._map: dict[int, str | None] = {}
        self._to_read: tuple[int, ...] | None = None
        self._touched: set[int] = set()
        self._in_transaction = self._aborting = self._doubted = self._initialised = self._subscribed = False
        self._committing: _Commit | None = None
        self._unseen: str | None = None
        self._dropped: str | None = None
        self._failed: str | None = None
        self._overlong = 0
        self._began = 0.0  # when the transaction did
        self._telling = False  # the listener is at it
        self._pid = os.getpid()
        self._told: tuple[int, ...] | None = None  # what the listener was last told to own
        self._listener: RebalanceListener | None = None
        self._news: deque[Callable[[], None]] = deque()  # for the listener
        self._due = self._make_at = 0.0  # when to look, and from when on to make a new producer
        self._read_s = SLICE_S  # for reading positions
        self._looked = float("inf")  # when the group was last looked after
        self._producer: Producer | None = Producer(self._options)
        try:
            self._membership = Membership(
                self._options,
                self.group_id,
                places.coordination_topic(self.group_id),
                self.session_timeout_ms,
                self.instance_id,
            )
        except BaseException:
            self._producer.close(0)
            raise
        self._positions = places.Positions(self._options, self.group_id, self._membership.consumer)
        self._closed = False
        _live.add(self)

    def _with_transactions(self, options: dict[str, Any]) -> dict[str, Any]:
        timeout = _count(
            "transaction.timeout.ms",
            _as_number(
                options.get("transaction.timeout.ms", max(1000, min(LONGEST_MS, self.session_timeout_ms * 2 // 3)))
            ),
            1000,
            2**31 - 1,
        )
        if timeout >= self.session_timeout_ms:
            raise ValueError(
                f"transaction.timeout.ms={timeout} must be below session_timeout_ms={self.session_timeout_ms}: else "
                "the transaction of a member that is gone would hold up its successor"
            )
        name = self.instance_id or uuid.uuid4().hex
        return {
            **options,
            # One that is given is only the beginning: each member needs its own. Names have no slash.
            "transactional.id": f"{options.get('transactional.id', 'fastprod-group')}/{self.group_id}/{name}",
            "transaction.timeout.ms": timeout,
            # A topic that is not there must be told before the transaction is over: after that nobody knows why.
            "topic.metadata.propagation.max.ms": options.get(
                "topic.metadata.propagation.max.ms", min(PROPAGATION_MS, timeout // 2)
            ),
        }

    # ---- membership

    def subscribe(
        self, listener: RebalanceListener | None = None, timeout: float | None = None
    ) -> dict[int, str | None]:
        """Joins the group. Returns what this member has to do: source partition -> position to go on from.

        A position is the one committed last, None if there is none yet. `{}` means standby: call `alive()` until there
        is something. Waits up to `timeout` seconds, which must include the session of a member that has just died;
        without, twice the session and a minute. Raises KafkaException when they are over; calling again goes on.

        A member that has subscribed may call this again to wait until the group has decided, and for the map.
        """
        self._check_usable(subscribed=False)
        if listener is not None:
            for name in ("on_assigned", "on_revoked", "on_lost"):
                if not callable(getattr(listener, name, None)):
                    raise TypeError(
                        f"listener must have the methods on_assigned(map), on_revoked(partitions) and "
                        f"on_lost(partitions), but {listener!r} has no {name}"
                    )
        patience = _seconds(timeout, 2 * self.session_timeout_ms / 1e3 + 60.0)
        deadline = time.monotonic() + patience
        if listener is not None:
            self._listener = listener
        if not self._subscribed:
            while not self._membership.reachable(SLICE_S):
                self._check_time(deadline, patience)
            self._positions.make_topics(self.source_partition_count)
            self._membership.join()
            self._subscribed = True
        while not self._serve(LOOK_S) or self._told is None:
            self._check_time(deadline, patience)
        self._deliver()
        self._unseen = self._dropped = None
        return dict(self._map)

    def _check_time(self, deadline: float, patience: float) -> None:
        """Raises KafkaException when subscribe() has waited for too long."""
        if time.monotonic() < deadline:
            return
        reason = self._positions.trouble if self._to_read is not None else self._membership.trouble
        trouble = f"; the last thing heard of was: {reason}" if reason else ""
        raise _timed_out(
            f"group {self.group_id!r} gave this member no answer within {patience:g} s{trouble}. Call subscribe() "
            "again, which goes on; a larger timeout includes the session of a member that died"
        )

    def alive(self, timeout: float = 0.0) -> None:
        """Keeps the membership while the source is idle; waits up to `timeout` seconds for news of the group.

        To be called more often than `session_timeout_ms`. If a rebalance takes a running transaction away, the next
        `produce` or `commit_transaction` says so.
        """
        self._check_usable()
        deadline = time.monotonic() + _seconds(timeout, 0.0)
        before = self._told
        self._serve(0.0)
        while time.monotonic() < deadline and before == self._told:
            self._serve(min(LOOK_S, max(0.0, deadline - time.monotonic())))
        self._deliver()

    @property
    def assignment(self) -> dict[int, str | None]:
        """What this member owns: source partition -> position, as last committed. Empty while the group decides."""
        self._unseen = None
        return dict(self._map)

    def _serve(self, wait: float) -> bool:
        """Looks after the membership; whether everything is in order to go on."""
        if self._producer is None:
            self._make_producer()
        self._poll(wait)
        return self._settle()

    def _poll(self, wait: float) -> None:
        """Takes over what the group has decided."""
        silent = time.monotonic() - self._looked > self.session_timeout_ms / 1e3
        if silent:
            self._doubt("this member was silent for longer than session_timeout_ms")
        self._membership.poll(wait)
        changes = self._membership.changes
        while changes:
            self._take(changes[0], silent)
            changes.popleft()
        self._looked = time.monotonic()
        self._due = self._looked + LOOK_S

    def _doubt(self, reason: str) -> None:
        """This member may own nothing any more, and librdkafka may learn of it later than others."""
        self._map = {}
        self._unseen = reason
        self._doubted = self._told is not None
        self._drop(reason)

    def _take(self, change: Change, silent: bool) -> None:
        """What the group has decided, before anybody is told."""
        self._doubted = False
        if change.kind == "assigned":
            beyond = [one for one in change.partitions if one >= self.source_partition_count]
            if beyond:
                raise ValueError(
                    f"topic {self._membership.topic!r} has a partition {beyond[0]}, but source_partition_count="
                    f"{self.source_partition_count}: somebody has added partitions to it"
                )
            self._to_read = change.partitions
            self._unseen = self._unseen or REBALANCED
            self._drop(REBALANCED)
            return
        lost = change.kind == "lost" or silent
        reason = "the group is being rebalanced"
        if silent:
            reason = "this member was silent for longer than session_timeout_ms, and the group has gone on without it"
        elif lost:
            reason = (
                "brokers and this member have not heard of each other for longer than session_timeout_ms: no broker "
                "was there, or this process was held up"
            )
        if self._told is not None:
            owned, self._told = list(self._told), None
            listener = self._listener
            if listener is not None:
                call = listener.on_lost if lost else listener.on_revoked
                self._news.append(partial(call, owned))
        self._map = {}
        self._to_read = None
        self._unseen = reason
        self._drop(reason)

    def _drop(self, reason: str) -> None:
        """The transaction will not be committed, unless it is being committed already."""
        if self._in_transaction and self._committing is None:
            self._aborting = True
            self._dropped = self._dropped or reason

    def _settle(self) -> bool:
        """One step towards being able to produce, of about a second at most; whether none is left."""
        if self._committing is not None:
            return False  # positions are unstable until that is over
        if self._aborting and not self._abort():
            return False
        if self._producer is None or not self._initialised:
            return self._initialise() and self._settle()
        if self._doubted and self._told is not None:
            if not self._membership.confirmed(self._read_s):
                self._read_s = min(2 * self._read_s, self.session_timeout_ms / 3e3)  # far brokers need longer
                return False
            self._doubted, self._to_read, self._read_s = False, self._told, SLICE_S
        if self._to_read is not None:
            found = self._positions.read(self._to_read, self._read_s) if self._takes_positions else {}
            if found is None:  # many partitions, or slow brokers, may need longer, but not so long that we are silent
                self._read_s = min(2 * self._read_s, self.session_timeout_ms / 3e3)
                return False
            self._read_s = SLICE_S
            self._positions.close()
            documents = {one: found.get(one) for one in self._to_read}
            self._map = {one: None if known is None else known["position"] for one, known in documents.items()}
            self._told = self._to_read
            self._to_read = None
            self._unseen = self._unseen or REBALANCED  # the caller may have looked before they were read
            if self._listener is not None:
                self._news.append(partial(self._listener.on_assigned, dict(self._map)))
        return True

    def _deliver(self) -> None:
        """Tells the listener; when it raises, the rest is told in the next call."""
        self._telling = True
        try:
            while self._news:
                self._news.popleft()()
        finally:
            self._telling = False

    # ---- the producer

    def _make_producer(self) -> None:
        # Whoever has taken over the same instance_id fences our membership at the next heartbeat. That must be seen
        # before we fence its producer.
        if time.monotonic() >= self._make_at:
            self._producer = Producer(self._options)
            self._initialised = False

    def _initialise(self) -> bool:
        """Ends what an earlier producer of this transactional.id has left; whether that is done."""
        producer = self._producer
        if producer is None:
            return False
        try:
            producer.init_transactions(SLICE_S)
        except KafkaException as problem:
            if _positions.is_passing(problem) and not problem.args[0].fatal():
                return False
            self._retire()
            raise
        self._initialised = True
        return True

    def _retire(self) -> None:
        """Brokers have ended this producer's transactions: the next one begins with what is committed."""
        producer, self._producer = self._producer, None
        if self._in_transaction:
            self._dropped = "its producer was fenced"  # also if Ctrl-C comes before the caller was told
        self._initialised = self._in_transaction = self._aborting = False
        self._committing = self._failed = None
        self._touched.clear()
        if self.instance_id is not None:
            self._make_at = time.monotonic() + 2 * heartbeat_ms(self.session_timeout_ms) / 1e3
        self._doubt("its producer was fenced")  # and nobody knows how its last transaction ended
        if producer is not None:
            _positions.end(producer)

    def _abort(self) -> bool:
        """Whether the transaction is over."""
        producer = self._producer
        if producer is not None:
            try:
                producer.abort_transaction(ABORT_S)
            except KafkaException as problem:
                if _positions.is_passing(problem) and not problem.args[0].fatal():
                    return False
                self._retire()
        self._in_transaction = self._aborting = False
        self._failed = None
        self._touched.clear()
        return True

    def _guarded(self, step: Callable[[], Any]) -> Any:
        """A step of a transaction; one that says that the transaction is gone ends in RebalanceError."""
        try:
            return step()
        except NotAMember as problem:
            self._doubt(str(problem))
            self._interrupt(str(problem), KafkaError.ILLEGAL_GENERATION)
        except KafkaException as problem:
            error = problem.args[0]
            if error.code() in REFUSED or isinstance(problem, RebalanceError):
                raise
            if error.fatal():
                took = time.monotonic() - self._began if self._in_transaction else 0.0
                self._retire()
                if took * 1e3 > self._options["transaction.timeout.ms"]:
                    self._give_up_overlong(took)
            elif error.code() in NOT_A_MEMBER:
                self._committing = None
                self._doubt(error.str())
            else:
                raise
            self._interrupt(error.str(), error.code())

    def _give_up_overlong(self, took: float) -> NoReturn:
        """Brokers have ended a transaction because of its age. Again and again: then whoever goes on gets nowhere."""
        self._overlong += 1
        reason = (
            f"it took {took:.1f} s, and brokers end a transaction after transaction.timeout.ms="
            f"{self._options['transaction.timeout.ms']}. Commit more often, or give a larger session_timeout_ms"
        )
        if self._overlong < MOST_OVERLONG:
            self._interrupt(reason, KafkaError.INVALID_PRODUCER_EPOCH)
        times, self._overlong = self._overlong, 0
        text = f"{times} transactions in a row were dropped, and none was committed in between. Of the last: {reason}"
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, text))

    def _interrupt(self, reason: str, code: int = KafkaError.REBALANCE_IN_PROGRESS) -> NoReturn:
        """Gives the group time to decide, so that `assignment` is right, then raises RebalanceError."""
        self._drop(reason)
        self._dropped = reason  # also if the listener raises or Ctrl-C comes before the caller was told
        deadline = time.monotonic() + min(SETTLE_S, self.session_timeout_ms / 1e3)
        wait = 0.0
        while not (self._serve(wait) and self._told is not None) and time.monotonic() < deadline:
            wait = LOOK_S
        self._deliver()
        self._unseen = self._dropped = None
        now = (
            f"now owns {sorted(self._map)}. Go on from `assignment`"
            if self._map
            else "owns nothing at present. Call alive() until `assignment` has something"
        )
        raise RebalanceError(KafkaError(code, f"the transaction is dropped: {reason}; this member {now}"))

    # ---- work

    def _look(self) -> None:
        """Raises RebalanceError if the caller's work is not what the group wants of it any more."""
        self._serve(0.0)
        reason = self._dropped or self._unseen
        if reason is not None:
            self._interrupt(reason)
        self._deliver()

    def _admit(self, source_partition: int) -> Producer:
        """Called before records of a source partition: a transaction is open then, of a member that owns it."""
        self._check_usable()
        self._check_partition(source_partition)
        self._check_not_committing()
        self._check_not_failed()
        self._look()
        if source_partition not in self._map:
            self._interrupt(f"source partition {source_partition} is not owned by this member")
        return self._begin(source_partition)

    def _begin(self, *source_partitions: int) -> Producer:
        producer = self._producer
        assert producer is not None  # _look() has settled that
        if not self._in_transaction:
            self._in_transaction = True  # first: after Ctrl-C in the call an abort finds out
            self._began = time.monotonic()
            try:
                self._guarded(producer.begin_transaction)
            except KafkaException:
                self._in_transaction = False
                raise
        self._touched.update(source_partitions)
        return producer

    def produce(self, topic: str, *arguments: Any, source_partition: int, **options: Any) -> None:
        """As `Producer.produce`, for a record from a source partition; begins a transaction if none is open."""
        producer = self._producer
        if (
            producer is None
            or source_partition not in self._touched
            or time.monotonic() >= self._due
            or self._dropped
            or self._committing is not None
        ):
            producer = self._admit(source_partition)
        try:
            producer.produce(topic, *arguments, **options)
        except KafkaException as problem:
            self._guarded(_raises(problem))

    def produce_many(self, topic: str, values: Any, *arguments: Any, source_partition: int, **options: Any) -> Receipt:
        """As `Producer.produce_many`, for records from one source partition."""
        producer = self._admit(source_partition)
        receipt: Receipt = self._guarded(lambda: producer.produce_many(topic, values, *arguments, **options))
        return receipt

    def produce_arrow(
        self, batch_or_table: Any, topic: str | None = None, *, source_partition: int, **options: Any
    ) -> Receipt:
        """As `Producer.produce_arrow`, for records from one source partition."""
        producer = self._admit(source_partition)
        receipt: Receipt = self._guarded(lambda: producer.produce_arrow(batch_or_table, topic, **options))
        return receipt

    # ---- the end of a transaction

    def commit_transaction(self, positions: str | Mapping[int, str], timeout: float = -1) -> None:
        """Commits what was produced, and where each source partition goes on: both are seen, or neither.

        `positions` is one string for all source partitions of this member, or a dict; positions of those of which the
        transaction has records must be there. When `timeout` seconds are over, it raises an error that is retriable:
        call it again with the same positions, which goes on; only that tells how it ended. Other errors that are no
        RebalanceError leave the transaction open: `abort()` it.
        """
        self._check_usable()
        until = _until(timeout)
        self._check_not_failed()
        if self._committing is None:
            self._check_positions(positions)
            self._look()
            wanted = self._wanted(positions)
            if not wanted:
                return
            self._write(wanted, positions, until)
        elif self._committing.given != positions:
            raise _state_error(
                f"commit_transaction({self._committing.given!r}) is not over, and may have succeeded: call it again "
                "with the same positions, which goes on with it"
            )
        self._end(until)

    def _wanted(self, positions: str | Mapping[int, str]) -> dict[int, str]:
        """The position of each source partition, all of them owned."""
        if isinstance(positions, str):
            gone = sorted(self._touched - self._map.keys())
            if gone:
                self._interrupt(f"source partition {gone[0]} is not owned by this member any more")
            return dict.fromkeys(self._map, positions)
        missing = sorted(self._touched - positions.keys())
        if missing:
            raise ValueError(
                f"positions={positions!r} has none for source partition {missing[0]}, of which the transaction has "
                "records: after a restart they would be produced again. Give its position too, or abort()"
            )
        foreign = sorted(positions.keys() - self._map.keys())
        if foreign:
            self._interrupt(f"source partition {foreign[0]} is not owned by this member")
        return dict(positions)

    def _write(self, wanted: dict[int, str], given: str | Mapping[int, str], until: float) -> None:
        """Everything but the commit itself: positions as records, and as the group's offsets."""
        at_ms = time.time_ns() // 10**6
        # A second attempt must have positions for all of these: their records are in the transaction then.
        producer = self._begin(*wanted)
        offsets = []
        for partition, position in wanted.items():
            kept = places.written(position, at_ms)
            offsets.append(TopicPartition(self._membership.topic, partition, 0, metadata=kept.metadata))
            topic, key = places.positions_topic(self.group_id), b"%d" % partition
            self._guarded(partial(producer.produce, topic, kept.record, key, partition))
        while self._guarded(lambda: producer.flush(min(SLICE_S, max(0.0, until - time.monotonic())))):
            self._look()
            if time.monotonic() > until:
                raise _timed_out(
                    f"{len(producer)} records of the transaction are not acknowledged yet, positions included: call "
                    "commit_transaction() again, or abort()"
                )
        self._look()
        patience = min(SEND_S, self.session_timeout_ms / 3e3)
        while True:
            group = self._guarded(self._membership.proof)
            try:
                self._guarded(partial(producer.send_offsets_to_transaction, offsets, group, patience))
                break
            except KafkaException as problem:
                if not _positions.is_passing(problem) or time.monotonic() > until:
                    raise
                self._look()
        self._committing = _Commit(given if isinstance(given, str) else dict(given), wanted)

    def _end(self, until: float) -> None:
        """Commits, as often as it takes to learn how that ends."""
        producer, commit = self._producer, self._committing
        assert producer is not None
        assert commit is not None
        while True:
            try:
                self._guarded(lambda: producer.commit_transaction(min(SLICE_S, max(0.0, until - time.monotonic()))))
                break
            except KafkaException as problem:
                if isinstance(problem, RebalanceError):
                    raise
                if not _positions.is_passing(problem):
                    self._committing = None  # it has failed: only an abort is left
                    if problem.args[0].txn_requires_abort():
                        self._fail(problem.args[0])
                    if problem.args[0].code() == KafkaError._STATE:  # interrupted between its end and our note of it
                        self._retire()
                        self._interrupt("nobody knows how the commit ended")
                    raise
                if time.monotonic() > until:
                    raise
                self._poll(0.0)  # a member that waits for brokers lives
        # In this order: if Ctrl-C comes in between, the commit is not over, and its next attempt reads positions again.
        for partition in self._map.keys() & commit.wanted.keys():
            self._map[partition] = commit.wanted[partition]
        self._touched.clear()
        self._in_transaction = False
        self._committing = None
        self._overlong = 0

    def _fail(self, error: KafkaError) -> NoReturn:
        self._failed = error.str().replace("abort_transaction()", "abort()")
        self._touched.clear()  # so that produce() does not take the short way
        self._check_not_failed()
        raise AssertionError

    def abort(self, timeout: float = -1) -> dict[int, str | None]:
        """Drops what was produced since the last commit. Returns `assignment`: the positions to rewind to."""
        self._check_usable()
        self._check_not_committing()
        until = _until(timeout)
        self._aborting = self._in_transaction
        while not self._serve(0.0):
            if time.monotonic() > until:
                raise _timed_out("the transaction is not aborted yet: call abort() again")
            time.sleep(0.05)
        self._deliver()
        self._unseen = self._dropped = None
        return dict(self._map)

    def close(self) -> None:
        """Aborts a running transaction and leaves the group, which hands this member's partitions over at once.

        A member with an `instance_id` keeps its partitions for the rest of `session_timeout_ms`, to come back to them.
        """
        if self._closed:
            return
        self._check_not_telling()
        self._closed = True
        if self._pid != os.getpid():
            return  # all of it is the parent's
        producer, self._producer = self._producer, None
        try:
            if producer is not None:
                if self._committing is not None:  # whose end is as good as the caller's next attempt
                    _quietly(lambda: producer.commit_transaction(ABORT_S))
                elif self._in_transaction:
                    _quietly(lambda: producer.abort_transaction(ABORT_S))
                _positions.end(producer)
        finally:
            self._map = {}
            self._positions.close()
            self._membership.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"owns {sorted(self._map)}" if self._subscribed else "not subscribed"
        return f"<ProducerGroup {self.group_id!r} of {self.source_partition_count}, {state}>"

    # ---- arguments

    def _check_usable(self, subscribed: bool = True) -> None:
        if self._closed:
            raise RuntimeError("ProducerGroup has been closed")
        if self._pid != os.getpid():
            raise ForkError(
                f"this ProducerGroup was made in process {self._pid} and cannot be used after fork(); make a new one "
                "in the child process"
            )
        self._check_not_telling()
        if subscribed and not self._subscribed:
            raise RuntimeError("call subscribe() first: it tells which source partitions are this member's")

    def _check_not_telling(self) -> None:
        if self._telling:
            raise RuntimeError("a listener must not call the group: note what it says, and act when the call is over")

    def _check_not_failed(self) -> None:
        if self._failed is not None:
            raise KafkaException(KafkaError(KafkaError._INCONSISTENT, self._failed, False, False, True))

    def _check_not_committing(self) -> None:
        if self._committing is not None:
            raise _state_error(
                "commit_transaction() timed out and may have succeeded: call it again with the same positions, which "
                "goes on with it"
            )

    def _check_partition(self, partition: Any) -> None:
        try:
            if isinstance(partition, bool):
                raise TypeError
            operator.index(partition)  # numpy's integers are some too
        except TypeError:
            raise TypeError(f"source_partition must be a whole number, not {partition!r}") from None
        if not 0 <= partition < self.source_partition_count:
            raise ValueError(
                f"source_partition={partition} must be from 0 to {self.source_partition_count - 1}, because "
                f"source_partition_count={self.source_partition_count}"
            )

    def _check_positions(self, positions: Any) -> None:
        """Everything that is wrong with positions is said before anything is sent."""
        if not isinstance(positions, (str, Mapping)):
            raise TypeError(
                f"positions must be a string, or a dict of source partitions and strings, not {positions!r}"
            )
        each = {0: positions} if isinstance(positions, str) else positions
        for partition, position in each.items():
            self._check_partition(partition)
            if not isinstance(position, str):
                raise TypeError(f"the position of source partition {partition} must be a string, not {position!r}")
            if json.loads(json.dumps(position)) != position:
                raise ValueError(
                    f"the position of source partition {partition} has a character in two halves, and would come back "
                    f"as another string: {position!r}"
                )
            places.check_long(partition, position, self._options)


class _Commit:
    """One that is under way."""

    def __init__(self, given: str | dict[int, str], wanted: dict[int, str]) -> None:
        self.given = given
        self.wanted = wanted


def _raises(problem: Exception) -> Callable[[], NoReturn]:
    def step() -> NoReturn:
        raise problem

    return step


def _quietly(step: Callable[[], object]) -> None:
    with suppress(KafkaException):  # brokers end the transaction when its time is over
        step()


def _state_error(text: str) -> KafkaException:
    return KafkaException(KafkaError(KafkaError._STATE, text))


def _timed_out(text: str) -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT, text, False, True))


def _seconds(given: Any, default: float) -> float:
    if given is None:
        return default
    if isinstance(given, bool) or not isinstance(given, (int, float)) or given < 0:
        raise ValueError(f"timeout={given!r} must be a number of seconds from 0 up")
    return float(given)


def _until(timeout: Any) -> float:
    """When a commit or abort gives up; as for a Producer, -1 is never."""
    if timeout is None or timeout == -1:
        return float("inf")
    return time.monotonic() + _seconds(timeout, 0.0)


def _as_number(given: Any) -> Any:
    return int(given) if isinstance(given, str) and given.strip().isdecimal() else given


def _count(argument: str, given: Any, least: int, most: int) -> int:
    if given is None:
        raise ValueError(f"{argument} is missing: give it as an argument, or under the KIP's name in the configuration")
    if isinstance(given, bool) or not isinstance(given, int) or not least <= given <= most:
        raise ValueError(f"{argument}={given!r} must be a whole number from {least} to {most}")
    return given


def _name(argument: str, given: Any, named: str) -> str:
    if given is None:
        raise ValueError(f"{argument} is missing: give it as an argument, or as group.id in the configuration")
    if not isinstance(given, str) or not re.fullmatch(rf"[a-zA-Z0-9._-]{{1,{LONGEST_NAME}}}", given):
        raise ValueError(
            f"{argument}={given!r} must be a name of 1 to {LONGEST_NAME} of the characters a-z, A-Z, 0-9, '.', '_' and "
            f"'-', because {named} are named after it"
        )
    return given


def _after_fork_in_child() -> None:
    # Destroying an inherited consumer aborts the process, also at its end: make sure that it never happens.
    for group in list(_live):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
