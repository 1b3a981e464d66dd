"""Partitioners written in Python: asked on the callers' threads only, and a failure of theirs is one record's."""

import threading
import time
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException
from programs import wait_until

from fastprod import BufferFullError, Producer
from fastprod.testing import MockCluster, MockClusterProcess

pytestmark = pytest.mark.mock_cluster(brokers=1, topics={"t": 4})


def conf(cluster: MockCluster | MockClusterProcess, **options: Any) -> dict[str, Any]:
    return {"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, "error_cb": lambda error: None, **options}


class ByKey:
    """Keys are partition numbers; `bad` raises. Remembers which threads asked."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def partition(self, topic: str, key: bytes, value: bytes, partitions: int, available: list[int]) -> int:
        self.threads.add(threading.current_thread().name)
        if key == b"bad":
            raise ValueError("no idea")
        return int(key)


@pytest.mark.parametrize("calls", ["produce", "bulk"])
def test_one_that_raises_fails_that_record_alone_before_and_after_metadata(
    mock_cluster: MockCluster, calls: str, unraisable: list[BaseException]
) -> None:
    partitioner = ByKey()
    keys = [b"0", b"bad", b"1", b"2", b"bad", b"3"]
    outcomes: list[tuple[bytes, str | None, int | None]] = []

    def note(error: Any, message: Any) -> None:
        outcomes.append((message.key(), None if error is None else error.name(), message.partition()))

    mock_cluster.set_rtt(500)  # metadata waits for us
    with Producer(conf(mock_cluster, partitioner=partitioner)) as producer:
        if calls == "produce":
            for key in keys:  # metadata is not there yet
                producer.produce("t", b"v", key, on_delivery=note)
            mock_cluster.set_rtt(0)
            assert producer.flush(120) == 0
        else:
            receipt = producer.produce_many("t", [b"v"] * 6, keys)
            mock_cluster.set_rtt(0)
            assert receipt.wait(120)
            assert [(failed.index, failed.error.name()) for failed in receipt.errors] == [
                (1, "_APPLICATION"),
                (4, "_APPLICATION"),
            ]
        assert [str(error) for error in unraisable] == ["no idea", "no idea"]
        with pytest.raises(ValueError, match="no idea"):
            producer.produce("t", b"v", b"bad")
        again = producer.produce_many("t", [b"v"] * 6, keys)
        assert again.wait(120)
        assert [(failed.index, str(failed.error)) for failed in again.errors] == [(1, "no idea"), (4, "no idea")]
        assert again.acknowledged == 4
    if calls == "produce":
        good = [("0", 0), ("1", 1), ("2", 2), ("3", 3)]
        assert sorted(outcomes, key=str) == sorted(
            [(key.encode(), None, partition) for key, partition in good] + [(b"bad", "_APPLICATION", None)] * 2, key=str
        )
    assert partitioner.threads == {threading.current_thread().name}


def test_no_record_is_left_behind_when_metadata_comes_between_two_threads(mock_cluster: MockCluster) -> None:
    class Zero:
        def partition(self, *_: object) -> int:
            return 0

    for _ in range(25):
        producer = Producer(conf(mock_cluster, partitioner=Zero(), **{"linger.ms": 0}))
        over = threading.Event()

        def work(producer: Producer = producer, over: threading.Event = over) -> None:
            while not over.is_set():
                producer.produce("t", b"v")
                time.sleep(0)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.03)
        over.set()
        for thread in threads:
            thread.join()
        assert producer.flush(120) == 0
        assert producer.close()


def test_records_keep_their_order_while_they_wait_for_metadata(mock_cluster: MockCluster) -> None:
    class Zero:
        def partition(self, *_: object) -> int:
            return 0

    with Producer(conf(mock_cluster, partitioner=Zero())) as producer:
        for n in range(5000):
            producer.produce("t", b"%d" % n)
    assert [int(record.value()) for record in mock_cluster.records("t")] == list(range(5000))


def test_one_that_calls_the_producer_itself(mock_cluster: MockCluster) -> None:
    class Curious:
        producer: Producer

        def partition(self, topic: str, key: bytes | None, *_: object) -> int:
            if key == b"ask":
                self.producer.produce(topic, b"extra", b"plain")
                self.producer.poll(0)
                len(self.producer)
            return 1

    partitioner = Curious()
    with Producer(conf(mock_cluster, partitioner=partitioner)) as producer:
        partitioner.producer = producer
        for _ in range(50):
            producer.produce("t", b"v", b"ask")
        while len(producer):  # a flush does not wait for what the partitioner adds meanwhile
            assert producer.flush(120) == 0
        assert mock_cluster.watermarks("t")[1][1] == 100
        partitioner.producer = None  # type: ignore[assignment]
        producer._runtime  # noqa: B018


def test_a_purge_gives_up_what_it_is_being_asked_about(mock_cluster: MockCluster) -> None:
    class Purges:
        producer: Producer
        times = 0

        def partition(self, *_: object) -> int:
            if self.times == 0:
                self.times = 1
                self.producer.purge()
            return 0

    partitioner = Purges()
    failed: list[str] = []
    mock_cluster.set_rtt(500)  # metadata waits for us: all ten are asked about in one go
    with Producer(conf(mock_cluster, partitioner=partitioner)) as producer:
        partitioner.producer = producer
        for _ in range(10):
            producer.produce("t", b"v", on_delivery=lambda error, message: failed.append(error.name()))
        mock_cluster.set_rtt(0)
        assert producer.flush(120) == 0
        assert failed == ["_PURGE_QUEUE"] * 10
        producer.produce("t", b"later")
        assert producer.flush(120) == 0
    assert [record.value() for record in mock_cluster.records("t")] == [b"later"]


def test_it_is_told_about_changed_partitions(mock_cluster: MockCluster) -> None:
    seen: list[tuple[int, list[int]]] = []

    class Notes:
        def partition(self, topic: str, key: object, value: object, partitions: int, available: list[int]) -> int:
            seen.append((partitions, list(available)))
            return 0

    options = {"topic.metadata.refresh.interval.ms": 50}
    with Producer(conf(mock_cluster, partitioner=Notes(), **options)) as producer:
        producer.produce("t", b"v")
        assert producer.flush(120) == 0
        mock_cluster.set_leader("t", 3, None)
        deadline = time.monotonic() + 120
        while seen[-1] != (4, [0, 1, 2]) and time.monotonic() < deadline:
            producer.produce("t", b"v")
            producer.poll(0.02)
        mock_cluster.set_leader("t", 3, 1)
    assert seen[0] == (4, [0, 1, 2, 3])
    assert (4, [0, 1, 2]) in seen


class Zero:
    def partition(self, topic: str, key: object, value: object, partitions: int, available: list[int]) -> int:
        return 0


@pytest.mark.mock_cluster(brokers=1, topics={"t": 4, "u": 1})
@pytest.mark.parametrize("later", ["explicit", "bulk", "another topic"])
def test_what_waited_for_metadata_is_placed_by_the_next_call_whatever_that_sends(
    mock_cluster: MockCluster, later: str
) -> None:
    mock_cluster.set_rtt(300)  # metadata waits for us
    with Producer(conf(mock_cluster, partitioner=Zero())) as producer:
        producer.produce("t", b"first")
        mock_cluster.set_rtt(0)

        def arrived() -> bool:
            if later == "explicit":
                producer.produce("t", b"v", partition=1)
            elif later == "bulk":
                producer.produce_many("t", [b"v"], partitions=1)
            else:
                producer.produce("u", b"v")
            return mock_cluster.watermarks("t")[0][1] > 0

        assert wait_until(arrived)  # without poll() or flush()


def test_a_purge_gives_up_what_came_before_it_and_nothing_after(mock_cluster: MockCluster) -> None:
    asked, go_on = threading.Event(), threading.Event()
    outcomes: list[tuple[bytes, str | None]] = []

    class Slow:
        def partition(self, topic: str, key: object, value: object, partitions: int, available: list[int]) -> int:
            if value == b"old":
                asked.set()
                go_on.wait(300)
            return 0

    def note(error: Any, message: Any) -> None:
        outcomes.append((message.value(), None if error is None else error.name()))

    mock_cluster.set_rtt(300)  # metadata waits for us
    with Producer(conf(mock_cluster, partitioner=Slow())) as producer:
        producer.produce("t", b"old", on_delivery=note)
        mock_cluster.set_rtt(0)
        polling = threading.Thread(target=producer.poll, args=(300,))
        polling.start()
        assert asked.wait(300)
        producer.produce("t", b"behind", on_delivery=note)
        producer.purge()
        producer.produce("t", b"new", on_delivery=note)
        go_on.set()
        polling.join(300)
        assert producer.flush(120) == 0
    assert sorted(outcomes) == [(b"behind", "_PURGE_QUEUE"), (b"new", None), (b"old", "_PURGE_QUEUE")]


@pytest.mark.parametrize(
    "kind", [KeyError, ZeroDivisionError, RuntimeError, BufferError, KafkaException, BufferFullError]
)
def test_whatever_it_raises_a_bulk_call_goes_on(mock_cluster: MockCluster, kind: type[Exception]) -> None:
    class Picky:
        def partition(self, topic: str, key: bytes, value: bytes, partitions: int, available: list[int]) -> int:
            if value == b"bad":
                raise kind("no idea")
            return 0

    with Producer(conf(mock_cluster, partitioner=Picky())) as producer:
        producer.produce("t", b"warm")
        assert producer.flush(120) == 0
        receipt = producer.produce_many("t", [b"a", b"bad", b"c", b"d"])
        assert receipt.wait(120)
        assert (receipt.acknowledged, receipt.failed) == (3, 1)
        assert [(failed.index, type(failed.error)) for failed in receipt.errors] == [(1, kind)]
        messages: list[dict[str, Any]] = [{"value": b"e"}, {"value": b"bad"}, {"value": b"f"}]
        assert producer.produce_batch("t", messages) == 2
        if kind is not BufferFullError:  # which says the same
            assert messages[1]["_error"].code() == KafkaError._APPLICATION
        with pytest.raises(kind, match="no idea"):
            producer.produce("t", b"bad")
    assert [record.value() for record in mock_cluster.records("t")] == [b"warm", b"a", b"c", b"d", b"e", b"f"]
