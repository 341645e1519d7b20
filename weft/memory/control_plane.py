"""The control plane: a Unix socket between every two ranks of one host, kept after they met.

Every collective is one frame from each rank to each other one. A rank that dies ends its sockets,
so all others know at once which rank it was, and none is more needed than another. Every wait has a
deadline; a failed call breaks the group, until a recovery resumes it among the living.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from weft.errors import OutOfOrder, RendezvousFailed
from weft.memory.wire import (
    JSON,
    Channel,
    Frame,
    Gone,
    Kind,
    Malformed,
    decode,
    encode,
    encode_value,
    milliseconds,
    text_of,
)


class ControlPlane:
    """The sockets of one rank after the meeting, one to each living peer.

    `pids[r]` is rank r's process id as the kernel reported it to rank 0.
    """

    def __init__(self, rank: int, size: int, channels: dict[int, Channel], pids: list[int]) -> None:
        self.rank = rank
        self.size = size
        self.pids = pids
        self._channels = channels
        self._owner = os.getpid()
        self._busy = threading.Lock()
        self._era = 0  # of frames: those that a broken call left in a socket are of an older one
        self._sequence = 0
        self._broken: str | None = None
        self._closed = False

    def gather(self, op: str, value: JSON, timeout: float) -> list[Any]:
        """The `value` of every rank in rank order, None for one that is gone.

        `op` names the call; all ranks must make the same.
        """
        body = encode_value(op, value, larger="through a Heap")
        with self._collective():
            call = encode({"op": op, "n": self._sequence})
            data = call[:-1] + b',"value":' + body + b"}"
            frames = self._swap(Kind.VALUE, data, op, timeout)
        values = {rank: frame.body["value"] for rank, frame in frames.items()}
        values[self.rank] = decode(body)  # equal on every rank
        return [values.get(rank) for rank in range(self.size)]

    def exchange_fds(self, fd: int, timeout: float) -> list[int | None]:
        """One descriptor of every rank in rank order, None for one that is gone.

        The own entry is a duplicate.
        """
        op, own = "exchange_fds", os.dup(fd)
        try:
            with self._collective():
                call = encode({"op": op, "n": self._sequence})
                frames = self._swap(Kind.DESCRIPTOR, call, op, timeout, fd=own)
        except BaseException:
            os.close(own)
            raise
        fds = {rank: frame.fd for rank, frame in frames.items()} | {self.rank: own}
        return [fds.get(rank) for rank in range(self.size)]

    def resume(self, era: int, living: set[int]) -> None:
        """Go on among `living` after a recovery, whose number `era` is the same on every rank."""
        for rank in set(self._channels) - living:
            self._channels.pop(rank).close()
        self._era = era & 0xFFFF
        self._sequence = 0
        self._broken = None

    def leave(self, why: str) -> None:
        """Raise `why` in every call until `resume`, here and at peers that wait for this rank."""
        self._broken = self._broken or why
        self._tell(Kind.FAIL, encode(why))

    def interrupt(self, ranks: Collection[int], why: str) -> None:
        """Raise `why` on these ranks, if they wait in a call, for whichever rank it is."""
        self._tell(Kind.FAIL, encode(why), ranks)

    def name(self, rank: int) -> str:
        """For errors: the rank, and its process."""
        return f"rank {rank} (pid {self.pids[rank]})"

    def abort(self, why: str) -> None:
        """Break the group from another thread of this process: a blocked call raises at once."""
        self._broken = self._broken or why
        for channel in self._channels.values():
            channel.shut()

    def close(self, why: str | None = None) -> None:
        """Close the sockets. Local: sends `why` to peers whose buffers have room, never waits.

        `why` is what made this rank leave; ranks that wait for it, or come to, raise that text.
        """
        if self._closed:
            return
        self._closed = True
        if os.getpid() == self._owner:  # a forked child must not speak for its parent
            self._tell(Kind.BYE, b"" if why is None else encode(text_of(why)))
        for channel in self._channels.values():
            channel.close()

    def _swap(
        self, kind: Kind, body: bytes, op: str, timeout: float, *, fd: int | None = None
    ) -> dict[int, Frame]:
        """Send one frame to every peer and receive one of each."""
        deadline = time.monotonic() + timeout
        frames: dict[int, Frame] = {}
        try:
            for channel in self._channels.values():
                channel.post(kind, body, fd=fd, era=self._era)
            ready = set(self._channels)
            while True:
                for rank in sorted(ready):
                    self._turn(rank, kind, op, frames)
                waiting = [r for r, c in self._channels.items() if r not in frames or c.unsent]
                if not waiting:
                    self._look_for_failure(op)
                    return frames
                if time.monotonic() >= deadline:
                    self._fail(self._late(waiting, frames, op, timeout))
                ready = self._ready(waiting, frames, deadline)
        except BaseException:
            for frame in frames.values():
                frame.drop()
            raise

    def _turn(self, rank: int, kind: Kind, op: str, frames: dict[int, Frame]) -> None:
        """Send and receive what can be now."""
        channel = self._channels[rank]
        left = False
        try:
            channel.flush()
        except Gone:
            left = True  # its last frames may still be in the socket's buffer
        except OSError as error:
            self._fail(f"{self.name(rank)} cannot be sent its part of {op}: {error}")
        if rank not in frames or left:
            frame = self._pump(rank, op)
            if frame is not None and rank in frames:
                frame.drop()
            elif frame is not None:
                frames[rank] = frame
                self._check(rank, frame, kind, op)

    def _pump(self, rank: int, op: str) -> Frame | None:
        """The peer's next frame of this era. Raises RendezvousFailed if there will be none."""
        if self._broken is not None:
            raise RendezvousFailed(self._broken)
        try:
            while (frame := self._channels[rank].pump()) is not None:
                if frame.kind is Kind.BYE:
                    frame.drop()
                    self._fail(self._farewell(rank, frame, op))
                if frame.era != self._era:
                    frame.drop()
                    continue
                if frame.kind is Kind.FAIL:
                    frame.drop()
                    self._fail(text_of(frame.body))
                return frame
        except Gone:
            self._fail(self._broken or f"{self.name(rank)} died while the group was in {op}")
        except (Malformed, OSError) as error:
            self._fail(f"{self.name(rank)} broke the protocol in {op}: {error}")
        return None

    def _look_for_failure(self, op: str) -> None:
        """Fail as a peer did that sent its part and then gave up waiting for this rank."""
        for rank, channel in self._channels.items():
            with contextlib.suppress(OSError, Malformed):  # of the next call
                frame = channel.peek()
                if frame is not None and frame.kind is Kind.FAIL and frame.era == self._era:
                    self._pump(rank, op)

    def _ready(self, waiting: list[int], frames: dict[int, Frame], deadline: float) -> set[int]:
        poller, ranks = select.poll(), {}
        for rank in waiting:
            channel = self._channels[rank]
            awaited = 0 if rank in frames else select.POLLIN
            poller.register(channel, awaited | (select.POLLOUT if channel.unsent else 0))
            ranks[channel.fileno()] = rank
        return {ranks[fd] for fd, _ in poller.poll(milliseconds(deadline))}

    def _late(self, waiting: list[int], frames: dict[int, Frame], op: str, timeout: float) -> str:
        missing = [self.name(rank) for rank in waiting if rank not in frames]
        if missing:
            return f"{', '.join(missing)} did not enter {op} within {timeout:g} s"
        names = ", ".join(map(self.name, waiting))
        return f"{names} did not read its part of {op} within {timeout:g} s"

    def _check(self, rank: int, frame: Frame, kind: Kind, op: str) -> None:
        body = frame.body if isinstance(frame.body, dict) else {}
        if body.get("op") != op or body.get("n") != self._sequence:
            theirs = f"{text_of(body.get('op'))} (call {text_of(body.get('n'))})"
            self._fail(
                f"rank {self.rank} is in {op} (call {self._sequence}) and {self.name(rank)} is in "
                f"{theirs}: every rank must make the same calls in the same order"
            )
        complete = "value" in body if kind is Kind.VALUE else frame.fd is not None
        if frame.kind is not kind or not complete:
            self._fail(f"{self.name(rank)} sent {frame.kind.name} in {op}, not {kind.name}")

    def _farewell(self, rank: int, frame: Frame, op: str) -> str:
        if frame.body is None:
            return f"{self.name(rank)} closed its group while the others were in {op}"
        return (
            f"{self.name(rank)} left the group while the others were in {op}: {text_of(frame.body)}"
        )

    def _fail(self, text: str) -> NoReturn:
        """Break the group: send every peer the text, if its buffer has room, and raise.

        The first text stays: a rank that comes later learns the first cause.
        """
        self._broken = text
        self._tell(Kind.FAIL, encode(text))
        raise RendezvousFailed(text)

    def _tell(self, kind: Kind, body: bytes, ranks: Collection[int] | None = None) -> None:
        for rank, channel in self._channels.items():
            if ranks is not None and rank not in ranks:
                continue
            with contextlib.suppress(OSError):
                channel.post(kind, body, era=self._era)
                channel.flush()

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        if self._closed:
            raise OutOfOrder("the group is closed; make a new one")
        if os.getpid() != self._owner:
            raise OutOfOrder(
                f"the group belongs to process {self._owner} and was used in its forked child "
                f"{os.getpid()}; make a group in the process that uses it"
            )
        if self._broken is not None:
            raise RendezvousFailed(self._broken)
        if not self._busy.acquire(blocking=False):
            raise OutOfOrder(
                f"two threads of rank {self.rank} use one group at a time; make the calls from one"
            )
        try:
            self._sequence += 1
            yield
        finally:
            self._busy.release()
