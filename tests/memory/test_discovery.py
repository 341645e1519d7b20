"""Ranks agree on a place to meet: hosts, containers, and answers that no rank would give."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
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
                star = discovery.find(exchange, r, self.size, "cpu", timeout)
            except RendezvousFailed as error:
                return str(error)
            star.close()
            return "met"

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(rank, range(self.size)))


def test_containers_with_names_of_their_own_meet(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = {"rank1": lambda said: {**said, **({"host": "other"} if "host" in said else {})}}
    assert Threads(2).find(**told) == ["met", "met"]
    assert list(tmp_path.iterdir()) == []


def test_hosts_differ_by_their_boot(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = {"rank1": lambda said: {**said, "boot": "0123456789"}}
    for text in Threads(2).find(**told):
        assert "the ranks are on several hosts" in text
        assert "(boot 01234567)" in text
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_one_rank_cannot_see_ends_the_meeting_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    problem = {"problem": "the meeting directory x cannot be opened: set TMPDIR"}
    turns = []

    def cannot_see(said):
        turns.append(said)
        return (
            problem if len(turns) == 3 else {**said, **({"host": "box"} if "host" in said else {})}
        )

    zero, one = Threads(2).find(timeout=LONG, rank1=cannot_see)
    for text in (zero, one):
        assert text.startswith("rank 1: the meeting directory x cannot be opened: set TMPDIR")
        assert f"rank 0 is on {socket.gethostname()}" in text
        assert "rank 1 on box (boot " in text
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_a_directory_is_said_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    for text in Threads(2).find(timeout=LONG):
        assert re.search("rank 0: cannot make the directory .*set TMPDIR", text)

    def nowhere():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    for text in Threads(2).find(timeout=LONG):
        assert re.search("rank 0: No usable temporary directory .*set TMPDIR", text)


@pytest.mark.parametrize(
    "place",
    [None, 7, {}, {"directory": "/etc", "nonce": "0" * 64}, {"directory": "/tmp/weft-x"}],
)
def test_a_place_that_no_rank_would_tell_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = {"rank0": lambda said: {**said, **({"place": place} if "place" in said else {})}}
    for text in Threads(2).find(timeout=LONG, **told):
        assert "rank 0 was to tell where to meet" in text


@pytest.mark.parametrize("answer", [None, 7, {}, {"problem": 7}])
def test_what_no_rank_would_answer_is_refused(answer, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = {"rank1": lambda said: said if "boot" in said else answer}
    for text in Threads(2).find(timeout=LONG, **told):
        assert text.startswith("rank 1")
    assert list(tmp_path.iterdir()) == []


CONTAINER = """
import json, os, socket, sys, time
from weft.memory.discovery import find

out, rank = sys.argv[1], int(sys.argv[2])
turn = 0

def exchange(value):
    global turn
    turn += 1
    with open(f"{out}/{turn}-{rank}.part", "w") as file:
        json.dump(value, file)
    os.rename(f"{out}/{turn}-{rank}.part", f"{out}/{turn}-{rank}")
    while not all(os.path.exists(f"{out}/{turn}-{r}") for r in range(2)):
        time.sleep(0.01)
    return [json.load(open(f"{out}/{turn}-{r}")) for r in range(2)]

star = find(exchange, rank, 2, "cpu", 120.0)
passed = len(star.exchange_fds(os.memfd_create("x"), 120.0))
print(json.dumps([star.gather("who", socket.gethostname(), 120.0), os.getpid(), passed]))
star.close()
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(
        ["unshare", "--uts", "--pid", "--net", "--mount-proc", "--fork", "true"], check=False
    ).returncode
    != 0,
    reason="namespaces cannot be made here",
)
def test_containers_of_one_host_meet(tmp_path):
    """Own host names, process ids, networks and mounts; a directory that both see."""
    (tmp_path / "values").mkdir()
    processes = []
    for rank in range(2):
        inside = 'hostname "$0" && exec "$@"'
        command = [
            *("unshare", "--uts", "--pid", "--net", "--mount-proc", "--fork"),
            *("sh", "-c", inside, f"box{rank}"),
            *(sys.executable, "-c", CONTAINER, str(tmp_path / "values"), str(rank)),
        ]
        env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        )
    for process in processes:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err.decode()
        assert json.loads(out) == [["box0", "box1"], 1, 2]
    assert not list(tmp_path.glob("weft-*"))
