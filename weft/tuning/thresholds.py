"""From measured times to bands of sizes: the rule by which every table of weft chooses.

A name holds its ground until another is more than HYSTERESIS faster at two measured sizes that
follow each other (or at the last one): noise in a measurement flips nothing. Between measured
sizes, times lie on straight lines.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from weft.errors import InvalidArgument

HYSTERESIS = 0.03  # of the holder's time
Times: TypeAlias = tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Bands:
    """Which name serves which sizes: `names[i]` from `starts[i]` on."""

    starts: tuple[int, ...]
    names: tuple[str, ...]

    def at(self, size: int) -> str:
        """The name for this size."""
        return self.names[max(bisect_right(self.starts, size) - 1, 0)]


def check_times(tokens: Sequence[int], us: Mapping[str, Times]) -> None:
    """Raises InvalidArgument for sizes that do not rise, or times that are none."""
    rising = all(a < b for a, b in zip(tokens, tokens[1:], strict=False))
    if not tokens or tokens[0] < 1 or not rising:
        raise InvalidArgument(f"tokens {list(tokens)}: write sizes from 1 up, rising")
    if not us:
        raise InvalidArgument("a curve needs the times of one name at least")
    for name, times in us.items():
        good = all(time is None or 0 < time < math.inf for time in times)
        if len(times) != len(tokens) or not good:
            raise InvalidArgument(
                f"{name} has {len(times)} times for {len(tokens)} sizes; each is us above 0, or "
                "null where it does not serve the size"
            )


def time_at(sizes: Sequence[int], times: Times, size: int) -> float | None:
    """us at `size`, on the lines between measured sizes; None where nothing is known."""
    known = [(at, us) for at, us in zip(sizes, times, strict=True) if us is not None]
    if not known or (size > known[-1][0] and len(known) < 2):
        return known[-1][1] if known else None
    if size <= known[0][0]:
        return known[0][1]
    place = min(bisect_right([at for at, _ in known], size), len(known) - 1)
    (low, before), (high, after) = known[place - 1], known[place]
    return before + (after - before) * (size - low) / (high - low)


def bands_of(
    sizes: Sequence[int],
    us: Mapping[str, Times],
    names: Sequence[str],
    *,
    unit: int = 1,
    favourite: str = "",
) -> Bands:
    """Which of `names` serves when: up the measured sizes, as said above.

    unit: of the bands' sizes, in that of the measured ones: bytes of a row, where these are bytes.
    favourite: begins, if none is more than HYSTERESIS faster at the first size.
    """
    times = {name: us[name] for name in names if name in us}
    count = len(sizes)
    holder = next((name for i in range(count) if (name := _best(times, i))), None)
    if holder is None:
        return Bands((0,), (names[0],))
    if favourite in times and times[favourite][0] and not _beats(times, holder, favourite, 0):
        holder = favourite
    starts, found = [0], [holder]
    for i in range(1, count):
        best = _best(times, i)
        if best in (None, holder):
            continue
        assert best is not None
        held = times[holder][i]
        if held is not None and not (
            _beats(times, best, holder, i)
            and (i + 1 == count or _beats(times, best, holder, i + 1))
        ):
            continue
        begin = _crossing((sizes[i - 1], sizes[i]), times[holder], times[best], i)
        starts.append(math.floor(begin / unit) + 1)
        found.append(best)
        holder = best
    return Bands(tuple(starts), tuple(found))


def _best(times: Mapping[str, Times], i: int) -> str | None:
    known = {name: us[i] for name, us in times.items() if us[i] is not None}
    return min(known, key=lambda name: known[name] or 0.0) if known else None


def _beats(times: Mapping[str, Times], one: str, other: str, i: int) -> bool:
    """Is `one` faster than `other` at size i by more than the hysteresis?"""
    a, b = times[one][i], times[other][i]
    return a is not None and (b is None or a < b * (1 - HYSTERESIS))


def _crossing(sizes: tuple[int, int], held: Times, new: Times, i: int) -> float:
    """The size above which the new name serves: where its line crosses that of the old one."""
    low, high = sizes
    a, b, c, d = held[i - 1], held[i], new[i - 1], new[i]
    if b is None:  # the old one ends here: it serves up to the last size it was measured at
        return low
    if a is None or c is None or d is None:  # the new one begins here
        return high - 1
    ahead, behind = c - a, d - b
    return low + (high - low) * max(ahead, 0.0) / (max(ahead, 0.0) - behind)
