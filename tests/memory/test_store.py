"""Ranks of another launcher: the store in which they find each other."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from tests.memory.baseline import raised
from weft.errors import RankFailed, RendezvousFailed
from weft.memory import discovery, liveness, store
from weft.memory.group import Group
from weft.memory.launch import launch

LONG = 1000.0  # a deadline that no test waits for
SOON = 40.0  # much less than that, and enough for a busy machine


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment(group, port, address="127.0.0.1", secret=None):
    os.environ.update(
        RANK=str(group.rank), WORLD_SIZE=str(group.size), LOCAL_RANK=str(group.rank),
        MASTER_ADDR=address, MASTER_PORT=str(port),
    )  # fmt: skip
    os.environ.pop("WEFT_SECRET", None)
    if secret is not None:
        os.environ["WEFT_SECRET"] = secret


def listening(port):
    """Local addresses, in the kernel's hexadecimal, at which somebody listens on `port`."""
    found = set()
    for kind in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/net/{kind}") as file:
            for line in file.readlines()[1:]:
                local, state = line.split()[1], line.split()[3]
                if state == "0A" and int(local.partition(":")[2], 16) == port:
                    found.add(local.partition(":")[0])
    return sorted(found)


def look_who_listens(group, port):
    environment(group, port)
    seen = None
    if group.rank == 1:
        until = time.monotonic() + LONG
        while not (seen := listening(port)):
            assert time.monotonic() < until
            time.sleep(0.01)
    with Group.from_env(device="cpu", timeout=LONG) as found:
        found.barrier()
    return seen


def test_the_store_listens_on_the_loopback_address_alone():
    assert launch(look_who_listens, free_port(), ranks=2)[1] == ["0100007F"]


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost", "0.0.0.0", "127.0.0.9"])
def test_a_loopback_address_is_bound_as_it_is_given(address):
    port = free_port()
    served = store.serve(address, port, SOON)
    assert served is not None
    assert served.port == port
    assert served.host == ("127.0.0.9" if address.endswith("9") else "127.0.0.1")
    assert listening(port) == ["0900007F" if address.endswith("9") else "0100007F"]
    assert store.serve(served.host, port, SOON) is None  # somebody serves there


def test_an_address_of_another_machine_is_refused(monkeypatch):
    with pytest.raises(RendezvousFailed, match=r"'192.0.2.1' and rank 0 cannot listen there .*set"):
        store.serve("192.0.2.1", free_port(), SOON)
    for name in ("no such host", "a" * 300, "\ud800"):
        with pytest.raises(RendezvousFailed, match=r"has no address .*set MASTER_ADDR=127.0.0.1"):
            store.serve(name, free_port(), SOON)


def meet_often(group, port, secret):
    """Again and again, without a pause: no call may take the last one's store for its own."""
    environment(group, port, secret=secret)
    sums = []
    for _ in range(6):
        with Group.from_env(device="cpu", timeout=LONG) as found:
            sums.append(found.size)
    return sums


@pytest.mark.parametrize("secret", [None, "known to all"])
def test_groups_can_be_made_one_after_the_other(secret):
    assert launch(meet_often, free_port(), secret, ranks=3) == [[3] * 6] * 3


def stranger(port):
    """A connection to the ranks' store: nothing asks who it is."""
    until = time.monotonic() + LONG
    while True:
        try:
            limit = timedelta(seconds=20)
            return TCPStore("127.0.0.1", port, None, False, limit, wait_for_workers=False)
        except RuntimeError:
            assert time.monotonic() < until


def disturb(group, port, secret, written):
    """Rank 2 does not come; a stranger writes in its place."""
    environment(group, port, secret=secret)
    if group.rank == 2:
        PrefixStore("weft/0", stranger(port)).set(
            "1/2",
            bytes.fromhex(written),  # type: ignore[arg-type]
        )
        return None
    return raised(Group.from_env, device="cpu", timeout=LONG)


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (b"garbage{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"NaN", "not JSON"),
        (b"7", "rank 2 was to send where it runs and sent 7"),
        (b'{"host":7,"boot":null}', "rank 2 was to send where it runs"),
        (b"1" * (2 << 20), "2097152 bytes, where at most 1048576 are accepted"),
    ],
)
def test_a_stray_value_in_the_store_is_an_error_in_words(written, text):
    results = launch(disturb, free_port(), None, written.hex(), ranks=3)
    for kind, said, seconds in results[:2]:
        assert kind == RendezvousFailed.__name__
        assert seconds < SOON
        assert text in said
        assert "1/2 in the store at 127.0.0.1" in said or "rank 2 was to send" in said


@pytest.mark.parametrize("written", [b"garbage{", b'{"host":"a","boot":"b"}', b"0" * 64 + b"{}"])
def test_a_value_without_the_secret_is_not_believed(written):
    results = launch(disturb, free_port(), "ours", written.hex(), ranks=3)
    for _, text, _ in results[:2]:
        assert "1/2 in the store at 127.0.0.1" in text
        assert "WEFT_SECRET" in text


def differ_in_secret(group, port, secrets):
    environment(group, port, secret=secrets[group.rank])
    return raised(Group.from_env, device="cpu", timeout=LONG)


@pytest.mark.parametrize("secrets", [["one", "other"], [None, "other"], ["one", None]])
def test_ranks_with_different_secrets_are_told(secrets):
    results = launch(differ_in_secret, free_port(), secrets, ranks=2)
    assert [kind for kind, _, _ in results] == [RendezvousFailed.__name__] * 2
    assert all("WEFT_SECRET" in text for _, text, _ in results)


def test_a_seal_holds_for_one_key_alone(monkeypatch):
    monkeypatch.setenv("WEFT_SECRET", "ours")
    with liveness.Peers() as known:
        exchange = store.StoreExchange(HashStore(), "a store", 0, 2, 20.0, known)
        exchange._group = 1
        sealed = exchange._mac(1, b"5") + b"5"
        assert exchange._open(1, sealed) == 5
        for rank, group, data in ((0, 1, sealed), (1, 2, sealed), (1, 1, sealed[:-1] + b"6")):
            exchange._group = group
            with pytest.raises(RendezvousFailed, match="not written with this rank's WEFT_SECRET"):
                exchange._open(rank, data)


SERVER = """
import socket, sys, time
from weft.memory.store import serve
store = serve("127.0.0.1", int(sys.argv[1]), 60.0)
time.sleep(600)
"""


def test_a_server_that_is_stopped_is_given_up_at_the_deadline():
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", SERVER, str(port)]) as server:
        try:
            client = stranger(port)
            os.kill(server.pid, signal.SIGSTOP)
            with liveness.Peers() as known:
                exchange = store.StoreExchange(client, "the store", 1, 2, 0.2, known)
                with pytest.raises(
                    RendezvousFailed, match=r"the store did not answer rank 1 .*0.2"
                ):
                    exchange(1)
        finally:
            server.kill()


def join_torch_afterwards(group, port):
    """The port that rank 0 serves is the one that torch.distributed wants to serve."""
    environment(group, port)
    with Group.from_env(device="cpu", timeout=LONG) as found:
        found.barrier()
    dist.init_process_group("gloo")
    with Group.from_torch(device="cpu", timeout=LONG) as found:
        said = found.all_gather(found.rank)
    dist.destroy_process_group()
    return said


def test_torch_goes_on_with_the_same_store():
    assert launch(join_torch_afterwards, free_port(), ranks=3) == [[0, 1, 2]] * 3


def die_at(group, port, victim, place, out):
    """`victim` is killed on its way; the others write down what they were told.

    In the exchange one more rank never comes, so that the others still wait there; the victim dies
    when it has read what they wrote, since a rank that has yet to connect cannot know of a death.
    """
    environment(group, port)

    def dies(*args, **options):
        os.kill(os.getpid(), signal.SIGKILL)

    if group.rank == victim:
        if place == "exchange":
            real, unread = store.StoreExchange._read, {0, 1, 2} - {victim}

            def reads(self, name):
                found = real(self, name)
                unread.discard(name)
                return found if unread else dies()

            store.StoreExchange._read = reads  # type: ignore[method-assign]
        else:
            discovery.meet = dies  # type: ignore[attr-defined]
    if place == "exchange" and group.rank == 3:
        return
    told = raised(Group.from_env, device="cpu", timeout=LONG)
    with open(f"{out}/rank-{group.rank}", "w", encoding="utf-8") as file:
        json.dump(told, file)


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("place", ["exchange", "meet"])
def test_a_rank_that_dies_on_its_way_ends_the_meeting(victim, place, tmp_path, monkeypatch):
    monkeypatch.setattr("weft.memory.processes.GRACE", SOON)
    with pytest.raises(RankFailed, match=f"rank {victim} of 4 died"):
        launch(die_at, free_port(), victim, place, str(tmp_path), ranks=4)
    named = rf"rank {victim} \(pid \d+\) died before all ranks had met"
    if victim == 0:  # with it goes the store, perhaps before its value was read there
        named += "|that serves it, in most jobs rank 0, "
    told = [json.loads(each.read_text()) for each in tmp_path.glob("rank-*")]
    assert len(told) == (2 if place == "exchange" else 3)
    for kind, text, seconds in told:
        assert kind == RendezvousFailed.__name__
        assert seconds < SOON
        assert re.search(named, text)
