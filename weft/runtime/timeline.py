# SPDX-License-Identifier: Apache-2.0
"""Timelines of profiled kernels: the times of sends, of waits for each peer and of completion.

Kernels compiled with `WEFT_PROFILE=1` record the last 32 rounds in the header
(device/timeline.cuh). Reading does not synchronise; synchronise the device first.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.heap.header import PHASES, header_structs

if TYPE_CHECKING:
    from weft.heap import Heap

DEFINE = "WEFT_PROFILE=1"


@dataclass(frozen=True, slots=True)
class Span:
    """One operation of one rank. Times are nanoseconds of that rank's clock, 0 if not reached.

    Attributes:
        rank: Rank that ran the operation.
        phase: Name of the operation.
        epoch: Epoch of the round.
        ctas: Number of CTAs.
        start_ns: Start of the first CTA.
        sent_ns: Time at which all rows were sent, before the first flag was stored.
        published_ns: Time at which all flags were stored.
        end_ns: End of the last CTA.
        arrived_ns: Time at which the flag of each rank was observed. CPU ranks poll the flags in
            order, so a flag may have arrived earlier.
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
        """Whether the operation has finished."""
        return self.end_ns != 0

    @property
    def received_ns(self) -> int:
        """Time at which the wait for the last rank ended; at least `published_ns`."""
        return max(self.published_ns, *self.arrived_ns)

    def wait_time_ns(self, peer: int) -> int:
        """Return the time that this rank waited for `peer` after publishing its own flags."""
        return max(0, self.arrived_ns[peer] - self.published_ns)


def read_timeline(heap: Heap, rank: int | None = None) -> list[Span]:
    """Return the spans of the last 32 rounds of a rank, oldest first.

    A running or aborted operation is included with `finished` False. The list is empty if the
    kernels of that rank are not profiled.

    Args:
        heap: Heap of the operator.
        rank: Rank to read, alive or dead. Default: this rank.

    Raises:
        InvalidArgument: the rank is out of range.
    """
    header = header_structs(heap.group.size).Header.from_buffer_copy(heap.header(rank))
    spans = [
        _build_span(header.rank, header.ranks, line) for line in header.timelines if line.phase
    ]
    return sorted(spans, key=lambda span: span.start_ns)


def _build_span(rank: int, ranks: int, line: ctypes.Structure) -> Span:
    """Convert a timeline of a header to a span."""

    def read_stamp(stamp: int) -> int:
        return stamp if stamp >= line.start_ns else 0  # older stamps are of an earlier round

    return Span(
        rank=rank,
        phase=PHASES[line.phase],
        epoch=line.epoch,
        ctas=line.ctas,
        start_ns=line.start_ns,
        sent_ns=read_stamp(line.sent_ns),
        published_ns=read_stamp(line.published_ns),
        end_ns=read_stamp(line.end_ns),
        arrived_ns=tuple(read_stamp(line.arrived_ns[peer]) for peer in range(ranks)),
    )
