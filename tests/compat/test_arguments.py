# SPDX-License-Identifier: Apache-2.0
"""Every argument of other projects' calls, with every value that it must refuse, in their words."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from tests.compat.calls import Mapping
from tests.hostile import (
    AMOUNT,
    ANY_DTYPE,
    COUNT,
    DTYPE,
    FLAG,
    FREE,
    POSITIVE,
    REAL,
    TENSOR,
    THING,
    WHOLE,
    Kind,
    Row,
    listed,
    refuses,
)
from tests.test_arguments import TIMES, inputs, pytestmark, tried
from weft.compat import deep_ep, flashinfer, triton_dist
from weft.compat.flashinfer import allreduce_fusion, create_allreduce_fusion_workspace

__all__ = ["pytestmark"]
MAX, TOP_K, EXPERTS, HIDDEN, TOKENS = 8, 2, 4, 128, 3
BF16 = torch.bfloat16
NONE = listed(7, "x", True, [], torch.zeros(2)).optional()  # refused whatever it is
WANTS_TRUE = listed(False, 1, "yes", None, [], torch.tensor(True)).optional()
WANTS_FALSE = listed(True, 0, "no", None, [], torch.tensor(False)).optional()
NO_TENSOR = listed(7, "x", True, [1.0]).optional()
GROUP = listed("x", 7, True, []).optional()
NAME = listed("cutlass", 7, True, [], torch.zeros(2))


def moe_alltoall(group: weft.Group) -> None:
    kinds: dict[str, Kind] = {
        "mapping": listed(
            *THING.hostile(None), Mapping("0", 2), Mapping(True, 2), Mapping(0, 2.0), Mapping(0, 3)
        ),
        **{"max_num_tokens": COUNT, "top_k": listed(*WHOLE, 0, -1, 33, 5)},
        "num_experts": listed(*WHOLE, 0, -1, 1),
        "workspace_size_per_rank": COUNT.optional(),
        "hidden_size": listed(*WHOLE, 0, -1, 12),
        **{"mnnvl_config": FREE, "eplb_stats_num_experts": AMOUNT},
        **{"enable_rank_mask": FLAG, "backend": NAME, "group": THING.optional()},
        **TIMES,
    }
    given: dict[str, Any] = {
        **{"mapping": Mapping(group.rank, group.size), "max_num_tokens": MAX, "top_k": TOP_K},
        **{"num_experts": EXPERTS, "hidden_size": HIDDEN, "group": group},
    }
    names = {"mapping": "", "hidden_size": "hidden"}
    tried(Row(flashinfer.MoeAlltoAll, given, kinds, names))
    x, ids, weights = inputs(group)
    rows = [x, ids, weights]
    with flashinfer.MoeAlltoAll(**given, eplb_stats_num_experts=2) as a2a:

        def whole() -> torch.Tensor:
            received = a2a.dispatch(ids, rows, MAX)
            return a2a.combine(torch.where(received[0] == 0, 0, 1.0).to(BF16), MAX)

        before = whole()
        call = {
            **{"token_selected_experts": ids, "input_payloads": rows},
            **{"runtime_max_tokens_per_rank": MAX, "invalid_token_expert_id": 9},
            **{"expert_id_payload_index": 1, "eplb_local_stats": torch.ones(2, dtype=torch.int32)},
        }
        wanted = {
            "token_selected_experts": TENSOR,
            "input_payloads": listed("x", 7, x, x.float().numpy(), [x, "a", ids], [], [x[0]]),
            "runtime_max_tokens_per_rank": COUNT,
            "invalid_token_expert_id": listed(*WHOLE, 1 << 31).optional(),
            "expert_id_payload_index": listed(*WHOLE, -1, 3, 0),
            "eplb_local_stats": TENSOR.optional(),
            **{"active_rank_mask": NONE, "enable_pdl": FREE},
        }
        tried(Row(a2a.dispatch, call, wanted, {"expert_id_payload_index": "payload"}))
        a2a.dispatch(ids, rows, MAX)
        asked = {"runtime_max_tokens_per_rank": MAX, "hidden_size": HIDDEN, "dtype": BF16}
        kinds = {
            "runtime_max_tokens_per_rank": listed(*WHOLE, 0, -1, MAX - 1),
            **{"hidden_size": listed(*WHOLE, 0, -1, 64), "dtype": ANY_DTYPE},
        }
        tried(Row(a2a.get_combine_payload_tensor_in_workspace, asked, kinds))
        y = torch.ones((group.size, MAX, HIDDEN), dtype=BF16)
        back = {
            "payload": Kind(lambda g: [v for v in TENSOR.values(g) if not _strided(v)]),
            "runtime_max_tokens_per_rank": kinds["runtime_max_tokens_per_rank"],
            **{"payload_in_workspace": FLAG, "output_dtype": listed("x", 7, torch.int8).optional()},
            **{"output_scales": NONE, "output_scalar_scale": listed("x", 2.0, True, None, [])},
            **{"sf_layout": listed("x", 7, [])},
            "output": TENSOR.optional(),
            **{"use_low_precision": WANTS_FALSE, "active_rank_mask": NONE, "enable_pdl": FREE},
        }
        back["sf_layout"] = back["sf_layout"].optional()
        given = {"payload": y, "runtime_max_tokens_per_rank": MAX, "output": torch.zeros_like(x)}
        tried(Row(a2a.combine, given, back))
        a2a.combine(y, MAX)
        a2a.check()
        assert torch.equal(whole(), before)
        group.barrier()


def _strided(value: Any) -> bool:
    """payload may have strides: it is copied."""
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return dense and not value.is_nested and not value.is_contiguous()


def workspace_sizes(group: weft.Group) -> None:
    asked = {"ep_size": 2, "top_k": 2, "max_num_tokens": 8, "hidden_size": 128}
    kinds = {
        **{"ep_size": listed(*WHOLE, 0, -1, 73), "top_k": listed(*WHOLE, 0, -1, 33)},
        **{"max_num_tokens": COUNT, "hidden_size": COUNT},
        **{"extra_payload_bytes_per_token": AMOUNT, "eplb_stats_num_experts": AMOUNT},
        "backend": NAME,
    }
    tried(Row(flashinfer.MoeAlltoAll.get_moe_workspace_size_per_rank, asked, kinds))
    bytes_ = {
        **{"ep_size": 2, "max_num_tokens": 8, "total_dispatch_payload_size_per_token": 256},
        "combine_payload_size_per_token": 256,
    }
    kinds = {
        **{name: kinds[name] for name in ("ep_size", "max_num_tokens", "backend")},
        **{name: AMOUNT for name in (*bytes_, "eplb_stats_num_experts") if "size_per" in name},
        "eplb_stats_num_experts": AMOUNT,
    }
    tried(Row(flashinfer.moe_a2a_get_workspace_size_per_rank, bytes_, kinds))


def fusion(group: weft.Group) -> None:
    made: dict[str, Any] = {
        **{"world_size": group.size, "rank": group.rank, "max_token_num": MAX},
        **{"hidden_dim": HIDDEN, "dtype": BF16, "group": group},
    }
    kinds: dict[str, Kind] = {
        **{"backend": listed("mnnvl", 7, True, []), "world_size": listed(*WHOLE, 0, -1, 3)},
        **{"rank": listed(*WHOLE, -1, 2), "max_token_num": COUNT, "dtype": DTYPE},
        **{"hidden_dim": listed(*WHOLE, 0, -1, 12), "gpus_per_node": FREE},
        **{"comm_backend": FREE, "force_oneshot_support": FREE},
        "group": GROUP,
        **TIMES,
    }
    names = {"hidden_dim": "hidden", "world_size": ""}
    tried(Row(create_allreduce_fusion_workspace, made, kinds, names))
    x, _, _ = inputs(group)
    gamma, residual = torch.ones(HIDDEN, dtype=BF16), torch.ones_like(x)
    with create_allreduce_fusion_workspace(**made) as workspace:
        sufficient = {
            **{"tp_size": listed(*WHOLE), "num_tokens": listed(*WHOLE)},
            **{"hidden_dim": listed(*WHOLE), "dtype": ANY_DTYPE},
            "use_oneshot": FLAG.optional(),
        }
        asked = {"tp_size": 2, "num_tokens": 3, "hidden_dim": HIDDEN, "dtype": BF16}
        tried(Row(workspace.is_buffer_size_sufficient, asked, sufficient))

        def whole() -> torch.Tensor:
            return allreduce_fusion(x, workspace, 1, residual_in=residual, rms_gamma=gamma)

        before = whole()
        given = {
            **{"input": x, "workspace": workspace, "pattern": 1, "residual_in": residual},
            **{"rms_gamma": gamma, "residual_out": torch.zeros_like(x)},
            "norm_out": torch.zeros_like(x),
        }
        none = TENSOR.optional()
        calls: dict[str, Kind] = {
            **{"input": TENSOR, "workspace": THING, "pattern": listed(*WHOLE, -1, 12)},
            **{"launch_with_pdl": FREE, "trigger_completion_at_end": FREE, "fp32_acc": FREE},
            **{"output": NO_TENSOR, "quant_out": NO_TENSOR, "scale_out": NO_TENSOR},
            **{"residual_out": none, "norm_out": none},
            **{"residual_in": TENSOR, "rms_gamma": TENSOR},
            **{"rms_eps": listed(*REAL.hostile(1.0), -1.0), "scale_factor": FREE},
            **{"layout_code": listed(*WHOLE, -1, 3).optional(), "use_oneshot": FLAG.optional()},
            **{"moe_reduction_device_num_experts": FREE, "moe_reduction_scale_input": FREE},
            "moe_reduction_active_experts_token_input": FREE,
            **{"moe_reduction_token_input": FREE, "expanded_idx_to_permuted_idx": FREE},
            **{"expert_scale_factor": FREE, "shared_expert_output": FREE},
            **{"block_quant_group_size": FREE, "weight_bias": REAL},
            "moe_finalize_backend": NAME,
        }
        tried(Row(allreduce_fusion, given, calls))
        plain = {"input": x, "workspace": workspace, "pattern": 0}
        refuses(Row(allreduce_fusion, {**plain, "output": torch.zeros_like(x)}, {"output": none}))
        static = {**given, "pattern": 4}
        refuses(Row(allreduce_fusion, {**static, "scale_factor": 1.0}, {"scale_factor": FACTOR}))
        grouped = {**given, "pattern": 9, "block_quant_group_size": 128}
        sizes = {"block_quant_group_size": listed(64, "128", True, [128])}
        refuses(Row(allreduce_fusion, grouped, sizes))
        index = torch.zeros((TOKENS, 2), dtype=torch.int32)
        finalised = {**given, "pattern": 7, "expanded_idx_to_permuted_idx": index}
        finalised |= {"expert_scale_factor": torch.ones((TOKENS, 2)), "shared_expert_output": x}
        parts = {
            **{"expanded_idx_to_permuted_idx": TENSOR, "expert_scale_factor": none},
            "shared_expert_output": none,
        }
        refuses(Row(allreduce_fusion, finalised, parts))
        reduced = {
            **{**given, "pattern": 6, "moe_reduction_device_num_experts": 2},
            "moe_reduction_scale_input": torch.ones((2, TOKENS)),
            "moe_reduction_active_experts_token_input": torch.ones((2 * TOKENS, HIDDEN)).to(BF16),
            "moe_reduction_token_input": x,
        }
        held = listed(7, "x", True, [1.0], torch.zeros(3))
        parts = {
            "moe_reduction_device_num_experts": listed(*WHOLE, 0, -1, 3),
            **{name: held for name in reduced if name.startswith("moe_") and "num" not in name},
        }
        words = {"moe_reduction_device_num_experts": "experts"}
        refuses(Row(allreduce_fusion, reduced, parts, words))
        assert torch.equal(whole(), before)
        group.barrier()


FACTOR = listed(*POSITIVE.hostile(1.0))


def workspace_class(group: weft.Group) -> None:
    """The constructor of the workspace by its own name."""
    made = {"tp_rank": group.rank, "tp_size": 2, "max_token_num": MAX, "hidden_dim": HIDDEN}
    places = {"tp_rank": listed(*WHOLE, -1, 2), "tp_size": listed(*WHOLE, 0, -1, 3)}
    of_class: dict[str, Kind] = {
        **{**places, "max_token_num": COUNT, "hidden_dim": listed(*WHOLE, 0, -1, 12)},
        **{"dtype": DTYPE, "comm_backend": FREE},
        **TIMES,
        "group": GROUP,
    }
    names = {"tp_rank": "", "tp_size": "", "hidden_dim": "hidden", "max_token_num": "max_token"}
    tried(Row(flashinfer.TRTLLMAllReduceFusionWorkspace, {**made, "group": group}, of_class, names))


def buffers(group: weft.Group) -> None:
    kinds: dict[str, Kind] = {
        "group": GROUP,
        **{name: FREE for name in UNUSED_BY_BUFFER},
        **{"low_latency_mode": FLAG, "enable_shrink": FLAG},
        **TIMES,
    }
    given: dict[str, Any] = {"group": group, "low_latency_mode": True}
    tried(Row(deep_ep.Buffer, given, kinds, {"group": "group"}))
    hint = {
        **{"num_max_dispatch_tokens_per_rank": COUNT, "hidden": listed(*WHOLE, 0, -1, 100)},
        **{"num_ranks": listed(*WHOLE, 0, -1, 73), "num_experts": COUNT},
    }
    asked = {"num_max_dispatch_tokens_per_rank": 8, "hidden": 128, "num_ranks": 2, "num_experts": 4}
    tried(Row(deep_ep.Buffer.get_low_latency_rdma_size_hint, asked, hint))
    chunks = {name: COUNT for name in CHUNKS}
    chosen = {"num_sms": 20, **dict.fromkeys(CHUNKS, 8)}
    tried(Row(deep_ep.Config, chosen, {"num_sms": AMOUNT, **chunks}))
    sms = listed(*WHOLE, -1, 3)
    refuses(Row(deep_ep.Buffer.set_num_sms, {"new_num_sms": 20}, {"new_num_sms": sms}))
    x, ids, weights = inputs(group)
    buffer = deep_ep.Buffer(**given)
    topk = ids.long()
    call = {
        **{"x": x, "topk_idx": topk, "num_max_dispatch_tokens_per_rank": MAX},
        **{"num_experts": EXPERTS, "use_fp8": False},
    }

    def whole() -> torch.Tensor:
        numbers, _, handle, _, _ = buffer.low_latency_dispatch(**call)
        assert isinstance(numbers, torch.Tensor)
        return buffer.low_latency_combine(numbers.clone(), topk, weights, handle)[0]

    before = whole()
    stats = torch.zeros(2, dtype=torch.int32)
    sent: dict[str, Kind] = {
        **{"x": TENSOR, "topk_idx": TENSOR, "num_max_dispatch_tokens_per_rank": COUNT},
        **{"num_experts": COUNT, "cumulative_local_expert_recv_stats": TENSOR.optional()},
        **{"dispatch_wait_recv_cost_stats": NONE, "use_fp8": FLAG, "round_scale": FLAG},
        **{"use_ue8m0": FLAG, "async_finish": FLAG, "return_recv_hook": FLAG},
    }
    given = {**call, "cumulative_local_expert_recv_stats": stats}
    tried(Row(buffer.low_latency_dispatch, given, sent))
    numbers, _, handle, _, _ = buffer.low_latency_dispatch(**call)
    assert isinstance(numbers, torch.Tensor)
    back = {
        **{"x": numbers.clone(), "topk_idx": topk, "topk_weights": weights, "handle": handle},
        "out": torch.zeros_like(x),
    }
    combined: dict[str, Kind] = {
        **{"x": TENSOR, "topk_idx": TENSOR, "topk_weights": TENSOR.optional(), "handle": THING},
        **{"use_logfmt": WANTS_FALSE, "zero_copy": FLAG, "async_finish": FLAG},
        **{"return_recv_hook": FLAG, "out": TENSOR.optional()},
        "combine_wait_recv_cost_stats": NONE,
    }
    tried(Row(buffer.low_latency_combine, back, combined))
    tried(Row(buffer.get_next_low_latency_combine_buffer, {"handle": handle}, {"handle": THING}))
    buffer.low_latency_combine(**back)
    buffer.check()
    assert torch.equal(whole(), before)
    group.barrier()
    buffer.destroy()


def normal_mode(group: weft.Group) -> None:
    ranks = {"num_ranks": listed(*WHOLE, 0, -1, 33)}
    for chosen in (deep_ep.Buffer.get_dispatch_config, deep_ep.Buffer.get_combine_config):
        tried(Row(chosen, {"num_ranks": 2}, ranks))
    sizes = {"hidden_bytes": 256, "num_ranks": 2}
    config = deep_ep.Config()
    hints: dict[str, Kind] = {"hidden_bytes": COUNT, **ranks}
    tried(Row(config.get_nvl_buffer_size_hint, sizes, hints))
    tried(Row(config.get_rdma_buffer_size_hint, sizes, hints))
    x, ids, weights = inputs(group)
    buffer, topk = deep_ep.Buffer(group), ids.long()
    asked = {"topk_idx": topk, "num_experts": EXPERTS}
    event: dict[str, Kind] = {
        "previous_event": THING.optional(),
        **{"async_finish": FLAG, "allocate_on_comm_stream": FLAG},
    }
    counted: dict[str, Kind] = {"topk_idx": TENSOR, "num_experts": listed(*WHOLE, 0, -1, 3)}
    tried(Row(buffer.get_dispatch_layout, asked, {**counted, **event}))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk, EXPERTS)
    call = {
        **{"x": x, "num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank},
        **{"num_tokens_per_expert": per_expert, "topk_idx": topk, "topk_weights": weights},
    }

    def whole() -> torch.Tensor:
        got, _, _, _, handle, _ = buffer.dispatch(**call)
        assert isinstance(got, torch.Tensor)
        assert handle is not None
        return buffer.combine(got, handle)[0]

    before = whole()
    sent: dict[str, Kind] = {
        **{"x": TENSOR, "handle": THING.optional(), "num_tokens_per_rank": TENSOR},
        **{"num_tokens_per_rdma_rank": FREE, "is_token_in_rank": TENSOR},
        **{"num_tokens_per_expert": TENSOR, "topk_idx": TENSOR.optional()},
        **{"topk_weights": TENSOR.optional(), "expert_alignment": COUNT},
        **{"num_worst_tokens": AMOUNT, "config": THING.optional(), **event},
    }
    tried(Row(buffer.dispatch, call, sent))
    got, _, these, _, handle, _ = buffer.dispatch(**call)
    back = {"x": got, "handle": handle, "topk_weights": these, "bias": x}
    combined: dict[str, Kind] = {
        **{"x": TENSOR, "handle": THING, "topk_weights": TENSOR.optional()},
        **{"bias": TENSOR.optional(), "config": THING.optional(), **event},
    }
    tried(Row(buffer.combine, back, combined))
    buffer.check()
    assert torch.equal(whole(), before)
    group.barrier()
    buffer.destroy()


CHUNKS = tuple(
    f"num_max_{wire}_chunked_{way}_tokens" for wire in ("nvl", "rdma") for way in ("send", "recv")
)
UNUSED_BY_BUFFER = (
    *("num_nvl_bytes", "num_rdma_bytes", "num_qps_per_rank", "allow_nvlink_for_low_latency_mode"),
    *("allow_mnnvl", "use_fabric", "explicitly_destroy", "comm"),
)


def layers(group: weft.Group) -> None:
    made: dict[str, Any] = {
        **{"max_m": MAX, "hidden": HIDDEN, "topk": TOP_K, "online_quant_fp8": True},
        **{"rank": group.rank, "num_experts": EXPERTS, "local_world_size": group.size},
        **{"world_size": group.size, "group": group},
    }
    kinds: dict[str, Kind] = {
        **{"max_m": COUNT, "hidden": listed(*WHOLE, 0, -1, 100), "topk": listed(*WHOLE, 0, -1, 33)},
        **{"online_quant_fp8": WANTS_TRUE, "rank": listed(*WHOLE, -1, 2), "num_experts": COUNT},
        **{"local_world_size": listed(*WHOLE, 0, -1, 3), "world_size": listed(*WHOLE, 0, -1, 3)},
        **{"fp8_gsize": listed(*WHOLE, 0, -1, 16), "dtype": DTYPE, "enable_profiling": FLAG},
        "group": GROUP,
        **TIMES,
    }
    names = {"rank": "rank", "num_experts": "experts"}
    tried(Row(triton_dist.EPLowLatencyAllToAllLayer, made, kinds, names))
    x, ids, weights = inputs(group)
    layer = triton_dist.EPLowLatencyAllToAllLayer(**made)

    def whole() -> torch.Tensor:
        rows, _, _, meta = layer.dispatch(x, None, ids)
        return layer.combine(torch.ones(rows.shape, dtype=BF16), ids, weights, meta)

    before = whole()
    sent = {"send_tokens": TENSOR, "send_scales": NONE, "topk_indices": TENSOR}
    tried(Row(layer.dispatch, {"send_tokens": x, "topk_indices": ids}, sent))
    rows, _, _, meta = layer.dispatch(x, None, ids)
    back = {
        **{"send_tokens": torch.ones(rows.shape, dtype=BF16), "topk_indices": ids},
        **{"topk_weights": weights, "dispatch_meta": meta},
    }
    combined = {
        **{"send_tokens": TENSOR, "topk_indices": TENSOR, "topk_weights": TENSOR.optional()},
        **{"dispatch_meta": THING, "zero_copy": FLAG},
    }
    tried(Row(layer.combine, back, combined))
    layer.combine(**back)
    layer.check()
    assert torch.equal(whole(), before)
    group.barrier()
    layer.finalize()


BODIES = {
    body.__name__: body
    for body in (
        moe_alltoall,
        workspace_sizes,
        fusion,
        workspace_class,
        buffers,
        normal_mode,
        layers,
    )
}


@pytest.mark.parametrize("name", BODIES)
def test_hostile_arguments_are_refused_in_words(ranks, name):
    ranks(1 if name == "workspace_sizes" else 2, "threads")(BODIES[name])
