"""DataFrames of whatever columns, encoded in the Python workers, by `write` and by the data source."""

import json

import pytest
from conftest import settled
from test_export import Picky, read_back, settings

from fastprod.encoding import Json
from fastprod.spark import bucketed, register, write

ROWS = 3000


def orders(spark, partitions=3):
    return spark.range(0, ROWS, 1, partitions).selectExpr(
        "id",
        "concat('customer-', id % 10) AS customer",
        "cast(id AS decimal(10, 2)) AS amount",
        "timestamp_seconds(id + 1) AS placed",
        "map('k', id) AS more",
        "if(id % 2 = 0, null, array(named_struct('x', id))) AS deep",
    )


def test_values_are_those_of_to_json(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    rows = orders(spark)
    value = Json(timezone=spark.conf.get("spark.sql.session.timeZone"))
    report = write(
        rows, topic, settings(kafka_cluster), value=value, key="customer", headers=["id"], timestamp="placed"
    )
    assert (report.records, report.failed) == (ROWS, 0)
    found = read_back(kafka_cluster, topic)
    theirs = [row.value for row in rows.selectExpr("to_json(struct(*)) AS value").collect()]
    assert sorted(message.value().decode() for message in found) == sorted(theirs)
    for message in found:
        row = json.loads(message.value())
        assert message.key().decode() == row["customer"]
        assert message.headers() == [("id", b"%d" % row["id"])]
        assert message.timestamp()[1] == (row["id"] + 1) * 1000


def test_a_key_of_several_columns(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    key = Json(columns=["customer", "id"])
    write(orders(spark), topic, settings(kafka_cluster), value=Json(exclude=["more"]), key=key)
    for message in read_back(kafka_cluster, topic):
        row = json.loads(message.value())
        assert json.loads(message.key()) == {"customer": row["customer"], "id": row["id"]}
        assert "more" not in row


@pytest.mark.parametrize("once", ["task", "bucket"])
def test_exactly_once_compares_what_was_encoded(spark, kafka_cluster, topic, once) -> None:
    kafka_cluster.create_topic(topic, 3)
    rows = spark.range(0, ROWS, 1, 4).selectExpr("id AS number")
    named = {"exactly_once": once, "job_id": topic, **({"buckets": 4} if once == "bucket" else {})}

    def run(value):
        return write(rows, topic, settings(kafka_cluster), value=value, **named)

    assert run(Json()).skipped == 0
    assert run(Json()).skipped == 4
    with pytest.raises(Exception, match="holds other rows than those committed under this name"):
        run("number")
    found = [json.loads(message.value())["number"] for message in read_back(kafka_cluster, topic)]
    assert sorted(found) == list(range(ROWS))


@pytest.mark.parametrize("value", ["payload", Json(columns=["payload"])], ids=["column", "json"])
def test_buckets_by_a_column_that_is_not_written(spark, kafka_cluster, topic, value) -> None:
    kafka_cluster.create_topic(topic, 3)
    once = {"exactly_once": "bucket", "job_id": topic, "buckets": 4, "bucket_by": ["Order_ID"]}
    for partitions, skipped in ((3, 0), (5, 4)):
        rows = spark.range(0, 100, 1, partitions).selectExpr(
            "id AS order_id", "concat('v', id) AS payload", "1 AS more"
        )
        report = write(rows, topic, settings(kafka_cluster), value=value, **once)
        assert (report.records, report.skipped) == (100, skipped)
    found = {message.value().decode() for message in read_back(kafka_cluster, topic)}
    form = "v{}" if value == "payload" else '{{"payload":"v{}"}}'
    assert found == {form.format(number) for number in range(100)}
    with pytest.raises(ValueError, match=r"bucket_by names 'order', but the columns are \['order_id'"):
        write(rows, topic, settings(kafka_cluster), value=value, **{**once, "bucket_by": ["order"]})
    with pytest.raises(TypeError, match="bucket_by is a list of columns"):
        write(rows, topic, settings(kafka_cluster), value=value, **{**once, "bucket_by": "order_id"})


def test_a_column_alone_is_the_value(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    write(spark.range(0, ROWS, 1, 4), topic, settings(kafka_cluster), value="id", exactly_once="task", job_id=topic)
    found = settled(kafka_cluster, topic, ROWS)
    assert found.clean, str(found)


def test_a_row_that_cannot_be_encoded_is_named(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    with pytest.raises(Exception, match=r"Spark partition 1, row 500: value 1500 is not wanted"):
        write(orders(spark), topic, settings(kafka_cluster), value=Picky(1500))


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"value": Json(), "key": "nothing"}, "key names 'nothing', but the columns are id"),
        ({"value": Json(columns=["nothing"])}, "nothing"),
        ({"value": "more"}, "value names 'more', which is map"),
        ({"value": 7}, "value is an encoder such as Json"),
        ({"key": "id"}, "no effect without value"),
        ({"value": Json(), "priority": "id", "max_priority": 2}, "priority does not go with value"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(spark, kafka_cluster, topic, options, match) -> None:
    kafka_cluster.create_topic(topic, 3)
    with pytest.raises((ValueError, TypeError), match=match):
        write(orders(spark), topic, settings(kafka_cluster), **options)
    assert read_back(kafka_cluster, topic) == []


def save(rows, cluster, topic, **options) -> None:
    given = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": topic}
    given |= {name.replace("_", "."): value for name, value in options.items()}
    rows.write.format("fastprod").mode("append").options(**given).save()


def test_the_data_source_encodes_json(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    register(spark)
    options = {"value_format": "json", "value_columns": "id, amount", "key_columns": "customer"}
    save(orders(spark), kafka_cluster, topic, **options, headers_columns="id", timestamp_column="placed")
    found = read_back(kafka_cluster, topic)
    assert sorted(json.loads(message.value())["id"] for message in found) == list(range(ROWS))
    for message in found:
        row = json.loads(message.value())
        assert list(row) == ["id", "amount"]
        assert message.key() == b"customer-%d" % (row["id"] % 10)
        assert message.headers() == [("id", b"%d" % row["id"])]


def test_the_data_source_encodes_avro_and_keys_of_several_columns(spark, kafka_cluster, topic) -> None:
    import io

    import fastavro

    kafka_cluster.create_topic(topic, 3)
    register(spark)
    schema = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
    options = {"value_format": "avro", "value_schema": json.dumps(schema), "value_columns": "id"}
    save(orders(spark), kafka_cluster, topic, **options, key_columns="customer,id", exactly_once="task", job_id=topic)
    save(orders(spark), kafka_cluster, topic, **options, key_columns="customer,id", exactly_once="task", job_id=topic)
    found = read_back(kafka_cluster, topic)
    rows = [fastavro.schemaless_reader(io.BytesIO(message.value()), schema) for message in found]
    assert sorted(row["id"] for row in rows) == list(range(ROWS))
    for message, row in zip(found, rows, strict=True):
        assert json.loads(message.key()) == {"customer": f"customer-{row['id'] % 10}", "id": row["id"]}


def test_wrong_options_of_encoding_are_named(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    register(spark)
    for options, match in (
        ({"value_format": "xml"}, "is .json. or .avro., not 'xml'"),
        ({"key_columns": "id"}, "has no effect without .value.format"),
        ({"value_format": "json", "value_columns": "nothing"}, "nothing"),
        ({"value_format": "json", "key_columns": "nothing"}, "key names 'nothing'"),
        ({"value_format": "avro", "value_schema": '"long"'}, "record"),
    ):
        with pytest.raises(Exception, match=match):
            save(orders(spark), kafka_cluster, topic, **options)
    assert read_back(kafka_cluster, topic) == []


def test_avro_with_a_registry_that_only_the_driver_asks(spark, kafka_cluster, topic) -> None:
    """mock:// is a registry of this process alone: workers could not ask it."""
    from confluent_kafka.schema_registry import SchemaRegistryClient
    from confluent_kafka.schema_registry.avro import AvroDeserializer
    from confluent_kafka.serialization import MessageField, SerializationContext

    from fastprod.encoding import Avro

    kafka_cluster.create_topic(topic, 3)
    client = SchemaRegistryClient.new_client({"url": "mock://orders"})
    rows = spark.range(0, ROWS, 1, 3).selectExpr("id", "concat('n', id) AS name", "timestamp_seconds(id) AS at")
    write(rows, topic, settings(kafka_cluster), value=Avro(subject=f"{topic}-value", schema="derive", registry=client))
    read = AvroDeserializer(client)
    context = SerializationContext(topic, MessageField.VALUE)
    found = [read(message.value(), context) for message in read_back(kafka_cluster, topic)]
    assert sorted(row["id"] for row in found) == list(range(ROWS))
    assert all(row["name"] == f"n{row['id']}" and row["at"].timestamp() == row["id"] for row in found)


def test_a_stream_of_rows_is_encoded(spark, kafka_cluster, topic, tmp_path) -> None:
    kafka_cluster.create_topic(topic, 3)
    register(spark)
    orders(spark).select("id", "customer").write.parquet(str(tmp_path / "in"))
    rows = spark.readStream.schema("id long, customer string").parquet(str(tmp_path / "in"))
    options = {"kafka.bootstrap.servers": kafka_cluster.bootstrap_servers, "topic": topic, "value.format": "json"}
    writer = rows.writeStream.format("fastprod").options(**options).option("key.columns", "customer")
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    found = [json.loads(message.value()) for message in read_back(kafka_cluster, topic)]
    assert sorted(row["id"] for row in found) == list(range(ROWS))


def test_rows_that_know_their_buckets_are_encoded(spark, kafka_cluster, topic) -> None:
    kafka_cluster.create_topic(topic, 3)
    register(spark)
    for _ in range(2):
        rows = bucketed(orders(spark).select("id", "customer"), 4)
        save(rows, kafka_cluster, topic, value_format="json", exactly_once="bucket", job_id=topic)
    found = [json.loads(message.value()) for message in read_back(kafka_cluster, topic)]
    assert sorted(row["id"] for row in found) == list(range(ROWS))
    assert all(set(row) == {"id", "customer"} for row in found)
