# SPDX-License-Identifier: Apache-2.0
"""Timeline of a run for Perfetto (ui.perfetto.dev) or chrome://tracing, one process per rank.

Tracks of a rank: sending in dispatch, waiting for each peer, combine's wait, and the reduction. An
arrow leads from a flag to the wait that it ended. The low-latency operator has its own tracks,
written by `weft.lowlatency.trace`.

Profiled kernels differ from timed ones, so no benchmark results are taken here.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from weft.bench.harness import Calls, Trial, first_problem, measure, on_ranks
from weft.bench.lowlatency import LowCase, LowTrial
from weft.bench.moe import MoECase, MoETrial
from weft.bench.report import write_json
from weft.group import Group
from weft.lowlatency.trace import merge
from weft.runtime.skew import Skew, estimate_skew
from weft.runtime.timeline import Span

ROUNDS = 32  # rounds that a header keeps
DISPATCH, COMBINE, REDUCE, PEERS = 1, 2, 3, 10  # track ids; peer p's track is PEERS + p
Event = dict[str, Any]


def trace(path: Path, case: MoECase | LowCase) -> str | None:
    """Run the largest size of the case with profiling, and write its last 32 rounds.

    For an all-to-all, the metadata has the profiled pair's time, to compare with the report.
    Returns a failed check's problem, or None. Raises InvalidArgument if clocks cannot be aligned.
    """
    case = replace(case, tokens=(max(case.tokens),), profile=True)
    with tempfile.TemporaryDirectory() as folder:
        results: list[tuple[str | None, list[Span], float]] = on_ranks(case, rank_body, folder)
        if problem := next((problem for problem, _, _ in results if problem), None):
            return problem
        if isinstance(case, LowCase):
            merge([Path(folder) / f"{rank}.json" for rank in range(case.ranks)], path)
        else:
            pair_us = max(us for _, _, us in results)
            write_json(path, document_of(case, [spans for _, spans, _ in results], pair_us))
    return None


def rank_body(
    group: Group, case: MoECase | LowCase, folder: str
) -> tuple[str | None, list[Span], float]:
    """Check, time and profile on one rank; low latency also writes its file. Collective.

    Returns a problem or None, the rank's spans, and the median us of a profiled pair.
    """
    with contextlib.closing(case.trials(group)) as trials:
        trial = next(trials)
        assert isinstance(trial, Trial)
        if problem := first_problem(group, trial.check()):
            return problem, [], 0.0
        # A pair is one step here: no events between dispatch and combine, no pause between rounds.
        pair, samples = Calls({"pair": trial.calls()}, "pair"), max(case.samples, ROUNDS)
        _, us = measure(group, pair, samples=samples, graph=case.graph)
        trial.facts()  # raises errors that the kernels recorded
        group.barrier()  # all ranks have finished the same rounds
        spans: list[Span] = []
        if isinstance(trial, LowTrial):
            trial.a2a.dump_trace(Path(folder) / f"{group.rank}.json")
        else:
            assert isinstance(trial, MoETrial)
            spans = trial.exchange.timeline()
        group.barrier()  # a peer may still be reading from this rank's memory
    return None, spans, median(us["pair"][group.rank])


def document_of(case: MoECase, ranks: Sequence[Sequence[Span]], pair_us: float) -> dict[str, Any]:
    """Return all ranks' spans as Chrome's JSON, on rank 0's clock."""
    shared = case.device != "cuda"  # CPU ranks share their host's clock
    skew = Skew((0.0,) * len(ranks), 0.0, 1) if shared else estimate_skew(ranks)
    document = to_chrome(ranks, skew)
    names = ("ranks", "device", "hidden", "top_k", "experts")
    document["metadata"] |= {name: getattr(case, name) for name in names} | {
        "clock": "host, shared" if shared else "GPU, aligned by flags",
        "tokens_per_rank": max(case.tokens),
        "graph": case.graph and not shared,
        "profiled_pair_us": round(pair_us, 2),
    }
    return document


def to_chrome(ranks: Sequence[Sequence[Span]], skew: Skew) -> dict[str, Any]:
    """Return the trace as a JSON object, with times in us since the first start.

    `metadata` has the bound of the clock error between two ranks.
    """
    spans = [span for each in ranks for span in each if span.finished]
    first = min((span.start_ns + skew.offsets_ns[span.rank] for span in spans), default=0.0)
    senders = {(span.rank, span.phase, span.epoch): span for span in spans}

    def us(span: Span, stamp: int) -> float:
        return (stamp + skew.offsets_ns[span.rank] - first) / 1e3

    events = [event for rank in range(len(ranks)) for event in _names(rank, len(ranks))]
    for number, span in enumerate(spans):
        for track, name, begin, end in _slices(span):
            if end > begin:  # omit parts that took no time
                place = {"cat": span.phase, "pid": span.rank, "tid": track}
                times = {"ts": us(span, begin), "dur": (end - begin) / 1e3}
                args = {"epoch": span.epoch, "ctas": span.ctas}
                events.append({"ph": "X", "name": name, **place, **times, "args": args})
        # The flow goes from the last flag to the wait that it ended.
        peer = max(range(len(span.arrived_ns)), key=span.waited_ns)
        sender = senders.get((peer, span.phase, span.epoch))
        if sender is None or span.waited_ns(peer) == 0 or peer == span.rank:
            continue
        common = {"name": "flag", "cat": span.phase, "id": number}
        sent = {"pid": peer, "tid": _own(span), "ts": us(sender, sender.sent_ns)}
        inside = us(span, span.arrived_ns[peer] - 1)  # within the slice
        seen = {"pid": span.rank, "tid": PEERS + peer, "ts": inside}
        events += [{"ph": "s", **sent, **common}, {"ph": "f", "bp": "e", **seen, **common}]
    return {"traceEvents": events, "displayTimeUnit": "ns", "metadata": skew.metadata()}


def _own(span: Span) -> int:
    return DISPATCH if span.phase == "dispatch" else COMBINE


def _slices(span: Span) -> Iterator[tuple[int, str, int, int]]:
    """Yield (track, name, begin, end) of the parts of one operation."""
    yield _own(span), "send", span.start_ns, span.sent_ns
    yield _own(span), "publish", span.sent_ns, span.published_ns
    for peer, arrived in enumerate(span.arrived_ns):
        yield PEERS + peer, f"{span.phase}: wait for rank {peer}", span.published_ns, arrived
    if span.phase != "dispatch":
        yield COMBINE, "wait", span.published_ns, span.received_ns
        yield REDUCE, "reduce", span.received_ns, span.end_ns


def _names(rank: int, ranks: int) -> Iterator[Event]:
    """Yield the names and order of a rank's tracks."""

    def metadata(kind: str, track: int, **args: object) -> Event:
        return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": args}

    yield metadata("process_name", 0, name=f"rank {rank}")
    yield metadata("process_sort_index", 0, sort_index=rank)
    tracks = {DISPATCH: "dispatch send", COMBINE: "combine wait", REDUCE: "reduce"}
    tracks |= {PEERS + peer: f"wait for rank {peer}" for peer in range(ranks)}
    for track, name in tracks.items():
        yield metadata("thread_name", track, name=name)
        yield metadata("thread_sort_index", track, sort_index=track)
