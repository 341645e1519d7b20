# SPDX-License-Identifier: Apache-2.0
"""Measured hardware limits, from which each row's floor is computed.

A floor is a bound. Its numbers are therefore the best that any measurement reached, rounded up, and
not the result of one probe.

- Links: plain 16-byte stores of 132 CTAs pushed 334 GB/s per GPU and direction on 8 GPUs, but
  between 2048 and 4096 tokens a pair of 4 GPUs reached 336, and of 2 GPUs 348.
- Memory: plain sums read 4.37 and 4.41 TB/s, two grouped GEMMs 4.55.
- Latency: an empty kernel in a graph takes 0.78 us. A barrier of 8 GPUs takes 1.5 us, but the
  fastest two-shot all-reduce, of 32 tokens on 4 GPUs, left 1.35 us for each of its two ways through
  the links. A pair of dispatch and combine is two kernels and two ways, an all-reduce one kernel
  and one or two ways.

A measurement below its floor means that these numbers are wrong; a test checks all recorded
results.
Sources: `benchmarks/results/2026-11-20-8xH200/limits.json`,
`benchmarks/results/2026-11-21-4xH200/alltoall.json` for fewer GPUs, and
`benchmarks/results/2026-11-21-1xH200/gemm-halves.json` for weights.

GPUs are identified by their full name: a GH200 or an H200 NVL differs from an H200 SXM.
"""

from __future__ import annotations

PAIR_OF_GPUS_GB_PER_S, LINK_GB_PER_S = 350.0, 340.0  # for 2 GPUs and for more, rounded up
KERNEL_US, WAY_US = 0.78, 1.2
PAIR_FIXED_US = 2 * (KERNEL_US + WAY_US)
ONE_WAY_FIXED_US, TWO_WAY_FIXED_US = KERNEL_US + WAY_US, KERNEL_US + 2 * WAY_US
HBM_READ_TB_PER_S = 4.6  # the data sheet says 4.8
GPU = "NVIDIA H200"  # from torch.cuda.get_device_name; HBM3e, NVLink4 over NVSwitch


def link_rate(ranks: int) -> float:
    """Return the highest GB/s of one GPU and direction for this number of ranks."""
    return PAIR_OF_GPUS_GB_PER_S if ranks <= 2 else LINK_GB_PER_S


def why_no_floor(gpus: list[str]) -> str | None:
    """Return why these GPUs have no floor, or None if they have one.

    `gpus` are the ranks' GPU names, empty for CPU ranks, which need no explanation.
    """
    others = sorted({name for name in gpus if name != GPU})
    if not others:
        return None
    return f"No floor: weft/bench/limits.py has limits of {GPU} only, not of {', '.join(others)}."


def _known(gpus: list[str]) -> bool:
    return bool(gpus) and all(name == GPU for name in gpus)


def pair_floor_us(dispatch_bytes: int, combine_bytes: int, gpus: list[str]) -> float | None:
    """Return the least us of one dispatch and combine, or None if unknown.

    Args:
        dispatch_bytes: Bytes that leave or enter the busiest rank in dispatch.
        combine_bytes: Bytes that leave or enter the busiest rank in combine.
        gpus: The ranks' GPU names, empty for CPU ranks.
    """
    if not _known(gpus):
        return None
    return (dispatch_bytes + combine_bytes) / (link_rate(len(gpus)) * 1e3) + PAIR_FIXED_US


def allreduce_floor_us(payload: int, ranks: int, gpus: list[str]) -> float | None:
    """Return the least us of one all-reduce, or None if unknown.

    It is the lesser of one-shot, where each rank sends its rows to every peer, and two-shot, where
    rows go to an owner and sums to all ranks.

    Args:
        payload: Bytes of one rank's rows.
        ranks: Number of ranks.
        gpus: The ranks' GPU names, empty for CPU ranks.
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
    """Return the least us of one MoE layer, or None if unknown.

    With perfect overlap, a layer takes the longer of its memory's and its links' time.

    Args:
        hbm_bytes: Bytes that the busiest rank moves through its memory.
        wire_bytes: Bytes that leave or enter the busiest rank, both ways added.
        gpus: The ranks' GPU names, empty for CPU ranks.
    """
    if not _known(gpus):
        return None
    memory_us = hbm_bytes / (HBM_READ_TB_PER_S * 1e6)
    return max(memory_us, wire_bytes / (link_rate(len(gpus)) * 1e3))
