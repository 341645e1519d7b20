"""What AllReduce takes for "auto": by its table and its slots, alike on every rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import refused
from weft.allreduce.choice import common_table, epilogue_of
from weft.allreduce.curve import Curve
from weft.allreduce.table import Table
from weft.errors import GeometryMismatch, InvalidArgument, TokenOverflow

HIDDEN = 128
RISING, FLAT = (1.0, 2.0, 3.0), (2.5, 2.5, 2.5)


def table(ranks: int = 2) -> Table:
    """oneshot up to 3 tokens, then twoshot; FP8 the other way round; sums in bulk."""

    def curve(epilogue: str, **us: tuple[float, ...]) -> Curve:
        return Curve(HIDDEN, "bf16", epilogue, (1, 2, 4), us)

    curves = (
        curve("norm", oneshot=RISING, twoshot=FLAT),
        curve("fp8-token", oneshot=FLAT, twoshot=RISING),
        curve("none", oneshot=FLAT, twoshot=FLAT, twoshot_bulk=(1.0, 1.0, 1.0)),
    )
    return Table("", ranks, "measured", "2026-01-02", "a machine", "a method", curves)


def chosen(group: weft.Group) -> None:
    rows = torch.ones((3, HIDDEN), dtype=torch.bfloat16)
    with weft.AllReduce(group, max_tokens=700, hidden=HIDDEN, table=table()) as reduce:
        assert [reduce.explain(n).backend for n in (1, 2, 3, 4)] == [
            "oneshot",
            "oneshot",
            "oneshot",
            "twoshot",
        ]
        quant = weft.FP8Token()
        assert [reduce.explain(n, quant=quant).backend for n in (1, 4)] == ["twoshot", "oneshot"]
        assert reduce.explain(1, norm=False).backend == "twoshot_bulk"
        assert (reduce.explain(3).source, reduce.explain(9).source) == ("measured", "nearest")
        assert "2026-01-02" in reduce.explain(3).text
        with pytest.raises(TokenOverflow, match="701 tokens in one call"):
            reduce.explain(701)
        most = reduce.reduction.direct
        assert reduce.explain(most, quant=quant).backend == "oneshot"
        assert reduce.explain(most + 1, quant=quant).backend != "oneshot", "it has no more slots"
        assert torch.equal(reduce.fused(rows).out, rows * group.size)  # type: ignore[arg-type]
        reduce.check()
    with weft.AllReduce(
        group, max_tokens=4, hidden=HIDDEN, backends=("twoshot",), table=table()
    ) as reduce:
        found = reduce.explain(1)
        assert (found.backend, found.source) == ("twoshot", "only one")
    with weft.AllReduce(group, max_tokens=4, hidden=HIDDEN) as reduce:
        assert reduce.explain(1).source == "formula"


def test_the_table_chooses(ranks):
    ranks(2, "threads")(chosen)


def at_the_receiver(group: weft.Group) -> None:
    """Tables hold times with the epilogue at the owner: read all the same, and said so."""
    sizes: dict[str, Any] = {"max_tokens": 4, "hidden": HIDDEN, "epilogue_at": "receiver"}
    with weft.AllReduce(group, **sizes, table=table()) as reduce:
        found = reduce.explain(3)
        assert (found.backend, found.source) == ("oneshot", "nearest")
        assert "It was measured with epilogue_at='owner'." in found.text
        plain = reduce.explain(4, norm=False)
        assert (plain.backend, plain.source) == ("twoshot_bulk", "measured")
        assert "epilogue_at" not in plain.text


def test_a_table_of_the_other_epilogue_is_called_so(ranks):
    ranks(2, "threads")(at_the_receiver)


def alone(group: weft.Group) -> None:
    with weft.AllReduce(group, max_tokens=4, hidden=HIDDEN, backends=("nccl",)) as reduce:
        found = reduce.explain(1)
        assert (found.backend, found.source) == ("collective", "only one")
        rows = torch.ones((3, HIDDEN), dtype=torch.bfloat16)
        assert torch.equal(reduce.fused(rows).out, rows * 2)  # type: ignore[arg-type]


def test_the_collective_is_taken_where_nothing_else_was_built(ranks):
    ranks(2, "cpu")(alone)


def foreign(group: weft.Group) -> None:
    for other in (table(ranks=3), replace(table(), gpu="NVIDIA L4")):
        with weft.AllReduce(group, max_tokens=4, hidden=HIDDEN, table=other) as reduce:
            found = reduce.explain(3)
            assert (found.backend, found.source) == ("oneshot", "nearest")
            named = "3 x CPU" if other.ranks == 3 else "2 x NVIDIA L4"
            assert f"The table is of {named}, this is 2 x CPU." in found.text


def test_a_table_of_another_machine_is_called_so(ranks):
    ranks(2, "threads")(foreign)


def beyond_one_shot(group: weft.Group) -> None:
    """One shot has no slots for these rows: storing them all the same would hit other slots."""
    rows = torch.ones((550, HIDDEN), dtype=torch.bfloat16)
    sizes: dict[str, Any] = {"max_tokens": 550, "hidden": HIDDEN}
    with weft.AllReduce(group, **sizes, backends=("oneshot",)) as reduce:
        assert reduce.explain(512).backend == "oneshot"
        for call in (lambda: reduce.fused(rows), lambda: reduce.explain(550)):
            refused(InvalidArgument, call, "550 tokens", "has slots for 512", "'twoshot' too")
        assert torch.equal(reduce.fused(rows[:512]).out, rows[:512] * 2)  # type: ignore[arg-type]
        reduce.check()
    with weft.AllReduce(group, **sizes, backends=("oneshot", "nccl")) as reduce:
        assert [reduce.explain(n).backend for n in (512, 513)] == ["oneshot", "collective"]
        assert torch.equal(reduce.fused(rows).out, rows * 2)  # type: ignore[arg-type]


def test_one_shot_alone_serves_no_more_than_it_has_slots_for(ranks):
    ranks(2, "cpu")(beyond_one_shot)


def differing(group: weft.Group) -> None:
    own = table(ranks=2 + group.rank)
    sizes: dict[str, Any] = {"max_tokens": 4, "hidden": HIDDEN}
    refused(
        GeometryMismatch,
        lambda: weft.AllReduce(group, **sizes, table=own),
        "the all-reduce table differs",
    )
    weft.AllReduce(group, **sizes).close()


def test_ranks_with_different_tables_make_nothing(ranks):
    ranks(2, "threads")(differing)


def test_epilogues_have_the_names_of_tables():
    scale = torch.ones(1)
    for quant, name in (
        (None, "norm"),
        (weft.FP8Static(scale), "fp8-static"),
        (weft.FP8Token(), "fp8-token"),
        (weft.FP8Group(128), "fp8-group"),
        (weft.FP8Group(128, scale="ue8m0"), "fp8-group"),
    ):
        assert epilogue_of(quant, norm=True) == name
    assert epilogue_of(None, norm=False) == "none"


@pytest.mark.parametrize(
    ("names", "source"),
    [(["NVIDIA H200"] * 8, None), (["NVIDIA H200"] * 7 + ["NVIDIA L4"], "formula")],
)
def test_gpus_name_the_table(monkeypatch, names, source):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[0])
    gathered: list[Any] = []

    def all_gather(value):
        gathered.append(value)
        return names if value in names else [value] * 8

    group: Any = SimpleNamespace(
        rank=0,
        size=8,
        device=torch.device("cuda", 0),
        together=lambda step, doing: step(),
        all_gather=all_gather,
        agree=lambda value, what: gathered.append(value),
    )
    found = common_table(group)
    assert found == Table.shipped(", ".join(dict.fromkeys(names)), 8)
    assert source in (None, found.source)
    assert gathered[-1] == {"table": found.digest, "ranks": 8}
