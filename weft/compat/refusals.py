"""What the calls of other projects may ask and weft does not do, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft.errors import InvalidArgument
from weft.ops.received import Payload

BACKEND = "weft has one set of kernels"
MASK = "weft waits for every rank; when one is gone, close the group and make a new one"
STATS = "dispatch carries no statistics; gather them with torch.distributed"
REMAP = "weft's memory cannot be unmapped and mapped again; close() and make a new all-to-all"
RESULT = "combine adds rows, and returns them, in the dtype it was built for; convert its result"


def refuse(name: str, value: Any, allowed: Any, why: str) -> None:
    """Raise InvalidArgument unless `value` is `allowed`, or one of them if that is a tuple."""
    options = allowed if isinstance(allowed, tuple) else (allowed,)
    if isinstance(value, torch.Tensor):
        text = f"a tensor {list(value.shape)}"
    elif value in options:
        return
    else:
        text = repr(value)
    may = " or ".join(repr(option) for option in options)
    raise InvalidArgument(f"{name} is {text}; it must be {may}: {why}")


def check_ids(rows: Sequence[Payload], top_k: int, invalid: int, index: int | None) -> None:
    """Raise InvalidArgument unless payload `index` can hold expert ids, to be made `invalid`."""
    if index is None or not 0 <= index < len(rows):
        raise InvalidArgument(
            f"expert_id_payload_index is {index} with invalid_token_expert_id={invalid}; it must "
            f"be 0..{len(rows) - 1}, the payload that holds the expert ids"
        )
    if rows[index] not in [Payload((top_k,), dtype) for dtype in (torch.int32, torch.int64)]:
        raise InvalidArgument(
            f"payload {index} has rows {row_text(rows[index])}; expert ids are [{top_k}] "
            "torch.int32 or torch.int64: mend expert_id_payload_index"
        )


def row_text(row: Payload) -> str:
    """A payload's row, as errors show it."""
    return f"{list(row.shape)} {row.dtype}"
