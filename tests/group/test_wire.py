# SPDX-License-Identifier: Apache-2.0
"""Messages: what is accepted from a socket, and what is refused from a faulty peer."""

import array
import os
import socket
from typing import Any

import pytest

from tests.baseline import NESTED, open_files
from weft.group.wire import (
    TEXT_LIMIT,
    VALUE_LIMIT,
    Disconnected,
    MalformedMessage,
    decode,
    encode,
    receive,
    sanitize_text,
    send,
)


@pytest.fixture
def pair():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for end in ends:
        end.close()


def with_fds(left, data, *fds):
    """Send data with descriptors."""
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    left.sendmsg([data], control)


def taken(right, **options):
    """Return the pending message."""
    message = receive(right, **options)
    assert message is not None
    return message


def test_messages_arrive_whole_and_in_order(pair):
    left, right = pair
    assert receive(right) is None
    values: list[dict[str, Any]] = [{"a": [1, 2.5, None]}, {}, {"x": "y" * 100_000}]
    before = open_files()
    for value in values:
        assert send(left, encode(value))
    assert [taken(right).body for _ in values] == values
    assert receive(right) is None
    assert open_files() == before


def test_a_full_socket_takes_no_more_and_nothing_waits(pair):
    left, right = pair
    count = 0
    while send(left, encode({"x": "y" * 20_000})):
        count += 1
    assert 2 <= count < 10_000
    for _ in range(count):
        assert len(taken(right).body["x"]) == 20_000
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


NO_JSON: list[bytes] = [
    *(b"GET / HTTP/1.1\r\n\r\n", b"{]}", b"[" * 20_000, b"\xff\xfe", b'"\0x\0"\0', b"NaN"),
    *(b'{"a":-Infinity}', b"9" * 5000, b"@"),
]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        *((data, "not JSON") for data in NO_JSON),
        (b'{"a":1e999}', "not JSON: 1e999 is not a finite number"),
        (b"[1]", r"a message is \[1\], not an object"),
        (b" " * 50_000, "a message of more than 32768 bytes"),
    ],
)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_invalid_messages_are_refused_without_a_leak(pair, data, text, count):
    left, right = pair
    before = open_files()
    with open("/proc/self/status", "rb") as file:
        if count:
            with_fds(left, data, *[file.fileno()] * count)
        else:
            left.send(data)
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
        with_fds(left, b"@", memory)
        os.close(memory)
        with pytest.raises(MalformedMessage, match=text):
            receive(right)
    reads, writes = os.pipe()
    with_fds(left, b"@", reads)  # nothing that could be waited for
    with pytest.raises(MalformedMessage, match="cannot be read"):
        receive(right)
    os.close(reads)
    os.close(writes)
    assert open_files() == before


def test_only_valid_json_is_encoded_and_decoded():
    hopeless: list[Any] = [NESTED, float("nan"), {"a": float("inf")}]
    for value in hopeless:
        with pytest.raises(ValueError, match="nested too deep|Out of range"):
            encode(value)
    good: list[Any] = [0.1, -1e308, 5e-324, 1 << 200, "é\ud800", {"a": [None, True]}]
    for value in good:
        assert decode(encode(value)) == value


def test_any_text_of_a_peer_can_be_printed():
    assert sanitize_text("aé\ud800b") == r"aé\ud800b"
    assert sanitize_text([1, "\udfff", None]) == r"[1, '\udfff', None]"
    assert len(sanitize_text("x" * 10**6)) == TEXT_LIMIT


def test_last_words_are_read_before_the_end(pair):
    """Also if the other end left received data unread."""
    left, right = pair
    send(right, b"{}")
    send(left, b'{"bye":null}')
    left.close()
    assert taken(right).body == {"bye": None}
    for _ in range(2):
        with pytest.raises(Disconnected):
            receive(right)
        with pytest.raises(Disconnected):
            send(right, b"{}")
