# SPDX-License-Identifier: Apache-2.0
"""Messages between two ranks: JSON objects over a Unix socket of type SOCK_SEQPACKET.

A message has at most one descriptor. A message that is too large for a socket's buffer is sent as a
memfd with its content. No function here blocks.
"""

from __future__ import annotations

import array
import errno
import json
import math
import os
import resource
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from weft.arguments import format_value
from weft.errors import InvalidArgument

JSON: TypeAlias = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]

VALUE_LIMIT = 1 << 20  # bytes of one rank's value
SLACK = 4096  # bytes that a message may add around a value
TEXT_LIMIT = 4000  # characters of a peer's text that an error may contain
_INLINE = 1 << 15  # bytes of a message in a socket; default buffers hold several of them
_IN_MEMORY = b"@"  # marks a message whose content is in the memfd; not valid JSON
# CMSG_LEN, not CMSG_SPACE: the padding of CMSG_SPACE(4) would admit a second descriptor.
_ONE_FD = socket.CMSG_LEN(4)


class Disconnected(ConnectionError):
    """The other end closed the connection or its process ended."""


class MalformedMessage(ValueError):
    """The other end sent a message that violates the protocol."""


class DescriptorLimit(OSError):
    """A descriptor was received, but this process is at its limit of open files."""


@dataclass(frozen=True, slots=True)
class Message:
    """One received message; its receiver owns `fd`."""

    body: dict[str, Any]
    fd: int | None = None

    def close_fd(self) -> None:
        """Close the descriptor, if there is one."""
        if self.fd is not None:
            os.close(self.fd)


def encode(value: JSON) -> bytes:
    """Encode `value` as JSON. Raises TypeError or ValueError if JSON cannot represent it."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error


def encode_value(op: str, value: JSON, *, alternative: str) -> bytes:
    """Encode the value of a control message as JSON.

    Args:
        op: Name of the call, for errors.
        value: Value to encode.
        alternative: How to send large data instead, for errors.

    Raises:
        InvalidArgument: JSON cannot represent the value, or it exceeds VALUE_LIMIT bytes.
    """
    try:
        body = encode(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"value is {format_value(value)}, which is not JSON: {error}"
        ) from error
    if len(body) > VALUE_LIMIT:
        raise InvalidArgument(
            f"{op} got {len(body)} bytes of JSON, which exceed the limit of {VALUE_LIMIT}; send "
            f"large data {alternative}"
        )
    return body


def decode(data: bytes) -> Any:
    """Decode a value from JSON. Raises MalformedMessage if `data` is not valid JSON."""
    try:
        return _DECODER.decode(data.decode())
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(f"not JSON: {error}") from error


def sanitize_text(value: Any) -> str:
    """Return a peer's text for use in an error: truncated, and without lone surrogates."""
    text = value if isinstance(value, str) else repr(value)
    return text[:TEXT_LIMIT].encode(errors="backslashreplace").decode()


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is not a finite number")
    return value


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


# NaN and infinities are rejected because `encode` could not send them to other ranks.
_DECODER = json.JSONDecoder(parse_float=_parse_finite, parse_constant=_reject_constant)


def send(connection: socket.socket, data: bytes, fd: int | None = None) -> bool:
    """Send the JSON of an object as a message; return False if the socket's buffer is full.

    `fd` can be sent with messages of up to 32 KiB only.

    Raises:
        Disconnected: the other end is closed.
        OSError: this process is out of memory or descriptors.
    """
    if len(data) <= _INLINE:
        return _send(connection, data, fd)
    memory = os.memfd_create("weft-message", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(memory), "wb") as file:
            file.write(data)
        return _send(connection, _IN_MEMORY, memory)
    finally:
        os.close(memory)


def _send(connection: socket.socket, data: bytes, fd: int | None) -> bool:
    control = []
    if fd is not None:
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    try:
        connection.sendmsg([data], control, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.ETOOMANYREFS:  # too many descriptors of this user are in flight
            return False
        if not isinstance(error, BrokenPipeError | ConnectionResetError):
            raise
        raise Disconnected(str(error)) from error
    return True


def receive(connection: socket.socket, *, trusted: bool = True) -> Message | None:
    """Return the next message, or None if none has arrived.

    Args:
        connection: The socket.
        trusted: Whether the other end has sent the nonce. Only then this process reads messages
            from a memfd.

    Raises:
        Disconnected: the other end is closed.
        MalformedMessage: the message violates the protocol.
        DescriptorLimit: this process is at its limit of open files.
    """
    try:
        try:
            data, fd = _receive(connection)
        except ConnectionResetError:  # reported once, before the remaining messages
            data, fd = _receive(connection)
    except BlockingIOError:
        return None
    except ConnectionResetError as error:
        raise Disconnected(str(error)) from error
    if not data:
        _close_fd(fd)
        raise Disconnected("end of stream")
    try:
        if data == _IN_MEMORY and fd is not None and trusted:
            memory, fd = fd, None
            data = _read_memfd(memory)
        body = decode(data)
        if not isinstance(body, dict):
            raise MalformedMessage(f"a message is {body!r:.40}, not an object")
    except MalformedMessage:
        _close_fd(fd)
        raise
    return Message(body, fd)


def _receive(connection: socket.socket) -> tuple[bytes, int | None]:
    flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    data, control, result_flags, _ = connection.recvmsg(_INLINE, _ONE_FD, flags)
    fds = array.array("i")
    for level, kind, content in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    if result_flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) > 1:
        for fd in fds:
            os.close(fd)
        if result_flags & socket.MSG_TRUNC:
            raise MalformedMessage(f"a message of more than {_INLINE} bytes")
        if fds:
            raise MalformedMessage("a message has more than one descriptor")
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise DescriptorLimit(
            f"it is at its limit of {soft} open descriptors; raise it with `ulimit -n`"
        )
    return data, fds[0] if fds else None


def _read_memfd(memory: int) -> bytes:
    """Return the content of a memfd and close it. Raises MalformedMessage if it is too large."""
    limit = VALUE_LIMIT + SLACK
    try:
        data = os.pread(memory, limit + 1, 0)
    except OSError as error:
        raise MalformedMessage(f"a message that cannot be read: {error}") from error
    finally:
        os.close(memory)
    if len(data) > limit:
        raise MalformedMessage(f"a message of more than {limit} bytes")
    return data


def _close_fd(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)
