# SPDX-License-Identifier: Apache-2.0
"""Status of this machine's ranks for other processes of the same user.

A thread of each process with groups listens on a Unix socket. It answers every connection with the
waits of the process's groups as JSON, and reads them only then. The socket's name is abstract, so
no file exists that another user could have created. Both ends check the other one's user, as the
kernel reports it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Protocol

from weft.errors import WeftError
from weft.group.waits import Waits

_log = logging.getLogger(__name__)
_PREFIX = "weft-status"
_TIMEOUT = 2.0  # seconds for one connection
_MAX_BYTES = 16 << 20  # of an answer
_CREDENTIALS = struct.Struct("3i")  # process, user and group id of the other end


class Source(Protocol):
    """Interface of a group to the thread."""

    rank: int
    size: int

    def waits(self) -> dict[str, Waits]: ...


class StatusServer:
    """Thread that answers with the status of this process's open groups."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: weakref.WeakSet[Any] = weakref.WeakSet()
        self._process = 0
        self._listener: socket.socket | None = None
        self._identity: tuple[int, int] | None = None  # of the listener's descriptor
        self._thread: threading.Thread | None = None
        atexit.register(self._close, join=True)

    def add(self, group: Source) -> None:
        """Include a group until `remove` or its end. The first one starts the thread."""
        with self._lock:
            if self._process != os.getpid():  # a forked child inherits neither thread nor groups
                self._groups, self._listener = weakref.WeakSet(), None
                self._process = os.getpid()
            self._groups.add(group)
            if self._listener is not None:
                return
            try:
                self._listener = _listen()
                self._identity = _identify(self._listener)
            except OSError as error:
                _log.warning("weft top will not show process %d: %s", os.getpid(), error)
                return
            self._thread = threading.Thread(
                target=self._serve, args=(self._listener,), name="weft-status", daemon=True
            )
            self._thread.start()

    def remove(self, group: Source) -> None:
        """Exclude a group. The last one ends the thread."""
        with self._lock:
            self._groups.discard(group)
            if not self._groups:
                self._close()

    def _close(self, *, join: bool = False) -> None:
        """End the thread; with `join`, wait until it no longer runs."""
        if self._listener is None or self._process != os.getpid():
            return
        listener, self._listener = self._listener, None
        if _identify(listener) != self._identity:
            listener.detach()  # the process closed all descriptors, and may have reused this one
            return
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        listener.close()
        if join and self._thread is not None:
            self._thread.join(_TIMEOUT)

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError), connection:
                connection.settimeout(_TIMEOUT)
                if _peer_user(connection) == os.geteuid():
                    connection.sendall(json.dumps(self._describe()).encode())

    def _describe(self) -> dict[str, Any]:
        groups = []
        for group in list(self._groups):
            entry: dict[str, Any] = {"rank": group.rank, "size": group.size}
            try:
                waits = group.waits()
                entry["waits"] = {name: asdict(each) for name, each in waits.items()}
            except WeftError as error:  # of a GPU, or of a group that is closing
                entry["error"] = f"{type(error).__name__}: {error}"
            groups.append(entry)
        return {"pid": os.getpid(), "groups": groups}


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(f"\0{_PREFIX}-{os.getpid()}-{secrets.token_hex(8)}")
    listener.listen(8)
    return listener


def _identify(listener: socket.socket) -> tuple[int, int] | None:
    """Return device and inode of a socket's descriptor, or None if it is closed."""
    try:
        status = os.fstat(listener.fileno())
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _peer_user(connection: socket.socket) -> int:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user: int = _CREDENTIALS.unpack(raw)[1]
    return user


def read_all(on_error: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Return the status of each process of this user with groups in this network namespace.

    Args:
        on_error: Called with a text for each process that does not answer.
    """
    with open("/proc/net/unix") as file:
        names = {line.split()[-1] for line in file if f"@{_PREFIX}-" in line}
    for name in sorted(names):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT)
            try:
                connection.connect("\0" + name[1:])
                if _peer_user(connection) != os.geteuid():
                    continue
                yield json.loads(_receive(connection))
            except (OSError, ValueError) as error:
                on_error(f"process {name.split('-')[2]} does not answer: {error}")


def _receive(connection: socket.socket) -> bytes:
    data = bytearray()
    while chunk := connection.recv(1 << 16):
        data += chunk
        if len(data) > _MAX_BYTES:
            raise ValueError(f"an answer of more than {_MAX_BYTES} bytes")
    return bytes(data)


STATUS_SERVER = StatusServer()
