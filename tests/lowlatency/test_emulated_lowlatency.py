# SPDX-License-Identifier: Apache-2.0
"""The low-latency kernels in the emulator: interoperation, memory order, and their trace.

That they give the reference's bytes is in test_lowlatency.py.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.emulator.operators import EmulatedLow, compile_low
from tests.emulator.watch import watching, ways
from tests.kinds import EMULATED, on_ranks
from tests.lowlatency.test_lowlatency import CASES
from tests.lowlatency_rounds import play
from weft.heap.header import PHASES
from weft.lowlatency.config import get_trace_record_type
from weft.lowlatency.trace import ROLES, read_work_records
from weft.runtime.timeline import read_timeline

TraceRecord = get_trace_record_type(2)
pytestmark = pytest.mark.slow

SEVERAL = [name for name in CASES if "several" in name]


def mix_with_cpu_rank(group: weft.Group, name: str) -> None:
    """Rank 1 runs the CPU kernels, which speak the same protocol."""
    mode, case = CASES[name]
    with mode.make(group, case, 16) as a2a:
        if group.rank != 1:
            shape = a2a.config.shape
            a2a._local.kernels = EmulatedLow(compile_low(shape), shape)
        for seed in range(2):
            play(a2a, mode, case.next(seed=seed))


@pytest.mark.parametrize("name", ["fp8", "reduced, fp8 back", "choices"])
def test_kernels_and_cpu_ranks_interoperate(ranks, name):
    ranks(3, "threads")(mix_with_cpu_rank, name)


@pytest.mark.parametrize("name", SEVERAL)
@on_ranks(3, [EMULATED])
def test_memory_accesses_have_the_required_order(group, name):
    mode, case = CASES[name]
    with mode.make(group, case, 16) as a2a:
        entries: Any = a2a._local.kernels
        with watching(group, entries.library, a2a.site.stride) as watch:
            for seed in range(2):
                play(a2a, mode, case.next(seed=seed))
        layout = a2a.config.offsets
        # Two lines, as tokens and answers.
        credits = layout.tokens - (layout.token_masks - layout.tokens)
        parts = {
            "dispatch begun": range(layout.progress + 128, credits),
            "credits": range(credits, layout.tokens),
            "words": range(layout.tokens, 1 << 40),
        }
        assert ways(watch.events(), parts) == {
            "dispatch begun": {"writes relaxed sys", "reads acquire sys"},  # these bring nothing
            "credits": {"writes release sys", "reads acquire sys"},
            "words": {"writes relaxed sys", "reads relaxed sys"},
        }


def tracks_of(tracks: torch.Tensor, phase: str) -> list[ctypes.Structure]:
    result = [TraceRecord.from_buffer_copy(bytes(row.numpy())) for row in tracks.flatten(0, 1)]
    return [t for t in result if t.epoch and PHASES[t.phase] == phase]


@on_ranks(2, [EMULATED])
def test_every_cta_of_a_profiled_kernel_leaves_its_page(group):
    mode, case = CASES["fp8"]
    # 56 tokens: three chunks, the last of them cut.
    mode, case = replace(mode, more={"profile": True}), case.next(tokens=(50, 26))
    with mode.make(group, case, 56) as a2a:
        entries: Any = a2a._local.kernels
        play(a2a, mode, case, poison=False)
        for phase in ("dispatch", "combine"):
            plan = entries.plans[phase]
            done = [w for w in read_work_records(a2a._tracks, group.rank, 2) if w.phase == phase]
            # A page from each CTA but the coordinator, whole.
            assert sorted(work.team for work in done) == list(range(1, plan.ctas))
            roles = [work.role for work in sorted(done, key=lambda work: work.team)]
            counts = (plan.metadata, plan.senders, plan.receivers)
            assert roles == [role for role, n in zip(ROLES, counts, strict=True) for _ in range(n)]
            assert all(0 < work.start_ns < work.end_ns for work in done)
            assert sum(work.units for work in done if work.role != "metadata") > 0
            assert all(work.credited_ns for work in done if work.role == "sender")
            assert {w.epoch for w in done} == {1}
            # The first that takes has read the rank's clock twice, once for all who want it.
            tracks = tracks_of(a2a._tracks, phase)
            kept = [(track.start_ns, track.end_ns) for track in tracks if track.end_ns]
            (record,) = [r for r in a2a.history() if PHASES[r.phase] == phase]
            spans = read_timeline(a2a.heap, group.rank)
            (span,) = [s for s in spans if s.phase == phase]
            assert kept == [(record.start_ns, record.end_ns)]
            assert span.end_ns == record.end_ns > record.start_ns
        group.barrier()
