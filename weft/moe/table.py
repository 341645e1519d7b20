"""Measured times of a layer's overlaps, and which measurement is near enough to choose by."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from weft.errors import InvalidArgument
from weft.moe.models import MoEConfig
from weft.shape import DTYPE_NAMES
from weft.tuning.table_file import TableFile, texts_of, times_of, tokens_of, whole
from weft.tuning.thresholds import Times, check_times, time_at

SHIPPED = Path(__file__).with_name("tables")
NEAR = 2.0  # how many times larger or smaller a near layer's sizes may be
DTYPES = ("fp8", *DTYPE_NAMES.values())
_COUNTS = ("ranks", "experts", "top_k", "hidden", "intermediate")

MODES = ("throughput", "low_latency")
OVERLAPS = ("none", "shared_expert", "gemm_push")


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What a layer's times hang on besides its tokens.

    gpu: the GPUs' name as torch reports it, "" for CPU ranks.   ranks: of the group.
    experts: on all ranks.   top_k: of a token.   hidden, intermediate: as in MoEConfig.
    shared: intermediate size of the shared expert, 0 for none.
    dtype: of the experts' weights, "fp8", "bf16", "fp16" or "fp32".

    Raises InvalidArgument for a size that no layer has.
    """

    gpu: str
    ranks: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    shared: int
    dtype: str

    def __post_init__(self) -> None:
        low = [name for name in _COUNTS if getattr(self, name) < 1]
        if low or self.shared < 0 or self.dtype not in DTYPES:
            raise InvalidArgument(
                f"{self.text}: sizes must be at least 1, shared at least 0, dtype one of "
                f"{', '.join(DTYPES)}"
            )

    @classmethod
    def of(cls, config: MoEConfig, *, gpu: str, ranks: int, fp8: bool) -> LayerSizes:
        """The sizes of a layer on this many ranks.   fp8: its weights are FP8."""
        return cls(
            gpu=gpu,
            ranks=ranks,
            experts=config.routing.num_experts,
            top_k=config.routing.top_k,
            hidden=config.hidden,
            intermediate=config.intermediate,
            shared=config.shared,
            dtype="fp8" if fp8 else DTYPE_NAMES[config.dtype],
        )

    @property
    def text(self) -> str:
        """All of it in words."""
        shared = f"shared expert of {self.shared}" if self.shared else "no shared expert"
        return (
            f"{self.ranks} x {self.gpu or 'CPU'}, {self.experts} experts, top {self.top_k}, hidden "
            f"{self.hidden}, intermediate {self.intermediate}, {shared}, {self.dtype}"
        )

    def ratios(self, other: LayerSizes) -> dict[str, float]:
        """Size -> theirs over ours, for each that a near layer may have larger or smaller."""
        names = ("ranks", "top_k", "hidden", "intermediate")
        found = {name: getattr(other, name) / getattr(self, name) for name in names}
        found["experts a rank"] = other.experts / other.ranks * self.ranks / self.experts
        if self.shared and other.shared:
            found["shared"] = other.shared / self.shared
        return found

    def apart(self, other: LayerSizes) -> list[str]:
        """Why times of `other` do not hold for this layer, in words; empty: they are near."""
        found = []
        for name, mine, theirs in (
            ("gpu", self.gpu, other.gpu),
            ("dtype", self.dtype, other.dtype),
            ("shared expert", self.shared > 0, other.shared > 0),
        ):
            if mine != theirs:
                found.append(f"{name} is {mine!r}, there {theirs!r}")
        for name, ratio in self.ratios(other).items():
            if not 1 / NEAR <= ratio <= NEAR:
                found.append(f"{name} is {ratio:.3g} times as large there")
        return found

    def distance(self, other: LayerSizes) -> float:
        """How far a near one is: the sum of its sizes' ratios, in powers of two."""
        return sum(abs(math.log2(ratio)) for ratio in self.ratios(other).values())


@dataclass(frozen=True, slots=True)
class LayerCurve:
    """Times of every overlap with one mode.

    mode: one of MODES.   gemm: how the experts multiply, as `MoE.gemm` says.
    tokens: max_tokens of a rank, rising.   us: overlap -> us for each, None where it was refused.
    """

    mode: str
    gemm: str
    tokens: tuple[int, ...]
    us: Mapping[str, Times]

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidArgument(f"mode is {self.mode!r}; choose one of {', '.join(MODES)}")
        if strange := [name for name in self.us if name not in OVERLAPS]:
            raise InvalidArgument(
                f"overlap is {strange[0]!r}; this weft.MoE offers {', '.join(OVERLAPS)}"
            )
        check_times(self.tokens, self.us)

    def at(self, overlap: str, tokens: int) -> float | None:
        """us for a rank's tokens, on the lines between sizes; below the first size its time.

        None above the last size that this overlap was measured at, and below the first where it was
        refused at smaller ones.
        """
        times = self.us.get(overlap, ())
        known = [size for size, us in zip(self.tokens, times, strict=False) if us is not None]
        if not known or tokens > known[-1] or known[0] > max(tokens, self.tokens[0]):
            return None
        return time_at(self.tokens, times, tokens)

    def times_at(self, tokens: int) -> dict[str, float]:
        """Overlap -> us for a rank's tokens, of those that are known there."""
        found = {name: self.at(name, tokens) for name in self.us}
        return {name: us for name, us in found.items() if us is not None}


@dataclass(frozen=True, slots=True)
class LayerTable(TableFile):
    """Times of one layer on one machine; what `MoE(table=...)` takes.

    sizes: of the layer.   model: its name.   date, machine, method: when, on what and how it was
    measured.   curves: one for each mode and way of multiplying.

    Raises InvalidArgument naming what is wrong.
    """

    form: ClassVar[str] = "weft layer table 1"
    what: ClassVar[str] = "layer table"

    sizes: LayerSizes
    model: str
    date: str
    machine: str
    method: str
    curves: tuple[LayerCurve, ...]

    def __post_init__(self) -> None:
        if not (self.date and self.machine and self.method):
            raise InvalidArgument("a layer table needs date, machine and method")
        ways = [(curve.mode, curve.gemm) for curve in self.curves]
        if not ways or len(set(ways)) != len(ways):
            raise InvalidArgument(
                f"curves are of {ways}: write one at least, each mode and gemm once"
            )

    @property
    def origin(self) -> str:
        """Where the times come from, in two sentences."""
        return f"Measured {self.date} on {self.machine}: {self.model}. {self.method}."

    def curve(self, mode: str, gemm: str) -> LayerCurve | None:
        """The times of one mode and way of multiplying, if they were measured."""
        ways = {(curve.mode, curve.gemm): curve for curve in self.curves}
        return ways.get((mode, gemm))

    def as_json(self) -> dict[str, Any]:
        """The table as JSON values."""
        names = ("model", "date", "machine", "method")
        plain = {name: getattr(self, name) for name in names}
        curves = [asdict(curve) for curve in self.curves]
        return {"format": self.form, **plain, **asdict(self.sizes), "curves": curves}

    @classmethod
    def _make(cls, found: Any) -> LayerTable:
        counts = {name: whole(found[name]) for name in (*_COUNTS, "shared")}
        sizes = LayerSizes(gpu=str(found["gpu"]), dtype=str(found["dtype"]), **counts)
        curves = tuple(
            LayerCurve(
                **texts_of(curve, "mode", "gemm"), tokens=tokens_of(curve), us=times_of(curve)
            )
            for curve in found["curves"]
        )
        texts = texts_of(found, "model", "date", "machine", "method")
        return cls(sizes=sizes, curves=curves, **texts)

    @classmethod
    def shipped(cls, sizes: LayerSizes, mode: str, gemm: str) -> LayerTable | None:
        """The nearest table that came with weft and has this mode and gemm; None: none is near.

        Of equally near ones the first by name.
        """
        tables = [cls.load(path) for path in sorted(SHIPPED.glob("*.json"))]
        near = [
            table for table in tables if table.curve(mode, gemm) and not sizes.apart(table.sizes)
        ]
        return min(near, key=lambda table: sizes.distance(table.sizes), default=None)
