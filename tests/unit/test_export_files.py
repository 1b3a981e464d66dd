"""What `export` reads of files, and which it refuses: the steps of driver and task, without Spark and Kafka."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")

import pyarrow.compute as pc  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from fastprod.encoding import Json  # noqa: E402
from fastprod.spark import _export, _files  # noqa: E402
from fastprod.spark._files import SourceError, TextOptions  # noqa: E402
from fastprod.spark._shape import Shape  # noqa: E402


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
    assert how(tmp_path)["format"] == how(tmp_path, form="json")["format"]


@pytest.mark.parametrize("where", [pc.field(1) > 15, pc.field(("s", 0)) > 1], ids=["column", "field"])
def test_a_condition_that_names_columns_by_number_is_refused(tmp_path: Path, where: Any) -> None:
    s = pa.StructArray.from_arrays([pa.array([1, 2])], names=["x"])
    pq.write_table(pa.table({"a": [1, 2], "b": [10, 20], "s": s}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"by number.*pc\.field\('amount'\)"):
        rows(tmp_path, where)
    text = pa.table({"a": ["FieldPath(1)", "b"]})
    pq.write_table(text, tmp_path / "a.parquet")
    assert len(rows(tmp_path, pc.field("a") == "FieldPath(1)")) == 1
