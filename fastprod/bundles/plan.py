"""Who writes what: bundles split where load is, and dealt out to writers.

    plan = plan(BundleMap.equal(16), BundleLoad.from_stats(*stats), writers=8)
    plan.writer_of("orders")                       # 0 to 7
    plan = reassign(plan, new_load)                # moves only what it must

A bundle is worth splitting while it has more than a writer's fair share and more than one topic. Whole bundles are then
dealt out, the heaviest first, each to whoever has least (Graham's rule, at most a third above the best there is); if
somebody still has more than the tolerance allows, what he has is split further.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from fastprod.bundles.load import BundleLoad, Load
from fastprod.bundles.map import LAST, BundleMap, hash_position
from fastprod.bundles.split import Request, check_tolerance

TOLERANCE = 0.1
UNITS = ("bytes", "records")


@dataclass(frozen=True)
class Move:
    """A bundle that changes its writer."""

    bundle: str
    source: int
    target: int


@dataclass(frozen=True)
class Plan:
    """Bundles and their writers, and what each writer can expect."""

    map: BundleMap
    assignment: Mapping[str, int]
    """The writer of each bundle, from 0 up."""
    writers: int
    loads: tuple[float, ...]
    """What each writer is to expect, in `unit`."""
    before: float
    """What the heaviest writer had without the plan: with the bundles as they were, dealt out in turn; or, after
    `reassign`, with the assignment as it was."""
    unit: str
    """Of the loads: "bytes" or "records", per second if the load was."""
    moves: tuple[Move, ...] = ()
    """After `reassign`: the bundles that have another writer than before."""

    @property
    def heaviest(self) -> float:
        """What the heaviest writer is to expect."""
        return max(self.loads)

    @property
    def mean(self) -> float:
        """A writer's fair share."""
        return math.fsum(self.loads) / self.writers

    def writer_of(self, topic: str) -> int:
        """The writer of a topic, from 0 up."""
        return self.assignment[self.map.bundles[self.map.index_at(hash_position(topic))]]

    def bundles_of(self, writer: int) -> tuple[str, ...]:
        """What a writer writes, in the order of positions."""
        if isinstance(writer, bool) or not isinstance(writer, int) or not 0 <= writer < self.writers:
            raise ValueError(f"there is no writer {writer!r}: they are 0 to {self.writers - 1}")
        return tuple(bundle for bundle in self.map.bundles if self.assignment[bundle] == writer)

    def to_dict(self) -> dict[str, Any]:
        """As plain dicts, lists and numbers, ready for JSON."""
        return {
            "map": json.loads(self.map.to_json()),
            "assignment": dict(self.assignment),
            "writers": self.writers,
            "unit": self.unit,
            "loads": list(self.loads),
            "heaviest": self.heaviest,
            "mean": self.mean,
            "before": self.before,
            "moves": [[move.bundle, move.source, move.target] for move in self.moves],
        }

    def __str__(self) -> str:
        moved = f", {len(self.moves)} moved" if self.moves else ""
        return (
            f"{len(self.map)} bundles for {self.writers} writers{moved}: the heaviest gets {self.heaviest:g} "
            f"{self.unit}, the mean is {self.mean:g}; it was {self.before:g}"
        )


def plan(map: BundleMap, load: Load, *, writers: int, tolerance: float = TOLERANCE, by: str | None = None) -> Plan:
    """Splits bundles until each is within `tolerance` of a writer's fair share or has a single topic; deals them out.

    `by` says what counts, "bytes" or "records"; without it bytes do, if any are known. The heaviest writer never gets
    more than it would without the plan.
    """
    _check_map(map)
    _check_writers(writers)
    ring = _Ring(BundleLoad.of(load), by)
    limit = ring.total / writers * (1 + check_tolerance(tolerance))
    in_turn = [index % writers for index in range(len(map))]
    loads = ring.loads(map)
    before = max(_per_writer(loads, in_turn, writers))

    # Whatever becomes of the pieces: left where their bundle was, they are no heavier than before.
    dealt = _lightest_first(loads, writers)
    owners = min((dealt, in_turn), key=lambda each: max(_per_writer(loads, each, writers)))
    fine = map
    while cuts := [
        cut for index, one in enumerate(ring.loads(fine)) if one > limit for cut in ring.halves(fine, index)
    ]:
        fine = fine.cut(cuts)
    best = (fine, _inherited(fine, map, owners))
    least = max(_per_writer(ring.loads(fine), best[1], writers))
    while True:
        loads = ring.loads(fine)
        owners = _lightest_first(loads, writers)
        shares = _per_writer(loads, owners, writers)
        if max(shares) < least:
            best, least = (fine, owners), max(shares)
        if least <= max(limit, max(loads)):
            break
        fullest = shares.index(max(shares))
        cuts = [cut for index, owner in enumerate(owners) if owner == fullest for cut in ring.halves(fine, index)]
        if not cuts:
            break
        fine = fine.cut(cuts)
    return _made(best[0], best[1], writers, ring, before)


def reassign(
    plan: Plan, load: Load, *, writers: int | None = None, tolerance: float = TOLERANCE, by: str | None = None
) -> Plan:
    """The plan for another load or another number of writers, with as little moved as can be.

    Nothing is moved while the heaviest writer is within `tolerance` of the mean. Otherwise the overloaded give just as
    much as they must, and split a bundle only when none of theirs fits elsewhere. No move of the result can be left
    out without making the heaviest writer heavier than it need be. Writers that no longer exist give all they have.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"reassign() wants a Plan, not {type(plan).__name__}")
    writers = plan.writers if writers is None else writers
    _check_writers(writers)
    ring = _Ring(BundleLoad.of(load), by or plan.unit)
    limit = ring.total / writers * (1 + check_tolerance(tolerance))
    had = [plan.assignment[bundle] for bundle in plan.map.bundles]
    before = max(_per_writer(ring.loads(plan.map), had, max(writers, plan.writers)))
    fine = plan.map
    while True:
        loads, old = ring.loads(fine), _inherited(fine, plan.map, had)
        owners = _evened(loads, old, writers, limit)
        shares = _per_writer(loads, owners, writers)
        if max(shares) <= limit:
            break
        fullest = shares.index(max(shares))
        mine = sorted((each for each, owner in enumerate(owners) if owner == fullest), key=lambda each: -loads[each])
        cuts = next(filter(None, (ring.halves(fine, index) for index in mine)), [])
        if not cuts:
            owners = _evened(loads, old, writers, limit, anything=True)
            break
        fine = fine.cut(cuts)
    old = _inherited(fine, plan.map, had)
    moves = tuple(
        Move(bundle, source, target)
        for bundle, source, target in zip(fine.bundles, old, owners, strict=True)
        if source != target
    )
    return _made(fine, owners, writers, ring, before, moves)


class _Ring:
    """The load at each position that has any."""

    def __init__(self, load: BundleLoad, by: str | None) -> None:
        if by is not None and by not in UNITS:
            raise ValueError(f"by must be one of {', '.join(UNITS)}, not {by!r}")
        self.unit = by or ("bytes" if any(one.bytes_per_s for one in load.topics.values()) else "records")
        field = 1 if self.unit == "bytes" else 0
        found: dict[int, list[float]] = {}
        for topic, position in load.positions():
            if load.topics[topic][field]:
                found.setdefault(position, []).append(load.topics[topic][field])
        self.positions = sorted(found)
        self.weights = [math.fsum(found[position]) for position in self.positions]
        self.total = math.fsum(self.weights)

    def loads(self, map: BundleMap) -> list[float]:
        """Of each bundle."""
        return [math.fsum(self.weights[slice(*self._inside(map, index))]) for index in range(len(map))]

    def halves(self, map: BundleMap, index: int) -> list[int]:
        """The cut that parts a bundle's load as evenly as can be; none if it is all at one position."""
        start, stop = self._inside(map, index)
        half, so_far = math.fsum(self.weights[start:stop]) / 2, 0.0
        bundle = Request(map.boundaries[index], map.boundaries[index + 1])
        choices = []
        for place in range(start + 1, stop):
            so_far += self.weights[place - 1]
            before, after = self.positions[place - 1], self.positions[place]
            cut = bundle.between(before, after, before + (after - before) // 2)
            if cut is not None:
                choices.append((abs(so_far - half), cut))
        return [min(choices)[1]] if choices else []

    def _inside(self, map: BundleMap, index: int) -> tuple[int, int]:
        lower, upper = map.boundaries[index], map.boundaries[index + 1]
        stop = bisect_right(self.positions, LAST) if upper == LAST else bisect_left(self.positions, upper)
        return bisect_left(self.positions, lower), stop


def _lightest_first(loads: Sequence[float], writers: int) -> list[int]:
    """Each bundle's writer: the heaviest bundle goes first, always to whoever has least."""
    owners = [0] * len(loads)
    shares, counts = [0.0] * writers, [0] * writers
    for index in sorted(range(len(loads)), key=lambda each: (-loads[each], each)):
        # Of writers with equal loads the one with fewer bundles: empty ones are dealt out evenly, too.
        owner = min(range(writers), key=lambda each: (shares[each], counts[each]))
        owners[index] = owner
        shares[owner] += loads[index]
        counts[owner] += 1
    return owners


def _evened(
    loads: Sequence[float], old: Sequence[int], writers: int, limit: float, anything: bool = False
) -> list[int]:
    """The owners after as few moves as will do: such that nobody gets beyond the limit by them; or, with `anything`,
    such that whoever gets something stays below whoever gives it."""
    owners = list(old)
    shares = _per_writer(loads, owners, max(writers, *old) + 1)[:writers] if old else []
    for index in sorted((each for each in range(len(old)) if old[each] >= writers), key=lambda each: -loads[each]):
        owners[index] = min(range(writers), key=lambda each: shares[each])
        shares[owners[index]] += loads[index]
    while True:
        full, light = shares.index(max(shares)), shares.index(min(shares))
        if shares[full] <= limit:
            break
        mine = [index for index, owner in enumerate(owners) if owner == full and loads[index]]
        fits = [index for index in mine if shares[light] + loads[index] <= limit]
        enough = [index for index in fits if shares[full] - loads[index] <= limit]
        helps = [index for index in mine if shares[light] + loads[index] < shares[full]]
        if enough:
            chosen = min(enough, key=loads.__getitem__)
        elif fits:
            chosen = max(fits, key=loads.__getitem__)
        elif helps and anything:
            chosen = min(helps, key=loads.__getitem__)
        else:
            break
        owners[chosen] = light
        shares = _per_writer(loads, owners, writers)
    # A later move can have made an earlier one needless.
    goal = max(limit, *shares)
    for index in sorted(range(len(old)), key=lambda each: -loads[each]):
        home = old[index]
        if home != owners[index] and home < writers:
            tried = [*owners[:index], home, *owners[index + 1 :]]
            if max(_per_writer(loads, tried, writers)) <= goal:
                owners = tried
    return owners


def _per_writer(loads: Sequence[float], owners: Sequence[int], writers: int) -> list[float]:
    shares: list[list[float]] = [[] for _ in range(writers)]
    for one, owner in zip(loads, owners, strict=True):
        shares[owner].append(one)
    return [math.fsum(share) for share in shares]


def _inherited(fine: BundleMap, map: BundleMap, owners: Sequence[int]) -> list[int]:
    """The owners of the bundles that those of a finer map are pieces of."""
    return [owners[map.index_at(lower)] for lower in fine.boundaries[:-1]]


def _made(
    map: BundleMap, owners: Iterable[int], writers: int, ring: _Ring, before: float, moves: tuple[Move, ...] = ()
) -> Plan:
    listed = list(owners)
    assignment = MappingProxyType(dict(zip(map.bundles, listed, strict=True)))
    loads = tuple(_per_writer(ring.loads(map), listed, writers))
    return Plan(map, assignment, writers, loads, before, ring.unit, moves)


def _check_map(map: object) -> None:
    if not isinstance(map, BundleMap):
        raise TypeError(f"plan() wants a BundleMap, not {type(map).__name__}")


def _check_writers(writers: object) -> None:
    if isinstance(writers, bool) or not isinstance(writers, int) or writers < 1:
        raise ValueError(f"writers must be a whole number from 1 up, not {writers!r}")
