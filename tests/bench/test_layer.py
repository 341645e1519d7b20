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
from weft.bench import layer_cases
from weft.bench.layer import LayerMeasurement, LayerReport, run
from weft.bench.layer_cases import (
    LAYER_MODELS,
    LayerSettings,
    even_choice,
    make_correction,
    make_logits,
)
from weft.bench.layer_load import Load, count, load_of
from weft.bench.layer_overlap import ALONE, OVERLAPPED, TOGETHER
from weft.bench.layer_plot import plot_layer
from weft.bench.layer_report import layer_rows, print_layer, write_layer_json
from weft.bench.layer_stages import SPLIT, STAGES
from weft.bench.layer_trial import LayerTrial
from weft.bench.layer_weights import Matrix, draw, expert_bytes, shared_expert, stack
from weft.bench.limits import layer_floor_us
from weft.bench.peers import matching_layers
from weft.errors import InvalidArgument, RankFailed
from weft.moe import OVERLAPS, route
from weft.moe.experts import to_blocks

SETTINGS = LayerSettings(
    ranks=2, device="cpu", model="deepseek-v3", tokens=(1, 6), overlaps=(), samples=3, seed=1
)
H200 = replace(SETTINGS, ranks=8, device="cuda", tokens=(128,))


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": True},
        {"model": "gpt-oss-120b", "routing": "zipf:1.2", "combine_by": "push", "stages": True},
        {"model": "glm-4.5-air", "quantize": "fp8", "combine_by": "fp8", "shared": False},
        {"model": "qwen3-30b-a3b", "routing": "perfect", "gemm": "padded", "experts": 16},
        {"exchange": "expert", "dtype": "fp8"},
        {"gemm": "tiled", "dtype": "fp8", "stages": True},
    ],
)
def test_a_run_is_checked_timed_and_reported(changes, tmp_path):
    settings = replace(SETTINGS, **changes)
    report = run(settings, quiet=True)
    assert report.problem is None
    found = [(each.tokens, each.overlap) for each in report.measurements]
    assert found == sorted(found, key=lambda each: (each[0], OVERLAPS.index(each[1])))
    assert len(set(found)) + len(report.refused) == 2 * len(OVERLAPS)
    assert {(1, "none"), (6, "none")} <= set(found)
    assert ((6, "shared") in found) == (settings.config.shared > 0)
    assert all("InvalidArgument" in text for text in report.refused)
    for each in report.measurements:
        assert [len(samples) for samples in each.samples] == [3, 3]
        parts = set(STAGES) - (set() if settings.config.shared else {"shared"})
        if report.gemm not in SPLIT:
            parts -= {"gating"}
        wanted = parts if each.overlap == "none" else set()
        if each.overlap in OVERLAPPED:
            wanted = {*ALONE, TOGETHER}
        assert set(each.stages) == (wanted if settings.stages else set())
    text = io.StringIO()
    print_layer(Console(file=text, width=200), report, [])
    assert f"{settings.model}: 2 ranks" in text.getvalue()
    assert f"rows by {settings.exchange}" in text.getvalue()
    assert ("parts of the layer" in text.getvalue()) == settings.stages
    pushed = any(each.overlap in OVERLAPPED for each in report.measurements)
    both = settings.stages and pushed
    assert ("the second product and sending" in text.getvalue()) == both
    write_layer_json(tmp_path / "layer.json", report, [])
    written = json.loads((tmp_path / "layer.json").read_text())
    assert written["settings"]["routing"] == settings.routing
    assert len(written["rows"]) == len(found)
    assert written["loads"]["6"]["most"] >= written["loads"]["6"]["mean"]


def ids_of(settings: LayerSettings, tokens: int) -> list[torch.Tensor]:
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
    fp8 = replace(settings, quantize="fp8", combine_by="fp8")
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


def test_rows_have_gains_floors_and_published_figures():
    load = Load(48, 32.0, 256, 4_600_000_000, 0)
    measured = [
        LayerMeasurement(128, word, "by hand", [[us] * 3, [us - 1] * 3])
        for word, us in (("none", 1500.0), ("shared", 1200.0))
    ]
    report = LayerReport(H200, {"gpus": ["NVIDIA H200"] * 8}, measured, {128: load}, [], "grouped")
    first, second = layer_rows(report, matching_layers(H200))
    assert (first.gain, second.gain) == (1.0, 1.25)
    assert second.us.median == 1200.0
    assert second.ratio == pytest.approx(1.2)
    assert second.imbalance == 1.5
    assert second.rivals == {
        "DeepEP + DeepGEMM, fp8, published, 8 GPUs": 562.0,
        "SM90 Mega MoE, fp8, published, 8 GPUs": 490.0,
    }
    same_load = replace(H200, ranks=4, experts=128)
    assert len(matching_layers(same_load)) == 2
    for other in (replace(H200, ranks=4), replace(H200, model="glm-4.5-air")):
        assert matching_layers(other) == []
    without = replace(report, measurements=measured[1:])
    assert layer_rows(without, [])[0].gain is None


def test_the_picture_has_every_overlap_and_every_library(tmp_path):
    load = Load(96, 64.0, 256, 4_600_000_000, 334_000)
    measured = [
        LayerMeasurement(tokens, overlap, "", [[us], [us]], {})
        for tokens, us in ((128, 1500.0), (256, 1600.0))
        for overlap in OVERLAPS
    ]
    settings = replace(H200, tokens=(128, 256))
    day = {"date": "2026-11-21", "torch": "2.11.0", "driver": "580", "cuda": "13.0"}
    machine = day | {"gpus": ["NVIDIA H200"] * 8}
    report = LayerReport(settings, machine, measured, {128: load, 256: load}, [], "tiled")
    picture = tmp_path / "layer.svg"
    peers = matching_layers(settings)
    plot_layer(picture, report, peers)
    drawn = picture.read_text()
    for words in (*(f'overlap "{overlap}"' for overlap in OVERLAPS), *(p.label for p in peers)):
        assert words.replace('"', "&quot;") in drawn or words in drawn, words
    assert "8 ranks of 32 experts" in drawn
    on_cpus = day | {"gpus": [], "cpus": 2, "cpu": "a CPU"}
    plot_layer(picture, replace(report, machine=on_cpus), [])
    assert "floor" not in picture.read_text()
    with pytest.raises(InvalidArgument, match="cannot write the picture"):
        plot_layer(tmp_path / "layer.nothing", report, peers)


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


def spoiled(group: weft.Group, settings: LayerSettings) -> tuple[str | None, ...]:
    """What the check says of a good layer, of one wrong sum, of silence, of one wrong expert."""
    device = group.device
    local = weft.ops.placement.Placement.blocks(32, 2).experts_of(group.rank)
    weights, shared = stack(settings, local, device), shared_expert(settings, device)
    trial = LayerTrial(group, settings, shared, 6)
    found = []
    with bench.open_layer(group, settings, trial, "none", weights) as layer:
        found.append(trial.check(layer))
        trial.out[2, 5] += 0.125
        found.append(trial.compare(layer))
        trial.poison()
        found.append(trial.compare(layer))
        if group.rank == 1:
            weights.down[:4] = weights.down[4:8].clone()
        found.append(trial.check(layer))
        group.barrier()
    return tuple(found)


def test_what_is_wrong_is_said(ranks):
    settings = replace(SETTINGS, tokens=(6,))
    for good, sum_, silence, expert in ranks(2, "threads")(spoiled, settings):
        assert good is None
        assert "off the reference by 0.1" in sum_
        assert "not finite" in silence
        assert "off the reference" in expert


def test_the_reference_sees_rows_as_the_wire_brings_them():
    group: Any = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = LayerTrial(group, SETTINGS, None, 3)
    assert plain._sent(x) is x
    sent = LayerTrial(group, replace(SETTINGS, quantize="fp8"), None, 3)._sent(x)
    assert sent.dtype == x.dtype
    assert not torch.equal(sent, x)
    blocks, found = x.view(3, 2, 128), sent.view(3, 2, 128)
    largest = blocks.abs().argmax(dim=-1, keepdim=True)  # the scale makes these exact
    assert torch.equal(found.gather(-1, largest), blocks.gather(-1, largest))


def test_a_wrong_layer_is_not_timed(monkeypatch):
    monkeypatch.setattr(LayerTrial, "compare", lambda *_: "rank 9: wrong")
    settings = replace(SETTINGS, overlaps=("none",))
    monkeypatch.setattr(bench, "measure_call", None)
    monkeypatch.setattr(bench, "launch", on_threads)
    report = run(settings, quiet=True)
    assert report.problem == "1 tokens, overlap none: rank 9: wrong"
    assert report.measurements == []


def on_threads(body: Any, *args: Any, **options: Any) -> Any:
    return weft.launch(body, *args, **{**options, "device": "threads"})


def test_a_mode_that_was_asked_for_must_be_there():
    settings = replace(SETTINGS, shared=False, overlaps=("shared",))
    with pytest.raises(RankFailed, match="nothing to overlap"):
        run(settings, quiet=True)


def test_a_new_word_of_the_layer_needs_no_change(monkeypatch):
    monkeypatch.setattr(layer_cases, "OVERLAPS", ("none", "sooner"))
    assert replace(SETTINGS).overlap_words == ("none", "sooner")
    assert replace(SETTINGS, overlaps=("sooner",)).moe_options("sooner", 3)["overlap"] == "sooner"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "gpt-5"}, "model is 'gpt-5'"),
        ({"dtype": "int4"}, "dtype is 'int4'"),
        ({"tokens": ()}, "nothing to measure"),
        ({"tokens": (0,)}, "nothing to measure"),
        ({"exchange": "token"}, "exchange is 'token'; choose one of rank, expert"),
        ({"exchange": "expert", "stages": True}, "stages are those of exchange 'rank'"),
        ({"overlaps": ("later",)}, "overlap is 'later'; this weft.MoE offers none, "),
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
        replace(SETTINGS, **changes)


def test_fp8_experts_take_fp8_rows():
    settings = replace(SETTINGS, dtype="fp8")
    assert settings.wire == "fp8"
    assert settings.moe_options("none", 6)["fp8"] is True
    assert "fp8" not in SETTINGS.moe_options("none", 6)
    assert draw(settings, 0, torch.device("cpu")).gate_up.scale is not None
