# SPDX-License-Identifier: Apache-2.0
"""What every operator is: a collective object in symmetric memory, and the calls of one rank on it.

One call at a time, from the process that made the object. Any thread may abort or close it while a
call waits: the call ends first, then the memory goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

import torch

from weft.arguments import seconds
from weft.errors import Aborted, GroupError, InvalidArgument, OutOfOrder, WeftError
from weft.memory import Group, Heap
from weft.memory.driver import relaxed
from weft.memory.group import reason
from weft.memory.header import (
    ABI,
    EPOCH_MASK,
    HOST_ASKS_TO_LEAVE,
    HOST_BITS,
    LAST_WORDS_BYTES,
    CallRecord,
    ErrorRecord,
    Record,
    Site,
    mirrors,
    words_of,
)
from weft.memory.room import require_room
from weft.memory.wire import JSON
from weft.runtime import library
from weft.runtime.ambient import without_autocast
from weft.runtime.check import check_group, extent
from weft.runtime.debug import DebugChecks, is_enabled
from weft.runtime.identity import FLAG_MASK, MAX_LAYERS, describe_exchange
from weft.runtime.kernels import Build, Kernels
from weft.runtime.layout import ShareConfig
from weft.runtime.report import (
    ABORTED,
    ALL_REDUCE,
    COMBINE,
    PEER_LEFT,
    PEER_TIMEOUT,
    breakage,
    refusal,
)
from weft.runtime.stream import synchronize_device, synchronize_stream
from weft.runtime.waits import WATCHER

P = ParamSpec("P")
T = TypeVar("T")

# Of every operator's heap in this process: its first address, its end, and the operator's name.
_heaps: dict[int, tuple[int, int, str]] = {}


class Config(ShareConfig, Protocol):
    """What an operator is made from: its checked arguments, and what follows from them."""

    @property
    def descriptor(self) -> int:
        """24 bits of the config's hash."""

    def manifest(self) -> Mapping[str, JSON]:
        """What the ranks compare at creation, name by name."""


class Operator(ABC):
    """An object of all ranks: checked, compiled, agreed on and allocated once, on all or on none.

    A context manager: leaving it closes it.
    """

    group: Group
    config: Config
    heap: Heap
    _build: Build
    _kernels: Kernels
    _site: Site
    _layer = 0  # number of the lease that calls; 0: the operator itself
    _layers = 0  # layers and leases that have had a number
    _seen_refusals = 0
    _failure: GroupError | None = None  # what made this rank leave, where calls raise it again
    _debug: DebugChecks | None = None  # with WEFT_DEBUG=1
    _has_raised = False  # whether a caller has seen what broke the group
    _drops_repeats = False  # does a dispatch drop ids that an earlier one of their row names?

    def _create(
        self,
        group: Group,
        what: str,
        prepare: Callable[[], tuple[Config, Kernels]],
        *,
        timeout: float,
        first_timeout: float,
        first_epoch: int = 0,
    ) -> None:
        """Everything that ranks do together to make an operator; sets its config.

        what: its name in errors, with its article: "an all-to-all".
        prepare: check the arguments and load the kernels; what it raises, every rank hears of.
        timeout, first_timeout: seconds that a wait may take, and one of the first round.

        A rank that fails is named on every rank, and then nothing stays loaded or allocated. Memory
        is that of the ranks of this host. The constructor that calls this is decorated with
        `as_creation`.
        """
        check_group(group)
        problem: Exception | None = None
        try:
            limits = seconds("timeout", timeout), seconds("first_timeout", first_timeout)
            self._debug = DebugChecks(self) if is_enabled() else None
            self.config, self._kernels = prepare()
        except Exception as error:  # whatever it is, every rank hears of it
            problem = error
        group.vote(problem, doing=f"preparing {what}", undo=lambda: self._kernels.close())
        self._first_epoch, self._limits = first_epoch & EPOCH_MASK, limits
        self._living = group.local._living
        self._mirrors = mirrors(group.local.size)
        self.group, self._what, self._owner = group, what.split(" ", 1)[1], os.getpid()
        manifest = {**self._manifest(), "WEFT_DEBUG": self._debug is not None}
        try:
            group.agree(dict(manifest), what=f"{self._what} geometry")
            if group.hosts == 1:
                self._allocate(what)
            else:
                group.together(lambda: self._allocate(what), doing=f"making {what}")
        except BaseException:
            self._kernels.close()
            raise
        WATCHER.watch(self)
        self._order = library.order_of(group.device)
        self._handle = library.register(self, manifest)

    def _allocate(self, what: str) -> None:
        """Make and initialise this host's heap. Collective over its ranks."""
        local, share_bytes, own_bytes = self.group.local, self.config.share_bytes, self._own_bytes()
        if own_bytes:
            require_room(local, share_bytes + own_bytes, what=what)
        self.heap = Heap.create(local, share_bytes)
        end = self.heap.base + local.size * self.heap.stride
        _heaps[id(self.heap)] = self.heap.base, end, self._what
        weakref.finalize(self.heap, _heaps.pop, id(self.heap), None)
        # A vote: no peer may write into this share before it is initialised.
        local.together(self._initialise, doing=f"initialising {what}")

    def _header(self) -> ctypes.Structure:
        header, local = self._mirrors.Header(), self.group.local
        header.abi, header.rank, header.ranks = ABI, local.rank, local.size
        header.share_bytes, header.generation = self.config.share_bytes, self.heap.generation
        header.first_epoch = header.epoch = self._first_epoch
        # A peer may wait for another host first: whose fault it is, is known there.
        waits = 1 if self.group.hosts == 1 else 2
        header.deadline_ns, header.first_deadline_ns = (int(waits * s * 1e9) for s in self._limits)
        living, before = header.living, self._header_of(local.rank)  # zeros at creation
        living[:] = words_of(self._living, len(living))
        header.refusals = before.refusals
        header.reported[:] = [
            was & ~lives for was, lives in zip(before.reported, living, strict=True)
        ]
        return header

    def _initialise(self) -> None:
        """Open the mailbox, then write what this rank's share holds before the first call."""
        self._mailbox = self._mirrors.Mailbox.from_address(self.heap.mailbox.host)
        self._starts_anew: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._busy = threading.Lock()  # taken by a call, and by close for good
        self._caller = 0  # the thread that has taken it
        self._access = threading.Lock()  # of other threads to the mailbox and the heap
        self._closing = False  # no new call may begin
        self._freed = False
        self._told = False  # the peers know that this rank leaves
        self._left = ""  # why this rank takes no further part
        self._site = Site(
            base=self.heap.base,
            stride=self.heap.stride,
            mailbox=self.heap.mailbox.device,
            rank=self.group.local.rank,
            descriptor=self.config.descriptor,
        )
        self.group.local.attach(self)
        self._make_views()
        self._write_share()

    def _write_share(self) -> None:
        """Write what this rank's share holds before the first call, at creation and recovery."""
        header = self._header()
        self._write_contents(header)
        raw = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self.heap.tensor((len(raw),), torch.uint8).copy_(raw)
        synchronize_stream(self.group.device)

    def _manifest(self) -> Mapping[str, JSON]:
        """What the ranks compare at creation, and what tells compiled graphs apart."""
        return self.config.manifest()

    def _own_bytes(self) -> int:
        """Bytes that `_make_views` allocates beside the heap."""
        return 0

    def _poison(self, doing: str, *, before: bool) -> None:  # noqa: B027  (most have nothing)
        """Overwrite what nobody may read before, or after, a call; see runtime/debug.py."""

    def _raise_recorded(self, *, refusals: bool) -> None:
        """Raise what broke the group and, if asked for, refused input. Within a call."""
        self._raise_if_broken()
        if refusals:
            self._raise_refusals()

    # Words for a CallRecord of this operator.
    _describe_call: Callable[[CallRecord], str] = staticmethod(describe_exchange)

    @abstractmethod
    def _make_views(self) -> None:
        """Make views of this rank's share, and its memory beside the heap."""

    @abstractmethod
    def _write_contents(self, header: ctypes.Structure) -> None:
        """Write what the share holds before the first call, whatever it holds now.

        May change `header`, which is written after it.
        """

    @abstractmethod
    def _start_anew(self) -> None:
        """Forget this rank's calls that had not ended when the group broke."""

    @abstractmethod
    def _drop_views(self) -> None:
        """Let go of every view of the heap that `_make_views` made."""

    def check(self) -> None:
        """Raise what the device has recorded since the last check.

        Call it once a step, after the engine's own synchronisation. It reads host memory only, so
        it costs nothing and does not see calls that are still running.

        Raises:
            UsageError: the device refused part of the input, such as an expert id out of range. A
                refusal is raised once, and the group continues.
            GroupError: the group is broken. Every later call raises the same error.
            OutOfOrder: the object is closed.
        """
        with self._access:
            self._check_open()
            self._raise_if_broken()
            self._raise_refusals()

    def _raise_refusals(self) -> None:
        """Raise what the device has refused since the last time. Under `_access`."""
        serial = self._mailbox.refusals
        if serial == self._seen_refusals:
            return
        count = (serial - self._seen_refusals) & 0xFFFFFFFF
        self._seen_refusals = serial
        record = self._mailbox.refused[serial % len(self._mailbox.refused)]
        self._refuse(record, count)

    def _refuse(self, record: ErrorRecord, count: int) -> None:
        """Raise what the device has refused: `count` reports, the last of which is `record`."""
        raise refusal(record, count, drops_repeats=self._drops_repeats)

    @property
    def broken(self) -> bool:
        """Whether the group is broken, so that `check` raises `GroupError`. One read of host
        memory.
        """
        with self._access:
            self._check_open()
            word = self._mailbox.host_word[0] & HOST_ASKS_TO_LEAVE
            return bool(self._mailbox.broken_code or word)

    def abort(self) -> None:
        """Make the kernels of all ranks leave their waits. Returns without waiting for a peer.

        Any thread may call it. Every wait that is running, and every later one that would last,
        ends with `Aborted` naming this rank. A call whose flags have all arrived may still finish,
        but on this rank every later call raises. Close the group after it.

        Raises:
            OutOfOrder: the object is closed.
        """
        with self._access:
            self._check_open()
            self._left = self._left or "called abort()"
            self._notify_once(ABORTED, "")
            self._mailbox.host_word[0] |= HOST_ASKS_TO_LEAVE

    def history(self, rank: int | None = None) -> list[Record]:
        """Return the last 128 finished operations of a rank, oldest first.

        Args:
            rank: Rank to read, also one that has died. Default: this rank.

        Returns:
            Records with the epoch, the phase and times in nanoseconds of the device's clock.

        Raises:
            OutOfOrder: the object is closed.
        """
        with self._access:
            self._check_open()
            header = self._header_of(rank)
        return sorted((r for r in header.ring if r.phase), key=lambda r: (r.epoch, r.phase))

    def close(self) -> None:
        """Free the memory. Waits for this rank's own work, never for a peer. Idempotent.

        Any thread may call it. A call that waits in another thread ends first, with `Aborted`.
        Peers that are in a call which this rank has not finished raise `PeerLeft`.

        Raises:
            WeftError: what `check` would have raised and nobody has seen; the memory is free then.
        """
        pending = self._release()
        if pending is not None:
            raise pending

    def _release(self) -> WeftError | None:
        """Free the memory; return what `check` would have raised and nobody has seen."""
        for handle in {self._handle, vars(self)["_handle"]}:
            library.forget(handle)
        if not self._begin_close():
            return None
        pending = self._pending()
        with relaxed(self.group.device):
            try:
                self._kernels.close()
            finally:
                self._drop_views()
                self._free()
        return pending

    def _pending(self) -> WeftError | None:
        """What `check` would raise and nobody has seen, of a rank that has not left by itself."""
        if os.getpid() != self._owner or self._left or self._has_raised:
            return None
        try:
            with self._access:
                self._raise_if_broken()
                self._raise_refusals()
        except WeftError as error:
            return error
        return None

    @property
    def _operator(self) -> Self:
        return self

    def _next_layer(self) -> int:
        """Return the number of another layer or lease on this operator, from 1 on. Collective."""
        self._layers = self.group.next_number("layer number", self._layers, MAX_LAYERS - 1)
        return self._layers

    def _leased(self) -> Self:
        """Return this operator as one of its leases sees it. Collective.

        The view shares all state with the operator. Its calls carry its own number, so that ranks
        whose calls belong to different leases notice that.
        """
        kind, number = type(self), self._next_layer()
        view: Self = object.__new__(_view_type(kind))
        view.__dict__ = self.__dict__
        view._layer, view._shared_operator = number, self  # type: ignore[attr-defined]
        view._handle = library.register(view, self._manifest())
        return view

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        self._tell_left(reason(error))
        self._release()

    # What its group calls.

    def _peer_ended(self, rank: int) -> None:
        """The process of a rank has ended: a wait for it need not last until the deadline."""
        with self._access:
            if not self._freed and self._living >> rank & 1:
                self._mailbox.host_word[rank // HOST_BITS] |= 1 << rank % HOST_BITS

    def _tell_left(self, why: str, *, settled: bool = False) -> None:
        """Notify the peers that this rank begins no more calls. Any thread; what runs goes on.

        settled: only when this GPU has done what is enqueued; peers count on that.
        """
        if settled and os.getpid() == self._owner:
            synchronize_device(self.group.device)
        with self._access:
            if not self._freed:
                self._notify_once(PEER_LEFT, why)

    def _suspects(self) -> set[int]:
        """The rank that this one waited for in vain, if that broke the group."""
        with self._access:
            if self._freed or self._mailbox.broken_code != PEER_TIMEOUT:
                return set()
            return {self._mailbox.broken.peer}

    def _quiesce(self) -> None:
        """End this rank's calls, and wait until none runs; peers in a call leave it, too.

        Until `_recover` every call raises.
        """
        self._leave("left its calls to recover its group")
        while not self._busy.acquire(timeout=0.05):
            if self._closing:
                return
        try:
            synchronize_device(self.group.device)
        finally:
            self._busy.release()

    def _finished(self) -> int:
        """Rounds, or all-reduces, that this rank has finished since its creation or recovery."""
        with self._access:
            if self._freed:
                return 0
            header = self._header_of()
        ends = (COMBINE, ALL_REDUCE)
        done = [r.epoch - header.first_epoch & EPOCH_MASK for r in header.ring if r.phase in ends]
        return max(done, default=0)

    def _own_header(self) -> ctypes.Structure | None:
        """Return a copy of this rank's header, None after close."""
        with self._access:
            return None if self._freed or self._closing else self._header_of()

    def _waiting_ns(self, ranks: Collection[int]) -> dict[int, int]:
        """Return when ranks last looked around in a wait of a call; it changes while they wait."""
        with self._access:
            if self._freed or self._closing:
                return {}
            return {rank: self._header_of(rank).waiting_ns for rank in ranks if self._lives(rank)}

    def _lives(self, rank: int) -> bool:
        return bool(self._living >> rank & 1)

    def _recover(self, living: int) -> None:
        """Start anew with the ranks of `living`, bit r for rank r.

        The share becomes what it was at creation, in the same memory, so captured graphs hold.
        Between two barriers of the living, after `_quiesce` on all of them: nobody stores here.
        Raises what one of `_on_recovery` raised that cannot go on, when all others have.
        """
        if self._closing:
            return
        with relaxed(self.group.device):
            with self._access:
                self._living, self._told = living, False
                self._mailbox.broken_code, self._has_raised = 0, False
                words = self._mailbox.host_word
                words[:] = [0] * len(words)
                try:
                    self._start_anew()
                    self._write_share()
                except BaseException as error:
                    self._left = f"could not recover: {reason(error)}"
                    words[0] = HOST_ASKS_TO_LEAVE
                    raise
                self._left = ""
            failures = []
            for method in self._starts_anew:
                start_anew = method()
                try:
                    if start_anew is not None:
                        start_anew()
                except Exception as error:
                    failures.append(error)
            synchronize_stream(self.group.device)
            WATCHER.watch(self)
            if failures:
                raise failures[0]

    # What calls and other rooms use.

    def _on_recovery(self, start_anew: Callable[[], None]) -> None:
        """Call a bound method, as long as its object lives, whenever this operator has recovered.

        For what keeps state of this operator's calls, or chooses ranks for its tokens.
        """
        self._starts_anew.append(weakref.WeakMethod(start_anew))

    def _leave(self, why: str) -> None:
        """End this rank's part: its own waits and later calls raise, the peers get the reason."""
        with self._access:
            if not self._freed:
                self._left = self._left or why
                self._notify_once(PEER_LEFT, why)
                self._mailbox.host_word[0] |= HOST_ASKS_TO_LEAVE

    def _begin(self, doing: str) -> None:
        """A call begins; `_end` must follow. Raises OutOfOrder, and what broke the group."""
        if os.getpid() != self._owner:
            raise OutOfOrder(
                f"{doing} in process {os.getpid()}, a forked child: this {self._what} belongs to "
                f"process {self._owner}, whose peers would take the child for it; make a group in "
                "the process that uses it"
            )
        if not self._busy.acquire(blocking=False):
            self._check_open()
            raise OutOfOrder(
                f"{doing} while another thread is in a call of this {self._what}: its calls must "
                "come one after the other, in the same order on every rank; make them from one "
                "thread, or hold a lock around each round"
            )
        self._caller = threading.get_ident()
        try:
            self._check_open()
            self._raise_if_broken()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        """The call that began is over."""
        self._caller = 0
        self._busy.release()

    def _check_open(self) -> None:
        """Raise OutOfOrder after close; Aborted where this rank had aborted before."""
        if not self._closing:
            return
        if self._left:
            raise Aborted(
                f"this rank, {self.group.rank}, {self._left}, and closed this {self._what}; make a "
                "new one"
            )
        raise OutOfOrder(f"this {self._what} was closed; make a new one")

    def _raise_if_broken(self) -> None:
        """Raise what ended the group, if anything did. Within a call, or under `_access`."""
        if self._mailbox.broken_code or self._mailbox.host_word[0] & HOST_ASKS_TO_LEAVE:
            self._has_raised = True
        if self._mailbox.broken_code:
            raise self._breakage(ErrorRecord.from_buffer_copy(self._mailbox.broken))
        if self._mailbox.host_word[0] & HOST_ASKS_TO_LEAVE:
            if self._failure is not None:
                raise self._failure
            raise Aborted(f"this rank, {self.group.rank}, {self._left}; make a new group")

    def _breakage(self, record: ErrorRecord) -> GroupError:
        """The error that a record means; kernels number the ranks of a host."""
        ranks, local = self.group.host_ranks[self.group.host], self.group.local
        record.rank, record.peer = ranks[record.rank], ranks[record.peer]
        if record.reported_by:
            record.reported_by = 1 + ranks[record.reported_by - 1]
        return breakage(
            record,
            lambda rank: local.pid(ranks.index(rank)),
            lambda rank: self._last_words(ranks.index(rank)),
            lambda rank, value: self._call_text(ranks.index(rank), value),
            first_epoch=self._first_epoch,
            machines=self.group._job_machines,
        )

    def _fail(self, error: GroupError) -> None:
        """End this rank's part for an error that every later call raises."""
        self._failure = error
        self._leave(reason(error))

    def _check_running(self) -> None:
        """Raise OutOfOrder after close, and what broke the group."""
        with self._access:
            self._check_open()
            self._raise_if_broken()

    def _check_split_phase(self, name: str) -> None:
        """Raise InvalidArgument where half of a dispatch or a combine cannot be called.

        A half returns while peers still write what it returns: no compiled graph can express that.
        """
        if torch.compiler.is_dynamo_compiling():
            raise InvalidArgument(
                f"{name} under torch.compile, which may move what is between the halves: call "
                "dispatch and combine there, or the halves outside of the compiled function"
            )
        self._check_open()
        if not self._build.split_phase:
            raise InvalidArgument(
                f"{name}: this {self._what} was built without split_phase; pass split_phase=True"
            )

    def _check_outside(self, name: str, tensor: torch.Tensor) -> None:
        """Raise InvalidArgument for a result in an operator's heap, where peers read and write."""
        start, end = extent(tensor)
        for base, stop, what in tuple(_heaps.values()):
            if start < stop and base < end:
                raise InvalidArgument(
                    f"{name} is in the symmetric memory of an {what}, {start - base} bytes from "
                    "its start, which peers may still read: pass a tensor of your own, or leave "
                    f"{name} out"
                )

    def _begin_close(self) -> bool:
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
                self._mailbox.host_word[0] |= HOST_ASKS_TO_LEAVE
            self._busy.acquire()
        return True

    def _free(self) -> None:
        """Give the memory back, except for what a caller's views still show; local."""
        synchronize_device(self.group.device)  # unlocked: what runs may have to see a peer's end
        with self._access:
            self._freed = True
            del self._mailbox
            _heaps.pop(id(self.heap), None)
            self.heap.close()

    def _notify_once(self, code: int, why: str) -> None:
        """Write why this rank leaves, then a notice to each peer (make_notice in header.cuh).

        Not where they know: from this rank's host, or from its kernels, which gave up.
        """
        if self._told or self._mailbox.broken_code or os.getpid() != self._owner:
            return
        self._told = True
        rank, heap = self._site.rank, self.heap
        words = why.encode(errors="replace")[: LAST_WORDS_BYTES - 1] + b"\0"
        heap.write(rank, self._mirrors.Header.last_words.offset, words)
        notice = (code << 56 | rank << 40).to_bytes(8, "little")
        for peer in range(self.group.local.size):
            if peer != rank and self._living >> peer & 1:
                heap.write(peer, self._mirrors.Header.notices.offset + 8 * rank, notice)

    def _header_of(self, rank: int | None = None) -> ctypes.Structure:
        return self._mirrors.Header.from_buffer_copy(self.heap.header(rank))

    def _call_text(self, rank: int, value: int | None) -> str:
        """A rank's latest call in words; "" where its hash is not `value`, as flags have it."""
        record = self._header_of(rank).call
        if not record.hash or (value is not None and (record.hash ^ value) & FLAG_MASK):
            return ""
        return self._describe_call(record)

    def _last_words(self, rank: int) -> str:
        header = self._header_of(rank)
        return bytes(header.last_words).split(b"\0")[0].decode(errors="replace")


@functools.cache
def _view_type(kind: type[Operator]) -> type[Any]:
    """The class of an operator's leases: `kind` with a number and a handle of its own."""
    slots = {"__slots__": ("_handle", "_layer", "_shared_operator"), "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), slots)


def call_all(*calls: Callable[[], object]) -> None:
    """Make all calls in order, also after one has raised; raise the last error."""
    with contextlib.ExitStack() as stack:
        for call in reversed(calls):
            stack.callback(call)


class OfOperator(Protocol):
    """An operator, or what makes calls of its own on an operator's memory."""

    @property
    def _operator(self) -> Operator: ...


Caller = TypeVar("Caller", bound=OfOperator)


def one_call(
    doing: str,
) -> Callable[[Callable[Concatenate[Caller, P], T]], Callable[Concatenate[Caller, P], T]]:
    """A method that is one call of an operator: it begins, ends, and excludes all others."""

    def decorate(
        method: Callable[Concatenate[Caller, P], T],
    ) -> Callable[Concatenate[Caller, P], T]:
        @functools.wraps(method)
        def call(self: Caller, /, *args: P.args, **kwargs: P.kwargs) -> T:
            operator = self._operator
            operator._begin(doing)
            debug = operator._debug
            try:
                if debug is None:
                    return method(self, *args, **kwargs)
                debug.before(doing)
                result = method(self, *args, **kwargs)
                debug.after(doing)
                return result
            finally:
                operator._end()

        return without_autocast(call)

    return decorate
