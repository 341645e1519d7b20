# SPDX-License-Identifier: Apache-2.0
"""A model of the stand-in on one rank, served by weft, and the same model in plain torch."""

import functools
import importlib
import os
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

import weft
from tests.plugins import standins
from tests.plugins.standins import (
    HIDDEN,
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
    "glm4_lite": "Glm4MoeLiteSparseMoeBlock",
    "mimo": "MiMoV2MoE",
    "qwen_next": "Qwen2MoeSparseMoeBlock",
    "minimax": "MiniMaxM2MoE",
    "minimax_m3": "MiniMaxM3MoE",
    "kimi_k3": "KimiK3MoE",
    "nemotron_h": "NemotronHMoE",
    "gpt_oss": "GptOssSparseMoeBlock",
    "deepseek": "DeepseekV2MoE",
    "hash": "hash_block",
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
        dtype: torch.dtype = torch.float32,
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
            **{"tp_rank": group.rank},
            **{"attn_tp_size": attention_ranks, "attn_dp_enabled": attention_ranks < size},
        )
        kind = getattr(standin, BLOCKS[block])
        self.batch = standin.batch
        self.runner = standin.ModelRunner(args, lambda: standin.Model(kind, layers, dtype))
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


def alone(x: torch.Tensor, block: str, **more: Any) -> torch.Tensor:
    """Return what the model computes from x in one process, in plain torch."""
    name = "deepseek" if block in ("hash", "nextn") else block
    kind = getattr(sglang(), BLOCKS[name])

    def shared(layer: int, x: torch.Tensor) -> torch.Tensor:
        mlp, name, size = kind.mlp
        out: torch.Tensor = mlp(size, layer, x.dtype, prefix="", parallel_group="replicated")(x)
        gate = drawn((1, HIDDEN), 1000 * layer + 502, x.dtype)
        return out * torch.sigmoid(functional.linear(x, gate)) if name == "shared_expert" else out

    more |= {"scale": kind.scale or 1.0, "shared": shared if kind.mlp else None}
    more["activation"] = weft.reference.relu2 if kind.more else None
    return standins.alone(x, gating=clamped_swiglu(0.5) if kind.activation else None, **more)


ELASTIC_FLAGS: dict[str, Any] = {
    "elastic_ep_backend": "weft",
    "disable_overlap_schedule": True,
    "enable_dp_lm_head": True,
    "moe_dense_tp_size": 1,
    "enable_dp_attention_local_control_broadcast": True,
    "ep_dispatch_algorithm": "static",
}


def replicated(group: weft.Group, **flags: Any) -> Server:
    """Serve a model whose experts have two replicas each, on ranks two apart."""
    kwargs = ELASTIC_FLAGS | flags
    static = kwargs["ep_dispatch_algorithm"] == "static"
    rows = (torch.arange(16) % 8).repeat(2, 1)
    install_standin("sglang", RELEASE).place(rows, group.size, 8, static)
    return Server(group, "qwen3", redundant=8, **kwargs)
