# SPDX-License-Identifier: Apache-2.0
"""What profiled kernels recorded: when each operation sent, waited and ended, and for whom.

Kernels compiled with `WEFT_PROFILE=1` keep the last 32 rounds in the header, as
device/timeline.cuh says. Reading synchronises with nothing: let the device finish first.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.memory.header import PHASES, mirrors

if TYPE_CHECKING:
    from weft.memory import Heap

DEFINE = "WEFT_PROFILE=1"


@dataclass(frozen=True, slots=True)
class Span:
    """One operation of one rank: times in nanoseconds of that rank's clock, 0 for not reached.

    start_ns: the first CTA began.  sent_ns: all is sent, no flag is out yet.
    published_ns: all flags are out.  end_ns: the last CTA ended.
    arrived_ns: when the flag of each rank was seen, by rank; CPU ranks look at one flag after the
        other, so there a later one may have been there before.
    """

    rank: int
    phase: str
    epoch: int
    ctas: int
    start_ns: int
    sent_ns: int
    published_ns: int
    end_ns: int
    arrived_ns: tuple[int, ...]

    @property
    def finished(self) -> bool:
        """Has the operation come to its end?"""
        return self.end_ns != 0

    @property
    def received_ns(self) -> int:
        """When the wait for the last rank was over: not before this rank's own flags were out."""
        return max(self.published_ns, *self.arrived_ns)

    def waited_ns(self, peer: int) -> int:
        """How long `peer` was waited for after this rank's own flags were out."""
        return max(0, self.arrived_ns[peer] - self.published_ns)


def read_timeline(heap: Heap, rank: int | None = None) -> list[Span]:
    """The last 32 rounds of a rank (default: this one), oldest first; also of a dead one.

    An operation that is under way, or was left by an error, is in it and not `finished`. Empty
    when that rank's kernels are not profiled. Raises InvalidArgument for a rank out of range.
    """
    header = mirrors(heap.group.size).Header.from_buffer_copy(heap.header(rank))
    spans = [_span(header.rank, header.ranks, line) for line in header.timelines if line.phase]
    return sorted(spans, key=lambda span: span.start_ns)


def _span(rank: int, ranks: int, line: ctypes.Structure) -> Span:
    """A stamp older than the start is what an earlier round left in its place."""

    def reached(stamp: int) -> int:
        return stamp if stamp >= line.start_ns else 0

    return Span(
        rank=rank,
        phase=PHASES[line.phase],
        epoch=line.epoch,
        ctas=line.ctas,
        start_ns=line.start_ns,
        sent_ns=reached(line.sent_ns),
        published_ns=reached(line.published_ns),
        end_ns=reached(line.end_ns),
        arrived_ns=tuple(reached(line.arrived_ns[peer]) for peer in range(ranks)),
    )
