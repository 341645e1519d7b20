# SPDX-License-Identifier: Apache-2.0
"""Models of the stand-in on CPU ranks, by weft, beside plain torch in one process."""

from __future__ import annotations

import ast
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import weft
from tests.plugins.sglang.server import BLOCKS, Server, alone, leave, tokens
from tests.plugins.standins import CLOSE, Kept, far, told

# Tokens of each rank; the limits of the stand-in's flags are 4 in decode and 32 in prefill.
EITHER = pytest.mark.parametrize(
    ("form", "release"), [("block", "0.5.17"), ("dispatcher", "0.5.17"), ("block", "0.5.23")]
)
BATCHES = {
    2: ([3, 1], [0, 4], [0, 0], [5, 40], [70, 0], [33, 33]),
    4: ([1, 2, 3, 4], [0, 0, 0, 1], [9, 0, 50, 2]),
}


def serve(
    group: weft.Group,
    block: str,
    batches: Sequence[list[int]],
    *,
    said: int | None = None,
    real: int | None = None,
    attention_ranks: int = 1,
    **more: Any,
) -> tuple[float, int]:
    """How far a model's passes are from one process's, and how many workspaces it has.

    batches: tokens of each attention group, which its ranks share evenly.   real, said: rows that
    are no padding, and how many SGLang says there are.
    """
    server, found = Server(group, block, attention_ranks=attention_ranks, **more), []
    for seed, counts in enumerate(batches):
        mine = counts[group.rank // attention_ranks] // attention_ranks
        x = tokens(mine, 10 * seed + group.rank)
        found.append(far(server.step(x, counts, said), alone(x, block, real=real)))
    workspaces = len(server.workspaces)
    leave()
    return max(found), workspaces


@pytest.mark.parametrize("form", ["block", "dispatcher"])
@pytest.mark.parametrize("block", ["qwen3", "glm4", "deepseek", "qwen_next", "minimax", "gpt_oss"])
@pytest.mark.parametrize(("count", "release"), [(2, "0.5.17"), (4, "0.5.17"), (2, "0.5.23")])
def test_idle_ranks_rounds_and_shared_experts(
    ranks: Any, count: int, release: str, block: str, form: str
) -> None:
    """Every size of batch, on every rank, with workspaces that the layers share."""
    body = partial(serve, release=release, form=form)
    for found, workspaces in ranks(count, "cpu")(body, block, BATCHES[count]):
        assert found < CLOSE
        assert workspaces == (2 if form == "block" else 1)


@pytest.mark.parametrize(
    ("count", "block", "batches"),
    [(4, "glm4", ([4, 2], [0, 6], [64, 70])), (2, "qwen3", ([2], [8], [130]))],
    ids=["two groups", "without DP attention"],
)
def test_tokens_of_an_attention_group_are_split_over_its_ranks(
    ranks: Any, count: int, block: str, batches: tuple[list[int], ...]
) -> None:
    """Counts that SGLang tells are of attention groups, not of ranks, and padded to even."""
    for found, _ in ranks(count, "cpu")(partial(serve, attention_ranks=2), block, batches):
        assert found < CLOSE


def rounds(group: weft.Group, form: str) -> int:
    """Return how many tokens weft reserves for a rank that has 2 or 3 of its group's 5."""
    server = Server(group, "qwen3", attention_ranks=2, form=form)
    from sglang.srt.layers.dp_attention import STATE

    from weft.plugins.sglang import engine

    STATE.counts = [5]
    rows = engine._most()
    assert server.workspaces
    leave()
    return rows


def test_an_odd_count_is_rounded_up_over_attention_ranks(ranks: Any) -> None:
    """5 tokens over 2 ranks are 3 and 2: a layer that makes room for 2 refuses the third."""
    assert ranks(2, "cpu")(rounds, "block") == [3, 3]


def updated(group: weft.Group, release: str) -> list[float]:
    """Weights that SGLang replaces, as a requantisation after a load does, layer by layer."""
    server = Server(group, "qwen3", release=release)
    from sglang.srt.models.parts import fill

    x, errors = tokens(6, group.rank), []
    for shift in (7, 9):
        for block in server.runner.model.blocks:
            experts = block.experts
            for name in ("w13_weight", "w2_weight"):
                new = torch.empty_like(getattr(experts, name))
                setattr(experts, name, torch.nn.Parameter(new, requires_grad=False))
            fill(experts, experts.layer_id + shift)
        errors.append(far(server.step(x, [6, 6]), alone(x, "qwen3", shift=shift)))
    leave()
    return errors


@pytest.mark.parametrize("release", ["0.5.17", "0.5.23"])
def test_weights_that_sglang_replaces_are_served(ranks: Any, release: str) -> None:
    """update_weights_from_disk and _tensor may leave other tensors in a layer."""
    for errors in ranks(2, "cpu")(updated, release):
        assert max(errors) < CLOSE


@EITHER
def test_rows_that_pad_a_graph_go_to_no_expert(ranks: Any, form: str, release: str) -> None:
    """Their ids are -1; the shared expert has them all the same."""
    body = partial(serve, release=release, form=form, said=2, real=2)
    for found, _ in ranks(2, "cpu")(body, "deepseek", ([4, 4],)):
        assert found < CLOSE


@pytest.mark.parametrize("form", ["block", "dispatcher"])
def test_one_rank_whose_padding_sglang_does_not_keep(ranks: Any, form: str) -> None:
    """0.5.17 writes num_token_non_padded of a graph for several ranks only."""
    body = partial(serve, release="0.5.17", form=form, said=1)
    ((found, _),) = ranks(1, "cpu")(body, "qwen3", ([4],))
    assert found < CLOSE


def replicas(group: weft.Group, form: str, release: str) -> tuple[float, float]:
    """Two experts have replicas; then all weights are written over in place, as EPLB moves them."""
    server = Server(group, "qwen3", redundant=2, release=release, form=form)
    from sglang.srt.models.parts import fill

    x = tokens(6, group.rank)
    before = far(server.step(x, [6, 6]), alone(x, "qwen3"))
    for block in server.runner.model.blocks:
        fill(block.experts, block.experts.layer_id + 7)
    after = far(server.step(x, [6, 6]), alone(x, "qwen3", shift=7))
    leave()
    return before, after


@EITHER
def test_physical_ids_and_weights_that_move_in_place(ranks: Any, form: str, release: str) -> None:
    """EPLB needs nothing of weft but that it sees the same tensors."""
    for before, after in ranks(2, "cpu")(replicas, form, release):
        assert before < CLOSE
        assert after < CLOSE


def set_up(group: weft.Group) -> dict[str, Any]:
    """Settings reach the layers, and a second model of equal sizes takes no memory."""
    os.environ |= {
        "WEFT_SGLANG_DECODE": "throughput",
        "WEFT_SGLANG_OVERLAP": "none",
        "WEFT_SGLANG_PREFILL_TOKENS": "7",
    }
    server = Server(group, "glm4")
    with torch.inference_mode():  # where SGLang runs, and may load
        draft = Server(group, "glm4", layers=1)
    found = [
        far(each.step(tokens(9, group.rank), [9, 9]), alone(tokens(9, group.rank), "glm4", **more))
        for each, more in ((server, {}), (draft, {"layers": 1}), (server, {}))
    ]
    built = [(each.mode, each.overlap, each.exchange.max_tokens) for each in server.workspaces]
    leave()
    return {"far": max(found), "built": built}


def test_settings_and_a_draft_model(ranks: Any) -> None:
    """A draft model's layers share the workspaces, and the group, of the model it drafts for."""
    for said in ranks(2, "cpu")(set_up):
        assert said["far"] < CLOSE
        assert said["built"] == [("throughput", "none", 4), ("throughput", "none", 7)]


def misuse(group: weft.Group) -> dict[str, str]:
    server, said = Server(group, "qwen3"), {}

    x = tokens(2, group.rank)
    said["no counts"] = told(server.step, x, None)
    said["more than told"] = told(server.step, x, [1, 1])
    experts = server.runner.model.blocks[0].experts
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    chosen = StandardTopKOutput(torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int32), x)
    said["past the block"] = told(experts, x, chosen)
    experts.w13_weight.data = experts.w13_weight.data[:, :-1].clone()
    said["other shape"] = told(server.step, x, [2, 2])
    experts.dispatcher.all_to_all = None
    leave()
    from weft.plugins.sglang import engine

    said["too early"] = told(engine.serve, None, _early(), x, None)
    leave()
    return said


def _early() -> Any:
    from tests.plugins.sglang.server import enter

    enter()
    from weft.plugins.sglang.dispatcher import WholeBlock

    return SimpleNamespace(experts=SimpleNamespace(dispatcher=WholeBlock(3)), layer_id=3)


def test_misuse_is_told(ranks: Any) -> None:
    """What SGLang might do otherwise is refused with a text that names it."""
    for said in ranks(2, "cpu")(misuse):
        assert "no rank's number of tokens" in said["no counts"]
        assert "rows is 1, but this rank has 2 tokens" in said["more than told"]
        assert "layer 0 were called by themselves" in said["past the block"]
        assert "layer 0.w13_weight was loaded again as [4, " in said["other shape"]
        assert "layer 3 runs before weft's hook" in said["too early"]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two batches": ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap: leave that"),
    "compiled": ({"enable_torch_compile": True}, "--enable-torch-compile: leave that out"),
    "two streams": ({"enable_pdmux": True}, "--enable-pdmux: leave that out"),
    "elastic": (
        {"elastic_ep_backend": "mooncake"},
        "--elastic-ep-backend mooncake: leave that out",
    ),
    "context parallel": ({"attn_cp_size": 2}, "--attn-cp-size: leave that out"),
    "weights later": ({"startup_weight_load_mode": "overlap"}, "--startup-weight-load-mode: leave"),
    "adapters of anything": ({"enable_lora": True}, "--lora-target-modules is not given: name"),
    "adapters of experts": (
        {"enable_lora": True, "lora_target_modules": {"q_proj", "gate_up_proj"}},
        "--lora-target-modules is gate_up_proj q_proj: name some of fused_qkv_a_proj_with_mqa",
    ),
    "adapters of all": (
        {"enable_lora": True, "lora_target_modules": {"all"}},
        "--lora-target-modules is all: name",
    ),
}


def refused(group: weft.Group, release: str) -> dict[str, str]:
    said = {}
    for name, (more, _) in REFUSED.items():
        with pytest.raises(weft.errors.InvalidArgument) as raised:
            Server(group, "qwen3", release=release, **more)
        said[name] = str(raised.value)
        leave()
    return said


@pytest.mark.parametrize("release", ["0.5.17", "0.5.23"])
def test_flags_that_go_around_the_hooks_are_refused(ranks: Any, release: str) -> None:
    """When the model is loaded, before a port is open."""
    for said in ranks(2, "cpu")(refused, release):
        assert {name: text for name, (_, text) in REFUSED.items() if text not in said[name]} == {}


@pytest.mark.parametrize("release", ["0.5.17", "0.5.23"])
def test_adapters_of_attention_are_served(ranks: Any, release: str) -> None:
    """Blocks do not know of them."""
    lora: dict[str, Any] = {"enable_lora": True, "lora_target_modules": {"q_proj", "o_proj"}}
    for found, _ in ranks(2, "cpu")(partial(serve, release=release, **lora), "qwen3", ([6, 6],)):
        assert found < CLOSE


def drafting(group: weft.Group, form: str, release: str) -> dict[str, Any]:
    """A model whose experts have replicas, and its draft layer, whose replicas nobody may use."""
    more: dict[str, Any] = {"redundant": 2, "speculative_num_draft_tokens": 3}
    more |= {"release": release, "form": form}
    server = Server(group, "deepseek", **more)
    draft = Server(group, "nextn", layers=1, **more)
    experts = draft.runner.model.blocks[0].experts
    if group.rank == 1:  # it has the physical experts 5 to 9; 8 and 9 are replicas
        experts.w13_weight.data[3:] = 100.0
    found = []
    for seed, counts in enumerate(([4, 12], [12, 0], [1, 40])):
        x = tokens(counts[group.rank], 10 * seed + group.rank)
        found.append(far(server.step(x, counts), alone(x, "deepseek")))
        found.append(far(draft.step(x, counts), alone(x, "deepseek", layers=1)))
    sizes = [each.max_tokens for each in map(exchange, draft.workspaces)]
    leave()
    return {"far": max(found), "sizes": sizes}


def exchange(operator: Any) -> Any:
    return getattr(operator, "exchange", operator)


@EITHER
def test_a_draft_layer_takes_logical_experts(ranks: Any, form: str, release: str) -> None:
    """`nextn`: SGLang gives its experts no replicas; 3 drafted tokens a request are verified."""
    for said in ranks(2, "cpu")(drafting, form, release):
        assert said["far"] < CLOSE
        assert said["sizes"] == ([12, 32] if form == "block" else [32])


def overlapping(group: weft.Group, release: str) -> tuple[float, str]:
    """On a Hopper, which the stand-in is, SGLang itself has no such overlap."""
    flag = "--enable-single-batch-overlap"
    flags = ("--moe-a2a-backend", "weft", flag)
    found, _ = serve(group, "glm4", ([6, 6],), release=release, flags=flags)
    try:
        Server(group, "glm4", release=release, flags=(flag,))
    except ValueError as error:
        return found, str(error)
    finally:
        leave()
    return found, "stock served it"


@pytest.mark.parametrize("release", ["0.5.17", "0.5.23"])
def test_single_batch_overlap_changes_nothing(ranks: Any, release: str) -> None:
    """It is about blocks that weft replaces; other backends keep what SGLang says of it."""
    for found, stock_said in ranks(2, "cpu")(overlapping, release):
        assert found < CLOSE
        assert "not supported on SM90" in stock_said


def stock(group: weft.Group) -> str:
    """Another backend: the hooks are there, and do nothing."""
    server = Server(group, "qwen3", flags=())
    from weft.plugins.sglang import engine

    assert engine._blocks is None
    try:
        server.step(tokens(1, 0), [1, 1])
    except AssertionError as error:
        return str(error)
    return "weft served it"


def test_other_backends_are_left_alone(ranks: Any) -> None:
    """Whoever has weft installed and does not ask for it runs what SGLang has."""
    assert ranks(2, "cpu")(stock) == ["the stock forward ran"] * 2


def unserved(group: weft.Group) -> str:
    from tests.plugins.sglang.server import enter

    enter()
    from sglang.srt.models import qwen3_moe

    class Another(qwen3_moe.Qwen3MoeSparseMoeBlock):
        def forward(self, hidden_states: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
            return self.experts(hidden_states, None)

    qwen3_moe.Another = Another
    BLOCKS["another"] = ("qwen3_moe", "Another")
    try:
        Server(group, "another")
    except weft.errors.InvalidArgument as error:
        return str(error)
    finally:
        leave()
    return "served"


def test_a_block_that_is_not_known_is_refused(ranks: Any) -> None:
    """Its forward might reduce, or add, what weft does already."""
    for said in ranks(2, "cpu")(unserved):
        assert said.startswith("Another of Model is not among the MoE blocks that weft serves")


def bereaved(group: weft.Group, folder: str) -> None:
    """The last rank is killed between two steps."""
    from weft.plugins import faults
    from weft.plugins.sglang import engine

    os.environ["WEFT_SGLANG_TIMEOUT"] = "600"
    ended: list[bool] = []
    end = lambda parent: lambda: ended.append(True)  # noqa: E731
    setattr(engine, "end_server", end)  # noqa: B010
    faults.GRACE = 0.0
    server, kept = Server(group, "glm4"), Kept()
    last, counts = group.size - 1, [2] * group.size
    server.step(tokens(2, group.rank), counts)
    if group.rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            server.step(tokens(2, group.rank), counts)
    except weft.errors.GroupError as error:
        said = f"{type(error).__name__}: {error}"
    blocks = engine._blocks
    assert blocks is not None
    assert blocks.watch is not None
    if last in blocks.group.host_ranks[blocks.group.host]:
        blocks.watch._thread.join()
        assert ended == [True]
    found = {"said": said, "broken": blocks.broken, "lines": kept.lines}
    Path(folder, str(group.rank)).write_text(repr(found))


def told_of_the_end(folder: Path, rank: int) -> dict[str, Any]:
    """What `bereaved` found on a rank."""
    found: dict[str, Any] = ast.literal_eval((folder / str(rank)).read_text())
    return found


def test_the_end_of_a_rank_is_told_and_ends_the_server(ranks: Any, tmp_path: Any) -> None:
    """Long before the deadline: the step raises, a line names the rank, the server is ended."""
    with pytest.raises(weft.errors.RankFailed):
        ranks(2, "cpu")(bereaved, str(tmp_path))
    found = told_of_the_end(tmp_path, 0)
    assert found["said"].startswith("PeerDied: rank 0, dispatch: rank 1 died")
    assert found["broken"]
    assert any("the process of rank 1 has ended" in line for line in found["lines"])
    assert any("PeerDied: rank 0, dispatch: rank 1 died" in line for line in found["lines"])
