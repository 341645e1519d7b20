"""flashinfer.comm's older calls of MoE all-reduces, as its own test programs make them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import refused
from tests.compat.reduces import poison, same
from tests.sums import Sum
from weft import reference
from weft.allreduce.spec import MoEFinalize, Reduced
from weft.compat.flashinfer import (
    QuantizationSFLayout,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce,
    trtllm_moe_allreduce_fusion,
    trtllm_moe_finalize_allreduce_fusion,
)
from weft.errors import InvalidArgument

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
MOST, HIDDEN = 40, 640
HALF, BF16 = torch.float16, torch.bfloat16
NOTHING: dict[str, Any] = {"quant_out": None, "scale_out": None}


def made_workspace(group: weft.Group) -> tuple[Any, torch.Tensor]:
    handles, pointers = trtllm_create_ipc_workspace_for_all_reduce_fusion(
        group.rank, group.size, MOST, HIDDEN, group=group
    )
    return handles, pointers


def repeated(device: torch.device, call: Any) -> None:
    """As its programs do: warmed up on a stream of its own, then in a graph; on CPU ranks again."""
    if device.type != "cuda":
        for _ in range(3):
            call()
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            call()
    graph.replay()
    torch.cuda.synchronize()


def compare(made: dict[str, torch.Tensor], want: Reduced, tokens: int) -> None:
    for name, tensor in made.items():
        whole = (
            want.out if name == "moe_allreduce_out" else getattr(want, name.removesuffix("_out"))
        )
        same(tensor.view(tokens, HIDDEN), whole)


def summed(group: weft.Group, case: Sum, experts: int) -> tuple[dict[str, Any], Reduced]:
    """What a rank brings to the MoE reduction, flat as there, and what comes of it."""
    device, tokens = group.device, case.tokens
    residual, weight = case.shared(device, group.rank)
    active = [
        case.next(tokens=experts * tokens, seed=case.seed + 7).rows(r, device)
        for r in range(group.size)
    ]
    shared = [case.next(seed=case.seed + 8).rows(r, device) for r in range(group.size)]
    generator = torch.Generator(device=device).manual_seed(case.seed)
    scales = torch.randn(experts * tokens, generator=generator, device=device)
    index = torch.arange(experts * tokens, device=device).view(experts, tokens).t().int()
    weights = scales.view(experts, tokens).t()
    xs = [
        reference.finalize_moe(MoEFinalize(each, index, weights, shared=extra))
        for each, extra in zip(active, shared, strict=True)
    ]
    given = {
        "residual_in": residual.view(-1),
        "rms_gamma": weight,
        "rms_eps": case.eps,
        "moe_reduction_device_num_experts": experts,
        "moe_reduction_scale_input": scales,
        "moe_reduction_active_experts_token_input": active[group.rank].view(-1),
        "moe_reduction_token_input": shared[group.rank].view(-1),
    }
    want = reference.allreduce_fused(xs, residual, weight, case.eps, case.bias)
    return given, want


def reductions(group: weft.Group, dtype: torch.dtype) -> None:
    handles, pointers = made_workspace(group)
    names = ("moe_allreduce_out", "residual_out", "norm_out")
    layouts = (*QuantizationSFLayout, None)
    for turn, (tokens, experts) in enumerate(((1, 8), (5, 3), (MOST, 2), (7, 12))):
        case = Sum(tokens, HIDDEN, dtype, turn, differ=True, bias=float(turn % 2))
        given, want = summed(group, case, experts)
        layout = layouts[turn]
        for wanted in (names, names[1:], names[:1], names[1:2], names[2:]):
            made = {n: poison(group.device, tokens * HIDDEN, dtype=dtype) for n in wanted}
            outputs = dict.fromkeys(names) | made
            repeated(
                group.device,
                lambda given=given, outputs=outputs, tokens=tokens, turn=turn, layout=layout: (
                    trtllm_moe_allreduce_fusion(
                        world_size=group.size,
                        world_rank=group.rank,
                        token_num=tokens,
                        hidden_dim=HIDDEN,
                        workspace_ptrs=pointers,
                        launch_with_pdl=turn % 2 == 0,
                        scale_factor=-0.25,
                        layout_code=layout,
                        weight_bias=1.0 if turn % 2 else None,
                        **given,
                        **outputs,
                        **NOTHING,
                    )
                ),
            )
            compare(made, want, tokens)
    trtllm_destroy_ipc_workspace_for_all_reduce(handles, group=None)


@pytest.mark.parametrize("kind", ["threads", CUDA])
@pytest.mark.parametrize(("count", "dtype"), [(2, HALF), (2, BF16), (4, BF16)])
def test_moe_reduction_as_its_program_calls_it(ranks, kind, count, dtype):
    ranks(count, kind)(reductions, dtype)


def finalised(
    group: weft.Group, case: Sum, factor: float | None, shared: bool, scaled: bool
) -> tuple[dict[str, Any], Reduced]:
    """What a rank brings to the MoE finalize, and what comes of it."""
    device, tokens, top_k = group.device, case.tokens, 8
    residual, weight = case.shared(device, group.rank)
    rows = [case.next(tokens=tokens * top_k + 3).rows(r, device) for r in range(group.size)]
    extra = case.next(seed=case.seed + 8).rows(9, device) if shared else None
    generator = torch.Generator(device=device).manual_seed(case.seed)
    size = (tokens, top_k)
    index = torch.randint(-1, tokens * top_k, size, generator=generator, device=device).int()
    scales = torch.randn(size, generator=generator, device=device).to(case.dtype)
    weights = scales if scaled else None
    by = 1.0 if factor is None else factor
    xs = [reference.finalize_moe(MoEFinalize(each, index, weights, extra, by)) for each in rows]
    given = {
        "allreduce_in": rows[group.rank],
        "residual_in": residual,
        "norm_weight": weight,
        "expanded_idx_to_permuted_idx": index,
        "eps": case.eps,
        "shared_expert_output": extra,
        "expert_scale_factor": weights,
        "routed_scaling_factor": factor,
    }
    want = reference.allreduce_fused(xs, residual, weight, case.eps, case.bias)
    return given, want


def finalisations(group: weft.Group, dtype: torch.dtype) -> None:
    handles, pointers = made_workspace(group)
    turns = (
        (16, 2.5, True, True),
        (1, None, True, True),
        (5, 0.5, False, True),
        (3, 2.5, True, False),
    )
    for turn, (tokens, factor, shared, scaled) in enumerate(turns):
        case = Sum(tokens, HIDDEN, dtype, turn, differ=True, bias=float(turn % 2))
        given, want = finalised(group, case, factor, shared, scaled)
        for wanted in (("residual_out", "norm_out"), ("norm_out",), ("residual_out",)):
            made = {n: poison(group.device, tokens, HIDDEN, dtype=dtype) for n in wanted}
            outputs = {"residual_out": None, "norm_out": None} | made
            repeated(
                group.device,
                lambda given=given, outputs=outputs, turn=turn: (
                    trtllm_moe_finalize_allreduce_fusion(
                        workspace_ptrs=pointers,
                        launch_with_pdl=turn % 2 == 0,
                        world_rank=group.rank,
                        world_size=group.size,
                        weight_bias=1.0 if turn % 2 else None,
                        **given,
                        **outputs,
                        **NOTHING,
                    )
                ),
            )
            compare(made, want, tokens)
    trtllm_destroy_ipc_workspace_for_all_reduce(handles, group=None)


@pytest.mark.parametrize("kind", ["threads", CUDA])
@pytest.mark.parametrize(("count", "dtype"), [(2, HALF), (2, BF16), (4, BF16)])
def test_moe_finalize_as_its_program_calls_it(ranks, kind, count, dtype):
    ranks(count, kind)(finalisations, dtype)


def refusals(group: weft.Group) -> None:
    handles, pointers = made_workspace(group)
    place = {"world_size": group.size, "world_rank": group.rank, "workspace_ptrs": pointers}
    case = Sum(2, HIDDEN)
    given = {**summed(group, case, 2)[0], **place, "token_num": 2, "hidden_dim": HIDDEN, **NOTHING}
    norm = torch.empty((2, HIDDEN), dtype=BF16)
    given |= {"launch_with_pdl": True, "scale_factor": 1.0, "layout_code": None}
    given |= {"moe_allreduce_out": None, "residual_out": None, "norm_out": norm}
    ended = {**finalised(group, case, 2.5, True, True)[0], **place, **NOTHING}
    ended |= {"launch_with_pdl": True, "residual_out": None, "norm_out": norm}

    def summing(*words: str, **changes: Any) -> None:
        call = lambda: trtllm_moe_allreduce_fusion(**{**given, **changes})  # noqa: E731
        refused(InvalidArgument, call, *words)

    def ending(*words: str, **changes: Any) -> None:
        call = lambda: trtllm_moe_finalize_allreduce_fusion(**{**ended, **changes})  # noqa: E731
        refused(InvalidArgument, call, *words)

    fp4 = torch.empty(2 * HIDDEN // 4, dtype=BF16)  # as its program has it
    for name in NOTHING:
        summing(f"{name} is a tensor [320]", "NVFP4", "Blackwell", **{name: fp4})
        ending(f"{name} is a tensor [320]", "NVFP4", "Blackwell", **{name: fp4})
    for call in (summing, ending):
        call("norm_out are None", "nothing to write", norm_out=None)
        call("backend is 'cake'", backend="cake")
    summing("layout_code is 3", layout_code=3)
    summing("token_num is 41", "25600 elements", token_num=41)
    summing("moe_reduction_scale_input", "need 6", moe_reduction_device_num_experts=3)
    steps = torch.zeros((2, 4, HIDDEN), dtype=BF16)[:, ::2]
    summing("contiguous", moe_reduction_active_experts_token_input=steps)
    ending("expanded_idx_to_permuted_idx is None", expanded_idx_to_permuted_idx=None)
    ending("routed_scaling_factor is nan", routed_scaling_factor=float("nan"))
    ending("routed_scaling_factor is 1e+39", routed_scaling_factor=1e39)
    ending("allreduce_in is", "640 elements", allreduce_in=torch.zeros(7, dtype=BF16))
    ending("residual_in is", residual_in=torch.zeros((2, 4), dtype=BF16))
    trtllm_moe_allreduce_fusion(**given)
    trtllm_moe_finalize_allreduce_fusion(**ended)
    trtllm_destroy_ipc_workspace_for_all_reduce(handles)
    summing("workspace_ptrs")


def test_what_is_refused(ranks):
    ranks(2, "threads")(refusals)
