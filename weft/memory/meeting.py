"""Where the ranks of one job meet: a directory, what is in it, and who may enter."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import stat
import struct
import tempfile
from dataclasses import dataclass
from typing import Any

from weft.errors import InvalidArgument, RendezvousFailed
from weft.memory.wire import TEXT_LIMIT

ABI = 2  # of the frames and of what a Heap promises its peers
SOCKET = "hub"  # there once rank 0 listens
BOUND = "hub.bound"  # the same socket before that
LOOK = 0.05  # seconds between two looks for the note
_PREFIX = "weft-"
_NOTE = "ended"  # why the meeting is over, below the nonce


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

    @property
    def address(self) -> str:
        """The directory and the nonce as one text, which nobody else should see."""
        return f"{self.directory}:{self.nonce.hex()}"

    @classmethod
    def at(cls, address: str) -> Meeting:
        """The meeting of an `address`. Raises InvalidArgument for what is none."""
        directory, _, nonce = address.rpartition(":")
        try:
            return cls.received(directory, nonce)
        except ValueError as error:
            raise InvalidArgument(f"the address of the meeting is not one: {error}") from error

    @classmethod
    def received(cls, directory: Any, nonce: Any) -> Meeting:
        """The meeting whose place rank 0 sent. Raises ValueError for what `draw` would not choose.

        A false directory could otherwise have this process remove an empty one.
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
        os.close(private_directory(self.directory))

    def below(self, root: int) -> Meeting:
        """This meeting, reached from the root directory that the descriptor `root` names."""
        return Meeting(f"/proc/self/fd/{root}{self.directory}", self.nonce)

    def in_shared_memory(self) -> Meeting:
        """This meeting moved to /dev/shm, which containers of one IPC namespace share."""
        return Meeting(os.path.join("/dev/shm", os.path.basename(self.directory)), self.nonce)

    def end(self, why: str) -> None:
        """End the meeting for every rank that has not met yet, whatever it waits for.

        For a launcher that sees a rank fail. After all have met it does nothing.
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
            if name in (SOCKET, BOUND) or name.startswith(_NOTE):
                with contextlib.suppress(OSError):  # two ranks may do this at the same time
                    os.unlink(os.path.join(self.directory, name))
        with contextlib.suppress(OSError):
            os.rmdir(self.directory)


def private_directory(path: str) -> int:
    """An O_PATH descriptor of `path`, after checking that it is this user's alone.

    Sockets are bound and reached through /proc/self/fd/N, which stays below the 108 bytes of a
    Unix socket's address however long $TMPDIR is.
    """
    try:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise RendezvousFailed(
            f"the meeting directory {path} cannot be opened ({error.strerror}): this rank does "
            "not see it, or the meeting is over"
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


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end, as the kernel knows them."""
    size = struct.calcsize("3i")
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = struct.unpack("3i", data)
    return int(pid), int(uid)
