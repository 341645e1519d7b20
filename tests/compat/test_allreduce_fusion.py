# SPDX-License-Identifier: Apache-2.0
"""flashinfer.comm's all-reduce calls and workspaces: every pattern, bit by bit."""

from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import refused
from tests.ranks import ANY, on_ranks
from tests.rounds import bits
from tests.sums import Sum
from weft import reference
from weft.allreduce.call import FP8Group, FP8Static, FP8Token, MoEFinalize, Quant
from weft.compat import flashinfer
from weft.compat.flashinfer import AllReduceFusionWorkspace, allreduce_fusion
from weft.errors import InvalidArgument, OutOfOrder, TokenOverflow

RANKS, TOKENS, HIDDEN = 2, 6, 256
BF16 = torch.bfloat16
# Five groups of 128 columns: the second packed word is padded. On 3 and 4 ranks one shot has slots
# for one row less than MOST.
WIDE, MOST, TOP_K = 640, 65, 3
WITH_NORM = (1, 4, 6, 7, 9, 11)


def make(ranks: weft.Group, **changes: Any) -> AllReduceFusionWorkspace:
    sizes: dict[str, Any] = {"max_token_num": TOKENS, "hidden_dim": HIDDEN, "dtype": BF16}
    place = {"world_size": ranks.size, "rank": ranks.rank, "group": ranks}
    kwargs = {"backend": "trtllm", **sizes, **place, **changes}
    return flashinfer.create_allreduce_fusion_workspace(**kwargs)


def same(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    assert got is not None
    assert want is not None
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(bits(got), bits(want))


def poison(device: torch.device, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    size = (*shape, dtype.itemsize)
    return torch.full(size, 0xFF, dtype=torch.uint8, device=device).view(dtype).view(shape)


@on_ranks(RANKS, "cpu", "threads", "cuda")
def test_results_may_replace_the_inputs(group):
    """Residual and norm over residual and input, as engines write them."""
    case = Sum(TOKENS, HIDDEN)
    xs = [case.rows(rank, group.device) for rank in range(RANKS)]
    residual, weight = case.shared(group.device)
    want, x = reference.allreduce_fused(xs, residual, weight), xs[group.rank].clone()
    over: dict[str, Any] = {"residual_in": residual, "residual_out": residual, "norm_out": x}
    with make(group) as workspace:
        allreduce_fusion(x, workspace, 1, rms_gamma=weight, **over)
        same(x, want.norm)
        same(residual, want.residual)
        x, pattern = xs[group.rank].clone(), flashinfer.AllReduceFusionPattern.kAllReduce
        assert allreduce_fusion(x, workspace, pattern, output=x) is x
        same(x, reference.allreduce_fused(xs).out)


def specs(device: torch.device, rank: int) -> list[tuple[int, Quant | None, dict[str, Any]]]:
    """Return (pattern, quantisation, arguments), with a static scale of this rank's own."""
    scale = torch.tensor([0.03125 * (1 + rank)], device=device)
    static, ue8m0 = FP8Static(scale), FP8Group(128, scale="ue8m0")
    grouped = {"block_quant_group_size": 128}
    return [
        *((0, None, {}), (1, None, {})),
        *((pattern, static, {"scale_factor": scale}) for pattern in (2, 4)),
        (2, static, {"scale_factor": 0.03125 * (1 + rank)}),
        *((pattern, ue8m0, grouped) for pattern in (8, 9)),
        *((pattern, FP8Token(), {}) for pattern in (10, 11)),
    ]


def outputs(device: torch.device, pattern: int, tokens: int) -> dict[str, Any]:
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


def play_rows(workspace: AllReduceFusionWorkspace, case: Sum, way: bool | None) -> None:
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


def play_experts(workspace: AllReduceFusionWorkspace, case: Sum, way: bool | None) -> None:
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
        weights = scales.t() if scaled else None
        made = [
            MoEFinalize(each, index, weights, shared=extra if adds else None)
            for each, extra in zip(rows, shared, strict=True)
        ]
        return expected(case, group.rank, [reference.finalize_moe(each) for each in made])

    out, total = outputs(device, 6, tokens), poison(device, tokens, WIDE)
    allreduce_fusion(
        shared[group.rank], workspace, 6, output=total, moe_reduction_device_num_experts=TOP_K,
        moe_reduction_active_experts_token_input=rows[group.rank],
        moe_reduction_scale_input=scales, moe_reduction_token_input=shared[group.rank],
        **kwargs, **out,
    )  # fmt: skip
    compare(out | {"output": total}, finalized(places))
    places = places.contiguous()
    places[0, 0] = -1
    for scaled, adds in ((True, True), (False, True), (True, False)):
        out = outputs(device, 7, tokens)
        allreduce_fusion(
            rows[group.rank], workspace, 7, expanded_idx_to_permuted_idx=places,
            expert_scale_factor=scales.t().contiguous() if scaled else None,
            shared_expert_output=shared[group.rank] if adds else None, **kwargs, **out,
        )  # fmt: skip
        compare(out, finalized(places, scaled=scaled, adds=adds))


def every_pattern(group: weft.Group, sizes: tuple[int, ...]) -> None:
    with make(group, backend="auto", hidden_dim=WIDE, max_token_num=MOST) as workspace:
        shown = workspace.backend, workspace.rank, workspace.world_size
        assert shown == ("trtllm", group.rank, group.size)
        for seed, tokens in enumerate(sizes):
            for way in (True, False, None):
                case = Sum(tokens, WIDE, seed=seed, bias=float(seed % 2), differ=True)
                play_rows(workspace, case, way)
                play_experts(workspace, case, way)
        workspace.check()


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_every_pattern_applies_each_ranks_own(ranks, kind, count):
    ranks(count, kind)(every_pattern, (1, count + 1, MOST) if count < 8 else (1, 9))


@on_ranks(RANKS, "threads")
def test_sizes_of_a_workspace(group):
    x = torch.ones((TOKENS + 1, HIDDEN), dtype=BF16)
    with make(group) as workspace:
        fits = workspace.is_buffer_size_sufficient
        assert fits(RANKS, TOKENS, HIDDEN, BF16)
        assert fits(RANKS, 1, HIDDEN, BF16, use_oneshot=True)
        halves = (2 * TOKENS, HIDDEN // 2, BF16), (TOKENS, HIDDEN, torch.float16)
        for tokens, hidden, dtype in (*halves, (1, TOKENS * HIDDEN, BF16)):
            assert fits(RANKS, tokens, hidden, dtype)
            wide = torch.ones((tokens, hidden), dtype=dtype)
            for way in (True, None):
                same(allreduce_fusion(wide, workspace, 0, use_oneshot=way), wide * RANKS)
        workspace.check()
        assert not fits(RANKS, TOKENS + 1, HIDDEN, BF16)
        assert not fits(RANKS, 1, TOKENS * HIDDEN + 8, BF16)
        assert not fits(RANKS, TOKENS, HIDDEN, torch.float32)
        assert not fits(RANKS + 1, TOKENS, HIDDEN, BF16)
        refused(TokenOverflow, lambda: allreduce_fusion(x, workspace, 0), str(TOKENS + 1))
    workspace.destroy()
    refused(OutOfOrder, lambda: allreduce_fusion(x[:1], workspace, 0), "destroyed")
    refused(OutOfOrder, workspace.check, "destroyed")


@on_ranks(RANKS, "threads")
def test_calls_that_the_original_allows_are_refused(group):
    """In addition to test_arguments.py."""
    x, weight = torch.zeros((2, HIDDEN), dtype=BF16), torch.ones(HIDDEN, dtype=BF16)
    index = {"expanded_idx_to_permuted_idx": torch.zeros((2, 1), dtype=torch.int32)}
    calls: list[tuple[int, dict[str, Any], str]] = [
        (3, {}, "kARResidualRMSNormFP4Quant"),
        (5, {}, "kARResidualRMSNormOutFP4Quant"),
        (7, {"quant_out": x, **index}, "quant_out is a tensor"),
        (7, {"scale_out": x, **index}, "scale_out is a tensor"),
        (2, {}, "scale_factor is None"),
        (8, {}, "block_quant_group_size is None"),
        (7, {}, "expanded_idx_to_permuted_idx is None"),
    ]
    with make(group) as workspace:
        for pattern, kwargs, words in calls:
            kwargs = {"residual_in": x, "rms_gamma": weight, **kwargs}
            with pytest.raises(InvalidArgument, match=words):
                allreduce_fusion(x, workspace, pattern, **kwargs)
    refused(InvalidArgument, lambda: make(group, backend="mnnvl"), "multicast")
    refused(InvalidArgument, lambda: make(group, world_size=3), f"rank {group.rank} of 3")
