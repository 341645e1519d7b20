"""How the ranks of one host meet.

Rank 0 listens in a directory that only its user may enter. Every other rank connects, is checked by
user id as the kernel reports it, and shows the job's 32-byte nonce; both sides compare what they
were built for. A stranger is refused and disturbs nobody. As soon as all have met, the socket's
name and the directory are removed, so that nothing named is left behind even by `kill -9`.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import select
import socket
import stat
import struct
import tempfile
import time
from dataclasses import dataclass
from typing import Any, NoReturn

from weft.errors import InvalidArgument, RendezvousFailed
from weft.memory.star import HUB_SLACK, Star
from weft.memory.wire import (
    HELLO_LIMIT,
    JSON,
    SLACK,
    VALUE_LIMIT,
    Channel,
    Kind,
    Malformed,
    encode,
    milliseconds,
)

ABI = 1  # of the frames and of what a Heap promises its peers
HELLO_SECONDS = 5.0  # for a new connection to say who it is
STRANGERS = 64  # connections that may wait unheard at a time
_SOCKET = "hub"
_CANNOT_CONNECT_YET = (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one job meet: a private directory and a secret of 32 bytes."""

    directory: str
    nonce: bytes

    @classmethod
    def open(cls) -> Meeting:
        """Make the directory (mode 0700, below $TMPDIR) and draw the nonce."""
        return cls(tempfile.mkdtemp(prefix="weft-"), secrets.token_bytes(32))

    def remove(self) -> None:
        """Remove what the meeting has in the file system. Idempotent."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(os.path.join(self.directory, _SOCKET))
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(self.directory)


def meet(meeting: Meeting, *, rank: int, size: int, device: str, timeout: float) -> Star:
    """Meet the other `size - 1` ranks within `timeout` seconds; rank 0 is the hub.

    `device` is the kind of memory the rank has ("cpu", "cuda"), the same on every rank.
    Raises RendezvousFailed naming the rank that is missing, differs or is not trusted.
    """
    if not 0 <= rank < size:
        raise InvalidArgument(f"rank is {rank} and size is {size}: give 0 <= rank < size")
    deadline = time.monotonic() + timeout
    if rank > 0:
        return _join(meeting, rank, size, device, deadline, timeout)
    try:
        if size == 1:
            return Star(0, 1, {}, [os.getpid()])
        lobby = _Lobby(meeting, size, device)
        lobby.gather(deadline, timeout)
    finally:
        meeting.remove()
    return lobby.star(deadline)


class _Lobby:
    """Rank 0 while it waits for the others."""

    def __init__(self, meeting: Meeting, size: int, device: str) -> None:
        self.meeting = meeting
        self.size = size
        self.device = device
        self.members: dict[int, Channel] = {}
        self.pids = [os.getpid()] + [0] * (size - 1)
        self.unheard: dict[int, tuple[Channel, int, float]] = {}  # fd -> channel, pid, deadline

    def gather(self, deadline: float, timeout: float) -> None:
        """Accept until every rank is a member."""
        directory = _private_directory(self.meeting.directory)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{_SOCKET}")
            listener.listen(self.size + STRANGERS)
            listener.setblocking(False)
            while len(self.members) < self.size - 1:
                if time.monotonic() >= deadline:
                    missing = [str(r) for r in range(1, self.size) if r not in self.members]
                    self.fail(
                        f"rank {', '.join(missing)} of {self.size} did not come to "
                        f"{self.meeting.directory} within {timeout:g} s; raise `timeout` if the "
                        "ranks start that far apart"
                    )
                self._turn(listener, deadline)
        except OSError as error:
            self.fail(f"rank 0 cannot host the meeting in {self.meeting.directory}: {error}")
        finally:
            listener.close()
            os.close(directory)
            for channel, _, _ in self.unheard.values():
                channel.close()
            self.unheard.clear()

    def star(self, deadline: float) -> Star:
        """Tell every member that all have met."""
        star = Star(0, self.size, self.members, self.pids)
        try:
            for rank, channel in self.members.items():
                channel.limit = VALUE_LIMIT + SLACK
                try:
                    channel.send(Kind.WELCOME, encode(self.pids), deadline)
                except OSError as error:
                    self.fail(f"rank {rank} (pid {self.pids[rank]}) left the meeting: {error}")
        except BaseException:
            star.close()
            raise
        return star

    def fail(self, text: str) -> NoReturn:
        for channel in self.members.values():
            with contextlib.suppress(OSError):
                channel.send(Kind.FAIL, encode(text), 0.0)
            channel.close()
        raise RendezvousFailed(text)

    def _turn(self, listener: socket.socket, deadline: float) -> None:
        poller = select.poll()
        if len(self.unheard) < STRANGERS:
            poller.register(listener, select.POLLIN)
        ranks = {channel.fileno(): rank for rank, channel in self.members.items()}
        for fd in (*ranks, *self.unheard):
            poller.register(fd, select.POLLIN)
        soonest = min([deadline, *(until for _, _, until in self.unheard.values())])
        for fd, _ in poller.poll(milliseconds(soonest)):
            if fd in ranks:
                self._hear_member(ranks[fd])
            elif fd in self.unheard:
                self._hear_stranger(fd)
            else:
                self._accept(listener)
        for fd in [f for f, (_, _, until) in self.unheard.items() if until < time.monotonic()]:
            self._refuse(fd, f"no hello within {HELLO_SECONDS:g} s")

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        pid, uid = _peer(connection)
        if uid != os.geteuid():
            connection.close()
            return
        channel = Channel(connection, limit=HELLO_LIMIT)
        self.unheard[channel.fileno()] = (channel, pid, time.monotonic() + HELLO_SECONDS)

    def _hear_stranger(self, fd: int) -> None:
        channel, pid, _ = self.unheard[fd]
        try:
            frame = channel.pump()
        except (OSError, Malformed) as error:
            self._refuse(fd, f"not a rank's hello: {error}")
            return
        if frame is None:
            return
        if frame.fd is not None:
            os.close(frame.fd)
        if frame.kind is not Kind.HELLO or not _trusted(self.meeting.nonce, frame.body):
            self._refuse(fd, "the nonce is not this job's; start every rank from the same launcher")
            return
        self._admit(fd, pid, frame.body)

    def _admit(self, fd: int, pid: int, said: dict[str, Any]) -> None:
        """A connection that knows the nonce is a rank of this job: what differs is an error."""
        rank = said.get("rank")
        channel = self.unheard.pop(fd)[0]
        mine = {"abi": ABI, "size": self.size, "device": self.device}
        differs = [f"{k} {v!r} and {said.get(k)!r}" for k, v in mine.items() if said.get(k) != v]
        taken = type(rank) is int and rank in self.members
        if type(rank) is int and 0 < rank < self.size and not taken and not differs:
            self.members[rank] = channel
            self.pids[rank] = pid
            return
        self.members[-pid] = channel  # so that it hears why, too
        if differs:
            self.fail(f"rank 0 and rank {rank} (pid {pid}) disagree: {'; '.join(differs)}")
        self.fail(
            f"pid {pid} came as rank {rank}, which "
            + ("another process has taken" if taken else f"is not one of 1..{self.size - 1}")
            + "; give every process its own rank"
        )

    def _hear_member(self, rank: int) -> None:
        name = f"rank {rank} (pid {self.pids[rank]})"
        try:
            frame = self.members[rank].pump()
        except (OSError, Malformed) as error:
            self.fail(f"{name} left before all ranks had met: {error}")
        if frame is not None:
            why = frame.body if frame.kind is Kind.FAIL else frame.kind.name
            self.fail(f"{name} left before all ranks had met: {why}")

    def _refuse(self, fd: int, why: str) -> None:
        channel = self.unheard.pop(fd)[0]
        with contextlib.suppress(OSError):
            channel.send(Kind.FAIL, encode(f"refused: {why}"), 0.0)
        channel.close()


def _join(
    meeting: Meeting, rank: int, size: int, device: str, deadline: float, timeout: float
) -> Star:
    connection = _reach(meeting, deadline, timeout)
    channel = Channel(connection, limit=size * (VALUE_LIMIT + SLACK))
    try:
        pid, uid = _peer(connection)
        if uid != os.geteuid():
            raise RendezvousFailed(
                f"the hub in {meeting.directory} runs as user {uid} and rank {rank} as user "
                f"{os.geteuid()}; run all ranks as one user"
            )
        said: JSON = {
            "abi": ABI, "rank": rank, "size": size, "device": device, "nonce": meeting.nonce.hex()
        }  # fmt: skip
        try:
            channel.send(Kind.HELLO, encode(said), deadline)
            frame = channel.receive(deadline + HUB_SLACK)
        except TimeoutError:
            raise RendezvousFailed(
                f"rank 0 (pid {pid}) did not gather all {size} ranks within {timeout:g} s "
                f"(rank {rank} waited for it)"
            ) from None
        except (OSError, Malformed) as error:
            raise RendezvousFailed(
                f"rank 0 (pid {pid}) left before all ranks had met: {error}"
            ) from error
        if frame.kind is not Kind.WELCOME:
            raise RendezvousFailed(f"{frame.body} (rank 0, pid {pid}, told rank {rank})")
        return Star(rank, size, {0: channel}, [int(each) for each in frame.body])
    except BaseException:
        channel.close()
        raise


def _reach(meeting: Meeting, deadline: float, timeout: float) -> socket.socket:
    """A socket connected to the hub, which may not listen yet."""
    directory = _private_directory(meeting.directory)
    pause = 0.001
    try:
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.setblocking(False)
                connection.connect(f"/proc/self/fd/{directory}/{_SOCKET}")
                return connection
            except OSError as error:
                connection.close()
                if error.errno not in _CANNOT_CONNECT_YET:
                    raise RendezvousFailed(
                        f"cannot connect to rank 0 in {meeting.directory}: {error}"
                    ) from error
            if not os.path.isdir(meeting.directory):
                raise RendezvousFailed(
                    f"the meeting in {meeting.directory} is over: rank 0 gave up or met others"
                )
            if time.monotonic() >= deadline:
                raise RendezvousFailed(
                    f"rank 0 did not listen in {meeting.directory} within {timeout:g} s; raise "
                    "`timeout`, or set TMPDIR to a directory that all ranks see"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
    finally:
        os.close(directory)


def _private_directory(path: str) -> int:
    """An O_PATH descriptor of `path`, after checking that it is this user's alone.

    Sockets are bound and reached through /proc/self/fd/N, which stays below the 108 bytes of a
    Unix socket's address however long $TMPDIR is.
    """
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise RendezvousFailed(
            f"the meeting directory {path} cannot be opened ({error.strerror}): the ranks must "
            "share a file system there; set TMPDIR to a directory that they all see"
        ) from error
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        os.close(fd)
        raise RendezvousFailed(
            f"the meeting directory {path} belongs to user {status.st_uid} with mode {mode:04o}; "
            f"it must belong to user {os.geteuid()} with mode 0700"
        )
    return fd


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end, as the kernel knows them."""
    size = struct.calcsize("3i")
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = struct.unpack("3i", data)
    return int(pid), int(uid)


def _trusted(nonce: bytes, said: Any) -> bool:
    """Whether a hello holds the job's nonce, in constant time."""
    shown = said.get("nonce") if isinstance(said, dict) else None
    return isinstance(shown, str) and hmac.compare_digest(shown.encode(), nonce.hex().encode())
