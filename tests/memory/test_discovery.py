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
from weft.memory import discovery, peers
from weft.memory.meeting import Meeting

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


def blind(*places):
    """How a rank answers that does not see these: the first is below TMPDIR, 1 is in /dev/shm."""
    turn = 0

    def answers(said):
        nonlocal turn
        turn += 1
        if turn < 4:
            return {**said, **({"host": "box"} if "host" in said else {})}
        text = "the meeting directory {} cannot be opened"
        return {"problems": [text.format(at) if at in places else None for at in range(2)]}

    return answers


def test_a_directory_that_one_rank_cannot_see_ends_the_meeting_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = []
    real = Meeting.make

    def make(self):
        made.append(self.directory)
        real(self)

    monkeypatch.setattr(Meeting, "make", make)
    zero, one = Threads(2).find(timeout=LONG, rank1=blind(0, 1))
    assert zero == one
    assert zero.startswith("rank 1: the meeting directory 0 cannot be opened")
    assert f"rank 0 is on {socket.gethostname()}" in zero
    assert "rank 1 on box (boot " in zero
    assert "; in /dev/shm, too: rank 1: the meeting directory 1 cannot be opened" in zero
    assert zero.endswith("or one /dev/shm (--ipc=host)")
    assert [os.path.dirname(each) for each in made] == [str(tmp_path), "/dev/shm"]
    assert not any(os.path.exists(each) for each in made)


@pytest.mark.parametrize("unseen", [0, 1])
def test_ranks_meet_where_all_of_them_see_the_directory(unseen, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert Threads(2).find(rank1=blind(unseen)) == ["met", "met"]
    assert list(tmp_path.iterdir()) == []


def test_no_room_for_a_directory_is_said_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert Threads(2).find() == ["met", "met"]  # in /dev/shm
    absent = Meeting(f"{tmp_path}/no/weft-x", b"")
    with monkeypatch.context() as patch:
        patch.setattr(Meeting, "in_shared_memory", lambda self: absent)
        for text in Threads(2).find(timeout=LONG):
            assert re.search("rank 0: cannot make the directory .*set TMPDIR", text)

    def nowhere():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    for text in Threads(2).find(timeout=LONG):
        assert re.search("rank 0: No usable temporary directory .*set TMPDIR", text)


@pytest.mark.parametrize(
    "place",
    [None, 7, {}, "/etc:" + "0" * 64, "/tmp/weft-x"],
)
def test_a_place_that_no_rank_would_tell_is_refused(place, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = {"rank0": lambda said: {**said, **({"place": place} if "place" in said else {})}}
    for text in Threads(2).find(timeout=LONG, **told):
        assert "rank 0 was to send where to meet" in text


@pytest.mark.parametrize("answer", [None, 7, {}, {"problems": 7}, {"problems": [None]}])
def test_what_no_rank_would_answer_is_refused(answer, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    told = {"rank1": lambda said: said if "boot" in said else answer}
    for text in Threads(2).find(timeout=LONG, **told):
        assert text.startswith("rank 1")
    assert list(tmp_path.iterdir()) == []


def test_the_root_of_a_process_is_that_of_its_user_alone(monkeypatch):
    with peers.Peers() as known:
        with pytest.raises(RendezvousFailed, match="rank 1 has not sent its process id"):
            known.root(1)
        known.watch(1, peers.identity())
        os.close(known.root(1))
        before = os.listdir("/proc/self/fd")
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(RendezvousFailed, match=f"root: it belongs to user {user}; all ranks"):
            known.root(1)
        ended = subprocess.Popen(["true"])
        ended.wait()
        known.watch(2, {**peers.identity(), "pid": ended.pid})
        with pytest.raises(RendezvousFailed, match=f"/proc/{ended.pid}: No such file"):
            known.root(2)
        known.watch(3, {**peers.identity(), "namespace": "pid:[1]"})
        with pytest.raises(RendezvousFailed, match="it runs in another pid namespace"):
            known.root(3)
        assert os.listdir("/proc/self/fd") == before


CONTAINER = """
import json, os, socket, subprocess, sys, time
from weft.errors import RendezvousFailed
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

def meet():
    try:
        control = find(exchange, rank, 2, "cpu", 120.0)
    except RendezvousFailed as error:
        return str(error)
    passed = control.exchange_fds(os.memfd_create("x"), 120.0)
    names = control.gather("who", socket.gethostname(), 120.0)
    control.close()
    return [names, os.getpid(), len(passed)]

found = [meet()]
for folder in (os.environ["TMPDIR"], "/dev/shm"):
    subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
    found.append(meet())
print(json.dumps(found))
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
    """Own host names, process ids, networks and mounts; they share TMPDIR, /dev/shm, nothing."""
    for name in ("values", "place"):
        (tmp_path / name).mkdir()
    processes = []
    for rank in range(2):
        inside = 'hostname "$0" && exec "$@"'
        command = [
            *("unshare", "--uts", "--pid", "--net", "--mount-proc", "--fork"),
            *("sh", "-c", inside, f"box{rank}"),
            *(sys.executable, "-c", CONTAINER, str(tmp_path / "values"), str(rank)),
        ]
        place = {"TMPDIR": str(tmp_path / "place"), "PYTHONPATH": os.pathsep.join(sys.path)}
        processes.append(
            subprocess.Popen(
                command,
                env={**os.environ, **place},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    for process in processes:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err.decode()
        in_directory, in_shared_memory, nowhere = json.loads(out)
        assert in_directory == in_shared_memory == [["box0", "box1"], 1, 2]
        assert "rank 0: it runs in another pid namespace; rank 0 is on box0 " in nowhere
        assert "; in /dev/shm, too: rank 1: the meeting directory /dev/shm/weft-" in nowhere
    assert not list((tmp_path / "place").iterdir())
