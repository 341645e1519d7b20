# SPDX-License-Identifier: Apache-2.0
"""Groups from torch.distributed, and torch groups from groups."""

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.baseline import call_outcome, die, raises_soon
from tests.ranks import on_ranks
from weft.errors import CreationFailed, GeometryMismatch, InvalidArgument, RendezvousFailed
from weft.group import hosts
from weft.group import torch_groups as collective
from weft.group.group import Group
from weft.group.torch_groups import TorchControl


@on_ranks(2, "cpu")
def test_torch_groups_both_ways(group):
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    pg = group.process_group()
    assert pg is group.process_group()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == before
    total = torch.tensor([group.rank + 1])
    dist.all_reduce(total, group=pg)
    assert int(total) == 3
    with Group.from_torch(pg, device="cpu", timeout=600.0) as other:
        assert other.process_group() is pg
        assert other.all_gather(other.rank + 1) == [1, 2]
    os.environ["WEFT_HOST"] = str(group.rank)
    with Group.from_torch(pg, device="cpu", timeout=600.0) as other:
        other.barrier()
        other.agree({"a": 1}, label="it")
        assert other.all_gather(other.rank + 1) == [1, 2]
        with pytest.raises(InvalidArgument, match="this group spans several machines"):
            other.exchange_fds(0)
        with pytest.raises(CreationFailed, match="^it failed on rank 1 of 2: OSError: x$"):
            other.vote(OSError("x") if group.rank else None, action="it")
        with pytest.raises(GeometryMismatch):
            other.agree(group.rank, label="it")
    group.close()
    assert not dist.is_initialized()
    assert call_outcome(other.barrier)[0] == "OutOfOrder"


@pytest.mark.gpu
@on_ranks(max(1, min(torch.cuda.device_count(), 4)), "cuda")  # a GPU each, as NCCL needs
def test_the_torch_group_is_nccl(group):
    total = torch.tensor([group.rank + 1.0], device=group.device)
    dist.all_reduce(total, group=group.process_group())
    assert float(total) == group.size * (group.size + 1) / 2


@on_ranks(2, "cpu")
def test_a_group_that_torch_joins_listens_on_the_loopback_alone(group):
    group.process_group()
    own, addresses = set(), set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it has been closed
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    for kind in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{kind}") as file:
            for _, local, _, state, *rest in map(str.split, file.readlines()[1:]):
                if state == "0A" and f"socket:[{rest[5]}]" in own:
                    addresses.add(local.partition(":")[0])
    group.barrier()
    assert addresses == {"0100007F"}  # 127.0.0.1, in the kernel's hexadecimal


@on_ranks(2, "cpu", dies=[1])
def test_a_torch_group_with_a_dead_rank_closes_at_once(group):
    group.process_group()
    group.barrier()
    if group.rank == 1:
        die()
    with raises_soon(RendezvousFailed, "died"):
        group.barrier()
    kind, _, seconds = call_outcome(group.close)
    assert kind == "nothing"
    assert seconds < 100.0


@pytest.mark.parametrize("calls_before", [False, True])
@on_ranks(3, "cpu")
def test_a_rank_that_does_not_call_from_torch_is_named(group, calls_before):
    pg = group.process_group()
    if calls_before:
        TorchControl(pg, group.rank, 3).gather("an earlier call", 1, 600.0)
    if group.rank < 2:
        last = r" \(last in an earlier call\)" if calls_before else ""
        text = rf"^rank {group.rank}: Group.from_torch did not end within 1 s. rank 2{last} did "
        with pytest.raises(RendezvousFailed, match=text):
            Group.from_torch(pg, device="cpu", timeout=1.0)
    group.barrier()


@pytest.mark.parametrize("row", [b"7", b"{}", b'{"op":"it"}', b"\xff", b"NaN", b"[" * 100_000])
def test_an_invalid_gather_raises_a_typed_error(row, monkeypatch):
    rows = [b'{"op":"it","value":1}', row]
    monkeypatch.setattr(collective, "gather_bytes", lambda *_, **__: rows)
    with pytest.raises(RendezvousFailed, match="rank 1 broke the protocol in it"):
        TorchControl(SimpleNamespace(), 0, 2).gather("it", 1, 1.0)  # type: ignore[arg-type]


@on_ranks(1, "threads")
def test_threads_have_no_torch_group(group):
    with pytest.raises(InvalidArgument, match=r"torch.distributed needs processes"):
        group.process_group()
    with pytest.raises(InvalidArgument, match="init_process_group first"):
        Group.from_torch()


def test_only_known_devices(monkeypatch):
    assert hosts.resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(InvalidArgument, match='weft supports "cpu" and "cuda"'):
        hosts.resolve_device("meta")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for device, expected in ((None, "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")):
        assert hosts.resolve_device(device) == torch.device(expected)


@pytest.mark.parametrize(("second", "backend"), [("GPU-b", "nccl"), ("GPU-a", "gloo")])
def test_ranks_that_share_a_gpu_meet_by_gloo(second, backend, monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-a")
    )
    group: Any = SimpleNamespace(all_gather=lambda own: [own, second])
    assert collective._choose_backend(group, torch.device("cuda", 0)) == backend
