"""One all-reduce table for all ranks: rank 0's, sent to everyone and voted on."""

from __future__ import annotations

from pathlib import Path

import torch

from weft.memory import Group
from weft.ops.allreduce_table import Table

WHAT = "the all-reduce table"


def agreed_table(group: Group, given: Table | Path | str | None = None) -> Table:
    """The table that all ranks use. Collective.

    given: a table, the path of one, or None for the one that came with weft for this machine.
    Rank 0's counts and is sent to everyone; a rank that was given another one says so.

    Raises CreationFailed on all ranks if one cannot read its table, and GeometryMismatch naming
    both if their tables differ.
    """
    mine = group.together(lambda: _load(given), doing=f"reading {WHAT}")
    name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else ""
    names = group.all_gather(name)
    if group.rank == 0 and mine is None:
        # Unlike GPUs in one group have no measured table.
        gpu = name if len(set(names)) == 1 else ", ".join(sorted(set(names)))
        mine = Table.shipped(gpu, group.size)
    told = group.all_gather(mine.as_json() if group.rank == 0 and mine is not None else None)[0]
    table = Table.of_json(told, "rank 0's table")
    digest = table.digest if mine is None else mine.digest
    group.agree({"table": digest, "ranks": group.size}, what=WHAT)
    return table


def _load(given: Table | Path | str | None) -> Table | None:
    return given if given is None or isinstance(given, Table) else Table.load(given)
