"""The ranks of one job: who they are, and the small messages between them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from weft.arguments import flags, function, instance, integer, integers, seconds, shown
from weft.errors import (
    CreationFailed,
    GeometryMismatch,
    InvalidArgument,
    OutOfOrder,
    RecoveryFailed,
    RendezvousFailed,
    UsageError,
)
from weft.memory.agreement import MAX_AGREEING, Agreement, Recovery
from weft.memory.collective import OwnProcessGroup, TorchControl
from weft.memory.control_plane import ControlPlane
from weft.memory.discovery import default_device, find
from weft.memory.liveness import Liveness, LivenessFd
from weft.memory.meeting import Meeting
from weft.memory.peers import Peers
from weft.memory.rendezvous import meet
from weft.memory.store import StoreExchange, environment
from weft.memory.wire import JSON, encode

T = TypeVar("T")
_TEXT_LIMIT = 4000  # characters of an error's text that a vote carries


class Control(Protocol):
    """What carries a group's control messages."""

    def gather(self, op: str, value: JSON, timeout: float) -> list[Any]: ...
    def exchange_fds(self, fd: int, timeout: float) -> list[int | None]: ...
    def resume(self, era: int, living: set[int]) -> None: ...
    def close(self, why: str | None = None) -> None: ...


class Member(Protocol):
    """What shares the fate of a group: an operator on a heap of it."""

    def _peer_ended(self, rank: int) -> None:
        """The process of a rank has ended."""

    def _tell_left(self, why: str, *, settled: bool = False) -> None:
        """Notify the peers that no more calls come; settled: once those made are done."""

    def _suspects(self) -> set[int]:
        """The ranks that did not do their part of a call before its deadline."""

    def _quiesce(self) -> None:
        """Wait until nothing of this rank's calls runs any more."""

    def _finished(self) -> int:
        """Rounds that this rank has finished."""

    def _recover(self, living: int) -> None:
        """Write this rank's share as at creation, with the mask `living`, and take calls again."""


class Group:
    """Ranks of one job that can share memory (one host). A context manager.

    `rank` of `size` ranks; `device` is the rank's memory, "cpu" or "cuda:i"; `timeout` is the
    deadline in seconds of every control message that names none. The methods that talk are
    collective: every rank calls the same ones in the same order, each rank from one thread at a
    time. When a rank dies they raise RendezvousFailed naming it, until the survivors `recover`.
    """

    def __init__(
        self,
        control: Control,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float,
        process_group: dist.ProcessGroup | None = None,
        threads: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.timeout = timeout
        self._control = control
        self._process_group = process_group
        self._own: OwnProcessGroup | None = None
        self._threads = threads
        self._generation = 0
        self._closed = False
        # By generation: the same key on every rank, and the order of creation.
        self._members: weakref.WeakValueDictionary[str, Member] = weakref.WeakValueDictionary()
        self._dead: frozenset[int] = frozenset()  # ranks that the group goes on without
        self._ended: set[int] = set()  # ranks whose processes have ended
        self._fate = threading.Lock()  # of the two above
        self._liveness_fd: LivenessFd | None = None
        self._liveness: Liveness | None = None
        self._agreement: Agreement | None = None
        # A group that is dropped unclosed gives its sockets back without a warning. At exit the
        # system does.
        weakref.finalize(self, control.close).atexit = False
        if isinstance(control, ControlPlane) and not threads and size > 1:
            try:
                self._watch()
            except BaseException:
                self._leave(None)
                raise

    @classmethod
    def from_meeting(
        cls,
        meeting: Meeting,
        *,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float,
        threads: bool = False,
    ) -> Group:
        """The group of the ranks that come to `meeting`. Collective. Raises RendezvousFailed."""
        instance("meeting", meeting, Meeting)
        size = integer("size", size, 1)
        rank, timeout = integer("rank", rank, 0, size - 1), seconds("timeout", timeout)
        instance("device", device, torch.device)
        flags(threads=threads)
        control = meet(meeting, rank=rank, size=size, device=device.type, timeout=timeout)
        return cls(control, rank=rank, size=size, device=device, timeout=timeout, threads=threads)

    @classmethod
    def from_torch(
        cls,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: float = 120.0,
        shared_memory: bool = True,
    ) -> Group:
        """The ranks of a torch process group (default: the world). Collective.

        The process group only carries where to meet; it stays the caller's. `device` defaults to
        the current CUDA device where there is one. `shared_memory=False` makes a group without
        Unix sockets, for ranks on several hosts: it cannot hold a Heap.
        Raises RendezvousFailed when the ranks are on several hosts or do not meet.
        """
        timeout, where = seconds("timeout", timeout), default_device(device)
        flags(shared_memory=shared_memory)
        group = dist.group.WORLD if process_group is None else process_group
        if group is None:
            raise InvalidArgument(
                "torch.distributed is not initialised: call init_process_group first, or use "
                "Group.from_env() or weft.launch"
            )
        instance("process_group", group, dist.ProcessGroup)
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        if rank < 0:
            raise InvalidArgument("this process is no member of the given process group")
        over_torch = TorchControl(group)
        if not shared_memory:
            return cls(
                over_torch,
                rank=rank,
                size=size,
                device=where,
                timeout=timeout,
                process_group=group,
            )

        peers = Peers()

        def exchange(value: JSON) -> list[Any]:
            return over_torch.gather("Group.from_torch", value, timeout, watch=peers.check)

        control = find(exchange, rank, size, where.type, timeout, peers)
        return cls(
            control, rank=rank, size=size, device=where, timeout=timeout, process_group=group
        )

    @classmethod
    def from_env(cls, *, device: torch.device | str | None = None, timeout: float = 120.0) -> Group:
        """The ranks that torchrun (or a like launcher) started on this host. Collective.

        Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. `device` defaults to
        cuda:LOCAL_RANK where there is one. Without torchrun's agent rank 0 serves the store in
        which the ranks find each other, on the address of MASTER_ADDR alone: 127.0.0.1 keeps other
        machines out. WEFT_SECRET, any text that is the same on every rank, authenticates what they
        write there (docs/environment.md). Raises RendezvousFailed when a variable is missing, the
        ranks are on several hosts, one of them dies or they do not meet in time.
        """
        timeout = seconds("timeout", timeout)
        default_device(device)
        rank, size, local_rank = environment()
        where = default_device(device, local_rank)
        peers = Peers()
        exchange = StoreExchange(rank, size, timeout, peers)
        try:
            control = find(exchange, rank, size, where.type, timeout, peers)
        except Exception:
            exchange.linger()
            raise
        return cls(control, rank=rank, size=size, device=where, timeout=timeout)

    def all_gather(self, value: JSON, *, timeout: float | None = None) -> list[Any]:
        """Every rank's `value`, in rank order; at most 1 MiB of JSON a rank.

        None for a rank that is gone. Tuples come back as lists. Raises InvalidArgument for what
        JSON cannot say and RendezvousFailed when a rank died, closed its group or did not come in
        time.
        """
        _check_json(value)
        return self._gather("all_gather", value, timeout)

    def barrier(self, *, timeout: float | None = None) -> None:
        """Return when every rank is here. Raises RendezvousFailed as all_gather does."""
        self._gather("barrier", None, timeout)

    def vote(
        self, error: BaseException | None, *, doing: str, undo: Callable[[], None] | None = None
    ) -> None:
        """Go on only if every rank can.

        Each rank passes what stopped it in `doing`, or None. If any passed an error, every rank
        raises the same: where all passed UsageErrors of one class, that class, with the first
        rank's text, for then the call is wrong on each; else CreationFailed naming the ranks. A
        rank's own error is the cause. On ranks that passed none `undo` gives back first what they
        had made; so it does if the vote itself fails.
        """
        if error is not None:
            instance("error", error, BaseException)
        instance("doing", doing, str)
        if undo is not None:
            function("undo", undo, "which gives back what was made")
        try:
            self._vote(error, doing)
        except BaseException:
            if error is None and undo is not None:
                undo()
            raise

    def _vote(self, error: BaseException | None, doing: str, timeout: float | None = None) -> None:
        mine = None if error is None else [type(error).__name__, str(error)[:_TEXT_LIMIT]]
        said = self._gather("vote", {"doing": doing, "error": mine}, timeout)
        votes = {rank: said[rank] for rank in self.living}
        failed = [r for r, vote in votes.items() if vote["error"] is not None]
        if not failed:
            return
        first = failed[0]
        name, text = votes[first]["error"]
        if isinstance(error, UsageError) and all(
            vote["error"] is not None and vote["error"][0] == name for vote in votes.values()
        ):
            raise type(error)(text) from error
        others = f" (and on rank {', '.join(map(str, failed[1:]))})" if failed[1:] else ""
        raise CreationFailed(
            f"{votes[first]['doing']} failed on rank {first} of {self.size}{others}: {name}: {text}"
        ) from error

    def together(self, step: Callable[[], T], *, doing: str) -> T:
        """Run `step` on every rank, vote on how it went, and return its result.

        Raises as `vote` does, the same on every rank, if `step` raised on any.
        """
        function("step", step, "which every rank runs")
        instance("doing", doing, str)
        result, problem = None, None
        try:
            result = step()
        except Exception as error:
            problem = error
        try:
            self.vote(problem, doing=doing)
        finally:
            problem = None  # its traceback holds this frame, and its callers' frames
        return cast("T", result)

    def agree(self, value: JSON, *, what: str) -> None:
        """Check that every rank passes an equal `value`; `what` names it in the error.

        Raises GeometryMismatch with the same text on every rank, naming two ranks and, key by key
        for dicts, both values.
        """
        instance("what", what, str)
        _check_json(value)
        values = self._gather(f"agreement on {what}", value, None)
        first = self.living[0]
        for rank in self.living:
            if values[rank] != values[first]:
                theirs, ours = _difference(values[rank], values[first])
                raise GeometryMismatch(
                    f"{what} differs: rank {first} has {ours} and rank {rank} has {theirs}; pass "
                    "the same on every rank"
                )

    def exchange_fds(self, fd: int, *, timeout: float | None = None) -> list[int | None]:
        """One file descriptor of every rank, in rank order; the own entry is a duplicate.

        None for a rank that is gone. The caller closes all of them. Raises RendezvousFailed as
        all_gather does, and InvalidArgument for a group without shared memory.
        """
        fd = integer("fd", fd, 0, (1 << 31) - 1)
        try:
            os.fstat(fd)
        except OSError as error:
            raise InvalidArgument(f"fd is {fd}; it must be an open descriptor: {error}") from error
        return self._control.exchange_fds(fd, self._deadline(timeout))

    def process_group(self) -> dist.ProcessGroup:
        """The torch process group of these ranks. Collective at the first call.

        A group from from_torch returns the one it was made from. Else the process's default group
        is made: NCCL for CUDA ranks that each have a GPU, gloo for CPU ranks and for ranks that
        share a GPU. Raises InvalidArgument for ranks that are threads, because torch.distributed
        needs processes.
        """
        if self._process_group is not None:
            return self._process_group
        if self._threads:
            raise InvalidArgument(
                "these ranks are threads of one process and torch.distributed needs processes; "
                'use weft.launch(..., device="cpu")'
            )
        if self._closed:
            raise OutOfOrder("the group is closed; make a new one")
        if dist.is_initialized():
            raise InvalidArgument(
                "torch.distributed is initialised already; make this group with "
                "weft.Group.from_torch() so that both are the same ranks"
            )

        def exchange(value: JSON) -> list[Any]:
            return self._gather("process_group", value, None)

        self._own = OwnProcessGroup(self.rank, self.size, self.device, exchange, self.timeout)
        self._process_group = self._own.process_group
        return self._process_group

    def _watch(self) -> None:
        """From now on the end of a peer's process is noticed at once, and can be agreed on."""
        self._liveness_fd = self.together(LivenessFd, doing="opening a pidfd")
        with contextlib.ExitStack() as fds:
            fds.callback(os.close, self._liveness_fd.fd)
            pidfds = self._of_peers(self._liveness_fd.fd)
        ended = weakref.WeakMethod(self._peer_ended)

        def peer_ended(rank: int) -> None:
            method = ended()
            if method is not None:
                method(rank)

        self._liveness = Liveness(pidfds, peer_ended)
        weakref.finalize(self, self._liveness.close).atexit = False
        if self.size > MAX_AGREEING:
            return
        agreement = self._agreement = self.together(
            lambda: Agreement(self.rank, self.size, self._name), doing="making a page of memory"
        )
        weakref.finalize(self, agreement.close).atexit = False
        page = agreement.take_fd()
        try:
            pages = self._of_peers(page)
        finally:
            os.close(page)
        try:
            self.together(lambda: agreement.map(pages), doing="mapping the peers' pages")
        finally:
            for fd in pages.values():
                os.close(fd)

    def _of_peers(self, fd: int) -> dict[int, int]:
        """A descriptor of every living peer."""
        fds = self.exchange_fds(fd)
        own = fds[self.rank]
        if own is not None:
            os.close(own)
        return {r: each for r, each in enumerate(fds) if each is not None and r != self.rank}

    def attach(self, member: Member) -> None:
        """Notify `member` of deaths, of this rank's leaving and of recoveries; one a heap."""
        with self._fate:
            self._members[f"{type(member).__name__} {self._generation}"] = member
            for rank in self._ended - self._dead:
                member._peer_ended(rank)

    @property
    def living(self) -> tuple[int, ...]:
        """The ranks that take part: all, until a recovery goes on without the dead."""
        return tuple(rank for rank in range(self.size) if rank not in self._dead)

    def recover(self, *, suspects: Sequence[int] = (), timeout: float = 10.0) -> Recovery:
        """Go on without the ranks that died. Collective over those that live.

        To be called on every rank after one of them died, or stalled, under a call. The survivors
        agree on who is gone, wait for their own calls to end, write the memory of all operators as
        at creation, and take calls again. The control messages go on among the living; where they
        return a value of each rank, a rank that is gone has None.

        suspects: ranks to kill if they do not call this, too, within half a second. Those that an
        operator waited for in vain (PeerTimeout) are among them without being named. Nobody
        else is killed, and no living rank is left out.
        timeout: seconds, in all.

        Raises RecoveryFailed where a rank neither came nor ended, or cannot be killed, naming it;
        then end its process and call this again. Raises CreationFailed on every rank where one
        could not write its memory, and InvalidArgument for ranks that are threads or that share no
        memory.
        """
        began, timeout = time.monotonic(), seconds("timeout", timeout)
        doubted = set(integers("suspects", suspects, 0, self.size - 1))
        if self._closed:
            raise OutOfOrder("the group is closed; make a new one")
        if self._agreement is None or self._liveness is None:
            raise InvalidArgument(
                f"this group cannot recover: it needs 2 to {MAX_AGREEING} ranks, each a process, "
                "that share memory"
            )
        with self._fate:
            members = list(self._members.values())
        doubted |= {rank for member in members for rank in member._suspects()}
        deadline = began + timeout
        while True:
            era, dead = self._agreement.decide(self._liveness, doubted, deadline)
            with self._fate:
                self._dead = dead
            self._control.resume(era, set(self.living))
            try:
                finished = self._go_on(deadline)
            except RendezvousFailed as error:  # another one died, or gave up: agree anew
                if time.monotonic() < deadline:
                    continue
                raise RecoveryFailed(f"{error}; call recover again") from error
            took = time.monotonic() - began
            return Recovery(tuple(sorted(dead)), self.living, MappingProxyType(finished), took)

    def _go_on(self, deadline: float) -> dict[str, int]:
        """Make the living equal, and resume the operators that all of them still have."""

        def left() -> float:
            return max(0.001, deadline - time.monotonic())

        def barrier() -> None:
            self._vote(None, "recovering", left())

        with self._fate:
            own = {name: member._finished() for name, member in self._members.items()}
        mine: JSON = {"generation": self._generation, "finished": own}
        said = self._gather("recover", mine, left())
        states = [said[rank] for rank in self.living]
        # A creation that the death interrupted was begun on some ranks only.
        self._generation = max(state["generation"] for state in states)
        finished = {
            name: min(state["finished"][name] for state in states)
            for name in own
            if all(name in state["finished"] for state in states)
        }
        try:
            self._resume(finished, sum(1 << rank for rank in self.living), barrier)
        except (RendezvousFailed, CreationFailed):
            raise
        except Exception as error:
            self._vote(error, "recovering", left())
        with self._fate:
            for rank in self._ended - self._dead:  # `_recover` has forgotten it
                for member in self._members.values():
                    member._peer_ended(rank)
        return finished

    def _resume(self, names: Iterable[str], living: int, barrier: Callable[[], None]) -> None:
        """Write the memory of the operators `names` as at creation, while nothing runs in it."""
        with self._fate:
            members = [each for name, each in self._members.items() if name in names]
        for member in members:
            member._quiesce()
        barrier()
        for member in members:
            member._recover(living)
        barrier()

    def pid(self, rank: int) -> int | None:
        """The process id of a rank as the kernel reported it, where it is known."""
        pids = getattr(self._control, "pids", None)
        return None if pids is None else int(pids[rank])

    def _peer_ended(self, rank: int) -> None:
        with self._fate:
            self._ended.add(rank)
            if rank not in self._dead:  # heard late, after a recovery
                for member in list(self._members.values()):
                    member._peer_ended(rank)

    def next_generation(self) -> int:
        """1, 2, ... 65535, 1, ...: the same on every rank, because creations are collective."""
        self._generation = self._generation % 0xFFFF + 1
        return self._generation

    def _name(self, rank: int) -> str:
        return f"rank {rank} (pid {self.pid(rank)})"

    def abort(self, why: str) -> None:
        """Make every later or blocked control call of this rank raise. Callable from any thread."""
        instance("why", why, str)
        stop = getattr(self._control, "abort", None)
        if stop is not None:
            stop(why)

    def close(self) -> None:
        """Give up sockets and an own torch group. Local and idempotent; never waits for a peer."""
        self._leave(None)

    def _leave(self, why: str | None) -> None:
        """Close; ranks that wait for this one in a control message get the reason at once."""
        if self._closed:
            return
        self._closed = True
        with self._fate:
            members = list(self._members.values())
        for member in members:
            member._tell_left(why or "closed its group", settled=why is None)
        self._control.close(None if why is None else f"it {why}")
        if self._liveness is not None:
            self._liveness.close()
        if self._liveness_fd is not None:
            self._liveness_fd.close()
        if self._agreement is not None:
            self._agreement.close()
        if self._own is not None:
            self._own.destroy()
            self._own = self._process_group = None

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(None if error is None else reason(error))

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}, device={self.device})"

    def _gather(self, op: str, value: JSON, timeout: float | None) -> list[Any]:
        return self._control.gather(op, value, self._deadline(timeout))

    def _deadline(self, timeout: float | None) -> float:
        return self.timeout if timeout is None else seconds("timeout", timeout)


def _check_json(value: JSON) -> None:
    """Raises InvalidArgument for what no message can carry."""
    try:
        encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"value is {shown(value)}, which is not JSON: {error}") from error


def reason(error: BaseException) -> str:
    """An exception that ends a rank, in a line for its peers."""
    text = " ".join(str(error).split())
    return f"raised {type(error).__name__}" + (f": {text}" if text else "")


def _difference(other: Any, first: Any) -> tuple[str, str]:
    """How two unequal values differ, as texts: key by key where both are dicts."""
    if not (isinstance(other, dict) and isinstance(first, dict)):
        return repr(other), repr(first)
    unset = object()
    keys = [k for k in {**first, **other} if other.get(k, unset) != first.get(k, unset)]
    theirs, ours = (
        ", ".join(f"{k}={d[k]!r}" if k in d else f"no {k}" for k in keys) for d in (other, first)
    )
    return theirs, ours
