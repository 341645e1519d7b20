# SPDX-License-Identifier: Apache-2.0
"""Grouped GEMMs with known results: operands with special values, and an oracle without tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.gemm import (
    STORE,
    Epilogue,
    Gated,
    GemmPlan,
    Push,
    Store,
    WgmmaPlan,
    grouped_gemm,
    pack_mxfp4,
)
from weft.gemm.call import QUANTISING
from weft.gemm.config import DTYPES_16BIT, FP8, MXFP4
from weft.gemm.kernels import OPERANDS, GemmShape
from weft.reference import dequantize, quantize

UNTOUCHED = 77.0  # what rows hold that belong to no expert


@dataclass(frozen=True)
class Case:
    """Sizes of one grouped GEMM. Rows of no expert, and their scales, are NaN.

    dtype: of the weights, and of the rows, which are FP8 for MXFP4.
    window: exponents between the lowest and the highest scale of a row of MXFP4 weights.
    """

    dtype: torch.dtype = FP8
    counts: tuple[int, ...] = (5, 0, 19)
    n: int = 256
    k: int = 256
    masked: bool = False
    align: int = 8
    slack: int = 3  # rows after the last group
    bias: bool = False
    k_major: bool = False
    seed: int = 0
    window: int = 14

    @property
    def fp8_rows(self) -> bool:
        """Whether rows are FP8, with scales."""
        return self.dtype in (FP8, MXFP4)

    @property
    def starts(self) -> list[int]:
        """First row of each expert."""
        if self.masked:
            return [expert * self.max_rows for expert in range(len(self.counts))]
        starts = [0]
        for count in self.counts:
            starts.append(starts[-1] + -(-count // self.align) * self.align)
        return starts

    @property
    def max_rows(self) -> int:
        """Rows of an expert's block, if masked."""
        return max(self.counts) + self.slack

    @property
    def rows(self) -> int:
        return len(self.counts) * self.max_rows if self.masked else self.starts[-1] + self.slack

    def live(self) -> torch.Tensor:
        """bool `[rows]`: rows that belong to an expert."""
        live = torch.zeros(self.rows, dtype=torch.bool)
        for start, count in zip(self.starts, self.counts, strict=False):
            live[start : start + count] = True
        return live

    def make(self, device: str = "cpu") -> CaseTensors:
        seed = torch.Generator().manual_seed(self.seed)
        experts, live = len(self.counts), self.live()
        x = torch.randn(self.rows, self.k, generator=seed) * 2
        w = torch.randn(experts, self.n, self.k, generator=seed) * self.k**-0.5
        inputs: dict[str, Any] = {"counts": torch.tensor(self.counts, dtype=torch.int32)}
        wide = None
        if self.fp8_rows:
            a, a_scale = quantize(x, "fp8")
            a_scale[~live] = torch.nan
            inputs["a_scale"] = a_scale.T.contiguous().T if self.k_major else a_scale
        if self.dtype == FP8:
            b = (w * 64).to(FP8)
            inputs["b_scale"] = (
                torch.rand(experts, self.n // 128, self.k // 128, generator=seed) / 32
            )
        elif self.dtype == MXFP4:
            codes = torch.randint(0, 256, (experts, self.n, self.k // 2), generator=seed)
            values = codes.byte()
            scales = spread_scales(experts, self.n, self.k, seed, self.window)
            values[:, 9] &= 0x88  # zeros of both signs: a row, and blocks whose scales do not count
            values[:, 5::16, :16] &= 0x88
            scales[:, 5::16, 0] = 1
            wide = decode_mxfp4(values, scales)
            b, inputs["b_scale"] = pack_mxfp4(values, scales)
        else:
            a, b = x.to(self.dtype), w.to(self.dtype)
        a.view(torch.uint8 if self.fp8_rows else torch.int16)[~live] = (
            0x7F if self.fp8_rows else 0x7FFF
        )
        if self.bias:
            inputs["bias"] = torch.randn(experts, self.n, generator=seed).to(torch.bfloat16)
        if self.masked:
            a = a.view(experts, self.max_rows, self.k)
            if self.fp8_rows:
                inputs["a_scale"] = inputs["a_scale"].unflatten(0, (experts, self.max_rows))
        else:
            inputs["offsets"] = torch.tensor(self.starts, dtype=torch.int32)
        moved = {name: tensor.to(device) for name, tensor in inputs.items()}
        return CaseTensors(self, a.to(device), b.to(device), moved, wide)


def shape_of(case: Case, block_m: int, epilogue: str, **more: Any) -> GemmShape:
    """Return the shape of Hopper's kernel; "gated" quantises if rows are FP8.

    "relu2" and "relu2_fp8" are "store" and "store_fp8" with that activation.
    """
    if epilogue.startswith("relu2"):
        epilogue, more["relu2"] = epilogue.replace("relu2", "store"), True
    if epilogue == "gated" and case.fp8_rows:
        epilogue = "gated_fp8"
    inputs = {
        "out_dtype": DTYPES_16BIT.get(case.dtype, "bf16"),
        "operand": OPERANDS[case.dtype],
        "bias": "bf16" if case.bias else "none",
    }
    sizes = (len(case.counts), case.n, case.k, WgmmaPlan(block_m))
    return GemmShape(*sizes, epilogue, **(inputs | more))


def every_exponent(device: str = "cpu") -> CaseTensors:
    """Return MXFP4 operands in which row r multiplies only the weights' blocks of exponent r.

    Exponents go down to 2^-14.
    """
    case, seed = EXPONENTS, torch.Generator().manual_seed(5)
    made = case.make()
    values = torch.randint(0, 256, (1, case.n, case.k // 2), generator=seed).byte()
    exponents = torch.arange(case.k // 32).clamp(max=14)
    scales = (exponents + 120).byte().expand(1, case.n, -1).contiguous()
    b, b_scale = pack_mxfp4(values, scales)
    rows = torch.zeros(case.rows, case.k)
    for row, exponent in enumerate(exponents.tolist()):
        rows[row, exponent * 32 : exponent * 32 + 32] = torch.randint(1, 4, (32,), generator=seed)
    inputs = made.given | {"a_scale": torch.ones_like(made.given["a_scale"]), "b_scale": b_scale}
    moved = {name: tensor.to(device) for name, tensor in inputs.items()}
    a, wide = rows.to(FP8), decode_mxfp4(values, scales)
    return replace(made, a=a.to(device), b=b.to(device), given=moved, wide=wide)


def spread_scales(experts: int, n: int, k: int, seed: torch.Generator, window: int) -> torch.Tensor:
    """Return uint8 `[experts, n, k / 32]`: both ends of the window in every row, and between."""
    blocks = torch.arange(k // 32)
    apart = torch.randint(0, window + 1, (experts, n, k // 32), generator=seed)
    turn = torch.randint(0, k // 32, (experts, n, 1), generator=seed)
    apart = torch.where(
        blocks == turn, 0, torch.where(blocks == (turn + 1) % len(blocks), window, apart)
    )
    rows = torch.randint(108, 114, (experts, n, 1), generator=seed)  # E8M0 of the lowest block
    return (rows + apart).byte()


def decode_mxfp4(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float64 `[experts, n, k]` of MXFP4 in the checkpoint format."""
    codes = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2).long()
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[codes & 7]
    powers = torch.exp2(scales.double() - 127).repeat_interleave(32, dim=-1)
    return torch.where(codes > 7, -magnitudes, magnitudes) * powers


@dataclass(frozen=True)
class CaseTensors:
    """Tensors of a case.

    wide: float64 `[experts, n, k]`, what MXFP4 weights are.
    """

    case: Case
    a: torch.Tensor
    b: torch.Tensor
    given: dict[str, Any]
    wide: torch.Tensor | None = None

    def oracle(self) -> torch.Tensor:
        """Return `a @ b.T + bias`, float64 `[rows, n]` on the CPU; NaN for rows of no expert."""
        case = self.case
        a, b = self.a.reshape(case.rows, case.k).cpu(), self.b.cpu()
        wide = a.double()
        if case.fp8_rows:
            scales = self.given["a_scale"].reshape(case.rows, -1).cpu()
            wide = wide * scales.double().repeat_interleave(128, dim=1)
        y = torch.full((case.rows, case.n), torch.nan, dtype=torch.float64)
        for expert, (start, count) in enumerate(zip(case.starts, case.counts, strict=False)):
            weight = b[expert].double() if self.wide is None else self.wide[expert]
            if case.dtype == FP8:
                blocks = self.given["b_scale"][expert].cpu().double()
                weight = weight * blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
            y[start : start + count] = wide[start : start + count] @ weight.T
            if case.bias:
                y[start : start + count] += self.given["bias"][expert].cpu().double()
        return y

    def call(
        self,
        epilogue: Epilogue = STORE,
        plan: GemmPlan | WgmmaPlan | None = None,
        dtype: torch.dtype | None = None,
        **more: Any,
    ) -> Output:
        """Call `grouped_gemm` with result tensors full of UNTOUCHED.

        dtype: of results that are not FP8, if not the default.
        """
        case, device = self.case, self.a.device
        gated = isinstance(epilogue, Gated)
        rows, width = tuple(self.a.shape[:-1]), case.n // 2 if gated else case.n
        dtype = dtype or (torch.bfloat16 if case.fp8_rows else case.dtype)
        if isinstance(epilogue, QUANTISING):
            numbers = torch.full((*rows, width), UNTOUCHED, device=device).to(FP8)
            scales = torch.full((*rows, width // 128), UNTOUCHED, device=device)
            more["out"] = (numbers, scales)
        else:
            numbers = torch.full((*rows, width), UNTOUCHED, dtype=dtype, device=device)
            scales = None
        if isinstance(epilogue, Push):
            result = grouped_gemm(
                self.a, self.b, plan=plan, epilogue=epilogue, **self.given, **more
            )
            assert result is None
        else:
            more.setdefault("out", numbers)
            grouped_gemm(self.a, self.b, plan=plan, epilogue=epilogue, **self.given, **more)
        return Output(case, numbers, scales)

    def pushed(
        self,
        plan: GemmPlan | WgmmaPlan | None = None,
        dtype: torch.dtype | None = None,
        *,
        aborted: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[rows, n]` as pushed to permuted addresses, and bool `[rows]` of written rows.

        Every seventh row has no address. aborted: the abort flag, with flag-in-data. All rows that
        were not to come are checked to be as they were.
        """
        case, device = self.case, self.a.device
        flag = None if aborted is None else torch.tensor([aborted], dtype=torch.int32).to(device)
        stored_as = dtype or (torch.bfloat16 if case.fp8_rows else case.dtype)
        there = torch.full((case.rows, case.n), UNTOUCHED, dtype=stored_as, device=device)
        order = torch.randperm(case.rows, generator=torch.Generator().manual_seed(1)).to(device)
        dst_addr = there.data_ptr() + order * (case.n * there.itemsize)
        nowhere = torch.arange(case.rows, device=device) % 7 == 3
        dst_addr[nowhere] = 0
        self.call(Push(dst_addr, dtype, flag_in_data=flag is not None, abort_flag=flag), plan)
        received, stored = case.live().to(device) & ~nowhere & (not aborted), there[order]
        assert bool((stored[~received] == UNTOUCHED).all())
        return stored, received


@dataclass(frozen=True)
class Output:
    case: Case
    numbers: torch.Tensor
    scales: torch.Tensor | None = None

    def same_bits(self, other: Output) -> bool:
        """Whether numbers and scales are equal bit by bit, including NaN."""
        pairs = [(self.numbers, other.numbers)]
        if self.scales is not None and other.scales is not None:
            pairs.append((self.scales, other.scales))
        return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in pairs)

    def read(self) -> torch.Tensor:
        """Return float64 `[rows, columns]` on the CPU, multiplied by the scales."""
        numbers = self.numbers.reshape(self.case.rows, -1).cpu()
        if self.scales is None:
            return numbers.double()
        return dequantize(numbers, self.scales.reshape(self.case.rows, -1).cpu()).double()

    def agrees(self, wanted: torch.Tensor, tolerance: float = 2.0**-7) -> None:
        """Assert that rows of experts are near `wanted`, and other rows unchanged."""
        live, got = self.case.live(), self.read()
        error = (got - wanted)[live].abs()
        scale = wanted[live].square().mean().sqrt()
        assert bool((error <= tolerance * (wanted[live].abs() + scale / 4)).all()), error.max()
        rest = self.numbers.reshape(self.case.rows, -1).cpu()[~live].float()
        assert bool((rest == torch.tensor(UNTOUCHED).to(self.numbers.dtype).float()).all())
        if self.scales is not None:
            assert bool((self.scales.reshape(self.case.rows, -1).cpu()[~live] == UNTOUCHED).all())


EXPONENTS = Case(MXFP4, counts=(16,), n=256, k=512)
# What kernels are tried with, in the emulator and on GPUs. Odd numbers of k blocks, scales as
# vectors and one by one, rows up to the last of the tensor; with 16-bit dtypes: k blocks and tiles
# that end beyond the tensor. Cases of one number of experts, n, k and dtype share their kernels.
CASES = {
    "contiguous": Case(counts=(5, 0, 130, 1, 170), n=512, k=384),
    "masked": Case(counts=(17, 0, 3, 129, 1), n=512, k=384, masked=True),
    "no rows": Case(counts=(0,) * 5, n=512, k=384),
    "packed": Case(counts=(3, 1, 7, 0, 200), align=1, slack=0, n=256, k=512),
    "k-major": Case(counts=(40, 9, 0, 33, 1), k_major=True, n=256, k=512),
    "k-major, masked": Case(counts=(40, 9, 0, 33, 1), k_major=True, masked=True, n=256, k=512),
    "many experts": Case(counts=tuple(e % 5 * (e % 9 == 0) for e in range(290)), n=256, k=128),
    "normal": Case(counts=(97, 128, 129, 192, 257, 300), n=256, k=640),
    "wide": Case(counts=(5, 0, 128, 1, 300, 65), n=1280, k=640),
    "mxfp4": Case(MXFP4, counts=(5, 0, 130, 1, 170), n=512, k=384, bias=True),
    "mxfp4, masked": Case(MXFP4, counts=(17, 0, 3, 97, 2), n=512, k=384, bias=True, masked=True),
    "bf16": Case(torch.bfloat16, counts=(5, 0, 130, 1, 64), n=272, k=200, bias=True),
    "bf16, high": Case(torch.bfloat16, counts=(150, 257, 192, 48), n=256, k=320),
    "fp16, masked": Case(torch.float16, counts=(17, 0, 3, 200), n=512, k=64, masked=True),
}
# Sizes that take too long in the emulator.
LARGE = {
    "one expert": Case(counts=(300,), n=512, k=2048),
    "heights": Case(counts=(97, 112, 128, 129, 192, 191, 256, 224, 257, 289, 545), n=512, k=1024),
    "deep": Case(counts=(100, 33, 250), n=512, k=7168),
    "bf16, deep": Case(torch.bfloat16, counts=(150, 257, 192, 48, 224), n=768, k=2880),
    "mxfp4, heights": Case(MXFP4, counts=(97, 144, 160, 161, 192, 321, 545), n=512, k=1024),
    "mxfp4, deep": Case(MXFP4, counts=(100, 33, 250), n=512, k=7168),
}


def applied(epilogue: Epilogue, y: torch.Tensor) -> torch.Tensor:
    """Return the gating or activation of `a @ b.T`, in its precision."""
    if isinstance(epilogue, Gated):
        return gated(epilogue, y)
    has_relu2 = isinstance(epilogue, Store) and epilogue.activation == "relu2"
    return y.clamp(min=0).square() if has_relu2 else y


def gated(gating: Gated, y: torch.Tensor) -> torch.Tensor:
    """Return the gating of `a @ b.T`, in its precision."""
    gate, up = y.chunk(2, dim=-1)
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    swish = 1 / (1 + torch.exp(-gating.alpha * gate))
    if gating.beta is not None and gating.linear_beta is not None:
        gate = gating.beta * torch.tanh(gate / gating.beta)
        up = gating.linear_beta * torch.tanh(up / gating.linear_beta)
    return gate * swish * (up + gating.offset)
