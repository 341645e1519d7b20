"""The store of torch.distributed in which ranks that a launcher started find each other.

A store has no authentication: anyone who reaches its port may use it. So where rank 0 serves it, it
listens on the one address that MASTER_ADDR names (127.0.0.1: nobody outside), and what a store says
is checked before it is believed. A writer there can end a meeting, but cannot join one, nor lead a
rank into another: the kernel must report this user at both ends of each socket, and both ends must
show one nonce. What remains to a writer is to lead ranks of two jobs of the same user to each
other. Where WEFT_SECRET is set, the same on every rank, every value carries an HMAC under it and
its key, and that is closed, too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import queue
import socket
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from weft.errors import RendezvousFailed
from weft.memory.liveness import Peers
from weft.memory.wire import JSON, VALUE_LIMIT, Malformed, decode, encode, text_of

SECRET = "WEFT_SECRET"
_FAILED = "failed"  # the key of what ended the exchange for one rank, for the others
_LINGER = 2.0  # seconds that rank 0 keeps a store for ranks that have still to read
# By process and address, until the process ends: other ranks may have still to read, and a later
# group, or init_process_group in this process, goes on with the same server.
_served: dict[tuple[int, str], TCPStore] = {}


def environment() -> tuple[int, int, int | None]:
    """RANK, WORLD_SIZE and LOCAL_RANK (None where unset). Raises RendezvousFailed."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise RendezvousFailed(
            f"{', '.join(missing)} not set in the environment: start the ranks with torchrun, or "
            "use weft.launch"
        )
    local = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else None
    return _number("RANK"), _number("WORLD_SIZE"), local


def store_of_environment(rank: int, timeout: float) -> tuple[Store, str]:
    """The store at MASTER_ADDR:MASTER_PORT, and what errors call it. Raises RendezvousFailed.

    Unless torchrun's agent serves it, rank 0 does, on the address of MASTER_ADDR alone.
    """
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    at = f"{address}:{port}"
    served = os.getpid(), at
    try:
        store = _served.get(served)
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if store is None and rank == 0 and not by_agent:
            store = serve(address, port, timeout)
            if store is not None:
                _served[served] = store
        store = store or connect(address, port, timeout)
    except RendezvousFailed:
        raise
    except RuntimeError as error:
        raise RendezvousFailed(
            f"rank {rank} cannot reach the store at {at}: {error}; check MASTER_ADDR and "
            "MASTER_PORT, which rank 0 serves on that address alone"
        ) from error
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"weft/{attempt}", store), f"the store at {at}"


def serve(address: str, port: int, timeout: float) -> TCPStore | None:
    """A store that listens at `address` alone; None where somebody listens already.

    By itself torch's listens on every interface. Shared memory needs one host, so the address is
    this machine's, and a loopback address keeps everyone else out.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RendezvousFailed(
            f"MASTER_ADDR is {address!r}, which has no address ({error}); for ranks on one host "
            "set MASTER_ADDR=127.0.0.1"
        ) from error
    # IPv4 first: a client that tries both finds it either way.
    family, _, _, _, (host, *rest) = min(found, key=lambda each: each[0] != socket.AF_INET)
    if ipaddress.ip_address(str(host).partition("%")[0]).is_unspecified:
        host = "127.0.0.1" if family == socket.AF_INET else "::1"
    try:
        listener = socket.create_server((host, *rest), family=family, backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise RendezvousFailed(
            f"MASTER_ADDR is {address!r} and rank 0 cannot listen there ({error}): give an address "
            "of the machine that rank 0 runs on; for ranks on one host set MASTER_ADDR=127.0.0.1"
        ) from error
    host, port = listener.getsockname()[:2]
    return TCPStore(
        host,
        port,
        None,
        True,
        timedelta(seconds=timeout),
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def connect(address: str, port: int, timeout: float) -> TCPStore:
    """A store that another process serves. Raises RuntimeError."""
    limit = timedelta(seconds=timeout)
    return TCPStore(address, port, None, False, limit, wait_for_workers=False)


class StoreExchange:
    """One exchange through a store, for one group, while it looks after peers.

    `where` names the store in errors. A rank has a number in it for every group that it makes.
    """

    def __init__(
        self, store: Store, where: str, rank: int, size: int, timeout: float, peers: Peers
    ) -> None:
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._peers = peers
        self._where = where
        self._secret = os.environ.get(SECRET, "").encode(errors="surrogateescape")
        self._store = store
        self._group = 0

    def __call__(self, value: JSON) -> list[Any]:
        """`value` of every rank, in rank order. Raises RendezvousFailed.

        In a thread: no deadline ends a wait for a server whose process is stopped.
        """
        said: queue.SimpleQueue[list[Any] | Exception] = queue.SimpleQueue()

        def ask() -> None:
            try:
                said.put(self._ask(value))
            except Exception as error:
                said.put(error)

        threading.Thread(target=ask, name="weft-store", daemon=True).start()
        try:
            found = said.get(timeout=self._timeout + _LINGER + 1.0)
        except queue.Empty:
            raise RendezvousFailed(
                f"{self._where} did not answer rank {self._rank} within {self._timeout:g} s: look "
                "whether the process that serves it, in most jobs rank 0, is stopped"
            ) from None
        if isinstance(found, Exception):
            raise found
        return found

    def _ask(self, value: JSON) -> list[Any]:
        try:
            self._group = self._store.add(f"{self._rank}/groups", 1)
            try:
                return self._swap(value, time.monotonic() + self._timeout)
            except RendezvousFailed as error:
                with contextlib.suppress(RuntimeError):  # with the store those are gone who read it
                    if not self._store.check([self._key(_FAILED)]):
                        self._write(_FAILED, str(error))
                raise
            finally:
                with contextlib.suppress(RuntimeError):
                    self._leave()
        except RendezvousFailed:
            raise
        except RuntimeError as error:
            self._peers.check_ended()
            raise RendezvousFailed(
                f"rank {self._rank} lost {self._where}: the process that serves it, in most jobs "
                f"rank 0, gave up or died ({error})"
            ) from error

    def _swap(self, value: JSON, deadline: float) -> list[Any]:
        found: dict[int, Any] = {}
        self._write(self._rank, value)
        pause = 0.001
        while missing := [r for r in range(self._size) if r not in found]:
            late = time.monotonic() >= deadline
            dead = None
            try:
                self._peers.check()
            except RendezvousFailed as error:  # what a rank wrote before it died still counts
                dead = error
            for rank in missing:
                if self._store.check([self._key(rank)]):
                    found[rank] = self._read(rank)
                    if rank != self._rank:
                        self._peers.watch(rank, found[rank])
            if missing := [r for r in missing if r not in found]:
                if self._store.check([self._key(_FAILED)]):
                    raise RendezvousFailed(text_of(self._read(_FAILED)))
                if dead is not None:
                    raise dead
                if late:
                    raise RendezvousFailed(
                        f"rank {', '.join(map(str, missing))} of {self._size} did not come to "
                        f"{self._where} within {self._timeout:g} s; raise `timeout` if the ranks "
                        f"start that far apart{self._peers.unseen(missing)}"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 0.02)
        return [found[r] for r in range(self._size)]

    def _leave(self) -> None:
        """Say that this rank has read all; rank 0, which may serve it, waits 2 s for the others."""
        self._store.set(self._key(f"left/{self._rank}"), "")
        until = time.monotonic() + _LINGER
        others = [self._key(f"left/{rank}") for rank in range(1, self._size)]
        while self._rank == 0 and not self._store.check(others) and time.monotonic() < until:
            time.sleep(0.01)

    def _key(self, name: int | str) -> str:
        return f"{self._group}/{name}"

    def _write(self, name: int | str, value: JSON) -> None:
        body = encode(value)
        self._store.set(self._key(name), (self._mac(name, body) + body).decode())

    def _read(self, name: int | str) -> Any:
        """What a rank wrote. Raises RendezvousFailed naming the key if it did not."""
        return self._open(name, self._store.get(self._key(name)))

    def _open(self, name: int | str, data: bytes) -> Any:
        named = f"{self._key(name)} in {self._where}"
        size = len(self._mac(name, b""))
        body = data[size:]
        if not hmac.compare_digest(data[:size], self._mac(name, body)):
            raise RendezvousFailed(
                f"{named} was not written with this rank's {SECRET}: set the same on every rank; "
                "else somebody who does not know it wrote there"
            )
        try:
            if len(body) > VALUE_LIMIT:
                raise Malformed(f"{len(body)} bytes, where at most {VALUE_LIMIT} are accepted")
            return decode(body)
        except Malformed as error:
            raise RendezvousFailed(
                f"{named} is not what a rank would write: {text_of(str(error))}. A process "
                f"that is no rank wrote there, or only some ranks have {SECRET}: set it, the same "
                "on every rank, to keep others out"
            ) from error

    def _mac(self, name: int | str, body: bytes) -> bytes:
        """64 hex digits over the key and the value; nothing without a secret."""
        if not self._secret:
            return b""
        key = f"{self._key(name)}/{self._size}\n".encode()
        return hmac.new(self._secret, key + body, hashlib.sha256).hexdigest().encode()


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise RendezvousFailed(f"{name} is {os.environ[name]!r}, not an integer") from None
