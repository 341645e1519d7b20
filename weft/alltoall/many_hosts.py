# SPDX-License-Identifier: Apache-2.0
"""An all-to-all between several hosts; see weft/hosts/exchange.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from weft.alltoall.exchange import LocalExchange
from weft.heap.header import CallRecord
from weft.hosts.exchange import hold_weakly
from weft.hosts.rail import Rail


class ManyHosts:
    """An all-to-all between several hosts.

    Args:
        local: Exchange within this host, whose sources have `hosts * rows` slots each.
        rail: Exchange with the other hosts.
        hosts: Number of hosts.
        raise_if_broken: A bound method, held weakly, that raises if the exchange within this host
            has failed, so that wrong sums do not leave it.
    """

    def __init__(
        self, local: LocalExchange, rail: Rail, hosts: int, raise_if_broken: Callable[[], None]
    ) -> None:
        self._local, self._rail, self._hosts = local, rail, hosts
        self._raise_if_broken = hold_weakly(raise_if_broken)
        self._sent: tuple[CallRecord, int] | None = None  # dispatch in flight: call and rows

    def dispatch(
        self,
        entry: str,
        call: CallRecord,
        tensors: Sequence[torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
        stats: torch.Tensor | None,
        rows: int,
    ) -> None:
        """Send rows to the other hosts; for entry "dispatch", also run `dispatch_receive`."""
        self._rail.send(tensors, topk_ids, topk_weights, num_tokens, stats, rows, call)
        self._sent = call, rows
        if entry == "dispatch":
            self.dispatch_receive()

    def dispatch_receive(self) -> None:
        """Receive the rows of all hosts, and dispatch them within this host."""
        assert self._sent is not None
        (call, rows), self._sent = self._sent, None
        received = self._rail.receive(rows)
        self._local.dispatch(
            "dispatch",
            call,
            received.planes,
            received.ids,
            received.weights,
            None,
            received.stats,
            self._hosts * rows,
        )

    def combine_send(self, rows: int, tokens: int) -> None:
        """Sum the rows within this host and start to return the sums."""
        self._return_sums("combine", rows)

    def combine(self, entry: str, out: torch.Tensor, add: torch.Tensor | None, rows: int) -> None:
        """Add the sums of all hosts, after `combine_send` unless it has run."""
        if not self._rail.has_sums_in_flight:
            self._return_sums(entry, rows)
        self._rail.receive_sums(out, add)

    def finish(self, rows: int) -> None:
        """End this host's part of the round without computing a result."""
        self._local.finish(self._hosts * rows)

    def _return_sums(self, entry: str, rows: int) -> None:
        self._local.combine(entry, self._rail.get_sums_buffer(rows), None, self._hosts * rows)
        self._raise_if_broken()
        self._rail.send_sums(rows)
