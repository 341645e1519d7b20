# SPDX-License-Identifier: Apache-2.0
"""What 0.5.23 has otherwise; the modules themselves are 0.5.17's."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import torch

from sglang.srt import runtime_context, server_args
from sglang.srt.arg_groups import arg_utils, cuda_graph_hook
from sglang.srt.eplb.expert_location_dispatch import ExpertLocationDispatchInfo
from sglang.srt.layers import communicator
from sglang.srt.layers.moe import topk, utils
from sglang.srt.layers.moe.fused_moe_triton import layer
from sglang.srt.model_executor import model_runner
from sglang.srt.models import deepseek_v2, glm4_moe, parts, qwen2_moe
from sglang.srt.runtime_context import STATE
from sglang.srt.utils import common


class ServerArgs:
    """Fields whose annotations have the choices."""

    moe_a2a_backend: Annotated[str, arg_utils.Arg(["none", "deepep", "deepep_v2"])]
    speculative_moe_a2a_backend: Annotated[str, arg_utils.Arg(["none", "deepep"])]
    elastic_ep_backend: Annotated[str | None, arg_utils.Arg(["none", "mooncake", "nixl"])] = None


class Bag(SimpleNamespace):
    @contextmanager
    def override(self, **given: Any) -> Iterator[None]:
        kept = {name: getattr(self, name) for name in given}
        vars(self).update(given)
        yield
        vars(self).update(kept)


def get_exec() -> Any:
    return STATE.exec


def initialize_moe_config() -> None:
    """As 0.5.17's, with the published flags."""
    STATE.backend = utils.MoeA2ABackend(get_exec().moe.moe_a2a_backend)
    if get_exec().overlap.enable_single_batch_overlap:
        raise ValueError("SBO (single batch overlap) is not supported on SM90 GPUs")


def seed(flags: Any) -> None:
    STATE.exec = SimpleNamespace(
        moe=Bag(moe_a2a_backend=flags.moe_a2a_backend, elastic_ep_backend=flags.elastic_ep_backend),
        overlap=Bag(enable_single_batch_overlap=flags.enable_single_batch_overlap),
    )
    STATE.parallel.attn_dp_enabled = STATE.parallel.enable_dp_attention
    STATE.parallel.enable_dp_attention = False
    model_runner.initialize_moe_config()


def require_mlp_tp_gather(*, moe_a2a_backend: Any = None) -> bool:
    return False


def create_moe_dispatcher(moe_runner_config: Any, quant_method: Any) -> Any:
    return older_dispatcher(moe_runner_config)


def shared_mlp(mlp: Any, quant_config: Any, size: int, group: str) -> None:
    """A shared expert, whole where it is replicated."""
    parts.SharedMLP.__init__(mlp, size, *quant_config, 1 if group == "replicated" else None)


def plain_mlp(
    self: Any,
    hidden_size: int,
    intermediate_size: int,
    hidden_act: str,
    quant_config: Any = None,
    reduce_results: bool = True,
    prefix: str = "",
    *,
    parallel_group: str = "tp",
) -> None:
    shared_mlp(self, quant_config, intermediate_size, parallel_group)


def deepseek_mlp(
    self: Any,
    hidden_size: int,
    intermediate_size: int,
    hidden_act: str,
    quant_config: Any = None,
    reduce_results: bool = True,
    prefix: str = "",
    swiglu_limit: float | None = None,
    allow_fused_down: bool | None = None,
    *,
    parallel_group: str = "tp",
) -> None:
    shared_mlp(self, quant_config, intermediate_size, parallel_group)


def deepseek_forward(
    self: Any,
    hidden_states: torch.Tensor,
    forward_batch: Any = None,
    gemm_output_zero_allocator: Any = None,
    input_ids: torch.Tensor | None = None,
    input_ids_global: torch.Tensor | None = None,
    skip_shared_experts: bool = False,
    return_moe_output: bool = False,
    leave_output_sum: bool = False,
) -> torch.Tensor:
    raise AssertionError("the stock forward ran")


def qwen2_forward(
    self: Any, hidden_states: torch.Tensor, forward_batch: Any = None, defer_finalize: bool = False
) -> torch.Tensor:
    raise AssertionError("the stock forward ran")


def init_new(cls: Any, layer_id: int, *, is_draft: bool = False) -> Any:
    return older_init_new(layer_id)


def routing_inputs(self: Any) -> tuple[Any, Any]:
    """Padding and replicas of this forward pass, which the model does not tell."""
    return STATE.real, None if self.is_draft else older_init_new(0)


def forward_cuda(
    self: Any,
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    *,
    num_token_non_padded: torch.Tensor | None = None,
    expert_location_dispatch_info: Any = None,
    dynamic_expert_bias: torch.Tensor | None = None,
    router_logits_partials: torch.Tensor | None = None,
) -> Any:
    """As 0.5.17's, but it looks for padding and replicas itself."""
    assert num_token_non_padded is None
    assert expert_location_dispatch_info is None
    real, replicas = self.routing_inputs()
    return older_topk(
        self,
        hidden_states,
        router_logits,
        num_token_non_padded=real,
        expert_location_dispatch_info=replicas,
    )


older_dispatcher, older_topk = layer.create_moe_dispatcher, topk.TopK.forward_cuda
older_init_new = ExpertLocationDispatchInfo.init_new


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arg_utils.add_cli_args_from_dataclass(parser, ServerArgs)


def become() -> None:
    """Make the modules 0.5.23's, before they are patched."""
    del server_args.MOE_A2A_BACKEND_CHOICES
    server_args.ServerArgs, server_args.add_arguments = ServerArgs, add_arguments
    server_args.resolve_graphs = lambda args: (
        cuda_graph_hook.disable_breakable_cudagraph_if_incompatible(args)
    )
    runtime_context.get_exec = get_exec
    utils.initialize_moe_config = model_runner.initialize_moe_config = initialize_moe_config
    model_runner.seed = seed
    common.require_mlp_tp_gather = require_mlp_tp_gather
    layer.create_moe_dispatcher = create_moe_dispatcher
    layer.dispatcher_of = lambda made: layer.create_moe_dispatcher(
        made.moe_runner_config, quant_method=made.quant_method
    )
    for module in (parts, glm4_moe, deepseek_v2):  # Qwen's block leaves it out
        module.shared_form = lambda: {"parallel_group": "tp"}
    glm4_moe.Glm4MoeMLP.__init__ = qwen2_moe.Qwen2MoeMLP.__init__ = plain_mlp
    qwen2_moe.Qwen2MoeSparseMoeBlock.forward = qwen2_forward
    deepseek_v2.DeepseekV2MLP.__init__ = deepseek_mlp
    deepseek_v2.DeepseekV2MoE.forward = deepseek_forward
    ExpertLocationDispatchInfo.init_new = classmethod(init_new)
    topk.TopK.routing_inputs, topk.TopK.forward_cuda = routing_inputs, forward_cuda
    boundary: Any = ModuleType("sglang.srt.layers.layer_boundary")
    boundary.FUSE_ALLREDUCE_MAX_BATCH_SIZE = communicator.FUSE_ALLREDUCE_MAX_BATCH_SIZE
    boundary.flashinfer_ar_fusion_applies = communicator.apply_flashinfer_allreduce_fusion
    for part in ("", ".residual", ".residual.add_norm"):
        sys.modules[boundary.__name__ + part] = boundary
