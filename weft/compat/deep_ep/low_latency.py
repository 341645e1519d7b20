# SPDX-License-Identifier: Apache-2.0
"""Low-latency mode of deep_ep's buffer: one LowLatencyAllToAll per combination of sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from weft.compat.checks import rename_argument
from weft.compat.deep_ep.arguments import IDS, TensorOrPair, check_argument, check_handle
from weft.compat.ranges import compute_token_indices, pack_ranges
from weft.errors import OutOfOrder, UsageError
from weft.group import Group
from weft.heap.local import allocate_local
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.reference import unpack_scales
from weft.lowlatency.results import Handle
from weft.runtime.ambient import disable_inference_mode
from weft.runtime.check import check_tensor
from weft.runtime.operator import run_all

# deep_ep's names of weft's arguments.
DISPATCH_NAMES = {"topk_ids": "topk_idx"}
COMBINE_NAMES = {"y": "x", "topk_ids": "topk_idx"}
STATS_ARGUMENT = "cumulative_local_expert_recv_stats"
Hook: TypeAlias = Callable[[], object]


class Sizes(NamedTuple):
    """Sizes of an exchange; `scale` is the layout of FP8 scales, or None for bfloat16 rows."""

    max_tokens: int
    hidden: int
    top_k: int
    num_experts: int
    scale: str | None


class LowLatencyHandle(tuple[torch.Tensor, torch.Tensor, int, int, int]):
    """Handle of a low-latency dispatch, a tuple with the items of deep_ep's handle.

    Items: source tokens, ranges, maximum tokens per rank, hidden size and number of experts.
    """

    sizes: Sizes  # key of the exchange
    operator_handle: Handle  # of the exchange's dispatch


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
        return_fp32_scales: bool,
        return_hook: bool,
    ) -> tuple[TensorOrPair, torch.Tensor, LowLatencyHandle, Hook | None]:
        """Dispatch tensors that have been checked; `return_fp32_scales` converts UE8M0 scales."""
        a2a = self._get_exchange(sizes)
        if stats is not None:
            shape = (a2a.num_local_experts,)
            check_argument(STATS_ARGUMENT, stats, shape, *IDS, device=self._group.device)
        receive: Hook | None = None
        try:
            if return_hook:
                rows, receive = a2a.dispatch_send(x, topk_idx)
            else:
                rows = a2a.dispatch(x, topk_idx)
        except UsageError as error:
            raise rename_argument(error, DISPATCH_NAMES) from error
        fp32_scales = _allocate_fp32_scales(a2a, x.device) if return_fp32_scales else None
        scales = rows.scales if fp32_scales is None else fp32_scales
        recv_x = rows.x if scales is None else (rows.x, scales)
        ranges = torch.zeros_like(rows.ranges[..., 0], dtype=torch.int64)
        tokens = torch.zeros_like(rows.source)

        def finish() -> None:
            if receive is not None:
                receive()
            tokens.copy_(compute_token_indices(rows, sizes.max_tokens))
            ranges.copy_(pack_ranges(rows))
            if stats is not None:
                stats.add_(rows.counts)
            if fp32_scales is not None and rows.scales is not None:
                fp32_scales.copy_(unpack_scales(rows.scales, a2a.config.shape.blocks))

        if not return_hook:
            finish()
        handle = LowLatencyHandle(
            (tokens, ranges, sizes.max_tokens, sizes.hidden, sizes.num_experts)
        )
        handle.sizes, handle.operator_handle = sizes, rows.handle
        return recv_x, rows.counts, handle, finish if return_hook else None

    def combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        out: torch.Tensor | None,
        *,
        zero_copy: bool,
        return_hook: bool,
    ) -> tuple[torch.Tensor, Hook | None]:
        """Return the weighted sums, and the hook that receives them, or None."""
        a2a = self._find_exchange(handle)
        y = self._get_combine_input(handle, x) if zero_copy else x
        try:
            if return_hook:
                return a2a.combine_send(y, topk_idx, topk_weights, handle.operator_handle, out)
            return a2a.combine(y, topk_idx, topk_weights, handle.operator_handle, out), None
        except UsageError as error:
            raise rename_argument(error, COMBINE_NAMES) from error

    def get_combine_buffer(self, handle: LowLatencyHandle) -> torch.Tensor:
        """Return the buffer for the experts' results of a dispatch."""
        exchange = self._find_exchange(handle)
        exchange.check_running()
        buffer = exchange.result_buffers[handle.operator_handle.slot]
        if buffer.latest_handle is not handle.operator_handle:
            raise OutOfOrder(
                "a later dispatch has reused the memory of this handle: call "
                "get_next_low_latency_combine_buffer before that dispatch"
            )
        key = (handle.sizes, handle.operator_handle.slot)
        if key not in self._inputs:
            spec = buffer.x.shape, torch.bfloat16
            with disable_inference_mode():
                (self._inputs[key],) = allocate_local(exchange.group, [spec])
        return self._inputs[key]

    def check(self) -> None:
        """Raise errors recorded by the device."""
        run_all(*(exchange.check for exchange in self._exchanges.values()))

    def close(self) -> None:
        """Free all memory. Local."""
        close_functions = [exchange.close for exchange in self._exchanges.values()]
        self._exchanges.clear()
        self._inputs.clear()
        run_all(*close_functions)

    def _get_exchange(self, sizes: Sizes) -> LowLatencyAllToAll:
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
                reduce="receiver",  # as in deep_ep, rows return one by one
                _recipe="deep_ep",
                _allow_handle_reuse=True,
                **self._options,
            )
        return self._exchanges[sizes]

    def _find_exchange(self, handle: LowLatencyHandle) -> LowLatencyAllToAll:
        """Return a handle's exchange, which its dispatch created."""
        check_handle(handle, LowLatencyHandle, "low_latency_dispatch")
        if handle.sizes not in self._exchanges:
            raise OutOfOrder(
                "the handle belongs to another buffer: pass a handle from this buffer's "
                "low_latency_dispatch"
            )
        return self._exchanges[handle.sizes]

    def _get_combine_input(self, handle: LowLatencyHandle, x: torch.Tensor) -> torch.Tensor:
        """Return the handle's combine buffer, which zero_copy reads instead of `x`."""
        y = self._inputs.get((handle.sizes, handle.operator_handle.slot))
        if y is None:
            raise OutOfOrder(
                "zero_copy=True before get_next_low_latency_combine_buffer(handle): write the rows "
                "into the buffer that it returns, or pass zero_copy=False"
            )
        check_tensor("x", x, shape=tuple(y.shape), dtypes=(y.dtype,), device=y.device)
        return y


def _allocate_fp32_scales(a2a: LowLatencyAllToAll, device: torch.device) -> torch.Tensor:
    """Allocate float32 zeros in the layout of the exchange's column-major scales."""
    shape = a2a.config.shape
    size = (a2a.num_local_experts, shape.blocks, -(-shape.rows // 4) * 4)
    return torch.zeros(size, dtype=torch.float32, device=device).mT[:, : shape.rows]
