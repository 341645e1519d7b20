# SPDX-License-Identifier: Apache-2.0
"""Creations that fail: every rank raises the same, in time, and nothing stays behind."""

import os
import signal
import time

import pytest

from tests.memory.baseline import raised, state
from weft.errors import (
    CreationFailed,
    GeometryMismatch,
    HandleUnsupported,
    InvalidArgument,
)
from weft.memory import posix
from weft.memory.heap import Heap
from weft.memory.launch import launch

DEVICES = ("threads", "cpu")
PAGE = os.sysconf("SC_PAGESIZE")


def create_badly(group, sizes):
    return raised(Heap.create, group, sizes[group.rank])


@pytest.mark.parametrize("size", [0, -1, 1.5, True, None])
def test_a_size_that_is_none_fails_on_every_rank(size):
    for kind, text, _ in launch(create_badly, [64, size], ranks=2, device="threads"):
        assert kind == CreationFailed.__name__
        assert text == (
            "creating a heap failed on rank 1 of 2: InvalidArgument: "
            f"size is {size!r}; it must be an integer in 1..{1 << 48}"
        )


def test_different_sizes_are_named():
    for kind, text, _ in launch(create_badly, [64, 64, 65], ranks=3, device="threads"):
        assert kind == GeometryMismatch.__name__
        assert "rank 0 has size=64 and rank 2 has size=65" in text


def test_more_memory_than_addresses_is_refused():
    for kind, text, _ in launch(create_badly, [1 << 62] * 2, ranks=2, device="threads"):
        assert kind == InvalidArgument.__name__
        assert f"size is {1 << 62}; it must be an integer in 1..{1 << 48}" in text


def inject(group, victim, step, out):
    """Rank `victim` fails, dies or stalls in one step of a creation."""
    where, what = step
    if group.rank == victim:
        real = getattr(posix.HostShares, where)

        def disturbed(self, *args):
            if what == "fail":
                raise OSError(28, "no space left")
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "stall":
                while not all((out / str(r)).exists() for r in range(3) if r != victim):
                    time.sleep(0.01)
            return real(self, *args)

        setattr(posix.HostShares, where, disturbed)
    before = state()
    if what == "stall":
        group.timeout = 2.0
    error = raised(Heap.create, group, 5000)
    after = state()
    group.close()
    (out / str(group.rank)).touch()  # a rank that stalls goes on when the others have left
    return *error, before == after


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("where", ["allocate", "map"])
@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("fail", "failed on rank {} of 3: OSError: [Errno 28] no space left"),
        ("kill", "rank {} (pid "),
    ],
)
def test_one_rank_that_fails_or_is_killed_fails_all(victim, where, what, named, tmp_path):
    told = launch(inject, victim, (where, what), tmp_path, ranks=3, tolerate_deaths=True)
    assert (told[victim] is None) == (what == "kill")
    told = [each for each in told if each is not None]
    for kind, text, seconds, clean in told:
        assert (kind, clean) == (CreationFailed.__name__, True)
        assert seconds < 100.0
        assert text == told[0][1]
        assert named.format(victim) in text


@pytest.mark.parametrize("victim", [0, 2])
def test_one_rank_that_stalls_ends_in_an_error_at_the_deadline(victim, tmp_path):
    for kind, text, _, clean in launch(inject, victim, ("map", "stall"), tmp_path, ranks=3):
        assert (kind, clean) == (CreationFailed.__name__, True)
        assert f"rank {victim} (pid " in text


@pytest.mark.parametrize(
    ("size", "seals", "text"),
    [
        (2 * PAGE, posix._SEALS, f"sent memory of {2 * PAGE} bytes where {PAGE} were agreed"),
        (PAGE, 0, "it could shrink under its readers"),
        (PAGE, 1, "it could shrink under its readers"),
        (PAGE, 1 | 4, "it could shrink under its readers"),  # F_SEAL_SEAL and F_SEAL_GROW
    ],
)
def test_memory_that_a_peer_could_change_is_refused(size, seals, text):
    import fcntl

    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    refuse(fd, text)


def test_a_descriptor_that_is_no_memfd_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(PAGE))
    refuse(os.open(path, os.O_RDWR), "so no memfd")


def refuse(fd, text):
    shares = posix.HostShares(0, 1, 100)
    try:
        shares.allocate()
        with pytest.raises(HandleUnsupported, match=text):
            shares.map({0: fd})
    finally:
        os.close(fd)
        shares.free()
