"""How the ranks of one host meet.

Every rank listens in a directory that only its user may enter, and connects to those before it. The
kernel says of which user the other end is, and its first message has to show the job's 32-byte
nonce; then both sides compare what they were built for. A stranger is refused and disturbs no rank.
As soon as all have met the directory is removed, so that nothing named is left behind even by
`kill -9`.

A rank that dies ends the meeting for all: once connected by its socket, before that by its pidfd
where its process is known (`peers.py`), or by its launcher, which tells the others and removes the
directory. A socket's name appears only when somebody listens, so a name where nobody listens says
that a rank is gone. A rank that is stopped, and not dead, has the deadline.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import select
import socket
import time
from typing import Any

from weft.errors import InvalidArgument, RendezvousFailed
from weft.memory.control_plane import ControlPlane, milliseconds
from weft.memory.meeting import Meeting, credentials
from weft.memory.peers import Peers
from weft.memory.wire import JSON, Gone, Malformed, encode, receive, send, text_of

ABI = 3  # of the messages and of what a Heap promises its peers
_LOOK = 0.05  # seconds between two looks for names of ranks, and for the directory
_NOT_YET = (errno.ENOENT, errno.EAGAIN)
_OP = "the meeting"
_log = logging.getLogger(__name__)


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
    are the other ranks' processes, where they are known: one that dies ends the meeting at once.
    Raises RendezvousFailed naming the rank that is missing, died, differs or is not trusted.
    """
    if not 0 <= rank < size:
        raise InvalidArgument(f"rank is {rank} and size is {size}: give 0 <= rank < size")
    began = time.monotonic()
    with _Rendezvous(meeting, rank, size, device, Peers() if peers is None else peers) as ranks:
        control = ranks.gather(began + timeout, timeout)
    _log.info(
        "rank %d of %d on %s met the others in %s after %.3f s; processes by rank: %s",
        *(rank, size, device, meeting.directory, time.monotonic() - began, control.pids),
    )
    return control


class _Rendezvous:
    """One rank on its way to the others. A context manager, which ends the meeting."""

    def __init__(self, meeting: Meeting, rank: int, size: int, device: str, peers: Peers) -> None:
        self.meeting = meeting
        self.rank = rank
        self.size = size
        self.peers = peers
        self.control = ControlPlane(rank, size)
        self.built_for: dict[str, JSON] = {"abi": ABI, "size": size, "device": device}
        # Connections without a hello: to that rank, or from anybody (None).
        self.greeting: dict[socket.socket, int | None] = {}
        self.held = contextlib.ExitStack()

    def __enter__(self) -> _Rendezvous:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for connection in self.greeting:
            connection.close()
        if kind is not None:
            self.control.close()
        self.held.close()

    def gather(self, deadline: float, timeout: float) -> ControlPlane:
        """Listen and connect until every rank is there, and has all others."""
        directory = self.meeting.enter()
        self.held.callback(os.close, directory)
        place = f"/proc/self/fd/{directory}"
        try:
            listener = self._listen(place)
            pause = 0.001
            while missing := [r for r in range(self.size) if r not in self._there()]:
                for rank in missing:
                    if rank < self.rank and rank not in self.greeting.values():
                        self._connect(place, rank)
                if time.monotonic() >= deadline:
                    self.control.fail(
                        f"rank {', '.join(map(str, missing))} of {self.size} did not come to "
                        f"{self.meeting.directory} within {timeout:g} s; raise `timeout` if the "
                        "ranks start that far apart, or set TMPDIR to a directory that all ranks "
                        f"see{self.peers.unseen(missing)}"
                    )
                self._turn(listener, min(deadline, time.monotonic() + pause))
                pause = min(2 * pause, _LOOK)
        except OSError as error:
            self.control.fail(
                f"rank {self.rank} cannot meet the others in {self.meeting.directory}: {error}; it "
                "needs a local file system (set TMPDIR) and free descriptors (ulimit -n)"
            )
        # Nobody returns before all have met: one that leaves at once disturbs no meeting.
        self.control.gather(_OP, None, max(1.0, deadline - time.monotonic()))
        return self.control

    def _there(self) -> set[int]:
        return {self.rank, *self.control.peers}

    def _listen(self, place: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.held.callback(listener.close)
        name = f"{place}/{self.rank}"
        try:
            listener.bind(f"{name}.bound")
            listener.listen(self.size + 64)
            listener.setblocking(False)
            # With no name that others look for before it listens. Not renamed: that would take the
            # name of another process away.
            os.link(f"{name}.bound", name)
        except FileNotFoundError:
            self._over()
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EEXIST):
                self.held.callback(self.meeting.remove)
                raise
            raise RendezvousFailed(
                f"rank {self.rank} is taken: another process has come to {self.meeting.directory} "
                "as this rank; give every process its own rank"
            ) from error
        # Before the listener is closed: a name where nobody listens would say that this one died.
        self.held.callback(self.meeting.remove)
        return listener

    def _over(self) -> None:
        missing = [str(rank) for rank in range(self.size) if rank not in self._there()]
        self.control.fail(
            f"the meeting in {self.meeting.directory} is over: another rank gave up, or the "
            f"launcher saw one fail, before all ranks had met; rank {', '.join(missing)} of "
            f"{self.size} did not come to this one"
        )

    def _connect(self, place: str, rank: int) -> None:
        """Connect to a rank, which may not listen yet, and say hello."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.setblocking(False)
            connection.connect(f"{place}/{rank}")
            pid, uid = credentials(connection)
            if uid != os.geteuid():
                self.control.fail(
                    f"rank {rank} in {self.meeting.directory} runs as user {uid} and rank "
                    f"{self.rank} as user {os.geteuid()}; run all ranks as one user"
                )
            with contextlib.suppress(Gone):  # seen where its answer is awaited
                send(connection, self._hello())
        except OSError as error:
            connection.close()
            if error.errno == errno.ECONNREFUSED:
                self.control.fail(
                    f"rank {rank} no longer listens in {self.meeting.directory}: it died, or gave "
                    "up, before all ranks had met"
                )
            if error.errno not in _NOT_YET:
                raise
        except BaseException:
            connection.close()
            raise
        else:
            self.greeting[connection] = rank

    def _hello(self) -> bytes:
        shown: dict[str, JSON] = {"rank": self.rank, "nonce": self.meeting.nonce.hex()}
        return encode(self.built_for | shown)

    def _turn(self, listener: socket.socket, until: float) -> None:
        """Wait for what comes next: a rank, its hello, its end; whether the directory is there."""
        poller = select.poll()
        awaited = [each.fileno() for each in (listener, *self.greeting)]
        for fd in (*awaited, *self.peers.pidfds()):
            poller.register(fd, select.POLLIN)
        for connection in self.control.peers.values():
            poller.register(connection, 0)  # its end alone: it may send what comes after this
        ready = {fd for fd, _ in poller.poll(milliseconds(until))}
        for rank, connection in list(self.control.peers.items()):
            if connection.fileno() in ready:
                self.control.hear_out(rank, _OP)
        if listener.fileno() in ready:
            self._accept(listener)
        for connection in list(self.greeting):
            self._read_hello(connection)
        try:
            self.peers.check(self._there())
        except RendezvousFailed as error:
            self.control.fail(str(error))
        if not os.path.isdir(self.meeting.directory):
            self._over()

    def _accept(self, listener: socket.socket) -> None:
        """Accept what has connected, if the kernel says that it is of this user."""
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                connection, _ = listener.accept()
                if credentials(connection)[1] == os.geteuid():
                    self.greeting[connection] = None
                else:
                    connection.close()

    def _read_hello(self, connection: socket.socket) -> None:
        rank = self.greeting[connection]
        pid, _ = credentials(connection)
        try:
            message = receive(connection, trusted=False)
        except (OSError, Malformed) as error:
            self._refuse(connection, f"not a rank's hello: {error}")
            if rank is not None:
                self.control.fail(
                    f"rank {rank} (pid {pid}) left before all ranks had met: {text_of(str(error))}"
                )
            return
        if message is None:
            return
        message.drop()
        if rank is not None and "fail" in message.body:
            why = text_of(message.body["fail"])
            self.control.fail(f"{why} (rank {rank}, pid {pid}, to rank {self.rank})")
        if not _trusted(self.meeting.nonce, message.body):
            why = "the nonce is not this job's; start every rank from the same launcher"
            self._refuse(connection, why)
            if rank is not None:
                self.control.fail(f"rank {rank} (pid {pid}): {why}")
            return
        if "fail" in message.body:  # of the launcher (Meeting.end)
            self.control.fail(text_of(message.body["fail"]))
        self._admit(connection, pid, message.body)

    def _admit(self, connection: socket.socket, pid: int, said: dict[str, Any]) -> None:
        """A connection that shows the nonce is a rank of this job: what differs is an error."""
        rank, called = said.get("rank"), self.greeting.pop(connection)
        differs = [
            f"{k} {v!r} and {text_of(repr(said.get(k)))[:200]}"
            for k, v in self.built_for.items()
            if said.get(k) != v or type(said.get(k)) is not type(v)
        ]
        right = range(self.rank + 1, self.size) if called is None else (called,)
        if type(rank) is int and rank in right and rank not in self.control.peers and not differs:
            if called is None:
                with contextlib.suppress(Gone):  # seen by the next turn
                    send(connection, self._hello())
            self.control.add(rank, pid, connection)
            return
        name = text_of(repr(rank))[:200]
        if differs:
            why = f"rank {self.rank} and rank {name} (pid {pid}) disagree: {'; '.join(differs)}"
        else:
            taken = type(rank) is int and rank in self.control.peers
            why = f"pid {pid} came as rank {name}, which " + (
                "another process has taken"
                if taken
                else f"does not connect to rank {self.rank} of {self.size}"
            )
            why += "; give every process its own rank"
        self._refuse(connection, why)
        self.control.fail(why)

    def _refuse(self, connection: socket.socket, why: str) -> None:
        self.greeting.pop(connection, None)
        with contextlib.suppress(OSError):
            send(connection, encode({"fail": why}))
        connection.close()


def _trusted(nonce: bytes, said: dict[str, Any]) -> bool:
    """Whether a hello holds the job's nonce, in constant time."""
    shown = said.get("nonce")
    return isinstance(shown, str) and hmac.compare_digest(
        shown.encode(errors="surrogatepass"), nonce.hex().encode()
    )
