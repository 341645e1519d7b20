"""What one benchmark run measures: named model sizes, and the settings every rank gets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import InvalidArgument

ROUTERS = ("random", "perfect", "zipf", "one-hot")
BACKENDS = ("onesided", "collective")
PAYLOADS = ("bf16", "fp8")
DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
SCALE_GROUP = 128  # elements of an fp8 payload that share one float32 scale

_RANGE = re.compile(r"(\d+)\.\.(\d+)")


@dataclass(frozen=True, slots=True)
class Case:
    """The MoE sizes of one model: hidden elements per token, experts per token, experts."""

    hidden: int
    top_k: int
    experts: int


CASES: Mapping[str, Case] = {
    "deepseek-v3": Case(hidden=7168, top_k=8, experts=256),
    "qwen3-30b-a3b": Case(hidden=2048, top_k=8, experts=128),
    "gpt-oss-120b": Case(hidden=2880, top_k=4, experts=128),
    "kimi-k2": Case(hidden=7168, top_k=8, experts=384),
    "llama-4-scout": Case(hidden=5120, top_k=1, experts=16),
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

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("payload", self.payload, PAYLOADS),
            ("dtype", self.dtype, tuple(DTYPES)),
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
        if self.payload == "fp8" and self.hidden % SCALE_GROUP:
            raise InvalidArgument(
                f"hidden is {self.hidden}; an fp8 payload has one scale per {SCALE_GROUP}: "
                f"choose a multiple of {SCALE_GROUP}"
            )

    @property
    def out_dtype(self) -> torch.dtype:
        """dtype of the combined rows."""
        return DTYPES[self.dtype]

    @property
    def sent_bytes(self) -> int:
        """Bytes that dispatch sends of one token to one rank."""
        if self.payload == "fp8":
            return self.hidden + self.hidden // SCALE_GROUP * 4
        return self.returned_bytes

    @property
    def returned_bytes(self) -> int:
        """Bytes that combine fetches of one token from one rank."""
        return self.hidden * self.out_dtype.itemsize


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
