# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernel for Hopper's tensor cores, on the host: its source, its arguments, its launch."""

from __future__ import annotations

import ctypes
import functools
import math
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_float, c_int64, c_uint32, c_uint64
from dataclasses import dataclass

import torch

from weft.errors import DriverError, InvalidArgument, OutOfOrder
from weft.gemm.call import GemmCall
from weft.gemm.config import (
    BLOCK_N,
    CLUSTER_N,
    DTYPES_16BIT,
    FP8,
    FP8_BLOCK_MS,
    MXFP4,
    MXFP4_BLOCK_MS,
    NORMAL_M,
    UNIT_PAIR_BYTES,
    Gated,
    GatedQuant,
    Push,
    WgmmaPlan,
    wgmma_lacks,
)
from weft.gemm.mxfp4 import UNIT_BYTES, UNIT_N
from weft.jit import CUDA_OPTIONS, CudaModule, Function, Launcher, compile_cubin, current_arch
from weft.runtime.kernels import numbers_of
from weft.runtime.layout import assertions
from weft.runtime.stream import current_stream, loading

NAME, SHARED = "weft_grouped_gemm", "weft_gemm_shared"
THREADS = 384
ROW_BOXES = 4  # of 8, 16, 32 and 64 rows
BLOCK_M_GRANULARITY, MAX_SWAP_AB_M = 16, 160
BLOCK_K_BYTES = 128
SPLIT_M = 256  # rows of an FP8 tile that the CTAs of a cluster share out
COMPILE_THREADS = 4
# The constants of gemm/shape.cuh that Python computes with; the generated source asserts them.
NUMBERS = (
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
# Of a CUtensorMap: words of 8 bytes, and the alignment that the driver insists on.
MAP_WORDS, MAP_ALIGNMENT = 16, 64
# From cuda.h: bytes, no interleaving, 128-byte swizzle, 128-byte promotion to L2, zeros outside.
_BYTES, _PLAIN, _SWIZZLE_128, _PROMOTE_128, _ZEROS = 0, 0, 3, 2, 0

SOURCE = """\
#include <weft/gemm/wgmma.cuh>
namespace weft {{
{instructions}}}  // namespace weft
#include <weft/gemm/grouped_gemm.cuh>
constexpr weft::GemmShape S = {shape};
static_assert(S.ctas_per_sm() == {ctas_per_sm});
{layout}extern "C" {{ extern __device__ const unsigned long long {shared}[1]; }}
__device__ const unsigned long long {shared}[1] = {{weft::gemm_shared_bytes<S>()}};
extern "C" __global__ void __launch_bounds__({threads}, {ctas_per_sm})
{name}(const __grid_constant__ weft::GemmArgs a) {{ weft::grouped_gemm<S>(a); }}
"""

# For 32 bytes of k of each operand dtype, in PTX: how many numbers and their type, and what follows
# the predicate: signs and, for 16-bit numbers, that both operands are K-major.
INSTRUCTIONS = {
    "fp8": ("k32.f32.e4m3.e4m3", "1, 1"),
    "bf16": ("k16.f32.bf16.bf16", "1, 1, 0, 0"),
    "fp16": ("k16.f32.f16.f16", "1, 1, 0, 0"),
    "mxfp4": ("k32.f32.e4m3.e4m3", "1, 1"),  # by then FP8, in registers
}

# `wgmma` of gemm/wgmma.cuh. NVRTC wants an instruction's text in one piece, so there is one
# function for each N, with a register for each accumulator; A is a descriptor or registers.
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
        ("reserved", c_uint32),
    )


_POINTERS = struct.Struct("=10Q")  # row_scales to weights


def wgmma_ns(block_m: int) -> list[int]:
    """The N of a kernel's wgmma instructions: heights of its swapped tiles, and 128 of weights."""
    step = BLOCK_M_GRANULARITY
    fine = range(step, min(block_m, MAX_SWAP_AB_M) + 1, step)
    return [*fine, *range(MAX_SWAP_AB_M + 2 * step, block_m + 1, 2 * step)]


def instruction(n: int, operand: str) -> str:
    """`wgmma` for 64 rows of the A operand and n of the B operand."""
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


def unsupported(call: GemmCall, plan: WgmmaPlan) -> str:
    """Why the kernel does not serve a call by its plan, or "". Knows nothing of the GPU."""
    experts, n, _ = call.sizes
    fp8, mxfp4 = call.a.dtype == FP8, call.b.dtype == MXFP4
    block_ms = MXFP4_BLOCK_MS if mxfp4 else FP8_BLOCK_MS
    if fp8 and plan.block_m not in block_ms:
        kind = "MXFP4" if mxfp4 else "FP8"
        return f"has tiles of {block_ms} rows for {kind}; block_m is {plan.block_m}"
    if call.gated and isinstance(call.epilogue, GatedQuant) != fp8:
        return f"gates FP8 with GatedQuant, other dtypes with Gated; a is {call.a.dtype}"
    biased, out = call.bias is not None, call.out_dtype
    return wgmma_lacks(experts, n, call.b.dtype, gated=call.gated, biased=biased, out=out)


def check_plan(call: GemmCall, plan: WgmmaPlan) -> None:
    """Refuse a plan that does not fit the call. Raises InvalidArgument."""
    if why := unsupported(call, plan):
        other = "use one that does" if call.b.dtype == MXFP4 else "use a GemmPlan"
        raise InvalidArgument(f"WgmmaPlan {why}: {other}, or leave plan out")


@dataclass(frozen=True, slots=True)
class GemmShape:
    """What a kernel is compiled for; mirrors `weft::GemmShape` in gemm/shape.cuh.

    epilogue: "store", "push", "gated" or "gated_fp8".   out_dtype: of 16-bit results, "bf16" or
        "fp16".
    operand: dtype of a and b, "fp8", "bf16" or "fp16"; "mxfp4" where a is FP8 and b MXFP4.
    bias: "none", "bf16", "fp16" or "fp32".
    prefetch_weights: as in `grouped_gemm`.   flag_in_data: as in `Push`.   situ: gating has betas.
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

    @classmethod
    def of(cls, call: GemmCall, plan: WgmmaPlan) -> GemmShape:
        """The shape of the kernel that serves a call."""
        push = call.epilogue if isinstance(call.epilogue, Push) else None
        gated = "gated_fp8" if call.a.dtype == FP8 else "gated"
        return cls(
            *(*call.sizes, plan, gated if call.gated else "push" if push else "store"),
            out_dtype=DTYPES_16BIT.get(call.out_dtype, "bf16"),
            operand=OPERANDS[call.b.dtype],
            bias="none" if call.bias is None else BIASES[call.bias.dtype],
            prefetch_weights=call.prefetch_weights,
            flag_in_data=push is not None and push.flag_in_data,
            situ=isinstance(call.epilogue, Gated) and call.epilogue.situ,
        )

    @property
    def literal(self) -> str:
        """`weft::GemmShape`, as C++."""
        block_m, stages = self.plan.block_m, self.plan.stages(self.experts, self.operand)
        sizes = f"{self.experts}, {self.n}, {self.k}, {block_m}, {stages}"
        enums = {"Epilogue": self.epilogue, "DType": self.out_dtype, "Operand": self.operand}
        words = [f"weft::{kind}::{word}" for kind, word in (enums | {"Bias": self.bias}).items()]
        flags = self.prefetch_weights, self.flag_in_data, self.situ
        last = ", ".join(str(flag).lower() for flag in flags)
        return f"{{{sizes}, {', '.join(words)}, {last}}}"

    @property
    def source(self) -> str:
        """The generated entry."""
        names = wgmma_ns(self.plan.block_m)
        return SOURCE.format(
            instructions="".join(instruction(n, self.operand) for n in names),
            shape=self.literal,
            layout=assertions((GemmArgs,), NUMBERS),
            name=NAME,
            shared=SHARED,
            threads=THREADS,
            ctas_per_sm=self.plan.ctas_per_sm(self.operand),
        )

    def compile(self, arch: str) -> bytes:
        """The kernel's cubin; needs no GPU. Raises CompileError showing the entry."""
        return compile_cubin(self.source, name="grouped_gemm", arch=arch, options=CUDA_OPTIONS)


_functions: dict[tuple[int, GemmShape], Function] = {}  # by device; of all threads


def load(shape: GemmShape) -> Function:
    """The kernel of a shape on the current device; compiled and loaded at the first call.

    The module stays as long as the process, and serves all threads. Raises InvalidArgument on
    another GPU than Hopper, OutOfOrder if that first call is being captured.
    """
    device = torch.cuda.current_device()
    function = _functions.get((device, shape))
    if function is None:
        # Two threads may both come here; then one's module stays unused. No lock: its holder's
        # load could wait for kernels that wait for the other thread.
        function = _functions.setdefault((device, shape), _load(shape))
    return function


class Arguments:
    """The kernel's arguments of one kind of call, for tensors anywhere.

    A tensor map is encoded only where it describes another address than in the last call.
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
        self._rows, self._weights = (rows, row_bytes), (experts, n, row_bytes, call.gated)
        self._fp8, self._mxfp4 = call.a.dtype == FP8, call.b.dtype == MXFP4
        self._at = ctypes.addressof(args)
        self._a = self._b = -1  # the addresses that its maps describe

    def at(self, addresses: Sequence[int]) -> GemmArgs:
        """With tensors at the addresses of `GemmCall.tensors`; the same struct for every call."""
        *pointers, a, b = addresses
        if a != self._a:
            maps = rows_maps(a, *self._rows)
            ctypes.memmove(self._at + GemmArgs.rows_map.offset, maps, len(maps))
            self._a = a
        if b != self._b and not self._mxfp4:
            words = weights_map(b, *self._weights, fp8=self._fp8)
            ctypes.memmove(self._at + GemmArgs.weights_map.offset, words, len(words))
            self._b = b
        _POINTERS.pack_into(self._struct, GemmArgs.row_scales.offset, *pointers, b)
        return self._struct


class HopperLaunch:
    """Launches one kind of call on the current device, in one thread; `load`s its kernel."""

    def __init__(
        self, call: GemmCall, plan: WgmmaPlan, num_sms: int | None, programmatic: bool
    ) -> None:
        rows, (experts, n, _) = len(call.a), call.sizes
        self._device = torch.cuda.current_device()
        shape = GemmShape.of(call, plan)
        function = load(shape)
        self._launcher = Launcher(function, GemmArgs, programmatic=programmatic, cluster=2)
        self._arguments = Arguments(call)
        clusters = plan.max_m_blocks(rows, experts) * -(-n // CLUSTER_N)
        # Another CTA on an SM may get another SM: with num_sms there are no more CTAs than SMs.
        most = num_sms or _sms(self._device) * plan.ctas_per_sm(shape.operand)
        self._grid = min(max(most, 2) // 2, clusters) * 2, 1, 1

    def __call__(self, tensors: Sequence[torch.Tensor | None], addresses: Sequence[int]) -> None:
        """Enqueue the kernel in the current stream. Raises DriverError."""
        args = self._arguments.at(addresses)
        self._launcher(args, self._grid, THREADS, current_stream(self._device))


def rows_maps(address: int, rows: int, row_bytes: int) -> bytes:
    """The tensor maps of the rows: boxes of 8, 16, 32 and 64 of them."""
    sizes, strides = (row_bytes, rows), (row_bytes,)
    boxes = ((BLOCK_K_BYTES, 8 << box) for box in range(ROW_BOXES))
    return b"".join(tensor_map(address, sizes, strides, box) for box in boxes)


def weights_map(
    address: int, experts: int, n: int, row_bytes: int, gated: bool, *, fp8: bool
) -> bytes:
    """The tensor map of the weights: boxes of 128 rows of one expert.

    Gated FP8: of 64 rows, gate or up. Other gated dtypes: eight rows of gate, eight of up, and so
    on; these strides do not ascend, which the driver and the copy engine accept.
    """
    row, half = row_bytes, n // 2
    if fp8 or not gated:
        n_box = BLOCK_N // 2 if gated else BLOCK_N
        return tensor_map(address, (row, experts * n), (row,), (BLOCK_K_BYTES, n_box))
    sizes, box = (row, 8, 2, half // 8, experts), (BLOCK_K_BYTES, 8, 2, 8, 1)
    return tensor_map(address, sizes, (row, half * row, 8 * row, n * row), box)


@functools.lru_cache(maxsize=4096)
def tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> bytes:
    """The CUtensorMap of a tensor of bytes, whose boxes go to rows of 128 swizzled bytes.

    sizes: in bytes and then in rows, the fastest first.   strides: bytes from one to the next, of
    all dimensions but the first.   box: sizes of what one load brings; 128 first. A pure function
    of its arguments: the memory is not looked at. Raises DriverError.
    """
    room = (ctypes.c_uint64 * (MAP_WORDS + MAP_ALIGNMENT // 8))()
    start = ctypes.addressof(room)
    place = -(-start // MAP_ALIGNMENT) * MAP_ALIGNMENT
    rank = len(sizes)
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        ctypes.c_int(_BYTES),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*(1,) * rank),
        *map(ctypes.c_int, (_PLAIN, _SWIZZLE_128, _PROMOTE_128, _ZEROS)),
    )
    if status:
        raise DriverError(
            f"cuTensorMapEncodeTiled refused (error {status}) a tensor at {address:#x} of sizes "
            f"{sizes}, strides {strides}, box {box}; addresses and strides are multiples of 16"
        )
    return ctypes.string_at(place, 8 * MAP_WORDS)


@functools.cache
def _driver() -> ctypes.CDLL:
    # Not through cuda.bindings: its CUtensorMap is in a Python object, which need not be aligned.
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(
            f"the NVIDIA driver was not found: {error}; use CPU tensors on this machine"
        ) from error


def preload(shapes: Iterable[GemmShape]) -> None:
    """`load` all of them, compiled several at a time, so that no call has to.

    Raises OutOfOrder while a graph is being captured, and what `load` raises.
    """
    device = torch.cuda.current_device()
    wanted = [shape for shape in shapes if (device, shape) not in _functions]
    if not wanted:
        return
    with loading(device):
        arch = current_arch()
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        list(pool.map(lambda shape: shape.compile(arch), wanted))
    for shape in wanted:
        load(shape)


def _load(shape: GemmShape) -> Function:
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        mxfp4 = shape.operand == "mxfp4"
        what = "MXFP4 weights need" if mxfp4 else "WgmmaPlan is for"
        other = "FP8 weights" if mxfp4 else "a GemmPlan, or leave plan out"
        raise InvalidArgument(
            f"{what} compute capability 9.0, this GPU has {major}.{minor}: use {other}"
        )
    if torch.cuda.is_current_stream_capturing():
        raise OutOfOrder(
            "the first grouped GEMM of a shape on a device loads its kernel, which a graph cannot "
            "hold; call it once before capturing"
        )
    with loading(torch.cuda.current_device()):
        module = CudaModule(shape.compile(current_arch()), name="grouped_gemm", stays=True)
        (shared,) = numbers_of(module.global_bytes(SHARED))
        return module.function(NAME, shared=shared)


@functools.cache
def _sms(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
