from typing import Any

class Column:
    """One contiguous column of byte strings, seen by C code without copies.

    `source` is a list or tuple of bytes, str, None or buffers; a numpy array of dtype S, V, U, StringDType
    or object; an Arrow array of any binary or string type, dictionaries of them included; a pandas or polars
    Series; or `(offsets, data)`. `mask` marks further nulls with True, as in numpy.ma. `name` is what errors
    call the column, `base` the number of its first element for them. With `strict=False` elements of a wrong type
    are recorded in `bad` instead of raised; an array that is invalid as a whole is always refused.
    """

    @property
    def owners(self) -> list[Any]:
        """Objects that keep the memory of the elements alive."""

    @property
    def bad(self) -> dict[int, Exception]:
        """What is wrong, by index, with elements that could not be read."""

    @staticmethod
    def empty(length: int) -> Column:
        """A column of `length` nulls, for an argument that was not given."""

    @property
    def immutable(self) -> bool:
        """Whether nobody can change the bytes, so that they may be sent without a copy.

        So it is with bytes and str objects, and with Arrow buffers that Arrow has allocated itself or that are over
        bytes objects; see `_arrow_memory`. All other memory (numpy, bytearray, files, other libraries) may change.
        """

    def __init__(
        self, source: Any, name: str = "value", strict: bool = True, mask: Any = None, base: int = 0
    ) -> None: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> bytes | None:
        """A copy of the element; raises what `bad` holds for it."""

def columns(source: Any, name: str = "value", strict: bool = True, mask: Any = None) -> list[Column]:
    """The Columns of `source`: one per chunk of a chunked array, a single one for all else."""

def pieces(source: Any, name: str = "value") -> list[tuple[Any, int, Any]]:
    """`source` as (list, tuple, numpy or Arrow array or (offsets, data); its length; mask or None), one per chunk."""

def cut(piece: tuple[Any, int, Any], start: int, stop: int) -> tuple[Any, int, Any]:
    """Some elements of one of `pieces`, as another."""
