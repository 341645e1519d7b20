# SPDX-License-Identifier: Apache-2.0
"""`weft bench moe`: dispatch and combine of the all-to-all by rank.

All numbers are chosen so that every sum is exact in fp32 in whatever order it is taken (values of
eight bits, weights in 64ths, scales that are powers of two). So
what arrives and what comes back must equal `weft.reference` to the last bit. Where rows are
quantised, sums are rounded; weft adds in rank order, so bits agree there too.
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
from weft.bench.harness import TIMEOUT, Calls, Measured, Trial, Trials, poison, settle, unlike_row
from weft.bench.routing import PairCase, make_ids
from weft.errors import InvalidArgument
from weft.group import Group
from weft.placement import Placement

SCALE_GROUP = 128  # elements of an fp8 payload that share one float32 scale
_SCALE_BYTES = {"fp8": 4 / SCALE_GROUP, "mxfp8": 1 / 32}  # of a row's element


def row_bytes(hidden: int, itemsize: int, kind: str | None) -> int:
    """Bytes of one row on the wire: kind None, "fp8" or "mxfp8"."""
    return hidden * itemsize if kind is None else hidden + int(hidden * _SCALE_BYTES[kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class MoECase(PairCase):
    """Pairs of dispatch and combine.

    payload: "bf16" sends rows of `dtype`; "fp8" sends float8_e4m3fn with float32 scales per 128.
    combine, combine_dtype, quantize: as in AllToAll.
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
        AllToAllConfig.of(ranks=self.ranks, **self.sizes(self.capacity), **self.options())
        make_ids(self, max(self.tokens), 0)

    def sizes(self, max_tokens: int) -> dict[str, Any]:
        """What any exchange of these rows is made for."""
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
        """How weft moves them."""
        return {name: getattr(self, name) for name in ("combine", "combine_dtype", "quantize")}

    def comparable(self) -> MoECase | None:
        """What other libraries are asked for, so that equal work is compared.

        They send fp8 as numbers and float32 scales, which is also what quantize="fp8" sends; None
        for mxfp8. Their rows come back in `dtype`, also where ours come back as fp8.
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
        """What goes out and what comes back, in words."""
        if self.payload == "fp8":
            out = "fp8 + scales out"
        elif self.quantize:
            out = f"{self.quantize} + scales out, quantised by dispatch"
        else:
            out = f"{self.dtype} out"
        pushed = " (pushed)" if self.fp8_back or self.combine == "push" else ""
        return f"{out}, {'fp8 + scales' if self.fp8_back else self.dtype} back{pushed}"

    def title(self) -> str:
        sms = f", {self.num_sms} SMs" if self.num_sms else ""
        early = "" if self.programmatic_launch else ", no programmatic launch"
        return f"{self.sizes_text}, {self.wire}{sms}{early}"

    def trials(self, group: Group) -> Trials:
        """One exchange, with room for the largest size, for the whole sweep, as in a server."""
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

    def notes(self, found: Sequence[Measured]) -> list[str]:
        """The bytes that floor and wire count, where a row is not simply hidden x dtype."""
        row = f"A row is {self.sent_bytes} bytes out and {self.returned_bytes} bytes back"
        return [f"{row}; other libraries' rows come back as {self.dtype}."]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One rank's call: payload tensors `[tokens, ...]`, ids `[tokens, top_k]`, weights likewise."""

    payloads: tuple[torch.Tensor, ...]
    ids: torch.Tensor
    weights: torch.Tensor

    def to(self, device: torch.device) -> Inputs:
        """The same on a device."""
        planes = tuple(plane.to(device) for plane in self.payloads)
        return Inputs(planes, self.ids.to(device), self.weights.to(device))


def make_inputs(case: MoECase, tokens: int, rank: int) -> Inputs:
    """Return what a rank sends, on the CPU. Every rank can make every other rank's inputs."""
    generator = torch.Generator().manual_seed(case.seed_of(tokens, rank))
    x = torch.randn(tokens, case.hidden, generator=generator).bfloat16()
    shape = (tokens, case.top_k)
    weights = torch.randint(1, 17, shape, generator=generator).float() / 64
    payloads: tuple[torch.Tensor, ...] = (x.to(case.out_dtype),)
    if case.payload == "fp8":
        values, scales = reference.quantize(x, "mxfp8", SCALE_GROUP)  # by powers of two
        payloads = values, scales.float()
    return Inputs(payloads, make_ids(case, tokens, rank), weights)


class MoETrial(Trial):
    """An exchange with one set of inputs, and experts that return their rows."""

    variant = "onesided"  # the only one: the options determine it

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
            rows_of(self._delivered(self.inputs), case.out_dtype),
            self.inputs.ids,
            self.inputs.weights,
            self.placement,
            ranks=group.size,
            combine_dtype=case.combine_dtype,
        )

    def calls(self) -> Calls:
        """The pair. The experts' rows stay in place from the check before."""
        return Calls({"dispatch": self._dispatch, "combine": self._combine}, "pair")

    def check(self) -> str | None:
        """Send a round through poisoned memory."""
        settle(self.group)
        received = self._dispatch()
        # Pushed rows end in their owners' inboxes: this round leaves poison there.
        poison(self.exchange.output())
        self._combine()
        settle(self.group)  # nobody writes an inbox from here on: poison what that round left
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
        settle(self.group)  # comparing takes its time, and a peer in combine would not wait so long
        self._combine()
        found = self.compare()  # by all ranks, also where one has found something already
        return problem or found

    def compare(self) -> str | None:
        settle(self.group)
        return unlike_row("combined row", self.group.rank, self.out, self._expected)

    def facts(self) -> dict[str, Any]:
        """What the routing moves."""
        self.exchange.check()
        traffic = self.case.traffic([source.ids.cpu() for source in self.sources])
        return {"max_tokens": self.exchange.max_tokens, **traffic}

    def _dispatch(self) -> Received:
        inputs = self.inputs
        return self.exchange.dispatch(inputs.payloads, inputs.ids, inputs.weights)

    def _combine(self) -> torch.Tensor:
        return self.exchange.combine(out=self.out)

    def _delivered(self, source: Inputs) -> tuple[torch.Tensor, ...]:
        """What dispatch makes of a source's payloads on their way."""
        if self.case.quantize is None:
            return source.payloads
        return reference.quantize(source.payloads[0], self.case.quantize)

    def _compare_received(self, received: Received) -> str | None:
        """Return how what arrived differs from the reference, or None."""
        rank, tokens = self.group.rank, self.tokens
        counts = received.counts.tolist()
        if counts != [tokens] * self.group.size:
            return f"rank {rank}: counts are {counts}, every rank sent {tokens} tokens"
        if bool((received.ids[:, tokens:] >= 0).any()):
            return f"rank {rank}: slots beyond {tokens} tokens still hold ids"
        wanted = reference.dispatch(
            [tuple(p.view(torch.uint8) for p in self._delivered(each)) for each in self.sources],
            [source.ids for source in self.sources],
            [source.weights for source in self.sources],
            self.placement,
            rank=rank,
            max_tokens=tokens,
        )
        here = wanted.ids >= 0
        carries = here.any(dim=2, keepdim=True)  # a slot without a token may hold anything
        weights = torch.where(here, received.weights[:, :tokens], 0.0)
        pairs = [
            ("ids", received.ids[:, :tokens], wanted.ids),
            ("weights", weights, wanted.weights),
        ]
        for index, (have, want) in enumerate(zip(received.payloads, wanted.payloads, strict=True)):
            arrived = torch.where(carries, have[:, :tokens].view(torch.uint8), 0)
            pairs.append((f"bytes of payload {index}", arrived, want))
        for name, have, want in pairs:
            for source in range(self.group.size):
                what = f"{name} from rank {source}"
                if problem := unlike_row(what, rank, have[source], want[source]):
                    return problem
        return None


def rows_of(payloads: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return payloads `[..., hidden]` as rows of `dtype`: fp8 values are multiplied by their
    scales. That is exact where these are powers of two, as in an fp8 payload and in mxfp8."""
    return payloads[0] if len(payloads) == 1 else reference.dequantize(*payloads).to(dtype)
