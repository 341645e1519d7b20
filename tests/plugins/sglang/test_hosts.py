# SPDX-License-Identifier: Apache-2.0
"""Servers of the stand-in whose ranks are on two hosts (--nnodes 2): ranks with WEFT_HOSTs."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.plugins.sglang.test_allreduce import refused
from tests.plugins.sglang.test_elastic import unfit
from tests.plugins.sglang.test_served import (
    BATCHES,
    EITHER,
    bereaved,
    replicas,
    serve,
    told_of_the_end,
)
from tests.plugins.standins import CLOSE, Kept


def on_two_hosts(group: weft.Group, body: Any, *args: Any) -> Any:
    os.environ["WEFT_HOST"] = f"host-{2 * group.rank // group.size}"
    return body(group, *args)


def logged(group: weft.Group, form: str, release: str) -> tuple[float, list[str]]:
    kept = Kept()
    logging.getLogger("weft").setLevel(logging.INFO)
    found, _ = serve(group, "deepseek", BATCHES[group.size], release=release, form=form)
    return found, kept.lines


@EITHER
@pytest.mark.parametrize("count", [2, 4])
def test_two_hosts_are_served(ranks: Any, count: int, form: str, release: str) -> None:
    """Idle ranks, rounds and a shared expert; one rank on each host, and two."""
    found = ranks(count, "cpu")(on_two_hosts, logged, form, release)
    assert max(each for each, _ in found) < CLOSE
    assert any(line.endswith("hosts: 2") for line in found[0][1])


@EITHER
def test_experts_that_move_between_hosts(ranks: Any, form: str, release: str) -> None:
    """EPLB: physical ids, and weights that are written over in place."""
    for found in ranks(2, "cpu")(on_two_hosts, replicas, form, release):
        assert max(found) < CLOSE


def test_ranks_that_outlive_each_other_are_of_one_machine(ranks: Any) -> None:
    """A group of several hosts does not recover."""
    for said in ranks(4, "cpu")(on_two_hosts, unfit, {}):
        assert said == (
            "--elastic-ep-backend weft takes ranks of one machine, and these are on 2: leave it "
            "out, or start without --nnodes"
        )


def test_all_reduces_are_of_one_host(ranks: Any) -> None:
    """Tensor parallelism over both hosts."""
    for said in ranks(2, "cpu")(on_two_hosts, refused, "served"):
        assert said == (
            "WEFT_SGLANG_ALLREDUCE=1 takes ranks of one host, and these are on 2: unset "
            "WEFT_SGLANG_ALLREDUCE, or keep --tp within one host"
        )


def test_the_end_of_a_rank_ends_both_servers(ranks: Any, tmp_path: Path) -> None:
    """Its host hears of the process, the other one of the rail; no rank waits for the deadline."""
    with pytest.raises(weft.errors.RankFailed):
        ranks(4, "cpu")(on_two_hosts, bereaved, str(tmp_path))
    far, also_far, near = (told_of_the_end(tmp_path, rank) for rank in (0, 1, 2))
    assert any("the process of rank 3 has ended" in line for line in near["lines"])
    for found in (far, also_far):
        assert re.match("RailFailed|PeerLeft", found["said"])
        assert "rank 3" in found["said"]
