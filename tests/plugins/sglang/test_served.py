# SPDX-License-Identifier: Apache-2.0
"""Models of the stand-in on CPU ranks with weft, compared with plain torch in one process."""

import logging
import os
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

import weft
from tests.baseline import shares_mapped
from tests.plugins.sglang.server import (
    BLOCKS,
    Server,
    alone,
    enter,
    launch_cases,
    leave,
    replicated,
    sglang,
)
from tests.plugins.sglang.test_allreduce import refused
from tests.plugins.standins import (
    CLOSE,
    Kept,
    error_of,
    gate_weight,
    max_relative_difference,
    tokens,
)
from weft.plugins.sglang import engine

FORMS = ("block", "dispatcher")
# Tokens of each rank; the limits of the stand-in's flags are 4 in decode and 32 in prefill.
BATCHES = {
    1: ([4],),
    2: ([3, 1], [0, 4], [0, 0], [5, 40], [70, 0], [33, 33]),
    4: ([1, 2, 3, 4], [0, 0, 0, 1], [9, 0, 50, 2]),
}


def run_block(
    group: weft.Group, block: str, batches: Sequence[list[int]] = (), *,
    real: int | None = None, attention_ranks: int = 1, **more: Any,
) -> tuple[float, int]:  # fmt: skip
    """Return a model's distance from one process over its passes, and its workspaces.

    batches: tokens of each attention group, which its ranks share; real: rows without padding.
    """
    server, result = Server(group, block, attention_ranks=attention_ranks, **more), []
    for seed, counts in enumerate(batches or BATCHES[group.size]):
        own = counts[group.rank // attention_ranks] // attention_ranks
        x = tokens(own, 10 * seed + group.rank)
        out = server.step(x, counts, real)
        result.append(max_relative_difference(out, alone(x, block, real=real)))
    return max(result), len(server.workspaces)


LORA = {"enable_lora": True, "lora_target_modules": {"q_proj", "o_proj"}}
ALONE = ("nextn", "kimi_k3", "nemotron_h")  # a draft layer, and blocks that have one form
# By ranks: block, form, batches, and options of `run_block`. Every block in every form, with idle
# ranks and batches of several rounds; groups of two attention ranks; rows that pad a graph.
SERVED: dict[int, list[tuple[str, str, Any, dict[str, Any]]]] = {
    1: [("qwen3", form, (), {}) for form in FORMS],
    2: [
        *((block, form, (), {}) for block in BLOCKS for form in FORMS if block not in ALONE),
        *((block, "block", (), {}) for block in ALONE[1:]),
        ("qwen3", "block", ([2], [8], [130]), {"attention_ranks": 2}),
        *(("deepseek", form, ([4, 4],), {"real": 2}) for form in FORMS),
        ("qwen3", "block", ([6, 6],), LORA),
    ],
    4: [
        ("deepseek", "block", (), {}),
        ("gpt_oss", "dispatcher", (), {}),
        ("glm4", "block", ([4, 2], [0, 6], [64, 70]), {"attention_ranks": 2}),
    ],
}


@pytest.mark.parametrize("count", SERVED)
def test_models_are_served_as_in_one_process(ranks: Any, count: int) -> None:
    calls = [
        (partial(run_block, form=form, **more), block, sizes)
        for block, form, sizes, more in SERVED[count]
    ]
    for case, results in zip(SERVED[count], launch_cases(ranks, count, *calls), strict=True):
        for result, workspaces in results:
            assert result < CLOSE, case
            assert workspaces == (1 if case[1] == "dispatcher" else 2), case


def count_rounded(group: weft.Group) -> int:
    """Return the tokens that weft reserves for a rank with 2 or 3 of its group's 5."""
    Server(group, attention_ranks=2)
    sglang().STATE.counts = [5]
    return engine.get_max_tokens_over_ranks()


def update(group: weft.Group, form: str) -> float:
    """Serve with new tensors, as after a requantisation, then with values changed in place.

    Two experts have replicas, so ids are physical, as with EPLB.
    """
    server, x = Server(group, "qwen3", redundant=2, form=form), tokens(6, group.rank)
    errors = [server.distance(x, [6, 6], "qwen3")]
    for shift, replaces in ((7, True), (9, True), (11, False)):
        for block in server.runner.model.blocks:
            experts = block.experts
            for name in ("w13_weight", "w2_weight") if replaces else ():
                new = torch.empty_like(getattr(experts, name))
                setattr(experts, name, torch.nn.Parameter(new, requires_grad=False))
            sglang().fill(experts, experts.layer_id + shift)
        errors.append(server.distance(x, [6, 6], "qwen3", shift=shift))
    return max(errors)


def update_reordered(group: weft.Group, form: str) -> float:
    """Update layers whose rows weft reorders: in place, in new tensors, and not at all."""
    server, x = Server(group, "gpt_oss", form=form), tokens(6, group.rank)
    assert server.runner.regions == [("weights", False)] * (2 * (form == "block"))
    model, device = server.runner.model, torch.device("cpu")
    errors = [server.distance(x, [6, 6], "gpt_oss")]
    for turn, replaces in enumerate((False, True, False)):
        shift = 7 + turn
        sglang().DefaultModelLoader.restore_weights_before_loading(model, device)
        for block in model.blocks:
            experts = block.experts
            if replaces:
                for name, parameter in experts.named_parameters(recurse=False):
                    new = torch.nn.Parameter(torch.empty_like(parameter), requires_grad=False)
                    setattr(experts, name, new)
            sglang().fill(experts, experts.layer_id + shift)
        errors.append(server.distance(x, [6, 6], "gpt_oss", shift=shift))
        sglang().DefaultModelLoader.restore_weights_before_loading(model, device)
        errors.append(server.distance(x, [6, 6], "gpt_oss", shift=shift))
    if form == "block":
        parameter = model.blocks[0].experts.w13_weight
        text = error_of(parameter.weight_loader, parameter, x)
        assert "layer 0.w13_weight is in weft's row order or format" in text
        sglang().DefaultModelLoader.restore_weights_before_loading(model, device)
        assert not hasattr(parameter, "weight_loader")
    return max(errors)


EXPORTS = {
    "save_sharded_model": ("folder",),
    "save_remote_model": ("url",),
    "send_weights_to_remote_instance": ("host", "1", "group"),
}


def interrupt_updates(group: weft.Group, form: str) -> float:
    """Run forward passes and a capture while SGLang updates layers whose rows weft reorders."""
    server, x = Server(group, "gpt_oss", form=form), tokens(6, group.rank)
    model, device, runner = server.runner.model, torch.device("cpu"), server.runner
    loader, updater = sglang().DefaultModelLoader, sglang().WeightUpdater(model)

    def fill(shift: int) -> None:
        for block in model.blocks:
            sglang().fill(block.experts, block.experts.layer_id + shift)

    def copy_experts() -> list[tuple[str, torch.Tensor]]:
        return [(n, p.detach().clone()) for n, p in model.named_parameters() if ".experts." in n]

    loads = (
        lambda tensors: updater.update_weights_from_tensor(tensors, load_format="direct"),
        updater.load_weights_from_distributed,
    )
    errors = []
    for shift, load in enumerate(loads, 7):
        loader.restore_weights_before_loading(model, device)
        fill(shift)
        new = copy_experts()
        fill(0)
        errors.append(server.distance(x, [6, 6], "gpt_oss"))  # in the middle of the session
        load(new[:3])
        server.step(x, [6, 6])
        load(new[3:])
        errors.append(server.distance(x, [6, 6], "gpt_oss", shift=shift))
        loader.postprocess_weights(model, device)
        assert all(torch.equal(tensor, model.get_parameter(name)) for name, tensor in new)
        runner.graph_batch = server.batch(x, [6, 6])
        if form == "block":
            batch = server.batch(x, [6, 6])
            assert "this call bypasses the hook" in error_of(runner.run_model, batch)
        runner.init_decode_cuda_graph()
        errors.append(max_relative_difference(runner.captured, alone(x, "gpt_oss", shift=shift)))
        for export, arguments in EXPORTS.items():
            exporter = sglang().WeightExporter(model)
            server.step(x, [6, 6])
            getattr(exporter, export)(*arguments)
            assert all(torch.equal(tensor, exporter.saved[name]) for name, tensor in new), export
            errors.append(server.distance(x, [6, 6], "gpt_oss", shift=shift))
        loader.restore_weights_before_loading(model, device)
        fill(0)
    return max(errors)


def test_weights_that_sglang_replaces_or_moves_are_served(ranks: Any) -> None:
    bodies = update, update_reordered, interrupt_updates
    calls = [(body, form) for body in bodies for form in FORMS]
    for results in launch_cases(ranks, 2, *calls):
        assert max(results) < CLOSE


def release_memory(group: weft.Group, form: str) -> float:
    """Release tags one by one and together; weft sleeps from the first to the last of them."""
    server, x = Server(group, "qwen3", form=form), tokens(6, group.rank)
    updater, errors = sglang().SchedulerWeightUpdaterManager(), []
    for releases, resumes in (
        ([["kv_cache"], ["weights"]], [["weights"], ["kv_cache"]]),
        ([["kv_cache", "weights", "cuda_graph"]], [["cuda_graph"], ["kv_cache", "weights"]]),
    ):
        errors.append(server.distance(x, [6, 6], "qwen3"))
        for tags in releases:
            assert updater.release_memory_occupation(SimpleNamespace(tags=tags)) == "released"
            assert shares_mapped() == 0
        assert "asleep: call group.wake() first" in error_of(server.step, x, [6, 6])
        for tags in resumes:
            assert shares_mapped() == 0
            assert updater.resume_memory_occupation(SimpleNamespace(tags=tags)) == "resumed"
        assert shares_mapped() > 0
    return max(*errors, server.distance(x, [6, 6], "qwen3"))


def test_memory_is_released_and_resumed_with_sglangs(ranks: Any) -> None:
    for results in launch_cases(ranks, 2, *((release_memory, form) for form in FORMS)):
        assert max(results) < CLOSE


def set_up(group: weft.Group) -> tuple[float, list[Any]]:
    """A draft model of equal sizes takes no memory of its own."""
    for name, value in {"DECODE": "throughput", "OVERLAP": "none", "PREFILL_TOKENS": "7"}.items():
        os.environ[f"WEFT_SGLANG_{name}"] = value
    server, x = Server(group, "glm4"), tokens(9, group.rank)
    with torch.inference_mode():  # where SGLang runs, and may load
        draft = Server(group, "glm4", layers=1)
    result = [
        each.distance(x, [9, 9], "glm4", layers=layers)
        for each, layers in ((server, 2), (draft, 1), (server, 2))
    ]
    return max(result), [
        (each.mode, each.overlap, each.exchange.max_tokens) for each in server.workspaces
    ]


def draft_tokens(group: weft.Group, form: str) -> tuple[float, list[int]]:
    """A model whose experts have replicas, and its `nextn` layer, whose replicas are unused."""
    more: dict[str, Any] = {"redundant": 2, "speculative_num_draft_tokens": 3, "form": form}
    server, result = Server(group, "deepseek", **more), []
    draft = Server(group, "nextn", layers=1, **more)
    if group.rank == 1:  # it has the physical experts 5 to 9; 8 and 9 are replicas
        draft.runner.model.blocks[0].experts.w13_weight.data[3:] = 100.0
    for seed, counts in enumerate(([4, 12], [12, 0], [1, 40])):
        x = tokens(counts[group.rank], 10 * seed + group.rank)
        result.append(server.distance(x, counts, "deepseek"))
        result.append(draft.distance(x, counts, "deepseek", layers=1))
    return max(result), [getattr(each, "exchange", each).max_tokens for each in draft.workspaces]


def test_settings_and_draft_models(ranks: Any) -> None:
    """Decode workspaces have room for the 3 tokens that a request drafts."""
    calls = [(set_up,), (count_rounded,), *((draft_tokens, form) for form in FORMS)]
    both, rows, *drafts = launch_cases(ranks, 2, *calls)
    sizes = [("throughput", "none", 4), ("throughput", "none", 7)], [12, 32], [32]
    for results, expected in zip((both, *drafts), sizes, strict=True):
        assert all(error < CLOSE for error, _ in results)
        assert [built for _, built in results] == [expected] * 2
    assert rows == [3, 3]


def capture_experts(group: weft.Group) -> bool:
    """Whether the captured experts are those of this rank's tokens."""
    server = Server(group, "qwen3", enable_return_routed_experts=True)
    sglang().STATE.capturer = capturer = sglang().RoutedExpertsCapturer(layers=2)
    x = tokens((3, 5)[group.rank], group.rank)
    server.step(x, [3, 5])
    first = functional.linear(x, gate_weight(0)).topk(3).indices
    captured = capturer.get_local_slice(group.rank)
    return torch.equal(captured[:, 0], first) and int(captured.min()) >= 0


def serve_deterministically(group: weft.Group, **flags: Any) -> list[bool] | str:
    """Return whether each operator is batch-invariant, or an error."""
    with_flags = partial(Server, group, "qwen3", dtype=torch.bfloat16, **flags)
    if "form" in flags:
        return error_of(with_flags)
    return [each.workspace.options.batch_invariant for each in with_flags().workspaces]


def test_routed_experts_and_deterministic_inference(ranks: Any) -> None:
    flags: tuple[dict[str, Any], ...] = (
        {"enable_deterministic_inference": True},
        {},
        {"enable_deterministic_inference": True, "form": "dispatcher"},
    )
    calls = [(capture_experts,), *((partial(serve_deterministically, **each),) for each in flags)]
    captured, *served, refusals = launch_cases(ranks, 2, *calls)
    assert captured == [True] * 2
    assert served == [[[True] * 2] * 2, [[False] * 2] * 2]
    for error in refusals:
        assert "with weft's form 'dispatcher'" in error


def misuse(group: weft.Group) -> dict[str, str]:
    """Return the error of each misuse, by the text that it must have."""
    server, x = Server(group, "qwen3"), tokens(2, group.rank)
    experts = server.runner.model.blocks[0].experts
    ids = torch.zeros(2, 3, dtype=torch.int32)
    chosen = sglang().StandardTopKOutput(torch.ones(2, 3), ids, x)
    errors = {
        "did not report the ranks' token counts": error_of(server.step, x, None),
        "rows is 1, but this rank has 2 tokens": error_of(server.step, x, [1, 1]),
        "layer 0 were called directly": error_of(experts, x, chosen),
    }
    experts.w13_weight.data = experts.w13_weight.data[:, :-1].clone()
    errors["layer 0.w13_weight was reloaded as [4, "] = error_of(server.step, x, [2, 2])
    leave()
    enter()
    from weft.plugins.sglang.dispatcher import BlockDispatcher

    early = SimpleNamespace(experts=SimpleNamespace(dispatcher=BlockDispatcher(3)), layer_id=3)
    errors["layer 3 runs before weft's hook"] = error_of(engine.run_moe_block, None, early, x, None)
    return errors


def refuse_block(group: weft.Group) -> dict[str, str]:
    """A block whose forward may reduce or add what weft already does, and a useless flag."""
    standin = enter()
    forward = {"forward": lambda self, hidden_states, forward_batch=None: hidden_states}
    standin.Another = type("Another", (standin.Qwen3MoeSparseMoeBlock,), forward)
    BLOCKS["another"] = "Another"
    stock = partial(Server, backend="none", elastic_ep_backend="weft")
    dense = partial(Server, layers=0)
    return {
        "Model has no MoE layers that weft runs: remove --moe-a2a-backend": error_of(dense, group),
        "Another of Model is not among the MoE blocks that weft supports": error_of(
            Server, group, "another"
        ),
        "--elastic-ep-backend weft needs --moe-a2a-backend weft": error_of(stock, group),
    }


def run_stock(group: weft.Group) -> dict[str, str]:
    """With another backend the hooks do nothing."""
    server = Server(group, "qwen3", backend="none")
    assert engine._blocks is None
    with pytest.raises(AssertionError) as ran:
        server.step(tokens(1, 0), [1, 1])
    return {"the stock forward ran": str(ran.value)}


def test_unsupported_models_are_refused(ranks: Any) -> None:
    bodies = misuse, refuse_block, run_stock
    for results in launch_cases(ranks, 2, *((body,) for body in bodies)):
        for errors in results:
            assert {text: error for text, error in errors.items() if text not in error} == {}


# Two hosts (--nnodes 2): ranks with WEFT_HOSTs.


def on_two_hosts(group: weft.Group, body: Any, *args: Any) -> Any:
    os.environ["WEFT_HOST"] = f"host-{2 * group.rank // group.size}"
    return body(group, *args)


def run_logged(group: weft.Group, form: str) -> float:
    kept = Kept(logging.INFO)
    result, _ = run_block(group, "deepseek", form=form)
    assert group.rank or any(line.endswith("hosts: 2") for line in kept.lines)
    return result


def refuse_recovery(group: weft.Group) -> str:
    return error_of(replicated, group)


@pytest.mark.parametrize("count", [2, 4])
def test_two_hosts_are_served(ranks: Any, count: int) -> None:
    """Test one rank per host, where weights move between hosts, and two."""
    bodies = (run_logged, update) if count == 2 else (run_logged,)
    calls = [(on_two_hosts, body, form) for body in bodies for form in FORMS]
    refusals = (on_two_hosts, refused, "served"), (on_two_hosts, refuse_recovery)
    *results, allreduce, elastic = launch_cases(ranks, count, *calls, *refusals)
    assert max(map(max, results)) < CLOSE
    for error in allreduce:
        assert "WEFT_SGLANG_ALLREDUCE=1 needs ranks on one host, but they are on 2: " in error
    for error in elastic:
        assert "--elastic-ep-backend weft needs ranks on one machine" in error
