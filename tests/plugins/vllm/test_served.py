"""Layers of the stand-in on CPU ranks, by weft, beside plain torch in one process."""

from __future__ import annotations

import ast
import logging
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.plugins.standins import CLOSE, Kept, clamped, far, told
from tests.plugins.vllm.workers import (
    EXPERTS,
    HIDDEN,
    Worker,
    alone,
    config_of,
    enter,
    leave,
    scaled,
    tokens,
)
from weft.gemm import quantize_mxfp4
from weft.gemm.mxfp4 import dequantize_mxfp4

FORMS = pytest.mark.parametrize("form", ["block", "exchange"])
# Tokens of each rank; the limits of the stand-in's flags are 4 in decode and 32 in prefill.
BATCHES = {1: ([3], [40]), 2: ([3, 1], [0, 4], [0, 0], [5, 40], [70, 0], [33, 33])}


def serve(group: weft.Group, form: str, method: str) -> dict[str, Any]:
    kept = Kept()
    logging.getLogger("weft").setLevel(logging.INFO)
    worker, found = Worker(group, form, method), []
    for seed, sizes in enumerate(BATCHES[group.size]):
        x = tokens(sizes[group.rank], 10 * seed + group.rank)
        found.append(far(worker.step(x, sizes if group.size > 1 else None), alone(x)))
    engine = sys.modules["weft.plugins.vllm.engine"]
    said = {"far": max(found), "workspaces": len(engine._blocks.operators()), "lines": kept.lines}
    leave()
    return said


@FORMS
@pytest.mark.parametrize("count", [1, 2])
def test_idle_ranks_and_rounds(ranks: Any, count: int, form: str) -> None:
    """Every size of batch, with workspaces that the layers share; rank 0 logs what is served."""
    first, *others = ranks(count, "cpu")(serve, form, "")
    for said in (first, *others):
        assert said["far"] < CLOSE
        assert said["workspaces"] == (2 if form == "block" else 1)
    # benchmarks/vllm/variants.py looks for these words.
    logged = f"weft serves MoE layers of vLLM on {count} ranks, form {form}"
    assert any(line.startswith(logged) for line in first["lines"])


def test_rows_that_vllm_quantises_travel_so(ranks: Any) -> None:
    """FP8 with its scales, and experts whose rows the plug-in has to weigh."""
    for said in ranks(2, "cpu")(serve, "exchange", "fp8"):
        assert 1e-4 < said["far"] < 0.05


SIZES = {"hidden_dim": 160, "intermediate_size_per_partition": 96}  # padded to 256 and 128


def gpt_oss(group: weft.Group, far_apart: bool) -> dict[str, Any]:
    """A layer of MXFP4 experts with biases, whose rows are of gate and up in turn."""
    enter("block")
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.forward_context import forward
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

    GroupCoordinator.of_experts = GroupCoordinator(group.process_group())
    activation = SimpleNamespace(value="swigluoai")
    config = config_of(
        group, **SIZES, in_dtype=torch.bfloat16, activation=activation, has_bias=True
    )
    experts = GptOssRoutedExperts("experts", config, GptOssMxfp4Config())
    whole: dict[str, torch.Tensor] = {}
    packed: dict[str, torch.Tensor] = {}
    for name, rows, columns in (("w13", 192, 160), ("w2", 160, 96)):
        weights = scaled((EXPERTS, rows, columns), rows)
        if far_apart:  # more than the 14 powers that a packed row has
            weights[:, :, :32] *= 2.0**-20
        values, scales = quantize_mxfp4(weights)
        whole[name] = dequantize_mxfp4(values, scales)
        packed |= {f"{name}_weight": values, f"{name}_weight_scale": scales}
        whole[f"{name}_bias"] = scaled((EXPERTS, rows), rows + 1).bfloat16()
        packed[f"{name}_bias"] = whole[f"{name}_bias"]
    each = EXPERTS // group.size
    mine = slice(group.rank * each, (group.rank + 1) * each)
    for name, tensor in packed.items():
        part = torch.nn.Parameter(tensor[mine].clone(), requires_grad=False)
        experts.register_parameter(name, part)
    experts.quant_method.process_weights_after_loading(experts)
    x = scaled((5, 160), group.rank).bfloat16()
    ids = torch.arange(15).view(5, 3).remainder(EXPERTS)
    weights = torch.full((5, 3), 0.25)
    with torch.inference_mode(), forward([5] * group.size if group.size > 1 else None, None):
        out = experts.forward_modular(x, weights, ids.int())
    wanted = weft.reference.moe_layer(
        x,
        ids,
        weights,
        torch.cat((whole["w13"][:, ::2], whole["w13"][:, 1::2]), 1),
        whole["w2"],
        gate_up_bias=torch.cat((whole["w13_bias"][:, ::2], whole["w13_bias"][:, 1::2]), 1).float(),
        down_bias=whole["w2_bias"].float(),
        gating=clamped(7.0),
    )
    experts.quant_method.process_weights_after_loading(experts)  # an update in place: nothing new
    said = {"far": far(out.float(), wanted), "dtype": str(experts.w13_weight.dtype)}
    try:
        experts.w13_weight.weight_loader(experts.w13_weight, packed["w13_weight"])
    except weft.errors.OutOfOrder as error:
        said["loading"] = str(error)
    leave()
    return said


@pytest.mark.parametrize(("count", "far_apart"), [(1, False), (2, False), (2, True)])
def test_gpt_oss_in_mxfp4(ranks: Any, count: int, far_apart: bool) -> None:
    """Packed, or FP8 where a row's powers are far apart; tokens are rounded to FP8 either way."""
    for said in ranks(count, "cpu")(gpt_oss, far_apart):
        assert 1e-4 < said["far"] < 0.05
        assert said["dtype"] == ("torch.float8_e4m3fn" if far_apart else "torch.uint8")
        assert "experts.w13_weight is in weft's order, and the engine loads" in said["loading"]


def padded(group: weft.Group, form: str, release: str) -> float:
    from weft.plugins.vllm import engine

    worker, found = Worker(group, form), 0.0
    engine.PADDED_BY_ROUTER = release != "0.26.0"
    for size, real in ((4, 2), (40, 35)):  # one round, and two
        x, padding = tokens(size, group.rank), torch.arange(64) >= real  # of a larger buffer
        want = alone(x, real=real if release == "0.26.0" else None)
        found = max(found, far(worker.step(x, [size, size], padding), want))
    leave()
    return found


@FORMS
@pytest.mark.parametrize("release", ["0.26.0", "0.32.0"])
def test_rows_that_pad_a_graph_go_to_no_expert(ranks: Any, form: str, release: str) -> None:
    """In 0.26.0 by the plug-in; later ones' routers do it, which the stand-in's does not."""
    assert max(ranks(2, "cpu")(padded, form, release)) < CLOSE


def moved(group: weft.Group, form: str, redundant: int) -> tuple[float, float]:
    """All weights are written over in place, as EPLB moves them; then the layer loads again."""
    worker, x = Worker(group, form, redundant=redundant), tokens(6, group.rank)
    before = far(worker.step(x, [6, 6]), alone(x))
    for layer, runner in enumerate(worker.runners):
        worker.fill(runner.routed_experts, layer + 7)
        runner.routed_experts.quant_method.process_weights_after_loading(runner.routed_experts)
    after = far(worker.step(x, [6, 6]), alone(x, shift=7))
    leave()
    return before, after


@FORMS
@pytest.mark.parametrize("redundant", [0, 2])
def test_physical_ids_and_weights_that_move_in_place(ranks: Any, form: str, redundant: int) -> None:
    """EPLB needs nothing of weft but that it sees the same tensors."""
    for before, after in ranks(2, "cpu")(moved, form, redundant):
        assert before < CLOSE
        assert after < CLOSE


def drafted(group: weft.Group, form: str) -> dict[str, Any]:
    """A draft model is made after the target's, and runs between its passes."""
    target, found = Worker(group, form), []
    draft = Worker(group, form, layers=1)
    for turn, sizes in enumerate(([6, 4], [2, 0], [40, 3])):
        x = tokens(sizes[group.rank], 10 * turn + group.rank)
        found.append(far(target.step(x, sizes), alone(x)))
        few = [min(size, 2) for size in sizes]
        x = tokens(few[group.rank], 10 * turn + group.rank)
        found.append(far(draft.step(x, few), alone(x, layers=1)))
    engine = sys.modules["weft.plugins.vllm.engine"]
    said = {"far": max(found), "workspaces": len(engine._blocks.operators())}
    leave()
    return said


@FORMS
def test_speculative_decoding(ranks: Any, form: str) -> None:
    """The draft's layers share the target's workspaces."""
    for said in ranks(2, "cpu")(drafted, form):
        assert said["far"] < CLOSE
        assert said["workspaces"] == (2 if form == "block" else 1)


def staged(group: weft.Group, form: str) -> float:
    """Ranks 0 and 1 are the first stage, 2 and 3 the second, with an EP group each."""
    group.process_group()
    stages = [torch.distributed.new_group([first, first + 1]) for first in (0, 2)]
    pair = weft.Group.from_torch(stages[group.rank // 2], device=group.device)
    worker, found = Worker(pair, form), 0.0
    for turn, sizes in enumerate(([3, 1], [0, 40])):  # one stage may be ahead of the other
        x = tokens(sizes[pair.rank], 10 * turn + group.rank)
        found = max(found, far(worker.step(x, sizes), alone(x)))
    leave()
    return found


@FORMS
def test_pipeline_stages(ranks: Any, form: str) -> None:
    """Groups of weft's beside each other in one server."""
    assert max(ranks(4, "cpu")(staged, form)) < CLOSE


def set_up(group: weft.Group) -> list[tuple[str, str, int]]:
    """Settings reach the layers."""
    more: dict[str, Any] = {"DECODE": "throughput", "OVERLAP": "none", "PREFILL_TOKENS": "7"}
    worker = Worker(group, "block", **more)
    worker.step(tokens(9, group.rank), [9, 9])
    engine = sys.modules["weft.plugins.vllm.engine"]
    built = engine._blocks.operators()
    found = [(each.mode, each.overlap, each.exchange.max_tokens) for each in built]
    leave()
    return found


def test_settings(ranks: Any) -> None:
    """Those of the environment, in both workspaces."""
    for found in ranks(2, "cpu")(set_up):
        assert found == [("throughput", "none", 4), ("throughput", "none", 7)]


def on_two_hosts(group: weft.Group, form: str) -> str:
    os.environ["WEFT_HOST"] = f"host-{group.rank}"
    try:
        Worker(group, form)
    except weft.errors.InvalidArgument as error:
        return str(error)
    finally:
        leave()
    return "served"


@FORMS
def test_ranks_of_two_hosts_are_refused(ranks: Any, form: str) -> None:
    """When the first layer is loaded, before the port is open."""
    for said in ranks(2, "cpu")(on_two_hosts, form):
        assert said == (
            f"WEFT_VLLM={form} takes ranks of one host, and these are on 2: keep expert-parallel "
            "ranks within one host, without --nnodes, or unset WEFT_VLLM"
        )


def misuse(group: weft.Group) -> dict[str, str]:
    worker, said = Worker(group, "block"), {}
    engine: Any = sys.modules["weft.plugins.vllm.engine"]

    x, experts = tokens(2, group.rank), worker.runners[0].routed_experts
    said["no sizes"] = told(worker.step, x, None)
    said["more than told"] = told(worker.step, x, [1, 1])
    experts.w13_weight.data = experts.w13_weight.data.clone()
    said["other tensors"] = told(worker.step, x, [2, 2])
    said["loaded elsewhere"] = told(experts.quant_method.process_weights_after_loading, experts)
    engine.close()
    said["too early"] = told(worker.step, x, [2, 2])
    leave()
    worker = Worker(group, "exchange")
    experts = worker.runners[0].routed_experts
    experts.quant_method.make_kernel = lambda: None
    experts.quant_method.moe_kernel = SimpleNamespace(impl=object())
    said["monolithic"] = told(experts.quant_method.process_weights_after_loading, experts)
    leave()
    return said


def test_misuse_is_told(ranks: Any) -> None:
    """What vLLM might do otherwise is refused with a text that names it."""
    for said in ranks(2, "cpu")(misuse):
        assert "no rank's number of tokens" in said["no sizes"]
        assert "rows is 1, but this rank has 2 tokens" in said["more than told"]
        assert "model.layers.0.mlp.experts has other weight tensors" in said["other tensors"]
        assert "model.layers.0.mlp.experts has other weight tensors" in said["loaded elsewhere"]
        assert "layers.0.mlp.experts runs before vLLM has loaded its weights" in said["too early"]
        assert "has no modular kernel there, but object" in said["monolithic"]


def bereaved(group: weft.Group, path: str, form: str) -> None:
    """Rank 1 is killed between two steps; rank 0 runs no more of them."""
    from weft.plugins import faults
    from weft.plugins.vllm import engine

    ended: list[bool] = []
    engine.end_worker = lambda: ended.append(True)
    faults.GRACE = 0.0
    worker, kept = Worker(group, form, TIMEOUT="600"), Kept()
    worker.step(torch.zeros(2, HIDDEN), [2, 2])
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert engine._blocks is not None
    assert engine._blocks.watch is not None
    engine._blocks.watch._thread.join()
    Path(path).write_text(repr((ended, kept.lines)))


@FORMS
def test_the_end_of_a_rank_is_told_and_ends_the_worker(
    ranks: Any, tmp_path: Path, form: str
) -> None:
    """Also where no code of weft's runs any more: a thread hears it, and a line names the rank."""
    with pytest.raises(weft.errors.RankFailed):
        ranks(2, "cpu")(bereaved, str(tmp_path / "said"), form)
    ended, lines = ast.literal_eval((tmp_path / "said").read_text())
    assert ended == [True]
    assert any("rank 1" in line and "this server ends" in line for line in lines)
