# SPDX-License-Identifier: Apache-2.0
"""Ranks find out that they share a host: containers, and answers that no rank would give."""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from weft.errors import RendezvousFailed
from weft.memory import discovery

LONG = 1000.0  # a deadline that no test waits for


class Threads:
    """Ranks as threads of this process, and an exchange between them."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size)
        self.said = [""] * size

    def exchange(self, rank, change=None):
        def swap(value):
            self.said[rank] = json.dumps(value if change is None else change(value))
            self.barrier.wait(60)
            found = [json.loads(each) for each in self.said]
            self.barrier.wait(60)
            return found

        return swap

    def find(self, timeout=20.0, **changes):
        """What each rank got: "met", or its error. `changes`: a rank's way with what it says."""

        def rank(r):
            exchange = self.exchange(r, changes.get(f"rank{r}"))
            try:
                control = discovery.find(exchange, r, self.size, "cpu", timeout)
            except RendezvousFailed as error:
                return str(error)
            control.close()
            return "met"

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(rank, range(self.size)))


def test_containers_with_names_of_their_own_meet():
    assert Threads(2).find(rank1=lambda said: {**said, "host": "other"}) == ["met", "met"]


def test_hosts_differ_by_their_boot():
    for text in Threads(2).find(rank1=lambda said: {**said, "boot": "0123456789"}):
        assert "the ranks are on several hosts" in text
        assert "(boot 01234567)" in text


def test_networks_of_their_own_are_said_on_every_rank():
    zero, *others = Threads(3).find(
        timeout=LONG, rank2=lambda said: {**said, "host": "box", "network": "net:[7]"}
    )
    assert others == [zero, zero]
    assert f"rank 0 on {socket.gethostname()} (boot " in zero
    assert "is in network namespace net:[" in zero
    assert ", rank 2 on box (boot " in zero
    assert "in net:[7]: ranks meet over Unix sockets of one network namespace" in zero
    assert zero.endswith("(--network=host)")


def test_what_keeps_rank_0_from_listening_is_said_on_every_rank(monkeypatch):
    def full(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", full)
    for text in Threads(2).find(timeout=LONG):
        assert re.search("rank 0: cannot listen for the other ranks .*ulimit -n", text)


@pytest.mark.parametrize("address", [None, 7, {}, "0-" + "g" * 64, "/tmp/weft-x"])
def test_an_address_that_no_rank_would_send_is_refused(address):
    told = {"rank0": lambda said: {**said, "meeting": address}}
    zero, one = Threads(2).find(timeout=1.0, **told)
    assert "rank 0 was to send where to meet" in one
    assert "rank 1 of 2 did not come" in zero  # it knows where


@pytest.mark.parametrize("answer", [None, 7, {}, {"host": 7}, {"host": "a", "boot": "b"}])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_no_rank_would_answer_is_refused(rank, answer):
    for text in Threads(2).find(timeout=LONG, **{f"rank{rank}": lambda said: answer}):
        assert text.startswith(f"rank {rank} was to send where ")


CONTAINER = """
import json, os, socket, sys, time
from weft.errors import RendezvousFailed
from weft.memory.discovery import find

out, rank = sys.argv[1], int(sys.argv[2])

def exchange(value):
    with open(f"{out}/{rank}.part", "w") as file:
        json.dump(value, file)
    os.rename(f"{out}/{rank}.part", f"{out}/{rank}")
    while not all(os.path.exists(f"{out}/{r}") for r in range(2)):
        time.sleep(0.01)
    return [json.load(open(f"{out}/{r}")) for r in range(2)]

try:
    control = find(exchange, rank, 2, "cpu", 120.0)
except RendezvousFailed as error:
    print(json.dumps(str(error)))
else:
    passed = control.exchange_fds(os.memfd_create("x"), 120.0)
    names = control.gather("who", socket.gethostname(), 120.0)
    control.close()
    print(json.dumps([names, os.getpid(), len(passed)]))
"""
NAMESPACES = ["--uts", "--pid", "--ipc", "--mount-proc", "--fork"]


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "--net", *NAMESPACES, "true"], check=False).returncode != 0,
    reason="namespaces cannot be made here",
)
@pytest.mark.parametrize("networks", [1, 2])
def test_containers_of_one_host_meet(networks, tmp_path):
    """Own host names, process ids, shared memory and mounts; they need one network."""
    processes = []
    for rank in range(2):
        inside = 'mount -t tmpfs none /dev/shm && hostname "$0" && exec "$@"'
        command = [
            *("unshare", *(["--net"] if networks == 2 else []), *NAMESPACES),
            *("sh", "-c", inside, f"box{rank}"),
            *(sys.executable, "-c", CONTAINER, str(tmp_path), str(rank)),
        ]
        processes.append(
            subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    for process in processes:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err.decode()
        if networks == 1:
            assert json.loads(out) == [["box0", "box1"], 1, 2]
        else:
            assert "rank 1 on box1 (boot " in json.loads(out)
            assert "one network namespace" in json.loads(out)
