# SPDX-License-Identifier: Apache-2.0
"""`weft bench moe`: dispatch and combine of the rank-major all-to-all.

Inputs are chosen so that every sum is exact in fp32 in any order: values of eight bits, weights in
64ths, scales that are powers of two. Received and combined rows must therefore equal
`weft.reference` bit by bit. With quantized rows, sums are rounded, but weft adds in rank order, so
bits are equal as well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from weft import reference
from weft.alltoall.config import AllToAllConfig, Payload
from weft.alltoall.operator import AllToAll
from weft.alltoall.received import Received
from weft.bench.harness import (
    TIMEOUT,
    Calls,
    Measurement,
    Trial,
    Trials,
    first_row_difference,
    poison,
    synchronize_ranks,
)
from weft.bench.routing import PairCase, make_ids
from weft.errors import InvalidArgument
from weft.group import Group
from weft.placement import Placement

SCALE_GROUP = 128  # elements of an fp8 payload per float32 scale
_SCALE_BYTES = {"fp8": 4 / SCALE_GROUP, "mxfp8": 1 / 32}  # per element


def row_bytes(hidden: int, itemsize: int, kind: str | None) -> int:
    """Return the bytes of one row on the wire; `kind` is None, "fp8" or "mxfp8"."""
    return hidden * itemsize if kind is None else hidden + int(hidden * _SCALE_BYTES[kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class MoECase(PairCase):
    """Pairs of dispatch and combine.

    Attributes:
        payload: "bf16" sends rows of `dtype`; "fp8" sends float8_e4m3fn with float32 scales per
            128.
        combine: As in AllToAll.
        quantize: As in AllToAll.
    """

    operator: ClassVar[str] = "moe"
    checked: ClassVar[str] = "received rows and combined rows equal weft.reference bit by bit"

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
        AllToAllConfig.from_args(ranks=self.ranks, **self.sizes(self.capacity), **self.options())
        make_ids(self, max(self.tokens), 0)

    def sizes(self, max_tokens: int) -> dict[str, Any]:
        """Return the sizes of an exchange of these rows."""
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
        """Return the options of weft's all-to-all."""
        return {name: getattr(self, name) for name in ("combine", "combine_dtype", "quantize")}

    def comparable(self) -> MoECase | None:
        """Return the equivalent case for other libraries, or None for mxfp8.

        They send fp8 as values and float32 scales, as quantize="fp8" does. Their combined rows have
        `dtype`, even if ours are fp8.
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
    def wire(self) -> str:
        """Describe dispatched and combined rows."""
        if self.payload == "fp8":
            out = "fp8 + scales out"
        elif self.quantize:
            out = f"{self.quantize} + scales out, quantized by dispatch"
        else:
            out = f"{self.dtype} out"
        pushed = " (pushed)" if self.fp8_back or self.combine == "push" else ""
        return f"{out}, {'fp8 + scales' if self.fp8_back else self.dtype} back{pushed}"

    def title(self) -> str:
        sms = f", {self.num_sms} SMs" if self.num_sms else ""
        early = "" if self.programmatic_launch else ", no programmatic launch"
        return f"{self.sizes_text}, {self.wire}{sms}{early}"

    def trials(self, group: Group) -> Trials:
        """Yield a trial per size. All use one exchange of the largest size, as in a server."""
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

    def notes(self, measured: Sequence[Measurement]) -> list[str]:
        """Return the bytes per row that floor and wire count."""
        row = f"A row is {self.sent_bytes} bytes out and {self.returned_bytes} bytes back"
        return [f"{row}; other libraries' rows come back as {self.dtype}."]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of one rank: payloads `[tokens, ...]`, ids and weights `[tokens, top_k]`."""

    payloads: tuple[torch.Tensor, ...]
    ids: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> Inputs:
        """Return the inputs on a device."""
        planes = tuple(plane.to(device) for plane in self.payloads)
        return Inputs(planes, self.ids.to(device), self.weights.to(device))


def make_inputs(case: MoECase, tokens: int, rank: int) -> Inputs:
    """Return a rank's inputs, on the CPU. Every rank can generate every other rank's."""
    generator = torch.Generator().manual_seed(case.seed_of(tokens, rank))
    x = torch.randn(tokens, case.hidden, generator=generator).bfloat16()
    shape = (tokens, case.top_k)
    weights = torch.randint(1, 17, shape, generator=generator).float() / 64
    payloads: tuple[torch.Tensor, ...] = (x.to(case.out_dtype),)
    if case.payload == "fp8":
        values, scales = reference.quantize(x, "mxfp8", SCALE_GROUP)  # scales are powers of two
        payloads = values, scales.float()
    return Inputs(payloads, make_ids(case, tokens, rank), weights)


class MoETrial(Trial):
    """An exchange with one set of inputs, and experts that return their rows."""

    variant = "onesided"  # the only variant

    def __init__(self, group: Group, case: MoECase, exchange: AllToAll, tokens: int) -> None:
        self.group, self.case, self.exchange, self.tokens = group, case, exchange, tokens
        sources = (make_inputs(case, tokens, rank) for rank in range(group.size))
        self.sources = [source.to(group.device) for source in sources]
        self.inputs = self.sources[group.rank]
        self.placement = Placement.blocks(case.experts, group.size)
        shape = (tokens, case.hidden)
        self.out = torch.empty(shape, dtype=case.out_dtype, device=group.device)
        self.outputs = [self.out]
        self._expected = reference.identity_round_trip(
            rows_of(self._quantize(self.inputs), case.out_dtype),
            self.inputs.ids,
            self.inputs.weights,
            self.placement,
            ranks=group.size,
            combine_dtype=case.combine_dtype,
        )

    def calls(self) -> Calls:
        """Return the pair. The experts' rows stay in place from the check."""
        return Calls({"dispatch": self._dispatch, "combine": self._combine}, "pair")

    def check(self) -> str | None:
        """Run a round on poisoned memory, and return a difference from the reference, or None."""
        synchronize_ranks(self.group)
        received = self._dispatch()
        # Pushed rows are written into their owners' inboxes; this round leaves poison there.
        poison(self.exchange.output())
        self._combine()
        synchronize_ranks(
            self.group
        )  # no rank writes inboxes from here on: poison the received rows
        for plane in received.payloads:
            poison(plane)
        self.poison()
        received = self._dispatch()
        problem = self._compare_received(received)
        planes = tuple(plane[:, : self.tokens] for plane in received.payloads)
        ids, weights = received.ids[:, : self.tokens], received.weights[:, : self.tokens]
        rows = rows_of(planes, self.case.out_dtype)
        answers = reference.identity_experts(
            Received((rows,), ids, weights, received.counts), self.case.out_dtype
        )
        self.exchange.output()[:, : self.tokens].copy_(answers)
        synchronize_ranks(self.group)  # the comparison takes longer than a peer waits in combine
        self._combine()
        result = self.compare()  # collective, so it also runs after a problem
        return problem or result

    def compare(self) -> str | None:
        synchronize_ranks(self.group)
        return first_row_difference("combined row", self.group.rank, self.out, self._expected)

    def facts(self) -> dict[str, Any]:
        """Return the bytes that the routing moves."""
        self.exchange.check()
        traffic = self.case.traffic([source.ids.cpu() for source in self.sources])
        return {"max_tokens": self.exchange.max_tokens, **traffic}

    def _dispatch(self) -> Received:
        inputs = self.inputs
        return self.exchange.dispatch(inputs.payloads, inputs.ids, inputs.weights)

    def _combine(self) -> torch.Tensor:
        return self.exchange.combine(out=self.out)

    def _quantize(self, source: Inputs) -> tuple[torch.Tensor, ...]:
        """Return a rank's payloads as dispatch sends them."""
        if self.case.quantize is None:
            return source.payloads
        return reference.quantize(source.payloads[0], self.case.quantize)

    def _compare_received(self, received: Received) -> str | None:
        """Return a difference between received rows and the reference, or None."""
        rank, tokens = self.group.rank, self.tokens
        counts = received.counts.tolist()
        if counts != [tokens] * self.group.size:
            return f"rank {rank}: counts are {counts}, but every rank sent {tokens} tokens"
        if bool((received.ids[:, tokens:] >= 0).any()):
            return f"rank {rank}: slots beyond {tokens} tokens still hold ids"
        expected = reference.dispatch(
            [tuple(p.view(torch.uint8) for p in self._quantize(each)) for each in self.sources],
            [source.ids for source in self.sources],
            [source.weights for source in self.sources],
            self.placement,
            rank=rank,
            max_tokens=tokens,
        )
        is_local = expected.ids >= 0
        used = is_local.any(dim=2, keepdim=True)  # unused slots may hold anything
        weights = torch.where(is_local, received.weights[:, :tokens], 0.0)
        pairs = [
            ("ids", received.ids[:, :tokens], expected.ids),
            ("weights", weights, expected.weights),
        ]
        planes = zip(received.payloads, expected.payloads, strict=True)
        for index, (have, want) in enumerate(planes):
            got = torch.where(used, have[:, :tokens].view(torch.uint8), 0)
            pairs.append((f"bytes of payload {index}", got, want))
        for name, have, want in pairs:
            for source in range(self.group.size):
                what = f"{name} from rank {source}"
                if problem := first_row_difference(what, rank, have[source], want[source]):
                    return problem
        return None


def rows_of(payloads: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return payloads `[..., hidden]` as rows of `dtype`, dequantized by their scales if fp8.

    The result is exact if the scales are powers of two, as in an fp8 payload and in mxfp8.
    """
    return payloads[0] if len(payloads) == 1 else reference.dequantize(*payloads).to(dtype)
