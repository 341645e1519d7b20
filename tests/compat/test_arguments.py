# SPDX-License-Identifier: Apache-2.0
"""Every argument of the compat calls, with every value that it must refuse."""

from __future__ import annotations

from collections.abc import Callable
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
    assert_refusals,
    kind_of_values,
    public_parameters,
)
from tests.test_arguments import TIMES, inputs, pytestmark, tried
from weft.compat import deep_ep, flashinfer, triton_dist
from weft.compat.flashinfer import allreduce_fusion, create_allreduce_fusion_workspace

__all__ = ["pytestmark"]
MAX, TOP_K, EXPERTS, HIDDEN, TOKENS = 8, 2, 4, 128, 3
BF16 = torch.bfloat16
NONE = kind_of_values(7, "x", True, [], torch.zeros(2)).optional()  # refused whatever it is
WANTS_TRUE = kind_of_values(False, 1, "yes", None, [], torch.tensor(True)).optional()
WANTS_FALSE = kind_of_values(True, 0, "no", None, [], torch.tensor(False)).optional()
NO_TENSOR = kind_of_values(7, "x", True, [1.0]).optional()
GROUP = kind_of_values("x", 7, True, []).optional()
NAME = kind_of_values("cutlass", 7, True, [], torch.zeros(2))
MAYBE = TENSOR.optional()
FACTOR = kind_of_values(*POSITIVE.hostile(1.0))


def whole(*others: int) -> Kind:
    """Return an integer that is not among `others`."""
    return kind_of_values(*WHOLE, *others)


def named(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


# What an argument is wherever it has this name, unless a call says otherwise.
KINDS: dict[str, Kind] = {
    **TIMES,
    **named(COUNT, "max_num_tokens num_experts expert_alignment max_token_num hidden_bytes max_m"),
    **named(COUNT, "runtime_max_tokens_per_rank num_max_dispatch_tokens_per_rank"),
    **named(COUNT, "num_max_nvl_chunked_send_tokens num_max_nvl_chunked_recv_tokens"),
    **named(COUNT, "num_max_rdma_chunked_send_tokens num_max_rdma_chunked_recv_tokens"),
    **named(
        AMOUNT, "eplb_stats_num_experts extra_payload_bytes_per_token num_worst_tokens num_sms"
    ),
    **named(AMOUNT, "total_dispatch_payload_size_per_token combine_payload_size_per_token"),
    **named(FLAG, "enable_rank_mask low_latency_mode enable_shrink use_fp8 round_scale use_ue8m0"),
    **named(FLAG, "async_finish return_recv_hook zero_copy payload_in_workspace enable_profiling"),
    **named(FLAG, "allocate_on_comm_stream"),
    **named(TENSOR, "x topk_idx num_tokens_per_rank is_token_in_rank num_tokens_per_expert input"),
    **named(TENSOR, "token_selected_experts send_tokens topk_indices residual_in rms_gamma"),
    **named(MAYBE, "topk_weights out bias output cumulative_local_expert_recv_stats"),
    **named(MAYBE, "eplb_local_stats residual_out norm_out"),
    **named(THING, "handle dispatch_meta workspace"),
    **named(THING.optional(), "previous_event config"),
    **named(NONE, "active_rank_mask output_scales send_scales"),
    **named(NONE, "dispatch_wait_recv_cost_stats combine_wait_recv_cost_stats"),
    **named(NAME, "backend moe_finalize_backend"),
    **named(NO_TENSOR, "quant_out scale_out"),
    **named(WANTS_FALSE, "use_low_precision use_logfmt"),
    **named(FREE, "mnnvl_config enable_pdl gpus_per_node comm_backend force_oneshot_support"),
    **named(FREE, "num_nvl_bytes num_rdma_bytes num_qps_per_rank use_fabric explicitly_destroy"),
    **named(FREE, "allow_nvlink_for_low_latency_mode allow_mnnvl comm num_tokens_per_rdma_rank"),
    **named(FREE, "launch_with_pdl trigger_completion_at_end fp32_acc scale_factor"),
    **named(FREE, "moe_reduction_device_num_experts moe_reduction_scale_input"),
    **named(FREE, "moe_reduction_active_experts_token_input moe_reduction_token_input"),
    **named(FREE, "expanded_idx_to_permuted_idx expert_scale_factor shared_expert_output"),
    **named(FREE, "block_quant_group_size"),
    **{"group": GROUP, "dtype": DTYPE, "use_oneshot": FLAG.optional(), "weight_bias": REAL},
    **{"online_quant_fp8": WANTS_TRUE, "fp8_gsize": whole(0, -1, 16), "rank": whole(-1, 2)},
    **{"world_size": whole(0, -1, 3), "local_world_size": whole(0, -1, 3)},
    **{"tp_rank": whole(-1, 2), "tp_size": whole(0, -1, 3), "topk": whole(0, -1, 33)},
    **{"hidden_dim": whole(0, -1, 12), "num_ranks": whole(0, -1, 33), "top_k": whole(0, -1, 33)},
    **{"pattern": whole(-1, 12), "layout_code": whole(-1, 3).optional()},
    **{"rms_eps": kind_of_values(*REAL.hostile(1.0), -1.0), "new_num_sms": whole(-1, 3)},
    **{"output_dtype": kind_of_values("x", 7, torch.int8).optional(), "ep_size": whole(0, -1, 73)},
    **{"output_scalar_scale": kind_of_values("x", 2.0, True, None, [])},
    "sf_layout": kind_of_values("x", 7, []).optional(),
}


def refuse_all(
    call: Callable[..., Any], good: dict[str, Any], words: dict[str, str] | None = None, **own: Kind
) -> None:
    """Pass every hostile value to every argument. own: kinds of this call; words: in errors."""
    kinds = {name: own.get(name, KINDS.get(name, FREE)) for name in public_parameters(call)}
    assert set(own) <= set(kinds)
    assert {name for name in kinds if name not in own} <= set(KINDS), call
    tried(Row(call, good, kinds, words or {}))


def moe_alltoall(group: weft.Group) -> None:
    mappings = Mapping("0", 2), Mapping(True, 2), Mapping(0, 2.0), Mapping(0, 3)  # type: ignore[arg-type]
    kwargs: dict[str, Any] = {
        **{"mapping": Mapping(group.rank, group.size), "max_num_tokens": MAX, "top_k": TOP_K},
        **{"num_experts": EXPERTS, "hidden_size": HIDDEN, "group": group},
    }
    refuse_all(
        flashinfer.MoeAlltoAll,
        kwargs,
        {"mapping": "", "hidden_size": "hidden"},
        mapping=kind_of_values(*THING.hostile(None), *mappings),
        top_k=whole(0, -1, 33, 5),
        num_experts=whole(0, -1, 1),
        workspace_size_per_rank=COUNT.optional(),
        hidden_size=whole(0, -1, 12),
        group=THING.optional(),
    )
    x, ids, weights = inputs(group)
    rows = [x, ids, weights]
    with flashinfer.MoeAlltoAll(**kwargs, eplb_stats_num_experts=2) as a2a:

        def round_trip() -> torch.Tensor:
            received = a2a.dispatch(ids, rows, MAX)
            return a2a.combine(torch.where(received[0] == 0, 0, 1.0).to(BF16), MAX)

        before = round_trip()
        refuse_all(
            a2a.dispatch,
            {
                **{"token_selected_experts": ids, "input_payloads": rows},
                **{"runtime_max_tokens_per_rank": MAX, "invalid_token_expert_id": 9},
                **{"expert_id_payload_index": 1, "eplb_local_stats": ids.new_ones(2)},
            },
            {"expert_id_payload_index": "payload"},
            input_payloads=kind_of_values("x", 7, x, x.float().numpy(), [x, "a", ids], [], [x[0]]),
            invalid_token_expert_id=whole(1 << 31).optional(),
            expert_id_payload_index=whole(-1, 3, 0),
        )
        a2a.dispatch(ids, rows, MAX)
        fewer = whole(0, -1, MAX - 1)
        refuse_all(
            a2a.get_combine_payload_tensor_in_workspace,
            {"runtime_max_tokens_per_rank": MAX, "hidden_size": HIDDEN, "dtype": BF16},
            runtime_max_tokens_per_rank=fewer,
            hidden_size=whole(0, -1, 64),
            dtype=ANY_DTYPE,
        )
        y = torch.ones((group.size, MAX, HIDDEN), dtype=BF16)
        refuse_all(
            a2a.combine,
            {"payload": y, "runtime_max_tokens_per_rank": MAX, "output": torch.zeros_like(x)},
            payload=Kind(lambda g: [v for v in TENSOR.values(g) if not _strided(v)]),
            runtime_max_tokens_per_rank=fewer,
        )
        a2a.combine(y, MAX)
        a2a.check()
        assert torch.equal(round_trip(), before)
        group.barrier()


def _strided(value: Any) -> bool:
    """Whether the argument is a payload with strides, which is copied."""
    dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return dense and not value.is_nested and not value.is_contiguous()


def workspace_sizes(group: weft.Group) -> None:
    asked = {"ep_size": 2, "top_k": 2, "max_num_tokens": 8, "hidden_size": 128}
    sizes = flashinfer.MoeAlltoAll.get_moe_workspace_size_per_rank
    refuse_all(sizes, asked, hidden_size=COUNT)
    passed = {"ep_size": 2, "max_num_tokens": 8, "total_dispatch_payload_size_per_token": 256}
    passed["combine_payload_size_per_token"] = 256
    refuse_all(flashinfer.moe_a2a_get_workspace_size_per_rank, passed)


def fusion(group: weft.Group) -> None:
    made: dict[str, Any] = {
        **{"world_size": group.size, "rank": group.rank, "max_token_num": MAX},
        **{"hidden_dim": HIDDEN, "dtype": BF16, "group": group},
    }
    backends = kind_of_values("mnnvl", 7, True, [])
    words = {"hidden_dim": "hidden", "world_size": ""}
    refuse_all(create_allreduce_fusion_workspace, made, words, backend=backends)
    # The constructor of the workspace by its own name.
    own = {"tp_rank": group.rank, "tp_size": 2, "max_token_num": MAX, "hidden_dim": HIDDEN}
    words = {"tp_rank": "", "tp_size": "", "hidden_dim": "hidden", "max_token_num": "max_token"}
    refuse_all(flashinfer.TRTLLMAllReduceFusionWorkspace, {**own, "group": group}, words)
    x, _, _ = inputs(group)
    gamma, residual = torch.ones(HIDDEN, dtype=BF16), torch.ones_like(x)
    with create_allreduce_fusion_workspace(**made) as workspace:
        asked = {"tp_size": 2, "num_tokens": 3, "hidden_dim": HIDDEN, "dtype": BF16}
        numbers = dict.fromkeys(("tp_size", "num_tokens", "hidden_dim"), whole())
        refuse_all(workspace.is_buffer_size_sufficient, asked, dtype=ANY_DTYPE, **numbers)

        def normed() -> torch.Tensor:
            return allreduce_fusion(x, workspace, 1, residual_in=residual, rms_gamma=gamma)

        before = normed()
        passed = {
            **{"input": x, "workspace": workspace, "pattern": 1, "residual_in": residual},
            **{"rms_gamma": gamma, "residual_out": torch.zeros_like(x)},
            "norm_out": torch.zeros_like(x),
        }
        refuse_all(allreduce_fusion, passed, output=NO_TENSOR)

        def parts(more: dict[str, Any], kinds: dict[str, Kind], **words: str) -> None:
            assert_refusals(Row(allreduce_fusion, {**passed, **more}, kinds, words))

        plain = {"input": x, "workspace": workspace, "pattern": 0}
        plain["output"] = torch.zeros_like(x)
        assert_refusals(Row(allreduce_fusion, plain, {"output": MAYBE}))
        parts({"pattern": 4, "scale_factor": 1.0}, {"scale_factor": FACTOR})
        sizes = {"block_quant_group_size": kind_of_values(64, "128", True, [128])}
        parts({"pattern": 9, "block_quant_group_size": 128}, sizes)
        index = torch.zeros((TOKENS, 2), dtype=torch.int32)
        finalised = {"pattern": 7, "expanded_idx_to_permuted_idx": index}
        finalised |= {"expert_scale_factor": torch.ones((TOKENS, 2)), "shared_expert_output": x}
        kinds = {"expanded_idx_to_permuted_idx": TENSOR, "expert_scale_factor": MAYBE}
        parts(finalised, {**kinds, "shared_expert_output": MAYBE})
        rows = torch.ones((2 * TOKENS, HIDDEN)).to(BF16)
        reduced = {
            **{"pattern": 6, "moe_reduction_device_num_experts": 2},
            "moe_reduction_scale_input": torch.ones((2, TOKENS)),
            "moe_reduction_active_experts_token_input": rows,
            "moe_reduction_token_input": x,
        }
        held = kind_of_values(7, "x", True, [1.0], torch.zeros(3))
        kinds = {name: held for name in reduced if name.startswith("moe_")}
        kinds["moe_reduction_device_num_experts"] = whole(0, -1, 3)
        parts(reduced, kinds, moe_reduction_device_num_experts="experts")
        assert torch.equal(normed(), before)
        group.barrier()


def low_latency(group: weft.Group) -> None:
    Buffer = deep_ep.Buffer
    kwargs: dict[str, Any] = {"group": group, "low_latency_mode": True}
    refuse_all(Buffer, kwargs)
    asked = {"num_max_dispatch_tokens_per_rank": 8, "hidden": 128, "num_ranks": 2, "num_experts": 4}
    ranks, hint = whole(0, -1, 73), Buffer.get_low_latency_rdma_size_hint
    refuse_all(hint, asked, hidden=whole(0, -1, 100), num_ranks=ranks)
    refuse_all(deep_ep.Config, {name: 8 for name in public_parameters(deep_ep.Config)})
    refuse_all(Buffer.set_num_sms, {"new_num_sms": 20})
    x, ids, weights = inputs(group)
    buffer, topk = Buffer(**kwargs), ids.long()
    call = {
        **{"x": x, "topk_idx": topk, "num_max_dispatch_tokens_per_rank": MAX},
        **{"num_experts": EXPERTS, "use_fp8": False},
    }

    def dispatched() -> tuple[torch.Tensor, Any]:
        numbers, _, handle, _, _ = buffer.low_latency_dispatch(**call)
        assert isinstance(numbers, torch.Tensor)
        return numbers.clone(), handle

    def round_trip() -> torch.Tensor:
        numbers, handle = dispatched()
        return buffer.low_latency_combine(numbers, topk, weights, handle)[0]

    before = round_trip()
    stats = {"cumulative_local_expert_recv_stats": torch.zeros(2, dtype=torch.int32)}
    refuse_all(buffer.low_latency_dispatch, {**call, **stats})
    numbers, handle = dispatched()
    back = {"x": numbers, "topk_idx": topk, "topk_weights": weights, "handle": handle}
    back["out"] = torch.zeros_like(x)
    refuse_all(buffer.low_latency_combine, back)
    refuse_all(buffer.get_next_low_latency_combine_buffer, {"handle": handle})
    buffer.low_latency_combine(**back)
    buffer.check()
    assert torch.equal(round_trip(), before)
    group.barrier()
    buffer.destroy()


def normal_mode(group: weft.Group) -> None:
    for chosen in (deep_ep.Buffer.get_dispatch_config, deep_ep.Buffer.get_combine_config):
        refuse_all(chosen, {"num_ranks": 2})
    config, sizes = deep_ep.Config(), {"hidden_bytes": 256, "num_ranks": 2}
    refuse_all(config.get_nvl_buffer_size_hint, sizes)
    refuse_all(config.get_rdma_buffer_size_hint, sizes)
    x, ids, weights = inputs(group)
    buffer, topk = deep_ep.Buffer(group), ids.long()
    asked = {"topk_idx": topk, "num_experts": EXPERTS}
    refuse_all(buffer.get_dispatch_layout, asked, num_experts=whole(0, -1, 3))
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(topk, EXPERTS)
    call: dict[str, Any] = {
        **{"x": x, "num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank},
        **{"num_tokens_per_expert": per_expert, "topk_idx": topk, "topk_weights": weights},
    }

    def round_trip() -> torch.Tensor:
        got, _, _, _, handle, _ = buffer.dispatch(**call)
        assert isinstance(got, torch.Tensor)
        assert handle is not None
        return buffer.combine(got, handle)[0]

    before = round_trip()
    refuse_all(buffer.dispatch, call, handle=THING.optional(), topk_idx=MAYBE)
    got, _, received, _, handle, _ = buffer.dispatch(**call)
    refuse_all(buffer.combine, {"x": got, "handle": handle, "topk_weights": received, "bias": x})
    buffer.check()
    assert torch.equal(round_trip(), before)
    group.barrier()
    buffer.destroy()


def layers(group: weft.Group) -> None:
    made: dict[str, Any] = {
        **{"max_m": MAX, "hidden": HIDDEN, "topk": TOP_K, "online_quant_fp8": True},
        **{"rank": group.rank, "num_experts": EXPERTS, "local_world_size": group.size},
        **{"world_size": group.size, "group": group},
    }
    words, hidden = {"num_experts": "experts"}, whole(0, -1, 100)
    refuse_all(triton_dist.EPLowLatencyAllToAllLayer, made, words, hidden=hidden)
    x, ids, weights = inputs(group)
    layer = triton_dist.EPLowLatencyAllToAllLayer(**made)

    def round_trip() -> torch.Tensor:
        rows, _, _, meta = layer.dispatch(x, None, ids)
        return layer.combine(torch.ones(rows.shape, dtype=BF16), ids, weights, meta)

    before = round_trip()
    refuse_all(layer.dispatch, {"send_tokens": x, "topk_indices": ids})
    rows, _, _, meta = layer.dispatch(x, None, ids)
    back = {"send_tokens": torch.ones(rows.shape, dtype=BF16), "topk_indices": ids}
    back |= {"topk_weights": weights, "dispatch_meta": meta}
    refuse_all(layer.combine, back)
    layer.combine(**back)
    layer.check()
    assert torch.equal(round_trip(), before)
    group.barrier()
    layer.finalize()


BODIES = [moe_alltoall, workspace_sizes, fusion, low_latency, normal_mode, layers]


@pytest.mark.parametrize("body", BODIES)
def test_hostile_arguments_are_refused(ranks, body):
    ranks(1 if body is workspace_sizes else 2, "threads")(body)
