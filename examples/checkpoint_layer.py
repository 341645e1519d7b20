# SPDX-License-Identifier: Apache-2.0
"""Load one MoE layer of a checkpoint and run it on several ranks.

    python examples/checkpoint_layer.py [--model DIR] [--layer 0] [--ranks 2] [--device cpu]

Each rank reads only its own experts. Without --model a small random Qwen3-MoE layer is written to
a temporary directory first. Needs safetensors.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import weft
from weft.moe import ExpertWeights, MoEConfig, router_logits


def write_model(folder: Path, hidden: int = 256, intermediate: int = 128, experts: int = 8) -> None:
    """Write config.json and model.safetensors of a model with one MoE layer."""
    config = {
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random) / columns**0.5).bfloat16()

    tensors = {"model.layers.0.mlp.gate.weight": weight(experts, hidden)}
    for e in range(experts):
        name = f"model.layers.0.mlp.experts.{e}"
        tensors[f"{name}.gate_proj.weight"] = weight(intermediate, hidden)
        tensors[f"{name}.up_proj.weight"] = weight(intermediate, hidden)
        tensors[f"{name}.down_proj.weight"] = weight(hidden, intermediate)
    save_file(tensors, folder / "model.safetensors")


def read_gate(folder: Path, layer: int) -> torch.Tensor:
    """Return the router's weight; the other tensors of a model are read in the same way."""
    name = f"model.layers.{layer}.mlp.gate.weight"
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118
                return tensors.get_tensor(name)
    raise SystemExit(f"{folder} has no {name}")


def rank(group: weft.Group, model: str, number: int) -> list[int]:
    folder = Path(model)
    # --8<-- [start:load]
    config = MoEConfig.from_hf(folder)  # a model's folder, its config.json, or a config object

    def load(local: tuple[int, ...]) -> ExpertWeights:  # global ids of this rank's experts
        return ExpertWeights.from_safetensors(
            folder, number, local, config=config, device=group.device
        )

    gate = read_gate(folder, number).float().to(group.device)
    x = torch.randn(4, config.hidden, device=group.device).to(config.dtype)
    with weft.MoE(group, config, load, max_tokens=16) as layer:
        out = layer(x, router_logits(x, gate))
        layer.check()
    # --8<-- [end:load]
    every = load(tuple(range(config.routing.num_experts)))
    ids, weights = weft.moe.route(config.routing, router_logits(x, gate))
    expected = weft.reference.moe_layer(x, ids, weights, every.gate_up, every.down)
    assert float((out.float() - expected).abs().max()) < 0.02 * float(expected.abs().max())
    return list(out.shape)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--layer", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        if options.model is None:
            write_model(Path(temporary))
        source = str(options.model or temporary)
        sizes = {"ranks": options.ranks, "device": options.device}
        print(weft.launch(rank, source, options.layer, **sizes))
