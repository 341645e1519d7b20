# SPDX-License-Identifier: Apache-2.0
"""Normal mode of deep_ep's buffer: packed rows to ranks and back, in tensors of the caller.

In a dispatch, every rank sends its counts to all ranks. The host waits for them unless the caller
passes a bound. Ids and weights follow, from which a rank learns which rows it gets, and then it
fetches those rows. A handle stores that result, so it may be reused any number of times; all ranks
must use handles in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch.nn.functional import pad

from weft.compat import rank_layout
from weft.compat.rank_layout import Layout
from weft.compat.refusals import refuse_capture
from weft.compat.row_exchange import (
    VECTOR_BYTES,
    Announcement,
    Packing,
    RowCombine,
    RowDispatch,
    RowExchange,
    RowFetch,
)
from weft.errors import BadExpertId, GeometryMismatch, InvalidArgument, OutOfOrder, TokenOverflow
from weft.group import Group
from weft.runtime.ambient import disable_inference_mode
from weft.runtime.operator import run_all
from weft.runtime.stream import synchronize_stream

E = TypeVar("E", bound=RowExchange)

LEAST_TOKENS = 64  # smallest capacity of an exchange; capacities grow by powers of two
# What every rank announces before its counts; errors use these names.
WORDS = (
    "tokens",
    "bytes of a row of x",
    "bytes of a row's scales",
    "integers as scales (1: yes)",
    "top_k (0: no topk_idx)",
    "bytes of an entry of topk_idx",
    "num_worst_tokens",
)
EQUAL = range(1, len(WORDS))  # words that must be equal on all ranks
REFUSED = len(WORDS)  # index of the number of topk_idx entries that name no expert
COUNTS = REFUSED + 1  # index of the counts


@dataclass(frozen=True, slots=True)
class Rows:
    """Tensors `[tokens, *]` of one dispatch; `topk` is ids and weights."""

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
    most: int  # upper bound of any rank's tokens, equal on all ranks


class NormalMode:
    """The normal mode of one buffer; `options` are passed to its exchanges."""

    def __init__(self, group: Group, options: dict[str, Any]) -> None:
        self._group, self._options = group, options
        self.exchanges: dict[tuple[Any, ...], RowExchange] = {}  # by kind and sizes
        self._host: dict[torch.Size, torch.Tensor] = {}
        # Counts ids that name no expert in dispatches with a bound, for which no host waited.
        with disable_inference_mode():
            self._refused = torch.zeros(1, dtype=torch.int32, device=group.device)
        self._bounded = False  # whether there was such a dispatch

    def dispatch(
        self, rows: Rows, layout: Layout, alignment: int, worst: int
    ) -> tuple[Rows, list[int], NormalHandle]:
        """Dispatch checked tensors with a new routing.

        Returns:
            The received rows, the row count of each local expert (empty with a bound), and the
                handle.

        Raises:
            TokenOverflow, OutOfOrder, InvalidArgument: For this rank's arguments.
            BadExpertId, InvalidArgument, GeometryMismatch: On every rank, for one rank's arguments.
            GroupError: If the group is broken.
        """
        group, experts, tokens = self._group, len(layout.per_expert), len(rows.x)
        if worst and tokens * group.size > worst:
            raise TokenOverflow(
                f"num_worst_tokens is {worst}, but this rank, one of {group.size}, has {tokens} "
                f"tokens: pass at least {group.size} times the most tokens of any rank"
            )
        size = COUNTS + 2 * group.size + experts
        announcement = self._exchange(Announcement, 0, f"a dispatch to {experts} experts", size)
        ids = None if rows.topk is None else rows.topk[0]
        refused = self._refused if worst else None
        self._bounded = self._bounded or worst > 0
        numbers, ranks = rank_layout.build_announcement(
            _announced_words(rows, worst), ids, layout, refused
        )
        words, flagged = announcement.tell(numbers), slice(COUNTS + group.size, -experts)
        prefix = words[:, flagged].cumsum(0, dtype=torch.int32).contiguous()
        local = experts // group.size
        first = group.rank * local
        by_expert: list[int] = []
        if worst:
            announcement.finish()
            most, arriving = -(-worst // group.size), worst
        else:
            numbers = self._read(announcement, words)
            self._check_words(numbers, experts)
            most = max(1, int(numbers[:, 0].max()))
            arriving = int(numbers[:, flagged][:, group.rank].sum())
            local_rows = numbers[:, -experts:][:, first : first + local].sum(0)
            by_expert = [-(-n // alignment) * alignment for n in local_rows.tolist()]
        topk, sources = self._find_rows(rows.topk, ranks, arriving, most, bounded=worst > 0)
        if topk is not None:
            rank_layout.localize(*topk, first, local)
        handle = NormalHandle((prefix, None, None, sources, layout.in_rank, None))
        handle.owner, handle.most = self, most
        handle.packing = Packing(sources, prefix, layout.in_rank)
        x, scales = self._fetch(rows, handle)
        return Rows(x, scales, topk), by_expert, handle

    def dispatch_again(self, rows: Rows, handle: NormalHandle) -> Rows:
        """Dispatch other rows, without ids, by a handle's routing. The host does not wait."""
        return Rows(*self._fetch(rows, handle))

    def combine(
        self,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        handle: NormalHandle,
        biases: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sums of each token's rows and weights at its owner; tensors are checked."""
        sums = self._sum(x, handle, biases[0] if biases else None)
        for bias in biases[1:]:
            sums += bias
        if weights is None:
            return sums, None
        top_k = weights.shape[1]
        padded = weights if top_k % 4 == 0 else pad(weights, (0, -top_k % 4))
        return sums, self._sum(padded, handle)[:, :top_k].contiguous()

    def packing_of(self, handle: NormalHandle) -> Packing:
        """Return the handle's packing. Raises OutOfOrder for another buffer's handle."""
        if handle.owner is not self:
            raise OutOfOrder(
                "the handle is not of a dispatch of this buffer: pass what its dispatch returned"
            )
        return handle.packing

    def check(self) -> None:
        """Raise errors recorded by the device; synchronizes after dispatches with a bound."""
        checks = [exchange.a2a.check for exchange in self.exchanges.values()]
        run_all(*checks, self._raise_refused)

    def _raise_refused(self) -> None:
        refused = int(self._refused) if self._bounded else 0
        if refused:
            self._refused.zero_()
            raise BadExpertId(
                f"{refused} entries of topk_idx, in dispatches with num_worst_tokens, name no "
                "expert and are not -1; they were dropped"
            )

    def close(self) -> None:
        """Free all memory. Local."""
        closes = [exchange.close for exchange in self.exchanges.values()]
        self.exchanges.clear()
        run_all(*closes, self._raise_refused)

    def _read(self, announcement: Announcement, words: torch.Tensor) -> torch.Tensor:
        """Copy the announced words to the host: the only wait of a dispatch."""
        device = self._group.device
        if device.type != "cuda":
            numbers = words.clone()
        else:
            if words.shape not in self._host:
                with disable_inference_mode():
                    self._host[words.shape] = torch.empty(
                        words.shape, dtype=words.dtype, device="cpu", pin_memory=True
                    )
            numbers = self._host[words.shape].copy_(words, non_blocking=True)
        announcement.finish()
        synchronize_stream(device)
        announcement.a2a.check_running()
        return numbers

    def _check_words(self, numbers: torch.Tensor, experts: int) -> None:
        """Raise the same error on every rank if one rank announced invalid words."""
        size, own = self._group.size, numbers[self._group.rank].tolist()
        for rank, theirs in enumerate(numbers.tolist()):
            for i in EQUAL:
                if theirs[i] != own[i]:
                    raise GeometryMismatch(
                        f"rank {rank} called dispatch with {WORDS[i]} {theirs[i]}, this rank, "
                        f"{self._group.rank}, with {own[i]}: pass the same on all ranks"
                    )
            if theirs[REFUSED]:
                raise BadExpertId(
                    f"topk_idx of rank {rank} has {theirs[REFUSED]} entries outside of "
                    f"-1..{experts - 1}; nothing was sent"
                )
            passed = theirs[COUNTS : COUNTS + size]
            counted = theirs[COUNTS + size : COUNTS + 2 * size]
            if passed != counted:
                raise InvalidArgument(
                    f"num_tokens_per_rank of rank {rank} is {passed}, but its is_token_in_rank "
                    f"counts {counted}: pass both as get_dispatch_layout returned them"
                )

    def _find_rows(
        self,
        topk: tuple[torch.Tensor, torch.Tensor] | None,
        ranks: torch.Tensor,
        rows: int,
        most: int,
        *,
        bounded: bool,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor]:
        """Send ids and weights; return the received ones, and each row's token at its source.

        Args:
            topk: Ids and weights, or None.
            ranks: Destination ranks, int32 `[tokens, ranks]`.
            rows: Number of rows that may arrive.
            most: Upper bound of any rank's tokens.
            bounded: Whether fewer rows may arrive. The ids of rows after the received ones are -1.
        """
        blank = torch.empty((len(ranks), VECTOR_BYTES), dtype=torch.uint8, device=ranks.device)
        sent: tuple[torch.Tensor, ...] = topk or (blank,)
        into = [each.new_empty((rows, each.shape[1])) for each in sent]
        if bounded and topk is not None:
            into[0].fill_(-1)
        size = tuple(_row_bytes(each) for each in sent)
        what = "no ids" if topk is None else f"{topk[0].shape[1]} ids a token"
        exchange = self._exchange(RowDispatch, most, f"a dispatch of {what}", *size)
        tokens = exchange.run(
            [each.view(torch.uint8) for each in sent],
            ranks,
            [each.view(torch.uint8) for each in into],
        )
        return None if topk is None else (into[0], into[1]), tokens

    def _fetch(self, rows: Rows, handle: NormalHandle) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the rows, and their scales, that belong to this rank."""
        x, scales, count = rows.x, rows.scales, len(handle.packing.tokens)
        into = (
            x.new_empty((count, x.shape[1])),
            None if scales is None else scales.new_empty((count, scales.shape[1])),
        )
        size = _row_bytes(x), 0 if scales is None else _row_bytes(scales)
        what = f"a dispatch of rows of {size[0]} bytes and scales of {size[1]}"
        exchange = self._exchange(RowFetch, handle.most, what, *size)
        exchange.run(x, scales, handle.packing, into)
        return into

    def _sum(
        self, x: torch.Tensor, handle: NormalHandle, add: torch.Tensor | None = None
    ) -> torch.Tensor:
        what = f"a combine of rows of {x.shape[1]} {x.dtype}"
        exchange = self._exchange(RowCombine, handle.most, what, x.shape[1], x.dtype)
        return exchange.run(x, handle.packing, add)

    def _exchange(self, kind: Callable[..., E], tokens: int, what: str, *sizes: Any) -> E:
        """Return the exchange of these sizes, replaced on all ranks if it is too small.

        `tokens` is the required capacity per rank, or 0 if it does not matter.
        """
        key = (kind, *sizes)
        exchange: Any = self.exchanges.get(key)
        if exchange is None or exchange.max_tokens < tokens:
            what += f" for {tokens} tokens a rank" if tokens else ""
            refuse_capture(self._group.device, what, "run one on all ranks before it")
            if exchange is not None:
                self.exchanges.pop(key).close()
            most = max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())
            exchange = self.exchanges[key] = kind(self._group, most, self._options, *sizes)
        return cast("E", exchange)


def _announced_words(rows: Rows, worst: int) -> tuple[int, ...]:
    """Return the values of WORDS."""
    ids = None if rows.topk is None else rows.topk[0]
    return (
        len(rows.x),
        _row_bytes(rows.x),
        0 if rows.scales is None else _row_bytes(rows.scales),
        0 if rows.scales is None else int(not rows.scales.is_floating_point()),
        0 if ids is None else ids.shape[1],
        0 if ids is None else ids.itemsize,
        worst,
    )


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.itemsize
