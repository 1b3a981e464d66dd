"""Where records go: Kafka's key hash, the load table, and the protocol for partitioners of your own.

Use this to know a key's partition without producing anything: to split work by partition, to check that
another producer agrees, to find the keys of a hot partition. Columns may be lists, numpy arrays, Arrow
arrays or Series, and are read without copying; the loops run without the GIL.

>>> murmur2(b"21")
-973932308
>>> partition_for_keys(["21", "", None], 10).tolist()
[0, 1, -1]
>>> LoadTable([8, 3, 14, 8, 5]).cumulative
[7, 19, 20, 27, 37]

`PartialRoundRobin` and `SinglePartition` are given as a Producer's `partitioner`.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from fastprod._core._balance import LoadTable, PartialRoundRobin, SinglePartition, StickyState, record_size_upper_bound
from fastprod._core._hash import murmur2, murmur2_many, partition_for_keys

__all__ = [
    "LoadTable",
    "PartialRoundRobin",
    "Partitioner",
    "SinglePartition",
    "StickyState",
    "murmur2",
    "murmur2_many",
    "partition_for_keys",
    "record_size_upper_bound",
]


@runtime_checkable
class Partitioner(Protocol):
    """What an object given as the config's `partitioner` must have.

    It is asked about every record without an explicit partition, keyed or not, with the GIL held: the built-in
    names (`uniform`, `sticky`, `round_robin`) are much faster. While a topic's partitions are not known yet, records
    wait, and the partitioner is asked from a thread of the producer's own once they are.
    """

    def partition(
        self, topic: str, key: bytes | None, value: bytes | None, partitions: int, available: Sequence[int]
    ) -> int:
        """A number from 0 to `partitions` - 1; `available` lists those that have a leader."""
        ...
