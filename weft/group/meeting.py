# SPDX-License-Identifier: Apache-2.0
"""How the ranks of one host meet: at one of them, the hub, which hands every two ranks a socket.

The hub listens at an abstract Unix address, which has a name and no file: nothing is left behind
even by `kill -9`, and mounts do not matter. Processes of one network namespace reach it. It listens
before anybody learns the address, so a refused connection says that the meeting is over.

The kernel says of which user the other end is: a connection of another user is closed before
anything is read. The first message either way has to show the job's 32-byte nonce; then the hub
compares what the ranks were built for. A stranger is refused and disturbs no rank. One who connects
again and again cannot keep the ranks apart: the hub takes a bounded number of connections between
two looks at its ranks and the clock, and a rank waits in the kernel's queue for its turn.

Whatever ends a meeting reaches the hub: the end of a connected rank by its socket, that of another,
or of one whose forked child has the socket, too, by its pidfd where its process is known (`Peers`),
or the word of the process that started it (`end`). Before the hub closes it tells the reason to
every rank that is connected, let in or not. A rank that is stopped, and not dead, has the deadline.
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
from weft.group.control import ControlPlane, milliseconds
from weft.group.liveness import Peers
from weft.group.wire import JSON, AtLimit, Gone, Malformed, Message, encode, receive, send, text_of
from weft.logs import Reminder

ABI = 4  # of the messages and of what a Heap promises its peers
_OP = "the meeting"
_RETRY = 0.002  # seconds between two tries of what cannot be waited for
_TURN = 0.1  # seconds that a rank waits in the kernel for room in the hub's queue, at a time
_END_TRIES = 20  # turns in which `end` has to find room in it
_ACCEPTS = 256  # connections that the hub takes before it looks at its ranks again
_GREETING = 256  # connections that the hub keeps which have not shown the nonce
_HUB_FIRST = 1.0  # seconds that a rank waits longer than the hub, which knows who is missing
_OVER = "the meeting is over: a rank failed or gave up, or all that it was for had met"
_NOT_OURS = "the nonce is not this job's; start every rank from the same launcher"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one job meet: at rank `hub`, which has the listener, with a secret."""

    hub: int
    nonce: bytes
    listener: socket.socket | None = field(default=None, repr=False, compare=False)

    @classmethod
    def open(cls, hub: int = 0) -> Meeting:
        """Draw a nonce and listen. Raises RendezvousFailed for want of descriptors."""
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
            held.pop_all()  # it is the meeting's now
        return cls(hub, drawn.nonce, listener)

    @property
    def address(self) -> str:
        """The hub and the nonce as one text, which nobody else should see."""
        return f"{self.hub}-{self.nonce.hex()}"

    @classmethod
    def at(cls, address: str) -> Meeting:
        """The meeting of an `address`, for a rank that is not the hub. Raises InvalidArgument."""
        found = re.fullmatch(r"(\d{1,5})-([0-9a-f]{64})", address, re.ASCII)
        if found is None or address.endswith("\n"):
            raise InvalidArgument(
                "the address of the meeting is none that a rank gave: pass its `Meeting.address`"
            )
        return cls(int(found[1]), bytes.fromhex(found[2]))

    @property
    def _name(self) -> str:
        """What everyone on this host may see; the nonce does not follow from it."""
        return f"\0weft-{hashlib.sha256(self.nonce).hexdigest()[:32]}"

    def connect(self) -> socket.socket:
        """Connect to the hub, within 0.1 s.

        Raises BlockingIOError where its queue has no room meanwhile, OSError, and RendezvousFailed
        where another user listens there.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Unlike tries that return at once, a wait in the kernel is woken when there is room.
            turn = struct.pack("ll", 0, int(_TURN * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, turn)
            connection.connect(self._name)
            connection.setblocking(False)
            pid, uid = credentials(connection)
            if pid == 0 and not _is_connected(connection):  # a signal ended the wait
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

    def end(self, why: str) -> None:
        """End the meeting for every rank that has not met the others yet: it raises `why`.

        For a process that started a rank and sees it fail. After all have met it does nothing.
        """
        message = encode({"nonce": self.nonce.hex(), "fail": why})
        for _ in range(_END_TRIES):
            # Where they met, or failed, nobody listens.
            with contextlib.suppress(RendezvousFailed, OSError):
                try:
                    connection = self.connect()
                except BlockingIOError:
                    continue
                with connection:
                    send(connection, message)
            return

    def close(self, why: str = _OVER) -> None:
        """Refuse all that come from now on, and tell `why` to those that wait. Idempotent.

        For the hub, and for the process that has opened the meeting for it.
        """
        if self.listener is None or self.listener.fileno() < 0:
            return
        # A copy of it in another process has been shut down, or somebody has closed this one.
        with contextlib.suppress(OSError), self.listener:
            # From now on nobody gets into the queue, whose length the kernel bounds.
            self.listener.shutdown(socket.SHUT_RDWR)
            for _ in range(socket.SOMAXCONN // _ACCEPTS + 2):
                for connection in self.accept():
                    refuse(connection, why)

    def accept(self) -> list[socket.socket]:
        """Take connections from the queue and return those of this user; others are closed.

        At most 256 are taken. Returns [] where nobody waits, and after strangers alone. Raises
        OSError.
        """
        assert self.listener is not None
        ours: list[socket.socket] = []
        try:
            for _ in range(_ACCEPTS):
                connection, _ = self.listener.accept()
                if credentials(connection)[1] == os.geteuid():
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

    def trusts(self, said: Mapping[str, Any]) -> bool:
        """Whether a message shows the nonce, in constant time."""
        shown = said.get("nonce")
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
    """Meet the other `size - 1` ranks within `timeout` seconds.

    `device` is the kind of memory the rank has ("cpu", "cuda"), the same on every rank. `peers`
    are the processes of ranks, as far as they are known: one that dies ends the meeting.
    Raises RendezvousFailed naming the rank that is missing, died, differs or is not trusted.
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
    built_for: dict[str, JSON] = {"abi": ABI, "size": size, "device": device}
    try:
        if rank == meeting.hub:
            with _Hub(meeting, control, built_for, peers or Peers()) as hub:
                hub.gather(began + timeout, timeout)
        else:
            _come(meeting, control, built_for, timeout, peers or Peers())
    except BaseException as error:
        control.close(str(error) or type(error).__name__)
        raise
    _log.info(
        "rank %d of %d on %s met the others after %.3f s; processes by rank: %s",
        *(rank, size, device, time.monotonic() - began, control.pids),
    )
    return control


class _Hub:
    """The rank at which all meet. A context manager, which ends the meeting."""

    def __init__(
        self, meeting: Meeting, control: ControlPlane, built_for: dict[str, JSON], peers: Peers
    ) -> None:
        self.meeting = meeting
        self.control = control
        self.built_for = built_for
        self.peers = peers
        # Connections that have not shown the nonce yet, the oldest first.
        self.greeting: dict[socket.socket, None] = {}
        self.met: set[int] = set()  # ranks that have the sockets to all others
        self._reminder = Reminder()

    def __enter__(self) -> _Hub:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        why = _OVER if error is None else str(error) or type(error).__name__
        for connection in self.greeting:
            refuse(connection, why)
        self.meeting.close(why)

    def gather(self, deadline: float, timeout: float) -> None:
        """Let every rank in, then hand every two of them a pair of connected sockets.

        None returns before all have theirs: one that leaves at once then disturbs no meeting.
        """
        control = self.control
        try:
            while missing := [r for r in range(control.size) if r not in self._there()]:
                self._log_wait("to come", missing, timeout)
                if time.monotonic() >= deadline:
                    control.fail(
                        f"rank {', '.join(map(str, missing))} of {control.size} did not come to "
                        f"rank {control.rank} within {timeout:g} s; raise `timeout` if the ranks "
                        f"start that far apart{self.peers.unseen(missing)}"
                    )
                self._turn(deadline)
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
                self._turn(deadline)
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

    def _there(self) -> set[int]:
        return {self.control.rank, *self.control.peers}

    def _turn(self, deadline: float) -> None:
        """Wait for what comes next: a connection, its hello, the end of a rank."""
        assert self.meeting.listener is not None
        poller = select.poll()
        members = self.control.peers
        for each in (self.meeting.listener, *self.greeting, *members.values()):
            poller.register(each, select.POLLIN)
        for fd in self.peers.pidfds():
            poller.register(fd, select.POLLIN)
        poller.poll(milliseconds(self._reminder.earlier(deadline)))
        ended = {rank for rank in members if self.peers.ended(rank)}  # before they are heard
        for rank in members:
            while (message := self.control.receive(rank, _OP)) is not None:
                message.drop()
                self.met.add(rank)
        self.greeting.update(dict.fromkeys(self.meeting.accept()))
        for connection in list(self.greeting):
            self._read_hello(connection)
        # A rank says hello as soon as it is connected, so the oldest are strangers.
        for connection in list(self.greeting)[:-_GREETING]:
            self._refuse(connection, "no hello came, and others wait")
        try:
            # Their sockets would have told of them, unless a forked child has these, too.
            self.peers.check(self._there() - ended)
        except RendezvousFailed as error:
            self.control.fail(str(error))

    def _read_hello(self, connection: socket.socket) -> None:
        try:
            message = receive(connection, trusted=False)
        except (OSError, Malformed) as error:
            self._refuse(connection, f"not a rank's hello: {error}")
            return
        if message is None:
            return
        message.drop()
        if not self.meeting.trusts(message.body):
            self._refuse(connection, _NOT_OURS)
            return
        if "fail" in message.body:  # of the launcher (Meeting.end)
            self.control.fail(text_of(message.body["fail"]))
        self._admit(connection, message.body)

    def _admit(self, connection: socket.socket, said: dict[str, Any]) -> None:
        """A connection that shows the nonce is a rank of this job: what differs is an error."""
        control, pid = self.control, credentials(connection)[0]
        rank: Any = said.get("rank")
        differs = [
            f"{k} {v!r} and {text_of(repr(said.get(k)))[:200]}"
            for k, v in self.built_for.items()
            if said.get(k) != v or type(said.get(k)) is not type(v)
        ]
        known = type(rank) is int and rank in range(control.size)
        if known and rank not in self._there() and not differs:
            del self.greeting[connection]
            control.add(rank, pid, connection)
            with contextlib.suppress(Gone):  # seen by the next turn
                send(connection, hello(self.meeting, {"pid": os.getpid()}))
            return
        name = text_of(repr(rank))[:200]
        if differs:
            why = f"rank {control.rank} and rank {name} (pid {pid}) disagree: {'; '.join(differs)}"
        else:
            what = "another process has taken" if known else f"is none of {control.size}"
            why = f"pid {pid} came as rank {name}, which {what}; give every process its own rank"
        control.fail(why)  # connections that are still greeting are told as well

    def _refuse(self, connection: socket.socket, why: str) -> None:
        del self.greeting[connection]
        refuse(connection, why)

    def _send(
        self, rank: int, body: JSON, deadline: float, end: socket.socket | None = None
    ) -> None:
        control = self.control
        fd = None if end is None else end.fileno()
        try:
            while not send(control.peers[rank], encode(body), fd):
                if time.monotonic() >= deadline:
                    control.fail(f"{control.name(rank)} did not take its sockets in time")
                time.sleep(_RETRY)
        except Gone:
            control.raise_peer_error(rank, _OP)


def _come(
    meeting: Meeting,
    control: ControlPlane,
    built_for: dict[str, JSON],
    timeout: float,
    peers: Peers,
) -> None:
    """Connect to the hub, and take from it the sockets to all others."""
    hub, deadline = meeting.hub, time.monotonic() + timeout + _HUB_FIRST
    others = set(range(control.size)) - {hub}  # whose deaths the hub tells, with the reason
    reminder = Reminder()

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
            peers.check_ended()
            raise RendezvousFailed(_OVER) from error
        except OSError as error:
            raise RendezvousFailed(f"cannot connect to rank {hub}: {error}") from error
    control.add(hub, 0, connection)
    with contextlib.suppress(Gone):  # it has said why
        send(connection, hello(meeting, {**built_for, "rank": control.rank}))
    while True:
        ended = peers.ended(hub)  # before it is heard for the last time
        try:
            message = receive(connection, trusted=False)
            if message is not None:
                if _take(meeting, control, message):
                    return
                if len(control.peers) == control.size - 1:
                    with contextlib.suppress(Gone):  # it has said why
                        send(connection, encode({"era": 0, "met": True}))
                continue
        except Gone:
            peers.check_ended()
            control.fail(f"{control.name(hub)} died before all ranks had met")
        except AtLimit as error:
            control.fail(f"{control.name(control.rank)} cannot take its part of {_OP}: {error}")
        except (Malformed, OSError) as error:
            control.fail(f"{control.name(hub)} broke the protocol in {_OP}: {error}")
        if ended:  # a forked child has its listener, and may have its sockets
            peers.check(others)
        if time.monotonic() >= deadline:
            control.fail(f"{late}: look whether it is stopped")
        log_wait()
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        pidfd = peers.pidfd(hub)
        if pidfd is not None:
            poller.register(pidfd, select.POLLIN)
        poller.poll(milliseconds(reminder.earlier(deadline)))


def _take(meeting: Meeting, control: ControlPlane, message: Message) -> bool:
    """What the hub sent: why there will be no group, its hello, a socket to a peer; all have met?

    The hub alone is heard: it passes on why a rank left, of which a peer's socket only shows the
    end, where that rank had not taken its own end yet.
    """
    said, fd = message.body, message.fd
    for end in ("fail", "bye"):
        if end in said:
            message.drop()
            control.fail(text_of(said[end]))
    if control.pids[meeting.hub] == 0:
        message.drop()
        if not meeting.trusts(said) or type(said.get("pid")) is not int:
            control.fail(f"rank {meeting.hub}: {_NOT_OURS}")
        control.pids[meeting.hub] = said["pid"]
        return False
    if "met" in said and len(control.peers) == control.size - 1:
        message.drop()
        return True
    peer, pid = said.get("peer"), said.get("pid")
    if type(peer) is not int or type(pid) is not int or fd is None:
        message.drop()
        raise Malformed(f"it sent {said!r:.200} in place of a peer's socket")
    control.add(peer, pid, socket.socket(fileno=fd))
    return False


def hello(meeting: Meeting, shown: Mapping[str, JSON]) -> bytes:
    """The first message of either end."""
    return encode({**shown, "nonce": meeting.nonce.hex()})


def refuse(connection: socket.socket, why: str) -> None:
    """Say why, and close."""
    with connection, contextlib.suppress(OSError):  # it may have gone
        send(connection, encode({"fail": text_of(why)}))


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end, as the kernel knows them."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", data)
    return int(pid), int(uid)
