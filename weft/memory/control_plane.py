"""The control plane: Unix sockets that the ranks of one host keep after they met, in a star.

Rank 0 is the hub. Every collective is one frame from each rank to the hub and one frame back (one a
descriptor, for descriptors). A rank that dies ends its socket, so the hub knows at once and informs
the others which rank it was. Every wait has a deadline; a failed call breaks the group for good.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

from weft.errors import OutOfOrder, RendezvousFailed
from weft.memory.wire import (
    JSON,
    Channel,
    Frame,
    Gone,
    Kind,
    Malformed,
    encode,
    encode_value,
    milliseconds,
    text_of,
)

HUB_SLACK = 1.0  # seconds that members wait longer than the hub, whose error names the culprit


class ControlPlane:
    """The sockets of one rank after the meeting: one to each member on rank 0, one to rank 0 else.

    `pids[r]` is rank r's process id as the kernel reported it to the hub.
    """

    def __init__(self, rank: int, size: int, channels: dict[int, Channel], pids: list[int]) -> None:
        self.rank = rank
        self.size = size
        self.pids = pids
        self._channels = channels
        self._owner = os.getpid()
        self._busy = threading.Lock()
        self._sequence = 0
        self._broken: str | None = None
        self._closed = False

    def gather(self, op: str, value: JSON, timeout: float) -> list[Any]:
        """Every rank's `value` in rank order. `op` names the call; all ranks must make the same."""
        body = encode_value(op, value, larger="through a Heap")
        with self._collective():
            call = encode({"op": op, "n": self._sequence})
            deadline = time.monotonic() + timeout
            if self.rank == 0:
                frames = self._collect(Kind.VALUE, op, timeout, deadline)
                values = [value] + [frames[r].body["value"] for r in range(1, self.size)]
                try:
                    text = encode(values)
                except ValueError as error:  # each could be sent, but not one level deeper
                    self._fail(f"the values of {op} cannot be sent to every rank: {error}")
                for rank in self._channels:
                    self._send(rank, Kind.RESULT, text, op, timeout, deadline)
                return list(json.loads(text))  # the hub's own value too: equal on every rank
            self._send(0, Kind.VALUE, call[:-1] + b',"value":' + body + b"}", op, timeout, deadline)
            frame = self._answer(Kind.RESULT, op, timeout, deadline)
            if not isinstance(frame.body, list) or len(frame.body) != self.size:
                self._fail(
                    f"{self._name(0)} broke the protocol in {op}: it sent no list of {self.size}"
                )
            return frame.body

    def exchange_fds(self, fd: int, timeout: float) -> list[int]:
        """One descriptor of every rank, in rank order; the own entry is a duplicate."""
        op, own = "exchange_fds", os.dup(fd)
        received: dict[int, int] = {self.rank: own}
        try:
            with self._collective():
                deadline = time.monotonic() + timeout
                self._swap(op, own, received, timeout, deadline)
            return [received[r] for r in range(self.size)]
        except BaseException:
            for each in received.values():
                os.close(each)
            raise

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
        body = b"" if why is None else encode(text_of(why))
        for channel in self._channels.values():
            if os.getpid() == self._owner:  # a forked child must not speak for its parent
                with contextlib.suppress(OSError):
                    channel.send(Kind.BYE, body, 0.0)
            channel.close()

    def _swap(
        self, op: str, own: int, received: dict[int, int], timeout: float, deadline: float
    ) -> None:
        others = [r for r in range(self.size) if r != self.rank]
        if self.rank != 0:
            call = encode({"op": op, "n": self._sequence})
            self._send(0, Kind.DESCRIPTOR, call, op, timeout, deadline, fd=own)
            for rank in others:
                frame = self._answer(Kind.DESCRIPTOR, op, timeout, deadline)
                if frame.fd is None:
                    self._fail(f"{self._name(0)} sent no descriptor of rank {rank} in {op}")
                received[rank] = frame.fd
            return
        self._collect(Kind.DESCRIPTOR, op, timeout, deadline, received)
        for to in others:
            for rank in range(self.size):
                if rank != to:
                    fd = received[rank]
                    self._send(to, Kind.DESCRIPTOR, b"", op, timeout, deadline, fd=fd)

    def _collect(
        self,
        kind: Kind,
        op: str,
        timeout: float,
        deadline: float,
        received: dict[int, int] | None = None,
    ) -> dict[int, Frame]:
        """On the hub: one frame of every member. Descriptors go to `received` as they come."""
        frames: dict[int, Frame] = {}
        poller, by_fd = select.poll(), {}
        for rank, channel in self._channels.items():
            poller.register(channel, select.POLLIN | select.POLLRDHUP)
            by_fd[channel.fileno()] = rank
        while len(frames) < self.size - 1:
            ready = poller.poll(milliseconds(deadline))
            for fd, _ in ready:
                rank = by_fd[fd]
                frame = self._pump(rank, op)
                if frame is None:
                    continue
                if frame.fd is not None and received is not None and rank not in received:
                    received[rank] = frame.fd
                elif frame.fd is not None:
                    os.close(frame.fd)
                self._check(rank, frame, kind, op, rank in frames)
                frames[rank] = frame
            if not ready and time.monotonic() >= deadline:
                missing = [self._name(r) for r in self._channels if r not in frames]
                self._fail(f"{', '.join(missing)} did not enter {op} within {timeout:g} s")
        return frames

    def _pump(self, rank: int, op: str) -> Frame | None:
        try:
            return self._channels[rank].pump()
        except Gone:
            self._fail(self._broken or f"{self._name(rank)} died while the group was in {op}")
        except (Malformed, OSError) as error:
            self._fail(f"{self._name(rank)} broke the protocol in {op}: {error}")

    def _check(self, rank: int, frame: Frame, kind: Kind, op: str, again: bool) -> None:
        self._check_end(rank, frame, op)
        body = frame.body if isinstance(frame.body, dict) else {}
        if again or body.get("op") != op or body.get("n") != self._sequence:
            theirs = f"{text_of(body.get('op'))} (call {text_of(body.get('n'))})"
            self._fail(
                f"rank 0 is in {op} (call {self._sequence}) and {self._name(rank)} is in {theirs}: "
                "every rank must make the same calls in the same order"
            )
        complete = "value" in body if kind is Kind.VALUE else frame.fd is not None
        if frame.kind is not kind or not complete:
            self._fail(f"{self._name(rank)} sent {frame.kind.name} in {op}, not {kind.name}")

    def _check_end(self, rank: int, frame: Frame, op: str) -> None:
        """Raise if `frame` says that there will be no more of them."""
        if frame.kind in (Kind.FAIL, Kind.BYE):
            self._fail(self._farewell(rank, frame, op))

    def _farewell(self, rank: int, frame: Frame, op: str) -> str:
        if frame.kind is Kind.FAIL:
            return text_of(frame.body)
        if frame.body is None:
            return f"{self._name(rank)} closed its group while the others were in {op}"
        return (
            f"{self._name(rank)} left the group while the others were in {op}: "
            f"{text_of(frame.body)}"
        )

    def _answer(self, kind: Kind, op: str, timeout: float, deadline: float) -> Frame:
        """On a member: the hub's next frame."""
        try:
            frame = self._channels[0].receive(deadline + HUB_SLACK)
        except TimeoutError:
            self._fail(
                f"{self._name(0)} did not enter {op} within {timeout:g} s "
                f"(rank {self.rank} waited for it)"
            )
        except Gone:
            self._fail(self._broken or f"{self._name(0)} died while the group was in {op}")
        except (Malformed, OSError) as error:
            self._fail(f"{self._name(0)} broke the protocol in {op}: {error}")
        if frame.kind is not kind and frame.fd is not None:
            os.close(frame.fd)
        self._check_end(0, frame, op)
        if frame.kind is not kind:
            self._fail(f"{self._name(0)} sent {frame.kind.name} in {op}, not {kind.name}")
        return frame

    def _send(
        self,
        rank: int,
        kind: Kind,
        body: bytes,
        op: str,
        timeout: float,
        deadline: float,
        *,
        fd: int | None = None,
    ) -> None:
        channel = self._channels[rank]
        try:
            channel.send(kind, body, deadline, fd=fd)
        except TimeoutError:
            self._fail(f"{self._name(rank)} did not read its part of {op} within {timeout:g} s")
        except Gone:
            # Its last frames may still be in the socket's buffer.
            self._fail(self._last_words(rank, op) or f"{self._name(rank)} died before {op}")
        except OSError as error:
            self._fail(f"{self._name(rank)} cannot be sent its part of {op}: {error}")

    def _last_words(self, rank: int, op: str) -> str | None:
        if self._broken:
            return self._broken
        try:
            while (frame := self._channels[rank].pump()) is not None:
                if frame.fd is not None:
                    os.close(frame.fd)
                if frame.kind in (Kind.FAIL, Kind.BYE):
                    return self._farewell(rank, frame, op)
        except (OSError, Malformed):
            return None
        return None

    def _fail(self, text: str) -> NoReturn:
        """Break the group for good: send every peer the text, if its buffer has room, and raise.

        The first text stays: a rank that comes later learns the first cause.
        """
        self._broken = text
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.send(Kind.FAIL, encode(text), 0.0)
        raise RendezvousFailed(text)

    def _name(self, rank: int) -> str:
        return f"rank {rank} (pid {self.pids[rank]})"

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
