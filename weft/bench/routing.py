"""Which token goes to which expert, for every rank, and the bytes this puts on the wire."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from weft.bench.cases import ROUTERS, Settings
from weft.errors import InvalidArgument
from weft.ops.placement import Placement


def make_ids(settings: Settings, tokens: int, rank: int) -> torch.Tensor:
    """Return int32 `[tokens, top_k]`: the experts of one rank's tokens, distinct within a row.

    random: uniform.  perfect: token t's k-th expert lies on rank (rank + t + k) % ranks, so that
    every token reaches min(top_k, ranks) ranks and all ranks and experts get equal shares.
    zipf: expert popularity falls as 1 / place, places drawn once for the whole run.
    one-hot: every token picks experts 0 .. top_k - 1, the worst hot spot.  A file: its rows, dealt
    to the ranks in blocks of `tokens`, from the start again when it ends.

    Raises InvalidArgument for an unknown router, an unreadable file, or sizes it cannot serve.
    """
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + rank * 1009 + tokens)
    match settings.router:
        case "random":
            return _draw(torch.ones(settings.experts), settings.top_k, tokens, generator)
        case "perfect":
            return _perfect(settings, tokens, rank)
        case "zipf":
            places = torch.randperm(
                settings.experts, generator=torch.Generator().manual_seed(settings.seed)
            )
            return _draw(1.0 / (places + 1), settings.top_k, tokens, generator)
        case "one-hot":
            return torch.arange(settings.top_k, dtype=torch.int32).repeat(tokens, 1)
        case path:
            rows = _read(Path(path), settings)
            return rows[(torch.arange(tokens) + rank * tokens) % len(rows)].contiguous()


def _draw(
    popularity: torch.Tensor, top_k: int, tokens: int, generator: torch.Generator
) -> torch.Tensor:
    """Sample without replacement: the largest keys of log p + Gumbel noise."""
    noise = torch.rand(tokens, len(popularity), generator=generator).clamp_(1e-20, 1 - 1e-7)
    keys = popularity.log() - (-noise.log()).log()
    return keys.topk(top_k, dim=1).indices.to(torch.int32)


def _perfect(settings: Settings, tokens: int, rank: int) -> torch.Tensor:
    """Walk over the ranks with k, and over each rank's experts with every full turn."""
    ranks, top_k = settings.ranks, settings.top_k
    placement = Placement.blocks(settings.experts, ranks)
    owned = [placement.experts_of(owner) for owner in range(ranks)]
    turns = -(-top_k // ranks)
    if (fewest := min(len(experts) for experts in owned)) < turns:
        raise InvalidArgument(
            f"router perfect: top_k={top_k} over {ranks} ranks needs {turns} experts on each rank, "
            f"and {settings.experts} experts leave {fewest} on one; use --router random"
        )
    first = torch.tensor([experts[0] for experts in owned])
    count = torch.tensor([len(experts) for experts in owned])
    start = (torch.arange(tokens) + rank).unsqueeze(1)
    k = torch.arange(top_k)
    owner = (start + k) % ranks
    local = (start // ranks * turns + k // ranks) % count[owner]
    return (first[owner] + local).to(torch.int32)


def _read(path: Path, settings: Settings) -> torch.Tensor:
    """Return the ids of a router file, checked: int32 `[rows, top_k]`, -1 for no expert."""
    if path.suffix not in (".npy", ".json"):
        raise InvalidArgument(
            f"router {str(path)!r}: choose one of {', '.join(ROUTERS)}, "
            "or the path of a .npy or .json file with ids [rows, top_k]"
        )
    try:
        if path.suffix == ".npy":
            array = np.load(path, allow_pickle=False)
        else:
            array = np.asarray(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"router file {path} cannot be read: {error}") from error
    wanted = f"integer ids [rows, {settings.top_k}]"
    if array.ndim != 2 or array.dtype.kind not in "iu" or not len(array):
        raise InvalidArgument(
            f"router file {path} holds {array.dtype} {list(array.shape)}; it must hold {wanted}"
        )
    if array.shape[1] != settings.top_k:
        raise InvalidArgument(
            f"router file {path} has {array.shape[1]} ids per row; top_k is {settings.top_k}"
        )
    if array.min() < -1 or array.max() >= settings.experts:
        raise InvalidArgument(
            f"router file {path} has ids {array.min()}..{array.max()}; "
            f"allowed: -1 (no expert) and 0..{settings.experts - 1}"
        )
    ordered = np.sort(array, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1)
    if twice.any():
        raise InvalidArgument(
            f"router file {path}: row {int(twice.argmax())} names an expert twice; "
            "the ids of a row must be distinct"
        )
    return torch.from_numpy(array.astype(np.int32))


@dataclass(frozen=True, slots=True)
class Traffic:
    """Rows that one call moves, counted from the routing.

    chosen: tokens x top_k that name an expert, most over ranks.
    wire: token rows that leave or enter the busiest rank, whichever is more; a row goes once to
    each remote rank however many experts it has there.
    """

    chosen: int
    wire: int


def traffic_of(ids_of_rank: list[torch.Tensor], experts: int) -> Traffic:
    """Count the rows between ranks. `ids_of_rank[r]` is rank r's int `[tokens, top_k]`."""
    rows = token_rows(ids_of_rank, experts)
    rows.fill_diagonal_(0)
    return Traffic(
        chosen=max(int((ids >= 0).sum()) for ids in ids_of_rank),
        wire=int(torch.maximum(rows.sum(dim=1), rows.sum(dim=0)).max()),
    )


def token_rows(ids_of_rank: list[torch.Tensor], experts: int) -> torch.Tensor:
    """Return int64 `[ranks, ranks]`: the token rows that rank i (row) sends to rank j (column)."""
    ranks = len(ids_of_rank)
    owner = torch.tensor(Placement.blocks(experts, ranks).ranks)
    rows = torch.zeros(ranks, ranks, dtype=torch.int64)
    for source, ids in enumerate(ids_of_rank):
        owners = torch.where(ids >= 0, owner[ids.long().clamp_min(0)], ranks)
        hit = torch.zeros(len(ids), ranks + 1, dtype=torch.bool).scatter_(1, owners, True)
        rows[source] = hit[:, :ranks].sum(dim=0)
    return rows
