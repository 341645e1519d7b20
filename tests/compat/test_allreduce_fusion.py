"""flashinfer.comm's all-reduce calls on weft: the documented use, right to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import refused
from tests.compat.reduces import (
    BF16,
    EXPERTS,
    HIDDEN,
    RANKS,
    TOKENS,
    TOP_K,
    Pattern,
    make,
    poison,
    rows_for,
    same,
)
from weft import reference
from weft.allreduce.call import FP8Group, FP8Static, FP8Token, MoEFinalize, Reduced
from weft.compat.flashinfer import allreduce_fusion
from weft.errors import InvalidArgument

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def documented(group: weft.Group) -> None:
    """A sum; then sum, residual and norm, into tensors of the caller."""
    with make(group, backend="auto") as workspace:
        assert (workspace.backend, workspace.rank, workspace.world_size) == (
            "trtllm",
            group.rank,
            RANKS,
        )
        for tokens in (1, 4, TOKENS, 0, 3):
            rows = rows_for(group.device, tokens, seed=tokens)
            mine = rows.xs[group.rank]
            want = reference.allreduce_fused(rows.xs, rows.residual, rows.weight, 1e-5)
            output = poison(group.device, tokens, HIDDEN)
            answer = allreduce_fusion(mine, workspace, Pattern.kAllReduce, output=output)
            assert answer is output
            same(output, want.out)
            same(allreduce_fusion(mine, workspace, 0), want.out)
            norm, residual = (
                poison(group.device, tokens, HIDDEN),
                poison(group.device, tokens, HIDDEN),
            )
            answer = allreduce_fusion(
                input=mine,
                workspace=workspace,
                pattern=Pattern.kARResidualRMSNorm,
                launch_with_pdl=True,
                trigger_completion_at_end=False,
                fp32_acc=True,
                residual_out=residual,
                norm_out=norm,
                residual_in=rows.residual,
                rms_gamma=rows.weight,
                rms_eps=1e-5,
            )
            assert answer is norm
            same(norm, want.norm)
            same(residual, want.residual)
        workspace.check()


@pytest.mark.parametrize("kind", ["cpu", "threads", CUDA])
def test_the_documented_use(ranks, kind):
    ranks(RANKS, kind)(documented)


def in_place(group: weft.Group) -> None:
    """As engines call it: residual and norm where residual and input were, or into the input."""
    with make(group) as workspace:
        rows = rows_for(group.device, TOKENS)
        want = reference.allreduce_fused(rows.xs, rows.residual, rows.weight)
        given: dict[str, Any] = {"rms_gamma": rows.weight, "pattern": 1, "workspace": workspace}
        x, residual = rows.xs[group.rank].clone(), rows.residual.clone()
        allreduce_fusion(x, residual_in=residual, residual_out=residual, norm_out=x, **given)
        same(x, want.norm)
        same(residual, want.residual)
        x, norm = rows.xs[group.rank].clone(), poison(group.device, TOKENS, HIDDEN)
        allreduce_fusion(x, residual_in=rows.residual, residual_out=x, norm_out=norm, **given)
        same(x, want.residual)
        same(norm, want.norm)


@pytest.mark.parametrize("kind", ["threads", CUDA])
def test_results_may_replace_the_inputs(ranks, kind):
    ranks(RANKS, kind)(in_place)


def quantised(group: weft.Group) -> None:
    """Patterns 2, 4, 8 to 11: bytes and scales; with the norm where the pattern says Out."""
    scale = torch.tensor([0.03125], device=group.device)
    kinds: list[tuple[int, Any, dict[str, Any]]] = [
        (2, FP8Static(scale), {"scale_factor": scale}),
        (4, FP8Static(scale), {"scale_factor": scale}),
        (2, FP8Static(scale), {"scale_factor": 0.03125}),
        (8, FP8Group(128, scale="ue8m0"), {"block_quant_group_size": 128}),
        (9, FP8Group(128, scale="ue8m0"), {"block_quant_group_size": 128}),
        (10, FP8Token(), {}),
        (11, FP8Token(), {}),
    ]
    with make(group) as workspace:
        for tokens in (5, 1):
            rows = rows_for(group.device, tokens, seed=9)
            for pattern, quant, given in kinds:
                want = reference.allreduce_fused(
                    rows.xs, rows.residual, rows.weight, weight_bias=1.0, quant=quant
                )
                out = outputs(group.device, pattern, tokens)
                answer = allreduce_fusion(
                    rows.xs[group.rank],
                    workspace,
                    pattern,
                    residual_in=rows.residual,
                    rms_gamma=rows.weight,
                    weight_bias=1.0,
                    **given,
                    **out,
                )
                check_quantised(pattern, answer, out, want)
                bare = allreduce_fusion(
                    rows.xs[group.rank],
                    workspace,
                    pattern,
                    residual_in=rows.residual,
                    rms_gamma=rows.weight,
                    weight_bias=1.0,
                    **given,
                )
                same(bare, want.norm if "norm_out" in out else want.quant)


def outputs(device: torch.device, pattern: int, tokens: int) -> dict[str, Any]:
    """Tensors as flashinfer.comm wants them."""
    fp8 = torch.float8_e4m3fn
    found: dict[str, Any] = {
        "residual_out": poison(device, tokens, HIDDEN),
        "quant_out": poison(device, tokens, HIDDEN, dtype=fp8),
    }
    if pattern in (4, 9, 11):
        found["norm_out"] = poison(device, tokens, HIDDEN)
    if pattern in (8, 9):
        columns, pitch = -(-HIDDEN // 512), -(-tokens // 4) * 4
        found["scale_out"] = poison(device, columns, pitch, dtype=torch.int32).t()[:tokens]
        assert found["scale_out"].stride() == (1, pitch)
    if pattern in (10, 11):
        found["scale_out"] = poison(device, tokens, 1, dtype=torch.float32)
    return found


def check_quantised(
    pattern: int, answer: torch.Tensor, out: dict[str, torch.Tensor], want: Reduced
) -> None:
    assert answer is out.get("norm_out", out["quant_out"])
    same(out["residual_out"], want.residual)
    same(out["quant_out"], want.quant)
    if "norm_out" in out:
        same(out["norm_out"], want.norm)
    if "scale_out" in out:
        same(out["scale_out"], want.scale)
        if pattern in (8, 9):
            scales = out["scale_out"]
            columns, pitch = scales.shape[1], scales.stride(1)
            padding = scales.as_strided((columns, pitch), (pitch, 1))[:, len(scales) :]
            assert padding.numel()
            assert not padding.any()
    else:
        assert pattern in (2, 4)


@pytest.mark.parametrize("kind", ["threads", CUDA])
def test_fp8_patterns(ranks, kind):
    ranks(RANKS, kind)(quantised)


def without_a_last_padding(group: weft.Group) -> None:
    """Scales in memory that ends with the last token's: all padding before it becomes zero."""
    pattern = Pattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant
    wide = 4 * HIDDEN  # two columns of four scales
    generator = torch.Generator().manual_seed(7)
    with make(group, hidden_dim=wide) as workspace:
        for tokens in (1, 3, 4, 6):
            xs = [torch.randn((tokens, wide), generator=generator).to(BF16) for _ in range(RANKS)]
            xs = [x.to(group.device) for x in xs]
            residual, weight = torch.zeros_like(xs[0]), torch.ones_like(xs[0][0])
            quant = FP8Group(128, scale="ue8m0")
            want = reference.allreduce_fused(xs, residual, weight, quant=quant)
            pitch = -(-tokens // 4) * 4
            scales = torch.empty_strided(
                (tokens, 2), (1, pitch), dtype=torch.int32, device=group.device
            )
            memory = scales.as_strided((pitch + tokens,), (1,))
            assert scales.untyped_storage().nbytes() == memory.nbytes
            memory.fill_(0x7F7F7F7F)
            allreduce_fusion(
                xs[group.rank], workspace, pattern, residual_in=residual, rms_gamma=weight,
                scale_out=scales, block_quant_group_size=128,
            )  # fmt: skip
            assert want.scale is not None
            same(scales.contiguous(), want.scale.contiguous())
            assert not memory[tokens:pitch].any()


@pytest.mark.parametrize("kind", ["threads", CUDA])
def test_padding_of_scales_whose_memory_ends_with_the_last(ranks, kind):
    ranks(RANKS, kind)(without_a_last_padding)


def finalized(group: weft.Group) -> None:
    """Pattern 7: every token gathers its experts' rows, and its shared expert's."""
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(0, TOKENS * TOP_K, (TOKENS, TOP_K), generator=generator).int()
    index[1, 0] = -1
    index = index.to(group.device)
    weights = torch.rand((TOKENS, TOP_K), generator=generator).to(group.device, BF16)
    permuted = [rows_for(group.device, TOKENS * TOP_K, seed=10 + r).xs[0] for r in range(RANKS)]
    rows = rows_for(group.device, TOKENS)
    with make(group) as workspace:
        for scales in (weights, None):
            for shared in (rows.xs[0], None):
                moe = [MoEFinalize(each, index, scales, shared=shared) for each in permuted]
                want = reference.allreduce_fused(
                    [reference.finalize_moe(each) for each in moe], rows.residual, rows.weight
                )
                norm, residual = (
                    poison(group.device, TOKENS, HIDDEN),
                    poison(group.device, TOKENS, HIDDEN),
                )
                answer = allreduce_fusion(
                    permuted[group.rank],
                    workspace,
                    Pattern.kMoEFinalizeARResidualRMSNorm,
                    residual_in=rows.residual,
                    rms_gamma=rows.weight,
                    norm_out=norm,
                    residual_out=residual,
                    expanded_idx_to_permuted_idx=index,
                    expert_scale_factor=scales,
                    shared_expert_output=shared,
                )
                assert answer is norm
                same(norm, want.norm)
                same(residual, want.residual)


@pytest.mark.parametrize("kind", ["threads", CUDA])
def test_moe_finalize(ranks, kind):
    ranks(RANKS, kind)(finalized)


def reduced(group: weft.Group) -> None:
    """Pattern 6: every token adds what all experts of this rank made of it."""
    rows = rows_for(group.device, TOKENS)
    made = [rows_for(group.device, EXPERTS * TOKENS, seed=20 + r).xs[0] for r in range(RANKS)]
    numbers = torch.rand((EXPERTS, TOKENS), generator=torch.Generator().manual_seed(4))
    scale = numbers.to(group.device)
    brought = []
    for each in made:
        index = torch.arange(EXPERTS * TOKENS, device=group.device).view(EXPERTS, TOKENS).t().int()
        moe = MoEFinalize(each, index, scale.t(), shared=rows.xs[1])
        brought.append(reference.finalize_moe(moe))
    want = reference.allreduce_fused(brought, rows.residual, rows.weight)
    given: dict[str, Any] = {
        "residual_in": rows.residual,
        "rms_gamma": rows.weight,
        "moe_reduction_device_num_experts": EXPERTS,
        "moe_reduction_scale_input": scale,
        "moe_reduction_active_experts_token_input": made[group.rank],
        "moe_reduction_token_input": rows.xs[1],
    }
    with make(group) as workspace:
        call = Pattern.kMoEReductionARResidualRMSNorm
        output = poison(group.device, TOKENS, HIDDEN)
        same(allreduce_fusion(rows.xs[1], workspace, call, output=output, **given), want.norm)
        same(output, want.out)
        same(allreduce_fusion(rows.xs[1], workspace, call, **given), want.norm)
        for name in given:
            wrong = {**given, name: None}
            refused(
                InvalidArgument,
                lambda wrong=wrong: allreduce_fusion(rows.xs[1], workspace, call, **wrong),  # type: ignore[misc]
                f"{name} is None",
                call.name,
            )
        short = {**given, "moe_reduction_scale_input": scale[1:]}
        refused(
            InvalidArgument,
            lambda: allreduce_fusion(rows.xs[1], workspace, call, **short),
            "moe_reduction_scale_input is a tensor [2, 6]",
            "need 18",
        )


@pytest.mark.parametrize("kind", ["threads", CUDA])
def test_moe_reduction(ranks, kind):
    ranks(RANKS, kind)(reduced)
