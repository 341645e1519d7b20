# SPDX-License-Identifier: Apache-2.0
"""The emulated cluster detects every fault of the table in the grouped GEMM."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from tests.gemm.cases import UNTOUCHED, Case, Output, applied, shape_of
from tests.gemm.emulate import EmulatedHopper
from tests.mutations import GEMM, WRONG, Mutation
from weft.gemm import STORE, Epilogue, Gated, GatedQuant, Push, StoreQuant, WgmmaPlan
from weft.gemm.config import MXFP4

pytestmark = pytest.mark.slow

# Swapped and normal tiles in turn, enough for the ring of stages to wrap.
FP8 = Case(counts=(40, 130, 120, 5, 30), n=256, k=384)
CASES = {
    "fp8": FP8,
    "bf16": replace(FP8, dtype=torch.bfloat16, n=272, bias=True),
    "mxfp4": replace(FP8, dtype=MXFP4, bias=True, counts=(40, 130, 120, 5, 12)),
    # Split tiles, some cut, one of which leaves a warpgroup without rows, and wide ones between.
    "split": replace(FP8, counts=(276, 190, 280), n=768),
    "wide": replace(FP8, n=768),
}
EPILOGUES: dict[str, tuple[Epilogue, float]] = {
    "store": (STORE, 2.0**-7),
    "gated": (Gated(), 2.0**-6),
    "gated_fp8": (GatedQuant(), 0.08),
    "relu2_fp8": (StoreQuant("relu2"), 0.08),
}


@dataclass(frozen=True)
class GemmRun:
    """One grouped GEMM on an emulated GPU of `sms`. block_m: of the plan. k: of the case."""

    epilogue: str = "store"
    block_m: int = 160
    sms: int = 2
    k: int = 384
    weights: str = "fp8"
    prefetch_weights: bool = False

    def play(self, patch: pytest.MonkeyPatch, seeds: int, mutation: Mutation | None = None) -> None:
        """Compare the GEMM with the oracle in many orders. Raises AssertionError."""
        tiles = {128: "wide", 256: "split"} if self.weights == "fp8" else {}
        case = replace(CASES[tiles.get(self.block_m, self.weights)], k=self.k)
        prefetch: dict[str, Any] = {"prefetch_weights": self.prefetch_weights}
        plan = WgmmaPlan(self.block_m)
        shapes = (shape_of(case, self.block_m, self.epilogue, **prefetch),)
        emulated = EmulatedHopper(shapes, mutation, sms=self.sms)
        emulated.patch(patch)
        made = case.make()
        oracle = made.oracle()
        for seed in range(seeds):
            emulated.seed, emulated.policy = seed, seed % 3
            options = prefetch | {"programmatic_launch": True}
            if self.epilogue == "push":
                remote = torch.full((case.rows, case.n), UNTOUCHED, dtype=torch.bfloat16)
                order = torch.arange(case.rows).flip(0)
                made.call(Push(remote.data_ptr() + order * case.n * 2), plan, **options)
                got, expected, tolerance = Output(case, remote[order]), oracle, 2.0**-7
            else:
                epilogue, tolerance = EPILOGUES[self.epilogue]
                got = made.call(epilogue, plan, **options)
                expected = applied(epilogue, oracle)
            try:
                got.agrees(expected, tolerance)
            except AssertionError as error:
                raise AssertionError(WRONG) from error


RUNS = dict.fromkeys(GemmRun(**mutation.run) for mutation in GEMM.values())


@pytest.mark.parametrize("run", RUNS, ids=repr)
def test_the_kernel_without_a_fault_passes(run: GemmRun, monkeypatch: pytest.MonkeyPatch):
    run.play(monkeypatch, 3)


@pytest.mark.parametrize("name", GEMM)
def test_a_fault_is_detected(name: str, monkeypatch: pytest.MonkeyPatch):
    mutation = GEMM[name]
    with pytest.raises(AssertionError, match=mutation.error):
        GemmRun(**mutation.run).play(monkeypatch, 40, mutation)
