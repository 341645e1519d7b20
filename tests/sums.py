# SPDX-License-Identifier: Apache-2.0
"""Fused all-reduces whose every bit is known, for all device kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

import weft
from tests.rounds import bits, synchronize
from weft.allreduce.call import FP8Group, FP8Static, FP8Token, Quant, Reduced
from weft.allreduce.config import ReduceConfig

BACKENDS = ("oneshot", "twoshot", "twoshot_bulk")


@dataclass(frozen=True)
class Sum:
    """One call of all ranks, computed from a seed: each rank can compute every other's rows."""

    tokens: int
    hidden: int = 256
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    special: bool = False
    weight_dtype: torch.dtype | None = None
    eps: float = 1e-5
    bias: float = 0.0
    differ: bool = False  # residual, weight and a static scale, from rank to rank

    def next(self, **changes: object) -> Sum:
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def epilogue_at(self) -> str:
        return "receiver" if self.differ else "owner"

    def config(self, ranks: int, max_tokens: int) -> ReduceConfig:
        return ReduceConfig.from_args(
            ranks=ranks,
            max_tokens=max_tokens,
            hidden=self.hidden,
            dtype=self.dtype,
            epilogue_at=self.epilogue_at,
        )

    def rows(self, rank: int, device: torch.device) -> torch.Tensor:
        generator = torch.Generator(device=device).manual_seed(self.seed * 1009 + rank)
        size = (self.tokens, self.hidden)
        x = torch.randn(size, generator=generator, device=device).to(self.dtype)
        return write_special_values(x, rank) if self.special and self.tokens else x

    def shared(self, device: torch.device, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (residual, weight): equal on all ranks, or those of `rank`."""
        seed = self.seed * 1009 + 500 + (rank if self.differ else 0)
        generator = torch.Generator(device=device).manual_seed(seed)
        size = (self.tokens, self.hidden)
        residual = torch.randn(size, generator=generator, device=device).to(self.dtype)
        weight = torch.randn(self.hidden, generator=generator, device=device)
        return residual, weight.to(self.weight_dtype or self.dtype)


def write_special_values(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Write values that break sums, norms and sentinels, each into columns of its own."""
    raw = x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)
    n = x.shape[1] // 16
    raw[:, :n] = -1  # the sentinel's bits
    x[:, n : 2 * n] = -0.0
    raw[:, 2 * n : 3 * n] = rank + 1  # denormals
    x[:, 3 * n] = float("inf")
    x[:, 3 * n + 1] = float("-inf") if rank else float("inf")
    raw[:, 3 * n + 2] = {torch.bfloat16: 0x7FC1, torch.float16: 0x7E07}.get(x.dtype, 0x7FC00123)
    x[:, 4 * n] = torch.finfo(x.dtype).max
    x[:, 5 * n] = (2.0**24, 1.0, -(2.0**24))[rank % 3] if x.dtype != torch.float16 else 1.0
    if x.shape[0] > 1:
        x[1] = 0  # a row of zeros
    if x.shape[0] > 2:
        x[2] = 2.0**-20 if rank else 2.0**10  # cancellation, without anything broken beside it
    return x


def quant_specs(device: torch.device, hidden: int, rank: int = 0) -> Iterator[Quant | None]:
    yield None
    yield FP8Static(torch.tensor([0.037 + 0.01 * rank], device=device))
    yield FP8Token()
    if hidden % 128 == 0:
        yield FP8Group(128)
        yield FP8Group(128, "ue8m0")


def assert_same_outputs(got: Reduced, want: Reduced) -> None:
    for field in fields(Reduced):
        a, b = getattr(got, field.name), getattr(want, field.name)
        if a is not None:
            assert b is not None, f"{field.name} was made without a request"
            wrong = int((bits(a) != bits(b)).sum())
            assert wrong == 0, f"{wrong} bytes of {field.name} differ"


def poisoned_outputs(case: Sum, device: torch.device, quant: Quant | None) -> dict[str, Any]:
    """Return outputs filled with a pattern that no call may leave."""
    size = (case.tokens, case.hidden)
    outputs: dict[str, Any] = {
        name: torch.empty(size, dtype=case.dtype, device=device)
        for name in ("out", "residual_out", "norm_out")
    }
    if quant is not None:
        outputs["quant_out"] = torch.empty(size, dtype=torch.float8_e4m3fn, device=device)
    for tensor in outputs.values():
        tensor.view(torch.uint8).fill_(0x55)
    return outputs


def play(
    ar: weft.AllReduce,
    case: Sum,
    backend: str,
    quant: Quant | None = None,
    living: Sequence[int] | None = None,
) -> Reduced:
    """Make one call with all outputs and compare it with the reference over the living ranks."""
    device = ar.group.device
    living = range(ar.group.size) if living is None else living
    xs = [case.rows(rank, device) for rank in living]
    residual, weight = case.shared(device, ar.group.rank)
    got = ar.fused(
        case.rows(ar.group.rank, device),
        residual=residual,
        weight=weight,
        eps=case.eps,
        weight_bias=case.bias,
        quant=quant,
        backend=backend,
        **poisoned_outputs(case, device, quant),
    )
    synchronize(ar.group.device)
    ar.check()
    assert_same_outputs(
        got, weft.reference.allreduce_fused(xs, residual, weight, case.eps, case.bias, quant)
    )
    return got


def fits(ar: weft.AllReduce, backend: str, tokens: int) -> bool:
    return backend != "oneshot" or tokens <= ar.config.direct
