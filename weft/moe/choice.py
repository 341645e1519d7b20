# SPDX-License-Identifier: Apache-2.0
"""Choose the mode and overlap for "auto" from measured constants, identically on all ranks.

Every overlap of a mode gives the same bits, so it decides time and memory only. The modes sum in
different orders.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import GeometryMismatch
from weft.memory import Group

_log = logging.getLogger(__name__)
AUTO = "auto"
MODES = ("throughput", "low_latency")
OVERLAPS = ("none", "shared_expert", "gemm_push")

# Largest max_tokens for which mode="auto" is low latency. On 1 and 2 x H100 it takes 0 to 3 % less
# time than throughput at 8 to 64 tokens a rank, never more than 0.5 % more (DeepSeek-V3, -V4-Flash
# and -V4-Pro in FP8, 2026-11-27). At 128 tokens it is up to 1.2 % slower on one GPU, at 512 up to
# 4 %, and its memory grows with the tokens of all ranks.
LOW_LATENCY_TOKENS = 64
# Tokens a rank up to which overlap="auto" is gemm_push: the fastest, or within 0.3 % of it, at all
# of 46 points (DeepSeek-V3, GLM-4.5-Air, gpt-oss-120b, Qwen3-30B-A3B in FP8 and bf16, 2 and 4 x
# H200, 2026-11-21 and 2026-11-22). Nothing was measured above, where a slot for every expert of a
# token takes much memory.
PUSHED_TOKENS = {"throughput": 1024, "low_latency": 512}
# One rank: nothing crosses NVLink, and gemm_push takes 5 % more than "none" at 512 and 1024 tokens
# of DeepSeek-V3, 2 to 3 % less at 8 and 64 (1 x H200, 2026-11-23).
PUSHED_TOKENS_ALONE = 256


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """The mode and overlap of a layer, and the reason.

    Attributes:
        mode: Mode of the layer.
        overlap: Overlap of the layer.
        auto: The overlap that "auto" takes in this mode; the same, unless another was asked for.
        reason: The rule by which "auto" takes it.
    """

    mode: str
    overlap: str
    auto: str
    reason: str

    @property
    def text(self) -> str:
        """The choice in words."""
        asked = f"{self.overlap}, as asked. auto: " if self.overlap != self.auto else ""
        return f"{asked}{self.reason}"


def choose_mode(
    serving: Sequence[tuple[str, str]], *, max_tokens: int, gpus: bool
) -> tuple[str, str]:
    """The mode that "auto" takes, and why.

    serving: the modes and overlaps that serve the layer on all ranks, one at least.
    gpus: ranks are GPUs; CPU ranks were not measured.
    """
    modes = {mode for mode, _ in serving}
    if len(modes) == 1:
        mode = modes.pop()
        return mode, f"mode {mode}: the only one that was asked for or serves this layer."
    small = max_tokens <= LOW_LATENCY_TOKENS and gpus and ("low_latency", "gemm_push") in serving
    mode = "low_latency" if small else "throughput"
    return mode, (
        f"mode {mode} for up to {max_tokens} tokens a rank: low_latency up to "
        f"{LOW_LATENCY_TOKENS} on GPUs where it has gemm_push, up to 3 % faster there (DeepSeek-V3 "
        "and -V4, 1 and 2 x H100, 2026-11-27)."
    )


def choose_overlap(
    serving: Sequence[tuple[str, str]], mode: str, *, max_tokens: int, ranks: int
) -> tuple[str, str]:
    """The overlap that "auto" takes in a mode, and why; arguments as in `choose_mode`."""
    able = [overlap for each, overlap in serving if each == mode]
    if len(able) == 1:
        return able[0], f"overlap {able[0]}: no other serves this layer."
    most = PUSHED_TOKENS[mode] if ranks > 1 else PUSHED_TOKENS_ALONE
    if "gemm_push" in able and max_tokens <= most:
        overlap = "gemm_push"
    else:
        overlap = "shared_expert" if "shared_expert" in able else able[0]
    return overlap, (
        f"overlap {overlap} for up to {max_tokens} tokens a rank: gemm_push up to {most} where it "
        "serves, within 0.3 % of the fastest at 46 points (4 models, 2 and 4 x H200, 2026-11-22); "
        "else shared_expert, or none."
    )


def agreed_choice(
    group: Group, serving: Sequence[tuple[str, str]], *, overlap: str, max_tokens: int
) -> LayerChoice:
    """What this layer does. Collective; it depends only on what all ranks have in common.

    serving: the modes and overlaps that serve on this rank; only those of all ranks count.
    overlap: "auto" or one; max_tokens: of a rank in one call; both were compared between ranks.

    Raises GeometryMismatch on all ranks where nothing serves all of them.
    """
    said = group.all_gather([" ".join(each) for each in serving])
    lists = {rank: said[rank] for rank in group.living}
    first = lists[group.living[0]]
    common = [words for words in first if all(words in others for others in lists.values())]
    if not common:
        each = "; ".join(f"rank {rank}: {', '.join(words)}" for rank, words in lists.items())
        raise GeometryMismatch(
            f"no overlap serves all ranks ({each}): pass the same combine_dtype and gemm on each"
        )
    pairs = [(words.split()[0], words.split()[1]) for words in common]
    gpus = group.device.type == "cuda"
    mode, why_mode = choose_mode(pairs, max_tokens=max_tokens, gpus=gpus)
    auto, why = choose_overlap(pairs, mode, max_tokens=max_tokens, ranks=group.size)
    taken = auto if overlap == AUTO else overlap
    found = LayerChoice(mode, taken, auto, f"{why_mode} {why}")
    if group.rank == 0:
        _log.info("MoE layer, mode %r, overlap %r: %s", mode, taken, found.text)
    return found
