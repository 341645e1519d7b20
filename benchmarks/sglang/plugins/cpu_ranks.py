# SPDX-License-Identifier: Apache-2.0
"""SGLang's plug-in "weft_cpu": DP attention on CPU ranks, for all servers.

SGLang serves on CPUs (SGLANG_USE_CPU_ENGINE=1), but parts of DP attention and of padded batches
need a GPU. This plug-in implements them in plain torch, slowly and exactly in float32, so that
weft's blocks can be compared with SGLang's without a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


def register() -> None:
    """Replace functions that need a GPU."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    rows = "sglang.kernels.ops.memory.memcpy_triton.memcpy_triton"
    HookRegistry.register(rows, copy_rows, HookType.REPLACE)
    attention = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.__init__"
    HookRegistry.register(attention, padded_length, HookType.AFTER)
    batch = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
    around = {
        "sglang.srt.layers.moe.topk.select_experts": choose,
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": weigh,
        f"{batch}.prepare_mlp_sync_batch": unpinned,
        "sglang.srt.lora.lora_manager.LoRAManager.__init__": unpinned,
        "sglang.srt.lora.backend.torch_backend.TorchNativeLoRABackend.prepare_lora_batch": unpinned,
    }
    if find_spec("sglang.srt.arg_groups.model_hook"):  # 0.5.23
        native = attention.rpartition(".")[0]
        around |= {
            "sglang.srt.arg_groups.model_hook.attention_backends_of": attention_of_models,
            f"{native}.forward_extend": without_sinks,
            f"{native}.forward_decode": without_sinks,
        }
        gated = "sglang.kernels.ops.elementwise.elementwise.fused_gate_sigmoid_mul_add"
        HookRegistry.register(gated, add_gated, HookType.REPLACE)
        norms = "sglang.srt.models.minimax_m2.MiniMaxM2QKRMSNorm.forward"
        HookRegistry.register(norms, norm_both, HookType.REPLACE)
    for target, function in around.items():
        HookRegistry.register(target, function, HookType.AROUND)
    # SGLang calls these when it moves experts; a CUDA build of torch 2.14 reports CUDA without a
    # GPU.
    torch.cpu.empty_cache = lambda: None
    torch.get_device_module = functools.partial(module_of, torch.get_device_module)
    torch.Tensor.pin_memory = lambda tensor, *device: tensor


def padded_length(result: object, backend: Any, *args: Any) -> None:
    """After TorchNativeAttnBackend's constructor: set the length of padding rows."""
    backend.get_cuda_graph_seq_len_fill_value = lambda: 1
    backend.get_cpu_graph_seq_len_fill_value = lambda: 1  # 0.5.23


def attention_of_models(original: Callable[..., Any], view: Any) -> Any:
    """Around the function that returns the selected attention backends to the models' rules.

    SGLang refuses GPT-OSS with plain torch attention, which has neither sinks nor windows. Only
    experts are compared here, and all servers run without both.
    """
    folder = getattr(view, "model_path", None)  # only set for the command line's flags
    config = {} if folder is None else json.loads((Path(folder) / "config.json").read_text())
    return ("intel_amx",) * 2 if config.get("model_type") == "gpt_oss" else original(view)


def without_sinks(
    original: Callable[..., Any], *args: Any, sinks: Any = None, **kwargs: Any
) -> Any:
    """Around plain torch's attention, which does not support sinks."""
    return original(*args, **kwargs)


def add_gated(x: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor) -> None:
    """Add a shared expert's rows, weighted by their gate `[1, hidden]`."""
    out += torch.sigmoid(x @ gate.view(-1, 1)) * shared


def norm_both(norms: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over all queries, and all keys, of a token; they must be on one rank (MiniMax-M2)."""
    if norms._world_size > 1:
        raise NotImplementedError("queries are on several ranks: leave out attention's TP")

    def normed(x: torch.Tensor, norm: Any) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)

    return normed(q, norms._q_norm), normed(k, norms._k_norm)


def module_of(original: Callable[..., Any], device: Any = None) -> Any:
    """Around torch.get_device_module: default to the CPU."""
    return original("cpu" if device is None else device)


def copy_rows(
    to: torch.Tensor,
    source: torch.Tensor,
    dim: int,
    offset: torch.Tensor,
    count: torch.Tensor,
    offset_of_source: bool,
) -> None:
    """Copy `count` rows from or to row `offset`."""
    if dim != 0:
        raise NotImplementedError(f"dim is {dim}, rows are dim 0")
    begin, rows = int(offset), int(count)
    if offset_of_source:
        to[:rows] = source[begin : begin + rows]
    else:
        to[begin : begin + rows] = source[:rows]


def choose(original: Callable[..., Any], *, topk_config: Any, **kwargs: Any) -> Any:
    """Around select_experts: mask padding rows, and map experts to replicas.

    In 0.5.17, routing in plain torch ignores replicas unless the model has its own routing
    function, and expert locations are looked up on GPUs only. 0.5.23 does both.
    """
    from sglang.srt.layers.moe.topk import TopK

    if hasattr(TopK, "routing_inputs"):
        return original(topk_config=topk_config, **kwargs)
    num_valid = kwargs.pop("num_token_non_padded", None)
    places = kwargs.get("expert_location_dispatch_info")
    if places is not None:
        from sglang.srt.eplb.expert_location_dispatch import topk_ids_logical_to_physical
        from sglang.srt.layers.moe.topk import fused_topk_native

        options = {name: getattr(topk_config, name) for name in ("scoring_func", "correction_bias")}
        plain = functools.partial(fused_topk_native, **options)
        topk_config = dataclasses.replace(topk_config, custom_routing_function=plain)
    chosen = original(topk_config=topk_config, **kwargs)
    if places is not None:
        chosen = chosen._replace(topk_ids=topk_ids_logical_to_physical(chosen.topk_ids, places))
    if num_valid is not None:
        chosen.topk_ids[int(num_valid) :] = -1
    return chosen


def weigh(original: Callable[..., Any], layer: Any, x: Any, chosen: Any, config: Any) -> Any:
    """Around moe_forward_native, which takes no ids of -1: replace them by experts of weight 0.

    Each is an expert that its row does not use yet, because a row's experts must differ there.
    """
    ids, experts = chosen.topk_ids.long(), len(layer.w13_weight)
    unused = ids < 0
    named = ids.new_zeros((len(ids), experts + 1)).scatter_(1, ids.masked_fill(unused, experts), 1)
    free = named[:, :experts].argsort(dim=1, stable=True)
    ids = torch.where(unused, free.gather(1, (unused.cumsum(1) - 1).clamp(min=0)), ids)
    weights = chosen.topk_weights.masked_fill(unused, 0.0)
    return original(layer, x, chosen._replace(topk_ids=ids, topk_weights=weights), config)


def unpinned(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around functions that allocate pinned memory, which does not exist without a GPU."""

    def plain(make: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = make(*args, **kwargs)
        return tensor

    kept = {name: getattr(torch, name) for name in ("empty", "tensor", "zeros")}
    for name, make in kept.items():
        setattr(torch, name, functools.partial(plain, make))
    try:
        return original(*args, **kwargs)
    finally:
        for name, make in kept.items():
            setattr(torch, name, make)
