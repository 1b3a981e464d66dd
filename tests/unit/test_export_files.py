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
