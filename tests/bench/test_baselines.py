"""Other libraries beside ours: found or not, right or not, measured or recorded."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import replace

import pytest
import torch

import weft
from tests.bench.test_moe import SETTINGS
from weft import reference
from weft.bench import baselines
from weft.bench.allreduce_baselines import BASELINES as REDUCE_BASELINES
from weft.bench.baselines import (
    Baseline,
    BaselineRun,
    baseline_body,
    measure_baselines,
    merge_peers,
)
from weft.bench.moe import MoESession
from weft.bench.moe_baselines import BASELINES, PairTrial, deepep_refuses, flashinfer_refuses
from weft.bench.peers import Peer
from weft.errors import DriverError, RankFailed

SIZES = replace(SETTINGS, ranks=2, tokens=(3, 8, 40), samples=11)


class _Library:
    """weft itself as somebody else's library; `spoil` is added to what rank 1 gets back."""

    tolerance = 2.0**-6
    spoil = 0.0

    def __init__(self, group, settings, most) -> None:
        assert most == 8
        self.group, self.case = group, settings
        given = replace(settings, tokens=(most,))
        self.exchange = MoESession(group, given).exchange("onesided", most)

    def call(self, inputs, tokens):
        return _Call(self, inputs)

    def trial(self, tokens):
        return PairTrial(self, tokens)


class _Call:
    def __init__(self, library, inputs) -> None:
        self.library, self.inputs = library, inputs
        self.out = torch.empty_like(inputs.payloads[0])

    def dispatch(self):
        inputs, exchange = self.inputs, self.library.exchange
        self.received = exchange.dispatch(inputs.payloads, inputs.ids, inputs.weights)

    def experts(self):
        answers = reference.identity_experts(self.received, self.library.case.out_dtype)
        self.library.exchange.output().copy_(answers)

    def combine(self):
        out = self.library.exchange.combine(out=self.out)
        if self.library.group.rank == 1:
            out[0, 0] += self.library.spoil
        return out


def _few(case):
    return [size for size in case.tokens if size <= 8]


LOOM = Baseline("Loom", "loom", "loom", _Library, sizes=_few)


@pytest.fixture
def installed(monkeypatch):
    """Whatever is looked for is installed; it runs on threads, as if these had GPUs."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)
    monkeypatch.setattr(importlib.metadata, "version", lambda distribution: "2.1")

    def as_threads(*args, **options):
        return weft.launch(*args, **{**options, "device": "threads"})

    monkeypatch.setattr(baselines, "launch", as_threads)


def test_a_library_is_measured(installed):
    (run,) = measure_baselines(replace(SIZES, device="cuda"), [LOOM])
    assert (run.library, run.status) == ("Loom 2.1", "measured")
    assert run.method == "host clock, 11 calls with a barrier before each"
    assert list(run.samples_us) == [3, 8], "40 tokens are more than it serves"
    for phases in run.samples_us.values():
        assert [len(samples) for samples in phases["pair"]] == [11, 11]
    peer = run.peer("2026-11-20")
    assert peer.label == "Loom 2.1, this run"
    assert peer.measured
    assert all(us > 0 for us in peer.us.values())


@pytest.mark.parametrize("spoil", [1.0, float("nan")])
def test_a_wrong_library_is_not_timed(installed, monkeypatch, spoil):
    monkeypatch.setattr(_Library, "spoil", spoil)
    (run,) = measure_baselines(replace(SIZES, device="cuda"), [LOOM])
    assert run.status.startswith("check failed, 3 tokens: rank 1: a number is off by ")
    assert run.samples_us == {}


def test_a_library_that_fails_is_a_status(installed, monkeypatch):
    def no_gpu(group, settings, most):
        raise DriverError("no such GPU")

    (run,) = measure_baselines(replace(SIZES, device="cuda"), [replace(LOOM, make=no_gpu)])
    assert run.status.startswith("failed: CreationFailed: making Loom failed on rank 0")
    assert "no such GPU" in run.status

    def trapped(*_args, **_options):
        raise RankFailed("rank 1 of 2 died: " + "x" * 1000)

    monkeypatch.setattr(baselines, "launch", trapped)
    (run,) = measure_baselines(replace(SIZES, device="cuda"), [LOOM])
    assert run.status.startswith("failed: RankFailed: rank 1 of 2 died")
    assert len(run.status) <= 300


def test_libraries_are_looked_for(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    runs = measure_baselines(replace(SIZES, device="cuda"), BASELINES)
    assert [(run.library, run.status) for run in runs] == [
        ("FlashInfer", "not installed"),
        ("FlashInfer, low-precision back", "not installed"),
        ("FlashInfer, low-precision back, staged", "not installed"),
        ("DeepEP v1", "not installed"),
    ]


def test_libraries_refuse_what_they_do_not_serve(installed):
    reed = replace(LOOM, name="Reed", refuses=lambda settings: "too few")
    runs = measure_baselines(replace(SIZES, tokens=(40,)), [LOOM, reed])
    assert [run.status for run in runs] == ["serves none of these sizes", "too few"]


def test_they_are_asked_for_what_is_like_ours(installed):
    asked = []

    def refuses(settings):
        asked.append(
            (settings.payload, settings.quantize, settings.combine_dtype, settings.split_phase)
        )
        return "seen"

    exact = replace(LOOM, refuses=refuses)
    ours = replace(SIZES, device="cuda", quantize="fp8", combine_dtype="fp8", split_phase=True)
    assert [run.status for run in measure_baselines(ours, [exact])] == ["seen"]
    assert asked == [("fp8", None, None, False)]
    cast = replace(exact, setting="low-precision back", fp8_back=True)
    (run,) = measure_baselines(ours, [cast])
    assert (run.library, run.status) == ("Loom 2.1, low-precision back", "seen")
    (run,) = measure_baselines(replace(ours, combine_dtype=None), [cast])
    assert run.status == "not compared: weft's combine returns no fp8 rows"
    (run,) = measure_baselines(replace(SIZES, device="cuda", quantize="mxfp8"), [cast])
    assert run.status == "has nothing like it"


def test_what_they_refuse():
    on_gpus = replace(SIZES, device="cuda")
    assert flashinfer_refuses(on_gpus) is None
    assert flashinfer_refuses(SIZES) == deepep_refuses(SIZES) == "needs GPUs"
    assert "16 bits" in str(flashinfer_refuses(replace(on_gpus, dtype="fp32")))
    assert deepep_refuses(on_gpus) is None
    for change, text in (
        ({"dtype": "fp16"}, "bf16"),
        ({"experts": 15}, "15 on 2"),
    ):
        assert text in str(deepep_refuses(replace(on_gpus, **change)))
    assert BASELINES[-1].sizes(replace(SIZES, tokens=(8, 1024))) == [8]


def test_measured_figures_replace_recorded_ones():
    def recorded(library):
        return Peer(library, {8: 1.0}, "elsewhere", "2026-01-01")

    peers = [recorded("FlashInfer 0.7.2"), recorded("DeepEP v1 low-latency")]
    samples = {8: {"pair": [[1.0, 2.0, 9.0], [3.0, 4.0, 5.0]]}}
    runs = [
        BaselineRun("FlashInfer", "0.8.0", "measured", "by hand", samples),
        BaselineRun("DeepEP v1", "", "not installed"),
    ]
    first, second = merge_peers(peers, runs, "2026-11-20")
    assert first == Peer(
        "FlashInfer 0.8.0", {8: 4.0}, "this machine", "2026-11-20", source="this run"
    )
    assert second == peers[1]
    assert {baseline.name for baseline in BASELINES} == {run.name for run in runs}


def test_rows_that_come_back_as_fp8_replace_their_like():
    exact = Peer("FlashInfer 0.7.2", {8: 1.0}, "elsewhere", "2026-01-01")
    cast = replace(exact, library="FlashInfer 0.7.2, low-precision back", fp8_back=True)
    run = BaselineRun("FlashInfer", "0.7.2", "measured", "by hand", {8: {"pair": [[2.0]]}})
    cast_run = replace(run, setting="low-precision back", fp8_back=True)
    assert [peer.label for peer in merge_peers([exact, cast], [run], "2026-11-20")] == [
        "FlashInfer 0.7.2, this run",
        "FlashInfer 0.7.2, low-precision back, recorded",
    ]
    found = merge_peers([exact, cast], [cast_run], "2026-11-20")
    assert [(peer.label, peer.fp8_back) for peer in found] == [
        ("FlashInfer 0.7.2, low-precision back, this run", True),
        ("FlashInfer 0.7.2, recorded", False),
    ]


def test_nobody_may_use_multicast(ranks, monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "0")
    first, second = ranks(2, "threads")(baseline_body, LOOM, SIZES)
    assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
    assert first == second
    assert first["status"] == "measured"


def labels(group, libraries):
    """What every rank was sent."""
    return [(each.name, each.setting, each.sizes(SIZES)) for each in libraries]


def test_they_can_be_sent_to_processes(ranks):
    everyone = [*BASELINES, *REDUCE_BASELINES]
    (found,) = ranks(1, "cpu")(labels, everyone)
    assert found == labels(None, everyone)
