"""Splitting bundles: Pulsar's four algorithms, one's own, and cuts around outstanding topics."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastprod.bundles import BundleLoad, BundleMap, NotSplit, Request, Split, algorithms, hash_position, isolate, split
from fastprod.bundles.split import _algorithms, register

# A busy machine may need many times as long as an idle one.
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
LAST = 0xFFFFFFFF
WHOLE = "0x00000000_0xffffffff"
ALL = BundleMap.equal(1)
SEED = BundleMap([0, 0x200, LAST])  # the bundle of PIP-143 and PIP-169, and the rest
BUNDLE = "0x00000000_0x00000200"


def test_algorithms_have_pulsars_names() -> None:
    assert algorithms()[:4] == (
        "range_equally_divide",
        "topic_count_equally_divide",
        "specified_positions_divide",
        "flow_or_qps_equally_divide",
    )


def test_the_function_and_the_method_are_the_same() -> None:
    found = split(SEED, BUNDLE, "topic_count_equally_divide", topics=[10, 20, 80, 90])
    assert found == SEED.split(BUNDLE, "topic_count_equally_divide", topics=[10, 20, 80, 90])
    assert found == Split(BundleMap([0, 50, 0x200, LAST]), (50,), None)


# ---- range_equally_divide


def test_a_range_is_cut_in_the_middle() -> None:
    assert ALL.split(WHOLE, "range_equally_divide").boundaries == (0x7FFFFFFF,)
    assert SEED.split(BUNDLE, "range_equally_divide").map == BundleMap([0, 0x100, 0x200, LAST])


def test_a_single_position_is_not_cut() -> None:
    tiny = BundleMap([0, 1, LAST])
    found = tiny.split("0x00000000_0x00000001", "range_equally_divide")
    assert found.map is tiny
    assert (found.boundaries, found.reason) == ((), "the bundle has a single position")


# ---- topic_count_equally_divide


def test_topics_of_pip_143() -> None:
    for given_as in ({"topics": [10, 20, 80, 90]}, {"positions": [90, 10, 80, 20]}):
        assert SEED.split(BUNDLE, "topic_count_equally_divide", **given_as).boundaries == (50,)
    named = SEED.split(
        BUNDLE, "topic_count_equally_divide", topics=["t1", "t2", "t3", "t4"], positions=[10, 20, 80, 90]
    )
    assert named.boundaries == (50,)


def test_four_bundles_of_pip_143() -> None:
    for found in (
        SEED.split(BUNDLE, "topic_count_equally_divide", topics=[10, 20, 80, 90], parts=4),
        SEED.split(BUNDLE, "specified_positions_divide", topics=[10, 20, 80, 90], positions=[15, 50, 85]),
    ):
        assert found.boundaries == (15, 50, 85)
        assert found.map == BundleMap([0, 15, 50, 85, 0x200, LAST])


def test_topics_of_pulsars_own_test() -> None:
    assert ALL.split(WHOLE, "topic_count_equally_divide", topics=["a", "b", "c"]).boundaries == (1010591668,)


def test_topics_of_other_bundles_do_not_count() -> None:
    found = SEED.split(BUNDLE, "topic_count_equally_divide", topics=[10, 20, 80, 90, 0x200, 5000, LAST])
    assert found.boundaries == (50,)


@pytest.mark.parametrize("topics", [[], [10], [10, 10], [0x200, 10]])
def test_one_topic_is_not_parted_by_count(topics: list[int]) -> None:
    found = SEED.split(BUNDLE, "topic_count_equally_divide", topics=topics)
    assert found.map is SEED
    assert found.boundaries == ()
    assert "nothing to part" in str(found.reason)


@untimed
@given(st.lists(st.integers(0, LAST), min_size=2, max_size=12, unique=True), st.integers(2, 5))
def test_every_cut_by_count_parts_topics(topics: list[int], parts: int) -> None:
    if sorted(topics) == [LAST - 1, LAST]:
        return  # no bundle can begin at the last position
    found = ALL.split(WHOLE, "topic_count_equally_divide", topics=topics, parts=parts)
    assert found.boundaries
    counts = [0] * len(found.map)
    for topic in topics:
        counts[found.map.index_at(topic)] += 1
    assert all(counts)
    assert parts > 2 or LAST in topics or max(counts) - min(counts) <= 1


def test_topics_at_one_position_stay_together() -> None:
    found = SEED.split(BUNDLE, "topic_count_equally_divide", positions=[10, 50, 50, 50])
    assert found.boundaries == (30,)
    found = SEED.split(BUNDLE, "topic_count_equally_divide", positions=[50, 50, 50])
    assert found.reason == "all 3 topics are at one position"


# ---- specified_positions_divide


def test_positions_of_pulsars_own_test() -> None:
    bundles = BundleMap([0, 1, 1000, LAST])
    positions = [-1, 0, 1, 100, 200, 500, 800, 1000, 1100]
    found = bundles.split("0x00000001_0x000003e8", "specified_positions_divide", positions=positions)
    assert found.boundaries == (100, 200, 500, 800)
    assert found.reason is None
    assert found.map == BundleMap([0, 1, 100, 200, 500, 800, 1000, LAST])


def test_positions_are_sorted_and_taken_once() -> None:
    found = SEED.split(BUNDLE, "specified_positions_divide", positions=[85, 15, 85, 50, 15])
    assert found.boundaries == (15, 50, 85)


@pytest.mark.parametrize(
    ("positions", "words"),
    [(None, "no positions were given"), ([], "no positions were given"), ([0, 0x200, 9999], "none of the positions")],
)
def test_without_positions_nothing_is_split(positions: list[int] | None, words: str) -> None:
    found = SEED.split(BUNDLE, "specified_positions_divide", positions=positions)
    assert found.map is SEED
    assert found.boundaries == ()
    assert words in str(found.reason)


@pytest.mark.parametrize("topics", [[], [10], [10, 0x200]])
def test_one_topic_is_split_only_when_forced(topics: list[int]) -> None:
    found = SEED.split(BUNDLE, "specified_positions_divide", topics=topics, positions=[15])
    assert found.map is SEED
    assert "unless forced" in str(found.reason)
    forced = SEED.split(BUNDLE, "specified_positions_divide", topics=topics, positions=[15], force=True)
    assert (forced.boundaries, forced.reason) == ((15,), None)


# ---- flow_or_qps_equally_divide

RATES = {position: (100.0 * number, 10e6 * number) for number, position in enumerate([10, 20, 80, 90, 100, 110], 1)}
LIMITS = {"max_records_per_s": 1100, "max_bytes_per_s": 110e6}


def test_rates_of_pip_169() -> None:
    names = {f"t{number}": rate for number, rate in enumerate(RATES.values(), 1)}
    for given_as in (
        {"load": RATES},
        {"load": BundleLoad(RATES)},
        {"load": names, "topics": list(names), "positions": list(RATES)},
    ):
        found = SEED.split(BUNDLE, "flow_or_qps_equally_divide", **given_as, **LIMITS)
        assert found.boundaries == (96,)


def test_either_limit_will_do() -> None:
    for one in LIMITS:
        assert SEED.split(BUNDLE, "flow_or_qps_equally_divide", load=RATES, **{one: LIMITS[one]}).boundaries == (96,)


def test_a_first_topic_over_the_limit_is_parted_from_the_next() -> None:
    load = {10: (2000, 0), 20: (49.5, 0), 30: (49.5, 0)}
    found = SEED.split(BUNDLE, "flow_or_qps_equally_divide", load=load, max_records_per_s=1010)
    assert found.boundaries == (16,)


def test_load_within_the_tolerance_is_not_split() -> None:
    load = {10: (500, 0), 20: (599, 0)}
    found = SEED.split(BUNDLE, "flow_or_qps_equally_divide", load=load, max_records_per_s=1000)
    assert found.map is SEED
    assert "within the limits of 1000" in str(found.reason)
    found = SEED.split(BUNDLE, "flow_or_qps_equally_divide", load=load, max_records_per_s=1000, tolerance=0.05)
    assert found.boundaries == (16,)


@pytest.mark.parametrize("load", [{}, {10: (5000, 0)}, {10: (5000, 0), 20: (0, 0)}, {10: (5000, 0), 0x200: (5000, 0)}])
def test_load_at_one_position_is_not_split(load: Any) -> None:
    found = SEED.split(BUNDLE, "flow_or_qps_equally_divide", load=load, max_records_per_s=100)
    assert found.map is SEED
    assert "nothing to part" in str(found.reason)


# ---- around topics


def test_outstanding_topics_get_bundles_of_their_own() -> None:
    names = [f"topic-{number}" for number in range(1000)]
    outstanding = ["topic-3", "topic-700", "topic-999"]
    found = ALL.isolate(WHOLE, outstanding)
    assert found == isolate(ALL, WHOLE, outstanding)
    for topic in outstanding:
        assert [name for name in names if found.map.find(name) == found.map.find(topic)] == [topic]
    position = hash_position("topic-3")
    assert {position, position + 1} <= set(found.boundaries)


def test_neighbours_share_a_cut() -> None:
    assert SEED.isolate(BUNDLE, [10, 11, 80]).boundaries == (10, 11, 12, 80, 81)
    assert SEED.isolate(BUNDLE, [0, 0x1FF]).boundaries == (1, 0x1FF)


def test_the_last_position_is_in_the_last_bundle() -> None:
    assert ALL.isolate(WHOLE, [LAST]).boundaries == (LAST - 1,)


def test_isolating_nothing_splits_nothing() -> None:
    assert ALL.isolate(WHOLE, []) == Split(ALL, (), "no topic was named")
    tiny = BundleMap([0, 1, LAST])
    assert tiny.isolate("0x00000000_0x00000001", [0]).reason == "0x00000000_0x00000001 has no other position"


def test_a_topic_of_another_bundle_is_not_isolated_silently() -> None:
    with pytest.raises(ValueError, match="topic 'a' at 0xe8b7be43 is not in the bundle 0x00000000_0x00000200"):
        SEED.isolate(BUNDLE, [10, "a"])


# ---- one's own


@pytest.fixture
def thirds() -> Any:
    @register("thirds")
    def thirds(request: Request) -> list[int]:
        if request.options.get("refuse"):
            raise NotSplit("not today")
        size = (request.upper - request.lower) // 3
        return [request.lower + 2 * size, request.lower + size, request.lower + size, request.upper]

    yield thirds
    del _algorithms["thirds"]


def test_an_algorithm_of_ones_own(thirds: Any) -> None:
    assert "thirds" in algorithms()
    assert SEED.split(BUNDLE, "thirds").boundaries == (170, 340)
    assert SEED.split(BUNDLE, "thirds", refuse=True) == Split(SEED, (), "not today")
    with pytest.raises(ValueError, match="there is an algorithm 'thirds' already"):
        register("thirds", thirds)


@pytest.mark.parametrize(("name", "algorithm"), [("", print), (None, print), ("mine", 7)])
def test_what_cannot_be_registered(name: Any, algorithm: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="algorithm"):
        register(name, algorithm)


# ---- refused

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("halve", {}, "no algorithm 'halve'"),
    ("topic_count_equally_divide", {}, "needs topics"),
    ("topic_count_equally_divide", {"topics": [1, 2], "parts": 1}, "parts must be .* not 1"),
    ("topic_count_equally_divide", {"topics": [1, 2], "part": 2}, "no option 'part'"),
    ("topic_count_equally_divide", {"topics": "orders"}, "'orders'"),
    ("topic_count_equally_divide", {"topics": [1.5, 2]}, "1.5"),
    ("topic_count_equally_divide", {"topics": ["a"], "positions": [1, 2]}, "1 topics, but 2 positions"),
    ("topic_count_equally_divide", {"positions": [-1, 2]}, "-1"),
    ("range_equally_divide", {"parts": 2}, "no option 'parts'"),
    ("specified_positions_divide", {"positions": [1.5]}, "1.5"),
    ("specified_positions_divide", {"positions": 15}, "15"),
    ("specified_positions_divide", {"positions": [True]}, "True"),
    ("flow_or_qps_equally_divide", {"load": RATES}, "needs max_records_per_s or max_bytes_per_s"),
    ("flow_or_qps_equally_divide", {"max_records_per_s": 5}, "needs load"),
    ("flow_or_qps_equally_divide", {"load": RATES, "max_records_per_s": 0}, "max_records_per_s .* not 0"),
    ("flow_or_qps_equally_divide", {"load": RATES, "max_bytes_per_s": "1M"}, "'1M'"),
    ("flow_or_qps_equally_divide", {"load": RATES, **LIMITS, "tolerance": -1}, "tolerance .* not -1"),
    ("flow_or_qps_equally_divide", {"load": {10: (-1, 0)}, **LIMITS}, "10 must be two numbers"),
    ("flow_or_qps_equally_divide", {"load": {10: 5}, **LIMITS}, "10 must be"),
    ("flow_or_qps_equally_divide", {"load": [10], **LIMITS}, "list"),
]


@pytest.mark.parametrize(("algorithm", "arguments", "words"), REFUSED)
def test_what_is_wrong_is_named(algorithm: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        SEED.split(BUNDLE, algorithm, **arguments)


def test_a_bundle_of_another_map_is_refused() -> None:
    with pytest.raises(ValueError, match=f"there is no bundle '{WHOLE}'"):
        SEED.split(WHOLE, "range_equally_divide")


# ---- any sequence of splits

steps = st.lists(
    st.tuples(
        st.integers(0, 1000),
        st.sampled_from(algorithms()[:4]),
        st.lists(st.integers(0, LAST), max_size=8),
    ),
    max_size=12,
)


@untimed
@given(steps, st.lists(st.integers(0, LAST), min_size=1, max_size=20))
def test_every_position_has_one_bundle_after_any_sequence_of_splits(steps: Any, probes: list[int]) -> None:
    bundles = ALL
    for number, algorithm, positions in steps:
        bundle = bundles.bundles[number % len(bundles)]
        options: dict[str, Any] = {"positions": positions}
        if algorithm == "flow_or_qps_equally_divide":
            options = {"load": dict.fromkeys(positions, (1, 0)), "max_records_per_s": 1}
        found = bundles.split(bundle, algorithm, **options)
        assert (found.map is bundles) == (found.reason is not None) == (not found.boundaries)
        assert set(found.map.boundaries) == {*bundles.boundaries, *found.boundaries}
        bundles = found.map
    ranges = [bundles.range_of(bundle) for bundle in bundles.bundles]
    for probe in [*probes, *bundles.boundaries]:
        holders = [one for one in ranges if one[0] <= probe < one[1] or probe == one[1] == LAST]
        assert holders == [bundles.range_of(bundles.find_position(probe))]
