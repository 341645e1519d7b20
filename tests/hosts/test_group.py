# SPDX-License-Identifier: Apache-2.0
"""Groups of several hosts, and of machines of one NVLink domain, which are one host.

No machine here has such a neighbour: ranks are told that they are of two, and memory goes between
them by descriptors instead of fabric handles.
"""

import contextlib
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import weft
from tests import rounds
from tests.baseline import die, raises_soon
from tests.hosts.spanning import across, on_hosts, play
from tests.ranks import on_ranks
from tests.rounds import Round
from weft import errors
from weft.compat.deep_ep import Buffer
from weft.compat.ranks import lease_group
from weft.group import hosts
from weft.group.hosts import group_by_host, group_by_machine
from weft.group.torch_groups import TorchControl
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


def left_waiting(group: weft.Group, how: str, over: Path) -> str:
    """Rank 1 stops, but its connections to the other host stay open."""

    def wait() -> str:
        while not over.exists():
            time.sleep(0.1)
        return ""

    with EVEN.open(group, 8, timeout=600.0) as a2a:
        play(a2a, EVEN)
        group.barrier()
        if group.rank == 1:
            if how == "dies":
                if os.fork() == 0:
                    wait()
                    os._exit(0)
                die()
            time.sleep(0.5)  # the others wait for it
            getattr(a2a, how)()
            return wait()
        with raises_soon(errors.GroupError, "") as caught:
            play(a2a, EVEN)
        time.sleep(3.0)  # rank 0 serves the store in which the others look for the cause
        over.touch()
        return str(caught.value)


WAYS = [("dies", "rank 1 died"), ("close", "rank 1 closed its all-to-all"), ("abort", "abort()")]


@pytest.mark.parametrize(("how", "text"), WAYS)
def test_an_error_reaches_other_hosts_without_a_lost_connection(how, text, tmp_path):
    caught = weft.launch(
        on_hosts, 2, left_waiting, how, tmp_path / "over", ranks=4, tolerate_deaths=True
    )
    for rank in (0, 2, 3):
        assert text in caught[rank]


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


def describe(*boots: str, parts: str = "", kinds: Sequence[str] = ()) -> list[Any]:
    names = ("boot", "part", "device")
    args = boots, parts or "-" * len(boots), kinds or ["cuda"] * len(boots)
    places = [dict(zip(names, each, strict=True)) for each in zip(*args, strict=True)]
    return [
        each | {"host": f"{each['boot']}-0", "part": each["part"].strip("-"), "token": "t"}
        for each in places
    ]


TWO, HALVES, ALL = ((0, 2), (1, 3)), ((0, 1), (2, 3)), [0, 1, 2, 3]
DOMAINS = [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize(
    ("boots", "parts", "reached", "ranks", "names"),
    [
        ("abab", "", [[0, 1]] * 4, ((0, 1, 2, 3),), ("a-0 and 1 more",)),
        # One rank does not map the other machine.
        ("abab", "", [[]] * 4, TWO, ("a-0", "b-0")),
        ("abab", "", [[0, 1]] * 3 + [[1]], TWO, ("a-0", "b-0")),
        ("abab", "", [[0, 1], [1], [0, 1], [1]], TWO, ("a-0", "b-0")),
        ("abcd", "", DOMAINS, HALVES, ("a-0 and 1 more", "c-0 and 1 more")),
        # c and d map b, and not a.
        ("abcd", "", [ALL, ALL, [1, 2, 3], [1, 2, 3]], HALVES, None),
        # WEFT_HOST tells machines apart.
        ("abcd", "xxyy", [ALL] * 4, HALVES, None),
        # Machines of a domain may have unequal numbers of ranks.
        ("aab", "", [[0, 2]] * 3, ((0, 1, 2),), None),
    ],
)
def test_machines_that_map_all_of_each_other_are_one_host(boots, parts, reached, ranks, names):
    result = group_by_host(describe(*boots, parts=parts), reached)
    assert result[0] == ranks
    assert names in (None, result[1])


def test_domains_have_a_maximum_and_hosts_equal_numbers_of_ranks():
    boots = [boot for boot in "abcd" for _ in range(36)]
    ranks, _ = group_by_host(describe(*boots), [[0, 36, 72, 108]] * 144)
    assert [len(each) for each in ranks] == [72, 72]
    assert group_by_machine(describe(*"abab")) == [[0, 2], [1, 3]]
    with pytest.raises(errors.RendezvousFailed, match="host a-0 has 2 ranks and host b-0 has 1"):
        group_by_host(describe(*"aab"), [[]] * 3)


@on_ranks(2, "cpu")
def test_mixed_device_types_are_detected_at_once(group: weft.Group) -> None:
    """Otherwise ranks that look for NVLink and ranks that do not would wait for each other."""
    whole = group.process_group()
    os.environ["WEFT_HOST"] = f"host-{group.rank}"
    device = "cuda:0" if group.rank == 0 else "cpu"
    with raises_soon(errors.RendezvousFailed, "on cuda and rank 1 on cpu: pass devices of one"):
        weft.Group.from_torch(whole, device=device, timeout=600.0)


def on_machines(group: weft.Group, *boots: str, domains: Sequence[str] = ()) -> weft.Group:
    """Make the group of ranks that report these machines; domains: the machines of each."""
    where, whole = hosts.get_host_identity(), group.process_group()
    domain = {boot: each for each in domains or ["".join(boots)] for boot in each}
    own = [r for r, boot in enumerate(boots) if domain[boot] == domain[boots[group.rank]]]

    def group_hosts(places: list[Any], _: object) -> Any:
        machines, of = group_by_machine(places), [domain[each["boot"]] for each in places]
        return group_by_host(places, [[m[0] for m in machines if of[m[0]] == each] for each in of])

    def exchange_fds(control: TorchControl, fd: int, timeout: float) -> list[int | None]:
        fds: Any = group.exchange_fds(fd)
        for rank in set(range(group.size)).difference(own):
            os.close(fds[rank])
        return [fds[rank] for rank in own]

    patch = pytest.MonkeyPatch()
    where["boot"] = boots[group.rank]
    patch.setattr("weft.group.hosts.get_host_identity", lambda: where)
    patch.setattr("weft.group.group.group_by_host", group_hosts)
    # To the end of the process, whose groups over torch are all of this: heaps are made later.
    pytest.MonkeyPatch().setattr(TorchControl, "exchange_fds", exchange_fds)
    pytest.MonkeyPatch().setattr("weft.heap.heap._raise_fabric_lost", Mock())
    try:
        return weft.Group.from_torch(whole, device=group.device, timeout=600.0)
    finally:
        patch.undo()


@on_ranks(4, "cpu")
def test_a_failure_on_one_machine_is_reported_on_every_rank(group: weft.Group) -> None:
    """Rank 3 of 4, the second of its machine, cannot watch its peer."""
    if group.rank == 3:
        stop = OSError("no more threads")
        pytest.MonkeyPatch().setattr("weft.group.membership.Liveness", Mock(side_effect=stop))
    text = (
        r"connecting the ranks of one machine, \[2, 3\] numbered from 0, failed on rank 2 of.*"
        r"rank 1 \(pid.*could not watch its peers: no more threads"
    )
    with pytest.raises(errors.CreationFailed, match=text):
        on_machines(group, *"aabb")


@pytest.mark.parametrize("boots", ["abab", "aaab"])
@on_ranks(4, "cpu", "cuda")
def test_a_domain_of_machines_matches_the_reference(group: weft.Group, boots: str) -> None:
    with on_machines(group, *boots) as domain:
        assert (domain.machines, domain.hosts) == (2, 1)
        assert domain.host_ranks == ((0, 1, 2, 3),)
        assert domain.local is domain
        case = Round(tokens=(5, 0, 8, 2), hidden=256, add=True)
        with case.open(domain, 8) as a2a:
            for seed in range(3):
                rounds.play(a2a, case.next(seed=seed))
        with weft.AllReduce(domain, max_tokens=4, hidden=64) as reduce:
            own = torch.full((4, 64), 1.0 + domain.rank, device=domain.device).bfloat16()
            out = reduce.fused(own).out
            assert out is not None
            assert out.eq(10.0).all()
        with pytest.raises(errors.InvalidArgument, match="a group of 2 machines cannot recover"):
            domain.recover()
        with pytest.raises(errors.InvalidArgument, match="it needs ranks on one machine, but they"):
            domain.require_one_machine("it", fix="leave it out")


@on_ranks(4, "cpu")
def test_several_domains_are_several_hosts(group: weft.Group) -> None:
    with on_machines(group, *"abcd", domains=("ab", "cd")) as whole:
        assert (whole.machines, whole.hosts, whole.local.machines) == (4, 2, 2)
        assert whole.host_ranks == HALVES
        case = Round(tokens=(5, 0, 8, 2), hidden=256, add=True)
        with case.open(whole, 8) as a2a:
            play(a2a, case)


@on_ranks(3, "cpu", "cuda", dies=[1], timeout=200.0)
def test_a_death_is_named_at_once_on_every_machine(group: weft.Group) -> None:
    """Ranks 0 and 1 are on one machine, 2 on another."""
    case = Round(tokens=(5, 3, 8), experts=12, hidden=256)
    with on_machines(group, *"aab") as domain:
        with case.open(domain, 8, timeout=60.0) as a2a:
            rounds.play(a2a, case)
            domain.barrier()
            if domain.rank == 1:
                die()
            with raises_soon(errors.GroupError, "rank 1", 30.0) as caught:
                rounds.play(a2a, case, poison=False)
        assert caught.type in (errors.PeerDied, errors.PeerLeft)
        advice = "a group of 2 machines does not recover" in str(caught.value)
        assert advice == (caught.type is errors.PeerDied)
