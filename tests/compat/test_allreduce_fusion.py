"""flashinfer.comm's all-reduce calls on weft: the documented use, right to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import refused
from weft.compat.flashinfer import (
    AllReduceFusionPattern,
    AllReduceFusionWorkspace,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
)
from weft.errors import CreationFailed, InvalidArgument, OutOfOrder, TokenOverflow
from weft.ops import reference
from weft.ops.reduce_spec import FP8Group, FP8Static, FP8Token, MoEFinalize, Reduced

Pattern = AllReduceFusionPattern
RANKS, TOKENS, HIDDEN, TOP_K, EXPERTS = 2, 6, 256, 2, 3
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Rows:
    """What every rank brings to one call; residual and weight are the same on all ranks."""

    xs: list[torch.Tensor]
    residual: torch.Tensor
    weight: torch.Tensor


def rows_for(tokens: int, seed: int = 0, dtype: torch.dtype = BF16) -> Rows:
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    xs = [some(tokens, HIDDEN) for _ in range(RANKS)]
    return Rows(xs, some(tokens, HIDDEN), some(HIDDEN))


def make(ranks: weft.Group, **changes: Any) -> AllReduceFusionWorkspace:
    sizes: dict[str, Any] = {
        "backend": "trtllm",
        "world_size": ranks.size,
        "rank": ranks.rank,
        "max_token_num": TOKENS,
        "hidden_dim": HIDDEN,
        "dtype": BF16,
        "group": ranks,
    }
    return create_allreduce_fusion_workspace(**{**sizes, **changes})


def same(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    assert got is not None
    assert want is not None
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(*(torch.stack([t]).flatten().view(torch.uint8) for t in (got, want)))


def poison(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full((*shape, dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype).view(shape)


def documented(group: weft.Group) -> None:
    """A sum; then sum, residual and norm, into tensors of the caller."""
    with make(group, backend="auto") as workspace:
        assert (workspace.backend, workspace.rank, workspace.world_size) == (
            "trtllm",
            group.rank,
            RANKS,
        )
        for tokens in (1, 4, TOKENS, 0, 3):
            rows = rows_for(tokens, seed=tokens)
            mine = rows.xs[group.rank]
            want = reference.allreduce_fused(rows.xs, rows.residual, rows.weight, 1e-5)
            output = poison(tokens, HIDDEN)
            answer = allreduce_fusion(mine, workspace, Pattern.kAllReduce, output=output)
            assert answer is output
            same(output, want.out)
            same(allreduce_fusion(mine, workspace, 0), want.out)
            norm, residual = poison(tokens, HIDDEN), poison(tokens, HIDDEN)
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


@pytest.mark.parametrize("kind", ["cpu", "threads"])
def test_the_documented_use(ranks, kind):
    ranks(RANKS, kind)(documented)


def in_place(group: weft.Group) -> None:
    """As engines call it: residual and norm where residual and input were, or into the input."""
    with make(group) as workspace:
        rows = rows_for(TOKENS)
        want = reference.allreduce_fused(rows.xs, rows.residual, rows.weight)
        given: dict[str, Any] = {"rms_gamma": rows.weight, "pattern": 1, "workspace": workspace}
        x, residual = rows.xs[group.rank].clone(), rows.residual.clone()
        allreduce_fusion(x, residual_in=residual, residual_out=residual, norm_out=x, **given)
        same(x, want.norm)
        same(residual, want.residual)
        x, norm = rows.xs[group.rank].clone(), poison(TOKENS, HIDDEN)
        allreduce_fusion(x, residual_in=rows.residual, residual_out=x, norm_out=norm, **given)
        same(x, want.residual)
        same(norm, want.norm)


def test_results_may_replace_the_inputs(ranks):
    ranks(RANKS, "threads")(in_place)


def quantised(group: weft.Group) -> None:
    """Patterns 2, 4, 8 to 11: bytes and scales; with the norm where the pattern says Out."""
    scale = torch.tensor([0.03125])
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
            rows = rows_for(tokens, seed=9)
            for pattern, quant, given in kinds:
                want = reference.allreduce_fused(
                    rows.xs, rows.residual, rows.weight, weight_bias=1.0, quant=quant
                )
                out = outputs(pattern, tokens)
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


def outputs(pattern: int, tokens: int) -> dict[str, Any]:
    """Tensors as flashinfer.comm wants them."""
    fp8 = torch.float8_e4m3fn
    found: dict[str, Any] = {
        "residual_out": poison(tokens, HIDDEN),
        "quant_out": poison(tokens, HIDDEN, dtype=fp8),
    }
    if pattern in (4, 9, 11):
        found["norm_out"] = poison(tokens, HIDDEN)
    if pattern in (8, 9):
        columns, pitch = -(-HIDDEN // 512), -(-tokens // 4) * 4
        found["scale_out"] = poison(columns, pitch, dtype=torch.int32).t()[:tokens]
        assert found["scale_out"].stride() == (1, pitch)
    if pattern in (10, 11):
        found["scale_out"] = poison(tokens, 1, dtype=torch.float32)
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
    else:
        assert pattern in (2, 4)


def test_fp8_patterns(ranks):
    ranks(RANKS, "threads")(quantised)


def finalized(group: weft.Group) -> None:
    """Pattern 7: every token gathers its experts' rows, and its shared expert's."""
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(0, TOKENS * TOP_K, (TOKENS, TOP_K), generator=generator).int()
    index[1, 0] = -1
    weights = torch.rand((TOKENS, TOP_K), generator=generator).to(BF16)
    permuted = [rows_for(TOKENS * TOP_K, seed=10 + r).xs[0] for r in range(RANKS)]
    rows = rows_for(TOKENS)
    with make(group) as workspace:
        for scales in (weights, None):
            for shared in (rows.xs[0], None):
                moe = [MoEFinalize(each, index, scales, shared=shared) for each in permuted]
                want = reference.allreduce_fused(
                    [reference.finalize_moe(each) for each in moe], rows.residual, rows.weight
                )
                norm, residual = poison(TOKENS, HIDDEN), poison(TOKENS, HIDDEN)
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


def test_moe_finalize(ranks):
    ranks(RANKS, "threads")(finalized)


def reduced(group: weft.Group) -> None:
    """Pattern 6: every token adds what all experts of this rank made of it."""
    rows = rows_for(TOKENS)
    made = [rows_for(EXPERTS * TOKENS, seed=20 + r).xs[0] for r in range(RANKS)]
    scale = torch.rand((EXPERTS, TOKENS), generator=torch.Generator().manual_seed(4))
    brought = []
    for each in made:
        index = torch.arange(EXPERTS * TOKENS).view(EXPERTS, TOKENS).t().int()
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
        output = poison(TOKENS, HIDDEN)
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
            "moe_reduction_scale_input has 12 elements",
            "need 18",
        )


def test_moe_reduction(ranks):
    ranks(RANKS, "threads")(reduced)


def strategies(group: weft.Group) -> None:
    """use_oneshot chooses how, and never what; a size that one shot does not serve is served."""
    most = 200
    with make(group, max_token_num=most) as workspace:
        for tokens in (1, 3, most):
            rows = rows_for(tokens)
            want = reference.allreduce_fused(rows.xs).out
            for way in (True, False, None):
                same(
                    allreduce_fusion(rows.xs[group.rank], workspace, 0, use_oneshot=way),
                    want,
                )


def test_strategies_give_the_same_bits(ranks):
    ranks(RANKS, "threads")(strategies)


def workspaces(group: weft.Group) -> None:
    rows = rows_for(TOKENS + 1)
    with make(group) as workspace:
        assert workspace.is_buffer_size_sufficient(RANKS, TOKENS, HIDDEN, BF16)
        assert workspace.is_buffer_size_sufficient(RANKS, 1, HIDDEN, BF16, use_oneshot=True)
        for tp, tokens, hidden, dtype in (
            (RANKS, TOKENS + 1, HIDDEN, BF16),
            (RANKS, TOKENS, HIDDEN // 2, BF16),
            (RANKS, TOKENS, HIDDEN, torch.float16),
            (RANKS + 1, TOKENS, HIDDEN, BF16),
        ):
            assert not workspace.is_buffer_size_sufficient(tp, tokens, hidden, dtype)
        x = rows.xs[group.rank]
        refused(TokenOverflow, lambda: allreduce_fusion(x, workspace, 0), str(TOKENS + 1))
        for call in (workspace.checkpoint_prepare, lambda: workspace.checkpoint_restore(None)):
            refused(InvalidArgument, call, "is refused")
    workspace.destroy()
    refused(OutOfOrder, lambda: allreduce_fusion(x[:1], workspace, 0), "destroyed")
    refused(OutOfOrder, workspace.check, "destroyed")


def test_workspaces(ranks):
    ranks(RANKS, "threads")(workspaces)


def refusals(group: weft.Group) -> None:
    rows = rows_for(2)
    x = rows.xs[group.rank]
    normed: dict[str, Any] = {"residual_in": rows.residual, "rms_gamma": rows.weight}
    with make(group) as workspace:

        def call(pattern: int, *words: str, **given: Any) -> None:
            refused(
                InvalidArgument,
                lambda: allreduce_fusion(x, workspace, pattern, **given),
                *words,
            )

        for pattern in (3, 5):
            call(pattern, "NVFP4", Pattern(pattern).name, **normed)
        call(12, "pattern is 12", "0..11")
        call(1, "layout_code is 0", layout_code=0, **normed)
        call(1, "residual_in is None", rms_gamma=rows.weight)
        call(1, "rms_gamma is None", residual_in=rows.residual)
        call(1, "quant_out is a tensor", quant_out=x, **normed)
        call(1, "scale_out is a tensor", scale_out=x, **normed)
        call(2, "scale_factor is None", **normed)
        call(2, "norm_out is a tensor", norm_out=x, scale_factor=1.0, **normed)
        call(8, "block_quant_group_size is 64", block_quant_group_size=64, **normed)
        call(8, "block_quant_group_size is None", **normed)
        call(7, "expanded_idx_to_permuted_idx is None", **normed)
        call(7, "moe_finalize_backend is 'cake'", moe_finalize_backend="cake", **normed)
    for name in ("world_size", "rank", "max_token_num", "hidden_dim", "dtype"):
        refused(InvalidArgument, lambda name=name: make(group, **{name: None}), f"{name} is None")  # type: ignore[misc]
    refused(InvalidArgument, lambda: make(group, backend="mnnvl"), "multicast")
    refused(
        InvalidArgument,
        lambda: make(group, world_size=3),
        "rank 0 of 3" if group.rank == 0 else "rank 1 of 3",
    )
    refused(CreationFailed, lambda: make(group, hidden_dim=12), "hidden")


def test_refusals(ranks):
    ranks(RANKS, "threads")(refusals)


def from_a_process_group(group: weft.Group) -> None:
    """The ranks of a process group, which stays the caller's; and torch's world without one."""
    ranks = group.process_group()
    for given in (ranks, None):
        with make(group, group=given) as workspace:
            rows = rows_for(3)
            want = reference.allreduce_fused(rows.xs).out
            same(allreduce_fusion(rows.xs[group.rank], workspace, 0), want)
            assert workspace.group is not group
        assert group.all_gather(1) == [1, 1]


def test_a_process_group_names_the_ranks(ranks):
    ranks(RANKS, "cpu")(from_a_process_group)
