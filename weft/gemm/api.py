"""`grouped_gemm`: every expert's rows times its own weights, in one launch."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.arguments import flags, integer, refuse, shown
from weft.errors import InvalidArgument
from weft.gemm import hopper, reference, triton_launch
from weft.gemm.epilogue import STORE, Epilogue, Gated, GatedQuant, Push, Store
from weft.gemm.plans import BLOCK_N, FP8, GemmPlan, WgmmaPlan, best_plan, triton_plan
from weft.gemm.problem import (
    OUT_DTYPES,
    GemmProblem,
    check_groups,
    check_operands,
    check_results,
    check_scales,
    check_tensor,
)

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    counts: torch.Tensor,
    offsets: torch.Tensor | None = None,
    a_scale: torch.Tensor | None = None,
    b_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
    plan: GemmPlan | WgmmaPlan | None = None,
    epilogue: Epilogue = STORE,
    num_sms: int | None = None,
    programmatic_launch: bool = False,
    prefetch_weights: bool = False,
) -> Result:
    """`out[row] = epilogue(a[row] @ b[e].T + bias[e])` for the rows of each expert e. docs/gemm.md

    a: float8_e4m3fn, bfloat16 or float16, `[rows, k]` with offsets, or `[experts, max_rows, k]`.
    b: the same dtype, `[experts, n, k]`.
    counts: int32 `[experts]`, rows of each expert.   offsets: int32 `[experts + 1]` or `[experts]`,
        where each expert's rows begin; gaps are not touched. Both are read on the device.
    a_scale: float32 `[*rows, k / 128]`, in any strides.   b_scale: `[experts, n / 128, k / 128]`.
    bias: `[experts, n]`, bfloat16, float16 or float32; added in fp32.
    out: where to write, or None for new tensors (bfloat16 for FP8, else a's dtype; rows of no
        expert are then undefined). A pair with GatedQuant, None with Push.
    plan: default `weft.gemm.fastest_plan` for as many rows as a has, spread evenly; where most of a
        is unused, pass the plan for the mean.
    num_sms: SMs that the grid may fill; default all.
    programmatic_launch: PDL: start while the previous kernel ends, and let the next one start;
        every kernel behind that was launched so must wait for this one, as weft's do.
    prefetch_weights: counts, offsets and weights were written before the previous kernel lets this
        one start (docs/gemm.md, early weights): with PDL, a WgmmaPlan then loads weights while that
        kernel ends.

    Returns out. Waits for nobody, allocates only `out`, and may be captured in a graph. In FP8 each
    128 columns of k are summed by the tensor cores, scaled and added in order of k, in fp32.
    Raises InvalidArgument.
    """
    if not isinstance(epilogue, Store | Gated | Push):
        refuse("epilogue", epilogue, "a Store, Gated, GatedQuant or Push of weft.gemm")
    if plan is not None and not isinstance(plan, GemmPlan | WgmmaPlan):
        refuse("plan", plan, "a GemmPlan or WgmmaPlan of weft.gemm, or None")
    if num_sms is not None:
        num_sms = integer("num_sms", num_sms, 1, 1 << 16)
    flags(programmatic_launch=programmatic_launch, prefetch_weights=prefetch_weights)
    check_operands(a, b)
    check_groups(a, len(b), counts, offsets)
    check_scales(a, b, a_scale, b_scale)
    if bias is not None:
        check_tensor("bias", bias, a, tuple(b.shape[:2]), OUT_DTYPES)
    scales = (a_scale, b_scale)
    problem = _problem(a, b, counts, offsets, *scales, bias, out, epilogue)
    problem = replace(problem, prefetch_weights=prefetch_weights and programmatic_launch)
    check_results(problem)
    _run(problem, plan or _default_plan(problem), num_sms, programmatic_launch)
    return problem.result


def _run(
    problem: GemmProblem, plan: GemmPlan | WgmmaPlan, num_sms: int | None, programmatic: bool
) -> None:
    """Check the plan, and run its kernel, or on a CPU the reference."""
    if isinstance(plan, WgmmaPlan):
        hopper.check_plan(problem, plan)
    else:
        triton_launch.check_plan(problem, plan)
    if problem.a.device.type != "cuda":
        reference.compute(problem, plan)
    elif isinstance(plan, WgmmaPlan):
        hopper.launch(problem, plan, num_sms, programmatic)
    else:
        triton_launch.launch(problem, plan, num_sms, programmatic)


def _problem(
    a: torch.Tensor,
    b: torch.Tensor,
    counts: torch.Tensor,
    offsets: torch.Tensor | None,
    a_scale: torch.Tensor | None,
    b_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
    epilogue: Epilogue,
) -> GemmProblem:
    """The call with flat rows and the tensors that it writes. Raises InvalidArgument."""
    n, k = b.shape[1:]
    flat = a.reshape(-1, k)
    columns = n // 2 if isinstance(epilogue, Gated) else n
    result, scales = _results(a, columns, epilogue, out)
    return GemmProblem(
        a=flat,
        b=b,
        counts=counts,
        starts=offsets,
        max_rows=a.shape[1] if a.ndim == 3 else len(a),
        a_scale=None if a_scale is None else _flat_scales(a_scale, len(flat)),
        b_scale=b_scale,
        bias=bias,
        out=result,
        out_scale=scales,
        out_dtype=_dtype(a, epilogue) if result is None else result.dtype,
        epilogue=epilogue,
    )


def _default_plan(problem: GemmProblem) -> GemmPlan | WgmmaPlan:
    experts, _, k = problem.b.shape
    rows = -(-len(problem.a) // max(experts, 1))
    sizes = (experts, rows, int(problem.b.shape[1]), k, problem.a.dtype)
    best = best_plan(
        *sizes,
        gated=problem.gated,
        biased=problem.bias is not None,
        out=problem.out_dtype,
        device=problem.a.device,
    )
    if isinstance(best, WgmmaPlan) and hopper.unsupported(problem, best):
        return triton_plan(*sizes[1:], gated=problem.gated)
    return best


def _dtype(a: torch.Tensor, epilogue: Epilogue) -> torch.dtype:
    if isinstance(epilogue, Push) and epilogue.dtype is not None:
        return epilogue.dtype
    return torch.bfloat16 if a.dtype == FP8 else a.dtype


def _flat_scales(scales: torch.Tensor, rows: int) -> torch.Tensor:
    """`[rows, k / 128]` in the same strides; masked experts follow each other equally spaced."""
    if scales.ndim == 2:
        return scales
    return scales.as_strided((rows, scales.shape[2]), scales.stride()[1:])


def _results(
    a: torch.Tensor,
    columns: int,
    epilogue: Epilogue,
    out: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The tensors to write, given and checked, or new. Raises InvalidArgument."""
    rows = tuple(a.shape[:-1])
    if isinstance(epilogue, Push):
        if out is not None:
            raise InvalidArgument(
                f"out is {shown(out)} with Push, which stores rows at their dst_addr; it must be "
                "None"
            )
        return None, None
    if isinstance(epilogue, GatedQuant):
        if out is None:
            size = (*rows, columns // BLOCK_N)
            scales = torch.empty(size, dtype=torch.float32, device=a.device)
            return torch.empty((*rows, columns), dtype=FP8, device=a.device), scales
        if not isinstance(out, tuple) or len(out) != 2:
            raise InvalidArgument(
                f"out is {shown(out)}; with GatedQuant it must be a pair, numbers and scales"
            )
        check_tensor("out[0]", out[0], a, (*rows, columns), (FP8,))
        check_tensor("out[1]", out[1], a, (*rows, columns // BLOCK_N), (torch.float32,))
        return out
    if out is None:
        return torch.empty((*rows, columns), dtype=_dtype(a, epilogue), device=a.device), None
    if isinstance(out, tuple):
        raise InvalidArgument(
            f"out is {shown(out)}; it must be one tensor, or None: only GatedQuant makes a pair"
        )
    check_tensor("out", out, a, (*rows, columns), OUT_DTYPES)
    return out, None
