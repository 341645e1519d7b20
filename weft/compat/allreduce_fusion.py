# SPDX-License-Identifier: Apache-2.0
"""`allreduce_fusion` with the signatures of flashinfer.comm, on weft.AllReduce.

docs/user/compat.md says what is the same, what is stricter and what is refused, pattern by pattern.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch

from weft.allreduce.call import FP8Group, FP8Static, FP8Token, MoEFinalize
from weft.arguments import instance, integer, real, shown
from weft.compat.fusion_workspace import NAMES, REDUCED, AllReduceFusionWorkspace
from weft.compat.refusals import MOE_QUANT, NVFP4, refuse
from weft.errors import InvalidArgument
from weft.fields import largest
from weft.runtime.check import refuse_tensor
from weft.shape import Shape

GROUP = 128  # columns that share a scale
_FINALIZE = "weft has one implementation"


class AllReduceFusionPattern(IntEnum):
    """What follows the sum; the numbers are those of flashinfer.comm."""

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
    """The order of NVFP4's scales; the numbers are those of flashinfer.comm."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


_Pattern = AllReduceFusionPattern
_LAST_PATTERN = int(max(_Pattern))  # here, because torch.compile cannot compare enums
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
    """Sum `[tokens, hidden]` over the ranks, and what `pattern` adds to it, in one launch.

    Arguments are those of flashinfer.comm's call; outputs that are left out and follow from the
    pattern are allocated. launch_with_pdl, trigger_completion_at_end and fp32_acc change nothing:
    sums are in fp32, always. use_oneshot chooses a backend, and never another result.

    Returns:
        norm_out, else quant_out, else output; the first that the pattern has.

    Raises:
        InvalidArgument: an argument is invalid.
        TokenOverflow: there are more tokens than `max_tokens`.
        OutOfOrder: the call comes at the wrong time, or the object is closed.
        GroupError: the group is broken.
    """
    instance("workspace", workspace, AllReduceFusionWorkspace)
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
            refuse_tensor(name, tensor)
    real("rms_eps", rms_eps, least=0.0)
    real("weight_bias", weight_bias)
    call = _pattern(pattern)
    refuse("moe_finalize_backend", moe_finalize_backend, "trtllm", _FINALIZE)
    if layout_code is not None:  # of NVFP4's scales, which no pattern here has
        integer("layout_code", layout_code, 0, QuantizationSFLayout.LINEAR)
    prologue = None
    if call is _FINALIZED:
        _need(call, expanded_idx_to_permuted_idx=expanded_idx_to_permuted_idx)
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
        _need(call, residual_in=residual_in, rms_gamma=rms_gamma)
        epilogue = {"residual": residual_in, "weight": rms_gamma, "eps": rms_eps}
        epilogue |= {"quant": quant, "weight_bias": weight_bias}
    wanted = _outputs(call, input, **outputs)
    tokens = len(input if residual_in is None else residual_in)
    backend = workspace.backend_for(
        use_oneshot, input if prologue is None else prologue.rows, tokens
    )
    x = input if prologue is None else None
    names = REDUCED if call is _REDUCTION else NAMES
    made_of = workspace.run(x, prologue, backend, epilogue | wanted, names)
    if call in _GROUPED and scale_out is not None:
        _blank_padding(scale_out)
    answers = (made_of.norm, made_of.quant, made_of.out)
    return next(tensor for tensor in answers if tensor is not None)


def _blank_padding(scales: torch.Tensor) -> None:
    """Zero the padding between a column's last token and the next column, as flashinfer.comm does.

    scales: `[tokens, columns]` with strides `(1, tokens rounded up to 4)`; its memory may end with
        the last column's last token.
    """
    tokens, columns = scales.shape
    padding, pitch = -tokens % 4, -(-tokens // 4) * 4
    held = scales.untyped_storage().nbytes() // scales.itemsize - scales.storage_offset()
    padded = min(columns, held // pitch) if pitch else 0  # empty_strided ends with the last token
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
    """The outputs of a pattern with these input rows, as `fused` names them.

    As in flashinfer.comm, what a pattern does not write is left alone: `output` but for the sum and
    the MoE reduction, the norm but for patterns that say Out. Raises InvalidArgument for a
    quantisation that is made there, and not here.
    """
    if call in (_REDUCTION, _FINALIZED):
        refuse("quant_out", quant_out, None, MOE_QUANT)
        refuse("scale_out", scale_out, None, MOE_QUANT)
    if call is _Pattern.kAllReduce:
        return {"out": True if output is None else output}
    wanted: dict[str, Any] = {"residual_out": residual_out}
    if call not in _WITHOUT_NORM:
        wanted["norm_out"] = True if norm_out is None else norm_out
    if call is _REDUCTION:
        wanted["out"] = output
    if call in (*_GROUPED, *_DYNAMIC):
        wanted |= {"quant_out": quant_out, "scale_out": scale_out}
    if call in _STATIC:
        wanted["quant_out"] = _fp8_of(quant_out, rows)
    return wanted


def _fp8_of(given: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor | None:
    """Where the FP8 of rows goes: `given`, or its first bytes if it has the rows' dtype or uint8.

    flashinfer.comm asks of a static pattern's quant_out nothing but room. What is neither stays as
    it is, for `fused` to refuse.
    """
    if given is None or given.dtype not in (rows.dtype, torch.uint8) or given.requires_grad:
        return given
    if given.layout is not torch.strided or given.is_nested or not given.is_contiguous():
        return given
    if given.nbytes < rows.numel():
        return given
    room = given.view(-1).view(torch.uint8)[: rows.numel()]
    return room.view(torch.float8_e4m3fn).view(rows.shape)


def _pattern(pattern: int) -> _Pattern:
    call = _Pattern(integer("pattern", pattern, 0, _LAST_PATTERN))
    if call in _REFUSED:
        raise InvalidArgument(f"pattern is {call.name}, which is refused: {NVFP4}")
    return call


def _quant(
    workspace: AllReduceFusionWorkspace,
    call: _Pattern,
    scale: torch.Tensor | float | None,
    group: int | None,
) -> FP8Static | FP8Token | FP8Group | None:
    """The quantisation of a pattern."""
    if call in _STATIC:
        _need(call, scale_factor=scale)
        assert scale is not None
        return FP8Static(scale if isinstance(scale, torch.Tensor) else workspace.scale(scale))
    if call in _GROUPED:
        why = "scales are for 128 columns, as DeepGEMM reads them"
        refuse("block_quant_group_size", group, GROUP, why)
        return FP8Group(GROUP, scale="ue8m0")
    return FP8Token() if call in _DYNAMIC else None


def _need(call: _Pattern, **arguments: object) -> None:
    """Raises InvalidArgument for an argument that a pattern needs and did not get."""
    for name, value in arguments.items():
        if value is None:
            raise InvalidArgument(f"{name} is None; pattern {call.name} needs it")


def _moe_reduction(
    workspace: AllReduceFusionWorkspace, experts: int | None, **given: Any
) -> MoEFinalize:
    """Pattern 6: each token adds the rows of all experts here, which are ordered by expert.

    given: scales, rows and what the token adds to them, by their names in the call.
    """
    _need(_REDUCTION, moe_reduction_device_num_experts=experts, **given)
    experts = integer("moe_reduction_device_num_experts", experts, 1, largest(Shape, "experts"))
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            refuse_tensor(name, tensor)
    scales, rows, shared = given.values()
    _check_rows("moe_reduction_token_input", shared)
    tokens, hidden = shared.shape
    sizes = (experts * tokens, experts * tokens * hidden)
    for (name, tensor), size in zip(given.items(), sizes, strict=False):  # the first two
        strided = tensor.layout is torch.strided and not tensor.is_nested
        if not strided or not tensor.is_contiguous() or tensor.numel() != size:
            raise InvalidArgument(
                f"{name} is {shown(tensor)}; {experts} experts and {tokens} tokens need {size} "
                "contiguous elements, expert by expert"
            )
    index = workspace.expert_major(experts, tokens)
    weights = scales.reshape(experts, tokens).t().contiguous()
    return MoEFinalize(rows.view(-1, hidden), index, weights, shared=shared)


def _check_rows(name: str, tensor: torch.Tensor | None) -> None:
    """Raises InvalidArgument for what has no rows to count."""
    if not isinstance(tensor, torch.Tensor):
        refuse_tensor(name, tensor)
    if tensor.is_nested or tensor.dim() != 2:
        shape = "nested" if tensor.is_nested else list(tensor.shape)
        raise InvalidArgument(f"{name} is {shape}; it must be [tokens, hidden]")
