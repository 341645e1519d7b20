"""What one benchmark run measures: named model sizes, and the settings every rank gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.errors import InvalidArgument
from weft.moe import MODELS

ROUTERS = ("random", "perfect", "zipf", "one-hot")
BACKENDS = ("onesided", "collective")
PAYLOADS = ("bf16", "fp8")
WAYS = ("pull", "push", "fp8")  # AllToAll's combine_by
QUANTIZE = ("fp8", "mxfp8")  # AllToAll's quantize
DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
SCALE_GROUP = 128  # elements of an fp8 payload that share one float32 scale
PRODUCT_SIZE = 8192  # rows, columns and depth of the matrix product of `beside`

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_PRODUCT = re.compile(r"matmul(?::(\d{1,5}))?")
_SCALE_BYTES = {"fp8": 4 / SCALE_GROUP, "mxfp8": 1 / 32}  # of a row's element


@dataclass(frozen=True, slots=True)
class Case:
    """The MoE sizes of one model: hidden elements per token, experts per token, experts."""

    hidden: int
    top_k: int
    experts: int


CASES: Mapping[str, Case] = {
    name: Case(hidden=c.hidden, top_k=c.routing.top_k, experts=c.routing.num_experts)
    for name, c in MODELS.items()
}
ALL = "all"  # every case, one after the other


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a rank needs to know. Equal on all ranks.

    tokens: sizes to measure, tokens per rank.  max_tokens: capacity of the workspace, or None for
    what the sizes need.
    router: one of ROUTERS, or the path of a .npy or .json file with ids `[rows, top_k]`.
    payload: "bf16" sends rows of `dtype`; "fp8" sends float8_e4m3fn with float32 scales per 128.
    dtype: type of the rows that come back.  samples: timed samples per size.
    num_sms: SMs that the one-sided kernels may fill, or None for all.
    programmatic_launch: as in AllToAll.  cold: also time calls after a flush of the caches.
    combine_by, quantize: as in AllToAll.  halves: also time the four halves of a pair.  All three
    are the one-sided backend's alone; what stands beside it runs without (`of_backend`).
    beside: None, or "matmul" or "matmul:4096": also time the pair while a bf16 matrix product of
    that size runs on the SMs that num_sms leaves.
    """

    ranks: int
    device: str
    tokens: tuple[int, ...]
    max_tokens: int | None
    hidden: int
    top_k: int
    experts: int
    router: str
    backends: tuple[str, ...]
    dtype: str
    payload: str
    graph: bool
    samples: int
    seed: int
    case: str | None = None
    num_sms: int | None = None
    programmatic_launch: bool = True
    cold: bool = False
    combine_by: str = "pull"
    quantize: str | None = None
    halves: bool = False
    beside: str | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("payload", self.payload, PAYLOADS),
            ("dtype", self.dtype, tuple(DTYPES)),
            ("combine_by", self.combine_by, WAYS),
            ("quantize", self.quantize or QUANTIZE[0], QUANTIZE),
            *(("backend", backend, BACKENDS) for backend in self.backends),
        ):
            if value not in allowed:
                raise InvalidArgument(f"{name} is {value!r}; choose one of {', '.join(allowed)}")
        if not self.backends or not self.tokens:
            raise InvalidArgument("nothing to measure: pass at least one backend and token count")
        if min(self.tokens) < 1:
            raise InvalidArgument(f"{min(self.tokens)} tokens; a timed size is at least 1")
        if self.max_tokens is not None and max(self.tokens) > self.max_tokens:
            raise InvalidArgument(
                f"{max(self.tokens)} tokens do not fit max_tokens={self.max_tokens}; raise it"
            )
        if self.top_k > self.experts:
            raise InvalidArgument(
                f"top_k is {self.top_k} of {self.experts} experts; the ids of a row are distinct"
            )
        if self.num_sms is not None and self.device != "cuda":
            raise InvalidArgument(
                f"num_sms is {self.num_sms} on {self.device} ranks; it limits GPU kernels: "
                "leave it out"
            )
        if not 1 <= self.samples <= 5000:
            raise InvalidArgument(f"{self.samples} samples; choose 1..5000")
        self._check_wire()
        self._check_beside()

    def _check_wire(self) -> None:
        """What goes out and comes back must be possible, and somebody must do it."""
        fp8 = self.payload == "fp8" or self.quantize or self.combine_by == "fp8"
        if fp8 and self.hidden % SCALE_GROUP:
            raise InvalidArgument(
                f"hidden is {self.hidden}; fp8 rows have one scale per {SCALE_GROUP}: "
                f"choose a multiple of {SCALE_GROUP}"
            )
        if self.payload == "fp8" and self.quantize:
            raise InvalidArgument(
                f"quantize is {self.quantize!r} and the payload is fp8 already: choose one of them"
            )
        asked = {"combine_by": self.combine_by != "pull", "quantize": self.quantize is not None}
        for name, given in (asked | {"halves": self.halves, "beside": bool(self.beside)}).items():
            if given and "onesided" not in self.backends:
                raise InvalidArgument(
                    f"{name} is {getattr(self, name)!r} and the backends are "
                    f"{', '.join(self.backends)}; only onesided has it: add that backend"
                )

    def _check_beside(self) -> None:
        """A product needs a GPU, SMs of its own, and a pair that waits for no host."""
        if self.beside is None:
            return
        if not 128 <= self.product_size <= 32768 or self.product_size % 8:
            raise InvalidArgument(
                f"beside is {self.beside!r}; write matmul, or matmul:SIZE with a multiple of 8 "
                "from 128 to 32768"
            )
        if self.device != "cuda":
            raise InvalidArgument(
                f"beside is {self.beside!r} on {self.device} ranks; the product shares a GPU with "
                "the one-sided kernels, and CPU ranks have none: leave it out"
            )
        if self.num_sms is None:
            raise InvalidArgument(
                f"beside is {self.beside!r} and num_sms is not given: without a limit the "
                "one-sided kernels leave no SM to the product; add for example --num-sms 16"
            )
        if not self.graph:
            raise InvalidArgument(
                f"beside is {self.beside!r} with eager calls; it is timed in CUDA graphs only: "
                "leave --eager out"
            )

    @property
    def product_size(self) -> int:
        """Rows, columns and depth of the product of `beside`; 0 where it names none."""
        found = _PRODUCT.fullmatch(self.beside or "")
        return int(found[1] or PRODUCT_SIZE) if found else 0

    def of_backend(self, backend: str) -> Settings:
        """What these settings mean for one of the backends."""
        return self if backend == "onesided" else self.plain()

    def plain(self) -> Settings:
        """The same sizes and payload without the options of the one-sided backend."""
        return replace(self, combine_by="pull", quantize=None, halves=False, beside=None)

    @property
    def rival(self) -> Settings | None:
        """What other libraries are asked for, so that like is compared with like.

        They send fp8 as numbers and float32 scales, which is also what quantize="fp8" sends; None
        for mxfp8. Their rows come back in `dtype`, also where ours come back as fp8.
        """
        if self.quantize == "mxfp8":
            return None
        return replace(self.plain(), payload="fp8" if self.quantize else self.payload)

    @property
    def out_dtype(self) -> torch.dtype:
        """dtype of the combined rows."""
        return DTYPES[self.dtype]

    @property
    def sent_bytes(self) -> int:
        """Bytes that dispatch sends of one token to one rank."""
        return self._row_bytes("fp8" if self.payload == "fp8" else self.quantize)

    @property
    def returned_bytes(self) -> int:
        """Bytes that combine brings home of one token from one rank."""
        return self._row_bytes("fp8" if self.combine_by == "fp8" else None)

    def _row_bytes(self, kind: str | None) -> int:
        if kind is None:
            return self.hidden * self.out_dtype.itemsize
        return self.hidden + int(self.hidden * _SCALE_BYTES[kind])

    @property
    def wire(self) -> str:
        """What goes out and what comes back, in words."""
        if self.payload == "fp8":
            out = "fp8 + scales out"
        elif self.quantize:
            out = f"{self.quantize} + scales out, quantised by dispatch"
        else:
            out = f"{self.dtype} out"
        back = {"pull": "", "push": " (pushed)", "fp8": " (pushed)"}[self.combine_by]
        what = "fp8 + scales" if self.combine_by == "fp8" else self.dtype
        return f"{out}, {what} back{back}"


def plans_of(
    case: str | None,
    *,
    hidden: int | None,
    top_k: int | None,
    experts: int | None,
    **common: Any,
) -> list[Settings]:
    """Return the settings of a named case, of every case for `"all"`, or of deepseek-v3's sizes.

    hidden, top_k, experts: in place of the case's own.  common: what all of them share.

    Raises InvalidArgument for an unknown case, or for sizes that do not fit together.
    """
    if case not in (None, ALL, *CASES):
        raise InvalidArgument(f"case is {case!r}; choose one of {', '.join(CASES)}, {ALL}")
    plans = []
    for name in CASES if case == ALL else (case,):
        sizes = CASES[name or "deepseek-v3"]
        plans.append(
            Settings(
                case=name,
                hidden=sizes.hidden if hidden is None else hidden,
                top_k=sizes.top_k if top_k is None else top_k,
                experts=sizes.experts if experts is None else experts,
                **common,
            )
        )
    return plans


def parse_tokens(text: str) -> tuple[int, ...]:
    """Return the sizes named by `"1,8,64"`, by `"1..4096"` (doubling), or by a mix of both.

    Raises InvalidArgument for anything else.
    """
    sizes: list[int] = []
    for part in text.replace(" ", "").split(","):
        if match := _RANGE.fullmatch(part):
            size, last = int(match[1]), int(match[2])
            if size < 1 or last < size:
                raise InvalidArgument(f"tokens {part!r} is empty; write e.g. 1..4096")
            while size <= last:
                sizes.append(size)
                size *= 2
        elif part.isdigit():
            sizes.append(int(part))
        else:
            raise InvalidArgument(f"tokens {text!r}: {part!r} is no size; write 1,8,64 or 1..4096")
    return tuple(dict.fromkeys(sizes))


def parse_backends(text: str) -> tuple[str, ...]:
    """Return the backends named by `"onesided,collective"`."""
    return tuple(dict.fromkeys(text.replace(" ", "").split(",")))
