"""Frames: what a channel accepts, and what it refuses from a peer that breaks the rules."""

import array
import os
import socket
import time
from typing import Any

import pytest

from weft.memory.wire import (
    HEAD,
    MAGIC,
    TEXT_LIMIT,
    Channel,
    Gone,
    Kind,
    Malformed,
    decode,
    encode,
    text_of,
)


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    ends = Channel(left, limit=1 << 20), Channel(right, limit=1 << 20)
    yield ends
    for end in ends:
        end.close()


def soon():
    return time.monotonic() + 600.0


def open_fds():
    return len(os.listdir("/proc/self/fd"))


def head(size, *, carries=0, kind=Kind.VALUE, magic=MAGIC):
    return HEAD.pack(magic, kind, carries, 0, size)


def test_frames_arrive_whole_and_in_order(pair):
    left, right = pair
    for value in ({"a": [1, 2.5, None]}, "text", 7):
        left.send(Kind.VALUE, encode(value), soon())
    assert [right.receive(soon()).body for _ in range(3)] == [{"a": [1, 2.5, None]}, "text", 7]


def test_a_frame_in_pieces_is_put_together(pair):
    left, right = pair
    body = encode(list(range(50)))
    for byte in head(len(body)) + body:
        left.socket.sendall(bytes([byte]))
        frame = right.pump()
    assert frame is not None
    assert frame.body == list(range(50))


def test_a_descriptor_travels_with_its_own_frame(pair):
    left, right = pair
    left.send(Kind.VALUE, encode(1), soon())
    with open("/proc/self/status", "rb") as file:
        left.send(Kind.DESCRIPTOR, encode(2), soon(), fd=file.fileno())
        assert right.receive(soon()).fd is None
        frame = right.receive(soon())
        assert frame.fd is not None
        assert os.fstat(frame.fd).st_ino == os.fstat(file.fileno()).st_ino
        assert not os.get_inheritable(frame.fd)
        os.close(frame.fd)


def test_a_second_descriptor_is_refused_and_none_leaks(pair):
    left, right = pair
    before = open_fds()
    with open("/proc/self/status", "rb") as file:
        both = array.array("i", [file.fileno(), file.fileno()])
        left.socket.sendmsg([head(0, carries=1)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, both)])
        with pytest.raises(Malformed, match="more than one descriptor.*ulimit -n"):
            right.receive(soon())
    assert open_fds() == before


def test_a_descriptor_that_was_not_announced_is_refused(pair):
    left, right = pair
    with open("/proc/self/status", "rb") as file:
        one = array.array("i", [file.fileno()])
        left.socket.sendmsg([head(0)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, one)])
        with pytest.raises(Malformed, match="1 descriptors came with a frame of 0"):
            right.receive(soon())


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not with"),
        (head(0, kind=99), "not with"),
        (head((1 << 20) + 1), "at most 1048576 are accepted"),
        (head(3) + b"{]}", "not JSON"),
        (head(100_000) + b"[" * 100_000, "not JSON"),
        (head(2) + b"\xff\xfe", "not JSON"),
        (head(6) + '"x"'.encode("utf-16-le"), "not JSON"),
        (head(3) + b"NaN", "not JSON"),
        (head(9) + b"-Infinity", "not JSON"),
        (head(7) + b"[1e999]", "not JSON: 1e999 is no finite number"),
        (head(5000) + b"9" * 5000, "not JSON"),
        (head(0, carries=1), "0 descriptors"),
    ],
)
def test_what_no_rank_would_send_is_refused(pair, data, text):
    left, right = pair
    left.socket.setblocking(True)
    left.socket.sendall(data)
    with pytest.raises(Malformed, match=text):
        right.receive(soon())


def test_only_what_can_be_told_on_is_encoded_and_decoded():
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    hopeless: list[Any] = [deep, float("nan"), {"a": float("inf")}]
    for value in hopeless:
        with pytest.raises(ValueError, match="nested too deep|Out of range"):
            encode(value)
    good: list[Any] = [0.1, -1e308, 5e-324, 1 << 200, "é\ud800", {"a": [None, True]}]
    for value in good:
        assert decode(encode(value)) == value


@pytest.mark.parametrize(
    ("said", "text"),
    [("a\ud800b", r"a\ud800b"), (None, "None"), ([1, "\udfff"], r"[1, '\udfff']"), ("é", "é")],
)
def test_a_text_of_a_peer_can_be_printed_whatever_it_is(said, text):
    assert text_of(said) == text
    assert len(text_of("x" * 10**6)) == TEXT_LIMIT


def test_the_end_of_the_other_side_is_seen_at_once(pair):
    left, right = pair
    left.socket.sendall(head(10) + b"123")
    left.close()
    with pytest.raises(Gone):
        right.receive(soon())
    with pytest.raises(Gone):
        right.send(Kind.VALUE, encode(1), soon())


def test_waits_end_at_their_deadline(pair):
    left, right = pair
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        right.receive(time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        left.send(Kind.VALUE, b"1" * (1 << 24), time.monotonic() + 0.05)
    assert time.monotonic() - started < 100.0
