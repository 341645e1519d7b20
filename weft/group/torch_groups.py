# SPDX-License-Identifier: Apache-2.0
"""What weft asks of torch.distributed: control messages without Unix sockets, a group of its own.

Nothing here unpickles: messages are JSON bytes in uint8 tensors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from weft.errors import InvalidArgument, OutOfOrder, RendezvousFailed
from weft.group.messages import Messages
from weft.group.reminder import Reminder
from weft.group.store import BoundedStore
from weft.group.wire import (
    JSON,
    SLACK,
    VALUE_LIMIT,
    Malformed,
    decode,
    encode,
    encode_value,
    text_of,
)

# torch 2.13 renamed it; the old name still works there, but warns.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_DESTROY_SECONDS = 5.0
_POLL = 0.0001, 0.02  # seconds between two looks at a message on its way: at first, at most
_log = logging.getLogger(__name__)


class TorchControl:
    """Control messages of a group of several machines, over its process group."""

    def __init__(self, process_group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._process_group = process_group
        self._closed = False

    def gather(self, op: str, value: JSON, timeout: float) -> list[Any]:
        """Every rank's `value` in rank order. `op` names the call; all ranks must make the same."""
        if self._closed:
            raise OutOfOrder("the group is closed; make a new one")
        body = encode_value(op, value, larger="as tensors through process_group()")
        frame = encode({"op": op})[:-1] + b',"value":' + body + b"}"
        rows = gather_bytes(self._process_group, frame, timeout, doing=op)
        said = [_message(rank, op, row) for rank, row in enumerate(rows)]
        for rank, each in enumerate(said):
            if each["op"] != op:
                raise RendezvousFailed(
                    f"this rank is in {op} and rank {rank} is in {text_of(each['op'])}: every "
                    "rank must make the same calls in the same order"
                )
        return [each["value"] for each in said]

    def exchange_fds(self, fd: int, timeout: float) -> list[int | None]:
        """Refused: descriptors travel over Unix sockets alone."""
        raise InvalidArgument(
            "this group spans several machines, which pass no file descriptors: use `group.local` "
            "where its host is one machine"
        )

    def close(self, why: str | None = None) -> None:
        """Forget the process group, which belongs to the caller. `why` is not sent."""
        self._closed = True


def _message(rank: int, op: str, row: bytes) -> dict[str, Any]:
    """What rank `rank` sent, if it is a control message of weft."""
    try:
        said = decode(row)
    except Malformed as error:
        raise RendezvousFailed(f"rank {rank} broke the protocol in {op}: {error}") from error
    if not isinstance(said, dict) or not {"op", "value"} <= said.keys():
        raise RendezvousFailed(f"rank {rank} broke the protocol in {op}: it sent {said!r:.200}")
    return said


class Entries:
    """Which gathers the ranks of a process group have entered, in its store.

    torch.distributed does not say whom a collective waits for.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._name, self._count = group.group_name, 0
        self._store = BoundedStore()

    def enter(self, doing: str) -> None:
        """Note that this rank enters its next gather."""
        self._count += 1
        self._store.set(self._key(self._rank), f"{self._count} {doing}")

    def missing(self) -> list[str] | None:
        """Return each rank that has not entered this rank's gather, with the one before; None
        where the store does not answer.
        """
        values = self._store.get([self._key(rank) for rank in range(self._size)])
        if values is None:
            return None
        missing = []
        for rank, value in enumerate(values):
            count, _, doing = value.partition(" ")
            if not count or int(count) < self._count:
                missing.append(f"rank {rank}" + (f" (last in {text_of(doing)})" if doing else ""))
        return missing

    def _key(self, rank: int) -> str:
        return f"weft/entered/{self._name}/{rank}"


_entries: WeakKeyDictionary[dist.ProcessGroup, Entries] = WeakKeyDictionary()


def gather_bytes(
    group: dist.ProcessGroup, data: bytes, timeout: float, *, doing: str = "a control message"
) -> list[bytes]:
    """`data` of every rank, in rank order. Raises RendezvousFailed after `timeout` seconds."""
    if group not in _entries:
        _entries[group] = Entries(group)
    _entries[group].enter(doing)
    device = _message_device(group)
    size = dist.get_world_size(group)
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    lengths = [torch.empty_like(length) for _ in range(size)]
    _all_gather(lengths, length, group, timeout, doing)
    counts = [int(each.item()) for each in lengths]
    for rank, count in enumerate(counts):
        if not 0 < count <= VALUE_LIMIT + SLACK:
            raise RendezvousFailed(
                f"rank {rank} announced a message of {count} bytes, where 1 to "
                f"{VALUE_LIMIT + SLACK} are accepted"
            )
    padded = torch.zeros(max(counts), dtype=torch.uint8, device="cpu")
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    padded = padded.to(device)
    rows = [torch.empty_like(padded) for _ in range(size)]
    _all_gather(rows, padded, group, timeout, doing)
    return [bytes(row[:n].tolist()) for row, n in zip(rows, counts, strict=True)]


def _all_gather(
    out: list[torch.Tensor],
    own: torch.Tensor,
    group: dist.ProcessGroup,
    timeout: float,
    doing: str,
) -> None:
    began = time.monotonic()
    deadline, pause, reminder = began + timeout, _POLL[0], Reminder()
    try:
        work = dist.all_gather(out, own, group=group, async_op=True)
        if work is None:
            raise InvalidArgument("this process is no member of the given process group")
        while not work.is_completed() and time.monotonic() < deadline:
            if (waited := reminder.due()) is not None:
                _log.warning(
                    "rank %d of %d has waited %.0f s of at most %g s in %s. %s",
                    *(dist.get_rank(group), dist.get_world_size(group), waited, timeout, doing),
                    _whom(group, doing),
                )
            time.sleep(pause)
            pause = min(2 * pause, _POLL[1])
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError as error:
        first, took = str(error).partition("\n")[0], time.monotonic() - began
        how = f"within {timeout:g} s" if took >= timeout else f"and failed after {took:.1f} s"
        raise RendezvousFailed(
            f"rank {dist.get_rank(group)}: {doing} did not end {how}. "
            f"{_whom(group, doing)} (torch.distributed: {first})"
        ) from error


def _whom(group: dist.ProcessGroup, doing: str) -> str:
    """Whom a gather waits for, and what to do about it."""
    missing = _entries[group].missing()
    if missing:
        return (
            f"{', '.join(missing)} did not enter it: every rank of the process group must call "
            f"{doing}, and make the same calls in the same order"
        )
    if missing is None:
        return "The store does not answer: the process or the host that serves it may be gone"
    return "Every rank has entered it: a rank died since, or the network between them is slow"


def _message_device(group: dist.ProcessGroup) -> torch.device:
    """Where the process group takes small tensors: the CPU where it can."""
    if "cpu" in dist.get_backend_config(group):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class OwnProcessGroup:
    """The torch group of ranks that weft started or found itself: the default group of the process.

    Its store is a TCPStore on 127.0.0.1 in rank 0, on a port that the system chose: no file, no
    directory. Collective. Raises CreationFailed and RendezvousFailed when a rank cannot join.
    """

    def __init__(self, group: Messages, device: torch.device) -> None:
        self._owner = os.getpid()
        here, limit = "127.0.0.1", timedelta(seconds=group.timeout)
        backend = _backend(group, device)

        def serve() -> TCPStore | None:
            if group.rank != 0:
                return None
            # By itself torch's store would listen on every interface.
            listener = socket.create_server((here, 0), backlog=socket.SOMAXCONN)
            where = here, listener.getsockname()[1], None, True, limit
            fd = listener.detach()
            return TCPStore(*where, wait_for_workers=False, multi_tenant=True, master_listen_fd=fd)

        served = group.together(serve, doing=f"serving a store on {here}")
        port = group.all_gather(None if served is None else served.port)[0]
        # Rank 0 serves it for as long as the group lives.
        self._store = group.together(
            lambda: served or TCPStore(here, port, None, False, limit, wait_for_workers=False),
            doing=f"connecting to rank 0's store on {here}:{port}",
        )
        with unless_set("GLOO_SOCKET_IFNAME", "lo"):  # the ranks share a host
            try:
                dist.init_process_group(
                    backend,
                    store=self._store,
                    rank=group.rank,
                    world_size=group.size,
                    timeout=limit,
                    device_id=device if backend == "nccl" else None,
                )
            except RuntimeError as error:
                raise RendezvousFailed(f"torch.distributed did not start: {error}") from error
        world = dist.group.WORLD
        assert world is not None  # init_process_group has just made it
        self.process_group: dist.ProcessGroup = world

    def destroy(self) -> None:
        """Give the group up without waiting for a peer longer than 5 s."""
        if os.getpid() != self._owner or dist.group.WORLD is not self.process_group:
            return  # a forked child's copy, or the caller has destroyed it
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


def _backend(group: Messages, device: torch.device) -> str:
    """NCCL where every rank has a GPU of its own; it refuses ranks that share one."""
    if device.type != "cuda":
        return "gloo"
    gpus = group.all_gather(str(torch.cuda.get_device_properties(device).uuid))
    return "nccl" if len(set(gpus)) == len(gpus) else "gloo"


@contextlib.contextmanager
def unless_set(name: str, value: str) -> Iterator[None]:
    """Inside, an environment variable is `value`, unless the user chose another."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
