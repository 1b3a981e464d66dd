"""Producers and consumers of priority levels, on mock brokers: what goes where, what is refused, what is kept."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition
from programs import wait_until

from fastprod.priority import CapacityBurstConsumer, PriorityProducer, Shares, Strict
from fastprod.priority import consumer as _consumer
from fastprod.testing import MockCluster

LEVELS = 3
pytestmark = pytest.mark.mock_cluster(brokers=1, topics={f"t-{level}": 2 for level in range(LEVELS)})


def producer(cluster: MockCluster, **options: Any) -> PriorityProducer:
    return PriorityProducer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, **options}, LEVELS)


def config(cluster: MockCluster, **options: Any) -> dict[str, Any]:
    return {
        "bootstrap.servers": cluster.bootstrap_servers,
        "group.id": "g",
        "auto.offset.reset": "earliest",
        "log_level": 0,
        **options,
    }


def fill(cluster: MockCluster, counts: Sequence[int], first: int = 0) -> None:
    """Values are numbers, by level."""
    with producer(cluster) as sender:
        for level, count in enumerate(counts):
            values = [b"%d" % number for number in range(first, first + count)]
            sender.produce_many("t", values, partitions=[number % 2 for number in range(count)], priority=level)
        assert sender.flush(120) == 0


def read(consumer: CapacityBurstConsumer, count: int) -> list[tuple[int, bytes]]:
    found: list[tuple[int, bytes]] = []
    deadline = time.monotonic() + 120
    while len(found) < count and time.monotonic() < deadline:
        found += [(consumer.priority_of(one), one.value() or b"") for one in consumer.poll(0.5)]
    return found


# ---- the producer


def test_a_record_goes_to_the_topic_of_its_level_with_all_it_has(mock_cluster: MockCluster) -> None:
    told = []
    with producer(mock_cluster) as sender:
        sender.produce("t", b"low")
        sender.produce(
            "t", b"high", b"k", 1, lambda error, message: told.append(message.topic()), priority=2, timestamp=7,
            headers={"h": b"1"},
        )  # fmt: skip
        sender.produce("t", value=b"middle", key=b"k", partition=0, priority=1)
        assert sender.produce_batch("t", [{"value": b"batch"}], priority=2) == 1
        assert sender.flush(120) == 0
    assert told == ["t-2"]
    assert [one.value() for one in mock_cluster.records("t-0")] == [b"low"]
    assert [(one.value(), one.partition()) for one in mock_cluster.records("t-1")] == [(b"middle", 0)]
    high = {one.value(): one for one in mock_cluster.records("t-2")}
    assert high.keys() == {b"high", b"batch"}
    one = high[b"high"]
    assert (one.key(), one.partition(), one.headers(), one.timestamp()[1]) == (b"k", 1, [("h", b"1")], 7)


@pytest.mark.parametrize(
    "column", [[0, 2, 1, 2], np.array([0, 2, 1, 2], "uint8"), pa.chunked_array([[None, 2], [1, 2]]), (0, 2, 1, 2)]
)
def test_a_column_of_levels(mock_cluster: MockCluster, column: Any) -> None:
    with producer(mock_cluster) as sender:
        receipt = sender.produce_many("t", [b"a", b"b", b"c", b"d"], priority=column)
        assert receipt.wait(120)
        assert {topic for topic, _ in receipt.extents} == {"t-0", "t-1", "t-2"}
        more = sender.produce_many("t", [b"e"], priority=[1], receipt=receipt)
        assert more is receipt
        assert receipt.wait(120)
    stored = {level: {one.value() for one in mock_cluster.records(f"t-{level}")} for level in range(LEVELS)}
    assert stored == {0: {b"a"}, 1: {b"c", b"e"}, 2: {b"b", b"d"}}


@pytest.mark.parametrize("form", ["table", "batch", "reader"])
@pytest.mark.parametrize("topic", [None, "t"])
@pytest.mark.parametrize("kind", [pa.int64(), pa.uint8()])
def test_a_table_with_levels(mock_cluster: MockCluster, form: str, topic: str | None, kind: pa.DataType) -> None:
    table = pa.table({"value": ["a", "b", "c"], "priority": pa.array([2, None, 0], kind), "topic": ["t", "t", "t"]})
    if topic:
        table = table.drop_columns(["topic"])
    source = {"table": table, "batch": table.to_batches()[0], "reader": table.to_reader(1)}[form]
    with producer(mock_cluster) as sender:
        assert sender.produce_arrow(source, topic).wait(120)
    assert [one.value() for one in mock_cluster.records("t-2")] == [b"a"]
    assert sorted(one.value() or b"" for one in mock_cluster.records("t-0")) == [b"b", b"c"]


def test_a_table_without_levels_is_of_the_lowest(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster) as sender:
        assert sender.produce_arrow(pa.table({"value": ["a"]}), "t").wait(120)
    assert [one.value() for one in mock_cluster.records("t-0")] == [b"a"]


@pytest.mark.parametrize("level", [-1, 3, 1.0, "1", None, True])
def test_a_wrong_level_is_named_and_nothing_is_sent(mock_cluster: MockCluster, level: Any) -> None:
    with producer(mock_cluster) as sender:
        with pytest.raises(ValueError, match=r"priority=.* from 0, the lowest, to 2"):
            sender.produce("t", b"v", priority=level)
        with pytest.raises(ValueError, match=r"priority=.* from 0, the lowest, to 2"):
            sender.produce_batch("t", [{"value": b"v"}], priority=level)
        if level in (-1, 3) and level is not True:
            with pytest.raises(ValueError, match=rf"priority at index 1 is {level}: .* to 2"):
                sender.produce_many("t", [b"v", b"w"], priority=[0, level])
            with pytest.raises(ValueError, match=rf"priority at index 1 is {level}: .* to 2"):
                sender.produce_arrow(pa.table({"value": ["v", "w"], "priority": [0, level]}), "t")
        assert len(sender) == 0


def test_wrong_columns_of_levels(mock_cluster: MockCluster) -> None:
    with producer(mock_cluster) as sender:
        with pytest.raises(ValueError, match="3 topics for 2 values"):
            sender.produce_many("t", [b"v", b"w"], priority=[0, 1, 2])
        with pytest.raises(TypeError, match="priority"):
            sender.produce_many("t", [b"v", b"w"], priority=["high", "low"])
        with pytest.raises(TypeError, match="priority"):
            sender.produce_many("t", [b"v", b"w"], priority=0.5)
        with pytest.raises(ValueError, match="give a topic"):
            sender.produce_arrow(pa.table({"value": ["a"]}))
        assert len(sender) == 0


@pytest.mark.parametrize("levels", [0, -1, 1.5, "x"])
def test_a_wrong_number_of_levels(mock_cluster: MockCluster, levels: Any) -> None:
    for make in (
        lambda: PriorityProducer({"bootstrap.servers": mock_cluster.bootstrap_servers}, levels),
        lambda: PriorityProducer({"bootstrap.servers": mock_cluster.bootstrap_servers, "max.priority": levels}),
        lambda: CapacityBurstConsumer(config(mock_cluster), levels, 50),
    ):
        with pytest.raises(ValueError, match="max_priority="):
            make()


def test_the_configuration_may_have_the_number_of_levels_and_is_not_changed(mock_cluster: MockCluster) -> None:
    given = {"bootstrap.servers": mock_cluster.bootstrap_servers, "max.priority": "2"}
    before = dict(given)
    with PriorityProducer(given) as sender:
        assert sender.max_priority == 2
    with pytest.raises(ValueError, match=r"max_priority=3, but max\.priority=2"):
        PriorityProducer(given, 3)
    with pytest.raises(ValueError, match="max_priority is missing"):
        PriorityProducer({"bootstrap.servers": mock_cluster.bootstrap_servers})
    assert given == before


@pytest.mark.mock_cluster(brokers=1, topics={"t-0": 40, "t-1": 40, "t-2": 10})
def test_of_what_waits_for_a_slow_broker_the_highest_level_goes_first(mock_cluster: MockCluster) -> None:
    order: list[tuple[str, bytes]] = []

    def note(error: Any, message: Any) -> None:
        assert error is None
        order.append((message.topic(), message.value()))

    with producer(mock_cluster, **{"linger.ms": 1}) as sender:
        for level, partitions in enumerate((40, 40, 10)):  # metadata is there
            sender.produce_many("t", [b"warm"] * partitions, partitions=list(range(partitions)), priority=level)
        assert sender.flush(120) == 0
        mock_cluster.set_rtt(3000)
        for level, partitions in enumerate((40, 40, 10)):
            for partition in range(partitions):
                sender.produce("t", b"v", partition=partition, priority=level, on_delivery=note)
            if level == 0:
                time.sleep(0.05)  # some of them are on their way
        mock_cluster.set_rtt(0)
        assert sender.flush(120) == 0
    places = {level: [at for at, (topic, _) in enumerate(order) if topic == f"t-{level}"] for level in range(LEVELS)}
    assert [len(places[level]) for level in range(LEVELS)] == [40, 40, 10]
    assert places[2][-1] < places[0][30], "some of the lowest level were on their way, and one turn in eight is theirs"
    assert places[2][-1] < places[1][10]
    assert places[1][-1] < places[0][-5]
    assert places[0][10] < places[1][-1], "the lowest level moves meanwhile"


def test_room_goes_to_the_highest_level_first_but_not_for_ever(mock_cluster: MockCluster) -> None:
    """Many threads wait for memory; those of the highest level get it sooner, and all get it."""
    took: dict[int, list[float]] = {level: [] for level in range(LEVELS)}
    with producer(mock_cluster, **{"buffer.memory": 200_000, "linger.ms": 0}) as sender:
        mock_cluster.set_rtt(5)

        def work(level: int) -> None:
            for _ in range(40):
                start = time.monotonic()
                sender.produce("t", b"x" * 20_000, priority=level)
                took[level].append(time.monotonic() - start)

        threads = [threading.Thread(target=work, args=(level,)) for level in range(LEVELS) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
        assert sender.flush(120) == 0
    assert [len(took[level]) for level in range(LEVELS)] == [160] * 3
    assert sum(took[2]) < sum(took[0])


# ---- the consumer


def test_the_highest_level_comes_first_and_a_poll_has_its_bound(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [400, 400, 400])
    seen: Counter[int] = Counter()
    with CapacityBurstConsumer(config(mock_cluster), LEVELS, 50) as consumer:
        consumer.subscribe(["t"])
        deadline = time.monotonic() + 120
        while sum(seen.values()) < 1200:
            assert time.monotonic() < deadline
            found = consumer.poll(0.5)
            order = [consumer.priority_of(one) for one in found]
            assert len(found) <= 50
            assert order == sorted(order, reverse=True)
            assert {consumer.logical_topic(one) for one in found} <= {"t"}
            seen.update(order)
        assert seen == {0: 400, 1: 400, 2: 400}
        assert [one.received for one in consumer.stats()] == [400, 400, 400]
        assert [one.lag for one in consumer.stats()] == [0, 0, 0]
        assert all(one.rate > 0 for one in consumer.stats())


@pytest.mark.parametrize("policy", [Strict(floor=0), Strict(floor=2), Shares({2: 0.7, 1: 0.2, 0: 0.1})])
def test_other_policies_bring_everything(mock_cluster: MockCluster, policy: Any) -> None:
    fill(mock_cluster, [200, 200, 200])
    with CapacityBurstConsumer(config(mock_cluster), LEVELS, 30, policy=policy) as consumer:
        consumer.subscribe(["t"])
        found = read(consumer, 600)
    assert Counter(level for level, _ in found) == {0: 200, 1: 200, 2: 200}
    for level in range(LEVELS):
        assert {value for of, value in found if of == level} == {b"%d" % number for number in range(200)}


def test_a_level_without_capacity_waits_and_loses_nothing(mock_cluster: MockCluster) -> None:
    class Gate:
        open = False

        def capacities(self) -> list[int]:
            return [5 if self.open else 0, 0, 5]

        def observe(self, counts: Sequence[int]) -> None:
            assert counts[0] == 0 or self.open

    fill(mock_cluster, [100, 0, 10])
    gate = Gate()
    with CapacityBurstConsumer(config(mock_cluster), LEVELS, 5, policy=gate) as consumer:
        consumer.subscribe(["t"])
        assert {level for level, _ in read(consumer, 10)} == {2}
        began = time.monotonic()
        while time.monotonic() < began + 8:  # beyond what it may hold meanwhile
            assert consumer.poll(0.5) == []
        gate.open = True
        found = read(consumer, 100)
    assert sorted(found) == sorted((0, b"%d" % number) for number in range(100))


def test_what_a_poll_returned_is_committed_by_the_next_not_before(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [40, 0, 40])
    places = [TopicPartition(f"t-{level}", number) for level in (0, 2) for number in (0, 1)]

    def offsets(found: list[TopicPartition]) -> list[int]:
        return [max(0, place.offset) for place in found]

    def started() -> CapacityBurstConsumer:
        made = CapacityBurstConsumer(config(mock_cluster), LEVELS, 20)
        made.assign([TopicPartition(place.topic, place.partition) for place in places])
        return made

    with started() as consumer:
        count = len(read(consumer, 1))
        assert offsets(consumer.committed(places, 60)) == [0] * 4
        assert sum(offsets(consumer.position(places))) == count
        told = consumer.commit(asynchronous=False)
        assert told is not None
        assert sum(offsets(told)) == count
        count += len(read(consumer, 1))
    with started() as consumer:
        assert sum(offsets(consumer.committed(places, 60))) == count, "whoever closes it has processed everything"
    try:
        with started() as consumer:
            assert read(consumer, 1)
            raise LookupError("not processed")
    except LookupError:
        pass
    with started() as consumer:
        assert sum(offsets(consumer.committed(places, 60))) == count
        assert len(read(consumer, 80 - count)) == 80 - count


def test_offsets_that_the_user_stores(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [6, 0, 6])
    options = config(mock_cluster, **{"enable.auto.offset.store": False})
    with CapacityBurstConsumer(options, LEVELS, 50) as consumer:
        consumer.subscribe(["t"])
        kept = []
        while len(kept) < 12:
            kept += consumer.poll(0.5)
        consumer.store_offsets(messages=[one for one in kept if (one.offset() or 0) < 2])
        told = consumer.commit(asynchronous=False)
        assert told is not None
        assert {(place.topic, place.offset) for place in told if place.offset >= 0} == {("t-0", 2), ("t-2", 2)}
        assert consumer.commit(kept[0], asynchronous=False) is not None
        consumer.commit(offsets=[TopicPartition("t-0", 0, 3), TopicPartition("t-2", 1, 1)], asynchronous=False)
        found = consumer.committed([TopicPartition("t-2", 1), TopicPartition("t-0", 0)], 60)
        assert [(place.topic, place.offset) for place in found] == [("t-2", 1), ("t-0", 3)]
        with pytest.raises(ValueError, match="one of message, messages and offsets"):
            consumer.commit(kept[0], offsets=[])
    with (
        CapacityBurstConsumer(config(mock_cluster), LEVELS, 50) as consumer,
        pytest.raises(ValueError, match=r"enable\.auto\.offset\.store=False"),
    ):
        consumer.store_offsets(kept[0])


def test_seek_pause_and_the_rest_go_to_the_right_level(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [6, 6, 6])
    with CapacityBurstConsumer(config(mock_cluster), LEVELS, 50) as consumer:
        consumer.subscribe(["t"])
        assert len(read(consumer, 18)) == 18
        assert len(consumer.assignment()) == 6
        consumer.seek(TopicPartition("t-1", 0, 1))
        assert read(consumer, 2) == [(1, b"2"), (1, b"4")]
        assert consumer.get_watermark_offsets(TopicPartition("t-1", 0), 60) == (0, 3)
        consumer.pause([TopicPartition("t-2", 0), TopicPartition("t-0", 1)])
        fill(mock_cluster, [2, 2, 2], first=10)
        assert sorted(read(consumer, 4)) == [(0, b"10"), (1, b"10"), (1, b"11"), (2, b"11")]
        assert consumer.poll(0.2) == []
        consumer.resume([TopicPartition("t-2", 0), TopicPartition("t-0", 1)])
        assert sorted(read(consumer, 2)) == [(0, b"11"), (2, b"10")]
        for wrong, problem in (
            ("t-3", "level 3"),
            ("t", "does not end in a level"),
            ("t-x", "does not end in a level"),
        ):
            with pytest.raises(ValueError, match=problem):
                consumer.seek(TopicPartition(wrong, 0, 0))
            with pytest.raises(ValueError, match=problem):
                consumer.position([TopicPartition(wrong, 0)])


def test_errors_of_several_levels_come_together_and_the_others_are_done(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [6, 6, 6])
    options = config(mock_cluster, **{"enable.auto.offset.store": False})
    with CapacityBurstConsumer(options, LEVELS, 50) as consumer:
        consumer.subscribe(["t"])
        assert len(read(consumer, 18)) == 18
        with pytest.raises(ExceptionGroup, match="2 of 3 levels") as caught:
            consumer.store_offsets(
                offsets=[TopicPartition(f"t-{level}", 0 if level == 1 else 9, 2) for level in range(LEVELS)]
            )
        assert [error.__notes__ for error in caught.value.exceptions] == [["level 2"], ["level 0"]]
        told = consumer.commit(asynchronous=False)
        assert told is not None
        assert [(place.topic, place.offset) for place in told if place.offset >= 0] == [("t-1", 2)]


def test_manual_assignment(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [6, 6, 6])
    with CapacityBurstConsumer(config(mock_cluster), LEVELS, 50) as consumer:
        consumer.assign([TopicPartition("t-2", 1, 0), TopicPartition("t-0", 0, 1)])
        assert sorted(read(consumer, 5)) == [(0, b"2"), (0, b"4"), (2, b"1"), (2, b"3"), (2, b"5")]
        consumer.unassign()
        assert consumer.assignment() == []


def test_a_rebalance_callback_that_raises_loses_no_record(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [100, 100, 100])
    told: list[int] = []

    def on_assign(consumer: CapacityBurstConsumer, partitions: list[TopicPartition]) -> None:
        assert isinstance(consumer, CapacityBurstConsumer)
        told.append(len(partitions))
        raise LookupError("no")

    found: list[Any] = []
    raised: list[Exception] = []
    with CapacityBurstConsumer(config(mock_cluster), LEVELS, 50) as consumer:
        consumer.subscribe(["t"], on_assign=on_assign)
        deadline = time.monotonic() + 120
        while len(found) < 300 and time.monotonic() < deadline:
            try:
                found += consumer.poll(0.5)
            except LookupError as error:
                raised.append(error)
            except ExceptionGroup as group:
                raised += group.exceptions
    assert len(raised) == len(told) == 3
    assert all("rebalance callback of level" in error.__notes__[0] for error in raised)
    assert len({(one.topic(), one.value()) for one in found}) == len(found) == 300


def test_a_callback_may_assign_by_itself(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [6, 6, 6])
    with CapacityBurstConsumer(config(mock_cluster), LEVELS, 50) as consumer:

        def from_two(consumer: CapacityBurstConsumer, partitions: list[TopicPartition]) -> None:
            for place in partitions:
                place.offset = 2
            consumer.assign(partitions)

        consumer.subscribe(["t"], on_assign=from_two)
        assert sorted(read(consumer, 6)) == sorted((level, value) for level in range(LEVELS) for value in (b"4", b"5"))


def test_a_record_that_arrives_wakes_a_poll_that_waits_for_ever(mock_cluster: MockCluster) -> None:
    with CapacityBurstConsumer(config(mock_cluster), LEVELS, 50) as consumer:
        consumer.subscribe(["t"])
        assert wait_until(lambda: consumer.poll(0.1) == [] and len(consumer.assignment()) == 6)
        thread = threading.Timer(0.5, fill, [mock_cluster, [0, 1, 0]])
        thread.start()
        assert [consumer.priority_of(one) for one in consumer.poll()] == [1]
        thread.join()


def test_ctrl_c_ends_a_poll(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [3, 0, 0])
    with CapacityBurstConsumer(config(mock_cluster), LEVELS, 50) as consumer:
        consumer.subscribe(["t"])
        assert len(read(consumer, 3)) == 3
        timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            consumer.poll(None)
        timer.join()
        fill(mock_cluster, [0, 0, 2])
        assert sorted(read(consumer, 2)) == [(2, b"0"), (2, b"1")]


@pytest.mark.mock_cluster(brokers=1, topics={"half-0": 1})
def test_a_level_whose_topic_is_missing_is_told_and_others_are_read(mock_cluster: MockCluster) -> None:
    with PriorityProducer({"bootstrap.servers": mock_cluster.bootstrap_servers}, 2) as sender:
        sender.produce("half", b"v")
    options = config(mock_cluster, **{"allow.auto.create.topics": False})
    with CapacityBurstConsumer(options, 2, 50) as consumer:
        consumer.subscribe(["half"])
        found: list[Any] = []
        problems: list[str] = []
        deadline = time.monotonic() + 120
        while not (found and problems) and time.monotonic() < deadline:
            try:
                found += consumer.poll(0.5)
            except KafkaException as error:
                problems.append(str(error))
    assert [one.value() for one in found] == [b"v"]
    assert "level 1" in problems[0]
    assert "half-1" in problems[0]
    assert "create_topics()" in problems[0]


def test_brokers_that_are_down_at_first(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [1, 1, 1])
    mock_cluster.down()
    with CapacityBurstConsumer(config(mock_cluster, error_cb=lambda error: None), LEVELS, 50) as consumer:
        consumer.subscribe(["t"])
        assert consumer.poll(0.5) == []
        mock_cluster.up()
        assert len(read(consumer, 3)) == 3


def test_bad_consumers(mock_cluster: MockCluster) -> None:
    given = config(mock_cluster)
    before = dict(given)
    without = {name: value for name, value in given.items() if name != "group.id"}
    for arguments, options, problem in (
        ((without, LEVELS, 50), {}, r"group\.id=None"),
        ((given, LEVELS, 6), {}, "max_poll_records=6 is too small.*at least 7"),
        ((given, LEVELS, None), {}, "max_poll_records is missing"),
        ((given, None, 50), {}, "max_priority is missing"),
        ((given, LEVELS, 50), {"history": 0}, "history=0"),
        (({**given, "queued.min.messages": "many"}, LEVELS, 50), {}, "'many' must be a whole number"),
        ((given, LEVELS, 50), {"history": 3, "maxout_threshold": 4}, "maxout_threshold=4"),
        (({**given, "max.poll.records": 40}, LEVELS, 50), {}, "max_poll_records=50, but max.poll.records=40"),
        ((given, LEVELS, 50), {"policy": Shares({1: 1, 0: 1})}, "shares for 2 levels"),
        ((given, LEVELS, 50), {"policy": Strict(), "history": 3}, "belongs to CapacityBurst"),
    ):
        with pytest.raises(ValueError, match=problem):
            CapacityBurstConsumer(*arguments, **options)
    with pytest.raises(TypeError, match="capacities"):
        CapacityBurstConsumer(given, LEVELS, 50, policy=object())  # type: ignore[arg-type]
    seed = {"max.priority": "3", "max.poll.records": 50, "max.poll.history.window.size": 8}
    with CapacityBurstConsumer({**given, **seed, "min.poll.window.maxout.threshold": 8}) as consumer:
        assert (consumer.max_priority, consumer.max_poll_records) == (3, 50)
        assert consumer.policy.maxout_threshold == 8  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="list of names"):
            consumer.subscribe("t")
        with pytest.raises(TypeError, match="on_assign must be callable"):
            consumer.subscribe(["t"], on_assign=3)  # type: ignore[arg-type]
    consumer.close()
    for call in (consumer.poll, consumer.assignment, consumer.commit, consumer.unsubscribe, consumer.stats):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert given == before


def test_a_level_without_a_share_is_not_waited_for_in_vain(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [10, 0, 0])
    with CapacityBurstConsumer(config(mock_cluster), LEVELS, 30, policy=Shares({2: 1, 1: 1, 0: 0})) as consumer:
        consumer.subscribe(["t"])
        assert {level for level, _ in read(consumer, 10)} == {0}


def test_commits_in_a_callback_while_it_is_closed(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [0, 0, 10])
    told: list[Any] = []
    options = config(mock_cluster, **{"enable.auto.commit": False})

    def on_revoke(consumer: CapacityBurstConsumer, partitions: list[TopicPartition]) -> None:
        if partitions[0].topic == "t-2":
            told.extend(consumer.commit(asynchronous=False) or [])

    with CapacityBurstConsumer(options, LEVELS, 50) as consumer:
        consumer.subscribe(["t"], on_revoke=on_revoke)
        assert len(read(consumer, 10)) == 10
    assert sum(max(0, place.offset) for place in told) == 10


def test_regular_expressions(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [2, 2, 2])
    with CapacityBurstConsumer(config(mock_cluster), LEVELS, 50) as consumer:
        consumer.subscribe(["^t|nothing$"])
        found = read(consumer, 6)
        assert Counter(level for level, _ in found) == {0: 2, 1: 2, 2: 2}
        assert consumer.poll(0.5) == []


def test_a_callback_of_the_configuration_that_raises_loses_no_record(mock_cluster: MockCluster) -> None:
    fill(mock_cluster, [100, 100, 100])

    def raises(statistics: str) -> None:
        if not over.is_set():  # else close() would raise it
            raise LookupError("no")

    found: list[Any] = []
    raised = 0
    over = threading.Event()
    options = config(mock_cluster, stats_cb=raises, **{"statistics.interval.ms": 20})
    with CapacityBurstConsumer(options, LEVELS, 50) as consumer:
        consumer.subscribe(["t"])
        deadline = time.monotonic() + 120
        while (len(found) < 300 or not raised) and time.monotonic() < deadline:
            try:
                found += consumer.poll(0.5)
            except (LookupError, ExceptionGroup):
                raised += 1
        over.set()
        with suppress(LookupError, ExceptionGroup):
            found += consumer.poll(0)  # what was raised before that
    assert raised
    assert len({(one.topic(), one.value()) for one in found}) == len(found) == 300


# ---- one level, with a consumer that does what is hard to bring about


class Told:
    """A message."""

    def __init__(self, partition: int, offset: int) -> None:
        self.place = (partition, offset)

    def topic(self) -> str:
        return "t-0"

    def error(self) -> None:
        return None

    def partition(self) -> int:
        return self.place[0]

    def offset(self) -> int:
        return self.place[1]


class Fake:
    """A confluent_kafka.Consumer that does something in consume() before it returns."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[Told], Any]] = []
        self.sought: list[tuple[int, int]] = []
        self.commits = 4
        self.refusals: list[int] = []

    def consume(self, count: int, timeout: float) -> list[Told]:
        batch, act = self.batches.pop(0)
        if act is not None:
            act()
        return batch

    def assignment(self) -> list[TopicPartition]:
        return [TopicPartition("t-0", 0), TopicPartition("t-0", 1)]

    def position(self, places: list[TopicPartition]) -> list[TopicPartition]:
        return [TopicPartition(place.topic, place.partition, 9) for place in places]

    def committed(self, places: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        return [TopicPartition(place.topic, place.partition, self.commits) for place in places]

    def seek(self, place: TopicPartition) -> None:
        if self.refusals:
            raise KafkaException(KafkaError(self.refusals.pop(0)))
        self.sought.append((place.partition, place.offset))


def test_what_comes_with_a_revocation_is_kept_but_for_what_is_gone() -> None:
    fake = Fake()
    level = _consumer._Level(0, fake, 50, [])  # type: ignore[arg-type]
    revoked = level.reaction(None, None, gone=True)  # type: ignore[arg-type]
    fake.batches = [
        ([Told(0, 0), Told(1, 0)], None),
        ([Told(1, 1), Told(0, 1)], lambda: revoked(fake, [TopicPartition("t-0", 1)])),  # type: ignore[arg-type]
    ]
    level._fetch(2)
    level._fetch(2)
    assert [one.place for one in level._held] == [(0, 0), (0, 1)]


def interrupt() -> None:
    raise KeyboardInterrupt


def test_when_a_signal_drops_what_was_fetched_it_is_fetched_again() -> None:
    fake = Fake()
    level = _consumer._Level(0, fake, 50, [])  # type: ignore[arg-type]
    level._returned[("t-0", 0)] = 7
    level._held = [Told(0, 7)]
    fake.batches = [([], interrupt)]
    with pytest.raises(KeyboardInterrupt):
        level._fetch(5)
    assert fake.sought == [(0, 7), (1, 4)]
    assert level._held == []
    level.start_at([TopicPartition("t-0", 1, 2)])  # as the user's seek
    fake.commits = -1001  # nothing
    fake.batches = [([], interrupt)]
    with pytest.raises(KeyboardInterrupt):
        level._fetch(5)
    assert fake.sought[2:] == [(0, 7), (1, 2)]
    level.forget()
    fake.batches = [([], interrupt)]
    with pytest.raises(KeyboardInterrupt):
        level._fetch(5)
    assert fake.sought[4:] == [(0, OFFSET_BEGINNING), (1, OFFSET_BEGINNING)]


def test_what_cannot_be_gone_back_to_at_once_is_with_the_next_poll() -> None:
    fake = Fake()
    level = _consumer._Level(0, fake, 50, [])  # type: ignore[arg-type]
    fake.refusals = [KafkaError._STATE, KafkaError._TIMED_OUT]  # not fetched from; brokers busy
    fake.batches = [([], interrupt), ([Told(1, 4)], None)]
    with pytest.raises(KeyboardInterrupt) as raised:
        level._fetch(5)
    assert "level 0 will go back" in raised.value.__notes__[0]
    assert fake.sought == []
    level._fetch(5)
    assert fake.sought == [(0, 4), (1, 4)]
    assert [one.place for one in level._held] == [(1, 4)]


@pytest.mark.mock_cluster(brokers=1, topics={"t-0": 3, "t-1": 3})
@pytest.mark.parametrize("automatic", [True, False])
def test_ctrl_c_in_a_fetch_costs_no_record(mock_cluster: MockCluster, automatic: bool) -> None:
    """As confluent-kafka does it: the batch is gone, and librdkafka goes on behind it."""
    with PriorityProducer({"bootstrap.servers": mock_cluster.bootstrap_servers}, max_priority=2) as producer:
        for level in range(2):
            assert producer.produce_many("t", [b"%d" % n for n in range(300)], priority=level).wait(120)
    options = {
        "group.id": "g",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": automatic,
        "fetch.wait.max.ms": 10,
    }
    consumer = CapacityBurstConsumer({"bootstrap.servers": mock_cluster.bootstrap_servers, **options}, 2, 50)
    seen: Counter[tuple[str, bytes]] = Counter()
    dropped = 0
    with consumer:
        consumer.subscribe(["t"])
        for turn in range(100_000):
            if len(seen) == 600:
                break
            own = [level.consumer for level in consumer._levels]
            if dropped < 4 and turn % 2:
                for level in consumer._levels:
                    level.consumer = Interrupting(level.consumer)
            try:
                for message in consumer.poll(0.2):
                    seen[(message.topic() or "", message.value() or b"")] += 1
            except KeyboardInterrupt:
                dropped += 1
            for level, one in zip(consumer._levels, own, strict=True):
                level.consumer = one
        assert len(seen) == 600
        assert dropped == 4
        if not automatic:
            consumer.commit(asynchronous=False)
    assert max(seen.values()) <= 10  # repeated, but not for ever


class Interrupting:
    """A Consumer in whose consume() Ctrl-C comes when it has something."""

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def consume(self, *arguments: Any) -> list[Any]:
        found: list[Any] = self._consumer.consume(*arguments)
        if found:
            raise KeyboardInterrupt
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)


def test_a_level_that_holds_enough_is_looked_after_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_consumer, "Message", Told)
    fake = Fake()
    level = _consumer._Level(0, fake, 50, [])  # type: ignore[arg-type]
    level._held = [Told(0, 0), Told(0, 1)]
    fake.batches = [([Told(0, 2)], None)]
    assert level.fill(1, []) == 1  # for the first time
    assert (len(level._held), fake.batches) == (3, [])
    assert level.fill(1, []) == 1  # not again within a second


def test_held_records_stay_when_a_seek_is_refused(mock_cluster: MockCluster) -> None:
    consumer = CapacityBurstConsumer({"bootstrap.servers": mock_cluster.bootstrap_servers, "group.id": "g"}, 1, 50)
    with consumer:
        consumer._levels[0]._held = [Told(0, 3)]
        with pytest.raises(KafkaException):
            consumer.seek(TopicPartition("t-0", 0, 7))  # it is not assigned
        assert len(consumer._levels[0]._held) == 1
        consumer._levels[0]._held = []


@pytest.mark.mock_cluster(brokers=1, topics={"t-0": 1, "t-1": 1})
def test_numbers_of_numpy_are_levels_too(mock_cluster: MockCluster) -> None:
    with PriorityProducer({"bootstrap.servers": mock_cluster.bootstrap_servers}, max_priority=2) as producer:
        producer.produce("t", b"one", priority=np.int64(1))  # type: ignore[arg-type]
        producer.produce_many("t", [b"many"], priority=np.int32(1))
        with pytest.raises(ValueError, match=r"priority=np.int64\(2\) must be a whole number from 0"):
            producer.produce_many("t", [b"many"], priority=np.int64(2))
    assert {one.value() for one in mock_cluster.records("t-1")} == {b"one", b"many"}


def test_topics_cannot_be_created_without_a_broker_and_the_error_says_why() -> None:
    producer = PriorityProducer({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, max_priority=2)
    with pytest.raises(KafkaException, match=r"127\.0\.0\.1:1"):
        producer.create_topics("orders", 1, timeout=3)
    producer.close()
