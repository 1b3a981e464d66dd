"""Priorities of rows: which topic a row goes to, and what is refused before anything is sent."""

import pyarrow as pa
import pytest
from conftest import settled
from pyspark.sql import Row

import fastprod.spark
from fastprod.spark import CheckError, ExportError, _check, _plan, _worker, partition_writer, write
from fastprod.spark._priority import refusal

LEVELS = 3
RANGE = "a priority is a whole number from 0, the lowest, to 2, since max_priority=3"


def config(cluster, **more) -> dict:
    return {"bootstrap.servers": cluster.bootstrap_servers, **more}


@pytest.fixture
def orders(mock, topic) -> str:
    """A logical topic on mock brokers."""
    for level in range(LEVELS):
        mock.create_topic(f"{topic}-{level}", 2)
    return topic


@pytest.fixture
def real_orders(kafka_cluster, topic) -> str:
    for level in range(LEVELS):
        kafka_cluster.create_topic(f"{topic}-{level}", 2)
    return topic


def arrived(cluster, topic) -> dict:
    """Numbers by level."""
    return {
        level: sorted(int(record.value()) for record in cluster.records(f"{topic}-{level}")) for level in range(LEVELS)
    }


def by_level(numbers) -> dict:
    return {level: [number for number in numbers if number % LEVELS == level] for level in range(LEVELS)}


NOTHING = by_level([])


def rows(spark, count=30, priority="id % 3"):
    return spark.range(0, count, 1, 2).selectExpr("cast(id AS string) AS value", f"{priority} AS Urgency", "id AS x")


def save(df, cluster, **options) -> None:
    fastprod.spark.register(df.sparkSession)
    writer = df.write.format("fastprod").mode("append").option("kafka.bootstrap.servers", cluster.bootstrap_servers)
    writer.options(**{name.replace("_", "."): value for name, value in options.items()}).save()


# ---- where rows go


@pytest.mark.parametrize("kind", ["tinyint", "bigint"])
def test_rows_go_to_the_topic_of_their_level(spark, mock, orders, kind) -> None:
    df = rows(spark, priority=f"cast(id % 3 AS {kind})")
    report = write(df, orders, config(mock), priority="urgency", max_priority=LEVELS)
    assert report.records == 30
    assert set(report.topics) == {f"{orders}-{level}" for level in range(LEVELS)}
    assert arrived(mock, orders) == by_level(range(30))


def test_topics_of_a_column_have_levels_too(spark, mock, orders) -> None:
    df = rows(spark).selectExpr("*", f"'{orders}' AS Topic")
    settings = config(mock, **{"max.priority": LEVELS})
    write(df, None, settings, priority="URGENCY")
    assert arrived(mock, orders) == by_level(range(30))
    assert settings == config(mock, **{"max.priority": LEVELS})
    save(df, mock, priority="uRGENCY", kafka_max_priority=LEVELS)
    assert arrived(mock, orders) == by_level(sorted([*range(30), *range(30)]))


def test_the_data_source(spark, mock, orders) -> None:
    save(rows(spark), mock, topic=orders, priority="urgency", max_priority=LEVELS)
    assert arrived(mock, orders) == by_level(range(30))


def test_a_stream(spark, mock, orders, tmp_path) -> None:
    fastprod.spark.register(spark)
    rows(spark).write.parquet(str(tmp_path / "rows"))
    read = spark.readStream.schema("value string, Urgency bigint").parquet(str(tmp_path / "rows"))
    options = {"kafka.bootstrap.servers": mock.bootstrap_servers, "topic": orders, "priority": "Urgency"}
    options |= {"max.priority": "3", "checkpointLocation": str(tmp_path / "checkpoint")}
    query = read.writeStream.format("fastprod").options(**options).trigger(availableNow=True).start()
    assert query.awaitTermination(120)
    assert arrived(mock, orders) == by_level(range(30))


def test_an_rdd(spark, mock, orders) -> None:
    numbers = spark.sparkContext.parallelize(range(30), 2)
    many = partition_writer(config(mock), orders, priority="Urgency", max_priority=LEVELS, chunk=7)
    reports = numbers.map(lambda n: Row(value=str(n), urgency=n % 3)).mapPartitions(many).collect()
    assert sum(report.records for report in reports) == 30
    named = partition_writer(config(mock), priority="urgency", max_priority=LEVELS)
    numbers.map(lambda n: {"value": str(30 + n), "URGENCY": n % 3, "topic": orders}).mapPartitions(named).collect()
    assert arrived(mock, orders) == by_level(range(60))


def test_a_column_that_counts_may_have_the_levels_as_well(spark, mock, orders) -> None:
    df = spark.range(2).selectExpr("cast(id AS string) AS value", "cast(id AS int) AS partition")
    write(df, orders, config(mock), priority="Partition", max_priority=2)
    assert [(record.topic(), record.partition()) for record in mock.records(f"{orders}-1")] == [(f"{orders}-1", 1)]


def test_what_waits_of_a_higher_level_goes_first(mock, orders) -> None:
    """Producers know about levels, and one of other levels does not stand in."""
    sinks = [_worker.Sink(config(mock), orders, priority="p", levels=levels) for levels in (2, 3)]
    assert [_worker.borrow(sink)._level_count for sink in sinks] == [2, 3]
    for sink in sinks:
        _worker.discard(sink)


# ---- what is refused before the job starts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": "urgent", "max_priority": 3}, r"no column 'urgent', .*\['value', 'Urgency', 'x'\]"),
        ({"priority": "value", "max_priority": 3}, "column 'value' must be an integer type .*, not string"),
        ({"priority": "urgency"}, "max_priority is missing"),
        ({"priority": "urgency", "max_priority": 0}, "max_priority=0 must be a whole number from 1"),
        ({"priority": "urgency", "max_priority": True}, "max_priority=True must be a whole number from 1"),
        ({"priority": 2, "max_priority": 3}, "priority is the name of a column, not 2"),
        ({"max_priority": 3}, "max_priority has no effect without priority"),
    ],
)
def test_wrong_arguments_are_named(spark, mock, orders, options, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        write(rows(spark), orders, config(mock), **options)
    if options.get("priority") != 2 and options.get("max_priority") is not True:
        with pytest.raises(Exception, match=message):
            save(rows(spark), mock, topic=orders, **options)
    assert arrived(mock, orders) == NOTHING


def test_a_number_that_is_none_and_two_numbers(spark, mock, orders) -> None:
    with pytest.raises(Exception, match="max_priority='many' must be a whole number"):
        save(rows(spark), mock, topic=orders, priority="urgency", max_priority="many")
    with pytest.raises(ValueError, match=r"max_priority=3, but max\.priority=2 in the configuration"):
        write(rows(spark), orders, config(mock, **{"max.priority": "2"}), priority="urgency", max_priority=3)


def test_case_counts_only_where_spark_is_told_so(spark, mock, orders) -> None:
    both = rows(spark).selectExpr("*", "0 AS urgency")
    with pytest.raises(ValueError, match="columns 'Urgency' and 'urgency' both stand for 'urgency'"):
        write(both, orders, config(mock), priority="urgency", max_priority=LEVELS)
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        write(both, orders, config(mock), priority="Urgency", max_priority=LEVELS)
        with pytest.raises(ValueError, match="no column 'URGENCY'"):
            write(both, orders, config(mock), priority="URGENCY", max_priority=LEVELS)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    assert arrived(mock, orders) == by_level(range(30))


@pytest.mark.parametrize(
    ("priority", "said"),
    [
        ("if(id = 29999, 5, id % 3)", "is 5"),
        ("if(id = 29999, -7, id % 3)", "is -7"),
        ("case id when 0 then -1 when 7 then 3 when 8 then null else 1 end", "is -1 and 3 and null in 1 rows"),
        ("if(id < 2, null, id % 3)", "is null in 2 rows"),
    ],
)
def test_a_wrong_row_is_named_before_anything_is_sent(spark, mock, orders, priority, said) -> None:
    df = rows(spark, 30_000, priority)
    with pytest.raises(ValueError, match=f"column 'urgency' {said}: {RANGE}.*Nothing was sent"):
        write(df, orders, config(mock), priority="Urgency", max_priority=LEVELS)
    assert arrived(mock, orders) == NOTHING


def test_null_topics_and_wrong_levels_are_found_in_one_look(spark, mock, orders) -> None:
    df = rows(spark).selectExpr("*", f"if(x = 3, null, '{orders}') AS topic")
    with pytest.raises(ValueError, match="column 'topic' is null in 1 rows"):
        write(df, None, config(mock), priority="urgency", max_priority=2)
    full = df.selectExpr("value", "Urgency", f"if(x < 0, null, '{orders}') AS topic")  # which may be null for Spark
    with pytest.raises(ValueError, match="column 'urgency' is 2: a priority is"):
        write(full, None, config(mock), priority="urgency", max_priority=2)
    assert write(full, None, config(mock), priority="urgency", max_priority=LEVELS).records == 30


def test_the_topics_of_all_levels_must_be_there(spark, kafka_cluster, real_orders, monkeypatch) -> None:
    monkeypatch.setattr(_check, "CREATE_S", 0.5)
    with pytest.raises(CheckError, match=f"there is no topic '{real_orders}-3'.*all 5 levels") as refused:
        write(rows(spark), real_orders, config(kafka_cluster), priority="urgency", max_priority=5)
    assert "Did you mean" not in str(refused.value)
    _plan.sink(real_orders, config(kafka_cluster), priority="urgency", max_priority=LEVELS)
    assert arrived(kafka_cluster, real_orders) == NOTHING


# ---- the second line: tasks


@pytest.mark.parametrize("by", ["argument", "column"])
@pytest.mark.parametrize("wrong", [3, -1, None])
def test_a_task_refuses_a_batch_before_any_of_it_is_sent(mock, orders, by, wrong) -> None:
    sink = _worker.Sink(config(mock), orders if by == "argument" else None, priority="p", levels=LEVELS)

    def batch(*priorities):
        cells = {"value": list("012"), "p": pa.array(priorities, pa.int64()), "topic": pa.array([orders] * 3)}
        return pa.record_batch(cells)

    said = "null in 1 rows" if wrong is None else wrong
    with pytest.raises(ExportError, match=f"column 'p' is {said}: {RANGE}.*earlier rows may have been"):
        _worker.write_batches(sink, [batch(0, 1, wrong)])
    assert arrived(mock, orders) == NOTHING
    assert _worker.write_batches(sink, [batch(0, 1, 2)]).records == 3
    assert arrived(mock, orders) == by_level(range(3))
    _worker.discard(sink)


def test_without_a_look_the_tasks_refuse(spark, mock, orders) -> None:
    df = rows(spark, priority="if(id = 29, 3, id % 3)").coalesce(1)
    with pytest.raises(Exception, match=f"column 'urgency' is 3: {RANGE}"):
        write(df, orders, config(mock), priority="Urgency", max_priority=LEVELS, check=False)
    with pytest.raises(Exception, match=f"column 'urgency' is 3: {RANGE}"):
        save(df, mock, topic=orders, priority="Urgency", max_priority=LEVELS)
    assert arrived(mock, orders) == NOTHING


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"value": "0", "urgency": 3}, "field 'urgency' is 3 in row"),
        ({"value": "0", "urgency": None}, "field 'urgency' is None in row"),
        ({"value": "0"}, "field 'urgency' is None in row"),
        ({"value": "0", "urgency": True}, "field 'urgency' is True in row"),
        (b"0", "field 'urgency' is None in row"),
        (("k", "0"), "field 'urgency' is None in row"),
    ],
)
def test_a_wrong_row_of_an_rdd(spark, mock, orders, row, said) -> None:
    many = partition_writer(config(mock), orders, priority="urgency", max_priority=LEVELS)
    with pytest.raises(Exception, match=f"{said}.*: {RANGE}"):
        spark.sparkContext.parallelize([{"value": "1", "urgency": 1}, row], 1).mapPartitions(many).collect()
    assert arrived(mock, orders) == NOTHING


@pytest.mark.parametrize(
    ("found", "said"),
    [((0, 2, 0), None), ((None, None, 0), None), ((3, 3, 0), "is 3:"), ((-1, 9, 1200), "-1 and 9 and null in 1,200")],
)
def test_words(found, said) -> None:
    told = refusal("p", LEVELS, *found)
    assert told is None if said is None else said in str(told)


# ---- exactly once


@pytest.mark.parametrize("form", ["task", "bucket"])
def test_exactly_once(spark, kafka_cluster, real_orders, form) -> None:
    options = {"priority": "urgency", "max_priority": LEVELS, "exactly_once": form, "job_id": real_orders}
    options |= {"buckets": 2} if form == "bucket" else {}
    for skipped in (0, 2):
        report = write(rows(spark), real_orders, config(kafka_cluster), **options)
        assert (report.records, report.skipped) == (30, skipped)
    for level in range(LEVELS):
        settled(kafka_cluster, f"{real_orders}-{level}", 30)
    assert arrived(kafka_cluster, real_orders) == by_level(range(30))
    if form == "bucket":
        return
    with pytest.raises(Exception, match="holds other rows than those committed"):
        write(rows(spark, priority="(id + 1) % 3"), real_orders, config(kafka_cluster), **options)
    other = {name: value for name, value in options.items() if name not in ("priority", "max_priority")}
    with pytest.raises(ValueError, match=f"topic '{real_orders}-<priority>' in an earlier run"):
        write(rows(spark), f"{real_orders}-0", config(kafka_cluster), **other)


def test_of_a_transaction_with_a_wrong_row_nothing_is_seen(spark, kafka_cluster, real_orders) -> None:
    """Neither of the batches before it, nor of its own; the other partition's is committed."""
    df = rows(spark, 40, priority="if(id = 39, 3, id % 3)")
    options = {"priority": "urgency", "max_priority": LEVELS, "exactly_once": "task", "job_id": real_orders}
    with pytest.raises(Exception, match=rf"column 'urgency' is 3: {RANGE}.*Its transaction is aborted"):
        write(df, real_orders, config(kafka_cluster), **options, check=False, batch_rows=5)
    for level in range(LEVELS):
        settled(kafka_cluster, f"{real_orders}-{level}", 40)
    seen = arrived(kafka_cluster, real_orders)
    assert [number for level in seen.values() for number in level if number >= 20] == []


def test_the_data_source_exactly_once(spark, kafka_cluster, real_orders) -> None:
    for form in ("task", "bucket"):
        df = fastprod.spark.bucketed(rows(spark), 2, ["x"]) if form == "bucket" else rows(spark)
        options = {"topic": real_orders, "priority": "urgency", "max_priority": LEVELS, "exactly_once": form}
        for _ in range(2):
            save(df, kafka_cluster, **options, job_id=f"{real_orders}-{form}")
    for level in range(LEVELS):
        settled(kafka_cluster, f"{real_orders}-{level}", 30)
    assert arrived(kafka_cluster, real_orders) == by_level(sorted([*range(30), *range(30)]))
