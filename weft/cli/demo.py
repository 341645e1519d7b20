"""`weft demo`: a real MoE layer on several ranks, in many ways, compared with one process."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch

from weft import reference
from weft.bench.routing import token_rows
from weft.cli.demo_ranks import DTYPE, MODES, Bits, Outcome, Plan, rank_body, to_bits
from weft.memory import launch
from weft.moe import route
from weft.placement import Placement

# How far layers may be from one process. Each rank's sum and the result are rounded, 2^-9 each, and
# what stands between the products. FP8 ones thrice that: a sum in another order may round to the
# neighbour there.
BOUND, BOUND_FP8 = 2**-6, 3 * 2**-6


@dataclass(frozen=True, slots=True)
class Comparison:
    """One mode's results on all ranks.

    us: of a call, median, slowest rank.   bits_of: the mode whose bits it must have, or None.
    equal: it has them.   error: greatest absolute difference to one process; largest: greatest
    value there.   bound: how far it may be, as a part of largest.
    """

    us: float
    bits_of: str | None
    equal: bool
    error: float
    largest: float
    bound: float

    @property
    def right(self) -> bool:
        """Equal bits where they must be, and near enough."""
        return self.equal and self.error <= self.bound * max(self.largest, 1.0)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The whole demo: what was exchanged, how long it took, and how it compares.

    rows: int64 `[ranks, ranks]`, token rows from rank i to rank j.  exact: the choice of experts
    equals one process's, and the exchange weft.reference, bit by bit.  us: for each rank dispatch,
    experts, combine.
    """

    plan: Plan
    device: str
    rows: torch.Tensor
    exact: bool
    us: list[tuple[float, float, float]]
    modes: dict[str, Comparison]

    @property
    def right(self) -> bool:
        """The exchange is exact, and so is every mode as far as it must be."""
        return self.exact and all(mode.right for mode in self.modes.values())


def run(plan: Plan, device: str) -> Verdict:
    """Run the layer on the ranks and in this process; compare the two. device: "cpu" or "cuda"."""
    # The processes together should not want more cores than there are.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    outcomes: list[Outcome] = launch(rank_body, plan, ranks=plan.ranks, device=device, timeout=300)
    ids = [torch.from_numpy(outcome.ids) for outcome in outcomes]
    return Verdict(
        plan=plan,
        device=device,
        rows=token_rows(ids, plan.experts),
        exact=_routing_is_exact(plan, outcomes) and _exchange_is_exact(plan, outcomes),
        us=[outcome.us for outcome in outcomes],
        modes=_compare(plan, outcomes),
    )


def _compare(plan: Plan, outcomes: list[Outcome]) -> dict[str, Comparison]:
    """Every mode's results with those of one process, and of the mode that has their bits."""
    wanted = {
        fp8: torch.cat([_single_process(plan, rank, fp8, outcomes) for rank in range(plan.ranks)])
        for fp8 in (False, True)
    }
    found = {}
    for name, mode in MODES.items():
        fp8 = bool(mode.options.get("fp8"))
        got = torch.cat([_from_bits(outcome.results[name]) for outcome in outcomes]).float()
        twin = mode.bits_of or name
        found[name] = Comparison(
            us=max(outcome.layer_us[name] for outcome in outcomes),
            bits_of=None if twin == name else twin,
            equal=all(np.array_equal(o.results[name], o.results[twin]) for o in outcomes),
            error=float((got - wanted[fp8]).abs().max()),
            largest=float(wanted[fp8].abs().max()),
            bound=BOUND_FP8 if fp8 else BOUND,
        )
    return found


def _single_process(plan: Plan, rank: int, fp8: bool, outcomes: list[Outcome]) -> torch.Tensor:
    """The same layer without any exchange: float32 `[tokens, hidden]`.

    fp8: x, weights and what the gating makes as their FP8 numbers stand for.
    """
    x, sent = plan.x(rank), plan.x(rank)
    ids, weights = (torch.from_numpy(t) for t in (outcomes[rank].ids, outcomes[rank].weights))
    every = plan.weights(range(plan.experts), "cpu")
    gate_up, down, gating = every.gate_up, every.down, reference.swiglu
    if fp8:
        packed, sent = every.to_fp8(), _as_fp8(x)
        gate_up, down = (
            _wide(packed.gate_up, packed.gate_up_scale),
            _wide(packed.down, packed.down_scale),
        )

        def gating(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return _as_fp8(reference.swiglu(gate, up))

    shared = plan.expert(plan.experts)(x)
    return reference.moe_layer(sent, ids, weights, gate_up, down, gating=gating, shared=shared)


def _as_fp8(rows: torch.Tensor) -> torch.Tensor:
    """float32: what is left of rows that went through FP8."""
    return reference.dequantize(*reference.quantize(rows, "fp8"))


def _wide(numbers: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """float32 of FP8 weights: each number times the scale of its 128 x 128."""
    assert scales is not None
    return numbers.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)


def _routing_is_exact(plan: Plan, outcomes: list[Outcome]) -> bool:
    """Does this process choose what the ranks have chosen, bit by bit, from their logits?"""
    return all(
        np.array_equal(
            route(plan.config.routing, torch.from_numpy(outcome.logits)).ids.numpy(), outcome.ids
        )
        for outcome in outcomes
    )


def _exchange_is_exact(plan: Plan, outcomes: list[Outcome]) -> bool:
    """Compare every received row and every combined row with the reference exchange, bit by bit."""
    ids = [torch.from_numpy(outcome.ids) for outcome in outcomes]
    weights = [torch.from_numpy(outcome.weights) for outcome in outcomes]
    placement = Placement.blocks(plan.experts, plan.ranks)
    carries: list[torch.Tensor] = []
    for rank, outcome in enumerate(outcomes):
        wanted = reference.dispatch(
            [(plan.x(source),) for source in range(plan.ranks)],
            ids,
            weights,
            placement,
            rank=rank,
            max_tokens=max(plan.tokens),
        )
        if not np.array_equal(wanted.ids.numpy(), outcome.received_ids):
            return False
        if not np.array_equal(to_bits(wanted.x), outcome.received):
            return False
        carries.append((wanted.ids >= 0).any(dim=-1))
    for rank, outcome in enumerate(outcomes):
        tokens = plan.tokens[rank]
        combined = reference.combine(
            [_from_bits(each.expert_rows)[rank, :tokens] for each in outcomes],
            [each[rank, :tokens] for each in carries],
            add=_from_bits(outcome.shared),
        )
        if not np.array_equal(to_bits(combined), outcome.results["none"]):
            return False
    return True


def _from_bits(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits).view(DTYPE)
