"""Which all-to-alls can scatter, send or store experts' results: checks of `ExpertGroups`."""

from __future__ import annotations

from weft.alltoall.operator import AllToAll
from weft.errors import InvalidArgument


def check_sends(a2a: AllToAll) -> None:
    """Raise InvalidArgument for an all-to-all whose experts' ranks cannot send by themselves."""
    if a2a.config.shape.combine == "pull":
        raise InvalidArgument(
            "send on an all-to-all with combine='pull', whose owners fetch the rows: build it "
            "with combine='push' or 'gemm_push', or use scatter"
        )
    if not a2a._build.split_phase:
        raise InvalidArgument(
            "send on an all-to-all built without split_phase; pass split_phase=True"
        )


def check_scatters(a2a: AllToAll) -> None:
    """Raise InvalidArgument for an all-to-all without an output to scatter into."""
    if a2a.config.shape.combine == "gemm_push":
        raise InvalidArgument(
            "scatter on an all-to-all with combine='gemm_push', whose rows are summed at their "
            "owners: use send, or build it with combine='pull' or 'push'"
        )


def check_addresses(a2a: AllToAll) -> None:
    """Raise InvalidArgument for an all-to-all whose rows have no addresses of their own."""
    if a2a.config.shape.combine != "gemm_push":
        raise InvalidArgument(
            "sent on an all-to-all without combine='gemm_push', whose rows have no addresses: "
            "use send, or build it with combine='gemm_push'"
        )
