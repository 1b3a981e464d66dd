"""Replays what Kafka's own Java classes computed.

FASTPROD_JAVA_VECTORS names another file of vectors, such as one made with a newer Kafka.
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastprod._core._shim import Accumulator
from fastprod.partitioning import (
    LoadTable,
    murmur2,
    murmur2_many,
    partition_for_keys,
    record_size_upper_bound,
)

VECTORS = os.environ.get("FASTPROD_JAVA_VECTORS") or Path(__file__).parent / "data" / "java_partitioning.json"


@cache
def vectors() -> dict[str, Any]:
    return json.loads(Path(VECTORS).read_text())


# --- murmur2: [key in hex, hash] ---


def keys_and_hashes() -> tuple[list[bytes], list[int]]:
    pairs = vectors()["murmur2"]
    return [bytes.fromhex(key) for key, _ in pairs], [hashed for _, hashed in pairs]


COLUMNS = {
    "list": lambda keys: keys,
    "tuple": tuple,
    "bytearrays": lambda keys: [bytearray(key) for key in keys],
    "numpy object": lambda keys: np.array([*keys, None], dtype=object)[:-1],
    "binary": lambda keys: pa.array(keys, pa.binary()),
    "large_binary": lambda keys: pa.array(keys, pa.large_binary()),
    "binary_view": lambda keys: pa.array(keys, pa.binary_view()),
    "dictionary": lambda keys: pa.array(keys, pa.binary()).dictionary_encode(),
    "sliced": lambda keys: pa.array([b"before", None, b"", *keys, b"after"], pa.binary())[3:-1],
    "chunked": lambda keys: pa.chunked_array([pa.array(keys[:7]), pa.array(keys[7:])]),
    "offsets": lambda keys: (np.cumsum([0, *map(len, keys)]), b"".join(keys)),
}


def test_murmur2_agrees_with_java() -> None:
    for key, hashed in zip(*keys_and_hashes(), strict=True):
        assert murmur2(key) == hashed
        assert murmur2(memoryview(b"x" + key)[1:]) == hashed, "an unaligned key"


@pytest.mark.parametrize("kind", COLUMNS)
def test_columns_agree_with_java(kind: str) -> None:
    keys, hashes = keys_and_hashes()
    assert murmur2_many(COLUMNS[kind](keys)).tolist() == hashes


def test_fixed_width_columns_agree_with_java() -> None:
    for key, hashed in zip(*keys_and_hashes(), strict=True):
        if key:
            assert murmur2_many(pa.array([key] * 3, pa.binary(len(key)))).tolist() == [hashed] * 3
            assert murmur2_many(np.array([key] * 3, dtype=f"V{len(key)}")).tolist() == [hashed] * 3
        if not key.endswith(b"\0"):  # numpy cannot tell those from padding
            assert murmur2_many(np.array([key] * 3, dtype=f"S{len(key) + 5}")).tolist() == [hashed] * 3


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("partitions", [1, 3, 10, 128, 2**31 - 1])
def test_partitions_agree_with_java(kind: str, partitions: int) -> None:
    keys, hashes = keys_and_hashes()
    expected = [(hashed & 0x7FFFFFFF) % partitions for hashed in hashes]
    assert partition_for_keys(COLUMNS[kind](keys), partitions).tolist() == expected


# --- cft: queue sizes, how many of them are used, cumulative table or null ---


def test_load_tables_agree_with_java() -> None:
    for case in vectors()["cft"]:
        assert LoadTable(case["q"], length=case["len"]).cumulative == case["cft"], case


# --- sticky: a stream of equal records over 3 partitions, with 0, 1, 2, ... for random numbers ---


def test_sticky_streams_agree_with_java() -> None:
    """Through the accumulator that production uses: Java's batches, drained as the sender does."""
    for case in vectors()["sticky"]:
        accumulator = Accumulator(
            3, sticky_bytes=case["batch"], replay=True, adaptive=False, ignore_keys=True, buffer_memory=1 << 30
        )
        key = None if case["key_len"] < 0 else b"k" * case["key_len"]
        value = None if case["value_len"] < 0 else b"v" * case["value_len"]
        runs: list[list[int]] = []
        for i in range(1, case["n"] + 1):
            partition = accumulator.append(value, key)
            if runs and runs[-1][0] == partition:
                runs[-1][1] += 1
            else:
                runs.append([partition, 1])
            if case["drain_all_every"] and i % case["drain_all_every"] == 0:
                accumulator.take()
        about = {name: part for name, part in case.items() if name != "runs"}
        assert runs == case["runs"], about
        assert accumulator.randoms_used == case["randoms_used"], about
        assert "{}:{}".format(*accumulator.sticky) == case["final_sticky"], about


# --- the numbers of the article behind the partitioner ---


def test_the_articles_own_numbers() -> None:
    assert LoadTable([8, 3, 14, 8, 5]).cumulative == [7, 19, 20, 27, 37]
    assert record_size_upper_bound(None, b"") == 85


@pytest.mark.parametrize(
    ("key", "value", "size"), [(-1, -1, 85), (3, 5, 93), (-1, 63, 148), (-1, 64, 150), (-1, 1024, 1110)]
)
def test_size_bounds_agree_with_java(key: int, value: int, size: int) -> None:
    assert record_size_upper_bound(key, value) == size
    texts = [None if n < 0 else b"x" * n for n in (key, value)]
    assert record_size_upper_bound(*texts) == size
