"""Where things lie in a share: the Python mirror of `Share<S>` in alltoall/layout.cuh.

Told there, mirrored here, checked always: every compiled entry exports its own numbers
(alltoall/exports.cuh) and `verify` compares. The mirror exists so that memory can be sized, and
views made, before anything is compiled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from weft.alltoall.args import CombineArgs, DispatchArgs
from weft.memory.header import (
    HEADER_BYTES,
    ErrorRecord,
    Fault,
    Header,
    Mailbox,
    Record,
    Timeline,
)
from weft.runtime.args import Site
from weft.runtime.layout import LINE, compare, struct_numbers, up
from weft.shape import MAX_PLANES, Shape

MIRRORS: tuple[type[ctypes.Structure], ...] = (
    ErrorRecord,
    Mailbox,
    Record,
    Timeline,
    Fault,
    Header,
    Site,
    DispatchArgs,
    CombineArgs,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte offsets inside one rank's share, and its size."""

    share_bytes: int
    counts: int
    route: int
    route_bytes: int
    planes: tuple[int, ...]
    pitches: tuple[int, ...]
    stats: int  # 0 where the Shape has none
    returned: int  # 0 where rows are pulled
    outbox: int
    destinations: int

    @classmethod
    def of(cls, shape: Shape) -> Layout:
        """The layout of a Shape.

        In order: header, inbox (flags, counts, routes, payload planes, returned rows, stats),
        outbox, destinations, choices.
        """
        slots, chosen = shape.ranks * shape.tokens, shape.combine == "gemm_push"
        counts = HEADER_BYTES + 2 * up(8 * shape.ranks)
        route = counts + up(4 * shape.ranks)
        route_bytes = 8 * shape.slots
        at = route + up(slots * route_bytes)
        planes, pitches = [], []
        for size in shape.row_bytes:
            pitch = up(size, 16)
            planes.append(at)
            pitches.append(pitch)
            at += up(slots * pitch)
        # An empty struct takes one line of its own, or of the empty one before it: the end of the
        # recursion over planes; rows that are not pushed; statistics that nobody has; the outbox of
        # choices. One at the end takes a byte.
        at += LINE
        returned = up(shape.returned_rows * shape.returned_bytes)
        stats = at + (returned or LINE)
        outbox = stats + up(4 * shape.ranks * shape.stats) if shape.stats else at + returned + LINE
        destinations = outbox + (LINE if chosen else up(slots * shape.out_bytes))
        end = destinations + 4 * shape.tokens
        return cls(
            share_bytes=up(up(end) + 8 * shape.tokens * shape.slots) if chosen else up(end + 1),
            counts=counts,
            route=route,
            route_bytes=route_bytes,
            planes=tuple(planes),
            pitches=tuple(pitches),
            stats=stats if shape.stats else 0,
            returned=at if returned else 0,
            outbox=outbox,
            destinations=destinations,
        )

    def expected(self) -> list[tuple[str, int]]:
        """What `weft_layout` of a compiled entry must hold, in its order."""
        return struct_numbers(MIRRORS) + self.places()

    def places(self) -> list[tuple[str, int]]:
        """Where the parts of a share lie: what `weft_measured` of a loaded cubin must hold."""
        planes = list(self.planes) + [0] * (MAX_PLANES - len(self.planes))
        rows = [
            ("sizeof(Share)", self.share_bytes),
            ("counts", self.counts),
            ("route", self.route),
            ("sizeof(Route)", self.route_bytes),
            ("outbox", self.outbox),
            ("destinations", self.destinations),
            ("stats", self.stats),
            ("returned", self.returned),
        ]
        return rows + [(f"payload plane {p}", at) for p, at in enumerate(planes)]

    def verify(self, exported: Sequence[int]) -> None:
        """Raise LayoutMismatch naming the first number on which Python and C++ differ."""
        compare(self.expected(), exported, "the compiled entry")

    def verify_code(self, measured: Sequence[int]) -> None:
        """As `verify`, for the places that the machine code itself uses.

        A compiler's constants and its code can differ: NVRTC 13.0 did, see alltoall/layout.cuh.
        """
        compare(self.places(), measured, "the code of the compiled entry")
