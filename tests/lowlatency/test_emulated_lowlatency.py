# SPDX-License-Identifier: Apache-2.0
"""The low-latency kernels on a CPU: every byte as the reference has it, in whole calls and halves.

Whether a GPU orders memory as they need is for the tests with the gpu marker.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import weft
from tests.emulator.operators import EmulatedLow, compile_low
from tests.emulator.watch import watching, ways
from tests.lowlatency_rounds import Mode, play
from tests.rounds import Round
from weft.lowlatency.config import trace_record
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.trace import ROLES, read_work
from weft.memory.header import PHASES
from weft.runtime.timeline import DEFINE, read_timeline

TraceRecord = trace_record(2)
pytestmark = pytest.mark.slow

MOST = 56  # tokens: three chunks, the last of them cut
CASE = Round(tokens=(5, 1), hidden=256, experts=9, top_k=4)
MODES = {
    "default": Mode(),
    "sender, fp8 back": Mode(reduce="sender", combine_dtype="fp8", scale="ue8m0"),
    "as they are": Mode(quantize=None),
    "choices": Mode(combine="gemm_push"),
    "as deep_ep": Mode(scale="fp32_col", recipe="deep_ep"),
    "as triton_dist": Mode(recipe="triton_dist"),
}


def emulated(group: weft.Group, library: str, mode: Mode) -> None:
    sends = mode.combine != "gemm_push"
    with replace(mode, more={"timeout": 600.0, "split_phase": sends}).make(
        group, CASE, MOST
    ) as a2a:
        real = a2a._kernels
        a2a._kernels = EmulatedLow(Path(library), a2a.config.shape)
        for tokens in ((5, 1), (0, 3), (50, 26)):
            play(a2a, mode, CASE.next(tokens=tokens, seed=tokens[0]))
        if sends and mode.reduce == "receiver":
            in_halves(a2a, group)
            dropped_and_again(a2a, group)
        a2a._kernels = real  # the CPU's own kernels: both speak the same protocol
        play(a2a, mode, CASE.next(seed=7))
        a2a.check()


def in_halves(a2a: LowLatencyAllToAll, group: weft.Group) -> None:
    """Two results cross on their way."""
    x, ids, weights, _ = CASE.of(group.rank, group.device)
    first = a2a.dispatch(x, ids, weights)
    y = torch.ones_like(first.x, dtype=x.dtype)
    a2a.dispatch_send(x, ids, weights)
    out, receive = a2a.combine_send(y, ids, None, first.handle)
    second = a2a.dispatch_recv()
    receive()
    assert torch.equal(a2a.combine(y, ids, None, second.handle), out)
    assert (out[:, 0] == (ids >= 0).sum(dim=1)).all()


def dropped_and_again(a2a: LowLatencyAllToAll, group: weft.Group) -> None:
    """Four results of which two are never combined, and each of the others three times."""
    x, ids, weights, _ = CASE.of(group.rank, group.device)
    a2a._allow_handle_reuse = True
    results = [a2a.dispatch(x, ids, weights) for _ in range(4)]
    for factor in (1.0, 2.0, 3.0):
        for rows in reversed(results[2:]):
            y = torch.full_like(rows.x, factor, dtype=x.dtype)
            out = a2a.combine(y, ids, None, rows.handle)
            assert (out[:, 0] == factor * (ids >= 0).sum(dim=1)).all()
            again, receive = a2a.combine_send(y, ids, None, rows.handle)
            receive()
            assert torch.equal(again, out)
    a2a._allow_handle_reuse = False


@pytest.mark.parametrize("name", MODES)
def test_kernels_give_the_reference_s_bytes(ranks, tmp_path, name):
    mode = MODES[name]
    library = compile_low(mode.shape(CASE, MOST), tmp_path)
    ranks(2, "cpu")(emulated, str(library), mode)


# Rank 2 has no expert, and receives the number of tokens only.
FEW = Round(tokens=(2, 3, 1), hidden=128, experts=2, top_k=1)


def deserted(group: weft.Group, library: str) -> None:
    mode = Mode(more={"timeout": 600.0, "first_timeout": 600.0})
    with mode.make(group, FEW, 4) as a2a:
        a2a._kernels = EmulatedLow(Path(library), a2a.config.shape)
        for seed in range(2):
            play(a2a, mode, FEW.next(seed=seed))


def test_a_rank_without_experts(ranks, tmp_path):
    library = compile_low(Mode().shape(FEW, 4), tmp_path)
    ranks(3, "cpu")(deserted, str(library))


# So many experts that the table has an entry for two chunks, and bits are read again.
LARGE, LARGE_MOST = Round(tokens=(80, 30), hidden=128, experts=512), 450


def crowded(group: weft.Group, library: str) -> None:
    mode = Mode(more={"timeout": 600.0})
    with mode.make(group, LARGE, LARGE_MOST) as a2a:
        a2a._kernels = EmulatedLow(Path(library), a2a.config.shape)
        play(a2a, mode, LARGE)
        play(a2a, mode, LARGE.next(seed=3, tokens=(3, 75), router="one-hot"))


def test_tables_that_do_not_hold_every_chunk(ranks, tmp_path):
    library = compile_low(Mode().shape(LARGE, LARGE_MOST), tmp_path)
    ranks(2, "cpu")(crowded, str(library))


# Rows that do not fill the last of a warp's vectors: 896 bf16 numbers are 112, of 64 at a time.
WIDE = Round(tokens=(5, 2), hidden=896, experts=6, top_k=5)
SEVERAL = {
    "as they are": Mode(quantize=None),
    "sums": Mode(reduce="sender"),
    "fp8": Mode(combine_dtype="fp8"),
    "sums as fp8": Mode(reduce="sender", combine_dtype="fp8"),
}


def wide(group: weft.Group, library: str, mode: Mode, case: Round) -> dict[str, set[str]]:
    """Returns how flags were touched, and what says itself of which round it is, by part."""
    with replace(mode, more={"timeout": 600.0}).make(group, case, 8) as a2a:
        entries = EmulatedLow(Path(library), a2a.config.shape)
        a2a._kernels = entries
        with watching(group, entries.library, a2a._site.stride) as watch:
            for seed in range(2):
                play(a2a, mode, case.next(seed=seed))
        layout = a2a.config.offsets
        credits = layout.tokens - (
            layout.token_masks - layout.tokens
        )  # two lines, as tokens and answers
        parts = {
            "dispatch begun": range(layout.progress + 128, credits),
            "credits": range(credits, layout.tokens),
            "words": range(layout.tokens, 1 << 40),
        }
        return ways(watch.events(), parts)


@pytest.mark.parametrize("name", SEVERAL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_several_choices_return_in_any_form(ranks, tmp_path, name, dtype):
    """With 6 experts on 2 ranks a token has up to 3 rows of one rank: more than go together."""
    case = replace(WIDE, dtype=dtype)
    library = compile_low(SEVERAL[name].shape(case, 8), tmp_path)
    for touched in ranks(2, "threads")(wide, str(library), SEVERAL[name], case):
        assert touched == {
            "dispatch begun": {"writes relaxed sys", "reads acquire sys"},  # these bring nothing
            "credits": {"writes release sys", "reads acquire sys"},
            "words": {"writes relaxed sys", "reads relaxed sys"},
        }


def tracks_of(tracks: torch.Tensor, phase: str) -> list[ctypes.Structure]:
    found = [TraceRecord.from_buffer_copy(bytes(row.numpy())) for row in tracks.flatten(0, 1)]
    return [t for t in found if t.epoch and PHASES[t.phase] == phase]


def profiled(group: weft.Group, library: str) -> None:
    mode = Mode(more={"timeout": 600.0, "profile": True})
    with mode.make(group, CASE, MOST) as a2a:
        entries = EmulatedLow(Path(library), a2a.config.shape)
        a2a._kernels = entries
        play(a2a, mode, CASE.next(tokens=(50, 26)), poison=False)
        for phase in ("dispatch", "combine"):
            plan = entries.plans[phase]
            done = [w for w in read_work(a2a._tracks, group.rank, 2) if w.phase == phase]
            # A page from each CTA but the coordinator, whole.
            assert sorted(work.team for work in done) == list(range(1, plan.ctas))
            roles = [work.role for work in sorted(done, key=lambda work: work.team)]
            each = (plan.metadata, plan.senders, plan.receivers)
            assert roles == [role for role, n in zip(ROLES, each, strict=True) for _ in range(n)]
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


def test_every_cta_of_a_profiled_kernel_leaves_its_page(ranks, tmp_path):
    library = compile_low(Mode().shape(CASE, MOST), tmp_path, defines=(DEFINE,))
    ranks(2, "cpu")(profiled, str(library))
