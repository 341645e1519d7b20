# SPDX-License-Identifier: Apache-2.0
"""Uses of torch.distributed: control messages between machines, a managed group, a bounded store.

Messages are JSON bytes in uint8 tensors; nothing is unpickled.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d  # type: ignore[attr-defined]

from weft.errors import InvalidArgument, OutOfOrder, RendezvousFailed
from weft.group.messages import Messages
from weft.group.wire import (
    JSON,
    SLACK,
    VALUE_LIMIT,
    MalformedMessage,
    decode,
    encode,
    encode_value,
    sanitize_text,
)
from weft.logs import WaitLogTimer

# torch 2.13 renamed this function; the old name warns there.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_DESTROY_SECONDS = 5.0
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.0001, 0.02  # interval between two polls of a message
STORE_SECONDS = 1.0  # timeout of one request to the store
_log = logging.getLogger(__name__)
_requests: set[threading.Thread] = set()  # threads that wait for the store


class BoundedStore:
    """Store of torch.distributed's default group, with a timeout on each request.

    The store's host may be down, and then requests never return. After one request timed out, no
    further requests are sent.
    """

    def __init__(self) -> None:
        self._store = distributed_c10d._get_default_store()
        self._is_silent = False

    def set(self, key: str, text: str) -> None:
        """Set the value of a key."""
        self._run(lambda: self._store.set(key, text))

    def set_first(self, key: str, text: str) -> None:
        """Set the value of a key unless it has one."""
        self._run(lambda: self._store.compare_set(key, "", text))

    def get(self, keys: Sequence[str]) -> list[str] | None:
        """Return the values of keys, "" for a missing one; None if the store does not answer."""
        values: list[str] = []

        def read() -> None:
            for key in keys:
                values.append(self._store.get(key).decode() if self._store.check([key]) else "")

        self._run(read)
        return values if len(values) == len(keys) else None

    def _run(self, step: Callable[[], object]) -> None:
        if self._is_silent:
            return

        def run() -> None:
            # RuntimeError: the store is closed, perhaps because its host is down.
            with contextlib.suppress(RuntimeError):
                step()
            _requests.discard(thread)

        thread = threading.Thread(target=run, name="weft-store", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the thread limit is reached: errors then name no ranks
            self._is_silent = True
            return
        _requests.add(thread)
        thread.join(STORE_SECONDS)
        self._is_silent = thread.is_alive()


@atexit.register
def _join_threads() -> None:
    """Join the threads that wait for the store.

    Otherwise a reply during interpreter shutdown aborts the process (up to Python 3.13). A request
    also returns when the process of the store ends, which is usually at the same time.
    """
    until = time.monotonic() + 3 * STORE_SECONDS
    for thread in list(_requests):
        thread.join(max(0.0, until - time.monotonic()))


class TorchControl:
    """Control messages of a group of several machines over its process group, as a `Control`."""

    def __init__(self, process_group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._process_group = process_group
        self._closed = False
        self._broken: str | None = None

    def gather(self, op: str, value: JSON, timeout: float) -> list[Any]:
        """See `Control.gather`."""
        if self._closed:
            raise OutOfOrder("the group is closed; create a new one")
        if self._broken is not None:
            raise RendezvousFailed(self._broken)
        body = encode_value(op, value, alternative="as tensors through process_group()")
        frame = encode({"op": op})[:-1] + b',"value":' + body + b"}"
        rows = gather_bytes(self._process_group, frame, timeout, action=op)
        messages = [_parse_message(rank, op, row) for rank, row in enumerate(rows)]
        for rank, message in enumerate(messages):
            if message["op"] != op:
                raise RendezvousFailed(
                    f"this rank is in {op} and rank {rank} is in {sanitize_text(message['op'])}: "
                    "every rank must make the same calls in the same order"
                )
        return [message["value"] for message in messages]

    def exchange_fds(self, fd: int, timeout: float) -> list[int | None]:
        """Raise InvalidArgument, since torch.distributed cannot send descriptors."""
        raise InvalidArgument(
            "this group spans several machines, which cannot send each other file descriptors: use "
            "`group.local` if its host is one machine"
        )

    def pid(self, rank: int) -> int | None:
        """Return None: process ids are valid on one machine only."""
        return None

    def current_call(self, rank: int) -> str | None:
        """Return None: torch.distributed does not report the calls of peers."""
        return None

    def last_call(self, rank: int) -> str | None:
        """Return None, as `current_call` does."""
        return None

    def abort(self, reason: str) -> None:
        """Break the group: later calls raise. A blocked call ends at its deadline."""
        self._broken = self._broken or reason

    def close(self, reason: str | None = None) -> None:
        """Stop using the process group, which the caller owns. `reason` is not sent."""
        self._closed = True


def _parse_message(rank: int, op: str, row: bytes) -> dict[str, Any]:
    try:
        message = decode(row)
    except MalformedMessage as error:
        raise RendezvousFailed(f"rank {rank} broke the protocol in {op}: {error}") from error
    if not isinstance(message, dict) or not {"op", "value"} <= message.keys():
        raise RendezvousFailed(f"rank {rank} broke the protocol in {op}: it sent {message!r:.200}")
    return message


class Entries:
    """Log of the gathers that each rank of a process group has entered, in the group's store.

    torch.distributed does not report which ranks a collective waits for.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._name, self._count = group.group_name, 0
        self._store = BoundedStore()

    def enter(self, action: str) -> None:
        """Record that this rank enters its next gather."""
        self._count += 1
        self._store.set(self._store_key(self._rank), f"{self._count} {action}")

    def find_missing(self) -> list[str] | None:
        """Describe each rank that has not entered this rank's gather, with its last gather.

        Returns None if the store does not answer.
        """
        values = self._store.get([self._store_key(rank) for rank in range(self._size)])
        if values is None:
            return None
        missing = []
        for rank, value in enumerate(values):
            count, _, action = value.partition(" ")
            if not count or int(count) < self._count:
                missing.append(
                    f"rank {rank}" + (f" (last in {sanitize_text(action)})" if action else "")
                )
        return missing

    def _store_key(self, rank: int) -> str:
        return f"weft/entered/{self._name}/{rank}"


_entries: WeakKeyDictionary[dist.ProcessGroup, Entries] = WeakKeyDictionary()


def gather_bytes(
    group: dist.ProcessGroup, data: bytes, timeout: float, *, action: str = "a control message"
) -> list[bytes]:
    """Gather `data` of every rank in rank order. Collective.

    Raises:
        RendezvousFailed: a rank failed or did not call within `timeout` seconds.
    """
    if group not in _entries:
        _entries[group] = Entries(group)
    _entries[group].enter(action)
    device = _select_message_device(group)
    size = dist.get_world_size(group)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(size)]
    _all_gather(lengths, length, group, timeout, action)
    counts = [int(length.item()) for length in lengths]
    for rank, count in enumerate(counts):
        if not 0 < count <= VALUE_LIMIT + SLACK:
            raise RendezvousFailed(
                f"rank {rank} announced a message of {count} bytes, but the size must be in 1.."
                f"{VALUE_LIMIT + SLACK}"
            )
    padded = torch.zeros(max(counts), dtype=torch.uint8, device="cpu")
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    padded = padded.to(device)
    rows = [torch.empty_like(padded) for _ in range(size)]
    _all_gather(rows, padded, group, timeout, action)
    return [bytes(row[:n].tolist()) for row, n in zip(rows, counts, strict=True)]


def _all_gather(
    out: list[torch.Tensor],
    own: torch.Tensor,
    group: dist.ProcessGroup,
    timeout: float,
    action: str,
) -> None:
    began = time.monotonic()
    deadline, pause, wait_timer = began + timeout, _MIN_POLL_SECONDS, WaitLogTimer()
    try:
        work = dist.all_gather(out, own, group=group, async_op=True)
        if work is None:
            raise InvalidArgument("this process is not a member of the process group")
        while not work.is_completed() and time.monotonic() < deadline:
            if (waited := wait_timer.due()) is not None:
                _log.warning(
                    "rank %d of %d has waited %.0f s of at most %g s in %s. %s",
                    *(dist.get_rank(group), dist.get_world_size(group), waited, timeout, action),
                    _describe_missing(group, action),
                )
            time.sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError as error:
        first_line, elapsed = str(error).partition("\n")[0], time.monotonic() - began
        outcome = (
            f"did not end within {timeout:g} s"
            if elapsed >= timeout
            else f"failed after {elapsed:.1f} s"
        )
        raise RendezvousFailed(
            f"rank {dist.get_rank(group)}: {action} {outcome}. "
            f"{_describe_missing(group, action)} (torch.distributed: {first_line})"
        ) from error


def _describe_missing(group: dist.ProcessGroup, action: str) -> str:
    missing = _entries[group].find_missing()
    if missing:
        return (
            f"{', '.join(missing)} did not enter it: every rank of the process group must call "
            f"{action}, and make the same calls in the same order"
        )
    if missing is None:
        return "The store does not answer: its process may have exited, or its host may be down"
    return "Every rank has entered it: a rank died since, or the network between them is slow"


def _select_message_device(group: dist.ProcessGroup) -> torch.device:
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class ManagedProcessGroup:
    """torch.distributed's default group, initialised and destroyed by weft. Collective.

    Rank 0 runs a TCPStore on 127.0.0.1, on a free port. Raises CreationFailed or RendezvousFailed
    if a rank cannot join.
    """

    def __init__(self, messages: Messages, device: torch.device) -> None:
        self._owner = os.getpid()
        host, limit = "127.0.0.1", timedelta(seconds=messages.timeout)
        backend = _choose_backend(messages, device)

        def open_store() -> TCPStore | None:
            if messages.rank != 0:
                return None
            # Without this listener torch's store would listen on every interface.
            listener = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
            args = host, listener.getsockname()[1], None, True, limit
            fd = listener.detach()
            return TCPStore(*args, wait_for_workers=False, multi_tenant=True, master_listen_fd=fd)

        own = messages.run_collective(open_store, action=f"opening a store on {host}")
        port = messages.all_gather(None if own is None else own.port)[0]
        # The store of rank 0 must exist as long as the group.
        self._store = messages.run_collective(
            lambda: own or TCPStore(host, port, None, False, limit, wait_for_workers=False),
            action=f"connecting to rank 0's store on {host}:{port}",
        )
        with default_env_var("GLOO_SOCKET_IFNAME", "lo"):  # the ranks share a host
            try:
                dist.init_process_group(
                    backend,
                    store=self._store,
                    rank=messages.rank,
                    world_size=messages.size,
                    timeout=limit,
                    device_id=device if backend == "nccl" else None,
                )
            except RuntimeError as error:
                raise RendezvousFailed(f"torch.distributed did not start: {error}") from error
        world = dist.group.WORLD
        assert world is not None  # created by init_process_group
        self.process_group: dist.ProcessGroup = world

    def destroy(self) -> None:
        """Destroy the group; wait at most 5 s for peers."""
        if os.getpid() != self._owner or dist.group.WORLD is not self.process_group:
            return  # in a forked child, or the caller has destroyed the group
        # NCCL may wait for work that a dead peer will never finish.
        thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
        thread.start()
        thread.join(_DESTROY_SECONDS)
        if thread.is_alive():
            warnings.warn(
                f"torch.distributed did not end within {_DESTROY_SECONDS:g} s; end the process",
                ResourceWarning,
                stacklevel=3,
            )


def _choose_backend(messages: Messages, device: torch.device) -> str:
    # NCCL does not support ranks that share a GPU.
    if device.type != "cuda":
        return "gloo"
    gpus = messages.all_gather(str(torch.cuda.get_device_properties(device).uuid))
    return "nccl" if len(set(gpus)) == len(gpus) else "gloo"


@contextlib.contextmanager
def default_env_var(name: str, value: str) -> Iterator[None]:
    """Set an environment variable in the context unless the user has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
