# SPDX-License-Identifier: Apache-2.0
"""The end of a process is detected by a pidfd, and earlier by a pipe that ends with it."""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import subprocess
import threading
from typing import Any

import pytest

import weft
from tests.baseline import open_files
from tests.ranks import on_ranks
from weft.errors import RendezvousFailed, SetupError
from weft.group.liveness import Liveness, create_lifetime_pipe


def replaced(place: Any, name: str, error: Exception) -> pytest.MonkeyPatch:
    """Patch a function of the system to raise an error."""

    def refuse(*_: object) -> None:
        raise error

    patch = pytest.MonkeyPatch()
    patch.setattr(place, name, refuse)
    return patch


@on_ranks(2, "cpu")
def test_a_rank_without_pidfds_is_reported_on_all(group: weft.Group) -> None:
    if group.rank == 1:
        replaced(os, "pidfd_open", PermissionError(1, "Operation not permitted"))
    with pytest.raises((SetupError, RendezvousFailed)) as caught:
        weft.Group.from_torch(group.process_group(), device="cpu")
    assert "pidfd_open is forbidden (Operation not permitted)" in str(caught.value)
    assert "seccomp" in str(caught.value)


@pytest.mark.parametrize("what", ["pipe2", "start"])
@on_ranks(2, "cpu")
def test_a_rank_that_cannot_watch_raises_and_keeps_no_descriptor(
    group: weft.Group, what: str
) -> None:
    process_group = group.process_group()
    group.barrier()
    before = open_files()
    kind: type[Exception] = RendezvousFailed
    text, patch = "could not watch its peers: none is free", pytest.MonkeyPatch()
    if group.rank == 1:
        kind, text = SetupError, "cannot watch the other ranks: none is free; it needs free descri"
        place = {"pipe2": os, "start": threading.Thread}[what]
        patch = replaced(place, what, RuntimeError("none is free"))  # as of threads
    with pytest.raises(kind, match=text):
        weft.Group.from_torch(process_group, device="cpu")
    patch.undo()
    group.barrier()
    assert open_files() <= before


@contextlib.contextmanager
def started(count: int):
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(count)]
    yield processes
    for each in processes:
        each.kill()
        each.wait()


def test_no_death_is_reported_after_close() -> None:
    """Of two peers that ended, one is reported; its callback closes, after which none is."""
    reported: queue.Queue[int] = queue.Queue()
    made = threading.Event()

    def close_at_once(rank: int) -> None:
        made.wait()
        liveness.close()
        reported.put(rank)

    with started(3) as processes:
        peers = {rank: os.pidfd_open(each.pid) for rank, each in enumerate(processes)}
        for each in processes[:2]:
            each.kill()
            each.wait()
        liveness = Liveness(peers, {}, create_lifetime_pipe(), close_at_once)
        made.set()
        reported.get(timeout=600.0)
        liveness._thread.join(600.0)
    assert reported.empty()
    assert not liveness._thread.is_alive()


def test_a_pipe_reports_a_death_before_the_process_ends() -> None:
    """Rank 1 leaves as `close` does, and then rank 2's pipe ends, as when it is killed.

    Their process lives: rank 1 is reported only after its end, and none twice. Rank 3
    has a pidfd alone.
    """
    reported: queue.Queue[int] = queue.Queue()
    with started(2) as (process, last):
        peers = {rank: os.pidfd_open(process.pid) for rank in (1, 2)} | {3: os.pidfd_open(last.pid)}
        pipes, kept = {}, {}
        for rank in (1, 2):
            pipes[rank], kept[rank] = create_lifetime_pipe()
        liveness = Liveness(peers, pipes, create_lifetime_pipe(), reported.put)
        os.write(kept[1], b".")
        os.close(kept[1])
        os.close(kept[2])
        assert reported.get(timeout=600.0) == 2
        assert not liveness.has_ended(2)
        process.kill()
        assert reported.get(timeout=600.0) == 1
        process.wait()
        assert liveness.has_ended(1)
        last.kill()  # heard after what ended before
        assert reported.get(timeout=600.0) == 3
        liveness.close()
    assert reported.empty()


@on_ranks(2, "cpu")
def test_the_lifelong_pipe_has_a_high_descriptor(group: weft.Group) -> None:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert max(int(fd) for fd in os.listdir("/proc/self/fd")) >= min(soft, 4096) * 3 // 4
