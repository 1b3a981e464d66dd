"""write(bundles=...): each topic has one task, outstanding ones several; and exactly once with it."""

from collections import defaultdict

import pytest
from conftest import settled

from fastprod.bundles import BundleMap, hash_position
from fastprod.spark import write
from fastprod.spark._bundles import Routes, first_position, planned

TOPICS = 12
ROWS = 6_000


def config(cluster) -> dict:
    return {"bootstrap.servers": cluster.bootstrap_servers}


def rows(spark, topic: str, giant: int = 0, partitions: int = 3):
    """So many rows for `<topic>-giant`, as many in all for the others, with keys but in every third."""
    return spark.range(0, ROWS + giant, 1, partitions).selectExpr(
        "cast(id AS string) AS value",
        "if(id % 3 = 0, NULL, concat('key-', id % 50)) AS key",
        f"if(id < {ROWS}, concat('{topic}-', id % {TOPICS}), '{topic}-giant') AS topic",
    )


def create(cluster, topic: str, partitions: int = 2) -> None:
    for name in [*map(str, range(TOPICS)), "giant"]:
        cluster.create_topic(f"{topic}-{name}", partitions)


def writers(report) -> dict[str, set[int]]:
    """The tasks that wrote to each topic."""
    found = defaultdict(set)
    for task in report.tasks:
        for name in task.topics:
            found[name].add(task.task)
    return dict(found)


def counts(report) -> dict[str, int]:
    return {name: sum(part.records for part in parts.values()) for name, parts in report.topics.items()}


def test_a_map_makes_a_task_of_each_bundle(spark, mock, topic) -> None:
    create(mock, topic)
    bundles = BundleMap([0, 1 << 28, 1 << 30, 3 << 30, 0xFFFFFFFF])
    report = write(rows(spark, topic), config=config(mock), bundles=bundles)
    assert counts(report) == {f"{topic}-{number}": ROWS // TOPICS for number in range(TOPICS)}
    assert len(report.tasks) == len(bundles)
    assert report.spread == {}
    for name, tasks in writers(report).items():
        assert tasks == {bundles.index_at(hash_position(name))}


def test_auto_gives_each_topic_one_task_and_spreads_the_big_one_by_its_keys(spark, mock, topic) -> None:
    create(mock, topic, partitions=1)
    report = write(rows(spark, topic, giant=3 * ROWS), config=config(mock), bundles="auto", buckets=4)
    giant = f"{topic}-giant"
    assert counts(report) == {f"{topic}-{number}": ROWS // TOPICS for number in range(TOPICS)} | {giant: 3 * ROWS}
    assert len(report.tasks) == 4
    assert list(report.spread) == [giant]
    assert report.spread[giant] > 1
    assert "1 topics spread over several tasks" in report.summary()
    assert report.to_dict()["spread"] == dict(report.spread)
    by_topic = writers(report)
    assert len(by_topic.pop(giant)) == report.spread[giant]
    assert all(len(tasks) == 1 for tasks in by_topic.values())
    # A key's rows are one task's, so they are in the order of the input partition that they came from.
    latest: dict[bytes, list[int]] = defaultdict(lambda: [-1] * 3)
    for record in mock.records(giant):
        if record.key() is not None:
            number = int(record.value())
            source = number * 3 // (4 * ROWS)
            assert number > latest[record.key()][source]
            latest[record.key()][source] = number
    assert len(latest) == 50


def test_auto_takes_as_many_tasks_as_cores(spark, mock, topic) -> None:
    create(mock, topic)
    report = write(rows(spark, topic), config=config(mock), bundles="auto")
    assert len(report.tasks) == spark.sparkContext.defaultParallelism
    assert report.records == ROWS


def test_no_rows_and_no_keys(spark, mock, topic) -> None:
    create(mock, topic)
    empty = rows(spark, topic).where("value = 'none'")
    assert write(empty, config=config(mock), bundles="auto", buckets=3).records == 0
    bare = rows(spark, topic, giant=2 * ROWS).drop("key")
    report = write(bare, config=config(mock), bundles="auto", buckets=3)
    assert report.records == 3 * ROWS
    assert list(report.spread) == [f"{topic}-giant"]


def test_a_job_that_runs_again_writes_nothing_again(spark, kafka_cluster, topic) -> None:
    create(kafka_cluster, topic)
    once = {"exactly_once": "task", "job_id": topic, "bundles": "auto", "buckets": 4}
    first = write(rows(spark, topic, giant=2 * ROWS), config=config(kafka_cluster), **once)
    assert (first.records, first.skipped, len(first.tasks)) == (3 * ROWS, 0, 4)
    # Other splits of the same rows make the same tasks.
    again = write(rows(spark, topic, giant=2 * ROWS, partitions=7), config=config(kafka_cluster), **once)
    assert (again.records, again.skipped) == (3 * ROWS, sum(task.records > 0 for task in first.tasks))
    visible = settled(kafka_cluster, f"{topic}-giant", 0)
    assert visible.records == 2 * ROWS
    with pytest.raises(ValueError, match="divided its rows by bucket"):
        write(rows(spark, topic, giant=ROWS), config=config(kafka_cluster), **once)
    with pytest.raises(ValueError, match="divided its rows by bucket"):
        write(rows(spark, topic, giant=2 * ROWS), config=config(kafka_cluster), **{**once, "buckets": 5})
    assert settled(kafka_cluster, f"{topic}-giant", 0).records == 2 * ROWS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bundles": "equal"}, "BundleMap or \"auto\", not 'equal'"),
        ({"bundles": 4}, "not 4"),
        ({"bundles": "auto", "topic": "orders"}, "rows that name their topics"),
        ({"bundles": "auto", "bucket_by": ["value"]}, "bucket_by has no effect with bundles"),
        ({"bundles": BundleMap.equal(3), "buckets": 3}, "each of its 3 bundles is a task"),
        ({"bundles": "auto", "buckets": 0}, "not 0"),
        ({"bundles": "auto", "exactly_once": "always"}, "'always'"),
    ],
)
def test_what_is_wrong_is_named_before_anything_is_sent(spark, mock, topic, options, message) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        write(rows(spark, topic), config=config(mock), **options)


def test_a_null_topic_is_refused(spark, mock) -> None:
    df = spark.range(10).selectExpr("cast(id AS string) AS value", "nullif(concat('t-', id), 't-3') AS topic")
    with pytest.raises(ValueError, match="column 'topic' is null in 1 rows"):
        write(df, config=config(mock), bundles="auto")


# ---- routes, without Spark


def shares(routes: Routes, topics: dict[str, tuple[int, int]]) -> list[float]:
    found = [0.0] * routes.tasks
    for topic, (_, size) in topics.items():
        parts = routes.spread.get(topic, 1)
        first = first_position(topic, parts) if parts > 1 else hash_position(topic)
        for part in range(parts):
            found[routes.writers[routes.map.index_at(first + part)]] += size / parts
    return found


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.5, 2.0])
def test_zipf_sizes_are_shared_out_evenly(exponent: float) -> None:
    topics = {f"topic-{number}": (1, int(1e9 / (number + 1) ** exponent)) for number in range(200)}
    found = shares(planned(topics, 8), topics)
    assert max(found) <= 1.2 * sum(found) / 8


def test_routes_have_a_short_name_of_their_own() -> None:
    topics = {f"topic-{number}": (1, 1000 * number) for number in range(50)}
    assert planned(topics, 4).layout() == planned(dict(reversed(topics.items())), 4).layout()
    assert planned(topics, 4).layout() != planned(topics, 5).layout()
    assert len(planned(topics, 4).layout()) < 40


def test_a_topic_at_the_end_of_the_ring_is_spread_inside_of_it(monkeypatch) -> None:
    monkeypatch.setattr("fastprod.spark._bundles.hash_position", lambda name: 0xFFFFFFFF)
    assert first_position("any", 4) == 0xFFFFFFFC
