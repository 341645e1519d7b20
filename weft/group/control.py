# SPDX-License-Identifier: Apache-2.0
"""Control messages over a Unix socket between each pair of ranks on one host.

In every collective each rank sends one message to each other rank, so no rank is a coordinator.
When a rank dies, the kernel closes its sockets. A peer that sees the process end shuts them down
too (`disconnect`), because a forked child may hold copies. All other ranks detect the death at
once. Every wait has a deadline. A failed call breaks the group until a recovery resumes it among
the living ranks.

A message is one of three:

- part of a call: `op`, the call's number `n`, and a `value` or a descriptor
- `fail`: the reason why the sender's group is broken, with the `n` of the call that failed
- `bye`: the reason why the sender left, or null if it closed its group
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NoReturn, Protocol

from weft.errors import OutOfOrder, RendezvousFailed
from weft.group import wire
from weft.group.waits import ControlWaits
from weft.group.wire import (
    JSON,
    DescriptorLimit,
    Disconnected,
    MalformedMessage,
    Message,
    decode,
    encode,
    encode_value,
    sanitize_text,
    send,
)
from weft.logs import WaitLogTimer

_log = logging.getLogger(__name__)


class Control(Protocol):
    """Channel of a group's control messages."""

    rank: int
    size: int

    def gather(self, op: str, value: JSON, timeout: float) -> list[Any]:
        """Return every rank's `value` in rank order, None for a dead rank. Collective.

        Args:
            op: Name of the call, equal on all ranks.
            value: At most 1 MiB of JSON.
            timeout: Seconds to wait.
        """

    def exchange_fds(self, fd: int, timeout: float) -> list[int | None]:
        """Return one descriptor of every rank, None for a dead rank. Collective.

        This rank's entry is a duplicate of `fd`.
        """

    def pid(self, rank: int) -> int | None:
        """Return the process id of a rank as the kernel reported it, or None if unknown."""

    def current_call(self, rank: int) -> str | None:
        """Return the control call in which a peer waits for this rank, or None. Any thread."""

    def last_call(self, rank: int) -> str | None:
        """Return the last control call that a peer has entered together with this rank, or None."""

    def abort(self, reason: str) -> None:
        """Break the group: later calls and, if possible, a blocked one raise. Any thread."""

    def close(self, reason: str | None = None) -> None:
        """Leave the group without waiting; peers that wait for this rank get `reason`."""


class ControlPlane:
    """Implementation of `Control` over sockets to the living peers, which `meet` adds.

    Attributes:
        pids: Process id of each rank as the kernel reports it to the hub of the meeting; 0 if the
            process has no id in the hub's PID namespace.
        waits: Waits of this rank for messages of its peers.
        describe_activity: Describes ranks that a call waits for, see `Roster.describe_activity`.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.pids = [0] * size
        self.pids[rank] = os.getpid()
        self.peers: dict[int, socket.socket] = {}
        self._owner = os.getpid()
        self._busy = threading.Lock()
        self._recovery_id = 0  # messages with an older id are leftovers of a broken call
        self._sequence = -1  # number of the latest call
        self.waits = ControlWaits(rank)
        self._last_calls: dict[int, str] = {}
        self._broken: str | None = None
        self._closed = False
        self.describe_activity: Callable[
            [Collection[int], Callable[[int], str | None], Callable[[int], str | None]],
            Mapping[int, str],
        ] = lambda ranks, current_call, last_call: {}

    def add(self, rank: int, pid: int, connection: socket.socket) -> None:
        """Add the socket to a peer and take ownership of it."""
        self.peers[rank], self.pids[rank] = connection, pid

    def gather(self, op: str, value: JSON, timeout: float) -> list[Any]:
        """See `Control.gather`."""
        body = encode_value(op, value, alternative="through a Heap")
        with self._collective():
            messages = self._exchange(op, b',"value":' + body, timeout)
        values = {rank: message.body["value"] for rank, message in messages.items()}
        values[self.rank] = decode(body)  # equal on every rank
        return [values.get(rank) for rank in range(self.size)]

    def exchange_fds(self, fd: int, timeout: float) -> list[int | None]:
        """See `Control.exchange_fds`."""
        own = os.dup(fd)
        try:
            with self._collective():
                messages = self._exchange("exchange_fds", b"", timeout, fd=own)
        except BaseException:
            os.close(own)
            raise
        fds = {rank: message.fd for rank, message in messages.items()} | {self.rank: own}
        return [fds.get(rank) for rank in range(self.size)]

    def resume(self, recovery_id: int, living: set[int]) -> None:
        """Continue among `living` after the recovery `recovery_id`, which is equal on all ranks."""
        for rank in set(self.peers) - living:
            self.peers.pop(rank).close()
        self._recovery_id = recovery_id
        self._sequence = 0
        self._broken = None

    def suspend(self, reason: str) -> None:
        """Make calls raise `reason` until `resume`, also those of peers that wait for this rank."""
        self._broken = self._broken or reason
        self._notify({"recovery_id": self._recovery_id, "fail": sanitize_text(reason)})

    def interrupt(self, ranks: Collection[int], reason: str) -> None:
        """Raise `reason` on `ranks` if they are in a call, even if they wait for other ranks."""
        self._notify({"recovery_id": self._recovery_id, "fail": sanitize_text(reason)}, ranks)

    def format_rank(self, rank: int) -> str:
        """Return a rank with its process id, if known, for errors."""
        return f"rank {rank} (pid {self.pids[rank]})" if self.pids[rank] else f"rank {rank}"

    def pid(self, rank: int) -> int | None:
        """See `Control.pid`."""
        return self.pids[rank] or None

    def abort(self, reason: str) -> None:
        """See `Control.abort`. A blocked call raises at once."""
        self._broken = self._broken or reason
        if os.getpid() != self._owner:  # a forked child shares the sockets of its parent
            return
        for rank in self.peers:
            self.disconnect(rank)

    def disconnect(self, rank: int) -> None:
        """Shut down the connection to a peer whose process has ended. Any thread.

        Messages that the peer sent can still be read. Without this call the connection stays open
        if a forked child of the peer holds the socket.
        """
        connection = self.peers.get(rank)
        if connection is not None:
            with contextlib.suppress(OSError):  # either end has closed it
                connection.shutdown(socket.SHUT_RDWR)

    def fail(self, text: str) -> NoReturn:
        """Break the group: raise `text` here and send it to every peer whose buffer has room.

        Later calls raise it too, so that every error reports the first cause.
        """
        self._broken = text
        self._notify(
            {"recovery_id": self._recovery_id, "n": self._sequence, "fail": sanitize_text(text)}
        )
        raise RendezvousFailed(text)

    def raise_peer_error(self, rank: int, op: str) -> NoReturn:
        """Raise the last error that a disconnected peer reported."""
        while (message := self.receive(rank, op)) is not None:
            message.close_fd()
        self.fail(
            f"{self.format_rank(rank)} broke the protocol in {op}: it stopped reading messages"
        )

    def close(self, reason: str | None = None) -> None:
        """See `Control.close`. Peers that wait for this rank now or later raise `reason`."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError), contextlib.ExitStack() as cleanup:
            for connection in self.peers.values():
                cleanup.callback(connection.close)  # fails if other code has closed its descriptor
            if os.getpid() == self._owner:  # a forked child must not send for its parent
                self._notify({"bye": None if reason is None else sanitize_text(reason)})

    def _exchange(
        self, op: str, part: bytes, timeout: float, *, fd: int | None = None
    ) -> dict[int, Message]:
        """Send a message to every peer and receive one from each.

        Args:
            op: Name of the call.
            part: JSON to append to the fields that identify the call.
            timeout: Seconds to wait.
            fd: Descriptor to send, or None.
        """
        began = time.monotonic()
        deadline, is_waiting = began + timeout, False
        call = encode({"recovery_id": self._recovery_id, "op": op, "n": self._sequence})
        data = call[:-1] + part + b"}"
        unsent, received, wait_timer = set(self.peers), dict[int, Message](), WaitLogTimer()
        try:
            while True:
                for rank in sorted(unsent):
                    self._send(rank, op, data, fd, unsent)
                for rank in sorted(set(self.peers) - set(received)):
                    message = self.receive(rank, op)
                    if message is not None:
                        received[rank] = message
                        self._check_message(rank, message, op, fd is None)
                        self._last_calls[rank] = op
                        seconds = time.monotonic() - began if is_waiting else 0.0
                        self.waits.record(rank, self._sequence, seconds)
                is_waiting = True
                waiting = sorted((set(self.peers) - set(received)) | unsent)
                if not waiting:
                    self._raise_peer_failure(op)
                    return received
                if time.monotonic() >= deadline:
                    self.fail(self._describe_late(waiting, received, op, timeout))
                if (waited := wait_timer.due()) is not None:
                    self._log_wait(waiting, received, op, waited, timeout)
                poller = select.poll()
                for rank in waiting:
                    events = 0 if rank in received else select.POLLIN
                    events |= select.POLLOUT if rank in unsent else 0
                    poller.register(self.peers[rank], events)
                poller.poll(remaining_ms(wait_timer.next_wakeup(deadline)))
        except BaseException:
            for message in received.values():
                message.close_fd()
            raise

    def _send(self, rank: int, op: str, data: bytes, fd: int | None, unsent: set[int]) -> None:
        try:
            if send(self.peers[rank], data, fd):
                unsent.remove(rank)
        except Disconnected:
            self.raise_peer_error(rank, op)
        except OSError as error:
            self.fail(f"cannot send {self.format_rank(rank)} its part of {op}: {error}")

    def receive(self, rank: int, op: str) -> Message | None:
        """Return the peer's next message since the last recovery, or None if none has arrived.

        Raises:
            RendezvousFailed: the peer died, left or failed, or the group is broken.
        """
        if self._broken is not None:
            raise RendezvousFailed(self._broken)
        try:
            while (message := wire.receive(self.peers[rank])) is not None:
                body = message.body
                if (
                    "bye" not in body
                    and body.get("recovery_id") == self._recovery_id
                    and "fail" not in body
                ):
                    return message
                message.close_fd()
                if "bye" in body:
                    self.fail(self._describe_leave(rank, body["bye"], op))
                if body.get("recovery_id") == self._recovery_id:
                    self.fail(sanitize_text(body["fail"]))
        except Disconnected:
            self.fail(self._broken or f"{self.format_rank(rank)} died while the group was in {op}")
        except DescriptorLimit as error:
            self.fail(f"{self.format_rank(self.rank)} cannot receive its part of {op}: {error}")
        except (MalformedMessage, OSError) as error:
            self.fail(f"{self.format_rank(rank)} broke the protocol in {op}: {error}")
        return None

    def _raise_peer_failure(self, op: str) -> None:
        """Raise the error of a peer that sent its part of this call and then gave up waiting.

        A peer that fails in a later call has received all parts of this call.
        """
        for rank, connection in self.peers.items():
            with contextlib.suppress(
                OSError, MalformedMessage
            ):  # the message belongs to the next call
                body = decode(connection.recv(1 << 15, socket.MSG_PEEK | socket.MSG_DONTWAIT))
                call = {"recovery_id": self._recovery_id, "n": self._sequence}
                if isinstance(body, dict) and "fail" in body and call.items() <= body.items():
                    self.receive(rank, op)

    def current_call(self, rank: int) -> str | None:
        """See `Control.current_call`. Peeks at the call's message and leaves it in the socket."""
        connection = self.peers.get(rank)
        if connection is None:
            return None
        with contextlib.suppress(OSError, MalformedMessage):
            body = decode(connection.recv(1 << 15, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            if isinstance(body, dict) and isinstance(body.get("op"), str):
                return sanitize_text(body["op"])[:100]
        return None

    def last_call(self, rank: int) -> str | None:
        """See `Control.last_call`."""
        return self._last_calls.get(rank)

    def _log_wait(
        self,
        waiting: list[int],
        messages: dict[int, Message],
        op: str,
        waited: float,
        timeout: float,
    ) -> None:
        missing = [rank for rank in waiting if rank not in messages]
        states = self.describe_activity(missing, self.current_call, self.last_call)
        names = [
            f"{self.format_rank(rank)} {states.get(rank, '')}".strip()
            for rank in missing or waiting
        ]
        action = "enter it" if missing else "read its part of it"
        _log.warning(
            "rank %d has waited %.0f s of at most %g s in %s for ranks to %s: %s",
            *(self.rank, waited, timeout, op, action, "; ".join(names)),
        )

    def _describe_late(
        self, waiting: list[int], messages: dict[int, Message], op: str, timeout: float
    ) -> str:
        missing = [self.format_rank(rank) for rank in waiting if rank not in messages]
        if missing:
            return f"{', '.join(missing)} did not enter {op} within {timeout:g} s"
        names = ", ".join(map(self.format_rank, waiting))
        return f"{names} did not read its part of {op} within {timeout:g} s"

    def _check_message(self, rank: int, message: Message, op: str, has_value: bool) -> None:
        body, name = message.body, self.format_rank(rank)
        if body.get("op") != op or body.get("n") != self._sequence:
            theirs = f"{sanitize_text(body.get('op'))} (call {sanitize_text(body.get('n'))})"
            self.fail(
                f"rank {self.rank} is in {op} (call {self._sequence}) and {name} is in {theirs}: "
                "every rank must make the same calls in the same order"
            )
        if ("value" in body, message.fd is None) != (has_value, has_value):
            expected, other = "a value", "a descriptor"
            if not has_value:
                expected, other = other, expected
            self.fail(f"{name} broke the protocol in {op}: it sent {other}, not {expected}")

    def _describe_leave(self, rank: int, reason: Any, op: str) -> str:
        if reason is None:
            return f"{self.format_rank(rank)} closed its group while the others were in {op}"
        text = sanitize_text(reason)
        return f"{self.format_rank(rank)} left the group while the others were in {op}: {text}"

    def _notify(self, body: JSON, ranks: Collection[int] | None = None) -> None:
        for rank, connection in self.peers.items():
            if ranks is not None and rank not in ranks:
                continue
            with contextlib.suppress(OSError):
                send(connection, encode(body))

    def check_process(self) -> None:
        """Raise OutOfOrder in a forked child, which shares this rank's sockets."""
        if os.getpid() != self._owner:
            raise OutOfOrder(
                f"the group belongs to process {self._owner} and was used in its forked child "
                f"{os.getpid()}; create a group in the process that uses it"
            )

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        if self._closed:
            raise OutOfOrder("the group is closed; create a new one")
        self.check_process()
        if self._broken is not None:
            raise RendezvousFailed(self._broken)
        if not self._busy.acquire(blocking=False):
            raise OutOfOrder(
                f"two threads of rank {self.rank} use one group concurrently; call it from one "
                "thread"
            )
        try:
            self._sequence += 1
            yield
        finally:
            self._busy.release()


def remaining_ms(deadline: float) -> int:
    """Return the time until `deadline` (time.monotonic seconds) for poll(); never negative."""
    return max(0, int((deadline - time.monotonic()) * 1000) + 1)
