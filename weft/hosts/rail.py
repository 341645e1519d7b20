# SPDX-License-Identifier: Apache-2.0
"""Rail: exchange of rows between the ranks that have the same index on each host.

Dispatch: each host gets this rank's rows once, with their ids and weights, whichever of its ranks
hold the experts. This rank dispatches the rows that arrive within its own host. Combine: each host
gets one row for each row that it sent, the sum over this host. Sizes follow from the `rows` of the
call alone, so no host waits to learn them, and a CUDA graph can hold the exchange.

Both are point-to-point messages of torch.distributed: NCCL on GPUs, gloo on CPUs.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.errors import GeometryMismatch, GroupError, RailFailed
from weft.fp8 import dequantize, quantize
from weft.group import Group
from weft.group.hosts import abort_rail
from weft.heap.header import CallRecord
from weft.hosts.buffers import RailBuffers, ReceivedRows, view_as_bytes
from weft.hosts.cause import FirstErrorStore
from weft.hosts.checks import RECEIVED, SENT, CallCheck, InputErrorRecorder
from weft.hosts.config import HostSpan
from weft.hosts.watch import Watch
from weft.runtime.identity import describe_host_words, pack_host_words
from weft.runtime.report import DUPLICATE_EXPERT, build_input_error

# Seconds from an overdue exchange to its error: several polls of every rank's watch, in which ranks
# of other hosts report the hosts that they wait for.
REPORT_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class PendingMessages:
    """Messages in flight.

    Attributes:
        works: Their handles.
        hosts: Host of each handle, if every message has one.
    """

    works: list[dist.Work]
    hosts: list[int]


@dataclass(frozen=True, slots=True)
class ReturningSums:
    """Sums in flight.

    Attributes:
        pending: Their messages.
        pairs: Sums that this host sends and buffers for those it receives, `[hosts, rows, n]`.
    """

    pending: PendingMessages
    pairs: list[tuple[torch.Tensor, torch.Tensor]]


class Rail:
    """This rank's exchange with the ranks of other hosts, for one operator.

    If a rank is late or has exited, the current call and every later one raise RailFailed.

    Args:
        group: Ranks of all hosts.
        span: Sizes of the exchange.
        number: Sequence number among the group's operators that have a rail.
        timeout: Seconds that an exchange may take.
        first_timeout: Seconds that an exchange of the first round may take.
        on_failure: A bound method, held weakly, that is called when the exchange has failed, in the
            thread that notices it.
    """

    # Errors about the input that a rail reports on the sending rank, not on the rank that
    # forwards the row on another host.
    REPORTED = frozenset({DUPLICATE_EXPERT})

    def __init__(
        self,
        group: Group,
        span: HostSpan,
        number: int,
        *,
        timeout: float,
        first_timeout: float,
        on_failure: Callable[[GroupError], None],
    ) -> None:
        self._group, self._span, self._number = group, span, number
        self._on_gpu = group.device.type == "cuda"
        self._timeout = timeout
        # The watch ends a wait earlier.
        self._max_wait = timedelta(seconds=1 + first_timeout + timeout)
        self._rows: PendingMessages | None = None  # rows in flight
        self._sums: ReturningSums | None = None  # sums in flight
        self._num_hosts, self._own_host = group.hosts, group.host
        self._others = [h for h in range(self._num_hosts) if h != self._own_host]
        self._awaited_hosts = self._others  # hosts that the current exchange waits for
        self._peers = {h: group.rail_peers[h] for h in self._others}
        self._error: GroupError | None = None
        self._on_failure = weakref.WeakMethod(on_failure)
        self._first_error = FirstErrorStore(group)
        self._overdue_since: float | None = None  # of the current exchange
        self._num_experts = len(span.placement.ranks)
        self._buffers = RailBuffers(span, group.device)
        self._input_errors, self._calls = InputErrorRecorder(group, span), CallCheck(group)
        # The last entry is for ids that name no expert.
        local_ids = torch.tensor((*span.local_ids, -1), dtype=torch.int32)
        self._local_ids = local_ids.to(group.device)
        # Number of exchanges while peers may still compile: those of the first round and, on GPUs,
        # the one below.
        limits = {"timeout": timeout, "first_timeout": first_timeout}
        num_first = 3 if self._on_gpu else 2
        self._watch = Watch(group.device, self._poll, num_first=num_first, **limits)
        if self._on_gpu:
            # NCCL connects two ranks at their first message, which no graph can capture.
            self._wait_for_messages(
                self._start_messages(self._buffers.get_views(span.max_tokens).messages)
            )

    def send(
        self,
        tensors: Sequence[torch.Tensor],
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        num_tokens: torch.Tensor | None,
        stats: torch.Tensor | None,
        rows: int,
        call: CallRecord,
    ) -> None:
        """Stage the rows of a dispatch and start to exchange them. The arguments must be checked.

        Args:
            tensors: Payloads.
            topk_ids: As in `AllToAll.dispatch`.
            topk_weights: As in `AllToAll.dispatch`.
            num_tokens: As in `AllToAll.dispatch`.
            stats: As in `AllToAll.dispatch`.
            rows: Slots of each source, at least the number of tokens.
            call: Identity of the dispatch, equal on every host.
        """
        span, views, own_host = self._span, self._buffers.get_views(rows), self._own_host
        tokens = topk_ids.shape[0]
        for word, value in zip(
            views.calls[own_host], pack_host_words(self._number, call), strict=True
        ):
            word.fill_(value)
        if span.quantize is not None:
            tensors = [*quantize(tensors[0], span.quantize), *tensors[1:]]
        for plane, tensor, size in zip(views.planes, tensors, span.row_bytes, strict=True):
            row = math.prod(tensor.shape[1:])
            staged = plane[own_host].view(rows, size)[:tokens]
            staged.copy_(tensor.reshape(tokens, row).view(torch.uint8))
        counts, ids, weights = views.counts[own_host], views.ids[own_host], views.weights[own_host]
        weights[:tokens] = 1.0 if topk_weights is None else topk_weights
        count = torch.full((1,), tokens, dtype=torch.int32, device=topk_ids.device)
        if num_tokens is not None:
            count = num_tokens
            padding = (self._buffers.row_index[:tokens] >= count)[:, None]
            topk_ids = topk_ids.masked_fill(padding, -1)
        counts[:1] = count.clamp(0, tokens)
        valid = (topk_ids >= 0) & (topk_ids < self._num_experts)
        valid_ids = torch.where(valid, topk_ids, -1)
        if stats is not None:
            counts[1:] = stats
        ids.fill_(-1)
        ids[:tokens] = valid_ids
        self._input_errors.record(SENT, count, topk_ids, tokens, repeats=valid_ids)
        self._rows = self._start_messages(views.messages)

    def receive(self, rows: int, result: int = 0) -> ReceivedRows:
        """Wait for the rows of all hosts and return them.

        Invalid ids are dropped and invalid counts clamped, and `raise_recorded` reports
        them. On GPUs rows of another call are dropped, and `raise_recorded` raises
        GeometryMismatch.

        Args:
            rows: As in `send`.
            result: Index of the result. Its ids and weights stay valid until the next receive with
                the same index.

        Raises:
            RailFailed: a rank is late or has exited.
            GeometryMismatch: on CPUs, a host made another call.
        """
        assert self._rows is not None
        pending, self._rows = self._rows, None
        self._wait_for_messages(pending)
        views, num_experts = self._buffers.get_views(rows), self._num_experts
        received, ids, counts = views.received[result], views.ids, views.counts
        same = self._calls.compare(views.calls)[:, None, None]
        if not self._on_gpu:
            self.raise_if_failed()
        valid_ids = torch.where(same & (ids >= 0) & (ids < num_experts), ids, num_experts)
        received.ids.view(ids.shape).copy_(self._local_ids[valid_ids])
        received.weights.view(views.weights.shape).copy_(views.weights)
        stats = received.stats.view(counts.shape)
        stats.copy_(counts)
        stats[:, 0].clamp_(0, rows)
        self._input_errors.record(RECEIVED, counts[:, 0], ids, rows)
        return received

    def get_received_rows(self, rows: int, result: int) -> ReceivedRows:
        """Return the rows of the latest `receive` with this result index.

        Args:
            rows: As in `receive`.
            result: As in `receive`.
        """
        return self._buffers.get_views(rows).received[result]

    def get_sums_buffer(self, rows: int) -> torch.Tensor:
        """Return the buffer for this host's sums of the received rows, `[hosts * rows, hidden]`.

        Args:
            rows: As in `send`.
        """
        return self._buffers.get_views(rows).sums

    @property
    def has_sums_in_flight(self) -> bool:
        """Whether sums are in flight."""
        return self._sums is not None

    def send_sums(self, rows: int) -> None:
        """Start sending this host's sums back.

        Args:
            rows: As in `send`.
        """
        views = self._buffers.get_views(rows)
        sums = views.sums.view(self._num_hosts, rows, self._span.hidden)
        pairs = [(sums, views.returned.view(sums.shape))]
        if self._span.returns_fp8:
            values, scales = (t.contiguous() for t in quantize(sums, "fp8"))
            pairs = [(values, torch.empty_like(values)), (scales, torch.empty_like(scales))]
        pending = self._start_messages(
            [(view_as_bytes(sent), view_as_bytes(back)) for sent, back in pairs]
        )
        self._sums = ReturningSums(pending, pairs)

    def receive_sums(self, out: torch.Tensor, add: torch.Tensor | None) -> None:
        """Wait for every host's sums of this rank's tokens, and add them in host order.

        `out[t] = round(sum of float(row of host h) over h + float(add[t]))`, from +0. A host
        without an expert of a token returns zeros for it.

        Args:
            out: Sums of this rank's tokens, `[tokens, hidden]`.
            add: Rows that are added to them.

        Raises:
            RailFailed: a rank is late or has exited.
        """
        assert self._sums is not None
        returning, self._sums = self._sums, None
        self._wait_for_messages(returning.pending)
        parts = [
            [(sent if host == self._own_host else back)[host] for sent, back in returning.pairs]
            for host in range(self._num_hosts)
        ]
        step = len(self._buffers.total)
        for start in range(0, len(out), step):
            rows = slice(start, min(start + step, len(out)))
            total = self._buffers.total[: rows.stop - start].zero_()
            for part in parts:
                row = [t[rows] for t in part]
                total += dequantize(*row) if self._span.returns_fp8 else row[0]
            if add is not None:
                total += add[rows]
            out[rows] = total

    def end(self, error: GroupError) -> None:
        """Make every later exchange raise `error`, and notify the other hosts.

        Any thread may call it. Only the first error is kept.
        """
        if self._error is None:
            self._error = error
            self._notify_hosts(error)

    def raise_recorded(self) -> None:
        """Raise the error of the exchange, or an error about ids or counts since the last call.

        Raises:
            UsageError: the device dropped part of the input.
            GroupError: the exchange has failed, or hosts made different calls.
        """
        self.raise_if_failed()
        report = self._input_errors.read()
        if report is not None:
            raise build_input_error(*report, drops_repeats=self._span.drops_repeats)

    def raise_if_failed(self) -> None:
        """Raise the error of the exchange, if any."""
        if self._error is None:
            mismatch = self._calls.find_mismatch()
            if mismatch is not None:
                host, call, own_call = mismatch
                self._fail(
                    GeometryMismatch(
                        f"rank {self._group.rank}, dispatch: {self._describe([host])} called with "
                        f"{describe_host_words(call)}; this rank with "
                        f"{describe_host_words(own_call)}. Make the same sequence of "
                        "calls, with the same arguments, on every rank."
                    )
                )
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Free the memory and stop the watch."""
        self._watch.close()
        self._rows = self._sums = None
        self._buffers.close()

    def _start_messages(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> PendingMessages:
        """Start the messages to and from each other host.

        Args:
            pairs: Tensors to send and to receive into, bytes `[hosts, n]`. If both are the same
                tensor, every host gets this host's entry.
        """
        self.raise_if_failed()
        ops, hosts, own_host, rail = [], list[int](), self._own_host, self._group.rail
        # Each host starts with its right neighbour. When all started with host 0 and shared its
        # link, a round of 3 hosts took 887 ms instead of 704 (1 Gbit/s, gloo).
        for step in range(1, self._num_hosts):
            right, left = (own_host + step) % self._num_hosts, (own_host - step) % self._num_hosts
            for outgoing, incoming in pairs:
                sent = outgoing[own_host if outgoing is incoming else right]
                target = incoming[left]
                # The tag is the size, because gloo aborts a process that gets more than it expects.
                size = len(sent)
                ops.append(dist.P2POp(dist.isend, sent, self._peers[right], rail, size))
                ops.append(dist.P2POp(dist.irecv, target, self._peers[left], rail, size))
                hosts += [right, left]
        if self._on_gpu:
            self._watch.begin()
        try:
            return PendingMessages(dist.batch_isend_irecv(ops), hosts)
        except RuntimeError as error:
            ranks = f"one of {self._describe(self._others)}"
            raise self._fail(self._format_connection_error(ranks, error)) from error

    def _wait_for_messages(self, pending: PendingMessages) -> None:
        """Wait for messages: on CPUs in this thread, on GPUs in the stream."""
        self.raise_if_failed()
        if self._on_gpu:
            for work in pending.works:
                work.wait()
        else:
            self._watch.begin()
            for work, host in zip(pending.works, pending.hosts, strict=True):
                self._awaited_hosts = [host]
                try:
                    work.wait(self._max_wait)
                except RuntimeError as error:
                    self._watch.close()
                    self.raise_if_failed()
                    text = self._format_connection_error(self._describe([host]), error)
                    raise self._fail(text) from error
        self._watch.end()

    def _fail(self, reason: str | GroupError) -> GroupError:
        """Record the error of an exchange, unless there is one, and return the recorded error.

        Ranks of this host are notified first: access to a store that has exited takes a second, in
        which they would time out and blame this rank.
        """
        previous = self._error
        error = previous or (RailFailed(reason) if isinstance(reason, str) else reason)
        self._error = error
        on_failure = self._on_failure()
        try:
            if on_failure is not None:
                on_failure(error)
        finally:  # notify other hosts even if this GPU cannot
            if previous is None:
                self._notify_hosts(error)
        return error

    def _notify_hosts(self, error: GroupError) -> None:
        host = self._group.host_name(self._group.host)
        self._first_error.report(f"on {host}: {error}")
        abort_rail(self._group.rail)

    def _poll(self, overdue: float | None) -> bool:
        """End an exchange that is overdue, or that waits although another rank has failed.

        Connections may stay open: a forked child of a dead rank holds them, and a rank that closed
        an operator may still run. On a GPU the abort ends the kernels.
        """
        awaited_hosts, now, since = self._awaited_hosts, time.monotonic(), self._overdue_since
        if overdue is None and since is not None:  # the overdue exchange ended after all
            self._overdue_since = None
            self._first_error.report_wait([])
        elif overdue is not None and since is None:
            # The awaited ranks may themselves wait for another host; give them time to report it.
            self._overdue_since = now
            self._first_error.report_wait(awaited_hosts)
        if overdue is not None and since is not None and now - since >= REPORT_SECONDS:
            root_hosts = self._first_error.find_root_hosts(awaited_hosts)
            self._fail(self._format_overdue_error(root_hosts, overdue))
        elif first := self._first_error.read_first_error():
            self._fail(
                f"rank {self._group.rank}: stopped waiting for {self._describe(awaited_hosts)}. "
                f"The first error was {first}"
            )
        return self._error is not None

    def _format_overdue_error(self, hosts: Sequence[int], limit: float) -> str:
        option = "timeout" if limit == self._timeout else "first_timeout"
        names = " and ".join(self._group.host_name(host) for host in hosts)
        return (
            f"rank {self._group.rank}: rows to or from {names} did not arrive within {limit:g} s. "
            "A rank there, the host or its link has failed or stopped, was slower than the "
            f"deadline, or did not make this call with the same rows. Create a new group, with a "
            f"larger {option}= if it was only slow."
        )

    def _format_connection_error(self, ranks: str, error: Exception) -> str:
        first, message = self._first_error.read_first_error(), " ".join(str(error).split())
        if first:
            return f"rank {self._group.rank}: {ranks} disconnected. The first error was {first}"
        return (
            f"rank {self._group.rank}: the connection to {ranks} broke: that rank has died, or "
            f"has left after an error that it reports itself. Create a new group. ({message})"
        )

    def _describe(self, hosts: Sequence[int]) -> str:
        """Format the ranks and host names of this rank's peers on `hosts`."""
        ranks, index = self._group.host_ranks, self._group.local.rank
        return ", ".join(f"rank {ranks[h][index]} on {self._group.host_name(h)}" for h in hosts)
