# SPDX-License-Identifier: Apache-2.0
"""The normal mode of deep_ep's buffer: rows to ranks and back, packed, in results of their own.

A dispatch tells all ranks its counts, waits on the host for theirs unless the caller gives a bound,
sends ids and weights, from which a rank learns which rows are its own, and fetches those. A handle
keeps which they are, so any handle may be used again, in any order that is the same on all ranks.
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
from weft.memory import Group
from weft.memory.driver import plain_tensors
from weft.runtime.operator import call_all
from weft.runtime.stream import synchronize_stream

E = TypeVar("E", bound=RowExchange)

LEAST_TOKENS = 64  # that an exchange is made for; it grows by powers of two
# What every rank tells of its dispatch, before the counts, and how errors call it.
WORDS = (
    "tokens",
    "bytes of a row of x",
    "bytes of a row's scales",
    "integers as scales (1: yes)",
    "top_k (0: no topk_idx)",
    "bytes of an entry of topk_idx",
    "num_worst_tokens",
)
EQUAL = range(1, len(WORDS))  # on all ranks
REFUSED = len(WORDS)  # entries of topk_idx that name no expert
COUNTS = REFUSED + 1


@dataclass(frozen=True, slots=True)
class Rows:
    """What one dispatch carries: `[tokens, *]` tensors. topk: ids and weights."""

    x: torch.Tensor
    scales: torch.Tensor | None = None
    topk: tuple[torch.Tensor, torch.Tensor] | None = None


class NormalHandle(tuple[torch.Tensor | None, ...]):
    """The handle of a dispatch, in deep_ep's order.

    Rank prefix matrix, int32 `[ep_size, ep_size]`: rows that ranks up to i send to rank j; two
    parts of channels, None; int32 `[rows]`, each row's token at its source; is_token_in_rank; the
    heads of queues, None.
    """

    owner: NormalMode
    packing: Packing
    most: int  # at least every rank's tokens, equal on all


class NormalMode:
    """One buffer's normal mode. options: of the exchanges."""

    def __init__(self, group: Group, options: dict[str, Any]) -> None:
        self._group, self._options = group, options
        self.exchanges: dict[tuple[Any, ...], RowExchange] = {}  # by kind and sizes
        self._host: dict[torch.Size, torch.Tensor] = {}
        # Entries that name no expert, of dispatches that no host waited for; were there any?
        with plain_tensors():
            self._refused = torch.zeros(1, dtype=torch.int32, device=group.device)
        self._bounded = False

    def dispatch(
        self, rows: Rows, layout: Layout, alignment: int, worst: int
    ) -> tuple[Rows, list[int], NormalHandle]:
        """A dispatch with a new routing, of checked tensors.

        Returns what arrived, the rows of each local expert, none where nobody waited, and the
        handle. Raises TokenOverflow, OutOfOrder, InvalidArgument, and on every rank BadExpertId,
        InvalidArgument or GeometryMismatch for what one rank passed; what broke the group.
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
        numbers, ranks = rank_layout.announcement(_words(rows, worst), ids, layout, refused)
        told, flagged = announcement.tell(numbers), slice(COUNTS + group.size, -experts)
        prefix = told[:, flagged].cumsum(0, dtype=torch.int32).contiguous()
        local = experts // group.size
        first = group.rank * local
        by_expert: list[int] = []
        if worst:
            announcement.finish()
            most, arriving = -(-worst // group.size), worst
        else:
            numbers = self._read(announcement, told)
            self._check_told(numbers, experts)
            most = max(1, int(numbers[:, 0].max()))
            arriving = int(numbers[:, flagged][:, group.rank].sum())
            mine = numbers[:, -experts:][:, first : first + local].sum(0)
            by_expert = [-(-n // alignment) * alignment for n in mine.tolist()]
        topk, sources = self._find_rows(rows.topk, ranks, arriving, most, bounded=worst > 0)
        if topk is not None:
            rank_layout.localize(*topk, first, local)
        handle = NormalHandle((prefix, None, None, sources, layout.in_rank, None))
        handle.owner, handle.most = self, most
        handle.packing = Packing(sources, prefix, layout.in_rank)
        x, scales = self._fetch(rows, handle)
        return Rows(x, scales, topk), by_expert, handle

    def dispatch_again(self, rows: Rows, handle: NormalHandle) -> Rows:
        """A dispatch of other rows, without ids, to where the handle's went; waits for nothing."""
        return Rows(*self._fetch(rows, handle))

    def combine(
        self,
        x: torch.Tensor,
        weights: torch.Tensor | None,
        handle: NormalHandle,
        biases: tuple[torch.Tensor, ...],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sums of a token's rows, and of its weights, at its owner; of checked tensors."""
        found = self._sum(x, handle, biases[0] if biases else None)
        for bias in biases[1:]:
            found += bias
        if weights is None:
            return found, None
        top_k = weights.shape[1]
        whole = weights if top_k % 4 == 0 else pad(weights, (0, -top_k % 4))
        return found, self._sum(whole, handle)[:, :top_k].contiguous()

    def packing_of(self, handle: NormalHandle) -> Packing:
        """Raises OutOfOrder for another buffer's handle."""
        if handle.owner is not self:
            raise OutOfOrder(
                "the handle is not of a dispatch of this buffer: pass what its dispatch returned"
            )
        return handle.packing

    def check(self) -> None:
        """Raise what the device has recorded; waits for it after dispatches with a bound."""
        checks = [exchange.a2a.check for exchange in self.exchanges.values()]
        call_all(*checks, self._raise_refused)

    def _raise_refused(self) -> None:
        refused = int(self._refused) if self._bounded else 0
        if refused:
            self._refused.zero_()
            raise BadExpertId(
                f"{refused} entries of topk_idx, in dispatches with num_worst_tokens, name no "
                "expert and are not -1; nobody received them"
            )

    def close(self) -> None:
        """Give all memory back. Local."""
        closes = [exchange.close for exchange in self.exchanges.values()]
        self.exchanges.clear()
        call_all(*closes, self._raise_refused)

    def _read(self, announcement: Announcement, told: torch.Tensor) -> torch.Tensor:
        """What was told, on the host: the one wait of a dispatch."""
        device = self._group.device
        if device.type != "cuda":
            numbers = told.clone()
        else:
            if told.shape not in self._host:
                with plain_tensors():
                    self._host[told.shape] = torch.empty(
                        told.shape, dtype=told.dtype, device="cpu", pin_memory=True
                    )
            numbers = self._host[told.shape].copy_(told, non_blocking=True)
        announcement.finish()
        synchronize_stream(device)
        announcement.a2a._check_running()
        return numbers

    def _check_told(self, numbers: torch.Tensor, experts: int) -> None:
        """Raise, on every rank alike, what one of them passed and cannot be."""
        size, mine = self._group.size, numbers[self._group.rank].tolist()
        for rank, theirs in enumerate(numbers.tolist()):
            for i in EQUAL:
                if theirs[i] != mine[i]:
                    raise GeometryMismatch(
                        f"rank {rank} called dispatch with {WORDS[i]} {theirs[i]}, this rank, "
                        f"{self._group.rank}, with {mine[i]}: pass the same on all ranks"
                    )
            if theirs[REFUSED]:
                raise BadExpertId(
                    f"topk_idx of rank {rank} has {theirs[REFUSED]} entries outside of "
                    f"-1..{experts - 1}; nothing was sent"
                )
            given = theirs[COUNTS : COUNTS + size]
            flagged = theirs[COUNTS + size : COUNTS + 2 * size]
            if given != flagged:
                raise InvalidArgument(
                    f"num_tokens_per_rank of rank {rank} is {given}, but its is_token_in_rank says "
                    f"{flagged}: pass both as get_dispatch_layout returned them"
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
        """Send ids and weights; return those that came, and each row's token at its source.

        rows: that come, with those that may.   most: at least every rank's tokens.
        bounded: there may be rows that no rank sends, after the received ones: their ids are -1.
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
        """The rows, and their scales, that come to this rank."""
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
        """The exchange of these sizes, made anew on all ranks where it is too small.

        tokens: of a rank, at most; 0 where it does not matter.
        """
        key = (kind, *sizes)
        found: Any = self.exchanges.get(key)
        if found is None or found.max_tokens < tokens:
            what += f" for {tokens} tokens a rank" if tokens else ""
            refuse_capture(self._group.device, what, "run one on all ranks before it")
            if found is not None:
                self.exchanges.pop(key).close()
            most = max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())
            found = self.exchanges[key] = kind(self._group, most, self._options, *sizes)
        return cast("E", found)


def _words(rows: Rows, worst: int) -> tuple[int, ...]:
    """What WORDS names."""
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
