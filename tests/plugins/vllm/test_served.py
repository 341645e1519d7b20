# SPDX-License-Identifier: Apache-2.0
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
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

    GroupCoordinator.of_experts = GroupCoordinator(group.process_group())
    activation = SimpleNamespace(value="swigluoai")
    config = config_of(
        group, **SIZES, in_dtype=torch.bfloat16, activation=activation, has_bias=True
    )
    experts = GptOssRoutedExperts("experts", config, GptOssMxfp4Config())
    each = EXPERTS // group.size
    mine = slice(group.rank * each, (group.rank + 1) * each)
    x = scaled((5, 160), group.rank).bfloat16()
    ids = torch.arange(15).view(5, 3).remainder(EXPERTS)

    def load(seed: int, *, far_apart: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """This rank's tensors as a checkpoint has them, and what the layer makes of x."""
        whole: dict[str, torch.Tensor] = {}
        packed: dict[str, torch.Tensor] = {}
        for name, rows, columns in (("w13", 192, 160), ("w2", 160, 96)):
            weights = scaled((EXPERTS, rows, columns), rows + seed)
            if far_apart:  # more than the 14 powers that a packed row has
                weights[:, :, :32] *= 2.0**-20
            values, scales = quantize_mxfp4(weights)
            whole[name] = dequantize_mxfp4(values, scales)
            packed |= {f"{name}_weight": values, f"{name}_weight_scale": scales}
            whole[f"{name}_bias"] = scaled((EXPERTS, rows), rows + 1 + seed).bfloat16()
            packed[f"{name}_bias"] = whole[f"{name}_bias"]
        wanted = weft.reference.moe_layer(
            x,
            ids,
            torch.full((5, 3), 0.25),
            torch.cat((whole["w13"][:, ::2], whole["w13"][:, 1::2]), 1),
            whole["w2"],
            gate_up_bias=torch.cat(
                (whole["w13_bias"][:, ::2], whole["w13_bias"][:, 1::2]), 1
            ).float(),
            down_bias=whole["w2_bias"].float(),
            gating=clamped(7.0),
        )
        return {name: tensor[mine].clone() for name, tensor in packed.items()}, wanted

    def distance(wanted: torch.Tensor) -> float:
        sizes = [5] * group.size if group.size > 1 else None
        with torch.inference_mode(), forward(sizes, None):
            out = experts.forward_modular(x, torch.full((5, 3), 0.25), ids.int())
        return far(out.float(), wanted)

    parts, wanted = load(0, far_apart=far_apart)
    for name, tensor in parts.items():
        experts.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    experts.quant_method.process_weights_after_loading(experts)
    said: dict[str, Any] = {"far": [distance(wanted)], "dtype": str(experts.w13_weight.dtype)}
    experts.quant_method.process_weights_after_loading(experts)  # an update in place: nothing new
    said["far"].append(distance(wanted))
    for seed in (50, 60):
        parts, wanted = load(seed, far_apart=far_apart)
        layerwise(experts, parts)
        said["far"].append(distance(wanted))
    try:
        experts.w13_weight.weight_loader(experts.w13_weight, parts["w13_weight"])
    except weft.errors.OutOfOrder as error:
        said["loading"] = str(error)
    some = {"w13_weight": parts["w13_weight"]}
    said["in part"] = told(layerwise, experts, some)
    said["wide"] = "" if far_apart else told(layerwise, experts, load(70, far_apart=True)[0])
    leave()
    return said


@pytest.mark.parametrize(("count", "far_apart"), [(1, False), (2, False), (2, True)])
def test_gpt_oss_in_mxfp4(ranks: Any, count: int, far_apart: bool) -> None:
    """Packed, or FP8 where a row's powers are far apart; tokens are rounded to FP8 either way."""
    for said in ranks(count, "cpu")(gpt_oss, far_apart):
        assert all(1e-4 < each < 0.05 for each in said["far"]), said["far"]
        assert said["dtype"] == ("torch.float8_e4m3fn" if far_apart else "torch.uint8")
        assert "experts.w13_weight is in weft's order, and the engine loads" in said["loading"]
        assert "loaded again in part: w13_weight are new" in said["in part"]
        assert far_apart or "and is served as [" in said["wide"]


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


def reloaded(group: weft.Group, form: str, redundant: int) -> dict[str, float]:
    """Every way in which vLLM loads weights again, and in which EPLB moves them, one by one."""
    worker, x = Worker(group, form, redundant=redundant), tokens(6, group.rank)
    errors = {"loaded once": far(worker.step(x, [6, 6]), alone(x))}
    ways = ["in place", "layerwise", "layerwise"] + ["replaced", "layerwise"] * (form == "block")
    for turn, how in enumerate(ways):
        shift = 7 + turn
        for layer in range(2):
            worker.reload(layer, shift, how)
        errors[f"{turn}: {how}"] = far(worker.step(x, [6, 6]), alone(x, shift=shift))
    if form == "block":  # graphs hold the addresses
        engine: Any = sys.modules["weft.plugins.vllm.engine"]
        for served in engine._blocks._served.values():
            for name, tensor in served.tensors.items():
                assert getattr(served.layer.module, name).data_ptr() == tensor.data_ptr()
    leave()
    return errors


@FORMS
@pytest.mark.parametrize("redundant", [0, 2])
def test_weights_that_are_loaded_again_are_served(ranks: Any, form: str, redundant: int) -> None:
    """No pass uses weights of an earlier load; with `redundant`, ids are physical (EPLB)."""
    for errors in ranks(2, "cpu")(reloaded, form, redundant):
        assert max(errors.values()) < CLOSE, errors


def divided(group: weft.Group) -> list[int]:
    """Return `rows` of every round of a batch that the largest round does not hold."""
    worker, rows = Worker(group, "exchange", layers=1), []
    around = worker.runners[0].routed_experts.quant_method.moe_kernel.impl.prepare_finalize
    dispatch = around.all_to_all.dispatch

    def spy(*args: Any, **kwargs: Any) -> Any:
        rows.append(kwargs["rows"])
        return dispatch(*args, **kwargs)

    around.all_to_all.dispatch = spy
    worker.step(tokens(40, group.rank), [40, 40])
    leave()
    return rows


def test_the_last_round_has_as_many_rows_as_are_left(ranks: Any) -> None:
    """More would be sent, received and multiplied for nothing."""
    assert ranks(2, "cpu")(divided) == [[32, 8], [32, 8]]


def lost(group: weft.Group) -> list[str]:
    """Rank 1 is killed, and rank 0 runs a pass with it."""
    from weft.plugins.vllm import engine

    worker, kept = Worker(group, "exchange", TIMEOUT="600"), Kept()
    worker.step(torch.zeros(2, HIDDEN), [2, 2])
    assert engine._blocks is not None
    assert engine._blocks.watch is not None
    engine._blocks.watch.close()  # what the pass itself logs
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(weft.errors.PeerDied):
        worker.step(torch.zeros(2, HIDDEN), [2, 2])
    lines = kept.lines
    leave()
    return lines


def test_a_pass_with_a_dead_rank_names_it() -> None:
    """vLLM's traceback is one among those of all ranks; this line says which rank ended."""
    found = weft.launch(lost, ranks=2, tolerate_deaths=True, timeout=600.0)
    assert any("PeerDied" in line and "rank 1" in line for line in found[0]), found[0]


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
    experts.w13_weight.data = experts.w13_weight.data[:, :-1]
    said["other shape"] = told(experts.quant_method.process_weights_after_loading, experts)
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
        assert "has other tensors than when it was loaded (w13_weight)" in said["other tensors"]
        assert "w13_weight was loaded again as [4, 255, 128]" in said["other shape"]
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
