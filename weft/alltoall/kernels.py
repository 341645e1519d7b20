# SPDX-License-Identifier: Apache-2.0
"""Kernels of an all-to-all: generated entries and launch plans.

Launch plans are local to a rank; peers may choose others. The constants are from sweeps on 8 x
H200, hidden 7168, 2026-11-20 (docs/results/index.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from weft.alltoall.config import AllToAllConfig, CombineArgs, DispatchArgs, Offsets
from weft.runtime.kernels import (
    Build,
    CpuKernels,
    CudaKernels,
    EntryPoints,
    Kernels,
    Launch,
    Program,
    split_entries,
)
from weft.runtime.layout import vector_bytes
from weft.runtime.stream import loading_context
from weft.shape import Shape

# From this number of 16-byte words on, programmatic dependent launch is slower, because the kernel
# occupies resources that its predecessor needs: at 2048 tokens x 7168 it costs 0.5 %; at 32 it
# gains 4 %, at 128 up to 1 % (8 x H200, 2026-11-20).
PDL_MAX_VECTORS = 256 * 896
MAX_THREADS = 512  # of a dispatch CTA
MIN_THREADS = 64  # of any CTA
GRID_LIMIT = 65535  # CTAs of a row; a CTA loops over the rest
COMBINE_THREADS = 128  # of a combine CTA
COMBINE_CTAS_PER_SM = 4
LOADS_IN_FLIGHT = 8  # per thread; loads_in_flight in alltoall/combine.cuh
STRIP_COLUMNS = 512  # columns that a warp pushes, or sums, at a time
FP8_CTAS_PER_SM = 4  # of an FP8 combine; one of them sums
MANY_STRIPS_PER_SM = 200  # from this number of strips to push on, an SM has one CTA less
MAX_STRIPS = 8  # strips that a warp pushes at once; max_strips in alltoall/combine_fp8.cuh


PHASES: EntryPoints = {
    "dispatch": (DispatchArgs, "dispatch<S, {}>"),
    "combine": (CombineArgs, "combine<S, rank, {}>"),
}


def build_cpu_program(shape: Shape) -> Program:
    """Return the C++ program of a Shape; it always has both halves of each phase."""
    return Program(
        name="alltoall",
        label="all-to-all",
        ranks=shape.ranks,
        headers=("alltoall/cpu.cpp",),
        constants=f"constexpr weft::Shape S = {shape.to_cpp()};\n",
        entry_points={
            name: (struct, call.replace("S, rank", "S"))
            for name, (struct, call) in split_entries(PHASES, split_phase=True).items()
        },
        offsets=Offsets.from_shape(shape).get_expected_offsets(),
    )


def build_cuda_program(shape: Shape, rank: int, *, split_phase: bool = False) -> Program:
    """Return the CUDA program of a Shape on one rank."""
    program, entries = build_cpu_program(shape), split_entries(PHASES, split_phase=split_phase)
    return replace(
        program,
        headers=("alltoall/combine.cuh", "alltoall/dispatch.cuh"),
        constants=f"{program.constants}constexpr weft::u32 rank = {rank};\n",
        entry_points=entries,
        bounds={name: (MAX_THREADS, 2 if name.startswith("dispatch") else 1) for name in entries},
    )


class CudaAllToAll(CudaKernels):
    """CUDA kernels of an all-to-all of one Shape."""

    def __init__(self, shape: Shape, rank: int, build: Build) -> None:
        super().__init__(build_cuda_program(shape, rank, split_phase=build.split_phase), build)
        self._shape, self._vectors_per_token = shape, _count_vector_loads(shape)

    def _build_launch(self, name: str, tokens: int) -> Launch:
        plan = self._build_plan(name, tokens)
        use_pdl = self._build.use_pdl and tokens * self._vectors_per_token < PDL_MAX_VECTORS
        fields = (("pushers", plan.pushers), ("strips", plan.strips)) if plan.strips else ()
        launcher = self._get_launcher(name, use_pdl=use_pdl)
        return Launch(launcher, (plan.workers, plan.chunks, 1), plan.threads, fields)

    def _build_plan(self, name: str, tokens: int) -> LaunchPlan:
        shape, out_vectors = self._shape, self._shape.out_bytes // 16
        pushes = shape.combine in ("push", "push_fp8")

        def get_ctas_per_sm(threads: int) -> int:
            return self._max_ctas_per_sm(name, threads)

        if name == "dispatch_receive" or (name == "combine_send" and not pushes):
            return LaunchPlan(workers=1, chunks=1, threads=64)  # flags only
        if name.startswith("dispatch"):
            return plan_dispatch(
                tokens, self._vectors_per_token, sms=self._sms, get_ctas_per_sm=get_ctas_per_sm
            )
        if shape.combine == "push_fp8":
            return self._plan_combine_fp8(name, tokens, get_ctas_per_sm)
        if not pushes or name == "combine_receive":
            # Pushed rows are in local memory, so with few ranks more CTAs keep enough loads in
            # flight.
            ctas = COMBINE_CTAS_PER_SM * (max(1, LOADS_IN_FLIGHT // shape.ranks) if pushes else 1)
            return plan_combine(
                tokens,
                out_vectors,
                sms=self._sms,
                get_ctas_per_sm=get_ctas_per_sm,
                ctas_per_sm=ctas,
            )
        return self._plan_push(tokens, get_ctas_per_sm)

    def _plan_push(self, tokens: int, get_ctas_per_sm: Callable[[int], int]) -> LaunchPlan:
        """Return the plan of a push, assuming a row for each of this rank's tokens and each peer.

        All CTAs must be co-resident: each waits for rows that the others push.
        """
        shape = self._shape
        # At least 16 tokens, because peers may send rows to a rank without tokens.
        rows = max(tokens, min(shape.tokens, 16)) * min(shape.ranks, shape.top_k)
        plan = plan_combine(
            rows, shape.out_bytes // 16, sms=self._sms, get_ctas_per_sm=get_ctas_per_sm
        )
        resident = self._sms * get_ctas_per_sm(plan.threads)
        return LaunchPlan(plan.workers, min(plan.chunks, resident), plan.threads)

    def _plan_combine_fp8(
        self, name: str, tokens: int, get_ctas_per_sm: Callable[[int], int]
    ) -> LaunchPlan:
        """Return the plan of an FP8 combine, assuming a row for each token and rank."""
        shape = self._shape
        if name == "combine_receive":
            return plan_sums(tokens, shape.hidden, sms=self._sms, get_ctas_per_sm=get_ctas_per_sm)
        slots = max(tokens, min(shape.tokens, 8)) * shape.ranks
        summed = tokens if name == "combine" else 0
        return plan_combine_fp8(
            summed,
            slots,
            shape.hidden,
            sms=self._sms,
            get_ctas_per_sm=get_ctas_per_sm,
            uses_all_sms=self._uses_all_sms,
        )


def load_kernels(device: torch.device, rank: int, config: AllToAllConfig, build: Build) -> Kernels:
    """Compile and load the kernels of a config for one rank's device."""
    if device.type == "cpu":
        return CpuKernels(build_cpu_program(config.shape), build)
    with loading_context(device):
        return CudaAllToAll(config.shape, rank, build)


def _count_vector_loads(shape: Shape) -> int:
    """Return the number of vector loads per token; a load of a quantised row has 16 columns."""
    quantised = shape.quant != "none"
    copied = shape.row_bytes[2:] if quantised else shape.row_bytes
    columns = shape.hidden if quantised else 0
    return columns // 16 + sum(size // vector_bytes(size) for size in copied)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """A launch of `workers` x `chunks` CTAs of `threads` threads.

    Workers loop over tokens, and the chunks of a worker share a row. An FP8 combine has one
    coordinator CTA, `pushers` CTAs that push rows, and the rest sum; a warp pushes `strips` strips
    at a time.
    """

    workers: int
    chunks: int
    threads: int
    pushers: int = 0
    strips: int = 0


def plan_dispatch(
    tokens: int, vectors: int, *, sms: int, get_ctas_per_sm: Callable[[int], int]
) -> LaunchPlan:
    """Split rows of `vectors` 16-byte words over the CTAs that push them.

    One SM pushes about 36 GB/s and the GPU 334. With few tokens, a row is therefore split until all
    SMs have a CTA, each of at least `MIN_THREADS` threads. With many, the resident CTAs loop over
    the tokens.

    Args:
        tokens: Number of tokens.
        vectors: 16-byte words of a row.
        sms: Number of SMs.
        get_ctas_per_sm: Returns the resident CTAs per SM for a number of threads.
    """
    chunks = -(-vectors // MAX_THREADS)
    if tokens * chunks < sms:
        chunks = max(chunks, min(sms // max(tokens, 1), -(-vectors // MIN_THREADS)))
    threads = min(MAX_THREADS, max(MIN_THREADS, _round_up_to_warps(-(-vectors // chunks))))
    chunks = min(-(-vectors // threads), GRID_LIMIT)
    resident = max(1, sms * get_ctas_per_sm(threads) // chunks)
    return LaunchPlan(workers=max(1, min(tokens, resident)), chunks=chunks, threads=threads)


def plan_combine(
    tokens: int,
    vectors: int,
    *,
    sms: int,
    get_ctas_per_sm: Callable[[int], int],
    ctas_per_sm: int = COMBINE_CTAS_PER_SM,
) -> LaunchPlan:
    """Split rows of `vectors` 16-byte words over the CTAs that pull them.

    Every thread has a load to each peer in flight, so a few threads saturate the links and more
    threads only queue: at 128 tokens, twelve CTAs of 64 threads per SM are 8 % slower than four. Up
    to two chunks per SM run in one CTA per SM (30.3 against 31.6 us for dispatch and combine of
    32 tokens).

    Args:
        tokens: Number of tokens.
        vectors: 16-byte words of a row.
        sms: Number of SMs.
        get_ctas_per_sm: Returns the resident CTAs per SM for a number of threads.
        ctas_per_sm: Maximum number of CTAs per SM.
    """
    threads = min(COMBINE_THREADS, max(MIN_THREADS, _round_up_to_warps(vectors)))
    chunks = -(-vectors // threads)
    limit = 1 if tokens * chunks <= 2 * sms else ctas_per_sm
    resident = max(1, sms * min(limit, get_ctas_per_sm(threads)) // chunks)
    return LaunchPlan(workers=max(1, min(tokens, resident)), chunks=chunks, threads=threads)


def plan_combine_fp8(
    tokens: int,
    slots: int,
    hidden: int,
    *,
    sms: int,
    get_ctas_per_sm: Callable[[int], int],
    uses_all_sms: bool,
) -> LaunchPlan:
    """Divide the CTAs of an FP8 combine into those that push rows and those that sum them.

    Pushing CTAs come first in the grid and wait for no other CTA, so co-residency is not required
    for progress; the grid is co-resident because a CTA that is not resident does no work. A warp
    pushes one strip at a time if there are few, else up to eight. Strips that are pushed together
    share a packet for their scales, but the last sums start later.

    Args:
        tokens: Number of tokens to sum; 0 for a kernel that only pushes.
        slots: Maximum number of rows to push.
        hidden: Columns of a row.
        sms: Number of SMs.
        get_ctas_per_sm: Returns the resident CTAs per SM for a number of threads.
        uses_all_sms: Whether `sms` are all SMs of the GPU.
    """
    warps, strips = COMBINE_THREADS // 32, -(-hidden // STRIP_COLUMNS)
    # Measured on 4 x H200, hidden 7168, 2026-11-21, in one run: dispatch and combine of 512 tokens
    # (217 strips per SM) take 81.0 us with two pushing CTAs per SM and 83.7 us with three; the
    # dispatch alone differed by 1.9 us. At 128 tokens (54 strips) both take the same time, below
    # that two are slower. Other sizes, and 8 ranks, where the limit is 236 tokens, are
    # extrapolated. Fewer SMs and the separate sending half are untimed and keep the default.
    has_many_strips = uses_all_sms and tokens > 0 and slots * strips >= MANY_STRIPS_PER_SM * sms
    limit = FP8_CTAS_PER_SM - 1 if has_many_strips else FP8_CTAS_PER_SM
    resident = max(3, sms * min(limit, get_ctas_per_sm(COMBINE_THREADS)))
    receivers = min(-(-tokens * strips // warps), resident // limit or 1)
    pushers = max(1, min(-(-slots * strips // warps), resident - receivers - 1))
    per_warp = min(strips, MAX_STRIPS, max(1, slots * strips // (pushers * warps)))
    per_warp = -(-strips // -(-strips // per_warp))  # fragments of equal length
    return LaunchPlan(1 + pushers + receivers, 1, COMBINE_THREADS, pushers, per_warp)


def plan_sums(
    tokens: int, hidden: int, *, sms: int, get_ctas_per_sm: Callable[[int], int]
) -> LaunchPlan:
    """Plan the receiving half of an FP8 combine: one CTA waits for peers, the others sum."""
    units = -(-tokens * -(-hidden // STRIP_COLUMNS) // (COMBINE_THREADS // 32))
    resident = sms * min(COMBINE_CTAS_PER_SM, get_ctas_per_sm(COMBINE_THREADS))
    return LaunchPlan(1 + min(units, resident), 1, COMBINE_THREADS, 0, 1)


def _round_up_to_warps(threads: int) -> int:
    return -(-threads // 32) * 32
