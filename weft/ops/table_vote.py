"""One table of measured times for all ranks: rank 0's, sent to everyone and voted on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from weft.memory import Group


class Kept(Protocol):
    """A table that is kept in a file."""

    @property
    def digest(self) -> str:
        """What ranks compare."""

    def as_json(self) -> dict[str, Any]:
        """The table as JSON values."""


T = TypeVar("T", bound=Kept)
T_co = TypeVar("T_co", bound=Kept, covariant=True)


class Kind(Protocol[T_co]):
    """The class of a table."""

    def load(self, path: Path | str) -> T_co:
        """Read a file. Raises InvalidArgument."""

    def of_json(self, found: Any, where: str) -> T_co:
        """The table in JSON values. Raises InvalidArgument."""


def agreed_table(
    group: Group,
    given: T | Path | str | None,
    kind: Kind[T],
    *,
    shipped: Callable[[], T | None],
    what: str,
) -> T | None:
    """The table that all ranks use, or None where none was given and none is shipped. Collective.

    given: a table, the path of one, or None for what `shipped` returns on rank 0.
    Rank 0's counts and is sent to everyone; a rank that was given another one says so.

    Raises CreationFailed on all ranks if one cannot read its table, and GeometryMismatch naming
    both if their tables differ.
    """

    def read() -> T | None:
        return kind.load(given) if isinstance(given, Path | str) else given

    mine = group.together(read, doing=f"reading {what}")
    if group.rank == 0 and mine is None:
        mine = shipped()
    told = group.all_gather(mine.as_json() if group.rank == 0 and mine is not None else None)[0]
    table = None if told is None else kind.of_json(told, "rank 0's table")
    first = None if table is None else table.digest
    digest = first if mine is None else mine.digest
    group.agree({"table": digest, "ranks": group.size}, what=what)
    return table


def common_gpu(group: Group) -> str:
    """The name of every rank's GPU, "" for CPU ranks; all of them where they differ. Collective."""
    name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else ""
    names = group.all_gather(name)
    # Unlike GPUs in one group have no measured table.
    return name if len(set(names)) == 1 else ", ".join(sorted(set(names)))
