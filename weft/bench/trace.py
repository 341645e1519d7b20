"""A run's timeline for Perfetto (ui.perfetto.dev) or chrome://tracing: one process for each rank.

Tracks of a rank: what it sends in dispatch, whom it waits for (one track for each peer), the wait
of combine as a whole, the sum. An arrow leads from the flag that ended a wait to that wait.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from weft.alltoall.operator import AllToAll
from weft.bench.clock import measure, replayed
from weft.bench.moe import MoECase, MoESession, MoETrial
from weft.bench.report import write_text
from weft.bench.run import LIMIT_SECONDS, first_problem
from weft.memory import launch
from weft.runtime.skew import Skew, estimate_skew
from weft.runtime.timeline import Span, read_timeline

if TYPE_CHECKING:
    from weft.memory import Group

ROUNDS = 32  # as many as a header keeps
DISPATCH, COMBINE, REDUCE, PEERS = 1, 2, 3, 10  # tracks; peer p's is PEERS + p
Event = dict[str, Any]


def trace_pairs(path: Path, case: MoECase) -> str | None:
    """Run the largest size of the case once more, profiled, and write its last 32 rounds.

    No figures of a benchmark are taken here, since profiled kernels are other kernels. Their own
    time for a pair is in the metadata, to be compared with the report's. Pairs are neither split in
    phases nor run together with a matmul. Returns what the check found wrong, or None. Raises
    InvalidArgument when the clocks cannot be aligned.
    """
    results = launch(
        rank_spans,
        replace(case, split_phase=False, corun=None),
        ranks=case.ranks,
        device=case.device,
        timeout=LIMIT_SECONDS,
    )
    problem = next((found for found, _, _ in results if found), None)
    if problem is None:
        pair_us = max(us for _, _, us in results)
        write_trace(path, case, [spans for _, spans, _ in results], pair_us=pair_us)
    return problem


def rank_spans(group: Group, case: MoECase) -> tuple[str | None, list[Span], float]:
    """What every rank does: check, time, run. Collective.

    Returns what is wrong, or None; its spans; the median time of a profiled pair in us.
    """
    tokens = max(case.tokens)
    with contextlib.closing(MoESession(group, case, profile=True)) as session:
        exchange = session.exchange("onesided", tokens)
        assert isinstance(exchange, AllToAll)
        trial = MoETrial(group, case, exchange, tokens)
        if problem := first_problem(group, trial.check()):
            return problem, [], 0.0
        times = measure(group, trial.calls(), samples=case.samples, graph=case.graph)
        replayed(group, trial.calls(), ROUNDS, graph=case.graph)
        exchange.check()
        spans = read_timeline(exchange.heap)
        group.barrier()  # a peer may still be reading what is about to go
    return None, spans, median(times.us["pair"])


def write_trace(
    path: Path, case: MoECase, ranks: Sequence[Sequence[Span]], *, pair_us: float
) -> None:
    """Write all ranks' spans as Chrome's JSON, on rank 0's clock."""
    shared = case.device != "cuda"  # CPU ranks read the one clock of their host
    skew = Skew((0.0,) * len(ranks), 0.0, 1) if shared else estimate_skew(ranks)
    facts = {
        "ranks": case.ranks,
        "device": case.device,
        "tokens_per_rank": max(case.tokens),
        "hidden": case.hidden,
        "top_k": case.top_k,
        "experts": case.experts,
        "graph": case.graph and case.device == "cuda",
        "profiled_pair_us": round(pair_us, 2),
    }
    document = to_chrome(ranks, skew, clock="host, shared" if shared else "GPU, aligned by flags")
    document["metadata"].update(facts)
    write_text(path, json.dumps(document) + "\n")


def to_chrome(ranks: Sequence[Sequence[Span]], skew: Skew, *, clock: str = "") -> dict[str, Any]:
    """The trace as a JSON object; times in us since the first start.

    `metadata` says how far times of two ranks may be wrong against each other.
    """
    spans = [span for each in ranks for span in each if span.finished]
    first = min((span.start_ns + skew.offsets_ns[span.rank] for span in spans), default=0.0)
    canvas = _Canvas(skew, first)
    events = [event for rank in range(len(ranks)) for event in _names(rank, len(ranks))]
    senders = {(span.rank, span.phase, span.epoch): span for span in spans}
    for number, span in enumerate(spans):
        events += canvas.operation(span)
        events += canvas.arrow(span, senders, number)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "metadata": {"clock": clock, **skew.metadata()},
    }


def _names(rank: int, ranks: int) -> Iterator[Event]:
    """Names and order of a rank's tracks."""
    yield _meta("process_name", rank, 0, {"name": f"rank {rank}"})
    yield _meta("process_sort_index", rank, 0, {"sort_index": rank})
    tracks = {DISPATCH: "dispatch send", COMBINE: "combine wait", REDUCE: "reduce"}
    tracks |= {PEERS + peer: f"wait for rank {peer}" for peer in range(ranks)}
    for track, name in tracks.items():
        yield _meta("thread_name", rank, track, {"name": name})
        yield _meta("thread_sort_index", rank, track, {"sort_index": track})


def _meta(kind: str, rank: int, track: int, args: Event) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": args}


class _Canvas:
    """Draws spans on the common clock."""

    def __init__(self, skew: Skew, first: float) -> None:
        self._skew, self._first = skew, first

    def operation(self, span: Span) -> Iterator[Event]:
        """The slices of one operation; a part that took no time is left out."""
        dispatches = span.phase == "dispatch"
        own = DISPATCH if dispatches else COMBINE
        yield from self._slice(span, own, "send", span.start_ns, span.sent_ns)
        yield from self._slice(span, own, "publish", span.sent_ns, span.published_ns)
        for peer, arrived in enumerate(span.arrived_ns):
            name = f"{span.phase}: wait for rank {peer}"
            yield from self._slice(span, PEERS + peer, name, span.published_ns, arrived)
        if not dispatches:
            yield from self._slice(span, own, "wait", span.published_ns, span.received_ns)
            yield from self._slice(span, REDUCE, "reduce", span.received_ns, span.end_ns)

    def arrow(
        self, span: Span, senders: dict[tuple[int, str, int], Span], number: int
    ) -> list[Event]:
        """From the flag that was waited for last to the wait that it ended."""
        peer = max(range(len(span.arrived_ns)), key=span.waited_ns)
        sender = senders.get((peer, span.phase, span.epoch))
        if sender is None or span.waited_ns(peer) == 0 or peer == span.rank:
            return []
        track = DISPATCH if span.phase == "dispatch" else COMBINE
        common = {"name": "flag", "cat": span.phase, "id": number}
        return [
            {
                "ph": "s",
                "pid": peer,
                "tid": track,
                "ts": self._us(sender, sender.sent_ns),
                **common,
            },
            {
                "ph": "f",
                "bp": "e",
                "pid": span.rank,
                "tid": PEERS + peer,
                "ts": self._us(span, span.arrived_ns[peer] - 1),  # inside of the slice
                **common,
            },
        ]

    def _slice(self, span: Span, track: int, name: str, begin: int, end: int) -> Iterator[Event]:
        if end > begin:
            yield {
                "ph": "X",
                "name": name,
                "cat": span.phase,
                "pid": span.rank,
                "tid": track,
                "ts": self._us(span, begin),
                "dur": (end - begin) / 1e3,
                "args": {"epoch": span.epoch, "ctas": span.ctas},
            }

    def _us(self, span: Span, stamp: int) -> float:
        return (stamp + self._skew.offsets_ns[span.rank] - self._first) / 1e3
