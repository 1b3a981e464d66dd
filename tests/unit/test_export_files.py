"""What `export` reads of files, and which it refuses: the steps of driver and task, without Spark and Kafka."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")

import pyarrow.compute as pc  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from pyarrow import csv  # noqa: E402
from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem, SubTreeFileSystem  # noqa: E402

from fastprod.encoding import Json  # noqa: E402
from fastprod.spark import _export, _files, _once, _reading  # noqa: E402
from fastprod.spark._files import SourceError, TextOptions  # noqa: E402
from fastprod.spark._plan import JOB_ID  # noqa: E402
from fastprod.spark._shape import Shape  # noqa: E402
from fastprod.spark._sink import ExportError, Sink  # noqa: E402


def rows(source: Any, where: Any = None, text: TextOptions | None = None, **more: Any) -> list[dict[str, Any]]:
    """What an export of these files would encode."""
    text = text or TextOptions()
    survey = _export.surveyed(_files.listed(source, **more), text, where, {})
    shape = Shape.of(Json(), None, None, None, None).resolved(survey.schema)
    reader = _export._reader(survey, shape, text)
    return [
        row
        for split in _export._divided(survey, 1 << 20)
        for one in reader.read(split)
        for row in one.batch.to_pylist()
    ]


@pytest.mark.parametrize("form", ["plain", "nested"])
@pytest.mark.parametrize("condition", ["text", "not equal", "is nan", "not in"])
def test_row_groups_with_nan_are_read_whatever_their_statistics_say(tmp_path: Path, form: str, condition: str) -> None:
    numbers = pa.array([1.0, 1.0, math.nan])  # statistics leave NaN out: least and greatest are both 1
    table = pa.table({"x": numbers if form == "plain" else pa.StructArray.from_arrays([numbers], names=["y"])})
    pq.write_table(table, tmp_path / "a.parquet")
    x: Any = pc.field("x") if form == "plain" else pc.field("x", "y")
    name = "x" if form == "plain" else "x.y"
    where = {
        "text": f"NOT ({name} < 5)",
        "not equal": x != 1.0,
        "is nan": pc.is_nan(x),
        "not in": ~x.isin([1.0]),
    }[condition]
    assert len(rows(tmp_path, where)) == 1


def how(source: Any, where: Any = None, form: str | None = None, text: TextOptions | None = None) -> dict[str, str]:
    """What the marker of an exactly-once job says about becoming of rows."""
    order = _export.Order(source, Shape.of(Json(), None, None, None, None), form, None, text or TextOptions(), where)
    survey = _export.surveyed(_files.listed(source, form), order.text, where, {})
    shape = order.shape.resolved(survey.schema)
    return _export.described(order, survey, shape, _export._reader(survey, shape, order.text))


def test_a_condition_with_many_values_is_told_from_one_with_others(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": list(range(100))}), tmp_path / "a.parquet")
    some, others = list(range(40)), [*range(15), 90, *range(16, 40)]
    a: Any = pc.field("a")
    assert str(a.isin(some)) == str(a.isin(others))  # Arrow shows the first and the last ten
    assert how(tmp_path, a.isin(some)) == how(tmp_path, a.isin(list(some)))
    assert how(tmp_path, a.isin(some))["where"] != how(tmp_path, a.isin(others))["where"]
    assert how(tmp_path, "a < 7") == how(tmp_path, " a < 7\n")
    assert how(tmp_path, "a < 7")["where"] != how(tmp_path, "a < 8")["where"]


def test_options_of_csv_are_the_same_in_every_process(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a\n1\n")
    copy = pickle.loads(pickle.dumps(csv.ISO8601))
    parsers, copied, others = (
        TextOptions({"timestamp_parsers": given, "null_values": ["", "-"]})
        for given in ([csv.ISO8601, "%d.%m.%Y"], [copy, "%d.%m.%Y"], ["%d.%m.%Y", csv.ISO8601])
    )
    assert how(tmp_path, text=parsers) == how(tmp_path, text=copied)
    assert how(tmp_path, text=parsers)["schema"] != how(tmp_path, text=others)["schema"]
    skips = TextOptions({"invalid_row_handler": lambda row: "skip"})
    with pytest.raises(TypeError, match=r"csv has <function .*, which .* exactly_once .* Nothing was sent"):
        how(tmp_path, text=skips)


class Own:
    """An encoder with a state."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)

    def check(self, schema: Any) -> None: ...

    def encode_column(self, batch: Any, name: str = "value", base: int = 0) -> Any: ...


def test_encoders_whose_state_is_another_in_every_process_are_refused() -> None:
    def identity(**state: Any) -> dict[str, str]:
        return Shape.of("v", Own(**state), None, None, None).identity()

    assert identity(names={"b", "a"}, how=Json(), text="at 0x1, or at 0x2") == identity(
        names={"a", "b"}, how=Json(), text="at 0x1, or at 0x2"
    )
    assert identity(names=["a"]) != identity(names=["b"])
    for state in ({"made": lambda row: row}, {"deep": [{"o": object()}]}):
        with pytest.raises(TypeError, match=r"key has <.* at 0x.*>, which .* exactly_once .* __repr__"):
            identity(**state)


def test_a_folder_that_changes_the_type_of_a_column_is_told_though_where_leaves_it_out(tmp_path: Path) -> None:
    for day in ("1", "2"):
        (tmp_path / f"day={day}").mkdir()
        pq.write_table(pa.table({"a": [1]}), tmp_path / f"day={day}" / "a.parquet")
    before = how(tmp_path, "a = 1")
    (tmp_path / "day=x").mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "day=x" / "a.parquet")
    assert before["types"] != how(tmp_path, "a = 1")["types"]


def test_another_format_of_the_same_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('{"a":1}\n{"a":2}\n')
    assert how(tmp_path, form="json")["format"] != how(tmp_path, form="csv")["format"]
    (tmp_path / "a.txt").rename(tmp_path / "a.json")
    before = how(tmp_path)
    assert before == how(tmp_path, form="json")
    (tmp_path / "b.json").write_text('{"a":3}\n')
    assert before == how(tmp_path)  # a new file is told as such, by its name


@pytest.mark.parametrize("where", [pc.field(1) > 15, pc.field(("s", 0)) > 1], ids=["column", "field"])
def test_a_condition_that_names_columns_by_number_is_refused(tmp_path: Path, where: Any) -> None:
    s = pa.StructArray.from_arrays([pa.array([1, 2])], names=["x"])
    pq.write_table(pa.table({"a": [1, 2], "b": [10, 20], "s": s}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"by number.*pc\.field\('amount'\)"):
        rows(tmp_path, where)
    text = pa.table({"a": ["FieldPath(1)", "b"]})
    pq.write_table(text, tmp_path / "a.parquet")
    assert len(rows(tmp_path, pc.field("a") == "FieldPath(1)")) == 1


def test_links_that_lead_nowhere_are_refused_not_left_out(tmp_path: Path) -> None:
    tmp_path = tmp_path / "top" / "f"
    tmp_path.mkdir(parents=True)
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    link = tmp_path / "b.parquet"
    link.symlink_to("/nowhere/b.parquet")
    for source in (tmp_path, tmp_path.parent / "*", tmp_path / "*.parquet"):
        with pytest.raises(SourceError, match=r"b\.parquet is neither a file nor a folder"):
            rows(source)
    link.rename(tmp_path / "day=2")
    for source in (tmp_path, tmp_path / "day*" / "*.parquet"):
        with pytest.raises(SourceError, match=r"day=2 is neither a file nor a folder"):
            rows(source)
    assert len(rows(tmp_path / "*.parquet")) == 1  # it does not match
    (tmp_path / "day=2").rename(tmp_path / "_day")
    assert len(rows(tmp_path)) == 1
    os.mkfifo(tmp_path / "c.parquet")
    with pytest.raises(SourceError, match=r"c\.parquet is neither a file nor a folder"):
        rows(tmp_path)


def test_a_link_below_a_hidden_folder_does_not_matter(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    (tmp_path / "_temporary" / "0").mkdir(parents=True)
    (tmp_path / "_temporary" / "0" / "b.parquet").symlink_to("/nowhere")
    assert len(rows(tmp_path)) == 1
    assert len(rows(tmp_path / "*")) == 1


@pytest.mark.parametrize("way", ["link", "loop", "folder", "dots", "slashes", "relative"])
def test_a_file_under_two_names_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    pq.write_table(pa.table({"a": [1]}), folder / "a.parquet")
    monkeypatch.chdir(tmp_path)
    source: Any = folder
    given: dict[str, Any] = {}
    if way == "link":
        (folder / "b.parquet").symlink_to("a.parquet")
    elif way == "loop":
        (folder / "loop").symlink_to(".")
    elif way == "folder":
        (tmp_path / "g").symlink_to("f")
        source = [folder, tmp_path / "g"]
    else:
        given["system"] = LocalFileSystem()
        other = {"dots": f"{folder}/../f", "slashes": f"{tmp_path}//f", "relative": "f"}[way]
        source = [str(folder), other]
    with pytest.raises(SourceError, match=r"is named twice|a link that leads nowhere"):  # a loop ends in one
        rows(source, **given)


def test_a_file_of_another_file_system_under_two_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "f" / "a.parquet")
    with pytest.raises(SourceError, match="is named twice"):
        rows(["f", "./f"], system=SubTreeFileSystem(str(tmp_path), LocalFileSystem()))
    assert _files._one_name("s3a://", "bucket/a//b") == _files._one_name("s3://", "bucket/a/b")


@pytest.mark.parametrize("folder", ["", "day=1"])
def test_rows_without_columns_are_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / folder / "a.json").write_text("{}\n{}\n")
    with pytest.raises(SourceError, match=r"a\.json has no columns"):
        rows(tmp_path)
    (tmp_path / folder / "b.json").write_text('{"b": 1}\n')
    assert [row["b"] for row in rows(tmp_path)] == [None, None, 1]


NULLS = {
    "first": b"null\n" + b'{"a": 1}\n',
    "behind a mark and blanks": b'\xef\xbb\xbf\n \n null\n{"a": 1}\n',
    "only": b"null",
    "later": b'{"a": 1}\n' * 500_000 + b"null\n" * 10,
    "behind blanks": b'{"a": 1}\n' + b" " * 5_000_000 + b"null",
}


@pytest.mark.parametrize("given", [False, True], ids=["learnt", "given"])
@pytest.mark.parametrize("where", NULLS)
def test_a_line_of_json_that_is_null_is_refused(tmp_path: Path, where: str, given: bool) -> None:
    """Arrow dies of some of them."""
    (tmp_path / "a.json").write_bytes(NULLS[where])
    text = TextOptions(schema=pa.schema({"a": pa.int64()}) if given else None)
    with pytest.raises((SourceError, ExportError), match=r"a\.json.* line .*null"):
        rows(tmp_path, text=text)


@pytest.mark.parametrize("given", [False, True], ids=["learnt", "given"])
def test_the_first_line_of_json_is_an_object_or_the_driver_refuses_the_file(tmp_path: Path, given: bool) -> None:
    text = TextOptions(schema=pa.schema({"a": pa.int64()}) if given else None)
    for begin in (b"null\n", b"[1]\n", b" 5\n"):
        (tmp_path / "a.json").write_bytes(begin + b'{"a": 1}\n')
        with pytest.raises(SourceError, match=r"a\.json"):
            rows(tmp_path, text=text)
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf\n \r\n{"a": 1}\n\n{"a": null}\n')
    assert rows(tmp_path, text=text) == [{"a": 1}, {"a": None}]


def test_a_local_file_has_its_time_to_the_nanosecond(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [1]}), file)
    os.utime(file, ns=(0, 1_794_956_238_000_000_000))
    text = TextOptions()
    survey = _export.surveyed(_files.listed(file), text, None, {})
    reader = _export._reader(survey, Shape.of(Json(), None, None, None, None).resolved(survey.schema), text)
    os.utime(file, ns=(0, 1_794_956_238_000_000_001))
    with pytest.raises(ExportError, match="has changed"):
        [*reader.read(_export._divided(survey, 1)[0])]
    now = _files.listed(file)
    before = [(one.name, one.size, one.stamp) for one in survey.listing.files]
    sink: Any = SimpleNamespace(job="x")
    with pytest.raises(SourceError, match="has changed"):
        _export._check_files(sink, now, before)
    _export._check_files(sink, survey.listing, before)


def test_no_job_has_the_groups_of_another() -> None:
    one, other = (Sink({}, "t", job) for job in ("orders", "orders.files"))
    assert _once._note(one, 0) not in (_once.Once(other, 0).name, _once._note(other, 0), "fastprod.orders.files.job")
    assert not JOB_ID.fullmatch(_once._note(one, 0))


def a_table(folder: Path, log: str) -> Path:
    """A table of some kind, partitioned by day; the path of a file."""
    (folder / "day=1").mkdir(parents=True)
    file = folder / "day=1" / "a.parquet"
    pq.write_table(pa.table({"a": [1]}), file)
    (folder.parent if log.startswith("../") else folder).joinpath(Path(log).parent.name).mkdir()
    (folder / log).write_text("{}")
    return file


@pytest.mark.parametrize(
    ("log", "kind"),
    [
        ("_delta_log/0.json", "a Delta table"),
        (".hoodie/hoodie.properties", "a Hudi table"),
        ("_spark_metadata/0", "what a stream of Spark has written"),
        ("../metadata/v1.metadata.json", "an Iceberg table"),
    ],
)
@pytest.mark.parametrize("elsewhere", [False, True], ids=["local", "elsewhere"])
def test_a_part_of_a_table_is_refused_as_all_of_it_is(tmp_path: Path, log: str, kind: str, elsewhere: bool) -> None:
    file = a_table(tmp_path / "lake" / "t" / "data", log)
    table = file.parent.parent
    given: dict[str, Any] = {"system": SubTreeFileSystem(str(tmp_path), LocalFileSystem())} if elsewhere else {}
    top = "" if elsewhere else f"{tmp_path}/"
    inside = f"{top}{table.relative_to(tmp_path)}"
    for source in (
        f"{inside}/day=1",
        f"{inside}/*",
        f"{inside}/day=*",
        f"{inside}/day=1/*.parquet",
        f"{top}lake/t/*/*",
    ):
        with pytest.raises(SourceError, match=kind):
            rows(source, **given)
    assert len(rows(f"{inside}/day=1/a.parquet", **given)) == 1  # who names files knows which count


def test_a_folder_beside_a_table_is_none(tmp_path: Path) -> None:
    a_table(tmp_path / "t" / "u", "_delta_log/0.json")
    (tmp_path / "t" / "metadata").mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "t" / "metadata" / "a.parquet")
    (tmp_path / "t" / "_delta_logs").mkdir()
    assert len(rows(tmp_path / "t" / "metadata")) == 1


@pytest.mark.parametrize("content", ['a,b\n1,"x\n2,y\n3,z\n', 'a,b\n1,"x\n2,"y"\n3,z\n', 'a,b\n1,x\n2,"y'])
@pytest.mark.parametrize("size", [0, 9_000_000], ids=["small", "large"])
def test_csv_with_a_quote_that_nobody_closes_is_refused(tmp_path: Path, content: str, size: int) -> None:
    head, rest = content.split("\n", 1)
    (tmp_path / "a.csv").write_text(head + "\n" + "0,w\n" * (size // 4) + rest)
    with pytest.raises((SourceError, ExportError), match=r"a\.csv.*quote"):
        rows(tmp_path)


def test_quotes_that_are_closed_escaped_or_no_quotes_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('a,b\n1,"x ""y""\nz"\n2,\n')
    assert rows(file) == [{"a": "1", "b": 'x "y"\nz'}, {"a": "2", "b": None}]
    file.write_text('a,b\n1,"5\\" wide, or so"\n')
    assert rows(file, text=TextOptions({"escape_char": "\\"})) == [{"a": "1", "b": '5" wide, or so'}]
    file.write_text('a,b\n1,5" wide\n')
    assert rows(file, text=TextOptions({"quote_char": False})) == [{"a": "1", "b": '5" wide'}]
    file.write_text("a,b\n1,'x\n")
    with pytest.raises(SourceError, match="quote"):
        rows(file, text=TextOptions({"quote_char": "'"}))


@pytest.mark.parametrize("end", ["\r\n", "\n"], ids=["CRLF", "LF"])
@pytest.mark.parametrize("options", [{}, {"escape_char": "\\"}, {"encoding": "utf-16-le"}], ids=str)
def test_line_ends_within_a_value_of_csv_stay_wherever_a_block_ends(
    tmp_path: Path, end: str, options: dict[str, str]
) -> None:
    """pyarrow's reader drops a line feed that begins a block, if the block before ended with a carriage return."""
    value = f"x{end}{end}y\r\r\n\n"
    encoding = options.get("encoding", "utf-8")
    for size in (*range(40, 65), *range(100, 128)):
        content = end.join(["a,b", f'"{"0" * size}","{value}"', f'1,"{end}"', ""])
        (tmp_path / "a.csv").write_bytes(content.encode(encoding))
        found = rows(tmp_path, text=TextOptions({"block_size": 128, **options}))
        assert found == [{"a": "0" * size, "b": value}, {"a": "1", "b": end}], f"after {size} bytes"


def test_line_ends_within_a_value_stay_at_the_end_of_a_block_of_usual_size(tmp_path: Path) -> None:
    head = 'a\n"'
    for missing in range(3):
        value = "x" * (_reading.BLOCK - len(head) - missing) + "\r\ny"
        (tmp_path / "a.csv").write_bytes(f'a\n"{value}"\n"z"\n'.encode())
        assert [row["a"] for row in rows(tmp_path)] == [value, "z"]


def test_a_quote_that_nobody_closes_is_refused_in_other_encodings_too(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes('a,b\n1,"x\n2,y\n'.encode("utf-16-le"))
    with pytest.raises((SourceError, ExportError), match=r"a\.csv.*quote"):
        rows(tmp_path, text=TextOptions({"encoding": "utf-16-le"}))


class Remembering:
    """As far as Arrow asks it, a file system of fsspec that remembers its listings, as that of S3 does."""

    protocol = "remembering"

    def __init__(self) -> None:
        self._known: dict[str, dict[str, dict[str, Any]]] = {}

    def invalidate_cache(self, path: str | None = None) -> None:
        self._known.clear()

    def find(self, path: str, **_: Any) -> dict[str, dict[str, Any]]:
        if path not in self._known:
            self._known[path] = {str(one): self._told(one) for one in sorted(Path(path).iterdir())}
        return self._known[path]

    def info(self, path: str) -> dict[str, Any]:
        known = self._known.get(os.path.dirname(path), {})
        return known[path] if path in known else self._told(Path(path))

    def _told(self, path: Path) -> dict[str, Any]:
        if path.is_dir():
            return {"name": str(path), "type": "directory", "size": 0}
        content = path.read_bytes()
        return {"name": str(path), "type": "file", "size": len(content), "ETag": str(hash(content))}

    def exists(self, path: str) -> bool:
        return os.path.exists(path)

    isdir = staticmethod(os.path.isdir)
    isfile = staticmethod(os.path.isfile)

    def open(self, path: str, mode: str) -> Any:
        return open(path, mode)


@pytest.mark.parametrize("form", ["plain", "subtree"])
def test_files_that_are_new_or_others_are_seen_though_fsspec_remembers_its_listings(tmp_path: Path, form: str) -> None:
    """Its file systems live as long as their process: a driver, or a worker that Spark uses again."""
    system: Any = PyFileSystem(FSSpecHandler(Remembering()))
    source: Any = str(tmp_path)
    if form == "subtree":
        system, source = SubTreeFileSystem(str(tmp_path.parent), system), tmp_path.name
    names = lambda: [Path(file.path).name for file in _files.listed(source, system=system).files]  # noqa: E731
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    assert names() == ["a.parquet"]
    pq.write_table(pa.table({"a": [2]}), tmp_path / "b.parquet")
    assert names() == ["a.parquet", "b.parquet"]
    assert names() == ["a.parquet", "b.parquet"]


def test_a_file_that_changes_is_seen_by_its_task_though_fsspec_remembers_its_listing(tmp_path: Path) -> None:
    system: Any = PyFileSystem(FSSpecHandler(Remembering()))
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    listing = _files.listed(str(tmp_path), system=system)
    schema = pa.schema([("a", pa.int64())])
    reader = _reading.Reader(listing.systems, schema, pa.schema([]), ("a",))
    reader._check(listing.files[0])
    pq.write_table(pa.table({"a": [2]}), tmp_path / "a.parquet")
    with pytest.raises(ExportError, match=r"a\.parquet has changed since the export began"):
        reader._check(listing.files[0])
