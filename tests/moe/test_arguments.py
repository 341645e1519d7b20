# SPDX-License-Identifier: Apache-2.0
"""Every argument of layers, routers, experts and the grouped GEMM, with every hostile value."""

from __future__ import annotations  # the wrappers below are checked by their annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
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
    kind_of_values,
    public_parameters,
)
from tests.moe.layers import CONFIGS
from tests.test_arguments import MAP, SMS, pytestmark, tried
from weft import MoEConfig
from weft.errors import InvalidArgument
from weft.gemm import Gated, GatedQuant, GemmPlan, Push, Store, StoreQuant, WgmmaPlan
from weft.group import Group
from weft.moe import (
    MODELS,
    Expert,
    ExpertWeights,
    FP8Expert,
    GatedExpert,
    Gating,
    Replicas,
    Routing,
    Ungated,
    balance,
    compute_topk_weights,
    normalize_topk,
    route,
    router_logits,
)
from weft.moe.experts.quantize import quantize_blocks
from weft.placement import MAX_EP_SIZE

__all__ = ["pytestmark"]
HIDDEN, EXPERTS, TOKENS, BF16 = 128, 4, 3, torch.bfloat16
RULE = Routing(EXPERTS, 2, score="sigmoid", correction=True)
CONFIG = MoEConfig(HIDDEN, 64, RULE, shared=32)
CPU = {"device": torch.device("cpu")}
# Weights are parameters of some model: that they want gradients does not matter when they are kept.
KEPT = Kind(lambda good: [v for v in TENSOR.values(good) if not getattr(v, "requires_grad", False)])
# torch's own layers say what they miss; what weft reads of a tensor is its kind, shape and dtype.
PLAIN = Kind(lambda good: [good.tolist(), good.float().numpy(), "a", True, good.unsqueeze(0)])
# The kind of a parameter by its annotation, where a row names no other.
BY_ANNOTATION = {
    **{"bool": FLAG, "int": COUNT, "float": POSITIVE, "str": WORD, "Score": WORD, "Weigh": WORD},
    **{"torch.Tensor": TENSOR, "torch.dtype": ANY_DTYPE, "Out": TENSOR.optional()},
    "torch.device | str": kind_of_values("somewhere", 7, True, [], torch.zeros(2)).optional(),
}


def kinds_of(call: Callable[..., Any], **special: Kind) -> dict[str, Kind]:
    """Return the kind of each public parameter: `special`, else by annotation, else an object."""
    parameters, kinds = inspect.signature(call).parameters, {}
    for name in public_parameters(call):
        annotation = str(parameters[name].annotation)
        kind = BY_ANNOTATION.get(annotation.removesuffix(" | None"), THING)
        kinds[name] = special.get(name, kind.optional() if " | None" in annotation else kind)
    assert special.keys() <= kinds.keys(), call
    return kinds


def row(call: Callable[..., Any], good: Mapping[str, Any], **special: Kind) -> Row:
    return Row(call, good, kinds_of(call, **special))


def from_1(*more: Any) -> Kind:
    """Return the kind of integers from 1, plus `more` hostile values."""
    return kind_of_values(*WHOLE, 0, -1, *more)


def from_0(*more: Any) -> Kind:
    """Return the kind of integers from 0, plus `more` hostile values."""
    return kind_of_values(*WHOLE, -1, *more)


def configs() -> list[Row]:
    both = {"beta": 4.0, "linear_beta": 25.0}
    routing = {"num_experts": 4, "top_k": 2, "groups": 2}
    few = {name: from_1(3) for name in ("groups", "top_groups", "group_best")}
    hf = kind_of_values(7, b"x", True, [], "/nowhere", Stranger())
    return [
        row(Routing, routing, num_experts=from_1(1 << 17), top_k=from_1(5), **few),
        row(MoEConfig, {"hidden": 128, "intermediate": 64, "routing": RULE}, shared=AMOUNT),
        row(MoEConfig.from_hf, {"config": {}}, config=hf),
        *(
            row(kind, both, alpha=REAL, offset=REAL, beta=POSITIVE, linear_beta=POSITIVE)
            for kind in (Gating, Gated, GatedQuant)
        ),
        *(row(kind, {"activation": "relu2"}) for kind in (Ungated, Store, StoreQuant)),
    ]


def launched(fn: object, args: Any, ranks: int, device: Any = "cpu", timeout: float = 600.0) -> Any:
    return weft.launch(fn, *args, ranks=ranks, device=device, timeout=timeout)  # type: ignore[arg-type]


def sizes() -> list[Row]:
    placement, ranks = weft.Placement.blocks(4, 2), from_1(73)
    few = {"max_running_requests": 8, "prefill_tokens": 8}
    torch_group = kind_of_values("x", 7, True, []).optional()
    amounts = ("prefill_tokens", "speculative_tokens", "graph_batch_size")
    device = kind_of_values("meta", 7, True, [], "gpu", torch.zeros(2))
    run = {"fn": CALLED, "args": FREE, "device": device, "timeout": SECONDS}
    odd = [7, "x", b"x", {}, [True], ["1"], [-1.0], [NAN], [[1.0]], [], Stranger()]
    odd += [torch.ones(2, 2), torch.ones(2, dtype=torch.bool), torch.ones(2, device="meta")]
    loads = kind_of_values(*odd, torch.ones(2, dtype=torch.complex64))
    logical = kind_of_values(7, "x", [0.5], [-1], [True], [1 << 16], [], [0, 2], Stranger())
    placed, living = balance([3, 1], 2, 2), from_1(4).optional()
    return [
        row(weft.tokens_per_rank, few, **dict.fromkeys(amounts, AMOUNT)),
        row(weft.Placement.blocks, {"num_experts": 4, "ep_size": 2}, ep_size=from_1(4097)),
        row(
            weft.Placement.mapped,
            {"expert_map": [0, 0, 1, 1], "num_experts": 4, "ep_size": 2},
            **{"expert_map": Kind(MAP.values), "ep_size": from_1(4097)},
        ),
        row(placement.experts_of, {"rank": 0}, rank=from_0(MAX_EP_SIZE)),
        row(placement.table, CPU),
        row(launched, {"fn": print, "args": (), "ranks": 1}, **run),
        # None is torch's world, which does not exist; the device is checked afterwards.
        row(Group.from_torch, {}, process_group=torch_group, timeout=SECONDS),
        row(balance, {"loads": [3.0, 1.0], "ranks": 2}, loads=loads, ranks=ranks, replicas=AMOUNT),
        row(Replicas, {"logical": (0, 1), "ranks": 2}, logical=logical, ranks=ranks),
        row(placed.logical_experts, {"rank": 0}, rank=from_0(2)),
        row(placed.imbalance, {"loads": [3.0, 1.0]}, loads=loads),
        row(placed.physical_on, {"living": 1}, living=living),
        row(placed.table, CPU, living=living),
    ]


def _logits(good: torch.Tensor) -> list[Any]:
    """Gradients flow through a router on CPUs, in any strides."""
    wrong = [v for v in KEPT.values(good) if not _dense(v, good)]
    return [v for v in wrong if not isinstance(v, torch.Tensor) or not v.is_meta]


def _dense(value: Any, good: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_nested:
        return False
    same = (value.shape, value.dtype, value.layout, value.device)
    return same == (good.shape, good.dtype, good.layout, good.device)


LOGITS = Kind(_logits)


def routers() -> list[Row]:
    logits, count = torch.randn((TOKENS, EXPERTS)), torch.ones(1, dtype=torch.int32)
    good = {"routing": RULE, "logits": logits}
    whole = {**good, "correction": torch.zeros(EXPERTS), "num_tokens": count}
    ids = torch.zeros((TOKENS, 2)).int()
    linear = {"x": torch.randn((TOKENS, HIDDEN)), "gate": torch.randn((EXPERTS, HIDDEN))}
    linear["bias"] = torch.zeros(EXPERTS)
    return [
        row(route, whole, logits=LOGITS, correction=KEPT),
        row(compute_topk_weights, {**good, "topk_ids": ids}, logits=LOGITS),
        row(router_logits, linear, x=PLAIN, gate=PLAIN, bias=PLAIN.optional()),
    ]


def experts() -> list[Row]:
    whole, eight = Expert.seeded(CONFIG, 1), MoEConfig(128, 128, RULE)
    fp8 = FP8Expert.from_expert(Expert.seeded(eight, 1))
    names = ("gate_up", "gate_up_scale", "down", "down_scale")
    parts = {name: getattr(fp8, name)[0].clone() for name in names}
    numbers = Kind(lambda good: [good.float().tolist(), "a", True, good.float(), good[0]])
    scales, stacked = dict.fromkeys(names[1::2], KEPT), ExpertWeights.stack(CONFIG, [whole])
    biases = {name: torch.zeros(128, dtype=BF16) for name in ("gate_up_bias", "down_bias")}
    plain = {"gate_up": whole.gate_up.data, "down": whole.down.data, **biases}
    folder = {"folder": "/nowhere", "layer": 3, "experts": [0], "config": CONFIG}
    text = kind_of_values(7, b"x", True, [], Stranger()).optional()
    read = {"folder": kind_of_values(7, b"x", True, [], "/nowhere", Stranger()), "prefix": text}
    local = kind_of_values(7, "x", [EXPERTS], [-1], [0.5], [True], torch.zeros(2))
    return [
        row(Expert, plain, gate_up=PLAIN, down=PLAIN, **dict.fromkeys(biases, PLAIN.optional())),
        row(Expert.seeded, {"config": CONFIG, "seed": 1}, seed=kind_of_values(*WHOLE)),
        row(
            ExpertWeights.stack,
            {"config": CONFIG, "experts": [whole]},
            experts=kind_of_values(7, "x", whole, [None], ["x"]),
        ),
        row(ExpertWeights.from_safetensors, folder, layer=AMOUNT, experts=local, **read),
        row(stacked.check, {"config": CONFIG, "local_experts": 1, **CPU}, local_experts=AMOUNT),
        row(FP8Expert, parts, gate_up=numbers, down=numbers, dtype=DTYPE, **scales),
        row(GatedExpert, {"expert": whole, "gate": torch.zeros(1, HIDDEN)}, gate=PLAIN),
        row(FP8Expert.from_expert, {"expert": Expert.seeded(eight, 1)}),
        row(fp8.forward, {"x": torch.randn((TOKENS, 128)).to(BF16)}),
        row(
            Gating().apply,
            {"gate_up": torch.randn((TOKENS, 8))},
            gate_up=kind_of_values([1.0], "a", True, 7, torch.zeros(2).numpy()),
            out=kind_of_values([1.0], "a", True, 7).optional(),
        ),
        row(
            Ungated().apply,
            {"up": torch.randn((TOKENS, 8))},
            up=kind_of_values([1.0], "a", True, 7, torch.zeros(2).numpy()),
            out=kind_of_values([1.0], "a", True, 7).optional(),
        ),
    ]


def operands() -> dict[str, Any]:
    a, b = torch.randn((8, 128)).to(BF16), torch.randn((2, 128, 128)).to(BF16)
    counts = torch.tensor([4, 4], dtype=torch.int32)
    return {"a": a, "b": b, "counts": counts, "offsets": torch.tensor([0, 4, 8]).int()}


def pushed(
    dst_addr: torch.Tensor,
    dtype: torch.dtype | None = None,
    flag_in_data: bool = True,
    abort_flag: torch.Tensor | None = None,
) -> Any:
    push = Push(dst_addr, dtype, flag_in_data=flag_in_data, abort_flag=abort_flag)
    return weft.gemm.grouped_gemm(**operands(), epilogue=push)


def grouped_gemms() -> list[Row]:
    results = {"bias": torch.zeros((2, 128)), "out": torch.zeros((8, 128), dtype=BF16)}
    scale = kind_of_values(torch.ones((8, 1)), [1.0], "a", True).optional()
    scales = {"a_scale": scale, "b_scale": scale}
    sized = {"experts": 2, "rows_per_expert": 8, "n": 256, "k": 128, "dtype": BF16}
    planned = {"experts": AMOUNT, "rows_per_expert": AMOUNT}
    planned["dtype"] = kind_of_values("bfloat16", 7, True, torch.float32, torch.float64, [])
    tile = {"block_m": kind_of_values(*WHOLE, 0, 48), "block_n": kind_of_values(*WHOLE, 0, 64)}
    tile |= {"block_k": kind_of_values(*WHOLE, 0, 96), "warps": kind_of_values(*WHOLE, 0, 5)}
    flag = torch.zeros(1, dtype=torch.int32)
    four_bits = {
        "values": torch.ones((1, 128, 32), dtype=torch.uint8),
        "scales": torch.full((1, 128, 2), 127, dtype=torch.uint8),
    }
    packed = {"b": torch.ones((1, 2, 1, 4352), dtype=torch.uint8), "b_scale": torch.ones((1, 128))}
    return [
        row(weft.gemm.grouped_gemm, operands() | results, offsets=TENSOR, **scales),
        row(weft.gemm.plan, sized, **planned),
        row(weft.gemm.fastest_plan, sized, **planned),
        row(GemmPlan, {"block_m": 64}, **tile),
        row(WgmmaPlan, {"block_m": 64}, block_m=tile["block_m"]),
        row(weft.gemm.quantize_rows, {"x": torch.randn((4, 128))}),
        row(weft.gemm.quantize_mxfp4, {"weights": torch.randn((1, 128, 64))}),
        row(weft.gemm.pack_mxfp4, four_bits),
        row(weft.gemm.unpack_mxfp4, packed),
        row(
            pushed,
            {"dst_addr": torch.zeros(8, dtype=torch.int64)},
            dtype=kind_of_values("bfloat16", 7, True, torch.int8, []).optional(),
            abort_flag=Kind(lambda _: TENSOR.values(flag), none=True),
        ),
    ]


TABLES: dict[str, Callable[[], list[Row]]] = {
    make.__name__: make for make in (configs, sizes, routers, experts, grouped_gemms)
}


@pytest.mark.parametrize("name", TABLES)
def test_hostile_arguments_of_functions_are_refused(name):
    for each in TABLES[name]():
        tried(each)


def layers(group: weft.Group, options: dict[str, Any]) -> None:
    shared, correction = Expert.seeded(CONFIG, 9, shared=True), torch.zeros(EXPERTS)

    def stack_local(local: tuple[int, ...]) -> ExpertWeights:
        return ExpertWeights.stack(CONFIG, [Expert.seeded(CONFIG, e) for e in local])

    good: dict[str, Any] = {
        **{"group": group, "config": CONFIG, "weights": stack_local, "max_tokens": 8},
        **{"shared": shared, "correction": correction, **options},
    }
    kinds = kinds_of(
        weft.MoE,
        **{"shared": CALLED, "correction": KEPT, "expert_map": MAP, "num_sms": SMS},
        **{"timeout": SECONDS, "first_timeout": SECONDS},
    )
    tried(Row(weft.MoE, good, kinds))
    local = ("group", "weights", "shared", "correction")
    sized: dict[str, Kind] = {name: kind for name, kind in kinds.items() if name not in local}
    sized["num_sms"] = from_1().optional()
    sized |= {"ranks": from_1(73), "device": BY_ANNOTATION["torch.device | str"]}
    planned = {"config": CONFIG, "ranks": 2, "max_tokens": 8, "device": "cpu", **options}
    tried(Row(weft.MoE.memory_bytes, planned, sized))
    generator = torch.Generator().manual_seed(group.rank)
    x = torch.randn((TOKENS, HIDDEN), generator=generator).to(BF16)
    logits = torch.randn((TOKENS, EXPERTS), generator=generator)
    count, out = torch.ones(1, dtype=torch.int32), torch.zeros_like(x)
    with weft.MoE(**good) as layer:
        before = layer(x, logits)
        ids, weights = layer.route(logits)
        call = {"x": x, "logits": logits, "num_tokens": count, "out": out}
        # A routing beside logits is one too many, whatever it is.
        beside = {
            "topk_ids": Kind(lambda _: TENSOR.values(ids), none=True),
            "topk_weights": Kind(lambda _: TENSOR.values(weights), none=True),
        }
        rows = from_0(TOKENS - 1).optional()
        tried(row(layer.__call__, call, logits=LOGITS, rows=rows, **beside))
        chosen = {**call, "logits": None, "topk_ids": ids, "topk_weights": weights}
        routed = {"topk_ids": TENSOR, "topk_weights": TENSOR}
        tried(row(layer.__call__, chosen, logits=FREE, rows=rows, **routed))
        tried(
            row(
                normalize_topk,
                {"topk_ids": ids, "topk_weights": weights},
                num_tokens=Kind(lambda _: TENSOR.values(count), none=True),
                replicas=Kind(lambda _: TENSOR.values(ids), none=True),
                **{"padding_id": kind_of_values(*WHOLE), "rank": AMOUNT},
            )
        )
        place = balance([1.0] * EXPERTS, 2, replicas=2)
        tried(row(layer.relocate, {"replicas": place}, weights=FREE))
        tried(row(layer.route, {"logits": logits, "num_tokens": count}, logits=LOGITS))
        tried(row(layer.experts, {"received": None}))
        parts = {"weights": stack_local, "shared": shared, "correction": correction}
        tried(row(layer.sibling, parts, shared=CALLED, correction=KEPT))
        layer.check()
        assert torch.equal(layer(x, logits), before)
        group.barrier()


@pytest.mark.parametrize("mode", ["throughput", "low_latency"])
def test_hostile_arguments_of_layers_are_refused(ranks, mode):
    options = {"mode": mode, "overlap": "none", "gemm": "torch"}
    ranks(2, "threads")(layers, options)


def test_memory_bytes_has_the_constructors_defaults():
    constructor = inspect.signature(weft.MoE).parameters
    memory = dict(inspect.signature(weft.MoE.memory_bytes).parameters)
    for name in ("ranks", "device", "timeout", "first_timeout"):  # tests have timeouts of their own
        del memory[name]
    defaults = {name: each.default for name, each in memory.items()}
    assert defaults == {name: constructor[name].default for name in memory}


# Beside hostile values: arguments that do not fit each other.
GPT, SOFTMAX = CONFIGS["gpt-oss"], CONFIGS["softmax"]
LARGE, SMALL = Expert.seeded(SOFTMAX, 0), Expert(torch.ones(32, 128), torch.ones(128, 16))
STACKED = ExpertWeights.stack(GPT, [Expert.seeded(GPT, seed) for seed in range(3)])
UNBIASED = replace(STACKED, gate_up_bias=None)
Q, SCALE = quantize_blocks(torch.ones(1, 256, 128))
EIGHT, CORRECTED = Routing(8, 2), Routing(8, 2, score="sigmoid", correction=True)
SCORES, BIAS = torch.zeros(3, 8), torch.zeros(8)
CHOSEN: dict[str, Any] = {"score": "softmax-chosen"}
LIMITED = r"top_k is 3; it must be in 1\.\.2, the experts of 1 of 4"
UNASKED = "correction is None, but this routing has correction=True"
UNEVEN = "3 physical experts for 2 ranks, which hold equally many; use 1"
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: MODELS["GLM"], "did you mean 'glm-4.5-air'"),
    (lambda: ExpertWeights.stack(GPT, [LARGE]), "expert 0 has gate_up_bias None"),
    (
        lambda: Expert(LARGE.gate_up, LARGE.down[:, :16]),
        r"down \[128, 16\]; they must",
    ),
    (
        lambda: ExpertWeights.stack(SOFTMAX, [LARGE, SMALL]),
        r"expert 1 has gate_up \[32, 128\]",
    ),
    (lambda: UNBIASED.check(GPT, 3, torch.device("cpu")), "gate_up_bias is a NoneType"),
    (lambda: FP8Expert.from_expert(Expert.seeded(GPT, 0)), "has biases"),
    (lambda: FP8Expert.from_expert(SMALL), "blocks are 128 x 128"),
    (lambda: FP8Expert(Q[0], SCALE[0, :1], Q[0, :128], SCALE[0, :1]), "gate_up_scale has shape"),
    (lambda: Routing(8, 2, groups=3), "groups is 3 for 8 experts"),
    (lambda: Routing(8, 2, groups=2, top_groups=3), r"top_groups is 3; .* in 1\.\.2"),
    (lambda: Routing(8, 3, groups=4), LIMITED),
    (lambda: Routing(8, 2, groups=8, top_groups=8), "a group has 1 expert"),
    (lambda: Routing(8, 2, correction=True, **CHOSEN), "without correction and groups"),
    (lambda: Routing(8, 2, groups=2, top_groups=2, **CHOSEN), "groups 2"),
    (lambda: Routing(8, 2, weigh="input"), "weigh 'input' with top_k 2"),
    (lambda: route(CORRECTED, SCORES), UNASKED),
    (lambda: route(EIGHT, SCORES, correction=BIAS), "correction=False: leave it out"),
    (lambda: route(CORRECTED, SCORES, correction=BIAS[1:]), "correction has shape"),
    (
        lambda: compute_topk_weights(EIGHT, SCORES, torch.zeros(3, 1).int()),
        r"ids has shape \[3",
    ),
    (lambda: balance([1, 2, 3], 2, 0), UNEVEN),
    (lambda: balance([1, 2], 2, 4), "replicas is 4 for 2 experts on 2 ranks; with 2 each rank has"),
    (lambda: balance([1e308] * 4, 2, 0), "loads add up to inf"),
]


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_arguments_that_do_not_fit_are_refused(call, words):
    with pytest.raises(InvalidArgument, match=words):
        call()
