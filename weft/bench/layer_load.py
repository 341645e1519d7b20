"""What a layer's routing puts on experts, memory and links: counted from the ids of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.bench.layer_cases import LayerSettings, make_correction, make_logits
from weft.bench.layer_weights import expert_bytes, shared_bytes
from weft.bench.routing import token_rows, traffic_of
from weft.moe.router import route_in_torch
from weft.ops.placement import Placement

SCALE_COLUMNS = 128  # of a row that travels as FP8, and 4 bytes for each
MX_COLUMNS = 32  # one byte for each


@dataclass(frozen=True, slots=True)
class Load:
    """One size's work.

    most, mean: rows of the fullest expert, and of all on average.   hit: experts that have rows.
    hbm_bytes: least bytes that the busiest rank moves through its memory: the weights of its
        experts that have rows and of the shared one, each row that arrives read once and answered
        once, its own tokens read and written once.
    wire_bytes: bytes off or onto the busiest rank, out and back, one row for each token and rank.
    """

    most: int
    mean: float
    hit: int
    hbm_bytes: int
    wire_bytes: int

    @property
    def imbalance(self) -> float:
        """Rows of the fullest expert over the mean."""
        return self.most / self.mean


def row_bytes(hidden: int, itemsize: int, kind: str | None) -> int:
    """Bytes of one row on the wire: kind None, "fp8" or "mxfp8"."""
    if kind is None:
        return hidden * itemsize
    scales = 4 * (hidden // SCALE_COLUMNS) if kind == "fp8" else hidden // MX_COLUMNS
    return hidden + scales


def load_of(settings: LayerSettings, tokens: int) -> Load:
    """Route every rank's logits on the CPU and count."""
    config, correction = settings.config, make_correction(settings)
    ids = [
        route_in_torch(config.routing, make_logits(settings, tokens, rank), correction).ids
        for rank in range(settings.ranks)
    ]
    return count(settings, ids)


def count(settings: LayerSettings, ids: list[torch.Tensor]) -> Load:
    """The load of given ids; `ids[r]` is rank r's `[tokens, top_k]`."""
    config, ranks = settings.config, settings.ranks
    experts, hidden, itemsize = config.routing.num_experts, config.hidden, config.dtype.itemsize
    rows = torch.bincount(torch.cat(ids).flatten().long(), minlength=experts)
    owner = torch.tensor(Placement.blocks(experts, ranks).ranks)
    hit = torch.bincount(owner, weights=(rows > 0).double(), minlength=ranks).long()
    arrivals = token_rows(ids, experts).sum(dim=0)
    sent = row_bytes(hidden, itemsize, settings.wire)
    answered = hidden * itemsize
    own = torch.tensor([len(each) for each in ids]) * 2 * answered
    memory = hit * expert_bytes(config, settings.dtype) + arrivals * (sent + answered) + own
    wire = traffic_of(ids, experts).wire
    back = row_bytes(hidden, itemsize, "fp8" if settings.combine_by == "fp8" else None)
    return Load(
        most=int(rows.max()),
        mean=float(rows.double().mean()),
        hit=int((rows > 0).sum()),
        hbm_bytes=int(memory.max()) + shared_bytes(config, settings.dtype),
        wire_bytes=wire * (sent + back),
    )
