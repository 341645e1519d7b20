# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments that other projects' calls pass, and of those that weft lacks."""

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

BACKEND_REASON = "weft has one set of kernels"
MASK_REASON = (
    "weft waits for every living rank; the group drops a rank only after its process has ended"
)
STATS_REASON = "this all-to-all has no statistics; pass eplb_stats_num_experts to its constructor"
RESULT_REASON = (
    "combine returns rows in payload's dtype; flashinfer's quantized results need Blackwell"
)
NVFP4_REASON = "NVFP4 needs a GPU of compute capability 10 or newer, and weft has no kernel for it"
MOE_QUANT_REASON = (
    "flashinfer quantizes to NVFP4 here, for Blackwell; weft.AllReduce.fused supports FP8"
)
MASK_WORDS = 1  # words of 64 ranks in flashinfer.comm's masks


def check_allowed(name: str, value: Any, allowed: Any, reason: str) -> None:
    """Raise InvalidArgument unless `value` equals `allowed`, or an item of it if it is a tuple."""
    options = allowed if isinstance(allowed, tuple) else (allowed,)
    if isinstance(value, torch.Tensor):
        text = f"a tensor {list(value.shape)}"
    elif any(_is_equal(value, option) for option in options):
        return
    else:
        text = format_value(value)
    choices = " or ".join(repr(option) for option in options)
    raise InvalidArgument(f"{name} is {text}; it must be {choices}: {reason}")


def check_not_capturing(device: torch.device, label: str, fix: str) -> None:
    """Raise InvalidArgument if a graph is being captured: a capture cannot allocate memory."""
    if is_capturing(device):
        raise InvalidArgument(
            f"{label} is new in a graph capture, where no memory can be allocated: {fix}"
        )


def rename_argument(error: UsageError, names: Mapping[str, str]) -> UsageError:
    """Return a copy of an error with the argument at its start renamed to the caller's name.

    `names` maps weft's argument names to the caller's. The copy is always new, because an error
    raised from itself would be its own cause.
    """
    argument = re.match(r"[\w.]*", str(error))[0]  # type: ignore[index]
    if argument not in names:
        return type(error)(str(error))
    text = str(error).replace(f"pass {argument}.", f"pass {names[argument]}.")
    return type(error)(names[argument] + text[len(argument) :])


def check_payloads(
    payloads: Sequence[torch.Tensor], tokens: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Return the payloads as a tuple after checking that each is contiguous `[tokens, *]`.

    Raises InvalidArgument with the index of an invalid payload.
    """
    name = "input_payloads"
    if isinstance(payloads, torch.Tensor):  # its rows would count as payloads
        check_allowed(name, payloads, (), "pass a list of tensors")
    tensors = to_tensor_tuple(name, payloads)
    if not 1 <= len(tensors) <= MAX_PLANES:
        raise InvalidArgument(
            f"{name} has {len(tensors)} payload tensors; a dispatch sends 1 to {MAX_PLANES}"
        )
    for index, tensor in enumerate(tensors):
        payload_name = f"{name}[{index}]"
        if tensor.is_nested or tensor.layout is not torch.strided or not tensor.dim():
            shape = (tokens, None)
        else:
            shape = (tokens, *tensor.shape[1:])
        check_tensor(payload_name, tensor, shape=shape, dtypes=(tensor.dtype,), device=device)
        if tensor.dtype in QUANTIZED_DTYPES or 0 in tensor.shape[1:]:
            raise InvalidArgument(
                f"{payload_name} is {format_value(tensor)}; it must be rows of 1 byte or more, "
                "of a dtype that needs no separate scales"
            )
        check_alignment(payload_name, tensor, tensor.itemsize * math.prod(tensor.shape[1:]))
    return tensors


def check_ids(rows: Sequence[Payload], top_k: int, invalid: int, index: int | None) -> None:
    """Raise InvalidArgument unless payload `index` has expert ids and its dtype fits `invalid`."""
    if index is None:
        raise InvalidArgument(
            "expert_id_payload_index is None with "
            f"invalid_token_expert_id={format_value(invalid)}; it must be 0..{len(rows) - 1}, the "
            "payload with the expert ids"
        )
    index = check_int("expert_id_payload_index", index, 0, len(rows) - 1)
    id_dtypes = (torch.int32, torch.int64)
    if rows[index] in [Payload((top_k,), dtype) for dtype in id_dtypes]:
        limits = torch.iinfo(rows[index].dtype)
        check_int("invalid_token_expert_id", invalid, limits.min, limits.max)
    else:
        row = rows[index]
        raise InvalidArgument(
            f"payload {index} has rows {list(row.shape)} {row.dtype}; expert ids are [{top_k}] "
            "torch.int32 or torch.int64: pass the index of that payload"
        )


def check_mask(mask: torch.Tensor | None, enabled: bool, group: Group) -> None:
    """Raise InvalidArgument unless `mask` marks the living ranks, or is None if not `enabled`."""
    name = "active_rank_mask"
    if not enabled:
        check_allowed(name, mask, None, "pass enable_rank_mask=True to the constructor")
        return
    cpu = torch.device("cpu")
    check_tensor(name, mask, shape=(MASK_WORDS,), dtypes=(torch.uint64,), device=cpu)  # type: ignore[arg-type]
    assert mask is not None
    check_alignment(name, mask, mask.itemsize)
    bits, rank, size = int(mask.tolist()[0]), group.rank, group.size
    living_bits = sum(1 << peer for peer in group.living)
    if absent := [peer for peer in range(size) if (living_bits & ~bits) >> peer & 1]:
        ranks = f"this rank, {rank}," if rank in absent else f"ranks {absent}"
        raise InvalidArgument(f"{name} is {bits:#x}, without {ranks} of {size}: {MASK_REASON}")
    if dead := [peer for peer in range(size) if (bits & ~living_bits) >> peer & 1]:
        raise InvalidArgument(f"{name} is {bits:#x}, but ranks {dead} are dead: leave them out")


def check_stats(stats: torch.Tensor | None, size: int, device: torch.device) -> None:
    """Raise InvalidArgument unless `stats` is None or int32 `[size]` with a size above 0."""
    if size == 0:
        check_allowed("eplb_local_stats", stats, None, STATS_REASON)
    elif stats is not None:
        check_tensor("eplb_local_stats", stats, shape=(size,), dtypes=(torch.int32,), device=device)


def check_batch(
    ids: torch.Tensor, limit: int, top_k: int, max_tokens: int, device: torch.device
) -> None:
    """Raise unless `ids` `[tokens, top_k]` have at most `limit` tokens, and `limit` is valid."""
    integers, shape = (torch.int32, torch.int64), (None, top_k)
    check_tensor("token_selected_experts", ids, shape=shape, dtypes=integers, device=device)
    max_limit = max_value(Shape, "tokens")  # the minimum is 1, even if no rank has a token
    limit = check_int("runtime_max_tokens_per_rank", limit, 1, max_limit)
    if limit > max_tokens or ids.shape[0] > limit:
        raise TokenOverflow(
            f"{ids.shape[0]} tokens with runtime_max_tokens_per_rank={limit} and "
            f"max_num_tokens={max_tokens}; neither may exceed the next: split the batch, or create "
            "the all-to-all with a larger max_num_tokens"
        )


def _is_equal(value: object, option: object) -> bool:
    """Whether two values are equal; a bool differs from an int, although 1 == True."""
    if isinstance(value, bool) != isinstance(option, bool):
        return False
    if value is option:
        return True
    return isinstance(value, int | float | str | torch.dtype) and value == option
