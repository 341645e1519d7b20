"""What every rank of `weft demo` does: one layer in many ways, once also by hand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.alltoall.api import AllToAll
from weft.errors import InvalidArgument
from weft.memory import Group
from weft.moe import OVERLAPS, Expert, ExpertWeights, MoE, MoEConfig, Routing, router_logits

DTYPE = torch.bfloat16
PLAIN: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}  # what is drawn
ROUNDS = 5  # timed rounds after the first; the tables show their median

Bits = npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to run the layer: options of `weft.MoE`, and the mode whose bits it must have."""

    options: dict[str, Any]
    bits_of: str | None = None


GROUPED = {"gemm": "grouped", "mode": "throughput"}
MODES: dict[str, Mode] = {
    **{word: Mode({**GROUPED, "overlap": word}, bits_of="none") for word in OVERLAPS},
    "low latency": Mode({**GROUPED, "mode": "low_latency"}),
    "low latency, shared": Mode(
        {**GROUPED, "mode": "low_latency", "overlap": "shared_expert"}, bits_of="low latency"
    ),
    "low latency, FP8": Mode({"mode": "low_latency", "overlap": "shared_expert", "fp8": True}),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the demo's layer; `tokens[r]` belong to rank r, none of them need be equal."""

    ranks: int
    tokens: tuple[int, ...]
    hidden: int = 512
    intermediate: int = 256
    experts: int = 16
    top_k: int = 4
    seed: int = 7

    @classmethod
    def of(cls, ranks: int, tokens: int = 48) -> Plan:
        """Uneven batches, the last rank without a token: that is no special case."""
        if not 2 <= ranks <= 16:
            raise InvalidArgument(f"the demo runs on 2..16 ranks, one expert each; not on {ranks}")
        sizes = [tokens - rank * tokens // ranks // 2 for rank in range(ranks)]
        return cls(ranks=ranks, tokens=(*sizes[:-1], 0) if ranks > 2 else tuple(sizes))

    def gate(self) -> torch.Tensor:
        """The router's weight `[experts, hidden]`."""
        generator = torch.Generator("cpu").manual_seed(self.seed)
        gate = torch.randn(self.experts, self.hidden, generator=generator, **PLAIN)
        return (gate / math.sqrt(self.hidden)).to(DTYPE)

    @property
    def config(self) -> MoEConfig:
        """The layer: softmax over all experts, and a shared one of the same size."""
        routing = Routing(self.experts, self.top_k)
        return MoEConfig(
            self.hidden, self.intermediate, routing, shared=self.intermediate, dtype=DTYPE
        )

    def expert(self, index: int) -> Expert:
        """Expert `index`; `experts` itself names the shared one."""
        seed, shared = self.seed * 1000 + index, index == self.experts
        return Expert.seeded(self.config, seed, shared=shared)

    def weights(self, experts: Sequence[int], device: torch.device | str) -> ExpertWeights:
        """The weights of some experts, stacked in the order given."""
        return ExpertWeights.stack(self.config, [self.expert(e) for e in experts], device)

    def fp8_weights(self, experts: Sequence[int], device: torch.device) -> ExpertWeights:
        """The same in FP8."""
        return self.weights(experts, device).to_fp8()

    def x(self, rank: int) -> torch.Tensor:
        """A rank's tokens `[tokens, hidden]`: noise around a direction that the rank likes."""
        generator = torch.Generator("cpu").manual_seed(self.seed * 77 + rank)
        taste = torch.randn(self.hidden, generator=generator, **PLAIN)
        noise = torch.randn(self.tokens[rank], self.hidden, generator=generator, **PLAIN)
        return (noise + 0.7 * taste).to(DTYPE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rank's tensors and times; tensors as arrays, since a rank's memory ends with it.

    logits: `[tokens, experts]`.  ids, weights: `[tokens, top_k]`.  expert_rows: what the experts
    wrote, `[ranks, max_tokens, hidden]` as bf16 bits.  shared: `[tokens, hidden]` likewise.
    received: bits of the rows that arrived, zero where a slot carries none.  us: dispatch, experts,
    combine.  results: what the layer returned in each mode, `[tokens, hidden]`.  layer_us: of a
    whole call in each mode.
    """

    logits: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    received: Bits
    received_ids: npt.NDArray[np.int32]
    expert_rows: Bits
    shared: Bits
    us: tuple[float, float, float]
    results: dict[str, Bits] = field(default_factory=dict)
    layer_us: dict[str, float] = field(default_factory=dict)


def rank_body(group: Group, plan: Plan) -> Outcome:
    """Run the layer in every mode, the first also by hand."""
    device = group.device
    shared = plan.expert(plan.experts).to(device)
    x = plan.x(group.rank).to(device)
    logits = router_logits(x, plan.gate().to(device))
    outcome: Outcome | None = None
    results: dict[str, Bits] = {}
    times: dict[str, float] = {}
    for name, mode in MODES.items():
        weights = plan.fp8_weights if mode.options.get("fp8") else plan.weights
        with MoE(
            group,
            plan.config,
            partial(weights, device=device),
            max_tokens=max(plan.tokens),
            shared=shared,
            **mode.options,
        ) as layer:
            out = torch.full_like(x, math.nan)
            results[name] = to_bits(layer(x, logits, out=out))
            times[name] = _median_us(group, partial(layer, x, logits, out=out))
            layer.check()
            if outcome is None:  # once by hand, to show what is exchanged
                outcome = _by_hand(group, layer, shared, x, logits)
    assert outcome is not None
    return replace(outcome, results=results, layer_us=times)


def _by_hand(
    group: Group, layer: MoE, shared: Expert, x: torch.Tensor, logits: torch.Tensor
) -> Outcome:
    """Rounds of the layer's exchange, timed; then one whose every row is kept."""
    exchange = layer.exchange
    assert isinstance(exchange, AllToAll)
    times = [_timed_round(group, layer, x, logits) for _ in range(1 + ROUNDS)][1:]
    ids, weights = layer.route(logits)
    received = exchange.dispatch(x, ids, weights)
    layer.experts(received)
    carries = (received.ids >= 0).any(dim=-1, keepdim=True)
    arrived = torch.where(carries, received.x, 0)
    written = torch.where(carries, exchange.output(), 0)
    outcome = Outcome(
        logits=logits.cpu().numpy(),
        ids=ids.cpu().numpy(),
        weights=weights.cpu().numpy(),
        received=to_bits(arrived),
        received_ids=received.ids.cpu().numpy().copy(),
        expert_rows=to_bits(written),
        shared=to_bits(shared(x)),
        us=_median(times),
    )
    exchange.combine()
    group.barrier()  # peers read this rank's rows until they are done
    return outcome


def _timed_round(
    group: Group, layer: MoE, x: torch.Tensor, logits: torch.Tensor
) -> tuple[float, float, float]:
    """us of dispatch, experts and combine in one eager round, host clock."""
    exchange = layer.exchange
    assert isinstance(exchange, AllToAll)
    ids, weights = layer.route(logits)
    group.barrier()
    start = _now(x)
    received = exchange.dispatch(x, ids, weights)
    arrived = _now(x)
    layer.experts(received)
    group.barrier()  # so that combine is timed without waiting for a rank with more work
    computed = _now(x)
    exchange.combine()
    return arrived - start, computed - arrived, _now(x) - computed


def _median_us(group: Group, call: Callable[[], torch.Tensor]) -> float:
    """us of a whole eager call, host clock."""
    times = []
    for _ in range(ROUNDS):
        group.barrier()
        start = time.perf_counter()
        _now(call())
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)[ROUNDS // 2]


def _now(done: torch.Tensor) -> float:
    """us, once the device of a tensor has done what it was given."""
    if done.is_cuda:
        torch.cuda.synchronize(done.device)
    return time.perf_counter() * 1e6


def _median(times: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    first, second, third = (sorted(phase)[len(phase) // 2] for phase in zip(*times, strict=True))
    return first, second, third


def to_bits(tensor: torch.Tensor) -> Bits:
    """bf16 numbers as an array, which outlives the rank."""
    return tensor.detach().cpu().contiguous().view(torch.int16).numpy().copy()
