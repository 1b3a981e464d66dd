"""Files to Kafka without the JVM: formats, folders, conditions, keys, and what is refused before anything is sent."""

import datetime
import gzip
import json
import os
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Consumer, TopicPartition

from fastprod._core._columns import Column
from fastprod.encoding import Json
from fastprod.spark import CheckError, export

ROWS = 20_000


class Plain:
    """An encoder that a person can check: json.dumps of each row, as text."""

    def check(self, schema) -> None:
        pass

    def encode_column(self, batch, name="value", base=0):
        return Column(
            [json.dumps(row, default=str).encode() for row in batch.to_pylist()], name, strict=False, base=base
        )


def read_back(cluster, topic) -> list:
    """All records of committed transactions."""
    consumer = Consumer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "group.id": f"{topic}-reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    try:
        partitions = consumer.list_topics(topic).topics[topic].partitions
        consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
        found, ended = [], set()
        while len(ended) < len(partitions):
            message = consumer.poll(60)
            assert message is not None, "no answer"
            if message.error():
                ended.add(message.partition())
            else:
                found.append(message)
        return found
    finally:
        consumer.close()


def rows_of(cluster, topic) -> list[dict]:
    return sorted((json.loads(message.value()) for message in read_back(cluster, topic)), key=lambda row: row["id"])


def table(first: int = 0, rows: int = ROWS) -> pa.Table:
    ids = range(first, first + rows)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "name": [None if number % 7 == 0 else f"näme {number}" for number in ids],
            "amount": [number / 4 for number in ids],
        }
    )


def settings(cluster) -> dict:
    return {"bootstrap.servers": cluster.bootstrap_servers}


def write_arrow(data: pa.Table, path: Path, stream: bool = False) -> None:
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(str(path), data.schema) as writer:
        for batch in data.to_batches(max_chunksize=3000):
            writer.write_batch(batch)


def write_json(data: pa.Table, path: Path) -> None:
    lines = "".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in data.to_pylist())
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())


WRITERS = {
    "parquet": lambda data, path: pq.write_table(data, path, row_group_size=3000),
    "orc": lambda data, path: pa.orc.write_table(data, path, stripe_size=65536, batch_size=1000),
    "arrow": write_arrow,
    "arrows": lambda data, path: write_arrow(data, path, stream=True),
    "csv": lambda data, path: pa.csv.write_csv(data, path),
    "jsonl": write_json,
    "json.gz": write_json,
}


@pytest.mark.parametrize("ending", WRITERS)
def test_every_row_of_every_format_arrives_once(spark, kafka_cluster, topic, tmp_path, ending) -> None:
    kafka_cluster.create_topic(topic, 3)
    data = table()
    for number in range(2):
        WRITERS[ending](data.slice(number * ROWS // 2, ROWS // 2), tmp_path / f"part-{number}.{ending}")
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".part-0.crc").write_bytes(b"no data")
    types = {"id": "int64", "amount": "double"} if ending == "csv" else None
    report = export(
        spark, str(tmp_path), topic, settings(kafka_cluster), value=Plain(), key="id", schema=types, splits=4
    )
    assert (report.records, report.failed, report.files) == (ROWS, 0, 2)
    assert len(report.tasks) == (4 if ending in ("parquet", "orc", "arrow") else 2)
    assert sum(part.records for part in report.topics[topic].values()) == ROWS
    assert all(str(tmp_path) in task.source for task in report.tasks)
    assert rows_of(kafka_cluster, topic) == data.to_pylist()


# ---- columns


@pytest.mark.parametrize("times", ["INT96", "TIMESTAMP_MICROS"])
def test_what_spark_has_written_becomes_the_json_that_spark_writes(
    spark, kafka_cluster, topic, tmp_path, times
) -> None:
    kafka_cluster.create_topic(topic, 3)
    spark.conf.set("spark.sql.parquet.outputTimestampType", times)
    source = str(tmp_path / "data")
    try:
        spark.range(0, 1000, 1, 3).selectExpr(
            "id",
            "cast(id AS decimal(12, 3)) / 7 AS share",
            "timestamp_micros(id * 20000000123456) AS at",
            "if(id % 3 = 0, null, named_struct('t', timestamp_seconds(id), 'x', array(id, null))) AS deep",
            "array(timestamp_seconds(id)) AS times",
            "map('k', timestamp_seconds(id)) AS named",
            "date_add(DATE'2000-02-28', cast(id AS int)) AS day",
            "cast(id AS double) / 3 AS third",
            "cast(id AS float) AS narrow",
            "id % 2 = 0 AS even",
            "encode(concat('ü', id), 'UTF-8') AS raw",
        ).write.partitionBy("even").parquet(source)
    finally:
        spark.conf.unset("spark.sql.parquet.outputTimestampType")
    zone = spark.conf.get("spark.sql.session.timeZone")
    export(spark, source, topic, settings(kafka_cluster), value=Json(timezone=zone))
    theirs = [row.value for row in spark.read.parquet(source).selectExpr("to_json(struct(*)) AS value").collect()]
    ours = [message.value().decode() for message in read_back(kafka_cluster, topic)]
    assert sorted(ours) == sorted(theirs)


def test_folders_give_columns_as_spark_reads_them(spark, kafka_cluster, topic, tmp_path) -> None:
    kafka_cluster.create_topic(topic, 3)
    places = [("day=2026-11-17", "hour=07", 1), ("day=2026-11-18", "hour=__HIVE_DEFAULT_PARTITION__", 2)]
    places += [("day=2026-11-18", "hour=12", 3)]
    for day, hour, number in places:
        folder = tmp_path / "orders" / day / hour
        folder.mkdir(parents=True)
        pq.write_table(table(number * 10, 10), folder / "a.parquet")
    source = str(tmp_path / "orders")
    export(spark, source, topic, settings(kafka_cluster), value=Plain())
    found = rows_of(kafka_cluster, topic)
    theirs = [row.asDict() for row in spark.read.parquet(source).orderBy("id").collect()]
    assert [{**row, "day": str(row["day"])} for row in theirs] == found
    assert {row["hour"] for row in found} == {7, None, 12}
    other = f"{topic}-other"
    kafka_cluster.create_topic(other, 3)
    report = export(
        spark, source, other, settings(kafka_cluster), value=Plain(), where="day = '2026-11-18' AND hour IS NOT NULL"
    )
    assert [row["id"] for row in rows_of(kafka_cluster, other)] == list(range(30, 40))
    assert report.files == 2  # the one with rows, and one for its columns


@pytest.mark.parametrize(
    "where",
    [
        "amount > 10 AND name LIKE 'näme 4%'",
        "NOT (id IN (1, 2, 3)) AND id < 20 OR name IS NULL AND id BETWEEN 100 AND 200",
        "name <> 'näme 5' AND id <= 20",
        "id NOT IN (1, NULL)",
        "NOT name = 'näme 5' AND id < 15",
    ],
)
def test_a_condition_takes_the_rows_that_spark_takes(spark, kafka_cluster, topic, tmp_path, where) -> None:
    kafka_cluster.create_topic(topic, 3)
    pq.write_table(table(rows=5000), tmp_path / "a.parquet", row_group_size=1000)
    report = export(spark, tmp_path, topic, settings(kafka_cluster), where=where)
    expected = [row.id for row in spark.read.parquet(str(tmp_path)).where(where).orderBy("id").collect()]
    assert [row["id"] for row in rows_of(kafka_cluster, topic)] == expected
    assert report.records == len(expected)


def test_an_arrow_expression_chosen_columns_and_what_becomes_of_them(spark, kafka_cluster, topic, tmp_path) -> None:
    import pyarrow.compute as pc

    kafka_cluster.create_topic(topic, 3)
    when = datetime.datetime(2026, 11, 17, 10, tzinfo=datetime.UTC)
    data = table(rows=100).append_column("at", pa.array([when] * 100)).append_column("price", [[Decimal("1.50")] * 100])
    pq.write_table(data, tmp_path / "a.parquet")
    report = export(
        spark,
        [str(tmp_path / "a.parquet")],
        topic,
        settings(kafka_cluster),
        value=Plain(),
        key="price",
        headers=["id", "name"],
        timestamp="at",
        columns=["amount"],
        where=pc.field("id") == 7,
    )
    (message,) = read_back(kafka_cluster, topic)
    assert report.records == 1
    assert json.loads(message.value()) == {"amount": 1.75}
    assert message.key() == b"1.50"
    assert message.headers() == [("id", b"7"), ("name", None)]
    assert message.timestamp()[1] == int(when.timestamp() * 1000)


def test_encoders_are_read_no_more_columns_than_they_want() -> None:
    from fastprod.spark._shape import Shape

    schema = table(rows=1).append_column("more", [[1]]).schema

    def needed(value, key=None, columns=None) -> list[str]:
        return Shape.of(value, key, None, None, columns).needed(schema)

    assert needed(Json()) == ["id", "name", "amount", "more"]
    assert needed(Json(columns=["amount", "id"])) == ["id", "amount"]
    assert needed(Json(), key="more", columns=["id"]) == ["id", "more"]
    assert needed(Json(), key=Json(columns=["more"]), columns=["id"]) == ["id", "more"]
    assert needed(Json(), key=Json(), columns=["id"]) == ["id", "name", "amount", "more"]
    assert needed("id", key=Json(columns=["more"])) == ["id", "more"]


def test_a_column_of_bytes_is_the_value_as_it_is(spark, kafka_cluster, topic, tmp_path) -> None:
    kafka_cluster.create_topic(topic, 3)
    values = [os.urandom(2000) for _ in range(500)]
    pq.write_table(pa.table({"body": values, "other": range(500)}), tmp_path / "a.parquet", row_group_size=100)
    export(spark, tmp_path / "*.parquet", topic, settings(kafka_cluster), value="body", splits=2)
    assert sorted(message.value() for message in read_back(kafka_cluster, topic)) == sorted(values)


def test_keys_lie_where_java_puts_them(spark, kafka_cluster, topic, tmp_path) -> None:
    from reference import java_partition

    placed = java_partition(7)

    kafka_cluster.create_topic(topic, 7)
    pq.write_table(table(rows=2000), tmp_path / "a.parquet")
    export(spark, tmp_path, topic, settings(kafka_cluster), value=Plain(), key="id")
    found = read_back(kafka_cluster, topic)
    assert len(found) == 2000
    assert all(message.partition() == placed(message.key()) for message in found)


def test_types_of_json_lines_come_from_all_rows(spark, kafka_cluster, topic, tmp_path) -> None:
    kafka_cluster.create_topic(topic, 3)
    first = [{"id": 0, "a": 1, "at": "2026-11-17 10:00:00"}, {"id": 1, "a": 2.5, "deep": {"x": [1]}}]
    second = [{"id": 2, "new": True, "deep": {"y": "z"}}]
    for name, lines in (("a", first), ("b", second)):
        (tmp_path / f"{name}.json").write_text("".join(json.dumps(line) + "\n" for line in lines))
    export(spark, tmp_path, topic, settings(kafka_cluster), value=Plain())
    assert rows_of(kafka_cluster, topic) == [
        {"id": 0, "a": 1.0, "at": "2026-11-17 10:00:00", "deep": None, "new": None},
        {"id": 1, "a": 2.5, "at": None, "deep": {"x": [1], "y": None}, "new": None},
        {"id": 2, "a": None, "at": None, "deep": {"x": None, "y": "z"}, "new": True},
    ]


def test_csv_is_text_as_in_spark_unless_a_schema_says_otherwise(spark, kafka_cluster, topic, tmp_path) -> None:
    kafka_cluster.create_topic(topic, 3)
    (tmp_path / "a.csv").write_text('id;code;note\n1;007;"two\nlines"\n2;;""\n')
    export(
        spark,
        tmp_path,
        topic,
        settings(kafka_cluster),
        value=Plain(),
        csv={"delimiter": ";"},
        schema={"id": "int32"},
    )
    assert rows_of(kafka_cluster, topic) == [
        {"id": 1, "code": "007", "note": "two\nlines"},
        {"id": 2, "code": None, "note": ""},
    ]


# ---- refused before anything is sent


def refused(spark, cluster, topic, source, match, **options) -> None:
    cluster.create_topic(topic, 1)
    with pytest.raises((ValueError, TypeError), match=match):
        export(spark, source, topic, settings(cluster), **{"value": Plain(), **options})
    assert read_back(cluster, topic) == []


def test_a_file_with_other_columns_is_named_with_the_difference(spark, kafka_cluster, topic, tmp_path) -> None:
    good = table(rows=10)
    pq.write_table(good, tmp_path / "a.parquet")
    pq.write_table(good.select(["amount", "name", "id"]), tmp_path / "b.parquet")  # another order is no difference
    pq.write_table(good.set_column(0, "id", good["id"].cast(pa.int32())), tmp_path / "c.parquet")
    refused(spark, kafka_cluster, topic, tmp_path, r"c\.parquet: column 'id' is int32, but int64 in .*a\.parquet")
    pq.write_table(good.drop_columns(["name"]), tmp_path / "c.parquet")
    refused(spark, kafka_cluster, f"{topic}-2", tmp_path, r"c\.parquet has no column 'name', which .*a\.parquet")
    pq.write_table(good.append_column("more", good["id"]), tmp_path / "c.parquet")
    refused(spark, kafka_cluster, f"{topic}-3", tmp_path, r"c\.parquet has a column 'more', which .*a\.parquet")


@pytest.mark.parametrize("ending", ["parquet", "orc", "arrow", "arrows", "json.gz"])
def test_a_file_that_was_cut_off_is_named(spark, kafka_cluster, topic, tmp_path, ending) -> None:
    for name in ("a", "b"):
        WRITERS[ending](table(rows=5000), tmp_path / f"{name}.{ending}")
    whole = (tmp_path / f"b.{ending}").read_bytes()
    (tmp_path / f"b.{ending}").write_bytes(whole[: len(whole) // 2])
    refused(spark, kafka_cluster, topic, tmp_path, rf"b\.{ending} cannot be read as")


def test_what_is_not_there_or_has_no_rows_to_it(spark, kafka_cluster, topic, tmp_path) -> None:
    numbers = iter(range(100))

    def told(source, match, **options) -> None:
        refused(spark, kafka_cluster, f"{topic}-{next(numbers)}", source, match, **options)

    told(tmp_path / "none", r"none does not exist")
    told(tmp_path / "*.parquet", r"parquet matches nothing")
    told(tmp_path, r"holds no files with data")
    told([], r"names no files")
    (tmp_path / "_SUCCESS").touch()
    told(tmp_path, r"holds no files with data")
    (tmp_path / "a.parquet").touch()
    told(tmp_path, r"a\.parquet is empty \(0 bytes\)")
    pq.write_table(table(rows=10), tmp_path / "a.parquet")
    told([tmp_path, tmp_path / "a.parquet"], r"a\.parquet is named twice")
    told(tmp_path, r"there is no column 'nothing'", where="nothing = 1")
    told(tmp_path, r"columns names 'nothing', but the columns are id, name, amount", columns=["nothing"])
    told(tmp_path, r"key names 'amount', which is double", key="amount")
    told("gopher://host/x.parquet", r"gopher")
    (tmp_path / "_delta_log").mkdir()
    told(tmp_path, r"is a Delta table: only its log says which of the files count")
    (tmp_path / "_delta_log").rmdir()
    (tmp_path / "notes.txt").write_text("not meant")
    told(tmp_path, r"cannot tell the format of .*notes\.txt")


def test_dead_brokers_are_told_before_files_are_looked_at(spark, tmp_path) -> None:
    with pytest.raises(CheckError, match="no broker at localhost:1 answered"):
        export(spark, tmp_path / "none", "orders", {"bootstrap.servers": "localhost:1"}, value="value")


# ---- in the middle


def test_a_row_that_cannot_be_written_is_named_with_its_place(spark, kafka_cluster, topic, tmp_path) -> None:
    kafka_cluster.create_topic(topic, 1)
    pq.write_table(table(rows=5000), tmp_path / "a.parquet", row_group_size=1000)
    with pytest.raises(Exception, match=r"a\.parquet, row group 3, row 456: value 3456 is not wanted") as caught:
        export(spark, tmp_path, topic, settings(kafka_cluster), value=Picky(3456), where="id <> 3400", splits=1)
    assert "Nothing of these rows was sent" in str(caught.value)


class Picky(Plain):
    """Refuses a row."""

    def __init__(self, victim: int) -> None:
        self.victim = victim

    def encode_column(self, batch, name="value", base=0):
        column = super().encode_column(batch, name, base)
        ids = batch.column("id").to_pylist()
        if self.victim in ids:
            column.bad[ids.index(self.victim)] = ValueError(f"{self.victim} is not wanted")
        return column


def test_a_file_that_changes_meanwhile_fails_the_task(tmp_path) -> None:
    from fastprod.spark import ExportError, _export, _files
    from fastprod.spark._reading import Reader

    pq.write_table(table(rows=10), tmp_path / "a.parquet")
    listing = _files.listed(tmp_path)
    survey = _export.surveyed(listing, _files.TextOptions(), None, {})
    (split,) = _files.divided(listing.files, survey.contents, 1e9)
    reader = Reader(listing.systems, survey.schema, survey.folders, ("id",))
    assert [rows.batch.num_rows for rows in reader.read(split)] == [10]
    reading = reader.read(split)
    next(reading)
    pq.write_table(table(rows=11), tmp_path / "a.parquet")
    with pytest.raises(ExportError, match=r"a\.parquet has changed since the export began"):
        list(reading)
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(ExportError, match=r"a\.parquet was there when the export began, and is gone"):
        list(reader.read(split))


def test_more_or_fewer_rows_than_a_file_says_fail_the_task(tmp_path) -> None:
    from dataclasses import replace

    from fastprod.spark import ExportError, _export, _files
    from fastprod.spark._reading import Reader

    pq.write_table(table(rows=10), tmp_path / "a.parquet")
    listing = _files.listed(tmp_path)
    survey = _export.surveyed(listing, _files.TextOptions(), None, {})
    (split,) = _files.divided(listing.files, survey.contents, 1e9)
    reader = Reader(listing.systems, survey.schema, survey.folders, ("id",))
    with pytest.raises(ExportError, match=r"a\.parquet, row group 0 has 11 rows, but 10 came"):
        list(reader.read((replace(split[0], rows=(11,)),)))


def test_splits_hold_each_part_once_and_about_as_many_bytes(tmp_path) -> None:
    from fastprod.spark import _export, _files

    for number, rows in enumerate([50_000, 10, 20, 3000, 8000, 1]):
        pq.write_table(table(rows=rows), tmp_path / f"{number}.parquet", row_group_size=1000)
    listing = _files.listed(tmp_path)
    survey = _export.surveyed(listing, _files.TextOptions(), None, {})
    total = sum(sum(known.weights) for known in survey.contents.values())
    for count in (1, 2, 5, 13):
        splits = _files.divided(listing.files, survey.contents, total / count)
        parts = [
            (piece.file.name, piece.first + n) for split in splits for piece in split for n in range(len(piece.rows))
        ]
        assert parts == [
            (file.name, n) for file in listing.files for n in range(len(survey.contents[file.name].weights))
        ]
        assert len(splits) == count
        sizes = [
            sum(sum(survey.contents[p.file.name].weights[p.first : p.first + len(p.rows)]) for p in split)
            for split in splits
        ]
        largest = max(max(known.weights) for known in survey.contents.values())
        assert max(sizes) - min(sizes) <= 2 * largest


def test_a_large_file_is_never_in_memory_as_a_whole(tmp_path) -> None:
    from fastprod.spark import _export, _files
    from fastprod.spark._reading import Reader

    body = [os.urandom(500).hex() for _ in range(2000)]  # 2 MB that do not compress to less than half
    writer = None
    for number in range(25):
        data = pa.table({"number": [number] * 2000, "body": body})
        writer = writer or pq.ParquetWriter(tmp_path / "a.parquet", data.schema, use_dictionary=False)
        writer.write_table(data)
    writer.close()
    listing = _files.listed(tmp_path)
    survey = _export.surveyed(listing, _files.TextOptions(), None, {})
    (split,) = _files.divided(listing.files, survey.contents, 1e9)
    reader = Reader(listing.systems, survey.schema, survey.folders, ("number", "body"))
    before = pa.total_allocated_bytes()
    most = rows = 0
    for part in reader.read(split):
        rows += part.batch.num_rows
        most = max(most, pa.total_allocated_bytes() - before)
    assert rows == 50_000
    assert most < 16 << 20  # of 50 MB


class Elsewhere:
    """As much of an fsspec file system as listing and reading need; etags tell what changes."""

    protocol = "elsewhere"
    tag = "first"

    def __init__(self, root: str) -> None:
        self.root = root

    def _told(self, path: str) -> dict:
        kind = "directory" if os.path.isdir(path) else "file"
        size = os.path.getsize(path)
        return {"name": path, "size": size, "type": kind, "ETag": f'"{self.tag}-{size}"'}

    def info(self, path: str, **_) -> dict:
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        return self._told(path)

    def isdir(self, path: str) -> bool:
        return os.path.isdir(path)

    def isfile(self, path: str) -> bool:
        return os.path.isfile(path)

    def find(self, path: str, maxdepth=None, withdirs=False, detail=False, **_) -> dict:
        return {str(found): self._told(str(found)) for found in Path(path).rglob("*") if withdirs or found.is_file()}

    def open(self, path: str, mode="rb", **_):
        return open(path, mode)


def test_a_file_system_of_fsspec_and_its_etags(monkeypatch, tmp_path) -> None:
    import sys
    from types import SimpleNamespace

    from fastprod.spark import ExportError, _export, _files
    from fastprod.spark._reading import Reader

    fsspec = SimpleNamespace(core=SimpleNamespace(url_to_fs=lambda uri: (Elsewhere("/"), uri.partition("://")[2])))
    fsspec.AbstractFileSystem = Elsewhere
    monkeypatch.setitem(sys.modules, "fsspec", fsspec)
    pq.write_table(table(rows=10), tmp_path / "a.parquet")
    listing = _files.listed(f"elsewhere://{tmp_path}")
    assert [file.name for file in listing.files] == [f"elsewhere://{tmp_path}/a.parquet"]
    assert listing.files[0].stamp == f"first-{listing.files[0].size}"
    survey = _export.surveyed(listing, _files.TextOptions(), None, {})
    (split,) = _files.divided(listing.files, survey.contents, 1e9)
    reader = Reader(listing.systems, survey.schema, survey.folders, ("id",))
    assert [rows.batch.num_rows for rows in reader.read(split)] == [10]
    monkeypatch.setattr(Elsewhere, "tag", "second")
    with pytest.raises(ExportError, match=r"has changed since the export began: .* etag first-.* etag second-"):
        list(reader.read(split))


def test_times_of_stores_that_tell_seconds_in_one_answer_and_more_in_another() -> None:
    from fastprod.spark._files import same_stamp

    whole, exact, later = "1794956238000000000", "1794956238123000000", "1794956239000000000"
    assert same_stamp(whole, whole)
    assert same_stamp(whole, exact)
    assert same_stamp(exact, whole)
    assert not same_stamp(exact, "1794956238123000001")
    assert not same_stamp(exact, later)
    assert not same_stamp("etag-1", "etag-2")
