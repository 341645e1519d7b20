"""Whatever strangers send, the ranks meet; whatever ranks send, errors say it in words."""

import contextlib
import errno
import json
import math
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.memory.hostile import BODIES, JSON_VALUES
from tests.memory.meetings import LONG, SOON, all_ranks, answer, connect, gather, said
from weft.errors import InvalidArgument, RendezvousFailed
from weft.memory import peers, rendezvous
from weft.memory.meeting import Meeting, credentials


def test_strangers_are_refused_and_the_ranks_still_meet(meeting):
    """A wrong nonce, garbage and silence at once."""
    answers = []

    def strangers():
        silent = [connect(meeting) for _ in range(3)]
        loud = connect(meeting)
        loud.send(b"GET / HTTP/1.1\r\n\r\n" * 10)
        liar = connect(meeting)
        liar.send(said(meeting, nonce="0" * 64))
        answers.append(answer(liar))
        for each in (*silent, loud, liar):
            each.close()

    def late(rank):
        time.sleep(0.3)
        return gather(meeting, rank)

    got = all_ranks(lambda: gather(meeting, 0), strangers, lambda: late(1), lambda: late(2))
    assert [got[0], got[2], got[3]] == [[0, 1, 2]] * 3
    assert "nonce is not this job's" in answers[0]["fail"]


def test_a_rank_with_a_wrong_nonce_learns_why(meeting):
    other = Meeting(meeting.directory, bytes(32))
    zero, liar = all_ranks(
        lambda: gather(meeting, 0, size=2, timeout=0.5),
        lambda: gather(other, 1, size=2, timeout=0.5),
    )
    assert "nonce is not this job's" in str(liar)
    assert isinstance(zero, RendezvousFailed)


@pytest.mark.parametrize("nonce", [None, 7, [], "é" * 64, "", "\ud800" * 64])
def test_a_nonce_of_any_shape_is_compared(meeting, nonce):
    assert not rendezvous._trusted(meeting.nonce, {"nonce": nonce})
    assert rendezvous._trusted(meeting.nonce, {"nonce": meeting.nonce.hex()})


@pytest.mark.parametrize("listening", [True, False])
def test_another_user_is_refused(meeting, monkeypatch, listening):
    """As either end sees it: only the listening end of a connection has a name."""

    def of_another_user(connection):
        pid, uid = credentials(connection)
        return pid, 12345 if bool(connection.getsockname()) == listening else uid

    monkeypatch.setattr(rendezvous, "credentials", of_another_user)
    zero, one = all_ranks(
        lambda: gather(meeting, 0, size=2, timeout=0.5),
        lambda: gather(meeting, 1, size=2, timeout=0.5),
    )
    assert isinstance(zero, RendezvousFailed)
    if listening:
        assert "rank 0 (pid " in str(one)
    else:
        assert f"runs as user 12345 and rank 1 as user {os.geteuid()}" in str(one)


def test_a_crowd_of_silent_strangers_delays_nobody(meeting):
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(gather, meeting, 0, 2, LONG)
        started = time.monotonic()
        crowd = [connect(meeting) for _ in range(200)]
        assert gather(meeting, 1, 2, LONG) == [0, 1]
        assert zero.result() == [0, 1]
        assert time.monotonic() - started < SOON
    for each in crowd:
        each.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_rank_at_its_limit_of_descriptors_says_so(meeting, monkeypatch):
    def accept(self):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket.socket, "accept", accept)
    for error in all_ranks(*[lambda r=r: gather(meeting, r, 2, LONG) for r in range(2)]):
        assert "rank 0 cannot meet the others in " in str(error) or "rank 0 (pid " in str(error)
    assert not os.path.exists(meeting.directory)


def test_no_message_of_a_stranger_ends_the_meeting(meeting):
    before = len(os.listdir("/proc/self/fd"))
    sockets: list[socket.socket] = []

    @settings(max_examples=150, deadline=None, database=None)
    @given(data=BODIES, descriptors=st.integers(0, 3), leaves=st.booleans())
    @example(data=b'{"nonce":"\\ud800"}', descriptors=0, leaves=False)
    @example(data=b'{"fail":"go home"}', descriptors=0, leaves=False)
    def attack(data, descriptors, leaves):
        assert not zero.done(), zero.result()
        stranger = connect(meeting)
        with contextlib.suppress(OSError):  # it may have been refused already
            socket.send_fds(stranger, [data], [stranger.fileno()] * descriptors)
        if leaves:
            stranger.close()
        else:
            sockets.append(stranger)

    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(gather, meeting, 0, 2, LONG)
        try:
            attack()
        finally:
            one = gather(meeting, 1, 2, LONG)
    assert zero.result() == one == [0, 1]
    for each in sockets:
        each.close()
    assert len(os.listdir("/proc/self/fd")) == before


def rank_that_reads(meeting, data, called):
    """Rank 1 of 3 has `data` of a connection: to rank 0, or from anybody. What it made of it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rank = rendezvous._Rendezvous(meeting, 1, 3, "cpu", peers.Peers())
    with contextlib.closing(theirs), rank, contextlib.closing(rank.control):
        rank.greeting[ours] = called
        theirs.send(data)
        theirs.shutdown(socket.SHUT_WR)
        try:
            rank._read_hello(ours)
        except RendezvousFailed as error:
            str(error).encode()
            ours.close()
            return "error", theirs.recv(1 << 15)
        return set(rank.control.peers), b""


def test_a_hello_with_the_nonce_and_odd_fields_is_an_error_in_words(meeting):
    """Only a rank of this job has the nonce; what it says otherwise may be anything."""
    good = json.loads(said(meeting, rank=2))

    @settings(max_examples=100, deadline=None, database=None)
    @example({"abi": math.inf}, None)
    @example({"abi": math.nan}, 0)
    @given(
        st.dictionaries(st.sampled_from(["abi", "rank", "size", "device"]), JSON_VALUES),
        st.sampled_from([0, None]),
    )
    def admit(fields, called):
        hello = {**good, **fields} if called is None else {**good, "rank": 0, **fields}
        data = json.dumps(hello)
        found, told = rank_that_reads(meeting, data.encode(), called)
        wanted = 2 if called is None else 0
        if "NaN" in data or "Infinity" in data:  # no JSON, so nobody has seen a nonce
            assert found == (set() if called is None else "error")
        elif repr(hello) == repr({**good, "rank": wanted}):
            assert found == {wanted}
        else:
            assert found == "error"
            assert "disagree" in json.loads(told)["fail"] or "came as" in json.loads(told)["fail"]

    admit()


def test_no_answer_of_a_rank_is_more_than_an_error_in_words(meeting):
    @settings(max_examples=100, deadline=None, database=None)
    @given(BODIES.filter(len))
    @example(b'{"fail":"\\ud800"}')
    @example(b'{"fail":["\\ud800"]}')
    def answers(data):
        assert rank_that_reads(meeting, data, 0)[0] == "error"

    answers()


@pytest.mark.parametrize(
    "address",
    [
        "", "/tmp/weft-x", "weft-1:" + "0" * 64, "/tmp/other:" + "0" * 64, "/tmp/weft-1:",
        "/tmp/weft-\0:" + "0" * 64, "/tmp/weft-1:" + "0" * 63, "/tmp/weft-1:" + "g" * 64,
        "/tmp/weft-1:" + "\ud800" * 64, "/tmp/weft-1:" + "0" * 64 + "\n",
    ],
)  # fmt: skip
def test_an_address_that_no_rank_would_choose_is_refused(address):
    with pytest.raises(InvalidArgument, match="the address of the meeting is not one: .*(path|d)"):
        Meeting.at(address)


@pytest.mark.parametrize("odd", ["theirs", "0.other", "1/"])
def test_what_others_put_into_the_directory_stays(meeting, odd):
    path = os.path.join(meeting.directory, odd)
    if odd.endswith("/"):
        os.mkdir(path)
    else:
        with open(path, "w", encoding="ascii"):
            pass
    meeting.remove()
    assert os.listdir(meeting.directory) == [odd.strip("/")]
    if odd.endswith("/"):
        os.rmdir(path)
    else:
        os.unlink(path)
