"""Load table, sticky state and sizes against plain Python."""

import random

import pytest

from fastprod.partitioning import LoadTable, StickyState, record_size_upper_bound


def brute_table(queues: list[int], everyone: bool) -> list[int] | None:
    if not queues or (everyone and len(set(queues)) == 1):
        return None
    total, table = 0, []
    for queue in queues:
        total += max(queues) + 1 - queue
        table.append(total)
    return table


@pytest.mark.parametrize("seed", range(50))
def test_table_is_the_running_sum_of_weights(seed: int) -> None:
    source = random.Random(seed)
    queues = [source.randrange(source.choice([1, 3, 100, 2**40])) for _ in range(source.randrange(1, 60))]
    exclude = {p for p in range(len(queues)) if source.random() < 0.2}
    table = LoadTable(queues, exclude=exclude)
    kept = [p for p in range(len(queues)) if p not in exclude]
    assert table.partitions == kept
    assert table.cumulative == brute_table([queues[p] for p in kept], not exclude)
    for _ in range(100):
        number = source.randrange(2**62)
        if not kept:
            with pytest.raises(LookupError, match="excluded"):
                table.lookup(number)
        elif table.cumulative is None:
            assert table.lookup(number) == kept[number % len(kept)]
        else:
            index = next(i for i, entry in enumerate(table.cumulative) if entry > number % table.cumulative[-1])
            assert table.lookup(number) == kept[index]


def test_excluded_partitions_are_never_picked() -> None:
    table = LoadTable([0, 0, 0, 0], exclude=[1, 3])
    assert {table.lookup(n) for n in range(100)} == {0, 2}


def test_no_overflow_at_two_to_the_thirty() -> None:
    """Java's table overflows here."""
    table = LoadTable([0, 2**30, 2**30])
    assert table.cumulative == [2**30 + 1, 2**30 + 2, 2**30 + 3]
    assert LoadTable([2**40] + [0] * 9_999).cumulative[-1] == 9_999 * (2**40 + 1) + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queues": [1, -2]}, "-2"),
        ({"queues": [1], "exclude": [3]}, r"\[3\]"),
        ({"queues": [1, 2], "length": 3}, "length"),
    ],
)
def test_bad_queues_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoadTable(**arguments)


def test_a_negative_number_picks_nothing() -> None:
    with pytest.raises(ValueError, match="-1"):
        LoadTable([1, 2]).lookup(-1)


def test_sticky_switches_at_the_bound_when_the_batch_is_done() -> None:
    state = StickyState(100)
    assert not state.append(99, True)
    assert state.append(1, True)
    assert state.produced == 0


def test_sticky_waits_for_the_batch_up_to_twice_the_bound() -> None:
    state = StickyState(100)
    assert not state.append(199, False)
    assert state.append(1, False)


def test_a_sticky_bound_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="0"):
        StickyState(0)


def test_headers_count_in_the_size() -> None:
    plain = record_size_upper_bound(b"k", b"v")
    assert record_size_upper_bound(b"k", b"v", [("a", b"bc"), ("d", None)]) == plain + (2 + 3) + (2 + 1)
    assert record_size_upper_bound(b"k", b"v", {"a": b"bc"}) == plain + 5


def test_sizes_below_null_are_refused() -> None:
    with pytest.raises(ValueError, match="-2"):
        record_size_upper_bound(-2, 1)
