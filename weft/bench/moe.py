# SPDX-License-Identifier: Apache-2.0
"""`weft bench moe`: dispatch and combine of the rank-major all-to-all.

The inputs have eight significant bits, weights that are multiples of 1/64 and power-of-two scales,
so that every sum is exact in fp32 in any order. Received and combined rows must therefore be
bitwise equal to `weft.reference`. With quantized rows, sums are rounded, but weft adds in rank
order, so the results are bitwise equal, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from weft import reference
from weft.alltoall.config import AllToAllConfig, AllToAllSpec, Payload
from weft.alltoall.operator import AllToAll
from weft.alltoall.received import Received
from weft.bench.harness import (
    TIMEOUT,
    Measurement,
    TimedCall,
    Trial,
    Trials,
    describe_first_difference,
    poison,
    synchronize_ranks,
)
from weft.bench.routing import PairCase, generate_ids
from weft.errors import InvalidArgument
from weft.group import Group
from weft.placement import Placement

SCALE_GROUP = 128  # elements of an fp8 payload per float32 scale
_SCALE_BYTES = {"fp8": 4 / SCALE_GROUP, "mxfp8": 1 / 32}  # per element


def row_bytes(hidden: int, itemsize: int, kind: str | None) -> int:
    """Return the bytes of one row and its scales; `kind` is None, "fp8" or "mxfp8"."""
    return hidden * itemsize if kind is None else hidden + int(hidden * _SCALE_BYTES[kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class MoECase(PairCase):
    """Parameters of a run of the rank-major all-to-all.

    Attributes:
        payload: "bf16" for rows of `dtype`; "fp8" for rows of float8_e4m3fn with a float32 scale
            per 128 elements.
        combine: See AllToAll.
        quantize: See AllToAll.
    """

    operator: ClassVar[str] = "moe"
    check_description: ClassVar[str] = (
        "received rows and combined rows equal weft.reference bit by bit"
    )

    routing: str = "uniform"
    payload: str = "bf16"
    combine: str | None = None
    quantize: str | None = None

    def __post_init__(self) -> None:
        PairCase.__post_init__(self)
        if self.payload == "fp8" and self.hidden % SCALE_GROUP:
            raise InvalidArgument(
                f"hidden is {self.hidden}; fp8 rows have one scale per {SCALE_GROUP}: "
                f"choose a multiple of {SCALE_GROUP}"
            )
        if self.payload == "fp8" and self.quantize:
            raise InvalidArgument(
                f"quantize is {self.quantize!r} and the payload is fp8 already: choose one of them"
            )
        sizes = self.sizes(self.capacity)
        AllToAllConfig.from_spec(AllToAllSpec(ranks=self.ranks, **sizes, **self.options()))
        generate_ids(self, max(self.tokens), 0)  # validates the routing

    def sizes(self, max_tokens: int) -> dict[str, Any]:
        """Return the arguments of AllToAll that determine its sizes."""
        payloads = None
        if self.payload == "fp8":
            scales = Payload((self.hidden // SCALE_GROUP,), torch.float32)
            payloads = (Payload((self.hidden,), torch.float8_e4m3fn), scales)
        return {
            "max_tokens": max_tokens,
            "top_k": self.top_k,
            "num_experts": self.experts,
            "hidden": self.hidden,
            "dtype": self.out_dtype,
            "payloads": payloads,
        }

    def options(self) -> dict[str, Any]:
        """Return the other arguments of AllToAll that affect the results."""
        return {name: getattr(self, name) for name in ("combine", "combine_dtype", "quantize")}

    def baseline_case(self) -> MoECase | None:
        """Return the equivalent case for other libraries, or None for mxfp8.

        Other libraries send fp8 rows as values and float32 scales, like quantize="fp8". They
        combine rows of `dtype`, even if weft combines fp8 rows.
        """
        if self.quantize == "mxfp8":
            return None
        payload = "fp8" if self.quantize else self.payload
        return replace(self, payload=payload, combine=None, combine_dtype=None, quantize=None)

    @property
    def sent_bytes(self) -> int:
        kind = "fp8" if self.payload == "fp8" else self.quantize
        return row_bytes(self.hidden, self.out_dtype.itemsize, kind)

    @property
    def returned_bytes(self) -> int:
        return row_bytes(self.hidden, self.out_dtype.itemsize, self.combine_dtype)

    @property
    def row_formats(self) -> str:
        """Formats of dispatched and combined rows, for titles."""
        if self.payload == "fp8":
            out = "fp8 + scales out"
        elif self.quantize:
            out = f"{self.quantize} + scales out, quantized by dispatch"
        else:
            out = f"{self.dtype} out"
        pushed = " (pushed)" if self.combines_fp8 or self.combine == "push" else ""
        return f"{out}, {'fp8 + scales' if self.combines_fp8 else self.dtype} back{pushed}"

    def describe(self) -> str:
        sms = f", {self.num_sms} SMs" if self.num_sms else ""
        pdl = "" if self.programmatic_launch else ", no programmatic launch"
        return f"{self.sizes_title}, {self.row_formats}{sms}{pdl}"

    def trials(self, group: Group) -> Trials:
        """Yield a trial per size, all with one all-to-all for the largest size, as in a server."""
        exchange = AllToAll(
            group,
            **self.sizes(self.capacity),
            **self.options(),
            timeout=TIMEOUT,
            num_sms=self.num_sms,
            programmatic_launch=self.programmatic_launch,
            profile=self.profile,
        )
        with contextlib.closing(exchange):
            for tokens in self.tokens:
                yield MoETrial(group, self, exchange, tokens)

    def format_notes(self, measurements: Sequence[Measurement]) -> list[str]:
        """Return the bytes per row."""
        row = f"A row is {self.sent_bytes} bytes out and {self.returned_bytes} bytes back"
        return [f"{row}; other libraries' rows come back as {self.dtype}."]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of one rank.

    Attributes:
        payloads: `[tokens, ...]`.
        ids: int32 `[tokens, top_k]`.
        weights: float32 `[tokens, top_k]`.
    """

    payloads: tuple[torch.Tensor, ...]
    ids: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> Inputs:
        """Copy the inputs to a device."""
        payloads = tuple(payload.to(device) for payload in self.payloads)
        return Inputs(payloads, self.ids.to(device), self.weights.to(device))


def generate_inputs(case: MoECase, tokens: int, rank: int) -> Inputs:
    """Generate the inputs of any rank on the CPU."""
    generator = torch.Generator().manual_seed(case.row_seed(tokens, rank))
    x = torch.randn(tokens, case.hidden, generator=generator).bfloat16()
    shape = (tokens, case.top_k)
    weights = torch.randint(1, 17, shape, generator=generator).float() / 64
    payloads: tuple[torch.Tensor, ...] = (x.to(case.out_dtype),)
    if case.payload == "fp8":
        values, scales = reference.quantize(x, "mxfp8", SCALE_GROUP)  # scales are powers of two
        payloads = values, scales.float()
    return Inputs(payloads, generate_ids(case, tokens, rank), weights)


class MoETrial(Trial):
    """A dispatch and combine of one batch size with identity experts."""

    variant = "onesided"  # the only variant

    def __init__(self, group: Group, case: MoECase, exchange: AllToAll, tokens: int) -> None:
        self.group, self.case, self.exchange, self.tokens = group, case, exchange, tokens
        self.inputs_by_rank = [
            generate_inputs(case, tokens, rank).to(group.device) for rank in range(group.size)
        ]
        self.inputs = self.inputs_by_rank[group.rank]
        self.placement = Placement.blocks(case.experts, group.size)
        shape = (tokens, case.hidden)
        self.out = torch.empty(shape, dtype=case.out_dtype, device=group.device)
        self.outputs = [self.out]
        self._expected = reference.identity_round_trip(
            dequantize_rows(self._quantize(self.inputs), case.out_dtype),
            self.inputs.ids,
            self.inputs.weights,
            self.placement,
            ranks=group.size,
            combine_dtype=case.combine_dtype,
        )

    def timed_call(self) -> TimedCall:
        """Return the pair; its experts' results are those of the last check."""
        return TimedCall({"dispatch": self._dispatch, "combine": self._combine}, "pair")

    def check(self) -> str | None:
        synchronize_ranks(self.group)
        received = self._dispatch()
        # Combine may push rows into the inboxes of their owners; this round fills them with poison.
        poison(self.exchange.output())
        self._combine()
        synchronize_ranks(self.group)  # now no rank writes into the inboxes
        for payload in received.payloads:
            poison(payload)
        self.poison()
        received = self._dispatch()
        error = self._compare_received(received)
        payloads = tuple(payload[:, : self.tokens] for payload in received.payloads)
        ids, weights = received.ids[:, : self.tokens], received.weights[:, : self.tokens]
        rows = dequantize_rows(payloads, self.case.out_dtype)
        results = reference.identity_experts(
            Received((rows,), ids, weights, received.counts), self.case.out_dtype
        )
        self.exchange.output()[:, : self.tokens].copy_(results)
        synchronize_ranks(self.group)  # the comparison may take longer than the timeout of combine
        self._combine()
        combine_error = self.compare()  # collective, so it runs on every rank
        return error or combine_error

    def compare(self) -> str | None:
        synchronize_ranks(self.group)
        return describe_first_difference("combined row", self.group.rank, self.out, self._expected)

    def metadata(self) -> dict[str, Any]:
        """Return the capacity and the traffic of the routing."""
        self.exchange.check()
        ids_by_rank = [inputs.ids.cpu() for inputs in self.inputs_by_rank]
        traffic = self.case.count_traffic(ids_by_rank)
        return {"max_tokens": self.exchange.max_tokens, **traffic}

    def _dispatch(self) -> Received:
        inputs = self.inputs
        return self.exchange.dispatch(inputs.payloads, inputs.ids, inputs.weights)

    def _combine(self) -> torch.Tensor:
        return self.exchange.combine(out=self.out)

    def _quantize(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        """Return the payloads in the format in which dispatch sends them."""
        if self.case.quantize is None:
            return inputs.payloads
        return reference.quantize(inputs.payloads[0], self.case.quantize)

    def _compare_received(self, received: Received) -> str | None:
        """Describe the first difference between received rows and the reference, or return None."""
        rank, tokens = self.group.rank, self.tokens
        counts = received.counts.tolist()
        if counts != [tokens] * self.group.size:
            return f"rank {rank}: counts are {counts}, but every rank sent {tokens} tokens"
        if bool((received.ids[:, tokens:] >= 0).any()):
            return f"rank {rank}: slots beyond {tokens} tokens still hold ids"
        expected = reference.dispatch(
            [
                tuple(payload.view(torch.uint8) for payload in self._quantize(inputs))
                for inputs in self.inputs_by_rank
            ],
            [inputs.ids for inputs in self.inputs_by_rank],
            [inputs.weights for inputs in self.inputs_by_rank],
            self.placement,
            rank=rank,
            max_tokens=tokens,
        )
        is_local = expected.ids >= 0
        is_used = is_local.any(dim=2, keepdim=True)  # the contents of other slots are undefined
        weights = torch.where(is_local, received.weights[:, :tokens], 0.0)
        comparisons = [
            ("ids", received.ids[:, :tokens], expected.ids),
            ("weights", weights, expected.weights),
        ]
        for index, payload in enumerate(received.payloads):
            actual_bytes = torch.where(is_used, payload[:, :tokens].view(torch.uint8), 0)
            comparisons.append(
                (f"bytes of payload {index}", actual_bytes, expected.payloads[index])
            )
        for label, actual, reference_rows in comparisons:
            for source in range(self.group.size):
                name = f"{label} from rank {source}"
                if error := describe_first_difference(
                    name, rank, actual[source], reference_rows[source]
                ):
                    return error
        return None


def dequantize_rows(payloads: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return payloads `[..., hidden]` as rows of `dtype`, dequantized if they have scales.

    The result is exact, because fp8 payloads and mxfp8 have power-of-two scales.
    """
    return payloads[0] if len(payloads) == 1 else reference.dequantize(*payloads).to(dtype)
