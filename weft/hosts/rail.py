# SPDX-License-Identifier: Apache-2.0
"""Rail: rows in fixed slots, to and from the ranks that have this one's place on other hosts.

Out: each host gets this rank's rows once, with their ids and weights, whichever of its ranks hold
the experts; what arrives is what this rank dispatches on its own host. Home: each host gets back
one row for each of its rows, the sum over this host. Sizes follow from the call's `rows` alone, so
no host waits to learn them, and a CUDA graph can hold the exchange.

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
from weft.group.hosts import break_rail
from weft.heap.header import CallRecord, ErrorRecord
from weft.hosts.cause import FirstCause
from weft.hosts.config import Span
from weft.hosts.watch import Watch
from weft.runtime.identity import CALL_WORDS, call_words, describe_words
from weft.runtime.report import BAD_EXPERT_ID, DUPLICATE_EXPERT, TOKEN_OVERFLOW, input_error

SENT, ARRIVED = range(2)  # what is refused: of this rank's own call, or of another host's
CPU_ROWS = 64  # that are summed at once
HEARING = 0.3  # seconds from an overdue exchange to its error: some looks of every rank's watch
MAX_VIEWS = 256  # numbers of rows whose views are kept: one for each batch size of an engine


@dataclass(frozen=True, slots=True)
class Arrived:
    """What this rank dispatches on its host: `rows` slots of each host, in the order of hosts.

    planes: uint8 `[hosts * rows, row_bytes]` of each payload.
    ids: int32 `[hosts * rows, top_k]`, as this host numbers its experts.   weights: float32.
    stats: int32 `[hosts * (1 + stats)]`, of each host the number of its tokens, then statistics.
    """

    planes: tuple[torch.Tensor, ...]
    ids: torch.Tensor
    weights: torch.Tensor
    stats: torch.Tensor


@dataclass(frozen=True, slots=True)
class Slots:
    """Views of the buffers with so many rows for each host.

    planes: of each payload, `[hosts, bytes]`.   out: these and the rest of what travels, bytes.
    calls: int32 `[hosts, CALL_WORDS]`, which call of which operator each host makes.
    counts, ids, weights: parts of that rest, by host.
    sums, returned: this host's sums of every host's rows, and every host's of this rank's.
    """

    planes: tuple[torch.Tensor, ...]
    out: list[tuple[torch.Tensor, torch.Tensor]]
    calls: torch.Tensor
    counts: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    arrived: tuple[Arrived, ...]
    sums: torch.Tensor
    returned: torch.Tensor


@dataclass(frozen=True, slots=True)
class Pending:
    """Messages on their way, and the host of each where each has a handle."""

    works: list[dist.Work]
    whom: list[int]


@dataclass(frozen=True, slots=True)
class Home:
    """Sums on their way, and what they are made of: what this host sends, and what it gets."""

    pending: Pending
    pairs: list[tuple[torch.Tensor, torch.Tensor]]


class Rail:
    """This rank's exchange with the ranks of other hosts, for one operator.

    number: of the operator, among those of its group that have a rail.
    on_failure: a bound method, held weakly, that is called when the exchange has failed, in
        whatever thread notices.

    Raises RailFailed where one of them is late or gone, and for every later call.
    """

    # Codes of refusals for which it answers in place of the host that a row is forwarded on.
    REPORTED = frozenset({DUPLICATE_EXPERT})

    def __init__(
        self,
        group: Group,
        span: Span,
        number: int,
        *,
        timeout: float,
        first_timeout: float,
        on_failure: Callable[[GroupError], None],
    ) -> None:
        self._group, self._span, self._device = group, span, group.device
        self._number = number
        self._on_gpu = group.device.type == "cuda"
        self._timeout = timeout
        self._longest = timedelta(seconds=1 + first_timeout + timeout)  # the watch ends it earlier
        self._out: Pending | None = None  # rows that are on their way
        self._home: Home | None = None  # sums that are
        self._hosts, self._own = group.hosts, group.host
        self._others = [h for h in range(self._hosts) if h != self._own]
        self._awaited = self._others  # hosts that an exchange may wait for now
        self._peers = {h: group.rail_peers[h] for h in self._others}
        self._failed: GroupError | None = None
        self._on_failure = weakref.WeakMethod(on_failure)
        self._first_cause = FirstCause(group)
        self._overdue_since: float | None = None  # of the exchange under way
        self._allocate()
        # Exchanges of the first round, whose peers may still compile; on GPUs one comes before it.
        limits = {"timeout": timeout, "first_timeout": first_timeout}
        self._watch = Watch(self._device, self._look, first=3 if self._on_gpu else 2, **limits)
        if self._on_gpu:
            # NCCL connects two ranks at their first message, which no graph can capture.
            self._finish(self._start(self._slots(span.max_tokens).out))

    def _allocate(self) -> None:
        span, hosts, device = self._span, self._hosts, self._device
        rows, experts = hosts * span.max_tokens, len(span.placement.ranks)

        def empty(*size: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._planes = tuple(empty(rows * size) for size in span.row_bytes)
        self._meta = empty(hosts * span.meta_words(span.max_tokens), dtype=torch.int32)
        self._ids = empty(span.num_results, rows, span.top_k, dtype=torch.int32)
        self._weights = empty(span.num_results, rows, span.top_k, dtype=torch.float32)
        self._stats = empty(hosts * (1 + span.stats), dtype=torch.int32)
        self._sums = empty(rows, span.hidden, dtype=span.dtype)
        self._returned = empty(rows, span.hidden, dtype=span.dtype)
        # On a CPU what is added stays in its cache, and no call has new pages to clear: 512 tokens
        # of 3 hosts took 28 ms without, 5 with it (2-core CI machine, 2026-11-25).
        step = min(span.max_tokens, CPU_ROWS) if device.type == "cpu" else span.max_tokens
        self._total = empty(step, span.hidden, dtype=torch.float32)
        self._numbers = torch.arange(span.max_tokens, dtype=torch.int32, device=device)
        # The last entry answers for what is no expert.
        table = torch.tensor((*span.local_ids, -1), dtype=torch.int32)
        self._local_ids = table.to(device)
        self._experts = experts
        # Of what was sent and of what arrived: reports, and of the last one its code, what was
        # there, and which entry of how many rows it was.
        self._noted = empty(2, 4, dtype=torch.int64)
        self._seen_reports = [0, 0]
        self._host_reports = self._noted
        # Whether hosts made different calls, then the first calls that differed.
        self._other_calls = empty(1 + hosts * CALL_WORDS, dtype=torch.int32)
        self._host_calls = self._other_calls
        if device.type == "cuda":
            self._host_reports = torch.zeros((2, 4), dtype=torch.int64).pin_memory()
            self._host_calls = torch.zeros(len(self._other_calls), dtype=torch.int32).pin_memory()
        self._views: dict[int, Slots] = {}

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
        """Stage this rank's rows, `rows` at most, and start to exchange them. Arguments checked.

        call: of this dispatch; every host must make the same one.
        """
        span, slots, tokens = self._span, self._slots(rows), topk_ids.shape[0]
        for word, value in zip(slots.calls[self._own], call_words(self._number, call), strict=True):
            word.fill_(value)
        if span.quantize is not None:
            tensors = [*quantize(tensors[0], span.quantize), *tensors[1:]]
        for plane, tensor, size in zip(slots.planes, tensors, span.row_bytes, strict=True):
            row = math.prod(tensor.shape[1:])
            staged = plane[self._own].view(rows, size)[:tokens]
            staged.copy_(tensor.reshape(tokens, row).view(torch.uint8))
        own = self._own
        counts, ids, weights = slots.counts[own], slots.ids[own], slots.weights[own]
        weights[:tokens] = 1.0 if topk_weights is None else topk_weights
        count = torch.full((1,), tokens, dtype=torch.int32, device=self._device)
        if num_tokens is not None:
            count = num_tokens
            beyond = (self._numbers[:tokens] >= count)[:, None]
            topk_ids = topk_ids.masked_fill(beyond, -1)
        counts[:1] = count.clamp(0, tokens)
        known = (topk_ids >= 0) & (topk_ids < self._experts)
        chosen = torch.where(known, topk_ids, -1)
        if stats is not None:
            counts[1:] = stats
        ids.fill_(-1)
        ids[:tokens] = chosen
        self._note(SENT, count, topk_ids, tokens, repeats=chosen)
        self._out = self._start(slots.out)

    def receive(self, rows: int, result: int = 0) -> Arrived:
        """Wait for the rows of all hosts. Raises RailFailed, and GeometryMismatch on CPUs.

        The ids and weights stay valid until the next receive with the same `result`.
        On GPUs rows of another call are dropped, and `raise_if_failed` raises GeometryMismatch.
        Ids and counts that another host must not send are dropped and clamped; `reports` has them.
        """
        assert self._out is not None
        out, self._out = self._out, None
        self._finish(out)
        slots, experts = self._slots(rows), self._experts
        arrived = slots.arrived[result]
        ids, counts = slots.ids, slots.counts
        same = self._compare_calls(slots.calls)[:, None, None]
        known = torch.where(same & (ids >= 0) & (ids < experts), ids, experts)
        arrived.ids.view(ids.shape).copy_(self._local_ids[known])
        arrived.weights.view(slots.weights.shape).copy_(slots.weights)
        gathered = arrived.stats.view(counts.shape)
        gathered.copy_(counts)
        gathered[:, 0].clamp_(0, rows)
        self._note(ARRIVED, counts[:, 0], ids, rows)
        return arrived

    def arrived(self, rows: int, result: int) -> Arrived:
        """Return what the latest receive with `result` returned."""
        return self._slots(rows).arrived[result]

    def sums(self, rows: int) -> torch.Tensor:
        """`[hosts * rows, hidden]`: where this host's sums of the rows that arrived are written."""
        return self._slots(rows).sums

    @property
    def returning(self) -> bool:
        """Whether sums are being returned."""
        return self._home is not None

    def send_home(self, rows: int) -> None:
        """Start to return this host's sums."""
        sums = self._slots(rows).sums.view(self._hosts, rows, self._span.hidden)
        back = self._slots(rows).returned.view(sums.shape)
        pairs = [(sums, back)]
        if self._span.returns_fp8:
            numbers, scales = (t.contiguous() for t in quantize(sums, "fp8"))
            pairs = [(numbers, torch.empty_like(numbers)), (scales, torch.empty_like(scales))]
        started = self._start([(_bytes(mine), _bytes(theirs)) for mine, theirs in pairs])
        self._home = Home(started, pairs)

    def receive_home(self, out: torch.Tensor, add: torch.Tensor | None) -> None:
        """Wait for every host's sums of this rank's tokens, and add them in the order of hosts.

        `out[t] = round(sum of float(row of host h) over h + float(add[t]))`, from +0. A host that
        has no expert of a token returns zeros for it. Raises RailFailed.
        """
        assert self._home is not None
        home, self._home = self._home, None
        self._finish(home.pending)
        own = self._own
        parts = [
            [(mine if h == own else theirs)[h] for mine, theirs in home.pairs]
            for h in range(self._hosts)
        ]
        step = len(self._total)
        for at in range(0, len(out), step):
            rows = slice(at, min(at + step, len(out)))
            total = self._total[: rows.stop - at].zero_()
            for part in parts:
                each = [t[rows] for t in part]
                total += dequantize(*each) if self._span.returns_fp8 else each[0]
            if add is not None:
                total += add[rows]
            out[rows] = total

    def reports(self) -> tuple[ErrorRecord, int] | None:
        """The last refusal since the last call, and how many there were; None without one.

        What arrived is refused in the name of the rank that sent it.
        """
        for which, (reports, code, seen, where) in enumerate(self._host_reports.tolist()):
            count, self._seen_reports[which] = reports - self._seen_reports[which], reports
            if count:
                record = ErrorRecord(code=code, rank=self._group.rank, expected=self._experts)
                entry, rows = divmod(where, 1 << 32)
                hosts = 1 if which == SENT else self._hosts
                host, record.expected = entry, rows
                if entry >= hosts:
                    token, record.slot = divmod(entry - hosts, self._span.top_k)
                    host, record.token = divmod(token, rows)
                    record.expected = self._experts
                if which == ARRIVED:
                    record.reported_by = 1 + self._group.rank
                    record.rank = self._group.host_ranks[host][self._group.local.rank]
                record.observed = seen & (1 << 64) - 1
                return record, count
        return None

    def close(self) -> None:
        """Give the memory back, and stop watching."""
        self._watch.close()
        self._out = self._home = None
        self._views.clear()
        del self._planes, self._meta, self._sums, self._returned, self._total

    def _compare_calls(self, calls: torch.Tensor) -> torch.Tensor:
        """Return of which hosts the call is this host's, bool `[hosts]`; keep those that differ."""
        same = (calls == calls[self._own]).all(dim=1)
        differ = torch.cat([(~same.all()).int()[None], calls.flatten()])
        kept = self._other_calls
        kept.copy_(torch.where((kept[0] == 0) & (differ[0] == 1), differ, kept))
        if self._host_calls is not kept:
            self._host_calls.copy_(kept, non_blocking=True)
        else:
            self.raise_if_failed()
        return same

    def raise_recorded(self) -> None:
        """Raise what ended the exchange, or an error about ids or counts since the last call."""
        self.raise_if_failed()
        reports = self.reports()
        if reports is not None:
            raise input_error(*reports, drops_repeats=self._span.drops_repeats)

    def raise_if_failed(self) -> None:
        """Raise what ended the exchange, if anything did."""
        if self._failed is None and self._host_calls[0]:
            self._fail(self._mismatch())
        if self._failed is not None:
            raise self._failed

    def _slots(self, rows: int) -> Slots:
        slots = self._views.get(rows)
        if slots is None:
            if len(self._views) == MAX_VIEWS:
                self._views.clear()
            slots = self._views[rows] = self._make_slots(rows)
        return slots

    def _make_slots(self, rows: int) -> Slots:
        span, hosts = self._span, self._hosts
        planes = tuple(
            plane[: hosts * rows * size].view(hosts, rows * size)
            for plane, size in zip(self._planes, span.row_bytes, strict=True)
        )
        meta = self._meta[: hosts * span.meta_words(rows)].view(hosts, -1)
        sizes = [CALL_WORDS, 1 + span.stats, rows * span.top_k, rows * span.top_k]
        calls, counts, ids, weights = torch.split(meta, sizes, dim=1)
        total = hosts * rows
        payloads = tuple(p.view(total, n) for p, n in zip(planes, span.row_bytes, strict=True))
        arrived = tuple(
            Arrived(payloads, ids[:total], weights[:total], self._stats)
            for ids, weights in zip(self._ids, self._weights, strict=True)
        )
        return Slots(
            planes=planes,
            out=[(part, part) for part in (*planes, _bytes(meta))],
            calls=calls,
            counts=counts,
            ids=ids.view(hosts, rows, span.top_k),
            weights=weights.view(torch.float32).view(hosts, rows, span.top_k),
            arrived=arrived,
            sums=self._sums[:total],
            returned=self._returned[:total],
        )

    def _start(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Pending:
        """Send what is for each other host, and receive what it has for this one.

        pairs: what is sent and where it arrives, bytes `[hosts, n]`. Where both are one tensor, all
        get what this host has in its own place.
        """
        self.raise_if_failed()
        ops, whom, own, rail = [], list[int](), self._own, self._group.rail
        # Each host begins with its right neighbour: where all began with host 0, whose link they
        # then shared, a round of 3 hosts took 887 ms in place of 704 (1 Gbit/s, gloo).
        for step in range(1, self._hosts):
            right, left = (own + step) % self._hosts, (own - step) % self._hosts
            for mine, theirs in pairs:
                sent, came = mine[own if mine is theirs else right], theirs[left]
                # The tag is the size: gloo ends a process that gets more than it waits for.
                size = len(sent)
                ops.append(dist.P2POp(dist.isend, sent, self._peers[right], rail, size))
                ops.append(dist.P2POp(dist.irecv, came, self._peers[left], rail, size))
                whom += [right, left]
        if self._on_gpu:
            self._watch.begin()
        try:
            return Pending(dist.batch_isend_irecv(ops), whom)
        except RuntimeError as error:
            raise self._fail(self._broken(f"one of {self._names(self._others)}", error)) from error

    def _finish(self, pending: Pending) -> None:
        """Wait for what was started: on CPUs in this thread, on GPUs in the stream."""
        self.raise_if_failed()
        if self._on_gpu:
            for work in pending.works:
                work.wait()
        else:
            self._watch.begin()
            for work, host in zip(pending.works, pending.whom, strict=True):
                self._awaited = [host]
                try:
                    work.wait(self._longest)
                except RuntimeError as error:
                    self._watch.close()
                    self.raise_if_failed()
                    raise self._fail(self._broken(self._names([host]), error)) from error
        self._watch.end()

    def end(self, error: GroupError) -> None:
        """From now on every exchange raises this; whom this rank exchanges with learns it at once.

        From any thread; later errors change nothing.
        """
        if self._failed is None:
            self._failed = error
            self._tell_hosts(error)

    def _mismatch(self) -> GeometryMismatch:
        """The error of hosts that made different calls."""
        calls = self._host_calls[1:].view(self._hosts, CALL_WORDS).tolist()
        own = calls[self._own]
        other = next(host for host, call in enumerate(calls) if call != own)
        return GeometryMismatch(
            f"rank {self._group.rank}, dispatch: {self._names([other])} called with "
            f"{describe_words(calls[other])}; this rank with {describe_words(own)}. Make the same "
            "sequence of calls, with the same arguments, on every rank."
        )

    def _fail(self, what: str | GroupError) -> GroupError:
        """The error of an exchange that failed, unless something else ended it before.

        Ranks of this host learn it first: a store that is gone answers only after a second, and
        they would name this rank, for which they wait.
        """
        failed = self._failed
        error = failed or (RailFailed(what) if isinstance(what, str) else what)
        self._failed = error
        on_failure = self._on_failure()
        try:
            if on_failure is not None:
                on_failure(error)
        finally:  # notify other hosts even if this GPU cannot
            if failed is None:
                self._tell_hosts(error)
        return error

    def _tell_hosts(self, error: GroupError) -> None:
        host = self._group.host_name(self._group.host)
        self._first_cause.tell(f"on {host}: {error}")
        break_rail(self._group.rail)

    def _look(self, overdue: float | None) -> bool:
        """End an exchange that is overdue, or that waits although an error elsewhere came first.

        Its connections need not break then: a child that a dead rank forked keeps them, and a rank
        that left an operator may live on. On a GPU its kernels end by the abort.
        """
        whom = self._awaited
        now, since = time.monotonic(), self._overdue_since
        if overdue is None and since is not None:  # what was overdue came after all
            self._overdue_since = None
            self._first_cause.wait_for([])
        elif overdue is not None and since is None:
            # Others that wait as long may wait for another host: they have a moment to say so.
            self._overdue_since = now
            self._first_cause.wait_for(whom)
        if overdue is not None and since is not None and now - since >= HEARING:
            self._fail(self._overdue(self._first_cause.culprits(whom), overdue))
        elif first := self._first_cause.ask():
            names = self._names(whom)
            self._fail(
                f"rank {self._group.rank}: left its wait for {names}. What came first, {first}"
            )
        return self._failed is not None

    def _overdue(self, hosts: Sequence[int], limit: float) -> str:
        option = "timeout" if limit == self._timeout else "first_timeout"
        names = " and ".join(self._group.host_name(host) for host in hosts)
        return (
            f"rank {self._group.rank}: rows to or from {names} did not arrive within {limit:g} s. "
            "A rank there, the host or its link is gone or stopped, was slower than the deadline, "
            f"did not make this call or made it with other rows; raise {option}= if it was only "
            "slow, then make a new group."
        )

    def _broken(self, whom: str, error: Exception) -> str:
        first, message = self._first_cause.ask(), " ".join(str(error).split())
        if first:
            return f"rank {self._group.rank}: {whom} left. What came first, {first}"
        return (
            f"rank {self._group.rank}: the connection to {whom} broke: that rank died, or left "
            f"after an error that it names itself. Make a new group. ({message})"
        )

    def _names(self, hosts: Sequence[int]) -> str:
        ranks, place = self._group.host_ranks, self._group.local.rank
        return ", ".join(f"rank {ranks[h][place]} on {self._group.host_name(h)}" for h in hosts)

    def _note(
        self,
        which: int,
        counts: torch.Tensor,
        ids: torch.Tensor,
        rows: int,
        *,
        repeats: torch.Tensor | None = None,
    ) -> None:
        """Note what is wrong with counts and ids, for `reports`; on GPUs in stream order.

        counts: of tokens, `[hosts]`, or of this rank.   ids: of `rows` rows for each of these.
        repeats: ids without those that are wrong, to look for those that are in a row twice.
        """
        wrong = ((ids < -1) | (ids >= self._experts)) * BAD_EXPERT_ID
        if repeats is not None:
            top_k = self._span.top_k
            earlier = torch.ones((top_k, top_k), dtype=torch.bool, device=self._device).tril(-1)
            equal = (repeats[:, :, None] == repeats[:, None, :]) & earlier
            wrong = wrong + (equal & (repeats >= 0)[:, :, None]).any(dim=2) * DUPLICATE_EXPERT
        over = ((counts < 0) | (counts > rows)) * TOKEN_OVERFLOW
        code, seen = torch.cat([over, wrong.flatten()]), torch.cat([counts, ids.flatten()])
        # `code[at]` would read `at` on the CPU, which a graph being captured forbids.
        at, count = (code > 0).long().argmax(0, keepdim=True), (code > 0).sum()
        noted = self._noted[which]
        where = at[0] * (1 << 32) + rows
        last = torch.stack([noted[0] + count, code.take(at)[0], seen.take(at)[0].long(), where])
        noted.copy_(torch.where(count > 0, last, noted))
        if self._host_reports is not self._noted:
            self._host_reports.copy_(self._noted, non_blocking=True)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """`[hosts, ...]`, contiguous, as `[hosts, bytes]`."""
    return tensor.view(len(tensor), -1).view(torch.uint8)
