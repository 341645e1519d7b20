"""Checks of what callers pass, as declarations; a refusal gives the value and what it may be."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.errors import InvalidArgument, TokenOverflow

MAX_SECONDS = 10**9  # deadlines are 64-bit nanoseconds


class _Tracing(threading.local):
    """Does a compiler ask, in this thread, what a call would return?"""

    now = False


_tracing = _Tracing()


@contextmanager
def tracing() -> Iterator[None]:
    """Inside, fake tensors pass `check_alignment`: they have sizes, but lie nowhere."""
    before, _tracing.now = _tracing.now, True
    try:
        yield
    finally:
        _tracing.now = before


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Require a contiguous tensor of `shape` (None: any size), one of `dtypes`, on `device`.

    Raises InvalidArgument naming the tensor, what it is and what it must be.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"{name} is a {type(tensor).__name__}; it must be a torch.Tensor")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d) for d in dtypes)
        raise InvalidArgument(f"{name} has dtype {tensor.dtype}; it must be {wanted}")
    if tensor.device != device:
        raise InvalidArgument(f"{name} is on {tensor.device}; this group works on {device}")
    if tensor.shape != shape and (
        tensor.dim() != len(shape)
        or any(w is not None and n != w for n, w in zip(tensor.shape, shape, strict=True))
    ):
        wanted = ", ".join("tokens" if want is None else str(want) for want in shape)
        raise InvalidArgument(f"{name} has shape {list(tensor.shape)}; it must be [{wanted}]")
    if not tensor.is_contiguous():
        raise InvalidArgument(
            f"{name} has strides {tensor.stride()} for shape {list(tensor.shape)}; "
            f"pass {name}.contiguous()"
        )


def check_alignment(name: str, tensor: torch.Tensor, row_bytes: int) -> None:
    """Require the address to be a multiple of the widest vector that the row size allows.

    Raises InvalidArgument naming the address; a tensor that starts inside another needs a clone.
    """
    if type(tensor) is FakeTensor:
        _check_fake(name)
        return
    address = tensor.data_ptr()
    if address % 16 == 0:
        return  # good for every row size
    unit = next(n for n in (16, 8, 4, 2, 1) if row_bytes % n == 0)
    if tensor.numel() and address % unit:
        raise InvalidArgument(
            f"{name} starts at address {address:#x}, which is not a multiple of "
            f"{unit} bytes; pass {name}.clone()"
        )


def _check_fake(name: str) -> None:
    if not _tracing.now:
        raise InvalidArgument(
            f"{name} is a FakeTensor, which holds no numbers to send; what a call would return is "
            "found by torch.compile alone"
        )


def check_seconds(name: str, value: float) -> None:
    """Raises InvalidArgument for a time that no deadline can be made of."""
    if not 0 < value <= MAX_SECONDS:
        raise InvalidArgument(f"{name} is {value} s; it must be above 0 and at most {MAX_SECONDS}")


def check_tokens(tokens: int, max_tokens: int) -> None:
    """Raises TokenOverflow when a call brings more tokens than the workspace holds."""
    if tokens > max_tokens:
        raise TokenOverflow(
            f"{tokens} tokens in one call; the workspace was built for max_tokens={max_tokens}: "
            "split the batch, or build it larger (weft.tokens_per_rank computes the size)"
        )
