# SPDX-License-Identifier: Apache-2.0
"""Kimi-K3's MoE block: 896 experts in a latent space, SiTU, MXFP4 as compressed-tensors has it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from tests.gemm.cases import decode_mxfp4
from tests.moe.test_hf import PUBLISHED
from weft.moe import Expert, ExpertWeights, MoEConfig, router_logits

save_file = pytest.importorskip("safetensors.torch").save_file

LAYER, EXPERTS, TOP_K, TOKENS = 1, 896, 16, 12
HIDDEN, LATENT, INNER, SHARED = 48, 64, 32, 2
BETA, LINEAR_BETA = 0.5, 1.5  # small, so that both curves are seen
# As published, but narrower.
TEXT: dict[str, Any] = PUBLISHED["kimi-k3"]["text_config"] | {
    "activation_situ_beta": BETA,
    "activation_situ_linear_beta": LINEAR_BETA,
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INNER,
    "routed_expert_hidden_size": LATENT,
    "routed_scaling_factor": 1.25,
}


def situ(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As the model's report has it."""
    first = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate)
    return first * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)


def checkpoint(folder: Path, dtype: str) -> dict[str, torch.Tensor]:
    """Write a model's experts; returns what they are, `[experts, rows, columns]`."""
    (folder / "config.json").write_text(
        json.dumps({"model_type": "kimi_k3", "dtype": dtype, "text_config": TEXT})
    )
    generator = torch.Generator().manual_seed(1)
    stem = f"language_model.model.layers.{LAYER}.block_sparse_moe.experts"
    tensors, wide = {}, {}
    for name, rows, columns in (
        ("w1", INNER, LATENT),
        ("w3", INNER, LATENT),
        ("w2", LATENT, INNER),
    ):
        packed = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=generator).byte()
        scale = torch.randint(121, 124, (EXPERTS, rows, columns // 32), generator=generator).byte()
        wide[name] = decode_mxfp4(packed, scale).float()
        for expert in range(EXPERTS):
            tensors[f"{stem}.{expert}.{name}.weight_packed"] = packed[expert].clone()
            tensors[f"{stem}.{expert}.{name}.weight_scale"] = scale[expert].clone()
    save_file(tensors, folder / "model.safetensors")
    return wide


def block(x: torch.Tensor, own: dict[str, torch.Tensor], wide: dict[str, torch.Tensor]) -> Any:
    """The whole block in float32: (result, weighted sum of the routed experts)."""
    scores = (x @ own["gate"].T).sigmoid()
    chosen = (scores + own["correction"]).topk(TOP_K).indices
    weights = scores.gather(1, chosen)
    weights = weights / weights.sum(1, keepdim=True) * TEXT["routed_scaling_factor"]
    latent = x @ own["down"].T
    gate = torch.einsum(
        "tl,til->ti", latent.repeat_interleave(TOP_K, 0), wide["w1"][chosen.ravel()]
    )
    up = torch.einsum("tl,til->ti", latent.repeat_interleave(TOP_K, 0), wide["w3"][chosen.ravel()])
    each = torch.einsum("ti,tli->tl", situ(gate, up), wide["w2"][chosen.ravel()])
    routed = (each.view(-1, TOP_K, LATENT) * weights.unsqueeze(-1)).sum(1)
    return routed @ own["up"].T + shared_expert(x, own), routed


def shared_expert(x: torch.Tensor, own: dict[str, torch.Tensor]) -> torch.Tensor:
    gate, up = (x @ own["shared_gate_up"].T).chunk(2, dim=1)
    return situ(gate, up) @ own["shared_down"].T


def given() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Tokens, and what of a block is the engine's."""
    generator = torch.Generator().manual_seed(2)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    own = {"gate": 3 * draw(EXPERTS, HIDDEN), "correction": draw(EXPERTS) * 3}
    own |= {"down": draw(LATENT, HIDDEN), "up": draw(HIDDEN, LATENT)}
    own["shared_gate_up"] = 3 * draw(2 * SHARED * INNER, HIDDEN)
    own["shared_down"] = draw(HIDDEN, SHARED * INNER)
    return draw(TOKENS, HIDDEN) * math.sqrt(HIDDEN), own


def layer_of(
    group: weft.Group, folder: str, x: torch.Tensor, own: dict[str, torch.Tensor], gemm: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The block as an engine builds it: projections and shared expert around weft's layer."""
    config = MoEConfig.from_hf(folder)
    assert (config.hidden, config.shared) == (LATENT, 0)

    def mine(local: tuple[int, ...]) -> ExpertWeights:
        return ExpertWeights.from_safetensors(folder, LAYER, local, config=config)

    shared = Expert(own["shared_gate_up"], own["shared_down"], gating=config.gating)
    with weft.MoE(
        group, config, mine, max_tokens=TOKENS, correction=own["correction"], gemm=gemm
    ) as layer:
        latent = (x @ own["down"].T).to(config.dtype)
        routed = layer(latent, router_logits(x, own["gate"])).float()
        layer.check()
    return routed @ own["up"].T + shared(x), routed


@pytest.mark.parametrize(
    ("dtype", "gemm", "bound"), [("float32", "torch", 1e-5), ("bfloat16", "grouped", 2e-2)]
)
@torch.no_grad()
def test_a_layer_between_latent_projections(ranks, tmp_path, dtype, gemm, bound):
    wide = checkpoint(tmp_path, dtype)
    x, own = given()
    wanted = block(x, own, wide)
    for found in ranks(4, "threads")(layer_of, str(tmp_path), x, own, gemm):
        for got, want in zip(found, wanted, strict=True):
            assert float((got - want).abs().max() / want.abs().max()) < bound
