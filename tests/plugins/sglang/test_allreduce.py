# SPDX-License-Identifier: Apache-2.0
"""SGLang's tensor parallelism with weft, against torch, and the sums that remain SGLang's."""

from __future__ import annotations

import importlib
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.plugins.sglang.server import NEWER, OLDER, enter, leave
from tests.plugins.standins import error_of, install_standin, launch_each
from weft.errors import PeerDied, RankFailed, SetupError
from weft.plugins import sglang as plugin
from weft.plugins.sglang import allreduce

LAYERS, HIDDEN = 3, 64
LIMIT = 16  # the stand-in's FUSE_ALLREDUCE_MAX_BATCH_SIZE
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.12}
# What a layer asks before it leaves its sum to the next norm, by release.
GATES = {
    OLDER: ("communicator", "apply_flashinfer_allreduce_fusion"),
    NEWER: ("layer_boundary.residual.add_norm", "flashinfer_ar_fusion_applies"),
}


def state() -> Any:
    """Return the groups of the stand-in and the methods of their sums."""
    return importlib.import_module("sglang").STATE


class Model(nn.Module):
    """Layers of two sums; each rank has a part of the matrix before each."""

    def __init__(self, dtype: torch.dtype, gemma: bool, release: str, **norm: Any) -> None:
        from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm

        super().__init__()
        kind, draw = GemmaRMSNorm if gemma else RMSNorm, torch.Generator().manual_seed(5)
        self.norms = [
            kind((torch.rand(HIDDEN, generator=draw) + 0.5).to(dtype), 1e-5, **norm)
            for _ in range(2 * LAYERS + 1)
        ]
        size = dist.get_world_size()
        whole = torch.randn(2 * LAYERS, size, HIDDEN, HIDDEN, generator=draw) / HIDDEN**0.5
        self.whole = whole.to(dtype)
        self.parts = self.whole[:, dist.get_rank()]
        module, self.gate = GATES[release]
        self.gates = importlib.import_module(f"sglang.srt.layers.{module}")

    def forward(
        self, x: torch.Tensor, forward_batch: Any = None, extra: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sum at once after attention, and leave an MLP's sum to the next norm, as SGLang does.

        extra: added to the residual of the first sum, where it is fused.
        """
        gate, groups, last = getattr(self.gates, self.gate), state().groups, len(self.parts) - 1
        x = groups["tp"].all_reduce(x / groups["tp"].world_size)  # an embedding's
        residual, x = x.clone(), self.norms[0].forward(x)
        for i, part in enumerate(self.parts):
            y = x @ part
            name = "attn" if i % 2 == 0 else "moe"
            if gate(len(y)) and i != last:
                x, residual = self.norms[i + 1].forward_with_allreduce_fusion(
                    y, residual, extra if i == 0 else None, use_attn_tp_group=name == "attn"
                )
            else:
                added = residual if extra is None or i else residual + extra
                x, residual = self.norms[i + 1].forward(groups[name].all_reduce(y), added)
        return x

    def alone(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        """Return the same by plain torch, in this process and in fp32."""
        residual, x = x.float(), self.norms[0].forward(x.float())
        for i, parts in enumerate(self.whole.float()):
            residual = residual + torch.stack([x @ part for part in parts]).sum(0)
            residual = residual if extra is None or i else residual + extra.float()
            x = self.norms[i + 1].forward(residual)
        return x


def make_runner(
    group: weft.Group,
    dtype: torch.dtype = torch.float32,
    gemma: bool = False,
    *,
    release: str = OLDER,
    moe: list[list[int]] | None = None,
    backend: str = "none",
    **norm: Any,
) -> Any:
    """Return a ModelRunner that has not loaded its model. `moe` splits the experts' sums."""
    os.environ[allreduce.SWITCH] = "1"
    enter(release)
    standin: Any = importlib.import_module("sglang")
    world = standin.GroupCoordinator(list(range(group.size)), group.process_group())
    alone = standin.GroupCoordinator([group.rank], None)
    groups = {"tp": world, "attn": world, "ep": alone, "moe": world}
    for ranks in moe or []:
        made = dist.new_group(ranks)
        if group.rank in ranks:
            groups["moe"] = standin.GroupCoordinator(ranks, made)
    standin.STATE.groups = groups
    # A test must not end the process that started the ranks.
    setattr(allreduce, "create_server_terminator", lambda parent: lambda: None)  # noqa: B010
    model = Model(dtype, gemma, release, **norm)
    known = SimpleNamespace(architectures=["Fusing"])
    args = standin.parse("--moe-a2a-backend", backend)
    return standin.ModelRunner(
        args, lambda: model, hidden_size=HIDDEN, dtype=dtype, hf_config=known
    )


def start(group: weft.Group, *args: Any, **more: Any) -> Any:
    """Return a runner with a loaded model, whose all-reduces are weft's."""
    runner = make_runner(group, *args, **more)
    runner.load_model()
    return runner


def step(runner: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = runner.forward(importlib.import_module("sglang").batch(x, None))
    return out


def run(group: weft.Group, body: Any, *args: Any) -> Any:
    try:
        return body(group, *args)
    finally:
        allreduce.close()
        leave()


def in_one_launch(ranks: Any, count: int, *calls: tuple[Any, ...]) -> list[list[Any]]:
    return launch_each(ranks, count, *((run, *call) for call in calls))


def rows(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(11 * tokens + seed)
    return torch.randn(tokens, HIDDEN, generator=draw).to(dtype)


def close_to_torch(group: weft.Group, dtype: torch.dtype, gemma: bool) -> list[list[Any]]:
    """Return every size with SGLang's methods, and bits to compare between ranks."""
    runner, results = start(group, dtype, gemma), []
    with torch.inference_mode():
        for tokens in (0, 1, 5, LIMIT, LIMIT + 1, 3):
            state().ways.clear()
            x = rows(tokens, dtype)
            result = step(runner, x).float()
            want = runner.model.alone(x)
            torch.testing.assert_close(result, want, rtol=0, atol=TOLERANCE[dtype])
            results.append([tokens, list(state().ways), result.tolist()])
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_layers_agree_with_torch_and_ranks_with_each_other(ranks, size):
    calls = [(close_to_torch, dtype, gemma) for dtype in TOLERANCE for gemma in (False, True)]
    for results in in_one_launch(ranks, size, *(calls if size == 2 else calls[1:3])):
        assert all(result == results[0] for result in results)
        for tokens, ways, _ in results[0]:
            beyond = not 0 < tokens <= LIMIT
            assert ways == ["in place"] * ((1 + 2 * LAYERS) if beyond else 0), tokens


def fused_sums(group: weft.Group, release: str) -> tuple[list[int], list[str]]:
    """Return how often each norm ran by itself in a batch that fuses."""
    runner = start(group, release=release)
    x, extra = rows(4), rows(4, seed=1)
    result = runner.model(x, extra=extra)
    torch.testing.assert_close(result, runner.model.alone(x, extra), rtol=0, atol=2e-5)
    return [norm.calls - 1 for norm in runner.model.norms], state().ways


def odd_norm(group: weft.Group, setting: dict[str, Any]) -> list[int]:
    runner = start(group, **setting)
    x, residual = rows(4), rows(4, seed=2)
    kept, norm = residual.clone(), runner.model.norms[1]
    normed, added = norm.forward_with_allreduce_fusion(x * (group.rank + 1), residual)
    torch.testing.assert_close(added, kept + x * sum(range(1, group.size + 1)))
    torch.testing.assert_close(normed, norm.forward(added))
    assert torch.equal(residual, kept)  # the residual that goes on is another tensor
    return [norm.calls, len(state().ways)]


def unlisted(group: weft.Group, backend: str | None) -> tuple[list[int], list[str]]:
    """A model that SGLang does not list, with and without the user's flag."""
    runner = make_runner(group)
    runner.model_config.hf_config.architectures = ["Other"]
    runner.server_args.flashinfer_allreduce_fusion_backend = backend
    runner.load_model()
    x = rows(4)
    torch.testing.assert_close(step(runner, x), runner.model.alone(x), rtol=0, atol=2e-5)
    return [norm.calls for norm in runner.model.norms], list(state().ways)


def test_sums_are_fused_with_the_norms_that_allow_it(ranks):
    """The first and the last norm, and norms of other arithmetic, run unfused."""
    odd: list[dict[str, Any]] = [{}, {"cast_x_before_out_mul": True}, {"variance_size_override": 9}]
    calls = [(fused_sums, OLDER), (fused_sums, NEWER), (unlisted, None), (unlisted, "trtllm")]
    older, newer, *others = in_one_launch(ranks, 2, *calls, *((odd_norm, each) for each in odd))
    inner = 2 * LAYERS - 1
    assert older == newer == [([1, *[0] * inner, 1], [])] * 2
    assert others[:2] == [[([2, *[calls] * inner, 2], [])] * 2 for calls in (2, 1)]
    assert others[2:] == [[[1, 0]] * 2, [[2, 0]] * 2, [[2, 0]] * 2]


def not_ours(group: weft.Group, release: str) -> list[list[str]]:
    """Return how SGLang summed rows that the operator does not support."""
    start(group, release=release)
    tensor, ways, result = state().groups["tp"], state().ways, []
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
        result.append(list(ways))
    ways.clear()
    x = torch.ones(4, HIDDEN)
    assert torch.equal(tensor._all_reduce_out_place(x, "auto"), x * 2)
    assert torch.equal(x, torch.ones(4, HIDDEN))
    result.append(list(ways))
    allreduce.close()
    assert torch.equal(tensor.all_reduce(x), torch.full_like(x, 2))
    return [*result, list(ways)]


def initialize_workspaces(hidden: int) -> None:
    from sglang.srt.layers import flashinfer_comm_fusion

    flashinfer_comm_fusion.pre_initialize_workspaces(1, hidden, torch.float32)


def two_models(group: weft.Group) -> tuple[bool, bool, int]:
    """A draft model shares the target's operator if its rows have the same width."""
    runner = start(group)
    parallel = allreduce._tensor_parallel
    assert parallel is not None
    runner.load_model()
    again = len(parallel._leases) == 1
    runner.model_config.hidden_size = 2 * HIDDEN
    runner.load_model()
    wide = torch.ones(3, 2 * HIDDEN)
    assert torch.equal(state().groups["tp"].all_reduce(wide), wide * 2)
    initialize_workspaces(HIDDEN)
    return again, allreduce._tensor_parallel is parallel, state().workspaces


def flashinfers(group: weft.Group) -> list[list[str]]:
    """Plain sums where SGLang 0.5.23 uses FlashInfer, with weft and without."""
    start(group, release=NEWER)
    tensor, ways, result = state().groups["tp"], state().ways, []
    state().flashinfer = True
    for tokens in (4, LIMIT + 1):
        ways.clear()
        x = rows(tokens)
        assert torch.equal(tensor.all_reduce(x.clone()), x * 2)
        result.append(list(ways))
    allreduce.close()
    tensor.all_reduce(rows(4))
    return [*result, ways[-1:]]


def test_other_rows_are_summed_by_sglang(ranks):
    calls = [(not_ours, OLDER), (not_ours, NEWER), (two_models,), (flashinfers,)]
    older, newer, shared, plain = in_one_launch(ranks, 2, *calls)
    assert older == newer == [[["in place"]] * 6 + [[], ["in place"]]] * 2
    assert shared == [(True, True, 0)] * 2
    assert plain == [[[], ["in place"], ["flashinfer"]]] * 2


def split_experts(group: weft.Group, all_to_all: bool) -> tuple[bool, bool, int, list[str]]:
    """Sums of experts over half of the ranks, or none: no norm may take them over."""
    split: dict[str, Any] = {"backend": "deepep"} if all_to_all else {"moe": [[0, 1], [2, 3]]}
    start(group, **split)
    gate = allreduce.can_fuse(lambda _: False, 4), allreduce.can_fuse(lambda _: True, 4)
    initialize_workspaces(HIDDEN)
    for name in ("tp", "moe"):
        state().groups[name].all_reduce(rows(4))
    return *gate, state().workspaces, list(state().ways)


def test_sums_over_other_groups_remain_sglangs(ranks):
    apart, whole = in_one_launch(ranks, 4, (split_experts, False), (split_experts, True))
    assert apart == [(False, True, 1, ["in place"])] * 4
    assert whole == [(False, True, 1, [])] * 4


def test_a_traced_layer_fuses_nothing(monkeypatch):
    parallel = type("Live", (), {"can_fuse_sums": True, "max_tokens": LIMIT})()
    monkeypatch.setattr(allreduce, "_tensor_parallel", parallel)
    assert allreduce.can_fuse(lambda _: False, 1)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not allreduce.can_fuse(lambda _: True, 1)


def refused(group: weft.Group, how: str) -> str:
    runner = make_runner(group)
    os.environ[allreduce.SWITCH] = {"word": "yes", "off": "0"}.get(how, "1")
    state().dp_attention = how == "dp"
    if how == "alone":
        state().groups["tp"] = state().groups["ep"]
    runner.server_args.enable_pdmux = how == "pdmux"
    runner.model_config.hidden_size = 63 if how == "hidden" else HIDDEN
    error = error_of(allreduce.after_load_model, None, runner).removeprefix("InvalidArgument: ")
    result = error or ("nothing" if allreduce._tensor_parallel is None else "served")
    leave()
    return result


REFUSED = {
    "word": "WEFT_SGLANG_ALLREDUCE is 'yes'",
    "dp": "--enable-dp-attention",
    "pdmux": "--enable-pdmux",
    "hidden": "hidden",
    "off": "nothing",
    "alone": "nothing",
}


def test_unsupported_models_are_refused(ranks):
    results = in_one_launch(ranks, 2, *((refused, how) for how in REFUSED))
    for (how, text), result in zip(REFUSED.items(), results, strict=True):
        assert all(text in each for each in result), how


def killed(group: weft.Group, folder: str) -> None:
    runner, x = start(group), rows(4)
    step(runner, x)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDied) as caught:
        step(runner, x)
    with pytest.raises(PeerDied):  # as after a replayed graph, which raises nothing by itself
        allreduce.after_forward(None, runner)
    Path(folder, f"{group.rank}").write_text(str(caught.value))


def test_a_dead_peer_is_named_and_ends_the_server(ranks, tmp_path):
    with pytest.raises(RankFailed):
        ranks(4, "cpu")(killed, str(tmp_path))
    for rank in (0, 2, 3):
        assert "rank 1 died" in (tmp_path / str(rank)).read_text()


def differing(group: weft.Group, switch: str) -> list[str]:
    """Return the errors of registering with an unsupported SGLang, also by entry point."""
    os.environ[allreduce.SWITCH] = switch
    install_standin("sglang", OLDER)
    groups: Any = importlib.import_module("sglang.srt.distributed.parallel_state")
    groups.get_moe_ep_group = lambda name: None
    del groups.GroupCoordinator._all_reduce_out_place
    errors = []
    for call in (allreduce.register, plugin.register):
        try:
            call()
        except (SystemExit, SetupError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def unapplied(group: weft.Group) -> str:
    runner = make_runner(group)
    (fused,) = (hook for hook in allreduce.HOOKS if hook.function is allreduce.reduce_and_norm)
    importlib.import_module("sglang").HookRegistry._patched.remove(fused.target)
    return error_of(runner.load_model)


def test_an_unsupported_sglang_ends_the_server(ranks):
    calls = [*((differing, switch) for switch in ("1", "on", "0")), (unapplied,)]
    ((alone, inside),), ((wrong, _),), (none,), (error,) = in_one_launch(ranks, 1, *calls)
    assert alone == inside
    assert alone.startswith("SystemExit: weft in SGLang: SGLang")
    assert "GroupCoordinator._all_reduce_out_place" in alone
    assert "get_moe_ep_group has parameters (name), not ()" in alone
    assert wrong.startswith("SystemExit: weft in SGLang: WEFT_SGLANG_ALLREDUCE is 'on'")
    assert none == []
    assert error.startswith("SetupError")
    assert "_forward_with_allreduce_fusion" in error
