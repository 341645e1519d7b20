# SPDX-License-Identifier: Apache-2.0
"""Control messages of a group: votes, agreements, descriptors; ranks that die, hang or leave."""

import contextlib
import os
import queue
import re
import resource
import signal
import subprocess
import threading
import time
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

import weft
from tests.baseline import NESTED, call_outcome, die, open_files, raises_soon
from tests.ranks import on_ranks
from weft.errors import (
    CreationFailed,
    GeometryMismatch,
    InvalidArgument,
    OutOfOrder,
    RendezvousFailed,
    SetupError,
    WeftError,
)
from weft.group import hosts
from weft.group import torch_groups as collective
from weft.group.group import Group
from weft.group.liveness import Liveness, create_lifetime_pipe
from weft.group.torch_groups import TorchControl


@on_ranks(3, "threads", "cpu")
def test_all_gather_gives_every_rank_the_same(group):
    values = [None, True, -7, 2.5, "té", [1, (2, 3)]]
    gathered = group.all_gather({"rank": group.rank, "values": values})
    group.barrier()
    values[-1] = [1, [2, 3]]
    assert gathered == [{"rank": rank, "values": values} for rank in range(3)]


@on_ranks(2, "threads")
def test_values_of_up_to_a_mebibyte_of_json_travel(group):
    most = (1 << 20) - 2
    assert [len(each) for each in group.all_gather("x" * most)] == [most] * 2
    for value, text in (
        ("x" * (1 << 20), "1048578 bytes of JSON, which exceed the limit of 1048576"),
        (float("nan"), "is not JSON"),
        (NESTED, "is not JSON"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            group.all_gather(value)
    group.barrier()


FAILED, TEXT_7 = "it failed on rank", "InvalidArgument: x is 7"
SEVEN, EIGHT, NOW = InvalidArgument("x is 7"), InvalidArgument("x is 8"), OutOfOrder("now")
ERRORS: list[tuple[list[Exception | None], type[Exception] | None, str]] = [
    ([None] * 3, None, ""),
    ([None, ValueError("no 1"), None], CreationFailed, f"{FAILED} 1 of 3: ValueError: no 1"),
    ([SEVEN, EIGHT, SEVEN], InvalidArgument, "x is 7"),
    ([NOW] * 3, OutOfOrder, "now"),
    ([SEVEN, None, NOW], CreationFailed, f"{FAILED} 0 of 3 (and on rank 2): {TEXT_7}"),
    # Not weft's: nothing documents it.
    ([KeyError(1)] * 3, CreationFailed, f"{FAILED} 0 of 3 (and on rank 1, 2): KeyError: 1"),
]


@pytest.mark.parametrize(("raised", "kind", "text"), ERRORS)
@on_ranks(3, "threads")
def test_a_vote_fails_everywhere_with_one_text_and_undoes_what_succeeded(group, raised, kind, text):
    """What all ranks raise alike is raised as it is."""
    undone: list[int] = []
    error = raised[group.rank]

    def step():
        if error is not None:
            raise error
        return group.rank

    vote = partial(group.vote, error, action="it", undo=partial(undone.append, group.rank))
    for call in (vote, partial(group.run_collective, step, action="it")):
        if kind is None:
            assert call() == (None if call is vote else group.rank)
            continue
        with pytest.raises(WeftError) as caught:
            call()
        assert (type(caught.value), str(caught.value)) == (kind, text)
        assert error is None or caught.value.__cause__ is error
    assert undone == ([group.rank] if kind and error is None else [])


@on_ranks(3, "threads")
def test_agree_names_two_ranks_and_what_differs(group):
    same = {"hidden": 8, "dtype": "bf16"}
    group.agree(same, label="geometry")
    for values, text in (
        ([same, same, {**same, "hidden": 16}], "rank 0 has hidden=8 and rank 2 has hidden=16"),
        ([4, 5, 4], "rank 0 has 4 and rank 1 has 5"),
        ([{"a": 1}, {"a": 1, "b": None}, {"a": 1}], "rank 0 has no b and rank 1 has b=None"),
    ):
        with pytest.raises(GeometryMismatch, match=f"geometry differs: {text}"):
            group.agree(values[group.rank], label="geometry")


@pytest.mark.parametrize("size", [1, 2, 5])
@on_ranks("size", "threads", "cpu")
def test_descriptors_reach_every_rank_in_order(group, size):
    own = os.memfd_create(f"test-{group.rank}")
    os.write(own, bytes([group.rank]))
    fds = group.exchange_fds(own)
    assert [(os.pread(fd, 1, 0)[0], os.get_inheritable(fd)) for fd in fds] == [
        (rank, False) for rank in range(size)
    ]
    for fd in (own, *fds):
        os.close(fd)


@pytest.mark.parametrize("sleeper", [0, 1])
def test_a_rank_that_does_not_come_is_named_at_the_deadline(ranks, sleeper):
    others_gave_up = threading.Barrier(3)

    def body(group):
        group.barrier()
        group.timeout = 1.0
        if group.rank == sleeper:
            others_gave_up.wait()
        text = rf"rank {sleeper} \(pid {os.getpid()}\) did not enter barrier within 1 s"
        with pytest.raises(RendezvousFailed, match=text):
            group.barrier()
        if group.rank != sleeper:
            group.close()  # so the sleeper comes when they have left
            others_gave_up.wait()

    ranks(3, "threads")(body)


@on_ranks(3, "threads")
def test_ranks_in_different_calls_name_both(group):
    gather = r"rank \d( \(pid \d+\))? is in all_gather \(call 0\)"
    barrier = r"rank 1( \(pid \d+\))? is in barrier \(call 0\)"
    with pytest.raises(RendezvousFailed, match=f"(?=.*{gather}).*{barrier}"):
        group.barrier() if group.rank == 1 else group.all_gather(5)


def test_two_threads_of_one_rank_are_refused(ranks):
    refused = threading.Event()

    def body(group):
        if group.rank == 0:
            refused.wait()
            return group.barrier()
        waiting = threading.Thread(target=group.barrier)
        waiting.start()
        time.sleep(0.5)  # it is in the barrier by then
        with pytest.raises(OutOfOrder, match="two threads of rank 1"):
            group.barrier()
        refused.set()
        return waiting.join()

    ranks(2, "threads")(body)


@on_ranks(2, "cpu")
def test_a_forked_child_leaves_the_group_alone(group):
    """A child may not act for its parent, nor end its connections or the meeting by exiting."""
    meeting = group.open_meeting()
    child = os.fork()
    if child == 0:
        calls = (
            group.barrier,
            partial(group.replace, meeting),
            partial(group.recover, suspects=[1 - group.rank]),
        )
        code = 0 if {call_outcome(call)[0] for call in calls} == {"OutOfOrder"} else 1
        group.abort("it is no rank")
        group.close()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    group.barrier()
    meeting.connect().close()  # the ranks may still meet there
    group.barrier()


@on_ranks(3, "cpu", dies=[1])
def test_a_death_is_named_while_a_forked_child_lives(group):
    """The child has its parent's sockets, which therefore stay open when rank 1 dies."""
    child = os.fork() if group.rank == 1 else None
    if child == 0:
        time.sleep(600.0)
        os._exit(0)
    child = group.all_gather(child)[1]
    if group.rank == 1:
        die()
    text = r"^rank 1 \(pid \d+\) died while the group was in barrier$"
    with raises_soon(RendezvousFailed, text):
        group.barrier(timeout=600.0)
    group.recover(timeout=600.0)
    group.barrier()
    if group.rank == 0:
        os.kill(child, signal.SIGKILL)


@on_ranks(3, "cpu")
def test_a_rank_without_room_for_a_descriptor_is_named_on_all(group):
    group.barrier()
    fds = [os.open(os.devnull, os.O_RDONLY)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if group.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, before[1]))
        with contextlib.suppress(OSError):
            while True:
                fds.append(os.dup(fds[0]))
        os.close(fds.pop())  # for the duplicate of its own that it sends
    error = call_outcome(group.exchange_fds, fds[0])
    if error[0] == "nothing":  # it was through before rank 1 failed, which had sent its part
        error = call_outcome(group.barrier)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    text = r"rank 1 \(pid \d+\) cannot receive its part of exchange_fds: it is at its limit of 64 o"
    assert re.match(text, error[1]), error


@on_ranks(1, "threads")
def test_generations_wrap_and_are_never_zero(group):
    numbers = [group.next_generation() for _ in range(0x10000)]
    assert numbers[:3] == [1, 2, 3]
    assert numbers[-2:] == [0xFFFF, 1]


@on_ranks(3, "threads")
def test_a_rank_that_closed_its_group_is_named(group):
    if group.rank == 1:
        group.close()
        group.close()
        with pytest.raises(OutOfOrder, match="the group is closed; create a new one"):
            group.barrier()
        return
    with pytest.raises(RendezvousFailed, match=rf"rank 1 \(pid {os.getpid()}\) closed its group"):
        group.barrier()


@pytest.mark.parametrize("leaver", [0, 1])
@on_ranks(3, "threads")
def test_the_reason_of_a_rank_that_raises_waits_for_ranks_that_come_later(group, leaver):
    """One rank waits in the barrier when another leaves; the last one comes when sending fails."""
    group.barrier()
    if group.rank == leaver:
        with pytest.raises(ValueError, match="weights"), group:
            raise ValueError("bad \ud800 weights" + "x" * 10**6)
        return
    if group.rank == 1 - leaver:
        time.sleep(0.3)
    why = (
        rf"^rank {leaver} \(pid {os.getpid()}\) left the group while the others were in barrier: "
        r"it raised ValueError: bad \\ud800 weights"
    )
    texts = set()
    for _ in range(2):
        with pytest.raises(RendezvousFailed, match=why) as caught:
            group.barrier()
        texts.add(str(caught.value))
    (text,) = texts
    assert len(text) < 5000


@on_ranks(2, "cpu", dies=[1])
def test_a_group_whose_descriptors_were_closed_closes_without_an_error(group, tmp_path):
    """Rank 1 closes all descriptors, as a daemon does, and then its group."""
    group.open_meeting().close()
    group.barrier()
    if group.rank == 1:
        os.closerange(3, 1 << 16)
        group.close()
        (tmp_path / "closed").touch()
        os._exit(0)  # it has nothing left by which it could report
    end = time.monotonic() + 60
    while not (tmp_path / "closed").exists():
        assert time.monotonic() < end, "rank 1 raised an error"
        time.sleep(0.01)


FAILURES: dict[str, tuple[Any, Exception, str]] = {
    "pidfd_open": (os, PermissionError(1, "not permitted"), "pidfd_open is forbidden .*seccomp"),
    "pipe2": (os, RuntimeError("none is free"), "none is free"),
    "start": (threading.Thread, RuntimeError("none is free"), "none is free"),
}


@pytest.mark.parametrize("what", FAILURES)
@on_ranks(2, "cpu")
def test_a_rank_that_cannot_watch_raises_and_keeps_no_descriptor(group, what):
    process_group = group.process_group()
    # The kernel closes high descriptors first: the pipe of a killed rank ends at once.
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert max(int(fd) for fd in os.listdir("/proc/self/fd")) >= min(soft, 4096) * 3 // 4
    group.barrier()
    before = open_files()
    (place, error, text), patch = FAILURES[what], pytest.MonkeyPatch()
    kind: type[Exception] = RendezvousFailed
    if group.rank == 1:
        kind = SetupError
        patch.setattr(place, what, Mock(side_effect=error))
    with pytest.raises(kind, match=text):
        weft.Group.from_torch(process_group, device="cpu")
    patch.undo()
    group.barrier()
    assert open_files() <= before


@pytest.fixture
def watched():
    """Start three processes; return them and pidfds of theirs, which a `Liveness` takes over."""
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    yield processes, {rank: os.pidfd_open(each.pid) for rank, each in enumerate(processes)}
    for each in processes:
        each.kill()
        each.wait()


def test_no_death_is_reported_after_close(watched):
    """Of two peers that ended, one is reported; its callback closes, after which none is."""
    processes, peers = watched
    reported: queue.Queue[int] = queue.Queue()
    created = threading.Event()

    def close_at_once(rank):
        created.wait()
        liveness.close()
        reported.put(rank)

    for each in processes[:2]:
        each.kill()
        each.wait()
    liveness = Liveness(peers, {}, create_lifetime_pipe(), close_at_once)
    created.set()
    reported.get(timeout=600.0)
    liveness._thread.join(600.0)
    assert reported.empty()
    assert not liveness._thread.is_alive()


def test_a_pipe_reports_a_death_before_the_process_ends(watched):
    """Rank 1 leaves as `close` does, and then rank 0's pipe ends, as when it is killed."""
    (_, process, last), peers = watched
    reported: queue.Queue[int] = queue.Queue()
    pipes, kept = zip(create_lifetime_pipe(), create_lifetime_pipe(), strict=True)
    liveness = Liveness(peers, dict(enumerate(pipes)), create_lifetime_pipe(), reported.put)
    os.write(kept[1], b".")
    for fd in kept:
        os.close(fd)
    assert reported.get(timeout=600.0) == 0
    assert not liveness.has_ended(0)
    process.kill()
    assert reported.get(timeout=600.0) == 1
    process.wait()
    assert liveness.has_ended(1)
    last.kill()  # it has a pidfd alone
    assert reported.get(timeout=600.0) == 2
    liveness.close()
    assert reported.empty()


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
def test_calls_that_cannot_work_are_refused(group):
    for text, call in (
        ("torch.distributed needs processes", group.process_group),
        ("init_process_group first", Group.from_torch),
        ('weft supports "cpu" and "cuda"', partial(hosts.resolve_device, "meta")),
    ):
        with pytest.raises(InvalidArgument, match=text):
            call()


def test_the_current_gpu_is_the_default(monkeypatch):
    assert hosts.resolve_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for device, expected in ((None, "cuda:0"), ("cuda", "cuda:0"), ("cuda:1", "cuda:1")):
        assert hosts.resolve_device(device) == torch.device(expected)


@pytest.mark.parametrize(("second", "backend"), [("GPU-b", "nccl"), ("GPU-a", "gloo")])
def test_ranks_that_share_a_gpu_meet_by_gloo(second, backend, monkeypatch):
    own = Mock(return_value=SimpleNamespace(uuid="GPU-a"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", own)
    group: Any = SimpleNamespace(all_gather=lambda own: [own, second])
    assert collective._choose_backend(group, torch.device("cuda", 0)) == backend
