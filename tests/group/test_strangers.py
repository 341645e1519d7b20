# SPDX-License-Identifier: Apache-2.0
"""What is accepted from a socket: ranks meet whatever strangers send, and errors have words."""

import contextlib
import errno
import json
import math
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.baseline import open_files
from tests.group.meetings import LONG, all_ranks, answer, connect, gather, make_hello
from weft.errors import InvalidArgument, RendezvousFailed
from weft.group import meeting as module
from weft.group.control import ControlPlane
from weft.group.liveness import Peers
from weft.group.meeting import ABI, Meeting, peer_credentials
from weft.group.wire import VALUE_LIMIT, Disconnected, MalformedMessage, encode, receive, send

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
BODIES = st.one_of(
    st.binary(max_size=64),
    JSON_VALUES.map(lambda value: json.dumps(value).encode()),
    JSON_VALUES.map(lambda value: json.dumps({"nonce": value}).encode()),
    st.sampled_from(
        [
            b'{"nonce":"\\ud800"}', b'{"nonce":NaN}', b'{"nonce":1e999}', b"[" * 4000, b"{}", b"@",
            b'{"nonce":' + b"9" * 4000 + b"}", b'{"nonce":"' + b"\xff" * 64 + b'"}', b"",
            b" " * 50_000,
        ]
    ),
)  # fmt: skip


def both_meet(meeting, timeout=LONG):
    return all_ranks(*(lambda r=r: gather(meeting, r, 2, timeout) for r in range(2)))


def test_a_wrong_nonce_is_reported(meeting, monkeypatch):
    other = Meeting(0, bytes(32))  # of another job, by the same name
    monkeypatch.setattr(Meeting, "_socket_name", meeting._socket_name)
    zero, liar = all_ranks(lambda: gather(meeting, 0, 2, 0.5), lambda: gather(other, 1, 2, 0.5))
    assert "nonce is not this job's" in str(liar)
    assert isinstance(zero, RendezvousFailed)


@pytest.mark.parametrize("listening", [True, False])
def test_another_user_is_refused(meeting, monkeypatch, listening):
    """Both ends refuse: only the listening end of a connection has a name."""

    def of_another_user(connection):
        pid, uid = peer_credentials(connection)
        return pid, 12345 if bool(connection.getsockname()) == listening else uid

    monkeypatch.setattr(module, "peer_credentials", of_another_user)
    zero, one = both_meet(meeting, 0.5)
    assert isinstance(zero, RendezvousFailed)
    own = f"rank 0 runs as user 12345 and this rank as user {os.geteuid()}"
    assert ("rank 0 died before all ranks had connected" if listening else own) in str(one)


def test_a_rank_out_of_descriptors_raises(meeting, monkeypatch):
    real = socket.socket.accept
    full = [OSError(errno.EMFILE, "Too many open files")]

    def accept(self):
        if full:
            raise full.pop()
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    for error in both_meet(meeting):
        assert "rank 0 cannot connect the ranks: [Errno 24] Too many open files" in str(error)


def test_no_message_of_a_stranger_ends_the_meeting(meeting):
    before = open_files()
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
    assert open_files() == before - 1  # the listener


def rank_that_reads(meeting, data, *, hub):
    """Return how rank 1 of 3 reacts to `data`, sent to it as hub or by its hub."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.send(data)
    with contextlib.closing(theirs), contextlib.closing(ControlPlane(1, 3)) as control:
        try:
            if hub:
                build_info: dict[str, Any] = {"abi": ABI, "size": 3, "device": "cpu"}
                with module._Hub(Meeting(1, meeting.nonce), control, build_info, Peers()) as rank:
                    rank.unverified[ours] = None
                    rank._read_hello(ours)
            else:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(Meeting, "connect", lambda self: ours)
                    theirs.shutdown(socket.SHUT_WR)
                    module._join_hub(Meeting(0, meeting.nonce), control, {}, LONG, Peers())
        except RendezvousFailed as error:
            str(error).encode()
            return "error", theirs.recv(1 << 15)
        return set(control.peers), b""


def test_a_hello_with_invalid_fields_raises(meeting):
    """Only a rank of this job has the nonce, but its other fields may be anything."""
    good = json.loads(make_hello(meeting, rank=2))

    @settings(max_examples=100, deadline=None, database=None)
    @example({"abi": math.inf})
    @example({"abi": math.nan})
    @example({"abi": "NaN"})
    @given(st.dictionaries(st.sampled_from(["abi", "rank", "size", "device"]), JSON_VALUES))
    def admit(fields):
        hello = {**good, **fields}
        data = json.dumps(hello)
        result, reported = rank_that_reads(meeting, data.encode(), hub=True)
        if re.search(r"\b(NaN|Infinity)\b", re.sub(r'"[^"]*"', "", data)):
            assert result == set()  # it is not JSON, so it shows no nonce
        elif repr(hello) in (repr(good), repr({**good, "rank": 0})):
            assert result == {hello["rank"]}
        else:
            assert result == "error"
            assert re.search("disagree| has rank ", json.loads(reported)["fail"])

    admit()


@settings(max_examples=100, deadline=None, database=None)
@given(BODIES.filter(len))
@example(b'{"fail":"\\ud800"}')
@example(b'{"fail":["\\ud800"]}')
def test_any_answer_of_the_hub_raises_a_typed_error(data):
    assert rank_that_reads(Meeting(0, bytes(range(32))), data, hub=False)[0] == "error"


@pytest.mark.parametrize(
    "odd", [{}, {"peer": 2}, {"peer": "2", "pid": 1}, {"peer": 2, "pid": None}, {"peer": 0}]
)
def test_an_invalid_socket_is_refused(meeting, odd):
    def hub():
        assert meeting.listener is not None
        while not (result := list(meeting.accept())):
            time.sleep(0.01)
        (connection,) = result
        with connection:
            connection.send(module.encode_hello(meeting, {"pid": 7}))
            connection.send(json.dumps(odd).encode())
            answer(connection)
            return answer(connection)["fail"]

    reported, one = all_ranks(hub, lambda: gather(meeting, 1, 3, LONG))
    assert reported == str(one)
    assert "rank 0 (pid 7) broke the protocol in the meeting: it sent {" in reported


NONE = "0" * 64


@pytest.mark.parametrize(
    "address",
    ["", "0-", f"0-{NONE[1:]}", "0-" + "g" * 64, f"-1-{NONE}", f"0-{NONE}\n", f"٣-{NONE}"],
)
def test_an_invalid_address_is_refused(address):
    with pytest.raises(InvalidArgument, match="malformed meeting address: .*Meeting.address"):
        Meeting.from_address(address)


def test_ranks_meet_though_silent_strangers_fill_the_queue(meeting, monkeypatch):
    """The hub keeps a bounded number of them."""
    monkeypatch.setattr(module, "_MAX_UNVERIFIED", 3)
    meeting.listener.listen(6)
    strangers = []
    with contextlib.suppress(BlockingIOError):
        while True:
            strangers.append(meeting.connect())
    assert len(strangers) > 3
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(gather, meeting, 1, 2, LONG)
        time.sleep(0.2)
        assert not one.done()
        assert gather(meeting, 0, 2, LONG) == one.result() == [0, 1]
    for each in strangers:
        with each:
            assert "fail" in answer(each)


PARTS = st.fixed_dictionaries(
    {},
    optional={
        **{"recovery_id": st.just(0) | JSON_VALUES, "n": st.just(0) | JSON_VALUES},
        "op": st.just("test") | st.just("exchange_fds") | JSON_VALUES,
        **dict.fromkeys(("value", "fail", "bye"), JSON_VALUES),
    },
)
VALUE = b'{"recovery_id":0,"op":"test","n":0,"value":5}'
MESSAGES = BODIES | PARTS.map(lambda body: json.dumps(body).encode())


@contextlib.contextmanager
def plane():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with contextlib.closing(ControlPlane(1, 2)) as control, theirs:
        control.add(0, 7, ours)
        yield control, theirs


@pytest.mark.parametrize("call", ["gather", "exchange_fds"])
def test_any_message_of_a_rank_raises_a_typed_error(call):
    met: set[str] = set()

    @settings(max_examples=200, deadline=None, database=None)
    @given(MESSAGES, st.sampled_from([0, 0, 1]))
    @example(VALUE, 0)
    @example(b'{"recovery_id":0,"op":"exchange_fds","n":0}', 1)
    @example(b'{"recovery_id":0,"op":"exchange_fds","n":0}', 0)
    @example(VALUE, 1)
    @example(VALUE.replace(b"5", b"[" * 900 + b"]" * 900), 0)
    @example(b'{"recovery_id":0,"fail":7}', 0)
    @example(b'{"recovery_id":0,"fail":["\\ud800"]}', 0)
    @example(b'{"bye":"\\ud800"}', 1)
    def talk(data, descriptors):
        with plane() as (control, theirs):
            socket.send_fds(theirs, [data], [theirs.fileno()] * descriptors)
            theirs.shutdown(socket.SHUT_WR)
            try:
                if call == "gather":
                    assert len(control.gather("test", 5, LONG)) == 2
                else:
                    for fd in control.exchange_fds(theirs.fileno(), LONG):
                        assert fd is not None
                        os.close(fd)
                met.add("nothing")
            except RendezvousFailed as error:
                str(error).encode()
                met.add("error")

    before = open_files()
    talk()
    assert met == {"nothing", "error"}
    assert open_files() == before


def test_the_first_cause_stays_when_a_broken_group_is_aborted():
    with plane() as (control, theirs):
        theirs.send(b'{"recovery_id":0,"fail":"the first cause"}')
        for _ in range(2):
            with pytest.raises(RendezvousFailed, match="the first cause"):
                control.gather("test", None, LONG)
            control.abort("a later reason")


def test_a_peer_that_does_not_read_is_named_at_the_deadline():
    """The peer's part has arrived, but its socket is full, so this rank cannot send."""
    with plane() as (control, theirs):
        with contextlib.suppress(BlockingIOError):
            while True:
                control.peers[0].send(b"x" * 1000, socket.MSG_DONTWAIT)
        theirs.send(VALUE)
        with pytest.raises(RendezvousFailed, match=r"rank 0 \(pid 7\) did not read its part of t"):
            control.gather("test", None, 0.2)


@pytest.mark.parametrize("call", [0, 1])
def test_a_failure_of_a_later_call_does_not_undo_this_one(call):
    """All parts have arrived when the peer times out on this rank, in this call or the next."""
    with plane() as (control, theirs):
        theirs.send(VALUE)
        theirs.send(b'{"recovery_id":0,"n":%d,"fail":"rank 2 is late"}' % call)
        if call == 1:
            assert control.gather("test", 6, 5.0) == [5, 6]
        with pytest.raises(RendezvousFailed, match="rank 2 is late"):
            control.gather("test", 6, 5.0)


@pytest.fixture
def pair():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for end in ends:
        end.close()


def taken(right):
    message = receive(right)
    assert message is not None
    return message


def test_messages_arrive_whole_and_in_order_until_the_socket_is_full(pair):
    left, right = pair
    assert receive(right) is None
    values: list[Any] = [{"a": [1, 2.5, None]}, {}, {"x": "y" * 100_000}, {"b": [5e-324, 1 << 99]}]
    before = open_files()
    for value in values:
        assert send(left, encode(value))
    assert [taken(right).body for _ in values] == values
    assert open_files() == before
    count = 0
    while send(left, encode({"x": "y" * 20_000})):
        count += 1
    assert 2 <= count < 10_000
    assert {len(taken(right).body["x"]) for _ in range(count)} == {20_000}
    assert receive(right) is None


def test_a_descriptor_travels_with_its_message(pair):
    left, right = pair
    send(left, b"{}")
    with open("/proc/self/status", "rb") as file:
        send(left, b"{}", file.fileno())
        assert taken(right).fd is None
        fd = taken(right).fd
        assert os.fstat(fd).st_ino == os.fstat(file.fileno()).st_ino
        assert not os.get_inheritable(fd)
        os.close(fd)


REFUSED: list[tuple[bytes, str]] = [
    (b"GET / HTTP/1.1\r\n\r\n", "not JSON"),
    (b"[" * 20_000, "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"9" * 5000, "not JSON"),
    (b"@", "not JSON"),  # memory of a stranger
    (b"NaN", "not JSON"),
    (b'{"a":-Infinity}', "not JSON"),
    (b'{"a":1e999}', "not JSON: 1e999 is not a finite number"),
    (b"[1]", r"a message is \[1\], not an object"),
    (b" " * 50_000, "a message of more than 32768 bytes"),
]


@pytest.mark.parametrize(("data", "text"), REFUSED)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_invalid_messages_are_refused_without_a_leak(pair, data, text, count):
    left, right = pair
    before = open_files()
    with open("/proc/self/status", "rb") as file:
        socket.send_fds(left, [data], [file.fileno()] * count)
        if count == 2 and len(data) < 50_000:
            text = "more than one descriptor"
        with pytest.raises(MalformedMessage, match=text):
            receive(right, trusted=False)
    assert open_files() == before


def test_memory_is_read_only_from_trusted_peers_and_bounded(pair):
    left, right = pair
    before = open_files()
    for size, text in ((2 * VALUE_LIMIT, "more than 1052672 bytes"), (0, "not JSON")):
        memory = os.memfd_create("test")
        os.truncate(memory, size)
        socket.send_fds(left, [b"@"], [memory])
        os.close(memory)
        with pytest.raises(MalformedMessage, match=text):
            receive(right)
    reads, writes = os.pipe()
    socket.send_fds(left, [b"@"], [reads])  # nothing that could be waited for
    with pytest.raises(MalformedMessage, match="cannot be read"):
        receive(right)
    os.close(reads)
    os.close(writes)
    assert open_files() == before


def test_last_words_are_read_before_the_end_also_after_unread_data(pair):
    left, right = pair
    send(right, b"{}")
    send(left, b'{"bye":null}')
    left.close()
    assert taken(right).body == {"bye": None}
    for call in (receive, lambda end: send(end, b"{}")) * 2:
        with pytest.raises(Disconnected):
            call(right)
