"""The kernels for few SMs on a CPU: every byte right, every bulk copy behind what it must follow.

Whether a GPU's engine is ordered by these fences is for the tests with the gpu marker.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weft
from tests.alltoall.emulate_few import RULES, EmulatedFew, compile_few
from tests.recorded import reads
from tests.rounds import Round, play
from weft.errors import RankFailed

pytestmark = reads("tests/emulator/*.hpp")

# Rings that go round, one piece and several, a last piece that is narrower, rows with holes.
CASES = {
    "two ranks, a row in one piece": Round(tokens=(24, 9), hidden=7168, top_k=8, experts=8),
    "two ranks, fp32, two pieces": Round(tokens=(9, 2), hidden=7168, dtype=torch.float32),
    "two ranks, short rows": Round(tokens=(40, 0), hidden=264, top_k=3, dtype=torch.float16),
    "three ranks, a narrower last piece": Round(
        tokens=(7, 11, 1), hidden=4808, top_k=5, experts=9, router="holes"
    ),
}
UNORDERED = {  # mutation: a text of HEADER, what it becomes, the rule that this breaks
    "no fence behind the flags": ("fence_for_bulk();  // behind the peers'", "//", RULES[0]),
    "no fence behind the readers": ("fence_shared_for_bulk();", "", RULES[1]),
    "a fence of the GPU for each piece": ("fence_shared_for_bulk", "fence_for_bulk", RULES[4]),
}
READ = "fragment.load_rows(ring, stage, unit.count, lane);"
FREE = "if (lane % warp_lanes == 0) ring.free[stage].arrive();"
WRONG = {  # and those that lose bytes
    "stores that are not awaited": ("if (lane == 0) bulk_wait_written();", ""),
    "rows loaded over rows that leave": ("bulk_wait_read<RowRing<S>::leaving>();", ""),
    "pieces loaded over pieces that are read": (
        f"{READ}\n        __syncwarp();\n        {FREE}",
        f"{FREE}\n        __syncwarp();\n        {READ}",
    ),
    "the sum without its extra row": ("if (a.add) add_vector", "if (false) add_vector"),
}
LOSSES = {old for old, _ in WRONG.values()}
PLAIN = CASES["two ranks, a row in one piece"]


def on_few(group: weft.Group, folder: str, case: Round, old: str, new: str) -> list[str]:
    with weft.AllToAll(
        group,
        max_tokens=max(case.tokens),
        top_k=case.top_k,
        num_experts=case.experts,
        hidden=case.hidden,
        dtype=case.dtype,
        timeout=600.0,
    ) as a2a:
        if group.rank == 0:
            compile_few(a2a.config.shape, Path(folder), old, new)
        group.barrier()
        entries = EmulatedFew(Path(folder) / "kernels.so", group.rank, 1)
        a2a._kernels = entries
        # Ranks are threads: what a broken kernel loses depends on them, so it gets several rounds.
        for seed, ctas in enumerate((1,) * 8 if old in LOSSES else (1, 2, 3)):
            entries.ctas = ctas
            first = seed % len(case.tokens)
            tokens = case.tokens[first:] + case.tokens[:first]
            play(a2a, case.next(seed=seed, tokens=tokens, add=seed % 2 == 0))
        a2a.check()
        group.barrier()
        return entries.broken()


@pytest.mark.parametrize("name", CASES)
def test_rounds_have_the_bits_of_the_reference(ranks, tmp_path, name):
    case = CASES[name]
    found = ranks(len(case.tokens), "threads")(on_few, str(tmp_path), case, "", "")
    assert found == [[]] * len(case.tokens)


@pytest.mark.parametrize("name", UNORDERED)
def test_a_copy_that_no_fence_orders_is_noticed(ranks, tmp_path, name):
    old, new, rule = UNORDERED[name]
    found = ranks(2, "threads")(on_few, str(tmp_path), PLAIN, old, new)
    assert all(rule in broken for broken in found)


@pytest.mark.parametrize("name", WRONG)
def test_a_wait_that_is_missing_is_noticed(ranks, tmp_path, name):
    with pytest.raises(RankFailed, match="AssertionError"):
        ranks(2, "threads")(on_few, str(tmp_path), PLAIN, *WRONG[name])
