# SPDX-License-Identifier: Apache-2.0
"""Domains of more than 32 ranks, up to 72, where a rank set takes several words."""

import ctypes
import threading
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch

import weft
from tests import sums
from tests.baseline import die
from tests.emulator.emulate import build_library, emulated_tree
from tests.lowlatency_rounds import Mode
from tests.operators import Subject, by_expert, by_rank, by_sum
from tests.ranks import on_ranks
from tests.rounds import Round, drop_refusals
from weft.errors import BadExpertId, PeerDied

RANKS, VICTIM = 72, 70  # in the last word of a set, and above the bits of the host's first word
LIVING = (1, 34, 70)  # one in each word
WIDE = ("WEFT_WIDE=1",)
PATIENT: dict[str, Any] = {"timeout": 300.0, "first_timeout": 300.0}


def open_subject(group: weft.Group, name: str, **more: Any) -> Subject:
    """Open an operator whose experts do not divide by the ranks."""
    tokens = tuple((5 * rank + 3) % 9 for rank in range(group.size))
    case = Round(tokens=tokens, top_k=6, experts=group.size + 11, hidden=256, add=True)
    modes = {
        "low latency": Mode(),
        "sender": Mode(reduce="sender", combine_dtype="fp8"),
        "gemm_push": Mode(combine="gemm_push"),
    }
    if name == "sum":
        return by_sum(group, **more)
    if name in modes:
        return by_expert(group, modes[name], case, **more)
    return by_rank(group, name, case, **more)


def opened(group: weft.Group, stack: ExitStack, *names: str) -> list[Subject]:
    return [stack.enter_context(open_subject(group, name)) for name in names]


@on_ranks(33, "threads")
def test_more_than_one_word_of_ranks(group: weft.Group) -> None:
    with ExitStack() as stack:
        for subject in opened(group, stack, "pull", "low latency", "sum"):
            subject.play(0, range(33))


@pytest.mark.slow
@on_ranks(40, "threads")
def test_every_way_with_more_than_one_word_of_ranks(group: weft.Group) -> None:
    with ExitStack() as stack:
        for subject in opened(group, stack, "pull", "push", "fp8", "low latency", "sender", "sum"):
            subject.rounds(2, range(group.size))
        two_shots = weft.AllReduce(group, max_tokens=2 * group.size, hidden=128)
        sums.play(stack.enter_context(two_shots), sums.Sum(group.size + 3, 128), "twoshot")


@pytest.mark.slow
@on_ranks(RANKS, "cpu", dies=[VICTIM])
def test_72_ranks_and_a_death_among_them(group: weft.Group) -> None:
    with ExitStack() as stack:
        subjects = opened(group, stack, "push", "sender", "sum")
        for subject in subjects:
            subject.play(0, range(RANKS))
        group.barrier()
        if group.rank == VICTIM:
            die()
        with pytest.raises(PeerDied, match=rf"rank {VICTIM} died"):
            subjects[0].play(0, range(RANKS))
        recovery = group.recover(timeout=600.0)
        assert recovery.dead == (VICTIM,)
        assert len(recovery.living) == RANKS - 1
        for subject in subjects:
            subject.play(1, recovery.living)
            with suppress(BadExpertId):  # of ids that went to the dead rank's experts
                subject.operator.check()


def run_emulated(
    group: weft.Group, name: str, everyone: threading.Barrier, few: threading.Barrier
) -> None:
    with open_subject(group, name, **PATIENT) as subject:
        everyone.wait()
        if group.rank in LIVING:
            group._roster.remove(set(range(RANKS)) - set(LIVING))  # threads cannot recover
            subject.operator.quiesce()
            few.wait()
            subject.operator.restart(group.living_mask)
            subject.emulate(defines=WIDE)
            few.wait()
            subject.rounds(2, LIVING, checks=False)
        drop_refusals(subject.operator)
        everyone.wait()


# One at a time: 72 threads map 72 shares of each operator, and a process has 65,530 mappings.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["push", "fp8", "low latency", "sender", "gemm_push", "sum"])
def test_three_emulated_ranks_in_three_words(name: str) -> None:
    barriers = threading.Barrier(RANKS), threading.Barrier(len(LIVING))
    weft.launch(run_emulated, name, *barriers, ranks=RANKS, device="threads")


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


@pytest.mark.slow
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
