"""What a grouped product means, in plain torch: the CPU's way, and the oracle of every test."""

from __future__ import annotations

import ctypes

import torch

from weft.errors import InvalidArgument
from weft.gemm.epilogue import Gated, GatedQuant, Push
from weft.gemm.hopper import WgmmaPlan
from weft.gemm.plan import GemmPlan
from weft.gemm.push_cpu import tell_rows
from weft.gemm.request import Request
from weft.reference import dequantize, quantize


def compute(request: Request, plan: GemmPlan | WgmmaPlan) -> None:
    """Write what the kernel would by any plan, expert by expert; reads counts on the host."""
    counts = request.counts.clamp(min=0, max=request.most)
    starts = None if request.starts is None else request.starts.tolist()
    for expert, count in enumerate(counts.tolist()):
        first = expert * request.most if starts is None else starts[expert]
        if count := min(count, len(request.a) - first):
            _finish(request, _product(request, expert, first, count), first)


def _product(request: Request, expert: int, first: int, count: int) -> torch.Tensor:
    """`a @ b.T + bias` of one expert in fp32."""
    rows = slice(first, first + count)
    x, w = request.a[rows], request.b[expert]
    if request.a_scale is not None and request.b_scale is not None:
        scales = request.b_scale[expert].repeat_interleave(128, dim=0)
        product = dequantize(x, request.a_scale[rows]) @ dequantize(w, scales).T
    else:
        product = x.float() @ w.float().T
    return product if request.bias is None else product + request.bias[expert].float()


def gate(gating: Gated, product: torch.Tensor) -> torch.Tensor:
    """`gate * sigmoid(alpha * gate) * (up + offset)` in fp32."""
    first, up = product.chunk(2, dim=-1)
    if gating.limit is not None:
        first, up = first.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return first * torch.sigmoid(gating.alpha * first) * (up + gating.offset)


def _finish(request: Request, product: torch.Tensor, first: int) -> None:
    epilogue = request.epilogue
    rows = slice(first, first + len(product))
    if isinstance(epilogue, Push):
        _push(epilogue, rows, product.to(request.out_dtype))
        return
    if isinstance(epilogue, Gated):
        product = gate(epilogue, product)
    out = request.out
    assert out is not None
    flat = out.view(-1, request.columns)
    if isinstance(epilogue, GatedQuant):
        product, scales = quantize(product, "fp8")
        assert request.out_scale is not None
        request.out_scale.view(-1, scales.shape[1])[rows] = scales
    flat[rows] = product.to(out.dtype)


def _push(push: Push, where: slice, rows: torch.Tensor) -> None:
    if rows.device.type != "cpu":
        raise InvalidArgument(f"rows on {rows.device}: the reference pushes on a CPU only")
    rows, home = rows.contiguous(), push.home[where]
    if push.tells:
        tell_rows(home, rows, push.unless)
        return
    width = rows.shape[1] * rows.element_size()
    for row, address in zip(rows, home.tolist(), strict=True):
        if address:
            ctypes.memmove(address, row.data_ptr(), width)
