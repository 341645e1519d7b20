# SPDX-License-Identifier: Apache-2.0
"""Generation of expert ids, and the rows and bytes that they transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from weft.bench.harness import Measurement, RowsCase
from weft.bench.limits import PAIR_FIXED_US, link_gb_per_s, pair_floor_us
from weft.errors import InvalidArgument
from weft.placement import Placement

ROUTINGS = ("uniform", "perfect", "zipf", "one-hot")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCase(RowsCase):
    """Parameters of a run of dispatch and combine.

    Attributes:
        top_k: Experts per token.
        experts: Number of experts on all ranks.
        routing: See `generate_ids`.
        combine_dtype: See the operator.
        model: Name of the model with these sizes, or None.
        profile: Whether to time kernels that record a trace.
    """

    total_phase: ClassVar[str] = "pair"

    top_k: int = 8
    experts: int = 256
    routing: str
    combine_dtype: str | None = None
    model: str | None = None
    profile: bool = False

    @property
    def sent_bytes(self) -> int:
        """Bytes of one dispatched row."""
        raise NotImplementedError

    @property
    def returned_bytes(self) -> int:
        """Bytes of one combined row."""
        raise NotImplementedError

    @property
    def combines_fp8(self) -> bool:
        """Whether combine sends FP8 rows."""
        return self.combine_dtype == "fp8"

    @property
    def sizes_title(self) -> str:
        """Title with model, sizes and routing."""
        name = f"{self.model}: " if self.model else ""
        return (
            f"{name}{self.ranks} ranks, hidden {self.hidden}, top {self.top_k} of {self.experts} "
            f"experts, routing {self.routing}"
        )

    def returned_rows(self, ids_by_rank: list[torch.Tensor]) -> torch.Tensor:
        """Count the rows that combine returns from rank j to rank i, int64 `[ranks, ranks]`."""
        return count_token_rows(ids_by_rank, self.experts)

    def count_traffic(self, ids_by_rank: list[torch.Tensor]) -> dict[str, int]:
        """Count the rows and bytes of the busiest rank in dispatch and in combine.

        `chosen` is the number of valid top-k entries of the rank with the most.
        """
        rows_out = max_remote_rows(count_token_rows(ids_by_rank, self.experts))
        rows_back = max_remote_rows(self.returned_rows(ids_by_rank))
        return {
            "chosen": max(int((ids >= 0).sum()) for ids in ids_by_rank),
            "rows_out": rows_out,
            "rows_back": rows_back,
            "out_bytes": rows_out * self.sent_bytes,
            "back_bytes": rows_back * self.returned_bytes,
        }

    def phase_bytes(self, measurement: Measurement, phase: str) -> tuple[float, float]:
        """Return the logical bytes, one row per top-k entry, and those of the busiest rank."""
        traffic = measurement.metadata
        dispatches, combines = phase in ("dispatch", "pair"), phase in ("combine", "pair")
        entry_bytes = dispatches * self.sent_bytes + combines * self.returned_bytes
        moved = dispatches * traffic["out_bytes"] + combines * traffic["back_bytes"]
        return traffic["chosen"] * entry_bytes, moved

    def floor_us(self, measurement: Measurement, gpus: list[str]) -> float | None:
        traffic = measurement.metadata
        return pair_floor_us(traffic["out_bytes"], traffic["back_bytes"], gpus)

    def describe_floor(self) -> str:
        return f"wire bytes / {link_gb_per_s(self.ranks):g} GB/s + {PAIR_FIXED_US:g} us"


def parse_routing(text: str) -> tuple[str, float]:
    """Return the name of the routing and the exponent of zipf (default 1).

    Raises InvalidArgument if the exponent is not a positive number.
    """
    name, colon, number = text.partition(":")
    if name != "zipf":
        return text, 1.0
    try:
        exponent = float(number) if colon else 1.0
    except ValueError:
        exponent = 0.0
    if not 0 < exponent < 100:
        raise InvalidArgument(
            f"routing is {text!r}; write zipf or zipf:EXPONENT with an exponent between 0 and 100"
        )
    return name, exponent


def generate_ids(case: PairCase, tokens: int, rank: int) -> torch.Tensor:
    """Generate the expert ids of one rank's tokens, int32 `[tokens, top_k]`, distinct within a row.

    uniform: all experts are equally likely.
    perfect: token t's k-th expert is on rank (rank + t + k) % ranks, so that every token is sent to
    min(top_k, ranks) ranks, and all ranks and experts receive equal numbers of rows.
    zipf: an expert of popularity rank r has probability proportional to r^-s. The popularity ranks
    are a random permutation that is equal in the whole run.
    one-hot: every token selects experts 0 .. top_k - 1, which is the worst imbalance.

    Raises InvalidArgument for an unknown routing or unsupported sizes.
    """
    generator = torch.Generator().manual_seed(case.seed * 1_000_003 + rank * 1009 + tokens)
    name, exponent = parse_routing(case.routing)
    match name:
        case "uniform" | "zipf":
            popularity = torch.ones(case.experts)
            if name == "zipf":
                popularity = draw_popularity_ranks(case.experts, case.seed).float() ** -exponent
            keys = popularity.log() + sample_gumbel((tokens, case.experts), generator)
            return keys.topk(case.top_k, dim=1).indices.to(torch.int32)
        case "perfect":
            return _perfect_ids(case, tokens, rank)
        case "one-hot":
            return torch.arange(case.top_k, dtype=torch.int32).repeat(tokens, 1)
    raise InvalidArgument(
        f"routing is {case.routing!r}; choose one of {', '.join(ROUTINGS)}, zipf:EXPONENT"
    )


def draw_popularity_ranks(experts: int, seed: int) -> torch.Tensor:
    """Draw a random permutation of the popularity ranks 1 .. experts, int64 `[experts]`."""
    return torch.randperm(experts, generator=torch.Generator().manual_seed(seed)) + 1


def sample_gumbel(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Draw Gumbel noise: the top k of log p + noise are k draws from p without replacement."""
    return -(-torch.rand(shape, generator=generator).clamp_(1e-20, 1 - 1e-7).log()).log()


def _perfect_ids(case: PairCase, tokens: int, rank: int) -> torch.Tensor:
    """Generate the ids of routing "perfect": round robin over ranks and over their experts."""
    ranks, top_k = case.ranks, case.top_k
    placement = Placement.blocks(case.experts, ranks)
    experts_by_rank = [placement.experts_of(owner) for owner in range(ranks)]
    per_rank = -(-top_k // ranks)  # maximum entries of a token on one rank
    min_experts = min(len(experts) for experts in experts_by_rank)
    if min_experts < per_rank:
        raise InvalidArgument(
            f"routing perfect: top_k={top_k} over {ranks} ranks needs {per_rank} experts per rank, "
            f"but with {case.experts} experts a rank has {min_experts}; use --routing uniform"
        )
    first_expert = torch.tensor([experts[0] for experts in experts_by_rank])
    num_local_experts = torch.tensor([len(experts) for experts in experts_by_rank])
    start = (torch.arange(tokens) + rank).unsqueeze(1)
    k = torch.arange(top_k)
    owner = (start + k) % ranks
    local = (start // ranks * per_rank + k // ranks) % num_local_experts[owner]
    return (first_expert[owner] + local).to(torch.int32)


def max_remote_rows(rows: torch.Tensor) -> int:
    """Return the rows that the busiest rank sends or receives; `rows` is `[source, target]`."""
    remote = rows.clone().fill_diagonal_(0)
    return int(torch.maximum(remote.sum(dim=1), remote.sum(dim=0)).max())


def count_token_rows(ids_by_rank: list[torch.Tensor], experts: int) -> torch.Tensor:
    """Count the tokens that rank i sends to rank j, int64 `[ranks, ranks]`.

    A token is sent to a rank once, even if it selects several experts there.
    """
    return _count_rows(ids_by_rank, experts, per_token=True)


def count_choice_rows(ids_by_rank: list[torch.Tensor], experts: int) -> torch.Tensor:
    """Count the top-k entries of rank i that select experts of rank j, int64 `[ranks, ranks]`."""
    return _count_rows(ids_by_rank, experts, per_token=False)


def _count_rows(ids_by_rank: list[torch.Tensor], experts: int, *, per_token: bool) -> torch.Tensor:
    ranks = len(ids_by_rank)
    owner = torch.tensor((*Placement.blocks(experts, ranks).ranks, -1))  # id -1 selects the last
    rows = torch.zeros(ranks, ranks, dtype=torch.int64)
    for source, ids in enumerate(ids_by_rank):
        is_target = owner[ids.long()].unsqueeze(-1) == torch.arange(ranks)
        rows[source] = (is_target.any(dim=1) if per_token else is_target.flatten(0, 1)).sum(dim=0)
    return rows
