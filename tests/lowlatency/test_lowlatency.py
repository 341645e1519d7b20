# SPDX-License-Identifier: Apache-2.0
"""Low-latency rounds whose every byte is known, on every kind of ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from tests.emulator.operators import EmulatedLow, compile_low
from tests.emulator.watch import watching, ways
from tests.lowlatency_rounds import Mode, expected_out, expert_results, play
from tests.ranks import ANY, CPU, EMULATED, on_ranks
from tests.rounds import Round, bits
from weft.lowlatency import reference as low
from weft.lowlatency.operator import LowLatencyAllToAll

UNEVEN = Round(tokens=(5, 0, 16), hidden=256)
REDUCED = Mode(reduce="sender", combine_dtype="fp8")
OWNERS = [2, 0, 0, 2, 2, 2, 2, 0, 2, 2, 2]
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
    # Rank 1 has none.
    "a map": (Mode(more={"expert_map": OWNERS}), UNEVEN.next(hidden=128, experts=11)),
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
FEW = ("fp8", "a map", "powers of two of 32", "as they are", "choices", "reduced, fp8 back")


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


def play_seeds(group: weft.Group, mode: Mode, case: Round, most: int) -> None:
    with mode.make(group, case, most) as a2a:
        for seed in range(3):
            play(a2a, mode, case.next(seed=seed))


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_other_group_sizes(ranks, kind, count):
    ranks(count, kind)(play_seeds, Mode(), Round((3,) * count, hidden=128, experts=5), 3)


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
def test_epochs_wrap(group):
    case = Round(tokens=(3, 5, 2), hidden=128)
    mode = Mode(more={"_first_epoch": (1 << 40) - 4})
    with mode.make(group, case, 8) as a2a:
        for seed in range(9):
            play(a2a, mode, case.next(seed=seed, tokens=(3, 5, 8) if seed % 3 else case.tokens))
        assert len(a2a.history()) == 18


@on_ranks(3, "threads", "cuda", "emulated")
def test_split_calls_interoperate_with_whole_ones(group):
    case = UNEVEN.next(add=True)
    for base in (Mode(), REDUCED):
        mode = replace(base, more={"split_phase": True})
        with mode.make(group, case, 16) as a2a:
            for seed in range(4):  # ranks that call whole meet ranks that call halves
                play(a2a, mode, case.next(seed=seed), split_phase=(seed + group.rank) % 2 == 0)


@on_ranks(3, "threads", "cuda", "emulated")
def test_two_live_results_overlap(group):
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


@on_ranks(2, "threads", "cuda", "emulated")
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
@on_ranks(2, "cuda", "emulated")
def test_tables_that_do_not_hold_every_chunk(group):
    """With this many experts, a table entry covers two chunks, and bits are read again."""
    case = Round(tokens=(80, 30), hidden=128, experts=512)
    with Mode().make(group, case, 450) as a2a:
        play(a2a, Mode(), case)
        play(a2a, Mode(), case.next(seed=3, tokens=(3, 75), router="one-hot"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp8", "reduced, fp8 back", "choices"])
@on_ranks(3, "threads")
def test_kernels_and_cpu_ranks_interoperate(group, name):
    """Rank 1 runs the CPU kernels, which speak the same protocol."""
    mode, case = CASES[name]
    with mode.make(group, case, 16) as a2a:
        if group.rank != 1:
            shape = a2a.config.shape
            a2a._local.kernels = EmulatedLow(compile_low(shape), shape)
        for seed in range(2):
            play(a2a, mode, case.next(seed=seed))


@pytest.mark.parametrize("name", [name for name in CASES if "several" in name])
@on_ranks(3, "emulated")
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


HIDDEN = 1024
MODES = {
    "fp8": Mode(),
    "fp8 of 32": Mode(group_size=32),
    "by column": Mode(scale="fp32_col", group_size=64),
    "powers of two": Mode(scale="ue8m0"),
    "as they are": Mode(quantize=None),
    "as deep_ep": Mode(scale="fp32_col", recipe="deep_ep"),
    "as deep_ep, powers of two": Mode(scale="ue8m0", recipe="deep_ep"),
    "as triton_dist": Mode(recipe="triton_dist"),
}


def strange_rows(device: torch.device) -> torch.Tensor:
    """Return bf16 `[96, HIDDEN]`: every bit pattern, and rows with few special values."""
    generator = torch.Generator().manual_seed(5)
    every = torch.arange(-(2**15), 2**15).to(torch.int16)
    every = every[torch.randperm(2**16, generator=generator)].view(64, HIDDEN)
    rows = torch.randn((32, HIDDEN), generator=generator).bfloat16()
    rows[0] = 0
    rows[1] = -0.0
    rows[2, 5] = float("nan")
    rows[3, 200] = float("inf")
    rows[4, 900] = -float("inf")
    rows[5] = 1e-38
    rows[6] = 9e-41  # a denormal
    rows[7] = 2.0**-117
    rows[8] = 2.0**-118
    rows[9] = 3e38
    rows[10] *= 1e-36
    rows[11].view(torch.int16)[:] = -1  # NaN with all bits set
    return torch.cat((every.view(torch.bfloat16), rows)).to(device)


def delivered(group: weft.Group, name: str) -> None:
    mode = MODES[name]
    x = strange_rows(group.device)
    ids = torch.zeros((len(x), 1), dtype=torch.int32, device=x.device)
    sizes = Round((len(x),), 1, 1, HIDDEN).sizes(len(x))
    with LowLatencyAllToAll(group, **sizes, timeout=600.0, **mode.options) as a2a:
        got = a2a.dispatch(x, ids)
        numbers, scales = low.compute_delivered_rows(
            x, mode.quantize, mode.group_size, mode.scale, mode.recipe
        )
        assert torch.equal(bits(got.x[0]), bits(numbers))
        if scales is not None:
            assert got.scales is not None
            result = low.unpack_scales(got.scales, scales.shape[1])[0]
            # Which NaN a block has is not part of the meaning where it travels as a power of two.
            assert torch.equal(result.isnan(), scales.isnan())
            assert torch.equal(result[~result.isnan()], scales[~scales.isnan()])
        y = x[None].clone()
        out = a2a.combine(y, ids, None, got.handle)
        expected = low.combine(x[:, None], ids, None, a2a.placement, reduce=mode.reduce)
        words = torch.where(expected.isnan(), 0x7FFF, expected.view(torch.int16))
        assert torch.equal(out.view(torch.int16), words)  # every combine writes the same NaN


@pytest.mark.parametrize("kind", ANY)
@pytest.mark.parametrize("name", MODES)
def test_every_value_is_delivered_as_in_the_reference(ranks, kind, name):
    if kind == "cuda" and MODES[name].recipe == "triton_dist":
        pytest.skip("GPUs divide as Triton does: tests/compat/test_triton_dist.py")
    ranks(1, kind)(delivered, name)
