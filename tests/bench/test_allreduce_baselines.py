"""Other all-reduces beside ours: found or not, right or not, and called as they document."""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import replace

import pytest
import torch

import weft
from tests.bench.test_allreduce import SMALL
from weft.bench import baselines
from weft.bench.allreduce import Rows, make_rows
from weft.bench.allreduce_baselines import (
    BASELINES,
    ONE_SHOT_MOST,
    FlashInferReduce,
    ReduceCall,
    SymmetricReduce,
)
from weft.bench.baselines import Baseline, measure_baselines
from weft.errors import DriverError


@pytest.fixture
def installed(monkeypatch):
    """Whatever is looked for is installed; ranks are threads of this process, that tests spoil."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: module)
    launch = weft.launch

    def as_threads(*args, **options):
        return launch(*args, **{**options, "device": "threads"})

    monkeypatch.setattr(baselines, "launch", as_threads)


class _Library:
    """torch's sums on threads; `spoil` is added to what rank 1 gets."""

    spoil = 0.0

    def __init__(self, group, settings, most) -> None:
        assert most == 5
        self.group, self.case = group, settings

    def call(self, rows):
        everyone = [
            make_rows(self.case, len(rows.x), rank, rows.x.device)
            for rank in range(self.group.size)
        ]

        def reduce():
            found = weft.reference.allreduce_fused(
                [each.x for each in everyone], rows.residual, rows.weight
            )
            return found.norm + self.spoil * self.group.rank

        return reduce

    def trial(self, tokens):
        return ReduceCall(self, tokens)


LOOM = Baseline(
    *("Loom", "loom", "torch", _Library), sizes=lambda case: [n for n in case.tokens if 2 <= n <= 9]
)


def test_a_library_is_measured(installed):
    (found,) = measure_baselines(replace(SMALL, tokens=(1, 5, 20)), [LOOM])
    assert (found.name, found.status) == ("Loom", "measured")
    assert list(found.samples_us) == [5], "it serves neither 1 nor 20"
    assert found.peer("2026-11-20").us[5] > 0
    assert found.library.startswith("Loom 2")


@pytest.mark.parametrize("spoil", [1.0, float("nan")])
def test_a_wrong_library_is_not_timed(installed, monkeypatch, spoil):
    monkeypatch.setattr(_Library, "spoil", spoil)
    (found,) = measure_baselines(SMALL, [LOOM])
    assert found.status.startswith("check failed, 5 tokens: rank ")
    assert found.samples_us == {}


def test_a_library_that_cannot_is_a_status(installed, monkeypatch):
    def no_gpu(group, settings, most):
        raise DriverError("no such GPU")

    (found,) = measure_baselines(SMALL, [replace(LOOM, make=no_gpu)])
    assert "no such GPU" in found.status
    (found,) = measure_baselines(replace(SMALL, tokens=(1,)), [LOOM])
    assert found.status == "serves none of these sizes"
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert [run.status for run in measure_baselines(SMALL, [LOOM])] == ["not installed"]


def test_what_they_refuse():
    by_name = {baseline.name: baseline for baseline in BASELINES}
    assert len(by_name) == len(BASELINES) == 5
    one, two = by_name["FlashInfer trtllm one-shot"], by_name["FlashInfer trtllm two-shot"]
    on_gpus = replace(SMALL, device="cuda", samples=11, tokens=(1, 2, 3, 1024))
    assert one.refuses(on_gpus) is None
    assert one.refuses(SMALL) == "needs GPUs"
    assert by_name["torch all_reduce"].refuses(SMALL) is None
    assert one.refuses(replace(on_gpus, ranks=3)) == "serves 2, 4, 8 ranks, not 3"
    assert by_name["torch symm_mem one-shot"].refuses(replace(on_gpus, ranks=3)) is None
    quantising = replace(on_gpus, epilogue="fp8-token")
    assert one.refuses(quantising) == "not compared with epilogue fp8-token"
    assert one.sizes(on_gpus) == [1, 2, 3], f"up to {ONE_SHOT_MOST}"
    assert two.sizes(on_gpus) == [3, 1024], "more than ranks"


def flashinfer(group: weft.Group, epilogue: str, one_shot: bool) -> None:
    """The adapter against a stand-in that takes these calls as FlashInfer documents them."""
    made, calls = {}, []

    def create(**given):
        made.update(given)
        return "workspace"

    def fusion(*, input, workspace, pattern, launch_with_pdl, use_oneshot, fp32_acc, **others):
        assert (workspace, launch_with_pdl, fp32_acc) == ("workspace", True, True)
        calls.append((pattern, use_oneshot))
        if pattern == 0:
            others["output"].copy_(input)
        else:
            others["norm_out"].copy_(input * 2)
            others["residual_out"].copy_(others["residual_in"])
            assert others["rms_gamma"].shape == (SMALL.hidden,)

    comm = types.ModuleType("flashinfer.comm")
    comm.create_allreduce_fusion_workspace = create  # type: ignore[attr-defined]
    comm.allreduce_fusion = fusion  # type: ignore[attr-defined]
    memory = types.ModuleType("flashinfer.comm.mnnvl")
    memory.TorchDistBackend = lambda group: ("backend", group)  # type: ignore[attr-defined]
    sys.modules |= {"flashinfer.comm": comm, "flashinfer.comm.mnnvl": memory}
    settings = replace(SMALL, epilogue=epilogue)
    library = FlashInferReduce(group, settings, 5, one_shot=one_shot)
    assert made["backend"] == "trtllm", "auto and mnnvl probe for multicast"
    assert (made["world_size"], made["rank"], made["max_token_num"]) == (2, group.rank, 5)
    rows = make_rows(settings, 3, group.rank, group.device)
    answer = library.call(Rows(rows.x, rows.residual, rows.weight))()
    assert torch.equal(answer, rows.x if epilogue == "none" else rows.x * 2)
    assert calls == [(0 if epilogue == "none" else 1, one_shot)]
    group.barrier()  # a peer may still be joining the process group


@pytest.mark.parametrize(("epilogue", "one_shot"), [("none", True), ("norm", False)])
def test_flashinfer_is_called_as_documented(ranks, epilogue, one_shot):
    ranks(2, "cpu")(flashinfer, epilogue, one_shot)


def symmetric(group: weft.Group, one_shot: bool) -> None:
    """The adapter with stand-ins for torch's operators, which need GPUs."""
    memory = types.ModuleType("torch.distributed._symmetric_memory")
    memory.empty = torch.empty  # type: ignore[attr-defined]
    met = []
    memory.rendezvous = lambda tensor, name: met.append(name)  # type: ignore[attr-defined]
    sys.modules["torch.distributed._symmetric_memory"] = memory
    ops = types.SimpleNamespace(
        one_shot_all_reduce=lambda x, op, name: x + 1,
        two_shot_all_reduce_=lambda x, op, name: x.add_(2),
    )
    setattr(torch.ops, "symm_mem", ops)  # noqa: B010
    settings = replace(SMALL, epilogue="none")
    library = SymmetricReduce(group, settings, 5, one_shot=one_shot)
    rows = make_rows(settings, 3, group.rank, group.device)
    answer = library.call(rows)()
    assert met == [group.process_group().group_name]
    assert torch.equal(answer, rows.x + (1 if one_shot else 2))
    group.barrier()


@pytest.mark.parametrize("one_shot", [True, False])
def test_symmetric_memory_is_called_as_documented(ranks, one_shot):
    ranks(2, "cpu")(symmetric, one_shot)
