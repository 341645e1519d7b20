# SPDX-License-Identifier: Apache-2.0
"""Host side of the Hopper kernel: source generation, arguments and launch."""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import struct
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int64, c_uint32, c_uint64
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from weft.cuda.driver import call_driver
from weft.errors import DriverError, InvalidArgument, OutOfOrder
from weft.gemm.call import QUANTISING, GemmCall
from weft.gemm.config import (
    BLOCK_N,
    CLUSTER_N,
    DTYPES_16BIT,
    FP8,
    FP8_BLOCK_MS,
    MXFP4,
    MXFP4_BLOCK_MS,
    NORMAL_M,
    SPLIT_M,
    UNIT_PAIR_BYTES,
    Epilogue,
    Gated,
    GatedQuant,
    Push,
    WgmmaPlan,
    wgmma_unsupported_reason,
)
from weft.gemm.mxfp4 import UNIT_BYTES, UNIT_N
from weft.jit import CUDA_OPTIONS, CudaModule, Function, Launcher, compile_cubin, current_arch
from weft.runtime.kernels import unpack_uint64s
from weft.runtime.layout import static_asserts
from weft.runtime.stream import current_stream, loading_context

_log = logging.getLogger(__name__)
SHARED = "weft_gemm_shared"
THREADS = 384
ROW_BOXES = 4  # TMA boxes of 8, 16, 32 and 64 rows
BLOCK_M_GRANULARITY, MAX_SWAP_AB_M = 16, 160
BLOCK_K_BYTES = 128
COMPILE_THREADS = 4
TICKET_SLOTS = 16384  # counters of a kernel; the first is not used
# Constants of gemm/shape.cuh and their values in Python, which the generated source asserts.
SHARED_CONSTANTS = (
    ("weft::gemm_threads", THREADS),
    ("weft::row_boxes", ROW_BOXES),
    ("weft::block_k_bytes", BLOCK_K_BYTES),
    ("weft::block_m_granularity", BLOCK_M_GRANULARITY),
    ("weft::max_swap_ab_m", MAX_SWAP_AB_M),
    ("weft::normal_m", NORMAL_M),
    ("weft::split_m", SPLIT_M),
    ("weft::block_n", BLOCK_N),
    ("weft::cluster_n", CLUSTER_N),
    ("weft::unit_n", UNIT_N),
    ("weft::unit_bytes", UNIT_BYTES),
    ("weft::unit_pair_bytes", UNIT_PAIR_BYTES),
)
OPERANDS = {FP8: "fp8", MXFP4: "mxfp4"} | DTYPES_16BIT  # by dtype of the weights
BIASES = DTYPES_16BIT | {torch.float32: "fp32"}
# Size of a CUtensorMap in words of 8 bytes, and the alignment that the driver requires.
MAP_WORDS, MAP_ALIGNMENT = 16, 64
# Values of cuda.h for elements of one byte, no interleaving, 128-byte swizzle, 128-byte L2
# promotion and zero fill outside the tensor.
_UINT8, _INTERLEAVE_NONE, _SWIZZLE_128B, _L2_128B, _FILL_ZEROS = 0, 0, 3, 2, 0

HEAD = """\
#include <weft/gemm/wgmma.cuh>
namespace weft {{
{instructions}}}  // namespace weft
#include <weft/gemm/{header}>
{layout}constexpr weft::GemmShape S = {shape};
static_assert(S.ctas_per_sm() == {ctas_per_sm});
extern "C" {{ extern __device__ const unsigned long long {shared}[1]; }}
__device__ const unsigned long long {shared}[1] = {{weft::gemm_shared_bytes<S>()}};
"""
SOURCE = """\
{head}{counters}extern "C" __global__ void __launch_bounds__({threads}, {ctas_per_sm})
{name}(const __grid_constant__ weft::GemmArgs a) {{ weft::grouped_gemm<S>(a, {tickets}); }}
"""
MLP_SOURCE = """\
{head}constexpr weft::GemmShape D = {down};
struct MlpArgs {{
    weft::GemmArgs up, down;
    weft::MlpState<S.experts>* state;
}};
static_assert(sizeof(MlpArgs) == {bytes});
extern "C" __global__ void __launch_bounds__({threads}, 1)
{name}(const __grid_constant__ MlpArgs a) {{ weft::grouped_mlp<S, D>(a.up, a.down, *a.state); }}
"""

# PTX of a wgmma over 32 bytes of k for each operand dtype: shape and types, and the operands after
# the predicate (signs and, for 16-bit dtypes, K-major layout of A and B).
INSTRUCTIONS = {
    "fp8": ("k32.f32.e4m3.e4m3", "1, 1"),
    "bf16": ("k16.f32.bf16.bf16", "1, 1, 0, 0"),
    "fp16": ("k16.f32.f16.f16", "1, 1, 0, 0"),
    "mxfp4": ("k32.f32.e4m3.e4m3", "1, 1"),  # expanded to FP8 in registers
}

# Specialization of `wgmma` in gemm/wgmma.cuh for one N. NVRTC requires an instruction as a single
# literal with a register per accumulator. A is a descriptor or registers.
INSTRUCTION = """\
template <> WEFT_FN void wgmma<Operand::{operand}, {n}>(float (&acc)[{count}], {a_type}, u64 b,
                                                       bool accumulate) {{
    asm volatile(
        "{{.reg .pred p; setp.ne.b32 p, %{accumulate}, 0; "
        "wgmma.mma_async.sync.aligned.m64n{n}{types} {{{registers}}}, "
        "{a}, %{b}, p, {flags};}}"
        : {outputs}
        : {inputs}, "l"(b), "r"(u32(accumulate)));
}}
"""


class GemmArgs(ctypes.Structure):
    """Mirror of `weft::GemmArgs` in gemm/shape.cuh."""

    _fields_ = (
        ("weights_map", c_uint64 * MAP_WORDS),
        ("rows_map", c_uint64 * MAP_WORDS * ROW_BOXES),
        ("row_scales", c_uint64),
        ("weight_scales", c_uint64),
        ("out", c_uint64),
        ("out_scales", c_uint64),
        ("dst_addr", c_uint64),
        ("abort_flag", c_uint64),
        ("bias", c_uint64),
        ("counts", c_uint64),
        ("starts", c_uint64),
        ("weights", c_uint64),
        ("row_scale_stride", c_int64),
        ("k_scale_stride", c_int64),
        ("beta", c_float),
        ("linear_beta", c_float),
        ("max_rows", c_uint32),
        ("rows", c_uint32),
        ("alpha", c_float),
        ("offset", c_float),
        ("limit", c_float),
        ("ticket_slot", c_uint32),
    )


class MlpArgs(ctypes.Structure):
    """Mirror of `MlpArgs` in the source of `MlpShape`, which C++ aligns as tensor maps."""

    _fields_ = (
        ("up", GemmArgs),
        ("down", GemmArgs),
        ("state", c_uint64),
        ("padding", c_uint64 * (MAP_ALIGNMENT // 8 - 1)),
    )


_POINTERS = struct.Struct("=10Q")  # row_scales to weights


def wgmma_n_sizes(block_m: int) -> list[int]:
    """Return every N of the wgmma instructions of a kernel that swaps A and B: all heights."""
    step = BLOCK_M_GRANULARITY
    swapped = range(step, min(block_m, MAX_SWAP_AB_M) + 1, step)
    return [*swapped, *range(MAX_SWAP_AB_M + 2 * step, block_m + 1, 2 * step)]


def generate_wgmma(n: int, operand: str) -> str:
    """Return the C++ definition of `wgmma` for 64 rows of A and n rows of B."""
    count = n // 2
    types, flags = INSTRUCTIONS[operand]
    a_type, a, inputs = "u64 a", f"%{count}", ['"l"(a)']
    if operand == "mxfp4":
        operand, a_type = "fp8", "const u32 (&a)[4]"
        a = f"{{{', '.join(f'%{count + i}' for i in range(4))}}}"
        inputs = [f'"r"(a[{i}])' for i in range(4)]
    return INSTRUCTION.format(
        n=n,
        operand=operand,
        types=types,
        flags=flags,
        count=count,
        a_type=a_type,
        a=a,
        inputs=", ".join(inputs),
        b=count + len(inputs),
        accumulate=count + len(inputs) + 1,
        registers=", ".join(f"%{i}" for i in range(count)),
        outputs=", ".join(f'"+f"(acc[{i}])' for i in range(count)),
    )


def unsupported_reason(call: GemmCall, plan: WgmmaPlan) -> str:
    """Return why the kernel does not support a call with a plan, or an empty string.

    The GPU is not considered.
    """
    experts, n, _ = call.sizes
    fp8, mxfp4 = call.a.dtype == FP8, call.b.dtype == MXFP4
    block_ms = MXFP4_BLOCK_MS if mxfp4 else FP8_BLOCK_MS
    if fp8 and plan.block_m not in block_ms:
        kind = "MXFP4" if mxfp4 else "FP8"
        return f"has tiles of {block_ms} rows for {kind}; block_m is {plan.block_m}"
    if call.gated and isinstance(call.epilogue, GatedQuant) != fp8:
        return f"gates FP8 with GatedQuant, other dtypes with Gated; a is {call.a.dtype}"
    biased, out = call.bias is not None, call.out_dtype
    return wgmma_unsupported_reason(
        experts, n, call.b.dtype, gated=call.gated, biased=biased, out=out
    )


def check_plan(call: GemmCall, plan: WgmmaPlan) -> None:
    """Raise InvalidArgument if the plan does not fit the call."""
    if reason := unsupported_reason(call, plan):
        fix = "use one that does" if call.b.dtype == MXFP4 else "use a GemmPlan"
        raise InvalidArgument(f"WgmmaPlan {reason}: {fix}, or omit plan")


@dataclass(frozen=True, slots=True)
class GemmShape:
    """Compile-time parameters of a kernel. Mirrors `weft::GemmShape` in gemm/shape.cuh.

    Attributes:
        experts: Number of experts.
        n: Rows of the weights of an expert.
        k: Columns of the weights of an expert.
        plan: Tile sizes.
        epilogue: "store", "store_fp8", "push", "gated" or "gated_fp8".
        out_dtype: Dtype of 16-bit results: "bf16" or "fp16".
        operand: Dtype of a and b: "fp8", "bf16" or "fp16"; "mxfp4" for FP8 rows and MXFP4 weights.
        bias: "none", "bf16", "fp16" or "fp32".
        prefetch_weights: See `grouped_gemm`.
        flag_in_data: See `Push`.
        situ: Whether the gating is SiTU.
        relu2: Whether the activation of `Store` is "relu2".
        part: "alone", or "up" or "down" in a kernel of both (`MlpShape`).
    """

    experts: int
    n: int
    k: int
    plan: WgmmaPlan
    epilogue: str
    out_dtype: str = "bf16"
    operand: str = "fp8"
    bias: str = "none"
    prefetch_weights: bool = False
    flag_in_data: bool = False
    situ: bool = False
    relu2: bool = False
    part: str = "alone"
    kernel: ClassVar[str] = "weft_grouped_gemm"

    @classmethod
    def from_call(cls, call: GemmCall, plan: WgmmaPlan) -> GemmShape:
        """Build the shape for a call and a plan."""
        return cls(
            *call.sizes,
            plan,
            out_dtype=DTYPES_16BIT.get(call.out_dtype, "bf16"),
            operand=OPERANDS[call.b.dtype],
            bias="none" if call.bias is None else BIASES[call.bias.dtype],
            prefetch_weights=call.prefetch_weights,
            **describe_epilogue(call.epilogue),
        )

    @property
    def cpp_value(self) -> str:
        """The C++ initialiser of `weft::GemmShape`."""
        block_m, stages = self.plan.block_m, self.plan.stages(self.experts, self.operand)
        sizes = f"{self.experts}, {self.n}, {self.k}, {block_m}, {stages}"
        enums = f"weft::Epilogue::{self.epilogue}, weft::DType::{self.out_dtype}, "
        enums += f"weft::Operand::{self.operand}, weft::Bias::{self.bias}"
        flags = self.prefetch_weights, self.flag_in_data, self.situ, self.relu2
        booleans = ", ".join(str(flag).lower() for flag in flags)
        return f"{{{sizes}, {enums}, {booleans}, weft::Part::{self.part}}}"

    @property
    def draws_tickets(self) -> bool:
        """Whether clusters draw their tiles from a counter: kernels with split tiles do."""
        return self.operand == "fp8" and self.plan.block_m == SPLIT_M

    @property
    def source(self) -> str:
        """The generated source of the kernel's entry."""
        draws = self.draws_tickets
        return SOURCE.format(
            head=self.source_head("grouped_gemm.cuh"),
            name=self.kernel,
            threads=THREADS,
            ctas_per_sm=self.plan.ctas_per_sm(self.operand),
            counters=f"__device__ weft::TicketCounter tickets[{TICKET_SLOTS}];\n" if draws else "",
            tickets="tickets" if draws else "nullptr",
        )

    def source_head(self, header: str) -> str:
        """Return the start of the source: instructions, headers and this shape."""
        wide = self.plan.has_wide_n(self.experts, self.operand)
        ns = [BLOCK_N] if wide else wgmma_n_sizes(self.plan.block_m)
        if self.operand == "mxfp4":
            ns = [BLOCK_M_GRANULARITY // 2, *ns]
        return HEAD.format(
            instructions="".join(generate_wgmma(n, self.operand) for n in ns),
            header=header,
            shape=self.cpp_value,
            layout=static_asserts((GemmArgs,), SHARED_CONSTANTS),
            shared=SHARED,
            ctas_per_sm=self.plan.ctas_per_sm(self.operand),
        )

    def compile(self, arch: str) -> bytes:
        """Compile the kernel and return its cubin; needs no GPU. Raises CompileError."""
        return compile_cubin(self.source, name="grouped_gemm", arch=arch, options=CUDA_OPTIONS)


@dataclass(frozen=True, slots=True)
class MlpShape:
    """Compile-time parameters of a kernel of both GEMMs of experts.

    Attributes:
        up: Shape of the GEMM whose results the other one multiplies.
        down: Shape of the other one, with the same plan.
    """

    up: GemmShape
    down: GemmShape
    kernel: ClassVar[str] = "weft_grouped_mlp"

    @classmethod
    def from_shapes(cls, up: GemmShape, down: GemmShape) -> MlpShape:
        """Combine the shapes of two kernels."""
        up = replace(up, part="up", prefetch_weights=False)
        return cls(up, replace(down, part="down", prefetch_weights=False))

    @property
    def source(self) -> str:
        """The generated source of the kernel's entry."""
        return MLP_SOURCE.format(
            head=self.up.source_head("grouped_mlp.cuh"),
            down=self.down.cpp_value,
            bytes=ctypes.sizeof(MlpArgs),
            name=self.kernel,
            threads=THREADS,
        )

    def compile(self, arch: str) -> bytes:
        """Compile the kernel and return its cubin; needs no GPU. Raises CompileError."""
        return compile_cubin(self.source, name="grouped_mlp", arch=arch, options=CUDA_OPTIONS)


def describe_epilogue(epilogue: Epilogue) -> dict[str, Any]:
    """Return the fields of `GemmShape` that an epilogue determines."""
    if isinstance(epilogue, Push):
        return {"epilogue": "push", "flag_in_data": epilogue.flag_in_data}
    suffix = "_fp8" if isinstance(epilogue, QUANTISING) else ""
    if isinstance(epilogue, Gated):
        return {"epilogue": f"gated{suffix}", "situ": epilogue.situ}
    return {"epilogue": f"store{suffix}", "relu2": epilogue.activation == "relu2"}


Shape = GemmShape | MlpShape
_functions: dict[tuple[int, Shape], Function] = {}  # by device and shape; all threads use it


def load_kernel(shape: Shape) -> Function:
    """Return the kernel of a shape on the current device; compiled and loaded by the first call.

    All threads share the module, which is never unloaded.

    Raises:
        InvalidArgument: the GPU is not a Hopper GPU.
        OutOfOrder: the kernel is not loaded, and the current stream is being captured.
    """
    device = torch.cuda.current_device()
    function = _functions.get((device, shape))
    if function is None:
        # If two threads load the kernel at once, one module is unused. A lock could deadlock:
        # loading may wait for running kernels, which may wait for the work of the other thread.
        function = _functions.setdefault((device, shape), _load_kernel(shape))
    return function


class TicketSlots:
    """Assigns counters of a kernel to launches, so that none shares one with a concurrent launch.

    Launches in one stream follow each other and share a counter, which every launch leaves at 0.
    A captured launch keeps a counter of its own, because its graph may be replayed in any stream.
    When all counters are assigned, tiles are dealt to clusters in turn, which takes longer if
    experts have different numbers of rows; this is logged once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_stream: dict[int, int] = {}  # by cuStreamGetId, which is never reused
        self._last = 0
        self._exhausted = False

    def assign(self, stream: int) -> int:
        """Return the slot for a launch in a CUstream, the current one, or 0 if none is left."""
        if torch.cuda.is_current_stream_capturing():
            with self._lock:
                return self._take()
        stream_id = int(call_driver("cuStreamGetId", stream))
        with self._lock:
            slot = self._by_stream.get(stream_id)
            if slot is None:
                slot = self._by_stream[stream_id] = self._take()
            return slot

    def _take(self) -> int:
        if self._last + 1 == TICKET_SLOTS:
            if not self._exhausted:
                _log.warning(
                    "grouped GEMM: all %d counters of a kernel are assigned, so new captures and "
                    "streams deal tiles in turn; capture graphs anew less often",
                    TICKET_SLOTS - 1,
                )
            self._exhausted = True
            return 0
        self._last += 1
        return self._last


_ticket_slots: dict[tuple[int, GemmShape], TicketSlots] = {}  # by device and shape, as _functions


class HopperArguments:
    """Kernel arguments of calls that differ only in tensor addresses.

    A tensor map is encoded only if its address differs from that of the last call.
    """

    def __init__(self, call: GemmCall) -> None:
        rows, k = call.a.shape
        self._struct = args = GemmArgs(max_rows=call.max_rows, rows=rows)
        if call.a_scale is not None:
            args.row_scale_stride, args.k_scale_stride = call.a_scale.stride()
        if isinstance(call.epilogue, Gated):
            args.alpha, args.offset = call.epilogue.alpha, call.epilogue.offset
            args.limit = math.inf if call.epilogue.limit is None else call.epilogue.limit
            args.beta = call.epilogue.beta or 0.0
            args.linear_beta = call.epilogue.linear_beta or 0.0
        row_bytes = k * call.a.itemsize
        experts, n, _ = call.sizes
        self._rows_shape = rows, row_bytes
        self._weights_shape = experts, n, row_bytes, call.gated
        self._fp8, self._mxfp4 = call.a.dtype == FP8, call.b.dtype == MXFP4
        self._struct_address = ctypes.addressof(args)
        self._a = self._b = -1  # addresses in the tensor maps

    def fill_addresses(self, addresses: Sequence[int]) -> GemmArgs:
        """Write the addresses of the tensors into the arguments and return them.

        All calls return the same struct.

        Args:
            addresses: See `GemmCall.addresses`.
        """
        *pointers, a, b = addresses
        if a != self._a:
            maps = encode_row_maps(a, *self._rows_shape)
            ctypes.memmove(self._struct_address + GemmArgs.rows_map.offset, maps, len(maps))
            self._a = a
        if b != self._b and not self._mxfp4:
            encoded = encode_weights_map(b, *self._weights_shape, fp8=self._fp8)
            offset = GemmArgs.weights_map.offset
            ctypes.memmove(self._struct_address + offset, encoded, len(encoded))
            self._b = b
        _POINTERS.pack_into(self._struct, GemmArgs.row_scales.offset, *pointers, b)
        return self._struct


class MlpLaunch:
    """Launcher of both GEMMs of experts in one kernel, for one device and one thread.

    Calls differ only in tensor addresses.

    Args:
        up: The GEMM whose results are a and a_scale of `down`, with the same counts and starts.
    """

    def __init__(self, up: GemmCall, down: GemmCall, plan: WgmmaPlan, use_pdl: bool) -> None:
        self._device = torch.cuda.current_device()
        shapes = (GemmShape.from_call(call, plan) for call in (up, down))
        self._launcher = Launcher(
            load_kernel(MlpShape.from_shapes(*shapes)), MlpArgs, use_pdl=use_pdl, cluster=2
        )
        self._up, self._down = HopperArguments(up), HopperArguments(down)
        self._args = MlpArgs()
        clusters = plan.max_m_blocks(len(up.a), len(up.b)) * -(
            -max(up.sizes[1], down.sizes[1]) // CLUSTER_N
        )
        self._grid = min(_count_sms(self._device) // 2, clusters) * 2, 1, 1

    def __call__(self, tensors: Sequence[torch.Tensor | None], addresses: Sequence[int]) -> None:
        """Launch the kernel on the current stream. Raises DriverError.

        Args:
            tensors: Not used.
            addresses: `GemmCall.addresses` of both GEMMs, then that of int32 `[2 + experts]`, which
                is 0 between launches.
        """
        half = len(addresses) // 2
        for part, arguments, own in (
            (MlpArgs.up, self._up, addresses[:half]),
            (MlpArgs.down, self._down, addresses[half:-1]),
        ):
            args = arguments.fill_addresses(own)
            to = ctypes.addressof(self._args) + part.offset
            ctypes.memmove(to, ctypes.addressof(args), part.size)
        self._args.state = addresses[-1]
        self._launcher(self._args, self._grid, THREADS, current_stream(self._device))


class HopperLaunch:
    """Launcher of calls that differ only in tensor addresses, for one device and one thread."""

    def __init__(self, call: GemmCall, plan: WgmmaPlan, num_sms: int | None, use_pdl: bool) -> None:
        rows, (experts, n, _) = len(call.a), call.sizes
        self._device = torch.cuda.current_device()
        shape = GemmShape.from_call(call, plan)
        function = load_kernel(shape)
        key = self._device, shape
        self._tickets = (
            _ticket_slots.setdefault(key, TicketSlots()) if shape.draws_tickets else None
        )
        self._launcher = Launcher(function, GemmArgs, use_pdl=use_pdl, cluster=2)
        self._arguments = HopperArguments(call)
        clusters = plan.max_m_blocks(rows, experts) * -(-n // CLUSTER_N)
        # num_sms limits the CTAs, because CTAs that fit on one SM may run on different SMs.
        max_ctas = num_sms or _count_sms(self._device) * plan.ctas_per_sm(shape.operand)
        self._grid = min(max(max_ctas, 2) // 2, clusters) * 2, 1, 1

    def __call__(self, tensors: Sequence[torch.Tensor | None], addresses: Sequence[int]) -> None:
        """Launch the kernel on the current stream. Raises DriverError."""
        args, stream = self._arguments.fill_addresses(addresses), current_stream(self._device)
        if self._tickets is not None:
            args.ticket_slot = self._tickets.assign(stream)
        self._launcher(args, self._grid, THREADS, stream)


def encode_row_maps(address: int, rows: int, row_bytes: int) -> bytes:
    """Encode the tensor maps of the rows, with boxes of 8, 16, 32 and 64 rows."""
    sizes, strides = (row_bytes, rows), (row_bytes,)
    boxes = ((BLOCK_K_BYTES, 8 << box) for box in range(ROW_BOXES))
    return b"".join(encode_tensor_map(address, sizes, strides, box) for box in boxes)


def encode_weights_map(
    address: int, experts: int, n: int, row_bytes: int, gated: bool, *, fp8: bool
) -> bytes:
    """Encode the tensor map of the weights, with boxes of 128 rows of one expert.

    Gated FP8 weights have boxes of 64 rows of gate or of up. Other gated weights have boxes in
    which eight rows of gate and eight of up alternate; TMA supports such strides, which do not
    ascend.
    """
    half = n // 2
    if fp8 or not gated:
        box = BLOCK_K_BYTES, BLOCK_N // 2 if gated else BLOCK_N
        return encode_tensor_map(address, (row_bytes, experts * n), (row_bytes,), box)
    sizes = row_bytes, 8, 2, half // 8, experts
    strides = row_bytes, half * row_bytes, 8 * row_bytes, n * row_bytes
    return encode_tensor_map(address, sizes, strides, (BLOCK_K_BYTES, 8, 2, 8, 1))


@functools.lru_cache(maxsize=4096)
def encode_tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """Encode the CUtensorMap of a tensor of bytes with 128-byte swizzle.

    Encoding does not access the tensor's memory, so results can be cached.

    Args:
        address: Address of the tensor.
        sizes: Size of each dimension, innermost first: bytes of a row, then rows.
        strides: Strides in bytes of all dimensions except the first.
        box: Size of the box that one load copies; the innermost is 128 bytes.

    Raises:
        DriverError: the driver failed to encode the map.
    """
    buffer = (ctypes.c_uint64 * (MAP_WORDS + MAP_ALIGNMENT // 8))()
    aligned = -(-ctypes.addressof(buffer) // MAP_ALIGNMENT) * MAP_ALIGNMENT
    rank = len(sizes)
    status = _load_driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(aligned),
        ctypes.c_int(_UINT8),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        *map(ctypes.c_int, (_INTERLEAVE_NONE, _SWIZZLE_128B, _L2_128B, _FILL_ZEROS)),
    )
    if status:
        raise DriverError(
            f"cuTensorMapEncodeTiled failed with error {status} for a tensor at {address:#x} with "
            f"sizes {sizes}, strides {strides} and box {box}; the address and the strides must be "
            "multiples of 16"
        )
    return ctypes.string_at(aligned, 8 * MAP_WORDS)


@functools.cache
def _load_driver() -> ctypes.CDLL:
    # cuda.bindings stores a CUtensorMap in a Python object, which may not be aligned.
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(
            f"the NVIDIA driver was not found: {error}; use CPU tensors on this machine"
        ) from error


def preload_kernels(shapes: Iterable[Shape]) -> None:
    """Compile kernels in parallel and load them, so that later calls find them loaded.

    Raises:
        InvalidArgument: the GPU is not a Hopper GPU.
        OutOfOrder: the current stream is being captured.
    """
    device = torch.cuda.current_device()
    missing = [shape for shape in shapes if (device, shape) not in _functions]
    if not missing:
        return
    with loading_context(device):
        arch = current_arch()
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        list(pool.map(lambda shape: shape.compile(arch), missing))
    for shape in missing:
        load_kernel(shape)


def _load_kernel(shape: Shape) -> Function:
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        mxfp4 = isinstance(shape, GemmShape) and shape.operand == "mxfp4"
        feature = "MXFP4 weights need" if mxfp4 else "WgmmaPlan is for"
        alternative = "FP8 weights" if mxfp4 else "a GemmPlan, or omit plan"
        raise InvalidArgument(
            f"{feature} compute capability 9.0, but this GPU has {major}.{minor}: use {alternative}"
        )
    if torch.cuda.is_current_stream_capturing():
        raise OutOfOrder(
            "the first grouped GEMM of a shape on a device loads its kernel, which a capture does "
            "not allow; call it once before the capture"
        )
    with loading_context(torch.cuda.current_device()):
        module = CudaModule(shape.compile(current_arch()), name=shape.kernel, permanent=True)
        (shared,) = unpack_uint64s(module.global_bytes(SHARED))
        return module.function(shape.kernel, shared=shared)


@functools.cache
def _count_sms(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
