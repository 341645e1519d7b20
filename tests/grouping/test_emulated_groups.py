# SPDX-License-Identifier: Apache-2.0
"""The kernels of grouping and sending on a CPU give the bits of the CPU's own, in several grids.

Whether a GPU orders memory as they need is for the tests with the gpu marker.
"""

from __future__ import annotations

from ctypes import Structure
from pathlib import Path

import pytest
import torch

import weft
from tests.alltoall.emulate_alltoall import places
from tests.emulator.watch import Event, watching, ways
from tests.grouping.emulate_groups import EmulatedGroups, compile_groups
from tests.rounds import Round, bits, combining, drop_refusals
from tests.sending import make, round_trip, scattered, sent, stored_at_owners
from weft.errors import TokenOverflow
from weft.grouping.operator import ExpertGroups
from weft.runtime.kernels import Kernels

pytestmark = pytest.mark.slow

CASE = Round(tokens=(16, 5), top_k=5, experts=12, hidden=640, router="holes", add=True)
GROUPS: dict[str, dict[str, object]] = {
    "contiguous": {"align": 8},
    "masked": {"layout": "masked", "max_rows": 7},
}
SENT = {
    "push": {"writes weak", "reads weak"},
    "fp8": {"writes relaxed sys"},
    "choices": {"writes weak", "reads weak"},
}
CASES = {
    "push": CASE,
    "push top 16": CASE.next(top_k=16, experts=24, hidden=264, tokens=(3, 16)),
    "fp8": CASE,
    "fp8 fp32": CASE.next(dtype=torch.float32, hidden=896),
    "choices": CASE,
    "choices fp32": CASE.next(dtype=torch.float32, hidden=264),
    "choices top 16": CASE.next(top_k=16, experts=24, tokens=(3, 16)),
}


class Mixed:
    """The entries of an all-to-all, but for the receiving half of combine."""

    def __init__(self, entries: Kernels, groups: EmulatedGroups) -> None:
        self._entries, self._groups = entries, groups

    def run(self, name: str, args: Structure, tokens: int) -> None:
        entries = self._groups if name == "combine_receive" else self._entries
        entries.run(name, args, tokens)

    def close(self) -> None:
        self._entries.close()


def emulated(group: weft.Group, name: str, layout: str, folder: str) -> None:
    case, way = CASES[name], name.split()[0]
    with (
        make(group, case, **combining(way), timeout=600.0) as a2a,
        make(group, case, combine_dtype="fp8" if way == "fp8" else None, timeout=600.0) as plain,
    ):
        groups, others = (
            ExpertGroups(each, **GROUPS[layout])  # type: ignore[arg-type]
            for each in (a2a, plain)
        )
        library = Path(folder) / "kernels.so"
        if group.rank == 0:
            library = compile_groups(a2a.config.shape, groups.config, Path(folder))
        group.barrier()
        for ctas, threads in ((1, 32), (3, 96)):
            entries = EmulatedGroups(library, groups, ctas, threads)
            groups._kernels = entries
            if way != "fp8":
                a2a._kernels = Mixed(a2a._kernels, entries)
            for give_back in (sent, scattered, stored_at_owners):
                if give_back is (scattered if way == "choices" else stored_at_owners):
                    continue
                wanted = round_trip(plain, others, case, scattered)
                got = round_trip(a2a, groups, case, give_back)
                assert torch.equal(bits(got), bits(wanted))
        with watching(group, entries.library, a2a._site.stride, whole=False) as watch:
            round_trip(a2a, groups, case, sent)
        check_touched(watch.events(), a2a, way)
        for each in (a2a, plain):
            drop_refusals(each)


def overflowing(group: weft.Group, folder: str) -> None:
    """Groups of two warps' lanes overflow, and one refusal says so."""
    case = Round(tokens=(3, 3), top_k=2, experts=160)
    with make(group, case, **combining("push")) as a2a:
        groups = ExpertGroups(a2a, layout="masked", max_rows=2)
        library = Path(folder) / "kernels.so"
        if group.rank == 0:
            library = compile_groups(a2a.config.shape, groups.config, Path(folder))
        group.barrier()
        groups._kernels = EmulatedGroups(library, groups, 1, 32)
        x, _, weights, _ = case.of(a2a.rank, group.device)
        ids = torch.tensor([[7, 71]]).repeat(
            3, 1
        )  # of rank 0, whose 80 groups take a warp three turns
        grouped = groups.gather(a2a.dispatch(x, ids.int(), weights))
        if a2a.rank == 0:
            assert grouped.counts[[7, 71]].tolist() == [2, 2]
            with pytest.raises(TokenOverflow, match="6 rows .* local expert 7;.* max_rows=2"):
                a2a.check()
            assert a2a._mailbox.refusals == 1
        a2a.check()
        group.barrier()


def check_touched(seen: list[Event], a2a: weft.AllToAll, way: str) -> None:
    """Rows, flags and counters have the order and the scope that they need."""
    touched = ways(seen, places(a2a.config.shape))
    assert touched["returned"] == SENT[way]
    assert touched["ready"] - {"reads acquire sys"} == {"writes release sys"}
    # Counters of CTAs: of this GPU alone.
    own = {event.how for event in seen if event.share < 0}
    assert {how for how in own if "gpu" in how} == {"updates acq_rel gpu"}


def test_many_groups_that_overflow_are_one_refusal(ranks, tmp_path):
    ranks(2, "threads")(overflowing, str(tmp_path))


@pytest.mark.parametrize("layout", GROUPS)
@pytest.mark.parametrize("name", CASES)
def test_kernels_send_what_the_cpu_sends(ranks, tmp_path, name, layout):
    ranks(2, "threads")(emulated, name, layout, str(tmp_path))
