# SPDX-License-Identifier: Apache-2.0
"""Choose the mode and overlap for "auto" from measured constants, identically on all ranks.

All overlaps of a mode give the same bits, so the overlap affects only time and memory. The modes
sum in different orders.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import GeometryMismatch
from weft.group import Group

_log = logging.getLogger(__name__)
AUTO = "auto"
MODES = ("throughput", "low_latency")
OVERLAPS = ("none", "shared_expert", "gemm_push")

# Maximum max_tokens for which mode="auto" selects low latency. On 1 and 2 x H100 it takes 0 to 3 %
# less time than throughput at 8 to 64 tokens per rank, never more than 0.5 % more (DeepSeek-V3,
# -V4-Flash and -V4-Pro in FP8, 2026-11-27). At 128 tokens it takes as long for DeepSeek-V3 and
# 1.5 % less for -V4-Flash on 2 x H200 (2026-11-30), and 4 and 8 % less for -V3 and Qwen3-30B-A3B on
# 4 x H200 (2026-11-22). Its memory grows with the tokens of all ranks.
LOW_LATENCY_MAX_TOKENS = 128
# The same for one rank: at 128 tokens low latency takes 0.8 % more time for DeepSeek-V3, at 512
# tokens 4 % more (DeepSeek-V3 and -V4-Flash, 1 x H200, 2026-11-30).
LOW_LATENCY_MAX_TOKENS_ONE_RANK = 64
# Maximum max_tokens for which overlap="auto" selects gemm_push. It is the fastest, or within 0.3 %
# of the fastest, at all of 46 points up to 1024 tokens (DeepSeek-V3, GLM-4.5-Air, gpt-oss-120b,
# Qwen3-30B-A3B in FP8 and bf16, 2 and 4 x H200, 2026-11-21 and 2026-11-22). At 2048 and 4096 tokens
# it takes 0.4 to 2.4 % less than "none" (DeepSeek-V3 and -V4-Flash, 2 x H200, 2026-11-30). Larger
# sizes were not measured.
GEMM_PUSH_MAX_TOKENS = {"throughput": 4096, "low_latency": 512}
# The same for one rank. Nothing crosses NVLink, and from 512 tokens on gemm_push takes up to 1.8 %
# more time than "none", at 128 and 256 at most 0.2 % more and up to 1 % less (DeepSeek-V3 and
# -V4-Flash, 1 x H200, 2026-11-30).
GEMM_PUSH_MAX_TOKENS_ONE_RANK = 256


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The mode and overlap of a layer, and the rule that selected them.

    Attributes:
        mode: Mode of the layer.
        overlap: Overlap of the layer.
        auto: The overlap that "auto" selects in this mode. It differs from overlap if the caller
            passed another one.
        reason: The rule by which "auto" selects it.
    """

    mode: str
    overlap: str
    auto: str
    reason: str

    @property
    def text(self) -> str:
        """The choice and its reason as a sentence."""
        prefix = f"{self.overlap}, as requested. auto: " if self.overlap != self.auto else ""
        return f"{prefix}{self.reason}"


def choose_mode(
    supported: Sequence[tuple[str, str]], *, max_tokens: int, num_ranks: int, on_gpu: bool
) -> tuple[str, str]:
    """Return the mode that "auto" selects, and the reason.

    Args:
        supported: Pairs of mode and overlap that all ranks support, at least one.
        max_tokens: Maximum tokens of a rank in one call.
        num_ranks: Number of ranks.
        on_gpu: Whether the ranks are GPUs. CPU ranks were not measured.
    """
    modes = {mode for mode, _ in supported}
    if len(modes) == 1:
        mode = modes.pop()
        return mode, f"mode {mode}: the only one that was requested or that supports this layer."
    limit = LOW_LATENCY_MAX_TOKENS if num_ranks > 1 else LOW_LATENCY_MAX_TOKENS_ONE_RANK
    small = max_tokens <= limit and on_gpu and ("low_latency", "gemm_push") in supported
    mode = "low_latency" if small else "throughput"
    return mode, (
        f"mode {mode} for up to {max_tokens} tokens a rank: low_latency up to "
        f"{limit} on GPUs where it supports gemm_push, up to 3 % faster there "
        "(DeepSeek-V3 and -V4, 1 and 2 x H100 and H200, 2026-11-27 and 2026-11-30)."
    )


def choose_overlap(
    supported: Sequence[tuple[str, str]], mode: str, *, max_tokens: int, num_ranks: int
) -> tuple[str, str]:
    """Return the overlap that "auto" selects in a mode, and the reason.

    Args:
        supported: As in `choose_mode`.
        mode: "throughput" or "low_latency".
        max_tokens: As in `choose_mode`.
        num_ranks: As in `choose_mode`.
    """
    candidates = [overlap for other_mode, overlap in supported if other_mode == mode]
    if len(candidates) == 1:
        return candidates[0], f"overlap {candidates[0]}: no other supports this layer."
    limit = GEMM_PUSH_MAX_TOKENS[mode] if num_ranks > 1 else GEMM_PUSH_MAX_TOKENS_ONE_RANK
    if "gemm_push" in candidates and max_tokens <= limit:
        overlap = "gemm_push"
    else:
        overlap = "shared_expert" if "shared_expert" in candidates else candidates[0]
    return overlap, (
        f"overlap {overlap} for up to {max_tokens} tokens a rank: gemm_push up to {limit} where "
        "supported, within 1.2 % of the fastest at 74 points (5 models, 1, 2 and 4 x H200, "
        "2026-11-22 and 2026-11-30); else shared_expert, or none."
    )


def agree_on_choice(
    group: Group, supported: Sequence[tuple[str, str]], *, overlap: str, max_tokens: int
) -> LayerChoice:
    """Choose the layer's mode and overlap, equal on all ranks. Collective.

    Args:
        supported: Pairs of mode and overlap that this rank supports. Only pairs that all ranks
            support can be chosen.
        overlap: "auto" or an overlap, equal on all ranks.
        max_tokens: Maximum tokens of a rank in one call, equal on all ranks.

    Raises:
        GeometryMismatch: no pair is supported by all ranks. Every rank raises it.
    """
    pairs_by_rank = group.all_gather([" ".join(pair) for pair in supported])
    by_rank = {rank: pairs_by_rank[rank] for rank in group.living}
    first = by_rank[group.living[0]]
    common = [pair for pair in first if all(pair in pairs for pairs in by_rank.values())]
    if not common:
        lists = "; ".join(f"rank {rank}: {', '.join(pairs)}" for rank, pairs in by_rank.items())
        raise GeometryMismatch(
            f"no overlap is supported by all ranks ({lists}): pass the same combine_dtype and gemm "
            "on each"
        )
    pairs = [(pair.split()[0], pair.split()[1]) for pair in common]
    on_gpu = group.device.type == "cuda"
    mode, mode_reason = choose_mode(
        pairs, max_tokens=max_tokens, num_ranks=group.size, on_gpu=on_gpu
    )
    auto, reason = choose_overlap(pairs, mode, max_tokens=max_tokens, num_ranks=group.size)
    selected = auto if overlap == AUTO else overlap
    choice = LayerChoice(mode, selected, auto, f"{mode_reason} {reason}")
    if group.rank == 0:
        _log.info("MoE layer, mode %r, overlap %r: %s", mode, selected, choice.text)
    return choice
