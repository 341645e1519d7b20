# SPDX-License-Identifier: Apache-2.0
"""`weft bench lowlatency`: dispatch and combine of the low-latency all-to-all.

The experts return their rows, dequantized. So received rows and combined sums must equal
`weft.lowlatency.reference` bit by bit.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from weft.bench.harness import (
    TIMEOUT,
    Calls,
    Trial,
    Trials,
    first_row_difference,
    poison,
    synchronize_ranks,
)
from weft.bench.routing import PairCase, choice_rows, make_ids, token_rows
from weft.group import Group
from weft.lowlatency import reference as low
from weft.lowlatency.config import LowLatencyConfig
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows, Handle
from weft.reference import dequantize

GROUP_SIZE = 128  # columns per scale


@dataclass(frozen=True, slots=True, kw_only=True)
class LowCase(PairCase):
    """Pairs of dispatch and combine, expert-major.

    Attributes:
        quantize: "fp8" or None.
        scale: As in LowLatencyAllToAll.
        reduce: As in LowLatencyAllToAll.
    """

    operator: ClassVar[str] = "lowlatency"
    checked: ClassVar[str] = "every row, scale and sum equals weft.lowlatency.reference bit by bit"

    routing: str = "perfect"
    quantize: str | None = "fp8"
    scale: str = "fp32_row"
    reduce: str = "receiver"

    def __post_init__(self) -> None:
        PairCase.__post_init__(self)
        # Both validate the case before any rank is started.
        _ = self.config
        make_ids(self, max(self.tokens), 0)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of LowLatencyAllToAll that determine sizes and results."""
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
        """The configuration of the operator."""
        return LowLatencyConfig.from_args(ranks=self.ranks, **self.options)

    @property
    def sent_bytes(self) -> int:
        return self.config.shape.sent_bytes

    @property
    def returned_bytes(self) -> int:
        return self.config.shape.back_bytes

    def title(self) -> str:
        out = f"{self.quantize} + {self.scale} scales" if self.quantize else self.dtype
        what = "fp8 + scales" if self.fp8_back else self.dtype
        per = "choice" if self.reduce == "receiver" else "rank"
        return f"{self.sizes_text}; {out} out, expert-major; {what} back, a row per {per}"

    def trials(self, group: Group) -> Trials:
        """Yield a trial per size. All use one operator."""
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
        """Return one row per choice if the receiver reduces, otherwise one per rank."""
        rows = choice_rows if self.reduce == "receiver" else token_rows
        return rows(ids_of_rank, self.experts)


class LowTrial(Trial):
    """An all-to-all with one set of inputs."""

    variant = "default"  # the only variant

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
        """Return the pair. The experts' rows stay in place from the check."""
        return Calls({"dispatch": self._dispatch, "combine": self._combine}, "pair")

    def _dispatch(self) -> ExpertRows:
        received = self.a2a.dispatch(self.x, self.own_ids, self.weights)
        self._handle = received.handle
        return received

    def _combine(self) -> None:
        assert self._handle is not None
        self.a2a.combine(self.y, self.own_ids, self.weights, self._handle, self.out)

    def check(self) -> str | None:
        """Run a pair on poisoned memory, and return a difference from the reference, or None."""
        for slot in self.a2a.slots:
            poison(slot.x)
        self.poison()
        received = self._dispatch()
        problem = self._compare_rows(received)
        self.y.copy_(self._dequantize(received))
        synchronize_ranks(self.group)  # the comparison takes longer than a peer waits in combine
        self._combine()
        result = self.compare()  # collective, so it also runs after a problem
        return problem or result

    def compare(self) -> str | None:
        synchronize_ranks(self.group)
        rows, scales = self._quantize_own()
        rows = (rows if scales is None else dequantize(rows, scales)).to(self.x.dtype)
        expected = low.combine(
            rows[:, None].expand(-1, self.case.top_k, -1),
            self.own_ids,
            self.weights,
            self.a2a.placement,
            reduce=self.case.reduce,
            combine_dtype=self.case.combine_dtype,
        )
        return first_row_difference("sum", self.group.rank, self.out, expected)

    def facts(self) -> dict[str, Any]:
        """Return the bytes that the routing moves."""
        self.a2a.check()
        return self.case.traffic(self.ids)

    def _compare_rows(self, received: ExpertRows) -> str | None:
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
        synchronize_ranks(self.group)
        rank = f"rank {self.group.rank}"
        if not torch.equal(received.counts, expected.counts):
            return f"{rank}: counts are {received.counts.tolist()}, not {expected.counts.tolist()}"
        valid = self._valid_rows(received)
        if not torch.equal(
            received.x.view(torch.uint8)[valid], expected.x.view(torch.uint8)[valid]
        ):
            return f"{rank}: rows of experts differ from the reference"
        if expected.scales is not None and received.scales is not None:
            scales = low.unpack_scales(received.scales, expected.scales.shape[2])
            if not torch.equal(scales[valid], expected.scales[valid]):
                return f"{rank}: scales differ from the reference"
        return None

    def _valid_rows(self, received: ExpertRows) -> torch.Tensor:
        places = torch.arange(received.x.shape[1], device=received.x.device)
        return places[None] < received.counts[:, None]

    def _quantize_own(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return low.delivered_rows(self.x, self.case.quantize, GROUP_SIZE, self.case.scale)

    def _dequantize(self, received: ExpertRows) -> torch.Tensor:
        """Return the received rows in the output's dtype, zeros in unused slots."""
        rows = received.x.float()
        if received.scales is not None:
            blocks = self.a2a.config.shape.blocks
            rows = dequantize(received.x, low.unpack_scales(received.scales, blocks))
        return torch.where(self._valid_rows(received)[..., None], rows, 0.0).to(self.y.dtype)
