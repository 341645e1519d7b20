"""How the kernels of an all-reduce are launched: of every backend, for every epilogue."""

from __future__ import annotations

import torch

from weft.allreduce.args import ReduceArgs
from weft.allreduce.plan import ReducePlan, plan_oneshot, plan_twoshot
from weft.allreduce.reduction import Reduction
from weft.allreduce.source import KERNELS, MOE, cpu_program, cuda_program
from weft.jit import Launcher
from weft.runtime.kernels import Build, CpuKernels, CudaKernels, Kernels, Launch
from weft.runtime.stream import loading

# 16-byte words of a call, for each rank, from which on a launch that overlaps its predecessor only
# takes room from it: it gains 0.5 us up to 32 tokens x 7168 on 8 ranks, and loses 5 % at 128
# (8 x H200, 2026-11-20).
LONG = 7500
DECIDED = ("pushers", "reducers", "pushers_finish")  # by the plan


class CudaReduceEntries(CudaKernels):
    """The kernels of one Reduction."""

    def __init__(self, reduction: Reduction, build: Build) -> None:
        super().__init__(cuda_program(reduction), build)
        self._reduction = reduction
        self._functions = {name: self._module.function(name) for name in self._program.entry_points}
        self._launchers: dict[tuple[str, int, bool], Launcher] = {}
        self._resident: dict[tuple[str, int, int], int] = {}

    def resident(self, name: str, threads: int, cluster: int) -> int:
        """CTAs of a kernel that fit on the GPU at once; of both kernels of a backend."""
        key = (name, threads, cluster)
        if key not in self._resident:
            self._resident[key] = cluster * min(
                self._module.resident_clusters(name + end, threads, cluster) for end in ("", MOE)
            )
        return self._resident[key]

    def _overlaps(self, name: str, tokens: int, p: ReducePlan) -> bool:
        """May a launch take its place while its predecessor runs?

        One shot only where three launches fit on the GPU. Where two hardly do, their clusters get
        in each other's way (7168, 2 x H200): 448 CTAs on a GPU that holds 660 took 907 us instead
        of 6.8 (64 tokens, 2026-11-20), 256 CTAs 1663 us instead of 11.8 (128, 2026-11-22).
        """
        if tokens * self._reduction.vectors >= LONG * self._reduction.ranks:
            return False
        return name != "oneshot" or 3 * p.ctas <= self.resident(name, p.threads, p.cluster)

    def _find(self, name: str, tokens: int) -> Launch:
        p = self._plan(name.removesuffix(MOE), tokens)
        early = self._build.programmatic and self._overlaps(name.removesuffix(MOE), tokens, p)
        fields = tuple((field, int(getattr(p, field))) for field in DECIDED)
        return Launch(self._launcher(name, p.cluster, early), (p.ctas, 1, 1), p.threads, fields)

    def _launcher(self, name: str, cluster: int, early: bool) -> Launcher:
        key = (name, cluster, early)
        if key not in self._launchers:
            self._launchers[key] = Launcher(
                self._functions[name], ReduceArgs, programmatic=early, cluster=cluster
            )
        return self._launchers[key]

    def _plan(self, name: str, tokens: int) -> ReducePlan:
        """The launch of a backend on so many tokens."""

        def resident(threads: int, cluster: int) -> int:
            return self.resident(name, threads, cluster)

        vectors, ranks = self._reduction.vectors, self._reduction.ranks
        if name == "oneshot":
            return plan_oneshot(tokens, vectors, sms=self._sms, resident=resident)
        pieces = KERNELS[name].pieces
        return plan_twoshot(tokens, vectors, ranks, pieces=pieces, resident=resident)


def load_entries(device: torch.device, reduction: Reduction, build: Build) -> Kernels:
    """Compile and load all backends of a Reduction for one rank's device."""
    if device.type == "cpu":
        return CpuKernels(cpu_program(reduction), build)
    with loading(device):
        return CudaReduceEntries(reduction, build)
