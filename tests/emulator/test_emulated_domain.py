# SPDX-License-Identifier: Apache-2.0
"""The kernels in the emulator, in a domain of 72 ranks, whose rank sets take three words.

Three ranks of it live, one in each word, so that few threads run. Bit by bit as the reference.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import weft
from tests import lowlatency_rounds, sums
from tests.emulator.emulate import EmulatedEntries, build_library, compile_emulated, emulated_tree
from tests.emulator.operators import EmulatedAllToAll, EmulatedLow, compile_alltoall, compile_low
from tests.lowlatency_rounds import Mode
from tests.rounds import Round, combine_options, drop_refusals, play
from weft.allreduce.config import ReduceConfig
from weft.allreduce.kernels import ReducePlan
from weft.alltoall.config import AllToAllConfig, AllToAllSpec

pytestmark = pytest.mark.slow

RANKS, LIVING = 72, (1, 34, 70)
WIDE = ("WEFT_WIDE=1",)
CASE = Round(tokens=(3, 8) * 36, top_k=6, experts=83, hidden=256, add=True)
SIZES = CASE.sizes(8)
PATIENT: dict[str, Any] = {"timeout": 300.0, "first_timeout": 300.0}
WAYS = ("push", "fp8")
MODES = (
    Mode(more=PATIENT),
    Mode(reduce="sender", combine_dtype="fp8", more=PATIENT),
    Mode(combine="gemm_push", more=PATIENT),
)


def compiled(kind: str) -> Any:
    """Return the kernels of an operator, compiled for a CPU."""
    if kind == "alltoall":
        specs = [AllToAllSpec(ranks=RANKS, **SIZES, **combine_options(way)) for way in WAYS]
        shapes = [AllToAllConfig.from_spec(spec).shape for spec in specs]
        return [compile_alltoall(shape, defines=WIDE) for shape in shapes]
    if kind == "lowlatency":
        return [compile_low(mode.shape(CASE, 8), defines=WIDE) for mode in MODES]
    config = ReduceConfig.from_args(
        ranks=RANKS, max_tokens=5, hidden=256, dtype=torch.bfloat16, missing="drop"
    )
    return compile_emulated(config, defines=WIDE)


def opened(kind: str, group: weft.Group) -> list[Any]:
    if kind == "alltoall":
        return [weft.AllToAll(group, **SIZES, **combine_options(way), **PATIENT) for way in WAYS]
    if kind == "lowlatency":
        return [mode.make(group, CASE, 8) for mode in MODES]
    return [weft.AllReduce(group, max_tokens=5, hidden=256, missing="drop", **PATIENT)]


def play_rounds(kind: str, operators: list[Any], libraries: Any) -> None:
    living = list(LIVING)
    if kind == "alltoall":
        for a2a, library in zip(operators, libraries, strict=True):
            a2a._local.kernels = EmulatedAllToAll(library, a2a.config.shape, a2a.rank)
            for seed in range(2):
                play(a2a, CASE.next(seed=seed), poison=False, living=living)
    elif kind == "lowlatency":
        for mode, low, library in zip(MODES, operators, libraries, strict=True):
            low._local.kernels = EmulatedLow(library, low.config.shape)
            for seed in range(2):
                case = CASE.next(seed=seed)
                lowlatency_rounds.play(low, mode, case, living=living, checks=False)
    else:
        operators[0]._kernels = reducing = EmulatedEntries(libraries)
        for tokens in (1, 5):
            reducing.plans["oneshot", tokens] = ReducePlan(tokens, 96, 1)
            case_of_sums = sums.Sum(tokens=tokens, hidden=256, seed=tokens)
            sums.play(operators[0], case_of_sums, "oneshot", None, living)


def rounds(
    group: weft.Group,
    kind: str,
    libraries: Any,
    all_here: threading.Barrier,
    met: threading.Barrier,
) -> None:
    with ExitStack() as stack:
        operators = opened(kind, group)
        for each in operators:
            stack.enter_context(each)
        all_here.wait()
        if group.rank in LIVING:
            group._roster.remove(set(range(group.size)) - set(LIVING))  # threads cannot recover
            for each in operators:
                each.quiesce()
            met.wait()
            for each in operators:
                each.restart(group.living_mask)
            met.wait()
            play_rounds(kind, operators, libraries)
        for each in operators:
            drop_refusals(each)
        all_here.wait()


# One at a time: 72 threads map 72 shares of each operator, and a process has 65,530 mappings.
@pytest.mark.parametrize("kind", ["alltoall", "lowlatency", "allreduce"])
def test_three_ranks_in_three_words(kind: str) -> None:
    meetings = threading.Barrier(RANKS), threading.Barrier(len(LIVING))
    libraries = compiled(kind)
    weft.launch(rounds, kind, libraries, *meetings, ranks=RANKS, device="threads")


RECEIVED = """
#include <weft/grouping/rows.cuh>
constexpr weft::Shape S = {.ranks = 72, .tokens = 5, .top_k = 2, .experts = 72, .hidden = 8,
                           .dtype = weft::DType::bf16, .planes = 1, .row_bytes = {16}};
static weft::Inbox<S> inbox;
extern "C" __attribute__((visibility("default")))
unsigned slots(const int* counts, unsigned* found) {
    for (unsigned i = 0; i < S.ranks; ++i) inbox.counts[i] = counts[i];
    unsigned total = 0;
    emulated::Grid grid{1, 1, 32};
    emulated::launch(grid, [&] {
        const auto tokens = weft::ReceivedTokens<S>::of(inbox, threadIdx.x);
        const unsigned all = tokens.total();
        for (unsigned i = 0; i < all; ++i) {
            const weft::TokenSlot at = tokens.slot(i);
            if (threadIdx.x == i % 32) found[i] = at.source * S.tokens + at.token;
        }
        if (threadIdx.x == 0) total = all;
    });
    return total;
}
"""


def test_received_tokens_of_more_sources_than_lanes() -> None:
    library = ctypes.CDLL(str(build_library(emulated_tree(), RECEIVED, defines=WIDE)))
    for seed in range(4):
        counts = torch.randint(
            0, 6, (RANKS,), dtype=torch.int32, generator=torch.Generator().manual_seed(seed)
        )
        counts[seed * 20 : seed * 20 + 12] = 0
        result = torch.full((RANKS * 5,), -1, dtype=torch.int32)
        pointers = (ctypes.c_void_p(each.data_ptr()) for each in (counts, result))
        total = library.slots(*pointers)
        slots = [s * 5 + t for s, count in enumerate(counts.tolist()) for t in range(count)]
        assert total == len(slots)
        assert result[:total].tolist() == slots
