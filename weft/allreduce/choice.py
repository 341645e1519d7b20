"""Which backend a call of an all-reduce takes: those with room for it, and what the table says."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.allreduce.reduction import Reduction
from weft.allreduce.spec import Quant, coding_of
from weft.allreduce.table import MEASURED, NEAREST, ONLY, Choice, Table
from weft.errors import InvalidArgument
from weft.memory import Group
from weft.shape import DTYPE_NAMES
from weft.tuning.table_vote import agreed_table, common_gpu

__all__ = ["Choice", "able", "choose", "common_table", "epilogue_of"]

_log = logging.getLogger(__name__)
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_EPILOGUES = {"none": "norm", "static": "fp8-static", "token": "fp8-token"}


def common_table(group: Group, given: Table | Path | str | None = None) -> Table:
    """The table that all ranks use: rank 0's. Collective.

    given: a table, the path of one, or None for the one that came with weft for this machine.
    Raises CreationFailed and GeometryMismatch, as agreed_table.
    """

    gpu = common_gpu(group)

    def shipped() -> Table:
        return Table.shipped(gpu, group.size)

    found = agreed_table(group, given, Table, shipped=shipped)
    assert found is not None  # there is always the formula
    if group.rank == 0:
        there, here = (found.gpu, found.ranks), (gpu, group.size)
        _log.info("the all-reduce chooses its backend by this table: %s", found.origin)
        if found.source == MEASURED and there != here:
            measured, mine = (f"{n} x {name or 'CPU'}" for name, n in (there, here))
            _log.warning("the all-reduce table is of %s, but these ranks are %s", measured, mine)
    return found


def able(reduction: Reduction, backends: Sequence[str], tokens: int) -> list[str]:
    """The backends that have slots for so many tokens, without the collective one."""
    return [
        name
        for name in backends
        if name != "collective" and (name != "oneshot" or tokens <= reduction.direct)
    ]


def epilogue_of(quant: Quant | None, *, norm: bool) -> str:
    """The class of work after the sum, as tables name it."""
    return _EPILOGUES.get(coding_of(quant), "fp8-group") if norm else "none"


def choose(
    table: Table,
    reduction: Reduction,
    backends: Sequence[str],
    tokens: int,
    epilogue: str,
    *,
    gpu: str,
) -> Choice:
    """What `table` says of those of `backends` that serve so many tokens; equal on all ranks.

    The collective backend is taken where no other serves so many tokens, and never beside one that
    does. Raises InvalidArgument where none does: one shot has no slots beyond `reduction.direct`.

    gpu: this rank's, "" for CPU ranks. A table of another machine is read all the same, and named.
    """
    names = able(reduction, backends, tokens)
    if not names and "collective" not in backends:
        raise InvalidArgument(
            f"{tokens} tokens; this all-reduce was built with oneshot alone, which has slots for "
            f"{reduction.direct}: build it with 'twoshot' too, or bring fewer"
        )
    if not names:
        return Choice("collective", ONLY, "collective is the only backend that serves this call")
    found = table.choose(
        tokens,
        hidden=reduction.hidden,
        dtype=_DTYPES[reduction.dtype],
        epilogue=epilogue,
        backends=names,
    )
    if found.source == MEASURED and reduction.epilogue_at == "receiver" and epilogue != "none":
        text = f"{found.text} It was measured with epilogue_at='owner'."
        found = replace(found, source=NEAREST, text=text)
    if found.source != MEASURED or (table.gpu, table.ranks) == (gpu, reduction.ranks):
        return found
    measured, here = (
        f"{n} x {name or 'CPU'}" for name, n in ((table.gpu, table.ranks), (gpu, reduction.ranks))
    )
    return replace(
        found, source=NEAREST, text=f"{found.text} The table is of {measured}, this is {here}."
    )
