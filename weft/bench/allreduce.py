# SPDX-License-Identifier: Apache-2.0
"""`weft bench allreduce`: the fused all-reduce.

Inputs are normally distributed. Every backend guarantees results that are bitwise equal to
`weft.reference`, so outputs are compared bitwise, after their memory was poisoned.
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
    Measurement,
    RowsCase,
    SkippedVariant,
    TimedCall,
    Trial,
    Trials,
    describe_first_difference,
    synchronize_ranks,
)
from weft.bench.limits import ONESHOT_FIXED_US, TWOSHOT_FIXED_US, allreduce_floor_us, link_gb_per_s
from weft.errors import InvalidArgument, UsageError
from weft.group import Group
from weft.runtime.identity import BACKENDS as BACKEND_IDS

AUTO = "auto"
BACKENDS = (*BACKEND_IDS, AUTO)
GROUP = 128  # columns per scale in fp8-group
EPS = 1e-6
SCALE = 0.02  # for fp8-static: normalized values are up to 4, and e4m3 values up to 448
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
}  # argument of `fused` for each field of the result


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceCase(RowsCase):
    """Parameters of a run of the fused all-reduce.

    Attributes:
        epilogue: "none" only sums; "norm" adds a residual and applies RMSNorm; the others quantize
            the normed rows without writing them.
        backends: Backends to measure.
    """

    operator: ClassVar[str] = "allreduce"
    check_description: ClassVar[str] = "every output equals weft.reference bit by bit"

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

    def describe(self) -> str:
        pdl = "" if self.programmatic_launch else ", no programmatic launch"
        epilogue = EPILOGUES[self.epilogue]
        return f"{self.ranks} ranks, hidden {self.hidden}, {self.dtype}, {epilogue}{pdl}"

    def trials(self, group: Group) -> Trials:
        """Yield a trial per size and backend, all with one operator."""
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
                trial = AllReduceTrial(group, self, reduce, tokens)
                for backend in self.backends:
                    try:
                        trial.prepare(backend)
                    except UsageError as error:  # all ranks raise it
                        yield SkippedVariant(backend, tokens, reason=str(error))
                        continue
                    yield trial

    def phase_bytes(self, measurement: Measurement, phase: str) -> tuple[float, float]:
        """Return the bytes of a rank's rows, and the bytes that the backend sends per rank."""
        payload = measurement.tokens * self.row_bytes
        return payload, wire_bytes(measurement.metadata["chosen"], payload, self.ranks)

    def floor_us(self, measurement: Measurement, gpus: list[str]) -> float | None:
        return allreduce_floor_us(measurement.tokens * self.row_bytes, self.ranks, gpus)

    def describe_floor(self) -> str:
        bandwidth = f"{link_gb_per_s(self.ranks):g} GB/s"
        return (
            f"min((N-1) S / {bandwidth} + {ONESHOT_FIXED_US:g} us, 2 (N-1)/N S / {bandwidth} + "
            f"{TWOSHOT_FIXED_US:g} us)"
        )

    def extra_columns(self, measurement: Measurement) -> dict[str, float | str]:
        """Return the backend that "auto" selected."""
        return {"chosen": measurement.metadata["chosen"]} if measurement.variant == AUTO else {}

    def format_notes(self, measurements: Sequence[Measurement]) -> list[str]:
        """Return the memory of the workspace, and the reason for the first choice of "auto"."""
        memory = "none"
        if measurements:
            memory = f"{measurements[0].metadata['memory_bytes'] / (1 << 20):.1f} MiB per rank"
        reasons = [m.metadata["why"] for m in measurements if m.metadata["why"]]
        return [f"Memory of the workspace: {memory} for {self.capacity} tokens.", *reasons[:1]]


def wire_bytes(backend: str, payload: int, ranks: int) -> float:
    """Return the bytes that a rank sends to reduce rows of `payload` bytes."""
    return (ranks - 1) * payload if backend == "oneshot" else 2 * (ranks - 1) / ranks * payload


@dataclass(frozen=True, slots=True)
class Rows:
    """Inputs of one rank.

    Attributes:
        x: `[tokens, hidden]`.
        residual: `[tokens, hidden]`, equal on all ranks.
        weight: `[hidden]`, equal on all ranks.
    """

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor


def generate_rows(case: AllReduceCase, tokens: int, rank: int, device: torch.device) -> Rows:
    """Generate the inputs of any rank."""
    dtype, base_seed = case.out_dtype, case.row_seed(tokens, 0)

    def normal(seed: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randn(shape, generator=generator, device=device)

    return Rows(
        x=normal(base_seed + rank, tokens, case.hidden).to(dtype),
        residual=normal(base_seed + 62, tokens, case.hidden).to(dtype),
        weight=(1 + 0.1 * normal(base_seed + 63, case.hidden)).to(dtype),
    )


def epilogue_arguments(case: AllReduceCase, rows: Rows) -> dict[str, Any]:
    """Return the arguments of `fused` for the epilogue of a case."""
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


class AllReduceTrial(Trial):
    """An all-reduce at one size; `prepare` selects the backend."""

    def __init__(
        self, group: Group, case: AllReduceCase, reduce: weft.AllReduce, tokens: int
    ) -> None:
        self.group, self.case, self.reduce, self.tokens = group, case, reduce, tokens
        rows = [generate_rows(case, tokens, rank, group.device) for rank in range(group.size)]
        self.rows = rows[group.rank]
        self.arguments = epilogue_arguments(case, self.rows)
        self._expected = collect_outputs(
            reference.allreduce_fused([rank_rows.x for rank_rows in rows], **self.arguments)
        )
        self.variant = AUTO

    def prepare(self, backend: str) -> None:
        """Select a backend, and allocate the outputs by a first call."""
        self.variant = backend
        result = self.reduce.fused(self.rows.x, **self.arguments, backend=backend)
        self._results = collect_outputs(result)
        self.outputs = list(self._results.values())
        synchronize_ranks(self.group)

    def timed_call(self) -> TimedCall:
        """Return the all-reduce with preallocated outputs."""
        arguments: dict[str, Any] = {
            _OUTPUTS[name]: tensor for name, tensor in self._results.items()
        }
        arguments |= {**self.arguments, "backend": self.variant}
        return TimedCall({"call": functools.partial(self.reduce.fused, self.rows.x, **arguments)})

    def compare(self) -> str | None:
        synchronize_ranks(self.group)
        errors = (
            describe_first_difference(name, self.group.rank, self._results[name], expected)
            for name, expected in self._expected.items()
            if name in self._results
        )
        return next((error for error in errors if error), None)

    def metadata(self) -> dict[str, Any]:
        """Return the backend, the reason for the choice of "auto", and the memory of a rank."""
        self.reduce.check()
        memory = {"memory_bytes": self.reduce.config.share_bytes}
        if self.variant != AUTO:
            return {"chosen": self.variant, "why": "", **memory}
        choice = self.reduce.explain(self.tokens, norm=self.case.epilogue != "none")
        return {"chosen": choice.backend, "why": choice.text, **memory}


def collect_outputs(result: Any) -> dict[str, torch.Tensor]:
    """Return the outputs of a result by name, without those that are None."""
    tensors = {field.name: getattr(result, field.name) for field in fields(result)}
    return {name: tensors[name] for name in _OUTPUTS if tensors.get(name) is not None}
