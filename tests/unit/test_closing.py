"""How a producer ends: callbacks that raise, other threads that still produce, records that nobody takes any more."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

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
