# SPDX-License-Identifier: Apache-2.0
"""A model of the stand-in on one rank, served by weft, and the same model in plain torch."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

import weft
from tests.plugins.standins import clamped_swiglu, drawn, install_standin, remove_standin

BLOCKS = {
    "qwen3": "Qwen3MoeSparseMoeBlock",
    "glm4": "Glm4MoeSparseMoeBlock",
    "qwen_next": "Qwen2MoeSparseMoeBlock",
    "minimax": "MiniMaxM2MoE",
    "gpt_oss": "GptOssSparseMoeBlock",
    "deepseek": "DeepseekV2MoE",
    "nextn": "draft_block",
}
OLDER, NEWER = "0.5.17", "0.5.23"


def enter(release: str = OLDER) -> None:
    """Let `import sglang` find the stand-in, and load weft's plug-in as SGLang does."""
    install_standin("sglang", release)
    from weft.plugins.sglang import register

    importlib.import_module("sglang").load_plugins(register)


def leave() -> None:
    """Close what weft built, and remove the stand-in."""
    import weft.plugins.sglang

    weft.plugins.sglang.engine.close()
    remove_standin("sglang", "dispatcher")


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
        release: str = OLDER,
        form: str = "block",
        flags: tuple[str, ...] = ("--moe-a2a-backend", "weft"),
        **more: object,
    ) -> None:
        os.environ["WEFT_SGLANG_FORM"] = form
        enter(release)
        standin: Any = importlib.import_module("sglang")
        size, state = group.size, standin.STATE
        dp = str(size // attention_ranks)
        args = standin.parse("--tp-size", str(size), "--dp-size", dp, *flags, **more)
        state.groups["ep"] = standin.GroupCoordinator(list(range(size)), group.process_group())
        state.redundant = redundant
        state.parallel = SimpleNamespace(
            **{"tp_size": size, "moe_ep_size": args.ep_size, "moe_ep_rank": group.rank},
            **{"attn_tp_size": attention_ranks, "enable_dp_attention": args.dp_size > 1},
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

    @property
    def workspaces(self) -> list[Any]:
        from weft.plugins.sglang import engine

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
    parts: Any = importlib.import_module("sglang")
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
        biased: dict[str, Any] = {}
        if block == "gpt_oss":
            both = [parts.biases(layer + shift, each) for each in range(parts.EXPERTS)]
            wide, narrow = (torch.stack(each) for each in zip(*both, strict=True))
            biased = {"gate_up_bias": wide, "down_bias": narrow, "gating": clamped_swiglu(0.5)}
        both = [parts.expert(layer + shift, each, dtype) for each in range(parts.EXPERTS)]
        wide, narrow = (torch.stack(each) for each in zip(*both, strict=True))
        routed = x, ids, weights * scale, wide, narrow
        x = x + weft.reference.moe_layer(*routed, shared=shared, **biased)
    return x
