# SPDX-License-Identifier: Apache-2.0
"""A rank dies while experts' results are sent: groups of the same objects go on with the living."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.recovery import plan_death, run_survivors, surviving, until_broken
from tests.rounds import Round, bits, combining, dropped
from tests.sending import make, results
from weft.errors import BadExpertId
from weft.grouping.operator import ExpertGroups

RANKS, ORDER, COMBINE_ENTER, AFTER_PAYLOAD = 4, (2, 0), 5, 2
CASE = Round(tokens=(16, 5, 9, 12), hidden=384, experts=14, add=True)


def one_round(
    a2a: weft.AllToAll, groups: ExpertGroups, case: Round, *, sends: bool, ids: torch.Tensor
) -> torch.Tensor:
    x, _, weights, add = case.of(a2a.rank, a2a.group.device)
    grouped = groups.gather(a2a.dispatch(x, ids, weights))
    y = results(groups, grouped, case.seed + 31 * a2a.rank, case.dtype)
    if sends:
        groups.send(y)
    else:
        groups.scatter(y)
        a2a.combine_send()
    return a2a.combine_recv(out=torch.full_like(x, float("nan")), add=add)


def die_in_turn(group: weft.Group, folder: str, way: str) -> None:
    faults = {"_defines": ("WEFT_FAULTS=1",)}
    with (
        surviving(group, folder) as survivors,
        make(group, CASE, **combining(way), **faults) as a2a,
        make(group, CASE, **combining("fp8" if way == "fp8" else "pull")) as plain,
    ):
        groups, others = ExpertGroups(a2a), ExpertGroups(plain)

        def rounds(count: int) -> None:
            for seed in range(count):
                case = CASE.next(seed=seed).living(survivors.ranks)
                ids = case.of(group.rank, group.device)[1]
                got = one_round(a2a, groups, case, sends=True, ids=ids)
                kept = dropped(ids, plain.placement.ranks, survivors.ranks)
                assert torch.equal(
                    bits(got), bits(one_round(plain, others, case, sends=False, ids=kept))
                )

        rounds(3)
        survivors.barrier()
        for dies, point in zip(ORDER, (COMBINE_ENTER, AFTER_PAYLOAD), strict=True):
            if group.rank == dies:
                plan_death(a2a, point)
            until_broken(lambda: rounds(1))
            survivors.lose(dies, sealed=[a2a, plain])
            rounds(6)
            plain.check()  # its ids were masked by hand
            with pytest.raises(BadExpertId, match="which is gone"):
                a2a.check()
        survivors.barrier()


@pytest.mark.parametrize("way", ["push", "fp8", "choices"])
def test_the_living_go_on(ranks, tmp_path, way):
    run_survivors(lambda: ranks(RANKS, "cpu")(die_in_turn, str(tmp_path), way), tmp_path, [1, 3])
