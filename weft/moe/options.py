"""How a layer is built: what the caller chose, and what that comes to on a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import torch

from weft.alltoall.geometry import SCALES
from weft.arguments import flags, integer, one_of, seconds
from weft.grouping.api import MAX_ROWS
from weft.moe.models import MoEConfig
from weft.moe.overlap import EXCHANGES, HOMES, OVERLAPS
from weft.moe.products import Way
from weft.moe.table import LayerTable
from weft.shape import LIMITS, NUMBERS

AUTO = "auto"
MAX_SMS = 1 << 16


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
    quantize: str | None
    combine_by: str | None
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
    one_of("dtype", config.dtype, NUMBERS)
    one_of("exchange", options.exchange, EXCHANGES)
    one_of("overlap", options.overlap, (AUTO, *OVERLAPS))
    one_of("gemm", options.gemm, get_args(Way))
    one_of("quantize", options.quantize, (None, *SCALES))
    one_of("combine_by", options.combine_by, (None, *HOMES))
    integer("max_tokens", options.max_tokens, 1, LIMITS["tokens"][2])
    if options.max_rows is not None:
        integer("max_rows", options.max_rows, 1, MAX_ROWS)
    if options.num_sms is not None:
        integer("num_sms", options.num_sms, 1, MAX_SMS)
    seconds("timeout", options.timeout)
    seconds("first_timeout", options.first_timeout)
    flags(
        fp8=options.fp8,
        programmatic_launch=options.programmatic_launch,
        profile=options.profile,
    )


def manifest(config: MoEConfig, options: Options) -> dict[str, str]:
    """What ranks compare beyond the sizes of their exchange: rules that must be one."""
    fields = asdict(config) | {
        "exchange": options.exchange,
        "overlap": options.overlap,
        "fp8": options.fp8,
    }
    return {name: str(value) for name, value in fields.items()}
