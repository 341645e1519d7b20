# SPDX-License-Identifier: Apache-2.0
"""A low-latency all-to-all between several hosts; see weft/hosts/exchange.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from weft.heap.header import CallRecord
from weft.hosts.exchange import hold_weakly
from weft.hosts.rail import Rail
from weft.lowlatency.exchange import LocalExchange
from weft.lowlatency.results import ResultBuffer


class ManyHosts:
    """A low-latency all-to-all between several hosts.

    Args:
        local: Exchange within this host, whose sources have `hosts * max_tokens` tokens each.
        rail: Exchange with the other hosts.
        max_tokens: Maximum number of tokens of one rank in one call.
        pack: Function from x to the rows sent between hosts, uint8 `[tokens, row_bytes]`.
        raise_if_broken: As in the `ManyHosts` of alltoall.
    """

    def __init__(
        self,
        local: LocalExchange,
        rail: Rail,
        max_tokens: int,
        pack: Callable[[torch.Tensor], torch.Tensor],
        raise_if_broken: Callable[[], None],
    ) -> None:
        self._local, self._rail, self._max_tokens, self._pack = local, rail, max_tokens, pack
        self._raise_if_broken = hold_weakly(raise_if_broken)
        # Of the dispatch in flight.
        self._sent: tuple[CallRecord, ResultBuffer, Mapping[str, torch.Tensor]] | None = None

    def dispatch(
        self,
        entry: str,
        call: CallRecord,
        buffer: ResultBuffer,
        results: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
    ) -> None:
        """Send rows to the other hosts; for entry "dispatch", also run `dispatch_receive`."""
        rows = (self._pack(x),)
        self._rail.send(rows, topk_ids, topk_weights, None, None, self._max_tokens, call)
        self._sent = call, buffer, results
        if entry == "dispatch":
            self.dispatch_receive()

    def dispatch_receive(self) -> None:
        """Receive the rows of all hosts, and dispatch them within this host."""
        assert self._sent is not None
        (call, buffer, results), self._sent = self._sent, None
        received = self._rail.receive(self._max_tokens, buffer.index)
        inputs = received.planes[0], received.ids, received.weights
        self._local.dispatch("dispatch", call, buffer, results, *inputs)

    def combine(
        self,
        entry: str,
        buffer: ResultBuffer,
        y: torch.Tensor | None,
        counts: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        out: torch.Tensor,
        add: torch.Tensor | None,
        order: int,
    ) -> None:
        """Sum within this host and start to return the sums.

        For entry "combine", also run `combine_receive`.
        """
        rail, rows = self._rail, self._max_tokens
        received = rail.get_received_rows(rows, buffer.index)
        routing = received.ids, received.weights
        self._local.combine(
            "combine", buffer, y, counts, *routing, rail.get_sums_buffer(rows), None, order
        )
        self._raise_if_broken()
        rail.send_sums(rows)
        if entry == "combine":
            self.combine_receive(out, add)

    def combine_receive(self, out: torch.Tensor, add: torch.Tensor | None) -> None:
        """Add the sums of all hosts."""
        self._rail.receive_sums(out, add)
