"""Mirrors of the structs in device/header.cuh that the host reads or writes.

Their sizes and the offset of every field are compared with the numbers that every compiled entry
exports (runtime/layout.py). Types are not: a field that changes its type and keeps its place is to
be changed here by hand.
"""

from __future__ import annotations

import ctypes
from ctypes import c_uint8, c_uint32, c_uint64

from weft.shape import MAX_RANKS

ABI = 9
RING_RECORDS = 256
RING_TIMELINES = 64
EPOCH_MASK = (1 << 40) - 1


class ErrorRecord(ctypes.Structure):
    """What went wrong, as counters and ids only.

    peer: the rank that it is about; for an abort, the rank that asked.
    reported_by: rank + 1 of the peer that found it out, 0 if this rank did.
    """

    _fields_ = (
        ("code", c_uint32),
        ("rank", c_uint32),
        ("peer", c_uint32),
        ("phase", c_uint32),
        ("wanted", c_uint64),
        ("seen", c_uint64),
        ("elapsed_ns", c_uint64),
        ("token", c_uint32),
        ("slot", c_uint32),
        ("reported_by", c_uint32),
        ("reserved", c_uint32),
    )


class Mailbox(ctypes.Structure):
    """One page of host memory that kernels can write: errors out, notices of the host in."""

    _fields_ = (
        ("host_word", c_uint64),
        ("_pad0", c_uint8 * 120),
        ("refusals", c_uint32),
        ("_pad1", c_uint8 * 124),
        ("broken_code", c_uint32),
        ("_pad2", c_uint8 * 4),
        ("broken", ErrorRecord),
        ("_pad3", c_uint8 * 64),
        ("refused", ErrorRecord * 8),
        ("_pad4", c_uint8 * 64),
    )


class Record(ctypes.Structure):
    """One finished operation: times in nanoseconds of the device's clock."""

    _fields_ = (
        ("epoch", c_uint64),
        ("start_ns", c_uint64),
        ("end_ns", c_uint64),
        ("phase", c_uint32),
        ("tokens", c_uint32),
    )


class Timeline(ctypes.Structure):
    """When a profiled operation did what: times in nanoseconds of the device's clock."""

    _fields_ = (
        ("epoch", c_uint64),
        ("start_ns", c_uint64),
        ("sent_ns", c_uint64),
        ("published_ns", c_uint64),
        ("end_ns", c_uint64),
        ("phase", c_uint32),
        ("ctas", c_uint32),
        ("arrived_ns", c_uint64 * MAX_RANKS),
    )


class Fault(ctypes.Structure):
    """A planned disturbance, read only by kernels compiled with fault points."""

    _fields_ = (
        ("point", c_uint32),
        ("action", c_uint32),
        ("peer", c_uint32),
        ("reserved", c_uint32),
        ("epoch", c_uint64),
        ("argument", c_uint64),
    )


class Header(ctypes.Structure):
    """First bytes of every share."""

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
        ("living", c_uint32),
        ("_pad1", c_uint8 * 104),
        ("arrived", c_uint32),
        ("refusing", c_uint32),
        ("refusals", c_uint32),
        ("sending", c_uint32),
        ("reported", c_uint32),
        ("_pad2", c_uint8 * 108),
        ("notices", c_uint64 * MAX_RANKS),
        ("waiting_ns", c_uint64),
        ("_pad3", c_uint8 * 120),
        ("last_words", c_uint8 * 512),
        ("fault", Fault),
        ("_pad4", c_uint8 * 96),
        ("ring", Record * RING_RECORDS),
        ("timelines", Timeline * RING_TIMELINES),
    )


HEADER_BYTES = ctypes.sizeof(Header)
MAILBOX_BYTES = 4096
HOST_ASKS_TO_LEAVE = 1 << 63  # in Mailbox.host_word, above one bit for each rank that has ended
LAST_WORDS_BYTES = Header.last_words.size
PHASES = {1: "dispatch", 2: "combine", 3: "grouping", 4: "all-reduce"}
