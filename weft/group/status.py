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
import itertools
import json
import logging
import os
import re
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Protocol

from weft.group.waits import Waits

_log = logging.getLogger(__name__)
_PREFIX = "weft-status"
_TIMEOUT = 2.0  # seconds for one connection
_MAX_BYTES = 16 << 20  # of an answer
_RETRY_SECONDS = 1.0  # after a connection that could not be accepted
_NAME = re.compile(rb" @(%b-([0-9]+)-[0-9a-f]{16})$" % _PREFIX.encode(), re.MULTILINE)
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
        self._groups: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._listener: socket.socket | None = None
        self._identity: tuple[int, int] | None = None  # of the listener's descriptor
        self._thread: threading.Thread | None = None
        os.register_at_fork(after_in_child=self._forget)
        atexit.register(self._close, join=True)

    def add(self, group: Source) -> None:
        """Include a group until `remove` or its end. The first one starts the thread."""
        with self._lock:
            self._groups[group] = next(self._numbers)
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
            self._groups.pop(group, None)
            if not self._groups:
                self._close()

    def _forget(self) -> None:
        """Release the parent's listener in a forked child, which has neither thread nor groups."""
        self._lock = threading.Lock()
        self._groups = weakref.WeakKeyDictionary()
        if (listener := self._take_listener()) is not None:
            listener.close()

    def _close(self, *, join: bool = False) -> None:
        """End the thread; with `join`, wait until it no longer runs."""
        if (listener := self._take_listener()) is None:
            return
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        listener.close()
        if join and self._thread is not None:
            self._thread.join(_TIMEOUT)

    def _take_listener(self) -> socket.socket | None:
        listener, self._listener = self._listener, None
        if listener is not None and _identify(listener) != self._identity:
            listener.detach()  # the process closed all descriptors, and may have reused this one
            return None
        return listener

    def _serve(self, listener: socket.socket) -> None:
        while self._listener is listener:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed, or the process has no descriptor left
                time.sleep(_RETRY_SECONDS if self._listener is listener else 0.0)
                continue
            with contextlib.suppress(OSError), connection:
                connection.settimeout(_TIMEOUT)
                if _peer_user(connection) == os.geteuid():
                    connection.sendall(json.dumps(self._describe()).encode())

    def _describe(self) -> dict[str, Any]:
        groups = []
        with self._lock:
            numbered = list(self._groups.items())
        for group, number in numbered:
            entry: dict[str, Any] = {"number": number, "rank": group.rank, "size": group.size}
            try:
                waits = group.waits()
                entry["waits"] = {name: asdict(each) for name, each in waits.items()}
            except Exception as error:  # of a GPU, or of a group that is closing
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
    with open("/proc/net/unix", "rb") as file:  # other users choose names of their own
        names = dict(_NAME.findall(file.read()))
    for name, pid in sorted(names.items()):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_TIMEOUT)
            try:
                connection.connect(b"\0" + name)
                if _peer_user(connection) == os.geteuid():
                    yield {**json.loads(_receive(connection)), "pid": int(pid)}
            except ConnectionRefusedError:  # it has just ended
                continue
            except (OSError, ValueError, TypeError) as error:
                on_error(f"process {pid.decode()} does not answer: {error}")


def _receive(connection: socket.socket) -> bytes:
    data = bytearray()
    while chunk := connection.recv(1 << 16):
        data += chunk
        if len(data) > _MAX_BYTES:
            raise ValueError(f"an answer of more than {_MAX_BYTES} bytes")
    return bytes(data)


STATUS_SERVER = StatusServer()
