# SPDX-License-Identifier: Apache-2.0
"""Check of the host's memory before CPU ranks allocate.

A new memfd uses no memory. Its pages are allocated at the first write, some when a share is
initialised, others in the first calls that are large enough. If the host is out of memory then, the
kernel kills a process, not necessarily the one that wrote. The size of a heap is therefore compared
with the available memory of the host before it is created, as if every byte were used.

All memory that the kernel could provide counts as available, so that no heap is rejected that would
fit: free and reclaimable memory, within every control group of a rank, and swap. Memory that other
processes or earlier heaps have reserved but not touched is unknown and counts as available. GPU
ranks need no check, because the driver allocates immediately.
"""

from __future__ import annotations

from pathlib import Path

from weft.errors import InvalidArgument
from weft.group.group import Group

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")  # in memory.stat


def check_host_memory(group: Group, bytes_each: int, *, label: str) -> None:
    """Raise InvalidArgument on every rank if `bytes_each` per rank exceeds the memory. Collective.

    Ranks in one control group share its limit. `label` names the object for errors.
    """
    if group.device.type != "cpu":
        return
    own_cgroup, bytes_left = find_tightest_cgroup()
    swap, host = _read_meminfo("SwapFree"), _read_meminfo("MemAvailable")
    own_limit = None if bytes_left is None else bytes_left + swap
    reports = group.all_gather([host + swap, own_cgroup, own_limit])
    gathered = {rank: reports[rank] for rank in group.living}
    num_ranks, total = len(gathered), len(gathered) * bytes_each
    min_available = min(available for available, _, _ in gathered.values())
    if total > min_available:
        rank = next(r for r, (available, _, _) in gathered.items() if available == min_available)
        raise InvalidArgument(
            f"{label} needs {_format_size(bytes_each)} on each of {num_ranks} ranks, "
            f"{_format_size(total)} in total; rank {rank} sees {_format_size(min_available)} "
            f"available on this host (MemAvailable and SwapFree in /proc/meminfo): {_REMEDY}"
        )
    for rank, (_, cgroup, limit) in gathered.items():
        count = sum(other == cgroup for _, other, _ in gathered.values())
        if limit is not None and count * bytes_each > limit:
            raise InvalidArgument(
                f"{label} needs {_format_size(bytes_each)} on each of {num_ranks} ranks, "
                f"{_format_size(count * bytes_each)} in total for the {count} in the control group "
                f"of rank {rank}, which has {_format_size(limit)} left ({cgroup}): raise its "
                f"memory limit, or {_REMEDY}"
            )


def find_tightest_cgroup() -> tuple[str, int | None]:
    """Return the control group of this process with the least memory left, and the bytes left.

    The bytes are None if no limit is known, as with control groups of version 1. A container may
    see its own group at the root only.
    """
    remaining: list[tuple[int, str]] = []
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        return "", None
    for path in [line.removeprefix("0::/") for line in lines if line.startswith("0::/")]:
        folder = CGROUPS / path
        for cgroup in (folder, *folder.parents):
            left = _read_bytes_left(cgroup)
            if left is not None:
                remaining.append((left, str(cgroup)))
            if cgroup == CGROUPS:
                break
    if not remaining:
        return "", None
    left, tightest = min(remaining)
    return tightest, left


def _read_bytes_left(folder: Path) -> int | None:
    """Return the bytes left in a control group, or None if it has no limit."""
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        stat = (folder / "memory.stat").read_text().split()
    except (OSError, ValueError):  # "max", or no such file
        return None
    counts = dict(zip(stat[::2], stat[1::2], strict=False))
    return max(0, limit - used + sum(int(counts.get(name, 0)) for name in _RECLAIMABLE))


def _read_meminfo(name: str) -> int:
    for line in (PROC / "meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    return 0


def _format_size(count: int) -> str:
    return f"{count / 1e9:.2f} GB ({count} bytes)"


_REMEDY = (
    "reduce its sizes (max_tokens, hidden, slots) or the number of ranks; `memory_bytes` of each "
    "operator returns its size without allocating it"
)
