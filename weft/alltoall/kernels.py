# SPDX-License-Identifier: Apache-2.0
"""The kernels of an all-to-all: generated entries, and how each is launched.

Launches are local to a rank: peers may choose differently. The numbers are from sweeps on 8 x H200,
hidden 7168, 2026-11-20 (docs/results/index.md).
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
    in_parts,
)
from weft.runtime.layout import vector_bytes
from weft.runtime.stream import loading
from weft.shape import Shape

# From so many 16-byte words on, a launch that overlaps its predecessor only takes room from it: at
# 2048 tokens x 7168 it costs 0.5 %; at 32 it gains 4 %, at 128 up to 1 % (8 x H200, 2026-11-20).
LONG = 256 * 896
LARGEST = 512  # threads of a dispatch CTA
SMALLEST = 64
GRID_LIMIT = 65535  # pieces of a row; a CTA takes more of them in turn
PIECE = 128  # threads of a combine CTA
PIECES_PER_SM = 4
LOADS = 8  # of a thread, that are in flight at once; loads_in_flight in alltoall/combine.cuh
STRIP = 512  # columns that a warp pushes, or sums, at a time
FP8_PIECES_PER_SM = 4  # CTAs of a combine by FP8, one of which sums
MANY_PER_SM = 200  # strips that may have to be pushed: from so many on an SM has one CTA less
MOST_STRIPS = 8  # that one warp pushes at once; max_strips in alltoall/combine_fp8.cuh


PHASES: EntryPoints = {
    "dispatch": (DispatchArgs, "dispatch<S, {}>"),
    "combine": (CombineArgs, "combine<S, rank, {}>"),
}


def cpu_program(shape: Shape) -> Program:
    """The generated C++ entries of a Shape; both halves of a phase included, they cost nothing."""
    return Program(
        name="alltoall",
        what="all-to-all",
        ranks=shape.ranks,
        headers=("alltoall/cpu.cpp",),
        constants=f"constexpr weft::Shape S = {shape.literal()};\n",
        entry_points={
            name: (struct, call.replace("S, rank", "S"))
            for name, (struct, call) in in_parts(PHASES, split_phase=True).items()
        },
        offsets=Offsets.of(shape).asserted(),
    )


def cuda_program(shape: Shape, rank: int, *, split_phase: bool = False) -> Program:
    """The generated CUDA entries of a Shape on one rank."""
    program, entries = cpu_program(shape), in_parts(PHASES, split_phase=split_phase)
    return replace(
        program,
        headers=("alltoall/combine.cuh", "alltoall/dispatch.cuh"),
        constants=f"{program.constants}constexpr weft::u32 rank = {rank};\n",
        entry_points=entries,
        bounds={name: (LARGEST, 2 if name.startswith("dispatch") else 1) for name in entries},
    )


class CudaAllToAll(CudaKernels):
    """The kernels of one Shape."""

    def __init__(self, shape: Shape, rank: int, build: Build) -> None:
        super().__init__(cuda_program(shape, rank, split_phase=build.split_phase), build)
        self._shape, self._in_vectors = shape, _in_vectors(shape)

    def _find(self, name: str, tokens: int) -> Launch:
        p = self._plan(name, tokens)
        early = self._build.programmatic and tokens * self._in_vectors < LONG
        fields = (("pushers", p.pushers), ("strips", p.strips)) if p.strips else ()
        launcher = self._launcher(name, programmatic=early)
        return Launch(launcher, (p.workers, p.chunks, 1), p.threads, fields)

    def _plan(self, name: str, tokens: int) -> Plan:
        shape, out_vectors = self._shape, self._shape.out_bytes // 16
        pushes = shape.combine in ("push", "push_fp8")

        def per_sm(threads: int) -> int:
            return self._per_sm(name, threads)

        if name == "dispatch_receive" or (name == "combine_send" and not pushes):
            return Plan(workers=1, chunks=1, threads=64)  # flags only
        if name.startswith("dispatch"):
            return plan_dispatch(tokens, self._in_vectors, sms=self._sms, per_sm=per_sm)
        if shape.combine == "push_fp8":
            return self._plan_combine_fp8(name, tokens, per_sm)
        if not pushes or name == "combine_receive":
            # Pushed rows are in this GPU's own memory: as many loads as it needs, from few ranks.
            pieces = PIECES_PER_SM * (max(1, LOADS // shape.ranks) if pushes else 1)
            return plan_combine(
                tokens, out_vectors, sms=self._sms, per_sm=per_sm, pieces_per_sm=pieces
            )
        return self._plan_push(tokens, per_sm)

    def _plan_push(self, tokens: int, per_sm: Callable[[int], int]) -> Plan:
        """Rows of all sources are pushed, about as many as this rank's tokens have peers.

        A whole combine is resident as a whole, because its CTAs wait for what all of them pushed.
        """
        shape = self._shape
        # As if of 16 tokens at least: peers may send rows to a rank that has none itself.
        rows = max(tokens, min(shape.tokens, 16)) * min(shape.ranks, shape.top_k)
        p = plan_combine(rows, shape.out_bytes // 16, sms=self._sms, per_sm=per_sm)
        most = self._sms * per_sm(p.threads)
        return Plan(p.workers, min(p.chunks, most), p.threads)

    def _plan_combine_fp8(self, name: str, tokens: int, per_sm: Callable[[int], int]) -> Plan:
        """Rows of all sources are pushed, about as many as this rank's tokens have slots."""
        shape = self._shape
        if name == "combine_receive":
            return plan_sums(tokens, shape.hidden, sms=self._sms, per_sm=per_sm)
        slots = max(tokens, min(shape.tokens, 8)) * shape.ranks
        taken = tokens if name == "combine" else 0
        return plan_combine_fp8(
            taken, slots, shape.hidden, sms=self._sms, per_sm=per_sm, whole=self._whole
        )


def load_kernels(device: torch.device, rank: int, config: AllToAllConfig, build: Build) -> Kernels:
    """Compile and load the kernels of a config for one rank's device."""
    if device.type == "cpu":
        return CpuKernels(cpu_program(config.shape), build)
    with loading(device):
        return CudaAllToAll(config.shape, rank, build)


def _in_vectors(shape: Shape) -> int:
    """Loads of one token's payload: vectors of each row, or 16 columns of a quantised one."""
    quantised = shape.quant != "none"
    copied = shape.row_bytes[2:] if quantised else shape.row_bytes
    columns = shape.hidden if quantised else 0
    return columns // 16 + sum(size // vector_bytes(size) for size in copied)


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch: `workers` x `chunks` CTAs of `threads`.

    A worker takes tokens in turn, a chunk takes part of each row. Where CTAs differ by what they
    do: a coordinator, then `pushers`, and the rest sum; a warp pushes `strips` strips at a time.
    """

    workers: int
    chunks: int
    threads: int
    pushers: int = 0
    strips: int = 0


def plan_dispatch(tokens: int, vectors: int, *, sms: int, per_sm: Callable[[int], int]) -> Plan:
    """Split rows of `vectors` 16-byte words over the CTAs that push them.

    Few tokens: one SM pushes about 36 GB/s and the GPU 334, so a row is cut into as many pieces as
    fill the SMs, down to `SMALLEST` threads each. Many: the whole resident grid takes turns.

    per_sm: resident CTAs of one SM, by threads of a CTA.
    """
    chunks = -(-vectors // LARGEST)
    if tokens * chunks < sms:
        chunks = max(chunks, min(sms // max(tokens, 1), -(-vectors // SMALLEST)))
    threads = min(LARGEST, max(SMALLEST, _whole_warps(-(-vectors // chunks))))
    chunks = min(-(-vectors // threads), GRID_LIMIT)
    resident = max(1, sms * per_sm(threads) // chunks)
    return Plan(workers=max(1, min(tokens, resident)), chunks=chunks, threads=threads)


def plan_combine(
    tokens: int,
    vectors: int,
    *,
    sms: int,
    per_sm: Callable[[int], int],
    pieces_per_sm: int = PIECES_PER_SM,
) -> Plan:
    """Split rows of `vectors` 16-byte words over the CTAs that pull them.

    Every thread has a load to each peer in flight, so few threads fill the links, and more only
    queue: twelve CTAs of 64 an SM cost 8 % against four at 128 tokens. At most two pieces an SM are
    taken one after the other (30.3 against 31.6 us a pair at 32 tokens).

    pieces_per_sm: most CTAs of an SM.
    """
    threads = min(PIECE, max(SMALLEST, _whole_warps(vectors)))
    chunks = -(-vectors // threads)
    deep = 1 if tokens * chunks <= 2 * sms else pieces_per_sm
    resident = max(1, sms * min(deep, per_sm(threads)) // chunks)
    return Plan(workers=max(1, min(tokens, resident)), chunks=chunks, threads=threads)


def plan_combine_fp8(
    tokens: int, slots: int, hidden: int, *, sms: int, per_sm: Callable[[int], int], whole: bool
) -> Plan:
    """Divide the CTAs of a combine by FP8 into those that push rows and those that sum them.

    Those that push come first and wait for nobody, so the grid need not be resident; it is, because
    who waits outside sums nothing. A warp takes one strip at a time where there are few, else up to
    eight: scales of strips that go together share a packet, and the sums of the last rows begin
    when the rows that are pushed at the same time have come.

    slots: rows that may have to be pushed.   per_sm: resident CTAs of one SM, by threads of a CTA.
    whole: `sms` are all that the GPU has.
    """
    warps, strips = PIECE // 32, -(-hidden // STRIP)
    # Measured on 4 x H200, hidden 7168, 2026-11-21, in one run: two CTAs an SM that push took
    # 81.0 us a pair where three took 83.7, at 512 tokens (217 strips an SM; the same dispatch
    # differed by 1.9 us); as long at 128 (54), more below. Other sizes, and 8 ranks, where this
    # means 236 tokens and more, are inferred. Fewer SMs, and a half that only pushes, were not
    # timed: as before.
    many = whole and tokens > 0 and slots * strips >= MANY_PER_SM * sms
    most = FP8_PIECES_PER_SM - 1 if many else FP8_PIECES_PER_SM
    resident = max(3, sms * min(most, per_sm(PIECE)))
    receivers = min(-(-tokens * strips // warps), resident // most or 1)
    pushers = max(1, min(-(-slots * strips // warps), resident - receivers - 1))
    at_once = min(strips, MOST_STRIPS, max(1, slots * strips // (pushers * warps)))
    at_once = -(-strips // -(-strips // at_once))  # fragments of one length
    return Plan(1 + pushers + receivers, 1, PIECE, pushers, at_once)


def plan_sums(tokens: int, hidden: int, *, sms: int, per_sm: Callable[[int], int]) -> Plan:
    """The receiving half of a combine by FP8: one CTA waits for the peers, the rest sum."""
    units = -(-tokens * -(-hidden // STRIP) // (PIECE // 32))
    resident = sms * min(PIECES_PER_SM, per_sm(PIECE))
    return Plan(1 + min(units, resident), 1, PIECE, 0, 1)


def _whole_warps(threads: int) -> int:
    return -(-threads // 32) * 32
