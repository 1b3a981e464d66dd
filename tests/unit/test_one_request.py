"""A partition has one request on its way: a broker that refuses one can then neither lose nor double anything.

With two on their way librdkafka takes the acknowledgement of the second for the first as well when the first was
refused, or numbers everything anew and repeats what is unanswered.
"""

import contextlib
import threading
import time
from functools import partialmethod

import pytest
from confluent_kafka import KafkaError, KafkaException
from programs import wait_until

from fastprod import Producer
from fastprod._config import Settings
from fastprod.testing import MockCluster

RECORDS = 400
PARTITIONS = 150  # more than may have a request on its way


def drop(producer: Producer) -> None:
    """Ends a producer whose records nobody waits for: to strict.order that is an error."""
    with contextlib.suppress(KafkaException):
        producer.purge()
    with contextlib.suppress(KafkaException):
        producer.close(0)


@pytest.mark.parametrize("error", ["NOT_LEADER_FOR_PARTITION", "_TRANSPORT"])
@pytest.mark.parametrize("refused", [1, 2, 5])
@pytest.mark.parametrize("linger", [5, 0])
def test_a_first_request_that_is_refused_loses_and_doubles_nothing(error: str, refused: int, linger: float) -> None:
    outcomes: list[tuple[int | None, bytes]] = []
    with MockCluster(1, topics={"t": 2}) as cluster:
        config = {
            "bootstrap.servers": cluster.bootstrap_servers,
            "log_level": 0,
            "linger.ms": linger,
            "retry.backoff.ms": 10,
            "reconnect.backoff.ms": 10,
            "sticky.batch.size": 1000,
            "error_cb": lambda error: None,
        }
        with Producer(config) as producer:
            producer.produce("t", b"warm", partition=1)
            producer.flush(120)
            cluster.push_errors("Produce", *[error] * refused, broker=1, rtt_ms=50)
            for number in range(RECORDS):
                producer.produce(
                    "t",
                    b"%06d" % number + b"x" * 200,
                    partition=0,
                    on_delivery=lambda error, message: outcomes.append((error and error.code(), message.value()[:6])),
                )
                if number % 20 == 0:
                    time.sleep(0.005)  # more batches come while the first is on its way
            producer.flush(120)
        stored = [(record.value() or b"")[:6] for record in cluster.records("t") if record.partition() == 0]
    wanted = [b"%06d" % number for number in range(RECORDS)]
    assert stored == wanted
    assert outcomes == [(None, value) for value in wanted]


@pytest.mark.parametrize(
    ("options", "wanted"), [({}, 128), ({"max.in.flight": 3}, 3), ({"queue.buffering.backpressure.threshold": 1}, 5)]
)
def test_other_partitions_need_not_wait_for_it(options: dict[str, int], wanted: int) -> None:
    with MockCluster(1, topics={"t": PARTITIONS}) as cluster:
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, **options})
        producer.produce_many("t", [b"warm"] * PARTITIONS, partitions=list(range(PARTITIONS))).wait(120)
        cluster.set_rtt(60_000)  # nothing is answered until we have seen enough
        cluster.start_tracking()
        for _ in range(3):
            producer.produce_many("t", [b"v"] * PARTITIONS, partitions=list(range(PARTITIONS)))
            time.sleep(0.02)
        # One may be a question for metadata.
        assert wait_until(lambda: len(cluster.requests("Produce")) >= wanted - 1)
        time.sleep(0.2)
        assert wanted - 1 <= len(cluster.requests("Produce")) <= wanted, "of each partition one, as many as may be"
        producer.purge()
        producer.close(0)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("room", [1, 3])
def test_what_librdkafka_had_no_room_for_waits_for_what_it_has_of_the_partition(room: int, strict: bool) -> None:
    """Its queue is full in the middle of a hand-over; then the first request is refused."""
    outcomes: list[tuple[int | None, bytes]] = []
    with MockCluster(2, topics={"t": 2}) as cluster:
        ours, other = cluster.leader_of("t", 0), cluster.leader_of("t", 1)
        assert ours != other
        config = {
            "bootstrap.servers": cluster.bootstrap_servers,
            "log_level": 0,
            "retry.backoff.ms": 10,
            "queue.buffering.max.messages": 100,
            "strict.order": strict,
            "error_cb": lambda error: None,
        }
        with Producer(config) as producer:
            producer.produce("t", b"warm", partition=1)
            producer.flush(120)
            cluster.start_tracking()
            cluster.set_rtt(300, other)
            producer.produce_many("t", [b"other"] * (100 - room), partitions=1)
            assert wait_until(lambda: cluster.requests("Produce"))
            cluster.push_errors("Produce", "NOT_LEADER_FOR_PARTITION", broker=ours, rtt_ms=1000)
            for number in range(60):
                producer.produce(
                    "t",
                    b"%06d" % number,
                    partition=0,
                    on_delivery=lambda error, message: outcomes.append((error and error.code(), message.value())),
                )
            producer.flush(120)
        stored = [record.value() for record in cluster.records("t") if record.partition() == 0]
    wanted = [b"%06d" % number for number in range(60)]
    assert stored == wanted
    assert outcomes == [(None, value) for value in wanted]


def test_what_a_broker_refuses_of_a_torn_first_hand_over_is_not_taken_for_written() -> None:
    """Headers without number keep the sender busy between two records, so that each becomes a request. The broker does
    not know the producer and takes the later ones, from which librdkafka concludes that it has the first too."""
    outcomes: list[tuple[bytes, KafkaError | None]] = []
    with MockCluster(1, topics={"t": 21}) as cluster:
        config = {
            "bootstrap.servers": cluster.bootstrap_servers,
            "log_level": 0,
            "linger.ms": 10_000,
            "retry.backoff.ms": 10,
            "batch.size": 10_000_000,
            "message.max.bytes": 10_000_000,
            "error_cb": lambda error: None,
        }
        with Producer(config) as producer:
            producer.produce("t", b"warm", partition=20)
            producer.flush(120)
            for partition in range(20):  # until it happens; the first time, unless the machine is very fast
                cluster.push_errors("Produce", "NOT_LEADER_FOR_PARTITION", broker=1, rtt_ms=50)
                for number in range(3):
                    producer.produce(
                        "t",
                        b"%d-%d" % (partition, number),
                        partition=partition,
                        headers=[("h", b"")] * 60_000,
                        on_delivery=lambda error, message: outcomes.append((message.value(), error)),
                    )
                producer.flush(120)
                if any(error for _, error in outcomes):
                    break
        stored = {record.value() for record in cluster.records("t")}
    assert sorted(value for value, error in outcomes if not error) == sorted(stored - {b"warm"})
    failed = [error for _, error in outcomes if error]
    assert {error.code() for error in failed} == {KafkaError._INCONSISTENT}
    assert "may be lost" in failed[0].str()


@pytest.mark.parametrize(
    ("options", "records", "headers"),
    [
        ({}, 3, []),
        ({}, 1, [("h", b"")] * 60_000),
        ({"strict.order": True}, 3, []),
        ({"linger.ms": 0}, 3, []),
    ],
    ids=["whole", "one record", "strict.order", "linger.ms=0"],
)
def test_a_first_request_whose_offsets_are_not_told_is_believed_if_it_cannot_be_one_of_two(
    options: dict[str, object], records: int, headers: list[tuple[str, bytes]]
) -> None:
    outcomes: list[KafkaError | None] = []
    config = {"log_level": 0, "linger.ms": 100, **options}
    with (
        MockCluster(1, topics={"t": 4}) as cluster,
        Producer({"bootstrap.servers": cluster.bootstrap_servers, **config}) as producer,
    ):
        producer.produce("t", b"warm", partition=3)
        assert producer.flush(120) == 0
        for partition in range(3):  # it may take the sender long to hand over three records, but hardly every time
            outcomes.clear()
            cluster.push_errors("Produce", "DUPLICATE_SEQUENCE_NUMBER", broker=1)
            for _ in range(records):
                producer.produce(
                    "t",
                    b"v",
                    partition=partition,
                    headers=headers,
                    on_delivery=lambda error, message: outcomes.append(error),
                )
            assert producer.flush(120) == 0
            if not any(outcomes):
                break
    assert outcomes == [None] * records


def test_a_long_client_id_leaves_a_hand_over_one_request() -> None:
    """librdkafka counts it too; a hand-over of a moment would be two requests all the same."""
    config = {"log_level": 0, "client.id": "c" * 900, "batch.size": 1300, "linger.ms": 100}
    with (
        MockCluster(1, topics={"t": 2}) as cluster,
        Producer({"bootstrap.servers": cluster.bootstrap_servers, **config}) as producer,
    ):
        producer.produce("t", b"warm", partition=1)
        assert producer.flush(120) == 0
        cluster.start_tracking()
        cluster.set_rtt(500)
        for _ in range(4):
            producer.produce("t", b"v" * 100, partition=0)
        producer.flush(0)
        assert wait_until(lambda: cluster.requests("Produce"))
        time.sleep(0.2)
        assert len(cluster.requests("Produce")) == 1
        cluster.set_rtt(0)


@pytest.mark.parametrize(("options", "whole"), [({}, True), ({"linger.ms": 0}, False), ({"strict.order": True}, False)])
def test_the_first_hand_over_of_a_partition_is_one_request_where_its_outcome_can_be_told(
    options: dict[str, object], whole: bool
) -> None:
    config = {"log_level": 0, **options}
    with (
        MockCluster(1, topics={"t": 2}) as cluster,
        Producer({"bootstrap.servers": cluster.bootstrap_servers, **config}) as producer,
    ):
        producer.produce("t", b"warm", partition=1)
        assert producer.flush(120) == 0
        cluster.start_tracking()
        producer.produce_many("t", [b"v"] * 5, partitions=0).wait(120)
        requests = len(cluster.requests("Produce"))
    assert requests == 1 if whole else requests >= 2


@pytest.mark.parametrize(("warm", "pause_s", "known"), [(1, 0, False), (0, 0, True), (0, 0.5, False)])
def test_the_first_record_to_a_broker_that_does_not_know_the_producer_goes_alone(
    monkeypatch: pytest.MonkeyPatch, warm: int, pause_s: float, known: bool
) -> None:
    """A hand-over that the sender is torn from becomes two requests. A broker that knows the producer takes the second
    only after the first; one that does not, or has forgotten it in a long pause, takes any. Under strict.order that
    must not be."""
    if pause_s:
        monkeypatch.setattr(Settings, "__init__", partialmethod(Settings.__init__, known_ms=pause_s * 1000 - 100))
    with MockCluster(1, topics={"t": 2}) as cluster:
        config = {"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, "linger.ms": 10_000}
        with Producer({**config, "strict.order": True}) as producer:
            producer.produce("t", b"warm", partition=warm)
            assert producer.flush(120) == 0
            time.sleep(pause_s)
            cluster.start_tracking()
            for _ in range(100):
                producer.produce("t", b"v", partition=0)
            assert producer.flush(120) == 0
            assert (len(cluster.requests("Produce")) == 1) is known


def test_a_topic_that_may_not_be_written_is_not_asked_for_every_record() -> None:
    codes: list[int] = []
    with MockCluster(1, topics={"t": 2}) as cluster:
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})
        producer.produce("t", b"warm", partition=1)
        assert producer.flush(120) == 0
        cluster.push_errors("Produce", *["TOPIC_AUTHORIZATION_FAILED"] * 1000, broker=1)
        cluster.start_tracking()
        for _ in range(1000):
            producer.produce("t", b"v", partition=0, on_delivery=lambda error, message: codes.append(error.code()))
        assert producer.flush(120) == 0
        asked = len(cluster.requests("Produce"))
        producer.close()
    assert codes == [KafkaError.TOPIC_AUTHORIZATION_FAILED] * 1000
    assert asked < 100


def test_many_partitions_are_introduced_at_a_time_though_memory_is_short() -> None:
    """What had waited for metadata may take more than the buffer; a record that goes alone gives nothing of it back."""
    with MockCluster(1, topics={"t": 200}) as cluster:
        cluster.set_rtt(500)  # all wait for metadata
        cluster.push_errors("Produce", *[0] * 400, broker=1, rtt_ms=60_000)
        cluster.start_tracking()
        producer = Producer(
            {
                "bootstrap.servers": cluster.bootstrap_servers,
                "log_level": 0,
                "buffer.memory": 200_000,
                "strict.order": True,
            }
        )
        for number in range(400):
            producer.produce("t", b"v", partition=number % 200)
        assert wait_until(lambda: len(cluster.requests("Produce")) >= 10)
        drop(producer)


def test_partitions_that_are_known_now_go_before_those_that_are_not() -> None:
    """They give memory back. With the others first, nobody's would come before all have been introduced."""
    done: list[int] = []
    with MockCluster(1, topics={"t": 300}) as cluster:
        cluster.push_errors("Produce", *[0] * 200, broker=1, rtt_ms=50)
        cluster.push_errors("Produce", *[0] * 1000, broker=1, rtt_ms=60_000)
        cluster.start_tracking()
        config = {"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, "linger.ms": 2000}
        producer = Producer({**config, "strict.order": True})
        producer.list_topics("t")  # connected, and nobody waits for metadata
        for number in range(600):
            producer.produce("t", b"v", partition=number % 300, on_delivery=lambda error, message: done.append(1))
        producer.flush(0)  # all of them are ready
        assert wait_until(lambda: len(cluster.requests("Produce")) > 200)
        assert wait_until(lambda: (producer.poll(0.1), done)[1], 50), (
            "200 were answered, which can be first records only"
        )
        drop(producer)


def test_the_record_that_goes_alone_is_not_younger_than_those_behind_it() -> None:
    with MockCluster(1, topics={"t": 2}) as cluster:
        config = {"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, "linger.ms": 150}
        with Producer({**config, "strict.order": True}) as producer:
            producer.produce("t", b"warm", partition=1)
            assert producer.flush(120) == 0
            cluster.set_rtt(100)
            for _ in range(5):
                producer.produce("t", b"v", partition=0)
            time.sleep(0.5)  # the linger must end by itself
        cluster.set_rtt(0)
        times = [record.timestamp()[1] for record in cluster.records("t") if record.partition() == 0]
    assert len(times) == 5
    assert times == sorted(times)


def test_a_busy_partition_leaves_room_in_a_full_queue_to_others() -> None:
    over = threading.Event()
    outcomes: list[object] = []
    config = {"log_level": 0, "queue.buffering.max.messages": 50, "error_cb": lambda error: None}
    with (
        MockCluster(1, topics={"t": 2}) as cluster,
        Producer({"bootstrap.servers": cluster.bootstrap_servers, **config}) as producer,
    ):

        def press() -> None:
            while not over.is_set():
                if len(producer) < 30_000:
                    producer.produce_many("t", [b"v" * 100] * 2000, partitions=0)
                time.sleep(0.001)

        producer.produce_many("t", [b"warm"] * 2, partitions=[0, 1]).wait(120)
        cluster.set_rtt(10)
        thread = threading.Thread(target=press)
        thread.start()
        try:
            assert wait_until(lambda: cluster.watermarks("t")[0][1] > 2000)
            for _ in range(5):
                before = cluster.watermarks("t")[0][1]
                producer.produce("t", b"v", partition=1, on_delivery=lambda error, message: outcomes.append(error))
                assert wait_until(lambda: producer.poll(0.01) and outcomes)
                assert outcomes.pop() is None
                assert cluster.watermarks("t")[0][1] - before < 10_000, "200 times the queue, for one record"
        finally:
            over.set()
            thread.join()
            cluster.set_rtt(0)
            producer.purge()
