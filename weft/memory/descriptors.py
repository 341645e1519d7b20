"""Shares that ranks pass to each other as file descriptors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weft.memory.group import Group


class Exported(Protocol):
    """This rank's share, allocated, and room to map those of all ranks."""

    def share_fd(self) -> int:
        """A new descriptor of the own share, which belongs to the caller."""

    def map(self, fds: Mapping[int, int], /) -> None:
        """Map the shares of ranks, each from its descriptor, in place of what was there."""


def map_all(group: Group, shares: Exported, *, doing: str) -> None:
    """Pass every rank's descriptor to all, and map them. Collective.

    No descriptor of a peer's share is left: an open one would keep the memory alive after its
    owner's death. Raises CreationFailed on every rank, which names what was being done.
    """
    with group.noted(lambda group: _map(group, shares, group.joining, doing)):
        _map(group, shares, frozenset(group.living), doing)


def _map(group: Group, shares: Exported, ranks: frozenset[int], doing: str) -> None:
    with contextlib.ExitStack() as own:

        def export() -> int:
            fd = shares.share_fd()
            own.callback(os.close, fd)
            return fd

        fds = group.exchange_fds(group.together(export, doing="exporting memory"))
    found = {rank: each for rank, each in enumerate(fds) if each is not None}
    try:
        wanted = {rank: each for rank, each in found.items() if rank in ranks}
        group.together(lambda: shares.map(wanted), doing=doing)
    finally:
        for each in found.values():
            os.close(each)
