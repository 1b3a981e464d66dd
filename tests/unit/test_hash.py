"""Hashing against a brute-force reference; agreement with Java itself is in test_java_vectors.py."""

import random
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fastprod.partitioning import murmur2, murmur2_many, partition_for_keys

WORD = 0xFFFFFFFF


def reference(key: bytes) -> int:
    """murmur2 as Kafka describes it, a byte at a time and with Python's unbounded ints."""
    mixer = 0x5BD1E995
    state = 0x9747B28C ^ len(key)
    whole = len(key) // 4 * 4
    for start in range(0, whole, 4):
        block = int.from_bytes(key[start : start + 4], "little") * mixer & WORD
        block = (block ^ block >> 24) * mixer & WORD
        state = state * mixer & WORD ^ block
    if key[whole:]:
        state = (state ^ int.from_bytes(key[whole:], "little")) * mixer & WORD
    state = (state ^ state >> 13) * mixer & WORD
    state ^= state >> 15
    return state - (1 << 32) if state >> 31 else state


def random_keys() -> list[bytes]:
    source = random.Random(20)
    return [source.randbytes(size) for size in range(301) for _ in range(4)]


def test_every_length_agrees_with_the_reference() -> None:
    keys = random_keys()
    expected = [reference(key) for key in keys]
    assert [murmur2(key) for key in keys] == expected
    assert murmur2_many(keys).tolist() == expected


def test_keys_at_every_alignment() -> None:
    key = random.Random(1).randbytes(37)
    for shift in range(16):
        assert murmur2(memoryview(bytes(shift) + key)[shift:]) == reference(key)


@pytest.mark.parametrize(
    "key",
    [
        b"caf\xc3\xa9",
        "café",
        bytearray(b"caf\xc3\xa9"),
        np.frombuffer(b"caf\xc3\xa9", np.uint8),
        np.void(b"caf\xc3\xa9"),
    ],
)
def test_one_key_of_any_kind(key: object) -> None:
    assert murmur2(key) == reference("café".encode())


def test_a_key_long_enough_to_release_the_gil() -> None:
    key = bytes(range(256)) * 100
    assert murmur2(key) == reference(key)


@pytest.mark.parametrize("key", [None, 5, np.int64(5), 1.5, [b"a"]])
def test_what_is_no_key(key: object) -> None:
    with pytest.raises(TypeError, match=f"^key must be bytes, str or a buffer, not {type(key).__name__}$"):
        murmur2(key)


def test_unreadable_keys() -> None:
    with pytest.raises(TypeError, match=r"^key must hold bytes, not Python objects$"):
        murmur2(np.array([None], dtype=object))
    with pytest.raises(BufferError):
        murmur2(memoryview(b"abcd")[::2])
    with pytest.raises(UnicodeEncodeError):
        murmur2("\ud800")


def test_without_nulls_the_result_is_a_plain_array() -> None:
    result = murmur2_many([b"a", b""])
    assert type(result) is np.ndarray
    assert result.dtype == np.int32


@pytest.mark.parametrize("make", [list, lambda keys: pa.array(keys, pa.binary())])
def test_nulls_are_masked(make: Any) -> None:
    result = murmur2_many(make([b"a", None, b"", b"b"]), mask=[False, False, False, True])
    assert isinstance(result, np.ma.MaskedArray)
    assert result.dtype == np.int32
    assert result.tolist() == [reference(b"a"), None, reference(b""), None]
    assert result.filled().tolist() == [reference(b"a"), 0, reference(b""), 0]


def test_nulls_in_chunks_are_masked_in_place() -> None:
    chunks = pa.chunked_array([pa.array([b"a", None]), pa.array([], pa.binary()), pa.array([None, b"b"])])
    assert murmur2_many(chunks).tolist() == [reference(b"a"), None, None, reference(b"b")]


@pytest.mark.parametrize(
    "empty", [[], (), np.array([], dtype="S4"), pa.array([], pa.string()), pa.chunked_array([], pa.string())]
)
def test_no_keys(empty: Any) -> None:
    for result in (murmur2_many(empty), partition_for_keys(empty, 3)):
        assert result.dtype == np.int32
        assert result.shape == (0,)


def test_partitions() -> None:
    keys = random_keys()
    for partitions in (1, 2, 7, 1000, 2**31 - 1):
        expected = [(reference(key) & 0x7FFFFFFF) % partitions for key in keys]
        result = partition_for_keys(keys, partitions)
        assert result.dtype == np.int32
        assert result.tolist() == expected


def test_a_null_key_is_left_to_the_partitioner_and_an_empty_one_is_not() -> None:
    empty = (reference(b"") & 0x7FFFFFFF) % 10
    assert partition_for_keys([None, b"", b"x"], 10, mask=[False, False, True]).tolist() == [-1, empty, -1]
    assert partition_for_keys(pa.nulls(2), 10).tolist() == [-1, -1]


def test_partitions_may_be_a_numpy_integer() -> None:
    assert partition_for_keys([b"a"], np.int16(4)).tolist() == partition_for_keys([b"a"], 4).tolist()


@pytest.mark.parametrize("partitions", [0, -1, 2**31])
def test_impossible_partition_counts(partitions: int) -> None:
    with pytest.raises(ValueError, match=f"^partitions must be between 1 and 2147483647, not {partitions}$"):
        partition_for_keys([b"a"], partitions)


def test_a_partition_count_is_an_integer() -> None:
    with pytest.raises(TypeError):
        partition_for_keys([b"a"], 2.5)


@pytest.mark.parametrize("hash_all", [murmur2_many, lambda keys: partition_for_keys(keys, 3)])
def test_errors_name_the_key(hash_all: Any) -> None:
    with pytest.raises(TypeError, match=r"^key at index 1 must be bytes, str, None or a buffer, not int$"):
        hash_all([b"a", 7])
    with pytest.raises(TypeError, match=r"^key must hold bytes or str, not Arrow int64$"):
        hash_all(pa.array([1]))


def test_threads_hash_the_same_column() -> None:
    keys = random_keys() * 20
    column = pa.array(keys, pa.large_binary())
    expected = [reference(key) for key in random_keys()] * 20
    results: list[list[int]] = []

    def hash_column() -> None:
        results.append(murmur2_many(column).tolist())

    threads = [threading.Thread(target=hash_column) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4
