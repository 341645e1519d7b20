"""Which backend a call of an all-reduce takes: those with room for it, and what the table says."""

from __future__ import annotations

from collections.abc import Sequence

from weft.ops.allreduce_table import ONLY, Choice, Table
from weft.ops.reduce_spec import Quant, coding_of
from weft.ops.reduction import Reduction
from weft.shape import NUMBERS

__all__ = ["Choice", "able", "choose", "epilogue_of"]

_DTYPES = {name: dtype for dtype, name in NUMBERS.items()}
_EPILOGUES = {"none": "norm", "static": "fp8-static", "token": "fp8-token"}


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
    table: Table, reduction: Reduction, backends: Sequence[str], tokens: int, epilogue: str
) -> Choice:
    """What `table` says of those of `backends` that serve so many tokens; equal on all ranks.

    The collective backend is taken where no other was built, and never beside another.
    """
    names = able(reduction, backends, tokens)
    if not names:
        return Choice(backends[0], ONLY, f"{backends[0]} is the only backend that was built")
    return table.choose(
        tokens,
        hidden=reduction.hidden,
        dtype=_DTYPES[reduction.number],
        epilogue=epilogue,
        backends=names,
    )
