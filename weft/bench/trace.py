# SPDX-License-Identifier: Apache-2.0
"""Traces of profiled runs for Perfetto (ui.perfetto.dev) or chrome://tracing.

Each rank is a process whose tracks are the send of dispatch, the wait for each peer, the wait of
combine, and the reduction. An arrow connects each flag to the wait that it ended.
`weft.lowlatency.trace` writes the trace of the low-latency operator, which has other tracks.

Profiled kernels differ from those that are benchmarked, so times from a trace are not comparable
with benchmark results.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from weft.bench.harness import TimedCall, Trial, gather_first_error, measure, run_on_ranks
from weft.bench.lowlatency import LowLatencyCase, LowLatencyTrial
from weft.bench.moe import MoECase, MoETrial
from weft.bench.report import write_json
from weft.group import Group
from weft.lowlatency.trace import merge
from weft.runtime.skew import Skew, estimate_skew
from weft.runtime.timeline import Span

ROUNDS = 32  # number of rounds that a header stores
DISPATCH, COMBINE, REDUCE, PEERS = 1, 2, 3, 10  # track ids; peer p's track is PEERS + p
Event = dict[str, Any]


def write_trace(path: Path, case: MoECase | LowLatencyCase) -> str | None:
    """Run the largest size of a case with profiling and write a trace of the last 32 rounds.

    The metadata of a rank-major all-to-all has the time of a profiled pair, which shows the
    overhead of profiling.

    Returns:
        The description of a failed check, or None.

    Raises:
        InvalidArgument: the clocks of the ranks cannot be aligned.
    """
    case = replace(case, tokens=(max(case.tokens),), profile=True)
    with tempfile.TemporaryDirectory() as folder:
        results: list[tuple[str | None, list[Span], float]] = run_on_ranks(
            case, profile_on_rank, folder
        )
        if error := next((error for error, _, _ in results if error), None):
            return error
        if isinstance(case, LowLatencyCase):
            merge([Path(folder) / f"{rank}.json" for rank in range(case.ranks)], path)
        else:
            pair_us = max(us for _, _, us in results)
            write_json(path, build_chrome_trace(case, [spans for _, spans, _ in results], pair_us))
    return None


def profile_on_rank(
    group: Group, case: MoECase | LowLatencyCase, folder: str
) -> tuple[str | None, list[Span], float]:
    """Check and profile the first trial of a case on one rank. Collective.

    A low-latency trial writes its trace into `folder` and has no spans.

    Returns:
        The description of a failed check or None, the rank's spans, and the median us of a pair.
    """
    with contextlib.closing(case.trials(group)) as trials:
        trial = next(trials)
        assert isinstance(trial, Trial)
        if error := gather_first_error(group, trial.check()):
            return error, [], 0.0
        # A pair is a single step, so that no event separates dispatch and combine.
        pair, samples = TimedCall({"pair": trial.timed_call()}, "pair"), max(case.samples, ROUNDS)
        _, us = measure(group, pair, samples=samples, graph=case.graph)
        trial.metadata()  # raises errors that the kernels recorded
        group.barrier()  # all ranks have finished the same rounds
        spans: list[Span] = []
        if isinstance(trial, LowLatencyTrial):
            trial.a2a.dump_trace(Path(folder) / f"{group.rank}.json")
        else:
            assert isinstance(trial, MoETrial)
            spans = trial.exchange.timeline()
        group.barrier()  # a peer may still be reading from this rank's memory
    return None, spans, median(us["pair"][group.rank])


def build_chrome_trace(
    case: MoECase, ranks: Sequence[Sequence[Span]], pair_us: float
) -> dict[str, Any]:
    """Build a Chrome trace of all ranks on the clock of rank 0, with the parameters of the case."""
    shares_clock = case.device != "cuda"  # CPU ranks use the clock of their host
    skew = Skew((0.0,) * len(ranks), 0.0, 1) if shares_clock else estimate_skew(ranks)
    document = convert_spans(ranks, skew)
    names = ("ranks", "device", "hidden", "top_k", "experts")
    document["metadata"] |= {name: getattr(case, name) for name in names} | {
        "clock": "host, shared" if shares_clock else "GPU, aligned by flags",
        "tokens_per_rank": max(case.tokens),
        "graph": case.graph and not shares_clock,
        "profiled_pair_us": round(pair_us, 2),
    }
    return document


def convert_spans(ranks: Sequence[Sequence[Span]], skew: Skew) -> dict[str, Any]:
    """Convert the spans of each rank to a Chrome trace with times in us since the first start.

    Its `metadata` includes the maximum clock error between two ranks.
    """
    spans = [span for rank_spans in ranks for span in rank_spans if span.finished]
    first = min((span.start_ns + skew.offsets_ns[span.rank] for span in spans), default=0.0)
    senders = {(span.rank, span.phase, span.epoch): span for span in spans}

    def us(span: Span, stamp: int) -> float:
        return (stamp + skew.offsets_ns[span.rank] - first) / 1e3

    events = [event for rank in range(len(ranks)) for event in _metadata_events(rank, len(ranks))]
    for flow_id, span in enumerate(spans):
        for track, name, start, end in _iter_slices(span):
            if end > start:  # omit empty slices
                location = {"cat": span.phase, "pid": span.rank, "tid": track}
                times = {"ts": us(span, start), "dur": (end - start) / 1e3}
                args = {"epoch": span.epoch, "ctas": span.ctas}
                events.append({"ph": "X", "name": name, **location, **times, "args": args})
        # The flow connects the flag that arrived last with the wait that it ended.
        peer = max(range(len(span.arrived_ns)), key=span.wait_time_ns)
        sender = senders.get((peer, span.phase, span.epoch))
        if sender is None or span.wait_time_ns(peer) == 0 or peer == span.rank:
            continue
        common = {"name": "flag", "cat": span.phase, "id": flow_id}
        flow_start = {"pid": peer, "tid": _operation_track(span), "ts": us(sender, sender.sent_ns)}
        arrival = us(span, span.arrived_ns[peer] - 1)  # must be inside the slice of the wait
        flow_end = {"pid": span.rank, "tid": PEERS + peer, "ts": arrival}
        events += [
            {"ph": "s", **flow_start, **common},
            {"ph": "f", "bp": "e", **flow_end, **common},
        ]
    return {"traceEvents": events, "displayTimeUnit": "ns", "metadata": skew.metadata()}


def _operation_track(span: Span) -> int:
    return DISPATCH if span.phase == "dispatch" else COMBINE


def _iter_slices(span: Span) -> Iterator[tuple[int, str, int, int]]:
    """Yield the track, name, start and end of each slice of an operation."""
    yield _operation_track(span), "send", span.start_ns, span.sent_ns
    yield _operation_track(span), "publish", span.sent_ns, span.published_ns
    for peer, arrived in enumerate(span.arrived_ns):
        yield PEERS + peer, f"{span.phase}: wait for rank {peer}", span.published_ns, arrived
    if span.phase != "dispatch":
        yield COMBINE, "wait", span.published_ns, span.received_ns
        yield REDUCE, "reduce", span.received_ns, span.end_ns


def _metadata_events(rank: int, ranks: int) -> Iterator[Event]:
    """Yield the metadata events that name and sort the tracks of a rank."""

    def metadata(kind: str, track: int, **args: object) -> Event:
        return {"ph": "M", "name": kind, "pid": rank, "tid": track, "args": args}

    yield metadata("process_name", 0, name=f"rank {rank}")
    yield metadata("process_sort_index", 0, sort_index=rank)
    tracks = {DISPATCH: "dispatch send", COMBINE: "combine wait", REDUCE: "reduce"}
    tracks |= {PEERS + peer: f"wait for rank {peer}" for peer in range(ranks)}
    for track, name in tracks.items():
        yield metadata("thread_name", track, name=name)
        yield metadata("thread_sort_index", track, sort_index=track)
