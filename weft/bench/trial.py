"""One exchange under test: its inputs, its experts, and the check that comes before any timing.

All numbers are chosen so that every sum is exact in fp32 in whatever order it is taken (values of
eight bits, weights in 64ths, scales that are powers of two). So each backend, whatever its order,
must agree with `weft.reference` to the last bit, and so must the rows that come back. Where the
one-sided exchange quantises, its sums are rounded; it adds in rank order, so bits agree there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from weft.bench.cases import SCALE_GROUP, Settings
from weft.bench.clock import Phases
from weft.bench.routing import make_ids
from weft.ops import reference
from weft.ops.alltoall import AllToAll
from weft.ops.collective import CollectiveAllToAll
from weft.ops.placement import Placement
from weft.ops.received import Payload, Received

if TYPE_CHECKING:
    from weft.memory import Group

Exchange: TypeAlias = AllToAll | CollectiveAllToAll
_EXCHANGES: dict[str, type[AllToAll] | type[CollectiveAllToAll]] = {
    "onesided": AllToAll,
    "collective": CollectiveAllToAll,
}
_POISON = 0xFF  # as bytes a NaN in every float type that is sent


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


def make_inputs(settings: Settings, tokens: int, rank: int) -> Inputs:
    """Return what a rank sends, on the CPU. Every rank can make every other rank's inputs."""
    seed = (settings.seed * 7919 + tokens) * 64 + rank
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, settings.hidden, generator=generator).bfloat16()
    shape = (tokens, settings.top_k)
    weights = torch.randint(1, 17, shape, generator=generator).float() / 64
    fp8 = settings.payload == "fp8"
    payloads = _quantised(x) if fp8 else (x.to(settings.out_dtype),)
    return Inputs(payloads, make_ids(settings, tokens, rank), weights)


def make_exchange(
    group: Group, settings: Settings, backend: str, max_tokens: int, *, profile: bool = False
) -> Exchange:
    """Return an all-to-all of the settings' sizes. Collective.

    profile: let a one-sided one keep timelines (ops/timeline.py).
    """
    payloads = None
    if settings.payload == "fp8":
        scales = Payload((settings.hidden // SCALE_GROUP,), torch.float32)
        payloads = (Payload((settings.hidden,), torch.float8_e4m3fn), scales)
    kind = _EXCHANGES[backend]
    own: dict[str, Any] = {}
    if issubclass(kind, AllToAll):
        # Ranks that share cores may be late without being dead.
        own = {"timeout": 30.0, "num_sms": settings.num_sms}
        own["programmatic_launch"] = settings.programmatic_launch
        own["profile"] = profile
        own["combine_by"], own["quantize"] = settings.combine_by, settings.quantize
        own["halves"] = settings.halves
    return kind(
        group,
        max_tokens=max_tokens,
        top_k=settings.top_k,
        num_experts=settings.experts,
        hidden=settings.hidden,
        dtype=settings.out_dtype,
        payloads=payloads,
        **own,
    )


class Trial:
    """An exchange with one set of inputs. The same calls, in the same order, on every rank."""

    def __init__(self, group: Group, settings: Settings, exchange: Exchange, tokens: int) -> None:
        self.group, self.exchange, self.tokens = group, exchange, tokens
        settings = settings if isinstance(exchange, AllToAll) else settings.plain()
        self.settings = settings
        sources = (make_inputs(settings, tokens, rank) for rank in range(group.size))
        self.sources = [source.to(group.device) for source in sources]
        self.inputs = self.sources[group.rank]
        self.placement = Placement.blocks(settings.experts, group.size)
        shape = (tokens, settings.hidden)
        self.out = torch.empty(shape, dtype=settings.out_dtype, device=group.device)
        self._expected = reference.identity_round_trip(
            rows_of(self._delivered(self.inputs), settings.out_dtype),
            self.inputs.ids,
            self.inputs.weights,
            self.placement,
            ranks=group.size,
            combine_by=settings.combine_by,
        )

    def phases(self) -> Phases:
        """The calls to time. The experts' rows stay in place from the check before."""
        exchange, inputs = self.exchange, self.inputs
        if not (self.settings.halves and isinstance(exchange, AllToAll)):
            return Phases(self._dispatch, self._combine)
        halves = (
            lambda: exchange.dispatch_send(inputs.payloads, inputs.ids, inputs.weights),
            exchange.dispatch_recv,
            exchange.combine_send,
            lambda: exchange.combine_recv(out=self.out),
        )
        return Phases(self._dispatch, self._combine, halves)

    def check(self) -> str | None:
        """Send a round through poisoned memory; return what is wrong, or None. Collective.

        With halves, a second one goes through these.
        """
        problem = self._check_calls(self._dispatch, self._combine)
        if not self.settings.halves:
            return problem
        send, receive, give, fetch = self.phases().halves

        def dispatch() -> Received:
            send()
            return cast("Received", receive())

        def combine() -> object:
            give()
            return fetch()

        found = self._check_calls(dispatch, combine)
        return problem or (found and f"in halves, {found}")

    def _check_calls(
        self, dispatch: Callable[[], Received], combine: Callable[[], object]
    ) -> str | None:
        self._settle()
        received = dispatch()
        # Rows that are pushed home lie in peers' inboxes: this round leaves poison there.
        self.exchange.output().view(torch.uint8).fill_(_POISON)
        combine()
        self._settle()  # nobody writes an inbox from here on: poison what is left of that round
        for plane in received.payloads:
            plane.view(torch.uint8).fill_(_POISON)
        self.out.fill_(float("nan"))
        self._settle()
        received = dispatch()
        problem = self._compare(received)
        arrived = _first_tokens(received, self.tokens, self.settings.out_dtype)
        answers = reference.identity_experts(arrived, self.settings.out_dtype)
        self.exchange.output()[:, : self.tokens].copy_(answers)
        self._settle()  # comparing takes its time, and a peer in combine would not wait so long
        combine()
        self._settle()
        return problem or self.check_out()

    def poison_out(self) -> None:
        """Forget the combined rows: what `check_out` finds right from here on was written anew."""
        self.out.fill_(float("nan"))
        self._settle()

    def check_out(self) -> str | None:
        """Return how the combined rows differ from the reference, or None; also after timing."""
        got, want = self.out, self._expected
        unlike = (_bytes(got) != _bytes(want)).any(dim=1).nonzero()
        if not len(unlike):
            return None
        token = int(unlike[0])
        differ = (_bytes(got[token]) != _bytes(want[token])).view(-1, got.itemsize).any(dim=1)
        places = differ.nonzero().flatten()[:4]
        return (
            f"rank {self.group.rank}: combined row of token {token} of {self.tokens} is "
            f"{got[token, places].tolist()} in columns {places.tolist()}, the reference says "
            f"{want[token, places].tolist()}"
        )

    def _dispatch(self) -> Received:
        inputs = self.inputs
        return self.exchange.dispatch(inputs.payloads, inputs.ids, inputs.weights)

    def _combine(self) -> torch.Tensor:
        return self.exchange.combine(out=self.out)

    def _delivered(self, source: Inputs) -> tuple[torch.Tensor, ...]:
        """What dispatch makes of a source's payloads on their way."""
        if self.settings.quantize is None:
            return source.payloads
        return reference.quantize(source.payloads[0], self.settings.quantize)

    def _settle(self) -> None:
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        self.group.barrier()

    def _compare(self, received: Received) -> str | None:
        """Return how what arrived differs from the reference, or None."""
        rank, tokens = self.group.rank, self.tokens
        counts = received.counts.tolist()
        if counts != [tokens] * self.group.size:
            return f"rank {rank}: counts are {counts}, every rank sent {tokens} tokens"
        if bool((received.ids[:, tokens:] >= 0).any()):
            return f"rank {rank}: slots beyond {tokens} tokens still hold ids"
        wanted = reference.dispatch(
            [tuple(_bytes(p) for p in self._delivered(source)) for source in self.sources],
            [source.ids for source in self.sources],
            [source.weights for source in self.sources],
            self.placement,
            rank=rank,
            max_tokens=tokens,
        )
        here = wanted.ids >= 0
        carries = here.any(dim=2, keepdim=True)
        weights = torch.where(here, received.weights[:, :tokens], 0.0)
        pairs = [
            ("ids", received.ids[:, :tokens], wanted.ids),
            ("weights", weights, wanted.weights),
        ]
        for index, (have, want) in enumerate(zip(received.payloads, wanted.payloads, strict=True)):
            # What a slot without a token holds is nobody's business.
            arrived = torch.where(carries, _bytes(have[:, :tokens]), 0)
            pairs.append((f"bytes of payload {index}", arrived, want))
        for name, have, want in pairs:
            unlike = (have != want).any(dim=2).nonzero()
            if len(unlike):
                source, token = unlike[0].tolist()
                place = int((have[source, token] != want[source, token]).nonzero()[0])
                return (
                    f"rank {rank}: {name} of token {token} from rank {source} are "
                    f"{have[source, token, place : place + 4].tolist()} from place {place} on; "
                    f"sent were {want[source, token, place : place + 4].tolist()}"
                )
        return None


def rows_of(payloads: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return payloads `[..., hidden]` as rows of `dtype`: fp8 values are multiplied by their
    scales. That is exact where these are powers of two, as in an fp8 payload and in mxfp8."""
    if len(payloads) == 1:
        return payloads[0]
    values, scales = payloads
    groups = (*scales.shape, values.shape[-1] // scales.shape[-1])
    return (values.float().reshape(groups) * scales.float().unsqueeze(-1)).flatten(-2).to(dtype)


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x as float8_e4m3fn and float32 scales per SCALE_GROUP, powers of two."""
    grouped = x.float().reshape(len(x), -1, SCALE_GROUP)
    largest = grouped.abs().amax(dim=-1).clamp_min(2.0**-20)
    scales = (largest / torch.finfo(torch.float8_e4m3fn).max).log2().ceil().exp2()
    values = (grouped / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return values.flatten(-2), scales


def _first_tokens(received: Received, tokens: int, dtype: torch.dtype) -> Received:
    """Return the slots below `tokens`, decoded."""
    planes = tuple(plane[:, :tokens] for plane in received.payloads)
    ids, weights = received.ids[:, :tokens], received.weights[:, :tokens]
    return Received((rows_of(planes, dtype),), ids, weights, received.counts)


def _bytes(plane: torch.Tensor) -> torch.Tensor:
    """Return `[..., row]` as the row's bytes."""
    return plane.view(torch.uint8)
