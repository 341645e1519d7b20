# SPDX-License-Identifier: Apache-2.0
"""Backend selection of "auto", which depends on the bytes of one rank's rows.

Every rank selects the same backend. All backends give bitwise equal results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.allreduce.config import ReduceConfig
from weft.errors import InvalidArgument

# Minimum KiB of one rank's rows for a backend, by number of ranks: (for a sum alone, for a sum with
# an epilogue). 8 x H200 2026-11-20, 4 x H200 2026-11-21, 2 x H200 2026-11-22; hidden 4096
# and 7168 in bf16, 1 to 2048 tokens (benchmarks/results/*/allreduce-choices.json): within 1.7 % of
# the fastest backend on 4 and 8 ranks, 5 % on 2 (8.4 % for sums alone of 2048 rows of 4096). More
# than 8 ranks are not measured and use the limits of 8.
TWOSHOT_FROM = {2: (7168, 7168), 4: (224, 256), 8: (112, 112)}
BULK_FROM = {2: (math.inf, 7168), 4: (math.inf, 1792), 8: (28672, 7168)}


@dataclass(frozen=True, slots=True)
class Choice:
    """A selected backend.

    Attributes:
        backend: Name of the backend.
        text: Reason for the selection.
    """

    backend: str
    text: str


def eligible_backends(config: ReduceConfig, backends: Sequence[str], tokens: int) -> list[str]:
    """Return the backends that have enough slots for a number of tokens."""
    return [name for name in backends if name != "oneshot" or tokens <= config.direct]


def choose_backend(
    config: ReduceConfig, backends: Sequence[str], tokens: int, *, epilogue: bool
) -> Choice:
    """Select the fastest backend for a number of tokens.

    Args:
        config: Sizes of the all-reduce.
        backends: Names of the built backends.
        tokens: Number of tokens of the call.
        epilogue: Whether rows are normed.

    Raises:
        InvalidArgument: no backend has enough slots.
    """
    names = eligible_backends(config, backends, tokens)
    if not names:
        raise InvalidArgument(
            f"{tokens} tokens exceed the {config.direct} slots of oneshot, the only backend of "
            "this all-reduce: add 'twoshot' to backends, or use torch.distributed.all_reduce"
        )
    if config.ranks == 1:
        return Choice(names[0], f"{names[0]}: all backends are equivalent on one rank")
    if len(names) == 1:
        return Choice(names[0], f"{names[0]} is the only backend that supports {tokens} tokens")
    measured = next((n for n in TWOSHOT_FROM if config.ranks <= n), max(TWOSHOT_FROM))
    kib = tokens * config.row_bytes / 1024
    twoshot, bulk = TWOSHOT_FROM[measured][epilogue], BULK_FROM[measured][epilogue]
    best = "oneshot" if kib < twoshot else "twoshot" if kib < bulk else "twoshot_bulk"
    order = {"oneshot": 0, "twoshot": 1, "twoshot_bulk": 2}
    name = min(names, key=lambda n: (abs(order[n] - order[best]), -order[n]))
    limits = f"twoshot from {twoshot} KiB per rank, twoshot_bulk from {bulk}"
    work = "a sum with an epilogue" if epilogue else "a sum alone"
    return Choice(
        name,
        f"{name} for {tokens} rows of {config.row_bytes} bytes ({kib:.0f} KiB): for {work} on "
        f"{config.ranks} ranks, {limits}; measured on {measured} x H200",
    )
