""" "auto" on real ranks: one table for all, one overlap for all, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import CONFIGS, EXPERTS, WIDER, Case
from weft.errors import CreationFailed, GeometryMismatch, InvalidArgument, WeftError
from weft.moe import OVERLAPS, LayerTable
from weft.moe.table import LayerCurve, LayerSizes
from weft.tuning import table_vote

DEEP = replace(CONFIGS["deepseek"], hidden=WIDER, intermediate=128, shared=128)
CASE = Case(DEEP, tokens=(4, 0))
TILED = {"gemm": "grouped", "timeout": 600.0}


def table(
    best: str = "shared_expert", ranks: int = 2, mode: str = "throughput", **sizes: Any
) -> LayerTable:
    """One of the CPU layer, in which `best` takes least."""
    us = {word: (9.0 if word == best else 20.0 + place,) for place, word in enumerate(OVERLAPS)}
    made = replace(LayerSizes.of(DEEP, gpu="", ranks=2, fp8=False), **sizes)
    curves = (LayerCurve("throughput", "grouped", (4,), us),)
    return LayerTable(made, "small", "2026-01-02", "a machine", "a method", curves)


def result(layer: weft.MoE, rank: int) -> torch.Tensor:
    x, logits = CASE.of(rank, layer.exchange.group.device)
    return layer(x, logits).clone()


def chosen(group: weft.Group, given: dict[int, LayerTable | Path | str]) -> list[Any]:
    """What auto took, its words, and whether the layer then works."""
    mine = given.get(group.rank)
    with CASE.open(group, table=mine, **TILED) as layer:
        found, got = layer.explain(), result(layer, group.rank)
        layer.check()
        sibling = layer.sibling(
            layer._weights, shared=layer._shared, correction=CASE.correction(group.device)
        )
        assert sibling.explain() == found
        assert layer.overlap == found.overlap
    with CASE.open(group, overlap="none", **TILED) as plain:
        assert torch.equal(result(plain, group.rank), got)
    return [found.overlap, found.source, found.text]


@pytest.mark.parametrize("best", OVERLAPS)
def test_all_ranks_take_what_rank_0s_table_says(ranks, tmp_path, best):
    path = tmp_path / "table.json"
    path.write_text(table(best).text())
    run = ranks(2, "threads")
    for given in ({0: path}, {0: str(path), 1: table(best)}):
        first, second = run(chosen, given)
        assert first == second
        assert first[:2] == [best, "measured"]
        assert f"{best} for up to 4 tokens a rank: 9.0 us" in first[2]


def test_ranks_that_are_processes_agree_too(ranks, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(table("shared_expert").text())
    first, second = ranks(2, "cpu")(chosen, {0: path})
    assert first == second
    assert first[0] == "shared_expert"


def test_without_a_table_the_rule_of_thumb_says_so(ranks):
    first, second = ranks(2, "threads")(chosen, {})
    assert first == second
    assert first[:2] == ["gemm_push", "rule"]
    assert "no table is near 2 x CPU, 8 experts" in first[2]


def explained(group: weft.Group, options: dict[str, Any]) -> Any:
    with CASE.open(group, **{**TILED, **options}) as layer:
        return layer.explain()


def test_what_was_asked_for_is_done_and_what_auto_would_take_is_told(ranks):
    options = {"overlap": "gemm_push", "table": table("shared_expert")}
    for found in ranks(2, "threads")(explained, options):
        assert (found.overlap, found.auto, found.source) == (
            "gemm_push",
            "shared_expert",
            "measured",
        )
        assert found.text.startswith("push, as asked. auto: shared for up to 4 tokens")
        assert found.us["throughput"]["gemm_push"] == 22.0


@pytest.mark.parametrize(
    ("options", "want", "source"),
    [
        ({"gemm": "torch"}, "shared_expert", "rule"),  # the table has tiled products
        ({"mode": "low_latency"}, "gemm_push", "rule"),
        ({"max_tokens": 5}, "gemm_push", "rule"),  # the table ends at 4
        ({"combine_dtype": "fp8"}, "shared_expert", "nearest"),
    ],
)
def test_options_narrow_the_choice(ranks, options, want, source):
    first, second = ranks(2, "threads")(explained, {"table": table("shared_expert"), **options})
    assert first == second
    assert (first.overlap, first.source) == (want, source)


def unlike(group: weft.Group, options: list[dict[str, Any]]) -> Any:
    return explained(group, options[group.rank])


def test_ranks_that_multiply_in_other_ways_take_what_all_can(ranks):
    for ways in (("grouped", "torch"), ("torch", "grouped")):
        first, second = ranks(2, "threads")(unlike, [{"gemm": way} for way in ways])
        assert first == second
        assert first.overlap == "shared_expert", "push needs tiled products everywhere"
    mixed = [{"table": table("shared_expert")}, {"gemm": "torch"}]
    for found in ranks(2, "threads")(unlike, mixed):
        assert (found.overlap, found.source) == ("shared_expert", "nearest")
        assert "not of a gemm of its own on each rank" in found.text


def refused(group: weft.Group, options: list[dict[str, Any]], kind: type[WeftError]) -> str:
    with pytest.raises(kind) as caught:
        explained(group, options[group.rank])
    return str(caught.value)


FOREIGN: dict[str, dict[str, Any]] = {
    "shared expert is True, there False": {"shared": 0},
    "experts a rank is 4 times": {"experts": 4 * EXPERTS},
    "gpu is '', there 'NVIDIA H200'": {"gpu": "NVIDIA H200"},
}
REFUSED: list[tuple[list[dict[str, Any]], type[WeftError], str]] = [
    (
        [{"table": table()}, {"table": table("gemm_push")}],
        GeometryMismatch,
        "the layer table differs",
    ),
    ([{}, {"table": table()}], GeometryMismatch, "rank 1 has table="),
    ([{}, {"table": "/nowhere/t.json"}], CreationFailed, "/nowhere/t.json"),
    ([{"table": 5}, {}], CreationFailed, "table is a int; pass a LayerTable, or the path"),
    ([{}, {"overlap": "none"}], GeometryMismatch, "overlap"),
    ([{"max_tokens": "4"}, {}], CreationFailed, "max_tokens is '4'"),
    ([{"max_tokens": 0}, {}], CreationFailed, "max_tokens is 0"),
    *(
        ([{"table": table(**sizes)}, {}], InvalidArgument, words)
        for words, sizes in FOREIGN.items()
    ),
]


@pytest.mark.parametrize(("options", "kind", "words"), REFUSED)
def test_what_does_not_fit_is_refused_by_all_alike(ranks, options, kind, words):
    first, second = ranks(2, "threads")(refused, options, kind)
    assert first == second
    assert words in first


def test_a_table_too_long_for_a_message_is_refused(ranks, monkeypatch):
    monkeypatch.setattr(table_vote, "MOST_BYTES", 100)
    options = [{"table": table()}, {}]
    first, second = ranks(2, "threads")(refused, options, CreationFailed)
    assert first == second
    assert "it may have 100" in first


def test_a_dtype_that_no_exchange_has_is_refused(ranks):
    def body(group: weft.Group) -> None:
        with pytest.raises(InvalidArgument, match="dtype is torch.float64"):
            Case(replace(DEEP, dtype=torch.float64), tokens=(4,)).open(group)

    ranks(1, "threads")(body)


def test_gpus_of_two_kinds_have_no_table(ranks, monkeypatch):
    """Rank 0 looks for the table of both names together, which nobody has measured."""
    monkeypatch.setattr("weft.moe.choice.common_gpu", lambda group: "NVIDIA H100, NVIDIA H200")
    first, second = ranks(2, "threads")(explained, {})
    assert first == second
    assert "2 x NVIDIA H100, NVIDIA H200" in first.text


def on_gpus(group: weft.Group) -> None:
    name = torch.cuda.get_device_name(group.device)
    for best in OVERLAPS:
        found = chosen(group, {0: table(best, gpu=name)})
        assert found[:2] == [best, "measured"]
    assert chosen(group, {})[:2] == ["gemm_push", "rule"]
    with pytest.raises(InvalidArgument, match="there ''"):
        explained(group, {"table": table()})


@pytest.mark.gpu
def test_gpus_take_what_their_table_says(ranks):
    ranks(2, "cuda")(on_gpus)
