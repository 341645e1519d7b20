"""Ranks that some launcher started find out whether they share a host, and meet.

They can already exchange small values, through a store (`store.py`) or an engine's own means; that
serves only to say who they are and to hand out the meeting's directory and nonce. A rank that does
not see the directory, because it runs in a container with mounts of its own, reaches it through the
root directory of rank 0's process. Where one cannot, all meet in /dev/shm instead. Either way they
come to Unix sockets, so authentication, descriptors and liveness do not depend on the path.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from weft.arguments import shown
from weft.errors import InvalidArgument, RendezvousFailed
from weft.memory.control_plane import ControlPlane
from weft.memory.meeting import Meeting
from weft.memory.peers import Peers, identity
from weft.memory.rendezvous import meet
from weft.memory.wire import JSON, text_of

_log = logging.getLogger(__name__)
T = TypeVar("T")
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
        place = mine.address if mine else None
        began = time.monotonic()
        said = exchange({**_host(), "place": place, "problem": problem})
        waited = time.monotonic() - began
        hosts = [_checked_host(r, each) for r, each in enumerate(said)]
        _log.debug("all %d ranks sent where they run within %.3f s", size, waited)
        if hosts[0].get("problem") is not None:
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
        first = _meeting_of(hosts[0].get("place"))
        places = first, first.in_shared_memory()
        for each in places:  # without this rank the meeting cannot succeed
            held.callback(each.remove)
        # All know the names before the directories are made: ranks that outlive rank 0 remove them.
        _swapped(exchange, [None, None])
        made = [_tried(each.make)[1] if rank == 0 else None for each in places]
        _swapped(exchange, made)  # nobody looks for a directory before it is there
        tried = [
            (None, problem) if problem else _tried(_reached, each, rank, watched, held)
            for each, problem in zip(places, made, strict=True)
        ]
        texts = _swapped(exchange, [problem for _, problem in tried])
        unreached = []
        for at, (meeting, _) in enumerate(tried):
            culprit = next((r for r in range(size) if texts[r][at] is not None), None)
            if culprit is None:
                assert meeting is not None  # this rank said so
                return meet(
                    meeting, rank=rank, size=size, device=device, timeout=timeout, peers=watched
                )
            where = ""
            if hosts[culprit]["host"] != hosts[0]["host"]:
                where = f"; rank 0 is on {_named(hosts[0])}, rank {culprit} on "
                where += _named(hosts[culprit])
            unreached.append(f"rank {culprit}: {text_of(texts[culprit][at])}{where}")
        raise RendezvousFailed(f"{unreached[0]}; in /dev/shm, too: {unreached[1]}. {_REMEDY}")


def _reached(meeting: Meeting, rank: int, peers: Peers, held: contextlib.ExitStack) -> Meeting:
    """A meeting as a rank reaches it: at its path or, with other mounts, below rank 0's root.

    `held` closes what the path there needs. Raises RendezvousFailed saying why neither opens.
    """
    try:
        os.close(meeting.enter())
        return meeting
    except RendezvousFailed as unseen:
        if rank == 0:
            raise
        try:
            root = peers.root(0)
            held.callback(os.close, root)
            found = meeting.below(root)
            os.close(found.enter())
        except RendezvousFailed as error:
            raise RendezvousFailed(
                f"{unseen}; nor can it be opened through the process of rank 0: {error}"
            ) from error
    _log.debug(
        "rank %d does not see %s and reaches it through the process of rank 0, as %s",
        *(rank, meeting.directory, found.directory),
    )
    held.callback(found.remove)
    return found


def _tried(step: Callable[..., T], *given: Any) -> tuple[T | None, str | None]:
    """What a step returned, or why it could not."""
    try:
        return step(*given), None
    except RendezvousFailed as error:
        return None, str(error)


def _swapped(exchange: Exchange, problems: list[str | None]) -> list[list[Any]]:
    """Of each rank, what keeps it from each place."""
    said = exchange({"problems": problems})
    for rank, each in enumerate(said):
        texts = each.get("problems") if isinstance(each, dict) else None
        if not isinstance(texts, list) or len(texts) != len(problems):
            raise RendezvousFailed(f"rank {rank} said {each!r:.200} where it meets the others")
    return [each["problems"] for each in said]


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
    return said


def _meeting_of(place: Any) -> Meeting:
    try:
        return Meeting.at(place if isinstance(place, str) else "")
    except InvalidArgument as error:
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
