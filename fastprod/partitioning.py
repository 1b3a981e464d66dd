"""Where records go: Kafka's key hash, as the Java producer computes it.

Use this to know a key's partition without producing anything: to split work by partition, to check that
another producer agrees, to find the keys of a hot partition. Columns may be lists, numpy arrays, Arrow
arrays or Series, and are read without copying; the loops run without the GIL.

>>> murmur2(b"21")
-973932308
>>> partition_for_keys(["21", "", None], 10).tolist()
[0, 1, -1]
"""

from fastprod._core._hash import murmur2, murmur2_many, partition_for_keys

__all__ = ["murmur2", "murmur2_many", "partition_for_keys"]
