"""Machines of one NVLink domain, whose GPUs map each other's memory, are one host.

No machine here has such a neighbour. So ranks of one machine are told that they are of two, and
memory goes between them by descriptors instead of fabric handles; all else is as it would be.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.hosts import spanning
from tests.rounds import Round, play
from weft.errors import GroupError, InvalidArgument, PeerDied, PeerLeft, RendezvousFailed
from weft.memory import discovery
from weft.memory.collective import TorchControl
from weft.memory.hosts import by_host, by_machine

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def here(*boots: str, parts: str = "") -> list[Any]:
    """What ranks on such machines say of them."""
    parts = parts or "-" * len(boots)
    return [
        {"host": f"{boot}-0", "boot": boot, "part": part.strip("-"), "token": "t"}
        for boot, part in zip(boots, parts, strict=True)
    ]


def test_machines_that_map_each_other_are_one_host():
    said = here(*"abab")
    assert by_machine(said) == [[0, 2], [1, 3]]
    assert by_host(said, [[0, 1]] * 4) == (((0, 1, 2, 3),), ("a-0 and 1 more",))


@pytest.mark.parametrize("reached", [[[]] * 4, [[0, 1]] * 3 + [[1]], [[0, 1], [1], [0, 1], [1]]])
def test_machines_of_which_one_rank_does_not_map_the_other_are_two_hosts(reached):
    assert by_host(here(*"abab"), reached) == (((0, 2), (1, 3)), ("a-0", "b-0"))


def test_two_domains_are_two_hosts():
    ranks, names = by_host(here(*"abcd"), [[0, 1], [0, 1], [2, 3], [2, 3]])
    assert ranks == ((0, 1), (2, 3))
    assert names == ("a-0 and 1 more", "c-0 and 1 more")


def test_a_machine_joins_only_those_that_it_maps_all_of():
    ranks, _ = by_host(here(*"abcd"), [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3], [1, 2, 3]])
    assert ranks == ((0, 1), (2, 3)), "c and d map b, and not a"


def test_machines_that_weft_host_tells_apart_are_hosts_of_their_own():
    assert by_host(here(*"abcd", parts="xxyy"), [[0, 1, 2, 3]] * 4)[0] == ((0, 1), (2, 3))


def test_a_domain_takes_no_more_ranks_than_it_serves():
    boots = [boot for boot in "abcd" for _ in range(36)]
    ranks, _ = by_host(here(*boots), [[0, 36, 72, 108]] * 144)
    assert [len(each) for each in ranks] == [72, 72]


def test_machines_of_a_domain_may_have_unequal_numbers_of_ranks_and_hosts_may_not():
    assert by_host(here(*"aab"), [[0, 2]] * 3)[0] == ((0, 1, 2),)
    with pytest.raises(RendezvousFailed, match="host a-0 has 2 ranks and host b-0 has 1"):
        by_host(here(*"aab"), [[]] * 3)


def on_machines(group: weft.Group, boots: str, joined: str) -> weft.Group:
    """The group of ranks that take themselves for ranks of these machines.

    joined: of each rank, the NVLink domain of its machine.
    """

    def found(said: list[Any], _: object) -> Any:
        firsts = {machine[0]: boots.index(said[machine[0]]["boot"]) for machine in by_machine(said)}
        own = [boots.index(each["boot"]) for each in said]
        reached = [[r for r, at in firsts.items() if joined[at] == joined[mine]] for mine in own]
        return by_host(said, reached)

    def exchange_fds(control: TorchControl, fd: int, timeout: float) -> list[int | None]:
        """By the sockets that they have in truth, which reach all ranks."""
        fds, wanted = group.exchange_fds(fd), dist.get_process_group_ranks(control._process_group)
        for rank in set(range(group.size)) - set(wanted):
            os.close(fds[rank])  # type: ignore[arg-type]
        return [fds[rank] for rank in wanted]

    where, whole = discovery.this_host(), group.process_group()
    patch = pytest.MonkeyPatch()
    patch.setattr("weft.memory.hosts.this_host", lambda: {**where, "boot": boots[group.rank]})
    patch.setattr("weft.memory.group.by_host", found)
    # To the end of the process: heaps are made later.
    pytest.MonkeyPatch().setattr(TorchControl, "exchange_fds", exchange_fds)
    try:
        return weft.Group.from_torch(whole, device=group.device, timeout=600.0)
    finally:
        patch.undo()


def rounds(group: weft.Group, boots: str) -> None:
    with on_machines(group, boots, "----") as domain:
        assert (domain.machines, domain.hosts) == (2, 1)
        assert domain.host_ranks == ((0, 1, 2, 3),)
        assert domain.local is domain
        case = Round(tokens=(5, 0, 8, 2), hidden=256, add=True)
        with weft.AllToAll(domain, **case.sizes(8)) as a2a:
            for seed in range(3):
                play(a2a, case.next(seed=seed))
        with weft.AllReduce(domain, max_tokens=4, hidden=64) as reduce:
            own = torch.full((4, 64), 1.0 + domain.rank, device=domain.device).bfloat16()
            out = reduce.fused(own).out
            assert out is not None
            assert out.eq(10.0).all()
        with pytest.raises(InvalidArgument, match="two ranks or more, each a process, of one mach"):
            domain.recover()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("boots", ["abab", "aaab"])
def test_a_domain_of_machines_meets_the_reference(ranks, device, boots):
    ranks(4, device)(rounds, boots)


def rounds_of_two(group: weft.Group) -> None:
    """Four machines; NVLink joins the first two, and the last two."""
    with on_machines(group, "abcd", "--==") as whole:
        assert (whole.machines, whole.hosts, whole.host_ranks) == (4, 2, ((0, 1), (2, 3)))
        assert (whole.local.machines, whole.local.hosts) == (2, 1)
        case = Round(tokens=(5, 0, 8, 2), hidden=256, add=True)
        with weft.AllToAll(whole, **case.sizes(8)) as a2a:
            for seed in range(3):
                spanning.play(a2a, case.next(seed=seed))


def test_two_domains_of_machines_meet_the_reference(ranks):
    ranks(4, "cpu")(rounds_of_two)


def wait_in_dispatch(a2a: weft.AllToAll, case: Round) -> None:
    x, ids, weights, _ = case.of(a2a.group.rank, a2a.group.device)
    a2a.dispatch(x, ids, weights)
    if a2a.group.device.type == "cuda":
        torch.cuda.synchronize()
    a2a.check()


def dies(group: weft.Group, victim: int) -> tuple[str, str, float]:
    """Ranks 0 and 1 are on one machine, 2 on another: who is left says who died, and when."""
    with on_machines(group, "aab", "---") as domain:
        case = Round(tokens=(5, 3, 8), experts=12, hidden=256)
        with weft.AllToAll(domain, timeout=60.0, **case.sizes(8)) as a2a:
            play(a2a, case)
            domain.barrier()
            if domain.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(GroupError) as told:
                wait_in_dispatch(a2a, case)
            return type(told.value).__name__, str(told.value), time.monotonic() - began


@pytest.mark.parametrize("device", DEVICES)
def test_a_death_is_named_at_once_on_every_machine(ranks, device):
    said = weft.launch(dies, 1, ranks=3, device=device, timeout=200.0, tolerate_deaths=True)
    assert said[1] is None
    for kind, text, after in (said[0], said[2]):
        assert kind in (PeerDied.__name__, PeerLeft.__name__), text
        assert "rank 1" in text
        assert ("a group of 2 machines does not recover" in text) == (kind == "PeerDied")
        assert after < 30.0, "long before the deadline"
