"""On a real Kafka: tasks that fail, workers that are killed, jobs that are submitted again."""

import os
import signal

import pytest

from fastprod.spark import write
from fastprod.testing import audit

ROWS = 40_000
PARTITIONS = 5


class KillOnce:
    """A partitioner that kills its Python worker in the first attempt at a Spark partition, halfway through."""

    def __init__(self, victim: int, after: int) -> None:
        self.victim = victim
        self.left = after

    def partition(self, topic, key, value, partitions, available) -> int:
        from pyspark import TaskContext

        context = TaskContext.get()
        if context.partitionId() == self.victim and context.attemptNumber() == 0:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return len(value) % partitions


def numbers(spark):
    return spark.range(0, ROWS, 1, PARTITIONS).selectExpr("cast(id AS string) AS value")


def settings(cluster, **more) -> dict:
    return {"bootstrap.servers": cluster.bootstrap_servers, **more}


def test_a_job_submitted_again_writes_nothing_again(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    first = write(numbers(spark), topic, settings(kafka_cluster), exactly_once="task", job_id=topic)
    assert (first.records, first.skipped) == (ROWS, 0)
    second = write(numbers(spark), topic, settings(kafka_cluster), exactly_once="task", job_id=topic)
    assert (second.records, second.skipped, second.bytes) == (ROWS, PARTITIONS, first.bytes)
    found = audit(kafka_cluster.bootstrap_servers, topic, ROWS, order="none")
    assert found.clean, str(found)
    third = write(numbers(spark), topic, settings(kafka_cluster), exactly_once="task", job_id=f"{topic}-other")
    assert third.skipped == 0
    assert audit(kafka_cluster.bootstrap_servers, topic, ROWS, order="none").doubled == ROWS


def test_a_killed_worker_and_a_retried_task_leave_each_record_once(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    config = settings(kafka_cluster, partitioner=KillOnce(2, ROWS // PARTITIONS // 2))
    report = write(numbers(spark), topic, config, exactly_once="task", job_id=topic)
    assert report.records == ROWS
    assert report.tasks[2].attempt > 0
    found = audit(kafka_cluster.bootstrap_servers, topic, ROWS, order="none")
    assert found.clean, str(found)


def test_without_it_a_retried_task_loses_nothing(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    config = settings(kafka_cluster, partitioner=KillOnce(2, ROWS // PARTITIONS // 2), **{"linger.ms": 0})
    report = write(numbers(spark), topic, config)
    assert report.records == ROWS
    found = audit(kafka_cluster.bootstrap_servers, topic, ROWS, order="none")
    assert (found.lost, found.alien) == (0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exactly_once": "task"}, "needs job_id"),
        ({"exactly_once": "task", "job_id": "no spaces"}, "no spaces"),
        ({"exactly_once": "always", "job_id": "j"}, "exactly_once is"),
        ({"job_id": "j"}, "no effect without"),
    ],
)
def test_wrong_arguments_are_named(spark, mock, topic, options, message) -> None:
    with pytest.raises(ValueError, match=message):
        write(numbers(spark), topic, settings(mock), **options)


def test_speculation_is_refused(spark, mock, topic, monkeypatch) -> None:
    # A session cannot be switched to it, so pretend that it was started that way.
    monkeypatch.setattr(
        type(spark.conf), "get", lambda self, key, default=None: "true" if "speculation" in key else default
    )
    with pytest.raises(ValueError, match=r"spark\.speculation"):
        write(numbers(spark), topic, settings(mock), exactly_once="task", job_id="j")
