# SPDX-License-Identifier: Apache-2.0
"""`weft bench layer`: routed, loaded, checked, timed and reported, on CPU ranks."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import weft
from weft.bench.harness import Measured, Report, run
from weft.bench.layer import (
    LayerCase,
    LayerTrial,
    Load,
    count,
    draw,
    load_of,
    stack,
    weight_bytes,
    wide,
)
from weft.bench.limits import layer_floor_us
from weft.bench.report import as_json, print_report, rows_of
from weft.errors import InvalidArgument, RankFailed
from weft.moe import OVERLAPS

SETTINGS = LayerCase(ranks=2, device="cpu", tokens=(1, 6), samples=3, seed=1)
H200 = replace(SETTINGS, ranks=8, device="cuda", tokens=(128,), samples=11)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tokens": (6,), "model": "gpt-oss-120b", "routing": "zipf:1.2"},
        {
            **{"tokens": (6,), "model": "glm-4.5-air", "shared": False},
            **{"quantize": "fp8", "combine_dtype": "fp8"},
        },
        {"tokens": (6,), "mode": "low_latency", "dtype": "fp8"},
        {"tokens": (6,), "model": "gpt-oss-120b", "dtype": "mxfp4"},
    ],
)
def test_a_run_is_checked_timed_and_reported(threads, changes):
    case = replace(SETTINGS, **changes)
    report = run(case, quiet=True)
    assert report.problem is None
    found = [(each.tokens, each.variant) for each in report.measured]
    assert found == sorted(found, key=lambda each: (each[0], OVERLAPS.index(each[1])))
    assert len(set(found)) + len(report.refused) == len(case.tokens) * len(OVERLAPS)
    assert {(tokens, "none") for tokens in case.tokens} <= set(found)
    assert ((6, "shared_expert") in found) == (case.config.shared > 0)
    assert all("InvalidArgument" in text for text in report.refused)
    for each in report.measured:
        assert [len(samples) for samples in each.samples_us["call"]] == [3, 3]
        assert each.facts["most"] >= each.facts["mean"]
    text = io.StringIO()
    print_report(Console(file=text, width=200), report)
    for piece in (f"{case.model}: 2 ranks", f"mode {case.mode}", "auto, 6 tokens: "):
        assert piece in text.getvalue(), piece
    written = json.loads(json.dumps(as_json(report)))
    assert written["settings"]["routing"] == case.routing
    assert len(written["rows"]) == len(found)


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
    weights = 3 * 256 * 128 * 2
    assert weight_bytes(settings.config, "bf16", 128) == weights
    row, fp8 = 256 * 2, 256 + 2 * 4  # with a float32 scale for 128 columns
    # Rank 0 has experts 0 and 1, which three tokens reach; two are its own to read and write.
    memory = 2 * weights + 3 * 2 * row + 2 * 2 * row
    # One row goes from rank 0 to rank 1, one from rank 1 to rank 0; both come back.
    assert count(settings, ids) == Load(3, 6 / 8, 3, memory, 2 * row)
    out = count(replace(settings, quantize="fp8"), ids)
    assert (out.wire_bytes, out.hbm_bytes) == (fp8 + row, memory - 3 * (row - fp8))
    assert count(replace(settings, combine_dtype="fp8"), ids).wire_bytes == row + fp8
    assert count(replace(settings, quantize="fp8", combine_dtype="fp8"), ids).wire_bytes == 2 * fp8
    biased = replace(SETTINGS, model="gpt-oss-120b").config
    assert weight_bytes(biased, "bf16", 128, biased=True) == weights + 2 * (2 * 128 + 256)
    stacked = stack(replace(SETTINGS, model="gpt-oss-120b", dtype="mxfp4"), (3,), CPU)
    held = sum(tensor.numel() * tensor.itemsize for tensor in stacked.tensors)
    assert weight_bytes(biased, "mxfp4", 128, biased=True) == held


def test_floors_are_those_of_the_sheet():
    config = H200.config
    sizes = weight_bytes(config, "fp8", config.intermediate) * 32
    assert sizes == 1_409_630_208  # 1.409 GB and a float32 for each 128 x 128 of it
    gpus = ["NVIDIA H200"] * 4
    assert layer_floor_us(sizes, 1, gpus) == pytest.approx(306.44, abs=0.01)
    assert layer_floor_us(sizes, 340_000_000, gpus) == 1000.0
    assert layer_floor_us(1, 1, ["NVIDIA B200"]) is None
    assert layer_floor_us(1, 1, []) is None


def test_rows_have_floors_and_what_auto_takes():
    load = {"hbm_bytes": 4_600_000_000, "wire_bytes": 34_000, "imbalance": 1.5, "gemm": "grouped"}
    facts = {**load, "auto": {"auto": "none", "reason": "by hand"}}
    measured = [
        Measured(word, 128, "by hand", {"call": [[us] * 3, [us - 1] * 3]}, facts)
        for word, us in (("none", 1500.0), ("shared_expert", 1200.0))
    ]
    first, second = rows_of(Report(H200, {"gpus": ["NVIDIA H200"] * 8}, measured))
    assert first.more == {"max / mean rows": 1.5, "auto": "auto"}
    assert second.more == {"max / mean rows": 1.5}
    assert (second.us.median, second.floor, second.moved) == (1200.0, 1000.0, 34_000)
    assert second.ratio == pytest.approx(1.2)


def test_every_rank_draws_the_same_expert():
    settings = replace(SETTINGS, model="gpt-oss-120b")
    stacked = stack(settings, (3, 7), CPU)
    again = draw(settings, 7, CPU)
    assert torch.equal(stacked.gate_up[1], again.gate_up[0])
    assert stacked.down_bias is not None
    assert again.down_bias is not None
    assert torch.equal(stacked.down_bias[1], again.down_bias[0])
    assert not torch.equal(stacked.down[0], stacked.down[1])


def test_fp8_weights_read_back_by_their_scales():
    settings = replace(SETTINGS, dtype="fp8")
    assert settings.wire == "fp8"
    plain, stored = draw(SETTINGS, 0, CPU), draw(settings, 0, CPU)
    assert stored.down.dtype == torch.float8_e4m3fn
    assert stored.down_scale is not None
    assert stored.down_scale.shape == (1, 256 // 128, 128 // 128)
    numbers = plain.down.float()
    # Half a unit of e4m3, or of its smallest numbers; and of bf16.
    allowed = torch.maximum(numbers.abs() / 16, stored.down_scale.max() * 2**-10) * 1.1
    assert bool(((wide(stored.down, stored.down_scale) - numbers).abs() <= allowed).all())


def test_mxfp4_weights_read_back_by_their_powers():
    settings = replace(SETTINGS, dtype="mxfp4")
    assert settings.wire == "fp8"
    numbers, stored = draw(SETTINGS, 0, CPU).down.float(), draw(settings, 0, CPU)
    assert stored.down.dtype == torch.uint8
    error = (wide(stored.down, stored.down_scale) - numbers).view(256, -1, 32).abs().amax(dim=-1)
    # A quarter of the largest number of 32 lies between two that are stored, or above all.
    assert bool((error <= numbers.view(256, -1, 32).abs().amax(dim=-1) / 4 + 0.01).all())


def spoiled(group: weft.Group, case: LayerCase) -> tuple[str | None, ...]:
    """What the check says of a good layer, of one wrong sum, of silence, of one wrong expert."""
    found = []
    with contextlib.closing(case.trials(group)) as trials:
        trial = next(trials)
        assert isinstance(trial, LayerTrial)
        found.append(trial.check())
        trial.inputs.out[2, 5] += 0.125
        found.append(trial.compare())
        trial.poison()
        found.append(trial.compare())
        trial.inputs.logits = trial.inputs.logits.roll(1, dims=1)  # the reference is known
        found.append(trial.check())
        group.barrier()
    return tuple(found)


def test_what_is_wrong_is_said(ranks):
    case = replace(SETTINGS, tokens=(6,))
    for good, sum_, silence, experts in ranks(2, "threads")(spoiled, case):
        assert good is None
        assert "off the reference by 0.1" in sum_
        assert "not finite" in silence
        assert "off the reference" in experts


def test_an_overlap_that_was_asked_for_must_be_there(threads):
    settings = replace(SETTINGS, shared=False, overlaps=("shared_expert",))
    with pytest.raises(RankFailed, match="nothing to overlap"):
        run(settings, quiet=True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"ranks": 99}, "ranks is 99"),
        ({"experts": 1}, "1 experts on 2 ranks"),
        ({"experts": 30}, "must divide them evenly"),
        ({"routing": "perfect"}, "routing is 'perfect'"),
        ({"routing": "uniform:2"}, "routing is 'uniform:2'"),
        ({"routing": "zipf:much"}, "routing is 'zipf:much'"),
        ({"device": "cuda", "model": "gpt-oss-120b", "dtype": "fp8"}, "whole blocks of 128"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, text):
    with pytest.raises(InvalidArgument, match=text):
        replace(SETTINGS, **{"samples": 11, **changes})
