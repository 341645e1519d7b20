"""The TCPStore in which ranks of torchrun and like launchers find each other.

A store has no authentication: anyone who reaches its port may use it. So it listens on the one
address that MASTER_ADDR names (127.0.0.1: nobody outside), and what it says is checked before it
is believed. A writer there can end a meeting, but cannot join one, nor lead a rank into another:
the directory must belong to this user with mode 0700, the kernel must report this user at
both ends of each socket, and both ends must show one nonce. What remains to a writer is to lead
ranks of two jobs of the same user to each other. Where WEFT_SECRET is set, the same on every rank,
every value carries an HMAC under it and its key, and that is closed, too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import ipaddress
import os
import socket
import time
from datetime import timedelta
from typing import Any

from torch.distributed import DistNetworkError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from weft.errors import RendezvousFailed
from weft.memory.peers import Peers
from weft.memory.wire import JSON, VALUE_LIMIT, Malformed, decode, encode, text_of

SECRET = "WEFT_SECRET"
_LINGER = 2.0  # seconds that rank 0 keeps a store for ranks that have still to read why it failed
_env_groups = 0  # from_env calls of this process: each has keys of its own in the store


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


class StoreExchange:
    """An exchange through the TCPStore that torchrun's variables name, while it looks after peers.

    Unless torchrun's agent serves the store, rank 0 does, on the address of MASTER_ADDR alone, for
    as long as this object lives.
    """

    def __init__(self, rank: int, size: int, timeout: float, peers: Peers) -> None:
        global _env_groups
        _env_groups += 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._rank = rank
        self._size = size
        self._timeout = timeout
        self._peers = peers
        self._address, self._port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
        self._prefix = f"weft/{attempt}/{_env_groups}"
        self._secret = os.environ.get(SECRET, "").encode(errors="surrogateescape")
        self._turn = 0
        self._served: TCPStore | None = None
        if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._served = self._serve()
        self._store = self._connect(self._served)

    def __call__(self, value: JSON) -> list[Any]:
        """`value` of every rank, in rank order. Raises RendezvousFailed."""
        self._turn += 1
        deadline = time.monotonic() + self._timeout
        while True:
            try:
                found = self._swap(encode(value), deadline)
                self._say_read()
                if self._turn == 1:
                    self.linger()  # a rank that loses the store from now on knows that rank 0 died
                return found
            except RendezvousFailed:
                self._say_read()  # enough of it
                raise
            except DistNetworkError as error:
                # Before rank 0 sent its identity, this may have been the store of its last group.
                if self._rank == 0 or self._peers.knows(0) or time.monotonic() >= deadline:
                    raise RendezvousFailed(
                        f"rank {self._rank} lost the store at {self._at()}: rank 0, which serves "
                        f"it, gave up or died ({error})"
                    ) from error
                self._store = self._connect(None)
            except RuntimeError as error:
                raise RendezvousFailed(
                    f"rank {self._rank} cannot use the store at {self._at()}: {error}"
                ) from error

    def linger(self) -> None:
        """Keep the store, if this rank serves it, until all have read from it; 2 s at most."""
        until = time.monotonic() + (_LINGER if self._served is not None else 0.0)
        keys = {r: f"{self._turn}/{r}/read" for r in range(1, self._size)}
        pause = 0.001
        with contextlib.suppress(RuntimeError):
            while keys and time.monotonic() < until:
                dead = self._peers.dead()
                keys = {
                    r: k for r, k in keys.items() if r not in dead and not self._store.check([k])
                }
                time.sleep(pause if keys else 0.0)
                pause = min(2 * pause, 0.02)

    def _say_read(self) -> None:
        """Write for rank 0 that it need not keep the store for this rank's sake."""
        with contextlib.suppress(RuntimeError):  # rank 0 need not live on
            self._store.set(f"{self._turn}/{self._rank}/read", "")

    def _swap(self, body: bytes, deadline: float) -> list[Any]:
        found: dict[int, Any] = {}
        self._store.set(f"{self._turn}/{self._rank}", self._seal(self._rank, body).decode())
        pause = 0.001
        while True:
            dead = self._peers.dead()  # first: what a rank wrote before it died still counts
            for rank in range(self._size):
                key = f"{self._turn}/{rank}"
                if rank not in found and self._store.check([key]):
                    found[rank] = self._open(rank, self._store.get(key))
                    if rank != self._rank:
                        self._peers.watch(rank, found[rank])
            missing = [r for r in range(self._size) if r not in found]
            if not missing:
                return [found[r] for r in range(self._size)]
            if dead:
                raise RendezvousFailed(self._peers.died(dead[0]))
            if time.monotonic() >= deadline:
                raise RendezvousFailed(
                    f"rank {', '.join(map(str, missing))} of {self._size} did not come to the "
                    f"store at {self._at()} within {self._timeout:g} s; raise `timeout` if the "
                    f"ranks start that far apart{self._peers.unseen(missing)}"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _seal(self, rank: int, body: bytes) -> bytes:
        return self._mac(rank, body) + body

    def _open(self, rank: int, data: bytes) -> Any:
        """What rank `rank` wrote. Raises RendezvousFailed naming the key if it did not."""
        named = f"{self._prefix}/{self._turn}/{rank} in the store at {self._at()}"
        size = len(self._mac(rank, b""))
        body = data[size:]
        if not hmac.compare_digest(data[:size], self._mac(rank, body)):
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
                f"{named} is not what rank {rank} would write: {text_of(str(error))}. A process "
                f"that is no rank wrote there, or only some ranks have {SECRET}: set it, the same "
                "on every rank, to keep others out"
            ) from error

    def _mac(self, rank: int, body: bytes) -> bytes:
        """64 hex digits over the key and the value; nothing without a secret."""
        if not self._secret:
            return b""
        key = f"{self._prefix}/{self._turn}/{rank}/{self._size}\n".encode()
        return hmac.new(self._secret, key + body, hashlib.sha256).hexdigest().encode()

    def _serve(self) -> TCPStore | None:
        """A store on the address that MASTER_ADDR names; None if one is there already."""
        listener = _listen(self._address, self._port)
        if listener is None:
            return None
        try:
            return self._open_store(listener.fileno())
        except RuntimeError as error:
            raise RendezvousFailed(
                f"rank 0 cannot serve a store at {self._at()}: {error}; check MASTER_PORT"
            ) from error
        finally:
            listener.detach()

    def _connect(self, served: TCPStore | None) -> PrefixStore:
        try:
            return PrefixStore(self._prefix, served or self._open_store(None))
        except RuntimeError as error:
            raise RendezvousFailed(
                f"rank {self._rank} cannot reach the store at {self._at()}: {error}; check "
                "MASTER_ADDR and MASTER_PORT, which rank 0 serves on that address alone"
            ) from error

    def _open_store(self, listener: int | None) -> TCPStore:
        return TCPStore(
            self._address,
            self._port,
            self._size,
            listener is not None,
            timedelta(seconds=self._timeout),
            wait_for_workers=False,
            master_listen_fd=listener,
        )

    def _at(self) -> str:
        return f"{self._address}:{self._port}"


def _listen(address: str, port: int) -> socket.socket | None:
    """A socket that listens at `address` alone; None where somebody listens already.

    Shared memory needs one host, so the address is this machine's: a loopback address keeps
    everyone else out, and another one serves ranks in containers with networks of their own.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RendezvousFailed(
            f"MASTER_ADDR is {address!r}, which has no address ({error}); for ranks on one host "
            "set MASTER_ADDR=127.0.0.1"
        ) from error
    problem: OSError | None = None
    # IPv4 first: a client that tries both finds it either way.
    for family, _, _, _, where in sorted(found, key=lambda each: each[0] != socket.AF_INET):
        host = str(where[0])
        if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
            host = "127.0.0.1" if family == socket.AF_INET else "::1"
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port, *where[2:]))
            listener.listen(socket.SOMAXCONN)
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                return None
            problem = error
    raise RendezvousFailed(
        f"MASTER_ADDR is {address!r} and rank 0 cannot listen there ({problem}): give an address "
        "of the machine that rank 0 runs on; for ranks on one host set MASTER_ADDR=127.0.0.1"
    ) from problem


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise RendezvousFailed(f"{name} is {os.environ[name]!r}, not an integer") from None
