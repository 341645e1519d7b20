# SPDX-License-Identifier: Apache-2.0
"""Grouping and sending kernels in the emulator give the bits of the CPU kernels.

Whether a GPU orders memory as they need is for the tests with the gpu marker.
"""

from typing import Any

import pytest
import torch

import weft
from tests.emulator.operators import EmulatedGroups, compile_groups, places
from tests.emulator.watch import Event, watching, ways
from tests.ranks import on_ranks
from tests.rounds import Round, bits, combine_options, drop_refusals
from tests.sending import make, return_by_scatter, return_by_send, return_by_store, round_trip
from weft.errors import TokenOverflow
from weft.grouping.operator import ExpertGroups

pytestmark = pytest.mark.slow

CASE = Round(tokens=(16, 5), top_k=5, experts=12, hidden=640, router="holes", add=True)
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {"align": 8},
    "masked": {"layout": "masked", "max_rows": 7},
}
SENT = {"push": {"writes weak", "reads weak"}, "fp8": {"writes relaxed sys"}}
SENT["choices"] = SENT["push"]
CASES = {
    "push": CASE,
    "push top 16": CASE.next(top_k=16, experts=24, hidden=264, tokens=(3, 16)),
    "fp8": CASE,
    "fp8 fp32": CASE.next(dtype=torch.float32, hidden=896),
    "choices": CASE,
    "choices fp32": CASE.next(dtype=torch.float32, hidden=264),
    "choices top 16": CASE.next(top_k=16, experts=24, tokens=(3, 16)),
}


def emulate(groups: ExpertGroups) -> EmulatedGroups:
    shape = groups._a2a.config.shape
    library = compile_groups(shape, groups.config)
    groups._kernels = entries = EmulatedGroups(library, shape, groups.config)
    return entries


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *((name, "contiguous") for name in CASES),
        *((name, "masked") for name in ("push", "fp8", "choices")),
    ],
)
@on_ranks(2, "threads")
def test_kernels_send_as_the_cpu_does(group, name, layout):
    case, way = CASES[name], name.split()[0]
    with (
        make(group, case, **combine_options(way)) as a2a,
        make(group, case, combine_dtype="fp8" if way == "fp8" else None) as plain,
    ):
        groups, others = (ExpertGroups(each, **LAYOUTS[layout]) for each in (a2a, plain))
        entries = emulate(groups)
        for give_back in (
            return_by_send,
            return_by_store if way == "choices" else return_by_scatter,
        ) * 2:
            expected = round_trip(plain, others, case, return_by_scatter)
            got = round_trip(a2a, groups, case, give_back)
            assert torch.equal(bits(got), bits(expected))
        with watching(group, entries.library, a2a.site.stride, whole=False) as watch:
            round_trip(a2a, groups, case, return_by_send)
        check_touched(watch.events(), a2a, way)
        for each in (a2a, plain):
            drop_refusals(each)


def check_touched(seen: list[Event], a2a: weft.AllToAll, way: str) -> None:
    """Assert that accesses to rows, flags and counters have the required order and scope."""
    touched = ways(seen, places(a2a.config.shape))
    assert touched["returned"] - {"reads weak"} == SENT[way] - {"reads weak"}
    assert touched["ready"] - {"reads acquire sys"} == {"writes release sys"}
    # Counters of CTAs: of this GPU alone.
    own = {event.how for event in seen if event.share < 0}
    assert {how for how in own if "gpu" in how} == {"updates acq_rel gpu"}


@on_ranks(2, "threads")
def test_many_groups_that_overflow_are_one_refusal(group):
    """The groups of two warps' lanes overflow."""
    case = Round(tokens=(3, 3), top_k=2, experts=160)
    with make(group, case, **combine_options("push")) as a2a:
        groups = ExpertGroups(a2a, layout="masked", max_rows=2)
        emulate(groups)
        x, _, weights, _ = case.inputs_of(a2a.rank, group.device)
        # Of rank 0, whose 80 groups take a warp three turns.
        ids = torch.tensor([[7, 71]]).repeat(3, 1)
        grouped = groups.gather(a2a.dispatch(x, ids.int(), weights))
        if a2a.rank == 0:
            assert grouped.counts[[7, 71]].tolist() == [2, 2]
            with pytest.raises(TokenOverflow, match="6 rows .* local expert 7;.* max_rows=2"):
                a2a.check()
            assert a2a._mailbox.refusals == 1
        a2a.check()
        group.barrier()
