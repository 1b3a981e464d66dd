"""Capacities of levels: the seed's numbers, and what must hold whatever happens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastprod.priority.policies import CapacityBurst, Policy, Shares, Strict, exponential


@pytest.mark.parametrize(
    ("levels", "records", "wanted"),
    [(3, 50, [7, 14, 29]), (3, 10, [1, 2, 7]), (3, 7, [1, 2, 4]), (1, 1, [1]), (1, 500, [500]), (2, 3, [1, 2])],
)
def test_exponential(levels: int, records: int, wanted: list[int]) -> None:
    assert exponential(levels, records) == wanted


@pytest.mark.parametrize(("levels", "records"), [(3, 6), (3, 2), (1, 0), (10, 1022)])
def test_too_few_records_for_the_levels(levels: int, records: int) -> None:
    with pytest.raises(ValueError, match=f"max_poll_records={records} is too small.*at least {2**levels - 1}"):
        exponential(levels, records)


@pytest.mark.parametrize("levels", [0, -1, 1.5, "3", None, True])
def test_a_wrong_number_of_levels_is_named(levels: Any) -> None:
    with pytest.raises(ValueError, match="max_priority="):
        exponential(levels, 50)
    with pytest.raises(ValueError, match="max_priority="):
        CapacityBurst(levels, 50)


@pytest.mark.parametrize(
    ("windows", "wanted"),
    [
        (([7] * 6, [14] * 6, [29] * 6), [7, 14, 29]),
        (([7] * 6, [14, 14, 14, 11, 10, 9], [29] * 6), [7, 14, 29]),
        (([7] * 6, [10, 10, 7, 10, 9, 0], [29] * 6), [7, 14, 33]),
        (([7] * 6, [10, 10, 7, 10, 9, 0], [20, 25, 25, 20, 15, 10]), [15, 14, 29]),
    ],
)
def test_the_four_cases_of_the_original(windows: tuple[list[int], ...], wanted: list[int]) -> None:
    policy = CapacityBurst(3, 50)
    assert policy.capacities() == [7, 14, 29], "windows start with zeros"
    for counts in zip(*windows, strict=True):
        policy.observe(counts)
    assert policy.capacities() == wanted


def test_a_level_that_has_burst_is_still_eligible_and_gives_way_within_a_window() -> None:
    policy = CapacityBurst(3, 50)
    for _ in range(4):
        policy.observe([7, 0, 0])
    assert policy.capacities() == [50, 14, 29]
    for _ in range(6):
        policy.observe([50, 0, 0])
    assert policy.capacities() == [50, 14, 29]
    polls = 0
    while policy.bursting() == 0:  # the highest level wakes up
        policy.observe([7, 14, 29])
        polls += 1
    assert polls <= 4
    assert policy.capacities() == [7, 14, 29]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"history": 0}, "history=0"),
        ({"history": 2.5}, "history=2.5"),
        ({"maxout_threshold": 7}, "maxout_threshold=7 must be from 1 to history=6"),
        ({"maxout_threshold": 0}, "maxout_threshold=0"),
        ({"distributor": lambda levels, records: [1, 2]}, r"3 whole numbers.*not \[1, 2\]"),
        ({"distributor": lambda levels, records: [0, 1, 2]}, "from 1 up"),
        ({"distributor": lambda levels, records: [20, 20, 20]}, "50 at most"),
        ({"distributor": lambda levels, records: None}, "not None"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        CapacityBurst(3, 50, **options)


@pytest.mark.parametrize("counts", [[1, 2], [1, 2, -3], [1, 2, 3, 4], [1, 2, 2.5]])
def test_counts_that_cannot_be(counts: list[int]) -> None:
    for policy in (CapacityBurst(3, 50), Shares({2: 0.7, 1: 0.2, 0: 0.1}, 50), Strict(3, 50)):
        with pytest.raises(ValueError, match="3 levels"):
            policy.observe(counts)


# ---- shares


def test_shares_are_kept_and_what_is_not_wanted_goes_to_the_highest_that_wants_more() -> None:
    policy = Shares({2: 0.7, 1: 0.2, 0: 0.1}, 50)
    assert policy.capacities() == [5, 10, 35]
    policy.observe([5, 10, 0])
    assert policy.capacities() == [5, 45, 35]
    policy.observe([5, 3, 0])
    assert policy.capacities() == [47, 10, 35]
    policy.observe([5, 10, 35])
    assert policy.capacities() == [5, 10, 35]


@pytest.mark.parametrize(
    ("shares", "named"),
    [
        ({}, "one for each level"),
        ({1: 1.0}, "one for each level"),
        ({0: 0.5, 2: 0.5}, "one for each level"),
        ({0: -1}, "level 0"),
        ({0: 1, 1: float("nan")}, "level 1"),
        ({0: 0, 1: 0}, "above 0"),
        ([0.1, 0.9], "one for each level"),
    ],
)
def test_wrong_shares_are_named(shares: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Shares(shares, 50)


def test_policies_that_do_not_know_the_size_of_a_poll_say_so() -> None:
    for policy in (Shares({0: 1}), Strict()):
        with pytest.raises(ValueError, match="how large a poll is"):
            policy.capacities()
    with pytest.raises(ValueError, match="shares for 1 levels, but max_priority=3"):
        Shares({0: 1}).sized(3, 50)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8).filter(sum), st.integers(8, 5000))
def test_shares_add_up_and_none_is_forgotten(shares: list[float], records: int) -> None:
    policy = Shares(dict(enumerate(shares)), records)
    assert sum(policy.reserved) == records
    total = sum(shares)
    for share, own in zip(shares, policy.reserved, strict=True):
        assert (own > 0) == (share > 0)
        assert abs(own - records * share / total) < len(shares) + 1


# ---- what holds whatever happens: a model of a consumer that serves reserved capacity first, then bursts, high first


def served(policy: Policy, reserved: Sequence[int], waiting: Sequence[int], records: int) -> list[int]:
    capacities = policy.capacities()
    got = [min(*each) for each in zip(waiting, reserved, capacities, strict=True)]
    for level in reversed(range(len(got))):
        got[level] += max(0, min(waiting[level], capacities[level]) - got[level]) if sum(got) < records else 0
        got[level] -= max(0, sum(got) - records)
    return got


levels = st.integers(1, 5)


@st.composite
def runs(draw: st.DrawFn) -> tuple[Policy, int, list[list[int]]]:
    count = draw(levels)
    records = draw(st.integers(2**count - 1, 300))
    kind = draw(st.sampled_from(["burst", "shares", "strict"]))
    policy: Policy
    if kind == "burst":
        history = draw(st.integers(1, 8))
        policy = CapacityBurst(count, records, history=history, maxout_threshold=draw(st.integers(1, history)))
    elif kind == "shares":
        policy = Shares({level: draw(st.floats(0.01, 1)) for level in range(count)}, records)
    else:
        policy = Strict(count, records, floor=draw(st.integers(0, records // count)))
    arrivals = draw(st.lists(st.lists(st.integers(0, 400), min_size=count, max_size=count), min_size=1, max_size=60))
    return policy, records, arrivals


@settings(deadline=None, max_examples=300)
@given(runs())
def test_never_above_a_poll_reserved_is_always_there_and_nobody_starves(run: tuple[Any, int, list[list[int]]]) -> None:
    policy, records, arrivals = run
    waiting = [0] * len(arrivals[0])
    for new in arrivals:
        waiting = [old + more for old, more in zip(waiting, new, strict=True)]
        capacities = policy.capacities()
        reserved = policy.reserved
        assert sum(reserved) <= records
        assert all(capacity >= own for capacity, own in zip(capacities, reserved, strict=True))
        got = served(policy, reserved, waiting, records)
        assert sum(got) <= records
        assert all(count >= min(*each) for count, *each in zip(got, waiting, reserved, strict=True))
        if isinstance(policy, Strict) and policy.floor == 0:
            for level, count in enumerate(got):
                if any(got[:level]):
                    assert count == min(waiting[level], capacities[level])
        policy.observe(got)
        waiting = [old - count for old, count in zip(waiting, got, strict=True)]


@settings(deadline=None)
@given(levels, st.integers(1, 20), st.data())
def test_a_burst_is_exactly_what_the_others_have_not_used(count: int, factor: int, data: st.DataObject) -> None:
    records = (2**count - 1) * factor + data.draw(st.integers(0, 10))
    policy = CapacityBurst(count, records)
    history = [
        [data.draw(st.integers(0, policy.reserved[level])) for level in range(count)]
        for _ in range(data.draw(st.integers(0, 12)))
    ]
    for counts in history:
        policy.observe(counts)
    window = ([[0] * count] * 6 + history)[-6:]
    eligible = [
        level for level in range(count) if sum(counts[level] >= policy.reserved[level] for counts in window) >= 4
    ]
    wanted = list(policy.reserved)
    if eligible:
        wanted[max(eligible)] += sum(
            min(policy.reserved[level] - counts[level] for counts in window)
            for level in range(count)
            if level != max(eligible)
        )
    assert policy.capacities() == wanted
