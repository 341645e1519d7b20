# SPDX-License-Identifier: Apache-2.0
"""The kernels' division of a row by its scale, compared with correct rounding."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.emulator.emulate import build_library, emulated_tree

pytestmark = pytest.mark.slow

ENTRY = """\
extern "C" __attribute__((visibility("default")))
void divide(const float* amax, const float* x, float* scale, float* quotient, unsigned count) {
    for (unsigned i = 0; i < count; ++i) {
        const weft::BlockScale row = weft::row_scale(__builtin_bit_cast(unsigned, amax[i]));
        float one[1] = {x[i]};
        weft::divide_by(one, row);
        scale[i] = row.scale;
        quotient[i] = one[0];
    }
}
"""


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    text = "#include <weft/allreduce/epilogue.cuh>\n" + ENTRY
    return ctypes.CDLL(str(build_library(emulated_tree(), text)))


def divided(
    library: ctypes.CDLL, amax: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scale, quotient = torch.empty_like(x), torch.empty_like(x)
    places = [ctypes.c_void_p(t.data_ptr()) for t in (amax, x, scale, quotient)]
    library.divide(*places, x.numel())
    return scale, quotient


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def test_every_pair_of_bfloat16_significands(library):
    """Test amax of every significand in three sizes, and every x down to 2^-20 of it."""
    significands = 1 + torch.arange(128) / 128
    for power in (-30, -8, 0, 100):
        amax = (significands * 2.0**power).float()
        x = significands[:, None] * 2.0 ** -torch.arange(21) * 2.0**power
        x = torch.cat((x.flatten(), -x.flatten(), torch.tensor([0.0, -0.0]))).float()
        amax, x = (t.contiguous() for t in torch.meshgrid(amax, x, indexing="ij"))
        scale, quotient = divided(library, amax, x)
        expected = torch.maximum(amax * torch.tensor(1 / 448), torch.tensor(2.0**-9 / 448))
        assert torch.equal(scale, expected)
        there = x.abs() <= amax
        wrong = (quotient.view(torch.int32) != (x / scale).view(torch.int32)) & there
        assert int(wrong.sum()) == 0


def test_any_float32(library):
    generator = torch.Generator().manual_seed(7)
    count = 1 << 20
    amax = torch.rand(count, generator=generator) + 1
    amax *= 2.0 ** torch.randint(-140, 127, (count,), generator=generator)
    x = amax * (2 * torch.rand(count, generator=generator) - 1)
    x *= 2.0 ** -torch.randint(0, 24, (count,), generator=generator)
    scale, quotient = divided(library, amax, x)
    assert torch.equal(e4m3(quotient), e4m3(x / scale))
