# SPDX-License-Identifier: Apache-2.0
"""A stand-in for SGLang 0.5.23 on CPU ranks: what weft's hooks replace, in plain arithmetic.

All of SGLang's modules are this one; `tests.plugins.standins` says how.
"""

import contextlib
import functools
import sys
from collections import namedtuple
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import weft
from tests.plugins.standins import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    TOP_K,
    clamped_swiglu,
    drawn,
    expert_weights,
    gate_weight,
)

# This process's place, and the counts and flags of its forward pass. Tests write to STATE.
# groups: GroupCoordinators of "tp", "attn", "ep" and "moe"; ways: how SGLang made each of its sums.
STATE = SimpleNamespace(
    parallel=SimpleNamespace(
        tp_size=1, moe_ep_size=1, moe_ep_rank=0, attn_tp_size=1, attn_dp_enabled=False
    ),
    **{"backend": "none", "counts": None, "real": None, "redundant": 0, "groups": {}, "ways": []},
    **{"workspaces": 0, "flashinfer": False, "dp_attention": False, "places": None},
    **{"capturer": None},
)


def getter(name: str) -> Callable[[], Any]:
    return lambda: getattr(STATE, name)


get_parallel, get_exec, get_dp_global_num_tokens = map(getter, ("parallel", "exec", "counts"))
is_dp_attention_enabled = getter("dp_attention")
get_global_expert_location_metadata = getter("places")

# Flags.

_FLASHINFER_ALLREDUCE_FUSION_ARCHS = frozenset({"Fusing"})
FALSE = """enable_eplb enable_prefill_delayer
enable_two_batch_overlap enable_torch_compile enable_lora enable_pdmux
disable_overlap_schedule enable_dp_lm_head enable_elastic_expert_backup
enable_deterministic_inference enable_return_routed_experts
enable_dp_attention_local_control_broadcast
enable_weights_cpu_backup enable_draft_weights_cpu_backup"""
NONE = """lora_target_modules flashinfer_allreduce_fusion_backend elastic_ep_backend max_ep_size
moe_dense_tp_size speculative_algorithm ep_join_mode ep_dispatch_algorithm
speculative_num_draft_tokens"""
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(FALSE.split(), False),
    **dict.fromkeys(NONE.split()),
    **dict.fromkeys(("attn_cp_size", "moe_dp_size", "pp_size", "tokenizer_worker_num"), 1),
    **{"disaggregation_mode": "null", "chunked_prefill_size": 32, "moe_a2a_backend": "none"},
}


Backend = SimpleNamespace(FULL="full", DISABLED="disabled")


def make_args(**flags: object) -> SimpleNamespace:
    decode = SimpleNamespace(backend=Backend.FULL, max_bs=4, bs=[1, 4])
    graphs = SimpleNamespace(decode=decode)
    return SimpleNamespace(**{**DEFAULTS, "cuda_graph_config": graphs, **flags})


def resolved_view(server_args: Any) -> Any:
    return server_args


class MoeA2ABackend(Enum):
    NONE, DEEPEP, CUSTOMIZED = "none", "deepep", "weft"

    def is_none(self) -> bool:
        return self is MoeA2ABackend.NONE

    def is_customized(self) -> bool:
        return self is MoeA2ABackend.CUSTOMIZED


def get_moe_a2a_backend() -> MoeA2ABackend:
    return MoeA2ABackend(STATE.backend)


# Routing.


def place(physical: torch.Tensor, ranks: int, logical: int, static: bool) -> None:
    """Publish a placement, with only the first replica of each expert in its tables."""
    every = torch.full((len(physical), logical, physical.shape[1]), -1)
    for layer, row in enumerate(physical.tolist()):
        every[layer, :, 0] = torch.tensor([row.index(expert) for expert in range(logical)])
    STATE.places = SimpleNamespace(
        physical_to_logical_map_cpu=physical,
        logical_to_all_physical_map=every,
        logical_to_all_physical_map_cpu=every.clone(),
        logical_to_all_physical_map_num_valid=(every >= 0).sum(-1),
        logical_to_rank_dispatch_physical_map=every[..., 0].clone() if static else None,
        num_local_physical_experts=physical.shape[1] // ranks,
        num_logical_experts=logical,
    )


def physical_ids(layer_id: int) -> Any:
    """Return the replica that this rank uses, by logical expert."""
    if STATE.places:
        single = STATE.places.logical_to_rank_dispatch_physical_map
        if single is not None:
            return single[layer_id]
        valid = STATE.places.logical_to_all_physical_map_num_valid[layer_id]
        chosen = torch.randint(0, 65536, (EXPERTS,)) % valid
        every = STATE.places.logical_to_all_physical_map[layer_id]
        return every.gather(1, chosen[:, None])[:, 0]
    if not STATE.redundant:
        return None
    result = torch.arange(EXPERTS)
    if STATE.parallel.moe_ep_rank % 2:  # odd ranks take the replica where there is one
        result[: STATE.redundant] += EXPERTS
    return result


StandardTopKOutput = namedtuple("StandardTopKOutput", "topk_weights topk_ids router_logits")


class TopK(nn.Module):
    """Softmax scores, the top k, and -1 in padding rows.

    Like SGLang's kernels, it cannot be launched with no token.
    """

    def __init__(self, top_k: int, layer_id: int = 0) -> None:
        super().__init__()
        self.top_k, self.layer_id, self.is_draft = top_k, layer_id, False

    def forward(self, x: torch.Tensor, router_logits: torch.Tensor) -> Any:
        if not len(x):
            raise RuntimeError("invalid configuration argument: a grid of 0 blocks")
        real, replicas = self.routing_inputs()
        weights, ids = router_logits.float().softmax(1).topk(self.top_k)
        if STATE.capturer is not None:
            STATE.capturer.capture(self.layer_id, ids)
        if replicas is not None:
            ids = replicas[ids]
        if real is not None:
            ids[int(real) :] = -1
        return StandardTopKOutput(weights, ids.int(), router_logits)

    def routing_inputs(self) -> tuple[Any, Any]:
        return STATE.real, None if self.is_draft else physical_ids(0)

    def empty_topk_output(self, device: torch.device, *, layer_id: int | None = None) -> Any:
        none = torch.empty((0, self.top_k), device=device)
        return StandardTopKOutput(none, none.int(), none)


def _is_scattered_a2a_backend() -> bool:
    return get_moe_a2a_backend() is MoeA2ABackend.DEEPEP


class RoutedExpertsCapturer:
    """The experts of a pass: of this rank's tokens, or of all ranks' in one buffer."""

    def __init__(self, layers: int) -> None:
        self.buffer = torch.full((256, layers, TOP_K), -1)

    def capture(self, layer_id: int, ids: torch.Tensor) -> None:
        self.buffer[: len(ids), layer_id] = ids

    def get_local_slice(self, rank: int) -> torch.Tensor:
        start = 0 if _is_scattered_a2a_backend() else sum(STATE.counts[:rank])
        return self.buffer[start : start + STATE.counts[rank]]


class HashTopK(TopK):
    """Takes the tokens' ids, and the experts that the logits choose."""

    def forward(self, x: torch.Tensor, router_logits: torch.Tensor, input_ids: Any = None) -> Any:
        assert torch.equal(input_ids, token_ids(x)), "ids of other rows"
        return super().forward(x, router_logits)


def token_ids(x: torch.Tensor) -> torch.Tensor:
    return x[:, 0].view(torch.int32)


# Sums and norms.

FUSE_ALLREDUCE_MAX_BATCH_SIZE = 16  # 2048 in SGLang


def flashinfer_ar_fusion_applies(batch_size: int) -> bool:
    return STATE.flashinfer and 0 < batch_size <= FUSE_ALLREDUCE_MAX_BATCH_SIZE


def pre_initialize_workspaces(*sizes: Any) -> None:
    STATE.workspaces += 1


def _forward_with_allreduce_fusion(norm: Any, x: torch.Tensor, *args: Any) -> Any:
    STATE.ways.append("not summed")
    return norm.forward(x, *args[:2])


class RMSNorm(nn.Module):
    """calls: how often it ran unfused; offset: added to the weight."""

    offset = 0.0

    def __init__(self, weight: torch.Tensor, eps: float, **settings: Any) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight, requires_grad=False), eps
        self.gemma_weight = weight + self.offset
        self.calls = 0
        for name, value in settings.items():
            setattr(self, name, value)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, added: Any = None
    ) -> Any:
        """Norm, and write into the residual as SGLang's kernel does."""
        self.calls += 1
        if residual is not None:
            residual = residual if added is None else residual + added
            residual += x
            x = residual
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        normed = (wide * rstd * (self.weight.float() + self.offset)).to(x.dtype)
        return normed if residual is None else (normed, residual)

    def forward_with_allreduce_fusion(
        self, x: torch.Tensor, residual: Any = None, added: Any = None, use_attn_tp_group: Any = 1
    ) -> Any:
        weight = self.gemma_weight if self.offset else self.weight
        return _forward_with_allreduce_fusion(self, x, residual, added, weight, use_attn_tp_group)


class GemmaRMSNorm(RMSNorm):
    offset = 1.0


class GroupCoordinator:
    """Sums over gloo, and records each sum's method in STATE.ways."""

    def __init__(self, ranks: list[int], group: dist.ProcessGroup | None) -> None:
        self.ranks, self.world_size, self.cpu_group = ranks, len(ranks), group

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        if self.world_size == 1:
            return input_
        if self._can_use_flashinfer_allreduce(input_):
            STATE.ways.append("flashinfer")
            return input_.clone()
        method = self._resolve_outplace_all_reduce_method(input_)
        if method is not None:
            return self._all_reduce_out_place(input_, method)
        STATE.ways.append("in place")
        dense = input_.contiguous()
        dist.all_reduce(dense, group=self.cpu_group)
        return input_.copy_(dense)

    def _can_use_flashinfer_allreduce(self, input_: torch.Tensor) -> bool:
        return bool(STATE.flashinfer)

    def _resolve_outplace_all_reduce_method(self, *args: Any) -> str | None:
        return None

    def _all_reduce_out_place(self, input_: torch.Tensor, method: str) -> torch.Tensor:
        STATE.ways.append(method)
        out = input_.clone()
        dist.all_reduce(out, group=self.cpu_group)
        return out


def group_getter(name: str) -> Callable[[], GroupCoordinator]:
    return lambda: STATE.groups[name]


get_tp_group, get_attn_tp_group, get_moe_ep_group, get_moe_tp_group = map(
    group_getter, ("tp", "attn", "ep", "moe")
)

# Layers of experts.


BaseDispatcher = type("BaseDispatcher", (), {})
StandardDispatchOutput = namedtuple(
    "StandardDispatchOutput", "hidden_states hidden_states_scale topk_output"
)
StandardCombineInput = namedtuple("StandardCombineInput", "hidden_states")


def create_moe_dispatcher(moe_runner_config: Any, quant_method: Any) -> Any:
    return BaseDispatcher()


CONFIG = {
    **dict.fromkeys(("gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")),
    **{"activation": "silu", "is_gated": True, "apply_router_weight_on_input": False},
    "gate_up_interleaved": True,
}


class Method:
    """The runner: skips ids of -1, weighs, sums and overwrites its input, as Triton's does."""

    def __init__(self) -> None:
        triton = SimpleNamespace(is_triton=lambda: True, value="triton")
        self.runner = SimpleNamespace(runner_backend=triton)

    def apply(self, layer: Any, dispatch_output: Any) -> Any:
        x, chosen, wide = dispatch_output.hidden_states, dispatch_output.topk_output, {}
        assert chosen.topk_ids.is_contiguous()
        assert chosen.topk_weights.is_contiguous()
        config = layer.moe_runner_config
        gate_up = layer.w13_weight
        if layer.with_bias:
            gate_up, bias = (apart(t) for t in (gate_up, layer.w13_weight_bias))
            wide = {"gate_up_bias": bias, "down_bias": layer.w2_weight_bias}
            wide["gating"] = clamped_swiglu(config.gemm1_clamp_limit)
        routed = x, chosen.topk_ids, chosen.topk_weights, gate_up, layer.w2_weight
        out = weft.reference.moe_layer(*routed, **wide)
        x.copy_(out * (config.routed_scaling_factor or 1.0))
        return StandardCombineInput(x)


class FusedMoE(nn.Module):
    def __init__(
        self, layer_id: int, params_dtype: torch.dtype, scale: Any, with_bias: bool, **more: Any
    ) -> None:
        super().__init__()
        place = get_parallel()
        self.layer_id, self.top_k, self.hidden_size = layer_id, TOP_K, HIDDEN
        self.num_experts, self.params_dtype = EXPERTS + int(STATE.redundant), params_dtype
        self.moe_ep_size, self.moe_ep_rank = place.moe_ep_size, place.moe_ep_rank
        self.moe_tp_size, self.intermediate_size_per_partition = 1, INTERMEDIATE
        self.num_local_experts = self.num_experts // self.moe_ep_size
        self.num_fused_shared_experts, self.with_bias = 0, with_bias
        self.should_fuse_routed_scaling_factor_in_topk = False
        self.moe_runner_config = SimpleNamespace(
            **{**CONFIG, "layer_id": layer_id, "routed_scaling_factor": scale, **more}
        )
        local = self.num_local_experts
        wide = (2 if self.moe_runner_config.is_gated else 1) * INTERMEDIATE
        made = {"w13_weight": torch.empty(local, wide, HIDDEN, dtype=params_dtype)}
        made["w2_weight"] = torch.empty(local, HIDDEN, INTERMEDIATE, dtype=params_dtype)
        if with_bias:  # in float32, whatever the weights are
            made["w13_weight_bias"] = torch.empty(local, wide)
            made["w2_weight_bias"] = torch.empty(local, HIDDEN)
        for name, tensor in made.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.quant_method = Method()
        self.dispatcher = create_moe_dispatcher(self.moe_runner_config, self.quant_method)

    def forward(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        return self.forward_impl(hidden_states, topk_output)

    def forward_impl(self, hidden_states: torch.Tensor, topk_output: Any) -> torch.Tensor:
        sent = self.dispatcher.dispatch(hidden_states=hidden_states, topk_output=topk_output)
        made = self.quant_method.apply(layer=self, dispatch_output=sent)
        out: torch.Tensor = self.dispatcher.combine(combine_input=made)
        return out.contiguous()


# Models: blocks whose own forward is weft's to replace.

SCALE = 2.5


def fill(experts: Any, seed_layer: int | None = None) -> None:
    """Write this rank's experts in place; those with biases interleave gate and up."""
    layer = experts.layer_id if seed_layer is None else seed_layer
    first = experts.moe_ep_rank * experts.num_local_experts
    own = torch.arange(first, first + experts.num_local_experts) % EXPERTS
    wide, narrow, wide_bias, narrow_bias = (
        tensor[own] for tensor in expert_weights(layer, experts.params_dtype)
    )
    if experts.with_bias:
        wide, wide_bias = (
            torch.stack(rows.chunk(2, dim=1), dim=2).flatten(1, 2) for rows in (wide, wide_bias)
        )
        experts.w13_weight_bias.copy_(wide_bias)
        experts.w2_weight_bias.copy_(narrow_bias)
    experts.w13_weight.copy_(wide[:, : experts.w13_weight.shape[1]])
    experts.w2_weight.copy_(narrow)


def apart(rows: torch.Tensor) -> torch.Tensor:
    """Return each expert's gate rows, followed by its up rows."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


class Gate(nn.Module):
    """A router. SGLang's linear layers return a pair, and DeepSeek's gate takes the batch."""

    def __init__(self, layer: int, dtype: torch.dtype, kind: str = "") -> None:
        super().__init__()
        self.weight, self.kind = gate_weight(layer).to(dtype), kind

    def forward(self, x: torch.Tensor, forward_batch: Any = None) -> Any:
        assert (self.kind == "deepseek") == (forward_batch is not None)
        assert self.kind != "float32" or x.dtype == torch.float32
        logits = functional.linear(x.float(), self.weight.float())
        return (logits, None) if self.kind in ("pair", "float32") else logits


class SharedMLP(nn.Module):
    """A shared expert, which weft must keep whole on each rank."""

    def __init__(
        self, size: int, layer: int, dtype: torch.dtype, prefix: str, parallel_group: str = "tp"
    ) -> None:
        super().__init__()
        whole = parallel_group == "replicated"
        assert whole or get_parallel().tp_size == 1, "a shared expert in parts needs an all-reduce"
        gate_up: Any = nn.Linear(HIDDEN, 2 * size, bias=False, dtype=dtype)
        gate_up.output_size = 2 * size  # as SGLang's parallel layers have it
        self.gate_up_proj, self.down_proj = (
            gate_up,
            nn.Linear(size, HIDDEN, bias=False, dtype=dtype),
        )
        self.requires_grad_(False)
        self.gate_up_proj.weight.copy_(drawn((2 * size, HIDDEN), 1000 * layer + 500, dtype))
        self.down_proj.weight.copy_(drawn((HIDDEN, size), 1000 * layer + 501, dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return out


MLPS = "Glm4MoeMLP Glm4MoeLiteMLP Qwen2MoeMLP DeepseekV2MLP MiniMaxM3MLP NemotronHMLP"
Glm4MoeMLP, Glm4MoeLiteMLP, Qwen2MoeMLP, DeepseekV2MLP, MiniMaxM3MLP, NemotronHMLP = (
    type(name, (SharedMLP,), {}) for name in MLPS.split()
)


class Block(nn.Module):
    """gate_kind: arguments and result of its gate; mlp: class, name and size of a shared expert.

    activation: of experts with biases; more: of the runner's config.
    """

    gate_kind = "pair"
    scale: float | None = None
    mlp: tuple[Any, str, int] | None = None
    activation: dict[str, Any] = {}
    more: dict[str, Any] = {}

    def __init__(self, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_id, self.topk = layer_id, TopK(TOP_K, layer_id)
        gate = Gate(layer_id, dtype, self.gate_kind)
        if self.activation:
            self.router = gate
        else:
            self.gate = gate
        self.experts = FusedMoE(
            layer_id, dtype, self.scale, bool(self.activation), **self.activation, **self.more
        )
        if self.mlp is None:
            return
        kind, name, size = self.mlp
        made = kind(size, layer_id, dtype, prefix=f"layers.{layer_id}.mlp.{name}")
        if name == "shared_experts":
            self.shared_experts = made
        else:
            self.shared_expert, self.shared_expert_gate = made, nn.Linear(HIDDEN, 1, bias=False)
            self.shared_expert_gate.requires_grad_(False)
            self.shared_expert_gate.weight.copy_(drawn((1, HIDDEN), 1000 * layer_id + 502, dtype))

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise AssertionError("the stock forward ran")


class Qwen3MoeSparseMoeBlock(Block): ...


class Glm4MoeSparseMoeBlock(Block):
    gate_kind, scale = "", SCALE
    mlp = Glm4MoeMLP, "shared_experts", 2 * INTERMEDIATE


class Glm4MoeLiteSparseMoeBlock(Block):
    gate_kind, scale = "", SCALE
    mlp = Glm4MoeLiteMLP, "shared_experts", INTERMEDIATE


class MiMoV2MoE(Block):
    gate_kind = ""


class Qwen2MoeSparseMoeBlock(Block):
    mlp = Qwen2MoeMLP, "shared_expert", INTERMEDIATE

    def _forward_shared_experts(self, x: torch.Tensor, apply_gate: bool = True) -> torch.Tensor:
        out: torch.Tensor = self.shared_expert(x)
        return functional.sigmoid(self.shared_expert_gate(x)) * out


class MiniMaxM2MoE(Block):
    gate_kind = "float32"


class MiniMaxM3MoE(Block):
    mlp = MiniMaxM3MLP, "shared_experts", INTERMEDIATE

    def _compute_router_logits(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.gate(x)[0]
        return logits


def _uses_ep_a2a() -> bool:
    return False


class KimiK3MoE(Block):
    """Runs its own forward, which calls the experts."""

    def __init__(self, layer_id: int, dtype: torch.dtype) -> None:
        super().__init__(layer_id, dtype)
        assert _uses_ep_a2a(), "rows of all ranks would be gathered and summed"

    def forward(self, hidden_states: torch.Tensor, *, prefix_sum: Any = None) -> torch.Tensor:
        x, empty = hidden_states, self.topk.empty_topk_output
        chosen = self.topk(x, self.gate(x)[0]) if len(x) else empty(x.device)
        out: torch.Tensor = self.experts(x, chosen)
        return out


class NemotronHMoE(Block):
    """Runs its own forward, which calls the experts and adds the shared expert."""

    scale, more = SCALE, {"activation": "relu2", "is_gated": False}
    mlp = NemotronHMLP, "shared_experts", INTERMEDIATE

    def forward(self, hidden_states: torch.Tensor, forward_batch: Any = None) -> torch.Tensor:
        x, empty = hidden_states, self.topk.empty_topk_output
        chosen = self.topk(x, self.gate(x)[0]) if len(x) else empty(x.device)
        out: torch.Tensor = self.experts(x, chosen) + self.shared_experts(x)
        return out


class GptOssSparseMoeBlock(Block):
    activation = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 0.5}


class DeepseekV2MoE(Block):
    gate_kind, scale = "deepseek", SCALE
    mlp = DeepseekV2MLP, "shared_experts", INTERMEDIATE


def hash_block(layer_id: int, dtype: torch.dtype) -> Any:
    """Return a block of DeepSeek-V4's first layers, which route by token id."""
    block: Any = DeepseekV2MoE(layer_id, dtype)
    block.is_hash, block.topk = True, HashTopK(TOP_K)
    return block


def draft_block(layer_id: int, dtype: torch.dtype) -> Any:
    """Return the block of a draft layer (`nextn`)."""
    block: Any = DeepseekV2MoE(layer_id, dtype)
    block.is_nextn = block.topk.is_draft = True
    return block


class Model(nn.Module):
    """Blocks, each added to the residual."""

    def __init__(self, kind: Callable[..., nn.Module], layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(layer, dtype) for layer in range(layers))
        for block in self.blocks:
            fill(block.experts)

    def forward(self, x: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        for block in self.blocks:
            batch = () if isinstance(block, KimiK3MoE) else (forward_batch,)
            by_token = {"input_ids_global": token_ids(x)} if hasattr(block, "is_hash") else {}
            x = x + block(x, *batch, **by_token)
        return x


class ModelRunner:
    """make: makes the model in load_model; config: fields of model_config."""

    graph_batch: Any = None  # of a capture

    def __init__(self, server_args: Any, make: Callable[[], nn.Module], **config: Any) -> None:
        self.server_args, self.make = server_args, make
        self.model_config, self.eplb_manager = SimpleNamespace(**config), SimpleNamespace()
        self.eplb_manager.disable_rebalance = lambda why: setattr(self.eplb_manager, "reason", why)
        self.device, self.gpu_id, self.is_draft_worker = "cpu", 0, False
        self.memory_saver_adapter = SimpleNamespace(region=self.enter_region)
        self.regions: list[tuple[str, bool]] = []
        STATE.backend = server_args.moe_a2a_backend

    def enter_region(self, tag: str, enable_cpu_backup: bool = False) -> Any:
        self.regions.append((tag, enable_cpu_backup))
        return contextlib.nullcontext()

    def load_model(self) -> None:
        self.model = self.make()

    def forward(self, forward_batch: Any) -> torch.Tensor:
        return self.run_model(forward_batch)

    def init_decode_cuda_graph(self) -> None:
        self.captured = self.run_model(self.graph_batch)

    def run_model(self, forward_batch: Any) -> torch.Tensor:
        STATE.counts, STATE.real = forward_batch.counts, forward_batch.num_token_non_padded
        x, forward_batch.x = forward_batch.x, None  # a failed pass leaves a changed batch
        out: torch.Tensor = self.model(x, forward_batch)
        return out


GPU_MEMORY_TYPE_WEIGHTS = "weights"


class SchedulerWeightUpdaterManager:
    """Releases and resumes memory by tags."""

    def __init__(self) -> None:
        self.offload_tags: set[str] = set()

    def release_memory_occupation(self, recv_req: Any) -> str:
        self.offload_tags.update(recv_req.tags)
        return "released"

    def resume_memory_occupation(self, recv_req: Any) -> str:
        self.offload_tags.difference_update(recv_req.tags)
        return "resumed"


class DefaultModelLoader:
    @staticmethod
    def restore_weights_before_loading(model: nn.Module, target_device: Any) -> None: ...

    @staticmethod
    def postprocess_weights(model: nn.Module, target_device: Any) -> None: ...


class WeightUpdater:
    """Loads tensors in the engine's order, with weight_loader or without ("direct")."""

    def __init__(self, model: nn.Module) -> None:
        self.get_model = lambda: model

    def update_weights_from_tensor(self, named_tensors: Any, load_format: Any = None) -> None:
        assert load_format == "direct"
        _model_load_weights_direct(self.get_model(), named_tensors)

    def load_weights_from_distributed(self, named_tensors: Any) -> None:
        for name, tensor in named_tensors:
            parameter = self.get_model().get_parameter(name)
            getattr(parameter, "weight_loader", nn.Parameter.copy_)(parameter, tensor)


class WeightExporter:
    """Saves and sends tensors as they lie in the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.get_model = lambda: model
        self.saved: dict[str, torch.Tensor] = {}

    def save_sharded_model(self, path: str, pattern: Any = None, max_size: Any = None) -> None:
        self.saved = {n: p.detach().clone() for n, p in self.get_model().named_parameters()}

    def save_remote_model(self, url: str) -> None:
        self.save_sharded_model(url)

    def send_weights_to_remote_instance(
        self, master_address: str, ports: str, group_name: str
    ) -> None:
        self.save_sharded_model(group_name)


def _model_load_weights_direct(model: nn.Module, named_tensors: Any) -> None:
    for name, tensor in named_tensors:
        model.get_parameter(name).copy_(tensor)


def batch(x: torch.Tensor, counts: list[int] | None, real: int | None = None) -> SimpleNamespace:
    """Return a batch. counts: of all attention groups; real: rows of x without padding."""
    padded = None if real is None else torch.tensor(real)
    return SimpleNamespace(x=x, counts=counts, num_token_non_padded=padded)


# Processes beside the model.


def sock_send(socket: Any, obj: Any, flags: int = 0) -> None:
    socket.sent.append(obj)


def exchange_sync_rows(global_flat: torch.Tensor, local_row: torch.Tensor, group: Any) -> None:
    raise AssertionError("SGLang's own exchange ran")


def exchange(local: list[int], ranks: int) -> list[list[int]]:
    """Return every rank's row at the start of a pass; an idle row for a missing one."""
    result = torch.tensor([[0, 0, 1]]).repeat(ranks, 1)
    exchange_sync_rows(result.flatten(), torch.tensor(local), None)
    return result.tolist()


class ElasticEPStateManager:
    @staticmethod
    @functools.cache
    def instance() -> Any:
        active = torch.ones(STATE.parallel.tp_size, dtype=torch.int32)
        state = SimpleNamespace(active_ranks=active, active_ranks_cpu=active.clone())
        state.snapshot_active_to_last = lambda: None
        state.sync_active_to_cpu = lambda: state.active_ranks_cpu.copy_(active)
        return state


class Scheduler:
    """reported: messages to the tokenizer about the ranks."""

    def __init__(self) -> None:
        self.reported: list[Any] = []
        to_tokenizer = SimpleNamespace(send_output=self.reported.append)
        self.ipc_channels = SimpleNamespace(send_to_tokenizer=to_tokenizer)

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> str:
        return "batch"


class Request(SimpleNamespace):
    routed_dp_rank: int | None = None


TokenizedGenerateReqInput, TokenizedEmbeddingReqInput = (
    type(name, (Request,), {}) for name in ("Generate", "Embedding")
)
BatchTokenizedGenerateReqInput, BatchTokenizedEmbeddingReqInput = (
    type(name, (list,), {}) for name in ("BatchGenerate", "BatchEmbedding")
)
ActiveRanksOutput = type("ActiveRanksOutput", (SimpleNamespace,), {})
AbortReq = SimpleNamespace


def is_health_check_generate_req(recv_req: Any) -> bool:
    return str(recv_req.rid).startswith("HEALTH_CHECK")


# Plug-ins.


class HookType(Enum):
    AFTER, AROUND = "after", "around"


class HookRegistry:
    """Hooks on functions and methods, by dotted path; those that no test calls are ignored."""

    _hooks: dict[str, list[tuple[HookType, Callable[..., Any]]]] = {}
    _patched: set[str] = set()

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
        cls._hooks.setdefault(target, []).append((hook_type, hook))

    @classmethod
    def apply_hooks(cls) -> None:
        for target in set(cls._hooks) - cls._patched:
            *_, owner_name, name = target.split(".")
            root = sys.modules["sglang"]
            owner = getattr(root, owner_name, None) if owner_name[0].isupper() else root
            for kind, hook in cls._hooks[target] if hasattr(owner, name) else ():
                setattr(owner, name, _wrapped(getattr(owner, name), kind, hook))
            cls._patched.add(target)


def _wrapped(
    function: Callable[..., Any], kind: HookType, hook: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kind is HookType.AROUND:
            return hook(function, *args, **kwargs)
        result = function(*args, **kwargs)
        other = hook(result, *args, **kwargs)
        return result if other is None else other

    return call
