"""Which columns of a batch, or of its schema, an encoder takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def selected(data: Any, columns: Iterable[str] | None, exclude: Iterable[str] | None) -> Any:
    """The batch or schema with these columns only, in this order; copies nothing. ValueError for a name not in it."""
    if columns is None and exclude is None:
        return data
    schema = getattr(data, "schema", data)
    names = schema.names
    for given in (*(columns or ()), *(exclude or ())):
        if given not in names:
            raise ValueError(f"there is no column {given!r}; the columns are {names}")
    wanted = list(names if columns is None else columns)
    for name in wanted:
        if columns is not None and wanted.count(name) > 1:
            raise ValueError(f"column {name!r} is asked for twice")
        if columns is not None and names.count(name) > 1:
            raise ValueError(f"there are {names.count(name)} columns {name!r}")
    left = set(exclude or ())
    places = [i for i, name in enumerate(names) if name not in left]
    if columns is not None:
        places = [names.index(name) for name in wanted if name not in left]
    if not places:
        raise ValueError(f"no column is left of {names}")
    if data is schema:
        import pyarrow as pa

        return pa.schema([schema.field(place) for place in places])
    return data.select(places)
