"""Stand-ins for the modules of SGLang that sum over tensor-parallel ranks, and a model of them.

Names, signatures and behaviour are those that `weft.plugins.sglang.allreduce` relies on; sums go
over gloo. `install` puts them in `sys.modules` of a rank.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.plugins.names import Engine

LIMIT = 16  # FUSE_ALLREDUCE_MAX_BATCH_SIZE; 2048 in SGLang


class State:
    """What SGLang keeps in modules and contexts."""

    groups: dict[str, GroupCoordinator]
    dp_attention = False
    all_to_all = False
    flashinfer = False
    release: str
    ways: list[str]  # how each sum of this rank was made, by SGLang's own ways
    workspaces = 0


class GroupCoordinator:
    def __init__(self, ranks: list[int], group: dist.ProcessGroup | None) -> None:
        self.ranks = ranks
        self.cpu_group = self.device_group = group
        self.world_size = len(ranks)

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return input_
        if State.release == "0.5.23" and self._can_use_flashinfer_allreduce(input_):
            State.ways.append("flashinfer")
            return input_.clone()
        method = self._resolve_outplace_all_reduce_method(input_)
        if method is not None:
            return self._all_reduce_out_place(input_, method)
        State.ways.append("in place")
        dense = input_.contiguous()
        dist.all_reduce(dense, group=self.device_group)
        return input_.copy_(dense)

    def _can_use_flashinfer_allreduce(self, input_: torch.Tensor) -> bool:
        return State.flashinfer

    def _resolve_outplace_all_reduce_method(
        self, input_: torch.Tensor, should_use_pymscclpp_allreduce: bool | None = None
    ) -> str | None:
        return None

    def _all_reduce_out_place(
        self, input_: torch.Tensor, outplace_all_reduce_method: str
    ) -> torch.Tensor:
        State.ways.append(outplace_all_reduce_method)
        out = input_.clone()
        dist.all_reduce(out, group=self.device_group)
        return out


def of(name: str) -> Callable[[], GroupCoordinator]:
    return lambda: State.groups[name]


class Norm(nn.Module):
    """RMSNorm, and with `gemma` Gemma's: 1 + weight."""

    def __init__(self, weight: torch.Tensor, eps: float, gemma: bool, **settings: Any) -> None:
        super().__init__()
        self.variance_size_override: int | None = None
        self.cast_x_before_out_mul = self.fp32_residual = False
        self.override_orig_dtype: torch.dtype | None = None
        self.weight, self.variance_epsilon = nn.Parameter(weight, requires_grad=False), eps
        self.gemma = gemma
        if gemma:
            self.gemma_weight = weight + 1
        for name, value in settings.items():
            setattr(self, name, value)
        self.calls = 0

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
    ) -> Any:
        """Writes into the residual, as SGLang's kernel does."""
        self.calls += 1
        if residual is not None:
            if post_residual_addition is not None:
                residual = residual + post_residual_addition
            residual += x
            x = residual
        weight = self.weight.float() + (1.0 if self.gemma else 0.0)
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        normed = (wide * rstd * weight).to(x.dtype)
        return normed if residual is None else (normed, residual)

    def forward_with_allreduce_fusion(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        post_residual_addition: torch.Tensor | None = None,
        use_attn_tp_group: bool = True,
    ) -> Any:
        weight = self.gemma_weight if self.gemma else self.weight
        call = sys.modules["sglang.srt.layers.layernorm"]._forward_with_allreduce_fusion
        return call(self, x, residual, post_residual_addition, weight, use_attn_tp_group)


def _forward_with_allreduce_fusion(
    norm_module: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    post_residual_addition: torch.Tensor | None,
    weight: torch.Tensor,
    use_attn_tp_group: bool = True,
) -> Any:
    State.ways.append("not summed")
    return norm_module.forward(x, residual, post_residual_addition)


def apply_flashinfer_allreduce_fusion(batch_size: int) -> bool:
    return State.flashinfer and 0 < batch_size <= LIMIT


# What a layer asks before it leaves its sum to the next norm, by version.
GATES = {
    "0.5.17": ("layers.communicator", "apply_flashinfer_allreduce_fusion"),
    "0.5.23": ("layers.layer_boundary.residual.add_norm", "flashinfer_ar_fusion_applies"),
}


def pre_initialize_workspaces(
    max_token_num: int, hidden_dim: int, dtype: torch.dtype, use_oneshot: bool | None = None
) -> None:
    State.workspaces += 1


class A2A:
    @staticmethod
    def is_none() -> bool:
        return not State.all_to_all


class Model:
    """Layers of two sums: what `attention` and `experts` make of normed rows is a rank's part."""

    def __init__(self, layers: int, hidden: int, dtype: torch.dtype, gemma: bool, **norm: Any):
        draw = torch.Generator().manual_seed(5)
        self.norms = [
            Norm((torch.rand(hidden, generator=draw) + 0.5).to(dtype), 1e-5, gemma, **norm)
            for _ in range(2 * layers + 1)
        ]
        size = State.groups["tp"].world_size
        rank = State.groups["tp"].ranks.index(dist.get_rank())
        whole = torch.randn(2 * layers, size, hidden, hidden, generator=draw) / hidden**0.5
        self.whole = whole.to(dtype)
        self.parts = self.whole[:, rank]

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        """As SGLang's layers: an attention's sum is made at once, an MLP's left to the next norm.

        extra: added to the residual of the first sum, where it is fused.
        """
        module, name = GATES[State.release]
        gate = getattr(sys.modules["sglang.srt." + module], name)
        last = len(self.parts) - 1
        x = State.groups["tp"].all_reduce(x / State.groups["tp"].world_size)  # an embedding's
        residual, x = x.clone(), self.norms[0].forward(x)
        for i, part in enumerate(self.parts):
            y = x @ part
            name = "attn" if i % 2 == 0 else "moe"
            if gate(len(y)) and i != last:
                x, residual = self.norms[i + 1].forward_with_allreduce_fusion(
                    y, residual, extra if i == 0 else None, use_attn_tp_group=name == "attn"
                )
            else:
                added = residual if extra is None or i else residual + extra
                x, residual = self.norms[i + 1].forward(State.groups[name].all_reduce(y), added)
        return x

    def alone(self, x: torch.Tensor, extra: torch.Tensor | None = None) -> torch.Tensor:
        """The same by plain torch, in this process alone and in fp32."""
        residual, x = x.float(), self.norms[0].forward(x.float())
        for i, parts in enumerate(self.whole.float()):
            y = sum(x @ part for part in parts)
            assert isinstance(y, torch.Tensor)
            residual = residual + y + (0 if extra is None or i else extra.float())
            x = self.norms[i + 1].forward(residual)
        return x


class ModelRunner:
    device = "cpu"
    gpu_id = 0

    def __init__(self, model: Model, hidden: int, dtype: torch.dtype) -> None:
        self.model = model
        known = types.SimpleNamespace(architectures=["Fusing"])
        self.model_config = types.SimpleNamespace(hidden_size=hidden, dtype=dtype, hf_config=known)
        self.server_args = types.SimpleNamespace(
            enable_pdmux=False, flashinfer_allreduce_fusion_backend=None
        )

    def load_model(self) -> None:
        """The hook stands behind this."""

    def forward(
        self,
        forward_batch: torch.Tensor,
        skip_attn_backend_init: bool | None = None,
        pp_proxy_tensors: Any = None,
        reinit_attn_backend: bool = False,
        split_forward_count: int = 1,
    ) -> torch.Tensor:
        return self.model.forward(forward_batch)


class HookType(enum.Enum):
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    _patched: set[str] = set()

    @staticmethod
    def register(target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        """SGLang collects first; here a hook is applied at once."""
        owner, name = target.rsplit(".", 1)
        place: Any = sys.modules.get(owner)
        if place is None:
            module, kind = owner.rsplit(".", 1)
            place = getattr(sys.modules[module], kind)
        original = getattr(place, name)

        def around(*args: Any, **options: Any) -> Any:
            return hook(original, *args, **options)

        def after(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            changed = hook(result, *args, **options)
            return result if changed is None else changed

        HookRegistry._patched.add(target)
        setattr(place, name, around if hook_type is HookType.AROUND else after)


MODULES: dict[str, dict[str, Any]] = {
    "distributed.parallel_state": {
        "GroupCoordinator": GroupCoordinator,
        "get_tp_group": of("tp"),
        "get_attn_tp_group": of("attn"),
        "get_moe_ep_group": of("ep"),
        "get_moe_tp_group": of("moe"),
    },
    "layers.layernorm": {
        "_forward_with_allreduce_fusion": _forward_with_allreduce_fusion,
        "RMSNorm": Norm,
        "GemmaRMSNorm": Norm,
    },
    "layers.flashinfer_comm_fusion": {"pre_initialize_workspaces": pre_initialize_workspaces},
    "layers.dp_attention": {"is_dp_attention_enabled": lambda: State.dp_attention},
    "layers.moe.utils": {"get_moe_a2a_backend": lambda: A2A},
    "model_executor.model_runner": {"ModelRunner": ModelRunner},
    "arg_groups.overrides": {
        "_FLASHINFER_ALLREDUCE_FUSION_ARCHS": frozenset({"Fusing"}),
        "resolved_view": lambda server_args: server_args,
    },
    "server_args": {"MOE_A2A_BACKEND_CHOICES": []},
    "plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
}
LIMITS = {"0.5.17": "layers.communicator", "0.5.23": "layers.layer_boundary"}


def install(release: str = "0.5.17") -> None:
    """Make `import sglang.srt...` find the stand-ins of a version. Once in a process."""
    State.release = release
    setattr(Engine, "installed", lambda engine: release)  # noqa: B010
    place, gate = GATES[release]
    of_release: list[tuple[str, dict[str, Any]]] = [
        (LIMITS[release], {"FUSE_ALLREDUCE_MAX_BATCH_SIZE": LIMIT}),
        (place, {gate: apply_flashinfer_allreduce_fusion}),
    ]
    for name, contents in (*MODULES.items(), *of_release):
        parts = ["sglang", "srt", *name.split(".")]
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            module = sys.modules.get(path)
            if module is None:
                module = sys.modules[path] = types.ModuleType(path)
                if end < len(parts):
                    module.__path__ = []
                if end > 1:
                    setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
        vars(sys.modules[".".join(parts)]).update(contents)


def join(moe: list[list[int]] | None = None) -> None:
    """The groups of plain tensor parallelism over the world; `moe` splits the experts' sums."""
    size, rank = dist.get_world_size(), dist.get_rank()
    everyone = list(range(size))
    tensor = GroupCoordinator(everyone, dist.new_group(everyone))
    alone = GroupCoordinator([rank], None)
    groups = {"tp": tensor, "attn": GroupCoordinator(everyone, tensor.cpu_group), "ep": alone}
    groups["moe"] = GroupCoordinator(everyone, tensor.cpu_group)
    for ranks in moe or []:
        made = dist.new_group(ranks)
        if rank in ranks:
            groups["moe"] = GroupCoordinator(ranks, made)
    State.groups, State.ways, State.workspaces = groups, [], 0
