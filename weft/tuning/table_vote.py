"""One table of measured times for all ranks: rank 0's, sent to everyone and voted on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from weft.errors import InvalidArgument
from weft.memory import Group
from weft.tuning.table_file import TableFile

MOST_BYTES = 1 << 18  # of a table as JSON: it travels in one message

T = TypeVar("T", bound=TableFile)


def agreed_table(
    group: Group,
    given: T | Path | str | None,
    kind: type[T],
    *,
    shipped: Callable[[], T | None],
) -> T | None:
    """The table that all ranks use, or None where none was given and none is shipped. Collective.

    given: a table, the path of one, or None for what `shipped` returns on rank 0.
    Rank 0's counts and is sent to all ranks.

    Raises CreationFailed on all ranks if one cannot read its table, and GeometryMismatch naming
    both if their tables differ.
    """

    what = f"the {kind.what}"

    def read() -> T | None:
        found = kind.load(given) if isinstance(given, Path | str) else given
        if found is None:
            return shipped() if group.rank == 0 else None
        if not isinstance(found, kind):
            raise InvalidArgument(
                f"table is a {type(found).__name__}; pass a {kind.__name__}, or the path of one"
            )
        size = len(json.dumps(found.as_json()))
        if size > MOST_BYTES:
            raise InvalidArgument(f"{what} has {size} bytes; it may have {MOST_BYTES}")
        return found

    mine = group.together(read, doing=f"reading {what}")
    sent = group.all_gather(mine.as_json() if group.rank == 0 and mine is not None else None)[0]
    table = None if sent is None else kind.of_json(sent, "rank 0's table")
    first = None if table is None else table.digest
    digest = first if mine is None else mine.digest
    group.agree({"table": digest, "ranks": group.size}, what=what)
    return table


def gpu_name(device: torch.device) -> str:
    """A GPU's name as torch reports it, "" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def common_gpu(group: Group) -> str:
    """The name of every rank's GPU, "" for CPU ranks; all of them where they differ. Collective."""
    name = gpu_name(group.device)
    names = group.all_gather(name)
    # Unlike GPUs in one group have no measured table.
    return name if len(set(names)) == 1 else ", ".join(sorted(set(names)))
