"""A sign of life ends with its process, by a pidfd or, where that is refused, by a pipe."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from weft.memory.liveness import Liveness, Sign


def refused(pid: int) -> int:
    raise PermissionError(1, "Operation not permitted")


def test_where_pidfds_are_refused_a_pipe_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pidfd_open", refused)
    sign, heard = Sign(), threading.Event()
    liveness = Liveness({3: sign.fd}, lambda rank: heard.set() if rank == 3 else None)
    assert not heard.wait(0.05)
    sign.close()  # what the kernel does for a process that ends
    assert heard.wait(600.0)
    liveness.close()
    liveness.close()


def tell(rank: int, heard: list[int], told: threading.Event) -> None:
    heard.append(rank)
    told.set()


def test_a_pidfd_tells_of_an_end() -> None:
    heard: list[int] = []
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    told = threading.Event()
    liveness = Liveness({1: os.pidfd_open(process.pid)}, lambda rank: tell(rank, heard, told))
    process.kill()
    assert told.wait(600.0)
    assert heard == [1]
    liveness.close()
    process.communicate()
