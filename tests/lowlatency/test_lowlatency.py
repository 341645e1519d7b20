# SPDX-License-Identifier: Apache-2.0
"""Low-latency rounds whose every byte is known, on every kind of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from tests.kinds import ANY, CPU, CUDA, EMULATED, on_ranks
from tests.lowlatency_rounds import Mode, expected_out, expert_results, play
from tests.rounds import Round, bits

UNEVEN = Round(tokens=(5, 0, 16), hidden=256)
REDUCED = Mode(reduce="sender", combine_dtype="fp8")
CHOICES, PLAIN = Mode(combine="gemm_push"), Mode(quantize=None)
# Rows that do not fill the last of a warp's vectors: 896 bf16 numbers are 112, of 64 at a time. A
# token has up to 3 rows of one rank: more than go together.
WIDE = Round(tokens=(5, 2, 3), hidden=896, experts=9, top_k=7)
CASES = {
    "fp8": (Mode(), UNEVEN.next(add=True)),
    "columns of 32, by column": (Mode(group_size=32, scale="fp32_col"), UNEVEN),
    "columns of 64, holes": (Mode(group_size=64), UNEVEN.next(router="holes", add=True)),
    "powers of two": (Mode(scale="ue8m0"), UNEVEN.next(hidden=640)),
    "powers of two of 32": (Mode(scale="ue8m0", group_size=32), UNEVEN.next(hidden=96)),
    "as they are": (PLAIN, UNEVEN.next(weighted=False)),
    "rows of two vectors": (PLAIN, UNEVEN.next(hidden=16)),
    "fp8 back": (Mode(combine_dtype="fp8"), UNEVEN),
    "choices": (CHOICES, UNEVEN.next(add=True)),
    "choices, fp32, top 10": (CHOICES, UNEVEN.next(dtype=torch.float32, top_k=10, experts=13)),
    "choices, as they are": (Mode(quantize=None, combine="gemm_push"), UNEVEN.next(hidden=16)),
    "reduced by the sender": (Mode(reduce="sender"), UNEVEN.next(add=True, top_k=6)),
    "reduced, fp8 back": (REDUCED, UNEVEN.next(top_k=8)),
    "fp16": (Mode(), UNEVEN.next(dtype=torch.float16)),
    "fp32, wide ids": (Mode(), UNEVEN.next(dtype=torch.float32, ids_dtype=torch.int64)),
    "fp32 as it is": (Mode(quantize=None, combine_dtype="fp8"), UNEVEN.next(dtype=torch.float32)),
    "all to the last rank": (Mode(), Round((16, 7, 16), hidden=256, router="one-hot")),
    "no rank has tokens": (Mode(), Round((0, 0, 0), hidden=256)),
    "top 1": (Mode(), UNEVEN.next(top_k=1)),
    "top 32 of 61": (Mode(), UNEVEN.next(top_k=32, experts=61)),
    # Rank 2 has no expert, and receives the number of tokens only.
    "fewer experts than ranks": (Mode(), UNEVEN.next(top_k=2, experts=2)),
    "a long row": (Mode(), UNEVEN.next(hidden=7168, top_k=8, experts=256)),
    "reduced, powers of two": (replace(REDUCED, scale="ue8m0"), UNEVEN),
    "as deep_ep": (Mode(scale="fp32_col", recipe="deep_ep"), UNEVEN),
    "as triton_dist": (Mode(recipe="triton_dist"), UNEVEN),
    "several choices": (PLAIN, WIDE),
    "several choices, sums": (Mode(reduce="sender"), WIDE.next(dtype=torch.float32)),
    "several choices, fp8": (Mode(combine_dtype="fp8"), WIDE),
    "several choices, sums as fp8": (REDUCED, WIDE.next(dtype=torch.float32)),
}
EMULATED_CASES = (
    *("fp8", "as they are", "choices", "reduced, fp8 back", "fewer experts than ranks"),
    *("as deep_ep", "as triton_dist", "reduced, powers of two"),
    *(name for name in CASES if "several" in name),
)
FEW = ("fp8", "powers of two of 32", "as they are", "choices", "reduced, fp8 back")


def play_some(group: weft.Group, names: list[str]) -> None:
    for name in names:
        mode, case = CASES[name]
        with mode.make(group, case, 16) as a2a:
            play(a2a, mode, case)
            play(a2a, mode, case.next(seed=1, tokens=case.tokens[::-1]))
            play(a2a, mode, case.next(seed=2))


def test_every_byte_of_some_cases(ranks):
    ranks(3, "threads")(play_some, FEW)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [CPU, *ANY, EMULATED])
def test_every_byte_of_every_case(ranks, kind):
    # GPUs divide as Triton does: tests/compat/test_triton_dist.py.
    every = EMULATED_CASES if kind == "emulated" else tuple(CASES)
    names = [name for name in every if kind != "cuda" or name != "as triton_dist"]
    ranks(3, kind)(play_some, names)


@on_ranks(3)
def test_an_inbox_is_reset_after_reading(group):
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


def play_alone(group: weft.Group) -> None:
    case = Round((3,) * group.size, hidden=128, experts=5)
    with Mode().make(group, case, 3) as a2a:
        for seed in range(3):
            play(a2a, Mode(), case.next(seed=seed))


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_other_group_sizes(ranks, kind, count):
    ranks(count, kind)(play_alone)


def play_full(group: weft.Group) -> None:
    case = Round((128,) * group.size, hidden=7168, top_k=8, experts=256)
    for mode in (Mode(), Mode(reduce="sender"), REDUCED, PLAIN, Mode(scale="ue8m0"), CHOICES):
        with mode.make(group, case, 128) as a2a:
            for seed, router in enumerate(("random", "perfect", "zipf", "one-hot", "holes")):
                play(a2a, mode, case.next(seed=seed, router=router))


@pytest.mark.gpu
def test_all_gpus_at_full_size(ranks):
    ranks(min(torch.cuda.device_count(), 8), "cuda")(play_full, timeout=300.0)


@on_ranks(3)
def test_an_explicit_expert_map(group):
    case = Round(tokens=(9, 4, 16), hidden=128, experts=11)
    owners = torch.tensor([2, 0, 0, 2, 2, 2, 2, 0, 2, 2, 2])  # rank 1 holds none
    mode = Mode(more={"expert_map": owners})
    with mode.make(group, case, 16) as a2a:
        for seed in range(3):
            play(a2a, mode, case.next(seed=seed))
        owned = group.all_gather(a2a.local_experts)
    assert owned == [[1, 2, 7], [], [0, 3, 4, 5, 6, 8, 9, 10]]


@on_ranks(3)
def test_epochs_wrap(group):
    case = Round(tokens=(3, 5, 2), hidden=128)
    mode = Mode(more={"_first_epoch": (1 << 40) - 4})
    with mode.make(group, case, 8) as a2a:
        for seed in range(9):
            play(a2a, mode, case.next(seed=seed, tokens=(3, 5, 8) if seed % 3 else case.tokens))
        assert len(a2a.history()) == 18


@on_ranks(3, [*ANY, EMULATED])
def test_split_calls_interoperate_with_whole_ones(group):
    case = UNEVEN.next(add=True)
    for base in (Mode(), REDUCED):
        mode = replace(base, more={"split_phase": True})
        with mode.make(group, case, 16) as a2a:
            for seed in range(4):  # ranks that call whole meet ranks that call halves
                play(a2a, mode, case.next(seed=seed), split_phase=(seed + group.rank) % 2 == 0)


@on_ranks(3, [*ANY, EMULATED])
def test_two_live_results_overlap(group):
    """One result is dispatched while the other is combined."""
    mode = Mode(more={"split_phase": True})
    case = Round(tokens=(5, 9, 16), hidden=256)
    with mode.make(group, case, 16) as a2a:
        for seed in range(6):
            ins = [case.next(seed=2 * seed + i).inputs_of(a2a.rank, group.device) for i in (0, 1)]
            first = a2a.dispatch(*ins[0][:3])
            a2a.dispatch_send(*ins[1][:3])
            _, ids, weights, _ = ins[0]
            a2a.combine_send(expert_results(a2a, first), ids, weights, first.handle)
            second = a2a.dispatch_recv()
            y = expert_results(a2a, second)
            _, ids, weights, _ = ins[1]
            outs = [a2a.combine_recv(), a2a.combine(y, ids, weights, second.handle)]
            for out, inputs in zip(outs, ins, strict=True):
                assert torch.equal(bits(out), bits(expected_out(a2a, mode, case, inputs)))
        a2a.check()


@on_ranks(2, [*ANY, EMULATED])
def test_results_may_be_dropped_and_combined_again(group):
    """Of four results two are never combined, and each of the others three times."""
    case = Round(tokens=(5, 1), hidden=256, experts=9)
    x, ids, weights, _ = case.inputs_of(group.rank, group.device)
    with Mode(more={"split_phase": True, "_allow_handle_reuse": True}).make(group, case, 8) as a2a:
        results = [a2a.dispatch(x, ids, weights) for _ in range(4)]
        for factor in (1.0, 2.0, 3.0):
            for rows in reversed(results[2:]):
                y = torch.full_like(rows.x, factor, dtype=x.dtype)
                out = a2a.combine(y, ids, None, rows.handle)
                assert (out[:, 0] == factor * (ids >= 0).sum(dim=1)).all()
                again, receive = a2a.combine_send(y, ids, None, rows.handle)
                receive()
                assert torch.equal(again, out)


@pytest.mark.slow
@on_ranks(2, [CUDA, EMULATED])
def test_tables_that_do_not_hold_every_chunk(group):
    """With this many experts, a table entry covers two chunks, and bits are read again."""
    case = Round(tokens=(80, 30), hidden=128, experts=512)
    with Mode().make(group, case, 450) as a2a:
        play(a2a, Mode(), case)
        play(a2a, Mode(), case.next(seed=3, tokens=(3, 75), router="one-hot"))
