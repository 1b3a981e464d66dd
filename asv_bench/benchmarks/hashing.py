"""Key hashing: how many keys a second, from every kind of column, at three key sizes.

`MurmurMany` and `Partitions` are gates (a slower hash slows every keyed record); the rest inform.
"""

import random

import numpy as np
import pyarrow as pa

from fastprod import _bulk
from fastprod._core._fingerprint import Fingerprint
from fastprod.partitioning import murmur2, murmur2_many, partition_for_keys

KEYS = 100_000
SIZES = (8, 32, 128)
KINDS = {
    "list": list,
    "numpy_S": np.array,
    "arrow_string": lambda keys: pa.array(keys, pa.binary()).cast(pa.string()),
    "arrow_large": lambda keys: pa.array(keys, pa.large_binary()).cast(pa.large_string()),
    "arrow_view": lambda keys: pa.array(keys, pa.string_view()),
}


def ascii_keys(size: int, count: int = KEYS) -> list[bytes]:
    """Keys of `size` printable bytes, the same on every run."""
    source = random.Random(size)
    return [bytes(source.choices(range(33, 127), k=size)) for _ in range(count)]


class MurmurMany:
    params = (tuple(KINDS), SIZES)
    param_names = ("kind", "key_bytes")

    def setup(self, kind, key_bytes):
        self.keys = KINDS[kind](ascii_keys(key_bytes))

    def time_murmur2_many(self, kind, key_bytes):
        murmur2_many(self.keys)

    def peakmem_murmur2_many(self, kind, key_bytes):
        murmur2_many(self.keys)


class Partitions:
    params = (tuple(KINDS), SIZES)
    param_names = ("kind", "key_bytes")

    def setup(self, kind, key_bytes):
        self.keys = KINDS[kind](ascii_keys(key_bytes))

    def time_partition_for_keys(self, kind, key_bytes):
        partition_for_keys(self.keys, 12)


class Nulls:
    """Every third key null: the price of the validity bitmap and of the masked result."""

    params = ("list", "arrow_string")
    param_names = ("kind",)

    def setup(self, kind):
        keys = [None if i % 3 == 0 else key for i, key in enumerate(ascii_keys(32))]
        self.keys = KINDS[kind](keys)

    def time_murmur2_many(self, kind):
        murmur2_many(self.keys)


class Single:
    params = SIZES
    param_names = ("key_bytes",)

    def setup(self, key_bytes):
        self.keys = ascii_keys(key_bytes, 1000)

    def time_murmur2_1000(self, key_bytes):
        for key in self.keys:
            murmur2(key)


class Rows:
    """The fingerprint of Arrow rows, which exactly once from Spark pays for every record."""

    params = (10, 100, 1000)
    param_names = ("value_bytes",)

    def setup(self, value_bytes):
        self.batch = pa.record_batch({"value": ascii_keys(value_bytes, 10_000)})

    def time_fingerprint(self, value_bytes):
        found = Fingerprint()
        for block in _bulk.blocks_of_batches([self.batch], False):
            found.add(*block[:6])
