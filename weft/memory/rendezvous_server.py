"""Rank 0 while the ranks meet: it listens, admits ranks, refuses strangers, welcomes all at once.

A stranger is refused, whatever it sends, and does not delay a rank: connections that say nothing
make room for others, and have to come again.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import select
import socket
import time
from typing import Any, NoReturn

from weft.errors import RendezvousFailed
from weft.memory.control_plane import ControlPlane
from weft.memory.meeting import ABI, BOUND, LOOK, SOCKET, Meeting, credentials, private_directory
from weft.memory.peers import Peers
from weft.memory.wire import (
    HELLO_LIMIT,
    SLACK,
    VALUE_LIMIT,
    Channel,
    Kind,
    Malformed,
    encode,
    milliseconds,
    text_of,
)

HELLO_SECONDS = 5.0  # for a new connection to say who it is
STRANGERS = 64  # connections that may wait at a time without a hello


class RendezvousServer:
    """Rank 0 while it waits for the other ranks."""

    def __init__(self, meeting: Meeting, size: int, device: str, peers: Peers) -> None:
        self.meeting = meeting
        self.size = size
        self.device = device
        self.peers = peers
        self.members: dict[int, Channel] = {}
        self.pids = [os.getpid()] + [0] * (size - 1)
        self.without_hello: dict[
            int, tuple[Channel, int, float]
        ] = {}  # fd -> channel, pid, deadline
        self.hosted_by_another = False

    def gather(self, deadline: float, timeout: float) -> None:
        """Accept until every rank is a member."""
        listener = None
        try:
            listener = self._listen()
            while len(self.members) < self.size - 1:
                if time.monotonic() >= deadline:
                    missing = self._missing()
                    self.fail(
                        f"rank {', '.join(map(str, missing))} of {self.size} did not come to "
                        f"{self.meeting.directory} within {timeout:g} s; raise `timeout` if the "
                        f"ranks start that far apart{self.peers.unseen(missing)}"
                    )
                self._turn(listener, deadline)
        except OSError as error:
            self.fail(
                f"rank 0 cannot host the meeting in {self.meeting.directory}: {error}; it needs a "
                "local file system (set TMPDIR) and free descriptors (ulimit -n)"
            )
        except BaseException:
            for channel in self.members.values():
                channel.close()
            raise
        finally:
            # The names first: a name where nobody listens would say that this process died.
            if not self.hosted_by_another:
                self.meeting.remove()
            if listener is not None:
                listener.close()
            for channel, _, _ in self.without_hello.values():
                channel.close()
            self.without_hello.clear()

    def welcome(self, deadline: float) -> ControlPlane:
        """Connect every two members, and send them the welcome: all have met."""
        control = ControlPlane(0, self.size, self.members, self.pids)
        try:
            for rank in range(1, self.size):
                for other in range(rank + 1, self.size):
                    self._connect(rank, other, deadline)
            for rank in range(1, self.size):
                self.members[rank].limit = VALUE_LIMIT + SLACK
                self._send(rank, Kind.WELCOME, encode(self.pids), deadline)
        except BaseException:
            control.close()
            raise
        return control

    def _connect(self, rank: int, other: int, deadline: float) -> None:
        with contextlib.ExitStack() as ends:
            for to, end in zip((rank, other), socket.socketpair(), strict=True):
                ends.enter_context(end)
                self._send(to, Kind.DESCRIPTOR, b"", deadline, fd=end.fileno())

    def _send(
        self, rank: int, kind: Kind, body: bytes, deadline: float, *, fd: int | None = None
    ) -> None:
        try:
            self.members[rank].send(kind, body, deadline, fd=fd)
        except OSError as error:
            self.fail(f"rank {rank} (pid {self.pids[rank]}) left the meeting: {error}")

    def fail(self, text: str) -> NoReturn:
        for channel in self.members.values():
            with contextlib.suppress(OSError):
                channel.send(Kind.FAIL, encode(text), 0.0)
            channel.close()
        raise RendezvousFailed(text)

    def _listen(self) -> socket.socket:
        directory = private_directory(self.meeting.directory)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            bound, shown = (f"/proc/self/fd/{directory}/{name}" for name in (BOUND, SOCKET))
            try:
                listener.bind(bound)
            except OSError as error:
                self.hosted_by_another = error.errno == errno.EADDRINUSE
                raise
            listener.listen(self.size + STRANGERS)
            listener.setblocking(False)
            os.link(bound, shown)  # and not renamed: a second rank 0 must not get the name
        except BaseException:
            listener.close()
            raise
        finally:
            os.close(directory)
        return listener

    def _missing(self) -> list[int]:
        return [r for r in range(1, self.size) if r not in self.members]

    def _turn(self, listener: socket.socket, deadline: float) -> None:
        poller = select.poll()
        poller.register(listener, select.POLLIN)
        ranks = {channel.fileno(): rank for rank, channel in self.members.items()}
        processes = self.peers.pidfds(self._missing())
        for fd in (*ranks, *self.without_hello, *processes):
            poller.register(fd, select.POLLIN)
        now = time.monotonic()
        soonest = min(
            [deadline, now + LOOK, *(until for _, _, until in self.without_hello.values())]
        )
        ready = [fd for fd, _ in poller.poll(milliseconds(soonest))]
        for fd in ready:
            if fd in ranks:
                self._read_member(ranks[fd])
            elif fd in self.without_hello:
                self._read_hello(fd)
            elif fd == listener.fileno():
                self._accept(listener)
        for fd in [
            f for f, (_, _, until) in self.without_hello.items() if until < time.monotonic()
        ]:
            self._refuse(fd, f"no hello within {HELLO_SECONDS:g} s", Kind.AGAIN)
        dead = [rank for rank in self.peers.dead() if rank not in self.members]
        if dead:
            self.fail(self.peers.died(dead[0]))
        why = self.meeting.ended()
        if why is not None:
            self.fail(why)

    def _accept(self, listener: socket.socket) -> None:
        """Accept what has connected. The connection silent for longest makes room for the next."""
        for _ in range(STRANGERS):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self.without_hello:
                    raise
                self._make_room()
                continue
            pid, uid = credentials(connection)
            if uid != os.geteuid():
                connection.close()
                continue
            if len(self.without_hello) >= STRANGERS:
                self._make_room()
            channel = Channel(connection, limit=HELLO_LIMIT)
            fd = channel.fileno()
            self.without_hello[fd] = (channel, pid, time.monotonic() + HELLO_SECONDS)
            self._read_hello(fd)  # most have spoken already

    def _make_room(self) -> None:
        oldest = next(iter(self.without_hello))
        self._refuse(oldest, f"{STRANGERS} connections wait without a hello", Kind.AGAIN)

    def _read_hello(self, fd: int) -> None:
        channel, pid, _ = self.without_hello[fd]
        try:
            frame = channel.pump()
        except (OSError, Malformed) as error:
            self._refuse(fd, f"not a rank's hello: {error}")
            return
        if frame is None:
            return
        frame.drop()
        if frame.kind is not Kind.HELLO or not _trusted(self.meeting.nonce, frame.body):
            self._refuse(fd, "the nonce is not this job's; start every rank from the same launcher")
            return
        self._admit(fd, pid, frame.body)

    def _admit(self, fd: int, pid: int, said: dict[str, Any]) -> None:
        """A connection that knows the nonce is a rank of this job: what differs is an error."""
        rank = said.get("rank")
        channel = self.without_hello.pop(fd)[0]
        mine = {"abi": ABI, "size": self.size, "device": self.device}
        differs = [
            f"{k} {v!r} and {text_of(repr(said.get(k)))[:200]}"
            for k, v in mine.items()
            if said.get(k) != v or type(said.get(k)) is not type(v)
        ]
        taken = type(rank) is int and rank in self.members
        if type(rank) is int and 0 < rank < self.size and not taken and not differs:
            self.members[rank] = channel
            self.pids[rank] = pid
            return
        self.members[min(self.members, default=0) - 1] = channel  # so that it gets the reason, too
        name = text_of(repr(rank))[:200]
        if differs:
            self.fail(f"rank 0 and rank {name} (pid {pid}) disagree: {'; '.join(differs)}")
        self.fail(
            f"pid {pid} came as rank {name}, which "
            + ("another process has taken" if taken else f"is not one of 1..{self.size - 1}")
            + "; give every process its own rank"
        )

    def _read_member(self, rank: int) -> None:
        name = f"rank {rank} (pid {self.pids[rank]})"
        try:
            frame = self.members[rank].pump()
        except (OSError, Malformed) as error:
            self.fail(f"{name} left before all ranks had met: {error}")
        if frame is not None:
            frame.drop()
            why = text_of(frame.body) if frame.kind is Kind.FAIL else frame.kind.name
            self.fail(f"{name} left before all ranks had met: {why}")

    def _refuse(self, fd: int, why: str, kind: Kind = Kind.FAIL) -> None:
        channel = self.without_hello.pop(fd)[0]
        with contextlib.suppress(OSError):
            channel.send(kind, encode(f"refused: {why}"), 0.0)
        channel.close()


def _trusted(nonce: bytes, said: Any) -> bool:
    """Whether a hello holds the job's nonce, in constant time."""
    shown = said.get("nonce") if isinstance(said, dict) else None
    return isinstance(shown, str) and hmac.compare_digest(
        shown.encode(errors="surrogatepass"), nonce.hex().encode()
    )
