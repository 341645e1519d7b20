# SPDX-License-Identifier: Apache-2.0
"""`weft bench allreduce`: the fused all-reduce.

Inputs are normally distributed. Every backend guarantees the bits of `weft.reference`, so outputs
are compared byte by byte, over memory that was poisoned before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

import weft
from weft import reference
from weft.allreduce.config import ReduceConfig
from weft.bench.harness import (
    TIMEOUT,
    Calls,
    Measurement,
    Rejection,
    RowsCase,
    Trial,
    Trials,
    first_row_difference,
    synchronize_ranks,
)
from weft.bench.limits import ONE_WAY_FIXED_US, TWO_WAY_FIXED_US, allreduce_floor_us, link_rate
from weft.errors import InvalidArgument, UsageError
from weft.group import Group
from weft.runtime.identity import BACKENDS as BUILT

AUTO = "auto"
BACKENDS = (*BUILT, AUTO)
GROUP = 128  # columns per scale in fp8-group
EPS = 1e-6
SCALE = 0.02  # for fp8-static: normalized values reach 4, and the largest e4m3 value is 448
EPILOGUES = {
    "none": "sum",
    "norm": "sum + residual + RMSNorm",
    "fp8-static": "sum + residual + RMSNorm + fp8, one scale",
    "fp8-token": "sum + residual + RMSNorm + fp8, a scale per token",
    "fp8-group": f"sum + residual + RMSNorm + fp8, a scale per {GROUP} columns",
}
_OUTPUTS = {
    "out": "out",
    "residual": "residual_out",
    "norm": "norm_out",
    "quant": "quant_out",
    "scale": "scale_out",
}  # fields of the result, with the arguments that set where to write them


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceCase(RowsCase):
    """Fused all-reduces with equal numbers of tokens on all ranks.

    Attributes:
        epilogue: "none" only sums; "norm" adds a residual and applies RMSNorm; the others quantize
            the norm without writing it.
        backends: Backends to measure.
    """

    operator: ClassVar[str] = "allreduce"
    checked: ClassVar[str] = "every output equals weft.reference bit by bit"

    epilogue: str = "norm"
    backends: tuple[str, ...] = (AUTO,)

    def __post_init__(self) -> None:
        RowsCase.__post_init__(self)
        if not self.backends:
            raise InvalidArgument("nothing to measure: pass at least one backend")
        sizes: dict[str, Any] = {"ranks": self.ranks, "max_tokens": self.capacity}
        ReduceConfig.from_args(**sizes, hidden=self.hidden, dtype=self.out_dtype)  # validates sizes
        if self.epilogue == "fp8-group" and self.hidden % GROUP:
            raise InvalidArgument(
                f"hidden is {self.hidden}, but fp8-group has a scale per {GROUP} columns: "
                f"choose a multiple of {GROUP}"
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.hidden * self.out_dtype.itemsize

    def title(self) -> str:
        early = "" if self.programmatic_launch else ", no programmatic launch"
        what = EPILOGUES[self.epilogue]
        return f"{self.ranks} ranks, hidden {self.hidden}, {self.dtype}, {what}{early}"

    def trials(self, group: Group) -> Trials:
        """Yield a trial per size and backend. All use one operator; inputs exist for one size."""
        reduce = weft.AllReduce(
            group,
            max_tokens=self.capacity,
            hidden=self.hidden,
            dtype=self.out_dtype,
            timeout=TIMEOUT,
            programmatic_launch=self.programmatic_launch,
        )
        with contextlib.closing(reduce):
            for tokens in self.tokens:
                trial = ReduceTrial(group, self, reduce, tokens)
                for backend in self.backends:
                    try:
                        trial.prepare(backend)
                    except UsageError as error:  # all ranks raise it
                        yield Rejection(backend, tokens, str(error))
                        continue
                    yield trial

    def bytes_of(self, measured: Measurement, phase: str) -> tuple[float, float]:
        """Return the bytes of a rank's rows, and the bytes that the backend sends from a rank."""
        payload = measured.tokens * self.row_bytes
        return payload, wire_bytes(measured.facts["chosen"], payload, self.ranks)

    def floor_us(self, measured: Measurement, gpus: list[str]) -> float | None:
        """Return the lesser floor of one-shot and two-shot."""
        return allreduce_floor_us(measured.tokens * self.row_bytes, self.ranks, gpus)

    def floor_text(self) -> str:
        speed = f"{link_rate(self.ranks):g} GB/s"
        return (
            f"the lesser of (N-1) S / {speed} + {ONE_WAY_FIXED_US:g} us and 2 (N-1)/N S / "
            f"{speed} + {TWO_WAY_FIXED_US:g} us"
        )

    def columns(self, measured: Measurement) -> dict[str, float | str]:
        """Return the backend that "auto" selected."""
        return {"chosen": measured.facts["chosen"]} if measured.variant == AUTO else {}

    def notes(self, measured: Sequence[Measurement]) -> list[str]:
        """Return the workspace's memory, and the reason for the choice of "auto"."""
        bytes_ = measured[0].facts["memory_bytes"] if measured else 0
        memory = f"{bytes_ / (1 << 20):.1f} MiB per rank" if measured else "none"
        why = dict.fromkeys(each.facts["why"] for each in measured if each.facts["why"])
        return [f"Memory of the workspace: {memory} for {self.capacity} tokens.", *[*why][:1]]


def wire_bytes(backend: str, payload: int, ranks: int) -> float:
    """Return the bytes that a rank sends to reduce `payload` bytes, evenly spread over owners."""
    return (ranks - 1) * payload if backend == "oneshot" else 2 * (ranks - 1) / ranks * payload


@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs of one rank: x `[tokens, hidden]`; residual and weight are equal on all ranks."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor


def make_rows(case: ReduceCase, tokens: int, rank: int, device: torch.device) -> Rows:
    """Return a rank's inputs. Every rank can generate every other rank's, on its own device."""
    dtype, number = case.out_dtype, case.seed_of(tokens, 0)

    def normal(seed: int, *shape: int) -> torch.Tensor:
        source = torch.Generator(device).manual_seed(seed)
        return torch.randn(shape, generator=source, device=device)

    return Rows(
        x=normal(number + rank, tokens, case.hidden).to(dtype),
        residual=normal(number + 62, tokens, case.hidden).to(dtype),
        weight=(1 + 0.1 * normal(number + 63, case.hidden)).to(dtype),
    )


def arguments_of(case: ReduceCase, rows: Rows) -> dict[str, Any]:
    """Return the case's epilogue arguments of `fused`."""
    if case.epilogue == "none":
        return {}
    arguments: dict[str, Any] = {"residual": rows.residual, "weight": rows.weight, "eps": EPS}
    device = rows.x.device
    if case.epilogue == "fp8-static":
        arguments["quant"] = weft.FP8Static(torch.full((1,), SCALE, device=device))
    elif case.epilogue == "fp8-token":
        arguments["quant"] = weft.FP8Token()
    elif case.epilogue == "fp8-group":
        arguments["quant"] = weft.FP8Group(GROUP, scale="ue8m0")
    return arguments


class ReduceTrial(Trial):
    """An all-reduce with one set of inputs; `prepare` selects the backend."""

    def __init__(self, group: Group, case: ReduceCase, reduce: weft.AllReduce, tokens: int) -> None:
        self.group, self.case, self.reduce, self.tokens = group, case, reduce, tokens
        rows = [make_rows(case, tokens, rank, group.device) for rank in range(group.size)]
        self.rows = rows[group.rank]
        self.arguments = arguments_of(case, self.rows)
        self._expected = outputs_of(
            reference.allreduce_fused([each.x for each in rows], **self.arguments)
        )
        self.variant = AUTO

    def prepare(self, backend: str) -> None:
        """Allocate the outputs by a first call. Raises errors of `fused`."""
        self.variant = backend
        result = self.reduce.fused(self.rows.x, **self.arguments, backend=backend)
        self._written = outputs_of(result)
        self.outputs = list(self._written.values())
        synchronize_ranks(self.group)

    def calls(self) -> Calls:
        """Return a call that writes into static outputs."""
        arguments: dict[str, Any] = {
            _OUTPUTS[name]: tensor for name, tensor in self._written.items()
        }
        arguments |= {**self.arguments, "backend": self.variant}
        return Calls({"call": functools.partial(self.reduce.fused, self.rows.x, **arguments)})

    def compare(self) -> str | None:
        synchronize_ranks(self.group)
        problems = (
            first_row_difference(name, self.group.rank, self._written[name], want)
            for name, want in self._expected.items()
            if name in self._written
        )
        return next((problem for problem in problems if problem), None)

    def facts(self) -> dict[str, Any]:
        """Return the selected backend, the reason if it was "auto", and a rank's memory."""
        self.reduce.check()
        memory = {"memory_bytes": self.reduce.config.share_bytes}
        if self.variant != AUTO:
            return {"chosen": self.variant, "why": "", **memory}
        choice = self.reduce.explain(self.tokens, norm=self.case.epilogue != "none")
        return {"chosen": choice.backend, "why": choice.text, **memory}


def outputs_of(result: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a result by name, without absent outputs."""
    tensors = {each.name: getattr(result, each.name) for each in fields(result)}
    return {name: tensors[name] for name in _OUTPUTS if tensors.get(name) is not None}
