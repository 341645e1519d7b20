# SPDX-License-Identifier: Apache-2.0
"""`weft demo --kill R`: a rank dies during generation, and the survivors continue.

Every rank has the whole model except for the experts; each expert is on two ranks. A rank that
loses a peer during a token recovers with the others, returns to the last token that all of them
completed, and continues in the same memory. Then the survivors answer the dead rank's questions.
"""

from __future__ import annotations

import inspect
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import nn

import weft
from weft.cli.demo import (
    CHECKPOINT,
    LATE,
    NEW_TOKENS,
    QUESTIONS,
    Answers,
    Question,
    answer_alone,
    load_model,
    read_questions,
)
from weft.errors import GroupError
from weft.group import Group
from weft.launcher import launch
from weft.moe import ExpertWeights, MoEConfig, balance

KILL_AFTER_TOKENS = 10  # number of tokens after which the victim is killed


@dataclass(slots=True)
class Survivor:
    """Results of one surviving rank.

    Attributes:
        texts: Texts by question number.
        tokens: Number of generated tokens.
        kept_tokens: Tokens per sentence that were kept by the recovery.
        prefix: The first sentence's text at that point.
        dead: Dead ranks.
        recovery: Seconds of `group.recover`.
        pause: Seconds between two tokens across the recovery.
    """

    texts: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    kept_tokens: int = 0
    prefix: str = ""
    dead: tuple[int, ...] = ()
    recovery: float = 0.0
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of the demo. `ranks` has None for the dead rank."""

    questions: list[Question]
    alone: Answers
    ranks: Sequence[Survivor | None]

    @property
    def living(self) -> list[Survivor]:
        """Results of the survivors."""
        return [each for each in self.ranks if each is not None]

    @property
    def texts(self) -> list[str | None]:
        """The survivors' texts in the order of the questions."""
        texts = {number: text for each in self.living for number, text in each.texts.items()}
        return [texts.get(number) for number in range(len(self.questions))]

    @property
    def equal(self) -> int:
        """Number of texts that are identical to those of one process."""
        return sum(a == b for a, b in zip(self.texts, self.alone.texts, strict=True))


def run(ranks: int, device: str, victim: int, questions: int = QUESTIONS) -> Outcome:
    """Answer on ranks, of which `victim` is killed, then in this process."""
    selected = read_questions(CHECKPOINT / "questions.jsonl")[:questions]
    parts = launch(
        rank_body, selected, victim, ranks=ranks, device=device, timeout=3600, tolerate_deaths=True
    )
    return Outcome(selected, answer_alone(selected, device), parts)


def rank_body(group: Group, questions: list[Question], victim: int) -> Survivor:
    """Answer this rank's part of the questions, then its share of a dead rank's part."""
    writer = Writer(group, questions, victim)
    try:
        numbers = range(len(questions))
        writer.write([numbers[rank :: group.size] for rank in range(group.size)])
        if writer.result.dead:
            unanswered = [i for rank in writer.result.dead for i in numbers[rank :: group.size]]
            living = group.living
            parts: list[Sequence[int]] = [()] * group.size
            for place, rank in enumerate(living):
                parts[rank] = unanswered[place :: len(living)]
            writer.write(parts)
        return writer.result
    finally:
        writer.close()


class Writer:
    """A rank's model with layers on weft, which generates batches in step with other ranks."""

    def __init__(self, group: Group, questions: list[Question], victim: int) -> None:
        from transformers import AutoTokenizer

        self.group, self.victim, self.result = group, victim, Survivor()
        self._tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
        self._prompts = [each.prompt for each in questions]
        self._lengths = [len(ids) for ids in self._tokenizer(self._prompts)["input_ids"]]
        self._model = load_model().to(group.device)
        config = MoEConfig.from_hf(self._model.config)
        longest = max(self._lengths) * -(-len(questions) // group.size)
        experts = config.routing.num_experts
        replicas = balance([1] * experts, group.size, replicas=experts)
        self._layers: list[weft.MoE] = []
        for block in self._model.model.layers:
            weights = partial(_weights, block.mlp.experts, group.device)
            if self._layers:
                layer = self._layers[0].sibling(weights)
            else:
                layer = weft.MoE(
                    group,
                    config,
                    weights,
                    max_tokens=longest,
                    replicas=replicas,
                    mode="throughput",
                    timeout=LATE,
                )
            self._layers.append(layer)
            block.mlp.experts = _Experts(layer, self)
        self.rows = 0  # largest row count over all ranks in this step
        self._offset = 0  # steps between the last recovery and the start of this batch

    def close(self) -> None:
        """Free the layers' memory."""
        for layer in self._layers:
            layer.close()

    def write(self, parts: Sequence[Sequence[int]]) -> None:
        """Answer the questions `parts[rank]` with one token per step, all ranks in step.

        A rank without questions generates the first answer again, because its experts are needed.
        """
        part = parts[self.group.rank]
        numbers = list(part) or [0]
        batches = [[self._lengths[i] for i in each] or [self._lengths[0]] for each in parts]
        widest = max(len(each) * max(each) for each in batches)
        sentences = _Sentences(self._tokenizer, [self._prompts[i] for i in numbers], self._model)
        before = time.perf_counter()
        broken_at: float | None = None
        while len(sentences.written) < NEW_TOKENS:
            self.rows = max(map(len, batches)) if sentences.written else widest
            if self.group.rank == self.victim and len(sentences.written) == KILL_AFTER_TOKENS:
                # Kill at a random time within the next tokens, not at a convenient place.
                delay = random.uniform(0.0, 2 * (time.perf_counter() - before) / KILL_AFTER_TOKENS)
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            try:
                step = sentences.step()
                self._layers[0].check()  # on a GPU, a broken round is reported here
            except GroupError:
                broken_at = broken_at or before
                self._recover(sentences)
                continue
            sentences.written.append(step)
            before = time.perf_counter()
            if broken_at is not None:
                self.result.pause, broken_at = max(self.result.pause, before - broken_at), None
        self._offset += NEW_TOKENS
        texts = sentences.texts()
        if part:
            self.result.texts |= dict(zip(part, texts, strict=True))
            self.result.tokens += NEW_TOKENS * len(texts)

    def _recover(self, sentences: _Sentences) -> None:
        recovery = self.group.recover()
        finished = min(recovery.finished.values()) // len(self._layers)
        # A rank may be one step ahead of another, so all return to what all have completed.
        sentences.truncate(finished - self._offset)
        self._offset = -len(sentences.written)
        self.result.dead = tuple(sorted({*self.result.dead, *recovery.dead}))
        self.result.recovery = max(self.result.recovery, recovery.seconds)
        self.result.kept_tokens = len(sentences.written)
        self.result.prefix = sentences.texts()[0] if sentences.written else ""


class _Sentences:
    """A batch of sentences with the model's cache."""

    def __init__(self, tokenizer: Any, prompts: list[str], model: Any) -> None:
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        self._tokenizer, self._model = tokenizer, model
        self._ids = batch["input_ids"].to(model.device)
        self._mask = batch["attention_mask"].to(model.device)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # 5.23
        self.written: list[torch.Tensor] = []
        self.truncate(0)

    def step(self) -> torch.Tensor:
        """Return the next token of each sentence."""
        done = len(self.written)
        new = self.written[-1][:, None] if done else self._ids
        mask = torch.cat([self._mask, self._mask.new_ones(len(new), done)], dim=1)
        position = (mask.cumsum(1) - 1).clamp_min(0)[:, -new.shape[1] :]
        with torch.inference_mode():
            logits = self._model(
                input_ids=new,
                attention_mask=mask,
                position_ids=position,
                logits_to_keep=1,
                **{self._cache_name: self._cache},
            ).logits
            next_ids: torch.Tensor = logits[:, -1].argmax(-1)
            return next_ids

    def truncate(self, step: int) -> None:
        """Drop the tokens of this step and later ones."""
        from transformers import DynamicCache

        del self.written[step:]
        if step == 0:
            self._cache = DynamicCache(config=self._model.config)
        else:
            length = self._ids.shape[1] + step - 1
            for layer in self._cache.layers:  # some of them already ran the broken step
                if (surplus := layer.get_seq_length() - length) > 0:
                    layer.crop(-surplus)

    def texts(self) -> list[str]:
        """Return the texts, up to the end of each sentence."""
        ends = set(self._model.generation_config.eos_token_id)
        rows = torch.stack(self.written, dim=1).tolist()
        ends_at = [next((i for i, token in enumerate(r) if token in ends), len(r)) for r in rows]
        cut = [row[: end + 1] for row, end in zip(rows, ends_at, strict=True)]
        return list(self._tokenizer.batch_decode(cut, skip_special_tokens=True))


class _Experts(nn.Module):
    """Replaces the model's experts: the same call, run by weft."""

    def __init__(self, layer: weft.MoE, writer: Writer) -> None:
        super().__init__()
        self._layer, self._writer = layer, writer

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Run the experts on this rank's `[tokens, hidden]`."""
        routing = {"topk_ids": ids.contiguous(), "topk_weights": weights.float().contiguous()}
        return self._layer(x.contiguous(), **routing, rows=self._writer.rows)


def _weights(experts: Any, device: torch.device, local: tuple[int, ...]) -> ExpertWeights:
    ids = torch.tensor(local, device=device)
    return ExpertWeights(experts.gate_up_proj.detach()[ids], experts.down_proj.detach()[ids])


def show(console: Console, outcome: Outcome, victim: int) -> bool:
    """Print a recovered sentence, times and a comparison of the texts; return if all agree."""
    write = partial(console.print, highlight=False)
    count, living = len(outcome.questions), outcome.living
    as_planned = outcome.ranks[victim] is None and all(each.dead == (victim,) for each in living)
    if as_planned:
        rank, first = next((r, each) for r, each in enumerate(outcome.ranks) if each is not None)
        number = min(first.texts)
        prefix, rest = first.prefix, first.texts[number].removeprefix(first.prefix)
        write(
            Text.assemble(
                (f"rank {rank}  ", "dim"),
                f"{outcome.questions[number].question} ",
                (prefix.strip(), "bold"),
                (f" [rank {victim} is killed] ", "red"),
                (rest.rstrip(), "bold"),
            )
        )
        recovery, pause = (max(getattr(e, n) for e in living) for n in ("recovery", "pause"))
        write(
            f"\nRank {victim} was killed after token {first.kept_tokens} of each sentence. The "
            f"others recovered in {recovery * 1e3:.0f} ms,\nwrote the next token "
            f"{pause * 1e3:.0f} ms after the one before, and answered its questions, too."
        )
    else:
        dead = sorted({rank for each in living for rank in each.dead})
        write(f"\nRank {victim} was to be killed, but these died: {dead}")
    right = sum(
        text is not None and q.is_right(text)
        for q, text in zip(outcome.questions, outcome.texts, strict=True)
    )
    write(f"{right} of {count} answers are right, {outcome.equal} texts are those of one process.")
    identical = as_planned and outcome.equal == count
    mark = ("right  ", "bold green") if identical else ("WRONG  ", "bold red")
    write(Text.assemble(mark, "all texts are identical" if identical else "texts DIFFER"))
    return identical
