"""How the ranks of one host meet.

Rank 0 listens in a directory that only its user may enter. Every other rank connects, is checked by
user id as the kernel reports it, and shows the job's 32-byte nonce; both sides compare what they
were built for. A stranger is refused and disturbs nobody. As soon as all have met, the names and
the directory are removed, so that nothing named is left behind even by `kill -9`.

A rank that dies ends the meeting for all: once connected by its socket, before that by its pidfd
where its process is known (`peers.py`), or by whoever started it, who leaves a note
(`Meeting.end`). The socket's name appears only when somebody listens, so a name where nobody
listens says that rank 0 is gone. A rank that is stopped, and not dead, has the deadline.
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
from weft.memory.peers import Peers
from weft.memory.star import HUB_SLACK, Star
from weft.memory.wire import (
    HELLO_LIMIT,
    JSON,
    SLACK,
    TEXT_LIMIT,
    VALUE_LIMIT,
    Channel,
    Frame,
    Gone,
    Kind,
    Malformed,
    encode,
    milliseconds,
    text_of,
)

ABI = 2  # of the frames and of what a Heap promises its peers
HELLO_SECONDS = 5.0  # for a new connection to say who it is
STRANGERS = 64  # connections that may wait unheard at a time
_PREFIX = "weft-"
_SOCKET = "hub"  # there once rank 0 listens
_BOUND = "hub.bound"  # the same socket before that
_NOTE = "ended"  # why the meeting is over, below the nonce
_LOOK = 0.05  # seconds between two looks for the note
_CANNOT_CONNECT_YET = (errno.ENOENT, errno.EAGAIN)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one job meet: a private directory and a secret of 32 bytes."""

    directory: str
    nonce: bytes

    @classmethod
    def draw(cls) -> Meeting:
        """Choose a directory below $TMPDIR, which `make` makes, and a nonce.

        Raises RendezvousFailed where there is no directory for temporary files.
        """
        try:
            parent = os.path.abspath(tempfile.gettempdir())
        except OSError as error:
            raise RendezvousFailed(
                f"{error}; set TMPDIR to a directory that is writable"
            ) from error
        name = _PREFIX + secrets.token_hex(8)
        return cls(os.path.join(parent, name), secrets.token_bytes(32))

    @classmethod
    def open(cls) -> Meeting:
        """Draw a meeting and make its directory. Raises RendezvousFailed."""
        meeting = cls.draw()
        meeting.make()
        return meeting

    @classmethod
    def told(cls, directory: Any, nonce: Any) -> Meeting:
        """The meeting that rank 0 told of. Raises ValueError for what `draw` would not choose.

        Whoever could write a false directory could otherwise have this process remove an empty one.
        """
        if not isinstance(directory, str) or not os.path.isabs(directory) or "\0" in directory:
            raise ValueError(f"{directory!r:.200} is no absolute path")
        if not os.path.basename(directory).startswith(_PREFIX):
            raise ValueError(f"{directory!r:.200} is no directory of a meeting")
        if not isinstance(nonce, str) or len(nonce) != 64:
            raise ValueError("the nonce is not 64 hex digits")
        return cls(directory, bytes.fromhex(nonce))

    def make(self) -> None:
        """Make the directory, mode 0700. Raises RendezvousFailed."""
        try:
            os.mkdir(self.directory, 0o700)
        except OSError as error:
            raise RendezvousFailed(
                f"cannot make the directory {self.directory} to meet in ({error.strerror}); set "
                "TMPDIR to a directory that is writable"
            ) from error

    def check(self) -> None:
        """Raise RendezvousFailed if this process cannot meet there."""
        os.close(_private_directory(self.directory))

    def end(self, why: str) -> None:
        """End the meeting for every rank that has not met yet, whatever it waits for.

        For whoever started the ranks and sees one fail. After all have met it does nothing.
        """
        text = why[:TEXT_LIMIT].encode(errors="backslashreplace")
        path = os.path.join(self.directory, _NOTE)
        part = f"{path}.{secrets.token_hex(4)}"
        with contextlib.suppress(FileNotFoundError):  # the directory has gone: they met, or failed
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, self.nonce.hex().encode() + text)
            finally:
                os.close(fd)
            os.rename(part, path)

    def ended(self) -> str | None:
        """Why the meeting was ended by `end`, or None. What a stranger left there is ignored."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(os.path.join(self.directory, _NOTE), flags)
        except OSError:
            return None
        try:
            data = os.read(fd, 64 + 8 * TEXT_LIMIT)
        except OSError:  # a directory, or a pipe
            return None
        finally:
            os.close(fd)
        if not hmac.compare_digest(data[:64], self.nonce.hex().encode()):
            return None
        return data[64:].decode(errors="backslashreplace")

    def remove(self) -> None:
        """Remove what the meeting has in the file system. Idempotent.

        What others put there stays, and the directory with it.
        """
        names = []
        with contextlib.suppress(OSError):
            names = os.listdir(self.directory)
        for name in names:
            if name in (_SOCKET, _BOUND) or name.startswith(_NOTE):
                with contextlib.suppress(OSError):  # two ranks may do this at the same time
                    os.unlink(os.path.join(self.directory, name))
        with contextlib.suppress(OSError):
            os.rmdir(self.directory)


def meet(
    meeting: Meeting,
    *,
    rank: int,
    size: int,
    device: str,
    timeout: float,
    peers: Peers | None = None,
) -> Star:
    """Meet the other `size - 1` ranks within `timeout` seconds; rank 0 is the hub.

    `device` is the kind of memory the rank has ("cpu", "cuda"), the same on every rank. `peers`
    are the other ranks' processes, where they are known: one that dies ends the meeting at once.
    Raises RendezvousFailed naming the rank that is missing, died, differs or is not trusted.
    """
    if not 0 <= rank < size:
        raise InvalidArgument(f"rank is {rank} and size is {size}: give 0 <= rank < size")
    deadline = time.monotonic() + timeout
    peers = Peers() if peers is None else peers
    if rank > 0:
        return _Newcomer(meeting, rank, size, device, peers, timeout, deadline).join()
    if size == 1:
        meeting.remove()
        return Star(0, 1, {}, [os.getpid()])
    lobby = _Lobby(meeting, size, device, peers)
    lobby.gather(deadline, timeout)
    return lobby.star(deadline)


class _Lobby:
    """Rank 0 while it waits for the others."""

    def __init__(self, meeting: Meeting, size: int, device: str, peers: Peers) -> None:
        self.meeting = meeting
        self.size = size
        self.device = device
        self.peers = peers
        self.members: dict[int, Channel] = {}
        self.pids = [os.getpid()] + [0] * (size - 1)
        self.unheard: dict[int, tuple[Channel, int, float]] = {}  # fd -> channel, pid, deadline
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

    def _listen(self) -> socket.socket:
        directory = _private_directory(self.meeting.directory)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            bound, shown = (f"/proc/self/fd/{directory}/{name}" for name in (_BOUND, _SOCKET))
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
        for fd in (*ranks, *self.unheard, *processes):
            poller.register(fd, select.POLLIN)
        now = time.monotonic()
        soonest = min([deadline, now + _LOOK, *(until for _, _, until in self.unheard.values())])
        ready = [fd for fd, _ in poller.poll(milliseconds(soonest))]
        for fd in ready:
            if fd in ranks:
                self._hear_member(ranks[fd])
            elif fd in self.unheard:
                self._hear_stranger(fd)
            elif fd == listener.fileno():
                self._accept(listener)
        for fd in [f for f, (_, _, until) in self.unheard.items() if until < time.monotonic()]:
            self._refuse(fd, f"no hello within {HELLO_SECONDS:g} s", Kind.AGAIN)
        dead = [rank for rank in self.peers.dead() if rank not in self.members]
        if dead:
            self.fail(self.peers.died(dead[0]))
        why = self.meeting.ended()
        if why is not None:
            self.fail(why)

    def _accept(self, listener: socket.socket) -> None:
        """Take in who waits outside. Whoever has not spoken longest makes room for the next."""
        for _ in range(STRANGERS):
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or not self.unheard:
                    raise
                self._make_room()
                continue
            pid, uid = _peer(connection)
            if uid != os.geteuid():
                connection.close()
                continue
            if len(self.unheard) >= STRANGERS:
                self._make_room()
            channel = Channel(connection, limit=HELLO_LIMIT)
            fd = channel.fileno()
            self.unheard[fd] = (channel, pid, time.monotonic() + HELLO_SECONDS)
            self._hear_stranger(fd)  # most have spoken already

    def _make_room(self) -> None:
        oldest = next(iter(self.unheard))
        self._refuse(oldest, f"{STRANGERS} connections wait unheard", Kind.AGAIN)

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
        self.members[min(self.members, default=0) - 1] = channel  # so that it hears why, too
        name = text_of(repr(rank))[:200]
        if differs:
            self.fail(f"rank 0 and rank {name} (pid {pid}) disagree: {'; '.join(differs)}")
        self.fail(
            f"pid {pid} came as rank {name}, which "
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
            if frame.fd is not None:
                os.close(frame.fd)
            why = text_of(frame.body) if frame.kind is Kind.FAIL else frame.kind.name
            self.fail(f"{name} left before all ranks had met: {why}")

    def _refuse(self, fd: int, why: str, kind: Kind = Kind.FAIL) -> None:
        channel = self.unheard.pop(fd)[0]
        with contextlib.suppress(OSError):
            channel.send(kind, encode(f"refused: {why}"), 0.0)
        channel.close()


@dataclass(frozen=True, slots=True)
class _Newcomer:
    """Any other rank on its way to rank 0."""

    meeting: Meeting
    rank: int
    size: int
    device: str
    peers: Peers
    timeout: float
    deadline: float

    def join(self) -> Star:
        """Connect, say hello and wait until all have met."""
        while True:
            channel = Channel(self._reach(), limit=self.size * (VALUE_LIMIT + SLACK))
            try:
                star = self._greet(channel)
            except BaseException:
                channel.close()
                raise
            if star is not None:
                return star
            channel.close()
            time.sleep(0.01)

    def _reach(self) -> socket.socket:
        """A socket connected to the hub, which may not listen yet."""
        directory = _private_directory(self.meeting.directory)
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
                    self._judge(error)
                if time.monotonic() >= self.deadline:
                    raise self._gone(
                        f"rank 0 did not listen in {self.meeting.directory} within "
                        f"{self.timeout:g} s; raise `timeout`, or set TMPDIR to a directory that "
                        f"all ranks see{self.peers.unseen([0])}"
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LOOK)
        finally:
            os.close(directory)

    def _judge(self, error: OSError) -> None:
        """Raise unless trying again may help."""
        directory = self.meeting.directory
        why = self.meeting.ended()
        if why is not None:
            raise RendezvousFailed(why)
        dead = self.peers.dead()
        if dead:
            # Not this rank's to clear away while rank 0 lives: it tells the others why, first.
            raise self._gone(self.peers.died(dead[0]), clear=0 in dead)
        if error.errno == errno.ECONNREFUSED:
            raise self._gone(
                f"rank 0 no longer listens in {directory}: it died, or gave up, before all ranks "
                "had met"
            ) from error
        if error.errno not in _CANNOT_CONNECT_YET:
            raise RendezvousFailed(f"cannot connect to rank 0 in {directory}: {error}") from error
        if not os.path.isdir(directory):
            raise RendezvousFailed(
                f"the meeting in {directory} is over: rank 0 gave up or met others"
            )

    def _greet(self, channel: Channel) -> Star | None:
        """What the hub makes of this rank: None where it asks to come again."""
        pid, uid = _peer(channel.socket)
        if uid != os.geteuid():
            raise RendezvousFailed(
                f"the hub in {self.meeting.directory} runs as user {uid} and rank {self.rank} as "
                f"user {os.geteuid()}; run all ranks as one user"
            )
        said: JSON = {
            "abi": ABI,
            "rank": self.rank,
            "size": self.size,
            "device": self.device,
            "nonce": self.meeting.nonce.hex(),
        }
        try:
            with contextlib.suppress(Gone):  # its last words may lie in the socket's buffer
                channel.send(Kind.HELLO, encode(said), self.deadline)
            frame = channel.receive(self.deadline + HUB_SLACK)
        except TimeoutError:
            raise self._gone(
                f"rank 0 (pid {pid}) did not gather all {self.size} ranks within "
                f"{self.timeout:g} s (rank {self.rank} waited for it)"
            ) from None
        except (OSError, Malformed) as error:
            text = f"rank 0 (pid {pid}) left before all ranks had met: {error}"
            raise self._gone(self.meeting.ended() or text) from error
        if frame.fd is not None:
            os.close(frame.fd)
        if frame.kind is Kind.AGAIN and time.monotonic() < self.deadline:
            return None
        if frame.kind is not Kind.WELCOME:
            raise RendezvousFailed(
                f"{text_of(frame.body)} (rank 0, pid {pid}, told rank {self.rank})"
            )
        return Star(self.rank, self.size, {0: channel}, self._pids(frame, pid))

    def _pids(self, frame: Frame, hub: int) -> list[int]:
        pids = frame.body if isinstance(frame.body, list) else []
        if len(pids) != self.size or not all(type(each) is int for each in pids):
            raise RendezvousFailed(
                f"rank 0 (pid {hub}) broke the protocol: it sent {text_of(repr(frame.body))[:200]} "
                f"where rank {self.rank} expected {self.size} process ids"
            )
        return pids

    def _gone(self, text: str, *, clear: bool = True) -> RendezvousFailed:
        """The error of a meeting that cannot succeed any more; rank 0 may not clear it away."""
        if clear:
            self.meeting.remove()
        return RendezvousFailed(text)


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
            "share a file system there; set TMPDIR to a directory that they all see, for "
            "containers to a volume mounted at one path in all of them"
        ) from error
    status = os.fstat(fd)
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        os.close(fd)
        raise RendezvousFailed(
            f"the meeting directory {path} belongs to user {status.st_uid} with mode {mode:04o}; "
            f"it must belong to user {os.geteuid()} with mode 0700 (run all ranks as one user, "
            "containers in one user namespace)"
        )
    if not os.path.exists(f"/proc/self/fd/{fd}"):
        os.close(fd)
        raise RendezvousFailed(
            "/proc does not show this process, so its sockets have no address there: mount the "
            "/proc of this pid namespace (unshare --mount-proc), or share the host's (--pid=host)"
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
    return isinstance(shown, str) and hmac.compare_digest(
        shown.encode(errors="surrogatepass"), nonce.hex().encode()
    )
