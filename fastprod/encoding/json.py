"""`Json`: rows as JSON objects, byte for byte as Spark's `to_json(struct(*))` writes them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fastprod._core import _json
from fastprod.encoding._columns import selected
from fastprod.encoding._zones import zone_of

if TYPE_CHECKING:
    from fastprod._core._columns import Column
    from fastprod._core._encoded import Encoded


@dataclass(frozen=True)
class Json:
    """Makes a JSON object of each row.

    `columns` are those to write, in this order, else all; `exclude` are those to leave out. With `nulls=True` fields
    that are null are written, otherwise they are left out, as Spark does. Timestamps that have a zone are written in
    `timezone`, Spark's session time zone, whatever zone their column has; with `fraction` digits behind the second.

    >>> Json(exclude=["internal"]).encode(batch)
    >>> producer.produce_arrow(batch, "orders", value=Json(), key="customer_id")
    """

    columns: Iterable[str] | None = None
    exclude: Iterable[str] | None = None
    nulls: bool = field(default=False, kw_only=True)
    timezone: str = field(default="UTC", kw_only=True)
    fraction: int = field(default=3, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("columns", "exclude"):
            given = getattr(self, name)
            if isinstance(given, str):
                raise TypeError(f"{name} must be a list of names, not a str: write {name}=[{given!r}]")
            object.__setattr__(self, name, None if given is None else tuple(given))
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, int) or not 0 <= self.fraction <= 9:
            raise ValueError(f"fraction must be a number of digits from 0 to 9, not {self.fraction!r}")
        zone_of(self.timezone)

    def encode(self, data: Any) -> Any:
        """The rows of a RecordBatch as a `pyarrow.LargeBinaryArray`; of a Table or the like as a ChunkedArray.

        A row that cannot be encoded is a ValueError that says which and why.
        """
        import pyarrow as pa

        if isinstance(data, pa.RecordBatch):
            return self._encoded(data).to_arrow()
        if not isinstance(data, pa.Table):
            if not (hasattr(data, "__arrow_c_stream__") or hasattr(data, "__arrow_c_array__")):
                raise TypeError(f"expected an Arrow RecordBatch or Table, not {type(data).__name__}")
            data = pa.table(data)
        chunks: list[Any] = []
        for batch in data.to_batches():
            chunks.append(self._encoded(batch).to_arrow(sum(map(len, chunks))))
        return pa.chunked_array(chunks, pa.large_binary())

    def check(self, schema: Any) -> None:
        """Raises TypeError or ValueError, naming the column, if rows of this Arrow schema cannot be written."""
        for name in self.taken(schema).names:
            if "\0" in name:
                raise ValueError(f"column {name!r} has a NUL in its name, where Arrow ends it: rename it")
        self._encoded(schema)

    def taken(self, data: Any) -> Any:
        """The columns of a batch or schema that are written."""
        return selected(data, self.columns, self.exclude)

    def encode_column(self, batch: Any, name: str = "value", base: int = 0) -> Column:
        """The rows of a RecordBatch as a column of a bulk call, in which bad ones fail alone."""
        return self._encoded(batch).column(name, base)

    def _encoded(self, data: Any) -> Encoded:
        return _json.encode(self.taken(data), self.nulls, self.fraction, zone_of(self.timezone))
