from typing import Any, SupportsIndex

import numpy
from numpy.typing import NDArray
from typing_extensions import Buffer

def murmur2(key: str | Buffer) -> int:
    """Kafka's murmur2 of one key (bytes, str as UTF-8, or any contiguous buffer), signed as in Java."""

def murmur2_many(keys: Any, mask: Any = None) -> NDArray[numpy.int32]:
    """Kafka's murmur2 of every key of a column, as int32.

    `keys` is anything a `Column` takes; `mask` marks further nulls with True. With nulls among the keys the
    result is a `numpy.ma.MaskedArray` that masks them (0 beneath, fill value 0), without any a plain array.
    """

def partition_for_keys(keys: Any, partitions: SupportsIndex, mask: Any = None) -> NDArray[numpy.int32]:
    """The partition of every key of a column, as int32, where Java's producer would put it.

    A null key gives -1: the key-less partitioner decides. An empty key is a key.
    """
