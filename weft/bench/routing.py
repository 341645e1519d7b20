# SPDX-License-Identifier: Apache-2.0
"""Expert ids of every rank's tokens, and the rows that they put on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from weft.bench.harness import Measurement, RowsCase
from weft.bench.limits import PAIR_FIXED_US, link_rate, pair_floor_us
from weft.errors import InvalidArgument
from weft.placement import Placement

ROUTINGS = ("uniform", "perfect", "zipf", "one-hot")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCase(RowsCase):
    """A case of pairs of dispatch and combine.

    Attributes:
        top_k: Experts per token.
        experts: Experts on all ranks.
        routing: As in `make_ids`.
        combine_dtype: As in the operator.
        model: Name of the model with these sizes, or None.
        profile: Whether to time kernels that record a trace.
    """

    whole: ClassVar[str] = "pair"

    top_k: int = 8
    experts: int = 256
    routing: str
    combine_dtype: str | None = None
    model: str | None = None
    profile: bool = False

    @property
    def sent_bytes(self) -> int:
        """Bytes that dispatch sends for one token to one rank."""
        raise NotImplementedError

    @property
    def returned_bytes(self) -> int:
        """Bytes of one combined row."""
        raise NotImplementedError

    @property
    def fp8_back(self) -> bool:
        """Whether combine sends rows as FP8."""
        return self.combine_dtype == "fp8"

    @property
    def sizes_text(self) -> str:
        """Model, sizes and routing, for titles."""
        name = f"{self.model}: " if self.model else ""
        return (
            f"{name}{self.ranks} ranks, hidden {self.hidden}, top {self.top_k} of {self.experts} "
            f"experts, routing {self.routing}"
        )

    def rows_back(self, ids_of_rank: list[torch.Tensor]) -> torch.Tensor:
        """Return the rows that rank j (column) sends back to rank i (row), or the transpose."""
        return token_rows(ids_of_rank, self.experts)

    def traffic(self, ids_of_rank: list[torch.Tensor]) -> dict[str, int]:
        """Return rows and bytes of the busiest rank, out and back.

        `chosen` is the largest number of entries that name an expert, over all ranks.
        """
        rows_out = max_rank_rows(token_rows(ids_of_rank, self.experts))
        rows_back = max_rank_rows(self.rows_back(ids_of_rank))
        return {
            "chosen": max(int((ids >= 0).sum()) for ids in ids_of_rank),
            "rows_out": rows_out,
            "rows_back": rows_back,
            "out_bytes": rows_out * self.sent_bytes,
            "back_bytes": rows_back * self.returned_bytes,
        }

    def bytes_of(self, measured: Measurement, phase: str) -> tuple[float, float]:
        """Return the phase's bytes; logical bytes count one row per choice."""
        facts = measured.facts
        out, back = phase in ("dispatch", "pair"), phase in ("combine", "pair")
        logical = facts["chosen"] * (out * self.sent_bytes + back * self.returned_bytes)
        return logical, out * facts["out_bytes"] + back * facts["back_bytes"]

    def floor_us(self, measured: Measurement, gpus: list[str]) -> float | None:
        """Return the time of the busiest rank's bytes and of two ways through the links."""
        return pair_floor_us(measured.facts["out_bytes"], measured.facts["back_bytes"], gpus)

    def floor_text(self) -> str:
        """Describe the floor."""
        return f"wire bytes / {link_rate(self.ranks):g} GB/s + {PAIR_FIXED_US:g} us"


def parse_routing(text: str) -> tuple[str, float]:
    """Return the routing's name, and zipf's exponent (default 1).

    Raises InvalidArgument if the exponent is not a number above 0.
    """
    word, colon, number = text.partition(":")
    if word != "zipf":
        return text, 1.0
    try:
        exponent = float(number) if colon else 1.0
    except ValueError:
        exponent = 0.0
    if not 0 < exponent < 100:
        raise InvalidArgument(f"routing is {text!r}; write zipf or zipf:EXPONENT, from 0 to 100")
    return word, exponent


def make_ids(case: PairCase, tokens: int, rank: int) -> torch.Tensor:
    """Return the experts of one rank's tokens, int32 `[tokens, top_k]`, distinct within a row.

    uniform: random.
    perfect: token t's k-th expert is on rank (rank + t + k) % ranks, so that every token reaches
    min(top_k, ranks) ranks, and all ranks and experts get equal shares.
    zipf: an expert's popularity is 1 / place^s, with places drawn once for the whole run.
    one-hot: every token picks experts 0 .. top_k - 1, the worst hot spot.

    Raises InvalidArgument for an unknown routing or unsupported sizes.
    """
    generator = torch.Generator().manual_seed(case.seed * 1_000_003 + rank * 1009 + tokens)
    word, exponent = parse_routing(case.routing)
    match word:
        case "uniform" | "zipf":
            popularity = torch.ones(case.experts)
            if word == "zipf":
                popularity = places_of(case.experts, case.seed).float() ** -exponent
            keys = popularity.log() + sample_gumbel((tokens, case.experts), generator)
            return keys.topk(case.top_k, dim=1).indices.to(torch.int32)
        case "perfect":
            return _perfect(case, tokens, rank)
        case "one-hot":
            return torch.arange(case.top_k, dtype=torch.int32).repeat(tokens, 1)
    raise InvalidArgument(
        f"routing is {case.routing!r}; choose one of {', '.join(ROUTINGS)}, zipf:EXPONENT"
    )


def places_of(experts: int, seed: int) -> torch.Tensor:
    """Return each expert's place by popularity, from 1, int64 `[experts]`."""
    return torch.randperm(experts, generator=torch.Generator().manual_seed(seed)) + 1


def sample_gumbel(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return Gumbel noise: the top keys of log p + noise are a sample without replacement."""
    return -(-torch.rand(shape, generator=generator).clamp_(1e-20, 1 - 1e-7).log()).log()


def _perfect(case: PairCase, tokens: int, rank: int) -> torch.Tensor:
    """Iterate over ranks with k, and over each rank's experts with every full turn."""
    ranks, top_k = case.ranks, case.top_k
    placement = Placement.blocks(case.experts, ranks)
    owned = [placement.experts_of(owner) for owner in range(ranks)]
    turns = -(-top_k // ranks)
    if (fewest := min(len(experts) for experts in owned)) < turns:
        raise InvalidArgument(
            f"routing perfect: top_k={top_k} over {ranks} ranks needs {turns} experts on each, "
            f"but {case.experts} experts leave {fewest} on one; use --routing uniform"
        )
    first = torch.tensor([experts[0] for experts in owned])
    count = torch.tensor([len(experts) for experts in owned])
    start = (torch.arange(tokens) + rank).unsqueeze(1)
    k = torch.arange(top_k)
    owner = (start + k) % ranks
    local = (start // ranks * turns + k // ranks) % count[owner]
    return (first[owner] + local).to(torch.int32)


def max_rank_rows(rows: torch.Tensor) -> int:
    """Return the larger number of rows that leave or enter any rank; `rows` is `[from, to]`."""
    remote = rows.clone().fill_diagonal_(0)
    return int(torch.maximum(remote.sum(dim=1), remote.sum(dim=0)).max())


def token_rows(ids_of_rank: list[torch.Tensor], experts: int) -> torch.Tensor:
    """Return the token rows that rank i (row) sends to rank j (column), int64 `[ranks, ranks]`.

    A row is sent once to each rank, even if several of its experts are there.
    """
    return _rows(ids_of_rank, experts, once=True)


def choice_rows(ids_of_rank: list[torch.Tensor], experts: int) -> torch.Tensor:
    """Return the choices by rank i (row) of rank j's experts (column), int64 `[ranks, ranks]`."""
    return _rows(ids_of_rank, experts, once=False)


def _rows(ids_of_rank: list[torch.Tensor], experts: int, *, once: bool) -> torch.Tensor:
    ranks = len(ids_of_rank)
    owner = torch.tensor((*Placement.blocks(experts, ranks).ranks, -1))  # id -1 indexes the last
    rows = torch.zeros(ranks, ranks, dtype=torch.int64)
    for source, ids in enumerate(ids_of_rank):
        hits = owner[ids.long()].unsqueeze(-1) == torch.arange(ranks)
        rows[source] = (hits.any(dim=1) if once else hits.flatten(0, 1)).sum(dim=0)
    return rows
