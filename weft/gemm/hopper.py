"""The product on Hopper's tensor cores: its plan, what it takes, and its launch."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from weft.errors import InvalidArgument, OutOfOrder
from weft.gemm.epilogue import GatedQuant, Push
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
from weft.jit import CudaModule, Launcher, current_arch
from weft.jit.args import decode, verify
from weft.ops.stream import current_stream

BLOCK_ROWS = (32, 64, 96, 128, 160)
TALL_ROWS = 128  # tall_rows in kernels/product_tiles.cuh
PAIR = 2 * COLUMNS  # columns of a cluster's tile
MAX_EXPERTS = 512
MAX_STAGES = 10
COMPILERS = 4  # at a time
SHARED_BYTES = 227 * 1024  # of a CTA
NUMBERS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class WgmmaPlan:
    """Tiles of the product in CUDA for Hopper, FP8 alone: weights are read once for a row block.

    block_rows: most rows of a tile: 32, 64, 96, 128 or 160. An expert with no more rows is one
        tile, padded to a multiple of 16; of one with more, all tiles but the last have 128 rows
        (or block_rows, if that is less).

    No field changes what it means. Raises InvalidArgument for a number out of its range.
    """

    block_rows: int

    def __post_init__(self) -> None:
        """Refuse what the kernel has no tile for."""
        if self.block_rows not in BLOCK_ROWS:
            raise InvalidArgument(
                f"block_rows is {self.block_rows}; it must be one of {BLOCK_ROWS}"
            )

    def stages(self, experts: int) -> int:
        """Steps of k in flight: as many as fit beside what the epilogues need."""
        rows = self.block_rows
        spare = 10 * 1024 + 512 + 16 * experts + 28 * rows  # ProductShared
        return min(MAX_STAGES, (SHARED_BYTES - spare) // (128 * (COLUMNS + rows) + 8 * rows + 32))

    def max_row_blocks(self, rows: int, experts: int) -> int:
        """As many row blocks as `rows` rows of `experts` experts can at most make."""
        return rows // min(self.block_rows, TALL_ROWS) + min(rows, experts)


def lacks(request: Request) -> str:
    """Why the kernel cannot make this product, or "". Knows nothing of the GPU."""
    experts, n, _ = request.b.shape
    if request.a.dtype != FP8:
        return f"multiplies {FP8}; a is {request.a.dtype}"
    if n % PAIR:
        return f"takes n in multiples of {PAIR}; it is {n}"
    if experts > MAX_EXPERTS:
        return f"takes at most {MAX_EXPERTS} experts; b has {experts}"
    if request.bias is not None or request.signal is not None:
        return "takes no bias and no signal"
    if request.gated and not isinstance(request.epilogue, GatedQuant):
        return "gates with GatedQuant only"
    if request.part != (0, request.columns):
        return f"makes all {request.columns} columns; columns is {request.part}"
    if not request.gated and request.out_dtype not in NUMBERS:
        return f"stores bfloat16 or float16; out is {request.out_dtype}"
    return ""


def check_wgmma(request: Request) -> None:
    """Refuse a call that WgmmaPlan does not fit. Raises InvalidArgument."""
    if why := lacks(request):
        raise InvalidArgument(f"WgmmaPlan {why}: use a GemmPlan, or leave plan out")


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kernel is compiled for: the sizes of the weights, the tiles, and what is stored.

    finish: "store", "push" or "gated_fp8".   number: of the result, "bf16" or "fp16".
    """

    experts: int
    n: int
    k: int
    plan: WgmmaPlan
    finish: str
    number: str = "bf16"

    @classmethod
    def of(cls, request: Request, plan: WgmmaPlan) -> Kind:
        """The kind that makes a call's product."""
        experts, n, k = request.b.shape
        finish = "push" if isinstance(request.epilogue, Push) else "store"
        if request.gated:
            return cls(experts, n, k, plan, "gated_fp8")
        return cls(experts, n, k, plan, finish, NUMBERS[request.out_dtype])

    @property
    def literal(self) -> str:
        """`weft::Product`, as C++."""
        rows, stages = self.plan.block_rows, self.plan.stages(self.experts)
        sizes = f"{self.experts}, {self.n}, {self.k}, {rows}, {stages}"
        return f"{{{sizes}, weft::Finish::{self.finish}, weft::Number::{self.number}}}"


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
    clusters = plan.max_row_blocks(rows, experts) * (request.b.shape[1] // PAIR)
    grid = min(max(num_sms or _sms(device.index), 2) // 2, clusters) * 2
    launcher(_arguments(request), (grid, 1, 1), THREADS, current_stream(device.index))


class _Loaded(threading.local):
    """Launchers of this thread: a launcher serves one thread at a time."""

    def __init__(self) -> None:
        self.launchers: dict[tuple[int, Kind, bool], Launcher] = {}


_loaded = _Loaded()


def load(kind: Kind, programmatic: bool) -> Launcher:
    """What launches a kind on the current device; compiled and loaded at a thread's first call.

    The module stays for as long as the process. Raises InvalidArgument on another GPU than Hopper,
    OutOfOrder where that first call is being captured.
    """
    key = _key(kind, programmatic)
    launcher = _loaded.launchers.get(key)
    if launcher is None:
        launcher = _loaded.launchers[key] = _load(kind, programmatic)
    return launcher


def _arguments(request: Request) -> ProductArgs:
    rows, k = request.a.shape
    epilogue, starts = request.epilogue, request.starts
    assert request.a_scale is not None
    assert request.b_scale is not None
    args = ProductArgs(
        row_scales=request.a_scale.data_ptr(),
        weight_scales=request.b_scale.data_ptr(),
        out=0 if request.out is None else request.out.data_ptr(),
        out_scales=0 if request.out_scale is None else request.out_scale.data_ptr(),
        home=epilogue.home.data_ptr() if isinstance(epilogue, Push) else 0,
        counts=request.counts.data_ptr(),
        starts=0 if starts is None else starts.data_ptr(),
        scale_row=request.a_scale.stride(0),
        scale_step=request.a_scale.stride(1),
        most=request.most,
        rows=rows,
    )
    if isinstance(epilogue, GatedQuant):
        args.alpha, args.offset, args.limit = epilogue.alpha, epilogue.offset, epilogue.limit or 0.0
    args.weights_map[:] = _weights_map(request)
    for box in range(ROW_BOXES):
        args.rows_map[box][:] = tensor_map(
            request.a.data_ptr(), (k, rows), (k,), (COLUMNS, 8 << box)
        )
    return args


def _weights_map(request: Request) -> tuple[int, ...]:
    """Boxes of 128 rows of one expert's weights; gated: of 64 of gate and the same 64 of up."""
    experts, n, k = request.b.shape
    at = request.b.data_ptr()
    if not request.gated:
        return tensor_map(at, (k, experts * n), (k,), (COLUMNS, COLUMNS))
    half = n // 2
    return tensor_map(at, (k, half, 2, experts), (k, half * k, n * k), (COLUMNS, 64, 2, 1))


def preload(kinds: Iterable[Kind], programmatic: bool) -> None:
    """`load` all of them for this thread, compiled several at a time, so that no call has to.

    Raises OutOfOrder while a graph is being captured, and what `load` raises.
    """
    wanted = [kind for kind in kinds if _key(kind, programmatic) not in _loaded.launchers]
    if not wanted:
        return
    if torch.cuda.is_current_stream_capturing():
        raise OutOfOrder("kernels are loaded before a graph is captured, not in it")
    torch.cuda.synchronize()  # makes the primary context, which is asked for its architecture
    arch = current_arch()
    with ThreadPoolExecutor(COMPILERS) as pool:
        list(pool.map(lambda kind: compile_cuda(kind.literal, kind.plan.block_rows, arch), wanted))
    for kind in wanted:
        load(kind, programmatic)


def _key(kind: Kind, programmatic: bool) -> tuple[int, Kind, bool]:
    return torch.cuda.current_device(), kind, programmatic


def _load(kind: Kind, programmatic: bool) -> Launcher:
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
    torch.cuda.synchronize()  # makes the primary context that the module is loaded into
    code = compile_cuda(kind.literal, kind.plan.block_rows, current_arch())
    module = CudaModule(code, name="product")
    verify(ProductArgs, decode(module.global_bytes(TABLE)))
    (shared,) = decode(module.global_bytes(SHARED))
    function = module.function("product", shared=shared)
    return Launcher(function, ProductArgs, programmatic=programmatic, cluster=2)


@functools.cache
def _sms(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
