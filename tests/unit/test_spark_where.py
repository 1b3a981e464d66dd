"""Conditions as text: what they take, and what is said about those that are wrong."""

import datetime
from decimal import Decimal

import pyarrow as pa
import pytest

from fastprod.spark._where import parsed

ROWS = pa.table(
    {
        "a": [1, 2, None],
        "country": ["DE", "FR", None],
        "day": [datetime.date(2026, 11, 17), datetime.date(2026, 11, 18), None],
        "at": pa.array([0, 1_000_000, None], pa.timestamp("us", "UTC")),
        "naive": pa.array([0, 1_000_000, None], pa.timestamp("us")),
        "price": [Decimal("1.10"), Decimal("2.00"), None],
        "deep": [{"x": 1}, {"x": None}, None],
        "share": [1.5, -2.5, None],
        "new": [True, False, None],
        "kind": pa.array(["x", "y", None]).dictionary_encode(),
        "with.dot": [1, 2, None],
    }
)


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ("a > 1", [1]),
        ("a = 1 OR country = 'FR'", [0, 1]),
        ("NOT a IN (1)", [1]),  # null is neither in it nor not
        ("a NOT IN (1, NULL)", []),
        ("a IS NULL OR NOT (a <> 2)", [1, 2]),
        ("a BETWEEN 1 AND 2 AND NOT new", [1]),
        ("a NOT BETWEEN 2 AND 3", [0]),
        ("country LIKE 'D%'", [0]),
        ("country not like '_E'", [1]),
        ("deep.x IS NULL", [1, 2]),
        ("deep.x IS NOT NULL", [0]),
        ("day = '2026-11-17'", [0]),
        ("day > DATE '2026-11-17'", [1]),
        ("at >= '1970-01-01 00:00:01Z'", [1]),
        ("at = TIMESTAMP '1970-01-01T01:00:01+01:00'", [1]),
        ("naive < '1970-01-01 00:00:01'", [0]),
        ("price > 1.055", [0, 1]),
        ("price = 2", [1]),
        ("new", [0]),
        ("new = FALSE", [1]),
        ("kind = 'y'", [1]),
        ("`with.dot` = 2", [1]),
        ("with.dot = 2", [1]),
        ("COUNTRY <> 'DE'", [1]),  # case does not count
        ("share < -1e0", [1]),
        ("1 < a", [1]),
        ("a = NULL", []),
        ("country = 'it''s'", []),
        ('country = "DE"', [0]),
        ("TRUE AND a = 1", [0]),
        ("a = 1 OR a = 2 AND country = 'nobody'", [0]),  # AND binds closer
    ],
)
def test_rows_that_are_taken(where, rows) -> None:
    number = ROWS.append_column("number", [[0, 1, 2]])
    assert number.filter(parsed(where, ROWS.schema))["number"].to_pylist() == rows


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("a = 'x'", "'x' cannot be compared with column 'a', which is int64, at character 5"),
        ("a > ", "it ends too early, at character 5"),
        ("a", "a comparison is missing"),
        ("(a = 1", r"\) is missing, at character 7"),
        ("a = 1)", r"'\)' is not expected"),
        ("at > '2026-01-01'", "needs an offset"),
        ("naive > '2026-01-01Z'", "does not fit|needs no offset"),
        ("day = 'yesterday'", "'yesterday' does not fit column 'day'"),
        ("nothing = 1", "there is no column 'nothing'; there are a, country"),
        ("deep.y = 1", "there is no column 'deep.y'; there are x"),
        ("1 = 1", "one side of a comparison must be a column"),
        ("a IN (a)", "IN needs literals"),
        ("a ; DROP", "';' is not understood, at character 3"),
        (r"country = 'a\n'", "backslash"),
        ("lower(country) = 'de'", "there is no column 'lower'"),
        ("a NOT 1", "IN, BETWEEN or LIKE is missing after NOT"),
        ("", "it ends too early"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(where, message) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parsed(where, ROWS.schema)
    assert "Nothing was sent" in str(caught.value)
