# SPDX-License-Identifier: Apache-2.0
"""Which backend "auto" takes: a rule by the bytes of one rank's rows, the same on every rank.

Every backend gives the same bits, so this decides about time alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.allreduce.config import ReduceConfig
from weft.errors import InvalidArgument

# KiB of one rank's rows from which on another backend is faster, for a sum alone and for a sum with
# an epilogue, by ranks. 8 x H200 2026-11-20, 4 x H200 2026-11-21, 2 x H200 2026-11-22; hidden 4096
# and 7168 in bf16, 1 to 2048 tokens (benchmarks/results/*/allreduce-choices.json): within 1.7 % of
# the fastest on 4 and 8 ranks, 5 % on 2 (8.4 % for sums alone of 2048 rows of 4096). More ranks
# than 8 were never measured and take the rule of 8.
TWOSHOT_FROM = {2: (7168, 7168), 4: (224, 256), 8: (112, 112)}
BULK_FROM = {2: (math.inf, 7168), 4: (math.inf, 1792), 8: (28672, 7168)}


@dataclass(frozen=True, slots=True)
class Choice:
    """Hold a chosen backend and the reason.

    Attributes:
        backend: Name of the backend.
        text: Why it is chosen, in a sentence.
    """

    backend: str
    text: str


def able(config: ReduceConfig, backends: Sequence[str], tokens: int) -> list[str]:
    """The backends that have slots for so many tokens."""
    return [name for name in backends if name != "oneshot" or tokens <= config.direct]


def choose(config: ReduceConfig, backends: Sequence[str], tokens: int, *, epilogue: bool) -> Choice:
    """The backend of `backends` for so many tokens.

    Raises InvalidArgument where none serves them: one shot has no slots beyond `config.direct`.

    epilogue: are the rows normed?
    """
    names = able(config, backends, tokens)
    if not names:
        raise InvalidArgument(
            f"{tokens} tokens; this all-reduce was built with oneshot alone, which has slots for "
            f"{config.direct}: build it with 'twoshot' too, or use torch.distributed.all_reduce"
        )
    if config.ranks == 1:
        return Choice(names[0], f"{names[0]}: one rank sums nothing, and all backends are the same")
    if len(names) == 1:
        return Choice(names[0], f"{names[0]} is the only backend that serves {tokens} tokens")
    measured = next((n for n in TWOSHOT_FROM if config.ranks <= n), max(TWOSHOT_FROM))
    kib = tokens * config.row_bytes / 1024
    twoshot, bulk = TWOSHOT_FROM[measured][epilogue], BULK_FROM[measured][epilogue]
    best = "oneshot" if kib < twoshot else "twoshot" if kib < bulk else "twoshot_bulk"
    order = {"oneshot": 0, "twoshot": 1, "twoshot_bulk": 2}
    name = min(names, key=lambda each: (abs(order[each] - order[best]), -order[each]))
    limits = f"twoshot from {twoshot} KiB a rank, twoshot_bulk from {bulk}"
    work = "a sum with an epilogue" if epilogue else "a sum alone"
    return Choice(
        name,
        f"{name} for {tokens} rows of {config.row_bytes} bytes ({kib:.0f} KiB): for {work} on "
        f"{config.ranks} ranks, {limits}; measured on {measured} x H200",
    )
