# SPDX-License-Identifier: Apache-2.0
"""What is checked before SGLang is patched, what settings may be, and whose experts are refused."""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
import torch

from tests.plugins.sglang.server import STANDIN, enter, find, leave
from weft.errors import InvalidArgument, OutOfOrder, SetupError
from weft.gemm import quantize_mxfp4, unpack_mxfp4
from weft.gemm.mxfp4 import dequantize_mxfp4
from weft.moe import CLAMPED_SWIGLU, Gating
from weft.plugins.blocks import Limits
from weft.plugins.names import Engine, listed
from weft.plugins.sglang import register
from weft.plugins.sglang.hooks import SGLANG, end_server
from weft.plugins.sglang.weights import check_experts, layer_of


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """The stand-in, not yet patched: `sglang("models.qwen3_moe")` imports a module of it."""
    monkeypatch.syspath_prepend(STANDIN)
    yield lambda name: importlib.import_module(f"sglang.srt.{name}")
    leave()


@pytest.mark.parametrize("release", SGLANG.served)
def test_flags_of_weft(sglang: Callable[[str], Any], release: str) -> None:
    """The backend has a name, whole experts on each rank, and a shared expert apart."""
    enter(release)
    enter(release)  # SGLang loads plug-ins once; whoever does twice gets the hooks once
    args = sglang("server_args").parse("--moe-a2a-backend", "weft", "--tp-size", "4")
    assert (args.ep_size, args.disable_shared_experts_fusion) == (4, True)
    backends = sglang("layers.moe.utils")
    assert backends.MoeA2ABackend("weft") is backends.MoeA2ABackend.CUSTOMIZED
    assert backends.MoeA2ABackend(None) is backends.MoeA2ABackend.NONE
    with pytest.raises(ValueError, match="No MoeA2ABackend member for value woof"):
        backends.MoeA2ABackend("woof")
    registry = sglang("plugins.hook_registry").HookRegistry
    assert {len(hooks) for hooks in registry._hooks.values()} == {1}
    assert registry._patched == set(registry._hooks)
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'woof'"):
        sglang("server_args").parse("--moe-a2a-backend", "woof")
    plain = sglang("server_args").parse("--tp-size", "4")
    assert (plain.ep_size, plain.disable_shared_experts_fusion) == (1, False)


@pytest.mark.parametrize("release", SGLANG.served)
def test_prefill_is_captured_as_with_backends_that_sglang_knows(
    sglang: Callable[[str], Any], release: str
) -> None:
    """What else keeps prefill out of graphs does so with weft, too."""
    enter(release)
    parse = sglang("server_args").parse

    def backend(*flags: str, **more: object) -> str:
        return str(parse(*flags, **more).cuda_graph_config.prefill.backend)

    weft = ("--moe-a2a-backend", "weft")
    assert backend() == backend("--moe-a2a-backend", "deepep") == "breakable"
    assert backend(moe_a2a_backend="another") == "disabled"
    assert backend(*weft) == "breakable"
    assert backend(*weft, enable_two_batch_overlap=True) == "disabled"
    assert backend(*weft, attn_cp_size=2) == "disabled"
    assert backend(moe_a2a_backend="another") == "disabled"


@pytest.mark.parametrize("release", SGLANG.served)
def test_counts_are_told_to_all_ranks(sglang: Callable[[str], Any], release: str) -> None:
    """With DP attention, whatever SGLang's own layers need; by no other backend."""
    enter(release)
    state, asks = sglang("runtime_context").STATE, sglang("utils.common").require_mlp_tp_gather
    older = release == "0.5.17"
    for backend, dp, want in (
        ("weft", True, True),
        ("weft", False, False),
        ("none", True, False),
    ):
        state.backend, state.parallel.enable_dp_attention = backend, dp and older
        if not older:
            state.parallel.attn_dp_enabled = dp
        assert (asks(None) if older else asks()) is want
    if not older:  # it may ask about a draft model's backend instead of this one's
        state.backend, state.parallel.attn_dp_enabled = "none", True
        assert asks(moe_a2a_backend="weft")
        state.backend = "weft"
        assert not asks(moe_a2a_backend="none")


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_rank_hears_itself(sglang: Callable[[str], Any], ranks: int) -> None:
    """Which fails without the hook, in SGLang 0.5.17 too."""
    enter("0.5.17")
    info = sglang("managers.scheduler_components.dp_attn").MLPSyncBatchInfo(ranks)
    active = torch.ones(ranks)
    assert info.all_gather(active).tolist() == [[7, 7, 0]] * ranks
    active[-1] = 0
    assert info.all_gather(active).tolist() == [[7, 7, 0]] * (ranks - 1) + [[0, 0, 1]]


def test_choices_that_lie_elsewhere_are_told(sglang: Callable[[str], Any]) -> None:
    """A list made anew at each look would not keep weft."""
    find("0.5.23")
    sglang("server_args").ServerArgs.__annotations__["moe_a2a_backend"] = Annotated[str, "help"]
    with pytest.raises(SetupError, match=r"ServerArgs.moe_a2a_backend has no list of choices"):
        register()
    assert not sglang("plugins.hook_registry").HookRegistry._hooks


def test_another_sglang_is_refused_before_it_is_patched(
    sglang: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One error lists all that differs; the command line then knows no backend "weft"."""
    layer, runner = (
        sglang("layers.moe.fused_moe_triton.layer"),
        sglang("model_executor.model_runner"),
    )
    monkeypatch.setattr(layer, "create_moe_dispatcher", lambda moe_runner_config, quant_method: 0)
    monkeypatch.delattr(runner.ModelRunner, "load_model")
    monkeypatch.setattr(layer.FusedMoE, "__init__", lambda self: None)
    before = dict(vars(sglang("layers.dp_attention")))
    with pytest.raises(SetupError) as raised:
        register()
    said = str(raised.value)
    for part in (
        "SGLang 0.5.17 is not what weft's plug-in knows, so nothing of it was patched: ",
        "create_moe_dispatcher takes (moe_runner_config, quant_method), not (moe_runner_config)",
        "there is no sglang.srt.model_executor.model_runner.ModelRunner.load_model",
        "FusedMoE.__init__ has no dispatcher, hidden_size, intermediate_size_per_partition",
        "Served: 0.5.23, 0.5.17; install one of them",
    ):
        assert part in said
    assert "version" not in said
    enter()
    assert "SetupError" in caplog.text
    assert not sglang("plugins.hook_registry").HookRegistry._hooks
    assert dict(vars(sglang("layers.dp_attention"))) == before
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'weft'"):
        sglang("server_args").parse("--moe-a2a-backend", "weft")


def test_another_version_is_refused(
    sglang: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal names and signatures do not say that they mean the same."""
    monkeypatch.setattr(Engine, "installed", lambda self: "0.5.18")
    with pytest.raises(SetupError, match="SGLang 0.5.18 .*: its version is another. Served"):
        register()
    for release in ("0.5.17", "0.5.17.post1", "0.5.17+cu130"):
        assert SGLANG.release(release) == "0.5.17"
    assert SGLANG.release("0.5.23") == "0.5.23"
    for release in ("0.5.170", "0.5.1", "10.5.17", "(of no known version)"):
        assert SGLANG.release(release) is None


def test_signatures_are_those_of_the_version(
    sglang: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is right in one version is a difference in another."""
    monkeypatch.setattr(Engine, "installed", lambda self: "0.5.23")
    with pytest.raises(SetupError) as raised:
        register()
    said = str(raised.value)
    for part in (
        "SGLang 0.5.23 is not what weft's plug-in knows",
        "require_mlp_tp_gather takes (server_args), not (*, moe_a2a_backend=)",
        "there is no sglang.srt.layers.moe.topk.TopK.routing_inputs",
    ):
        assert part in said
    assert "version" not in said
    assert "MOE_A2A_BACKEND_CHOICES" not in said  # which 0.5.23 has not


def test_a_wrong_setting_is_refused(
    sglang: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As everything is that register finds, before the choice is added."""
    monkeypatch.setenv("WEFT_SGLANG_FORM", "blocks")
    with pytest.raises(
        InvalidArgument, match="WEFT_SGLANG_FORM is 'blocks'; choose one of 'block'"
    ):
        register()
    assert "weft" not in sglang("server_args").MOE_A2A_BACKEND_CHOICES


def test_a_hook_that_sglang_could_not_apply_is_told(sglang: Callable[[str], Any]) -> None:
    """SGLang logs it and goes on, and would serve its own layers."""
    enter()
    registry = sglang("plugins.hook_registry").HookRegistry
    registry._patched.discard("sglang.srt.model_executor.model_runner.ModelRunner.forward")
    from weft.plugins.sglang import engine
    from weft.plugins.sglang.hooks import check_applied

    with pytest.raises(SetupError, match=r"did not apply weft's hooks on \S+ModelRunner.forward: "):
        check_applied(engine.HOOKS)


def test_the_server_is_ended_as_sglang_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a signal to the parent, unless that is gone."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    end_server(-1)()
    assert sent == []
    end_server(os.getppid())()
    assert sent == [(os.getppid(), signal.SIGQUIT)]


def test_signatures_as_the_tables_write_them() -> None:
    """Every kind of parameter."""

    def plain(a: int, b: int = 1, *rest: int, c: int, d: int = 2, **more: int) -> None: ...
    def only(a: int, *, c: int) -> None: ...

    assert listed(inspect.signature(plain)) == "a, b=, *rest, c, d=, **more"
    assert listed(inspect.signature(only)) == "a, *, c"
    assert listed(inspect.signature(lambda: 0)) == ""


def test_limits() -> None:
    """Rounded up over the ranks of an attention group, and kept within what memory allows."""
    assert Limits.of(64, 2048, attention_ranks=1) == Limits(64, 2048)
    assert Limits.of(65, 2049, attention_ranks=4) == Limits(17, 513)
    assert Limits.of(4000, 1 << 17, attention_ranks=1) == Limits(512, 4096)
    assert Limits.of(64, 2048, attention_ranks=2, wanted=100) == Limits(32, 100)
    assert Limits.of(64, 2048, attention_ranks=1, wanted=10) == Limits(64, 64)


@pytest.mark.parametrize(("backend", "decode"), [("full", 32), ("breakable", 32), ("disabled", 64)])
def test_decode_tokens_are_those_of_graphs_that_are_captured(
    sglang: Callable[[str], Any], backend: str, decode: int
) -> None:
    """SGLang has sizes also for --disable-cuda-graph, where batches have no limit by graphs."""
    enter()
    from weft.plugins.settings import Settings
    from weft.plugins.sglang import engine

    args = sglang("server_args").parse(chunked_prefill_size=128)
    phase = sglang("model_executor.cuda_graph_config").PhaseConfig
    args.cuda_graph_config.decode = phase(backend, 32, [1, 32])
    sglang("runtime_context").STATE.parallel = SimpleNamespace(attn_tp_size=1)
    assert engine._limits(args, Settings()) == Limits(decode, 128)


def fused(dtype: torch.dtype = torch.bfloat16, **other: Any) -> Any:
    """A layer of experts as SGLang loads it: 4 of 8, hidden 256, intermediate 128."""
    config = {"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False}
    config |= dict.fromkeys(("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit"))
    config |= {"routed_scaling_factor": 2.5, "gate_up_interleaved": True}
    triton = SimpleNamespace(is_triton=lambda: True, value="triton")
    layer = SimpleNamespace(
        layer_id=7,
        num_experts=8,
        num_local_experts=4,
        moe_ep_size=2,
        moe_ep_rank=1,
        should_fuse_routed_scaling_factor_in_topk=False,
        moe_tp_size=1,
        top_k=3,
        hidden_size=256,
        intermediate_size_per_partition=128,
        params_dtype=torch.bfloat16,
        num_fused_shared_experts=0,
        with_bias=False,
        moe_runner_config=SimpleNamespace(**config),
        quant_method=SimpleNamespace(runner=SimpleNamespace(runner_backend=triton)),
        w13_weight=torch.zeros(4, 256, 256, dtype=dtype),
        w2_weight=torch.zeros(4, 256, 128, dtype=dtype),
    )
    if dtype == torch.float8_e4m3fn:
        layer.w13_weight_scale_inv, layer.w2_weight_scale_inv = (
            torch.ones(4, 2, 2),
            torch.ones(4, 2, 1),
        )
    if dtype == torch.uint8:  # MXFP4
        for name, rows, columns in (("w13", 256, 256), ("w2", 256, 128)):
            values, scales = quantize_mxfp4(torch.randn(4, rows, columns))
            setattr(layer, f"{name}_weight", torch.nn.Parameter(values, requires_grad=False))
            setattr(layer, f"{name}_weight_scale", torch.nn.Parameter(scales, requires_grad=False))
    for name, value in other.items():
        owner, _, field = name.rpartition("__")
        setattr(getattr(layer, owner) if owner else layer, field, value)
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_weights_are_taken_without_a_copy(dtype: torch.dtype) -> None:
    """Block-FP8 with its scales, too; weft's own check finds nothing to refuse."""
    layer = fused(dtype)
    check_experts(layer, form="block")
    as_weft = layer_of(layer)
    mine, config = as_weft.take(), as_weft.config(shared=128)
    mine.check(config, 4, torch.device("cpu"), fp8=as_weft.fp8)
    assert mine.gate_up.data_ptr() == layer.w13_weight.data_ptr()
    assert mine.down.data_ptr() == layer.w2_weight.data_ptr()
    assert as_weft.fp8 == (dtype == torch.float8_e4m3fn)
    if as_weft.fp8:
        assert mine.gate_up_scale is not None
        assert mine.gate_up_scale.data_ptr() == layer.w13_weight_scale_inv.data_ptr()
    assert (config.shared, config.routing.num_experts, config.routing.top_k) == (128, 8, 3)
    assert (as_weft.mine(), as_weft.scale) == ((4, 5, 6, 7), 2.5)


def test_mxfp4_is_left_as_loaded_and_packed() -> None:
    """SGLang would make bfloat16 of it, or what a kernel of its own takes."""
    from weft.plugins.sglang.engine import keep_mxfp4

    layer, changed = fused(torch.uint8), []
    enter()
    from weft.plugins.sglang.dispatcher import Exchanged, WholeBlock

    for kind in (WholeBlock, Exchanged):
        layer.dispatcher = kind(7)
        keep_mxfp4(lambda *given: changed.append(given), "method", layer)
    leave()
    assert changed == [("method", layer)]
    check_experts(layer, form="block")
    wanted = dequantize_mxfp4(layer.w13_weight, layer.w13_weight_scale)
    as_weft = layer_of(layer)
    mine = as_weft.take()
    mine.check(as_weft.config(), 4, torch.device("cpu"), fp8=as_weft.fp8)
    assert mine.gate_up_scale is not None
    assert torch.equal(unpack_mxfp4(mine.gate_up, mine.gate_up_scale), wanted)
    assert mine.gate_up.data_ptr() == layer.w13_weight.data_ptr()  # which EPLB moves
    assert mine.gate_up_scale.data_ptr() == layer.w13_weight_scale.data_ptr()
    with pytest.raises(OutOfOrder, match=r"layer 7\.w2_weight is in weft's order"):
        layer.w2_weight.weight_loader(layer.w2_weight, mine.down)


def test_activations_that_are_served() -> None:
    """By SGLang's names of their numbers."""
    oai = {"moe_runner_config__gemm1_alpha": 1.702, "moe_runner_config__gemm1_clamp_limit": 7.0}
    split = oai | {"moe_runner_config__gate_up_interleaved": False}
    for more, gating, interleaved in (
        ({}, Gating(), False),
        ({"moe_runner_config__swiglu_limit": 10}, Gating(limit=10), False),
        (oai, CLAMPED_SWIGLU, True),
        (split, CLAMPED_SWIGLU, False),
    ):
        layer = fused(**more)
        check_experts(layer, form="block")
        assert layer_of(layer).config().gating == gating
        assert layer_of(layer).interleaved == interleaved


FP8 = torch.float8_e4m3fn
REFUSED: dict[str, tuple[Any, str]] = {
    "fused shared": (fused(num_fused_shared_experts=1), "--disable-shared-experts-fusion"),
    "expert tensor parallel": (fused(moe_tp_size=2), "moe_tp_size is 2, served is 1"),
    "uneven": (fused(num_experts=9), "num_experts is 9, num_local_experts 4 on 2 ranks"),
    "activation": (
        fused(moe_runner_config__activation="gelu"),
        "moe_runner_config.activation is 'gelu', served is 'silu'",
    ),
    "ungated": (fused(moe_runner_config__is_gated=False), "is_gated is False, served is True"),
    "on input": (fused(moe_runner_config__apply_router_weight_on_input=True), "on_input is True"),
    "clamp": (
        fused(moe_runner_config__gemm1_clamp_limit=7.0),
        "clamp_limit is 7.0, served is None",
    ),
    "two limits": (
        fused(moe_runner_config__swiglu_limit=10, moe_runner_config__gemm1_alpha=1.702),
        "swiglu_limit is 10, served is None",
    ),
    "another offset": (fused(moe_runner_config__gemm1_beta=2.0), "gemm1_beta is 2.0, served is 1"),
    "bias": (
        fused(with_bias=True, w13_weight_bias=torch.zeros(4, 256), w2_weight_bias=torch.zeros(4)),
        r"w2_weight_bias is \[4\] torch.float32, served is \[4, 256\]",
    ),
    "float32 beside mxfp4": (
        fused(torch.uint8, params_dtype=torch.float32),
        "params_dtype is torch.float32, served with MXFP4 are bfloat16 and float16",
    ),
    "mxfp4 of another size": (
        fused(torch.uint8, intermediate_size_per_partition=256),
        r"w13_weight is \[4, 256, 128\] for intermediate 256 and hidden 256; served",
    ),
    "scales of mxfp4": (
        fused(torch.uint8, w13_weight_scale=torch.ones(4, 256, 8)),
        r"w13_weight_scale is \[4, 256, 8\] torch.float32, served is \[4, 256, 8\] torch.uint8",
    ),
    "up first": (fused(quant_method__load_up_proj_weight_first=True), "the up projection first"),
    "another runner": (
        fused(
            quant_method__runner=SimpleNamespace(
                runner_backend=SimpleNamespace(is_triton=lambda: False, value="deep_gemm")
            )
        ),
        "the runner is 'deep_gemm', whose weights may be in another order: pass --moe-runner",
    ),
    "no runner": (fused(quant_method=SimpleNamespace()), "the runner is unknown"),
    "dtype": (fused(params_dtype=torch.float64), "params_dtype is torch.float64"),
    "int8": (fused(torch.int8), r"w13_weight is \[4, 256, 256\] torch.int8, served is"),
    "transposed": (
        fused(w2_weight=torch.zeros(4, 128, 256, dtype=torch.bfloat16)),
        r"w2_weight is \[4, 128, 256\] torch.bfloat16, served is \[4, 256, 128\] torch.bfloat16",
    ),
    "strided": (
        fused(w2_weight=torch.zeros(4, 128, 256, dtype=torch.bfloat16).mT),
        "torch.bfloat16, not contiguous, served is",
    ),
    "scales of bf16": (fused(w2_weight_scale=torch.ones(1)), "w2_weight is torch.bfloat16 with sc"),
    "channel scales": (
        fused(FP8, w13_weight_scale_inv=None),
        "there is no w13_weight_scale_inv; served is a float32 scale for each block of 128 x 128",
    ),
    "shape of scales": (
        fused(FP8, w2_weight_scale_inv=torch.ones(4, 256, 1)),
        r"w2_weight_scale_inv is \[4, 256, 1\] torch.float32, served is \[4, 2, 1\]",
    ),
    "packed scales": (
        fused(FP8, w2_weight_scale_inv=torch.ones(4, 2, 1, dtype=torch.int32)),
        "w2_weight_scale_inv is .* torch.int32, served is",
    ),
    "ue8m0": (
        fused(FP8, w13_weight_scale_inv=SimpleNamespace(format_ue8m0=True)),
        "w13_weight_scale_inv has format_ue8m0",
    ),
    "odd sizes": (
        fused(FP8, intermediate_size_per_partition=96),
        r"w13_weight is \[4, 192, 256\], served in FP8 are multiples of 128",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_experts_that_are_refused(what: str) -> None:
    """The error names the layer, the attribute, what it is and what is served."""
    layer, text = REFUSED[what]
    with pytest.raises(InvalidArgument, match=text) as raised:
        check_experts(layer, form="block")
    assert "cannot serve the experts of layer 7 in form 'block'" in str(raised.value)


def test_the_runner_of_the_dispatcher_form_has_any_arithmetic() -> None:
    """Only the placement must be weft's."""
    check_experts(fused(with_bias=True, moe_runner_config__activation="gelu"), form="dispatcher")
    with pytest.raises(InvalidArgument, match="moe_tp_size is 2"):
        check_experts(fused(moe_tp_size=2), form="dispatcher")
