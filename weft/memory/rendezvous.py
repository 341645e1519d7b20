"""How the ranks of one host meet.

Rank 0 listens in a directory that only its user may enter. Every other rank connects, is checked by
user id as the kernel reports it, and shows the job's 32-byte nonce; both sides compare what they
were built for. A stranger is refused and disturbs no rank. As soon as all have met, the names and
the directory are removed, so that nothing named is left behind even by `kill -9`, and rank 0 gives
every two of the others a pair of sockets.

A rank that dies ends the meeting for all: once connected by its socket, before that by its pidfd
where its process is known (`peers.py`), or by its launcher, which leaves a note
(`Meeting.end`). The socket's name appears only when somebody listens, so a name where nobody
listens says that rank 0 is gone. A rank that is stopped, and not dead, has the deadline.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import time
from dataclasses import dataclass

from weft.errors import InvalidArgument, RendezvousFailed
from weft.memory.control_plane import ControlPlane
from weft.memory.meeting import ABI, LOOK, SOCKET, Meeting, credentials, private_directory
from weft.memory.peers import Peers
from weft.memory.rendezvous_server import RendezvousServer
from weft.memory.wire import (
    JSON,
    SLACK,
    VALUE_LIMIT,
    Channel,
    Frame,
    Gone,
    Kind,
    Malformed,
    encode,
    text_of,
)

_log = logging.getLogger(__name__)
_CANNOT_CONNECT_YET = (errno.ENOENT, errno.EAGAIN)
_SLACK = 1.0  # seconds that members wait longer than rank 0, whose error names the culprit


def meet(
    meeting: Meeting,
    *,
    rank: int,
    size: int,
    device: str,
    timeout: float,
    peers: Peers | None = None,
) -> ControlPlane:
    """Meet the other `size - 1` ranks within `timeout` seconds; rank 0 is the hub.

    `device` is the kind of memory the rank has ("cpu", "cuda"), the same on every rank. `peers`
    are the other ranks' processes, where they are known: one that dies ends the meeting at once.
    Raises RendezvousFailed naming the rank that is missing, died, differs or is not trusted.
    """
    if not 0 <= rank < size:
        raise InvalidArgument(f"rank is {rank} and size is {size}: give 0 <= rank < size")
    began = time.monotonic()
    deadline = began + timeout
    peers = Peers() if peers is None else peers
    if rank > 0:
        control = _RendezvousClient(meeting, rank, size, device, peers, timeout, deadline).join()
    elif size == 1:
        meeting.remove()
        control = ControlPlane(0, 1, {}, [os.getpid()])
    else:
        server = RendezvousServer(meeting, size, device, peers)
        server.gather(deadline, timeout)
        control = server.welcome(deadline)
    _log.info(
        "rank %d of %d on %s met the others in %s after %.3f s; processes by rank: %s",
        *(rank, size, device, meeting.directory, time.monotonic() - began, control.pids),
    )
    return control


@dataclass(frozen=True, slots=True)
class _RendezvousClient:
    """Any other rank on its way to rank 0."""

    meeting: Meeting
    rank: int
    size: int
    device: str
    peers: Peers
    timeout: float
    deadline: float

    def join(self) -> ControlPlane:
        """Connect, say hello and wait until all have met."""
        while True:
            channel = Channel(self._reach(), limit=VALUE_LIMIT + SLACK)
            try:
                control = self._greet(channel)
            except BaseException:
                channel.close()
                raise
            if control is not None:
                return control
            channel.close()
            time.sleep(0.01)

    def _reach(self) -> socket.socket:
        """A socket connected to the hub, which may not listen yet."""
        directory = private_directory(self.meeting.directory)
        pause = 0.001
        try:
            while True:
                connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    connection.setblocking(False)
                    connection.connect(f"/proc/self/fd/{directory}/{SOCKET}")
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
                pause = min(2 * pause, LOOK)
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
            # Not this rank's to clear away while rank 0 lives: it sends the reason first.
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

    def _greet(self, channel: Channel) -> ControlPlane | None:
        """What the hub makes of this rank: None where it asks to come again."""
        pid, uid = credentials(channel.socket)
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
        peers: list[int] = []  # sockets to the other members, in rank order
        try:
            frame = self._answer(channel, encode(said), pid, peers)
            if frame.kind is Kind.AGAIN and time.monotonic() < self.deadline:
                return None
            if frame.kind is not Kind.WELCOME:
                raise RendezvousFailed(
                    f"{text_of(frame.body)} (rank 0, pid {pid}, to rank {self.rank})"
                )
            pids = self._pids(frame, pid, len(peers))
            others = [r for r in range(1, self.size) if r != self.rank]
            channels = {0: channel}
            for rank in others:
                end = socket.socket(fileno=peers.pop(0))
                channels[rank] = Channel(end, limit=VALUE_LIMIT + SLACK)
            return ControlPlane(self.rank, self.size, channels, pids)
        finally:
            for fd in peers:
                os.close(fd)

    def _answer(self, channel: Channel, hello: bytes, pid: int, peers: list[int]) -> Frame:
        """Rank 0's last word; sockets that come before it are added to `peers`."""
        try:
            with contextlib.suppress(Gone):  # its last frames may be in the socket's buffer
                channel.send(Kind.HELLO, hello, self.deadline)
            while True:
                frame = channel.receive(self.deadline + _SLACK)
                if frame.kind is Kind.DESCRIPTOR and frame.fd is not None:
                    peers.append(frame.fd)
                    continue
                frame.drop()
                return frame
        except TimeoutError:
            raise self._gone(
                f"rank 0 (pid {pid}) did not gather all {self.size} ranks within "
                f"{self.timeout:g} s (rank {self.rank} waited for it)"
            ) from None
        except (OSError, Malformed) as error:
            text = f"rank 0 (pid {pid}) left before all ranks had met: {error}"
            raise self._gone(self.meeting.ended() or text) from error

    def _pids(self, frame: Frame, hub: int, peers: int) -> list[int]:
        pids = frame.body if isinstance(frame.body, list) else []
        if len(pids) != self.size or not all(type(each) is int for each in pids):
            raise RendezvousFailed(
                f"rank 0 (pid {hub}) broke the protocol: it sent {text_of(repr(frame.body))[:200]} "
                f"where rank {self.rank} expected {self.size} process ids"
            )
        if peers != self.size - 2:
            raise RendezvousFailed(
                f"rank 0 (pid {hub}) broke the protocol: it sent {peers} sockets where rank "
                f"{self.rank} expected {self.size - 2}"
            )
        return pids

    def _gone(self, text: str, *, clear: bool = True) -> RendezvousFailed:
        """The error of a meeting that cannot succeed any more; rank 0 may not clear it away."""
        if clear:
            self.meeting.remove()
        return RendezvousFailed(text)
