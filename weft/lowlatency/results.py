# SPDX-License-Identifier: Apache-2.0
"""What a low-latency dispatch returns, and its memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.arguments import shown
from weft.errors import InvalidArgument
from weft.lowlatency.config import (
    LowLatencyCombineArgs,
    LowLatencyConfig,
    LowLatencyDispatchArgs,
)


@dataclass(frozen=True, slots=True)
class Handle:
    """Which dispatch a combine answers. number: of the dispatch, counted from 1.

    Of a dispatch in a compiled graph, which knows no count: -1 for the first one alive, -2 for the
    second. counts: as it brought them, where its results did not go into the slot.
    """

    number: int
    slot: int
    tokens: int
    counts: torch.Tensor | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Hold what a dispatch brought to this rank's experts, `R = ep_size * max_tokens` rows for
    each.

    The first `counts[e]` rows of expert e are valid, ordered by source rank and then token; later
    rows hold old data. All of it is this rank's own memory, valid until `handle` is combined.

    Attributes:
        x: `[local_experts, R, hidden]`, float8_e4m3fn, or the dtype that was sent if quantize is
            None.
        scales: float32 `[local_experts, R, hidden / group_size]` ("fp32_row": contiguous;
            "fp32_col": column-major, R padded to 4), or int32 `[local_experts, R, hidden /
            group_size / 4]` of four UE8M0 bytes, column-major ("ue8m0"). None if quantize is None.
        counts: int32 `[local_experts]`.
        source: int32 `[local_experts, R]`, `source rank * max_tokens + token`. With several hosts
            the place in `sources` replaces the rank.
        ranges: int32 `[local_experts, ep_size, 2]`: first row and number of rows of each source.
            With several hosts, of each rank of this host, which forwards those of its rail.
        handle: What `combine` takes.
        dst_addr: int64 `[local_experts, R]` with combine="gemm_push": the address of the row's
            place at the token's owner. Pass it to `weft.gemm.Push(dst_addr, flag_in_data=True,
            ...)`.
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


class Slot:
    """The memory of one result and of what its combine needs."""

    def __init__(
        self, config: LowLatencyConfig, own: int, device: torch.device, broken: torch.Tensor
    ) -> None:
        self.tensors = {
            name: torch.zeros(shape, dtype=torch.uint8, device=device)
            if dtype is torch.float8_e4m3fn
            else torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in config.result_shapes(own).items()
        }
        x = self.tensors["x"]
        self.x = x.view(torch.float8_e4m3fn) if config.shape.group else x
        self.scales = config.shown_scales(self.tensors["scales"])
        self._addresses = (
            (self.tensors["dst_addr"], broken) if config.shape.gemm_push else (None, None)
        )
        self.sent_weights: torch.Tensor | None = None  # with several hosts: those of the dispatch
        self.alive: Handle | None = None
        self.latest: Handle | None = None  # alive or not

    def start_anew(self) -> None:
        """No result is alive, and no GEMM stores a row anywhere."""
        self.alive = self.latest = None
        self.tensors["dst_addr"].zero_()

    def check_weights(self, given: torch.Tensor | None) -> None:
        """Raise InvalidArgument for weights in a combine that its dispatch has not sent."""
        sent = self.sent_weights
        same = given is sent or (
            given is not None and sent is not None and given.data_ptr() == sent.data_ptr()
        )
        if not same:
            raise InvalidArgument(
                f"topk_weights are {shown(given)} in combine, {shown(sent)} in its dispatch: with "
                "several hosts they cross with the rows, so pass the same tensor to both"
            )

    def point(self, args: LowLatencyDispatchArgs | LowLatencyCombineArgs) -> None:
        """Let arguments speak of this slot's record of the routing."""
        for name in ("position", "weights", "source_tokens", "expected", "dst_addr"):
            setattr(args.routing, name, self.tensors[name].data_ptr())

    def rows(self, handle: Handle) -> ExpertRows:
        """What a dispatch into this slot returns."""
        t = self.tensors
        metadata = t["counts"], t["source"], t["ranges"]
        return ExpertRows(self.x, self.scales, *metadata, handle, *self._addresses)
