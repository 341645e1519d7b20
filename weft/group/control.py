# SPDX-License-Identifier: Apache-2.0
"""The control plane: a Unix socket between every two ranks of one host, kept after they met.

Every collective is one message from each rank to each other one. A rank that dies ends its sockets,
or a peer that sees its process end does so (`end`): a forked child would keep them open. So all
others know at once which rank it was, and none is more needed than another. Every wait has a
deadline; a failed call breaks the group, until a recovery resumes it among the living.

A message is a part of a call (`op`, `n` and a `value` or a descriptor), or says why the sender's
group is broken (`fail`, with the `n` of the call that failed) or why it left (`bye`: null where it
closed its group).
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
from typing import Any, NoReturn

from weft.errors import OutOfOrder, RendezvousFailed
from weft.group.reminder import Reminder
from weft.group.wire import (
    JSON,
    AtLimit,
    Gone,
    Malformed,
    Message,
    decode,
    encode,
    encode_value,
    receive,
    send,
    text_of,
)

_log = logging.getLogger(__name__)


class ControlPlane:
    """The sockets of one rank, one to each living peer; `meet` adds them.

    `pids[r]` is rank r's process id as the kernel reports it to the rank at which all met; 0 where
    it has none there.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.pids = [0] * size
        self.pids[rank] = os.getpid()
        self.peers: dict[int, socket.socket] = {}
        self._owner = os.getpid()
        self._busy = threading.Lock()
        self._era = 0  # of messages: those that a broken call left in a socket are of an older one
        self._sequence = -1  # of the last call
        self._broken: str | None = None
        self._closed = False
        # Says where ranks are that this one waits for, as far as a group knows.
        self.whereabouts: Callable[[Collection[int]], Mapping[int, str]] = lambda ranks: {}

    def add(self, rank: int, pid: int, connection: socket.socket) -> None:
        """The socket to a peer, which is this object's from now on."""
        self.peers[rank], self.pids[rank] = connection, pid

    def gather(self, op: str, value: JSON, timeout: float) -> list[Any]:
        """The `value` of every rank in rank order, None for one that is gone.

        `op` names the call; all ranks must make the same.
        """
        body = encode_value(op, value, larger="through a Heap")
        with self._collective():
            found = self._swap(op, b',"value":' + body, timeout)
        values = {rank: message.body["value"] for rank, message in found.items()}
        values[self.rank] = decode(body)  # equal on every rank
        return [values.get(rank) for rank in range(self.size)]

    def exchange_fds(self, fd: int, timeout: float) -> list[int | None]:
        """One descriptor of every rank in rank order, None for one that is gone.

        The own entry is a duplicate.
        """
        own = os.dup(fd)
        try:
            with self._collective():
                found = self._swap("exchange_fds", b"", timeout, fd=own)
        except BaseException:
            os.close(own)
            raise
        fds = {rank: message.fd for rank, message in found.items()} | {self.rank: own}
        return [fds.get(rank) for rank in range(self.size)]

    def resume(self, era: int, living: set[int]) -> None:
        """Go on among `living` after a recovery, whose number `era` is the same on every rank."""
        for rank in set(self.peers) - living:
            self.peers.pop(rank).close()
        self._era = era
        self._sequence = 0
        self._broken = None

    def leave(self, why: str) -> None:
        """Raise `why` in every call until `resume`, here and at peers that wait for this rank."""
        self._broken = self._broken or why
        self._tell({"era": self._era, "fail": text_of(why)})

    def interrupt(self, ranks: Collection[int], why: str) -> None:
        """Raise `why` on these ranks, if they wait in a call, for whichever rank it is."""
        self._tell({"era": self._era, "fail": text_of(why)}, ranks)

    def name(self, rank: int) -> str:
        """For errors: the rank, and its process, which no rank of another pid namespace knows."""
        return f"rank {rank} (pid {self.pids[rank]})" if self.pids[rank] else f"rank {rank}"

    def abort(self, why: str) -> None:
        """Break the group from another thread of this process: a blocked call raises at once."""
        self._broken = self._broken or why
        if os.getpid() != self._owner:  # its parent's sockets are the child's, too
            return
        for rank in self.peers:
            self.end(rank)

    def end(self, rank: int) -> None:
        """Hear no more from a peer whose process has ended, once what it sent has been read.

        From any thread. Its sockets stay open where a forked child has them, too.
        """
        connection = self.peers.get(rank)
        if connection is not None:
            with contextlib.suppress(OSError):  # closed here meanwhile, or there
                connection.shutdown(socket.SHUT_RDWR)

    def fail(self, text: str) -> NoReturn:
        """Break the group: send every peer the text, if its buffer has room, and raise it.

        The first text stays: a rank that comes later learns the first cause.
        """
        self._broken = text
        self._tell({"era": self._era, "n": self._sequence, "fail": text_of(text)})
        raise RendezvousFailed(text)

    def hear_out(self, rank: int, op: str) -> NoReturn:
        """Raise what a peer said last that has ended its socket."""
        while (message := self.hear(rank, op)) is not None:
            message.drop()
        self.fail(f"{self.name(rank)} broke the protocol in {op}: it reads no more")

    def close(self, why: str | None = None) -> None:
        """Close the sockets. Local: sends `why` to peers whose buffers have room, never waits.

        `why` is what made this rank leave; ranks that wait for it, or come to, raise that text.
        """
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError), contextlib.ExitStack() as last:
            for connection in self.peers.values():
                last.callback(connection.close)  # an error if somebody has closed its descriptor
            if os.getpid() == self._owner:  # a forked child must not speak for its parent
                self._tell({"bye": None if why is None else text_of(why)})

    def _swap(
        self, op: str, part: bytes, timeout: float, *, fd: int | None = None
    ) -> dict[int, Message]:
        """Send a message to every peer and receive one of each. part: what it has besides."""
        deadline = time.monotonic() + timeout
        call = encode({"era": self._era, "op": op, "n": self._sequence})
        data = call[:-1] + part + b"}"
        unsent, found, reminder = set(self.peers), dict[int, Message](), Reminder()
        try:
            while True:
                for rank in sorted(unsent):
                    self._send(rank, op, data, fd, unsent)
                for rank in sorted(set(self.peers) - set(found)):
                    message = self.hear(rank, op)
                    if message is not None:
                        found[rank] = message
                        self._check(rank, message, op, fd is None)
                waiting = sorted((set(self.peers) - set(found)) | unsent)
                if not waiting:
                    self._look_for_failure(op)
                    return found
                if time.monotonic() >= deadline:
                    self.fail(self._late(waiting, found, op, timeout))
                if (waited := reminder.due()) is not None:
                    self._log_wait(waiting, found, op, waited, timeout)
                poller = select.poll()
                for rank in waiting:
                    awaited = 0 if rank in found else select.POLLIN
                    poller.register(
                        self.peers[rank], awaited | (select.POLLOUT if rank in unsent else 0)
                    )
                poller.poll(milliseconds(reminder.earlier(deadline)))
        except BaseException:
            for message in found.values():
                message.drop()
            raise

    def _send(self, rank: int, op: str, data: bytes, fd: int | None, unsent: set[int]) -> None:
        try:
            if send(self.peers[rank], data, fd):
                unsent.remove(rank)
        except Gone:
            self.hear_out(rank, op)
        except OSError as error:
            self.fail(f"{self.name(rank)} cannot be sent its part of {op}: {error}")

    def hear(self, rank: int, op: str) -> Message | None:
        """The peer's next message of this era. Raises RendezvousFailed if there will be none."""
        if self._broken is not None:
            raise RendezvousFailed(self._broken)
        try:
            while (message := receive(self.peers[rank])) is not None:
                body = message.body
                if "bye" not in body and body.get("era") == self._era and "fail" not in body:
                    return message
                message.drop()
                if "bye" in body:
                    self.fail(self._farewell(rank, body["bye"], op))
                if body.get("era") == self._era:
                    self.fail(text_of(body["fail"]))
        except Gone:
            self.fail(self._broken or f"{self.name(rank)} died while the group was in {op}")
        except AtLimit as error:
            self.fail(f"{self.name(self.rank)} cannot take its part of {op}: {error}")
        except (Malformed, OSError) as error:
            self.fail(f"{self.name(rank)} broke the protocol in {op}: {error}")
        return None

    def _look_for_failure(self, op: str) -> None:
        """Fail as a peer did in this call, which sent its part and gave up waiting for this rank.

        One that fails in a later call has all parts of this one.
        """
        for rank, connection in self.peers.items():
            with contextlib.suppress(OSError, Malformed):  # of the next call
                body = decode(connection.recv(1 << 15, socket.MSG_PEEK | socket.MSG_DONTWAIT))
                here = {"era": self._era, "n": self._sequence}
                if isinstance(body, dict) and "fail" in body and here.items() <= body.items():
                    self.hear(rank, op)

    def called(self, rank: int) -> str | None:
        """Return the control call in which a peer waits for this rank, if it is in one.

        From any thread; its message stays in the socket.
        """
        connection = self.peers.get(rank)
        if connection is None:
            return None
        with contextlib.suppress(OSError, Malformed):
            body = decode(connection.recv(1 << 15, socket.MSG_PEEK | socket.MSG_DONTWAIT))
            if isinstance(body, dict) and isinstance(body.get("op"), str):
                return text_of(body["op"])[:100]
        return None

    def _log_wait(
        self, waiting: list[int], found: dict[int, Message], op: str, waited: float, timeout: float
    ) -> None:
        missing = [rank for rank in waiting if rank not in found]
        places = self.whereabouts(missing)
        names = [f"{self.name(rank)} {places.get(rank, '')}".strip() for rank in missing or waiting]
        doing = "enter it" if missing else "read its part of it"
        _log.warning(
            "rank %d has waited %.0f s of at most %g s in %s for ranks to %s: %s",
            *(self.rank, waited, timeout, op, doing, "; ".join(names)),
        )

    def _late(self, waiting: list[int], found: dict[int, Message], op: str, timeout: float) -> str:
        missing = [self.name(rank) for rank in waiting if rank not in found]
        if missing:
            return f"{', '.join(missing)} did not enter {op} within {timeout:g} s"
        names = ", ".join(map(self.name, waiting))
        return f"{names} did not read its part of {op} within {timeout:g} s"

    def _check(self, rank: int, message: Message, op: str, value: bool) -> None:
        body = message.body
        if body.get("op") != op or body.get("n") != self._sequence:
            theirs = f"{text_of(body.get('op'))} (call {text_of(body.get('n'))})"
            self.fail(
                f"rank {self.rank} is in {op} (call {self._sequence}) and {self.name(rank)} is in "
                f"{theirs}: every rank must make the same calls in the same order"
            )
        if ("value" in body, message.fd is None) != (value, value):
            wanted, other = ("a value", "a descriptor") if value else ("a descriptor", "a value")
            self.fail(
                f"{self.name(rank)} broke the protocol in {op}: it sent {other}, not {wanted}"
            )

    def _farewell(self, rank: int, why: Any, op: str) -> str:
        if why is None:
            return f"{self.name(rank)} closed its group while the others were in {op}"
        return f"{self.name(rank)} left the group while the others were in {op}: {text_of(why)}"

    def _tell(self, body: JSON, ranks: Collection[int] | None = None) -> None:
        for rank, connection in self.peers.items():
            if ranks is not None and rank not in ranks:
                continue
            with contextlib.suppress(OSError):
                send(connection, encode(body))

    def check_process(self) -> None:
        """Raise OutOfOrder in a forked child, which peers would take for this rank."""
        if os.getpid() != self._owner:
            raise OutOfOrder(
                f"the group belongs to process {self._owner} and was used in its forked child "
                f"{os.getpid()}; make a group in the process that uses it"
            )

    @contextlib.contextmanager
    def _collective(self) -> Iterator[None]:
        if self._closed:
            raise OutOfOrder("the group is closed; make a new one")
        self.check_process()
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


def milliseconds(deadline: float) -> int:
    """Time until `deadline` (time.monotonic seconds) for poll(), rounded up, never negative."""
    return max(0, int((deadline - time.monotonic()) * 1000) + 1)
