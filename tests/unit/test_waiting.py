"""Waiting for room in the buffer: nobody starves, and what is refused costs next to nothing."""

import threading
import time
from typing import Any

import numpy as np
import pytest

from fastprod import BufferFullError, Producer
from fastprod.testing import MockCluster

pytestmark = pytest.mark.mock_cluster(brokers=1, topics={"t": 4})


def conf(cluster: MockCluster, **options: Any) -> dict[str, Any]:
    return {"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, "error_cb": lambda error: None, **options}


def test_a_large_record_gets_its_turn_among_many_small_ones(mock_cluster: MockCluster) -> None:
    over = threading.Event()
    with Producer(conf(mock_cluster, **{"buffer.memory": 200_000, "linger.ms": 0})) as producer:

        def small() -> None:
            while not over.is_set():
                producer.produce("t", b"s" * 100)

        threads = [threading.Thread(target=small) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            for _ in range(20):
                producer.produce("t", b"L" * 150_000)
        finally:
            over.set()
            for thread in threads:
                thread.join(300)
        assert producer.flush(120) == 0
        assert producer._runtime.memory == 0


@pytest.mark.parametrize("threads", [1, 8])
@pytest.mark.parametrize("bulk", [False, True])
def test_everything_arrives_through_a_small_buffer(mock_cluster: MockCluster, threads: int, bulk: bool) -> None:
    count = 8000
    with Producer(conf(mock_cluster, **{"buffer.memory": 150_000})) as producer:

        def work(n: int) -> None:
            values = [b"%d-%d" % (n, i) for i in range(count // threads)]
            if bulk:
                assert producer.produce_many("t", values, values).wait(300)
            else:
                for value in values:
                    producer.produce("t", value, value)

        started = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join(300)
        assert producer.flush(120) == 0
        assert producer._runtime.memory == 0
    values = [record.value() for record in mock_cluster.records("t")]
    assert len(values) == len(set(values)) == count


def test_waiters_get_away_when_the_producer_is_closed(mock_cluster: MockCluster) -> None:
    producer = Producer(conf(mock_cluster, **{"buffer.memory": 70_000}))
    mock_cluster.down()
    raised: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                producer.produce("t", b"v" * 1000)
        except RuntimeError as error:
            raised.append(error)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    while producer._runtime.memory < 30_000:
        pass
    producer.close(0)
    for thread in threads:
        thread.join(300)
    assert [str(error) for error in raised] == ["Producer has been closed"] * 5


def test_millions_of_refused_records_take_no_memory(mock_cluster: MockCluster) -> None:
    import tracemalloc

    mock_cluster.down()
    values = np.full(2_000_000, b"v" * 20)
    producer = Producer(conf(mock_cluster, **{"buffer.memory": 65_536, "max.block.ms": 0}))
    try:
        tracemalloc.start()
        receipt = producer.produce_many("t", values)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1_000_000
        assert receipt.failed > 1_900_000
        assert receipt.total == 2_000_000
    finally:
        producer.purge()
        producer.close(0)


def test_refused_records_are_told_with_what_they_hold(mock_cluster: MockCluster) -> None:
    mock_cluster.down()
    producer = Producer(conf(mock_cluster, **{"buffer.memory": 65_536, "max.block.ms": 0}))
    receipt = producer.produce_many("t", [b"%d" % n for n in range(5000)], [b"k"] * 5000)
    errors = receipt.errors
    assert len(errors) == receipt.failed > 0
    assert [failed.index for failed in errors] == list(range(receipt.accepted, 5000))
    assert all(isinstance(failed.error, BufferFullError) for failed in errors)
    assert [failed.record.value for failed in errors if failed.record] == [
        b"%d" % n for n in range(receipt.accepted, 5000)
    ]
    producer.purge()
    producer.close(0)


def test_a_callback_may_produce_the_next_record_where_two_do_not_fit(mock_cluster: MockCluster) -> None:
    left = [5]
    with Producer(conf(mock_cluster, **{"buffer.memory": 1_200_000})) as producer:

        def again(error: object, message: object) -> None:
            left[0] -= 1
            if left[0]:
                producer.produce("t", b"x" * 700_000, on_delivery=again)

        producer.produce("t", b"x" * 700_000, on_delivery=again)
        while left[0]:
            producer.flush(120)
    assert sum(high for _, high in mock_cluster.watermarks("t").values()) == 5


def test_a_callback_is_told_that_it_waits_for_itself(mock_cluster: MockCluster) -> None:
    raised: list[str] = []
    with Producer(conf(mock_cluster, **{"buffer.memory": 1_200_000, "linger.ms": 200})) as producer:

        def again(error: object, message: object) -> None:
            try:
                producer.produce("t", b"x" * 700_000)
            except BufferFullError as problem:
                raised.append(str(problem))

        producer.produce("t", b"x" * 350_000, partition=0, on_delivery=again)
        producer.produce("t", b"x" * 350_000, partition=1, on_delivery=again)
        assert producer.flush(120) == 0
    assert all("callback" in text for text in raised)


@pytest.mark.mock_cluster(brokers=1, topics={"t": 8})
def test_a_short_pool_ends_the_linger_however_often(mock_cluster: MockCluster) -> None:
    """What was set aside for waiters must not count as on its way for ever: then nothing would end the linger."""
    options = {"buffer.memory": 1 << 20, "linger.ms": 600_000, "sticky.batch.size": 10_000_000, "max.block.ms": 30_000}
    with Producer(conf(mock_cluster, **options)) as producer:
        for partition in range(8):
            producer.produce("t", b"warm", partition=partition)
        producer.flush(120)
        for number in range(60_000):
            producer.produce("t", b"v" * 100, partition=number % 8)
        assert producer.flush(120) == 0


@pytest.mark.parametrize("pause_s", [0.0, 0.3])
def test_room_is_waited_for_while_another_thread_polls(mock_cluster: MockCluster, pause_s: float) -> None:
    """Though this one polls too: the other will run the callbacks that hold the memory."""
    over = threading.Event()
    with Producer(conf(mock_cluster, **{"buffer.memory": 65_536, "linger.ms": 0})) as producer:

        def listen() -> None:
            while not over.is_set():
                producer.poll(1)
                time.sleep(pause_s)

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            for _ in range(60 if pause_s else 5000):
                producer.produce("t", b"x" * 3000, on_delivery=lambda error, message: None)
                producer.poll(0)
        finally:
            over.set()
            thread.join(300)
        assert producer.flush(120) == 0
