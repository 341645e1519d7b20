# SPDX-License-Identifier: Apache-2.0
"""Rendezvous of the ranks of one host at one of them, the hub, which connects every two ranks.

The hub listens at an abstract Unix address, which has a name but no file: even after `kill -9`
nothing remains, and mounts do not matter. Processes of one network namespace reach it. The hub
listens before any rank learns the address, so a refused connection means that the meeting is over.

The kernel reports the user of the other end, and connections of other users are closed before
anything is read. The first message in each direction must show the job's 32-byte nonce. The hub
then compares what the ranks were built for. A stranger is refused and disturbs no rank. A stranger
that connects again and again cannot keep the ranks apart: the hub accepts a bounded number of
connections before it serves its ranks and checks the clock, and ranks wait in the kernel's queue.

Three signs of a failed rank reach the hub: the end of its socket, its pidfd if its process is known
(`Peers`, needed when a forked child holds the socket too), and a message of the process that
started it (`abort`). Before the hub closes, it sends the reason to every connected rank. For a rank
that is stopped but not dead, only the deadline helps.
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
    encode,
    receive,
    sanitize_text,
    send,
)
from weft.logs import WaitLogTimer

ABI = 5  # of the messages and of the memory layout that peers rely on
_OP = "the meeting"
_RETRY_SECONDS = 0.002  # between two tries where no wait is possible
_CONNECT_SECONDS = 0.1  # of one wait in the kernel for room in the queue of the hub
_END_TRIES = 20  # waits for room in the queue before `end` gives up
_ACCEPTS = 256  # connections that the hub accepts before it serves its ranks again
_GREETING = 256  # connections without a nonce so far that the hub keeps
_HUB_FIRST = 1.0  # seconds that ranks wait longer than the hub, which knows who is missing
_OVER = "the meeting is over: a rank failed or gave up, or all that it was for had met"
_NOT_OURS = "the nonce is not this job's; start every rank from the same launcher"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Rendezvous of the ranks of one job.

    Attributes:
        hub: Rank at which all meet.
        nonce: Secret of the job, 32 bytes.
        listener: Listening socket in the process that opened the meeting, else None.
    """

    hub: int
    nonce: bytes
    listener: socket.socket | None = field(default=None, repr=False, compare=False)

    @classmethod
    def open(cls, hub: int = 0) -> Meeting:
        """Draw a nonce and listen.

        Raises:
            RendezvousFailed: this process lacks descriptors.
        """
        drawn = cls(hub, secrets.token_bytes(32))
        with contextlib.ExitStack() as held:
            try:
                listener = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                listener.setblocking(False)
                listener.bind(drawn._name)
                listener.listen(socket.SOMAXCONN)
            except OSError as error:
                raise RendezvousFailed(
                    f"cannot listen for the other ranks ({error.strerror}): free descriptors "
                    "(ulimit -n), and allow Unix sockets"
                ) from error
            held.pop_all()  # the meeting owns the listener
        return cls(hub, drawn.nonce, listener)

    @property
    def address(self) -> str:
        """Hub and nonce as one text. It is a secret of the job."""
        return f"{self.hub}-{self.nonce.hex()}"

    @classmethod
    def from_address(cls, address: str) -> Meeting:
        """Return the meeting at an `address`, for a rank that is not the hub.

        Raises:
            InvalidArgument: the address is malformed.
        """
        match = re.fullmatch(r"(\d{1,5})-([0-9a-f]{64})", address, re.ASCII)
        if match is None or address.endswith("\n"):
            raise InvalidArgument(
                "the address of the meeting is none that a rank gave: pass its `Meeting.address`"
            )
        return cls(int(match[1]), bytes.fromhex(match[2]))

    @property
    def _name(self) -> str:
        # Public on this host; the nonce does not follow from it.
        return f"\0weft-{hashlib.sha256(self.nonce).hexdigest()[:32]}"

    def connect(self) -> socket.socket:
        """Connect to the hub within 0.1 s.

        Raises:
            BlockingIOError: the queue of the hub had no room. Other OSErrors are raised too.
            RendezvousFailed: another user listens there.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # The kernel wakes a waiting connect when there is room; a failed try is not woken.
            turn = struct.pack("ll", 0, int(_CONNECT_SECONDS * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, turn)
            connection.connect(self._name)
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
        """Make every rank that has not met the others raise `reason`.

        Call it in a process that started a rank and sees it fail. It does nothing after all have
        met.
        """
        message = encode({"nonce": self.nonce.hex(), "fail": reason})
        for _ in range(_END_TRIES):
            # If all have met, or have failed, no process listens.
            with contextlib.suppress(RendezvousFailed, OSError):
                try:
                    connection = self.connect()
                except BlockingIOError:
                    continue
                with connection:
                    send(connection, message)
            return

    def close(self, reason: str = _OVER) -> None:
        """Refuse further connections, and send `reason` to those that wait. Idempotent.

        Call it in the hub, or in the process that opened the meeting for it.
        """
        if self.listener is None or self.listener.fileno() < 0:
            return
        # OSError: a copy in another process has been shut down, or other code closed this one.
        with contextlib.suppress(OSError), self.listener:
            # From now on the queue, whose length the kernel bounds, takes no more connections.
            self.listener.shutdown(socket.SHUT_RDWR)
            for _ in range(socket.SOMAXCONN // _ACCEPTS + 2):
                for connection in self.accept():
                    reject(connection, reason)

    def accept(self) -> list[socket.socket]:
        """Take connections from the queue and return those of this user; others are closed.

        At most 256 are taken. Returns [] if the queue is empty or only strangers were in it.
        """
        assert self.listener is not None
        ours: list[socket.socket] = []
        try:
            for _ in range(_ACCEPTS):
                connection, _ = self.listener.accept()
                if peer_credentials(connection)[1] == os.geteuid():
                    ours.append(connection)
                else:
                    connection.close()
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except BaseException:
            for each in ours:
                each.close()
            raise
        return ours

    def has_valid_nonce(self, message: Mapping[str, Any]) -> bool:
        """Whether a message shows the nonce, in constant time."""
        shown = message.get("nonce")
        return isinstance(shown, str) and hmac.compare_digest(
            shown.encode(errors="surrogatepass"), self.nonce.hex().encode()
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
    """Connect to the other ranks. Collective.

    Args:
        meeting: Where to meet.
        rank: Rank of this process.
        size: Number of ranks.
        device: Kind of memory, "cpu" or "cuda"; the same on every rank.
        timeout: Seconds to meet.
        peers: Processes of ranks as far as they are known. The death of one ends the meeting.

    Raises:
        RendezvousFailed: names the rank that is missing, died, differs or is not trusted.
    """
    for name, value in (("rank", rank), ("the hub of the meeting", meeting.hub)):
        if not 0 <= value < size:
            raise InvalidArgument(f"{name} is {value} and size is {size}: give 0 <= rank < size")
    if rank == meeting.hub and meeting.listener is None:
        raise InvalidArgument(
            f"rank {rank} is where all meet, and this process has not opened the meeting: pass "
            "what Meeting.open() returned, and give every process its own rank"
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
        "rank %d of %d on %s met the others after %.3f s; processes by rank: %s",
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
        # Connections that have not shown the nonce yet, oldest first.
        self.unverified: dict[socket.socket, None] = {}
        self.met: set[int] = set()  # ranks that have sockets to all others
        self._reminder = WaitLogTimer()

    def __enter__(self) -> _Hub:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        reason = _OVER if error is None else str(error) or type(error).__name__
        for connection in self.unverified:
            reject(connection, reason)
        self.meeting.close(reason)

    def gather(self, deadline: float, timeout: float) -> None:
        """Admit every rank, then send every two of them a pair of connected sockets.

        No rank returns before all have their sockets, so a rank that leaves at once disturbs none.
        """
        control = self.control
        try:
            while missing := [r for r in range(control.size) if r not in self._admitted()]:
                self._log_wait("to come", missing, timeout)
                if time.monotonic() >= deadline:
                    control.fail(
                        f"rank {', '.join(map(str, missing))} of {control.size} did not come to "
                        f"rank {control.rank} within {timeout:g} s; raise `timeout` if the ranks "
                        f"start that far apart{self.peers.describe_unwatched(missing)}"
                    )
                self._handle_event(deadline)
            for one, other in itertools.combinations(sorted(control.peers), 2):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with ours, theirs:
                    self._send(one, {"peer": other, "pid": control.pids[other]}, deadline, ours)
                    self._send(other, {"peer": one, "pid": control.pids[one]}, deadline, theirs)
            while missing := sorted(set(control.peers) - self.met):
                self._log_wait("to take the sockets to the others", missing, timeout)
                if time.monotonic() >= deadline:
                    names = ", ".join(map(control.name, missing))
                    control.fail(f"{names} did not take the sockets to the others in time")
                self._handle_event(deadline)
            for rank in control.peers:
                self._send(rank, {"met": True}, deadline)
        except OSError as error:
            control.fail(
                f"rank {control.rank} cannot meet the others: {error}; it needs free descriptors "
                "(ulimit -n)"
            )

    def _log_wait(self, what: str, missing: list[int], timeout: float) -> None:
        if (waited := self._reminder.due()) is not None:
            _log.warning(
                "rank %d has waited %.0f s of at most %g s in %s for rank %s of %d %s",
                *(self.control.rank, waited, timeout, _OP, ", ".join(map(str, missing))),
                *(self.control.size, what),
            )

    def _admitted(self) -> set[int]:
        return {self.control.rank, *self.control.peers}

    def _handle_event(self, deadline: float) -> None:
        """Wait for an event and handle it: a connection, a hello, or the end of a rank."""
        assert self.meeting.listener is not None
        poller = select.poll()
        members = self.control.peers
        for each in (self.meeting.listener, *self.unverified, *members.values()):
            poller.register(each, select.POLLIN)
        for fd in self.peers.pidfds():
            poller.register(fd, select.POLLIN)
        poller.poll(remaining_ms(self._reminder.next_wakeup(deadline)))
        # Before their messages are read: what an ended rank sent has arrived.
        ended = {rank for rank in members if self.peers.has_ended(rank)}
        for rank in members:
            while (message := self.control.receive(rank, _OP)) is not None:
                message.close_fd()
                self.met.add(rank)
        self.unverified.update(dict.fromkeys(self.meeting.accept()))
        for connection in list(self.unverified):
            self._read_hello(connection)
        # A rank sends its hello as soon as it is connected, so the oldest are strangers.
        for connection in list(self.unverified)[:-_GREETING]:
            self._reject(connection, "no hello came, and others wait")
        try:
            # The socket of an admitted rank ends with it, unless a forked child has it too.
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
            self._reject(connection, _NOT_OURS)
            return
        if "fail" in message.body:  # sent by the launcher (`Meeting.abort`)
            self.control.fail(sanitize_text(message.body["fail"]))
        self._admit(connection, message.body)

    def _admit(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        """Admit a connection that has shown the nonce, or fail if the rank differs."""
        control, pid = self.control, peer_credentials(connection)[0]
        rank: Any = hello.get("rank")
        differs = [
            f"{k} {v!r} and {sanitize_text(repr(hello.get(k)))[:200]}"
            for k, v in self.build_info.items()
            if hello.get(k) != v or type(hello.get(k)) is not type(v)
        ]
        known = type(rank) is int and rank in range(control.size)
        if known and rank not in self._admitted() and not differs:
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
            what = "another process has taken" if known else f"is none of {control.size}"
            reason = f"pid {pid} came as rank {name}, which {what}; give every process its own rank"
        control.fail(reason)  # connections without a nonce so far get the reason too

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
                    control.fail(f"{control.name(rank)} did not take its sockets in time")
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
    """Connect to the hub and receive from it the sockets to all others."""
    hub, deadline = meeting.hub, time.monotonic() + timeout + _HUB_FIRST
    others = set(range(control.size)) - {hub}  # the hub reports their deaths with the reason
    reminder = WaitLogTimer()

    def log_wait() -> None:
        if (waited := reminder.due()) is not None:
            _log.warning(
                "rank %d has waited %.0f s of at most %g s in %s for rank %d, at which all meet: "
                "it, or a rank that it waits for, has not come",
                *(control.rank, waited, timeout, _OP, hub),
            )

    late = f"rank {hub}, at which all meet, did not bring this rank to the others in {timeout:g} s"
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
        ended = peers.has_ended(hub)  # before its last message is read
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
            control.fail(f"{control.name(hub)} died before all ranks had met")
        except DescriptorLimit as error:
            control.fail(f"{control.name(control.rank)} cannot take its part of {_OP}: {error}")
        except (MalformedMessage, OSError) as error:
            control.fail(f"{control.name(hub)} broke the protocol in {_OP}: {error}")
        if ended:  # a forked child of it keeps the listener and perhaps the sockets
            peers.check(others)
        if time.monotonic() >= deadline:
            control.fail(f"{late}: look whether it is stopped")
        log_wait()
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        pidfd = peers.pidfd(hub)
        if pidfd is not None:
            poller.register(pidfd, select.POLLIN)
        poller.poll(remaining_ms(reminder.next_wakeup(deadline)))


def _handle_hub_message(meeting: Meeting, control: ControlPlane, message: Message) -> bool:
    """Handle a hello, a socket to a peer or a failure; return whether all have met.

    Only the hub is read. It passes on why a rank left, whereas the socket to that rank may only
    show its end.
    """
    body, fd = message.body, message.fd
    for key in ("fail", "bye"):
        if key in body:
            message.close_fd()
            control.fail(sanitize_text(body[key]))
    if control.pids[meeting.hub] == 0:
        message.close_fd()
        if not meeting.has_valid_nonce(body) or type(body.get("pid")) is not int:
            control.fail(f"rank {meeting.hub}: {_NOT_OURS}")
        control.pids[meeting.hub] = body["pid"]
        return False
    if "met" in body and len(control.peers) == control.size - 1:
        message.close_fd()
        return True
    peer, pid = body.get("peer"), body.get("pid")
    if type(peer) is not int or type(pid) is not int or fd is None:
        message.close_fd()
        raise MalformedMessage(f"it sent {body!r:.200} in place of a peer's socket")
    control.add(peer, pid, socket.socket(fileno=fd))
    return False


def encode_hello(meeting: Meeting, fields: Mapping[str, JSON]) -> bytes:
    """Return the first message of either end."""
    return encode({**fields, "nonce": meeting.nonce.hex()})


def reject(connection: socket.socket, reason: str) -> None:
    """Send the reason and close."""
    with connection, contextlib.suppress(OSError):  # the other end may be gone
        send(connection, encode({"fail": sanitize_text(reason)}))


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the other end, as the kernel knows them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    return int(pid), int(uid)
