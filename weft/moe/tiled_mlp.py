"""The experts' grouped GEMMs by `weft.gemm`, gated and quantised in the epilogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from weft.errors import InvalidArgument
from weft.gemm import (
    Gated,
    GatedQuant,
    GemmPlan,
    Push,
    WgmmaPlan,
    grouped_gemm,
)
from weft.gemm.hopper import GemmShape, preload
from weft.gemm.plans import COARSE_ROWS, DTYPES_16BIT, best_plan, is_hopper
from weft.grouping.api import Layout
from weft.moe.experts import FP8, ExpertWeights
from weft.moe.models import MoEConfig
from weft.moe.products import RowsByExpert
from weft.shape import FP8_BLOCK


def can_push_rows(
    config: MoEConfig, experts: int, *, fp8: bool, device: torch.device | None
) -> bool:
    """Whether the second GEMM of so many experts can store rows with flag-in-data (`Push`)."""
    if device is None or device.type == "cpu":
        return True
    dtype, out = FP8 if fp8 else config.dtype, config.dtype
    sizes = experts, 1, config.hidden, config.intermediate, dtype
    given: dict[str, Any] = {"biased": config.biased, "out": out, "device": device}
    return isinstance(best_plan(*sizes, flag_in_data=True, **given), WgmmaPlan)


class TiledMlp:
    """`weft.gemm`: gating and FP8 in the first GEMM's epilogue, dst_addr in the second's.

    FP8 weights take rows as FP8 off the wire; the same bits for any plan.   pushes: `push` is
    called and never `down`, so no results are kept.
    """

    layout: Layout = "contiguous"

    def __init__(
        self,
        config: MoEConfig,
        rows: tuple[int, ...],
        experts: int,
        *,
        fp8: bool,
        most: int,
        programmatic: bool,
        device: torch.device,
        pushes: bool = False,
    ) -> None:
        self._config, self._experts, self._fp8 = config, max(experts, 1), fp8
        self._masked = len(rows) == 2
        self._programmatic = programmatic
        gating = config.gating
        kind = GatedQuant if fp8 else Gated
        self._epilogue = kind(alpha=gating.alpha, offset=gating.offset, limit=gating.limit)
        dtype = FP8 if fp8 else config.dtype
        self._act = torch.empty((*rows, config.intermediate), dtype=dtype, device=device)
        blocks = config.intermediate // FP8_BLOCK if fp8 else 0
        self._scales = torch.empty((*rows, blocks), dtype=torch.float32, device=device)
        self._pushes = pushes
        kept = (0,) if pushes else rows
        self._y = torch.empty((*kept, config.hidden), dtype=config.dtype, device=device)
        self._grouped: RowsByExpert | None = None
        self._up: GemmPlan | WgmmaPlan
        self._down: GemmPlan | WgmmaPlan
        self._pushing: GemmPlan | WgmmaPlan
        if experts and is_hopper(device):
            self._preload(most)
        self.expect(most)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return (self._act, self._scales, self._y)

    def _preload(self, most: int) -> None:
        """Load what a call may need: a load waits for kernels, and those may wait for peers."""
        hidden, inner, experts = self._config.hidden, self._config.intermediate, self._experts
        out = DTYPES_16BIT.get(self._y.dtype, "")
        operands = ("fp8",) if self._fp8 else (out, out if self._config.biased else "none")
        gated = ("gated_fp8",) if self._fp8 else ("gated", out, *operands)
        shapes: set[GemmShape] = set()
        for rows in {*range(min(most, COARSE_ROWS) + 1), *range(0, most + 1, 64), most}:
            self.expect(rows)
            if isinstance(up := self._up, WgmmaPlan):
                shapes.add(GemmShape(experts, 2 * inner, hidden, up, *gated))
            for epilogue, down in (("store", self._down), ("push", self._pushing)):
                if isinstance(down, WgmmaPlan) and (epilogue == "push" or not self._pushes):
                    shape = GemmShape(experts, hidden, inner, down, epilogue, out, *operands)
                    flag_in_data = epilogue == "push" and self._masked
                    prefetch = self._programmatic
                    shapes.add(replace(shape, prefetch_weights=prefetch, flag_in_data=flag_in_data))
        with torch.cuda.device(self._act.device):
            preload(shapes, self._programmatic)

    def expect(self, rows: int) -> None:
        config, dtype, device = self._config, self._act.dtype, self._act.device
        hidden, inner, sizes = config.hidden, config.intermediate, (self._experts, rows)
        given: dict[str, Any] = {"biased": config.biased, "out": self._y.dtype, "device": device}
        self._up = best_plan(*sizes, 2 * inner, hidden, dtype, gated=True, **given)
        self._down = best_plan(*sizes, hidden, inner, dtype, **given)
        # Masked rows are those of exchange "expert", whose owners poll them.
        self._pushing = best_plan(*sizes, hidden, inner, dtype, flag_in_data=self._masked, **given)

    def up(self, weights: ExpertWeights, grouped: RowsByExpert, *, early: bool = True) -> None:
        self._grouped = grouped
        grouped_gemm(
            grouped.x,
            weights.gate_up,
            counts=grouped.counts,
            offsets=None if self._masked else grouped.offsets,
            a_scale=grouped.rows[1] if self._fp8 else None,
            b_scale=weights.gate_up_scale,
            bias=weights.gate_up_bias,
            out=(self._act, self._scales) if self._fp8 else self._act,
            plan=self._up,
            epilogue=self._epilogue,
            programmatic_launch=self._programmatic and early,
        )

    def down(self, weights: ExpertWeights) -> torch.Tensor:
        if self._pushes:
            raise InvalidArgument("these rows go home as they are made; there is no room for them")
        self._multiply(weights, self._down, out=self._y)
        return self._y

    def push(self, weights: ExpertWeights) -> None:
        rows = self._grouped
        if rows is None or rows.home is None:
            raise InvalidArgument("these rows have no homes; build the layer with overlap='push'")
        push = Push(
            rows.home,
            self._config.dtype,
            flag_in_data=rows.broken is not None,
            abort_flag=rows.broken,
        )
        self._multiply(weights, self._pushing, epilogue=push)

    def forget(self) -> None:
        self._grouped = None

    def close(self) -> None:
        self.forget()  # with homes it shows a word of the heap
        self._act, self._scales, self._y = (t.new_empty(0) for t in self.buffers)

    def _multiply(self, weights: ExpertWeights, by: GemmPlan | WgmmaPlan, **given: Any) -> None:
        grouped = self._grouped
        assert grouped is not None
        grouped_gemm(
            self._act,
            weights.down,
            counts=grouped.counts,
            offsets=None if self._masked else grouped.offsets,
            a_scale=self._scales if self._fp8 else None,
            b_scale=weights.down_scale,
            bias=weights.down_bias,
            plan=by,
            programmatic_launch=self._programmatic,
            prefetch_weights=True,  # the first GEMM is in front, which has waited for the counts
            **given,
        )
