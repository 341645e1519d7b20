# SPDX-License-Identifier: Apache-2.0
"""Kernels of a low-latency all-to-all: generated entries and launch plans."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from weft.errors import InvalidArgument
from weft.lowlatency.config import (
    CHUNK_TOKENS,
    LowLatencyCombineArgs,
    LowLatencyDispatchArgs,
    LowLatencyOffsets,
    LowLatencyShape,
    RoutingRecord,
    get_trace_record_type,
)
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
from weft.runtime.stream import loading_context

THREADS = 256  # max_threads in lowlatency/metadata.cuh
FEW_TOKENS, FEW_THREADS = 32, 128  # up to this number of tokens, use smaller CTAs
SENDERS_PER_SM, RECEIVERS_PER_SM = 1, 2  # CTAs of THREADS threads
RECEIVED_VECTORS = 128  # 16-byte vectors of a row that a warp receives at once: RowFragment::span


@dataclass(frozen=True, slots=True)
class LowLatencyPlan:
    """A launch: number of CTAs of each role (weft::CtaRoles) and threads per CTA."""

    metadata: int
    senders: int
    receivers: int
    threads: int

    @property
    def ctas(self) -> int:
        """Number of CTAs, with the coordinator."""
        return 1 + self.metadata + self.senders + self.receivers


PHASES: EntryPoints = {
    "dispatch": (LowLatencyDispatchArgs, "low_latency_dispatch<S, {}>"),
    "combine": (LowLatencyCombineArgs, "low_latency_combine<S, {}>"),
}


def build_cpu_program(shape: LowLatencyShape) -> Program:
    """Return the C++ program of a shape; it always has both halves of each phase."""
    return Program(
        name="lowlatency",
        label="all-to-all",
        ranks=shape.ranks,
        headers=("lowlatency/dispatch_cpu.hpp", "lowlatency/combine_cpu.hpp"),
        constants=f"constexpr weft::LowLatencyShape S = {shape.to_cpp()};\n",
        entry_points=split_entries(PHASES, split_phase=True),
        offsets=LowLatencyOffsets.from_shape(shape).get_expected_offsets(),
        structs=(RoutingRecord, get_trace_record_type(shape.ranks)),
    )


def build_cuda_program(shape: LowLatencyShape, *, split_phase: bool = False) -> Program:
    """Return the CUDA program of a shape."""
    entries = split_entries(PHASES, split_phase=split_phase)
    # Many FP8 rows per token, or many peers, need more registers: two CTAs per SM, not three.
    rows = shape.ranks if shape.reduce == "sender" else shape.top_k
    per_sm = {
        "dispatch": 2 if shape.ranks > 16 else 3,
        "combine": 2 if shape.combine_fp8 and rows > 4 else 3,
    }
    return replace(
        build_cpu_program(shape),
        headers=("lowlatency/combine.cuh", "lowlatency/dispatch.cuh"),
        entry_points=entries,
        bounds={name: (THREADS, per_sm[name.partition("_")[0]]) for name in entries},
    )


class CudaLowLatency(CudaKernels):
    """CUDA kernels of a low-latency all-to-all of one shape."""

    def __init__(self, shape: LowLatencyShape, build: Build) -> None:
        super().__init__(build_cuda_program(shape, split_phase=build.split_phase), build)
        self._shape = shape

    def _build_launch(self, name: str, tokens: int) -> Launch:
        """Return a launch whose CTAs are co-resident."""
        threads = FEW_THREADS if tokens <= FEW_TOKENS else THREADS
        resident = self._sms * self._max_ctas_per_sm(name, threads)
        plan = plan_launch(self._shape, name, tokens, threads, self._sms, resident)
        launcher = self._get_launcher(name, use_pdl=self._build.use_pdl)
        return Launch(launcher, (plan.ctas, 1, 1), plan.threads, (("senders", plan.senders),))


def plan_launch(
    shape: LowLatencyShape,
    name: str,
    tokens: int,
    threads: int,
    sms: int,
    resident: int,
) -> LowLatencyPlan:
    """Divide the CTAs of a launch between sending metadata, sending rows and receiving.

    The token counts of other ranks are unknown: the plan assumes that they equal this rank's, but
    at least 16. All CTAs are co-resident.

    Args:
        shape: Sizes of the all-to-all.
        name: Name of the entry.
        tokens: Number of this rank's tokens.
        threads: Threads per CTA.
        sms: Number of SMs.
        resident: Number of CTAs that fit on the GPU at once.
    """
    warps, scale = threads // 32, THREADS // threads
    peer_tokens = max(tokens, min(shape.tokens, 16))
    strips = -(-shape.hidden // 512)  # warps that send one row
    # Work of senders and receivers, in warps.
    if name.startswith("dispatch"):
        metadata = max(1, -(-tokens // CHUNK_TOKENS))
        sending = tokens * strips
        receiving = peer_tokens * shape.ranks * -(-shape.sent_bytes // (16 * RECEIVED_VECTORS))
    else:
        metadata = 0
        sending = 0 if shape.gemm_push else peer_tokens * min(shape.ranks, shape.top_k) * strips
        receiving = tokens * -(-shape.hidden // (512 if shape.combine_fp8 else 256))
    if name.endswith("_receive"):
        metadata = sending = 0
    if name.endswith("_send"):
        receiving = 0
    senders = min(-(-sending // warps), sms * SENDERS_PER_SM * scale)
    receivers = min(-(-receiving // warps), sms * RECEIVERS_PER_SM * scale)
    available = max(2, resident - metadata - 1)
    # If they do not all fit, limit the senders to half of the CTAs.
    if senders + receivers > available:
        senders = min(senders, available // 2 if receivers else available)
        receivers = min(receivers, available - senders)
    if not name.endswith("_send"):
        receivers = max(receivers, 1)
    if not metadata and not shape.gemm_push:
        senders = max(senders, 0 if name.endswith("_receive") else 1)
    return LowLatencyPlan(metadata, senders, receivers, threads)


def load_kernels(device: torch.device, shape: LowLatencyShape, build: Build) -> Kernels:
    """Compile and load the kernels of a shape for one rank's device.

    Raises:
        InvalidArgument: split_phase with combine="gemm_push".
    """
    if build.split_phase and shape.gemm_push:
        raise InvalidArgument(
            "split_phase=True with combine='gemm_push', which has no send half: leave "
            "split_phase out"
        )
    if device.type == "cpu":
        return CpuKernels(build_cpu_program(shape), build)
    with loading_context(device):
        return CudaLowLatency(shape, build)
