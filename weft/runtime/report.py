# SPDX-License-Identifier: Apache-2.0
"""Conversion of the device's error records to exceptions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.errors import (
    Aborted,
    BadExpertId,
    GeometryMismatch,
    GroupError,
    InvalidArgument,
    PeerDied,
    PeerLeft,
    PeerTimeout,
    TokenOverflow,
    UsageError,
)
from weft.heap.header import EPOCH_MASK, PHASES, ErrorRecord
from weft.runtime.identity import SLOTS

BAD_EXPERT_ID, DUPLICATE_EXPERT, TOKEN_OVERFLOW = 1, 2, 3
PEER_TIMEOUT, GEOMETRY_MISMATCH, ABORTED, BAD_ROW_INDEX = 4, 5, 6, 7
OTHER_RESULT, PEER_DIED, PEER_LEFT = 9, 10, 11
GONE_RANK, GONE_UNMASKED = 13, 14
COMBINE, GROUPING, ALL_REDUCE = 2, 3, 4  # phases


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def input_error(record: ErrorRecord, count: int, *, drops_repeats: bool = False) -> UsageError:
    """Return the error for input that the device has dropped or reported.

    Args:
        record: Last report.
        count: Number of new reports.
        drops_repeats: Whether dispatch drops a repeated id of a row.
    """
    more = f" ({count} reports since the last check)" if count > 1 else ""
    entry = f"rank {record.rank}: topk_ids[{record.token}, {record.index}]"
    if record.code == BAD_EXPERT_ID:
        return BadExpertId(
            f"{entry} is {_to_signed(record.observed)}{_reporter(record)}; expert ids are "
            f"0..{record.expected - 1}, or -1 for none. The id was dropped, all others were "
            f"sent{more}. Fix the router or mask the id with -1."
        )
    if record.code == DUPLICATE_EXPERT:
        kept = "Both were delivered"
        if drops_repeats:
            kept = "It was dropped, its first place in the row was sent"
        return BadExpertId(
            f"{entry} repeats expert {record.observed} of the same row; a row names an expert "
            f"once. {kept}{more}. Fix the router's top-k."
        )
    if record.code == GONE_RANK:
        return BadExpertId(
            f"{entry} is {record.observed}, an expert of rank {record.peer}, which is gone: ids of "
            f"its experts are dropped from now on, which is reported once{more}. Place replicas of "
            "the experts on other ranks, or mask the ids with -1."
        )
    if record.code == BAD_ROW_INDEX:
        return InvalidArgument(
            f"rank {record.rank}: index[{record.token}, {record.index}] of a MoEFinalize is "
            f"{_to_signed(record.observed)}; its rows are 0..{record.expected - 1}, or -1 for "
            f"none. The entry was dropped{more}. Fix the code that computes the index."
        )
    if record.phase == GROUPING:
        return TokenOverflow(
            f"rank {record.rank}: grouping needs {record.observed} rows (masked: for local expert "
            f"{record.index}; contiguous: padding included), the buffer has "
            f"max_rows={record.expected}. Entries beyond it were dropped{more}. "
            "Build ExpertGroups with a larger max_rows."
        )
    return TokenOverflow(
        f"rank {record.rank}: num_tokens on the device is {_to_signed(record.observed)}"
        f"{_reporter(record)}; the tensors of this call hold 0..{record.expected} tokens. The "
        f"count was clamped{more}."
    )


def _phase(record: ErrorRecord) -> str:
    return PHASES.get(record.phase, f"phase {record.phase}")


def _reporter(record: ErrorRecord) -> str:
    """Return which peer reported the error, or "" if this rank detected it."""
    return f" (rank {record.reported_by - 1} found it out)" if record.reported_by else ""


def _remedy(machines: int) -> str:
    """Return the fix for an error that broke the group."""
    return "call group.recover() or make a new group" if machines == 1 else "make a new group"


def _late_peer(option: str, machines: int) -> str:
    """Return possible causes of a timeout and the fix."""
    return (
        "It is dead, stopped, slower than the deadline, or did not make this call; raise "
        f"{option}= if it was only slow, then {_remedy(machines)}."
    )


# (rank, hash) -> text of the rank's latest call; "" if its hash differs. None matches any hash.
CallText = Callable[[int, int | None], str]
_SAME_CALLS = "Make the same sequence of calls, with the same arguments, on every rank."


def _mismatch(who: str, peer: int, peer_call: str, own_call: str) -> GeometryMismatch:
    """Return the error of two ranks whose calls differ; an unknown call has an empty text."""
    calls = f"rank {peer} called with {peer_call}; this rank with {own_call}"
    if not peer_call or not own_call:
        calls = f"rank {peer} made another call than this rank"
        calls += f", which called with {own_call}" if own_call else ""
    return GeometryMismatch(f"{who}: {calls}. {_SAME_CALLS}")


def _reported_by_peer(
    record: ErrorRecord, who: str, option: str, machines: int, call_of: CallText, words: str
) -> GroupError:
    """Return the error that a peer detected and left the group for."""
    reporter, own = f"rank {record.reported_by - 1}", record.peer == record.rank
    culprit = f"this rank, {record.peer}," if own else f"rank {record.peer}"
    if record.code == PEER_TIMEOUT and record.peer == record.reported_by - 1:
        return PeerTimeout(
            f"{who}: {reporter} gave up, waiting for its own part of this call, and left the "
            f"group. See its own error; {_remedy(machines)}."
        )
    if record.code == PEER_TIMEOUT:
        return PeerTimeout(
            f"{who}: {reporter} waited in vain for {culprit} and left the group. "
            f"{_late_peer(option, machines)}"
        )
    if words:
        return GeometryMismatch(f"{who}: {reporter} left the group: {words}")
    culprit_call, reporter_call = call_of(record.peer, None), call_of(record.reported_by - 1, None)
    calls = ""
    if culprit_call and reporter_call and culprit_call != reporter_call:
        calls = f": {culprit} called with {culprit_call}; {reporter} with {reporter_call}"
    return GeometryMismatch(
        f"{who}: {reporter} found that {culprit} made another call, or combined another dispatch, "
        f"and left the group{calls}. {_SAME_CALLS}"
    )


def order_mismatch(
    record: ErrorRecord, ranks: Sequence[int], own_name: str, peer_names: Sequence[str]
) -> str:
    """Return the text of a timeout on a peer that waits in calls of other operators.

    Args:
        record: Record of the timeout, with ranks numbered within the host.
        ranks: Ranks of this host in the group.
        own_name: Operator that timed out.
        peer_names: Operators in whose calls the peer waits.
    """
    reporter = record.reported_by - 1 if record.reported_by else record.rank
    own, peer, reporter = ranks[record.rank], ranks[record.peer], ranks[reporter]
    theirs = " and of ".join(peer_names)
    return (
        f"rank {own}, {_phase(record)}: rank {peer} is in a call of {theirs}, while rank "
        f"{reporter} waits for it in a call of {own_name} (the numbers count the heaps of the "
        f"group). {_SAME_CALLS}"
    )


def _peer_gone(
    record: ErrorRecord,
    who: str,
    pid_of: Callable[[int], int | None],
    words_of: Callable[[int], str],
    machines: int,
) -> GroupError:
    """Return the error of a peer that has left or died."""
    if record.code == PEER_LEFT:
        return PeerLeft(
            f"{who}: rank {record.peer} {words_of(record.peer) or 'left'} before it made its part "
            f"of epoch {record.expected}{_reporter(record)}. Every rank must make the same calls; "
            "fix that rank, then make a new group."
        )
    pid = pid_of(record.peer)
    process = "the process" if pid is None else f"process {pid}"
    fix = f"{_remedy(machines)}."
    if machines > 1:
        fix = (
            f"a group of {machines} machines does not recover: restart the job on all of them, "
            "with new process groups and a new group."
        )
    return PeerDied(
        f"{who}: rank {record.peer} died: {process} ended before it made its part of epoch "
        f"{record.expected}{_reporter(record)}. Its own output may show the cause; {fix}"
    )


def _reduce_timeout(record: ErrorRecord, who: str, option: str, machines: int) -> PeerTimeout:
    """Return the timeout of an all-reduce, with the slot that did not arrive."""
    return PeerTimeout(
        f"{who}, epoch {record.expected}: the {SLOTS.get(record.observed, 'slot')} of token "
        f"{record.token} (16-byte word {record.index}) did not come from rank {record.peer} "
        f"within {record.elapsed_ns / 1e9:.2f} s. {_late_peer(option, machines)}"
    )


def group_error(
    record: ErrorRecord,
    pid_of: Callable[[int], int | None],
    words_of: Callable[[int], str],
    call_of: CallText,
    *,
    first_epoch: int = 0,
    machines: int = 1,
) -> GroupError:
    """Return the error that broke the group.

    Args:
        record: Error record of the device.
        pid_of: Returns the process id of a rank, or None if unknown.
        words_of: Returns the reason that a rank gave for leaving, or "".
        call_of: Returns the text of a rank's call, see CallText.
        first_epoch: Epoch before the first round, whose waits have the deadline `first_timeout`.
        machines: Number of machines of the group.
    """
    who = f"rank {record.rank}, {_phase(record)}"
    # Same rule as is_overdue in device/wait.cuh.
    first = (record.expected - first_epoch) & EPOCH_MASK <= 1
    option = "first_timeout" if first else "timeout"
    if record.code in (PEER_DIED, PEER_LEFT):
        return _peer_gone(record, who, pid_of, words_of, machines)
    if record.code == GONE_UNMASKED:
        return PeerDied(
            f"{who}: rank {record.peer} is gone, and this all-reduce sums over all ranks. Build it "
            "with missing='drop' to go on with the living, or make a new group of them."
        )
    if record.reported_by and record.code != ABORTED:
        words = words_of(record.reported_by - 1)
        return _reported_by_peer(record, who, option, machines, call_of, words)
    if record.code == GEOMETRY_MISMATCH:
        peer_call = call_of(record.peer, record.observed)
        own_call = call_of(record.rank, record.expected)
        return _mismatch(who, record.peer, peer_call, own_call)
    if record.phase == ALL_REDUCE and record.code == PEER_TIMEOUT:
        return _reduce_timeout(record, who, option, machines)
    if record.code == PEER_TIMEOUT:
        return PeerTimeout(
            f"{who}: rank {record.peer} did not publish epoch {record.expected} within "
            f"{record.elapsed_ns / 1e9:.2f} s (its flag shows epoch {record.observed}). "
            f"{_late_peer(option, machines)}"
        )
    if record.code == OTHER_RESULT:
        return GeometryMismatch(
            f"{who}: rank {record.peer} combined result {record.observed} of those alive, this "
            f"rank result {record.expected}, the oldest being 1. Combine the results in the same "
            "order on every rank."
        )
    asker = "this rank" if record.peer == record.rank else f"rank {record.peer}"
    return Aborted(
        f"{who}: left its wait for epoch {record.expected} because {asker} called abort() or "
        "was interrupted; make a new group."
    )
