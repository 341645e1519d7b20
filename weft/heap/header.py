# SPDX-License-Identifier: Apache-2.0
"""Mirrors of the structs in device/header.cuh that the host reads or writes.

Every generated source asserts their sizes and the offset of every field (runtime/layout.py), but
not the types: change the type of a field in both files.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_uint8, c_uint32, c_uint64
from typing import NamedTuple

from weft.group.waits import BUCKETS
from weft.shape import MAX_RANKS, NARROW_RANKS

ABI = 12
RING_RECORDS = 256
RING_TIMELINES = 64
EPOCH_MASK = (1 << 40) - 1
EXIT_REASON_BYTES = 512
HOST_BITS = 63  # per Mailbox.host_word: bit r % 63 of word r // 63 is set if rank r has ended
HOST_REQUESTS_LEAVE = 1 << HOST_BITS  # bit of the first word


class ErrorRecord(ctypes.Structure):
    """Error of a kernel, as numbers only.

    Attributes:
        peer: Rank that the error is about; for an abort, the rank that requested it.
        reported_by: Rank + 1 of the peer that detected the error, 0 if this rank did.
    """

    _fields_ = (
        ("code", c_uint32),
        ("rank", c_uint32),
        ("peer", c_uint32),
        ("phase", c_uint32),
        ("expected", c_uint64),
        ("observed", c_uint64),
        ("elapsed_ns", c_uint64),
        ("token", c_uint32),
        ("index", c_uint32),
        ("reported_by", c_uint32),
        ("reserved", c_uint32),
    )


class Record(ctypes.Structure):
    """Times of one finished operation in nanoseconds of the device's clock."""

    _fields_ = (
        ("epoch", c_uint64),
        ("start_ns", c_uint64),
        ("end_ns", c_uint64),
        ("phase", c_uint32),
        ("tokens", c_uint32),
    )


class WaitTimes(ctypes.Structure):
    """Durations of waits in nanoseconds, with a histogram of 1024 ns and its doubles."""

    _fields_ = (
        ("total_ns", c_uint64),
        ("max_ns", c_uint64),
        ("counts", c_uint64 * BUCKETS),
    )


class PeerWaits(ctypes.Structure):
    """Finished waits of a rank for one peer in one phase."""

    _fields_ = (("epoch", c_uint64), ("skew", WaitTimes), ("transfer", WaitTimes))


class CallRecord(ctypes.Structure):
    """Identity of a rank's latest call, packed by runtime/identity.py."""

    _fields_ = (
        ("hash", c_uint64),
        ("what", c_uint64),
        ("constants", c_uint64),
        ("reserved", c_uint64),
    )


class Fault(ctypes.Structure):
    """Injected fault, for tests. Only kernels compiled with fault points read it."""

    _fields_ = (
        ("point", c_uint32),
        ("action", c_uint32),
        ("peer", c_uint32),
        ("reserved", c_uint32),
        ("epoch", c_uint64),
        ("argument", c_uint64),
    )


class Site(ctypes.Structure):
    """Addresses of the shares and the mailbox, and this rank's number."""

    _fields_ = (
        ("base", c_uint64),
        ("stride", c_uint64),
        ("mailbox", c_uint64),
        ("rank", c_uint32),
        ("descriptor", c_uint32),
    )


class HeaderStructs(NamedTuple):
    """Structs whose sizes depend on the number of ranks.

    Attributes:
        Mailbox: Page of host memory for errors of kernels and notices of the host.
        Timeline: Times of one profiled operation, in nanoseconds of the device's clock.
        Header: First bytes of every share.
    """

    Mailbox: type[ctypes.Structure]
    Timeline: type[ctypes.Structure]
    Header: type[ctypes.Structure]


def header_structs(ranks: int) -> HeaderStructs:
    """Return the structs for `ranks` ranks: one layout for up to 32 ranks, another up to 72."""
    return _header_structs(layout_max_ranks(ranks))


@functools.cache
def _header_structs(max_ranks: int) -> HeaderStructs:
    words, host_words = rank_words(max_ranks), -(-max_ranks // HOST_BITS)

    class Mailbox(ctypes.Structure):
        _fields_ = (
            ("host_word", c_uint64 * host_words),
            ("_pad0", c_uint8 * (128 - 8 * host_words)),
            ("refusals", c_uint32),
            ("_pad1", c_uint8 * 124),
            ("broken_code", c_uint32),
            ("_pad2", c_uint8 * 4),
            ("broken", ErrorRecord),
            ("_pad3", c_uint8 * 64),
            ("refused", ErrorRecord * 8),
            ("_pad4", c_uint8 * 64),
        )

    class Timeline(ctypes.Structure):
        _fields_ = (
            ("epoch", c_uint64),
            ("start_ns", c_uint64),
            ("sent_ns", c_uint64),
            ("published_ns", c_uint64),
            ("end_ns", c_uint64),
            ("phase", c_uint32),
            ("ctas", c_uint32),
            ("arrived_ns", c_uint64 * max_ranks),
        )

    class Header(ctypes.Structure):
        _fields_ = (
            ("abi", c_uint32),
            ("rank", c_uint32),
            ("ranks", c_uint32),
            ("generation", c_uint32),
            ("share_bytes", c_uint64),
            ("first_epoch", c_uint64),
            ("deadline_ns", c_uint64),
            ("first_deadline_ns", c_uint64),
            ("_pad0", c_uint8 * 80),
            ("epoch", c_uint64),
            ("failed", c_uint32),
            ("rows", c_uint32),
            ("source_rows", c_uint32),
            ("living", c_uint32 * words),
            ("_pad1", c_uint8 * (108 - 4 * words)),
            ("arrived", c_uint32),
            ("refusing", c_uint32),
            ("refusals", c_uint32),
            ("sending", c_uint32),
            ("reported", c_uint32 * words),
            ("_pad2", c_uint8 * (112 - 4 * words)),
            ("notices", c_uint64 * max_ranks),
            ("_pad3", c_uint8 * (-8 * max_ranks % 128)),
            ("waiting_ns", c_uint64),
            ("looked", c_uint32),
            ("_pad4", c_uint8 * 116),
            ("call", CallRecord),
            ("_pad5", c_uint8 * 96),
            ("exit_reason", c_uint8 * EXIT_REASON_BYTES),
            ("fault", Fault),
            ("_pad6", c_uint8 * 96),
            ("ring", Record * RING_RECORDS),
            ("timelines", Timeline * RING_TIMELINES),
            ("waits", PeerWaits * max_ranks * 2),
        )

    return HeaderStructs(Mailbox, Timeline, Header)


def layout_max_ranks(ranks: int) -> int:
    """Return the rank capacity of the layout that `ranks` ranks use."""
    return NARROW_RANKS if ranks <= NARROW_RANKS else MAX_RANKS


def rank_words(ranks: int) -> int:
    """Return the number of 32-bit words of a set of ranks (RankSet)."""
    return -(-layout_max_ranks(ranks) // 32)


def header_bytes(ranks: int) -> int:
    """Return the size of a header in bytes."""
    return ctypes.sizeof(header_structs(ranks).Header)


def rank_set_words(ranks: int, count: int) -> tuple[int, ...]:
    """Split a mask of ranks, bit r for rank r, into `count` words of 32 bits (RankSet)."""
    return tuple(ranks >> 32 * i & 0xFFFFFFFF for i in range(count))


PHASES = {1: "dispatch", 2: "combine", 3: "grouping", 4: "all-reduce"}
