"""Tables of a layer's times: files, what is near, and those that come with weft."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.compat.calls import refused
from tests.moe.tables import SIZES, curve, question, table
from weft.errors import InvalidArgument
from weft.moe import MODELS, OVERLAPS, LayerTable
from weft.moe.choice import choose
from weft.moe.table import DTYPES, SHIPPED, LayerSizes

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NEAR = {
    "ranks": {"ranks": 8, "experts": 256},
    "experts": {"experts": 256},
    "fewer experts": {"experts": 64},
    "top_k": {"top_k": 4},
    "hidden": {"hidden": 3584},
    "intermediate": {"intermediate": 4096},
    "shared": {"shared": 1024},
}
FAR = {
    "gpu is 'NVIDIA B200', there 'NVIDIA H200'": {"gpu": "NVIDIA B200"},
    "dtype is 'bf16', there 'fp8'": {"dtype": "bf16"},
    "shared expert is False, there True": {"shared": 0},
    "ranks is 0.444 times": {"ranks": 9, "experts": 288},
    "experts a rank is 0.496 times": {"experts": 258},
    "top_k is 2.67 times": {"top_k": 3},
    "hidden is 0.498 times": {"hidden": 14400},
    "intermediate is 2.01 times": {"intermediate": 1019},
    "shared is 2.01 times": {"shared": 1019},
}


@pytest.mark.parametrize("changes", NEAR.values(), ids=NEAR)
def test_near_is_up_to_twice_and_half(changes):
    other = replace(SIZES, **changes)
    assert other.apart(SIZES) == []
    assert SIZES.apart(other) == []
    assert other.distance(SIZES) == SIZES.distance(other) == 1.0
    assert SIZES.distance(SIZES) == 0.0


@pytest.mark.parametrize(("words", "changes"), FAR.items(), ids=FAR)
def test_far_is_named(words, changes):
    found = replace(SIZES, **changes).apart(SIZES)
    assert len(found) == 1
    assert words in found[0]


def test_the_nearest_shipped_table_is_read(monkeypatch, tmp_path):
    deep = MODELS["deepseek-v3"]

    def read(
        ranks: int, mode="throughput", gemm="grouped", fp8=True, gpu="NVIDIA H200", config=deep
    ):
        sizes = LayerSizes.of(config, gpu=gpu, ranks=ranks, fp8=fp8)
        found = LayerTable.shipped(sizes, mode, gemm)
        return found and found.sizes.ranks

    assert read(8) == 4, "32 experts a rank, as 4 ranks of 128 have"
    assert read(4) == 4
    assert read(8, "low_latency") == read(4, "low_latency") == 4
    assert read(2) == 2, "GLM's, with 64 experts a rank"
    assert read(1) is None, "256 experts a rank are more than twice 64"
    for unlike in (
        {"gpu": "NVIDIA B200"},
        {"fp8": False},
        {"mode": "low_latency", "gemm": "torch"},
        {"gemm": "torch"},
        {"config": MODELS["qwen3-30b-a3b"]},
    ):
        assert read(8, **unlike) is None, unlike
    monkeypatch.setattr("weft.moe.table.SHIPPED", tmp_path)
    for name, model in (("b", "second"), ("a", "first")):
        (tmp_path / f"{name}.json").write_text(replace(table(), model=model).text())
    found = LayerTable.shipped(SIZES, "throughput", "grouped")
    assert found is not None
    assert found.model == "first", "of equally near ones the first by name"


def record_of(found: LayerTable, mode: str) -> dict[str, Any]:
    """What was recorded of the run that a table's times come from."""
    kind = "2xH200-2026-11-21" if found.model == "deepseek-v3" else "models-2xH200-2026-11-21"
    kind = "modes-4xH200-2026-11-22" if found.sizes.ranks == 4 else kind
    path = BENCHMARKS / f"layer-{kind}.json"
    found_there = json.loads(path.read_text())
    records: list[dict[str, Any]] = found_there if isinstance(found_there, list) else [found_there]
    for record in records:
        settings = record["settings"]
        is_of = settings["model"], settings["dtype"], settings["mode"]
        if is_of == (found.model, found.sizes.dtype, mode):
            return record
    raise AssertionError(f"{path.name} has no {found.model} in {found.sizes.dtype}")


def test_shipped_tables_are_the_records():
    paths = sorted(SHIPPED.glob("*.json"))
    assert len(paths) == 8
    for path in paths:
        found = LayerTable.load(path)
        for times in found.curves:
            record = record_of(found, times.mode)
            got = {
                (tokens, word): us
                for word, column in times.us.items()
                for tokens, us in zip(times.tokens, column, strict=True)
            }
            rows = [row for row in record["rows"] if row["overlap"] in OVERLAPS]
            assert got == {(r["tokens"], r["overlap"]): round(r["us"]["median"], 2) for r in rows}
            assert times.gemm == record["gemm"]
        settings, config = record["settings"], MODELS[found.model]
        assert found.sizes == LayerSizes(
            record["machine"]["gpus"][0],
            settings["ranks"],
            settings["experts"] or config.routing.num_experts,
            config.routing.top_k,
            config.hidden,
            config.intermediate,
            config.shared,
            settings["dtype"],
        )
        assert found.text() == path.read_text()
        told = "docs/measuring.md says push at every size"
        for each in found.curves:
            asked = range(1, each.tokens[-1] + 1)
            given = {"mode": each.mode, "sizes": found.sizes, "able": tuple(each.us)}
            chosen = [choose(found, question(n, **given)) for n in asked]
            assert {choice.overlap for choice in chosen} == {"gemm_push"}, told


def test_files_keep_everything(tmp_path):
    found = table(curve(us={"none": (None, 60.25, 90.0)}), curve("low_latency"))
    path = tmp_path / "table.json"
    path.write_text(found.text())
    assert LayerTable.load(path) == found
    assert LayerTable.load(str(path)).digest == found.digest
    assert table(sizes=replace(SIZES, ranks=2)).digest != table().digest


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "weft all-reduce table 1"}, "all-reduce table 1"),
        ({"date": ""}, "needs date"),
        ({"curves": []}, "curves are of []"),
        ({"curves": [{}]}, "mode"),
        ({"curves": [asdict(curve()), asdict(curve())]}, "each mode and gemm once"),
        ({"ranks": 0}, "at least 1"),
        ({"hidden": 71.5}, "71.5 stands where a whole number"),
        ({"shared": -1}, "shared at least 0"),
        ({"dtype": "fp4"}, ", ".join(DTYPES)),
        ({"mode": "token"}, "choose one of rank, expert"),
        ({"tokens": [8, 8, 512]}, "rising"),
        ({"us": {}}, "one name"),
        ({"us": {"later": [1.0, 2.0, 3.0]}}, "overlap is 'later'"),
        ({"us": {"none": [1.0]}}, "1 times for 3 sizes"),
        ({"us": {"none": [1.0, 0.0, 3.0]}}, "above 0"),
        ({"us": {"none": [1.0, float("nan"), 3.0]}}, "above 0"),
        ({"us": [1.0]}, "items"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, change, words):
    data = table().as_json()
    for name, value in change.items():
        (data if name in data else data["curves"][0])[name] = value
    path = tmp_path / "table.json"
    path.write_text(json.dumps(data))
    refused(InvalidArgument, lambda: LayerTable.load(path), str(path), words)


def test_what_is_no_json_is_refused(tmp_path):
    path = tmp_path / "table.json"
    refused(InvalidArgument, lambda: LayerTable.load(path), str(path), "No such file")
    for text in ("{", "[1]", "\x80\x02]q\x00.", '"weft layer table 1"'):
        path.write_text(text)
        refused(InvalidArgument, lambda: LayerTable.load(path), str(path))
    path.write_bytes(b"\x80\x04K\x01.")
    refused(InvalidArgument, lambda: LayerTable.load(path), str(path))
