"""What exactly once makes of markers that brokers have forgotten, or do not tell of: without Spark and Kafka."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from fastprod import _positions
from fastprod.spark import _once, _worker
from fastprod.spark._once import Once, claim
from fastprod.spark._sink import ExportError, Sink

WEEK = 7 * 24 * 3600.0


class Brokers:
    """The markers that brokers hold, by group, and for how long they say that they keep them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.markers: dict[str, dict[str, Any]] = {}
        self.kept: float | None = WEEK
        self.asked = 0
        for name in ("reader", "read_marker", "write_marker", "retention_s", "groups", "other_places", "end"):
            monkeypatch.setattr(_positions, name, getattr(self, name))
        self.fencing = False  # whoever claims has fenced the others, and nobody sees a marker yet
        monkeypatch.setattr(_once, "_begin", self._begin)

    @contextmanager
    def reader(self, config: Any, group: str) -> Iterator[str]:
        yield group

    def read_marker(self, group: str, topic: str, patience: float | None = None) -> dict[str, Any] | None:
        return self.markers.get(group)

    def write_marker(self, producer: Any, group: str, topic: str, marker: dict[str, Any], offset: int = 0) -> None:
        self.markers[group] = marker

    def _begin(self, *_: object) -> Brokers:
        self.fencing = True
        return self

    def retention_s(self, config: Any) -> float | None:
        assert not self.fencing, "tasks of a stream would fence each other for ever"
        self.asked += 1
        return self.kept

    def groups(self, config: Any) -> list[str]:
        return list(self.markers)

    def other_places(self, config: Any, group: str, topic: str) -> list[str]:
        return []

    def end(self, producer: Any) -> None:
        self.fencing = False

    # ---- as a producer

    def begin_transaction(self) -> None:
        pass

    commit_transaction = begin_transaction


@pytest.fixture
def brokers(monkeypatch: pytest.MonkeyPatch) -> Brokers:
    return Brokers(monkeypatch)


SINK = Sink({"bootstrap.servers": "x:1"}, "t", "orders", partitions=2)


def may_write(sink: Sink, number: int = 0) -> bool:
    """Whether a task would write; it says why if it does not know."""
    output = Once(sink, number)
    with output.group() as group:
        return output.committed(group) is None


def test_a_task_without_a_marker_writes_only_while_the_jobs_own_is_there(brokers: Brokers) -> None:
    sink = claim(SINK)
    assert may_write(sink)
    before = brokers.markers.pop("fastprod.orders.job")
    with pytest.raises(ExportError, match=r"marker of job 'orders' .* forgotten .*Nothing of partition 0 was sent"):
        may_write(sink)
    assert claim(SINK).claim != before["claim"]  # another run has begun anew
    with pytest.raises(ExportError, match=r"marker of job 'orders'"):
        may_write(sink)


def test_a_task_without_a_marker_does_not_write_when_its_own_may_be_forgotten(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers forget each group at a time of its own: the job's marker may be there still."""
    sink = claim(SINK)
    now = time.time()
    monkeypatch.setattr(_once.time, "time", lambda: now + WEEK - 2 * _once.MARGIN_S)
    assert may_write(sink)
    monkeypatch.setattr(_once.time, "time", lambda: now + WEEK - _once.MARGIN_S / 2)
    with pytest.raises(ExportError, match=r"was begun 167\.\d hours ago.*Nothing of partition 0 was sent"):
        may_write(sink)
    with pytest.raises(ValueError, match=r"was begun 167\.\d hours ago.*Nothing was sent"):
        claim(SINK)
    # What is committed is seen to be committed, however late.
    brokers.markers["fastprod.orders.0"] = {**brokers.markers["fastprod.orders.job"], "fingerprint": "f"}
    assert not may_write(sink)


def test_brokers_that_forget_soon_are_not_relied_on_for_longer(
    brokers: Brokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    brokers.kept = 60.0
    sink = claim(SINK)
    assert may_write(sink)
    now = time.time()
    monkeypatch.setattr(_once.time, "time", lambda: now + 45)
    with pytest.raises(ExportError, match="was begun"):
        may_write(sink)
    with pytest.raises(ValueError, match="was begun"):
        claim(SINK)


def test_brokers_are_asked_how_long_they_keep_markers_once_while_a_job_is_young(brokers: Brokers) -> None:
    """Every task of a stream claims, in every batch."""
    first, second = claim(SINK), claim(SINK)
    assert (first.until, brokers.asked) == (second.until, 1)
    assert first.until is not None
    brokers.markers["fastprod.orders.job"]["at"] -= 3600
    assert claim(SINK).until == first.until - 3600
    assert brokers.asked == 2  # they may have been told otherwise since


def test_brokers_that_do_not_tell_how_long_they_keep_markers(brokers: Brokers) -> None:
    brokers.kept = None
    sink = claim(replace(SINK, batch=4))
    assert sink.until is None
    assert may_write(sink)
    del brokers.markers["fastprod.orders.job"]
    with pytest.raises(ExportError, match="forgotten"):
        may_write(sink)


def test_brokers_that_cannot_list_their_groups_are_not_taken_to_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them may hold the marker, at another topic."""
    problems = [KafkaError.COORDINATOR_LOAD_IN_PROGRESS, KafkaError.CLUSTER_AUTHORIZATION_FAILED]

    class Admin:
        def __init__(self, config: Any) -> None: ...

        def list_consumer_groups(self, **_: Any) -> Future[Any]:
            answer: Future[Any] = Future()
            answer.set_result(SimpleNamespace(valid=[], errors=[KafkaError(problems.pop(0))]))
            return answer

    monkeypatch.setattr(_positions, "AdminClient", Admin)
    with pytest.raises(KafkaException, match="CLUSTER_AUTHORIZATION_FAILED"):
        _positions.other_places({"bootstrap.servers": "x:1"}, "fastprod.orders.job", "t")
    assert problems == []  # the first of them passes, and brokers are asked again


def test_a_second_call_in_a_task_is_seen_though_another_writer_ran_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_worker, "_written", (0, set()))
    audit = replace(SINK, job="audit")
    for sink in (SINK, audit, replace(SINK, batch=1)):
        _worker._check_first(5, sink, 0)
    _worker._check_first(5, SINK, 1)  # another partition: a coalesce() after the writer
    with pytest.raises(ExportError, match="partition 0 of job 'orders' is written twice in one task"):
        _worker._check_first(5, SINK, 0)
    _worker._check_first(6, SINK, 0)  # the next attempt
