# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers with weft: logits and text compared with one process."""

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
from tests.moe.test_transformers import MODELS, SIZES
from weft.errors import InvalidArgument, SetupError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

SHARED, OWN = ("weft", "all_reduce", "all_to_all"), ("weft", "all_to_all")
FAMILIES = (
    "qwen3_moe", "glm4_moe", "deepseek_v3", "deepseek_v4", "glm_moe_dsa", "minimax_m2",
    "qwen3_next", "gpt_oss", "nemotron_h",
)  # fmt: skip
GENERATION: dict[str, Any] = {
    "tie_word_embeddings": False,
    "initializer_range": 0.2,  # logits that part: greedy text would depend on roundings otherwise
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id")),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save every family's model in a folder of its name."""
    import transformers

    folder = tmp_path_factory.mktemp("models")
    for name in FAMILIES:
        family, sizes = MODELS[name]
        config = getattr(transformers, f"{family}Config")(**{**SIZES, **sizes, **GENERATION})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for each, values in model.named_parameters():
            if "bias" in each:
                values.data.normal_(0, 0.2)
        for each, table in model.named_buffers():
            if each.endswith("tid2eid"):  # experts by token, of which a token has different ones
                table.copy_(torch.rand(len(table), 8).topk(table.shape[1]).indices)
        model.save_pretrained(folder / name)
    return folder


def load(folder: Path, dtype: torch.dtype, **distributed: Any) -> Any:
    """Load a model, with this rank's part of the experts if `distributed` is given."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    options = {"distributed_config": DistributedConfig(**distributed)} if distributed else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()


def check_answers(group: weft.Group, folder: Path, jobs: list[tuple[Any, ...]]) -> None:
    """Compare with one process, by family, layout and way: in float32 only sums' order may differ.

    In bfloat16 a rounding may change the choice of experts, so means are compared.
    """
    # Where transformers puts the model: ranks may share a GPU.
    device = group.device.index if group.device.type == "cuda" else group.rank
    os.environ["LOCAL_RANK"] = str(device)
    group.process_group()
    plugin.register(max_tokens=16, timeout=600.0)  # 42 rows: several rounds of prefill
    for name, layout, ways, dtype in jobs:
        # Ranks of one replica hold the same batch; replicas have other ones, of other lengths.
        replica = group.rank // layout.get("tp_size", 1)
        ids = torch.randint(0, 256, (2, 21), generator=torch.Generator().manual_seed(7 + replica))
        ids = ids[:, : 21 - 4 * replica].to(group.device)
        alone = load(folder / name, dtype).to(group.device)
        with torch.no_grad():
            want, text = alone(ids).logits, alone.generate(ids, max_new_tokens=6, do_sample=False)
        for way in ways:
            model = load(folder / name, dtype, **layout, ep_size=group.size, ep_implementation=way)
            with torch.no_grad():
                logits = model(ids).logits
                generated = model.generate(ids, max_new_tokens=6, do_sample=False)
            off, what = (logits - want).abs() / want.abs().max(), (name, tuple(layout), way)
            if dtype == torch.float32:
                assert off.max() <= 1e-5, what
                assert torch.equal(generated, text), what
            else:
                assert off.mean() <= 0.02, what
    plugin.close()


def jobs_of(names: Iterable[str], ranks: int, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Return jobs for each family: ranks that share one batch, and ranks with their own."""
    return [
        (name, layout, ways, dtype)
        for name in names
        for layout, ways in (({"tp_size": ranks}, SHARED), ({"fsdp_size": ranks}, OWN))
    ]


@pytest.mark.slow
def test_ranks_answer_as_one_process_does(ranks: Any, models: Path) -> None:
    """Test two ranks, four, and two replicas of two ranks."""
    jobs = [*jobs_of(FAMILIES, 2, torch.float32), *jobs_of(["glm4_moe"], 2, torch.bfloat16)]
    ranks(2, "cpu")(check_answers, models, jobs)
    replicas = [("qwen3_moe", {"tp_size": 2, "fsdp_size": 2}, OWN, torch.float32)]
    jobs = [*jobs_of(["gpt_oss"], 4, torch.float32), *replicas]
    ranks(4, "cpu")(check_answers, models, jobs)


# Ranks that share a GPU meet by gloo, whose functional collectives end the process there
# (torch 2.11): transformers' own ways need a GPU for each rank.
@pytest.mark.gpu(2)
def test_gpus_answer_as_one_gpu_does(ranks: Any, models: Path) -> None:
    jobs = jobs_of(FAMILIES, 2, torch.bfloat16)
    # FSDP takes parameters of one dtype, and this model keeps some in float32.
    served = [job for job in jobs if job[:2] != ("deepseek_v4", {"fsdp_size": 2})]
    ranks(2, "cuda")(check_answers, models, served)


def test_unsupported_setups_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for argument, value in (("max_tokens", 0), ("timeout", -1.0)):
        with pytest.raises(InvalidArgument, match=argument):
            plugin.register(**{argument: value})  # type: ignore[arg-type]
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    parallel = "transformers.distributed.expert_parallel"
    older = r"transformers 5\.17\.0 .* added in 5\.23: import of transformers\.dist.*pip install"
    other = r"EPImplementation\.__init__ does not exist.* or use a new"
    none = r"cannot be imported.*pip install 'transformers>=5\.23'"
    for name, module, text in (
        (parallel, None, older),
        (parallel, types.ModuleType(parallel), other),
        ("transformers", None, none),
    ):
        monkeypatch.setitem(sys.modules, name, module)
        with pytest.raises(SetupError, match=text):
            plugin.register()
