# SPDX-License-Identifier: Apache-2.0
"""What the hardware allows, as far as it was measured: the floor that every row is held against.

A floor is a bound, so its numbers are the best that anything reached and a little more, and not
what one probe did: plain 16-byte stores of 132 CTAs pushed 334 GB/s per GPU and direction on 8
GPUs, but between 2048 and 4096 tokens a pair of 4 GPUs carried 336, and of 2 GPUs 348. Memory was
read at 4.37 and 4.41 TB/s by plain sums, and at 4.55 by two grouped products. An empty kernel in a
graph takes 0.78 us. A barrier of 8 GPUs takes 1.5 us, but the fastest all-reduce in two shots, of
32 tokens on 4 GPUs, left 1.35 for each of its two ways through the links. A pair of dispatch and
combine is two kernels and two such ways, an all-reduce one kernel and one or two ways. A figure
below its floor means that these numbers are wrong: a test looks for one among all that are
recorded. Sources: `benchmarks/results/2026-11-20-8xH200/limits.json`,
`benchmarks/results/2026-11-21-4xH200/alltoall.json` for fewer GPUs, and
`benchmarks/results/2026-11-21-1xH200/gemm-halves.json` for weights.

A kind of GPU is known by its whole name: a GH200 or an H200 NVL is no H200 of an SXM board.
"""

from __future__ import annotations

PAIR_OF_GPUS_GB_PER_S, LINK_GB_PER_S = 350.0, 340.0  # of 2 GPUs, of more: highest, rounded up
KERNEL_US, WAY_US = 0.78, 1.2
PAIR_FIXED_US = 2 * (KERNEL_US + WAY_US)
ONE_WAY_FIXED_US, TWO_WAY_FIXED_US = KERNEL_US + WAY_US, KERNEL_US + 2 * WAY_US
HBM_READ_TB_PER_S = 4.6  # the sheet says 4.8
GPU = "NVIDIA H200"  # by torch.cuda.get_device_name; HBM3e, NVLink4 over NVSwitch


def link_rate(ranks: int) -> float:
    """GB/s of one GPU and direction that no figure of so many ranks was above."""
    return PAIR_OF_GPUS_GB_PER_S if ranks <= 2 else LINK_GB_PER_S


def why_no_floor(gpus: list[str]) -> str | None:
    """Say why these GPUs have no floor, or return None where they have one.

    gpus: the ranks' GPU names; empty for CPU ranks, whose figures need no such line.
    """
    others = sorted({name for name in gpus if name != GPU})
    if not others:
        return None
    return (
        f"No floor: what {', '.join(others)} allows was not measured; weft/bench/limits.py has "
        f"{GPU} alone."
    )


def _known(gpus: list[str]) -> bool:
    return bool(gpus) and all(name == GPU for name in gpus)


def pair_floor_us(dispatch_bytes: int, combine_bytes: int, gpus: list[str]) -> float | None:
    """Return the least time in us of one dispatch + combine, or None where nothing was measured.

    dispatch_bytes, combine_bytes: bytes that leave or enter the busiest rank, each way.
    gpus: the ranks' GPU names; empty for CPU ranks.
    """
    if not _known(gpus):
        return None
    return (dispatch_bytes + combine_bytes) / (link_rate(len(gpus)) * 1e3) + PAIR_FIXED_US


def allreduce_floor_us(payload: int, ranks: int, gpus: list[str]) -> float | None:
    """Return the least time in us of one all-reduce, or None where nothing was measured.

    payload: bytes of one rank's rows.  gpus: as in pair_floor_us.

    The least over what a rank may do: send its rows to every peer, one way through the links; or
    send each row to an owner and each sum to all, two ways.
    """
    if not _known(gpus):
        return None
    rate = link_rate(ranks) * 1e3
    once, twice = (ranks - 1) * payload, 2 * (ranks - 1) / ranks * payload
    return min(
        once / rate + ONE_WAY_FIXED_US,
        twice / rate + TWO_WAY_FIXED_US,
    )


def layer_floor_us(hbm_bytes: int, wire_bytes: int, gpus: list[str]) -> float | None:
    """Return the least time in us of one MoE layer, or None where nothing was measured.

    hbm_bytes: that the busiest rank moves through its memory.   wire_bytes: that leave or enter the
    busiest rank, both ways added.   gpus: as in pair_floor_us.

    Work that overlaps perfectly takes the longer of memory and links, none less.
    """
    if not _known(gpus):
        return None
    memory_us = hbm_bytes / (HBM_READ_TB_PER_S * 1e6)
    return max(memory_us, wire_bytes / (link_rate(len(gpus)) * 1e3))
