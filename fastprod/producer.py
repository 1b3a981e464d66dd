"""`fastprod.Producer`: confluent_kafka.Producer's interface on the compiled runtime."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import socket
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

import confluent_kafka
from confluent_kafka import KafkaError

from fastprod import _config
from fastprod._core import _runtime as core
from fastprod._core._client import plugin_path
from fastprod._core._runtime import Receipt, Runtime, check_headers
from fastprod.errors import AuthenticationError, BufferFullError

if TYPE_CHECKING:
    from fastprod.encoding import Encoder
    from fastprod.encoding._roles import Topics
    from fastprod.stats import ProducerStats

DeliveryCallback = Callable[[KafkaError | None, Any], None]

ABORT_S = 5.0  # for a transaction that is still open when its producer is dropped
FLIGHT_S = 10.0  # how long an abort waits for records on their way
STUCK_S = 30.0  # after its own timeout, a call of librdkafka's is not going to come back

_live: weakref.WeakSet[Producer] = weakref.WeakSet()
_stuck: list[Producer] = []  # in each of which a thread waits for librdkafka for ever
_numbers = itertools.count(1)


class Producer(confluent_kafka.Producer):
    """A Kafka producer with confluent-kafka's interface and Java's placement of records.

    Takes the configuration of `confluent_kafka.Producer` (dict, keywords, or both) plus `partitioner`,
    `buffer.memory`, `max.block.ms`, `sticky.batch.size` and Java's `partitioner.*` options. Records are sent by
    threads of the producer's own; callbacks run in `poll()` and `flush()`.

    >>> producer = Producer({"bootstrap.servers": "localhost:9092"})
    >>> producer.produce("orders", value=b"...", key=b"customer-17")
    >>> producer.flush()
    """

    _runtime: Runtime | None = None
    _level_count = 1  # of priority: topics are named after their level then
    _in_transaction = False
    _pending: str | None = None  # commit_transaction or abort_transaction, which timed out: librdkafka is at it
    _failed_before: Mapping[str, int] = {}  # records by topic, at the last commit that was refused for them
    _lost = 0  # records without outcome when it was closed
    _ending: threading.RLock  # while threads and librdkafka's client are ended
    _calls: set[object]  # that threads have in confluent-kafka's client, and that may take as long as brokers like
    _left = False  # the client, to the last of these calls, by close()
    _send_offsets = confluent_kafka.Producer.send_offsets_to_transaction
    name: str
    """Whose figures these are, in `stats()` and where those of several producers are merged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if self._runtime is not None:
            raise RuntimeError("Producer already __init__:ialized")
        if len(args) > 1:
            raise TypeError("expected tuple containing single dict")
        if not (args or kwargs) or (args and not isinstance(args[0], dict)):
            raise TypeError("expected configuration dict")
        settings, conf = _config.split({**(args[0] if args else {}), **kwargs}, plugin_path())
        self.name = f"{conf.get('client.id', 'fastprod')}-{next(_numbers)}@{socket.gethostname()}:{os.getpid()}"
        settings.levels = self._level_count
        self._ending = threading.RLock()
        self._calls = set()
        self._runtime = runtime = Runtime(settings)
        try:
            runtime.attach(lambda: super(Producer, self).__init__(conf))
            _live.add(self)
        except BaseException:  # also what a signal handler raises
            self._end(0)
            raise

    def _open(self) -> Runtime:
        runtime = self._runtime
        if runtime is None or runtime.closed:
            raise RuntimeError("Producer has been closed")
        runtime.assert_usable()
        return runtime

    @contextmanager
    def _passing(self) -> Iterator[Runtime]:
        """Around a call that confluent-kafka's client answers when brokers do. Its close() would wait for that."""
        self._open()
        call = object()
        try:
            self._calls.add(call)
            yield self._open()  # again: who closes it now sees the call
        finally:
            self._calls.discard(call)
            if self._left and not self._calls:
                self._end_left()

    # ---- single records

    produce = core.produce

    def produce_batch(
        self,
        topic: str,
        messages: list[dict[str, Any]],
        partition: int = -1,
        callback: DeliveryCallback | None = None,
        on_delivery: DeliveryCallback | None = None,
    ) -> int:
        """Accepts a list of dicts with `value`, `key`, `partition`, `headers`, `timestamp` and `callback`.

        Everything is checked before anything is accepted: what is wrong with a message is raised as TypeError or
        ValueError, and then none of them is. Returns how many were accepted; the others, for which there was no room,
        whose partition does not exist, which are too large or for which a partitioner raised, get the reason under
        `_error`. For large volumes `produce_many` is several times faster.
        """
        runtime = self._open()
        if not isinstance(topic, str):
            raise TypeError(f"topic must be str, not {type(topic).__name__}")
        if not isinstance(messages, list):
            raise TypeError("messages must be a list")
        default = callback if callback is not None else on_delivery
        _check_text(topic, "topic")
        _check_integer(partition, "partition", -(2**31), 2**31)
        _check_callback(default, "on_delivery")
        records = [_arguments(message, index, partition, default) for index, message in enumerate(messages)]
        accepted = 0
        for message, record in zip(messages, records, strict=True):
            message.pop("_error", None)  # of an earlier attempt
            try:
                core.produce(self, topic, *record)
                accepted += 1
            except Exception as error:
                told = error.args[0] if isinstance(error, confluent_kafka.KafkaException) and error.args else None
                if isinstance(error, BufferFullError):
                    told = KafkaError(KafkaError._QUEUE_FULL, str(error))
                elif not isinstance(told, KafkaError):
                    if runtime.partitioner is None or runtime.closed:
                        raise
                    told = KafkaError(KafkaError._APPLICATION, f"the partitioner raised {error!r}")
                message["_error"] = told
                if told.code() != KafkaError._STATE:  # else there is no transaction that it could be missing in
                    runtime.note_rejected(topic, told.code())
        return accepted

    # ---- bulk

    def produce_many(
        self,
        topic: str,
        values: Any,
        keys: Any = None,
        partitions: Any = None,
        headers: Any = None,
        timestamps: Any = None,
        *,
        receipt: Receipt | None = None,
    ) -> Receipt:
        """Accepts a column of records: lists, numpy arrays, Arrow arrays or (offsets, data) pairs.

        `keys` is a column like `values`; `partitions` and `timestamps` (ms) are integers per record, or one for
        all, and where they are null or masked, the partition is chosen and the time is now; `headers` is a list with a
        dict or a list of (name, value) per record, or one for all. Columns of any two forms go together.

        The columns are checked before anything is accepted: lengths, types, whether integers fit, whether the elements
        of an Arrow array lie within its buffers. What is wrong with a single record is found in the Receipt.

        Whatever the caller does with its memory after the call, what was given is what arrives. Values of 512 bytes and
        more are not copied where nobody can change them: in bytes and str objects, in Arrow buffers that Arrow has
        allocated itself (pyarrow.array, its readers and functions) and in those over bytes objects (streams read from
        Python files, as in Spark). They are kept until acknowledged. All other memory is copied: numpy, bytearray,
        Arrow buffers over these, mapped files, data of other libraries. Only who writes into memory that Arrow has
        allocated (`numpy.frombuffer` over an array's buffer, a `pyarrow.allocate_buffer` used again) changes records
        that wait.

        A call larger than `buffer.memory` streams through it. Returns a Receipt at once when everything is accepted;
        one from an earlier call to the same topic can be given as `receipt` and then covers this call too.
        """
        from fastprod import _bulk

        runtime = self._open()
        receipt = runtime.receipt(topic, receipt)
        for block in _bulk.blocks_of_columns(values, keys, partitions, headers, timestamps):
            runtime.submit(receipt, *block)
        return receipt

    def produce_arrow(
        self,
        batch_or_table: Any,
        topic: str | None = None,
        *,
        value: str | Encoder | None = None,
        key: str | Encoder | None = None,
        headers: str | None = None,
        timestamp: str | None = None,
        partition: str | None = None,
        receipt: Receipt | None = None,
    ) -> Receipt:
        """Accepts an Arrow RecordBatch, Table or reader: with the columns of Spark's Kafka sink, or any with `value=`.

        Without `value=`, a column `value` is required; `key`, `headers` (list of key/value structs), `topic`,
        `partition` and `timestamp` (ms integers or Arrow timestamps) may be there. The `topic` argument beats the
        column. `receipt` and memory as for `produce_many`. A table is checked before anything is accepted, a reader
        batch by batch.

        With `value=` an encoder, such as `fastprod.encoding.Json()`, makes the value of the row's columns, or the
        column of that name has it ready. No column has a meaning then but `topic`, where that argument is missing:
        `key` is an encoder or the name of a column (text and bytes as they are, integers and booleans as text), the
        others are names of columns. What is used for them is also in the value, unless the encoder leaves it out. A
        row that cannot be encoded fails alone, and is found in the Receipt.
        """
        named = (value, key, headers, timestamp, partition)
        if any(one is not None for one in named):
            return self._produce_rows(batch_or_table, topic, named, receipt)
        from fastprod import _bulk

        runtime = self._open()
        batches = _bulk.checked_batches(batch_or_table, topic)
        receipt = runtime.receipt(topic, receipt)
        for block in _bulk.blocks_of_batches(batches, topic is None):
            runtime.submit(receipt, *block)
        return receipt

    def _produce_rows(
        self,
        source: Any,
        topic: str | None,
        named: tuple[Any, ...],
        receipt: Receipt | None,
        topics: Topics | None = None,
    ) -> Receipt:
        """`produce_arrow` with named parts; `topics` gives those of a batch, if neither argument nor column does."""
        from fastprod.encoding import _roles

        runtime = self._open()
        blocks = _roles.blocks(source, topic, _roles.Roles.of(*named), topics)
        receipt = runtime.receipt(topic if topics is None else None, receipt)
        for block in blocks:
            runtime.submit(receipt, *block)
        return receipt

    # ---- progress

    poll = core.poll

    def flush(self, timeout: float = -1) -> int:
        """Waits until every record accepted before this call has its outcome, running callbacks.

        Returns how many records are still open after `timeout` seconds; 0 when all are done.
        """
        return self._open().flush(-1 if timeout is None else timeout)

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        """Gives up records: waiting ones (`in_queue`) and sent ones not yet acknowledged (`in_flight`)."""
        self._open().purge(in_queue, in_flight, blocking)

    def __len__(self) -> int:
        runtime = self._runtime
        return 0 if runtime is None or runtime.closed or runtime.forked else runtime.outstanding()

    def __bool__(self) -> bool:
        return True

    def stats(self) -> ProducerStats:
        """What it has done and what it holds: by topic and used partition, by broker, and in all.

        Cheap enough to call every second; also after `close()`. See fastprod.stats.
        """
        from fastprod import stats

        if self._runtime is None:
            raise RuntimeError("Producer has been closed")
        return stats.read(self._runtime, self.name)

    # ---- transactions

    def init_transactions(self, *args: Any) -> None:
        """Fences older instances with the same `transactional.id` and ends what they left behind."""
        runtime = self._open()
        timeout = args[0] if args else -1
        until = time.monotonic() + timeout if timeout >= 0 else float("inf")
        while True:
            try:
                # In slices: librdkafka takes up again where it was, and neither a refusal nor close() would end it.
                with self._passing():
                    return super().init_transactions(max(0.0, min(1.0, until - time.monotonic())))
            except confluent_kafka.KafkaException as error:
                if not error.args[0].retriable():
                    raise
                runtime.check_access()
                if time.monotonic() >= until:
                    raise _with_reason(error, runtime) from None
                time.sleep(0.05)

    def begin_transaction(self) -> None:
        """Starts a transaction; records may be produced from now on."""
        runtime = self._open()
        if self._pending:
            self._raise_verdict()
            raise _state_error(
                f"the last transaction is not over: {self._pending}() timed out, so its outcome is open; call "
                f"{self._pending}() again, which goes on with it"
            )
        if runtime.ends_lost:
            raise _state_error(
                "a request to end an earlier transaction was lost without an answer. Brokers may still act on it, and "
                "would end the next transaction half-way: make a new Producer with the same transactional.id, whose "
                "init_transactions() rules that out",
                fatal=True,
            )
        super().begin_transaction()
        self._in_transaction = True
        runtime.open_transaction()

    def send_offsets_to_transaction(self, *args: Any) -> None:
        """Adds consumer offsets to the transaction: positions, group_metadata, timeout.

        librdkafka 2.16 may never answer, whatever the timeout, when the group's coordinator dies meanwhile. Half a
        minute after the timeout that is a fatal error: only another producer helps, whose init_transactions() aborts
        this transaction. Without a timeout it waits for ever.
        """
        self._open()
        if len(args) < 3 or args[2] is None or args[2] < 0:
            with self._passing():
                return self._send_offsets(*args)
        answer: Future[None] = Future()

        def ask() -> None:
            try:
                with self._passing():
                    outcome = self._send_offsets(*args)
                answer.set_result(outcome)
            except BaseException as problem:
                answer.set_exception(problem)

        threading.Thread(target=ask, name="fastprod sends offsets", daemon=True).start()
        try:
            return answer.result(args[2] + STUCK_S)
        except TimeoutError:
            _stuck.append(self)
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # destroying it would wait too, at exit as well
            raise confluent_kafka.KafkaException(
                KafkaError(
                    KafkaError._TIMED_OUT,
                    f"librdkafka has not answered send_offsets_to_transaction() for {args[2] + STUCK_S:g} s, and is "
                    "not going to: a coordinator has died meanwhile. Make another producer with this transactional.id",
                    fatal=True,
                )
            ) from None

    def commit_transaction(self, timeout: float = -1) -> None:
        """Sends and waits for everything produced in the transaction, then commits it.

        From here on no thread can produce. When this times out, call it again: that goes on with the commit, and is
        the only way to learn how it ended. When records have failed, only `abort_transaction()` is left.
        """
        runtime = self._open()
        if self._pending == "abort_transaction":
            raise _state_error("abort_transaction() timed out and is not over: call it again, which goes on with it")
        start = time.monotonic()
        if self._in_transaction and not self._pending:
            runtime.shut_transaction("the transaction is being committed: begin another one before you produce")
            if runtime.records and runtime.flush(timeout):
                raise confluent_kafka.KafkaException(
                    KafkaError(
                        KafkaError._TIMED_OUT,
                        f"{len(self)} records of the transaction are not acknowledged yet; commit again or abort"
                        + (f" ({trouble})" if (trouble := runtime.trouble()) else ""),
                        False,
                        True,
                    )
                )
            failed, first_error = runtime.failures()
            if failed:
                self._raise_verdict()
                where = self._newly_failed()
                # librdkafka has not seen those that failed before they reached it, and would commit the rest.
                raise confluent_kafka.KafkaException(
                    KafkaError(
                        KafkaError._INCONSISTENT,
                        f"{failed} records of the transaction failed{where}, the first with "
                        f"«{KafkaError(first_error).str()}»; call abort_transaction()",
                        False,
                        False,
                        True,
                    )
                )
        self._end_transaction(
            "commit_transaction",
            lambda: super(Producer, self).commit_transaction(
                timeout if timeout < 0 else max(0, timeout - time.monotonic() + start)
            ),
        )

    def abort_transaction(self, timeout: float = -1) -> None:
        """Drops everything produced in the transaction and aborts it.

        When this times out, call it again: that goes on with it.
        """
        runtime = self._open()
        if self._pending == "commit_transaction":
            raise _state_error(
                "commit_transaction() timed out and may still succeed: call it again, which goes on with it, and abort "
                "only if it says so"
            )
        start = time.monotonic()
        if self._in_transaction and not self._pending:
            runtime.shut_transaction("the transaction is being aborted: begin another one before you produce")
            failed_before = runtime.failures()[0]
            runtime.drop_waiting()
            # An abort that overtakes records on their way is fatal on Kafka 4 (librdkafka #4849).
            if not failed_before and not self._has_verdict():
                runtime.await_flight(FLIGHT_S if timeout < 0 else min(FLIGHT_S, timeout / 2))
        self._end_transaction(
            "abort_transaction",
            lambda: super(Producer, self).abort_transaction(
                timeout if timeout < 0 else max(0, timeout - time.monotonic() + start)
            ),
        )

    def _end_transaction(self, name: str, end: Callable[[], None]) -> None:
        """Runs librdkafka's side of it. While that times out it can only be called again."""
        with self._passing() as runtime:
            try:
                end()
                self._in_transaction, self._pending = False, None
            except confluent_kafka.KafkaException as error:
                if error.args[0].code() != KafkaError._CONFLICT:  # else another call is at it, and this one never began
                    self._pending = name if error.args[0].retriable() else None
                raise
            finally:
                runtime.settle_outcomes()

    def _newly_failed(self) -> str:
        """The topics whose records have failed since the last transaction of which some had."""
        now = {name: told.total.errors for name, told in self.stats().topics.items()}
        found = [name for name, errors in now.items() if errors > self._failed_before.get(name, 0)]
        self._failed_before = now
        return f" (topic {', '.join(map(repr, sorted(found)))})" if found else ""

    def _raise_verdict(self) -> None:
        """Raises what librdkafka has against the running transaction, if anything: it says whether that is fatal."""
        try:
            super().begin_transaction()  # never begins one here: it tells the state
        except confluent_kafka.KafkaException as error:
            if error.args[0].code() not in (KafkaError._STATE, KafkaError._CONFLICT):
                raise

    def _has_verdict(self) -> bool:
        try:
            self._raise_verdict()
        except confluent_kafka.KafkaException:
            return True
        return False

    # ---- pass-through, with our checks

    def list_topics(self, *args: Any, **kwargs: Any) -> Any:
        """Cluster metadata, as in confluent-kafka."""
        with self._passing() as runtime:
            try:
                return super().list_topics(*args, **kwargs)
            except confluent_kafka.KafkaException as error:
                raise _with_reason(error, runtime) from None

    def cluster_id(self, *args: Any, **kwargs: Any) -> str:
        """The cluster's id, as in confluent-kafka; close() ends the call."""
        runtime = self._open()
        try:
            return super().cluster_id(*args, **kwargs)
        except confluent_kafka.KafkaException as error:
            raise _with_reason(error, runtime) from None

    def set_sasl_credentials(self, *args: Any, **kwargs: Any) -> Any:
        """New SASL credentials for later connections."""
        self._open()
        return super().set_sasl_credentials(*args, **kwargs)

    # ---- end

    def close(self, timeout: float = -1) -> bool:
        """Flushes (up to `timeout` seconds), then ends the producer; True when every record had its outcome.

        A running transaction is aborted. When a callback raises, everything else is still delivered and every other
        callback runs; the first exception is raised when the producer has ended.
        """
        runtime = self._runtime
        until = float("inf") if timeout is None or timeout < 0 else time.monotonic() + timeout
        if runtime is None or runtime.closed:
            return self._has_ended(until)  # another thread may be at it
        runtime.assert_usable()
        raised: list[Exception] = []
        try:
            while not _ran(lambda: runtime.flush(_left(until)), raised) and time.monotonic() < until:
                if runtime.closed:  # by another thread, or by the callback that raised
                    break
        except BaseException:  # Ctrl-C, or brokers that refuse us
            lost = self._end(0)
            self._run_callbacks(runtime, raised)
            for error in raised:
                core.tell(error)
            if lost:
                _warn_lost(lost, "was closed")
            raise
        self._end(_left(until))
        ended = self._has_ended(until)
        self._run_callbacks(runtime, raised)
        if raised:
            for error in raised[1:]:
                core.tell(error)
            raise raised[0]
        return ended

    def _run_callbacks(self, runtime: Runtime, raised: list[Exception]) -> None:
        """Those of records that were given up just now."""
        while not _ran(runtime.run_callbacks, raised):
            pass

    def _has_ended(self, until: float) -> bool:
        """Whether every record had its outcome; False as well while another thread is ending it when time is up."""
        if self._runtime is not None and not self._runtime.forked:
            if not self._ending.acquire(timeout=_left(until)):
                return False
            self._ending.release()
        return self._lost == 0

    def _end(self, patience: float = ABORT_S) -> int:
        """Ends threads and librdkafka's client, unless another thread does; returns how many records that cost.

        `patience`, in seconds or -1 for ever, is for that thread, or for the abort of a running transaction.
        """
        runtime = self._runtime
        if runtime is None or runtime.forked or not self._ending.acquire(timeout=patience):
            return 0
        try:
            if runtime.closed:
                return 0
            self._lost = runtime.stop()
            self._end_client(runtime, patience)
            return self._lost
        finally:
            self._ending.release()

    def _end_client(self, runtime: Runtime, patience: float) -> None:
        if any(self is one for one in _stuck):
            return  # confluent-kafka would wait for the call that does not come back
        over = not self._in_transaction or self._abort_within(patience)
        if not over or runtime.flying:
            runtime.give_up()
        self._left = True
        if self._calls:
            return  # other threads may wait for brokers for ever: the last of them ends the client
        self._left = False
        if not over or runtime.flying:
            # confluent-kafka's close() would wait for brokers for ever, to end the transaction or to give records back.
            # The client ends with this object instead, and brokers end the transaction after transaction.timeout.ms.
            return
        try:
            super().close()
        finally:
            _live.discard(self)  # not before: a child process must not destroy what it inherits of the client
            runtime.finish()

    def _end_left(self) -> None:
        """Ends the client that close() has left to the last call, unless it has done so itself meanwhile."""
        with self._ending:
            if self._left and self._runtime is not None:
                self._end_client(self._runtime, 0)

    def _abort_within(self, timeout: float) -> bool:
        """Whether the transaction is over: aborted, or beyond help."""
        try:
            super().abort_transaction(timeout)
        except confluent_kafka.KafkaException as error:
            return not error.args[0].retriable()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object = None, *exc_info: object) -> None:
        try:
            self.close()
        except AuthenticationError:
            if kind is None:  # else the block's own exception tells more
                raise

    def __del__(self) -> None:
        lost = self._end()
        if lost:
            _warn_lost(lost, "was garbage-collected")

    def __repr__(self) -> str:
        runtime = self._runtime
        state = "closed" if runtime is None or runtime.closed else f"{len(self)} records outstanding"
        return f"<{type(self).__module__}.{type(self).__qualname__} {state}>"


def _left(until: float) -> float:
    return -1 if until == float("inf") else max(0.0, until - time.monotonic())


def _ran(call: Callable[[], object], raised: list[Exception]) -> bool:
    """Whether the call came to its end; what a callback in it raised is kept."""
    try:
        call()
    except AuthenticationError:
        raise
    except Exception as error:
        raised.append(error)
        return False
    return True


def _state_error(text: str, fatal: bool = False) -> confluent_kafka.KafkaException:
    return confluent_kafka.KafkaException(KafkaError(KafkaError._STATE, text, fatal))


def _arguments(message: Any, index: int, partition: int, callback: DeliveryCallback | None) -> tuple[Any, ...]:
    """What produce() gets of a message of produce_batch() besides the topic, if nothing is wrong with it."""
    if not isinstance(message, dict):
        raise TypeError(f"Message at index {index} must be a dict")
    value, key, wanted, own, timestamp, headers = map(
        message.get, ("value", "key", "partition", "callback", "timestamp", "headers")
    )
    for name, content in (("value", value), ("key", key)):
        if content is not None and type(content) is not bytes:
            _check_text(content, f"Message {name} at index {index}")
    if wanted is not None:
        _check_integer(wanted, f"Message partition at index {index}", -(2**31), 2**31)
    if timestamp is not None:
        _check_integer(timestamp, f"Message timestamp at index {index}", 0, 2**63)
    _check_callback(own, f"Message callback at index {index}")
    if headers is not None:
        try:
            check_headers(headers)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"Message headers at index {index}: {error}") from None
    return (
        value,
        key,
        partition if wanted is None else wanted,
        callback if own is None else own,
        None,
        timestamp or 0,
        headers,
    )


def _check_text(content: Any, what: str) -> None:
    if isinstance(content, str):
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{what} is no valid UTF-8: {error.reason}") from None
    elif not isinstance(content, (bytes, bytearray, memoryview)):
        raise TypeError(f"{what} must be bytes or str")
    elif isinstance(content, memoryview):
        try:
            contiguous = content.c_contiguous
        except ValueError:  # released
            contiguous = False
        if not contiguous:
            raise TypeError(f"{what} must be bytes or str, not a memoryview that is released or not contiguous")


def _check_integer(number: Any, what: str, least: int, beyond: int) -> None:
    if not isinstance(number, int):
        raise TypeError(f"{what} must be int, not {type(number).__name__}")
    if not least <= number < beyond:
        raise ValueError(f"{what} must be from {least} to {beyond - 1}, not {number}")


def _check_callback(callback: Any, what: str) -> None:
    if callback is not None and not callable(callback):
        raise TypeError(f"{what} must be callable, not {type(callback).__name__}")


def _with_reason(error: confluent_kafka.KafkaException, runtime: Runtime) -> confluent_kafka.KafkaException:
    """The same error, with the reason why brokers cannot be reached."""
    told, trouble = error.args[0], runtime.trouble()
    if not trouble:
        return error
    return confluent_kafka.KafkaException(
        KafkaError(told.code(), f"{told.str()}: {trouble}", told.fatal(), told.retriable(), told.txn_requires_abort())
    )


def _warn_lost(count: int, when: str) -> None:
    warnings.warn(
        f"{count} records had not been acknowledged when their fastprod.Producer {when}; "
        "call flush() or close(), or use it as a context manager",
        RuntimeWarning,
        stacklevel=3,
    )


def _at_exit() -> None:
    ended = [producer._end() for producer in list(_live)]
    for lost in filter(None, ended):
        with suppress(RuntimeWarning):  # warnings may be errors, but nobody could catch them here
            _warn_lost(lost, "ended with the interpreter")


def _after_fork_in_child() -> None:
    # Destroying an inherited client can crash: make sure that it never happens, not even at exit.
    for producer in list(_live):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(producer))
    _live.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
