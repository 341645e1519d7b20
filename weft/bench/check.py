"""Poison and comparison: what stands before and behind every timing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from weft.memory import Group

POISON = 0xFF  # as bytes a NaN in every float type that is sent


def settle(group: Group) -> None:
    """Wait for this rank's device, then for every rank."""
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)
    group.barrier()


def poison(tensor: torch.Tensor) -> None:
    """Overwrite with bytes that no right result has."""
    if tensor.dtype.is_floating_point:
        tensor.view(torch.uint8).fill_(POISON)
    else:  # packed scales, which lie column by column
        tensor.fill_(-1)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return `[..., row]` as each row's bytes, whatever its strides."""
    rows = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return rows.copy_(tensor).view(torch.uint8)


def unlike_row(name: str, rank: int, got: torch.Tensor, want: torch.Tensor) -> str | None:
    """Return the first token whose row differs in a byte, with both values, or None.

    got, want: `[tokens, columns]` of one dtype.
    """
    unlike = (bytes_of(got) != bytes_of(want)).any(dim=1).nonzero()
    if not len(unlike):
        return None
    token = int(unlike[0])
    differ = bytes_of(got[token]) != bytes_of(want[token])
    places = differ.view(-1, got.itemsize).any(dim=1).nonzero().flatten()[:4].tolist()
    return (
        f"rank {rank}: {name} of token {token} of {len(got)} is "
        f"{got[token].double()[places].tolist()} in columns {places}, the reference says "
        f"{want[token].double()[places].tolist()}"
    )
