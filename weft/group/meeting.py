# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of the ranks of one host: one rank, the hub, connects each pair of ranks.

The hub listens at an abstract Unix address, which has a name but no file: even after `kill -9`
nothing remains, and mounts do not matter. Processes of one network namespace reach it. The hub
listens before any rank gets the address, so a refused connection means that the meeting is over.

The kernel reports the user of the other end, and connections of other users are closed before
anything is read. The first message in each direction must contain the job's 32-byte nonce. The hub
then compares the ABI, the size of the group and the kind of device. Connections without the nonce
are rejected and do not affect the ranks, even if another process connects repeatedly: the hub
accepts a bounded number of connections before it handles its ranks' messages and checks the
deadline, and ranks wait in the kernel's queue.

The hub detects a failed rank by the end of its socket, by its pidfd if its process is known
(`Peers`, needed when a forked child holds the socket too), or by a message from the process that
started it (`abort`). Before the hub closes, it sends the reason to every connected rank. A rank
that is stopped but not dead is detected only by the deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import logging
import os
import re
import secrets
import select
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.errors import InvalidArgument, RendezvousFailed
from weft.group.control import ControlPlane, remaining_ms
from weft.group.liveness import Peers
from weft.group.wire import (
    JSON,
    DescriptorLimit,
    Disconnected,
    MalformedMessage,
    Message,
    decode,
    encode,
    receive,
    sanitize_text,
    send,
)
from weft.logs import WaitLogTimer

ABI = 5  # version of the messages and of the memory layout that peers rely on
_OP = "the meeting"
_RETRY_SECONDS = 0.002  # interval between retries of a full socket
_CONNECT_SECONDS = 0.1  # timeout of one connect to a hub whose queue is full
_ABORT_TRIES = 20  # connects that `abort` tries before it gives up
_MAX_ACCEPTS = 256  # connections that the hub accepts before it handles messages again
_MAX_UNVERIFIED = 256  # open connections that have not sent the nonce
_EXTRA_SECONDS = 1.0  # ranks wait longer than the hub, whose error names the missing ranks
_OVER = "the meeting is over: a rank failed or gave up, or all ranks have connected"
_TOO_MANY = "no hello was received, and other connections wait"
_WRONG_NONCE = "the nonce is not this job's; start every rank from the same launcher"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Rendezvous of the ranks of one job.

    Attributes:
        hub: Rank that listens and connects all others.
        nonce: Secret of the job, 32 bytes.
        listener: Listening socket in the process that opened the meeting, else None.
    """

    hub: int
    nonce: bytes
    listener: socket.socket | None = field(default=None, repr=False, compare=False)
    # Connections that `find_waiting_ranks` has accepted, for the hub.
    _accepted: list[socket.socket] = field(default_factory=list, repr=False, compare=False)

    @classmethod
    def open(cls, hub: int = 0) -> Meeting:
        """Create a meeting with a random nonce and listen for its ranks.

        Raises:
            RendezvousFailed: this process is out of file descriptors.
        """
        meeting = cls(hub, secrets.token_bytes(32))
        with contextlib.ExitStack() as stack:
            try:
                listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                listener.setblocking(False)
                listener.bind(meeting._socket_name)
                listener.listen(socket.SOMAXCONN)
            except OSError as error:
                raise RendezvousFailed(
                    f"cannot listen for the other ranks ({error.strerror}): free descriptors "
                    "(ulimit -n), and allow Unix sockets"
                ) from error
            stack.pop_all()  # the meeting owns the listener
        return cls(hub, meeting.nonce, listener)

    @property
    def address(self) -> str:
        """Hub and nonce as one string. Keep it secret: it admits a process to the job."""
        return f"{self.hub}-{self.nonce.hex()}"

    @classmethod
    def from_address(cls, address: str) -> Meeting:
        """Parse the `address` of a meeting, for a rank that is not the hub.

        Raises:
            InvalidArgument: the address is malformed.
        """
        match = re.fullmatch(r"(\d{1,5})-([0-9a-f]{64})", address, re.ASCII)
        if match is None or address.endswith("\n"):
            raise InvalidArgument(
                "malformed meeting address: pass the `Meeting.address` of the rank that opened it"
            )
        return cls(int(match[1]), bytes.fromhex(match[2]))

    @property
    def _socket_name(self) -> str:
        # Visible to every process on this host, so it must not reveal the nonce.
        return f"\0weft-{hashlib.sha256(self.nonce).hexdigest()[:32]}"

    def connect(self) -> socket.socket:
        """Connect to the hub within 0.1 s.

        Raises:
            BlockingIOError: the queue of the hub is full. Other OSErrors are raised too.
            RendezvousFailed: another user listens at the address.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # With a timeout the kernel wakes connect as soon as the queue has a free entry.
            limit = struct.pack("ll", 0, int(_CONNECT_SECONDS * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connection.connect(self._socket_name)
            connection.setblocking(False)
            pid, uid = peer_credentials(connection)
            if pid == 0 and not _is_connected(connection):  # a signal interrupted connect
                raise BlockingIOError("interrupted")
            if uid != os.geteuid():
                raise RendezvousFailed(
                    f"rank {self.hub} runs as user {uid} and this rank as user {os.geteuid()}; run "
                    "all ranks as one user"
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def abort(self, reason: str) -> None:
        """Make every rank that is still in the rendezvous raise `reason`.

        Call it in a process that started a rank and sees it fail. It has no effect after all ranks
        have connected.
        """
        message = encode({"nonce": self.nonce.hex(), "fail": reason})
        for _ in range(_ABORT_TRIES):
            # If all ranks have connected or failed, no process listens.
            with contextlib.suppress(RendezvousFailed, OSError):
                try:
                    connection = self.connect()
                except BlockingIOError:
                    continue
                with connection:
                    send(connection, message)
            return

    def close(self, reason: str = _OVER) -> None:
        """Stop listening, and send `reason` to the connections in the queue. Idempotent.

        Call it in the hub, or in the process that opened the meeting for it.
        """
        if self.listener is None or self.listener.fileno() < 0:
            return
        # OSError: a copy in another process has been shut down, or other code closed this one.
        with contextlib.suppress(OSError), self.listener:
            # After the shutdown the queue, whose length the kernel bounds, accepts no connections.
            self.listener.shutdown(socket.SHUT_RDWR)
            for connection in self.take_accepted():
                reject(connection, reason)
            for _ in range(socket.SOMAXCONN // _MAX_ACCEPTS + 2):
                for connection in self.accept():
                    reject(connection, reason)

    def find_waiting_ranks(self) -> set[int]:
        """Return the ranks that wait for the hub, without blocking. Elsewhere, return set()."""
        if self.listener is None:
            return set()
        self._accepted.extend(self.accept())
        poller = select.poll()
        for connection in self._accepted:
            poller.register(connection, 0)  # reports only ended ones
        ended = dict(poller.poll(0))
        ranks, open_connections = set(), []
        for connection in self._accepted:
            if connection.fileno() in ended:
                connection.close()
                continue
            try:
                hello = decode(connection.recv(1 << 15, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            except BlockingIOError:  # its hello has not arrived
                open_connections.append(connection)
            except (OSError, MalformedMessage) as error:
                reject(connection, f"not a rank's hello: {error}")
            else:
                if isinstance(hello, dict) and self.has_valid_nonce(hello):
                    ranks.add(hello.get("rank"))
                    open_connections.append(connection)
                else:
                    reject(connection, _WRONG_NONCE)
        for connection in open_connections[:-_MAX_UNVERIFIED]:
            reject(connection, _TOO_MANY)
        self._accepted[:] = open_connections[-_MAX_UNVERIFIED:]
        return {rank for rank in ranks if type(rank) is int}

    def take_accepted(self) -> list[socket.socket]:
        """Return the connections that `find_waiting_ranks` has accepted. The caller owns them."""
        accepted = self._accepted[:]
        self._accepted.clear()
        return accepted

    def accept(self) -> list[socket.socket]:
        """Accept up to 256 queued connections, close those of other users, return the rest.

        Returns [] if the queue has no connection of this user.
        """
        assert self.listener is not None
        accepted: list[socket.socket] = []
        try:
            for _ in range(_MAX_ACCEPTS):
                connection, _ = self.listener.accept()
                if peer_credentials(connection)[1] == os.geteuid():
                    accepted.append(connection)
                else:
                    connection.close()
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except BaseException:
            for connection in accepted:
                connection.close()
            raise
        return accepted

    def has_valid_nonce(self, message: Mapping[str, Any]) -> bool:
        """Whether a message contains the nonce, compared in constant time."""
        nonce = message.get("nonce")
        return isinstance(nonce, str) and hmac.compare_digest(
            nonce.encode(errors="surrogatepass"), self.nonce.hex().encode()
        )


def meet(
    meeting: Meeting,
    *,
    rank: int,
    size: int,
    device: str,
    timeout: float,
    peers: Peers | None = None,
) -> ControlPlane:
    """Connect this rank to all others. Collective.

    Args:
        meeting: Rendezvous of the ranks.
        rank: Rank of this process.
        size: Number of ranks.
        device: Kind of memory, "cpu" or "cuda"; the same on every rank.
        timeout: Seconds for the rendezvous.
        peers: Processes of ranks as far as they are known. The death of one ends the meeting.

    Returns:
        The sockets to all other ranks.

    Raises:
        RendezvousFailed: a rank is missing, died, differs or sent a wrong nonce. Names the rank.
    """
    for name, value in (("rank", rank), ("the hub of the meeting", meeting.hub)):
        if not 0 <= value < size:
            raise InvalidArgument(f"{name} is {value} and size is {size}: pass 0 <= rank < size")
    if rank == meeting.hub and meeting.listener is None:
        raise InvalidArgument(
            f"rank {rank} is the hub, but this process has not opened the meeting: pass the result "
            "of Meeting.open(), and give every process its own rank"
        )
    began = time.monotonic()
    control = ControlPlane(rank, size)
    build_info: dict[str, JSON] = {"abi": ABI, "size": size, "device": device}
    try:
        if rank == meeting.hub:
            with _Hub(meeting, control, build_info, peers or Peers()) as hub:
                hub.gather(began + timeout, timeout)
        else:
            _join_hub(meeting, control, build_info, timeout, peers or Peers())
    except BaseException as error:
        control.close(str(error) or type(error).__name__)
        raise
    _log.info(
        "rank %d of %d on %s connected to the others after %.3f s; processes by rank: %s",
        *(rank, size, device, time.monotonic() - began, control.pids),
    )
    return control


class _Hub:
    """Hub side of a meeting; a context manager that ends the meeting."""

    def __init__(
        self, meeting: Meeting, control: ControlPlane, build_info: dict[str, JSON], peers: Peers
    ) -> None:
        self.meeting = meeting
        self.control = control
        self.build_info = build_info
        self.peers = peers
        # Connections that have not sent the nonce yet, oldest first.
        self.unverified = dict.fromkeys(meeting.take_accepted())
        self.connected: set[int] = set()  # ranks that have sockets to all others
        self._wait_timer = WaitLogTimer()

    def __enter__(self) -> _Hub:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        reason = _OVER if error is None else str(error) or type(error).__name__
        for connection in self.unverified:
            reject(connection, reason)
        self.meeting.close(reason)

    def gather(self, deadline: float, timeout: float) -> None:
        """Admit every rank, then send each pair of ranks a pair of connected sockets.

        Every rank waits until all have their sockets, so that a rank that leaves right afterwards
        does not fail the rendezvous of others.
        """
        control = self.control
        try:
            while missing := [r for r in range(control.size) if r not in self._admitted()]:
                self._log_wait("to join", missing, timeout)
                if time.monotonic() >= deadline:
                    control.fail(
                        f"rank {', '.join(map(str, missing))} of {control.size} did not connect to "
                        f"rank {control.rank} within {timeout:g} s; raise `timeout` if the ranks "
                        f"start that far apart{self.peers.describe_unwatched(missing)}"
                    )
                self._handle_event(deadline)
            for one, other in itertools.combinations(sorted(control.peers), 2):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with ours, theirs:
                    self._send(one, {"peer": other, "pid": control.pids[other]}, deadline, ours)
                    self._send(other, {"peer": one, "pid": control.pids[one]}, deadline, theirs)
            while missing := sorted(set(control.peers) - self.connected):
                self._log_wait("to receive the sockets to the others", missing, timeout)
                if time.monotonic() >= deadline:
                    names = ", ".join(map(control.format_rank, missing))
                    control.fail(f"{names} did not receive the sockets to the others in time")
                self._handle_event(deadline)
            for rank in control.peers:
                self._send(rank, {"met": True}, deadline)
        except OSError as error:
            control.fail(
                f"rank {control.rank} cannot connect the ranks: {error}; it needs free descriptors "
                "(ulimit -n)"
            )

    def _log_wait(self, step: str, missing: list[int], timeout: float) -> None:
        if (waited := self._wait_timer.due()) is not None:
            _log.warning(
                "rank %d has waited %.0f s of at most %g s in %s for rank %s of %d %s",
                *(self.control.rank, waited, timeout, _OP, ", ".join(map(str, missing))),
                *(self.control.size, step),
            )

    def _admitted(self) -> set[int]:
        return {self.control.rank, *self.control.peers}

    def _handle_event(self, deadline: float) -> None:
        """Wait for an event and handle it: a connection, a hello, or the end of a rank."""
        assert self.meeting.listener is not None
        poller = select.poll()
        members = self.control.peers
        for connection in (self.meeting.listener, *self.unverified, *members.values()):
            poller.register(connection, select.POLLIN)
        for fd in self.peers.pidfds():
            poller.register(fd, select.POLLIN)
        poller.poll(remaining_ms(self._wait_timer.next_wakeup(deadline)))
        # Checked before messages are read: all messages of an ended rank have arrived.
        ended = {rank for rank in members if self.peers.has_ended(rank)}
        for rank in members:
            while (message := self.control.receive(rank, _OP)) is not None:
                message.close_fd()
                self.connected.add(rank)
        self.unverified.update(dict.fromkeys(self.meeting.accept()))
        for connection in list(self.unverified):
            self._read_hello(connection)
        # A rank sends its hello as soon as it is connected, so the oldest belong to no rank.
        for connection in list(self.unverified)[:-_MAX_UNVERIFIED]:
            self._reject(connection, _TOO_MANY)
        try:
            # The socket of an admitted rank ends with it, unless a forked child holds it too.
            self.peers.check(self._admitted() - ended)
        except RendezvousFailed as error:
            self.control.fail(str(error))

    def _read_hello(self, connection: socket.socket) -> None:
        try:
            message = receive(connection, trusted=False)
        except (OSError, MalformedMessage) as error:
            self._reject(connection, f"not a rank's hello: {error}")
            return
        if message is None:
            return
        message.close_fd()
        if not self.meeting.has_valid_nonce(message.body):
            self._reject(connection, _WRONG_NONCE)
            return
        if "fail" in message.body:  # sent by the launcher (`Meeting.abort`)
            self.control.fail(sanitize_text(message.body["fail"]))
        self._admit(connection, message.body)

    def _admit(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        """Admit a connection that has sent the nonce, or fail if its rank or build differs."""
        control, pid = self.control, peer_credentials(connection)[0]
        rank: Any = hello.get("rank")
        differs = [
            f"{k} {v!r} and {sanitize_text(repr(hello.get(k)))[:200]}"
            for k, v in self.build_info.items()
            if hello.get(k) != v or type(hello.get(k)) is not type(v)
        ]
        is_rank = type(rank) is int and rank in range(control.size)
        if is_rank and rank not in self._admitted() and not differs:
            del self.unverified[connection]
            control.add(rank, pid, connection)
            with contextlib.suppress(Disconnected):  # the next `_handle_event` notices
                send(connection, encode_hello(self.meeting, {"pid": os.getpid()}))
            return
        name = sanitize_text(repr(rank))[:200]
        if differs:
            reason = (
                f"rank {control.rank} and rank {name} (pid {pid}) disagree: {'; '.join(differs)}"
            )
        else:
            problem = "another process has" if is_rank else f"is not in 0..{control.size - 1}"
            reason = f"pid {pid} has rank {name}, which {problem}; give every process its own rank"
        control.fail(reason)  # the context's exit sends the reason to unverified connections too

    def _reject(self, connection: socket.socket, reason: str) -> None:
        del self.unverified[connection]
        reject(connection, reason)

    def _send(
        self, rank: int, body: JSON, deadline: float, end: socket.socket | None = None
    ) -> None:
        control = self.control
        fd = None if end is None else end.fileno()
        try:
            while not send(control.peers[rank], encode(body), fd):
                if time.monotonic() >= deadline:
                    control.fail(f"{control.format_rank(rank)} did not receive its sockets in time")
                time.sleep(_RETRY_SECONDS)
        except Disconnected:
            control.raise_peer_error(rank, _OP)


def _join_hub(
    meeting: Meeting,
    control: ControlPlane,
    build_info: dict[str, JSON],
    timeout: float,
    peers: Peers,
) -> None:
    """Connect to the hub and receive from it the sockets to all other ranks."""
    hub, deadline = meeting.hub, time.monotonic() + timeout + _EXTRA_SECONDS
    others = set(range(control.size)) - {hub}  # the hub reports their deaths with the reason
    wait_timer = WaitLogTimer()

    def log_wait() -> None:
        if (waited := wait_timer.due()) is not None:
            _log.warning(
                "rank %d has waited %.0f s of at most %g s in %s for rank %d, the hub: it, or a "
                "rank that it waits for, has not joined",
                *(control.rank, waited, timeout, _OP, hub),
            )

    late = f"rank {hub}, the hub, did not connect this rank to the others within {timeout:g} s"
    while True:
        try:
            connection = meeting.connect()
            break
        except BlockingIOError:  # its queue is full
            log_wait()
            peers.check(others)
            if time.monotonic() >= deadline:
                raise RendezvousFailed(f"{late}: it accepts no connections") from None
        except ConnectionRefusedError as error:
            peers.check_repeatedly()
            raise RendezvousFailed(_OVER) from error
        except OSError as error:
            raise RendezvousFailed(f"cannot connect to rank {hub}: {error}") from error
    control.add(hub, 0, connection)
    with contextlib.suppress(Disconnected):  # its reason is read below
        send(connection, encode_hello(meeting, {**build_info, "rank": control.rank}))
    while True:
        hub_ended = peers.has_ended(hub)  # checked before its last message is read
        try:
            message = receive(connection, trusted=False)
            if message is not None:
                if _handle_hub_message(meeting, control, message):
                    return
                if len(control.peers) == control.size - 1:
                    with contextlib.suppress(Disconnected):  # its reason is read next
                        send(connection, encode({"recovery_id": 0, "met": True}))
                continue
        except Disconnected:
            peers.check_repeatedly()
            control.fail(f"{control.format_rank(hub)} died before all ranks had connected")
        except DescriptorLimit as error:
            control.fail(
                f"{control.format_rank(control.rank)} cannot receive its part of {_OP}: {error}"
            )
        except (MalformedMessage, OSError) as error:
            control.fail(f"{control.format_rank(hub)} broke the protocol in {_OP}: {error}")
        if hub_ended:  # a forked child of it may hold the listener and the sockets open
            peers.check(others)
        if time.monotonic() >= deadline:
            control.fail(f"{late}: check whether its process is stopped")
        log_wait()
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        pidfd = peers.pidfd(hub)
        if pidfd is not None:
            poller.register(pidfd, select.POLLIN)
        poller.poll(remaining_ms(wait_timer.next_wakeup(deadline)))


def _handle_hub_message(meeting: Meeting, control: ControlPlane, message: Message) -> bool:
    """Handle a hello, a socket to a peer or a failure; return whether all are connected.

    Only the hub's socket is read: the hub forwards the reason why a rank left, whereas the socket
    to that rank may only be closed.
    """
    body, fd = message.body, message.fd
    for key in ("fail", "bye"):
        if key in body:
            message.close_fd()
            control.fail(sanitize_text(body[key]))
    if control.pids[meeting.hub] == 0:
        message.close_fd()
        if not meeting.has_valid_nonce(body) or type(body.get("pid")) is not int:
            control.fail(f"rank {meeting.hub}: {_WRONG_NONCE}")
        control.pids[meeting.hub] = body["pid"]
        return False
    if "met" in body and len(control.peers) == control.size - 1:
        message.close_fd()
        return True
    peer, pid = body.get("peer"), body.get("pid")
    if type(peer) is not int or type(pid) is not int or fd is None:
        message.close_fd()
        raise MalformedMessage(f"it sent {body!r:.200} instead of a peer's socket")
    control.add(peer, pid, socket.socket(fileno=fd))
    return False


def encode_hello(meeting: Meeting, fields: Mapping[str, JSON]) -> bytes:
    """Encode the first message of either end."""
    return encode({**fields, "nonce": meeting.nonce.hex()})


def reject(connection: socket.socket, reason: str) -> None:
    """Send `reason` to the peer and close its connection."""
    with connection, contextlib.suppress(OSError):  # the other end may be closed
        send(connection, encode({"fail": sanitize_text(reason)}))


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other end from the kernel."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    return int(pid), int(uid)
