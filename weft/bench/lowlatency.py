# SPDX-License-Identifier: Apache-2.0
"""`weft bench lowlatency`: dispatch and combine of the low-latency all-to-all.

Experts return their rows, as numbers that they can read. So what arrives and what combine
returns must equal `weft.lowlatency.reference` to the last bit.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from weft.bench.harness import TIMEOUT, Calls, Trial, Trials, poison, settle, unlike_row
from weft.bench.routing import PairCase, choice_rows, make_ids, token_rows
from weft.group import Group
from weft.lowlatency import reference as low
from weft.lowlatency.config import LowLatencyConfig
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows, Handle
from weft.reference import dequantize

GROUP_SIZE = 128  # columns that share a scale


@dataclass(frozen=True, slots=True, kw_only=True)
class LowCase(PairCase):
    """Pairs of dispatch and combine, expert-major.

    quantize: "fp8" or None.  scale, reduce: as in LowLatencyAllToAll.
    """

    operator: ClassVar[str] = "lowlatency"
    checked: ClassVar[str] = "every row, scale and sum equals weft.lowlatency.reference bit by bit"

    routing: str = "perfect"
    quantize: str | None = "fp8"
    scale: str = "fp32_row"
    reduce: str = "receiver"

    def __post_init__(self) -> None:
        PairCase.__post_init__(self)
        # Both refuse what cannot be, before any rank is started.
        _ = self.config
        make_ids(self, max(self.tokens), 0)

    @property
    def options(self) -> dict[str, Any]:
        """Sizes and what changes the meaning, as LowLatencyAllToAll takes them."""
        return {
            "max_tokens": self.capacity,
            "hidden": self.hidden,
            "top_k": self.top_k,
            "num_experts": self.experts,
            "quantize": self.quantize,
            "group_size": GROUP_SIZE,
            "scale": self.scale,
            "reduce": self.reduce,
            "combine_dtype": self.combine_dtype,
            "dtype": self.out_dtype,
        }

    @property
    def config(self) -> LowLatencyConfig:
        """What the ranks will share."""
        return LowLatencyConfig.of(ranks=self.ranks, **self.options)

    @property
    def sent_bytes(self) -> int:
        return self.config.shape.sent_bytes

    @property
    def returned_bytes(self) -> int:
        return self.config.shape.back_bytes

    def title(self) -> str:
        out = f"{self.quantize} + {self.scale} scales" if self.quantize else self.dtype
        what = "fp8 + scales" if self.fp8_back else self.dtype
        each = "choice" if self.reduce == "receiver" else "rank"
        return f"{self.sizes_text}; {out} out, expert-major; {what} back, a row for each {each}"

    def trials(self, group: Group) -> Trials:
        """One exchange with room for the largest size."""
        a2a = LowLatencyAllToAll(
            group,
            timeout=TIMEOUT,
            num_sms=self.num_sms,
            programmatic_launch=self.programmatic_launch,
            profile=self.profile,
            **self.options,
        )
        with contextlib.closing(a2a):
            for tokens in self.tokens:
                yield LowTrial(group, self, a2a, tokens)

    def rows_back(self, ids_of_rank: list[torch.Tensor]) -> torch.Tensor:
        """A receiver that adds takes a row for each choice."""
        rows = choice_rows if self.reduce == "receiver" else token_rows
        return rows(ids_of_rank, self.experts)


class LowTrial(Trial):
    """An exchange with one set of inputs."""

    variant = "default"  # the only one: the options determine it

    def __init__(self, group: Group, case: LowCase, a2a: LowLatencyAllToAll, tokens: int) -> None:
        self.group, self.case, self.a2a, self.tokens = group, case, a2a, tokens
        device = group.device
        self.ids = [make_ids(case, tokens, rank) for rank in range(group.size)]
        self.rows = [self._make_rows(rank).to(device) for rank in range(group.size)]
        self.x, self.own_ids = self.rows[group.rank], self.ids[group.rank].to(device)
        generator = torch.Generator().manual_seed(case.seed * 31 + group.rank)
        self.weights = torch.rand((tokens, case.top_k), generator=generator).to(device)
        self.out = torch.empty_like(self.x)
        self.outputs = [self.out]
        size = (a2a.num_local_experts, a2a.config.shape.rows, case.hidden)
        self.y = torch.zeros(size, dtype=self.x.dtype, device=device)
        self._handle: Handle | None = None

    def _make_rows(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.case.seed_of(self.tokens, rank))
        x = torch.randn(self.tokens, self.case.hidden, generator=generator)
        return x.to(self.case.out_dtype)

    def calls(self) -> Calls:
        """The pair; experts' rows are those of the check before."""
        return Calls({"dispatch": self._dispatch, "combine": self._combine}, "pair")

    def _dispatch(self) -> ExpertRows:
        got = self.a2a.dispatch(self.x, self.own_ids, self.weights)
        self._handle = got.handle
        return got

    def _combine(self) -> None:
        assert self._handle is not None
        self.a2a.combine(self.y, self.own_ids, self.weights, self._handle, self.out)

    def check(self) -> str | None:
        """Run a pair on poisoned memory; what is wrong with it, or None."""
        for slot in self.a2a._slots:
            poison(slot.x)
        self.poison()
        got = self._dispatch()
        problem = self._wrong_rows(got)
        self.y.copy_(self._readable(got))
        settle(self.group)  # comparing takes its time, and a peer in combine would not wait so long
        self._combine()
        found = self.compare()  # by all ranks, also where one has found something already
        return problem or found

    def compare(self) -> str | None:
        settle(self.group)
        numbers, scales = self._sent()
        rows = (numbers if scales is None else dequantize(numbers, scales)).to(self.x.dtype)
        wanted = low.combine(
            rows[:, None].expand(-1, self.case.top_k, -1),
            self.own_ids,
            self.weights,
            self.a2a.placement,
            reduce=self.case.reduce,
            combine_dtype=self.case.combine_dtype,
        )
        return unlike_row("sum", self.group.rank, self.out, wanted)

    def facts(self) -> dict[str, Any]:
        """What the routing moves."""
        self.a2a.check()
        return self.case.traffic(self.ids)

    def _wrong_rows(self, got: ExpertRows) -> str | None:
        expected = low.dispatch(
            self.rows,
            [ids.to(self.x.device) for ids in self.ids],
            self.a2a.placement,
            rank=self.group.rank,
            max_tokens=self.a2a.max_tokens,
            quantize=self.case.quantize,
            group_size=GROUP_SIZE,
            scale=self.case.scale,
        )
        settle(self.group)
        rank = f"rank {self.group.rank}"
        if not torch.equal(got.counts, expected.counts):
            return f"{rank}: counts are {got.counts.tolist()}, not {expected.counts.tolist()}"
        there = self._there(got)
        if not torch.equal(got.x.view(torch.uint8)[there], expected.x.view(torch.uint8)[there]):
            return f"{rank}: rows of experts differ from the reference"
        if expected.scales is not None and got.scales is not None:
            scales = low.unpack_scales(got.scales, expected.scales.shape[2])
            if not torch.equal(scales[there], expected.scales[there]):
                return f"{rank}: scales differ from the reference"
        return None

    def _there(self, got: ExpertRows) -> torch.Tensor:
        return torch.arange(got.x.shape[1], device=got.x.device)[None] < got.counts[:, None]

    def _sent(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return low.sent(self.x, self.case.quantize, GROUP_SIZE, self.case.scale)

    def _readable(self, got: ExpertRows) -> torch.Tensor:
        """Rows as experts read them; zeros where there is none."""
        rows = got.x.float()
        if got.scales is not None:
            blocks = self.a2a.config.shape.blocks
            rows = dequantize(got.x, low.unpack_scales(got.scales, blocks))
        return torch.where(self._there(got)[..., None], rows, 0.0).to(self.y.dtype)
