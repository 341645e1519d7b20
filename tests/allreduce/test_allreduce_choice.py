# SPDX-License-Identifier: Apache-2.0
"""The backend that AllReduce selects for "auto": by a rule and by slots, equal on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import refused
from tests.kinds import THREADS, on_ranks
from weft.allreduce.choice import choose_backend
from weft.allreduce.config import ReduceConfig
from weft.errors import InvalidArgument, TokenOverflow

ALL = ("oneshot", "twoshot", "twoshot_bulk")
HIDDEN = 128
RECORDED = Path(__file__).resolve().parents[2] / "benchmarks/results"


def config(ranks: int, hidden: int = 7168, tokens: int = 4096) -> ReduceConfig:
    return ReduceConfig.from_args(
        ranks=ranks, max_tokens=tokens, hidden=hidden, dtype=torch.bfloat16
    )


@pytest.mark.parametrize(("ranks", "loss"), [(2, 0.085), (4, 0.018), (8, 0.018)])
def test_the_rule_is_near_the_fastest_of_what_was_measured(ranks, loss):
    (path,) = RECORDED.glob(f"*-{ranks}xH200/allreduce-choices.json")
    measured = json.loads(path.read_text())
    for curve in measured["curves"]:
        sizes, epilogue = config(ranks, curve["hidden"]), curve["epilogue"] != "none"
        for place, tokens in enumerate(curve["tokens"]):
            us = {name: each[place] for name, each in curve["us"].items() if each[place]}
            chosen = choose_backend(sizes, tuple(us), tokens, epilogue=epilogue).backend
            assert us[chosen] <= (1 + loss) * min(us.values()), (curve, tokens)


def test_the_nearest_built_backend_is_selected():
    sizes = config(8)
    assert (
        choose_backend(sizes, ("oneshot", "twoshot_bulk"), 32, epilogue=True).backend
        == "twoshot_bulk"
    )
    assert choose_backend(sizes, ("twoshot", "twoshot_bulk"), 1, epilogue=True).backend == "twoshot"
    assert choose_backend(sizes, ("oneshot", "twoshot"), 2048, epilogue=True).backend == "twoshot"


def chosen(group: weft.Group) -> None:
    rows = torch.ones((3, HIDDEN), dtype=torch.bfloat16)
    with weft.AllReduce(group, max_tokens=700, hidden=HIDDEN) as reduce:
        most = reduce.config.direct
        assert [reduce.explain(n).backend for n in (1, most, most + 1)] == [
            "oneshot",
            "oneshot",
            "twoshot",
        ]
        with pytest.raises(TokenOverflow, match="701 tokens in one call"):
            reduce.explain(701)
        assert torch.equal(reduce.fused(rows).out, rows * group.size)  # type: ignore[arg-type]
        reduce.check()
    with weft.AllReduce(group, max_tokens=4, hidden=HIDDEN, backends=("twoshot",)) as reduce:
        assert reduce.explain(1).text == "twoshot is the only backend that supports 1 tokens"


def test_an_all_reduce_explains_its_choice(ranks):
    ranks(2, "threads")(chosen)


@on_ranks(2, [THREADS])
def test_oneshot_alone_refuses_more_tokens_than_slots(group):
    """One shot has no slots for these rows, and storing them would overwrite other slots."""
    rows = torch.ones((550, HIDDEN), dtype=torch.bfloat16)
    sizes: dict[str, Any] = {"max_tokens": 550, "hidden": HIDDEN}
    with weft.AllReduce(group, **sizes, backends=("oneshot",)) as reduce:
        assert reduce.explain(512).backend == "oneshot"
        for call in (
            lambda: reduce.fused(rows),
            lambda: reduce.fused(rows, backend="oneshot"),
            lambda: reduce.explain(550),
        ):
            text = "add 'twoshot' to backends, or use torch.distributed"
            refused(InvalidArgument, call, "550 tokens", text)
        assert torch.equal(reduce.fused(rows[:512]).out, rows[:512] * 2)  # type: ignore[arg-type]
        reduce.check()
    with weft.AllReduce(group, **sizes, backends=("oneshot", "twoshot_bulk")) as reduce:
        assert [reduce.explain(n).backend for n in (512, 513)] == ["oneshot", "twoshot_bulk"]
        text = "550 tokens exceed the 512 slots of backend 'oneshot': use 'auto' or 'twoshot_bulk'"
        refused(InvalidArgument, lambda: reduce.fused(rows, backend="oneshot"), text)
        assert torch.equal(reduce.fused(rows).out, rows * 2)  # type: ignore[arg-type]
