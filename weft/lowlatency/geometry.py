"""From a caller's sizes to a low-latency all-to-all's shape and memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weft.arguments import flags, integer, one_of
from weft.errors import InvalidArgument
from weft.fields import by_argument, checked
from weft.lowlatency.shape import (
    GROUPS,
    MAX_TRACES,
    REDUCES,
    SCALES,
    LowLayout,
    LowShape,
    TraceRecord,
)
from weft.memory.header import RING_TIMELINES
from weft.memory.wire import JSON
from weft.placement import Placement, placement_of
from weft.runtime.check import check_alignment, check_tensor, check_tokens
from weft.runtime.layout import Memory, sizes_of
from weft.shape import DTYPE_NAMES

# Tracks that profiled kernels keep: of 32 rounds, by phase and team.
TRACKS = (RING_TIMELINES, MAX_TRACES, ctypes.sizeof(TraceRecord))
QUANTS = (None, "fp8")
COMBINES = ("push", "gemm_push")
COMBINE_DTYPES = (None, "fp8")
MAX_SLOTS = 2  # one is filled while the experts multiply the other's rows


@dataclass(frozen=True, slots=True)
class LowGeometry:
    """All that ranks must agree on, from a caller's sizes."""

    shape: LowShape
    layout: LowLayout
    dtype: torch.dtype
    placement: Placement
    slots: int
    profile: bool

    @classmethod
    def of(
        cls,
        *,
        ranks: int,
        max_tokens: int,
        hidden: int,
        top_k: int,
        num_experts: int,
        dtype: torch.dtype = torch.bfloat16,
        quantize: str | None = "fp8",
        group_size: int = 128,
        scale: str = "fp32_row",
        slots: int = 2,
        reduce: str = "receiver",
        combine: str = "push",
        combine_dtype: str | None = None,
        expert_map: Sequence[int] | torch.Tensor | None = None,
        profile: bool = False,
        _recipe: str = "weft",
    ) -> LowGeometry:
        """Raises InvalidArgument naming the argument, its value and what it may be."""
        flags(profile=profile)
        sizes = checked(
            LowShape,
            ranks=ranks,
            tokens=max_tokens,
            top_k=top_k,
            experts=num_experts,
            hidden=hidden,
        )
        ranks, num_experts = sizes["ranks"], sizes["experts"]
        slots = integer("slots", slots, 1, MAX_SLOTS)
        dtype = one_of("dtype", dtype, DTYPE_NAMES)
        quantize, combine = (
            one_of("quantize", quantize, QUANTS),
            one_of("combine", combine, COMBINES),
        )
        combine_dtype = one_of("combine_dtype", combine_dtype, COMBINE_DTYPES)
        reduce, scale = one_of("reduce", reduce, REDUCES), one_of("scale", scale, SCALES)
        group_size = one_of("group_size", group_size, GROUPS)
        _check_gemm_push(combine, combine_dtype, reduce, slots)
        placement = placement_of(expert_map, num_experts, ranks)
        shape = LowShape(
            **sizes,
            local=max(len(placement.experts_of(rank)) for rank in range(ranks)),
            dtype=DTYPE_NAMES[dtype],
            group=group_size if quantize else 0,
            scales=scale if quantize else "fp32_row",
            reduce=reduce,
            combine_fp8=combine_dtype == "fp8",
            gemm_push=combine == "gemm_push",
            mapped=expert_map is not None,
            recipe=_recipe if quantize else "weft",
        )
        return cls(shape, LowLayout.of(shape), dtype, placement, slots, profile)

    def manifest(self) -> dict[str, JSON]:
        """What the ranks compare at creation, name by name."""
        return {
            **by_argument(self.shape),
            "slots": self.slots,
            "expert_map": list(self.placement.ranks),
        }

    def check_dispatch(
        self,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        device: torch.device,
    ) -> int:
        """Return the number of tokens.

        Raises InvalidArgument and TokenOverflow for what the host can see.
        """
        tokens = self.check_choices(topk_ids, topk_weights, device)
        check_tokens(tokens, self.shape.tokens)
        shape = (tokens, self.shape.hidden)
        check_tensor("x", x, shape=shape, dtypes=(self.dtype,), device=device)
        check_alignment("x", x, 16)
        return tokens

    def check_choices(
        self, topk_ids: torch.Tensor, topk_weights: torch.Tensor | None, device: torch.device
    ) -> int:
        """Return the number of tokens that ids and weights are of."""
        top_k, integers = self.shape.top_k, (torch.int32, torch.int64)
        check_tensor("topk_ids", topk_ids, shape=(None, top_k), dtypes=integers, device=device)
        check_alignment("topk_ids", topk_ids, topk_ids.itemsize)
        tokens = topk_ids.shape[0]  # while tracing, perhaps a symbol: not int()
        if topk_weights is not None:
            row, floats = (tokens, top_k), (torch.float32,)
            check_tensor("topk_weights", topk_weights, shape=row, dtypes=floats, device=device)
            check_alignment("topk_weights", topk_weights, topk_weights.itemsize)
        return tokens

    def result_shapes(self, own: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Every tensor that one slot of a rank with `own` experts holds, by name.

        Column-major scales are laid out here as they lie in memory.
        """
        s = self.shape
        padded, words = -(-s.rows // 4) * 4, -(-s.blocks // 4)
        scales = {
            "fp32_row": ((own, s.rows, s.blocks), torch.float32),
            "fp32_col": ((own, s.blocks, padded), torch.float32),
            "ue8m0": ((own, words, padded), torch.int32),
        }
        entries = (s.ranks, s.tokens, s.top_k)
        return {
            "x": ((own, s.rows, s.hidden), torch.float8_e4m3fn if s.group else self.dtype),
            "scales": scales[s.scales] if s.group else ((0,), torch.float32),
            "counts": ((own,), torch.int32),
            "source": ((own, s.rows), torch.int32),
            "ranges": ((own, s.ranks, 2), torch.int32),
            "position": ((0,) if s.gemm_push else entries, torch.int32),
            "weights": (entries if s.reduce == "sender" else (0,), torch.float32),
            "source_tokens": ((s.ranks,), torch.int32),
            "expected": ((s.tokens, 2), torch.int32),
            "dst_addr": ((own, s.rows) if s.gemm_push else (0,), torch.int64),
        }

    def shown_scales(self, scales: torch.Tensor) -> torch.Tensor | None:
        """Scales as callers see them, from how they lie in memory; None where there are none."""
        if not self.shape.group:
            return None
        return scales if self.shape.scales == "fp32_row" else scales.mT[:, : self.shape.rows]

    @property
    def memory(self) -> Memory:
        """Bytes of the rank that holds most experts."""
        s = self.shape
        slot = sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in self.result_shapes(s.local).values()
        )
        tracks = math.prod(TRACKS) if self.profile else 0
        return Memory(
            shared=self.layout.share_bytes,
            ordinary=self.slots * slot + tracks,
        )


def _check_gemm_push(combine: str, combine_dtype: str | None, reduce: str, slots: int) -> None:
    """Raises InvalidArgument for what rows exclude that the caller's kernel pushes."""
    if combine == "gemm_push" and (combine_dtype, reduce, slots) != (None, "receiver", 1):
        raise InvalidArgument(
            f"combine is 'gemm_push', combine_dtype {combine_dtype!r}, reduce {reduce!r}, slots "
            f"{slots!r}: the caller's kernel stores the rows of one dispatch at a time, one by one "
            "and in dtype: use reduce='receiver' and slots=1, and leave combine_dtype out"
        )


def _memory(geometry: LowGeometry) -> Memory:
    return geometry.memory


memory_bytes = sizes_of(
    LowGeometry.of,
    _memory,
    """Bytes that the rank with most experts will allocate, before anything is allocated.

    Takes the constructor's sizes, and `ranks`. Raises InvalidArgument as the constructor does.
    """,
)
