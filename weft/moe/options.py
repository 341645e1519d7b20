"""How a layer is built: what the caller chose, and what that comes to on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from weft.errors import InvalidArgument
from weft.moe.layer_table import LayerTable
from weft.moe.models import MoEConfig
from weft.moe.overlap import EXCHANGES
from weft.shape import NUMBERS

AUTO = "auto"
MAX_PARTS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """How a workspace is built; the names and meanings of `MoE`."""

    max_tokens: int
    exchange: str
    overlap: str
    table: LayerTable | Path | str | None
    gemm: str
    max_rows: int | None
    expert_map: Sequence[int] | torch.Tensor | None
    fp8: bool
    parts: int
    quantize: str | None
    combine_by: str | None
    reduce: str | None
    slots: int | None
    timeout: float
    first_timeout: float
    num_sms: int | None
    programmatic_launch: bool
    profile: bool


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the options come to on this rank.

    gemm: how experts multiply.   quantize: what dispatch makes of rows.   combine_by: how rows come
    home.
    """

    gemm: str
    quantize: str | None
    combine_by: str


def check_options(options: Options, config: MoEConfig) -> None:
    """Raises InvalidArgument for what no kind of workspace has."""
    if config.dtype not in NUMBERS:
        words = ", ".join(map(str, NUMBERS))
        raise InvalidArgument(f"dtype is {config.dtype}; choose one of {words}")
    if options.exchange not in EXCHANGES:
        words = ", ".join(map(repr, EXCHANGES))
        raise InvalidArgument(f"exchange is {options.exchange!r}; choose one of {words}")
    if not isinstance(options.parts, int) or not 1 <= options.parts <= MAX_PARTS:
        raise InvalidArgument(f"parts is {options.parts!r}; it must be in 1..{MAX_PARTS}")
    if not isinstance(options.max_tokens, int) or options.max_tokens < 1:
        raise InvalidArgument(f"max_tokens is {options.max_tokens!r}; it must be at least 1")


def manifest(config: MoEConfig, options: Options) -> dict[str, str]:
    """What ranks compare beyond the sizes of their exchange: rules that must be one."""
    fields = asdict(config) | {
        "exchange": options.exchange,
        "overlap": options.overlap,
        "fp8": options.fp8,
    }
    return {name: str(value) for name, value in fields.items()}
