"""Which backend an all-reduce takes: a table of times of one machine, and what it answers.

Every backend gives the same bits, so this decides about time alone. It looks at nothing but the
table and sizes that are equal on all ranks, so all ranks choose alike without a word. A hidden
size, dtype or epilogue that was not measured is read from the nearest that was, by bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

from weft.allreduce.curve import Curve
from weft.allreduce.formula import FORMULA, formula_us
from weft.errors import InvalidArgument
from weft.shape import DTYPE_NAMES
from weft.tuning.table_file import TableFile, texts_of, times_of, tokens_of, whole
from weft.tuning.thresholds import HYSTERESIS, Bands

BACKENDS = ("oneshot", "twoshot", "twoshot_bulk")  # of one class of bits; ties go to the first
MEASURED, COMPUTED = "measured", "formula"  # where a table's times come from
NEAREST, ONLY = "nearest", "only one"  # what a choice may be besides these
SHIPPED = Path(__file__).with_name("tables")

# Whose times an epilogue reads, best first: one that quantises is more like norm than like none.
_LIKE: Mapping[str, tuple[str, ...]] = {
    "none": ("none", "norm", "fp8-static", "fp8-token", "fp8-group"),
    "norm": ("norm", "fp8-static", "fp8-token", "fp8-group", "none"),
    "fp8-static": ("fp8-static", "fp8-token", "fp8-group", "norm", "none"),
    "fp8-token": ("fp8-token", "fp8-static", "fp8-group", "norm", "none"),
    "fp8-group": ("fp8-group", "fp8-token", "fp8-static", "norm", "none"),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

    source: "measured"; "nearest" where the size, dtype, epilogue or machine was not measured and
    another was read; "formula" where nothing was; "only one" where there was nothing to choose.
    text: what, why, and from which measurement.
    """

    backend: str
    source: str
    text: str


@dataclass(frozen=True, slots=True)
class Table(TableFile):
    """Times of one machine and number of ranks.

    gpu: the GPUs' name as torch reports it, "" for CPU ranks.  ranks: of the group.
    source: "measured" or "formula".  date: of the measurement, "" for a formula.
    machine, method: what it was measured on and how, or what the formula is.

    Raises InvalidArgument naming what is wrong.
    """

    form: ClassVar[str] = "weft all-reduce table 1"
    what: ClassVar[str] = "all-reduce table"

    gpu: str
    ranks: int
    source: str
    date: str
    machine: str
    method: str
    curves: tuple[Curve, ...]
    _bands: dict[Any, Bands] = field(init=False, default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.source not in (MEASURED, COMPUTED):
            raise InvalidArgument(f"source is {self.source!r}; write {MEASURED} or {COMPUTED}")
        if self.source == MEASURED and not (self.date and self.machine and self.method):
            raise InvalidArgument("a measured table needs date, machine and method")
        if not self.curves or self.ranks < 1:
            raise InvalidArgument(
                f"{len(self.curves)} curves for {self.ranks} ranks: need one each"
            )

    def bands(
        self, *, hidden: int, dtype: torch.dtype, epilogue: str, backends: Sequence[str]
    ) -> Bands:
        """Which of `backends` serves which tokens; worked out once for each question."""
        key = (hidden, dtype, epilogue, tuple(backends))
        if key not in self._bands:
            curve = self._nearest(hidden, DTYPE_NAMES[dtype], epilogue)
            self._bands[key] = curve.bands(hidden * dtype.itemsize, backends)
        return self._bands[key]

    def choose(
        self,
        tokens: int,
        *,
        hidden: int,
        dtype: torch.dtype,
        epilogue: str = "norm",
        backends: Sequence[str] = BACKENDS,
    ) -> Choice:
        """Return the backend for `[tokens, hidden]` rows of `dtype`, with the reason.

        epilogue: one of EPILOGUES.  backends: those that can serve this call, one at least.
        Depends on the table and these arguments alone. `bands` answers faster and without words.
        """
        if len(backends) == 1:
            return Choice(backends[0], ONLY, f"{backends[0]}: no other backend serves this call")
        bands = self.bands(hidden=hidden, dtype=dtype, epilogue=epilogue, backends=backends)
        chosen = bands.at(tokens)
        number = DTYPE_NAMES[dtype]
        curve = self._nearest(hidden, number, epilogue)
        payload = tokens * hidden * dtype.itemsize
        same = (curve.hidden, curve.dtype, curve.epilogue) == (hidden, number, epilogue)
        known = same and curve.tokens[0] <= tokens <= curve.tokens[-1]
        source = MEASURED if known else NEAREST
        why = _reason(curve, payload, chosen, backends)
        read = "" if known else f" (read by bytes from {_named(curve)})"
        text = (
            f"{chosen} for {tokens} tokens x {hidden} {number} ({payload / 1024:.0f} KiB), "
            f"epilogue {epilogue}, {self.ranks} ranks: {why}{read}. {self.origin}"
        )
        return Choice(chosen, COMPUTED if self.source == COMPUTED else source, text)

    @property
    def origin(self) -> str:
        """Where the times come from, in a sentence."""
        if self.source == COMPUTED:
            return f"Computed, not measured: {self.method}; run `weft tune allreduce` to measure."
        return f"Measured {self.date} on {self.machine}; {self.method}."

    def _nearest(self, hidden: int, dtype: str, epilogue: str) -> Curve:
        like = _LIKE[epilogue]
        return min(
            self.curves,
            key=lambda c: (
                like.index(c.epilogue),
                c.dtype != dtype,
                abs(math.log(c.hidden / hidden)),
                c.hidden,
            ),
        )

    def as_json(self) -> dict[str, Any]:
        """The table as JSON values."""
        names = ("gpu", "ranks", "source", "date", "machine", "method")
        plain = {name: getattr(self, name) for name in names}
        return {"format": self.form, **plain, "curves": [asdict(curve) for curve in self.curves]}

    @classmethod
    def _make(cls, found: Any) -> Table:
        curves = tuple(
            Curve(
                hidden=whole(curve["hidden"]),
                **texts_of(curve, "dtype", "epilogue"),
                tokens=tokens_of(curve),
                us=times_of(curve),
            )
            for curve in found["curves"]
        )
        texts = texts_of(found, "gpu", "source", "date", "machine", "method")
        return cls(ranks=whole(found["ranks"]), curves=curves, **texts)

    @classmethod
    def formula(cls, gpu: str, ranks: int) -> Table:
        """The table of a machine that nobody measured: see allreduce_formula.py."""
        sizes = tuple(2**i for i in range(15))
        curves = []
        for hidden in (512, 1024, 2048, 4096, 7168, 16384):
            times = {
                name: tuple(
                    round(formula_us(name, tokens, hidden * 2, ranks, cpu=not gpu), 3)
                    for tokens in sizes
                )
                for name in BACKENDS
            }
            curves.append(Curve(hidden, "bf16", "norm", sizes, times))
        method = FORMULA["gpu" if gpu else "cpu"]
        return cls(gpu, ranks, COMPUTED, "", "", method, tuple(curves))

    @classmethod
    def shipped(cls, gpu: str, ranks: int) -> Table:
        """The table that came with weft for these GPUs and ranks; else `formula`."""
        for path in sorted(SHIPPED.glob("*.json")):
            table = cls.load(path)
            if (table.gpu, table.ranks) == (gpu, ranks):
                return table
        return cls.formula(gpu, ranks)


def _named(curve: Curve) -> str:
    sizes = f"{curve.tokens[0]}..{curve.tokens[-1]}"
    return f"{sizes} tokens x {curve.hidden} {curve.dtype}, {curve.epilogue}"


def _reason(curve: Curve, payload: int, chosen: str, backends: Sequence[str]) -> str:
    """The times of the chosen backend and of its best other there."""
    times = {name: curve.at(name, payload) for name in backends if name in curve.us}
    mine = times.pop(chosen, None)
    others = {name: us for name, us in times.items() if us is not None}
    if mine is None:
        return "the table has no time for it, nor for any other that serves this call"
    if not others:
        return f"{mine:.1f} us"
    best = min(others, key=lambda name: others[name])
    text = f"{mine:.1f} us, {best} {others[best]:.1f}"
    if others[best] < mine:
        text += f"; a change needs {HYSTERESIS:.0%} at two sizes"
    return text
