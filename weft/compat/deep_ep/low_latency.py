# SPDX-License-Identifier: Apache-2.0
"""Low-latency mode of deep_ep's buffer: one LowLatencyAllToAll per combination of sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from weft.compat.deep_ep.arguments import IDS, Numbers, check_argument, check_handle
from weft.compat.ranges import packed_ranges, token_indices
from weft.compat.refusals import rename_argument
from weft.errors import OutOfOrder, UsageError
from weft.group import Group
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.reference import unpack_scales
from weft.lowlatency.results import Handle
from weft.runtime.ambient import disable_inference_mode
from weft.runtime.check import check_tensor
from weft.runtime.operator import run_all

# Names of weft's arguments in deep_ep's calls.
DISPATCHED = {"topk_ids": "topk_idx"}
COMBINED = {"y": "x", "topk_ids": "topk_idx"}
STATS = "cumulative_local_expert_recv_stats"
Hook: TypeAlias = Callable[[], object]


class Sizes(NamedTuple):
    """Sizes of an exchange; `scale` is the layout of FP8 scales, or None for bfloat16 rows."""

    max_tokens: int
    hidden: int
    top_k: int
    num_experts: int
    scale: str | None


class Ticket(tuple[torch.Tensor, torch.Tensor, int, int, int]):
    """The handle of a low-latency dispatch, which callers unpack like deep_ep's.

    Its items are source tokens, ranges, maximum tokens per rank, hidden size and number of experts.
    """

    sizes: Sizes  # identifies the exchange
    handle: Handle  # the exchange's own handle


class LowLatencyMode:
    """The low-latency mode of one buffer; `options` are passed to its exchanges."""

    def __init__(self, group: Group, options: dict[str, Any]) -> None:
        self._group, self._options = group, options
        self._exchanges: dict[Sizes, LowLatencyAllToAll] = {}
        self._inputs: dict[tuple[Sizes, int], torch.Tensor] = {}  # by sizes and slot

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        sizes: Sizes,
        stats: torch.Tensor | None,
        *,
        widen_scales: bool,
        return_hook: bool,
    ) -> tuple[Numbers, torch.Tensor, Ticket, Hook | None]:
        """Dispatch checked tensors; `widen_scales` returns UE8M0 scales as float32."""
        a2a = self._exchange(sizes)
        if stats is not None:
            experts = (a2a.num_local_experts,)
            check_argument(STATS, stats, experts, *IDS, device=self._group.device)
        receive: Hook | None = None
        try:
            if return_hook:
                rows, receive = a2a.dispatch_send(x, topk_idx)
            else:
                rows = a2a.dispatch(x, topk_idx)
        except UsageError as error:
            raise rename_argument(error, DISPATCHED) from error
        wide = _wide_scales(a2a, x.device) if widen_scales else None
        scales = rows.scales if wide is None else wide
        numbers = rows.x if scales is None else (rows.x, scales)
        ranges = torch.zeros_like(rows.ranges[..., 0], dtype=torch.int64)
        tokens = torch.zeros_like(rows.source)

        def finish() -> None:
            if receive is not None:
                receive()
            tokens.copy_(token_indices(rows, sizes.max_tokens))
            ranges.copy_(packed_ranges(rows))
            if stats is not None:
                stats.add_(rows.counts)
            if wide is not None and rows.scales is not None:
                wide.copy_(unpack_scales(rows.scales, a2a.config.shape.blocks))

        if not return_hook:
            finish()
        ticket = Ticket((tokens, ranges, sizes.max_tokens, sizes.hidden, sizes.num_experts))
        ticket.sizes, ticket.handle = sizes, rows.handle
        return numbers, rows.counts, ticket, finish if return_hook else None

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        ticket: Ticket,
        out: torch.Tensor | None,
        *,
        zero_copy: bool,
        return_hook: bool,
    ) -> tuple[torch.Tensor, Hook | None]:
        """Return the weighted sums, and the hook that receives them."""
        a2a = self._existing_exchange(ticket)
        y = self._input(ticket, x) if zero_copy else x
        try:
            if return_hook:
                return a2a.combine_send(y, topk_idx, topk_weights, ticket.handle, out)
            return a2a.combine(y, topk_idx, topk_weights, ticket.handle, out), None
        except UsageError as error:
            raise rename_argument(error, COMBINED) from error

    def combine_buffer(self, ticket: Ticket) -> torch.Tensor:
        """Return the buffer for the experts' results of a dispatch, one for each slot."""
        slot = self._existing_exchange(ticket).slots[ticket.handle.slot]
        if slot.latest is not ticket.handle:
            raise OutOfOrder(
                "get_next_low_latency_combine_buffer of a handle whose slot a later dispatch has "
                "taken: ask before that dispatch"
            )
        key = (ticket.sizes, ticket.handle.slot)
        if key not in self._inputs:
            size, device = slot.x.shape, slot.x.device
            with disable_inference_mode():
                self._inputs[key] = torch.zeros(size, dtype=torch.bfloat16, device=device)
        return self._inputs[key]

    def check(self) -> None:
        """Raise errors recorded by the device."""
        run_all(*(exchange.check for exchange in self._exchanges.values()))

    def close(self) -> None:
        """Free all memory. Local."""
        closes = [exchange.close for exchange in self._exchanges.values()]
        self._exchanges.clear()
        self._inputs.clear()
        run_all(*closes)

    def _exchange(self, sizes: Sizes) -> LowLatencyAllToAll:
        if sizes not in self._exchanges:
            self._exchanges[sizes] = LowLatencyAllToAll(
                self._group,
                max_tokens=sizes.max_tokens,
                top_k=sizes.top_k,
                num_experts=sizes.num_experts,
                hidden=sizes.hidden,
                quantize=None if sizes.scale is None else "fp8",
                split_phase=True,
                scale=sizes.scale or "fp32_row",
                _recipe="deep_ep",
                _allow_handle_reuse=True,
                **self._options,
            )
        return self._exchanges[sizes]

    def _existing_exchange(self, ticket: Ticket) -> LowLatencyAllToAll:
        """Return a handle's exchange. It never makes one, because that is collective."""
        check_handle(ticket, Ticket, "low_latency_dispatch")
        if ticket.sizes not in self._exchanges:
            raise OutOfOrder(
                "the handle is not of a dispatch of this buffer: pass what its "
                "low_latency_dispatch returned"
            )
        return self._exchanges[ticket.sizes]

    def _input(self, ticket: Ticket, x: torch.Tensor) -> torch.Tensor:
        """Return the handle's combine buffer, which zero_copy reads instead of `x`."""
        y = self._inputs.get((ticket.sizes, ticket.handle.slot))
        if y is None:
            raise OutOfOrder(
                "zero_copy=True before get_next_low_latency_combine_buffer(handle): write the rows "
                "into the buffer that it returns, or pass zero_copy=False"
            )
        check_tensor("x", x, shape=tuple(y.shape), dtypes=(y.dtype,), device=y.device)
        return y


def _wide_scales(a2a: LowLatencyAllToAll, device: torch.device) -> torch.Tensor:
    """Return float32 zeros in the layout of the exchange's column-major scales."""
    shape = a2a.config.shape
    size = (a2a.num_local_experts, shape.blocks, -(-shape.rows // 4) * 4)
    return torch.zeros(size, dtype=torch.float32, device=device).mT[:, : shape.rows]
