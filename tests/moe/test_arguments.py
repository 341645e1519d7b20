# SPDX-License-Identifier: Apache-2.0
"""Every argument of layers, routers, experts and the grouped GEMM, with every hostile value."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import weft
import weft.gemm
from tests.hostile import (
    AMOUNT,
    ANY_DTYPE,
    CALLED,
    COUNT,
    DTYPE,
    FLAG,
    FREE,
    NAN,
    POSITIVE,
    REAL,
    SECONDS,
    TENSOR,
    THING,
    WHOLE,
    WORD,
    Kind,
    Row,
    Stranger,
    listed,
)
from tests.test_arguments import MAP, SMS, pytestmark, tried
from weft import MoEConfig
from weft.gemm import Gated, GatedQuant, GemmPlan, Push, WgmmaPlan
from weft.memory import Group
from weft.moe import (
    Expert,
    ExpertWeights,
    FP8Expert,
    GatedExpert,
    Gating,
    Replicas,
    Routing,
    balance,
    normalize_topk,
    route,
    router_logits,
    weigh,
)
from weft.placement import MAX_EP_SIZE

__all__ = ["pytestmark"]
HIDDEN, EXPERTS, TOKENS, BF16 = 128, 4, 3, torch.bfloat16
RULE = Routing(EXPERTS, 2, score="sigmoid", correction=True)
CONFIG = MoEConfig(HIDDEN, 64, RULE, shared=32)
HOST_DEVICE = listed("somewhere", 7, True, [], torch.zeros(2)).optional()
# Weights are parameters of some model: that they want gradients does not matter when they are kept.
KEPT = Kind(lambda good: [v for v in TENSOR.values(good) if not getattr(v, "requires_grad", False)])
# torch's own layers say what they miss; what weft reads of a tensor is its kind, shape and dtype.
PLAIN = Kind(lambda good: [good.tolist(), good.float().numpy(), "a", True, good.unsqueeze(0)])


def rules() -> list[Row]:
    """Configurations, which hold nothing."""
    routing = {
        "num_experts": listed(*WHOLE, 0, -1, 1 << 17),
        "top_k": listed(*WHOLE, 0, -1, 5),
        "score": WORD,
        "renormalise": FLAG,
        "correction": FLAG,
        "groups": listed(*WHOLE, 0, -1, 3),
        "top_groups": listed(*WHOLE, 0, -1, 3),
        "group_best": listed(*WHOLE, 0, -1, 3),
        "scale": POSITIVE,
        "weigh": WORD,
    }
    columns = listed(*WHOLE, 0, -1)
    config = {
        **{"hidden": columns, "intermediate": columns, "routing": THING, "gating": THING},
        **{"shared": listed(*WHOLE, -1), "biased": FLAG, "dtype": ANY_DTYPE},
    }
    gating = {"alpha": REAL, "offset": REAL, "limit": POSITIVE.optional()}
    gating |= {"beta": POSITIVE, "linear_beta": POSITIVE}
    both = {"beta": 4.0, "linear_beta": 25.0}
    rows = [
        Row(Routing, {"num_experts": 4, "top_k": 2, "groups": 2}, routing),
        Row(MoEConfig, {"hidden": 128, "intermediate": 64, "routing": RULE}, config),
    ]
    return [*rows, *(Row(kind, both, gating) for kind in (Gating, Gated, GatedQuant))]


def sizes() -> list[Row]:
    """Functions of numbers."""
    amount = listed(*WHOLE, -1)
    per_rank: dict[str, Kind] = {
        "max_running_requests": COUNT,
        **{name: amount for name in ("prefill_tokens", "speculative_tokens", "graph_batch_size")},
        **{name: COUNT for name in ("data_parallel", "tensor_parallel", "multiple_of")},
    }
    good = {"max_running_requests": 8, "prefill_tokens": 8}
    placement = weft.Placement.blocks(4, 2)
    blocks = {"num_experts": COUNT, "ep_size": listed(*WHOLE, 0, -1, 4097)}
    mapped = {"expert_map": Kind(MAP.values), "num_experts": COUNT, "ep_size": blocks["ep_size"]}
    run = {"fn": CALLED, "args": Kind(lambda _: [], none=True), "ranks": COUNT}
    run |= {"device": listed("meta", 7, True, [], "gpu", torch.zeros(2)), "timeout": SECONDS}
    return [
        Row(weft.tokens_per_rank, good, per_rank),
        Row(weft.Placement.blocks, {"num_experts": 4, "ep_size": 2}, blocks),
        Row(
            weft.Placement.mapped,
            {"expert_map": [0, 0, 1, 1], "num_experts": 4, "ep_size": 2},
            mapped,
        ),
        Row(placement.experts_of, {"rank": 0}, {"rank": listed(*WHOLE, -1, MAX_EP_SIZE)}),
        Row(placement.table, {"device": torch.device("cpu")}, {"device": THING}),
        Row(launched, {"fn": print, "args": (), "ranks": 1}, run),
        Row(Group.from_torch, {}, {**torch_group(), "timeout": SECONDS}),
        *replicas(),
    ]


def replicas() -> list[Row]:
    """Placements with replicas."""
    amount = [7, "x", b"x", {}, [True], ["1"], [-1.0], [NAN], [[1.0]], [], Stranger()]
    odd = [torch.ones(2, 2), torch.ones(2, dtype=torch.bool), torch.ones(2, device="meta")]
    loads = listed(*amount, *odd, torch.ones(2, dtype=torch.complex64))
    found = balance([3, 1], 2, 2)
    return [
        Row(
            balance,
            {"loads": [3.0, 1.0], "ranks": 2},
            {"loads": loads, "ranks": listed(*WHOLE, 0, -1, 73), "replicas": listed(*WHOLE, -1)},
        ),
        Row(
            Replicas,
            {"logical": (0, 1), "ranks": 2},
            {
                "logical": listed(7, "x", [0.5], [-1], [True], [1 << 16], [], [0, 2], Stranger()),
                "ranks": listed(*WHOLE, 0, -1, 73),
            },
        ),
        Row(found.physical_of, {"expert": 0}, {"expert": listed(*WHOLE, -1, 2)}),
        Row(found.local, {"rank": 0}, {"rank": listed(*WHOLE, -1, 2)}),
        Row(found.imbalance, {"loads": [3.0, 1.0]}, {"loads": loads}),
        Row(found.on, {"living": 1}, {"living": listed(*WHOLE, 0, 4).optional()}),
        Row(
            found.table,
            {"device": torch.device("cpu")},
            {"device": THING, "living": listed(*WHOLE, 0, 4).optional()},
        ),
    ]


def torch_group() -> dict[str, Kind]:
    """A process group that is none; the device is looked at behind it."""
    kind = listed("x", 7, True, []).optional()  # None is torch's world, which is not there
    return {"process_group": kind, "device": HOST_DEVICE}


def launched(fn: Any, args: Any, ranks: Any, device: Any = "cpu", timeout: Any = 600.0) -> Any:
    return weft.launch(fn, *args, ranks=ranks, device=device, timeout=timeout)


def routers() -> list[Row]:
    """Functions of a rank's own tensors."""
    logits = torch.randn((TOKENS, EXPERTS))
    routed = {
        "routing": THING,
        "logits": ROUTED,
        "correction": KEPT,
        "num_tokens": TENSOR.optional(),
    }
    given = {
        **{"routing": RULE, "logits": logits, "correction": torch.zeros(EXPERTS)},
        "num_tokens": torch.ones(1, dtype=torch.int32),
    }
    x, gate = torch.randn((TOKENS, HIDDEN)), torch.randn((EXPERTS, HIDDEN))
    linear = {"x": x, "gate": gate, "bias": torch.zeros(EXPERTS)}
    return [
        Row(route, given, routed),
        Row(
            weigh,
            {"routing": RULE, "logits": logits, "topk_ids": torch.zeros((TOKENS, 2)).int()},
            {"routing": THING, "logits": ROUTED, "topk_ids": TENSOR},
        ),
        Row(
            router_logits,
            linear,
            {"x": PLAIN, "gate": PLAIN, "bias": PLAIN.optional()},
        ),
    ]


def _logits(good: torch.Tensor) -> list[Any]:
    """Gradients flow through a router on CPUs, in any strides."""
    wrong = [v for v in KEPT.values(good) if not _dense(v, good)]
    return [v for v in wrong if not isinstance(v, torch.Tensor) or not v.is_meta]


def _dense(value: Any, good: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return False
    alike = (value.shape, value.dtype, value.layout, value.device)
    return alike == (good.shape, good.dtype, good.layout, good.device)


ROUTED = Kind(_logits)


def experts() -> list[Row]:
    """Weights."""
    whole = Expert.seeded(CONFIG, 1)
    eight = MoEConfig(128, 128, RULE)
    fp8 = FP8Expert.of(Expert.seeded(eight, 1))
    parts = {
        "gate_up": fp8.gate_up[0].clone(),
        "gate_up_scale": fp8.gate_up_scale[0].clone(),
        "down": fp8.down[0].clone(),
        "down_scale": fp8.down_scale[0].clone(),
    }
    numbers = Kind(lambda good: [good.float().tolist(), "a", True, good.float(), good[0]])
    plain = {
        **{"gate_up": whole.gate_up.data, "down": whole.down.data},
        **{"gate_up_bias": torch.zeros(128, dtype=BF16), "down_bias": torch.zeros(128, dtype=BF16)},
    }
    biases = PLAIN.optional()
    mine = ExpertWeights.stack(CONFIG, [whole])
    checked = {"config": CONFIG, "local_experts": 1, "device": torch.device("cpu")}
    return [
        Row(
            Expert,
            plain,
            {
                **{"gate_up": PLAIN, "down": PLAIN, "gating": THING},
                **{"gate_up_bias": biases, "down_bias": biases},
            },
        ),
        Row(
            Expert.seeded,
            {"config": CONFIG, "seed": 1},
            {"config": THING, "seed": listed(*WHOLE), "shared": FLAG},
        ),
        Row(
            ExpertWeights.stack,
            {"config": CONFIG, "experts": [whole]},
            {
                "config": THING,
                "experts": listed(7, "x", whole, [None], ["x"]),
                "device": HOST_DEVICE,
            },
        ),
        Row(
            ExpertWeights.from_safetensors,
            {"folder": "/nowhere", "layer": 3, "experts": [0], "config": CONFIG},
            {
                "folder": listed(7, b"x", True, [], "/nowhere", Stranger()),
                "layer": listed(*WHOLE, -1),
                "experts": listed(7, "x", [EXPERTS], [-1], [0.5], [True], torch.zeros(2)),
                **{"config": THING, "fp8": FLAG, "device": HOST_DEVICE},
                "prefix": listed(7, b"x", True, [], Stranger()).optional(),
            },
        ),
        Row(
            MoEConfig.from_hf,
            {"config": {}},
            {"config": listed(7, b"x", True, [], "/nowhere", Stranger())},
        ),
        Row(
            mine.check,
            checked,
            {"config": THING, "local_experts": listed(*WHOLE, -1), "device": THING, "fp8": FLAG},
        ),
        Row(
            FP8Expert,
            parts,
            {
                **{"gate_up": numbers, "down": numbers, "gating": THING, "dtype": DTYPE},
                **{"gate_up_scale": KEPT, "down_scale": KEPT},
            },
        ),
        Row(
            GatedExpert,
            {"expert": whole, "gate": torch.zeros(1, HIDDEN)},
            {"expert": THING, "gate": PLAIN},
        ),
        Row(FP8Expert.of, {"expert": Expert.seeded(eight, 1)}, {"expert": THING}),
        Row(fp8.forward, {"x": torch.randn((TOKENS, 128)).to(BF16)}, {"x": TENSOR}),
        Row(
            Gating().apply,
            {"gate_up": torch.randn((TOKENS, 8))},
            {
                "gate_up": listed([1.0], "a", True, 7, torch.zeros(2).numpy()),
                "out": listed([1.0], "a", True, 7).optional(),
            },
        ),
    ]


def operands() -> dict[str, Any]:
    """Two experts with four rows each."""
    a, b = torch.randn((8, 128)).to(BF16), torch.randn((2, 128, 128)).to(BF16)
    counts = torch.tensor([4, 4], dtype=torch.int32)
    return {"a": a, "b": b, "counts": counts, "offsets": torch.tensor([0, 4, 8]).int()}


def grouped_gemms() -> list[Row]:
    """Grouped GEMM and its plans."""
    results = {"bias": torch.zeros((2, 128)), "out": torch.zeros((8, 128), dtype=BF16)}
    given = operands() | results
    none = TENSOR.optional()
    scales = listed(torch.ones((8, 1)), [1.0], "a", True).optional()
    arguments = {
        **{"a": TENSOR, "b": TENSOR, "counts": TENSOR, "offsets": TENSOR, "bias": none},
        **{"a_scale": scales, "b_scale": scales, "out": none},
        **{"plan": THING.optional(), "epilogue": THING},
        "num_sms": listed(*WHOLE, 0, -1).optional(),
        **{"programmatic_launch": FLAG, "prefetch_weights": FLAG},
    }
    size = listed(*WHOLE, 0, -1)
    amount = listed(*WHOLE, -1)
    planned = {
        **{"experts": amount, "rows_per_expert": amount, "n": size, "k": size},
        "dtype": listed("bfloat16", 7, True, torch.float64, []),
        "gated": FLAG,
    }
    sized = {"experts": 2, "rows_per_expert": 8, "n": 256, "k": 128, "dtype": BF16}
    tile = {
        "block_m": listed(*WHOLE, 0, 48),
        "block_n": listed(*WHOLE, 0, 64),
        "block_k": listed(*WHOLE, 0, 96),
        "warps": listed(*WHOLE, 0, 5),
        **{name: listed(*WHOLE, 0, -1) for name in ("stages", "ctas_per_sm")},
        **{"swap": FLAG, "flatten": FLAG},
    }
    return [
        Row(weft.gemm.grouped_gemm, given, arguments),
        Row(weft.gemm.plan, sized, planned),
        Row(
            weft.gemm.fastest_plan,
            sized,
            {
                **{**planned, "biased": FLAG, "out": ANY_DTYPE, "flag_in_data": FLAG},
                "device": THING.optional(),
            },
        ),
        Row(GemmPlan, {"block_m": 64}, tile),
        Row(WgmmaPlan, {"block_m": 64}, {"block_m": tile["block_m"]}),
        Row(
            weft.gemm.quantize_rows,
            {"x": torch.randn((4, 128))},
            {"x": TENSOR, "programmatic_launch": FLAG},
        ),
        Row(
            weft.gemm.quantize_mxfp4,
            {"weights": torch.randn((1, 128, 64))},
            {"weights": TENSOR},
        ),
        Row(
            weft.gemm.pack_mxfp4,
            {
                "values": torch.ones((1, 128, 32), dtype=torch.uint8),
                "scales": torch.full((1, 128, 2), 127, dtype=torch.uint8),
            },
            {"values": TENSOR, "scales": TENSOR},
        ),
        Row(
            weft.gemm.unpack_mxfp4,
            {
                "b": torch.ones((1, 2, 1, 4352), dtype=torch.uint8),
                "b_scale": torch.ones((1, 128)),
            },
            {"b": TENSOR, "b_scale": TENSOR},
        ),
        Row(
            pushed,
            {"dst_addr": torch.zeros(8, dtype=torch.int64)},
            {
                "dst_addr": TENSOR,
                "dtype": listed("bfloat16", 7, True, torch.int8, []).optional(),
                "flag_in_data": FLAG,
                "abort_flag": Kind(
                    lambda g: TENSOR.values(torch.zeros(1, dtype=torch.int32)), none=True
                ),
            },
        ),
    ]


def pushed(
    dst_addr: Any, dtype: Any = None, flag_in_data: Any = True, abort_flag: Any = None
) -> Any:
    push = Push(dst_addr, dtype, flag_in_data=flag_in_data, abort_flag=abort_flag)
    return weft.gemm.grouped_gemm(**operands(), epilogue=push)


TABLES: dict[str, Callable[[], list[Row]]] = {
    make.__name__: make for make in (rules, sizes, routers, experts, grouped_gemms)
}


@pytest.mark.parametrize("name", TABLES)
def test_hostile_arguments_of_functions_are_refused_in_words(name):
    for row in TABLES[name]():
        tried(row)


def layers(group: weft.Group, options: dict[str, Any]) -> None:
    experts = [Expert.seeded(CONFIG, seed) for seed in range(EXPERTS)]
    shared = Expert.seeded(CONFIG, 9, shared=True)
    correction = torch.zeros(EXPERTS)

    def mine(local: tuple[int, ...]) -> ExpertWeights:
        return ExpertWeights.stack(CONFIG, [experts[e] for e in local])

    given: dict[str, Any] = {
        **{"group": group, "config": CONFIG, "weights": mine, "max_tokens": 8},
        **{"shared": shared, "correction": correction, **options},
    }
    kinds: dict[str, Kind] = {
        **{"group": THING, "config": THING, "weights": THING, "max_tokens": COUNT},
        **{"shared": CALLED, "correction": KEPT, "mode": WORD, "overlap": WORD},
        **{"gemm": WORD, "max_rows": listed(*WHOLE, 0, -1).optional()},
        **{"expert_map": MAP, "replicas": THING.optional(), "missing": WORD},
        **{"fp8": FLAG},
        **{"quantize": WORD.optional(), "combine_dtype": WORD.optional()},
        **{"timeout": SECONDS},
        **{"first_timeout": SECONDS, "num_sms": SMS, "programmatic_launch": FLAG},
        "profile": FLAG,
    }
    tried(Row(weft.MoE, given, kinds))
    local = ("group", "weights", "shared", "correction")
    sized: dict[str, Kind] = {name: kind for name, kind in kinds.items() if name not in local}
    sized["num_sms"] = listed(*WHOLE, 0, -1).optional()
    sized |= {"ranks": listed(*WHOLE, 0, -1, 73), "device": HOST_DEVICE}
    told = {"config": CONFIG, "ranks": 2, "max_tokens": 8, "device": "cpu", **options}
    tried(Row(weft.MoE.memory_bytes, told, sized))
    place = balance([1.0] * EXPERTS, 2, replicas=2)
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn((TOKENS, HIDDEN), generator=generator).to(BF16)
    logits = torch.randn((TOKENS, EXPERTS), generator=generator)
    with weft.MoE(**given) as layer:
        before = layer(x, logits)
        count, out = torch.ones(1, dtype=torch.int32), torch.zeros_like(x)
        call = {"x": x, "logits": logits, "num_tokens": count, "out": out}
        none = TENSOR.optional()
        rows = listed(*WHOLE, -1, TOKENS - 1).optional()
        taken: dict[str, Kind] = {"x": TENSOR, "num_tokens": none, "out": none, "rows": rows}
        # A routing beside logits is one too many, whatever it is.
        ids, weights = layer.route(logits)
        routings = {
            "topk_ids": Kind(lambda _: TENSOR.values(ids), none=True),
            "topk_weights": Kind(lambda _: TENSOR.values(weights), none=True),
        }
        tried(Row(layer.__call__, call, {**taken, "logits": ROUTED, **routings}))
        chosen = {**call, "logits": None, "topk_ids": ids, "topk_weights": weights}
        routings = {"topk_ids": TENSOR, "topk_weights": TENSOR}
        tried(Row(layer.__call__, chosen, {**taken, "logits": FREE, **routings}))
        forms: dict[str, Kind] = {
            **{**routings, "num_tokens": Kind(lambda _: TENSOR.values(count), none=True)},
            "replicas": Kind(lambda _: TENSOR.values(ids), none=True),
            **{"padding_id": listed(*WHOLE), "skip_zero_weights": FLAG, "rank": AMOUNT},
        }
        tried(Row(normalize_topk, {"topk_ids": ids, "topk_weights": weights}, forms))
        tried(Row(layer.relocate, {"replicas": place}, {"replicas": THING, "weights": FREE}))
        routed = {"logits": logits, "num_tokens": count}
        tried(Row(layer.route, routed, {"logits": ROUTED, "num_tokens": none}))
        tried(Row(layer.experts, {"received": None}, {"received": THING}))
        other = {"weights": mine, "shared": shared, "correction": correction}
        names = ("weights", "shared", "correction", "replicas")
        tried(Row(layer.sibling, other, {name: kinds[name] for name in names}))
        layer.check()
        assert torch.equal(layer(x, logits), before)
        group.barrier()


@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
def test_hostile_arguments_of_layers_are_refused_in_words(ranks, mode):
    options = {"mode": mode, "overlap": "none", "gemm": "torch"}
    ranks(2, "threads")(layers, options)


def test_memory_is_asked_with_the_constructors_defaults():
    made = inspect.signature(weft.MoE).parameters
    asked = dict(inspect.signature(weft.MoE.memory_bytes).parameters)
    for name in ("ranks", "device", "timeout", "first_timeout"):  # tests have timeouts of their own
        del asked[name]
    defaults = {name: each.default for name, each in asked.items()}
    assert defaults == {name: made[name].default for name in asked}
