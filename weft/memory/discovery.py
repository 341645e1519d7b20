"""Ranks that some launcher started find out whether they share a host, and meet.

They can already exchange small values, through a torch process group or a store; that serves only
to hand out the meeting's directory and nonce.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from weft.arguments import shown
from weft.errors import InvalidArgument, RendezvousFailed
from weft.memory.rendezvous import Meeting, meet
from weft.memory.wire import JSON, encode

if TYPE_CHECKING:
    from weft.memory.star import Star

Exchange = Callable[[JSON], list[Any]]
_env_groups = 0  # from_env calls of this process: each has keys of its own in the store


def find(exchange: Exchange, rank: int, size: int, device: str, timeout: float) -> Star:
    """Meet ranks that can already exchange small values: compare hosts, then connect."""
    hosts = exchange(_host())
    if any(host != hosts[0] for host in hosts):
        other = next(r for r, host in enumerate(hosts) if host != hosts[0])
        raise RendezvousFailed(
            f"the ranks are on several hosts: rank 0 on {_named(hosts[0])}, rank {other} on "
            f"{_named(hosts[other])}. Shared memory needs one host: make one group a host, or use "
            "weft.CollectiveAllToAll for groups that span nodes"
        )
    meeting, offer = None, None
    if rank == 0:
        try:
            meeting = Meeting.open()
            offer = {"directory": meeting.directory, "nonce": meeting.nonce.hex()}
        except OSError as error:
            offer = {"problem": f"rank 0 cannot make a directory to meet in: {error}"}
    offer = exchange(offer)[0]
    if "problem" in offer:
        raise RendezvousFailed(f"{offer['problem']}; set TMPDIR to a directory that is writable")
    meeting = Meeting(offer["directory"], bytes.fromhex(offer["nonce"]))
    return meet(meeting, rank=rank, size=size, device=device, timeout=timeout)


def _host() -> dict[str, JSON]:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return {"host": socket.gethostname(), "boot": file.read().strip()}


def _named(host: Mapping[str, str]) -> str:
    return f"{host['host']} (boot {host['boot'][:8]})"


def environment() -> tuple[int, int, int | None]:
    """RANK, WORLD_SIZE and LOCAL_RANK (None where unset). Raises RendezvousFailed."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise RendezvousFailed(
            f"{', '.join(missing)} not set in the environment: start the ranks with torchrun, or "
            "use weft.launch"
        )
    local = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else None
    return _number("RANK"), _number("WORLD_SIZE"), local


def store_exchange(rank: int, size: int, timeout: float) -> tuple[Store, Exchange]:
    """An exchange through the TCPStore that torchrun's variables name."""
    global _env_groups
    _env_groups += 1
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # torchrun's agent serves the store itself; other launchers leave it to rank 0.
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], _number("MASTER_PORT")
    try:
        tcp = TCPStore(
            address,
            port,
            size,
            rank == 0 and not served,
            timedelta(seconds=timeout),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except RuntimeError as error:
        raise RendezvousFailed(
            f"rank {rank} cannot reach the store at {address}:{port}: {error}; check MASTER_ADDR "
            "and MASTER_PORT"
        ) from error
    store = PrefixStore(f"weft/{attempt}/{_env_groups}", tcp)
    turn = 0

    def exchange(value: JSON) -> list[Any]:
        nonlocal turn
        turn += 1
        try:
            store.set(f"{turn}/{rank}", encode(value).decode())
            return [json.loads(store.get(f"{turn}/{r}")) for r in range(size)]
        except RuntimeError as error:
            raise RendezvousFailed(
                f"not all {size} ranks came to the store at {address}:{port} within "
                f"{timeout:g} s: {error}"
            ) from error

    return store, exchange


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


def _number(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError:
        raise RendezvousFailed(f"{name} is {os.environ[name]!r}, not an integer") from None
