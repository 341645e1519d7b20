# SPDX-License-Identifier: Apache-2.0
"""From error records to exceptions: what the device saw, in words, with the remedy."""

from __future__ import annotations

from collections.abc import Callable

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
from weft.memory.header import EPOCH_MASK, PHASES, ErrorRecord
from weft.runtime.identity import SLOTS

BAD_EXPERT_ID, DUPLICATE_EXPERT, TOKEN_OVERFLOW = 1, 2, 3
PEER_TIMEOUT, GEOMETRY_MISMATCH, ABORTED, BAD_ROW_INDEX = 4, 5, 6, 7
OTHER_RESULT, PEER_DIED, PEER_LEFT = 9, 10, 11
GONE_RANK, GONE_UNMASKED = 13, 14
COMBINE, GROUPING, ALL_REDUCE = 2, 3, 4  # phases


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def refusal(record: ErrorRecord, count: int, *, drops_repeats: bool = False) -> UsageError:
    """The error for input that was dropped or reported without harm; `count` reports are new.

    drops_repeats: an id that is twice in a row was sent once.
    """
    more = f" ({count} reports since the last check)" if count > 1 else ""
    where = f"rank {record.rank}: topk_ids[{record.token}, {record.slot}]"
    if record.code == BAD_EXPERT_ID:
        return BadExpertId(
            f"{where} is {_signed(record.seen)}{_finder(record)}; expert ids are "
            f"0..{record.wanted - 1}, or -1 for none. The id was dropped, all others were "
            f"sent{more}. Fix the router or mask the id with -1."
        )
    if record.code == DUPLICATE_EXPERT:
        kept = "Both were delivered"
        if drops_repeats:
            kept = "It was dropped, its first place in the row was sent"
        return BadExpertId(
            f"{where} repeats expert {record.seen} of the same row; a row names an expert once. "
            f"{kept}{more}. Fix the router's top-k."
        )
    if record.code == GONE_RANK:
        return BadExpertId(
            f"{where} is {record.seen}, an expert of rank {record.peer}, which is gone: its "
            f"experts' ids are dropped from now on, and this is said once{more}. Give them "
            "replicas on other ranks, or mask them with -1."
        )
    if record.code == BAD_ROW_INDEX:
        return InvalidArgument(
            f"rank {record.rank}: index[{record.token}, {record.slot}] of a MoEFinalize is "
            f"{_signed(record.seen)}; its rows are 0..{record.wanted - 1}, or -1 for none. The "
            f"entry was dropped{more}. Fix the code that makes the index."
        )
    if record.phase == GROUPING:
        return TokenOverflow(
            f"rank {record.rank}: grouping needs {record.seen} rows (masked: for local expert "
            f"{record.slot}; contiguous: padding included), the buffer has "
            f"max_rows={record.wanted}. Entries beyond it were dropped{more}. "
            "Build ExpertGroups with a larger max_rows."
        )
    return TokenOverflow(
        f"rank {record.rank}: num_tokens on the device is {_signed(record.seen)}"
        f"{_finder(record)}; the tensors of this call hold 0..{record.wanted} tokens. The count "
        f"was clamped{more}."
    )


def _finder(record: ErrorRecord) -> str:
    """By which peer this rank knows, if it has not seen it itself."""
    return f" (rank {record.reported_by - 1} found it out)" if record.reported_by else ""


def _go_on(machines: int) -> str:
    """What a rank can do after an error that ended the group."""
    return "call group.recover() or make a new group" if machines == 1 else "make a new group"


def _late(option: str, machines: int) -> str:
    """Why a rank was waited for in vain, and what helps."""
    return (
        "It is dead, stopped, slower than the deadline, or did not make this call; raise "
        f"{option}= if it was only slow, then {_go_on(machines)}."
    )


# The call that a rank's header describes, in words; "" where it is not the one with this hash.
# Hash None: whatever call the header describes.
CallText = Callable[[int, int | None], str]
_SAME_CALLS = "Make the same sequence of calls, with the same arguments, on every rank."


def _mismatch(who: str, peer: int, theirs: str, mine: str) -> GeometryMismatch:
    """Two ranks whose calls differ; the text of a call that is not known any more is empty."""
    calls = f"rank {peer} called with {theirs}; this rank with {mine}"
    if not theirs or not mine:
        calls = f"rank {peer} made another call than this rank"
        calls += f", which called with {mine}" if mine else ""
    return GeometryMismatch(f"{who}: {calls}. {_SAME_CALLS}")


def _seen_by_peer(
    record: ErrorRecord, who: str, option: str, machines: int, call_of: CallText
) -> GroupError:
    """What a peer found out that this rank has not seen: the peer has left the group for it."""
    reporter, own = f"rank {record.reported_by - 1}", record.peer == record.rank
    culprit = f"this rank, {record.peer}," if own else f"rank {record.peer}"
    if record.code == PEER_TIMEOUT and record.peer == record.reported_by - 1:
        return PeerTimeout(
            f"{who}: {reporter} gave up, waiting for its own part of this call, and left the "
            f"group. Its own error says more; {_go_on(machines)}."
        )
    if record.code == PEER_TIMEOUT:
        return PeerTimeout(
            f"{who}: {reporter} waited in vain for {culprit} and left the group. "
            f"{_late(option, machines)}"
        )
    theirs, found = call_of(record.peer, None), call_of(record.reported_by - 1, None)
    calls = ""
    if theirs and found and theirs != found:
        calls = f": {culprit} called with {theirs}; {reporter} with {found}"
    return GeometryMismatch(
        f"{who}: {reporter} found that {culprit} made another call, or combined another dispatch, "
        f"and left the group{calls}. {_SAME_CALLS}"
    )


def _gone(
    record: ErrorRecord,
    who: str,
    pid_of: Callable[[int], int | None],
    words_of: Callable[[int], str],
    machines: int,
) -> GroupError:
    """A peer that will make no more calls."""
    if record.code == PEER_LEFT:
        return PeerLeft(
            f"{who}: rank {record.peer} {words_of(record.peer) or 'left'} before it made its part "
            f"of epoch {record.wanted}{_finder(record)}. Every rank must make the same calls; fix "
            "that rank, then make a new group."
        )
    pid = pid_of(record.peer)
    process = "the process" if pid is None else f"process {pid}"
    fix = f"{_go_on(machines)}."
    if machines > 1:
        fix = (
            f"a group of {machines} machines does not recover: end the job on all of them, start "
            "it anew and make new process groups and a new group."
        )
    return PeerDied(
        f"{who}: rank {record.peer} died: {process} ended before it made its part of epoch "
        f"{record.wanted}{_finder(record)}. Its own output may say why; {fix}"
    )


def _reduce_timeout(record: ErrorRecord, who: str, option: str, machines: int) -> PeerTimeout:
    """A slot of an all-reduce says more than an epoch."""
    return PeerTimeout(
        f"{who}, epoch {record.wanted}: the {SLOTS.get(record.seen, 'slot')} of token "
        f"{record.token} (16-byte word {record.slot}) did not come from rank {record.peer} "
        f"within {record.elapsed_ns / 1e9:.2f} s. {_late(option, machines)}"
    )


def breakage(
    record: ErrorRecord,
    pid_of: Callable[[int], int | None],
    words_of: Callable[[int], str],
    call_of: CallText,
    *,
    first_epoch: int = 0,
    machines: int = 1,
) -> GroupError:
    """The error that ended the group, which has ranks on `machines` machines.

    first_epoch: the epoch before the first round, whose waits have a deadline of their own.
    pid_of, words_of: the process id of a rank, if it is known, and why a rank said that it left.
    call_of: the call of a rank in words, see CallText.
    """
    phase = PHASES.get(record.phase, f"phase {record.phase}")
    who = f"rank {record.rank}, {phase}"
    # As is_overdue in device/wait.cuh has it.
    first = (record.wanted - first_epoch) & EPOCH_MASK <= 1
    option = "first_timeout" if first else "timeout"
    if record.code in (PEER_DIED, PEER_LEFT):
        return _gone(record, who, pid_of, words_of, machines)
    if record.code == GONE_UNMASKED:
        return PeerDied(
            f"{who}: rank {record.peer} is gone, and this all-reduce sums over all ranks. Build it "
            "with missing='drop' to go on with the living, or make a new group of them."
        )
    if record.reported_by and record.code != ABORTED:
        return _seen_by_peer(record, who, option, machines, call_of)
    if record.code == GEOMETRY_MISMATCH:
        theirs, mine = call_of(record.peer, record.seen), call_of(record.rank, record.wanted)
        return _mismatch(who, record.peer, theirs, mine)
    if record.phase == ALL_REDUCE and record.code == PEER_TIMEOUT:
        return _reduce_timeout(record, who, option, machines)
    if record.code == PEER_TIMEOUT:
        return PeerTimeout(
            f"{who}: rank {record.peer} did not publish epoch {record.wanted} within "
            f"{record.elapsed_ns / 1e9:.2f} s (its flag shows epoch {record.seen}). "
            f"{_late(option, machines)}"
        )
    if record.code == OTHER_RESULT:
        return GeometryMismatch(
            f"{who}: rank {record.peer} combined result {record.seen} of those alive, this rank "
            f"result {record.wanted}, the oldest being 1. Combine the results in the same order on "
            "every rank."
        )
    asker = "this rank" if record.peer == record.rank else f"rank {record.peer}"
    return Aborted(
        f"{who}: left its wait for epoch {record.wanted} because {asker} called abort() or "
        "was interrupted; make a new group."
    )
