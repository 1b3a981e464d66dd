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

from fastprod.partitioning import murmur2, murmur2_many, partition_for_keys

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
