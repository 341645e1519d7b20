"""A heap whose kernels report through its mailbox, and the calls of one rank on it.

One call at a time, from the process that made the heap. Any thread may abort or close it while a
call waits: the call ends first, then the memory goes.
"""

from __future__ import annotations

import functools
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, Self, TypeVar

from weft.errors import Aborted, OutOfOrder
from weft.memory import Group, Heap
from weft.memory.group import reason
from weft.memory.header import (
    ABI,
    EPOCH_MASK,
    HOST_ASKS_TO_LEAVE,
    LAST_WORDS_BYTES,
    Header,
    Mailbox,
    Record,
)
from weft.runtime.args import Site
from weft.runtime.report import ABORTED, PEER_LEFT, breakage, refusal
from weft.runtime.stream import settle

P = ParamSpec("P")
T = TypeVar("T")


class Watched:
    """One heap and its mailbox; `site` says where the shares lie, as kernels take it."""

    heap: Heap
    site: Site
    _seen_refusals = 0
    _drops_repeats = False  # does a dispatch drop ids that an earlier one of their row names?

    def _watch(self, descriptor: int, what: str) -> None:
        """Open the mailbox and the site of `self.heap`; `what` names its owner in errors."""
        group = self.heap.group
        self._what, self._owner = what, os.getpid()
        self._mailbox = Mailbox.from_address(self.heap.mailbox.host)
        self._busy = threading.Lock()  # taken by a call, and by close for good
        self._caller = 0  # the thread that has taken it
        self._access = threading.Lock()  # of other threads to the mailbox and the heap
        self._closing = False  # no new call may begin
        self._freed = False
        self._told = False  # the peers know that this rank leaves
        self._left = ""  # why this rank takes no further part
        self.site = Site(
            base=self.heap.base,
            stride=self.heap.stride,
            mailbox=self.heap.mailbox.device,
            rank=group.rank,
            descriptor=descriptor,
        )
        group.attach(self)

    def begin(self, doing: str) -> None:
        """A call begins; `end` must follow. Raises OutOfOrder, and what broke the group."""
        if os.getpid() != self._owner:
            raise OutOfOrder(
                f"{doing} in process {os.getpid()}, a forked child: this {self._what} belongs to "
                f"process {self._owner}, whose peers would take the child for it; make a group in "
                "the process that uses it"
            )
        if not self._busy.acquire(blocking=False):
            self.check_open()
            raise OutOfOrder(
                f"{doing} while another thread is in a call of this {self._what}: its calls must "
                "come one after the other, in the same order on every rank; make them from one "
                "thread, or hold a lock around each round"
            )
        self._caller = threading.get_ident()
        try:
            self.raise_if_broken()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """The call that began is over."""
        self._caller = 0
        self._busy.release()

    def check_open(self) -> None:
        """Raise OutOfOrder after close; Aborted where this rank had aborted before."""
        if not self._closing:
            return
        if self._left:
            raise Aborted(
                f"this rank, {self.site.rank}, {self._left}, and closed this {self._what}; make a "
                "new one"
            )
        raise OutOfOrder(f"this {self._what} was closed; make a new one")

    def raise_if_broken(self) -> None:
        """Raise what ended the group, if anything did. Within a call, or under `_access`."""
        if self._mailbox.broken_code:
            raise breakage(self._mailbox.broken, self.heap.group.pid, self._last_words)
        if self._mailbox.host_word & HOST_ASKS_TO_LEAVE:
            raise Aborted(f"this rank, {self.site.rank}, {self._left}; make a new group")

    def check_running(self) -> None:
        """Raise OutOfOrder after close, and what broke the group."""
        with self._access:
            self.check_open()
            self.raise_if_broken()

    @property
    def broken(self) -> bool:
        """Would a call raise what broke the group?"""
        with self._access:
            self.check_open()
            word = self._mailbox.host_word & HOST_ASKS_TO_LEAVE
            return bool(self._mailbox.broken_code or word)

    def check(self) -> None:
        """Raise what broke the group, or else the latest refused input since the last check."""
        with self._access:
            self.check_open()
            self.raise_if_broken()
            serial = self._mailbox.refusals
            if serial == self._seen_refusals:
                return
            count = (serial - self._seen_refusals) & 0xFFFFFFFF
            self._seen_refusals = serial
            record = self._mailbox.refused[serial % len(self._mailbox.refused)]
            raise refusal(record, count, drops_repeats=self._drops_repeats)

    def abort(self) -> None:
        """Ask the kernels of all ranks to leave their waits. Any thread may call it."""
        with self._access:
            self.check_open()
            self._left = self._left or "called abort()"
            self._notify_once(ABORTED, "")
            self._mailbox.host_word |= HOST_ASKS_TO_LEAVE

    def leave(self, why: str) -> None:
        """End this rank's part: its own waits and later calls raise, the peers get the reason."""
        with self._access:
            if not self._freed:
                self._left = self._left or why
                self._notify_once(PEER_LEFT, why)
                self._mailbox.host_word |= HOST_ASKS_TO_LEAVE

    def _tell_left(self, why: str, *, settled: bool = False) -> None:
        """Notify the peers that this rank begins no more calls. Any thread; what runs goes on.

        settled: only when this GPU has done what is enqueued; peers count on that.
        """
        if settled and os.getpid() == self._owner:
            settle(self.heap.group.device)
        with self._access:
            if not self._freed:
                self._notify_once(PEER_LEFT, why)

    def _peer_ended(self, rank: int) -> None:
        """The process of a rank has ended: who waits for it need not wait for the deadline."""
        with self._access:
            if not self._freed:
                self._mailbox.host_word |= 1 << rank

    def begin_close(self) -> bool:
        """No call may begin from now on, and none is under way on return; False the second time.

        Notifies the peers, and asks a call that waits in another thread to leave.
        """
        with self._access:
            if self._closing:
                return False
            self._closing = True
        if os.getpid() != self._owner:
            return True
        self._tell_left(f"closed its {self._what}", settled=True)
        if self._caller == threading.get_ident():
            return True  # by a signal handler, or a finalizer, of the calling thread itself
        if not self._busy.acquire(blocking=False):
            with self._access:
                self._left = self._left or f"closed this {self._what} in another thread"
                self._mailbox.host_word |= HOST_ASKS_TO_LEAVE
            self._busy.acquire()
        return True

    def free(self) -> None:
        """Give the memory back, but for what a caller's views still show; local."""
        settle(self.heap.group.device)  # unlocked: what runs may have to see a peer's end
        with self._access:
            self._freed = True
            del self._mailbox
            self.heap.close()

    def history(self, rank: int | None) -> list[Record]:
        """Finished operations of a rank, oldest first."""
        with self._access:
            self.check_open()
            header = Header.from_buffer_copy(self.heap.header(rank))
        return sorted((r for r in header.ring if r.phase), key=lambda r: (r.epoch, r.phase))

    def _notify_once(self, code: int, why: str) -> None:
        """Write why this rank leaves, then a notice to each peer (make_notice in header.cuh).

        Not where they know: from this rank's host, or from its kernels, which gave up.
        """
        if self._told or self._mailbox.broken_code or os.getpid() != self._owner:
            return
        self._told = True
        rank, heap = self.site.rank, self.heap
        words = why.encode(errors="replace")[: LAST_WORDS_BYTES - 1] + b"\0"
        heap.write(rank, Header.last_words.offset, words)
        notice = (code << 56 | rank << 40).to_bytes(8, "little")
        for peer in range(heap.group.size):
            if peer != rank:
                heap.write(peer, Header.notices.offset + 8 * rank, notice)

    def _last_words(self, rank: int) -> str:
        header = Header.from_buffer_copy(self.heap.header(rank))
        return bytes(header.last_words).split(b"\0")[0].decode(errors="replace")


class HasWatched(Protocol):
    """What makes calls on a watched heap."""

    @property
    def _watched(self) -> Watched: ...


Caller = TypeVar("Caller", bound=HasWatched)


def one_call(
    doing: str,
) -> Callable[[Callable[Concatenate[Caller, P], T]], Callable[Concatenate[Caller, P], T]]:
    """A method that is one call of an operator: it begins, ends, and excludes all others."""

    def decorate(
        method: Callable[Concatenate[Caller, P], T],
    ) -> Callable[Concatenate[Caller, P], T]:
        @functools.wraps(method)
        def call(self: Caller, /, *args: P.args, **kwargs: P.kwargs) -> T:
            watched = self._watched
            watched.begin(doing)
            try:
                return method(self, *args, **kwargs)
            finally:
                watched.end()

        return call

    return decorate


def new_header(
    group: Group, share_bytes: int, *, seconds: tuple[float, float], first_epoch: int
) -> Header:
    """The header that a share begins with, but for the heap's generation.

    seconds: what a wait may take, and what one of the first round may.
    """
    header = Header()
    header.abi, header.rank, header.ranks = ABI, group.rank, group.size
    header.share_bytes = share_bytes
    header.first_epoch = header.epoch = first_epoch & EPOCH_MASK
    header.deadline_ns, header.first_deadline_ns = (int(s * 1e9) for s in seconds)
    return header


class WatchedOperator(ABC):
    """Calls of one rank on symmetric memory. A context manager: leaving it closes it."""

    @property
    @abstractmethod
    def _watched(self) -> Watched:
        """The heap, and the mailbox that its kernels report through."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Waits for this rank's own work, never for a peer. Idempotent.

        Any thread may call it. A call that waits in another one ends first, with Aborted. Peers
        that are in a call which this rank has not finished raise PeerLeft.
        """

    def check(self) -> None:
        """Raise what the device has recorded: a broken group, or input that was refused.

        Reads host memory only, so it costs nothing and sees the past: synchronise first to be sure
        of the last call. A refusal is raised once; a broken group stays broken.
        """
        self._watched.check()

    @property
    def broken(self) -> bool:
        """Would `check` raise that the group is broken? One read of host memory."""
        return self._watched.broken

    def abort(self) -> None:
        """Ask the kernels of all ranks to leave their waits. Waits for no peer.

        May be called from any thread. Every wait that is under way, and every later one that
        would last, ends with Aborted naming this rank; a call whose flags have all arrived may
        still finish, but on this rank every later call raises. Close the group after it.
        """
        self._watched.abort()

    def history(self, rank: int | None = None) -> list[Record]:
        """The last 128 calls of a rank (default: this one), oldest first; also of a dead one."""
        return self._watched.history(rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._watched._tell_left(reason(error))
        self.close()

    def _check_open(self) -> None:
        self._watched.check_open()

    def _tell_left(self, why: str) -> None:
        """Notify the peers that this rank begins no more calls."""
        self._watched._tell_left(why)

    def _leave(self, why: str) -> None:
        """End this rank's part."""
        self._watched.leave(why)

    @property
    def heap(self) -> Heap:
        """The symmetric memory."""
        return self._watched.heap

    @property
    def _busy(self) -> threading.Lock:
        return self._watched._busy

    def _check_running(self) -> None:
        self._watched.check_running()

    def _begin(self, doing: str) -> None:
        self._watched.begin(doing)

    def _end(self) -> None:
        self._watched.end()
