# SPDX-License-Identifier: Apache-2.0
"""Checks before SGLang is patched, its flags with weft, and refused experts."""

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import pytest
import torch

from tests.plugins.sglang.server import RELEASE, enter, leave
from tests.plugins.standins import install_standin, refuse
from weft.errors import InvalidArgument, OutOfOrder, SetupError
from weft.gemm import quantize_mxfp4, unpack_mxfp4
from weft.gemm.mxfp4 import dequantize_mxfp4
from weft.moe import CLAMPED_SWIGLU, Gating
from weft.plugins.blocks import Blocks, Limits
from weft.plugins.engine_api import Engine
from weft.plugins.settings import Settings
from weft.plugins.sglang import allreduce, engine, flags, models, register
from weft.plugins.sglang.hooks import create_server_terminator
from weft.plugins.sglang.weights import build_layer, check_experts, split_mxfp4, unify_mxfp4


@pytest.fixture(autouse=True)
def sglang() -> Iterator[Any]:
    """Install the stand-in, without weft's hooks unless `enter` runs."""
    yield install_standin("sglang", RELEASE)
    leave()


FP8, U8, BF16 = torch.float8_e4m3fn, torch.uint8, torch.bfloat16


def resolved_view(args: Any) -> Any:
    return args


def exclude_graphs(args: Any) -> bool:
    """SGLang's rule that excludes prefill from graphs, of the flags and of the backend."""
    return args.overlap or resolved_view(args).moe_a2a_backend not in ("none", "deepep")


def test_flags_of_weft(sglang: Any) -> None:
    """Whole experts on each rank, and a separate shared expert; other backends are SGLang's."""
    for backend in ("weft", "deepep", "other"):
        args = SimpleNamespace(moe_a2a_backend=backend, tp_size=4, overlap=False)
        ours = backend == "weft"
        assert flags.override_ep_size(lambda _: {}, args) == ({"ep_size": 4} if ours else {})
        changes = {"disable_shared_experts_fusion": True} if ours else {}
        assert flags.disable_shared_expert_fusion(lambda _: {}, args) == changes
        backends = flags.resolve_backend_alias(lambda *args: args, sglang.MoeA2ABackend, backend)
        alias = sglang.MoeA2ABackend.CUSTOMIZED if ours else (sglang.MoeA2ABackend, backend)
        assert backends == alias
        # What keeps prefill out of graphs with the backends that SGLang knows does so with weft.
        assert flags.allow_prefill_graphs(exclude_graphs, args) == (backend == "other")
        args.overlap = True
        assert flags.allow_prefill_graphs(exclude_graphs, args)
    assert resolved_view(sglang) is sglang


def test_backend_of_weft_in_the_forward_pass(sglang: Any) -> None:
    """With DP attention all ranks know all counts, by no other backend."""
    state = sglang.STATE
    asks = functools.partial(flags.requires_mlp_tp_gather, lambda **_: False)
    for backend, dp, want in (("weft", True, True), ("weft", False, False), ("none", True, False)):
        state.backend, state.parallel.attn_dp_enabled = backend, dp
        assert asks() is want
    # SGLang may ask about a draft model's backend instead of this one's.
    assert asks(moe_a2a_backend="weft")
    state.backend = "weft"
    assert not asks(moe_a2a_backend="none")

    overlap, seen = SimpleNamespace(enable_single_batch_overlap=True), []

    @contextlib.contextmanager
    def override(**kwargs: bool) -> Iterator[None]:
        seen.append(kwargs)
        yield
        seen.pop()

    overlap.override = override
    for backend, changes in (("weft", [{"enable_single_batch_overlap": False}]), ("none", [])):
        state.exec = SimpleNamespace(moe=SimpleNamespace(moe_a2a_backend=backend), overlap=overlap)
        assert flags.disable_overlap(lambda: list(seen)) == changes


def test_plug_in_is_registered_once(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors come before anything is patched; a second load adds no hook."""
    names = ("moe_a2a_backend", "speculative_moe_a2a_backend", "elastic_ep_backend")
    fields: dict[str, Any] = {name: SimpleNamespace(choices=["none"]) for name in names}
    hints = {name: Annotated[str, field] for name, field in fields.items()}
    sglang.ServerArgs = type("ServerArgs", (), {"__annotations__": hints})
    monkeypatch.setenv("WEFT_SGLANG_FORM", "blocks")
    with pytest.raises(InvalidArgument, match="FORM is 'blocks'; choose one of 'block'"):
        register()
    monkeypatch.delenv("WEFT_SGLANG_FORM")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "check", refuse)
        with pytest.raises(SetupError, match="differs"):
            register()
    with monkeypatch.context() as patch:
        patch.setattr(fields["elastic_ep_backend"], "choices", ("none",))
        with pytest.raises(SetupError, match=r"ServerArgs\.elastic_ep_backend has no list of cho"):
            register()
    assert not sglang.HookRegistry._hooks
    assert all(field.choices == ["none"] for field in fields.values())
    for _ in range(2):
        register()
    assert all(field.choices == ["none", "weft"] for field in fields.values())
    assert {len(hooks) for hooks in sglang.HookRegistry._hooks.values()} == {1}


def test_parts_of_0_5_17(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs there: flags, choices, gathered counts, shared experts, and routing."""
    args = SimpleNamespace(moe_a2a_backend="weft", enable_single_batch_overlap=True)
    enter()
    assert not flags.disable_overlap(lambda args: args, args).enable_single_batch_overlap
    assert args.enable_single_batch_overlap
    args.moe_a2a_backend = "none"
    assert flags.disable_overlap(lambda args: args, args) is args
    sglang.MOE_A2A_BACKEND_CHOICES = ["none"]
    assert flags.get_choice_lists() == [["none"]]
    sglang.STATE.parallel = SimpleNamespace(enable_dp_attention=True)
    assert flags.has_dp_attention()
    fallback = flags.get_noncontiguous_fallback(lambda info: torch.tensor([0, 0, 1]), None)
    rows = fallback.expand(1, 3).contiguous()  # of one rank; written over what it may not share
    rows.copy_(torch.tensor([[7, 7, 0]]))
    assert fallback.tolist() == [0, 0, 1]

    def init(mlp: Any, tp_rank: int = 3, tp_size: int = 4, prefix: str = "") -> tuple[int, int]:
        return tp_rank, tp_size

    sglang.STATE.backend = "weft"
    assert models.replicate_shared_expert(init, None, prefix="mlp.shared_experts") == (0, 1)
    assert models.replicate_shared_expert(init, None, prefix="mlp") == (3, 4)

    boundary = "sglang.srt.layers.layer_boundary"  # which has no limit of the fusion there
    monkeypatch.setitem(sys.modules, boundary, ModuleType(boundary))
    assert allreduce._read_max_fused_tokens() == sglang.FUSE_ALLREDUCE_MAX_BATCH_SIZE
    sglang.ExpertLocationDispatchInfo = SimpleNamespace(init_new=lambda layer_id: f"of {layer_id}")
    block = SimpleNamespace(layer_id=5, gate=lambda x: (x, None), topk=lambda *_, **more: more)
    batch, x = SimpleNamespace(num_token_non_padded=6), torch.ones(1)
    for draft, several in ((False, True), (True, False)):
        block.is_nextn = draft
        sglang.enable_num_token_non_padded = lambda several=several: several
        assert engine._run_router(block, x, batch) == {
            "num_token_non_padded": 6 if several else None,  # which is stale with one rank
            "expert_location_dispatch_info": None if draft else "of 5",
        }


REFUSED_FLAGS: list[tuple[dict[str, Any], str]] = [
    ({"enable_two_batch_overlap": True}, "-two-batch-overlap .weft overlaps within a batch: WEFT_"),
    ({"enable_torch_compile": True, "enable_pdmux": True},
     "--enable-torch-compile .use CUDA graphs alone., --enable-pdmux .use --disaggregation-mode"),
    ({"elastic_ep_backend": "mooncake"}, "--elastic-ep-backend mooncake .use weft"),
    ({"elastic_ep_backend": "weft", "moe_dense_tp_size": 1, "max_ep_size": 8},
     "weft needs --disable-overlap-schedule, --enable-dp-lm-head, --enable-dp-attention-local-"
     "control-broadcast, no --max-ep-size, --ep-dispatch-algorithm static or dynamic: "),
    ({"enable_decoder_swa_bounded_replay": True}, "pass --no-enable-decoder-swa-bounded-replay"),
    ({"attn_cp_size": 2}, "--attn-cp-size .use --attn-dp-size"),
    ({"startup_weight_load_mode": "overlap"}, "--startup-weight-load-mode overlap .use serial"),
    ({"weight_cache_mode": "client"}, "--weight-cache-mode client .use off"),
    ({"cpu_offload_gb": 8, "offload_group_size": 2, "enable_paged_experts": True},
     "--cpu-offload-gb .experts stay on the GPUs: use more ranks., --offload-group-size .*, "
     "--enable-paged-experts "),
    ({"offload_group_size": -1, "kt_weight_path": "folder"}, "support --kt-weight-path .experts"),
    ({"enforce_shared_experts_fusion": True}, "-fusion .weft overlaps the shared expert: WEFT_"),
    ({"enable_nvidia_megakernel": True}, "--enable-nvidia-megakernel .its kernels replace"),
    ({"enable_lora": True}, "--lora-target-modules is not given: pass"),
    ({"enable_lora": True, "lora_target_modules": {"q_proj", "gate_up_proj"}},
     "--lora-target-modules is gate_up_proj q_proj: pass a subset of fused_qkv_a_proj_with_mqa"),
]  # fmt: skip


def test_unsupported_flags_are_refused(sglang: Any) -> None:
    for changes, text in REFUSED_FLAGS:
        with pytest.raises(InvalidArgument, match=text):
            flags.check_server(sglang.make_args(**changes))


def test_a_backend_that_no_layer_uses_is_refused(sglang: Any) -> None:
    """SGLang may replace the backend, or the model may be dense."""
    passed, model = sglang.make_args(moe_a2a_backend="weft"), SimpleNamespace()
    for resolved, text in (
        (
            "deepep",
            "replaced --moe-a2a-backend weft by 'deepep' because of .*"
            "remove --enable-waterfill and --dwdp-size",
        ),
        ("weft", "SimpleNamespace has no MoE layers that weft runs: remove"),
    ):
        server_args = sglang.make_args(moe_a2a_backend=resolved)
        with pytest.raises(InvalidArgument, match=text):
            flags.check_unused(passed, server_args, model)
        flags.check_unused(sglang.make_args(), server_args, model)
        server_args.pp_size = 2  # a rank may have dense layers alone
        flags.check_unused(passed, server_args, model)


def test_the_server_is_ended_by_a_signal_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *inputs: sent.append(inputs))
    create_server_terminator(-1)()
    assert sent == []
    create_server_terminator(os.getppid())()
    assert sent == [(os.getppid(), signal.SIGQUIT)]


def test_limits() -> None:
    """Limits are rounded up over the ranks of an attention group, up to 512 and 4096."""
    for decode, chunk, ranks, asked, expected in (
        (64, 2048, 1, None, (64, 2048)),
        (65, 2049, 4, None, (17, 513)),
        (4000, 1 << 17, 1, None, (512, 4096)),
        (64, 2048, 2, 100, (32, 100)),
        (64, 2048, 1, 10, (64, 64)),
    ):
        limits = Limits.from_server(decode, chunk, attention_ranks=ranks, prefill_tokens=asked)
        assert limits == Limits(*expected)


def test_decode_tokens_are_those_of_graphs_that_are_captured(sglang: Any) -> None:
    """SGLang also has sizes with --disable-cuda-graph, which are ignored."""
    args = sglang.make_args(chunked_prefill_size=128)
    for backend, decode in (("full", 32), ("breakable", 32), ("disabled", 64)):
        args.cuda_graph_config.decode = SimpleNamespace(backend=backend, max_bs=32, bs=[1, 32])
        assert flags.compute_limits(args, Settings()) == Limits(decode, 128)


def fused(dtype: torch.dtype = torch.bfloat16, **other: Any) -> Any:
    """Return a layer of 4 of 8 experts as SGLang loads it: hidden and intermediate size 128."""
    standin = install_standin("sglang", RELEASE)
    standin.STATE.parallel.moe_ep_size, standin.STATE.parallel.moe_ep_rank = 2, 1
    layer = standin.FusedMoE(7, torch.bfloat16, 2.5, False)
    changes: dict[str, Any] = {}
    for name, rows in (("w13", 256), ("w2", 128)):
        changes[f"{name}_weight"] = torch.zeros(4, rows, 128, dtype=dtype)
        if dtype == FP8:
            changes[f"{name}_weight_scale_inv"] = torch.ones(4, rows // 128, 1)
        if dtype == U8:  # MXFP4
            packed = quantize_mxfp4(torch.randn(4, rows, 128))
            values, scales = (torch.nn.Parameter(each, requires_grad=False) for each in packed)
            changes |= {f"{name}_weight": values, f"{name}_weight_scale": scales}
    for name, value in (changes | other).items():
        owner, _, field = name.replace("config__", "moe_runner_config__").rpartition("__")
        target = getattr(layer, owner) if owner else layer
        if hasattr(target, field):
            delattr(target, field)  # a parameter accepts only parameters
        setattr(target, field, value)
    return layer


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_weights_are_taken_without_a_copy(dtype: torch.dtype) -> None:
    layer = fused(dtype)
    check_experts(layer, form="block")
    as_weft = build_layer(layer)
    own, config = as_weft.local_expert_weights(), as_weft.build_config(shared=128)
    own.check(config, 4, torch.device("cpu"), fp8=as_weft.uses_fp8_rows)
    assert own.gate_up.data_ptr() == layer.w13_weight.data_ptr()
    assert own.down.data_ptr() == layer.w2_weight.data_ptr()
    assert as_weft.uses_fp8_rows == (dtype == torch.float8_e4m3fn)
    if as_weft.uses_fp8_rows:
        assert own.gate_up_scale is not None
        assert own.gate_up_scale.data_ptr() == layer.w13_weight_scale_inv.data_ptr()
    assert (config.shared, config.routing.num_experts, config.routing.top_k) == (128, 8, 3)
    assert (as_weft.local_expert_ids(), as_weft.scale) == ((4, 5, 6, 7), 2.5)


def test_mxfp4_is_left_as_loaded_and_packed() -> None:
    """SGLang would convert it to bfloat16, or to another kernel's format."""
    layer, changed = fused(torch.uint8), []
    enter()
    from weft.plugins.sglang.dispatcher import BlockDispatcher, ExchangeDispatcher

    for kind in (BlockDispatcher, ExchangeDispatcher):
        layer.dispatcher = kind(7)
        models.keep_mxfp4_layout(lambda *inputs: changed.append(inputs), "method", layer)
    assert changed == [("method", layer)]
    check_experts(layer, form="block")
    expected = dequantize_mxfp4(layer.w13_weight, layer.w13_weight_scale)
    as_weft = build_layer(layer)
    own = as_weft.local_expert_weights()
    own.check(as_weft.build_config(), 4, torch.device("cpu"), fp8=as_weft.uses_fp8_rows)
    assert own.gate_up_scale is not None
    assert torch.equal(unpack_mxfp4(own.gate_up, own.gate_up_scale), expected)
    assert own.gate_up.data_ptr() == layer.w13_weight.data_ptr()  # which EPLB moves
    assert own.gate_up_scale.data_ptr() == layer.w13_weight_scale.data_ptr()
    with pytest.raises(OutOfOrder, match=r"layer 7\.w2_weight is in weft's row order"):
        layer.w2_weight.weight_loader(layer.w2_weight, own.down)
    with pytest.raises(OutOfOrder, match=r"layer 7\.w2_weight is in weft's row order"):
        engine.load_directly(print, layer, [("w2_weight", own.down)])


def test_mxfp4_of_sglangs_fp8_method_is_converted() -> None:
    """DeepSeek-V4: int8 values, and scales in float32."""
    layer = fused(torch.uint8)
    expected = dequantize_mxfp4(layer.w2_weight, layer.w2_weight_scale)
    layer.quant_method.is_fp4_expert = True
    for name in ("w13", "w2"):
        weight, scale = (getattr(layer, f"{name}_{each}") for each in ("weight", "weight_scale"))
        weight.data = weight.data.view(torch.int8)
        scale.data = scale.data.view(torch.float8_e8m0fnu).float()
        delattr(layer, f"{name}_weight_scale")
        setattr(layer, f"{name}_weight_scale_inv", scale)
    with pytest.raises(InvalidArgument, match="Triton runner has no MXFP4 experts"):
        check_experts(layer, form="dispatcher")
    unify_mxfp4(layer)
    check_experts(layer, form="block")
    loaded = build_layer(layer)
    formats = loaded.read_formats()
    for _ in range(2):  # SGLang restores a layer before it loads weights again
        build_layer(layer).local_expert_weights()
        loaded.restore(formats)
        split_mxfp4(layer)
        assert (layer.w2_weight.dtype, layer.w2_weight_scale_inv.dtype) == (
            torch.int8,
            torch.float32,
        )
        assert not hasattr(layer.w2_weight, "weight_loader")
        unify_mxfp4(layer)
        restored = dequantize_mxfp4(layer.w2_weight.data, layer.w2_weight_scale_inv.data)
        assert torch.equal(restored, expected)
    own = build_layer(layer).local_expert_weights()
    assert own.down_scale is not None
    assert torch.equal(unpack_mxfp4(own.down, own.down_scale), expected)
    assert own.down_scale.data_ptr() == layer.w2_weight_scale_inv.data_ptr()
    layer.w13_weight.data = layer.w13_weight.data.view(torch.int8)
    layer.w13_weight_scale_inv.data = torch.full((4, 256, 4), 1.5)
    with pytest.raises(InvalidArgument, match="layer 7: w13_weight_scale_inv has values that are"):
        unify_mxfp4(layer)


def test_eplb_needs_one_format_on_all_ranks() -> None:
    layer, group = fused(torch.uint8), SimpleNamespace()
    layer.w13_weight_scale.data[0, 0, :2] = torch.tensor([1, 200])  # too far apart to be packed
    with pytest.raises(InvalidArgument, match="EPLB needs one format on all ranks"):
        Blocks(group, Limits(1, 1), Settings()).add_block(build_layer(layer), moves_experts=True)  # type: ignore[arg-type]


def test_supported_activations() -> None:
    oai = {"config__gemm1_alpha": 1.702, "config__gemm1_clamp_limit": 7.0}
    split = oai | {"config__gate_up_interleaved": False}
    situ = split | {"config__activation": "situ", "config__gemm1_alpha": 4.0}
    situ["config__gemm1_clamp_limit"] = 25.0
    for more, gating, interleaved in (
        ({}, Gating(), False),
        ({"config__swiglu_limit": 10}, Gating(limit=10), False),
        (oai, CLAMPED_SWIGLU, True),
        (split, CLAMPED_SWIGLU, False),
        (situ, Gating(beta=4.0, linear_beta=25.0), False),
    ):
        layer = fused(**more)
        check_experts(layer, form="block")
        assert build_layer(layer).build_config().gating == gating
        assert build_layer(layer).interleaved == interleaved


RUNNER = SimpleNamespace(runner_backend=SimpleNamespace(is_triton=lambda: False, value="deep_gemm"))
BIAS = {"w13_weight_bias": torch.zeros(4, 256), "w2_weight_bias": torch.zeros(4)}
TURNED = torch.zeros(4, 128, 128, dtype=torch.bfloat16)
UE8M0 = SimpleNamespace(format_ue8m0=True)
REFUSED: list[tuple[torch.dtype, dict[str, Any], str]] = [
    (BF16, {"num_fused_shared_experts": 1}, "--disable-shared-experts-fusion"),
    (BF16, {"moe_tp_size": 2}, "moe_tp_size is 2; weft supports 1"),
    (BF16, {"num_experts": 9}, "num_experts is 9, num_local_experts 4 on 2 ranks"),
    (BF16, {"config__activation": "gelu"}, "config.activation is 'gelu'; weft supports 'silu'"),
    (BF16, {"config__activation": "situ"}, "config.activation is 'situ'; weft supports 'silu'"),
    (BF16, {"config__gemm1_clamp_limit": 7.0}, "clamp_limit is 7.0; weft supports None"),
    (BF16, {"config__swiglu_limit": 10, "config__gemm1_alpha": 1.702},
     "swiglu_limit is 10; weft supports None"),
    (BF16, {"config__gemm1_beta": 2.0}, "gemm1_beta is 2.0; weft supports 1"),
    (BF16, {"with_bias": True, **BIAS}, r"bias is \[4\] torch.float32; weft supports \[4, 128\]"),
    (U8, {"params_dtype": torch.float32}, "weft supports bfloat16 and float16 for MXFP4"),
    (U8, {"intermediate_size_per_partition": 256},
     r"w13_weight is \[4, 256, 64\] for intermediate 256 and hidden 128; weft supports"),
    (U8, {"w13_weight_scale": torch.ones(4, 256, 4)},
     r"_scale is \[4, 256, 4\] torch.float32; weft supports \[4, 256, 4\] torch.uint8"),
    (BF16, {"quant_method__load_up_proj_weight_first": True}, "the up projection first"),
    (BF16, {"quant_method__runner": RUNNER}, "the runner is 'deep_gemm', whose weight layout may"),
    (BF16, {"quant_method": SimpleNamespace()}, "the runner is unknown"),
    (BF16, {"params_dtype": torch.float64}, "params_dtype is torch.float64"),
    (BF16, {"w2_weight": TURNED.mT}, "torch.bfloat16, not contiguous; weft supports"),
    (BF16, {"w2_weight_scale": torch.ones(1)}, "w2_weight is torch.bfloat16 with sc"),
    (FP8, {"w13_weight_scale_inv": None}, "weft supports a float32 scale per block of 128 x 128"),
    (FP8, {"w2_weight_scale_inv": torch.ones(4, 256, 1)},
     r"_inv is \[4, 256, 1\] torch.float32; weft supports \[4, 1, 1\]"),
    (FP8, {"w13_weight_scale_inv": UE8M0}, "w13_weight_scale_inv has format_ue8m0"),
    (FP8, {"intermediate_size_per_partition": 96},
     r"w13_weight is \[4, 192, 128\]; in FP8, weft supports multiples of 128"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "changes", "text"), REFUSED, ids=[r[2][:30] for r in REFUSED])
def test_unsupported_experts_are_refused(
    dtype: torch.dtype, changes: dict[str, Any], text: str
) -> None:
    """The error names the layer, the attribute, its value and supported values."""
    with pytest.raises(InvalidArgument, match=text) as raised:
        check_experts(fused(dtype, **changes), form="block")
    assert "does not support the experts of layer 7 in form 'block'" in str(raised.value)


def test_the_runner_of_the_dispatcher_form_has_any_arithmetic() -> None:
    """Only the placement must be weft's."""
    check_experts(fused(with_bias=True, config__activation="gelu"), form="dispatcher")
    with pytest.raises(InvalidArgument, match="moe_tp_size is 2"):
        check_experts(fused(moe_tp_size=2), form="dispatcher")
