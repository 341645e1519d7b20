# SPDX-License-Identifier: Apache-2.0
"""`weft demo --kill R`: a rank dies while the model writes, and the survivors write on.

Every rank has the whole model but for the experts, of which each is on two ranks. A rank that loses
a peer in the middle of a token recovers with the others, goes back to the last token that all of
them finished, and goes on in the same memory. Then the survivors answer the dead rank's questions.
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

WRITTEN = 10  # tokens of each sentence that the dying rank writes


@dataclass(slots=True)
class Survivor:
    """What one rank wrote.

    texts: by the question's number.   tokens: written.
    stopped: tokens of each sentence that were kept when the survivors had agreed.
    begun: the first sentence's text then.
    recovery, pause: seconds of `group.recover`, and from one token to the next across it.
    """

    texts: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    stopped: int = 0
    begun: str = ""
    dead: tuple[int, ...] = ()
    recovery: float = 0.0
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The whole demo. `ranks` has None for the rank that died."""

    asked: list[Question]
    alone: Answers
    ranks: Sequence[Survivor | None]

    @property
    def living(self) -> list[Survivor]:
        """The survivors' parts."""
        return [each for each in self.ranks if each is not None]

    @property
    def texts(self) -> list[str | None]:
        """What the survivors answered, in the order of the questions."""
        found = {at: text for each in self.living for at, text in each.texts.items()}
        return [found.get(at) for at in range(len(self.asked))]

    @property
    def equal(self) -> int:
        """Texts that are identical to those of one process."""
        return sum(a == b for a, b in zip(self.texts, self.alone.texts, strict=True))


def run(ranks: int, device: str, victim: int, questions: int = QUESTIONS) -> Outcome:
    """Answer on ranks of which `victim` dies, then in this process."""
    asked = read_questions(CHECKPOINT / "questions.jsonl")[:questions]
    found = launch(
        rank_body, asked, victim, ranks=ranks, device=device, timeout=3600, tolerate_deaths=True
    )
    return Outcome(asked, answer_alone(asked, device), found)


def rank_body(group: Group, asked: list[Question], victim: int) -> Survivor:
    """What every rank does: answer its part, then its share of a dead rank's part."""
    writer = Writer(group, asked, victim)
    try:
        everything = range(len(asked))
        writer.write([everything[rank :: group.size] for rank in range(group.size)])
        if writer.found.dead:
            left = [at for rank in writer.found.dead for at in everything[rank :: group.size]]
            living = group.living
            parts: list[Sequence[int]] = [()] * group.size
            for place, rank in enumerate(living):
                parts[rank] = left[place :: len(living)]
            writer.write(parts)
        return writer.found
    finally:
        writer.close()


class Writer:
    """A rank's model, its layers on weft, and the greedy writing of batches in step with others."""

    def __init__(self, group: Group, asked: list[Question], victim: int) -> None:
        from transformers import AutoTokenizer

        self.group, self.victim, self.found = group, victim, Survivor()
        self._tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
        self._prompts = [each.prompt for each in asked]
        self._lengths = [len(ids) for ids in self._tokenizer(self._prompts)["input_ids"]]
        self._model = load_model().to(group.device)
        config = MoEConfig.from_hf(self._model.config)
        longest = max(self._lengths) * -(-len(asked) // group.size)
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
        self.rows = 0  # of the rank with most, in this step
        self._offset = 0  # steps since the last recovery before the first of this batch

    def close(self) -> None:
        """Give the layers' memory back."""
        for layer in self._layers:
            layer.close()

    def write(self, parts: Sequence[Sequence[int]]) -> None:
        """Answer the questions `parts[rank]`, one token of each in a step, all ranks in step.

        A rank without any writes the first answer again, for its experts are needed.
        """
        mine = parts[self.group.rank]
        numbers = list(mine) or [0]
        batches = [[self._lengths[at] for at in part] or [self._lengths[0]] for part in parts]
        widest = max(len(each) * max(each) for each in batches)
        sentences = _Sentences(self._tokenizer, [self._prompts[at] for at in numbers], self._model)
        before = time.perf_counter()
        lost: float | None = None
        while len(sentences.written) < NEW_TOKENS:
            self.rows = max(map(len, batches)) if sentences.written else widest
            if self.group.rank == self.victim and len(sentences.written) == WRITTEN:
                # Somewhere within the next tokens, not at a place that suits the others.
                delay = random.uniform(0.0, 2 * (time.perf_counter() - before) / WRITTEN)
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            try:
                step = sentences.step()
                self._layers[0].check()  # on a GPU a broken round shows here
            except GroupError:
                lost = lost or before
                self._recover(sentences)
                continue
            sentences.written.append(step)
            before = time.perf_counter()
            if lost is not None:
                self.found.pause, lost = max(self.found.pause, before - lost), None
        self._offset += NEW_TOKENS
        texts = sentences.texts()
        if mine:
            self.found.texts |= dict(zip(mine, texts, strict=True))
            self.found.tokens += NEW_TOKENS * len(texts)

    def _recover(self, sentences: _Sentences) -> None:
        recovery = self.group.recover()
        finished = min(recovery.finished.values()) // len(self._layers)
        # A rank may be one step ahead of another: all go back to what all have.
        sentences.back_to(finished - self._offset)
        self._offset = -len(sentences.written)
        self.found.dead = tuple(sorted({*self.found.dead, *recovery.dead}))
        self.found.recovery = max(self.found.recovery, recovery.seconds)
        self.found.stopped = len(sentences.written)
        self.found.begun = sentences.texts()[0] if sentences.written else ""


class _Sentences:
    """A batch of sentences, and the model's cache of them."""

    def __init__(self, tokenizer: Any, prompts: list[str], model: Any) -> None:
        given = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        self._tokenizer, self._model = tokenizer, model
        self._ids = given["input_ids"].to(model.device)
        self._mask = given["attention_mask"].to(model.device)
        takes = inspect.signature(model.forward).parameters
        self._cache_is = "cache" if "cache" in takes else "past_key_values"  # transformers 5.23
        self.written: list[torch.Tensor] = []
        self.back_to(0)

    def step(self) -> torch.Tensor:
        """The next token of each sentence."""
        done = len(self.written)
        new = self.written[-1][:, None] if done else self._ids
        mask = torch.cat([self._mask, self._mask.new_ones(len(new), done)], dim=1)
        place = (mask.cumsum(1) - 1).clamp_min(0)[:, -new.shape[1] :]
        with torch.inference_mode():
            logits = self._model(
                input_ids=new,
                attention_mask=mask,
                position_ids=place,
                logits_to_keep=1,
                **{self._cache_is: self._cache},
            ).logits
            chosen: torch.Tensor = logits[:, -1].argmax(-1)
            return chosen

    def back_to(self, step: int) -> None:
        """Forget what was written from this step on."""
        from transformers import DynamicCache

        del self.written[step:]
        if step == 0:
            self._cache = DynamicCache(config=self._model.config)
        else:
            kept = self._ids.shape[1] + step - 1
            for layer in self._cache.layers:  # the broken step has come to some of them
                if (more := layer.get_seq_length() - kept) > 0:
                    layer.crop(-more)

    def texts(self) -> list[str]:
        """What was written, up to the end of each sentence."""
        ends = set(self._model.generation_config.eos_token_id)
        rows = torch.stack(self.written, dim=1).tolist()
        last = [next((at for at, token in enumerate(r) if token in ends), len(r)) for r in rows]
        cut = [row[: at + 1] for row, at in zip(rows, last, strict=True)]
        return list(self._tokenizer.batch_decode(cut, skip_special_tokens=True))


class _Experts(nn.Module):
    """In the place of the model's experts: the same call, by weft."""

    def __init__(self, layer: weft.MoE, writer: Writer) -> None:
        super().__init__()
        self._layer, self._writer = layer, writer

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """`[tokens, hidden]` of this rank -> `[tokens, hidden]`."""
        given = {"topk_ids": ids.contiguous(), "topk_weights": weights.float().contiguous()}
        return self._layer(x.contiguous(), **given, rows=self._writer.rows)


def _weights(experts: Any, device: torch.device, local: tuple[int, ...]) -> ExpertWeights:
    at = torch.tensor(local, device=device)
    return ExpertWeights(experts.gate_up_proj.detach()[at], experts.down_proj.detach()[at])


def show(console: Console, outcome: Outcome, victim: int) -> bool:
    """Print a sentence that went on, the times and how the texts compare; return if all agree."""
    say = partial(console.print, highlight=False)
    count, living = len(outcome.asked), outcome.living
    alone = outcome.ranks[victim] is None and all(each.dead == (victim,) for each in living)
    if alone:
        rank, first = next((r, each) for r, each in enumerate(outcome.ranks) if each is not None)
        at = min(first.texts)
        begun, rest = first.begun, first.texts[at].removeprefix(first.begun)
        say(
            Text.assemble(
                (f"rank {rank}  ", "dim"),
                f"{outcome.asked[at].question} ",
                (begun.strip(), "bold"),
                (f" [rank {victim} is killed] ", "red"),
                (rest.rstrip(), "bold"),
            )
        )
        recovery, pause = (max(getattr(e, n) for e in living) for n in ("recovery", "pause"))
        say(
            f"\nRank {victim} was killed after token {first.stopped} of each sentence. The others "
            f"recovered in {recovery * 1e3:.0f} ms,\nwrote the next token {pause * 1e3:.0f} ms "
            "after the one before, and answered its questions, too."
        )
    else:
        gone = sorted({rank for each in living for rank in each.dead})
        say(f"\nRank {victim} was to die, and these did: {gone}")
    right = sum(
        text is not None and q.is_right(text)
        for q, text in zip(outcome.asked, outcome.texts, strict=True)
    )
    say(f"{right} of {count} answers are right, {outcome.equal} texts are those of one process.")
    good = alone and outcome.equal == count
    mark = ("right  ", "bold green") if good else ("WRONG  ", "bold red")
    say(Text.assemble(mark, "all texts are identical" if good else "texts DIFFER"))
    return good
