"""Splitting a bundle: where to cut it, by Pulsar's four algorithms, one of your own, or around named topics.

| algorithm | cuts |
|---|---|
| `range_equally_divide` | in the middle of the range |
| `topic_count_equally_divide` | so that each part has as many topics; `parts=2` |
| `specified_positions_divide` | at the given `positions` (PIP-143) |
| `flow_or_qps_equally_divide` | before a part exceeds `max_records_per_s` or `max_bytes_per_s` (PIP-169) |

An algorithm says at which positions it would cut, or raises `NotSplit` with a reason; what it says is sorted, and
what is not inside of the bundle is dropped. Where Pulsar's own cut would leave two topics at neighbouring positions
together, the cut is one further: it always parts what it was meant to part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, overload

from fastprod.bundles.load import BundleLoad, Load, TopicLoad
from fastprod.bundles.map import LAST, BundleMap, _checked, hash_position, hash_positions, whole

TOLERANCE = 0.1  # over the limits before flow_or_qps_equally_divide splits: Pulsar's default


class NotSplit(Exception):
    """Raised by an algorithm that would not split; its text becomes `Split.reason`."""


@dataclass(frozen=True)
class Split:
    """What became of a bundle."""

    map: BundleMap
    """With the bundle split; the one that was given when nothing was."""
    boundaries: tuple[int, ...]
    """The positions it was split at, sorted."""
    reason: str | None = None
    """Why nothing was split; None when something was."""


@dataclass(frozen=True)
class Request:
    """What an algorithm is asked: to cut the bundle from `lower` to `upper`."""

    lower: int
    upper: int
    """Outside of the bundle, unless it is 0xffffffff."""
    topics: tuple[int, ...] | None = None
    """Sorted positions of the topics inside, if the caller knows them; equal ones for topics at one position."""
    positions: tuple[int, ...] | None = None
    """The positions that the caller gave, as they were given."""
    loads: tuple[tuple[int, TopicLoad], ...] | None = None
    """The load at each position inside that has any, sorted, if the caller knows it."""
    force: bool = False
    """Split even if there is nothing to part."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the caller gave by name."""

    def has(self, position: int) -> bool:
        """Whether a position is inside of the bundle."""
        return self.lower <= position < self.upper or position == self.upper == LAST

    def between(self, before: int, after: int, middle: int) -> int | None:
        """The allowed cut nearest to `middle` that parts two positions, None if there is none."""
        cut = min(max(middle, before + 1), after, self.upper - 1)
        return cut if before < cut else None


Algorithm = Callable[[Request], Iterable[int]]
_algorithms: dict[str, Algorithm] = {}


@overload
def register(name: str) -> Callable[[Algorithm], Algorithm]: ...


@overload
def register(name: str, algorithm: Algorithm) -> Algorithm: ...


def register(name: str, algorithm: Algorithm | None = None) -> Algorithm | Callable[[Algorithm], Algorithm]:
    """Makes an algorithm known to `split` under a name; also as a decorator, `@register("mine")`."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"the name of an algorithm must be a text, not {name!r}")
    if algorithm is None:
        return lambda given: register(name, given)
    if not callable(algorithm):
        raise TypeError(f"the algorithm {name!r} must be callable, not {algorithm!r}")
    if name in _algorithms:
        raise ValueError(f"there is an algorithm {name!r} already")
    _algorithms[name] = algorithm
    return algorithm


def algorithms() -> tuple[str, ...]:
    """The names that `split` knows."""
    return tuple(_algorithms)


def split(
    map: BundleMap,
    bundle: str,
    algorithm: str,
    *,
    topics: Iterable[str | int] | None = None,
    positions: Iterable[int] | None = None,
    load: Load | None = None,
    force: bool = False,
    **options: Any,
) -> Split:
    """Splits one bundle of a map.

    `topics` are names, or positions for whoever has no names; those of other bundles do not count. `positions` are
    where `specified_positions_divide` cuts; to the other algorithms they are where the topics are, one for each of
    `topics` if these are given. `load` is a `BundleLoad`, or (records/s, bytes/s) by topic. `force` lets
    `specified_positions_divide` cut a bundle with one topic or none. `options` are the algorithm's own.
    """
    lower, upper = map.range_of(bundle)
    if algorithm not in _algorithms:
        raise ValueError(f"there is no algorithm {algorithm!r}, only {', '.join(_algorithms)}")
    cuts_given = algorithm == "specified_positions_divide"
    given = None if positions is None else tuple(whole(each) for each in _many(positions, "positions"))
    placed = _placed(topics, None if cuts_given else given)
    loads = None if load is None else BundleLoad.of(load)
    empty = Request(lower, upper)
    request = Request(
        lower,
        upper,
        None if placed is None else tuple(sorted(each for _, each in placed if empty.has(each))),
        given,
        None if loads is None else _loads_inside(loads, placed, empty),
        force,
        options,
    )
    try:
        found = sorted({whole(each) for each in _algorithms[algorithm](request)})
    except NotSplit as refusal:
        return Split(map, (), str(refusal))
    inside = tuple(each for each in found if lower < each < upper)
    if not inside:
        return Split(map, (), f"none of the positions {_few(found)} is inside of {bundle}")
    return Split(map.cut(inside), inside)


def isolate(map: BundleMap, bundle: str, topics: Iterable[str | int]) -> Split:
    """Splits a bundle in one step so that each of the topics has a bundle of its own.

    The cuts are right around each topic's position: no other topic, known or not, shares its bundle unless it has the
    same position.
    """
    lower, upper = map.range_of(bundle)
    inside = Request(lower, upper)
    cuts = set()
    for topic, position in _placed(topics, None) or ():
        if not inside.has(position):
            raise ValueError(f"topic {topic!r} at {position:#010x} is not in the bundle {bundle}")
        cuts |= {position, position + 1}
    if not cuts:
        return Split(map, (), "no topic was named")
    # 0xffffffff is in the last bundle, but no bundle can begin there.
    if LAST in cuts:
        cuts.add(LAST - 1)
    around = tuple(sorted(cut for cut in cuts if lower < cut < upper))
    if not around:
        return Split(map, (), f"{bundle} has no other position")
    return Split(map.cut(around), around)


# ---- Pulsar's algorithms


@register("range_equally_divide")
def _range(request: Request) -> list[int]:
    _take(request.options)
    if request.upper - request.lower < 2:
        raise NotSplit("the bundle has a single position")
    return [request.lower + (request.upper - request.lower) // 2]


@register("topic_count_equally_divide")
def _topic_count(request: Request) -> list[int]:
    parts = _take(request.options, parts=2)["parts"]
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 2:
        raise ValueError(f"parts must be a whole number from 2 up, not {parts!r}")
    topics = request.topics
    if topics is None:
        raise ValueError("topic_count_equally_divide needs topics")
    if len(topics) <= 1:
        raise NotSplit(f"the bundle has {len(topics)} of the topics: there is nothing to part")
    cuts = []
    for part in range(1, parts):
        # Topics at one position stay together: the nearest place where two of them can be parted.
        wanted = len(topics) * part // parts
        for index in _outward(wanted, 1, len(topics)):
            before, after = topics[index - 1], topics[index]
            cut = request.between(before, after, before + (after - before) // 2)
            if cut is not None:
                cuts.append(cut)
                break
    if not cuts:
        raise NotSplit(f"all {len(topics)} topics are at one position")
    return cuts


def _outward(middle: int, start: int, stop: int) -> Iterator[int]:
    """The numbers from `start` to `stop`, the nearest to `middle` first."""
    for distance in range(stop - start + 1):
        for index in dict.fromkeys((middle - distance, middle + distance)):
            if start <= index < stop:
                yield index


@register("specified_positions_divide")
def _specified(request: Request) -> tuple[int, ...]:
    _take(request.options)
    if not request.positions:
        raise NotSplit("no positions were given")
    if request.topics is not None and len(request.topics) <= 1 and not request.force:
        raise NotSplit(f"the bundle has {len(request.topics)} of the topics: there is nothing to part, unless forced")
    return request.positions


@register("flow_or_qps_equally_divide")
def _flow(request: Request) -> list[int]:
    options = _take(request.options, max_records_per_s=math.inf, max_bytes_per_s=math.inf, tolerance=TOLERANCE)
    limits = TopicLoad(_limit(options, "max_records_per_s"), _limit(options, "max_bytes_per_s"))
    tolerance = check_tolerance(options["tolerance"])
    if limits == (math.inf, math.inf):
        raise ValueError("flow_or_qps_equally_divide needs max_records_per_s or max_bytes_per_s")
    if request.loads is None:
        raise ValueError("flow_or_qps_equally_divide needs load")
    loads = request.loads
    if len(loads) <= 1:
        raise NotSplit(f"the bundle has load at {len(loads)} position{'s' * (not loads)}: there is nothing to part")
    total = TopicLoad(math.fsum(one.records_per_s for _, one in loads), math.fsum(one.bytes_per_s for _, one in loads))
    if all(one < limit * (1 + tolerance) for one, limit in zip(total, limits, strict=True)):
        raise NotSplit(
            f"{total.records_per_s:g} records/s and {total.bytes_per_s:g} bytes/s are within the limits of "
            f"{limits.records_per_s:g} and {limits.bytes_per_s:g} and a tolerance of {tolerance:g}"
        )
    cuts = []
    before, sum = loads[0]
    for position, one in loads[1:]:
        if any(each > limit for each, limit in zip(sum + one, limits, strict=True)):
            cut = request.between(before, position, before + (position - before) // 2 + 1)
            if cut is not None:
                cuts.append(cut)
                sum = TopicLoad(0, 0)
        sum += one
        before = position
    if not cuts:
        raise NotSplit("no place was found where a cut would help")
    return cuts


# ---- what was given


def check_tolerance(tolerance: object) -> float:
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 <= tolerance < math.inf:
        raise ValueError(f"tolerance must be a number from 0 up, as 0.1 for a tenth, not {tolerance!r}")
    return tolerance


def _take(options: Mapping[str, Any], **known: Any) -> dict[str, Any]:
    """The algorithm's options with its defaults; one that it does not know is an error."""
    for name in options:
        if name not in known:
            raise TypeError(
                f"the algorithm has no option {name!r}" + (f", only {', '.join(known)}" if known else " and no other")
            )
    return {**known, **options}


def _limit(options: Mapping[str, Any], name: str) -> float:
    limit = options[name]
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        raise ValueError(f"{name} must be a number above 0, not {limit!r}")
    return float(limit)


def _many(given: object, what: str) -> list[Any]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"{what} must be several, as in a list, not {given!r}")
    return list(given)


def _placed(
    topics: Iterable[str | int] | None, positions: tuple[int, ...] | None
) -> list[tuple[str | int, int]] | None:
    """Topics with their positions, which are hashed unless they are given."""
    if topics is None:
        return None if positions is None else [(each, _checked(each)) for each in positions]
    names = list(dict.fromkeys(_many(topics, "topics"))) if positions is None else _many(topics, "topics")
    if positions is None:
        if names and all(isinstance(name, str) for name in names):
            return list(zip(names, hash_positions(names).tolist(), strict=True))
        return [(name, position_of(name)) for name in names]
    if len(names) != len(positions):
        raise ValueError(f"there are {len(names)} topics, but {len(positions)} positions for them")
    return [(name, _checked(position)) for name, position in zip(names, positions, strict=True)]


def position_of(topic: str | int) -> int:
    """A topic's position: that of its name, or the number that it is given by."""
    return hash_position(topic) if isinstance(topic, str) else _checked(topic)


def _loads_inside(
    load: BundleLoad, placed: list[tuple[str | int, int]] | None, bundle: Request
) -> tuple[tuple[int, TopicLoad], ...]:
    """The load of each position of the bundle that has any; of the given topics only, if some are given."""
    found: dict[int, TopicLoad] = {}
    known = load.positions() if placed is None else placed
    for topic, position in known:
        one = load.topics.get(topic)
        if one is not None and any(one) and bundle.has(position):
            found[position] = found.get(position, TopicLoad(0, 0)) + one
    return tuple(sorted(found.items()))


def _few(positions: list[int]) -> str:
    return ", ".join(map(str, positions[:5])) + (", ..." if len(positions) > 5 else "") or "(there are none)"
