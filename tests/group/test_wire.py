# SPDX-License-Identifier: Apache-2.0
"""Messages: what is accepted from a socket, and what is refused from a faulty peer."""

import os
import socket
from typing import Any

import pytest

from tests.baseline import open_files
from weft.group.wire import VALUE_LIMIT, Disconnected, MalformedMessage, encode, receive, send


@pytest.fixture
def pair():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for end in ends:
        end.close()


def taken(right):
    """Return the pending message."""
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
