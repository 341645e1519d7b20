# SPDX-License-Identifier: Apache-2.0
"""What is checked before vLLM gets weft's layer, what settings may be, and what is refused."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.plugins.vllm.workers import config_of, enter, leave, parallel
from weft.errors import InvalidArgument, SetupError
from weft.plugins.names import Engine


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    """The stand-in, with weft's plug-in off."""
    enter("")
    yield
    leave()


def name(path: str) -> Any:
    """A name of the stand-in."""
    module, _, found = path.rpartition(".")
    return getattr(importlib.import_module(module), found)


EXPERTS = "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts"
REGISTRY = "vllm.model_executor.custom_op.op_registry_oot"


def test_nothing_is_registered_unless_it_is_asked_for() -> None:
    """And twice is once."""
    assert name(REGISTRY) == {}
    enter("block")
    enter("block")
    assert name(REGISTRY)["RoutedExperts"].__module__ == "weft.plugins.vllm.layers"
    experts = name(EXPERTS)("experts", config_of())
    assert type(experts).__name__ == "WeftRoutedExperts"
    assert type(experts.quant_method).__name__ == "UnquantizedFusedMoEMethod"
    assert experts.intermediate_size_per_partition == 128  # the stock method rounds it up


DERIVED = ("gpt_oss.GptOssRoutedExperts", "transformers.moe.TransformersRoutedExperts")


@pytest.mark.parametrize("path", [*DERIVED, "dbrx.DbrxExperts"])
def test_layers_that_models_derive_are_wefts_too(path: str) -> None:
    """vLLM's registry goes by a class's own name: without an entry the stock one would run."""
    enter("block")
    stock = name(f"vllm.model_executor.models.{path}")
    experts = stock("experts", config_of())
    assert type(experts).__name__ == f"Weft{stock.__name__}"
    assert isinstance(experts, stock)
    assert type(experts.quant_method).__name__ == "UnquantizedFusedMoEMethod"
    with pytest.raises(InvalidArgument, match="apply_router_weight_on_input is True"):
        stock("experts", config_of(), on_input=True)


@pytest.mark.parametrize("form", ["block", "exchange"])
def test_experts_that_are_constants_are_refused(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """vLLM 0.33 has a layer of its own for them, which would run without weft unless taken."""
    from weft.plugins.vllm import engine

    class SubstitutedRoutedExperts(name(EXPERTS)):  # type: ignore[misc]
        def __init__(self, *args: Any, expert_substitution: Any, **given: Any) -> None:
            super().__init__(*args, **given)

    monkeypatch.setattr(engine, "derived", lambda: [SubstitutedRoutedExperts])
    enter(form)
    with pytest.raises(
        InvalidArgument, match="experts of layer: the checkpoint replaces some by c"
    ):
        SubstitutedRoutedExperts("layer", config_of(), expert_substitution=object())


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One error lists all that differs."""
    monkeypatch.setattr(name(EXPERTS), "__init__", lambda self: None)
    monkeypatch.delattr(name("vllm.forward_context.DPMetadata"), "get_chunk_sizes_across_dp_rank")
    with pytest.raises(SetupError) as raised:
        enter("block")
    said = str(raised.value)
    for part in (
        "vLLM 0.32.0 is not what weft's plug-in knows, so nothing of it was patched: ",
        "RoutedExperts.__init__ has no _get_quant_method, activation, apply_router_weight_on_inp",
        "there is no vllm.forward_context.DPMetadata.get_chunk_sizes_across_dp_rank",
        "Served: 0.26.0, 0.32.0, 0.33.0; install one of them",
    ):
        assert part in said
    assert name(REGISTRY) == {}
    monkeypatch.undo()
    monkeypatch.setattr(Engine, "installed", lambda self: "0.31.0")
    with pytest.raises(SetupError, match="vLLM 0.31.0 .*: its version is another. Served"):
        enter("block")


def test_a_layer_of_another_plug_in_is_refused() -> None:
    """vLLM takes one, and would end with an assertion."""
    name(REGISTRY)["RoutedExperts"] = type("Other", (), {"__module__": "another.plugin"})
    with pytest.raises(SetupError, match=r"another\.plugin\.Other is registered as vLLM's Routed"):
        enter("block")


def test_limits() -> None:
    """Of the largest graph, or the largest batch without; split over sequence-parallel ranks."""
    from weft.plugins.blocks import Limits
    from weft.plugins.vllm.engine import limits_of

    config = name("vllm.config.VllmConfig")()
    assert limits_of(config, parallel(0, 2), wanted=None) == Limits(4, 32)
    config.compilation_config.max_cudagraph_capture_size = 512
    config.scheduler_config.max_num_batched_tokens = 8192
    assert limits_of(config, parallel(0, 2), wanted=None) == Limits(512, 4096)
    assert limits_of(config, parallel(0, 4, dp_size=2, sp_size=2), wanted=None) == Limits(256, 4096)
    assert limits_of(config, parallel(0, 2), wanted=1000) == Limits(512, 1000)


FLAGS: dict[str, tuple[dict[str, Any], str]] = {
    "backend": ({"all2all_backend": "deepep_low_latency"}, "--all2all-backend is deepep_low_late"),
    "placement": ({"expert_placement_strategy": "round_robin"}, "strategy is round_robin, served"),
    "dbo": ({"enable_dbo": True}, "--enable-dbo is not served: leave it out"),
    "ubatches": ({"ubatch_size": 2}, "--enable-dbo is not served"),
    "elastic": ({"enable_elastic_ep": True}, "--enable-elastic-ep is not served"),
    "pcp": ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size is not served"),
    "lora": ({"lora_config": object()}, "--enable-lora is not served"),
    "sleep": ({"enable_sleep_mode": True}, "--enable-sleep-mode is not served"),
    "compiled": ({"enforce_eager": False}, "on CPU ranks vLLM compiles .* add --enforce-eager"),
}


@pytest.mark.parametrize("form", ["block", "exchange"])
@pytest.mark.parametrize("what", FLAGS)
def test_flags_that_are_refused(monkeypatch: pytest.MonkeyPatch, what: str, form: str) -> None:
    """When the first layer is made: before weights are loaded."""
    more, text = FLAGS[what]
    enter(form)
    config = name("vllm.config.CURRENT")
    for field, value in more.items():
        owners = (config.parallel_config, config.model_config, config)
        monkeypatch.setattr(next(each for each in owners if hasattr(each, field)), field, value)
    with pytest.raises(InvalidArgument, match=f"cannot serve vLLM as it was started: .*{text}"):
        name(EXPERTS)("experts", config_of())


RANKS: dict[str, tuple[dict[str, Any], str]] = {
    "no ep": ({"use_ep": False, "ep_size": 1}, "ranks have parts of every expert: add --enable-e"),
    "tp alone": ({"dp_size": 1}, "add --data-parallel-size, or take WEFT_VLLM_ALLREDUCE=1 alone"),
    "tp in dp": ({"ep_size": 4}, "leave out --tensor-parallel-size"),
}


@pytest.mark.parametrize("what", RANKS)
def test_ranks_that_are_refused(what: str) -> None:
    """They have no tokens of their own, or no whole experts."""
    more, text = RANKS[what]
    enter("block")
    with pytest.raises(InvalidArgument, match=text):
        name(EXPERTS)("experts", config_of(moe_parallel_config=parallel(0, 2, **more)))
    sequence = parallel(0, 4, dp_size=2, sp_size=2)  # where the model splits tokens it is served
    name(EXPERTS)("experts", config_of(moe_parallel_config=sequence))


ARITHMETIC: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "activation": ({"activation": SimpleNamespace(value="gelu")}, {}, "activation is 'gelu'"),
    "ungated": ({"is_act_and_mul": False}, {}, "activation is 'silu' with limit, alpha and"),
    "not packed": (
        {"activation": SimpleNamespace(value="swigluoai_uninterleave")},
        {},
        r"activation is 'swigluoai_uninterleave' with limit, alpha and beta \(None, None, None\)",
    ),
    "on input": ({}, {"on_input": True}, "apply_router_weight_on_input is True"),
}


@pytest.mark.parametrize("what", ARITHMETIC)
def test_experts_that_are_refused(what: str) -> None:
    """In form block, which the error says; vLLM's own experts may do all of it."""
    config, more, text = ARITHMETIC[what]
    enter("block")
    with pytest.raises(InvalidArgument, match=f"experts in form 'block': {text}.*exchange"):
        name(EXPERTS)("experts", config_of(**config), **more)
    os.environ["WEFT_VLLM"] = "exchange"
    name(EXPERTS)("experts", config_of(**config), **more)


def test_methods_and_tensors_that_are_refused() -> None:
    """Other quantisations by their name, and other layouts by their shapes."""
    enter("block")

    class Int8MoEMethod(
        name("vllm.model_executor.layers.quantization.fp8.Fp8MoEMethod")  # type: ignore[misc]
    ): ...

    with pytest.raises(InvalidArgument, match="their method is Int8MoEMethod, served are Unquant"):
        name(EXPERTS)("experts", config_of(), Int8MoEMethod)
    experts = name(EXPERTS)("experts", config_of(num_local_experts=4))
    experts.w13_weight, experts.w2_weight = torch.zeros(4, 256, 128), torch.zeros(4, 32, 128)
    with pytest.raises(InvalidArgument) as raised:
        experts.quant_method.process_weights_after_loading(experts)
    said = str(raised.value)
    assert "num_experts is 8, num_local_experts 4 on 1 ranks; served are equal parts" in said
    assert "w2_weight is [4, 32, 128] torch.float32, served is [4, 128, 128]" in said


def test_rows_that_weft_does_not_carry_are_refused() -> None:
    """Quantised by token, say."""
    from weft.plugins.vllm.engine import travels_as_fp8

    experts = SimpleNamespace(layer_name="experts")

    def kernel(dtype: torch.dtype | None, block: list[int] | None, raw: bool = False) -> Any:
        quant = SimpleNamespace(quant_dtype=dtype, block_shape=block)
        return SimpleNamespace(quant_config=quant, expects_unquantized_inputs=raw)

    fp8 = torch.float8_e4m3fn
    assert travels_as_fp8(experts, kernel(fp8, [128, 128]))
    assert not travels_as_fp8(experts, kernel(None, None))
    assert not travels_as_fp8(experts, kernel(torch.int8, None, raw=True))
    with pytest.raises(InvalidArgument, match="takes rows of torch.float8_e4m3fn in blocks of No"):
        travels_as_fp8(experts, kernel(fp8, None))


def test_the_fused_all_reduce_is_wefts() -> None:
    """Both attributes, or none."""
    import weft.compat.flashinfer
    from weft.plugins.vllm import allreduce

    modules: list[Any] = [importlib.import_module(each) for each in allreduce.HOLDERS]
    enter("", ALLREDUCE="1")
    assert [each.flashinfer_comm for each in modules] == [weft.compat.flashinfer] * 2
    assert name(REGISTRY) == {}
    modules[0].flashinfer_comm, modules[1].flashinfer_comm = "FlashInfer", None
    with pytest.raises(SetupError, match=r"and vllm\S+flashinfer_all_reduce found none"):
        enter("", ALLREDUCE="1")
    assert modules[0].flashinfer_comm == "FlashInfer"


def test_a_worker_is_ended_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's monitor hears of it, and ends the server."""
    from weft.plugins.vllm.engine import end_worker

    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    end_worker()
    assert sent == [(os.getpid(), signal.SIGKILL)]
