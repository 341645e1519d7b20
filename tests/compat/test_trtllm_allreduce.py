"""flashinfer.comm's older all-reduce calls: the same kernels, right to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import refused
from tests.compat.reduces import BF16, HIDDEN, RANKS, TOKENS, Pattern, Rows, poison, rows_for, same
from tests.sums import Sum
from weft import reference
from weft.compat.flashinfer import (
    AllReduceFusionWorkspace,
    QuantizationSFLayout,
    TRTLLMAllReduceFusionWorkspace,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
    trtllm_allreduce_fusion,
    trtllm_create_ipc_workspace_for_all_reduce_fusion,
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion,
)
from weft.errors import InvalidArgument

CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


def call(pointers: torch.Tensor, group: weft.Group, x: torch.Tensor, **changes: Any) -> None:
    """All arguments by position, as callers pass them."""
    given: dict[str, Any] = {
        **{"pattern_code": 1, "use_oneshot": None, "allreduce_out": None, "residual_in": None},
        **{"residual_out": None, "norm_out": None, "quant_out": None, "scale_out": None},
        **{"rms_gamma": None, "rms_eps": 1e-6, "scale_factor": None, "layout_code": None},
        **changes,
    }
    tokens, hidden = x.shape
    first = (x.view(-1), RANKS, group.rank, tokens, hidden, pointers, True, True, True)
    trtllm_allreduce_fusion(*first, *given.values())


def older(group: weft.Group) -> None:
    made = trtllm_create_ipc_workspace_for_all_reduce_fusion(
        group.rank, RANKS, TOKENS, HIDDEN, group=group, create_metadata=True
    )
    handles, pointers, metadata = made
    assert [len(each) for each in handles] == [RANKS]
    assert (metadata["max_token_num"], metadata["hidden_dim"]) == (TOKENS, HIDDEN)
    for tokens in (TOKENS, 1, 3):
        rows = rows_for(group.device, tokens, seed=tokens)
        want = reference.allreduce_fused(rows.xs, rows.residual, rows.weight)
        x = rows.xs[group.rank]
        out, norm, residual = (poison(group.device, tokens * HIDDEN) for _ in range(3))
        call(pointers, group, x, pattern_code=Pattern.kAllReduce, allreduce_out=out)
        same(out.view(tokens, HIDDEN), reference.allreduce_fused(rows.xs).out)
        given = {"residual_in": rows.residual.view(-1), "rms_gamma": rows.weight}
        call(
            pointers, group, x, **given, residual_out=residual, norm_out=norm,
            layout_code=QuantizationSFLayout.SWIZZLED_128x4, metadata=metadata,
        )  # fmt: skip
        same(norm.view(tokens, HIDDEN), want.norm)
        same(residual.view(tokens, HIDDEN), want.residual)
    # Another dtype and hidden size, in as many elements.
    half = [torch.ones((2 * TOKENS, HIDDEN // 2)).half().to(group.device) for _ in range(RANKS)]
    out = poison(group.device, *half[0].shape, dtype=torch.float16)
    call(pointers, group, half[group.rank], pattern_code=0, allreduce_out=out)
    same(out, half[0] * RANKS)
    long = torch.ones((TOKENS + 1, HIDDEN), dtype=BF16, device=group.device)
    refused(InvalidArgument, lambda: call(pointers, group, long), f"token_num is {TOKENS + 1}")
    wide = long[:1].float()
    refused(InvalidArgument, lambda: call(pointers, group, wide), "float32", "bfloat16")
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles)
    refused(InvalidArgument, lambda: call(pointers, group, long[:1]), "workspace_ptrs")
    again = lambda: trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles)  # noqa: E731
    refused(InvalidArgument, again, "not destroyed")
    # Whatever a caller asks to come back does, in its order.
    asked = {"use_fp32_lamport": True, "create_metadata": True, "use_symm_dev_mem": True}
    handles, pointers, memory, metadata = trtllm_create_ipc_workspace_for_all_reduce_fusion(
        group.rank, RANKS, TOKENS, HIDDEN, group=group, **asked
    )
    assert memory == []
    assert metadata["use_fp32_lamport"]
    out = poison(group.device, 1, HIDDEN, dtype=torch.float32)
    call(pointers, group, wide, pattern_code=0, allreduce_out=out)
    same(out, wide * RANKS)
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles, None)


@pytest.mark.parametrize("kind", ["threads", CUDA])
def test_older_calls(ranks, kind):
    ranks(RANKS, kind)(older)


def by_class(group: weft.Group) -> None:
    rows = rows_for(group.device, 2)
    kind, sizes = TRTLLMAllReduceFusionWorkspace, (RANKS, group.rank, TOKENS, HIDDEN)
    workspace = kind(*sizes, dtype=BF16, group=group)
    assert isinstance(workspace, AllReduceFusionWorkspace)
    assert workspace.metadata["tp_size"] == RANKS
    want = reference.allreduce_fused(rows.xs).out
    same(allreduce_fusion(rows.xs[group.rank], workspace, 0), want)
    workspace.destroy()
    made = create_allreduce_fusion_workspace(
        "auto", RANKS, group.rank, TOKENS, HIDDEN, BF16, group=group
    )
    assert isinstance(made, kind)
    made.destroy()


def test_the_class_that_is_asked_for(ranks):
    ranks(RANKS, "threads")(by_class)


def by_program(group: weft.Group, dtype: torch.dtype) -> None:
    """As flashinfer's program calls them: every output in every pattern, in the dtype of the input.

    Residuals are each rank's own there, and a static scale may be negative.
    """
    handles, pointers, metadata = trtllm_create_ipc_workspace_for_all_reduce_fusion(
        group.rank, group.size, TOKENS, HIDDEN, group=group,
        use_fp32_lamport=dtype == torch.float32, create_metadata=True,
    )  # fmt: skip
    workspace = create_allreduce_fusion_workspace(
        "trtllm", group.size, group.rank, TOKENS, HIDDEN, dtype, group=group
    )
    scale = torch.tensor([-0.0625 * (1 + group.rank)], device=group.device)
    for turn, tokens in enumerate((1, TOKENS, 3)):
        case = Sum(tokens, HIDDEN, dtype, turn, differ=True, bias=float(turn % 2))
        xs = [case.rows(rank, group.device) for rank in range(group.size)]
        residual, weight = case.shared(group.device, group.rank)
        x = xs[group.rank]
        for pattern, layout in ((0, 0), (1, 1), (2, 2), (4, 0)):
            want = reference.allreduce_fused(
                xs, residual, weight, 1e-3, case.bias, weft.FP8Static(scale)
            )
            for way in (True, False, None):
                for flat in (True, False):
                    size = (tokens * HIDDEN,) if flat else (tokens, HIDDEN)
                    made = [poison(group.device, *size, dtype=dtype) for _ in range(4)]
                    out, summed, norm, quant = made
                    given: dict[str, Any] = {
                        **{"residual_in": residual.view(size), "residual_out": summed},
                        **{"norm_out": norm, "quant_out": quant, "rms_gamma": weight},
                        **{"rms_eps": 1e-3, "weight_bias": case.bias, "scale_factor": scale},
                        **{"layout_code": QuantizationSFLayout(layout), "use_oneshot": way},
                        "scale_out": poison(group.device, tokens * HIDDEN // 16, dtype=dtype),
                        **{"launch_with_pdl": True, "fp32_acc": turn % 2 == 0},
                    }
                    if flat:
                        place: dict[str, Any] = {"world_size": group.size, "world_rank": group.rank}
                        place |= {"token_num": tokens, "hidden_dim": HIDDEN}
                        trtllm_allreduce_fusion(
                            allreduce_in=x.view(-1), workspace_ptrs=pointers, metadata=metadata,
                            trigger_completion_at_end=False, pattern_code=Pattern(pattern),
                            allreduce_out=out, **place, **given,
                        )  # fmt: skip
                    else:
                        allreduce_fusion(x, workspace, pattern, output=out, **given)
                    shape = (tokens, HIDDEN)
                    untouched = poison(group.device, *shape, dtype=dtype)
                    same(out.view(shape), untouched if pattern else want.out)
                    same(summed.view(shape), want.residual if pattern else untouched)
                    same(norm.view(shape), want.norm if pattern in (1, 4) else untouched)
                    stored = quant.view(-1).view(torch.uint8)
                    fp8 = stored[: tokens * HIDDEN].view(torch.float8_e4m3fn).view(shape)
                    blank = poison(group.device, *shape, dtype=torch.float8_e4m3fn)
                    same(fp8, want.quant if pattern in (2, 4) else blank)
                    assert (stored[tokens * HIDDEN :] == 0xFF).all(), "only room is taken"
    refused(
        InvalidArgument,
        lambda: allreduce_fusion(
            x, workspace, 2, residual_in=residual, rms_gamma=weight, scale_factor=scale,
            quant_out=torch.empty(8, dtype=torch.uint8, device=group.device),
        ),
        "quant_out has dtype torch.uint8",
    )  # fmt: skip
    workspace.destroy()
    trtllm_destroy_ipc_workspace_for_all_reduce_fusion(handles, group=None)


@pytest.mark.parametrize("kind", ["threads", CUDA])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_every_argument_as_flashinfers_program_passes_it(ranks, kind, dtype):
    ranks(RANKS, kind)(by_program, dtype)


def as_engines_call(group: weft.Group) -> None:
    """vLLM's call of any pattern: the input is where a norm goes, also where none is written."""
    with create_allreduce_fusion_workspace(
        "trtllm", RANKS, group.rank, TOKENS, HIDDEN, BF16, group=group
    ) as workspace:
        scale = torch.tensor([0.25], device=group.device)
        for pattern, spec in ((1, None), (2, weft.FP8Static(scale)), (4, weft.FP8Static(scale))):
            rows = rows_for(group.device, 3, seed=pattern)
            want = reference.allreduce_fused(rows.xs, rows.residual, rows.weight, quant=spec)
            x, residual = rows.xs[group.rank].clone(), rows.residual.clone()
            quant = poison(group.device, 3, HIDDEN, dtype=torch.float8_e4m3fn)
            allreduce_fusion(
                input=x,
                workspace=workspace,
                pattern=pattern,
                launch_with_pdl=True,
                output=None,
                residual_out=residual,
                norm_out=x,
                quant_out=None if spec is None else quant,
                scale_out=None,
                residual_in=residual,
                rms_gamma=rows.weight,
                rms_eps=1e-6,
                scale_factor=None if spec is None else scale,
                layout_code=QuantizationSFLayout.SWIZZLED_128x4,
                use_oneshot=None,
                fp32_acc=True,
                weight_bias=0.0,
            )
            same(residual, want.residual)
            same(x, rows.xs[group.rank] if pattern == 2 else reference_norm(rows))
            if spec is not None:
                same(quant, want.quant)


def reference_norm(rows: Rows) -> torch.Tensor | None:
    return reference.allreduce_fused(rows.xs, rows.residual, rows.weight).norm


@pytest.mark.parametrize("kind", ["threads", CUDA])
def test_outputs_that_a_pattern_does_not_write_are_left_alone(ranks, kind):
    ranks(RANKS, kind)(as_engines_call)
