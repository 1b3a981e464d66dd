"""What Kafka computes, in plain Python: for tests to compare with."""

from collections.abc import Callable


def murmur2(data: bytes) -> int:
    """Kafka's hash, written down once more, to compare with."""
    mask, m = 0xFFFFFFFF, 0x5BD1E995
    h = 0x9747B28C ^ len(data)
    whole = len(data) & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    rest = data[whole:]
    if rest:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def java_partition(partitions: int) -> Callable[[bytes], int]:
    """Where Java's producer puts a key, computed without fastprod."""
    return lambda key: (murmur2(key) & 0x7FFFFFFF) % partitions
