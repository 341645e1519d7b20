# SPDX-License-Identifier: Apache-2.0
"""Normal mode of deep_ep's buffer: dispatch and combine of packed rows.

In a dispatch, every rank sends its counts to all ranks. The host waits for them unless the caller
passes num_worst_tokens. Then ranks exchange ids and weights, which determine the rows of each rank,
and each rank fetches its rows. A handle stores the routing, so it may be reused any number of
times; all ranks must use handles in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.nn.functional import pad

from weft.compat import rank_layout
from weft.compat.checks import check_not_capturing
from weft.compat.rank_layout import Layout
from weft.compat.row_exchange import (
    VECTOR_BYTES,
    Packing,
    RowCombine,
    RowDispatch,
    RowExchange,
    RowFetch,
    StatsExchange,
)
from weft.errors import BadExpertId, GeometryMismatch, InvalidArgument, OutOfOrder, TokenOverflow
from weft.group import Group
from weft.runtime.ambient import disable_inference_mode
from weft.runtime.operator import run_all
from weft.runtime.stream import synchronize_stream

E = TypeVar("E", bound=RowExchange)

MIN_CAPACITY = 64  # smallest capacity of an exchange; capacities grow by powers of two
# Values that every rank sends before its counts; errors use these names.
HEADER_FIELDS = (
    "tokens",
    "bytes of a row of x",
    "bytes of a row's scales",
    "integer scales (1: yes)",
    "top_k (0: no topk_idx)",
    "bytes of an entry of topk_idx",
    "num_worst_tokens",
)
EQUAL_FIELDS = range(1, len(HEADER_FIELDS))  # fields that must be equal on all ranks
INVALID_IDS_INDEX = len(HEADER_FIELDS)  # the number of topk_idx entries that name no expert
COUNTS_INDEX = INVALID_IDS_INDEX + 1  # the first of the counts


@dataclass(frozen=True, slots=True)
class Rows:
    """Tensors `[tokens, *]` of one dispatch; `topk` holds ids and weights."""

    x: torch.Tensor
    scales: torch.Tensor | None = None
    topk: tuple[torch.Tensor, torch.Tensor] | None = None


class NormalHandle(tuple[torch.Tensor | None, ...]):
    """The handle of a dispatch, in deep_ep's order.

    Items: the rank prefix matrix, int32 `[ep_size, ep_size]`, with the rows that ranks up to i send
    to rank j; None twice, for channels; each row's token at its source, int32 `[rows]`;
    is_token_in_rank; None, for queue heads.
    """

    owner: NormalMode
    packing: Packing
    max_tokens: int  # upper bound of any rank's tokens, equal on all ranks


class NormalMode:
    """The normal mode of one buffer; `options` are passed to its exchanges."""

    def __init__(self, group: Group, options: dict[str, Any]) -> None:
        self._group, self._options = group, options
        self.exchanges: dict[tuple[Any, ...], RowExchange] = {}  # by class and sizes
        self._pinned: dict[torch.Size, torch.Tensor] = {}
        # Entries that name no expert in dispatches with num_worst_tokens, which the host does not
        # wait for.
        with disable_inference_mode():
            self._num_invalid_ids = torch.zeros(1, dtype=torch.int32, device=group.device)
        self._has_bounded_dispatch = False

    def dispatch(
        self, rows: Rows, layout: Layout, alignment: int, num_worst_tokens: int
    ) -> tuple[Rows, list[int], NormalHandle]:
        """Dispatch tensors that have been checked, with a new routing.

        Returns:
            The received rows, the row count of each local expert (empty with num_worst_tokens),
                and the handle.

        Raises:
            TokenOverflow, OutOfOrder, InvalidArgument: For this rank's arguments.
            BadExpertId, InvalidArgument, GeometryMismatch: On every rank, for one rank's arguments.
            GroupError: If the group is broken.
        """
        group, num_experts, tokens = self._group, len(layout.num_tokens_per_expert), len(rows.x)
        if num_worst_tokens and tokens * group.size > num_worst_tokens:
            raise TokenOverflow(
                f"num_worst_tokens is {num_worst_tokens}, but this rank, one of {group.size}, has "
                f"{tokens} tokens: pass at least {group.size} times the largest token count of any "
                "rank"
            )
        size = COUNTS_INDEX + 2 * group.size + num_experts
        stats_exchange = self._get_exchange(
            StatsExchange, 0, f"a dispatch to {num_experts} experts", size
        )
        ids = None if rows.topk is None else rows.topk[0]
        num_invalid_ids = self._num_invalid_ids if num_worst_tokens else None
        self._has_bounded_dispatch = self._has_bounded_dispatch or num_worst_tokens > 0
        message, ranks = rank_layout.build_count_message(
            _build_header(rows, num_worst_tokens), ids, layout, num_invalid_ids
        )
        messages = stats_exchange.all_gather_stats(message)
        marked_columns = slice(COUNTS_INDEX + group.size, -num_experts)
        prefix = messages[:, marked_columns].cumsum(0, dtype=torch.int32).contiguous()
        num_local_experts = num_experts // group.size
        first_expert = group.rank * num_local_experts
        rows_per_expert: list[int] = []
        if num_worst_tokens:
            stats_exchange.finish()
            max_tokens, max_received = -(-num_worst_tokens // group.size), num_worst_tokens
        else:
            host_messages = self._copy_to_host(stats_exchange, messages)
            self._check_messages(host_messages, num_experts)
            max_tokens = max(1, int(host_messages[:, 0].max()))
            max_received = int(host_messages[:, marked_columns][:, group.rank].sum())
            local = slice(first_expert, first_expert + num_local_experts)
            local_rows = host_messages[:, -num_experts:][:, local].sum(0)
            rows_per_expert = [-(-n // alignment) * alignment for n in local_rows.tolist()]
        topk, sources = self._exchange_routing(
            rows.topk, ranks, max_received, max_tokens, bounded=num_worst_tokens > 0
        )
        if topk is not None:
            rank_layout.localize_ids(*topk, first_expert, num_local_experts)
        handle = NormalHandle((prefix, None, None, sources, layout.in_rank, None))
        handle.owner, handle.max_tokens = self, max_tokens
        handle.packing = Packing(sources, prefix, layout.in_rank)
        x, scales = self._fetch(rows, handle)
        return Rows(x, scales, topk), rows_per_expert, handle

    def redispatch(self, rows: Rows, handle: NormalHandle) -> Rows:
        """Dispatch rows without ids, with a handle's routing. The host does not wait."""
        return Rows(*self._fetch(rows, handle))

    def combine(
        self,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        handle: NormalHandle,
        biases: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return each token's sums of rows and of weights. The tensors have been checked."""
        sums = self._sum_rows(x, handle, biases[0] if biases else None)
        for bias in biases[1:]:
            sums += bias
        if weights is None:
            return sums, None
        top_k = weights.shape[1]
        padded = weights if top_k % 4 == 0 else pad(weights, (0, -top_k % 4))
        return sums, self._sum_rows(padded, handle)[:, :top_k].contiguous()

    def get_packing(self, handle: NormalHandle) -> Packing:
        """Return the handle's packing. Raises OutOfOrder for another buffer's handle."""
        if handle.owner is not self:
            raise OutOfOrder(
                "the handle belongs to another buffer: pass a handle from this buffer's dispatch"
            )
        return handle.packing

    def check(self) -> None:
        """Raise errors recorded by the device.

        Synchronizes if there was a dispatch with num_worst_tokens.
        """
        checks = [exchange.a2a.check for exchange in self.exchanges.values()]
        run_all(*checks, self._raise_invalid_ids)

    def _raise_invalid_ids(self) -> None:
        num_invalid_ids = int(self._num_invalid_ids) if self._has_bounded_dispatch else 0
        if num_invalid_ids:
            self._num_invalid_ids.zero_()
            raise BadExpertId(
                f"{num_invalid_ids} entries of topk_idx, in dispatches with num_worst_tokens, name "
                "no expert and are not -1; they were dropped"
            )

    def close(self) -> None:
        """Free all memory. Local."""
        close_functions = [exchange.close for exchange in self.exchanges.values()]
        self.exchanges.clear()
        run_all(*close_functions, self._raise_invalid_ids)

    def _copy_to_host(self, stats_exchange: StatsExchange, messages: torch.Tensor) -> torch.Tensor:
        """Copy all ranks' messages to the host: the only wait of a dispatch."""
        device = self._group.device
        if device.type != "cuda":
            host_messages = messages.clone()
        else:
            if messages.shape not in self._pinned:
                with disable_inference_mode():
                    self._pinned[messages.shape] = torch.empty(
                        messages.shape, dtype=messages.dtype, device="cpu", pin_memory=True
                    )
            host_messages = self._pinned[messages.shape].copy_(messages, non_blocking=True)
        stats_exchange.finish()
        synchronize_stream(device)
        stats_exchange.a2a.check_running()
        return host_messages

    def _check_messages(self, messages: torch.Tensor, num_experts: int) -> None:
        """Raise the same error on every rank if one rank's message is invalid."""
        size, local_values = self._group.size, messages[self._group.rank].tolist()
        for rank, values in enumerate(messages.tolist()):
            for i in EQUAL_FIELDS:
                if values[i] != local_values[i]:
                    raise GeometryMismatch(
                        f"rank {rank} called dispatch with {HEADER_FIELDS[i]} {values[i]}, but "
                        f"this rank, {self._group.rank}, with {local_values[i]}: pass "
                        "the same value on all ranks"
                    )
            if values[INVALID_IDS_INDEX]:
                raise BadExpertId(
                    f"topk_idx of rank {rank} has {values[INVALID_IDS_INDEX]} entries outside of "
                    f"-1..{num_experts - 1}; nothing was sent"
                )
            passed_counts = values[COUNTS_INDEX : COUNTS_INDEX + size]
            marked_counts = values[COUNTS_INDEX + size : COUNTS_INDEX + 2 * size]
            if passed_counts != marked_counts:
                raise InvalidArgument(
                    f"num_tokens_per_rank of rank {rank} is {passed_counts}, but its "
                    f"is_token_in_rank counts {marked_counts}: pass both as "
                    "get_dispatch_layout returned them"
                )

    def _exchange_routing(
        self,
        topk: tuple[torch.Tensor, torch.Tensor] | None,
        ranks: torch.Tensor,
        max_rows: int,
        max_tokens: int,
        *,
        bounded: bool,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor]:
        """Exchange ids and weights; return the received ones and each row's token at its source.

        Args:
            topk: Ids and weights, or None.
            ranks: Destination ranks, int32 `[tokens, ranks]`.
            max_rows: Maximum number of received rows.
            max_tokens: Upper bound of any rank's tokens.
            bounded: Whether there may be fewer rows. Ids after the received rows are -1.
        """
        blank = torch.empty((len(ranks), VECTOR_BYTES), dtype=torch.uint8, device=ranks.device)
        payloads: tuple[torch.Tensor, ...] = topk or (blank,)
        out = [tensor.new_empty((max_rows, tensor.shape[1])) for tensor in payloads]
        if bounded and topk is not None:
            out[0].fill_(-1)
        sizes = tuple(_count_row_bytes(tensor) for tensor in payloads)
        label = "no ids" if topk is None else f"{topk[0].shape[1]} ids a token"
        exchange = self._get_exchange(RowDispatch, max_tokens, f"a dispatch of {label}", *sizes)
        tokens = exchange.run(
            [tensor.view(torch.uint8) for tensor in payloads],
            ranks,
            [tensor.view(torch.uint8) for tensor in out],
        )
        return None if topk is None else (out[0], out[1]), tokens

    def _fetch(self, rows: Rows, handle: NormalHandle) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Fetch the rows that go to this rank, and their scales."""
        x, scales, count = rows.x, rows.scales, len(handle.packing.tokens)
        out = (
            x.new_empty((count, x.shape[1])),
            None if scales is None else scales.new_empty((count, scales.shape[1])),
        )
        sizes = _count_row_bytes(x), 0 if scales is None else _count_row_bytes(scales)
        label = f"a dispatch of rows of {sizes[0]} bytes and scales of {sizes[1]}"
        exchange = self._get_exchange(RowFetch, handle.max_tokens, label, *sizes)
        exchange.run(x, scales, handle.packing, out)
        return out

    def _sum_rows(
        self, x: torch.Tensor, handle: NormalHandle, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        label = f"a combine of rows of {x.shape[1]} {x.dtype}"
        exchange = self._get_exchange(RowCombine, handle.max_tokens, label, x.shape[1], x.dtype)
        return exchange.run(x, handle.packing, add)

    def _get_exchange(
        self, exchange_class: Callable[..., E], tokens: int, label: str, *sizes: Any
    ) -> E:
        """Return the exchange of these sizes, replaced on all ranks if it is too small.

        `tokens` is the required capacity per rank, or 0 if it does not matter.
        """
        key = (exchange_class, *sizes)
        exchange: Any = self.exchanges.get(key)
        if exchange is None or exchange.max_tokens < tokens:
            label += f" for {tokens} tokens a rank" if tokens else ""
            check_not_capturing(self._group.device, label, "run one on all ranks before it")
            if exchange is not None:
                self.exchanges.pop(key).close()
            max_tokens = max(MIN_CAPACITY, 1 << (tokens - 1).bit_length())
            exchange = self.exchanges[key] = exchange_class(
                self._group, max_tokens, self._options, *sizes
            )
        return cast("E", exchange)


def _build_header(rows: Rows, num_worst_tokens: int) -> tuple[int, ...]:
    """Return the values of HEADER_FIELDS."""
    ids = None if rows.topk is None else rows.topk[0]
    return (
        len(rows.x),
        _count_row_bytes(rows.x),
        0 if rows.scales is None else _count_row_bytes(rows.scales),
        0 if rows.scales is None else int(not rows.scales.is_floating_point()),
        0 if ids is None else ids.shape[1],
        0 if ids is None else ids.itemsize,
        num_worst_tokens,
    )


def _count_row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.itemsize
