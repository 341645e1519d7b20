# SPDX-License-Identifier: Apache-2.0
"""Layers of the stand-in on CPU ranks with weft, compared with plain torch in one process."""

import logging
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.baseline import shares_mapped
from tests.plugins.standins import (
    CLOSE,
    EXPERTS,
    Kept,
    alone,
    clamped_swiglu,
    drawn,
    error_of,
    max_relative_difference,
    tokens,
)
from tests.plugins.vllm.workers import Worker, config_of, enter, launch_cases, leave
from weft.gemm import quantize_mxfp4
from weft.gemm.mxfp4 import dequantize_mxfp4
from weft.plugins import blocks
from weft.plugins.vllm import engine

FORMS = ("block", "exchange")
# Tokens of each rank; the limits of the stand-in's flags are 4 in decode and 32 in prefill.
BATCHES = {1: ([3], [40]), 2: ([3, 1], [0, 4], [0, 0], [5, 40], [70, 0], [33, 33])}


def built() -> list[Any]:
    """Return the workspaces of this process."""
    assert engine._blocks is not None
    return engine._blocks.list_operators()


def serve(group: weft.Group, form: str, method: str) -> tuple[float, int, list[str]]:
    kept = Kept(logging.INFO)
    worker, result = Worker(group, form, method), []
    for seed, sizes in enumerate(BATCHES[group.size]):
        x = tokens(sizes[group.rank], 10 * seed + group.rank)
        result.append(worker.distance(x, sizes if group.size > 1 else None))
    return max(result), len(built()), kept.lines


@pytest.mark.parametrize("count", [1, 2])
def test_batches_of_every_size_are_served(ranks: Any, count: int) -> None:
    """Layers share workspaces; rank 0 logs what is served.

    Rows that vLLM quantises travel in FP8 with their scales, and the plug-in weighs the results.
    """
    calls = [(serve, form, "") for form in FORMS] + [(serve, "exchange", "fp8")] * (count > 1)
    results = launch_cases(ranks, count, *calls)
    for (_, form, method), result in zip(calls, results, strict=True):
        for error, workspaces, _ in result:
            assert 1e-4 < error < 0.05 if method else error < CLOSE, (form, method)
            assert workspaces == (2 if form == "block" else 1)
        # benchmarks/vllm/variants.py looks for these words.
        logged = f"weft runs MoE layers of vLLM on {count} ranks, form {form}"
        assert any(line.startswith(logged) for line in result[0][2])


SIZES = {"hidden_dim": 160, "intermediate_size_per_partition": 96}  # padded to 256 and 128


def serve_gpt_oss(group: weft.Group, far_apart: bool) -> list[float]:
    """Serve a layer of MXFP4 experts with biases and interleaved rows of gate and up."""
    vllm = enter("block")
    vllm.GroupCoordinator.of_experts = vllm.GroupCoordinator(group.process_group())
    activation = SimpleNamespace(value="swigluoai")
    config = config_of(
        group, **SIZES, in_dtype=torch.bfloat16, activation=activation, has_bias=True
    )
    experts = vllm.GptOssRoutedExperts("experts", config, vllm.GptOssMxfp4MoEMethod)
    each = EXPERTS // group.size
    own = slice(group.rank * each, (group.rank + 1) * each)
    x, chosen = drawn((5, 160), group.rank).bfloat16(), torch.full((5, 3), 0.25)
    ids = torch.arange(15).view(5, 3).remainder(EXPERTS)

    def draw(seed: int, *, far_apart: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return this rank's tensors as a checkpoint has them, and the layer's result for x."""
        whole: dict[str, torch.Tensor] = {}
        packed: dict[str, torch.Tensor] = {}
        for name, rows, columns in (("w13", 192, 160), ("w2", 160, 96)):
            weights = drawn((EXPERTS, rows, columns), rows + seed)
            if far_apart:  # more than the 14 powers that a packed row has
                weights[:, :, :32] *= 2.0**-20
            values, scales = quantize_mxfp4(weights)
            biases = drawn((EXPERTS, rows), rows + 1 + seed).bfloat16()
            whole |= {name: dequantize_mxfp4(values, scales), f"{name}_bias": biases.float()}
            packed |= {f"{name}_weight": values, f"{name}_weight_scale": scales}
            packed |= {f"{name}_bias": biases}
        gate_up, bias = (
            torch.cat((whole[name][:, ::2], whole[name][:, 1::2]), 1).float()
            for name in ("w13", "w13_bias")
        )
        more: dict[str, Any] = {
            "gate_up_bias": bias,
            "down_bias": whole["w2_bias"],
            "gating": clamped_swiglu(7.0),
        }
        expected = weft.reference.moe_layer(x, ids, chosen, gate_up, whole["w2"], **more)
        return {name: tensor[own].clone() for name, tensor in packed.items()}, expected

    def distance(expected: torch.Tensor) -> float:
        with torch.inference_mode(), vllm.forward([5] * group.size, None):
            out = experts.forward_modular(x, chosen, ids.int())
        return max_relative_difference(out.float(), expected)

    parts, expected = draw(0, far_apart=far_apart)
    for name, tensor in parts.items():
        experts.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    errors = []
    for _ in range(2):  # the second one is an update in place: nothing new
        experts.quant_method.process_weights_after_loading(experts)
        errors.append(distance(expected))
    weight = experts.w13_weight
    assert weight.dtype == (torch.float8_e4m3fn if far_apart else torch.uint8)
    for seed in (50, 60):
        parts, expected = draw(seed, far_apart=far_apart)
        vllm.layerwise(experts, parts)
        errors.append(distance(expected))
    error = error_of(weight.weight_loader, weight, parts["w13_weight"])
    assert (
        "experts.w13_weight is in weft's row order or format, but this load is in the engine's"
        in error
    )
    assert engine._blocks is not None
    assert engine._blocks.restore([experts]) == ([] if far_apart else [experts])
    if not far_apart:  # the engine's tensors again, for loads in place of some of them or none
        for name in ("w13", "w2"):
            pair = f"{name}_weight", f"{name}_weight_scale"
            held = dequantize_mxfp4(*(getattr(experts, part).data for part in pair))
            assert torch.equal(held, dequantize_mxfp4(*(parts[part] for part in pair)))
            assert torch.equal(getattr(experts, f"{name}_bias").data, parts[f"{name}_bias"])
        engine._blocks.reload_all()
        errors.append(distance(expected))
        engine._blocks.restore([experts])
        parts, expected = draw(80, far_apart=False)
        for name, tensor in parts.items():
            getattr(experts, name).data.copy_(tensor)
        engine._blocks.reload_all()
        errors.append(distance(expected))
    some = {"w13_weight": parts["w13_weight"]}
    assert "reloaded in part: w13_weight are new" in error_of(vllm.layerwise, experts, some)
    if not far_apart:
        wide = draw(70, far_apart=True)[0]
        assert "but was [" in error_of(vllm.layerwise, experts, wide)
    else:
        config.moe_parallel_config.enable_eplb = True
        moved = vllm.GptOssRoutedExperts("moved", config, vllm.GptOssMxfp4MoEMethod)
        for name, tensor in draw(0, far_apart=True)[0].items():
            moved.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        load = moved.quant_method.process_weights_after_loading
        assert "remove --enable-eplb" in error_of(load, moved)
    return errors


def test_gpt_oss_in_mxfp4(ranks: Any) -> None:
    """Weights are packed, or FP8 if a row's range is too large; tokens are FP8 in both cases."""
    results = launch_cases(ranks, 1, (serve_gpt_oss, False))
    results += launch_cases(ranks, 2, (serve_gpt_oss, False), (serve_gpt_oss, True))
    for errors in (errors for result in results for errors in result):
        assert all(1e-4 < each < 0.05 for each in errors), errors


def pad(group: weft.Group, form: str, by_router: bool) -> float:
    worker, result = Worker(group, form), 0.0
    kept, engine.PADDED_BY_ROUTER = engine.PADDED_BY_ROUTER, by_router
    for size, real in ((4, 2), (40, 35)):  # one round, and two
        x, padding = tokens(size, group.rank), torch.arange(64) >= real  # of a larger buffer
        want = alone(x, real=None if by_router else real)
        result = max(result, max_relative_difference(worker.step(x, [size, size], padding), want))
    engine.PADDED_BY_ROUTER = kept
    return result


def test_rows_that_pad_a_graph_go_to_no_expert(ranks: Any) -> None:
    """The plug-in ensures it in 0.26.0; later routers do it themselves."""
    calls = [(pad, form, by_router) for form in FORMS for by_router in (False, True)]
    assert max(map(max, launch_cases(ranks, 2, *calls))) < CLOSE


def reload(group: weft.Group, form: str, redundant: int) -> dict[str, float]:
    """Load weights again in each of vLLM's ways, and one by one, as EPLB moves them."""
    worker, x = Worker(group, form, redundant=redundant), tokens(6, group.rank)
    errors = {"loaded once": worker.distance(x, [6, 6])}
    ways = ["in place", "layerwise", "layerwise"] + ["replaced", "layerwise"] * (form == "block")
    for turn, how in enumerate(ways):
        for layer in range(2):
            worker.reload(layer, 7 + turn, how)
        errors[f"{turn}: {how}"] = worker.distance(x, [6, 6], shift=7 + turn)
    assert engine._blocks is not None
    for served in engine._blocks._layers.values():  # of form block; graphs hold the addresses
        for name, tensor in served.tensors.items():
            assert getattr(served.layer.module, name).data_ptr() == tensor.data_ptr()
    return errors


def test_weights_that_are_loaded_again_are_served(ranks: Any) -> None:
    """No pass uses weights of an earlier load; with `redundant`, ids are physical (EPLB)."""
    calls = [(reload, form, redundant) for form in FORMS for redundant in (0, 2)]
    for call, results in zip(calls, launch_cases(ranks, 2, *calls), strict=True):
        for errors in results:
            assert max(errors.values()) < CLOSE, (call, errors)


def sleep_mode(group: weft.Group, form: str) -> float:
    """Sleep at both levels, update weights while they alone are awake, and wake up.

    The thread that loads allocates nothing of the operators: level 2 discards its allocations.
    """
    vllm, threads = enter(form), set[str]()
    vllm.CURRENT.model_config.enable_sleep_mode = True
    module: Any = blocks
    create = module.lease

    def spy(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread().name)
        return create(*args, **kwargs)

    module.lease = spy
    worker, x = Worker(group, form), tokens(6, group.rank)
    module.lease = create
    assert threading.main_thread().name not in threads
    assert threads
    gpu_worker, errors = vllm.Worker(), [worker.distance(x, [6, 6])]
    for turn, level in enumerate((1, 2, 2)):
        gpu_worker.sleep(level)
        gpu_worker.sleep(level=level)  # does nothing more
        assert shares_mapped() == 0
        assert "asleep: call group.wake() first" in error_of(worker.step, x, [6, 6])
        if turn < 2:
            gpu_worker.wake_up(tags=["weights"])
            for layer in range(2):
                worker.reload(layer, 7 + turn, ("in place", "layerwise")[turn])
            assert shares_mapped() == 0
            gpu_worker.wake_up(["kv_cache"])
        else:
            gpu_worker.wake_up()
        errors.append(worker.distance(x, [6, 6], shift=7 + min(turn, 1)))
    vllm.CURRENT.model_config.enable_sleep_mode = False
    return max(errors)


def test_weft_sleeps_with_vllm(ranks: Any) -> None:
    assert max(map(max, launch_cases(ranks, 2, *((sleep_mode, form) for form in FORMS)))) < CLOSE


def record_rounds(group: weft.Group) -> list[int]:
    """Return `rows` of every round of a batch that is larger than one round."""
    worker, rows = Worker(group, "exchange", layers=1), []
    around = worker.layers[0].quant_method.moe_kernel.impl.prepare_finalize
    dispatch = around.all_to_all.dispatch

    def spy(*args: Any, **kwargs: Any) -> Any:
        rows.append(kwargs["rows"])
        return dispatch(*args, **kwargs)

    around.all_to_all.dispatch = spy
    worker.step(tokens(40, group.rank), [40, 40])
    return rows


def use_two_hosts(group: weft.Group, form: str) -> str:
    os.environ["WEFT_HOST"] = f"host-{group.rank}"
    error = error_of(Worker, group, form)
    del os.environ["WEFT_HOST"]
    return error


def misuse(group: weft.Group) -> dict[str, str]:
    """Return the error of each misuse, by the text that it must have."""
    worker, x = Worker(group, "block"), tokens(2, group.rank)
    experts = worker.layers[0]
    errors = {
        "did not report the ranks' token counts": error_of(worker.step, x, None),
        "rows is 1, but this rank has 2 tokens": error_of(worker.step, x, [1, 1]),
    }
    experts.w13_weight.data = experts.w13_weight.data.clone()
    text = "were replaced after loading (w13_weight)"
    errors[text] = error_of(worker.step, x, [2, 2])
    load = experts.quant_method.process_weights_after_loading
    experts.w13_weight.data = experts.w13_weight.data[:, :-1]
    errors["w13_weight was reloaded as [4, 255, 128]"] = error_of(load, experts)
    engine.close()
    text = "layers.0.mlp.experts runs before vLLM has loaded its weights"
    errors[text] = error_of(worker.step, x, [2, 2])
    leave()
    worker = Worker(group, "exchange")
    worker.vllm.FusedMoEKernel, experts = (
        lambda *_: SimpleNamespace(impl=object()),
        worker.layers[0],
    )
    load = experts.quant_method.process_weights_after_loading
    errors["has no modular kernel but object"] = error_of(load, experts)
    return errors


def test_rounds_and_refusals(ranks: Any) -> None:
    calls = [(record_rounds,), (misuse,), *((use_two_hosts, form) for form in FORMS)]
    rows, misuses, *hosts = launch_cases(ranks, 2, *calls)
    assert rows == [[32, 8]] * 2  # the last round has as many rows as are left
    for errors in misuses:
        assert {text: error for text, error in errors.items() if text not in error} == {}
    for form, results in zip(FORMS, hosts, strict=True):
        text = f"WEFT_VLLM={form} needs ranks on one host, but they are on 2: keep expert-parallel"
        assert all(text in error for error in results)


def run_stage(group: weft.Group, form: str) -> float:
    """Ranks 0 and 1 are the first pipeline stage, 2 and 3 the second, each with an EP group."""
    group.process_group()
    stages = [torch.distributed.new_group([first, first + 1]) for first in (0, 2)]
    pair = weft.Group.from_torch(stages[group.rank // 2], device=group.device)
    worker = Worker(pair, form)
    return max(  # one stage may be ahead of the other
        worker.distance(tokens(sizes[pair.rank], 10 * turn + group.rank), sizes)
        for turn, sizes in enumerate(([3, 1], [0, 40]))
    )


def test_pipeline_stages_have_groups_beside_each_other(ranks: Any) -> None:
    assert max(map(max, launch_cases(ranks, 4, *((run_stage, form) for form in FORMS)))) < CLOSE
