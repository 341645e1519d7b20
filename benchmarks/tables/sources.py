"""What tables of several operators read: records of others, targets, and the machine's limits."""

from __future__ import annotations

from typing import Any, TypeAlias

from benchmarks.series import Series, series

Cells: TypeAlias = "Series | list[Any] | None"
Tables: TypeAlias = "dict[str, list[tuple[str, Cells]]]"  # name -> label and cells of each row

ABLATION = "alltoall-ladder-8xH200-2026-11-20.json"
PEERS = "peers-8xH200.json"
PROBES = "limits-8xH200-2026-11-20.json"
SIZES = [1 << power for power in range(13)]  # tokens a rank


def target(name: str) -> Series:
    """What was to be reached."""
    return series(f"targets.json/{name}/*")


def gpus(ranks: int) -> list[str]:
    """So many H200s."""
    return ["NVIDIA H200"] * ranks


def others_pair(record: int) -> Series:
    """Dispatch + combine of another library, as recorded."""
    return series(f"{PEERS}/records/{record}/pair_us/*")


def others_reduce(record: int) -> Series:
    """An all-reduce of another library, as recorded."""
    return series(f"{PEERS}/allreduce/{record}/us/*")


def others_layer(record: int) -> Series:
    """A layer of another library, as published."""
    return series(f"{PEERS}/layers/{record}/us/*")
