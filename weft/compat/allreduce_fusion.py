# SPDX-License-Identifier: Apache-2.0
"""`allreduce_fusion` with the signatures of flashinfer.comm, on weft.AllReduce.

docs/user/compat.md lists for each pattern what is the same, stricter or unsupported.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from weft.allreduce.call import FP8Group, FP8Static, FP8Token, MoEFinalize
from weft.arguments import check_float, check_instance, check_int, format_value
from weft.compat.checks import MOE_QUANT_REASON, NVFP4_REASON, check_allowed
from weft.compat.fusion_workspace import (
    ARGUMENT_NAMES,
    MOE_REDUCTION_NAMES,
    AllReduceFusionWorkspace,
)
from weft.errors import InvalidArgument
from weft.fields import max_value
from weft.runtime.check import raise_not_tensor
from weft.shape import Shape

GROUP = 128  # columns per scale
_FINALIZE_REASON = "weft has one implementation"


class AllReduceFusionPattern(IntEnum):
    """Operations after the all-reduce, with flashinfer.comm's numbers."""

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11


class QuantizationSFLayout(IntEnum):
    """Order of NVFP4 scales, with flashinfer.comm's numbers."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


_Pattern = AllReduceFusionPattern
_LAST_PATTERN = int(max(_Pattern))  # a constant, because torch.compile cannot compare enums
_NVFP4_PATTERNS = (_Pattern.kARResidualRMSNormFP4Quant, _Pattern.kARResidualRMSNormOutFP4Quant)
_STATIC_FP8 = (_Pattern.kARResidualRMSNormFP8Quant, _Pattern.kARResidualRMSNormOutFP8Quant)
_GROUP_FP8 = (
    _Pattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant,
    _Pattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant,
)
_TOKEN_FP8 = (
    _Pattern.kARResidualRMSNormDynamicFP8Quant,
    _Pattern.kARResidualRMSNormOutDynamicFP8Quant,
)
_REDUCTION = _Pattern.kMoEReductionARResidualRMSNorm
_FINALIZE = _Pattern.kMoEFinalizeARResidualRMSNorm
_NO_NORM_OUT = (_STATIC_FP8[0], _GROUP_FP8[0], _TOKEN_FP8[0])


def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: torch.Tensor | None = None,
    moe_reduction_active_experts_token_input: torch.Tensor | None = None,
    moe_reduction_token_input: torch.Tensor | None = None,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    expert_scale_factor: torch.Tensor | None = None,
    shared_expert_output: torch.Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float = 0.0,
    *,
    moe_finalize_backend: str = "trtllm",
) -> torch.Tensor:
    """All-reduce `[tokens, hidden]` and apply `pattern` to the sum, in one launch.

    The arguments are those of flashinfer.comm's call. Omitted outputs of the pattern are allocated.
    launch_with_pdl, trigger_completion_at_end and fp32_acc have no effect: sums are always in fp32.
    use_oneshot selects a backend and does not change the result.

    Returns:
        The pattern's first output among norm_out, quant_out and output.

    Raises:
        InvalidArgument: If an argument is invalid.
        TokenOverflow: If there are more tokens than the workspace's max_token_num.
        OutOfOrder: If the workspace is destroyed.
        GroupError: If the group is broken.
    """
    check_instance("workspace", workspace, AllReduceFusionWorkspace)
    _check_rows("input", input)
    if residual_in is not None:
        _check_rows("residual_in", residual_in)
    outputs = {
        "output": output,
        "residual_out": residual_out,
        "norm_out": norm_out,
        "quant_out": quant_out,
        "scale_out": scale_out,
    }
    for name, tensor in outputs.items():
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise_not_tensor(name, tensor)
    check_float("rms_eps", rms_eps, minimum=0.0)
    check_float("weight_bias", weight_bias)
    kind = _parse_pattern(pattern)
    check_allowed("moe_finalize_backend", moe_finalize_backend, "trtllm", _FINALIZE_REASON)
    if layout_code is not None:  # for NVFP4 scales, which no supported pattern has
        check_int("layout_code", layout_code, 0, QuantizationSFLayout.LINEAR)
    prologue = None
    if kind is _FINALIZE:
        _require_arguments(kind, expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx)
        routed = expanded_idx_to_permuted_idx, expert_scale_factor, shared_expert_output
        prologue = MoEFinalize(input, *routed)  # type: ignore[arg-type]
    elif kind is _REDUCTION:
        prologue = _build_moe_reduction(
            workspace,
            moe_reduction_device_num_experts,
            moe_reduction_scale_input=moe_reduction_scale_input,
            moe_reduction_active_experts_token_input=moe_reduction_active_experts_token_input,
            moe_reduction_token_input=moe_reduction_token_input,
        )
    epilogue_kwargs: dict[str, Any] = {}
    if kind is not _Pattern.kAllReduce:
        quant = _build_quantization(workspace, kind, scale_factor, block_quant_group_size)
        _require_arguments(kind, residual_in=residual_in, rms_gamma=rms_gamma)
        epilogue_kwargs = {"residual": residual_in, "weight": rms_gamma, "eps": rms_eps}
        epilogue_kwargs |= {"quant": quant, "weight_bias": weight_bias}
    output_kwargs = _select_outputs(kind, input, **outputs)
    num_tokens = len(input if residual_in is None else residual_in)
    backend = workspace.select_backend(
        use_oneshot, input if prologue is None else prologue.rows, num_tokens
    )
    x = input if prologue is None else None
    names = MOE_REDUCTION_NAMES if kind is _REDUCTION else ARGUMENT_NAMES
    result = workspace.run(x, prologue, backend, epilogue_kwargs | output_kwargs, names)
    if kind in _GROUP_FP8 and scale_out is not None:
        _zero_padding(scale_out)
    candidates = (result.norm, result.quant, result.out)
    return next(tensor for tensor in candidates if tensor is not None)


def _zero_padding(scales: torch.Tensor) -> None:
    """Zero the padding between a column's last token and the next column, as flashinfer does.

    `scales` is `[tokens, columns]` with strides `(1, tokens rounded up to 4)`. Its memory may end
    with the last column's last token.
    """
    num_tokens, columns = scales.shape
    padding, pitch = -num_tokens % 4, -(-num_tokens // 4) * 4
    elements = scales.untyped_storage().nbytes() // scales.itemsize - scales.storage_offset()
    # Number of columns whose padding is in memory.
    num_padded = min(columns, elements // pitch) if pitch else 0
    if padding and num_padded and (columns == 1 or scales.stride(1) == pitch):
        scales.as_strided(
            (num_padded, padding), (pitch, 1), scales.storage_offset() + num_tokens
        ).zero_()


def _select_outputs(
    kind: _Pattern,
    rows: torch.Tensor,
    *,
    output: torch.Tensor | None,
    residual_out: torch.Tensor | None,
    norm_out: torch.Tensor | None,
    quant_out: torch.Tensor | None,
    scale_out: torch.Tensor | None,
) -> dict[str, Any]:
    """Return the outputs of a pattern, by the argument names of `fused`.

    As in flashinfer.comm, outputs that a pattern does not write stay untouched: `output` except for
    the plain sum and the MoE reduction, and the norm except for patterns with "Out" in their name.
    Raises InvalidArgument for MoE quantization, which weft lacks.
    """
    if kind in (_REDUCTION, _FINALIZE):
        check_allowed("quant_out", quant_out, None, MOE_QUANT_REASON)
        check_allowed("scale_out", scale_out, None, MOE_QUANT_REASON)
    if kind is _Pattern.kAllReduce:
        return {"out": True if output is None else output}
    output_kwargs: dict[str, Any] = {"residual_out": residual_out}
    if kind not in _NO_NORM_OUT:
        output_kwargs["norm_out"] = True if norm_out is None else norm_out
    if kind is _REDUCTION:
        output_kwargs["out"] = output
    if kind in (*_GROUP_FP8, *_TOKEN_FP8):
        output_kwargs |= {"quant_out": quant_out, "scale_out": scale_out}
    if kind in _STATIC_FP8:
        output_kwargs["quant_out"] = _view_as_fp8(quant_out, rows)
    return output_kwargs


def _view_as_fp8(quant_out: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """View a static pattern's quant_out as FP8, if it has the rows' dtype or is uint8.

    flashinfer.comm only requires enough bytes. Other tensors are returned unchanged, and `fused`
    raises for them.
    """
    dtypes = (rows.dtype, torch.uint8)
    if quant_out is None or quant_out.dtype not in dtypes or quant_out.requires_grad:
        return quant_out
    strided = quant_out.layout is torch.strided and not quant_out.is_nested
    if not strided or not quant_out.is_contiguous() or quant_out.nbytes < rows.numel():
        return quant_out
    data = quant_out.view(-1).view(torch.uint8)[: rows.numel()]
    return data.view(torch.float8_e4m3fn).view(rows.shape)


def _parse_pattern(pattern: int) -> _Pattern:
    kind = _Pattern(check_int("pattern", pattern, 0, _LAST_PATTERN))
    if kind in _NVFP4_PATTERNS:
        raise InvalidArgument(f"pattern is {kind.name}, which is not supported: {NVFP4_REASON}")
    return kind


def _build_quantization(
    workspace: AllReduceFusionWorkspace,
    kind: _Pattern,
    scale: torch.Tensor | float | None,
    group: int | None,
) -> FP8Static | FP8Token | FP8Group | None:
    """Return the quantization that a pattern applies, or None."""
    if kind in _STATIC_FP8:
        _require_arguments(kind, scale_factor=scale)
        assert scale is not None
        return FP8Static(
            scale if isinstance(scale, torch.Tensor) else workspace.get_scale_tensor(scale)
        )
    if kind in _GROUP_FP8:
        reason = "scales cover 128 columns, as DeepGEMM reads them"
        check_allowed("block_quant_group_size", group, GROUP, reason)
        return FP8Group(GROUP, scale="ue8m0")
    return FP8Token() if kind in _TOKEN_FP8 else None


def _require_arguments(kind: _Pattern, **arguments: object) -> None:
    """Raise InvalidArgument if an argument that a pattern needs is None."""
    for name, value in arguments.items():
        if value is None:
            raise InvalidArgument(f"{name} is None; pattern {kind.name} needs it")


def _build_moe_reduction(
    workspace: AllReduceFusionWorkspace, num_experts: int | None, **tensors: Any
) -> MoEFinalize:
    """Build the prologue of the MoE reduction: each token sums its rows of all local experts.

    Rows are ordered by expert. `tensors` are the scales, the rows and the rows to add to, by their
    argument names.
    """
    _require_arguments(_REDUCTION, moe_reduction_device_num_experts=num_experts, **tensors)
    num_experts = check_int(
        "moe_reduction_device_num_experts", num_experts, 1, max_value(Shape, "experts")
    )
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise_not_tensor(name, tensor)
    scales, rows, shared = tensors.values()
    _check_rows("moe_reduction_token_input", shared)
    num_tokens, hidden = shared.shape
    expected_numels = (num_experts * num_tokens, num_experts * num_tokens * hidden)
    # Only the scales and the rows, which are the first two tensors.
    for (name, tensor), expected_numel in zip(tensors.items(), expected_numels, strict=False):
        strided = tensor.layout is torch.strided and not tensor.is_nested
        if not strided or not tensor.is_contiguous() or tensor.numel() != expected_numel:
            raise InvalidArgument(
                f"{name} is {format_value(tensor)}; {num_experts} experts and {num_tokens} tokens "
                f"need {expected_numel} contiguous elements, ordered by expert"
            )
    index = workspace.get_expert_major_indices(num_experts, num_tokens)
    weights = scales.reshape(num_experts, num_tokens).t().contiguous()
    return MoEFinalize(rows.view(-1, hidden), index, weights, shared=shared)


def _check_rows(name: str, tensor: torch.Tensor | None) -> None:
    """Raise InvalidArgument unless `tensor` is two-dimensional."""
    if not isinstance(tensor, torch.Tensor):
        raise_not_tensor(name, tensor)
    if tensor.is_nested or tensor.dim() != 2:
        shape = "nested" if tensor.is_nested else list(tensor.shape)
        raise InvalidArgument(f"{name} is {shape}; it must be [tokens, hidden]")
