# SPDX-License-Identifier: Apache-2.0
"""Base class of operators, which are collective objects in symmetric memory.

Calls must be serial and come from the process that created the operator. Any thread may abort or
close it while a call waits: the call ends first, then the memory is freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

import torch

from weft.cuda.driver import relaxed_capture
from weft.errors import (
    Aborted,
    GeometryMismatch,
    GroupError,
    InvalidArgument,
    OutOfOrder,
    PeerLeft,
    WeftError,
)
from weft.group import Group
from weft.group.group import format_reason
from weft.group.membership import Progress
from weft.group.waits import Waits
from weft.group.wire import JSON
from weft.heap import Heap
from weft.heap.header import (
    ABI,
    EPOCH_MASK,
    EXIT_REASON_BYTES,
    HOST_BITS,
    HOST_REQUESTS_LEAVE,
    PHASES,
    CallRecord,
    ErrorRecord,
    Record,
    Site,
    header_structs,
    rank_set_words,
)
from weft.heap.host_memory import check_host_memory
from weft.jit.source import header_digest
from weft.keywords import internal
from weft.runtime import library
from weft.runtime.ambient import disable_autocast
from weft.runtime.check import check_group, get_memory_range
from weft.runtime.debug import DebugChecks, is_enabled
from weft.runtime.identity import FLAG_MASK, MAX_LAYERS, describe_dispatch
from weft.runtime.kernels import Build, Kernels
from weft.runtime.layout import ShareConfig
from weft.runtime.options import RunOptions
from weft.runtime.read_waits import count_rounds, read_waits
from weft.runtime.report import (
    ABORTED,
    ALL_REDUCE,
    COMBINE,
    GEOMETRY_MISMATCH,
    GONE_UNMASKED,
    PEER_LEFT,
    PEER_TIMEOUT,
    build_group_error,
    build_input_error,
    describe_order_mismatch,
)
from weft.runtime.stream import is_capturing, synchronize_device, synchronize_stream
from weft.runtime.waits import WAIT_WATCHER

P = ParamSpec("P")
T = TypeVar("T")

# Start address, end address and operator name of every operator's heap in this process.
_heaps: dict[int, tuple[int, int, str]] = {}


class Config(ShareConfig, Protocol):
    """Checked arguments of an operator, and sizes derived from them."""

    @property
    def descriptor(self) -> int:
        """24 bits of the config's hash."""

    def manifest(self) -> Mapping[str, JSON]:
        """Return the arguments that the ranks compare at creation, by name."""


class Companion(Protocol):
    """An object that fails, reports errors and closes together with an operator."""

    def end(self, error: GroupError) -> None:
        """Make every later use raise `error`. Any thread may call it."""

    def raise_recorded(self) -> None:
        """Raise the error that ended the object, or newly recorded errors about the input."""

    def close(self) -> None:
        """Free the memory."""


class Operator(ABC):
    """A collective object, which is created either on all ranks or on none.

    As a context manager, it is closed on exit.
    """

    group: Group
    config: Config
    heap: Heap
    build: Build
    _kernels: Kernels
    site: Site
    _layer = 0  # number of the calling lease; 0: the operator itself
    _layers = 0  # number of layers and leases numbered so far
    _num_raised_input_errors = 0
    _failure: GroupError | None = None  # error that later calls raise again
    _other_order = ""  # text of `_order_mismatch`, which every later call raises
    debug_checks: DebugChecks | None = None  # set with WEFT_DEBUG=1
    _asleep = False  # whether the heap has no memory, see `Group.sleep`
    _saved_header: ctypes.Structure | None = None  # this rank's header before it fell asleep
    _rounds_before_restart: Mapping[str, int] = {}  # finished ones, by phase
    _has_raised = False  # whether a caller has received the error that broke the group
    _drops_repeats = False  # whether dispatch drops repeated ids of a row
    _phase_names: Sequence[str] = ("dispatch", "combine")  # of Header.waits
    _begins_early = False  # whether a call may have begun that neither waits nor has finished
    _companions: Sequence[Companion] = ()
    _ignored_codes: Collection[int] = ()  # codes that a companion reports instead

    def _create(
        self,
        group: Group,
        label: str,
        prepare: Callable[[], tuple[Config, Kernels]],
        options: RunOptions,
        *,
        first_epoch: int = 0,
    ) -> None:
        """Create the operator; the collective part of every constructor.

        If a rank fails, every rank raises an error that names it, and nothing stays loaded or
        allocated. The heap spans the ranks of this host. The calling constructor is decorated with
        `records_creation`.

        Args:
            group: Ranks that create the operator.
            label: Name in errors with the article: "an all-to-all".
            prepare: Checks the arguments and loads the kernels; its errors reach every rank.
            options: Options, which are checked here.
            first_epoch: Epoch before the first round.
        """
        check_group(group)
        error: Exception | None = None
        try:
            options.check()
            self.debug_checks = DebugChecks(self) if is_enabled() else None
            self.config, self._kernels = prepare()
        except Exception as caught:  # the vote reports it on every rank
            error = caught
        group.vote(error, action=f"preparing {label}", undo=lambda: self._kernels.close())
        self.first_epoch = first_epoch & EPOCH_MASK
        self.timeouts = float(options.timeout), float(options.first_timeout)
        self.living_mask = group.local.living_mask
        self._mirrors = header_structs(group.local.size)
        self.group, self.kind, self._owner = group, label.split(" ", 1)[1], os.getpid()
        manifest = {**self._manifest(), "WEFT_DEBUG": self.debug_checks is not None}
        try:
            code = header_digest()  # a replacement may start after an update of the package
            group.record(
                lambda messages: messages.check_equal(
                    code, "weft's code", fix="install one version for all ranks, and restart them"
                )
            )
            group.agree(dict(manifest), label=f"{self.kind} geometry")
            if group.hosts == 1:
                self._allocate(label)
            else:
                group.run_collective(lambda: self._allocate(label), action=f"creating {label}")
        except BaseException:
            self._kernels.close()
            raise
        WAIT_WATCHER.watch(self)
        self.order_tensor = library.get_order_tensor(group.device)
        self.library_handle = library.register(self, manifest)

    def _allocate(self, label: str) -> None:
        """Allocate and initialise this host's heap. Collective over its ranks."""
        local, share_bytes, own_bytes = (
            self.group.local,
            self.config.share_bytes,
            self._count_local_bytes(),
        )
        if own_bytes:
            check_host_memory(local, share_bytes + own_bytes, label=label)
        self.heap = Heap.create(local, share_bytes)
        end = self.heap.base + local.size * self.heap.stride
        _heaps[id(self.heap)] = self.heap.base, end, self.kind
        weakref.finalize(self.heap, _heaps.pop, id(self.heap), None)
        # The vote is a barrier: no peer may write into this share before it is initialised.
        local.run_collective(self._initialise, action=f"initialising {label}")

    def _build_header(self) -> ctypes.Structure:
        header, local = self._mirrors.Header(), self.group.local
        header.abi, header.rank, header.ranks = ABI, local.rank, local.size
        header.share_bytes, header.generation = self.config.share_bytes, self.heap.generation
        header.first_epoch = header.epoch = self.first_epoch
        # A peer may itself wait for another host first, and its error names the cause.
        waits = 1 if self.group.hosts == 1 else 2
        header.deadline_ns, header.first_deadline_ns = (int(waits * s * 1e9) for s in self.timeouts)
        living = header.living
        before = self._saved_header or self._read_header(local.rank)  # zeros at creation
        living[:] = rank_set_words(self.living_mask, len(living))
        header.refusals, header.waits = before.refusals, before.waits
        header.reported[:] = [
            reported & ~alive for reported, alive in zip(before.reported, living, strict=True)
        ]
        return header

    def _initialise(self) -> None:
        """Open the mailbox and write the initial contents of this rank's share."""
        self._mailbox = self._mirrors.Mailbox.from_address(self.heap.mailbox.host)
        self._recovery_callbacks: list[weakref.WeakMethod[Callable[[], None]]] = []
        self.layer_lock = threading.Lock()  # held by a call of an MoE layer
        self._busy = threading.Lock()  # held by a call, and by close for good
        self._caller = 0  # thread that holds it
        self._access = threading.Lock()  # guards the mailbox and the heap against other threads
        self._closing = False  # no new call may begin
        self._freed = False
        self._has_notified = False  # whether the peers were notified that this rank leaves
        self._leave_reason = ""  # reason why this rank left, or ""
        self._descriptor = self.config.descriptor
        self.site = Site(
            base=self.heap.base,
            stride=self.heap.stride,
            mailbox=self.heap.mailbox.device,
            rank=self.group.local.rank,
            descriptor=self._descriptor,
        )
        self.group.local.attach(self)
        self._make_views()
        self._write_share()

    def _write_share(self) -> None:
        """Write the initial contents of this rank's share, at creation and recovery."""
        header = self._build_header()
        self._write_contents(header)
        raw = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self.heap.tensor((len(raw),), torch.uint8).copy_(raw)
        synchronize_stream(self.group.device)

    def _manifest(self) -> Mapping[str, JSON]:
        """Return the arguments that ranks compare and that identify compiled graphs."""
        return self.config.manifest()

    def _count_local_bytes(self) -> int:
        """Return the bytes that `_make_views` allocates outside the heap."""
        return 0

    def _poison(self, call_name: str, *, before: bool) -> None:  # noqa: B027  (optional)
        """Poison memory that must not be read before, or after, a call; see runtime/debug.py."""

    def _raise_recorded(self, *, input_errors: bool) -> None:
        """Raise the error that broke the group and, with `input_errors`, errors about the input."""
        self._raise_if_broken()
        if input_errors:
            self._raise_input_errors()

    # Formats a CallRecord of this operator.
    _describe_call: Callable[[CallRecord], str] = staticmethod(describe_dispatch)

    @abstractmethod
    def _make_views(self) -> None:
        """Create views of this rank's share, and memory outside the heap."""

    @abstractmethod
    def _write_contents(self, header: ctypes.Structure) -> None:
        """Write the initial contents of the share.

        May modify `header`, which is written afterwards.
        """

    @abstractmethod
    def _discard_calls(self) -> None:
        """Discard the state of calls that had not finished when the group broke."""

    @abstractmethod
    def _drop_views(self) -> None:
        """Drop every view of the heap that `_make_views` created."""

    def check(self) -> None:
        """Raise errors that the device has recorded since the last check.

        Call it once per step, after the engine has synchronised. It reads host memory only, so it
        is cheap and does not see calls that are still running.

        Raises:
            UsageError: the device dropped part of the input, such as an expert id out of range.
                Raised once; the group continues.
            GroupError: the group is broken. Every later call raises the same error.
            OutOfOrder: the object is closed.
        """
        with self._access:
            self.check_open()
            self._raise_pending()

    def _raise_pending(self) -> None:
        """Raise errors that have been recorded. Under `_access`."""
        if not self._asleep or self._failure is not None:
            self._raise_if_broken()
        self._raise_input_errors()

    def _raise_input_errors(self) -> None:
        """Raise errors about the input that the device has newly recorded. Under `_access`."""
        serial = self._mailbox.refusals
        if serial != self._num_raised_input_errors:
            count = (serial - self._num_raised_input_errors) & 0xFFFFFFFF
            self._num_raised_input_errors = serial
            record = self._mailbox.refused[serial % len(self._mailbox.refused)]
            if record.code not in self._ignored_codes:
                raise build_input_error(record, count, drops_repeats=self._drops_repeats)
        for companion in self._companions:
            companion.raise_recorded()

    @property
    def broken(self) -> bool:
        """Whether the group is broken, so that `check` raises `GroupError`.

        Reads one word of host memory.
        """
        with self._access:
            self.check_open()
            word = self._mailbox.host_word[0] & HOST_REQUESTS_LEAVE
            return bool(self._mailbox.broken_code or word)

    def abort(self) -> None:
        """Make the kernels of all ranks leave their waits. Returns without waiting for a peer.

        Any thread may call it. Every current wait, and every later one that is not satisfied at
        once, ends with `Aborted` naming this rank. A call whose flags have all arrived may still
        finish, but every later call on this rank raises. Close the group afterwards.

        Raises:
            OutOfOrder: the object is closed, or its group is asleep, where no rank is in a call.
        """
        with self._access:
            self.check_open()
            if self._asleep:
                self._raise_if_broken()
            self._leave_reason = self._leave_reason or "called abort()"
            self._notify_once(ABORTED, "")
            self._mailbox.host_word[0] |= HOST_REQUESTS_LEAVE
        for companion in self._companions:
            companion.end(Aborted(f"rank {self.group.rank} called abort(); create a new group"))

    def history(self, rank: int | None = None) -> list[Record]:
        """Return the last 128 finished operations of a rank, oldest first.

        Args:
            rank: Rank to read, alive or dead. Default: this rank.

        Returns:
            Records with the epoch, the phase and the times in nanoseconds of the device's clock.

        Raises:
            OutOfOrder: the object is closed.
        """
        with self._access:
            self.check_open()
            header = self._read_header(rank)
        return sorted((r for r in header.ring if r.phase), key=lambda r: (r.epoch, r.phase))

    def waits(self) -> Waits:
        """Return how long this rank has waited for each peer, by phase.

        Kernels count always. Any thread may call this method: it copies the counters and stops
        nothing, so a wait that just ends may be counted in part.

        Raises:
            OutOfOrder: the object is closed.
        """
        with self._access:
            self.check_open()
            header = self._saved_header or self._read_header()
            rounds_before = self._rounds_before_restart  # a recovery changes both
        ranks = self.group.host_ranks[self.group.host]
        return read_waits(header, self.group.rank, ranks, self._phase_names, rounds_before)

    def close(self) -> None:
        """Free the memory. Waits for this rank's own work, never for a peer. Idempotent.

        Any thread may call it. A call that waits in another thread ends first, with `Aborted`.
        Peers in a call that this rank has not finished raise `PeerLeft`.

        Raises:
            WeftError: an error that `check` would have raised and no call has raised yet. The
                memory is freed nevertheless.
        """
        pending = self._release()
        if pending is not None:
            raise pending

    def _release(self) -> WeftError | None:
        """Free the memory and return the pending error, if any."""
        for handle in {self.library_handle, vars(self)["library_handle"]}:
            library.unregister(handle)
        if not self._begin_close():
            return None
        pending = self.get_pending_error()
        with relaxed_capture(self.group.device):
            try:
                self._kernels.close()
            finally:
                self._drop_views()
                self._free()
        return pending

    @internal
    def get_pending_error(self) -> WeftError | None:
        """Return the error that `check` would raise and no call has raised yet.

        None if this rank left on its own, or in a forked child.
        """
        if os.getpid() != self._owner or self._leave_reason or self._has_raised:
            return None
        try:
            with self._access:
                self._raise_pending()
        except WeftError as error:
            return error
        return None

    @internal
    def allocate_layer_number(self) -> int:
        """Return the number of a new layer or lease on this operator, starting at 1. Collective."""
        self._layers = self.group.next_number("layer number", self._layers, MAX_LAYERS - 1)
        return self._layers

    @internal
    def create_lease_view(self) -> Self:
        """Return a view of this operator for a new lease. Collective.

        The view shares all state with the operator. Its calls carry the number of the lease, so
        that calls of different leases on two ranks are detected as a mismatch.
        """
        kind, number = type(self), self.allocate_layer_number()
        view: Self = object.__new__(_view_type(kind))
        view.__dict__ = self.__dict__
        view._layer, view._shared_operator = number, self  # type: ignore[attr-defined]
        view.library_handle = library.register(view, self._manifest())
        return view

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        self.announce_leave(format_reason(error))
        self._release()

    # Called by the group.

    @internal
    def mark_peer_dead(self, rank: int) -> None:
        """End waits for a rank whose process has ended."""
        with self._access:
            if not self._freed and self.living_mask >> rank & 1:
                self._mailbox.host_word[rank // HOST_BITS] |= 1 << rank % HOST_BITS

    @internal
    def announce_leave(self, reason: str, *, drain: bool = False) -> None:
        """Notify the peers that this rank starts no more calls; running calls continue.

        Any thread may call it. With `drain`, first wait for all enqueued work of this GPU, which
        peers rely on.
        """
        if drain and os.getpid() == self._owner:
            synchronize_device(self.group.device)
        with self._access:
            if not self._freed:
                self._notify_once(PEER_LEFT, reason)

    @internal
    def suspected_ranks(self) -> set[int]:
        """Return the rank that this one timed out on, if a timeout broke the group."""
        with self._access:
            if self._freed or self._mailbox.broken_code != PEER_TIMEOUT:
                return set()
            return {self._mailbox.broken.peer}

    @internal
    def quiesce(self) -> None:
        """End this rank's calls and wait until none runs; peers leave their calls, too.

        Every call raises until `restart`.
        """
        self.leave("left its calls to recover its group")
        while not self._busy.acquire(timeout=0.05):
            if self._closing:
                return
        try:
            synchronize_device(self.group.device)
        finally:
            self._busy.release()

    @internal
    def count_finished_rounds(self) -> int:
        """Return the number of rounds or all-reduces that this rank has finished since creation."""
        with self._access:
            if self._freed or self._asleep:
                return 0
            header = self._read_header()
        ends = (COMBINE, ALL_REDUCE)
        done = [r.epoch - header.first_epoch & EPOCH_MASK for r in header.ring if r.phase in ends]
        return max(done, default=0)

    @internal
    def read_own_header(self) -> ctypes.Structure | None:
        """Return a copy of this rank's header, or None after close and while asleep."""
        with self._access:
            has_header = not (self._freed or self._closing or self._asleep)
            return self._read_header() if has_header else None

    @internal
    def read_progress(self, rank: int) -> Progress | None:
        """Return the progress of a living rank in calls of this operator.

        None after close and while asleep.
        """
        if self._closing or not self.living_mask >> rank & 1:
            return None
        try:
            header = self._read_header(rank)
        except OutOfOrder:  # closed by another thread, or asleep
            return None
        rounds = [
            (r.epoch - header.first_epoch & EPOCH_MASK, r.phase, r.end_ns)
            for r in header.ring
            if r.phase
        ]
        round_number, phase, end_ns = max(rounds, default=(0, 0, 0))
        return Progress(
            wait_clock=header.waiting_ns,
            finished=2 * round_number + (phase == COMBINE),
            failed=bool(header.failed),
            begins_early=self._begins_early,
            last_call=f"{PHASES[phase]} {round_number}" if phase else "",
            last_end_ns=end_ns,
        )

    @internal
    def leave_for_mismatch(self, reason: str) -> None:
        """Leave the group because the ranks' calls differ; peers raise the same text."""
        # The timeout prevents a deadlock: the caller holds the lock of another operator, for which
        # another thread may wait. Without the notice, the peers' calls end by their own timeout.
        if not self._access.acquire(timeout=1.0):
            return
        try:
            if not self._freed and not self._mailbox.broken_code:
                self._failure, self._has_raised = GeometryMismatch(reason), True
                self._notify_once(GEOMETRY_MISMATCH, reason)
                self._mailbox.host_word[0] |= HOST_REQUESTS_LEAVE
        finally:
            self._access.release()

    @internal
    def restart(self, living: int) -> None:
        """Restart with the ranks of `living`, bit r for rank r.

        The share is initialised again in the same memory, so captured graphs stay valid. Called
        between two barriers of the living ranks, after `quiesce` on all of them, so that no peer
        stores into the share. All callbacks of `on_restart` run; then the first error of a
        callback is raised.

        Does nothing if the heap has no memory because a peer closed it, see `leave_closed`.
        """
        if self._closing or self.heap.asleep:
            return
        with relaxed_capture(self.group.device):
            with self._access:
                if self._freed:  # another thread has closed it
                    return
                self.living_mask, self._has_notified = living, False
                self._mailbox.broken_code, self._has_raised = 0, False
                self._failure, self._other_order = None, ""
                words = self._mailbox.host_word
                words[:] = [0] * len(words)
                self._asleep = False
                try:
                    rounds = count_rounds(self._saved_header or self._read_header())
                    self._discard_calls()
                    self._write_share()
                    self._saved_header = None
                    self._rounds_before_restart = Counter(self._rounds_before_restart) + Counter(
                        rounds
                    )
                except BaseException as error:
                    self._leave_reason = f"could not recover: {format_reason(error)}"
                    words[0] = HOST_REQUESTS_LEAVE
                    raise
                self._leave_reason = ""
            failures = []
            for reference in self._recovery_callbacks:
                callback = reference()
                try:
                    if callback is not None:
                        callback()
                except Exception as error:
                    failures.append(error)
            synchronize_stream(self.group.device)
            WAIT_WATCHER.watch(self)
            if failures:
                raise failures[0]

    @property
    def heap_generation(self) -> int:
        """Generation of the heap."""
        return self.heap.generation

    @internal
    @contextlib.contextmanager
    def exclude_calls(self) -> Iterator[None]:
        """Wait for this rank's work, and exclude calls in the context.

        Raises:
            OutOfOrder: a call runs, or the current stream is being captured.
            GroupError: the operator is broken.
        """
        if self._closing or self._asleep or self._is_abandoned:
            yield
            return
        with contextlib.ExitStack() as stack:
            if not self.layer_lock.acquire(blocking=False):
                raise OutOfOrder(
                    "Group.sleep during a call of an MoE layer: wait until it has returned"
                )
            stack.callback(self.layer_lock.release)
            self.begin_call("Group.sleep")
            stack.callback(self.end_call)
            if is_capturing(self.group.device):
                raise OutOfOrder("Group.sleep during a graph capture: end the capture first")
            synchronize_device(self.group.device)
            self._raise_if_broken()
            yield

    @property
    def _is_abandoned(self) -> bool:
        """Whether a recovery or wake has left it broken: a peer closed it, or it lacks a rank."""
        return isinstance(self._failure, PeerLeft) or self._mailbox.broken_code == GONE_UNMASKED

    @internal
    def mark_asleep(self) -> None:
        """Make calls raise until `restart`; the heap is not accessed meanwhile. Idempotent."""
        with self._access:
            if not (self._freed or self._asleep):
                self._saved_header = self._read_header()
                self._asleep = True

    @internal
    def leave_closed(self, rank: int) -> None:
        """Make calls raise PeerLeft: `rank` closed the operator while the group was asleep."""
        self.fail(
            PeerLeft(
                f"rank {rank} closed its {self.kind} while the group was asleep: close it on every "
                "rank, and create a new one"
            )
        )

    # Called by subclasses and other packages.

    @internal
    def on_restart(self, callback: Callable[[], None]) -> None:
        """Register a bound method to be called after each recovery while its object is alive.

        For objects that have state of this operator's calls or choose ranks for its tokens.
        """
        self._recovery_callbacks.append(weakref.WeakMethod(callback))

    @internal
    def add_companion(self, companion: Companion, *, reports: Collection[int]) -> None:
        """Register an object that fails, reports errors and closes together with this operator.

        It reports the errors about the input whose codes are in `reports`; this operator ignores
        them.
        """
        self._companions, self._ignored_codes = (*self._companions, companion), reports

    @internal
    def leave(self, reason: str) -> None:
        """Leave the group: waits and later calls of this rank raise, and peers get the reason."""
        with self._access:
            if not self._freed:
                self._leave_reason = self._leave_reason or reason
                self._notify_once(PEER_LEFT, reason)
                self._mailbox.host_word[0] |= HOST_REQUESTS_LEAVE

    @internal
    def begin_call(self, call_name: str) -> None:
        """Begin a call; `end_call` must follow.

        Raises:
            OutOfOrder: in a forked child, during another thread's call, or after close.
            GroupError: the group is broken.
        """
        if os.getpid() != self._owner:
            raise OutOfOrder(
                f"{call_name} in process {os.getpid()}, a forked child: this {self.kind} belongs "
                f"to process {self._owner}, and peers cannot distinguish the two; create a group "
                "in the process that uses it"
            )
        if not self._busy.acquire(blocking=False):
            self.check_open()
            raise OutOfOrder(
                f"{call_name} while another thread runs a call of this {self.kind}: calls must be "
                "serial and in the same order on every rank; call them from one thread, or hold a "
                "lock around each round"
            )
        self._caller = threading.get_ident()
        try:
            if self._closing:
                self.check_open()
            self._raise_if_broken()
        except BaseException:
            self.end_call()
            raise

    @internal
    def end_call(self) -> None:
        """End the call that `begin_call` began."""
        self._caller = 0
        self._busy.release()

    @internal
    def check_open(self) -> None:
        """Raise OutOfOrder after close, or Aborted if this rank had left before."""
        if not self._closing:
            return
        if self._leave_reason:
            raise Aborted(
                f"this rank, {self.group.rank}, {self._leave_reason}, and closed this "
                f"{self.kind}; create a new one"
            )
        raise OutOfOrder(f"this {self.kind} was closed; create a new one")

    def _raise_if_broken(self) -> None:
        """Raise the error that broke the group, if any. Within a call, or under `_access`.

        Raises OutOfOrder while the group is asleep.
        """
        if self._asleep:
            raise self._failure or OutOfOrder(
                f"this {self.kind} is asleep: call group.wake() first, on every rank"
            )
        if self._mailbox.broken_code or self._mailbox.host_word[0] & HOST_REQUESTS_LEAVE:
            self._has_raised = True
        if self._mailbox.broken_code:
            raise self._error_from_record(ErrorRecord.from_buffer_copy(self._mailbox.broken))
        if self._mailbox.host_word[0] & HOST_REQUESTS_LEAVE:
            if self._failure is not None:
                raise self._failure
            raise Aborted(f"this rank, {self.group.rank}, {self._leave_reason}; create a new group")

    def _error_from_record(self, record: ErrorRecord) -> GroupError:
        """Build the exception for a record, and end the companions with it."""
        error = self._build_host_error(record)
        for companion in self._companions:
            companion.end(error)
        return error

    def _build_host_error(self, record: ErrorRecord) -> GroupError:
        """Build the exception for a record, whose ranks are numbered within the host."""
        ranks, local = self.group.host_ranks[self.group.host], self.group.local
        if record.code == PEER_TIMEOUT and record.peer != local.rank:
            mismatch = self._order_mismatch(record)
            if mismatch is not None:
                return mismatch
        record.rank, record.peer = ranks[record.rank], ranks[record.peer]
        if record.reported_by:
            record.reported_by = 1 + ranks[record.reported_by - 1]
        return build_group_error(
            record,
            lambda rank: local.pid(ranks.index(rank)),
            lambda rank: self._read_exit_reason(ranks.index(rank)),
            lambda rank, value: self._read_call_text(ranks.index(rank), value),
            first_epoch=self.first_epoch,
            machines=self.group.job_machines,
        )

    def _order_mismatch(self, record: ErrorRecord) -> GroupError | None:
        """Build the exception for a timeout on a peer that waits in calls of other operators.

        Leaves those operators, so that the peer does not wait for this rank until its timeout.
        """
        if not self._other_order:
            own_name, others = self.group.local.find_diverged_operators(self, record.peer)
            if not others:
                return None
            ranks = self.group.host_ranks[self.group.host]
            self._other_order = describe_order_mismatch(record, ranks, own_name, tuple(others))
            for other in others.values():
                other.leave_for_mismatch(self._other_order)
        return GeometryMismatch(self._other_order)

    @internal
    def fail(self, error: GroupError) -> None:
        """Leave the group with an error that every later call raises."""
        self._failure = error
        self.leave(format_reason(error))

    @internal
    def check_running(self) -> None:
        """Raise OutOfOrder after close, or the error that broke the group."""
        with self._access:
            self.check_open()
            self._raise_if_broken()

    def _check_split_phase(self, name: str) -> None:
        """Raise InvalidArgument if send and receive halves cannot be called.

        A send half returns tensors that peers are still writing, which a compiled graph cannot
        express.
        """
        if torch.compiler.is_dynamo_compiling():
            raise InvalidArgument(
                f"{name} under torch.compile, which may reorder the work between the halves: call "
                "dispatch and combine, or call the halves outside of the compiled function"
            )
        self.check_open()
        if not self.build.split_phase:
            raise InvalidArgument(
                f"{name}: this {self.kind} was built without split_phase; pass split_phase=True"
            )

    @internal
    def check_not_symmetric(self, name: str, tensor: torch.Tensor) -> None:
        """Raise InvalidArgument for an output in an operator's heap, which peers access."""
        start, end = get_memory_range(tensor)
        for base, stop, label in tuple(_heaps.values()):
            if start < stop and base < end:
                raise InvalidArgument(
                    f"{name} is in the symmetric memory of an {label}, {start - base} bytes from "
                    "its start, which peers may still read: pass a separate tensor, or omit "
                    f"{name}"
                )

    def _begin_close(self) -> bool:
        """Reject new calls, notify the peers and wait for the current call to end.

        A call that waits in another thread is aborted. Returns False if already closed.
        """
        with self._access:
            if self._closing:
                return False
            self._closing = True
        if os.getpid() != self._owner:
            return True
        self.announce_leave(f"closed its {self.kind}", drain=True)
        if self._caller == threading.get_ident():
            return True  # called from a signal handler or finalizer within the call itself
        if not self._busy.acquire(blocking=False):
            with self._access:
                self._leave_reason = (
                    self._leave_reason or f"closed this {self.kind} in another thread"
                )
                self._mailbox.host_word[0] |= HOST_REQUESTS_LEAVE
            self._busy.acquire()
        return True

    def _free(self) -> None:
        """Free the heap, except for memory that views of callers still use. Not collective."""
        # Without the lock: a running kernel may depend on `mark_peer_dead`, which takes it.
        synchronize_device(self.group.device)
        with self._access:
            self._freed = True
            del self._mailbox
            _heaps.pop(id(self.heap), None)
            self.heap.close()
        for companion in self._companions:
            companion.close()

    def _notify_once(self, code: int, reason: str) -> None:
        """Write the exit reason, then a notice to each peer (make_notice in header.cuh).

        Does nothing if an earlier notice, or a kernel that broke the group, has notified them.
        """
        if self._has_notified or self._mailbox.broken_code or os.getpid() != self._owner:
            return
        if self._asleep:  # peers learn of it in `Group.wake`
            return
        self._has_notified = True
        rank, heap = self.site.rank, self.heap
        text = reason.encode(errors="replace")[: EXIT_REASON_BYTES - 1] + b"\0"
        heap.write(rank, self._mirrors.Header.exit_reason.offset, text)
        notice = (code << 56 | rank << 40).to_bytes(8, "little")
        for peer in range(self.group.local.size):
            if peer != rank and self.living_mask >> peer & 1:
                heap.write(peer, self._mirrors.Header.notices.offset + 8 * rank, notice)

    def _read_header(self, rank: int | None = None) -> ctypes.Structure:
        return self._mirrors.Header.from_buffer_copy(self.heap.header(rank))

    def _read_call_text(self, rank: int, value: int | None) -> str:
        """Return the text of a rank's latest call; "" if its hash differs from `value`."""
        record = self._read_header(rank).call
        if not record.hash or (value is not None and (record.hash ^ value) & FLAG_MASK):
            return ""
        return self._describe_call(record)

    def _read_exit_reason(self, rank: int) -> str:
        header = self._read_header(rank)
        return bytes(header.exit_reason).split(b"\0")[0].decode(errors="replace")


@functools.cache
def _view_type(kind: type[Operator]) -> type[Any]:
    """Create the class of leases of `kind`, whose instances have their own number and handle."""
    slots = {"__slots__": ("library_handle", "_layer", "_shared_operator"), "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), slots)


def run_all(*calls: Callable[[], object]) -> None:
    """Run all calls in order even if some raise, and raise the last error."""
    with contextlib.ExitStack() as stack:
        for call in reversed(calls):
            stack.callback(call)


class Caller(Protocol):
    """An operator, or an object that makes calls of an operator."""

    debug_checks: DebugChecks | None

    def begin_call(self, call_name: str, /) -> None: ...
    def end_call(self) -> None: ...


CallerT = TypeVar("CallerT", bound=Caller)


def exclusive_call(
    call_name: str,
) -> Callable[[Callable[Concatenate[CallerT, P], T]], Callable[Concatenate[CallerT, P], T]]:
    """Decorate an operator's method so that it runs without other calls and without autocast."""

    def decorate(
        method: Callable[Concatenate[CallerT, P], T],
    ) -> Callable[Concatenate[CallerT, P], T]:
        @functools.wraps(method)
        def call(self: CallerT, /, *args: P.args, **kwargs: P.kwargs) -> T:
            # Hot path of every call: without the frames of `disable_autocast`.
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                return outside_autocast(self, *args, **kwargs)
            self.begin_call(call_name)
            debug = self.debug_checks
            try:
                if debug is None:
                    return method(self, *args, **kwargs)
                debug.before(call_name)
                result = method(self, *args, **kwargs)
                debug.after(call_name)
                return result
            finally:
                self.end_call()

        outside_autocast = disable_autocast(call)
        return call

    return decorate
