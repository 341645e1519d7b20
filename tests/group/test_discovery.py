# SPDX-License-Identifier: Apache-2.0
"""Ranks detect that they share a host: containers, and invalid reports."""

import ctypes
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest

from tests.baseline import die, raises_soon
from tests.ranks import on_ranks
from weft.errors import RendezvousFailed
from weft.group import hosts
from weft.group.group import Group

LONG = 1000.0  # seconds: a deadline that no test waits for


def find(size, timeout=20.0, **changes):
    """Return "met" or the error of each rank; changes: what "rank1" says in place of its own."""
    barrier, own = threading.Barrier(size), [""] * size

    def rank(r):
        change = changes.get(f"rank{r}", lambda value: value)

        def exchange(value):
            own[r] = json.dumps(change(value))
            barrier.wait(60)
            answers = [json.loads(each) for each in own]
            barrier.wait(60)
            return answers

        try:
            hosts.connect_machine(exchange, r, size, "cpu", timeout).close()
        except RendezvousFailed as error:
            return str(error)
        return "met"

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def test_containers_share_a_host_and_boots_do_not():
    assert find(2, rank1=lambda own: {**own, "host": "other"}) == ["met", "met"]
    for text in find(2, rank1=lambda own: {**own, "boot": "0123456789"}):
        assert re.search(r"the ranks are on several hosts.*\(boot 01234567\)", text)


def test_separate_networks_are_reported_on_every_rank():
    zero, *others = find(3, LONG, rank2=lambda own: {**own, "host": "box", "network": "net:[7]"})
    assert others == [zero, zero]
    own = rf"rank 0 on {socket.gethostname()} \(boot .*is in network namespace net:\["
    assert re.search(rf"{own}.*, rank 2 on box \(boot .*in net:\[7\].*--network=host\)$", zero)


def test_a_failure_to_listen_is_reported_on_every_rank(monkeypatch):
    full = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr(socket, "socket", Mock(side_effect=full))
    for text in find(2, LONG):
        assert re.search("rank 0: cannot listen for the other ranks .*ulimit -n", text)


@pytest.mark.parametrize("address", [None, 7, {}, "0-" + "g" * 64, "/tmp/weft-x"])
def test_an_invalid_address_is_refused(address):
    zero, one = find(2, 0.3, rank0=lambda own: {**own, "meeting": address})
    assert "rank 0 did not send a meeting address" in one
    assert "rank 1 of 2 did not connect" in zero  # it knows where


@pytest.mark.parametrize("answer", [None, 7, {}, {"host": 7}, {"host": "a", "boot": "b"}])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_invalid_answer_is_refused(rank, answer):
    for text in find(2, LONG, **{f"rank{rank}": lambda own: answer}):
        assert text.startswith(f"rank {rank} did not ")


_libc = ctypes.CDLL(None, use_errno=True)
_MS_REC, _MS_PRIVATE, _PR_SET_DUMPABLE = 0x4000, 1 << 18, 4
NEW = {"mount": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "pid": 0x20000000}
UNSHARE = ["unshare", "--fork", *(f"--{name}" for name in NEW), "true"]
OF_THEIR_OWN = pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(UNSHARE).returncode != 0,
    reason="namespaces cannot be made here",
)


def require(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mount(kind, folder, flags=0):
    require(_libc.mount(b"none", folder.encode(), kind, ctypes.c_ulong(flags), None))


def contained(rank, folder):
    """In new namespaces and without capabilities, find the other process through files."""
    mount(b"proc", "/proc")
    mount(b"tmpfs", "/dev/shm")
    socket.sethostname(f"box{rank}")
    # Root may do all that a rank could be refused.
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    require(_libc.capset(header, (ctypes.c_uint32 * 6)()))
    require(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))  # no process may read this one

    def exchange(value):
        (folder / f"{rank}.part").write_text(json.dumps(value))
        (folder / f"{rank}.part").rename(folder / str(rank))
        while not all((folder / str(r)).exists() for r in range(2)):
            time.sleep(0.01)
        return [json.loads((folder / str(r)).read_text()) for r in range(2)]

    control = hosts.connect_machine(exchange, rank, 2, "cpu", LONG)
    assert len(control.exchange_fds(os.memfd_create("x"), LONG)) == 2
    assert control.gather("who", socket.gethostname(), LONG) == ["box0", "box1"]
    assert os.getpid() == 1
    if rank == 1:
        os._exit(0)
    with raises_soon(RendezvousFailed, "^rank 1 died while the group was in who"):
        control.gather("who", None, LONG)
    control.close()


def run_forked(body):
    child = os.fork()
    if child == 0:
        try:
            os._exit(body() or 0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@OF_THEIR_OWN
@on_ranks(2, "cpu")
def test_containers_of_one_network_meet_and_notice_a_death(group, tmp_path):
    """The containers have their own host names, process ids, shared memory and mounts."""

    def alone():
        require(_libc.unshare(sum(NEW.values())))
        mount(None, "/", _MS_REC | _MS_PRIVATE)
        return run_forked(lambda: contained(group.rank, tmp_path))

    assert run_forked(alone) == 0


@pytest.mark.parametrize("victim", [0, 2])
@on_ranks(3, "cpu", dies="victim")
def test_a_rank_that_dies_in_from_torch_is_named_at_once(group, victim, tmp_path):
    process_group = group.process_group()
    if group.rank == victim:
        module: Any = hosts
        module.meet = lambda *_, **__: die()
    text = rf"rank {victim} \(pid \d+\) died before all ranks had connected"
    with raises_soon(RendezvousFailed, text, 40.0):
        Group.from_torch(process_group, device="cpu", timeout=100.0)
