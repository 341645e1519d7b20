# SPDX-License-Identifier: Apache-2.0
"""`weft bench lowlatency`: dispatch and combine of the low-latency all-to-all.

The experts return their dequantized rows. Received rows and combined sums must be bitwise equal to
`weft.lowlatency.reference`.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from weft.bench.harness import (
    TIMEOUT,
    TimedCall,
    Trial,
    Trials,
    describe_first_difference,
    poison,
    synchronize_ranks,
)
from weft.bench.routing import PairCase, count_choice_rows, count_token_rows, generate_ids
from weft.group import Group
from weft.lowlatency import reference as low
from weft.lowlatency.config import LowLatencyConfig, LowLatencySpec
from weft.lowlatency.operator import LowLatencyAllToAll
from weft.lowlatency.results import ExpertRows, Handle
from weft.reference import dequantize

GROUP_SIZE = 128  # columns per scale


@dataclass(frozen=True, slots=True, kw_only=True)
class LowLatencyCase(PairCase):
    """Parameters of a run of the low-latency all-to-all.

    Attributes:
        quantize: "fp8" or None.
        scale: See LowLatencyAllToAll.
        reduce: See LowLatencyAllToAll.
    """

    operator: ClassVar[str] = "lowlatency"
    check_description: ClassVar[str] = (
        "every row, scale and sum equals weft.lowlatency.reference bit by bit"
    )

    routing: str = "perfect"
    quantize: str | None = "fp8"
    scale: str = "fp32_row"
    reduce: str = "sender"

    def __post_init__(self) -> None:
        PairCase.__post_init__(self)
        _ = self.config  # validates the sizes
        generate_ids(self, max(self.tokens), 0)  # validates the routing

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
        """Config of the operator."""
        return LowLatencyConfig.from_spec(LowLatencySpec(ranks=self.ranks, **self.options))

    @property
    def sent_bytes(self) -> int:
        return self.config.shape.sent_bytes

    @property
    def returned_bytes(self) -> int:
        return self.config.shape.back_bytes

    def describe(self) -> str:
        dispatched = f"{self.quantize} + {self.scale} scales" if self.quantize else self.dtype
        combined = "fp8 + scales" if self.combines_fp8 else self.dtype
        unit = "choice" if self.reduce == "receiver" else "rank"
        rows = f"{dispatched} out, expert-major; {combined} back, a row per {unit}"
        return f"{self.sizes_title}; {rows}"

    def trials(self, group: Group) -> Trials:
        """Yield a trial per size, all with one operator."""
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
                yield LowLatencyTrial(group, self, a2a, tokens)

    def returned_rows(self, ids_by_rank: list[torch.Tensor]) -> torch.Tensor:
        """Count one row per top-k entry if the receiver reduces, otherwise one per token."""
        count_rows = count_choice_rows if self.reduce == "receiver" else count_token_rows
        return count_rows(ids_by_rank, self.experts)


class LowLatencyTrial(Trial):
    """A dispatch and combine at one size."""

    variant = "default"  # the only variant

    def __init__(
        self, group: Group, case: LowLatencyCase, a2a: LowLatencyAllToAll, tokens: int
    ) -> None:
        self.group, self.case, self.a2a, self.tokens = group, case, a2a, tokens
        device = group.device
        self.ids_by_rank = [generate_ids(case, tokens, rank) for rank in range(group.size)]
        self.rows_by_rank = [self._generate_rows(rank).to(device) for rank in range(group.size)]
        self.x, self.local_ids = (
            self.rows_by_rank[group.rank],
            self.ids_by_rank[group.rank].to(device),
        )
        generator = torch.Generator().manual_seed(case.seed * 31 + group.rank)
        self.weights = torch.rand((tokens, case.top_k), generator=generator).to(device)
        self.out = torch.empty_like(self.x)
        self.outputs = [self.out]
        size = (a2a.num_local_experts, a2a.config.shape.rows, case.hidden)
        self.y = torch.zeros(size, dtype=self.x.dtype, device=device)
        self._handle: Handle | None = None

    def _generate_rows(self, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.case.row_seed(self.tokens, rank))
        x = torch.randn(self.tokens, self.case.hidden, generator=generator)
        return x.to(self.case.out_dtype)

    def timed_call(self) -> TimedCall:
        """Return the pair; its experts' results are those of the last check."""
        return TimedCall({"dispatch": self._dispatch, "combine": self._combine}, "pair")

    def _dispatch(self) -> ExpertRows:
        received = self.a2a.dispatch(self.x, self.local_ids, self.weights)
        self._handle = received.handle
        return received

    def _combine(self) -> None:
        assert self._handle is not None
        self.a2a.combine(self.y, self.local_ids, self.weights, self._handle, self.out)

    def check(self) -> str | None:
        for buffer in self.a2a.result_buffers:
            poison(buffer.x)
        self.poison()
        received = self._dispatch()
        error = self._compare_rows(received)
        self.y.copy_(self._dequantize(received))
        synchronize_ranks(self.group)  # the comparison may take longer than the timeout of combine
        self._combine()
        combine_error = self.compare()  # collective, so it runs on every rank
        return error or combine_error

    def compare(self) -> str | None:
        synchronize_ranks(self.group)
        rows, scales = self._quantize_inputs()
        rows = (rows if scales is None else dequantize(rows, scales)).to(self.x.dtype)
        expected = low.combine(
            rows[:, None].expand(-1, self.case.top_k, -1),
            self.local_ids,
            self.weights,
            self.a2a.placement,
            reduce=self.case.reduce,
            combine_dtype=self.case.combine_dtype,
        )
        return describe_first_difference("sum", self.group.rank, self.out, expected)

    def metadata(self) -> dict[str, Any]:
        """Return the traffic of the routing."""
        self.a2a.check()
        return self.case.count_traffic(self.ids_by_rank)

    def _compare_rows(self, received: ExpertRows) -> str | None:
        expected = low.dispatch(
            self.rows_by_rank,
            [ids.to(self.x.device) for ids in self.ids_by_rank],
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
        valid = self._valid_row_mask(received)
        if not torch.equal(
            received.x.view(torch.uint8)[valid], expected.x.view(torch.uint8)[valid]
        ):
            return f"{rank}: rows of experts differ from the reference"
        if expected.scales is not None and received.scales is not None:
            scales = low.unpack_scales(received.scales, expected.scales.shape[2])
            if not torch.equal(scales[valid], expected.scales[valid]):
                return f"{rank}: scales differ from the reference"
        return None

    def _valid_row_mask(self, received: ExpertRows) -> torch.Tensor:
        rows = torch.arange(received.x.shape[1], device=received.x.device)
        return rows[None] < received.counts[:, None]

    def _quantize_inputs(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return low.compute_delivered_rows(self.x, self.case.quantize, GROUP_SIZE, self.case.scale)

    def _dequantize(self, received: ExpertRows) -> torch.Tensor:
        """Return the received rows in the dtype of the output, with zeros in unused rows."""
        rows = received.x.float()
        if received.scales is not None:
            blocks = self.a2a.config.shape.blocks
            rows = dequantize(received.x, low.unpack_scales(received.scales, blocks))
        valid = self._valid_row_mask(received)
        return torch.where(valid[..., None], rows, 0.0).to(self.y.dtype)
