"""Which bundle a name belongs to: a name's position is its CRC-32, a bundle is a range of positions, as in Pulsar.

0x00000000      0x40000000      0x80000000      0xc0000000      0xffffffff
    |---------------|---------------|---------------|---------------|
     lower bound in, upper bound out; only the last bundle has its upper bound
"""

from __future__ import annotations

import json
import operator
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, Self

from fastprod._core._crc import crc32_many

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

    from fastprod.bundles.load import Load
    from fastprod.bundles.split import Split

FIRST = 0
LAST = 0xFFFFFFFF


def hash_position(name: str) -> int:
    """Where a name is on the ring: the CRC-32 of its UTF-8, from 0 to 0xffffffff."""
    if not isinstance(name, str):
        raise TypeError(f"a name must be str, not {type(name).__name__}: {name!r}")
    return zlib.crc32(_encoded(name))


def hash_positions(names: Any) -> NDArray[numpy.uint32]:
    """`hash_position` of every name of a column: a list, a numpy or Arrow array, a Series. The GIL is free meanwhile.

    Arrow arrays may be chunked, sliced, dictionaries, and of any string or binary type. Null has no position and is a
    ValueError that says where it is.
    """
    return crc32_many(names)


class BundleMap:
    """All positions, cut into bundles at sorted boundaries. Cannot be changed: `split` makes another one.

    `BundleMap([0, 1, 1000, 0xffffffff])` has three bundles. A bundle's name is that of its bounds, as in
    `0x00000001_0x000003e8`.
    """

    __slots__ = ("_boundaries", "_bundles")

    _boundaries: tuple[int, ...]
    _bundles: tuple[str, ...]

    def __init__(self, boundaries: Iterable[int]) -> None:
        found = tuple(_checked(boundary) for boundary in _listed(boundaries))
        if len(found) < 2 or found[0] != FIRST or found[-1] != LAST:
            raise ValueError(f"boundaries must begin with 0 and end with {LAST:#010x}, not {_shown(found)}")
        for before, after in pairwise(found):
            if before >= after:
                what = "is there twice" if before == after else f"comes after {before:#010x}"
                raise ValueError(f"boundaries must be sorted, but {after:#010x} {what}")
        object.__setattr__(self, "_boundaries", found)
        object.__setattr__(self, "_bundles", tuple(map(_name, found, found[1:])))

    @classmethod
    def equal(cls, n: int) -> Self:
        """`n` bundles of the same size, cut as Pulsar cuts a new namespace: the last has what is left over."""
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= LAST:
            raise ValueError(f"the number of bundles must be a whole number from 1 to {LAST}, not {n!r}")
        size = (LAST + 1) // n
        return cls([*range(FIRST, size * n, size), LAST])

    @property
    def boundaries(self) -> tuple[int, ...]:
        """Sorted, from 0 to 0xffffffff: one more than there are bundles."""
        return self._boundaries

    @property
    def bundles(self) -> tuple[str, ...]:
        """Their names, in the order of their positions."""
        return self._bundles

    def find(self, name: str) -> str:
        """The bundle that a topic, or whatever else has the name, belongs to."""
        return self._bundles[self.index_at(hash_position(name))]

    def find_position(self, position: int) -> str:
        """The bundle that has the position."""
        return self._bundles[self.index_at(_checked(position))]

    def index_at(self, position: int) -> int:
        """The number in `bundles` of the one that has the position."""
        return min(bisect_right(self._boundaries, position), len(self._bundles)) - 1

    def range_of(self, bundle: str) -> tuple[int, int]:
        """A bundle's lower and upper bound, the latter outside of it unless it is the last."""
        if not isinstance(bundle, str):
            raise TypeError(f"a bundle is given by its name, as {self._bundles[0]!r}, not as {bundle!r}")
        try:
            index = self._bundles.index(bundle)
        except ValueError:
            raise ValueError(f"there is no bundle {bundle!r} in {self!r}") from None
        return self._boundaries[index], self._boundaries[index + 1]

    def split(
        self,
        bundle: str,
        algorithm: str,
        *,
        topics: Iterable[str | int] | None = None,
        positions: Iterable[int] | None = None,
        load: Load | None = None,
        force: bool = False,
        **options: Any,
    ) -> Split:
        """One bundle split by the algorithm of that name, see `fastprod.bundles.split`."""
        from fastprod.bundles.split import split

        return split(self, bundle, algorithm, topics=topics, positions=positions, load=load, force=force, **options)

    def isolate(self, bundle: str, topics: Iterable[str | int]) -> Split:
        """One bundle split so that each of the topics has a bundle of its own, see `fastprod.bundles.isolate`."""
        from fastprod.bundles.split import isolate

        return isolate(self, bundle, topics)

    def cut(self, positions: Iterable[int]) -> Self:
        """A map with further boundaries; those it has already change nothing."""
        return type(self)(sorted({*self._boundaries, *map(_checked, positions)}))

    def to_json(self) -> str:
        """In the form of Pulsar's BundlesData, which `from_json` and Pulsar's admin interface read."""
        return json.dumps(
            {"boundaries": [f"{each:#010x}" for each in self._boundaries], "numBundles": len(self._bundles)}
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The map that `to_json` wrote."""
        try:
            told = json.loads(text)
        except (TypeError, ValueError) as problem:
            raise ValueError(f"a bundle map must be JSON, but {_brief(text)} is not: {problem}") from None
        written = told.get("boundaries") if isinstance(told, dict) else None
        if not isinstance(written, list):
            raise ValueError(f'a bundle map must be like {{"boundaries": ["0x00000000", ...]}}, not {_brief(text)}')
        made = cls(_read(each) for each in written)
        count = told.get("numBundles", len(made))
        if count != len(made):
            raise ValueError(f"numBundles is {count!r}, but the boundaries make {len(made)} bundles")
        return made

    def __len__(self) -> int:
        return len(self._bundles)

    def __eq__(self, other: object) -> bool:
        return self._boundaries == other._boundaries if isinstance(other, BundleMap) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._boundaries)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a BundleMap cannot be changed: {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a BundleMap cannot be changed: {name}")

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[int, ...]]]:
        return type(self), (self._boundaries,)

    def __repr__(self) -> str:
        return f"BundleMap([{_shown(self._boundaries)}])"


def _encoded(name: str) -> bytes:
    try:
        return name.encode()
    except UnicodeEncodeError as problem:
        raise ValueError(f"the name {name!r} is not valid Unicode: {problem.reason}") from None


def _listed(boundaries: object) -> list[Any]:
    if isinstance(boundaries, str | bytes) or not isinstance(boundaries, Iterable):
        raise TypeError(f"boundaries must be a sequence of whole numbers, not {boundaries!r}")
    return list(boundaries)


def whole(position: object) -> int:
    """A number, be it a position or outside of all of them."""
    try:
        if isinstance(position, bool):
            raise TypeError
        return operator.index(position)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"a position must be a whole number, not {position!r}") from None


def _checked(position: object) -> int:
    """A position, or an error that names what is none."""
    found = whole(position)
    if not FIRST <= found <= LAST:
        raise ValueError(f"a position must be from 0 to {LAST:#010x}, not {found}")
    return found


def _read(written: object) -> int:
    try:
        if isinstance(written, str) and written[:2].lower() == "0x":
            return int(written, 16)
    except ValueError:
        pass
    raise ValueError(f"a boundary in JSON must be like '0x0000ffff', not {written!r}")


def _name(lower: int, upper: int) -> str:
    return f"{lower:#010x}_{upper:#010x}"


def _shown(boundaries: tuple[int, ...]) -> str:
    written = [f"{each:#010x}" for each in boundaries]
    return ", ".join(written if len(written) <= 8 else [*written[:4], "...", *written[-3:]])


def _brief(text: object) -> str:
    shown = repr(text)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
