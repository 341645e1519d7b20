# SPDX-License-Identifier: Apache-2.0
"""Kernels of an all-reduce: generated entries and launch plans.

Launch plans are local to a rank: peers may choose others, and no choice changes a bit of a result.
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
from weft.runtime.stream import loading_context

T = TypeVar("T")
# Round after each operation: results must not depend on the fusion of multiplies and adds.
OPTIONS = (*CUDA_OPTIONS, "-fmad=false")
ENTRIES = {"oneshot": "oneshot", "twoshot": "twoshot", "twoshot_bulk": "bulk"}


@dataclass(frozen=True, slots=True)
class Kernel:
    """The template of one backend; a thread holds `pieces` vectors of a row."""

    call: str
    pieces: int


KERNELS = {
    "oneshot": Kernel("oneshot<R, {moe}>", 1),
    "oneshot_resident": Kernel("oneshot_resident<R, {moe}, 2>", 2),
    "twoshot": Kernel("twoshot<R, {moe}, 1, false>", 1),
    "twoshot_bulk": Kernel("twoshot<R, {moe}, 2, true>", 2),
}
MOE = "_moe"  # suffix of entries whose rows are computed by a prologue


def cpu_program(config: ReduceConfig) -> Program:
    """Return the C++ program, in which one function of a backend serves rows and prologues."""
    return Program(
        name="allreduce",
        label="all-reduce",
        ranks=config.ranks,
        headers=("allreduce/cpu.cpp",),
        constants=f"constexpr weft::Reduction R = {config.to_cpp()};\n",
        entry_points={
            name + end: (ReduceArgs, f"reduce<R, weft::Backend::{backend}>")
            for name, backend in _select_entries(config, ENTRIES).items()
            for end in ("", MOE)
        },
        offsets=config.expected_offsets(),
        options=OPTIONS,
    )


def cuda_program(config: ReduceConfig) -> Program:
    """Return the CUDA program."""
    kernels = _select_entries(config, KERNELS)
    if not _uses_resident_grid(config):
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


def _select_entries(config: ReduceConfig, by_backend: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of `by_backend` that a config has kernels for."""
    oneshot_only = config.missing == "drop" or config.ranks == 1
    return {k: v for k, v in by_backend.items() if k.startswith("oneshot") or not oneshot_only}


def _uses_resident_grid(config: ReduceConfig) -> bool:
    """Whether one shot of more tokens than fit on the GPU uses a resident grid, not waves of CTAs.

    The resident grid is faster if a row takes a cluster of several CTAs, because the cluster's
    barrier waits for every store in flight. With norm, 2 x H200, 2026-11-24, us in waves /
    resident: hidden 7168 in bf16, two CTAs, 9.22 / 8.06 at 67 tokens, 20.96 / 18.4 at 256, 39.3 /
    35.4 at 512; hidden 4096, one CTA, 9.87 / 9.7 at 192, 11.3 / 11.3 at 256, 14.94 / 16.5 at 384,
    18.5 / 19.7 at 512.
    """
    return config.vectors > LARGEST_CTA


# From this number of 16-byte words per rank on, programmatic dependent launch does not pay, because
# the kernel takes resources from its predecessor: it gains 0.5 us up to 32 tokens x 7168 on 8
# ranks, and loses 5 % at 128 (8 x H200, 2026-11-20).
LONG = 7500


class CudaReduceKernels(CudaKernels):
    """The kernels of one config."""

    def __init__(self, config: ReduceConfig, build: Build) -> None:
        super().__init__(cuda_program(config), build)
        self._config = config
        self._resident: dict[tuple[str, int, int], int] = {}

    def resident(self, name: str, threads: int, cluster: int) -> int:
        """Return how many CTAs fit on the GPU at once, for either kernel of a backend."""
        key = (name, threads, cluster)
        if key not in self._resident:
            self._resident[key] = cluster * min(
                self._module.get_max_active_clusters(
                    self._program.kernel_name(name + end), threads, cluster
                )
                for end in ("", MOE)
            )
        return self._resident[key]

    def _build_launch(self, name: str, tokens: int) -> Launch:
        backend = name.removesuffix(MOE)
        p = self._plan(backend, tokens)
        is_short = tokens * self._config.vectors < LONG * self._config.ranks
        use_pdl = self._build.use_pdl and is_short
        may_stay = backend == "oneshot" and _uses_resident_grid(self._config)
        if may_stay and p.ctas > self.resident(backend, p.threads, p.cluster):
            p = self._plan("oneshot_resident", tokens)
            name = name.replace(backend, "oneshot_resident")
        launcher = self._get_launcher(name, use_pdl=use_pdl, cluster=p.cluster)
        return Launch(launcher, (p.ctas, 1, 1), p.threads, (("pushers", p.pushers),))

    def _plan(self, name: str, tokens: int) -> ReducePlan:
        """Return the launch plan of a kernel for a number of tokens."""

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
    with loading_context(device):
        return CudaReduceKernels(config, build)


WARP = 32
LARGEST_CTA = 512  # threads; the launch bounds of every kernel
LARGEST_CLUSTER = 8  # portable cluster size from Hopper on
# (threads per CTA, CTAs per cluster) -> CTAs that fit on the GPU at once.
Resident = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """A launch of `ctas` CTAs of `threads` threads; `cluster` CTAs share a row.

    In the two-shot backends, `pushers` CTAs push rows and then finish them; the others sum.
    """

    ctas: int
    threads: int
    cluster: int
    pushers: int = 0


def plan_oneshot(
    tokens: int, vectors: int, ranks: int, *, sms: int, resident: Resident
) -> ReducePlan:
    """Plan one cluster per token, wide enough to use all SMs: an SM pushes about 36 GB/s."""
    for widest in range(min(LARGEST_CLUSTER, max(1, sms // tokens)), LARGEST_CLUSTER + 1):
        for threads, cluster in _row_shapes(vectors, widest, ranks):
            if resident(threads, cluster) >= cluster:
                return ReducePlan(tokens * cluster, threads, cluster)
    raise InvalidArgument(f"no cluster of this GPU holds a row of {16 * vectors} bytes")


def plan_resident(
    tokens: int, vectors: int, ranks: int, *, pieces: int, resident: Resident
) -> ReducePlan:
    """Plan a resident grid, whose clusters loop over the tokens."""
    threads, cluster, limit = _resident_shape(-(-vectors // pieces), 1, ranks, resident)
    if limit == 0:
        raise InvalidArgument(f"no cluster of this GPU holds a row of {16 * vectors} bytes")
    return ReducePlan(min(tokens * cluster, limit), threads, cluster)


def plan_twoshot(
    tokens: int, vectors: int, ranks: int, *, pieces: int, resident: Resident
) -> ReducePlan:
    """Plan two shots, whose CTAs are all co-resident: those that finish rows wait for the sums.

    With one piece (few rows), a cluster shares a row, so that few rows use all SMs. With two pieces
    (many rows), a row takes one CTA, which avoids cluster barriers (8 x H200, 7168, 2026-11-20:
    47.4 against 51.1 us at 512 tokens, 169 against 177 at 2048, for 1 x 448 against 4 x 128 threads
    per row).
    """
    rows = -(-tokens // ranks)
    widest = LARGEST_CLUSTER if pieces == 1 else 1
    threads, cluster, limit = _resident_shape(-(-vectors // pieces), widest, ranks, resident)
    if limit < 2 * cluster:
        raise InvalidArgument(f"no cluster of this GPU holds a row of {16 * vectors} bytes")
    # With fewer ranks, a rank owns more of the rows, and summing is a larger part of the work.
    ctas_per_reducer = 3 if pieces == 1 else 2 + ranks / 4
    reducers = min(rows, max(1, int(limit // cluster / ctas_per_reducer))) * cluster
    useful = -(-rows * (ranks - 1) * vectors // threads)
    pushers = min(limit - reducers, -(-useful // cluster) * cluster)
    return ReducePlan(pushers + reducers, threads, cluster, pushers)


def _resident_shape(
    vectors: int, widest: int, ranks: int, resident: Resident
) -> tuple[int, int, int]:
    """Return threads, cluster and resident CTAs of the first shape of which two clusters fit."""
    for max_ctas in range(widest, LARGEST_CLUSTER + 1):
        # A CTA has at least four warps, so that a row takes few CTAs.
        max_ctas = min(max_ctas, max(1, -(-vectors // (4 * WARP))))
        for threads, cluster in _row_shapes(vectors, max_ctas, ranks):
            ctas = resident(threads, cluster) // cluster * cluster
            if ctas >= 2 * cluster:
                return threads, cluster, ctas
    return WARP, 1, 0


def _row_shapes(vectors: int, widest: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield (threads, cluster) with a thread for each vector, in at most `widest` CTAs.

    Each CTA also has a thread for each peer, which sends and compares the call word. The second
    cluster size is a power of two, for GPUs that support no others; some of its CTAs may be idle.
    """
    warps = -(-vectors // WARP)
    cta_warps = max(-(-warps // widest), -(-(ranks - 1) // WARP))
    cluster = -(-warps // cta_warps)
    if cta_warps * WARP <= LARGEST_CTA:
        yield cta_warps * WARP, cluster
        yield cta_warps * WARP, 1 << (cluster - 1).bit_length()
