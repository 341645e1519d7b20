# SPDX-License-Identifier: Apache-2.0
"""Checks of tensors that callers pass, as declarations; a refusal gives both values.

Other arguments are declared in weft/arguments.py. These checks are in every call, so the good
case reads no more of a tensor than it must, and the bad one explains itself at leisure.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from weft.arguments import instance, integer, kind_of, shown
from weft.errors import InvalidArgument, TokenOverflow
from weft.memory import Group
from weft.runtime.layout import vector_bytes

_address = torch.Tensor.data_ptr  # unbound: a TypeError for what is no tensor

# Indices of two tensors, each with its bytes, and whether they may be exactly the same memory.
Pair = tuple[int, int, int, int, bool]


class _Tracing(threading.local):
    """Does a compiler ask, in this thread, what a call would return?"""

    now = False


_tracing = _Tracing()


@contextmanager
def tracing() -> Iterator[None]:
    """Inside, fake tensors pass `check_alignment`: they have sizes, but no address."""
    before, _tracing.now = _tracing.now, True
    try:
        yield
    finally:
        _tracing.now = before


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
    """Require a contiguous tensor of `shape`, one of `dtypes`, on `device`.

    shape: sizes; a name, or None for "tokens", is any size.
    kept: for later calls, so that it does not matter whether it requires a gradient now.
    strided: it need not be contiguous.
    aligned: bytes of a row whose address must suit vector loads, as `check_alignment` has it; 1: it
        must only be a multiple of the element size; 0: the address is not checked.
    rows_of: the tensor whose first dimension `shape` has, for the error.

    Raises InvalidArgument naming the tensor, what it is and what it must be.
    """
    if not isinstance(tensor, torch.Tensor):
        refuse_tensor(name, tensor)
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(d) for d in dtypes)
        raise InvalidArgument(f"{name} has dtype {tensor.dtype}; it must be {wanted}")
    if tensor.device != device:
        raise InvalidArgument(f"{name} is on {tensor.device}; it must be on {device}")
    try:
        if tensor.shape != shape and not _fits(tensor.shape, shape):
            wanted = ", ".join("tokens" if want is None else str(want) for want in shape)
            reason = f", because {rows_of} has {shape[0]} rows" if rows_of else ""
            raise InvalidArgument(
                f"{name} has shape {list(tensor.shape)}; it must be [{wanted}]{reason}"
            )
        dense = tensor.is_contiguous() or (strided and tensor.stride() is not None)
    except RuntimeError:  # sparse and nested tensors have no such things
        dense = False
    if not dense:
        _refuse_layout(name, tensor)
    if tensor.requires_grad and not kept:
        check_gradient(name, tensor)
    if aligned:
        check_alignment(name, tensor, max(aligned, tensor.itemsize))


def _fits(shape: Sequence[int], wanted: Sequence[int | str | None]) -> bool:
    """Is this the wanted shape? A loop, because a generator takes 3 us of every call."""
    if len(shape) != len(wanted):
        return False
    for size, want in zip(shape, wanted, strict=True):  # noqa: SIM110
        if type(want) is int and size != want:
            return False
    return True


def tensors_key(tensors: Sequence[Any]) -> tuple[tuple[object, ...] | None, list[int]]:
    """Everything that a check reads of tensors except for where they are, and their addresses.

    Of an address only its alignment to 16 bytes counts. None, True and False are their own keys,
    at address 0. The key is None where anything else is not a dense tensor with memory, or wants a
    gradient: the check says what is wrong with it.
    """
    key: list[object] = [*tensors]
    addresses = [0] * len(key)
    grads = torch.is_grad_enabled()
    try:
        for i, t in enumerate(tensors):
            if t is None or t is True or t is False:  # and not 1, which only equals True
                continue
            addresses[i] = address = _address(t)
            if not address or (grads and t.requires_grad):
                return None, addresses
            dense = t.is_contiguous()  # then the shape says all that is ever read
            key[i] = t.shape, t.dtype, t.device, address & 15, dense or t.stride()
    except (TypeError, AttributeError, RuntimeError):
        return None, addresses
    return tuple(key), addresses


def check_gradient(name: str, tensor: torch.Tensor) -> None:
    """Raises InvalidArgument for a tensor that wants what weft does not make: a gradient."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidArgument(
            f"{name} requires a gradient, and weft makes none: call under torch.no_grad(), or pass "
            f"{name}.detach()"
        )


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address and the end of the memory that a tensor, maybe strided, spans."""
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


def check_apart(
    name: str, out: torch.Tensor, others: Mapping[str, torch.Tensor | None], *, exact: str = ""
) -> None:
    """Require that a result shares no memory with other tensors of its call.

    Args:
        name: of `out` in the error.
        others: tensors that are read while `out` is written, by name.
        exact: the one of them that `out` may exactly be: same memory, shape and dtype.

    Raises:
        InvalidArgument: they overlap; names both tensors.
    """
    if type(out) is FakeTensor:
        return
    start, end = extent(out)
    for other, tensor in others.items():
        if tensor is None or not _has_memory(tensor):  # other checks refuse what has none
            continue
        first, last = extent(tensor)
        if start >= last or first >= end:
            continue
        same = (first, last) == (start, end) and tensor.dtype == out.dtype
        if other == exact and same and tensor.shape == out.shape:
            continue
        but = f"; it may be exactly {exact}" if exact else ""
        raise InvalidArgument(
            f"{name} overlaps {other} in memory, which is read while {name} is written: pass a "
            f"tensor of its own{but}"
        )


def overlap(addresses: Sequence[int], pairs: Iterable[Pair]) -> Pair | None:
    """Return the first pair of tensors that overlap although they must not, or None.

    As `check_apart`, for calls of a known kind: sizes are in the pairs, and only addresses differ.
    """
    for pair in pairs:
        i, size, j, other, exact = pair
        a, b = addresses[i], addresses[j]
        if a < b + other and b < a + size and not (exact and a == b):
            return pair
    return None


def refuse_tensor(name: str, given: object) -> NoReturn:
    """Raise the InvalidArgument of what is no tensor."""
    kind = type(given)
    fix = ""
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        fix = f": pass torch.from_numpy({name})"
    elif isinstance(given, list | tuple | int | float):
        fix = f": pass torch.tensor({name})"
    value = f", {shown(given)}" if isinstance(given, str | int | float) else ""
    raise InvalidArgument(f"{name} is {kind_of(given)}{value}; it must be a torch.Tensor{fix}")


def check_dense(name: str, tensor: torch.Tensor) -> None:
    """Raises InvalidArgument for a sparse or nested tensor, which has no sizes or strides."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        _refuse_layout(name, tensor)


def tensors_of(name: str, given: torch.Tensor | Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """One tensor, or a list or tuple of them, as a tuple. Raises InvalidArgument for all else."""
    if isinstance(given, torch.Tensor):
        return (given,)
    if not isinstance(given, list | tuple):
        refuse_tensor(name, given)
    for place, each in enumerate(given):
        if not isinstance(each, torch.Tensor):
            refuse_tensor(f"{name}[{place}]", each)
    return tuple(given)


def check_alignment(name: str, tensor: torch.Tensor, row_bytes: int) -> None:
    """Require memory whose address is a multiple of the widest vector that the row size allows.

    Raises InvalidArgument naming the address; a tensor that starts inside another needs a clone.
    """
    if type(tensor) is FakeTensor:
        _check_fake(name)
        return
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        _refuse_layout(name, tensor)
    if address % 16 == 0 and address:
        return  # good for every row size
    if not address and tensor.numel():
        raise InvalidArgument(
            f"{name} has shape {list(tensor.shape)} and no memory (a {type(tensor).__name__} at "
            "address 0): its storage was given back, or it is a placeholder for other tensors"
        )
    unit = vector_bytes(row_bytes)
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


def check_choices(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor | None, top_k: int, device: torch.device
) -> int:
    """Return the number of tokens that ids and weights are of. Raises InvalidArgument."""
    integers, floats = (torch.int32, torch.int64), (torch.float32,)
    size = (None, top_k)
    check_tensor("topk_ids", topk_ids, shape=size, dtypes=integers, device=device, aligned=1)
    tokens = topk_ids.shape[0]  # while tracing, perhaps a symbol: not int()
    if topk_weights is not None:
        name, row = "topk_weights", (tokens, top_k)
        like = "topk_ids"
        check_tensor(
            name, topk_weights, shape=row, dtypes=floats, device=device, aligned=1, rows_of=like
        )
    return tokens


def check_tokens(tokens: int, max_tokens: int) -> None:
    """Raises TokenOverflow when a call brings more tokens than the workspace holds."""
    if tokens > max_tokens:
        raise TokenOverflow(
            f"{tokens} tokens in one call; the workspace was built for max_tokens={max_tokens}: "
            "split the batch, or build it larger (weft.tokens_per_rank computes the size)"
        )


def check_group(group: Group) -> None:
    """Raises InvalidArgument for what is no group: there is nobody to vote with."""
    instance("group", group, Group, "weft.launch or Group.from_torch() makes one")


def _refuse_layout(name: str, tensor: torch.Tensor) -> NoReturn:
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise InvalidArgument(
            f"{name} is a {kind} tensor; it must be dense, one block of memory: pass "
            f"{name}.to_dense()"
        )
    raise InvalidArgument(
        f"{name} has strides {tensor.stride()} for shape {list(tensor.shape)}; "
        f"pass {name}.contiguous()"
    )


def check_sms(num_sms: int | None, available: int | None) -> None:
    """Raises InvalidArgument for SMs that a GPU with so many, or a CPU (None), cannot give."""
    if num_sms is None:
        return
    if available is None:
        raise InvalidArgument(
            f"num_sms is {shown(num_sms)} on a CPU group; it limits GPU kernels: leave it out"
        )
    integer("num_sms", num_sms, 1, available)
