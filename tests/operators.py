# SPDX-License-Identifier: Apache-2.0
"""The three operators behind one interface, for tests of their common behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import weft
from tests.faults import FAULTS
from tests.rounds import synchronize

# Fault points of device/fault.cuh, and those of them that are passed once for each peer.
POINTS = {"alltoall": range(1, 8), "lowlatency": range(1, 8), "allreduce": range(8, 12)}
FOR_EACH_PEER = {"alltoall": (3, 6), "lowlatency": (3,), "allreduce": (10, 11)}
HIDDEN, TOKENS, TOP_K, EXPERTS = 128, 4, 2, 12
LONG = 600.0  # seconds: a deadline that no test waits for


@dataclass(frozen=True)
class Kind:
    name: str
    options: dict[str, Any]

    def open(self, group: weft.Group, *, faults: bool = False, **more: Any) -> Operator:
        sizes: dict[str, Any] = {"hidden": HIDDEN, "timeout": LONG, "first_timeout": LONG}
        if self.name != "allreduce":
            sizes |= {"top_k": TOP_K, "num_experts": EXPERTS}
        if faults:
            sizes["_defines"] = FAULTS
        sizes |= {"max_tokens": TOKENS} | self.options | more
        made: Any
        match self.name:
            case "alltoall":
                made = weft.AllToAll(group, **sizes)
            case "lowlatency":
                made = weft.LowLatencyAllToAll(group, quantize=None, **sizes)
            case _:
                made = weft.AllReduce(group, **sizes)
        return Operator(self, made)


KINDS = {
    "pull": Kind("alltoall", {}),
    "push": Kind("alltoall", {"combine": "push"}),
    "fp8": Kind("alltoall", {"combine_dtype": "fp8"}),
    "receiver": Kind("lowlatency", {"reduce": "receiver"}),
    "sender": Kind("lowlatency", {}),
    "oneshot": Kind("allreduce", {"backends": ("oneshot",)}),
    "twoshot": Kind("allreduce", {"backends": ("twoshot",)}),
}


@dataclass
class Operator:
    kind: Kind
    made: Any

    def __post_init__(self) -> None:
        self.weights = torch.ones((TOKENS, TOP_K), device=self.made.group.device)

    def __enter__(self) -> Operator:
        return self

    def __exit__(self, *error: Any) -> None:
        self.made.__exit__(*error)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.round()

    def round(self, value: float = 1.0) -> Any:
        """Run one round, or one sum, with rows of `value` from this rank; return the result."""
        result = self.enqueue(value)
        synchronize(self.made.group.device)
        self.made.check()
        return result

    def enqueue(self, value: float) -> Any:
        return self.end(self.begin(value))

    def begin(self, value: float) -> Any:
        group = self.made.group
        x = torch.full((TOKENS, HIDDEN), value, dtype=torch.bfloat16, device=group.device)
        if self.kind.name == "allreduce":
            weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=group.device)
            return self.made.fused(x, weight=weight, out=True).out
        return self.made.dispatch(x, self._ids(), self.weights)

    def end(self, got: Any) -> Any:
        match self.kind.name:
            case "alltoall":
                return self.made.combine(weft.reference.identity_experts(got, torch.bfloat16))
            case "lowlatency":
                return self.made.combine(got.x.clone(), self._ids(), self.weights, got.handle)
            case _:
                return got

    def _ids(self) -> torch.Tensor:
        t = torch.arange(TOKENS, device=self.made.group.device)
        return torch.stack([t * 3 % EXPERTS, (t * 3 + 5) % EXPERTS], dim=1)
