# SPDX-License-Identifier: Apache-2.0
"""Measured hardware limits, from which each row's floor is computed.

A floor is a lower bound on time. It is therefore computed from the best values that any measurement
reached, rounded up, and not from the result of one probe.

- Links: plain 16-byte stores of 132 CTAs pushed 334 GB/s per GPU and direction on 8 GPUs, but
  between 2048 and 4096 tokens a pair of 4 GPUs reached 336, and of 2 GPUs 348.
- Memory: plain sums read 4.37 and 4.41 TB/s, two grouped GEMMs 4.55.
- Latency: an empty kernel in a graph takes 0.78 us. A barrier of 8 GPUs takes 1.5 us, but the
  fastest two-shot all-reduce, of 32 tokens on 4 GPUs, left 1.35 us for each of its two link
  crossings. A pair of dispatch and combine is two kernels and two crossings, an all-reduce one
  kernel and one or two crossings.

A measurement below its floor means that these numbers are wrong; a test checks all recorded
results.
Sources: `benchmarks/results/2026-11-20-8xH200/limits.json`,
`benchmarks/results/2026-11-21-4xH200/alltoall.json` for fewer GPUs, and
`benchmarks/results/2026-11-21-1xH200/gemm-halves.json` for weights.

GPUs are identified by their full name: a GH200 or an H200 NVL differs from an H200 SXM.
"""

from __future__ import annotations

PAIR_OF_GPUS_GB_PER_S, LINK_GB_PER_S = 350.0, 340.0  # for 2 GPUs and for more, rounded up
KERNEL_US, CROSSING_US = 0.78, 1.2
PAIR_FIXED_US = 2 * (KERNEL_US + CROSSING_US)
ONESHOT_FIXED_US, TWOSHOT_FIXED_US = KERNEL_US + CROSSING_US, KERNEL_US + 2 * CROSSING_US
HBM_READ_TB_PER_S = 4.6  # the data sheet says 4.8
GPU = "NVIDIA H200"  # from torch.cuda.get_device_name; HBM3e, NVLink4 over NVSwitch


def link_gb_per_s(ranks: int) -> float:
    """Return the maximum bandwidth of one GPU per direction, in GB/s."""
    return PAIR_OF_GPUS_GB_PER_S if ranks <= 2 else LINK_GB_PER_S


def missing_floor_reason(gpus: list[str]) -> str | None:
    """Return the reason why no floor is known for these GPUs, or None if one is.

    `gpus` are the names of the ranks' GPUs, empty for CPU ranks, for which the result is None.
    """
    unknown = sorted({name for name in gpus if name != GPU})
    if not unknown:
        return None
    return f"No floor: weft/bench/limits.py has limits of {GPU} only, not of {', '.join(unknown)}."


def _has_limits(gpus: list[str]) -> bool:
    return bool(gpus) and all(name == GPU for name in gpus)


def pair_floor_us(dispatch_bytes: int, combine_bytes: int, gpus: list[str]) -> float | None:
    """Return the minimum time of a dispatch and combine in us, or None if unknown.

    Args:
        dispatch_bytes: Bytes that the busiest rank sends or receives in dispatch.
        combine_bytes: Bytes that the busiest rank sends or receives in combine.
        gpus: The ranks' GPU names, empty for CPU ranks.
    """
    if not _has_limits(gpus):
        return None
    return (dispatch_bytes + combine_bytes) / (link_gb_per_s(len(gpus)) * 1e3) + PAIR_FIXED_US


def allreduce_floor_us(payload: int, ranks: int, gpus: list[str]) -> float | None:
    """Return the minimum time of an all-reduce in us, or None if unknown.

    This is the minimum over two algorithms. In one-shot, each rank sends its rows to every peer. In
    two-shot, each row is sent to its owner, which sends the sum to all ranks.

    Args:
        payload: Bytes of one rank's rows.
        ranks: Number of ranks.
        gpus: The ranks' GPU names, empty for CPU ranks.
    """
    if not _has_limits(gpus):
        return None
    bytes_per_us = link_gb_per_s(ranks) * 1e3
    oneshot_bytes = (ranks - 1) * payload
    twoshot_bytes = 2 * (ranks - 1) / ranks * payload
    return min(
        oneshot_bytes / bytes_per_us + ONESHOT_FIXED_US,
        twoshot_bytes / bytes_per_us + TWOSHOT_FIXED_US,
    )


def layer_floor_us(hbm_bytes: int, wire_bytes: int, gpus: list[str]) -> float | None:
    """Return the minimum time of an MoE layer in us, or None if unknown.

    With perfect overlap, this is the maximum of the memory time and the link time.

    Args:
        hbm_bytes: Bytes that the busiest rank reads from and writes to its memory.
        wire_bytes: Bytes that the busiest rank sends or receives, in dispatch and combine together.
        gpus: The ranks' GPU names, empty for CPU ranks.
    """
    if not _has_limits(gpus):
        return None
    memory_us = hbm_bytes / (HBM_READ_TB_PER_S * 1e6)
    return max(memory_us, wire_bytes / (link_gb_per_s(len(gpus)) * 1e3))
