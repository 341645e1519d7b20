# SPDX-License-Identifier: Apache-2.0
"""Every argument of the compat calls, with every value that it must refuse."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import weft
from tests import hostile
from tests.compat.calls import Mapping
from tests.hostile import COUNT, FLAG, FREE, TENSOR, THING, WHOLE, Kind, Row, kind_of_values
from tests.public import EXPERTS, HIDDEN, MODES, MOST, TOP_K, tokens
from tests.test_arguments import TIMES, pytestmark, tried
from tests.test_defaults import differ
from weft.compat import deep_ep, flashinfer
from weft.compat.flashinfer import allreduce_fusion, create_allreduce_fusion_workspace
from weft.compat.triton_dist import EPLowLatencyAllToAllLayer

__all__ = ["pytestmark"]
BF16 = torch.bfloat16
NONE = kind_of_values(7, "x", True, [], torch.zeros(2)).optional()  # refused whatever it is
WANTS_TRUE = kind_of_values(False, 1, "yes", None, [], torch.tensor(True)).optional()
WANTS_FALSE = kind_of_values(True, 0, "no", None, [], torch.tensor(False)).optional()
NO_TENSOR = kind_of_values(7, "x", True, [1.0]).optional()
MAYBE = TENSOR.optional()


def whole(*others: int) -> Kind:
    """Return an integer that is not among `others`."""
    return kind_of_values(*WHOLE, *others)


# What an argument is wherever it has this name, unless a call says otherwise.
NAMES: list[tuple[Kind, str]] = [
    (COUNT, "max_num_tokens num_experts expert_alignment max_token_num hidden_bytes max_m"),
    (COUNT, "runtime_max_tokens_per_rank num_max_dispatch_tokens_per_rank"),
    (COUNT, "num_max_nvl_chunked_send_tokens num_max_nvl_chunked_recv_tokens"),
    (COUNT, "num_max_rdma_chunked_send_tokens num_max_rdma_chunked_recv_tokens"),
    (hostile.AMOUNT, "eplb_stats_num_experts extra_payload_bytes_per_token num_worst_tokens"),
    (hostile.AMOUNT, "total_dispatch_payload_size_per_token combine_payload_size_per_token"),
    (hostile.AMOUNT, "num_sms"),
    (FLAG, "enable_rank_mask low_latency_mode enable_shrink use_fp8 round_scale use_ue8m0"),
    (FLAG, "async_finish return_recv_hook zero_copy payload_in_workspace enable_profiling"),
    (FLAG, "allocate_on_comm_stream"),
    (TENSOR, "x topk_idx num_tokens_per_rank is_token_in_rank num_tokens_per_expert input"),
    (TENSOR, "token_selected_experts send_tokens topk_indices residual_in rms_gamma"),
    (MAYBE, "topk_weights out bias output cumulative_local_expert_recv_stats"),
    (MAYBE, "eplb_local_stats residual_out norm_out"),
    (THING, "handle dispatch_meta workspace"),
    (THING.optional(), "previous_event config"),
    (NONE, "active_rank_mask output_scales send_scales"),
    (NONE, "dispatch_wait_recv_cost_stats combine_wait_recv_cost_stats"),
    (kind_of_values("cutlass", 7, True, [], torch.zeros(2)), "backend moe_finalize_backend"),
    (NO_TENSOR, "quant_out scale_out"),
    (WANTS_FALSE, "use_low_precision use_logfmt"),
    (FREE, "mnnvl_config enable_pdl gpus_per_node comm_backend force_oneshot_support"),
    (FREE, "num_nvl_bytes num_rdma_bytes num_qps_per_rank use_fabric explicitly_destroy"),
    (FREE, "allow_nvlink_for_low_latency_mode allow_mnnvl comm num_tokens_per_rdma_rank"),
    (FREE, "launch_with_pdl trigger_completion_at_end fp32_acc scale_factor"),
    (FREE, "moe_reduction_device_num_experts moe_reduction_scale_input"),
    (FREE, "moe_reduction_active_experts_token_input moe_reduction_token_input"),
    (FREE, "expanded_idx_to_permuted_idx expert_scale_factor shared_expert_output"),
    (FREE, "block_quant_group_size"),
    (kind_of_values("x", 7, True, []).optional(), "group"),
    (hostile.DTYPE, "dtype"),
    (FLAG.optional(), "use_oneshot"),
    (hostile.REAL, "weight_bias"),
    (kind_of_values(*hostile.REAL.hostile(1.0), -1.0), "rms_eps"),
    (WANTS_TRUE, "online_quant_fp8"),
    (whole(0, -1, 16), "fp8_gsize"),
    (whole(-1, 2), "rank tp_rank"),
    (whole(0, -1, 3), "world_size local_world_size tp_size"),
    (whole(0, -1, 33), "topk top_k num_ranks"),
    (whole(0, -1, 12), "hidden_dim"),
    (whole(0, -1, 73), "ep_size"),
    (whole(-1, 12), "pattern"),
    (whole(-1, 3), "new_num_sms"),
    (whole(-1, 3).optional(), "layout_code"),
    (kind_of_values("x", 7, torch.int8).optional(), "output_dtype"),
    (kind_of_values("x", 2.0, True, None, []), "output_scalar_scale"),
    (kind_of_values("x", 7, []).optional(), "sf_layout"),
]
KINDS = TIMES | {name: kind for kind, names in NAMES for name in names.split()}


def refuse_all(
    call: Callable[..., Any], good: dict[str, Any], words: dict[str, str] | None = None, **own: Kind
) -> None:
    """Pass every hostile value to every argument. own: kinds of this call; words: in errors."""
    kinds = {name: own.get(name, KINDS.get(name, FREE)) for name in hostile.public_parameters(call)}
    assert set(own) <= set(kinds)
    assert {name for name in kinds if name not in own} <= set(KINDS), call
    tried(Row(call, good, kinds, words or {}))


@contextmanager
def unharmed(group: weft.Group, name: str) -> Iterator[Any]:
    """Yield an object of tests/public.py, whose call has the same bits after all refusals."""
    made = MODES[name](group)
    before = made.call()
    yield made.what
    made.what.check()
    assert differ(made.call(), before) == []
    group.barrier()
    made.give_back()


def moe_alltoall(group: weft.Group) -> None:
    mappings = Mapping("0", 2), Mapping(True, 2), Mapping(0, 2.0), Mapping(0, 3)  # type: ignore[arg-type]
    kwargs: dict[str, Any] = {
        **{"mapping": Mapping(group.rank, group.size), "max_num_tokens": MOST, "top_k": TOP_K},
        **{"num_experts": EXPERTS, "hidden_size": HIDDEN, "group": group},
    }
    own = {
        **{"mapping": kind_of_values(*THING.hostile(None), *mappings), "group": THING.optional()},
        **{"top_k": whole(0, -1, 33, 9), "num_experts": whole(0, -1, 1)},
        **{"workspace_size_per_rank": COUNT.optional(), "hidden_size": whole(0, -1, 12)},
    }
    refuse_all(flashinfer.MoeAlltoAll, kwargs, {"mapping": "", "hidden_size": "hidden"}, **own)
    x, ids, weights = tokens(group)
    rows, y = [x, ids.int(), weights], torch.ones((group.size, MOST, HIDDEN), dtype=BF16)
    fewer = whole(0, -1, MOST - 1)
    with unharmed(group, "MoeAlltoAll") as a2a:
        good: dict[str, Any] = {
            **{"token_selected_experts": rows[1], "input_payloads": rows},
            **{"runtime_max_tokens_per_rank": MOST, "invalid_token_expert_id": 9},
            **{"expert_id_payload_index": 1, "eplb_local_stats": rows[1].new_ones(EXPERTS)},
        }
        wrong = kind_of_values("x", 7, x, x.float().numpy(), [x, "a", ids], [], [x[0]])
        own = {"input_payloads": wrong, "invalid_token_expert_id": whole(1 << 31).optional()}
        own |= {"expert_id_payload_index": whole(-1, 3, 0)}
        own |= {"runtime_max_tokens_per_rank": whole(0, -1, len(x) - 1)}
        refuse_all(a2a.dispatch, good, {"expert_id_payload_index": "payload"}, **own)
        a2a.dispatch(rows[1], rows, MOST)
        good = {"runtime_max_tokens_per_rank": MOST, "hidden_size": HIDDEN, "dtype": BF16}
        own = {"hidden_size": whole(0, -1, 64), "dtype": hostile.ANY_DTYPE}
        own |= {"runtime_max_tokens_per_rank": fewer}
        refuse_all(a2a.get_combine_payload_tensor_in_workspace, good, **own)
        good = {"payload": y, "runtime_max_tokens_per_rank": MOST, "output": torch.zeros_like(x)}
        own = {"payload": Kind(lambda g: [v for v in TENSOR.values(g) if not is_strided(v)])}
        refuse_all(a2a.combine, good, **own, runtime_max_tokens_per_rank=fewer)
        a2a.combine(y, MOST)


def is_strided(value: Any) -> bool:
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
        **{"world_size": group.size, "rank": group.rank, "max_token_num": MOST},
        **{"hidden_dim": HIDDEN, "dtype": BF16, "group": group},
    }
    backends = kind_of_values("mnnvl", 7, True, [])
    words = {"hidden_dim": "hidden", "world_size": ""}
    refuse_all(create_allreduce_fusion_workspace, made, words, backend=backends)
    # The constructor of the workspace by its own name.
    own = {"tp_rank": group.rank, "tp_size": 2, "max_token_num": MOST, "hidden_dim": HIDDEN}
    words = {"tp_rank": "", "tp_size": "", "hidden_dim": "hidden", "max_token_num": "max_token"}
    refuse_all(flashinfer.TRTLLMAllReduceFusionWorkspace, {**own, "group": group}, words)
    x, index = torch.ones((3, HIDDEN), dtype=BF16), torch.zeros((3, 2), dtype=torch.int32)
    held, scales = kind_of_values(7, "x", True, [1.0], torch.zeros(3)), torch.ones((3, 2))
    parts: list[tuple[dict[str, Any], dict[str, Kind]]] = [
        (
            {"pattern": 4, "scale_factor": 1.0},
            {"scale_factor": kind_of_values(*hostile.POSITIVE.hostile(1.0))},
        ),
        (
            {"pattern": 9, "block_quant_group_size": 128},
            {"block_quant_group_size": kind_of_values(64, "128", True, [128])},
        ),
        (
            {"pattern": 7, "expanded_idx_to_permuted_idx": index}
            | {"expert_scale_factor": scales, "shared_expert_output": x},
            {"expanded_idx_to_permuted_idx": TENSOR}
            | {"expert_scale_factor": MAYBE, "shared_expert_output": MAYBE},
        ),
        (
            {"pattern": 6, "moe_reduction_device_num_experts": 2}
            | {"moe_reduction_scale_input": torch.ones((2, 3)), "moe_reduction_token_input": x}
            | {"moe_reduction_active_experts_token_input": x.repeat(2, 1)},
            {"moe_reduction_device_num_experts": whole(0, -1, 3)}
            | {"moe_reduction_scale_input": held, "moe_reduction_token_input": held}
            | {"moe_reduction_active_experts_token_input": held},
        ),
    ]
    with unharmed(group, "allreduce_fusion") as workspace:
        asked = {"tp_size": 2, "num_tokens": 3, "hidden_dim": HIDDEN, "dtype": BF16}
        numbers = dict.fromkeys(("tp_size", "num_tokens", "hidden_dim"), whole())
        fits = workspace.is_buffer_size_sufficient
        refuse_all(fits, asked, dtype=hostile.ANY_DTYPE, **numbers)
        passed = {"input": x, "workspace": workspace, "pattern": 1}
        passed |= {"residual_in": x, "rms_gamma": x[0].clone()}
        passed |= {"residual_out": torch.zeros_like(x), "norm_out": torch.zeros_like(x)}
        refuse_all(allreduce_fusion, passed, output=NO_TENSOR)
        plain = {"input": x, "workspace": workspace, "pattern": 0}
        plain["output"] = torch.zeros_like(x)
        hostile.assert_refusals(Row(allreduce_fusion, plain, {"output": MAYBE}))
        words = {"moe_reduction_device_num_experts": "experts"}
        for more, kinds in parts:
            hostile.assert_refusals(Row(allreduce_fusion, {**passed, **more}, kinds, words))


def low_latency(group: weft.Group) -> None:
    Buffer = deep_ep.Buffer
    refuse_all(Buffer, {"group": group, "low_latency_mode": True})
    asked = {"num_max_dispatch_tokens_per_rank": 8, "hidden": 128, "num_ranks": 2, "num_experts": 4}
    ranks, hint = whole(0, -1, 73), Buffer.get_low_latency_rdma_size_hint
    refuse_all(hint, asked, hidden=whole(0, -1, 100), num_ranks=ranks)
    refuse_all(deep_ep.Config, {name: 8 for name in hostile.public_parameters(deep_ep.Config)})
    refuse_all(Buffer.set_num_sms, {"new_num_sms": 20})
    x, ids, weights = tokens(group)
    call = {
        **{"x": x, "topk_idx": ids, "num_max_dispatch_tokens_per_rank": MOST},
        **{"num_experts": EXPERTS, "use_fp8": False},
    }
    stats = {"cumulative_local_expert_recv_stats": torch.zeros(EXPERTS // 2, dtype=torch.int32)}
    with unharmed(group, "Buffer") as buffer:
        refuse_all(buffer.low_latency_dispatch, {**call, **stats})
        rows, _, handle, _, _ = buffer.low_latency_dispatch(**call)
        back = {"x": rows.clone(), "topk_idx": ids, "topk_weights": weights, "handle": handle}
        back["out"] = torch.zeros_like(x)
        refuse_all(buffer.low_latency_combine, back)
        refuse_all(buffer.get_next_low_latency_combine_buffer, {"handle": handle})
        buffer.low_latency_combine(**back)


def normal_mode(group: weft.Group) -> None:
    for chosen in (deep_ep.Buffer.get_dispatch_config, deep_ep.Buffer.get_combine_config):
        refuse_all(chosen, {"num_ranks": 2})
    config, sizes = deep_ep.Config(), {"hidden_bytes": 256, "num_ranks": 2}
    refuse_all(config.get_nvl_buffer_size_hint, sizes)
    refuse_all(config.get_rdma_buffer_size_hint, sizes)
    x, ids, weights = tokens(group)
    with unharmed(group, "Buffer normal") as buffer:
        asked = {"topk_idx": ids, "num_experts": EXPERTS}
        refuse_all(buffer.get_dispatch_layout, asked, num_experts=whole(0, -1, 3))
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
        call: dict[str, Any] = {
            **{"x": x, "num_tokens_per_rank": per_rank, "is_token_in_rank": in_rank},
            **{"num_tokens_per_expert": per_expert, "topk_idx": ids, "topk_weights": weights},
        }
        refuse_all(buffer.dispatch, call, handle=THING.optional(), topk_idx=MAYBE)
        got, _, received, _, handle, _ = buffer.dispatch(**call)
        back = {"x": got, "handle": handle, "topk_weights": received, "bias": x}
        refuse_all(buffer.combine, back)


def layers(group: weft.Group) -> None:
    made: dict[str, Any] = {
        **{"max_m": MOST, "hidden": HIDDEN, "topk": TOP_K, "online_quant_fp8": True},
        **{"rank": group.rank, "num_experts": EXPERTS, "local_world_size": group.size},
        **{"world_size": group.size, "group": group},
    }
    words, hidden = {"num_experts": "experts"}, whole(0, -1, 100)
    refuse_all(EPLowLatencyAllToAllLayer, made, words, hidden=hidden)
    x, ids, weights = tokens(group)
    with unharmed(group, "EPLowLatencyAllToAllLayer") as layer:
        refuse_all(layer.dispatch, {"send_tokens": x, "topk_indices": ids})
        rows, _, _, meta = layer.dispatch(x, None, ids)
        back = {"send_tokens": torch.ones(rows.shape, dtype=BF16), "topk_indices": ids}
        back |= {"topk_weights": weights, "dispatch_meta": meta}
        refuse_all(layer.combine, back)
        layer.combine(**back)


BODIES = [moe_alltoall, workspace_sizes, fusion, low_latency, normal_mode, layers]


@pytest.mark.parametrize("body", BODIES)
def test_hostile_arguments_are_refused(ranks, body):
    ranks(1 if body is workspace_sizes else 2, "threads")(body)
