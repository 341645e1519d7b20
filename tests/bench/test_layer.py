"""`weft bench layer`: routed, loaded, checked, timed and reported, on CPU ranks."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import weft
from weft.bench import layer as bench
from weft.bench import run as running
from weft.bench.layer import LAYER_MODELS, LayerCase, LayerInputs, LayerSession, LayerTrial
from weft.bench.layer_load import (
    Load,
    count,
    even_choice,
    load_of,
    make_correction,
    make_logits,
)
from weft.bench.layer_weights import Matrix, draw, expert_bytes, stack
from weft.bench.limits import layer_floor_us
from weft.bench.peers import matching
from weft.bench.plot import plot
from weft.bench.report import as_json, print_report, rows_of
from weft.bench.run import Measurement, Report, run
from weft.errors import InvalidArgument, RankFailed
from weft.moe import OVERLAPS, route
from weft.moe.experts import to_blocks

SETTINGS = LayerCase(ranks=2, device="cpu", tokens=(1, 6), samples=3, seed=1)
H200 = replace(SETTINGS, ranks=8, device="cuda", tokens=(128,), samples=11)
STAGES = {"route", "dispatch", "combine", "pair", "experts"}


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": True},
        {"model": "gpt-oss-120b", "routing": "zipf:1.2", "stages": True},
        {"model": "glm-4.5-air", "quantize": "fp8", "combine_dtype": "fp8", "shared": False},
        {"model": "qwen3-30b-a3b", "routing": "perfect", "experts": 16},
        {"mode": "low_latency", "dtype": "fp8"},
        {"gemm": "grouped", "dtype": "fp8", "stages": True},
    ],
)
def test_a_run_is_checked_timed_and_reported(changes):
    case = replace(SETTINGS, **changes)
    report = run(case, quiet=True)
    assert report.problem is None
    found = [(each.tokens, each.variant) for each in report.measurements]
    assert found == sorted(found, key=lambda each: (each[0], OVERLAPS.index(each[1])))
    assert len(set(found)) + len(report.refused) == 2 * len(OVERLAPS)
    assert {(1, "none"), (6, "none")} <= set(found)
    assert ((6, "shared_expert") in found) == (case.config.shared > 0)
    assert all("InvalidArgument" in text for text in report.refused)
    for each in report.measurements:
        assert [len(samples) for samples in each.samples_us["call"]] == [3, 3]
        wanted = STAGES | ({"shared"} if case.config.shared else set())
        staged = case.stages and each.variant == "none"
        assert set(each.facts.get("stages_us", {})) == (wanted if staged else set())
        assert all(us > 0 for us in each.facts.get("stages_us", {}).values())
    text = io.StringIO()
    print_report(Console(file=text, width=200), report, [])
    shown = text.getvalue()
    assert f"{case.model}: 2 ranks" in shown
    assert f"mode {case.mode}" in shown
    assert ("Parts at 6 tokens, each alone" in shown) == case.stages
    written = json.loads(json.dumps(as_json(report)))
    assert written["settings"]["routing"] == case.routing
    assert len(written["rows"]) == len(found)
    facts = written["results"][-1]["facts"]
    assert facts["most"] >= facts["mean"]


def ids_of(settings: LayerCase, tokens: int) -> list[torch.Tensor]:
    correction = make_correction(settings)
    return [
        route(
            settings.config.routing, make_logits(settings, tokens, rank), correction=correction
        ).ids
        for rank in range(settings.ranks)
    ]


@pytest.mark.parametrize("model", LAYER_MODELS)
@pytest.mark.parametrize(("ranks", "experts"), [(8, None), (4, 128)])
def test_perfect_logits_load_all_experts_alike(model, ranks, experts):
    settings = replace(
        H200, model=model, ranks=ranks, experts=experts, routing="perfect", tokens=(64,)
    )
    routing = settings.config.routing
    for rank, ids in enumerate(ids_of(settings, 64)):
        wanted = even_choice(routing, torch.arange(64) + rank * 64)
        assert torch.equal(ids.sort(dim=1).values.long(), wanted.sort(dim=1).values)
    load = load_of(settings, 64)
    assert load.imbalance == 1.0
    assert load.mean == ranks * 64 * routing.top_k / routing.num_experts
    assert load.hit == routing.num_experts


def test_zipf_is_skewed_by_its_exponent_and_uniform_is_not():
    found = [
        load_of(replace(H200, routing=routing), 128).imbalance
        for routing in ("uniform", "zipf:0.5", "zipf", "zipf:2")
    ]
    assert found == sorted(found)
    assert found[0] < 2 < 8 < found[-1]


def test_a_load_is_counted_by_hand():
    settings = replace(SETTINGS, model="qwen3-30b-a3b", experts=8, shared=False)
    ids = [torch.tensor([[0, 1], [0, 4]]), torch.tensor([[0, 1]])]
    config = settings.config
    weights = 3 * 256 * 128 * 2
    assert expert_bytes(config, "bf16") == weights
    row = 256 * 2
    # Rank 0 has experts 0 and 1, which three tokens reach; two are its own to read and write.
    memory = 2 * weights + 3 * 2 * row + 2 * 2 * row
    # One row goes from rank 0 to rank 1, one from rank 1 to rank 0; both come back.
    assert count(settings, ids) == Load(3, 6 / 8, 3, memory, 2 * row)
    fp8 = replace(settings, quantize="fp8", combine_dtype="fp8")
    assert count(fp8, ids).wire_bytes == 2 * (256 + 8)


def test_floors_are_those_of_the_sheet():
    sizes = expert_bytes(H200.config, "fp8") * 32
    assert sizes == 1_409_630_208  # 1.409 GB and a float32 for each 128 x 128 of it
    floor = layer_floor_us(sizes, 340_000_000, ["NVIDIA H200"] * 4)
    assert floor is not None
    assert floor.memory == pytest.approx(306.44, abs=0.01)
    assert floor.memory_sheet == pytest.approx(293.67, abs=0.01)
    assert floor.links == 1000.0
    assert floor.least == 1000.0
    assert layer_floor_us(1, 1, ["NVIDIA B200"]) is None
    assert layer_floor_us(1, 1, []) is None


def facts_of(hbm: int, wire: int) -> dict[str, Any]:
    auto = {"auto": "none", "reason": "by hand", "origin": ""}
    load = {"hbm_bytes": hbm, "wire_bytes": wire, "imbalance": 1.5}
    return load | {"gemm": "grouped", "auto": auto}


def test_rows_have_gains_floors_and_published_figures():
    measured = [
        Measurement(
            word, 128, "by hand", {"call": [[us] * 3, [us - 1] * 3]}, facts_of(4_600_000_000, 0)
        )
        for word, us in (("none", 1500.0), ("shared_expert", 1200.0))
    ]
    report = Report(H200, {"gpus": ["NVIDIA H200"] * 8}, measured)
    first, second = rows_of(report, matching(H200))
    assert (first.more["x none"], second.more["x none"]) == ("1.000", "1.250")
    assert first.more["auto"] == "auto"
    assert "auto" not in second.more
    assert second.us.median == 1200.0
    assert second.ratio == pytest.approx(1.2)
    assert (second.more["HBM measured"], second.more["HBM sheet"]) == ("1000.0", "958.3")
    assert second.more["max / mean rows"] == 1.5
    assert second.baselines == {
        "DeepEP + DeepGEMM, fp8, published, 8 GPUs": 562.0,
        "SM90 Mega MoE, fp8, published, 8 GPUs": 490.0,
    }
    assert len(matching(replace(H200, ranks=4, experts=128))) == 2
    for other in (replace(H200, ranks=4), replace(H200, model="glm-4.5-air")):
        assert matching(other) == []
    without = replace(report, measurements=measured[1:])
    assert "x none" not in rows_of(without)[0].more


def test_the_picture_has_every_overlap_and_every_library(tmp_path):
    measured = [
        Measurement(overlap, tokens, "", {"call": [[us], [us]]}, facts_of(4_600_000_000, 334_000))
        for tokens, us in ((128, 1500.0), (256, 1600.0))
        for overlap in OVERLAPS
    ]
    case = replace(H200, tokens=(128, 256))
    day = {"date": "2026-11-21", "torch": "2.11.0", "driver": "580", "cuda": "13.0"}
    machine = day | {"gpus": ["NVIDIA H200"] * 8}
    peers = matching(case)
    rows = rows_of(Report(case, machine, measured), peers)
    picture = tmp_path / "layer.svg"
    plot(picture, rows, case.title(), machine)
    drawn = picture.read_text()
    for words in (*(f"weft, {overlap}" for overlap in OVERLAPS), *(p.label for p in peers)):
        assert words in drawn, words
    assert "weft's time over its floor" in drawn
    on_cpus = day | {"gpus": [], "cpus": 2, "cpu": "a CPU"}
    plot(picture, rows_of(Report(case, on_cpus, measured)), case.title(), on_cpus)
    assert "floor" not in picture.read_text()
    with pytest.raises(InvalidArgument, match="cannot write the picture"):
        plot(tmp_path / "layer.nothing", rows, case.title(), machine)


def test_blocks_of_weights_read_back():
    numbers = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
    numbers[128:, :128] *= 100
    got = Matrix(*(part[0] for part in to_blocks(numbers[None])))
    assert got.values.dtype == torch.float8_e4m3fn
    assert got.scale is not None
    assert got.scale.shape == (2, 3)
    assert float(got.scale[1, 0]) == float(numbers[128:, :128].abs().max() / 448)
    # Half a unit of e4m3, or of its smallest numbers.
    allowed = torch.maximum(numbers.abs() / 16, got.scale.max() * 2**-10)
    assert bool(((got.wide() - numbers).abs() <= allowed).all())


def test_every_rank_draws_the_same_expert():
    device = torch.device("cpu")
    settings = replace(SETTINGS, model="gpt-oss-120b")
    stacked = stack(settings, (3, 7), device)
    again = draw(settings, 7, device)
    assert torch.equal(stacked.gate_up[1], again.gate_up.values)
    assert stacked.down_bias is not None
    assert again.down_bias is not None
    assert torch.equal(stacked.down_bias[1], again.down_bias)
    assert not torch.equal(stacked.down[0], stacked.down[1])


def spoiled(group: weft.Group, case: LayerCase) -> tuple[str | None, ...]:
    """What the check says of a good layer, of one wrong sum, of silence, of one wrong expert."""
    session, found = LayerSession(group, case), []
    with session.trial("none", 6) as trial:
        found.append(trial.check())
        trial.inputs.out[2, 5] += 0.125
        found.append(trial.compare())
        trial.poison()
        found.append(trial.compare())
        if group.rank == 1:
            session.weights.down[:4] = session.weights.down[4:8].clone()
        found.append(trial.check())
    return tuple(found)


def test_what_is_wrong_is_said(ranks):
    case = replace(SETTINGS, tokens=(6,))
    for good, sum_, silence, expert in ranks(2, "threads")(spoiled, case):
        assert good is None
        assert "off the reference by 0.1" in sum_
        assert "not finite" in silence
        assert "off the reference" in expert


def test_the_reference_sees_rows_as_the_wire_brings_them():
    group: Any = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = LayerInputs(group, SETTINGS, None, 3)
    assert plain._sent(x) is x
    sent = LayerInputs(group, replace(SETTINGS, quantize="fp8"), None, 3)._sent(x)
    assert sent.dtype == x.dtype
    assert not torch.equal(sent, x)
    blocks, found = x.view(3, 2, 128), sent.view(3, 2, 128)
    largest = blocks.abs().argmax(dim=-1, keepdim=True)  # the scale makes these exact
    assert torch.equal(found.gather(-1, largest), blocks.gather(-1, largest))


def test_a_wrong_layer_is_not_timed(monkeypatch):
    monkeypatch.setattr(LayerTrial, "compare", lambda *_: "rank 9: wrong")
    monkeypatch.setattr(running, "measure", None)
    monkeypatch.setattr(running, "launch", on_threads)
    report = run(replace(SETTINGS, overlaps=("none",)), quiet=True)
    assert report.problem == "none, 1 tokens: rank 9: wrong"
    assert report.measurements == []


def on_threads(body: Any, *args: Any, **options: Any) -> Any:
    return weft.launch(body, *args, **{**options, "device": "threads"})


def test_a_mode_that_was_asked_for_must_be_there():
    settings = replace(SETTINGS, shared=False, overlaps=("shared_expert",))
    with pytest.raises(RankFailed, match="nothing to overlap"):
        run(settings, quiet=True)


def test_a_new_word_of_the_layer_needs_no_change(monkeypatch):
    monkeypatch.setattr(bench, "OVERLAPS", ("none", "sooner"))
    assert replace(SETTINGS).variants == ("none", "sooner")
    assert replace(SETTINGS, overlaps=("sooner",)).moe_options("sooner", 3)["overlap"] == "sooner"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "gpt-5"}, "model is 'gpt-5'"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"tokens": ()}, "nothing to measure"),
        ({"tokens": (0,)}, "0 tokens"),
        ({"ranks": 99}, "ranks is 99"),
        ({"quantize": "int4"}, "quantize is 'int4'"),
        ({"mode": "token"}, "mode is 'token'; choose one of throughput, low_latency"),
        ({"mode": "low_latency", "stages": True}, "stages are those of mode 'throughput'"),
        ({"overlaps": ("later",)}, "overlap is 'later'; choose one of none, "),
        ({"experts": 1}, "1 experts on 2 ranks"),
        ({"experts": 30}, "must divide them evenly"),
        ({"routing": "random"}, "routing is 'random'"),
        ({"routing": "uniform:2"}, "routing is 'uniform:2'"),
        ({"routing": "zipf:much"}, "routing is 'zipf:much'"),
        ({"routing": "zipf:-1"}, "routing is 'zipf:-1'"),
        ({"routing": "zipf:nan"}, "routing is 'zipf:nan'"),
        ({"model": "qwen3-30b-a3b", "experts": 12, "routing": "perfect"}, "cannot be dealt evenly"),
        ({"device": "cuda", "model": "gpt-oss-120b", "dtype": "fp8"}, "whole blocks of 128"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, text):
    with pytest.raises(InvalidArgument, match=text):
        replace(SETTINGS, **{"samples": 11, **changes})


def test_fp8_experts_take_fp8_rows():
    settings = replace(SETTINGS, dtype="fp8")
    assert settings.wire == "fp8"
    assert settings.moe_options("none", 6)["fp8"] is True
    assert "fp8" not in SETTINGS.moe_options("none", 6)
    assert draw(settings, 0, torch.device("cpu")).gate_up.scale is not None
