# SPDX-License-Identifier: Apache-2.0
"""Ranks meet whatever strangers send, and a failure of one fails all; what sockets accept."""

import contextlib
import errno
import json
import math
import os
import re
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.baseline import open_files
from weft import logs
from weft.errors import InvalidArgument, RendezvousFailed
from weft.group import liveness
from weft.group import meeting as module
from weft.group.control import ControlPlane
from weft.group.liveness import Peers
from weft.group.meeting import ABI, Meeting, meet, peer_credentials
from weft.group.wire import VALUE_LIMIT, Disconnected, MalformedMessage, encode, receive, send
from weft.launcher.processes import start_fork_server

LONG = 1000.0  # a deadline that no test waits for
SOON = 300.0  # much less than that, and enough for a busy machine


def gather(meeting, rank, size=3, timeout=5.0, device="cpu"):
    """Meet as one rank, exchange a value and leave; return the values, or the error."""
    try:
        control = meet(meeting, rank=rank, size=size, device=device, timeout=timeout)
    except RendezvousFailed as error:
        return error
    try:
        return control.gather("test", rank, timeout)
    finally:
        control.close()


def all_ranks(*calls):
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def retry(call):
    until = time.monotonic() + 600
    while True:
        with contextlib.suppress(BlockingIOError):
            if (result := call()) is not None:
                return result
        assert time.monotonic() < until
        time.sleep(0.002)


def connect(meeting):
    stranger = retry(meeting.connect)
    stranger.setblocking(True)
    return stranger


def answer(connection):
    return retry(partial(receive, connection)).body


def make_hello(meeting, **changes):
    hello = {"abi": ABI, "rank": 1, "size": 3, "device": "cpu", "nonce": meeting.nonce.hex()}
    return encode(hello | changes)


@pytest.fixture
def meeting():
    meeting = Meeting.open()
    yield meeting
    meeting.close()


def has_listener(meeting):
    """Whether a process listens for the meeting; connected sockets show the name as well."""
    name = f" @{meeting._socket_name[1:]}"
    lines = Path("/proc/net/unix").read_text().splitlines()
    return any(line.endswith(name) and line.split()[3] == "00010000" for line in lines)


@pytest.mark.parametrize(("size", "hub"), [(1, 0), (2, 1), (4, 2)])
def test_all_ranks_meet_at_any_hub_and_no_name_is_left_while_their_sockets_live(size, hub):
    meeting = Meeting.open(hub)
    assert has_listener(meeting)
    places = [meeting if r == hub else Meeting.from_address(meeting.address) for r in range(size)]
    options = {"size": size, "device": "cpu", "timeout": LONG}
    controls = all_ranks(*(lambda r=r: meet(places[r], rank=r, **options) for r in range(size)))
    assert not has_listener(meeting)
    assert [control.pids for control in controls] == [[os.getpid()] * size] * size
    gathered = all_ranks(*(lambda c=c: c.gather("test", c.rank, LONG) for c in controls))
    assert gathered == [list(range(size))] * size
    for control in controls:
        control.close()


def test_mismatched_ranks_all_get_the_reason(meeting):
    def misfit():
        time.sleep(0.1)  # rank 2 is in by then
        with connect(meeting) as connection:
            connection.send(make_hello(meeting, rank=2))
            return answer(connection)["fail"]

    replies = all_ranks(lambda: gather(meeting, 0), lambda: gather(meeting, 2), misfit)
    for each in replies:
        assert "has rank 2, which another process has" in str(each)
    assert [type(each) for each in replies] == [RendezvousFailed, RendezvousFailed, str]


def test_missing_ranks_are_named_at_the_deadline_and_a_late_one_is_told_at_once(
    meeting, caplog, monkeypatch
):
    monkeypatch.setattr(logs, "FIRST_LOG_SECONDS", 0.1)
    started = time.monotonic()
    for error in all_ranks(*(lambda r=r: gather(meeting, r, 4, 0.3) for r in (0, 2))):
        assert "rank 1, 3 of 4 did not connect" in str(error)
    assert "in the meeting for rank 1, 3 of 4 to join" in caplog.text
    assert not has_listener(meeting)
    assert "the meeting is over" in str(gather(meeting, 1, timeout=30.0))
    assert time.monotonic() - started < 18.0


def test_a_hub_that_admits_no_rank_is_named_at_the_deadline(meeting):
    text = str(gather(meeting, 1, timeout=0.2))
    assert "rank 0, the hub, did not connect this rank to the others within 0.2 s" in text


NONE = "0" * 64
ADDRESSES = ("", "0-", f"0-{NONE[1:]}", "0-" + "g" * 64, f"-1-{NONE}", f"0-{NONE}\n", f"٣-{NONE}")


def test_invalid_addresses_and_ranks_and_a_hub_without_its_meeting_are_refused():
    kwargs: dict[str, Any] = {"size": 3, "device": "cpu", "timeout": 1.0}
    hub, other = Meeting(0, bytes(32)), Meeting(4, bytes(32))
    calls: tuple[tuple[str, Any], ...] = (
        *(("malformed meeting address: .*Meeting.address", partial(Meeting.from_address, each))
          for each in ADDRESSES),
        ("rank is 3 and size is 3", partial(meet, hub, rank=3, **kwargs)),
        ("the hub of the meeting is 4 and size is 3", partial(meet, other, rank=0, **kwargs)),
        ("this process has not opened the meeting", partial(meet, hub, rank=0, **kwargs)),
    )  # fmt: skip
    for text, call in calls:
        with pytest.raises(InvalidArgument, match=text):
            call()


def test_no_descriptor_is_left_by_success_or_failure():
    def once():
        good, bad = Meeting.open(), Meeting.open()
        all_ranks(*(lambda r=r: gather(good, r) for r in range(3)))
        all_ranks(*(lambda r=r: gather(bad, r, timeout=0.05) for r in (0, 2)))
        return open_files()

    assert len({once() for _ in range(3)}) == 1


def touch_and_gather(path, *args):
    path.touch()
    gather(*args)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_is_killed_while_it_waits_ends_the_meeting(meeting, victim, tmp_path):
    """The meeting ends for the present ranks, and for one that comes later."""
    place, started = Meeting.from_address(meeting.address), tmp_path / "started"
    args = (started, meeting if victim == 0 else place, victim, 4, LONG)
    process = start_fork_server().Process(target=touch_and_gather, args=args)
    process.start()
    if victim == 0:
        meeting.listener.close()  # the process has it
    with ThreadPoolExecutor(2) as pool:
        places = {1: place} if victim == 0 else {0: meeting, 1: place}
        ranks = [pool.submit(gather, at, r, 4, LONG) for r, at in places.items()]
        while not started.exists():
            time.sleep(0.01)
        time.sleep(0.5)
        process.kill()
        for rank in ranks:
            assert f"rank {victim} (pid {process.pid}) died" in str(rank.result(SOON))
        process.join()
    assert "the meeting is over" in str(gather(place, 3, 4, SOON))


@contextlib.contextmanager
def known_process():
    """Start a process and return what a rank in it would send about itself."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        yield process, {**liveness.process_identity(), "pid": process.pid}
    finally:
        process.kill()
        process.wait()


def test_ranks_of_another_namespace_have_the_deadline(meeting):
    with known_process() as (process, reply), Peers() as known:
        process.kill()
        process.wait()
        known.watch(1, {**reply, "namespace": "pid:[1]"})
        with pytest.raises(RendezvousFailed) as caught:
            meet(meeting, rank=0, size=2, device="cpu", timeout=0.2, peers=known)
    assert "rank 1 of 2 did not connect" in str(caught.value)
    assert "rank 1: it runs in another pid namespace" in str(caught.value)


def test_an_invalid_identity_is_not_watched_and_peers_leave_no_descriptor():
    before = open_files()
    with known_process() as (_, reply), Peers() as known:
        invalid: list[Any] = [None, [], {}, *({"pid": pid} for pid in (0, "7", True, 1 << 40))]
        for each in invalid:
            known.watch(1, each)
        assert known.pidfds() == []
        known.watch(1, reply)
        known.watch(1, reply)
        known.watch(2, liveness.process_identity())
        assert open_files() == before + 2
        known.check()
    assert open_files() == before


def test_the_reason_of_a_rank_that_raises_reaches_all_before_its_socket_ends(meeting, monkeypatch):
    read = module._handle_hub_message

    def fail_on_rank_1(*args):
        if args[1].rank != 1 or "peer" not in args[2].body:
            return read(*args)
        args[2].close_fd()  # all have come: one that comes later only hears that it is over
        raise ValueError("no memory for it")

    monkeypatch.setattr(module, "_handle_hub_message", fail_on_rank_1)
    with ThreadPoolExecutor(3) as pool:
        ranks = [pool.submit(gather, meeting, r, 3, LONG) for r in range(3)]
        with pytest.raises(ValueError, match="no memory"):
            ranks.pop(1).result()
        for each in ranks:
            assert isinstance(each.result(), RendezvousFailed)
            assert "no memory for it" in str(each.result())


def test_no_rank_returns_before_all_have_met(meeting):
    """Rank 1 has all its sockets; rank 2 is slow, and dies."""
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(gather, meeting, r, 3, LONG) for r in (0, 1)]
        with connect(meeting) as slow:
            slow.send(make_hello(meeting, rank=2))
            assert answer(slow)["nonce"] == meeting.nonce.hex()
            time.sleep(0.2)
            assert not any(rank.done() for rank in ranks)
        for rank in ranks:
            assert "rank 2 (pid " in str(rank.result())


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


def rank_that_reads(meeting, *messages, hub):
    """Return how rank 1 of 3 reacts to messages, sent to it as hub or by its hub."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for data in messages:
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
            return str(error), theirs.recv(1 << 15)
        return set(control.peers), b""


def test_a_hello_with_invalid_fields_raises(meeting):
    """Only a rank of this job has the nonce, but its other fields may be anything."""
    good = json.loads(make_hello(meeting, rank=2))

    @settings(max_examples=100, deadline=None, database=None)
    @example({"abi": math.inf})
    @example({"abi": math.nan})
    @example({"abi": "NaN"})
    @example({"size": 3.0})
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
            assert result.encode()  # an error that can be printed
            assert re.search("disagree| has rank ", json.loads(reported)["fail"])

    admit()


@settings(max_examples=100, deadline=None, database=None)
@given(BODIES.filter(len))
@example(b'{"fail":"\\ud800"}')
@example(b'{"fail":["\\ud800"]}')
def test_any_answer_of_the_hub_raises_a_typed_error(data):
    result, _ = rank_that_reads(Meeting(0, bytes(range(32))), data, hub=False)
    assert result.encode()


@pytest.mark.parametrize(
    "odd", [{}, {"peer": 2}, {"peer": "2", "pid": 1}, {"peer": 2, "pid": None}, {"peer": 0}]
)
def test_an_invalid_socket_is_refused(odd):
    place = Meeting(0, bytes(range(32)))
    hello = module.encode_hello(place, {"pid": 7})
    result, _ = rank_that_reads(place, hello, json.dumps(odd).encode(), hub=False)
    assert "rank 0 (pid 7) broke the protocol in the meeting: it sent {" in result


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


REFUSED: list[tuple[bytes, str]] = [
    (b"GET / HTTP/1.1\r\n\r\n", "not JSON"),
    (b"[" * 20_000, "not JSON"),
    (b"@", "not JSON"),  # memory of a stranger
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


def test_the_hub_finds_who_waits_without_blocking():
    meeting = Meeting.open(1)
    place = Meeting.from_address(meeting.address)
    assert (meeting.find_waiting_ranks(), place.find_waiting_ranks()) == (set(), set())
    silent, stranger, rank = (place.connect() for _ in range(3))
    for connection, nonce in ((stranger, bytes(32)), (rank, place.nonce)):
        send(connection, module.encode_hello(Meeting(1, nonce), {"rank": 3}))
    assert meeting.find_waiting_ranks() == {3}
    assert "nonce" in str(receive(stranger))
    rank.close()
    assert meeting.find_waiting_ranks() == set()
    meeting.close("it is over")  # those that were accepted are told, too
    assert "it is over" in str(receive(silent))
    silent.close()
    stranger.close()
