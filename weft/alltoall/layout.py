"""Where things lie in a share: the Python mirror of `Share<S>` in alltoall/layout.cuh."""

from __future__ import annotations

from dataclasses import dataclass

from weft.alltoall.args import CombineArgs, DispatchArgs
from weft.memory.header import HEADER_BYTES
from weft.runtime.layout import LINE, ShareLayout, up
from weft.shape import MAX_PLANES, Shape


@dataclass(frozen=True, slots=True)
class Layout(ShareLayout):
    """Byte offsets inside one rank's share, and its size; alltoall/exports.cuh exports them."""

    structs = (DispatchArgs, CombineArgs)

    share_bytes: int
    counts: int
    source_rows: int
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

        In order: header, inbox (flags, counts, slots of a source, routes, payload planes, returned
        rows, stats), outbox, destinations, saved routing.
        """
        slots, chosen = shape.ranks * shape.tokens, shape.combine == "gemm_push"
        counts = HEADER_BYTES + 2 * up(8 * shape.ranks)
        source_rows = counts + up(4 * shape.ranks)
        route = source_rows + up(4 * shape.ranks)
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
            source_rows=source_rows,
            route=route,
            route_bytes=route_bytes,
            planes=tuple(planes),
            pitches=tuple(pitches),
            stats=stats if shape.stats else 0,
            returned=at if returned else 0,
            outbox=outbox,
            destinations=destinations,
        )

    def places(self) -> list[tuple[str, int]]:
        """Where the parts of a share lie, by name."""
        planes = list(self.planes) + [0] * (MAX_PLANES - len(self.planes))
        rows = [
            ("sizeof(Share)", self.share_bytes),
            ("counts", self.counts),
            ("source_rows", self.source_rows),
            ("route", self.route),
            ("sizeof(Route)", self.route_bytes),
            ("outbox", self.outbox),
            ("destinations", self.destinations),
            ("stats", self.stats),
            ("returned", self.returned),
        ]
        return rows + [(f"payload plane {p}", at) for p, at in enumerate(planes)]
