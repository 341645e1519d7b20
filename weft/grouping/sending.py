"""Which all-to-alls can scatter, send or store experts' results: checks of `ExpertGroups`."""

from __future__ import annotations

from weft.alltoall.api import AllToAll
from weft.errors import InvalidArgument


def check_sends(a2a: AllToAll) -> None:
    """Raise InvalidArgument for an all-to-all whose experts' ranks cannot send by themselves."""
    way = a2a._geometry.shape.way
    if way == "pull":
        raise InvalidArgument(
            "send on an all-to-all with combine_by='pull', whose owners fetch the rows: build it "
            "with combine_by='push', 'fp8' or 'choices', or use scatter"
        )
    if not a2a._build.halves:
        raise InvalidArgument("send on an all-to-all built without halves; pass halves=True")


def check_scatters(a2a: AllToAll) -> None:
    """Raise InvalidArgument for an all-to-all without an output to scatter into."""
    if a2a._geometry.shape.way == "choices":
        raise InvalidArgument(
            "scatter on an all-to-all with combine_by='choices', whose rows are summed at their "
            "owners: use send, or build it with combine_by='pull', 'push' or 'fp8'"
        )


def check_homes(a2a: AllToAll) -> None:
    """Raise InvalidArgument for an all-to-all whose rows have no homes of their own."""
    way = a2a._geometry.shape.way
    if way != "choices":
        raise InvalidArgument(
            f"sent on an all-to-all with combine_by={way!r}, which has no homes to store rows at: "
            "use send, or build it with combine_by='choices'"
        )
