"""One fused all-reduce under test: its inputs, and the check that comes before any timing.

Inputs are normally distributed. Every backend promises the bits of `weft.reference`, so whatever
is written is compared byte by byte, over memory that was poisoned before.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

import weft
from weft.bench.allreduce_cases import COLLECTIVE, GROUP, ReduceSettings
from weft.memory import Group
from weft.ops import reference

EPS = 1e-6
SCALE = 0.02  # of fp8-static: normalised numbers reach 4, the largest e4m3 number is 448
_OUTPUTS = {
    "out": "out",
    "residual": "residual_out",
    "norm": "norm_out",
    "quant": "quant_out",
    "scale": "scale_out",
}  # a field of the result, and the argument that says where to write it


@dataclass(frozen=True, slots=True)
class Rows:
    """One rank's call: rows `[tokens, hidden]`; residual and weight are the same on all ranks."""

    x: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor


def make_rows(settings: ReduceSettings, tokens: int, rank: int, device: torch.device) -> Rows:
    """Return what a rank brings. Every rank can make every other rank's rows, on its own device."""
    dtype, number = settings.out_dtype, (settings.seed * 7919 + tokens) * 64

    def normal(seed: int, *shape: int) -> torch.Tensor:
        source = torch.Generator(device).manual_seed(seed)
        return torch.randn(shape, generator=source, device=device)

    return Rows(
        x=normal(number + rank, tokens, settings.hidden).to(dtype),
        residual=normal(number + 62, tokens, settings.hidden).to(dtype),
        weight=(1 + 0.1 * normal(number + 63, settings.hidden)).to(dtype),
    )


def make_reduce(group: Group, settings: ReduceSettings) -> weft.AllReduce:
    """Return an all-reduce that serves every backend of the settings. Collective."""
    backends: dict[str, Any] = {}
    if COLLECTIVE in settings.backends:
        backends["backends"] = ("oneshot", "twoshot", "twoshot_bulk", COLLECTIVE)
    return weft.AllReduce(
        group,
        max_tokens=settings.capacity,
        hidden=settings.hidden,
        dtype=settings.out_dtype,
        table=settings.table,
        timeout=30.0,  # ranks that share cores may be late without being dead
        programmatic_launch=settings.programmatic_launch,
        **backends,
    )


def arguments_of(settings: ReduceSettings, rows: Rows) -> dict[str, Any]:
    """What `fused` gets besides x for the epilogue of the settings."""
    if settings.epilogue == "none":
        return {}
    given: dict[str, Any] = {"residual": rows.residual, "weight": rows.weight, "eps": EPS}
    device = rows.x.device
    if settings.epilogue == "fp8-static":
        given["quant"] = weft.FP8Static(torch.full((1,), SCALE, device=device))
    elif settings.epilogue == "fp8-token":
        given["quant"] = weft.FP8Token()
    elif settings.epilogue == "fp8-group":
        given["quant"] = weft.FP8Group(GROUP, scale="ue8m0")
    return given


class ReduceTrial:
    """An all-reduce with one set of rows. The same calls, in the same order, on every rank."""

    def __init__(
        self, group: Group, settings: ReduceSettings, reduce: weft.AllReduce, tokens: int
    ) -> None:
        self.group, self.reduce, self.tokens = group, reduce, tokens
        rows = [make_rows(settings, tokens, rank, group.device) for rank in range(group.size)]
        self.rows = rows[group.rank]
        self._x = self.rows.x.clone()  # a chain of calls overwrites the rows
        self.arguments = arguments_of(settings, self.rows)
        self._expected = outputs_of(
            reference.allreduce_fused([each.x for each in rows], **self.arguments)
        )
        self._written: dict[str, torch.Tensor] = {}

    def prepare(self, backend: str) -> None:
        """Make the outputs, by a first call that allocates them. Raises what `fused` raises."""
        result = self.reduce.fused(self.rows.x, **self.arguments, backend=backend)
        self._written = outputs_of(result)
        self._settle()

    def call(self, backend: str) -> object:
        """One call of the backend into static outputs."""
        outputs: dict[str, Any] = {_OUTPUTS[name]: tensor for name, tensor in self._written.items()}
        return self.reduce.fused(self.rows.x, **self.arguments, **outputs, backend=backend)

    @property
    def answer(self) -> torch.Tensor:
        """The written output, `[tokens, hidden]` of the rows' dtype, that a model goes on with."""
        return next(self._written[n] for n in ("norm", "out", "residual") if n in self._written)

    def poison(self) -> None:
        """Fill the outputs with 0xFF bytes: what is right from here on was written anew."""
        for tensor in self._written.values():
            if tensor.dtype.is_floating_point:
                tensor.view(torch.uint8).fill_(0xFF)
            else:  # packed scales, which lie column by column
                tensor.fill_(-1)
        self._settle()

    def check(self, backend: str) -> str | None:
        """Call once over poison; return how an output differs from the reference, or None."""
        self.rows.x.copy_(self._x)
        self.poison()
        self.call(backend)
        self._settle()
        return self.compare()

    def compare(self) -> str | None:
        """Return how the outputs differ from the reference, or None."""
        for name, want in self._expected.items():
            if name not in self._written:
                continue
            got = self._written[name]
            unlike = (bytes_of(got) != bytes_of(want)).any(dim=1).nonzero()
            if len(unlike):
                token = int(unlike[0])
                different = (got[token].double() != want[token].double()).nonzero()
                places = different.flatten()[:4].tolist()
                return (
                    f"rank {self.group.rank}: {name} of token {token} of {self.tokens} is "
                    f"{got[token].double()[places].tolist()} in columns {places}, the reference "
                    f"says {want[token].double()[places].tolist()}"
                )
        return None

    def _settle(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        self.group.barrier()


def outputs_of(result: Any) -> dict[str, torch.Tensor]:
    """The tensors of a result, by name; those that were not wanted are not there."""
    found = {each.name: getattr(result, each.name) for each in fields(result)}
    return {name: found[name] for name in _OUTPUTS if found.get(name) is not None}


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return `[tokens, row]` as each row's bytes."""
    rows = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return rows.copy_(tensor).view(torch.uint8)
