# SPDX-License-Identifier: Apache-2.0
"""Debug mode (WEFT_DEBUG=1): check every call of an operator and poison invalid memory.

Each call synchronises its device and raises recorded errors. Errors about the input are raised at
the end of their round, so that all ranks can finish it. Dispatched rows are poisoned after the
experts have read them, and the memory of the experts' results before it is written. An all-reduce
compares the inputs that must be equal on all ranks. A call that is being captured into a CUDA graph
is not checked, because it does not run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Protocol

import torch

from weft.errors import GeometryMismatch, InvalidArgument
from weft.group import Group
from weft.runtime.stream import is_capturing, synchronize_device

VARIABLE = "WEFT_DEBUG"
ROUND_ENDS = ("combine", "fused")  # the calls that end a round


class DebuggableOperator(Protocol):
    """Interface of an operator that debug mode uses."""

    group: Group

    def _poison(self, call: str, *, before: bool) -> None:
        """Poison memory that must not be read before, or after, a call."""

    def _raise_recorded(self, *, input_errors: bool) -> None:
        """Raise the error that broke the group and, with `input_errors`, errors about the input."""


def is_enabled() -> bool:
    """Whether WEFT_DEBUG enables the checks. Raises InvalidArgument for an unknown value."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise InvalidArgument(f"{VARIABLE} is {value!r}; set it to 1, to 0, or not at all")
    return value == "1"


class DebugChecks:
    """Checks before and after each call of an operator."""

    def __init__(self, operator: DebuggableOperator) -> None:
        self._operator = operator

    def before(self, call: str) -> None:
        """Poison memory that the call must not read."""
        if not is_capturing(self._operator.group.device):
            self._operator._poison(call, before=True)

    def after(self, call: str) -> None:
        """Wait for the call, poison memory that is no longer valid, and raise recorded errors."""
        device = self._operator.group.device
        if is_capturing(device):
            return
        synchronize_device(device)
        self._operator._poison(call, before=False)
        self._operator._raise_recorded(input_errors=call in ROUND_ENDS)

    def compare(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Raise GeometryMismatch if a tensor differs in any bit between ranks. Collective.

        Args:
            tensors: Tensors by name; the names are the same on every rank.
        """
        group = self._operator.group
        if is_capturing(group.device):
            return
        own_digests = {name: None if t is None else _digest(t) for name, t in tensors.items()}
        digests = group.all_gather(own_digests)
        for rank in group.living:
            for name, digest in own_digests.items():
                if digests[rank][name] != digest:
                    raise GeometryMismatch(
                        f"rank {group.rank}, all-reduce: {name} of rank {rank} (digest "
                        f"{digests[rank][name]}) differs from this rank's ({digest}): pass the "
                        f"same {name} on every rank, or build AllReduce with epilogue_at='receiver'"
                    )


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor of any dtype and strides with NaN or -1."""
    if tensor.dtype.is_floating_point:
        tensor.copy_(torch.full((), float("nan"), device=tensor.device))
    else:
        tensor.fill_(-1)


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()
