# SPDX-License-Identifier: Apache-2.0
"""Conversion of error records, which kernels write, to exceptions."""

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


def build_input_error(
    record: ErrorRecord, count: int, *, drops_repeats: bool = False
) -> UsageError:
    """Build the exception for invalid input that the device reported.

    Args:
        record: Last report.
        count: Number of new reports.
        drops_repeats: Whether dispatch drops a repeated id of a row.
    """
    more = f" ({count} reports since the last check)" if count > 1 else ""
    entry = f"rank {record.rank}: topk_ids[{record.token}, {record.index}]"
    if record.code == BAD_EXPERT_ID:
        return BadExpertId(
            f"{entry} is {_to_signed(record.observed)}{_format_reporter(record)}; expert ids are "
            f"0..{record.expected - 1}, or -1 for none. The id was dropped, all others were "
            f"sent{more}. Fix the router or mask the id with -1."
        )
    if record.code == DUPLICATE_EXPERT:
        kept = "Both were delivered"
        if drops_repeats:
            kept = "It was dropped; its first occurrence in the row was sent"
        return BadExpertId(
            f"{entry} repeats expert {record.observed} of the same row; a row names an expert "
            f"once. {kept}{more}. Fix the router's top-k."
        )
    if record.code == GONE_RANK:
        return BadExpertId(
            f"{entry} is {record.observed}, an expert of rank {record.peer}, which has exited: ids "
            f"of its experts are dropped from now on, which is reported once{more}. Place replicas "
            "of the experts on other ranks, or mask the ids with -1."
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
        f"{_format_reporter(record)}; the tensors of this call hold 0..{record.expected} tokens. "
        f"The count was clamped{more}."
    )


def _format_phase(record: ErrorRecord) -> str:
    return PHASES.get(record.phase, f"phase {record.phase}")


def _format_reporter(record: ErrorRecord) -> str:
    """Return a note about the peer that reported the error, or "" if this rank detected it."""
    return f" (reported by rank {record.reported_by - 1})" if record.reported_by else ""


def _recovery_advice(machines: int) -> str:
    """Return the fix for an error that broke the group."""
    return "call group.recover() or create a new group" if machines == 1 else "create a new group"


def _timeout_advice(option: str, machines: int) -> str:
    """Return possible causes of a timeout and the fix."""
    return (
        "It is dead, stopped, slower than the timeout, or did not make this call; increase "
        f"{option}= if it was only slow, then {_recovery_advice(machines)}."
    )


# (rank, hash) -> text of the rank's latest call; "" if its hash differs. None matches any hash.
CallText = Callable[[int, int | None], str]
_SAME_CALLS = "Make the same sequence of calls, with the same arguments, on every rank."


def _call_mismatch(prefix: str, peer: int, peer_call: str, own_call: str) -> GeometryMismatch:
    """Build the exception for ranks whose calls differ; an unknown call has an empty text."""
    calls = f"rank {peer} called with {peer_call}; this rank with {own_call}"
    if not peer_call or not own_call:
        calls = f"rank {peer} made a different call from this rank"
        calls += f", which called with {own_call}" if own_call else ""
    return GeometryMismatch(f"{prefix}: {calls}. {_SAME_CALLS}")


def _peer_report(
    record: ErrorRecord,
    prefix: str,
    option: str,
    machines: int,
    get_call: CallText,
    exit_reason: str,
) -> GroupError:
    """Build the exception for an error that made a peer leave the group."""
    reporter, is_own = f"rank {record.reported_by - 1}", record.peer == record.rank
    late_rank = f"this rank, {record.peer}," if is_own else f"rank {record.peer}"
    if record.code == PEER_TIMEOUT and record.peer == record.reported_by - 1:
        return PeerTimeout(
            f"{prefix}: {reporter} timed out in its own part of this call and left the group. See "
            f"its own error; {_recovery_advice(machines)}."
        )
    if record.code == PEER_TIMEOUT:
        return PeerTimeout(
            f"{prefix}: {reporter} timed out waiting for {late_rank} and left the group. "
            f"{_timeout_advice(option, machines)}"
        )
    if exit_reason:
        return GeometryMismatch(f"{prefix}: {reporter} left the group: {exit_reason}")
    rank_call, reporter_call = get_call(record.peer, None), get_call(record.reported_by - 1, None)
    calls = ""
    if rank_call and reporter_call and rank_call != reporter_call:
        calls = f": {late_rank} called with {rank_call}; {reporter} with {reporter_call}"
    return GeometryMismatch(
        f"{prefix}: {reporter} found that {late_rank} made another call, or combined another "
        f"dispatch, and left the group{calls}. {_SAME_CALLS}"
    )


def describe_order_mismatch(
    record: ErrorRecord, ranks: Sequence[int], own_name: str, peer_names: Sequence[str]
) -> str:
    """Describe a timeout on a peer that waits in calls of other operators.

    Args:
        record: Record of the timeout, with ranks numbered within the host.
        ranks: Ranks of this host in the group.
        own_name: Operator that timed out.
        peer_names: Operators in whose calls the peer waits.
    """
    reporter = record.reported_by - 1 if record.reported_by else record.rank
    own, peer, reporter = ranks[record.rank], ranks[record.peer], ranks[reporter]
    operators = " and of ".join(peer_names)
    return (
        f"rank {own}, {_format_phase(record)}: rank {peer} is in a call of {operators}, while rank "
        f"{reporter} waits for it in a call of {own_name} (the numbers count the heaps of the "
        f"group). {_SAME_CALLS}"
    )


def _peer_exit(
    record: ErrorRecord,
    prefix: str,
    get_pid: Callable[[int], int | None],
    get_exit_reason: Callable[[int], str],
    machines: int,
) -> GroupError:
    """Build the exception for a peer that has left or died."""
    if record.code == PEER_LEFT:
        return PeerLeft(
            f"{prefix}: rank {record.peer} {get_exit_reason(record.peer) or 'left'} before it made "
            f"its part of epoch {record.expected}{_format_reporter(record)}. Every rank must make "
            "the same calls; fix that rank, then create a new group."
        )
    pid = get_pid(record.peer)
    process = "the process" if pid is None else f"process {pid}"
    fix = f"{_recovery_advice(machines)}."
    if machines > 1:
        fix = (
            f"a group of {machines} machines does not recover: restart the job on all of them, "
            "with new process groups and a new group."
        )
    return PeerDied(
        f"{prefix}: rank {record.peer} died: {process} ended before it made its part of epoch "
        f"{record.expected}{_format_reporter(record)}. Its own output may show the cause; {fix}"
    )


def _allreduce_timeout(record: ErrorRecord, prefix: str, option: str, machines: int) -> PeerTimeout:
    """Build the exception for a timeout of an all-reduce, which names the missing slot."""
    return PeerTimeout(
        f"{prefix}, epoch {record.expected}: the {SLOTS.get(record.observed, 'slot')} of token "
        f"{record.token} (16-byte word {record.index}) did not arrive from rank {record.peer} "
        f"within {record.elapsed_ns / 1e9:.2f} s. {_timeout_advice(option, machines)}"
    )


def build_group_error(
    record: ErrorRecord,
    get_pid: Callable[[int], int | None],
    get_exit_reason: Callable[[int], str],
    get_call: CallText,
    *,
    first_epoch: int = 0,
    machines: int = 1,
) -> GroupError:
    """Build the exception for the error that broke the group.

    Args:
        record: Error record of the device.
        get_pid: Returns the process id of a rank, or None if unknown.
        get_exit_reason: Returns the reason with which a rank left, or "".
        get_call: Returns the text of a rank's latest call, see CallText.
        first_epoch: Epoch before the first round, whose waits have the timeout `first_timeout`.
        machines: Number of machines of the group.
    """
    prefix = f"rank {record.rank}, {_format_phase(record)}"
    # Same rule as is_overdue in device/wait.cuh.
    is_first = (record.expected - first_epoch) & EPOCH_MASK <= 1
    option = "first_timeout" if is_first else "timeout"
    if record.code in (PEER_DIED, PEER_LEFT):
        return _peer_exit(record, prefix, get_pid, get_exit_reason, machines)
    if record.code == GONE_UNMASKED:
        return PeerDied(
            f"{prefix}: rank {record.peer} has exited, and this all-reduce sums over all ranks. "
            "Build it with missing='drop' to continue with the living ranks, or create a new group "
            "of them."
        )
    if record.reported_by and record.code != ABORTED:
        exit_reason = get_exit_reason(record.reported_by - 1)
        return _peer_report(record, prefix, option, machines, get_call, exit_reason)
    if record.code == GEOMETRY_MISMATCH:
        peer_call = get_call(record.peer, record.observed)
        own_call = get_call(record.rank, record.expected)
        return _call_mismatch(prefix, record.peer, peer_call, own_call)
    if record.phase == ALL_REDUCE and record.code == PEER_TIMEOUT:
        return _allreduce_timeout(record, prefix, option, machines)
    if record.code == PEER_TIMEOUT:
        return PeerTimeout(
            f"{prefix}: rank {record.peer} did not publish epoch {record.expected} within "
            f"{record.elapsed_ns / 1e9:.2f} s (its flag shows epoch {record.observed}). "
            f"{_timeout_advice(option, machines)}"
        )
    if record.code == OTHER_RESULT:
        return GeometryMismatch(
            f"{prefix}: rank {record.peer} combined result {record.observed} of those alive, this "
            f"rank result {record.expected}, where 1 is the oldest. Combine the results in the "
            "same order on every rank."
        )
    aborter = "this rank" if record.peer == record.rank else f"rank {record.peer}"
    return Aborted(
        f"{prefix}: left its wait for epoch {record.expected} because {aborter} called abort() or "
        "was interrupted; create a new group."
    )
