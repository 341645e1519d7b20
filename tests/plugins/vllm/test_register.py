# SPDX-License-Identifier: Apache-2.0
"""Checks before vLLM gets weft's layer, and refused servers and layers."""

import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import weft.compat.flashinfer
from tests.plugins.standins import Kept, refuse
from tests.plugins.vllm.workers import config_of, enter, leave, parallel
from weft.errors import InvalidArgument, OutOfOrder, SetupError
from weft.fp8 import quantize
from weft.moe import RELU2, Gating
from weft.plugins.blocks import Limits
from weft.plugins.engine_api import Engine
from weft.plugins.vllm import allreduce, engine
from weft.plugins.vllm.weights import convert_mxfp8, read_gating


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    """Install the stand-in, with weft's plug-in off."""
    enter("")
    yield
    leave()


def of_vllm(name: str) -> Any:
    """Return the stand-in's object of this name."""
    return getattr(importlib.import_module("vllm"), name)


def layer(*args: Any, **more: Any) -> Any:
    return of_vllm("RoutedExperts")("experts", *args, **more)


def test_layers_are_registered_once_and_where_weft_is_on() -> None:
    assert of_vllm("op_registry_oot") == {}
    enter("block")
    enter("block")
    registered = of_vllm("op_registry_oot")["RoutedExperts"]
    assert registered.__module__ == "weft.plugins.vllm.layers"
    experts = layer(config_of())
    assert type(experts).__name__ == "WeftRoutedExperts"
    assert type(experts.quant_method).__name__ == "UnquantizedFusedMoEMethod"
    assert experts.intermediate_size_per_partition == 128  # the stock method rounds it up


def test_layers_that_models_derive_are_wefts_too() -> None:
    """vLLM's registry looks up a class's own name: without an entry the stock class would run."""
    enter("block")
    for kind in ("GptOssRoutedExperts", "TransformersRoutedExperts", "DbrxExperts"):
        stock = of_vllm(kind)
        experts = stock("experts", config_of())
        assert type(experts).__name__ == f"Weft{kind}"
        assert isinstance(experts, stock)
        assert type(experts.quant_method).__name__ == "UnquantizedFusedMoEMethod"
        with pytest.raises(InvalidArgument, match="apply_router_weight_on_input is True"):
            stock("experts", config_of(), on_input=True)


def test_experts_that_are_constants_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.33 has a separate layer for them, which would run without weft."""

    class SubstitutedRoutedExperts(of_vllm("RoutedExperts")):  # type: ignore[misc]
        def __init__(self, *args: Any, expert_substitution: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(engine, "find_derived_classes", lambda: [SubstitutedRoutedExperts])
    enter("exchange")
    with pytest.raises(InvalidArgument, match="layer: the checkpoint replaces some by c"):
        SubstitutedRoutedExperts("layer", config_of(), expert_substitution=object())


def test_an_unsupported_vllm_is_refused_before_patching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "check", refuse)
    with pytest.raises(SetupError, match="differs"):
        enter("block")
    assert of_vllm("op_registry_oot") == {}


def test_a_layer_of_another_plug_in_is_refused() -> None:
    """vLLM accepts one such layer, and would fail with an assertion."""
    other = type("Other", (), {"__module__": "another.plugin"})
    of_vllm("op_registry_oot")["RoutedExperts"] = other
    with pytest.raises(SetupError, match=r"another\.plugin\.Other is registered as vLLM's Routed"):
        enter("block")


def test_limits() -> None:
    """The limit is the largest graph, or the largest batch, split over sequence-parallel ranks."""
    config = of_vllm("make_config")()

    def limits(prefill_tokens: int | None = None, **more: int) -> Limits:
        return engine.compute_limits(config, parallel(0, 2, **more), prefill_tokens=prefill_tokens)

    assert limits() == Limits(4, 32)
    config.compilation_config.max_cudagraph_capture_size = 512
    config.scheduler_config.max_num_batched_tokens = 8192
    assert limits() == Limits(512, 4096)
    assert limits(sp_size=2) == Limits(256, 4096)
    assert limits(1000) == Limits(512, 1000)


FLAGS = [
    ("all2all_backend", "deepep_low_latency", "--all2all-backend is deepep_low_late"),
    ("expert_placement_strategy", "round_robin", "strategy is round_robin; weft supports"),
    ("enable_dbo", True, "--enable-dbo is not supported: .* use WEFT_VLLM_OVERLAP"),
    ("ubatch_size", 2, "--enable-dbo is not supported"),
    ("enable_elastic_ep", True, "--enable-elastic-ep is not supported: start a server"),
    ("enable_fault_tolerance", True, "--enable-fault-tolerance is not supported: a rank's death"),
    ("prefill_context_parallel_size", 2, "-context-parallel-size .*: use --data-parallel-size"),
    ("lora_config", object(), "--enable-lora is not supported: merge the adapter"),
    ("enforce_eager", False, "on CPU ranks vLLM compiles .* add --enforce-eager"),
]
OFFLOADS = [
    ("cpu_offload_gb", 1.0, "--cpu-offload-gb is not supported: experts stay on the GPUs"),
    ("offload_group_size", 2, "--offload-group-size is not supported: experts stay"),
]


@pytest.mark.parametrize("form", ["block", "exchange"])
def test_unsupported_flags_are_refused(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """The first layer raises, before weights are loaded. `exchange` computes no experts."""
    enter(form)
    config = of_vllm("CURRENT")
    offload = config.offload_config
    for field, value, text in FLAGS + OFFLOADS:
        owners = (config.parallel_config, config.model_config, offload.uva, offload.prefetch)
        owner = next((each for each in owners if hasattr(each, field)), config)
        with monkeypatch.context() as patch:
            patch.setattr(owner, field, value)
            if form == "exchange" and (field, value, text) in OFFLOADS:
                layer(config_of())
                continue
            with pytest.raises(InvalidArgument, match=f"vLLM with these flags: .*{text}"):
                layer(config_of())


def test_an_unused_setting_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may have no layer that weft replaces."""
    from vllm.v1.worker.gpu_worker import Worker

    monkeypatch.setattr(engine, "_has_layers", False)
    enter("block")
    kept = Kept(logging.WARNING)
    for _ in range(2):
        Worker().load_model(load_dummy_weights=False)
        layer(config_of())
    assert len([line for line in kept.lines if "WEFT_VLLM=block has no effect" in line]) == 1


RANKS: list[
    tuple[dict[str, Any], str]
] = [  # such ranks have no tokens of their own, or no whole experts
    ({"use_ep": False, "ep_size": 1}, "ranks have parts of every expert: add --enable-e"),
    ({"dp_size": 1}, "add --data-parallel-size, or use WEFT_VLLM_ALLREDUCE=1 alone"),
    ({"ep_size": 4}, "remove --tensor-parallel-size"),
]
SITU, SWIGLUOAI = SimpleNamespace(value="situ"), SimpleNamespace(value="swigluoai")
BETAS: dict[str, Any] = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
UNINTERLEAVED = SimpleNamespace(value="swigluoai_uninterleave")
UNGATED: dict[str, Any] = {
    "activation": SimpleNamespace(value="relu2_no_mul"),
    "is_act_and_mul": False,
}
EXPERTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # vLLM's own experts may do all of it
    ({"activation": SimpleNamespace(value="gelu")}, {}, "activation is 'gelu'"),
    ({"is_act_and_mul": False}, {}, "activation is 'silu' with limit, alpha and"),
    (UNGATED, {"limit": 7.0}, r"activation is 'relu2_no_mul' with .* \(7.0, None"),
    ({"activation": UNINTERLEAVED}, {},
     r"activation is 'swigluoai_uninterleave' with limit, alpha and beta \(None, None, N"),
    ({"activation": SITU, "activation_situ_beta": 4.0}, {},
     r"activation is 'situ' with .* betas of SiTU \(4.0, None\)"),
    ({"activation": SITU, **BETAS}, {"limit": 7.0}, r"activation is 'situ' with .* \(7.0, None"),
    ({"activation": SWIGLUOAI}, {"limit": 10.0}, r"activation is 'swigluoai' with .* \(10.0, None"),
    ({}, {"on_input": True}, "apply_router_weight_on_input is True"),
    ({}, {"fused": 1}, "1 shared experts are fused into the routed experts"),
]  # fmt: skip


def test_unsupported_ranks_and_experts_are_refused() -> None:
    """Form block refuses experts of other arithmetic and methods; other layouts by shape."""
    enter("block")
    for changes, text in RANKS:
        with pytest.raises(InvalidArgument, match=text):
            layer(config_of(moe_parallel_config=parallel(0, 2, **changes)))
    assert read_gating(layer(config_of(**UNGATED))) == RELU2
    sequence = parallel(0, 4, dp_size=2, sp_size=2)  # where the model splits tokens it is served
    layer(config_of(moe_parallel_config=sequence))
    for config, more, text in EXPERTS:
        with pytest.raises(InvalidArgument, match=f"experts in form 'block': {text}.*exchange"):
            layer(config_of(**config), **more)
        os.environ["WEFT_VLLM"] = "exchange"
        layer(config_of(**config), **more)
        os.environ["WEFT_VLLM"] = "block"

    class Int8MoEMethod(of_vllm("Fp8MoEMethod")): ...  # type: ignore[misc]

    text = "their method is Int8MoEMethod; weft supports Unquant"
    with pytest.raises(InvalidArgument, match=text):
        layer(config_of(), Int8MoEMethod)
    experts = layer(config_of(num_local_experts=4))
    experts.w13_weight, experts.w2_weight = torch.zeros(4, 256, 128), torch.zeros(4, 32, 128)
    with pytest.raises(InvalidArgument) as raised:
        experts.quant_method.process_weights_after_loading(experts)
    for part in (
        "num_experts is 8, num_local_experts 4 on 1 ranks; weft needs equal numbers on all ranks",
        "w2_weight is [4, 32, 128] torch.float32; weft supports [4, 128, 128]",
    ):
        assert part in str(raised.value)


def test_mxfp4_experts_need_no_kernel_of_vllm() -> None:
    """The stock constructors select one and raise; an activation of another layout is refused."""
    enter("block")
    plain, gpt_oss = of_vllm("Mxfp4MoEMethod"), of_vllm("GptOssMxfp4MoEMethod")
    for config, limit, gating in (({}, 10.0, {"limit": 10.0}),
                                  ({"activation": SITU, **BETAS}, None,
                                   {"beta": 4.0, "linear_beta": 25.0})):  # fmt: skip
        experts = layer(config_of(**config), plain, limit=limit)
        assert type(experts.quant_method).__name__ == "Mxfp4MoEMethod"
        assert read_gating(experts) == Gating(**gating)
    for kind, activation in ((plain, SWIGLUOAI), (gpt_oss, SITU)):
        text = f"{kind.__name__} has experts with activation '{activation.value}'"
        with pytest.raises(InvalidArgument, match=text):
            layer(config_of(activation=activation, **BETAS), kind)
        with pytest.raises(NotImplementedError, match="No MXFP4 MoE backend"):
            kind(config_of())  # vLLM's own selection is in place again


def test_mxfp8_experts_become_fp8_with_block_scales() -> None:
    experts: Any = torch.nn.Module()
    experts.layer_name = "experts"
    expected = {}
    for name in ("w13_weight", "w2_weight"):
        values, scales = quantize(torch.randn(2, 256, 128), "mxfp8")
        expected[name] = values.float() * scales.float().repeat_interleave(32, 2)
        for suffix, tensor in (("", values), ("_scale", scales.view(torch.uint8))):
            experts.register_parameter(name + suffix, torch.nn.Parameter(tensor, False))
    for _ in range(2):  # vLLM may process a layer again
        convert_mxfp8(experts)
    for name, values in expected.items():
        scales = getattr(experts, f"{name}_scale_inv")
        factors = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
        error = (getattr(experts, name).float() * factors - values).abs().max()
        assert error <= scales.max() * 2.0**-10  # values below 2^-6 of a scale
        assert not hasattr(experts, f"{name}_scale")
    with pytest.raises(OutOfOrder, match="experts.w2_weight is in weft's row order or format"):
        experts.w2_weight.weight_loader(experts.w2_weight, values)
    experts.w2_weight.data, experts.w2_weight_scale = experts.w2_weight[:, :96], torch.zeros(1)
    with pytest.raises(InvalidArgument, match="w2_weight is .2, 96, 128.; weft supports multiples"):
        convert_mxfp8(experts)


def test_unsupported_rows_are_refused() -> None:
    """Rows that are quantised per token, for example."""
    uses_fp8_rows, experts = engine.uses_fp8_rows, SimpleNamespace(layer_name="experts")

    def kernel(dtype: torch.dtype | None, block: list[int] | None, raw: bool = False) -> Any:
        quant = SimpleNamespace(quant_dtype=dtype, block_shape=block)
        return SimpleNamespace(quant_config=quant, expects_unquantized_inputs=raw)

    fp8 = torch.float8_e4m3fn
    assert uses_fp8_rows(experts, kernel(fp8, [128, 128]))
    assert not uses_fp8_rows(experts, kernel(None, None))
    assert not uses_fp8_rows(experts, kernel(torch.int8, None, raw=True))
    with pytest.raises(InvalidArgument, match="needs rows of torch.float8_e4m3fn in blocks of No"):
        uses_fp8_rows(experts, kernel(fp8, None))


def test_the_fused_all_reduce_is_wefts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both attributes are replaced, or none."""
    modules: list[Any] = [ModuleType(each) for each in allreduce.MODULES]
    for each in modules:
        monkeypatch.setitem(sys.modules, each.__name__, each)
        each.flashinfer_comm = "FlashInfer"
    enter("", ALLREDUCE="1")
    assert [each.flashinfer_comm for each in modules] == [weft.compat.flashinfer] * 2
    assert of_vllm("op_registry_oot") == {}
    modules[0].flashinfer_comm, modules[1].flashinfer_comm = "FlashInfer", None
    with pytest.raises(SetupError, match=r"but vllm\S+flashinfer_all_reduce could not import it"):
        enter("", ALLREDUCE="1")
    assert modules[0].flashinfer_comm == "FlashInfer"


def test_a_worker_is_ended_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's monitor notices it, and ends the server."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *inputs: sent.append(inputs))
    engine.end_worker()
    assert sent == [(os.getpid(), signal.SIGKILL)]
