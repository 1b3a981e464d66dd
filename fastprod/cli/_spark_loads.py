"""What `fastprod perf spark` sends: rows of a kind, and the ways in which they get into Kafka.

    VALUES    ready values into one topic
    TOPICS    ready values into hundreds of topics of very different sizes, which rows name
    ORDERS    Parquet files of orders, whose rows become JSON or Avro on the way

A way is a function of a DataFrame, cached or of files, a topic and a configuration. It returns when every row is
acknowledged.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import confluent_kafka

from fastprod.cli._java_load import WIRE_BATCH, java_settings
from fastprod.cli._load import Unfit, for_librdkafka

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Config = Mapping[str, Any]

HASH = 64  # letters of a SHA-256, of which values are made
SLOW_SHARE = 5  # the slow loop gets one row in so many: rates are compared, and it would take minutes
BATCH_ROWS = 10_000  # for write() and the hand-over alone; as many as Spark has, but without adding up their bytes


class Way(NamedTuple):
    """One way to get rows out of Spark."""

    client: str
    call: str
    send: Callable[[DataFrame, str, Config], None]
    share: int = 1
    """It gets one row in so many."""
    arrives: bool = True
    """Whether the rows end up in the topic."""


class Load(NamedTuple):
    """Rows of one kind, and who writes them."""

    ours: Way
    rivals: Mapping[str, tuple[Way, ...]]
    select: Callable[[int, str, int], tuple[str, ...]] | None
    """Spark's expressions for the columns of a row, made of its number: size of a value, topic, topics. None: files."""
    always: bool = False
    """All rivals take part, unless some are named."""
    row_overhead: int = 8
    """Bytes of a cached row beside its value."""


def value_of(size: int) -> str:
    """Letters that differ from row to row."""
    hashes = -(-size // HASH)
    return f"cast(substring(repeat(sha2(cast(id AS string), 256), {hashes}), 1, {size}) AS binary) AS value"


# ---- one topic


def _write(df: DataFrame, topic: str, conf: Config) -> None:
    from fastprod.spark import write

    write(df, topic, conf)


def _write_by_rows(df: DataFrame, topic: str, conf: Config) -> None:
    from fastprod.spark import write

    write(df, topic, conf, batch_rows=BATCH_ROWS)


def _write_once(form: str) -> Callable[[DataFrame, str, Config], None]:
    def send(df: DataFrame, topic: str, conf: Config) -> None:
        from fastprod.spark import write

        buckets = df.rdd.getNumPartitions() if form == "bucket" else None  # as many tasks as the others have
        job = f"perf-{uuid.uuid4().hex}"
        write(df, topic, conf, batch_rows=BATCH_ROWS, exactly_once=form, job_id=job, buckets=buckets)

    return send


def _write_again(df: DataFrame, topic: str, conf: Config) -> None:
    """A job that was written before, the first time in the warm-up: its rows are read, compared and not sent."""
    from fastprod.spark import write

    write(df, topic, conf, batch_rows=BATCH_ROWS, exactly_once="task", job_id=f"perf-again-{os.getpid()}")


def _sink(df: DataFrame, topic: str, options: Mapping[str, str]) -> None:
    writer = df.write.format("kafka")
    if "topic" not in df.columns:
        writer = writer.option("topic", topic)
    for name, value in options.items():
        writer = writer.option(f"kafka.{name}", value)
    writer.save()


def _sink_as_it_comes(df: DataFrame, topic: str, conf: Config) -> None:
    own = ("linger.ms", "batch.size")
    _sink(df, topic, {name: value for name, value in for_sink(conf).items() if name not in own})


def _sink_tuned(df: DataFrame, topic: str, conf: Config) -> None:
    _sink(df, topic, {**for_sink(conf), "batch.size": str(conf.get("batch.size", WIRE_BATCH))})


def for_sink(conf: Config) -> dict[str, str]:
    try:
        return java_settings(conf)
    except Unfit as problem:
        raise Unfit(f"spark-sink{str(problem).removeprefix('java')}") from None


def _foreach(df: DataFrame, topic: str, conf: Config) -> None:
    """The loop that people write, without a delivery callback: in its favour."""
    settings = for_librdkafka(conf)

    def send(rows: Iterator[Any]) -> None:
        producer = confluent_kafka.Producer(settings)
        for row in rows:
            while True:
                try:
                    producer.produce(topic, bytes(row.value))
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
        producer.flush()

    df.foreachPartition(send)


def _hand_over(df: DataFrame, topic: str, conf: Config) -> None:
    from fastprod.spark import batches_of

    def drop(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if not batch.num_rows:
                yield batch  # never: what is sent back has no rows

    with batches_of(BATCH_ROWS, df.sparkSession):  # as fast as it goes
        df.mapInArrow(drop, df.schema).collect()


OURS = Way("fastprod", f"spark.write, {BATCH_ROWS:,}-row batches", _write_by_rows)
RIVALS = {
    "write": (Way("write", "spark.write, Spark's batches", _write),),
    "spark-sink": (
        Way("spark-sink", 'format("kafka"), defaults', _sink_as_it_comes),
        Way("spark-sink", 'format("kafka"), tuned', _sink_tuned),
    ),
    "foreach": (Way("foreach", "foreachPartition, confluent", _foreach, share=SLOW_SHARE),),
    "hand-over": (Way("hand-over", "mapInArrow, rows dropped", _hand_over, arrives=False),),
    "once": (
        Way("once", 'exactly_once="task"', _write_once("task")),
        Way("once", 'exactly_once="bucket"', _write_once("bucket")),
        Way("once", '"task", written before', _write_again, arrives=False),
    ),
}
VALUES = Load(OURS, RIVALS, lambda size, topic, topics: (value_of(size),))


# ---- many topics


def topic_names(topic: str, topics: int) -> list[str]:
    """Those that rows name, the largest first."""
    return [f"{topic}-{number:04d}" for number in range(1, topics + 1)]


def _topic_of(topic: str, topics: int) -> str:
    """The topic of rank k gets ln(1 + 1/k) / ln(1 + topics) of the rows: Zipf's law, nearly, without a table."""
    at_random = "pmod(xxhash64(id), 1000000007) / 1000000007D"
    rank = f"least(cast(floor(pow({topics + 1}D, {at_random})) AS int), {topics})"
    return f"concat('{topic}-', lpad(cast({rank} AS string), 4, '0')) AS topic"


def _bundled(df: DataFrame, topic: str, conf: Config) -> None:
    from fastprod.spark import write

    write(df, None, conf, batch_rows=BATCH_ROWS, bundles="auto", buckets=df.rdd.getNumPartitions())


def _plain(df: DataFrame, topic: str, conf: Config) -> None:
    from fastprod.spark import write

    write(df, None, conf, batch_rows=BATCH_ROWS)


def _sink_for_many(df: DataFrame, topic: str, conf: Config) -> None:
    """Java's producer sets a whole batch.size of memory aside for each partition: with 1 MB it took 75 s, not 2."""
    room = {"batch.size": str(64 * 1024), "buffer.memory": str(64 * 1024 * 1024)}
    given = {name: str(conf[name]) for name in room if name in conf}
    _sink(df, topic, {**for_sink(conf), **room, **given})


TOPICS = Load(
    Way("fastprod", 'spark.write, bundles="auto"', _bundled),
    {
        "plain": (Way("plain", "spark.write, without bundles", _plain),),
        "spark-sink": (
            Way("spark-sink", 'format("kafka"), defaults', _sink_as_it_comes),
            Way("spark-sink", 'format("kafka"), tuned', _sink_for_many),
        ),
    },
    lambda size, topic, topics: (_topic_of(topic, topics), value_of(size)),
    always=True,
    row_overhead=48,
)


# ---- files of orders


ORDER_BYTES = 250  # of an order as JSON, about
ORDER_FILES = 8
GROUP_ROWS = 100_000  # of a row group


def write_orders(folder: Path, records: int) -> None:
    """So many orders in Parquet files, as a lake has them."""
    import pyarrow.parquet as pq

    from fastprod.cli._orders import orders

    share = -(-records // ORDER_FILES)
    for number in range(-(-records // share)):
        rows = orders(min(share, records - number * share), seed=number)
        pq.write_table(_table(rows), folder / f"part-{number:05d}.parquet", row_group_size=GROUP_ROWS)


def _table(batch: Any) -> Any:
    import pyarrow as pa

    return pa.Table.from_batches([batch])


def _files(df: DataFrame) -> list[str]:
    return sorted(df.inputFiles())


def _export(encoder: Callable[[], Any]) -> Callable[[DataFrame, str, Config], None]:
    def send(df: DataFrame, topic: str, conf: Config) -> None:
        from fastprod.spark import export

        export(df.sparkSession, _files(df), topic, conf, value=encoder())

    return send


def _encoded(encoder: Callable[[], Any]) -> Callable[[DataFrame, str, Config], None]:
    def send(df: DataFrame, topic: str, conf: Config) -> None:
        from fastprod.spark import write

        write(df, topic, conf, value=encoder(), batch_rows=BATCH_ROWS)

    return send


def _json() -> Any:
    from fastprod.encoding import Json

    return Json()


def _avro() -> Any:
    from fastprod.encoding import Avro

    return Avro(wire="bare")  # as Spark's to_avro writes it


def _as_json(df: DataFrame) -> DataFrame:
    return df.selectExpr("to_json(struct(*)) AS value")


def _as_avro(df: DataFrame) -> DataFrame:
    from pyspark.sql.avro.functions import to_avro
    from pyspark.sql.functions import struct

    return df.select(to_avro(struct("*")).alias("value"))


def _then(
    prepare: Callable[[DataFrame], DataFrame], send: Callable[[DataFrame, str, Config], None]
) -> Callable[[DataFrame, str, Config], None]:
    return lambda df, topic, conf: send(prepare(df), topic, conf)


ORDERS = Load(
    Way("fastprod", "spark.export, JSON", _export(_json)),
    {
        "write": (Way("write", "spark.write(value=Json())", _encoded(_json)),),
        "to-json": (Way("to-json", "to_json, spark.write", _then(_as_json, _write_by_rows)),),
        "spark-sink": (Way("spark-sink", 'to_json, format("kafka"), tuned', _then(_as_json, _sink_tuned)),),
        "avro": (
            Way("avro", "spark.export, Avro", _export(_avro)),
            Way("avro", "spark.write(value=Avro())", _encoded(_avro)),
            Way("avro", 'to_avro, format("kafka"), tuned', _then(_as_avro, _sink_tuned)),
        ),
    },
    None,
    always=True,
)
