# SPDX-License-Identifier: Apache-2.0
"""Ranks in containers with mounts of their own: no directory that all see, and yet one group."""

import ctypes
import gc
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from typing import Any

import pytest

import weft
from tests.memory.baseline import raised
from tests.rounds import Round, play
from weft.errors import RendezvousFailed
from weft.memory import discovery
from weft.memory.group import Group
from weft.memory.heap import Heap
from weft.memory.launch import launch

LONG = 600.0  # a deadline that no test waits for
SOON = 100.0  # much less than that, and enough for a busy machine

_libc = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 1 << 18
_PR_SET_DUMPABLE = 4

pytestmark = pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/dev/shm"], check=False
    ).returncode
    != 0,
    reason="mounts of one's own cannot be made here",
)


def done(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def hide(folder):
    """From now on this process has a `folder` and a /dev/shm of its own, and they are empty."""
    done(_libc.unshare(_CLONE_NEWNS))
    done(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None))
    for each in (folder, "/dev/shm"):
        done(_libc.mount(b"none", each.encode(), b"tmpfs", ctypes.c_ulong(0), None))


def drop_capabilities():
    """Root may do all that a rank could be refused."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    done(_libc.capset(header, (ctypes.c_uint32 * 6)()))


def made(group):
    """A group of the ranks of `group`, from their process group."""
    return Group.from_torch(group.process_group(), device=group.device, timeout=LONG)


def play_rounds(group, place):
    hide(place)
    play_one(group, seed=0)  # it loads what stays
    before = settled(group)
    for seed in (1, 2):
        pids = play_one(group, seed)
    return os.listdir(place), settled(group) - before, pids, os.getpid()


def play_one(group, seed):
    with made(group) as other:
        case = Round((8, 3, 8), seed=seed)
        with weft.AllToAll(
            other, max_tokens=8, top_k=case.top_k, num_experts=case.experts, hidden=case.hidden
        ) as a2a:
            for _ in range(3):
                play(a2a, case)
                case = case.next(seed=case.seed + 10)
        return [other.pid(rank) for rank in range(other.size)]


def settled(group):
    """How many descriptors are open once the store's thread has closed what peers gave up."""
    gc.collect()
    group.barrier()
    deadline, found = time.monotonic() + 10, [-1, 0]
    while len(set(found[-5:])) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
        found.append(len(os.listdir("/proc/self/fd")))
    return found[-1]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ranks_with_mounts_of_their_own_play_rounds(device, tmp_path):
    found = launch(play_rounds, str(tmp_path), ranks=3, device=device)
    for left, kept, pids, _ in found:
        assert left == []
        assert kept <= 0  # descriptors; the first round's may be closed late
        assert pids == [pid for _, _, _, pid in found]


class Witness:
    """A member of a group that waits for one rank's end."""

    def __init__(self, victim):
        self.victim = victim
        self.heard = threading.Event()

    def _peer_ended(self, rank):
        if rank == self.victim:
            self.heard.set()

    def _tell_left(self, why, *, settled=False):
        pass


def die_afterwards(group, victim, place):
    hide(place)
    with made(group) as other:
        witness = Witness(victim)
        other.attach(witness)
        heap = Heap.create(other, 64)
        if other.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        said = raised(other.barrier)
        heap.close()
        return *said, witness.heard.wait(LONG)


def die_on_the_way(group, victim, place):
    hide(place)
    if group.rank == victim:
        found: Any = discovery
        found.meet = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    return *raised(made, group), True


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("dies", "words"),
    [(die_afterwards, "died while"), (die_on_the_way, "died before all ranks had met")],
)
def test_a_death_is_noticed_at_once(dies, words, victim, tmp_path):
    told = launch(dies, victim, str(tmp_path), ranks=3, tolerate_deaths=True)
    for kind, text, took, heard in (told[rank] for rank in {0, 1, 2} - {victim}):
        assert kind == RendezvousFailed.__name__
        assert re.search(rf"rank {victim} \(pid \d+\) {words}", text)
        assert heard
        assert took < SOON


def meet_without_rights(group, place):
    hide(place)
    drop_capabilities()
    done(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))  # nobody may read this process
    pg = group.process_group()
    return raised(Group.from_torch, pg, device="cpu", timeout=LONG)[:2]


def test_no_capability_is_needed(tmp_path):
    assert launch(meet_without_rights, str(tmp_path), ranks=3) == [["nothing", ""]] * 3
