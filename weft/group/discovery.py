# SPDX-License-Identifier: Apache-2.0
"""Ranks that some launcher started find out whether they share a host, and meet.

They can already exchange small values, over a torch process group or by an engine's own means. One
exchange says who they are and hands out the address of the meeting. What follows goes over Unix
sockets, so authentication, descriptors and liveness do not depend on it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.arguments import shown
from weft.errors import InvalidArgument, RendezvousFailed
from weft.group.control import ControlPlane
from weft.group.liveness import Peers, identity
from weft.group.meeting import Meeting, meet
from weft.group.wire import JSON, text_of

Exchange = Callable[[JSON], list[Any]]


def find(exchange: Exchange, rank: int, size: int, device: str, timeout: float) -> ControlPlane:
    """Meet ranks that can already exchange small values: compare hosts, then connect."""
    mine, problem = None, None
    if rank == 0:
        try:
            mine = Meeting.open()
        except RendezvousFailed as error:
            problem = f"rank 0: {error}"
    try:
        with Peers() as peers:
            address = None if mine is None else mine.address
            said = exchange({**this_host(), **identity(), "meeting": address, "problem": problem})
            meeting = mine or _checked_meeting(said)
            _check_hosts(said)
            for r, each in enumerate(said):
                if r != rank:
                    peers.watch(r, each)
            return meet(meeting, rank=rank, size=size, device=device, timeout=timeout, peers=peers)
    except BaseException as error:
        if mine is not None:
            mine.close(str(error))
        raise


def _check_hosts(said: list[Any]) -> None:
    """Can the ranks share memory, and sockets? Raises RendezvousFailed on each alike."""
    check_said(said, ("host", "boot", "network"))
    for r, each in enumerate(said):
        first = said[0]
        if each["boot"] != first["boot"]:
            raise RendezvousFailed(
                f"the ranks are on several hosts: rank 0 on {_named(first)}, rank {r} on "
                f"{_named(each)}. Shared memory needs one host: call init_process_group "
                "and weft.Group.from_torch(), which serves several"
            )
        if each["network"] != first["network"]:
            raise RendezvousFailed(
                f"rank 0 on {_named(first)} is in network namespace {text_of(first['network'])}, "
                f"rank {r} on {_named(each)} in {text_of(each['network'])}: ranks meet over Unix "
                "sockets of one network namespace; give their containers one, as those of a pod "
                "have (--network=host)"
            )


def check_said(said: list[Any], names: Sequence[str]) -> None:
    """Has every rank sent texts by these names, of where it runs? Raises RendezvousFailed."""
    for rank, each in enumerate(said):
        if not isinstance(each, dict) or not all(isinstance(each.get(name), str) for name in names):
            raise RendezvousFailed(
                f"rank {rank} was to send where it runs and sent {each!r:.200}: it is no rank of "
                "this weft, or somebody else wrote in its place"
            )


def _checked_meeting(said: list[Any]) -> Meeting:
    """Where rank 0 has every rank meet."""
    first = said[0] if isinstance(said[0], dict) else {}
    if first.get("problem") is not None:
        raise RendezvousFailed(text_of(first["problem"]))
    address = first.get("meeting")
    try:
        return Meeting.at(address if isinstance(address, str) else "")
    except InvalidArgument as error:
        raise RendezvousFailed(
            f"rank 0 was to send where to meet, but {text_of(str(error))}: it is no rank of this "
            "weft, or somebody else wrote in its place"
        ) from error


def this_host() -> dict[str, JSON]:
    """The host of this process, by its boot: containers have host names of their own."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    network = os.readlink("/proc/self/ns/net")
    return {"host": socket.gethostname(), "boot": boot, "network": network}


def _named(host: dict[str, Any]) -> str:
    return f"{text_of(host['host'])} (boot {text_of(host['boot'])[:8]})"


def default_device(given: torch.device | str | None) -> torch.device:
    """The rank's device: as given, else the current GPU, else the CPU.

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
    whole = device is not None and device.type == "cuda" and device.index is None
    if whole and torch.version.cuda is None:
        raise InvalidArgument(
            f"device is {shown(given)}, but this torch, {torch.__version__}, is built without "
            'CUDA: use "cpu", or install a torch for CUDA'
        )
    if device is None or (device.type == "cuda" and device.index is None):
        return torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f'device is {shown(given)}: weft runs on "cpu" and "cuda"')
    return device
