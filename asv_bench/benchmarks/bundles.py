"""Positions of names, and plans for many topics.

`Positions.track_times_a_python_loop` is a gate: at least 20. The rest inform.
"""

import time
import zlib

import numpy as np
import pyarrow as pa

from fastprod.bundles import BundleMap, hash_positions, plan

NAMES = 10_000_000
KINDS = {
    "list": list,
    "numpy_U": np.array,
    "arrow_string": pa.array,
    "arrow_large": lambda names: pa.array(names, pa.large_string()),
    "arrow_dictionary": lambda names: pa.array(names).dictionary_encode(),
}


def topics(count):
    return [f"topic-{number:07d}" for number in range(count)]


class Positions:
    """Ten million names of 13 bytes in an Arrow column, against a Python loop over as many str."""

    timeout = 300
    number = 1

    def setup(self):
        self.names = topics(NAMES)
        self.column = pa.array(self.names)

    def time_hash_positions(self):
        hash_positions(self.column)

    def peakmem_hash_positions(self):
        hash_positions(self.column)

    def track_times_a_python_loop(self):
        # CPU time moves less than the clock with what else the machine does; the best of each is compared.
        ours = min(seconds(lambda: hash_positions(self.column)) for _ in range(7))
        return min(seconds(self.loop) for _ in range(3)) / ours

    track_times_a_python_loop.unit = "x"

    def loop(self):
        found = np.empty(len(self.names), np.uint32)
        for index, name in enumerate(self.names):
            found[index] = zlib.crc32(name.encode())


class Kinds:
    params = tuple(KINDS)
    param_names = ("kind",)

    def setup(self, kind):
        self.names = KINDS[kind](topics(100_000))

    def time_hash_positions(self, kind):
        hash_positions(self.names)


class Planning:
    """Topics of Zipf sizes, for 32 writers."""

    params = (200, 5_000)
    param_names = ("topics",)

    def setup(self, topics):
        self.load = {f"topic-{number}": (1, 1e9 / (number + 1)) for number in range(topics)}

    def time_plan(self, topics):
        plan(BundleMap.equal(64), self.load, writers=32)


def seconds(call):
    start = time.thread_time()
    call()
    return time.thread_time() - start
