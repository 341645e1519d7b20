# SPDX-License-Identifier: Apache-2.0
"""SGLang's tensor parallelism with weft, against torch, and the sums that remain SGLang's."""

import importlib
import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.plugins.sglang.server import enter, launch_cases, sglang
from tests.plugins.standins import error_of
from weft.errors import PeerDied
from weft.launcher.launch import launch
from weft.plugins import sglang as plugin
from weft.plugins.sglang import allreduce

HIDDEN, LIMIT = 64, 16  # LIMIT: the stand-in's FUSE_ALLREDUCE_MAX_BATCH_SIZE
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.05}


def state() -> Any:
    """Return the groups of the stand-in and the methods of their sums."""
    return sglang().STATE


def make_runner(
    group: weft.Group,
    dtype: torch.dtype = torch.float32,
    *,
    moe: tuple[list[int], ...] = (),
    backend: str = "none",
) -> Any:
    """Return a ModelRunner that has not loaded its model. `moe` splits the experts' sums."""
    os.environ[allreduce.SWITCH] = "1"
    standin = enter()
    world = standin.GroupCoordinator(list(range(group.size)), group.process_group())
    single = standin.GroupCoordinator([group.rank], None)
    groups = {"tp": world, "attn": world, "ep": single, "moe": world}
    for ranks in moe:
        made = dist.new_group(ranks)
        if group.rank in ranks:
            groups["moe"] = standin.GroupCoordinator(ranks, made)
    standin.STATE.groups = groups
    # A test must not end the process that started the ranks.
    setattr(allreduce, "create_server_terminator", lambda parent: lambda: None)  # noqa: B010
    config = SimpleNamespace(architectures=["Fusing"])
    args, sizes = standin.make_args(moe_a2a_backend=backend), {"hidden_size": HIDDEN}
    return standin.ModelRunner(args, torch.nn.Module, **sizes, dtype=dtype, hf_config=config)


def start(group: weft.Group, *args: Any, **more: Any) -> Any:
    """Return a runner with a loaded model, whose all-reduces are weft's."""
    runner = make_runner(group, *args, **more)
    runner.load_model()
    return runner


def rows(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(11 * tokens + seed)
    return torch.randn(tokens, HIDDEN, generator=draw).to(dtype)


def make_norm(dtype: torch.dtype = torch.float32, gemma: bool = False, **settings: Any) -> Any:
    kind = sglang().GemmaRMSNorm if gemma else sglang().RMSNorm
    return kind((rows(1, seed=9)[0].abs() + 0.5).to(dtype), 1e-5, **settings)


def run_layer(
    group: weft.Group, norm: Any, tokens: int, dtype: torch.dtype = torch.float32, more: bool = True
) -> list[Any]:
    """Sum and norm as a layer of SGLang does, against torch in fp32.

    more: whether something is added to the residual. Returns the norm's calls, SGLang's methods,
    and bits to compare between ranks.
    """
    parts = [rows(tokens, dtype, rank) for rank in range(group.size)]
    residual, extra = rows(tokens, dtype, 7), rows(tokens, dtype, 8) if more else None
    added = residual if extra is None else residual + extra
    whole = torch.stack(parts).float().sum(0) + residual.float()
    whole = whole if extra is None else whole + extra.float()
    want, kept, x = norm.forward(whole), residual.clone(), parts[group.rank]
    gate = importlib.import_module("sglang.srt.layers.layer_boundary.residual.add_norm")
    norm.calls = 0
    state().ways.clear()
    if gate.flashinfer_ar_fusion_applies(tokens):
        normed, total = norm.forward_with_allreduce_fusion(x, residual, extra)
        assert torch.equal(residual, kept)  # the residual that goes on is another tensor
    else:
        total = state().groups["tp"].all_reduce(x)
        normed, total = norm.forward(total, added.clone())
    close: dict[str, Any] = {
        "rtol": 2.0**-7 if dtype == torch.bfloat16 else 1e-5,
        "atol": TOLERANCE[dtype],
    }
    torch.testing.assert_close(normed.float(), want, **close)
    torch.testing.assert_close(total.float(), whole, **close)
    return [norm.calls, list(state().ways), normed.tolist(), total.tolist()]


def run_sizes(group: weft.Group, dtype: torch.dtype, gemma: bool) -> list[Any]:
    start(group, dtype)
    norm = make_norm(dtype, gemma)
    with torch.inference_mode():
        return [run_layer(group, norm, tokens, dtype) for tokens in (0, 1, 5, LIMIT, LIMIT + 1, 3)]


@pytest.mark.parametrize("size", [2, 4])
def test_sums_agree_with_torch_and_ranks_with_each_other(ranks, size):
    """Up to the limit, sums are fused with their norms."""
    calls = [(run_sizes, dtype, gemma) for dtype in TOLERANCE for gemma in (False, True)]
    for results in launch_cases(ranks, size, *(calls if size == 2 else calls[1:3])):
        assert all(result == results[0] for result in results)
        own, fused = [1, ["in place"]], [0, []]
        assert [each[:2] for each in results[0]] == [own, fused, fused, fused, own, fused]


def run_plain(group: weft.Group, model: str, backend: str | None, **setting: Any) -> list[Any]:
    """Run a layer of a model, with a flag of the user and a setting of the norm."""
    runner = make_runner(group)
    runner.model_config.hf_config.architectures = [model]
    runner.server_args.flashinfer_allreduce_fusion_backend = backend
    runner.load_model()
    return run_layer(group, make_norm(**setting), 4, more=not setting)[:2]


def run_odd(group: weft.Group, setting: str) -> list[Any]:
    return run_plain(group, "Fusing", None, **{setting: 1})


def test_sums_are_fused_where_model_and_norm_allow_it(ranks):
    """Not in a model that SGLang does not list, without the user's flag, nor in an odd norm."""
    calls = [(run_plain, "Other", None), (run_plain, "Other", "trtllm")]
    odd = [(run_odd, name) for name in ("cast_x_before_out_mul", "variance_size_override")]
    unlisted, asked, *unfused = launch_cases(ranks, 2, *calls, *odd)
    assert asked == [[0, []]] * 2
    assert [unlisted, *unfused] == [[[1, []]] * 2] * 3


def sum_other_rows(group: weft.Group) -> list[list[str]]:
    """Return how SGLang summed rows that the operator does not support."""
    start(group)
    tensor, ways, result = state().groups["tp"], state().ways, []

    def add(x: torch.Tensor, reduce: Any = tensor.all_reduce) -> None:
        ways.clear()
        kept = x.clone()
        assert torch.equal(reduce(x), kept * 2)
        result.append(list(ways))

    for x in (
        torch.ones(4, HIDDEN, dtype=torch.float64),
        torch.ones(4, HIDDEN // 2),
        torch.ones(HIDDEN),
        torch.ones(2, 2, HIDDEN),
        torch.ones(4, 2 * HIDDEN)[:, :HIDDEN],
        torch.ones(HIDDEN * 4 + 1)[1:].view(4, HIDDEN),
    ):
        add(x)
    x = torch.ones(4, HIDDEN)
    add(x, lambda x: tensor._all_reduce_out_place(x, "auto"))
    assert torch.equal(x, torch.ones(4, HIDDEN))
    state().flashinfer = True  # where SGLang would use FlashInfer
    add(rows(4))
    add(rows(LIMIT + 1))
    allreduce.close()
    tensor.all_reduce(x)
    return [*result, list(ways)[-1:]]


def initialize_workspaces() -> int:
    """Return how often SGLang made workspaces of FlashInfer."""
    module = importlib.import_module("sglang.srt.layers.flashinfer_comm_fusion")
    module.pre_initialize_workspaces(1, HIDDEN, torch.float32)
    return int(state().workspaces)


def load_two(group: weft.Group) -> tuple[bool, bool, int]:
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
    return again, allreduce._tensor_parallel is parallel, initialize_workspaces()


def test_other_rows_are_summed_by_sglang(ranks):
    other, shared = launch_cases(ranks, 2, (sum_other_rows,), (load_two,))
    assert other == [[["in place"]] * 6 + [[], [], ["in place"], ["flashinfer"]]] * 2
    assert shared == [(True, True, 0)] * 2


def split_experts(group: weft.Group, all_to_all: bool) -> tuple[bool, bool, int, list[str]]:
    """Sums of experts over half of the ranks, or none: no norm may take them over."""
    split: dict[str, Any] = {"backend": "deepep"} if all_to_all else {"moe": ([0, 1], [2, 3])}
    start(group, **split)
    gate = allreduce.can_fuse(lambda _: False, 4), allreduce.can_fuse(lambda _: True, 4)
    for name in ("tp", "moe"):
        state().groups[name].all_reduce(rows(4))
    return *gate, initialize_workspaces(), list(state().ways)


def test_sums_over_other_groups_remain_sglangs(ranks):
    apart, whole = launch_cases(ranks, 4, (split_experts, False), (split_experts, True))
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
    error = error_of(allreduce.after_load_model, None, runner)
    return error or ("nothing" if allreduce._tensor_parallel is None else "served")


REFUSED = {
    "word": "WEFT_SGLANG_ALLREDUCE is 'yes'",
    "dp": "--enable-dp-attention",
    "pdmux": "--enable-pdmux",
    "hidden": "hidden",
    "off": "nothing",
    "alone": "nothing",
}


def test_unsupported_models_are_refused(ranks):
    results = launch_cases(ranks, 2, *((refused, how) for how in REFUSED))
    for (how, text), result in zip(REFUSED.items(), results, strict=True):
        assert all(text in each for each in result), how


def lose_rank_1(group: weft.Group) -> str:
    runner, norm = start(group), make_norm()
    run_layer(group, norm, 4)
    group.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerDied) as caught:
        run_layer(group, norm, 4)
    with pytest.raises(PeerDied):  # as after a replayed graph, which raises nothing by itself
        allreduce.after_forward(None, runner)
    return str(caught.value)


def test_a_dead_peer_is_named():
    first, dead, *others = launch(lose_rank_1, ranks=4, tolerate_deaths=True, timeout=3000.0)
    assert dead is None
    assert all("rank 1 died" in error for error in (first, *others))


def lose_hook(group: weft.Group) -> str:
    runner = make_runner(group)
    (fused,) = (hook for hook in allreduce.HOOKS if hook.function is allreduce.reduce_and_norm)
    sglang().HookRegistry._patched.remove(fused.target)
    return error_of(runner.load_model)


def test_a_hook_that_sglang_could_not_apply_is_an_error(ranks):
    (((error),),) = launch_cases(ranks, 1, (lose_hook,))
    assert error.startswith("SetupError")
    assert "_forward_with_allreduce_fusion" in error


def test_an_unsupported_sglang_ends_the_server(monkeypatch):
    """Of errors of plug-ins, SGLang ends for this one only."""
    for switch in ("", "0"):
        monkeypatch.setenv(allreduce.SWITCH, switch)
        allreduce.register()
    for switch, text in (("on", r"WEFT_SGLANG_ALLREDUCE is 'on'"), ("1", "does not match weft's")):
        monkeypatch.setenv(allreduce.SWITCH, switch)
        for register in (allreduce.register, plugin.register):
            with pytest.raises(SystemExit, match=f"weft in SGLang: .*{text}"):
                register()
