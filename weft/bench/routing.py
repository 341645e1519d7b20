"""Which token goes to which expert, for every rank, and the rows this puts on the wire."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from weft.errors import InvalidArgument
from weft.placement import Placement

ROUTINGS = ("uniform", "perfect", "zipf", "one-hot")


class Routed(Protocol):
    """What a case says of its routing."""

    @property
    def ranks(self) -> int:
        """Ranks of the group."""

    @property
    def top_k(self) -> int:
        """Experts per token."""

    @property
    def experts(self) -> int:
        """Experts on all ranks."""

    @property
    def routing(self) -> str:
        """One of ROUTINGS, zipf:EXPONENT, or a file."""

    @property
    def seed(self) -> int:
        """Of the ids."""


def parse_routing(text: str) -> tuple[str, float]:
    """Return one of ROUTINGS, or what may be a file; and the exponent of zipf, 1 if not given.

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


def make_ids(sizes: Routed, tokens: int, rank: int) -> torch.Tensor:
    """Return int32 `[tokens, top_k]`: the experts of one rank's tokens, distinct within a row.

    uniform: at random.  perfect: token t's k-th expert lies on rank (rank + t + k) % ranks, so that
    every token reaches min(top_k, ranks) ranks and all ranks and experts get equal shares.
    zipf: expert popularity falls as 1 / place^s, places drawn once for the whole run.
    one-hot: every token picks experts 0 .. top_k - 1, the worst hot spot.  A file: its rows, dealt
    to the ranks in blocks of `tokens`, from the start again when it ends.

    Raises InvalidArgument for an unknown routing, an unreadable file, or sizes it cannot serve.
    """
    generator = torch.Generator().manual_seed(sizes.seed * 1_000_003 + rank * 1009 + tokens)
    word, exponent = parse_routing(sizes.routing)
    match word:
        case "uniform":
            return _draw(torch.ones(sizes.experts), sizes.top_k, tokens, generator)
        case "perfect":
            return _perfect(sizes, tokens, rank)
        case "zipf":
            places = places_of(sizes.experts, sizes.seed)
            return _draw(places.float() ** -exponent, sizes.top_k, tokens, generator)
        case "one-hot":
            return torch.arange(sizes.top_k, dtype=torch.int32).repeat(tokens, 1)
        case path:
            rows = _read(Path(path), sizes)
            return rows[(torch.arange(tokens) + rank * tokens) % len(rows)].contiguous()


def places_of(experts: int, seed: int) -> torch.Tensor:
    """int64 `[experts]`: each expert's place by popularity, 1 for the first."""
    return torch.randperm(experts, generator=torch.Generator().manual_seed(seed)) + 1


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Gumbel noise: the largest keys of log p + noise are a draw by p without replacement."""
    return -(-torch.rand(shape, generator=generator).clamp_(1e-20, 1 - 1e-7).log()).log()


def _draw(
    popularity: torch.Tensor, top_k: int, tokens: int, generator: torch.Generator
) -> torch.Tensor:
    """Sample without replacement."""
    keys = popularity.log() + gumbel((tokens, len(popularity)), generator)
    return keys.topk(top_k, dim=1).indices.to(torch.int32)


def _perfect(sizes: Routed, tokens: int, rank: int) -> torch.Tensor:
    """Walk over the ranks with k, and over each rank's experts with every full turn."""
    ranks, top_k = sizes.ranks, sizes.top_k
    placement = Placement.blocks(sizes.experts, ranks)
    owned = [placement.experts_of(owner) for owner in range(ranks)]
    turns = -(-top_k // ranks)
    if (fewest := min(len(experts) for experts in owned)) < turns:
        raise InvalidArgument(
            f"routing perfect: top_k={top_k} over {ranks} ranks needs {turns} experts on each, "
            f"and {sizes.experts} experts leave {fewest} on one; use --routing uniform"
        )
    first = torch.tensor([experts[0] for experts in owned])
    count = torch.tensor([len(experts) for experts in owned])
    start = (torch.arange(tokens) + rank).unsqueeze(1)
    k = torch.arange(top_k)
    owner = (start + k) % ranks
    local = (start // ranks * turns + k // ranks) % count[owner]
    return (first[owner] + local).to(torch.int32)


def _read(path: Path, sizes: Routed) -> torch.Tensor:
    """Return the ids of a routing file, checked: int32 `[rows, top_k]`, -1 for no expert."""
    if path.suffix not in (".npy", ".json"):
        raise InvalidArgument(
            f"routing {str(path)!r}: choose one of {', '.join(ROUTINGS)}, "
            "or the path of a .npy or .json file with ids [rows, top_k]"
        )
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
        else:
            array = np.asarray(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"routing file {path} cannot be read: {error}") from error
    wanted = f"integer ids [rows, {sizes.top_k}]"
    if array.ndim != 2 or array.dtype.kind not in "iu" or not len(array):
        raise InvalidArgument(
            f"routing file {path} holds {array.dtype} {list(array.shape)}; it must hold {wanted}"
        )
    if array.shape[1] != sizes.top_k:
        raise InvalidArgument(
            f"routing file {path} has {array.shape[1]} ids per row; top_k is {sizes.top_k}"
        )
    if array.min() < -1 or array.max() >= sizes.experts:
        raise InvalidArgument(
            f"routing file {path} has ids {array.min()}..{array.max()}; "
            f"allowed: -1 (no expert) and 0..{sizes.experts - 1}"
        )
    ordered = np.sort(array, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    if twice.any():
        raise InvalidArgument(
            f"routing file {path}: row {int(twice.argmax())} names an expert twice; "
            "the ids of a row must be distinct"
        )
    return torch.from_numpy(array.astype(np.int32))


def chosen(ids_of_rank: list[torch.Tensor]) -> int:
    """Ids that name an expert, most over ranks. `ids_of_rank[r]` is rank r's `[tokens, top_k]`."""
    return max(int((ids >= 0).sum()) for ids in ids_of_rank)


def busiest(rows: torch.Tensor) -> int:
    """Rows that leave or enter the busiest rank, whichever is more; rows: `[from, to]`."""
    remote = rows.clone().fill_diagonal_(0)
    return int(torch.maximum(remote.sum(dim=1), remote.sum(dim=0)).max())


def token_rows(ids_of_rank: list[torch.Tensor], experts: int) -> torch.Tensor:
    """Return int64 `[ranks, ranks]`: the token rows that rank i (row) sends to rank j (column).

    A row goes once to each rank however many of its experts are there.
    """
    ranks = len(ids_of_rank)
    owner = torch.tensor(Placement.blocks(experts, ranks).ranks)
    rows = torch.zeros(ranks, ranks, dtype=torch.int64)
    for source, ids in enumerate(ids_of_rank):
        owners = torch.where(ids >= 0, owner[ids.long().clamp_min(0)], ranks)
        hit = torch.zeros(len(ids), ranks + 1, dtype=torch.bool).scatter_(1, owners, True)
        rows[source] = hit[:, :ranks].sum(dim=0)
    return rows


def choice_rows(ids_of_rank: list[torch.Tensor], experts: int) -> torch.Tensor:
    """Return int64 `[ranks, ranks]`: choices by rank i (row) of experts of rank j (column)."""
    ranks = len(ids_of_rank)
    owner = torch.tensor((*Placement.blocks(experts, ranks).ranks, -1))
    rows = torch.zeros(ranks, ranks, dtype=torch.int64)
    for source, ids in enumerate(ids_of_rank):
        owners = owner[ids.long()]
        rows[source] = torch.bincount(owners[owners >= 0], minlength=ranks)
    return rows
