# SPDX-License-Identifier: Apache-2.0
"""A model of the stand-in on one rank, served by weft, and the same model in plain torch."""

from __future__ import annotations

import functools
import importlib
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

import weft
from tests.plugins.standins import (
    clamped_swiglu,
    drawn,
    install_standin,
    launch_each,
    max_relative_difference,
    remove_standin,
)
from weft.plugins.sglang import allreduce, engine
from weft.plugins.sglang.hooks import install

BLOCKS = {
    "qwen3": "Qwen3MoeSparseMoeBlock",
    "glm4": "Glm4MoeSparseMoeBlock",
    "qwen_next": "Qwen2MoeSparseMoeBlock",
    "minimax": "MiniMaxM2MoE",
    "gpt_oss": "GptOssSparseMoeBlock",
    "deepseek": "DeepseekV2MoE",
    "nextn": "draft_block",
}
RELEASE = "0.5.23"


def enter() -> Any:
    """Let `import sglang` find the stand-in, and load weft's plug-in, which patches it."""
    standin = install_standin("sglang", RELEASE)
    allreduce.register()
    if not standin.HookRegistry._patched.intersection(hook.target for hook in engine.HOOKS):
        install(engine.HOOKS)
    standin.HookRegistry.apply_hooks()
    return standin


def sglang() -> Any:
    """Return the stand-in."""
    return importlib.import_module("sglang")


def leave() -> None:
    """Close what weft built, and remove the stand-in."""
    allreduce.close()
    engine.close()
    remove_standin("sglang", "dispatcher")


launch_cases = functools.partial(launch_each, leave)


class Server:
    """One rank of a server."""

    def __init__(
        self,
        group: weft.Group,
        block: str = "qwen3",
        *,
        layers: int = 2,
        attention_ranks: int = 1,
        redundant: int = 0,
        form: str = "block",
        backend: str = "weft",
        **more: object,
    ) -> None:
        os.environ["WEFT_SGLANG_FORM"] = form
        standin = enter()
        size, state = group.size, standin.STATE
        args = standin.make_args(moe_a2a_backend=backend, **more)
        state.groups["ep"] = standin.GroupCoordinator(list(range(size)), group.process_group())
        state.redundant = redundant
        state.parallel = SimpleNamespace(
            **{"tp_size": size, "moe_ep_size": size, "moe_ep_rank": group.rank},
            **{"attn_tp_size": attention_ranks, "attn_dp_enabled": attention_ranks < size},
        )
        kind = getattr(standin, BLOCKS[block])
        self.batch = standin.batch
        self.runner = standin.ModelRunner(args, lambda: standin.Model(kind, layers, torch.float32))
        self.runner.load_model()

    def step(
        self, x: torch.Tensor, counts: list[int] | None, real: int | None = None
    ) -> torch.Tensor:
        """Run a forward pass."""
        out: torch.Tensor = self.runner.forward(self.batch(x, counts, real))
        return out

    def distance(self, x: torch.Tensor, counts: list[int], block: str, **more: Any) -> float:
        """Return the difference between a forward pass and one process."""
        return max_relative_difference(self.step(x, counts), alone(x, block, **more))

    @property
    def workspaces(self) -> list[Any]:
        assert engine._blocks is not None
        return engine._blocks.list_operators()


def tokens(count: int, seed: int) -> torch.Tensor:
    return drawn((count, 64), seed)


def alone(
    x: torch.Tensor, block: str, *, layers: int = 2, real: int | None = None, shift: int = 0
) -> torch.Tensor:
    """Return what the model computes from x in one process, in plain torch.

    real: rows from there on go to no routed expert; shift: added to the layer of the weights.
    """
    parts = sglang()
    scale, shared_size = 1.0, parts.INTERMEDIATE if block == "qwen_next" else 0
    if block in ("glm4", "deepseek", "nextn"):
        scale, shared_size = parts.SCALE, parts.INTERMEDIATE * (2 if block == "glm4" else 1)
    for layer in range(layers):
        first, dtype = 1000 * layer, x.dtype
        logits = functional.linear(x.float(), parts.drawn((8, 64), first + 999, dtype))
        weights, ids = logits.softmax(1).topk(parts.TOP_K)
        if real is not None:
            ids[real:] = -1
        shared = None
        if shared_size:
            wide = parts.drawn((2 * shared_size, 64), first + 500, dtype)
            narrow = parts.drawn((64, shared_size), first + 501, dtype)
            gate, up = functional.linear(x, wide).chunk(2, dim=1)
            shared = functional.linear(functional.silu(gate) * up, narrow)
            if block == "qwen_next":
                gate = functional.linear(x, parts.drawn((1, 64), first + 502, dtype))
                shared = torch.sigmoid(gate) * shared
        stacks = [parts.expert(layer + shift, each, dtype) for each in range(parts.EXPERTS)]
        wide, narrow, *both = (torch.stack(each) for each in zip(*stacks, strict=True))
        biased: dict[str, Any] = {}
        if block == "gpt_oss":
            biased = {"gate_up_bias": both[0], "down_bias": both[1], "gating": clamped_swiglu(0.5)}
        routed = x, ids, weights * scale, wide, narrow
        x = x + weft.reference.moe_layer(*routed, shared=shared, **biased)
    return x
