# SPDX-License-Identifier: Apache-2.0
"""Layers of the stand-in on one rank with weft, and the same layers in plain torch."""

import functools
import os
from types import SimpleNamespace
from typing import Any

import torch

import weft
from tests.plugins.standins import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    TOP_K,
    alone,
    expert_weights,
    gate_weight,
    install_standin,
    launch_each,
    max_relative_difference,
    remove_standin,
)
from weft.plugins.vllm import engine, register

RELEASE = "0.32.0"
SILU = SimpleNamespace(value="silu")


def enter(form: str, **environment: str) -> Any:
    """Let `import vllm` find the stand-in, and load weft's plug-in as vLLM does."""
    standin = install_standin("vllm", RELEASE)
    os.environ["WEFT_VLLM"] = form
    os.environ |= {f"WEFT_VLLM_{name}": value for name, value in environment.items()}
    register()
    return standin


def leave() -> None:
    """Close what weft built, and remove the stand-in."""
    engine.close()
    remove_standin("vllm", "layers")


launch_cases = functools.partial(launch_each, leave)


def parallel(rank: int, size: int, **other: Any) -> Any:
    """Return a layer's FusedMoEParallelConfig: DP and EP of `size`."""
    plain = {"tp_size": 1, "dp_size": size, "ep_size": size, "ep_rank": rank, "sp_size": 1}
    config = SimpleNamespace(**plain | {"use_ep": size > 1, "enable_eplb": False} | other)
    config.is_sequence_parallel = config.sp_size > 1
    separate = config.dp_size > 1 or config.is_sequence_parallel
    config.use_all2all_kernels = config.use_ep and separate
    return config


def config_of(group: weft.Group | None = None, **other: Any) -> Any:
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    plain = {
        **{"num_experts": EXPERTS, "num_local_experts": EXPERTS // size},
        **{"experts_per_token": TOP_K, "hidden_dim": HIDDEN, "in_dtype": torch.float32},
        **{"intermediate_size_per_partition": INTERMEDIATE, "activation": SILU},
        **{"moe_parallel_config": parallel(rank, size), "has_bias": False, "is_act_and_mul": True},
    }
    return SimpleNamespace(**plain | other)


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
        self.vllm = enter(form, **environment)
        self.vllm.GroupCoordinator.of_experts = self.vllm.GroupCoordinator(group.process_group())
        self.group, self.dtype, self.redundant = group, dtype, redundant
        self.layers: list[Any] = []
        self.gates = [gate_weight(layer).to(group.device) for layer in range(layers)]
        for layer in range(layers):
            physical = EXPERTS + redundant
            counts = {"num_experts": physical, "num_local_experts": physical // group.size}
            config = config_of(group, in_dtype=dtype, **counts)
            kind = {"fp8": self.vllm.Fp8MoEMethod}.get(method)
            experts = self.vllm.RoutedExperts(f"model.layers.{layer}.mlp.experts", config, kind)
            self.layers.append(experts)
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
        each = (EXPERTS + self.redundant) // self.group.size
        part = torch.arange(self.group.rank * each, (self.group.rank + 1) * each) % EXPERTS
        gate_up, down = (tensor[part] for tensor in expert_weights(layer, self.dtype)[:2])
        device = self.group.device
        return {"w13_weight": gate_up.to(device), "w2_weight": down.to(device)}

    def reload(self, layer: int, shift: int, how: str) -> None:
        """Load a layer's weights again: "in place", "layerwise" or "replaced"."""
        experts = self.layers[layer]
        if how == "in place":
            self.fill(experts, layer + shift)
            experts.quant_method.process_weights_after_loading(experts)
        else:
            self.vllm.layerwise(experts, self.part(layer + shift), restore=how == "layerwise")

    def step(
        self, x: torch.Tensor, sizes: list[int] | None, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a forward pass, with routing as vLLM's routers do it; with EPLB to physical experts.

        Every second token takes the replicas, which come after all experts.
        """
        with torch.inference_mode(), self.vllm.forward(sizes, padding):
            for experts, by in zip(self.layers, self.gates, strict=True):
                experts._ensure_moe_quant_config_init()
                method = experts.quant_method
                assert not method.is_monolithic, "the stock experts ran"
                logits = torch.nn.functional.linear(x.float(), by)
                chosen, ids = logits.softmax(1).topk(TOP_K)
                ids[1::2] += EXPERTS * (ids[1::2] < self.redundant)
                ids = ids.to(method.topk_indices_dtype or torch.int32)
                x = x + experts.forward_modular(x=x, topk_weights=chosen, topk_ids=ids)
        return x

    def distance(
        self, x: torch.Tensor, sizes: list[int] | None, *, layers: int = 2, shift: int = 0
    ) -> float:
        """Return the difference between a forward pass and one process."""
        return max_relative_difference(self.step(x, sizes), alone(x, layers=layers, shift=shift))
