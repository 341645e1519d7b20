"""The older calls of flashinfer.comm's all-reduce whose rows are made of experts' rows."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from weft.allreduce.spec import MoEFinalize
from weft.arguments import instance, real, shown
from weft.compat.allreduce_fusion import check_layout, moe_finalize, moe_reduction
from weft.compat.fusion_workspace import NAMES, REDUCED, AllReduceFusionWorkspace
from weft.compat.refusals import BACKEND, MOE_QUANT, refuse
from weft.compat.trtllm_allreduce import older_workspace, rows_of
from weft.errors import InvalidArgument

_SUMMED = REDUCED | {"out": "moe_allreduce_out"}
_FINALIZED = NAMES | {"prologue.rows": "allreduce_in", "weight": "norm_weight", "eps": "eps"}


def trtllm_moe_allreduce_fusion(
    world_size: int,
    world_rank: int,
    token_num: int,
    hidden_dim: int,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    residual_in: torch.Tensor,
    rms_gamma: torch.Tensor,
    rms_eps: float,
    scale_factor: float,
    moe_reduction_device_num_experts: int,
    moe_reduction_scale_input: torch.Tensor,
    moe_reduction_active_experts_token_input: torch.Tensor,
    moe_reduction_token_input: torch.Tensor,
    layout_code: int | None,
    moe_allreduce_out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    weight_bias: float | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Add this rank's active experts' rows, weighted, to its token's; sum over ranks; then norm.

    Of tensors of token_num x hidden_dim elements, in any shape. moe_reduction_scale_input: float32
    `[experts, tokens]`; moe_reduction_active_experts_token_input: `[experts, tokens, hidden]`;
    moe_reduction_token_input: added last. Sums are fp32, rounded once. An output that is None is
    not written. launch_with_pdl, scale_factor and layout_code change nothing; quant_out and
    scale_out are refused: they are NVFP4's.

    Raises InvalidArgument, TokenOverflow, OutOfOrder, what broke the group.
    """
    _refuse(backend, quant_out, scale_out)
    check_layout(layout_code)
    older = older_workspace(workspace_ptrs, world_size, world_rank)
    rows = functools.partial(rows_of, older.shape(token_num, hidden_dim))
    name = "moe_reduction_token_input"
    shared = rows(name, instance(name, moe_reduction_token_input, torch.Tensor))
    older.check_input(name, shared)
    workspace = older.of(shared.shape[1], shared.dtype)
    prologue = moe_reduction(
        workspace,
        moe_reduction_device_num_experts,
        moe_reduction_scale_input,
        moe_reduction_active_experts_token_input,
        shared,
    )
    outputs = {
        "moe_allreduce_out": rows("moe_allreduce_out", moe_allreduce_out),
        "residual_out": rows("residual_out", residual_out),
        "norm_out": rows("norm_out", norm_out),
    }
    residual = rows("residual_in", instance("residual_in", residual_in, torch.Tensor))
    given = {"residual": residual, "weight": instance("rms_gamma", rms_gamma, torch.Tensor)}
    given |= {"eps": real("rms_eps", rms_eps, least=0.0), "weight_bias": _bias(weight_bias)}
    _run(workspace, prologue, given, outputs, _SUMMED)


def trtllm_moe_finalize_allreduce_fusion(
    allreduce_in: torch.Tensor,
    residual_in: torch.Tensor,
    norm_weight: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    norm_out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
    workspace_ptrs: torch.Tensor,
    launch_with_pdl: bool,
    world_rank: int,
    world_size: int,
    eps: float,
    shared_expert_output: torch.Tensor | None,
    expert_scale_factor: torch.Tensor | None,
    routed_scaling_factor: float | None,
    weight_bias: float | None = None,
    *,
    backend: str = "trtllm",
) -> None:
    """Gather each token's experts' rows, weighted, and add its shared expert's; sum; then norm.

    allreduce_in: `[rows, hidden]`, permuted; expanded_idx_to_permuted_idx: int32 `[tokens, top_k]`,
    -1 for none; expert_scale_factor: `[tokens, top_k]`, of the rows' dtype or float32;
    routed_scaling_factor: of the experts' sum, None means 1; all else `[tokens, hidden]`. Sums are
    fp32, rounded once. An output that is None is not written. launch_with_pdl changes nothing;
    quant_out and scale_out are refused: they are NVFP4's.

    Raises InvalidArgument, TokenOverflow, OutOfOrder, what broke the group.
    """
    _refuse(backend, quant_out, scale_out)
    older = older_workspace(workspace_ptrs, world_size, world_rank)
    instance("residual_in", residual_in, torch.Tensor)
    older.check_input("residual_in", residual_in)
    if residual_in.dim() != 2 or residual_in.shape[1] < 8:
        raise InvalidArgument(f"residual_in is {shown(residual_in)}; it must be [tokens, hidden]")
    tokens, hidden = residual_in.shape
    shape = older.shape(tokens, hidden)
    rows = functools.partial(rows_of, shape)
    instance("allreduce_in", allreduce_in, torch.Tensor)
    older.check_input("allreduce_in", allreduce_in)
    if allreduce_in.numel() % hidden:
        raise InvalidArgument(
            f"allreduce_in is {shown(allreduce_in)}; it must be rows of {hidden} elements, as "
            "residual_in"
        )
    factor = 1.0
    if routed_scaling_factor is not None:
        factor = real("routed_scaling_factor", routed_scaling_factor)
    shared = rows("shared_expert_output", shared_expert_output)
    experts = rows_of((allreduce_in.numel() // hidden, hidden), "allreduce_in", allreduce_in)
    prologue = moe_finalize(
        experts, expanded_idx_to_permuted_idx, expert_scale_factor, shared, factor
    )
    outputs = {
        "residual_out": rows("residual_out", residual_out),
        "norm_out": rows("norm_out", norm_out),
    }
    given = {
        "residual": rows("residual_in", residual_in),
        "weight": instance("norm_weight", norm_weight, torch.Tensor),
    }
    given |= {"eps": real("eps", eps, least=0.0), "weight_bias": _bias(weight_bias)}
    _run(older.of(hidden, residual_in.dtype), prologue, given, outputs, _FINALIZED)


def _run(
    workspace: AllReduceFusionWorkspace,
    prologue: MoEFinalize,
    given: dict[str, Any],
    outputs: dict[str, torch.Tensor | None],
    names: Mapping[str, str],
) -> None:
    """One call that writes the outputs that are there, and only those."""
    if all(output is None for output in outputs.values()):
        raise InvalidArgument(f"{' and '.join(outputs)} are None: there is nothing to write")
    wanted = {
        "out" if name == "moe_allreduce_out" else name: False if output is None else output
        for name, output in outputs.items()
    }
    workspace.run(None, prologue, "auto", given | wanted, names)


def _refuse(backend: str, quant_out: Any, scale_out: Any) -> None:
    refuse("backend", backend, "trtllm", BACKEND)
    refuse("quant_out", quant_out, None, MOE_QUANT)
    refuse("scale_out", scale_out, None, MOE_QUANT)


def _bias(weight_bias: float | None) -> float:
    return 0.0 if weight_bias is None else real("weight_bias", weight_bias)
