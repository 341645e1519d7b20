"""Ranks meet, strangers do not disturb them, and nothing named is left."""

import array
import contextlib
import errno
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from weft.errors import InvalidArgument, RendezvousFailed
from weft.memory import peers, rendezvous
from weft.memory.rendezvous import ABI, Meeting, meet
from weft.memory.star import Star
from weft.memory.wire import HEAD, HELLO_LIMIT, MAGIC, Channel, Kind, encode


@pytest.fixture
def meeting():
    meeting = Meeting.open()
    yield meeting
    meeting.remove()


def gather(meeting, rank, size=3, timeout=600.0, device="cpu"):
    """One rank: meet, exchange, leave. Returns what it got, or the error."""
    try:
        star = meet(meeting, rank=rank, size=size, device=device, timeout=timeout)
    except RendezvousFailed as error:
        return error
    try:
        return star.gather("test", rank, timeout)
    finally:
        star.close()


def all_ranks(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def connect(meeting, limit=HELLO_LIMIT):
    """A connection to the hub, which may not listen yet."""
    until = time.monotonic() + 600
    while True:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            stranger.connect(os.path.join(meeting.directory, "hub"))
            return stranger
        except OSError:
            stranger.close()
            assert time.monotonic() < until
            time.sleep(0.002)


def said(meeting, **changes):
    hello = {
        "abi": ABI, "rank": 1, "size": 3, "device": "cpu", "nonce": meeting.nonce.hex()
    }  # fmt: skip
    return encode({**hello, **changes})


def test_all_ranks_meet_and_nothing_named_is_left(meeting):
    ranks = [lambda r=r: gather(meeting, r) for r in range(3)]
    assert all_ranks(*ranks) == [[0, 1, 2]] * 3
    assert not os.path.exists(meeting.directory)


def test_one_rank_alone_needs_no_socket(meeting):
    assert gather(meeting, 0, size=1) == [0]
    assert not os.path.exists(meeting.directory)


def test_names_are_gone_while_the_star_lives(meeting):
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(meet, meeting, rank=r, size=2, device="cpu", timeout=600.0) for r in (0, 1)
        ]
        stars = [call.result(10) for call in calls]
    assert not os.path.exists(meeting.directory)
    with open("/proc/net/unix", encoding="ascii") as file:
        assert meeting.directory not in file.read()
    assert stars[0].pids == stars[1].pids == [os.getpid()] * 2
    for star in stars:
        star.close()


def test_the_directory_may_have_a_long_name(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    meeting = Meeting.open()
    assert meeting.directory.startswith(str(deep))
    assert all_ranks(*[lambda r=r: gather(meeting, r) for r in range(3)]) == [[0, 1, 2]] * 3
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_strangers_are_refused_and_the_ranks_still_meet(meeting):
    """A wrong nonce, garbage, silence and a flood of connections at once."""
    answers = []
    have_come = threading.Event()

    def strangers():
        silent = [connect(meeting) for _ in range(3)]
        loud = connect(meeting)
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        liar = Channel(connect(meeting), limit=HELLO_LIMIT)
        liar.send(Kind.HELLO, said(meeting, nonce="0" * 64), time.monotonic() + 600)
        answers.append(liar.receive(time.monotonic() + 600))
        long = connect(meeting)
        long.sendall(b"weft" + b"\1\0\0\0" + (1 << 31).to_bytes(4, "big"))
        have_come.set()
        for each in (*silent, loud, liar, long):
            each.close()

    def late(rank):
        have_come.wait()
        return gather(meeting, rank)

    got = all_ranks(lambda: gather(meeting, 0), strangers, lambda: late(1), lambda: late(2))
    assert [got[0], got[2], got[3]] == [[0, 1, 2]] * 3
    assert answers[0].kind is Kind.FAIL
    assert "nonce is not this job's" in answers[0].body


def test_a_rank_with_a_wrong_nonce_learns_why(meeting):
    other = Meeting(meeting.directory, bytes(32))
    hub, liar = all_ranks(
        lambda: gather(meeting, 0, size=2, timeout=2.0),
        lambda: gather(other, 1, size=2, timeout=2.0),
    )
    assert "nonce is not this job's" in str(liar)
    assert "rank 1 of 2 did not come" in str(hub)


@pytest.mark.parametrize("nonce", [None, 7, [], "é" * 64, "", "\ud800" * 64])
def test_a_nonce_of_any_shape_is_compared(meeting, nonce):
    assert not rendezvous._trusted(meeting.nonce, {"nonce": nonce})
    assert not rendezvous._trusted(meeting.nonce, nonce)
    assert rendezvous._trusted(meeting.nonce, {"nonce": meeting.nonce.hex()})


def test_another_user_is_refused(meeting, monkeypatch):
    real = rendezvous._peer

    def of_another_user(connection):
        """As the hub sees it: only the listening end of a connection has a name."""
        pid, uid = real(connection)
        return pid, 12345 if connection.getsockname() else uid

    monkeypatch.setattr(rendezvous, "_peer", of_another_user)
    hub, member = all_ranks(
        lambda: gather(meeting, 0, size=2, timeout=2.0),
        lambda: gather(meeting, 1, size=2, timeout=2.0),
    )
    assert "rank 1 of 2 did not come" in str(hub)
    assert isinstance(member, RendezvousFailed)


def test_a_hub_of_another_user_is_refused(meeting, monkeypatch):
    real = rendezvous._peer

    def of_another_user(connection):
        pid, uid = real(connection)
        return pid, uid if connection.getsockname() else 12345

    monkeypatch.setattr(rendezvous, "_peer", of_another_user)
    hub, member = all_ranks(
        lambda: gather(meeting, 0, size=2, timeout=2.0),
        lambda: gather(meeting, 1, size=2, timeout=2.0),
    )
    assert "rank 1 of 2 did not come" in str(hub)
    assert f"runs as user 12345 and rank 1 as user {os.geteuid()}" in str(member)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"abi": 99}, f"abi {ABI} and 99"),
        ({"size": 4}, "size 3 and 4"),
        ({"device": "cuda"}, "device 'cpu' and 'cuda'"),
        ({"rank": 0}, "came as rank 0, which is not one of 1..2"),
        ({"rank": 3}, "came as rank 3, which is not one of 1..2"),
        ({"rank": "1"}, "came as rank '1', which is not one of"),
        ({"rank": True}, "came as rank True, which is not one of"),
        ({"rank": 1.0}, "came as rank 1.0, which is not one of"),
        ({"rank": "\ud800"}, "came as rank '\\ud800', which is not one of"),
        ({"abi": None}, f"abi {ABI} and None"),
        ({"size": 3.0}, "size 3 and 3.0"),
        ({"rank": 2}, "came as rank 2, which another process has taken"),
    ],
)
def test_ranks_that_do_not_fit_together_all_learn_why(meeting, changes, text):
    def misfit():
        time.sleep(0.5)  # rank 2 is in by then
        channel = Channel(connect(meeting), limit=HELLO_LIMIT)
        channel.send(Kind.HELLO, said(meeting, **changes), time.monotonic() + 600)
        frame = channel.receive(time.monotonic() + 600)
        channel.close()
        return frame.body

    hub, member, told = all_ranks(lambda: gather(meeting, 0), lambda: gather(meeting, 2), misfit)
    for each in (hub, member, told):
        assert text in str(each)
    assert isinstance(hub, RendezvousFailed)
    assert isinstance(member, RendezvousFailed)


def test_missing_ranks_are_named_at_the_deadline(meeting):
    started = time.monotonic()
    hub, member = all_ranks(
        lambda: gather(meeting, 0, size=4, timeout=2.0),
        lambda: gather(meeting, 2, size=4, timeout=2.0),
    )
    assert "rank 1, 3 of 4 did not come" in str(hub)
    assert "rank 1, 3 of 4 did not come" in str(member)
    assert time.monotonic() - started < 100.0
    assert not os.path.exists(meeting.directory)


def test_without_a_hub_the_members_give_up(meeting):
    assert "rank 0 did not listen" in str(gather(meeting, 1, timeout=0.1))


def test_a_meeting_that_is_over_is_said_at_once(meeting):
    meeting.remove()
    started = time.monotonic()
    assert "cannot be opened" in str(gather(meeting, 1, timeout=600.0))
    assert time.monotonic() - started < 100.0


def test_a_rank_that_leaves_before_all_have_met(meeting):
    def leaver():
        channel = Channel(connect(meeting), limit=HELLO_LIMIT)
        channel.send(Kind.HELLO, said(meeting), time.monotonic() + 600)
        time.sleep(0.1)
        channel.close()

    started = time.monotonic()
    hub, _ = all_ranks(lambda: gather(meeting, 0, timeout=600.0), leaver)
    assert f"rank 1 (pid {os.getpid()}) left before all ranks had met" in str(hub)
    assert time.monotonic() - started < 100.0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_directory_open_to_others_is_refused(meeting, rank):
    os.chmod(meeting.directory, 0o755)
    error = gather(meeting, rank, timeout=1.0)
    assert "mode 0755" in str(error)
    assert "mode 0700" in str(error)


def test_a_link_in_place_of_the_directory_is_refused(meeting, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(meeting.directory)
    assert "cannot be opened" in str(gather(Meeting(str(link), meeting.nonce), 1, timeout=1.0))


def test_a_second_hub_is_refused(meeting):
    first = threading.Thread(target=gather, args=(meeting, 0, 3, 3.0))
    first.start()
    connect(meeting).close()
    assert "cannot host the meeting" in str(gather(meeting, 0, timeout=0.5))
    connect(meeting).close()
    first.join()
    # Nor is the first one's meeting harmed: it ends with its own directory gone.
    assert not os.path.exists(meeting.directory)


def test_ranks_out_of_range_are_refused(meeting):
    with pytest.raises(InvalidArgument, match="rank is 3 and size is 3"):
        meet(meeting, rank=3, size=3, device="cpu", timeout=1.0)


def test_no_descriptor_is_left_by_success_or_failure():
    def once():
        good, bad = Meeting.open(), Meeting.open()
        all_ranks(*[lambda r=r: gather(good, r) for r in range(3)])
        all_ranks(*[lambda r=r: gather(bad, r, timeout=0.05) for r in (0, 2)])

    once()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        once()
    assert len(os.listdir("/proc/self/fd")) == before


HUB = """
import sys, time
from weft.memory.rendezvous import Meeting, meet
star = meet(Meeting(sys.argv[1], bytes.fromhex(sys.argv[2])), rank=0, size=int(sys.argv[3]),
            device="cpu", timeout=300.0)
time.sleep(300)
"""


@contextlib.contextmanager
def hub_process(meeting, size):
    """Rank 0 in a process of its own."""
    arguments = [meeting.directory, meeting.nonce.hex(), str(size)]
    process = subprocess.Popen([sys.executable, "-c", HUB, *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


LONG = 1000.0  # a deadline that no test waits for
SOON = 300.0  # much less than that, and enough for a busy machine


def test_a_hub_that_is_killed_while_it_hosts_ends_the_meeting(meeting):
    """For a rank that is in, for one that comes later, and for the directory."""
    with hub_process(meeting, 3) as hub, ThreadPoolExecutor(1) as pool:
        connect(meeting).close()
        inside = pool.submit(gather, meeting, 1, 3, LONG)
        time.sleep(0.2)
        hub.kill()
        hub.wait()
        started = time.monotonic()
        assert re.search(
            rf"rank 0 \(pid {hub.pid}\) left before all|rank 0 no longer listens",
            str(inside.result()),
        )
        assert not os.path.exists(meeting.directory)
        assert "cannot be opened" in str(gather(meeting, 2, timeout=LONG))
        assert time.monotonic() - started < SOON


def test_a_name_where_nobody_listens_says_that_rank_0_is_gone(meeting):
    with socket.socket(socket.AF_UNIX) as left:  # as a killed process leaves it
        left.bind(f"{meeting.directory}/hub.bound")
        left.listen()
        os.link(f"{meeting.directory}/hub.bound", f"{meeting.directory}/hub")
    started = time.monotonic()
    assert "rank 0 no longer listens" in str(gather(meeting, 1, timeout=LONG))
    assert time.monotonic() - started < SOON
    assert not os.path.exists(meeting.directory)


def test_a_hub_that_was_killed_before_it_listened_is_waited_for(meeting, monkeypatch):
    """The socket has a name then, but not the one that others look for."""
    listens = threading.Event()
    real = socket.socket.listen

    def slowly(self, backlog):
        time.sleep(0.5)
        listens.set()
        real(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", slowly)
    hub, member = all_ranks(lambda: gather(meeting, 0, size=2), lambda: gather(meeting, 1, size=2))
    assert listens.is_set()
    assert hub == member == [0, 1]


@contextlib.contextmanager
def known_process():
    """A process that lives, and what a rank in it would tell of itself."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        started = peers._started(process.pid)
        namespace = peers._namespace()
        yield process, {"pid": process.pid, "started": started, "namespace": namespace}
    finally:
        process.kill()
        process.wait()


def with_peers(meeting, rank, told, **options):
    """One rank that knows the processes of the others."""
    with peers.Peers() as known:
        for other, said in told.items():
            known.heard(other, said)
        try:
            meet(meeting, rank=rank, device="cpu", peers=known, **options)
        except RendezvousFailed as error:
            return str(error)
        return "met"


def test_a_member_that_dies_before_it_comes_ends_the_meeting(meeting):
    with known_process() as (process, told), ThreadPoolExecutor(2) as pool:
        options = {"size": 3, "timeout": LONG}
        hub = pool.submit(with_peers, meeting, 0, {2: told}, **options)
        member = pool.submit(with_peers, meeting, 1, {}, **options)
        connect(meeting).close()
        time.sleep(0.1)
        assert not hub.done()
        started = time.monotonic()
        process.kill()
        text = f"rank 2 (pid {process.pid}) died before all ranks had met"
        assert text in hub.result()
        assert text in member.result()
        assert time.monotonic() - started < SOON
    assert not os.path.exists(meeting.directory)


def test_a_member_that_dies_after_half_a_hello_ends_the_meeting(meeting):
    """Its connection says nothing: anybody's could end like that."""
    with known_process() as (process, told), ThreadPoolExecutor(1) as pool:
        hub = pool.submit(with_peers, meeting, 0, {1: told}, size=2, timeout=LONG)
        half = connect(meeting)
        half.sendall(b"weft" + b"\1\0\0\0")
        half.close()
        time.sleep(0.1)
        assert not hub.done()
        process.kill()
        assert "rank 1 (pid " in hub.result()


@pytest.mark.parametrize("bound", [False, True])
def test_a_hub_that_dies_before_it_listens_ends_the_meeting(meeting, bound):
    if bound:
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(f"{meeting.directory}/hub.bound")
    with known_process() as (process, told), ThreadPoolExecutor(1) as pool:
        member = pool.submit(with_peers, meeting, 1, {0: told}, size=2, timeout=LONG)
        time.sleep(0.1)
        assert not member.done()
        process.kill()
        assert "rank 0 (pid " in member.result()
    assert not os.path.exists(meeting.directory)


def test_ranks_of_another_namespace_have_the_deadline(meeting):
    with known_process() as (process, told):
        told["namespace"] = "pid:[1]"
        process.kill()
        process.wait()
        found = with_peers(meeting, 0, {1: told}, size=2, timeout=0.2)
    assert "rank 1 of 2 did not come" in found
    assert "rank 1: it runs in another pid namespace" in found


def test_a_process_id_that_went_to_another_process_is_no_rank(meeting):
    with known_process() as (_, told):
        told["started"] += 1
        found = with_peers(meeting, 0, {1: told}, size=2, timeout=LONG)
    assert "died before all ranks had met" in found


@pytest.mark.parametrize(
    "said",
    [None, [], {}, {"pid": 0}, {"pid": "7", "started": 1}, {"pid": 1 << 40, "started": 1}],
)
def test_what_tells_of_no_process_is_not_watched(said):
    with peers.Peers() as known:
        known.heard(1, said)
        assert not known.knows(1)
        assert known.dead() == []


def test_peers_leave_no_descriptor():
    before = len(os.listdir("/proc/self/fd"))
    with known_process() as (_, told), peers.Peers() as known:
        known.heard(1, told)
        known.heard(1, told)
        known.heard(2, peers.identity())
        assert len(os.listdir("/proc/self/fd")) == before + 2
        assert known.dead() == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_whoever_started_the_ranks_can_end_the_meeting(meeting):
    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(gather, meeting, r, 4, LONG) for r in (0, 1)]
        connect(meeting).close()
        started = time.monotonic()
        meeting.end("rank 3 had no memory \ud800")
        for rank in ranks:
            assert "rank 3 had no memory" in str(rank.result())
        assert time.monotonic() - started < SOON
    assert not os.path.exists(meeting.directory)
    meeting.end("it is over already")
    assert not os.path.exists(meeting.directory)


def test_the_end_reaches_members_without_a_hub(meeting):
    meeting.end("rank 0 had no memory")
    assert str(gather(meeting, 1, timeout=LONG)) == "rank 0 had no memory"


@pytest.mark.parametrize("odd", ["text", "pipe", "directory", "link"])
def test_a_strangers_note_ends_nothing(meeting, odd):
    note = os.path.join(meeting.directory, "ended")
    if odd == "text":
        with open(note, "w", encoding="ascii") as file:
            file.write("0" * 64 + "go home")
    elif odd == "pipe":
        os.mkfifo(note)
    elif odd == "directory":
        os.mkdir(note)
    else:
        os.symlink("/etc/passwd", note)
    ranks = [lambda r=r: gather(meeting, r, size=2, timeout=LONG) for r in range(2)]
    assert all_ranks(*ranks) == [[0, 1]] * 2
    if odd == "directory":
        os.rmdir(note)
        meeting.remove()
    assert not os.path.exists(meeting.directory)


def test_a_crowd_of_silent_strangers_delays_nobody(meeting, monkeypatch):
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", LONG)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(1) as pool:
        hub = pool.submit(gather, meeting, 0, 2, LONG)
        started = time.monotonic()
        crowd = [connect(meeting) for _ in range(3 * rendezvous.STRANGERS)]
        assert gather(meeting, 1, 2, LONG) == [0, 1]
        assert hub.result() == [0, 1]
        assert time.monotonic() - started < SOON
    for each in crowd:
        each.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_spoke_too_late_comes_again(meeting, monkeypatch):
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.2)
    real = Channel.send
    late = []

    def once_late(self, kind, body, deadline, **options):
        if kind is Kind.HELLO and not late:
            late.append(self)
            time.sleep(1.0)
        real(self, kind, body, deadline, **options)

    monkeypatch.setattr(Channel, "send", once_late)
    ranks = [lambda r=r: gather(meeting, r, size=2, timeout=LONG) for r in range(2)]
    assert all_ranks(*ranks) == [[0, 1]] * 2
    assert late


def test_a_hub_at_its_limit_of_descriptors_makes_room(meeting, monkeypatch):
    """A stranger's connection may be the last one that fits."""
    real = socket.socket.accept
    full = []

    def accept(self):
        if len(full) == 1:
            full.append(2)
            raise OSError(errno.EMFILE, "Too many open files")
        connection = real(self)
        full.append(1)
        return connection

    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", LONG)
    monkeypatch.setattr(socket.socket, "accept", accept)
    with ThreadPoolExecutor(1) as pool:
        hub = pool.submit(gather, meeting, 0, 2, LONG)
        stranger = connect(meeting)
        assert gather(meeting, 1, 2, LONG) == [0, 1]
        assert hub.result() == [0, 1]
    assert 2 in full
    stranger.close()


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def framed(body, kind=Kind.HELLO, carries=0):
    return HEAD.pack(MAGIC, kind, carries, 0, len(body)) + body


BODIES = st.one_of(
    st.binary(max_size=64),
    JSON_VALUES.map(lambda value: json.dumps(value).encode()),
    JSON_VALUES.map(lambda value: json.dumps({"nonce": value}).encode()),
    st.sampled_from(
        [
            b'{"nonce":"\\ud800"}', b'{"nonce":NaN}', b'{"nonce":1e999}', b"[" * 4000,
            b'{"nonce":' + b"9" * 4000 + b"}", b'{"nonce":"' + b"\xff" * 64 + b'"}', b"",
        ]
    ),
)  # fmt: skip
HOSTILE = st.one_of(
    st.binary(max_size=64),
    st.builds(framed, BODIES, st.sampled_from(list(Kind)), st.sampled_from([0, 0, 0, 1, 255])),
    st.builds(lambda body, n: framed(body)[:n], BODIES, st.integers(0, 20)),
    st.builds(lambda size: HEAD.pack(MAGIC, 1, 0, 0, size), st.integers(0, (1 << 32) - 1)),
)


def test_no_bytes_of_a_stranger_end_the_meeting(meeting, monkeypatch):
    monkeypatch.setattr(rendezvous, "HELLO_SECONDS", 0.5)
    before = len(os.listdir("/proc/self/fd"))
    sockets = []

    @settings(max_examples=150, deadline=None, database=None)
    @given(data=HOSTILE, descriptors=st.integers(0, 3), leaves=st.booleans())
    @example(data=framed(b'{"nonce":"\\ud800"}'), descriptors=0, leaves=False)
    def attack(data, descriptors, leaves):
        assert not hub.done(), hub.result()
        stranger = connect(meeting)
        fds = array.array("i", [stranger.fileno()] * descriptors)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if descriptors else []
        with contextlib.suppress(OSError):  # it may have been refused already
            stranger.sendmsg([data], control)
        if leaves:
            stranger.close()
        else:
            sockets.append(stranger)

    with ThreadPoolExecutor(1) as pool:
        hub = pool.submit(gather, meeting, 0, 2, LONG)
        try:
            attack()
        finally:
            member = gather(meeting, 1, 2, LONG)
    assert hub.result() == member == [0, 1]
    for each in sockets:
        each.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_hello_with_the_nonce_and_odd_fields_is_an_error_in_words(meeting):
    """Only a rank of this job has the nonce; what it says otherwise may be anything."""
    good = {"abi": ABI, "rank": 1, "size": 2, "device": "cpu"}

    @settings(max_examples=60, deadline=None, database=None)
    @given(st.dictionaries(st.sampled_from(sorted(good)), JSON_VALUES, min_size=1))
    def admit(fields):
        lobby = rendezvous._Lobby(meeting, 2, "cpu", peers.Peers())
        ours, theirs = socket.socketpair()
        with contextlib.closing(Channel(theirs, limit=1 << 16)) as end:
            lobby.unheard[ours.fileno()] = (Channel(ours, limit=HELLO_LIMIT), 7, LONG)
            hello = {**good, **fields, "nonce": meeting.nonce.hex()}
            end.socket.sendall(framed(json.dumps(hello).encode()))
            try:
                lobby._hear_stranger(ours.fileno())
            except RendezvousFailed as error:
                str(error).encode()
                assert end.receive(time.monotonic() + 5).kind is Kind.FAIL
            else:
                said = lobby.members.get(1)
                assert said is None or repr({**good, **fields}) == repr(good)
                for channel in lobby.members.values():
                    channel.close()

    admit()


ANSWERS = st.one_of(
    st.builds(framed, BODIES, st.sampled_from(list(Kind)), st.sampled_from([0, 0, 0, 1])),
    st.builds(
        framed,
        st.lists(JSON_VALUES, max_size=3).map(lambda value: json.dumps(value).encode()),
        st.just(Kind.WELCOME),
    ),
)


def test_no_answer_of_a_hub_is_more_than_an_error_in_words(meeting):
    @settings(max_examples=100, deadline=None, database=None)
    @given(ANSWERS)
    @example(framed(b'["\\ud800",1]', Kind.WELCOME))
    @example(framed(b"[1]", Kind.WELCOME))
    @example(framed(b"{}", Kind.WELCOME))
    @example(framed(b'"\\ud800"', Kind.FAIL))
    def answer(data):
        ours, theirs = socket.socketpair()
        newcomer = rendezvous._Newcomer(
            meeting, 1, 2, "cpu", peers.Peers(), LONG, time.monotonic() + LONG
        )
        channel = Channel(ours, limit=HELLO_LIMIT)
        with contextlib.closing(channel), contextlib.closing(theirs):
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            try:
                star = newcomer._greet(channel)
            except RendezvousFailed as error:
                str(error).encode()
            else:
                assert star is None or all(type(pid) is int for pid in star.pids)

    answer()


FRAMES = st.one_of(
    st.builds(framed, BODIES, st.sampled_from(list(Kind)), st.sampled_from([0, 0, 0, 1])),
    st.builds(
        lambda value, op, n, kind: framed(
            json.dumps({"op": op, "n": n, "value": value}).encode(), kind
        ),
        JSON_VALUES,
        st.just("test") | JSON_VALUES,
        st.just(1) | JSON_VALUES,
        st.sampled_from([Kind.VALUE, Kind.VALUE, Kind.DESCRIPTOR, Kind.RESULT]),
    ),
)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", ["gather", "exchange_fds"])
def test_no_frame_of_a_rank_is_more_than_an_error_in_words(rank, call):
    deep = b'{"op":"test","n":1,"value":' + b"[" * 900 + b"]" * 900 + b"}"

    @settings(max_examples=60, deadline=None, database=None)
    @given(FRAMES)
    @example(framed(b'{"op":"test","n":1,"value":NaN}', Kind.VALUE))
    @example(framed(b'{"op":"test","n":1,"value":1e999}', Kind.VALUE))
    @example(framed(deep, Kind.VALUE))
    @example(framed(b"7", Kind.RESULT))
    @example(framed(b'["\\ud800"]', Kind.RESULT))
    @example(framed(b'"\\ud800"', Kind.BYE))
    def talk(data):
        ours, theirs = socket.socketpair()
        star = Star(rank, 2, {1 - rank: Channel(ours, limit=1 << 16)}, [7, 8])
        with contextlib.closing(star), contextlib.closing(theirs):
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            try:
                if call == "gather":
                    assert len(star.gather("test", 5, LONG)) == 2
                else:
                    for fd in star.exchange_fds(ours.fileno(), LONG):
                        os.close(fd)
            except RendezvousFailed as error:
                str(error).encode()

    before = len(os.listdir("/proc/self/fd"))
    talk()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("directory", "nonce"),
    [
        (None, "0" * 64),
        ("weft-1", "0" * 64),
        ("/tmp/other", "0" * 64),
        ("/tmp/weft-\0", "0" * 64),
        ("/tmp/weft-1", None),
        ("/tmp/weft-1", "0" * 63),
        ("/tmp/weft-1", "g" * 64),
        ("/tmp/weft-1", "\ud800" * 64),
    ],
)
def test_a_place_that_no_rank_would_choose_is_refused(directory, nonce):
    with pytest.raises(ValueError, match="directory|path|hex"):
        Meeting.told(directory, nonce)


def test_what_others_put_into_the_directory_stays(meeting):
    path = os.path.join(meeting.directory, "theirs")
    with open(path, "w", encoding="ascii"):
        pass
    meeting.remove()
    assert os.listdir(meeting.directory) == ["theirs"]
    os.unlink(path)


def test_a_temporary_directory_that_is_not_there_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(RendezvousFailed, match="cannot make the directory .*; set TMPDIR"):
        Meeting.open()


def test_a_proc_of_another_namespace_is_said(meeting, monkeypatch):
    real = os.path.exists
    monkeypatch.setattr(
        os.path, "exists", lambda path: not str(path).startswith("/proc/self/fd/") and real(path)
    )
    with pytest.raises(RendezvousFailed, match=r"/proc does not show .*--mount-proc.*--pid=host"):
        meeting.check()


def test_a_killed_hub_is_named(meeting):
    """The hub is another process; it dies after the meeting."""
    with hub_process(meeting, 2) as hub:
        star = meet(meeting, rank=1, size=2, device="cpu", timeout=LONG)
        assert star.pids == [hub.pid, os.getpid()]
        hub.kill()
        with pytest.raises(RendezvousFailed, match=rf"rank 0 \(pid {hub.pid}\) died"):
            star.gather("test", 1, LONG)
        with pytest.raises(RendezvousFailed, match=r"rank 0 .* died"):
            star.gather("test", 1, LONG)
        star.close()
