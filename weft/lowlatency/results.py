# SPDX-License-Identifier: Apache-2.0
"""Result of a low-latency dispatch, and its memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.group import Group
from weft.heap.local import allocate_local
from weft.lowlatency.config import (
    LowLatencyCombineArgs,
    LowLatencyConfig,
    LowLatencyDispatchArgs,
)


@dataclass(frozen=True, slots=True)
class Handle:
    """Identifier of the dispatch whose rows a combine returns.

    Attributes:
        number: Number of the dispatch, from 1. In a compiled graph, which cannot count: -1 for the
            first result alive, -2 for the second.
        slot: Index of the result buffer.
        tokens: Number of this rank's tokens in the dispatch.
        counts: Counts of the dispatch, if its result is not in the result buffer.
    """

    number: int
    slot: int
    tokens: int
    counts: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The rows that a dispatch delivered to this rank's experts.

    Each expert has `R = ep_size * max_tokens` rows. The first `counts[e]` rows of expert e are
    valid, ordered by source rank and then token; later rows hold stale data. The tensors are in
    this rank's local memory and valid until `handle` is combined.

    Attributes:
        x: `[local_experts, R, hidden]`, float8_e4m3fn, or the dtype of x if quantize is None.
        scales: float32 `[local_experts, R, hidden / group_size]` ("fp32_row": contiguous;
            "fp32_col": column-major, R padded to 4), or int32 `[local_experts, R, hidden /
            group_size / 4]` of four UE8M0 bytes, column-major ("ue8m0"). None if quantize is None.
        counts: int32 `[local_experts]`.
        source: int32 `[local_experts, R]`, `source rank * max_tokens + token`. With several hosts,
            the index into `sources` replaces the rank.
        ranges: int32 `[local_experts, ep_size, 2]`: first row and number of rows of each source.
            With several hosts, the sources are the ranks of this host, which forward the rows of
            their rails.
        handle: Argument of `combine`.
        dst_addr: int64 `[local_experts, R]` with combine="gemm_push": the address at the token's
            owner where the row's result is stored. Pass it to `weft.gemm.Push(dst_addr,
            flag_in_data=True, ...)`.
        abort_flag: int32 `[1]`, not 0 once the group is broken. No row may be stored then.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    counts: torch.Tensor
    source: torch.Tensor
    ranges: torch.Tensor
    handle: Handle
    dst_addr: torch.Tensor | None = None
    abort_flag: torch.Tensor | None = None


class ResultBuffer:
    """Memory of one result and of the routing that its combine needs."""

    def __init__(
        self,
        index: int,
        config: LowLatencyConfig,
        num_local_experts: int,
        group: Group,
        abort_flag: torch.Tensor,
    ) -> None:
        self.index = index
        specs = config.get_result_shapes(num_local_experts)
        tensors = allocate_local(group, specs.values())
        self.tensors = dict(zip(specs, tensors, strict=True))
        self.x = self.tensors["x"]
        self.scales = config.view_scales(self.tensors["scales"])
        self._addresses = (
            (self.tensors["dst_addr"], abort_flag) if config.shape.gemm_push else (None, None)
        )
        self.handle: Handle | None = None
        self.latest_handle: Handle | None = None  # also if no longer alive
        self.sent_weights: torch.Tensor | None = None  # those that the dispatch has sent
        self.sent_version = 0  # number of in-place changes of sent_weights before

    def reset(self) -> None:
        """Discard the result, and clear the addresses to which GEMMs store rows."""
        self.handle = self.latest_handle = self.sent_weights = None
        self.tensors["dst_addr"].zero_()

    def set_routing(self, args: LowLatencyDispatchArgs | LowLatencyCombineArgs) -> None:
        """Set the addresses of this buffer's routing record in kernel arguments."""
        for name in ("position", "weights", "source_tokens", "expected", "dst_addr"):
            setattr(args.routing, name, self.tensors[name].data_ptr())

    def get_rows(self, handle: Handle) -> ExpertRows:
        """Return the public result of a dispatch into this buffer."""
        t = self.tensors
        metadata = t["counts"], t["source"], t["ranges"]
        return ExpertRows(self.x, self.scales, *metadata, handle, *self._addresses)
