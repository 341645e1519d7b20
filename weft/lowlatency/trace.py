# SPDX-License-Identifier: Apache-2.0
"""Traces of profiled low-latency kernels for Perfetto (ui.perfetto.dev).

Each rank writes its own file. All files use rank 0's clock, so that several can be loaded together
or merged. Clocks are aligned by the flags of dispatches (runtime/skew.py), which every rank can
read in all ranks' headers.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weft.errors import InvalidArgument, OutOfOrder
from weft.heap import Heap
from weft.heap.header import PHASES
from weft.json_files import read_json
from weft.lowlatency.config import get_trace_record_type
from weft.runtime.skew import Skew, estimate_skew
from weft.runtime.stream import synchronize_device
from weft.runtime.timeline import read_timeline

ROLES = ("metadata", "sender", "receiver")  # by the value of weft::CtaRole in device/header.cuh
# Steps of a team, by phase and role: (name, begin, end), with the names of stamps in TraceRecord.
STEPS = {
    ("dispatch", "metadata"): (
        ("wait for credits", "start", "credited"),
        ("send metadata", "credited", "end"),
    ),
    ("dispatch", "sender"): (
        ("load, wait for credits", "start", "credited"),
        ("quantise and send", "credited", "end"),
    ),
    ("dispatch", "receiver"): (
        ("receive metadata", "start", "learned"),
        ("receive rows", "learned", "end"),
    ),
    ("combine", "sender"): (
        ("load, wait for credits", "start", "credited"),
        ("copy", "credited", "end"),
    ),
    ("combine", "receiver"): (("wait and reduce", "start", "end"),),
}
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class WorkRecord:
    """One team's work in one operation of one rank.

    Times are in nanoseconds of that rank's clock. A time is 0 if the team does not record it.

    Attributes:
        rank: Rank of the team.
        phase: Name of the operation.
        epoch: Epoch of the round.
        role: "metadata", "sender" or "receiver".
        team: Index of the team.
        units: Units of work of its first warp.
        start_ns: When the team started.
        credited_ns: When it had the peers' credits.
        learned_ns: When it had the metadata.
        end_ns: When it finished.
        wait_time_ns: Wait of the first warp by source; in a combine, the sum under its own rank.
    """

    rank: int
    phase: str
    epoch: int
    role: str
    team: int
    units: int
    start_ns: int
    credited_ns: int
    learned_ns: int
    end_ns: int
    wait_time_ns: tuple[int, ...]


def read_work_records(tracks: torch.Tensor, rank: int, ranks: int) -> list[WorkRecord]:
    """Return a rank's finished records, ordered by start. Synchronise the device first.

    The list is empty until an operation has finished on this rank, because the teams' clocks cannot
    be converted to nanoseconds before.
    """
    tracks = tracks.cpu()
    words = tracks.view(torch.int64)
    record_type = get_trace_record_type(ranks)
    epochs, starts = (
        words[..., field.offset // 8] for field in (record_type.epoch, record_type.start_ns)
    )
    # After an operation with fewer teams, records of an earlier operation follow its own.
    latest = epochs.gather(1, starts.argmax(dim=1, keepdim=True))
    used = tracks[(starts != 0) & (epochs == latest)]  # a team writes its record when it finishes
    records = [record_type.from_buffer_copy(bytes(row.numpy())) for row in used]
    if not any(record.end_ns for record in records):
        return []
    ns_per_tick = _compute_ns_per_tick(records)
    works = (_parse_record(record, rank, ranks, ns_per_tick) for record in records)
    return sorted(works, key=lambda work: work.start_ns)


def _compute_ns_per_tick(records: Sequence[ctypes.Structure]) -> float:
    """Return the ns per tick of the teams' clocks, from records with end times in both units."""
    finished = [record for record in records if record.end_ns]
    elapsed: int = sum(record.end_ns - record.start_ns for record in finished)
    ticks: int = sum(record.ended for record in finished)
    return elapsed / ticks


def _parse_record(
    record: ctypes.Structure, rank: int, ranks: int, ns_per_tick: float
) -> WorkRecord:
    def convert_to_ns(ticks: int) -> int:
        return record.start_ns + round(ticks * ns_per_tick) if ticks else 0

    return WorkRecord(
        rank=rank,
        phase=PHASES[record.phase],
        epoch=record.epoch,
        role=ROLES[record.role],
        team=record.team,
        units=record.units,
        start_ns=record.start_ns,
        credited_ns=convert_to_ns(record.credited),
        learned_ns=convert_to_ns(record.learned),
        end_ns=convert_to_ns(record.ended),
        wait_time_ns=tuple(round(record.waited[source] * ns_per_tick) for source in range(ranks)),
    )


def _estimate_clock_skew(heap: Heap) -> Skew:
    """Estimate the offsets of the ranks' clocks; CPU ranks share one clock.

    Raises:
        InvalidArgument: two ranks have no finished dispatch in common, or their clocks drifted.
    """
    group = heap.group
    if group.device.type != "cuda":
        return Skew((0.0,) * group.size, 0.0, 1)
    spans = [
        [span for span in read_timeline(heap, rank) if span.phase == "dispatch"]
        for rank in range(group.size)
    ]
    return estimate_skew(spans)


def build_chrome_trace(works: Iterable[WorkRecord], skew: Skew) -> dict[str, Any]:
    """Return the trace in Chrome's JSON format, in us of rank 0's clock."""
    works = list(works)
    teams = sorted({(work.rank, work.phase, work.team) for work in works})
    events = [event for team in teams for event in _build_metadata_events(*team)]
    for work in works:
        events += _build_slices(work, skew.offsets_ns[work.rank])
    return {"traceEvents": events, "displayTimeUnit": "ns", "metadata": skew.metadata()}


def _build_metadata_events(rank: int, phase: str, team: int) -> Iterator[Event]:
    track = _get_track_id(phase, team)
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    name = {"name": f"{phase}, team {team}"}
    yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": name}


def _get_track_id(phase: str, team: int) -> int:
    return (1 if phase == "dispatch" else 2) * 10_000 + team


def _build_slices(work: WorkRecord, shift_ns: float) -> Iterator[Event]:
    stamps = {
        "start": work.start_ns,
        "credited": work.credited_ns,
        "learned": work.learned_ns,
        "end": work.end_ns,
    }
    for name, begin, end in STEPS[work.phase, work.role]:
        if not stamps[begin] or stamps[end] <= stamps[begin]:
            continue
        args: Event = {"epoch": work.epoch, "role": work.role, "units": work.units}
        if work.role == "receiver":
            args["waited_us"] = {
                f"rank {source}": ns / 1e3 for source, ns in enumerate(work.wait_time_ns) if ns
            }
        yield {
            "ph": "X",
            "name": name,
            "cat": work.phase,
            "pid": work.rank,
            "tid": _get_track_id(work.phase, work.team),
            "ts": (stamps[begin] + shift_ns) / 1e3,
            "dur": (stamps[end] - stamps[begin]) / 1e3,
            "args": args,
        }


def write_trace(path: Path, tracks: torch.Tensor, heap: Heap) -> None:
    """Write the trace of one rank's last rounds.

    Raises:
        InvalidArgument: the all-to-all was built without profile.
        OutOfOrder: no round has finished.
    """
    group = heap.group
    if not tracks.numel():
        raise InvalidArgument("dump_trace of an all-to-all built without profile=True")
    synchronize_device(group.device)
    works = read_work_records(tracks, group.rank, group.size)
    if not works:
        raise OutOfOrder("dump_trace before any round has finished: run a round first")
    skew = _estimate_clock_skew(heap)
    path.write_text(json.dumps(build_chrome_trace(works, skew)) + "\n")


def merge(paths: Sequence[Path], path: Path) -> None:
    """Merge the traces of several ranks into one file; the earliest slice begins at 0.

    Args:
        paths: Files of `dump_trace`.
        path: File to write.

    Raises:
        InvalidArgument: a file is not a trace of `dump_trace`.
    """
    events: list[Event] = []
    metadata: dict[str, Any] = {}
    for source in paths:
        document = read_json(source, "the trace")
        try:
            events += document["traceEvents"]
            metadata = document["metadata"]
        except (KeyError, TypeError) as error:
            raise InvalidArgument(f"{source} is not a trace of dump_trace: {error!r}") from error
    first = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] -= first
    document = {"traceEvents": events, "displayTimeUnit": "ns", "metadata": metadata}
    path.write_text(json.dumps(document) + "\n")
