"""Measured times of all-reduce backends, and the rule that makes bands of them.

A backend holds its ground until another is more than HYSTERESIS faster at two measured sizes that
follow each other (or at the last one): noise in a measurement flips nothing. Between measured
sizes, times lie on straight lines over bytes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from weft.errors import InvalidArgument
from weft.shape import NUMBERS

HYSTERESIS = 0.03  # of the holder's time
EPILOGUES = ("none", "norm", "fp8-static", "fp8-token", "fp8-group")
Times: TypeAlias = tuple[float | None, ...]

_BYTES = {number: dtype.itemsize for dtype, number in NUMBERS.items()}


@dataclass(frozen=True, slots=True)
class Curve:
    """Times of every backend for one hidden size, dtype and epilogue.

    hidden: elements of a row.  dtype: "bf16", "fp16" or "fp32".  epilogue: one of EPILOGUES.
    tokens: sizes, rising.  us: backend -> us for each size, None where it does not serve the size.
    """

    hidden: int
    dtype: str
    epilogue: str
    tokens: tuple[int, ...]
    us: Mapping[str, Times]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.tokens, self.tokens[1:], strict=False))
        if not self.tokens or self.tokens[0] < 1 or not rising:
            raise InvalidArgument(f"tokens {list(self.tokens)}: write sizes from 1 up, rising")
        if self.hidden < 1 or self.dtype not in _BYTES or self.epilogue not in EPILOGUES:
            raise InvalidArgument(
                f"hidden {self.hidden}, dtype {self.dtype!r}, epilogue {self.epilogue!r}: dtype is "
                f"one of {', '.join(_BYTES)}, epilogue one of {', '.join(EPILOGUES)}"
            )
        if not self.us:
            raise InvalidArgument("a curve needs the times of one backend at least")
        for backend, times in self.us.items():
            good = all(us is None or 0 < us < math.inf for us in times)
            if len(times) != len(self.tokens) or not good:
                raise InvalidArgument(
                    f"{backend} has {len(times)} times for {len(self.tokens)} sizes; each is us "
                    "above 0, or null where the backend does not serve the size"
                )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.hidden * _BYTES[self.dtype]

    def at(self, backend: str, payload: int) -> float | None:
        """us of a backend for `payload` bytes a rank, on the lines between sizes; None unknown."""
        points = [
            (n * self.row_bytes, us) for n, us in zip(self.tokens, self.us[backend], strict=True)
        ]
        known = [(size, us) for size, us in points if us is not None]
        if not known or payload > known[-1][0] and len(known) < 2:
            return known[-1][1] if known else None
        if payload <= known[0][0]:
            return known[0][1]
        place = min(bisect_right([size for size, _ in known], payload), len(known) - 1)
        (low, before), (high, after) = known[place - 1], known[place]
        return before + (after - before) * (payload - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Bands:
    """Which backend serves which tokens: `backends[i]` from `starts[i]` tokens on."""

    starts: tuple[int, ...]
    backends: tuple[str, ...]

    def at(self, tokens: int) -> str:
        """The backend for this many tokens."""
        return self.backends[max(bisect_right(self.starts, tokens) - 1, 0)]


def bands_of(curve: Curve, row_bytes: int, backends: Sequence[str]) -> Bands:
    """Which of `backends` serves rows of `row_bytes` when: up the measured sizes, as said above."""
    times = {name: curve.us[name] for name in backends if name in curve.us}
    count = len(curve.tokens)
    holder = next((name for i in range(count) if (name := _best(times, i))), None)
    if holder is None:
        return Bands((0,), (backends[0],))
    starts, names = [0], [holder]
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
        begin = _crossing(curve, times[holder], times[best], i)
        starts.append(math.floor(begin / row_bytes) + 1)
        names.append(best)
        holder = best
    return Bands(tuple(starts), tuple(names))


def _best(times: Mapping[str, Times], i: int) -> str | None:
    known = {name: us[i] for name, us in times.items() if us[i] is not None}
    return min(known, key=lambda name: known[name] or 0.0) if known else None


def _beats(times: Mapping[str, Times], one: str, other: str, i: int) -> bool:
    """Is `one` faster than `other` at size i by more than the hysteresis?"""
    a, b = times[one][i], times[other][i]
    return a is not None and (b is None or a < b * (1 - HYSTERESIS))


def _crossing(curve: Curve, held: Times, new: Times, i: int) -> float:
    """Bytes above which the new backend serves: where its line crosses that of the old one."""
    low, high = curve.tokens[i - 1] * curve.row_bytes, curve.tokens[i] * curve.row_bytes
    a, b, c, d = held[i - 1], held[i], new[i - 1], new[i]
    if b is None:  # the old one ends here: it serves up to the last size it was measured at
        return low
    if a is None or c is None or d is None:  # the new one begins here
        return high - 1
    ahead, behind = c - a, d - b
    return low + (high - low) * max(ahead, 0.0) / (max(ahead, 0.0) - behind)
