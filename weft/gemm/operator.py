# SPDX-License-Identifier: Apache-2.0
"""Entry points `grouped_gemm` and `quantize_rows`.

The launch of a checked call is cached, see weft.runtime.prepared.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Never

import torch

from weft.arguments import check_bools, check_int, raise_invalid
from weft.errors import InvalidArgument
from weft.gemm import kernels, reference, triton_launch
from weft.gemm.call import (
    NAMES,
    OUT,
    OUT_DTYPES,
    OUT_SCALE,
    GemmCall,
    Out,
    build_overlap_rules,
    check_call,
    check_overlap_rules,
)
from weft.gemm.config import (
    FP8,
    MXFP4,
    STORE,
    Epilogue,
    Gated,
    GemmPlan,
    Push,
    Store,
    WgmmaPlan,
    can_fuse,
    fastest_plan,
)
from weft.gemm.config import plan as triton_plan
from weft.keywords import reject_unknown
from weft.reference import quantize
from weft.runtime.ambient import disable_autocast
from weft.runtime.check import (
    OverlapRule,
    build_tensors_key,
    check_tensor,
    raise_not_tensor,
)
from weft.runtime.prepared import CallCache
from weft.shape import FP8_BLOCK

QUANTIZE_ROWS = 8  # rows per CTA, which has one warp
Launch = Callable[[Sequence[torch.Tensor | None], Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """The cached launch of a checked call.

    Attributes:
        results: Shape and dtype of the result and of its scales, if the call allocates them.
        overlap_rules: Results and the tensors that they must not overlap.
    """

    device: torch.device
    launch: Launch
    results: tuple[tuple[torch.Size, torch.dtype], ...]
    overlap_rules: tuple[OverlapRule, ...]


class _ThreadCalls(threading.local):
    """Prepared calls of this thread; they are not thread-safe."""

    def __init__(self) -> None:
        self.prepared: CallCache[PreparedCall] = CallCache()


_calls = _ThreadCalls()


@disable_autocast
def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    counts: torch.Tensor,
    offsets: torch.Tensor | None = None,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: Out = None,
    plan: GemmPlan | WgmmaPlan | None = None,
    epilogue: Epilogue = STORE,
    num_sms: int | None = None,
    programmatic_launch: bool = False,
    prefetch_weights: bool = False,
    **_unknown: Never,
) -> Out:
    """Compute `out[row] = epilogue(a[row] @ b[e].T + bias[e])` for the rows of each expert e.

    The call allocates only `out` and may be captured in a graph. In FP8, the tensor cores sum each
    128 columns of k; these sums are scaled and added in fp32 in ascending order of k.

    Counts must not change while the kernel runs, and two instances of a captured graph must not run
    at the same time: kernels for many rows draw their tiles from a counter of the stream or of the
    captured call, and would leave rows out.

    Args:
        a: float8_e4m3fn, bfloat16 or float16, `[rows, k]` with offsets, or
            `[experts, max_rows, k]` without.
        b: `[experts, n, k]` of a's dtype. For float8_e4m3fn on Hopper and on CPUs also MXFP4: uint8
            `[experts, n / 64, k / 128, 4352]` from `weft.gemm.pack_mxfp4`.
        counts: int32 `[experts]`, number of rows of each expert, on the device.
        offsets: int32 `[experts + 1]` or `[experts]`, first row of each expert, on the device. Rows
            between experts are neither read nor written.
        a_scale: float32 `[*rows, k / 128]`, with any strides.
        b_scale: float32 `[experts, n / 128, k / 128]`; with MXFP4 `[experts, n]`.
        bias: `[experts, n]`, bfloat16, float16 or float32; added in fp32.
        out: Tensor to write to, or with GatedQuant and StoreQuant a pair of values and scales; None
            with Push.
            Default: new tensors, bfloat16 for FP8, else a's dtype; rows of no expert are undefined.
        plan: Tiles of the kernel. Default: `weft.gemm.fastest_plan` for a's rows divided by the
            number of experts. If most rows of a are unused, pass a plan for the actual mean.
        epilogue: What to do with the sums: Store, StoreQuant, Gated, GatedQuant or Push.
        num_sms: SMs that the grid may fill. Default: all.
        programmatic_launch: Use programmatic dependent launch (PDL): the kernel may start before
            the previous kernel has finished, and the next kernel before this one has. Every later
            kernel that is launched with PDL must wait for this one, as weft's kernels do.
        prefetch_weights: With PDL and a WgmmaPlan, load weights before the previous kernel has
            finished. Counts, offsets and weights must be written before that kernel allows this one
            to start.

    Returns:
        out.

    Raises:
        InvalidArgument: an argument is invalid.
    """
    if _unknown:
        reject_unknown(grouped_gemm, _unknown)
    if not isinstance(epilogue, Store | Gated | Push):
        raise_invalid(
            "epilogue", epilogue, "a Store, StoreQuant, Gated, GatedQuant or Push of weft.gemm"
        )
    if plan is not None and not isinstance(plan, GemmPlan | WgmmaPlan):
        raise_invalid("plan", plan, "a GemmPlan or WgmmaPlan of weft.gemm, or None")
    if num_sms is not None:
        num_sms = check_int("num_sms", num_sms, 1, 1 << 16)
    check_bools(programmatic_launch=programmatic_launch, prefetch_weights=prefetch_weights)
    # Hot path of every call.
    is_pair = isinstance(out, tuple) and len(out) == 2
    values: Any
    values, scales = out if is_pair else (out, None)  # type: ignore[misc]
    push = epilogue if isinstance(epilogue, Push) else None
    dst_addr, abort_flag = (push.dst_addr, push.abort_flag) if push else (None, None)
    tensors: list[torch.Tensor | None] = [a_scale, b_scale, values, scales, dst_addr, abort_flag]
    tensors += (bias, counts, offsets, a, b)  # the order of GemmCall.tensors
    tensor_key, addresses = build_tensors_key(tensors)
    epilogue_key = epilogue if push is None else (push.dtype, push.flag_in_data)
    options = is_pair, plan, epilogue_key, num_sms, programmatic_launch, prefetch_weights
    key = None if tensor_key is None else (tensor_key, options)
    prepared = _calls.prepared.find(key, addresses)
    if prepared is not None:
        return _run(prepared, out, tensors, addresses)
    call = check_call(
        a,
        b,
        counts=counts,
        offsets=offsets,
        a_scale=a_scale,
        b_scale=b_scale,
        bias=bias,
        out=out,
        epilogue=epilogue,
        prefetch_weights=prefetch_weights and programmatic_launch,
    )
    overlap_rules = () if out is None else call.overlap_rules
    check_overlap_rules(call.addresses, overlap_rules)
    plan = plan or _select_default_plan(call)
    if isinstance(plan, WgmmaPlan):
        kernels.check_plan(call, plan)
    else:
        triton_launch.check_plan(call, plan)
    if not _is_cuda(call.a.device):
        reference.run_reference(call, plan)
    elif len(call.a) and len(call.b):
        prepared = _prepare(call, plan, num_sms, programmatic_launch, overlap_rules)
        _launch(prepared, call.tensors, call.addresses)
        _calls.prepared.store(key, prepared)
    return _to_out(call.out, call.out_scale) if out is None else out


def _run(
    prepared: PreparedCall, out: Out, tensors: list[torch.Tensor | None], addresses: list[int]
) -> Out:
    """Allocate the results of a prepared call if necessary, and launch it."""
    for index, (shape, dtype) in enumerate(prepared.results, OUT):
        tensors[index] = result = torch.empty(shape, dtype=dtype, device=prepared.device)
        addresses[index] = result.data_ptr()
    _launch(prepared, tensors, addresses)
    if not prepared.results:
        return out
    return _to_out(tensors[OUT], tensors[OUT_SCALE])


def _to_out(out: torch.Tensor | None, scales: torch.Tensor | None) -> Out:
    return out if out is None or scales is None else (out, scales)


def _launch(
    prepared: PreparedCall, tensors: Sequence[torch.Tensor | None], addresses: Sequence[int]
) -> None:
    if torch.cuda.current_device() == prepared.device.index:
        prepared.launch(tensors, addresses)
    else:
        with torch.cuda.device(prepared.device):
            prepared.launch(tensors, addresses)


def _prepare(
    call: GemmCall,
    plan: GemmPlan | WgmmaPlan,
    num_sms: int | None,
    use_pdl: bool,
    overlap_rules: tuple[OverlapRule, ...],
) -> PreparedCall:
    results = () if overlap_rules else (call.out, call.out_scale)
    with torch.cuda.device(call.a.device):
        launch: Launch
        if isinstance(plan, WgmmaPlan):
            launch = kernels.HopperLaunch(call, plan, num_sms, use_pdl)
        else:
            launch = triton_launch.TritonLaunch(call, plan, num_sms, use_pdl)
    return PreparedCall(
        call.a.device,
        launch,
        tuple((t.shape, t.dtype) for t in results if t is not None),
        overlap_rules,
    )


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _select_default_plan(call: GemmCall) -> GemmPlan | WgmmaPlan:
    experts, n, k = call.sizes
    sizes = (experts, -(-len(call.a) // max(experts, 1)), n, k, call.b.dtype)
    best = fastest_plan(
        *sizes,
        gated=call.gated,
        biased=call.bias is not None,
        out=call.out_dtype,
        device=call.a.device,
    )
    if (
        call.b.dtype == MXFP4
        or isinstance(best, GemmPlan)
        or not kernels.unsupported_reason(call, best)
    ):
        return best
    return triton_plan(*sizes, gated=call.gated)


class ExpertGemm(NamedTuple):
    """Tensors and the epilogue of one of the GEMMs of `grouped_mlp`; see `grouped_gemm`."""

    a: torch.Tensor
    a_scale: torch.Tensor
    b: torch.Tensor
    b_scale: torch.Tensor
    out: Out
    epilogue: Epilogue


def grouped_mlp(
    up: ExpertGemm,
    down: ExpertGemm,
    *,
    counts: torch.Tensor,
    offsets: torch.Tensor | None,
    state: torch.Tensor,
    plan: WgmmaPlan,
    programmatic_launch: bool = False,
) -> None:
    """Compute two grouped GEMMs of FP8 experts in one kernel, on Hopper.

    The results are bitwise equal to those of two calls of `grouped_gemm`. SMs without a tile of the
    first GEMM begin with the second.

    Args:
        up: The first GEMM, with GatedQuant or StoreQuant.
        down: The second one, whose a and a_scale are the results of the first.
        counts: As in `grouped_gemm`. If they change while the kernel runs, it may never end.
        offsets: As in `grouped_gemm`.
        state: int32 `[2 + experts]`, 0 before the first call. Calls that share it must follow each
            other in stream order.
        plan: Plan of both GEMMs, for which `can_fuse` holds.
        programmatic_launch: As in `grouped_gemm`.

    Raises:
        InvalidArgument: an argument is invalid.
    """
    tensors: list[torch.Tensor | None] = []
    for gemm in (up, down):
        pair = gemm.out if isinstance(gemm.out, tuple) else (gemm.out, None)
        push = gemm.epilogue if isinstance(gemm.epilogue, Push) else None
        push_tensors = (push.dst_addr, push.abort_flag) if push else (None, None)
        tensors += (gemm.a_scale, gemm.b_scale, *pair, *push_tensors, None)
        tensors += (counts, offsets, gemm.a, gemm.b)  # the order of GemmCall.tensors
    tensors.append(state)
    tensor_key, addresses = build_tensors_key(tensors)
    down_key: object = down.epilogue
    if isinstance(down.epilogue, Push):
        down_key = down.epilogue.dtype, down.epilogue.flag_in_data
    key = None
    if tensor_key is not None:
        key = tensor_key, ("mlp", up.epilogue, down_key, plan, programmatic_launch)
    prepared = _calls.prepared.find(key, addresses)
    if prepared is None:
        prepared = _prepare_mlp(up, down, counts, offsets, state, plan, programmatic_launch)
        if prepared is None:
            return
        _calls.prepared.store(key, prepared)
    _launch(prepared, tensors, addresses)


def _prepare_mlp(
    up: ExpertGemm,
    down: ExpertGemm,
    counts: torch.Tensor,
    offsets: torch.Tensor | None,
    state: torch.Tensor,
    plan: WgmmaPlan,
    use_pdl: bool,
) -> PreparedCall | None:
    """Check a call and load its kernel; return None without rows or experts."""

    def check(gemm: ExpertGemm) -> GemmCall:
        call = check_call(
            gemm.a,
            gemm.b,
            counts=counts,
            offsets=offsets,
            a_scale=gemm.a_scale,
            b_scale=gemm.b_scale,
            bias=None,
            out=gemm.out,
            epilogue=gemm.epilogue,
        )
        kernels.check_plan(call, plan)
        return call

    calls = check(up), check(down)
    experts = len(up.b)
    check_tensor("state", state, shape=(2 + experts,), dtypes=(torch.int32,), device=up.a.device)
    if not can_fuse(plan, experts, (call.sizes[2] for call in calls)):
        raise InvalidArgument(f"{plan} does not fuse these GEMMs: call grouped_gemm for each")
    tensors = (*calls[0].tensors, *calls[1].tensors, state)
    # Down tiles are stored while the tensors of `up` are still read.
    rules = calls[0].overlap_rules + build_overlap_rules(tensors, (len(NAMES) + OUT,))
    names = [f"{name} of {part}" for part in ("up", "down") for name in NAMES]
    addresses = [*calls[0].addresses, *calls[1].addresses, state.data_ptr()]
    check_overlap_rules(addresses, rules, [*names, "state"])
    if not len(calls[0].a) or not experts:
        return None
    with torch.cuda.device(up.a.device):
        return PreparedCall(up.a.device, kernels.MlpLaunch(*calls, plan, use_pdl), (), rules)


@disable_autocast
def quantize_rows(
    x: torch.Tensor, *, programmatic_launch: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows to FP8 with one scale per 128 columns, in one launch.

    Args:
        x: bfloat16, float16 or float32 `[rows, k]`, contiguous; k must be a multiple of 128.
        programmatic_launch: As in grouped_gemm.

    Returns:
        float8_e4m3fn `[rows, k]` and float32 scales `[rows, k / 128]`, bitwise equal to
            `weft.reference.quantize(x, "fp8")`.

    Raises:
        InvalidArgument: x has the wrong shape, dtype, device or layout.
    """
    check_bools(programmatic_launch=programmatic_launch)
    if not isinstance(x, torch.Tensor):
        raise_not_tensor("x", x)
    check_tensor("x", x, shape=("rows", "k"), dtypes=OUT_DTYPES, device=x.device, aligned=1)
    if x.shape[1] % FP8_BLOCK:
        raise InvalidArgument(f"x is {list(x.shape)}; k must be a multiple of {FP8_BLOCK}")
    if x.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"x is on {x.device}; it must be on cpu or cuda")
    if x.device.type != "cuda":
        return quantize(x, "fp8")
    rows, k = x.shape
    out = torch.empty((rows, k), dtype=FP8, device=x.device)
    scales = torch.empty((rows, k // FP8_BLOCK), dtype=torch.float32, device=x.device)
    if rows:
        triton_launch.import_triton()
        kernel = importlib.import_module("weft.gemm.triton_kernels").weft_quantize_rows
        with torch.cuda.device(x.device):
            kernel[(-(-rows // QUANTIZE_ROWS), k // FP8_BLOCK)](
                *(x, out, scales, rows),
                K=k,
                BLOCK_M=QUANTIZE_ROWS,
                PROGRAMMATIC=programmatic_launch,
                num_warps=1,
                launch_pdl=programmatic_launch,
            )
    return out, scales
