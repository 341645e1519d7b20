# SPDX-License-Identifier: Apache-2.0
"""SGLang's DP attention on CPU ranks: SGLang's plug-in "weft_cpu", for all servers alike.

SGLang serves on CPUs (SGLANG_USE_CPU_ENGINE=1), but some of what DP attention and padded batches
need it has for GPUs alone. Here that is done in plain torch. Slow, and exact in float32: weft's
blocks can be held to SGLang's own without a GPU.
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
    """Replace what needs a GPU."""
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
    # What SGLang calls when it moves experts; a CUDA build of torch 2.14 says CUDA without a GPU.
    torch.cpu.empty_cache = lambda: None
    torch.get_device_module = functools.partial(module_of, torch.get_device_module)
    torch.Tensor.pin_memory = lambda tensor, *device: tensor


def padded_length(result: object, backend: Any, *args: Any) -> None:
    """After TorchNativeAttnBackend's constructor: it does not say how long a padding row is."""
    backend.get_cuda_graph_seq_len_fill_value = lambda: 1
    backend.get_cpu_graph_seq_len_fill_value = lambda: 1  # 0.5.23


def attention_of_models(original: Callable[..., Any], view: Any) -> Any:
    """Around what tells the rules of models which attention was chosen.

    GPT-OSS is refused with plain torch's, which has no sinks and no windows. Here experts are
    compared, and every server does without both.
    """
    folder = getattr(view, "model_path", None)  # of the command line's flags alone
    config = {} if folder is None else json.loads((Path(folder) / "config.json").read_text())
    return ("intel_amx",) * 2 if config.get("model_type") == "gpt_oss" else original(view)


def without_sinks(original: Callable[..., Any], *args: Any, sinks: Any = None, **given: Any) -> Any:
    """Around plain torch's attention, which does not know them."""
    return original(*args, **given)


def add_gated(x: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, out: torch.Tensor) -> None:
    """Add a shared expert's rows by their gate, `[1, hidden]`."""
    out += torch.sigmoid(x @ gate.view(-1, 1)) * shared


def norm_both(norms: Any, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of all of a token's queries, and of all its keys, which one rank has (MiniMax-M2)."""
    if norms._world_size > 1:
        raise NotImplementedError("queries are on several ranks: leave out attention's TP")

    def normed(x: torch.Tensor, norm: Any) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)

    return normed(q, norms._q_norm), normed(k, norms._k_norm)


def module_of(original: Callable[..., Any], device: Any = None) -> Any:
    """Around torch.get_device_module."""
    return original("cpu" if device is None else device)


def copy_rows(
    to: torch.Tensor,
    source: torch.Tensor,
    dim: int,
    offset: torch.Tensor,
    count: torch.Tensor,
    offset_of_source: bool,
) -> None:
    """Copy `count` rows, from or to row `offset`."""
    if dim != 0:
        raise NotImplementedError(f"dim is {dim}, rows are dim 0")
    begin, rows = int(offset), int(count)
    if offset_of_source:
        to[:rows] = source[begin : begin + rows]
    else:
        to[begin : begin + rows] = source[:rows]


def choose(original: Callable[..., Any], *, topk_config: Any, **given: Any) -> Any:
    """Around select_experts: rows that pad a batch have no experts, and experts may have replicas.

    0.5.17's choice in plain torch takes no replicas, but those of a function of the model's do.
    Where an expert lies it looks up on GPUs only. 0.5.23 does both itself.
    """
    from sglang.srt.layers.moe.topk import TopK

    if hasattr(TopK, "routing_inputs"):
        return original(topk_config=topk_config, **given)
    real = given.pop("num_token_non_padded", None)
    places = given.get("expert_location_dispatch_info")
    if places is not None:
        from sglang.srt.eplb.expert_location_dispatch import topk_ids_logical_to_physical
        from sglang.srt.layers.moe.topk import fused_topk_native

        ways = {name: getattr(topk_config, name) for name in ("scoring_func", "correction_bias")}
        plain = functools.partial(fused_topk_native, **ways)
        topk_config = dataclasses.replace(topk_config, custom_routing_function=plain)
    chosen = original(topk_config=topk_config, **given)
    if places is not None:
        chosen = chosen._replace(topk_ids=topk_ids_logical_to_physical(chosen.topk_ids, places))
    if real is not None:
        chosen.topk_ids[int(real) :] = -1
    return chosen


def weigh(original: Callable[..., Any], layer: Any, x: Any, chosen: Any, config: Any) -> Any:
    """Around moe_forward_native, which takes no ids of -1: they become experts of no weight.

    Each is one that its row does not name yet, because a row's experts must differ there.
    """
    ids, experts = chosen.topk_ids.long(), len(layer.w13_weight)
    none = ids < 0
    named = ids.new_zeros((len(ids), experts + 1)).scatter_(1, ids.masked_fill(none, experts), 1)
    free = named[:, :experts].argsort(dim=1, stable=True)
    ids = torch.where(none, free.gather(1, (none.cumsum(1) - 1).clamp(min=0)), ids)
    weights = chosen.topk_weights.masked_fill(none, 0.0)
    return original(layer, x, chosen._replace(topk_ids=ids, topk_weights=weights), config)


def unpinned(original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """Around what makes pinned tensors: without a GPU there is no pinned memory."""

    def plain(make: Any, *args: Any, pin_memory: bool = False, **given: Any) -> torch.Tensor:
        made: torch.Tensor = make(*args, **given)
        return made

    kept = {name: getattr(torch, name) for name in ("empty", "tensor", "zeros")}
    for name, make in kept.items():
        setattr(torch, name, functools.partial(plain, make))
    try:
        return original(*args, **given)
    finally:
        for name, make in kept.items():
            setattr(torch, name, make)
