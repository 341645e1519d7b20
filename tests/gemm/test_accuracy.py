# SPDX-License-Identifier: Apache-2.0
"""Error of the FP8 GEMM against fp64 products of the same FP8 operands."""

import pytest
import torch

from weft.gemm import grouped_gemm
from weft.reference import quantize

ROWS, EXPERTS, N = 256, 2, 512  # rows per expert
LARGEST = 1000.0  # |result|, for fp16
# Rms error relative to the results' rms. On an H100 it is 2.4e-4, 2.7e-4 and up to 3.6e-4, of which
# rounding to fp16 is 2.1e-4. Without promotion every 128 columns of k it is 1e-3 or more.
BOUNDS = {"gaussian": 2.8e-4, "heavy-tailed": 3.1e-4, "outlier channels": 4.5e-4}
MAX_ERROR = 1.5e-3  # relative to the largest |result|


def activations(kind: str, k: int, seed: torch.Generator) -> torch.Tensor:
    """Return `[EXPERTS * ROWS, k]`; one in 128 outlier channels is 60 times as large."""
    x = torch.randn(EXPERTS * ROWS, k, generator=seed)
    if kind == "heavy-tailed":
        x /= torch.rand(x.shape, generator=seed).clamp_min(1e-3).sqrt()
    if kind == "outlier channels":
        x[:, torch.randperm(k, generator=seed)[: k // 128]] *= 60
    return x


def quantize_weights(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return FP8 weights and their scales for each block of 128 x 128."""
    blocks = w.unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    scales = blocks.abs().amax((2, 4)) / 448
    return (blocks / scales[:, :, None, :, None]).to(torch.float8_e4m3fn).view(w.shape), scales


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("k", [2048, 4096, 7168])
@pytest.mark.parametrize("kind", BOUNDS)
def test_error_is_bounded(kind: str, k: int, device: str):
    seed = torch.Generator().manual_seed(k)
    a, a_scale = (x.to(device) for x in quantize(activations(kind, k, seed), "fp8"))
    b, b_scale = quantize_weights(torch.randn(EXPERTS, N, k, generator=seed).to(device))
    wide_a = a.double() * a_scale.double().repeat_interleave(128, 1)
    wide_b = b.double() * b_scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    exact = (wide_a.view(EXPERTS, ROWS, k) @ wide_b.mT).flatten(0, 1)
    factor = LARGEST / exact.abs().max().float()
    out = grouped_gemm(
        a,
        b,
        a_scale=a_scale * factor,
        b_scale=b_scale,
        counts=torch.full((EXPERTS,), ROWS, dtype=torch.int32, device=device),
        offsets=torch.arange(0, EXPERTS * ROWS + 1, ROWS, dtype=torch.int32, device=device),
        out=torch.empty(EXPERTS * ROWS, N, dtype=torch.float16, device=device),
    )
    assert isinstance(out, torch.Tensor)
    exact *= factor
    error = out.double() - exact
    assert error.norm() <= BOUNDS[kind] * exact.norm()
    assert error.abs().max() <= MAX_ERROR * LARGEST
