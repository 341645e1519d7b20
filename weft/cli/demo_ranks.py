"""What every rank of `weft demo` does: answer a question that is heard as it comes, then many."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.generation import BaseStreamer

from weft.cli.eval_job import Answers, Job, Run
from weft.cli.eval_ranks import Responder, answer_on_ranks, join
from weft.memory import Group


@dataclass(slots=True)
class Routed:
    """What layers of experts were given while a rank answered its own question.

    ids: which experts each row chose, `[rows, top_k]`, layer by layer.  experts: of all ranks.
    row_bytes: of one row.
    """

    ids: list[list[int]] = field(default_factory=list)
    experts: int = 0
    row_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rank's: how its own question was routed, and its answers to the job, run by run."""

    routed: Routed
    answers: list[Answers]


class Wire:
    """Lines of JSON to whoever shows the demo. Several ranks may write: short lines stay whole."""

    def __init__(self, path: Path, rank: int) -> None:
        self._file, self.rank = path.open("w", buffering=1), rank

    def tell(self, **fields: Any) -> None:
        """Send one line, which names this rank."""
        self._file.write(json.dumps({"rank": self.rank, **fields}) + "\n")

    def close(self) -> None:
        """No more is told."""
        self._file.close()


class _Aloud(BaseStreamer):  # type: ignore[misc]  # transformers is not type-checked
    """Tells the text so far whenever transformers has the next token."""

    def __init__(self, wire: Wire, tokenizer: Any) -> None:
        self._wire, self._tokenizer = wire, tokenizer
        self._tokens: list[int] | None = None

    def put(self, value: torch.Tensor) -> None:
        if self._tokens is None:  # first comes the prompt
            self._tokens = []
            return
        self._tokens += value.flatten().tolist()
        self._wire.tell(text=self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def end(self) -> None:
        self._wire.tell(done=True)


def rank_body(
    group: Group, job: Job, runs: Sequence[Run], aloud: Sequence[str], path: Path
) -> Outcome:
    """Answer a prompt of `aloud`, which has one for each rank, in the first run; the job in all."""
    join(group)
    wire = Wire(path, group.rank)
    routed = Routed()
    answers: list[Answers] = []
    try:
        for run in runs:
            wire.tell(loading=run.exchange)
            before = (
                partial(_answer_aloud, aloud[group.rank], wire, routed) if not answers else None
            )
            answers.append(answer_on_ranks(group, job, run, before))
    finally:
        wire.close()
    return Outcome(routed, answers)


def _answer_aloud(prompt: str, wire: Wire, routed: Routed, responder: Responder) -> None:
    """Answer one prompt, token by token, and write down which experts were chosen."""
    assert responder.group is not None
    ranks = responder.group.size
    responder.generate([prompt], 2)  # compiles and allocates, unheard

    def write_down(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        rows, ids, _ = given
        routed.ids += ids.tolist()
        routed.experts = module.num_experts * ranks
        routed.row_bytes = rows.shape[1] * rows.element_size()

    hooks = [
        module.register_forward_pre_hook(write_down)
        for name, module in responder.model.named_modules()
        if name.endswith(".experts")
    ]
    aloud = _Aloud(wire, responder.tokenizer)
    responder.generate([prompt], responder.job.max_new_tokens, streamer=aloud)
    for hook in hooks:
        hook.remove()
    wire.tell(asked=len(responder.job.prompts))
