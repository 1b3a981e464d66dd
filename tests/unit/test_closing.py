"""How a producer ends: callbacks that raise, other threads that still produce, records that nobody takes any more."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from programs import run, wait_until

from fastprod import Producer
from fastprod.receipt import Extent
from fastprod.testing import MockCluster

pytestmark = pytest.mark.mock_cluster(brokers=1, topics={"t": 3, "u": 1})


def conf(cluster: MockCluster, **options: Any) -> dict[str, Any]:
    return {"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, "error_cb": lambda error: None, **options}


def written(cluster: MockCluster, *topics: str) -> int:
    return sum(high for topic in topics for _, high in cluster.watermarks(topic).values())


@pytest.mark.parametrize("way", ["close", "with"])
def test_a_callback_that_raises_costs_no_record_and_no_other_callback(
    mock_cluster: MockCluster, way: str, unraisable: list[BaseException]
) -> None:
    ran: list[int] = []

    def note(n: int) -> Callable[..., None]:
        def callback(error: object, message: object) -> None:
            ran.append(n)
            if n % 100 == 50:
                raise ValueError(f"callback {n}")

        return callback

    producer = Producer(conf(mock_cluster, **{"linger.ms": 1}))
    for n in range(1000):
        producer.produce("t", b"%d" % n, on_delivery=note(n))
        if n % 100 == 0:
            time.sleep(0.002)  # in several chunks
    end = producer.close if way == "close" else producer.__exit__
    with pytest.raises(ValueError, match="callback"):
        end()
    assert sorted(ran) == list(range(1000))
    assert written(mock_cluster, "t") == 1000
    assert len(unraisable) == 9  # the first was raised
    assert producer.close() is True


def test_a_second_close_tells_what_the_first_one_lost(mock_cluster: MockCluster) -> None:
    producer = Producer(conf(mock_cluster))
    mock_cluster.down()
    producer.produce("t", b"never")
    assert producer.close(0) is False
    assert producer.close() is False


class _First:
    """A partitioner of the user's own."""

    def partition(self, topic: str, key: object, value: object, partitions: int, available: list[int]) -> int:
        return 0


@pytest.mark.parametrize("partitioner", ["uniform", "python"])
@pytest.mark.parametrize("call", ["single", "bulk", "list with headers", "topic column"])
def test_what_other_threads_produce_while_it_closes_is_refused_or_has_an_outcome(
    mock_cluster: MockCluster, call: str, partitioner: str
) -> None:
    """Each accepted record is in the log or told as failed; nobody hangs, nothing crashes."""
    values = [b"v" * 50] * 500
    table = pa.table({"value": values, "topic": ["t", "u"] * 250})
    for round_number in range(4):
        more = {"partitioner": _First()} if partitioner == "python" else {}
        producer = Producer(conf(mock_cluster, **{"buffer.memory": 200_000, "linger.ms": 0}, **more))
        before = written(mock_cluster, "t", "u")
        told: list[object] = []
        receipts: list[Any] = []
        accepted = [0, 0, 0]

        def work(
            n: int,
            producer: Producer = producer,
            told: list = told,
            receipts: list = receipts,
            accepted: list = accepted,
        ) -> None:
            try:
                while True:
                    if call == "single":
                        with contextlib.suppress(BufferError):  # all callbacks are due, and nobody else polls
                            producer.poll(0)
                            producer.produce("t", b"v" * 50, on_delivery=lambda *outcome: told.append(outcome[0]))
                            accepted[n] += 1
                    elif call == "bulk":
                        receipts.append(producer.produce_many("t", values))
                    elif call == "list with headers":
                        receipts.append(producer.produce_many("t", values, headers=[{"h": b"1"}] * 500))
                    else:
                        receipts.append(producer.produce_arrow(table))
            except RuntimeError as error:
                assert "closed" in str(error)  # noqa: PT017

        threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.05 * round_number)
        producer.close(0)
        for thread in threads:
            thread.join(300)
        assert not any(thread.is_alive() for thread in threads)
        if call == "single":
            # An answer may be lost with the connection: told as failed and written is allowed, not the reverse.
            assert len(told) == sum(accepted)
            assert written(mock_cluster, "t") - before >= sum(problem is None for problem in told)
        else:
            assert all(receipt.done for receipt in receipts)
            assert written(mock_cluster, "t", "u") - before >= sum(receipt.acknowledged for receipt in receipts)


def test_a_closed_producer_does_not_keep_its_chunks_for_a_receipt(mock_cluster: MockCluster) -> None:
    with Producer(conf(mock_cluster)) as producer:
        receipt = producer.produce_many("u", np.full(20_000, b"v" * 100))
        assert receipt.wait(120)
    assert receipt.extents == {("u", 0): Extent(20_000, 0, 19_999)}
    assert producer._runtime.cached == 0


@pytest.mark.parametrize("closer", ["another thread", "the callback"])
def test_a_close_whose_producer_is_closed_meanwhile_ends(mock_cluster: MockCluster, closer: str) -> None:
    entered, closed = threading.Event(), threading.Event()
    producer = Producer(conf(mock_cluster))

    def callback(error: object, message: object) -> None:
        entered.set()
        if closer == "the callback":
            producer.close(0)
        else:
            closed.wait(300)
        raise ValueError("the callback's own")

    producer.produce("t", b"v", on_delivery=callback)
    raised: list[BaseException] = []

    def close() -> None:
        try:
            producer.close()
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    assert entered.wait(300)
    if closer == "another thread":
        producer.close(0)
        closed.set()
    thread.join(300)
    assert not thread.is_alive()
    assert [str(error) for error in raised] == ["the callback's own"]
    assert producer.close() is True  # the record had been acknowledged


def test_whoever_closes_tells_the_same_of_what_was_lost(mock_cluster: MockCluster) -> None:
    producer = Producer(conf(mock_cluster))
    producer.produce("u", b"v")
    assert producer.flush(120) == 0
    mock_cluster.set_rtt(60_000)
    failed: list[object] = []
    for _ in range(100):
        producer.produce("u", b"v", on_delivery=lambda error, message: failed.append(error))
    said: list[bool] = []
    waiting = threading.Thread(target=lambda: said.append(producer.close()))
    waiting.start()
    assert producer.close(0.2) is False
    waiting.join(300)
    assert said == [False]
    assert producer.close() is False
    assert len(failed) == 100
    assert all(failed)


def test_ctrl_c_in_close_still_tells_what_became_of_the_records(mock_cluster: MockCluster) -> None:
    producer = Producer(conf(mock_cluster))
    producer.produce("u", b"v")
    assert producer.flush(120) == 0
    mock_cluster.set_rtt(60_000)
    told: list[Any] = []
    for _ in range(10):
        producer.produce("u", b"v", on_delivery=lambda error, message: told.append(error.name()))
    ours = threading.get_ident()

    def is_closing() -> bool:
        frame = sys._current_frames()[ours]
        while frame is not None and frame.f_code is not Producer.close.__code__:
            frame = frame.f_back
        return frame is not None and frame.f_locals.get("raised") == []

    def interrupt() -> None:
        assert wait_until(is_closing)
        time.sleep(0.2)  # until it flushes, which takes for ever
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt), pytest.warns(RuntimeWarning, match="10 records"):
        producer.close()
    interrupting.join()
    assert len(told) == 10
    assert producer.close() is False


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads through Linux's /proc")
@pytest.mark.parametrize("line", ["_live.add(self)", "set_newborn", "runtime.attach"])
def test_an_exception_while_it_is_made_leaves_no_thread(mock_cluster: MockCluster, line: str) -> None:
    """As from a signal handler: before librdkafka's client is there, right behind that, and behind our threads."""
    made: list[Producer] = []

    class Watched(Producer):
        def __init__(self, config: dict[str, Any]) -> None:
            made.append(self)  # half-made objects may stay in reach
            super().__init__(config)

    def trace(frame: Any, event: str, argument: object) -> Any:
        if frame.f_code is Producer.__init__.__code__:

            def at_line(frame: Any, event: str, argument: object) -> Any:
                with open(frame.f_code.co_filename) as source:
                    text = source.readlines()[frame.f_lineno - 1].strip()
                if event == "line" and text.startswith(line):
                    raise KeyboardInterrupt
                return at_line

            return at_line
        if frame.f_code.co_name == "<lambda>" and "attach" in _text(frame) and line == "set_newborn":

            def at_return(frame: Any, event: str, argument: object) -> Any:
                if event == "return":
                    raise KeyboardInterrupt
                return at_return

            return at_return
        return None

    with Producer(conf(mock_cluster)) as warm:
        warm.produce("t", b"v")
    before = _threads()
    for _ in range(5):
        sys.settrace(trace)
        try:
            with pytest.raises(KeyboardInterrupt):
                Watched(conf(mock_cluster))
        finally:
            sys.settrace(None)
    assert wait_until(lambda: _threads() <= before)
    for producer in made:
        assert producer.close() is True
        with pytest.raises(RuntimeError, match="closed"):
            producer.produce("t", b"v")


def _text(frame: Any) -> str:
    with open(frame.f_code.co_filename) as source:
        return source.readlines()[frame.f_lineno - 1]


AT_EXIT = """
from fastprod import Producer
from fastprod.testing import MockClusterProcess
import fastprod.producer as module

ended = module.Producer._end
module.Producer._end = lambda self, *args: print("ended") or ended(self, *args)
cluster = MockClusterProcess(1, topics={"t": 1})
producers = [Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0}) for _ in range(3)]
for producer in producers:
    producer.produce("t", b"v")
    producer.flush(120)
cluster.set_rtt(60_000)
for producer in producers:
    producer.produce("t", b"v")
module._kept = producers
"""


def test_all_producers_end_with_the_interpreter_though_warnings_are_errors() -> None:
    done = run("-W", "error::RuntimeWarning", "-c", AT_EXIT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["ended"] * 3


def test_a_close_does_not_wait_for_another_longer_than_it_was_told(mock_cluster: MockCluster) -> None:
    """The other waits for brokers that are gone, to abort its transaction."""
    producer = Producer(conf(mock_cluster, **{"transactional.id": "x"}))
    producer.init_transactions(120)
    producer.begin_transaction()
    producer.produce("t", b"v")
    assert producer.flush(120) == 0
    mock_cluster.down()
    patient = threading.Thread(target=producer.close, daemon=True)
    patient.start()
    assert wait_until(lambda: producer._runtime.closed)
    assert producer.close(0.5) is False
    mock_cluster.up()
    patient.join(300)
    assert not patient.is_alive()
    assert producer.close() is True


def _note(outcomes: list[object], error: object, message: object) -> None:
    outcomes.append(error)


def test_a_transactional_producer_closed_at_once_tells_all_outcomes() -> None:
    """librdkafka's own threads settle its records, also the last ones."""
    with MockCluster(3, topics={"t": 20}) as cluster:
        for turn in range(20):
            outcomes: list[object] = []
            cluster.set_rtt(0)
            producer = Producer(
                {
                    "bootstrap.servers": cluster.bootstrap_servers,
                    "log_level": 0,
                    "transactional.id": f"turn-{turn}",
                    "linger.ms": 0,
                    "error_cb": lambda error: None,
                }
            )
            producer.init_transactions(120)
            producer.begin_transaction()
            producer.produce_many("t", [b"warm"] * 20, partitions=list(range(20))).wait(120)
            cluster.set_rtt(100)
            note = partial(_note, outcomes)
            for number in range(200):
                producer.produce("t", b"v", partition=number % 20, on_delivery=note)
            receipt = producer.produce_many("t", [b"v"] * 20, partitions=list(range(20)))
            time.sleep(0.02)
            producer.close(0)
            assert (len(outcomes), receipt.done) == (200, True), f"in turn {turn}"


def _is_in(thread: threading.Thread, name: str) -> bool:
    """Whether a thread is in this method of a Producer."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code is not getattr(Producer, name).__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="counts threads through Linux's /proc")
@pytest.mark.parametrize("timeout", [-1, 0, 1])
@pytest.mark.parametrize("call", ["list_topics", "commit_transaction", "send_offsets_to_transaction"])
def test_close_does_not_wait_for_a_call_of_another_thread_and_that_gets_its_answer(
    mock_cluster: MockCluster, call: str, timeout: float
) -> None:
    before = _threads()
    transactional = call != "list_topics"
    producer = Producer(conf(mock_cluster, **({"transactional.id": call} if transactional else {})))
    if transactional:
        producer.init_transactions(120)
        producer.begin_transaction()
    producer.produce("t", b"v")
    assert producer.flush(120) == 0
    mock_cluster.down()
    with Consumer({"bootstrap.servers": mock_cluster.bootstrap_servers, "group.id": "g", "log_level": 0}) as consumer:
        group = consumer.consumer_group_metadata()
    offsets = ([TopicPartition("t", 0, 1)], group) if call.startswith("send") else ()
    outcomes: list[Any] = []

    def work() -> None:
        try:
            outcomes.append(getattr(producer, call)(*offsets))
        except (KafkaException, RuntimeError) as error:
            outcomes.append(error)

    asking = threading.Thread(target=work, daemon=True)
    asking.start()
    assert wait_until(lambda: _is_in(asking, call))
    time.sleep(0.2)  # until librdkafka has the question
    said: list[bool] = []
    closing = threading.Thread(target=lambda: said.append(producer.close(timeout)), daemon=True)
    closing.start()
    closing.join(300)
    assert said == [True]  # the record had been acknowledged
    assert asking.is_alive()
    mock_cluster.up()
    asking.join(300)
    assert len(outcomes) == 1
    with pytest.raises(RuntimeError, match="closed"):
        producer.list_topics()
    if call == "list_topics":  # after a transaction that was open, the client ends with its object
        assert "t" in outcomes[0].topics
        assert wait_until(lambda: _threads() <= before), "the client has not ended"


@pytest.mark.filterwarnings("ignore:Producer abort_transaction failed during close")  # confluent-kafka's
def test_a_producer_closed_while_it_begins_its_first_transaction_ends_that_call(mock_cluster: MockCluster) -> None:
    """Which asks again and again until brokers answer."""
    mock_cluster.down()
    producer = Producer(conf(mock_cluster, **{"transactional.id": "x"}))
    raised: list[str] = []

    def work() -> None:
        with pytest.raises(RuntimeError) as problem:
            producer.init_transactions()
        raised.append(str(problem.value))

    asking = threading.Thread(target=work, daemon=True)
    asking.start()
    assert wait_until(lambda: _is_in(asking, "init_transactions"))
    assert producer.close(0) is True
    asking.join(300)
    assert raised
    assert "closed" in raised[0]


EXIT_IN_A_CALL = """
import sys, threading, time
from fastprod import Producer

producer = Producer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0, "error_cb": lambda error: None})
call, daemon, closes, *arguments = sys.argv[1:]

def ask():
    entered.set()
    getattr(producer, call)(*(float(one) if one else None for one in arguments))

entered = threading.Event()
threading.excepthook = lambda problem: None
threading.Thread(target=ask, daemon=daemon == "daemon").start()
entered.wait()
time.sleep(0.5)
if closes == "closes":
    assert producer.close() is True
print("the end")
"""


@pytest.mark.parametrize("closes", ["closes", "leaves"])
@pytest.mark.parametrize(
    "call",
    [
        ("list_topics", "daemon"),
        ("cluster_id", "daemon"),
        ("list_topics", "thread", "", "3"),
        ("cluster_id", "thread", "3"),
    ],
)
def test_a_program_ends_though_a_thread_waits_for_brokers_that_nobody_can_reach(
    call: tuple[str, str], closes: str
) -> None:
    name, kind, *arguments = call
    done = run("-c", EXIT_IN_A_CALL, name, kind, closes, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the end\n"


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_a_client_left_to_a_commit_ends_with_it() -> None:
    with MockCluster(1, topics={"t": 1}) as cluster:
        threads = len(os.listdir("/proc/self/task"))
        producer = Producer(conf(cluster, **{"transactional.id": "x"}))
        producer.init_transactions(120)
        producer.begin_transaction()
        producer.produce("t", b"v")
        producer.flush(120)
        cluster.set_rtt(1500)
        committing = threading.Thread(target=producer.commit_transaction)
        committing.start()
        time.sleep(0.5)
        producer.close(0)
        committing.join(120)
        assert wait_until(lambda: len(os.listdir("/proc/self/task")) <= threads)
        cluster.set_rtt(0)
