"""`weft demo`: a real MoE layer on several ranks, compared with the same layer in one process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weft.bench.routing import token_rows
from weft.errors import InvalidArgument
from weft.memory import Group, launch
from weft.moe import Expert, ExpertWeights, MoE, MoEConfig, Routing, route, router_logits
from weft.ops import reference
from weft.ops.placement import Placement

DTYPE = torch.bfloat16
ROUNDS = 5  # timed rounds after the first; the table shows their median
SHADES = ("grey11", "#3b1d0f", "#6b2f12", "#9a4015", "#c2541b", "#ea7a3b")

Bits = npt.NDArray[np.int16]


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
        generator = torch.Generator().manual_seed(self.seed)
        gate = torch.randn(self.experts, self.hidden, generator=generator)
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

    def x(self, rank: int) -> torch.Tensor:
        """A rank's tokens `[tokens, hidden]`: noise around a direction that the rank likes."""
        generator = torch.Generator().manual_seed(self.seed * 77 + rank)
        taste = torch.randn(self.hidden, generator=generator)
        noise = torch.randn(self.tokens[rank], self.hidden, generator=generator)
        return (noise + 0.7 * taste).to(DTYPE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rank's tensors and times; tensors as arrays, since a rank's memory ends with it.

    logits: `[tokens, experts]`.  ids, weights: `[tokens, top_k]`.  expert_rows: what the experts
    wrote, `[ranks, max_tokens, hidden]` as bf16 bits.  shared, result: `[tokens, hidden]` likewise.
    received: bits of the rows that arrived, zero where a slot carries none.  us: dispatch, experts,
    combine.
    """

    logits: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    received: Bits
    received_ids: npt.NDArray[np.int32]
    expert_rows: Bits
    shared: Bits
    result: Bits
    us: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The whole demo: what was exchanged, how long it took, and how it compares.

    rows: int64 `[ranks, ranks]`, token rows from rank i to rank j.  exact: the choice of experts
    equals one process's, and the exchange weft.reference, bit by bit.  error, largest: greatest
    absolute difference to the layer computed in one process, and the greatest value there.
    us: for each rank dispatch, experts, combine.
    """

    plan: Plan
    device: str
    rows: torch.Tensor
    exact: bool
    error: float
    largest: float
    us: list[tuple[float, float, float]]

    @property
    def right(self) -> bool:
        """The exchange is exact, and the layer right up to the rounding of its partial sums: each
        rank's sum is rounded to bf16 once (2^-9), and so is the result."""
        return self.exact and self.error <= 2**-6 * max(self.largest, 1.0)


def run(plan: Plan, device: str) -> Verdict:
    """Run the layer on the ranks and in this process; compare the two. device: "cpu" or "cuda"."""
    # The processes together should not want more cores than there are.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    outcomes: list[Outcome] = launch(_rank_body, plan, ranks=plan.ranks, device=device, timeout=300)
    ids = [torch.from_numpy(outcome.ids) for outcome in outcomes]
    wanted = torch.cat([_single_process(plan, rank) for rank in range(plan.ranks)])
    got = torch.cat([_from_bits(outcome.result) for outcome in outcomes]).float()
    return Verdict(
        plan=plan,
        device=device,
        rows=token_rows(ids, plan.experts),
        exact=_routing_is_exact(plan, outcomes) and _exchange_is_exact(plan, outcomes),
        error=float((got - wanted).abs().max()),
        largest=float(wanted.abs().max()),
        us=[outcome.us for outcome in outcomes],
    )


def _rank_body(group: Group, plan: Plan) -> Outcome:
    device = group.device
    shared = plan.expert(plan.experts).to(device)
    with MoE(
        group,
        plan.config,
        lambda local: plan.weights(local, device),
        max_tokens=max(plan.tokens),
        shared=shared,
        overlap="shared",
    ) as layer:
        x, exchange = plan.x(group.rank).to(device), layer.exchange
        logits = router_logits(x, plan.gate().to(device))
        times = [_timed_round(group, layer, x, logits) for _ in range(1 + ROUNDS)][1:]
        result = layer(x, logits)
        layer.check()
        ids, weights = layer.route(logits)
        received = exchange.dispatch(x, ids, weights)  # once more by hand, to show what arrived
        layer.experts(received)
        carries = (received.ids >= 0).any(dim=-1, keepdim=True)
        arrived = torch.where(carries, received.x, 0)
        written = torch.where(carries, exchange.output(), 0)
        outcome = Outcome(
            logits=logits.cpu().numpy(),
            ids=ids.cpu().numpy(),
            weights=weights.cpu().numpy(),
            received=_to_bits(arrived),
            received_ids=received.ids.cpu().numpy().copy(),
            expert_rows=_to_bits(written),
            shared=_to_bits(shared(x)),
            result=_to_bits(result),
            us=_median(times),
        )
        exchange.combine()
        group.barrier()  # peers read this rank's rows until they are done
        return outcome


def _timed_round(
    group: Group, layer: MoE, x: torch.Tensor, logits: torch.Tensor
) -> tuple[float, float, float]:
    """us of dispatch, experts and combine in one eager round, host clock."""

    def now() -> float:
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        return time.perf_counter() * 1e6

    ids, weights = layer.route(logits)
    group.barrier()
    start = now()
    received = layer.exchange.dispatch(x, ids, weights)
    arrived = now()
    layer.experts(received)
    group.barrier()  # so that combine is timed without waiting for a rank with more work
    computed = now()
    layer.exchange.combine()
    return arrived - start, computed - arrived, now() - computed


def _median(times: list[tuple[float, float, float]]) -> tuple[float, float, float]:
    first, second, third = (sorted(phase)[len(phase) // 2] for phase in zip(*times, strict=True))
    return first, second, third


def _single_process(plan: Plan, rank: int) -> torch.Tensor:
    """The same layer without any exchange: float32 `[tokens, hidden]`."""
    x = plan.x(rank)
    ids, weights = route(plan.config.routing, router_logits(x, plan.gate()))
    every = plan.weights(range(plan.experts), "cpu")
    shared = plan.expert(plan.experts)(x)
    return reference.moe_layer(x, ids, weights, every.gate_up, every.down, shared=shared)


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
        if not np.array_equal(_to_bits(wanted.x), outcome.received):
            return False
        carries.append((wanted.ids >= 0).any(dim=-1))
    for rank, outcome in enumerate(outcomes):
        tokens = plan.tokens[rank]
        combined = reference.combine(
            [_from_bits(each.expert_rows)[rank, :tokens] for each in outcomes],
            [each[rank, :tokens] for each in carries],
            add=_from_bits(outcome.shared),
        )
        if not np.array_equal(_to_bits(combined), outcome.result):
            return False
    return True


def _to_bits(tensor: torch.Tensor) -> Bits:
    return tensor.detach().cpu().contiguous().view(torch.int16).numpy().copy()


def _from_bits(bits: Bits) -> torch.Tensor:
    return torch.from_numpy(bits).view(DTYPE)


def print_verdict(console: Console, verdict: Verdict) -> None:
    """Print the sizes, who sent what to whom, the times, and how the result compares."""
    plan = verdict.plan
    console.print(
        f"[bold]weft demo[/]  one MoE layer on {plan.ranks} ranks ({verdict.device}): "
        f"{sum(plan.tokens)} tokens of hidden {plan.hidden}, top {plan.top_k} of {plan.experts} "
        "experts + 1 shared, bf16\n"
    )
    console.print("Token rows from rank (down) to rank (across), each sent once however many")
    console.print("experts it meets there:\n")
    console.print(_heat(verdict.rows))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = ("rank", "tokens", "KiB out", "KiB in", "dispatch us", "experts us", "combine us")
    for name in columns:
        table.add_column(name, justify="right")
    kib = plan.hidden * DTYPE.itemsize / 1024
    remote = verdict.rows.clone().fill_diagonal_(0)
    for rank, times in enumerate(verdict.us):
        sent, came = int(remote[rank].sum()) * kib, int(remote[:, rank].sum()) * kib
        cells = (f"{sent:.0f}", f"{came:.0f}", *(f"{us:.0f}" for us in times))
        table.add_row(str(rank), str(plan.tokens[rank]), *cells)
    console.print(table)
    console.print(
        Text(f"Median of {ROUNDS} eager rounds, host clock, waiting for peers included.\n", "dim")
    )
    console.print(_sentence(verdict))


def _sentence(verdict: Verdict) -> Text:
    exchange = (
        "equal to weft.reference bit by bit" if verdict.exact else "DIFFERENT from the reference"
    )
    return Text.assemble(
        ("right  " if verdict.right else "WRONG  ", "bold green" if verdict.right else "bold red"),
        f"exchange {exchange}; layer against one process: max abs error {verdict.error:.2g} "
        f"of values up to {verdict.largest:.2g}",
    )


def _heat(rows: torch.Tensor) -> Table:
    """The matrix as coloured cells; what stays on its rank is dim, for it crosses no wire."""
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1), show_header=True)
    table.add_column("", justify="right", style="dim")
    ranks = len(rows)
    for rank in range(ranks):
        table.add_column(Text(f"  {rank}   ", style="dim"), justify="center")
    most = max(int(rows.max()), 1)
    for source in range(ranks):
        cells: list[Text] = []
        for target in range(ranks):
            count = int(rows[source, target])
            shade = SHADES[-(-count * (len(SHADES) - 1) // most)]
            ink = "grey62" if source == target else "bold white"
            cells.append(Text(f" {count:4d} ", style=f"{ink} on {shade}"))
        table.add_row(f"rank {source}", *cells)
    return table


def save_picture(path: Path, verdict: Verdict) -> None:
    """Write who sent what to whom as an image.

    Raises InvalidArgument where matplotlib is missing or cannot write there.
    """
    from weft.bench.exchange_plot import draw_exchange

    plan = verdict.plan
    draw_exchange(
        path,
        verdict.rows,
        tokens=plan.tokens,
        row_bytes=plan.hidden * DTYPE.itemsize,
        title=f"One MoE layer on {plan.ranks} ranks: top {plan.top_k} of {plan.experts} experts",
    )
