"""What `weft eval` tells its ranks, and what they tell back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Run:
    """One way to run a checkpoint.

    exchange: who carries tokens to experts, as DistributedConfig names it; None for one process.
    own_batches: each rank answers a part of a batch; else all ranks share the whole.
    """

    exchange: str | None
    own_batches: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """What is answered, by a checkpoint's folder.

    batch: prompts at a time, on all ranks together.  dtype: "fp32", "bf16", "fp16", or None for
    the checkpoint's own.
    """

    checkpoint: Path
    prompts: tuple[str, ...]
    batch: int
    max_new_tokens: int
    dtype: str | None

    def parts(self, rank: int, ranks: int) -> list[list[int]]:
        """Which prompts a rank with batches of its own answers, batch by batch."""
        count = len(self.prompts)
        return [
            list(range(start, min(start + self.batch, count)))[rank::ranks]
            for start in range(0, count, self.batch)
        ]


@dataclass(frozen=True, slots=True)
class Answers:
    """What one rank generated: a text for each of its prompts, all their tokens, and seconds."""

    texts: tuple[str, ...]
    tokens: int
    seconds: float


def texts_of(job: Job, run: Run, of_rank: Sequence[Answers]) -> list[list[str]]:
    """For each prompt, the texts of those ranks that answered it."""
    if not run.own_batches:
        return [list(texts) for texts in zip(*(each.texts for each in of_rank), strict=True)]
    found: dict[int, str] = {}
    for rank, each in enumerate(of_rank):
        mine = [at for part in job.parts(rank, len(of_rank)) for at in part]
        found.update(zip(mine, each.texts, strict=True))
    return [[found[at]] for at in range(len(job.prompts))]
