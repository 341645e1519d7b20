# SPDX-License-Identifier: Apache-2.0
"""`weft bench allreduce`: the fused all-reduce.

Inputs are normally distributed. Every backend promises the bits of `weft.reference`, so whatever
is written is compared byte by byte, over memory that was poisoned before.
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
    Measured,
    Refused,
    RowsCase,
    Trial,
    Trials,
    settle,
    unlike_row,
)
from weft.bench.limits import ONE_WAY_FIXED_US, TWO_WAY_FIXED_US, allreduce_floor_us, link_rate
from weft.errors import InvalidArgument, UsageError
from weft.group import Group
from weft.runtime.identity import BACKENDS as BUILT

AUTO = "auto"
BACKENDS = (*BUILT, AUTO)
GROUP = 128  # columns that share a scale in fp8-group
EPS = 1e-6
SCALE = 0.02  # of fp8-static: normalised numbers reach 4, the largest e4m3 number is 448
EPILOGUES = {
    "none": "sum",
    "norm": "sum + residual + RMSNorm",
    "fp8-static": "sum + residual + RMSNorm + fp8, one scale",
    "fp8-token": "sum + residual + RMSNorm + fp8, a scale for each token",
    "fp8-group": f"sum + residual + RMSNorm + fp8, a scale for each {GROUP} columns",
}
_OUTPUTS = {
    "out": "out",
    "residual": "residual_out",
    "norm": "norm_out",
    "quant": "quant_out",
    "scale": "scale_out",
}  # a field of the result, and the argument that says where to write it


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceCase(RowsCase):
    """Fused all-reduces; every rank brings as many tokens.

    epilogue: "none" sums; "norm" adds a residual and takes RMSNorm; the others quantise what that
    gives, and write no norm.
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
        ReduceConfig.of(**sizes, hidden=self.hidden, dtype=self.out_dtype)  # refuses what cannot be
        if self.epilogue == "fp8-group" and self.hidden % GROUP:
            raise InvalidArgument(
                f"hidden is {self.hidden} and fp8-group has a scale for each {GROUP} columns: "
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
        """One all-reduce for all backends and sizes; inputs and reference of one size at a time."""
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
                    except UsageError as error:  # of equal sizes: all ranks refuse
                        yield Refused(backend, tokens, str(error))
                        continue
                    yield trial

    def bytes_of(self, found: Measured, phase: str) -> tuple[float, float]:
        """One rank's rows, and what the backend that ran sends off a rank."""
        payload = found.tokens * self.row_bytes
        return payload, wire_bytes(found.facts["chosen"], payload, self.ranks)

    def floor_us(self, found: Measured, gpus: list[str]) -> float | None:
        """The faster of one way through the links and of two."""
        return allreduce_floor_us(found.tokens * self.row_bytes, self.ranks, gpus)

    def floor_text(self) -> str:
        speed = f"{link_rate(self.ranks):g} GB/s"
        return (
            f"the lesser of (N-1) S / {speed} + {ONE_WAY_FIXED_US:g} us and 2 (N-1)/N S / "
            f"{speed} + {TWO_WAY_FIXED_US:g} us"
        )

    def columns(self, found: Measured) -> dict[str, float | str]:
        """What "auto" took."""
        return {"chosen": found.facts["chosen"]} if found.variant == AUTO else {}

    def notes(self, found: Sequence[Measured]) -> list[str]:
        """The memory, and what "auto" chose by."""
        memory = f"{found[0].facts['memory_bytes'] / (1 << 20):.1f} MiB a rank" if found else "none"
        why = dict.fromkeys(each.facts["why"] for each in found if each.facts["why"])
        return [f"Memory of the workspace: {memory} for {self.capacity} tokens.", *[*why][:1]]


def wire_bytes(backend: str, payload: int, ranks: int) -> float:
    """Bytes that a rank sends to reduce `payload` bytes, spread evenly over the owners."""
    return (ranks - 1) * payload if backend == "oneshot" else 2 * (ranks - 1) / ranks * payload


@dataclass(frozen=True, slots=True)
class Rows:
    """One rank's call: rows `[tokens, hidden]`; residual and weight are the same on all ranks."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor


def make_rows(case: ReduceCase, tokens: int, rank: int, device: torch.device) -> Rows:
    """Return what a rank brings. Every rank can make every other rank's rows, on its own device."""
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
    """What `fused` gets besides x for the epilogue of the case."""
    if case.epilogue == "none":
        return {}
    given: dict[str, Any] = {"residual": rows.residual, "weight": rows.weight, "eps": EPS}
    device = rows.x.device
    if case.epilogue == "fp8-static":
        given["quant"] = weft.FP8Static(torch.full((1,), SCALE, device=device))
    elif case.epilogue == "fp8-token":
        given["quant"] = weft.FP8Token()
    elif case.epilogue == "fp8-group":
        given["quant"] = weft.FP8Group(GROUP, scale="ue8m0")
    return given


class ReduceTrial(Trial):
    """An all-reduce with one set of rows; `prepare` chooses the backend."""

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
        """Make the outputs, by a first call that allocates them. Raises what `fused` raises."""
        self.variant = backend
        result = self.reduce.fused(self.rows.x, **self.arguments, backend=backend)
        self._written = outputs_of(result)
        self.outputs = list(self._written.values())
        settle(self.group)

    def calls(self) -> Calls:
        """The backend into static outputs."""
        given: dict[str, Any] = {_OUTPUTS[name]: tensor for name, tensor in self._written.items()}
        given |= {**self.arguments, "backend": self.variant}
        return Calls({"call": functools.partial(self.reduce.fused, self.rows.x, **given)})

    def compare(self) -> str | None:
        settle(self.group)
        found = (
            unlike_row(name, self.group.rank, self._written[name], want)
            for name, want in self._expected.items()
            if name in self._written
        )
        return next((problem for problem in found if problem), None)

    def facts(self) -> dict[str, Any]:
        """chosen: the backend that ran.  why: what "auto" chose by.  memory_bytes: of a rank."""
        self.reduce.check()
        memory = {"memory_bytes": self.reduce.config.share_bytes}
        if self.variant != AUTO:
            return {"chosen": self.variant, "why": "", **memory}
        choice = self.reduce.explain(self.tokens, norm=self.case.epilogue != "none")
        return {"chosen": choice.backend, "why": choice.text, **memory}


def outputs_of(result: Any) -> dict[str, torch.Tensor]:
    """The tensors of a result, by name; those that were not wanted are not there."""
    found = {each.name: getattr(result, each.name) for each in fields(result)}
    return {name: found[name] for name in _OUTPUTS if found.get(name) is not None}
