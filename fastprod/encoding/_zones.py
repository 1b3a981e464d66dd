"""Time zones as tables that C code can search: when the offset from UTC changes, and to what.

Python's zoneinfo tells the offset at a time, but not when it changes. So it is asked day by day, where people decided
about clocks, and week by week from then on, where a rule does; the second of a change is found by halving. No zone has
changed twice within a day. Rules repeat with the calendar after 400 years, so that a table to 2500 is enough for ever.
"""

from __future__ import annotations

import datetime as dt
import re
import zoneinfo
from functools import lru_cache
from typing import Any

DAY = 86_400
FIRST = int(dt.datetime(1800, 1, 1, tzinfo=dt.UTC).timestamp())  # before any clock was set by law
RULES = int(dt.datetime(2100, 1, 1, tzinfo=dt.UTC).timestamp())  # changes that tzdata lists one by one end in 2087
LAST = RULES + 146_097 * DAY  # 400 years

# First offset; times of changes and offsets from then on, or None; from when on everything repeats after 400 years
Zone = tuple[int, Any, Any, int]

_fixed = re.compile(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d{2})(?::?(\d{2}))?)?")


@lru_cache(maxsize=64)
def zone_of(name: str) -> Zone:
    """The table of a zone: 'Europe/Berlin', 'UTC', '+05:30', 'GMT+2'. ValueError if there is none of that name."""
    if name in ("UTC", "GMT", "UT", "Z", "Etc/UTC"):
        return 0, None, None, 0
    fixed = _fixed.fullmatch(name)
    if fixed is not None:
        hours, minutes, seconds = (int(part or 0) for part in fixed.groups()[1:])
        if hours > 18 or minutes > 59 or seconds > 59:
            raise ValueError(f"timezone {name!r}: an offset is at most 18 hours")
        offset = 3600 * hours + 60 * minutes + seconds
        return (-offset if fixed[1] == "-" else offset), None, None, 0
    try:
        zone = zoneinfo.ZoneInfo(name)
    except (ValueError, OSError, zoneinfo.ZoneInfoNotFoundError) as error:
        raise ValueError(
            f"timezone {name!r} is not known: give a name such as 'Europe/Berlin', 'UTC' or '+05:30' "
            "(names need the system's time zones or the package tzdata)"
        ) from error
    return _table(zone)


def _table(zone: zoneinfo.ZoneInfo) -> Zone:
    import numpy as np

    def offset_at(second: int) -> int:
        offset = dt.datetime.fromtimestamp(second, zone).utcoffset()
        assert offset is not None
        return int(offset.total_seconds())

    first = before = offset_at(FIRST)
    starts, offsets = [], []
    for step, start, stop in ((DAY, FIRST, RULES), (7 * DAY, RULES, LAST)):
        for second in range(start + step, stop + 1, step):
            after = offset_at(second)
            if after == before:
                continue
            low, high = second - step, second  # the change is behind low, at or before high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if offset_at(middle) == before else (low, middle)
            starts.append(high)
            offsets.append(after)
            before = after
    if not starts:
        return first, None, None, 0
    return first, np.array(starts, np.int64), np.array(offsets, np.int64), RULES
