# SPDX-License-Identifier: Apache-2.0
"""A model of the stand-in on one rank, served by weft, and what one process makes of its tokens."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

import weft
from tests.plugins.standins import clamped, drawn, forget
from weft.plugins.sglang.hooks import SGLANG

STANDIN = str(Path(__file__).parent / "standin")
BLOCKS = {
    "qwen3": ("qwen3_moe", "Qwen3MoeSparseMoeBlock"),
    "glm4": ("glm4_moe", "Glm4MoeSparseMoeBlock"),
    "qwen_next": ("qwen2_moe", "Qwen2MoeSparseMoeBlock"),
    "minimax": ("minimax_m2", "MiniMaxM2MoE"),
    "gpt_oss": ("gpt_oss", "GptOssSparseMoeBlock"),
    "deepseek": ("deepseek_v2", "DeepseekV2MoE"),
    "nextn": ("deepseek_v2", "draft_block"),
}


def find(release: str) -> None:
    """Let `import sglang` find the stand-in as that version."""
    if STANDIN not in sys.path:
        sys.path.insert(0, STANDIN)
    newer = str(Path(STANDIN) / release)
    if Path(newer).is_dir() and newer not in sys.path:
        sys.path.insert(0, newer)
        from sglang.newer import become

        become()


def enter(release: str = SGLANG.served[-1]) -> None:
    """Let `import sglang` find the stand-in, and load weft's plug-in as SGLang does."""
    find(release)
    from sglang.srt.plugins import load_plugins

    from weft.plugins.sglang import register

    load_plugins(register)


def leave() -> None:
    """Forget the stand-in, and what was imported of it."""
    import weft.plugins.sglang

    weft.plugins.sglang.engine.close()
    forget("sglang", STANDIN, "dispatcher")


class Server:
    """One rank's: `step` is a forward pass."""

    def __init__(
        self,
        group: weft.Group,
        block: str = "qwen3",
        *,
        layers: int = 2,
        attention_ranks: int = 1,
        redundant: int = 0,
        release: str = SGLANG.served[-1],
        form: str = "block",
        flags: tuple[str, ...] = ("--moe-a2a-backend", "weft"),
        **more: object,
    ) -> None:
        os.environ["WEFT_SGLANG_FORM"] = form
        enter(release)
        import importlib

        from sglang.srt import server_args
        from sglang.srt.distributed.parallel_state import GroupCoordinator
        from sglang.srt.model_executor.model_runner import Model, ModelRunner
        from sglang.srt.runtime_context import STATE

        size = group.size
        dp = str(size // attention_ranks)
        args = server_args.parse("--tp-size", str(size), "--dp-size", dp, *flags, **more)
        STATE.groups["ep"] = GroupCoordinator(list(range(size)), group.process_group())
        STATE.redundant, STATE.logical = redundant, 8
        STATE.parallel = SimpleNamespace(
            tp_size=size,
            moe_ep_size=args.ep_size,
            moe_ep_rank=group.rank,
            attn_tp_size=attention_ranks,
            enable_dp_attention=args.dp_size > 1,
        )
        module, name = BLOCKS[block]
        kind = getattr(importlib.import_module(f"sglang.srt.models.{module}"), name)
        self.group, self.block, self.layers = group, block, layers
        self.runner = ModelRunner(args, lambda: Model(kind, layers, torch.float32))
        self.runner.load_model()

    def step(
        self, x: torch.Tensor, counts: list[int] | None, real: int | None = None
    ) -> torch.Tensor:
        from sglang.srt.model_executor.model_runner import batch

        out: torch.Tensor = self.runner.forward(batch(x, counts, real))
        return out

    @property
    def workspaces(self) -> list[Any]:
        from weft.plugins.sglang import engine

        assert engine._blocks is not None
        return engine._blocks.operators()


def tokens(count: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return drawn((count, 64), seed).to(dtype)


def alone(
    x: torch.Tensor, block: str, *, layers: int = 2, real: int | None = None, shift: int = 0
) -> torch.Tensor:
    """What the model makes of x in one process, in plain torch.

    real: rows from there on are sent to no routed expert.   shift: the weights are those of the
    layer that stands so many behind.
    """
    from sglang.srt.models import parts

    scale, shared_size = 1.0, 0
    if block in ("glm4", "deepseek", "nextn"):
        scale, shared_size = parts.SCALE, parts.INTERMEDIATE * (2 if block == "glm4" else 1)
    elif block == "qwen_next":
        shared_size = parts.INTERMEDIATE
    for layer in range(layers):
        logits = functional.linear(x.float(), parts.drawn((8, 64), 1000 * layer + 999, x.dtype))
        weights, ids = logits.softmax(1).topk(parts.TOP_K)
        if real is not None:
            ids[real:] = -1
        pairs = [parts.expert(layer + shift, each, x.dtype) for each in range(parts.EXPERTS)]
        shared = None
        if shared_size:
            wide = parts.drawn((2 * shared_size, 64), 1000 * layer + 500, x.dtype)
            narrow = parts.drawn((64, shared_size), 1000 * layer + 501, x.dtype)
            gate, up = functional.linear(x, wide).chunk(2, dim=1)
            shared = functional.linear(functional.silu(gate) * up, narrow)
            if block == "qwen_next":
                gate = parts.drawn((1, 64), 1000 * layer + 502, x.dtype)
                shared = torch.sigmoid(functional.linear(x, gate)) * shared
        biased: dict[str, Any] = {}
        if block == "gpt_oss":
            both = [parts.biases(layer + shift, each) for each in range(parts.EXPERTS)]
            biased = {"gate_up_bias": torch.stack([wide for wide, _ in both])}
            biased |= {
                "down_bias": torch.stack([narrow for _, narrow in both]),
                "gating": clamped(0.5),
            }
        x = x + weft.reference.moe_layer(
            x,
            ids,
            weights * scale,
            torch.stack([wide for wide, _ in pairs]),
            torch.stack([narrow for _, narrow in pairs]),
            shared=shared,
            **biased,
        )
    return x
