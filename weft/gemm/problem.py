"""One grouped GEMM, checked: what the reference and both kernels are given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.arguments import listed, shown
from weft.errors import InvalidArgument
from weft.gemm.epilogue import Epilogue, Gated, GatedQuant, Push
from weft.gemm.plans import BLOCK_N, DTYPES, FP8
from weft.runtime.check import check_alignment, check_gradient, refuse_tensor

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """Tensors of one grouped GEMM; rows are flat, `[rows, ...]`, masked ones expert after expert.

    starts: int32, each expert's first row, or None where expert e's is `e * max_rows`.
    max_rows: the most rows of an expert; a larger count is cut to it.
    prefetch_weights: as in `grouped_gemm`.
    """

    a: torch.Tensor
    b: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor | None
    max_rows: int
    a_scale: torch.Tensor | None
    b_scale: torch.Tensor | None
    bias: torch.Tensor | None
    out: torch.Tensor | None
    out_scale: torch.Tensor | None
    out_dtype: torch.dtype
    epilogue: Epilogue
    prefetch_weights: bool = False

    @property
    def gated(self) -> bool:
        """Whether the columns of `a @ b.T` are a gate and an up."""
        return isinstance(self.epilogue, Gated)

    @property
    def out_columns(self) -> int:
        """Columns of the result."""
        n = int(self.b.shape[1])
        return n // 2 if self.gated else n

    @property
    def result(self) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        """What a caller gets: numbers, with their scales if there are any."""
        if self.out is None or self.out_scale is None:
            return self.out
        return self.out, self.out_scale


def check_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    """Refuse operands that no kernel takes. Raises InvalidArgument."""
    for name, tensor in (("a", a), ("b", b)):
        check_dense(name, tensor)
    if a.ndim not in (2, 3) or b.ndim != 3 or a.shape[-1] != b.shape[2]:
        raise InvalidArgument(
            f"a is {list(a.shape)} and b {list(b.shape)}; they must be [rows, k] or "
            "[experts, max_rows, k], and [experts, n, k]"
        )
    if a.dtype not in DTYPES or b.dtype != a.dtype:
        raise InvalidArgument(
            f"a is {a.dtype} and b {b.dtype}; both must be one of {listed(DTYPES)}"
        )
    if a.device != b.device or a.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"a is on {a.device} and b on {b.device}; both must be on one device")
    if a.ndim == 3 and len(a) != len(b):
        raise InvalidArgument(f"a has rows of {len(a)} experts, b weights of {len(b)}")
    n, k = b.shape[1:]
    if not n or not k:
        raise InvalidArgument(f"b is {list(b.shape)}; n and k must be positive")
    for name, size in (("n", n), ("k", k)):
        unit = BLOCK_N if a.dtype == FP8 else 8
        if size % unit:
            raise InvalidArgument(
                f"{name} is {size}; for {a.dtype} it must be a multiple of {unit}"
            )
    for name, tensor in (("a", a), ("b", b)):
        check_alignment(name, tensor, tensor.itemsize)
        if not tensor.is_contiguous() or tensor.data_ptr() % 16:
            raise InvalidArgument(
                f"{name} has strides {tensor.stride()} for shape {list(tensor.shape)} and starts "
                f"at address {tensor.data_ptr():#x}; it must be contiguous and aligned to 16 bytes"
            )
        if tensor.numel() // k >= 2**31:
            raise InvalidArgument(f"{name} has {tensor.numel() // k} rows; at most 2^31 - 1")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    like: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    strided: bool = False,
) -> None:
    """Refuse a tensor of another shape, dtype or device. Raises InvalidArgument."""
    check_dense(name, tensor)
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        raise InvalidArgument(
            f"{name} is {list(tensor.shape)} of {tensor.dtype}; it must be {list(shape)} of "
            f"{' or '.join(map(str, dtypes))}"
        )
    if tensor.device != like.device:
        raise InvalidArgument(f"{name} is on {tensor.device}, a on {like.device}")
    check_alignment(name, tensor, tensor.itemsize)
    if not strided and not tensor.is_contiguous():
        raise InvalidArgument(
            f"{name} has strides {tensor.stride()} for shape {list(tensor.shape)}; it must be "
            "contiguous"
        )


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Refuse what is not a dense tensor. Raises InvalidArgument."""
    if not isinstance(tensor, torch.Tensor):
        refuse_tensor(name, tensor)
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else tensor.layout
        raise InvalidArgument(f"{name} is a {kind} tensor; it must be dense, one block of memory")
    check_gradient(name, tensor)


def check_groups(
    a: torch.Tensor, experts: int, counts: torch.Tensor, offsets: torch.Tensor | None
) -> None:
    """Refuse groups that do not fit a's layout. Raises InvalidArgument."""
    check_tensor("counts", counts, a, (experts,), (torch.int32,))
    if (a.ndim == 2) != (offsets is not None):
        raise InvalidArgument(
            f"a is {list(a.shape)} and offsets are {'given' if offsets is not None else 'None'}; "
            "rows [rows, k] have offsets, blocks [experts, max_rows, k] have none"
        )
    if offsets is not None:
        check_dense("offsets", offsets)
        if offsets.ndim != 1 or offsets.shape[0] not in (experts, experts + 1):
            raise InvalidArgument(
                f"offsets are {list(offsets.shape)}; they must be [{experts + 1}] or [{experts}]"
            )
        check_tensor("offsets", offsets, a, tuple(offsets.shape), (torch.int32,))


def check_scales(
    a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor | None, b_scale: torch.Tensor | None
) -> None:
    """Refuse scales that do not fit, or are missing, or too many. Raises InvalidArgument."""
    if a.dtype != FP8:
        if a_scale is not None or b_scale is not None:
            name, scale = ("b_scale", b_scale) if a_scale is None else ("a_scale", a_scale)
            raise InvalidArgument(
                f"{name} is {shown(scale)}; scales belong to {FP8}, and a is {a.dtype}"
            )
        return
    if a_scale is None or b_scale is None:
        name = "a_scale" if a_scale is None else "b_scale"
        raise InvalidArgument(f"{name} is None; {FP8} needs a_scale and b_scale")
    experts, n, k = b.shape
    wanted = (*a.shape[:-1], k // 128)
    check_tensor("a_scale", a_scale, a, wanted, (torch.float32,), strided=True)
    check_tensor("b_scale", b_scale, a, (experts, n // 128, k // 128), (torch.float32,))
    if a.ndim == 3 and a_scale.stride(0) != a.shape[1] * a_scale.stride(1) and len(a) > 1:
        raise InvalidArgument(
            f"a_scale has strides {a_scale.stride()}: rows of all experts must be equally far apart"
        )


def check_results(problem: GemmProblem) -> None:
    """Refuse results that no plan makes. Raises InvalidArgument."""
    if isinstance(problem.epilogue, GatedQuant) and problem.out_columns % BLOCK_N:
        raise InvalidArgument(
            f"{problem.out_columns} gated columns; quantising takes a multiple of {BLOCK_N}"
        )
    if problem.gated and problem.b.shape[1] % (2 * (128 if problem.a.dtype == FP8 else 8)):
        raise InvalidArgument(f"n is {problem.b.shape[1]}: gate and up must be halves of it")
    if problem.out is not None and problem.out.data_ptr() % 16:
        raise InvalidArgument(
            f"out starts at {problem.out.data_ptr():#x}; it must be aligned to 16 bytes"
        )
    if isinstance(problem.epilogue, Push):
        push = problem.epilogue
        size = (len(problem.a),)
        check_tensor("epilogue.dst_addr", push.dst_addr, problem.a, size, (torch.int64,))
        if push.abort_flag is not None:
            check_tensor("epilogue.abort_flag", push.abort_flag, problem.a, (1,), (torch.int32,))
            if not push.flag_in_data:
                raise InvalidArgument("Push takes abort_flag only with flag_in_data=True")
        if problem.out_dtype not in OUT_DTYPES:
            raise InvalidArgument(
                f"epilogue.dtype is {shown(problem.out_dtype)}; choose one of {listed(OUT_DTYPES)}"
            )
