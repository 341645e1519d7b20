"""Whatever strangers send, the ranks meet; whatever ranks send, errors say it in words."""

import array
import contextlib
import errno
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.memory.hostile import BODIES, JSON_VALUES, framed
from tests.memory.meetings import LONG, SOON, all_ranks, connect, gather, said
from weft.errors import RendezvousFailed
from weft.memory import peers, rendezvous, rendezvous_server
from weft.memory.meeting import ABI, Meeting, credentials
from weft.memory.wire import HEAD, HELLO_LIMIT, MAGIC, Channel, Kind


def test_strangers_are_refused_and_the_ranks_still_meet(meeting):
    """A wrong nonce, garbage, silence and a flood of connections at once."""
    answers = []

    def strangers():
        silent = [connect(meeting) for _ in range(3)]
        loud = connect(meeting)
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        liar = Channel(connect(meeting), limit=HELLO_LIMIT)
        liar.send(Kind.HELLO, said(meeting, nonce="0" * 64), time.monotonic() + 1)
        answers.append(liar.receive(time.monotonic() + 3))
        long = connect(meeting)
        long.sendall(b"weft" + b"\1\0\0\0" + (1 << 31).to_bytes(4, "big"))
        for each in (*silent, loud, liar, long):
            each.close()

    def late(rank):
        time.sleep(0.3)
        return gather(meeting, rank)

    got = all_ranks(lambda: gather(meeting, 0), strangers, lambda: late(1), lambda: late(2))
    assert [got[0], got[2], got[3]] == [[0, 1, 2]] * 3
    assert answers[0].kind is Kind.FAIL
    assert "nonce is not this job's" in answers[0].body


def test_a_rank_with_a_wrong_nonce_learns_why(meeting):
    other = Meeting(meeting.directory, bytes(32))
    hub, liar = all_ranks(
        lambda: gather(meeting, 0, size=2, timeout=0.5),
        lambda: gather(other, 1, size=2, timeout=0.5),
    )
    assert "nonce is not this job's" in str(liar)
    assert "rank 1 of 2 did not come" in str(hub)


@pytest.mark.parametrize("nonce", [None, 7, [], "é" * 64, "", "\ud800" * 64])
def test_a_nonce_of_any_shape_is_compared(meeting, nonce):
    assert not rendezvous_server._trusted(meeting.nonce, {"nonce": nonce})
    assert not rendezvous_server._trusted(meeting.nonce, nonce)
    assert rendezvous_server._trusted(meeting.nonce, {"nonce": meeting.nonce.hex()})


def test_another_user_is_refused(meeting, monkeypatch):
    real = credentials

    def of_another_user(connection):
        """As the hub sees it: only the listening end of a connection has a name."""
        pid, uid = real(connection)
        return pid, 12345 if connection.getsockname() else uid

    for module in (rendezvous_server, rendezvous):
        monkeypatch.setattr(module, "credentials", of_another_user)
    hub, member = all_ranks(
        lambda: gather(meeting, 0, size=2, timeout=0.5),
        lambda: gather(meeting, 1, size=2, timeout=0.5),
    )
    assert "rank 1 of 2 did not come" in str(hub)
    assert isinstance(member, RendezvousFailed)


def test_a_hub_of_another_user_is_refused(meeting, monkeypatch):
    real = credentials

    def of_another_user(connection):
        pid, uid = real(connection)
        return pid, uid if connection.getsockname() else 12345

    for module in (rendezvous_server, rendezvous):
        monkeypatch.setattr(module, "credentials", of_another_user)
    hub, member = all_ranks(
        lambda: gather(meeting, 0, size=2, timeout=0.5),
        lambda: gather(meeting, 1, size=2, timeout=0.5),
    )
    assert "rank 1 of 2 did not come" in str(hub)
    assert f"runs as user 12345 and rank 1 as user {os.geteuid()}" in str(member)


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
    monkeypatch.setattr(rendezvous_server, "HELLO_SECONDS", LONG)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(1) as pool:
        hub = pool.submit(gather, meeting, 0, 2, LONG)
        started = time.monotonic()
        crowd = [connect(meeting) for _ in range(3 * rendezvous_server.STRANGERS)]
        assert gather(meeting, 1, 2, LONG) == [0, 1]
        assert hub.result() == [0, 1]
        assert time.monotonic() - started < SOON
    for each in crowd:
        each.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_that_spoke_too_late_comes_again(meeting, monkeypatch):
    monkeypatch.setattr(rendezvous_server, "HELLO_SECONDS", 0.2)
    real = Channel.send
    late: list[Channel] = []

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
    full: list[int] = []

    def accept(self):
        if len(full) == 1:
            full.append(2)
            raise OSError(errno.EMFILE, "Too many open files")
        connection = real(self)
        full.append(1)
        return connection

    monkeypatch.setattr(rendezvous_server, "HELLO_SECONDS", LONG)
    monkeypatch.setattr(socket.socket, "accept", accept)
    with ThreadPoolExecutor(1) as pool:
        hub = pool.submit(gather, meeting, 0, 2, LONG)
        stranger = connect(meeting)
        assert gather(meeting, 1, 2, LONG) == [0, 1]
        assert hub.result() == [0, 1]
    assert 2 in full
    stranger.close()


HOSTILE = st.one_of(
    st.binary(max_size=64),
    st.builds(framed, BODIES, st.sampled_from(list(Kind)), st.sampled_from([0, 0, 0, 1, 255])),
    st.builds(lambda body, n: framed(body)[:n], BODIES, st.integers(0, 20)),
    st.builds(lambda size: HEAD.pack(MAGIC, 1, 0, 0, size), st.integers(0, (1 << 32) - 1)),
)


def test_no_bytes_of_a_stranger_end_the_meeting(meeting, monkeypatch):
    monkeypatch.setattr(rendezvous_server, "HELLO_SECONDS", 0.5)
    before = len(os.listdir("/proc/self/fd"))
    sockets: list[socket.socket] = []

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
        hub = rendezvous_server.RendezvousServer(meeting, 2, "cpu", peers.Peers())
        ours, theirs = socket.socketpair()
        with contextlib.closing(Channel(theirs, limit=1 << 16)) as end:
            hub.without_hello[ours.fileno()] = (Channel(ours, limit=HELLO_LIMIT), 7, LONG)
            hello = {**good, **fields, "nonce": meeting.nonce.hex()}
            end.socket.sendall(framed(json.dumps(hello).encode()))
            try:
                hub._read_hello(ours.fileno())
            except RendezvousFailed as error:
                str(error).encode()
                assert end.receive(time.monotonic() + 5).kind is Kind.FAIL
            else:
                said = hub.members.get(1)
                assert said is None or repr({**good, **fields}) == repr(good)
                for channel in hub.members.values():
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
        client = rendezvous._RendezvousClient(
            meeting, 1, 2, "cpu", peers.Peers(), LONG, time.monotonic() + LONG
        )
        channel = Channel(ours, limit=HELLO_LIMIT)
        with contextlib.closing(channel), contextlib.closing(theirs):
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            try:
                control = client._greet(channel)
            except RendezvousFailed as error:
                str(error).encode()
            else:
                assert control is None or all(type(pid) is int for pid in control.pids)

    answer()


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
        Meeting.received(directory, nonce)


def test_what_others_put_into_the_directory_stays(meeting):
    path = os.path.join(meeting.directory, "theirs")
    with open(path, "w", encoding="ascii"):
        pass
    meeting.remove()
    assert os.listdir(meeting.directory) == ["theirs"]
    os.unlink(path)
