# SPDX-License-Identifier: Apache-2.0
"""Models of transformers by weft: logits and text against one process, and against its own ways."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
import weft.plugins.transformers as plugin
from tests.plugins import families
from weft.errors import InvalidArgument, SetupError

pytest.importorskip("transformers", minversion="5.23")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

# test_transformers_layers.py calls the same code in every run, without whole models around it.
CAMPAIGN = pytest.mark.slow
SHARED, OWN = ("weft", "all_reduce", "all_to_all"), ("weft", "all_to_all")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    families.save(folder)
    return folder


def answers(group: weft.Group, folder: Path, jobs: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """What one process answers and what the ranks do, for each family, layout and way."""
    # Where transformers puts the model: ranks may share a GPU.
    device = group.device.index if group.device.type == "cuda" else group.rank
    os.environ["LOCAL_RANK"] = str(device)
    group.process_group()
    plugin.register(max_tokens=16, timeout=600.0)  # 42 rows: several rounds of prefill
    found = []
    for name, layout, ways, dtype in jobs:
        # Ranks of one replica hold the same batch; replicas have other ones, of other lengths.
        replica = group.rank // layout.get("tp_size", 1)
        ids = torch.randint(0, 256, (2, 21), generator=torch.Generator().manual_seed(7 + replica))
        ids = ids[:, : 21 - 4 * replica].to(group.device)
        alone = families.load(folder / name, dtype).to(group.device)
        with torch.no_grad():
            want, text = alone(ids).logits, alone.generate(ids, max_new_tokens=6, do_sample=False)
        for way in ways:
            model = families.load(
                folder / name, dtype, **layout, ep_size=group.size, ep_implementation=way
            )
            with torch.no_grad():
                logits = model(ids).logits
                said = model.generate(ids, max_new_tokens=6, do_sample=False)
            found.append(
                {
                    "what": (name, tuple(layout), way),
                    "dtype": dtype,
                    "worst": (logits - want).abs().max().item(),
                    "mean": (logits - want).abs().mean().item(),
                    "largest": want.abs().max().item(),
                    "text": torch.equal(said, text),
                }
            )
    plugin.close()
    return found


def check(reports: list[list[dict[str, Any]]]) -> None:
    """float32: nothing but the order of sums may differ. bfloat16: a rounding may turn a choice of
    experts, for any implementation, so means are compared."""
    for rank, found in enumerate(reports):
        for each in found:
            if each["dtype"] == torch.float32:
                assert each["worst"] <= 1e-5 * each["largest"], (rank, each)
                assert each["text"], (rank, each)
            else:
                assert each["mean"] <= 0.02 * each["largest"], (rank, each)


def jobs_of(names: Iterable[str], ranks: int, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Ranks that share one batch, and ranks with batches of their own, for each family."""
    return [
        (name, layout, ways, dtype)
        for name in names
        for layout, ways in (({"tp_size": ranks}, SHARED), ({"fsdp_size": ranks}, OWN))
    ]


@CAMPAIGN
@pytest.mark.slow
def test_two_ranks_answer_as_one_process_does(ranks: Any, models: Path) -> None:
    exact = jobs_of(families.FAMILIES, 2, torch.float32)
    check(ranks(2, "cpu")(answers, models, [*exact, *jobs_of(["glm4"], 2, torch.bfloat16)]))


@CAMPAIGN
@pytest.mark.slow
def test_four_ranks_and_two_replicas_of_two_ranks(ranks: Any, models: Path) -> None:
    replicas = [("qwen3", {"tp_size": 2, "fsdp_size": 2}, OWN, torch.float32)]
    exact = jobs_of(["qwen3", "gptoss"], 4, torch.float32)
    check(ranks(4, "cpu")(answers, models, [*exact, *replicas]))


# Ranks that share a GPU meet by gloo, whose functional collectives end the process there
# (torch 2.11): transformers' own ways need a GPU for each rank.
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU for each of two ranks")
def test_gpus_answer_as_one_gpu_does(ranks: Any, models: Path) -> None:
    jobs = jobs_of(families.FAMILIES, 2, torch.bfloat16)
    # FSDP takes parameters of one dtype, and this model keeps some in float32.
    served = [job for job in jobs if job[:2] != ("deepseek4", {"fsdp_size": 2})]
    check(ranks(2, "cuda")(answers, models, served))


@pytest.mark.parametrize(("argument", "value"), [("max_tokens", 0), ("timeout", -1.0)])
def test_register_refuses(argument: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=argument):
        plugin.register(**{argument: value})  # type: ignore[arg-type]


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    monkeypatch.setitem(sys.modules, "transformers.distributed.expert_parallel", None)
    said = r"transformers 5\.17\.0 .* came with 5\.23: import of transformers\.dist.*pip install"
    with pytest.raises(SetupError, match=said):
        plugin.register()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SetupError, match=r"cannot be imported.*pip install 'transformers>=5\.23'"):
        plugin.register()


def test_another_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what differs, as engines are (tests/plugins/sglang/test_hooks.py)."""
    module = types.ModuleType("transformers.distributed.expert_parallel")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(
        SetupError, match=r"there is no \S+\.EPImplementation\.__init__.* or use a new"
    ):
        plugin.register()
