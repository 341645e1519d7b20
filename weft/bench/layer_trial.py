"""One layer under test: its inputs, and the check of its output before and after timing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from weft.bench.layer_cases import LayerSettings, make_correction, make_logits
from weft.bench.layer_weights import draw
from weft.moe import CLAMPED_SWIGLU, Expert, FP8Expert, MoE
from weft.moe.router import route_in_torch
from weft.ops import reference

if TYPE_CHECKING:
    from weft.memory import Group

SAMPLE = 16  # tokens of a rank that are compared
# How far from the reference a result may be, in halves of a unit of the largest one (docs/moe.md).
HALVES, HALVES_FP8_BACK = 5, 16
# FP8 experts round what stands between their products to 4 bits: by up to 1/16 of each number.
FP8_PART = 1 / 16


class LayerTrial:
    """One rank's tokens and logits of one size, and what the layer must make of them."""

    def __init__(
        self, group: Group, settings: LayerSettings, shared: Expert | FP8Expert | None, tokens: int
    ) -> None:
        self.group, self.settings, self.shared = group, settings, shared
        device, config = group.device, settings.config
        generator = torch.Generator().manual_seed((settings.seed * 7919 + tokens) * 64 + group.rank)
        x = torch.randn(tokens, config.hidden, generator=generator)
        self.x = x.to(device, config.dtype)
        self.logits = make_logits(settings, tokens, group.rank).to(device)
        correction = make_correction(settings)
        self.correction = None if correction is None else correction.to(device)
        self.out = torch.empty_like(self.x)
        self.sample = torch.linspace(0, tokens - 1, min(tokens, SAMPLE)).long().to(device)
        self._wanted: torch.Tensor | None = None

    def call(self, layer: MoE) -> None:
        """What is timed: from logits to output."""
        layer(self.x, self.logits, out=self.out)

    def poison(self) -> None:
        """So that a call which writes nothing is noticed."""
        self.out.fill_(float("nan"))

    def check(self, layer: MoE) -> str | None:
        """Run the layer into poisoned memory; what is wrong, or None. Collective."""
        self.poison()
        self.call(layer)
        return self.compare(layer)

    def compare(self, layer: MoE) -> str | None:
        """What is wrong with what lies in `out`, or None."""
        self._settle()
        layer.check()
        if not bool(self.out.isfinite().all()):
            return f"rank {self.group.rank}: the output has numbers that are not finite"
        if self._wanted is None:
            self._wanted = self.wanted(layer)
        error = float((self.out[self.sample].float() - self._wanted).abs().max())
        bound = self.bound(self._wanted)
        if error <= bound:
            return None
        return f"rank {self.group.rank}: off the reference by {error:.4g}; {bound:.4g} is allowed"

    def bound(self, wanted: torch.Tensor) -> float:
        """The largest difference that roundings on the way explain."""
        settings, largest = self.settings, max(1.0, float(wanted.abs().max()))
        halves = HALVES_FP8_BACK if settings.combine_by == "fp8" else HALVES
        rounding = halves * torch.finfo(settings.config.dtype).eps / 2 * largest
        part = FP8_PART * float(wanted.abs().max()) if settings.dtype == "fp8" else 0.0
        return rounding + part

    def wanted(self, layer: MoE) -> torch.Tensor:
        """float32 `[sample, hidden]`: weft.reference.moe_layer, expert by expert.

        Each expert is drawn again, whoever holds it, and multiplies in float32 with the numbers
        that its stored weights stand for.
        """
        config, device = self.settings.config, self.group.device
        x, owners = self.x[self.sample], layer.exchange.placement.ranks
        ids, weights = route_in_torch(config.routing, self.logits[self.sample], self.correction)
        sent, clamped = self._sent(x), config.gating is CLAMPED_SWIGLU
        sums = torch.zeros((self.group.size, *x.shape), device=device)
        for expert in sorted(set(ids.flatten().tolist())):
            drawn = draw(self.settings, expert, device)
            up_bias, down_bias = drawn.gate_up_bias, drawn.down_bias
            sums[owners[expert]] += reference.moe_layer(
                sent,
                torch.where(ids == expert, 0, -1),
                weights,
                drawn.gate_up.wide()[None],
                drawn.down.wide()[None],
                gate_up_bias=None if up_bias is None else up_bias[None],
                down_bias=None if down_bias is None else down_bias[None],
                gating=reference.clamped_swiglu if clamped else reference.swiglu,
                weigh_input=config.routing.weigh == "input",
            )
        total = sums.to(config.dtype).float().sum(dim=0)
        return total if self.shared is None else total + self.shared(x).float()

    def _sent(self, x: torch.Tensor) -> torch.Tensor:
        """x as the wire brings it."""
        if self.settings.wire is None:
            return x
        wide = reference.dequantize(*reference.quantize(x, self.settings.wire))
        return wide.to(x.dtype)

    def _settle(self) -> None:
        if self.x.device.type == "cuda":
            torch.cuda.synchronize()
