# SPDX-License-Identifier: Apache-2.0
"""Checks for arguments of other projects' calls that weft does not support."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.alltoall.config import QUANTIZED_DTYPES, Payload
from weft.arguments import check_int, format_value
from weft.errors import InvalidArgument, TokenOverflow, UsageError
from weft.fields import max_value
from weft.group import Group
from weft.runtime.check import check_alignment, check_tensor, to_tensor_tuple
from weft.runtime.stream import is_capturing
from weft.shape import MAX_PLANES, Shape

BACKEND = "weft has one set of kernels"
ALIVE = "weft waits for every living rank; a stopped rank must end before the group recovers"
STATS = "this all-to-all has no statistics; pass eplb_stats_num_experts to its constructor"
RESULT = "combine returns rows in payload's dtype; flashinfer's quantized results need Blackwell"
NVFP4 = "NVFP4 needs a GPU of compute capability 10 or newer, and weft has no kernel for it"
MOE_QUANT = "flashinfer quantizes to NVFP4 here, for Blackwell; weft.AllReduce.fused supports FP8"
MASK_WORDS = 1  # words of 64 ranks in flashinfer.comm's masks


def require(name: str, value: Any, allowed: Any, why: str) -> None:
    """Raise InvalidArgument unless `value` equals `allowed`, or one item of it if it is a tuple."""
    options = allowed if isinstance(allowed, tuple) else (allowed,)
    if isinstance(value, torch.Tensor):
        text = f"a tensor {list(value.shape)}"
    elif any(_is_equal(value, option) for option in options):
        return
    else:
        text = format_value(value)
    choices = " or ".join(repr(option) for option in options)
    raise InvalidArgument(f"{name} is {text}; it must be {choices}: {why}")


def refuse_capture(device: torch.device, what: str, fix: str) -> None:
    """Raise InvalidArgument during a graph capture, which cannot allocate memory."""
    if is_capturing(device):
        raise InvalidArgument(
            f"{what} is new in a graph capture, where no memory can be allocated: {fix}"
        )


def rename_argument(error: UsageError, names: Mapping[str, str]) -> UsageError:
    """Return a copy of an error that begins with the caller's name of an argument.

    `names` maps weft's argument names to the caller's. The copy is always new, because an error
    raised from itself would be its own cause.
    """
    word = re.match(r"[\w.]*", str(error))[0]  # type: ignore[index]
    if word not in names:
        return type(error)(str(error))
    text = str(error).replace(f"pass {word}.", f"pass {names[word]}.")
    return type(error)(names[word] + text[len(word) :])


def check_payloads(
    payloads: Sequence[torch.Tensor], tokens: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return the payloads, each contiguous `[tokens, *]`. Raises InvalidArgument naming one."""
    name = "input_payloads"
    if isinstance(payloads, torch.Tensor):  # its rows would count as payloads
        require(name, payloads, (), "pass a list of tensors")
    tensors = to_tensor_tuple(name, payloads)
    if not 1 <= len(tensors) <= MAX_PLANES:
        raise InvalidArgument(
            f"{name} has {len(tensors)} payload tensors; one dispatch carries 1..{MAX_PLANES}"
        )
    for plane, tensor in enumerate(tensors):
        each = f"{name}[{plane}]"
        if tensor.is_nested or tensor.layout is not torch.strided or not tensor.dim():
            shape = (tokens, None)
        else:
            shape = (tokens, *tensor.shape[1:])
        check_tensor(each, tensor, shape=shape, dtypes=(tensor.dtype,), device=device)
        if tensor.dtype in QUANTIZED_DTYPES or 0 in tensor.shape[1:]:
            raise InvalidArgument(
                f"{each} is {format_value(tensor)}; it must be rows of 1 byte or more, of a dtype "
                "that needs no separate scales"
            )
        check_alignment(each, tensor, tensor.itemsize * math.prod(tensor.shape[1:]))
    return tensors


def check_ids(rows: Sequence[Payload], top_k: int, invalid: int, index: int | None) -> None:
    """Raise InvalidArgument unless payload `index` holds expert ids that can be `invalid`."""
    if index is None:
        raise InvalidArgument(
            "expert_id_payload_index is None with "
            f"invalid_token_expert_id={format_value(invalid)}; it must be 0..{len(rows) - 1}, the "
            "payload that holds the expert ids"
        )
    index = check_int("expert_id_payload_index", index, 0, len(rows) - 1)
    kinds = (torch.int32, torch.int64)
    if rows[index] in [Payload((top_k,), dtype) for dtype in kinds]:
        limits = torch.iinfo(rows[index].dtype)
        check_int("invalid_token_expert_id", invalid, limits.min, limits.max)
    else:
        row = rows[index]
        raise InvalidArgument(
            f"payload {index} has rows {list(row.shape)} {row.dtype}; expert ids are [{top_k}] "
            "torch.int32 or torch.int64: pass the index of that payload"
        )


def check_mask(mask: torch.Tensor | None, enabled: bool, group: Group) -> None:
    """Raise InvalidArgument unless `mask` marks the living ranks. It is required if enabled."""
    name = "active_rank_mask"
    if not enabled:
        require(name, mask, None, "pass enable_rank_mask=True to the constructor")
        return
    cpu = torch.device("cpu")
    check_tensor(name, mask, shape=(MASK_WORDS,), dtypes=(torch.uint64,), device=cpu)  # type: ignore[arg-type]
    assert mask is not None
    check_alignment(name, mask, mask.itemsize)
    word, rank, size = int(mask.tolist()[0]), group.rank, group.size
    living = sum(1 << each for each in group.living)
    if absent := [each for each in range(size) if (living & ~word) >> each & 1]:
        whose = f"its own rank {rank}" if rank in absent else f"ranks {absent}"
        raise InvalidArgument(f"{name} is {word:#x}, without {whose} of {size}: {ALIVE}")
    if gone := [each for each in range(size) if (word & ~living) >> each & 1]:
        raise InvalidArgument(f"{name} is {word:#x}, with {gone}, ranks that are gone: drop them")


def check_stats(stats: torch.Tensor | None, size: int, device: torch.device) -> None:
    """Raise InvalidArgument unless `stats` is None or int32 `[size]` with a size above 0."""
    if size == 0:
        require("eplb_local_stats", stats, None, STATS)
    elif stats is not None:
        number = (torch.int32,)
        check_tensor("eplb_local_stats", stats, shape=(size,), dtypes=number, device=device)


def check_batch(
    ids: torch.Tensor, limit: int, top_k: int, max_tokens: int, device: torch.device
) -> None:
    """Raise unless `ids` `[tokens, top_k]` fit `limit`, and `limit` fits max_tokens."""
    integers, shape = (torch.int32, torch.int64), (None, top_k)
    check_tensor("token_selected_experts", ids, shape=shape, dtypes=integers, device=device)
    most = max_value(Shape, "tokens")  # the least is 1, even if no rank has a token
    limit = check_int("runtime_max_tokens_per_rank", limit, 1, most)
    if limit > max_tokens or ids.shape[0] > limit:
        raise TokenOverflow(
            f"{ids.shape[0]} tokens with runtime_max_tokens_per_rank={limit} and "
            f"max_num_tokens={max_tokens}; neither may be larger than the next: split "
            "the batch, or build the all-to-all larger"
        )


def _is_equal(value: object, option: object) -> bool:
    """Whether values are equal and both or neither are bool: 1 == True, but they differ here."""
    if isinstance(value, bool) != isinstance(option, bool):
        return False
    if value is option:
        return True
    return isinstance(value, int | float | str | torch.dtype) and value == option
