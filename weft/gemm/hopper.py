"""The CUDA kernel for Hopper's tensor cores, on the host: what it serves, its launch."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from weft.errors import InvalidArgument, OutOfOrder
from weft.gemm.epilogue import Gated, GatedQuant, Push
from weft.gemm.hopper_source import ROW_BOXES, SHARED, THREADS, GemmArgs, compile_cuda
from weft.gemm.plans import (
    BLOCK_N,
    CLUSTER_N,
    DTYPES_16BIT,
    FP8,
    FP8_BLOCK_MS,
    MAX_EXPERTS,
    WgmmaPlan,
)
from weft.gemm.problem import GemmProblem
from weft.gemm.tensor_map import tensor_map
from weft.jit import CudaModule, Function, Launcher, current_arch
from weft.runtime.kernels import numbers_of
from weft.runtime.stream import current_stream, loading

BLOCK_K_BYTES = 128  # block_k_bytes in gemm/shape.cuh
COMPILE_THREADS = 4
OPERANDS = {FP8: "fp8"} | DTYPES_16BIT
BIASES = DTYPES_16BIT | {torch.float32: "fp32"}


def unsupported(problem: GemmProblem, plan: WgmmaPlan) -> str:
    """Why the kernel does not serve a problem by its plan, or "". Knows nothing of the GPU."""
    experts, n, _ = problem.b.shape
    fp8 = problem.a.dtype == FP8
    if fp8 and n % CLUSTER_N:
        return f"takes n in multiples of {CLUSTER_N} for FP8; it is {n}"
    if fp8 and plan.block_m not in FP8_BLOCK_MS:
        return f"has tiles of {FP8_BLOCK_MS} rows for FP8; block_m is {plan.block_m}"
    if experts > MAX_EXPERTS:
        return f"takes at most {MAX_EXPERTS} experts; b has {experts}"
    if fp8 and problem.bias is not None:
        return "takes no bias for FP8"
    if problem.gated and isinstance(problem.epilogue, GatedQuant) != fp8:
        return f"gates FP8 with GatedQuant, other dtypes with Gated; a is {problem.a.dtype}"
    if problem.out_dtype not in DTYPES_16BIT and not (problem.gated and fp8):
        return f"stores bfloat16 or float16; out is {problem.out_dtype}"
    return ""


def check_plan(problem: GemmProblem, plan: WgmmaPlan) -> None:
    """Refuse a plan that does not fit the call. Raises InvalidArgument."""
    if why := unsupported(problem, plan):
        raise InvalidArgument(f"WgmmaPlan {why}: use a GemmPlan, or leave plan out")


@dataclass(frozen=True, slots=True)
class GemmShape:
    """What a kernel is compiled for; mirrors `weft::GemmShape` in gemm/shape.cuh.

    epilogue: "store", "push", "gated" or "gated_fp8".   out_dtype: of 16-bit results, "bf16" or
        "fp16".
    operand: dtype of a and b, "fp8", "bf16" or "fp16".   bias: "none", "bf16", "fp16" or "fp32".
    prefetch_weights: as in `grouped_gemm`.   flag_in_data: as in `Push`.
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

    @classmethod
    def of(cls, problem: GemmProblem, plan: WgmmaPlan) -> GemmShape:
        """The shape of the kernel that serves a call."""
        experts, n, k = problem.b.shape
        prefetch = problem.prefetch_weights
        if problem.gated and problem.a.dtype == FP8:
            return cls(experts, n, k, plan, "gated_fp8", prefetch_weights=prefetch)
        push = problem.epilogue if isinstance(problem.epilogue, Push) else None
        bias = None if problem.bias is None else BIASES[problem.bias.dtype]
        return cls(
            *(experts, n, k, plan, "gated" if problem.gated else "push" if push else "store"),
            out_dtype=DTYPES_16BIT[problem.out_dtype],
            operand=OPERANDS[problem.a.dtype],
            bias=bias or "none",
            prefetch_weights=prefetch,
            flag_in_data=push is not None and push.flag_in_data,
        )

    @property
    def literal(self) -> str:
        """`weft::GemmShape`, as C++."""
        block_m, stages = self.plan.block_m, self.plan.stages(self.experts, self.operand)
        sizes = f"{self.experts}, {self.n}, {self.k}, {block_m}, {stages}"
        enums = {"Epilogue": self.epilogue, "DType": self.out_dtype, "Operand": self.operand}
        words = [f"weft::{kind}::{word}" for kind, word in (enums | {"Bias": self.bias}).items()]
        flags = ", ".join(str(flag).lower() for flag in (self.prefetch_weights, self.flag_in_data))
        return f"{{{sizes}, {', '.join(words)}, {flags}}}"

    def compile(self, arch: str, *, options: Sequence[str] = ()) -> bytes:
        """The kernel's cubin; needs no GPU. Raises CompileError showing the entry."""
        return compile_cuda(self.literal, self.plan.block_m, self.operand, arch, options=options)


def launch(problem: GemmProblem, plan: WgmmaPlan, num_sms: int | None, programmatic: bool) -> None:
    """Enqueue the kernel in the current stream.

    Raises InvalidArgument on another GPU than Hopper, OutOfOrder if the first call of a shape is
    being captured, DriverError.
    """
    rows, experts = len(problem.a), len(problem.b)
    if not rows or not experts:
        return
    device = problem.a.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(problem, plan, num_sms, programmatic)
        return
    launcher = load(GemmShape.of(problem, plan), programmatic)
    clusters = plan.max_m_blocks(rows, experts) * -(-problem.b.shape[1] // CLUSTER_N)
    grid = min(max(num_sms or _sms(device.index), 2) // 2, clusters) * 2
    launcher(_arguments(problem), (grid, 1, 1), THREADS, current_stream(device.index))


class _Launchers(threading.local):
    """Launchers of this thread: a launcher serves one thread at a time."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, GemmShape, bool], Launcher] = {}


_launchers = _Launchers()
_functions: dict[tuple[int, GemmShape], Function] = {}  # by device; of all threads


def load(shape: GemmShape, programmatic: bool) -> Launcher:
    """The launcher of a shape on the current device; compiled and loaded at the first call.

    The module stays as long as the process, and serves all threads. Raises InvalidArgument on
    another GPU than Hopper, OutOfOrder if that first call is being captured.
    """
    device = torch.cuda.current_device()
    launcher = _launchers.of.get((device, shape, programmatic))
    if launcher is None:
        function = _functions.get((device, shape))
        if function is None:
            # Two threads may both come here; then one's module stays unused. No lock: its holder's
            # load could wait for kernels that wait for the other thread.
            function = _functions.setdefault((device, shape), _load(shape))
        launcher = Launcher(function, GemmArgs, programmatic=programmatic, cluster=2)
        _launchers.of[device, shape, programmatic] = launcher
    return launcher


def _arguments(problem: GemmProblem) -> GemmArgs:
    rows, k = problem.a.shape
    epilogue = problem.epilogue
    args = GemmArgs(
        row_scales=_address(problem.a_scale),
        weight_scales=_address(problem.b_scale),
        out=_address(problem.out),
        out_scales=_address(problem.out_scale),
        dst_addr=_address(epilogue.dst_addr if isinstance(epilogue, Push) else None),
        abort_flag=_address(epilogue.abort_flag if isinstance(epilogue, Push) else None),
        bias=_address(problem.bias),
        counts=problem.counts.data_ptr(),
        starts=_address(problem.starts),
        max_rows=problem.max_rows,
        rows=rows,
    )
    if problem.a_scale is not None:
        args.row_scale_stride, args.k_scale_stride = problem.a_scale.stride()
    if isinstance(epilogue, Gated):
        args.alpha, args.offset = epilogue.alpha, epilogue.offset
        args.limit = math.inf if epilogue.limit is None else epilogue.limit
    args.weights_map[:] = _weights_map(problem)
    row_bytes = k * problem.a.element_size()
    for box in range(ROW_BOXES):
        args.rows_map[box][:] = tensor_map(
            problem.a.data_ptr(), (row_bytes, rows), (row_bytes,), (BLOCK_K_BYTES, 8 << box)
        )
    return args


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _weights_map(problem: GemmProblem) -> tuple[int, ...]:
    """The tensor map of the weights: boxes of 128 rows of one expert.

    Gated FP8: 64 rows of gate and the same 64 of up. Other gated dtypes: eight rows of gate, eight
    of up, and so on; these strides do not ascend, which the driver and the copy engine accept.
    """
    experts, n, k = problem.b.shape
    at, row, half = problem.b.data_ptr(), k * problem.b.element_size(), n // 2
    if not problem.gated:
        return tensor_map(at, (row, experts * n), (row,), (BLOCK_K_BYTES, BLOCK_N))
    strides = row, half * row, n * row
    if problem.b.dtype == FP8:
        return tensor_map(at, (row, half, 2, experts), strides, (BLOCK_K_BYTES, 64, 2, 1))
    sizes, box = (row, 8, 2, half // 8, experts), (BLOCK_K_BYTES, 8, 2, 8, 1)
    return tensor_map(at, sizes, (row, half * row, 8 * row, n * row), box)


def preload(shapes: Iterable[GemmShape], programmatic: bool) -> None:
    """`load` all of them, compiled several at a time, so that no call has to.

    Raises OutOfOrder while a graph is being captured, and what `load` raises.
    """
    device = torch.cuda.current_device()
    wanted = [shape for shape in shapes if (device, shape) not in _functions]
    if not wanted:
        return
    if torch.cuda.is_current_stream_capturing():
        raise OutOfOrder("kernels are loaded before a graph is captured, not in it")
    with loading(device):
        arch = current_arch()
    with ThreadPoolExecutor(COMPILE_THREADS) as pool:
        list(pool.map(lambda shape: shape.compile(arch), wanted))
    for shape in wanted:
        load(shape, programmatic)


def _load(shape: GemmShape) -> Function:
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        raise InvalidArgument(
            f"WgmmaPlan is for compute capability 9.0, this GPU has {major}.{minor}: use a "
            "GemmPlan, or leave plan out"
        )
    if torch.cuda.is_current_stream_capturing():
        raise OutOfOrder(
            "the first grouped GEMM of a shape on a device loads its kernel, which a graph cannot "
            "hold; call it once before capturing"
        )
    with loading(torch.cuda.current_device()):
        module = CudaModule(shape.compile(current_arch()), name="grouped_gemm", stays=True)
        (shared,) = numbers_of(module.global_bytes(SHARED))
        return module.function("grouped_gemm", shared=shared)


@functools.cache
def _sms(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
