# SPDX-License-Identifier: Apache-2.0
"""Checks of tensor arguments; weft/arguments.py has the checks of other arguments.

These checks run in every call, so they read as few attributes of a valid tensor as possible, and
compute the details of an error only on failure.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.arguments import check_instance, check_int, describe_type, format_value
from weft.errors import InvalidArgument, TokenOverflow
from weft.group import Group
from weft.runtime.layout import vector_bytes

_data_ptr = torch.Tensor.data_ptr  # unbound: raises TypeError for an object that is not a tensor

# (index of a result, its bytes, tensors that it must not overlap); each of these tensors is (index,
# bytes, whether both may be exactly the same memory).
OverlapRule = tuple[int, int, tuple[tuple[int, int, bool], ...]]


class _Tracing(threading.local):
    """Flag of each thread: whether torch.compile is tracing."""

    active = False


_tracing = _Tracing()


@contextmanager
def allow_fake_tensors() -> Iterator[None]:
    """Accept fake tensors, which have no address, in `check_alignment` inside the context."""
    before, _tracing.active = _tracing.active, True
    try:
        yield
    finally:
        _tracing.active = before


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | str | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    kept: bool = False,
    strided: bool = False,
    aligned: int = 0,
    rows_of: str = "",
) -> None:
    """Check the type, shape, dtype, device and layout of a tensor.

    Args:
        name: Name of the tensor in errors.
        tensor: Tensor to check.
        shape: Expected sizes. A name, or None for "tokens", accepts any size.
        dtypes: Accepted dtypes.
        device: Expected device.
        kept: Whether the tensor is stored for later calls; if so, it may require a gradient.
        strided: Whether the tensor may be non-contiguous.
        aligned: Row size in bytes for `check_alignment`. 1 requires alignment to the element size,
            0 skips the check.
        rows_of: Name of the tensor that determines the first dimension, for errors.

    Raises:
        InvalidArgument: a property of the tensor is wrong.
    """
    if not isinstance(tensor, torch.Tensor):
        raise_not_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(d) for d in dtypes)
        raise InvalidArgument(f"{name} has dtype {tensor.dtype}; it must be {expected}")
    if tensor.device != device:
        raise InvalidArgument(f"{name} is on {tensor.device}; it must be on {device}")
    try:
        if tensor.shape != shape and not _shape_matches(tensor.shape, shape):
            expected = ", ".join("tokens" if size is None else str(size) for size in shape)
            reason = f", because {rows_of} has {shape[0]} rows" if rows_of else ""
            raise InvalidArgument(
                f"{name} has shape {list(tensor.shape)}; it must be [{expected}]{reason}"
            )
        dense = tensor.is_contiguous() or (strided and tensor.stride() is not None)
    except RuntimeError:  # sparse and nested tensors have neither shape nor strides
        dense = False
    if not dense:
        _raise_layout(name, tensor)
    if tensor.requires_grad and not kept:
        check_gradient(name, tensor)
    if aligned:
        check_alignment(name, tensor, max(aligned, tensor.itemsize))


def _shape_matches(shape: Sequence[int], expected: Sequence[int | str | None]) -> bool:
    """Whether a shape matches."""
    # A loop, because a generator would add 3 us to every call.
    if len(shape) != len(expected):
        return False
    for size, required in zip(shape, expected, strict=True):  # noqa: SIM110
        if type(required) is int and size != required:
            return False
    return True


def build_tensors_key(tensors: Sequence[Any]) -> tuple[tuple[object, ...] | None, list[int]]:
    """Build a cache key of all tensor properties that a check reads, and return the addresses.

    The key contains addresses modulo 16. An entry may be None, True or False, whose address is 0.
    The key is None if an entry is neither of these nor a dense tensor with memory, or requires a
    gradient; the full check then raises the error.
    """
    key: list[object] = [*tensors]
    addresses = [0] * len(key)
    grads = torch.is_grad_enabled()
    try:
        for i, t in enumerate(tensors):
            if t is None or t is True or t is False:  # identity: 1 equals True but is invalid
                continue
            addresses[i] = address = _data_ptr(t)
            if not address or (grads and t.requires_grad):
                return None, addresses
            dense = t.is_contiguous()  # the shape then determines the strides
            key[i] = t.shape, t.dtype, t.device, address & 15, dense or t.stride()
    except (TypeError, AttributeError, RuntimeError):
        return None, addresses
    return tuple(key), addresses


def check_gradient(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidArgument if a tensor requires a gradient while gradients are enabled."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{name} requires a gradient, which weft does not compute: call under torch.no_grad(), "
            f"or pass {name}.detach()"
        )


def get_memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start and end address of the memory that a tensor spans."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


def check_no_overlap(
    name: str, out: torch.Tensor, others: Mapping[str, torch.Tensor | None], *, exact: str = ""
) -> None:
    """Check that an output does not overlap other tensors of its call.

    Args:
        name: Name of `out` in the error.
        out: Output tensor.
        others: Tensors that are read while `out` is written, by name.
        exact: Name of the tensor that `out` may alias exactly, with the same shape and dtype.

    Raises:
        InvalidArgument: the output overlaps another tensor.
    """
    if type(out) is FakeTensor:
        return
    start, end = get_memory_range(out)
    for other, tensor in others.items():
        if tensor is None or not _has_memory(tensor):  # other checks reject tensors without memory
            continue
        first, last = get_memory_range(tensor)
        if start >= last or first >= end:
            continue
        is_same = (first, last) == (start, end) and tensor.dtype == out.dtype
        if other == exact and is_same and tensor.shape == out.shape:
            continue
        exception = f"; it may be exactly {exact}" if exact else ""
        raise InvalidArgument(
            f"{name} overlaps {other} in memory, which is read while {name} is written: pass a "
            f"separate tensor{exception}"
        )


def find_overlap(addresses: Sequence[int], rules: Iterable[OverlapRule]) -> tuple[int, int] | None:
    """Return the indices of two tensors whose overlap a rule forbids, or None.

    This is the fast path of `check_no_overlap` for calls that differ only in addresses.
    """
    for result, size, others in rules:
        start = addresses[result]
        end = start + size
        for other, other_size, exact in others:
            address = addresses[other]
            if address < end and start < address + other_size and not (exact and address == start):
                return result, other
    return None


def raise_not_tensor(name: str, value: object) -> NoReturn:
    """Raise InvalidArgument for a value that is not a tensor."""
    kind = type(value)
    fix = ""
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        fix = f": pass torch.from_numpy({name})"
    elif isinstance(value, list | tuple | int | float):
        fix = f": pass torch.tensor({name})"
    text = f", {format_value(value)}" if isinstance(value, str | int | float) else ""
    raise InvalidArgument(f"{name} is {describe_type(value)}{text}; it must be a torch.Tensor{fix}")


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raise InvalidArgument for a sparse or nested tensor, which has no sizes or strides."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        _raise_layout(name, tensor)


def to_tensor_tuple(
    name: str, value: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Convert a tensor, list or tuple of tensors to a tuple. Raises InvalidArgument."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if not isinstance(value, list | tuple):
        raise_not_tensor(name, value)
    for index, tensor in enumerate(value):
        if not isinstance(tensor, torch.Tensor):
            raise_not_tensor(f"{name}[{index}]", tensor)
    return tuple(value)


def check_alignment(name: str, tensor: torch.Tensor, row_bytes: int) -> None:
    """Check that the address is aligned to the largest vector size that divides a row.

    Raises:
        InvalidArgument: the address is not aligned, usually because the tensor is a view that
            starts inside another tensor.
    """
    if type(tensor) is FakeTensor:
        if not _tracing.active:
            raise InvalidArgument(
                f"{name} is a FakeTensor, which has no data to send; only torch.compile may pass "
                "fake tensors"
            )
        return
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        _raise_layout(name, tensor)
    if address % 16 == 0 and address:
        return  # sufficient for every row size
    if not address and tensor.numel():
        raise InvalidArgument(
            f"{name} has shape {list(tensor.shape)} and no memory (a {type(tensor).__name__} at "
            "address 0): its storage was freed, or it is a placeholder for other tensors"
        )
    unit = vector_bytes(row_bytes)
    if tensor.numel() and address % unit:
        raise InvalidArgument(
            f"{name} starts at address {address:#x}, which is not a multiple of "
            f"{unit} bytes; pass {name}.clone()"
        )


def check_topk(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor | None, top_k: int, device: torch.device
) -> int:
    """Check topk_ids and topk_weights, and return the number of tokens.

    Raises:
        InvalidArgument: a shape, dtype or device is wrong.
    """
    integers, floats = (torch.int32, torch.int64), (torch.float32,)
    size = (None, top_k)
    check_tensor("topk_ids", topk_ids, shape=size, dtypes=integers, device=device, aligned=1)
    tokens = topk_ids.shape[0]  # may be symbolic while tracing: no int()
    if topk_weights is not None:
        check_tensor(
            "topk_weights",
            topk_weights,
            shape=(tokens, top_k),
            dtypes=floats,
            device=device,
            aligned=1,
            rows_of="topk_ids",
        )
    return tokens


def check_tokens(tokens: int, max_tokens: int) -> None:
    """Raise TokenOverflow if a call has more than `max_tokens` tokens."""
    if tokens > max_tokens:
        raise TokenOverflow(
            f"{tokens} tokens in one call exceed max_tokens={max_tokens}: split the batch, or pass "
            "a larger max_tokens (weft.tokens_per_rank computes it)"
        )


def check_group(group: Group) -> None:
    """Raise InvalidArgument if `group` is not a Group."""
    check_instance("group", group, Group, "create one with weft.launch or Group.from_torch()")


def _raise_layout(name: str, tensor: torch.Tensor) -> NoReturn:
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise InvalidArgument(
            f"{name} is a {kind} tensor; it must be dense: pass {name}.to_dense()"
        )
    raise InvalidArgument(
        f"{name} has strides {tensor.stride()} for shape {list(tensor.shape)}; "
        f"pass {name}.contiguous()"
    )


def check_num_sms(num_sms: int | None, available: int | None) -> None:
    """Raise InvalidArgument if num_sms exceeds the available SMs, or is set on CPU ranks."""
    if num_sms is None:
        return
    if available is None:
        raise InvalidArgument(
            f"num_sms is {format_value(num_sms)} on a CPU group; it limits GPU kernels: omit it"
        )
    check_int("num_sms", num_sms, 1, available)
