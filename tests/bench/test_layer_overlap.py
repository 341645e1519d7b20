"""The second product and sending, alone and together: checked, timed, watched, reported."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import weft
from tests.bench.test_layer import H200, SETTINGS
from weft.bench import layer as bench
from weft.bench.layer import LayerMeasurement, LayerReport
from weft.bench.layer_arrival import FIRST, LAST, LIMIT_NS, STORED, samples_of, watched_places
from weft.bench.layer_cases import LayerSettings
from weft.bench.layer_load import Load
from weft.bench.layer_overlap import ALONE, TOGETHER, SecondHalf, measure_overlap
from weft.bench.layer_report import layer_rows, print_layer
from weft.bench.layer_trial import LayerTrial
from weft.bench.layer_weights import shared_expert, stack
from weft.errors import InvalidArgument


def halved(group: weft.Group, settings: LayerSettings) -> tuple[str | None, list[int]]:
    """What the check says of sends that lose a row; and which places at peers would be watched."""
    device = group.device
    local = weft.ops.placement.Placement.blocks(32, 2).experts_of(group.rank)
    weights, shared = stack(settings, local, device), shared_expert(settings, device)
    trial = LayerTrial(group, settings, shared, 6)
    with bench.open_layer(group, settings, trial, "push", weights) as layer:
        half = SecondHalf(trial, layer, weights)
        half.before()
        places = watched_places(half)
        half.together()
        half.after()
        assert places is not None
        base, stride = half.a2a._workspace.heap.base, half.a2a._workspace.heap.stride
        owners = [(int(place) - base) // stride for place in places]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SecondHalf, "product", lambda self: setattr(self, "_y", self.mlp._y))
            times, problem = measure_overlap(group, settings, trial, layer, weights)
        assert set(times) == set(ALONE)
        group.barrier()
    return problem, owners


def test_a_send_without_its_product_is_found_out(ranks):
    settings = replace(SETTINGS, tokens=(6,), gemm="tiled", samples=1)
    for rank, (problem, owners) in enumerate(ranks(2, "threads")(halved, settings)):
        assert owners == [1 - rank] * 2
        assert problem is not None


def test_stamps_are_us_from_the_products_start():
    found = samples_of([[1000, 9000, 2500, 8000], [0 + 1, 2001, 501, 1001]])
    assert found == {STORED: [8.0, 2.0], FIRST: [1.5, 0.5], LAST: [7.0, 1.0]}
    with pytest.raises(InvalidArgument, match=f"within {LIMIT_NS / 1e6:g} ms"):
        samples_of([[1000, 9000, 2500, 8000], [1000, 9000, 0, 8000]])


def test_hiding_is_together_over_the_sum():
    stages = {
        "product": [[30.0] * 3, [40.0] * 3], "send": [[20.0] * 3, [10.0] * 3],
        TOGETHER: [[45.0] * 3, [48.0] * 3], STORED: [[44.0]], FIRST: [[3.0]],
    }  # fmt: skip
    samples = [[100.0] * 3] * 2
    measured = [LayerMeasurement(128, "push", "by hand", samples, stages)]
    load = Load(48, 32.0, 256, 4_370_000_000, 0)
    report = LayerReport(H200, {"gpus": ["NVIDIA H200"] * 8}, measured, {128: load}, [], "tiled")
    (row,) = layer_rows(report, [])
    assert row.hiding == pytest.approx(48 / 60)
    text = io.StringIO()
    machine = {**report.machine, "driver": "", "cuda": "", "torch": "", "date": ""}
    print_layer(Console(file=text, width=200), replace(report, machine=machine), [])
    assert "0.800" in text.getvalue()
    assert FIRST in text.getvalue()


@pytest.mark.gpu
def test_rows_are_at_their_owners_before_their_product_ends():
    gpus = torch.cuda.device_count()
    if gpus < 2:
        pytest.skip("needs 2 GPUs")
    settings = replace(
        H200, ranks=min(8, gpus), experts=8 * min(8, gpus), tokens=(256,), overlaps=("push",),
        gemm="tiled", stages=True, samples=11,
    )  # fmt: skip
    report = bench.run(settings, quiet=True)
    assert report.problem is None
    (found,) = report.measurements
    stages = found.stages
    for stored, first, last in zip(stages[STORED], stages[FIRST], stages[LAST], strict=True):
        for end, early, late in zip(stored, first, last, strict=True):
            assert 0 < early < 0.75 * end
            assert early < late
