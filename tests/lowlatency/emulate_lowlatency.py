"""The kernels of the low-latency all-to-all compiled for a CPU, behind its entries' interface."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from tests.emulator.emulate import build_library, emulated_tree
from weft.lowlatency.config import LowShape
from weft.lowlatency.kernels import FEW_THREADS, LowLatencyPlan, entry_points, plan_low

SMS, RESIDENT = 2, 8  # of the GPU that is made up: few CTAs, so that each does several units


def compile_low(shape: LowShape, folder: Path, *, defines: Sequence[str] = ()) -> Path:
    """The shared library of all kernels of a LowShape."""
    entries = "".join(
        'extern "C" __attribute__((visibility("default"))) '
        f"void {name}(const weft::{struct.__name__}* a, unsigned ctas, unsigned threads) {{ "
        "emulated::launch(emulated::seen_from(a->site, S.ranks, {ctas, 1, threads}), "
        f"[a] {{ weft::{call}(*a); }}); }}\n"
        for name, (struct, call) in entry_points(split_phase=True).items()
    )
    text = (
        "#include <weft/lowlatency/combine.cuh>\n"
        "#include <weft/lowlatency/dispatch.cuh>\n"
        f"constexpr weft::LowLatencyShape S = {shape.literal()};\n{entries}"
    )
    return build_library(emulated_tree(folder), text, defines=defines)


class EmulatedLow:
    """Entries that run the kernels on a made-up GPU of few SMs."""

    def __init__(self, library: Path, shape: LowShape) -> None:
        self.library, self._shape = ctypes.CDLL(str(library)), shape
        self.plans: dict[str, LowLatencyPlan] = {}  # the latest of each kind

    def run(self, name: str, args: ctypes.Structure, tokens: int) -> None:
        """Run one operation to its end."""
        plan = plan_low(self._shape, name, tokens, FEW_THREADS, SMS, RESIDENT)
        args.senders = plan.senders
        self.plans[name] = plan
        getattr(self.library, name)(ctypes.byref(args), plan.ctas, plan.threads)

    def close(self) -> None:
        """Nothing is held."""
