"""The orders that commands and benchmarks encode: 12 mixed columns, about 250 bytes of JSON a row.

What people export from a lake: numbers, text, some of it not ASCII, money as decimals and as doubles, days and times,
flags, and nulls here and there. The same seed gives the same rows.
"""

from __future__ import annotations

from typing import Any

CITIES = ("Berlin", "São Paulo", "New York", "Zürich", "Springfield", "Kraków", "Hong Kong", "Oslo", "Rio de Janeiro")
STATES = ("new", "paid", "packed", "shipped", "returned")
NOTES = ("leave at the door", 'call "before" delivery', "gift: no invoice inside\nplease")
START_US = 1_700_000_000_000_000


def orders(rows: int, seed: int = 1) -> Any:
    """A `pyarrow.RecordBatch` of so many orders."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    random = np.random.default_rng(seed)
    numbers = np.arange(rows, dtype=np.int64)

    def pick(words: tuple[str, ...]) -> Any:
        return pa.array(words).take(pa.array(random.integers(0, len(words), rows)))

    def some(values: Any, part: float, kind: Any = None) -> Any:
        """With nulls in place of others."""
        return pa.array(values, kind, mask=random.random(rows) >= part)

    cents = random.integers(100, 500_000, rows)
    # Decimals of 128 bits, little endian: the upper half is the sign, and these are positive
    halves = np.zeros((rows, 2), np.int64)
    halves[:, 0] = cents * random.integers(1, 20, rows)
    total = pa.Array.from_buffers(pa.decimal128(12, 2), rows, [None, pa.py_buffer(halves.tobytes())])
    times = START_US + numbers * 1_000 + random.integers(0, 1_000, rows)
    call: Any = pc  # whose type hints do not know it
    columns = {
        "order_id": pa.array(10**12 + numbers),
        "customer_id": pa.array(random.integers(1, 1_000_000, rows)),
        "product": call.binary_join_element_wise(
            "sku", pa.array(random.integers(1000, 9999, rows)).cast("string"), "-"
        ),
        "city": pick(CITIES),
        "state": pick(STATES),
        "price": pa.array(cents / 100),
        "weight_kg": some(random.gamma(2.0, 1.5, rows).round(3), 0.8),
        "total": total,
        "paid": some(random.random(rows) < 0.7, 0.9, pa.bool_()),
        "ordered_at": pa.array(times).view(pa.timestamp("us", "UTC")),
        "due": some((times // 86_400_000_000 + 3).astype(np.int32), 0.9, pa.int32()).cast(pa.date32()),
        "note": call.if_else(pa.array(random.random(rows) < 0.2), pick(NOTES), pa.scalar(None, pa.string())),
    }
    return pa.RecordBatch.from_pydict(columns)
