# SPDX-License-Identifier: Apache-2.0
"""What else a group of several hosts refuses, and what it gives back."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from tests.hosts.spanning import on_hosts, play
from tests.rounds import Round
from weft.compat.deep_ep import Buffer
from weft.compat.ranks import lease_group
from weft.errors import (
    CreationFailed,
    GroupError,
    InvalidArgument,
    OutOfOrder,
    RailFailed,
    RendezvousFailed,
)
from weft.reference import identity_experts


def refused(group: weft.Group) -> None:
    words = r"takes ranks of one host, and these are on 2: pass group\.local"
    with pytest.raises(InvalidArgument, match=f"an all-reduce {words}"):
        weft.AllReduce(group, max_tokens=4, hidden=64)
    with pytest.raises(InvalidArgument, match=f"Buffer {words}"):
        Buffer(group, low_latency_mode=True)
    with pytest.raises(InvalidArgument, match=f"this workspace {words}"):
        lease_group(group.rank, group.size, group)
    with weft.AllReduce(group.local, max_tokens=4, hidden=64):
        pass
    with pytest.raises(InvalidArgument, match="no rail"):
        _ = group.local.rail
    words = "a group of 2 machines cannot recover, nor can the local group of one of its hosts"
    meeting = group.local.open_meeting()
    for call in (group.recover, group.local.recover, lambda: group.local.replace(meeting)):
        with pytest.raises(InvalidArgument, match=f"{words}: end the job on all .* a new group$"):
            call()


def test_an_all_reduce_and_a_recovery_are_of_one_host(ranks):
    ranks(4, "cpu")(on_hosts, 2, refused)


def fails_on_one_host(group: weft.Group) -> None:
    """What one host cannot make, no host has; the next one is made as if nothing had been."""
    case = Round(tokens=(5, 0, 8, 2))
    options = {"num_sms": 3} if group.rank == 2 else {}
    with pytest.raises(CreationFailed, match="rank 2 of 4: InvalidArgument: num_sms is 3 on a CPU"):
        weft.AllToAll(group, **case.sizes(8), **options)  # type: ignore[arg-type]
    with weft.AllToAll(group, **case.sizes(8)) as a2a:
        play(a2a, case)
        members = [m for m in gc.get_referrers(a2a) if isinstance(m, weft.AllToAll)]
        assert members == []
    with pytest.raises(OutOfOrder, match="closed"):
        a2a.check()


def test_an_operator_is_made_on_all_hosts_or_on_none(ranks):
    ranks(4, "cpu")(on_hosts, 2, fails_on_one_host)


def other_rows(group: weft.Group) -> str:
    """One host's ranks make their first call with other rows than the other's."""
    case = Round(tokens=(2, 2))
    x, ids, weights, _ = case.of(group.rank, group.device)
    with weft.AllToAll(group, timeout=9.0, first_timeout=1.0, **case.sizes(8)) as a2a:
        with pytest.raises(RailFailed) as told:
            a2a.dispatch(x, ids, weights, rows=4 + group.host)
        with pytest.raises(RailFailed):
            a2a.dispatch(x, ids, weights)
    return str(told.value)


def test_unequal_rows_are_an_error_in_time(ranks):
    said = ranks(2, "cpu")(on_hosts, 2, other_rows)
    words = "did not arrive within 1 s.*made it with other rows; raise first_timeout="
    assert any(re.search(words, text) for text in said), said


def stalls(group: weft.Group, culprit: int, before: str) -> str:
    """One rank stops before its dispatch or its combine."""
    case = Round(tokens=(2,) * group.size)
    with weft.AllToAll(group, timeout=1.0, **case.sizes(8)) as a2a:
        play(a2a, case)
        group.barrier()
        with pytest.raises(GroupError) as told:
            slow_round(a2a, case, before if group.rank == culprit else "")
        time.sleep(5.0)  # rank 0 serves the store in which the others look for the cause
    return str(told.value)


def slow_round(a2a: weft.AllToAll, case: Round, before: str) -> None:
    x, ids, weights, _ = case.of(a2a.rank, torch.device("cpu"))
    time.sleep(5.0 if before == "dispatch" else 0.0)
    received = a2a.dispatch(x, ids, weights)
    time.sleep(5.0 if before == "combine" else 0.0)
    a2a.combine(identity_experts(received, x.dtype))
    slow_round(a2a, case, "")  # a rank that needed nothing of the culprit


@pytest.mark.parametrize(
    ("hosts", "culprit", "before"), [(2, 3, "combine"), (2, 2, "dispatch"), (3, 5, "combine")]
)
def test_no_neighbour_of_a_rank_that_stalls_is_named(hosts, culprit, before, ranks):
    said = ranks(2 * hosts, "cpu")(on_hosts, hosts, stalls, culprit, before)
    for rank, text in enumerate(said):
        if rank != culprit:
            own = text.partition("What came first")[0]
            named = {int(each) for each in re.findall(r"rank (\d+)", own)}
            echo = "raised RailFailed" in own or "left its wait" in own or own.endswith("left. ")
            assert echo or named <= {rank, culprit}, text
            assert f"rank {culprit}" in text or f"host {culprit // 2}" in text, text


def aborted(group: weft.Group) -> tuple[str, str, float]:
    """Rank 0 asks all to stop while they wait for it."""
    case = Round(tokens=(2, 2, 2, 2))
    with weft.AllToAll(group, timeout=60.0, **case.sizes(8)) as a2a:
        play(a2a, case)
        group.barrier()
        began = time.monotonic()
        if group.rank == 0:
            time.sleep(1.0)
            a2a.abort()
        with pytest.raises(GroupError) as told:
            play(a2a, case)
        after = time.monotonic() - began
        time.sleep(5.0)  # rank 0 serves the store in which the others look for the cause
        return type(told.value).__name__, str(told.value), after


def test_an_abort_reaches_ranks_of_other_hosts_at_once(ranks):
    for kind, text, after in ranks(4, "cpu")(on_hosts, 2, aborted):
        assert kind in ("Aborted", "RailFailed", "PeerLeft"), text
        assert "abort()" in text
        assert after < 30.0


def left_waiting(group: weft.Group, how: str, over: Path) -> tuple[str, float] | None:
    """Rank 1 takes no further part, and its connections to the other host stay open."""
    case = Round(tokens=(2, 2, 2, 2))
    with weft.AllToAll(group, timeout=60.0, **case.sizes(8)) as a2a:
        play(a2a, case)
        group.barrier()
        if group.rank == 1:
            if how == "closes":
                a2a.close()
                while not over.exists():
                    time.sleep(0.1)
                return None
            if os.fork() == 0:
                while not over.exists():
                    time.sleep(0.1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(GroupError) as told:
            play(a2a, case)
        after = time.monotonic() - began
        time.sleep(3.0)  # rank 0 serves the store in which the others look for the cause
        over.touch()
        return str(told.value), after


@pytest.mark.parametrize(("how", "text"), [("dies", "died"), ("closes", "closed its all-to-all")])
def test_what_ends_a_rank_is_told_beyond_its_host_though_no_connection_ends(how, text, tmp_path):
    told = weft.launch(
        on_hosts, 2, left_waiting, how, tmp_path / "over", ranks=4, tolerate_deaths=True
    )
    for said, after in (each for each in told if each is not None):
        assert f"rank 1 {text}" in said
        assert after < 30.0


def one_round(group: weft.Group) -> int:
    """A round, and how many process groups torch has."""
    case = Round(tokens=(5, 0, 8, 2))
    with weft.AllToAll(group, **case.sizes(8)) as a2a:
        play(a2a, case)
    return len(dist.distributed_c10d._world.pg_names)


def left_with_an_error(group: weft.Group) -> None:
    if group.rank == 1:
        raise ZeroDivisionError
    group.local.barrier() if group.host == 0 else None


def again_and_again(group: weft.Group) -> list[int]:
    """Groups of the same ranks, one of which a rank leaves with an error."""
    counts = [on_hosts(group, 2, one_round) for _ in range(3)]
    with contextlib.suppress(ZeroDivisionError, RendezvousFailed):
        on_hosts(group, 2, left_with_an_error)
    return [*counts, on_hosts(group, 2, one_round)]


def test_later_groups_of_the_same_hosts_use_the_same_process_groups(ranks):
    for first, *same, fresh in ranks(4, "cpu")(again_and_again):
        assert same == [first, first]
        assert fresh == first + 2, "a rail that was broken is not used again"
