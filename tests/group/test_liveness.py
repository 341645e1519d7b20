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
from unittest.mock import Mock

import pytest

import weft
from tests.baseline import open_files
from tests.ranks import on_ranks
from weft.errors import RendezvousFailed, SetupError
from weft.group.liveness import Liveness, create_lifetime_pipe

FAILURES: dict[str, tuple[Any, Exception, str]] = {
    "pidfd_open": (os, PermissionError(1, "not permitted"), "pidfd_open is forbidden .*seccomp"),
    "pipe2": (os, RuntimeError("none is free"), "none is free"),
    "start": (threading.Thread, RuntimeError("none is free"), "none is free"),
}


@pytest.mark.parametrize("what", FAILURES)
@on_ranks(2, "cpu")
def test_a_rank_that_cannot_watch_raises_and_keeps_no_descriptor(
    group: weft.Group, what: str
) -> None:
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
