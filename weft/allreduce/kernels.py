# SPDX-License-Identifier: Apache-2.0
"""Kernels of an all-reduce: generated source and launch plans.

Launch plans may differ between ranks and do not change the results.
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
    """Template of one kernel.

    Attributes:
        call: C++ call of the template.
        pieces: Number of vectors of a row per thread.
    """

    call: str
    pieces: int


KERNELS = {
    "oneshot": Kernel("oneshot<R, {moe}>", 1),
    "oneshot_resident": Kernel("oneshot_resident<R, {moe}, 2>", 2),
    "twoshot": Kernel("twoshot<R, {moe}, 1, false>", 1),
    "twoshot_bulk": Kernel("twoshot<R, {moe}, 2, true>", 2),
}
MOE = "_moe"  # suffix of entries whose rows are computed by a prologue


def build_cpu_program(config: ReduceConfig) -> Program:
    """Build the C++ program; one function of a backend handles both x and prologues."""
    return Program(
        name="allreduce",
        label="all-reduce",
        ranks=config.ranks,
        headers=("allreduce/cpu.cpp",),
        constants=f"constexpr weft::Reduction R = {config.to_cpp()};\n",
        entry_points={
            name + end: (ReduceArgs, f"reduce<R, weft::Backend::{backend}>")
            for name, backend in _select_supported(config, ENTRIES).items()
            for end in ("", MOE)
        },
        offsets=config.get_expected_offsets(),
        options=OPTIONS,
    )


def build_cuda_program(config: ReduceConfig) -> Program:
    """Build the CUDA program."""
    kernels = _select_supported(config, KERNELS)
    if not _uses_resident_grid(config):
        del kernels["oneshot_resident"]
    entries = {
        name + end: (ReduceArgs, kernel.call.format(moe=moe))
        for name, kernel in kernels.items()
        for end, moe in (("", "false"), (MOE, "true"))
    }
    return replace(
        build_cpu_program(config),
        headers=("allreduce/oneshot.cuh", "allreduce/twoshot.cuh"),
        entry_points=entries,
        bounds=dict.fromkeys(entries, (MAX_CTA_THREADS, 1)),
    )


def _select_supported(config: ReduceConfig, by_backend: Mapping[str, T]) -> dict[str, T]:
    """Return the items of `by_backend` whose backends a config supports."""
    oneshot_only = config.missing == "drop" or config.ranks == 1
    return {k: v for k, v in by_backend.items() if k.startswith("oneshot") or not oneshot_only}


def _uses_resident_grid(config: ReduceConfig) -> bool:
    """Whether oneshot uses a resident grid for more tokens than fit on the GPU at once.

    The alternative is waves of CTAs. The resident grid is faster if a row needs a cluster of
    several CTAs, because a cluster barrier waits for every store in flight. With norm, 2 x H200,
    2026-11-24, us in waves / resident: hidden 7168 in bf16, two CTAs, 9.22 / 8.06 at 67 tokens,
    20.96 / 18.4 at 256, 39.3 / 35.4 at 512; hidden 4096, one CTA, 9.87 / 9.7 at 192, 11.3 / 11.3 at
    256, 14.94 / 16.5 at 384, 18.5 / 19.7 at 512.
    """
    return config.vectors > MAX_CTA_THREADS


# Minimum number of 16-byte words per rank for which programmatic dependent launch is slower: the
# kernel takes resources from its predecessor. PDL gains 0.5 us up to 32 tokens x 7168 on 8 ranks,
# and loses 5 % at 128 (8 x H200, 2026-11-20).
MIN_VECTORS_WITHOUT_PDL = 7500


class CudaReduceKernels(CudaKernels):
    """Compiled kernels for one config."""

    def __init__(self, config: ReduceConfig, build: Build) -> None:
        super().__init__(build_cuda_program(config), build)
        self._config = config
        self._max_resident_ctas: dict[tuple[str, int, int], int] = {}

    def max_resident_ctas(self, name: str, threads: int, cluster: int) -> int:
        """Return the number of CTAs that fit on the GPU at once, for both kernels of a backend."""
        key = (name, threads, cluster)
        if key not in self._max_resident_ctas:
            self._max_resident_ctas[key] = cluster * min(
                self._module.get_max_active_clusters(
                    self._program.kernel_name(name + end), threads, cluster
                )
                for end in ("", MOE)
            )
        return self._max_resident_ctas[key]

    def _build_launch(self, name: str, tokens: int) -> Launch:
        backend = name.removesuffix(MOE)
        plan = self._build_plan(backend, tokens)
        is_short = tokens * self._config.vectors < MIN_VECTORS_WITHOUT_PDL * self._config.ranks
        use_pdl = self._build.use_pdl and is_short
        if backend == "oneshot" and _uses_resident_grid(self._config):
            resident_ctas = self.max_resident_ctas(backend, plan.threads, plan.cluster)
            if plan.ctas > resident_ctas:
                plan = self._build_plan("oneshot_resident", tokens)
                name = name.replace(backend, "oneshot_resident")
        launcher = self._get_launcher(name, use_pdl=use_pdl, cluster=plan.cluster)
        return Launch(launcher, (plan.ctas, 1, 1), plan.threads, (("pushers", plan.pushers),))

    def _build_plan(self, name: str, tokens: int) -> ReducePlan:
        """Plan the launch of a kernel for a number of tokens."""

        def max_resident_ctas(threads: int, cluster: int) -> int:
            return self.max_resident_ctas(name, threads, cluster)

        vectors, ranks = self._config.vectors, self._config.ranks
        if name == "oneshot":
            return plan_oneshot(
                tokens, vectors, ranks, sms=self._sms, max_resident_ctas=max_resident_ctas
            )
        pieces = KERNELS[name].pieces
        if name == "oneshot_resident":
            return plan_resident(
                tokens, vectors, ranks, pieces=pieces, max_resident_ctas=max_resident_ctas
            )
        return plan_twoshot(
            tokens, vectors, ranks, pieces=pieces, max_resident_ctas=max_resident_ctas
        )


def load_kernels(device: torch.device, config: ReduceConfig, build: Build) -> Kernels:
    """Compile and load the kernels of all backends for one rank's device."""
    if device.type == "cpu":
        return CpuKernels(build_cpu_program(config), build)
    with loading_context(device):
        return CudaReduceKernels(config, build)


WARP = 32
MAX_CTA_THREADS = 512  # launch bounds of every kernel
MAX_CLUSTER_CTAS = 8  # maximum portable cluster size on Hopper and later
# (threads per CTA, CTAs per cluster) -> number of CTAs that fit on the GPU at once.
MaxResidentCtas = Callable[[int, int], int]


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """Launch parameters of a kernel.

    Attributes:
        ctas: Number of CTAs.
        threads: Threads per CTA.
        cluster: CTAs per cluster, which share a row.
        pushers: In the two-shot backends, number of CTAs that push rows and later compute the
            outputs of summed rows; the other CTAs sum.
    """

    ctas: int
    threads: int
    cluster: int
    pushers: int = 0


def plan_oneshot(
    tokens: int, vectors: int, ranks: int, *, sms: int, max_resident_ctas: MaxResidentCtas
) -> ReducePlan:
    """Plan oneshot: a cluster per token that is large enough to use all SMs.

    The bandwidth of one SM is only about 36 GB/s.
    """
    for max_cluster in range(min(MAX_CLUSTER_CTAS, max(1, sms // tokens)), MAX_CLUSTER_CTAS + 1):
        for threads, cluster in _iter_row_shapes(vectors, max_cluster, ranks):
            if max_resident_ctas(threads, cluster) >= cluster:
                return ReducePlan(tokens * cluster, threads, cluster)
    raise InvalidArgument(f"a row of {16 * vectors} bytes does not fit a cluster of this GPU")


def plan_resident(
    tokens: int, vectors: int, ranks: int, *, pieces: int, max_resident_ctas: MaxResidentCtas
) -> ReducePlan:
    """Plan oneshot with a resident grid, whose clusters loop over the tokens."""
    threads, cluster, limit = _find_resident_shape(
        -(-vectors // pieces), 1, ranks, max_resident_ctas
    )
    if limit == 0:
        raise InvalidArgument(f"a row of {16 * vectors} bytes does not fit a cluster of this GPU")
    return ReducePlan(min(tokens * cluster, limit), threads, cluster)


def plan_twoshot(
    tokens: int, vectors: int, ranks: int, *, pieces: int, max_resident_ctas: MaxResidentCtas
) -> ReducePlan:
    """Plan twoshot. All CTAs must be co-resident, because some wait for the sums of others.

    With one piece (few rows), a cluster shares a row, so that few rows use all SMs. With two pieces
    (many rows), a row needs one CTA, which avoids cluster barriers (8 x H200, 7168, 2026-11-20:
    47.4 instead of 51.1 us at 512 tokens, 169 instead of 177 at 2048, for 1 x 448 instead of 4 x
    128 threads per row).
    """
    rows = -(-tokens // ranks)
    max_cluster = MAX_CLUSTER_CTAS if pieces == 1 else 1
    threads, cluster, limit = _find_resident_shape(
        -(-vectors // pieces), max_cluster, ranks, max_resident_ctas
    )
    if limit < 2 * cluster:
        raise InvalidArgument(f"a row of {16 * vectors} bytes does not fit a cluster of this GPU")
    # With fewer ranks, a rank owns more of the rows, and summing is a larger part of the work.
    ctas_per_reducer = 3 if pieces == 1 else 2 + ranks / 4
    reducers = min(rows, max(1, int(limit // cluster / ctas_per_reducer))) * cluster
    useful = -(-rows * (ranks - 1) * vectors // threads)
    pushers = min(limit - reducers, -(-useful // cluster) * cluster)
    return ReducePlan(pushers + reducers, threads, cluster, pushers)


def _find_resident_shape(
    vectors: int, max_cluster: int, ranks: int, max_resident_ctas: MaxResidentCtas
) -> tuple[int, int, int]:
    """Return threads, cluster and resident CTAs of the first shape with two resident clusters.

    Clusters of more than `max_cluster` CTAs are used only if smaller clusters do not fit.
    """
    for max_ctas in range(max_cluster, MAX_CLUSTER_CTAS + 1):
        # A CTA has at least four warps, so that a row needs few CTAs.
        max_ctas = min(max_ctas, max(1, -(-vectors // (4 * WARP))))
        for threads, cluster in _iter_row_shapes(vectors, max_ctas, ranks):
            ctas = max_resident_ctas(threads, cluster) // cluster * cluster
            if ctas >= 2 * cluster:
                return threads, cluster, ctas
    return WARP, 1, 0


def _iter_row_shapes(vectors: int, max_cluster: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield (threads, cluster) with a thread for each vector, in at most `max_cluster` CTAs.

    Each CTA also has a thread for each peer, which sends and compares the call word. The second
    cluster size is a power of two, for GPUs that only support these; some of its CTAs may be idle.
    """
    warps = -(-vectors // WARP)
    cta_warps = max(-(-warps // max_cluster), -(-(ranks - 1) // WARP))
    cluster = -(-warps // cta_warps)
    if cta_warps * WARP <= MAX_CTA_THREADS:
        yield cta_warps * WARP, cluster
        yield cta_warps * WARP, 1 << (cluster - 1).bit_length()
