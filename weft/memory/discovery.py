"""Ranks that some launcher started find out whether they share a host, and meet.

They can already exchange small values, through a torch process group or a store (`store.py`); that
serves only to say who they are and to hand out the meeting's directory and nonce. A rank that does
not see the directory, because it runs in a container with mounts of its own, reaches it through the
root directory of rank 0's process. Where one cannot, all try /dev/shm instead. Either way they come
to one Unix socket, so authentication, descriptors and liveness do not depend on the path.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from weft.arguments import shown
from weft.errors import InvalidArgument, RendezvousFailed
from weft.memory.meeting import Meeting
from weft.memory.peers import Peers, identity
from weft.memory.rendezvous import meet
from weft.memory.wire import JSON, text_of

if TYPE_CHECKING:
    from weft.memory.control_plane import ControlPlane

_log = logging.getLogger(__name__)
Exchange = Callable[[JSON], list[Any]]
_REMEDY = (
    "Set TMPDIR to a directory that all ranks see, in containers a volume mounted at one path in "
    "each; or give the containers one pid namespace (--pid=host, or shareProcessNamespace in a "
    "pod) or one /dev/shm (--ipc=host)"
)


def find(
    exchange: Exchange,
    rank: int,
    size: int,
    device: str,
    timeout: float,
    peers: Peers | None = None,
) -> ControlPlane:
    """Meet ranks that can already exchange small values: compare hosts, then connect.

    `exchange` may look after `peers` while it waits: they are filled as soon as it returned once.
    """
    with Peers() if peers is None else peers as watched, contextlib.ExitStack() as held:
        mine, problem = None, None
        try:
            mine = Meeting.draw() if rank == 0 else None
        except RendezvousFailed as error:
            problem = f"rank 0: {error}"
        # The directory is made after its name was sent: ranks that outlive rank 0 can remove it.
        place = {"directory": mine.directory, "nonce": mine.nonce.hex()} if mine else None
        began = time.monotonic()
        said = exchange({**_host(), "place": place, "problem": problem})
        waited = time.monotonic() - began
        hosts = [_checked_host(r, each) for r, each in enumerate(said)]
        _log.debug("all %d ranks sent where they run within %.3f s", size, waited)
        if hosts[0]["problem"] is not None:
            raise RendezvousFailed(text_of(hosts[0]["problem"]))
        other = next((r for r, host in enumerate(hosts) if host["boot"] != hosts[0]["boot"]), None)
        if other is not None:
            raise RendezvousFailed(
                f"the ranks are on several hosts: rank 0 on {_named(hosts[0])}, rank {other} on "
                f"{_named(hosts[other])}. Shared memory needs one host: call init_process_group "
                "and weft.Group.from_torch(), which serves several"
            )
        for r, host in enumerate(hosts):
            if r != rank:
                watched.watch(r, host)
        first, problems = _meeting_of(hosts[0]["place"]), []
        for meeting in (first, first.in_shared_memory()):
            resolver = _PathResolver(meeting, rank, watched, held)
            try:
                _agree(exchange, meeting.make if rank == 0 else None, hosts)
                _agree(exchange, resolver.find, hosts)
                return meet(
                    resolver.meeting,
                    rank=rank,
                    size=size,
                    device=device,
                    timeout=timeout,
                    peers=watched,
                )
            except BaseException as error:
                # Without this rank the meeting cannot succeed, and rank 0 may have died.
                resolver.meeting.remove()
                if not isinstance(error, _NotHere):
                    raise
                problems.append(str(error))
        raise RendezvousFailed(f"{problems[0]}; in /dev/shm, too: {problems[1]}. {_REMEDY}")


class _NotHere(RendezvousFailed):
    """Not every rank reaches this place. Every rank raises it, so all can try another one."""


class _PathResolver:
    """Where a rank reaches a meeting: at rank 0's path or, with other mounts, below rank 0's root.

    `meeting` is the meeting as this rank reaches it; `held` closes what the path there needs.
    """

    def __init__(
        self, meeting: Meeting, rank: int, peers: Peers, held: contextlib.ExitStack
    ) -> None:
        self.meeting = meeting
        self._rank = rank
        self._peers = peers
        self._held = held

    def find(self) -> None:
        """Set `meeting`. Raises RendezvousFailed saying why neither path can be opened."""
        try:
            self.meeting.check()
            return
        except RendezvousFailed as unseen:
            if self._rank == 0:
                raise
            try:
                root = self._peers.root(0)
                self._held.callback(os.close, root)
                found = self.meeting.below(root)
                found.check()
            except RendezvousFailed as error:
                raise RendezvousFailed(
                    f"{unseen}; nor can it be opened through the process of rank 0: {error}"
                ) from error
        _log.debug(
            "rank %d does not see %s and reaches it through the process of rank 0, as %s",
            *(self._rank, self.meeting.directory, found.directory),
        )
        self.meeting = found


def _agree(
    exchange: Exchange, step: Callable[[], None] | None, hosts: list[dict[str, Any]]
) -> None:
    """Take a step of the meeting and raise _NotHere on every rank if one could not."""
    problem = None
    try:
        if step is not None:
            step()
    except RendezvousFailed as error:
        problem = str(error)
    for rank, said in enumerate(exchange({"problem": problem})):
        if not isinstance(said, dict) or "problem" not in said:
            raise RendezvousFailed(f"rank {rank} said {said!r:.200} where it meets the others")
        if said["problem"] is not None:
            where = ""
            if hosts[rank]["host"] != hosts[0]["host"]:
                where = f"; rank 0 is on {_named(hosts[0])}, rank {rank} on {_named(hosts[rank])}"
            raise _NotHere(f"rank {rank}: {text_of(said['problem'])}{where}")


def _host() -> dict[str, JSON]:
    """This process, and the host by its boot: containers have host names of their own."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return {"host": socket.gethostname(), "boot": file.read().strip(), **identity()}


def _checked_host(rank: int, said: Any) -> dict[str, Any]:
    """What rank `rank` sent of itself, if that is what it sent."""
    texts = ("host", "boot")
    if not isinstance(said, dict) or not all(isinstance(said.get(name), str) for name in texts):
        raise RendezvousFailed(
            f"rank {rank} was to send where it runs and sent {said!r:.200}: it is no rank of this "
            "weft, or somebody else wrote in its place"
        )
    return {"place": None, "problem": None, **said}


def _meeting_of(place: Any) -> Meeting:
    said = place if isinstance(place, dict) else {}
    try:
        return Meeting.received(said.get("directory"), said.get("nonce"))
    except ValueError as error:
        raise RendezvousFailed(
            f"rank 0 was to send where to meet, but {text_of(str(error))}: it is no rank of this "
            "weft, or somebody else wrote in its place"
        ) from error


def _named(host: dict[str, Any]) -> str:
    return f"{text_of(host['host'])} (boot {text_of(host['boot'])[:8]})"


def default_device(given: torch.device | str | None, local_rank: int | None = None) -> torch.device:
    """The rank's device: as given, else cuda:local_rank or the current one, else the CPU.

    Raises InvalidArgument for what is no device of weft's.
    """
    try:
        if given is not None and not isinstance(given, str | torch.device):
            raise RuntimeError  # a bare number would be a GPU's, of any kind
        device = None if given is None else torch.device(given)
    except RuntimeError as error:
        raise InvalidArgument(
            f'device is {shown(given)}: weft runs on "cpu" and "cuda", or "cuda:0" and so on'
        ) from error
    if device is None and not torch.cuda.is_available():
        return torch.device("cpu")
    if device is None or (device.type == "cuda" and device.index is None):
        # A launcher may show each rank its own GPU alone; then the local rank is no index.
        if local_rank is not None and local_rank < torch.cuda.device_count():
            return torch.device("cuda", local_rank)
        return torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f'device is {shown(given)}: weft runs on "cpu" and "cuda"')
    return device
