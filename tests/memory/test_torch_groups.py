# SPDX-License-Identifier: Apache-2.0
"""Groups from torch.distributed and from a launcher's environment, and torch groups from groups."""

import contextlib
import os
import re
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.memory.baseline import raised
from weft.errors import (
    InvalidArgument,
    RendezvousFailed,
)
from weft.memory import collective, discovery
from weft.memory.collective import TorchControl
from weft.memory.group import Group
from weft.memory.launch import launch


def torch_sum(group):
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    pg = group.process_group()
    assert pg is group.process_group()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before
    total = torch.tensor([group.rank + 1])
    dist.all_reduce(total, group=pg)
    sums = [int(total)]
    # A group from a torch group: meets anew, and gives the torch group back.
    with Group.from_torch(pg, device="cpu", timeout=600.0) as other:
        assert other.process_group() is pg
        sums.append(sum(other.all_gather(other.rank + 1)))
    os.environ["WEFT_HOST"] = str(group.rank)
    with Group.from_torch(pg, device="cpu", timeout=600.0) as other:
        other.barrier()
        other.agree({"a": 1}, what="it")
        sums.append(sum(other.all_gather(other.rank + 1)))
        refused = raised(other.exchange_fds, 0)[:2]
        vote = raised(other.vote, OSError("x") if group.rank else None, doing="it")[:2]
        differs = raised(other.agree, group.rank, what="it")[0]
    group.close()
    return sums, refused, vote, differs, dist.is_initialized(), raised(other.barrier)[0]


def test_torch_groups_both_ways():
    for sums, refused, vote, differs, alive, after in launch(torch_sum, ranks=2):
        assert sums == [3, 3, 3]
        assert refused[0] == "InvalidArgument"
        assert "this group spans several machines" in refused[1]
        assert vote == ["CreationFailed", "it failed on rank 1 of 2: OSError: x"]
        assert differs == "GeometryMismatch"
        assert not alive
        assert after == "OutOfOrder"


def listens(group):
    """Addresses, in the kernel's hexadecimal, at which this process listens for torch."""
    group.process_group()
    own, found = set(), set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it has been closed
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    for kind in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{kind}") as file:
            for _, local, _, state, *rest in map(str.split, file.readlines()[1:]):
                if state == "0A" and f"socket:[{rest[5]}]" in own:
                    found.add(local.partition(":")[0])
    group.barrier()
    return sorted(found)


def test_a_group_that_torch_joins_listens_on_the_loopback_alone():
    assert launch(listens, ranks=2) == [["0100007F"]] * 2


def die_in_torch(group):
    group.process_group()
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with contextlib.suppress(RendezvousFailed):
        group.barrier()
    started = time.monotonic()
    group.close()
    return time.monotonic() - started


def test_a_torch_group_with_a_dead_rank_closes_at_once():
    took, dead = launch(die_in_torch, ranks=2, tolerate_deaths=True)
    assert dead is None
    assert took < 100.0


def die_before_the_others_connect(group, victim):
    pg = group.process_group()
    if group.rank == victim:
        system: Any = discovery
        system.meet = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    return raised(Group.from_torch, pg, device="cpu", timeout=100.0)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_in_from_torch_is_named_at_once(victim):
    told = launch(die_before_the_others_connect, victim, ranks=3, tolerate_deaths=True)
    for kind, text, took in (told[rank] for rank in {0, 1, 2} - {victim}):
        assert kind == RendezvousFailed.__name__
        assert took < 40.0
        assert re.search(rf"rank {victim} \(pid \d+\) died before all ranks had met", text)


def never_calls(group, calls_before):
    pg = group.process_group()
    if calls_before:
        TorchControl(pg, group.rank, 3).gather("an earlier call", 1, 600.0)
    error = raised(Group.from_torch, pg, device="cpu", timeout=1.5)[:2] if group.rank < 2 else None
    group.barrier()
    return error


@pytest.mark.parametrize("calls_before", [False, True])
def test_a_rank_that_does_not_call_from_torch_is_named(calls_before):
    last = r" \(last in an earlier call\)" if calls_before else ""
    for rank, (kind, text) in enumerate(launch(never_calls, calls_before, ranks=3)[:2]):
        assert kind == RendezvousFailed.__name__
        wanted = rf"rank {rank}: Group.from_torch did not end within 1.5 s. rank 2{last} did not"
        assert re.match(wanted, text), text
        assert "every rank of the process group must call Group.from_torch" in text


class Said:
    """A process group whose ranks said these bytes."""

    def __init__(self, *rows):
        self.rows = list(rows)


@pytest.mark.parametrize("row", [b"7", b"{}", b'{"op":"it"}', b"\xff", b"NaN", b"[" * 100_000])
def test_what_no_rank_of_weft_would_gather_is_an_error_in_words(row, monkeypatch):
    said: Any = Said(b'{"op":"it","value":1}', row)
    control = TorchControl(said, 0, 2)
    monkeypatch.setattr(collective, "gather_bytes", lambda group, *_, **__: group.rows)
    with pytest.raises(RendezvousFailed, match="rank 1 broke the protocol in it"):
        control.gather("it", 1, 1.0)


def want_torch(group):
    return raised(group.process_group)[:2]


def test_threads_have_no_torch_group():
    kind, text = launch(want_torch, ranks=1, device="threads")[0]
    assert kind == InvalidArgument.__name__
    assert "torch.distributed needs processes" in text


def test_from_torch_needs_torch_distributed():
    with pytest.raises(InvalidArgument, match="init_process_group first"):
        Group.from_torch()


def test_only_known_devices(monkeypatch):
    assert discovery.default_device("cpu") == torch.device("cpu")
    with pytest.raises(InvalidArgument, match='weft runs on "cpu" and "cuda"'):
        discovery.default_device("meta")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    assert discovery.default_device(None) == torch.device("cuda:0")
    assert discovery.default_device("cuda") == torch.device("cuda:0")
    assert discovery.default_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize(("second", "backend"), [("GPU-b", "nccl"), ("GPU-a", "gloo")])
def test_ranks_that_share_a_gpu_meet_by_gloo(second, backend, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-a")
    )
    group: Any = SimpleNamespace(all_gather=lambda own: [own, second])
    assert collective._backend(group, torch.device("cuda", 0)) == backend
