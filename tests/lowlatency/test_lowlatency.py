# SPDX-License-Identifier: Apache-2.0
"""Low-latency rounds whose every byte is known, on every kind of rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from tests.lowlatency_rounds import Mode, expert_results, play, wanted_out
from tests.rounds import Round, bits

KINDS = ["cpu", "threads", pytest.param("cuda", marks=pytest.mark.gpu)]
UNEVEN = Round(tokens=(5, 0, 16), hidden=256)
REDUCED = Mode(reduce="sender", combine_dtype="fp8")
CHOICES = Mode(combine="gemm_push")
CASES = {
    "fp8": (Mode(), UNEVEN.next(add=True)),
    "columns of 32, by column": (Mode(group_size=32, scale="fp32_col"), UNEVEN),
    "columns of 64, holes": (Mode(group_size=64), UNEVEN.next(router="holes", add=True)),
    "powers of two": (Mode(scale="ue8m0"), UNEVEN.next(hidden=640)),
    "powers of two of 32": (Mode(scale="ue8m0", group_size=32), UNEVEN.next(hidden=96)),
    "as they are": (Mode(quantize=None), UNEVEN.next(weighted=False)),
    "rows of two vectors": (Mode(quantize=None), UNEVEN.next(hidden=16)),
    "fp8 back": (Mode(combine_dtype="fp8"), UNEVEN),
    "choices": (CHOICES, UNEVEN.next(add=True)),
    "choices, fp32, top 10": (CHOICES, UNEVEN.next(dtype=torch.float32, top_k=10, experts=13)),
    "choices, as they are": (Mode(quantize=None, combine="gemm_push"), UNEVEN.next(hidden=16)),
    "reduced by the sender": (Mode(reduce="sender"), UNEVEN.next(add=True, top_k=6)),
    "reduced, fp8 back": (REDUCED, UNEVEN.next(top_k=8)),
    "reduced, no weights": (REDUCED, UNEVEN.next(weighted=False)),
    "fp16": (Mode(), UNEVEN.next(dtype=torch.float16)),
    "fp32, wide ids": (Mode(), UNEVEN.next(dtype=torch.float32, ids_dtype=torch.int64)),
    "fp32 as it is": (Mode(quantize=None, combine_dtype="fp8"), UNEVEN.next(dtype=torch.float32)),
    "all to the last rank": (Mode(), Round((16, 7, 16), hidden=256, router="one-hot")),
    "nobody has tokens": (Mode(), Round((0, 0, 0), hidden=256)),
    "top 1": (Mode(), UNEVEN.next(top_k=1)),
    "top 32 of 61": (Mode(), UNEVEN.next(top_k=32, experts=61)),
    "fewer experts than ranks": (Mode(), UNEVEN.next(top_k=2, experts=2)),
    "a long row": (Mode(), UNEVEN.next(hidden=7168, top_k=8, experts=256)),
}


def play_some(group: weft.Group, names: list[str]) -> None:
    for name in names:
        mode, case = CASES[name]
        with mode.make(group, case, 16) as a2a:
            play(a2a, mode, case)
            play(a2a, mode, case.next(seed=1, tokens=case.tokens[::-1]))
            play(a2a, mode, case.next(seed=2))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_every_case(ranks, kind):
    ranks(3, kind)(play_some, list(CASES))


def blank_again(group: weft.Group) -> None:
    """Also after rows that end in half a vector: 3 scales, 7 weights."""
    case = UNEVEN.next(hidden=384, top_k=7)
    for mode in (REDUCED, CHOICES, Mode(combine_dtype="fp8"), Mode(quantize=None, reduce="sender")):
        with mode.make(group, case, 16) as a2a:
            for seed in range(4):
                play(a2a, mode, case.next(seed=seed))
            group.barrier()
            layout, heap = a2a.config.offsets, a2a.heap
            size = layout.share_bytes - layout.rows
            rows = heap.tensor((size,), torch.uint8, offset=layout.rows)
            assert bool((rows == 0xFF).all())


@pytest.mark.parametrize("kind", KINDS)
def test_an_inbox_is_blank_when_it_has_been_read(ranks, kind):
    ranks(3, kind)(blank_again)


def play_alone(group: weft.Group, tokens: int) -> None:
    case = Round((tokens,) * group.size, hidden=128, experts=5)
    with Mode().make(group, case, tokens) as a2a:
        for seed in range(3):
            play(a2a, Mode(), case.next(seed=seed))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_other_group_sizes(ranks, kind, count):
    ranks(count, kind)(play_alone, 3)


@pytest.mark.gpu
def test_all_gpus_at_full_size(ranks):
    count = min(torch.cuda.device_count(), 8)
    ranks(count, "cuda")(play_full, timeout=300.0)


def play_full(group: weft.Group) -> None:
    case = Round((128,) * group.size, hidden=7168, top_k=8, experts=256)
    reduced = Mode(reduce="sender"), REDUCED
    modes = Mode(), *reduced, Mode(quantize=None), Mode(scale="ue8m0"), CHOICES
    for mode in modes:
        with mode.make(group, case, 128) as a2a:
            for seed, router in enumerate(("random", "perfect", "zipf", "one-hot", "holes")):
                play(a2a, mode, case.next(seed=seed, router=router))


def scattered_experts(group: weft.Group) -> tuple[int, ...]:
    case = Round(tokens=(9, 4, 16), hidden=128, experts=11)
    owners = torch.tensor([2, 0, 0, 2, 2, 2, 2, 0, 2, 2, 2])  # rank 1 holds none
    mode = Mode(more={"expert_map": owners})
    with mode.make(group, case, 16) as a2a:
        for seed in range(3):
            play(a2a, mode, case.next(seed=seed))
        return a2a.local_experts


@pytest.mark.parametrize("kind", KINDS)
def test_an_explicit_expert_map(ranks, kind):
    owned = ranks(3, kind)(scattered_experts)
    assert owned == [(1, 2, 7), (), (0, 3, 4, 5, 6, 8, 9, 10)]


def near_the_wrap(group: weft.Group) -> None:
    case = Round(tokens=(3, 5, 2), hidden=128)
    mode = Mode(more={"_first_epoch": (1 << 40) - 4})
    with mode.make(group, case, 8) as a2a:
        for seed in range(9):
            play(a2a, mode, case.next(seed=seed, tokens=(3, 5, 8) if seed % 3 else case.tokens))
        assert len(a2a.history()) == 18


@pytest.mark.parametrize("kind", KINDS)
def test_epochs_cross_their_wrap(ranks, kind):
    ranks(3, kind)(near_the_wrap)


def in_halves(group: weft.Group) -> None:
    case = Round(tokens=(5, 0, 16)[: group.size], hidden=256, add=True)
    for base in (Mode(), REDUCED):
        mode = replace(base, more={"split_phase": True})
        with mode.make(group, case, 16) as a2a:
            for seed in range(4):  # ranks that call whole meet ranks that call halves
                play(a2a, mode, case.next(seed=seed), split_phase=(seed + group.rank) % 2 == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_halves_meet_whole_calls(ranks, kind):
    ranks(3, kind)(in_halves)


def two_alive(group: weft.Group) -> int:
    """Two micro-batches interleaved, with one's dispatch on its way while the other returns."""
    mode = Mode(more={"split_phase": True})
    case = Round(tokens=(5, 9, 16)[: group.size], hidden=256)
    outs = []
    with mode.make(group, case, 16) as a2a:
        for seed in range(6):
            ins = [case.next(seed=2 * seed + i).of(a2a.rank, group.device) for i in (0, 1)]
            first = a2a.dispatch(*ins[0][:3])
            a2a.dispatch_send(*ins[1][:3])
            x0, ids0, weights0, _ = ins[0]
            y0 = expert_results(a2a, first)
            a2a.combine_send(y0, ids0, weights0, first.handle)
            second = a2a.dispatch_recv()
            y1 = expert_results(a2a, second)
            out0 = a2a.combine_recv()
            out1 = a2a.combine(y1, ins[1][1], ins[1][2], second.handle)
            for out, inputs in ((out0, ins[0]), (out1, ins[1])):
                assert torch.equal(bits(out), bits(wanted_out(a2a, mode, case, inputs)))
            outs.append(out0.shape[0])
        a2a.check()
    return sum(outs)


@pytest.mark.parametrize("kind", KINDS)
def test_two_results_are_alive_and_cross_on_the_way(ranks, kind):
    assert ranks(3, kind)(two_alive) == [30, 54, 96]
