"""Where the ranks of one job meet: a directory that only its user may enter, and a secret."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import stat
import struct
import tempfile
from dataclasses import dataclass

from weft.errors import InvalidArgument, RendezvousFailed
from weft.memory.wire import encode, send

_PREFIX = "weft-"
_OURS = re.compile(r"\d+(\.bound)?")  # the sockets of the ranks


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of one job meet: a private directory and a secret of 32 bytes.

    A meeting whose directory is gone is over, for every rank that has not met the others yet.
    """

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
        """The meeting of an `address`. Raises InvalidArgument for what `draw` would not choose.

        A false directory could otherwise have this process remove an empty one.
        """
        directory, _, nonce = address.rpartition(":")
        why = ""
        if not os.path.isabs(directory) or "\0" in directory:
            why = f"{directory!r:.200} is no absolute path"
        elif not os.path.basename(directory).startswith(_PREFIX):
            why = f"{directory!r:.200} is no directory of a meeting"
        elif re.fullmatch("[0-9a-f]{64}", nonce) is None:
            why = "the nonce is not 64 hex digits"
        if why:
            raise InvalidArgument(f"the address of the meeting is not one: {why}")
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

    def enter(self) -> int:
        """An O_PATH descriptor of the directory, after checking that it is this user's alone.

        Sockets are bound and reached through /proc/self/fd/N, which stays below the 108 bytes of a
        Unix socket's address however long $TMPDIR is. Raises RendezvousFailed.
        """
        path = self.directory
        try:
            fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise RendezvousFailed(
                f"the meeting directory {path} cannot be opened ({error.strerror}): this rank does "
                "not see it, or the meeting is over"
            ) from error
        try:
            status = os.fstat(fd)
            mode = stat.S_IMODE(status.st_mode)
            if status.st_uid != os.geteuid() or mode & 0o077:
                raise RendezvousFailed(
                    f"the meeting directory {path} belongs to user {status.st_uid} with mode "
                    f"{mode:04o}; it must belong to user {os.geteuid()} with mode 0700 (run all "
                    "ranks as one user, containers in one user namespace)"
                )
            if not os.path.exists(f"/proc/self/fd/{fd}"):
                raise RendezvousFailed(
                    "/proc does not show this process, so its sockets have no address there: mount "
                    "the /proc of this pid namespace (unshare --mount-proc), or share the host's "
                    "(--pid=host)"
                )
        except RendezvousFailed:
            os.close(fd)
            raise
        return fd

    def below(self, root: int) -> Meeting:
        """This meeting, reached from the root directory that the descriptor `root` names."""
        return Meeting(f"/proc/self/fd/{root}{self.directory}", self.nonce)

    def in_shared_memory(self) -> Meeting:
        """This meeting moved to /dev/shm, which containers of one IPC namespace share."""
        return Meeting(os.path.join("/dev/shm", os.path.basename(self.directory)), self.nonce)

    def end(self, why: str) -> None:
        """End the meeting for every rank that has not met the others yet: it raises `why`.

        For a launcher that sees a rank fail. After all have met it does nothing.
        """
        with contextlib.suppress(RendezvousFailed, OSError):  # they met, or failed
            directory = self.enter()
            try:
                for name in filter(str.isdigit, os.listdir(self.directory)):
                    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                        connection.setblocking(False)
                        with contextlib.suppress(OSError):  # that one is gone
                            connection.connect(f"/proc/self/fd/{directory}/{name}")
                            send(connection, encode({"nonce": self.nonce.hex(), "fail": why}))
            finally:
                os.close(directory)
        self.remove()

    def remove(self) -> None:
        """Remove the directory and the ranks' names in it, which ends the meeting. Idempotent.

        What others put there stays, and the directory with it.
        """
        with contextlib.suppress(OSError):  # two ranks may do this at the same time
            while names := list(filter(_OURS.fullmatch, os.listdir(self.directory))):
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(os.path.join(self.directory, name))
            os.rmdir(self.directory)


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end, as the kernel knows them."""
    size = struct.calcsize("3i")
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, uid, _ = struct.unpack("3i", data)
    return int(pid), int(uid)
