# SPDX-License-Identifier: Apache-2.0
"""Other refusals of groups of several hosts, and freed resources."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from tests.baseline import die, raises_soon
from tests.hosts.spanning import across, on_hosts, play
from tests.ranks import on_ranks
from tests.rounds import Round
from weft import errors
from weft.compat.deep_ep import Buffer
from weft.compat.ranks import lease_group
from weft.reference import identity_experts

CASE = Round(tokens=(5, 0, 8, 2))
EVEN = Round(tokens=(2, 2, 2, 2))


@across(2)
def test_an_all_reduce_and_a_recovery_are_of_one_host(group: weft.Group) -> None:
    words = r"needs ranks on one host, but they are on 2: pass group\.local"
    apart = "a group of 2 machines cannot recover, nor can the local group of one of its hosts"
    meeting = group.local.open_meeting()
    for text, call in (
        (f"an all-reduce {words}", lambda: weft.AllReduce(group, max_tokens=4, hidden=64)),
        (f"Buffer {words}", lambda: Buffer(group, low_latency_mode=True)),
        (f"this workspace {words}", lambda: lease_group(group.rank, group.size, group)),
        ("no rail", lambda: group.local.rail),
        (apart, group.recover),
        (apart, group.local.recover),
        (apart, lambda: group.local.replace(meeting)),
    ):
        with pytest.raises(errors.InvalidArgument, match=text):
            call()
    weft.AllReduce(group.local, max_tokens=4, hidden=64).close()


@across(2)
def test_an_operator_is_made_on_all_hosts_or_on_none(group: weft.Group) -> None:
    options = {"num_sms": 3} if group.rank == 2 else {}
    with pytest.raises(
        errors.CreationFailed, match="rank 2 of 4: InvalidArgument: num_sms is 3 on a CPU"
    ):
        weft.AllToAll(group, **CASE.sizes(8), **options)  # type: ignore[arg-type]
    with CASE.open(group, 8) as a2a:  # as if nothing had been
        play(a2a, CASE)
        assert not [m for m in gc.get_referrers(a2a) if isinstance(m, weft.AllToAll)]
    with pytest.raises(errors.OutOfOrder, match="closed"):
        a2a.check()


def other_rows(group: weft.Group) -> str:
    """One host's ranks make their first call with other rows than the other host's."""
    case = Round(tokens=(2, 2))
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    with case.open(group, 8, timeout=9.0, first_timeout=1.0) as a2a:
        with pytest.raises(errors.RailFailed) as caught:
            a2a.dispatch(x, ids, weights, rows=4 + group.host)
        with pytest.raises(errors.RailFailed):
            a2a.dispatch(x, ids, weights)
    return str(caught.value)


def test_unequal_rows_are_an_error_in_time(ranks):
    texts = ranks(2, "cpu")(on_hosts, 2, other_rows)
    words = "did not arrive within 1 s.*with the same rows.*larger first_timeout="
    assert any(re.search(words, text) for text in texts), texts


@pytest.mark.parametrize(
    ("size", "hosts", "culprit", "before"),
    [
        (4, 2, 3, "combine"),
        (4, 2, 2, "dispatch"),
        pytest.param(6, 3, 5, "combine", marks=pytest.mark.slow),
    ],
)
@across("hosts", "size")
def test_only_the_stalled_rank_is_named(group, size, hosts, culprit, before):
    case = Round(tokens=(2,) * size)

    def slow_round(a2a: weft.AllToAll, before: str) -> None:
        x, ids, weights, _ = case.inputs_of(a2a.rank, torch.device("cpu"))
        time.sleep(4.0 if before == "dispatch" else 0.0)
        received = a2a.dispatch(x, ids, weights)
        time.sleep(4.0 if before == "combine" else 0.0)
        a2a.combine(identity_experts(received, x.dtype))
        slow_round(a2a, "")  # of a rank that needed nothing of the culprit

    with case.open(group, 8, timeout=1.0) as a2a:
        play(a2a, case)
        group.barrier()
        with pytest.raises(errors.GroupError) as caught:
            slow_round(a2a, before if group.rank == culprit else "")
    if group.rank != culprit:
        text = str(caught.value)
        own = text.partition("The first error was")[0]
        named = {int(each) for each in re.findall(r"rank (\d+)", own)}
        echo = re.search(r"raised RailFailed|stopped waiting|disconnected\. $", own)
        assert echo or named <= {group.rank, culprit}, text
        assert f"rank {culprit}" in text or f"host {culprit // 2}" in text, text


@across(2)
def test_an_abort_reaches_ranks_of_other_hosts_at_once(group: weft.Group) -> None:
    with EVEN.open(group, 8, timeout=60.0) as a2a:
        play(a2a, EVEN)
        group.barrier()
        if group.rank == 0:  # the others wait for it
            time.sleep(0.5)
            a2a.abort()
        with raises_soon(errors.GroupError, r"abort\(\)", 30.0) as caught:
            play(a2a, EVEN)
        assert caught.type.__name__ in ("Aborted", "RailFailed", "PeerLeft")


def left_waiting(group: weft.Group, how: str, over: Path) -> str:
    """Rank 1 stops, but its connections to the other host stay open."""

    def wait() -> str:
        while not over.exists():
            time.sleep(0.1)
        return ""

    with EVEN.open(group, 8, timeout=60.0) as a2a:
        play(a2a, EVEN)
        group.barrier()
        if group.rank == 1:
            if how == "closes":
                a2a.close()
                return wait()
            if os.fork() == 0:
                wait()
                os._exit(0)
            die()
        with raises_soon(errors.GroupError, "", 30.0) as caught:
            play(a2a, EVEN)
        time.sleep(3.0)  # rank 0 serves the store in which the others look for the cause
        over.touch()
        return str(caught.value)


@pytest.mark.parametrize(("how", "text"), [("dies", "died"), ("closes", "closed its all-to-all")])
def test_an_error_reaches_other_hosts_without_a_lost_connection(how, text, tmp_path):
    caught = weft.launch(
        on_hosts, 2, left_waiting, how, tmp_path / "over", ranks=4, tolerate_deaths=True
    )
    for rank in (0, 2, 3):
        assert f"rank 1 {text}" in caught[rank]


def count_groups(group: weft.Group) -> int:
    with CASE.open(group, 8) as a2a:
        play(a2a, CASE)
    return len(dist.distributed_c10d._world.pg_names)


def leave_with_an_error(group: weft.Group) -> None:
    if group.rank == 1:
        raise ZeroDivisionError
    group.local.barrier() if group.host == 0 else None


@on_ranks(4, "cpu")
def test_later_groups_of_the_same_hosts_use_the_same_process_groups(group: weft.Group) -> None:
    first, *same = [on_hosts(group, 2, count_groups) for _ in range(3)]
    assert same == [first, first]
    with contextlib.suppress(ZeroDivisionError, errors.RendezvousFailed):
        on_hosts(group, 2, leave_with_an_error)
    fresh = on_hosts(group, 2, count_groups)
    assert fresh == first + 2, "a rail that was broken is not used again"
