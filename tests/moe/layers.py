# SPDX-License-Identifier: Apache-2.0
"""A layer known on every rank: seeded experts, tokens and logits, and the expected results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import weft
from tests.gemm.cases import gated
from weft.gemm import Gated, unpack_mxfp4
from weft.gemm.config import MXFP4
from weft.moe import (
    CLAMPED_SWIGLU,
    RELU2,
    SWIGLU,
    Expert,
    ExpertWeights,
    Gating,
    MoEConfig,
    Routing,
    Ungated,
    route,
)
from weft.moe.layer.throughput import ThroughputWorkspace

HIDDEN, EXPERTS = 128, 8
WIDER = 384  # three blocks of columns to send
LIMITED: dict[str, Any] = {"groups": 4, "top_groups": 2, "scale": 2.5}
CONFIGS = {
    "softmax": MoEConfig(HIDDEN, 32, Routing(EXPERTS, 3)),
    "deepseek": MoEConfig(
        HIDDEN, 32, Routing(EXPERTS, 3, score="sigmoid", correction=True, **LIMITED), shared=48
    ),
    "gpt-oss": MoEConfig(
        HIDDEN, 32, Routing(EXPERTS, 3, score="softmax-chosen"), gating=CLAMPED_SWIGLU, biased=True
    ),
    "llama": MoEConfig(
        HIDDEN,
        32,
        Routing(EXPERTS, 1, score="sigmoid", renormalise=False, weigh="input"),
        shared=32,
    ),
    "nemotron": MoEConfig(
        HIDDEN,
        32,
        Routing(EXPERTS, 3, score="sigmoid", correction=True, scale=2.5),
        gating=RELU2,
        shared=48,
    ),
}
GATINGS: dict[Gating | Ungated, Callable[..., torch.Tensor]] = {
    SWIGLU: weft.reference.swiglu,
    CLAMPED_SWIGLU: weft.reference.clamped_swiglu,
    RELU2: weft.reference.relu2,
}


def ordinary_bytes(layer: weft.MoE) -> int:
    """Return the bytes of a layer's workspace outside of symmetric memory."""
    workspace = layer.workspace
    if isinstance(workspace, ThroughputWorkspace):
        rows = tree_leaves(workspace._groups.buffers)
    else:
        exchange = layer.exchange
        assert isinstance(exchange, weft.LowLatencyAllToAll)
        rows = [t for slot in exchange.result_buffers for t in slot.tensors.values()]
        rows.append(exchange._tracks)
    return sum(t.numel() * t.itemsize for t in (*rows, *workspace.buffers))


def formula(gating: Gating | Ungated) -> Callable[..., torch.Tensor]:
    """Return a gating with any parameters, or an activation."""
    if gating in GATINGS:
        return GATINGS[gating]
    assert isinstance(gating, Gating)
    numbers = Gated(**asdict(gating))
    return lambda gate, up: gated(numbers, torch.cat((gate, up), dim=-1))


@dataclass(frozen=True)
class Case:
    """One layer; `tokens[r]` belong to rank r."""

    config: MoEConfig
    tokens: tuple[int, ...]
    seed: int = 0
    mxfp4: bool = False  # weights of a layer with fp8=True

    def next(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def expert(self, index: int) -> Expert:
        return Expert.seeded(self.config, 100 + index)

    def shared(self, device: torch.device) -> Expert | None:
        if not self.config.shared:
            return None
        return Expert.seeded(self.config, 99, shared=True).to(device)

    def correction(self, device: torch.device) -> torch.Tensor | None:
        if not self.config.routing.correction:
            return None
        generator = torch.Generator().manual_seed(5)
        return (torch.randn(EXPERTS, generator=generator) * 0.2).to(device)

    def inputs_of(self, rank: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1009 + rank)
        x = torch.randn(self.tokens[rank], self.config.hidden, generator=generator).to(
            self.config.dtype
        )
        logits = torch.randn(self.tokens[rank], EXPERTS, generator=generator) * 2
        return x.to(device), logits.to(device)

    def weights(
        self, experts: Iterable[int], device: torch.device, first: int = 0
    ) -> ExpertWeights:
        """Return stacked experts of this layer, or of another layer that starts at `first`."""
        stacked = [self.expert(first + e) for e in experts]
        return ExpertWeights.stack(self.config, stacked, device)

    def packed(self, weights: ExpertWeights) -> ExpertWeights:
        """Return weights in the format of a layer with fp8=True."""
        return weights.to_mxfp4() if self.mxfp4 else weights.to_fp8()

    def open(self, group: weft.Group, **options: Any) -> weft.MoE:
        device = group.device

        def weights(local: tuple[int, ...]) -> ExpertWeights:
            stacked = self.weights(local, device)
            return self.packed(stacked) if options.get("fp8") else stacked

        options = {"max_tokens": max(*self.tokens, 1), **options}
        return weft.MoE(
            group,
            self.config,
            weights,
            shared=self.shared(device),
            correction=self.correction(device),
            **options,
        )

    def expected(
        self,
        layer: weft.MoE,
        x: torch.Tensor,
        logits: torch.Tensor,
        quantize: str | None = None,
        fp8: bool = False,
    ) -> torch.Tensor:
        """Return the expected float32 `[tokens, hidden]`; experts see x as it arrives.

        fp8: and weights, and what gating makes, as FP8 brings them.
        """
        device, config = x.device, self.config
        ids, weights = route(config.routing, logits, correction=self.correction(device))
        every = self.weights(range(EXPERTS), device)
        gating = plain = formula(config.gating)
        gate_up, down = every.gate_up, every.down
        if fp8:
            quantize = "fp8"
            packed = self.packed(every)
            gate_up, down = dequantized(packed, "gate_up"), dequantized(packed, "down")

            def gating(*parts: torch.Tensor) -> torch.Tensor:
                return weft.reference.dequantize(*weft.reference.quantize(plain(*parts), "fp8"))

        name = "gating" if isinstance(config.gating, Gating) else "activation"
        activation: dict[str, Any] = {name: gating}
        shared, exchange = self.shared(device), layer.exchange
        by_rank = isinstance(exchange, weft.AllToAll) and layer.replicas is None
        sent = x
        if quantize:
            q, scales = weft.reference.quantize(x.cpu(), quantize)
            sent = weft.reference.dequantize(q, scales).to(x.device)
            sent = sent if fp8 else sent.to(x.dtype)
        return weft.reference.moe_layer(
            sent,
            ids,
            weights,
            gate_up,
            down,
            gate_up_bias=every.gate_up_bias,
            down_bias=every.down_bias,
            **activation,
            weigh_input=config.routing.weigh == "input",
            shared=None if shared is None else shared(x),
            # Rows that return one by one are summed unrounded; which rank sums a replica's is open.
            placement=exchange.placement if by_rank else None,
        )

    def check(self, found: torch.Tensor, wanted: torch.Tensor, slack: float = 1.0) -> None:
        limit = slack * tolerance_of(self.config, wanted)
        torch.testing.assert_close(found.float(), wanted, rtol=0, atol=limit)


def dequantized(weights: ExpertWeights, name: str) -> torch.Tensor:
    """Return "gate_up" or "down" of FP8 or MXFP4 weights as float32."""
    return dequantize_blocks(getattr(weights, name), getattr(weights, f"{name}_scale"))


def dequantize_blocks(q: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return float32 values, multiplied by their blocks' scales."""
    if q.dtype == MXFP4:
        return unpack_mxfp4(q, scales)
    return q.float() * scales.repeat_interleave(128, dim=1).repeat_interleave(128, dim=2)


def tolerance_of(config: MoEConfig, wanted: torch.Tensor) -> float:
    """Return the tolerance of a layer against the reference, which rounds only wire data.

    The product, the gating's steps, the second product, the rank's sum and the result are rounded:
    five halves of the largest value's unit. In float32 the order of 128 sums counts more.
    """
    largest = max(1.0, float(wanted.abs().max()) if wanted.numel() else 0.0)
    split_phase = 16 if config.dtype == torch.float32 else 5
    return split_phase * torch.finfo(config.dtype).eps / 2 * largest
