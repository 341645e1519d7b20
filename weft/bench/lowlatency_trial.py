"""One low-latency exchange under test: its inputs, its experts, and the check before any timing.

Experts return their rows, as numbers that they can read. So what arrives and what comes home must
equal `weft.ops.reference_lowlatency` to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from weft.bench.clock import Phases
from weft.bench.lowlatency_cases import LowSettings
from weft.bench.routing import make_ids, token_rows
from weft.ops import reference_lowlatency as low
from weft.ops.lowlatency import LowLatencyAllToAll
from weft.ops.lowlatency_results import ExpertRows, Handle
from weft.ops.placement import Placement
from weft.ops.reference import dequantize

if TYPE_CHECKING:
    from weft.memory import Group

_POISON = 0xFF


def make_low(group: Group, settings: LowSettings) -> LowLatencyAllToAll:
    """Return an all-to-all of the settings' sizes. Collective."""
    return LowLatencyAllToAll(
        group,
        settings.capacity,
        settings.hidden,
        settings.top_k,
        settings.experts,
        timeout=30.0,  # ranks that share cores may be late without being dead
        num_sms=settings.num_sms,
        programmatic_launch=settings.programmatic_launch,
        halves=settings.halves,
        profile=settings.profile,
        **settings.options,
    )


@dataclass(frozen=True, slots=True)
class LowTraffic:
    """Rows off the busiest rank: out, one for each token and rank; back, as `reduce` has it.

    chosen: tokens x top_k that name an expert, most over ranks.
    """

    chosen: int
    out: int
    back: int


def low_traffic(settings: LowSettings, ids_of_rank: list[torch.Tensor]) -> LowTraffic:
    """Count the rows between ranks."""
    out = token_rows(ids_of_rank, settings.experts)
    back = out.clone() if settings.reduce == "sender" else _choice_rows(settings, ids_of_rank)
    for rows in (out, back):
        rows.fill_diagonal_(0)
    return LowTraffic(
        chosen=max(int((ids >= 0).sum()) for ids in ids_of_rank),
        out=int(torch.maximum(out.sum(dim=1), out.sum(dim=0)).max()),
        back=int(torch.maximum(back.sum(dim=1), back.sum(dim=0)).max()),
    )


def _choice_rows(settings: LowSettings, ids_of_rank: list[torch.Tensor]) -> torch.Tensor:
    """int64 `[ranks, ranks]`: choices of rank i (row) of experts of rank j."""
    owner = torch.tensor((*Placement.blocks(settings.experts, settings.ranks).ranks, -1))
    rows = torch.zeros(settings.ranks, settings.ranks, dtype=torch.int64)
    for source, ids in enumerate(ids_of_rank):
        owners = owner[ids.long()]
        rows[source] = torch.bincount(owners[owners >= 0], minlength=settings.ranks)
    return rows


class LowTrial:
    """An exchange with one set of inputs. The same calls, in the same order, on every rank."""

    def __init__(
        self, group: Group, settings: LowSettings, a2a: LowLatencyAllToAll, tokens: int
    ) -> None:
        self.group, self.settings, self.a2a, self.tokens = group, settings, a2a, tokens
        device, moe = group.device, settings.as_moe
        self.ids = [make_ids(moe, tokens, rank) for rank in range(group.size)]
        self.rows = [self._make_rows(rank).to(device) for rank in range(group.size)]
        self.x, self.own_ids = self.rows[group.rank], self.ids[group.rank].to(device)
        generator = torch.Generator().manual_seed(settings.seed * 31 + group.rank)
        shape = (tokens, settings.top_k)
        self.weights = torch.rand(shape, generator=generator).to(device)
        self.out = torch.empty_like(self.x)
        own = a2a.num_local_experts
        size = (own, a2a._geometry.shape.rows, settings.hidden)
        self.y = torch.zeros(size, dtype=settings.out_dtype, device=device)
        self._handle: Handle | None = None

    def _make_rows(self, rank: int) -> torch.Tensor:
        seed = (self.settings.seed * 7919 + self.tokens) * 64 + rank
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.tokens, self.settings.hidden, generator=generator)
        return x.to(self.settings.out_dtype)

    def phases(self) -> Phases:
        """The calls to time; experts' rows are those of the check before."""
        return Phases(self._dispatch, self._combine)

    def _dispatch(self) -> ExpertRows:
        got = self.a2a.dispatch(self.x, self.own_ids, self.weights)
        self._handle = got.handle
        return got

    def _combine(self) -> None:
        assert self._handle is not None
        self.a2a.combine(self.y, self.own_ids, self.weights, self._handle, self.out)

    def check(self) -> str | None:
        """Run a pair on poisoned memory; what is wrong with it, or None. Collective."""
        for slot in self.a2a._rounds.slots:
            slot.x.view(torch.uint8).fill_(_POISON)
        self.out.fill_(float("nan"))
        got = self._dispatch()
        problem = self._wrong_rows(got)
        self.y.copy_(self._readable(got))
        self._combine()
        self._settle()
        self.a2a.check()
        return problem or self.compare()

    def compare(self) -> str | None:
        """What is wrong with the sums that lie in `out`, or None."""
        self._settle()
        numbers, scales = self._sent(self.x)
        rows = (numbers if scales is None else dequantize(numbers, scales)).to(self.x.dtype)
        wanted = low.combine(
            rows[:, None].expand(-1, self.settings.top_k, -1),
            self.own_ids,
            self.weights,
            self.a2a.placement,
            reduce=self.settings.reduce,
            combine_by=self.settings.combine_by,
        )
        wrong = (self.out.view(torch.uint8) != wanted.view(torch.uint8)).any(dim=1)
        if not bool(wrong.any()):
            return None
        return f"{int(wrong.sum())} of {self.tokens} sums differ, the first of token " + str(
            int(wrong.nonzero()[0])
        )

    def _wrong_rows(self, got: ExpertRows) -> str | None:
        expected = low.dispatch(
            self.rows,
            [ids.to(self.x.device) for ids in self.ids],
            self.a2a.placement,
            rank=self.group.rank,
            max_tokens=self.a2a.max_tokens,
            quant=self.settings.options["quant"],
            group_size=self.settings.group_size,
            scale=self.settings.scale,
        )
        self._settle()
        if not torch.equal(got.counts, expected.counts):
            return f"counts are {got.counts.tolist()}, not {expected.counts.tolist()}"
        there = torch.arange(got.x.shape[1], device=got.x.device)[None] < got.counts[:, None]
        if not torch.equal(got.x.view(torch.uint8)[there], expected.x.view(torch.uint8)[there]):
            return "rows of experts differ from the reference"
        if expected.scales is not None and got.scales is not None:
            scales = low.unpack_scales(got.scales, expected.scales.shape[2])
            if not torch.equal(scales[there], expected.scales[there]):
                return "scales differ from the reference"
        return None

    def _sent(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        settings = self.settings
        return low.sent(x, settings.options["quant"], settings.group_size, settings.scale)

    def _readable(self, got: ExpertRows) -> torch.Tensor:
        """Rows as experts read them; zeros where there is none."""
        there = torch.arange(got.x.shape[1], device=got.x.device)[None] < got.counts[:, None]
        rows = got.x.float()
        if got.scales is not None:
            blocks = self.a2a._geometry.shape.blocks
            rows = dequantize(got.x, low.unpack_scales(got.scales, blocks))
        return torch.where(there[..., None], rows, 0.0).to(self.y.dtype)

    def _settle(self) -> None:
        if self.x.device.type == "cuda":
            torch.cuda.synchronize()
