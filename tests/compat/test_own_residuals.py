"""flashinfer.comm's calls with residuals, weights and scales of each rank's own: its bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.compat.reduces import Pattern, make, poison, same
from tests.sums import Sum
from weft import reference
from weft.allreduce.call import FP8Group, FP8Static, FP8Token, MoEFinalize, Quant
from weft.compat.flashinfer import AllReduceFusionWorkspace, allreduce_fusion

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
HIDDEN, MOST, TOP_K = 640, 33, 3  # five groups of 128 columns: the second packed word is padded
WITH_NORM = (1, 4, 6, 7, 9, 11)


def specs(device: torch.device, rank: int) -> list[tuple[int, Quant | None, dict[str, Any]]]:
    """(pattern, what it quantises, its arguments), with a static scale of this rank's own."""
    scale = torch.tensor([0.03125 * (1 + rank)], device=device)
    static = FP8Static(scale)
    ue8m0, grouped = FP8Group(128, scale="ue8m0"), {"block_quant_group_size": 128}
    return [
        (1, None, {}),
        (2, static, {"scale_factor": scale}),
        (2, static, {"scale_factor": 0.03125 * (1 + rank)}),
        (4, static, {"scale_factor": scale}),
        (8, ue8m0, grouped),
        (9, ue8m0, grouped),
        (10, FP8Token(), {}),
        (11, FP8Token(), {}),
    ]


def outputs(device: torch.device, pattern: int, tokens: int) -> dict[str, Any]:
    """Every tensor that a pattern writes, poisoned."""
    made: dict[str, Any] = {"residual_out": poison(device, tokens, HIDDEN)}
    if pattern in WITH_NORM:
        made["norm_out"] = poison(device, tokens, HIDDEN)
    if pattern not in (1, 6, 7):
        made["quant_out"] = poison(device, tokens, HIDDEN, dtype=torch.float8_e4m3fn)
    if pattern in (8, 9):
        columns, pitch = -(-HIDDEN // 512), -(-tokens // 4) * 4
        whole = poison(device, columns * pitch, dtype=torch.int32)
        if pattern == 9:  # as torch.empty_strided makes it: no room behind the last token
            whole = whole[: (columns - 1) * pitch + tokens].clone()
        made["scale_out"] = whole.as_strided((tokens, columns), (1, pitch))
    if pattern in (10, 11):
        made["scale_out"] = poison(device, tokens, 1, dtype=torch.float32)
    return made


def compare(out: dict[str, torch.Tensor], want: weft.Reduced) -> None:
    for name, made in out.items():
        same(made, getattr(want, name.removesuffix("_out")))
    scales = out.get("scale_out")
    if scales is not None and scales.dtype == torch.int32:
        columns, pitch = scales.shape[1], -(-len(scales) // 4) * 4
        held = scales.untyped_storage().nbytes() // 4 // pitch
        padding = scales.as_strided((held, pitch), (pitch, 1))[:, len(scales) :]
        assert held >= columns - 1
        assert not padding.any(), "what lies behind the last token is zero"


def one(workspace: AllReduceFusionWorkspace, case: Sum, way: bool | None) -> None:
    """Every pattern that brings rows, once."""
    group, device = workspace.group, workspace.group.device
    xs = [case.rows(rank, device) for rank in range(group.size)]
    residual, weight = case.shared(device, group.rank)
    for pattern, quant, given in specs(device, group.rank):
        out = outputs(device, pattern, case.tokens)
        allreduce_fusion(
            xs[group.rank], workspace, pattern, use_oneshot=way, residual_in=residual,
            rms_gamma=weight, rms_eps=case.eps, weight_bias=case.bias, **given, **out,
        )  # fmt: skip
        want = reference.allreduce_fused(xs, residual, weight, case.eps, case.bias, quant)
        compare(out, want)


def moe(workspace: AllReduceFusionWorkspace, case: Sum, way: bool | None) -> None:
    """Patterns 6 and 7, whose rows are made of experts' rows."""
    group, device, tokens = workspace.group, workspace.group.device, case.tokens
    residual, weight = case.shared(device, group.rank)
    given: dict[str, Any] = {"residual_in": residual, "rms_gamma": weight, "rms_eps": case.eps}
    rows = [case.next(tokens=TOP_K * tokens, seed=r).rows(r, device) for r in range(group.size)]
    shared = [case.next(seed=50).rows(rank, device) for rank in range(group.size)]
    generator = torch.Generator(device=device).manual_seed(tokens)
    scales = torch.rand((TOP_K, tokens), generator=generator, device=device)
    places = torch.arange(TOP_K * tokens, device=device).view(TOP_K, tokens).t().int()
    made = [
        MoEFinalize(each, places, scales.t(), shared=extra)
        for each, extra in zip(rows, shared, strict=True)
    ]
    xs = [reference.finalize_moe(each) for each in made]
    want = reference.allreduce_fused(xs, residual, weight, case.eps)
    out = outputs(device, 6, tokens)
    allreduce_fusion(
        shared[group.rank], workspace, Pattern.kMoEReductionARResidualRMSNorm, use_oneshot=way,
        moe_reduction_device_num_experts=TOP_K, moe_reduction_scale_input=scales,
        moe_reduction_active_experts_token_input=rows[group.rank],
        moe_reduction_token_input=shared[group.rank], **given, **out,
    )  # fmt: skip
    compare(out, want)
    out = outputs(device, 7, tokens)
    allreduce_fusion(
        rows[group.rank], workspace, Pattern.kMoEFinalizeARResidualRMSNorm, use_oneshot=way,
        expanded_idx_to_permuted_idx=places.contiguous(),
        expert_scale_factor=scales.t().contiguous(),
        shared_expert_output=shared[group.rank], **given, **out,
    )  # fmt: skip
    compare(out, want)


def own(group: weft.Group, sizes: tuple[int, ...]) -> None:
    changes: dict[str, Any] = {
        "world_size": group.size,
        "hidden_dim": HIDDEN,
        "max_token_num": MOST,
    }
    with make(group, **changes) as workspace:
        for seed, tokens in enumerate(sizes):
            for way in (True, False, None):
                case = Sum(tokens, HIDDEN, seed=seed, bias=float(seed % 2), differ=True)
                one(workspace, case, way)
                moe(workspace, case, way)
        workspace.check()


@pytest.mark.parametrize("kind", ["threads", CUDA])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_every_pattern_applies_each_ranks_own(ranks, kind, count):
    sizes = (1, count + 1, MOST) if count < 8 else (1, 9)
    ranks(count, kind)(own, sizes)
