# SPDX-License-Identifier: Apache-2.0
"""SGLang's tensor parallelism by weft: against torch, and what is left to SGLang's own ways."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.plugins.sglang.server import find
from tests.plugins.sglang.tensor_parallel import HIDDEN, LAYERS, LIMIT, make_runner, state, step
from weft.errors import InvalidArgument, PeerDied, RankFailed, SetupError
from weft.plugins import sglang as plugin
from weft.plugins.sglang import allreduce, hooks

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.12}


def start(group: weft.Group, dtype: torch.dtype, gemma: bool = False, **more: Any) -> Any:
    """A loaded model whose all-reduces are weft's."""
    runner = make_runner(group, dtype, gemma, **more)
    runner.load_model()
    return runner


def rows(tokens: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(11 * tokens + seed)
    return torch.randn(tokens, HIDDEN, generator=draw).to(dtype)


def close_to_torch(group: weft.Group, dtype: torch.dtype, gemma: bool) -> list[list[Any]]:
    """Every size with the ways of SGLang that it took, and bits to compare between ranks."""
    runner = start(group, dtype, gemma)
    with torch.inference_mode():
        results = []
        for tokens in (0, 1, 5, LIMIT, LIMIT + 1, 3):
            state().ways.clear()
            x = rows(tokens, dtype)
            found = step(runner, x)
            torch.testing.assert_close(
                found.float(), runner.model.alone(x), rtol=0, atol=TOLERANCE[dtype]
            )
            results.append([tokens, list(state().ways), found.float().tolist()])
    allreduce.close()
    return results


@pytest.mark.parametrize("gemma", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [2, 4])
def test_layers_agree_with_torch_and_ranks_with_each_other(ranks, size, dtype, gemma):
    results = ranks(size, "cpu")(close_to_torch, dtype, gemma)
    assert all(found == results[0] for found in results)
    for tokens, ways, _ in results[0]:
        beyond = not 0 < tokens <= LIMIT
        assert ways == ["in place"] * ((1 + 2 * LAYERS) if beyond else 0), tokens


def fused_sums(group: weft.Group, release: str) -> dict[str, Any]:
    """Which norms ran for themselves, in a batch that fuses."""
    runner = start(group, torch.float32, release=release)
    x, extra = rows(4, torch.float32), rows(4, torch.float32, seed=1)
    found = runner.model(x, extra=extra)
    torch.testing.assert_close(found, runner.model.alone(x, extra), rtol=0, atol=2e-5)
    allreduce.close()
    return {"norms": [norm.calls - 1 for norm in runner.model.norms], "ways": state().ways}


@pytest.mark.parametrize("release", hooks.SGLANG.served)
def test_norms_are_fused_but_the_first_and_the_last(ranks, release):
    for found in ranks(2, "cpu")(fused_sums, release):
        assert found == {"norms": [1, *[0] * (2 * LAYERS - 1), 1], "ways": []}


def odd_norms(group: weft.Group, setting: dict[str, Any]) -> list[int]:
    runner = start(group, torch.float32, **setting)
    x = rows(4, torch.float32)
    residual = rows(4, torch.float32, seed=2)
    kept = residual.clone()
    norm = runner.model.norms[1]
    part = x * (group.rank + 1)
    normed, added = norm.forward_with_allreduce_fusion(part, residual)
    total = x * sum(range(1, group.size + 1))
    torch.testing.assert_close(added, kept + total)
    torch.testing.assert_close(normed, norm.forward(kept + total))
    assert torch.equal(residual, kept)  # the residual that goes on is a fresh one
    allreduce.close()
    return [norm.calls, len(state().ways)]


@pytest.mark.parametrize(
    "setting", [{}, {"cast_x_before_out_mul": True}, {"variance_size_override": 32}]
)
def test_a_norm_of_another_kind_gets_its_sum_and_norms_itself(ranks, setting):
    for calls, others in ranks(2, "cpu")(odd_norms, setting):
        assert (calls, others) == (2 if setting else 1, 0)


def not_ours(group: weft.Group, release: str) -> list[list[str]]:
    """Rows that the operator was not made for are summed by SGLang."""
    start(group, torch.float32, release=release)
    tensor, ways, found = state().groups["tp"], state().ways, []
    for x in (
        torch.ones(4, HIDDEN, dtype=torch.float64),
        torch.ones(4, HIDDEN // 2),
        torch.ones(HIDDEN),
        torch.ones(2, 2, HIDDEN),
        torch.ones(4, 2 * HIDDEN)[:, :HIDDEN],
        torch.ones(HIDDEN * 4 + 1)[1:].view(4, HIDDEN),
    ):
        ways.clear()
        assert torch.equal(tensor.all_reduce(x), torch.full_like(x, 2))
        found.append(list(ways))
    ways.clear()
    x = torch.ones(4, HIDDEN)
    assert torch.equal(tensor._all_reduce_out_place(x, "auto"), x * 2)
    assert torch.equal(x, torch.ones(4, HIDDEN))
    found.append(list(ways))
    allreduce.close()
    assert torch.equal(tensor.all_reduce(x), torch.full_like(x, 2))
    found.append(list(ways))
    return found


@pytest.mark.parametrize("release", hooks.SGLANG.served)
def test_other_rows_are_left_to_sglang(ranks, release):
    own = ["in place"]
    for found in ranks(2, "cpu")(not_ours, release):
        *others, automatic, closed = found
        assert others == [own] * 6
        assert automatic == []
        assert closed == own


def split_experts(group: weft.Group, all_to_all: bool) -> tuple[bool, bool, int, list[str]]:
    """Experts' sums over half of the ranks, or none at all: nothing may be left to a norm."""
    split = {"backend": "deepep"} if all_to_all else {"moe": [[0, 1], [2, 3]]}
    start(group, torch.float32, **split)
    gate = allreduce.may_fuse(lambda _: False, 4), allreduce.may_fuse(lambda _: True, 4)
    initialize_workspaces(HIDDEN)
    state().groups["tp"].all_reduce(rows(4, torch.float32))
    state().groups["moe"].all_reduce(rows(4, torch.float32))
    allreduce.close()
    return *gate, state().workspaces, list(state().ways)


def initialize_workspaces(hidden: int) -> None:
    """As SGLang does for FlashInfer."""
    from sglang.srt.layers import flashinfer_comm_fusion

    flashinfer_comm_fusion.pre_initialize_workspaces(1, hidden, torch.float32)


@pytest.mark.parametrize("all_to_all", [False, True])
def test_sums_over_other_groups_stay_sglangs_and_apart(ranks, all_to_all):
    for found in ranks(4, "cpu")(split_experts, all_to_all):
        assert found == (False, True, 1, [] if all_to_all else ["in place"])


def unlisted(group: weft.Group, backend: str | None) -> tuple[list[int], list[str]]:
    """A model that SGLang does not list, with and without a word of the user's."""
    runner = start(group, torch.float32)
    allreduce.close()
    runner.model_config.hf_config.architectures = ["Other"]
    runner.server_args.flashinfer_allreduce_fusion_backend = backend
    runner.load_model()
    x = rows(4, torch.float32)
    torch.testing.assert_close(step(runner, x), runner.model.alone(x), rtol=0, atol=2e-5)
    allreduce.close()
    return [norm.calls for norm in runner.model.norms], list(state().ways)


@pytest.mark.parametrize("backend", [None, "trtllm"])
def test_a_model_that_is_not_known_to_fuse_gets_its_sums_alone(ranks, backend):
    for calls, ways in ranks(2, "cpu")(unlisted, backend):
        inner = 1 if backend else 2
        assert calls == [2, *[inner] * (2 * LAYERS - 1), 2]
        assert ways == []


def two_models(group: weft.Group) -> tuple[bool, bool, int]:
    """A draft model shares what the target has, where its rows are as wide."""
    runner = start(group, torch.float32)
    live = allreduce._live
    assert live is not None
    runner.load_model()
    again = len(live._leases) == 1
    runner.model_config.hidden_size = 2 * HIDDEN
    runner.load_model()
    wide = torch.ones(3, 2 * HIDDEN)
    assert torch.equal(state().groups["tp"].all_reduce(wide), wide * 2)
    initialize_workspaces(HIDDEN)
    one = allreduce._live is live
    allreduce.close()
    return again, one, state().workspaces


def test_a_draft_model_shares_the_memory(ranks):
    assert ranks(2, "cpu")(two_models) == [(True, True, 0)] * 2


def test_a_traced_layer_fuses_nothing(monkeypatch):
    live = type("Live", (), {"fuses": True, "max_tokens": LIMIT})()
    monkeypatch.setattr(allreduce, "_live", live)
    assert allreduce.may_fuse(lambda _: False, 1)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not allreduce.may_fuse(lambda _: True, 1)


def refused(group: weft.Group, how: str) -> str:
    runner = make_runner(group, torch.float32)
    os.environ[allreduce.SWITCH] = {"word": "yes", "off": "0"}.get(how, "1")
    state().dp_attention = how == "dp"
    if how == "alone":
        state().groups["tp"] = state().groups["ep"]
    runner.server_args.enable_pdmux = how == "pdmux"
    runner.model_config.hidden_size = 63 if how == "hidden" else HIDDEN
    try:
        allreduce.loaded(None, runner)
    except InvalidArgument as error:
        return str(error)
    return "nothing" if allreduce._live is None else "served"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("word", "WEFT_SGLANG_ALLREDUCE is 'yes'"),
        ("dp", "--enable-dp-attention"),
        ("pdmux", "--enable-pdmux"),
        ("hidden", "hidden"),
        ("off", "nothing"),
        ("alone", "nothing"),
    ],
)
def test_what_cannot_be_served_is_said(ranks, how, text):
    for found in ranks(2, "cpu")(refused, how):
        assert text in found


def killed(group: weft.Group, folder: str) -> None:
    runner = start(group, torch.float32)
    x = rows(4, torch.float32)
    step(runner, x)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDied) as caught:
        step(runner, x)
    with pytest.raises(PeerDied):  # as behind a replayed graph, which raises nothing by itself
        allreduce.forwarded(None, runner)
    Path(folder, f"{group.rank}").write_text(str(caught.value))


def test_a_dead_peer_is_named_and_ends_the_server(ranks, tmp_path):
    with pytest.raises(RankFailed):
        ranks(4, "cpu")(killed, str(tmp_path))
    for rank in (0, 2, 3):
        assert "rank 1 died" in (tmp_path / str(rank)).read_text()


def differing(group: weft.Group, asked: str) -> list[str]:
    """What registering says where SGLang is another, by way of the plug-in's entry point."""
    os.environ[allreduce.SWITCH] = asked
    find("0.5.17")
    groups: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    groups.get_moe_ep_group = lambda name: None
    del groups.GroupCoordinator._all_reduce_out_place
    said = []
    for call in (allreduce.register, plugin.register):
        try:
            call()
        except (SystemExit, SetupError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_another_sglang_ends_the_server_that_asked(ranks):
    ((alone, inside),) = ranks(1, "cpu")(differing, "1")
    assert alone == inside
    assert alone.startswith("SystemExit: weft in SGLang: SGLang")
    assert "GroupCoordinator._all_reduce_out_place" in alone
    assert "get_moe_ep_group takes (name), not ()" in alone
    ((wrong, _),) = ranks(1, "cpu")(differing, "on")
    assert wrong.startswith("SystemExit: weft in SGLang: WEFT_SGLANG_ALLREDUCE is 'on'")


def flashinfers(group: weft.Group) -> list[list[str]]:
    """Plain sums where SGLang 0.5.23 has FlashInfer for them, with weft and without."""
    start(group, torch.float32, release="0.5.23")
    tensor, ways, found = state().groups["tp"], state().ways, []
    state().flashinfer = True
    for tokens in (4, LIMIT + 1):
        ways.clear()
        x = rows(tokens, torch.float32)
        assert torch.equal(tensor.all_reduce(x.clone()), x * 2)
        found.append(list(ways))
    allreduce.close()
    tensor.all_reduce(rows(4, torch.float32))
    return [*found, ways[-1:]]


def test_flashinfers_plain_sums_give_way(ranks):
    for found in ranks(2, "cpu")(flashinfers):
        assert found == [[], ["in place"], ["flashinfer"]]


def test_nothing_of_another_sglang_matters_to_a_server_that_did_not_ask(ranks):
    assert ranks(1, "cpu")(differing, "0") == [[]]


def unapplied(group: weft.Group) -> str:
    runner = start(group, torch.float32)
    allreduce.close()
    (fused,) = (hook for hook in allreduce.HOOKS if hook.function is allreduce.sum_and_norm)
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry._patched.remove(fused.target)
    with pytest.raises(SetupError) as caught:
        runner.load_model()
    return str(caught.value)


def test_a_hook_that_sglang_did_not_apply_is_named(ranks):
    (text,) = ranks(1, "cpu")(unapplied)
    assert "_forward_with_allreduce_fusion" in text
