"""Shares that ranks pass to each other as file descriptors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from weft.memory.group import Group


class Exported(Protocol):
    """This rank's share, allocated, and room to map those of all ranks."""

    def take_fd(self) -> int:
        """The share's descriptor, which belongs to the caller from now on."""

    def map(self, fds: Sequence[int | None], /) -> None:
        """Map the share of every rank from its descriptor, in rank order; None: it is gone."""


def map_all(group: Group, shares: Exported, *, doing: str) -> None:
    """Pass every rank's descriptor to all, and map them. Collective.

    No descriptor is left: an open one would keep the memory alive after its owner's death.
    Raises CreationFailed on every rank, which names what was being done.
    """
    fd = shares.take_fd()
    try:
        fds = group.exchange_fds(fd)
    finally:
        os.close(fd)
    try:
        group.together(lambda: shares.map(fds), doing=doing)
    finally:
        for each in fds:
            if each is not None:
                os.close(each)
