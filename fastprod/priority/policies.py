"""How many records each level may have in the next poll. Pure arithmetic: no broker, no clock.

A level is a whole number from 0, the lowest, to `max_priority` - 1. A policy is asked for `capacities()` before a poll
and told by `observe()` what each level got. `CapacityBurst` is the rule of Flipkart's client; `Shares` and `Strict` are
simpler. Your own needs these two methods, and may have a third, `sized`, to learn how large a poll is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

Distributor = Callable[[int, int], Sequence[int]]


@runtime_checkable
class Policy(Protocol):
    """What `CapacityBurstConsumer` asks. Index = level."""

    def capacities(self) -> list[int]:
        """How many records each level may have in the next poll; together they may be more than a poll holds."""
        ...

    def observe(self, counts: Sequence[int]) -> None:
        """How many each level got in the last poll."""
        ...


def exponential(max_priority: int, max_poll_records: int) -> list[int]:
    """Each level twice the one below; what is left over goes to the highest.

    >>> exponential(3, 50)
    [7, 14, 29]
    """
    check_levels(max_priority)
    least = 2**max_priority - 1
    if not _is_whole(max_poll_records) or max_poll_records < least:
        raise ValueError(
            f"max_poll_records={max_poll_records!r} is too small: {max_priority} levels, each twice the one below, "
            f"need at least {least}"
        )
    unit = max_poll_records // least
    shares = [unit << level for level in range(max_priority)]
    shares[-1] += max_poll_records - sum(shares)
    return shares


class CapacityBurst:
    """Each level has a reserved capacity; a busy one borrows what the others have not used for a while.

    A level is eligible when at least `maxout_threshold` of its last `history` counts reached its reserved capacity. The
    highest eligible level then bursts: it may also have what each other level left unused in all of these polls. All
    others keep their own. `distributor` cuts `max_poll_records` into the reserved capacities.
    """

    def __init__(
        self,
        max_priority: int,
        max_poll_records: int,
        *,
        history: int = 6,
        maxout_threshold: int = 4,
        distributor: Distributor = exponential,
    ) -> None:
        check_levels(max_priority)
        if not _is_whole(history) or history < 1:
            raise ValueError(f"history={history!r} must be a whole number from 1 up: so many polls are looked back")
        if not _is_whole(maxout_threshold) or not 1 <= maxout_threshold <= history:
            raise ValueError(
                f"maxout_threshold={maxout_threshold!r} must be from 1 to history={history}: so many of these polls "
                "must have reached the reserved capacity"
            )
        self.reserved = _checked_distribution(distributor, max_priority, max_poll_records)
        self.maxout_threshold = maxout_threshold
        self._counts = [deque([0] * history, maxlen=history) for _ in range(max_priority)]
        # How many of these reached the reserved capacity.
        self._reached = [history if not own else 0 for own in self.reserved]

    def capacities(self) -> list[int]:
        bursting = self.bursting()
        granted = list(self.reserved)
        if bursting is not None:
            granted[bursting] += sum(self._unused(level) for level in range(len(granted)) if level != bursting)
        return granted

    def bursting(self) -> int | None:
        """The level that may borrow now, if any."""
        for level in range(len(self.reserved) - 1, -1, -1):
            if self._reached[level] >= self.maxout_threshold:
                return level
        return None

    def observe(self, counts: Sequence[int]) -> None:
        _check_counts(counts, len(self.reserved))
        for level, (seen, own, count) in enumerate(zip(self._counts, self.reserved, counts, strict=True)):
            self._reached[level] += (count >= own) - (seen[0] >= own)
            seen.append(count)

    def _unused(self, level: int) -> int:
        return max(0, self.reserved[level] - max(self._counts[level]))

    def __repr__(self) -> str:
        return f"<CapacityBurst reserved={self.reserved} bursting={self.bursting()}>"


class Shares:
    """Explicit shares of a poll; what a level did not want last time goes to the highest level that wanted more.

    `Shares({2: 0.7, 1: 0.2, 0: 0.1})`. Every level needs a share; they are taken relative to their sum. A share above 0
    is at least one record.
    """

    def __init__(self, shares: Mapping[int, float], max_poll_records: int | None = None) -> None:
        if not isinstance(shares, Mapping) or sorted(shares) != list(range(len(shares))) or not shares:
            raise ValueError(f"shares must have one for each level from 0 up, as in {{1: 0.8, 0: 0.2}}, not {shares!r}")
        for level, share in shares.items():
            if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share < math.inf:
                raise ValueError(f"the share of level {level} must be a number from 0 up, not {share!r}")
        if not sum(shares.values()):
            raise ValueError("at least one level needs a share above 0")
        self.shares = [shares[level] for level in range(len(shares))]
        self._reserved: list[int] | None = None
        self._wants = [False] * len(shares)
        self._spare = 0
        if max_poll_records is not None:
            self.sized(len(shares), max_poll_records)

    def sized(self, max_priority: int, max_poll_records: int) -> None:
        """Called by the consumer: so many levels and records in a poll."""
        if max_priority != len(self.shares):
            raise ValueError(f"there are shares for {len(self.shares)} levels, but max_priority={max_priority}")
        _check_records(max_poll_records, sum(share > 0 for share in self.shares))
        self._reserved = _proportional(self.shares, max_poll_records)

    @property
    def reserved(self) -> list[int]:
        if self._reserved is None:
            raise ValueError(
                "Shares(...) does not know how large a poll is: give max_poll_records, or use it in a consumer"
            )
        return list(self._reserved)

    def capacities(self) -> list[int]:
        granted = self.reserved
        for level in reversed(range(len(granted))):
            if self._wants[level]:
                granted[level] += self._spare
                break
        return granted

    def observe(self, counts: Sequence[int]) -> None:
        reserved = self.reserved
        _check_counts(counts, len(reserved))
        # A level without a share wants whatever there is.
        self._wants = [count >= own for count, own in zip(counts, reserved, strict=True)]
        self._spare = sum(max(0, own - count) for count, own in zip(counts, reserved, strict=True))

    def __repr__(self) -> str:
        return f"<Shares {dict(enumerate(self.shares))}>"


class Strict:
    """The highest level first, as long as it has records (KIP-349); each other may have at least `floor` of every poll.

    With `floor=0` a busy level keeps all lower ones waiting for ever.
    """

    def __init__(self, max_priority: int | None = None, max_poll_records: int | None = None, *, floor: int = 1) -> None:
        if not _is_whole(floor) or floor < 0:
            raise ValueError(f"floor={floor!r} must be a whole number from 0 up: records of each level in every poll")
        self.floor = floor
        self._size: tuple[int, int] | None = None
        if max_priority is not None and max_poll_records is not None:
            self.sized(max_priority, max_poll_records)

    def sized(self, max_priority: int, max_poll_records: int) -> None:
        """Called by the consumer: so many levels and records in a poll."""
        check_levels(max_priority)
        _check_records(max_poll_records, max(1, self.floor * max_priority))
        self._size = (max_priority, max_poll_records)

    @property
    def reserved(self) -> list[int]:
        levels, _ = self._sized()
        return [self.floor] * levels

    def capacities(self) -> list[int]:
        levels, records = self._sized()
        return [records - self.floor * (levels - 1)] * levels

    def observe(self, counts: Sequence[int]) -> None:
        _check_counts(counts, self._sized()[0])

    def _sized(self) -> tuple[int, int]:
        if self._size is None:
            raise ValueError(
                "Strict(...) does not know how large a poll is: give max_priority and max_poll_records, or use it "
                "in a consumer"
            )
        return self._size

    def __repr__(self) -> str:
        return f"<Strict floor={self.floor}>"


def check_levels(max_priority: object) -> None:
    if not _is_whole(max_priority) or max_priority < 1:  # type: ignore[operator]
        raise ValueError(f"max_priority={max_priority!r} must be a whole number from 1 up: the number of levels")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_records(max_poll_records: int, least: int) -> None:
    if not _is_whole(max_poll_records) or max_poll_records < least:
        raise ValueError(f"max_poll_records={max_poll_records!r} is too small: it must be at least {least} here")


def _check_counts(counts: Sequence[int], levels: int) -> None:
    right = len(counts) == levels
    for count in counts:
        right = right and _is_whole(count) and count >= 0
    if not right:
        raise ValueError(f"observe() wants the records of {levels} levels, from level 0 up, not {counts!r}")


def _checked_distribution(distributor: Distributor, max_priority: int, max_poll_records: int) -> list[int]:
    shares = distributor(max_priority, max_poll_records)
    try:
        found = list(shares)
    except TypeError:
        found = []
    if (
        len(found) != max_priority
        or any(not _is_whole(share) or share < 1 for share in found)
        or sum(found) > max_poll_records
    ):
        raise ValueError(
            f"the distributor must give {max_priority} whole numbers from 1 up that add up to {max_poll_records} at "
            f"most, not {shares!r}"
        )
    return found


def _proportional(shares: Sequence[float], records: int) -> list[int]:
    """Whole numbers as near to the shares as they get; none of a share above 0 is 0. Ties go to the higher level."""
    total = sum(shares)
    exact = [records * share / total for share in shares]
    whole = [max(math.floor(each), int(share > 0)) for each, share in zip(exact, shares, strict=True)]
    while sum(whole) != records:
        step = 1 if sum(whole) < records else -1
        able = [level for level in range(len(shares)) if shares[level] > 0 and whole[level] + step >= 1]
        whole[max(able, key=lambda level: (step * (exact[level] - whole[level]), step * level))] += step
    return whole
