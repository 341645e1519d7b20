# SPDX-License-Identifier: Apache-2.0
"""`weft demo --kill R`: a rank dies during generation, and the survivors continue.

Every rank has the whole model except for the experts; each expert is on two ranks. When a rank
dies, the survivors recover, return to the last token that all of them completed, and continue in
the same memory. Then they answer the dead rank's questions.
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
    LAYER_TIMEOUT,
    NEW_TOKENS,
    QUESTIONS,
    Answers,
    Question,
    answer_in_one_process,
    load_model,
    read_questions,
)
from weft.errors import GroupError
from weft.group import Group
from weft.launcher import launch
from weft.moe import ExpertWeights, MoEConfig, balance

KILL_AFTER_TOKENS = 10  # generated tokens before the victim is killed


@dataclass(slots=True)
class SurvivorResult:
    """Results of one surviving rank.

    Attributes:
        texts: Texts by question number.
        tokens: Number of generated tokens.
        kept_tokens: Tokens per sentence at the recovery.
        prefix: The first sentence's text at the recovery.
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
class KillDemoResult:
    """Answers of one process and of the survivors; `ranks` has None for the dead rank."""

    questions: list[Question]
    single_process: Answers
    ranks: Sequence[SurvivorResult | None]

    @property
    def living(self) -> list[SurvivorResult]:
        """Results of the survivors."""
        return [survivor for survivor in self.ranks if survivor is not None]

    @property
    def texts(self) -> list[str | None]:
        """The survivors' texts in the order of the questions."""
        texts = {
            number: text for survivor in self.living for number, text in survivor.texts.items()
        }
        return [texts.get(number) for number in range(len(self.questions))]

    @property
    def num_equal(self) -> int:
        """Number of texts that are identical to those of one process."""
        return sum(a == b for a, b in zip(self.texts, self.single_process.texts, strict=True))


def run(ranks: int, device: str, victim: int, questions: int = QUESTIONS) -> KillDemoResult:
    """Answer the questions on ranks, of which `victim` is killed, then in this process."""
    selected = read_questions(CHECKPOINT / "questions.jsonl")[:questions]
    parts = launch(
        rank_body, selected, victim, ranks=ranks, device=device, timeout=3600, tolerate_deaths=True
    )
    return KillDemoResult(selected, answer_in_one_process(selected, device), parts)


def rank_body(group: Group, questions: list[Question], victim: int) -> SurvivorResult:
    """Answer this rank's part of the questions, then some of the dead rank's questions."""
    generator = BatchGenerator(group, questions, victim)
    try:
        numbers = range(len(questions))
        generator.generate([numbers[rank :: group.size] for rank in range(group.size)])
        if generator.result.dead:
            unanswered = [i for rank in generator.result.dead for i in numbers[rank :: group.size]]
            living = group.living
            parts: list[Sequence[int]] = [()] * group.size
            for index, rank in enumerate(living):
                parts[rank] = unanswered[index :: len(living)]
            generator.generate(parts)
        return generator.result
    finally:
        generator.close()


class BatchGenerator:
    """A rank's model with weft's layers. All ranks generate their batches token by token."""

    def __init__(self, group: Group, questions: list[Question], victim: int) -> None:
        from transformers import AutoTokenizer

        self.group, self.victim, self.result = group, victim, SurvivorResult()
        self._tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT, local_files_only=True)
        self._prompts = [question.prompt for question in questions]
        self._lengths = [len(ids) for ids in self._tokenizer(self._prompts)["input_ids"]]
        self._model = load_model().to(group.device)
        config = MoEConfig.from_hf(self._model.config)
        max_tokens = max(self._lengths) * -(-len(questions) // group.size)
        experts = config.routing.num_experts
        replicas = balance([1] * experts, group.size, replicas=experts)
        self._layers: list[weft.MoE] = []
        for block in self._model.model.layers:
            weights = partial(_select_weights, block.mlp.experts, group.device)
            if self._layers:
                layer = self._layers[0].sibling(weights)
            else:
                layer = weft.MoE(
                    group,
                    config,
                    weights,
                    max_tokens=max_tokens,
                    replicas=replicas,
                    mode="throughput",
                    timeout=LAYER_TIMEOUT,
                )
            self._layers.append(layer)
            block.mlp.experts = _Experts(layer, self)
        self.rows = 0  # maximum row count of any rank in this step
        self._offset = 0  # tokens since the last recovery when this batch started

    def close(self) -> None:
        """Free the layers' memory."""
        for layer in self._layers:
            layer.close()

    def generate(self, parts: Sequence[Sequence[int]]) -> None:
        """Answer the questions `parts[rank]`; all ranks generate one token per step.

        A rank without questions generates the first answer again, because peers need its experts.
        """
        part = parts[self.group.rank]
        numbers = list(part) or [0]
        batches = [[self._lengths[i] for i in indices] or [self._lengths[0]] for indices in parts]
        max_rows = max(len(lengths) * max(lengths) for lengths in batches)
        batch = _Batch(self._tokenizer, [self._prompts[i] for i in numbers], self._model)
        last_step_time = time.perf_counter()
        failed_at: float | None = None
        while len(batch.tokens) < NEW_TOKENS:
            self.rows = max(map(len, batches)) if batch.tokens else max_rows
            if self.group.rank == self.victim and len(batch.tokens) == KILL_AFTER_TOKENS:
                # Kill at a random time during the next tokens.
                delay = random.uniform(
                    0.0, 2 * (time.perf_counter() - last_step_time) / KILL_AFTER_TOKENS
                )
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            try:
                step = batch.step()
                self._layers[0].check()  # on a GPU, errors of a broken round are raised here
            except GroupError:
                failed_at = failed_at or last_step_time
                self._recover(batch)
                continue
            batch.tokens.append(step)
            last_step_time = time.perf_counter()
            if failed_at is not None:
                self.result.pause, failed_at = (
                    max(self.result.pause, last_step_time - failed_at),
                    None,
                )
        self._offset += NEW_TOKENS
        texts = batch.texts()
        if part:
            self.result.texts |= dict(zip(part, texts, strict=True))
            self.result.tokens += NEW_TOKENS * len(texts)

    def _recover(self, batch: _Batch) -> None:
        recovery = self.group.recover()
        finished = min(recovery.finished.values()) // len(self._layers)
        # A rank may be one step ahead of others, so all return to the last step that all completed.
        batch.truncate(finished - self._offset)
        self._offset = -len(batch.tokens)
        self.result.dead = tuple(sorted({*self.result.dead, *recovery.dead}))
        self.result.recovery = max(self.result.recovery, recovery.seconds)
        self.result.kept_tokens = len(batch.tokens)
        self.result.prefix = batch.texts()[0] if batch.tokens else ""


class _Batch:
    """A batch of sentences and the model's cache."""

    def __init__(self, tokenizer: Any, prompts: list[str], model: Any) -> None:
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        self._tokenizer, self._model = tokenizer, model
        self._ids = batch["input_ids"].to(model.device)
        self._mask = batch["attention_mask"].to(model.device)
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # 5.23
        self.tokens: list[torch.Tensor] = []
        self.truncate(0)

    def step(self) -> torch.Tensor:
        """Generate the next token of each sentence."""
        num_done = len(self.tokens)
        new = self.tokens[-1][:, None] if num_done else self._ids
        mask = torch.cat([self._mask, self._mask.new_ones(len(new), num_done)], dim=1)
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
        """Remove the tokens of `step` and later steps."""
        from transformers import DynamicCache

        del self.tokens[step:]
        if step == 0:
            self._cache = DynamicCache(config=self._model.config)
        else:
            length = self._ids.shape[1] + step - 1
            for layer in self._cache.layers:  # some layers have already run the broken step
                if (surplus := layer.get_seq_length() - length) > 0:
                    layer.crop(-surplus)

    def texts(self) -> list[str]:
        """Decode the sentences, each up to its end-of-sequence token."""
        ends = set(self._model.generation_config.eos_token_id)
        rows = torch.stack(self.tokens, dim=1).tolist()
        ends_at = [next((i for i, token in enumerate(r) if token in ends), len(r)) for r in rows]
        trimmed = [row[: end + 1] for row, end in zip(rows, ends_at, strict=True)]
        return list(self._tokenizer.batch_decode(trimmed, skip_special_tokens=True))


class _Experts(nn.Module):
    """Module that replaces the model's experts by a weft layer."""

    def __init__(self, layer: weft.MoE, generator: BatchGenerator) -> None:
        super().__init__()
        self._layer, self._writer = layer, generator

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Run the experts on this rank's `[tokens, hidden]`."""
        routing = {"topk_ids": ids.contiguous(), "topk_weights": weights.float().contiguous()}
        return self._layer(x.contiguous(), **routing, rows=self._writer.rows)


def _select_weights(experts: Any, device: torch.device, local: tuple[int, ...]) -> ExpertWeights:
    ids = torch.tensor(local, device=device)
    return ExpertWeights(experts.gate_up_proj.detach()[ids], experts.down_proj.detach()[ids])


def print_result(console: Console, result: KillDemoResult, victim: int) -> bool:
    """Print a recovered sentence, times and a comparison; return whether all texts match."""
    write = partial(console.print, highlight=False)
    count, living = len(result.questions), result.living
    is_as_planned = result.ranks[victim] is None and all(
        survivor.dead == (victim,) for survivor in living
    )
    if is_as_planned:
        rank, first = next((r, each) for r, each in enumerate(result.ranks) if each is not None)
        number = min(first.texts)
        prefix, rest = first.prefix, first.texts[number].removeprefix(first.prefix)
        write(
            Text.assemble(
                (f"rank {rank}  ", "dim"),
                f"{result.questions[number].question} ",
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
        dead = sorted({rank for survivor in living for rank in survivor.dead})
        write(f"\nRank {victim} should have been killed, but these ranks died: {dead}")
    right = sum(
        text is not None and q.is_correct(text)
        for q, text in zip(result.questions, result.texts, strict=True)
    )
    write(
        f"{right} of {count} answers are correct, {result.num_equal} texts match those of one "
        "process."
    )
    is_identical = is_as_planned and result.num_equal == count
    verdict_text = ("right  ", "bold green") if is_identical else ("WRONG  ", "bold red")
    write(
        Text.assemble(verdict_text, "all texts are identical" if is_identical else "texts DIFFER")
    )
    return is_identical
