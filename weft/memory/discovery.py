"""Ranks that some launcher started find out whether they share a host, and meet.

They can already exchange small values, through a torch process group or a store (`store.py`); that
serves only to say who they are and to hand out the meeting's directory and nonce.
"""

from __future__ import annotations

import logging
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
    from weft.memory.star import Star

_log = logging.getLogger(__name__)
Exchange = Callable[[JSON], list[Any]]


def find(
    exchange: Exchange,
    rank: int,
    size: int,
    device: str,
    timeout: float,
    peers: Peers | None = None,
) -> Star:
    """Meet ranks that can already exchange small values: compare hosts, then connect.

    `exchange` may look after `peers` while it waits: they are filled as soon as it returned once.
    """
    with Peers() if peers is None else peers as watched:
        mine, problem = None, None
        try:
            mine = Meeting.draw() if rank == 0 else None
        except RendezvousFailed as error:
            problem = f"rank 0: {error}"
        # The directory is made after its name was told: whoever outlives rank 0 can remove it.
        place = {"directory": mine.directory, "nonce": mine.nonce.hex()} if mine else None
        began = time.monotonic()
        said = exchange({**_host(), "place": place, "problem": problem})
        waited = time.monotonic() - began
        hosts = [_checked_host(r, each) for r, each in enumerate(said)]
        _log.debug("all %d ranks told where they run within %.3f s", size, waited)
        if hosts[0]["problem"] is not None:
            raise RendezvousFailed(text_of(hosts[0]["problem"]))
        other = next((r for r, host in enumerate(hosts) if host["boot"] != hosts[0]["boot"]), None)
        if other is not None:
            raise RendezvousFailed(
                f"the ranks are on several hosts: rank 0 on {_named(hosts[0])}, rank {other} on "
                f"{_named(hosts[other])}. Shared memory needs one host: make one group a host, or "
                "use weft.CollectiveAllToAll for groups that span nodes"
            )
        for r, host in enumerate(hosts):
            if r != rank:
                watched.heard(r, host)
        meeting = _told_meeting(hosts[0]["place"])
        try:
            _agree(exchange, meeting.make if rank == 0 else None, hosts)
            _agree(exchange, meeting.check, hosts)
            return meet(
                meeting, rank=rank, size=size, device=device, timeout=timeout, peers=watched
            )
        except BaseException:
            # Whoever fails: without this rank it cannot succeed, and rank 0 may have died.
            meeting.remove()
            raise


def _agree(
    exchange: Exchange, step: Callable[[], None] | None, hosts: list[dict[str, Any]]
) -> None:
    """Take a step of the meeting and raise RendezvousFailed on every rank if one could not."""
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
            raise RendezvousFailed(f"rank {rank}: {text_of(said['problem'])}{where}")


def _host() -> dict[str, JSON]:
    """This process, and the host by its boot: containers have host names of their own."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return {"host": socket.gethostname(), "boot": file.read().strip(), **identity()}


def _checked_host(rank: int, said: Any) -> dict[str, Any]:
    """What rank `rank` told of itself, if it told of itself."""
    texts = ("host", "boot")
    if not isinstance(said, dict) or not all(isinstance(said.get(name), str) for name in texts):
        raise RendezvousFailed(
            f"rank {rank} was to tell where it runs and said {said!r:.200}: it is no rank of this "
            "weft, or somebody else wrote in its place"
        )
    return {"place": None, "problem": None, **said}


def _told_meeting(place: Any) -> Meeting:
    said = place if isinstance(place, dict) else {}
    try:
        return Meeting.told(said.get("directory"), said.get("nonce"))
    except ValueError as error:
        raise RendezvousFailed(
            f"rank 0 was to tell where to meet and {text_of(str(error))}: it is no rank of this "
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
