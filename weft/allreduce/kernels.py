# SPDX-License-Identifier: Apache-2.0
"""The kernels of an all-reduce: generated entries, and how each is launched.

Launches are local to a rank: peers may choose differently, and no choice changes a bit of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from weft.allreduce.config import ReduceArgs, ReduceConfig
from weft.errors import InvalidArgument
from weft.jit import CUDA_OPTIONS
from weft.runtime.kernels import Build, CpuKernels, CudaKernels, Kernels, Launch, Program
from weft.runtime.stream import loading

T = TypeVar("T")
# One rounding for each operation: bits must not depend on who fuses a multiply with an add.
OPTIONS = (*CUDA_OPTIONS, "-fmad=false")
ENTRIES = {"oneshot": "oneshot", "twoshot": "twoshot", "twoshot_bulk": "bulk"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """The template of one backend. pieces: vectors of a row that one thread of a CTA holds."""

    call: str
    pieces: int


KERNELS = {
    "oneshot": Kernel("oneshot<R, {moe}>", 1),
    "oneshot_resident": Kernel("oneshot_resident<R, {moe}, 2>", 2),
    "twoshot": Kernel("twoshot<R, {moe}, 1, false>", 1),
    "twoshot_bulk": Kernel("twoshot<R, {moe}, 2, true>", 2),
}
MOE = "_moe"  # at the end of an entry's name: rows are made by a prologue


def cpu_program(config: ReduceConfig) -> Program:
    """The generated C++ entries: one of a backend serves rows and prologues."""
    return Program(
        name="allreduce",
        what="all-reduce",
        ranks=config.ranks,
        headers=("allreduce/cpu.cpp",),
        constants=f"constexpr weft::Reduction R = {config.literal()};\n",
        entry_points={
            name + end: (ReduceArgs, f"reduce<R, weft::Backend::{backend}>")
            for name, backend in _served(config, ENTRIES).items()
            for end in ("", MOE)
        },
        offsets=config.asserted(),
        options=OPTIONS,
    )


def cuda_program(config: ReduceConfig) -> Program:
    """The generated CUDA entries."""
    kernels = _served(config, KERNELS)
    if not _larger_stays(config):
        del kernels["oneshot_resident"]
    entries = {
        name + end: (ReduceArgs, kernel.call.format(moe=moe))
        for name, kernel in kernels.items()
        for end, moe in (("", "false"), (MOE, "true"))
    }
    return replace(
        cpu_program(config),
        headers=("allreduce/oneshot.cuh", "allreduce/twoshot.cuh"),
        entry_points=entries,
        bounds=dict.fromkeys(entries, (LARGEST_CTA, 1)),
    )


def _served(config: ReduceConfig, by_backend: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of `by_backend` that a config has kernels for."""
    alone = config.missing == "drop" or config.ranks == 1
    return {k: v for k, v in by_backend.items() if k.startswith("oneshot") or not alone}


def _larger_stays(config: ReduceConfig) -> bool:
    """Is one shot of more tokens than fit on the GPU at once a grid that stays, or waves of CTAs?

    It stays where a row of the waves is a cluster of several CTAs, whose barrier waits for every
    store in flight. With norm, 2 x H200, 2026-11-24, us in waves / staying: hidden 7168 in bf16,
    two CTAs, 9.22 / 8.06 at 67 tokens, 20.96 / 18.4 at 256, 39.3 / 35.4 at 512; hidden 4096, one
    CTA, 9.87 / 9.7 at 192, 11.3 / 11.3 at 256, 14.94 / 16.5 at 384, 18.5 / 19.7 at 512.
    """
    return config.vectors > LARGEST_CTA


# 16-byte words of a call, for each rank, from which on a launch that overlaps its predecessor only
# takes room from it: it gains 0.5 us up to 32 tokens x 7168 on 8 ranks, and loses 5 % at 128
# (8 x H200, 2026-11-20).
LONG = 7500


class CudaReduceKernels(CudaKernels):
    """The kernels of one config."""

    def __init__(self, config: ReduceConfig, build: Build) -> None:
        super().__init__(cuda_program(config), build)
        self._config = config
        self._resident: dict[tuple[str, int, int], int] = {}

    def resident(self, name: str, threads: int, cluster: int) -> int:
        """CTAs of a kernel that fit on the GPU at once; of both kernels of a backend."""
        key = (name, threads, cluster)
        if key not in self._resident:
            self._resident[key] = cluster * min(
                self._module.resident_clusters(self._program.kernel(name + end), threads, cluster)
                for end in ("", MOE)
            )
        return self._resident[key]

    def _find(self, name: str, tokens: int) -> Launch:
        backend = name.removesuffix(MOE)
        p = self._plan(backend, tokens)
        short = tokens * self._config.vectors < LONG * self._config.ranks
        early = self._build.programmatic and short
        stays = backend == "oneshot" and _larger_stays(self._config)
        if stays and p.ctas > self.resident(backend, p.threads, p.cluster):
            p = self._plan("oneshot_resident", tokens)
            name = name.replace(backend, "oneshot_resident")
        launcher = self._launcher(name, programmatic=early, cluster=p.cluster)
        return Launch(launcher, (p.ctas, 1, 1), p.threads, (("pushers", p.pushers),))

    def _plan(self, name: str, tokens: int) -> ReducePlan:
        """The launch of a kernel on so many tokens."""

        def resident(threads: int, cluster: int) -> int:
            return self.resident(name, threads, cluster)

        vectors, ranks = self._config.vectors, self._config.ranks
        if name == "oneshot":
            return plan_oneshot(tokens, vectors, ranks, sms=self._sms, resident=resident)
        pieces = KERNELS[name].pieces
        if name == "oneshot_resident":
            return plan_resident(tokens, vectors, ranks, pieces=pieces, resident=resident)
        return plan_twoshot(tokens, vectors, ranks, pieces=pieces, resident=resident)


def load_kernels(device: torch.device, config: ReduceConfig, build: Build) -> Kernels:
    """Compile and load all backends of a config for one rank's device."""
    if device.type == "cpu":
        return CpuKernels(cpu_program(config), build)
    with loading(device):
        return CudaReduceKernels(config, build)


WARP = 32
LARGEST_CTA = 512  # threads, the launch bounds of every kernel
LARGEST_CLUSTER = 8  # that every GPU from Hopper on can form
# CTAs of a cluster, by threads of a CTA -> CTAs that fit on the GPU at once.
Resident = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """A launch: `ctas` of `threads`, `cluster` of them to a row.

    pushers: of the two-shot backends, how many CTAs push and then finish rows; the others sum.
    """

    ctas: int
    threads: int
    cluster: int
    pushers: int = 0


def plan_oneshot(
    tokens: int, vectors: int, ranks: int, *, sms: int, resident: Resident
) -> ReducePlan:
    """One cluster a token, as wide as fills the SMs: one SM pushes only about 36 GB/s."""
    for widest in range(min(LARGEST_CLUSTER, max(1, sms // tokens)), LARGEST_CLUSTER + 1):
        for threads, cluster in _rows(vectors, widest, ranks):
            if resident(threads, cluster) >= cluster:
                return ReducePlan(tokens * cluster, threads, cluster)
    raise InvalidArgument(f"no cluster of this GPU holds a row of {16 * vectors} bytes")


def plan_resident(
    tokens: int, vectors: int, ranks: int, *, pieces: int, resident: Resident
) -> ReducePlan:
    """One shot of clusters that all fit at once and take one token after the other."""
    threads, cluster, room = _roomy(-(-vectors // pieces), 1, ranks, resident)
    if room == 0:
        raise InvalidArgument(f"no cluster of this GPU holds a row of {16 * vectors} bytes")
    return ReducePlan(min(tokens * cluster, room), threads, cluster)


def plan_twoshot(
    tokens: int, vectors: int, ranks: int, *, pieces: int, resident: Resident
) -> ReducePlan:
    """All CTAs fit at once: those that finish rows hold their places while they wait for sums.

    One piece, few rows: a row is a cluster's, so that few of them fill the SMs. Two pieces, many
    rows: a row is one CTA's, which meets in itself (8 x H200, 7168, 2026-11-20: 47.4 against 51.1
    us at 512 tokens, 169 against 177 at 2048, for 1 x 448 against 4 x 128 threads a row).
    """
    rows = -(-tokens // ranks)
    share = -(-vectors // pieces)
    widest = LARGEST_CLUSTER if pieces == 1 else 1
    threads, cluster, room = _roomy(share, widest, ranks, resident)
    if room < 2 * cluster:
        raise InvalidArgument(f"no cluster of this GPU holds a row of {16 * vectors} bytes")
    # The fewer the ranks, the more of the work is summing: a rank owns more of the rows.
    share_of_sums = 3 if pieces == 1 else 2 + ranks / 4
    reducers = min(rows, max(1, int(room // cluster / share_of_sums))) * cluster
    wanted = -(-rows * (ranks - 1) * vectors // threads)
    pushers = min(room - reducers, -(-wanted // cluster) * cluster)
    return ReducePlan(pushers + reducers, threads, cluster, pushers)


def _roomy(vectors: int, widest: int, ranks: int, resident: Resident) -> tuple[int, int, int]:
    """(threads, cluster, CTAs that fit at once) of the first shape of which two clusters fit."""
    for most in range(widest, LARGEST_CLUSTER + 1):
        # Warps of a CTA: four at least, so that few CTAs make a row.
        most = min(most, max(1, -(-vectors // (4 * WARP))))
        for threads, cluster in _rows(vectors, most, ranks):
            room = resident(threads, cluster) // cluster * cluster
            if room >= 2 * cluster:
                return threads, cluster, room
    return WARP, 1, 0


def _rows(vectors: int, widest: int, ranks: int) -> Iterator[tuple[int, int]]:
    """(threads, cluster) with a thread for each vector, in at most `widest` CTAs.

    Each CTA has a thread for each peer, too, whose call word it sends and compares.

    The second has a power of two, for GPUs that form no other clusters; some CTAs of it may idle.
    """
    warps = -(-vectors // WARP)
    each = max(-(-warps // widest), -(-(ranks - 1) // WARP))
    cluster = -(-warps // each)
    if each * WARP <= LARGEST_CTA:
        yield each * WARP, cluster
        yield each * WARP, 1 << (cluster - 1).bit_length()
