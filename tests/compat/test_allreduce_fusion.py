# SPDX-License-Identifier: Apache-2.0
"""flashinfer.comm's all-reduce calls and workspaces: every pattern, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import refused
from tests.compat.reduces import (
    BF16,
    HIDDEN,
    RANKS,
    TOKENS,
    Pattern,
    make,
    poison,
    rows_for,
    same,
)
from tests.sums import Sum
from weft import reference
from weft.allreduce.call import FP8Group, FP8Static, FP8Token, MoEFinalize, Quant
from weft.compat.flashinfer import AllReduceFusionWorkspace, allreduce_fusion
from weft.errors import OutOfOrder, TokenOverflow

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
# Five groups of 128 columns: the second packed word is padded. On 3 and 4 ranks one shot has slots
# for one row less than MOST.
WIDE, MOST, TOP_K = 640, 65, 3
WITH_NORM = (1, 4, 6, 7, 9, 11)


def in_place(group: weft.Group, tokens: int) -> None:
    """Write residual and norm over residual and input as engines do, or over the input alone."""
    with make(group) as workspace:
        rows = rows_for(group.device, tokens)
        want = reference.allreduce_fused(rows.xs, rows.residual, rows.weight)
        kwargs: dict[str, Any] = {"rms_gamma": rows.weight, "pattern": 1, "workspace": workspace}
        x, residual = rows.xs[group.rank].clone(), rows.residual.clone()
        allreduce_fusion(x, residual_in=residual, residual_out=residual, norm_out=x, **kwargs)
        same(x, want.norm)
        same(residual, want.residual)
        x, norm = rows.xs[group.rank].clone(), poison(group.device, tokens, HIDDEN)
        allreduce_fusion(x, residual_in=rows.residual, residual_out=x, norm_out=norm, **kwargs)
        same(x, want.residual)
        same(norm, want.norm)
        x = rows.xs[group.rank].clone()
        assert allreduce_fusion(x, workspace, Pattern.kAllReduce, output=x) is x
        same(x, reference.allreduce_fused(rows.xs).out)


@pytest.mark.parametrize("kind", ["cpu", "threads", CUDA])
@pytest.mark.parametrize("tokens", [0, TOKENS])
def test_results_may_replace_the_inputs(ranks, kind, tokens):
    ranks(RANKS, kind)(in_place, tokens)


def specs(device: torch.device, rank: int) -> list[tuple[int, Quant | None, dict[str, Any]]]:
    """Return (pattern, quantisation, arguments), with a static scale of this rank's own."""
    scale = torch.tensor([0.03125 * (1 + rank)], device=device)
    static = FP8Static(scale)
    ue8m0, grouped = FP8Group(128, scale="ue8m0"), {"block_quant_group_size": 128}
    return [
        (0, None, {}),
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
    """Return every tensor that a pattern writes, poisoned."""
    if pattern == 0:
        return {"output": poison(device, tokens, WIDE)}
    made: dict[str, Any] = {"residual_out": poison(device, tokens, WIDE)}
    if pattern in WITH_NORM:
        made["norm_out"] = poison(device, tokens, WIDE)
    if pattern not in (1, 6, 7):
        made["quant_out"] = poison(device, tokens, WIDE, dtype=torch.float8_e4m3fn)
    if pattern in (8, 9):
        columns, pitch = -(-WIDE // 512), -(-tokens // 4) * 4
        whole = poison(device, columns * pitch, dtype=torch.int32)
        if pattern == 9:  # as torch.empty_strided makes it: no room after the last token
            whole = whole[: (columns - 1) * pitch + tokens].clone()
        made["scale_out"] = whole.as_strided((tokens, columns), (1, pitch))
    if pattern in (10, 11):
        made["scale_out"] = poison(device, tokens, 1, dtype=torch.float32)
    return made


def expected(
    case: Sum, rank: int, xs: list[torch.Tensor], pattern: int = 1, quant: Quant | None = None
) -> weft.Reduced:
    """Return a pattern's results for every rank's rows, with this rank's residual and weight."""
    if pattern == 0:
        return reference.allreduce_fused(xs)
    residual, weight = case.shared(xs[0].device, rank)
    return reference.allreduce_fused(xs, residual, weight, case.eps, case.bias, quant)


def compare(out: dict[str, torch.Tensor], want: weft.Reduced) -> None:
    for name, made in out.items():
        same(made, getattr(want, "out" if name == "output" else name.removesuffix("_out")))
    scales = out.get("scale_out")
    if scales is not None and scales.dtype == torch.int32:
        columns, pitch = scales.shape[1], -(-len(scales) // 4) * 4
        held = scales.untyped_storage().nbytes() // 4 // pitch
        padding = scales.as_strided((held, pitch), (pitch, 1))[:, len(scales) :]
        assert held >= columns - 1
        assert not padding.any(), "what follows the last token is zero"


def one(workspace: AllReduceFusionWorkspace, case: Sum, way: bool | None) -> None:
    """Call every pattern that takes rows; with `way` unset also without output tensors."""
    group, device = workspace.group, workspace.group.device
    xs = [case.rows(rank, device) for rank in range(group.size)]
    residual, weight = case.shared(device, group.rank)
    for pattern, quant, kwargs in specs(device, group.rank):
        kwargs |= {"residual_in": residual, "rms_gamma": weight, "rms_eps": case.eps}
        kwargs |= {"weight_bias": case.bias, "use_oneshot": way, "launch_with_pdl": True}
        kwargs |= {"trigger_completion_at_end": False, "fp32_acc": True}
        out = outputs(device, pattern, case.tokens)
        answer = allreduce_fusion(xs[group.rank], workspace, pattern, **kwargs, **out)
        want = expected(case, group.rank, xs, pattern, quant)
        names = [name for name in ("norm_out", "quant_out", "output") if name in out]
        assert answer is out[names[0]]
        compare(out, want)
        if way is None:
            bare = allreduce_fusion(xs[group.rank], workspace, pattern, **kwargs)
            compare({names[0]: bare}, want)


def moe(workspace: AllReduceFusionWorkspace, case: Sum, way: bool | None) -> None:
    """Call patterns 6 and 7, which first sum experts' rows."""
    group, device, tokens = workspace.group, workspace.group.device, case.tokens
    residual, weight = case.shared(device, group.rank)
    kwargs: dict[str, Any] = {"residual_in": residual, "rms_gamma": weight, "rms_eps": case.eps}
    kwargs |= {"use_oneshot": way, "weight_bias": case.bias}
    rows = [case.next(tokens=TOP_K * tokens, seed=r).rows(r, device) for r in range(group.size)]
    shared = [case.next(seed=50).rows(rank, device) for rank in range(group.size)]
    generator = torch.Generator(device=device).manual_seed(tokens)
    scales = torch.rand((TOP_K, tokens), generator=generator, device=device)
    places = torch.arange(TOP_K * tokens, device=device).view(TOP_K, tokens).t().int()

    def finalized(index: torch.Tensor, *, scaled: bool = True, adds: bool = True) -> weft.Reduced:
        made = [
            MoEFinalize(each, index, scales.t() if scaled else None, shared=extra if adds else None)
            for each, extra in zip(rows, shared, strict=True)
        ]
        return expected(case, group.rank, [reference.finalize_moe(each) for each in made])

    out, total = outputs(device, 6, tokens), poison(device, tokens, WIDE)
    allreduce_fusion(
        shared[group.rank], workspace, Pattern.kMoEReductionARResidualRMSNorm, output=total,
        moe_reduction_device_num_experts=TOP_K, moe_reduction_scale_input=scales,
        moe_reduction_active_experts_token_input=rows[group.rank],
        moe_reduction_token_input=shared[group.rank], **kwargs, **out,
    )  # fmt: skip
    compare(out | {"output": total}, finalized(places))
    places = places.contiguous()
    places[0, 0] = -1
    for scaled, adds in ((True, True), (False, True), (True, False)):
        out = outputs(device, 7, tokens)
        allreduce_fusion(
            rows[group.rank], workspace, Pattern.kMoEFinalizeARResidualRMSNorm,
            expanded_idx_to_permuted_idx=places,
            expert_scale_factor=scales.t().contiguous() if scaled else None,
            shared_expert_output=shared[group.rank] if adds else None, **kwargs, **out,
        )  # fmt: skip
        compare(out, finalized(places, scaled=scaled, adds=adds))


def own(group: weft.Group, sizes: tuple[int, ...]) -> None:
    changes: dict[str, Any] = {
        "world_size": group.size,
        "hidden_dim": WIDE,
        "max_token_num": MOST,
    }
    with make(group, backend="auto", **changes) as workspace:
        shown = workspace.backend, workspace.rank, workspace.world_size
        assert shown == ("trtllm", group.rank, group.size)
        for seed, tokens in enumerate(sizes):
            for way in (True, False, None):
                case = Sum(tokens, WIDE, seed=seed, bias=float(seed % 2), differ=True)
                one(workspace, case, way)
                moe(workspace, case, way)
        workspace.check()


@pytest.mark.parametrize("kind", ["threads", CUDA])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_every_pattern_applies_each_ranks_own(ranks, kind, count):
    sizes = (1, count + 1, MOST) if count < 8 else (1, 9)
    ranks(count, kind)(own, sizes)


def workspaces(group: weft.Group) -> None:
    rows = rows_for(group.device, TOKENS + 1)
    with make(group) as workspace:
        assert workspace.is_buffer_size_sufficient(RANKS, TOKENS, HIDDEN, BF16)
        assert workspace.is_buffer_size_sufficient(RANKS, 1, HIDDEN, BF16, use_oneshot=True)
        for tokens, hidden, dtype in (
            (2 * TOKENS, HIDDEN // 2, BF16),
            (TOKENS, HIDDEN, torch.float16),
            (1, TOKENS * HIDDEN, BF16),
        ):
            assert workspace.is_buffer_size_sufficient(RANKS, tokens, hidden, dtype)
            wide = torch.ones((tokens, hidden), dtype=dtype, device=group.device)
            for way in (True, None):
                same(allreduce_fusion(wide, workspace, 0, use_oneshot=way), wide * RANKS)
        workspace.check()
        for tp, tokens, hidden, dtype in (
            (RANKS, TOKENS + 1, HIDDEN, BF16),
            (RANKS, 1, TOKENS * HIDDEN + 8, BF16),
            (RANKS, TOKENS, HIDDEN, torch.float32),
            (RANKS + 1, TOKENS, HIDDEN, BF16),
        ):
            assert not workspace.is_buffer_size_sufficient(tp, tokens, hidden, dtype)
        x = rows.xs[group.rank]
        refused(TokenOverflow, lambda: allreduce_fusion(x, workspace, 0), str(TOKENS + 1))
    workspace.destroy()
    refused(OutOfOrder, lambda: allreduce_fusion(x[:1], workspace, 0), "destroyed")
    refused(OutOfOrder, workspace.check, "destroyed")


def test_workspaces(ranks):
    ranks(RANKS, "threads")(workspaces)


def from_a_process_group(group: weft.Group) -> None:
    """Make workspaces of a process group, which stays the caller's, and of the world."""
    ranks = group.process_group()
    for inputs in (ranks, None):
        with make(group, group=inputs) as workspace:
            rows = rows_for(group.device, 3)
            want = reference.allreduce_fused(rows.xs).out
            same(allreduce_fusion(rows.xs[group.rank], workspace, 0), want)
            assert workspace.group is not group
        assert group.all_gather(1) == [1, 1]


def test_a_process_group_names_the_ranks(ranks):
    ranks(RANKS, "cpu")(from_a_process_group)
