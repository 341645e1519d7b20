# SPDX-License-Identifier: Apache-2.0
"""Hooks that build weft's layers after loading, and serve SGLang's forward passes.

This module imports SGLang only inside functions that SGLang calls.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from weft.errors import InvalidArgument, OutOfOrder
from weft.group import Group
from weft.plugins.blocks import LOAD_TIMEOUT, Blocks
from weft.plugins.faults import Watch
from weft.plugins.names import Known
from weft.plugins.settings import Settings
from weft.plugins.sglang import elastic, flags, models
from weft.plugins.sglang.flags import check_server, limits_of
from weft.plugins.sglang.hooks import (
    FORWARD,
    NAME,
    RUNNER,
    SRT,
    Hook,
    check_applied,
    device_of,
    end_server,
    resolved,
)
from weft.plugins.sglang.models import (
    FORWARDS,
    gate_of,
    served_layers,
    shared_expert_of,
    shared_mlp_of,
)
from weft.plugins.sglang.weights import check_experts, layer_of

_blocks: Blocks | None = None


def after_load_model(result: Any, runner: Any) -> None:
    """After ModelRunner.load_model: build before SGLang measures free memory and captures."""
    global _blocks
    layers = served_layers(runner.model)
    server_args = resolved(runner.server_args)
    if not layers:
        if server_args.elastic_ep_backend == NAME:
            raise InvalidArgument(
                "--elastic-ep-backend weft needs --moe-a2a-backend weft and a model with MoE layers"
            )
        return
    check_applied(HOOKS)
    check_server(server_args)
    settings = Settings.read("SGLANG")
    for layer, block in layers:
        check_experts(layer, form=settings.form)
        for owner, name, what in (
            (block, "is_hash", "token ids"),
            (gate_of(block), "e_score_correction_bias_vl", "image tokens"),
        ):
            if getattr(owner, name, None) not in (None, False):
                raise InvalidArgument(
                    f"layer {layer.layer_id} routes by {what}; weft serves routing by logits only"
                )
    with torch.inference_mode(False):  # inference tensors are read-only elsewhere
        if _blocks is None:
            group = Group.from_torch(_processes(), device=device_of(runner), timeout=LOAD_TIMEOUT)
            if server_args.elastic_ep_backend is not None:
                group.require_one_machine(
                    "--elastic-ep-backend weft", fix="leave it out, or start without --nnodes"
                )
            _blocks = Blocks(group, limits_of(server_args, settings), settings)
            end = end_server(os.getppid())
            if server_args.elastic_ep_backend is None:
                _blocks.watch = Watch(group, end=end)
            else:
                _blocks.watch = Watch(
                    group, end=end, grace=2 * elastic.RECOVERY_TIMEOUT, recovers=True
                )
                elastic.follow(group, runner)
        for layer, block in layers:
            if settings.form == "dispatcher":
                layer.dispatcher.all_to_all = _blocks.exchange(layer_of(layer))
                continue
            mlp = shared_mlp_of(block)
            size = 0 if mlp is None else mlp.gate_up_proj.output_size // 2
            _blocks.add_block(layer_of(layer), shared=shared_expert_of(block), shared_size=size)
    _blocks.announce(f"{len(layers)} MoE layers of {type(runner.model).__name__}")


def close() -> None:
    """Free what `after_load_model` built. Local and idempotent; also done at process exit."""
    global _blocks
    elastic.leave()
    if _blocks is not None:
        _blocks.close()
    _blocks = None


def _processes() -> Any:
    """Return the CPU process group of the expert-parallel ranks."""
    from sglang.srt.distributed import get_moe_ep_group

    return get_moe_ep_group().cpu_group


def serve(
    original: Callable[..., Any],
    block: Any,
    hidden_states: torch.Tensor,
    forward_batch: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Around a MoE block's forward: SGLang routes, weft runs the rest."""
    from weft.plugins.sglang.dispatcher import Exchanged, WholeBlock

    dispatcher = block.experts.dispatcher
    if not isinstance(dispatcher, WholeBlock | Exchanged):
        return original(block, hidden_states, forward_batch, *rest, **kwargs)
    if _blocks is None:
        raise OutOfOrder(
            f"layer {block.layer_id} runs before weft's hook after ModelRunner.load_model did"
        )
    x = hidden_states.view(-1, hidden_states.shape[-1])
    topk, max_tokens = _route(block, x, forward_batch), max_tokens_over_ranks()
    with _blocks.logged():
        if isinstance(dispatcher, WholeBlock):
            out = _blocks.run(block.experts, x, topk.topk_ids, topk.topk_weights, max_tokens)
        else:
            out = _run_experts(block, dispatcher, x, topk, max_tokens)
    return out.view(hidden_states.shape)


def forward(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around ModelRunner.forward: raise a group error, or continue without dead ranks.

    Weights that SGLang updated since the last pass take effect here, also in captured graphs.
    """
    if _blocks is not None:
        _blocks.reload_all()
    if _blocks is not None and elastic.is_on():
        return elastic.forward(
            lambda: original(runner, forward_batch, *args, **kwargs), _blocks.check, forward_batch
        )
    result = original(runner, forward_batch, *args, **kwargs)
    if _blocks is not None:
        _blocks.check()
    return result


def _route(block: Any, x: torch.Tensor, forward_batch: Any) -> Any:
    """Return SGLang's routing result: physical ids, -1 in padding rows of a graph's batch."""
    if x.shape[0] == 0:  # SGLang's kernels cannot be launched on empty tensors
        return block.topk.empty_topk_output(x.device, layer_id=block.layer_id)
    kind = type(block).__name__
    if kind == "DeepseekV2MoE":
        logits = block.gate(x, forward_batch=forward_batch)
    else:  # MiniMax-M2's gate is float32
        logits = gate_of(block)(x.float() if kind == "MiniMaxM2MoE" else x)
    if isinstance(logits, tuple):  # a linear layer also returns its bias
        logits = logits[0]
    if hasattr(block.topk, "routing_inputs"):  # 0.5.23 handles replicas and padding itself
        return block.topk(x, logits)
    from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo

    replicas = None
    if not getattr(block, "is_nextn", False):
        replicas = ExpertLocationDispatchInfo.init_new(layer_id=block.layer_id)
    return block.topk(
        x,
        logits,
        num_token_non_padded=_num_valid_tokens(forward_batch),
        expert_location_dispatch_info=replicas,
    )


def _num_valid_tokens(forward_batch: Any) -> torch.Tensor | None:
    """Return the number of rows without padding, or None if SGLang does not keep it current.

    With one rank it is stale: a graph's buffer holds the value of another graph's capture.
    """
    from sglang.srt.model_executor.forward_batch_info import enable_num_token_non_padded

    num_tokens: torch.Tensor | None = forward_batch.num_token_non_padded
    return num_tokens if enable_num_token_non_padded() else None


def max_tokens_over_ranks() -> int:
    """Return the largest token count over all ranks in this layer (identical on every rank)."""
    from sglang.srt.layers.dp_attention import get_dp_global_num_tokens
    from sglang.srt.runtime_context import get_parallel

    counts: list[int] | None = get_dp_global_num_tokens()
    if not counts:
        raise OutOfOrder(
            "SGLang reported no rank's number of tokens in this forward pass, by which weft's "
            "ranks agree on rounds: report how the server was started"
        )
    ranks: int = get_parallel().attn_tp_size
    return -(-max(counts) // ranks)


def _run_experts(block: Any, dispatcher: Any, x: torch.Tensor, topk: Any, max_tokens: int) -> Any:
    """Run the experts with SGLang's runner, in as many rounds as the all-to-all needs."""
    out = torch.empty_like(x)
    step = dispatcher.all_to_all.max_tokens
    for start in range(0, max_tokens, step):  # the same number of rounds on every rank
        part, dispatcher.max_tokens = slice(start, start + step), min(step, max_tokens - start)
        chunk = topk._replace(topk_weights=topk.topk_weights[part], topk_ids=topk.topk_ids[part])
        out[part] = block.experts(x[part], chunk)
    shared = shared_expert_of(block)
    if shared is not None and x.shape[0]:
        out += shared(x)
    return out


HOOKS = (
    *flags.HOOKS,
    *models.HOOKS,
    *(Hook(name, parameters, function=serve) for name, parameters in FORWARDS.items()),
    Hook(RUNNER + "load_model", "self", function=after_load_model, kind="AFTER"),
    Hook(RUNNER + "forward", FORWARD, function=forward),
    *elastic.HOOKS,
)
# Names that the hooks call and read.
_TOPK = SRT + "layers.moe.topk."
_CHOOSE = (
    "self, hidden_states, router_logits, *, num_token_non_padded=, expert_location_dispatch_info="
)
KNOWN = (
    *flags.KNOWN,
    *models.KNOWN,
    *elastic.KNOWN,
    Known(SRT + "distributed.get_moe_ep_group", ""),
    Known(SRT + "layers.dp_attention.get_dp_global_num_tokens", ""),
    Known(
        SRT + "eplb.expert_location_dispatch.ExpertLocationDispatchInfo.init_new",
        {"0.5.17": "cls, layer_id"},
    ),
    Known(SRT + "model_executor.forward_batch_info.enable_num_token_non_padded", {"0.5.17": ""}),
    Known(_TOPK + "StandardTopKOutput"),
    Known(_TOPK + "TopK.empty_topk_output", "self, device, *, layer_id="),
    Known(
        _TOPK + "TopK.forward_cuda",
        {"0.5.17": _CHOOSE, "0.5.23": _CHOOSE + ", dynamic_expert_bias=, router_logits_partials="},
    ),
    Known(_TOPK + "TopK.routing_inputs", {"0.5.23": "self"}),
    Known(
        SRT + "layers.moe.moe_runner.base.MoeRunnerConfig",
        names="activation is_gated apply_router_weight_on_input routed_scaling_factor gemm1_alpha "
        "gemm1_clamp_limit swiglu_limit gate_up_interleaved",
    ),
    Known(SRT + "plugins.hook_registry.HookRegistry._patched"),
    Known(
        SRT + "plugins.hook_registry.HookRegistry.register",
        "cls, target, hook, hook_type=, *, source=",
    ),
)
