# SPDX-License-Identifier: Apache-2.0
"""Check of the host's memory before CPU ranks allocate.

A memfd takes no memory when it is created. Its pages are allocated at the first write, some when a
share is initialised, others in the first calls that are large enough. Then it is too late to
refuse: if there is no page, the kernel kills a process, and not always the one that asked. A size
is therefore compared with the memory of the host before anything is created, as if every byte were
used.

Everything counts that the kernel could give, so that nothing is refused that would fit: memory that
is free or can be reclaimed, within every control group of a rank, and swap. Memory that other
processes or earlier shares of weft were promised and have not touched is unknown and not counted.
GPU ranks need no check, because the driver allocates at once.
"""

from __future__ import annotations

from pathlib import Path

from weft.errors import InvalidArgument
from weft.group.group import Group

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")  # in memory.stat


def check_host_memory(group: Group, bytes_each: int, *, what: str) -> None:
    """Raise InvalidArgument, equal on every rank, if `bytes_each` per rank cannot fit. Collective.

    Ranks in one control group share its limit. `what` names the object for errors.
    """
    if group.device.type != "cpu":
        return
    place, bound = control_group()
    swap, host = _read_meminfo("SwapFree"), _read_meminfo("MemAvailable")
    reports = group.all_gather([host + swap, place, None if bound is None else bound + swap])
    gathered = {rank: reports[rank] for rank in group.living}
    ranks, total = len(gathered), len(gathered) * bytes_each
    least = min(available for available, _, _ in gathered.values())
    if total > least:
        rank = next(r for r, (available, _, _) in gathered.items() if available == least)
        raise InvalidArgument(
            f"{what} takes {_size(bytes_each)} on each of {ranks} ranks, {_size(total)} together; "
            f"rank {rank} sees {_size(least)} available on this host (MemAvailable and SwapFree in "
            f"/proc/meminfo): {_REMEDY}"
        )
    for rank, (_, where, limit) in gathered.items():
        inside = sum(other == where for _, other, _ in gathered.values())
        if limit is not None and inside * bytes_each > limit:
            raise InvalidArgument(
                f"{what} takes {_size(bytes_each)} on each of {ranks} ranks, "
                f"{_size(inside * bytes_each)} together for the {inside} in the control group of "
                f"rank {rank}, which has {_size(limit)} left ({where}): raise its memory limit, or "
                f"{_REMEDY}"
            )


def control_group() -> tuple[str, int | None]:
    """Return the tightest control group of this process, and the bytes that it may still take.

    None if no limit is known, as with control groups of version 1. A container may show its own
    group at the root only.
    """
    remaining: list[tuple[int, str]] = []
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return "", None
    for path in [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]:
        folder = CGROUPS / path
        for each in (folder, *folder.parents):
            left = _bytes_left(each)
            if left is not None:
                remaining.append((left, str(each)))
            if each == CGROUPS:
                break
    if not remaining:
        return "", None
    left, place = min(remaining)
    return place, left


def _bytes_left(folder: Path) -> int | None:
    """Return the bytes that a control group may still take, or None without a limit."""
    try:
        most = int((folder / "memory.max").read_text())
        taken = int((folder / "memory.current").read_text())
        stat = (folder / "memory.stat").read_text().split()
    except (OSError, ValueError):  # "max", or no such file
        return None
    held = dict(zip(stat[::2], stat[1::2], strict=False))
    return max(0, most - taken + sum(int(held.get(name, 0)) for name in _RECLAIMABLE))


def _read_meminfo(name: str) -> int:
    for line in (PROC / "meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB ({count} bytes)"


_REMEDY = (
    "build it smaller (max_tokens, hidden, slots) or with fewer ranks; the `memory_bytes` of what "
    "you build returns its bytes before anything is allocated"
)
