"""`weft bench moe`: dispatch and combine of the all-to-all by rank.

All numbers are chosen so that every sum is exact in fp32 in whatever order it is taken (values of
eight bits, weights in 64ths, scales that are powers of two). So each backend, whatever its order,
must agree with `weft.reference` to the last bit, and so must the rows that come back. Where the
one-sided exchange quantises, its sums are rounded; it adds in rank order, so bits agree there too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, cast

import torch

from weft import reference
from weft.alltoall.collective import CollectiveAllToAll
from weft.alltoall.config import AllToAllConfig, Payload
from weft.alltoall.operator import AllToAll
from weft.alltoall.received import Received
from weft.bench.case import PairCase, choose, choose_backends
from weft.bench.check import poison, settle, unlike_row
from weft.bench.clock import Calls, Step
from weft.bench.limits import PAIR_FIXED_US, link_rate, pair_floor_us
from weft.bench.routing import busiest, chosen, make_ids, token_rows
from weft.errors import InvalidArgument
from weft.placement import Placement

if TYPE_CHECKING:
    from weft.bench.run import Measurement, Report
    from weft.memory import Group

Exchange: TypeAlias = AllToAll | CollectiveAllToAll
EXCHANGES: dict[str, type[AllToAll] | type[CollectiveAllToAll]] = {
    "onesided": AllToAll,
    "collective": CollectiveAllToAll,
}
BACKENDS = tuple(EXCHANGES)
PAYLOADS = ("bf16", "fp8")
COMBINES = ("pull", "push")
QUANTIZE = ("fp8", "mxfp8")  # AllToAll's quantize
SCALE_GROUP = 128  # elements of an fp8 payload that share one float32 scale
_SCALE_BYTES = {"fp8": 4 / SCALE_GROUP, "mxfp8": 1 / 32}  # of a row's element


def row_bytes(hidden: int, itemsize: int, kind: str | None) -> int:
    """Bytes of one row on the wire: kind None, "fp8" or "mxfp8"."""
    return hidden * itemsize if kind is None else hidden + int(hidden * _SCALE_BYTES[kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class MoECase(PairCase):
    """Pairs of dispatch and combine.

    payload: "bf16" sends rows of `dtype`; "fp8" sends float8_e4m3fn with float32 scales per 128.
    combine, combine_dtype, quantize: as in AllToAll.  split_phase: also time its phases.  All four
    are the one-sided backend's alone; what stands beside it runs without (`of_backend`).
    """

    operator: ClassVar[str] = "moe"
    checked: ClassVar[str] = "received rows and combined rows equal weft.reference bit by bit"

    routing: str = "uniform"
    backends: tuple[str, ...] = ("onesided",)
    payload: str = "bf16"
    combine: str | None = None
    quantize: str | None = None

    def __post_init__(self) -> None:
        PairCase.__post_init__(self)
        choose(
            payload=(self.payload, PAYLOADS),
            combine=(self.combine, (None, *COMBINES)),
            quantize=(self.quantize, (None, *QUANTIZE)),
        )
        choose_backends(self.backends, BACKENDS)
        fp8 = self.payload == "fp8" or self.quantize or self.combine_dtype == "fp8"
        if fp8 and self.hidden % SCALE_GROUP:
            raise InvalidArgument(
                f"hidden is {self.hidden}; fp8 rows have one scale per {SCALE_GROUP}: "
                f"choose a multiple of {SCALE_GROUP}"
            )
        if self.payload == "fp8" and self.quantize:
            raise InvalidArgument(
                f"quantize is {self.quantize!r} and the payload is fp8 already: choose one of them"
            )
        asked = {
            name: getattr(self, name) is not None
            for name in ("combine", "combine_dtype", "quantize")
        }
        for name, given in (
            asked | {"split_phase": self.split_phase, "corun": bool(self.corun)}
        ).items():
            if given and "onesided" not in self.backends:
                raise InvalidArgument(
                    f"{name} is {getattr(self, name)!r} and the backends are "
                    f"{', '.join(self.backends)}; only onesided has it: add that backend"
                )
        AllToAllConfig.of(
            ranks=self.ranks,
            **self.arguments(max(self.tokens)),
            combine=self.combine,
            combine_dtype=self.combine_dtype,
            quantize=self.quantize,
        )
        make_ids(self, max(self.tokens), 0)

    def arguments(self, max_tokens: int) -> dict[str, Any]:
        """What an exchange and its memory are made of, less the options of one backend."""
        payloads = None
        if self.payload == "fp8":
            scales = Payload((self.hidden // SCALE_GROUP,), torch.float32)
            payloads = (Payload((self.hidden,), torch.float8_e4m3fn), scales)
        return {
            "max_tokens": self.max_tokens or max_tokens,
            "top_k": self.top_k,
            "num_experts": self.experts,
            "hidden": self.hidden,
            "dtype": self.out_dtype,
            "payloads": payloads,
        }

    @property
    def variants(self) -> tuple[str, ...]:
        """The backends."""
        return self.backends

    def work(self) -> list[tuple[str, int]]:
        """One backend after the other: an exchange serves many sizes."""
        return [(backend, tokens) for backend in self.backends for tokens in self.tokens]

    def of_backend(self, backend: str) -> MoECase:
        """What this case means for one of the backends."""
        return self if backend == "onesided" else self.plain()

    def plain(self) -> MoECase:
        """The same sizes and payload without the options of the one-sided backend."""
        return replace(
            self, combine=None, combine_dtype=None, quantize=None, split_phase=False, corun=None
        )

    @property
    def comparable(self) -> MoECase | None:
        """What other libraries are asked for, so that equal work is compared.

        They send fp8 as numbers and float32 scales, which is also what quantize="fp8" sends; None
        for mxfp8. Their rows come back in `dtype`, also where ours come back as fp8.
        """
        if self.quantize == "mxfp8":
            return None
        return replace(self.plain(), payload="fp8" if self.quantize else self.payload)

    @property
    def sent_bytes(self) -> int:
        """Bytes that dispatch sends of one token to one rank."""
        kind = "fp8" if self.payload == "fp8" else self.quantize
        return row_bytes(self.hidden, self.out_dtype.itemsize, kind)

    @property
    def returned_bytes(self) -> int:
        """Bytes that combine returns of one token from one rank."""
        kind = self.combine_dtype
        return row_bytes(self.hidden, self.out_dtype.itemsize, kind)

    @property
    def pulls(self) -> bool:
        """Do owners read their rows, instead of being sent them?"""
        return self.combine_dtype is None and self.combine != "push"

    @property
    def wire(self) -> str:
        """What goes out and what comes back, in words."""
        if self.payload == "fp8":
            out = "fp8 + scales out"
        elif self.quantize:
            out = f"{self.quantize} + scales out, quantised by dispatch"
        else:
            out = f"{self.dtype} out"
        back = "" if self.pulls else " (pushed)"
        what = "fp8 + scales" if self.fp8_back else self.dtype
        return f"{out}, {what} back{back}"

    def title(self) -> str:
        """The sizes and options in words."""
        options = [
            *([f"{self.num_sms} SMs"] if self.num_sms else []),
            *(["no programmatic launch"] if not self.programmatic_launch else []),
            *(["also split-phase"] if self.split_phase else []),
            *([f"co-run with matmul {self.matmul_size}^3"] if self.corun else []),
        ]
        return ", ".join([self.sizes_text, self.wire, *options])

    def session(self, group: Group) -> MoESession:
        """Exchanges, made as they are needed."""
        return MoESession(group, self)

    def bytes_of(self, found: Measurement, phase: str) -> tuple[float, float]:
        """A phase that only publishes flags or only waits moves nothing."""
        case = self.of_backend(found.variant)
        sent, returned = case.sent_bytes, case.returned_bytes
        carrier = "combine_recv" if case.pulls else "combine_send"
        known = {"dispatch": sent, "dispatch_send": sent, "combine": returned, carrier: returned}
        row = sent + returned if phase == "pair" else known.get(phase, 0)
        return found.facts["chosen"] * row, found.facts["wire"] * row

    def floor_us(self, found: Measurement, gpus: list[str]) -> float | None:
        """Bytes of the busiest rank, and two ways through the links."""
        case, rows = self.of_backend(found.variant), found.facts["wire"]
        return pair_floor_us(rows * case.sent_bytes, rows * case.returned_bytes, gpus)

    def floor_text(self) -> str:
        """What the floor is made of, in words."""
        return f"wire bytes / {link_rate(self.ranks):g} GB/s + {PAIR_FIXED_US:g} us"

    def notes(self, report: Report) -> list[str]:
        """The bytes behind floor and wire where a row is not simply hidden x dtype."""
        plain, lines = self.plain(), []
        if self.quantize or self.fp8_back:
            text = f"{self.sent_bytes} bytes out and {self.returned_bytes} bytes back"
            lines.append(f"A row is {text}.")
        if len(self.backends) > 1 and self != plain:
            lines.append(f"The collective backend runs without these options: {plain.wire}.")
        if self.fp8_back:
            lines.append(
                f"Other libraries' rows come back as {self.dtype} unless they say otherwise, "
                f"{plain.returned_bytes} bytes each, and are exact; ours are not."
            )
        return lines

    def records(self) -> tuple[str, str, dict[str, Any]] | None:
        """Records of the same sizes, routing and payload; nobody's is like mxfp8."""
        if (asked := self.comparable) is None:
            return None
        names = ("ranks", "hidden", "top_k", "experts", "payload", "dtype")
        wanted: dict[str, Any] = {name: getattr(asked, name) for name in names}
        recorded = {"uniform": "random"}.get(self.routing, self.routing)
        return "records", "pair_us", wanted | {"router": recorded}


class MoESession:
    """The exchange that is being measured; asking for another one closes it.

    The one-sided exchange costs the same whatever its capacity, so one of the largest size serves
    the whole sweep, as it would in a server. A collective moves its capacity in every call, so it
    gets one that fits each size exactly. `max_tokens` sets both.
    """

    def __init__(self, group: Group, case: MoECase, *, profile: bool = False) -> None:
        self._group, self._case, self._profile = group, case, profile
        self._key: tuple[str, int] | None = None
        self._exchange: Exchange | None = None

    def close(self) -> None:
        """Give the memory back."""
        if self._exchange is not None:
            self._exchange.close()

    def facts(self) -> dict[str, Any]:
        """Bytes of a row, as they are on the wire."""
        case = self._case
        sizes = {"sent_bytes": case.sent_bytes, "returned_bytes": case.returned_bytes}
        return {"wire": case.wire, **sizes}

    @contextlib.contextmanager
    def trial(self, variant: str, tokens: int) -> Iterator[MoETrial]:
        """One size of one backend."""
        exchange = self.exchange(variant, tokens)
        yield MoETrial(self._group, self._case.of_backend(variant), exchange, tokens)

    def exchange(self, variant: str, tokens: int) -> Exchange:
        """An exchange for so many tokens. Collective."""
        case = self._case.of_backend(variant)
        key = (variant, max(case.tokens) if variant == "onesided" else tokens)
        if self._exchange is None or key != self._key:
            if self._exchange is not None:
                self._exchange.close()
            kind = EXCHANGES[variant]
            own: dict[str, Any] = {}
            if issubclass(kind, AllToAll):
                # Ranks that share cores may be late without being dead.
                own = {"timeout": 30.0, "num_sms": case.num_sms, "profile": self._profile}
                own["programmatic_launch"] = case.programmatic_launch
                own |= {
                    "combine": case.combine,
                    "combine_dtype": case.combine_dtype,
                    "quantize": case.quantize,
                }
                own["split_phase"] = case.split_phase
            self._exchange = kind(self._group, **case.arguments(key[1]), **own)
            self._key = key
        return self._exchange


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
    payloads = _quantised(x) if case.payload == "fp8" else (x.to(case.out_dtype),)
    return Inputs(payloads, make_ids(case, tokens, rank), weights)


class MoETrial:
    """An exchange with one set of inputs, and experts that return their rows."""

    def __init__(self, group: Group, case: MoECase, exchange: Exchange, tokens: int) -> None:
        self.group, self.case, self.exchange, self.tokens = group, case, exchange, tokens
        sources = (make_inputs(case, tokens, rank) for rank in range(group.size))
        self.sources = [source.to(group.device) for source in sources]
        self.inputs = self.sources[group.rank]
        self.placement = Placement.blocks(case.experts, group.size)
        shape = (tokens, case.hidden)
        self.out = torch.empty(shape, dtype=case.out_dtype, device=group.device)
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
        steps: dict[str, Step] = {"dispatch": self._dispatch, "combine": self._combine}
        return Calls(steps, "pair", self._split_phase_calls())

    def _split_phase_calls(self) -> dict[str, Step]:
        exchange, inputs = self.exchange, self.inputs
        if not (self.case.split_phase and isinstance(exchange, AllToAll)):
            return {}
        return {
            "dispatch_send": lambda: exchange.dispatch_send(
                inputs.payloads, inputs.ids, inputs.weights
            ),
            "dispatch_recv": exchange.dispatch_recv,
            "combine_send": exchange.combine_send,
            "combine_recv": lambda: exchange.combine_recv(out=self.out),
        }

    def check(self) -> str | None:
        """Send a round through poisoned memory. A second one is split-phase, where asked for."""
        problem = self._check_calls(self._dispatch, self._combine)
        if not (split_phase := list(self._split_phase_calls().values())):
            return problem
        send, receive, give, fetch = split_phase

        def dispatch() -> Received:
            send()
            return cast("Received", receive())

        def combine() -> object:
            give()
            return fetch()

        found = self._check_calls(dispatch, combine)
        return problem or (found and f"split-phase, {found}")

    def _check_calls(
        self, dispatch: Callable[[], Received], combine: Callable[[], object]
    ) -> str | None:
        settle(self.group)
        received = dispatch()
        # Pushed rows lie in their owners' inboxes: this round leaves poison there.
        poison(self.exchange.output())
        combine()
        settle(self.group)  # nobody writes an inbox from here on: poison what that round left
        for plane in received.payloads:
            poison(plane)
        self.poison()
        received = dispatch()
        problem = self._compare_received(received)
        arrived = _first_tokens(received, self.tokens, self.case.out_dtype)
        answers = reference.identity_experts(arrived, self.case.out_dtype)
        self.exchange.output()[:, : self.tokens].copy_(answers)
        settle(self.group)  # comparing takes its time, and a peer in combine would not wait so long
        combine()
        settle(self.group)
        return problem or self.compare()

    def poison(self) -> None:
        """Forget the combined rows: what is right from here on was written anew."""
        self.out.fill_(float("nan"))
        settle(self.group)

    def compare(self) -> str | None:
        """Return how the combined rows differ from the reference, or None."""
        return unlike_row("combined row", self.group.rank, self.out, self._expected)

    def facts(self) -> dict[str, Any]:
        """chosen: tokens x top_k that name an expert, most over ranks.  wire: token rows that leave
        or enter the busiest rank."""
        self.exchange.check()
        ids = [source.ids.cpu() for source in self.sources]
        moved = busiest(token_rows(ids, self.case.experts))
        return {"max_tokens": self.exchange.max_tokens, "chosen": chosen(ids), "wire": moved}

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
        carries = here.any(dim=2, keepdim=True)
        weights = torch.where(here, received.weights[:, :tokens], 0.0)
        pairs = [
            ("ids", received.ids[:, :tokens], wanted.ids),
            ("weights", weights, wanted.weights),
        ]
        for index, (have, want) in enumerate(zip(received.payloads, wanted.payloads, strict=True)):
            # A slot without a token may hold anything.
            arrived = torch.where(carries, have[:, :tokens].view(torch.uint8), 0)
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
