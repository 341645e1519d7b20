"""Compiled low-latency dispatch and combine for one shape, on a CPU or a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_uint64
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import InvalidArgument
from weft.jit import (
    CUDA_OPTIONS,
    HOST_OPTIONS,
    CudaModule,
    Launcher,
    compile_cubin,
    compile_shared,
    current_arch,
)
from weft.jit.args import decode, expected, table_source, verify
from weft.lowlatency.shape import (
    CHUNK_TOKENS,
    LowLatencyCombineArgs,
    LowLatencyDispatchArgs,
    LowLayout,
    LowShape,
    RoutingRecord,
    TraceRecord,
)
from weft.runtime.args import Site
from weft.runtime.check import check_sms
from weft.runtime.stream import current_stream, loading

THREADS = 256  # max_threads in lowlatency/metadata.cuh
FEW_TOKENS, FEW_THREADS = 32, 128  # up to so many tokens, more and smaller CTAs
SENDERS_PER_SM, RECEIVERS_PER_SM = 1, 2  # CTAs of THREADS
RECEIVED_VECTORS = 128  # 16-byte vectors of a row that a warp receives at once: RowFragment::span
PARTS = {"": "whole", "_send": "send", "_receive": "recv"}  # entry: weft::PhasePart
TABLES: dict[str, type[ctypes.Structure]] = {
    "RoutingRecord": RoutingRecord,
    "TraceRecord": TraceRecord,
    "LowLatencyDispatchArgs": LowLatencyDispatchArgs,
    "LowLatencyCombineArgs": LowLatencyCombineArgs,
}


@dataclass(frozen=True, slots=True)
class LowBuild:
    """How kernels are made and launched; it may differ from rank to rank.

    num_sms: SMs that the kernels may fill; None for all.
    programmatic: launch with programmatic dependent launch.
    split_phase: also build each phase as send and receive.
    defines: macros for the compiler.
    """

    num_sms: int | None = None
    programmatic: bool = True
    split_phase: bool = False
    defines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class LowPlan:
    """A launch: CTAs by role (weft::CtaRoles), of so many threads, and the coordinator."""

    metadata: int
    senders: int
    receivers: int
    threads: int

    @property
    def ctas(self) -> int:
        """All of them."""
        return 1 + self.metadata + self.senders + self.receivers


def _doors(split_phase: bool) -> dict[str, tuple[str, str]]:
    """Entries by name: the argument struct, and the template behind it."""
    found = {}
    for part, cpp in PARTS.items():
        if part and not split_phase:
            continue
        extra = f", weft::PhasePart::{cpp}"
        found[f"dispatch{part}"] = ("LowLatencyDispatchArgs", f"low_latency_dispatch<S{extra}>")
        found[f"combine{part}"] = ("LowLatencyCombineArgs", f"low_latency_combine<S{extra}>")
    return found


def _tables(*, device: bool) -> str:
    return "".join(
        table_source(struct, f"weft::{name}", f"weft_{name}", device=device)
        for name, struct in TABLES.items()
    )


def cuda_source(shape: LowShape, *, split_phase: bool = False) -> str:
    """The generated CUDA entries of a shape."""
    lines = [
        "#include <weft/lowlatency/combine.cuh>",
        "#include <weft/lowlatency/dispatch.cuh>",
        "#include <weft/lowlatency/exports.cuh>",
        f"constexpr weft::LowLatencyShape S = {shape.literal()};",
        "WEFT_LOW_LATENCY_EXPORT(S, __device__);",
        'extern "C" __device__ weft::u64 weft_measured[weft::measured_offsets] = {};',
        'extern "C" __global__ void weft_measure(const __grid_constant__ weft::Site a) '
        "{ weft::measure_low_latency<S>(a.base, weft_measured); }",
        _tables(device=True),
    ]
    for name, (struct, call) in _doors(split_phase).items():
        # Many FP8 rows of a token, and many peers, need more registers: two CTAs an SM, not three.
        rows = shape.ranks if shape.reduce == "sender" else shape.top_k
        hungry = shape.ranks > 16
        if name.startswith("combine"):
            hungry = shape.combine_fp8 and rows > 4
        per_sm = 2 if hungry else 3
        lines += [
            f'extern "C" __global__ void __launch_bounds__({THREADS}, {per_sm})',
            f"{name}(const __grid_constant__ weft::{struct} a) {{ weft::{call}(a); }}",
        ]
    return "\n".join(lines) + "\n"


def cpu_source(shape: LowShape) -> str:
    """The generated C++ entries of a shape; halves included, they cost nothing."""
    lines = [
        "#include <weft/lowlatency/dispatch_cpu.hpp>",
        "#include <weft/lowlatency/combine_cpu.hpp>",
        "#include <weft/lowlatency/exports.cuh>",
        f"constexpr weft::LowLatencyShape S = {shape.literal()};",
        "WEFT_LOW_LATENCY_EXPORT(S, );",
        _tables(device=False),
    ]
    for name, (struct, call) in _doors(True).items():
        lines.append(f'extern "C" void {name}(const weft::{struct}* a) {{ weft::{call}(*a); }}')
    return "\n".join(lines) + "\n"


def compile_cuda(
    shape: LowShape, arch: str, *, split_phase: bool = False, defines: Sequence[str] = ()
) -> bytes:
    """The cubin of all kernels; needs no GPU. Raises CompileError showing the entries."""
    return compile_cubin(
        cuda_source(shape, split_phase=split_phase),
        name="lowlatency",
        arch=arch,
        options=CUDA_OPTIONS,
        defines=defines,
    )


class LowCpuEntries:
    """The operations as plain functions; they return when they are done."""

    def __init__(self, shape: LowShape, layout: LowLayout, build: LowBuild) -> None:
        check_sms(build.num_sms, None)
        library = compile_shared(
            cpu_source(shape), name="lowlatency", options=HOST_OPTIONS, defines=build.defines
        )
        numbers = (c_uint64 * len(layout.expected())).in_dll(library, "weft_layout")
        layout.verify(list(numbers))
        for name, struct in TABLES.items():
            verify(struct, list((c_uint64 * len(expected(struct))).in_dll(library, f"weft_{name}")))
        self._functions: dict[str, Any] = {}
        for name, (struct_name, _) in _doors(True).items():
            function = getattr(library, name)
            function.restype = None
            function.argtypes = (ctypes.POINTER(TABLES[struct_name]),)
            self._functions[name] = function

    def run(self, name: str, args: LowLatencyDispatchArgs | LowLatencyCombineArgs) -> None:
        """Run one operation to its end."""
        self._functions[name](ctypes.byref(args))

    def close(self) -> None:
        """Nothing is held: the library stays loaded for the next object of this shape."""


class LowCudaEntries:
    """The operations as kernels on the current device, enqueued on the current stream."""

    def __init__(self, shape: LowShape, layout: LowLayout, build: LowBuild) -> None:
        available = torch.cuda.get_device_properties().multi_processor_count
        check_sms(build.num_sms, available)
        self._device, self._shape = torch.cuda.current_device(), shape
        self._sms, self._build = build.num_sms or available, build
        image = compile_cuda(
            shape, current_arch(), split_phase=build.split_phase, defines=build.defines
        )
        self._module = CudaModule(image, name="lowlatency")
        layout.verify(decode(self._module.global_bytes("weft_layout")))
        for name, struct in TABLES.items():
            verify(struct, decode(self._module.global_bytes(f"weft_{name}")))
        measure = Launcher(self._module.function("weft_measure"), Site)
        with self._module.own_stream() as stream:
            measure(Site(base=layout.share_bytes), (1, 1, 1), 1, stream)
        layout.verify_code(decode(self._module.global_bytes("weft_measured")))
        self._launchers = {
            name: Launcher(
                self._module.function(name), TABLES[struct], programmatic=build.programmatic
            )
            for name, (struct, _) in _doors(build.split_phase).items()
        }
        self._plans: dict[tuple[str, int], LowPlan] = {}

    def run(self, name: str, args: LowLatencyDispatchArgs | LowLatencyCombineArgs) -> None:
        """Enqueue one operation."""
        if torch.cuda.current_device() != self._device:
            raise InvalidArgument(
                f"the current device is cuda:{torch.cuda.current_device()}, this all-to-all works "
                f"on cuda:{self._device}: call torch.cuda.set_device({self._device}) first"
            )
        key = (name, int(args.tokens))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(*key)
        args.senders = plan.senders
        stream = torch.cuda.current_stream().cuda_stream
        self._launchers[name](args, (plan.ctas, 1, 1), plan.threads, stream)

    def close(self) -> None:
        """Unload the module, once its kernels have run."""
        self._module.unload(after=current_stream(self._device))

    def _plan(self, name: str, tokens: int) -> LowPlan:
        """The launch of an operation on so many tokens; all of it fits on the GPU at once."""
        threads = FEW_THREADS if tokens <= FEW_TOKENS else THREADS
        resident = self._sms * max(1, self._module.occupancy(name, threads))
        return plan_low(self._shape, self._build, name, tokens, threads, self._sms, resident)


def plan_low(
    shape: LowShape,
    build: LowBuild,
    name: str,
    tokens: int,
    threads: int,
    sms: int,
    resident: int,
) -> LowPlan:
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
    return LowPlan(metadata, senders, receivers, threads)


def load_low_entries(
    device: torch.device, shape: LowShape, layout: LowLayout, build: LowBuild
) -> LowCpuEntries | LowCudaEntries:
    """Compile and load the operations of a shape for one rank's device.

    Raises InvalidArgument for halves of a combine that sends nothing.
    """
    if build.split_phase and shape.gemm_push:
        raise InvalidArgument(
            "split_phase=True, combine='gemm_push', whose combine sends nothing: leave "
            "split_phase out"
        )
    if device.type == "cpu":
        return LowCpuEntries(shape, layout, build)
    with loading(device):
        return LowCudaEntries(shape, layout, build)
