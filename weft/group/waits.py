# SPDX-License-Identifier: Apache-2.0
"""Times that a rank has waited for its peers: public results, and the recorder of control calls."""

from __future__ import annotations

from dataclasses import dataclass, field

BUCKETS = 22  # of a histogram; wait_buckets of the kernels
BOUNDS_NS = tuple(1024 << i for i in range(BUCKETS - 1))  # upper bounds; the last bucket has none
CONTROL = "control"  # phase of a wait in a control call


@dataclass(frozen=True, slots=True)
class WaitTimes:
    """Durations of the waits that were counted; docs/user/observability.md says which are.

    Attributes:
        total_seconds: Sum.
        max_seconds: Largest one.
        counts: Histogram. Bucket i has the waits below `2**i * 1.024` us that are in no earlier
            bucket; the last of 22 buckets has all longer waits.
    """

    total_seconds: float = 0.0
    max_seconds: float = 0.0
    counts: tuple[int, ...] = (0,) * BUCKETS

    @property
    def count(self) -> int:
        """Number of waits."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class PeerWaits:
    """Finished waits of this rank for one peer in one phase.

    Attributes:
        peer: Rank in the group.
        phase: "dispatch", "combine" or "all-reduce" of an operator; "control" of a group.
        round: Number of the round of the last counted wait, starting at 1 and again after a
            recovery; of a group, of the control call.
        skew: Waits until the peer began.
        transfer: Waits for rows after the peer had begun.
    """

    peer: int
    phase: str
    round: int
    skew: WaitTimes
    transfer: WaitTimes

    @property
    def seconds(self) -> float:
        """Sum of all waits for the peer in this phase."""
        return self.skew.total_seconds + self.transfer.total_seconds


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Mean times of a phase over the rounds that `history` still has.

    Attributes:
        phase: "dispatch", "combine" or "all-reduce".
        rounds: Number of rounds that this rank has finished since the operator was created.
        seconds: Duration from the start of the kernel to its end.
        between_seconds: Time from the end of this operator's previous kernel to the start of this
            one, in which the rank computes, or its host is late.
    """

    phase: str
    rounds: int
    seconds: float
    between_seconds: float


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of one rank for its peers since the operator was created.

    Attributes:
        rank: This rank.
        phases: Times of each phase; empty for control calls.
        peers: Waits by peer and phase; only those with at least one wait.
    """

    rank: int
    phases: tuple[PhaseTimes, ...]
    peers: tuple[PeerWaits, ...]


@dataclass(slots=True)
class _PeerRecord:
    total: float = 0.0
    max: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    call: int = 0


class ControlWaits:
    """Waits of a rank for messages of its peers. One thread records, and any thread may read."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._records: dict[int, _PeerRecord] = {}

    def record(self, peer: int, call: int, seconds: float) -> None:
        """Record that a peer's message of a control call arrived after `seconds`."""
        record = self._records.setdefault(peer, _PeerRecord())
        bucket = (int(seconds * 1e9) >> 10).bit_length()
        record.counts[min(bucket, BUCKETS - 1)] += 1
        record.total += seconds
        record.max = max(record.max, seconds)
        record.call = call

    def read(self) -> Waits:
        """Return the waits so far."""
        peers = tuple(
            PeerWaits(
                peer,
                CONTROL,
                record.call,
                WaitTimes(record.total, record.max, tuple(record.counts)),
                WaitTimes(),
            )
            for peer, record in sorted(self._records.copy().items())
        )
        return Waits(self._rank, (), peers)
