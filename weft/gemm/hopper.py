"""The product on Hopper's tensor cores: its plan, what it takes, and its launch."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from weft.arguments import adopt, one_of
from weft.errors import InvalidArgument, OutOfOrder
from weft.gemm.epilogue import Gated, GatedQuant, Push
from weft.gemm.hopper_source import (
    ROW_BOXES,
    SHARED,
    TABLE,
    THREADS,
    ProductArgs,
    compile_cuda,
)
from weft.gemm.plan import COLUMNS, FP8
from weft.gemm.request import Request
from weft.gemm.tensor_map import tensor_map
from weft.jit import CudaModule, Function, Launcher, current_arch
from weft.jit.args import decode, verify
from weft.runtime.stream import current_stream, loading

BLOCK_ROWS = (32, 64, 96, 128, 160, 192, 256)
FP8_ROWS = (32, 64, 96, 128, 160, 256)  # those that tiles of FP8 have
TALL_ROWS = 128  # tall_rows in gemm/tiles.cuh
PAIR = 2 * COLUMNS  # columns of a cluster's tile
STEP_BYTES = 128  # of a row of k in a step: depth in gemm/tiles.cuh
MAX_EXPERTS = 512
MAX_STAGES = 10
COMPILERS = 4  # at a time
SHARED_BYTES = 227 * 1024  # of a CTA
NUMBERS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
OPERANDS = {FP8: "fp8"} | NUMBERS
BIASES = NUMBERS | {torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class WgmmaPlan:
    """Tiles of the product in CUDA for Hopper: weights are read once for a row block.

    block_rows: most rows of a tile: 32, 64, 96, 128, 160 or 256; 192, too, where numbers have two
        bytes. An expert with no more rows is one tile, padded to a multiple of 16, of 32 above 160.
        One with more is cut: FP8 into tiles of block_rows (of 128, where that is 160) and one with
        the rest, else into tiles of equal height.

    No field changes what it means. Raises InvalidArgument for a number out of its range.
    """

    block_rows: int

    def __post_init__(self) -> None:
        """Refuse what the kernel has no tile for."""
        adopt(self, block_rows=one_of("block_rows", self.block_rows, BLOCK_ROWS))

    def stages(self, experts: int, operand: str = "fp8") -> int:
        """Steps of k in flight: as many as fit beside what the epilogues need.

        operand: what is multiplied, a word of OPERANDS.
        """
        rows = self.block_rows
        spare = 10 * 1024 + 512 + 16 * experts + 28 * rows  # ProductShared
        scales = 8 * rows if operand == "fp8" else 0
        return min(MAX_STAGES, (SHARED_BYTES - spare) // (128 * (COLUMNS + rows) + scales + 32))

    def max_row_blocks(self, rows: int, experts: int) -> int:
        """As many row blocks as `rows` rows of `experts` experts can at most make."""
        return rows // min(self.block_rows, TALL_ROWS) + min(rows, experts)


def lacks(request: Request, plan: WgmmaPlan) -> str:
    """Why the kernel cannot make this product by its plan, or "". Knows nothing of the GPU."""
    experts, n, _ = request.b.shape
    fp8 = request.a.dtype == FP8
    if fp8 and n % PAIR:
        return f"takes n in multiples of {PAIR} for FP8; it is {n}"
    if fp8 and plan.block_rows not in FP8_ROWS:
        return f"has tiles of {FP8_ROWS} rows for FP8; block_rows is {plan.block_rows}"
    if experts > MAX_EXPERTS:
        return f"takes at most {MAX_EXPERTS} experts; b has {experts}"
    if fp8 and request.bias is not None:
        return "takes no bias for FP8"
    if request.gated and isinstance(request.epilogue, GatedQuant) != fp8:
        return f"gates FP8 with GatedQuant, other numbers with Gated; a is {request.a.dtype}"
    if request.out_dtype not in NUMBERS and not (request.gated and fp8):
        return f"stores bfloat16 or float16; out is {request.out_dtype}"
    return ""


def check_wgmma(request: Request, plan: WgmmaPlan) -> None:
    """Refuse a call that its plan does not fit. Raises InvalidArgument."""
    if why := lacks(request, plan):
        raise InvalidArgument(f"WgmmaPlan {why}: use a GemmPlan, or leave plan out")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kernel is compiled for: the sizes of the weights, the tiles, and what is stored.

    finish: "store", "push", "gated" or "gated_fp8".   number: of the result, "bf16" or "fp16".
    operand: "fp8", "bf16" or "fp16".   bias: "none", "bf16", "fp16" or "fp32".
    settled: as in `grouped_gemm`.   tells: as in `Push`.
    """

    experts: int
    n: int
    k: int
    plan: WgmmaPlan
    finish: str
    number: str = "bf16"
    operand: str = "fp8"
    bias: str = "none"
    settled: bool = False
    tells: bool = False

    @classmethod
    def of(cls, request: Request, plan: WgmmaPlan) -> Kind:
        """The kind that makes a call's product."""
        experts, n, k = request.b.shape
        if request.gated and request.a.dtype == FP8:
            return cls(experts, n, k, plan, "gated_fp8", settled=request.settled)
        push = request.epilogue if isinstance(request.epilogue, Push) else None
        bias = None if request.bias is None else BIASES[request.bias.dtype]
        return cls(
            *(experts, n, k, plan, "gated" if request.gated else "push" if push else "store"),
            number=NUMBERS[request.out_dtype],
            operand=OPERANDS[request.a.dtype],
            bias=bias or "none",
            settled=request.settled,
            tells=push is not None and push.tells,
        )

    @property
    def literal(self) -> str:
        """`weft::Product`, as C++."""
        rows, stages = self.plan.block_rows, self.plan.stages(self.experts, self.operand)
        sizes = f"{self.experts}, {self.n}, {self.k}, {rows}, {stages}"
        enums = {"Finish": self.finish, "Number": self.number, "Operand": self.operand}
        words = [f"weft::{kind}::{word}" for kind, word in (enums | {"Bias": self.bias}).items()]
        flags = ", ".join(str(flag).lower() for flag in (self.settled, self.tells))
        return f"{{{sizes}, {', '.join(words)}, {flags}}}"

    def compile(self, arch: str, *, options: Sequence[str] = ()) -> bytes:
        """The kernel's cubin; needs no GPU. Raises CompileError showing the entry."""
        return compile_cuda(self.literal, self.plan.block_rows, self.operand, arch, options=options)


def launch(request: Request, plan: WgmmaPlan, num_sms: int | None, programmatic: bool) -> None:
    """Enqueue the product in the current stream.

    Raises InvalidArgument on another GPU than Hopper, OutOfOrder where the first call of a kind is
    being captured, DriverError.
    """
    rows, experts = len(request.a), len(request.b)
    if not rows or not experts:
        return
    device = request.a.device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(request, plan, num_sms, programmatic)
        return
    launcher = load(Kind.of(request, plan), programmatic)
    clusters = plan.max_row_blocks(rows, experts) * -(-request.b.shape[1] // PAIR)
    grid = min(max(num_sms or _sms(device.index), 2) // 2, clusters) * 2
    launcher(_arguments(request), (grid, 1, 1), THREADS, current_stream(device.index))


class _Launchers(threading.local):
    """Launchers of this thread: a launcher serves one thread at a time."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, Kind, bool], Launcher] = {}


_launchers = _Launchers()
_functions: dict[tuple[int, Kind], Function] = {}  # by device; of all threads


def load(kind: Kind, programmatic: bool) -> Launcher:
    """What launches a kind on the current device; compiled and loaded at the first call.

    The module stays for as long as the process, and serves all threads. Raises InvalidArgument on
    another GPU than Hopper, OutOfOrder where that first call is being captured.
    """
    device = torch.cuda.current_device()
    launcher = _launchers.of.get((device, kind, programmatic))
    if launcher is None:
        function = _functions.get((device, kind))
        if function is None:
            # Two threads may both come here; then one's module is left unused. A lock could be held
            # by one whose load waits for kernels that wait for the other.
            function = _functions.setdefault((device, kind), _load(kind))
        launcher = Launcher(function, ProductArgs, programmatic=programmatic, cluster=2)
        _launchers.of[device, kind, programmatic] = launcher
    return launcher


def _arguments(request: Request) -> ProductArgs:
    rows, k = request.a.shape
    epilogue = request.epilogue
    args = ProductArgs(
        row_scales=_address(request.a_scale),
        weight_scales=_address(request.b_scale),
        out=_address(request.out),
        out_scales=_address(request.out_scale),
        home=_address(epilogue.home if isinstance(epilogue, Push) else None),
        unless=_address(epilogue.unless if isinstance(epilogue, Push) else None),
        bias=_address(request.bias),
        counts=request.counts.data_ptr(),
        starts=_address(request.starts),
        most=request.most,
        rows=rows,
    )
    if request.a_scale is not None:
        args.scale_row, args.scale_step = request.a_scale.stride()
    if isinstance(epilogue, Gated):
        args.alpha, args.offset = epilogue.alpha, epilogue.offset
        args.limit = math.inf if epilogue.limit is None else epilogue.limit
    args.weights_map[:] = _weights_map(request)
    row_bytes = k * request.a.element_size()
    for box in range(ROW_BOXES):
        args.rows_map[box][:] = tensor_map(
            request.a.data_ptr(), (row_bytes, rows), (row_bytes,), (STEP_BYTES, 8 << box)
        )
    return args


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _weights_map(request: Request) -> tuple[int, ...]:
    """Boxes of 128 rows of one expert's weights.

    Gated: of 64 of gate and the same 64 of up, FP8; else of eight of gate, eight of up, and so on:
    its strides do not ascend, which the driver and the copy engine do not mind.
    """
    experts, n, k = request.b.shape
    at, row, half = request.b.data_ptr(), k * request.b.element_size(), n // 2
    if not request.gated:
        return tensor_map(at, (row, experts * n), (row,), (STEP_BYTES, COLUMNS))
    strides = row, half * row, n * row
    if request.b.dtype == FP8:
        return tensor_map(at, (row, half, 2, experts), strides, (STEP_BYTES, 64, 2, 1))
    sizes, box = (row, 8, 2, half // 8, experts), (STEP_BYTES, 8, 2, 8, 1)
    return tensor_map(at, sizes, (row, half * row, 8 * row, n * row), box)


def preload(kinds: Iterable[Kind], programmatic: bool) -> None:
    """`load` all of them, compiled several at a time, so that no call has to.

    Raises OutOfOrder while a graph is being captured, and what `load` raises.
    """
    device = torch.cuda.current_device()
    wanted = [kind for kind in kinds if (device, kind) not in _functions]
    if not wanted:
        return
    if torch.cuda.is_current_stream_capturing():
        raise OutOfOrder("kernels are loaded before a graph is captured, not in it")
    with loading(device):
        arch = current_arch()
    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(lambda kind: kind.compile(arch), wanted))
    for kind in wanted:
        load(kind, programmatic)


def _load(kind: Kind) -> Function:
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) != (9, 0):
        raise InvalidArgument(
            f"WgmmaPlan is for compute capability 9.0, this GPU has {major}.{minor}: use a "
            "GemmPlan, or leave plan out"
        )
    if torch.cuda.is_current_stream_capturing():
        raise OutOfOrder(
            "the first product of a kind on a device loads its kernel, which a graph cannot hold; "
            "call it once before capturing"
        )
    with loading(torch.cuda.current_device()):
        module = CudaModule(kind.compile(current_arch()), name="product", stays=True)
        verify(ProductArgs, decode(module.global_bytes(TABLE)))
        (shared,) = decode(module.global_bytes(SHARED))
        return module.function("product", shared=shared)


@functools.cache
def _sms(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
