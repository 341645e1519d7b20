# SPDX-License-Identifier: Apache-2.0
"""A rank's experts on `weft.gemm`: the first GEMM's epilogue gates or activates, and quantises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from weft.errors import InvalidArgument
from weft.gemm import STORE, GemmPlan, Push, Store, WgmmaPlan, grouped_gemm
from weft.gemm.config import (
    COARSE_ROWS,
    DTYPES_16BIT,
    FP8,
    can_fuse,
    fastest_plan,
    is_hopper,
)
from weft.gemm.kernels import (
    OPERANDS,
    GemmShape,
    MlpShape,
    describe_epilogue,
    preload_kernels,
)
from weft.gemm.operator import ExpertGemm, grouped_mlp
from weft.heap.local import Allocate
from weft.moe.experts.torch_experts import RowsByExpert
from weft.moe.experts.weights import ExpertWeights
from weft.moe.models import Gating, MoEConfig, build_epilogue
from weft.shape import FP8_BLOCK


class BatchPlans(NamedTuple):
    """Plans of a batch's GEMMs: gate and up, and down."""

    up: GemmPlan | WgmmaPlan
    down: GemmPlan | WgmmaPlan


class GroupedExperts:
    """Two grouped GEMMs: the first activates and quantises in its epilogue, the second may push.

    On Hopper, one kernel computes both where FP8 experts have many rows.

    `TorchExperts` documents the methods. FP8 and MXFP4 weights need FP8 rows.

    All plans of a GEMM give the same bits. The fastest one depends on the weights' dtype and the
    rows per expert; it is selected once per number of tokens.

    Args:
        rows: `[max_rows]`, or `[experts, max_rows]` for expert-major rows. Owners poll for pushed
            expert-major rows.
        num_experts: Number of local experts.
        fp8: Whether the weights are FP8 or MXFP4.
        max_tokens: Maximum tokens of one rank in one call.
        use_pdl: Use programmatic dependent launch.
        allocate: Allocates the buffers.
        gemm_push: Whether `run_push` is called instead of `run`, which then raises and has no
            buffer. Only the kernels of one of them are loaded.
    """

    def __init__(
        self,
        config: MoEConfig,
        rows: tuple[int, ...],
        num_experts: int,
        *,
        fp8: bool,
        num_ranks: int,
        max_tokens: int,
        use_pdl: bool,
        allocate: Allocate,
        gemm_push: bool = False,
    ) -> None:
        self._config, self._num_experts, self._fp8 = config, num_experts, fp8
        self._masked = len(rows) == 2
        self._use_pdl = use_pdl
        self._epilogue = build_epilogue(config.gating, quantise=fp8)
        self._uses_gemm_push = gemm_push
        self._uses_flag_in_data = gemm_push and self._masked
        y_rows = (0,) if gemm_push else rows
        inner, blocks = config.intermediate, config.intermediate // FP8_BLOCK if fp8 else 0
        act_dtype = FP8 if fp8 else config.dtype
        self._act, self._scales, self._y = allocate(
            [
                ((*rows, inner), act_dtype),
                ((*rows, blocks), torch.float32),
                ((*y_rows, config.hidden), config.dtype),
            ]
        )
        self._mlp_state = torch.zeros(2 + num_experts, dtype=torch.int32, device=self._act.device)
        self._push: Push | None = None
        self._num_ranks, self._max_tokens = num_ranks, max_tokens
        self._plans: dict[tuple[int, torch.dtype], BatchPlans] = {}
        self._loaded_dtypes: set[torch.dtype] = set()

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        return (self._act, self._scales, self._y)

    def load_kernels(self, weights: ExpertWeights) -> None:
        """Load all kernels that a call may launch.

        Loading waits for running kernels, which may wait for peers, so a call must not load.
        """
        dtype = weights.gate_up.dtype
        if dtype in self._loaded_dtypes or not self._num_experts:
            return
        self._get_plans(0, dtype)
        if is_hopper(self._act.device):
            self._preload(self._compute_rows_per_expert(self._max_tokens), dtype)
        self._loaded_dtypes.add(dtype)

    def _preload(self, max_rows: int, dtype: torch.dtype) -> None:
        num_experts, hidden = self._num_experts, self._config.hidden
        inner = self._config.intermediate
        out, biased = DTYPES_16BIT.get(self._y.dtype, ""), self._config.biased
        operands = OPERANDS[dtype], out if biased else "none"
        up_rows, up_fields = self._config.gate_up_rows, describe_epilogue(self._epilogue)
        up_fields["out_dtype"] = "bf16" if self._fp8 else out
        shapes: set[GemmShape | MlpShape] = set()
        fine_rows = range(min(max_rows, COARSE_ROWS) + 1)
        for rows in {*fine_rows, *range(0, max_rows + 1, 64), max_rows}:
            plans = self._select_plans(rows, dtype)
            up = None
            if isinstance(plans.up, WgmmaPlan):
                fields = {"operand": operands[0], "bias": operands[1], **up_fields}
                up = GemmShape(num_experts, up_rows, hidden, plans.up, **fields)
            down = None
            if isinstance(plans.down, WgmmaPlan):
                epilogue = "push" if self._uses_gemm_push else "store"
                down = GemmShape(num_experts, hidden, inner, plans.down, epilogue, out, *operands)
                down = replace(
                    down, prefetch_weights=self._use_pdl, flag_in_data=self._uses_flag_in_data
                )
            if up is not None and down is not None and self._fuses(plans, dtype):
                shapes.add(MlpShape.from_shapes(up, down))
            else:
                shapes.update(shape for shape in (up, down) if shape is not None)
        with torch.cuda.device(self._act.device):
            preload_kernels(shapes)

    def _compute_rows_per_expert(self, tokens: int) -> int:
        """Return the mean number of rows per expert if each rank has this many tokens."""
        routing = self._config.routing
        return -(-tokens * self._num_ranks * routing.top_k // routing.num_experts)

    def _get_plans(self, tokens: int, dtype: torch.dtype) -> BatchPlans:
        plans = self._plans.get((tokens, dtype))
        if plans is None:
            plans = self._select_plans(self._compute_rows_per_expert(tokens), dtype)
            self._plans[tokens, dtype] = plans
        return plans

    def _select_plans(self, rows: int, dtype: torch.dtype) -> BatchPlans:
        config, device = self._config, self._act.device
        hidden, inner, sizes = config.hidden, config.intermediate, (self._num_experts, rows)
        kwargs: dict[str, Any] = {"biased": config.biased, "device": device}
        up = kwargs | {"gated": isinstance(config.gating, Gating), "out": self._act.dtype}
        down = kwargs | {"flag_in_data": self._uses_flag_in_data, "out": self._y.dtype}
        return BatchPlans(
            up=fastest_plan(*sizes, config.gate_up_rows, hidden, dtype, **up),
            down=fastest_plan(*sizes, hidden, inner, dtype, **down),
        )

    def _fuses(self, plans: BatchPlans, dtype: torch.dtype) -> bool:
        """Whether one kernel computes both GEMMs."""
        if dtype != FP8 or plans.up != plans.down or not isinstance(plans.up, WgmmaPlan):
            return False
        ks = self._config.hidden, self._config.intermediate
        return can_fuse(plans.up, self._num_experts, ks)

    def run(
        self, weights: ExpertWeights, rows: RowsByExpert, *, tokens: int, early: bool = True
    ) -> torch.Tensor:
        if self._uses_gemm_push:
            raise InvalidArgument(
                "the layer was built with overlap='gemm_push', which has no buffer for results: "
                "call the layer, or build it with overlap='none'"
            )
        self._run_gemms(weights, rows, tokens, STORE, self._y, early=early)
        return self._y

    def run_push(
        self, weights: ExpertWeights, rows: RowsByExpert, *, tokens: int, early: bool = True
    ) -> None:
        if rows.dst_addr is None:
            raise InvalidArgument(
                "these rows have no dst_addr; build the layer with overlap='gemm_push'"
            )
        if self._push is None or rows.dst_addr is not self._push.dst_addr:
            self._push = Push(
                rows.dst_addr,
                self._config.dtype,
                flag_in_data=rows.abort_flag is not None,
                abort_flag=rows.abort_flag,
            )
        self._run_gemms(weights, rows, tokens, self._push, None, early=early)

    def _run_gemms(
        self,
        weights: ExpertWeights,
        rows: RowsByExpert,
        tokens: int,
        epilogue: Store | Push,
        out: torch.Tensor | None,
        *,
        early: bool,
    ) -> None:
        plans = self._get_plans(tokens, weights.gate_up.dtype)
        counts, offsets = rows.counts, None if self._masked else rows.offsets
        act, scales = self._act, self._scales if self._fp8 else None
        act_out = (act, self._scales) if self._fp8 else act
        if self._fuses(plans, weights.gate_up.dtype):
            assert isinstance(plans.up, WgmmaPlan)
            assert weights.gate_up_scale is not None
            assert weights.down_scale is not None
            x, x_scale = rows.rows
            up = ExpertGemm(
                x, x_scale, weights.gate_up, weights.gate_up_scale, act_out, self._epilogue
            )
            down = ExpertGemm(act, self._scales, weights.down, weights.down_scale, out, epilogue)
            grouped_mlp(
                up,
                down,
                counts=counts,
                offsets=offsets,
                state=self._mlp_state,
                plan=plans.up,
                programmatic_launch=self._use_pdl and early,
            )
            return
        grouped_gemm(
            rows.rows[0],
            weights.gate_up,
            counts=counts,
            offsets=offsets,
            a_scale=rows.rows[1] if self._fp8 else None,
            b_scale=weights.gate_up_scale,
            bias=weights.gate_up_bias,
            out=act_out,
            plan=plans.up,
            epilogue=self._epilogue,
            programmatic_launch=self._use_pdl and early,
        )
        grouped_gemm(
            act,
            weights.down,
            counts=counts,
            offsets=offsets,
            a_scale=scales,
            b_scale=weights.down_scale,
            bias=weights.down_bias,
            out=out,
            plan=plans.down,
            epilogue=epilogue,
            programmatic_launch=self._use_pdl,
            prefetch_weights=True,  # safe: the first GEMM, before it, has waited for the counts
        )
