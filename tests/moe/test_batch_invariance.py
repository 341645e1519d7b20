# SPDX-License-Identifier: Apache-2.0
"""With batch_invariant, a token's bits are those of the token alone, however it is computed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch

import weft
from tests.moe.layers import Case
from tests.moe.test_layer import settle
from tests.ranks import on_ranks
from tests.rounds import bits
from weft.errors import GeometryMismatch, InvalidArgument
from weft.gemm import Gated, GatedQuant, grouped_gemm
from weft.moe import (
    CLAMPED_SWIGLU,
    Expert,
    ExpertWeights,
    FP8Expert,
    MoEConfig,
    Routing,
    balance,
    route,
)
from weft.moe.layer.config import LayerOptions, build_plans

EXPERTS = 16  # of up to as many ranks
GPT_OSS = MoEConfig(
    256, 40, Routing(EXPERTS, 5, score="softmax-chosen"), gating=CLAMPED_SWIGLU, biased=True
)
GPT_OSS_FP8 = replace(GPT_OSS, intermediate=128)
DEEPSEEK = MoEConfig(
    256,
    128,
    Routing(EXPERTS, 5, score="sigmoid", correction=True, groups=4, top_groups=2, scale=2.5),
    shared=128,
)


@dataclass(frozen=True)
class Layer:
    """A layer whose results for each token alone are known."""

    config: MoEConfig
    fp8: bool = False
    mxfp4: bool = False

    def case(self) -> Case:
        return Case(self.config, (), mxfp4=self.mxfp4)

    @functools.cache  # noqa: B019  # few layers, which live as long as the module
    def weights(self, experts: tuple[int, ...], device: torch.device) -> ExpertWeights:
        stacked = self.case().weights(experts, device)
        return self.case().packed(stacked) if self.fp8 else stacked

    @functools.cache  # noqa: B019
    def shared(self, device: torch.device) -> FP8Expert | None:
        if not self.config.shared:
            return None
        expert = FP8Expert.from_expert(Expert.seeded(self.config, 99, shared=True))
        return expert.to(device)

    def correction(self, device: torch.device) -> torch.Tensor | None:
        if not self.config.routing.correction:
            return None
        return torch.linspace(-0.2, 0.2, EXPERTS, device=device)

    def expected(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Compute one token: every expert's row alone, added in fp32 in top-k order."""
        device, config = x.device, self.config
        ids, weights = route(config.routing, logits, correction=self.correction(device))
        total = torch.zeros(config.hidden, device=device)
        for expert, weight in zip(ids[0].tolist(), weights[0], strict=True):
            total = total + weight * self._compute_row(expert, x).float()
        shared = self.shared(device)
        return (total if shared is None else total + shared(x)[0].float()).to(config.dtype)

    def _compute_row(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        experts, device = self.weights((expert,), x.device), x.device
        one = torch.ones(1, dtype=torch.int32, device=device)
        offsets, scale = torch.cat((0 * one, one)), None
        epilogue = Gated(**asdict(self.config.gating))
        if self.fp8:
            x, scale = weft.reference.quantize(x, "fp8")
            epilogue = GatedQuant(**asdict(self.config.gating))
        act: Any = grouped_gemm(
            x,
            experts.gate_up,
            counts=one,
            offsets=offsets,
            a_scale=scale,
            b_scale=experts.gate_up_scale,
            bias=experts.gate_up_bias,
            epilogue=epilogue,
        )
        act, scale = act if self.fp8 else (act, None)
        rows = grouped_gemm(
            act,
            experts.down,
            counts=one,
            offsets=offsets,
            a_scale=scale,
            b_scale=experts.down_scale,
            bias=experts.down_bias,
        )
        assert isinstance(rows, torch.Tensor)
        return rows[0]


LAYERS = {
    "bf16": Layer(GPT_OSS),
    "fp8": Layer(DEEPSEEK, fp8=True),
    "mxfp4": Layer(DEEPSEEK, fp8=True, mxfp4=True),
}


def list_options(group: weft.Group) -> Iterator[dict[str, Any]]:
    """Yield options that may not change a bit."""
    generator = torch.Generator().manual_seed(7)
    owners = torch.randint(group.size, (EXPERTS,), generator=generator).tolist()
    if group.device.type == "cuda":  # every number of local experts has kernels of its own
        yield {"mode": "throughput"}
        yield {"mode": "low_latency"}
        return
    yield {"expert_map": owners}
    for overlap in ("none", "gemm_push"):
        yield {"mode": "low_latency", "overlap": overlap}
    if group.size > 1:
        yield {"replicas": balance(range(EXPERTS), group.size, group.size - EXPERTS % group.size)}


@functools.cache
def make_tokens(name: str, tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return random tokens, their logits, and the result of each alone."""
    known, generator = LAYERS[name], torch.Generator().manual_seed(1)
    x = torch.randn(tokens, known.config.hidden, generator=generator).to(device, torch.bfloat16)
    logits = (torch.randn(tokens, EXPERTS, generator=generator) * 2).to(device)
    alone = [known.expected(x[t : t + 1], logits[t : t + 1]) for t in range(tokens)]
    return x, logits, torch.stack(alone)


def play_batches(
    group: weft.Group,
    layer: weft.MoE,
    x: torch.Tensor,
    logits: torch.Tensor,
    expected: torch.Tensor,
) -> None:
    """Distribute tokens in random order over ranks, rounds and padded batches; compare the bits."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(x), generator=generator)
        cuts = torch.randint(len(x) + 1, (group.size - 1,), generator=generator).sort().values
        parts = order.tensor_split(cuts)
        own = parts[group.rank].to(group.device)
        used = len(own) - seed % 2 * len(own) // 3
        num_tokens = torch.tensor([used], dtype=torch.int32, device=group.device)
        out = layer(x[own], logits[own], rows=max(map(len, parts)), num_tokens=num_tokens)
        assert torch.equal(bits(out[:used]), bits(expected[own][:used])), seed
    settle(group)
    layer.check()


@pytest.mark.parametrize(
    ("count", "name"),
    [
        *((1, "fp8"), (2, "bf16"), (5, "mxfp4")),
        *(pytest.param(16, name, marks=pytest.mark.slow) for name in LAYERS),
    ],
)
@on_ranks("count", "threads")
def test_bits_do_not_depend_on_the_batch(group, name, count):
    compare_with_tokens_alone(group, name, tokens=24, max_tokens=9)


@pytest.mark.parametrize("count", [1, 2])
@on_ranks("count", "cuda")
def test_bits_do_not_depend_on_the_batch_of_a_gpu(group, count):
    for name in LAYERS:
        compare_with_tokens_alone(group, name, tokens=200, max_tokens=100)


def compare_with_tokens_alone(group: weft.Group, name: str, tokens: int, max_tokens: int) -> None:
    known, device = LAYERS[name], group.device
    if group.rank == 0:
        make_tokens(name, tokens, device)  # for all ranks that are threads
    group.barrier()
    for options in list_options(group):
        with weft.MoE(
            group,
            known.config,
            lambda experts: known.weights(experts, device),
            shared=known.shared(device),
            correction=known.correction(device),
            max_tokens=max_tokens,
            fp8=known.fp8,
            batch_invariant=True,
            **options,
        ) as layer:
            play_batches(group, layer, *make_tokens(name, tokens, device))


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "fp8 rows home": ({"combine_dtype": "fp8"}, 1, "combine_dtype='fp8', which rounds"),
    "torch": ({"gemm": "torch"}, 1, "gemm='torch', but torch chooses kernels"),
    "sums of ranks": ({"mode": "throughput", "overlap": "none"}, 1, "use overlap='gemm_push'"),
    "hosts": ({}, 2, "a group of 2 hosts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_depend_on_the_batch_are_refused(name: str):
    options, hosts, message = REFUSED[name]
    options = {"max_tokens": 8, "batch_invariant": True, **options}
    with pytest.raises(InvalidArgument, match=message):
        build_plans(GPT_OSS, LayerOptions(**options), torch.device("cpu"), hosts=hosts)


@on_ranks(2, "threads")
def test_experts_whose_format_depends_on_the_rank_are_refused(group: weft.Group):
    """The first half of the experts are MXFP4, as if only the others could not be packed."""
    case, config = Case(GPT_OSS_FP8, (), mxfp4=True), GPT_OSS_FP8

    def convert(experts: tuple[int, ...]) -> ExpertWeights:
        weights = case.weights(experts, group.device)
        return weights.to_fp8() if EXPERTS // 2 in experts else weights.to_mxfp4()

    options: dict[str, Any] = {"max_tokens": 4, "fp8": True}
    weft.MoE(group, config, convert, **options).close()
    message = "experts' format differs: rank 0 has 'MXFP4' and .*: convert those of every rank"
    with pytest.raises(GeometryMismatch, match=message):
        weft.MoE(group, config, convert, batch_invariant=True, **options)


def scale_by_batch(x: torch.Tensor) -> torch.Tensor:
    return x * len(x)


@pytest.mark.parametrize(
    ("shared", "message"),
    [(scale_by_batch, "other bits for 5 tokens than for the first"), (torch.clone, None)],
)
@on_ranks(1, "threads")
def test_a_shared_expert_that_depends_on_the_batch_is_refused(
    group: weft.Group,
    shared: Callable[[torch.Tensor], torch.Tensor],
    message: str | None,
):
    known = LAYERS["fp8"]
    args: dict[str, Any] = {"correction": known.correction(group.device), "shared": shared}
    with weft.MoE(
        group,
        known.config,
        lambda experts: known.weights(experts, group.device),
        max_tokens=5,
        fp8=True,
        batch_invariant=True,
        **args,
    ) as layer:
        x, logits = torch.zeros(1, 256, dtype=torch.bfloat16), torch.zeros(1, EXPERTS)
        if message is None:
            layer(x, logits)
            return
        with pytest.raises(InvalidArgument, match=message):
            layer(x, logits)
