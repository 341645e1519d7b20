# SPDX-License-Identifier: Apache-2.0
"""The end of a process is seen by a pidfd, and before that by a pipe that ends with it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from typing import Any

import pytest

import weft
from weft.errors import RendezvousFailed, SetupError
from weft.memory.liveness import Liveness, lifelong_pipe


def without_pidfds(group: weft.Group) -> str:
    if group.rank == 1:
        system: Any = os
        system.pidfd_open = refused
    with pytest.raises((SetupError, RendezvousFailed)) as told:
        weft.Group.from_torch(group.process_group(), device="cpu")
    return str(told.value)


def refused(pid: int) -> int:
    raise PermissionError(1, "Operation not permitted")


def test_a_rank_that_may_not_open_pidfds_says_so_on_all() -> None:
    for text in weft.launch(without_pidfds, ranks=2):
        assert "pidfd_open is refused (Operation not permitted)" in text
        assert "seccomp" in text


def short_of(group: weft.Group, what: str) -> tuple[str, bool]:
    """Rank 1 cannot watch its peers. What is raised, and whether descriptors stay open."""
    process_group = group.process_group()
    group.barrier()
    before = len(os.listdir("/proc/self/fd"))
    place: Any = {"pipe2": os, "start": threading.Thread}[what]
    found = getattr(place, what)
    if group.rank == 1:
        setattr(place, what, none_free)
    kind = SetupError if group.rank == 1 else RendezvousFailed
    with pytest.raises(kind) as told:
        weft.Group.from_torch(process_group, device="cpu")
    setattr(place, what, found)
    group.barrier()
    return str(told.value), len(os.listdir("/proc/self/fd")) > before


def none_free(*_: object) -> int:
    raise RuntimeError("none is free")  # as of threads; of descriptors an OSError


@pytest.mark.parametrize("what", ["pipe2", "start"])
def test_a_rank_that_cannot_watch_says_why_and_keeps_no_descriptors(what: str) -> None:
    for rank, (text, left) in enumerate(weft.launch(short_of, what, ranks=2)):
        ours = "cannot watch the other ranks: none is free; it needs free descriptors (ulimit -n)"
        assert ("could not watch its peers: none is free", ours)[rank] in text
        assert not left


def tell(rank: int, heard: list[int], told: threading.Event) -> None:
    heard.append(rank)
    told.set()


def test_a_pidfd_tells_of_an_end() -> None:
    heard: list[int] = []
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    told = threading.Event()
    pidfd = os.pidfd_open(process.pid)
    liveness = Liveness({1: pidfd}, {}, lifelong_pipe(), lambda rank: tell(rank, heard, told))
    process.kill()
    assert told.wait(600.0)
    assert heard == [1]
    liveness.close()
    process.communicate()


def test_nothing_is_heard_after_close() -> None:
    """Of two peers that ended, one is heard, for its call closes; after that no process counts."""
    heard: list[int] = []
    told, made = threading.Event(), threading.Event()
    dead = [subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2)]
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = {rank: os.pidfd_open(each.pid) for rank, each in enumerate([*dead, alive])}
    for each in dead:
        each.wait()

    def close_at_once(rank: int) -> None:
        made.wait()
        liveness.close()
        tell(rank, heard, told)

    liveness = Liveness(peers, {}, lifelong_pipe(), close_at_once)
    made.set()
    assert told.wait(600.0)
    liveness._thread.join(600.0)
    alive.kill()
    alive.communicate()
    assert len(heard) == 1
    assert not liveness._thread.is_alive()


def test_a_pipe_tells_of_an_end_before_the_process_has_ended() -> None:
    """Rank 1 leaves as `close` does, and then rank 2's pipe ends, as when it is killed.

    Their process lives meanwhile: rank 1 is heard only when that has ended, and nobody twice.
    """
    heard: list[int] = []
    told = threading.Event()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    last = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    peers = {rank: os.pidfd_open(process.pid) for rank in (1, 2)} | {3: os.pidfd_open(last.pid)}
    pipes, kept = {}, {}
    for rank in (1, 2):
        pipes[rank], kept[rank] = lifelong_pipe()
    liveness = Liveness(peers, pipes, lifelong_pipe(), lambda rank: tell(rank, heard, told))
    os.write(kept[1], b".")
    os.close(kept[1])
    os.close(kept[2])
    assert told.wait(600.0)
    assert heard == [2]
    assert not liveness.ended(2)
    told.clear()
    process.kill()
    assert told.wait(600.0)
    process.communicate()
    assert liveness.ended(1)
    told.clear()
    last.kill()  # heard after what ended before
    assert told.wait(600.0)
    last.communicate()
    liveness.close()
    assert heard == [2, 1, 3]


def keeps_a_high_end(group: weft.Group) -> int:
    """What a rank's own end of its pipe is called, the highest of its descriptors."""
    return max(int(fd) for fd in os.listdir("/proc/self/fd"))


def test_the_end_that_a_rank_keeps_is_above_what_it_opens_later() -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert min(weft.launch(keeps_a_high_end, ranks=2)) >= min(soft, 4096) * 3 // 4
