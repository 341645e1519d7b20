"""What one low-latency benchmark measures: the settings every rank gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weft.bench.cases import DTYPES, Settings
from weft.errors import InvalidArgument
from weft.ops.lowlatency_geometry import LowGeometry

QUANTS = ("fp8", "none")


@dataclass(frozen=True, slots=True)
class LowSettings:
    """Everything a rank needs to know. Equal on all ranks.

    tokens: sizes to measure, tokens per rank.  max_tokens: capacity, or None for the largest size.
    router: as in `weft bench moe`.  quant: "fp8" or "none".
    scale, group_size, reduce, combine_by, halves, num_sms, programmatic_launch: as in
    LowLatencyAllToAll.  samples: timed samples per size.
    profile: time kernels that keep a trace.
    """

    ranks: int
    device: str
    tokens: tuple[int, ...]
    max_tokens: int | None
    hidden: int
    top_k: int
    experts: int
    router: str
    quant: str
    scale: str
    reduce: str
    combine_by: str
    graph: bool
    samples: int
    seed: int
    dtype: str = "bf16"
    group_size: int = 128
    halves: bool = False
    num_sms: int | None = None
    programmatic_launch: bool = True
    profile: bool = False

    def __post_init__(self) -> None:
        if self.quant not in QUANTS:
            raise InvalidArgument(f"quant is {self.quant!r}; choose one of {', '.join(QUANTS)}")
        # Both refuse what cannot be, before any rank is started.
        _ = self.as_moe, self.geometry

    @property
    def capacity(self) -> int:
        """Most tokens of one rank that the exchange is built for."""
        return self.max_tokens or max(self.tokens)

    @property
    def as_moe(self) -> Settings:
        """The same sizes and rows as `weft bench moe` has them: routing, and who stands beside."""
        return Settings(
            ranks=self.ranks,
            device=self.device,
            tokens=self.tokens,
            max_tokens=self.max_tokens,
            hidden=self.hidden,
            top_k=self.top_k,
            experts=self.experts,
            router=self.router,
            backends=("onesided",),
            dtype=self.dtype,
            payload="bf16",
            graph=self.graph,
            samples=self.samples,
            seed=self.seed,
            num_sms=self.num_sms,
            quantize="fp8" if self.quant == "fp8" and self.hidden % 128 == 0 else None,
        )

    @property
    def options(self) -> dict[str, Any]:
        """What changes the meaning, as LowLatencyAllToAll takes it."""
        return {
            "quant": None if self.quant == "none" else self.quant,
            "group_size": self.group_size,
            "scale": self.scale,
            "reduce": self.reduce,
            "combine_by": self.combine_by,
            "dtype": self.out_dtype,
        }

    @property
    def geometry(self) -> LowGeometry:
        """What the ranks will share."""
        return LowGeometry.of(
            ranks=self.ranks,
            max_tokens=self.capacity,
            hidden=self.hidden,
            top_k=self.top_k,
            num_experts=self.experts,
            **self.options,
        )

    @property
    def out_dtype(self) -> torch.dtype:
        """dtype of the rows that come home."""
        return DTYPES[self.dtype]

    @property
    def wire(self) -> str:
        """What goes out and what comes back, in words."""
        out = f"{self.quant} + {self.scale} scales" if self.quant != "none" else self.dtype
        what = "fp8 + scales" if self.combine_by == "fp8" else self.dtype
        each = "choice" if self.reduce == "receiver" else "rank"
        return f"{out} out, expert-major; {what} back, a row for each {each}"
