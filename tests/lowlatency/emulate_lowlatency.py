# SPDX-License-Identifier: Apache-2.0
"""The kernels of the low-latency all-to-all compiled for a CPU, behind its entries' interface."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from tests.emulator.emulate import Emulated, build_library, emulated_tree, entry
from weft.lowlatency.config import LowShape
from weft.lowlatency.kernels import FEW_THREADS, PHASES, LowLatencyPlan, plan_low
from weft.runtime.kernels import in_parts

SMS, RESIDENT = 2, 8  # of the GPU that is made up: few CTAs, so that each does several units


def compile_low(shape: LowShape, folder: Path, *, defines: Sequence[str] = ()) -> Path:
    """The shared library of all kernels of a LowShape."""
    entries = "".join(
        entry(name, struct.__name__, call)
        for name, (struct, call) in in_parts(PHASES, split_phase=True).items()
    )
    text = (
        "#include <weft/lowlatency/combine.cuh>\n"
        "#include <weft/lowlatency/dispatch.cuh>\n"
        f"constexpr weft::LowLatencyShape S = {shape.literal()};\n{entries}"
    )
    return build_library(emulated_tree(folder), text, defines=defines)


class EmulatedLow(Emulated):
    """Entries that run the kernels on a made-up GPU of few SMs."""

    def __init__(self, library: Path, shape: LowShape) -> None:
        super().__init__(library)
        self._shape = shape
        self.plans: dict[str, LowLatencyPlan] = {}  # the latest of each kind

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run one operation to its end."""
        plan = plan_low(self._shape, name, tokens, FEW_THREADS, SMS, RESIDENT)
        args.senders = plan.senders
        self.plans[name] = plan
        self.launch(name, args, plan.ctas, plan.threads)
