"""Positions and the map of bundles: what belongs where, and what is refused."""

import json
import pickle
import random
import threading
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastprod.bundles import BundleMap, hash_position, hash_positions

# A busy machine may need many times as long as an idle one.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
LAST = 0xFFFFFFFF
NAMES = ["orders", "", "a", "café", "注文", "orders-with-a-name-of-more-than-sixteen-bytes", "x" * 33]
EXPECTED = [zlib.crc32(name.encode()) for name in NAMES]
maps = st.sets(st.integers(1, LAST - 1), max_size=20).map(lambda inner: BundleMap([0, *sorted(inner), LAST]))


# ---- positions


def test_a_position_is_the_crc32_of_the_utf8_name() -> None:
    assert [hash_position(name) for name in NAMES] == EXPECTED
    assert hash_position("a") == 0xE8B7BE43


@pytest.mark.parametrize(
    "column",
    [
        NAMES,
        tuple(NAMES),
        np.array(NAMES),
        np.array(NAMES, dtype=object),
        [name.encode() for name in NAMES],
        pa.array(NAMES),
        pa.array(NAMES, pa.large_string()),
        pa.array(NAMES, pa.string_view()),
        pa.array(NAMES, pa.binary()),
        pa.array(NAMES).dictionary_encode(),
        pa.array(["before", *NAMES, "after"]).slice(1, len(NAMES)),
        pa.array(["before", *NAMES, "after"]).dictionary_encode().slice(1, len(NAMES)),
        pa.array([None, *NAMES]).slice(1),
        pa.chunked_array([NAMES[:2], [], NAMES[2:]]),
        pa.chunked_array([pa.array(NAMES[:3]).dictionary_encode(), pa.array(NAMES[3:]).dictionary_encode()]),
        pa.chunked_array([["before", *NAMES]]).slice(1),
    ],
    ids=lambda column: f"{type(column).__name__}-{getattr(column, 'type', '')}",
)
def test_positions_of_every_kind_of_column(column: Any) -> None:
    found = hash_positions(column)
    assert found.dtype == np.uint32
    assert found.tolist() == EXPECTED


@pytest.mark.parametrize(
    "column", [[], pa.array([], pa.string()), pa.chunked_array([], pa.string()), np.array([], "U1")]
)
def test_positions_of_no_names(column: Any) -> None:
    found = hash_positions(column)
    assert (found.dtype, len(found)) == (np.uint32, 0)


def test_positions_of_names_of_every_length() -> None:
    source = random.Random(7)
    names = [source.randbytes(size) for size in range(150) for _ in range(8)]
    expected = [zlib.crc32(name) for name in names]
    for column in (names, pa.array(names), pa.array(names, pa.large_binary()), pa.array([None, *names])[1:]):
        assert hash_positions(column).tolist() == expected


@untimed
@given(st.lists(st.text()))
def test_positions_of_any_text(names: list[str]) -> None:
    assert hash_positions(names).tolist() == [zlib.crc32(name.encode()) for name in names]
    assert hash_positions(pa.array(names, pa.string())).tolist() == [hash_position(name) for name in names]


def test_threads_hash_side_by_side() -> None:
    column = pa.array(NAMES * 10_000)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(hash_positions(column))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.tolist() == EXPECTED * 10_000 for one in found] == [True] * 4


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (["a", None], "name at index 1 is null"),
        (pa.array(["a", "b", None]), "name at index 2 is null"),
        (pa.chunked_array([["a"], ["b", None]]), "name at index 2 is null"),
        (pa.array(["a", None]).dictionary_encode(), "name at index 1 is null"),
        (pa.array([1, 2]), "name"),
        (["a", 1], "name at index 1"),
        (["\ud800"], "name at index 0"),
        ("orders", "name"),
        (3, "name"),
    ],
)
def test_columns_without_positions_are_refused(column: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        hash_positions(column)


@pytest.mark.parametrize(("name", "words"), [(b"a", "b'a'"), (None, "None"), (7, "7"), ("\ud800", "ud800")])
def test_a_name_must_be_text(name: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        hash_position(name)


# ---- the map


def test_lower_bounds_are_inside_and_upper_bounds_are_not_but_the_last() -> None:
    bundles = BundleMap([0, 1, 1000, LAST])
    assert bundles.bundles == ("0x00000000_0x00000001", "0x00000001_0x000003e8", "0x000003e8_0xffffffff")
    assert bundles.boundaries == (0, 1, 1000, LAST)
    assert len(bundles) == 3
    expected = {0: 0, 1: 1, 999: 1, 1000: 2, LAST - 1: 2, LAST: 2}
    assert {position: bundles.index_at(position) for position in expected} == expected
    assert bundles.find_position(1) == bundles.bundles[1]
    assert bundles.range_of("0x00000001_0x000003e8") == (1, 1000)


def test_names_are_found_by_their_positions() -> None:
    bundles = BundleMap.equal(4)
    assert bundles.find("c") == "0x00000000_0x40000000"  # 0x06b9df6f
    assert bundles.find("b") == "0x40000000_0x80000000"  # 0x71beeff9
    assert bundles.find("a") == "0xc0000000_0xffffffff"  # 0xe8b7be43


def test_equal_bundles_are_cut_as_pulsar_does() -> None:
    assert BundleMap.equal(1).bundles == ("0x00000000_0xffffffff",)
    assert BundleMap.equal(2).boundaries == (0, 0x80000000, LAST)
    assert BundleMap.equal(3).boundaries == (0, 0x55555555, 0xAAAAAAAA, LAST)  # 2^32 // 3 each, the last one more
    assert BundleMap.equal(16).boundaries == (*range(0, 1 << 32, 1 << 28), LAST)


@untimed
@given(maps, st.lists(st.integers(0, LAST), max_size=20))
def test_every_position_belongs_to_exactly_one_bundle(bundles: BundleMap, positions: list[int]) -> None:
    for position in [*positions, *bundles.boundaries]:
        ranges = [bundles.range_of(bundle) for bundle in bundles.bundles]
        holders = [one for one in ranges if one[0] <= position < one[1] or position == one[1] == LAST]
        assert holders == [bundles.range_of(bundles.find_position(position))]


@untimed
@given(maps)
def test_json_and_pickle_bring_the_same_map_back(bundles: BundleMap) -> None:
    for again in (BundleMap.from_json(bundles.to_json()), pickle.loads(pickle.dumps(bundles))):
        assert again == bundles
        assert hash(again) == hash(bundles)
        assert again.bundles == bundles.bundles


def test_json_is_pulsars() -> None:
    told = json.loads(BundleMap([0, 1000, LAST]).to_json())
    assert told == {"boundaries": ["0x00000000", "0x000003e8", "0xffffffff"], "numBundles": 2}
    assert BundleMap.from_json(b'{"boundaries": ["0x00000000", "0x000003E8", "0xffffffff"]}').boundaries[1] == 1000


def test_maps_are_equal_by_their_boundaries_and_cannot_be_changed() -> None:
    bundles = BundleMap([0, 5, LAST])
    assert bundles == BundleMap(np.array([0, 5, LAST]))
    assert bundles != BundleMap([0, 6, LAST])
    assert bundles != (0, 5, LAST)
    assert len({bundles, BundleMap([0, 5, LAST])}) == 1
    assert repr(bundles) == "BundleMap([0x00000000, 0x00000005, 0xffffffff])"
    with pytest.raises(AttributeError, match="cannot be changed"):
        bundles.boundaries = (0, LAST)  # type: ignore[misc]
    with pytest.raises(AttributeError, match="cannot be changed"):
        del bundles._boundaries


@pytest.mark.parametrize(
    ("boundaries", "words"),
    [
        ([], "must begin with 0"),
        ([0], "must begin with 0 and end with 0xffffffff"),
        ([1, LAST], "must begin with 0 .* not 0x00000001"),
        ([0, 1000], "end with 0xffffffff, not 0x00000000, 0x000003e8"),
        ([0, 20, 10, LAST], "0x0000000a comes after 0x00000014"),
        ([0, 10, 10, LAST], "0x0000000a is there twice"),
        ([0, -1, LAST], "not -1"),
        ([0, LAST + 1], "not 4294967296"),
        ([0, 1.5, LAST], "1.5"),
        ([0, "7", LAST], "'7'"),
        ([0, True, LAST], "True"),
        ([0, None, LAST], "None"),
        ("0x00000000", "'0x00000000'"),
        (7, "7"),
        (None, "None"),
    ],
)
def test_boundaries_that_make_no_map(boundaries: Any, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        BundleMap(boundaries)


@pytest.mark.parametrize("count", [0, -1, 1.5, "4", None, True, LAST + 1])
def test_numbers_of_bundles_that_make_no_map(count: Any) -> None:
    with pytest.raises(ValueError, match="number of bundles"):
        BundleMap.equal(count)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "must be JSON, but '{'"),
        (None, "must be JSON, but None"),
        ("[]", "must be like"),
        ('{"bundles": 4}', "must be like"),
        ('{"boundaries": [0, 10]}', "not 0"),
        ('{"boundaries": ["0x00000000", "0xZZ"]}', "'0xZZ'"),
        ('{"boundaries": ["0x00000000", "0x00000001"]}', "end with 0xffffffff"),
        ('{"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 2}', "numBundles is 2"),
    ],
)
def test_json_that_is_no_map(text: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BundleMap.from_json(text)


def test_a_bundle_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="there is no bundle '0x00000000_0x00000007'"):
        BundleMap.equal(2).range_of("0x00000000_0x00000007")
    with pytest.raises(TypeError, match="not as 3"):
        BundleMap.equal(2).range_of(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="None"):
        BundleMap.equal(2).find(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="-1"):
        BundleMap.equal(2).find_position(-1)
