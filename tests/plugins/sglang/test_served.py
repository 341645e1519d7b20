# SPDX-License-Identifier: Apache-2.0
"""Models of the stand-in on CPU ranks with weft, compared with plain torch in one process."""

from __future__ import annotations

import ast
import importlib
import logging
import os
import re
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.plugins.sglang.server import (
    BLOCKS,
    NEWER,
    OLDER,
    Server,
    alone,
    enter,
    leave,
    tokens,
)
from tests.plugins.sglang.test_allreduce import refused
from tests.plugins.sglang.test_elastic import unfit
from tests.plugins.standins import CLOSE, Kept, error_of, launch_each, max_relative_difference

EITHER = [("block", OLDER), ("dispatcher", OLDER), ("block", NEWER)]
# Tokens of each rank; the limits of the stand-in's flags are 4 in decode and 32 in prefill.
BATCHES = {
    2: ([3, 1], [0, 4], [0, 0], [5, 40], [70, 0], [33, 33]),
    4: ([1, 2, 3, 4], [0, 0, 0, 1], [9, 0, 50, 2]),
}


def run_moe_block(
    group: weft.Group,
    block: str,
    batches: Sequence[list[int]] | None = None,
    *,
    padded: int | None = None,
    real: int | None = None,
    attention_ranks: int = 1,
    **more: Any,
) -> tuple[float, int]:
    """Return a model's distance from one process over its passes, and its workspaces.

    batches: tokens of each attention group, which its ranks share evenly; real, padded: rows that
    are no padding, and how many SGLang reports.
    """
    server, result = Server(group, block, attention_ranks=attention_ranks, **more), []
    for seed, counts in enumerate(batches or BATCHES[group.size]):
        own = counts[group.rank // attention_ranks] // attention_ranks
        x = tokens(own, 10 * seed + group.rank)
        result.append(
            max_relative_difference(server.step(x, counts, padded), alone(x, block, real=real))
        )
    workspaces = len(server.workspaces)
    leave()
    return max(result), workspaces


LORA = {"enable_lora": True, "lora_target_modules": {"q_proj", "o_proj"}}
OVERLAP = ("--moe-a2a-backend", "weft", "--enable-single-batch-overlap")
# By ranks: block, batches, and options of `run_moe_block`. Every block in every form, with idle
# ranks and
# batches of several rounds; groups of two attention ranks, with DP attention and without; rows that
# pad a graph; one rank, for which 0.5.17 does not keep the number of padded rows.
SERVED: dict[int, list[tuple[str, Any, dict[str, Any]]]] = {
    1: [
        ("qwen3", ([4],), {"form": form, "release": OLDER, "padded": 1})
        for form in ("block", "dispatcher")
    ],
    2: [
        *(
            (block, None, {"form": form, "release": release})
            for block in BLOCKS
            for form, release in [*EITHER, ("dispatcher", NEWER)]
            if block != "nextn" and (form, release, block) != ("dispatcher", NEWER, "qwen3")
        ),
        ("qwen3", ([2], [8], [130]), {"attention_ranks": 2}),
        *(
            ("deepseek", ([4, 4],), {"form": form, "release": release, "padded": 2, "real": 2})
            for form, release in EITHER
        ),
        *(("qwen3", ([6, 6],), {"release": release, **LORA}) for release in (OLDER, NEWER)),
        *(("glm4", ([6, 6],), {"release": each, "flags": OVERLAP}) for each in (OLDER, NEWER)),
    ],
    4: [
        ("deepseek", None, {"form": "block"}),
        ("gpt_oss", None, {"form": "dispatcher"}),
        ("glm4", ([4, 2], [0, 6], [64, 70]), {"attention_ranks": 2}),
    ],
}


@pytest.mark.parametrize("count", SERVED)
def test_models_are_served_as_in_one_process(ranks: Any, count: int) -> None:
    calls = [(partial(run_moe_block, **more), block, sizes) for block, sizes, more in SERVED[count]]
    for case, results in zip(SERVED[count], launch_each(ranks, count, *calls), strict=True):
        for result, workspaces in results:
            assert result < CLOSE, case
            assert workspaces == (1 if case[2].get("form") == "dispatcher" else 2), case


def rounded_counts(group: weft.Group) -> int:
    """Return the tokens that weft reserves for a rank with 2 or 3 of its group's 5."""
    Server(group, attention_ranks=2)
    importlib.import_module("sglang").STATE.counts = [5]
    from weft.plugins.sglang import engine

    rows = engine.get_max_tokens_over_ranks()
    leave()
    return rows


def updated(group: weft.Group, form: str, release: str) -> list[float]:
    """Serve with new tensors, as after a requantisation, then with values changed in place.

    Two experts have replicas, so ids are physical, as with EPLB.
    """
    server = Server(group, "qwen3", redundant=2, release=release, form=form)
    fill: Any = importlib.import_module("sglang").fill
    x = tokens(6, group.rank)
    errors = [max_relative_difference(server.step(x, [6, 6]), alone(x, "qwen3"))]
    for shift, replaces in ((7, True), (9, True), (11, False)):
        for block in server.runner.model.blocks:
            experts = block.experts
            for name in ("w13_weight", "w2_weight") if replaces else ():
                new = torch.empty_like(getattr(experts, name))
                setattr(experts, name, torch.nn.Parameter(new, requires_grad=False))
            fill(experts, experts.layer_id + shift)
        errors.append(
            max_relative_difference(server.step(x, [6, 6]), alone(x, "qwen3", shift=shift))
        )
    leave()
    return errors


def test_weights_that_sglang_replaces_or_moves_are_served(ranks: Any) -> None:
    for case, results in zip(
        EITHER, launch_each(ranks, 2, *((updated, *case) for case in EITHER)), strict=True
    ):
        assert max(max(errors) for errors in results) < CLOSE, case


def set_up(group: weft.Group) -> tuple[float, list[Any]]:
    """A draft model of equal sizes takes no memory of its own."""
    for name, value in {"DECODE": "throughput", "OVERLAP": "none", "PREFILL_TOKENS": "7"}.items():
        os.environ[f"WEFT_SGLANG_{name}"] = value
    server = Server(group, "glm4")
    with torch.inference_mode():  # where SGLang runs, and may load
        draft = Server(group, "glm4", layers=1)
    x, result = tokens(9, group.rank), []
    for each, layers in ((server, 2), (draft, 1), (server, 2)):
        result.append(
            max_relative_difference(each.step(x, [9, 9]), alone(x, "glm4", layers=layers))
        )
    built = [(each.mode, each.overlap, each.exchange.max_tokens) for each in server.workspaces]
    leave()
    return max(result), built


def drafting(group: weft.Group, form: str, release: str) -> tuple[float, list[int]]:
    """A model whose experts have replicas, and its `nextn` layer, whose replicas are unused."""
    more: dict[str, Any] = {"redundant": 2, "speculative_num_draft_tokens": 3}
    more |= {"release": release, "form": form}
    server = Server(group, "deepseek", **more)
    draft = Server(group, "nextn", layers=1, **more)
    if group.rank == 1:  # it has the physical experts 5 to 9; 8 and 9 are replicas
        draft.runner.model.blocks[0].experts.w13_weight.data[3:] = 100.0
    result = []
    for seed, counts in enumerate(([4, 12], [12, 0], [1, 40])):
        x = tokens(counts[group.rank], 10 * seed + group.rank)
        result.append(max_relative_difference(server.step(x, counts), alone(x, "deepseek")))
        result.append(
            max_relative_difference(draft.step(x, counts), alone(x, "deepseek", layers=1))
        )
    sizes = [getattr(each, "exchange", each).max_tokens for each in draft.workspaces]
    leave()
    return max(result), sizes


def test_settings_and_draft_models(ranks: Any) -> None:
    """Decode workspaces have room for the 3 tokens that a request drafts."""
    calls = [(set_up,), (rounded_counts,), *((drafting, *case) for case in EITHER)]
    both, rows, *drafts = launch_each(ranks, 2, *calls)
    for result, built in both:
        assert result < CLOSE
        assert built == [("throughput", "none", 4), ("throughput", "none", 7)]
    assert rows == [3, 3]
    for (form, _), results in zip(EITHER, drafts, strict=True):
        for result, sizes in results:
            assert result < CLOSE
            assert sizes == ([12, 32] if form == "block" else [32])


def misuse(group: weft.Group) -> dict[str, str]:
    """Return the error of each misuse, by the text that it must have."""
    server, x = Server(group, "qwen3"), tokens(2, group.rank)
    experts = server.runner.model.blocks[0].experts
    chosen = importlib.import_module("sglang").StandardTopKOutput(
        torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int32), x
    )
    errors = {
        "did not report the ranks' token counts": error_of(server.step, x, None),
        "rows is 1, but this rank has 2 tokens": error_of(server.step, x, [1, 1]),
        "layer 0 were called directly": error_of(experts, x, chosen),
    }
    experts.w13_weight.data = experts.w13_weight.data[:, :-1].clone()
    errors["layer 0.w13_weight was reloaded as [4, "] = error_of(server.step, x, [2, 2])
    experts.dispatcher.all_to_all = None
    leave()
    enter()
    from weft.plugins.sglang import engine
    from weft.plugins.sglang.dispatcher import BlockDispatcher

    early = SimpleNamespace(experts=SimpleNamespace(dispatcher=BlockDispatcher(3)), layer_id=3)
    errors["layer 3 runs before weft's hook"] = error_of(engine.run_moe_block, None, early, x, None)
    leave()
    return errors


LORA_OF_EXPERTS = {"q_proj", "gate_up_proj"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap: remove"),
    ({"enable_torch_compile": True}, "--enable-torch-compile: remove these flags"),
    ({"enable_pdmux": True}, "--enable-pdmux: remove these flags"),
    ({"elastic_ep_backend": "mooncake"}, "--elastic-ep-backend mooncake: remove these flags"),
    ({"attn_cp_size": 2}, "--attn-cp-size: remove these flags"),
    ({"startup_weight_load_mode": "overlap"}, "--startup-weight-load-mode: remove"),
    ({"enable_lora": True}, "--lora-target-modules is not given: pass"),
    (
        {"enable_lora": True, "lora_target_modules": LORA_OF_EXPERTS},
        "--lora-target-modules is gate_up_proj q_proj: pass a subset of fused_qkv_a_proj_with_mqa",
    ),
    ({"enable_lora": True, "lora_target_modules": {"all"}}, "target-modules is all: pass"),
]


def refused_flags(group: weft.Group, release: str) -> dict[str, str]:
    """Refusals come when the model is loaded, before a port is open."""
    errors = {}
    for more, text in REFUSED:
        errors[text] = error_of(partial(Server, group, release=release, **more))
        leave()
    return errors


def unknown_block(group: weft.Group) -> dict[str, str]:
    """A block whose forward may reduce or add what weft already does is refused."""
    enter()
    standin: Any = importlib.import_module("sglang")

    class Another(standin.Qwen3MoeSparseMoeBlock):
        def forward(self, hidden_states: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
            return self.experts(hidden_states, None)

    standin.Another, BLOCKS["another"] = Another, "Another"
    error = error_of(Server, group, "another")
    leave()
    return {"Another of Model is not among the MoE blocks that weft supports": error}


def stock(group: weft.Group, release: str) -> dict[str, str]:
    """With another backend the hooks do nothing."""
    server = Server(group, "qwen3", flags=(), release=release)
    from weft.plugins.sglang import engine

    assert engine._blocks is None
    with pytest.raises(AssertionError) as ran:
        server.step(tokens(1, 0), [1, 1])
    with pytest.raises(ValueError, match="SM90") as overlaps:
        Server(group, "glm4", release=release, flags=("--enable-single-batch-overlap",))
    leave()
    return {"the stock forward ran": str(ran.value), "not supported on SM90": str(overlaps.value)}


def test_unsupported_models_are_refused(ranks: Any) -> None:
    calls: list[tuple[Any, ...]] = [(misuse,), (unknown_block,)]
    calls += [(body, each) for each in (OLDER, NEWER) for body in (refused_flags, stock)]
    for results in launch_each(ranks, 2, *calls):
        for errors in results:
            assert {text: error for text, error in errors.items() if text not in error} == {}


def lose_last_rank(group: weft.Group, folder: str) -> None:
    """Kill the last rank between two steps."""
    from weft.plugins import faults
    from weft.plugins.sglang import engine

    os.environ["WEFT_SGLANG_TIMEOUT"] = "600"
    ended: list[bool] = []
    end = lambda parent: lambda: ended.append(True)  # noqa: E731
    setattr(engine, "create_server_terminator", end)  # noqa: B010
    faults.GRACE_SECONDS = 0.0
    server, kept = Server(group, "glm4"), Kept()
    last, counts = group.size - 1, [2] * group.size
    server.step(tokens(2, group.rank), counts)
    if group.rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    error = ""
    while not error:
        error = error_of(server.step, tokens(2, group.rank), counts)
    blocks = engine._blocks
    assert blocks is not None
    assert blocks.watch is not None
    if last in blocks.group.host_ranks[blocks.group.host]:
        blocks.watch._thread.join()
        assert ended == [True]
    result = {"error": error, "broken": bool(blocks.is_broken), "lines": kept.lines}
    Path(folder, str(group.rank)).write_text(repr(result))


def found_by(folder: Path, rank: int) -> dict[str, Any]:
    """Return the result of a rank of `bereaved`."""
    result: dict[str, Any] = ast.literal_eval((folder / str(rank)).read_text())
    return result


def test_a_dead_rank_is_reported_and_ends_the_server(ranks: Any, tmp_path: Any) -> None:
    """Long before the deadline the step raises, a log line names the rank, and the server ends."""
    with pytest.raises(weft.errors.RankFailed):
        ranks(2, "cpu")(lose_last_rank, str(tmp_path))
    result = found_by(tmp_path, 0)
    assert result["error"].startswith("PeerDied: rank 0, dispatch: rank 1 died")
    assert result["broken"]
    assert any("the process of rank 1 has ended" in line for line in result["lines"])
    assert any("PeerDied: rank 0, dispatch: rank 1 died" in line for line in result["lines"])


# Two hosts (--nnodes 2): ranks with WEFT_HOSTs.


def on_two_hosts(group: weft.Group, body: Any, *args: Any) -> Any:
    os.environ["WEFT_HOST"] = f"host-{2 * group.rank // group.size}"
    return body(group, *args)


def logged(group: weft.Group, form: str, release: str) -> tuple[float, bool]:
    kept = Kept(logging.INFO)
    result, _ = run_moe_block(group, "deepseek", release=release, form=form)
    return result, any(line.endswith("hosts: 2") for line in kept.lines)


@pytest.mark.parametrize("count", [2, 4])
def test_two_hosts_are_served(ranks: Any, count: int) -> None:
    """Test one rank per host, where weights move between hosts, and two."""
    calls: list[tuple[Any, ...]] = [(on_two_hosts, logged, *case) for case in EITHER]
    if count == 2:
        calls += [(on_two_hosts, updated, *case) for case in EITHER]
        calls += [(on_two_hosts, refused, "served")]
    else:
        calls += [(on_two_hosts, unfit, {})]
    *results, errors = launch_each(ranks, count, *calls)
    for case, result in zip(calls, results, strict=False):
        if case[1] is logged:
            assert result[0][1], case
            assert max(each for each, _ in result) < CLOSE, case
        else:
            assert max(max(each) for each in result) < CLOSE, case
    expected = (  # all-reduces are of one host, and a group of several hosts does not recover
        "WEFT_SGLANG_ALLREDUCE=1 needs ranks on one host, but they are on 2: unset "
        "WEFT_SGLANG_ALLREDUCE, or keep --tp within one host"
        if count == 2
        else "--elastic-ep-backend weft needs ranks on one machine, but they are on 2: leave it "
        "out, or start without --nnodes"
    )
    assert errors == [expected] * count


def test_a_dead_rank_ends_the_servers_of_both_hosts(ranks: Any, tmp_path: Path) -> None:
    """One host sees the process end, the other one the rail; no rank waits for the deadline."""
    with pytest.raises(weft.errors.RankFailed):
        ranks(4, "cpu")(on_two_hosts, lose_last_rank, str(tmp_path))
    far_off, also_far_off, near = (found_by(tmp_path, rank) for rank in (0, 1, 2))
    assert any("the process of rank 3 has ended" in line for line in near["lines"])
    for result in (far_off, also_far_off):
        assert re.match("RailFailed.*rank 3|PeerLeft.*rank 3", result["error"])
