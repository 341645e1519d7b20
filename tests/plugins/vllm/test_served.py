# SPDX-License-Identifier: Apache-2.0
"""Layers of the stand-in on CPU ranks with weft, compared with plain torch in one process."""

from __future__ import annotations

import ast
import importlib
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
from tests.plugins.standins import (
    CLOSE,
    Kept,
    clamped_swiglu,
    error_of,
    launch_each,
    max_relative_difference,
)
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

FORMS = ("block", "exchange")
# Tokens of each rank; the limits of the stand-in's flags are 4 in decode and 32 in prefill.
BATCHES = {1: ([3], [40]), 2: ([3, 1], [0, 4], [0, 0], [5, 40], [70, 0], [33, 33])}


def built() -> list[Any]:
    """Return the workspaces of this process."""
    operators: list[Any] = sys.modules["weft.plugins.vllm.engine"]._blocks.list_operators()
    return operators


def serve(group: weft.Group, form: str, method: str) -> tuple[float, int, list[str]]:
    kept = Kept(logging.INFO)
    worker, result = Worker(group, form, method), []
    for seed, sizes in enumerate(BATCHES[group.size]):
        x = tokens(sizes[group.rank], 10 * seed + group.rank)
        result.append(
            max_relative_difference(worker.step(x, sizes if group.size > 1 else None), alone(x))
        )
    workspaces = len(built())
    leave()
    return max(result), workspaces, kept.lines


def drafted(group: weft.Group, form: str) -> tuple[float, int, list[str]]:
    """A draft model is made after the target's, and runs between its passes."""
    target, result = Worker(group, form), []
    draft = Worker(group, form, layers=1)
    for turn, sizes in enumerate(([6, 4], [2, 0], [40, 3])):
        x = tokens(sizes[group.rank], 10 * turn + group.rank)
        result.append(max_relative_difference(target.step(x, sizes), alone(x)))
        few = [min(size, 2) for size in sizes]
        x = tokens(few[group.rank], 10 * turn + group.rank)
        result.append(max_relative_difference(draft.step(x, few), alone(x, layers=1)))
    workspaces = len(built())
    leave()
    return max(result), workspaces, []


@pytest.mark.parametrize("count", [1, 2])
def test_batches_of_every_size_are_served(ranks: Any, count: int) -> None:
    """Layers, and those of a draft model, share workspaces; rank 0 logs what is served.

    Rows that vLLM quantises travel in FP8 with their scales, and the plug-in weighs the results.
    """
    calls: list[tuple[Any, ...]] = [(serve, form, "") for form in FORMS]
    if count == 2:
        calls += [*((drafted, form) for form in FORMS), (serve, "exchange", "fp8")]
    results = launch_each(ranks, count, *calls)
    for (body, form, *method), result in zip(calls, results, strict=True):
        for error, workspaces, _ in result:
            assert 1e-4 < error < 0.05 if "fp8" in method else error < CLOSE, (body, form)
            assert workspaces == (2 if form == "block" else 1)
        # benchmarks/vllm/variants.py looks for these words.
        logged = f"weft runs MoE layers of vLLM on {count} ranks, form {form}"
        if body is serve:
            assert any(line.startswith(logged) for line in result[0][2])


SIZES = {"hidden_dim": 160, "intermediate_size_per_partition": 96}  # padded to 256 and 128


def gpt_oss(group: weft.Group, far_apart: bool) -> tuple[list[float], str, dict[str, str]]:
    """Serve a layer of MXFP4 experts with biases and interleaved rows of gate and up."""
    enter("block")
    vllm: Any = importlib.import_module("vllm")
    vllm.GroupCoordinator.of_experts = vllm.GroupCoordinator(group.process_group())
    layerwise = vllm.layerwise
    activation = SimpleNamespace(value="swigluoai")
    config = config_of(
        group, **SIZES, in_dtype=torch.bfloat16, activation=activation, has_bias=True
    )
    experts = vllm.GptOssRoutedExperts("experts", config, vllm.GptOssMxfp4Config())
    each = EXPERTS // group.size
    own = slice(group.rank * each, (group.rank + 1) * each)
    x = scaled((5, 160), group.rank).bfloat16()
    ids = torch.arange(15).view(5, 3).remainder(EXPERTS)

    def load(seed: int, *, far_apart: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return this rank's tensors as a checkpoint has them, and the layer's result for x."""
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

        def gate_first(name: str) -> torch.Tensor:
            return torch.cat((whole[name][:, ::2], whole[name][:, 1::2]), 1).float()

        expected = weft.reference.moe_layer(
            *(x, ids, torch.full((5, 3), 0.25), gate_first("w13"), whole["w2"]),
            gate_up_bias=gate_first("w13_bias"),
            down_bias=whole["w2_bias"].float(),
            gating=clamped_swiglu(7.0),
        )
        return {name: tensor[own].clone() for name, tensor in packed.items()}, expected

    def distance(expected: torch.Tensor) -> float:
        sizes = [5] * group.size if group.size > 1 else None
        with torch.inference_mode(), vllm.forward(sizes, None):
            out = experts.forward_modular(x, torch.full((5, 3), 0.25), ids.int())
        return max_relative_difference(out.float(), expected)

    parts, expected = load(0, far_apart=far_apart)
    for name, tensor in parts.items():
        experts.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    experts.quant_method.process_weights_after_loading(experts)
    errors, dtype = [distance(expected)], str(experts.w13_weight.dtype)
    experts.quant_method.process_weights_after_loading(experts)  # an update in place: nothing new
    errors.append(distance(expected))
    for seed in (50, 60):
        parts, expected = load(seed, far_apart=far_apart)
        layerwise(experts, parts)
        errors.append(distance(expected))
    weight, some = experts.w13_weight, {"w13_weight": parts["w13_weight"]}
    texts = {
        "experts.w13_weight is in weft's row order, but the engine loads": error_of(
            weight.weight_loader, weight, parts["w13_weight"]
        ),
        "reloaded in part: w13_weight are new": error_of(layerwise, experts, some),
    }
    if not far_apart:
        wide = load(70, far_apart=True)[0]
        texts["but was ["] = error_of(layerwise, experts, wide)
    leave()
    return errors, dtype, texts


def test_gpt_oss_in_mxfp4(ranks: Any) -> None:
    """Weights are packed, or FP8 if a row's range is too large; tokens are FP8 in both cases."""
    one = launch_each(ranks, 1, (gpt_oss, False))
    for far_apart, results in zip(
        (False, False, True),
        [*one, *launch_each(ranks, 2, (gpt_oss, False), (gpt_oss, True))],
        strict=True,
    ):
        for errors, dtype, texts in results:
            assert all(1e-4 < each < 0.05 for each in errors), errors
            assert dtype == ("torch.float8_e4m3fn" if far_apart else "torch.uint8")
            assert {text: error for text, error in texts.items() if text not in error} == {}


def padded(group: weft.Group, form: str, release: str) -> float:
    from weft.plugins.vllm import engine

    worker, result = Worker(group, form), 0.0
    kept, engine.PADDED_BY_ROUTER = engine.PADDED_BY_ROUTER, release != "0.26.0"
    for size, real in ((4, 2), (40, 35)):  # one round, and two
        x, padding = tokens(size, group.rank), torch.arange(64) >= real  # of a larger buffer
        want = alone(x, real=real if release == "0.26.0" else None)
        result = max(result, max_relative_difference(worker.step(x, [size, size], padding), want))
    engine.PADDED_BY_ROUTER = kept
    leave()
    return result


def test_rows_that_pad_a_graph_go_to_no_expert(ranks: Any) -> None:
    """The plug-in ensures it in 0.26.0; later routers do it themselves."""
    calls = [(padded, form, release) for form in FORMS for release in ("0.26.0", "0.32.0")]
    for call, errors in zip(calls, launch_each(ranks, 2, *calls), strict=True):
        assert max(errors) < CLOSE, call


def reloaded(group: weft.Group, form: str, redundant: int) -> dict[str, float]:
    """Load weights again in each of vLLM's ways, and one by one, as EPLB moves them."""
    worker, x = Worker(group, form, redundant=redundant), tokens(6, group.rank)
    errors = {"loaded once": max_relative_difference(worker.step(x, [6, 6]), alone(x))}
    ways = ["in place", "layerwise", "layerwise"] + ["replaced", "layerwise"] * (form == "block")
    for turn, how in enumerate(ways):
        shift = 7 + turn
        for layer in range(2):
            worker.reload(layer, shift, how)
        errors[f"{turn}: {how}"] = max_relative_difference(
            worker.step(x, [6, 6]), alone(x, shift=shift)
        )
    if form == "block":  # graphs hold the addresses
        engine: Any = sys.modules["weft.plugins.vllm.engine"]
        for served in engine._blocks._layers.values():
            for name, tensor in served.tensors.items():
                assert getattr(served.layer.module, name).data_ptr() == tensor.data_ptr()
    leave()
    return errors


def test_weights_that_are_loaded_again_are_served(ranks: Any) -> None:
    """No pass uses weights of an earlier load; with `redundant`, ids are physical (EPLB)."""
    calls = [(reloaded, form, redundant) for form in FORMS for redundant in (0, 2)]
    for call, results in zip(calls, launch_each(ranks, 2, *calls), strict=True):
        for errors in results:
            assert max(errors.values()) < CLOSE, (call, errors)


def divided(group: weft.Group) -> list[int]:
    """Return `rows` of every round of a batch that is larger than one round."""
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


def set_up(group: weft.Group) -> list[tuple[str, str, int]]:
    more: dict[str, Any] = {"DECODE": "throughput", "OVERLAP": "none", "PREFILL_TOKENS": "7"}
    worker = Worker(group, "block", **more)
    worker.step(tokens(9, group.rank), [9, 9])
    result = [(each.mode, each.overlap, each.exchange.max_tokens) for each in built()]
    leave()
    return result


def on_two_hosts(group: weft.Group, form: str) -> str:
    os.environ["WEFT_HOST"] = f"host-{group.rank}"
    error = error_of(Worker, group, form)
    del os.environ["WEFT_HOST"]
    leave()
    return error


def misuse(group: weft.Group) -> dict[str, str]:
    """Return the error of each misuse, by the text that it must have."""
    worker, x = Worker(group, "block"), tokens(2, group.rank)
    engine: Any = sys.modules["weft.plugins.vllm.engine"]
    experts = worker.runners[0].routed_experts
    errors = {
        "did not report the ranks' token counts": error_of(worker.step, x, None),
        "rows is 1, but this rank has 2 tokens": error_of(worker.step, x, [1, 1]),
    }
    experts.w13_weight.data = experts.w13_weight.data.clone()
    text = "were replaced after loading (w13_weight)"
    errors[text] = error_of(worker.step, x, [2, 2])
    experts.w13_weight.data = experts.w13_weight.data[:, :-1]
    text = "w13_weight was reloaded as [4, 255, 128]"
    errors[text] = error_of(experts.quant_method.process_weights_after_loading, experts)
    engine.close()
    text = "layers.0.mlp.experts runs before vLLM has loaded its weights"
    errors[text] = error_of(worker.step, x, [2, 2])
    leave()
    worker = Worker(group, "exchange")
    experts, vllm = worker.runners[0].routed_experts, importlib.import_module("vllm")
    vllm.FusedMoEKernel = lambda *_: SimpleNamespace(impl=object())  # type: ignore[attr-defined]
    text = "has no modular kernel but object"
    errors[text] = error_of(experts.quant_method.process_weights_after_loading, experts)
    leave()
    return errors


def test_settings_rounds_and_refusals(ranks: Any) -> None:
    calls: list[tuple[Any, ...]] = [(divided,), (set_up,), (misuse,)]
    calls += [(on_two_hosts, form) for form in FORMS]
    rows, sizes, misuses, *hosts = launch_each(ranks, 2, *calls)
    assert rows == [[32, 8]] * 2  # the last round has as many rows as are left
    assert sizes == [[("throughput", "none", 4), ("throughput", "none", 7)]] * 2
    for errors in misuses:
        assert {text: error for text, error in errors.items() if text not in error} == {}
    for form, results in zip(FORMS, hosts, strict=True):
        text = (
            f"InvalidArgument: WEFT_VLLM={form} needs ranks on one host, but they are on 2: keep "
            "expert-parallel ranks within one host, without --nnodes, or unset WEFT_VLLM"
        )
        assert results == [text] * 2


def staged(group: weft.Group, form: str) -> float:
    """Ranks 0 and 1 are the first pipeline stage, 2 and 3 the second, each with an EP group."""
    group.process_group()
    stages = [torch.distributed.new_group([first, first + 1]) for first in (0, 2)]
    pair = weft.Group.from_torch(stages[group.rank // 2], device=group.device)
    worker, result = Worker(pair, form), 0.0
    for turn, sizes in enumerate(([3, 1], [0, 40])):  # one stage may be ahead of the other
        x = tokens(sizes[pair.rank], 10 * turn + group.rank)
        result = max(result, max_relative_difference(worker.step(x, sizes), alone(x)))
    leave()
    return result


def test_pipeline_stages_have_groups_beside_each_other(ranks: Any) -> None:
    for errors in launch_each(ranks, 4, *((staged, form) for form in FORMS)):
        assert max(errors) < CLOSE


def lose_rank_1(group: weft.Group, path: str, form: str) -> None:
    """Rank 1 is killed between two steps; rank 0 makes no further step."""
    from weft.plugins import faults
    from weft.plugins.vllm import engine

    ended: list[bool] = []
    engine.end_worker = lambda: ended.append(True)
    faults.GRACE_SECONDS = 0.0
    worker, kept = Worker(group, form, TIMEOUT="600"), Kept()
    worker.step(torch.zeros(2, HIDDEN), [2, 2])
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert engine._blocks is not None
    assert engine._blocks.watch is not None
    engine._blocks.watch._thread.join()
    Path(path).write_text(repr((ended, kept.lines)))


@pytest.mark.parametrize("form", FORMS)
def test_a_dead_rank_is_reported_and_ends_the_worker(ranks: Any, tmp_path: Path, form: str) -> None:
    """Also while no code of weft runs: a thread notices it, and a log line names the rank."""
    with pytest.raises(weft.errors.RankFailed):
        ranks(2, "cpu")(lose_rank_1, str(tmp_path / "found"), form)
    ended, lines = ast.literal_eval((tmp_path / "found").read_text())
    assert ended == [True]
    assert any("rank 1" in line and "ending this server" in line for line in lines)
