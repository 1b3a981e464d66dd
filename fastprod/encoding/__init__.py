"""Rows of Arrow data as the bytes of records, made in C without the GIL.

    RecordBatch --_core._arrow_tree--> nodes --Json, Avro--> _core._encoded --> Column of a bulk call

An encoder is a small description that can be pickled; `Producer.produce_arrow(batch, topic, value=encoder)` has it make
values, or keys, of the columns of a batch. `Encoder` says what such an object must have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from fastprod._core._columns import Column
    from fastprod.encoding.avro import Avro
    from fastprod.encoding.json import Json

__all__ = ["Avro", "Encoder", "Json"]

_HOMES = {"Avro": "fastprod.encoding.avro", "Json": "fastprod.encoding.json"}


def __getattr__(name: str) -> Any:
    # Imported on first use: one who needs JSON does not need what the other encoders need.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@runtime_checkable
class Encoder(Protocol):
    """Makes a column of keys or values of the rows of a record batch.

    It may also have `taken(schema)`, the schema of the columns that it needs: only these are then looked at.
    """

    def check(self, schema: Any) -> None:
        """Raises TypeError or ValueError, naming the column, if batches of this Arrow schema cannot be encoded.

        Called once for a whole call, before any of it is accepted.
        """

    def encode_column(self, batch: Any, name: str = "value", base: int = 0) -> Column:
        """The rows of a `pyarrow.RecordBatch`, encoded. Its schema is one that `check` has seen.

        `name` is what errors call the column, `base` the number of row 0 in the call. A row that cannot be encoded is
        recorded in `Column.bad` and fails alone; an array that is invalid as a whole is a ValueError.
        """
