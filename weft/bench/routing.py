# SPDX-License-Identifier: Apache-2.0
"""Which token goes to which expert, for every rank, and the rows this puts on the wire."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from weft.bench.harness import Measured, RowsCase
from weft.bench.limits import PAIR_FIXED_US, link_rate, pair_floor_us
from weft.errors import InvalidArgument
from weft.placement import Placement

ROUTINGS = ("uniform", "perfect", "zipf", "one-hot")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCase(RowsCase):
    """A case of pairs of dispatch and combine.

    top_k, experts: of a token, and on all ranks.   routing: as in `make_ids`.
    combine_dtype: as in the operator.   model: what the sizes are called, or None.
    profile: time kernels that keep a trace.
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
        """Bytes that dispatch sends of one token to one rank."""
        raise NotImplementedError

    @property
    def returned_bytes(self) -> int:
        """Bytes of one row that combine returns."""
        raise NotImplementedError

    @property
    def fp8_back(self) -> bool:
        """Does combine return rows as FP8?"""
        return self.combine_dtype == "fp8"

    @property
    def sizes_text(self) -> str:
        """Model, sizes and routing, as titles begin."""
        name = f"{self.model}: " if self.model else ""
        return (
            f"{name}{self.ranks} ranks, hidden {self.hidden}, top {self.top_k} of {self.experts} "
            f"experts, routing {self.routing}"
        )

    def rows_back(self, ids_of_rank: list[torch.Tensor]) -> torch.Tensor:
        """Rows that come back to rank i (row) from rank j (column), or as many the other way."""
        return token_rows(ids_of_rank, self.experts)

    def traffic(self, ids_of_rank: list[torch.Tensor]) -> dict[str, int]:
        """Rows and bytes off the busiest rank, out and back.

        chosen: tokens x top_k that name an expert, most over ranks.
        """
        rows_out = busiest(token_rows(ids_of_rank, self.experts))
        rows_back = busiest(self.rows_back(ids_of_rank))
        return {
            "chosen": max(int((ids >= 0).sum()) for ids in ids_of_rank),
            "rows_out": rows_out,
            "rows_back": rows_back,
            "out_bytes": rows_out * self.sent_bytes,
            "back_bytes": rows_back * self.returned_bytes,
        }

    def bytes_of(self, found: Measured, phase: str) -> tuple[float, float]:
        """Rows out in dispatch, rows back in combine; asked for is a row for each choice."""
        facts = found.facts
        out, back = phase in ("dispatch", "pair"), phase in ("combine", "pair")
        logical = facts["chosen"] * (out * self.sent_bytes + back * self.returned_bytes)
        return logical, out * facts["out_bytes"] + back * facts["back_bytes"]

    def floor_us(self, found: Measured, gpus: list[str]) -> float | None:
        """Bytes of the busiest rank, and two ways through the links."""
        return pair_floor_us(found.facts["out_bytes"], found.facts["back_bytes"], gpus)

    def floor_text(self) -> str:
        """What the floor is made of, in words."""
        return f"wire bytes / {link_rate(self.ranks):g} GB/s + {PAIR_FIXED_US:g} us"


def parse_routing(text: str) -> tuple[str, float]:
    """Return the word, and the exponent of zipf, 1 if not given.

    Raises InvalidArgument for an exponent that is not a number above 0.
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
    """Return int32 `[tokens, top_k]`: the experts of one rank's tokens, distinct within a row.

    uniform: at random.  perfect: token t's k-th expert is on rank (rank + t + k) % ranks, so that
    every token reaches min(top_k, ranks) ranks and all ranks and experts get equal shares.
    zipf: expert popularity falls as 1 / place^s, places drawn once for the whole run.
    one-hot: every token picks experts 0 .. top_k - 1, the worst hot spot.

    Raises InvalidArgument for an unknown routing, or sizes it cannot serve.
    """
    generator = torch.Generator().manual_seed(case.seed * 1_000_003 + rank * 1009 + tokens)
    word, exponent = parse_routing(case.routing)
    match word:
        case "uniform" | "zipf":
            popularity = torch.ones(case.experts)
            if word == "zipf":
                popularity = places_of(case.experts, case.seed).float() ** -exponent
            keys = popularity.log() + gumbel((tokens, case.experts), generator)
            return keys.topk(case.top_k, dim=1).indices.to(torch.int32)
        case "perfect":
            return _perfect(case, tokens, rank)
        case "one-hot":
            return torch.arange(case.top_k, dtype=torch.int32).repeat(tokens, 1)
    raise InvalidArgument(
        f"routing is {case.routing!r}; choose one of {', '.join(ROUTINGS)}, zipf:EXPONENT"
    )


def places_of(experts: int, seed: int) -> torch.Tensor:
    """int64 `[experts]`: each expert's place by popularity, 1 for the first."""
    return torch.randperm(experts, generator=torch.Generator().manual_seed(seed)) + 1


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Gumbel noise: the largest keys of log p + noise are a draw by p without replacement."""
    return -(-torch.rand(shape, generator=generator).clamp_(1e-20, 1 - 1e-7).log()).log()


def _perfect(case: PairCase, tokens: int, rank: int) -> torch.Tensor:
    """Walk over the ranks with k, and over each rank's experts with every full turn."""
    ranks, top_k = case.ranks, case.top_k
    placement = Placement.blocks(case.experts, ranks)
    owned = [placement.experts_of(owner) for owner in range(ranks)]
    turns = -(-top_k // ranks)
    if (fewest := min(len(experts) for experts in owned)) < turns:
        raise InvalidArgument(
            f"routing perfect: top_k={top_k} over {ranks} ranks needs {turns} experts on each, "
            f"and {case.experts} experts leave {fewest} on one; use --routing uniform"
        )
    first = torch.tensor([experts[0] for experts in owned])
    count = torch.tensor([len(experts) for experts in owned])
    start = (torch.arange(tokens) + rank).unsqueeze(1)
    k = torch.arange(top_k)
    owner = (start + k) % ranks
    local = (start // ranks * turns + k // ranks) % count[owner]
    return (first[owner] + local).to(torch.int32)


def busiest(rows: torch.Tensor) -> int:
    """Rows that leave or enter the busiest rank, whichever is more; rows: `[from, to]`."""
    remote = rows.clone().fill_diagonal_(0)
    return int(torch.maximum(remote.sum(dim=1), remote.sum(dim=0)).max())


def token_rows(ids_of_rank: list[torch.Tensor], experts: int) -> torch.Tensor:
    """Return int64 `[ranks, ranks]`: the token rows that rank i (row) sends to rank j (column).

    A row goes once to each rank however many of its experts are there.
    """
    return _rows(ids_of_rank, experts, once=True)


def choice_rows(ids_of_rank: list[torch.Tensor], experts: int) -> torch.Tensor:
    """Return int64 `[ranks, ranks]`: choices by rank i (row) of experts of rank j (column)."""
    return _rows(ids_of_rank, experts, once=False)


def _rows(ids_of_rank: list[torch.Tensor], experts: int, *, once: bool) -> torch.Tensor:
    ranks = len(ids_of_rank)
    owner = torch.tensor((*Placement.blocks(experts, ranks).ranks, -1))  # id -1 takes the last
    rows = torch.zeros(ranks, ranks, dtype=torch.int64)
    for source, ids in enumerate(ids_of_rank):
        hits = owner[ids.long()].unsqueeze(-1) == torch.arange(ranks)
        rows[source] = (hits.any(dim=1) if once else hits.flatten(0, 1)).sum(dim=0)
    return rows
