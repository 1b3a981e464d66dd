"""Names of columns and fields: as ever in Spark, case does not count."""

import pytest
from pyspark.sql import Row

import fastprod.spark
from fastprod.spark import partition_writer, write


@pytest.fixture
def two(mock, topic) -> str:
    mock.create_topic(topic, 2)
    return topic


@pytest.fixture
def sensitive(spark):
    spark.conf.set("spark.sql.caseSensitive", "true")
    yield spark
    spark.conf.unset("spark.sql.caseSensitive")


def arrived(mock, topic) -> list:
    return sorted((record.key(), record.value(), record.partition()) for record in mock.records(topic))


WANTED = [(b"0", b"v0", 0), (b"1", b"v1", 1)]
SHOUTED = ["cast(id AS string) AS KEY", "concat('v', id) AS Value", "cast(id AS int) AS `PARTITION`", "id AS Other"]


def save(df, mock, **options) -> None:
    fastprod.spark.register(df.sparkSession)
    writer = df.write.format("fastprod").mode("append").option("kafka.bootstrap.servers", mock.bootstrap_servers)
    writer.options(**options).save()


def test_write(spark, mock, two) -> None:
    assert write(spark.range(2).selectExpr(*SHOUTED), two, {"bootstrap.servers": mock.bootstrap_servers}).records == 2
    assert arrived(mock, two) == WANTED


def test_write_to_topics_of_a_column(spark, mock, two) -> None:
    df = spark.range(2).selectExpr(*SHOUTED, f"'{two}' AS Topic")
    assert write(df, config={"bootstrap.servers": mock.bootstrap_servers}).records == 2
    assert arrived(mock, two) == WANTED
    holes = spark.range(2).selectExpr("'v' AS value", f"if(id = 1, null, '{two}') AS TOPIC")
    with pytest.raises(ValueError, match="column 'topic' is null in 1 rows"):
        write(holes, config={"bootstrap.servers": mock.bootstrap_servers})


def test_the_data_source(spark, mock, two) -> None:
    save(spark.range(2).selectExpr(*SHOUTED, f"'{two}' AS ToPiC"), mock)
    assert arrived(mock, two) == WANTED


def test_two_that_differ_only_by_case(spark, mock, two) -> None:
    df = spark.range(1).selectExpr("'v' AS value", "'a' AS key", "'b' AS Key", "'t' AS topic", "'u' AS TOPIC")
    with pytest.raises(ValueError, match="columns 'key' and 'Key' both stand for 'key'"):
        write(df, two, {"bootstrap.servers": mock.bootstrap_servers})
    with pytest.raises(Exception, match="columns 'key' and 'Key' both stand for 'key'"):
        save(df, mock, topic=two)
    assert arrived(mock, two) == []


def test_a_column_that_does_not_count_may_come_twice(spark, mock, two) -> None:
    df = spark.range(1).selectExpr("'v' AS value", "'t' AS topic", "'u' AS TOPIC", "1 AS x", "2 AS X")
    assert write(df, two, {"bootstrap.servers": mock.bootstrap_servers}).records == 1
    save(df, mock, topic=two)
    assert len(arrived(mock, two)) == 2


def test_exact_names_where_spark_is_told_that_case_counts(sensitive, mock, two) -> None:
    config = {"bootstrap.servers": mock.bootstrap_servers}
    df = sensitive.range(1).selectExpr("'v' AS value", "'a' AS key", "'b' AS KEY", "7 AS Partition")
    assert write(df, two, config).records == 1
    assert [(key, value) for key, value, _ in arrived(mock, two)] == [(b"a", b"v")]
    with pytest.raises(ValueError, match="no column 'value'"):
        write(sensitive.range(1).selectExpr("'v' AS VALUE"), two, config)


@pytest.mark.parametrize("shape", ["row", "dict", "mixture"])
def test_rows_of_an_rdd(spark, mock, two, shape) -> None:
    rows = {
        "row": [Row(KEY="0", Value="v0", Partition=0, x=1), Row(KEY="1", Value="v1", Partition=1, x=1)],
        "dict": [{"KEY": "0", "Value": "v0", "Partition": 0}, {"key": "1", "value": "v1", "partition": 1, 5: 6}],
        "mixture": [Row(KEY="0", Value="v0", Partition=0), {"key": "1", "value": "v1", "PARTITION": 1}],
    }[shape]
    write_them = partition_writer({"bootstrap.servers": mock.bootstrap_servers}, two)
    spark.sparkContext.parallelize(rows, 1).mapPartitions(write_them).collect()
    assert arrived(mock, two) == WANTED


@pytest.mark.parametrize("row", [Row(value="v", key="a", KEY="b"), {"value": "v", "key": "a", "KEY": "b"}])
def test_a_row_with_two_fields_that_differ_only_by_case(spark, mock, two, row) -> None:
    write_them = partition_writer({"bootstrap.servers": mock.bootstrap_servers}, two)
    with pytest.raises(Exception, match=r"fields 'key' and 'KEY' both stand for 'key'.*: row "):
        spark.sparkContext.parallelize([row], 1).mapPartitions(write_them).collect()
    assert arrived(mock, two) == []
