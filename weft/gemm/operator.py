# SPDX-License-Identifier: Apache-2.0
"""`grouped_gemm`: every expert's rows times its own weights, in one launch; and `quantize_rows`.

An engine makes the same few calls for every step: other addresses, equal in everything else. What a
checked call needs for its launch is kept, and an equal one goes to the launch at once.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Never

import torch

from weft.arguments import flags, integer, refuse
from weft.errors import InvalidArgument
from weft.gemm import kernels, reference, triton_launch
from weft.gemm.call import OUT, OUT_DTYPES, OUT_SCALE, GemmCall, Out, checked_call
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
    fastest_plan,
)
from weft.gemm.config import plan as triton_plan
from weft.keywords import refuse_unknown
from weft.reference import quantize
from weft.runtime.ambient import without_autocast
from weft.runtime.check import Pair, check_tensor, overlap, refuse_tensor, tensors_key
from weft.shape import FP8_BLOCK

MOST_PREPARED = 512  # kinds of calls that a thread keeps; each takes about 2 KiB
QUANTIZE_ROWS = 8  # of a CTA, which is one warp
Launch = Callable[[Sequence[torch.Tensor | None], Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """One kind of call that was checked: its launch, and the results that it makes.

    made: shape and dtype of the result, then of its scales, where the caller gave none.
    apart: pairs of tensors that must not overlap.
    """

    device: torch.device
    launch: Launch
    made: tuple[tuple[torch.Size, torch.dtype], ...]
    apart: tuple[Pair, ...]


class _Calls(threading.local):
    """Calls of this thread, the oldest first: a launch serves one thread at a time."""

    def __init__(self) -> None:
        self.prepared: dict[object, Prepared] = {}


_calls = _Calls()


@without_autocast
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

    The call allocates only `out` and may be captured in a graph. In FP8 each 128 columns of k are
    summed by the tensor cores, scaled, and added in fp32 in order of k.

    Args:
        a: float8_e4m3fn, bfloat16 or float16, `[rows, k]` with offsets, or `[experts, max_rows,
            k]`.
        b: The same dtype, `[experts, n, k]`; or for float8_e4m3fn, on Hopper and on CPUs, MXFP4:
            uint8 `[experts, n / 64, k / 128, 4352]`, from `weft.gemm.pack_mxfp4`.
        counts: int32 `[experts]`, rows of each expert.
        offsets: int32 `[experts + 1]` or `[experts]`, where each expert's rows begin; gaps are not
            touched. Both are read on the device.
        a_scale: float32 `[*rows, k / 128]`, in any strides.
        b_scale: `[experts, n / 128, k / 128]`; with MXFP4 `[experts, n]`.
        bias: `[experts, n]`, bfloat16, float16 or float32; added in fp32.
        out: Where to write, or None for new tensors (bfloat16 for FP8, else a's dtype; rows of no
            expert are then undefined). A pair with GatedQuant, None with Push.
        plan: Default `weft.gemm.fastest_plan` for as many rows as a has, spread evenly; where most
            of a is unused, pass the plan for the mean.
        num_sms: SMs that the grid may fill; default all.
        programmatic_launch: PDL: start while the previous kernel ends, and let the next one start;
            every later kernel that was launched so must wait for this one, as weft's do.
        prefetch_weights: Counts, offsets and weights were written before the previous kernel lets
            this one start: with PDL, a WgmmaPlan then loads weights while that kernel ends.

    Returns:
        out.

    Raises:
        InvalidArgument: an argument is invalid.
    """
    if _unknown:
        refuse_unknown(grouped_gemm, _unknown)
    if not isinstance(epilogue, Store | Gated | Push):
        refuse("epilogue", epilogue, "a Store, Gated, GatedQuant or Push of weft.gemm")
    if plan is not None and not isinstance(plan, GemmPlan | WgmmaPlan):
        refuse("plan", plan, "a GemmPlan or WgmmaPlan of weft.gemm, or None")
    if num_sms is not None:
        num_sms = integer("num_sms", num_sms, 1, 1 << 16)
    flags(programmatic_launch=programmatic_launch, prefetch_weights=prefetch_weights)
    # This is the path of every call: no more than it needs.
    pair = isinstance(out, tuple) and len(out) == 2
    numbers: Any
    numbers, scales = out if pair else (out, None)  # type: ignore[misc]
    push = epilogue if isinstance(epilogue, Push) else None
    dst_addr, abort_flag = (push.dst_addr, push.abort_flag) if push else (None, None)
    tensors: list[torch.Tensor | None] = [a_scale, b_scale, numbers, scales, dst_addr, abort_flag]
    tensors += (bias, counts, offsets, a, b)  # as GemmCall.tensors
    kind, addresses = tensors_key(tensors)
    stored = epilogue if push is None else (push.dtype, push.flag_in_data)
    key = kind, pair, plan, stored, num_sms, programmatic_launch, prefetch_weights
    prepared = None if kind is None else _calls.prepared.get(key)
    if prepared is not None and overlap(addresses, prepared.apart) is None:
        return _run(prepared, out, tensors, addresses)
    call = checked_call(
        *(a, b),
        counts=counts,
        offsets=offsets,
        a_scale=a_scale,
        b_scale=b_scale,
        bias=bias,
        out=out,
        epilogue=epilogue,
        prefetch_weights=prefetch_weights and programmatic_launch,
    )
    apart = call.pairs(made=out is None)
    call.check_apart(apart)
    plan = plan or _default_plan(call)
    if isinstance(plan, WgmmaPlan):
        kernels.check_plan(call, plan)
    else:
        triton_launch.check_plan(call, plan)
    if not _on_gpu(call.a.device):
        reference.compute(call, plan)
    elif len(call.a) and len(call.b):
        prepared = _prepare(call, plan, num_sms, programmatic_launch, apart)
        _launch(prepared, call.tensors, call.addresses)
        if kind is not None:
            if len(_calls.prepared) >= MOST_PREPARED:
                del _calls.prepared[next(iter(_calls.prepared))]
            _calls.prepared[key] = prepared
    return _result(call.out, call.out_scale) if out is None else out


def _run(
    prepared: Prepared, out: Out, tensors: list[torch.Tensor | None], addresses: list[int]
) -> Out:
    """A call of a known kind. The results that it makes need no check."""
    for index, (shape, dtype) in enumerate(prepared.made, OUT):
        tensors[index] = made = torch.empty(shape, dtype=dtype, device=prepared.device)
        addresses[index] = made.data_ptr()
    _launch(prepared, tensors, addresses)
    if not prepared.made:
        return out
    return _result(tensors[OUT], tensors[OUT_SCALE])


def _result(out: torch.Tensor | None, scales: torch.Tensor | None) -> Out:
    return out if out is None or scales is None else (out, scales)


def _launch(
    prepared: Prepared, tensors: Sequence[torch.Tensor | None], addresses: Sequence[int]
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
    programmatic: bool,
    apart: tuple[Pair, ...],
) -> Prepared:
    results = () if apart else (call.out, call.out_scale)
    with torch.cuda.device(call.a.device):
        launch: Launch
        if isinstance(plan, WgmmaPlan):
            launch = kernels.HopperLaunch(call, plan, num_sms, programmatic)
        else:
            launch = triton_launch.TritonLaunch(call, plan, num_sms, programmatic)
    return Prepared(
        call.a.device, launch, tuple((t.shape, t.dtype) for t in results if t is not None), apart
    )


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _default_plan(call: GemmCall) -> GemmPlan | WgmmaPlan:
    experts, n, k = call.sizes
    sizes = (experts, -(-len(call.a) // max(experts, 1)), n, k, call.b.dtype)
    best = fastest_plan(
        *sizes,
        gated=call.gated,
        biased=call.bias is not None,
        out=call.out_dtype,
        device=call.a.device,
    )
    if call.b.dtype == MXFP4 or isinstance(best, GemmPlan) or not kernels.unsupported(call, best):
        return best
    return triton_plan(*sizes, gated=call.gated)


@without_autocast
def quantize_rows(
    x: torch.Tensor, *, programmatic_launch: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise rows `[rows, k]` to FP8 with one scale for each 128 columns, in one launch.

    Args:
        x: bfloat16, float16 or float32, contiguous; k a multiple of 128.
        programmatic_launch: As in grouped_gemm.

    Returns:
        float8_e4m3fn `[rows, k]` and float32 scales `[rows, k / 128]`, with the bits of
            `weft.reference.quantize(x, "fp8")`.

    Raises:
        InvalidArgument: x has another shape or dtype.
    """
    flags(programmatic_launch=programmatic_launch)
    if not isinstance(x, torch.Tensor):
        refuse_tensor("x", x)
    check_tensor("x", x, shape=("rows", "k"), dtypes=OUT_DTYPES, device=x.device, aligned=1)
    if x.shape[1] % FP8_BLOCK:
        raise InvalidArgument(f"x is {list(x.shape)}; k must be a multiple of {FP8_BLOCK}")
    if x.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"x is on {x.device}; rows are quantised on cpu and cuda")
    if x.device.type != "cuda":
        return quantize(x, "fp8")
    rows, k = x.shape
    out = torch.empty((rows, k), dtype=FP8, device=x.device)
    scales = torch.empty((rows, k // FP8_BLOCK), dtype=torch.float32, device=x.device)
    if rows:
        triton_launch.installed()
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
