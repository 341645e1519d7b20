# SPDX-License-Identifier: Apache-2.0
"""Random MoE blocks of transformers, their weights in an engine's layers, and the comparison.

An engine's blocks.py builds its own blocks, loads these weights through the engine's loaders, and
lets weft run them on CPU ranks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from job import OUT, describe_machine
from torch import nn

from weft.fp8 import quantize
from weft.gemm import quantize_mxfp4
from weft.gemm.mxfp4 import dequantize_mxfp4
from weft.launcher.launch import launch

HIDDEN, INTERMEDIATE, VOCABULARY = 256, 128, 64
LATENT = 128  # columns of Kimi-K3's experts
SCALE, LIMIT = 1.5, 2.0
BETA, LINEAR_BETA = 4.0, 25.0
TOLERANCE = 0.05
Formula = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of tokens and their ids
Block = tuple[Any, Formula]


def draw(module: nn.Module) -> None:
    """Draw random parameters with values of bfloat16."""
    for parameter in module.parameters():
        parameter.data = (torch.randn(parameter.shape) * 0.2).bfloat16().float()


def load_experts(layer: Any, gate_up: torch.Tensor, down: torch.Tensor, kind: str) -> None:
    """Load experts with the engine's loader, and round `gate_up` and `down` in place to its values.

    Args:
        layer: The engine's layer of routed experts.
        gate_up: float32 `[experts, 2 * intermediate, hidden]`.
        down: float32 `[experts, hidden, intermediate]`.
        kind: "bfloat16", "mxfp4" or "mxfp8".
    """
    scale_name = "_weight_scale" + "_inv" * hasattr(layer, "w13_weight_scale_inv")
    for weights, shards in ((gate_up, ("w1", "w3")), (down, ("w2",))):
        tensors = {"_weight": weights.bfloat16()}
        if kind == "mxfp4":
            values, scales = quantize_mxfp4(weights)
            weights.copy_(dequantize_mxfp4(values, scales))
            tensors = {"_weight": values, scale_name: scales}
        elif kind == "mxfp8":
            values, scales = quantize(weights, "mxfp8")
            blocks = values.float().unflatten(2, (-1, 32)) * scales.float()[..., None]
            weights.copy_(blocks.flatten(2))
            tensors = {"_weight": values, scale_name: scales.view(torch.uint8)}
        for suffix, tensor in tensors.items():
            name = ("w2" if shards == ("w2",) else "w13") + suffix
            parameter = getattr(layer, name)
            if parameter.dtype == torch.int8:
                tensor = tensor.view(torch.int8)
            elif parameter.dtype == torch.float32:
                tensor = tensor.view(torch.float8_e8m0fnu)
            for expert in range(len(weights)):
                for shard, part in zip(shards, tensor[expert].chunk(len(shards)), strict=True):
                    parameter.weight_loader(parameter, part.contiguous(), name, shard, expert)


def load_mlp(mlp: Any, shared: Any) -> None:
    """Load transformers' shared expert."""
    if hasattr(shared, "gate_up_proj"):
        gate_up = shared.gate_up_proj.weight
    else:
        gate_up = torch.cat((shared.gate_proj.weight, shared.up_proj.weight))
    mlp.gate_up_proj.weight.data.copy_(gate_up)
    mlp.down_proj.weight.data.copy_(shared.down_proj.weight)


def load_block(block: Any, theirs: Any, layer: Any, kind: str, bias: Any) -> Formula:
    """Draw transformers' block, load it, and return its formula.

    Args:
        block: The engine's block.
        theirs: transformers' block.
        layer: The engine's layer of routed experts.
        kind: The experts' format.
        bias: The engine's correction of the scores, or None for experts by token id.
    """
    draw(theirs)
    block.gate.weight.data.copy_(theirs.gate.weight)
    by_token = bias is None
    if by_token:
        table = theirs.gate.tid2eid
        experts = len(theirs.gate.weight)
        rows = [torch.randperm(experts)[: table.shape[1]] for _ in range(len(table))]
        table.copy_(torch.stack(rows))
    else:
        theirs.gate.e_score_correction_bias.normal_(0, 0.1)
        bias.data.copy_(theirs.gate.e_score_correction_bias)
    if hasattr(theirs, "shared_experts"):
        load_mlp(block.shared_experts, theirs.shared_experts)
    load_experts(layer, theirs.experts.gate_up_proj.data, theirs.experts.down_proj.data, kind)
    return lambda x, ids: theirs(x[None], *((ids[None],) if by_token else ()))[0]


def deepseek_v4(layer: int, experts: int, top_k: int) -> tuple[Any, Any]:
    """Return a config and a block. Layers 0 to 2 choose experts by token id, others by logits."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    config = DeepseekV4Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        n_routed_experts=experts,
        num_experts_per_tok=top_k,
        num_hidden_layers=5,
        vocab_size=VOCABULARY,
        routed_scaling_factor=SCALE,
        swiglu_limit=LIMIT,
    )
    theirs = modeling_deepseek_v4.DeepseekV4SparseMoeBlock(config, layer).float()
    set_fields(config, topk_method="noaux_tc", norm_topk_prob=True, n_shared_experts=1)
    return config, theirs


def minimax_m3(experts: int, top_k: int) -> tuple[Any, Any]:
    """Return a config and a block."""
    from transformers import MiniMaxM3VLTextConfig
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl

    config = MiniMaxM3VLTextConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        shared_intermediate_size=INTERMEDIATE,
        num_local_experts=experts,
        num_experts_per_tok=top_k,
        swiglu_limit=LIMIT,
        routed_scaling_factor=SCALE,
    )
    theirs = modeling_minimax_m3_vl.MiniMaxM3VLSparseMoeBlock(config).float()
    set_fields(config, use_routing_bias=True, scoring_func="sigmoid", n_shared_experts=1)
    set_fields(config, hidden_act="swigluoai", swiglu_beta=1.0)
    return config, theirs


def set_fields(config: Any, **fields: Any) -> None:
    """Set fields of published configs that engines read and transformers' configs lack."""
    for name, value in fields.items():
        setattr(config, name, value)


def kimi_k3(block: Any, layer: Any, top_k: int, restore: Callable[..., Any]) -> Formula:
    """Load random MXFP4 experts into a block of Kimi-K3, and return the published formula.

    transformers has no such block, so projections and the shared expert are the engine's.

    Args:
        block: The engine's block, with random weights of all other parts.
        layer: The engine's layer of routed experts.
        top_k: Experts of a token.
        restore: Norm and projection of the experts' bfloat16 sums.
    """
    weight = block.gate.weight.data.clone()
    experts, bias = len(weight), block.gate.e_score_correction_bias
    gate_up = torch.randn(experts, 2 * INTERMEDIATE, LATENT, dtype=torch.float32)
    down = torch.randn(experts, LATENT, INTERMEDIATE, dtype=torch.float32) * 0.2
    load_experts(layer, gate_up, down, "mxfp4")

    def run_expert(expert: int, x: torch.Tensor) -> torch.Tensor:
        gate, up = (gate_up[expert] @ x).chunk(2)
        gate = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate)
        return down[expert] @ (gate * LINEAR_BETA * torch.tanh(up / LINEAR_BETA))

    def run(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16()
        scores = torch.sigmoid(nn.functional.linear(x, weight).float())
        chosen = (scores + bias).topk(top_k).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * SCALE
        narrow = block.routed_expert_down_proj(x)[0].float()
        sums = torch.zeros_like(narrow)
        for row, pairs in enumerate(zip(chosen.tolist(), weights.tolist(), strict=True)):
            for expert, factor in zip(*pairs, strict=True):
                sums[row] += factor * run_expert(expert, narrow[row])
        return (restore(sums.bfloat16()) + block.shared_experts(x)).float()

    return run


def compare_block(run: Callable[..., torch.Tensor], formula: Formula, count: int) -> float:
    """Return the relative error of a block on `count` random tokens, or 0 without any."""
    x, ids = torch.randn(count, HIDDEN).bfloat16(), torch.randint(VOCABULARY, (count,))
    with torch.no_grad():
        out = run(x.clone(), ids).float()
        expected = formula(x.float(), ids) if count else out
    return float((out - expected).norm() / expected.norm()) if count else 0.0


def main(about: str, names: Iterable[str], compare: Callable[..., Any], **environment: str) -> int:
    """Compare blocks for each number of ranks: `compare(group, names)` returns each one's error.

    Returns the exit status: 1 if an error is above the tolerance.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("what")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--names", nargs="*", default=[*names], choices=[*names])
    args = parser.parse_args()
    os.environ |= environment | {"TORCHDYNAMO_DISABLE": "1"}
    worst = 0.0
    for ranks in args.ranks:
        results = launch(compare, args.names, ranks=ranks, timeout=600.0)
        for name in args.names:
            error = max(result[name] for result in results)
            line = {"bench": args.what, "block": name, "ranks": ranks, "relative_error": error}
            line |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
            with open(OUT / "results.jsonl", "a") as file:
                file.write(json.dumps(line | {"machine": describe_machine([])}) + "\n")
            print(f"{name}, {ranks} ranks: relative error {error:.3f}", flush=True)
            worst = max(worst, error)
    return int(worst > TOLERANCE)
