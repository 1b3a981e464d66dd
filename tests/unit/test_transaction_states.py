"""What may be called when, in transactions: nothing enters one that is being ended, and a timeout can be resumed."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from fastprod import Producer, _positions
from fastprod.testing import MockCluster

pytestmark = pytest.mark.mock_cluster(brokers=1, topics={"t": 3})


@pytest.fixture
def producer(mock_cluster: MockCluster) -> Iterator[Producer]:
    options: dict[str, Any] = {"log_level": 0, "error_cb": lambda error: None, "transactional.id": "x"}
    one = Producer({"bootstrap.servers": mock_cluster.bootstrap_servers, **options})
    one.init_transactions(120)
    yield one
    one.close(10)


def code(call: Any, *arguments: Any) -> int:
    with pytest.raises(KafkaException) as raised:
        call(*arguments)
    return raised.value.args[0].code()


def written(cluster: MockCluster) -> int:
    return len(cluster.records("t"))  # watermarks count the markers of transactions, too


def test_outside_of_a_transaction_nothing_is_taken(producer: Producer) -> None:
    assert code(producer.produce, "t", b"v") == KafkaError._STATE
    assert code(producer.produce_many, "t", [b"v"]) == KafkaError._STATE
    producer.begin_transaction()
    producer.produce("t", b"v")
    producer.commit_transaction(120)
    assert code(producer.produce, "t", b"v") == KafkaError._STATE


def test_a_commit_that_timed_out_is_resumed(producer: Producer, mock_cluster: MockCluster) -> None:
    producer.begin_transaction()
    producer.produce("t", b"v")
    assert producer.flush(120) == 0
    mock_cluster.set_rtt(1500)
    with pytest.raises(KafkaException) as raised:
        producer.commit_transaction(0.2)
    assert raised.value.args[0].retriable()
    # Nothing else is possible, and each call says what is.
    assert code(producer.produce, "t", b"late") == KafkaError._STATE
    assert code(producer.produce_many, "t", [b"late"]) == KafkaError._STATE
    with pytest.raises(KafkaException, match=r"commit_transaction\(\) again"):
        producer.begin_transaction()
    with pytest.raises(KafkaException, match="may still succeed: call it again"):
        producer.abort_transaction(10)
    mock_cluster.set_rtt(0)
    producer.commit_transaction(120)
    producer.begin_transaction()
    producer.produce("t", b"next")
    producer.commit_transaction(120)
    assert written(mock_cluster) == 2


def test_an_abort_that_timed_out_is_resumed(producer: Producer, mock_cluster: MockCluster) -> None:
    producer.begin_transaction()
    producer.produce("t", b"v")
    assert producer.flush(120) == 0
    mock_cluster.set_rtt(1500)
    with pytest.raises(KafkaException) as raised:
        producer.abort_transaction(0.2)
    assert raised.value.args[0].retriable()
    with pytest.raises(KafkaException, match=r"abort_transaction\(\) timed out and is not over: call it again"):
        producer.commit_transaction(10)
    assert code(producer.produce, "t", b"late") == KafkaError._STATE
    mock_cluster.set_rtt(0)
    producer.abort_transaction(120)
    producer.begin_transaction()
    producer.produce("t", b"next")
    producer.commit_transaction(120)


def test_records_that_are_not_acknowledged_in_time_leave_both_ways_open(
    producer: Producer, mock_cluster: MockCluster
) -> None:
    for end in (producer.commit_transaction, producer.abort_transaction):
        producer.begin_transaction()
        mock_cluster.set_rtt(700)
        producer.produce("t", b"v")
        with pytest.raises(KafkaException, match="commit again or abort"):
            producer.commit_transaction(0.05)
        assert code(producer.produce, "t", b"late") == KafkaError._STATE
        mock_cluster.set_rtt(0)
        end(120)


@pytest.mark.parametrize("bulk", [False, True])
def test_what_one_thread_produces_while_another_commits_is_refused_or_in_the_log(
    producer: Producer, mock_cluster: MockCluster, bulk: bool
) -> None:
    over = threading.Event()
    taken = [0]
    receipts: list[Any] = []

    def work() -> None:
        while not over.is_set():
            try:
                if bulk:
                    receipts.append(producer.produce_many("t", [b"v"] * 100))
                    time.sleep(0.001)
                else:
                    producer.produce("t", b"v")
                    taken[0] += 1
                    time.sleep(0)
            except KafkaException as error:
                assert error.args[0].code() == KafkaError._STATE  # noqa: PT017

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(30):
        producer.begin_transaction()
        over.wait(0.01)
        producer.commit_transaction(120)
    over.set()
    thread.join(300)
    if bulk:
        # A call that is cut off raises, and its receipt is lost with it: only whole calls can be counted here.
        assert written(mock_cluster) >= sum(receipt.acknowledged for receipt in receipts)
        assert all(receipt.acknowledged == receipt.total == 100 for receipt in receipts)
    else:
        assert written(mock_cluster) == taken[0]


def test_a_lost_request_to_end_a_transaction_rules_out_another_one(
    producer: Producer, mock_cluster: MockCluster
) -> None:
    """The broker may act on it late, when it would end the next transaction half-way (KIP-890)."""
    producer.begin_transaction()
    producer.produce("t", b"v")
    assert producer.flush(120) == 0
    mock_cluster.push_errors("EndTxn", "_TRANSPORT")
    producer.commit_transaction(120)  # librdkafka asks again, and is answered
    with pytest.raises(KafkaException, match=r"make a new Producer with the same transactional\.id") as raised:
        producer.begin_transaction()
    assert raised.value.args[0].fatal()
    producer.close(10)
    with Producer(
        {"bootstrap.servers": mock_cluster.bootstrap_servers, "log_level": 0, "transactional.id": "x"}
    ) as another:
        another.init_transactions(120)
        another.begin_transaction()
        another.produce("t", b"next")
        another.commit_transaction(120)


@pytest.mark.filterwarnings("ignore:Producer abort_transaction failed during close")
def test_what_is_called_while_init_has_timed_out_has_not_begun() -> None:
    with Producer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0, "transactional.id": "x"}) as producer:
        assert code(producer.init_transactions, 0.2) == KafkaError._TIMED_OUT
        for call in (producer.commit_transaction, producer.abort_transaction, producer.commit_transaction):
            assert code(call, 0.2) == KafkaError._CONFLICT
        assert code(producer.begin_transaction) == KafkaError._CONFLICT


def test_offsets_that_librdkafka_never_answers_are_a_fatal_error_and_the_producer_can_be_left(
    mock_cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As librdkafka 2.16 does when a coordinator dies at the wrong moment: that thread of it never comes back."""
    never = threading.Event()
    monkeypatch.setattr(Producer, "_send_offsets", lambda *arguments: never.wait())
    monkeypatch.setattr("fastprod.producer.STUCK_S", 0.1)
    quiet = {"log_level": 0, "error_cb": lambda error: None}  # it outlives its brokers
    one = Producer({"bootstrap.servers": mock_cluster.bootstrap_servers, "transactional.id": "stuck", **quiet})
    one.init_transactions(120)
    one.begin_transaction()
    with pytest.raises(KafkaException, match="Make another producer") as caught:
        one.send_offsets_to_transaction([], None, 0.1)
    assert caught.value.args[0].fatal()
    assert not _positions.is_passing(caught.value)
    assert one.close() is True  # without a wait for that thread
    never.set()


def test_a_transaction_of_which_produce_batch_has_refused_a_message_is_not_committed(producer: Producer) -> None:
    producer.begin_transaction()
    messages: list[dict[str, Any]] = [{"value": b"1"}, {"value": b"x" * 2_000_000}, {"value": b"3"}]
    assert producer.produce_batch("t", messages) == 2
    with pytest.raises(KafkaException, match="1 records of the transaction failed"):
        producer.commit_transaction(120)
    producer.abort_transaction(120)
