# SPDX-License-Identifier: Apache-2.0
"""The kernels of a low-latency all-to-all: generated entries, and how each is launched."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from weft.errors import InvalidArgument
from weft.lowlatency.config import (
    CHUNK_TOKENS,
    LowLatencyCombineArgs,
    LowLatencyDispatchArgs,
    LowOffsets,
    LowShape,
    RoutingRecord,
    trace_record,
)
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
from weft.runtime.stream import loading

THREADS = 256  # max_threads in lowlatency/metadata.cuh
FEW_TOKENS, FEW_THREADS = 32, 128  # up to so many tokens, more and smaller CTAs
SENDERS_PER_SM, RECEIVERS_PER_SM = 1, 2  # CTAs of THREADS
RECEIVED_VECTORS = 128  # 16-byte vectors of a row that a warp receives at once: RowFragment::span


@dataclass(frozen=True, slots=True)
class LowLatencyPlan:
    """A launch: CTAs by role (weft::CtaRoles), of so many threads, and the coordinator."""

    metadata: int
    senders: int
    receivers: int
    threads: int

    @property
    def ctas(self) -> int:
        """All of them."""
        return 1 + self.metadata + self.senders + self.receivers


PHASES: EntryPoints = {
    "dispatch": (LowLatencyDispatchArgs, "low_latency_dispatch<S, {}>"),
    "combine": (LowLatencyCombineArgs, "low_latency_combine<S, {}>"),
}


def cpu_program(shape: LowShape) -> Program:
    """The generated C++ entries of a shape; both halves of a phase included, they cost nothing."""
    return Program(
        name="lowlatency",
        what="all-to-all",
        ranks=shape.ranks,
        headers=("lowlatency/dispatch_cpu.hpp", "lowlatency/combine_cpu.hpp"),
        constants=f"constexpr weft::LowLatencyShape S = {shape.literal()};\n",
        entry_points=in_parts(PHASES, split_phase=True),
        offsets=LowOffsets.of(shape).asserted(),
        structs=(RoutingRecord, trace_record(shape.ranks)),
    )


def cuda_program(shape: LowShape, *, split_phase: bool = False) -> Program:
    """The generated CUDA entries of a shape."""
    entries = in_parts(PHASES, split_phase=split_phase)
    # Many FP8 rows of a token, and many peers, need more registers: two CTAs an SM, not three.
    rows = shape.ranks if shape.reduce == "sender" else shape.top_k
    per_sm = {
        "dispatch": 2 if shape.ranks > 16 else 3,
        "combine": 2 if shape.combine_fp8 and rows > 4 else 3,
    }
    return replace(
        cpu_program(shape),
        headers=("lowlatency/combine.cuh", "lowlatency/dispatch.cuh"),
        entry_points=entries,
        bounds={name: (THREADS, per_sm[name.partition("_")[0]]) for name in entries},
    )


class CudaLowLatency(CudaKernels):
    """The kernels of one shape."""

    def __init__(self, shape: LowShape, build: Build) -> None:
        super().__init__(cuda_program(shape, split_phase=build.split_phase), build)
        self._shape = shape

    def _find(self, name: str, tokens: int) -> Launch:
        """All of a launch fits on the GPU at once."""
        threads = FEW_THREADS if tokens <= FEW_TOKENS else THREADS
        resident = self._sms * self._per_sm(name, threads)
        p = plan_low(self._shape, name, tokens, threads, self._sms, resident)
        launcher = self._launcher(name, programmatic=self._build.programmatic)
        return Launch(launcher, (p.ctas, 1, 1), p.threads, (("senders", p.senders),))


def plan_low(
    shape: LowShape,
    name: str,
    tokens: int,
    threads: int,
    sms: int,
    resident: int,
) -> LowLatencyPlan:
    """How many CTAs send metadata, send rows and receive.

    Sizes of other ranks are not known here: rows of theirs are planned for as if they had as many
    tokens as this one, and 16 at least. All CTAs together fit on the GPU (`resident`).
    """
    warps, wide = threads // 32, THREADS // threads
    others = max(tokens, min(shape.tokens, 16))
    pieces = -(-shape.hidden // 512)  # warps that send one row
    if name.startswith("dispatch"):
        metadata = max(1, -(-tokens // CHUNK_TOKENS))
        sending = tokens * pieces
        receiving = others * shape.ranks * -(-shape.sent_bytes // (16 * RECEIVED_VECTORS))
    else:
        metadata = 0
        sending = 0 if shape.gemm_push else others * min(shape.ranks, shape.top_k) * pieces
        receiving = tokens * -(-shape.hidden // (512 if shape.combine_fp8 else 256))
    if name.endswith("_receive"):
        metadata = sending = 0
    if name.endswith("_send"):
        receiving = 0
    senders = min(-(-sending // warps), sms * SENDERS_PER_SM * wide)
    receivers = min(-(-receiving // warps), sms * RECEIVERS_PER_SM * wide)
    room = max(2, resident - metadata - 1)
    # Where room is short, receivers go first: senders wait for loads, receivers for senders.
    if senders + receivers > room:
        senders = min(senders, room // 2 if receivers else room)
        receivers = min(receivers, room - senders)
    if not name.endswith("_send"):
        receivers = max(receivers, 1)
    if not metadata and not shape.gemm_push:
        senders = max(senders, 0 if name.endswith("_receive") else 1)
    return LowLatencyPlan(metadata, senders, receivers, threads)


def load_kernels(device: torch.device, shape: LowShape, build: Build) -> Kernels:
    """Compile and load the operations of a shape for one rank's device.

    Raises InvalidArgument for halves of a combine that sends nothing.
    """
    if build.split_phase and shape.gemm_push:
        raise InvalidArgument(
            "split_phase=True, combine='gemm_push', whose combine sends nothing: leave "
            "split_phase out"
        )
    if device.type == "cpu":
        return CpuKernels(cpu_program(shape), build)
    with loading(device):
        return CudaLowLatency(shape, build)
