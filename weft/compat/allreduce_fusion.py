# SPDX-License-Identifier: Apache-2.0
"""`allreduce_fusion` with the signatures of flashinfer.comm, on weft.AllReduce.

docs/user/compat.md lists for each pattern what is the same, what is stricter and what is refused.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from weft.allreduce.call import FP8Group, FP8Static, FP8Token, MoEFinalize
from weft.arguments import check_float, check_instance, check_int, format_value
from weft.compat.fusion_workspace import NAMES, REDUCED, AllReduceFusionWorkspace
from weft.compat.refusals import MOE_QUANT, NVFP4, require
from weft.errors import InvalidArgument
from weft.fields import max_value
from weft.runtime.check import raise_not_tensor
from weft.shape import Shape

GROUP = 128  # columns per scale
_FINALIZE = "weft has one implementation"


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
_REFUSED = (_Pattern.kARResidualRMSNormFP4Quant, _Pattern.kARResidualRMSNormOutFP4Quant)
_STATIC = (_Pattern.kARResidualRMSNormFP8Quant, _Pattern.kARResidualRMSNormOutFP8Quant)
_GROUPED = (
    _Pattern.kARResidualRMSNormPerTokenGroupFP8PackedQuant,
    _Pattern.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant,
)
_DYNAMIC = (
    _Pattern.kARResidualRMSNormDynamicFP8Quant,
    _Pattern.kARResidualRMSNormOutDynamicFP8Quant,
)
_REDUCTION = _Pattern.kMoEReductionARResidualRMSNorm
_FINALIZED = _Pattern.kMoEFinalizeARResidualRMSNorm
_WITHOUT_NORM = (_STATIC[0], _GROUPED[0], _DYNAMIC[0])


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
    check_float("rms_eps", rms_eps, least=0.0)
    check_float("weight_bias", weight_bias)
    call = _pattern(pattern)
    require("moe_finalize_backend", moe_finalize_backend, "trtllm", _FINALIZE)
    if layout_code is not None:  # for NVFP4 scales, which no supported pattern has
        check_int("layout_code", layout_code, 0, QuantizationSFLayout.LINEAR)
    prologue = None
    if call is _FINALIZED:
        _require_arguments(call, expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx)
        routed = expanded_idx_to_permuted_idx, expert_scale_factor, shared_expert_output
        prologue = MoEFinalize(input, *routed)  # type: ignore[arg-type]
    elif call is _REDUCTION:
        prologue = _moe_reduction(
            workspace,
            moe_reduction_device_num_experts,
            moe_reduction_scale_input=moe_reduction_scale_input,
            moe_reduction_active_experts_token_input=moe_reduction_active_experts_token_input,
            moe_reduction_token_input=moe_reduction_token_input,
        )
    epilogue: dict[str, Any] = {}
    if call is not _Pattern.kAllReduce:
        quant = _quant(workspace, call, scale_factor, block_quant_group_size)
        _require_arguments(call, residual_in=residual_in, rms_gamma=rms_gamma)
        epilogue = {"residual": residual_in, "weight": rms_gamma, "eps": rms_eps}
        epilogue |= {"quant": quant, "weight_bias": weight_bias}
    requested = _outputs(call, input, **outputs)
    tokens = len(input if residual_in is None else residual_in)
    backend = workspace.backend_for(
        use_oneshot, input if prologue is None else prologue.rows, tokens
    )
    x = input if prologue is None else None
    names = REDUCED if call is _REDUCTION else NAMES
    result = workspace.run(x, prologue, backend, epilogue | requested, names)
    if call in _GROUPED and scale_out is not None:
        _blank_padding(scale_out)
    outputs_in_order = (result.norm, result.quant, result.out)
    return next(tensor for tensor in outputs_in_order if tensor is not None)


def _blank_padding(scales: torch.Tensor) -> None:
    """Zero the padding between a column's last token and the next column, as flashinfer.comm does.

    `scales` is `[tokens, columns]` with strides `(1, tokens rounded up to 4)`. Its memory may end
    with the last column's last token.
    """
    tokens, columns = scales.shape
    padding, pitch = -tokens % 4, -(-tokens // 4) * 4
    elements = scales.untyped_storage().nbytes() // scales.itemsize - scales.storage_offset()
    padded = min(columns, elements // pitch) if pitch else 0  # columns whose padding is in memory
    if padding and padded and (columns == 1 or scales.stride(1) == pitch):
        scales.as_strided((padded, padding), (pitch, 1), scales.storage_offset() + tokens).zero_()


def _outputs(
    call: _Pattern,
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
    if call in (_REDUCTION, _FINALIZED):
        require("quant_out", quant_out, None, MOE_QUANT)
        require("scale_out", scale_out, None, MOE_QUANT)
    if call is _Pattern.kAllReduce:
        return {"out": True if output is None else output}
    requested: dict[str, Any] = {"residual_out": residual_out}
    if call not in _WITHOUT_NORM:
        requested["norm_out"] = True if norm_out is None else norm_out
    if call is _REDUCTION:
        requested["out"] = output
    if call in (*_GROUPED, *_DYNAMIC):
        requested |= {"quant_out": quant_out, "scale_out": scale_out}
    if call in _STATIC:
        requested["quant_out"] = _fp8_view(quant_out, rows)
    return requested


def _fp8_view(quant_out: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """View a static pattern's quant_out as FP8, if it has the rows' dtype or is uint8.

    flashinfer.comm only requires enough bytes. Other tensors are returned unchanged, so that
    `fused` refuses them.
    """
    dtypes = (rows.dtype, torch.uint8)
    if quant_out is None or quant_out.dtype not in dtypes or quant_out.requires_grad:
        return quant_out
    strided = quant_out.layout is torch.strided and not quant_out.is_nested
    if not strided or not quant_out.is_contiguous() or quant_out.nbytes < rows.numel():
        return quant_out
    data = quant_out.view(-1).view(torch.uint8)[: rows.numel()]
    return data.view(torch.float8_e4m3fn).view(rows.shape)


def _pattern(pattern: int) -> _Pattern:
    call = _Pattern(check_int("pattern", pattern, 0, _LAST_PATTERN))
    if call in _REFUSED:
        raise InvalidArgument(f"pattern is {call.name}, which is refused: {NVFP4}")
    return call


def _quant(
    workspace: AllReduceFusionWorkspace,
    call: _Pattern,
    scale: torch.Tensor | float | None,
    group: int | None,
) -> FP8Static | FP8Token | FP8Group | None:
    """Return the quantization of a pattern."""
    if call in _STATIC:
        _require_arguments(call, scale_factor=scale)
        assert scale is not None
        return FP8Static(scale if isinstance(scale, torch.Tensor) else workspace.scale(scale))
    if call in _GROUPED:
        reason = "scales cover 128 columns, as DeepGEMM reads them"
        require("block_quant_group_size", group, GROUP, reason)
        return FP8Group(GROUP, scale="ue8m0")
    return FP8Token() if call in _DYNAMIC else None


def _require_arguments(call: _Pattern, **arguments: object) -> None:
    """Raise InvalidArgument if an argument that a pattern needs is None."""
    for name, value in arguments.items():
        if value is None:
            raise InvalidArgument(f"{name} is None; pattern {call.name} needs it")


def _moe_reduction(
    workspace: AllReduceFusionWorkspace, experts: int | None, **tensors: Any
) -> MoEFinalize:
    """Return the prologue of pattern 6: each token adds its rows of all local experts.

    Rows are ordered by expert. `tensors` are the scales, the rows and the rows to add to, by their
    argument names.
    """
    _require_arguments(_REDUCTION, moe_reduction_device_num_experts=experts, **tensors)
    experts = check_int("moe_reduction_device_num_experts", experts, 1, max_value(Shape, "experts"))
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise_not_tensor(name, tensor)
    scales, rows, shared = tensors.values()
    _check_rows("moe_reduction_token_input", shared)
    tokens, hidden = shared.shape
    sizes = (experts * tokens, experts * tokens * hidden)
    for (name, tensor), size in zip(tensors.items(), sizes, strict=False):  # the first two
        strided = tensor.layout is torch.strided and not tensor.is_nested
        if not strided or not tensor.is_contiguous() or tensor.numel() != size:
            raise InvalidArgument(
                f"{name} is {format_value(tensor)}; {experts} experts and {tokens} tokens need "
                f"{size} contiguous elements, expert by expert"
            )
    index = workspace.expert_major(experts, tokens)
    weights = scales.reshape(experts, tokens).t().contiguous()
    return MoEFinalize(rows.view(-1, hidden), index, weights, shared=shared)


def _check_rows(name: str, tensor: torch.Tensor | None) -> None:
    """Raise InvalidArgument unless `tensor` is two-dimensional."""
    if not isinstance(tensor, torch.Tensor):
        raise_not_tensor(name, tensor)
    if tensor.is_nested or tensor.dim() != 2:
        shape = "nested" if tensor.is_nested else list(tensor.shape)
        raise InvalidArgument(f"{name} is {shape}; it must be [tokens, hidden]")
