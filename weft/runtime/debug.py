# SPDX-License-Identifier: Apache-2.0
"""WEFT_DEBUG=1: check every call of an operator and poison memory that must not be read.

Each call synchronises its device and raises the recorded errors. Errors about the input are raised
at the end of their round, so that all ranks can finish it. Dispatched rows are overwritten once the
experts have read them, and the experts' results before they are written again. An all-reduce
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


class Checked(Protocol):
    """Interface of an operator that debug mode uses."""

    group: Group

    def _poison(self, doing: str, *, before: bool) -> None:
        """Overwrite memory that must not be read before, or after, this call."""

    def _raise_recorded(self, *, refusals: bool) -> None:
        """Raise the error that broke the group and, with `refusals`, errors about the input."""


def is_enabled() -> bool:
    """Whether WEFT_DEBUG enables the checks. Raises InvalidArgument for an unknown value."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise InvalidArgument(f"{VARIABLE} is {value!r}; set it to 1, to 0, or not at all")
    return value == "1"


class DebugChecks:
    """The checks around each call of one operator."""

    def __init__(self, operator: Checked) -> None:
        self._operator = operator

    def before(self, doing: str) -> None:
        """Overwrite memory that the call must not read."""
        if not is_capturing(self._operator.group.device):
            self._operator._poison(doing, before=True)

    def after(self, doing: str) -> None:
        """Wait for the call, overwrite memory that is no longer valid and raise its errors."""
        device = self._operator.group.device
        if is_capturing(device):
            return
        synchronize_device(device)
        self._operator._poison(doing, before=False)
        self._operator._raise_recorded(refusals=doing in ROUND_ENDS)

    def compare(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Raise GeometryMismatch if a tensor differs in any bit between ranks. Collective.

        Args:
            tensors: Tensors by name; the names are the same on every rank.
        """
        group = self._operator.group
        if is_capturing(group.device):
            return
        own = {name: None if t is None else _digest(t) for name, t in tensors.items()}
        digests = group.all_gather(own)
        for rank in group.living:
            for name, digest in own.items():
                if digests[rank][name] != digest:
                    raise GeometryMismatch(
                        f"rank {group.rank}, all-reduce: {name} of rank {rank} holds other numbers "
                        f"({digests[rank][name]}) than this rank's ({digest}): pass the same "
                        f"{name} on every rank, or build AllReduce with epilogue_at='receiver'"
                    )


def poison(tensor: torch.Tensor) -> None:
    """Overwrite a tensor of any dtype and strides: NaN in floats, -1 in integers."""
    if tensor.dtype.is_floating_point:
        tensor.copy_(torch.full((), float("nan"), device=tensor.device))
    else:
        tensor.fill_(-1)


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=8).hexdigest()
