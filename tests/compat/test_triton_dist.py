# SPDX-License-Identifier: Apache-2.0
"""triton_dist's low-latency layer, and FP8 by triton_dist and deep_ep, byte for byte.

Except for blocks with an Inf or a NaN, which are NaN, and triton_dist's zeros, which stay zeros.
"""

import json
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import weft
from tests.compat.calls import layer_of, returned
from tests.ranks import ANY, on_ranks
from tests.rounds import Round
from weft.errors import OutOfOrder
from weft.lowlatency import reference as low
from weft.reference import dequantize, quantize

MOST, HIDDEN, TOP_K, EXPERTS = 16, 256, 4, 8
Quantised = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def divide_kernel(x, y, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < count
    tl.store(out + at, tl.load(x + at, there) / tl.load(y + at, there), there)


def divide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Divide float32 tensors of one shape as the device's originals do."""
    if x.device.type == "cpu":
        return x / y
    out = torch.empty_like(x)
    with torch.cuda.device(x.device):
        grid = (-(-x.numel() // 1024),)
        divide_kernel[grid](x.contiguous(), y.contiguous(), out, x.numel(), BLOCK=1024)
    return out


def compute_original(x: torch.Tensor, name: str, size: int, rounded: bool = False) -> Quantised:
    """Return e4m3 numbers and scales of blocks of `size` columns as the original computes them."""
    blocks = x.float().unflatten(-1, (-1, size))
    amax = blocks.abs().amax(dim=-1)
    zeros, whole = (amax == 0)[..., None], blocks.isfinite().all(dim=-1)
    reciprocal = (torch.tensor(1.0, dtype=torch.float64) / 448).float().to(x.device)
    if name == "deep_ep":
        amax = amax.clamp(min=1e-4)
        scales, factors = amax * reciprocal, torch.full_like(amax, 448.0) / amax
        if rounded:
            mantissa, exponent = torch.frexp(scales)
            powers = torch.where(mantissa == 0.5, exponent - 1, exponent)
            scales, factors = (torch.ldexp(torch.ones_like(amax), p) for p in (powers, -powers))
        numbers = (blocks * factors[..., None]).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        scales = amax * reciprocal
        values = divide(blocks, scales[..., None].expand_as(blocks)).clamp(-448, 448)
        signs = blocks.signbit().to(torch.uint8) << 7
        numbers = values.to(torch.float8_e4m3fn).view(torch.uint8).where(~zeros, signs)
    numbers = torch.where(whole[..., None], numbers, 0x7F).flatten(-2)
    return numbers.view(torch.float8_e4m3fn), torch.where(whole, scales, torch.nan)


def edged(seed: int, hidden: int = 512) -> torch.Tensor:
    """Return rows of many sizes: zeros, tiny numbers, sizes around 1e-4, an Inf and a NaN.

    In three rows x / amax * 448 lies half way between two e4m3 numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-40, 20, (MOST, 1), generator=generator).double()
    x = (torch.randn((MOST, hidden), generator=generator).double() * 2**powers).bfloat16()
    for row, most in enumerate((0.0, 1e-40, 2.0**-117, 9.96e-5, 1e-4, 1.01e-4, 448.0, 450.0)):
        x[row] = x[row].sign() * most
    x[8, 5], x[9, 200] = float("nan"), -float("inf")
    x[10] *= 2.0**-100
    halves = torch.arange(1, hidden // 2, 2) % 32
    for row, power in ((11, -20), (12, 0), (13, 30)):
        x[row, : len(halves)] = (7 * halves * 2.0**power).bfloat16()
        x[row, ::128] = 7 * 32 * 2.0**power * (1.0, 1.125, 1.25)[row - 11]
    return x


def same(numbers: torch.Tensor, scales: torch.Tensor, want: Quantised) -> None:
    assert torch.equal(numbers.view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(scales.nan_to_num(7.0), want[1].nan_to_num(7.0))


@pytest.mark.parametrize(
    ("name", "size", "kind"),
    [
        *(("deep_ep", 128, kind) for kind in ("fp32_col", "ue8m0")),
        *(("triton_dist", size, "fp32_row") for size in (32, 64, 128)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_numbers_and_scales_of_the_reference_equal_the_originals(name, size, kind, dtype):
    """That kernels equal the reference is in tests/lowlatency/test_lowlatency.py."""
    x = torch.cat([edged(seed) for seed in range(32)]).to(dtype)
    numbers, scales = low.compute_delivered_rows(x, "fp8", size, kind, name)
    assert scales is not None
    want = compute_original(x, name, size, kind == "ue8m0")
    same(numbers, scales, want)
    if name == "deep_ep":
        assert scales[0].max() == scales[3].max() <= scales[5].min()  # amax counts as 1e-4
    own, _ = quantize(x, "fp8", size)  # and the cases are those in which the two differ
    assert not torch.equal(own.view(torch.uint8), want[0].view(torch.uint8))


@pytest.mark.parametrize("size", [32, 128])
@on_ranks(2)
def test_delivered_rows_equal_the_originals(group, size):
    device, per_rank = group.device, EXPERTS // group.size
    sources = [edged(rank) for rank in range(group.size)]
    ids = (torch.arange(MOST)[:, None] % EXPERTS + torch.arange(TOP_K)) % EXPERTS
    ids, weights = ids.int().to(device), torch.ones(MOST, TOP_K, device=device)
    layer = layer_of(group, hidden=512, fp8_gsize=size)
    numbers, scales, counts, meta = layer.dispatch(sources[group.rank].to(device), None, ids)
    assert counts.tolist() == [MOST * TOP_K // EXPERTS * group.size] * per_rank
    for local in range(per_rank):
        for rank, rows in enumerate(sources):
            begin, count = divmod(int(meta.recv_token_source_count_and_start[local, rank]), 2**32)
            held = slice(begin, begin + count)
            sent = rows[meta.recv_token_source_indices[local, held].cpu().long()].to(device)
            want = compute_original(sent, "triton_dist", size)
            same(numbers[local, held], scales[local, held], want)
    layer.combine(torch.zeros(numbers.shape, device=device).bfloat16(), ids, weights, meta)
    layer.check()
    group.barrier()
    layer.finalize()


def loop(group: weft.Group, profiling: bool) -> None:
    """Loop over dispatches, then over combines of the last rows, as triton_dist's benchmark."""
    layer = layer_of(group, enable_profiling=profiling)
    case = Round((8, 11), TOP_K, EXPERTS, HIDDEN)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    ids[::3, 1] = EXPERTS
    for _ in range(7):
        token, scale, _, meta = layer.dispatch(x, None, ids)
    assert scale.shape == (*token.shape[:2], HIDDEN // 128)
    assert scale.is_contiguous()
    y = dequantize(token, scale).bfloat16()
    outs = [layer.combine(y, ids, weights, meta) for _ in range(7)]
    rows = dequantize(*compute_original(x, "triton_dist", 128)).bfloat16().cpu()
    inputs = rows, ids.cpu(), weights.cpu()
    expected = returned(inputs, EXPERTS, group.size, None)
    assert all(torch.equal(out.cpu(), expected) for out in outs)
    older = meta
    for _ in range(2):
        layer.dispatch(x, None, ids)
    with pytest.raises(OutOfOrder, match="dispatch 7: a later dispatch has reused its memory"):
        layer.combine(y, ids, weights, older)
    group.barrier()
    layer.dump_dispatch_trace()
    layer.dump_combine_trace()
    group.barrier()
    layer.finalize()


@pytest.mark.parametrize("profiling", [False, True])
@pytest.mark.parametrize("kind", ANY)
def test_loops_of_one_call_and_their_traces(ranks, kind, profiling, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ranks(2, kind)(loop, profiling)
    names = {f"ll_{phase}_RANK_{r}.json" for phase in ("dispatch", "combine") for r in range(2)}
    assert {path.name for path in Path("prof").glob("*")} == (names if profiling else set())
    for path in Path("prof").glob("*"):
        document = json.loads(path.read_text())
        assert any(event["ph"] == "X" for event in document["traceEvents"])
