# SPDX-License-Identifier: Apache-2.0
"""WEFT_DEBUG=1: every call of an operator is checked, and memory that may not be read is poisoned.

Each call waits for its device and raises what it has recorded; refused input is raised at the end
of its round, which all ranks can finish. Rows that a dispatch brought are overwritten when the
experts are done with them, the experts' results before they are written anew. An all-reduce
compares the inputs that must be equal on all ranks. A call that a CUDA graph captures is not
checked: nothing of it has run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Protocol

import torch

from weft.errors import GeometryMismatch, InvalidArgument
from weft.memory import Group
from weft.runtime.stream import capturing, synchronize_device

VARIABLE = "WEFT_DEBUG"
ROUND_ENDS = ("combine", "fused")  # the calls that end a round


class Checked(Protocol):
    """What debug mode asks of an operator."""

    group: Group

    def _poison(self, doing: str, *, before: bool) -> None:
        """Overwrite what nobody may read before, or after, this call."""

    def _raise_recorded(self, *, refusals: bool) -> None:
        """Raise what broke the group and, if asked for, refused input."""


def is_enabled() -> bool:
    """Whether WEFT_DEBUG asks for checks. Raises InvalidArgument for a value that is none."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise InvalidArgument(f"{VARIABLE} is {value!r}; set it to 1, to 0, or not at all")
    return value == "1"


class DebugChecks:
    """The checks around each call of one operator."""

    def __init__(self, operator: Checked) -> None:
        self._operator = operator

    def before(self, doing: str) -> None:
        """Overwrite what the call may not read."""
        if not capturing(self._operator.group.device):
            self._operator._poison(doing, before=True)

    def after(self, doing: str) -> None:
        """Wait for the call, raise what it has recorded, and overwrite what is over."""
        device = self._operator.group.device
        if capturing(device):
            return
        synchronize_device(device)
        self._operator._poison(doing, before=False)
        self._operator._raise_recorded(refusals=doing in ROUND_ENDS)

    def compare(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Raise GeometryMismatch for tensors that are not the same bits on all ranks. Collective.

        Args:
            tensors: by their names, the same names on every rank.
        """
        group = self._operator.group
        if capturing(group.device):
            return
        own = {name: None if t is None else _digest(t) for name, t in tensors.items()}
        everyone = group.all_gather(own)
        for rank in group.living:
            for name, digest in own.items():
                if everyone[rank][name] != digest:
                    raise GeometryMismatch(
                        f"rank {group.rank}, all-reduce: {name} of rank {rank} holds other numbers "
                        f"({everyone[rank][name]}) than this rank's ({digest}): pass the same "
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
