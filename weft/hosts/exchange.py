# SPDX-License-Identifier: Apache-2.0
"""Exchanges between several hosts: a rail between the hosts, and an exchange within each of them.

Dispatch sends a rank's rows over the rail to the ranks with its index on the other hosts; each of
them dispatches the rows that arrive within its own host. Combine sums within each host, returns
these sums over the rail, and adds them at the tokens' owners.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch

from weft.arguments import format_value
from weft.errors import InvalidArgument
from weft.group import Group
from weft.heap.header import CallRecord
from weft.hosts.config import HostSpan
from weft.hosts.rail import Rail
from weft.runtime.exchange import ExchangeOperator

# Number of rails that the operators of a group have opened, equal on all its ranks.
_num_rails: WeakKeyDictionary[Group, int] = WeakKeyDictionary()


def open_rail(operator: ExchangeOperator, span: HostSpan) -> Rail:
    """Create an operator's rail to the other hosts. Collective over all hosts.

    The rail fails, reports and closes with its operator. If a rank fails, every rank closes the
    operator and raises.
    """
    group, (timeout, first_timeout) = operator.group, operator.timeouts
    number = _num_rails.get(group, 0) + 1

    def create_rail() -> Rail:
        limits = {"timeout": timeout, "first_timeout": first_timeout}
        return Rail(group, span, number, on_failure=operator.fail, **limits)

    try:
        rail = group.run_collective(
            create_rail, action=f"connecting the hosts of a group for its {operator.kind}"
        )
        operator.add_companion(rail, reports=rail.REPORTED)
    except BaseException:
        operator.close()
        raise
    _num_rails[group] = number
    return rail


class Exchange(Protocol):
    """Interface of the launches of an all-to-all; see alltoall/exchange.py."""

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
    ) -> None: ...
    def dispatch_receive(self) -> None: ...
    def combine_send(self, rows: int, tokens: int) -> None: ...
    def combine(
        self, entry: str, out: torch.Tensor, add: torch.Tensor | None, rows: int
    ) -> None: ...
    def finish(self, rows: int) -> None: ...


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
        self, local: Exchange, rail: Rail, hosts: int, raise_if_broken: Callable[[], None]
    ) -> None:
        self._local, self._rail, self._hosts = local, rail, hosts
        self._raise_if_broken = _hold_weakly(raise_if_broken)
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


class IndexedBuffer(Protocol):
    """Memory of one result of a low-latency dispatch."""

    index: int


BufferT = TypeVar("BufferT", bound=IndexedBuffer)
BufferT_contra = TypeVar("BufferT_contra", bound=IndexedBuffer, contravariant=True)


class LowLatencyExchange(Protocol[BufferT_contra]):
    """Interface of the launches of a low-latency all-to-all; see lowlatency/exchange.py."""

    def dispatch(
        self,
        entry: str,
        call: CallRecord,
        buffer: BufferT_contra,
        results: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
    ) -> None: ...
    def dispatch_receive(self) -> None: ...
    def combine(
        self,
        entry: str,
        buffer: BufferT_contra,
        y: torch.Tensor | None,
        counts: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        out: torch.Tensor,
        add: torch.Tensor | None,
        order: int,
    ) -> None: ...
    def combine_receive(self, out: torch.Tensor, add: torch.Tensor | None) -> None: ...


class LowLatencyManyHosts(Generic[BufferT]):
    """A low-latency all-to-all between several hosts.

    Args:
        local: Exchange within this host, whose sources have `hosts * max_tokens` tokens each.
        rail: Exchange with the other hosts.
        max_tokens: Maximum number of tokens of one rank in one call.
        pack: Function from x to the rows sent between hosts, uint8 `[tokens, row_bytes]`.
        raise_if_broken: As in `ManyHosts`.
    """

    def __init__(
        self,
        local: LowLatencyExchange[BufferT],
        rail: Rail,
        max_tokens: int,
        pack: Callable[[torch.Tensor], torch.Tensor],
        raise_if_broken: Callable[[], None],
    ) -> None:
        self._local, self._rail, self._max_tokens, self._pack = local, rail, max_tokens, pack
        self._raise_if_broken = _hold_weakly(raise_if_broken)
        # Of the dispatch in flight.
        self._sent: tuple[CallRecord, BufferT, Mapping[str, torch.Tensor]] | None = None
        self._weights: dict[int, torch.Tensor | None] = {}  # of each buffer's dispatch

    def dispatch(
        self,
        entry: str,
        call: CallRecord,
        buffer: BufferT,
        results: Mapping[str, torch.Tensor],
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
    ) -> None:
        """Send rows to the other hosts; for entry "dispatch", also run `dispatch_receive`."""
        rows = (self._pack(x),)
        self._rail.send(rows, topk_ids, topk_weights, None, None, self._max_tokens, call)
        self._weights[buffer.index] = topk_weights
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
        buffer: BufferT,
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
        self._check_weights(buffer, topk_weights)
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

    def _check_weights(self, buffer: BufferT, weights: torch.Tensor | None) -> None:
        """Raise InvalidArgument if the weights of a combine are not those of its dispatch."""
        sent = self._weights[buffer.index]
        same = weights is sent or (
            weights is not None and sent is not None and weights.data_ptr() == sent.data_ptr()
        )
        if not same:
            raise InvalidArgument(
                f"topk_weights are {format_value(weights)} in combine, {format_value(sent)} in its "
                "dispatch: with several hosts they are sent with the rows, so pass the same tensor "
                "to both"
            )


def _hold_weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a bound method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        bound = reference()
        assert bound is not None  # the operator is in a call
        bound()

    return call
