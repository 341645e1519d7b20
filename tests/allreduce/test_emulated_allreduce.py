# SPDX-License-Identifier: Apache-2.0
"""One-shot kernels with a resident grid, and the division of rows, compiled for CPUs."""

import ctypes
from pathlib import Path

import pytest
import torch

import weft
from tests.allreduce.test_allreduce import every_call, make
from tests.emulator.emulate import EmulatedEntries, build_library, compile_emulated, emulated_tree
from tests.emulator.watch import watching, ways
from tests.headers import HEADER_BYTES
from tests.patience import hurry
from tests.sums import Sum, quant_specs
from weft.allreduce.kernels import ReducePlan
from weft.errors import PeerTimeout

pytestmark = pytest.mark.slow

TOKENS = 13
CASE = Sum(TOKENS, 640, special=True, bias=1.0)  # 80 vectors: two warps and a half


# A launch of one shot: threads, CTAs of a cluster, and resident clusters or None for one a token.
Shape = tuple[int, int, int | None]
WAVES: Shape = (32, 3, None)
ALONE, PAIR, THREE = (64, 1, 1), (32, 2, 2), (32, 3, 3)


def install(ar: weft.AllReduce, library: str, shape: Shape) -> EmulatedEntries:
    threads, cluster, resident = shape
    ar._kernels = entries = EmulatedEntries(Path(library))
    if resident is not None:
        entries.forms["oneshot"] = "oneshot_resident"
    for tokens in range(1, TOKENS + 1):
        ctas = min(tokens, resident or tokens) * cluster
        entries.plans["oneshot", tokens] = ReducePlan(ctas, threads, cluster)
    return entries


def library(count: int, case: Sum = CASE) -> str:
    return str(compile_emulated(case.config(count, TOKENS)))


def emulated(group: weft.Group, library: str, shapes: list[Shape], case: Sum) -> None:
    with make(group, TOKENS, case) as ar:
        entries = install(ar, library, shapes[group.rank])
        with watching(group, entries.library, ar.site.stride) as watch:
            for seed, tokens in enumerate((1, 2, 9, TOKENS)):
                specs = quant_specs(group.device, case.hidden) if tokens == TOKENS else [None]
                every_call(ar, case.next(tokens=tokens, seed=seed), "oneshot", specs)
        slots = {"slots": range(HEADER_BYTES, 1 << 40)}
        assert ways(watch.events(), slots) == {"slots": {"writes relaxed sys", "reads relaxed sys"}}


FP32 = CASE.next(dtype=torch.float32, hidden=384, special=False)


@pytest.mark.parametrize(
    ("shapes", "case"),
    [
        *(([ALONE, ALONE], CASE), ([THREE, PAIR], CASE), ([PAIR, WAVES], CASE)),
        *(([PAIR, ALONE, THREE], case) for case in (CASE, FP32)),
    ],
)
def test_every_grid_has_the_bits_of_the_reference(ranks, shapes, case):
    count = len(shapes)
    ranks(count, "threads")(emulated, library(count, case), shapes, case)


def send_half_rows(group: weft.Group, library: str) -> str:
    """Rank 1 sends the first half of each row: some lanes of a cluster miss their vectors."""
    with make(group, TOKENS, CASE) as ar:
        install(ar, library, PAIR)
        hurry(ar, 0.5)
        reported = ""
        if group.rank == 0:
            sizes = ar.config
            size = (2 * sizes.direct, sizes.row_bytes)
            rows = ar.heap.tensor(size, torch.uint8, offset=sizes.rows_offset)
            rows[:, : sizes.row_bytes // 2] = 0
            x, weight = CASE.rows(0, group.device), CASE.shared(group.device)[1]
            norm = torch.full_like(x, 7.0)
            with pytest.raises(PeerTimeout) as caught:
                ar.fused(x, weight=weight, norm_out=norm, backend="oneshot")
            reported = str(caught.value)
            assert bool((norm[:, CASE.hidden // 2 :] == 7.0).all()), "made without its rows"
        group.barrier()
        return reported


def test_a_grid_ends_when_half_of_every_row_is_missing(ranks):
    assert "did not arrive from rank 1" in ranks(2, "threads")(send_half_rows, library(2))[0]


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
def divider() -> ctypes.CDLL:
    text = "#include <weft/allreduce/epilogue.cuh>\n" + ENTRY
    return ctypes.CDLL(str(build_library(emulated_tree(), text)))


def divided(
    divider: ctypes.CDLL, amax: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    scale, quotient = torch.empty_like(x), torch.empty_like(x)
    places = [ctypes.c_void_p(t.data_ptr()) for t in (amax, x, scale, quotient)]
    divider.divide(*places, x.numel())
    return scale, quotient


def e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def test_every_pair_of_bfloat16_significands(divider):
    """Test amax of every significand in three sizes, and every x down to 2^-20 of it."""
    significands = 1 + torch.arange(128) / 128
    for power in (-30, -8, 0, 100):
        amax = (significands * 2.0**power).float()
        x = significands[:, None] * 2.0 ** -torch.arange(21) * 2.0**power
        x = torch.cat((x.flatten(), -x.flatten(), torch.tensor([0.0, -0.0]))).float()
        amax, x = (t.contiguous() for t in torch.meshgrid(amax, x, indexing="ij"))
        scale, quotient = divided(divider, amax, x)
        expected = torch.maximum(amax * torch.tensor(1 / 448), torch.tensor(2.0**-9 / 448))
        assert torch.equal(scale, expected)
        there = x.abs() <= amax
        wrong = (quotient.view(torch.int32) != (x / scale).view(torch.int32)) & there
        assert int(wrong.sum()) == 0


def test_any_float32(divider):
    generator = torch.Generator().manual_seed(7)
    count = 1 << 20
    amax = torch.rand(count, generator=generator) + 1
    amax *= 2.0 ** torch.randint(-140, 127, (count,), generator=generator)
    x = amax * (2 * torch.rand(count, generator=generator) - 1)
    x *= 2.0 ** -torch.randint(0, 24, (count,), generator=generator)
    scale, quotient = divided(divider, amax, x)
    assert torch.equal(e4m3(quotient), e4m3(x / scale))
