# SPDX-License-Identifier: Apache-2.0
"""Layers of the stand-in on one rank with weft, and the same layers in plain torch."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import torch

import weft
from tests.plugins.standins import (
    drawn,
    install_standin,
    launch_each,
    max_relative_difference,
    remove_standin,
)
from weft.plugins.vllm import engine, register

RELEASE = "0.32.0"
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 8, 3, 128, 128
SILU = SimpleNamespace(value="silu")


def enter(form: str, **environment: str) -> None:
    """Let `import vllm` find the stand-in, and load weft's plug-in as vLLM does."""
    install_standin("vllm", RELEASE)
    os.environ["WEFT_VLLM"] = form
    os.environ |= {f"WEFT_VLLM_{name}": value for name, value in environment.items()}
    register()


def leave() -> None:
    """Close what weft built, and remove the stand-in."""
    engine.close()
    remove_standin("vllm", "layers")


launch_cases = functools.partial(launch_each, leave)


def parallel(rank: int, size: int, **other: Any) -> Any:
    """Return a layer's FusedMoEParallelConfig: DP and EP of `size`."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    plain = {"tp_size": 1, "dp_size": size, "ep_size": size, "ep_rank": rank, "sp_size": 1}
    return FusedMoEParallelConfig(**plain | {"use_ep": size > 1} | other)


def config_of(group: weft.Group | None = None, **other: Any) -> Any:
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    plain = {
        **{"num_experts": EXPERTS, "num_local_experts": EXPERTS // size},
        **{"experts_per_token": TOP_K, "hidden_dim": HIDDEN, "in_dtype": torch.float32},
        **{"intermediate_size_per_partition": INTERMEDIATE, "activation": SILU},
        **{"moe_parallel_config": parallel(rank, size), "has_bias": False, "is_act_and_mul": True},
    }
    return SimpleNamespace(**plain | other)


def scaled(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return drawn(shape, seed) / shape[-1] ** 0.5


def weights(layer: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    wide = scaled((EXPERTS, 2 * INTERMEDIATE, HIDDEN), 10 * layer)
    return wide.to(dtype), scaled((EXPERTS, HIDDEN, INTERMEDIATE), 10 * layer + 1).to(dtype)


class Worker:
    """One rank's worker: layers of experts, with a residual around each."""

    def __init__(
        self,
        group: weft.Group,
        form: str,
        method: str = "",
        *,
        layers: int = 2,
        dtype: torch.dtype = torch.float32,
        redundant: int = 0,
        **environment: str,
    ) -> None:
        enter(form, **environment)
        from vllm.distributed.parallel_state import GroupCoordinator
        from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
        from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

        GroupCoordinator.of_experts = GroupCoordinator(group.process_group())
        self.group, self.dtype, self.runners = group, dtype, []
        self.physical = EXPERTS + redundant
        self.gates = [gate(layer).to(group.device) for layer in range(layers)]
        for layer in range(layers):
            each = self.physical // group.size
            counts = {"num_experts": self.physical, "num_local_experts": each}
            config = config_of(group, in_dtype=dtype, **counts)
            kind = {"fp8": Fp8MoEMethod}.get(method)
            experts = RoutedExperts(f"model.layers.{layer}.mlp.experts", config, kind)
            self.runners.append(MoERunner(Router(redundant), experts))
            self.fill(experts, layer)
            experts.quant_method.process_weights_after_loading(experts)

    def fill(self, experts: Any, layer: int) -> None:
        """Load this rank's part, in place if the layer has weights."""
        for name, tensor in self.part(layer).items():
            if hasattr(experts, name):
                getattr(experts, name).data.copy_(tensor)
            else:
                experts.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def part(self, layer: int) -> dict[str, torch.Tensor]:
        """Return this rank's weights of a layer."""
        each = self.physical // self.group.size
        part = torch.arange(self.group.rank * each, (self.group.rank + 1) * each) % EXPERTS
        gate_up, down = (tensor[part] for tensor in weights(layer, self.dtype))
        device = self.group.device
        return {"w13_weight": gate_up.to(device), "w2_weight": down.to(device)}

    def reload(self, layer: int, shift: int, how: str) -> None:
        """Load a layer's weights again: "in place", "layerwise" or "replaced"."""
        from vllm import layerwise

        experts = self.runners[layer].routed_experts
        if how == "in place":
            self.fill(experts, layer + shift)
            experts.quant_method.process_weights_after_loading(experts)
        else:
            layerwise(experts, self.part(layer + shift), restore=how == "layerwise")

    def step(
        self, x: torch.Tensor, sizes: list[int] | None, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a forward pass."""
        from vllm.forward_context import forward

        with torch.inference_mode(), forward(sizes, padding):
            for layer, runner in enumerate(self.runners):
                x = x + runner._apply_quant_method(x, logits(x, self.gates[layer]))
        return x

    def distance(
        self, x: torch.Tensor, sizes: list[int] | None, *, layers: int = 2, shift: int = 0
    ) -> float:
        """Return the difference between a forward pass and one process."""
        return max_relative_difference(self.step(x, sizes), alone(x, layers=layers, shift=shift))


class Router:
    """Choose experts as vLLM's routers do; with EPLB physical ones.

    redundant: replicas of the first experts, after all of them; every second token takes those.
    """

    def __init__(self, redundant: int = 0) -> None:
        self.redundant = redundant

    def select_experts(
        self, logits: torch.Tensor, dtype: torch.dtype | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, ids = logits.softmax(1).topk(TOP_K)
        ids[1::2] += EXPERTS * (ids[1::2] < self.redundant)
        return chosen, ids.to(dtype or torch.int32)


def gate(layer: int) -> torch.Tensor:
    return scaled((EXPERTS, HIDDEN), 10 * layer + 2)


def logits(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """Compute in float32, so that all ranks and devices choose equally."""
    return torch.nn.functional.linear(x.float(), by)


def tokens(count: int, seed: int) -> torch.Tensor:
    return scaled((count, HIDDEN), 1000 + seed) * 8


def alone(
    x: torch.Tensor, *, real: int | None = None, shift: int = 0, layers: int = 2
) -> torch.Tensor:
    """Return what the layers compute from x in one process, in plain torch.

    real: rows from there on have no experts; shift: added to the layer of the weights.
    """
    for layer in range(layers):
        chosen, ids = logits(x, gate(layer)).softmax(1).topk(TOP_K)
        if real is not None:
            ids[real:] = -1
        x = x + weft.reference.moe_layer(x, ids, chosen, *weights(layer + shift, x.dtype))
    return x
