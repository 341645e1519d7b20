"""Frames on a Unix stream socket: length-limited JSON with at most one file descriptor each.

A frame is a 12-byte head {magic, kind, carries a descriptor, era, body bytes} and a JSON body.
The descriptor travels with the head. A reader never reads past the frame it is in, so a descriptor
cannot be taken for another frame's.
"""

from __future__ import annotations

import array
import contextlib
import enum
import json
import math
import os
import resource
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from weft.errors import InvalidArgument

JSON: TypeAlias = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]

HEAD = struct.Struct("<4sBBHI")
MAGIC = b"weft"
HELLO_LIMIT = 4096  # bytes of a frame body from a peer that has not shown the nonce yet
VALUE_LIMIT = 1 << 20  # bytes of one rank's value
SLACK = 4096  # bytes that a frame may add around a value
TEXT_LIMIT = 4000  # characters of a peer's text that are repeated
_CHUNK = 1 << 16
# CMSG_LEN, not CMSG_SPACE: the padding of CMSG_SPACE(4) would admit a second descriptor.
_ONE_FD = socket.CMSG_LEN(4)


class Kind(enum.IntEnum):
    """What a frame is for."""

    HELLO = 1  # to rank 0, in the meeting: who I am, and the nonce
    WELCOME = 2  # from rank 0: everyone has met
    VALUE = 3  # my part of a collective
    DESCRIPTOR = 4  # one file descriptor
    FAIL = 5  # the group is broken, and why
    BYE = 6  # the sender closed on purpose, and why if something made it
    AGAIN = 7  # from rank 0, in the meeting: not read, for want of room or time; connect again


@dataclass(frozen=True, slots=True)
class Frame:
    """One received frame; its receiver owns `fd`."""

    kind: Kind
    body: Any
    fd: int | None = None
    era: int = 0

    def drop(self) -> None:
        """Close the descriptor, if there is one."""
        if self.fd is not None:
            os.close(self.fd)


class Gone(ConnectionError):
    """The other end closed the connection or its process ended."""


class Malformed(ValueError):
    """The other end sent what no rank of this job would send."""


def encode(value: JSON) -> bytes:
    """`value` as JSON bytes. Raises TypeError or ValueError for what JSON cannot say."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def encode_value(op: str, value: JSON, *, larger: str) -> bytes:
    """What a control message of `op` carries. `larger`: what large data takes instead.

    Raises InvalidArgument for more than VALUE_LIMIT bytes, and what `encode` raises.
    """
    body = encode(value)
    if len(body) > VALUE_LIMIT:
        raise InvalidArgument(
            f"{op} was given {len(body)} bytes of JSON and carries at most {VALUE_LIMIT}; "
            f"send large data {larger}"
        )
    return body


def decode(data: bytes) -> Any:
    """What `encode` wrote. Raises Malformed for everything that it would not write."""
    try:
        return _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}") from error


def text_of(value: Any) -> str:
    """A text that a peer sent, fit for an error: bounded, and without lone surrogates."""
    text = value if isinstance(value, str) else repr(value)
    return text[:TEXT_LIMIT].encode(errors="backslashreplace").decode()


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is no finite number")
    return value


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


# NaN and infinities could be read, but not sent on to the others.
_DECODER = json.JSONDecoder(parse_float=_finite, parse_constant=_no_constant)


def milliseconds(deadline: float) -> int:
    """Time until `deadline` (time.monotonic seconds) for poll(), rounded up, never negative."""
    return max(0, int((deadline - time.monotonic()) * 1000) + 1)


class Channel:
    """One connected socket that speaks frames. Owns the socket."""

    def __init__(self, connection: socket.socket, *, limit: int) -> None:
        connection.setblocking(False)
        self.socket = connection
        self.limit = limit  # bytes of a received body
        self._head = bytearray()
        self._body = bytearray()
        self._fd: int | None = None
        self._next: Frame | None = None  # read by `peek`
        self._out: deque[tuple[memoryview, int | None]] = deque()

    @property
    def unsent(self) -> bool:
        """Is anything left that `flush` has to send?"""
        return bool(self._out)

    def fileno(self) -> int:
        return self.socket.fileno()

    def post(self, kind: Kind, body: bytes, *, fd: int | None = None, era: int = 0) -> None:
        """Queue one frame for `flush`."""
        data = HEAD.pack(MAGIC, kind, fd is not None, era, len(body)) + body
        self._out.append((memoryview(data), None if fd is None else os.dup(fd)))

    def flush(self) -> None:
        """Send of the queue what the socket takes. Never waits. Raises Gone, and drops the rest."""
        while self._out:
            data, fd = self._out[0]
            control = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _pack(fd))]
            try:
                sent = self.socket.sendmsg([data[:_CHUNK]], control, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError) as error:
                self._drop_queue()
                raise Gone(str(error)) from error
            if fd is not None:
                os.close(fd)  # it left with the first byte
            self._out.popleft()
            if sent < len(data):
                self._out.appendleft((data[sent:], None))

    def send(self, kind: Kind, body: bytes, deadline: float, *, fd: int | None = None) -> None:
        """Send one frame by `deadline`. Raises TimeoutError or Gone."""
        self.post(kind, body, fd=fd)
        self.flush()
        while self.unsent:
            self._wait(select.POLLOUT, deadline)
            self.flush()

    def receive(self, deadline: float) -> Frame:
        """The next frame. Raises TimeoutError, Gone or Malformed."""
        while True:
            frame = self.pump()
            if frame is not None:
                return frame
            self._wait(select.POLLIN, deadline)

    def pump(self) -> Frame | None:
        """Read what has arrived: a whole frame, or None if more has to come. Never waits."""
        if self._next is not None:
            frame, self._next = self._next, None
            return frame
        while len(self._head) < HEAD.size:
            if not self._read(self._head, HEAD.size):
                return None
        magic, kind, carries, era, size = HEAD.unpack(self._head)
        if magic != MAGIC or kind not in Kind.__members__.values():
            raise Malformed(f"a frame starts with {bytes(self._head)!r}, not with {MAGIC!r} + kind")
        if size > self.limit:
            raise Malformed(f"a frame of {size} bytes, where at most {self.limit} are accepted")
        while len(self._body) < size:
            if not self._read(self._body, size):
                return None
        fd, body = self._fd, bytes(self._body)
        if (fd is not None) != bool(carries):
            raise Malformed(f"{int(fd is not None)} descriptors came with a frame of {carries}")
        value = decode(body) if body else None
        self._fd = None
        self._head.clear()
        self._body.clear()
        return Frame(Kind(kind), value, fd, era)

    def peek(self) -> Frame | None:
        """What `pump` will return next."""
        self._next = self.pump()
        return self._next

    def shut(self) -> None:
        """End both directions without giving the socket up: a thread waiting on it wakes."""
        with contextlib.suppress(OSError):  # the other end may have gone
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket and the descriptors that nobody took. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        if self._next is not None:
            self._next.drop()
            self._next = None
        self._drop_queue()
        self.socket.close()

    def _drop_queue(self) -> None:
        while self._out:
            fd = self._out.popleft()[1]
            if fd is not None:
                os.close(fd)

    def _read(self, into: bytearray, size: int) -> bool:
        try:
            data, control, flags, _ = self.socket.recvmsg(
                min(size - len(into), _CHUNK), _ONE_FD, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return False
        except ConnectionResetError as error:
            raise Gone(str(error)) from error
        fds = _unpack(control)
        if flags & socket.MSG_CTRUNC or len(fds) > 1 or (fds and self._fd is not None):
            for fd in fds:
                os.close(fd)
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise Malformed(
                "more than one descriptor came with a message, or this process is at its limit of "
                f"{soft} open descriptors; raise it with `ulimit -n`"
            )
        if fds:
            self._fd = fds[0]
        if not data:
            raise Gone("end of stream")
        into += data
        return True

    def _wait(self, events: int, deadline: float) -> None:
        if time.monotonic() >= deadline:
            raise TimeoutError
        poller = select.poll()
        poller.register(self.socket, events)
        poller.poll(milliseconds(deadline))


def _pack(fd: int) -> array.array[int]:
    return array.array("i", [fd])


def _unpack(control: Sequence[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)
